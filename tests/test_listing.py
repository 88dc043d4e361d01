"""``hiddenlab list`` fits a terminal, loses no word, and says when to use what; wrong names get the meant one."""

import json
import sys
import types
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from typer.testing import CliRunner

from hiddenlab import registry
from hiddenlab.base import Attack
from hiddenlab.cli import app, listing
from hiddenlab.config import AttackConfig
from hiddenlab.errors import UnknownNameError
from hiddenlab.eval.catalog import catalog
from hiddenlab.types import AttackResult, Observation

SEPARATORS = ",;|/"
WORDS = st.text("ab0.9é漢,;|/=:", min_size=1, max_size=40)


def shown(*arguments: str, columns: int = 80) -> str:
    result = CliRunner().invoke(app, ["list", *arguments], env={"COLUMNS": str(columns)})
    assert result.exit_code == 0, result.output
    return result.stdout


def plugin(monkeypatch: pytest.MonkeyPatch, kind: str, name: str, made: Any) -> None:
    module = types.ModuleType("hiddenlab_test_listed")
    module.made = made  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(registry.BUILTINS[kind], name, f"{module.__name__}:made")


# ---- layout


@pytest.mark.parametrize("columns", [40, 80, 132])
@pytest.mark.parametrize("kind", listing.KINDS)
def test_lists_fit_the_terminal_and_cut_nothing(kind: str, columns: int) -> None:
    output = shown(kind, columns=columns)
    assert max(map(cell_len, output.splitlines())) <= columns
    words, solid = set(output.split()), "".join(output.split())
    for one in registry.describe(kind):
        assert one.name in words
        for text in (one.summary, one.use_when, one.parameters):
            text = text.replace("``", "'")
            assert "".join(text.split()) in solid, "something is left out"
            # A word that fits into a line is not broken; a full stop or comma may follow it.
            fitting = [word for word in text.split() if len(word) <= columns - 10]
            missing = [word for word in fitting if not {word, f"{word},", f"{word}."} & words]
            assert not missing


def test_the_overview_fits_and_names_every_attack_defense_and_question() -> None:
    output = shown()
    assert max(map(cell_len, output.splitlines())) <= 80
    words = output.split()
    for kind in listing.KINDS:
        assert f"{kind.capitalize()} ({len(registry.names(kind))})" in output
        assert f"hiddenlab list {kind}" in output
    for kind in ("attacks", "defenses"):
        assert set(registry.names(kind)) <= set(words)
    for kind in listing.BY_QUESTION:
        for question, efforts in catalog(kind).items():
            (line,) = [line for line in output.splitlines() if question in line]
            assert line.split()[0] == str(len(efforts))


@given(words=st.lists(WORDS, max_size=12), width=st.integers(4, 60))
def test_lines_lose_no_letter_and_break_only_behind_separators(words: list[str], width: int) -> None:
    lines = list(listing._packed(words, width))
    assert "".join("".join(lines).split()) == "".join(words)
    for line in lines:
        unbreakable = line.rstrip(SEPARATORS)
        assert cell_len(line) <= width or not any(mark in unbreakable for mark in SEPARATORS)
    for word in words:
        if cell_len(word) <= width:
            assert any(word in line for line in lines)


def test_what_a_plugin_says_reaches_no_terminal_as_an_escape(monkeypatch: pytest.MonkeyPatch) -> None:
    def made() -> None: ...

    made.__doc__ = "Clear \x1b[2J the screen \u202e [bold]now[/bold]."
    plugin(monkeypatch, "defenses", "odd", made)
    for output in (shown("defenses"), shown()):
        assert "\x1b" not in output and "\u202e" not in output and "[bold]now[/bold]" in output


def test_what_cannot_be_loaded_is_listed_within_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.BUILTINS["attacks"], "broken", f"no_such_{'long_' * 5}module:Broken")
    for output in (shown("attacks"), shown()):
        assert "not usable" in output
        assert max(map(cell_len, output.splitlines())) <= 80


# ---- when to use what


@pytest.mark.parametrize("name", registry.BUILTINS["attacks"])
def test_every_builtin_attack_says_when_to_use_it(name: str) -> None:
    text = registry.resolve("attacks", name).use_when
    assert text and not text.endswith(".") and text == " ".join(text.split())
    assert text[0].islower(), "it follows 'Use it when'"


def test_a_plugin_may_leave_out_when_to_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent(Attack):
        """Recover nothing."""

        def _recover(self, observation: Observation) -> AttackResult:
            raise NotImplementedError

    plugin(monkeypatch, "attacks", "silent", Silent)
    before, _, entry = shown("attacks").partition("\nsilent\n")
    assert entry.strip() == "Recover nothing." and "Use it when" in before
    (record,) = [one for one in json.loads(shown("attacks", "--json"))["attacks"] if one["name"] == "silent"]
    assert record == {"name": "silent", "summary": "Recover nothing.", "parameters": "", "use_when": ""}


def test_the_default_attack_is_named() -> None:
    assert f"The default is {AttackConfig().attack}." in shown("attacks", columns=200)


# ---- the catalog


@pytest.mark.parametrize("kind", listing.BY_QUESTION)
def test_the_catalog_holds_every_builtin_once(kind: str) -> None:
    held = Counter(name for efforts in catalog(kind).values() for name in efforts)
    assert held == Counter(registry.BUILTINS[kind].keys())


@pytest.mark.parametrize("kind", listing.BY_QUESTION)
def test_the_catalog_reads_as_sentences(kind: str) -> None:
    for question, efforts in catalog(kind).items():
        assert question.endswith("?")
        for effort in efforts.values():
            assert effort.time != "" and not f"{effort.time}{effort.needs}".endswith(".")


def test_experiments_stand_under_their_question_with_time_and_needs() -> None:
    output = shown("experiments")
    questions = list(catalog("experiments"))
    places = [output.index(question) for question in questions]
    assert places == sorted(places)
    for question, start, end in zip(questions, places, [*places[1:], len(output)], strict=True):
        for name in catalog("experiments")[question]:
            assert f"\n  {name}\n" in output[start:end]
    entry = output.partition("\n  distance-correlation\n")[2].partition("\n\n")[0]
    assert "Time: minutes. Needs: the package dcor" in entry
    assert "Time: not timed." in output.partition("\n  detection\n")[2].partition("\n\n")[0]


def test_an_experiment_without_a_question_is_listed_last(monkeypatch: pytest.MonkeyPatch) -> None:
    def made(rows: int = 2) -> None:
        """Measure something new."""

    plugin(monkeypatch, "experiments", "new", made)
    assert shown("experiments").endswith(
        "\nOther\n\n  new\n    Measure something new.\n    Parameters: rows: int = 2\n"
    )
    record = json.loads(shown("experiments", "--json"))["experiments"][-1]
    assert (record["question"], record["time"], record["needs"]) == (listing.OTHER, None, "")


def test_json_keeps_its_keys_and_the_order_of_the_registry() -> None:
    everything = json.loads(shown("--json"))
    assert everything.pop("format") == 1 and list(everything) == list(listing.KINDS)
    for kind, records in everything.items():
        assert json.loads(shown(kind, "--json")) == {"format": 1, kind: records}
        assert [record["name"] for record in records] == registry.names(kind)
        assert all({"name", "summary", "parameters"} <= set(record) for record in records)
    (tampering,) = [one for one in everything["experiments"] if one["name"] == "tampering"]
    assert tampering["question"] == "Does an audit find a cheating provider?"
    assert tampering["time"] == "about 45 minutes"


# ---- names


@pytest.mark.parametrize(
    ("kind", "word", "name"),
    [(kind, *pair) for kind, synonyms in registry.SYNONYMS.items() for pair in synonyms.items()],
)
def test_a_synonym_names_what_there_is(kind: str, word: str, name: str) -> None:
    assert name in registry.BUILTINS[kind] and word not in registry.BUILTINS[kind]
    with pytest.raises(UnknownNameError, match=f"{word!r}; did you mean {name}\\? known: "):
        registry.resolve(kind, word)


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("Noise", "gaussian"),
        ("PERMUTE_COLUMNS", "hidden-perm"),
        ("NF4", "nf4"),
        ("permute columns", "hidden-perm"),
    ],
)
def test_case_underscores_and_spaces_hide_no_name(word: str, name: str) -> None:
    with pytest.raises(UnknownNameError, match=f"did you mean {name}\\?"):
        registry.resolve("defenses", word)


def test_a_plugin_may_have_the_name_of_a_synonym(monkeypatch: pytest.MonkeyPatch) -> None:
    class Noise:
        """Add other noise."""

    plugin(monkeypatch, "defenses", "noise", Noise)
    assert registry.resolve("defenses", "noise") is Noise


def test_an_empty_default_is_shown() -> None:
    assert "only: str = ''" in shown("experiments")
