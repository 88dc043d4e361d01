"""Measure time, evaluated tokens and memory (``hiddenlab bench``)."""

import inspect
import json as json_module
from typing import Annotated, Any, get_args, get_type_hints

from typer import Argument, Option

from hiddenlab import options as o
from hiddenlab import registry
from hiddenlab.cli.console import bars, only_json, print_json, stdout
from hiddenlab.cli.workers import AddressOpt, WorkersOpt, crew
from hiddenlab.errors import InputError

KINDS = {float: "a number", int: "a whole number", bool: "true or false"}


def bench(
    name: Annotated[str, Argument(metavar="NAME", help="See 'hiddenlab list benches'.")] = "attack",
    model: o.ModelOpt = None,
    layers: Annotated[
        str | None,
        Option("--layers", metavar="1,6,11", help="Layers to measure at; default: the bench's own."),
    ] = None,
    defense: o.DefensesOpt = None,
    prompts: o.PromptsOpt = None,
    limit: o.LimitOpt = None,
    max_tokens: o.MaxTokensOpt = None,
    greedy_limit: Annotated[
        int | None, Option("--greedy-limit", metavar="N", min=0, help="Prompts for the slow baseline.")
    ] = None,
    others: Annotated[
        list[str] | None,
        Option("--set", metavar="NAME=VALUE", help="Any other option of the bench; repeatable."),
    ] = None,
    seed: o.SeedOpt = 0,
    threads: o.ThreadsOpt = None,
    workers: WorkersOpt = None,
    address: AddressOpt = None,
    json: o.JsonOpt = False,
) -> None:
    """Measure time, evaluated tokens and memory."""
    settings = parse_settings(others or [])
    if taken := sorted({"seed", "threads", "json", "progress", "crew"} & settings.keys()):
        raise InputError(
            f"{taken[0]} is not for --set; --seed, --threads and --json are options of their own"
        )
    given: dict[str, Any] = {
        "model": model, "layers": layers and registry.parse_numbers("--layers", layers),
        "defense": defense or None, "prompts": prompts,
        "limit": limit, "max_tokens": max_tokens, "greedy_limit": greedy_limit,
    } | settings  # fmt: skip
    function = registry.resolve("benches", name)
    options = fit(name, function, {key: value for key, value in given.items() if value is not None})
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    if (workers or address) and "crew" not in _declared(function, {"crew": None}):
        raise InputError(f"bench {name} measures in one process; leave out --workers and --address")
    with only_json(json), bars() as progress, crew(workers, address, threads=threads) as spread:
        always = {"seed": seed, "threads": threads, "json": json, "progress": progress, "crew": spread}
        result: dict[str, Any] = function(**options, **_declared(function, always))
    if json:
        print_json(result)
        return
    from hiddenlab.cli.show import cell, figures_table, rows_table

    screen = stdout()
    if columns := result.get("columns"):  # many rows: the screen shows only some figures
        screen.print(rows_table(result["rows"], f"bench {name}", columns))
        for row in result["rows"]:
            if row.get("not_run"):
                screen.print(f"{row[next(iter(columns))]}: {row['not_run']}")
    else:
        screen.print(figures_table(result["rows"], f"bench {name}"))
    for key, value in result.items():
        if key == "rows" or isinstance(value, dict):
            continue
        if isinstance(value, list) and value and isinstance(value[0], dict):
            screen.print(rows_table(value, key.replace("_", " ")))
        else:
            screen.print(f"{key.replace('_', ' ')}: {cell(value)}")


def parse_settings(settings: list[str]) -> dict[str, Any]:
    """Parse ``name=value`` options; a value that is JSON is parsed, any other is a text.

    Raises:
        InputError: there is no ``=``.
    """
    options: dict[str, Any] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not key or not equals:
            raise InputError(f"--set {setting!r} is no NAME=VALUE")
        try:
            options[key.replace("-", "_")] = json_module.loads(value)
        except ValueError:
            options[key.replace("-", "_")] = value
    return options


def fit(name: str, function: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Return the given options, converted to the types that the function declares.

    Raises:
        InputError: the function does not declare one of them, or one has another type.
    """
    taken = _declared(function, given)
    if unknown := [f"--{key.replace('_', '-')}" for key in given if key not in taken]:
        raise InputError(f"{name} has no option {', '.join(unknown)}")
    kinds = get_type_hints(function)
    return {key: _of_kind(key, value, kinds.get(key)) for key, value in taken.items()}


def _of_kind(key: str, value: Any, kind: Any) -> Any:
    """Return a value as the wanted text, number or truth value; values for other types are returned unchanged."""
    kinds = [of for of in get_args(kind) if of is not type(None)]
    if type(None) in get_args(kind) and len(kinds) == 1:
        return None if value is None else _of_kind(key, value, kinds[0])
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind is str:
        return value if isinstance(value, str) else json_module.dumps(value)
    if kind is float and number:
        return float(value)
    if kind is int and number and value == int(value):
        return int(value)
    if kind in KINDS and not (kind is bool and isinstance(value, bool)):
        raise InputError(f"{key} is {KINDS[kind]}, not {value!r}")
    return value


def _declared(function: Any, values: dict[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return values
    return {key: value for key, value in values.items() if key in parameters}
