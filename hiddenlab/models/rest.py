"""Load the layers behind a truncated model's, which continue its states to predictions of the next token."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from hiddenlab.errors import InputError
from hiddenlab.models import ModelRef, TruncatedModel
from hiddenlab.models.attention import EAGER
from hiddenlab.models.checkpoint import LeftOut, decoder_layers
from hiddenlab.models.choice import CODE, Verdict, facts_of, remembered
from hiddenlab.models.load import load_config, load_module, parse_dtype
from hiddenlab.models.reading import reading_model
from hiddenlab.models.self_check import TWIN_TOLERANCE, first_of, random_sequences
from hiddenlab.models.twin import LENGTHS, UNCHECKED, build_twin
from hiddenlab.types import Site

PART = 32  # rows whose tokens' weights are gathered at once


@dataclass(frozen=True)
class Rest:
    """The last layers of a language model and its head.

    Attributes:
        layers: gives states after the final norm, from states at the site of a truncated model. head: from these to
            scores of the next token.
    """

    layers: TruncatedModel
    head: nn.Module

    @torch.inference_mode()
    def log_probs(self, states: Float[Tensor, "n d"]) -> Float[Tensor, "n v"]:
        """Return log-probabilities of the token after each row, from states that ``layers`` gave.

        Scales and caps that a model puts on its scores are left out.
        """
        return self.head(states).float().log_softmax(-1)  # type: ignore[no-any-return]

    @torch.inference_mode()
    def scores(self, states: Float[Tensor, "n d"], tokens: Int[Tensor, "n k"]) -> Float[Tensor, "n k"]:
        """Return ``log_probs`` of some tokens after each row, up to a constant of the row.

        A plain head is applied to these tokens alone.
        """
        if not isinstance(self.head, nn.Linear):
            return self.log_probs(states).gather(1, tokens.to(states.device))
        parts = []
        for rows, ids in zip(states.split(PART), tokens.to(states.device).split(PART), strict=True):
            scores = (self.head.weight[ids] @ rows[:, :, None])[..., 0].float()
            parts.append(scores if self.head.bias is None else scores + self.head.bias[ids].float())
        return torch.cat(parts)


def load_rest(model: TruncatedModel, dtype: str) -> Rest | None:
    """Load what is behind a truncated model; None where its states cannot be continued.

    Whether they can is checked on a small random copy, once for each configuration.

    Args:
        dtype: in which the rest computes.
    """
    if not model.on_disk or not continues(model, config := load_config(model.ref)):
        return None
    try:
        whole: Any = load_module(
            model.ref, config, head=True, dtype=parse_dtype(dtype), device=model.device, attention=EAGER,
            left_out=model.site.layer, device_map="auto" if model.divided else None,
        )  # fmt: skip
    except InputError:  # no language model of this kind, or no head in the checkpoint
        return None
    head = whole.get_output_embeddings()
    if head is None or whole.base_model is whole:
        return None
    total, base = int(config.num_hidden_layers), whole.base_model
    if str(model.dtype) == f"torch.{dtype}" and not model.divided:  # one embedding table in memory
        own = model.module.get_input_embeddings()  # type: ignore[operator]
        if getattr(head, "weight", None) is base.get_input_embeddings().weight:
            head.weight = own.weight
        base.set_input_embeddings(own)
    layers = TruncatedModel(
        base, ref=model.ref, site=Site(total, "final_norm"), engine=model.engine, left_out=model.site.layer
    )
    return Rest(layers, head)


def continues(model: TruncatedModel, config: Any) -> bool:
    """Return whether states of a truncated model can be given to the layers behind them."""
    whole = model.site.stream == "resid" and model.embeddings and model.quantization is None
    if not whole or not model.on_disk:
        return False
    verdict = remembered("rest-twin", {"config": facts_of(config)}, Verdict, lambda: _verdict(config), CODE)
    return not verdict.difference


def _verdict(config: Any) -> Verdict:
    """Compare the last layers of a small random copy, behind its own states, with the whole copy."""
    try:
        with reading_model(UNCHECKED):
            base: Any = build_twin(config, head=True).base_model
            total, ref = len(decoder_layers(base)), ModelRef("twin", "")
            whole = TruncatedModel(base, ref=ref, site=Site(total, "final_norm"), engine="plain")
            (tokens,) = random_sequences(whole, LENGTHS[:1])
            expected = whole.forward_plain(tokens[None])[0]
            first = TruncatedModel(base, ref=ref, site=Site(1), engine="plain")
            states = first.forward_plain(tokens[None])[0]
            decoder_layers(base)[0] = LeftOut(decoder_layers(base)[0])
            rest = TruncatedModel(base, ref=ref, site=whole.site, engine="plain", left_out=1)
            found = first_of(
                iter([("behind its states", rest.forward_plain(states[None])[0], expected)]), TWIN_TOLERANCE
            )
    except InputError as error:
        return Verdict(difference=str(error))
    return Verdict(difference=str(found or ""))
