"""Give commands the options of workers over Ray, and open the workers that they name."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from hiddenlab import registry
from hiddenlab.utils.schema import LARGEST, Positive

if TYPE_CHECKING:
    from hiddenlab.runner import Workers

WORKERS = "Workers"  # a group of options in help

WorkersOpt = Annotated[
    Positive | None,
    Option(
        "--workers",
        metavar="N",
        min=1,
        max=LARGEST,
        rich_help_panel=WORKERS,
        help="Share the work among N processes over Ray, each with a model of its own, and a card where there are any. "
        "Default: none, this process does it; with --address one for each card, or for each machine.",
    ),
]
AddressOpt = Annotated[
    str | None,
    Option(
        "--address",
        metavar="HOST:PORT",
        rich_help_panel=WORKERS,
        help="Workers on the Ray cluster there; 'auto' finds one. Default: on this machine.",
    ),
]


@contextmanager
def attack_workers(workers: int | None, address: str | None) -> "Iterator[Workers | None]":
    """Open the workers of an attack for a block; None where neither option is given."""
    if workers is None and address is None:
        yield None
        return
    with registry.resolve("eval", "attack-workers")(address, workers) as made:
        yield made


@contextmanager
def crew(workers: int | None, address: str | None, **options: Any) -> Iterator[Any]:
    """Open workers for any tasks (``hiddenlab.eval.parallel.Crew``); None where neither option is given."""
    if workers is None and address is None:
        yield None
        return
    with registry.resolve("eval", "crew")(address, workers, **options) as made:
        yield made
