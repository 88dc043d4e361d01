"""The sentence with which 'check', 'score' and 'audit' begin: good only where the exit code is 0."""

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from hiddenlab.cli import app, verdicts, verify

GOOD_WORDS = ("VALID", "NO DIVERGENCE", "QUIET")
Answer = Callable[..., Result]


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Answer:
    """Run a command whose work gives a certain result."""
    monkeypatch.chdir(tmp_path)

    def run(verb: str, result: dict[str, Any], *more: str) -> Result:
        monkeypatch.setattr(verify, "conduct", lambda *_, **__: result)
        return CliRunner().invoke(app, ["verify", verb, "x", *more], env={"COLUMNS": "60"})

    return run


def check_result(*classes: str, measured: tuple[str, ...] = ("exponents",)) -> dict[str, Any]:
    """A result of 'check' with a request for each verdict."""
    rows = [
        {"id": f"r{i}", "verdict": name, "reason": "a reason", "tokens": 5, "covered": 0}
        | (dict.fromkeys(measured, 0.0) if name != "unchecked" else {})
        for i, name in enumerate(classes)
    ]
    counts = {name: classes.count(name) for name in ("valid", "rejected", "unchecked")}
    coverage = {"tokens": 5 * counts["valid"], "covered": 0, "without_value": 5 * counts["valid"]}
    return {"format": 1, "counts": counts, "coverage": coverage, "limits": {}, "requests": rows}


def score_result(diverges: bool | None, undecided: str | None) -> dict[str, Any]:
    """A result of 'score'."""
    verdict = {
        "diverges": diverges, "score": "cross_entropy", "mean": 0.123456, "honest_mean": 0.1, "p": 0.0123,
        "least_p": 0.05, "clipped_at": 1.0,
    }  # fmt: skip
    return {
        "format": 1,
        "summary": {"tokens": 5},
        "requests": [{"id": "r"}],
        "verdict": verdict,
        "undecided": undecided,
    }


def audit_result(*classes: str) -> dict[str, Any]:
    """A result of 'audit' with a file for each class."""
    files = [
        {"file": f"{i}.jsonl", "class": name, "reasons": [name], "tokens": 5}
        for i, name in enumerate(classes)
    ]
    return {"format": 1, "settings": {}, "ledger": None, "files": files}


def agreed(result: Result) -> str:
    """The first line, which is good where the exit code says so, and nowhere else."""
    assert result.exit_code in (0, 1), result.output
    first = result.stdout.splitlines()[0]
    assert first.startswith(GOOD_WORDS) == (result.exit_code == 0), result.output
    return first


@pytest.mark.parametrize("count", [1, 2, 3])
def test_check_is_good_where_all_are_valid(answer: Answer, count: int) -> None:
    for classes in product(("valid", "rejected", "unchecked"), repeat=count):
        first = agreed(answer("check", check_result(*classes)))
        for word in ("rejected", "unchecked"):
            if word in classes:
                expected = f"{word.upper()} {classes.count(word)} of {count} request"
                assert first.startswith(expected)
                break
        else:
            assert first.startswith(f"VALID {count} of {count} request{'s' * (count > 1)}: the proofs fit ")


@pytest.mark.parametrize(
    ("measured", "what"),
    [
        (("exponents",), "the proofs fit"),
        (("distance",), "the fingerprints fit"),
        (("distance", "exponents"), "the proofs and fingerprints fit"),
    ],
)
def test_check_names_what_was_checked(measured: tuple[str, ...], what: str) -> None:
    said, style = verdicts.of_check(check_result("valid", "valid", measured=measured), "m in float32")
    assert said == f"VALID 2 of 2 requests: {what} m in float32."
    assert style == verdicts.GOOD
    said, style = verdicts.of_check(check_result("valid", "rejected", measured=measured), "m")
    assert (
        said.startswith("REJECTED 1 of 2 requests: proofs or fingerprints do not fit m, ")
        and style == verdicts.BAD
    )


def test_score_is_good_where_it_does_not_diverge(answer: Answer) -> None:
    missing = (
        "no verdict: 3 honest requests and 3 to be judged cannot give a p below 0.05; compare more requests"
    )
    assert agreed(answer("score", score_result(None, missing))) == (
        "NO VERDICT: 3 honest requests and 3 to be judged cannot give a p below 0.05; compare more requests."
    )
    none = {
        **score_result(None, "no verdict without honest transcripts; give them with --honest"),
        "verdict": None,
    }
    assert agreed(answer("score", none)).startswith("NO VERDICT: without honest transcripts")
    found = agreed(answer("score", score_result(True, None)))
    assert found.startswith("DIVERGES: ") and "mean cross entropy 0.123, honest ones 0.1, p = 0.012" in found
    quiet = agreed(answer("score", score_result(False, None), "--false-positives", "0.05"))
    assert quiet.startswith("NO DIVERGENCE found at 5 % false positives (mean cross entropy 0.123")
    assert quiet.endswith("can stay unseen.")


@pytest.mark.parametrize("count", [1, 2, 3])
def test_audit_is_good_where_every_file_is_quiet(answer: Answer, count: int) -> None:
    for classes in product(("quiet", "review", "quarantine"), repeat=count):
        first = agreed(answer("audit", audit_result(*classes)))
        worst = next(name for name in ("quarantine", "review", "quiet") if name in classes)
        number = f"{classes.count(worst)} of {count}" if worst != "quiet" else str(count)
        assert first.startswith(f"{worst.upper()} {number} file")


def test_json_holds_no_sentence(answer: Answer) -> None:
    for verb, result in (
        ("check", check_result("valid")),
        ("score", score_result(True, None)),
        ("audit", audit_result("review")),
    ):
        made = answer(verb, result, "--json")
        assert json.loads(made.stdout) == result
        assert made.exit_code == (0 if verb == "check" else 1)
