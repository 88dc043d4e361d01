"""The cheapest hardening that hides a share: by figures of the stored table, below the cost of computing alone."""

import json
import shlex
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from hiddenlab.cli import app
from hiddenlab.cli.cascade import _what_nodes_read
from hiddenlab.defenses.cascade import hiding as module
from hiddenlab.defenses.cascade.exposure import (
    NOT_MEASURED,
    NOT_PRIVATE,
    attack_on,
    evidence_lines,
    in_order,
    verdicts,
)
from hiddenlab.defenses.cascade.hardening import Hardening
from hiddenlab.defenses.cascade.hiding import MEASURED, Measured, described, hiding
from hiddenlab.errors import InputError
from hiddenlab.eval.cells import Setting, row_of
from hiddenlab.eval.tables.hardening import ON_CRYPTEN, hardening
from hiddenlab.sharding import Plan

TABLES = Path(__file__).parents[1] / "docs/results/tables"
TABLE = TABLES / "hardening.json"


def test_figures_are_those_of_the_stored_table() -> None:
    table = json.loads(TABLE.read_text())
    rows = {row["keys"]["hardening"]: row["figures"] for row in table["rows"]}
    known = {one.harden: one for one in MEASURED}
    assert known.keys() == {
        name
        for name, figures in rows.items()
        if name != "none" and not name.startswith(ON_CRYPTEN) and "missing_token_accuracy" in figures
    }
    for name, one in known.items():
        figures = rows[name]
        others = figures["missing_token_accuracy"]
        assert one.others == round(others["value"], 4) and one.at_most == round(others["high"], 4)
        assert one.prompts == others["n"]
        own = figures["held_token_accuracy"]["value"] if one.prompts else 0.0
        assert one.own == round(own, 4)
        assert one.over_plain == round(figures["over_plain"]["value"], 2)
        assert one.client_share == round(figures["client_share"]["value"], 3)
        assert Hardening.parse(name)
    assert f"alpha {MEASURED[0].alpha}, c {MEASURED[0].c};" in table["notes"][0]


def test_the_cheapest_comes_first_and_whole_intervals_count() -> None:
    def one(name: str, at_most: float, time: float, share: float = 0.4) -> Measured:
        return Measured(name, 4, 8, at_most / 2, at_most, 0.9, time, share, 20)

    known = [one("a", 0.04, 3.0), one("b", 0.03, 2.0), one("c", 0.06, 1.0), one("d", 0.01, 1.5, share=1.0)]
    assert [fit.harden for fit in hiding(0.05, known)] == ["b", "a"]
    assert hiding(0.02, known) == []
    for wrong in (0.0, -0.1, 1.5, float("nan")):
        with pytest.raises(InputError, match="such as"):
            hiding(wrong)


@pytest.mark.parametrize("share", [0.01, 0.05, 1.0])
def test_no_hardening_is_named_that_its_own_plan_calls_not_private(share: float) -> None:
    for one in hiding(share):
        if Hardening.parse(one.harden).shares is None:
            plan = Plan.clustered(96, one.c, alpha=one.alpha)
            statuses = {found.status for found in verdicts(plan, hardening=Hardening.parse(one.harden))}
            assert NOT_PRIVATE not in statuses, one.harden
    assert [one.harden for one in hiding(share)] == ["shares"]  # all others were read


def test_sentences_name_command_share_and_cost() -> None:
    found = described(0.05)
    assert found["fit"] and found["fit"][0]["harden"] in found["lines"][0]
    assert "hiddenlab eval hardening" in found["lines"][0] and len(found["lines"]) == 1 + len(found["fit"])


def test_where_nothing_hides_enough_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MEASURED", MEASURED[:1])
    (none,) = described(0.05)["lines"]
    assert none.startswith("none of 1 hardening") and "below the cost" in none


@pytest.mark.parametrize(
    ("spec", "alpha", "c", "tokens", "status", "evidence"),
    [
        ("client:first=4,last=4", 8, 8, 96, NOT_PRIVATE, "sums behind layers"),
        ("client:first=7,last=1+secret-maps", 8, 1, 30, NOT_PRIVATE, "sums behind layers"),
        ("client:first=4,last=4+masked-sums", 4, 8, 96, NOT_PRIVATE, "outputs behind layers"),
        ("client:first=4,last=4+masked-sums", 8, 8, 96, NOT_MEASURED, None),
        # The sums of 17 rows span 34 + 17 of 64 directions, of more rows too many.
        ("client:first=1,last=1+masked-sums", 2, 17, 68, NOT_PRIVATE, "outputs behind layers"),
        ("client:first=4,last=4+noise:sigma=0.03", 4, 8, 96, NOT_PRIVATE, "sums behind noise"),
        ("client:first=4,last=4+noise:sigma=0.05", 4, 8, 96, NOT_MEASURED, None),
        ("client:first=4,last=4+noise:sigma=0.03+masked-sums", 4, 8, 96, NOT_MEASURED, None),
    ],
)
def test_a_plan_behind_layers_of_the_client_says_what_was_measured(
    spec: str, alpha: int, c: int, tokens: int, status: str, evidence: str | None
) -> None:
    plan, hardening = Plan.clustered(tokens, c, alpha=alpha), Hardening.parse(spec)
    found = verdicts(plan, hardening=hardening)
    comp = found[alpha // 2]
    assert (comp.status, comp.evidence) == (status, evidence)
    before = plan.shards[alpha // 2][-1] + 1 - comp.own
    assert comp.others + comp.not_measured == before
    assert comp.others == (before if evidence else 0)
    lines = evidence_lines(found, hardening)
    assert not evidence or any("hiddenlab eval hardening" in line for line in lines)
    if evidence:
        assert attack_on(plan, comp, hardening.first_layer) == (
            "partial-sums",
            hardening.first_layer + 1,
            "attn",
        )


@given(
    rows=st.sets(st.integers(0, 20), min_size=1).map(sorted).map(tuple),
    read=st.sets(st.integers(0, 20)),
)
def test_in_order_means_that_all_tokens_before_are_known(rows: tuple[int, ...], read: set[int]) -> None:
    found = in_order(rows, read)
    assert set(found) == {p for p in read if all(q in read or q in rows for q in range(p))}


@pytest.mark.slow
def test_a_server_names_a_command_that_says_what_its_nodes_read() -> None:
    said = _what_nodes_read(2, 8, 1, True, False)
    assert "a prompt of up to 8 tokens" in said
    _, *arguments = shlex.split(said.partition("96 tokens: ")[2])
    long, short = (
        CliRunner().invoke(app, [*arguments, "--json", "--tokens", str(tokens)]) for tokens in (96, 8)
    )
    assert long.exit_code == 0, long.output
    assert "CompNode 0 holds the whole prompt: NOT PRIVATE" in json.loads(short.stdout)["summary"]
    assert "random" in _what_nodes_read(2, 1, 1, True, True)
    refused = CliRunner().invoke(app, ["cascade", "serve", "--harden", "client:first=4,last=4"])
    assert refused.exit_code == 2 and "serve takes --harden shares alone" in " ".join(refused.output.split())


@pytest.mark.slow
def test_plain_secret_sharing_is_a_row_beside_the_hardenings() -> None:
    made = hardening(Setting(), variants="secret-maps,shares")
    assert made.fold is not None
    figures = {"value": 2.0, "low": 1.0, "high": 3.0, "n": 4}
    measured = {
        "hardened-cost": {f"over_plain {i}": figures for i in range(2)},
        "partial-sums": {"missing_token_accuracy": figures},
        "after-mpc": {"over_plain": figures, "largest_logit_error": figures},
    }
    results = [{"status": "measured", "figures": measured[cell.measure]} for cell in made.cells]
    rows = made.fold([row_of(cell, result) for cell, result in zip(made.cells, results, strict=True)])
    assert [row["keys"]["hardening"] for row in rows] == ["secret-maps", "shares", "CrypTen, 29 of 30 layers"]
    assert all(row["figures"]["over_plain"] == figures and row["status"] == "measured" for row in rows)
    assert (
        rows[2]["figures"]["missing_token_accuracy"]["n"] == 0
        and rows[2]["figures"]["largest_error"] == figures
    )
    failed = [
        {**result, "status": "not run", "reason": "no CrypTen", "figures": {}} for result in results[-1:]
    ]
    rows = made.fold(
        [row_of(cell, result) for cell, result in zip(made.cells, [*results[:-1], *failed], strict=True)]
    )
    assert rows[2]["figures"] == {} and rows[2]["reason"] == "no CrypTen"
