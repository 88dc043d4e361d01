"""Run an experiment, one for each table or figure of a paper (``hiddenlab eval``)."""

from pathlib import Path
from typing import Annotated, Literal

import typer
from typer import Argument, Option

from hiddenlab import options as o
from hiddenlab import registry
from hiddenlab.cli.bench import fit, parse_settings
from hiddenlab.cli.console import bars, only_json, print_json, stderr, stdout
from hiddenlab.cli.workers import AddressOpt, WorkersOpt, crew
from hiddenlab.errors import InputError

KIND = "experiments"
ALL = "all"


def eval_(
    name: Annotated[str, Argument(metavar="NAME", help="See 'hiddenlab list experiments'; or 'all'.")],
    model: o.ModelOpt = None,
    layers: Annotated[
        str | None, Option("--layers", metavar="1,6,11", help="Layers; default: the experiment's own.")
    ] = None,
    prompts: o.PromptsOpt = None,
    limit: o.LimitOpt = None,
    max_tokens: o.MaxTokensOpt = None,
    scale: Annotated[
        Literal["small", "paper"],
        Option("--scale", help="A laptop's size, or the paper's texts and numbers."),
    ] = "small",
    alpha: Annotated[int | None, Option("--alpha", metavar="N", min=1, help="plan: CompNodes.")] = None,
    c: Annotated[int | None, Option("--c", metavar="N", min=1, help="plan: tokens of a cluster.")] = None,
    m: Annotated[int | None, Option("--m", metavar="N", min=1, help="plan: splits of each shard.")] = None,
    others: Annotated[
        list[str] | None,
        Option("--set", metavar="NAME=VALUE", help="Any other option of the experiment; repeatable."),
    ] = None,
    seed: o.SeedOpt = 0,
    device: o.DeviceOpt = "auto",
    dtype: o.DtypeOpt = "float32",
    threads: o.ThreadsOpt = None,
    workers: WorkersOpt = None,
    address: AddressOpt = None,
    out: Annotated[
        Path,
        Option(
            "--out",
            metavar="DIR",
            help="Where cells and tables are kept; cells that are there are not measured again.",
        ),
    ] = Path("runs/eval"),
    no_cache: Annotated[bool, Option("--no-cache", help="Measure anew what was measured before.")] = False,
    cached_only: Annotated[
        bool, Option("--cached-only", help="Measure nothing: show what was measured before.")
    ] = False,
    json: o.JsonOpt = False,
) -> None:
    """Run an experiment: one table or figure of a paper, its published figures beside ours."""
    names = registry.names(KIND) if name == ALL else [name]
    numbers = {"alpha": alpha, "c": c, "m": m}
    options = parse_settings(others or []) | {k: v for k, v in numbers.items() if v is not None}
    if name != ALL:
        options = fit(name, registry.resolve(KIND, name), options)
    elif options:
        raise InputError("--set, --alpha, --c and --m are for one experiment; 'all' takes none")
    setting = {
        "model": model or "builtin", "limit": limit, "max_tokens": max_tokens, "prompts": prompts, "scale": scale,
        "seed": seed, "device": device, "dtype": dtype,
        "layers": None if layers is None else tuple(registry.parse_numbers("--layers", layers)),
    }  # fmt: skip
    run = registry.resolve("eval", "run")
    try:
        made = crew(workers, address, threads=threads, device=device)
        with only_json(json), bars() as progress, made as spread:
            tables = run(
                names, setting, options, out, fresh=no_cache, workers=spread, threads=threads, measure=not cached_only,
                progress=progress,
            )  # fmt: skip
    except KeyboardInterrupt:
        stderr().print(
            f"interrupted; what was measured is kept in {out}, and the same command goes on from there"
        )
        raise typer.Exit(130) from None
    if json:
        print_json(tables[0] if name != ALL else {"format": 1, "tables": tables})
    else:
        from hiddenlab.cli.show import experiment_table

        for table in tables:
            for part in experiment_table(table):
                stdout().print(part)
        stderr().print(f"tables and cells are in {out}", soft_wrap=True)
    rows = [row for table in tables for row in table["rows"]]
    if rows and not cached_only and not any(row["figures"] for row in rows):
        reasons = dict.fromkeys(str(row["reason"]) for row in rows if row["reason"])
        raise InputError(f"nothing was measured: {'; '.join(reasons) or 'no cell says why'}")
