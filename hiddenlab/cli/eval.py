"""``hiddenlab eval``: run an experiment, one a table or figure of a paper."""

from typing import Annotated, Any

from typer import Argument

from hiddenlab import registry
from hiddenlab.cli import options as o
from hiddenlab.cli.console import bars, only_json, print_json, stdout
from hiddenlab.errors import UnknownNameError

KIND = "experiments"


def eval_(
    name: Annotated[str, Argument(metavar="NAME", help="See 'hiddenlab list experiments'.")],
    limit: o.LimitOpt = None,
    seed: o.SeedOpt = 0,
    threads: o.ThreadsOpt = None,
    json: o.JsonOpt = False,
) -> None:
    """Run an experiment: one table or figure of a paper."""
    if KIND not in registry.BUILTINS or not registry.names(KIND):
        raise UnknownNameError(f"unknown experiment {name!r}; there are no experiments yet")
    experiment = registry.resolve(KIND, name)
    with only_json(json), bars() as progress:
        result: dict[str, Any] = experiment(
            limit=limit, seed=seed, threads=threads, json=json, progress=progress
        )
    if json:
        print_json(result)
        return
    from hiddenlab.cli.show import rows_table

    stdout().print(rows_table(result["rows"], f"experiment {name}"))
