"""Keep what the attacks of an assessment read in its record, and give it back to one that goes on."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hiddenlab.batch import sample_of
from hiddenlab.eval.assess.ensemble import DONE_BEFORE, RAN, Attempt
from hiddenlab.job import Case
from hiddenlab.models import TruncatedModel
from hiddenlab.records import UNFINISHED, Recorder, RunRecord, read_run
from hiddenlab.summary import ENDED, Sample
from hiddenlab.types import AttackResult, Observation, TokenPrediction
from hiddenlab.utils.digests import digest_of

VERB = "assess"
DEFENDED, UNDEFENDED = "defended", "undefended"


class Kept:
    """A diary (``hiddenlab.eval.assess.ensemble.Diary``) in the samples of a record.

    A line holds what one attack read of one prompt, as those of ``hiddenlab attack`` do, or how a turn of it ended.

    Args:
        part: of the assessment. first: number of the first attack that is tried.
    """

    def __init__(
        self,
        recorder: Recorder,
        model: TruncatedModel,
        cases: Sequence[Case],
        observations: Sequence[Observation],
        part: str = DEFENDED,
        first: int = 0,
    ) -> None:
        self.recorder, self.model, self.part, self.first = recorder, model, part, first
        self.cases, self.observations = cases, observations
        self.places = {case.index: place for place, case in enumerate(cases)}

    def earlier(self, number: int, attack: str) -> Attempt | None:
        """Return what was kept of an attack; None where nothing was, or where another one had its number."""
        step = self.first + number
        lines = [line for line in self.recorder.samples if (line["part"], line["step"]) == (self.part, step)]
        if not lines or any(line["attack"] != attack for line in lines):
            return None
        attempt = Attempt(attack)
        for line in lines:
            if line["status"] == ENDED:  # the last turn holds what those before it did
                attempt.status, attempt.reason, attempt.refused = (
                    line["outcome"],
                    line["reason"],
                    line["refused"],
                )
                attempt.seconds, attempt.allowed = line["seconds"], line["allowed"]
                attempt.unusable = {self.places[index] for index in line["unusable"] if index in self.places}
            elif line["index"] in self.places:
                attempt.results[self.places[line["index"]]] = result_of(line)
        if attempt.results and attempt.status == DONE_BEFORE:
            attempt.status = RAN
        # A turn that was interrupted has no end; its prompts took this long at least.
        read = sum(result.seconds for result in attempt.results.values())
        attempt.seconds = max(attempt.seconds, read)
        return attempt

    def read(self, number: int, attempt: Attempt, prompts: Sequence[int]) -> None:
        """Write a line for each prompt."""
        for i in prompts:
            case, result = self.cases[i], attempt.results[i]
            shown = self.observations[i].info.positions
            self._append(number, attempt, sample_of(self.model, case, case.truth, result, None, shown))

    def over(self, number: int, attempt: Attempt) -> None:
        """Write how a turn of an attack ended."""
        step = self.first + number
        turns = sum(
            (line["part"], line["step"], line["status"]) == (self.part, step, ENDED)
            for line in self.recorder.samples
        )
        ended = {
            "status": ENDED, "turn": turns, "outcome": attempt.status, "reason": attempt.reason,
            "seconds": attempt.seconds, "allowed": attempt.allowed, "refused": attempt.refused,
            "unusable": sorted(self.cases[i].index for i in attempt.unusable),
        }  # fmt: skip
        self._append(number, attempt, ended)

    def _append(self, number: int, attempt: Attempt, line: Sample) -> None:
        self.recorder.append(
            {**line, "part": self.part, "step": self.first + number, "attack": attempt.attack}
        )


def result_of(line: Sample) -> AttackResult:
    """Return the result that a line of a record was written of."""

    def number(value: float | None) -> float:
        return math.nan if value is None else value

    each = line["per_token"]
    tokens = zip(
        line["recovered_ids"], each["row"], map(number, each["distance"]), each["margin"], each["evaluated"],
        each["verified"], strict=True,
    )  # fmt: skip
    return AttackResult(
        tuple(TokenPrediction(*token) for token in tokens),
        line["evaluated_tokens"] or 0,
        line["forward_calls"] or 0,
        line["seconds"] or 0.0,
        line["stop_reason"] or "",
        line["epsilon"],
        None if line["positions"] is None else tuple(line["positions"]),
        line["recovered"],
    )


def of_attacks(samples: Sequence[Sample], attacks: Sequence[str]) -> bool:
    """Return whether samples are of these attacks, in this order; those of an older version may be of others."""
    numbered = dict(enumerate(attacks))
    return all(numbered.get(line.get("step", -1)) == line.get("attack") for line in samples)


def unfinished(record: RunRecord, attacks: Sequence[str], out: Path | None, runs_dir: Path) -> Path | None:
    """Return the run of the same assessment that was interrupted last; None where there is none.

    The same are options, minutes, what the attacker has, attacks and inputs: prompts, and what the defense released of
    them. So a defense whose code has changed is assessed anew.

    Args:
        attacks: that are tried, in order. out: the run's directory, where one is named. runs_dir: where else to look.
    """
    named = f"*-{VERB}-{digest_of(record.spec)[:8]}*"
    folders = [out] if out is not None else sorted(runs_dir.glob(named), reverse=True)
    for folder in folders:
        if not (folder / "record.json").is_file():
            continue
        other, samples = read_run(folder)
        if other.verb != VERB or other.status not in UNFINISHED:
            continue
        if _same(other, record) and of_attacks(samples, attacks):
            return folder
    return None


def _same(one: RunRecord, other: RunRecord) -> bool:
    def asked(record: RunRecord) -> Any:
        return digest_of(record.spec), record.inputs_sha256, record.setup

    return asked(one) == asked(other)
