"""Noise of unknown strength: what is published of it, and how beam decoding finds it out."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hiddenlab.attacks.beam_decoding import BeamDecoding
from hiddenlab.attacks.beam_decoding.noise_strength import (
    LADDER,
    ROUNDS,
    _inverse,
    nearest_step,
    settle,
    strength_of,
)
from hiddenlab.attacks.vocab_match import VocabMatch
from hiddenlab.channels import Channel
from hiddenlab.errors import InputError, NotApplicableError
from hiddenlab.matching.distance import choose_matcher
from hiddenlab.models import TruncatedModel
from hiddenlab.observation import load_observation, save_observation
from hiddenlab.preparations import suppose

TOKENS = [5, 17, 40, 99, 140, 7, 250, 31, 12, 88]


def test_the_strength_is_not_published(tiny_model: Callable[..., TruncatedModel], tmp_path: object) -> None:
    model, generator = tiny_model("llama", 2), torch.Generator().manual_seed(0)
    specs = ["unknown-gaussian:sigma=0.125", "seq-perm"]
    observation, _ = Channel.parse(specs).release(model, TOKENS, generator)
    path = f"{tmp_path}/observation.safetensors"
    save_observation(observation, path)
    with open(path, "rb") as handle:
        assert b"0.125" not in handle.read()
    info = load_observation(path).info
    assert info.channel == ("unknown-gaussian", "seq-perm") and info.noise_sigma is None
    channel = Channel.parse(list(info.channel))
    assert channel.unknown and not Channel.parse(["gaussian:sigma=1"]).unknown
    with pytest.raises(NotApplicableError, match="beam-decoding estimates it"):
        channel.release(model, TOKENS, generator)
    with pytest.raises(NotApplicableError, match="beam-decoding estimates it"):
        VocabMatch().fit(observation.info, model)
    with pytest.raises(InputError, match="only one stage"):
        Channel.parse(["unknown-gaussian", "unknown-gaussian:sigma=1"])
    with pytest.raises(InputError, match="sigma > 0"):
        Channel.parse(["unknown-gaussian:sigma=0"])


def test_a_supposed_strength_makes_the_known_channel(tiny_model: Callable[..., TruncatedModel]) -> None:
    model = tiny_model("llama", 2)
    first, second = (
        Channel.parse([spec, "random-prefix"]).release(model, TOKENS, torch.Generator().manual_seed(0))[0]
        for spec in ("unknown-gaussian:sigma=0.5", "gaussian:sigma=0.5")
    )
    assert torch.equal(first.states, second.states)
    assert suppose(first.info, 0.5) == second.info


@given(st.floats(-4, 0.9), st.floats(0.5, 2.0))
def test_a_growing_function_is_inverted(exponent: float, power: float) -> None:
    strength = 10.0**exponent
    found = _inverse(lambda x: 3 * x**power, 3 * strength**power)
    assert found == pytest.approx(strength, rel=1e-3)
    assert _inverse(lambda x: x, 1e9) == LADDER[-1]
    assert _inverse(lambda x: x, 0.0) == LADDER[0]


@given(st.lists(st.sampled_from(LADDER), min_size=1, max_size=8), st.randoms())
def test_supposing_always_ends(steps: list[float], random: object) -> None:
    """Whatever decoding finds, few strengths are tried, and what is supposed in the end was tried."""
    path = dict(zip(steps, steps[1:] + steps[:1], strict=True))
    tried: list[float] = []

    def found(supposed: float) -> float:
        tried.append(supposed)
        return path.get(supposed, supposed)

    supposed, strength = settle(steps[0], found)
    assert supposed in tried and len(tried) == len(set(tried)) <= ROUNDS
    assert strength == path.get(supposed, supposed)
    if nearest_step(strength) != supposed and len(tried) < ROUNDS:
        assert supposed == max(one for one in tried if one in _reachable(path, supposed))


def _reachable(path: dict[float, float], start: float) -> set[float]:
    seen = {start}
    while (start := path.get(start, start)) not in seen:
        seen.add(start)
    return seen


def test_steps_are_near() -> None:
    for strength in (1e-4, 0.0123, 0.4, 2.0):
        assert abs(math.log10(nearest_step(strength) / strength)) < 0.27


@pytest.mark.parametrize("specs", [[], ["seq-perm"], ["hidden-perm"], ["random-prefix"]])
def test_right_tokens_tell_the_strength(tiny_model: Callable[..., TruncatedModel], specs: list[str]) -> None:
    model = tiny_model("llama", 2)
    tokens = torch.randint(0, 256, (40,), generator=torch.Generator().manual_seed(2))
    for sigma in (0.01, 0.1):
        channel = Channel.parse([f"unknown-gaussian:sigma={sigma}", *specs])
        observation, secret = channel.release(model, tokens.tolist(), torch.Generator().manual_seed(1))
        matcher = choose_matcher("auto", observation.info)
        places = torch.arange(40) if secret.row_order is None else torch.tensor(secret.row_order)
        with torch.inference_mode():
            found = strength_of(
                matcher.prepare(observation.states), places, tokens, Channel.parse(observation.info.channel),
                matcher, model, 0,
            )  # fmt: skip
        if specs == ["random-prefix"]:
            assert sigma / 2 < found < 1.0  # what the prefix does is taken for noise
        else:
            # Sorted rows of a narrow model tell less.
            assert found == pytest.approx(sigma, rel=0.5 if "hidden-perm" in specs else 0.3)


def test_a_few_wrong_tokens_tell_much_the_same(tiny_model: Callable[..., TruncatedModel]) -> None:
    """They change every plain state behind them; the rows before the first one do not know of it."""
    model, sigma = tiny_model("llama", 2), 0.01
    tokens = torch.randint(0, 256, (40,), generator=torch.Generator().manual_seed(2))
    observation, _ = Channel.parse([f"unknown-gaussian:sigma={sigma}"]).release(
        model, tokens.tolist(), torch.Generator().manual_seed(1)
    )
    matcher, channel = choose_matcher("auto", observation.info), Channel.parse(observation.info.channel)
    rows, found = matcher.prepare(observation.states), []
    for wrong in ([], [20], [15, 30], [2]):
        guess = tokens.clone()
        guess[wrong] = (guess[wrong] + 7) % 256
        with torch.inference_mode():
            found.append(strength_of(rows, torch.arange(40), guess, channel, matcher, model, 0))
    assert found[0] == pytest.approx(sigma, rel=0.3)
    assert all(one == pytest.approx(sigma, rel=0.6) for one in found[1:3])
    assert found[3] > found[0]  # a wrong token early on is taken for noise


@pytest.mark.usefixtures("small_probes")
def test_missing_rows_of_unknown_noise_need_a_language_model(
    tiny_model: Callable[..., TruncatedModel],
) -> None:
    model = tiny_model("llama", 2)
    channel = Channel.parse(["unknown-gaussian:sigma=0.01", "drop-rows:size=2,after=4"])
    observation, _ = channel.release(model, TOKENS, torch.Generator().manual_seed(0))
    with pytest.raises(NotApplicableError, match="language model"):
        BeamDecoding(lm=False).fit(observation.info, model)


@pytest.mark.slow
@pytest.mark.usefixtures("small_probes")
@pytest.mark.parametrize("sigma", [0.01, pytest.param(0.003, marks=pytest.mark.slow)])
def test_a_prompt_behind_unknown_noise_comes_back(
    tiny_model: Callable[..., TruncatedModel], monkeypatch: pytest.MonkeyPatch, sigma: float
) -> None:
    """A tiny model's probe knows little: with all tokens among the candidates, states in context decide."""
    monkeypatch.setattr("hiddenlab.attacks.beam_decoding.row_features.SHORTLIST", 300)
    model, generator = tiny_model("llama", 2), torch.Generator()
    observation, _ = Channel.parse([f"unknown-gaussian:sigma={sigma}"]).release(
        model, TOKENS, torch.Generator().manual_seed(0)
    )
    attack = BeamDecoding(lm=False, width=3000, beam=2)
    assert attack.fit(observation.info, model).measured == {}  # the first prompt tells the strength
    assert attack.recover(observation).ids == TOKENS
    assert attack.measured["noise_sigma"] == pytest.approx(sigma, rel=0.5)
    known, _ = Channel.parse(["gaussian:sigma=0.01"]).release(model, TOKENS, generator)
    assert "noise_sigma" not in BeamDecoding(lm=False).fit(known.info, model).measured
