"""Choose what the attacker believes of each prompt, and compare it with the truth where one is known."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from hiddenlab.eval.assess.belief import Belief
from hiddenlab.eval.assess.ensemble import Attempt, solved, verified
from hiddenlab.eval.assess.verdict import leak_of
from hiddenlab.eval.measures.intervals import Estimate
from hiddenlab.job import Case
from hiddenlab.models import TruncatedModel
from hiddenlab.row_facts import extra_rows
from hiddenlab.scoring import Score, places_of, score
from hiddenlab.types import AttackResult, GroundTruth, Observation

DECODES = "replaced-tokens"  # the step that reads what tokens stood for which ran in place of the prompt's


@dataclass(frozen=True)
class Reading:
    """What the attacker takes to be one prompt, of all that his attacks read.

    Attributes:
        attack: that read it; None where none read anything. score: against the truth; None where none is known.
    """

    case: Case
    observation: Observation
    attack: str | None
    result: AttackResult | None
    score: Score | None

    @property
    def tokens(self) -> int:
        """The number of tokens of the prompt; without a truth, up to its last row that is a token's."""
        if self.case.truth is not None:
            return len(self.case.truth.tokens)
        info, rows = self.observation.info, len(self.observation.states)
        return rows - extra_rows(info) if info.positions is None else info.positions[-1] + 1

    @property
    def right(self) -> int:
        """The number of tokens that were read rightly, each at its place; without a truth, of verified ones."""
        return right_of(self.result, self.case)

    @property
    def sure(self) -> int:
        """The number of verified tokens."""
        return 0 if self.result is None else verified(self.result)

    def told(self) -> dict[str, Any]:
        """Return the reading as JSON, without its text."""
        return {
            "id": self.case.id,
            "attack": self.attack,
            "tokens": self.tokens,
            "right": None if self.case.truth is None else self.right,
            "verified": self.sure,
        }


def truth_of(case: Case) -> GroundTruth:
    """Return the truth of a case that has one."""
    assert case.truth is not None
    return case.truth


def readings_of(
    model: TruncatedModel,
    cases: Sequence[Case],
    observations: Sequence[Observation],
    attempts: Sequence[Attempt],
    belief: Belief,
) -> list[Reading]:
    """Return what the attacker believes of each prompt, scored where a truth is known."""
    readings = []
    for i, (case, observation) in enumerate(zip(cases, observations, strict=True)):
        found = [(attempt.attack, attempt.results[i]) for attempt in attempts if i in attempt.results]
        found = [(name, result) for name, result in found if result.ids]
        if not found:
            readings.append(Reading(case, observation, None, None, None))
            continue
        if len(found) > 1:
            believed = belief.weigh([result for _, result in found], observation)
            found = [found[believed.index(max(believed))]]
        ((name, result),) = found
        scored = None if case.truth is None else _scored(model, result, case.truth)
        readings.append(Reading(case, observation, name, result, scored))
    return readings


def by_one_attack(
    model: TruncatedModel, readings: Sequence[Reading], attempts: Sequence[Attempt], guessed: Sequence[int]
) -> list[Reading]:
    """Return readings by the one attack that by itself surely reads more of the prompts than the belief in each answer.

    An attacker finds it without their truth: he attacks texts of his own behind the same defense. Prompts that it did
    not read stay as they are, as do those of which every token is verified, and so do all where no attack reads more,
    or where he would lose prompts that came back exactly.

    Args:
        guessed: of each prompt that counts, which come first: tokens that the control guesses. What follows them are
            planted texts, which stay as they are.
    """
    mine, extra = list(readings[: len(guessed)]), readings[len(guessed) :]
    lengths = [one.tokens for one in mine]
    chosen = leak_of([one.right for one in mine], guessed, lengths)
    best, most = mine, chosen.value
    for attempt in attempts:
        other = [_by(model, attempt, i, one) for i, one in enumerate(mine)]
        leak = leak_of([one.right for one in other], guessed, lengths)
        if leak.low > chosen.value and leak.value > most and _exact(other) >= _exact(mine):
            best, most = other, leak.value
    return [*best, *extra]


def _by(model: TruncatedModel, attempt: Attempt, number: int, reading: Reading) -> Reading:
    """Return what an attack read of a prompt; the reading as it is where that is nothing, or where it is certain."""
    result, believed = attempt.results.get(number), reading.result
    if result is None or not result.ids:
        return reading
    if believed is not None and solved(believed, reading.observation):
        return reading
    scored = _scored(model, result, truth_of(reading.case))
    return Reading(reading.case, reading.observation, attempt.attack, result, scored)


def _exact(readings: Sequence[Reading]) -> int:
    return sum(one.score is not None and one.score.exact for one in readings)


def _scored(model: TruncatedModel, result: AttackResult, truth: GroundTruth) -> Score:
    return score(result, replace(truth, text=model.text(truth.tokens)))


def right_of(result: AttackResult | None, case: Case) -> int:
    """Return how many tokens were read rightly, each at its place; without a truth, how many are verified."""
    if result is None:
        return 0
    return verified(result) if case.truth is None else sum(1 for _ in _right_places(result, case.truth))


def _right_places(result: AttackResult, truth: GroundTruth) -> Iterator[int]:
    for place, token in zip(places_of(result, truth), result.ids, strict=True):
        if place < len(truth.tokens) and truth.tokens[place] == token:
            yield place


def rare_accuracy_of(readings: Sequence[Reading], belief: Belief) -> Estimate | None:
    """Estimate the share of rare tokens that were read (``Belief.rare``); None where prompts have none."""
    right, counts = list[int](), list[int]()
    for reading in readings:
        truth = truth_of(reading.case)
        if rare := belief.rare(truth.tokens):
            places = set() if reading.result is None else set(_right_places(reading.result, truth))
            right.append(len(rare & places))
            counts.append(len(rare))
    return leak_of(right, [0] * len(counts), counts) if counts else None


def is_misled(
    reading: Reading, attempts: Sequence[Attempt], number: int, table: Float[Tensor, "v d"]
) -> bool:
    """Return whether an attack was sure of every row of a prompt and wrong, so that no other was tried.

    Right are the tokens that the model ran, whether they are the prompt's or a defense put them in its place, and those
    with the same embedding, which give the same rows: no attack would read more of these rows.

    Args:
        table: the model's input embeddings.
    """
    results = [attempt.results[number] for attempt in attempts if number in attempt.results]
    surest = next((result for result in results if solved(result, reading.observation)), None)
    if surest is None:
        return False
    truth = truth_of(reading.case)
    return any(
        place >= len(truth.shown) or not torch.equal(table[truth.shown[place]], table[one.token])
        for place, one in zip(places_of(surest, truth), surest.tokens, strict=True)
        if one.verified
    )


def undecoded_of(readings: Sequence[Reading], attempts: Sequence[Attempt]) -> int:
    """Return of how many prompts tokens were replaced, and no attack decoded what those stood for that ran."""
    decoded = {i for attempt in attempts if attempt.attack == DECODES for i in attempt.results}
    truths = [reading.case.truth for reading in readings]
    return sum(
        truth is not None and truth.computed is not None and i not in decoded
        for i, truth in enumerate(truths)
    )


def shown_accuracy_of(readings: Sequence[Reading], attempts: Sequence[Attempt]) -> float | None:
    """Return the share of the tokens that ran in place of the prompts' and were read; None where none were replaced.

    Of each prompt the attack counts that was sure of most tokens.
    """
    truths = [reading.case.truth for reading in readings]
    if all(truth is None or truth.computed is None for truth in truths):
        return None
    right = total = 0
    for i, reading in enumerate(readings):
        shown = truth_of(reading.case).shown
        found = [attempt.results[i] for attempt in attempts if i in attempt.results]
        best = max(found, key=verified, default=None)
        right += 0 if best is None else sum(a == b for a, b in zip(best.ids, shown, strict=False))
        total += len(shown)
    return right / total


def best_of(readings: Sequence[Reading]) -> str | None:
    """Return the attack whose readings hold most right tokens."""
    right: dict[str, int] = {}
    for reading in readings:
        if reading.attack is not None:
            right[reading.attack] = right.get(reading.attack, 0) + reading.right
    best = max(right, key=lambda name: right[name], default=None)
    return best if best is not None and right[best] else None


def oracle_of(readings: Sequence[Reading], attempts: Sequence[Attempt], guessed: Sequence[int]) -> Estimate:
    """Return the leak if somebody told the attacker which attack is best for each prompt."""
    right = [
        max((right_of(attempt.results.get(i), reading.case) for attempt in attempts), default=0)
        for i, reading in enumerate(readings)
    ]
    return leak_of(right, guessed, [reading.tokens for reading in readings])


def told_of(attempt: Attempt, readings: Sequence[Reading], truth: bool) -> dict[str, Any]:
    """Return what an attack did, with the share of all tokens that it read, and that it verified."""
    total = sum(reading.tokens for reading in readings)
    results = [attempt.results.get(i) for i in range(len(readings))]
    right = sum(right_of(result, reading.case) for result, reading in zip(results, readings, strict=True))
    sure = sum(verified(result) for result in results if result is not None)
    return {
        "attack": attempt.attack,
        "status": attempt.status,
        "reason": attempt.reason,
        "seconds": attempt.seconds,
        "prompts": sum(result is not None for result in results),
        "token_accuracy": right / total if attempt.results and truth else None,
        "verified": min(1.0, sure / total) if attempt.results else None,
    }


def leakiest_of(model: TruncatedModel, readings: Sequence[Reading]) -> Mapping[str, Any] | None:
    """Return the prompt of which most was read, beside what was read."""
    known = [reading for reading in readings if reading.result is not None]
    if not known:
        return None
    worst = max(known, key=lambda reading: reading.right / reading.tokens)
    assert worst.result is not None
    truth = worst.case.truth
    return {
        "id": worst.case.id,
        "attack": worst.attack,
        "text": None if truth is None else model.text(truth.tokens),
        "recovered": worst.result.text or model.text(worst.result.ids),
        "token_accuracy": None if truth is None else worst.right / worst.tokens,
        "verified": min(1.0, worst.sure / worst.tokens),
    }
