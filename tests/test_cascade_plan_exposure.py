"""What a plan says of its nodes follows from its shape, rests on stored figures, and is what the attacks read."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hiddenlab.attacks.partial_sums import PartialSums
from hiddenlab.cli.plans import MOST_LINES, short
from hiddenlab.defenses.cascade import exposure
from hiddenlab.defenses.cascade.cost import Link, Shape, layer_bytes, layer_seconds
from hiddenlab.defenses.cascade.exposure import (
    CLIENT,
    EVIDENCE,
    NOT_MEASURED,
    NOT_PRIVATE,
    NOTHING,
    OWN,
    STATUSES,
    attack_on,
    gaps_read,
    outputs_read,
    sums_read,
    verdicts,
)  # fmt: skip
from hiddenlab.defenses.cascade.plan_search import best_plan, mean_shares
from hiddenlab.defenses.cascade.planning import plan
from hiddenlab.errors import InputError
from hiddenlab.eval.measures.partial_sums import node_view
from hiddenlab.models import TruncatedModel
from hiddenlab.sharding import AttnNode, Plan
from hiddenlab.testing import VOCABULARY

TABLES = Path(__file__).parent.parent / "docs" / "results" / "tables"
SHAPE, LINK = Shape(2, 6, 2, 8, 4), Link(1e6, 1e-3)
LoadModel = Callable[..., TruncatedModel]


@st.composite
def any_plan(draw: st.DrawFn, most: int = 40) -> Plan:
    """A (c, δ)-sharding, or positions dealt at random."""
    tokens, m, symmetric = draw(st.integers(1, most)), draw(st.integers(1, 4)), draw(st.booleans())
    alpha = draw(st.integers(1, 6))
    if draw(st.booleans()):
        return Plan.clustered(tokens, draw(st.integers(1, 9)), alpha=alpha, m=m, symmetric=symmetric)
    owners = draw(st.lists(st.integers(0, alpha - 1), min_size=tokens, max_size=tokens))
    shards = [[p for p, owner in enumerate(owners) if owner == i] for i in range(alpha)]
    return Plan.by_hand(shards, m=m, symmetric=symmetric)


@settings(max_examples=40, deadline=None)
@given(any_plan(most=24))
def test_verdicts_follow_from_the_plan(one: Plan) -> None:
    """Every token that reaches a node is read, or is said to be not measured; none is called private."""
    found = verdicts(one)
    given_rows = [*one.shards, *map(one.held_by, one.attn_nodes)]
    assert len(found) == len(given_rows)
    for verdict, rows in zip(found, given_rows, strict=True):
        assert verdict.status in STATUSES and verdict.tokens == one.tokens
        assert verdict.own == len(rows)
        assert verdict.reached == (rows[-1] + 1 if rows else 0)
        assert min(verdict.own, verdict.others, verdict.not_measured) >= 0
        assert (verdict.status == NOTHING) == (not rows)
        assert (verdict.evidence in EVIDENCE) == (verdict.others > 0)
        if verdict.others or verdict.own == one.tokens or (rows and not verdict.comp):
            assert verdict.status == NOT_PRIVATE
        if verdict.status == OWN:
            assert verdict.comp and verdict.not_measured == 0
        text = verdict.to_json()["sentence"]
        assert verdict.node in text and text.endswith(verdict.status)
        if verdict.not_measured:
            assert "not measured" in text
        if rows:
            assert attack_on(one, verdict)[2] in ("attn", "resid", "q", "v", "kv", "qkv")
    lines = exposure.summary(found)
    assert len(lines) <= 2 * 2 * len(STATUSES) and len(lines) == len(set(lines))


@settings(max_examples=40, deadline=None)
@given(any_plan(most=24))
def test_what_is_read_is_held_by_others_and_earlier(one: Plan) -> None:
    for node, rows in enumerate(one.shards):
        for read in (sums_read(one, node), gaps_read(rows)):
            assert len(set(read)) == len(read)
            assert not set(read) & set(rows)
            assert all(p < rows[-1] for p in read)


def slow_sums_read(one: Plan, node: int) -> list[int]:
    """Row by row: the steps of each key shard, as the attack makes them."""
    rows, read = one.shards[node], []
    for split in one.splits:
        unknown = [p for p in split if p not in rows and rows and p < rows[-1]]
        steps: dict[int, int] = {}
        for row in rows:
            steps[sum(p < row for p in unknown)] = steps.get(sum(p < row for p in unknown), 0) + 1
        before = 0
        for count, seen_by in sorted(steps.items()):
            if count - before > min(seen_by, 8):
                break
            read += unknown[before:count]
            before = count
    return sorted(read)


@settings(max_examples=40, deadline=None)
@given(any_plan(most=24))
def test_sums_read_against_a_slow_count(one: Plan) -> None:
    for node in range(one.alpha):
        assert sums_read(one, node) == slow_sums_read(one, node)


def test_shapes_that_were_measured() -> None:
    """The plans of the stored table: the node of each reads all that it misses; other shapes are not claimed."""
    table = json.loads((TABLES / "partial-sums.json").read_text())
    for row in table["rows"]:
        keys = row["keys"]
        made = Plan.clustered(96, keys["c"], alpha=keys["alpha"], m=keys["m"])
        node = int(keys["node"].split()[1])
        assert len(sums_read(made, node)) == row["figures"]["missing"]["value"]
    assert sums_read(Plan.clustered(64, 16, alpha=2), 1) == []  # 16 tokens in a sum
    assert sums_read(Plan.by_hand([[0, 1, 2, 3], [4]]), 1) == []  # four tokens, one row
    assert gaps_read((7, 15)) == [*range(7), *range(8, 15)] and gaps_read((8,)) == []
    assert len(gaps_read(Plan.clustered(72, 8, alpha=8).shards[0])) == 56


def test_figures_are_those_of_the_stored_tables() -> None:
    sums = json.loads((TABLES / "partial-sums.json").read_text())["rows"]
    lowest = min(row["figures"]["missing_token_accuracy"]["value"] for row in sums)
    assert EVIDENCE["partial sums"].figure == lowest
    assert {row["figures"]["missing_token_accuracy"]["n"] for row in sums} == {
        EVIDENCE["partial sums"].prompts
    }
    masked = json.loads((TABLES / "partial-sums-masked.json").read_text())["rows"]
    outputs = EVIDENCE["attention outputs"]
    for row in masked:
        held = Plan.clustered(96, row["keys"]["c"], alpha=row["keys"]["alpha"]).shards[-1]
        assert len(outputs_read(held)) == row["figures"].get("missing", {"value": 0})["value"]
    shares = [row["figures"]["missing_token_accuracy"] for row in masked if row["figures"]]
    assert {(one["value"], one["n"]) for one in shares} == {(outputs.figure, outputs.prompts)}
    (noisy,) = json.loads((TABLES / "hardening-noise.json").read_text())["rows"]
    read, evidence = noisy["figures"]["missing_token_accuracy"], EVIDENCE["sums behind noise"]
    assert (round(read["value"], 3), read["n"]) == (evidence.figure, evidence.prompts)
    scores = [
        row["figures"]["held_token_accuracy"]
        for row in json.loads((TABLES / "secret-coordinates.json").read_text())["rows"]
        if row["keys"]["client layers"] == 0
    ]
    assert EVIDENCE["self scores"].figure == min(figure["value"] for figure in scores)
    assert EVIDENCE["self scores"].prompts == scores[0]["n"]
    gaps = [
        row["figures"]["missing_token_accuracy"]
        for row in json.loads((TABLES / "gap-plans.json").read_text())["rows"]
        if row["keys"]["attack"].partition(" (")[0] == "missing-tokens" and row["keys"]["gap"] != 15
    ]
    assert EVIDENCE["missing tokens"].figure == round(min(one["value"] for one in gaps), 3)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tokens": 8, "alpha": 1}, ["CompNode 0 holds the whole prompt: NOT PRIVATE"]),
        (
            {"tokens": 128, "alpha": 8, "c": 8, "m": 4},
            ["CompNodes 0 to 7 read all tokens before their last row, 72 to 128 of 128"],
        ),
        ({"tokens": 3, "alpha": 4}, ["CompNode 3 gets no token of this prompt: NOTHING TO READ"]),
        ({"tokens": 6, "shards": "0,1;2,3,4,5"}, ["CompNode 0 reads its own 2 of 6 tokens: OWN TOKENS ONLY"]),
        (
            {"tokens": 30, "shards": ",".join(map(str, range(29))) + ";29"},
            ["CompNode 1 reads its own 1 of 30 tokens; 29"],
        ),
        (
            {"tokens": 64, "alpha": 8, "c": 8, "harden": "client:first=1,last=1"},
            ["CompNode 0 reads its own 8 of 64 tokens, since it holds rows of all tokens up to the last"],
        ),
        ({"tokens": 8, "alpha": 2, "client": "0"}, ["CompNode 0 is the client's, who knows the prompt"]),
    ],
)
def test_sentences(tiny: Callable[..., str], options: dict[str, object], says: list[str]) -> None:
    result = plan(model=tiny("llama"), **options)  # type: ignore[arg-type]
    for text in says:
        assert any(line.startswith(text) for line in result["summary"]), result["summary"]
    assert {one["status"] for one in result["verdicts"]} <= {*STATUSES}
    json.dumps(result, allow_nan=False)


def test_the_client_is_a_node_of_the_plan() -> None:
    found = verdicts(Plan.clustered(8, 2, alpha=2), [1])
    assert [one.status for one in found[:2]] == [NOT_PRIVATE, CLIENT]
    assert NOT_MEASURED not in {one.status for one in found}
    with pytest.raises(InputError, match="no CompNode 2; the plan has 0 to 1"):
        verdicts(Plan.clustered(8, 2, alpha=2), [2])


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(st.integers(1, 12), st.integers(1, 4), st.integers(1, 4))
def test_the_best_plan_is_within_the_cost_and_no_worse(tokens: int, alpha: int, c: int) -> None:
    asked = Plan.clustered(tokens, c, alpha=alpha)
    cost = float(SHAPE.layers * layer_bytes(asked, SHAPE))
    best, compared = best_plan(tokens, SHAPE, LINK, cost, None)
    assert best is not None and compared > 0
    made = best.plan(tokens)
    assert SHAPE.layers * layer_bytes(made, SHAPE) == best.bytes <= cost
    assert best.order[:2] == mean_shares(made)
    reached = [one.reached / tokens for one in verdicts(made) if one.comp and one.own]
    assert best.order[0] == pytest.approx(sum(reached) / len(reached))
    attns = [one.reached / tokens for one in verdicts(made) if not one.comp and one.own]
    assert best.order[1] == pytest.approx(sum(attns) / len(attns))
    seconds = SHAPE.layers * layer_seconds(made, SHAPE, LINK)
    quick, _ = best_plan(tokens, SHAPE, LINK, None, seconds)
    assert quick is not None and quick.order[:2] <= best.order[:2]
    assert best_plan(tokens, SHAPE, LINK, 0.0, None) == (None, 0)


def test_a_long_table_is_cut() -> None:
    rows = [{"node": f"AttnNode (0, {i})", "rows": i} for i in range(50)]
    assert short(rows[:MOST_LINES]) == rows[:MOST_LINES]
    cut = short(rows)
    assert len(cut) == MOST_LINES and cut[-1]["node"] == "45 more: --json"


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(one=any_plan(most=24), seed=st.integers(0, 99))
def test_no_verdict_is_weaker_than_the_attack(tiny_model: LoadModel, one: Plan, seed: int) -> None:
    """What partial sums verify on a small model is read or not measured by the verdict, and what it claims is read."""
    tokens = torch.randint(
        0, VOCABULARY, (one.tokens,), generator=torch.Generator().manual_seed(seed)
    ).tolist()
    streams = {name: tiny_model("llama", 1, name) for name in "qkv"} | {
        "own": tiny_model("llama", 0, "embed")
    }
    for node, verdict in enumerate(verdicts(one)[: one.alpha]):
        if not one.shards[node]:
            continue
        view = node_view(streams, tokens, one, node)
        found = PartialSums().fit(view.info, tiny_model("llama", 1, "attn")).recover(view)
        places = found.positions or range(len(found.ids))
        right = {p for p, token in zip(places, found.ids, strict=True) if tokens[p] == token}
        assert set(sums_read(one, node)) <= right
        assert len(right) <= verdict.reached
        if verdict.status == OWN:
            assert right <= {*one.shards[node]}
    assert AttnNode(0, 0) in one.attn_nodes
