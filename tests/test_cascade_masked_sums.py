"""Masked sums give what the plain model gives, and an AttnNode's answer alone shows a CompNode nothing."""

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from hiddenlab.attacks.partial_sums import PartialSums
from hiddenlab.defenses.cascade import masked_sums
from hiddenlab.defenses.cascade.attn_worker import AttnWorker
from hiddenlab.defenses.cascade.backend import Cascade, Settings
from hiddenlab.defenses.cascade.command import Backend, run
from hiddenlab.defenses.cascade.cost import MASKED, Shape, layer_bytes, sent
from hiddenlab.defenses.cascade.exposure import NOT_MEASURED, NOT_PRIVATE, outputs_read
from hiddenlab.defenses.cascade.generate import generate
from hiddenlab.defenses.cascade.hardening import Hardening
from hiddenlab.defenses.cascade.load import load_cascade_model, plain_outputs
from hiddenlab.defenses.cascade.local import LocalCascade
from hiddenlab.defenses.cascade.masked_sums import (
    HIDDEN,
    STEP,
    BlockMasks,
    Masked,
    SumSecret,
    TooLargeError,
    merged,
    references,
)
from hiddenlab.defenses.cascade.node_state import NodeError, attn_name, comp_name
from hiddenlab.defenses.cascade.nodes import Partial, Rows, attention_pass, post_pass
from hiddenlab.defenses.cascade.passes import Pass
from hiddenlab.defenses.cascade.planning import plan
from hiddenlab.defenses.cascade.remote import WireCascade
from hiddenlab.defenses.cascade.wide import FRACTION, Wide, fixed, real
from hiddenlab.errors import InputError
from hiddenlab.models import load_model
from hiddenlab.models.attention import Attention
from hiddenlab.observation import load_site
from hiddenlab.sharding import AttnNode, Plan
from hiddenlab.testing import DECODERS, VOCABULARY, byte_tokenizer

TinyPath = Callable[..., str]
SUMS = "masked-sums"
EVERYTHING = "client:first=1,last=1+secret-maps+masked-sums"


def start(path: str, kind: str = "local", alpha: int = 2, spec: str = SUMS, **options: object) -> Cascade:
    return Backend(kind=kind, model=path, harden=spec, **options).start(alpha, 1, True)  # type: ignore[arg-type]


def prompt(n: int, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCABULARY, (n,), generator=torch.Generator().manual_seed(seed))


def plain(path: str, tokens: Tensor) -> Tensor:
    return plain_outputs(load_cascade_model(path, attention="eager"), tokens)


# ---- numbers of 128 bits


def whole(wide: Wide) -> list[int]:
    return [(int(h) << 64) + int(low) % 2**64 for h, low in zip(wide.high, wide.low, strict=True)]


@given(st.lists(st.tuples(*[st.integers(-(2**127), 2**127 - 1)] * 2), min_size=1, max_size=5))
def test_wide_numbers_are_integers_modulo_2_to_the_128(pairs: list[tuple[int, int]]) -> None:
    def wide(numbers: list[int]) -> Wide:
        low = [(n + 2**63) % 2**64 - 2**63 for n in numbers]
        high = [(n - n % 2**64) >> 64 for n in numbers]
        return Wide(torch.tensor(high), torch.tensor(low))

    a, b = (wide([pair[i] for pair in pairs]) for i in (0, 1))
    assert whole(a) == [pair[0] for pair in pairs]
    assert [n % 2**128 for n in whole(a + b)] == [sum(pair) % 2**128 for pair in pairs]
    assert [n % 2**128 for n in whole(-a)] == [-pair[0] % 2**128 for pair in pairs]


@given(st.lists(st.floats(-(2.0**70), 2.0**70), min_size=1), st.integers(0, 99))
def test_fixed_numbers_are_right_but_for_noise_below_float32(numbers: list[float], seed: int) -> None:
    given = torch.tensor(numbers, dtype=torch.float64)
    zero = torch.zeros(len(numbers), dtype=torch.long)
    exact = [round(abs(x) * 2**FRACTION) * (1 if x >= 0 else -1) for x in numbers]
    assert whole(fixed(given, Wide(zero, zero))) == exact
    draw = torch.Generator().manual_seed(seed)
    noise = Wide(*torch.randint(-(2**63), 2**63 - 1, (2, len(numbers)), generator=draw))
    found = real(fixed(given, noise))
    assert bool(((found - given).abs() <= given.abs() * 2.0**-24 + 2.0**-FRACTION).all())


def test_a_large_number_covers_the_last_bits_of_a_small_one() -> None:
    """Or the sum of 2^40 and 0.3 would be read as both: a large float ends in zeros."""
    large, small = torch.full((4000,), 2.0**40, dtype=torch.float64), torch.tensor([0.3], dtype=torch.float64)
    draw = torch.Generator().manual_seed(0)
    noise = Wide(*torch.randint(-(2**63), 2**63 - 1, (2, 4000), generator=draw))
    none = Wide(torch.zeros(1, dtype=torch.long), torch.zeros(1, dtype=torch.long))
    low = (fixed(large, noise) + fixed(small, none)).low
    bits = torch.stack([(low >> i & 1).double().mean() for i in range(FRACTION)])
    assert bool(((bits - 0.5).abs() < 0.05).all())


# ---- one row of blocks


def blocks(
    shards: int, secret: SumSecret, batch: str = "b", rows: int = 5
) -> tuple[list[Masked], list[Partial]]:
    """Answers of the blocks that answer query shard 0, masked and not."""
    made = Plan.by_hand([range(rows), *([rows + i] for i in range(shards - 1))])
    draw = torch.Generator().manual_seed(1)
    queries = torch.randn(4, rows, 8, generator=draw)
    own = torch.randn(2, rows, 8, generator=draw)
    how, answers, partials = Attention(0.5), list[Masked](), list[Partial]()
    bounds = references(queries, own, how, 8.0)
    work = Pass("r", made)
    for k in range(shards):
        keys, values = torch.randn(2, 2, 3, 8, generator=draw)
        part = attention_pass(queries, keys, values, None, how)
        partials.append(part)
        assert part.total is not None
        masks = BlockMasks(secret, AttnNode(0, k), batch, [(work, list(range(rows)))])
        answers.append(masks.answer(0, bounds, part.maximum, part.total, part.output))
    return answers, partials


@pytest.mark.parametrize("shards", [1, 2, 5])
def test_the_sum_is_the_attention_and_less_than_all_answers_are_noise(shards: int) -> None:
    one, other = SumSecret(), SumSecret()
    answers, partials = blocks(shards, one)
    assert torch.allclose(merged(answers), post_pass(partials), atol=1e-6)
    again = blocks(shards, other)[0]
    if shards == 1:
        return
    # All but one of the answers, in every way: the last mask covers them.
    for without in range(shards):
        few = [answer.wide() for i, answer in enumerate(answers) if i != without]
        total = few[0]
        for answer in few[1:]:
            total += answer
        for half in total:
            bits = torch.stack([(half >> i & 1).double().mean() for i in range(64)])
            assert bool(((bits - 0.5).abs() < 0.2).all())  # 180 numbers: 5 standard deviations are 0.19
    for mine, theirs in zip(answers, again, strict=True):
        assert not bool((mine.sums == theirs.sums).any())
    assert torch.allclose(merged(again), merged(answers), atol=1e-6)


def test_the_sum_of_exponentials_is_hidden_by_a_factor_that_all_blocks_share() -> None:
    """A CompNode knows its own part of it, and could subtract that."""
    drawn = []
    for i in range(40):
        one, other = (answer.wide() for answer in blocks(2, SumSecret(), str(i))[0])
        drawn.append(real(one + other)[..., 0].log())
    spread = torch.stack(drawn)
    spread = spread - spread.amin(0)
    assert 0.8 * HIDDEN < float(spread.amax()) <= HIDDEN + 1e-3
    assert float(spread.std(0).mean()) == pytest.approx(HIDDEN / 12**0.5, rel=0.1)


def test_numbers_beyond_the_range_are_refused() -> None:
    made, how = Plan.by_hand([[0], [1]]), SumSecret()
    masks = BlockMasks(how, AttnNode(0, 1), "b", [(Pass("r", made), [0])])
    row, output = torch.zeros(1, 1), torch.ones(1, 1, 2)
    assert masks.answer(0, row, row + 40.0, row + 1, output).elements == 6
    for maximum, value in ((60.0, 1.0), (40.0, 1e9), (float("nan"), 1.0), (float("inf"), 1.0)):
        with pytest.raises(TooLargeError):
            masks.answer(0, row, row + maximum, row + 1, output * value)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_a_reference_is_the_rows_score_with_itself_in_coarse_steps(softcap: float | None) -> None:
    queries, keys = torch.randn(4, 3, 8) * 4, torch.randn(2, 3, 8) * 4
    how = Attention(0.5, softcap=softcap)
    found = references(queries, keys, how, 8.0)
    scores = torch.stack([(queries[h] * keys[h // 2]).sum(-1) for h in range(4)]) * 0.5
    scores = scores if softcap is None else torch.tanh(scores / softcap) * softcap
    assert bool(((found - scores - 8.0).abs() <= STEP / 2 + 1e-4).all())
    assert torch.equal(found, (found / STEP).round() * STEP)
    assert torch.equal(found.bfloat16().float(), found)


def test_an_attnnode_is_given_keys_of_its_own_pairs_alone() -> None:
    secret, made = SumSecret(), Plan.clustered(8, 1, alpha=2, m=2, symmetric=True)
    keys = {node: secret.keys_of(node, made) for node in made.attn_nodes}
    holders = Counter(key for one in keys.values() for key in set(one.pairs.values()))
    # Four query shards, each with a key for each two of its four blocks, which two nodes know.
    assert len(holders) == 4 * 6 and set(holders.values()) == {2}
    assert max(Counter(key for one in keys.values() for key in one.owns.values()).values()) == 1
    node = AttnNode(1, 3)
    assert keys[node].pair(AttnNode(3, 1), AttnNode(3, 0)) == keys[AttnNode(0, 3)].pair(
        AttnNode(3, 0), AttnNode(3, 1)
    )
    assert {block.queries for block, _ in keys[node].pairs} == set(keys[node].factors) == {1, 3}
    for text in (repr(secret), repr(keys[node])):
        assert str(secret.key) not in text and "b'" not in text


def test_a_step_is_answered_once() -> None:
    """Two answers under one mask would show their difference."""
    made = Plan.by_hand([[0], [1]])
    begun = AttnWorker(AttnNode(1, 0), masks=SumSecret()).begin([Pass("r", made)], "b")
    rows = {
        0: Rows(torch.zeros(1, 0, 2), torch.ones(1, 1, 2), torch.ones(1, 1, 2), torch.zeros(1, 0)),
        1: Rows(torch.ones(1, 1, 2), torch.ones(1, 0, 2), torch.ones(1, 0, 2), torch.zeros(1, 1)),
    }
    for step in (0, 1):
        begun.run(step, step, rows, Attention(1.0))
    with pytest.raises(ValueError, match="was answered before"):
        begun.run(1, 1, rows, Attention(1.0))


# ---- whole models


@pytest.mark.parametrize("architecture", sorted(DECODERS))
def test_every_architecture_gives_the_plain_models_logits_and_tokens(
    tiny: TinyPath, architecture: str
) -> None:
    path, tokens = tiny(architecture), prompt(11)
    made = Plan.clustered(11, 2, alpha=2, symmetric=True)
    bare = Backend(model=path).start(2, 1, True)
    with start(path) as cascade:
        assert torch.allclose(cascade.forward(tokens, made), plain(path, tokens), atol=1e-4)
        found, expected = (list(generate(c, tokens, made, new_tokens=5)) for c in (cascade, bare))
        assert found == expected


def test_a_model_whose_tokens_see_later_ones_gives_its_states(tiny: TinyPath) -> None:
    path, tokens = tiny("bert"), prompt(9)
    with start(path, alpha=3) as cascade:
        found = cascade.forward(tokens, Plan.clustered(9, 1, alpha=3, symmetric=True))
    assert torch.allclose(found, plain(path, tokens), atol=1e-4)


@pytest.mark.slow
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    owners=st.lists(st.integers(0, 3), min_size=1, max_size=14), neighbours=st.booleans(), m=st.integers(1, 2),
    symmetric=st.booleans(), causal=st.booleans(), slack=st.sampled_from([0.0, 8.0, 16.0]),
    maps=st.booleans(),
)  # fmt: skip
def test_every_plan_gives_the_plain_models_logits(
    tiny: TinyPath, owners: list[int], neighbours: bool, m: int, symmetric: bool, causal: bool, slack: float,
    maps: bool,
) -> None:  # fmt: skip
    path, n = tiny("gemma2"), len(owners)  # with a soft cap and windows
    owners, tokens = sorted(owners) if neighbours else owners, prompt(n, seed=n)
    shards = [[t for t in range(n) if owners[t] == i] for i in range(4)]
    made = Plan.by_hand(shards, m=m, symmetric=symmetric, causal=causal)
    spec = f"masked-sums:slack={slack}" + "+secret-maps" * maps
    cascade = Backend(model=path, harden=spec).start(4, m, symmetric)
    assert torch.allclose(cascade.forward(tokens, made), plain(path, tokens), atol=1e-3 if maps else 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("spec", [SUMS, EVERYTHING])
def test_requests_at_once_over_the_wire_give_the_same(tiny: TinyPath, spec: str) -> None:
    path = tiny("qwen3")
    prompts = [prompt(n, seed=n) for n in (1, 3, 8, 12, 12)]

    def answer(cascade: Cascade, tokens: Tensor) -> list[int]:
        made = Plan.clustered(len(tokens), 2, alpha=2, symmetric=True, causal=len(tokens) % 2 == 0)
        return list(generate(cascade, tokens, made, new_tokens=5))

    with (
        Backend(model=path).start(2, 1, True) as bare,
        start(path, "wire", spec=spec) as hardened,
        ThreadPoolExecutor(5) as pool,
    ):
        expected = [answer(bare, tokens) for tokens in prompts]
        assert list(pool.map(lambda tokens: answer(hardened, tokens), prompts)) == expected


def test_padding_stays_hidden(tiny: TinyPath) -> None:
    path, tokens = tiny("llama"), prompt(9)
    mask = torch.ones(9, dtype=torch.bool)
    mask[:2] = mask[4:6] = False
    made = Plan.clustered(9, 2, alpha=2, symmetric=True)
    with start(path) as hardened:
        found = hardened.forward(tokens, made, mask=mask)
    expected = Backend(model=path).start(2, 1, True).forward(tokens, made, mask=mask)
    assert torch.allclose(found[mask], expected[mask], atol=1e-4) and bool(found.isfinite().all())


def test_no_mask_is_drawn_twice_by_a_node(tiny: TinyPath, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is drawn by the two nodes that share it; noise by one."""
    drawn: list[bytes] = []
    draw, path = masked_sums._uniform, tiny("llama")

    def noted(key: bytes, name: bytes, *rest: object) -> Wide:
        drawn.append(key + name)
        return draw(key, name, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(masked_sums, "_uniform", noted)
    secrets: list[SumSecret] = []
    monkeypatch.setattr(masked_sums, "SumSecret", lambda: secrets.append(SumSecret()) or secrets[0])
    with start(path) as cascade, ThreadPoolExecutor(3) as pool:

        def answer(n: int) -> list[int]:
            made = Plan.clustered(n, 1, alpha=2, symmetric=True)
            return list(generate(cascade, prompt(n), made, new_tokens=4))

        list(pool.map(answer, (5, 5, 6)))
    (secret,) = secrets
    owns = {secret.own(AttnNode(j, k)) for j in range(2) for k in range(2)}
    counts = Counter(drawn)
    assert {counts[name] for name in counts if name[:32] in owns} == {1}
    assert {counts[name] for name in counts if name[:32] not in owns} == {2}
    assert len(counts) > 100


@pytest.mark.parametrize("kind", ["local", "wire"])
def test_scores_beyond_the_range_are_refused_by_layer_and_way_out(tiny: TinyPath, kind: str) -> None:
    model, made = load_cascade_model(tiny("llama")), Plan.clustered(8, 1, alpha=2)
    for name, weight in model.named_parameters():
        if name.endswith("layers.1.self_attn.q_proj.weight"):
            weight.data *= 1e5
    options = {"settings": Settings(slack=0.0), "masks": SumSecret()}
    nodes = LocalCascade(model, **options) if kind == "local" else WireCascade(model, 2, **options)  # type: ignore[arg-type]
    with nodes as cascade:
        with pytest.raises(
            NodeError, match=r"cannot mask its sums of layer 2: .*raise --harden masked-sums:slack"
        ) as e:
            cascade.forward(prompt(8), made)
        assert e.value.node is None and not cascade.recover(e.value)


def test_a_node_that_masks_refuses_rows_without_references(tiny: TinyPath) -> None:
    model, made = load_cascade_model(tiny("llama")), Plan.clustered(6, 1, alpha=2)
    for settings_, masks, says in (
        (Settings(), SumSecret(), "asks for another form of answer, where this node has masked sums"),
        (Settings(slack=8.0), None, "asks for another form of answer, where this node has partial results"),
    ):
        with pytest.raises(NodeError, match=says):
            LocalCascade(model, settings_, masks=masks).forward(prompt(6), made)


@pytest.mark.slow
@pytest.mark.parametrize("c", [2, 5])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("wire", [None, torch.bfloat16])
def test_the_bytes_on_the_wire_are_those_of_the_formula(
    tiny: TinyPath, symmetric: bool, c: int, wire: torch.dtype | None
) -> None:
    made = Plan.clustered(13, c, alpha=3, m=2, symmetric=symmetric, causal=True)
    model = load_cascade_model(tiny("llama"))
    with WireCascade(
        model, 3, m=2, symmetric=symmetric, settings=Settings(True, wire, slack=8.0), masks=SumSecret()
    ) as network:
        out = network.forward(prompt(13), made)
        found = {name: one["sent_payload"] for name, one in network.counters().items()}
    shape = Shape.of(model.config, element_bytes=4 if wire is None else 2)
    assert sum(found.values()) == shape.layers * layer_bytes(made, shape, MASKED)
    by_comp, by_attn = sent(made, shape, MASKED)
    expected = {comp_name(i): shape.layers * size for i, size in by_comp.items()}
    expected |= {attn_name(node): shape.layers * size for node, size in by_attn.items()}
    assert found == dict.fromkeys(found, 0) | expected
    exact = LocalCascade(model).forward(prompt(13), made)
    assert float((out - exact).norm() / exact.norm()) < (1e-5 if wire is None else 0.1)


# ---- what nodes see, and what is said of it


def test_a_compnode_sees_the_attention_output_alone(tiny: TinyPath, tmp_path: Path) -> None:
    """At layer 1 it stands behind the node's embeddings, and the attack reads the others' tokens from it."""
    path, text = tiny("llama", tokenizer=True), "who sees this"
    run(text, Backend(model=path, harden=SUMS), alpha=2, c=2, record=f"{tmp_path}/seen")
    tokens = byte_tokenizer()(text)["input_ids"]
    for layer, embed in ((1, 64), (3, 0)):
        (one,) = load_site(f"{tmp_path}/seen/CompNode-1.safetensors", layer, "attn")
        model = load_model(path, layer, stream="attn", device="cpu")
        expected = model.encode(torch.tensor(tokens))[list(one.info.positions or ())]
        assert torch.allclose(one.states[:, embed:], expected, atol=1e-4)
        assert set(one.info.facts) == {"node", "scheme"} | ({"heads", "own"} if embed else set())
    (first,) = load_site(f"{tmp_path}/seen/CompNode-1.safetensors", 1, "attn")
    model = load_model(path, 1, stream="attn", device="cpu")
    found = PartialSums().fit(first.info, model).recover(first)
    assert found.ids == tokens[:12] and all(one.verified for one in found.tokens)


def test_the_plan_judges_compnodes_by_their_rows_and_attention_outputs(tiny: TinyPath) -> None:
    path = tiny("llama")
    bare, sums = (plan(64, alpha=4, c=16, model=path, harden=spec) for spec in (None, SUMS))
    comps = slice(0, 4)
    assert bare["verdicts"][4:] == sums["verdicts"][4:]
    assert {one["evidence"] for one in sums["verdicts"][comps]} <= {
        None,
        "missing tokens",
        "attention outputs",
    }
    read = [len(outputs_read(shard, 2, 16)) for shard in Plan.clustered(64, 16, alpha=4).shards]
    assert [one["by_partial_sums"] - one["tokens"] for one in sums["rows"]] == read
    assert [one["by_missing_tokens"] for one in sums["rows"]] == [
        one["by_missing_tokens"] for one in bare["rows"]
    ]
    for one in sums["verdicts"][comps]:
        assert one["status"] in (NOT_MEASURED, NOT_PRIVATE) or one["not_measured"] == 0
    shape = Shape.of(load_cascade_model(path).config)
    cost = sums["cost"]
    assert cost["bytes_per_layer_masked"] == layer_bytes(Plan.clustered(64, 16, alpha=4), shape, MASKED)
    assert cost["seconds"] > bare["cost"]["seconds"] and cost["bytes_paper"] == bare["cost"]["bytes_paper"]
    assert "bytes_masked" not in bare["cost"] and sums["best"]["bytes"] <= cost["bytes_masked"]


def test_a_wrong_slack_names_the_way_out() -> None:
    assert Hardening.parse(SUMS).masked_sums is not None
    with pytest.raises(InputError, match="slack must be between 0 and 16, not 17"):
        Hardening.parse("masked-sums:slack=17")
