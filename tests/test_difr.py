"""Sampling replayed, providers caught and believed, transcripts read strictly."""

import contextlib
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hiddenlab.defenses.verification import difr
from hiddenlab.defenses.verification.causal_lm import load_whole
from hiddenlab.defenses.verification.difr import Verifier
from hiddenlab.defenses.verification.provider import CoarseCache, Provider, Request, Variant, coarse
from hiddenlab.defenses.verification.sampling import (
    HashedNoise,
    Sampling,
    StreamNoise,
    invert,
    kept,
    perturbed,
    probabilities,
    sample,
)
from hiddenlab.defenses.verification.transcript import (
    Fingerprint,
    Transcript,
    read_transcripts,
    write_transcripts,
)
from hiddenlab.errors import InputError
from hiddenlab.testing import DECODERS, VOCABULARY, save_tiny

NEW = 12


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny("llama", tmp_path_factory.mktemp("llama"), tokenizer=True)


def requests_of(count: int, sampling: Sampling, length: int = 6) -> list[Request]:
    generator = torch.Generator().manual_seed(0)
    return [
        Request(
            str(i),
            tuple(torch.randint(0, VOCABULARY, (length + i % 3,), generator=generator).tolist()),
            replace(sampling, seed=sampling.seed + 100 * i),
        )
        for i in range(count)
    ]


def transcripts(
    model: str, variant: str, sampling: Sampling, count: int = 4, **options: Any
) -> list[Transcript]:
    provider = Provider(
        model, Variant.parse(variant), new_tokens=NEW, dtype="float32", device="cpu", **options
    )
    return [answer.transcript for answer in provider.answer(requests_of(count, sampling))]


def scores_of(model: str, found: Sequence[Transcript], noise: Any = StreamNoise) -> dict[str, torch.Tensor]:
    verifier = Verifier(load_whole(model, device="cpu"), noise)
    parts = [difr.token_scores(verifier.replay(one)) for one in found]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


# Sampling


def test_stream_noise_is_what_vllm_draws() -> None:
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(3))
    noise, generator = StreamNoise(7), torch.Generator().manual_seed(7)
    for _ in range(5):
        exponential = torch.empty(50).exponential_(generator=generator)
        assert sample(logits, noise, Sampling(), []) == int((logits[0].softmax(0) / exponential).argmax())


@settings(max_examples=60)
@given(st.integers(0, 60), st.floats(0.05, 1.0), st.floats(0.2, 3.0), st.integers(0, 1000))
def test_filters_keep_the_likeliest_and_enough_of_them(
    top_k: int, top_p: float, temperature: float, seed: int
) -> None:
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(seed)) * 3
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    for row, keep in zip(logits, kept(logits, sampling), strict=True):
        order = row.argsort(descending=True)
        shares = (row / temperature)[order[: top_k or 40]].softmax(0)
        count = 1
        while count < len(shares) and float(shares[:count].sum()) < top_p - 1e-6:
            count += 1
        if abs(float(shares[:count].sum()) - top_p) > 1e-5 or count == len(shares):
            assert set(keep.nonzero()[:, 0].tolist()) == set(order[:count].tolist())


def test_both_samplers_draw_from_the_stated_distribution() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, -8.0]])
    for method in ("gumbel", "ipt"):
        sampling = Sampling(method=method, temperature=0.7, top_k=4)
        noise = StreamNoise(1)
        drawn = torch.tensor([sample(logits, noise, sampling, []) for _ in range(4000)])
        shares = torch.bincount(drawn, minlength=5) / len(drawn)
        assert torch.allclose(shares, probabilities(logits, sampling)[0], atol=0.03)
        assert shares[4] == 0


def test_inverse_transform_never_leaves_what_is_kept() -> None:
    shares = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]])
    assert [int(invert(shares, torch.tensor([u]))) for u in (0.0, 0.2499, 0.25, 0.9999999, 1.0)] == [
        1,
        1,
        3,
        3,
        3,
    ]


def test_hashed_noise_depends_on_key_seed_and_every_token() -> None:
    def first(key: bytes, seed: int, before: list[int]) -> float:
        return HashedNoise(key, seed).uniform(before)

    key, other = b"k" * 16, b"l" * 16
    values = [
        first(key, 1, [1, 2]),
        first(other, 1, [1, 2]),
        first(key, 2, [1, 2]),
        first(key, 1, [2, 1]),
        first(key, 1, [1]),
    ]
    assert len(set(values)) == 5
    assert first(key, 1, [1, 2]) == values[0]
    with pytest.raises(InputError, match="16"):
        HashedNoise(b"short", 1)
    # The other form depends on the place alone, and is no prefix of the first.
    by_place = HashedNoise(key, 1, adaptive=False)
    assert by_place.uniform([1, 2]) == by_place.uniform([2, 1]) != by_place.uniform([1])
    assert by_place.uniform([2]) not in values


def test_hashed_noise_is_distributed_as_it_says() -> None:
    from scipy.stats import gumbel_r, kstest

    noise = HashedNoise(b"k" * 16, 5)
    drawn = noise.gumbel(50_000, [3])
    assert bool(drawn.isfinite().all()) and kstest(drawn.numpy(), gumbel_r.cdf).pvalue > 0.01
    uniform = [noise.uniform([i]) for i in range(5000)]
    assert kstest(uniform, "uniform").pvalue > 0.01 and 0 <= min(uniform) < max(uniform) < 1


@pytest.mark.parametrize(
    "wrong", [{"method": "beam"}, {"temperature": -1.0}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.5}]
)
def test_impossible_sampling_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        Sampling(**wrong)


# Scores


def test_likelihood_has_the_papers_values() -> None:
    margins = torch.tensor([0.91, 0.0, float("inf")])
    for sigma, value in ((0.02, 521.95), (0.08, 35.37)):
        found = difr.likelihood(margins, sigma)
        assert float(found[0]) == pytest.approx(value, abs=0.01)
        assert float(found[1]) == 0 and torch.isinf(found[2])
    plain = difr.likelihood(margins[:1], 0.02 * 2**0.5, "one")
    assert float(plain) == pytest.approx(521.95, abs=0.01)
    with pytest.raises(InputError):
        difr.likelihood(margins, 0.0)


def test_ipt_likelihood_is_the_mass_on_the_claimed_interval() -> None:
    logits = torch.tensor([[0.5, 0.1, 0.4]]).log().repeat(2, 1)
    replay = difr.Replay(
        logits,
        None,
        torch.tensor([0.49, 0.4]).double(),
        torch.tensor([1, 1]),
        Sampling(method="ipt"),
        torch.zeros(3, 2),
    )
    found = difr.ipt_likelihood(replay, 0.01)
    assert found.tolist() == pytest.approx([1.841022, 27.631021], abs=1e-3)


def test_margin_is_the_papers_formula_and_infinite_where_filtered() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, gumbel = torch.randn(4, 20, generator=generator), torch.randn(4, 20, generator=generator)
    sampling = Sampling(temperature=0.5, top_k=5)
    tokens = logits.topk(6, dim=1).indices[:, torch.tensor([0, 1, 4, 5])].diagonal()
    replay = difr.Replay(logits, gumbel, None, tokens, sampling, torch.zeros(5, 2))
    z = logits + 0.5 * gumbel
    for i, token in enumerate(tokens.tolist()):
        allowed = logits[i].topk(5).indices
        expected = float(z[i, allowed].max() - z[i, token]) if token in allowed.tolist() else float("inf")
        assert float(difr.margin(replay)[i]) == pytest.approx(expected)
    assert torch.equal(perturbed(logits, gumbel, sampling).argmax(1), difr.verifier_tokens(replay))


def test_cross_entropy_after_the_filters_is_that_of_the_tokens_kept() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, sampling = (
        torch.randn(40, 12, generator=generator) * 2,
        Sampling(temperature=0.7, top_k=6, top_p=0.8),
    )
    tokens = torch.randint(12, (40,), generator=generator)
    replay = difr.Replay(logits, torch.zeros(40, 12), None, tokens, sampling, torch.zeros(41, 2))
    found, whole = difr.filtered_cross_entropy(replay), difr.cross_entropy(replay)
    for i, token in enumerate(tokens.tolist()):
        # One position at a time: the six likeliest, then as many of them as reach a share of 0.8.
        shares = {j: float((logits[i, j] / 0.7).exp()) for j in logits[i].topk(6).indices.tolist()}
        total, left = sum(shares.values()), dict[int, float]()
        for j, share in shares.items():
            if sum(left.values()) < 0.8 * total:
                left[j] = share
        expected = -math.log(left[token] / sum(left.values())) if token in left else math.inf
        assert float(found[i]) == pytest.approx(expected, rel=1e-4)
    assert torch.isinf(found).any() and bool((found < whole)[found.isfinite()].all())
    greedy = difr.Replay(logits, None, None, tokens, Sampling(method="greedy"), torch.zeros(41, 2))
    assert torch.equal(difr.filtered_cross_entropy(greedy), difr.cross_entropy(greedy))


def test_monte_carlo_agrees_with_the_likelihood_for_two_tokens() -> None:
    logits = torch.tensor([[1.0, 0.7, -50.0]] * 2)
    replay = difr.Replay(
        logits, torch.zeros(2, 3), None, torch.tensor([1, 0]), Sampling(temperature=1.0), torch.zeros(3, 2)
    )
    sigma = 0.3
    found = difr.monte_carlo(replay, sigma, torch.Generator().manual_seed(0), trials=4000)
    miss = float(torch.special.ndtr(torch.tensor(-0.3 / (sigma * 2**0.5))))
    assert torch.allclose((-found).exp(), torch.tensor([miss, 1 - miss]), atol=0.03)


# Providers


@pytest.mark.parametrize("architecture", DECODERS)
def test_an_honest_provider_agrees_in_every_token(architecture: str, tmp_path: Path) -> None:
    model = save_tiny(architecture, tmp_path)
    found = transcripts(model, "honest", Sampling(top_k=50, top_p=0.95, seed=5), count=3)
    scores = scores_of(model, found)
    # Left padding and decoding by steps against one prefill: rounding may flip a rare near tie, no more.
    assert float(scores["mismatch"].mean()) <= 0.06
    assert float(scores["margin"].clamp(max=10).max()) < 1e-2


@pytest.mark.parametrize("method", ["gumbel", "ipt", "greedy"])
def test_methods_replay(tiny: str, method: Any) -> None:
    found = transcripts(tiny, "honest", Sampling(method=method, top_p=0.9, seed=5))
    assert float(scores_of(tiny, found)["mismatch"].mean()) == 0


@pytest.mark.parametrize("method", ["gumbel", "ipt", "greedy"])
@pytest.mark.parametrize("variant", ["honest", "temperature=3"])
def test_one_prefill_finds_what_one_step_a_token_finds(tiny: str, method: Any, variant: str) -> None:
    """Algorithm 6 beside Algorithm 5, on the same tokens."""
    verifier = Verifier(load_whole(tiny, device="cpu"))
    found = transcripts(tiny, variant, Sampling(method=method, top_p=0.9, seed=5))
    slow = [verifier.stepwise(one) for one in found]
    for one, steps in zip(found, slow, strict=True):
        assert torch.equal(difr.mismatch(verifier.replay(one)), steps)
    assert (torch.cat(slow).mean() > 0.1) == (variant != "honest" and method != "greedy")


@pytest.mark.parametrize("variant", ["batch=1", "attention=eager", "cache=0", "threads=1", "honest+batch=3"])
def test_honest_variants_agree(tiny: str, variant: str) -> None:
    asked = Sampling(top_k=50, seed=5)
    assert transcripts(tiny, variant, asked) == transcripts(tiny, "honest", asked)


@pytest.mark.parametrize(
    "variant",
    ["seed=1", "temperature=3", "bug=32+rate=0.5", "layers=3", "kv=int4", "system=You are kind", "top_p=0.2"],
)
def test_deviations_diverge(tiny: str, variant: str) -> None:
    asked = Sampling(top_p=0.95, seed=5)
    scores = scores_of(tiny, transcripts(tiny, variant, asked))
    assert float(scores["mismatch"].mean()) > 0.1
    assert float(scores["margin"].clamp(max=10).mean()) > 0.05


def test_hashed_noise_replays_and_needs_its_key(tiny: str) -> None:
    asked = Sampling(seed=5)

    def keyed(key: bytes) -> Any:
        return lambda seed: HashedNoise(key, seed)

    found = transcripts(tiny, "honest", asked, noise=keyed(b"a" * 16))
    assert float(scores_of(tiny, found, keyed(b"a" * 16))["mismatch"].mean()) == 0
    assert float(scores_of(tiny, found, keyed(b"b" * 16))["mismatch"].mean()) > 0.5


def test_states_are_the_verifiers(tiny: str) -> None:
    provider = Provider(tiny, Variant.parse("honest"), new_tokens=NEW, dtype="float32", device="cpu")
    verifier = Verifier(load_whole(tiny, device="cpu"))
    for answer in provider.answer(requests_of(3, Sampling(seed=1))):
        replay = verifier.replay(answer.transcript)
        prompt = len(answer.transcript.prompt)
        assert torch.allclose(answer.prompt_states, replay.states[:prompt], atol=1e-4)
        assert torch.allclose(answer.output_states, replay.output_states, atol=1e-4)


@pytest.mark.parametrize("kind", ["fp8", "int8", "int4"])
def test_a_coarse_cache_rounds_and_keeps_the_rest(kind: str) -> None:
    values = torch.randn(1, 2, 5, 16, generator=torch.Generator().manual_seed(0))
    keys, _ = CoarseCache(kind).update(values, values, 0)
    assert torch.equal(keys, coarse(values, kind))
    error = float((keys - values).abs().max() / values.abs().max())
    assert 0 < error < {"fp8": 0.07, "int8": 0.01, "int4": 0.08}[kind]


def test_weights_in_eight_bits_are_the_nearest_of_a_table(tiny: str) -> None:
    """Each weight is the nearest of the finite float8 numbers, times its tensor's scale; inputs have one a token."""
    table = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    table = table[table.isfinite()]

    def nearest(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return table[((values / scale)[..., None] - table).abs().argmin(-1)] * scale

    plain, rounded = (
        Variant().load(tiny, "float32", "cpu"),
        Variant.parse("weights=fp8").load(tiny, "float32", "cpu"),
    )
    after = dict(rounded.model.named_parameters())
    changed = set()
    for name, weight in plain.model.named_parameters():
        if not torch.equal(weight, after[name]):
            changed.add(name.split(".")[-2])
            assert torch.allclose(after[name], nearest(weight, weight.abs().max() / 448), atol=1e-7), name
    assert changed == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    layer = rounded.model.get_submodule("model.layers.0.mlp.up_proj")
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)) * torch.tensor([[1.0], [50.0], [0.01]])
    expected = nearest(x, x.abs().amax(-1, keepdim=True) / 448) @ after["model.layers.0.mlp.up_proj.weight"].T
    assert torch.allclose(layer(x), expected, rtol=1e-4, atol=1e-5)


def test_uniform_ranks_are_uniform_for_any_seed(tiny: str) -> None:
    from scipy.stats import kstest

    verifier = Verifier(load_whole(tiny, device="cpu"))
    generator = torch.Generator().manual_seed(0)
    honest = transcripts(tiny, "seed=17", Sampling(seed=5), count=20)
    hot = transcripts(tiny, "temperature=2", Sampling(seed=5), count=20)

    def uniform(found: Sequence[Transcript]) -> float:
        ranks = [difr.uniform_ranks(verifier.replay(one), generator) for one in found]
        return float(kstest(torch.cat(ranks).numpy(), "uniform").pvalue)

    honest_p, hot_p = uniform(honest), uniform(hot)
    assert honest_p > 0.001 > hot_p


def test_ranks_of_equal_logits_fill_the_interval() -> None:
    logits = torch.zeros(4000, 4)
    tokens = torch.arange(4).repeat(1000)
    replay = difr.Replay(logits, None, None, tokens, Sampling(), torch.zeros(4001, 2))
    ranks = difr.uniform_ranks(replay, torch.Generator().manual_seed(0))
    for token in range(4):
        own = ranks[tokens == token]
        assert token / 4 <= float(own.min()) and float(own.max()) <= (token + 1) / 4


@pytest.mark.parametrize(
    "text",
    [
        "fast",
        "kv=fp2",
        "temperature=hot",
        "seed=",
        "nf4+nf4",
        "batch=x",
        "=1",
        "",
        "weights=fp4",
        "weights=fp8+nf4",
    ],
)
def test_unknown_variants_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="provider"):
        Variant.parse(text)


# Transcripts


def test_transcripts_come_back(tiny: str, tmp_path: Path) -> None:
    found = transcripts(tiny, "honest", Sampling(top_p=0.9, seed=5))
    prints = Fingerprint.of(torch.randn(3, 4), every=4, seed=1, kind="orthogonal", dtype="bfloat16")
    found[0] = replace(
        found[0], proofs=("AAAA",), proof_rule="rows", fingerprint=prints, modes=("accept",) * NEW
    )
    path = tmp_path / "log" / "transcripts.jsonl"
    assert write_transcripts(path, found) == len(found)
    assert read_transcripts(path) == found
    assert prints.values().shape == (3, 4) and prints.size == 24


GOOD: dict[str, Any] = {
    "format": 1, "id": "a", "model": "m", "prompt": [1, 2], "output": [3], "sampling": {"seed": 1},
}  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2}, {"id": 3}, {"prompt": []}, {"output": "abc"}, {"prompt": [1.5]}, {"prompt": [True]},
        {"sampling": {}}, {"sampling": None}, {"sampling": {"seed": "1"}}, {"sampling": {"seed": 1, "beam": 2}},
        {"sampling": {"seed": 1, "top_p": 7}}, {"proofs": [1], "proof_rule": "rows"}, {"modes": ["maybe"]},
        {"modes": ["accept"] * 2}, {"unknown": 1}, {"fingerprint": {"count": 1}}, {"proofs": []},
        {"proof_rule": "rows"}, {"proofs": [], "proof_rule": "mine"},
    ],
)  # fmt: skip
def test_wrong_transcripts_are_refused_with_their_line(change: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(GOOD) + "\n" + json.dumps(GOOD | {"id": "b"} | change) + "\n")
    with pytest.raises(InputError, match="line 2"):
        read_transcripts(path)


@settings(max_examples=100)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(sorted(GOOD)), inner),
    )
)
def test_any_json_is_a_transcript_or_refused(value: Any) -> None:
    for candidate in (value, GOOD | value if isinstance(value, dict) else value):
        with contextlib.suppress(InputError):
            assert isinstance(Transcript.from_json(candidate), Transcript)


@pytest.mark.parametrize("text", ["", "{", '["a"]', "\n\n"])
def test_files_without_transcripts_are_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(text)
    with pytest.raises(InputError):
        read_transcripts(path)
    with pytest.raises(InputError):
        read_transcripts(tmp_path / "nothing.jsonl")


def test_tokens_of_another_vocabulary_are_refused(tiny: str) -> None:
    verifier = Verifier(load_whole(tiny, device="cpu"))
    for prompt in ((VOCABULARY, 1), (-1, 2)):
        with pytest.raises(InputError, match="vocabulary"):
            verifier.replay(Transcript("a", tiny, prompt, (1,), Sampling()))
    with pytest.raises(InputError, match="takes"):
        verifier.replay(Transcript("a", tiny, (1,) * 600, (1,), Sampling()))


@pytest.mark.parametrize(
    "change",
    [
        {"data": "%"},
        {"data": ""},
        {"data": "AAA="},
        {"count": 0},
        {"dtype": "int8"},
        {"data": "AADAfw=="},
        {"every": 0},
        {"seed": 2**70},
        {"count": 10**13},
        {"kind": "sparse"},
    ],
)
def test_wrong_fingerprints_are_refused(change: dict[str, Any]) -> None:
    good = Fingerprint(1, 1, 0, "orthogonal", "float32", "AACAPw==")
    assert good.values().tolist() == [[1.0]]
    with pytest.raises(InputError, match=r"fingerprint|projection"):
        replace(good, **change).values()
