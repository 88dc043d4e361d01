"""Build tiny random models of every supported architecture, and run the plain transformers model as their oracle.

For tests, here and in plugins: nothing is downloaded, a model is some 0.3 MB and loads in milliseconds. Weights are
drawn larger than an initialised model's, so that attention, windows and caps all show in the states.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from jaxtyping import Float
from torch import Tensor, nn

VOCABULARY, WIDTH, LAYERS, HEADS, KV_HEADS, MLP = 300, 64, 4, 4, 2, 128
WINDOW = 4  # tokens that a sliding window sees: less than any test's prompt
BOS, EOS = 256, 257  # the byte-level tokenizer's special tokens; 0 to 255 are bytes, 258 … have no text

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": MLP, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "max_position_embeddings": 512, "initializer_range": 0.15,
    "bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": None,
}  # fmt: skip
_GROUPED: dict[str, Any] = {"num_key_value_heads": KV_HEADS}
_ALTERNATE = ["sliding_attention", "full_attention"] * (LAYERS // 2)
# What each architecture's configuration adds to the common part.
SETTINGS: dict[str, dict[str, Any]] = {
    "llama": _GROUPED,
    "gemma2": _GROUPED
    | {
        "head_dim": 24, "sliding_window": WINDOW, "layer_types": _ALTERNATE, "attn_logit_softcapping": 2.0,
        "query_pre_attn_scalar": 20,
    },
    "gemma3_text": _GROUPED
    | {
        "head_dim": 24, "sliding_window": WINDOW, "layer_types": _ALTERNATE, "query_pre_attn_scalar": 20,
    },
    "qwen3": _GROUPED | {"head_dim": 24},
    "qwen3_moe": _GROUPED
    | {"head_dim": 24, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    "mistral": _GROUPED | {"sliding_window": WINDOW},
    "phi3": _GROUPED,
    "gpt2": {"n_inner": MLP},
    "gpt_neox": {},
    "olmo2": _GROUPED,
    "bert": {},
}  # fmt: skip
ARCHITECTURES = tuple(SETTINGS)
DECODERS = tuple(name for name in ARCHITECTURES if name != "bert")


def tiny_config(architecture: str, **changes: Any) -> Any:
    """Return the configuration of a tiny model.

    Args:
        architecture: one of ``ARCHITECTURES``. changes: values other than ``SETTINGS``'.
    """
    from transformers import AutoConfig

    return AutoConfig.for_model(architecture, **(_COMMON | SETTINGS[architecture] | changes))


def save_tiny(
    architecture: str, folder: Path | str, seed: int = 0, *, tokenizer: bool = False, **changes: Any
) -> str:
    """Save a tiny random model as a transformers directory, for ``load_model(path, layer)``.

    Args:
        architecture: one of ``ARCHITECTURES``. seed: of the weights.
        tokenizer: save a byte-level tokenizer too (one token a byte, none added).
        changes: configuration values other than ``SETTINGS``'.

    Returns:
        The folder's path.
    """
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

    from hiddenlab.models.reading import quiet_transformers

    config = tiny_config(architecture, **changes)
    factory = AutoModelForMaskedLM if architecture == "bert" else AutoModelForCausalLM
    with torch.random.fork_rng():
        # Architectures draw in the same order: with one seed their embeddings would be the same.
        torch.manual_seed(len(ARCHITECTURES) * seed + ARCHITECTURES.index(architecture))
        model = factory.from_config(config, dtype=torch.float32)
        _perturb(model)
    with quiet_transformers():
        model.save_pretrained(folder)
    if tokenizer:
        byte_tokenizer().save_pretrained(folder)
    return str(folder)


def _perturb(model: nn.Module) -> None:
    """Move biases and norm weights off 0 and 1, where a forgotten one would not show."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))


def byte_tokenizer() -> Any:
    """Return a tokenizer that knows the 256 bytes, ``<s>`` and ``</s>``; it reads and writes any text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={sign: i for i, sign in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")


@contextmanager
def small_training() -> Iterator[None]:
    """Train probes in a second, with an allowance for tiny models in place of the one for real ones."""
    from hiddenlab.proposals import store
    from hiddenlab.proposals.pairwise_order import PairwiseOrderSettings
    from hiddenlab.proposals.probe import ProbeSettings

    few: dict[str, Any] = {"rank": 8, "steps": 60, "every": 20}
    small: dict[str, Any] = {
        "TRAINING_TOKENS": (4000, 4000),
        "probe_settings": lambda permuted: ProbeSettings(permuted, 150, 128, negatives=300, hidden=64),
        "pairwise_order_settings": lambda permuted: PairwiseOrderSettings(sorted_states=permuted, **few),
    }
    with mock.patch.multiple(store, **small):
        yield


class PlainModel:
    """The oracle: the whole model as transformers runs it, one full forward for each call, nothing shared or cached.

    Args:
        path: a transformers directory. attention: transformers' own implementation. dtype, device: where it computes.
    """

    def __init__(
        self,
        path: str,
        attention: str = "eager",
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        from transformers import AutoModelForCausalLM

        from hiddenlab.models.reading import quiet_transformers

        with quiet_transformers():
            model = AutoModelForCausalLM.from_pretrained(path, attn_implementation=attention, dtype=dtype)
        self.model = model.eval().to(device)
        self._last: Tensor | None = None
        layers = next(
            module
            for module in self.model.modules()
            if isinstance(module, nn.ModuleList) and len(module) == self.model.config.num_hidden_layers
        )
        layers[-1].register_forward_hook(self._capture)

    def _capture(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._last = output[0] if isinstance(output, tuple) else output

    def states(
        self, tokens: Sequence[int] | Float[Tensor, "n d"], layer: int, stream: str = "resid"
    ) -> Float[Tensor, "n width"]:
        """Return states of a prompt (token ids or input embeddings) after ``layer`` layers; see ``Site``.

        The last entry of transformers' ``hidden_states`` is after the final norm, so the state before it is taken by a
        hook.
        """
        if isinstance(tokens, Tensor):
            inputs: dict[str, Any] = {"inputs_embeds": tokens[None].to(self.model.device)}
        else:
            inputs = {"input_ids": torch.tensor([list(tokens)], device=self.model.device)}
        with torch.no_grad():
            output = self.model(**inputs, output_hidden_states=True, use_cache=False)
        if stream == "logits":
            return output.logits[0]  # type: ignore[no-any-return]
        if stream == "final_norm":
            return output.hidden_states[-1][0]  # type: ignore[no-any-return]
        if layer < self.model.config.num_hidden_layers:
            return output.hidden_states[layer][0]  # type: ignore[no-any-return]
        assert self._last is not None
        return self._last[0]


def attack_sample(
    index: int, spans: Sequence[tuple[str, str]] = (("a", "exact"),), **changes: Any
) -> dict[str, Any]:
    """Return a sample of ``attack`` as a run records it; each span is a token, and changes replace fields."""
    ids, right = list(range(len(spans))), sum(status == "exact" for _, status in spans) / len(spans)
    text = "".join(text for text, _ in spans)
    return {
        "index": index, "id": f"p{index + 1:03d}", "status": "attacked", "text": text, "truth_ids": ids,
        "recovered": text, "exact": right == 1, "token_accuracy": right, "bag_of_tokens_recall": right,
        "rouge_l": right, "bleu": right, "tokens": len(ids), "verified": right, "evaluated_tokens": 3 * len(ids),
        "forward_calls": 2, "seconds": 1.0, "prefill_seconds": 0.4, "epsilon": 0.1, "stop_reason": "complete",
        "recovered_ids": ids, "positions": None, "spans": [tuple(span) for span in spans],
        "per_token": {
            "row": ids, "distance": [0.0] * len(ids), "margin": [None] * len(ids), "evaluated": [3] * len(ids),
            "verified": [status == "exact" for _, status in spans],
        },
        **changes,
    }  # fmt: skip


def write_tiny_gguf(
    path: Path, *, drop: str = "", seed: int = 0, tokenizer: bool = True, **options: Any
) -> None:
    """Write a tiny random Llama as a GGUF file, or as the parts of one.

    Args:
        drop: a tensor to leave out. tokenizer: write one into it.
        options: of ``gguf.GGUFWriter``, such as ``split_max_tensors``.
    """
    import gguf

    generator = torch.Generator().manual_seed(seed)
    writer = gguf.GGUFWriter(path, "llama", **options)
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCABULARY)
    if tokenizer:
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(["t", "1", *(f"t{i}" for i in range(1, VOCABULARY - 1))])
        writer.add_token_types([1] * VOCABULARY)
        writer.add_token_merges(["t 1"])
        writer.add_bos_token_id(256)
        writer.add_eos_token_id(257)
    narrow = WIDTH * KV_HEADS // HEADS
    shapes = {"token_embd": (VOCABULARY, WIDTH), "output": (VOCABULARY, WIDTH), "output_norm": (WIDTH,)}
    for i in range(LAYERS):
        shapes |= {
            f"blk.{i}.{name}": shape
            for name, shape in {
                "attn_norm": (WIDTH,), "attn_q": (WIDTH, WIDTH), "attn_k": (narrow, WIDTH), "attn_v": (narrow, WIDTH),
                "attn_output": (WIDTH, WIDTH), "ffn_norm": (WIDTH,), "ffn_gate": (MLP, WIDTH), "ffn_up": (MLP, WIDTH),
                "ffn_down": (WIDTH, MLP),
            }.items()
        }  # fmt: skip
    for name, shape in shapes.items():
        if name != drop:
            writer.add_tensor(f"{name}.weight", (0.15 * torch.randn(shape, generator=generator)).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def json_values() -> Any:
    """Return a hypothesis strategy of JSON values that hiddenlab reads: numbers of 64 bits, any text."""
    from hypothesis import strategies as st

    plain = (
        st.none()
        | st.booleans()
        | st.integers(-(2**63), 2**64 - 1)
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text()
    )
    return st.recursive(
        plain,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=8,
    )
