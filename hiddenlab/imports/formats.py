"""Recognise what the arrays of a file are: a small function for each source, by the names that it gives.

A recogniser gets the contents of a file and says which arrays hold states, of which layer and stream, and where the
token ids and the attention mask are; or it returns None where the file is of another source. ``RECOGNISERS`` lists them
in the order in which they are asked.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor

from hiddenlab.errors import InputError
from hiddenlab.imports.containers import OBSERVATION, Contents
from hiddenlab.imports.layouts import ModelShape
from hiddenlab.imports.rounding import SCALES, needs_scale
from hiddenlab.options import StatesFormat

_IDS = ("token_ids", "input_ids", "prompt_token_ids", "sequences", "ids", "tokens")
_MASKS = ("attention_mask", "mask")


@dataclass(frozen=True)
class Part:
    """One array of states, or several that follow one another or add up.

    Attributes:
        names: of the arrays; several are joined along the tokens, or added where ``added``.
        layer, stream: where they were taken, None where the file does not say.
        axes: where the source has one order. unusable: why they are no states of a site, empty where they are.
        prompt: arrays of different prompts have different numbers, those of one batch the same.
    """

    names: tuple[str, ...]
    layer: int | None = None
    stream: str | None = None
    axes: tuple[str, ...] | None = None
    added: bool = False
    unusable: str = ""
    prompt: int = 0

    def __str__(self) -> str:
        if self.layer is None or self.stream is None:
            return self.names[0]
        return f"{self.stream} at layer {self.layer}"


@dataclass(frozen=True)
class Recognised:
    """What a file is.

    Attributes:
        ids: token ids, by the number of the prompt or batch. mask: the attention mask of a batch.
        stages: of a channel that the source's states pass, where their numbers do not tell it.
    """

    format: str
    parts: tuple[Part, ...]
    ids: dict[int, Tensor]
    mask: Tensor | None = None
    stages: tuple[str, ...] = ()


Recogniser = Callable[[Contents, ModelShape], Recognised | None]


def recognise(contents: Contents, shape: ModelShape, wanted: str) -> Recognised:
    """Find out what a file is.

    Args:
        wanted: a format's name, or ``auto``.

    Raises:
        InputError: it is not of the wanted format; or it is a file of the lab's own.
    """
    if OBSERVATION in contents.metadata:
        raise InputError(f"{contents.path} is an observation file already; attack it with --observation")
    if wanted != "auto":
        if (recognised := NAMED[wanted](contents, shape)) is None:
            raise InputError(
                f"{contents.path} does not look like {wanted}: it holds {listing(contents.arrays)}"
            )
        return recognised
    return next(filter(None, (recogniser(contents, shape) for recogniser in RECOGNISERS.values())))


def listing(names: Sequence[str] | dict[str, Tensor]) -> str:
    """List names with their shapes, the first few of them."""
    if isinstance(names, dict):
        names = [f"{name} {list(array.shape)}" for name, array in names.items()]
    return ", ".join(name[:80] for name in list(names)[:8]) + (
        f" and {len(names) - 8} more" if len(names) > 8 else ""
    )


# ---- the sources


def _sglang(contents: Contents, shape: ModelShape) -> Recognised | None:
    """SGLang's answer: the prompt's rows, then one for each generated token; the last layer, after the final norm."""
    answers = contents.value if isinstance(contents.value, list) else [contents.value]
    several = isinstance(contents.value, list)
    parts, ids = [], dict[int, Tensor]()
    for i, answer in enumerate(answers):
        info = answer.get("meta_info") if isinstance(answer, dict) else None
        if not isinstance(info, dict) or "hidden_states" not in info:
            continue
        stem = (f"{i}." if several else "") + "meta_info.hidden_states"
        names = sorted(
            (name for name in contents.arrays if name == stem or name.startswith(f"{stem}.")), key=_numbers
        )
        if not names:
            raise InputError(f"{contents.path}: meta_info.hidden_states is empty")
        parts.append(Part(tuple(names), shape.layers, "final_norm", prompt=i))
        if (tokens := _sglang_ids(answer, info)) is not None:
            ids[i] = tokens
    return Recognised("sglang", tuple(parts), ids) if parts else None


def _sglang_ids(answer: dict[str, Any], info: dict[str, Any]) -> Tensor | None:
    """Return the ids of prompt and answer, where the request asked for the log-probabilities of its input."""
    given, made = info.get("input_token_logprobs"), answer.get("output_ids")
    try:
        return torch.tensor([int(entry[1]) for entry in given] + [int(i) for i in made or []])  # type: ignore[union-attr]
    except (TypeError, ValueError, IndexError, KeyError, OverflowError, RuntimeError):
        return None


def _vllm(contents: Contents, shape: ModelShape) -> Recognised | None:
    """vLLM's hidden-state files: one request, tokens first; which layers they are is not in the file."""
    states, ids = contents.arrays.get("hidden_states"), contents.arrays.get("token_ids")
    if states is None or ids is None or states.ndim != 3 or ids.ndim != 1 or states.shape[0] > ids.shape[0]:
        return None
    part = Part(("hidden_states",), axes=("tokens", "layers", "width"))
    return Recognised("vllm", (part,), {0: ids})


_PAIRS = ("hidden_states", "mlp_out", "mlp_output", "output", "hidden", "0")


def _vllm_pair(contents: Contents, shape: ModelShape, named: bool = False) -> Recognised | None:
    """The pair that a decoder layer of vLLM returns: its sum is the state."""
    arrays = contents.arrays
    first = next((name for name in _PAIRS if name in arrays), None)
    second = "residual" if "residual" in arrays else "1" if named and first == "0" and "1" in arrays else None
    if first is None or second is None or arrays[first].shape != arrays[second].shape:
        return None
    return Recognised("vllm-pair", (Part((first, second), added=True),), *_ids_and_mask(contents))


_HALF_CACHE = ("dtype:float16",)  # llama.cpp keeps keys and values in float16 by default


def _llama_cpp(contents: Contents, shape: ModelShape) -> Recognised | None:
    """llama.cpp: tensors of its graph (``l_out-5``), or the JSON of llama-embedding and llama-server."""
    parts = []
    for name in contents.arrays:
        match = re.fullmatch(r"(?:.*[./])?(l_out|result_norm|inp_embd)(?:-(\d+))?(?: \(.*\))?", name)
        if match is None or (match[1] == "l_out") != (match[2] is not None):
            continue
        layer, stream = {
            "l_out": (int(match[2] or 0) + 1, "resid"),
            "result_norm": (shape.layers, "final_norm"),
            "inp_embd": (0, "embed"),
        }[match[1]]
        parts.append(Part((name,), layer, stream))
    if parts:
        return Recognised("llama.cpp", tuple(parts), *_ids_and_mask(contents), _HALF_CACHE)
    return _llama_cpp_answer(contents, shape) if contents.kind == "JSON" else None


def _llama_cpp_answer(contents: Contents, shape: ModelShape) -> Recognised | None:
    """The JSON of llama-embedding, a row for each entry, and of llama-server, a prompt for each."""
    pattern = r"((?:data\.)?\d+)\.embedding(?:\.\d+)?"
    names = [name for name in contents.arrays if re.fullmatch(pattern, name)]
    axes = {contents.arrays[name].ndim for name in names}
    if axes == {2}:
        parts = [Part((name,), shape.layers, "final_norm", prompt=i) for i, name in enumerate(names)]
    elif axes == {1}:
        parts = [Part(tuple(names), shape.layers, "final_norm")]
    else:
        return None
    return Recognised("llama.cpp", tuple(parts), {}, stages=_HALF_CACHE)


# What a hook sees, and after how many blocks more than its own number; the first name of a site that is there is taken.
_LENS = {
    "hook_resid_post": ("resid", 1),
    "hook_resid_pre": ("resid", 0),
    "hook_out": ("resid", 1),
    "hook_in": ("resid", 0),
    "attn.hook_rot_k": ("k", 1),
    "attn.hook_rot_q": ("q", 1),
    "attn.hook_k": ("k", 1),
    "attn.hook_q": ("q", 1),
    "attn.hook_v": ("v", 1),
    "attn.hook_z": ("attn", 1),
}


def _transformer_lens(contents: Contents, shape: ModelShape) -> Recognised | None:
    """TransformerLens' cache: the names of its hooks."""
    parts: dict[tuple[int, str], Part] = {}
    for hook, (stream, after) in _LENS.items():
        for name, array in contents.arrays.items():
            match = re.fullmatch(rf"(?:.*\.)?blocks\.(\d+)\.{re.escape(hook)}", name)
            if match is None:
                continue
            layer = int(match[1]) + after
            kind = stream if layer else "embed"
            before = hook in ("attn.hook_k", "attn.hook_q") and shape.rotary
            heads = ("tokens", "heads", "head")
            axes = None if stream == "resid" else heads if array.ndim == 3 else ("batch", *heads)
            unusable = f"they are before the rotary embedding; save hook_rot_{stream}" if before else ""
            parts.setdefault((layer, kind), Part((name,), layer, kind, axes, unusable=unusable))
    return Recognised("transformer-lens", tuple(parts.values()), *_ids_and_mask(contents)) if parts else None


def _cache(contents: Contents, shape: ModelShape) -> Recognised | None:
    """Keys and values of transformers' DynamicCache, however its tensors were put into a dictionary or tuples."""
    known = {
        "key": "k",
        "keys": "k",
        "key_cache": "k",
        "k": "k",
        "value": "v",
        "values": "v",
        "value_cache": "v",
        "v": "v",
    }
    known |= {"0": "k", "1": "v"}
    parts = []
    for name, array in contents.arrays.items():
        words = [word for word in re.split(r"[./_]", name.replace("_cache", "")) if word]
        if array.ndim not in (3, 4) or len(words) < 2:
            continue
        if words[-2].isdigit() and words[-1] in known:  # layers.3.keys, past_key_values.3.0
            number, stream = words[-2], known[words[-1]]
        elif words[-1].isdigit() and words[-2] in known and not words[-2].isdigit():  # key_cache.3
            number, stream = words[-1], known[words[-2]]
        else:
            continue
        if array.shape[-1] == shape.head_width and shape.kv_heads in array.shape:
            axes = ("heads", "tokens", "head") if array.ndim == 3 else ("batch", "heads", "tokens", "head")
            parts.append(Part((name,), int(number) + 1, stream, axes))
    numeric = all(re.search(r"\d[./_][01]$", part.names[0]) for part in parts)
    if not parts or (numeric and len(parts) % 2):
        return None
    return Recognised("cache", tuple(parts), *_ids_and_mask(contents))


def _transformers(contents: Contents, shape: ModelShape) -> Recognised | None:
    """The tuple of transformers: entry 0 embeddings, entry l the state after l layers, the last one normed."""
    steps: dict[int, list[tuple[int, str]]] = {}
    states = {name: array for name, array in contents.arrays.items() if array.ndim >= 2}
    for name in states:
        if match := re.fullmatch(
            r"(?:.*\.)?(?:hidden_states|arr)[._](?:(\d+)\.)?(\d+)|(?:(\d+)\.)?(\d+)", name
        ):
            step, layer = match[1] or match[3] or "0", match[2] or match[4]
            steps.setdefault(int(layer), []).append((int(step), name))
    if len(steps) != shape.layers + 1 or sorted(steps) != list(range(shape.layers + 1)):
        return _stack(contents, shape)
    parts = []
    for layer in sorted(steps):
        names = tuple(name for _, name in sorted(steps[layer]))
        stream = "embed" if layer == 0 else "resid"
        if layer == shape.layers and shape.last_is_normed:
            stream = "final_norm"
        axes = {2: ("tokens", "width"), 3: ("batch", "tokens", "width")}.get(states[names[0]].ndim)
        parts.append(Part(names, layer, stream, axes))
    return Recognised("transformers", tuple(parts), *_ids_and_mask(contents))


def _stack(contents: Contents, shape: ModelShape) -> Recognised | None:
    """The tuple as one array ``[layers + 1, batch, tokens, width]``."""
    for name, array in contents.arrays.items():
        if (
            name.rpartition(".")[2] == "hidden_states"
            and array.ndim == 4
            and array.shape[0] == shape.layers + 1 != array.shape[1]
        ):
            part = Part((name,), axes=("layers", "batch", "tokens", "width"))
            return Recognised("transformers", (part,), *_ids_and_mask(contents))
    return None


_BLOCK = r"(?:.*\.)?(?:layers|h|blocks|block)[._](\d+)"
_OUTPUT = r"(?:\.output)?(?:\.0)?(?:\.value)?"  # of a block that returns a tuple, its first entry
_PROJECTION = r"\.(?:self_attn|attn|attention)\.([kqv])_proj"
_AROUND = {
    r"(?:.*\.)?(?:norm|ln_f|final_layernorm|final_layer_norm)": "final_norm",
    r"(?:.*\.)?(?:embed_tokens|wte|embed_in)": "embed",
}


def _modules(contents: Contents, shape: ModelShape) -> Recognised | None:
    """Outputs by the names of the model's modules, as nnsight and forward hooks save them."""
    parts = []
    for name in contents.arrays:
        if match := re.fullmatch(_BLOCK + _OUTPUT, name):
            parts.append(Part((name,), int(match[1]) + 1, "resid"))
        elif match := re.fullmatch(_BLOCK + _PROJECTION + _OUTPUT, name):
            before = match[2] != "v" and shape.rotary
            unusable = "they are before the rotary embedding; save the cache's keys" if before else ""
            parts.append(Part((name,), int(match[1]) + 1, match[2], unusable=unusable))
        for pattern, stream in _AROUND.items():
            if re.fullmatch(pattern + _OUTPUT, name):
                parts.append(Part((name,), shape.layers if stream == "final_norm" else 0, stream))
    return Recognised("modules", tuple(parts), *_ids_and_mask(contents)) if parts else None


def _plain(contents: Contents, shape: ModelShape, named: bool = False) -> Recognised:
    """Arrays by themselves, each of them the states of a prompt or of a batch."""
    ids, mask = _ids_and_mask(contents)
    beside = {*_IDS, *_MASKS}
    names = [
        name
        for name, array in contents.arrays.items()
        if name.rpartition(".")[2] not in beside and array.ndim >= 2 and not _is_scale(name, contents.arrays)
    ]
    # Whole numbers beside floats are something else; alone they are states that lost their scale.
    names = [
        name
        for name in names
        if contents.arrays[name].is_floating_point() or needs_scale(contents.arrays[name])
    ] or names
    if not names:
        raise InputError(f"{contents.path} holds no states [tokens, width]: {listing(contents.arrays)}")
    if not named and sorted(names) == ["0", "1"] and contents.arrays["0"].shape == contents.arrays["1"].shape:
        raise InputError(
            f"{contents.path} holds two arrays of one shape; say with --format vllm-pair that a layer of vLLM returned "
            "them (their sum is the state), or with --format plain that they are two prompts"
        )
    if len({re.sub(r"\d+", "", name) for name in names}) > 1:
        shown = listing({name: contents.arrays[name] for name in names})
        raise InputError(f"{contents.path} holds several arrays: {shown}; choose one with --tensor NAME")
    names.sort(key=_numbers)
    parts = [Part((name,), prompt=i) for i, name in enumerate(names)]
    tokens = ids if len(names) == 1 else _ids_beside(names, contents)
    return Recognised("plain", tuple(parts), tokens, mask if len(names) == 1 else None)


def _is_scale(name: str, arrays: dict[str, Tensor]) -> bool:
    """Return whether an array is the scale of another."""
    if name.rpartition(".")[2] in ("scale", "scales"):
        return any(needs_scale(array) for array in arrays.values())
    return any(
        form.format(other) == name and needs_scale(arrays[other]) for form in SCALES for other in arrays
    )


def _ids_beside(names: Sequence[str], contents: Contents) -> dict[int, Tensor]:
    """Return the ids of several prompts: ``input_ids.3`` of ``states.3``, or a row of one array of ids each."""
    ids: dict[int, Tensor] = {}
    for i, name in enumerate(names):
        number = re.search(r"(\d+)$", name)
        for word in _IDS:
            tokens = contents.arrays.get(f"{word}.{number[1]}") if number else None
            if tokens is not None and tokens.ndim == 1:
                ids[i] = tokens
    return ids


def _ids_and_mask(contents: Contents) -> tuple[dict[int, Tensor], Tensor | None]:
    """Return the token ids and the attention mask that lie beside the states of one batch."""

    def whole(words: Sequence[str]) -> Tensor | None:
        for word in words:
            for name, array in contents.arrays.items():
                if (
                    name.rpartition(".")[2] == word
                    and array.ndim in (1, 2)
                    and array.numel()
                    and _counts(array)
                ):
                    return array
        return None

    ids, mask = whole(_IDS), whole(_MASKS)
    return {} if ids is None else {0: ids}, mask


def _counts(array: Tensor) -> bool:
    return not array.is_floating_point() and not array.is_complex()


def _numbers(name: str) -> list[Any]:
    """Return a key that sorts names by the numbers in them: ``states.2`` before ``states.10``."""
    return [(0, int(word), "") if word.isdigit() else (1, 0, word) for word in re.split(r"(\d+)", name)]


def in_file_order(parts: Sequence[Part]) -> list[Part]:
    """Return parts by layer, for messages."""
    return sorted(parts, key=lambda part: (-1 if part.layer is None else part.layer, part.stream or ""))


# In the order in which they are asked; the last one takes whatever is left.
RECOGNISERS: dict[str, Recogniser] = {
    "sglang": _sglang,
    "vllm": _vllm,
    "vllm-pair": _vllm_pair,
    "llama.cpp": _llama_cpp,
    "transformer-lens": _transformer_lens,
    "cache": _cache,
    "transformers": _transformers,
    "modules": _modules,
    "plain": _plain,
}
# Who names one of these decides what the names of the arrays leave open.
NAMED: dict[str, Recogniser] = RECOGNISERS | {
    "vllm-pair": partial(_vllm_pair, named=True),
    "plain": partial(_plain, named=True),
}
assert {"auto", *RECOGNISERS} == set(get_args(StatesFormat))
