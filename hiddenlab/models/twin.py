"""Build a small random model of the same kind, whose windows, chunks and position borders a short prompt crosses."""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hiddenlab.models.reading import quiet_transformers, reading_model

WIDTH, MLP, EXPERT_MLP, HEADS, KV_HEADS, HEAD_WIDTH, ROTARY_WIDTH, LOW_RANK = 64, 96, 32, 4, 2, 16, 8, 24
LAYERS, VOCABULARY, EXPERTS = 4, 128, 4
WINDOW, CHUNK, TRAINED_POSITIONS = 5, 8, 8
LENGTHS = (19, 6, 11)  # of its prompts: some cross every border, one crosses none
SCALE = 0.15  # of its random weights: large enough that attention and gates show in the states
SEED = 7

# What a size is reduced to, by the name of its field; the first pattern that fits counts.
SIZES: tuple[tuple[re.Pattern[str], int], ...] = tuple(
    (re.compile(rf"^(?:{pattern})$"), value)
    for pattern, value in (
        (r".*vocab_size.*", VOCABULARY),
        (
            r"hidden_size|d_model|n_embd|embed_dim|word_embed_proj_dim|lru_width|embedding_size|model_dim|dim",
            WIDTH,
        ),
        (r"num_hidden_layers|n_layers?|num_layers|(en|de)coder_layers", LAYERS),
        (r".*(num_key_value_heads|num_kv_heads|n_head_kv|kv_n_heads|multi_query_group_num)", KV_HEADS),
        (r"mamba_n_heads|mamba_num_heads|n_mamba_heads", 2 * HEADS),
        (r"mamba_d_head|mamba_head_dim|mamba_headdim", HEAD_WIDTH),
        (r"mamba_d_ssm", 2 * WIDTH),
        (r"mamba_n_groups|mamba_ngroups", 1),
        (r"(mamba_)?d_state|ssm_state_size|state_size", HEAD_WIDTH),
        (r".*(num_attention_heads|n_heads?|num_heads|(en|de)coder_attention_heads)", HEADS),
        (r"qk_rope_head_dim|rotary_dim", ROTARY_WIDTH),
        (r"qk_head_dim", HEAD_WIDTH + ROTARY_WIDTH),
        (r".*head_dim|d_kv|kv_channels|attention_head_size", HEAD_WIDTH),
        (r".*lora_rank", LOW_RANK),
        (r"(moe|shared|expert).*(intermediate|ffn).*size|moe_ffn_hidden_size", EXPERT_MLP),
        (r".*intermediate_size.*|n_inner|ffn_dim|(en|de)coder_ffn_dim|ffn_hidden_size|d_ff|d_inner", MLP),
        (r"num_experts|num_local_experts|n_routed_experts|moe_num_experts", EXPERTS),
        (r"num_experts_per_tok(en)?|moe_k|moe_top_?k|top_k_experts|num_selected_experts", 2),
        (r"n_group|topk_group|n_shared_experts|num_shared_experts|first_k_dense_replace|num_dense_layers", 1),
        (r"(?!max_window_layers).*(window|local_attention).*", WINDOW),
        (r".*chunk_size", CHUNK),
        (r"index_topk", TRAINED_POSITIONS),
        (r"original_max_position_embeddings", TRAINED_POSITIONS),
        (r"max_position_embeddings|n_positions|max_target_positions|max_seq_len|seq_length", 64),
    )
)
# Fields that do not describe what is computed, or are made by the configuration itself.
OWN_FACTS = frozenset(
    {
        "model_type",
        "architectures",
        "transformers_version",
        "dtype",
        "quantization_config",
        "id2label",
        "label2id",
    }
)
UNCHECKED = "windows and other borders cannot be checked, for lack of a small copy"


def _flat(values: Mapping[Any, Any]) -> list[tuple[str, Any]]:
    pairs = []
    for name, value in values.items():
        if isinstance(value, dict):
            pairs += _flat({str(inner): item for inner, item in value.items()})
        elif not isinstance(value, bool):
            pairs.append((name, value))
    return pairs


def small_config(config: Any) -> Any:
    """Return a configuration of the same class in which every size and every border is small.

    Lists with an entry for each layer keep one of every kind.
    """
    values = {name: value for name, value in config.to_dict().items() if name not in OWN_FACTS}
    layers = int(getattr(config, "num_hidden_layers", 0))
    small = _small(values, layers)
    dynamic = any(value == "dynamic" for _, value in _flat(values))
    if dynamic:  # this kind begins to change at the model's own longest prompt
        small["max_position_embeddings"] = TRAINED_POSITIONS
    if "head_dim" in values and values["head_dim"] is None:
        small["head_dim"] = HEAD_WIDTH
    if values.get("head_dim") is not None and values.get("head_dim") == values.get("qk_rope_head_dim"):
        small["head_dim"] = ROTARY_WIDTH  # latent attention rotates a part of each head only
    if kinds := values.get("layer_types"):
        own = {kinds[int(layer)]: entry for layer, entry in (values.get("per_layer_config") or {}).items()}
        if own:
            small["per_layer_config"] = {
                i: _small(own[kind], 0) for i, kind in enumerate(small["layer_types"]) if kind in own
            }
    if getattr(config, "num_attention_heads", 0) == getattr(config, "num_key_value_heads", None):
        small["num_key_value_heads"] = HEADS
    elif getattr(config, "num_key_value_heads", None) == 1:
        small["num_key_value_heads"] = 1
    return type(config)(**small)


def _small(values: Mapping[Any, Any], layers: int) -> dict[Any, Any]:
    small = dict[Any, Any]()
    for name, value in values.items():
        small[name] = value
        if isinstance(value, dict):
            small[name] = _small(value, layers)
        elif isinstance(value, bool) or value is None:
            continue
        elif isinstance(value, int) and isinstance(name, str):
            if name.endswith("_token_id"):
                small[name] = min(value, VOCABULARY - 1)
            else:
                small[name] = next((size for pattern, size in SIZES if pattern.match(name)), value)
        elif isinstance(value, (list, tuple)):
            small[name] = _short(name, list(value), layers)
    return small


def _short(name: str, value: list[Any], layers: int) -> list[Any]:
    """Return a list cut to the small model's layers, or to its rotary width."""
    if name in ("short_factor", "long_factor"):
        return value[: HEAD_WIDTH // 2]
    if name == "mrope_section" and len(value) == 3:
        return [2, 3, 3]
    if name == "eos_token_id":
        return [min(int(token), VOCABULARY - 1) for token in value]
    if len(value) != layers or not layers:
        return value
    kinds = list(dict.fromkeys(map(str, value)))
    picked = [value[list(map(str, value)).index(kind)] for kind in kinds[:LAYERS]]
    return (picked * LAYERS)[:LAYERS]


def build_twin(config: Any, *, head: bool = False) -> nn.Module:
    """Return a small random model of a configuration's kind.

    Args:
        head: with the language-model head.

    Raises:
        InputError: the configuration's class refuses these sizes.
    """
    from transformers import AutoModel, AutoModelForCausalLM

    with reading_model(UNCHECKED), torch.random.fork_rng(devices=[]), quiet_transformers():
        torch.manual_seed(SEED)
        twin = (AutoModelForCausalLM if head else AutoModel).from_config(
            small_config(config), attn_implementation="eager", trust_remote_code=False, dtype=torch.float32
        )
        with torch.no_grad():
            for parameter in twin.parameters():
                if parameter.ndim == 1:
                    parameter.add_(0.1 * torch.randn_like(parameter))
                elif parameter.is_floating_point():
                    parameter.copy_(SCALE * torch.randn_like(parameter))
    return twin.eval().requires_grad_(False)  # type: ignore[no-any-return]
