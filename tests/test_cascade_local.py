"""Cascade in one process gives what the plain model gives, and each node receives what the plan says."""

import threading
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM

from hiddenlab.defenses.cascade.backend import Settings
from hiddenlab.defenses.cascade.comp_host import CompHost
from hiddenlab.defenses.cascade.cost import Shape, layer_bytes
from hiddenlab.defenses.cascade.load import load_cascade_model
from hiddenlab.defenses.cascade.local import LocalCascade
from hiddenlab.defenses.cascade.node_views import Seen
from hiddenlab.defenses.cascade.nodes import Partial, attention_pass, post_pass
from hiddenlab.defenses.cascade.passes import Batch, Pass, new_name
from hiddenlab.errors import InputError
from hiddenlab.models.attention import Attention
from hiddenlab.models.reading import quiet_transformers
from hiddenlab.sharding import Plan
from hiddenlab.testing import ARCHITECTURES, VOCABULARY

TinyPath = Callable[..., str]


@cache
def plain_model(path: str) -> Any:
    factory = AutoModel if "bert" in path else AutoModelForCausalLM
    with quiet_transformers():
        return factory.from_pretrained(path, attn_implementation="eager", dtype=torch.float32).eval()


def plain(path: str, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        output = plain_model(path)(input_ids=tokens[None])
    return (output.logits if hasattr(output, "logits") else output.last_hidden_state)[0]


@cache
def cascade_model(path: str) -> nn.Module:
    return load_cascade_model(path)


def elements(cascade: LocalCascade) -> float:
    """How many numbers AttnNodes received and sent."""
    counts = [one for name, one in cascade.counters().items() if name.startswith("Attn")]
    return sum(one["elements_in"] + one["elements_out"] for one in counts)


def prompt(n: int, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCABULARY, (n,), generator=torch.Generator().manual_seed(seed))


# ---- the nodes


def slow_attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, attention: Attention) -> Tensor:
    """One head and one row after the other, keys and values repeated."""
    groups = q.shape[0] // k.shape[0]
    out = torch.zeros(q.shape[0], q.shape[1], v.shape[2], dtype=torch.float64)
    for head in range(q.shape[0]):
        for row in range(q.shape[1]):
            keys = visible[row].nonzero()[:, 0]
            if not len(keys):
                continue
            scores = (k[head // groups, keys].double() @ q[head, row].double()) * attention.scaling
            if attention.softcap is not None:
                scores = attention.softcap * torch.tanh(scores / attention.softcap)
            out[head, row] = scores.softmax(0) @ v[head // groups, keys].double()
    return out


# The largest error of each dtype for outputs of this size.
ROUNDING = {torch.float32: 1e-5, torch.float16: 0.05, torch.bfloat16: 0.4}


@settings(max_examples=90)
@given(
    st.integers(1, 6),
    st.integers(0, 9),
    st.integers(1, 4),
    st.booleans(),
    st.booleans(),
    st.integers(0, 999),
    st.sampled_from(list(ROUNDING)),
)
def test_shards_of_keys_merge_to_the_whole(
    rows: int, keys: int, shards: int, capped: bool, compress: bool, seed: int, dtype: torch.dtype
) -> None:
    """Rows without any visible key give 0, in one shard or in all; empty shards do no harm."""
    generator = torch.Generator().manual_seed(seed)
    sizes = ((4, rows), (2, keys), (2, keys))
    q, k, v = ((torch.randn(h, n, 5, generator=generator) * 3).to(dtype) for h, n in sizes)
    attention = Attention(0.4, softcap=2.0 if capped else None)
    visible = torch.rand(rows, keys, generator=generator) < 0.5
    owner = torch.randint(0, shards, (keys,), generator=generator)
    parts: list[Partial] = []
    for shard in range(shards):
        mine = owner == shard
        part = attention_pass(q, k[:, mine], v[:, mine], visible[:, mine], attention)
        parts.append(part.compressed() if compress else part)
    merged = post_pass(parts)
    assert torch.isfinite(merged).all()
    assert torch.allclose(merged.double(), slow_attention(q, k, v, visible, attention), atol=ROUNDING[dtype])


def test_visible_keys() -> None:
    queries, keys = (1, 4), (0, 1, 3, 4, 5)
    assert Attention(1.0).visible(queries, keys).tolist() == [
        [True, True, False, False, False], [True, True, True, True, False],
    ]  # fmt: skip
    windowed = Attention(1.0, window=2).visible(queries, keys)
    assert windowed.tolist() == [[True, True, False, False, False], [False, False, True, True, False]]
    assert bool(Attention(1.0, causal=False).visible(queries, keys).all())


@given(
    queries=st.lists(st.integers(0, 9), max_size=4),
    keys=st.lists(st.integers(0, 9), max_size=4),
    hidden=st.frozensets(st.integers(0, 9), max_size=2),
    causal=st.booleans(),
    window=st.none() | st.integers(1, 9),
)
def test_all_is_seen_where_no_mask_hides_anything(
    queries: list[int], keys: list[int], hidden: frozenset[int], causal: bool, window: int | None
) -> None:
    attention = Attention(1.0, causal, window)
    seen = bool(attention.visible(queries, keys, hidden).all())
    assert attention.sees_all(queries, keys, hidden) == seen


# ---- whole models


FEW, MANY = ((2, 4, 2),), ((1, 8, 4), (4, 2, 4), (8, 1, 1))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("plans", [FEW, pytest.param(MANY, marks=pytest.mark.slow)], ids=["few", "many"])
def test_outputs_equal_the_plain_model(
    tiny: TinyPath, architecture: str, plans: tuple[tuple[int, int, int], ...]
) -> None:
    path, tokens = tiny(architecture), prompt(19)
    expected = plain(path, tokens)
    model = load_cascade_model(path)
    for alpha, c, m in plans:
        for symmetric in (False, True):
            made = Plan.clustered(len(tokens), c, alpha=alpha, m=m, symmetric=symmetric)
            out = LocalCascade(model, Settings(compress=symmetric)).forward(tokens, made)
            assert float((out - expected).abs().max()) <= 1e-4, (alpha, c, m, symmetric)


@pytest.mark.slow
@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_partition_gives_the_same(tiny: TinyPath, data: st.DataObject) -> None:
    """Also prompts shorter than the number of nodes, and shards without order or reason."""
    path = tiny("gemma2")
    n = data.draw(st.integers(1, 14))
    owners = data.draw(st.lists(st.integers(0, 4), min_size=n, max_size=n))
    made = Plan.by_hand(
        [[t for t, owner in enumerate(owners) if owner == i] for i in range(5)],
        m=data.draw(st.integers(1, 3)),
        symmetric=data.draw(st.booleans()),
        causal=data.draw(st.booleans()),
    )
    settings = Settings(compress=data.draw(st.booleans()), record=True)
    cascade = LocalCascade(cascade_model(path), settings)
    tokens = prompt(n, seed=n)
    out = cascade.forward(tokens, made)
    assert float((out - plain(path, tokens)).abs().max()) <= 1e-4
    check_seen(cascade.seen(), made)


def check_seen(seen: list[Seen], made: Plan, layers: int = 4) -> None:
    """Every node received the rows of exactly the positions that the plan gives it, in every layer."""
    nodes = {f"AttnNode ({node.queries}, {node.keys})": node for node in made.attn_nodes}
    found: dict[tuple[str, str, int], set[int]] = {}
    for one in seen:
        for entry in one.entries:
            held = found.setdefault((one.node, entry.site.stream, entry.site.layer), set())
            if entry.site.stream != "attn":  # of which a node receives one for each key shard
                assert not held & set(entry.positions)
            held |= set(entry.positions)
    expected: dict[tuple[str, str, int], set[int]] = {}
    for layer in range(1, layers + 1):
        for i, shard in enumerate(made.shards):
            for stream in ("resid", "attn"):
                expected[f"CompNode {i}", stream, layer] = set(shard)
        for name, node in nodes.items():
            blocks = [block for block in made.blocks(node) if block not in made.left_out]
            queries = {p for block in blocks for p in made.splits[block.queries]}
            keys = {p for block in blocks for p in made.splits[block.keys]}
            assert queries | keys == set(made.held_by(node))
            expected |= {(name, "q", layer): queries, (name, "k", layer): keys, (name, "v", layer): keys}
    expected |= {(f"CompNode {i}", "embed", 0): set(shard) for i, shard in enumerate(made.shards)}
    assert found == {key: positions for key, positions in expected.items() if positions}


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    owners=st.lists(st.integers(0, 3), min_size=1, max_size=12),
    neighbours=st.booleans(),
    m=st.integers(1, 2),
    symmetric=st.booleans(),
    compress=st.booleans(),
)
def test_blocks_without_a_visible_key_are_neither_sent_nor_missed(
    tiny: TinyPath, owners: list[int], neighbours: bool, m: int, symmetric: bool, compress: bool
) -> None:
    """What the plain model gives, from the numbers that the cost formula counts and the rows that the plan names."""
    path, n = tiny("gemma2"), len(owners)
    owners, tokens = sorted(owners) if neighbours else owners, prompt(n, seed=n)
    shards = [[t for t in range(n) if owners[t] == i] for i in range(4)]
    made = Plan.by_hand(shards, m=m, symmetric=symmetric, causal=True)
    cascade = LocalCascade(cascade_model(path), Settings(compress=compress, record=True))
    assert float((cascade.forward(tokens, made) - plain(path, tokens)).abs().max()) <= 1e-4
    check_seen(cascade.seen(), made)
    shape = Shape.of(cascade.model.config, element_bytes=1)
    assert elements(cascade) == shape.layers * layer_bytes(made, shape, "logsumexp" if compress else "paper")


@pytest.mark.parametrize("keep", [False, True])
def test_a_node_waits_only_for_what_it_needs(
    tiny: TinyPath, monkeypatch: pytest.MonkeyPatch, keep: bool
) -> None:
    """CompNode 0 ends its pass before the holder of later tokens begins; with all blocks computed, it waits."""
    cascade, tokens = LocalCascade(cascade_model(tiny("llama"))), prompt(9)
    run, ended, early = CompHost.run, threading.Event(), list[bool]()

    def late(self: CompHost, *args: Any) -> Tensor:
        if self.index == 1:
            early.append(ended.wait(20.0 if causal else 0.3))
        out = run(self, *args)
        if self.index == 0:
            ended.set()
        return out

    monkeypatch.setattr(CompHost, "run", late)
    outputs = []
    for causal in (True, False):
        ended.clear()
        work = Pass(new_name(), Plan.by_hand([range(5), range(5, 9)], causal=causal), keep=keep)
        outputs.append(cascade.step(work, tokens))
        cascade.close(work.request)
    assert early == [True, False]
    assert torch.allclose(outputs[0], outputs[1], atol=1e-5)


def test_a_model_whose_tokens_see_later_ones_refuses_to_leave_blocks_out(tiny: TinyPath) -> None:
    cascade = LocalCascade(load_cascade_model(tiny("bert")))
    assert not cascade.facts.causal
    made = Plan.clustered(6, 3, alpha=2, causal=True)
    with pytest.raises(InputError, match="tokens see later ones in layer 1; the plan needs causal=False"):
        cascade.forward(prompt(6), made)


@settings(max_examples=4, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.integers(1, 2))
def test_the_driver_hands_each_compnode_its_own_tokens(tiny: TinyPath, owners: list[int], m: int) -> None:
    """And takes rows of the output from it: nothing else passes between driver and nodes."""
    n = len(owners)
    tokens = prompt(n, seed=n)
    made = Plan.by_hand([[t for t in range(n) if owners[t] == i] for i in range(4)], m=m)
    handed: dict[int, list[int]] = {}
    given_back: dict[int, tuple[int, ...]] = {}

    class Watched(LocalCascade):
        def _run(self, batch: Batch, shares: Mapping[int, Tensor]) -> dict[int, Tensor]:
            handed.update({i: share.tolist() for i, share in shares.items()})
            out = super()._run(batch, shares)
            given_back.update({i: tuple(rows.shape) for i, rows in out.items()})
            return out

    Watched(cascade_model(tiny("llama"))).forward(tokens, made)
    shards = {i: shard for i, shard in enumerate(made.shards) if shard}
    assert handed == {i: [int(tokens[t]) for t in shard] for i, shard in shards.items()}
    assert given_back == {i: (len(shard), VOCABULARY) for i, shard in shards.items()}


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
def test_what_is_sent_is_equation_1(tiny: TinyPath, compress: bool, symmetric: bool) -> None:
    model, tokens = load_cascade_model(tiny("llama")), prompt(21)
    made = Plan.clustered(21, 2, alpha=3, m=2, symmetric=symmetric)
    cascade = LocalCascade(model, Settings(compress=compress))
    cascade.forward(tokens, made)
    shape = Shape.of(model.config, element_bytes=1)
    assert elements(cascade) == shape.layers * layer_bytes(made, shape, "logsumexp" if compress else "paper")


def test_a_failing_node_fails_the_pass_and_no_other(tiny: TinyPath, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = load_cascade_model(tiny("llama")), prompt(9)
    cascade, made = LocalCascade(model), Plan.clustered(9, 1, alpha=3)
    expected = cascade.forward(tokens, made)
    run = CompHost.run

    def fail(self: CompHost, batch: Batch, *rest: object) -> Tensor:
        if self.index == 1:
            raise MemoryError("node 1 is full")
        return run(self, batch, *rest)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(CompHost, "run", fail)
        with pytest.raises(MemoryError, match="node 1 is full"):
            cascade.forward(tokens, made)
    assert torch.equal(cascade.forward(tokens, made), expected)


def test_wrong_prompts_are_refused(tiny: TinyPath) -> None:
    cascade = LocalCascade(load_cascade_model(tiny("llama")))
    with pytest.raises(InputError, match="plan is for 4 tokens, the prompt has 5"):
        cascade.forward(prompt(5), Plan.clustered(4, 1, alpha=2))
    with pytest.raises(InputError, match="context holds 512"):
        cascade.forward(prompt(513), Plan.clustered(513, 1, alpha=2))
    with pytest.raises(RuntimeError, match="through its backend"):
        cascade.model(input_ids=prompt(3)[None])
