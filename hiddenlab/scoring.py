"""Compare what an attack recovered with the truth: as text, as tokens, and piece by piece."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hiddenlab import registry
from hiddenlab.errors import InputError
from hiddenlab.models import TruncatedModel
from hiddenlab.text import Status
from hiddenlab.types import AttackResult, GroundTruth

MISSING = -1  # stands for a token that was not recovered, and equals none


@dataclass(frozen=True)
class Score:
    """How close a recovered prompt is to the true one; all are shares between 0 and 1.

    Attributes:
        exact: every token is right. token_accuracy: right tokens, each at its own place. bag_of_tokens_recall: tokens
            of the truth that were recovered anywhere. rouge_l, bleu: of the texts.
        verified: tokens of the truth whose recovered token is verified.
        shown_accuracy: recovered tokens that are those which the model ran, where a defense replaced the prompt's by
            others; None where it replaced none.
    """

    exact: bool
    token_accuracy: float
    bag_of_tokens_recall: float
    rouge_l: float
    bleu: float
    verified: float
    shown_accuracy: float | None = None


def score(result: AttackResult, truth: GroundTruth) -> Score:
    """Score a result against the truth; tokens that were not recovered count as wrong.

    Raises:
        InputError: the truth has no text (it was read from a file).
    """
    if result.text is None:
        raise InputError("the result has no text; take it from an attack's recover, or give it one")
    if truth.text is None:
        raise InputError("the truth has tokens but no text; give it one: dataclasses.replace(truth, text=…)")
    # Tokens behind missing ones are compared at their own places.
    aligned = dict(zip(places_of(result, truth), result.ids, strict=True))
    metric = registry.resolve("metrics", "text")
    figures = metric(
        truth_ids=list(truth.tokens),
        recovered_ids=[aligned.get(place, MISSING) for place in range(max(aligned, default=-1) + 1)],
        truth_text=truth.text,
        recovered_text=result.text,
    )
    sure = sum(token.verified for token in result.tokens)
    shown = None
    if truth.computed is not None:
        shown = sum(aligned.get(i) == token for i, token in enumerate(truth.computed)) / len(truth.computed)
    return Score(**figures, verified=sure / max(1, len(truth.tokens)), shown_accuracy=shown)


def tokens_by_row(result: AttackResult, truth: GroundTruth, shown: Sequence[int] | None) -> dict[str, int]:
    """Count the tokens that have a row, those before the last row that have none, and how many of each were recovered.

    Args:
        shown: positions that have a row; None where all have.

    Returns:
        ``held_tokens``, ``held_tokens_right``, ``missing_tokens`` and ``missing_tokens_right``. Nothing where every
        token has a row, or the truth is that of the rows alone.
    """
    if shown is None or max(shown, default=0) >= len(truth.tokens):
        return {}
    aligned = dict(zip(places_of(result, truth), result.ids, strict=True))
    counts = dict[str, int]()
    for name, places in (("held", set(shown)), ("missing", set(range(max(shown, default=0))) - set(shown))):
        counts[f"{name}_tokens"] = len(places)
        counts[f"{name}_tokens_right"] = sum(aligned.get(place) == truth.tokens[place] for place in places)
    return counts


def places_of(result: AttackResult, truth: GroundTruth | None) -> Sequence[int]:
    """Return the position in the truth of each recovered token; the truth of one node's rows holds these alone."""
    if result.positions is None or (truth is not None and len(truth.tokens) == len(result.tokens)):
        return range(len(result.tokens))
    return result.positions


def pieces_of(
    model: TruncatedModel, result: AttackResult, truth: GroundTruth | None = None
) -> Iterator[tuple[str, Status]]:
    """Yield the recovered text in pieces with a status: exact or wrong with a truth, otherwise verified or unverified.

    Tokens that lack are a piece that counts them, ``⟨3⟩``; those behind the last recovered one only with a truth.
    Several tokens may share one character; such a piece has the worst of their statuses.
    """
    order: tuple[Status, ...] = ("verified", "exact", "unverified", "wrong")
    ids, start, read, expected = result.ids, 0, 0, 0
    status: Status = "verified"
    places = places_of(result, truth)
    for index, (place, token) in enumerate(zip(places, result.tokens, strict=True)):
        if place > expected:
            yield f"⟨{place - expected}⟩", "missing"
            start = read = index  # text does not join across a gap
        expected = place + 1
        status = max(status, _status(token.token, token.verified, truth, place), key=order.index)
        before, after = model.text(ids[start:read]), model.text(ids[start : index + 1])
        if after.endswith("\ufffd") and index + 1 < len(ids) and places[index + 1] == expected:
            continue
        yield after[len(before) :], status
        start, read, status = read, index + 1, "verified"
    if truth is not None and len(truth.tokens) > expected:
        yield f"⟨{len(truth.tokens) - expected}⟩", "missing"


def _status(token: int, verified: bool, truth: GroundTruth | None, place: int) -> Status:
    if truth is not None and (place >= len(truth.tokens) or truth.tokens[place] != token):
        return "wrong"
    if not verified:
        return "unverified"
    return "verified" if truth is None else "exact"
