"""Attack observations with every attack that applies: a look at one prompt first, then those that read most of it."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from hiddenlab import registry
from hiddenlab.attacker import Attacker
from hiddenlab.base import Attack
from hiddenlab.channels import Channel
from hiddenlab.errors import HiddenlabError, NotApplicableError
from hiddenlab.models import TruncatedModel
from hiddenlab.models.engine import before_passes
from hiddenlab.records import RecordError
from hiddenlab.row_facts import extra_rows
from hiddenlab.stages import are_replaced
from hiddenlab.text import first_line
from hiddenlab.types import AttackResult, Observation, ObservationInfo, Progress


@dataclass(frozen=True)
class Step:
    """One attack of the ensemble.

    Attributes:
        attack: its spec. supposes: the stages that it takes the defense for; empty for what the rows' facts say.
            weight: of its share of the time. missing: it is for observations of some rows alone. endless: it may go on
            for as long as there is time, so that running out of it says nothing. inexact: it is for noised or
            rounded rows, and waits where a defense leaves rows exact. beside: it looks for the prompt's own tokens also
            where the model ran others, and rows that are read say nothing more. single: of several releases it gets the
            first, and not their mean, which has lost last bits. capped: it tries a few candidates alone, so that its
            end says nothing of what more of them would read.
    """

    attack: str
    weight: float = 1.0
    missing: bool = False
    endless: bool = False
    inexact: bool = False
    beside: bool = False
    single: bool = False
    capped: bool = False
    supposes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The attack, with what it supposes."""
        return self.attack + f" (supposes {' + '.join(self.supposes)})" * bool(self.supposes)

    def seen(self, observation: Observation) -> Observation:
        """Return an observation with what the attack supposes of its defense."""
        seen = observation.first if self.single and observation.first is not None else observation
        # A copy, since an attack may work in place, and others get the same rows.
        seen = replace(seen, states=seen.states.clone())
        return replace(seen, info=self.facts(seen.info)) if self.supposes else seen

    def facts(self, info: ObservationInfo) -> ObservationInfo:
        """Return public facts with what the attack supposes of the defense."""
        return Channel.parse(self.supposes).published(info) if self.supposes else info


TOGETHER = 2  # prompts that an attack gets at once; running out of time costs what it read of these
LOOK = 0.25  # of the time, for a look at one prompt with each attack
LEAD = 0.9  # of the time behind the look, for the attack that leads
OWN = 14.0  # weight of an attack that was made for the defense: it may take half of the time
QUICK = "vocab-match:setup=quick,budget=256"
# Those for one kind of rows come first: elsewhere they are refused at once. The others in the order of their cost.
ATTACKS = (
    # What tokens stood for that ran in place of the prompt's. It may take half of the time.
    Step("replaced-tokens", weight=14, beside=True),
    # A key that also served texts which the attacker has.
    Step("known-texts", weight=14),
    Step("turned-blocks"),  # keys and values that were mixed by block and turned
    Step("partial-sums"),  # what a CompNode of Cascade gets
    Step("self-scores"),  # rows in secret coordinates of Cascade
    Step("closed-weights"),  # rows of private, permuted weights
    Step("fingerprint-inversion"),  # projections, TOPLOC proofs, log-probabilities
    Step("missing-tokens", missing=True),  # tokens between shown rows
    Step(QUICK, weight=2, capped=True),  # rows as they are, permuted, or behind secret maps
    Step("planted", weight=2, beside=True, single=True),  # ids in low bits, norms or public facts
    Step("replay"),  # what a defense does alike with every request: a seed that is always 0, one key for all
    Step("shard-reading"),  # anything linear: regressions on what the attacker releases himself
    Step("beam-decoding", weight=4, inexact=True),  # noise, rounding, shuffled rows
    Step("vocab-match", weight=2, endless=True),  # the whole vocabulary
)
# What the attacker supposes who knows nothing of the defense.
SUPPOSED = (
    *(
        Step(QUICK, supposes=(stage,), capped=True)
        for stage in ("seq-perm", "hidden-perm", "2d-perm", "orthogonal", "row-mixing")
    ),
    Step("beam-decoding", weight=4, supposes=("unknown-gaussian",)),
    Step("beam-decoding", weight=4, supposes=("unknown-gaussian", "seq-perm")),
)
RAN, DONE_BEFORE, OUT_OF_TIME, CRASHED, NOT_APPLICABLE = (
    "ran", "nothing left to read", "out of time", "crashed", "not applicable"
)  # fmt: skip


class _OutOfTimeError(BaseException):
    """Ends an attack from within its progress reports; no Exception, which an attack may catch."""


@dataclass
class Attempt:
    """What one attack did.

    Attributes:
        attack: the name of its step. allowed, seconds: that it might take, and that it took. status: one of the five
            words above. reason: why it did not run to the end. results: by prompt, what it read. unusable: prompts that
            it cannot use. refused: it cannot be used here, whatever the prompt. capped: see ``Step``.
    """

    attack: str
    allowed: float = 0.0
    status: str = DONE_BEFORE
    seconds: float = 0.0
    reason: str = ""
    results: dict[int, AttackResult] = field(default_factory=dict)
    unusable: set[int] = field(default_factory=set)
    refused: bool = False
    capped: bool = False


class Diary(Protocol):
    """Keeps what attacks do as it happens, and gives back what was kept of an interrupted assessment."""

    def earlier(self, number: int, attack: str) -> Attempt | None:
        """Return what was kept of the attack that is tried as this number."""

    def read(self, number: int, attempt: Attempt, prompts: Sequence[int]) -> None:
        """Keep what an attack just read of some prompts."""

    def over(self, number: int, attempt: Attempt) -> None:
        """Keep what an attack did until its time, or its prompts, came to an end."""


def steps_of(attacker: Attacker, steps: Sequence[Step]) -> Sequence[Step]:
    """Return the steps of an attacker: attacks of his own first; who knows nothing of the defense supposes others.

    Args:
        steps: of who knows it and has no attack of his own.
    """
    own = [Step(spec, weight=OWN) for spec in attacker.attacks]
    if attacker.knows != "nothing":
        return (*own, *steps)
    ended, endless = ([step for step in steps if step.endless is kind] for kind in (False, True))
    return (*own, *ended, *SUPPOSED, *endless)


def verified(result: AttackResult) -> int:
    """Return how many tokens an attack is sure of."""
    return sum(token.verified for token in result.tokens)


def _sure(answers: Sequence[AttackResult], observation: Observation) -> list[int]:
    return [verified(answer) for answer in answers]


def solved(result: AttackResult, observation: Observation) -> bool:
    """Return whether an attack is sure of the token of every row, so that none need read the rows again.

    What the tokens of rows stood for, where others were replaced, is asked by other steps (``Step.beside``). Where rows
    are missing, a token between them may be verified as well, and says nothing of the rows.
    """
    if observation.info.positions is None:
        sure = verified(result)
    else:
        sure = len({token.row for token in result.tokens if token.verified and token.row >= 0})
    return sure >= len(observation.states) - extra_rows(observation.info) > 0


def ended_with_all(attempts: Sequence[Attempt], observations: Sequence[Observation]) -> set[str]:
    """Return the attacks that ran to their end with every prompt that no attack solved.

    One that could use some of the prompts alone says nothing of how the others withstand, and one that tries a few
    candidates alone nothing of any that is not solved.
    """
    open_ = {
        i
        for i, observation in enumerate(observations)
        if not any(i in one.results and solved(one.results[i], observation) for one in attempts)
    }
    return {
        one.attack
        for one in attempts
        if one.status == RAN and open_ <= one.results.keys() and not (one.capped and open_)
    }


def attack_all(
    observations: Sequence[Observation],
    model: TruncatedModel,
    seed: int,
    seconds: float,
    progress: Progress,
    steps: Sequence[Step],
    promise: Callable[[Sequence[AttackResult], Observation], Sequence[Any]] = _sure,
    leads: Callable[[AttackResult, Observation], bool] = lambda *_: True,
    diary: Diary | None = None,
) -> list[Attempt]:
    """Attack observations of one channel with one attack after another, until every prompt is solved.

    A quarter of the time goes to a look: each attack gets the shortest prompt, in the order of ``steps``. Of those
    whose answer convinces, the one that is believed most leads: it gets nine tenths of the time that is left for all
    prompts. The others follow, what read nothing last. Within each of the two parts an attack leaves the time that it
    does not use to those behind it. Time that is left at the end goes to those that ran out of theirs, then to one
    without an end (``Step.endless``), and where a defense leaves rows exact, a tenth of it to those for other rows
    (``Step.inexact``). Prompts that are solved are not attacked again.

    Args:
        seconds: for all attacks together. promise: how far the attacker believes each answer to a prompt.
        leads: whether he believes it so much that its attack gets most of the time.
        diary: of an assessment that may be interrupted; time that was spent before counts.

    Returns:
        What each attack did, in the order of ``steps``.
    """
    looked, begun = list[_Run](), time.monotonic()
    partial = next((one.info for one in observations if one.info.positions is not None), None)
    facts = [
        step.facts(partial or observations[0].info if step.missing else observations[0].info)
        for step in steps
    ]
    runs = [_Run(n, step, model, seed, progress, facts[n], diary) for n, step in enumerate(steps)]
    exact = leaves_rows_exact(observations[0].info)
    begun -= sum(run.attempt.seconds for run in runs)
    shortest = min(range(len(observations)), key=lambda i: len(observations[i].states))

    def open_to(run: _Run, prompts: Sequence[int]) -> list[tuple[int, Observation]]:
        found = [other.attempt.results for other in runs]
        return [
            (i, run.step.seen(observations[i]))
            for i in prompts
            if i not in run.attempt.results
            and i not in run.attempt.unusable
            # A short prompt may be shown whole beside longer ones that are not.
            and not (run.step.missing and partial is not None and observations[i].info.positions is None)
            and (
                (run.step.beside and are_replaced(observations[i].info))
                or not any(i in results and solved(results[i], observations[i]) for results in found)
            )
        ]

    def spend(order: Sequence[_Run], prompts: Sequence[int], ends: float, lead: float) -> None:
        for number, run in enumerate(order):
            if not (left_over := open_to(run, prompts)):
                continue
            left = max(0.0, begun + ends - time.monotonic())
            share = run.step.weight / sum(
                later.step.weight for later in order[number:] if later is run or not later.attempt.refused
            )
            run.go(left_over, left * max(share, lead if number == 0 else 0.0))

    if len(observations) > 1:  # with one prompt there is nothing to learn from it for others
        spend([run for run in runs if not (run.step.inexact and exact)], [shortest], LOOK * seconds, 0.0)
        # An answer without a token is none to weigh.
        looked = [
            run for run in runs if shortest in run.attempt.results and run.attempt.results[shortest].ids
        ]
        answers = [run.attempt.results[shortest] for run in looked]
        believed = promise(answers, observations[shortest])
        looked = [looked[n] for n in sorted(range(len(looked)), key=believed.__getitem__, reverse=True)]
    leader = next(
        (run for run in looked if leads(run.attempt.results[shortest], observations[shortest])), None
    )
    looked.sort(key=lambda run: run is not leader)
    order, everything = [*looked, *(run for run in runs if run not in looked)], range(len(observations))
    # What goes on for as long as there is time leads, or waits until the others have ended.
    ending = [run for run in order if not (run.step.endless or (run.step.inexact and exact)) or run is leader]
    spend(ending, everything, seconds, LEAD if leader is not None else 0.0)
    spent = -1.0
    while time.monotonic() < begun + seconds and spent < (spent := sum(run.attempt.seconds for run in runs)):
        short = [run for run in ending if run.attempt.status == OUT_OF_TIME and open_to(run, everything)]
        spend(short, everything, seconds, 0.0)
    waiting = [run for run in order if run not in ending]
    spend(sorted(waiting, key=lambda run: not run.step.endless), everything, seconds, LEAD)
    return [run.attempt for run in runs]


def leaves_rows_exact(info: ObservationInfo) -> bool:
    """Return whether a defense leaves the model's own rows, but for orders, secret maps and rows beside them.

    ``Stage.exact`` says it of each stage.
    """
    try:
        stages = Channel.parse(info.channel).defenses
    except HiddenlabError:  # a name without its parameters, or of a file that is not here
        return False
    plain = info.provider_dtype == "float32" and info.quantization is None
    return plain and len(stages) > 0 and all(getattr(stage, "exact", False) for stage in stages)


class _Run:
    """One attack on its way: prepared once, and given prompts and time in parts."""

    def __init__(
        self,
        number: int,
        step: Step,
        model: TruncatedModel,
        seed: int,
        progress: Progress,
        info: ObservationInfo,
        diary: Diary | None,
    ) -> None:
        self.step, self._number, self._diary = step, number, diary
        earlier = None if diary is None else diary.earlier(number, step.name)
        self.attempt = Attempt(step.name) if earlier is None else earlier
        self.attempt.capped = step.capped
        self._model, self._seed, self._progress, self._info = model, seed, progress, info
        self._attack: Attack | None = None

    def go(self, prompts: Sequence[tuple[int, Observation]], allowed: float) -> None:
        """Attack some prompts for some time, and write down what came of it."""
        attempt, begun = self.attempt, time.monotonic()
        if attempt.refused:
            return
        if self.step.missing and self._info.positions is None:
            attempt.refused, attempt.status, attempt.reason = True, NOT_APPLICABLE, "every token has a row"
            return
        attempt.allowed += allowed
        begun_tasks: dict[str, int] = {}  # with their totals; some may not end

        def check() -> None:
            if time.monotonic() - begun > allowed:
                raise _OutOfTimeError

        def tell(what: str, done: int, total: int) -> None:
            name = f"{attempt.attack}: {what}"
            if total:
                begun_tasks[name.partition("\t")[0]] = total
            self._progress(name, done, total)
            check()

        status, reason = RAN, ""
        try:
            with before_passes(check):  # an attack may work for long without a report
                attack = self._prepared(tell)
                size = min(attack.batch, TOGETHER)
                for start in range(0, len(prompts), size):
                    tell("prompts", start, len(prompts))
                    reason = self._recover(attack, prompts[start : start + size]) or reason
            if not attempt.results:
                status = NOT_APPLICABLE
        except NotApplicableError as error:
            attempt.refused, status, reason = True, NOT_APPLICABLE, first_line(error)
        except _OutOfTimeError:
            status, reason = OUT_OF_TIME, "more time was needed"
        except RecordError:
            raise
        # An attack that fails, or ends the program, must not look like a defense that holds.
        except (Exception, SystemExit) as error:
            kind = "" if isinstance(error, HiddenlabError) else f"{type(error).__name__}: "
            status, reason = CRASHED, kind + first_line(error)
        for name, total in begun_tasks.items():
            self._progress(name, -1, total)
        attempt.seconds += time.monotonic() - begun
        if attempt.status != CRASHED:  # one that failed once is told of, whatever it did afterwards
            attempt.status, attempt.reason = status, reason
        if self._diary is not None:
            self._diary.over(self._number, attempt)

    def _prepared(self, tell: Progress) -> Attack:
        """Return the attack behind its preparation, which is begun again where it did not end."""
        if self._attack is not None:
            self._attack.progress = tell
            return self._attack
        attack: Attack = registry.build("attacks", self.step.attack)
        attack.progress, attack.learns = tell, False
        tell("begins", 0, 0)
        attack.fit(self._info, self._model, self._seed)
        self._attack = attack
        return attack

    def _recover(self, attack: Attack, group: Sequence[tuple[int, Observation]]) -> str:
        """Recover some prompts; those that the attack cannot use are left out, and not the others with them.

        Returns:
            Why it could not use one of them, or nothing.
        """
        try:
            found = attack.recover_batch([observation for _, observation in group])
        except NotApplicableError as error:
            if len(group) > 1:
                for one in group:
                    self._recover(attack, [one])
            else:
                self.attempt.unusable.add(group[0][0])
            return first_line(error)
        self.attempt.results |= {i: result for (i, _), result in zip(group, found, strict=True)}
        if self._diary is not None:
            self._diary.read(self._number, self.attempt, [i for i, _ in group])
        return ""
