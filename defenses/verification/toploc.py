"""Prove which model was run by a polynomial through the largest activations of a chunk of tokens (TOPLOC).

For each chunk of tokens the provider sends a polynomial from flat indices into the final states to k of their values
(TOPLOC, Algorithm 1). The verifier runs the model once over all tokens, chooses k of its own values in the same way,
and compares them with the polynomial's values at their places (Algorithm 2). A ``Rule`` says how a request is cut into
chunks, and which values are chosen. The published one takes the k largest, of the whole prompt and of each 32 decoded
tokens. It is the default of the functions here; commands have another default (``rules.DEFAULT``).

The bytes are those of the published implementation: two of a modulus, then two of each coefficient in ascending degree,
big-endian. All arithmetic is modulo the prime 65497; the modulus only folds indices, on both sides.

Values are raw bfloat16 patterns. 16 bits exceed the prime, but finite numbers do not: their largest pattern is 0xFF7F =
65407, and all from 65497 on are NaN. Activations that are not finite are refused. So no committed value changes modulo
the prime, and no honest proof fails for it. A pattern of NaN or infinity, which the polynomial may give at other
places, agrees with no activation.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from jaxtyping import BFloat16, Float, Int, Int64, UInt16
from torch import Tensor

from hiddenlab.defenses.verification.rules import EVERY, MAGNITUDE, PAPER, Rule
from hiddenlab.errors import InputError
from hiddenlab.text import count_of

PRIME = 65497
LEAST_MODULUS = 2**15 + 1  # where the search of Algorithm 6 ends
TOP = 128
_MANTISSA_BITS = 7
_INFINITE = 0x7F80


class ProofError(InputError):
    """A proof's bytes or numbers are outside of the format, so that no honest provider can have sent it."""


# ---- arithmetic modulo the prime


@cache
def _inverses() -> Int64[np.ndarray, " prime"]:
    """Return the inverse of every residue modulo the prime; 0, which has none, stands for itself."""
    return np.array([0, *(pow(residue, -1, PRIME) for residue in range(1, PRIME))], dtype=np.int64)


def interpolate(x: Int64[np.ndarray, " k"], y: Int64[np.ndarray, " k"]) -> Int64[np.ndarray, " k"]:
    """Return the polynomial of degree below k through k points, by Newton's divided differences (TOPLOC, Algorithm 3).

    Args:
        x: places, distinct modulo the prime. y: values, which count modulo the prime.

    Returns:
        Coefficients, ascending degree.

    Raises:
        InputError: no points, or two at one place.
    """
    x = x % PRIME
    if not len(x) or len(np.unique(x)) < len(x):
        raise InputError("a polynomial needs points, each at a place of its own modulo the prime")
    inverse, differences = _inverses(), y % PRIME
    for step in range(1, len(x)):
        # A negative denominator −a indexes the table from its end, which is where the inverse of PRIME − a lies.
        denominators = inverse[x[step:] - x[:-step]]
        differences[step:] = (differences[step:] - differences[step - 1 : -1]) * denominators % PRIME
    coefficients = np.zeros_like(differences)
    for place, difference in zip(x[::-1].tolist(), differences[::-1].tolist(), strict=True):
        carried = coefficients * -place
        carried[1:] += coefficients[:-1]
        carried[0] += difference
        coefficients = carried % PRIME
    return coefficients


def evaluate(coefficients: Sequence[int], x: Int64[np.ndarray, " points"]) -> Int64[np.ndarray, " points"]:
    """Evaluate a polynomial at many places, by Horner's rule modulo the prime (TOPLOC, Algorithm 5).

    Coefficients come in ascending degree.
    """
    x = x % PRIME
    values = np.zeros_like(x)
    for coefficient in reversed(coefficients):
        values *= x
        values += coefficient
        values %= PRIME
    return values


def injective_modulus(indices: Int64[np.ndarray, " k"]) -> int:
    """Return the largest modulus up to 65497 that keeps the indices distinct (TOPLOC, Algorithm 6).

    The paper starts at 65536, which 16 bits do not hold; the published bytes start at the prime, and so does this.

    Raises:
        InputError: no modulus from 32769 on does.
    """
    if len(np.unique(indices)) == len(indices) <= PRIME:
        for modulus in range(PRIME, LEAST_MODULUS - 1, -1):
            if len(np.unique(indices % modulus)) == len(indices):
                return modulus
    raise InputError(f"no modulus from {LEAST_MODULUS} to {PRIME} keeps these {len(indices)} indices apart")


# ---- the proof


@dataclass(frozen=True)
class Proof:
    """The proof of one chunk of tokens; every instance is within the format.

    Attributes:
        modulus: folds flat indices, 32769 to 65497. coefficients: of the polynomial modulo 65497, ascending degree.

    Raises:
        ProofError: a number is out of its range, or there are no coefficients.
    """

    modulus: int
    coefficients: tuple[int, ...]

    def __post_init__(self) -> None:
        if not LEAST_MODULUS <= self.modulus <= PRIME:
            raise ProofError(f"a proof with modulus {self.modulus}: {LEAST_MODULUS} to {PRIME} are possible")
        if not 1 <= len(self.coefficients) <= self.modulus:
            raise ProofError(f"a proof with {len(self.coefficients)} coefficients, modulo {self.modulus}")
        if not 0 <= min(self.coefficients) <= max(self.coefficients) < PRIME:
            raise ProofError(f"a proof with coefficients outside of 0 to {PRIME - 1}")

    @classmethod
    def through(cls, indices: Int64[np.ndarray, " k"], bits: UInt16[np.ndarray, " k"]) -> Proof:
        """Make the proof of given points: flat indices, and the bfloat16 patterns of finite values there.

        Raises:
            InputError: negative or repeated indices, patterns of no finite number, or no modulus for the indices.
        """
        if len(indices) and indices.min() < 0:
            raise InputError("flat indices start at 0")
        _finite(bits)
        modulus = injective_modulus(indices)
        return cls(modulus, tuple(interpolate(indices % modulus, bits.astype(np.int64)).tolist()))

    def to_bytes(self) -> bytes:
        """Encode the proof in the published form, 2 + 2k bytes."""
        return np.array((self.modulus, *self.coefficients), dtype=">u2").tobytes()

    @classmethod
    def from_bytes(cls, data: bytes, k: int = TOP) -> Proof:
        """Read a proof from untrusted bytes.

        Raises:
            ProofError: not k coefficients, or numbers out of their ranges; nothing else, whatever the bytes.
        """
        if len(data) != proof_bytes(k):
            raise ProofError(
                f"a proof of {count_of(len(data), 'byte')}; with {k} coefficients it has {proof_bytes(k)}"
            )
        modulus, *coefficients = np.frombuffer(data, dtype=">u2").tolist()
        return cls(modulus, tuple(coefficients))

    def to_base64(self) -> str:
        """Encode the published form as base64 text."""
        return base64.b64encode(self.to_bytes()).decode()

    @classmethod
    def from_base64(cls, text: str, k: int = TOP) -> Proof:
        """Read a proof from base64 text; only the standard spelling of the same bytes is accepted.

        Raises:
            ProofError: not base64, or not a proof (see ``from_bytes``).
        """
        try:
            data = base64.b64decode(text, validate=True)
        except ValueError:  # binascii's own error is one
            raise ProofError("a proof that is not base64") from None
        if base64.b64encode(data).decode() != text:
            raise ProofError("a proof in unusual base64")
        return cls.from_bytes(data, k)

    def bits_at(self, indices: Int64[np.ndarray, " points"]) -> Int64[np.ndarray, " points"]:
        """Return the 16-bit patterns that the polynomial gives at flat indices, folded by the modulus."""
        return evaluate(self.coefficients, indices % self.modulus)

    def __repr__(self) -> str:
        return f"Proof({len(self.coefficients)} coefficients, modulus {self.modulus})"


def proof_bytes(k: int = TOP) -> int:
    """Return the size of one proof in bytes: 258 with 128 values."""
    return 2 + 2 * k


def values_at(proof: Proof, indices: Int[Tensor, "*shape"]) -> BFloat16[Tensor, "*shape"]:
    """Return a proof's polynomial at flat indices (row · width + column), as bfloat16.

    It is the committed value where the index was among those chosen, and arbitrary, maybe not finite, elsewhere.

    Raises:
        InputError: an index is negative.
    """
    places = indices.detach().cpu().long().numpy().reshape(-1)
    if places.size and places.min() < 0:
        raise InputError("flat indices start at 0")
    bits = proof.bits_at(places).astype(np.uint16).view(np.int16)
    return torch.from_numpy(bits).view(torch.bfloat16).reshape(indices.shape).to(indices.device)


# ---- the provider


def _finite(bits: UInt16[np.ndarray, "*shape"]) -> None:
    if bool(((bits & MAGNITUDE) >= _INFINITE).any()):
        raise InputError("activations that are NaN or infinite in bfloat16 can be neither proven nor checked")


def _chosen(
    chunk: Float[Tensor, "rows d"], k: int, rule: Rule, scale: Float[Tensor, " d"] | None
) -> tuple[Int64[np.ndarray, " k"], UInt16[np.ndarray, " k"]]:
    """Return the flat indices, ascending, of the values that a rule takes, and their bfloat16 patterns."""
    rounded = chunk.detach().to(torch.bfloat16).cpu().contiguous()
    bits = rounded.view(torch.int16).numpy().view(np.uint16)
    _finite(bits)
    columns = None if scale is None else scale.detach().cpu().double().numpy()
    indices = rule.choose(bits, k, columns)
    return indices, bits.ravel()[indices]


def commit(
    chunk: Float[Tensor, "rows d"], k: int = TOP, rule: Rule = PAPER, scale: Float[Tensor, " d"] | None = None
) -> Proof:
    """Make the proof of a chunk of final states (TOPLOC, Algorithm 1).

    Args:
        chunk: states after the final norm, of any float dtype; they are rounded to bfloat16. k: values in the proof.
        rule: which values. scale: of the columns, for a rule by row.

    Raises:
        InputError: the chunk has fewer than k values, or one that is not finite in bfloat16, or the rule has no scale.
    """
    return Proof.through(*_chosen(chunk, k, rule, scale))


def commit_all(
    prefill: Float[Tensor, "n d"],
    decode: Float[Tensor, "t d"],
    k: int = TOP,
    every: int = EVERY,
    rule: Rule = PAPER,
    scale: Float[Tensor, " d"] | None = None,
) -> list[Proof]:
    """Make the proofs of a request in their order; the last chunk may have fewer tokens, but not fewer than k values.

    Raises:
        InputError: see ``Rule.chunks`` and ``commit``; a last chunk of few tokens in a narrow model needs a smaller k.
    """
    return [commit(chunk, k, rule, scale) for chunk in rule.chunks(prefill, decode, every)]


# ---- the verifier


@dataclass(frozen=True)
class Thresholds:
    """The limits within which a proof may differ and still be accepted.

    The published limits tolerate other hardware; a mild quantisation may stay within them (TOPLOC, sections 6.1 and
    6.5). If the hardware of both sides is known, tighter limits separate better.

    Attributes:
        exponents: how many of ``of`` values may disagree; for another k in proportion, rounded down (an unchanged 38
            would accept any proof of 38 values or fewer).
        mean, median: of the absolute difference of mantissas where the rest agrees, in units of the last bit.
        row: share of each token's values, rounded down, that has to agree under a rule by row. This limit is not
            published; it is 0 for a token with fewer than four values.
        of: the k that ``exponents`` was chosen for.
        mantissa_bits: of the numbers compared.

    Raises:
        InputError: limits that are no numbers, or under which no value has to agree.
    """

    exponents: int = 38
    mean: float = 10.0
    median: float = 8.0
    row: float = 0.25
    of: int = TOP
    mantissa_bits: int = _MANTISSA_BITS

    def __post_init__(self) -> None:
        if not 0 <= self.exponents < self.of:
            raise InputError(
                f"{self.exponents} of {count_of(self.of, 'value')} may disagree: at least one has to agree"
            )
        if not all(math.isfinite(limit) and limit >= 0 for limit in (self.mean, self.median)):
            raise InputError(f"mantissas may differ by {self.mean} and {self.median}: finite numbers from 0")
        if not 0 <= self.row <= 1:
            raise InputError(f"a share of {self.row} of a token's values has to agree: a number from 0 to 1")

    def allowed(self, k: int) -> int:
        """Return how many of k values may disagree."""
        return self.exponents * k // self.of


# TOPLOC, section 5.2. Those for float32 count in its 23 bits of mantissa, which proofs of 16-bit values do not hold.
PUBLISHED = {"bfloat16": Thresholds(), "float32": Thresholds(8, 256.0, 128.0, mantissa_bits=23)}
BFLOAT16 = PUBLISHED["bfloat16"]


@dataclass(frozen=True)
class Check:
    """The result of comparing one chunk; None is what was not measured.

    Attributes:
        accepted: whether the proof is believed. reason: why, or why not, in words.
        mismatches: values with another exponent or sign, or none at all; values that only one side has among its
            largest count too, as the polynomial is arbitrary at their places.
        sign_flips: those of them with the same exponent.
        mean, median: absolute difference of mantissas among the rest, in units of the last of 7 bits.
        covered: rows of the chunk with a value that agrees in exponent and sign, ascending. Others were not compared:
            the rule took none of their values, or those that it took were not found in the proof.
        faulty_rows: rows of which fewer values agree than their limit asks for; 0 under a rule that is not by row.
    """

    accepted: bool
    reason: str
    mismatches: int | None = None
    sign_flips: int | None = None
    mean: float | None = None
    median: float | None = None
    covered: tuple[int, ...] = ()
    faulty_rows: int | None = None


def verify(
    chunk: Float[Tensor, "rows d"],
    proof: Proof | bytes,
    thresholds: Thresholds = BFLOAT16,
    k: int = TOP,
    rule: Rule = PAPER,
    scale: Float[Tensor, " d"] | None = None,
) -> Check:
    """Compare a proof with the verifier's own states of the same tokens (TOPLOC, Algorithm 2).

    This adds two conditions to the algorithm. Signs have to agree like exponents. And an honest search for a modulus
    must be able to end at this modulus. A multiple of the width, for example, might fold the indices into fewer places
    than values have to agree; few numbers would then answer for many tokens.

    Args:
        chunk: the verifier's states.
        proof: if bytes, they are read here, and rejected where they are no proof.
        thresholds: limits.
        k, rule: number of values in a proof, and which ones, as agreed on.
        scale: the verifier's own.

    Raises:
        InputError: a chunk that cannot be checked (see ``commit``), or thresholds in another unit than bfloat16's.
    """
    if thresholds.mantissa_bits != _MANTISSA_BITS:
        raise InputError(
            f"limits for {thresholds.mantissa_bits} bits of mantissa; proofs hold {_MANTISSA_BITS}"
        )
    indices, bits = _chosen(chunk, k, rule, scale)
    try:
        proof = proof if isinstance(proof, Proof) else Proof.from_bytes(proof, k)
    except ProofError as error:
        return Check(False, str(error))
    if len(proof.coefficients) != k:
        return Check(False, f"a proof of {len(proof.coefficients)} coefficients; {k} were agreed on")
    distinct = len(np.unique(indices % proof.modulus))
    if (chunk.numel() <= PRIME != proof.modulus) or distinct < k - thresholds.allowed(k):
        return Check(False, f"the search for a modulus does not end at {proof.modulus} for these activations")
    own, rows = bits.astype(np.int64), indices // chunk.shape[1]
    return _judge(proof.bits_at(indices), own, rows, thresholds, rule.by_row)


def _judge(
    claimed: Int64[np.ndarray, " k"],
    own: Int64[np.ndarray, " k"],
    rows: Int64[np.ndarray, " k"],
    limits: Thresholds,
    by_row: bool,
) -> Check:
    """Compare two lists of bfloat16 patterns and decide whether they are within the limits.

    ``rows`` is the token of each pattern.
    """
    # Zero has two patterns, and a recomputation need not keep its sign.
    zero = ((claimed | own) & MAGNITUDE) == 0
    changed = np.where(zero, 0, (claimed ^ own) >> _MANTISSA_BITS)  # eight bits of exponent, the sign above
    agree = changed == 0
    mismatches, flips = int((~agree).sum()), int((changed == 1 << 8).sum())
    taken, agreeing = np.bincount(rows), np.bincount(rows, agree)
    faulty = np.flatnonzero(agreeing < np.floor(limits.row * taken)) if by_row else rows[:0]
    if not agree.any():
        reason = f"none of {count_of(len(own), 'value')} agrees in exponent and sign"
        return Check(False, reason, mismatches, flips, faulty_rows=len(faulty))
    mask = (1 << _MANTISSA_BITS) - 1
    errors = np.abs((claimed & mask) - (own & mask))[agree]
    mean, median = float(errors.mean()), float(np.median(errors))
    allowed, faults = limits.allowed(len(own)), []
    if mismatches > allowed:
        faults.append(
            f"{mismatches} of {count_of(len(own), 'value')} disagree in exponent or sign, allowed: {allowed}"
        )
    if len(faulty):
        first = int(faulty[0])
        faults.append(
            f"{count_of(len(faulty), 'token')} with too few values that agree, the first is number "
            f"{first} of its chunk "
            f"with {agreeing[first]:.0f} of {taken[first]}"
        )
    if not mean <= limits.mean:
        faults.append(f"mantissas differ by {mean:.2f} on average, allowed: {limits.mean:g}")
    if not median <= limits.median:
        faults.append(f"mantissas differ by {median:g} in the median, allowed: {limits.median:g}")
    reason = (
        "; ".join(faults)
        or f"{mismatches} of {count_of(len(own), 'value')} disagree, mantissas by {mean:.2f}"
    )
    covered = tuple(np.flatnonzero(agreeing).tolist())
    return Check(not faults, reason, mismatches, flips, mean, median, covered, len(faulty))


@dataclass(frozen=True)
class Verdict:
    """The result for a whole request, which is accepted only if each of its chunks is.

    Attributes:
        accepted, reason: of the whole. checks: one per chunk in their order; none if the number of proofs is wrong.
        prompt, output: covered rows (see ``Check``) of the prompt's states and of the answer's, ascending.
    """

    accepted: bool
    reason: str
    checks: tuple[Check, ...] = ()
    prompt: tuple[int, ...] = ()
    output: tuple[int, ...] = ()


def verify_all(
    prefill: Float[Tensor, "n d"],
    decode: Float[Tensor, "t d"],
    proofs: Sequence[Proof | bytes],
    thresholds: Thresholds = BFLOAT16,
    k: int = TOP,
    every: int = EVERY,
    rule: Rule = PAPER,
    scale: Float[Tensor, " d"] | None = None,
) -> Verdict:
    """Check the proofs of a request, in order, against the verifier's own states.

    Proofs in another order, of other tokens or another model fail in their chunk; a wrong number of them fails at once.

    Raises:
        InputError: the verifier's own states or settings are at fault, see ``Rule.chunks`` and ``verify``.
    """
    parts = rule.chunks(prefill, decode, every)
    if len(proofs) != len(parts):
        amount = "few" if len(proofs) < len(parts) else "many"
        return Verdict(False, f"too {amount} proofs: {len(proofs)} for {count_of(len(parts), 'chunk')}")
    checks = tuple(
        verify(part, proof, thresholds, k, rule, scale) for part, proof in zip(parts, proofs, strict=True)
    )
    rows, start = list[int](), 0
    for part, check in zip(parts, checks, strict=True):
        rows += [start + row for row in check.covered]
        start += len(part)
    prompt = tuple(row for row in rows if row < len(prefill))
    output = tuple(row - len(prefill) for row in rows if row >= len(prefill))
    failed = [number for number, check in enumerate(checks) if not check.accepted]
    if failed:
        reason = (
            f"{len(failed)} of {count_of(len(parts), 'proof')} fail; number {failed[0]}: "
            f"{checks[failed[0]].reason}"
        )
        return Verdict(False, reason, checks, prompt, output)
    return Verdict(
        True, f"all {count_of(len(parts), 'proof')} agree with the recomputed states", checks, prompt, output
    )
