"""The sentences that end an attack: every number in them is that of the samples, and they claim nothing more."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hiddenlab.summary import NOT_APPLICABLE, Sample, conclusion, wrong_but_verified

TOKENS = st.integers(0, 2)  # few, so that right, wrong and verified ones all meet


def attacked(
    truth: list[int] | None, got: list[int], sure: list[bool], positions: list[int] | None = None
) -> Sample:
    """A sample with the fields that ``hiddenlab.batch.sample_of`` gives it."""
    size = len(got if truth is None else truth)
    sample: Sample = {
        "id": "p", "status": "attacked", "truth_ids": truth, "recovered_ids": got, "positions": positions,
        "tokens": size, "verified": sum(sure) / max(1, size), "per_token": {"verified": sure},
        "exact": None, "token_accuracy": None,
    }  # fmt: skip
    if truth is not None:
        held = held_of(sample)
        sample["token_accuracy"] = sum(held.get(i) == token for i, token in enumerate(truth)) / len(truth)
        sample["exact"] = held == dict(enumerate(truth))
    return sample


def held_of(sample: Sample) -> dict[int, int]:
    """The recovered tokens by their places in the prompt."""
    got, positions = sample["recovered_ids"], sample["positions"]
    own = positions is None or len(got) == len(sample["truth_ids"])
    return dict(zip(range(len(got)) if own else positions, got, strict=True))


NONE: Sample = {"id": "n", "status": NOT_APPLICABLE, "reason": "no", "exact": None}


@st.composite
def samples_of_runs(draw: Any) -> list[Sample]:
    """Samples of a run: with and without truths, cut short, with gaps, and not attacked at all."""
    made: list[Sample] = []
    for kind in draw(st.lists(st.sampled_from(["truth", "exact", "none", "left out"]), max_size=5)):
        truth = draw(st.lists(TOKENS, min_size=1, max_size=6))
        if kind == "left out":
            made.append(NONE)
            continue
        positions = None
        got = truth if kind == "exact" else draw(st.lists(TOKENS, max_size=len(truth)))
        if len(got) < len(truth) and draw(st.booleans()):
            places = st.integers(0, len(truth) - 1)
            positions = sorted(draw(st.sets(places, min_size=len(got), max_size=len(got))))
        sure = draw(st.lists(st.booleans(), min_size=len(got), max_size=len(got)))
        made.append(attacked(None if kind == "none" else truth, got, sure, positions))
    return made


def number(pattern: str, text: str) -> int:
    """The number that stands in place of ``#``, 0 where the words are not there."""
    found = re.findall(pattern.replace("#", r"(\d+)"), text)
    assert len(found) <= 1, (pattern, text)
    return int(found[0]) if found else 0


@given(samples=samples_of_runs())
def test_every_number_is_that_of_the_samples(samples: list[Sample]) -> None:
    text = conclusion(samples)
    done = [sample for sample in samples if sample is not NONE]
    scored = [sample for sample in done if sample["truth_ids"] is not None]
    others = [sample for sample in done if sample["truth_ids"] is None]
    if not done:
        assert text == "Nothing was attacked."
        return
    assert number("# prompts? could not be attacked", text) == len(samples) - len(done)
    sure = sum(sum(sample["per_token"]["verified"]) for sample in others)
    tokens = sum(len(sample["recovered_ids"]) for sample in others)
    if not scored:
        assert "exactly" not in text and "right" not in text and "wrong" not in text
        assert ("There is no truth" in text) == bool(tokens)
        if tokens:
            found = re.match(r"(\d+) of (\d+) tokens? recovered and verified", text)
            assert found and [*map(int, found.groups())] == [sure, tokens]
            assert ("guesses" in text) == (sure < tokens)
        else:
            assert text.startswith("No token was recovered.")
        return
    exact = [sample["recovered_ids"] == sample["truth_ids"] for sample in scored]
    known = sum(len(sample["truth_ids"]) for sample in scored)
    right = sum(
        held_of(sample).get(place) == token
        for sample in scored
        for place, token in enumerate(sample["truth_ids"])
    )
    if len(scored) > 1:
        assert text.startswith(f"{sum(exact)} of {len(scored)} prompts were recovered exactly")
    else:
        assert text.startswith(f"The prompt was {'' if exact[0] else 'not '}recovered exactly")
    assert ("right" in text) == (not all(exact))
    if not all(exact):
        found = re.search(r"(\d+) of (\d+) tokens? (?:are )?right", text)
        assert found and [*map(int, found.groups())] == [right, known]
    scored_sure = sum(sum(sample["per_token"]["verified"]) for sample in scored)
    found = re.search(r"\((\d+) tokens?, (?:(\d+)|all) verified\)", text)
    assert found and int(found[1]) == known
    assert int(found[2] or known) == scored_sure
    behind = sum(len(sample["truth_ids"]) - 1 - max(held_of(sample), default=-1) for sample in scored)
    assert number("# tokens? of the truth comes? after the last one found", text) == behind
    wrong = 0
    for sample in scored:
        for (place, token), verified in zip(
            held_of(sample).items(), sample["per_token"]["verified"], strict=True
        ):
            wrong += verified and sample["truth_ids"][place] != token
    assert (
        number("# verified tokens? (?:is|are) wrong", text)
        == wrong
        == wrong_but_verified(samples_done(samples))
    )
    assert number("# other prompts? cannot be compared", text) == len(others)
    if others:
        found = re.search(r"with a truth: (\d+) of (\d+) tokens? verified", text)
        assert found and [*map(int, found.groups())] == [sure, tokens]


def samples_done(samples: list[Sample]) -> list[Sample]:
    return [sample for sample in samples if sample is not NONE]


RIGHT = attacked([1, 2, 0], [1, 2, 0], [True, True, True])
HALF = attacked([1, 2, 0, 1], [1, 2, 1, 1], [True, True, True, False])


@pytest.mark.parametrize(
    ("samples", "text"),
    [
        ([], "Nothing was attacked."),
        ([NONE], "Nothing was attacked."),
        ([RIGHT], "The prompt was recovered exactly (3 tokens, all verified)."),
        (
            [attacked([1], [1], [False])],
            "The prompt was recovered exactly (1 token, 0 verified).",
        ),
        (
            [HALF],
            "The prompt was not recovered exactly: 3 of 4 tokens are right (4 tokens, 3 verified). "
            "1 verified token is wrong.",
        ),
        (
            [RIGHT, HALF, NONE],
            "1 of 2 prompts were recovered exactly, with 6 of 7 tokens right (7 tokens, 6 verified). "
            "1 verified token is wrong. 1 prompt could not be attacked.",
        ),
        (
            [attacked([1, 2, 0, 1], [1, 0], [True, True], [0, 2])],
            "The prompt was not recovered exactly: 2 of 4 tokens are right (4 tokens, 2 verified). "
            "1 token of the truth comes after the last one found.",
        ),
        ([RIGHT, RIGHT], "2 of 2 prompts were recovered exactly (6 tokens, all verified)."),
        (
            [attacked(None, [1, 2], [True, False])],
            "1 of 2 tokens recovered and verified; the others are the attack's best guesses. "
            "There is no truth to compare with.",
        ),
        (
            [attacked(None, [1], [True]), NONE, NONE],
            "1 of 1 token recovered and verified. There is no truth to compare with. "
            "2 prompts could not be attacked.",
        ),
        ([attacked(None, [], [])], "No token was recovered."),
        # What is known of one prompt is not said of another one.
        (
            [RIGHT, attacked(None, [1, 2], [False, False])],
            "The prompt was recovered exactly (3 tokens, all verified). 1 other prompt cannot be compared with a "
            "truth: 0 of 2 tokens verified.",
        ),
        # A prompt that was cut short, and one with a gap, hold wrong verified tokens too.
        (
            [attacked([1, 2, 0], [1, 1], [True, True])],
            "The prompt was not recovered exactly: 1 of 3 tokens are right (3 tokens, 2 verified). "
            "1 token of the truth comes after the last one found. 1 verified token is wrong.",
        ),
        (
            [attacked([1, 2, 0], [2, 2], [True, True], [1, 2])],
            "The prompt was not recovered exactly: 1 of 3 tokens are right (3 tokens, 2 verified). "
            "1 verified token is wrong.",
        ),
    ],
)
def test_sentences(samples: list[Sample], text: str) -> None:
    assert conclusion(samples) == text
