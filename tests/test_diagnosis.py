"""Faults that files of hidden states have are planted and named; what is named is the option that is right."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel

import hiddenlab as hl
from hiddenlab.diagnosis import Diagnosis, diagnose
from hiddenlab.errors import NotApplicableError
from hiddenlab.eval.measures.diagnosis import FAULTS, TINY, planted
from hiddenlab.models import TruncatedModel
from hiddenlab.testing import LAYERS, VOCABULARY
from hiddenlab.types import Observation, Site
from tests.marks import slow_cases

LoadModel = Callable[..., TruncatedModel]
TOKENS = torch.randint(0, VOCABULARY, (12,), generator=torch.Generator().manual_seed(5))
QUICK = (
    "none",
    "left padding",
    "heads before tokens",
    "fine-tuned",
    "two prompts in one",
    "first row (BOS) missing",
)
# States of a random model say too little of their tokens: without the first row they are not told from another model's.
UNTOLD = ("first row missing",)


def observed(states: torch.Tensor, model: TruncatedModel, **facts: Any) -> Observation:
    return Observation.from_states(states, model, **facts)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [*QUICK, *slow_cases(*(f for f in FAULTS if f not in (*QUICK, *UNTOLD)))])
def test_a_fault_is_named(fault: str, tmp_path: Path) -> None:
    spec = {"model": TINY, "layer": 2, "fault": fault, "prompt": 0, "seed": 0}
    figures = planted(spec, tmp_path)
    assert figures["named"]["value"] == 1
    assert figures["wrong"]["value"] == 0


@pytest.mark.slow
def test_another_layer(tiny_model: LoadModel) -> None:
    """The site that is named is the one that attacks read."""
    model, other = tiny_model("llama", 2), tiny_model("llama", 4)
    told = diagnose(observed(other.encode(TOKENS), model), model)
    assert (told.fault, told.site, told.exact) == ("place", Site(4), True)
    assert "--layer 4" in told.sentence
    right = replace(observed(other.encode(TOKENS), model).info, site=Site(4))
    result = hl.attack(Observation(other.encode(TOKENS), right), other, proposal="vocab")
    assert result.ids == TOKENS.tolist()


def test_rows_that_are_right_need_the_first_layers_only(
    tiny_model: LoadModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama", 2)
    monkeypatch.setattr(model, "sibling", lambda *_, **__: pytest.fail("loaded the whole model"))
    told = diagnose(observed(model.encode(TOKENS), model), model)
    assert told == Diagnosis(None, told.sentence, Site(2), (0,), True)
    assert "the first 4 rows fit" in told.sentence


def test_one_row(tiny_model: LoadModel) -> None:
    model = tiny_model("llama", 2)
    told = diagnose(observed(model.encode(TOKENS[:1]), model), model)
    assert told.fault is None and "the first row fits" in told.sentence


@pytest.mark.slow
def test_a_first_row_within_rounding_is_enough(tiny_model: LoadModel) -> None:
    """No token gives the rows behind it, as where a quick look does not find the right one among many tokens."""
    model = tiny_model("llama", 2)
    states = model.encode(TOKENS).clone()
    noise = torch.randn(states.shape, generator=torch.Generator().manual_seed(0)) * states.std()
    states[1:] += noise[1:]
    told = diagnose(observed(states, model), model)
    assert (told.fault, told.site, told.exact) == (None, Site(2), True)
    assert "the first row fits" in told.sentence
    assert not diagnose(observed(states + 0.1 * noise, model), model).exact


def test_keys_and_values(tiny_model: LoadModel) -> None:
    keys, values = (tiny_model("llama", 3, stream) for stream in ("k", "v"))
    assert diagnose(observed(keys.encode(TOKENS), keys), keys).fault is None
    told = diagnose(observed(keys.encode(TOKENS), values), values)
    assert told.site == Site(3, "k") and "use --stream k" in told.sentence


@pytest.mark.slow
def test_final_norm_of_a_truncated_model_is_not_that_of_the_whole_one(tiny_model: LoadModel) -> None:
    """The first layers alone end in the final norm too, of a state that never reaches it in the whole model."""
    model, last = tiny_model("llama", LAYERS), tiny_model("llama", LAYERS, "final_norm")
    told = diagnose(observed(last.encode(TOKENS), model), model)
    assert told.site == Site(LAYERS, "final_norm")


def test_another_width(tiny_model: LoadModel) -> None:
    model = tiny_model("llama", 2)
    states = torch.randn(5, model.width + 3, generator=torch.Generator().manual_seed(0))
    told = diagnose(observed(states, model), model)
    assert told.fault == "width"


@pytest.mark.slow
def test_noise_resembles_nothing(tiny_model: LoadModel) -> None:
    """Numbers that are no states of the model are not called states."""
    model = tiny_model("llama", 2)
    told = diagnose(
        observed(100 * torch.randn(9, model.width, generator=torch.Generator().manual_seed(0)), model), model
    )
    assert told.fault == "unlike" and not told.exact and not told.certain


@pytest.mark.parametrize(
    "facts",
    [{"rows_permuted": True}, {"columns_permuted": "shared"}, {"noise_sigma": 0.1}, {"prefix_tokens": 3}],
)
def test_rows_behind_a_defense_are_not_looked_at(tiny_model: LoadModel, facts: dict[str, Any]) -> None:
    model = tiny_model("llama", 2)
    with pytest.raises(NotApplicableError, match="passed a defense"):
        diagnose(observed(model.encode(TOKENS), model, **facts), model)


@pytest.mark.parametrize("architecture", ["gpt2", "gemma2", "mistral"])
def test_other_architectures(tiny_model: LoadModel, architecture: str) -> None:
    """Names of modules differ; nothing in the look depends on them."""
    model, other = tiny_model(architecture, 2), tiny_model(architecture, 1)
    assert diagnose(observed(model.encode(TOKENS), model), model).fault is None
    told = diagnose(observed(other.encode(TOKENS), model), model)
    assert told.site == Site(1)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_dtype_is_named_whatever_attention_the_provider_takes(
    tiny: Callable[..., str], tiny_model: LoadModel, dtype: str, attention: str
) -> None:
    provider = AutoModel.from_pretrained(
        tiny("llama"), dtype=getattr(torch, dtype), attn_implementation=attention
    )
    with torch.inference_mode():
        states = (
            provider(input_ids=TOKENS[None], output_hidden_states=True).hidden_states[2][0].float().clone()
        )
    model = tiny_model("llama", 2)
    told = diagnose(observed(states, model), model)
    assert told.fault == "numbers" and f"--defense dtype:{dtype}" in told.sentence


@pytest.mark.slow
def test_other_weights_are_named_in_half_precision_too(
    tiny: Callable[..., str], tiny_model: LoadModel
) -> None:
    provider = AutoModel.from_pretrained(tiny("llama"), dtype=torch.float32)
    drawn = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in provider.layers.parameters():
            weight.add_(
                0.05 * weight.std() * torch.randn(weight.shape, generator=drawn)
            ) if weight.ndim == 2 else None
    provider = provider.to(torch.bfloat16)
    with torch.inference_mode():
        states = (
            provider(input_ids=TOKENS[None], output_hidden_states=True).hidden_states[2][0].float().clone()
        )
    model = tiny_model("llama", 2)
    told = diagnose(observed(states, model), model)
    assert told.fault == "weights", told.sentence
