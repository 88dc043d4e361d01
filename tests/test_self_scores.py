"""Scores of rows with themselves name tokens at the first layer, whatever the secret coordinates are."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hiddenlab.attacks.self_scores import SelfScores
from hiddenlab.channels import Channel
from hiddenlab.defenses.cascade.secret_maps import LayerMaps, Secret, SecretMaps
from hiddenlab.errors import NotApplicableError
from hiddenlab.models import TruncatedModel
from hiddenlab.types import Observation

LoadModel = Callable[..., TruncatedModel]
PROMPT = [5, 80, 7, 291, 33, 12, 33, 250, 9]


def released(model: TruncatedModel) -> Observation:
    channel = Channel.parse(["shard:alpha=2,c=2,m=1,queries=0,keys=0"])
    return channel.release(model, PROMPT, torch.Generator().manual_seed(1))[0]


def hidden(observation: Observation, heads: int, kv: int, seed: int) -> Observation:
    """The same rows as an AttnNode gets them behind secret maps."""
    d = observation.states.shape[1] // (heads + 2 * kv)
    parts = observation.states.split([heads * d, kv * d, kv * d], 1)
    q, k, v = (part.unflatten(1, (-1, d)).transpose(0, 1) for part in parts)
    maps = SecretMaps(Secret(4.0, bytes([seed]) * 32)).of("request", 0, k, v)
    mapped = LayerMaps([maps], [len(observation.states)]).hidden(q, k, v)
    states = torch.cat([part.transpose(0, 1).flatten(1) for part in mapped], 1)
    return Observation(states, observation.info)


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "qwen3", "phi3"])
def test_at_the_first_layer_every_row_is_named(tiny_model: LoadModel, architecture: str) -> None:
    model = tiny_model(architecture, 1, "qkv")
    config = model.module.config
    heads, kv = config.num_attention_heads, config.num_key_value_heads  # type: ignore[union-attr]
    bare = released(model)
    attack = SelfScores().fit(bare.info, model)
    own = [PROMPT[p] for p in bare.info.positions or ()]
    for observation in (bare, *(hidden(bare, int(heads), int(kv), seed) for seed in (1, 2))):  # type: ignore[arg-type]
        found = attack.recover(observation)
        assert [one.token for one in found.tokens] == own
        assert found.positions == bare.info.positions and not any(one.verified for one in found.tokens)
    assert not torch.allclose(bare.states, hidden(bare, int(heads), int(kv), 1).states, atol=0.1)  # type: ignore[arg-type]


def test_deeper_layers_are_read_by_a_regression(tiny_model: LoadModel) -> None:
    model = tiny_model("llama", 2, "qkv")
    bare = released(model)
    attack = SelfScores(rows=960).fit(bare.info, model)
    found = attack.recover(bare)
    assert len(found.tokens) == len(bare.states) and float(attack.measured["preparation_seconds"]) > 0
    scores: Tensor = attack._scores(bare.states)
    again = attack._scores(hidden(bare, 4, 2, 3).states)
    assert torch.allclose(scores, again, rtol=1e-3, atol=1e-4)  # so it reads the same behind any maps


def test_a_table_serves_only_where_scores_depend_on_the_token_alone(tiny_model: LoadModel) -> None:
    for architecture, alone in (("llama", True), ("gpt_neox", True), ("gpt2", False)):
        model = tiny_model(architecture, 1, "qkv")
        attack = SelfScores(rows=96).fit(released(model).info, model)
        assert attack._token_alone == alone and ("_reader" in vars(attack)) != alone


def test_other_rows_are_not_applicable(tiny_model: LoadModel) -> None:
    model = tiny_model("llama", 1, "v")
    observation = Channel.parse([]).release(model, PROMPT, torch.Generator().manual_seed(1))[0]
    with pytest.raises(NotApplicableError, match="--stream qkv"):
        SelfScores().fit(observation.info, model)
