"""The verification experiments on a tiny model: every cell measures, answers are shared, an adversary is tuned."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hiddenlab.defenses.verification.causal_lm import load_whole
from hiddenlab.defenses.verification.difr import Verifier
from hiddenlab.errors import InputError
from hiddenlab.eval.cells import MEASURED, Setting, measure_cell
from hiddenlab.eval.measures import answers
from hiddenlab.eval.measures import verification as measures
from hiddenlab.eval.tables import fingerprints, tampering, verification
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
    finite = np.isfinite(scores["filtered_cross_entropy"])
    assert (finite == np.isfinite(scores["margin"])).all()
    assert (scores["filtered_cross_entropy"] <= scores["cross_entropy"] + 1e-6)[finite].all()
    assert len(scores["toploc:128:32:accepted"]) == 8 * 3 and scores["toploc:128:32:accepted"].all()
    assert scores["activation:orthogonal:8"].max() < 0.1
    assert not list(home.rglob(".*"))


@pytest.mark.slow
def test_proofs_of_single_tokens_are_compared_as_their_numbers(spec: dict[str, Any], home: Path) -> None:
    """A proof of all 64 values of a state misses none, so that bits can be compared one by one."""
    given = {**spec, "variant": "layers=3"}
    found, made = answers.proven(given, home), answers.answered(given, home)
    verifier = Verifier(load_whole(spec["model"], dtype=spec["dtype"], device="cpu"))
    rows = [verifier.replay(transcript).output_states for transcript in made.transcripts]
    for i, (sent, own) in enumerate(zip(torch.cat(made.outputs), torch.cat(rows), strict=True)):
        ours, theirs = (side.bfloat16().view(torch.int16).tolist() for side in (own, sent))
        errors = [
            abs((a & 127) - (b & 127)) for a, b in zip(ours, theirs, strict=True) if (a ^ b) & 0xFF80 == 0
        ]
        assert found["toploc:64:1:exponents"][i] == 64 - len(errors)
        assert found["toploc:64:1:mean"][i] == pytest.approx(np.mean(errors) if errors else np.inf)
        assert found["toploc:64:1:median"][i] == (np.median(errors) if errors else np.inf)
    honest = answers.proven({**spec, "variant": "honest"}, home)
    assert honest["toploc:8:1:exponents"].mean() < 0.1 < found["toploc:8:1:exponents"].mean()
    together = answers.pooled([given], home, "toploc:8:1")
    assert together.shape == (8 * 36, 3) and (together[:, 0] == found["toploc:8:1:exponents"]).all()


def test_an_honest_pool_can_be_chosen(spec: dict[str, Any], home: Path) -> None:
    setting = Setting(model=spec["model"], prompts=spec["prompts"], limit=4, max_tokens=8, device="cpu")
    alone = verification.detection(setting, providers="seed=1", honest="honest")
    assert {tuple(cell.spec["honest"]) for cell in alone.cells} == {("honest",)}
    assert any(note.startswith("Honest: honest, less") for note in alone.notes)
    assert fingerprints.activations(setting, honest="threads=1;batch=3").cells[0].spec["honest"] == [
        "threads=1", "batch=3"
    ]  # fmt: skip
    with pytest.raises(InputError, match="no part of a variant"):
        verification.detection(setting, honest="fast")
    with pytest.raises(InputError, match="no honest provider is left"):
        measures.detection(
            {**spec, "variant": "honest", "honest": ["honest"], "score": "margin", "sizes": [1]},
            home / "cells" / "x",
        )


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("measure", "extra", "figure"),
    [
        ("detection", {"honest": ["honest", "batch=3"], "score": "margin", "sizes": [1, 30]}, "auc_30"),
        (
            "detection",
            {"honest": ["honest", "batch=3"], "score": "activation:orthogonal:4", "sizes": [4]},
            "auc_4",
        ),
        ("detection", {"honest": ["honest", "batch=3"], "score": "toploc:4:1", "sizes": [4]}, "auc_4"),
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
    figures = getattr(measures, measure)({**spec, **extra, "variant": "seed=1"}, folder)
    low, value, high = (figures[figure][name] for name in ("low", "value", "high"))
    assert low <= value <= high


@pytest.mark.slow
def test_detection_tells_a_seed_from_an_honest_provider(spec: dict[str, Any], home: Path) -> None:
    folder = home / "cells" / "one"
    given = {**spec, "honest": ["honest", "batch=3"], "score": "margin", "sizes": [60]}
    found = {
        v: measures.detection({**given, "variant": v}, folder)["auc_60"]["value"]
        for v in ("seed=1", "batch=3")
    }
    assert found["seed=1"] > 0.95 > found["batch=3"]
    with pytest.raises(InputError, match="too few"):
        measures.detection({**given, "variant": "seed=1", "sizes": [10_000]}, folder)


def test_a_frontier_of_bytes_keeps_what_nothing_cheaper_beats(spec: dict[str, Any]) -> None:
    made = fingerprints.fingerprint_pareto(
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
    assert costs[0] == 1 / 32 and found[-1] == 1.0
    sent = [one["keys"]["bytes a token"] for one in rows if "Activation-DiFR, sent" in one["figures"]]
    plain = [one["keys"]["bytes a token"] for one in rows if "Activation-DiFR" in one["figures"]]
    assert sent == [2 * cost for cost in plain]


def test_experiments_are_cells_of_known_measures(spec: dict[str, Any], tmp_path: Path) -> None:
    setting = Setting(model=spec["model"], prompts=spec["prompts"], limit=2, max_tokens=6, device="cpu")
    for make in (
        verification.detection,
        fingerprints.activations,
        fingerprints.fingerprint_cost,
        verification.providers,
        verification.toploc_table,
    ):
        made = make(setting)
        assert made.cells and set(made.figures)
    (cell, *_) = verification.toploc_table(setting, turns=1, new_tokens=4).cells
    assert measure_cell(cell, tmp_path)["status"] == MEASURED


def test_providers_are_placed_between_bands(spec: dict[str, Any], tmp_path: Path) -> None:
    setting = Setting(model=spec["model"], prompts=spec["prompts"], limit=4, max_tokens=8, device="cpu")
    made = verification.bands(setting, providers="batch=3;kv=int4;layers=2", new_tokens=30)
    assert {cell.spec["sampling"]["method"] for cell in made.cells} == {"greedy"}
    (first, *_) = made.cells
    found = measures.band({**first.spec, "variant": "layers=3"}, tmp_path / "cells" / "x")
    scores = answers.scored({**first.spec, "variant": "layers=3"}, tmp_path)
    assert found["margin"]["value"] == pytest.approx(np.minimum(scores["margin"], 3).mean())
    assert found["same_token"]["value"] == pytest.approx((scores["mismatch"] == 0).mean())
    margins = {
        "honest": 0.01,
        "weights=fp8": 0.1,
        "kv=fp8": 0.05,
        "nf4": 0.3,
        "batch=3": 0.001,
        "kv=int4": 0.07,
    }

    def row(name: str) -> dict[str, Any]:
        figures = {"margin": {"value": margins[name]}} if name in margins else {}
        return {"keys": {"provider": name, "lies": ""}, "figures": figures}

    assert made.fold is not None
    folded = made.fold([row(str(cell.spec["variant"])) for cell in made.cells])
    places = {one["keys"]["provider"]: one["keys"]["lies"] for one in folded}
    assert places == {
        **dict.fromkeys(("honest", "weights=fp8", "kv=fp8", "nf4"), "reference"),
        "batch=3": "below honest", "kv=int4": "between kv=fp8 and weights=fp8", "layers=2": "",
    }  # fmt: skip
    margins["layers=2"] = 2.0
    assert made.fold([row(name) for name in margins])[-1]["keys"]["lies"] == "above nf4"
    with pytest.raises(InputError, match="cannot be audited as well"):
        verification.bands(setting, providers="nf4")


@pytest.mark.slow
def test_values_of_float32_need_a_provider_in_float32(spec: dict[str, Any], tmp_path: Path) -> None:
    """TOPLOC, table 5: only a verifier in float32 rejects a provider in bfloat16."""
    setting = Setting(model=spec["model"], prompts=spec["prompts"], limit=2, max_tokens=6, device="cpu")
    accepted, lacking = {}, {}
    for values, other in (("float32", "dtype=bfloat16"), ("bfloat16", "dtype=float32")):
        made = verification.toploc_table(setting, f"honest;{other}", turns=1, new_tokens=36, values=values)
        for cell in made.cells[:2]:
            figures = measures.proofs(dict(cell.spec), tmp_path / "cells" / "one")
            key = values, cell.spec["variant"]
            accepted[key], lacking[key] = figures["proofs_accepted"]["value"], figures["lacking"]["value"]
        assert any(f"of the paper for {values}" in note for note in made.notes)
    assert accepted == {
        ("float32", "honest"): 1.0, ("float32", "dtype=bfloat16"): 0.0,
        ("bfloat16", "honest"): 1.0, ("bfloat16", "dtype=float32"): 1.0,
    }  # fmt: skip
    assert lacking["float32", "honest"] < lacking["float32", "dtype=bfloat16"]
    kept = answers.answered({**made.cells[0].spec, "values": "float32", "dtype": "float32"}, tmp_path)
    assert kept.outputs[0].dtype == torch.float32
    with pytest.raises(InputError, match="proofs of int8 values"):
        verification.toploc_table(setting, values="int8")


def test_times_are_parts_of_a_prefill(spec: dict[str, Any], home: Path) -> None:
    found = measures.proof_cost({**spec, "variant": "honest"}, home / "cells" / "cost")
    whole = found["prefill_milliseconds"]["value"]
    assert found["prefill_milliseconds"]["n"] == 8 and whole > 0
    # Three proofs a request are costlier than one of its chunks.
    assert found["committing"]["value"] * whole > found["milliseconds"]["value"]
    assert found["checking"]["value"] > 0 and found["validation"]["value"] > 0


def test_system_prompts_are_of_the_papers_three_kinds(spec: dict[str, Any]) -> None:
    made = verification.toploc_table(Setting(model=spec["model"], prompts=spec["prompts"], device="cpu"))
    named = [str(cell.spec["variant"]) for cell in made.cells]
    assert all(f"system={text}" in named for text in verification.SYSTEMS.values())
    sentences = [text.count(".") for text in verification.SYSTEMS.values()]
    assert sentences[0] > 1 and sentences[1:] == [1, 1] and len(verification.SYSTEMS["taco"].split()) == 3


@pytest.mark.slow
def test_other_ways_of_sampling_have_their_own_scores(spec: dict[str, Any], home: Path) -> None:
    setting = Setting(model=spec["model"], prompts=spec["prompts"], limit=4, max_tokens=8, device="cpu")
    made = verification.detection(setting, providers="seed=1", new_tokens=36, method="ipt", trials=20)
    names = {str(cell.spec["score"]) for cell in made.cells}
    assert names == {"likelihood", "mismatch", "cross_entropy", "filtered_cross_entropy", "monte_carlo:20"}
    found = {}
    for cell in made.cells:
        given = {**cell.spec, "dtype": "float32", "honest": ["honest", "batch=3"], "sizes": [60]}
        found[cell.spec["score"]] = measures.detection(given, home / "cells" / "ipt")
    for name in ("likelihood", "mismatch", "monte_carlo:20"):
        assert found[name]["auc_60"]["value"] > 0.95 and found[name]["whole_60"]["value"] > 0.95
    assert found["cross_entropy"]["auc_60"]["value"] < 0.9  # a seed does not show in it
    ipt = {**spec, "sampling": {**spec["sampling"], "method": "ipt"}, "variant": "seed=1", "score": "margin"}
    with pytest.raises(InputError, match="no score 'margin'"):
        measures.statistics(ipt, home / "cells" / "ipt")
    with pytest.raises(InputError, match="sampling method"):
        verification.detection(setting, method="beam")


def test_statistics_are_those_of_the_tokens(spec: dict[str, Any], home: Path) -> None:
    given = {**spec, "variant": "seed=1"}
    margins = answers.scored(given, home)["margin"]
    finite = margins[np.isfinite(margins)]
    found = measures.statistics({**given, "score": "margin"}, home / "cells" / "statistics")
    assert found["mean"]["value"] == pytest.approx(finite.mean()) and found["mean"]["n"] == len(margins)
    assert found["p90"]["value"] == pytest.approx(np.percentile(finite, 90))
    assert found["infinite"]["value"] == pytest.approx(1 - len(finite) / len(margins))
    sharp, blunt = (
        measures.statistics({**given, "score": f"likelihood:{sd}"}, home / "cells" / "s")["mean"]
        for sd in (0.02, 0.08)
    )
    assert sharp["value"] > blunt["value"] > 0


@pytest.mark.slow
def test_calibrated_limits_accept_the_honest_and_are_no_looser(spec: dict[str, Any], home: Path) -> None:
    folder = home / "cells" / "limits"
    honest = ["honest", "batch=3", "batch=1"]
    for variant in ("batch=3", "layers=3"):
        published = measures.proofs({**spec, "variant": variant}, folder)
        tight = measures.proofs({**spec, "variant": variant, "honest": honest}, folder)
        assert tight["proofs_accepted"]["value"] <= published["proofs_accepted"]["value"]
        if variant == "batch=3":  # as honest as those that set the limits
            assert tight["proofs_accepted"]["value"] > 0.5
    assert tight["proofs_accepted"]["value"] == 0  # of the pruned model
    with pytest.raises(InputError, match="limits"):
        verification.toploc_table(Setting(model=spec["model"], device="cpu"), limits="loose")


def test_the_cost_of_an_auc_is_that_of_the_cheapest_setting(spec: dict[str, Any]) -> None:
    made = fingerprints.fingerprint_cost(Setting(model=spec["model"], prompts=spec["prompts"], device="cpu"))

    def row(score: str, values: dict[int, float]) -> dict[str, Any]:
        figures = {f"auc_{n}": {"value": v, "n": 8} for n, v in values.items()}
        figures |= {f"tail_{n}": {"value": 1.0, "n": 8} for n in values}
        return {
            "keys": {"provider": "x", "score": score},
            "figures": figures,
            "status": MEASURED,
            "reason": None,
        }

    assert made.fold is not None
    rows = made.fold(
        [
            row("Activation-DiFR, k = 2", {8: 0.96, 32: 0.9995}), row("Activation-DiFR, k = 8", {1: 0.97, 4: 0.999}),
            row("TOPLOC, k = 4", {1: 0.6, 32: 0.96}),
        ]
    )  # fmt: skip
    costs = {
        one["keys"]["AUC"]: {name: figure["value"] for name, figure in one["figures"].items()} for one in rows
    }
    # As the paper counts: k = 8 of one token in 32, 8 / 32; k = 4 of all. A proof has two bytes more than its values.
    assert costs[0.95] == {
        "Activation-DiFR": 0.25, "TOPLOC": 4.0, "Activation-DiFR, sent": 0.5, "TOPLOC, sent": 10.0
    }  # fmt: skip
    assert costs[0.99] == {"Activation-DiFR": 1.0, "Activation-DiFR, sent": 2.0} == costs[0.999]
    assert costs[0.9999] == {}


def test_areas_stand_in_rows_of_their_own(spec: dict[str, Any]) -> None:
    made = verification.areas(Setting(model=spec["model"], prompts=spec["prompts"], device="cpu"))
    figures = {"auc_4": {"value": 0.6}, "whole_4": {"value": 0.9}, "tail_4": {"value": 1.0}}
    assert made.fold is not None
    rows = made.fold([{"keys": {"provider": "x", "score": "margin"}, "figures": figures}])
    found = {row["keys"]["score and area"]: row["figures"] for row in rows}
    assert found == {"margin, whole": {"auc_4": {"value": 0.9}}, "margin, to 1 %": {"auc_4": {"value": 0.6}}}


# ---- changed prompt tokens


@settings(max_examples=60)
@given(
    tokens=st.lists(st.integers(0, 9), min_size=1, max_size=60), others=st.lists(st.integers(0, 9), min_size=1),
    part=st.floats(0, 1), place=st.sampled_from(tampering.PLACES), seed=st.integers(0, 99),
)  # fmt: skip
def test_so_many_tokens_are_changed_there(
    tokens: list[int], others: list[int], part: float, place: str, seed: int
) -> None:
    found = tampering.changed(tokens, others, part, place, 10, torch.Generator().manual_seed(seed))
    places = [i for i, (a, b) in enumerate(zip(tokens, found, strict=True)) if a != b]
    count = max(1, round(part * len(tokens))) if part else 0
    assert len(places) == count and all(0 <= token < 10 for token in found)
    start = {"head": 0, "middle": (len(tokens) - count) // 2, "tail": len(tokens) - count}.get(place)
    assert start is None or places == list(range(start, start + count))


def test_changed_prompts_are_rejected_and_honest_ones_are_not(spec: dict[str, Any], tmp_path: Path) -> None:
    setting = Setting(model=spec["model"], prompts=spec["prompts"], limit=3, max_tokens=60, device="cpu")
    made = tampering.tampering(setting, honest=2)
    rows = {(str(cell.keys["changed"]), str(cell.keys["where"])): cell for cell in made.cells}
    assert len(rows) == len(made.cells) == 4 * 4 + 1 + 2 + 4
    firsts = [cell.spec["first"] for cell in made.cells if cell.keys["changed"] == "nothing (honest)"]
    assert firsts == [0, 2, 4, 6]  # other prompts for every honest provider
    figures = {}
    for key in (("30 % of the prompt", "tail"), ("nothing (honest)", "batch=7")):
        result = measure_cell(rows[key], tmp_path)
        assert result["status"] == MEASURED, result["reason"]
        figures[key[1]] = {name: one["value"] for name, one in result["figures"].items()}
    assert figures["tail"]["rejected,rows"] == figures["tail"]["rejected,largest"] == 1
    assert figures["batch=7"]["rejected,rows"] == 0 and figures["batch=7"]["covered,rows"] == 1
    assert figures["batch=7"]["bytes,paper"] < figures["batch=7"]["bytes,rows"]
    with pytest.raises(InputError, match="unknown rule"):
        tampering.tampering(setting, rules="paper,mine")
    with pytest.raises(InputError, match="one of head"):
        tampering.changed([1], [2], 0.5, "nowhere", 10, torch.Generator())
