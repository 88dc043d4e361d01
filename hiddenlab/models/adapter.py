"""Merge a LoRA adapter into the layers of its model that are loaded; what is not plain LoRA is refused."""

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import Field
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from hiddenlab.errors import InputError
from hiddenlab.models.checkpoint import Prefixes, find_prefixes, listed, own_prefix, python
from hiddenlab.utils.schema import OPEN, Finite, Positive, loads, parse, read_bytes

CONFIG, WEIGHTS, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
SAVED = "base_model.model."  # what peft writes before the names of a model's tensors
PARTS = re.compile(r"(?P<module>.+)\.lora_(?P<part>(?:embedding_)?[AB])(?:\.weight)?")
PATTERN = re.compile(r"\^?[\w.-]+")  # names of modules alone: another regular expression may take for ever
VIRTUAL = ("PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "MULTITASK_PROMPT_TUNING", "ADAPTION_PROMPT", "CPT")
# Settings that tell how an adapter was trained, and nothing of what its weights mean.
TRAINING = (
    "task_type", "inference_mode", "auto_mapping", "peft_version", "target_modules", "exclude_modules",
    "lora_dropout", "fan_in_fan_out", "modules_to_save", "layers_to_transform", "layers_pattern",
    "loftq_config", "eva_config", "corda_config", "lora_ga_config", "megatron_core", "qalora_group_size",
    "ensure_weight_tying",
)  # fmt: skip
# Other beginnings move the model's own weights, from which the adapter then differs.
PLAIN_BEGINNINGS = (True, False, None, "gaussian", "orthogonal", "eva")


@dataclass(frozen=True)
class Adapter:
    """The settings of ``adapter_config.json`` that tell what the weights of plain LoRA mean."""

    __pydantic_config__ = OPEN

    base_model_name_or_path: Annotated[str, Field(min_length=1)]
    peft_type: Literal["LORA"]
    r: Positive
    lora_alpha: Finite
    revision: str | None = None
    use_rslora: bool = False
    bias: Literal["none", "all", "lora_only"] = "none"
    init_lora_weights: bool | str | None = True
    rank_pattern: dict[str, Positive] | None = field(default_factory=dict)
    alpha_pattern: dict[str, Finite] | None = field(default_factory=dict)

    def scale(self, module: str, rank: int) -> float:
        """Return the factor before B · A of one module, by its name in the adapter's file."""
        name = module.removeprefix(SAVED)
        patterns = self.alpha_pattern or {}
        fitting = (alpha for key, alpha in patterns.items() if _fits(key, name))
        alpha = next(fitting, self.lora_alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


def _fits(key: str, module: str) -> bool:
    """Return whether a pattern of peft's names a module: its whole name, or its end."""
    if key.startswith("^"):
        return module == key[1:]
    return module == key or module.endswith(f".{key}")


def is_adapter(folder: Path) -> bool:
    """Return whether a folder holds an adapter.

    Raises:
        InputError: it holds a whole model too, and nobody knows which of the two is meant.
    """
    if not (folder / CONFIG).is_file():
        return False
    if whole := sorted(folder.glob("model*.safetensors*")):
        raise InputError(
            f"{folder} holds an adapter ({CONFIG}) and a model ({whole[0].name}); move one of them to another folder"
        )
    return True


def read_adapter(folder: Path) -> Adapter:
    """Read the settings of an adapter.

    Raises:
        InputError: they are damaged, or those of something else than plain LoRA.
    """
    file = folder / CONFIG
    data = read_bytes(file)
    given = loads(data, str(file))
    if not isinstance(given, dict):
        raise InputError(f"{file} holds no object")
    kind = str(given.get("peft_type"))
    if kind in VIRTUAL:
        raise InputError(
            f"{folder} is an adapter of type {kind}: tokens and no weights, which cannot be merged"
        )
    if kind != "LORA":
        raise InputError(
            f"{folder} is an adapter of type {kind[:60]}, and only LoRA is merged here; {_peft(folder)}"
        )
    if not given.get("base_model_name_or_path"):
        raise InputError(
            f"{file} does not say of which model it is; write its folder as base_model_name_or_path"
        )
    adapter = parse(data, Adapter, str(file))
    known = {*Adapter.__dataclass_fields__, *TRAINING}
    if other := sorted(name for name, value in given.items() if name not in known and value):
        raise InputError(f"{folder} is no plain LoRA ({other[0][:60]} is set); {_peft(folder)}")
    if adapter.init_lora_weights not in PLAIN_BEGINNINGS:
        start = str(adapter.init_lora_weights)[:60]
        raise InputError(
            f"{folder} began as {start!r}, which changes the model's own weights; {_peft(folder)}"
        )
    for key in (*(adapter.alpha_pattern or ()), *(adapter.rank_pattern or ())):
        if not PATTERN.fullmatch(key):
            raise InputError(
                f"{file} has a pattern that is no name of a module, {key[:60]!r}; {_peft(folder)}"
            )
    return adapter


def _peft(folder: Path) -> str:
    """Return how peft merges an adapter."""
    place, target = json.dumps(str(folder)), json.dumps(f"{folder}-merged")
    code = (
        "from peft import AutoPeftModelForCausalLM as M; from transformers import AutoTokenizer as T; "
        f"m = M.from_pretrained({place}).merge_and_unload(); m.save_pretrained({target}); "
        f"T.from_pretrained(m.name_or_path).save_pretrained({target})"
    )
    return f"let peft merge it, and name the result: {python(code)}"


@torch.no_grad()
def merge(folder: Path, model: nn.Module, whole: nn.Module) -> None:
    """Add an adapter's weights to those of a loaded model, whole or in its first layers.

    Args:
        folder: the adapter's. model: loaded. whole: the model with all layers and its head, on the meta device; each
            tensor of the adapter must have a place there.

    Raises:
        InputError: the weights are damaged, of another model, or cannot be added to quantized ones.
    """
    adapter, tensors = read_adapter(folder), _tensors(folder)
    targets = {name: _target(name) for name in tensors}
    label = f"the adapter {folder}"
    prefixes = find_prefixes(targets.values(), whole, label)
    if prefixes is None:
        raise InputError(
            f"{label} gives {listed(targets)}, which {type(whole).__name__} has no place for; {_other(folder)}"
        )
    places = _places(targets, prefixes, whole)
    _check(folder, tensors, places, whole)
    own = own_prefix(whole) if not hasattr(model, whole.base_model_prefix) else ""  # type: ignore[arg-type]
    loaded = {f"{own}{name}": value for name, value in model.named_parameters(remove_duplicate=False)}
    for name, place in places.items():
        if place in loaded and not PARTS.fullmatch(name):
            _plain(loaded[place], label, place).copy_(tensors[name])
    for module, (down, up, embedding) in _pairs(places, label).items():
        place = places[down]
        if place not in loaded:
            continue
        weight = _plain(loaded[place], label, place)
        first, second = tensors[down].to(weight.device).float(), tensors[up].to(weight.device).float()
        change = adapter.scale(module, len(first)) * (second @ first)
        if embedding or _is_transposed(whole, place):
            change = change.T
        weight.copy_(weight.float() + change)


def _target(name: str) -> str:
    """Return the name of the parameter that a tensor of an adapter's file changes or replaces."""
    if part := PARTS.fullmatch(name):
        return f"{part['module']}.weight"
    return name.replace(".base_layer.", ".")


def _tensors(folder: Path) -> dict[str, Tensor]:
    file = folder / WEIGHTS
    if not file.is_file():
        pickle = folder / PICKLE
        if not pickle.is_file():
            raise InputError(f"{folder} holds no {WEIGHTS}; copy the adapter again, with all of its files")
        code = (
            "import torch; from safetensors.torch import save_file as s; "
            f"s(torch.load({json.dumps(str(pickle))}, weights_only=True), {json.dumps(str(file))})"
        )
        raise InputError(
            f"{pickle} is a pickle, which is not loaded; convert it, if you trust it: {python(code)}"
        )
    try:
        with safe_open(file, "pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise InputError(
            f"cannot read {file}: {str(error).splitlines()[0]}; the file is damaged or incomplete, copy it again"
        ) from None


def _places(targets: Mapping[str, str], prefixes: Prefixes, whole: nn.Module) -> dict[str, str]:
    """Return the model's own name of each tensor's parameter; parts of a larger model beside it are left out."""
    own = own_prefix(whole)
    alone = prefixes.base.removeprefix(SAVED) in ("", own)
    known = {name for name, _ in whole.named_parameters(remove_duplicate=False)}
    places = {}
    for name, target in targets.items():
        if target.startswith(prefixes.base):
            place = own + target.removeprefix(prefixes.base)
        else:
            place = target.removeprefix(prefixes.head or SAVED)
            if not alone and place not in known:
                continue
        places[name] = place
    return places


def _check(folder: Path, tensors: Mapping[str, Tensor], places: Mapping[str, str], whole: nn.Module) -> None:
    """Check that an adapter is of this model: every tensor has its place and shape, and no layer lacks one."""
    label = f"the adapter {folder}"
    shapes = {name: tuple(value.shape) for name, value in whole.named_parameters(remove_duplicate=False)}
    if unknown := [name for name, place in places.items() if place not in shapes]:
        raise InputError(
            f"{label} gives {listed(unknown)}, which {type(whole).__name__} has no place for; {_other(folder)}"
        )
    tables = {
        name for name, value in whole.named_parameters(remove_duplicate=False) if _is_table(whole, value)
    }
    if whole.config.tie_word_embeddings and tables & set(places.values()):  # type: ignore[union-attr]
        raise InputError(f"{label} changes embeddings that are the head's too; {_peft(folder)}")
    for name, place in places.items():
        if not PARTS.fullmatch(name):
            _check_shape(label, name, tuple(tensors[name].shape), shapes[place])
    for down, up, embedding in _pairs(places, label).values():
        first, second, place = tensors[down], tensors[up], places[down]
        if first.ndim != 2 or second.ndim != 2 or len(first) != second.shape[1]:
            raise InputError(f"{label} gives {down} of shape {tuple(first.shape)} and {up} of {tuple(second.shape)}; "
                             f"only LoRA of linear layers and embeddings is merged here; {_peft(folder)}")  # fmt: skip
        change = (second.shape[0], first.shape[1])
        _check_shape(
            label, down, change[::-1] if embedding or _is_transposed(whole, place) else change, shapes[place]
        )
    changed = {place for place in places.values() if place.endswith(".weight")}
    if missing := _lacking(folder, whole) - changed:
        raise InputError(f"{label} lacks {listed(missing)}: it is incomplete, or of another model")


def _lacking(folder: Path, whole: nn.Module) -> set[str]:
    """Return the weights that an adapter's settings say it changes, where they name modules plainly."""
    given = loads(read_bytes(folder / CONFIG), CONFIG)
    names = given.get("target_modules")
    chosen = any(given.get(key) for key in ("layers_to_transform", "layers_pattern", "exclude_modules"))
    if chosen or not isinstance(names, list):
        return set()
    return {
        f"{module}.weight"
        for module, layer in whole.named_modules()
        if isinstance(layer, nn.Linear)
        and any(isinstance(name, str) and _fits(name, module) for name in names)
    }


def _pairs(names: Iterable[str], label: str) -> dict[str, tuple[str, str, bool]]:
    """Return for each module the names of its two factors, A and B, and whether it is an embedding."""
    parts = dict[str, dict[str, str]]()
    for name in names:
        if factor := PARTS.fullmatch(name):
            parts.setdefault(factor["module"], {})[factor["part"]] = name
    pairs = {}
    for module, factors in parts.items():
        for first, second in (("A", "B"), ("embedding_A", "embedding_B")):
            if set(factors) == {first, second}:
                pairs[module] = (factors[first], factors[second], first != "A")
        if module not in pairs:
            raise InputError(
                f"{label} gives {listed(factors.values())} without its other factor; it is incomplete"
            )
    return pairs


def _check_shape(label: str, name: str, given: tuple[int, ...], needed: tuple[int, ...]) -> None:
    if given != needed:
        raise InputError(
            f"{label} gives {name} for a weight of shape {given}, and the model's is {needed}: it is of another model"
        )


def _other(folder: Path) -> str:
    return f"it is of another model, or of parts that transformers joins: {_peft(folder)}"


def _is_table(whole: nn.Module, parameter: Tensor) -> bool:
    ends = (whole.get_input_embeddings(), whole.get_output_embeddings())  # type: ignore[operator]
    return any(end is not None and getattr(end, "weight", None) is parameter for end in ends)


def _is_transposed(whole: nn.Module, place: str) -> bool:
    """Return whether a weight stands as [in, out], as in GPT-2's layers."""
    from transformers.pytorch_utils import Conv1D

    return isinstance(whole.get_submodule(place.rpartition(".")[0]), Conv1D)


def _plain(weight: nn.Parameter, label: str, place: str) -> nn.Parameter:
    """Return a weight to which another can be added.

    Raises:
        InputError: it is quantized, or not in memory.
    """
    if type(weight) is not nn.Parameter or not weight.is_floating_point() or weight.element_size() < 2:
        raise InputError(
            f"{label} cannot be added to {place}, which is quantized; give its model in bfloat16"
        )
    if weight.is_meta:
        raise InputError(
            f"{label} cannot be added to {place}, which is not in memory; leave --device-map out"
        )
    return weight
