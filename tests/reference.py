"""Make docs/reference/ and docs/files.md from the code: ``python -m tests.reference``, or ``make reference``.

A test compares the committed pages with what this makes.
"""

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

import hiddenlab
from hiddenlab import registry
from hiddenlab.cli import app
from hiddenlab.cli.program import record, value_of
from hiddenlab.eval.catalog import catalog

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("hiddenlab", "attacks", "defenses", "eval")
BY_HAND = {"json.md"}  # of docs/reference; the rest is made
NOTE = "<!-- Made by `make reference`; change the code, not this page. -->"
KINDS = {
    "attacks": (
        "Attacks",
        "`--attack NAME:parameter=value,…`; more of each in [choose-an-attack.md](../how-to/choose-an-attack.md).",
    ),
    "defenses": (
        "Defenses",
        "`--defense NAME:parameter=value,…`, repeatable; more in [choose-a-defense.md](../how-to/choose-a-defense.md).",
    ),
    "experiments": (
        "Experiments",
        "`hiddenlab eval NAME --set parameter=value`; more in [experiments.md](../how-to/experiments.md). Times are "
        "rough, for the built-in model and the default settings on one or two processor cores. Where there is none, "
        "none is on record.",
    ),
    "benches": ("Benches", "`hiddenlab bench NAME --set parameter=value`."),
}
BY_QUESTION = ("experiments", "benches")


def main() -> None:
    """Write every page, and remove those that are no longer made."""
    made = pages()
    for old in (ROOT / "docs" / "reference").glob("*.md"):
        if old.name not in BY_HAND:
            old.unlink()
    for name, text in made.items():
        path = ROOT / "docs" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")


def pages() -> dict[str, str]:
    """The text of every page, by its path under docs/."""
    listed = {f"reference/{kind}.md": _kind(kind) for kind in KINDS}
    index = ["# Reference", NOTE, "Made from the code: what there is, with all options and defaults."]
    index.append(
        "- [commands.md](commands.md): every command.\n"
        + "\n".join(f"- [{kind}.md]({kind}.md): {KINDS[kind][0].lower()}." for kind in KINDS)
        + "\n- [api.md](api.md): the Python names.\n- [json.md](json.md): JSON, files and exit codes."
    )
    commands = {"reference/commands.md": _commands(), "reference/api.md": _api(), "files.md": _files()}
    return {"reference/README.md": _joined(index)} | listed | commands


def _commands() -> str:
    parts = ["# Commands", NOTE, "Every command takes `-h` and `--help`."]
    for name, command in commands():
        context = command.context_class(command)
        usage = " ".join([name, *command.collect_usage_pieces(context)])
        parts += [f"## {name}", _text(command.help or ""), f"`{usage}`"]
        rows = [_row(context, parameter) for parameter in command.params if parameter.name != "help"]
        if rows:
            parts.append(_table(("option", "meaning", "default"), rows))
    return _joined(parts)


def commands() -> Iterator[tuple[str, Any]]:
    """Every command by the words that call it, in the order of ``--help``."""

    def walk(name: str, command: Any) -> Iterator[tuple[str, Any]]:
        if subcommands := getattr(command, "commands", None):
            for verb, below in subcommands.items():
                yield from walk(f"{name} {verb}", below)
        else:
            yield name, command

    yield from walk("hiddenlab", typer.main.get_command(app))


def _row(context: Any, parameter: Any) -> tuple[str, str, str]:
    name, _ = record(parameter, context)
    _, choices = value_of(parameter, context)
    meaning = f"{parameter.help or ''} One of {', '.join(choices)}." if choices else parameter.help or ""
    default = parameter.default
    if parameter.required:
        shown = "required"
    else:
        shown = "" if default is None or default is False or default in ("", (), []) else f"`{default}`"
    return f"`{name}`", _text(meaning.strip()), shown


def _kind(kind: str) -> str:
    title, lead = KINDS[kind]
    parts = [f"# {title}", NOTE, lead]
    described = {one.name: one for one in registry.describe(kind) if one.name in registry.BUILTINS[kind]}
    if kind not in BY_QUESTION:
        when = kind == "attacks"
        rows = [_listed(one, *([_text(one.use_when)] if when else [])) for one in described.values()]
        head = ("name", "what it does", *(["use it when"] if when else []), "parameters")
        return _joined([*parts, _table(head, rows)])
    for question, efforts in catalog(kind).items():
        rows = [
            _listed(described[name], effort.time or "", _text(effort.needs))
            for name, effort in efforts.items()
        ]
        parts += [f"## {question}", _table(("name", "what it does", "time", "needs", "parameters"), rows)]
    return _joined(parts)


def _listed(one: registry.Description, *more: str) -> tuple[str, ...]:
    parameters = f"`{one.parameters}`" if one.parameters else ""
    return (f"`{one.name}`", _text(one.summary), *more, parameters)


def _api() -> str:
    """The public names with their first sentences; docs/conf.py puts signatures and members in their place."""
    lead = "`import hiddenlab as hl`, then `hl.NAME`. `python -m pydoc hiddenlab.NAME` says more of each."
    parts = ["# Python API", NOTE, lead]
    for name in hiddenlab.__all__:
        value = getattr(hiddenlab, name)
        kind = next(k for k in ("module", "class", "function") if getattr(inspect, f"is{k}")(value))
        summary = (inspect.getdoc(value) or "").split("\n\n")[0]
        home = value.__name__ if kind == "module" else value.__module__
        parts += [f"## `hiddenlab.{name}`", f"<!-- {kind} -->", f"{_text(summary)} ({kind} of `{home}`)"]
    return _joined(parts)


def _files() -> str:
    parts = ["# Files", NOTE, "One line a source file; [architecture.md](architecture.md) says how they fit."]
    for room in ROOMS:
        rows = [(f"`{path.relative_to(ROOT)}`", _text(first_line(path))) for path in sources(room)]
        parts += [f"## {room}/", _table(("file", "what it is"), rows)]
    return _joined(parts)


def sources(room: str) -> list[Path]:
    """The Python files of a room in order of their paths; links into other rooms are not followed."""
    linked = [path for path in (ROOT / room).iterdir() if path.is_symlink()]
    found = (path for path in (ROOT / room).rglob("*.py") if not any(p in path.parents for p in linked))
    return sorted(path for path in found if path.name != "_version.py")  # made by the build


def first_line(path: Path) -> str:
    """The first line of a module's docstring; empty where it has none."""
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]


def _text(text: str) -> str:
    return re.sub(r"\s+", " ", text.replace("``", "`").replace("\f", " ")).strip()


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _joined(parts: list[str]) -> str:
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    main()
