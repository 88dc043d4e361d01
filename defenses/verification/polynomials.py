"""Compute with polynomials modulo a prime, and find the modulus that keeps indices apart (TOPLOC, Algorithms 3 to 6).

The prime 65497 is that of the published implementation, for values of 16 bits. Primes up to 32 bits are possible:
products of two residues then fit 64 bits without a sign.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
from jaxtyping import Int64, UInt64

from hiddenlab.errors import InputError

PRIME = 65497
LEAST_MODULUS = 2**15 + 1  # where the search of Algorithm 6 ends
_TABLED = 2**16  # below this the inverses of all residues are kept


@cache
def _table(prime: int) -> UInt64[np.ndarray, " prime"]:
    """Return the inverse of every residue modulo a prime; 0, which has none, stands for itself."""
    return np.array([0, *(pow(residue, -1, prime) for residue in range(1, prime))], dtype=np.uint64)


def _inverses(residues: UInt64[np.ndarray, " n"], prime: int) -> UInt64[np.ndarray, " n"]:
    """Return the inverses of residues other than 0 (TOPLOC, Algorithm 4)."""
    if prime < _TABLED:
        return _table(prime)[residues]
    return np.array([pow(residue, -1, prime) for residue in residues.tolist()], dtype=np.uint64)


def interpolate(
    x: Int64[np.ndarray, " k"], y: Int64[np.ndarray, " k"], prime: int = PRIME
) -> Int64[np.ndarray, " k"]:
    """Return the polynomial of degree below k through k points, by Newton's divided differences (TOPLOC, Algorithm 3).

    Args:
        x: places, distinct modulo the prime. y: values, which count modulo the prime. prime: below 2^32.

    Returns:
        Coefficients, ascending degree.

    Raises:
        InputError: no points, or two at one place.
    """
    x = (x % prime).astype(np.uint64)
    if not len(x) or len(np.unique(x)) < len(x):
        raise InputError("a polynomial needs points, each at a place of its own modulo the prime")
    differences = (y % prime).astype(np.uint64)
    for step in range(1, len(x)):
        denominators = _inverses((x[step:] + prime - x[:-step]) % prime, prime)
        apart = (differences[step:] + prime - differences[step - 1 : -1]) % prime
        differences[step:] = apart * denominators % prime
    coefficients = np.zeros_like(differences)
    for place, difference in zip(x[::-1].tolist(), differences[::-1].tolist(), strict=True):
        carried = coefficients * (prime - place) % prime
        carried[1:] += coefficients[:-1]
        carried[0] += difference
        coefficients = carried % prime
    return coefficients.astype(np.int64)


def evaluate(
    coefficients: Sequence[int], x: Int64[np.ndarray, " points"], prime: int = PRIME
) -> Int64[np.ndarray, " points"]:
    """Evaluate a polynomial at many places, by Horner's rule modulo the prime (TOPLOC, Algorithm 5).

    Coefficients come in ascending degree.
    """
    places = (x % prime).astype(np.uint64)
    values = np.zeros_like(places)
    for coefficient in reversed(coefficients):
        values *= places
        values += coefficient
        values %= prime
    return values.astype(np.int64)


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
