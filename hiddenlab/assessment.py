"""Hold what an assessment of a defense found: the verdict, and the figures that it rests on."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field, with_config
from typing_extensions import TypedDict

from hiddenlab.repeated import Reads
from hiddenlab.text import html
from hiddenlab.utils.schema import CLOSED, Count, Finite, Layer

Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Status = Literal["BROKEN", "LEAKS", "HELD", "INCONCLUSIVE"]


@with_config(CLOSED)
class Has(TypedDict):
    """What the attacker knows, and has beside the rows (``hiddenlab.attacker``); ``words`` follow "an attacker who".

    ``reads`` is what he makes of several releases: attacks read their mean, the first alone (of some prompts at least),
    or any of them, since they are the same. None: he sees one.
    """

    knows: str
    key: str
    releases: Count
    known: Count
    chosen: Count
    attacks: list[str]
    words: str
    reads: Reads | None


@with_config(CLOSED)
class Interval(TypedDict):
    """A figure, its 95 % interval and the number of prompts behind it."""

    value: Finite
    low: Finite
    high: Finite
    n: Count


@with_config(CLOSED)
class Told(TypedDict):
    """What one attack did: shares are of all tokens of the prompts; None where it read none, or no truth is known."""

    attack: str
    status: str
    reason: str
    seconds: Finite
    prompts: Count
    token_accuracy: Share | None
    verified: Share | None


@with_config(CLOSED)
class Undefended(TypedDict):
    """What one attack reads of the same prompts without the defense."""

    attack: str
    status: str
    seconds: Finite
    leak: Interval


@with_config(CLOSED)
class Utility(TypedDict):
    """What the defense does to the model's own answers, or why that was not measured."""

    reason: NotRequired[str]
    perplexity: NotRequired[Interval]
    clean_perplexity: NotRequired[Interval]
    kl: NotRequired[Interval]
    top1_agreement: NotRequired[Interval]


@with_config(CLOSED)
class Cost(TypedDict):
    """Time and bytes of a release, over one without the defense, or why they were not measured."""

    reason: NotRequired[str]
    time_over_plain: NotRequired[Finite]
    bytes_over_plain: NotRequired[Finite]


@with_config(CLOSED)
class Secrets(TypedDict):
    """How many planted secrets were read, of how many."""

    read: Count
    planted: Count


@with_config(CLOSED)
class Believed(TypedDict):
    """What the attacker takes to be one prompt, and by which attack; None where none read anything.

    ``right`` counts tokens at their own places, and is None where no truth is known.
    """

    id: str
    attack: str | None
    tokens: Count
    right: Count | None
    verified: Count


@with_config(CLOSED)
class Leakiest(TypedDict):
    """The prompt of which most was read, beside what was read; ``text`` is the true one, None where it is not known."""

    id: str
    attack: str
    text: str | None
    recovered: str
    token_accuracy: Share | None
    verified: Share


@with_config(CLOSED)
class Findings(TypedDict):
    """Everything that an assessment found, as ``hiddenlab assess --json`` prints it; None is: not measured.

    ``leak`` is the share of the tokens that cannot be guessed and came back; without a truth, of the tokens that
    attacks verified. ``oracle`` is the same if the best attack of each prompt were known. ``rare_accuracy`` is
    the share that was read of the tokens which a language model expects with less than 1 %. ``shown_accuracy`` is the
    share that was read of the tokens that ran in place of the prompts', where the defense replaced some.
    """

    format: Literal[1]
    status: Status
    exit_code: Count
    sentence: str
    defense: list[str]
    model: str
    layer: Layer
    stream: str
    seed: int
    minutes: Finite
    attacker: Has
    prompts: Count
    truth: bool
    leak: Interval
    control: Share | None
    exact: Interval | None
    token_accuracy: Share | None
    verified: Share
    rouge_l: Interval | None
    rare_accuracy: Interval | None
    secrets: Secrets | None
    shown_accuracy: Share | None
    oracle: Interval | None
    attacks: list[Told]
    undefended: list[Undefended]
    utility: Utility
    cost: Cost
    readings: list[Believed]
    leakiest: Leakiest | None


@dataclass(frozen=True, repr=False)
class Assessment:
    """Hold the verdict on a defense; printed, it is one sentence.

    Attributes:
        status: ``BROKEN``, ``LEAKS``, ``HELD`` or ``INCONCLUSIVE``. sentence: the verdict with its figures.
        leak: share of the tokens that cannot be guessed and came back. low, high: its 95 % interval over prompts.
        findings: everything else, as ``hiddenlab assess --json`` prints it. path: the record; None where none was kept.
    """

    status: Status
    sentence: str
    leak: float
    low: float
    high: float
    findings: Mapping[str, Any]
    path: Path | None = None

    @classmethod
    def of(cls, findings: Mapping[str, Any], path: Path | None = None) -> "Assessment":
        """Return the verdict of some findings."""
        leak = findings["leak"]
        return cls(
            findings["status"], findings["sentence"], leak["value"], leak["low"], leak["high"], findings, path
        )

    def __repr__(self) -> str:
        return self.sentence

    def _repr_html_(self) -> str:
        first, _, rest = self.sentence.partition(self.status)
        return f"<p>{html(first)}<strong>{html(self.status)}</strong>{html(rest)}</p>"
