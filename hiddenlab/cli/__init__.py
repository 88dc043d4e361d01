"""Define the command line, one module for each verb; nothing here imports torch before a verb runs."""

import sys
from typing import Any

import typer
from typer.core import TyperGroup

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
from hiddenlab.cli.console import accept_any_text, stderr
from hiddenlab.errors import HiddenlabError

USER_ERROR, INTERRUPTED = 2, 130


class Verbs(TyperGroup):
    """Reports errors that a user can cause as one line on stderr, with an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
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
