"""Record each run of ``hiddenlab verify`` with its plot, and show answers."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hiddenlab import registry
from hiddenlab.cli.console import bars, only_json, print_json, stderr, stdout
from hiddenlab.cli.verdicts import Verdict
from hiddenlab.errors import InputError
from hiddenlab.records import Recorder, RunRecord, check_writable
from hiddenlab.utils.digests import digest_of_files

if TYPE_CHECKING:
    from hiddenlab.types import Progress  # it imports torch, which no help text needs

PICTURE = "plot.png"
ROWS = ("requests", "files", "shares")  # lists of an answer with a row for each request, file or share
READ = ("path", "folder", "honest", "transcripts", "prompts", "requests")  # options that name files to read
SHOWN = 40  # files in a plot, those with the largest dangerous shares
QUIETLY = ("limits", "settings")  # parts of an answer that are shown with --verbose alone
SECRET = ("key",)  # options that no record holds


def conduct(
    command: str, *, json: bool, threads: int | None = None, runs_dir: Path = Path("runs"), keep: bool = True,
    key_env: str | None = None, **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """Run a command of the lab, record it and draw what it found.

    The record is created at the first sign of work, so that a misspelt name leaves none behind; whether it can be
    created is checked before. It holds the options (of a key only the name of its environment variable), a digest of
    the files read, the answer, and its rows as samples.

    Args:
        command: its name in the registry. json: whether standard output is for JSON alone. key_env: environment
            variable of the noise's key. options: of the function.

    Raises:
        HiddenlabError: as the function does.
    """
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    if key_env is not None:
        options["key"] = _key(key_env)
    if keep:
        check_writable(runs_dir)
    run = _Run(command, options | ({} if key_env is None else {"noise_key_env": key_env}), runs_dir, keep)
    with only_json(json), bars() as progress:
        try:
            function = registry.resolve("verify", command)
            result: dict[str, Any] = function(**options, progress=run.watching(progress))
        except KeyboardInterrupt:
            run.close("interrupted")
            raise
        except BaseException as error:
            run.close("failed", error=str(error))
            raise
        run.finish(result)
        run.draw(result)
    return result


class _Run:
    """A record that is created when there is something to record."""

    def __init__(self, command: str, options: Mapping[str, Any], runs_dir: Path, keep: bool) -> None:
        self.command, self.options, self.runs_dir, self.keep = command, options, runs_dir, keep
        self.recorder: Recorder | None = None

    def watching(self, progress: Progress) -> Progress:
        def watched(what: str, done: int, total: int) -> None:
            self.begin()
            progress(what, done, total)

        return watched

    def begin(self) -> Recorder:
        if self.recorder is None:
            spec = {name: _plain(value) for name, value in self.options.items() if name not in SECRET}
            sampling = self.options.get("sampling") or {}
            record = RunRecord(
                verb=f"verify-{self.command}", spec=spec, inputs_sha256=_digest(self.options),
                seeds={"seed": sampling["seed"]} if "seed" in sampling else {},
            )  # fmt: skip
            self.recorder = Recorder.create(record, runs_dir=self.runs_dir, keep=self.keep)
        return self.recorder

    def close(self, status: str, error: str | None = None) -> None:
        if self.recorder is not None:
            self.recorder.close(status, error=error)

    def finish(self, result: Mapping[str, Any]) -> None:
        recorder = self.begin()
        rows = {name: value for name, value in result.items() if name in ROWS and isinstance(value, list)}
        for row in (row for part in rows.values() for row in part):
            recorder.append(dict(row))
        recorder.record.prompts = len(recorder.samples)
        recorder.close("finished", {k: v for k, v in result.items() if k not in rows})

    def draw(self, result: Mapping[str, Any]) -> None:
        """Draw the answer beside the record; a plot that fails does not lose the answer."""
        if self.recorder is None or self.recorder.path is None:
            return
        screen = stderr()
        try:
            draw(self.command, result, self.recorder.path / PICTURE)
        except (ValueError, OSError, RuntimeError) as error:
            screen.print(f"no plot: {error}", soft_wrap=True)
        screen.print(f"recorded in {self.recorder.path}", soft_wrap=True)


def _key(name: str) -> str:
    if not (key := os.environ.get(name)):
        raise InputError(f"the environment variable {name} is not set")
    return key


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def _digest(options: Mapping[str, Any]) -> str | None:
    """Return a digest of the files that a command reads and does not write."""
    paths = [Path(options[name]) for name in READ if options.get(name)]
    files = [
        file for path in paths for file in (sorted(path.glob("*.jsonl")) if path.is_dir() else [path])
    ]  # fmt: skip
    return digest_of_files(file for file in files if file.is_file()) if files else None


# ---- plots


def draw(command: str, result: Mapping[str, Any], path: Path) -> None:
    """Draw what a command found, if it has a plot."""
    if plot := PICTURES.get(command):
        plot(result, path)


def _bytes(result: Mapping[str, Any], path: Path) -> None:
    from hiddenlab.report.bars import draw_bars

    if not result["bytes_per_output_token"]:
        return
    rows = [{"part": name, "bytes": value} for name, value in result["bytes"].items()]
    draw_bars(
        rows, "part", {"bytes": "bytes an output token"}, "What is sent beside the answers", path, False
    )


def _limits(result: Mapping[str, Any], path: Path) -> None:
    from hiddenlab.report.bars import draw_shares

    limits = {
        "distance": "fingerprint", "exponents": "proofs: exponents", "mantissa_mean": "proofs: mantissas, mean",
        "mantissa_median": "proofs: mantissas, median",
    }  # fmt: skip
    series = {
        label: [
            row[name] / result["limits"][name]
            for row in result["requests"]
            if row.get(name) is not None and result["limits"][name]
        ]
        for name, label in limits.items()
    }
    counts = ", ".join(f"{count} {name}" for name, count in result["counts"].items())
    draw_shares(
        series, "difference over what is allowed", f"Requests checked: {counts}", path, {"allowed": 1.0}
    )


def _scores(result: Mapping[str, Any], path: Path) -> None:
    from hiddenlab.report.bars import draw_shares

    verdict = result["verdict"] or {}
    alone = "margin" if result["summary"]["mean_margin"] is not None else "mismatch"
    score = str(verdict.get("score", alone))
    name = {"margin": "mean_margin", "mismatch": "same_token"}.get(score, score)
    series = {
        label: [row[name] for row in result.get(part, []) if row.get(name) is not None]
        for part, label in (("honest_requests", "honest"), ("requests", "under test"))
    }
    names = {True: "diverge", False: "do not diverge", None: "undecided"}
    suffix = f": {names[verdict['diverges']]}, p = {verdict['p']:.3g}" if verdict else ": no verdict"
    draw_shares(series, name.replace("_", " ") + ", of a request", f"Requests scored{suffix}", path)


def _classes(result: Mapping[str, Any], path: Path) -> None:
    from hiddenlab.report.bars import draw_bars

    rows = [
        {
            "file": f"{file['file']}: {file['class']}".replace("$", r"\$"),
            **{name: file[name] / file["tokens"] for name in ("suspicious", "dangerous")},
            "bits": file["bits_per_token"],
        }
        for file in result["files"]
        if file["tokens"]
    ]
    panels = {
        "suspicious": "suspicious, share",
        "dangerous": "dangerous, share",
        "bits": "bits a token, at most",
    }
    rows = sorted(rows, key=lambda row: -row["dangerous"])[:SHOWN]
    if rows:
        draw_bars(
            rows, "file", panels, "Audit: tokens by class, and what they could have carried", path, False
        )


def _theorems(result: Mapping[str, Any], path: Path) -> None:
    from hiddenlab.report.bars import draw_bars

    rates = [name for name in result if name.startswith("theorem_4") and "printed" not in name]
    rows = [{"bound": _readable(name), "bits": result[name]} for name in rates]
    draw_bars(
        rows, "bound", {"bits": "bits a token"}, "What an adversary who is not caught can send", path, False
    )


def _samples(result: Mapping[str, Any], path: Path) -> None:
    from hiddenlab.report.bars import draw_bars

    rows = [{**row, "share": f"{row['share']:.3g}"} for row in result["shares"]]
    panels = {name: name.replace("_", " ") for name in rows[0] if name not in ("share", "messages")}
    panels = panels or {"messages": "messages to verify"}
    draw_bars(rows, "share", panels, "Messages to verify by the share of dishonest messages", path)


PICTURES: dict[str, Callable[[Mapping[str, Any], Path], None]] = {
    "simulate": _bytes, "commit": _bytes, "check": _limits, "score": _scores, "audit": _classes, "bounds": _theorems,
    "sampling-rate": _samples,
}  # fmt: skip


# ---- on the screen


def show(
    result: dict[str, Any],
    title: str,
    rows: str | None = None,
    json: bool = False,
    left_out: Collection[str] = (),
    verdict: Verdict | None = None,
    verbose: bool = False,
) -> None:
    """Print an answer as JSON, or its verdict, its plain figures as a table, and its rows as another.

    Args:
        left_out: figures, of rows too, that are not shown. What was not measured (None) is not shown either.
        verdict: the sentence that stands first. verbose: show limits and settings too.
    """
    from hiddenlab.cli.show import figures_table, rows_table

    if json:
        print_json(result)
        return
    plain = {
        k: v
        for k, v in result.items()
        if v is not None and not isinstance(v, dict | list) and k not in ("format", *left_out)
    }
    for name, value in result.items():
        if isinstance(value, dict) and name not in left_out and (verbose or name not in QUIETLY):
            plain |= {f"{name}: {k}".replace("_", " "): v for k, v in value.items() if v is not None}
    screen = stdout()
    if verdict is not None:
        screen.print(verdict[0], style=verdict[1], soft_wrap=True)
    if plain:
        named = {_readable(name): value for name, value in plain.items()}
        screen.print(figures_table([{"figure": "value", **named}], title))
    if rows is not None:
        names = list(dict.fromkeys(name for row in result[rows] for name in row if name not in left_out))
        columns = {
            name: name.replace("_", " ")
            for name in names
            if any(row.get(name) is not None for row in result[rows])
        }
        screen.print(rows_table(result[rows], rows, columns))


def _readable(name: str) -> str:
    """Return a figure's name in words; theorem_4_1 is theorem 4.1, and scores that are logarithms are called so."""
    if name in ("likelihood", "cross_entropy"):
        return f"{name.replace('_', ' ')} (-log), per token"
    return re.sub(r"(\d)_(\d)", r"\1.\2", name).replace("_", " ")


def explain(named: Iterable[tuple[str, str]]) -> None:
    """Print a line for each name with a reason, below a table."""
    for name, why in named:
        if why:
            stdout().print(f"{name}: {why}", soft_wrap=True)
