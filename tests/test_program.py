"""Help of every command: its width, its options and defaults, what it imports; and the commands behind it."""

import inspect
import json
import logging
import os
import re
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import typer
from typer.testing import CliRunner

from hiddenlab import registry
from hiddenlab.cli import VERBS, app
from hiddenlab.cli.program import LazyCommands, Program, record
from hiddenlab.errors import HiddenlabWarning

ROOT = Path(__file__).parents[1]
WIDTH = 80
Words = tuple[str, ...]


def walk(command: Any, words: Words = ()) -> Iterator[tuple[Words, Any]]:
    yield words, command
    for name, below in getattr(command, "commands", {}).items():
        yield from walk(below, (*words, name))


COMMANDS = dict(walk(typer.main.get_command(app)))
every = pytest.mark.parametrize("words", COMMANDS, ids=" ".join)


def shown(*words: str, **environment: str) -> str:
    result = CliRunner().invoke(app, words, env={"COLUMNS": str(WIDTH), **environment})
    assert result.exit_code == 0, result.output
    return result.output


def entries(text: str) -> dict[str, str]:
    """The entries of a help text: by the first words (an option with its value, a command) the description."""
    found: dict[str, str] = {}
    last, inside = "", False
    for line in text.splitlines():
        if re.match(r"\S.*:$", line):
            inside = True
        elif inside and re.match(r"  \S", line):
            last, _, rest = line.strip().partition("  ")
            assert last not in found, f"{last} stands twice"
            found[last] = rest.strip()
        elif inside and line.strip():
            found[last] = f"{found[last]} {line.strip()}".strip()
    return found


def entry(parameter: Any, text: str) -> tuple[str, str]:
    """The entry of an option or argument: its names with its value, and its description."""
    listed = entries(text)
    if parameter.param_type_name == "argument":
        name = parameter.metavar or parameter.name.upper()
        return name, listed[name]
    (one,) = [(head, listed[head]) for head in listed if {*re.split(r"[, ]+", head)} & {*parameter.opts}]
    return one


def choices_in(annotation: Any) -> list[str]:
    """The values of the literals in an annotation."""
    if get_origin(annotation) is Literal:
        return [str(value) for value in get_args(annotation)]
    return [value for part in get_args(annotation) for value in choices_in(part)]


@every
def test_help_fits_80_columns(words: Words) -> None:
    text = shown(*words, "--help")
    assert max(map(len, text.splitlines())) <= WIDTH
    assert shown(*words, "-h") == text


@every
def test_every_option_is_shown_once(words: Words) -> None:
    names: Counter[str] = Counter()
    for head in entries(shown(*words, "-h")):
        names.update(name for name in re.split(r"[, ]+", head) if re.fullmatch(r"--?[a-z][\w-]*", name))
    command = COMMANDS[words]
    parameters = command.get_params(command.context_class(command, info_name="x"))
    options = [one for one in parameters if one.param_type_name == "option"]
    expected = Counter(name for one in options for name in (*one.opts, *one.secondary_opts))
    expected["-h"] = expected["--help"] = 1  # of the program's settings, not the command's own
    assert names == expected


@every
def test_defaults_that_help_states_are_true(words: Words) -> None:
    text = shown(*words, "-h")
    for parameter in COMMANDS[words].params:
        if parameter.name in ("help", "version"):
            continue
        said, default = entry(parameter, text)[1], parameter.default
        own = re.sub(r"\s+", " ", parameter.help or "")
        stated = re.search(r"default: (.+?)[;\]]", said.removeprefix(own))
        if stated is not None:
            true = parameter.opts[0] if default is True else str(default)
            # A name that was broken at its hyphen at the end of a line is put together again.
            assert stated[1].replace("- ", "-") == true, parameter.name
        elif "default" in own.lower():
            assert default is None or default is False or str(default) in own, parameter.name
        else:
            nothing = default is None or default is False or default in ("", (), [])
            assert nothing, f"{parameter.name} has the default {default!r}, which is not shown"
        assert ("required" in said.removeprefix(own)) == bool(parameter.required), parameter.name


@every
def test_choices_stand_in_help(words: Words) -> None:
    text = shown(*words, "-h")
    for parameter in COMMANDS[words].params:
        if choices := choices_in(parameter.type_descriptor.annotation):
            said = f"{' '.join(entry(parameter, text))} ".replace("- ", "-")
            for choice in choices:
                assert re.search(rf"[ |]{re.escape(choice)}[ |,;\]]", said), (parameter.name, choice)


def test_defaults_of_an_attack_that_help_describes_are_those_of_its_class() -> None:
    text = shown("attack", "-h")
    attack = registry.resolve("attacks", "vocab-match")
    taken, own = inspect.signature(attack).parameters, attack()
    stated = {}
    for parameter in COMMANDS["attack",].params:
        if found := re.search(r"Default: ([\w+-]+)", parameter.help or ""):
            stated[parameter.name] = found[1]
            assert f"Default: {found[1]}" in entry(parameter, text)[1]
    assert {"search", "proposal", "distance", "epsilon", "setup"} <= {*stated}
    for name in stated.keys() & taken.keys():
        assert str(getattr(own, name)) == stated[name], name
    assert taken["budget"].default is None and "default: no cap" in shown("attack", "-h")


def test_a_default_of_zero_is_a_default() -> None:
    made = Program("A program.", name="p")

    @made.callback()
    def _nothing() -> None: ...

    @made.command("c")
    def _command(
        zero: int = 0, none: float = 0.0, off: bool = False, text: str = "", on: bool = True
    ) -> None: ...

    command = typer.main.get_command(made).commands["c"]  # type: ignore[attr-defined]
    context = command.context_class(command)
    notes = {one.name: record(one, context)[1] for one in command.params}
    assert notes["zero"] == "[default: 0]" and notes["none"] == "[default: 0.0]"
    assert notes["off"] == notes["text"] == ""
    assert notes["on"] == "[default: --on]"


@pytest.mark.parametrize("columns", ["0", "1", "40", "-5", "abc", "100000", ""])
def test_help_needs_no_terminal_of_a_certain_width(columns: str) -> None:
    for words in ((), ("compare",), ("verify", "score")):
        text = shown(*words, "-h", COLUMNS=columns)
        assert max(map(len, text.splitlines())) <= WIDTH
        assert text.startswith("Usage: ")


def process(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    code = (
        "import json, sys\n"
        "from hiddenlab.cli import app\n"
        "try:\n"
        "    app(sys.argv[1:])\n"
        "finally:\n"
        "    print(json.dumps(sorted(sys.modules)), file=sys.stderr)\n"
    )
    command = [sys.executable, "-c", code, *words]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, **environment}, check=False
    )


@pytest.mark.parametrize(("words", "code"), [(("-h",), 0), (("--version",), 0), ((), 2)])
def test_the_program_itself_imports_nothing_slow(words: Words, code: int) -> None:
    done = process(*words)
    assert done.returncode == code, done.stderr
    modules = set(json.loads(done.stderr.splitlines()[-1]))
    assert not modules & {"rich", "pydantic", "torch", "transformers", "numpy", "matplotlib"}
    places = {place.partition(":")[0] for verbs in VERBS.values() for place, _ in verbs.values()}
    assert not modules & {f"hiddenlab.cli.{name}" for name in places}


def test_help_of_one_command_imports_no_other() -> None:
    modules = set(json.loads(process("list", "-h").stderr.splitlines()[-1]))
    assert "hiddenlab.cli.listing" in modules
    assert not modules & {"hiddenlab.cli.attack", "hiddenlab.cli.cascade", "hiddenlab.cli.verify", "torch"}


def test_the_table_of_commands_is_true() -> None:
    listed = {name: text for verbs in VERBS.values() for name, (_, text) in verbs.items()}
    assert len(listed) == sum(map(len, VERBS.values())), "a command stands in two groups"
    assert {words[0] for words in COMMANDS if words} == {*listed}
    for verbs in VERBS.values():
        for place, text in verbs.values():
            module, _, attribute = place.partition(":")
            made = getattr(import_module(f"hiddenlab.cli.{module}"), attribute)
            assert isinstance(made, Program) or callable(made)
            assert re.fullmatch(r"[A-Z][^.]*\.", text), "one sentence"
    help_text = shown("-h")
    found = entries(help_text)
    assert {name: found[name] for name in listed} == listed
    headings = re.findall(r"^(\S.*):$", help_text, re.M)
    assert headings == [*VERBS, "Help"]


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (("atack",), "attack"),
        (("comparee",), "compare"),
        (("verify", "chek"), "check"),
        (("cascade", "pln"), "plan"),
    ],
)
def test_a_command_that_is_none_is_named_with_what_was_meant(words: Words, meant: str) -> None:
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert f"No such command '{words[-1]}'. Did you mean '{meant}'?" in result.stderr
    far = CliRunner().invoke(app, [*words[:-1], "zzzzzz"])
    assert (
        far.exit_code == 2 and "No such command 'zzzzzz'" in far.stderr and "Did you mean" not in far.stderr
    )


def test_groups_of_a_command_come_in_order_and_help_is_last() -> None:
    headings = re.findall(r"^(\S.*):$", shown("attack", "-h"), re.M)
    assert headings == [
        "Arguments", "Input", "States of another program", "Model", "Defense", "Search", "Workers", "Output", "Help",
    ]  # fmt: skip


def test_what_an_encoding_lacks_is_escaped() -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1", "COLUMNS": "80"}
    command = [sys.executable, "-m", "hiddenlab", "attack", "--help"]
    done = subprocess.run(command, capture_output=True, cwd=ROOT, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert rb"--axes A,B,\u2026" in done.stdout


# LazyCommands


@pytest.fixture
def lazy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LazyCommands]:
    (tmp_path / "lazy_one.py").write_text(
        'def go(n: int = 1) -> None:\n    """Say n."""\n    print("n", n)\n'
    )
    (tmp_path / "lazy_two.py").write_text(
        "from hiddenlab.cli.program import Program\n"
        "app = Program('Two.')\n"
        "@app.callback()\n"
        "def two() -> None:\n    'Two.'\n"
        "@app.command('below')\n"
        "def below() -> None:\n    'Below.'\n    print('below')\n"
    )
    (tmp_path / "lazy_broken.py").write_text("raise RuntimeError('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield LazyCommands({"one": "lazy_one:go", "two": "lazy_two:app", "broken": "lazy_broken:go"})
    for name in ("lazy_one", "lazy_two", "lazy_broken"):
        sys.modules.pop(name, None)


def test_lazy_commands_are_a_mapping(lazy: LazyCommands) -> None:
    assert [*lazy] == [*lazy.keys()] == ["one", "two", "broken"] and len(lazy) == 3
    assert not {"lazy_one", "lazy_two"} & {*sys.modules}  # names need no import
    one = lazy["one"]
    assert one.name == "one" and one is lazy["one"] is lazy.get("one")
    assert "lazy_one" in sys.modules and "lazy_two" not in sys.modules
    assert lazy["two"].name == "two" and [*lazy["two"].commands] == ["below"]
    assert lazy.get("three") is None and "three" not in lazy and "one" in lazy
    with pytest.raises(KeyError):
        lazy["three"]
    with pytest.raises(KeyError):
        del lazy["three"]
    with pytest.raises(RuntimeError, match="imported"):
        lazy["broken"]
    lazy["three"] = one
    assert lazy["three"] is one and [*lazy][-1] == "three" and len(lazy) == 4
    lazy["two"] = one
    assert lazy["two"] is one and [*lazy].index("two") == 1
    assert lazy.pop("three") is one and "three" not in lazy
    del lazy["one"]
    assert [*lazy] == ["two", "broken"] and lazy.get("one") is None


def test_lazy_commands_run(lazy: LazyCommands) -> None:
    class Own(type(typer.main.get_command(app))):  # type: ignore[misc]
        def __init__(self, **settings: Any) -> None:
            super().__init__(**settings)
            self.commands = lazy

    made = Program("Own.", cls=Own)

    @made.callback()
    def _own() -> None: ...

    assert CliRunner().invoke(made, ["one", "--n", "5"]).stdout == "n 5\n"
    assert CliRunner().invoke(made, ["two", "below"]).stdout == "below\n"
    assert "[default: 1]" in CliRunner().invoke(made, ["one", "-h"]).stdout


def test_what_libraries_warn_of_goes_to_the_log_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    describe = registry.describe

    def loud(kind: str) -> list[registry.Description]:
        warnings.warn("of a\nlibrary", FutureWarning, stacklevel=1)
        warnings.warn("for the user", HiddenlabWarning, stacklevel=1)
        logging.getLogger("some.library").warning("it says")
        return describe(kind)

    monkeypatch.setattr(registry, "describe", loud)
    monkeypatch.setenv("HIDDENLAB_CACHE", str(tmp_path))
    done = CliRunner().invoke(app, ["list", "attacks", "--json"])
    assert done.exit_code == 0 and done.stderr == "for the user\n"
    log = tmp_path / "log" / "hiddenlab.log"
    assert len(log.read_text(encoding="utf-8").splitlines()) == 2, log.read_text(encoding="utf-8")
    first, second = log.read_text(encoding="utf-8").splitlines()
    assert "FutureWarning: of a library (" in first and second.endswith("some.library: it says")
    assert log.stat().st_mode & 0o777 == 0o600
    # A log that cannot be written is no reason to stop.
    monkeypatch.setenv("HIDDENLAB_CACHE", "/dev/null")
    assert CliRunner().invoke(app, ["list", "attacks", "--json"]).exit_code == 0
