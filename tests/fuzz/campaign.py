"""The campaign: valid files, mutated, through every reader; faults are saved, and shrunk to what is needed."""

import hashlib
import json
import resource
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from hiddenlab.errors import HiddenlabError
from tests.fuzz.mutate import mutated
from tests.fuzz.readers import NotValid, Target
from tests.fuzz.reference import Either, Refused

SLOW_SECONDS = 5.0
SHRINK_TRIES = 300
REFUSALS = (HiddenlabError, NotValid)


class Hang(BaseException):
    """A reader took too long; no ``except Exception`` of a reader may catch it."""


@dataclass
class Tally:
    """What came out for one reader."""

    cases: int = 0
    accepted: int = 0
    refused: int = 0
    faults: Counter[str] = field(default_factory=Counter)


def judge(target: Target, data: bytes) -> str:
    """What is wrong with a reader's answer to some bytes, or nothing: a short line that names the fault."""
    try:
        with limited():
            content = target.read(data)
    except REFUSALS as error:
        if "\n" in str(error) or not str(error).isprintable():
            return "message of several lines or with control characters"
        return _refused(target, data)
    except Hang:
        return "hang"
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__} in {Path(place.filename).name}:{place.name}"
    return _accepted(target, data, content)


def _refused(target: Target, data: bytes) -> str:
    if target.reference is None:
        return "" if not target.same or data != target.seeds[0] else "a valid file refused"
    try:
        target.reference(data)
    except Refused:
        return ""
    return "refused, and the reference accepts it"


def _accepted(target: Target, data: bytes, content: Any) -> str:
    if target.same:
        return "" if content == target.read(target.seeds[0]) else "a change to something signed was accepted"
    if target.reference is None:
        return ""
    try:
        expected = target.reference(data)
    except Either as either:
        expected = either.content
    except Refused:
        return "accepted, and the reference refuses it"
    return "" if plain(content) == plain(expected) else "accepted with other content than the reference's"


def plain(value: Any) -> Any:
    """A content as text, so that tuples and lists, 1 and 1.0 are alike, and True and 1 are not."""
    return json.dumps(value, sort_keys=True, default=list, cls=_Numbers)


class _Numbers(json.JSONEncoder):
    def iterencode(self, o: Any, _one_shot: bool = False) -> Iterator[str]:
        return super().iterencode(_floats(o), _one_shot)

    def encode(self, o: Any) -> str:
        return super().encode(_floats(o))


def _floats(value: Any) -> Any:
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return value
    if isinstance(value, int | float):
        return float(value)
    if isinstance(value, dict):
        return {key: _floats(one) for key, one in value.items()}
    return [_floats(one) for one in value]


@contextmanager
def limited() -> Iterator[None]:
    """Raise ``Hang`` after some seconds."""

    def stop(number: int, frame: Any) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, SLOW_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def case(target: Target, seed: int, number: int) -> bytes:
    """The bytes of one case; the same numbers give the same bytes."""
    random = Random(f"{seed} {target.name} {number}")
    return mutated(random.choice(target.seeds), target.seeds, random)


def run(
    targets: list[Target],
    *,
    seed: int,
    cases: int | None,
    minutes: float | None,
    save: Path | None,
    tell: Callable[[str], None] = lambda line: None,
) -> dict[str, Tally]:
    """Run so many cases a reader, or for so long; where ``save`` is given, faults are written there.

    Args:
        seed: of all cases. tell: gets a line a minute.
    """
    tallies = {target.name: Tally() for target in targets}
    start = said = time.monotonic()
    number = 0
    while cases is None or number < cases:
        for target in (one for one in targets if number % one.every == 0):
            one_case(target, seed, number, tallies[target.name], save)
        number += 1
        now = time.monotonic()
        if minutes is not None and now - start > 60 * minutes:
            break
        if now - said > 60:
            said = now
            total = sum(t.cases for t in tallies.values())
            faults = sum(t.faults.total() for t in tallies.values())
            tell(f"{total} cases in {now - start:.0f} s, {faults} faults, peak memory {peak_mb():.0f} MB")
    return tallies


def one_case(target: Target, seed: int, number: int, tally: Tally, save: Path | None) -> None:
    """Judge one case and count it."""
    data = case(target, seed, number)
    if save is not None:
        (save / "running").write_bytes(
            target.name.encode() + b"\n" + data
        )  # what a crash of the process leaves behind
    fault = judge(target, data)
    tally.cases += 1
    if fault:
        if not tally.faults[fault] and save is not None:
            keep(target, shrunk(target, data, fault), fault, save)
        tally.faults[fault] += 1


def shrunk(target: Target, data: bytes, fault: str) -> bytes:
    """Cut out parts as long as the same fault is left."""
    size, tries = max(1, len(data) // 2), 0
    while size and tries < SHRINK_TRIES and fault != "hang":
        at, smaller = 0, False
        while at < len(data) and tries < SHRINK_TRIES:
            shorter = data[:at] + data[at + size :]
            tries += 1
            if judge(target, shorter) == fault:
                data, smaller = shorter, True
            else:
                at += size
        size = size if smaller and size == 1 else size // 2
    return data


def keep(target: Target, data: bytes, fault: str, save: Path) -> None:
    """Write a failing input; moved to ``tests/fuzz/cases`` it is a test."""
    digest = hashlib.sha256(data).hexdigest()[:8]
    path = save / f"{target.name.replace(' ', '_').replace('/', '+')}-{digest}"
    path.write_bytes(data)
    path.with_name(path.name + ".txt").write_text(fault + "\n", encoding="utf-8")


def peak_mb() -> float:
    """Peak memory of this process so far, in megabytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
