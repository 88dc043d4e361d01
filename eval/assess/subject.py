"""Say what is assessed: a defense with prompts and planted secrets, and the rows that it releases of these."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace

from hiddenlab.attacker import Attacker
from hiddenlab.channels import Channel
from hiddenlab.errors import InputError
from hiddenlab.eval.assess.readings import truth_of
from hiddenlab.eval.assess.secrets import Planted, planted
from hiddenlab.eval.assess.session import release_all
from hiddenlab.eval.files import contents_of
from hiddenlab.job import Case
from hiddenlab.models import TruncatedModel
from hiddenlab.models.tokens import most_tokens
from hiddenlab.prompts import Prompt
from hiddenlab.text import count_of
from hiddenlab.types import GroundTruth, Observation, ObservationInfo, Progress, silent


@dataclass(frozen=True)
class Subject:
    """What is assessed: a defense with prompts, or rows that it released.

    Attributes:
        channel: the defense; None where its rows come from a file. cases: the prompts. texts: with planted secrets.
        defense: specs of the stages. name: what the model is called. attacker: what he has beside the rows.
    """

    model: TruncatedModel
    channel: Channel | None
    cases: list[Case]
    texts: list[Planted]
    seed: int
    defense: tuple[str, ...]
    name: str
    attacker: Attacker = field(default_factory=Attacker)

    @property
    def truth(self) -> bool:
        """Whether the prompts are known."""
        return all(case.truth is not None for case in self.cases)


def named(prompts: str | Sequence[str | Prompt]) -> list[Prompt]:
    texts = [prompts] if isinstance(prompts, str) else list(prompts)
    if not texts:
        raise InputError("there are no prompts to assess a defense with; leave them out for the shipped ones")
    return [
        Prompt(f"p{number:03d}", text, "PROMPT") if isinstance(text, str) else text
        for number, text in enumerate(texts, 1)
    ]


def distinct(cases: Sequence[Case], progress: Progress) -> list[Case]:
    """Return each prompt once: of two that are the same one says nothing more, and the bounds would count it."""
    kept = dict[object, Case]()
    for case in cases:
        kept.setdefault(case.index if case.truth is None else case.truth.tokens, case)
    if left_out := len(cases) - len(kept):
        progress(f"left out {count_of(left_out, 'prompt')} that have the same tokens as another one", 0, 0)
    return list(kept.values())


def plantable(model: TruncatedModel, seed: int, progress: Progress) -> list[Planted]:
    """Return secrets in texts that the model reads; none where it cannot."""
    texts, most = planted(seed), most_tokens(model.module)
    if model.tokenizer is None:
        progress("no secrets are planted: the model has no tokenizer to read a text with", 0, 0)
        return []
    if most is not None and (length := max(len(model.tokenize(one.text)) for one in texts)) > most:
        progress(
            f"no secrets are planted: their texts have up to {length} tokens, and the model takes {most}",
            0,
            0,
        )
        return []
    return texts


def released(subject: Subject, progress: Progress = silent) -> tuple[Subject, list[Observation]]:
    """Return what the attacker sees: the rows of a file, or what the defense releases of prompts and planted texts.

    The truths of the subject that is returned hold the tokens that ran, where the defense replaced some.

    Raises:
        InputError: what the defense publishes are no JSON values.
    """
    if subject.channel is None:
        return subject, [case.observation for case in subject.cases if case.observation is not None]
    made = release_all(
        subject.model, subject.channel, everything(subject), subject.seed, subject.attacker, progress
    )
    cases = [
        replace(case, truth=replace(truth_of(case), computed=truth.computed))
        for case, (_, truth) in zip(subject.cases, made, strict=False)
    ]
    for observation, _ in made:
        _public(observation.info)
    return replace(subject, cases=cases), [observation for observation, _ in made]


def everything(subject: Subject) -> list[Case]:
    return [*subject.cases, *_planted_cases(subject, subject.texts)]


def _planted_cases(subject: Subject, texts: Sequence[Planted]) -> list[Case]:
    first = 1 + max(case.index for case in subject.cases)
    return [
        Case(first + i, f"secret {i + 1}", GroundTruth(tuple(subject.model.tokenize(one.text))))
        for i, one in enumerate(texts)
    ]


def digest(observations: Sequence[Observation], attacks: Sequence[str] = ()) -> str:
    """Return a digest of rows, public facts and code of attacks: whatever was kept of other ones is not about these.

    Args:
        attacks: specs; those that name files count with what is in these.
    """
    digest = hashlib.sha256(json.dumps(contents_of({"attack": list(attacks)})).encode() if attacks else b"")
    seen = [
        [one, *([one.first] if one.first else []), *(text.shown for text in one.known)]
        for one in observations
    ]
    for one in (rows for group in seen for rows in group):
        digest.update(_public(one.info).encode())
        digest.update(one.states.detach().cpu().float().numpy().tobytes())
    return digest.hexdigest()


def _public(info: ObservationInfo) -> str:
    """Return public facts as JSON.

    Raises:
        InputError: they hold something else, in which no attack would look for a prompt.
    """
    try:
        return json.dumps(asdict(info), sort_keys=True)
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(
            f"the public facts of {' + '.join(info.channel) or 'the rows'} are no JSON values ({error}); a defense "
            "publishes numbers, texts, lists and dictionaries"
        ) from None


def check_one_channel(infos: Sequence[ObservationInfo]) -> None:
    """Refuse rows that several defenses released: a verdict is on one.

    Raises:
        InputError: they passed several channels.
    """
    channels = list(dict.fromkeys(info.channel for info in infos))
    if len(channels) > 1:
        named = ", ".join(" + ".join(channel) or "identity" for channel in channels)
        raise InputError(f"the rows are of {len(channels)} defenses, and one is assessed at a time: {named}")
