"""Save what a defense releases, to be attacked later without the secret (``hiddenlab capture``)."""

import os
from pathlib import Path
from typing import Annotated

from typer import Option

from hiddenlab import options as o
from hiddenlab.cli.attack import ready
from hiddenlab.cli.console import bars, print_json, stdout
from hiddenlab.cli.from_config import takes
from hiddenlab.config import ATTACK_OPTIONS, IMPORT_OPTIONS, AttackConfig
from hiddenlab.errors import InputError
from hiddenlab.text import count_of


@takes(
    AttackConfig,
    leave_out=(
        *ATTACK_OPTIONS,
        *IMPORT_OPTIONS,
        "attack",
        "batch",
        "independent",
        "observation",
        "states",
        "truth",
    ),
)
def capture(
    config: AttackConfig,
    output: Annotated[
        Path, Option("-o", "--output", metavar="FILE", help="The observation file (safetensors).")
    ],
    truth: Annotated[
        Path | None,
        Option(
            "--truth", metavar="FILE", help="Also save the prompts' tokens, for scoring, in this file (JSON)."
        ),
    ] = None,
    json: o.JsonOpt = False,
) -> None:
    """Save the hidden states of prompts as a defense releases them; one file, several prompts."""
    check_outputs(output, truth)
    config = ready(config)
    from hiddenlab.job import capture_all
    from hiddenlab.observation import save_observations
    from hiddenlab.truths import save_truth

    with bars() as progress:
        released = capture_all(config, progress)
    save_observations([observation for observation, _ in released], output)
    if truth is not None:
        save_truth([kept for _, kept in released], truth)
    info = released[0][0].info
    rows = sum(len(observation.states) for observation, _ in released)
    if json:
        files = {"observation": str(output), "truth": None if truth is None else str(truth)}
        facts = {"model": info.model, "layer": info.site.layer, "stream": info.site.stream}
        counts = {"prompts": len(released), "rows": rows}
        print_json({"format": 1, **files, **counts, **facts, "defense": list(info.channel)})
        return
    channel = " | ".join(info.channel) or "identity"
    stdout().print(
        f"{output}: {count_of(len(released), 'prompt')}, {count_of(rows, 'row')}, {info.site} of "
        f"{info.model}, channel {channel}",
        soft_wrap=True,
    )


def check_outputs(output: Path, truth: Path | None) -> None:
    """Check that an observation file and a truth file can be written, before the work starts.

    Raises:
        InputError: one of them cannot, or both are the same file.
    """
    for path in (output, truth):
        _check_writable(path)
    if truth is not None and truth.resolve() == output.resolve():
        raise InputError("--truth and --output name the same file; the truth needs a file of its own")


def _check_writable(path: Path | None) -> None:
    """Check that a file can be written."""
    if path is None:
        return
    if len(os.fsencode(path.name)) > 200:
        raise InputError(f"cannot write {str(path)[:80]}…: the name is too long")
    if path.is_dir():
        raise InputError(f"{path} is a directory; name a file")
    if not path.resolve().parent.is_dir():
        raise InputError(f"cannot write {path}: the directory {path.parent} does not exist")
