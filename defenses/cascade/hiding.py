"""Look up what was measured of hardened plans: what CompNodes read, and which hardening hides enough for least."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hiddenlab.errors import InputError
from hiddenlab.text import count_of

COMMAND = "hiddenlab eval hardening"


@dataclass(frozen=True)
class Measured:
    """What was measured of one hardening, on the built-in model.

    Attributes:
        harden: its spec. alpha, c: of the plan.
        others, at_most: share of others' tokens that a CompNode reads, and the end of its 95 % interval.
        own: share of its own tokens that it reads.
        over_plain: time over the plain model's. client_share: of the operations of a pass. prompts: how many.
    """

    harden: str
    alpha: int
    c: int
    others: float
    at_most: float
    own: float
    over_plain: float
    client_share: float
    prompts: int


MEASURED = (
    Measured("secret-maps", 4, 8, 1.0, 1.0, 1.0, 5.0, 0.0, 20),
    Measured("masked-sums", 4, 8, 1.0, 1.0, 1.0, 11.24, 0.0, 20),
    Measured("client:first=1,last=1", 4, 8, 1.0, 1.0, 1.0, 4.16, 0.258, 20),
    Measured("client:first=2,last=2", 4, 8, 1.0, 1.0, 1.0, 3.81, 0.311, 20),
    Measured("client:first=4,last=4", 4, 8, 1.0, 1.0, 1.0, 3.72, 0.417, 20),
    Measured("client:first=8,last=8", 4, 8, 1.0, 1.0, 1.0, 2.7, 0.629, 20),
    Measured("client:first=4,last=4+secret-maps+masked-sums", 4, 8, 0.9812, 1.0, 0.9833, 8.8, 0.417, 20),
    Measured("shares", 4, 8, 0.0, 0.0, 0.0, 5.57, 0.23, 0),
)


def hiding(share: float, known: Sequence[Measured] | None = None) -> list[Measured]:
    """Return the hardenings that leave a CompNode less than a share of others' tokens, the cheapest in time first.

    Only those count that take less of the client than computing all himself.

    Args:
        share: of others' tokens, which the whole interval must stay below. known: default ``MEASURED``.

    Raises:
        InputError: the share is not between 0 and 1.
    """
    if not 0 < share <= 1:
        raise InputError(
            f"--hide is a share of others' tokens above 0 and up to 1, such as 0.05; not {share:g}"
        )
    fit = [
        one for one in (MEASURED if known is None else known) if one.at_most < share and one.client_share < 1
    ]
    return sorted(fit, key=lambda one: (one.over_plain, one.client_share))


def described(share: float) -> dict[str, Any]:
    """Return what fits, and a sentence for each that does, or one that none does.

    Raises:
        InputError: see ``hiding``.
    """
    fit = hiding(share)
    of = f"of {count_of(len(MEASURED), 'hardening')} measured on the built-in model ({COMMAND})"
    less = f"a CompNode less than {share:.1%} of others' tokens"
    if not fit:
        lines = [f"none {of} leaves {less}, below the cost of computing everything at the client."]
    else:
        choice = f"--harden {fit[0].harden!r}."
        if len(fit) > 1:
            choice = f"in least time {choice} Choose by the client's work as well:"
        lines = [f"{len(fit)} {of} {'leave' if len(fit) > 1 else 'leaves'} {less}: {choice}"]
        lines += [_sentence(one) for one in fit]
    return {"share": share, "measured": len(MEASURED), "fit": [asdict(one) for one in fit], "lines": lines}


def _sentence(one: Measured) -> str:
    cost = (
        f"{one.over_plain:.1f} times the plain model's time, {one.client_share:.0%} of the work at the client"
    )
    if not one.prompts:
        return f"{one.harden}: a node reads nothing, by construction, unless both join what they get; {cost}"
    others = f"{one.others:.1%} of others' tokens (at most {one.at_most:.1%}, {one.prompts} prompts)"
    worse = "; noise makes answers worse" if "noise" in one.harden else ""
    return (
        f"{one.harden}, --alpha {one.alpha} --c {one.c}: a CompNode reads {others} and {one.own:.0%} of its own; "
        f"{cost}{worse}"
    )
