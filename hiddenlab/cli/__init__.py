"""Define the command line, one module for each verb; nothing here imports torch before a verb runs."""

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, TextIO

import typer
from typer import Option

from hiddenlab import __version__
from hiddenlab.cli.program import Group, LazyCommands, Program, accept_any_text, write_section
from hiddenlab.errors import HiddenlabError, HiddenlabWarning

USER_ERROR, INTERRUPTED = 2, 130
VALIDATOR_PREFIX = "Value error, "  # which pydantic puts before the message of a check


@contextmanager
def _warnings_as_lines() -> Iterator[None]:
    """Print warnings meant for the user as one line each; those of libraries go to the log file in the cache."""
    from hiddenlab.cli.console import logged

    with warnings.catch_warnings(), logged() as log:

        def show(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            if issubclass(category, HiddenlabWarning):
                _say(str(message))
            else:
                log(f"{category.__name__}: {message} ({filename}:{lineno})")

        warnings.showwarning = show
        yield


# group -> command -> where it is, and what it does. Help reads this table, so that it need not import the commands.
VERBS: dict[str, dict[str, tuple[str, str]]] = {
    "Recover prompts": {
        "demo": ("demo:demo", "Show three attacks on the built-in model, and explain each."),
        "attack": ("attack:attack", "Recover prompts from the hidden states of a model."),
        "capture": ("capture:capture", "Save hidden states as a defense releases them."),
        "import": ("import_states:import_", "Read hidden states that another program saved."),
    },
    "Study defenses": {
        "assess": ("assess:assess", "Say whether a defense holds against everything that the lab has."),
        "compare": ("compare:compare", "Attack the same prompts behind several defenses."),
        "eval": ("eval:eval_", "Run an experiment of a paper, its figures beside ours."),
        "bench": ("bench:bench", "Measure time, evaluated tokens and memory."),
    },
    "Host and audit": {
        "cascade": ("cascade:app", "Plan, run and serve inference that is sharded by tokens."),
        "verify": ("ledger:app", "Check whether a provider runs what it advertises."),
    },
    "Records": {
        "report": ("report:report", "Make HTML pages of runs and experiments."),
        "rerun": ("rerun:rerun", "Repeat a recorded run, or go on with an interrupted one."),
        "list": ("listing:list_", "List attacks, defenses, experiments and benches."),
    },
}


def _say(line: str, style: str | None = None) -> None:
    """Print a line on standard error; what prints it is imported only where there is something to say."""
    from hiddenlab.cli.console import stderr

    stderr().print(line, style=style, soft_wrap=True)


class Verbs(Group):
    """Imports a command when it is called; reports errors that a user can cause as one line, with an exit code."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = LazyCommands(
            {name: f"hiddenlab.cli.{place}" for verbs in VERBS.values() for name, (place, _) in verbs.items()}
        )

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands in groups."""
        for title, verbs in VERBS.items():
            write_section(formatter, title, [(name, text) for name, (_, text) in verbs.items()])

    def invoke(self, ctx: Any) -> Any:
        try:
            with _warnings_as_lines():
                return super().invoke(ctx)
        except typer.BadParameter as error:
            error.message = error.message.removeprefix(VALIDATOR_PREFIX)
            raise
        except HiddenlabError as error:
            _say(f"error: {error}", style="red")
            raise typer.Exit(USER_ERROR) from None
        except KeyboardInterrupt:
            _say("interrupted")
            raise typer.Exit(INTERRUPTED) from None
        except Exception as error:
            # A fault in code of the user's own is told by its place there; any other one is ours, and shown whole.
            from hiddenlab.code_files import failed_in

            if (where := failed_in(error)) is None:
                raise
            _say(f"error: {where}", style="red")
            raise typer.Exit(USER_ERROR) from None


app = Program("Attack and defend the hidden states of language models.", cls=Verbs, name="hiddenlab")


def _show_version(asked: bool) -> bool:
    if asked:
        print(f"hiddenlab {__version__}")
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


def main() -> None:
    """Run the command line; the entry point of ``hiddenlab``."""
    accept_any_text()
    try:
        app()
    except OSError as error:
        # Raised by printing to a full disk or a closed terminal; errors of files that are read have their own messages.
        print(f"error: {error.strerror or error}", file=sys.stderr)
        sys.exit(USER_ERROR)
