"""Generation over Cascade nodes gives transformers' own tokens, and a new token costs one CompNode and β AttnNodes."""

import json
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM

from hiddenlab.defenses.cascade.attn_host import AttnHost
from hiddenlab.defenses.cascade.backend import Settings
from hiddenlab.defenses.cascade.comp_host import CompHost
from hiddenlab.defenses.cascade.cost import Shape
from hiddenlab.defenses.cascade.generate import generate
from hiddenlab.defenses.cascade.load import load_cascade_model
from hiddenlab.defenses.cascade.local import LocalCascade
from hiddenlab.defenses.cascade.node_state import NodeError
from hiddenlab.defenses.cascade.passes import Batch, Pass
from hiddenlab.defenses.cascade.sampling import Sampling
from hiddenlab.errors import InputError
from hiddenlab.models.reading import quiet_transformers
from hiddenlab.sharding import Plan
from hiddenlab.testing import DECODERS, VOCABULARY

TinyPath = Callable[..., str]
NONE = torch.empty(0, dtype=torch.long)  # no tokens so far


def plain_model(path: str) -> Any:
    factory = AutoModel if "bert" in path else AutoModelForCausalLM
    with quiet_transformers():
        model = factory.from_pretrained(path, attn_implementation="eager", dtype=torch.float32).eval()
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.eos_token_id = None  # stop tokens are the caller's
    return model


def greedy(path: str, tokens: Tensor, new_tokens: int) -> list[int]:
    """transformers' own answer."""
    with torch.no_grad(), quiet_transformers():
        mask = torch.ones_like(tokens)[None]
        out = plain_model(path).generate(
            tokens[None], attention_mask=mask, max_new_tokens=new_tokens, do_sample=False
        )
    return out[0, len(tokens) :].tolist()


def prompt(n: int, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCABULARY, (n,), generator=torch.Generator().manual_seed(seed))


def local(path: str, **options: Any) -> LocalCascade:
    return LocalCascade(load_cascade_model(path), Settings(**options))


# ---- the tokens


# Four that differ in attention, positions and layers; the others are slow.
@pytest.mark.parametrize("architecture", [
    pytest.param(name, marks=() if name in {"llama", "gemma2", "gpt2", "qwen3_moe"} else pytest.mark.slow)
    for name in DECODERS
])  # fmt: skip
def test_greedy_tokens_are_transformers_own(tiny: TinyPath, architecture: str) -> None:
    path, tokens, new = tiny(architecture), prompt(9, seed=3), 7
    expected = greedy(path, tokens, new)
    model = load_cascade_model(path)
    every = ((2, 2, 3, True), (1, 1, 1, False), (2, 4, 2, False), (3, 1, 1, True))
    for alpha, c, m, symmetric in every if architecture == "gemma2" else every[:1]:
        made = Plan.clustered(len(tokens), c, alpha=alpha, m=m, symmetric=symmetric)
        cascade = LocalCascade(model, Settings(compress=symmetric))
        found = list(generate(cascade, tokens, made, new_tokens=new))
        assert found == expected, (alpha, c, m, symmetric)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("length", [1, 7])
def test_shards_by_hand_generate_the_same(tiny: TinyPath, length: int, symmetric: bool) -> None:
    """Also where a CompNode holds nothing at first."""
    path, tokens = tiny("gemma2"), prompt(length, seed=length)
    made = Plan.by_hand([range(0, length, 2), range(1, length, 2), []], m=2, symmetric=symmetric)
    assert list(generate(local(path), tokens, made, new_tokens=8)) == greedy(path, tokens, 8)


def test_tokens_come_one_by_one_and_nothing_is_kept_afterwards(
    tiny: TinyPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Abandoned or finished: every AttnNode has forgotten the request."""
    cascade, tokens = local(tiny("llama")), prompt(6)
    ran: list[int] = []
    step = LocalCascade.step
    monkeypatch.setattr(
        LocalCascade, "step", lambda self, work, rest: (ran.append(work.number), step(self, work, rest))[1]
    )
    whole = list(generate(cascade, tokens, Plan.clustered(6, 1, alpha=2), new_tokens=5))
    assert ran == [0, 1, 2, 3, 4]
    begun = generate(cascade, tokens, Plan.clustered(6, 1, alpha=2), new_tokens=5)
    assert [next(begun), next(begun)] == whole[:2]
    assert ran == [0, 1, 2, 3, 4, 0, 1]
    assert [len(host.plans) for host in cascade._attns.values()] == [1] * 4
    assert any(kept(host) for host in cascade._attns.values())
    begun.close()  # type: ignore[attr-defined]
    assert [len(host.plans) for host in cascade._attns.values()] == [0] * 4
    assert not any(kept(host) for host in cascade._attns.values())


def kept(host: AttnHost) -> bool:
    """Whether keys of any request are kept."""
    return any(cache._held for cache in host._worker._caches.values())


def test_a_stop_token_ends_the_answer_and_is_its_last(tiny: TinyPath) -> None:
    cascade, tokens, made = local(tiny("qwen3")), prompt(7), Plan.clustered(7, 2, alpha=2)
    whole = list(generate(cascade, tokens, made, new_tokens=8))
    for stop in set(whole):
        until = whole[: whole.index(stop) + 1]
        assert list(generate(cascade, tokens, made, new_tokens=8, stop={stop, -5})) == until


def test_an_answer_ends_where_the_context_does(tiny: TinyPath) -> None:
    path = tiny("llama", max_position_embeddings=16)
    cascade, made = local(path), Plan.clustered(12, 1, alpha=2)
    found = list(generate(cascade, prompt(12), made, new_tokens=50))
    assert found == greedy(path, prompt(12), 4)
    with pytest.raises(InputError, match="has 16 tokens; the model's context holds 16, answer included"):
        next(generate(cascade, prompt(16), Plan.clustered(16, 1, alpha=2), new_tokens=1))


def test_wrong_requests_are_refused(tiny: TinyPath) -> None:
    cascade = local(tiny("llama"))
    made = Plan.clustered(5, 1, alpha=2)
    with pytest.raises(InputError, match="at least 1 new token must be asked for, not 0"):
        next(generate(cascade, prompt(5), made, new_tokens=0))
    with pytest.raises(InputError, match="the plan is for 5 tokens, the prompt has 4"):
        next(generate(cascade, prompt(4), made, new_tokens=1))
    with pytest.raises(InputError, match="outside of the vocabulary, 0 to 299"):
        next(generate(cascade, torch.tensor([0, 1, 2, 3, 300]), made, new_tokens=1))
    with pytest.raises(InputError, match="no language-model head"):
        next(generate(local(tiny("bert")), prompt(5), made, new_tokens=1))


# ---- what a new token costs


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(("alpha", "c", "m"), [(1, 1, 1), (3, 2, 1), (2, 1, 3)])
def test_a_new_token_is_the_work_of_one_compnode_and_beta_attnnodes(
    tiny: TinyPath, monkeypatch: pytest.MonkeyPatch, alpha: int, c: int, m: int, symmetric: bool
) -> None:
    """The nodes that hold its query row attend, those that only hold its key keep it; the others hear nothing.

    What is sent for it is Equation 1 for one token.
    """
    cascade, n, new = local(tiny("gemma2"), compress=False), 13, 7
    comps: list[tuple[int, int]] = []
    run = CompHost.run

    def counted(self: CompHost, batch: Batch, *rest: Any) -> Tensor:
        (work,) = batch.passes
        comps.append((work.number, self.index))
        return run(self, batch, *rest)

    monkeypatch.setattr(CompHost, "run", counted)
    made = Plan.clustered(n, c, alpha=alpha, m=m, symmetric=symmetric)
    assert all(made.splits)
    passes, stored = Counter[str](), Counter[str]()
    tokens = generate(cascade, prompt(n), made, new_tokens=new)
    next(tokens)
    before = attn_counters(cascade)
    assert {one["passes"] for one in before.values()} == {1}
    assert {one["stored"] for one in before.values()} == {0}
    for number, _ in enumerate(tokens, start=1):
        # The token of the previous pass stands at position t.
        t = n + number - 1
        owner = t % (alpha * c) // c
        shard = m * owner + sum(1 for p in range(t) if p % (alpha * c) // c == owner) % m
        for j in range(alpha * m):
            for k in range(j if symmetric else 0, alpha * m):
                name = f"AttnNode ({j}, {k})"
                asked = shard == j or (symmetric and shard == k)
                passes[name] += asked
                stored[name] += not asked and shard == k
        assert [index for run_of, index in comps if run_of == number] == [owner]
    after = attn_counters(cascade)
    assert {name: one["passes"] - 1 for name, one in after.items()} == dict(passes)
    assert {name: one["stored"] for name, one in after.items()} == dict(stored)
    assert sum(passes.values()) == (new - 1) * made.beta
    shape = Shape.of(cascade.model.config)
    h, kv, d = shape.heads, shape.kv_heads, shape.head_dim
    one_token = shape.layers * made.beta * (2 * d * h + 2 * d * kv + 2 * h)
    assert moved(after) - moved(before) == (new - 1) * one_token


def attn_counters(cascade: LocalCascade) -> dict[str, dict[str, Any]]:
    return {name: one for name, one in cascade.counters().items() if name.startswith("Attn")}


def moved(counters: dict[str, dict[str, Any]]) -> int:
    return sum(one["elements_in"] + one["elements_out"] for one in counters.values())


# ---- a lost node


class Failing(LocalCascade):
    """Loses a node in its ``at``-th pass, once; its replacement knows nothing of the request."""

    at = 0
    replaceable = True
    done = False

    def step(self, work: Pass, tokens: Tensor) -> Tensor:
        if not self.done and work.number == self.at:
            self.done = True
            self._attns.clear()
            raise NodeError("AttnNode (0, 0) died in layer 2", "AttnNode (0, 0)")
        return super().step(work, tokens)

    def recover(self, error: NodeError) -> bool:
        assert error.node == "AttnNode (0, 0)"
        return self.replaceable


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=2.0, seed=5)], ids=["greedy", "drawn"])
@pytest.mark.parametrize("at", [0, 1, 4])
def test_an_answer_goes_on_after_a_node_was_replaced(tiny: TinyPath, at: int, sampling: Sampling) -> None:
    """Nothing is lost and nothing comes twice, whenever it happens; draws go on where they were."""
    model, tokens, made = load_cascade_model(tiny("gemma2")), prompt(8), Plan.clustered(8, 2, alpha=2)
    expected = list(generate(LocalCascade(model), tokens, made, new_tokens=6, sampling=sampling))
    cascade = Failing(model)
    cascade.at = at
    assert list(generate(cascade, tokens, made, new_tokens=6, sampling=sampling)) == expected
    assert cascade.done
    cascade.replaceable, cascade.done = False, False
    found = []
    with pytest.raises(NodeError, match="died in layer 2"):
        for token in generate(cascade, tokens, made, new_tokens=6, sampling=sampling):
            found.append(token)
    assert found == expected[:at]


# ---- plans that grow


@st.composite
def plans(draw: st.DrawFn) -> Callable[[], Plan]:
    """(c, δ)-plans and partitions by hand, also with empty shards; made in the test, not in the strategy."""
    tokens, m, symmetric = draw(st.integers(1, 25)), draw(st.integers(1, 4)), draw(st.booleans())
    if draw(st.booleans()):
        c, delta = draw(st.integers(1, 6)), draw(st.integers(1, 20))
        return partial(Plan.clustered, tokens, c, delta=delta, m=m, symmetric=symmetric)
    owners = draw(st.lists(st.integers(0, 4), min_size=tokens, max_size=tokens))
    shards = [[t for t, owner in enumerate(owners) if owner == i] for i in range(5)]
    return partial(Plan.by_hand, shards, m=m, symmetric=symmetric)


@given(plans(), st.integers(0, 20))
def test_a_plan_grows_step_by_step_as_at_once(make: Callable[[], Plan], more: int) -> None:
    one = make()
    stepwise = one
    for _ in range(more):
        stepwise = stepwise.grown(stepwise.tokens + 1)
    assert stepwise == one.grown(one.tokens + more)
    assert stepwise.tokens == one.tokens + more


@given(st.integers(1, 25), st.integers(0, 20), st.integers(1, 6), st.integers(1, 20), st.integers(1, 4))
def test_a_grown_cluster_plan_is_that_of_the_longer_sequence(
    tokens: int, more: int, c: int, delta: int, m: int
) -> None:
    grown = Plan.clustered(tokens, c, delta=delta, m=m).grown(tokens + more)
    assert grown == Plan.clustered(tokens + more, c, delta=delta, m=m)


@given(plans(), st.integers(1, 20))
def test_growing_leaves_every_node_what_it_holds(make: Callable[[], Plan], more: int) -> None:
    """Shards and splits only get longer at their ends; each split stays a part of its CompNode's shard."""
    one = make()
    grown = one.grown(one.tokens + more)
    for before, after in ((one.shards, grown.shards), (one.splits, grown.splits)):
        assert [part[: len(old)] for old, part in zip(before, after, strict=True)] == list(before)
        assert sorted(p for part in after for p in part) == list(range(one.tokens + more))
    assert grown.m == one.m
    for i, shard in enumerate(grown.shards):
        parts = grown.splits[i * one.m : (i + 1) * one.m]  # type: ignore[operator]
        assert sorted(p for part in parts for p in part) == list(shard)
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.integers(1, 12))
def test_by_hand_a_new_token_goes_where_the_last_is_furthest_back(owners: list[int], more: int) -> None:
    n = len(owners)
    shards = [[t for t, owner in enumerate(owners) if owner == i] for i in range(4)]
    grown = Plan.by_hand(shards).grown(n + more)
    for t in range(n, n + more):
        distance = [t - max((p for p in shard if p < t), default=-1) for shard in grown.shards]
        (owner,) = (i for i, shard in enumerate(grown.shards) if t in shard)
        assert distance[owner] == max(distance)


def test_plans_that_cannot_grow_say_so() -> None:
    with pytest.raises(InputError, match="for 6 tokens cannot shrink to 5"):
        Plan.clustered(6, 1, alpha=2).grown(5)
    by_hand = Plan(4, ((0, 1), (2, 3)), ((0, 3), (1, 2)))
    assert by_hand.grown(4) == by_hand
    with pytest.raises(InputError, match="query and key shards by hand cannot grow"):
        by_hand.grown(5)


@given(plans(), st.integers(0, 5), st.booleans())
def test_a_plan_told_as_json_is_the_same_plan(make: Callable[[], Plan], more: int, dealt_anew: bool) -> None:
    one = make()
    one = one.grown(one.tokens + more)
    if dealt_anew:
        one = Plan(one.tokens, one.shards, one.splits[::-1], one.symmetric)
    assert Plan.described(json.loads(json.dumps(one.describe()))) == one


# ---- how a token is chosen


def slow_probabilities(logits: Tensor, temperature: float, top_k: int, top_p: float) -> list[float]:
    """From the likeliest down, until there are k of them or they have probability p together."""
    ranked = sorted(range(len(logits)), key=lambda i: -float(logits[i]))
    kept = ranked[:top_k] if top_k else ranked
    weights = torch.stack([logits[i].double() / temperature for i in kept]).softmax(0).tolist()
    out, together = [0.0] * len(logits), 0.0
    for i, weight in zip(kept, weights, strict=True):
        if together >= top_p:
            break
        out[i] = weight
        together += weight
    return [one / together for one in out]


@settings(max_examples=150)
@given(st.integers(1, 40), st.floats(0.1, 3), st.integers(0, 12), st.floats(0.01, 1.0), st.integers(0, 2**31))
def test_draws_follow_temperature_top_k_and_top_p(
    size: int, temperature: float, top_k: int, top_p: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    choose = Sampling(temperature, top_k, top_p, seed).chooser()
    draws = torch.Generator().manual_seed(seed)
    for _ in range(4):
        logits = 2 * torch.randn(size, generator=generator)
        expected = torch.tensor(slow_probabilities(logits, temperature, top_k, top_p), dtype=torch.float64)
        found = choose(NONE, logits)
        assert expected[found] > 0
        assert found == int(torch.multinomial(expected, 1, generator=draws))


@settings(max_examples=30)
@given(st.integers(1, 40), st.integers(0, 12), st.floats(0.01, 1.0), st.integers(0, 2**31))
def test_no_temperature_takes_the_likeliest(size: int, top_k: int, top_p: float, seed: int) -> None:
    logits = torch.randn(size, generator=torch.Generator().manual_seed(seed))
    assert Sampling(0.0, top_k, top_p, seed).chooser()(NONE, logits) == max(
        range(size), key=logits.tolist().__getitem__
    )


@pytest.mark.parametrize("temperature", [1e-30, 1e-40, 5e-324])
def test_hardly_any_temperature_takes_the_likeliest(temperature: float) -> None:
    """It divides the logits beyond what a number can hold."""
    logits = torch.tensor([-3.0, 9.0, 8.9, 0.0])
    choose = Sampling(temperature).chooser()
    assert [choose(NONE, logits + shift) for shift in (0.0, 50.0, -50.0)] == [1, 1, 1]


@pytest.mark.slow
def test_a_seed_decides_the_text(tiny: TinyPath) -> None:
    cascade, tokens, made = local(tiny("llama")), prompt(6), Plan.clustered(6, 1, alpha=2)

    def text(seed: int) -> tuple[int, ...]:
        drawn = Sampling(temperature=2.0, seed=seed)
        return tuple(generate(cascade, tokens, made, new_tokens=8, sampling=drawn))

    texts = {seed: text(seed) for seed in range(4)}
    assert len(set(texts.values())) == 4
    assert all(text(seed) == found for seed, found in texts.items())


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.5},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_p": float("nan")},
    ],
    ids=str,
)
def test_impossible_sampling_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="temperature and top_k must be at least 0, top_p above 0"):
        Sampling(**wrong)


# ---- padding


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "padding"), [
    ("bert", [9, 10, 11]), ("bert", [0, 1]), ("gemma2", [4]), ("gemma2", [0, 5, 11]), ("llama", [0, 1]),
    ("llama", [9, 10, 11]),
])  # fmt: skip
def test_padding_is_seen_by_no_token(tiny: TinyPath, architecture: str, padding: list[int]) -> None:
    """The rows of real tokens are the plain model's under the same mask, whatever stands in the padding."""
    path, tokens = tiny(architecture), prompt(12)
    mask = torch.ones(12, dtype=torch.bool)
    mask[padding] = False
    with torch.no_grad():
        output = plain_model(path)(input_ids=tokens[None], attention_mask=mask[None].long())
    expected = (output.logits if hasattr(output, "logits") else output.last_hidden_state)[0]
    other = torch.where(mask, tokens, (tokens + 1) % VOCABULARY)
    cascade = local(path)
    for made in (
        Plan.clustered(12, 2, alpha=3, m=2),
        Plan.by_hand([padding, [p for p in range(12) if p not in padding]], symmetric=True),
    ):
        for ids in (tokens, other):
            out = cascade.forward(ids, made, mask=mask)
            assert float((out - expected)[mask].abs().max()) <= 1e-4
    if architecture == "bert" or min(padding) < 9:  # else no real token could have seen it
        unmasked = cascade.forward(tokens, Plan.clustered(12, 1, alpha=1))
        assert float((unmasked - expected)[mask].abs().max()) > 1e-2
