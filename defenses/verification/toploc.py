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

A proof can hold float32 patterns too, in four bytes each. The paper has limits for them and speaks of 32 bits
(section 5.2, appendix C.1); its published code has no such proofs. Here they are modulo the largest prime of 32 bits,
which is above all finite patterns. The search for the modulus that folds indices stays as printed.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int, Int64, UInt
from torch import Tensor

from hiddenlab.defenses.verification.formats import DTYPE, FORMATS, Format, format_of
from hiddenlab.defenses.verification.polynomials import (
    LEAST_MODULUS,
    PRIME,
    evaluate,
    injective_modulus,
    interpolate,
)
from hiddenlab.defenses.verification.rules import EVERY, PAPER, Rule
from hiddenlab.errors import InputError
from hiddenlab.text import count_of

TOP = 128


class ProofError(InputError):
    """A proof's bytes or numbers are outside of the format, so that no honest provider can have sent it."""


# ---- the proof


@dataclass(frozen=True)
class Proof:
    """The proof of one chunk of tokens; every instance is within the format.

    Attributes:
        modulus: folds flat indices, 32769 to 65497.
        coefficients: of the polynomial modulo the format's prime, ascending degree.
        dtype: of the values, a name in ``FORMATS``.

    Raises:
        ProofError: a number is out of its range, or there are no coefficients.
    """

    modulus: int
    coefficients: tuple[int, ...]
    dtype: str = DTYPE

    def __post_init__(self) -> None:
        prime = format_of(self.dtype).prime
        if not LEAST_MODULUS <= self.modulus <= PRIME:
            raise ProofError(f"a proof with modulus {self.modulus}: {LEAST_MODULUS} to {PRIME} are possible")
        if not 1 <= len(self.coefficients) <= self.modulus:
            raise ProofError(f"a proof with {len(self.coefficients)} coefficients, modulo {self.modulus}")
        if not 0 <= min(self.coefficients) <= max(self.coefficients) < prime:
            raise ProofError(f"a proof with coefficients outside of 0 to {prime - 1}")

    @classmethod
    def through(
        cls, indices: Int64[np.ndarray, " k"], bits: UInt[np.ndarray, " k"], dtype: str = DTYPE
    ) -> Proof:
        """Make the proof of given points: flat indices, and the patterns of finite values there.

        Raises:
            InputError: negative or repeated indices, patterns of no finite number, or no modulus for the indices.
        """
        if len(indices) and indices.min() < 0:
            raise InputError("flat indices start at 0")
        form = format_of(dtype)
        _finite(bits, form)
        modulus = injective_modulus(indices)
        made = interpolate(indices % modulus, bits.astype(np.int64), form.prime)
        return cls(modulus, tuple(made.tolist()), dtype)

    def to_bytes(self) -> bytes:
        """Encode the proof in the published form, 2 + 2k bytes; 2 + 4k of float32 values."""
        size = format_of(self.dtype).bits // 8
        return np.array(self.modulus, ">u2").tobytes() + np.array(self.coefficients, f">u{size}").tobytes()

    @classmethod
    def from_bytes(cls, data: bytes, k: int = TOP) -> Proof:
        """Read a proof from untrusted bytes; their number says the dtype of its values.

        Raises:
            ProofError: not k coefficients, or numbers out of their ranges; nothing else, whatever the bytes.
        """
        sizes = {proof_bytes(k, dtype): dtype for dtype in FORMATS}
        if len(data) not in sizes:
            possible = ", ".join(f"{size} ({dtype})" for size, dtype in sizes.items())
            raise ProofError(
                f"a proof of {count_of(len(data), 'byte')}; with {k} coefficients it has one of {possible}"
            )
        dtype = sizes[len(data)]
        coefficients = np.frombuffer(data[2:], dtype=f">u{FORMATS[dtype].bits // 8}").tolist()
        return cls(int.from_bytes(data[:2], "big"), tuple(coefficients), dtype)

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
        """Return the patterns that the polynomial gives at flat indices, folded by the modulus."""
        return evaluate(self.coefficients, indices % self.modulus, format_of(self.dtype).prime)

    def __repr__(self) -> str:
        return f"Proof({len(self.coefficients)} coefficients, modulus {self.modulus})"


def proof_bytes(k: int = TOP, dtype: str = DTYPE) -> int:
    """Return the size of one proof in bytes: 258 with 128 values of bfloat16, 514 of float32."""
    return 2 + k * (format_of(dtype).bits // 8)


def values_at(proof: Proof, indices: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return a proof's polynomial at flat indices (row · width + column), in its dtype.

    It is the committed value where the index was among those chosen, and arbitrary, maybe not finite, elsewhere.

    Raises:
        InputError: an index is negative.
    """
    places = indices.detach().cpu().long().numpy().reshape(-1)
    if places.size and places.min() < 0:
        raise InputError("flat indices start at 0")
    numbers = format_of(proof.dtype).numbers(proof.bits_at(places))
    return numbers.reshape(indices.shape).to(indices.device)


# ---- the provider


def _finite(bits: UInt[np.ndarray, "*shape"], form: Format) -> None:
    if bool(((bits & form.magnitude) >= 0xFF << form.mantissa_bits).any()):
        name = str(form.dtype).removeprefix("torch.")
        raise InputError(f"activations that are NaN or infinite in {name} can be neither proven nor checked")


def _chosen(
    chunk: Float[Tensor, "rows d"], k: int, rule: Rule, scale: Float[Tensor, " d"] | None, form: Format
) -> tuple[Int64[np.ndarray, " k"], UInt[np.ndarray, " k"]]:
    """Return the flat indices, ascending, of the values that a rule takes, and their patterns."""
    bits = form.patterns(chunk)
    _finite(bits, form)
    columns = None if scale is None else scale.detach().cpu().double().numpy()
    indices = rule.choose(bits, k, columns)
    return indices, bits.ravel()[indices]


def lacking(
    sent: Float[Tensor, "rows d"], own: Float[Tensor, "rows d"], k: int = TOP, rule: Rule = PAPER,
    scale: Float[Tensor, " d"] | None = None, dtype: str = DTYPE,
) -> int:  # fmt: skip
    """Count the verifier's values whose places the provider did not choose (TOPLOC's top-k mismatch, section 5.5).

    A proof does not show this: its polynomial gives a number at every place. Both sides' states are needed.

    Args:
        sent, own: the provider's and the verifier's states. k, rule, scale, dtype: see ``commit``.
    """
    theirs, mine = (_chosen(states, k, rule, scale, format_of(dtype))[0] for states in (sent, own))
    return len(np.setdiff1d(mine, theirs))


def commit(
    chunk: Float[Tensor, "rows d"],
    k: int = TOP,
    rule: Rule = PAPER,
    scale: Float[Tensor, " d"] | None = None,
    dtype: str = DTYPE,
) -> Proof:
    """Make the proof of a chunk of final states (TOPLOC, Algorithm 1).

    Args:
        chunk: states after the final norm, of any float dtype. k: values in the proof.
        rule: which values. scale: of the columns, for a rule by row.
        dtype: of the values in the proof, to which the states are rounded, a name in ``FORMATS``.

    Raises:
        InputError: the chunk has fewer than k values, or one that is not finite in the dtype, or the rule has no scale.
    """
    return Proof.through(*_chosen(chunk, k, rule, scale, format_of(dtype)), dtype)


def commit_all(
    prefill: Float[Tensor, "n d"],
    decode: Float[Tensor, "t d"],
    k: int = TOP,
    every: int = EVERY,
    rule: Rule = PAPER,
    scale: Float[Tensor, " d"] | None = None,
    dtype: str = DTYPE,
) -> list[Proof]:
    """Make the proofs of a request in their order; the last chunk may have fewer tokens, but not fewer than k values.

    Raises:
        InputError: see ``Rule.chunks`` and ``commit``; a last chunk of few tokens in a narrow model needs a smaller k.
    """
    return [commit(chunk, k, rule, scale, dtype) for chunk in rule.chunks(prefill, decode, every)]


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
        dtype: in which values are compared, a name in ``FORMATS``.

    Raises:
        InputError: limits that are no numbers, or under which no value has to agree.
    """

    exponents: int = 38
    mean: float = 10.0
    median: float = 8.0
    row: float = 0.25
    of: int = TOP
    dtype: str = DTYPE

    def __post_init__(self) -> None:
        format_of(self.dtype)
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


# TOPLOC, section 5.2. Those for float32 count in its 23 bits of mantissa.
PUBLISHED = {"bfloat16": Thresholds(), "float32": Thresholds(8, 256.0, 128.0, dtype="float32")}
BFLOAT16 = PUBLISHED[DTYPE]


@dataclass(frozen=True)
class Check:
    """The result of comparing one chunk; None is what was not measured.

    Attributes:
        accepted: whether the proof is believed. reason: why, or why not, in words.
        mismatches: values with another exponent or sign, or none at all; values that only one side has among its
            largest count too, as the polynomial is arbitrary at their places.
        sign_flips: those of them with the same exponent.
        mean, median: absolute difference of mantissas among the rest, in units of the last bit.
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

    Values are compared in the dtype of the limits. Those of a proof in another dtype are rounded to it, or padded with
    zero bits (TOPLOC, section 5.7).

    Args:
        chunk: the verifier's states.
        proof: if bytes, they are read here, and rejected where they are no proof.
        thresholds: limits.
        k, rule: number of values in a proof, and which ones, as agreed on.
        scale: the verifier's own.

    Raises:
        InputError: a chunk that cannot be checked (see ``commit``).
    """
    form = format_of(thresholds.dtype)
    indices, bits = _chosen(chunk, k, rule, scale, form)
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
    claimed = form.patterns(format_of(proof.dtype).numbers(proof.bits_at(indices))).astype(np.int64)
    return _judge(claimed, own, rows, thresholds, rule.by_row)


def _judge(
    claimed: Int64[np.ndarray, " k"],
    own: Int64[np.ndarray, " k"],
    rows: Int64[np.ndarray, " k"],
    limits: Thresholds,
    by_row: bool,
) -> Check:
    """Compare two lists of patterns, in the dtype of the limits, and decide whether they are within them.

    ``rows`` is the token of each pattern.
    """
    form = format_of(limits.dtype)
    # Zero has two patterns, and a recomputation need not keep its sign.
    zero = ((claimed | own) & form.magnitude) == 0
    changed = np.where(
        zero, 0, (claimed ^ own) >> form.mantissa_bits
    )  # eight bits of exponent, the sign above
    agree = changed == 0
    mismatches, flips = int((~agree).sum()), int((changed == 1 << 8).sum())
    taken, agreeing = np.bincount(rows), np.bincount(rows, agree)
    faulty = np.flatnonzero(agreeing < np.floor(limits.row * taken)) if by_row else rows[:0]
    if not agree.any():
        reason = f"none of {count_of(len(own), 'value')} agrees in exponent and sign"
        return Check(False, reason, mismatches, flips, faulty_rows=len(faulty))
    mask = (1 << form.mantissa_bits) - 1
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
