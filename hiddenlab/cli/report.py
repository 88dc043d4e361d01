"""``hiddenlab report``: Markdown, plots and coloured prompts of one or more runs."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from hiddenlab.cli.console import stdout


def report(
    runs: Annotated[list[Path], Argument(metavar="RUN…", help="Run directories.")],
    out: Annotated[
        Path | None, Option("--out", metavar="DIR", help="Default: report/ beside the first run.")
    ] = None,
) -> None:
    """Write a report of one or more runs: Markdown, PNG plots, and each prompt coloured on an HTML page."""
    from hiddenlab.report import write_report

    for path in write_report(runs, out or runs[0].resolve().parent / "report"):
        stdout().print(str(path), markup=False, highlight=False, soft_wrap=True)
