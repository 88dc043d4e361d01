"""No verdict says more than was tried, and none less than was read: cases in which a defense would look better."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from hiddenlab import registry
from hiddenlab.attacks.planted import in_low_bits
from hiddenlab.attacks.vocab_match import VocabMatch
from hiddenlab.channels import Channel
from hiddenlab.cli import app
from hiddenlab.config import AttackConfig
from hiddenlab.errors import HiddenlabError, InputError
from hiddenlab.eval.assess import command, price
from hiddenlab.eval.assess.belief import RARE, Belief
from hiddenlab.eval.assess.command import assess
from hiddenlab.eval.assess.ensemble import (
    CRASHED,
    DONE_BEFORE,
    RAN,
    Attempt,
    Step,
    attack_all,
    ended_with_all,
    verified,
)
from hiddenlab.eval.assess.kept import of_attacks
from hiddenlab.eval.assess.readings import Reading, by_one_attack, is_misled, rare_accuracy_of
from hiddenlab.job import Case
from hiddenlab.models import TruncatedModel, load_model
from hiddenlab.report.markdown import write_report
from hiddenlab.row_facts import with_extra_rows
from hiddenlab.runner import Interrupted
from hiddenlab.secret_maps import map_between, with_map
from hiddenlab.stages import Stage
from hiddenlab.types import (
    AttackResult,
    GroundTruth,
    Observation,
    ObservationInfo,
    TokenPrediction,
    silent,
)
from hiddenlab.utils.random import orthogonal
from tests.test_assess import Knowing, Unsure, fakes, released, steps  # noqa: F401  (a fixture of every test)
from tests.test_assess_record import Stopping

Truncated = Callable[..., TruncatedModel]


@pytest.fixture(autouse=True)
def names(fakes: None) -> None:  # noqa: F811
    registry.register("attacks", "stopping", Stopping)
    registry.register("attacks", "sure-of-one", SureOfOne)
    registry.register("attacks", "stuck", Stuck)
    registry.register("attacks", "empty", Empty)
    registry.register("attacks", "misread", Misread)


class SureOfOne(Unsure):
    """Reads nothing, and is sure of one wrong token of each prompt."""

    def _recover(self, observation: Observation) -> AttackResult:
        tokens = (TokenPrediction(1, row, 0.0, None, 1, row == 0) for row in range(len(observation.states)))
        return AttackResult(tuple(tokens), 0, 0, 0.0, "complete")


def result(ids: Sequence[int], sure: bool = False, positions: tuple[int, ...] | None = None) -> AttackResult:
    tokens = tuple(TokenPrediction(token, row, 0.0, None, 1, sure) for row, token in enumerate(ids))
    return AttackResult(tokens, 0, 0, 0.0, "complete", positions=positions, text="")


def case(index: int, tokens: Sequence[int], computed: Sequence[int] | None = None) -> Case:
    truth = GroundTruth(tuple(tokens), computed=None if computed is None else tuple(computed))
    return Case(index, f"p{index}", truth)


def prompts_of(tmp_path: Path, *texts: str) -> str:
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(texts))
    return str(path)


# ---- attacks that were not tried


def test_what_stands_beside_replaced_tokens_is_looked_for_although_their_rows_are_read(
    tiny_model: Truncated,
) -> None:
    """The tokens that ran are all verified, which says nothing of the prompt's own ones in the public facts."""
    model = tiny_model("llama", 1)
    plain = released(model, [5], [7])
    replaced = [replace(one, info=replace(one.info, facts={"replaced_tokens": True})) for one in plain]
    made = [Step("knowing"), Step("unsure", beside=True)]
    beside, left_out = (attack_all(shown, model, 0, 60.0, silent, made)[1] for shown in (replaced, plain))
    assert beside.status == RAN and sorted(beside.results) == [0, 1]
    assert left_out.status == DONE_BEFORE


@pytest.mark.parametrize(
    ("attack", "defense"),
    [
        ("replaced-tokens", "santext:epsilon=5"),
        ("sipit", "identity"),
        pytest.param("missing-tokens", "drop-rows:size=1,after=2", marks=pytest.mark.slow),
        ("vocab-match", "identity"),
    ],
)
def test_parts_of_an_attack_report_to_whoever_asks_last(
    tiny_model: Truncated, small_probes: None, attack: str, defense: str
) -> None:
    """The clock of an attack's first share of the time must not end its second one."""
    model, over, heard = tiny_model("llama", 1), [], []
    shown = Channel.parse([defense]).release(model, [5, 17, 40, 99], 0)[0]

    def first(*_: object) -> None:
        assert not over

    tried = registry.build("attacks", attack)
    tried.progress = first
    tried.fit(shown.info, model)
    over.append(True)
    tried.progress = lambda what, done, total: heard.append(what)
    tried.recover(shown)
    assert heard
    tried.progress = tried.progress  # changes nothing
    tried.progress("more", 0, 1)
    assert heard[-1] == "more"


def test_a_prompt_that_is_shown_whole_does_not_keep_missing_tokens_from_the_others(
    tiny_model: Truncated,
) -> None:
    model = tiny_model("llama", 1)
    whole, partial = released(model, [5], [7, 8])
    partial = replace(partial, info=replace(partial.info, positions=(0, 2)))
    (one,) = attack_all([whole, partial], model, 0, 60.0, silent, [Step("unsure", missing=True)])
    assert one.status == RAN and sorted(one.results) == [1]


def test_an_attack_that_could_use_some_prompts_alone_says_nothing_of_the_others(
    tiny_model: Truncated,
) -> None:
    shown = released(tiny_model("llama", 1), [5], [7])
    some, all_ = Attempt("some", status=RAN), Attempt("all", status=RAN)
    some.results[0], all_.results[0] = result([1]), result([1])
    all_.results[1] = result([])
    assert ended_with_all([some, all_], shown) == {"all"}
    few = Attempt("few", status=RAN, results=dict(all_.results), capped=True)
    assert ended_with_all([some, all_, few], shown) == {"all"}, (
        "the right token may have been the next candidate"
    )
    all_.results[1] = result([7], sure=True)  # nobody need read it again
    all_.results[0] = few.results[0] = result([5], sure=True)
    assert ended_with_all([some, all_, few], shown) == {"some", "all", "few"}


# ---- what was read


def test_one_attack_that_reads_more_than_the_attacker_believes_of_each_prompt_counts(
    tiny: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A single token of which another attack is wrongly sure must not hide what was read."""
    monkeypatch.setattr(command, "ATTACKS", steps("sure-of-one", "unsure"))
    path = prompts_of(tmp_path, *("abcdefg"[i:] for i in range(4)))
    config = AttackConfig(
        model=tiny("llama", tokenizer=True), prompts=path, layer=0, stream="embed", defense=("identity",)
    )
    found = assess(config, 1.0, keep=False).findings
    assert found["status"] == "BROKEN" and found["leak"]["value"] == 1 and found["secrets"]["read"] == 4
    assert {one["attack"] for one in found["readings"]} == {"unsure"}


def test_the_belief_stays_where_no_attack_surely_reads_more(tiny_model: Truncated) -> None:
    model = tiny_model("llama", 1)
    cases = [case(i, [5, 6, 7]) for i in range(3)]
    believed = [Reading(one, observation, "a", result([5, 1, 1]), None) for one, observation in
                zip(cases, released(model, *[[5, 6, 7]] * 3), strict=True)]  # fmt: skip
    other = Attempt("b", status=RAN, results={0: result([5, 6, 1]), 1: result([]), 2: result([5, 1, 1])})
    assert by_one_attack(model, believed, [other], [0, 0, 0]) == believed


def test_rows_of_no_token_are_no_tokens_of_an_unknown_prompt(tiny_model: Truncated) -> None:
    (shown,) = released(tiny_model("llama", 1), [5, 6, 7])
    mixed = replace(shown, info=with_extra_rows(shown.info, 1))
    assert Reading(Case(0, "p", None), mixed, None, None, None).tokens == 2


def test_right_tokens_of_some_rows_mislead_nobody(tiny_model: Truncated) -> None:
    model = tiny_model("llama", 1)
    (shown,) = released(model, [5, 7])
    partial = replace(shown, info=replace(shown.info, positions=(0, 2)))
    truth = case(0, [5, 6, 7])
    for ids, misled in (([5, 7], False), ([5, 6], True)):
        read = Attempt("a", status=RAN, results={0: result(ids, True, (0, 2))})
        reading = Reading(truth, partial, "a", read.results[0], None)
        assert is_misled(reading, [read], 0, model.embedding) == misled


# ---- defenses that say too little of themselves


@pytest.mark.parametrize("way", ["told order", "rows", "coordinates"])
def test_a_defense_that_shuffles_in_secret_is_refused(tiny_model: Truncated, way: str) -> None:
    """Attacks that know nothing of it take each row for another token's, and the defense would look as if it held."""

    class Shuffling(Stage):
        spec = "shuffling"

        def states(self, states: torch.Tensor, generator: torch.Generator) -> Any:
            if way == "coordinates":
                return states.flip(1), None, {}
            order = tuple(reversed(range(len(states))))
            return states[list(order)], order if way == "told order" else None, {}

    class Honest(Shuffling):
        def publish(self, info: ObservationInfo) -> ObservationInfo:
            return replace(info, rows_permuted=True, columns_permuted="shared")

    model = tiny_model("llama", 1)
    with pytest.raises(HiddenlabError, match="shuffled rows or coordinates"):
        Channel([Shuffling()]).release(model, [5, 6, 7])
    assert Channel([Honest()]).release(model, [5, 6, 7])[0].info.rows_permuted


WAYS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str | None]] = {
    "turned": (lambda rows: rows @ turns(rows.shape[1]), "columns"),
    "signs": (lambda rows: rows * turns(rows.shape[1])[0].sign(), "columns"),
    "turned and rounded": (lambda rows: (rows @ turns(rows.shape[1])).bfloat16().float(), "columns"),
    "turned and noised": (
        lambda rows: (
            rows @ turns(rows.shape[1])
            + 0.02 * rows.norm(dim=1, keepdim=True) * turns(rows.shape[1], 9)[: len(rows)]
        ),
        "columns",
    ),
    "each turned": (
        lambda rows: torch.stack([row @ turns(len(row), i) for i, row in enumerate(rows)]),
        "each-row",
    ),
    "mixed": (lambda rows: torch.randn(len(rows), len(rows), generator=seeded()) @ rows, "rows"),
    "noised": (
        lambda rows: rows + 0.3 * rows.norm(dim=1, keepdim=True) * turns(rows.shape[1])[: len(rows)],
        None,
    ),
    "noised, of one length": (
        lambda rows: (
            torch.nn.functional.normalize(rows + 0.1 * torch.randn(rows.shape, generator=seeded()))
            * rows.norm(dim=1, keepdim=True)
        ),
        None,
    ),
    "turned, all of one length": (
        lambda rows: torch.nn.functional.normalize(rows) @ turns(rows.shape[1]),
        "columns",
    ),
    "turned in place": (lambda rows: rows.copy_(rows @ turns(rows.shape[1])), "columns"),
    "noised beside a sink": (
        lambda rows: rows + 0.3 * rows[1:].norm(dim=1).median() * turns(rows.shape[1])[: len(rows)],
        None,
    ),
    "smoothed": (lambda rows: 0.5 * rows + 0.25 * rows.roll(1, 0) + 0.25 * rows.roll(-1, 0), None),
    "of another length": (lambda rows: 3 * rows, None),
    "rounded": (lambda rows: rows.round(decimals=1), None),
    "zeros": (torch.zeros_like, None),
}


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def turns(width: int, seed: int = 0) -> torch.Tensor:
    return orthogonal(width, seeded(seed)).float()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("facts", [{}, {"gain": 2}])
def test_a_defense_that_maps_rows_in_secret_is_refused(
    tiny_model: Truncated, way: str, facts: dict[str, int]
) -> None:
    """Attacks on plain rows read nothing of such rows, and the defense would look as if it held."""
    mapped, of = WAYS[way]

    class Mapping(Stage):
        spec = "mapping"

        def states(self, states: torch.Tensor, generator: torch.Generator) -> Any:
            return mapped(states), None, {}

        def publish(self, info: ObservationInfo) -> ObservationInfo:
            return replace(info, facts={**info.facts, **facts})

    class Honest(Mapping):
        def publish(self, info: ObservationInfo) -> ObservationInfo:
            return with_map(super().publish(info), of or "rows")

    model, tokens = tiny_model("llama", 1), [5, 6, 7, 40, 9, 8]
    assert Channel([Honest()]).release(model, tokens)[0].info.facts
    if of is None:
        assert Channel([Mapping()]).release(model, tokens)[0].info.facts == facts
        return
    with pytest.raises(
        HiddenlabError, match=rf"says nothing of it: let it return .*with_map\(info, '{of}'\)"
    ):
        Channel([Mapping()]).release(model, tokens)


def test_noise_on_few_rows_is_no_secret_map() -> None:
    """Two rows have one inner product, which noise keeps by chance."""
    for seed in range(500):
        rows, noise = torch.randn(2, 4, 64, generator=seeded(seed))
        for count in (2, 3, 4):
            assert map_between(rows[:count], (rows + noise)[:count]) is None


@pytest.mark.parametrize("ids", [torch.tensor([5, 6]), {5, 6}])
def test_public_facts_that_no_attack_could_read_are_refused(
    tiny: Callable[..., str], tmp_path: Path, ids: Any
) -> None:
    class Hiding(Stage):
        spec = "hiding"

        def publish(self, info: ObservationInfo) -> ObservationInfo:
            return replace(info, facts={"ids": ids})

    registry.register("defenses", "hiding", Hiding)
    config = AttackConfig(
        model=tiny("llama", tokenizer=True), prompts=prompts_of(tmp_path, "ab"), layer=1, defense=("hiding",)
    )
    with pytest.raises(InputError, match="the public facts of hiding are no JSON values"):
        assess(config, 1.0, keep=False)


@pytest.mark.parametrize("part", ["publish", "undo"])
def test_a_faulty_defense_is_named_before_any_attack(
    tiny: Callable[..., str], tmp_path: Path, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Faulty(Stage):
        spec = "faulty"

        def states(self, states: torch.Tensor, generator: torch.Generator) -> Any:
            return 2 * states, None, {"k": 1}

    monkeypatch.setattr(Faulty, part, lambda *_: None if part == "publish" else torch.zeros(1, 1))
    registry.register("defenses", "faulty", Faulty)
    monkeypatch.setattr(command, "attack_all", lambda *_: pytest.fail("attacked"))
    config = AttackConfig(
        model=tiny("llama", tokenizer=True), prompts=prompts_of(tmp_path, "ab"), layer=1, defense=("faulty",)
    )
    with pytest.raises(HiddenlabError, match=f"method '{part}' of .*faulty"):
        assess(config, 1.0, keep=False)


def test_utility_that_is_no_number_is_not_measured(
    tiny_model: Truncated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A null in a record where a figure belongs could not be read again."""
    monkeypatch.setattr(price, "degradation", lambda *_: {"kl": {"value": math.nan}})
    found = price.utility_of(tiny_model("llama", 1), Channel([]), [case(0, [5, 6])], 0, silent)
    assert found == {"reason": "not measured: what the model says behind the defense are no finite numbers"}


def test_a_fact_without_a_number_stops_no_attack(tiny_model: Truncated) -> None:
    from hiddenlab.attacks.planted import Planted

    model = tiny_model("llama", 1)
    (shown,) = released(model, [5, 6, 7])
    infinite = replace(shown, info=replace(shown.info, facts={"range": [1.0, math.inf], "no": [math.nan]}))
    assert Planted().fit(infinite.info, model).recover(infinite).stop_reason == "nothing planted was found"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_last_bits_are_read_of_every_dtype(dtype: torch.dtype) -> None:
    ids, whole = (
        torch.tensor([300, 7, 411, 99]),
        {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8},
    )
    raw = torch.ones(4, 20).to(dtype).view(whole[dtype.itemsize])
    for bit in range(9):
        raw[:, 2 + bit] = (raw[:, 2 + bit] & ~1) | ((ids >> bit) & 1).to(raw.dtype)
    found = [one.tolist() for group in in_low_bits(raw.view(dtype), 512) for one in group.ids]
    assert ids.tolist() in found


@pytest.mark.slow
@pytest.mark.parametrize("defense", ["gaussian:sigma=1", "dp-forward:epsilon=5"])
def test_noise_that_drowns_every_token_verifies_none(tiny: Callable[..., str], defense: str) -> None:
    """Without a truth verified tokens count as read: a wrong one would be a leak that is none."""
    model = load_model(tiny("llama", tokenizer=True), 2, device="cpu")
    channel = Channel.parse([defense])
    texts = ("The spare key is under the blue mat", "Ask Marie about room nine", "Nothing to see here today")
    shown = [channel.release(model, text, seed)[0] for seed, text in enumerate(texts)]
    attack = VocabMatch().fit(shown[0].info, model)
    assert not any(token.verified for found in attack.recover_batch(shown) for token in found.tokens)


# ---- records and input


def test_a_perplexity_without_bounds_can_be_recorded_and_read(
    tiny: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "ATTACKS", steps("never"))
    path = prompts_of(tmp_path, "abc", "def")
    config = AttackConfig(
        model=tiny("llama", tokenizer=True), prompts=path, stream="logits",
        defense=("output-noise:sigma=1e6,scale=none",),
    )  # fmt: skip
    made = assess(config, 1.0, runs_dir=tmp_path / "runs")
    assert made.path is not None and made.findings["utility"]["perplexity"]["value"] > 1e100
    assert write_report([made.path], tmp_path / "report")


def test_what_other_attacks_read_is_not_taken_for_that_of_these(
    tiny: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is where a newer version has other attacks: mixed, the record could not be read again."""
    monkeypatch.setattr(command, "ATTACKS", steps("unsure", "stopping"))
    Stopping.calls, Stopping.interrupts = 0, True
    config = AttackConfig(
        model=tiny("llama", tokenizer=True), prompts=prompts_of(tmp_path, "ab", "cde", "fg"), layer=0,
        stream="embed", defense=("identity",),
    )  # fmt: skip
    runs = tmp_path / "runs"
    with pytest.raises(Interrupted) as stopped:
        assess(config, 1.0, runs_dir=runs)
    run = stopped.value.run
    assert run is not None and run.path is not None
    assert of_attacks(run.samples, ["unsure", "stopping"])
    monkeypatch.setattr(command, "ATTACKS", steps("knowing", "unsure"))
    with pytest.raises(InputError, match="was started with other attacks"):
        assess(config, 1.0, resume=run.path)
    made = assess(config, 1.0, runs_dir=runs)
    assert made.path is not None and made.path != run.path and made.status == "BROKEN"


@pytest.mark.parametrize("minutes", ["inf", "nan", "-1"])
def test_a_time_without_an_end_is_refused(minutes: str) -> None:
    found = CliRunner().invoke(app, ["assess", "identity", "--minutes", minutes])
    assert found.exit_code == 2 and "--minutes is above 0" in found.output


def test_nothing_but_json_is_printed_although_a_defense_prints(
    tiny: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "ATTACKS", steps("knowing"))
    code = tmp_path / "loud.py"
    code.write_text(
        "from hiddenlab.stages import Stage\nprint('read')\n\nclass Loud(Stage):\n    spec = 'loud'\n\n"
        "    def states(self, states, generator):\n        print('released')\n        return states, None, {}\n"
    )
    model, prompts = tiny("llama", tokenizer=True), prompts_of(tmp_path, "ab", "cd")
    options = ["--layer", "1", "--json", "--runs-dir", str(tmp_path / "runs")]
    asked = ["assess", str(code), "--model", model, "--prompts", prompts, *options]
    found = CliRunner().invoke(app, asked)
    assert json.loads(found.stdout)["defense"] == [str(code)] and found.exit_code in (1, 3)


def test_rare_tokens_are_those_that_the_model_does_not_expect(tiny_model: Truncated) -> None:
    model = tiny_model("llama", 1)
    whole, tokens = model.sibling(stream="logits"), [5, 77, 3, 3, 200, 41, 8]
    slow = {
        place
        for place in range(1, len(tokens))
        if float(whole.encode(torch.tensor(tokens[:place]))[-1].softmax(0)[tokens[place]]) < RARE
    }
    assert slow and Belief(model).rare(tokens) == slow and Belief(model).rare([5]) == set()
    observation = released(model, tokens)[0]
    case, first = Case(0, "p", GroundTruth(tuple(tokens))), sorted(slow)[0]
    for ids, share in (
        (tokens, 1.0),
        ([0] * len(tokens), 0.0),
        ([0] * first + tokens[first : first + 1], None),
    ):
        read = AttackResult(
            tuple(TokenPrediction(token, i, 0.0, None, 1, False) for i, token in enumerate(ids)),
            0,
            0,
            0.0,
            "complete",
        )
        found = rare_accuracy_of([Reading(case, observation, "a", read, None)], Belief(model))
        assert found is not None and found.value == pytest.approx(1 / len(slow) if share is None else share)
    none = Case(0, "p", GroundTruth((5,)))
    assert rare_accuracy_of([Reading(none, observation, None, None, None)], Belief(model)) is None


def test_a_reading_convinces_where_half_is_sure_or_it_is_a_text(
    tiny_model: Truncated, monkeypatch: pytest.MonkeyPatch
) -> None:
    belief = Belief(tiny_model("llama", 1))
    (shown,) = released(tiny_model("llama", 1), [5, 5, 5, 5])
    monkeypatch.setattr(belief, "_evidence", lambda *_: None)
    monkeypatch.setattr(belief, "_usual", lambda length: (-4.0, -12.0))

    def answer(sure: int) -> AttackResult:
        tokens = tuple(TokenPrediction(5, i, 0.0, None, 1, i < sure) for i in range(4))
        return AttackResult(tokens, 0, 0, 0.0, "complete")

    for likelihood, sure, convinces in ((-5.9, 0, True), (-6.1, 0, False), (-9.0, 2, True), (-9.0, 1, False)):
        monkeypatch.setattr(belief, "_likelihood", lambda ids, said=likelihood: said)
        assert belief.convinces(answer(sure), shown) == convinces
    replaced = Belief(tiny_model("llama", 1), replaced=True)
    own, chance = replaced._usual(12)
    assert math.isfinite(own) and math.isfinite(chance)
    monkeypatch.setattr(replaced, "_usual", lambda length: (-4.0, -12.0))
    monkeypatch.setattr(replaced, "_likelihood", lambda ids: -9.0)
    assert not replaced.convinces(answer(4), shown)
    # A text that says nothing of the rows is an invention of the language model.
    monkeypatch.setattr(belief, "_likelihood", lambda ids: -4.0)
    for evidence, convinces in ((0.5, False), (2.0, True)):
        monkeypatch.setattr(belief, "_evidence", lambda *_, it=evidence: it)
        assert belief.convinces(answer(0), shown) == convinces
    assert belief.convinces(answer(2), shown)


def read_as(ids: Sequence[int], rows: Sequence[int] | None = None) -> AttackResult:
    where = range(len(ids)) if rows is None else rows
    tokens = (TokenPrediction(token, row, 0.0, None, 1, False) for token, row in zip(ids, where, strict=True))
    return AttackResult(tuple(tokens), 0, 0, 0.0, "complete")


@pytest.mark.parametrize(
    "defenses",
    [
        "output-noise:sigma=0.3",
        "gaussian:sigma=0.05",
        "output-noise:sigma=0.1+hidden-perm",
        "output-noise:sigma=0.1+seq-perm",
        "output-noise:sigma=0.1+2d-perm",
        "decoys:count=3+output-noise:sigma=0.1+seq-perm",
        "round:int8",
    ],
)
def test_of_two_texts_the_one_is_believed_that_explains_the_rows(
    tiny_model: Truncated, defenses: str
) -> None:
    """The other one has a wrong token, is a little likelier, and an attack is sure of it."""
    model = tiny_model("llama", 1)
    prompt = [5, 17, 40, 8, 77, 31, 9, 62, 24, 11, 50, 3]
    shown, _ = Channel.parse([defenses]).release(model, prompt, 3)
    wrong = [*prompt[:6], 90, *prompt[7:]]
    belief = Belief(model)
    belief._likelihood = lambda ids: -3.8 if list(ids) == wrong else -4.0  # type: ignore[method-assign]
    sure = replace(read_as(wrong), tokens=tuple(replace(one, verified=True) for one in read_as(wrong).tokens))
    right, other, part = belief.weigh([read_as(prompt), sure, read_as(prompt[:4])], shown)
    assert right > other and right > part  # a part of the text explains fewer rows


def test_of_two_readings_of_one_token_the_verified_one_is_believed(tiny_model: Truncated) -> None:
    """Neither the rows nor the language model say anything of a prompt's first token."""
    model = tiny_model("llama", 1)
    shown, _ = Channel([]).release(model, [5])
    (token,) = read_as([5]).tokens
    sure = replace(read_as([5]), tokens=(replace(token, verified=True),))
    guess, verified, longer = Belief(model).weigh([read_as([9]), sure, read_as([5, 9])], shown)
    assert verified > guess and verified > longer


def test_where_rows_say_nothing_the_likelier_text_is_believed(tiny_model: Truncated) -> None:
    """Rows that are noise are fitted best by nonsense."""
    model = tiny_model("llama", 1)
    prompt = [5, 17, 40, 8, 77, 31, 9, 62, 24, 11, 50, 3]
    shown, _ = Channel([]).release(model, prompt)
    states = torch.cat([Channel([]).release(model, [i])[0].states for i in range(model.vocab_size)])
    noise = replace(
        shown,
        states=states.std() * torch.randn(12, states.shape[1], generator=torch.Generator().manual_seed(1)),
    )
    nonsense = torch.cdist(noise.states, states).argmin(1).tolist()
    belief = Belief(model)
    belief._likelihood = lambda ids: -4.0 if list(ids) == prompt else -12.0  # type: ignore[method-assign]
    text, fitted = belief.weigh([read_as(prompt), read_as(nonsense)], noise)
    assert text > fitted


def test_answers_of_which_one_cannot_be_compared_with_the_rows_are_weighed_by_language(
    tiny_model: Truncated, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompt = tiny_model("llama", 1), [5, 17, 40, 8, 77, 31, 9, 62, 24, 11, 50, 3]
    shown, _ = Channel([]).release(model, prompt)
    belief, said = Belief(model), Belief(model)._likelihood(prompt)
    assert belief.weigh([read_as(prompt)], shown)[0][1] > said + 1
    gaps = replace(read_as(prompt[:3]), positions=(0, 2, 5))
    assert belief.weigh([read_as(prompt), gaps, read_as([])], shown)[0] == (0, said)
    with monkeypatch.context() as patched:
        patched.setattr("hiddenlab.eval.assess.belief.WIDEST", shown.states.shape[1] - 1)
        assert Belief(model).weigh([read_as(prompt)], shown) == [(0, said)]
    for states in (shown.states * 0, shown.states[:1]):
        assert belief.weigh([read_as(prompt)], replace(shown, states=states)) == [(0, said)]
    for defense in ("orthogonal", "vocab-bijection"):
        hidden, _ = Channel.parse([defense]).release(model, prompt)
        assert Belief(model, defense == "vocab-bijection")._evidence(read_as(prompt), hidden) is None


@pytest.mark.parametrize(
    "defense", ["sparsify:keep=0.2", "truncated-svd:rank=6", "round:int4", "project:count=16"]
)
def test_a_first_row_that_is_far_longer_and_rows_that_are_cut_do_not_hide_a_wrong_token(
    tiny_model: Truncated, defense: str
) -> None:
    model, prompt = tiny_model("llama", 1), [5, 17, 40, 8, 77, 31, 9, 62, 24, 11, 50, 3]
    right, wrong = (read_as([*prompt[:6], token, *prompt[7:]]) for token in (prompt[6], 90))
    cut, _ = Channel.parse([defense]).release(model, prompt)
    plain, _ = Channel([]).release(model, prompt)
    long = plain.states + 0.1 * plain.states.std() * torch.randn(
        plain.states.shape, generator=torch.Generator().manual_seed(0)
    )
    long[0] *= 300
    for shown in (cut, replace(plain, states=long)):
        explained = [Belief(model)._evidence(answer, shown) for answer in (right, wrong)]
        assert explained[0] > explained[1] + 0.1 > 0.1  # type: ignore[operator]


def test_the_attack_that_leads_is_the_first_of_those_that_convince(tiny_model: Truncated) -> None:
    """What explains the rows best may be no text; then the text behind it leads."""
    model, allowed = tiny_model("llama", 1), []
    shown = released(model, [5], [7, 8], [9, 6])
    for convinces in (9, 5):
        made = [Step("stuck", weight=3), Step("misread", weight=3), Step("endless", weight=9)]
        stuck, *_ = attack_all(
            shown, model, 0, 2.0, silent, made,
            lambda reads, _: [read.ids == [9] for read in reads],
            lambda read, _, it=convinces: read.ids == [it],
        )  # fmt: skip
        allowed.append(stuck.allowed)
    assert allowed[1] > 2 * allowed[0]


def test_an_answer_without_tokens_is_not_weighed_and_does_not_lead(tiny_model: Truncated) -> None:
    """It cannot be weighed by the rows, and none of the others would be either."""
    model, weighed = tiny_model("llama", 1), list[list[list[int]]]()

    def promise(reads: Sequence[AttackResult], _: object) -> list[int]:
        weighed.append([read.ids for read in reads])
        return [0] * len(reads)

    shown, made = released(model, [5], [7, 8]), [Step("empty"), Step("unsure")]
    empty, reads = attack_all(shown, model, 0, 60.0, silent, made, promise)
    assert (
        weighed == [[[5]]]
        and list(reads.results) == [0, 1]
        and not any(read.ids for read in empty.results.values())
    )


def test_what_does_not_convince_does_not_lead(tiny_model: Truncated) -> None:
    """The first attack reads the shortest prompt at once, and never ends with the others."""
    model, allowed = tiny_model("llama", 1), []
    for leads in (True, False):
        shown = released(model, [5], [7, 8], [9, 6])
        made = [Step("stuck"), Step("knowing", weight=3)]
        stuck, _ = attack_all(
            shown,
            model,
            0,
            4.0,
            silent,
            made,
            lambda reads, _: [-verified(read) for read in reads],
            lambda *_, leads=leads: leads,
        )
        allowed.append(stuck.allowed)
    assert allowed[0] > 2 * allowed[1]  # about nine tenths of what is left, and a quarter


class Misread(Unsure):
    def _recover(self, observation: Observation) -> AttackResult:
        return read_as([9])


@pytest.mark.parametrize(
    ("token", "row"), [(65.5, 0), (True, 0), ("5", 0), (-1, 0), (10**6, 0), (5, -2), (5, 0.5)]
)
def test_an_answer_that_no_record_can_hold_is_the_attacks_failure(
    tiny_model: Truncated, token: Any, row: Any
) -> None:
    """Else it is written, and no later command can read the record."""
    model = tiny_model("llama", 1)

    class Wrong(Unsure):
        def _recover(self, observation: Observation) -> AttackResult:
            read = read_as([5])
            object.__setattr__(read.tokens[0], "token", token)  # outside of tests nothing checks types
            object.__setattr__(read.tokens[0], "row", row)
            return read

    registry.register("attacks", "wrong-answer", Wrong)
    (one,) = attack_all(released(model, [5]), model, 0, 60.0, silent, [Step("wrong-answer")])
    assert one.status == CRASHED and not one.results and "whole numbers" in one.reason


class Empty(Unsure):
    def _recover(self, observation: Observation) -> AttackResult:
        return read_as([])


class Stuck(Unsure):
    """Reads a prompt of one token, and searches for others without an end."""

    def _recover(self, observation: Observation) -> AttackResult:
        while len(observation.states) > 1:
            self.progress("searching", 0, 0)
        return super()._recover(observation)
