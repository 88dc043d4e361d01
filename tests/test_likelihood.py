"""Fixed-seed likelihoods: check values, and Algorithm 4 spelt out with loops."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm
from torch import Tensor

from hiddenlab.defenses.verification import likelihood
from hiddenlab.defenses.verification.bounds import Risk, extractable
from hiddenlab.defenses.verification.closed_form import fssl_ipt, ipt_interval, logit_rank, margins, pairwise
from hiddenlab.defenses.verification.likelihood import GumbelPositions, admissible, fssl_gm, gumbel_positions
from hiddenlab.defenses.verification.risk import Evidence, Point, classify, extractable_bits, frontier, pareto
from hiddenlab.defenses.verification.sampling import (
    Sampling,
    StreamNoise,
    invert,
    kept,
    perturbed,
    probabilities,
)
from hiddenlab.errors import InputError


def example(n: int, v: int, seed: int = 0, scale: float = 2.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    noise = StreamNoise(seed)
    gumbel = torch.stack([noise.gumbel(v, []) for _ in range(n)])
    return torch.randn(n, v, generator=generator) * scale, gumbel


def gen(seed: int = 5) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# ---- Algorithm 4


def slow(p: GumbelPositions, row: int, token: int, sampling: Sampling, active: int) -> float:
    """Algorithm 4 for one token, line by line, with the two readings that `gumbel_positions` states."""
    logits, scores, sd = p.logits[row].tolist(), p.scores[row].tolist(), p.noise_sd
    keep = kept(p.logits[row : row + 1], sampling)[0].tolist()
    out = [x for x, k in zip(logits, keep, strict=True) if not k and x > -math.inf]
    tau = (max(out) + min(x for x, k in zip(logits, keep, strict=True) if k)) / 2 if out else -math.inf
    able = [i for i in range(len(logits)) if logits[i] > tau - 9 * sd]
    rivals = sorted(able, key=lambda i: -scores[i])[:active]
    total = 0.0
    for x in p.draws[row].tolist():
        if logits[token] + x > tau:
            product = 1.0
            for i in rivals:
                if i != token:
                    product *= norm.cdf(max(x + scores[token] - scores[i], tau - logits[i]) / sd)
            total += product
    return math.log(total / p.draws.shape[1]) if total > 0 else -math.inf


@pytest.mark.parametrize(
    "sampling",
    [Sampling(), Sampling(top_k=3), Sampling(top_p=0.8, temperature=0.7), Sampling(temperature=0.0)],
)
@pytest.mark.parametrize("noise_sd", [0.05, 0.7])
def test_algorithm_4_is_the_slow_one(sampling: Sampling, noise_sd: float) -> None:
    logits, gumbel = example(2, 12)
    logits[1, 4] = -math.inf
    p = gumbel_positions(logits, gumbel, sampling, noise_sd=noise_sd, generator=gen(), samples=9, active=4)
    for row in range(2):
        fast = p.pairs(torch.full((12,), row), torch.arange(12))
        for token in range(12):
            wanted = slow(p, row, token, sampling, 4)
            # The loop multiplies probabilities, which underflow where logarithms do not.
            assert float(fast[token]) == pytest.approx(wanted, abs=1e-9) or (
                wanted < -700 > float(fast[token])
            )
    assert p.pairs(torch.tensor([1]), torch.tensor([4])).item() == -math.inf


def simulate(logits: Tensor, gumbel: Tensor, sampling: Sampling, noise_sd: float, rounds: int) -> Tensor:
    """How often each token wins when every logit has its noise: what the score estimates (top-k filters only)."""
    noisy = logits + torch.randn(rounds, logits.shape[1], generator=gen(8)) * noise_sd
    won = perturbed(noisy, gumbel.expand_as(noisy), sampling).argmax(1)
    return torch.bincount(won, minlength=logits.shape[1]) / rounds


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.5), Sampling(temperature=0.0)])
def test_the_score_is_the_chance_to_win(sampling: Sampling) -> None:
    logits, gumbel = example(1, 10, seed=2)
    p = gumbel_positions(logits, gumbel, sampling, noise_sd=0.6, generator=gen(), samples=20_000)
    scores = p.pairs(torch.zeros(10).long(), torch.arange(10)).exp()
    assert torch.allclose(scores.float(), simulate(logits, gumbel, sampling, 0.6, 40_000), atol=0.012)
    assert float(scores.sum()) == pytest.approx(1, abs=0.02)


def test_the_boundary_is_the_filters() -> None:
    """Two tokens far above the rest with top-2: a token at the boundary passes about half of the time."""
    logits = torch.tensor([[9.0, 5.0, 5.0, 0.0]])
    gumbel = torch.tensor([[0.0, 0.0, 30.0, 0.0]])
    sampling = Sampling(top_k=2)
    logits[0, 2] -= 1e-4  # filtered, by a hair, and the winner if it were not
    p = gumbel_positions(logits, gumbel, sampling, noise_sd=0.1, generator=gen(), samples=20_000)
    assert p.boundary.item() == pytest.approx(5 - 5e-5)
    scores = p.pairs(torch.zeros(4).long(), torch.arange(4)).exp().tolist()
    # Noise on the boundary itself is not drawn: the claimed token passes the fixed one half of the time.
    assert scores[2] == pytest.approx(0.5, abs=0.02) and scores[0] == pytest.approx(0.5, abs=0.02)
    assert scores[1] < 1e-9 and scores[3] == 0
    # Far from the boundary, neither side crosses it.
    logits[0, 2] = 4.0
    p = gumbel_positions(logits, gumbel, sampling, noise_sd=0.01, generator=gen())
    assert torch.allclose(p.score(torch.tensor([0])).exp(), torch.ones(1).double())
    assert p.score(torch.tensor([2])).item() == -math.inf
    # A filtered token with a high score has no place in the active set, which the real winner needs.
    far = torch.tensor([[9.0, 8.9, 1.0, 1.0]])
    loud = torch.tensor([[1.0, 0.0, 30.0, 30.0]])
    narrow = fssl_gm(far, loud, torch.tensor([1]), sampling, noise_sd=0.1, generator=gen(), active=1)
    assert float(narrow.exp()) < 1e-6


def test_certain_and_impossible_tokens() -> None:
    logits, gumbel = example(3, 50, seed=3)
    winner = perturbed(logits, gumbel, Sampling()).argmax(1)
    sure = fssl_gm(logits, gumbel, winner, Sampling(), noise_sd=1e-6, generator=gen())
    assert torch.allclose(sure, torch.zeros(3).double(), atol=1e-9)  # with itself as rival it would be log ½
    other = (winner + 1) % 50
    assert (fssl_gm(logits, gumbel, other, Sampling(), noise_sd=1e-3, generator=gen()) < -1000).all()
    filtered = fssl_gm(
        logits, gumbel, logits.argmin(1), Sampling(top_k=5), noise_sd=1e-3, generator=gen(), samples=16
    )
    assert (filtered == -math.inf).all()


@settings(max_examples=80)
@given(
    seed=st.integers(0, 10_000), v=st.integers(1, 60), top_k=st.sampled_from([0, 0, 1, 2, 7]),
    top_p=st.sampled_from([1.0, 0.5, 0.95]), temperature=st.sampled_from([0.0, 0.6, 1.0, 2.0]),
    noise_sd=st.sampled_from([0.01, 0.3, 1.5]), threshold=st.floats(-60.0, -1e-6), active=st.integers(1, 9),
    samples=st.integers(1, 24), holes=st.booleans(), coarse=st.booleans(), anchors=st.sampled_from([2, 3, 32]),
)  # fmt: skip
def test_the_admissible_set_is_the_oracles(
    seed: int, v: int, top_k: int, top_p: float, temperature: float, noise_sd: float, threshold: float, active: int,
    samples: int, holes: bool, coarse: bool, anchors: int,
) -> None:  # fmt: skip
    logits, gumbel = example(3, v, seed)
    if coarse:
        logits = logits.round()  # ties of logits
    if holes and v > 2:
        logits[:, :: max(2, v // 3)] = -math.inf
    sampling = Sampling(top_k=top_k, top_p=top_p, temperature=temperature)
    options: dict[str, Any] = {"noise_sd": noise_sd, "samples": samples, "active": active}
    p = gumbel_positions(logits, gumbel, sampling, generator=gen(seed), **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(likelihood, "_ANCHORS", anchors)
        fast = p.admissible(threshold)
    grid = torch.cartesian_prod(torch.arange(3), torch.arange(v))
    every = p.pairs(grid[:, 0].contiguous(), grid[:, 1].contiguous()).reshape(3, v)
    unclear = (every - threshold).abs() < 1e-8
    assert ((fast == (every >= threshold)) | unclear).all()
    assert torch.equal(fast, admissible(logits, gumbel, sampling, threshold, generator=gen(seed), **options))


def test_a_whole_vocabulary() -> None:
    logits, gumbel = example(3, 50_000, seed=4, scale=3.0)
    sampling = Sampling(top_k=50, top_p=0.95)
    for noise_sd, threshold in ((0.02, -10.0), (1.0, -9.0)):
        p = gumbel_positions(logits, gumbel, sampling, noise_sd=noise_sd, generator=gen())
        found = p.admissible(threshold)
        assert found.gather(1, perturbed(logits, gumbel, sampling).argmax(1)[:, None]).all()
        rows, tokens = found.nonzero(as_tuple=True)
        assert (p.pairs(rows, tokens) >= threshold).all()
        # The likeliest that are left out, by score and by logit.
        for key in (p.scores, p.logits):
            left = key.masked_fill(found, -math.inf).topk(20, dim=1).indices
            assert (p.pairs(torch.arange(3).repeat_interleave(20), left.flatten()) < threshold).all()
        assert not p.admissible(threshold / 4)[~found].any()


def test_what_the_scores_refuse() -> None:
    logits, gumbel = example(2, 5)
    tokens = torch.tensor([0, 1])
    good: dict[str, Any] = {"noise_sd": 0.1, "generator": gen()}
    for call, message in (
        (lambda: fssl_gm(logits, gumbel, tokens, Sampling(method="ipt"), **good), "fssl_ipt"),
        (lambda: fssl_gm(logits, gumbel[:, :4], tokens, Sampling(), **good), "shape|gumbel"),
        (lambda: fssl_gm(logits, gumbel, tokens + 4, Sampling(), **good), "vocabulary of 5"),
        (lambda: fssl_gm(logits, gumbel, tokens[:1], Sampling(), **good), "1 tokens for 2|tokens"),
        (lambda: fssl_gm(logits * math.nan, gumbel, tokens, Sampling(), **good), "no numbers"),
        (lambda: fssl_gm(logits, gumbel, tokens, Sampling(), noise_sd=0.0, generator=gen()), "above 0"),
        (lambda: admissible(logits, gumbel, Sampling(), 0.0, **good), "below 0"),
        (lambda: admissible(logits, gumbel, Sampling(), math.nan, **good), "below 0"),
        (lambda: logit_rank(logits, tokens - 1), "vocabulary of 5"),
        (lambda: pairwise(logits, 0.0), "above 0"),
        (lambda: pairwise(logits, 1.0, noise_on="none"), "one of both, one|noise_on"),
        (lambda: fssl_ipt(logits, torch.zeros(2), noise_sd=0.1), "sum to 1"),
        (lambda: fssl_ipt(logits.softmax(1), torch.zeros(1), noise_sd=0.1), "1 uniform|uniform"),
        (lambda: fssl_ipt(logits.softmax(1), torch.zeros(2), noise_sd=0.1, floor=0.0), "between 0 and 1"),
    ):
        with pytest.raises(Exception, match=message) as caught:
            call()
        # The shape check of the tests may come first.
        assert isinstance(caught.value, InputError) or "jaxtyping" in str(type(caught.value)), message


# ---- closed forms


@pytest.mark.parametrize(("sd", "wanted"), [(0.02, 521.95), (0.08, 35.37)])
def test_the_shortcuts_check_values(sd: float, wanted: float) -> None:
    margin = torch.tensor([0.91, 0.0, math.inf], dtype=torch.float64)
    both = pairwise(margin, sd)
    assert -float(both[0]) == pytest.approx(wanted, abs=0.006)
    assert float(both[1]) == pytest.approx(math.log(0.5)) and float(both[2]) == -math.inf
    one = pairwise(margin, sd, noise_on="one")
    assert float(one[0]) == pytest.approx(float(norm.logcdf(-0.91 / sd)), rel=1e-9)


def test_the_shortcut_is_algorithm_4_for_two_tokens() -> None:
    logits, gumbel = example(4, 2, seed=6)
    loser = perturbed(logits, gumbel, Sampling()).argmin(1)
    margin = margins(logits, gumbel, Sampling())
    assert (margin.amin(1) == 0).all()
    own = margin.gather(1, loser[:, None])[:, 0]
    score = fssl_gm(logits, gumbel, loser, Sampling(), noise_sd=2.0, generator=gen(), samples=100_000)
    assert torch.allclose(score.exp(), pairwise(own, 2.0).exp(), atol=0.01)
    assert (margins(logits, gumbel, Sampling(top_k=1)).amax(1) == math.inf).all()


def test_ipt_check_values() -> None:
    interval = [torch.tensor([x], dtype=torch.float64) for x in (0.5, 0.6)]
    for u, wanted in ((0.49, -1.841022), (0.4, -27.631021)):
        score = ipt_interval(*interval, torch.tensor([u], dtype=torch.float64), noise_sd=0.01, floor=1e-12)
        assert float(score) == pytest.approx(wanted, abs=1e-6)


@settings(max_examples=40)
@given(seed=st.integers(0, 999), v=st.integers(1, 30), u=st.floats(0.0, 0.999), sd=st.floats(0.001, 0.5))
def test_ipt_is_algorithm_3(seed: int, v: int, u: float, sd: float) -> None:
    p = example(1, v, seed)[0].softmax(1)
    fast = fssl_ipt(p, torch.tensor([u], dtype=torch.float64), noise_sd=sd)[0].tolist()
    lower = 0.0
    for token, own in enumerate(p[0].double().tolist()):
        mass = norm.cdf(lower + own, u, sd) - norm.cdf(lower, u, sd)
        assert math.exp(fast[token]) == pytest.approx(mass + 1e-12, abs=1e-12)
        lower += own


def test_ipt_of_honest_tokens() -> None:
    logits, _ = example(50, 40, seed=7)
    p = probabilities(logits, Sampling(method="ipt", top_k=8))
    u = torch.rand(50, generator=gen(), dtype=torch.float64)
    scores = fssl_ipt(p, u, noise_sd=1e-5)
    assert torch.equal(scores.argmax(1), invert(p, u))
    assert (scores[p == 0] == math.log(1e-12)).all()


def test_ranks() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, -math.inf]] * 4)
    assert logit_rank(logits, torch.arange(4)).tolist() == [3, 1, 2, 4]


# ---- three classes


def test_algorithm_7() -> None:
    scores = torch.tensor([-1.0, -5.0, -5.0, -math.inf, -1.0])
    ranks = torch.tensor([1, 8, 9, 2, 500])
    assert classify(scores, ranks, -2.0, 8).tolist() == [0, 1, 2, 1, 0]
    assert classify(scores, ranks, -2.0, 0).tolist() == [0, 2, 2, 2, 0]
    with pytest.raises(InputError, match="no number"):
        classify(scores * math.nan, ranks, -2.0, 8)


def test_the_information_of_classes() -> None:
    risks, sizes = torch.tensor([0, 0, 1, 2]), torch.tensor([1, 2, 0, 3])
    bits = extractable_bits(risks, sizes, 8, 151_936)
    assert float(bits.sum()) == pytest.approx(21.2131, abs=5e-5)
    for i in range(4):
        one = extractable(Risk(int(risks[i])), int(sizes[i]), 8, 151_936)
        assert float(bits[i]) == pytest.approx(one)
    with pytest.raises(InputError, match="its own admissible set"):
        extractable_bits(risks, sizes * 0, 8, 10)
    with pytest.raises(InputError, match="0, 1, 2"):
        extractable_bits(risks + 1, sizes, 8, 10)


def honest(count: int, v: int = 80, noise_sd: float = 0.1) -> list[Evidence]:
    """Tokens of a server whose logits have a little noise."""
    out = []
    for seed in range(count):
        logits, gumbel = example(20, v, seed)
        theirs = logits + torch.randn(logits.shape, generator=gen(seed)) * noise_sd
        sampling = Sampling(top_k=20)
        out.append(Evidence(logits, gumbel, perturbed(theirs, gumbel, sampling).argmax(1), sampling))
    return out


def test_pareto_by_hand() -> None:
    evidence = honest(3)
    points = pareto(iter(evidence), [0.1], [-8.0, -1.0], [0, 4], samples=32, active=8, seed=3)
    assert [(p.threshold, p.rank_cutoff) for p in points] == [(-8.0, 0), (-8.0, 4), (-1.0, 0), (-1.0, 4)]
    generator = gen(3)
    for point in points:
        generator.manual_seed(3)
        dangerous, bits, quiet = 0, 0.0, 0.0
        for one in evidence:
            p = gumbel_positions(
                one.logits, one.gumbel, one.sampling, noise_sd=0.1, generator=generator, samples=32, active=8
            )
            inside, score = p.admissible(point.threshold), p.score(one.tokens)
            for row, token in enumerate(one.tokens.tolist()):
                leading = set(one.logits[row].topk(point.rank_cutoff).indices.tolist())
                admitted = set(inside[row].nonzero()[:, 0].tolist())
                quiet += math.log2(max(1, len(leading | admitted)))
                if score[row] >= point.threshold:
                    bits += math.log2(len(admitted))
                elif token in leading:
                    bits += math.log2(point.rank_cutoff)
                else:
                    dangerous, bits = dangerous + 1, bits + math.log2(80)
        assert point.tokens == 60 and point.false_positive_rate == pytest.approx(dangerous / 60)
        assert point.bits == pytest.approx(bits / 60) and point.quiet_bits == pytest.approx(quiet / 60)
        assert point.share == pytest.approx(point.bits / math.log2(80))
        assert point.safe_bits <= point.quiet_bits + 1e-12


def test_a_larger_cutoff_flags_less() -> None:
    points = pareto(honest(4), [0.05, 0.3], [-20.0, -4.0], [0, 8], samples=32)
    for low, high in zip(points[::2], points[1::2], strict=True):
        assert high.false_positive_rate <= low.false_positive_rate
        assert low.suspicious == 0 and high.bits <= low.bits + 1e-12
    best = frontier(points)
    rates, bits = [p.false_positive_rate for p in best], [p.bits for p in best]
    assert best and rates == sorted(set(rates)) and bits == sorted(set(bits), reverse=True)
    for p in points:
        assert any(q.false_positive_rate <= p.false_positive_rate and q.bits <= p.bits for q in best)
    assert all(p.suspicious <= 0.005 for p in frontier(points, most_suspicious=0.005))
    with pytest.raises(InputError, match="no honest tokens"):
        pareto([], [0.1], [-1.0], [8])
    with pytest.raises(InputError, match="grid"):
        pareto(honest(1), [], [-1.0], [8])
    with pytest.raises(InputError, match="vocabularies"):
        pareto([*honest(1), *honest(1, v=30)], [0.1], [-1.0], [8])
    assert isinstance(points[0], Point)
