"""Speculative decoding keeps the target's distribution, and can be replayed from recorded modes."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hiddenlab.defenses.verification import speculative
from hiddenlab.defenses.verification.causal_lm import WholeModel, load_whole
from hiddenlab.defenses.verification.provider import Request
from hiddenlab.defenses.verification.sampling import HashedNoise, Sampling, StreamNoise, probabilities
from hiddenlab.defenses.verification.speculative import Numbers, accepts, draft_tokens, own_tokens, possible
from hiddenlab.defenses.verification.transcript import Mode, Transcript
from hiddenlab.errors import InputError
from hiddenlab.testing import save_tiny

AHEAD = 3


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[WholeModel, WholeModel]:
    path = save_tiny("llama", tmp_path_factory.mktemp("llama"))
    return load_whole(path, device="cpu"), load_whole(path, device="cpu", layers=3)


@pytest.mark.slow
def test_draft_and_target_together_draw_from_the_target() -> None:
    generator = torch.Generator().manual_seed(0)
    target, draft = torch.tensor([[2.0, 1.0, 0.0, -1.0]]), torch.tensor([[0.0, 1.5, 1.0, -3.0]])
    sampling, noise = Sampling(temperature=0.8), StreamNoise(3)
    drawn = []
    for _ in range(6000):
        numbers = Numbers(noise.gumbel(4, ()), float(torch.rand(1, generator=generator)), noise.gumbel(4, ()))
        token = draft_tokens(draft, numbers, sampling)
        kept = bool(accepts(target, draft, token, numbers, sampling))
        drawn.append(int(token if kept else own_tokens(target, draft, numbers, sampling)))
    shares = torch.bincount(torch.tensor(drawn), minlength=4) / len(drawn)
    assert torch.allclose(shares, probabilities(target, sampling)[0], atol=0.025)


@pytest.mark.parametrize("method", ["gumbel", "greedy"])
def test_honest_answers_replay_and_others_do_not(models: tuple[WholeModel, WholeModel], method: str) -> None:
    target, draft = models
    requests = [Request(str(i), (5, 6 + i, 7), Sampling(method=method, seed=i)) for i in range(3)]
    found = list(speculative.answer(target, draft, requests, model="m", new_tokens=14, ahead=AHEAD))
    if method == "gumbel":
        assert {mode for one in found for mode in one.modes or ()} == {"accept", "reject", "bonus"}
    for one in found:
        assert len(one.output) == 14 and possible(one.modes or (), AHEAD)
        seen = speculative.replay(one, target, draft)
        assert float(speculative.mismatch(seen, AHEAD).sum()) == 0
        scores = speculative.monte_carlo(
            seen, AHEAD, 1e-6, torch.Generator().manual_seed(0), trials=4, top=300
        )
        assert float(scores.max()) < 0.5
        wrong = replace(one, output=tuple((t + 1) % 256 for t in one.output))
        other = speculative.replay(wrong, target, draft)
        assert float(speculative.mismatch(other, AHEAD).mean()) > 0.5
    if method == "gumbel":
        lied = replace(found[0], sampling=replace(found[0].sampling, seed=99))
        assert float(speculative.mismatch(speculative.replay(lied, target, draft), AHEAD).mean()) > 0.3


def exact(
    mode: str,
    target: torch.Tensor,
    draft: torch.Tensor,
    n: Numbers,
    temperature: float,
    claimed: int,
    sigma: float,
) -> float:
    """The probability of a token in a mode, for two tokens, by quadrature.

    Only differences of two logits matter; their noise is normal with variance 2 σ², on each side.
    """
    step = np.linspace(-6, 6, 1201)
    mass = np.exp(-(step**2) / 2)
    noise = step * sigma * 2**0.5
    q = (1 / (1 + np.exp(-(float(target[1] - target[0]) + noise) / temperature)))[
        :, None
    ]  # the target's second token
    p = (1 / (1 + np.exp(-(float(draft[1] - draft[0]) + noise) / temperature)))[None, :]

    def second(share: np.ndarray, gumbel: torch.Tensor) -> np.ndarray:
        return np.log(share / (1 - share)) + float(gumbel[1] - gumbel[0]) > 0

    proposed = second(p, n.draft)
    kept = n.uniform * np.where(proposed, p, 1 - p) < np.where(proposed, q, 1 - q)
    # What is left of a target after a rejection is one token: the one that it likes better than the draft does.
    event = {
        "accept": kept & (proposed == claimed), "reject": ~kept & ((q > p) == claimed),
        "bonus": np.broadcast_to(second(q, n.target) == claimed, kept.shape),
    }[mode]  # fmt: skip
    weights = mass[:, None] * mass[None, :]
    return float((weights * event).sum() / weights.sum())


@pytest.mark.parametrize("seed", range(4))
def test_monte_carlo_is_the_exact_probability_for_two_tokens(seed: int) -> None:
    generator, sigma, sampling = (
        torch.Generator().manual_seed(seed),
        0.5,
        Sampling(temperature=0.8, seed=seed),
    )
    modes: tuple[Mode, ...] = ("accept", "reject", "accept", "accept", "bonus", "reject", "accept")
    target, draft = (torch.randn(len(modes), 2, generator=generator) for _ in range(2))
    tokens = tuple(torch.randint(2, (len(modes),), generator=generator).tolist())
    one = Transcript("a", "m", (1,), tokens, sampling, modes=modes)
    found = speculative.monte_carlo(
        speculative.Speculated(target, draft, one), 2, sigma, generator, trials=20_000, epsilon=0.0
    ).neg().exp()  # fmt: skip
    numbers = speculative.Positions(StreamNoise(seed), 2)
    expected = [
        exact(mode, target[i], draft[i], numbers[i], 0.8, tokens[i], sigma) for i, mode in enumerate(modes)
    ]
    assert found.tolist() == pytest.approx(expected, abs=0.015)
    assert sum(0.02 < share < 0.98 for share in expected) >= 2


def test_monte_carlo_without_noise_is_the_exact_match(models: tuple[WholeModel, WholeModel]) -> None:
    """All tokens take part; half of the claimed ones are others than the provider drew."""
    target, draft = models
    (one,) = speculative.answer(
        target,
        draft,
        [Request("a", (5, 6, 7), Sampling(top_k=20, seed=3))],
        model="m",
        new_tokens=20,
        ahead=AHEAD,
    )
    changed = replace(one, output=tuple((t + i % 2) % 256 for i, t in enumerate(one.output)))
    seen = speculative.replay(changed, target, draft)
    scores = speculative.monte_carlo(
        seen, AHEAD, 1e-9, torch.Generator().manual_seed(0), trials=3, top=300, epsilon=1e-6
    )
    assert torch.equal((scores > 1).float(), speculative.mismatch(seen, AHEAD))
    few = speculative.monte_carlo(seen, AHEAD, 1e-9, torch.Generator().manual_seed(0), trials=3, top=20)
    assert torch.equal(few > 1, scores > 1)  # top-k keeps 20 of each model anyway
    with pytest.raises(InputError, match="ahead"):
        speculative.monte_carlo(seen, 1, 0.1, torch.Generator())


@given(st.lists(st.sampled_from(["accept", "reject", "bonus"]), max_size=12), st.integers(1, 4))
def test_possible_modes_are_those_of_rounds(modes: list[str], ahead: int) -> None:
    rest, fine = list(modes), True
    while rest and fine:
        run = next((i for i, mode in enumerate(rest) if mode != "accept"), len(rest))
        if run == len(rest):
            fine = run <= ahead
            break
        fine = (rest[run] == "reject" and run < ahead) or (rest[run] == "bonus" and run == ahead)
        rest = rest[run + 1 :]
    assert possible(modes, ahead) == fine  # type: ignore[arg-type]


def test_what_cannot_be_replayed_is_refused(models: tuple[WholeModel, WholeModel]) -> None:
    target, draft = models
    (one,) = speculative.answer(
        target, draft, [Request("a", (1, 2), Sampling())], model="m", new_tokens=4, ahead=2
    )
    with pytest.raises(InputError, match="modes"):
        speculative.replay(replace(one, modes=None), target, draft)
    with pytest.raises(InputError, match="ahead"):
        seen = speculative.replay(replace(one, modes=("bonus",) * 4), target, draft)
        speculative.mismatch(seen, 2)
    with pytest.raises(InputError, match="Gumbel"):
        list(
            speculative.answer(
                target, draft, [Request("a", (1,), Sampling(method="ipt"))], model="m", new_tokens=2
            )
        )
    with pytest.raises(InputError, match="ahead"):
        list(speculative.answer(target, draft, [], model="m", new_tokens=2, ahead=0))


def test_every_place_and_use_has_numbers_of_its_own() -> None:
    for noise in (StreamNoise(1), HashedNoise(b"k" * 16, 1), HashedNoise(b"k" * 16, 1, adaptive=False)):
        positions = speculative.Positions(noise, 4)
        numbers = [positions[place] for place in range(10)]
        drawn = {tuple(one.tolist()) for n in numbers for one in (n.draft, n.target)}
        assert len(drawn) == 20 and len({n.uniform for n in numbers}) == 10
