"""Assess one defense (``hiddenlab assess``): attacks, control, planted secrets, utility, cost and a verdict."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from hiddenlab.channels import Channel
from hiddenlab.config import AttackConfig
from hiddenlab.errors import InputError, NotApplicableError
from hiddenlab.eval.assess.control import guesses
from hiddenlab.eval.assess.ensemble import (
    ATTACKS,
    CRASHED,
    NOT_APPLICABLE,
    OUT_OF_TIME,
    RAN,
    Attempt,
    Step,
    attack_all,
    solved,
    verified,
)
from hiddenlab.eval.assess.secrets import Planted, planted
from hiddenlab.eval.assess.verdict import (
    EXIT_CODES,
    HALF,
    INCONCLUSIVE,
    Evidence,
    leak_of,
    sentence_of,
    status_of,
)
from hiddenlab.eval.measures.attack import utility
from hiddenlab.eval.measures.intervals import Estimate, mean, share
from hiddenlab.job import Case, Job, prepare
from hiddenlab.models import TruncatedModel
from hiddenlab.scoring import Score, places_of, score
from hiddenlab.stages import overrides
from hiddenlab.types import AttackResult, GroundTruth, Observation, Progress, silent
from hiddenlab.utils.random import generator

FORMAT = 1
PROMPTS = 20  # of the shipped ones, where none are named
UTILITY_TOKENS = 128  # of each text


@dataclass(frozen=True)
class Reading:
    """What the attacker takes to be one prompt, of all that his attacks read.

    Attributes:
        attack: that read it; None where none read anything. score: against the truth.
    """

    case: Case
    attack: str | None
    result: AttackResult | None
    score: Score | None

    @property
    def tokens(self) -> int:
        """The number of tokens of the prompt."""
        return len(_truth(self.case).tokens)

    @property
    def right(self) -> int:
        """The number of tokens that were read rightly, each at its place."""
        return _right(self.result, self.case)


def assess(config: AttackConfig, minutes: float = 10.0, progress: Progress = silent) -> dict[str, Any]:
    """Attack a defense with everything that applies, and say whether it holds.

    The attacker knows the code and the public facts, and may release texts of his own. He sees each prompt once, and
    chooses himself which attack to believe: the one that is sure of most tokens, else the one whose text is the
    likeliest. The truth scores what he chose.

    Args:
        config: prompts, model, layer, stream and defense, as for an attack; its attack is not read. Without prompts the
            first twenty of the shipped ones.
        minutes: for all attacks on all prompts together, the planted secrets' texts among them. As much again is
            allowed for the same attacks without the defense, which show that they could have succeeded; that part runs
            only where little was read.

    Returns:
        ``status``, its ``exit_code`` and ``sentence``; ``leak``, ``exact``, ``rouge_l``, ``secrets``, ``oracle`` (the
        leak if the best attack of each prompt were known), ``attacks`` (what each did), ``undefended`` (what each
        reads without the defense, where that was asked), ``utility``, ``cost``, ``leakiest`` (the prompt that
        leaked most).

    Raises:
        InputError: minutes below 0, or states of a file, which need another command; see ``hiddenlab.job.prepare``.
    """
    if not minutes > 0:
        raise InputError(f"--minutes is above 0, not {minutes:g}")
    if config.observation is not None or config.states:
        raise InputError("assess releases prompts itself; attack states of a file with 'hiddenlab attack'")
    limit = PROMPTS if config.limit is None and config.prompts is None else config.limit
    job = prepare(replace(config, attack="vocab-match", limit=limit), progress)
    texts = planted(job.config.seed)
    cases = [*job.cases, *_planted_cases(job, texts)]
    released = _release(job, job.channel, cases)
    shown = [observation for observation, _ in released]
    believed = partial(_believed, job.model)
    attempts = attack_all(shown, job.model, job.config.seed, 60 * minutes, progress, ATTACKS, believed)
    readings = _readings(job.model, cases, attempts)
    own, extra = readings[: len(job.cases)], readings[len(job.cases) :]
    guessed = _guessed(job, progress)
    lengths = [reading.tokens for reading in own]
    leak = leak_of([reading.right for reading in own], guessed, lengths)
    read = sum(_holds(reading.result, one.secret) for reading, one in zip(extra, texts, strict=True))
    exact = [bool(reading.score and reading.score.exact) for reading in own]
    beyond = sum(whole and n < one.tokens for whole, n, one in zip(exact, guessed, own, strict=True))
    misled = sum(
        one.result is not None and solved(one.result, observation) and not whole
        for one, observation, whole in zip(own, shown, exact, strict=False)
    )
    crashed = [attempt.attack for attempt in attempts if attempt.status == CRASHED]
    endless = {step.attack for step in ATTACKS if step.endless}
    late = [one.attack for one in attempts if one.status == OUT_OF_TIME and one.attack not in endless]
    found = Evidence(leak, beyond, (read, len(texts)), short=late, crashed=crashed, misled=misled)
    undefended: list[dict[str, Any]] = []
    if status_of(found) == INCONCLUSIVE:  # whether it held depends on what the attacks can do at all
        undefended = _undefended(job, cases[: len(job.cases)], guessed, attempts, progress)
        ended = {attempt.attack for attempt in attempts if attempt.status == RAN}
        able = [one["attack"] for one in undefended if one["leak"]["low"] >= HALF and one["attack"] in ended]
        found = replace(found, able=able)
    best = _best(own)
    return {
        "format": FORMAT,
        "status": status_of(found),
        "exit_code": EXIT_CODES[status_of(found)],
        "sentence": sentence_of(found, minutes, best),
        "defense": list(job.config.defense),
        "model": job.config.model,
        "layer": job.config.layer,
        "stream": job.config.stream,
        "seed": job.config.seed,
        "minutes": minutes,
        "prompts": len(own),
        "leak": leak._asdict(),
        "control": sum(guessed) / sum(lengths),
        "exact": share(exact)._asdict(),
        "token_accuracy": sum(reading.right for reading in own) / sum(lengths),
        "rouge_l": mean([reading.score.rouge_l if reading.score else 0.0 for reading in own])._asdict(),
        "secrets": {"read": read, "planted": len(texts)},
        "oracle": _oracle(own, attempts, guessed)._asdict(),
        "attacks": [_told(attempt, own) for attempt in attempts],
        "undefended": undefended,
        "utility": _utility(job, progress),
        "cost": _cost(job, progress),
        "leakiest": _leakiest(own),
    }


def _truth(case: Case) -> GroundTruth:
    assert case.truth is not None  # prompts have one
    return case.truth


def _planted_cases(job: Job, texts: Sequence[Planted]) -> list[Case]:
    first = len(job.cases)
    return [
        Case(first + i, f"secret {i + 1}", GroundTruth(tuple(job.model.tokenize(one.text))))
        for i, one in enumerate(texts)
    ]


def _release(job: Job, channel: Channel, cases: Sequence[Case]) -> list[tuple[Observation, GroundTruth]]:
    return [
        channel.release(job.model, _truth(case).tokens, generator(job.config.seed, "release", case.index))
        for case in cases
    ]


def _readings(model: TruncatedModel, cases: Sequence[Case], attempts: Sequence[Attempt]) -> list[Reading]:
    """Return what the attacker believes of each prompt, scored."""
    readings = []
    for i, case in enumerate(cases):
        found = [(attempt.attack, attempt.results[i]) for attempt in attempts if i in attempt.results]
        found = [(name, result) for name, result in found if result.ids]
        if not found:
            readings.append(Reading(case, None, None, None))
            continue
        name, result = max(found, key=lambda one: _believed(model, one[1]))
        readings.append(Reading(case, name, result, _scored(model, result, case)))
    return readings


def _scored(model: TruncatedModel, result: AttackResult, case: Case) -> Score:
    truth = _truth(case)
    return score(result, replace(truth, text=model.text(truth.tokens)))


def _believed(model: TruncatedModel, result: AttackResult) -> tuple[int, float]:
    """Return how far the attacker believes an answer: by tokens that are sure, then by how likely its text is."""
    return verified(result), _likelihood(model, result.ids)


@torch.inference_mode()
def _likelihood(model: TruncatedModel, ids: Sequence[int]) -> float:
    """Return the mean log-probability of a text's tokens behind its first."""
    if len(ids) < 2:
        return float("-inf")
    tokens = torch.tensor(list(ids))
    said = model.sibling(stream="logits").encode(tokens)[:-1].float().log_softmax(-1)
    return float(said.gather(1, tokens[1:, None].to(said.device)).mean())


def _guessed(job: Job, progress: Progress) -> list[int]:
    """Return how many tokens of each prompt are guessed without its rows."""
    truths = [_truth(case).tokens for case in job.cases]
    said = guesses(job.model, list(map(len, truths)), job.config.seed, progress)
    return [
        sum(a == b for a, b in zip(one, truth, strict=True)) for one, truth in zip(said, truths, strict=True)
    ]


def _holds(result: AttackResult | None, secret: str) -> bool:
    return result is not None and secret in (result.text or "")


def _undefended(
    job: Job, cases: Sequence[Case], guessed: Sequence[int], attempts: Sequence[Attempt], progress: Progress
) -> list[dict[str, Any]]:
    """Return what each attack that ran behind the defense reads without it, in as much time."""
    shown = [observation for observation, _ in _release(job, Channel([]), cases)]
    lengths, told = [len(_truth(case).tokens) for case in cases], []
    for attempt in attempts:
        if attempt.status in (CRASHED, NOT_APPLICABLE):
            continue
        step = Step(attempt.attack)
        (again,) = attack_all(shown, job.model, job.config.seed, attempt.allowed, progress, [step])
        right = [_right(again.results.get(i), case) for i, case in enumerate(cases)]
        told.append(
            {
                "attack": again.attack,
                "status": again.status,
                "seconds": again.seconds,
                "leak": leak_of(right, guessed, lengths)._asdict(),
            }
        )
    return told


def _best(readings: Sequence[Reading]) -> str | None:
    """Return the attack whose readings hold most right tokens."""
    right: dict[str, int] = {}
    for reading in readings:
        if reading.attack is not None:
            right[reading.attack] = right.get(reading.attack, 0) + reading.right
    best = max(right, key=lambda name: right[name], default=None)
    return best if best is not None and right[best] else None


def _oracle(readings: Sequence[Reading], attempts: Sequence[Attempt], guessed: Sequence[int]) -> Estimate:
    """Return the leak if somebody told the attacker which attack is best for each prompt."""
    right = [
        max((_right(attempt.results.get(i), reading.case) for attempt in attempts), default=0)
        for i, reading in enumerate(readings)
    ]
    return leak_of(right, guessed, [reading.tokens for reading in readings])


def _right(result: AttackResult | None, case: Case) -> int:
    """Return how many tokens of a prompt were read rightly, each at its place."""
    if result is None:
        return 0
    truth = _truth(case)
    places = places_of(result, truth)
    return sum(
        place < len(truth.tokens) and truth.tokens[place] == token
        for place, token in zip(places, result.ids, strict=True)
    )


def _told(attempt: Attempt, readings: Sequence[Reading]) -> dict[str, Any]:
    """Return what an attack did, with the share of all tokens that it read."""
    right = sum(_right(attempt.results.get(i), reading.case) for i, reading in enumerate(readings))
    return {
        "attack": attempt.attack,
        "status": attempt.status,
        "reason": attempt.reason,
        "seconds": attempt.seconds,
        "prompts": sum(i in attempt.results for i in range(len(readings))),
        "token_accuracy": right / sum(reading.tokens for reading in readings) if attempt.results else None,
    }


def _utility(job: Job, progress: Progress) -> dict[str, Any]:
    """Return what the defense does to the model's own answers, for who may undo it, or why that was not measured."""
    asked = job.config
    spec: dict[str, Any] = {
        "model": asked.model, "prompts": asked.prompts or "builtin", "limit": asked.limit,
        "max_tokens": asked.max_tokens or UTILITY_TOKENS, "defense": list(asked.defense), "seed": asked.seed,
        "device": asked.device, "dtype": asked.dtype,
    }  # fmt: skip
    if any(overrides(defense, "states") for defense in job.channel.defenses):
        spec |= {"layer": job.model.site.layer, "stream": job.model.site.stream}
    try:
        return dict(utility(spec, Path(), progress))
    except NotApplicableError as error:
        return {"reason": f"not measured: {error}"}


def _cost(job: Job, progress: Progress) -> dict[str, float]:
    """Return time and bytes of a release, over one without the defense."""
    seconds: dict[str, list[float]] = {"defended": [], "plain": []}
    sizes: dict[str, int] = {"defended": 0, "plain": 0}
    for number, case in enumerate(job.cases):
        for name, channel in (("plain", Channel([])), ("defended", job.channel)):
            begun = time.perf_counter()
            ((observation, _),) = _release(job, channel, [case])
            seconds[name].append(time.perf_counter() - begun)
            sizes[name] += observation.states.nbytes
        progress("measuring the cost of a release", number + 1, len(job.cases))
    return {
        "time_over_plain": median(seconds["defended"]) / median(seconds["plain"]),
        "bytes_over_plain": sizes["defended"] / sizes["plain"],
    }


def _leakiest(readings: Sequence[Reading]) -> dict[str, Any] | None:
    """Return the prompt of which most was read, beside what was read."""
    known = [reading for reading in readings if reading.result is not None and reading.score is not None]
    if not known:
        return None
    worst = max(known, key=lambda reading: reading.right / reading.tokens)
    assert worst.result is not None
    return {
        "id": worst.case.id,
        "attack": worst.attack,
        "recovered": worst.result.text,
        "token_accuracy": worst.right / worst.tokens,
    }
