"""Read the tensor names of a checkpoint and check that a loaded model got all of its weights.

transformers fills what a checkpoint does not give with random weights and continues. Here the names of a checkpoint's
tensors are read first, their prefix is mapped to the model's own, and whatever is still missing afterwards is an error.
"""

import json
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, cast

import torch
from pydantic import Field
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from hiddenlab.errors import InputError
from hiddenlab.models.reading import OTHER_MODEL
from hiddenlab.utils.schema import OPEN, read

ADAPTER = "adapter_config.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
PACKED = (".qweight", ".weight_packed", ".weight_scale", ".weight_scale_inv", ".weight_blocks")
LFS_POINTER = b"version https://git-lfs"
LAYERS = "some_layers"  # attribute of a model that has only some of its layers: the name of their list
NAMED = 3  # tensors that an error names


@dataclass(frozen=True)
class Prefixes:
    """The prefixes of the names of a checkpoint's tensors.

    Attributes:
        base: before the decoder's (``layers.0.…``). head: before the language-model head's.
    """

    base: str
    head: str

    def mapping(self, model: Any) -> dict[str, str]:
        """Return patterns of the checkpoint's names and what transformers replaces them with; empty where names fit."""
        own = own_prefix(model)
        if self.base in ("", own):
            return {}
        above = self.base.removesuffix(own) if own else ""
        heads = "|".join(sorted({re.escape(name.split(".")[0]) for name in _split(model)[1]}))
        patterns = {}
        if self.head and heads:
            patterns[f"^{re.escape(self.head)}(?=({heads})\\.)"] = ""
        patterns[f"^{re.escape(self.base)}"] = own
        if above not in ("", self.base):
            patterns[f"^{re.escape(above)}"] = ""
        return patterns


def refuse_adapter(name: str, path: str, revision: str | None = None) -> None:
    """Raise InputError where a hub id, or a directory that is taken for a model, holds an adapter (PEFT)."""
    if _find(path, ADAPTER, revision):
        raise InputError(
            f"{name} is an adapter ({ADAPTER}) on the hub; fetch it ('hf download {name} --local-dir DIR'), and "
            "name that folder"
        )


def tensor_names(name: str, path: str, revision: str | None = None) -> set[str]:
    """Return the tensor names of a model directory or hub id; of several files on the hub only the index is downloaded.

    Args:
        name: the model's name in errors.

    Raises:
        InputError: there are no safetensors, or a file is missing or cannot be read.
    """
    found = _weights(name, path, revision)
    if isinstance(found, Path):
        return _names_in(found)
    index, files = found
    if not Path(path).is_dir():
        return set(files)
    names = set[str]()
    for file in sorted(set(files.values())):
        if not (index.parent / file).is_file():
            raise InputError(
                f"{index} names {file}, which is missing; copy the model again, with all of its files"
            )
        names |= _names_in(index.parent / file)
    return names


def weight_files(name: str, path: str, revision: str | None = None) -> list[Path]:
    """Return the files of a model directory or hub id that hold its weights, in the order of their names.

    Raises:
        InputError: there are no safetensors, or a file is missing.
    """
    found = _weights(name, path, revision)
    if isinstance(found, Path):
        return [found]
    index, named = found
    files = {file: _find(path, file, revision) for file in sorted(set(named.values()))}
    if missing := next((file for file, at in files.items() if at is None), None):
        raise InputError(
            f"{index} names {missing}, which is missing; copy the model again, with all of its files"
        )
    return [at for at in files.values() if at is not None]


def _weights(name: str, path: str, revision: str | None) -> Path | tuple[Path, dict[str, str]]:
    """Return the file that holds all weights, or the index of several files and what it says."""
    from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

    single = _find(path, SAFE_WEIGHTS_NAME, revision)
    index = _find(path, SAFE_WEIGHTS_INDEX_NAME, revision) if single is None or Path(path).is_dir() else None
    if single is not None:
        if index is not None:
            _refuse_second_copy(single, index)
        return single
    if index is None:
        raise InputError(
            f"cannot load the model {name!r}: it holds no {SAFE_WEIGHTS_NAME} or {SAFE_WEIGHTS_INDEX_NAME}"
            + _other_weights(Path(path))
        )
    return index, _indexed(index)


def tensor_shapes(path: str, revision: str | None = None) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return dtype and shape of every tensor of a model directory or hub id that was read before."""
    from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

    index = _find(path, SAFE_WEIGHTS_INDEX_NAME, revision)
    files = {SAFE_WEIGHTS_NAME} if index is None else set(_indexed(index).values())
    shapes = dict[str, tuple[str, tuple[int, ...]]]()
    for file in filter(None, (_find(path, file, revision) for file in sorted(files))):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                entry = opened.get_slice(name)
                shapes[name] = (entry.get_dtype(), tuple(entry.get_shape()))
    return shapes


def _refuse_second_copy(single: Path, index: Path) -> None:
    """Raise InputError where a model lies in one file and again in several: one of the two is stale.

    transformers would take the single file. An index whose files are gone is no second copy.
    """
    files = set(_indexed(index).values())
    if files != {single.name} and all((index.parent / file).is_file() for file in files):
        raise InputError(
            f"{index.parent} holds the weights twice, in {single.name} and in the {len(files)} files of "
            f"{index.name}; one of them may be stale: move {single.name}, or {index.name}, to another folder"
        )


def _other_weights(folder: Path) -> str:
    """Return what a folder without safetensors holds instead, and how to make safetensors of it."""
    pickles = sorted(file.name for kind in PICKLES for file in folder.glob(kind))
    if not pickles:
        return ""
    pickle = f"; {pickles[0]} is a pickle, which is not loaded"
    if not pickles[0].startswith("pytorch_model"):
        return f"{pickle}: save it as safetensors"
    place = json.dumps(str(folder))
    code = f"from transformers import AutoModelForCausalLM as M; M.from_pretrained({place}).save_pretrained({place})"
    return f"{pickle}; convert it, if you trust it: {python(code)}"


def python(code: str) -> str:
    """Return the shell command that runs a line of Python, for an error that names the way out."""
    return f"python -c {shlex.quote(code)}"


def _find(path: str, file: str, revision: str | None) -> Path | None:
    from transformers.utils.hub import cached_file

    if Path(path).is_dir():
        return Path(path) / file if (Path(path) / file).is_file() else None
    location = cached_file(path, file, revision=revision, _raise_exceptions_for_missing_entries=False)
    return None if location is None else Path(location)


def _names_in(file: Path) -> set[str]:
    try:
        with safe_open(file, "pt") as opened:
            return set(opened.keys())
    except (OSError, SafetensorError) as error:
        if _is_pointer(file):
            raise InputError(
                f"{file} is a pointer of Git LFS and not the weights; run 'git lfs pull' in its folder"
            ) from None
        raise InputError(
            f"cannot read {file}: {str(error).splitlines()[0]}; the file is damaged or incomplete, copy it again"
        ) from None


def _is_pointer(file: Path) -> bool:
    try:
        with file.open("rb") as opened:
            return opened.read(len(LFS_POINTER)) == LFS_POINTER
    except OSError:
        return False


@dataclass(frozen=True)
class _Index:
    __pydantic_config__ = OPEN

    weight_map: Annotated[dict[str, str], Field(min_length=1)]


def _indexed(index: Path) -> dict[str, str]:
    try:
        files = read(index, _Index).weight_map
    except InputError as error:
        raise InputError(f"{index} does not say in which file each tensor is (weight_map): {error}") from None
    if outside := next((file for file in files.values() if Path(file).name != file), None):
        raise InputError(f"{index} names {outside!r}, a file outside of its folder")
    return files


def find_prefixes(names: Iterable[str], model: Any, label: str) -> Prefixes | None:
    """Find the prefix in a checkpoint behind which most names are the model's own.

    Args:
        names: of the checkpoint's tensors. model: of the architecture, its weights unimportant. label: the checkpoint's
            name in errors.

    Returns:
        None where no name is the model's, with any prefix.

    Raises:
        InputError: several parts of the checkpoint could be the model.
    """
    names = set(names)
    base, head = _split(model)
    counts = Counter[str]()
    for name in names:
        parts = name.split(".")
        counts.update(".".join([*parts[:i], ""]) for i in range(len(parts)) if ".".join(parts[i:]) in base)
    if not counts:
        return None
    own = ("", own_prefix(model))
    best = max(counts, key=lambda prefix: (counts[prefix], prefix in own, -len(prefix)))
    table = _table_name(model)
    rivals = [
        prefix for prefix in counts
        if prefix != best and not prefix.startswith(best or "-") and f"{prefix}{table}" in names
    ]  # fmt: skip
    if rivals and best not in own:
        shown = " and ".join(repr(prefix) for prefix in sorted([best, *rivals]))
        raise InputError(
            f"{label} holds several language models, beneath {shown}; save the one that is meant by itself"
        )
    above = [".".join([*best.split(".")[:i], ""]) if i else "" for i in range(len(best.split(".")))]
    heads = [prefix for prefix in above if any(f"{prefix}{name}" in names for name in head)]
    return Prefixes(best, heads[-1] if heads else "")


def own_prefix(model: Any) -> str:
    """Return the prefix of the decoder's names in a model of its architecture with a head, mostly ``model.``."""
    return f"{model.base_model_prefix}." if model.base_model_prefix else ""


def _split(model: Any) -> tuple[set[str], set[str]]:
    """Return the names of the decoder's tensors, without prefix, and those of the others."""
    own, names = own_prefix(model), set(model.state_dict())
    if not own or not hasattr(model, model.base_model_prefix):
        return names, set()
    base = {name for name in names if name.startswith(own)}
    return {name.removeprefix(own) for name in base}, names - base


def _table_name(model: Any) -> str:
    """Return the name of the input embeddings' weight in the decoder."""
    table = model.get_input_embeddings()
    module_name = next((name for name, module in model.named_modules() if module is table), "")
    return f"{module_name.removeprefix(own_prefix(model))}.weight"


def check_loaded(
    model: Any, info: dict[str, Any], prefixes: Prefixes | None, label: str, *, final_norm: bool = True
) -> None:
    """Compare what a model needs with what its checkpoint gave.

    Args:
        info: transformers' loading info. label: the checkpoint's name in errors. final_norm: whether the norm behind
            the last layer is needed.

    Raises:
        InputError: a tensor is missing, has another shape, or belongs to a layer of another architecture.
    """
    if prefixes is None:
        hint = "none of its tensors has a name of this architecture"
    elif prefixes.base:
        hint = f"the names of its tensors begin with {prefixes.base!r}"
    else:
        hint = "nothing stands before the names of its tensors"
    if packed := next((name for name in sorted(info["unexpected_keys"]) if name.endswith(PACKED)), None):
        hint = f"it holds {packed}, of quantized weights, and its config.json does not say how they are quantized"
    missing = set(info["missing_keys"])
    if not final_norm:
        missing -= _final_norm_tensors(model)
    if missing:
        raise InputError(f"{label} does not give {listed(missing)}, which is needed; {hint}")
    if wrong := sorted(info["mismatched_keys"]):
        _, given, needed = wrong[0]
        raise InputError(
            f"{label} gives {listed(key[0] for key in wrong)} in another shape than is needed, "
            f"{tuple(given)} and not {tuple(needed)}: it does not fit its config.json, or the first layers "
            "cannot be loaded without the others"
        )
    own, layers = own_prefix(model), _layers_name(model)
    if layers is not None:
        loaded = enumerate(model.get_submodule(layers))  # type: ignore[arg-type]
        kept = tuple(
            f"{layers.removeprefix(own)}.{i}." for i, layer in loaded if not isinstance(layer, LeftOut)
        )
        if unknown := [n for n in info["unexpected_keys"] if n.removeprefix(own).startswith(kept)]:
            raise InputError(
                f"{label} gives {listed(unknown)}, which {type(model).__name__} has no place for: its layers "
                "compute something else (an adapter that is not merged, quantized weights of which config.json says "
                "nothing, or another architecture)"
            )


def listed(names: Iterable[str]) -> str:
    """Return the first of many names, in the order of layers, for an error."""
    first = sorted(
        sorted(names), key=lambda name: [int(part) if part.isdigit() else 0 for part in name.split(".")]
    )
    more = f" and {len(first) - NAMED} more" if len(first) > NAMED else ""
    return ", ".join(first[:NAMED]) + more


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """Return the model's list of layers.

    Raises:
        InputError: it has none.
    """
    name = _layers_name(model)
    if name is None:
        raise InputError(
            f"{type(model).__name__} has no list of {model.config.num_hidden_layers} layers; "  # type: ignore[union-attr]
            f"{OTHER_MODEL}"
        )
    return model.get_submodule(name)  # type: ignore[return-value]


class LeftOut(nn.Module):
    """A layer that was left out: it gives what it gets."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        for name, value in vars(layer).items():  # the model reads some of them, such as the kind of attention
            if isinstance(value, bool | int | float | str) and not name.startswith("_"):
                setattr(self, name, value)

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states


def with_layers(architecture: type, first: int, end: int | None) -> type:
    """Return a model class with some of its layers; the rest of the model is as the whole one's.

    Layers before the first are left out in their place, so that the others keep their number; those behind are gone.
    Where a layer that stays has the weights of one that goes, all layers stay.

    The configuration stays whole: what depends on the number of layers (scales, shared keys and values, embeddings for
    each layer) is right.

    Args:
        first, end: the layers that stay are from ``first`` to before ``end``; None is all behind the first.
    """

    @wraps(architecture.__init__)  # type: ignore[misc]
    def build(self: Any, config: Any, *args: Any, **options: Any) -> None:
        architecture.__init__(self, config, *args, **options)  # type: ignore[misc]
        whole, name = decoder_layers(self), _layers_name(self)
        stays = range(len(whole))[first:end]
        dropped = tuple(f"{name}.{i}." for i in range(len(whole)) if i not in stays)
        tied = getattr(self, "all_tied_weights_keys", None) or {}
        kept = {name: source for name, source in tied.items() if not name.startswith(dropped)}
        if any(source.startswith(dropped) for source in kept.values()):
            return  # a layer that stays shares weights with one that does not
        if tied:
            self.all_tied_weights_keys = kept
        for i in range(first):
            whole[i] = LeftOut(whole[i])
        del whole[stays.stop :]
        setattr(self, LAYERS, name)

    return type(
        architecture.__name__, (architecture,), {"__init__": build, "__module__": architecture.__module__}
    )


def some_layers(model: nn.Module, first: int, end: int | None) -> nn.Module:
    """Return a model with some of the layers, which shares all weights with the given one.

    As in ``with_layers``, layers before the first are left out in their place, and those behind are gone.
    """
    name = _layers_name(model)
    assert name is not None
    layers: Any = model.get_submodule(name)
    kept = [LeftOut(layer) if i < first else layer for i, layer in enumerate(layers[:end])]
    part = replaced(model, name.split("."), nn.ModuleList(kept))
    setattr(part, LAYERS, name)
    return part


def replaced(module: nn.Module, path: Sequence[str], part: nn.Module) -> nn.Module:
    """Return a copy of a module with another part at a path; all other parts are shared."""
    first, *rest = path
    copied = copy(module)
    children = module._modules
    inner = part if not rest else replaced(cast(nn.Module, children[first]), rest, part)
    copied._modules = {**children, first: inner}
    return copied


def _layers_name(model: nn.Module) -> str | None:
    if name := getattr(model, LAYERS, None):
        return str(name)
    count = getattr(model.config, "num_hidden_layers", None)
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return name
    return None


def final_norm(model: nn.Module) -> tuple[str, nn.Module] | None:
    """Return the name and the module of the norm behind the last layer; None where there is none.

    It is the first module behind the layers that has parameters.
    """
    layers = _layers_name(model)
    if layers is None:
        return None
    parent, _, last = layers.rpartition(".")
    children = list(model.get_submodule(parent).named_children())
    after = children[[name for name, _ in children].index(last) + 1 :]
    found = next(((name, module) for name, module in after if any(True for _ in module.parameters())), None)
    return None if found is None else (f"{parent}.{found[0]}".lstrip("."), found[1])


def _final_norm_tensors(model: nn.Module) -> set[str]:
    """Return the names of the final norm's tensors, all of a state's width."""
    found = final_norm(model)
    if found is None:
        return set()
    name, norm = found
    width = torch.Size([model.config.hidden_size])  # type: ignore[union-attr,list-item]
    return {f"{name}.{tensor}" for tensor, value in norm.named_parameters() if value.shape == width}
