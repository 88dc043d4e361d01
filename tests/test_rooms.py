"""Imports go one way: hiddenlab knows no other room, attacks and defenses know only hiddenlab."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FORBIDDEN = {
    "hiddenlab": {"attacks", "defenses", "eval", "tests"},
    "attacks": {"defenses", "eval", "tests"},
    "defenses": {"attacks", "eval", "tests"},
}


def imported(source: str) -> set[str]:
    """Top-level packages that a module imports anywhere, inside functions and by a literal name too."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in ("import_module", "__import__"):
                found.add(str(node.args[0].value).partition(".")[0])
    return found


@pytest.mark.parametrize("room", FORBIDDEN)
def test_imports_go_one_way(room: str) -> None:
    files = sorted((ROOT / room).rglob("*.py"))
    assert files, f"no modules in {room}"
    wrong = {
        str(file.relative_to(ROOT)): sorted(bad)
        for file in files
        if (bad := imported(file.read_text(encoding="utf-8")) & FORBIDDEN[room])
    }
    assert not wrong


def test_every_way_of_importing_is_noticed() -> None:
    source = """
import attacks.one
def f():
    from defenses.two import x
    importlib.import_module("eval.three")
from . import tests
text = "import tests"
"""
    assert imported(source) == {"attacks", "defenses", "eval"}
