"""Everything that computes stays on the device of its tensors, waits for nothing there, and holds bounded memory.

The card is torch's device ``meta``: its tensors have shapes and no values, so that no card is needed, whoever asks for
a value fails, and sizes are free. What goes between it and the CPU is noted; anything else that takes tensors of both
fails.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModel, AutoModelForCausalLM

from hiddenlab import registry
from hiddenlab.attacks.vocab_match.task import Trials
from hiddenlab.defenses.cascade import comp_host
from hiddenlab.defenses.cascade.attn_host import AttnHost
from hiddenlab.defenses.cascade.attn_worker import AttnBatch, AttnWorker
from hiddenlab.defenses.cascade.comp_host import CompHost
from hiddenlab.defenses.cascade.node_state import Head
from hiddenlab.defenses.cascade.nodes import Answer, CompWorker, Rows, attention_pass, post_pass
from hiddenlab.defenses.cascade.passes import Batch, Pass
from hiddenlab.matching.distance import Matcher
from hiddenlab.matching.epsilon import Threshold
from hiddenlab.matching.screening import Screen
from hiddenlab.models import ModelRef, Prefix, Request, TruncatedModel, engine
from hiddenlab.models.attention import Attention, register_attention
from hiddenlab.projections import Projection
from hiddenlab.proposals import in_context, probe
from hiddenlab.proposals.first_token_table import FirstTokenTable, SortedStates, packed, sorted_states
from hiddenlab.proposals.in_context import Adapter
from hiddenlab.proposals.pairwise_order import PairwiseOrder
from hiddenlab.proposals.probe import Expert, Probe, ProbeSettings, sampled_softmax
from hiddenlab.proposals.sorted_states import Contexts
from hiddenlab.sharding import AttnNode, Plan
from hiddenlab.testing import DECODERS, HEADS, KV_HEADS, LAYERS, VOCABULARY, WIDTH, WINDOW, tiny_config
from hiddenlab.types import LAST_STREAMS, Site

CARD, CPU = torch.device("meta"), torch.device("cpu")
COPIES = ("_to_copy", "to", "copy_")


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    for one in values:
        if isinstance(one, Tensor):
            yield one
        elif isinstance(one, list | tuple):
            yield from tensors_in(one)


class Crossings(TorchDispatchMode):
    """Notes what is copied between the card and the CPU; no other operation may have tensors of both.

    Numbers made on the CPU may go into operations on the card, as they do without waiting.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self._made = _Made(self.seen)

    def __enter__(self) -> "Crossings":
        self._made.__enter__()
        super().__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, trace)
        self._made.__exit__(kind, error, trace)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        tensors = tensors_in((args, list((kwargs or {}).values()), out))
        if len({one.device for one in tensors if one.ndim or name in COPIES}) > 1:
            assert name in COPIES, f"{func} takes tensors of several devices"
            self.seen.append(str(func))
        return out


class _Made(TorchFunctionMode):
    """Notes tensors made on the card of Python numbers, which are made on the CPU and copied."""

    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.tensor and torch.device((kwargs or {}).get("device") or "cpu") == CARD:
            self.seen.append("tensor")
        return func(*args, **(kwargs or {}))


@pytest.fixture
def crossings() -> Iterator[Crossings]:
    with Crossings() as seen:
        yield seen


@pytest.fixture(autouse=True)
def _half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card multiplies bfloat16."""
    for module in (probe, in_context):
        monkeypatch.setattr(module, "fast_dtype", lambda device: torch.bfloat16)


def model_on_card(architecture: str, attention: str, *, head: bool = True, **changes: Any) -> torch.nn.Module:
    """A tiny model without values. Grouped products of experts have no shapes in single precision."""
    config = tiny_config(architecture, **changes)
    dtype = torch.bfloat16 if "moe" in architecture else torch.float32
    with torch.device(CARD):
        factory = AutoModelForCausalLM if head else AutoModel
        model = factory.from_config(config, dtype=dtype, attn_implementation=attention)
    return model.eval().requires_grad_(False)


def on_card(architecture: str, layer: int = LAYERS, stream: str = "resid", **changes: Any) -> TruncatedModel:
    name = register_attention(engine.ATTENTION_NAME, engine._ACTIVE, "not by itself")
    kinds = ["sliding_attention", "full_attention"] * LAYERS
    listed = {"layer_types": kinds[:layer]} if architecture.startswith("gemma") else {}
    model = model_on_card(
        architecture, name, head=stream == "logits", **listed, num_hidden_layers=layer, **changes
    )
    return TruncatedModel(model, ref=ModelRef("tiny", "tiny"), site=Site(layer, stream))


def card(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=CARD)


def ids(*shape: int, device: torch.device = CARD) -> Tensor:
    return torch.zeros(shape, dtype=torch.long, device=device)


def behind(model: TruncatedModel, length: int, offset: int = 0) -> Prefix:
    """A prefix of so many tokens, which came from the CPU: those on the card would have to be read."""
    prefix = model.prefix(offset=offset)
    if length:
        on(prefix.extend(ids(length, device=CPU)), length, model.width)
    return prefix


def on(tensor: Tensor, *shape: int) -> None:
    assert tensor.device == CARD
    assert tensor.shape == shape


def test_the_card_shows_what_goes_to_and_from_it() -> None:
    rows = card(4, 3)
    with Crossings() as seen:
        _ = rows[torch.arange(2, device=CARD)] * 2 + rows.new_tensor(3.0)
        assert seen.seen == []
        _ = torch.ones(2).to(CARD), torch.tensor([1], device=CARD)
        rows[0] = torch.ones(3)
        assert len(seen.seen) == 3
        for mixed in (lambda: rows[torch.arange(2)], lambda: rows + torch.ones(3)):
            with pytest.raises((AssertionError, RuntimeError), match="device"):
                mixed()
        for waiting in (rows.sum().item, lambda: bool(rows.any()), rows.tolist, rows.cpu, rows.nonzero):
            with pytest.raises((RuntimeError, NotImplementedError)):
                waiting()


# ---- the engine


@pytest.mark.parametrize("architecture", DECODERS)
def test_passes_run_on_the_card(architecture: str) -> None:
    model = on_card(architecture, 2)
    prefix = behind(model, WINDOW + 2)
    on(prefix.branch(ids(5, device=CPU)), 5, WIDTH)
    prefix.commit(3)
    assert prefix.tokens == [0] * (WINDOW + 3)
    fork, other = prefix.fork(), model.prefix(offset=1)
    # Embeddings leave no token ids behind, which would have to be read.
    chain, parents = model.embed(ids(3)), ids(4)
    requests = [
        Request(prefix, chain, branches=model.embed(ids(4)), parents=parents),
        Request(fork, chain, branches=model.embed(ids(8)).unflatten(0, (4, 2)), parents=parents),
        Request(other, chain[:0], branches=model.embed(ids(8)).unflatten(0, (2, 4))),
    ]
    with Crossings() as seen:
        on(model.encode(ids(9)), 9, WIDTH)
        on(prefix.branch(ids(5)), 5, WIDTH)
        answers = model.run(requests)
        prefix.keep(answers[0], tokens=2, branch=1)
        fork.keep(answers[1], tokens=1, branch=3)
        assert seen.seen == []
    for request, answer in zip(requests, answers, strict=True):
        on(answer.states, len(request.tokens), WIDTH)
        on(answer.branches, request.size - len(request.tokens), WIDTH)
    assert (prefix.length, fork.length, other.length) == (WINDOW + 6, WINDOW + 6, 0)
    for layer in range(2):
        assert {part.device for part in (*prefix.store.view(layer), *fork.store.view(layer))} == {CARD}


@pytest.mark.parametrize("architecture", DECODERS)
def test_chains_together_run_on_the_card(architecture: str) -> None:
    model = on_card(architecture, 2)
    requests = [Request(behind(model, length), ids(2)) for length in (0, 0, 5, 5, 5, 2)]
    with Crossings() as seen:
        for answer in model.run(requests, together=True):
            on(answer.states, 2, WIDTH)
        assert seen.seen == ["tensor"]  # where the chains begin


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_gradients_on_the_card(architecture: str) -> None:
    model = on_card(architecture, 2)
    prefix, given = behind(model, 3), model.embed(ids(6)).clone().requires_grad_()
    with Crossings() as seen:
        model.run([Request(prefix, given)], keep=False, grad=True)[0].states.sum().backward()
        assert seen.seen == []
    assert given.grad is not None
    on(given.grad, 6, WIDTH)


@pytest.mark.parametrize("stream", ["q", "k", "qkv", "attn", "final_norm", "logits"])
def test_streams_on_the_card(stream: str) -> None:
    layer = LAYERS if stream in LAST_STREAMS else 2
    model = on_card("gemma2", layer, stream)
    width = VOCABULARY if stream == "logits" else model.width
    for device, copied in ((CARD, 0), (CPU, 2)):
        with Crossings() as seen:
            on(model.encode(ids(7, device=device)), 7, width)
            assert len(seen.seen) == copied


@pytest.mark.parametrize("architecture", DECODERS)
def test_states_behind_given_attention_on_the_card(architecture: str, crossings: Crossings) -> None:
    model = on_card(architecture, 1)
    inputs = model.embed(ids(5))
    attended = model.run([Request(model.prefix(), inputs)], keep=False, show="attn")[0].states
    positions = torch.arange(5, device=CARD)
    on(model.run_given(inputs, attended, positions), 5, WIDTH)
    second = on_card(architecture, 2, "qkv")
    on(second.run_given(inputs, attended, positions), 5, second.width)


def test_a_shadow_prefix_on_the_card() -> None:
    model = on_card("llama", 2)
    screen = Screen(model)
    vars(screen)["model"] = on_card("llama", 2)
    screen.model.module.to(torch.bfloat16)
    prefix = behind(model, 5)
    shadow = screen.follow(prefix)
    prefix.extend(ids(70, device=CPU))
    with Crossings() as seen:
        assert screen.follow(prefix, shadow).length == 75
        on(shadow.branch(ids(20)), 20, WIDTH)
        assert seen.seen == []


# ---- what a pass waits for


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
@pytest.mark.parametrize("depth", [1, 3])
def test_a_pass_copies_its_inputs_and_their_places_once(architecture: str, depth: int) -> None:
    for layers in (1, 3):
        model = on_card(architecture, layers)
        prefixes = [behind(model, 3 + i, offset=i) for i in range(4)]
        for requests, branches in ((1, 2), (4, 40)):
            for device, copied in ((CARD, 0), (CPU, 2)):
                chain, parents = ids(2, device=device), ids(branches, device=device)
                tokens = ids(branches, depth, device=device)
                with Crossings() as seen:
                    model.run([Request(one, chain, tokens, parents) for one in prefixes[:requests]])
                assert len(seen.seen) == copied


def test_what_a_prefix_copies_does_not_grow() -> None:
    for layers in (1, 3):
        model = on_card("gemma2", layers)
        prefix = model.prefix()
        with Crossings() as seen:
            prefix.extend(ids(5, device=CPU))
            prefix.branch(ids(50, device=CPU))
            prefix.commit(7)
        assert len(seen.seen) == 4
        assert prefix.tokens == [0] * 6


def test_chains_together_copy_where_they_begin_once() -> None:
    for layers, requests in ((1, 4), (3, 4), (3, 10)):
        model = on_card("llama", layers)
        asked = [Request(behind(model, 3 + i % 2), ids(1)) for i in range(requests)]  # two groups
        with Crossings() as seen:
            model.run(asked, together=True)
        assert seen.seen == ["tensor"]


# ---- what a pass holds


class LargestNew(TorchDispatchMode):
    """Notes the largest tensor that an operation makes, views of its arguments left aside."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        old = {one.untyped_storage()._cdata for one in tensors_in(args)}
        for one in tensors_in([out]):
            if one.untyped_storage()._cdata not in old:
                self.largest = max(self.largest, one.untyped_storage().nbytes() // one.element_size())
        return out


def largest_of_attention(monkeypatch: pytest.MonkeyPatch, run: Callable[[], Any]) -> int:
    """Elements of the largest tensor that attention makes in a pass."""
    seen, attend = LargestNew(), engine.PackedPass.attend

    def watched(*args: Any) -> Tensor:
        with seen:
            return attend(*args)

    monkeypatch.setattr(engine.PackedPass, "attend", watched)
    run()
    monkeypatch.setattr(engine.PackedPass, "attend", attend)
    return seen.largest


HEAD = WIDTH // HEADS


@pytest.mark.parametrize("architecture", ["llama", "mistral"])  # without and with a window
@pytest.mark.parametrize("chain", [0, 300])
@pytest.mark.parametrize("depth", [1, 4])
def test_attention_to_a_prefix_holds_a_chunk_of_scores_or_its_rows(
    monkeypatch: pytest.MonkeyPatch, architecture: str, chain: int, depth: int
) -> None:
    """max(SCORE_ELEMENTS, a branch's scores, a row of each head a token, keys of prefix and chain) elements."""
    bound = 1 << 20
    monkeypatch.setattr("hiddenlab.models.packed_attention.SCORE_ELEMENTS", bound)
    model = on_card(architecture, 1)
    for prefix, branches in ((200, 16), (3000, 16), (3000, 512 // depth)):
        held = behind(model, prefix)
        request = Request(held, ids(chain), ids(branches, depth))
        largest = largest_of_attention(monkeypatch, lambda: model.run([request]))  # noqa: B023
        shared, tokens = prefix + chain, chain + branches * depth
        rows, keys = tokens * HEADS * HEAD, KV_HEADS * shared * HEAD
        assert largest <= max(bound, HEADS * depth * (shared + depth), rows, keys)
        if branches > 16:
            assert 4 * largest < HEADS * tokens * shared


def test_chains_together_hold_a_chunk_of_scores_and_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """max(SCORE_ELEMENTS, one chain's scores or keys, a row of each head a token) elements."""
    bound = 1 << 15
    monkeypatch.setattr("hiddenlab.models.packed_attention.SCORE_ELEMENTS", bound)
    model = on_card("llama", 1)
    for prefix, chain, requests in ((20, 1, 8), (200, 1, 60), (400, 4, 60)):
        held = behind(model, prefix)
        asked = [Request(held, ids(chain)) for _ in range(requests)]
        largest = largest_of_attention(monkeypatch, lambda: model.run(asked, together=True))  # noqa: B023
        one = max(HEADS * chain, KV_HEADS * HEAD) * (prefix + chain)
        assert largest <= max(bound, one, requests * chain * HEADS * HEAD)
        if requests > 8:
            assert 4 * largest < requests * KV_HEADS * prefix * HEAD


# ---- what is compared and learned


@pytest.mark.parametrize("norm", [1, 2])
@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("projection", [None, Projection(8), Projection(8, kind="orthogonal")])
def test_distances_on_the_card(norm: int, ordered: bool, projection: Projection | None) -> None:
    matcher = Matcher(norm, not ordered, projection)
    with Crossings() as seen:
        for _ in range(3):
            states = matcher.view(card(50, WIDTH))
        assert len(seen.seen) <= 1  # the directions, once
    with Crossings() as seen:
        width = WIDTH if projection is None else 8
        rows = matcher.prepare(card(6, width))
        on(states, 50, width)
        on(matcher.table(candidates=states, observed=rows), 50, 6)
        on(matcher.table(candidates=states, observed=rows[:1]), 50, 1)
        on(matcher.pairs(candidates=states[:6], observed=rows), 6)
        on(matcher.norms(rows), 6)
        for threshold in (
            Threshold(0.1, 0.1, 0.2),
            Threshold(0.1, 0.1, 0.2, absolute=3.0),
            Threshold(0.1, 0.1, 0.2, sinks=0.3, border=2.0),
        ):
            on(threshold.limits(matcher, rows), 6)
        assert seen.seen == []


def test_candidates_tried_on_the_card(crossings: Crossings) -> None:
    tried = Trials(card(6))
    tried.add(ids(50), card(50, 6))
    tried.add(ids(50), card(50, 6), torch.arange(5, device=CARD))
    on(tried.relative(card(50, 6)), 50)
    tried.tokens, tried.nearest, tried.rows = (
        [torch.cat(of)] for of in (tried.tokens, tried.nearest, tried.rows)
    )
    tried.screened = [torch.cat(tried.screened)]
    tried.correct(torch.arange(3, device=CARD), card(3, 6))
    on(tried.nearest[0], 100)
    assert crossings.seen == []


def expert(inner: int | None = None) -> Expert:
    found = Expert.of(card(40, WIDTH))
    found.parameters = {"linear": card(WIDTH, WIDTH), "bias": card(WIDTH), "log_scale": card()}
    if inner:
        found.parameters |= {"hidden_in": card(WIDTH, inner), "hidden_bias": card(inner)}
        found.parameters["hidden_out"] = card(inner, WIDTH)
    return found


def probe_on_card(ordered: bool, groups: int, screen: int | None = None) -> Probe:
    border = math.inf if groups == 1 else 2.0
    inner = None if ordered else 32
    experts = [expert(inner) for _ in range(groups)]
    directions = None if screen is None else card(WIDTH, screen)
    found = Probe(ProbeSettings(not ordered), experts, border, card(WIDTH), card(WIDTH, WIDTH), directions)
    return found.with_table(card(VOCABULARY, WIDTH))


def states_of_all() -> SortedStates:
    return SortedStates(*packed([card(200, WIDTH), card(VOCABULARY - 200, WIDTH)]))


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("screen", [None, 16])
def test_probes_on_the_card(ordered: bool, groups: int, screen: int | None) -> None:
    found = probe_on_card(ordered, groups, screen)
    rows = card(200, WIDTH)
    with Crossings() as seen:
        on(found.direction(rows), 200, WIDTH)
        on(found.log_probs(rows), 200, VOCABULARY)
        for scores in found.shortlist(rows, 20):
            on(scores, 200, 20)
        found.beside(Contexts(states_of_all(), (1.0, 2.0)))
        on(found.log_probs(rows), 200, VOCABULARY)
        for scores in found.shortlist(rows, 20):
            on(scores, 200, 20)
        assert seen.seen == []


@pytest.mark.parametrize("inner", [None, 32])
def test_a_step_of_training_on_the_card(inner: int | None, crossings: Crossings) -> None:
    found = expert(inner)
    found.parameters = {name: value.requires_grad_() for name, value in found.parameters.items()}
    optimizer = torch.optim.AdamW(found.parameters.values())
    targets = card(60, WIDTH, dtype=torch.bfloat16)
    sampled_softmax(found, found.features(card(30, WIDTH)), ids(30), targets, card(60)).backward()
    optimizer.step()
    gradient = found.parameters["linear"].grad
    assert gradient is not None
    on(gradient, WIDTH, WIDTH)
    assert crossings.seen == []


def test_tables_of_sorted_states_on_the_card() -> None:
    model = on_card("llama", 2)
    model.max_pass_tokens = 128
    prefix, contexts = behind(model, 4), Contexts(states_of_all(), (1.0, 2.0))
    with Crossings() as seen:
        first_tokens = FirstTokenTable.make(model)
        on(first_tokens.table, VOCABULARY, WIDTH)
        on(first_tokens.squares(card(5, WIDTH)), 5, VOCABULARY)
        on(first_tokens.nearest(card(5, WIDTH), 10), 10)
        assert [len(part) for part in sorted_states(model, prefix, "")] == [128, 128, 44]
        on(contexts.with_probe(card(5, WIDTH), card(5, VOCABULARY)), 5, VOCABULARY)
        assert seen.seen == []


def test_learning_from_failures_on_the_card(crossings: Crossings) -> None:
    adapter = Adapter(card(VOCABULARY, WIDTH, dtype=torch.bfloat16))
    on(adapter.log_likelihoods(ids(100), card(100, WIDTH), card(4, WIDTH)), VOCABULARY)
    assert crossings.seen == []


def test_precedence_on_the_card(crossings: Crossings) -> None:
    shapes = {"slope": (WIDTH,), "before": (WIDTH, 8), "after": (WIDTH, 8)}
    parameters = {name: card(*shape).requires_grad_() for name, shape in shapes.items()}
    found = PairwiseOrder(Expert.of(card(40, WIDTH)), parameters)
    on(found(card(20, WIDTH)), 20, 20)
    found._loss(card(3, 20, WIDTH)).backward()
    assert crossings.seen == []


# ---- defenses


STAGES = (
    "seq-perm",
    "hidden-perm",
    "hidden-perm:shared",
    "2d-perm",
    "gaussian:sigma=0.1",
    "random-prefix",
    "project:count=8",
    "project:count=8,sigma=0.1,kind=orthogonal",
    "shard:alpha=2",
    "shard:alpha=2,m=2,queries=0,keys=1",
    "drop-rows:size=2,after=3",
    "logprobs:k=3",
    "identity",
)


@pytest.mark.parametrize("spec", STAGES)
def test_stages_work_on_the_card_with_draws_of_the_cpu(spec: str) -> None:
    stage: Any = registry.build("defenses", spec)
    generator = torch.Generator().manual_seed(0)
    inputs = stage.inputs(card(12, WIDTH), card(VOCABULARY, WIDTH), generator)
    assert inputs.device == CARD
    states, _, _ = stage.states(card(12, WIDTH), generator)
    assert states.device == CARD


# ---- Cascade


PLANS = (
    Plan.clustered(12, 2, alpha=2, m=2),
    Plan.clustered(12, 1, alpha=3, symmetric=True),
    Plan.by_hand([range(5), range(5, 12)], m=3),
)


def layer_of(
    comps: Mapping[int, CompWorker], workers: Mapping[AttnNode, AttnBatch], layer: int, how: Attention
) -> dict[int, Tensor]:
    """One layer's attention: every CompNode's rows to the AttnNodes, and their answers merged."""
    sent: dict[AttnNode, dict[int, Rows]] = {}
    for i, comp in comps.items():
        n = len(comp.positions)
        rows = comp.rows(card(HEADS, n, HEAD), card(KV_HEADS, n, HEAD), card(KV_HEADS, n, HEAD))
        for node, part in rows.items():
            sent.setdefault(node, {})[i] = part
    answers: dict[int, dict[AttnNode, list[Answer]]] = {i: {} for i in comps}
    for node, came in sent.items():
        for i, parts in workers[node].run(layer, layer, came, how).items():
            answers[i][node] = parts
    return {i: comp.merge(answers[i]) for i, comp in comps.items()}


@pytest.mark.parametrize("plan", PLANS, ids=["clustered", "symmetric", "by hand"])
@pytest.mark.parametrize(
    ("how", "compress"), [(Attention(0.3), False), (Attention(0.3, window=3, softcap=2.0), True)]
)
def test_cascade_copies_indices_and_masks_in_the_first_layer_only(
    plan: Plan, how: Attention, compress: bool
) -> None:
    workers = {node: AttnWorker(node, compress=compress) for node in plan.attn_nodes}
    longer = plan.grown(plan.tokens + 3)
    first = [Pass(name, plan, keep=True) for name in "ab"]
    then = [
        Pass("a", longer, 1, plan.tokens, keep=True),
        Pass("b", plan.grown(plan.tokens + 1), 1, plan.tokens, keep=True),
    ]
    both = [Pass(w.request, w.plan.grown(w.plan.tokens + 1), 2, w.plan.tokens, keep=True) for w in then]
    for passes in (first, then, both):
        comps = {i: CompWorker(passes, i) for i in range(plan.alpha)}
        comps = {i: comp for i, comp in comps.items() if comp.positions}
        begun = {node: worker.begin(passes, "batch") for node, worker in workers.items()}
        workers_now = {node: batch for node, batch in begun.items() if batch.sizes}
        for layer in range(2):
            with Crossings() as seen:
                for i, merged in layer_of(comps, workers_now, layer, how).items():
                    on(merged, HEADS, len(comps[i].positions), HEAD)
            assert not layer or seen.seen == []


def test_blocks_and_their_merge_on_the_card(crossings: Crossings) -> None:
    visible = torch.ones(4, 6, dtype=torch.bool, device=CARD)
    queries, keys = card(HEADS, 4, HEAD), card(KV_HEADS, 6, HEAD)
    for compress in (False, True):
        parts = []
        for mask in (None, visible):
            part = attention_pass(queries, keys, keys, mask, Attention(0.2, softcap=2.0))
            parts.append(part.compressed() if compress else part)
        parts.append(attention_pass(queries, keys[:, :0], keys[:, :0], None, Attention(0.2)))
        parts[-1] = parts[-1].compressed() if compress else parts[-1]
        on(post_pass(parts), HEADS, 4, HEAD)
    assert crossings.seen == []


class AtOnce:
    """Carries the rows of the only CompNode."""

    def __init__(self) -> None:
        self.hosts: dict[AttnNode, AttnHost] = {}
        self.answers: dict[tuple[AttnNode, int], Any] = {}

    def post(self, node: AttnNode, head: Head, rows: Rows) -> None:
        host = self.hosts.setdefault(node, AttnHost(node))
        host.receive(0, head, rows, lambda answer: self.answers.update({(node, head.step): answer}))

    def collect(self, node: AttnNode, head: Head) -> list[Answer]:
        answer = self.answers.pop((node, head.step))
        if isinstance(answer, Exception):
            raise answer
        return answer  # type: ignore[no-any-return]


@pytest.mark.parametrize("architecture", DECODERS)
def test_a_compnode_on_the_card_copies_as_much_for_any_layers(architecture: str) -> None:
    comp_host.register_cascade_attention()
    counts = []
    for layers in (2, 3):
        kinds = ["sliding_attention", "full_attention"] * LAYERS
        listed = {"layer_types": kinds[:layers]} if architecture.startswith("gemma") else {}
        model = model_on_card(architecture, comp_host.ATTENTION_NAME, num_hidden_layers=layers, **listed)
        host, carrier, plan = CompHost(model, 0), AtOnce(), Plan.clustered(9, 1, alpha=1, m=3)
        with Crossings() as seen:
            batch = Batch.of(Pass("a", plan, keep=True, last=True))
            on(host.run(batch, torch.arange(9), carrier), 1, VOCABULARY)
            batch = Batch.of(Pass("a", plan.grown(10), 1, 9, keep=True, last=True))
            on(host.run(batch, torch.arange(1), carrier), 1, VOCABULARY)
        counts.append(len(seen.seen))
    assert counts[0] == counts[1]
