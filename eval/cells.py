"""Run experiments as data: measure each cell once, and make a table of the cells.

A cell's result depends only on its measure and its spec, and is kept under a digest of both. So an interrupted
experiment resumes where it was, two tables share their common cells, and nothing is measured twice.
"""

import json
import secrets
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, NotRequired

from pydantic import with_config
from typing_extensions import TypedDict

from hiddenlab import registry
from hiddenlab.config import AttackConfig
from hiddenlab.errors import HiddenlabError, InputError, WorkersLostError
from hiddenlab.eval.files import contents_of
from hiddenlab.eval.parallel import Crew
from hiddenlab.records import RECORD, commit_name, finite, read_run
from hiddenlab.registry import stages_of
from hiddenlab.report.tables import Figure, Scale
from hiddenlab.types import Progress, silent
from hiddenlab.utils.digests import digest_of
from hiddenlab.utils.environment import describe_environment
from hiddenlab.utils.files import write_file
from hiddenlab.utils.schema import CLOSED, OPEN, Finite, read

FORMAT = 1
RESULT = "result.json"
RUN = "run"  # an attack cell's folder holds a run, which 'hiddenlab report' reads
MEASURED, NOT_RUN = "measured", "not run"
SCALES = ("small", "paper")
OTHER_MODEL = (
    "The paper's columns are of other models and of texts of FineWeb-Edu (1,000 in Tables 1, 2, 13 and 18 to 21); they "
    "are comparable in kind, not digit by digit."
)
FINEWEB = "hf:HuggingFaceFW/fineweb-edu:CC-MAIN-2024-10:train:text"

Figures = dict[str, dict[str, float]]  # name -> value, low, high, n
Result = dict[str, Any]  # of the form ``CellResult``


class Worded(NamedTuple):
    """What a measure returns that says more than numbers; the words become columns of the cell's row."""

    figures: Figures
    words: dict[str, str]


@with_config(OPEN)
class Made(TypedDict, total=False):
    """The commits of the code that measured a cell, and its environment."""

    commits: list[str]
    code: dict[str, Any]


@with_config(CLOSED)
class CellResult(TypedDict):
    """The result of a cell as its folder keeps it."""

    format: Literal[1]
    measure: str
    spec: dict[str, Any]
    digest: str
    status: Literal["measured", "not run"]
    reason: str | None
    figures: dict[str, Figure]
    words: NotRequired[dict[str, str]]
    seconds: Finite
    made: Made


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The options of every experiment: on which model and texts, and how many; ``None`` is the experiment's own choice.

    ``scale`` is ``small`` (a laptop, the shipped prompts) or ``paper`` (the paper's size and texts).
    """

    model: str = "builtin"
    layers: tuple[int, ...] | None = None
    limit: int | None = None
    max_tokens: int | None = None
    prompts: str | None = None
    scale: str = "small"
    seed: int = 0
    device: str = "auto"
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.scale not in SCALES:
            raise InputError(f"unknown scale {self.scale!r}; known are {', '.join(SCALES)}")

    def source(self, limit: int = 50, max_tokens: int = 50) -> dict[str, Any]:
        """Return which texts are used, how many and how long; the arguments are the defaults at the small scale."""
        paper = self.scale == "paper"
        return {
            "prompts": self.prompts or (FINEWEB if paper else None),
            "limit": self.limit or (1000 if paper else limit),
            "max_tokens": self.max_tokens or max_tokens,
        }

    def at(self, default: Sequence[int]) -> tuple[int, ...]:
        """Return the layers asked for, else those of the default that the model has."""
        from hiddenlab.models.load import load_config, resolve_model

        if self.layers is not None:
            return self.layers
        total = int(load_config(resolve_model(self.model)).num_hidden_layers)
        return tuple(layer for layer in default if layer <= total)

    def where(self) -> dict[str, Any]:
        """Return the model, seed, device and dtype, for a cell's spec."""
        return {"model": self.model, "seed": self.seed, "device": self.device, "dtype": self.dtype}


@dataclass(frozen=True)
class Cell:
    """One measurement of a table.

    Attributes:
        measure: name of the function that measures it (registry kind ``measures``).
        spec: its arguments, JSON values only.
        keys: labels of its row.
        paper: published figures for the same place, by column.
    """

    measure: str
    spec: Mapping[str, Any]
    keys: Mapping[str, Any]
    paper: Mapping[str, Any] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """A name for the measurement, with what is in the files that it names: another content is another cell."""
        files = contents_of(self.spec)
        return digest_of([FORMAT, self.measure, self.spec, *([files] if files else [])])

    def folder(self, home: Path) -> Path:
        """Return the folder in which the cell's result is kept."""
        return home / "cells" / f"{self.measure}-{self.digest}"


@dataclass(frozen=True)
class Experiment:
    """A table: its cells, the figures to show of each, and notes for its reader.

    Attributes:
        figures: names of figures with their labels, in order.
        notes: what is comparable with the paper, and what is not.
        fold: makes the rows of the table from those of the cells, where a row is not a cell.
        over: a key with numbers over which the picture shows every figure; without one it shows the first figure by row
            or layer.
        curves: what the numbers at the end of figures' names are, if the picture shows figures over them.
        against: a figure over which the picture shows those before it, one point per row.
        scales: of the two axes of ``curves``.
    """

    title: str
    cells: Sequence[Cell]
    figures: Mapping[str, str]
    notes: Sequence[str] = ()
    fold: Callable[[list[dict[str, Any]]], list[dict[str, Any]]] | None = None
    over: str | None = None
    curves: str | None = None
    against: str | None = None
    scales: tuple[Scale, Scale] = ("log", "linear")


def attack_cell(
    setting: Setting,
    keys: dict[str, Any],
    layer: int,
    channel: str = "identity",
    paper: Mapping[str, Any] | None = None,
    **options: Any,
) -> Cell:
    """Make an attack's cell; the channel's stages are joined by ``+``, and options are those of ``AttackConfig``."""
    defense = tuple(stage for stage in stages_of(channel) if stage != "identity")
    site = {"layer": layer, "stream": "resid" if layer else "embed"}
    spec = AttackConfig(**{**setting.where(), **setting.source(), **site, "defense": defense, **options})
    return Cell("attack", spec.to_json(), keys, paper or {})


def split_specs(text: str) -> list[str]:
    """Split specs at commas, each once; ``key=value`` without a name belongs to the spec before it."""
    specs: list[str] = []
    for part in (piece.strip() for piece in text.split(",")):
        if specs and "=" in part and ":" not in part.partition("=")[0]:
            specs[-1] += f",{part}"
        else:
            specs.append(part)
    return list(dict.fromkeys(specs))


def conduct(
    name: str,
    experiment: Experiment,
    home: Path,
    *,
    fresh: bool = False,
    workers: Crew | None = None,
    threads: int | None = None,
    measure: bool = True,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Measure the cells that are not measured yet, write the table to ``home`` and return it.

    Args:
        name: of the experiment.
        experiment: its cells.
        home: folder of results.
        fresh: measure all cells anew.
        workers: measure cells in these; None measures them in this process.
        threads: of torch, in this process.
        measure: if False, only earlier results enter the table, and the rest is "not measured yet".

    Raises:
        HiddenlabError: ``home`` cannot be written or workers do not see it, or a measure does not exist.
    """
    for cell in experiment.cells:
        registry.resolve("measures", cell.measure)
    unique = {cell.digest: cell for cell in experiment.cells}
    todo = [cell for cell in unique.values() if fresh or not is_measured(load_result(cell, home))]
    done = len(unique) - len(todo)
    todo = todo if measure else []
    progress(f"cells of {name}", done, len(unique))
    if workers is not None and todo:
        finished = _measured_apart(workers, todo, home, fresh, progress)
    else:
        if threads is not None:
            import torch

            torch.set_num_threads(threads)
        finished = (measure_cell(cell, home, fresh, progress) for cell in todo)
    results = dict[str, Result]()
    for result in finished:
        results[result["digest"]] = result
        done += 1
        progress(f"cells of {name}", done, len(unique))
    rows = [
        row_of(cell, results.get(cell.digest) or load_result(cell, home) or {}) for cell in experiment.cells
    ]
    table = {
        "format": FORMAT,
        "experiment": name,
        "title": experiment.title,
        "figures": dict(experiment.figures),
        "rows": rows if experiment.fold is None else experiment.fold(rows),
        "versions": list(
            dict.fromkeys(
                commit
                for row in rows
                if row["status"] == MEASURED and row["commit"]
                for commit in row["commit"].split(", ")
            )
        ),
        "notes": [*experiment.notes, *_source(experiment)],
        "over": experiment.over,
        "curves": experiment.curves,
        "against": experiment.against,
        "scales": list(experiment.scales),
        "command": shlex.join(describe_environment()["command"]),
    }
    write_file(home / f"{name}.json", json.dumps(finite(table), ensure_ascii=False, indent=1) + "\n")
    return table


def _source(experiment: Experiment) -> list[str]:
    """Return a note on models and texts, from the cells themselves, where no other note names the model."""
    specs = [cell.spec for cell in experiment.cells if cell.spec.get("model")]
    models = list(dict.fromkeys(str(spec["model"]) for spec in specs))
    if not models or any(f"Model {models[0]}" in note for note in experiment.notes):
        return []
    said = f"Model{'s' * (len(models) > 1)} {', '.join(models)}"
    dtypes = {spec["dtype"] for spec in specs if "dtype" in spec}
    if len(dtypes) == 1:
        said += f" in {dtypes.pop()}"
    texts = [spec for spec in specs if spec.get("limit")]
    if texts:
        where = {str(spec.get("prompts") or "the shipped set") for spec in texts}
        said += f"; {_span(texts, 'limit')} prompts of {', '.join(sorted(where))}"
        if all(spec.get("max_tokens") for spec in texts):
            said += f", cut to {_span(texts, 'max_tokens')} tokens"
    return [f"{said}."]


def _span(specs: Sequence[Mapping[str, Any]], name: str) -> str:
    """Return the smallest and the largest value of an option, or the only one."""
    values = [spec[name] for spec in specs]
    return f"{min(values)}" if min(values) == max(values) else f"{min(values)} to {max(values)}"


def _measured_apart(
    workers: Crew, cells: Sequence[Cell], home: Path, fresh: bool, progress: Progress
) -> Iterator[Result]:
    """Measure cells in workers, which write them into the same folder as this process would."""
    where = home.resolve()
    where.mkdir(parents=True, exist_ok=True)
    mark = where / f".workers-{secrets.token_hex(6)}"
    write_file(mark, "")
    try:
        workers.start(progress)
        tasks = [(cell, where, fresh) for cell in cells]
        for _, result in workers.share(_measure_task, tasks, before=(_see, mark), progress=progress):
            yield result
    except WorkersLostError as error:
        raise WorkersLostError(
            f"{error}; cells that were measured are kept in {home}, and the same command goes on from there"
        ) from None
    finally:
        mark.unlink(missing_ok=True)


def _see(state: dict[str, Any], note: Progress, mark: Path) -> None:
    """Check in a worker that it sees the folder of results."""
    if not mark.is_file():
        raise InputError(
            f"a worker's machine does not see {mark.parent}; name a folder that all share with --out"
        )


def _measure_task(state: dict[str, Any], note: Progress, task: tuple[Cell, Path, bool]) -> Result:
    """Measure a cell in a worker."""
    cell, home, fresh = task
    return measure_cell(cell, home, fresh, note)


def refusal(name: str, error: HiddenlabError) -> dict[str, Any]:
    """Return the table of an experiment that refuses its setting; it is not written to disk."""
    return {
        "format": FORMAT, "experiment": name, "title": name, "figures": {}, "rows": [], "versions": [],
        "notes": [f"not run: {error}"], "command": shlex.join(describe_environment()["command"]),
    }  # fmt: skip


def measure_cell(cell: Cell, home: Path, fresh: bool = False, progress: Progress = silent) -> Result:
    """Measure one cell and keep the result; a failed one keeps its reason, and is tried again next time."""
    folder = cell.folder(home)
    if fresh:
        _clear(folder)
    folder.mkdir(parents=True, exist_ok=True)
    measure = registry.resolve("measures", cell.measure)
    result: Result = {
        "format": FORMAT, "measure": cell.measure, "spec": dict(cell.spec), "digest": cell.digest,
        "status": MEASURED, "reason": None,
    }  # fmt: skip
    started = time.perf_counter()
    try:
        found = measure(dict(cell.spec), folder, progress)
        result |= found._asdict() if isinstance(found, Worded) else {"figures": found}
    except HiddenlabError as error:
        result |= {"status": NOT_RUN, "reason": str(error), "figures": {}}
    result["seconds"] = time.perf_counter() - started
    result["made"] = describe_environment()
    with suppress(HiddenlabError):  # another version may have resumed the run
        result["made"]["commits"] = (
            read_run(folder / RUN)[0].commits if (folder / RUN / RECORD).is_file() else []
        )
    write_file(folder / RESULT, json.dumps(finite(result), ensure_ascii=False, indent=1) + "\n")
    return result


def load_result(cell: Cell, home: Path) -> Result | None:
    """Load a cell's result, or the reason why it failed; None without one of this format and this cell."""
    try:
        result: Result = dict(read(cell.folder(home) / RESULT, CellResult))
    except InputError:
        return None
    of = replace(cell, measure=result["measure"], spec=result["spec"])
    return result if of.digest == result["digest"] == cell.digest else None


def is_measured(result: Result | None) -> bool:
    """Return whether a cell was measured; otherwise it is tried again."""
    return result is not None and result.get("status") == MEASURED


def row_of(cell: Cell, result: Result) -> dict[str, Any]:
    """Return a row of the table: its labels, the measured figures and the paper's."""
    made = result.get("made", {})
    return {
        "keys": dict(cell.keys),
        "words": result.get("words", {}),
        "figures": result.get("figures", {}),
        "paper": dict(cell.paper),
        "status": result.get("status", NOT_RUN),
        "reason": result.get("reason"),
        "commit": ", ".join(made.get("commits", ())) or commit_name(made.get("code", {})),
        "cell": f"{cell.measure}-{cell.digest}",
    }


def _clear(folder: Path) -> None:
    import shutil

    shutil.rmtree(folder, ignore_errors=True)
