"""Read a model's checkpoint into plain tensors, and write such tensors as a checkpoint."""

from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hiddenlab.defenses.protocols.decoder import Block, Linear, Norm, Rotary, Weights
from hiddenlab.defenses.protocols.forward import Plain, walk
from hiddenlab.errors import InputError
from hiddenlab.models.load import load_config, load_module, load_tokenizer, resolve_model
from hiddenlab.models.reading import quiet_transformers

CHECK_TOKENS, CHECK_TOLERANCE = 12, 1e-2

# Where each family keeps what; [i/n] is the i-th of n equal parts of a fused projection.
FAMILIES: dict[str, dict[str, str]] = {
    "Llama": {
        "embedding": "model.embed_tokens", "layers": "model.layers", "final": "model.norm",
        "rotary": "model.rotary_emb", "norm1": "input_layernorm", "norm2": "post_attention_layernorm",
        "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj",
        "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
    },
    "GPT-2": {
        "embedding": "transformer.wte", "positions": "transformer.wpe", "layers": "transformer.h",
        "final": "transformer.ln_f", "norm1": "ln_1", "norm2": "ln_2", "q": "attn.c_attn[0/3]",
        "k": "attn.c_attn[1/3]", "v": "attn.c_attn[2/3]", "o": "attn.c_proj", "up": "mlp.c_fc", "down": "mlp.c_proj",
    },
}  # fmt: skip


def load_weights(name: str) -> tuple[Weights, Any]:
    """Load a model's weights in float32, and its tokenizer or None.

    The result is run beside the model itself on a dozen tokens. An architecture with further parts is refused, whatever
    its name, if its logits differ there.

    Raises:
        InputError: there is no such model, or it is not of Llama or GPT-2 type.
    """
    ref = resolve_model(name)
    config = load_config(ref)
    model = load_module(
        ref, config, head=True, dtype=torch.float32, device=torch.device("cpu"), attention="eager"
    )
    weights = read_weights(model)
    return weights, load_tokenizer(ref)


@torch.inference_mode()
def write_checkpoint(weights: Weights, name: str, folder: Path) -> None:
    """Write weights as a transformers checkpoint, without a tokenizer.

    A missing embedding is written as zeros.

    Args:
        weights: what to write.
        name: a model with weights of the same shapes.
        folder: of the new checkpoint.

    Raises:
        InputError: there is no such model, or shapes differ.
    """
    ref = resolve_model(name)
    model: Any = load_module(
        ref, load_config(ref), head=True, dtype=torch.float32, device=torch.device("cpu"), attention="eager"
    )
    names = _family(model)
    table = torch.zeros_like(weights.head.weight) if weights.embedding is None else weights.embedding
    model.config.tie_word_embeddings = False
    model.lm_head.weight = nn.Parameter(torch.empty_like(model.lm_head.weight), requires_grad=False)
    try:
        _put(model, names["embedding"], table, None)
        _put(model, "lm_head", weights.head.weight, weights.head.bias)
        _put(model, names["final"], weights.final.weight, weights.final.bias)
        if weights.positions is not None:
            _put(model, names["positions"], weights.positions, None)
        layers: Any = _find(model, names["layers"])
        for layer, block in zip(layers, weights.blocks, strict=True):
            for part, value in vars(block).items():
                if value is not None:
                    _put(layer, names[part], value.weight, value.bias)
    except (RuntimeError, ValueError) as error:
        raise InputError(f"{name} has weights of other shapes ({error})") from None
    with quiet_transformers():
        model.save_pretrained(folder)


@torch.inference_mode()
def read_weights(model: nn.Module) -> Weights:
    """Read the parts of a transformers model as plain tensors (see ``load_weights``)."""
    config: Any = model.config
    kind = _refusal(config)
    family = _family(model)
    if len(set(getattr(config, "layer_types", None) or ["one"])) > 1:
        raise InputError(f"{kind}: its layers differ in how far attention reaches")
    try:
        weights = _read(model, family, config)
        tokens = torch.arange(CHECK_TOKENS) * 7 % len(weights.head.weight)
        own = walk(weights, weights.inputs(tokens.tolist()), Plain())[0]
        wanted = model(tokens[None]).logits[0]
    except (AttributeError, RuntimeError, KeyError, TypeError) as error:
        raise InputError(f"{kind} ({error})") from None
    if float((own - wanted).abs().max()) > CHECK_TOLERANCE * max(1.0, float(wanted.abs().max())):
        raise InputError(kind)
    return weights


def _refusal(config: Any) -> str:
    return f"{config.model_type} is not of Llama or GPT-2 type, which the schemes are written for"


def _family(model: Any) -> dict[str, str]:
    family = next((names for names in FAMILIES.values() if _find(model, names["layers"]) is not None), None)
    if family is None:
        raise InputError(_refusal(model.config))
    return family


def _read(model: nn.Module, names: dict[str, str], config: Any) -> Weights:
    rotary: Any = _find(model, names["rotary"]) if "rotary" in names else None
    positions: Any = _find(model, names["positions"]) if "positions" in names else None
    embedding: Any = _find(model, names["embedding"])
    layers: Any = _find(model, names["layers"])
    blocks = tuple(_block(layer, names) for layer in layers)
    return Weights(
        embedding=embedding.weight.detach(),
        positions=None if positions is None else positions.weight.detach(),
        rotary=None if rotary is None else Rotary(rotary.inv_freq.float(), float(rotary.attention_scaling)),
        blocks=blocks,
        final=_norm(_find(model, names["final"])),
        head=_linear(model, "lm_head"),
        heads=config.num_attention_heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        activation=getattr(config, "hidden_act", None) or config.activation_function,
        limit=int(config.max_position_embeddings),
        window=_window(config),
    )


def _window(config: Any) -> int | None:
    """Return how many tokens back attention reaches; some configurations name a window that no layer uses."""
    kinds = getattr(config, "layer_types", None)
    return getattr(config, "sliding_window", None) if not kinds or kinds[0] == "sliding_attention" else None


def _block(layer: nn.Module, names: dict[str, str]) -> Block:
    norm1, norm2 = (_norm(_find(layer, names[part])) for part in ("norm1", "norm2"))
    q, k, v, o, up, down = (_linear(layer, names[part]) for part in ("q", "k", "v", "o", "up", "down"))
    gate = _linear(layer, names["gate"]) if "gate" in names else None
    return Block(norm1, q, k, v, o, norm2, up, gate, down)


def _find(module: nn.Module, path: str) -> nn.Module | None:
    try:
        return reduce(getattr, path.split("."), module)
    except AttributeError:
        return None


def _linear(module: nn.Module, path: str) -> Linear:
    weight, bias = _view(module, path)
    return Linear(weight.contiguous(), bias)


def _view(module: nn.Module, path: str) -> tuple[Tensor, Tensor | None]:
    """Return weight and bias of a part of a model, in place; the weight of a linear layer is ``out in``."""
    path, _, part = path.partition("[")
    layer: Any = _find(module, path)
    weight, bias = layer.weight.detach(), getattr(layer, "bias", None)
    bias = None if bias is None else bias.detach()
    if type(layer).__name__ == "Conv1D":  # transformers' own, which keeps the transpose
        weight = weight.T
    if part:
        i, n = (int(number) for number in part.rstrip("]").split("/"))
        weight = weight.chunk(n)[i]
        bias = None if bias is None else bias.chunk(n)[i]
    return weight, bias


def _put(module: nn.Module, path: str, weight: Tensor, bias: Tensor | None) -> None:
    own, shift = _view(module, path)
    if own.shape != weight.shape or (shift is None) != (bias is None):
        raise ValueError(f"{path} is {tuple(own.shape)}, not {tuple(weight.shape)}")
    own.copy_(weight)
    if shift is not None and bias is not None:
        shift.copy_(bias)


def _norm(module: Any) -> Norm:
    bias = getattr(module, "bias", None)
    eps = getattr(module, "variance_epsilon", None) or module.eps
    centred = isinstance(module, nn.LayerNorm)
    return Norm(module.weight.detach(), None if bias is None else bias.detach(), float(eps), centred)
