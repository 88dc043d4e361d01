"""The items of each paper, on the page of the papers: the code that is named exists, and commands parse."""

import ast
import re
import shlex
from functools import cache
from typing import Any, NamedTuple

import pytest
import typer

from hiddenlab import registry
from hiddenlab.cli import app
from hiddenlab.cli.bench import fit, parse_settings
from tests.docs_check import ROOT
from tests.test_docs import check

PAGE = ROOT / "docs" / "papers.md"
HEADING = "### Item by item"
CELLS = ["item", "what it is", "where in the code", "command", "state"]
STATES = ("measured", "in form", "missing")
NONE = "–"
PLACE = re.compile(r"`([\w./-]+\.py):(\w+(?:\.\w+)?)`")
PIPE = re.compile(r"(?<!\\)\|")


class Row(NamedTuple):
    """A row of a table: where it stands, and its cells."""

    paper: str
    cells: list[str]

    def __str__(self) -> str:
        return f"{self.paper}: {self.cells[0]}"


def rows_of(text: str) -> list[Row]:
    """The rows of every table under the heading, by paper."""
    rows = []
    for section in re.split(r"^## ", text, flags=re.M)[1:]:
        paper = section.partition("\n")[0]
        below = re.split(rf"^{HEADING}$", section, flags=re.M)[1:]
        for part in below:
            lines = re.findall(r"^\|.*\|$", re.split(r"^#+ ", part, maxsplit=1, flags=re.M)[0], re.M)
            table = [[cell.strip() for cell in PIPE.split(line)[1:-1]] for line in lines]
            assert table[:1] == [CELLS] and set("".join(table[1])) <= set("-:"), paper
            rows += [Row(paper, cells) for cells in table[2:]]
    return rows


ROWS = rows_of(PAGE.read_text(encoding="utf-8"))


@cache
def parsed(name: str) -> ast.Module:
    return ast.parse((ROOT / name).read_text(encoding="utf-8"))


def is_defined(name: str, path: str) -> bool:
    """Whether a file defines a function, a class or a method of a class."""
    if not (ROOT / name).is_file():
        return False
    scope: Any = parsed(name)
    for part in path.split("."):
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        found = [node for node in scope.body if isinstance(node, kinds) and node.name == part]
        if not found:
            return False
        scope = found[0]
    return True


def check_options(words: list[str]) -> None:
    """Parse a command, with what only its function, attack or defense knows."""
    check(words)
    group: Any = typer.main.get_command(app)
    if words[:2] == ["hiddenlab", "bench"]:
        with group.commands["bench"].make_context("bench", words[2:]) as context:
            given = context.params
        fit(given["name"], registry.resolve("benches", given["name"]), parse_settings(given["others"] or []))
    if words[:2] == ["hiddenlab", "attack"]:
        with group.commands["attack"].make_context("attack", words[2:]) as context:
            given = context.params
        registry.build("attacks", given["attack"] or "vocab-match")
        for spec in given["defense"] or []:
            registry.build("defenses", spec)


def faults(cells: list[str]) -> list[str]:
    """What is wrong with a row."""
    if len(cells) != len(CELLS):
        return [f"{len(cells)} cells"]
    item, _, where, command, state = cells
    found = [] if item else ["no item"]
    kind, colon, reason = state.partition(":")
    if kind not in STATES or (bool(colon) != bool(reason.strip())):
        found.append(f"no state: {state}")
    if kind == "missing" and not colon:
        found.append("missing, without a reason")
    if kind == "measured" and command == NONE:
        found.append("measured, without a command")
    for place in [] if where == NONE else where.split(", "):
        match = PLACE.fullmatch(place)
        if match is None or not is_defined(match[1], match[2]):
            found.append(f"not in the code: {place}")
    if command != NONE:
        code = re.fullmatch(r"`([^`]+)`", command)
        try:
            check_options(shlex.split(code[1] if code else ""))
        except Exception as error:
            found.append(f"no command: {command}: {error}")
    return found


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_row_names_code_and_a_command_that_there_are(row: Row) -> None:
    assert faults(row.cells) == []


LARGER = PAGE.read_text(encoding="utf-8").partition("## What needs a larger machine\n")[2]


@pytest.mark.parametrize("command", re.findall(r"^\|.*\| `([^`]+)` \|$", LARGER, re.M))
def test_what_needs_a_larger_machine_has_a_command_that_there_is(command: str) -> None:
    check_options(shlex.split(command))


def test_no_item_stands_twice_in_a_table() -> None:
    items = [(row.paper, row.cells[0]) for row in ROWS]
    assert sorted(items) == sorted(set(items))


def test_every_number_of_hidden_no_more_is_in_its_table() -> None:
    items = " ; ".join(row.cells[0] for row in ROWS if row.paper == "Hidden No More")
    wanted = {
        "Algorithm": range(1, 10),
        "Table": range(1, 23),
        "Figure": range(1, 3),
        "Equation": range(1, 4),
        "Theorem": ("7.3", "J.1", "J.3", "P.1"),
        "Definition": ("7.1", "7.2", "J.2"),
        "Appendix": "ABCDEFGHIJKLMNOPQRS",
    }
    for kind, numbers in wanted.items():
        found = set(re.findall(rf"\b{kind} (\d[\d.]*|[A-Z](?:\.\d)?)", items))
        if kind == "Appendix":
            found = {name[0] for name in found}
        assert found == {str(number) for number in numbers}, kind


GOOD = [
    "Algorithm 4",
    "a test",
    "`attacks/vocab_match/printed.py:as_printed`, `hiddenlab/sharding.py:Plan.clustered`",
    "`hiddenlab eval table-2 --set attack=paper`",
    "measured",
]


def test_a_good_row_has_no_faults() -> None:
    assert faults(GOOD) == []
    assert faults([*GOOD[:2], NONE, NONE, "missing: nobody wrote it"]) == []


@pytest.mark.parametrize(
    ("place", "cell", "fault"),
    [
        (2, "`attacks/vocab_match/printed.py:as_painted`", "not in the code"),
        (2, "`attacks/vocab_match/painted.py:as_printed`", "not in the code"),
        (2, "`hiddenlab/sharding.py:Plan.scattered`", "not in the code"),
        (2, "as_printed", "not in the code"),
        (3, "`hiddenlab eval table-0`", "no command"),
        (3, "`hiddenlab eval table-2 --set atack=paper`", "no command"),
        (3, "`hiddenlab eval table-2 --serach greedy`", "no command"),
        (3, "`hiddenlab bench mpc --set dept=0`", "no command"),
        (3, "`hiddenlab attack --attack vocab-match:preset=papre`", "no command"),
        (3, "`hiddenlab attack --defense seq-prem`", "no command"),
        (3, "hiddenlab eval table-2", "no command"),
        (3, NONE, "measured, without a command"),
        (4, "done", "no state"),
        (4, "in form:", "no state"),
        (4, "missing", "missing, without a reason"),
    ],
)
def test_a_wrong_cell_is_noticed(place: int, cell: str, fault: str) -> None:
    (found,) = faults([*GOOD[:place], cell, *GOOD[place + 1 :]])
    assert found.startswith(fault)


def test_a_row_that_lacks_a_cell_is_noticed() -> None:
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in (CELLS, ["---"] * 5, GOOD, GOOD[1:]))
    good, short = rows_of(f"# Papers\n\n## A paper\n\n{HEADING}\n\n{table}\n\n## Another\n\n{table}\n")
    assert (good.paper, good.cells) == ("A paper", GOOD)
    assert faults(short.cells) == ["4 cells"]
