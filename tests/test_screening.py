"""Screening in a faster dtype: the same tokens, and every match is run by the truncated model itself."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hiddenlab.attacks.beam_decoding import BeamDecoding
from hiddenlab.attacks.beam_decoding.beam import _from_all, _screened, _try
from hiddenlab.attacks.beam_decoding.features import BEFORE, FIT
from hiddenlab.attacks.beam_decoding.hypotheses import start
from hiddenlab.attacks.beam_decoding.row_features import fast_enough
from hiddenlab.attacks.vocab_match import VocabMatch, task
from hiddenlab.attacks.vocab_match.task import Trials
from hiddenlab.channels import Channel
from hiddenlab.matching import screening
from hiddenlab.matching.distance import Matcher
from hiddenlab.matching.screening import Screen, near_ones
from hiddenlab.models import TruncatedModel
from hiddenlab.summary import NO_STATE
from hiddenlab.types import Observation

LoadModel = Callable[..., TruncatedModel]
CHANNELS = ("identity", "seq-perm", "hidden-perm", "2d-perm")
PROMPTS = [[5, 250, 17, 17, 3, 99, 204, 5], [77, 8, 131]]


@pytest.fixture(autouse=True)
def bfloat16_is_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Screens bfloat16 on every processor, from two layers on."""
    monkeypatch.setattr(screening, "fast_dtype", lambda device: torch.bfloat16)
    monkeypatch.setattr(screening, "LEAST_LAYERS", 2)


def release(model: TruncatedModel, *specs: str) -> list[Observation]:
    generator = torch.Generator().manual_seed(1)
    return [one for one, _ in Channel.parse(specs).release_batch(model, PROMPTS, generator)]


@pytest.mark.parametrize("stream", ["resid", pytest.param("final_norm", marks=pytest.mark.slow)])
@pytest.mark.parametrize("channel", CHANNELS)
def test_the_same_as_without(tiny_model: LoadModel, channel: str, stream: str) -> None:
    model = tiny_model("gemma2", 4 if stream == "final_norm" else 2, stream=stream)
    observations = release(model, channel)
    found = {}
    for screened in (False, True):
        attacker = VocabMatch(proposal="vocab", without="" if screened else "screening")
        attacker.fit(observations[0].info, model)
        assert attacker._prepared is not None
        screen = attacker._prepared.screen
        if screen is not None:
            screen.load()
        engines = [model] + ([screen.model] if screen is not None else [])
        assert len(engines) == 1 + screened
        before = [one.evaluated_tokens for one in engines]
        found[screened] = attacker.fit(observations[0].info, model).recover_batch(observations)
        ran = [one.evaluated_tokens - start for one, start in zip(engines, before, strict=True)]
        assert sum(one.evaluated_tokens for one in found[screened]) == sum(ran)
        if screened:
            assert ran[0] < ran[1]
    for plain, fast, prompt in zip(found[False], found[True], PROMPTS, strict=True):
        assert plain.ids == fast.ids == prompt
        assert all(token.verified for token in fast.tokens)
        # Distances are the model's own: a screen's are thousands of times as large.
        for one, other in zip(plain.tokens, fast.tokens, strict=True):
            assert other.distance == pytest.approx(one.distance, abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("channel", ["hidden-perm", "2d-perm"])
def test_a_screen_that_is_wrong_costs_time_only(
    tiny_model: LoadModel, monkeypatch: pytest.MonkeyPatch, channel: str
) -> None:
    """Where the model is only given the farthest candidates, a second look at all the others finds the right one."""
    monkeypatch.setattr(task, "near_ones", lambda relative: relative.argsort(descending=True)[:2])
    model = tiny_model("llama", 2)
    attacker = VocabMatch(proposal="vocab")
    for recovery, prompt in zip(
        attacker.fit((shown := release(model, channel))[0].info, model).recover_batch(shown),
        PROMPTS,
        strict=True,
    ):
        assert recovery.ids == prompt
        assert all(token.verified for token in recovery.tokens)
        assert recovery.stop_reason == "complete"


@pytest.mark.slow
def test_what_no_token_gives_is_left_unverified_with_the_nearest(tiny_model: LoadModel) -> None:
    """Whether or not there is a screen, the model's own distances choose the best guess."""
    model = tiny_model("llama", 2)
    (first, _) = release(model, "hidden-perm")
    first.states[2] += 0.3 * torch.randn(first.states.shape[1], generator=torch.Generator().manual_seed(3))
    plain, fast = (
        VocabMatch(proposal="vocab", without="" if screened else "screening")
        .fit(first.info, model)
        .recover(first)
        for screened in (False, True)
    )
    assert plain.stop_reason == fast.stop_reason == "vocabulary exhausted"
    assert not fast.tokens[2].verified
    assert plain.tokens[2].token == fast.tokens[2].token
    assert fast.tokens[2].distance == pytest.approx(plain.tokens[2].distance, rel=1e-4)


def test_a_first_row_that_no_token_gives_is_left_unverified(tiny_model: LoadModel) -> None:
    """First positions run without the screen, so that nothing is left for a second look."""
    model = tiny_model("llama", 2)
    (first, _) = release(model, "identity")
    first.states[0] += 5.0
    found = VocabMatch(proposal="vocab").fit(first.info, model).recover(first)
    assert found.stop_reason == NO_STATE
    assert not found.tokens[0].verified
    assert len(found.tokens) == len(first.states)


def test_where_it_does_not_pay(tiny_model: LoadModel, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Screen.pays(tiny_model("llama", 2))
    assert not Screen.pays(tiny_model("llama", 1))
    assert not Screen.pays(tiny_model("llama", 2).sibling(2, dtype="bfloat16"))
    monkeypatch.setattr(screening, "fast_dtype", lambda device: torch.float32)
    assert not Screen.pays(tiny_model("llama", 2))


@pytest.mark.parametrize(
    ("relative", "expected"),
    [
        (torch.tensor([3.0, 1.0, 9.0, 9.0, 9.0, 2.0]), [1, 5]),  # at least two, and half the median is 3
        (torch.tensor([3.0, 1.0, 9.0, 9.0, 9.0, 2.0, 8.0, 8.0, 8.0]), [1, 5, 0]),
        (torch.full((96,), 7.0).index_fill(0, torch.tensor([40, 50, 60]), 6.0), [40, 50, 60]),
    ],
)
def test_the_near_ones(relative: Tensor, expected: list[int]) -> None:
    assert sorted(near_ones(relative).tolist()) == sorted(expected)


def test_a_followed_prefix_gives_nearly_the_same_states(tiny_model: LoadModel) -> None:
    """The rounded prefix is the exact one's, brought up to date piece by piece."""
    model = tiny_model("qwen3", 3)
    fast, prefix, shadow = Screen(model), model.prefix(), None
    candidates = torch.arange(40)
    for part in ([4, 9, 88], [31], [7, 7]):
        prefix.extend(torch.tensor(part))
        shadow = fast.follow(prefix, shadow)
        assert shadow.length == prefix.length
        exact, rounded = prefix.branch(candidates), shadow.branch(candidates)
        assert rounded.dtype == torch.bfloat16
        assert (exact - rounded.float()).norm() < 0.03 * exact.norm()


@pytest.mark.parametrize(("channel", "fast"), [("gaussian:sigma=0.5", True), ("seq-perm", False)])
def test_beam_decoding_runs_in_a_faster_dtype_only_behind_what_changes_states(
    tiny_model: LoadModel, channel: str, fast: bool
) -> None:
    model = tiny_model("llama", 2)
    assert fast_enough(Screen(model), Channel.parse([channel]), Matcher(1, False), 0) == fast


@pytest.mark.usefixtures("small_probes")
@pytest.mark.slow
@pytest.mark.parametrize("channel", ["hidden-perm", "2d-perm"])
def test_of_screened_candidates_the_beam_keeps_near_ones_with_their_exact_distances(
    tiny_model: LoadModel, channel: str
) -> None:
    model = tiny_model("llama", 2)
    observation = release(model, "gaussian:sigma=0.001", channel)[0]
    attack = BeamDecoding(lm=False)
    prepared = attack.fit(observation.info, model).prepare(observation)
    engines, weights = prepared.engines, prepared.learned.weights
    assert engines.screen is not None
    assert engines.model is model
    with torch.inference_mode():
        decoding = start(prepared.reader.read(observation), engines, weights, attack.effort)
        pair, fresh = (decoding, decoding.beam[0]), model.vocab_size - 10
        one, other = (_from_all(*pair, weights, fresh) for _ in range(2))
        (exact,) = _try([pair], [one], engines, weights)
        before = decoding.evaluated
        (near,) = _screened([pair], [other], engines, weights)
    every = torch.cat(near.tokens)
    assert sorted(every.tolist()) == sorted(torch.cat(exact.tokens).tolist())
    assert decoding.evaluated - before == near.evaluated == len(every) + len(near.answers[0].branches)
    assert near.evaluated < 1.5 * len(every)
    states = torch.cat(exact.states)[torch.cat(exact.tokens).argsort()]
    assert (torch.cat(near.states)[every.argsort()] - states).norm() < 0.03 * states.norm()
    features = {
        (token, row): values
        for token, row, values in zip(
            exact.candidates.tokens.tolist(),
            exact.candidates.rows.tolist(),
            exact.candidates.features,
            strict=True,
        )
    }
    found = list(
        zip(
            near.candidates.tokens.tolist(),
            near.candidates.rows.tolist(),
            near.candidates.features,
            strict=True,
        )
    )
    nearest = min(features, key=lambda key: float(features[key][FIT]))
    assert nearest in {(token, row) for token, row, _ in found}
    for token, row, values in found:
        if (token, row) in features:
            assert values[BEFORE:].tolist() == pytest.approx(features[token, row][BEFORE:].tolist(), abs=1e-3)


def test_a_screen_is_loaded_once_enough_was_asked_of_it(tiny_model: LoadModel) -> None:
    one = Screen(tiny_model("llama", 2))
    assert not one.runs(screening.FEWEST - 1)
    assert not one.runs(screening.LOAD_AFTER)
    assert "model" not in vars(one)
    assert one.runs(screening.FEWEST)
    assert not one.runs(screening.FEWEST - 1)
    other = Screen(tiny_model("llama", 2))
    other.load()
    assert other.runs(screening.FEWEST)
    for screen, at_once in ((one, False), (other, True)):
        screen.reset()
        assert screen.runs(screening.FEWEST) is at_once


def test_only_what_the_model_ran_can_match() -> None:
    """A screened candidate within the limit is put just outside of it, and found by the second look."""
    tried = Trials(torch.tensor([1.0, 2.0]))
    table = torch.tensor([[0.5, 9.0], [9.0, 0.4], [7.0, 8.0], [6.0, 9.0]])
    tried.add(torch.tensor([10, 11, 12, 13]), table, exact=torch.tensor([2]))
    best, matched = tried.best([0, 1], tried.limits)
    assert not matched and best.distance > float(tried.limits[best.row])
    places = tried.doubtful()
    assert sorted(places.tolist()) == [0, 1, 3] and places.tolist()[2] == 3
    tried.correct(places[:2], table[places[:2]])
    assert tried.doubtful().tolist() == [3]
    best, matched = tried.best([0, 1], tried.limits)
    assert matched and (best.token, best.row) == (11, 1)
