"""Projections in place of states: attacked like states, through the same matcher."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hiddenlab.attacks.infill import Infill
from hiddenlab.attacks.sipit import SipIt
from hiddenlab.attacks.vocab_match import VocabMatch
from hiddenlab.channels import Channel
from hiddenlab.errors import InputError, NotApplicableError
from hiddenlab.matching.distance import choose_matcher
from hiddenlab.models import TruncatedModel
from hiddenlab.observation import load_observations, save_observations
from hiddenlab.projections import Projection, projection_of
from hiddenlab.types import Observation, ObservationInfo, Site

LoadModel = Callable[..., TruncatedModel]
TOKENS = [5, 77, 3, 3, 200, 41, 8, 150]


def released(model: TruncatedModel, *specs: str) -> Observation:
    return Channel.parse(specs).release(model, TOKENS, torch.Generator().manual_seed(0))[0]


def test_projections_are_inner_products_with_known_directions() -> None:
    states = torch.randn(5, 40)
    found = Projection(3, 1)(states)
    directions = Projection(3, 1)(torch.eye(40))
    assert torch.allclose(
        found, torch.stack([(states * directions[:, i]).sum(1) for i in range(3)], 1), atol=1e-5
    )
    assert not torch.equal(Projection(3, 2)(states), found)
    big = Projection(2000)(torch.eye(40))
    assert abs(float(big.square().sum(0).mean()) - 1) < 0.05 and abs(float(big.mean())) < 0.01


@pytest.mark.slow
@pytest.mark.usefixtures("small_probes")
def test_enough_projections_give_the_prompt_away(tiny_model: LoadModel) -> None:
    model = tiny_model("llama", 2)
    observation = released(model, "project:count=16")
    assert observation.states.shape == (len(TOKENS), 16)
    found = VocabMatch().fit(observation.info, model).recover(observation)
    assert found.ids == TOKENS and all(one.verified for one in found.tokens)


@pytest.mark.slow
@pytest.mark.usefixtures("small_probes")
def test_noise_on_projections(tiny_model: LoadModel) -> None:
    model = tiny_model("llama", 1)
    plain, noisy = released(model, "project:count=4"), released(model, "project:count=4,sigma=0.1")
    error = (noisy.states - plain.states).square().mean(1).sqrt() / plain.states.square().mean(1).sqrt()
    assert 0.02 < float(error.median()) < 0.3
    found = VocabMatch(budget=64).fit(noisy.info, model).recover(noisy)
    assert len(found.ids) == len(TOKENS)


def test_files_keep_the_projection(tiny_model: LoadModel, tmp_path: Path) -> None:
    model = tiny_model("llama", 1)
    save_observations([released(model, "project:count=4,seed=3")], tmp_path / "o.safetensors")
    (back,) = load_observations(tmp_path / "o.safetensors")
    assert projection_of(back.info) == Projection(4, 3)


@pytest.mark.usefixtures("small_probes")
def test_what_projections_do_not_go_with(tiny_model: LoadModel) -> None:
    model = tiny_model("llama", 1)
    both = released(model, "project:count=4", "hidden-perm")
    with pytest.raises(NotApplicableError, match="permuted coordinates"):
        VocabMatch().fit(both.info, model).recover(both)
    for attack in (SipIt(), Infill()):
        with pytest.raises(NotApplicableError, match="whole states"):
            attack.fit((shown := released(model, "project:count=4")).info, model).recover(shown)
    for facts in ({"projection": 3}, {"projection": {"count": 0, "seed": 0}}, {"projection": {"count": 2}}):
        with pytest.raises(InputError, match="projection"):
            choose_matcher("auto", ObservationInfo("m", (1.0,), Site(1), facts=facts))
    with pytest.raises(InputError, match="projected once"):
        released(model, "project:count=4", "project:count=2")
    for spec in ("project:count=0", "project:count=2,sigma=-1"):
        with pytest.raises(InputError):
            Channel.parse([spec])
