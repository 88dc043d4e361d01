"""Hide from an attacker what he does not know of a defense, and give him what he can put in its place.

Who knows the public facts alone cannot run the defense's code. He can run the lab's own defenses that have the same
facts: these stand in for it, and where a fact says nothing, he takes the rows for plain. Who knows nothing sees rows,
and tries one supposition after another (``hiddenlab.eval.assess.ensemble.Step.supposes``).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from hiddenlab.attacker import Attacker
from hiddenlab.channels import Channel
from hiddenlab.errors import HiddenlabError, InputError
from hiddenlab.input_noise import CLIPPED, LAPLACE
from hiddenlab.models import TruncatedModel
from hiddenlab.projections import FACT as PROJECTION
from hiddenlab.row_facts import KEPT, NOISE, ROW_SPACE, extra_rows, kept_share, rank_of
from hiddenlab.secret_maps import FACT as MAPS
from hiddenlab.stages import has_unknown_strength, with_supposed
from hiddenlab.types import DTYPE_NAMES, KnownText, Observation, ObservationInfo

MAPPED = {"columns": "orthogonal", "each-row": "orthogonal:fresh=row"}  # fact -> the stage that stands in


def as_known(observation: Observation, model: TruncatedModel, attacker: Attacker) -> Observation:
    """Return an observation with what an attacker knows of it.

    Args:
        model: of the attacker.

    Raises:
        InputError: he knows nothing of rows that are no states.
    """
    if attacker.knows == "code":
        return observation
    states, info = observation.states, observation.info
    if attacker.knows == "facts":
        info = with_supposed(replace(info, channel=stand_ins(info)))
    elif states.shape[1] != model.width:
        raise InputError(
            f"these rows are {states.shape[1]} wide, and states of the model {model.width}: who knows nothing of the "
            "defense has no attack on them; give --knows facts"
        )
    else:
        dtype = str(states.dtype).removeprefix("torch.")
        told = dtype if dtype in DTYPE_NAMES else "float32"
        info = with_supposed(ObservationInfo(info.model, info.signature, info.site, provider_dtype=told))
    known = tuple(KnownText(text.tokens, as_known(text.shown, model, attacker)) for text in observation.known)
    return Observation(states, info, known)


def stand_ins(info: ObservationInfo) -> tuple[str, ...]:
    """Return specs of the lab's own stages that have the public facts of an observation; none where facts are no use.

    A stage whose strength is secret stays: that there is one is public.
    """
    try:
        return Channel.parse([spec for facts in FACTS for spec in facts(info)]).specs
    except (HiddenlabError, TypeError, ValueError, KeyError, AttributeError):  # of somebody else's defense
        return ()


def _provider(info: ObservationInfo) -> Iterator[str]:
    if info.quantization is not None:
        yield info.quantization
    elif info.provider_dtype != "float32":
        yield f"dtype:{info.provider_dtype}"


def _inputs(info: ObservationInfo) -> Iterator[str]:
    yield from ("random-prefix" for _ in range(info.prefix_tokens))
    if info.noise_sigma is not None:
        yield f"gaussian:sigma={info.noise_sigma!r}"
    for noise in info.facts.get(LAPLACE, ()):
        clipped = CLIPPED in info.facts
        name = "snd" if clipped or noise["law"] != "sphere" else "dchi"
        yield f"{name}:eta={noise['eta']!r}" + ",noise=code" * (noise["law"] != "sphere")
    yield from (stage.spec for stage in Channel.parse(info.channel).defenses if has_unknown_strength(stage))


def _rows(info: ObservationInfo) -> Iterator[str]:
    if (more := extra_rows(info)) and "rows" not in info.facts.get(MAPS, ()):
        yield f"decoys:count={more}"
    if ROW_SPACE in info.facts and (rank := rank_of(info.facts)) is not None:
        yield f"truncated-svd:rank={rank}"
    if KEPT in info.facts:
        yield f"sparsify:keep={kept_share(info)!r}"
    for noise in info.facts.get(NOISE, ()):
        yield f"output-noise:{_options(noise, 'sigma', 'scale', 'kind')}"


def _secrets(info: ObservationInfo) -> Iterator[str]:
    for of in info.facts.get(MAPS, ()):
        if of == "rows":
            yield "row-mixing" + f":shield={extra_rows(info)}" * bool(extra_rows(info))
        else:
            yield MAPPED[of]
    if info.columns_permuted is not None:
        yield "hidden-perm" + ":shared" * (info.columns_permuted == "shared")
    if info.rows_permuted:
        yield "seq-perm"


def _views(info: ObservationInfo) -> Iterator[str]:
    if PROJECTION in info.facts:
        yield f"project:{_options(info.facts[PROJECTION], 'count', 'seed', 'kind')}"
    if "toploc" in info.facts:
        yield f"toploc:k={info.facts['toploc']['k']}" + ",keyed=true" * bool(info.facts["toploc"]["keyed"])
    if "logprobs" in info.facts:
        yield f"logprobs:k={info.facts['logprobs']['k']}"


def _options(fact: Mapping[str, Any], *names: str) -> str:
    return ",".join(f"{name}={fact[name]}" for name in names if name in fact)


FACTS: tuple[Callable[[ObservationInfo], Iterator[str]], ...] = (_provider, _inputs, _rows, _secrets, _views)
