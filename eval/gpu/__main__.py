"""Parse the command line of the GPU program and run it."""

import json
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from filelock import FileLock, Timeout

from hiddenlab.errors import HiddenlabError, InputError
from hiddenlab.eval.gpu.parts import PARTS
from hiddenlab.eval.gpu.program import (
    RESULT,
    TABLE,
    Part,
    Result,
    Setting,
    left_out,
    load_result,
    run_parts,
    to_json,
)
from hiddenlab.eval.gpu.table import markdown
from hiddenlab.models.device import parse_device
from hiddenlab.models.load import BUILTIN, resolve_model
from hiddenlab.utils.files import write_file

INTERRUPTED = 130


def main(
    out: Annotated[Path, typer.Option(help="Folder for gpu.json and gpu.md.")] = Path("runs/gpu"),
    minutes: Annotated[float, typer.Option(min=0.1, help="Time for everything.")] = 9.0,
    resume: Annotated[
        Path | None, typer.Option(help="Folder of an earlier run, cut or not, to go on from.")
    ] = None,
    parts: Annotated[str | None, typer.Option(metavar="A,B", help="Only these parts; default: all.")] = None,
    device: Annotated[str, typer.Option(help="The card: cuda or cuda:N.")] = "cuda",
    commit: Annotated[
        str | None, typer.Option(help="Commit of this code, where it lies outside a checkout.")
    ] = None,
    rehearse: Annotated[
        bool, typer.Option("--rehearse", help="Try every part on the CPU with tiny models.")
    ] = False,
) -> None:
    """Check the engine on a graphics card and time it; see docs/how-to/gpu.md."""
    try:
        raise typer.Exit(run(out, minutes, resume, parts, "cpu" if rehearse else device, commit, rehearse))
    except HiddenlabError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from None


def run(
    folder: Path,
    minutes: float,
    resume: Path | None,
    names: str | None,
    device: str,
    commit: str | None,
    rehearse: bool,
) -> int:
    """Run the chosen measurements and write them to ``folder``.

    Returns:
        The exit code: 0; 1 if a measurement failed, found a wrong result, or lost its process; 130 if interrupted.

    Raises:
        InputError: a part is unknown, there is no card, or there is nothing to resume.
    """
    asked = _asked(names)
    if not rehearse:
        _check_card(device)
    _make(folder)
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise InputError(f"another run writes into {folder}; wait for it, or take another folder") from None
    except OSError as error:
        raise InputError(f"cannot write into {folder}: {error.strerror or error}") from None
    setting = _with_model(Setting(device, rehearse, commit=commit), folder)
    result = Result(setting) if resume is None else load_result(resume, setting)

    def write(result: Result) -> None:
        _make(folder)
        write_file(folder / RESULT, json.dumps(to_json(result, PARTS), indent=1, allow_nan=False) + "\n")
        write_file(folder / TABLE, markdown(result, PARTS))

    code = 0
    # When a signal ends this process, stop its part and write what was measured.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        run_parts(asked, result, minutes=minutes, tell=_tell, write=write)
    except KeyboardInterrupt:
        _tell(f"interrupted; go on with --resume {folder}")
        code = INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, before)
        write(result)
        lock.release()
    for name, cells in left_out(result, asked).items():
        _tell(f"left out: {name}, {len(cells)} measurements; go on with --resume {folder}")
    wrong = [row for part in PARTS for row in result.of(part.name) if _wrong(row)]
    for row in wrong:
        _tell(f"wrong or failed: {row['part']} {row['cell']}: {row['reason'] or 'not equal'}")
    _tell(f"tables: {folder / TABLE}")
    return code or int(bool(wrong or result.faults))


def _wrong(row: dict[str, object]) -> bool:
    figures = row["figures"]
    if row["status"] != "measured" or not isinstance(figures, dict):
        return True
    return figures.get("equal") is False or figures.get("right_is_nearest") is False


def _asked(names: str | None) -> list[Part]:
    if names is None:
        return list(PARTS)
    known = {part.name: part for part in PARTS}
    if unknown := [name for name in names.split(",") if name not in known]:
        raise InputError(f"unknown part {unknown[0]!r}; known are {', '.join(known)}")
    return [part for part in PARTS if part.name in names.split(",")]


def _check_card(name: str) -> None:
    import torch

    device = parse_device(name)
    if device.type != "cuda":
        raise InputError(f"{name!r} is no card; give cuda or cuda:N, or --rehearse to try this on a CPU")
    if (device.index or 0) >= torch.cuda.device_count():
        raise InputError(f"there is no card {name!r}; there are {torch.cuda.device_count()}")


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make the folder {folder}: {error.strerror or error}") from None


def _with_model(setting: Setting, folder: Path) -> Setting:
    """Return the setting with the available model: the built-in one, or a tiny one in a rehearsal."""
    if setting.rehearse:
        from hiddenlab.testing import save_tiny

        return replace(setting, model=save_tiny("llama", folder / "tiny", tokenizer=True))
    try:
        resolve_model(BUILTIN)
    except InputError:
        _tell("the built-in model is not here: parts that need it are left out")
        return replace(setting, model=None)
    return setting


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    typer.run(main)
