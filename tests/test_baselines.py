"""The baselines: exact where they must be, and honest about what they did."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from hiddenlab.attacks.nearest import NearestEmbedding
from hiddenlab.attacks.sipit import SipIt
from hiddenlab.base import Attack
from hiddenlab.channels import Channel
from hiddenlab.errors import InputError, NotApplicableError
from hiddenlab.models import TruncatedModel
from hiddenlab.testing import VOCABULARY
from hiddenlab.types import AttackResult, Observation
from tests.marks import slow_cases

LoadModel = Callable[..., TruncatedModel]
TOKENS = [17, 250, 3, 3, 99, 180]


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def recover(attack: Attack, model: TruncatedModel, *specs: str) -> AttackResult:
    observation: Observation = Channel.parse(specs).release(model, TOKENS, seeded())[0]
    return attack.fit(observation.info, model).recover(observation)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["gpt2", *slow_cases("llama", "gemma2")])
@pytest.mark.parametrize("policy", ["gradient", "random"])
def test_sipit_recovers_exactly(tiny_model: LoadModel, architecture: str, policy: str) -> None:
    model = tiny_model(architecture, 2)
    found = recover(SipIt(policy=policy), model)  # type: ignore[arg-type]
    assert found.ids == TOKENS
    assert all(one.verified and one.evaluated <= VOCABULARY for one in found.tokens)
    assert [one.row for one in found.tokens] == list(range(len(TOKENS)))
    assert found.stop_reason == "complete"
    if policy == "random":
        assert found.evaluated_tokens == sum(one.evaluated for one in found.tokens)
    else:  # each verified token follows a gradient
        assert found.evaluated_tokens >= 2 * sum(one.evaluated for one in found.tokens)


@pytest.mark.slow
def test_gradients_lead_to_the_token(tiny_model: LoadModel) -> None:
    """Else it would be the random policy at twice the price: half the vocabulary on average."""
    found = recover(SipIt(), tiny_model("llama", 1))
    assert sum(one.evaluated for one in found.tokens) < len(TOKENS) * VOCABULARY / 4


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["gradient", "random"])
def test_sipit_finds_the_same_beside_other_prompts(tiny_model: LoadModel, policy: str) -> None:
    model = tiny_model("llama", 1)
    channel = Channel.parse([])
    observations = [channel.release(model, TOKENS[i:], seeded())[0] for i in (3, 4, 5)]
    attack = SipIt(policy=policy, batch=2)  # type: ignore[arg-type]
    together = attack.fit(observations[0].info, model).recover_batch(observations)
    for one, observation in zip(together, observations, strict=True):
        alone = attack.fit(observation.info, model).recover(observation)
        assert one.ids == alone.ids
        assert [t.evaluated for t in one.tokens] == [t.evaluated for t in alone.tokens]
        assert (one.evaluated_tokens, one.forward_calls) == (alone.evaluated_tokens, alone.forward_calls)


def test_sipit_counts_what_it_runs(tiny_model: LoadModel) -> None:
    model = tiny_model("llama", 1)
    for attack in (SipIt(), SipIt(policy="random", budget=3, per_step=2)):
        observation = Channel.parse([]).release(model, TOKENS[:3], seeded())[0]
        attack.fit(observation.info, model)
        before = model.evaluated_tokens, model.forward_calls
        found = attack.fit(observation.info, model).recover(observation)
        ran = model.evaluated_tokens - before[0], model.forward_calls - before[1]
        assert (found.evaluated_tokens, found.forward_calls) == ran


def test_sipit_within_a_budget(tiny_model: LoadModel) -> None:
    found = recover(SipIt(policy="random", budget=3, per_step=2), tiny_model("llama", 2))
    assert len(found.ids) == len(TOKENS)
    assert all(one.evaluated <= 3 for one in found.tokens)
    assert found.stop_reason == "budget exhausted"


def test_what_sipit_cannot_use(tiny_model: LoadModel) -> None:
    for spec, message in (
        ("seq-perm", "in order"),
        ("hidden-perm", "in order"),
        ("drop-rows:size=1,after=2", "gaps"),
    ):
        with pytest.raises(NotApplicableError, match=message):
            recover(SipIt(), tiny_model("llama", 2), spec)
    with pytest.raises(InputError, match="must be positive"):
        SipIt(step=0.0)
    whole = Channel.parse([]).release(tiny_model("llama", 2), TOKENS, seeded())[0]
    narrow = replace(whole, states=whole.states[:, :-1])
    with pytest.raises(InputError):
        SipIt().fit((shown := [whole, narrow])[0].info, tiny_model("llama", 2)).recover_batch(shown)
    with pytest.raises(InputError, match="at least 1 prompt"):
        SipIt(batch=0)


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "qwen3"])
def test_the_nearest_embedding_reads_layer_0(tiny_model: LoadModel, architecture: str) -> None:
    found = recover(NearestEmbedding(), tiny_model(architecture, 0, "embed"))
    assert found.ids == TOKENS
    assert found.evaluated_tokens == found.forward_calls == 0
    assert not any(one.verified for one in found.tokens)


def test_the_nearest_embedding_keeps_positions_and_refuses_permuted_coordinates(
    tiny_model: LoadModel,
) -> None:
    model = tiny_model("llama", 0, "embed")
    found = recover(NearestEmbedding(), model, "shard:alpha=2,c=1,node=1")
    assert (found.ids, found.positions) == (TOKENS[1::2], (1, 3, 5))
    with pytest.raises(NotApplicableError, match="coordinates in order"):
        recover(NearestEmbedding(), model, "hidden-perm")
    with pytest.raises(NotApplicableError, match="not as wide"):
        recover(NearestEmbedding(), tiny_model("llama", 1, "k"))
