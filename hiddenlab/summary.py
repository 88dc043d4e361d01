"""Compute the figures of a run from its samples, with their names and number formats."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean, median
from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field, with_config
from typing_extensions import TypedDict

from hiddenlab.text import Status, count_of
from hiddenlab.utils.schema import CLOSED, Count, Finite, TokenId

Sample = dict[str, Any]  # one line of samples.jsonl, see ``hiddenlab.batch.sample_of``
NOT_APPLICABLE = "not applicable"  # the status of a prompt whose observation an attack cannot use
ENDED = "ended"  # the status of the line that says how an attack of an assessment ended
NO_STATE = "no state of this site"  # the stop reason of a search that gave up early, since no row fits
# stop reason -> what to tell the user
ADVICE = {NO_STATE: "no row looks like a state of this site; check layer, norm, padding, missing first rows"}

Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@with_config(CLOSED)
class _PerToken(TypedDict):
    """Lists with one entry for each recovered token, see ``hiddenlab.types.TokenPrediction``."""

    row: list[Annotated[int, Field(ge=-1)]]
    distance: list[Finite | None]
    margin: list[Finite | None]
    evaluated: list[Count]
    verified: list[bool]


@with_config(CLOSED)
class _Scored(TypedDict):
    index: Count
    id: str
    text: str | None
    truth_ids: list[TokenId] | None
    recovered: str | None
    exact: bool | None
    token_accuracy: Share | None
    bag_of_tokens_recall: Share | None
    rouge_l: Share | None
    bleu: Share | None


@with_config(CLOSED)
class _NotApplicable(_Scored):
    status: Literal["not applicable"]
    reason: str


@with_config(CLOSED)
class _Attacked(_Scored):
    status: Literal["attacked"]
    held_tokens: NotRequired[Count]
    held_tokens_right: NotRequired[Count]
    missing_tokens: NotRequired[Count]
    missing_tokens_right: NotRequired[Count]
    shown_accuracy: NotRequired[Share]
    shown_ids: NotRequired[list[TokenId]]
    diagnosis: NotRequired[str]
    tokens: Count
    verified: Share
    evaluated_tokens: Count | None
    forward_calls: Count | None
    seconds: Amount | None
    prefill_seconds: Amount | None
    epsilon: Finite | None
    stop_reason: str | None
    recovered_ids: list[TokenId]
    positions: list[Count] | None
    spans: list[tuple[str, Status]]
    per_token: _PerToken


@with_config(CLOSED)
class _Tried(TypedDict):
    """Which attack of ``assess`` a line is of: the part of the assessment, and the attack's number there."""

    part: Literal["defended", "undefended"]
    step: Count
    attack: str


@with_config(CLOSED)
class _Read(_Attacked, _Tried):
    """What one attack of ``assess`` read of a prompt."""


@with_config(CLOSED)
class _Ended(_Tried):
    """How a turn of one attack of ``assess`` ended, with what it did in all."""

    status: Literal["ended"]
    turn: Count
    outcome: str
    reason: str
    seconds: Amount
    allowed: Amount
    refused: bool
    unusable: list[Count]


def sample_form(sample: Any, verb: str = "attack") -> Any:
    """Return the form of one sample of ``attack`` or ``assess``, by its status."""
    status = sample.get("status") if isinstance(sample, dict) else None
    if verb == "assess":
        return _Ended if status == ENDED else _Read
    return _NotApplicable if status == NOT_APPLICABLE else _Attacked


# name in the summary -> (label, how it is written)
FIGURES: dict[str, tuple[str, str]] = {
    "prompts": ("prompts", "count"),
    "not_applicable": ("prompts to which the attack does not apply", "count"),
    "exact": ("exact prompts", "share"),
    "token_accuracy": ("token accuracy", "share"),
    "bag_of_tokens_recall": ("tokens in any order", "share"),
    "held_token_accuracy": ("tokens of the shown rows", "share"),
    "missing_token_accuracy": ("tokens that no row shows", "share"),
    "rouge_l": ("ROUGE-L", "score"),
    "bleu": ("BLEU", "score"),
    "verified": ("verified tokens", "share"),
    "evaluated_tokens_per_token": ("evaluated tokens per token", "number"),
    "forward_calls_per_prompt": ("forward calls per prompt", "number"),
    "attack_seconds": ("attack, seconds", "number"),
    "prefill_seconds": ("one prefill, seconds", "number"),
    "slowdown_vs_prefill": ("attack over prefill", "times"),
    "setup_seconds": ("setup, seconds", "number"),
    "probe_seconds": ("probe training, seconds", "number"),
    "epsilon": ("epsilon (median)", "number"),
    "peak_memory_mb": ("peak memory, MB", "whole"),
}


def summarise(samples: Sequence[Sample]) -> dict[str, Any]:
    """Aggregate samples; None where nothing was measured, prompts marked not applicable left out.

    ``exact`` and ``verified`` are shares (of prompts, of all their tokens), the text scores means over prompts,
    ``epsilon`` the median of the prompts' thresholds. ``missing_token_accuracy`` is a share of the tokens before
    the last shown row that have no row of their own, and ``held_token_accuracy`` of those that have one; both are None
    where every token has one.
    """
    done = [s for s in samples if s["status"] != NOT_APPLICABLE]
    tokens = sum(s["tokens"] for s in done)
    attack, prefill = _total(done, "seconds"), _total(done, "prefill_seconds")
    evaluated, calls = _total(done, "evaluated_tokens"), _total(done, "forward_calls")
    epsilons = [s["epsilon"] for s in done if s.get("epsilon") is not None]
    return {
        "prompts": len(samples),
        "not_applicable": len(samples) - len(done),
        "tokens": tokens if done else None,
        **{
            name: _mean(done, name)
            for name in ("exact", "token_accuracy", "bag_of_tokens_recall", "rouge_l", "bleu")
        },
        **{f"{name}_token_accuracy": _share_of(done, f"{name}_tokens") for name in ("held", "missing")},
        "verified": sum(s["verified"] * s["tokens"] for s in done) / tokens if tokens else None,
        "evaluated_tokens_per_token": evaluated / tokens if evaluated is not None and tokens else None,
        "forward_calls_per_prompt": calls / len(done) if calls is not None else None,
        "attack_seconds": attack,
        "prefill_seconds": prefill,
        "slowdown_vs_prefill": attack / prefill if attack is not None and prefill else None,
        "epsilon": median(epsilons) if epsilons else None,
    }


def not_applicable(samples: Sequence[Sample]) -> str | None:
    """Return why the attack could not use any prompt's observation; None where it could, or there is no prompt."""
    attacked = any(sample["status"] != NOT_APPLICABLE for sample in samples)
    return None if attacked or not samples else samples[0]["reason"]


def advice(samples: Sequence[Sample]) -> list[str]:
    """Return what rows were found to be, or what to check where searches ended for a reason with a likely cause."""
    if told := [f"{sample['id']}: {sample['diagnosis']}" for sample in samples if "diagnosis" in sample]:
        return told
    reasons = [sample.get("stop_reason") for sample in samples]
    return [
        f"{reasons.count(reason)} of {count_of(len(samples), 'prompt')}: {text}"
        for reason, text in ADVICE.items()
        if reason in reasons
    ]


def conclusion(samples: Sequence[Sample]) -> str:
    """Say in a few sentences what an attack recovered, and how sure that is.

    Where a truth is known, right and wrong tokens are counted. Prompts without a truth are counted by themselves.
    """
    done = [s for s in samples if s["status"] != NOT_APPLICABLE]
    if not done:
        return "Nothing was attacked."
    scored = [s for s in done if s["exact"] is not None]
    unscored = [s for s in done if s["exact"] is None]
    tokens, verified = _verified(unscored)
    left_out = len(samples) - len(done)
    unused = f" {count_of(left_out, 'prompt')} could not be attacked." if left_out else ""
    if not scored:
        if not tokens:
            return f"No token was recovered.{unused}"
        what = f"{verified} of {count_of(tokens, 'token')} recovered and verified"
        more = "" if verified == tokens else "; the others are the attack's best guesses"
        return f"{what}{more}. There is no truth to compare with.{unused}"
    exact = sum(bool(s["exact"]) for s in scored)
    known, sure = _verified(scored)
    right = round(sum(s["token_accuracy"] * s["tokens"] for s in scored))
    wrong = wrong_but_verified(scored)
    prompts = "The prompt" if len(scored) == 1 else f"{exact} of {count_of(len(scored), 'prompt')}"
    verb = "was" if len(scored) == 1 else "were"
    if exact == len(scored):
        first = f"{prompts} {verb} recovered exactly"
    elif exact or len(scored) > 1:
        first = f"{prompts} {verb} recovered exactly, with {right} of {count_of(known, 'token')} right"
    else:
        first = f"{prompts} was not recovered exactly: {right} of {count_of(known, 'token')} are right"
    behind = _behind(scored)
    unread = (
        f" {count_of(behind, 'token')} of the truth {'comes' if behind == 1 else 'come'} after the last one found."
        if behind
        else ""
    )
    shown = "all verified" if sure == known else f"{sure} verified"
    caution = f" {count_of(wrong, 'verified token')} {'is' if wrong == 1 else 'are'} wrong." if wrong else ""
    others = (
        f" {count_of(len(unscored), 'other prompt')} cannot be compared with a truth: "
        f"{verified} of {count_of(tokens, 'token')} verified."
        if unscored
        else ""
    )
    return (
        f"{first} ({count_of(known, 'token')}, {shown}).{_replaced(scored)}{unread}{caution}{others}{unused}"
    )


def _replaced(samples: Sequence[Sample]) -> str:
    """Say how many of the tokens that the model ran were read, where a defense replaced the prompt's."""
    behind = [s for s in samples if "shown_ids" in s]
    if not behind:
        return ""
    read = round(sum(s["shown_accuracy"] * len(s["shown_ids"]) for s in behind))
    total = sum(len(s["shown_ids"]) for s in behind)
    return (
        f" The model ran other tokens than the prompt's, and {read} of {total} of those were read: what is verified is "
        "verified of them."
    )


def _verified(samples: Sequence[Sample]) -> tuple[int, int]:
    """Count the tokens of samples, and those of them that are verified."""
    return sum(s["tokens"] for s in samples), round(sum(s["verified"] * s["tokens"] for s in samples))


def _behind(samples: Iterable[Sample]) -> int:
    """Count the tokens of known truths that come after the last token that the attack recovered."""
    count = 0
    for sample in samples:
        truth, got, places = sample["truth_ids"], sample["recovered_ids"], sample["positions"]
        if places is None or len(truth) == len(got):
            places = range(len(got))
        count += max(0, len(truth) - 1 - max(places, default=-1))
    return count


def wrong_but_verified(samples: Iterable[Sample]) -> int:
    """Count the tokens that an attack verified although they are wrong, where the truth is known.

    Tokens are compared at their own places, as in ``hiddenlab.scoring.places_of``. Verified means that the weights gave
    this row: where a defense replaced tokens, they are compared with those that the model ran.
    """
    wrong = 0
    for sample in samples:
        truth, got = sample.get("shown_ids", sample["truth_ids"]), sample["recovered_ids"]
        if truth is None:
            continue
        places = sample["positions"]
        if places is None or len(truth) == len(got):
            places = range(len(got))
        for place, token, sure in zip(places, got, sample["per_token"]["verified"], strict=True):
            wrong += sure and (place >= len(truth) or truth[place] != token)
    return wrong


def figure(name: str, value: Any, kind: str | None = None) -> str:
    """Return a value of a summary as text; a dash where it was not measured.

    Args:
        kind: its number format, where the summary does not know the name.
    """
    if value is None:
        return "–"
    kind = kind or FIGURES[name][1]
    if kind == "share":
        # 99.96 % must not read as 100 %.
        return "100 %" if value == 1 else f"{min(100 * value, 99.9):.1f} %"
    if kind == "score":
        return f"{value:.3f}"
    whole = kind in ("count", "whole") or value >= 1000
    number = f"{value:,.0f}" if whole else f"{value:.2f}" if kind == "times" else f"{value:.4g}"
    return f"{number} ×" if kind == "times" else number


def figures_of(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the label and the formatted value of each figure of a summary that was measured."""
    for name, (label, _) in FIGURES.items():
        value = summary.get(name)
        if value is not None and (name != "not_applicable" or value):
            yield label, figure(name, value)


def _mean(samples: Sequence[Sample], name: str) -> float | None:
    values = [float(s[name]) for s in samples if s.get(name) is not None]
    return fmean(values) if values else None


def _share_of(samples: Sequence[Sample], name: str) -> float | None:
    """Return the share of counted tokens that are right; None where none is counted."""
    counted, right = (sum(s.get(key) or 0 for s in samples) for key in (name, f"{name}_right"))
    return right / counted if counted else None


def _total(samples: Sequence[Sample], name: str) -> int | float | None:
    values = [s[name] for s in samples if s.get(name) is not None]
    return sum(values) if values and len(values) == len(samples) else None
