"""The verification experiments on a tiny model: every cell measures, answers are shared, an adversary is tuned."""

from pathlib import Path
from typing import Any

import pytest

from eval import answers, verification, verification_cells
from eval.experiment import MEASURED, Setting, measure_cell
from hiddenlab.errors import InputError
from hiddenlab.testing import save_tiny


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("tiny")
    prompts = folder / "prompts.txt"
    prompts.write_text("a first prompt\nthe second one\nand a third\nnumber four\n")
    model = save_tiny("llama", folder / "model", tokenizer=True)
    setting = Setting(model=model, prompts=str(prompts), limit=4, max_tokens=8, device="cpu")
    return {**verification.base(setting, new_tokens=36, turns=2), "dtype": "float32"}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Answers and scores, shared by the tests."""
    return tmp_path_factory.mktemp("home")


def test_answers_are_generated_once_and_scored(spec: dict[str, Any], home: Path) -> None:
    spec = {**spec, "variant": "honest"}
    first = answers.answered(spec, home)
    kept = {path: path.stat().st_mtime_ns for path in home.rglob("*") if path.is_file()}
    again = answers.answered(spec, home)
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert first.transcripts == again.transcripts and len(first.transcripts) == 8
    assert len({one.sampling.seed for one in first.transcripts}) == 8
    scores = answers.scored(spec, home)
    assert len(scores["margin"]) == len(scores["drawn"]) == 8 * 36
    assert scores["mismatch"].mean() < 0.02
    assert len(scores["toploc:128:32:accepted"]) == 8 * 3 and scores["toploc:128:32:accepted"].all()
    assert scores["activation:orthogonal:8"].max() < 0.1
    assert not list(home.rglob(".*"))


def test_other_providers_diverge_in_their_own_scores(spec: dict[str, Any], home: Path) -> None:
    pruned = answers.scored({**spec, "variant": "layers=3"}, home)
    seeded = answers.scored({**spec, "variant": "seed=1"}, home)
    assert pruned["toploc:128:32:accepted"].mean() < 0.5 and pruned["activation:orthogonal:8"].mean() > 0.3
    assert seeded["toploc:128:32:accepted"].all() and seeded["mismatch"].mean() > 0.3


def test_the_adversary_meets_the_honest_cross_entropy(
    spec: dict[str, Any], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Cross-entropy as a line over the temperature: honest 2.0; the deviating one has 2.2 at 1 and 1.9 at 0.85.
    entropies = {"honest": 2.0, "layers=3": 2.2, "layers=3+temperature=0.85": 1.9}
    monkeypatch.setattr(answers, "_entropy", lambda spec, home, progress: entropies[spec["variant"]])
    tuned = {**spec, "variant": f"layers=3+temperature={answers.TUNED}"}
    assert answers._settled(tuned, home, lambda *_: None) == "layers=3+temperature=0.9"
    entropies["layers=3+temperature=0.85"] = 2.3
    with pytest.raises(InputError, match="nothing to tune"):
        answers._settled(tuned, home, lambda *_: None)


@pytest.mark.parametrize(
    ("measure", "extra", "figure"),
    [
        ("detection", {"honest": ["honest", "batch=3"], "score": "margin", "sizes": [1, 30]}, "auc_30"),
        (
            "detection",
            {"honest": ["honest", "batch=3"], "score": "activation:orthogonal:4", "sizes": [4]},
            "auc_4",
        ),
        ("agreement", {"against": "seed=2"}, "same_token"),
        ("uniformity", {"requests": 4}, "rank_uniformity_p"),
        ("proofs", {}, "requests_accepted"),
        ("proof_cost", {}, "milliseconds"),
    ],
)
def test_cells_measure(
    measure: str, extra: dict[str, Any], figure: str, spec: dict[str, Any], home: Path
) -> None:
    folder = home / "cells" / measure
    figures = getattr(verification_cells, measure)({**spec, **extra, "variant": "seed=1"}, folder)
    low, value, high = (figures[figure][name] for name in ("low", "value", "high"))
    assert low <= value <= high


def test_detection_tells_a_seed_from_an_honest_provider(spec: dict[str, Any], home: Path) -> None:
    folder = home / "cells" / "one"
    given = {**spec, "honest": ["honest", "batch=3"], "score": "margin", "sizes": [60]}
    found = {
        v: verification_cells.detection({**given, "variant": v}, folder)["auc_60"]["value"]
        for v in ("seed=1", "batch=3")
    }
    assert found["seed=1"] > 0.95 > found["batch=3"]
    with pytest.raises(InputError, match="too few"):
        verification_cells.detection({**given, "variant": "seed=1", "sizes": [10_000]}, folder)


def test_a_frontier_of_bytes_keeps_what_nothing_cheaper_beats(spec: dict[str, Any]) -> None:
    made = verification.fingerprint_pareto(
        Setting(model=spec["model"], prompts=spec["prompts"], device="cpu")
    )
    values = {1: 0.5, 2: 0.7, 4: 0.7, 8: 0.9, 16: 0.9, 32: 1.0}

    def row(score: str, gain: float) -> dict[str, Any]:
        figures = {f"auc_{n}": {"value": min(1.0, v + gain)} for n, v in values.items()}
        return {
            "keys": {"provider": "nf4", "score": score},
            "figures": figures,
            "paper": {},
            "status": MEASURED,
        }

    assert made.fold is not None
    rows = made.fold(
        [row("Activation-DiFR, k = 1", 0.0), row("Activation-DiFR, k = 4", 0.1), row("cross-entropy", 0.4)]
    )
    costs = [one["keys"]["bytes a token"] for one in rows]
    found = [
        one["figures"]["Activation-DiFR"]["value"] for one in rows if "Activation-DiFR" in one["figures"]
    ]
    assert costs == sorted(costs) and found == sorted(found) and len(set(found)) == len(found)
    assert costs[0] == 2 / 32 and found[-1] == 1.0


def test_experiments_are_cells_of_known_measures(spec: dict[str, Any], tmp_path: Path) -> None:
    setting = Setting(model=spec["model"], prompts=spec["prompts"], limit=2, max_tokens=6, device="cpu")
    for make in (
        verification.detection,
        verification.activations,
        verification.providers,
        verification.toploc_table,
    ):
        made = make(setting)
        assert made.cells and set(made.figures)
    (cell, *_) = verification.toploc_table(setting, turns=1, new_tokens=4).cells
    assert measure_cell(cell, tmp_path)["status"] == MEASURED
