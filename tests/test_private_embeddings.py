"""Noise of differential privacy on input embeddings: its law, its clipping, what is public, and attacks behind it."""

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from hiddenlab.attacks.beam_decoding import Prepared
from hiddenlab.attacks.nearest import NearestEmbedding
from hiddenlab.attacks.vocab_match import VocabMatch
from hiddenlab.channels import Channel
from hiddenlab.defenses.private_embeddings import DChi, DPForward, SplitAndDenoise, privacy_of_unit_noise
from hiddenlab.diagnosis import diagnose
from hiddenlab.errors import InputError, NotApplicableError
from hiddenlab.eval.assess import ensemble
from hiddenlab.input_noise import LAPLACE, are_clipped, is_noisy, sigma_of
from hiddenlab.models import TruncatedModel
from hiddenlab.stages import Stage
from hiddenlab.testing import BOS, WIDTH

Truncated = Callable[..., TruncatedModel]
PROMPT = [BOS, 5, 17, 40, 61, 203, 99]


def drawn(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def noise_of(stage: Stage, rows: int, width: int = 40, seed: int = 0) -> torch.Tensor:
    return stage.inputs(torch.zeros(rows, width), torch.full((2, width), 1e9), drawn(seed))


@pytest.mark.parametrize("stage", [DChi(30.0), SplitAndDenoise(30.0)], ids=lambda stage: stage.spec)
def test_noise_of_d_chi_has_gamma_lengths_and_no_direction(stage: Stage) -> None:
    noise = noise_of(stage, 3000)
    lengths = noise.norm(dim=1).numpy()
    assert stats.kstest(lengths, stats.gamma(a=40, scale=1 / 30.0).cdf).pvalue > 1e-3
    # On an even direction each coordinate has a Beta distribution.
    along = (noise[:, 3] / noise.norm(dim=1)).square().numpy()
    assert stats.kstest(along, stats.beta(0.5, 39 / 2).cdf).pvalue > 1e-3


def test_the_published_code_of_split_and_denoise_draws_far_more_noise() -> None:
    noise = noise_of(SplitAndDenoise(30.0, noise="code"), 400)
    assert float(noise.abs().max()) <= 40 / 30 * 3
    ratio = float(noise.std() / noise_of(SplitAndDenoise(30.0), 400).std())
    assert ratio == pytest.approx(math.sqrt(40 / 3), rel=0.1)


@given(st.floats(0.05, 60), st.floats(1e-9, 0.3))
@settings(max_examples=40)
def test_dp_forward_spends_its_budget_exactly(epsilon: float, delta: float) -> None:
    """The privacy loss of Gaussian noise is normal: the probability beyond ε, less what ε allows, is δ."""
    hidden = privacy_of_unit_noise(epsilon, delta)
    mean, deviation = hidden**2 / 2, hidden
    beyond = stats.norm.sf(epsilon, mean, deviation)
    allowed = math.exp(epsilon) * stats.norm.sf(epsilon, -mean, deviation)
    assert beyond - allowed == pytest.approx(delta, rel=1e-3, abs=1e-12)
    # Never more noise than by the classical rule, where that holds.
    if epsilon < 1:
        assert 1 / hidden <= math.sqrt(2 * math.log(1.25 / delta)) / epsilon


@pytest.mark.parametrize("clip", [0.5, 1e6])
def test_dp_forward_clips_the_prompt_as_a_whole(clip: float) -> None:
    stage = DPForward(500.0, delta=0.9, clip=clip)
    rows = torch.randn(6, 20, generator=drawn(1))
    table = torch.randn(4, 20)
    noise = stage.inputs(torch.zeros(6, 20), table, drawn(2))
    shown = stage.inputs(rows, table, drawn(2)) - noise
    torch.testing.assert_close(
        shown, rows * min(1.0, clip / float(rows.norm())), atol=1e-2 * stage.sigma, rtol=1e-4
    )
    many = stage.inputs(torch.zeros(1000, 20), table, drawn(3))
    assert float(many.std()) == pytest.approx(stage.sigma, rel=0.03)


def test_split_and_denoise_clips_to_the_longest_embedding() -> None:
    table = torch.randn(30, 16, generator=drawn(0))
    longest = float(table.norm(dim=1).max())
    for eta in (0.5, 1e9):
        shown = SplitAndDenoise(eta).inputs(table, table, drawn(1))
        assert float(shown.norm(dim=1).max()) <= longest * (1 + 1e-5)
    torch.testing.assert_close(shown, table)  # without noise nothing is longer


@given(
    st.sampled_from(["dchi:eta=40", "snd:eta=40", "snd:eta=40,noise=code", "dp-forward:epsilon=8"]),
    st.integers(0, 99),
)
@settings(max_examples=20)
def test_one_seed_gives_one_noise(spec: str, seed: int) -> None:
    (stage,) = Channel.parse([spec]).defenses
    rows, table = torch.randn(3, 8, generator=drawn(1)), torch.randn(5, 8, generator=drawn(2))
    once, again, other = (stage.inputs(rows, table, drawn(s)) for s in (seed, seed, seed + 1))
    assert torch.equal(once, again) and not torch.equal(once, other)


@pytest.mark.parametrize("spec", ["dchi:eta=1e12", "snd:eta=1e12"])
def test_a_large_eta_gives_the_plain_states(spec: str, tiny_model: Truncated) -> None:
    model = tiny_model("llama", 2)
    plain, _ = Channel.parse([]).release(model, PROMPT)
    released, _ = Channel.parse([spec]).release(model, PROMPT)
    torch.testing.assert_close(released.states, plain.states, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "spec", ["dchi:eta=9", "snd:eta=9", "snd:eta=9,noise=code", "dp-forward:epsilon=3,clip=2"]
)
def test_the_strength_of_the_noise_is_public(spec: str, tiny_model: Truncated) -> None:
    info = Channel.parse([spec]).release(tiny_model("llama", 1), PROMPT)[0].info
    (stage,) = Channel.parse([spec]).defenses
    noise = stage.inputs(torch.zeros(500, WIDTH), torch.full((2, WIDTH), 1e9), drawn(5))
    sigma = sigma_of(info, WIDTH)
    assert sigma is not None and float(noise.std()) == pytest.approx(sigma, rel=0.05)
    assert is_noisy(info) and are_clipped(info) == (not spec.startswith("dchi"))
    twice = Channel.parse([spec, "gaussian:sigma=2.0"]).release(tiny_model("llama", 1), PROMPT)[0].info
    assert sigma_of(twice, WIDTH) == pytest.approx(math.hypot(sigma, 2.0))


def test_malformed_facts_of_noise_are_refused(tiny_model: Truncated) -> None:
    info = Channel.parse([]).release(tiny_model("llama", 1), PROMPT)[0].info
    assert sigma_of(info, WIDTH) is None
    for bad in ({"eta": 0, "law": "sphere"}, {"eta": 1.0, "law": "flat"}, {"law": "sphere"}, 3):
        with pytest.raises(InputError, match=LAPLACE):
            sigma_of(replace(info, facts={LAPLACE: [bad]}), WIDTH)


def test_orders_by_noise_are_asked_where_nothing_was_clipped(tiny_model: Truncated) -> None:
    model = tiny_model("llama", 1)
    asked = Prepared.solves.fget
    assert asked is not None
    for spec, solves in (
        ("dchi:eta=500", True),
        ("snd:eta=500", False),
        ("dp-forward:epsilon=90,clip=50", False),
    ):
        observation, _ = Channel.parse([spec, "seq-perm"]).release(model, PROMPT)
        assert asked(SimpleNamespace(info=observation.info, model=model)) == solves


def test_bad_parameters_are_refused() -> None:
    builds: list[Callable[[], object]] = [
        lambda: DChi(0.0), lambda: SplitAndDenoise(math.inf), lambda: DPForward(-1.0), lambda: DPForward(501.0),
        lambda: DPForward(1.0, delta=0.0), lambda: DPForward(1.0, clip=math.nan),
    ]  # fmt: skip
    for build in builds:
        with pytest.raises(InputError):
            build()


@pytest.mark.parametrize("spec", ["dchi:eta=3e5", "snd:eta=3e5"])
def test_weak_noise_is_read(spec: str, tiny_model: Truncated, small_probes: None) -> None:
    model = tiny_model("llama", 1)
    observation, _ = Channel.parse([spec]).release(model, PROMPT)
    assert VocabMatch().fit(observation.info, model).recover(observation).ids == PROMPT


@pytest.mark.parametrize("spec", ["dchi:eta=100", "snd:eta=100", "dp-forward:epsilon=500,delta=0.99"])
def test_embeddings_that_noise_moves_little_are_read(spec: str, tiny_model: Truncated) -> None:
    """A client that sends noised embeddings; of clipped ones the direction is left."""
    model = tiny_model("llama", 0, "embed")
    observation, _ = Channel.parse([spec]).release(model, PROMPT)
    result = NearestEmbedding().fit(observation.info, model).recover(observation)
    assert result.ids == PROMPT and not result.verified


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec", ["dchi:eta=50", "snd:eta=50", "snd:eta=50,noise=code", "dp-forward:epsilon=8"]
)
def test_no_attack_fails_behind_noise(spec: str, tiny_model: Truncated, small_probes: None) -> None:
    model = tiny_model("llama", 1)
    released = [Channel.parse([spec]).release(model, PROMPT[:4])[0]]
    attempts = ensemble.attack_all(released, model, 0, 60.0, lambda *_: None, ensemble.ATTACKS)
    bad = [attempt for attempt in attempts if attempt.status == ensemble.CRASHED]
    assert not bad and any(attempt.status == ensemble.RAN for attempt in attempts)
    with pytest.raises(NotApplicableError):  # rows that noise changed are not taken for those of another site
        diagnose(released[0], model)
