"""Define the infiller: a language model, LoRA-tuned to predict the tokens that a node does not hold.

Attention goes in both directions and unknown tokens are a learned vector. At deeper layers the input of a known
position is the token that a probe reads there plus a learned linear map of its state. The map starts at zero, so that
training adds what the states tell beyond their own tokens.
"""

import warnings
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from hiddenlab.attacks.infill.backbone import Backbone, Decoder, MaskedLM
from hiddenlab.models import TruncatedModel
from hiddenlab.models.quantized import quiet_bitsandbytes


class Infiller(nn.Module):
    """Logits for every position of a text, of which only some tokens (and states) are known.

    Args:
        model: determines the model that is tuned, and the states' site. rank: of LoRA. dtype: of the frozen weights.
        masked: a masked language model to tune in place of the model's own.

    Raises:
        InputError: no such masked language model.
    """

    def __init__(
        self, model: TruncatedModel, rank: int, dtype: torch.dtype, masked: str | None = None
    ) -> None:
        with quiet_bitsandbytes():
            from peft import LoraConfig, get_peft_model

        super().__init__()
        # In a list, so that the weights are registered only once, under the adapter's names.
        self._backbone: list[Backbone] = [
            Decoder(model, dtype) if masked is None else MaskedLM(masked, model, dtype)
        ]
        config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", lora_dropout=0.0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of names that the libraries are about to change, and of Conv1D
            self.model: Any = get_peft_model(self._backbone[0].model, config)  # type: ignore[arg-type]
        self.mask = nn.Parameter(self._backbone[0].mask)
        self.reads_states = model.site.stream != "embed"
        self.mean: Tensor
        self.scale: Tensor
        if self.reads_states:
            self.states = nn.Linear(model.width, len(self.mask))
            nn.init.zeros_(self.states.weight)
            nn.init.zeros_(self.states.bias)
            self.register_buffer("mean", torch.zeros(model.width))
            self.register_buffer("scale", torch.ones(model.width))
        self.to(model.device)

    def standardise(self, states: Float[Tensor, "rows d"]) -> None:
        """Fit mean and scale of the input states."""
        self.mean.copy_(states.mean(0))
        self.scale.copy_(states.std(0) + 1e-6)

    def trained(self) -> dict[str, Tensor]:
        """Return the trained tensors by name, and the mean and scale of states."""
        tensors = {name: p.data for name, p in self.named_parameters() if p.requires_grad}
        return tensors | {name: b for name, b in self.named_buffers() if name in ("mean", "scale")}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Restore what ``trained`` returned.

        Raises:
            KeyError, RuntimeError: it is of another model or other settings.
        """
        own = dict(self.named_parameters()) | dict(self.named_buffers())
        for name in self.trained():
            own[name].data.copy_(tensors[name])

    def forward(
        self,
        tokens: Int[Tensor, "b n"],
        known: Bool[Tensor, "b n"],
        states: Float[Tensor, "b n d"] | None,
        wanted: Bool[Tensor, "b n"],
    ) -> Float[Tensor, "w v"]:
        """Return logits ``[w, v]`` at the wanted positions.

        Args:
            tokens: known tokens; other positions are ignored. states: at the known positions, or None.
        """
        (backbone,) = self._backbone
        inputs = backbone.embed(torch.where(known, tokens, 0))
        if self.reads_states and states is not None:
            inputs = inputs + self.states(((states - self.mean) / self.scale).clamp(-6, 6))
        return backbone.logits(torch.where(known[..., None], inputs, self.mask), wanted)
