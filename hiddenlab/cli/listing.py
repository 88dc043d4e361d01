"""List attacks, defenses, experiments and benches (``hiddenlab list``)."""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal

from rich.cells import cell_len
from rich.text import Text
from typer import Argument

from hiddenlab import options as o
from hiddenlab import registry
from hiddenlab.cli.console import print_json, stdout
from hiddenlab.text import visible

Kind = Literal["attacks", "defenses", "experiments", "benches"]
KINDS: tuple[Kind, ...] = ("attacks", "defenses", "experiments", "benches")
BY_QUESTION = ("experiments", "benches")
HOW = {
    "attacks": "Choose one: --attack NAME, or --attack NAME:PARAMETER=VALUE. The default is vocab-match.",
    "defenses": (
        "Choose one: --defense NAME, or --defense NAME:PARAMETER=VALUE. Repeat the option for several; they apply in "
        "order."
    ),
    "experiments": (
        "Run one: hiddenlab eval NAME, with --set PARAMETER=VALUE for a parameter. Times are rough, for the built-in "
        "model and the default settings on one or two processor cores. With --scale paper an experiment takes longer, "
        "and reads texts from the Hugging Face hub."
    ),
    "benches": "Run one: hiddenlab bench NAME, with --set PARAMETER=VALUE for a parameter.",
}
WIDEST = 100  # columns of a line, however wide the terminal is
INDENT = 4
LEAST_BESIDE = 24  # columns that a description needs beside its name; with fewer it stands below
OTHER = "Other"  # the heading of what no question of the catalog holds
PART = re.compile(r"[^,;|/]*[,;|/]?")  # where a word that is too long for a line may be broken


def list_(
    kind: Annotated[
        Kind | None, Argument(metavar="KIND", help="What to list in detail. Default: an overview of all.")
    ] = None,
    json: o.JsonOpt = False,
) -> None:
    """List attacks, defenses, experiments and benches, installed plugins included."""
    if json:
        print_json({"format": 1} | {name: _records(name) for name in ([kind] if kind else KINDS)})
        return
    console = stdout()
    width = min(console.width, WIDEST)
    for line in overview(width) if kind is None else details(kind, width):
        console.print(line, soft_wrap=True)


def overview(width: int) -> Iterator[Text]:
    """Write how much of each kind there is: attacks and defenses by name, experiments and benches by question."""
    for kind in KINDS:
        descriptions = registry.describe(kind)
        if kind != KINDS[0]:
            yield Text()
        yield Text(f"{kind.capitalize()} ({len(descriptions)})", style="bold")
        if kind in BY_QUESTION:
            rows = [(str(len(group)), question) for question, group in _groups(kind, descriptions)]
        else:
            rows = [(one.name, one.summary) for one in descriptions]
        yield from _columns(rows, width)
        yield from _paragraph(f"More of each: hiddenlab list {kind}", width, 2)


def details(kind: Kind, width: int) -> Iterator[Text]:
    """Write every entry of a kind: its name, what it does, when to use it, what it takes, its parameters."""
    descriptions = registry.describe(kind)
    yield from _paragraph(HOW[kind], width)
    for question, group in _groups(kind, descriptions):
        if question:
            yield Text()
            for line in _paragraph(question, width):
                line.stylize("bold")
                yield line
        for description, effort in group:
            yield Text()
            yield from _entry(description, effort, width, INDENT // 2 if question else 0)


def _entry(one: registry.Description, effort: Any, width: int, indent: int) -> Iterator[Text]:
    yield Text(" " * indent + visible(one.name), style="bold cyan")
    below = indent + INDENT // 2
    yield from _paragraph(one.summary, width, below)
    if one.use_when:
        yield from _paragraph(f"Use it when {one.use_when}.", width, below)
    if effort is not None:
        needs = f" Needs: {effort.needs}." if effort.needs else ""
        yield from _paragraph(f"Time: {effort.time or 'not timed'}.{needs}", width, below)
    if one.parameters:
        yield from _parameters(one.parameters, width, below)


def _parameters(listing: str, width: int, indent: int) -> Iterator[Text]:
    """Write parameters with as many as fit in a line; one that fits is not broken."""
    label = "Parameters:"
    parts = listing.split(", ")
    units = [f"{part}," for part in parts[:-1]] + parts[-1:]
    room = width - indent - INDENT
    words = [word for unit in units for word in ([unit] if cell_len(unit) <= room else unit.split())]
    for number, line in enumerate(_packed([label, *words], room)):
        text = Text(" " * (indent if number == 0 else indent + INDENT) + line)
        if number == 0:
            text.stylize("dim", indent, indent + len(label))
        yield text


def _columns(rows: Sequence[tuple[str, str]], width: int) -> Iterator[Text]:
    """Write names with their texts beside them, as help does; below them where there is no room."""
    start = 2 + max((cell_len(name) for name, _ in rows), default=0) + 2
    beside = width - start >= LEAST_BESIDE
    for name, text in rows:
        name = visible(name)
        lines = _lines(text, width - (start if beside else INDENT))
        if beside:
            head = Text("  ").append(name, style="bold cyan")
            head.append(" " * (start - 2 - cell_len(name)) + (lines[0] if lines else ""))
            yield head
            yield from (Text(" " * start + line) for line in lines[1:])
        else:
            yield Text("  ").append(name, style="bold cyan")
            yield from (Text(" " * INDENT + line) for line in lines)


def _paragraph(text: str, width: int, indent: int = 0) -> Iterator[Text]:
    for line in _lines(text, width - indent):
        yield Text(" " * indent + line)


def _lines(text: str, width: int) -> list[str]:
    """Break a docstring's text into lines; its double backticks are quotes here."""
    return list(_packed(text.replace("``", "'").split(), width))


def _packed(words: Iterable[str], width: int) -> Iterator[str]:
    """Put words into lines. No number and no name is broken: a longer word is broken behind commas and the like."""
    line = ""
    for word in map(visible, words):
        joint = " " if line else ""
        if cell_len(line + joint + word) <= width:
            line += joint + word
            continue
        if line:
            yield line
        line = ""
        for part in [word] if cell_len(word) <= width else PART.findall(word):
            if line and cell_len(line + part) > width:
                yield line
                line = ""
            line += part
    if line:
        yield line


def _groups(
    kind: str, descriptions: Sequence[registry.Description]
) -> list[tuple[str, list[tuple[registry.Description, Any]]]]:
    """Return the entries of a kind by the question that they answer, each with the effort that it takes.

    Attacks and defenses are one group without a question.
    """
    if kind not in BY_QUESTION:
        return [("", [(one, None) for one in descriptions])]
    left = {one.name: one for one in descriptions}
    groups = []
    for question, efforts in registry.resolve("eval", "catalog")(kind).items():
        if group := [(left.pop(name), effort) for name, effort in efforts.items() if name in left]:
            groups.append((question, group))
    if left:
        groups.append((OTHER, [(one, None) for one in left.values()]))
    return groups


def _records(kind: Kind) -> list[dict[str, Any]]:
    """Return the entries of a kind for JSON, in the order of the registry."""
    descriptions = registry.describe(kind)
    records: dict[str, dict[str, Any]] = {}
    for one in descriptions:
        records[one.name] = {"name": one.name, "summary": one.summary, "parameters": one.parameters}
    if kind == "attacks":
        for one in descriptions:
            records[one.name]["use_when"] = one.use_when
    if kind in BY_QUESTION:
        for question, group in _groups(kind, descriptions):
            for one, effort in group:
                time, needs = (effort.time, effort.needs) if effort is not None else (None, "")
                records[one.name] |= {"question": question, "time": time, "needs": needs}
    return list(records.values())
