"""Choose a model's engine by checking it, once for each model and version of this code.

The packed engine is checked with the model's own weights on short prompts. Borders that short prompts do not reach
(windows, chunks, rotary factors) are checked on a small random twin of the same configuration. Where anything differs,
the plain engine runs the model.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import transformers
from torch import nn

from hiddenlab.errors import InputError
from hiddenlab.models.own_code import is_own
from hiddenlab.models.reading import OTHER_MODEL, quiet_transformers, reading_model
from hiddenlab.models.self_check import (
    TWIN_TOLERANCE,
    first_difference,
    misplaced_layer,
    not_causal,
    random_sequences,
    reads_embeddings,
)
from hiddenlab.models.twin import LENGTHS, UNCHECKED, build_twin
from hiddenlab.types import Site
from hiddenlab.utils.cache import cache_path
from hiddenlab.utils.digests import digest_of, digest_of_files
from hiddenlab.utils.files import write_file
from hiddenlab.utils.schema import CLOSED, read

if TYPE_CHECKING:
    from hiddenlab.models import TruncatedModel

ENGINES = ("auto", "packed", "plain")
SPREAD = 64  # values of each parameter that tell models apart
CODE = (Path(__file__).parent,)  # what an engine's check depends on
T = TypeVar("T")


@dataclass(frozen=True)
class Verdict:
    """What a check found.

    Attributes:
        causal: no later token changes an earlier state. difference: why the packed engine is not right, or empty.
        embeddings: states from input embeddings are those from token ids.
        misplaced: a layer whose output is not its hidden state, which cannot be attacked by its number; 0 is none.
    """

    __pydantic_config__ = CLOSED

    causal: bool = True
    difference: str = ""
    embeddings: bool = True
    misplaced: int = 0


def choose_engine(model: "TruncatedModel", config: Any, asked: str = "auto") -> dict[str, Any]:
    """Return what ``TruncatedModel`` is told of its engine: ``packed`` where that is right, else ``plain``, and why.

    Args:
        model: the truncated model in the packed engine, its site any stream but an inner one.
        config: the whole model's. asked: ``auto``, or an engine that the user wants.

    Raises:
        InputError: the model is bidirectional, its layers are not its own list, or ``packed`` is wrong for it.
    """
    site = [asdict(model.site), str(model.dtype), model.device.type, model.quantization]
    own = {"config": facts_of(config), "weights": fingerprint(model.module), "site": site}
    verdict = remembered("engine", own, Verdict, lambda: _own_verdict(model), CODE)
    name = model.ref.name
    if not verdict.causal:
        raise InputError(
            f"{name} is an encoder-only (bidirectional) model, and an attack needs a causal decoder; {OTHER_MODEL}"
        )
    facts = {"config": facts_of(config)}
    if is_own(model.module):  # transformers' model of this kind, if there is one, has other borders
        twin = Verdict(difference=UNCHECKED)
    else:
        twin = remembered("engine-twin", facts, Verdict, lambda: _twin_verdict(config), CODE)
    if twin.misplaced:
        raise InputError(
            f"{name} is of type {config.model_type}, whose layer {twin.misplaced} does not give the states that "
            f"transformers shows for it; {OTHER_MODEL}"
        )
    difference = verdict.difference or twin.difference
    if asked == "packed" and difference:
        raise InputError(f"the packed engine does not reproduce {name} ({difference}); leave --engine out")
    engine = "plain" if difference or asked == "plain" else "packed"
    return {"engine": engine, "difference": difference, "embeddings": verdict.embeddings}


def _own_verdict(model: "TruncatedModel") -> Verdict:
    """Check a model with its own weights.

    Raises:
        InputError: it does not run on token ids alone, or its states overflow.
    """
    with reading_model(f"cannot run the first layers of {model.ref.name} on token ids", f"; {OTHER_MODEL}"):
        if not_causal(model):
            return Verdict(causal=False)
    return Verdict(difference=str(first_difference(model) or ""), embeddings=reads_embeddings(model))


def _twin_verdict(config: Any) -> Verdict:
    """Check a small random twin, with prompts beyond its borders; without a twin nothing is known of borders."""
    from hiddenlab.models import ModelRef, TruncatedModel
    from hiddenlab.models.checkpoint import decoder_layers

    try:
        module = build_twin(config)
        with reading_model(UNCHECKED):
            twin = TruncatedModel(module, ref=ModelRef("twin", ""), site=Site(len(decoder_layers(module))))
            misplaced = misplaced_layer(module, random_sequences(twin, LENGTHS)[0])
    except InputError as error:
        return Verdict(difference=str(error))
    difference = first_difference(twin, LENGTHS, TWIN_TOLERANCE)
    return Verdict(
        difference=f"{difference} (a small random copy)" if difference else "", misplaced=misplaced or 0
    )


def remembered(
    kind: str, key: Mapping[str, Any], form: type[T], compute: Callable[[], T], code: Sequence[Path]
) -> T:
    """Return what a check found before, or compute and keep it; without a cache that can be written it is computed.

    Args:
        kind: of the check. key: what it depends on, as JSON values. form: the dataclass of its result.
        code: folders with the code that it checks: what other code found counts no more.
    """
    path: Path | None = None
    with suppress(InputError):
        path = cache_path("checks", f"{kind}-{digest_of({**key, 'code': _digest_of_code(tuple(code))})}.json")
    if path is not None and path.is_file():
        with suppress(InputError):
            return read(path, form)
    with quiet_transformers():
        result = compute()
    if path is not None:
        with suppress(InputError, ValueError):  # NaN is no JSON
            write_file(path, json.dumps(asdict(result), allow_nan=False))  # type: ignore[call-overload]
    return result


def fingerprint(module: nn.Module) -> str:
    """Return a digest of values spread over every parameter: models of one configuration have different ones."""
    values = []
    for parameter in module.parameters():
        flat = parameter.detach().flatten()
        places = torch.linspace(0, max(0, len(flat) - 1), min(SPREAD, len(flat)), dtype=torch.float64).long()
        values.append([repr(value) for value in flat[places.to(flat.device)].float().tolist()])
    return digest_of(values)


def facts_of(config: Any) -> dict[str, Any]:
    """Return a configuration as JSON values, without where it lies."""
    values = json.loads(config.to_json_string(use_diff=False))
    return {
        name: value for name, value in values.items() if name not in ("_name_or_path", "transformers_version")
    }


@cache
def _digest_of_code(folders: tuple[Path, ...]) -> str:
    """Return a digest of the folders' Python files and of the libraries' versions."""
    files = sorted(file for folder in folders for file in folder.glob("*.py"))
    return digest_of([torch.__version__, transformers.__version__, digest_of_files(files)])
