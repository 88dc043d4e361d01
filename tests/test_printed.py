"""The algorithms as the paper prints them, against a literal copy; the search for epsilon, against runs of them."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hiddenlab.attacks.vocab_match import VocabMatch, calibration
from hiddenlab.attacks.vocab_match.calibration import Score, Trainer, ternary_search
from hiddenlab.channels import Channel
from hiddenlab.errors import InputError
from hiddenlab.matching.distance import choose_matcher
from hiddenlab.matching.ranking import LazyModel, Proposer
from hiddenlab.models import Request, TruncatedModel
from hiddenlab.registry import stages_of
from hiddenlab.testing import VOCABULARY
from hiddenlab.types import Observation, silent
from tests.marks import slow_cases

LoadModel = Callable[..., TruncatedModel]
PERMUTATIONS = ("identity", "seq-perm", "hidden-perm", "2d-perm")
PROMPTS = [[5, 80, 7, 7, 291], [0, 256, 33]]


def released(model: TruncatedModel, prompts: list[list[int]], *specs: str) -> list[Any]:
    return list(Channel.parse(specs).release_batch(model, prompts, torch.Generator().manual_seed(1)))


def following(lm: TruncatedModel, tokens: list[int]) -> Tensor:
    """Return the model's scores of the next token behind tokens, by a pass over all of them."""
    return (
        lm.run([Request(lm.prefix(), torch.tensor(tokens))], keep=False)[0].states[-1].float().log_softmax(-1)
    )


@torch.inference_mode()
def literally(
    observation: Observation, model: TruncatedModel, lm: TruncatedModel | None, epsilon: float
) -> list[tuple[int, int, bool]]:
    """Follow Algorithms 1, 4, 5 and 6 line by line: a forward pass of the whole sequence for every candidate.

    Returns:
        Token, row and whether it was within epsilon, for each position.
    """
    shuffled, permuted = observation.info.rows_permuted, observation.info.columns_permuted is not None
    view = (lambda row: row.sort().values) if permuted else (lambda row: row)
    rows = [view(row.float()) for row in observation.states]
    free = list(range(len(rows)))
    found: list[tuple[int, int, bool]] = []
    for i in range(len(rows)):
        context = [token for token, _, _ in found]
        order = list(range(VOCABULARY))
        if lm is not None:
            start = context or lm.special_ids[:1]
            order = following(lm, start).argsort(descending=True, stable=True).tolist() if start else order
        least, best, best_row, matched = math.inf, -1, -1, False
        for v in order:
            state = view(model.encode(torch.tensor([*context, v]))[-1].float())
            for row in free if shuffled else [i]:
                distance = float((state - rows[row]).abs().sum())
                if distance < least:
                    least, best, best_row = distance, v, row
                if distance < epsilon:
                    best, best_row, matched = v, row, True
                    break
            if matched:
                break
        free.remove(best_row)
        found.append((best, best_row, matched))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("epsilon", [0.05, *slow_cases(1e-9, 20.0)])
@pytest.mark.parametrize("proposal", ["vocab", *slow_cases("lm")])
@pytest.mark.parametrize("channel", PERMUTATIONS)
def test_greedy_is_the_algorithm_as_printed(
    tiny_model: LoadModel, channel: str, proposal: str, epsilon: float
) -> None:
    """Too small an epsilon takes the nearest of the whole vocabulary, too large a one the first that comes near."""
    model = tiny_model("llama", 2)
    lm = None if proposal == "vocab" else model.sibling(stream="logits")
    attack = VocabMatch(search="greedy", proposal=proposal, epsilon=str(epsilon))
    for observation, truth in released(model, PROMPTS, channel):
        result = attack.fit(observation.info, model).recover(observation)
        expected = literally(observation, model, lm, epsilon)
        assert [(t.token, t.row) for t in result.tokens] == [(token, row) for token, row, _ in expected]
        if epsilon > 1e-6:  # below, rounding decides whether a distance is within it
            assert [t.verified for t in result.tokens] == [within for _, _, within in expected]
        if epsilon == 0.05:
            assert result.ids == list(truth.tokens)


def test_a_budget_ends_a_position_at_the_nearest_tried(tiny_model: LoadModel) -> None:
    model = tiny_model("llama", 2)
    (observation, _), *_ = released(model, [[256, 3]])
    attack = VocabMatch(search="greedy", proposal="vocab", budget=7).fit(observation.info, model)
    result = attack.recover(observation)
    assert [t.evaluated for t in result.tokens] == [7, 7]
    assert result.stop_reason == "budget exhausted"
    assert not result.tokens[0].verified and result.tokens[0].token < 7
    assert all(t.margin is not None and t.margin >= 0 for t in result.tokens)


def test_a_margin_is_to_another_candidate(tiny_model: LoadModel) -> None:
    """An epsilon that is too large takes the first row, which may not be the nearest of the same candidate."""
    model = tiny_model("llama", 2)
    (observation, _), *_ = released(model, [[0, 0, 9]], "seq-perm")
    attack = VocabMatch(search="greedy", proposal="vocab", epsilon="1000").fit(observation.info, model)
    result = attack.recover(observation)
    assert [t.token for t in result.tokens] == [0, 0, 0]
    assert [t.evaluated for t in result.tokens] == [1, 1, 1]
    states = model.encode(torch.tensor([0, 0, 0])).float()
    for place, token in enumerate(result.tokens):
        assert token.margin is not None
        prefix = model.prefix()
        if place:
            prefix.extend(torch.zeros(place, dtype=torch.long))
        free = sorted({0, 1, 2} - {t.row for t in result.tokens[:place]})
        others = prefix.branch(torch.arange(1, 4)).float()
        nearest = float(torch.cdist(others, observation.states[free].float(), p=1).min())
        own = float((states[place] - observation.states[token.row].float()).abs().sum())
        assert token.margin == pytest.approx(nearest - own, abs=1e-3)


def test_the_preset_is_the_papers_attack_where_nothing_else_is_asked_for() -> None:
    chosen = VocabMatch(preset="paper")
    assert (chosen.search, chosen.proposal, chosen.epsilon) == ("greedy", "lm", "calibrated")
    assert chosen.budget is None
    assert VocabMatch(preset="paper", epsilon="22").epsilon == "22"
    own = VocabMatch()
    assert (own.search, own.proposal, own.distance, own.epsilon) == (
        "speculative",
        "probe+lm",
        "auto",
        "auto",
    )


def trainer_of(
    model: TruncatedModel, texts: list[list[int]], channel: str, proposer: Proposer, budget: int = VOCABULARY
) -> Trainer:
    with torch.inference_mode():
        pairs = released(model, texts, channel)
        return Trainer(model, choose_matcher("auto", pairs[0][0].info), proposer, pairs, budget)


def until_wrong(found: list[tuple[int, int]], right: list[tuple[int, int]]) -> int:
    return next((i for i, (a, b) in enumerate(zip(found, right, strict=True)) if a != b), len(right))


@pytest.mark.slow
@pytest.mark.parametrize(
    "channel", ["gaussian:sigma=0.02+identity", "2d-perm", *slow_cases("seq-perm", "hidden-perm")]
)
@pytest.mark.parametrize("proposal", ["lm", *slow_cases("vocab")])
def test_a_score_is_what_the_attack_reaches_with_that_epsilon(
    tiny_model: LoadModel, channel: str, proposal: str
) -> None:
    """The scores of all thresholds come from one set of distances; here each is run as an attack."""
    model = tiny_model("llama", 2)
    specs = [spec for spec in stages_of(channel) if spec != "identity"]
    lazy = LazyModel(model, opener=False)
    proposer = Proposer(VOCABULARY, None, lazy if proposal == "lm" else None)
    with torch.inference_mode():
        pairs = released(model, PROMPTS, *specs)
        trainer = Trainer(model, choose_matcher("auto", pairs[0][0].info), proposer, pairs, VOCABULARY)
        for epsilon in (30.0, 4.0, 1.0, 0.1, 1e-3, 1e-8):
            attack = VocabMatch(search="greedy", proposal=proposal, epsilon=str(epsilon))
            total = 0
            for observation, truth in pairs:
                result = attack.fit(observation.info, model).recover(observation)
                places = truth.row_order or range(len(truth.tokens))
                right = [(token, list(places).index(i)) for i, token in enumerate(truth.tokens)]
                total += until_wrong([(t.token, t.row) for t in result.tokens], right)
            assert trainer.score(epsilon).right == total


def test_a_wrong_token_counts_where_the_right_one_is_beyond_the_budget(tiny_model: LoadModel) -> None:
    """Tokens 256 and 9 stand behind all eight candidates: a wide epsilon takes a wrong one there, a narrow one none."""
    model = tiny_model("llama", 2)
    trainer = trainer_of(model, [[3, 256, 9, 5]], "identity", Proposer(VOCABULARY, None, None), budget=8)
    assert [position.right for position in trainer.positions[0]] == [3, None, None, 5]
    assert trainer.beyond == 0.5
    narrow, wrong = trainer.score(1e-4), float(trainer.positions[0][1].nearest.min())
    assert narrow == Score(2, -(4 + 8 + 8 + 6))
    assert trainer.score(wrong * 1.01).right < 2


@given(st.floats(-6, -1), st.floats(0.05, 4), st.integers(1, 400))
@settings(max_examples=60, deadline=None)
def test_the_search_ends_at_the_upper_end_of_the_plateau(lowest: float, wide: float, most: int) -> None:
    """Right tokens rise to a plateau and fall behind it; below its lower end more candidates are tried."""
    floor, edge = 10**lowest, 10 ** min(0.0, lowest + wide)

    def score(epsilon: float) -> Score:
        far = max(0.0, math.log(epsilon / edge), math.log(floor / epsilon))
        right = most - math.ceil(far * 2) if far < most / 2 else 0
        return Score(max(0, right), -(10 + (100 if epsilon < floor else 0)))

    best = ternary_search(score, floor, 1e-7, 2.0, silent)
    assert score(best).right == most
    assert best <= edge < best * calibration.PRECISION**2


@pytest.mark.slow
@pytest.mark.parametrize("channel", ["identity", "2d-perm"])
def test_calibrated_thresholds_find_the_prompt(tiny_model: LoadModel, channel: str) -> None:
    model = tiny_model("gpt2", 2)
    pairs = released(model, PROMPTS, channel)
    attack = VocabMatch(preset="paper", calibration_texts=3).fit(pairs[0][0].info, model)
    measured = attack.measured
    assert measured["epsilon_floor"] < measured["epsilon_relative"] < measured["epsilon_gap"]
    for observation, truth in pairs:
        result = attack.recover(observation)
        assert result.ids == list(truth.tokens)
        assert result.epsilon == pytest.approx(attack._prepared.threshold.absolute)  # type: ignore[union-attr]


def test_texts_are_no_longer_than_the_model_reads(
    tiny_model: LoadModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("gpt2", 2)
    monkeypatch.setattr(model.module.config, "n_positions", 16)
    lengths = list[int]()
    release = Channel.release_batch

    def noted(self: Channel, of: TruncatedModel, prompts: Any, generator: torch.Generator) -> Any:
        lengths.extend(map(len, prompts))
        return release(self, of, prompts, generator)

    ((observation, _),) = released(model, [[5, 6]])
    monkeypatch.setattr(Channel, "release_batch", noted)
    VocabMatch(preset="paper", calibration_texts=2).fit(observation.info, model)
    assert lengths == [14, 14]  # with room for a token before and behind


def test_a_budget_that_holds_no_right_token_cannot_be_calibrated(tiny_model: LoadModel) -> None:
    model = tiny_model("llama", 2)
    ((observation, _),) = released(model, [[5, 6]])
    with pytest.raises(InputError, match=r"cannot be calibrated.*larger --budget"):
        VocabMatch(
            search="greedy", proposal="vocab", epsilon="calibrated", calibration_texts=1, budget=1
        ).fit(observation.info, model)
