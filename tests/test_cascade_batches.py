"""Requests that run together get what each gets alone, and one that ends does not disturb the others."""

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from hiddenlab.defenses.cascade import batching, key_cache
from hiddenlab.defenses.cascade.attn_worker import AttnWorker, ForgottenError
from hiddenlab.defenses.cascade.backend import Settings
from hiddenlab.defenses.cascade.batching import Batcher
from hiddenlab.defenses.cascade.generate import generate
from hiddenlab.defenses.cascade.load import load_cascade_model
from hiddenlab.defenses.cascade.local import LocalCascade
from hiddenlab.defenses.cascade.node_state import NodeError
from hiddenlab.defenses.cascade.nodes import CompWorker, Partial, Rows
from hiddenlab.defenses.cascade.passes import Batch, Pass
from hiddenlab.defenses.cascade.remote import WireCascade
from hiddenlab.models.attention import Attention
from hiddenlab.sharding import AttnNode, Plan
from hiddenlab.testing import VOCABULARY

TinyPath = Callable[..., str]
PATIENCE = 20.0
HEADS, KV, WIDTH = 4, 2, 3


def prompt(n: int, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCABULARY, (n,), generator=torch.Generator().manual_seed(seed))


# ---- the attention of a batch


def plain_attention(q: Tensor, k: Tensor, v: Tensor, how: Attention, hidden: set[int]) -> Tensor:
    """All rows of one request, one head after the other."""
    n = q.shape[1]
    out = torch.zeros(HEADS, n, WIDTH)
    visible = how.visible(range(n), range(n), hidden)
    for head in range(HEADS):
        scores = q[head] @ k[head // (HEADS // KV)].T * how.scaling
        scores = scores.masked_fill(~visible, float("-inf"))
        weights = torch.nan_to_num(scores.softmax(-1))
        out[head] = weights @ v[head // (HEADS // KV)]
    return out


def run_layers(
    workers: Mapping[AttnNode, AttnWorker],
    passes: list[Pass],
    rows: list[list[tuple[Tensor, ...]]],
    how: Attention,
) -> list[list[Tensor]]:
    """One batch: for every pass and layer, the merged attention of its new rows, by position."""
    alpha = passes[0].plan.alpha
    comps = {i: CompWorker(passes, i) for i in range(alpha)}
    begun = {node: worker.begin(passes, "batch") for node, worker in workers.items()}
    merged: list[list[Tensor]] = [[] for _ in passes]
    for layer in range(len(rows[0])):
        sent: dict[AttnNode, dict[int, Rows]] = {}
        for i, comp in comps.items():
            if not comp.positions:
                continue
            mine = [
                tuple(tensor[:, list(work.new(i))] for tensor in rows[place][layer])
                for place, work in enumerate(passes)
            ]
            q, k, v = (torch.cat([one[j] for one in mine], 1) for j in range(3))
            for node, part in comp.rows(q, k, v).items():
                sent.setdefault(node, {})[i] = part
        answers: dict[int, dict[AttnNode, list[Partial]]] = {i: {} for i in comps}
        for node, came in sent.items():
            assert {i: (r.queries.shape[1], r.keys.shape[1]) for i, r in came.items()} == begun[node].sizes
            for i, parts in begun[node].run(layer, layer, came, how).items():
                answers[i][node] = parts
        outputs = {i: comp.merge(answers[i]) for i, comp in comps.items() if comp.positions}
        for place, work in enumerate(passes):
            out = torch.zeros(HEADS, work.plan.tokens, WIDTH)
            for i, rows_of in outputs.items():
                at = sum(len(before.new(i)) for before in passes[:place])
                out[:, list(work.new(i))] = rows_of[:, at : at + len(work.new(i))]
            merged[place].append(out[:, work.since :])
    return merged


@pytest.mark.slow
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    shape=st.tuples(st.integers(1, 3), st.integers(1, 2), st.integers(1, 2), st.booleans()),
    how=st.builds(Attention, st.just(0.5), st.booleans(), st.none() | st.integers(1, 5)),
    compress=st.booleans(),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_rows_of_many_requests_attend_as_each_alone(
    monkeypatch: pytest.MonkeyPatch,
    lengths: list[int],
    shape: tuple[int, int, int, bool],
    how: Attention,
    compress: bool,
    seed: int,
    data: st.DataObject,
) -> None:
    """Whoever begins, goes on, or pauses: each new row equals plain attention over its request alone."""
    monkeypatch.setattr(key_cache, "SHORTEST", 2)  # so that requests outgrow their banks
    alpha, c, m, symmetric = shape
    random = torch.Generator().manual_seed(seed)
    workers = {
        node: AttnWorker(node, compress=compress)
        for node in Plan.clustered(alpha, 1, alpha=alpha, m=m, symmetric=symmetric).attn_nodes
    }
    total, layers = 14, 2
    everything = [
        [
            tuple(torch.randn(h, total, WIDTH, generator=random) for h in (HEADS, KV, KV))
            for _ in range(layers)
        ]
        for _ in lengths
    ]
    known = [0] * len(lengths)
    leave_out = [how.causal and data.draw(st.booleans()) for _ in range(len(lengths) + 1)]
    for _ in range(5):
        chosen = data.draw(st.lists(st.sampled_from(range(len(lengths))), min_size=1, unique=True))
        passes, rows = [], []
        for one in chosen:
            new = 1 if known[one] else lengths[one]
            if known[one] + new > total:
                continue
            plan = Plan.clustered(
                lengths[one], c, alpha=alpha, m=m, symmetric=symmetric, causal=leave_out[one]
            )
            plan = plan.grown(known[one] + new)
            passes.append(Pass(f"request {one}", plan, since=known[one], keep=True))
            rows.append([tuple(t[:, : known[one] + new] for t in layer) for layer in everything[one]])
            known[one] += new
        # One that is not kept, with padding, among them.
        n = data.draw(st.integers(2, 6))
        hidden = data.draw(st.sets(st.integers(0, n - 1), max_size=n - 1))
        plan = Plan.clustered(n, c, alpha=alpha, m=m, symmetric=symmetric, causal=leave_out[-1])
        passes.append(Pass("not kept", plan, hidden=tuple(sorted(hidden))))
        rows.append([tuple(t[:, :n] for t in layer) for layer in everything[0]])
        found = run_layers(workers, passes, rows, how)
        for work, layer_rows, outputs in zip(passes, rows, found, strict=True):
            for (q, k, v), output in zip(layer_rows, outputs, strict=True):
                expected = plain_attention(q, k, v, how, set(work.hidden))
                assert torch.allclose(output, expected[:, work.since :], atol=1e-5)
    for worker in workers.values():
        for one in range(len(lengths)):
            worker.close(f"request {one}")
        for cache in worker._caches.values():
            assert cache._held == {}
            assert all(len(bank.positions) == 0 and bank._layers == {} for bank in cache._banks.values())


def test_a_node_that_was_started_anew_says_so() -> None:
    plan = Plan.clustered(4, 1, alpha=1)
    worker = AttnWorker(AttnNode(0, 0))
    worker.begin([Pass("known", plan, keep=True)], "batch")
    worker.begin([Pass("known", plan.grown(5), since=4, keep=True)], "batch")
    with pytest.raises(ForgottenError):
        worker.begin([Pass("unknown", plan.grown(5), since=4, keep=True)], "batch")


# ---- whole generations


class Counting(LocalCascade):
    sizes: list[int]

    def _run(self, batch: Batch, shares: Mapping[int, Tensor]) -> dict[int, Tensor]:
        self.sizes.append(len(batch.passes))
        return super()._run(batch, shares)


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "compress", "symmetric", "m"), [
    ("gemma2", False, False, 1), ("llama", True, True, 2), ("gpt2", True, True, 1),
])  # fmt: skip
def test_answers_together_are_those_alone(
    tiny: TinyPath, architecture: str, compress: bool, symmetric: bool, m: int
) -> None:
    """Prompts and answers of different length, begun at different times, and a pass that is not kept among them."""
    model = load_cascade_model(tiny(architecture))
    cascade = Counting(model, Settings(compress=compress))
    cascade.sizes = []
    asked = [(prompt(n, seed=n), 3 + n % 5) for n in (1, 4, 9, 14, 3, 6)]

    def answer(one: tuple[Tensor, int]) -> list[int]:
        tokens, new = one
        c = 2 if len(tokens) % 2 else len(tokens)  # dealt, or neighbours with blocks that are left out
        made = Plan.clustered(len(tokens), c, alpha=2, m=m, symmetric=symmetric, causal=True)
        return list(generate(cascade, tokens, made, new_tokens=new))

    alone = [answer(one) for one in asked]
    forward = Plan.clustered(14, 2, alpha=2, m=m, symmetric=symmetric)
    plain = cascade.forward(prompt(14, seed=14), forward)
    assert set(cascade.sizes) == {1}
    cascade.sizes.clear()
    with ThreadPoolExecutor(len(asked) + 1) as pool:
        passed = pool.submit(cascade.forward, prompt(14, seed=14), forward)
        assert list(pool.map(answer, asked)) == alone
        assert torch.allclose(passed.result(), plain, atol=1e-5)
    assert max(cascade.sizes) > 3
    assert sum(cascade.sizes) == 1 + sum(new for _, new in asked)
    assert all(
        cache._held == {} for host in cascade._attns.values() for cache in host._worker._caches.values()
    )


@pytest.mark.slow
def test_requests_over_the_wire_run_together(tiny: TinyPath) -> None:
    with WireCascade(load_cascade_model(tiny("llama")), 2, timeout=PATIENCE) as cascade:

        def answer(n: int) -> list[int]:
            return list(generate(cascade, prompt(n), Plan.clustered(n, 1, alpha=2), new_tokens=6))

        alone = [answer(n) for n in range(1, 7)]
        before = sum(comp.hub.sent.messages for comp in cascade.comps)
        with ThreadPoolExecutor(6) as pool:
            assert list(pool.map(answer, range(1, 7))) == alone
        together = sum(comp.hub.sent.messages for comp in cascade.comps) - before
        assert together < before  # one message carries rows of several requests


def test_what_records_runs_one_request_at_a_time(tiny: TinyPath) -> None:
    cascade = Counting(load_cascade_model(tiny("llama")), Settings(record=True))
    cascade.sizes = []
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda n: cascade.forward(prompt(n), Plan.clustered(n, 1, alpha=2)), (3, 4, 5)))
    assert cascade.sizes == [1, 1, 1]


# ---- who runs with whom


class Nodes:
    """Nodes that give every row back; each batch needs a permit."""

    def __init__(self, **options: Any) -> None:
        self.batches: list[list[str]] = []
        self.closed: list[str] = []
        self.aborted: list[str] = []
        self.permits = threading.Semaphore(0)
        self.given_up = threading.Event()
        self.fault: Exception | None = None
        self.batcher = Batcher(self.run, self.abort, self.closed.append, **options)
        self.pool = ThreadPoolExecutor(16)

    def run(self, batch: Batch, shares: dict[int, Tensor]) -> dict[int, Tensor]:
        self.batches.append([work.request for work in batch.passes])
        for _ in range(round(PATIENCE / 0.01)):
            if self.given_up.is_set():
                raise NodeError("the batch was given up")
            if self.permits.acquire(timeout=0.01):
                break
        if self.fault is not None:
            raise self.fault
        return shares

    def abort(self, batch: str) -> None:
        self.aborted.append(batch)
        self.given_up.set()

    def ask(self, name: str, tokens: int = 2, *, keep: bool = False, symmetric: bool = False) -> Any:
        """Ask for a pass from another thread, and return once it waits, runs or is done."""
        plan = Plan.clustered(tokens, 1, alpha=2, symmetric=symmetric)
        rows = torch.arange(tokens) + 100 * len(name)
        shares = {i: rows[list(shard)] for i, shard in enumerate(plan.shards) if shard}
        future = self.pool.submit(self.batcher.step, Pass(name, plan, keep=keep), shares)
        batcher = self.batcher
        while name not in [t.work.request for t in (*batcher._waiting, *batcher._running)]:
            if future.done():
                break
        return future

    def until_busy(self, batches: int = 1) -> None:
        while len(self.batches) < batches:
            pass


def test_passes_that_wait_form_the_next_batch_in_turn() -> None:
    nodes = Nodes(most_passes=3)
    futures = [nodes.ask("first")]
    nodes.until_busy()
    futures += [nodes.ask(name) for name in "abcd"]
    nodes.permits.release(5)
    results = [future.result(PATIENCE) for future in futures]
    assert nodes.batches == [["first"], ["a", "b", "c"], ["d"]]
    for name, parts in zip(("first", *"abcd"), results, strict=True):
        assert {i: rows.tolist() for i, rows in parts.items()} == {
            0: [100 * len(name)],
            1: [100 * len(name) + 1],
        }


def test_a_long_prompt_runs_alone_but_is_not_put_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "MOST_TOKENS", 5)
    nodes = Nodes()
    futures = [nodes.ask("first")]
    nodes.until_busy()
    futures += [nodes.ask("a", 3), nodes.ask("long", 9), nodes.ask("b", 1), nodes.ask("c", 4)]
    nodes.permits.release(5)
    for future in futures:
        future.result(PATIENCE)
    assert nodes.batches == [["first"], ["a"], ["long"], ["b", "c"]]


def test_plans_of_other_shape_do_not_share_a_batch() -> None:
    nodes = Nodes()
    futures = [nodes.ask("first")]
    nodes.until_busy()
    futures += [nodes.ask("a"), nodes.ask("b", symmetric=True), nodes.ask("c")]
    nodes.permits.release(5)
    for future in futures:
        future.result(PATIENCE)
    assert nodes.batches == [["first"], ["a", "c"], ["b"]]


def test_a_closed_request_leaves_the_others_alone() -> None:
    """Waiting, it ends at once. Running, it is forgotten once its batch has ended."""
    nodes = Nodes()
    first = nodes.ask("first")
    nodes.until_busy()
    waiting, other = nodes.ask("waiting"), nodes.ask("other")
    nodes.batcher.close("waiting")
    with pytest.raises(NodeError, match="given up"):
        waiting.result(PATIENCE)
    assert nodes.closed == ["waiting"]
    assert not first.done()
    nodes.permits.release(2)
    first.result(PATIENCE)
    other.result(PATIENCE)
    nodes.batches.clear()
    front = nodes.ask("front")
    nodes.until_busy()
    leaves, stays = nodes.ask("leaves"), nodes.ask("stays")
    nodes.permits.release()
    front.result(PATIENCE)
    nodes.until_busy(2)
    nodes.batcher.close("leaves")
    assert nodes.closed == ["waiting"]
    assert nodes.aborted == []
    nodes.permits.release(5)
    assert stays.result(PATIENCE)
    with pytest.raises(NodeError, match="given up"):
        leaves.result(PATIENCE)
    assert nodes.closed == ["waiting", "leaves"]


def test_a_batch_that_nobody_wants_ends_early() -> None:
    nodes = Nodes()
    alone = nodes.ask("alone")
    nodes.until_busy()
    nodes.batcher.close("alone")
    with pytest.raises(NodeError, match="given up"):
        alone.result(PATIENCE)
    assert len(nodes.aborted) == 1
    assert nodes.closed == ["alone"]


@pytest.mark.parametrize(
    "fault", [NodeError("AttnNode (0, 1) died", "AttnNode (0, 1)"), MemoryError("full")], ids=str
)
def test_all_passes_of_a_batch_hear_of_a_fault(fault: Exception) -> None:
    nodes = Nodes()
    first = nodes.ask("first")
    nodes.until_busy()
    both = [nodes.ask("a"), nodes.ask("b")]
    nodes.permits.release()
    first.result(PATIENCE)
    nodes.until_busy(2)
    nodes.fault = fault
    nodes.permits.release(5)
    for future in both:
        with pytest.raises(type(fault), match=str(fault).replace("(", r"\(").replace(")", r"\)")) as caught:
            future.result(PATIENCE)
        assert getattr(caught.value, "node", None) == getattr(fault, "node", None)
    nodes.fault = None
    assert nodes.ask("after").result(PATIENCE)


def test_a_batch_waits_for_the_next_tokens_of_the_one_before() -> None:
    """But not for requests that have ended."""
    nodes = Nodes()
    first = nodes.ask("front")
    nodes.until_busy()
    kept = [nodes.ask(name, keep=True) for name in "abc"]
    nodes.permits.release(5)
    first.result(PATIENCE)
    for future in kept:
        future.result(PATIENCE)
    assert nodes.batcher._expected == {"a", "b", "c"}
    nodes.batcher.close("c")
    nodes.batcher._until += PATIENCE
    one = nodes.ask("a", keep=True)
    assert not one.done()
    assert len(nodes.batches) == 2
    other = nodes.ask("b", keep=True)
    one.result(PATIENCE)
    other.result(PATIENCE)
    assert sorted(nodes.batches[2]) == ["a", "b"]
