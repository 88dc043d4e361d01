"""Define the errors a user can cause, with one base class, so that the command line prints one clear line."""

from __future__ import annotations

from hiddenlab.text import visible


class HiddenlabError(Exception):
    """Base of every error whose message is meant for the user: what is wrong, and what would be right.

    The message is one line; control characters in it, which may come from files and models, are shown as symbols.
    """

    def __str__(self) -> str:
        return visible(super().__str__())


class InputError(HiddenlabError):
    """The request cannot be carried out as given (bad file, option, model, layer …)."""


class UnknownNameError(HiddenlabError):
    """A name that no registry knows; the message carries the nearest known names."""


NEEDS_CODE = (
    "it runs the defense's code, which this attacker does not know"  # of attacks that release own texts
)


class NotApplicableError(HiddenlabError):
    """An observation does not meet an attack's stated needs; recorded as such, never as a zero."""


class WorkersLostError(HiddenlabError):
    """Every worker that shared some work was lost; what was done before is kept."""


class HiddenlabWarning(UserWarning):
    """Something that the user should know, and that stops nothing; the command line prints it as one line."""
