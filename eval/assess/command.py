"""Assess one defense (``hiddenlab assess``): attacks, control, planted secrets, utility, cost and a verdict."""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from hiddenlab import registry
from hiddenlab.assessment import Assessment
from hiddenlab.attacker import Attacker
from hiddenlab.channels import Channel
from hiddenlab.code_files import load_named
from hiddenlab.config import AttackConfig
from hiddenlab.errors import InputError
from hiddenlab.eval.assess.belief import Belief
from hiddenlab.eval.assess.control import guesses
from hiddenlab.eval.assess.ensemble import (
    ATTACKS,
    CRASHED,
    NOT_APPLICABLE,
    OUT_OF_TIME,
    Attempt,
    attack_all,
    ended_with_all,
    solved,
    steps_of,
)
from hiddenlab.eval.assess.kept import UNDEFENDED, VERB, Kept, of_attacks, unfinished
from hiddenlab.eval.assess.price import cost_of, utility_of
from hiddenlab.eval.assess.readings import (
    Reading,
    best_of,
    by_one_attack,
    is_misled,
    leakiest_of,
    oracle_of,
    rare_accuracy_of,
    readings_of,
    right_of,
    shown_accuracy_of,
    told_of,
    truth_of,
    undecoded_of,
)
from hiddenlab.eval.assess.session import release_all
from hiddenlab.eval.assess.subject import (
    Subject,
    check_one_channel,
    digest,
    distinct,
    everything,
    named,
    plantable,
    released,
)
from hiddenlab.eval.assess.verdict import (
    EXIT_CODES,
    HALF,
    INCONCLUSIVE,
    Evidence,
    leak_of,
    sentence_of,
    status_of,
)
from hiddenlab.eval.measures.intervals import mean, share
from hiddenlab.job import cases_of, prepare
from hiddenlab.models import TruncatedModel
from hiddenlab.prompts import Prompt, load_prompts
from hiddenlab.records import Recorder, RunRecord, check_new, check_writable, finite, read_run
from hiddenlab.repeated import Reads, reads
from hiddenlab.runner import Interrupted, Run
from hiddenlab.stages import are_replaced
from hiddenlab.types import AttackResult, Observation, Progress, silent

FORMAT = 1
PROMPTS = 20  # of the shipped ones, where none are named
OF_A_FILE = "not measured: the rows come from a file, without what the provider keeps secret"


def assess(
    config: AttackConfig,
    minutes: float = 10.0,
    out: str | Path | None = None,
    *,
    attacker: Attacker | None = None,
    runs_dir: str | Path = "runs",
    keep: bool = True,
    resume: str | Path | None = None,
    progress: Progress = silent,
) -> Assessment:
    """Attack a defense with everything that applies, say whether it holds, and record that.

    An assessment of the same options, minutes, attacker and released rows that was interrupted goes on, in its
    directory.

    Args:
        config: prompts, model, layer, stream and defense, as for an attack, or rows of a file (``observation``); its
            attack is not read. Without prompts the first twenty of the shipped ones.
        minutes: see ``judge``. attacker: what he has beside the rows; None has nothing.
        out, runs_dir, keep, resume: see ``hiddenlab.runner.run``.

    Raises:
        InputError: minutes not above 0, public facts that are no JSON values, or states of another program; see
            ``hiddenlab.job.prepare``.
        Interrupted: from the keyboard; its ``run`` holds what is recorded.
    """
    check_minutes(minutes)
    attacker = attacker or Attacker()
    check_attacks(attacker)
    if config.observation is not None and replace(attacker, attacks=()) != Attacker():
        raise InputError(
            "--knows, --key, --releases, --known and --chosen go with a DEFENSE that releases prompts, and not with "
            "--observation"
        )
    if config.states:
        raise InputError(
            "assess reads files of observations; 'hiddenlab import FILE -o OBSERVATION' makes one of these states"
        )
    own = config.prompt is None and config.prompts is None and config.observation is None
    limit = PROMPTS if config.limit is None and own else config.limit
    if keep and resume is None and out is None:
        check_writable(Path(runs_dir))
    recorder: Recorder | None = None
    try:
        job = prepare(replace(config, attack="vocab-match", limit=limit), progress)
        shown = [case.observation for case in job.cases if case.observation is not None]
        check_one_channel([observation.info for observation in shown])
        for observation in shown[:1]:
            Channel.parse(
                observation.info.channel
            )  # attacks build it again; without its code nothing follows
        texts = [] if shown else plantable(job.model, job.config.seed, progress)
        channel = None if shown else job.channel
        defense = tuple(job.config.defense)
        name = str(job.config.model)
        cases = distinct(job.cases, progress)
        subject = Subject(job.model, channel, cases, texts, job.config.seed, defense, name, attacker)
        subject, rows = released(subject, progress)
        record = RunRecord(
            verb=VERB, spec=job.config.to_json(), seeds={"seed": subject.seed}, prompts=len(subject.cases),
            inputs_sha256=digest(rows, attacker.attacks), setup={"minutes": float(minutes), **attacker.to_json()},
        )  # fmt: skip
        recorder = _recorder(
            record, attacker, None if out is None else Path(out), Path(runs_dir), keep, resume, progress
        )
        findings = judge(subject, rows, minutes, recorder, progress)
    except KeyboardInterrupt:
        if recorder is None:
            raise Interrupted(None) from None
        recorder.close("interrupted")
        raise Interrupted(Run(recorder.record, recorder.samples, recorder.path)) from None
    except BaseException as error:
        if recorder is not None:
            with suppress(Exception):  # the first error is reported
                recorder.close("failed", error=f"{type(error).__name__}: {error}")
        if isinstance(error, SystemExit):  # its code would be taken for a verdict
            raise InputError(
                "the code of the defense ended the program; it may raise errors, and not exit"
            ) from None
        raise
    recorder.close("finished", findings)
    return Assessment.of(findings, recorder.path)


def assess_channel(
    channel: Channel,
    model: TruncatedModel,
    prompts: str | Sequence[str | Prompt] | None = None,
    *,
    max_tokens: int | None = None,
    minutes: float = 10.0,
    seed: int = 0,
    attacker: Attacker | None = None,
    progress: Progress = silent,
) -> Assessment:
    """Assess a channel with a loaded model, without a record; see ``hiddenlab.api.assess``."""
    check_minutes(minutes)
    check_attacks(attacker or Attacker())
    given = load_prompts(None, limit=PROMPTS) if prompts is None else named(prompts)
    cases = distinct(cases_of(given, model, max_tokens), progress)
    specs = tuple(defense.spec for defense in channel.defenses)
    subject = Subject(
        model, channel, cases, plantable(model, seed, progress), seed, specs, model.ref.name,
        attacker or Attacker(),
    )  # fmt: skip
    subject, rows = released(subject, progress)
    recorder = Recorder.create(RunRecord(verb=VERB, spec={}), keep=False)
    return Assessment.of(judge(subject, rows, minutes, recorder, progress))


def check_attacks(attacker: Attacker) -> None:
    """Load the code of an attacker's own attacks, and build each once.

    Raises:
        InputError: there is no such attack, it cannot be built from its spec, or the lab tries it already.
    """
    lab = {step.name for step in ATTACKS}
    for number, spec in enumerate(attacker.attacks):
        if spec in lab or spec in attacker.attacks[:number]:
            raise InputError(
                f"--attack {spec} is tried already; name an attack of your own, FILE.py:KEY=VALUE"
            )
        load_named("attacks", spec)
        registry.build("attacks", spec)


def check_minutes(minutes: float) -> None:
    """Refuse a time in which nothing can be done.

    Raises:
        InputError: it is not above 0, or has no end.
    """
    if not (math.isfinite(minutes) and minutes > 0):
        raise InputError(f"--minutes is above 0, and a number, not {minutes:g}")


def _recorder(
    record: RunRecord,
    attacker: Attacker,
    out: Path | None,
    runs_dir: Path,
    keep: bool,
    resume: str | Path | None,
    progress: Progress,
) -> Recorder:
    """Return a new record, or that of the same assessment that was interrupted."""
    assert record.inputs_sha256 is not None
    attacks = [step.name for step in steps_of(attacker, ATTACKS)]
    found = Path(resume) if resume is not None else None
    if found is not None and not of_attacks(read_run(found)[1], attacks):
        raise InputError(
            f"{found} was started with other attacks than there are now; assess the defense anew"
        )
    if resume is None and keep:
        found = unfinished(record, attacks, out, runs_dir)
    if found is None:
        if out is not None:
            check_new(out)
        return Recorder.create(record, out=out, runs_dir=runs_dir, keep=keep)
    recorder = Recorder.resume(found, record.inputs_sha256)
    progress(f"goes on with {found}, which was interrupted", 0, 0)
    return recorder


def judge(
    subject: Subject,
    rows: Sequence[Observation],
    minutes: float,
    recorder: Recorder,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Attack rows with everything that applies, and say whether their defense holds.

    The attacker knows the code and the public facts, and may release texts of his own. He sees each prompt once, beside
    the texts that ``subject.attacker`` has, and chooses himself which attack to believe: the one that is sure of most
    tokens, else by the rows and the language (``Belief``), or one attack for all prompts where that reads more
    (``by_one_attack``). The truth scores what he chose. Where none is known, the tokens count that attacks verified,
    and no defense holds.

    Args:
        rows: what the defense shows of the prompts, then of the planted secrets.
        minutes: for all attacks on all prompts together, the planted secrets' texts among them. As much again is
            allowed for the same attacks without the defense, which show that they could have succeeded; that part runs
            only where little was read.
        recorder: where everything that attacks read is kept, and what was kept before it was interrupted.

    Returns:
        ``hiddenlab.assessment.Findings``.

    Raises:
        InputError: tokens were replaced, and no truth says by which.
    """
    model, cases, seed = subject.model, everything(subject), subject.seed
    own, steps = len(subject.cases), steps_of(subject.attacker, ATTACKS)
    replaced = are_replaced(rows[0].info)
    if replaced and not subject.truth:
        raise InputError(
            "tokens were replaced before these rows were computed, so that verified ones say nothing of the prompt; "
            "name the truth with --truth"
        )
    utility = cost = dict[str, Any](reason=OF_A_FILE)
    if (channel := subject.channel) is not None:  # first, since a fault of the defense may show here
        utility = utility_of(model, channel, subject.cases, seed, progress)
        cost = cost_of(model, channel, subject.cases, seed, progress)
    diary, belief = Kept(recorder, model, cases, rows), Belief(model, replaced)
    attempts = attack_all(
        rows, model, seed, 60 * minutes, progress, steps, belief.weigh, belief.convinces, diary
    )
    believed = readings_of(model, cases, rows, attempts, belief)
    guessed = _guessed(subject, progress)
    if subject.truth:
        believed = by_one_attack(model, believed, attempts, guessed)
    mine, extra = believed[:own], believed[own:]
    found = _evidence(subject, mine, extra, guessed, attempts)
    undefended: list[dict[str, Any]] = []
    # Whether it holds depends on what the attacks can do at all.
    if status_of(found) == INCONCLUSIVE and not found.open:
        undefended = _undefended(subject, guessed, attempts, 60 * minutes, recorder, progress)
        ended = ended_with_all(attempts, rows[:own])
        able = [one["attack"] for one in undefended if one["leak"]["low"] >= HALF and one["attack"] in ended]
        found = replace(found, able=able)
    total = sum(reading.tokens for reading in mine)
    rare = rare_accuracy_of(mine, belief) if subject.truth else None
    read, exact = _secrets(subject, extra), [bool(one.score and one.score.exact) for one in mine]
    findings = {
        "format": FORMAT,
        "status": status_of(found),
        "exit_code": EXIT_CODES[status_of(found)],
        "sentence": sentence_of(found, minutes, best_of(mine), subject.attacker.words),
        "defense": list(subject.defense),
        "model": subject.name,
        "layer": model.site.layer,
        "stream": model.site.stream,
        "seed": seed,
        "minutes": minutes,
        "attacker": {
            **subject.attacker.to_json(),
            "words": subject.attacker.words,
            "reads": _reads(rows[:own]),
        },
        "prompts": own,
        "truth": subject.truth,
        "leak": found.leak._asdict(),
        "control": sum(guessed) / total if subject.truth else None,
        "exact": share(exact)._asdict() if subject.truth else None,
        "token_accuracy": sum(one.right for one in mine) / total if subject.truth else None,
        "verified": min(1.0, sum(one.sure for one in mine) / total),
        "rouge_l": mean([one.score.rouge_l if one.score else 0.0 for one in mine])._asdict()
        if subject.truth
        else None,
        "rare_accuracy": rare._asdict() if rare is not None else None,
        "secrets": {"read": read, "planted": len(extra)} if extra else None,
        "shown_accuracy": shown_accuracy_of(mine, attempts),
        "oracle": oracle_of(mine, attempts, guessed)._asdict() if subject.truth else None,
        "attacks": [told_of(attempt, mine, subject.truth) for attempt in attempts],
        "undefended": undefended,
        "utility": utility,
        "cost": cost,
        "readings": [reading.told() for reading in mine],
        "leakiest": leakiest_of(model, mine),
    }
    made: dict[str, Any] = finite(findings)
    return made


def _evidence(
    subject: Subject,
    mine: Sequence[Reading],
    extra: Sequence[Reading],
    guessed: Sequence[int],
    attempts: Sequence[Attempt],
) -> Evidence:
    """Return what the verdict rests on, but for what attacks read without the defense."""
    lengths = [reading.tokens for reading in mine]
    leak = leak_of([min(one.right, one.tokens) for one in mine], guessed, lengths)
    sure = [one.result is not None and solved(one.result, one.observation) for one in mine]
    exact = [bool(one.score and one.score.exact) for one in mine] if subject.truth else sure
    beyond = sum(whole and n < one.tokens for whole, n, one in zip(exact, guessed, mine, strict=True))
    endless, table = {step.name for step in ATTACKS if step.endless}, subject.model.embedding
    return Evidence(
        leak,
        beyond,
        (_secrets(subject, extra), len(extra)),
        short=[one.attack for one in attempts if one.status == OUT_OF_TIME and one.attack not in endless],
        crashed=[one.attack for one in attempts if one.status == CRASHED],
        misled=sum(is_misled(one, attempts, i, table) for i, one in enumerate(mine)) if subject.truth else 0,
        undecoded=undecoded_of(mine, attempts),
        unread=sum(reads(one.observation.info) == "first" for one in mine),
        truth=subject.truth,
    )


def _reads(rows: Sequence[Observation]) -> Reads | None:
    """Return what attacks read of several releases of each prompt, the least of it where prompts differ."""
    found = {reads(one.info) for one in rows}
    order: tuple[Reads, ...] = ("first", "mean", "same")
    return next((one for one in order if one in found), None)


def _secrets(subject: Subject, extra: Sequence[Reading]) -> int:
    """Return how many planted secrets were read."""
    return sum(_holds(reading.result, one.secret) for reading, one in zip(extra, subject.texts, strict=True))


def _holds(result: AttackResult | None, secret: str) -> bool:
    return result is not None and secret in (result.text or "")


def _guessed(subject: Subject, progress: Progress) -> list[int]:
    """Return how many tokens of each prompt are guessed without its rows; none where no truth tells."""
    if not subject.truth:
        return [0] * len(subject.cases)
    truths = [truth_of(case).tokens for case in subject.cases]
    said = guesses(subject.model, subject.cases, subject.seed, progress)
    return [
        sum(a == b for a, b in zip(one, truth, strict=True)) for one, truth in zip(said, truths, strict=True)
    ]


def _undefended(
    subject: Subject,
    guessed: Sequence[int],
    attempts: Sequence[Attempt],
    seconds: float,
    recorder: Recorder,
    progress: Progress,
) -> list[dict[str, Any]]:
    """Return what each attack that ran behind the defense reads without it, in as much time.

    All together take no more than the attacks behind the defense may. One that this cuts off is told of as it is.

    Args:
        seconds: that all attacks may take.
    """
    model, cases = subject.model, subject.cases
    shown = [observation for observation, _ in release_all(model, Channel([]), cases, subject.seed)]
    lengths = [len(truth_of(case).tokens) for case in cases]
    told = list[dict[str, Any]]()
    steps = {step.name: step for step in steps_of(subject.attacker, ATTACKS)}
    for number, attempt in enumerate(attempts):
        if attempt.status in (CRASHED, NOT_APPLICABLE):
            continue
        step, diary = steps[attempt.attack], Kept(recorder, model, cases, shown, UNDEFENDED, number)
        allowed = min(attempt.allowed, max(0.0, seconds - sum(one["seconds"] for one in told)))
        (again,) = attack_all(shown, model, subject.seed, allowed, progress, [step], diary=diary)
        right = [right_of(again.results.get(i), case) for i, case in enumerate(cases)]
        told.append(
            {
                "attack": again.attack,
                "status": again.status,
                "seconds": again.seconds,
                "leak": leak_of(right, guessed, lengths)._asdict(),
            }
        )
    return told
