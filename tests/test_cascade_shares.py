"""On shares a model gives its own outputs; a node by itself gets random numbers, and both together read everything."""

import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from hiddenlab.defenses.cascade.backend import Cascade
from hiddenlab.defenses.cascade.command import Backend, run
from hiddenlab.defenses.cascade.cost import Round, Shape, shared_bytes, shared_cost
from hiddenlab.defenses.cascade.exposure import NOT_PRIVATE, RANDOM
from hiddenlab.defenses.cascade.fixed_point import (
    MOST_SUM,
    ROW_BITS,
    Matrix,
    decoded,
    encoded,
    limbs_of,
    mask_of,
)
from hiddenlab.defenses.cascade.generate import Cancellation, generate
from hiddenlab.defenses.cascade.hardening import Hardening
from hiddenlab.defenses.cascade.load import load_cascade_model, plain_outputs
from hiddenlab.defenses.cascade.node_state import GIVEN_UP, NodeError
from hiddenlab.defenses.cascade.passes import Pass
from hiddenlab.defenses.cascade.planning import plan
from hiddenlab.defenses.cascade.share_nodes import LocalPeer, ShareNode, load_matrices
from hiddenlab.defenses.cascade.share_rounds import find_rounds
from hiddenlab.defenses.cascade.shared_linear import SharedLinear, load_client, local_shares
from hiddenlab.errors import HiddenlabError, InputError
from hiddenlab.sharding import Plan
from hiddenlab.testing import ARCHITECTURES, DECODERS, LAYERS, VOCABULARY

TinyPath = Callable[..., str]


def start(path: str, kind: str = "local", **options: object) -> Cascade:
    return Backend(kind=kind, model=path, harden="shares", **options).start(2, 1, False)  # type: ignore[arg-type]


def prompt(n: int, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCABULARY, (n,), generator=torch.Generator().manual_seed(seed))


def whole(n: int) -> Plan:
    return Plan.clustered(n, n, alpha=1)


def plain(path: str, tokens: Tensor) -> Tensor:
    return plain_outputs(load_cascade_model(path, attention="eager"), tokens)


# ---- arithmetic


def whole_numbers(*shape: int, bits: int = 64, seed: int = 0) -> Tensor:
    high = 1 << (bits - 2)
    drawn = torch.randint(-high, high, (2, *shape), generator=torch.Generator().manual_seed(seed))
    return drawn[0] * 2 + (drawn[1] & 1)


@settings(max_examples=30)
@given(n=st.integers(1, 4), i=st.integers(1, 40), o=st.integers(1, 5), seed=st.integers(0, 99))
def test_products_are_exact_modulo_2_to_the_64(n: int, i: int, o: int, seed: int) -> None:
    """Against Python's integers, at the largest weights and at shares of all 64 bits."""
    generator = torch.Generator().manual_seed(seed)
    matrix = Matrix.of(torch.randn(o, i, generator=generator))
    sums = matrix.weights.abs().sum(0)
    assert bool(((sums <= MOST_SUM) & (sums > MOST_SUM / 4)).all())  # nothing overflows, no bit is given away
    share = whole_numbers(n, i, seed=seed)
    share[0, 0] = [-(1 << 63), (1 << 63) - 1, -1, 0][seed % 4]
    found = matrix.times(share)
    for row in range(n):
        for out in range(o):
            pairs = zip(share[row].tolist(), matrix.weights[:, out].tolist(), strict=True)
            exact = sum(number * int(weight) for number, weight in pairs)
            assert (int(found[row, out]) - exact) % (1 << 64) == 0


def test_sums_at_the_border_of_float64_stay_exact() -> None:
    """All magnitudes in one weight, and every limb as large as it gets."""
    matrix = Matrix(torch.full((1, 1), MOST_SUM, dtype=torch.float64), torch.zeros(1, dtype=torch.long))
    share = torch.tensor([[-(1 << 21)], [(1 << 21) - 1], [-(1 << 63)], [(1 << 63) - 1]])
    assert matrix.times(share).tolist() == [[int(one) << 32 & -1] for one in _wrapped(share, 32)]
    low, middle, high = limbs_of(share)
    assert torch.equal(low + (middle << 22) + (high << 43), share)
    assert int(low.abs().max()) <= 1 << 21 and int(middle.abs().max()) <= 1 << 20 >= int(high.abs().max())


def _wrapped(share: Tensor, bits: int) -> list[int]:
    """Numbers that, shifted by so many bits, are the wrapped products."""
    half = 1 << (63 - bits)
    return [(int(one) + half) % (2 * half) - half for one in share[:, 0]]


@settings(max_examples=30)
@given(i=st.integers(1, 60), outlier=st.sampled_from([1.0, 1e3, 1e6]), seed=st.integers(0, 99))
def test_fixed_point_stays_within_its_bound(i: int, outlier: float, seed: int) -> None:
    """Also where one column is far larger than the others, as in real models."""
    generator = torch.Generator().manual_seed(seed)
    rows, weight = torch.randn(3, i, generator=generator), torch.randn(7, i, generator=generator)
    rows[:, 0] *= outlier
    matrix = Matrix.of(weight)
    whole, step = encoded(rows)
    assert int(whole.abs().max()) <= 1 << ROW_BITS
    mask = whole_numbers(3, i, seed=seed)
    parts = matrix.times(mask) + matrix.times(whole - mask)
    found, exact = decoded(parts, step, matrix.powers), rows.double() @ weight.double().T
    half = 0.5 / step, 0.5 * torch.exp2(-matrix.powers.double())
    bound = (
        half[0] * weight.double().abs().sum(1)
        + (rows.double().abs().sum(1, keepdim=True) + i * half[0]) * half[1]
    )
    assert bool(((found - exact).abs() <= bound * (1 + 1e-9)).all())
    # Both are far below what float32 itself rounds in such sums.
    assert float((bound / (rows.abs().sum(1, keepdim=True) * weight.abs().amax(1))).max()) < i * 2.0**-29


def test_weights_of_16_bits_are_exact_and_zero_rows_are_zero() -> None:
    drawn = torch.randn(5, 30).bfloat16()
    weight = torch.where(drawn.abs() < 0.01, 1.0, drawn)
    matrix = Matrix.of(weight)
    assert torch.equal((matrix.weights * torch.exp2(-matrix.powers.double())).T, weight.double())
    rows, step = encoded(torch.zeros(2, 30))
    nothing = Matrix.of(torch.zeros(3, 30))
    assert not bool(decoded(nothing.times(rows), step, nothing.powers).any())
    with pytest.raises(InputError, match="not finite"):
        Matrix.of(torch.tensor([[float("nan")]]))


# ---- exactness


@pytest.mark.parametrize("architecture", sorted({*ARCHITECTURES} - {"qwen3_moe"}))
def test_every_architecture_gives_the_plain_models_outputs(tiny: TinyPath, architecture: str) -> None:
    path, tokens = tiny(architecture), prompt(11)
    with start(path) as cascade:
        expected = plain(path, tokens)
        assert torch.allclose(
            cascade.forward(tokens, whole(11)), expected, atol=1e-5 * float(expected.abs().max())
        )
        if architecture not in DECODERS:
            return
        answer = list(generate(cascade, tokens, whole(11), new_tokens=9))  # beyond a window of gemma2
    own = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=torch.float32)
    own.generation_config.eos_token_id = None
    assert answer == own.generate(tokens[None], max_new_tokens=9, do_sample=False)[0, 11:].tolist()


def test_the_wire_and_requests_at_once_give_the_same_and_padding_is_unseen(tiny: TinyPath) -> None:
    path = tiny("llama")
    prompts = [prompt(n, seed=n) for n in (4, 9, 13)]

    def answer(cascade: Cascade, tokens: Tensor) -> list[int]:
        return list(generate(cascade, tokens, whole(len(tokens)), new_tokens=4))

    mask = torch.ones(9, dtype=torch.bool)
    mask[4:6] = False
    with start(path) as local, start(path, "wire") as wire, ThreadPoolExecutor(3) as pool:
        alone = [answer(local, tokens) for tokens in prompts]
        assert list(pool.map(lambda tokens: answer(wire, tokens), prompts)) == alone
        assert wire.healthy() == local.healthy() == {"ShareNode 0": "ok", "ShareNode 1": "ok"}
        expected = (
            Backend(model=path)
            .start(2, 1, False)
            .forward(prompt(9), Plan.clustered(9, 2, alpha=2), mask=mask)
        )
        for cascade in (local, wire):
            assert torch.allclose(
                cascade.forward(prompt(9), whole(9), mask=mask)[mask], expected[mask], atol=1e-4
            )


def test_a_node_loads_the_weights_that_the_client_has(tiny: TinyPath) -> None:
    path = tiny("qwen3")
    rounds, matrices = load_matrices(path, torch.float32)
    client, same = load_client(path, torch.float32)
    assert tuple(rounds) == same == find_rounds(path)
    peers = [LocalPeer(ShareNode(i, rounds, matrices)) for i in range(2)]
    with SharedLinear(client, path, same, peers) as cascade:
        assert torch.allclose(cascade.forward(prompt(5), whole(5)), plain(path, prompt(5)), atol=1e-4)


def test_bfloat16_gives_what_the_plain_model_gives(tiny: TinyPath) -> None:
    path, tokens = tiny("llama"), prompt(9)
    expected = plain_outputs(
        load_cascade_model(path, dtype=torch.bfloat16, attention="eager"), tokens
    ).float()
    with start(path, dtype="bfloat16") as cascade:
        found = cascade.forward(tokens, whole(9)).float()
    assert float((found - expected).norm() / expected.norm()) < 0.05


# ---- what nodes see


class Watched(LocalPeer):
    """A node that keeps what it is given."""

    def __init__(self, node: ShareNode) -> None:
        super().__init__(node)
        self.got: list[Tensor] = []

    def ask(self, number: int, rows: int, given: Tensor) -> "Future[Tensor]":
        self.got.append(given)
        return super().ask(number, rows, given)


def watched(path: str, **options: Any) -> SharedLinear:
    model, rounds = load_client(path, torch.float32)
    return local_shares(model, path, rounds, Watched, **options)


def seeds() -> Callable[[int], bytes]:
    """Seeds that a test knows; each is used once."""
    numbers = count()
    return lambda size: next(numbers).to_bytes(size, "little")


def test_the_first_node_gets_the_same_whatever_the_prompt(tiny: TinyPath) -> None:
    path, views = tiny("llama"), []
    for seed in (0, 1):
        with watched(path, draw=seeds()) as cascade:
            cascade.forward(prompt(12, seed), whole(12))
            views.append([peer.got for peer in cascade.peers])  # type: ignore[attr-defined]
    (first, second), (other_first, other_second) = views
    assert all(torch.equal(a, b) for a, b in zip(first, other_first, strict=True))
    assert len(first) == 4 * LAYERS and len({bytes(seed.tolist()) for seed in first}) == len(
        first
    )  # none twice
    assert not any(torch.equal(a, b) for a, b in zip(second, other_second, strict=True))


def test_the_second_node_gets_uniform_bytes(tiny: TinyPath) -> None:
    """And the test would notice if it did not: bytes of the rows themselves fail it at once."""

    def chance(numbers: Tensor) -> float:
        bytes_of = numbers.contiguous().flatten().view(torch.uint8)
        return float(stats.chisquare(torch.bincount(bytes_of, minlength=256).numpy()).pvalue)

    with watched(tiny("llama"), draw=seeds()) as cascade:
        cascade.forward(prompt(64), whole(64))
        first, second = (peer.got for peer in cascade.peers)  # type: ignore[attr-defined]
    assert all(chance(share) > 1e-5 for share in second)
    every = torch.cat([share.flatten() for share in second])
    assert chance(every) > 1e-3
    assert stats.kstest((every.double() / 2.0**64 + 0.5).numpy(), "uniform").pvalue > 1e-3
    rows = [share + mask_of(seed, *share.shape) for seed, share in zip(first, second, strict=True)]
    assert all(chance(row) < 1e-9 for row in rows)


def test_both_nodes_together_read_every_token(tiny: TinyPath) -> None:
    """The attack that is told the secret: two views add to the first layer's inputs, whose rows name their tokens."""
    path, tokens = tiny("llama"), prompt(20)
    with watched(path) as cascade:
        cascade.forward(tokens, whole(20))
        (seed, *_), (share, *_) = (peer.got for peer in cascade.peers)  # type: ignore[attr-defined]

    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        table = model.model.layers[0].input_layernorm(model.get_input_embeddings().weight)

    def nearest(rows: Tensor) -> list[int]:
        return (nn.functional.normalize(rows.float()) @ nn.functional.normalize(table).T).argmax(1).tolist()

    assert nearest(share + mask_of(seed, *share.shape)) == tokens.tolist()
    by_itself = nearest(share)
    assert sum(a == b for a, b in zip(by_itself, tokens.tolist(), strict=True)) < 4
    whole_rows, step = encoded(table[tokens])
    assert float(((share + mask_of(seed, *share.shape) - whole_rows) / step).abs().max()) < 1e-4


def test_seeds_are_new_for_each_round(tiny: TinyPath) -> None:
    with watched(tiny("llama")) as cascade:
        for _ in range(2):
            cascade.forward(prompt(3), whole(3))
        first: list[Tensor] = cascade.peers[0].got  # type: ignore[attr-defined]
    assert len({bytes(seed.tolist()) for seed in first}) == len(first) == 8 * LAYERS


# ---- cost and verdicts


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "phi3"])
def test_the_formula_counts_what_nodes_count(tiny: TinyPath, architecture: str) -> None:
    path = tiny(architecture)
    planned = plan(13, model=path, harden="shares")
    up, down = shared_bytes(find_rounds(path), 13)
    with start(path, "wire") as cascade:
        cascade.forward(prompt(13), whole(13))
        counts = cascade.counters()
    nodes = [counts[f"ShareNode {i}"] for i in range(2)]
    assert sum(node["bytes_in"] for node in nodes) == up == planned["cost"]["bytes_up"]
    assert sum(node["bytes_out"] for node in nodes) == down == planned["cost"]["bytes_down"]
    assert sum(node["sent_payload"] for node in nodes) == up + down
    assert [node["rounds"] for node in nodes] == [planned["cost"]["rounds"]] * 2 == [4 * LAYERS] * 2
    assert nodes[0]["bytes_in"] == 32 * 4 * LAYERS  # seeds alone
    assert counts["client"]["compute"] > 0 and counts["client"]["wait"] > 0


def test_the_cost_of_a_small_example_by_hand() -> None:
    rounds = (Round(("0.q", "0.k"), 4, (4, 2)), Round(("0.o",), 4, (4,)))
    link = Backend(kind="wire", bandwidth=1e6, latency=0.01).link()
    assert link is not None
    cost = shared_cost(rounds, 3, Shape(1, 2, 1, 2), 4 * 10, link)
    assert (cost["bytes_up"], cost["bytes_down"]) == (2 * (32 + 8 * 3 * 4), 2 * 8 * 3 * (6 + 4))
    assert cost["node_operations"] == 2 * 3 * 4 * 10 and cost["client_operations"] == 4 * 9 * 4 + 2 * 3 * 40
    assert math.isclose(cost["seconds"], 2 * 2 * 0.01 + (256 + 480) / 1e6)


def test_the_plan_says_what_each_and_both_read(tiny: TinyPath) -> None:
    result = plan(24, model=tiny("llama"), harden="shares")
    assert [one["status"] for one in result["verdicts"]] == [RANDOM, RANDOM, NOT_PRIVATE]
    assert [one["own"] for one in result["verdicts"]] == [0, 0, 24]
    assert (
        len(result["summary"]) == 2
        and "ShareNode 0 and ShareNode 1 each get random numbers" in result["summary"][0]
    )
    assert result["cost"]["rounds_per_layer"] == 4 and result["evidence"] == []


def test_a_run_beside_the_plain_model(tiny: TinyPath) -> None:
    result = run(
        "on shares", Backend(model=tiny("llama", tokenizer=True), harden="shares"), compare=True, repeats=1
    )
    assert result["max_difference"] < 1e-4 and result["share_nodes"] == 2 and "comp_nodes" not in result
    assert set(result["nodes"]) == {"client", "ShareNode 0", "ShareNode 1"}


# ---- misuse and faults


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"alpha": 2}, "leave --alpha"),
        ({"c": 2}, "has two nodes and no plan"),
        ({"symmetric": True}, "has two nodes and no plan"),
        ({"shards": "0,1;2"}, "has two nodes and no plan"),
        ({"element_bytes": 4}, "--bytes out"),
        ({"client": "0"}, "leave --client"),
    ],
)
def test_options_of_plans_are_refused(tiny: TinyPath, options: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        plan(3, model=tiny("llama"), harden="shares", **options)


@pytest.mark.parametrize("spec", ["shares+secret-maps", "client:first=1,last=1+shares"])
def test_shares_stand_alone(spec: str) -> None:
    with pytest.raises(InputError, match="stands alone"):
        Hardening.parse(spec)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"wire": "bfloat16"}, "leave --wire out"),
        ({"record": True}, "leave it out"),
        ({"bandwidth": 1e9}, "--backend wire"),
        ({"kind": "ray", "bandwidth": 1e9}, "--backend wire"),
        ({"kind": "threads"}, "unknown backend"),
        ({"address": "auto"}, "--backend ray"),
    ],
)
def test_options_that_mean_nothing_on_shares_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(HiddenlabError, match=says):
        start("no such model", **options)


def test_experts_are_refused_since_rows_would_tell_of_tokens(tiny: TinyPath) -> None:
    with pytest.raises(
        InputError, match=r"experts\.gate_up_proj is no linear layer; leave --harden shares out"
    ):
        start(tiny("qwen3_moe"))


class Skips(nn.Module):
    """A layer that asks one of its maps about some rows only, as experts that are linear layers do."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.inner, self.expert = layer, nn.Linear(64, 64, device="meta")

    def forward(self, hidden_states: Tensor, *args: Any, **options: Any) -> Tensor:
        self.expert(hidden_states[:, :2])
        return self.inner(hidden_states, *args, **options)  # type: ignore[no-any-return]


def test_maps_that_get_some_rows_or_none_are_refused(tiny: TinyPath, monkeypatch: pytest.MonkeyPatch) -> None:
    from hiddenlab.defenses.cascade import share_rounds

    path, empty = tiny("llama"), share_rounds.empty_model

    def changed(change: Callable[[Any], None]) -> None:
        def made(*args: Any) -> Any:
            model = empty(*args)
            change(model.model.layers)
            return model

        monkeypatch.setattr(share_rounds, "empty_model", made)

    changed(lambda layers: layers.__setitem__(1, Skips(layers[1])))
    with pytest.raises(InputError, match="other rows than those of the prompt"):
        find_rounds(path)
    changed(lambda layers: layers[0].add_module("unused", nn.Linear(4, 4, device="meta")))
    with pytest.raises(InputError, match="does not use each linear layer once"):
        find_rounds(path)


def test_a_model_that_is_computed_wrongly_is_refused(tiny: TinyPath, monkeypatch: pytest.MonkeyPatch) -> None:
    from hiddenlab.defenses.cascade import shared_linear

    monkeypatch.setattr(shared_linear, "decoded", lambda *args: 1.01 * decoded(*args))
    monkeypatch.setattr(shared_linear, "remembered", lambda kind, key, form, compute, code: compute())
    with pytest.raises(InputError, match="a small random copy gives something else so"):
        load_client(tiny("llama"), torch.float32)


class Failing(LocalPeer):
    """A node that fails, or never answers, from some round on."""

    def __init__(self, node: ShareNode, answer: Callable[[], "Future[Tensor]"], first: int = 5) -> None:
        super().__init__(node)
        self._answer, self._first = answer, first

    def ask(self, number: int, rows: int, given: Tensor) -> "Future[Tensor]":
        return super().ask(number, rows, given) if number < self._first else self._answer()


def failed() -> "Future[Tensor]":
    answer: Future[Tensor] = Future()
    answer.set_exception(MemoryError("full"))
    return answer


@pytest.mark.parametrize(
    ("answer", "says"),
    [(failed, r"failed in layer 2: .*full"), (Future, r"stalled in layer 2 \(no answer for 0.1 s\)")],
)
def test_a_node_that_fails_is_named(
    tiny: TinyPath, answer: Callable[[], "Future[Tensor]"], says: str
) -> None:
    model, rounds = load_client(tiny("llama"), torch.float32)
    with local_shares(model, "m", rounds, lambda node: Failing(node, answer), timeout=0.1) as cascade:
        with pytest.raises(NodeError, match=says) as caught:
            cascade.forward(prompt(3), whole(3))
        assert caught.value.node == "ShareNode 0" and not cascade.recover(caught.value)


def test_a_node_refuses_shares_of_another_shape(tiny: TinyPath) -> None:
    node = ShareNode(1, *load_matrices(tiny("llama"), torch.float32))
    with pytest.raises(NodeError, match="has no round 99"):
        node.products(99, 1, torch.zeros(1, 64, dtype=torch.long))
    for given_ in (
        torch.zeros(2, 64, dtype=torch.long),
        torch.zeros(31, dtype=torch.uint8),
        torch.zeros(1, 64),
    ):
        with pytest.raises(NodeError, match="another shape"):
            node.products(0, 1, given_)


def test_a_lost_connection_ends_the_pass(tiny: TinyPath) -> None:
    with start(tiny("llama"), "wire") as cascade:
        cascade.peers[1]._there.close()  # type: ignore[attr-defined]
        with pytest.raises(NodeError, match="ShareNode 1"):
            cascade.forward(prompt(3), whole(3))


@pytest.fixture
def held(tiny: TinyPath) -> Iterator[tuple[SharedLinear, threading.Event, threading.Event]]:
    """A Cascade whose second node waits in its sixth round: the round has begun, and may go on."""
    begun, go = threading.Event(), threading.Event()

    class Held(LocalPeer):
        def ask(self, number: int, rows: int, given: Tensor) -> "Future[Tensor]":
            if number == 5:
                begun.set()
                go.wait(30)
            return super().ask(number, rows, given)

    model, rounds = load_client(tiny("llama"), torch.float32)
    with local_shares(model, "m", rounds, Held) as cascade:
        yield cascade, begun, go


def test_a_client_that_leaves_ends_its_pass(
    held: tuple[SharedLinear, threading.Event, threading.Event],
) -> None:
    cascade, begun, go = held
    leave = Cancellation()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(
            lambda: list(generate(cascade, prompt(4), whole(4), new_tokens=3, cancellation=leave))
        )
        assert begun.wait(30)
        leave.cancel()
        go.set()
        assert answer.result() == [] and not cascade._requests
    late = Pass("closed", whole(5), number=1, since=4, keep=True, last=True)
    with pytest.raises(NodeError, match=GIVEN_UP):
        cascade.step(late, prompt(1))
