"""Run experiments by name: ``hiddenlab eval``; one that cannot run does not end the others."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hiddenlab import registry
from hiddenlab.errors import HiddenlabError, InputError
from hiddenlab.eval.cells import Experiment, Setting, conduct, refusal
from hiddenlab.eval.parallel import Crew
from hiddenlab.report.tables import table_page
from hiddenlab.types import Progress, silent
from hiddenlab.utils.files import write_file


def run(
    names: Sequence[str],
    setting: Mapping[str, Any],
    options: Mapping[str, Any],
    home: Path,
    *,
    fresh: bool = False,
    workers: Crew | None = None,
    threads: int | None = None,
    measure: bool = True,
    progress: Progress = silent,
) -> list[dict[str, Any]]:
    """Run experiments, write their tables to ``home`` as JSON and Markdown, and return them.

    Args:
        names: of the experiments.
        setting: fields of ``Setting``.
        options: of the experiment itself, where there is one.
        home: folder of results.
        fresh, workers, threads, measure: see ``cells.conduct``.

    Raises:
        HiddenlabError: the folder cannot be written, the model is missing, or every experiment refuses the setting;
            nothing is measured then. Of several experiments, one that refuses the setting gives its reason, and its
            earlier files stay.
    """
    try:
        home.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot write into {home}: {error.strerror or error}") from None
    asked, refused = Setting(**setting), dict[str, HiddenlabError]()
    asked.at(())  # fail here if the model is missing, before any experiment does
    experiments = dict[str, Experiment]()
    for name in names:
        make = registry.resolve("experiments", name)
        try:
            experiments[name] = make(asked, **options)
        except HiddenlabError as error:
            refused[name] = error
    if not experiments:
        raise next(iter(refused.values()))
    tables = [refusal(name, error) for name, error in refused.items()]
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
        write_file(home / f"{name}.md", table_page(table))
        tables.append(table)
    return tables
