"""A verdict follows from figures and from what the attacks can do; a defense that breaks attacks does not hold."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from hiddenlab import registry
from hiddenlab.base import Attack
from hiddenlab.builtins import BUILTINS
from hiddenlab.channels import Channel
from hiddenlab.cli import app
from hiddenlab.errors import InputError, NotApplicableError
from hiddenlab.eval.assess import cell, command, ensemble
from hiddenlab.eval.assess.command import assess
from hiddenlab.eval.assess.control import guesses
from hiddenlab.eval.assess.ensemble import (
    CRASHED,
    DONE_BEFORE,
    NOT_APPLICABLE,
    OUT_OF_TIME,
    RAN,
    Attempt,
    Step,
    attack_all,
    leaves_rows_exact,
)
from hiddenlab.eval.assess.secrets import FORMS, planted
from hiddenlab.eval.assess.verdict import (
    BROKEN,
    EXIT_CODES,
    HELD,
    INCONCLUSIVE,
    LEAKS,
    LITTLE,
    Evidence,
    leak_of,
    sentence_of,
    status_of,
)
from hiddenlab.eval.cells import Setting, conduct
from hiddenlab.eval.measures.intervals import Estimate
from hiddenlab.eval.tables import leaderboard as tables
from hiddenlab.eval.tables.leaderboard import leaderboard
from hiddenlab.job import Case
from hiddenlab.models import Request, TruncatedModel
from hiddenlab.report.data import Study
from hiddenlab.report.leaderboard import gathered, short_table
from hiddenlab.stages import Stage
from hiddenlab.testing import byte_tokenizer
from hiddenlab.types import AttackResult, GroundTruth, Observation, TokenPrediction, silent

Truncated = Callable[..., TruncatedModel]
CONTROL_LENGTH = 16


class Knowing(Attack):
    """Reads every token of a channel that releases plain embeddings' states, by a table; sure of each."""

    sure = True

    def _fit(self, info: Any) -> dict[str, float | str]:
        requests = [Request(self.model.prefix(), torch.tensor([i])) for i in range(self.model.vocab_size)]
        self.table = torch.cat([answer.states for answer in self.model.run(requests, keep=False)]).float()
        return {}

    def _recover(self, observation: Observation) -> AttackResult:
        ids = torch.cdist(observation.states.float(), self.table).argmin(1).tolist()
        tokens = tuple(TokenPrediction(token, row, 0.0, None, 1, self.sure) for row, token in enumerate(ids))
        return AttackResult(tokens, 0, 0, 0.0, "complete")


class Unsure(Knowing):
    sure = False


class Failing(Attack):
    def _recover(self, observation: Observation) -> AttackResult:
        raise RuntimeError("singular matrix\nand a long story")


class FailingFirst(Unsure):
    """Fails with the first prompt that it gets, and reads all others."""

    def _fit(self, info: Any) -> dict[str, float | str]:
        self.begun = False
        return super()._fit(info)

    def _recover(self, observation: Observation) -> AttackResult:
        if not self.begun:
            self.begun = True
            raise RuntimeError("no convergence")
        return super()._recover(observation)


class Never(Attack):
    def _fit(self, info: Any) -> dict[str, float | str]:
        raise NotApplicableError("it needs something else")

    def _recover(self, observation: Observation) -> AttackResult:
        raise AssertionError("never called")


class Endless(Attack):
    def _recover(self, observation: Observation) -> AttackResult:
        while True:
            self.progress("searching", 0, 0)
            time.sleep(0.001)


class Patient(Unsure):
    """Reads every token after half a second of search, and begins anew where it was stopped."""

    def _recover(self, observation: Observation) -> AttackResult:
        for _ in range(500):
            self.progress("searching", 0, 0)
            time.sleep(0.001)
        return super()._recover(observation)


class Silent(Attack):
    """Runs the model again and again, and reports nothing."""

    def _recover(self, observation: Observation) -> AttackResult:
        while True:
            self.model.encode(torch.tensor([5]))


class Choosy(Unsure):
    """Cannot use the first row that it is shown, and reads all others."""

    def _fit(self, info: Any) -> dict[str, float | str]:
        super()._fit(info)
        self.refused: Observation | None = None
        return {}

    def _recover_batch(self, observations: Sequence[Observation]) -> list[AttackResult]:
        self.refused = self.refused or observations[0]
        if any(one is self.refused for one in observations):
            raise NotApplicableError("not this one")
        return [self._recover(one) for one in observations]


class Misled(Knowing):
    """Is sure of a token that is never right."""

    def _recover(self, observation: Observation) -> AttackResult:
        return AttackResult((TokenPrediction(1, 0, 0.0, None, 1, True),), 0, 0, 0.0, "complete")


class Slowed(Unsure):
    """Reads plain rows, and searches without an end behind a defense."""

    def _recover(self, observation: Observation) -> AttackResult:
        while not bool(observation.states.any()):
            self.progress("searching", 0, 0)
            time.sleep(0.001)
        return super()._recover(observation)


class Zeros(Stage):
    spec = "zeros"

    def states(self, states: torch.Tensor, generator: torch.Generator) -> Any:
        return torch.zeros_like(states), None, {}


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in registry._SESSION:
        monkeypatch.setitem(registry._SESSION, kind, {})  # a test's names end with it
    made: dict[str, Any] = {
        "knowing": Knowing,
        "unsure": Unsure,
        "failing": Failing,
        "failing-first": FailingFirst,
        "never": Never,
        "endless": Endless,
    }
    made |= {"slowed": Slowed, "choosy": Choosy, "misled": Misled, "patient": Patient, "silent": Silent}
    for name, attack in made.items():
        registry.register("attacks", name, attack)
    registry.register("defenses", "zeros", Zeros)
    monkeypatch.setattr(
        command, "guesses", lambda model, cases, *_: [(0,) * len(one.truth.tokens) for one in cases]
    )


def released(model: TruncatedModel, *prompts: Sequence[int]) -> list[Observation]:
    return [Channel.parse([]).release(model, list(prompt))[0] for prompt in prompts]


def steps(*names: str) -> list[Step]:
    return [Step(name) for name in names]


# ---- figures


@given(st.lists(st.tuples(st.integers(1, 60), st.floats(0, 1), st.floats(0, 0.9)), min_size=1, max_size=25))
@settings(max_examples=60, deadline=None)
def test_the_leak_lies_within_its_interval_and_counts_what_cannot_be_guessed(
    prompts: list[tuple[int, float, float]],
) -> None:
    tokens = [n for n, _, _ in prompts]
    right, guessed = ([round(n * share) for n, *shares in prompts for share in [shares[i]]] for i in (0, 1))
    found = leak_of(right, guessed, tokens)
    assert found.low <= found.value + 1e-9 and found.value <= found.high + 1e-9 and found.n == len(prompts)
    total, control = sum(tokens), sum(guessed)
    if control < total:
        assert found.value == pytest.approx((sum(right) - control) / (total - control))


def test_no_token_of_few_prompts_is_not_certain() -> None:
    few, many = (leak_of([0] * n, [0] * n, [40] * n) for n in (3, 30))
    assert few.high > LITTLE > many.high > 0 and few.low == many.low == 0


@pytest.mark.parametrize(
    ("low", "high", "other", "status"),
    [
        (0.6, 0.9, {}, BROKEN),
        (0.06, 0.6, {}, LEAKS),
        (0.0, 0.04, {"exact": 1}, LEAKS),
        (0.0, 0.04, {"secrets": (1, 4)}, LEAKS),
        (0.0, 0.04, {"able": ["a"]}, HELD),
        (0.0, 0.04, {}, INCONCLUSIVE),
        (0.0, 0.04, {"able": ["a"], "crashed": ["b"]}, INCONCLUSIVE),
        (0.0, 0.04, {"able": ["a"], "short": ["b"]}, INCONCLUSIVE),
        (0.0, 0.04, {"able": ["a"], "misled": 1}, INCONCLUSIVE),
        (0.06, 0.2, {"short": ["b"], "crashed": ["c"]}, LEAKS),
        (0.0, 0.2, {"able": ["a"]}, INCONCLUSIVE),
        (-0.09, 0.2, {"able": ["a"]}, INCONCLUSIVE),
        (-0.09, 0.04, {"able": ["a"]}, HELD),
    ],
)
def test_the_verdict_follows_from_bounds_and_from_what_the_attacks_can_do(
    low: float, high: float, other: dict[str, Any], status: str
) -> None:
    leak = Estimate((low + high) / 2, low, high, 20)
    found = Evidence(leak, **({"exact": 0, "secrets": (0, 4)} | other))
    said = sentence_of(found, 10, "beam-decoding")
    assert status_of(found) == status and said.startswith(status) and "secure" not in said
    assert ("ran out of time" in said) == bool(found.short)
    assert "-" not in said.split(" came back")[0], "a share below 0 says nothing to a reader"
    assert EXIT_CODES[status] == {BROKEN: 1, LEAKS: 1, HELD: 0, INCONCLUSIVE: 3}[status]


def test_the_sentence_names_attacks_without_their_parameters() -> None:
    quick, whole = "vocab-match:setup=quick,budget=256", "vocab-match"
    leak = Estimate(0.3, 0.2, 0.4, 20)
    said = sentence_of(Evidence(leak, 0, (0, 4), short=[quick, whole, "planted"]), 10, quick)
    assert " by vocab-match." in said and "More may: vocab-match, planted ran out of time." in said
    open_ = Evidence(Estimate(0.0, 0.0, 0.04, 20), 0, (0, 4), crashed=[quick])
    assert "vocab-match failed with an error" in sentence_of(open_, 10, quick)


def test_planted_secrets_are_of_the_seed_and_in_their_text() -> None:
    assert planted(3) == planted(3) != planted(4)
    assert len(planted(3)) == len(FORMS) and all(one.secret in one.text for one in planted(3))
    assert all(a.secret != b.secret for a, b in zip(planted(3), planted(4), strict=True))


def test_the_control_says_what_stands_at_a_place_most_often(
    tiny_model: Truncated, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = torch.tensor([[1, 2, 3], [1, 5, 3], [4, 5, 6]]).repeat(1, 6)[:, :CONTROL_LENGTH]
    monkeypatch.setattr("hiddenlab.eval.assess.control.own_text", lambda model, count, length, *_: texts)
    cases = [Case(n, "p", GroundTruth((9,) * length)) for n, length in enumerate((3, 5))]
    assert guesses(tiny_model("llama", 2), cases) == [(1, 5, 3), (1, 5, 3, 1, 5)]


# ---- the ensemble


def test_each_attack_is_told_apart_and_solved_prompts_are_left_alone(tiny_model: Truncated) -> None:
    model = tiny_model("llama", 1)
    shown = released(model, [5], [7])
    names = ("failing", "never", "endless", "knowing", "unsure")
    made = [replace(step, weight=0.01 if step.attack == "endless" else 1.0) for step in steps(*names)]
    found = attack_all(shown, model, 0, 60.0, silent, made)
    assert [one.status for one in found] == [CRASHED, NOT_APPLICABLE, OUT_OF_TIME, RAN, DONE_BEFORE]
    assert found[0].reason == "RuntimeError: singular matrix" and found[1].reason == "it needs something else"
    assert [found[3].results[i].ids for i in (0, 1)] == [[5], [7]] and not found[4].results


def test_what_an_attack_left_unfinished_is_not_told_of_any_more(tiny_model: Truncated) -> None:
    """Else a line of one attack tells how far another one was."""
    model, told = tiny_model("llama", 1), list[tuple[str, int, int]]()
    attack_all(
        released(model, [5]), model, 0, 0.2, lambda *said: told.append(said), steps("never", "endless")
    )
    assert told[-2:] == [("endless: searching", 0, 0), ("endless: prompts", -1, 1)]
    assert not any(name.startswith("never: ") and total for name, _, total in told)


def test_one_prompt_that_an_attack_cannot_use_costs_no_other(tiny_model: Truncated) -> None:
    model = tiny_model("llama", 1)
    one, alone = (
        attack_all(released(model, *prompts), model, 0, 60.0, silent, steps("choosy"))[0]
        for prompts in ([[5], [7], [9]], [[5]])
    )
    assert one.status == RAN and {i: result.ids for i, result in one.results.items()} == {1: [7], 2: [9]}
    assert alone.status == NOT_APPLICABLE and alone.reason == "not this one"


def test_an_attack_for_missing_rows_does_not_run_where_all_are_shown(tiny_model: Truncated) -> None:
    model = tiny_model("llama", 1)
    (one,) = attack_all(released(model, [5]), model, 0, 5.0, silent, [Step("endless", missing=True)])
    assert one.status == NOT_APPLICABLE and one.reason == "every token has a row"


def test_time_that_is_left_goes_to_the_later_attacks(tiny_model: Truncated) -> None:
    model = tiny_model("llama", 1)
    made = [Step("never", weight=3), Step("endless")]
    first, second = attack_all(released(model, [5]), model, 0, 0.4, silent, made)
    assert first.allowed == pytest.approx(0.3, abs=0.01) and second.allowed > 0.3


@pytest.mark.parametrize("prompts", [[[5]], [[5], [7]]])
def test_time_that_later_attacks_cannot_use_goes_back_to_one_that_ran_out_of_it(
    tiny_model: Truncated, prompts: list[list[int]]
) -> None:
    model = tiny_model("llama", 1)
    made = [Step("patient"), Step("never", weight=9)]
    patient, _ = attack_all(released(model, *prompts), model, 0, 4.0, silent, made)
    assert patient.status == RAN and [result.ids for result in patient.results.values()] == prompts


def test_an_attack_that_reports_nothing_ends_with_its_time(tiny_model: Truncated) -> None:
    model = tiny_model("llama", 1)
    silenced, reads = attack_all(released(model, [5]), model, 0, 1.0, silent, steps("silent", "knowing"))
    assert silenced.status == OUT_OF_TIME and reads.status == RAN
    assert (
        model.encode(torch.tensor([5])).shape[0] == 1
    )  # passes outside of the ensemble are nobody's business


def test_one_without_an_end_that_read_nothing_waits_for_the_others(tiny_model: Truncated) -> None:
    model = tiny_model("llama", 1)
    made = [Step("patient", weight=0.1), Step("endless", weight=9, endless=True)]
    patient, endless = attack_all(released(model, [5]), model, 0, 2.0, silent, made)
    assert patient.status == RAN and patient.results[0].ids == [5] and endless.status == OUT_OF_TIME


@pytest.mark.parametrize(
    "defenses, exact",
    [
        ("seq-perm", True),
        ("2d-perm", True),
        ("decoys:count=2+hidden-perm:shared+seq-perm", True),
        ("orthogonal:fresh=row", True),
        ("row-mixing:kind=orthogonal,shield=2", True),
        ("", False),  # nothing is known of the rows
        ("seq-perm+round:float16", False),
        ("output-noise:sigma=0.001+orthogonal", False),
        ("sparsify:keep=0.9", False),
        ("gaussian:sigma=0.001+seq-perm", False),
        ("random-prefix+seq-perm", False),
        ("dtype:bfloat16+seq-perm", False),
        ("vocab-bijection", False),
        ("drop-rows:size=2,after=10", False),
        ("zeros", False),  # somebody else's, of which nothing is known
    ],
)
def test_orders_and_maps_leave_rows_exact(tiny_model: Truncated, defenses: str, exact: bool) -> None:
    plain = released(tiny_model("llama", 1), [5])[0].info
    assert leaves_rows_exact(Channel.parse([defenses] * bool(defenses)).published(plain)) is exact
    assert not leaves_rows_exact(replace(plain, channel=("no-such-stage",)))


@pytest.mark.parametrize("defense, first", [("seq-perm", "patient"), ("zeros", "endless")])
def test_an_attack_for_other_rows_waits_where_they_are_exact(
    tiny_model: Truncated, defense: str, first: str
) -> None:
    model = tiny_model("llama", 1)
    shown = [Channel.parse([defense]).release(model, [token])[0] for token in (5, 7)]
    made = [Step("endless", weight=9, inexact=True), Step("patient")]
    found = attack_all(shown, model, 0, 2.0, silent, made)
    assert max(found, key=lambda one: one.allowed).attack == first and found[0].status == OUT_OF_TIME


def test_where_rows_are_exact_the_whole_vocabulary_comes_before_an_attack_for_other_rows(
    tiny_model: Truncated,
) -> None:
    model = tiny_model("llama", 1)
    shown = Channel.parse(["seq-perm"]).release(model, [5])[0]
    made = [Step("endless", weight=9, inexact=True), Step("slowed", endless=True)]
    shown = replace(shown, states=shown.states * 0)  # which neither reads
    inexact, endless = attack_all([shown], model, 0, 1.0, silent, made)
    assert endless.allowed == pytest.approx(0.9, abs=0.05) and inexact.allowed == pytest.approx(0.1, abs=0.05)


def test_a_prompt_that_an_attack_cannot_use_is_not_asked_of_it_again(tiny_model: Truncated) -> None:
    """An assessment that goes on without any time left says the same of an attack that ran to its end before."""
    model = tiny_model("llama", 1)
    shown = released(model, [5], [7], [9])

    class Before:
        """What was kept of an assessment that was interrupted behind its last attack."""

        def earlier(self, number: int, attack: str) -> Attempt | None:
            return replace(first, seconds=1e6)

        def read(self, *_: object) -> None:
            raise AssertionError("nothing is left to read")

        over = read

    (first,) = attack_all(shown, model, 0, 60.0, silent, steps("choosy"))
    (again,) = attack_all(shown, model, 0, 60.0, silent, steps("choosy"), diary=Before())
    assert again.status == RAN and again.unusable == {0} and sorted(again.results) == [1, 2]


def test_what_reads_one_prompt_goes_first_with_the_others(tiny_model: Truncated) -> None:
    """An attack that is slow and reads nothing must not take the time of one that reads."""
    model, seconds = tiny_model("llama", 1), 12.0
    shown = released(model, [5, 3], [7], *([i, 4] for i in range(10, 30)))
    slow, reads = attack_all(shown, model, 0, seconds, silent, steps("endless", "knowing"))
    assert sorted(reads.results) == list(range(len(shown))) and reads.status == RAN
    assert slow.allowed < 0.2 * seconds  # only the look's share; an attack behind it has nothing left to do


def test_an_attack_that_failed_once_is_told_of(tiny_model: Truncated) -> None:
    model = tiny_model("llama", 1)
    (one,) = attack_all(released(model, [5], [7, 8]), model, 0, 60.0, silent, steps("failing-first"))
    assert (
        one.status == CRASHED
        and one.reason == "RuntimeError: no convergence"
        and sorted(one.results) == [0, 1]
    )


# ---- the whole


@pytest.fixture
def prompts(tmp_path: Any) -> str:
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join("abcdefghijklmnopqrstuvwxyz"[i] for i in range(26)))
    return str(path)


def ask(path: str, prompts: str, *defense: str, **options: Any) -> dict[str, Any]:
    from hiddenlab.config import AttackConfig

    config = AttackConfig(model=path, prompts=prompts, layer=1, max_tokens=1, defense=defense, **options)
    return dict(assess(config, minutes=0.2, keep=False).findings)


def test_identity_is_broken_and_zeros_are_not(
    tiny: Callable[..., str], prompts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny("llama", tokenizer=True)
    monkeypatch.setattr(command, "plantable", lambda *_: [])
    monkeypatch.setattr(command, "ATTACKS", steps("unsure"))
    open_, shut = ask(path, prompts), ask(path, prompts, "zeros")
    assert open_["status"] == BROKEN and open_["exit_code"] == 1 and open_["exact"]["value"] == 1
    assert open_["undefended"] == [] and open_["leakiest"]["token_accuracy"] == 1
    assert shut["status"] in (HELD, INCONCLUSIVE) and shut["exact"]["value"] < 0.1
    assert shut["undefended"][0]["leak"]["low"] > 0.5  # the attack reads these prompts without the defense
    assert "two tokens" in shut["utility"]["reason"] and "two tokens" in open_["utility"]["reason"]


@pytest.mark.slow
def test_a_defense_behind_which_attacks_take_longer_does_not_hold(
    tiny: Callable[..., str], prompts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What reads plain rows in time, and runs out of it behind the defense, might have read these a minute later."""
    made = [Step("slowed"), Step("unsure")]
    monkeypatch.setattr(command, "ATTACKS", made)
    found = ask(tiny("llama", tokenizer=True), prompts, "zeros")
    assert found["status"] == INCONCLUSIVE and "slowed ran out of time" in found["sentence"]
    assert found["undefended"] == [], "nothing that they read there would change the verdict"
    monkeypatch.setattr(command, "ATTACKS", [replace(made[0], endless=True), made[1]])
    assert "out of time" not in ask(tiny("llama", tokenizer=True), prompts, "zeros")["sentence"]


def test_an_attack_that_is_sure_and_wrong_does_not_make_a_defense_hold(
    tiny: Callable[..., str], prompts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "ATTACKS", steps("misled", "unsure"))
    monkeypatch.setattr(command, "plantable", lambda *_: [])
    found = ask(tiny("llama", tokenizer=True), prompts)
    assert found["attacks"][1]["status"] == DONE_BEFORE
    assert found["status"] == INCONCLUSIVE and "sure of wrong tokens" in found["sentence"]


def test_an_exact_prompt_that_was_guessed_is_no_leak(
    tiny: Callable[..., str], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, file = tiny("llama", tokenizer=True), tmp_path / "one.txt"
    file.write_text("\n".join(["a"] * 3))
    token = byte_tokenizer()("a")["input_ids"][0]
    monkeypatch.setattr(command, "ATTACKS", steps("unsure"))
    monkeypatch.setattr(command, "plantable", lambda *_: [])
    monkeypatch.setattr(
        command, "guesses", lambda model, cases, *_: [(token,) * len(one.truth.tokens) for one in cases]
    )
    found = ask(path, str(file))
    assert found["exact"]["value"] == 1 and found["control"] == 1 and found["status"] == INCONCLUSIVE


def test_a_defense_that_makes_attacks_fail_does_not_hold(
    tiny: Callable[..., str], prompts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "ATTACKS", steps("failing", "never"))
    found = ask(tiny("llama", tokenizer=True), prompts)
    assert found["status"] == INCONCLUSIVE and "failing failed with an error" in found["sentence"]
    assert (
        found["exit_code"] == 3
        and found["leakiest"] is None
        and found["secrets"] == {"read": 0, "planted": 4}
    )


@pytest.mark.slow
def test_the_command_prints_the_verdict_and_ends_with_its_code(
    tiny: Callable[..., str], prompts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "ATTACKS", steps("knowing"))
    asked = [
        "assess", "identity", "--model", tiny("llama", tokenizer=True), "--prompts", prompts, "--layer", "1",
        "--max-tokens", "1", "--no-record",
    ]  # fmt: skip
    shown = CliRunner().invoke(app, asked)
    assert shown.exit_code == 1 and shown.stdout.startswith("BROKEN: 100.0 %")
    found = json.loads(CliRunner().invoke(app, [*asked, "--json"]).stdout)
    assert found["status"] == BROKEN and found["attacks"][0]["attack"] == "knowing"


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (["nosuch"], "nosuch"),
        (["identity", "--minutes", "0"], "--minutes is above 0"),
        (["gaussian"], "sigma"),
        (["seq-perm+gausian:sigma=1"], "did you mean gaussian"),
    ],
)
def test_wrong_input_names_the_way_out(asked: list[str], says: str) -> None:
    found = CliRunner().invoke(app, ["assess", *asked])
    assert found.exit_code == 2 and says in found.output


def test_every_attack_of_the_ensemble_exists() -> None:
    assert all(step.attack.partition(":")[0] in BUILTINS["attacks"] for step in ensemble.ATTACKS)


def test_states_of_a_file_are_refused() -> None:
    from hiddenlab.config import AttackConfig

    with pytest.raises(InputError, match="hiddenlab import"):
        assess(AttackConfig(states=("x.npy",)))


def test_a_cell_of_the_leaderboard_holds_the_verdict_and_what_was_read(
    tiny: Callable[..., str], prompts: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "ATTACKS", steps("unsure"))
    setting = Setting(
        model=tiny("llama", tokenizer=True), layers=(1,), prompts=prompts, limit=26, max_tokens=1
    )
    table = conduct("leaderboard", leaderboard(setting, "identity,zeros", minutes=0.2), tmp_path)
    open_, shut = table["rows"]
    assert open_["words"]["verdict"] == BROKEN and open_["words"]["attack"] == "unsure"
    assert open_["words"]["recovered"] in "abcdefghijklmnopqrstuvwxyz"
    assert open_["figures"]["leak"]["value"] == 1 and shut["figures"]["leak"]["value"] < 0.1
    assert "recovered" not in shut["words"] or shut["figures"]["leak"]["value"] > 0
    kept = tmp_path / "cells" / open_["cell"]
    assert json.loads((kept / "assessment.json").read_text())["status"] == BROKEN
    assert conduct("leaderboard", leaderboard(setting, "identity,zeros", minutes=0.2), tmp_path) == table
    assert open_["keys"] == {"defense": "identity", "model": setting.model, "stream": "resid", "layer": 1}
    (values,) = leaderboard(setting, "seq-perm", stream="v").cells
    assert values.keys["stream"] == values.spec["stream"] == "v"
    with pytest.raises(InputError, match="unknown stream 'x'"):
        leaderboard(setting, stream="x")


def test_the_ensemble_and_a_single_attack_get_the_same_rows(
    tiny: Callable[..., str], prompts: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cell, "ATTACKS", steps("never", "unsure"))
    monkeypatch.setattr(tables, "RIVALS", (("zeros", 1, "knowing"), ("seq-perm", 1, "knowing")))
    setting = Setting(model=tiny("llama", tokenizer=True), prompts=prompts, limit=26, max_tokens=1)
    shut, open_ = conduct("ensemble", tables.ensemble(setting, minutes=0.2), tmp_path)["rows"]
    assert open_["figures"]["ensemble"]["value"] == open_["figures"]["single"]["value"] == 1
    assert open_["figures"]["gained"]["value"] == 0 and shut["figures"]["single"]["value"] < 0.1
    with pytest.raises(InputError, match="compared are zeros, seq-perm"):
        tables.ensemble(setting, channels="nf4")


def test_tables_of_a_leaderboard_are_read_as_one() -> None:
    def table(name: str, *leaks: float | None) -> Study:
        rows = [
            {
                "keys": {"defense": f"{name} {leak}"},
                "figures": {} if leak is None else {"leak": {"value": leak}},
            }
            for leak in leaks
        ]
        return Study({"experiment": name, "rows": rows, "notes": ["one note", name], "command": name})

    other = Study({"experiment": "noise", "rows": [], "notes": [], "command": "c"})
    unclear = table("leaderboard-c", 0.0)
    unclear.table["rows"][0]["words"] = {"verdict": "INCONCLUSIVE"}
    board, _ = gathered([unclear, other, table("leaderboard-d", 0.9, None)])
    assert [row["keys"]["defense"] for row in board.table["rows"]] == [
        "leaderboard-d 0.9", "leaderboard-c 0.0", "leaderboard-d None",
    ]  # fmt: skip
    whole, rest = gathered([table("leaderboard-a", 0.9, None), other, table("leaderboard-b", 0.1)])
    whole.table["figures"] = {"leak": "what leaks"}
    for row in whole.table["rows"]:
        row |= {
            "words": {"verdict": "V", "attack": "vocab-match:budget=3"},
            "paper": {},
            "status": "measured",
            "reason": None,
        }
        row["keys"]["model"] = "alike"
        row["commit"] = "abc" if row["figures"] else None
        for figure in row["figures"].values():
            figure |= {"low": figure["value"], "high": figure["value"], "n": 1}
    assert short_table(whole.table) == [
        "| defense | verdict | what leaks | attack | commit |", "|---|---|---|---|---|",
        "| leaderboard-b 0.1 | V | 10.0 % | vocab-match | abc |",
        "| leaderboard-a 0.9 | V | 90.0 % | vocab-match | abc |",
        "| leaderboard-a None | V | – | vocab-match | – |",
    ]  # fmt: skip
    assert rest is other and whole.table["experiment"] == "leaderboard"
    assert [row["keys"]["defense"] for row in whole.table["rows"]] == [
        "leaderboard-b 0.1", "leaderboard-a 0.9", "leaderboard-a None",
    ]  # fmt: skip
    assert whole.table["notes"] == ["one note", "leaderboard-a", "leaderboard-b"]
    assert whole.table["command"] == "leaderboard-a; leaderboard-b"


@pytest.mark.slow
def test_the_builtin_model_is_read_without_a_defense() -> None:
    from hiddenlab.config import AttackConfig

    config = AttackConfig(layer=6, limit=2, max_tokens=16, defense=("identity",))
    found = assess(config, minutes=20, keep=False).findings
    assert found["status"] == BROKEN and found["exact"]["value"] == 1 and found["secrets"]["read"] == 4
    did = {one["attack"]: one["status"] for one in found["attacks"]}
    reading = ensemble.QUICK  # the first that applies: no token was replaced, no text is known
    assert [name for name, status in did.items() if status == RAN] == [reading]
    assert set(did.values()) == {RAN, NOT_APPLICABLE, DONE_BEFORE}
