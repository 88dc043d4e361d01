"""List attacks, defenses, experiments or benches (``hiddenlab list``)."""

from typing import Annotated, Literal

from typer import Argument

from hiddenlab import options as o
from hiddenlab import registry
from hiddenlab.cli.console import print_json, stdout


def list_(
    kind: Annotated[
        Literal["attacks", "defenses", "experiments", "benches"],
        Argument(metavar="KIND", help="What to list."),
    ],
    json: o.JsonOpt = False,
) -> None:
    """List attacks, defenses, experiments or benches, installed plugins included."""
    descriptions = registry.describe(kind) if kind in registry.BUILTINS else []
    if json:
        print_json(
            {
                "format": 1,
                kind: [
                    dict(zip(("name", "summary", "parameters"), description, strict=True))
                    for description in descriptions
                ],
            }
        )
        return
    if not descriptions:
        stdout().print(f"there are no {kind} yet")
        return
    from hiddenlab.cli.show import table

    stdout().print(table(("name", "what it does", "parameters"), descriptions, range(3), kind))
