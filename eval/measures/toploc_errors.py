"""Measure how far a provider's largest values are from a verifier's, by their number and by place (TOPLOC)."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64, UInt16

from hiddenlab.defenses.verification.causal_lm import load_whole
from hiddenlab.defenses.verification.formats import FORMATS
from hiddenlab.defenses.verification.polynomials import LEAST_MODULUS, PRIME
from hiddenlab.defenses.verification.rules import EVERY
from hiddenlab.defenses.verification.toploc import TOP
from hiddenlab.errors import InputError
from hiddenlab.eval.cells import Figures
from hiddenlab.eval.measures.answers import answered
from hiddenlab.eval.measures.attack import as_figures, exactly
from hiddenlab.eval.measures.intervals import ratio, share
from hiddenlab.types import Progress, silent

BANDS = {
    "same": 0,
    "one": 1,
    "two": 2,
    "more": 3,
    "cancelled": 101,
}  # the least difference of exponents in each
UNITS = {"1 token": 1, f"{EVERY} tokens": EVERY}
BOTH = ", on both sides"
_MANTISSAS = 128
_FORM = FORMATS["bfloat16"]
_BLOCK = 20_000  # index sets that are drawn at a time


@dataclass(frozen=True)
class View:
    """A comparison of some of the verifier's values with the provider's at the same places.

    Attributes:
        bands: how many differ by how much in the exponent, by ``BANDS``.
        mantissas: how many differ by 0 to 127 in the mantissa, of those that agree in exponent and sign.
        lacking: how many of the verifier's k largest are not among the provider's; None in a view that leaves them out.
    """

    bands: Int64[np.ndarray, " bands"]
    mantissas: Int64[np.ndarray, " differences"]
    lacking: int | None


def counts(size: int) -> list[int]:
    """Return the numbers of largest values that are looked at: 8, 32, 128 … and all."""
    steps = [8 * 4**step for step in range(16)]
    return [*(k for k in steps if k < size), size]


def place_of(token: int) -> str:
    """Return the span of places that a token of the answer (from 1) belongs to; each is as long as all before it."""
    end = EVERY
    while token > end:
        end *= 2
    return f"tokens {1 if end == EVERY else end // 2 + 1} to {end}"


def views(
    sent: UInt16[np.ndarray, " n"], own: UInt16[np.ndarray, " n"], place: str
) -> Iterator[tuple[str, View]]:
    """Compare two sets of bfloat16 patterns; yield each view with its label.

    Args:
        sent, own: the provider's and the verifier's values of the same tokens, at the same places.
        place: label of the tokens' place; its view is of the 128 largest values (TOPLOC, figure 2).

    Returns:
        For each k the verifier's k largest values (TOPLOC, table 1), and those of them that are among the provider's k
        largest too (table 7).
    """
    order = np.argsort(-(own & _FORM.magnitude).astype(np.int64), kind="stable")
    rank = np.empty(len(own), dtype=np.int64)
    rank[np.argsort(-(sent & _FORM.magnitude).astype(np.int64), kind="stable")] = np.arange(len(own))
    there = rank[order]
    mine, theirs = own[order].astype(np.int64), sent[order].astype(np.int64)
    band = np.digitize(np.abs((mine >> 7 & 0xFF) - (theirs >> 7 & 0xFF)), list(BANDS.values())) - 1
    agree, mantissa = mine >> 7 == theirs >> 7, np.abs((mine & 0x7F) - (theirs & 0x7F))

    def view(taken: np.ndarray, lacking: int | None) -> View:
        differences = mantissa[taken[agree[taken]]]
        return View(
            np.bincount(band[taken], minlength=len(BANDS)),
            np.bincount(differences, minlength=_MANTISSAS),
            lacking,
        )

    for k in counts(len(own)):
        common = np.flatnonzero(there[:k] < k)
        everything = view(np.arange(k), k - len(common))
        yield f"top {k}", everything
        yield f"top {k}{BOTH}", view(common, None)
        if k == TOP:
            yield place, everything


def errors(spec: dict[str, Any], folder: Path, progress: Progress = silent) -> Figures:
    """Measure exponents, mantissas and places of the largest values of the answer's final states against a prefill.

    Args:
        spec: as ``answers.answered``.

    Returns:
        ``UNIT|LABEL|NAME``, with names of ``BANDS`` (shares of the values compared), ``mantissa`` and
        ``mantissa_median`` (in units of the last bit), ``lacking``, ``lacking_median`` and ``lacking_most`` (shares of
        k, over units).
    """
    answers = answered(spec, folder.parent.parent, progress)
    verifier = load_whole(spec["model"], dtype=spec["dtype"], device=spec["device"])
    seen = defaultdict[tuple[str, str], list[list[View]]](list)  # by unit and label; a list for each request
    for number, transcript in enumerate(answers.transcripts):
        states, _ = verifier.prefill((*transcript.prompt, *transcript.output), 0)
        own = _FORM.patterns(states[len(transcript.prompt) - 1 : -1])
        sent = _FORM.patterns(answers.outputs[number])
        for unit, size in UNITS.items():
            of_request = defaultdict[str, list[View]](list)
            for start in range(0, len(own) // size * size, size):
                rows = slice(start, start + size)
                for label, view in views(sent[rows].ravel(), own[rows].ravel(), place_of(start + 1)):
                    of_request[label].append(view)
            for label, found in of_request.items():
                seen[unit, label].append(found)
        progress("requests compared", number + 1, len(answers.transcripts))
    figures: Figures = {}
    for (unit, label), by_request in seen.items():
        found_figures = summary(by_request)
        figures |= {f"{unit}|{label}|{name}": figure for name, figure in found_figures.items()}
    return figures


def summary(by_request: Sequence[Sequence[View]]) -> Figures:
    """Return the figures of one label's views; what nothing was compared for is left out."""
    bands = np.array([sum(view.bands for view in views) for views in by_request])
    mantissas = np.array([sum(view.mantissas for view in views) for views in by_request])
    figures: Figures = {}
    compared = bands.sum(1)
    if compared.all():
        estimates = {name: ratio(bands[:, i].tolist(), compared.tolist()) for i, name in enumerate(BANDS)}
        figures |= as_figures(estimates)
    if (agreeing := mantissas.sum(1)).all():
        total = mantissas @ np.arange(_MANTISSAS)
        figures |= as_figures({"mantissa": ratio(total.tolist(), agreeing.tolist())})
        pooled = np.repeat(np.arange(_MANTISSAS), mantissas.sum(0))
        figures["mantissa_median"] = exactly(float(np.median(pooled)), len(pooled))
    lacking = [
        [(view.lacking, int(view.bands.sum())) for view in views if view.lacking is not None]
        for views in by_request
    ]
    if all(lacking):
        sums = np.array(lacking).sum(1)
        figures |= as_figures({"lacking": ratio(sums[:, 0].tolist(), sums[:, 1].tolist())})
        shares = [count / k for views in lacking for count, k in views]
        figures["lacking_median"] = exactly(float(np.median(shares)), len(shares))
        figures["lacking_most"] = exactly(max(shares), len(shares))
    return figures


def moduli(spec: dict[str, Any], folder: Path, progress: Progress = silent) -> Figures:
    """Count the moduli that Algorithm 6 returns for random sets of indices (TOPLOC, table 11).

    Args:
        spec: sets: how many; values: indices in each, drawn uniformly from those of 32 bits; seed.

    Returns:
        For each modulus that was returned ``share_M``, and ``expected_M``: the share to be expected if every modulus
        keeps the indices apart by a chance of its own.

    Raises:
        InputError: no sets or no values, or a set for which there is no modulus.
    """
    sets, values = int(spec["sets"]), int(spec["values"])
    if not 1 <= values <= LEAST_MODULUS or sets < 1:
        raise InputError(f"{sets} sets of {values} indices: at least one of 1 to {LEAST_MODULUS}")
    draws = np.random.default_rng(spec["seed"])
    returned = dict[int, int]()
    for start in range(0, sets, _BLOCK):
        left = draws.integers(0, 2**31, (min(_BLOCK, sets - start), values))
        # Two equal indices make no set; no modulus would keep them apart.
        while (twice := ~_apart(left)).any():
            left[twice] = draws.integers(0, 2**31, (int(twice.sum()), values))
        for modulus in range(PRIME, LEAST_MODULUS - 1, -1):
            apart = _apart(left % modulus)
            if found := int(apart.sum()):
                returned[modulus] = returned.get(modulus, 0) + found
            left = left[~apart]
            if not len(left):
                break
        else:
            raise InputError(f"no modulus keeps {values} random indices apart; take fewer")
        progress("sets", start + _BLOCK, sets)
    figures: Figures = {}
    for modulus in sorted(returned, reverse=True):
        hits = returned[modulus]
        figures |= as_figures({f"share_{modulus}": share([True] * hits + [False] * (sets - hits))})
        figures[f"expected_{modulus}"] = exactly(expected_share(modulus, values), sets)
    return figures


def _apart(indices: Int64[np.ndarray, "sets k"]) -> np.ndarray:
    """Return for each set whether all its numbers are different."""
    return (np.diff(np.sort(indices, 1), axis=1) != 0).all(1)


def expected_share(modulus: int, values: int) -> float:
    """Return the chance that the search ends at a modulus, if each keeps random indices apart independently.

    One modulus m keeps k indices apart by the chance (1 − 1/m)(1 − 2/m) … (1 − (k−1)/m).
    """
    places = np.arange(values)
    chances = [float(np.prod(1 - places / m)) for m in range(PRIME, modulus - 1, -1)]
    missed = float(np.prod([1 - chance for chance in chances[:-1]]))
    return missed * chances[-1]
