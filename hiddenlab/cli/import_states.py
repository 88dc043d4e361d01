"""Turn hidden states that another program saved into an observation file (``hiddenlab import``)."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from hiddenlab import options as o
from hiddenlab.cli.capture import check_outputs
from hiddenlab.cli.console import bars, print_json, stdout
from hiddenlab.cli.from_config import takes
from hiddenlab.config import ATTACK_OPTIONS, AttackConfig
from hiddenlab.errors import InputError
from hiddenlab.text import count_of

_OTHER_SOURCES = (
    "prompt",
    "prompts",
    "column",
    "limit",
    "max_tokens",
    "observation",
    "states",
    "truth",
    "template",
)


@takes(AttackConfig, leave_out=(*ATTACK_OPTIONS, *_OTHER_SOURCES, "attack", "batch", "independent"))
def import_(
    config: AttackConfig,
    files: Annotated[
        list[str],
        Argument(metavar="FILE…", help="safetensors, .npy, .npz, .pt, Parquet, Arrow, JSON or text."),
    ],
    output: Annotated[
        Path, Option("-o", "--output", metavar="FILE", help="The observation file (safetensors).")
    ],
    truth: Annotated[
        Path | None,
        Option("--truth", metavar="FILE", help="Also save the token ids, for scoring, in this file (JSON)."),
    ] = None,
    json: o.JsonOpt = False,
) -> None:
    """Turn hidden states that another program saved into an observation file, for 'attack --observation'."""
    config = replace(config, states=tuple(files)).checked()
    check_outputs(output, truth)
    taken = [Path(name).resolve() for name in files]
    for option, path in (("--output", output), ("--truth", truth)):
        if path is not None and path.resolve() in taken:
            raise InputError(f"{option} {path} is one of the files to import; name another")
    from hiddenlab.job import import_states
    from hiddenlab.observation import save_observations
    from hiddenlab.truths import save_truth

    with bars() as progress:
        brought = import_states(config, progress)
    secrets = [known for known in brought.truths if known is not None]
    if truth is not None and len(secrets) < len(brought.truths):
        raise InputError("--truth: the files hold no token ids of every prompt; name them with --ids FILE")
    save_observations(brought.observations, output)
    if truth is not None:
        save_truth(secrets, truth)
    info = brought.observations[0].info
    rows = sum(len(observation.states) for observation in brought.observations)
    if json:
        made = {"observation": str(output), "truth": None if truth is None else str(truth)}
        facts = {"model": info.model, "layer": info.site.layer, "stream": info.site.stream}
        counts = {"prompts": len(brought.observations), "rows": rows}
        print_json({"format": 1, **made, **counts, **facts, "defense": list(info.channel)})
        return
    channel = " | ".join(info.channel) or "identity"
    counted = f"{count_of(len(brought.observations), 'prompt')}, {count_of(rows, 'row')}"
    stdout().print(f"{output}: {counted}, {info.site} of {info.model}, channel {channel}", soft_wrap=True)
