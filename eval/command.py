"""``hiddenlab eval``: run experiments by name; one that cannot run does not end the others."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.experiment import Experiment, Setting, conduct
from hiddenlab import registry
from hiddenlab.core import Progress, silent
from hiddenlab.errors import HiddenlabError
from hiddenlab.tables import markdown_table


def run(
    names: Sequence[str],
    setting: Mapping[str, Any],
    options: Mapping[str, Any],
    home: Path,
    *,
    fresh: bool = False,
    workers: int = 1,
    threads: int | None = None,
    measure: bool = True,
    progress: Progress = silent,
) -> list[dict[str, Any]]:
    """The tables of some experiments, written to ``home`` as JSON and Markdown.

    Args:
        setting: fields of ``Setting``. options: of the experiment itself, where there is one.

    Raises:
        HiddenlabError: the folder cannot be written; or an experiment or an option is wrong, and nothing is measured
            then. Of several experiments only those that the setting does not fit are left out, with the reason.
    """
    asked, experiments, refused = Setting(**setting), dict[str, Experiment](), list[HiddenlabError]()
    for name in names:
        make = registry.resolve("experiments", name)
        try:
            experiments[name] = make(asked, **options)
        except HiddenlabError as error:
            refused.append(error)
            experiments[name] = Experiment(name, [], {}, [f"not run: {error}"])
    if len(refused) == len(names):
        raise refused[0]
    tables = []
    for name, experiment in experiments.items():
        table = conduct(
            name,
            experiment,
            home,
            fresh=fresh,
            workers=workers,
            threads=threads,
            measure=measure,
            progress=progress,
        )
        try:
            (home / f"{name}.md").write_text(markdown_table(table), encoding="utf-8")
        except OSError as error:
            raise HiddenlabError(f"cannot write into {home}: {error.strerror or error}") from None
        tables.append(table)
    return tables
