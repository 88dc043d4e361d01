"""Speculative decoding keeps the target's distribution, and can be replayed from recorded modes."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hiddenlab.defenses.verification import speculative
from hiddenlab.defenses.verification.causal_lm import WholeModel, load_whole
from hiddenlab.defenses.verification.provider import Request
from hiddenlab.defenses.verification.sampling import HashedNoise, Sampling, StreamNoise, probabilities
from hiddenlab.defenses.verification.speculative import Numbers, accepts, draft_token, own_token, possible
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
    target, draft = torch.tensor([2.0, 1.0, 0.0, -1.0]), torch.tensor([0.0, 1.5, 1.0, -3.0])
    sampling, noise = Sampling(temperature=0.8), StreamNoise(3)
    drawn = []
    for _ in range(6000):
        numbers = Numbers(noise.gumbel(4, ()), float(torch.rand(1, generator=generator)), noise.gumbel(4, ()))
        token = draft_token(draft, numbers, sampling)
        drawn.append(
            token
            if accepts(target, draft, token, numbers, sampling)
            else own_token(target, draft, numbers, sampling)
        )
    shares = torch.bincount(torch.tensor(drawn), minlength=4) / len(drawn)
    assert torch.allclose(shares, probabilities(target[None], sampling)[0], atol=0.025)


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
        scores = speculative.monte_carlo(seen, AHEAD, 1e-4, torch.Generator().manual_seed(0), trials=4)
        assert float(scores.max()) < 0.5
        wrong = replace(one, output=tuple((t + 1) % 256 for t in one.output))
        other = speculative.replay(wrong, target, draft)
        assert float(speculative.mismatch(other, AHEAD).mean()) > 0.5
    if method == "gumbel":
        lied = replace(found[0], sampling=replace(found[0].sampling, seed=99))
        assert float(speculative.mismatch(speculative.replay(lied, target, draft), AHEAD).mean()) > 0.3


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
