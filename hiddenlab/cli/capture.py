"""``hiddenlab capture``: save what a defense releases, to be attacked later without the secret."""

import os
from pathlib import Path
from typing import Annotated

from typer import Option

from hiddenlab.cli import options as o
from hiddenlab.cli.attack import with_stdin
from hiddenlab.cli.console import bars, print_json, stdout
from hiddenlab.errors import InputError


def capture(
    output: Annotated[
        Path, Option("-o", "--output", metavar="FILE", help="The observation file (safetensors).")
    ],
    prompt: o.PromptArg = None,
    prompts: o.PromptsOpt = None,
    column: o.ColumnOpt = None,
    limit: o.LimitOpt = None,
    max_tokens: o.MaxTokensOpt = None,
    model: o.ModelOpt = None,
    layer: o.LayerOpt = None,
    stream: o.StreamOpt = None,
    defense: o.DefenseOpt = None,
    truth: Annotated[
        Path | None,
        Option(
            "--truth",
            metavar="FILE",
            help="Also save the prompts' tokens, for scoring, in this file (JSON).",
        ),
    ] = None,
    seed: o.SeedOpt = 0,
    device: o.DeviceOpt = "auto",
    device_map: o.DeviceMapOpt = None,
    dtype: o.DtypeOpt = "float32",
    threads: o.ThreadsOpt = None,
    json: o.JsonOpt = False,
) -> None:
    """Save the hidden states of prompts as a defense releases them; one file, several prompts."""
    if prompt is not None and (prompts is not None or column is not None):
        raise InputError("give a PROMPT or --prompts (with its --column), not both")
    for path in (output, truth):
        _check_writable(path)
    if truth is not None and truth.resolve() == output.resolve():
        raise InputError("--truth and --output name the same file; the truth needs a file of its own")
    from hiddenlab.job import AttackSpec, capture_all, save_truth
    from hiddenlab.observation import save_observations

    spec = AttackSpec(
        prompt=prompt, prompts=prompts, column=column, limit=limit, max_tokens=max_tokens, model=model,
        layer=layer, stream=stream, defense=tuple(defense or ()), seed=seed, device=device,
        device_map=device_map, dtype=dtype, threads=threads,
    )  # fmt: skip
    with bars() as progress:
        released = capture_all(with_stdin(spec), progress)
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
        f"{output}: {len(released)} prompts, {rows} rows, {info.site} of {info.model}, channel {channel}",
        soft_wrap=True,
    )


def _check_writable(path: Path | None) -> None:
    """Say so before the work, not after it."""
    if path is None:
        return
    if len(os.fsencode(path.name)) > 200:
        raise InputError(f"cannot write {str(path)[:80]}…: the name is too long")
    if path.is_dir():
        raise InputError(f"{path} is a directory; name a file")
    if not path.resolve().parent.is_dir():
        raise InputError(f"cannot write {path}: the directory {path.parent} does not exist")
