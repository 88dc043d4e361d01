"""The infiller: a decoder made bidirectional, LoRA-tuned to name the tokens that a node does not hold.

The token at position i is predicted at position i − 1, as the decoder always did; what changes is that attention sees
both sides and that unknown tokens are a learned vector. So training starts from the language model's own knowledge of
what comes next. At deeper layers the input of a known position is the token that a probe reads there plus a learned
linear map of its state, which starts at zero: what the states say beyond their own tokens is learned on top.
"""

import warnings
from contextvars import ContextVar
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from hiddenlab.channel import quiet_bitsandbytes
from hiddenlab.slice import Slice
from hiddenlab.slice.door import Attention, open_door
from hiddenlab.slice.load import load_config, load_model

DOOR = "hiddenlab-infill"
_ACTIVE: ContextVar["_BothSides | None"] = ContextVar("hiddenlab_infill", default=None)


class _BothSides:
    """Attention over all tokens of each text, in both directions."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, attention: Attention) -> Tensor:
        groups = q.shape[1] // k.shape[1]
        if groups > 1:
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        if attention.window is None and attention.softcap is None:
            return F.scaled_dot_product_attention(q, k, v, scale=attention.scaling).transpose(1, 2)
        scores = (q @ k.transpose(-1, -2)).float() * attention.scaling
        if attention.softcap is not None:
            scores = torch.tanh(scores / attention.softcap) * attention.softcap
        if attention.window is not None:
            place = torch.arange(q.shape[2], device=q.device)
            far = (place[:, None] - place[None]).abs() >= attention.window
            scores = scores.masked_fill(far, float("-inf"))
        return (scores.softmax(-1).to(v.dtype) @ v).transpose(1, 2)


class Infiller(nn.Module):
    """Logits for every position of a text, of which only some tokens (and states) are known.

    Args:
        slice: names the model that is tuned, and gives the states' site. rank: of LoRA. dtype: of the frozen weights.
    """

    def __init__(self, slice: Slice, rank: int, dtype: torch.dtype) -> None:
        with quiet_bitsandbytes():
            from peft import LoraConfig, get_peft_model

        super().__init__()
        model = load_model(
            slice.ref, load_config(slice.ref), head=True, dtype=dtype, device=slice.device,
            attention=open_door(DOOR, _ACTIVE, "an infiller is run through Infiller.forward"),
        )  # fmt: skip
        config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", lora_dropout=0.0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of names that the libraries are about to change, and of Conv1D
            self.model: Any = get_peft_model(model, config)  # type: ignore[arg-type]
        table = model.get_input_embeddings().weight  # type: ignore[operator]
        self.opening = int((slice.special_ids or [0])[0])
        width = table.shape[1]
        self.mask = nn.Parameter(table.float().mean(0))
        self.reads_states = slice.site.stream != "embed"
        self.mean: Tensor
        self.scale: Tensor
        if self.reads_states:
            self.states = nn.Linear(slice.width, width)
            nn.init.zeros_(self.states.weight)
            nn.init.zeros_(self.states.bias)
            self.register_buffer("mean", torch.zeros(slice.width))
            self.register_buffer("scale", torch.ones(slice.width))
        self.to(slice.device)

    def standardise(self, states: Float[Tensor, "rows d"]) -> None:
        """Fit mean and scale of the states that come in."""
        self.mean.copy_(states.mean(0))
        self.scale.copy_(states.std(0) + 1e-6)

    def trained(self) -> dict[str, Tensor]:
        """What training changes, by name, and what states are standardised with."""
        out = {name: p.data for name, p in self.named_parameters() if p.requires_grad}
        return out | {name: b for name, b in self.named_buffers() if name in ("mean", "scale")}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Put back what ``trained`` gave.

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
        """Logits at the wanted positions.

        Args:
            tokens: known tokens; what stands elsewhere is not looked at. states: at the known positions, or None.
        """
        base = self.model.get_base_model()
        embed = base.get_input_embeddings()
        opening = embed(torch.full_like(tokens[:, :1], self.opening))
        inputs = embed(torch.where(known, tokens, self.opening)).float()
        if self.reads_states and states is not None:
            inputs = inputs + self.states(((states - self.mean) / self.scale).clamp(-6, 6))
        inputs = torch.where(known[..., None], inputs, self.mask)
        inputs = torch.cat([opening, inputs.to(opening.dtype)], 1)
        token = _ACTIVE.set(_BothSides())
        try:
            hidden = base.base_model(inputs_embeds=inputs, use_cache=False).last_hidden_state
        finally:
            _ACTIVE.reset(token)
        return base.get_output_embeddings()(hidden[:, :-1][wanted]).float()  # type: ignore[no-any-return]
