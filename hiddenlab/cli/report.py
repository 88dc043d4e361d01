"""Write HTML, Markdown and plots of one or more runs (``hiddenlab report``)."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from hiddenlab.cli.console import stdout


def report(
    runs: Annotated[
        list[Path],
        Argument(metavar="RUN…", help="Run directories, tables of 'eval' (NAME.json), or its folder."),
    ],
    out: Annotated[
        Path | None, Option("--out", metavar="DIR", help="Default: report/ beside the first run.")
    ] = None,
) -> None:
    """Write a report of runs and experiments: what came back, prompts with their tokens marked, tables and plots."""
    from hiddenlab.report.markdown import write_report

    for path in write_report(runs, out or runs[0].resolve().parent / "report"):
        stdout().print(str(path), soft_wrap=True)
