"""Define the command line, one module for each verb; nothing here imports torch before a verb runs."""

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer import Option
from typer.core import TyperGroup

from hiddenlab import __version__
from hiddenlab.cli import (
    attack,
    bench,
    capture,
    cascade,
    eval,
    import_states,
    ledger,
    listing,
    report,
    rerun,
)
from hiddenlab.cli.console import accept_any_text, stderr, stdout
from hiddenlab.errors import HiddenlabError, HiddenlabWarning

USER_ERROR, INTERRUPTED = 2, 130
VALIDATOR_PREFIX = "Value error, "  # which pydantic puts before the message of a check


@contextmanager
def _warnings_as_lines() -> Iterator[None]:
    """Print warnings meant for the user as one line each, without the place in the code."""
    with warnings.catch_warnings():
        others = warnings.showwarning

        def show(message: Any, category: type[Warning], *place: Any, **more: Any) -> None:
            if issubclass(category, HiddenlabWarning):
                stderr().print(str(message), soft_wrap=True)
            else:
                others(message, category, *place, **more)

        warnings.showwarning = show
        yield


class Verbs(TyperGroup):
    """Reports errors that a user can cause as one line on stderr, with an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            with _warnings_as_lines():
                return super().invoke(ctx)
        except typer.BadParameter as error:
            error.message = error.message.removeprefix(VALIDATOR_PREFIX)
            raise
        except HiddenlabError as error:
            stderr().print(f"error: {error}", style="red", soft_wrap=True)
            raise typer.Exit(USER_ERROR) from None
        except KeyboardInterrupt:
            stderr().print("interrupted")
            raise typer.Exit(INTERRUPTED) from None


app = typer.Typer(
    name="hiddenlab",
    cls=Verbs,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Attack and defend the hidden states of language models.",
)


def _show_version(asked: bool) -> bool:
    if asked:
        stdout().print(f"hiddenlab {__version__}")
        raise typer.Exit
    return asked


@app.callback()
def _options(
    version: Annotated[
        bool,
        Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    pass


app.command("attack")(attack.attack)
app.command("capture")(capture.capture)
app.command("import")(import_states.import_)
app.command("eval")(eval.eval_)
app.command("bench")(bench.bench)
app.command("report")(report.report)
app.command("rerun")(rerun.rerun)
app.command("list")(listing.list_)
app.add_typer(cascade.app, name="cascade")
app.add_typer(ledger.app, name="verify")  # the ledger's commands belong to `verify`


def main() -> None:
    """Run the command line; the entry point of ``hiddenlab``."""
    accept_any_text()
    try:
        app()
    except OSError as error:
        # Raised by printing to a full disk or a closed terminal; errors of files that are read have their own messages.
        print(f"error: {error.strerror or error}", file=sys.stderr)
        sys.exit(USER_ERROR)
