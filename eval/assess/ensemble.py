"""Attack observations with every attack that applies, the cheapest first, each for its share of the time."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from hiddenlab import registry
from hiddenlab.base import Attack
from hiddenlab.errors import HiddenlabError, NotApplicableError
from hiddenlab.models import TruncatedModel
from hiddenlab.text import first_line
from hiddenlab.types import AttackResult, Observation, Progress


@dataclass(frozen=True)
class Step:
    """One attack of the ensemble.

    Attributes:
        attack: its spec. weight: of its share of the time. missing: it is for observations of some rows alone.
            endless: it may go on for as long as there is time, so that running out of it says nothing.
    """

    attack: str
    weight: float = 1.0
    missing: bool = False
    endless: bool = False


TOGETHER = 2  # prompts that an attack gets at once; running out of time costs what it read of these
# In the order of their cost, each with what it reads.
ATTACKS = (
    Step("vocab-match:setup=quick,budget=256", weight=2),  # rows as they are, permuted, or behind secret maps
    Step("partial-sums"),  # what a CompNode of Cascade gets
    Step("self-scores"),  # rows in secret coordinates of Cascade
    Step("closed-weights"),  # rows of private, permuted weights
    Step("fingerprint-inversion"),  # projections, TOPLOC proofs, log-probabilities
    Step("missing-tokens", missing=True),  # tokens between shown rows
    Step("shard-reading"),  # anything linear: regressions on what the attacker releases himself
    Step("beam-decoding", weight=4),  # noise, rounding, shuffled rows
    Step("vocab-match", weight=2, endless=True),  # the whole vocabulary
)
RAN, DONE_BEFORE, OUT_OF_TIME, CRASHED, NOT_APPLICABLE = (
    "ran", "nothing left to read", "out of time", "crashed", "not applicable"
)  # fmt: skip


class _OutOfTimeError(Exception):
    """Ends an attack from within its progress reports."""


@dataclass
class Attempt:
    """What one attack did.

    Attributes:
        attack: its spec. allowed, seconds: that it might take, and that it took. status: one of the five words above.
            reason: why it did not run to the end. results: by prompt, what it read.
    """

    attack: str
    allowed: float = 0.0
    status: str = RAN
    seconds: float = 0.0
    reason: str = ""
    results: dict[int, AttackResult] = field(default_factory=dict)


def verified(result: AttackResult) -> int:
    """Return how many tokens an attack is sure of."""
    return sum(token.verified for token in result.tokens)


def solved(result: AttackResult, observation: Observation) -> bool:
    """Return whether an attack is sure of the token of every row, so that no other attack need run."""
    return verified(result) >= len(observation.states) > 0


def attack_all(
    observations: Sequence[Observation],
    model: TruncatedModel,
    seed: int,
    seconds: float,
    progress: Progress,
    steps: Sequence[Step],
) -> list[Attempt]:
    """Attack observations of one channel with one attack after another, until every prompt is solved.

    An attack gets its share of the time that is left; what it does not use goes to those behind it. Prompts that are
    solved are not attacked again.

    Args:
        seconds: for all attacks together.
    """
    all_rows = observations[0].info.positions is None
    begun, left_over, attempts = time.monotonic(), list(range(len(observations))), list[Attempt]()
    for number, step in enumerate(steps):
        left = seconds - (time.monotonic() - begun)
        attempt = Attempt(step.attack, left * step.weight / sum(later.weight for later in steps[number:]))
        attempts.append(attempt)
        if not left_over:
            attempt.status = DONE_BEFORE
        elif step.missing and all_rows:
            attempt.status, attempt.reason = NOT_APPLICABLE, "every token has a row"
        else:
            _run(attempt, [(i, observations[i]) for i in left_over], model, seed, progress)
            left_over = [
                i
                for i in left_over
                if i not in attempt.results or not solved(attempt.results[i], observations[i])
            ]
    return attempts


def _run(
    attempt: Attempt,
    prompts: Sequence[tuple[int, Observation]],
    model: TruncatedModel,
    seed: int,
    progress: Progress,
) -> None:
    """Run one attack for its time, and write down what it did."""
    begun = time.monotonic()

    def tell(what: str, done: int, total: int) -> None:
        progress(f"{attempt.attack}: {what}", done, total)
        if time.monotonic() - begun > attempt.allowed:
            raise _OutOfTimeError

    try:
        attack: Attack = registry.build("attacks", attempt.attack)
        attack.progress, attack.learns = tell, False
        tell("begins", 0, len(prompts))
        attack.fit(prompts[0][1].info, model, seed)
        size = min(attack.batch, TOGETHER)
        for start in range(0, len(prompts), size):
            tell("prompts", start, len(prompts))
            _recover(attempt, attack, prompts[start : start + size])
        if not attempt.results:
            attempt.status = NOT_APPLICABLE
    except NotApplicableError as error:
        attempt.status, attempt.reason = NOT_APPLICABLE, first_line(error)
    except _OutOfTimeError:
        attempt.status, attempt.reason = OUT_OF_TIME, f"after {attempt.allowed:.0f} s"
    except Exception as error:  # an attack that fails must not look like a defense that holds
        kind = "" if isinstance(error, HiddenlabError) else f"{type(error).__name__}: "
        attempt.status, attempt.reason = CRASHED, kind + first_line(error)
    attempt.seconds = time.monotonic() - begun


def _recover(attempt: Attempt, attack: Attack, group: Sequence[tuple[int, Observation]]) -> None:
    """Recover some prompts; those that the attack cannot use are left out, and not the others with them."""
    try:
        found = attack.recover_batch([observation for _, observation in group])
        attempt.results |= {i: result for (i, _), result in zip(group, found, strict=True)}
    except NotApplicableError as error:
        attempt.reason = first_line(error)
        if len(group) > 1:
            for one in group:
                _recover(attempt, attack, [one])
