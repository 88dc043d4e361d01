"""Cascade's index mathematics: partitions, the paper's worked example, what holders could recover, and the cost."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig

from hiddenlab.defenses.cascade.cost import (
    Link,
    Shape,
    extra_operations,
    layer_bytes,
    layer_seconds,
    rounds,
    sent,
)
from hiddenlab.defenses.cascade.planning import parse_shards, plan
from hiddenlab.errors import InputError
from hiddenlab.sharding import AttnNode, Plan, recoverable, smallest_gap, split

BERT_BASE, BERT_LARGE = Shape(12, 12, 12, 64), Shape(24, 16, 16, 64)


@st.composite
def plans(draw: st.DrawFn, causal: bool | None = None) -> Callable[[], Plan]:
    """(c, δ)-plans and random partitions, also with more nodes than tokens; made in the test, not in the strategy."""
    tokens, m, symmetric = draw(st.integers(1, 40)), draw(st.integers(1, 4)), draw(st.booleans())
    causal = draw(st.booleans()) if causal is None else causal
    if draw(st.booleans()):
        alpha, c = draw(st.integers(1, 8)), draw(st.integers(1, 8))
        return partial(Plan.clustered, tokens, c, alpha=alpha, m=m, symmetric=symmetric, causal=causal)
    owners = draw(st.lists(st.integers(0, 4), min_size=tokens, max_size=tokens))
    owners = sorted(owners) if draw(st.booleans()) else owners
    shards = [[t for t, owner in enumerate(owners) if owner == i] for i in range(5)]
    return partial(Plan.by_hand, shards, m=m, symmetric=symmetric, causal=causal)


# ---- the plan


@given(plans())
def test_every_pair_of_positions_meets_in_one_block(make: Callable[[], Plan]) -> None:
    """Attention is complete: each query meets each key that it may see, once, at a node that holds both."""
    one = make()
    seen: Counter[tuple[int, int]] = Counter()
    for node in one.attn_nodes:
        for block in one.blocks(node):
            pairs = list(product(one.asked(block), one.splits[block.keys]))
            assert {p for pair in pairs for p in pair} <= set(one.held_by(node))
            seen.update(pairs)
            every = list(product(one.splits[block.queries], one.splits[block.keys]))
            # A block is left out as a whole, exactly where a causal model hides all of its keys.
            useful = not one.causal or any(key <= query for query, key in every)
            assert pairs == (every if useful else [])
            assert (block in one.left_out) == (one.causal and not useful)
    assert set(seen.values()) <= {1}
    needed = {(q, k) for q, k in product(range(one.tokens), repeat=2) if k <= q or not one.causal}
    assert needed <= set(seen)
    expected = one.beta * (one.beta + 1) // 2 if one.symmetric else one.beta**2
    assert len(one.attn_nodes) == expected


@given(plans())
def test_messages_carry_a_node_its_own_rows_and_no_others(make: Callable[[], Plan]) -> None:
    one = make()
    queries: Counter[tuple[AttnNode, int]] = Counter()
    answers: Counter[tuple[AttnNode, int]] = Counter()
    for message in one.messages():
        held = set(one.shards[message.comp])
        assert {*message.queries, *message.keys, *message.answers} <= held
        assert {*message.queries, *message.keys} <= set(one.held_by(message.attn))
        queries.update((message.attn, p) for p in message.queries)
        answers.update((message.attn, p) for p in message.answers)
    blocks = [(node, block) for node in one.attn_nodes for block in one.blocks(node)]
    wanted = Counter((node, p) for node, block in blocks for p in one.asked(block))
    assert answers == wanted
    assert set(queries) == set(wanted)
    assert set(queries.values()) <= {1}


@pytest.mark.slow
@given(plans(causal=True), st.integers(1, 12))
def test_an_answer_finds_the_keys_of_blocks_that_were_left_out(make: Callable[[], Plan], new: int) -> None:
    """While a request is kept, a node has the keys of each block before the first query that sees them."""
    one = make()
    there: dict[AttnNode, set[int]] = {node: set() for node in one.attn_nodes}
    since = 0
    for tokens in range(one.tokens, one.tokens + new):
        grown = one.grown(tokens)
        for message in grown.messages(since, keep=True):
            assert not there[message.attn] & set(message.keys)  # each once
            there[message.attn] |= set(message.keys)
        for node in grown.attn_nodes:
            for block in grown.blocks(node):
                if grown.asked(block, since):
                    assert set(grown.splits[block.keys]) <= there[node]
        since = tokens


def test_plans_of_neighbouring_tokens_leave_blocks_out_and_dealt_ones_do_not() -> None:
    halves = Plan.clustered(16, 8, alpha=2, causal=True)
    assert halves.left_out == (AttnNode(0, 1),)
    # Where only CompNode 0 has a second cluster, the others lie behind each other.
    assert len(Plan.clustered(33, 8, alpha=4, causal=True).left_out) == 3
    assert Plan.clustered(64, 8, alpha=4, m=4, causal=True).left_out == ()
    # CompNode 0 gets nothing back that another one has to do with.
    assert [m.attn for m in halves.messages() if m.comp == 0 and m.answers] == [AttnNode(0, 0)]
    assert Plan.described(halves.describe()) == halves
    by_hand = Plan.by_hand([[0, 1], [2, 3]], causal=True)
    assert Plan.described(by_hand.describe()) == by_hand


@given(st.integers(1, 60), st.integers(1, 9), st.integers(1, 40))
def test_shards_are_c_delta_sequences(tokens: int, c: int, delta: int) -> None:
    one = Plan.clustered(tokens, c, delta=delta)
    assert one.alpha == -(-delta // c)
    for i, shard in enumerate(one.shards):
        size = min(c, delta - i * c)
        sequence = [i * c + step * delta + x for step in range(tokens) for x in range(size)]
        assert list(shard) == [t for t in sequence if t < tokens]


def test_the_worked_example_of_appendix_m() -> None:
    """α = 3, c = 2, N = 18, m = 2; the paper counts from 1."""
    one = Plan.clustered(18, 2, alpha=3, m=2)
    assert [[t + 1 for t in shard] for shard in one.shards] == [
        [1, 2, 7, 8, 13, 14], [3, 4, 9, 10, 15, 16], [5, 6, 11, 12, 17, 18],
    ]  # fmt: skip
    assert [[t + 1 for t in part] for part in one.splits] == [
        [1, 7, 13], [2, 8, 14], [3, 9, 15], [4, 10, 16], [5, 11, 17], [6, 12, 18],
    ]  # fmt: skip
    # S_{1221} of the paper: R_{1,2} and R_{2,1}.
    assert [t + 1 for t in one.held_by(AttnNode(1, 2))] == [2, 3, 8, 9, 14, 15]
    assert len({one.held_by(node) for node in one.attn_nodes}) == 21
    assert len(one.attn_nodes) == 36
    assert len(Plan.clustered(18, 2, alpha=3, m=2, symmetric=True).attn_nodes) == 21


def test_more_nodes_than_tokens_leaves_some_empty() -> None:
    one = Plan.clustered(3, 2, alpha=4, m=2)
    assert [len(shard) for shard in one.shards] == [2, 1, 0, 0]
    assert sum(map(len, one.splits)) == 3


@pytest.mark.parametrize(
    ("shards", "says"),
    [
        ([[0, 1], [1, 2]], "token 1 is held by CompNode 0 and by CompNode 1"),
        ([[0, 1], [3]], "CompNode 1 holds token 3; there are tokens 0 to 2"),
        ([[0, 0], [1]], "CompNode 0 does not hold its tokens in ascending order, each once"),
        ([[0, -1]], "CompNode 0 holds token -1"),
        ([], "at least 1 token"),
    ],
)
def test_wrong_shards_are_refused(shards: list[list[int]], says: str) -> None:
    with pytest.raises(InputError, match=says):
        Plan.by_hand(shards)


def test_missing_tokens_are_named() -> None:
    with pytest.raises(InputError, match="no CompNode holds token 1 and 1 more"):
        Plan(4, ((0,), (3,)), ((0, 1, 2, 3),))
    with pytest.raises(InputError, match="no query and key shard holds token 3"):
        Plan(4, ((0, 1, 2, 3),), ((0, 1, 2),))


@pytest.mark.parametrize(
    "options", [{}, {"alpha": 2, "delta": 4}, {"alpha": 0}, {"delta": 0}, {"alpha": 2, "m": 0}]
)
def test_wrong_numbers_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(InputError):
        Plan.clustered(8, 2, **options)


# ---- security


def test_gaps_and_theorem_7_3() -> None:
    one = Plan.clustered(64, 2, alpha=4)
    assert [smallest_gap(shard) for shard in one.shards] == [6, 6, 6, 6]
    assert one.violations(6) == []
    assert len(one.violations(7)) == 4 * 7
    assert "CompNode 0 holds tokens 1 and 8, with a gap of 6 between them" in one.violations(7)[0]
    assert smallest_gap((3, 4, 5)) is None


def slow_recoverable(positions: tuple[int, ...], budget: int) -> int:
    """Try every number of unknown tokens, one state after the other."""
    known = 0
    for position in positions:
        unknown = [t for t in range(position + 1) if t >= known]
        if len(unknown) > budget:
            return known
        known = position + 1
    return known


@given(st.sets(st.integers(0, 30)), st.integers(1, 6))
def test_recoverable_tokens(positions: set[int], rho: int) -> None:
    held = tuple(sorted(positions))
    assert recoverable(held, rho) == slow_recoverable(held, rho - 1)


def test_a_first_cluster_is_open_under_every_plan() -> None:
    one = Plan.clustered(128, 8, alpha=8)
    assert one.violations(3) == []
    assert [recoverable(shard, 3) for shard in one.shards] == [8, 0, 0, 0, 0, 0, 0, 0]


# ---- cost


@given(plans(causal=False))
def test_extra_operations_are_counted_pair_by_pair(make: Callable[[], Plan]) -> None:
    """Every query meets every key in one block, and every number of a head's output is merged."""
    made, shape = make(), Shape(3, 4, 2, 8)
    blocks = [block for node in made.attn_nodes for block in made.blocks(node)]
    met = [(q, k) for b in blocks for q in made.splits[b.queries] for k in made.splits[b.keys]]
    assert sorted(met) == [(q, k) for q in range(made.tokens) for k in range(made.tokens)]
    merged = [(row, head, i) for row in range(made.tokens) for head in range(4) for i in range(8)]
    assert extra_operations(made, shape) == 4 * len(met) + len(merged)


@pytest.mark.slow
@given(plans(), st.sampled_from(["paper", "logsumexp"]))
def test_equation_1_is_the_sum_of_all_messages(make: Callable[[], Plan], mode: str) -> None:
    """It holds for the symmetric reduction too: halving the nodes saves no bytes. Leaving blocks out does."""
    one = make()
    shape = Shape(2, 6, 2, 8, 4)
    by_comp, by_attn = sent(one, shape, mode)
    assert sum(by_comp.values()) + sum(by_attn.values()) == layer_bytes(one, shape, mode)
    whole = replace(one, causal=False)
    assert (layer_bytes(one, shape, mode) < layer_bytes(whole, shape, mode)) == bool(
        [b for b in one.left_out if one.splits[b.queries] or one.splits[b.keys]]
    )
    assert extra_operations(one, shape) <= extra_operations(whole, shape)


@given(plans(causal=False))
def test_equation_2(make: Callable[[], Plan]) -> None:
    one = make()
    shape, link = Shape(2, 6, 2, 8, 4), Link(1e6, 1e-3)
    d, h, kv, size = shape.head_dim, shape.heads, shape.kv_heads, shape.element_bytes
    longest, widest = max(map(len, one.shards)), max(map(len, one.splits))
    formula = 2 * link.latency + one.beta * size * d * (h + 2 * kv) / link.bandwidth * longest
    formula += size * (d + 2) * h / link.bandwidth * widest
    counted = layer_seconds(one, shape, link)
    if one.symmetric and one.beta > 1:
        # A node with two blocks answers for both, one after the other.
        assert counted >= formula - 1e-12
    else:
        assert counted == pytest.approx(formula)


def test_the_papers_table_7() -> None:
    """Megabytes of a whole inference at 128 tokens for α = 1, 4, 8 (m = 1), two bytes a number."""
    for shape, printed in ((BERT_BASE, (9.5, 38, 76)), (BERT_LARGE, (25.4, 101, 203))):
        for alpha, megabytes in zip((1, 4, 8), printed, strict=True):
            total = shape.layers * layer_bytes(Plan.clustered(128, 1, alpha=alpha), shape)
            assert total / 1e6 == pytest.approx(megabytes, rel=0.01)


def test_rounds_of_an_m_split_plan() -> None:
    """Appendix O: each CompNode sends to mβ nodes, each AttnNode answers one, where S refines R."""
    one = Plan.clustered(64, 2, alpha=2, m=2)
    assert rounds(one) <= 2 * one.alpha * one.beta**2
    answered = sum(1 for message in one.messages() if message.answers)
    assert answered == one.beta**2
    sends = Counter(message.comp for message in one.messages() if message.queries)
    assert set(sends.values()) == {2 * one.beta}


def test_shapes_of_configurations() -> None:
    assert Shape.of(AutoConfig.for_model("bert")) == BERT_BASE
    grouped = AutoConfig.for_model("llama", num_attention_heads=8, num_key_value_heads=2, hidden_size=64)
    assert Shape.of(grouped) == Shape(32, 8, 2, 8)
    with pytest.raises(InputError, match="no attention"):
        Shape.of(AutoConfig.for_model("mamba"))
    with pytest.raises(InputError, match="bandwidth"):
        Link(0.0, 1.0)


# ---- the command


def test_the_command_reports_the_plan(tiny_path: str) -> None:
    result = plan(18, alpha=3, c=2, m=2, model=tiny_path)
    assert result["plan"]["attn_nodes"] == 36
    assert result["holders"][:8] == [0, 0, 1, 1, 2, 2, 0, 0]
    assert result["rows"][0] == {
        "node": "CompNode 0", "tokens": 6, "clusters": 3, "smallest_gap": 4,
        "by_row_matching_alone": 2, "by_missing_tokens": 14, "by_partial_sums": 14,
    }  # fmt: skip
    assert result["violations"] == []
    assert result["cost"]["causal"]["blocks_left_out"] == 0
    assert {result["cost"][name] for name in ("bytes_paper", "messages_per_layer")} == {
        result["cost"]["causal"][name] for name in ("bytes_paper", "messages_per_layer")
    }
    neighbours = plan(18, alpha=3, c=6, model=tiny_path)["cost"]
    assert neighbours["causal"]["blocks_left_out"] == 3
    assert neighbours["causal"]["bytes_paper"] == neighbours["bytes_paper"] * 6 // 9
    assert neighbours["causal"]["seconds"] < neighbours["seconds"]
    by_hand = plan(18, shards="0,2,4,6,8,10,12,14,16;1,3,5,7,9,11,13,15,17", model=tiny_path)
    assert len(by_hand["violations"]) == 16
    assert by_hand["rows"][0]["by_row_matching_alone"] == 17
    with pytest.raises(InputError, match="hold 18 tokens, not 20"):
        plan(20, shards="0,2,4,6,8,10,12,14,16;1,3,5,7,9,11,13,15,17", model=tiny_path)


@pytest.fixture
def tiny_path(tiny: object) -> str:
    return tiny("llama")  # type: ignore[operator,no-any-return]


def test_shards_by_hand_are_parsed() -> None:
    assert parse_shards("0,1, 4;2,3") == [[0, 1, 4], [2, 3]]
    with pytest.raises(InputError, match="no list of positions"):
        parse_shards("0,x")


@given(st.lists(st.integers(0, 99), unique=True), st.integers(1, 5))
def test_splits_deal_positions_in_turn(positions: list[int], m: int) -> None:
    parts = split([tuple(positions)], m)
    assert len(parts) == m
    assert sorted(p for part in parts for p in part) == sorted(positions)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
