"""TOPLOC's errors by number of values and place, and its moduli: fast paths against slow oracles."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hiddenlab.defenses.verification.causal_lm import load_whole
from hiddenlab.defenses.verification.difr import Verifier
from hiddenlab.defenses.verification.formats import FORMATS
from hiddenlab.defenses.verification.polynomials import injective_modulus
from hiddenlab.defenses.verification.rules import PAPER
from hiddenlab.errors import InputError
from hiddenlab.eval.cells import Setting
from hiddenlab.eval.measures import answers
from hiddenlab.eval.measures import toploc_errors as measures
from hiddenlab.eval.tables import toploc_errors as tables
from hiddenlab.eval.tables import verification
from hiddenlab.testing import save_tiny

PATTERNS = FORMATS["bfloat16"].patterns


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("tiny")
    prompts = folder / "prompts.txt"
    prompts.write_text("a first prompt\nthe second one\n")
    model = save_tiny("llama", folder / "model", tokenizer=True)
    setting = Setting(model=model, prompts=str(prompts), limit=2, max_tokens=8, device="cpu")
    return verification.base(setting, new_tokens=70, turns=1)


def exponent(pattern: int) -> int:
    return pattern >> 7 & 0xFF


def slow_views(sent: np.ndarray, own: np.ndarray) -> dict[str, tuple[list[int], list[int], int | None]]:
    """The same by sets and loops: exponents' differences, mantissas' differences, and how many are lacking."""
    seen: dict[str, tuple[list[int], list[int], int | None]] = {}
    for k in measures.counts(own.size):
        mine, theirs = (set(PAPER.choose(side[None], k).tolist()) for side in (own, sent))
        for label, places in ((f"top {k}", mine), (f"top {k}, on both sides", mine & theirs)):
            pairs = [(int(own[place]), int(sent[place])) for place in sorted(places)]
            exponents = [abs(exponent(a) - exponent(b)) for a, b in pairs]
            mantissas = [abs((a & 127) - (b & 127)) for a, b in pairs if a >> 7 == b >> 7]
            seen[label] = exponents, mantissas, len(mine - theirs) if places is mine else None
    return seen


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.5, 3.0])
def test_views_are_those_of_sets_and_loops(noise: float) -> None:
    draws = torch.Generator().manual_seed(int(10 * noise))
    own = torch.randn(300, generator=draws).mul(4).round() / 4  # many ties, and zeros
    other = own + noise * torch.randn(300, generator=draws)
    sent, mine = PATTERNS(other), PATTERNS(own)
    slow = slow_views(sent, mine)
    fast = dict(measures.views(sent, mine, "here"))
    assert set(fast) == {*slow, "here"}
    floors = list(measures.BANDS.values())
    for label, (exponents, mantissas, lacking) in slow.items():
        bands = [
            sum(low <= apart < high for apart in exponents)
            for low, high in zip(floors, [*floors[1:], 999], strict=True)
        ]
        assert fast[label].bands.tolist() == bands and fast[label].lacking == lacking
        assert fast[label].mantissas.tolist() == [mantissas.count(apart) for apart in range(128)]
    assert fast["here"] is fast["top 128"]
    assert sum(fast["top 300"].bands) == 300 and fast["top 300"].lacking == 0


def test_values_that_are_lacking_are_told_from_values_that_differ() -> None:
    """The provider's last value is zero, and another takes its place: nothing that both have differs."""
    own = torch.tensor([8.0, 0.5, 0.25] + [0.0] * 6 + [4.0])
    sent = torch.tensor([8.0, 0.5, 0.25] + [0.0] * 7)
    found = dict(measures.views(PATTERNS(sent), PATTERNS(own), "here"))
    assert found["top 8"].bands.tolist() == [7, 0, 0, 0, 1]  # 4 against 0: a cancellation
    assert found["top 8"].lacking == 1
    assert found["top 8, on both sides"].bands.tolist() == [7, 0, 0, 0, 0]
    assert found["top 8, on both sides"].lacking is None


def test_places_are_doubled() -> None:
    labels = [measures.place_of(token) for token in (1, 32, 33, 64, 65, 128, 2048)]
    first, second = "tokens 1 to 32", "tokens 33 to 64"
    assert labels == [
        first,
        first,
        second,
        second,
        "tokens 65 to 128",
        "tokens 65 to 128",
        "tokens 1025 to 2048",
    ]


def test_errors_compare_answers_with_a_prefill(spec: dict[str, Any], tmp_path: Path) -> None:
    given = {**spec, "variant": "layers=3"}
    figures = measures.errors(given, tmp_path / "cells" / "one")
    answered = answers.answered(given, tmp_path)
    verifier = Verifier(load_whole(spec["model"], dtype=spec["dtype"], device="cpu"))
    lacking, apart, mantissas = [], [], []
    for transcript, output in zip(answered.transcripts, answered.outputs, strict=True):
        own = PATTERNS(verifier.replay(transcript).output_states)
        for start in (0, 32):
            slow = slow_views(PATTERNS(output)[start : start + 32].ravel(), own[start : start + 32].ravel())
            lacking.append((slow["top 128"][2] or 0) / 128)
            apart += slow["top 128, on both sides"][0]
            mantissas += slow["top 128"][1]
    shown = {name: figures[f"32 tokens|{name}"]["value"] for name in (
        "top 128|lacking", "top 128|lacking_median", "top 128|lacking_most", "top 128, on both sides|same",
        "top 128|mantissa", "top 128|mantissa_median",
    )}  # fmt: skip
    assert list(shown.values()) == pytest.approx([
        np.mean(lacking), np.median(lacking), max(lacking), np.mean(np.array(apart) == 0),
        np.mean(mantissas), np.median(mantissas),
    ])  # fmt: skip
    assert shown["top 128|lacking"] > 0 and f"32 tokens|top 128{measures.BOTH}|lacking" not in figures
    places = {name.split("|")[1] for name in figures if "tokens" in name.split("|")[1]}
    assert places == {
        "tokens 1 to 32",
        "tokens 33 to 64",
    }  # the last 6 tokens are no chunk, and have no 128 values
    assert {name.split("|")[0] for name in figures} == set(measures.UNITS)


def test_the_tables_rows_are_views(spec: dict[str, Any]) -> None:
    setting = Setting(model=spec["model"], prompts=spec["prompts"], device="cpu")
    made = tables.errors(setting, providers="nf4")
    assert [cell.measure for cell in made.cells] == ["toploc-errors"] and made.fold is not None
    one = {"value": 1.0}
    cell = {"keys": {"provider": "nf4"}, "figures": {"1 token|top 8|same": one, "1 token|top 32|same": one}}
    assert [row["keys"]["compared"] for row in made.fold([cell])] == ["top 8", "top 32"]
    assert made.fold([{**cell, "figures": {}}]) == [
        {**cell, "figures": {}}
    ]  # one that could not be measured stays


@pytest.mark.slow
def test_moduli_are_those_of_the_search(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(measures, "_BLOCK", 150)
    draws, returned = np.random.default_rng(3), list[int]()
    for sets in (150, 150, 100):
        returned += [injective_modulus(row) for row in draws.integers(0, 2**31, (sets, 200))]
    figures = measures.moduli({"sets": 400, "values": 200, "seed": 3}, tmp_path)
    shares = {int(name[6:]): figure["value"] for name, figure in figures.items() if name.startswith("share_")}
    assert shares == {modulus: returned.count(modulus) / 400 for modulus in set(returned)} and len(shares) > 2
    assert shares[65497] == pytest.approx(figures["expected_65497"]["value"], abs=0.08)
    rows = tables.moduli(Setting(), sets=400).fold([{"keys": {}, "figures": figures}])  # type: ignore[misc]
    assert [row["keys"]["modulus"] for row in rows] == sorted(shares, reverse=True)
    for sets, values in ((0, 128), (5, 0), (5, 2**17)):
        with pytest.raises(InputError, match="at least one"):
            measures.moduli({"sets": sets, "values": values, "seed": 0}, tmp_path)
    with pytest.raises(InputError, match="take fewer"):
        measures.moduli({"sets": 1, "values": 3000, "seed": 0}, tmp_path)
