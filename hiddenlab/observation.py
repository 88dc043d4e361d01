"""Save and load observations: one safetensors file, with the public facts as JSON in its metadata.

A file holds the states of one or several prompts (``states.0``, ``states.1`` …) and nothing of the secret. It loads
without the defense that made it. The format: metadata key ``hiddenlab`` with ``{"format": 1, "observations": [public
facts, one for each tensor]}``.
"""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from safetensors import SafetensorError, safe_open

from hiddenlab.errors import InputError
from hiddenlab.models import TruncatedModel
from hiddenlab.projections import projection_of
from hiddenlab.row_facts import extra_rows
from hiddenlab.types import Observation, ObservationInfo, Site
from hiddenlab.utils.files import save_tensors
from hiddenlab.utils.schema import CLOSED, parse

FORMAT = 1
METADATA_KEY = "hiddenlab"

# The signature's entries are rounded to bfloat16 (0.4 %); small ones are compared against the typical size.
SIGNATURE_RELATIVE = 0.02
SIGNATURE_ABSOLUTE = 0.01


@dataclasses.dataclass(frozen=True)
class _Metadata:
    __pydantic_config__ = CLOSED

    format: int
    observations: Annotated[list[ObservationInfo], Field(min_length=1)]


def save_observation(observation: Observation, path: str | Path) -> None:
    """Write one observation; see ``save_observations``."""
    save_observations([observation], path)


def load_observation(path: str | Path) -> Observation:
    """Read a file that holds one observation.

    Raises:
        InputError: see ``load_observations``; or the file holds several.
    """
    observations = load_observations(path)
    if len(observations) != 1:
        raise InputError(
            f"{path} holds {len(observations)} observations where one is wanted; use load_observations"
        )
    return observations[0]


def save_observations(observations: Sequence[Observation], path: str | Path) -> None:
    """Write one safetensors file atomically: the path holds the whole file or what was there before.

    Raises:
        InputError: nothing to write, facts that are no JSON, or the file cannot be written.
    """
    path = Path(path)
    if not observations:
        raise InputError("there are no observations to save")
    if any(observation.known for observation in observations):
        raise InputError("a file of observations holds no known texts; save the observations without them")
    try:
        facts = [_plain(dataclasses.asdict(observation.info)) for observation in observations]
        text = json.dumps({"format": FORMAT, "observations": facts}, allow_nan=False, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"the public facts cannot be written as JSON ({error})") from None
    _public_facts(path, text)  # raises if it could not be read again
    # Copies: safetensors refuses tensors that share memory, as the rows of one packed pass may.
    tensors = {
        f"states.{i}": o.states.detach().cpu().contiguous().clone() for i, o in enumerate(observations)
    }
    save_tensors(path, tensors, {METADATA_KEY: text})


def load_observations(path: str | Path) -> list[Observation]:
    """Read every observation of a file.

    Raises:
        InputError: the file is missing, truncated, foreign, of a newer format, or holds NaN or infinity.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(f"no observation file at {path}")
    try:
        with safe_open(path, framework="pt") as file:
            facts = _public_facts(path, (file.metadata() or {}).get(METADATA_KEY))
            expected = [f"states.{i}" for i in range(len(facts))]
            if sorted(file.keys()) != sorted(expected):
                raise InputError(
                    f"{path} is damaged: it should hold the tensors states.0 to {expected[-1]} and no more"
                )
            tensors = [file.get_tensor(name) for name in expected]
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path} is truncated or no observation file ({error})") from None
    return [
        _observation(path, i, states, info)
        for i, (states, info) in enumerate(zip(tensors, facts, strict=True))
    ]


def load_site(path: str | Path, layer: int | None = None, stream: str | None = None) -> list[Observation]:
    """Read the observations of one site from a file, which may hold those of several.

    A file of one site is read whatever is asked for. Of several the layer and stream choose; where only the layer is
    given, the stream is ``resid``, if the file has it there.

    Args:
        layer, stream: of the site; None where it is open.

    Raises:
        InputError: see ``load_observations``; or layer and stream leave several sites, or none.
    """
    found = load_observations(path)
    sites = list(dict.fromkeys(one.info.site for one in found))
    if len(sites) > 1:
        fits = [s for s in sites if layer in (None, s.layer) and stream in (None, s.stream)]
        if len(fits) > 1 and stream is None:
            fits = [s for s in fits if s.stream == "resid"] or fits
        if len(fits) != 1:
            held = ", ".join(_sites_in_words(sites))
            raise InputError(
                f"{path} holds states of several sites; choose one by --layer and --stream: {held}"
            )
        sites = fits
    return [one for one in found if one.info.site == sites[0]]


def _sites_in_words(sites: Sequence[Site]) -> list[str]:
    """Return each stream with its layers: ``resid at 1 to 30``."""
    layers: dict[str, list[int]] = {}
    for site in sites:
        layers.setdefault(site.stream, []).append(site.layer)
    return [
        f"{stream} at {min(own)}" + (f" to {max(own)}" if len(own) > 1 else "")
        for stream, own in layers.items()
    ]


def parts_of_attention(info: ObservationInfo) -> bool:
    """Return whether rows are parts of an attention's output, as nodes of Cascade receive them, and no states."""
    return "heads" in info.facts


def check_observation(observation: Observation, model: TruncatedModel, *, any_width: bool = False) -> None:
    """Refuse an observation that the truncated model cannot have produced.

    Args:
        any_width: the attack checks the width itself; parts of an attention's output have many widths anyway.

    Raises:
        InputError: another width, another model (by signature), or another layer or stream.
    """
    info, width = observation.info, observation.states.shape[1]
    if extra_rows(info) >= len(observation.states):
        raise InputError(
            f"of {len(observation.states)} rows {extra_rows(info)} should be no token's, so that no token is left"
        )
    view = projection_of(info)
    logits = info.site.stream == "logits"
    expected = view.count if view is not None else model.vocab_size if logits else model.width
    if width != expected and not any_width and not parts_of_attention(info):
        raise InputError(
            f"the observation is {width} wide (it names the model {info.model}), "
            f"{model.ref.name} is {expected} wide"
        )
    check_info(info, model)


def check_info(info: ObservationInfo, model: TruncatedModel) -> None:
    """Refuse public facts of another model or site than the truncated model's.

    Raises:
        InputError: another model (by signature), or another layer or stream.
    """
    if not same_signature(info.signature, model.signature):
        raise InputError(
            f"the observation comes from other weights (it names the model {info.model}) "
            f"than those of {model.ref.name}"
        )
    if info.site != model.site:
        raise InputError(
            f"the observation was taken from {info.site}, the truncated model gives {model.site}; "
            f"use --layer {info.site.layer} --stream {info.site.stream}"
        )


def same_signature(signature: Sequence[float], other: Sequence[float]) -> bool:
    """Return whether every entry agrees within 2 %, or within 1 % of the entries' root mean square."""
    if len(signature) != len(other) or not signature:
        return False
    slack = SIGNATURE_ABSOLUTE * math.sqrt(sum(x * x for x in other) / len(other))
    return all(
        abs(a - b) <= SIGNATURE_RELATIVE * max(abs(a), abs(b)) + slack
        for a, b in zip(signature, other, strict=True)
    )


def _public_facts(path: Path, text: str | None) -> list[ObservationInfo]:
    """Return the public facts in a file's metadata, every field checked."""
    if text is None:
        raise InputError(f"{path} is no observation file: its metadata has no entry {METADATA_KEY!r}")
    where = f"{path}, metadata {METADATA_KEY!r}"
    return parse(text, _Metadata, where, FORMAT).observations


def _observation(path: Path, i: int, states: torch.Tensor, info: ObservationInfo) -> Observation:
    if states.ndim != 2 or not states.is_floating_point():
        shape = f"{str(states.dtype).removeprefix('torch.')} {tuple(states.shape)}"
        raise InputError(
            f"{path}, observation {i}: states should be floating-point rows × width, not {shape}"
        )
    try:
        return Observation(states, info)
    except InputError as error:
        raise InputError(f"{path}, observation {i}: {error}") from None


def _plain(value: Any) -> Any:
    """Convert tuples to lists and mappings to dictionaries, so that JSON reads what it writes."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
