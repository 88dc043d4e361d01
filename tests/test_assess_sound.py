"""Verdicts that would be wrong without a word: what is counted, what is kept, and what an attacker is given."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

import hiddenlab as hl
from hiddenlab import registry
from hiddenlab.attacker import Attacker
from hiddenlab.attacks.nearest import NearestEmbedding
from hiddenlab.channels import Channel
from hiddenlab.cli import app
from hiddenlab.config import AttackConfig
from hiddenlab.errors import HiddenlabError, InputError
from hiddenlab.eval.assess import command, control
from hiddenlab.eval.assess.command import assess
from hiddenlab.eval.assess.control import guesses
from hiddenlab.eval.assess.ensemble import CRASHED, OUT_OF_TIME, RAN, Attempt, Step, attack_all, solved
from hiddenlab.eval.assess.readings import Reading, by_one_attack, is_misled
from hiddenlab.eval.assess.secrets import Planted
from hiddenlab.eval.assess.subject import Subject, digest, distinct, everything
from hiddenlab.eval.assess.verdict import leak_of
from hiddenlab.eval.cells import Cell
from hiddenlab.eval.measures.intervals import wilson
from hiddenlab.job import Case, cases_of
from hiddenlab.models import TruncatedModel, load_model
from hiddenlab.prompts import Prompt
from hiddenlab.proposals.store import (
    cached_path,
    identity_of,
    is_cached,
    load_cached,
    save_cached,
    training_channel,
)
from hiddenlab.records import Recorder, RunRecord, read_run
from hiddenlab.registry import stages_of
from hiddenlab.repeated import together
from hiddenlab.scoring import score
from hiddenlab.stages import Stage
from hiddenlab.testing import byte_tokenizer
from hiddenlab.types import AttackResult, GroundTruth, TokenPrediction, silent
from tests.planted_faults import noised, planted_in
from tests.test_assess import Unsure, fakes, released, steps  # noqa: F401  (a fixture of every test)
from tests.test_assess_honest import case, result

Truncated = Callable[..., TruncatedModel]


@pytest.fixture(autouse=True)
def names(fakes: None) -> Iterator[None]:  # noqa: F811
    yield


# ---- what is counted


@given(st.integers(1, 400), st.integers(0, 400))
def test_wilsons_interval_holds_its_share_and_narrows_with_numbers(count: int, hits: int) -> None:
    share = min(hits, count) / count
    low, high = wilson(share, count)
    assert 0 <= low <= share + 1e-12 and share - 1e-12 <= high <= 1
    wider = wilson(share, count / 2)
    assert wider[1] - wider[0] > high - low


def test_every_token_that_is_read_raises_the_bound() -> None:
    """A share of so few counted tokens must not be rounded to one of them."""
    bounds = [leak_of([read, *[0] * 8], [0] * 9, [40] * 9).high for read in (0, 1, 2, 3)]
    assert bounds == sorted(set(bounds))


def test_a_prompt_that_is_given_twice_counts_once(tiny_model: Truncated) -> None:
    heard = list[str]()
    cases = [case(n, tokens) for n, tokens in enumerate(([5, 6], [7], [5, 6], [5, 6]))]
    kept = distinct(
        [*cases, Case(4, "unknown", None), Case(5, "unknown", None)], lambda name, *_: heard.append(name)
    )
    assert [one.index for one in kept] == [0, 1, 4, 5]
    assert "left out 2 prompts" in heard[0]
    model = tiny_model("llama", 1)
    subject = Subject(model, None, kept[:3], [Planted("x", "x")], 0, (), "tiny")
    tokens = {"tokenize": lambda text: [5]}
    everyone = everything(replace(subject, model=SimpleNamespace(**tokens)))
    assert len({one.index for one in everyone}) == len(everyone) == 4, "draws and records go by the index"


def test_a_verified_token_between_shown_rows_says_nothing_of_the_rows(tiny_model: Truncated) -> None:
    (shown,) = released(tiny_model("llama", 1), [5, 6])
    partial = replace(shown, info=replace(shown.info, positions=(0, 3)))

    def read(rows: Sequence[int]) -> AttackResult:
        tokens = tuple(TokenPrediction(5, row, 0.0, None, 1, True) for row in rows)
        return AttackResult(tokens, 0, 0, 0.0, "complete", text="")

    assert not solved(read([0, -1, -1]), partial) and solved(read([0, -1, 1]), partial)
    assert solved(read([-1, -1]), shown), "tokens of mixed blocks have no row of their own"


def test_only_verified_tokens_mislead(tiny_model: Truncated) -> None:
    model = tiny_model("llama", 1)
    (shown,) = released(model, [5, 7])
    partial = replace(shown, info=replace(shown.info, positions=(0, 2)))
    right, guess = result([5, 9, 7], True).tokens, TokenPrediction(9, -1, 0.0, None, 1, False)
    tokens = (right[0], guess, replace(right[2], row=1))
    sure = AttackResult(tokens, 0, 0, 0.0, "complete", text="")
    assert solved(sure, partial)
    read = Attempt("a", status=RAN, results={0: sure})
    reading = Reading(case(0, [5, 6, 7]), partial, "a", sure, None)
    assert not is_misled(reading, [read], 0, model.embedding)


def readings(model: TruncatedModel, *read: AttackResult) -> list[Reading]:
    truth = GroundTruth((5, 6, 7), text=model.text([5, 6, 7]))
    return [
        Reading(Case(i, f"p{i}", truth), shown, "a", one, score(one, truth))
        for i, (one, shown) in enumerate(zip(read, released(model, *[[5, 6, 7]] * len(read)), strict=True))
    ]


def test_an_attack_that_reads_more_takes_nothing_away(tiny_model: Truncated) -> None:
    """What is verified, what came back exactly, and what was read of planted texts stays."""
    model, few, more = tiny_model("llama", 1), result([1, 1, 1]), result([5, 6, 1])
    attempt = Attempt("b", status=RAN, results=dict.fromkeys(range(5), more))
    verified, planted = result([5, 6, 7], sure=True), result([5, 6, 7])
    believed = readings(model, verified, few, few, few, planted)
    found = by_one_attack(model, believed, [attempt], [0] * 4)
    assert [one.attack for one in found] == ["a", "b", "b", "b", "a"] and found[0].result is verified
    exactly = readings(model, result([5, 6, 7]), few, few, few)
    assert by_one_attack(model, exactly, [attempt], [0] * 4) == exactly


# ---- what the control knows


TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    "{% if add_generation_prompt %}<me>{% endif %}"
)


def chatting(model: TruncatedModel) -> TruncatedModel:
    """Return a model whose tokenizer puts a token before a text, and has a template of characters."""
    inner = byte_tokenizer().backend_tokenizer
    made = PreTrainedTokenizerFast(tokenizer_object=inner)
    made.chat_template = TEMPLATE
    other = model.sibling()
    other.__dict__["tokenizer"] = made
    return other


def test_what_stands_around_every_prompt_is_no_leak(
    tiny: Callable[..., str], tiny_model: Truncated, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = chatting(tiny_model("llama", 1))
    monkeypatch.setattr(
        control, "own_text", lambda model, count, length, *_: torch.zeros(3, length, dtype=torch.long)
    )
    messages = ({"role": "user", "content": "Where is the ferry?"},)
    chat = Prompt("p001", "Where is the ferry?", "file", messages)
    whole, cut, plain = (
        *cases_of([chat], model), *cases_of([chat], model, 12), *cases_of([Prompt("p002", "<user>x", "file")], model)
    )  # fmt: skip
    said = guesses(model, [whole, cut, plain])
    texts = [model.tokenizer.decode([token for token in one if token]) for one in said]
    assert texts == ["<user></><me>", "<user>", ""], "a text without messages has no template"


# ---- what is kept


def twice(kind: str) -> type[Stage]:
    class Turned(Stage):
        """Turns states, as its code says that day."""

        spec = "turned-by-code"

        def states(self, states: torch.Tensor, generator: torch.Generator) -> Any:
            return (states if kind == "new" else -states), None, {}

    return Turned


def test_what_was_learned_behind_other_code_of_a_stage_is_not_used(tiny_model: Truncated) -> None:
    model, learned = tiny_model("llama", 1), {"rows": torch.ones(2)}
    registry.register("defenses", "turned-by-code", twice("old"))
    old = identity_of(model, ["turned-by-code"])
    save_cached(old, learned)
    assert is_cached(old) and not cached_path(old).exists(), "another process may draw another key"
    assert torch.equal((load_cached(old, model) or {})["rows"], learned["rows"])
    registry.register("defenses", "turned-by-code", twice("new"))
    new = identity_of(model, ["turned-by-code"])
    assert not is_cached(new) and load_cached(new, model) is None
    built_in = identity_of(model, ["seq-perm"])
    save_cached(built_in, learned)
    assert (
        is_cached(built_in)
        and cached_path(built_in).exists()
        and identity_of(model, ["seq-perm"]) == built_in
    )


def test_a_cell_is_of_the_files_that_it_names(tmp_path: Path) -> None:
    code, prompts, model = tmp_path / "mine.py", tmp_path / "prompts.txt", tmp_path / "model"
    code.write_text("one"), prompts.write_text("one")
    model.mkdir()
    (model / "config.json").write_text("{}")
    spec = {
        "defense": ["seq-perm", f"{code}:strength=2"],
        "prompts": str(prompts),
        "model": str(model),
        "layer": 1,
    }

    def digest(**changed: Any) -> str:
        return Cell("assess", spec | changed, {}).digest

    seen = [digest()]
    for path in (code, prompts, model / "config.json"):
        path.write_text("another one")
        seen.append(digest())
    assert len(set(seen)) == 4 and digest() == seen[-1]
    family = digest(defense=[], family=f"{code}:strength=0.1..10", map=f"seq-perm+{code}::A")
    code.write_text("a third one")
    assert digest(defense=[], family=f"{code}:strength=0.1..10", map=f"seq-perm+{code}::A") != family
    names = {"defense": ["seq-perm"], "prompts": None, "model": "builtin", "map": "identity"}
    assert Cell("assess", names, {}).digest == Cell("assess", dict(names), {}).digest


# ---- what an attacker is given


class FixedMatrix(Stage):
    """Turns states by a matrix that is drawn once, of the model's width."""

    spec = "fixed-matrix"

    def __init__(self) -> None:
        self.matrix = torch.linalg.qr(torch.randn(32, 32, generator=torch.Generator().manual_seed(3)))[0]

    def states(self, states: torch.Tensor, generator: torch.Generator) -> Any:
        return states @ self.matrix.to(states), None, {}


class NeedsText(Stage):
    """Refuses rows that are no text's."""

    spec = "needs-text"

    def states(self, states: torch.Tensor, generator: torch.Generator) -> Any:
        raise ValueError("rows of a text are wanted")


def test_a_stage_of_ones_own_is_tried_with_rows_as_wide_as_the_models(tiny: Callable[..., str]) -> None:
    model = load_model(tiny("llama", hidden_size=32), 1, device="cpu")
    for name, stage in (("fixed-matrix", FixedMatrix), ("needs-text", NeedsText)):
        registry.register("defenses", name, stage)
    assert model.width == 32
    for spec, kept in (
        ("fixed-matrix", True),
        ("needs-text", True),
        ("seq-perm", False),
        ("hidden-perm", False),
    ):
        info = Channel.parse([spec]).published(released(model, [5])[0].info)
        assert (spec in training_channel(model, info)) == kept, spec


def test_last_bits_are_looked_for_in_a_single_release(tiny_model: Truncated) -> None:
    """The mean of several releases has none of their bits."""
    model, tokens = tiny_model("llama", 1), [(7 * n * n + 31 * n) % 251 for n in range(1, 25)]
    channel = Channel.parse(["output-noise:sigma=0.00001"])
    made = [channel.release(model, tokens, torch.Generator().manual_seed(n)) for n in range(3)]
    shown = [planted_in("bit-by-bit", observation, truth) for observation, truth in made]
    mean = together(shown, model, False, 0)
    assert mean.first is not None and torch.equal(mean.first.states, shown[0].states)
    drowned = replace(mean, states=noised(mean.states))
    (read,) = attack_all([drowned], model, 0, 60.0, silent, [Step("planted", single=True)])
    assert read.results[0].ids == tokens
    (missed,) = attack_all([drowned], model, 0, 60.0, silent, [Step("planted")])
    assert not missed.results or missed.results[0].ids != tokens


@pytest.mark.parametrize("key", ["session", "forever"])
def test_a_key_that_nothing_else_passes_under_is_refused(key: Any) -> None:
    with pytest.raises(InputError, match=r"changes nothing.*--known N, --chosen N or --releases N"):
        Attacker(key=key)
    for more in ({"known": 1}, {"chosen": 1}, {"releases": 2}):
        assert Attacker(key=key, **more).key == key


def test_without_the_defense_attacks_take_no_more_time_than_with_it(
    tiny_model: Truncated, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, given_ = tiny_model("llama", 1), list[float]()

    def attacked(rows: Any, model: Any, seed: int, seconds: float, *_: Any, **__: Any) -> list[Attempt]:
        given_.append(seconds)
        return [Attempt("unsure", status=OUT_OF_TIME, seconds=seconds)]

    monkeypatch.setattr(command, "attack_all", attacked)
    monkeypatch.setattr(command, "ATTACKS", steps("unsure"))
    prompts = cases_of([Prompt("p001", "x", "", tokens=(5, 6))], model)
    subject = Subject(model, Channel([]), prompts, [], 0, (), "tiny")
    recorder = Recorder.create(RunRecord(verb="assess", spec={}), keep=False)
    tried = [Attempt("unsure", allowed=50.0, status=RAN) for _ in range(3)]
    command._undefended(subject, [0], tried, 60.0, recorder, silent)
    assert given_ == [50.0, 10.0, 0.0]


@pytest.mark.parametrize("short", [False, True])
def test_a_model_that_cannot_read_planted_texts_is_assessed_without_them(
    tiny: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, short: bool
) -> None:
    monkeypatch.setattr(command, "ATTACKS", steps("unsure"))
    path = tmp_path / "ids.jsonl"
    path.write_text("[5, 6, 7]\n[8, 9, 10]\n")
    options: dict[str, Any] = {"tokenizer": True, "max_position_embeddings": 16} if short else {}
    model = tiny("llama", **options)
    config = AttackConfig(model=model, prompts=str(path), layer=0, stream="embed", defense=("identity",))
    heard = list[str]()
    found = assess(config, 1.0, keep=False, progress=lambda name, *_: heard.append(name)).findings
    assert found["secrets"] is None and found["leak"]["value"] == 1
    assert any("no secrets are planted" in name for name in heard)


def test_reading_less_than_is_guessed_is_no_proof_that_little_can_be_read() -> None:
    few = leak_of([0] * 3, [12] * 3, [30] * 3)
    assert few.value < 0 and few.high > 0.05
    many = leak_of([0] * 20, [1] * 20, [40] * 20)
    assert 0 < many.high < 0.05


class Rude(Unsure):
    """Works in place, or ends the program, or names a token that there is not."""

    def __init__(self, how: str = "exit") -> None:
        super().__init__()
        self.how = how

    def _recover(self, observation: Any) -> AttackResult:
        if self.how == "exit":
            raise SystemExit(0)
        if self.how == "in place":
            observation.states.zero_()
        token = 10**6 if self.how == "token" else 1
        return AttackResult((TokenPrediction(token, 0, 0.0, None, 1, False),), 0, 0, 0.0, "complete")


@pytest.mark.parametrize(("how", "status"), [("exit", CRASHED), ("token", CRASHED), ("in place", RAN)])
def test_a_rude_attack_spoils_nothing_but_itself(tiny_model: Truncated, how: str, status: str) -> None:
    registry.register("attacks", "rude", Rude)
    model = tiny_model("llama", 1)
    shown = released(model, [5], [7])
    made = [Step(f"rude:how={how}"), Step("unsure")]
    rude, other = attack_all(shown, model, 0, 60.0, silent, made)
    assert rude.status == status and other.status == RAN
    assert [other.results[i].ids for i in range(2)] == [[5], [7]]


def test_code_behind_a_joined_stage_of_a_record_is_not_run(tmp_path: Path) -> None:
    spec = AttackConfig(prompt="x").to_json() | {"defense": ["gaussian:sigma=0.1+evil.py:factor=2"]}
    (tmp_path / "evil.py").write_text("raise SystemExit('it ran')")
    recorder = Recorder.create(RunRecord(verb="attack", spec=spec), out=tmp_path / "run")
    recorder.close("interrupted")
    refused = CliRunner().invoke(app, ["rerun", str(tmp_path / "run"), "--resume"])
    assert refused.exit_code == 2 and "ran code of evil.py" in refused.output + refused.stderr


# ---- attacks made for a defense


class Scaled(Stage):
    """Multiplies each row by a secret factor of its own."""

    spec = "scaled-rows"

    def states(self, states: torch.Tensor, generator: torch.Generator) -> Any:
        drawn = torch.rand(len(states), 1, generator=generator, device=generator.device)
        return states * (1 + 9 * drawn.to(states)), None, {}


NEAREST = Path(__file__).parents[1] / "tests/plugin/hiddenlab_example/nearest.py"


def test_an_attack_of_ones_own_is_tried_first(
    tiny: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No attack of the lab undoes a factor for each row; the direction of a row is enough for one that knows of it."""
    registry.register("defenses", "scaled-rows", Scaled)
    monkeypatch.setattr(command, "ATTACKS", steps("planted"))
    prompts, mine = tmp_path / "prompts.txt", tmp_path / "undo.py"
    prompts.write_text("abcdefgh\nijklmnop\nqrstuvwx\n")
    mine.write_text(NEAREST.read_text())
    where: dict[str, Any] = {
        "prompts": str(prompts),
        "layer": 0,
        "stream": "embed",
        "defense": ("scaled-rows",),
    }
    config = AttackConfig(model=tiny("llama", tokenizer=True), **where)
    alone = assess(config, 1.0, keep=False).findings
    made = assess(config, 1.0, tmp_path / "run", attacker=Attacker(attacks=(str(mine),)))
    found = made.findings
    assert alone["status"] != "BROKEN" and found["status"] == "BROKEN"
    assert [one["attack"] for one in found["attacks"]] == [str(mine), "planted"]
    assert "an attacker who has 1 attack of his own" in found["sentence"]
    record, _ = read_run(tmp_path / "run")
    assert record.setup["attacks"] == [str(mine)]
    before = digest([], [str(mine)])
    mine.write_text(mine.read_text() + "\n")
    assert before != digest([], [str(mine)]), "what was read with other code is not gone on with"
    refused = CliRunner().invoke(app, ["rerun", str(tmp_path / "run"), "--resume"])
    assert refused.exit_code == 2 and "ran code of" in refused.output + refused.stderr


@pytest.mark.parametrize(
    ("attacks", "said"),
    [
        (("unsure",), "tried already"),
        (("planted", "planted"), "tried already"),
        (("there/is/none.py",), "none.py"),
    ],
)
def test_an_attack_that_cannot_be_added_is_refused(
    tiny: Callable[..., str], monkeypatch: pytest.MonkeyPatch, attacks: tuple[str, ...], said: str
) -> None:
    monkeypatch.setattr(command, "ATTACKS", steps("unsure"))
    with pytest.raises(HiddenlabError, match=said):
        assess(AttackConfig(model=tiny("llama")), 1.0, keep=False, attacker=Attacker(attacks=attacks))


def test_from_python_own_attacks_are_named(tiny_model: Callable[..., TruncatedModel]) -> None:
    """An object would be a JSON error otherwise; a name alone is taken as a list of one."""
    model = tiny_model("llama", 1)
    for attacks in (NearestEmbedding(), [NearestEmbedding()], [3]):
        with pytest.raises(InputError, match=r"attacks of hl\.assess are named: give attacks=\['FILE"):
            hl.assess("identity", model, "ab", attacks=attacks)
    with pytest.raises(InputError, match=r"there/is/none\.py"):
        hl.assess("identity", model, "ab", attacks="there/is/none.py")
    with pytest.raises(InputError, match=r"attacker should be JSON values: Object of type set"):
        hl.assess("identity", model, "ab", known={3})


# ---- how a defense of several stages is written


@given(
    st.lists(
        st.sampled_from(["seq-perm", "gaussian:sigma=1e+3", "gaussian:sigma=1.e+1", "m.py::A:b=1E+2"]),
        min_size=1,
    )
)
def test_stages_that_are_joined_come_apart_again(stages: list[str]) -> None:
    assert stages_of("+".join(stages)) == stages == stages_of(" + ".join(stages))


def test_joined_stages_are_those_of_a_list_everywhere() -> None:
    joined, apart = "gaussian:sigma=0.1+seq-perm", ["gaussian:sigma=0.1", "seq-perm"]
    assert Channel.parse([joined]).specs == Channel.parse(apart).specs
    assert AttackConfig(defense=(joined,)).checked().defense == tuple(apart)
