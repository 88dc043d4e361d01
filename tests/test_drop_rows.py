"""Rows of one node or around one gap: which they are is public, which tokens they are of is not."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hiddenlab.attacks.vocab_match import VocabMatch
from hiddenlab.batch import sample_of
from hiddenlab.channels import Channel
from hiddenlab.errors import HiddenlabError, InputError
from hiddenlab.job import Case
from hiddenlab.models import TruncatedModel
from hiddenlab.sharding import AttnNode, Plan
from hiddenlab.summary import summarise
from hiddenlab.testing import VOCABULARY
from hiddenlab.types import AttackResult, GroundTruth, TokenPrediction

LoadModel = Callable[..., TruncatedModel]
TOKENS = [17, 250, 3, 3, 99, 180, 41, 7, 256, 299, 0, 64]


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.mark.slow
@settings(max_examples=30)
@given(
    alpha=st.integers(1, 4),
    c=st.integers(1, 3),
    m=st.integers(1, 2),
    length=st.integers(12, 20),
    data=st.data(),
)
def test_a_node_sees_the_rows_of_its_plan(
    tiny_model: LoadModel, alpha: int, c: int, m: int, length: int, data: st.DataObject
) -> None:
    model = tiny_model("llama", 2)
    tokens = list(range(length))
    plan = Plan.clustered(length, c, alpha=alpha, m=m)
    node = data.draw(st.integers(0, alpha - 1))
    j, k = (data.draw(st.integers(0, plan.beta - 1)) for _ in "jk")
    whole, _ = Channel.parse([]).release(model, tokens, seeded())
    for spec, held in (
        (f"shard:alpha={alpha},c={c},node={node}", plan.shards[node]),
        (f"shard:alpha={alpha},c={c},m={m},queries={j},keys={k}", plan.held_by(AttnNode(j, k))),
    ):
        channel = Channel.parse([spec])
        assert [d.spec for d in Channel.parse(channel.specs).defenses] == list(channel.specs)
        if not held:
            with pytest.raises(InputError, match="covers nothing"):
                channel.release(model, tokens, seeded())
            continue
        observation, secret = channel.release(model, tokens, seeded())
        assert torch.equal(observation.states, whole.states[list(held)])
        assert secret.tokens == tuple(tokens)
        if len(held) < length:
            assert observation.info.positions == held
            assert observation.info.facts["tokens"] == length
        assert channel.whole().specs == ()


def test_a_shard_of_noised_and_permuted_coordinates(tiny_model: LoadModel) -> None:
    model = tiny_model("llama", 2)
    channel = Channel.parse(["gaussian:sigma=0.1", "shard:alpha=2,c=2", "hidden-perm"])
    observation, _ = channel.release(model, TOKENS, seeded())
    assert observation.info.positions == (0, 1, 4, 5, 8, 9)
    assert observation.info.columns_permuted == "per-row"
    assert channel.whole().specs == ("gaussian:sigma=0.1", "hidden-perm")


def test_gap_shows_what_is_around_it(tiny_model: LoadModel) -> None:
    observation, _ = Channel.parse(["drop-rows:size=2,after=3"]).release(
        tiny_model("llama", 1), TOKENS, seeded()
    )
    assert observation.info.positions == (0, 1, 2, 5)
    with pytest.raises(InputError, match="at least 13 tokens; one has 12"):
        Channel.parse(["drop-rows:size=2,after=10"]).release(tiny_model("llama", 1), TOKENS, seeded())


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        (["shard:alpha=2,node=2"], "there is no CompNode 2: alpha 2 gives 0 to 1"),
        (["shard:alpha=2,queries=0"], "give both, or neither"),
        (["shard:alpha=2,m=2,queries=0,keys=4"], r"no AttnNode \(0, 4\)"),
        (["shard:alpha=0"], "alpha must be at least 1"),
        (["drop-rows:size=0"], "size of at least 1"),
        (["seq-perm", "shard:alpha=2"], "neither permuted rows nor another choice of rows"),
        (["shard:alpha=2", "drop-rows:size=1"], "neither permuted rows nor another choice of rows"),
    ],
)
def test_what_does_not_exist_or_fit(specs: list[str], message: str) -> None:
    with pytest.raises(HiddenlabError, match=message):
        Channel.parse(specs)


@pytest.mark.usefixtures("small_probes")
def test_matching_a_shard_says_where_its_tokens_stand(tiny_model: LoadModel) -> None:
    model = tiny_model("llama", 1)
    channel = Channel.parse(["shard:alpha=3,c=2"])
    found = [channel.release(model, TOKENS[:n], seeded()) for n in (12, 11)]
    recoveries = VocabMatch().fit((shown := [o for o, _ in found])[0].info, model).recover_batch(shown)
    for (observation, secret), recovery in zip(found, recoveries, strict=True):
        assert recovery.positions == observation.info.positions == (0, 1, 6, 7)
        assert recovery.ids[:2] == TOKENS[:2]
        assert recovery.stop_reason == "gap before position 6"
        sample = sample_of(model, Case(0, "p", secret), secret, recovery, None)
        right = sum(TOKENS[p] == t for p, t in zip((0, 1, 6, 7), recovery.ids, strict=True))
        assert sample["token_accuracy"] == right / len(secret.tokens)
        # Verified is of the same tokens as right: those that were not recovered are neither.
        assert sample["verified"] == sum(t.verified for t in recovery.tokens) / len(secret.tokens)
        assert not sample["exact"]
        assert "missing_tokens" not in sample
        seen = sample_of(model, Case(0, "p", secret), secret, recovery, None, recovery.positions)
        assert (seen["missing_tokens"], seen["missing_tokens_right"]) == (4, 0)  # positions 2 to 5
        assert (seen["held_tokens"], seen["held_tokens_right"]) == (4, right)
        assert summarise([seen])["held_token_accuracy"] == right / 4
        assert summarise([seen])["missing_token_accuracy"] == 0.0
        assert summarise([sample])["missing_token_accuracy"] is None
        assert summarise([sample, {**seen, "missing_tokens_right": 2}])["missing_token_accuracy"] == 0.5
        behind = len(secret.tokens) - 8
        assert [text for text, kind in sample["spans"] if kind == "missing"] == ["⟨4⟩", f"⟨{behind}⟩"]


def test_a_truth_of_the_nodes_own_tokens_is_compared_as_it_stands(tiny_model: LoadModel) -> None:
    """``cascade run --record`` keeps no more of the truth than the node's own tokens."""
    tokens = tuple(TokenPrediction(t, i, 0.0, None, 1, True) for i, t in enumerate((5, 6)))
    recovery = AttackResult(tokens, 2, 1, 0.1, "complete", positions=(3, 9), text="5 6")
    secret = GroundTruth((5, 6))
    sample = sample_of(tiny_model("llama", 1), Case(0, "p", secret), secret, recovery, None)
    assert sample["exact"] and sample["token_accuracy"] == 1


# ---- layer 0


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt2", "phi3"])
def test_layer_0_is_what_enters_the_first_layer(tiny_model: LoadModel, architecture: str) -> None:
    model = tiny_model(architecture, 0, "embed")
    states = model.encode(torch.tensor(TOKENS))
    expected = model.embed(torch.tensor(TOKENS))
    if architecture == "gpt2":
        expected = expected + model.module.wpe(torch.arange(len(TOKENS)))
    assert torch.allclose(states, expected, atol=1e-6)
    assert str(model.site) == "embed at layer 0"


@pytest.mark.parametrize("channel", ["identity", "seq-perm", "hidden-perm", "2d-perm"])
def test_layer_0_is_open_to_matching(tiny_model: LoadModel, channel: str) -> None:
    model = tiny_model("gpt2", 0, "embed")
    prompt = torch.randint(0, VOCABULARY, (9,), generator=seeded()).tolist()
    observation, _ = Channel.parse([channel]).release(model, prompt, seeded())
    found = VocabMatch(proposal="vocab").fit(observation.info, model).recover(observation)
    assert found.ids == prompt


def test_layers_of_embeddings_and_states_do_not_mix(tiny_model: LoadModel) -> None:
    with pytest.raises(InputError, match="embed exists only at layer 0"):
        tiny_model("llama", 2, "embed")
    with pytest.raises(InputError, match="layer 0 is --stream embed"):
        tiny_model("llama", 0)
