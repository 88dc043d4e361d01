"""Make models of full size with random weights, on which a card takes as long as on real ones.

Only time and memory are meaningful. Residual branches are kept small relative to the embeddings, as in trained models,
so that a probe can read tokens from states; its accuracy is part of each row.
"""

import zlib
from dataclasses import dataclass
from typing import Any

import torch

from hiddenlab.models import TruncatedModel
from hiddenlab.models.attention import register_attention
from hiddenlab.models.engine import _ACTIVE, ATTENTION_NAME
from hiddenlab.models.load import ModelRef, parse_dtype
from hiddenlab.types import Site

BRANCH = 0.25  # root mean square of what attention, or the MLP, adds to a residual stream of about 1


@dataclass(frozen=True)
class Shape:
    """The sizes of a published model.

    Attributes:
        name: of the model.
        type: transformers' model type.
        layers: of the whole model.
        paper_seconds: the published attack time (Hidden No More, Table 8), where the paper has this model.
        config: sizes as transformers names them.
    """

    name: str
    type: str
    layers: int
    paper_seconds: str | None
    config: dict[str, Any]


SHAPES = {
    "1b": Shape(
        "Llama-3.2-1B", "llama", 16, "49",
        {
            "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8,
            "head_dim": 64, "vocab_size": 128256, "max_position_embeddings": 4096,
        },
    ),
    "8b": Shape(
        "Llama-3.1-8B", "llama", 32, "69",
        {
            "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
            "vocab_size": 128256, "max_position_embeddings": 4096,
        },
    ),
    "27b": Shape(
        "Gemma-2-27B", "gemma2", 46, "124 to 304",
        {
            "hidden_size": 4608, "intermediate_size": 36864, "num_attention_heads": 32, "num_key_value_heads": 16,
            "head_dim": 128, "query_pre_attn_scalar": 144, "vocab_size": 256000, "max_position_embeddings": 4096,
        },
    ),
    # For rehearsals.
    "tiny": Shape(
        "tiny", "llama", 8, None,
        {
            "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
            "vocab_size": 512, "max_position_embeddings": 512,
        },
    ),
    "tiny-gemma": Shape(
        "tiny-gemma", "gemma2", 8, None,
        {
            "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
            "head_dim": 16, "query_pre_attn_scalar": 16, "vocab_size": 512, "max_position_embeddings": 512,
        },
    ),
}  # fmt: skip


def draw_model(name: str, layers: int, *, dtype: torch.dtype, device: torch.device, attention: str) -> Any:
    """Make a model of a shape's first layers, with weights drawn on the device.

    Every parameter has a seed of its own, so that a layer has the same weights however many there are.

    Args:
        attention: transformers' name of an attention function.
    """
    from transformers import AutoConfig, AutoModel

    shape = SHAPES[name]
    config = AutoConfig.for_model(shape.type, **shape.config, num_hidden_layers=layers, pad_token_id=None)
    with torch.device(device):
        model = AutoModel.from_config(config, dtype=dtype, attn_implementation=attention)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            _draw(key, parameter, shape)
    return model.eval().requires_grad_(False)


def _draw(key: str, parameter: torch.Tensor, shape: Shape) -> None:
    generator = torch.Generator(parameter.device).manual_seed(zlib.crc32(key.encode()))
    gemma = shape.type == "gemma2"
    if parameter.ndim == 1:
        # Gemma's norms store their weight minus one, and some normalize what a branch adds.
        post = gemma and ("post_attention" in key or "post_feedforward" in key)
        parameter.fill_(BRANCH - 1 if post else 0.0 if gemma else 1.0)
        return
    scale = parameter.shape[1] ** -0.5
    if "embed_tokens" in key:
        # Gemma multiplies embeddings by the square root of their width.
        scale = parameter.shape[1] ** -0.5 if gemma else 1.0
    elif not gemma and key.endswith(("o_proj.weight", "down_proj.weight")):
        scale *= BRANCH
    parameter.normal_(0, scale, generator=generator)


def draw_truncated(
    name: str, layers: int, *, dtype: str = "bfloat16", device: str = "cuda"
) -> TruncatedModel:
    """Make the truncated model of a shape's first layers with random weights; siblings are drawn in the same way."""
    attention = register_attention(
        ATTENTION_NAME,
        _ACTIVE,
        "a hiddenlab truncated model is run through TruncatedModel.run, not by itself",
    )
    model = draw_model(
        name, layers, dtype=parse_dtype(dtype), device=torch.device(device), attention=attention
    )

    def sibling(layer: int | None = None, *, dtype: str = dtype, **_: Any) -> TruncatedModel:
        return draw_truncated(
            name, SHAPES[name].layers if layer is None else layer, dtype=dtype, device=device
        )

    return TruncatedModel(model, ref=ModelRef(f"shape {name}", ""), site=Site(layers), load_sibling=sibling)


def branch_flops(model: TruncatedModel, candidates: int, prefix: int) -> float:
    """Return the floating-point operations of candidates after a shared prefix.

    Products with weights and attention are counted.
    """
    config: Any = model.module.config
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention = 2 * 2 * config.num_attention_heads * head * (prefix + 1) * model.site.layer
    return float(candidates * (2 * model.layer_weights + attention))


def weights_mb(model: Any) -> float:
    """Return the memory of a model's weights in MB (10⁶ bytes)."""
    return sum(p.nbytes for p in model.parameters()) / 1e6
