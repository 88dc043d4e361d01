"""TOPLOC: the published bytes, exact polynomials, honest proofs accepted, all others rejected without a crash."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hiddenlab.defenses.verification.formats import FORMATS
from hiddenlab.defenses.verification.polynomials import (
    LEAST_MODULUS,
    PRIME,
    evaluate,
    injective_modulus,
    interpolate,
)
from hiddenlab.defenses.verification.rules import PAPER
from hiddenlab.defenses.verification.toploc import (
    BFLOAT16,
    PUBLISHED,
    Proof,
    ProofError,
    Thresholds,
    commit,
    commit_all,
    lacking,
    proof_bytes,
    values_at,
    verify,
    verify_all,
)
from hiddenlab.errors import InputError

WIDTH = 576
TIGHT = Thresholds(exponents=8, mean=2.0, median=1.0)


def whole(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def bits_of(values: Tensor) -> np.ndarray:
    return values.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)


def states(rows: int, seed: int, *, outliers: bool = False, width: int = WIDTH) -> Tensor:
    """Random activations; with outliers a few columns are larger than the rest, as in language models."""
    generator = torch.Generator().manual_seed(seed)
    out = torch.randn(rows, width, generator=generator)
    if outliers:
        out[:, torch.randperm(width, generator=generator)[: width // 50]] *= 6
    return out


def recomputed(x: Tensor, seed: int, size: float = 0.004) -> Tensor:
    """The same activations in bfloat16 after another order of operations: small relative differences."""
    generator = torch.Generator().manual_seed(1000 + seed)
    return (x * (1 + size * torch.randn(x.shape, generator=generator))).bfloat16()


# ---- the published format


def test_published_values() -> None:
    proof = Proof(65497, (1, 2, 3, 4))
    assert proof.to_bytes().hex() == "ffd90001000200030004"
    assert proof.bits_at(whole(42)).tolist() == [39741]
    assert interpolate(whole(1, 2, 3), whole(4, 5, 6)).tolist() == [3, 1, 0]
    assert interpolate(whole(1, 3, 5, 2), whole(1, 5, 4, 1)).tolist() == [49133, 40920, 49130, 57309]
    folded = Proof.through(whole(5, 65502, 100, 7), bits_of(torch.tensor([3, 7, 1.5, 2])))
    assert folded.modulus == 65496 and folded.to_bytes().hex() == "ffd8d8cce11c41b198a9"
    assert values_at(folded, torch.tensor([[5, 65502], [100, 7]])).tolist() == [[3, 7], [1.5, 2]]
    assert len(commit(states(1, 0)).to_bytes()) == proof_bytes() == 258
    assert proof_bytes(1) == 4


def test_published_thresholds() -> None:
    assert PUBLISHED["bfloat16"] is BFLOAT16 and Thresholds() == BFLOAT16
    assert (BFLOAT16.exponents, BFLOAT16.mean, BFLOAT16.median) == (38, 10, 8)
    single = PUBLISHED["float32"]
    assert (single.exponents, single.mean, single.median) == (8, 256, 128)
    assert single.dtype == "float32" and BFLOAT16.dtype == "bfloat16"
    with pytest.raises(InputError, match="proofs of float16 values; known are bfloat16, float32"):
        replace(BFLOAT16, dtype="float16")


@pytest.mark.parametrize(
    "limits",
    [
        {"exponents": 128},
        {"exponents": -1},
        {"mean": math.nan},
        {"median": math.inf},
        {"mean": -1.0},
        {"of": 38},
    ],
)
def test_thresholds_that_decide_nothing_are_refused(limits: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        replace(BFLOAT16, **limits)


# ---- polynomials


def lagrange(x: list[int], y: list[int], prime: int = PRIME) -> list[int]:
    """The slow oracle: each point's own polynomial, one after the other."""
    total = [0] * len(x)
    for i, (here, value) in enumerate(zip(x, y, strict=True)):
        product, scale = [1], value
        for j, other in enumerate(x):
            if j != i:
                product = [
                    (low - other * high) % prime
                    for low, high in zip([0, *product], [*product, 0], strict=True)
                ]
                scale = scale * pow(here - other, -1, prime) % prime
        total = [(t + scale * p) % prime for t, p in zip(total, product, strict=True)]
    return total


residue = st.integers(0, PRIME - 1)
finite_bits = st.integers(0, 0xFFFF).filter(lambda bits: bits & 0x7FFF < 0x7F80)
points = st.integers(1, 24).flatmap(
    lambda k: st.tuples(
        st.lists(residue, min_size=k, max_size=k, unique=True), st.lists(finite_bits, min_size=k, max_size=k)
    )
)


@pytest.mark.parametrize("dtype", FORMATS)
@settings(max_examples=60)
@given(points=points, high=st.integers(0, 0xFFFF))
def test_interpolation_is_lagranges(points: tuple[list[int], list[int]], high: int, dtype: str) -> None:
    x, y = points
    prime = FORMATS[dtype].prime
    y = y if prime == PRIME else [value << 16 | high for value in y]
    coefficients = interpolate(whole(*x), whole(*y), prime).tolist()
    assert coefficients == lagrange(x, y, prime)
    assert evaluate(coefficients, whole(*x), prime).tolist() == y
    places = [*x, 0, 1, prime - 1, 31337]
    slow = [
        sum(c * pow(place, power, prime) for power, c in enumerate(coefficients)) % prime for place in places
    ]
    assert evaluate(coefficients, whole(*places), prime).tolist() == slow


def test_no_polynomial() -> None:
    for x in (whole(), whole(3, 3), whole(1, PRIME + 1)):
        with pytest.raises(InputError, match="at a place of its own"):
            interpolate(x, np.zeros_like(x))
    with pytest.raises(InputError, match="no modulus"):
        Proof.through(whole(9, 9), bits_of(torch.ones(2)))
    with pytest.raises(InputError, match="start at 0"):
        Proof.through(whole(-1, 9), bits_of(torch.ones(2)))
    with pytest.raises(InputError, match="start at 0"):
        values_at(Proof(PRIME, (1,)), torch.tensor([-1]))


@settings(max_examples=60)
@given(indices=st.lists(st.integers(0, 2**31), min_size=1, max_size=60, unique=True))
def test_the_modulus_is_the_largest(indices: list[int]) -> None:
    modulus = injective_modulus(whole(*indices))
    assert LEAST_MODULUS <= modulus <= PRIME
    for larger in range(modulus, PRIME + 1):
        assert (len({i % larger for i in indices}) == len(indices)) == (larger == modulus)


# ---- bytes


@settings(max_examples=60)
@given(
    modulus=st.integers(LEAST_MODULUS, PRIME),
    coefficients=st.lists(residue, min_size=1, max_size=40).map(tuple),
)
def test_bytes_come_back(modulus: int, coefficients: tuple[int, ...]) -> None:
    proof, k = Proof(modulus, coefficients), len(coefficients)
    assert Proof.from_bytes(proof.to_bytes(), k) == proof
    assert Proof.from_base64(proof.to_base64(), k) == proof
    assert len(proof.to_bytes()) == proof_bytes(k)


@settings(max_examples=200)
@given(data=st.binary(max_size=24) | st.binary(min_size=10, max_size=10), k=st.integers(1, 8))
def test_bytes_are_a_proof_or_refused(data: bytes, k: int) -> None:
    try:
        proof = Proof.from_bytes(data, k)
    except ProofError:
        return
    assert proof.to_bytes() == data and len(proof.coefficients) == k


@settings(max_examples=100)
@given(text=st.text(max_size=20))
def test_text_is_a_proof_or_refused(text: str) -> None:
    try:
        assert Proof.from_base64(text, 2).to_base64() == text
    except ProofError:
        return


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "a proof of 0 bytes; with 4 coefficients it has one of 10"),
        (bytes.fromhex("ffd9000100020003"), "of 8 bytes"),
        (bytes.fromhex("ffd900010002000300"), "of 9 bytes"),
        (bytes.fromhex("ffd9000100020003000400"), "of 11 bytes"),
        (bytes.fromhex("ffd9000100020003000400050006"), "of 14 bytes"),
        (bytes.fromhex("00000001000200030004"), "modulus 0"),
        (bytes.fromhex("00030001000200030004"), "modulus 3"),
        (bytes.fromhex("80000001000200030004"), "modulus 32768"),
        (bytes.fromhex("ffda0001000200030004"), "modulus 65498"),
        (bytes.fromhex("ffd9000100020003ffd9"), "coefficients outside of 0 to 65496"),
    ],
)
def test_malicious_bytes(data: bytes, reason: str) -> None:
    with pytest.raises(ProofError, match=reason):
        Proof.from_bytes(data, 4)
    x = states(2, 0)
    check = verify(x, data, k=4)
    assert not check.accepted and reason in check.reason and check.mismatches is None
    verdict = verify_all(x, x[:0], [data], k=4)
    assert not verdict.accepted and reason in verdict.reason


def test_malicious_numbers_and_text() -> None:
    for modulus, coefficients in ((PRIME, ()), (PRIME, (-1,)), (PRIME, (PRIME,)), (-5, (1,))):
        with pytest.raises(ProofError):
            Proof(modulus, coefficients)
    text = Proof(65497, (1, 2, 3)).to_base64()
    assert text == "/9kAAQACAAM="
    for bad in (text[:-1], text + "\n", "_" + text[1:], text + "AAAA", "é" + text[1:], "/9kAAQACAAN="):
        with pytest.raises(ProofError):
            Proof.from_base64(bad, 3)


# ---- honest providers


@pytest.mark.parametrize("outliers", [False, True])
@pytest.mark.parametrize("rows", [1, 32, 200])  # 200 rows are more than 65497 values
def test_honest_proofs_are_accepted(rows: int, outliers: bool) -> None:
    for seed in range(8):
        x = states(rows, seed, outliers=outliers)
        proof = commit(x)
        exact = verify(x, proof)
        assert exact.accepted and (exact.mismatches, exact.mean, exact.median) == (0, 0, 0), exact
        again = verify(recomputed(x, seed), proof)
        assert again.accepted and again.mean is not None and again.mean < 2, again
        assert verify(x, commit(recomputed(x, seed)).to_bytes()).accepted


@settings(max_examples=40)
@given(
    rows=st.integers(1, 6), width=st.integers(1, 40), seed=st.integers(0, 10**6), exponent=st.integers(-130, 120),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
)  # fmt: skip
def test_committed_values_can_be_read(
    rows: int, width: int, seed: int, exponent: int, dtype: torch.dtype
) -> None:
    x = (states(rows, seed, width=width).double() * 2.0**exponent).to(dtype)
    k = 1 + seed % x.numel()
    rounded = x.bfloat16().flatten()
    order = sorted(range(x.numel()), key=lambda i: (-abs(float(rounded[i])), i))[:k]
    said = values_at(commit(x, k), torch.tensor(order))
    assert torch.equal(said, rounded[order])
    check = verify(x, commit(x, k), k=k)
    assert check.accepted and check.mismatches == 0


def test_indices_beyond_the_prime_are_folded_on_both_sides() -> None:
    moduli = set()
    for pairs in (1, 20, 64):
        x = 0.1 * states(240, pairs)
        flat = x.view(-1)
        # Pairs that fall together under 65497, and then under the next moduli.
        lower = torch.arange(pairs) * 7 + 11
        flat[lower], flat[lower + PRIME - torch.arange(pairs) % 8] = 9.0, -7.0
        proof = commit(x)
        moduli.add(proof.modulus)
        assert verify(x, proof) == replace(verify(x, proof), accepted=True, mismatches=0, mean=0.0)
        assert verify(recomputed(x, 0), proof).accepted
        assert values_at(proof, lower).unique().tolist() == [9]
    assert max(moduli) < PRIME and len(moduli) > 1


def test_the_largest_bits_of_finite_numbers_stay_below_the_prime() -> None:
    least = torch.finfo(torch.bfloat16).min
    assert int(bits_of(torch.tensor([least]))[0]) == 65407
    x = torch.full((4, 64), least, dtype=torch.bfloat16)
    assert verify(x, commit(x)).accepted and values_at(commit(x), torch.tensor([0])).item() == least


def test_zeros_and_ties() -> None:
    x = torch.zeros(4, 64)
    check = verify(-x, commit(x))
    assert check.accepted and check.sign_flips == 0
    ties = torch.ones(4, 64)
    assert verify(ties, commit(ties), TIGHT).mismatches == 0
    assert torch.equal(values_at(commit(ties), torch.arange(128)), torch.ones(128, dtype=torch.bfloat16))


def test_what_cannot_be_proven() -> None:
    x = states(2, 0)
    proof = commit(x)
    for bad in (math.nan, math.inf, -math.inf, 3.4e38):  # the last one is infinite in bfloat16
        broken = x.clone()
        broken[1, 3] = bad
        for act in (lambda y=broken: commit(y), lambda y=broken: verify(y, proof)):
            with pytest.raises(InputError, match="NaN or infinite"):
                act()
    for k in (0, -1, x.numel() + 1):
        with pytest.raises(InputError, match="this chunk has 1152 values"):
            commit(x, k)
    with pytest.raises(InputError, match="this chunk has 64 values"):
        commit_all(states(4, 0, width=64), states(33, 1, width=64))
    assert len(commit_all(states(4, 0, width=64), states(33, 1, width=64), k=64)) == 3


# ---- float32


def slow_check(sent: Tensor, own: Tensor, sent_dtype: torch.dtype, dtype: torch.dtype, k: int) -> list[float]:
    """Algorithm 2 as printed, number by number: values in disagreement, mean and median of mantissas' differences."""
    sides = [sent.to(sent_dtype).double().flatten(), own.to(dtype).double().flatten()]
    order = [sorted(range(len(side)), key=lambda i: (-abs(float(side[i])), i))[:k] for side in sides]
    bits = 7 if dtype == torch.bfloat16 else 23
    disagree, differences = 0, []
    for place in order[1]:
        if place not in order[0]:
            disagree += 1  # the polynomial is arbitrary there; in this test it never agrees by chance
            continue
        claimed, mine = (float(side[place].to(dtype)) for side in sides)
        (a, p), (b, q) = math.frexp(claimed), math.frexp(mine)
        if p != q or a * b < 0:
            disagree += 1
        else:
            differences.append(abs(abs(a) - abs(b)) * 2 ** (bits + 1))
    return [disagree, float(np.mean(differences)), float(np.median(differences))]


@pytest.mark.parametrize("size", [0.0, 1e-6, 0.002])
@pytest.mark.parametrize("limits", PUBLISHED.values(), ids=PUBLISHED)
@pytest.mark.parametrize("sent_dtype", FORMATS)
def test_proofs_of_either_dtype_are_checked_in_either(
    sent_dtype: str, limits: Thresholds, size: float
) -> None:
    """TOPLOC, section 5.7: float32 is rounded for a verifier in bfloat16, bfloat16 is padded for one in float32."""
    own = states(8, 5)
    sent = own * (1 + size * torch.randn(own.shape, generator=torch.Generator().manual_seed(1)))
    proof = commit(sent, 64, dtype=sent_dtype)
    assert len(proof.to_bytes()) == proof_bytes(64, sent_dtype) == 2 + 64 * FORMATS[sent_dtype].bits // 8
    check = verify(own, proof.to_bytes(), limits, k=64)
    dtypes = FORMATS[sent_dtype].dtype, FORMATS[limits.dtype].dtype
    assert [check.mismatches, check.mean, check.median] == slow_check(sent, own, *dtypes, 64)
    # Table 5: only a verifier in float32 tells that the provider has less than float32, or another size of errors.
    assert check.accepted == (limits.dtype == "bfloat16" or (sent_dtype == "float32" and size < 1e-4))


def test_float32_proofs_hold_every_finite_value() -> None:
    edge = torch.finfo(torch.float32)
    x = torch.tensor([[edge.min, edge.max, edge.tiny, -edge.smallest_normal, 0.0, -1.0, 1e-44, 3.0]])
    proof = commit(x, 8, dtype="float32")
    assert torch.equal(values_at(proof, torch.arange(8)), x[0])
    assert max(FORMATS["float32"].patterns(x).ravel()) < FORMATS["float32"].prime
    assert Proof.from_base64(proof.to_base64(), 8) == proof
    assert verify(x, proof, PUBLISHED["float32"], k=8).mismatches == 0
    with pytest.raises(ProofError, match="coefficients outside"):
        Proof(PRIME, (2**32 - 5,), "float32")
    with pytest.raises(InputError, match="NaN or infinite in float32"):
        commit(torch.tensor([[math.inf]]), 1, dtype="float32")


@pytest.mark.parametrize("dtype", FORMATS)
def test_places_that_the_provider_did_not_choose_are_counted(dtype: str) -> None:
    own, sent = states(4, 0), states(4, 0) + 0.3 * states(4, 1)
    chosen = [set(PAPER.choose(FORMATS[dtype].patterns(x), 64).tolist()) for x in (own, sent)]
    assert lacking(sent, own, 64, dtype=dtype) == len(chosen[0] - chosen[1]) > 0
    assert lacking(own, own, 64, dtype=dtype) == 0


# ---- dishonest providers


@pytest.mark.parametrize("outliers", [False, True])
@pytest.mark.parametrize("rows", [4, 32, 200])
def test_other_activations_are_rejected(rows: int, outliers: bool) -> None:
    for seed in range(5):
        x = states(rows, seed, outliers=outliers)
        others = {
            "another tensor": states(rows, seed + 50, outliers=outliers),
            "rows shifted": x.roll(1, 0),
            "columns shifted": x.roll(1, 1),
            "another scale": 1.3 * x,
            "other signs in every second row": x * (1 - 2 * (torch.arange(rows)[:, None] % 2)),
            "noise": recomputed(x, seed, 0.2),
        }
        for name, other in others.items():
            check = verify(x, commit(other))
            assert not check.accepted and check.mismatches is not None, (name, check)
        flipped = verify(x, commit(-x))
        assert not flipped.accepted and flipped.mean is None
        assert flipped.mismatches == flipped.sign_flips == 128


def quantised(weight: Tensor) -> Tensor:
    """Rounded to 4 bits, one scale a row."""
    scale = weight.abs().amax(1, keepdim=True) / 7
    return (weight / scale).round() * scale


def through(weights: list[Tensor], x: Tensor) -> Tensor:
    for weight in weights:
        x = x + torch.tanh(torch.nn.functional.rms_norm(x, x.shape[1:]) @ weight.T)
    return torch.nn.functional.rms_norm(x, x.shape[1:])


def test_weights_of_4_bits_are_told_from_bfloat16() -> None:
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        weights = [torch.randn(128, 128, generator=generator) * 2 / math.sqrt(128) for _ in range(10)]
        x = states(32, seed, width=128)
        own = through(weights, x)
        honest = commit(through([weight.bfloat16().float() for weight in weights], x))
        assert verify(own, honest, TIGHT).accepted and verify(own, honest).accepted
        check = verify(own, commit(through([quantised(weight) for weight in weights], x)), TIGHT)
        assert not check.accepted and check.mismatches is not None and check.mismatches > 8


def test_rounded_states() -> None:
    """Published limits notice a mantissa of no bits; 4 bits with the scale of a row leave the largest nearly alone."""
    x = states(32, 0)
    powers = x.sign() * 2.0 ** x.abs().log2().round()
    assert not verify(x, commit(powers)).accepted
    rounded = commit(quantised(x))
    assert verify(x, rounded).accepted and not verify(x, rounded, TIGHT).accepted


def test_a_typical_value_is_no_proof() -> None:
    """A constant polynomial has the right exponents and small errors; only the signs give it away."""
    x = states(32, 0).sign() * (3 + 0.05 * states(32, 1).tanh())
    constant = Proof(PRIME, (int(bits_of(torch.tensor([3.0]))[0]), *[0] * 127))
    assert verify(x.abs(), constant).accepted
    check = verify(x, constant)
    assert not check.accepted and check.sign_flips == check.mismatches and "exponent or sign" in check.reason


def test_a_modulus_that_no_search_gives() -> None:
    x = states(32, 0)
    check = verify(x, replace(commit(x), modulus=PRIME - 1))
    assert not check.accepted and "does not end at 65496" in check.reason
    # Four large columns, the same in each of 40 tokens: folded by 9 · 4096, 36 points answer for 128.
    wide = 0.1 * states(40, 0, width=4096)
    wide[:, :4] = torch.tensor([9.0, -8.0, 7.0, -6.0])
    places = (torch.arange(9)[:, None] * 4096 + torch.arange(4)).flatten()
    values = bits_of(wide.flatten()[places]).astype(np.int64)
    few = interpolate(places.numpy(), values).tolist()
    forged = Proof(9 * 4096, (*few, *[0] * (128 - len(few))))
    assert torch.equal(values_at(forged, torch.arange(39) * 4096), wide[:39, 0].bfloat16())
    check = verify(wide, forged)
    assert not check.accepted and "does not end at 36864" in check.reason
    assert verify(wide, commit(wide)).accepted


def test_few_values() -> None:
    """Limits shrink with k: the 38 of 128 values would accept anything for k up to 38."""
    assert [Thresholds().allowed(k) for k in (128, 64, 16, 4, 3, 1)] == [38, 19, 4, 1, 0, 0]
    x, other = states(4, 0), states(4, 1)
    for k in (1, 4, 16, 38):
        assert verify(x, commit(x, k), k=k).accepted
        assert not verify(x, commit(other, k), k=k).accepted
        short = verify(x, commit(x, k))
        assert not short.accepted and short.reason == f"a proof of {k} coefficients; 128 were agreed on"


# ---- whole requests


def test_proofs_of_a_request() -> None:
    prompt, output = states(7, 0), states(70, 1)
    parts = PAPER.chunks(prompt, output)
    assert [len(part) for part in parts] == [7, 32, 32, 6]
    proofs = commit_all(prompt, output)
    assert proofs == [commit(part) for part in parts]
    verdict = verify_all(recomputed(prompt, 0), recomputed(output, 1), proofs)
    assert verdict.accepted and len(verdict.checks) == 4 and all(check.accepted for check in verdict.checks)
    assert verify_all(prompt, output, [proof.to_bytes() for proof in proofs]).accepted
    assert verify_all(prompt, output[:0], commit_all(prompt, output[:0])).accepted
    sixteen = commit_all(prompt, output, k=16, every=10)
    assert len(sixteen) == 8 and verify_all(prompt, output, sixteen, k=16, every=10).accepted
    with pytest.raises(InputError, match="at least 1"):
        commit_all(prompt[:0], output)
    with pytest.raises(InputError, match="at least 1"):
        commit_all(prompt, output, every=0)


def test_order_and_number_of_proofs() -> None:
    prompt, output = states(7, 0), states(70, 1)
    first, second, third, last = proofs = commit_all(prompt, output)
    for wrong in ([], proofs[:3], proofs[1:]):
        verdict = verify_all(prompt, output, wrong)
        assert not verdict.accepted and not verdict.checks
        assert verdict.reason == f"too few proofs: {len(wrong)} for 4 chunks"
    verdict = verify_all(prompt, output, [*proofs, last])
    assert not verdict.accepted and verdict.reason == "too many proofs: 5 for 4 chunks"
    foreign = commit(states(32, 9))
    wrongs: list[tuple[list[Proof | bytes], list[int]]] = [
        ([first, third, second, last], [1, 2]),
        ([second, first, third, last], [0, 1]),
        ([first, second, second, last], [2]),
        ([first, second, foreign, last], [2]),
        ([first, second, third, Proof(PRIME, (0,) * 128)], [3]),
        ([first, b"nonsense", third, last], [1]),
    ]
    for received, failing in wrongs:
        verdict = verify_all(prompt, output, received)
        assert not verdict.accepted and verdict.reason.startswith(f"{len(failing)} of 4 proofs fail; number")
        assert [number for number, check in enumerate(verdict.checks) if not check.accepted] == failing
    assert not verify_all(prompt, output.roll(1, 0), proofs).accepted
