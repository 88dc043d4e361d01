"""Tell whether rows come from the same weights in another dtype or quantization, or from other weights."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
from jaxtyping import Float
from torch import Tensor

from hiddenlab.diagnosis.evidence import Chain, distances_of
from hiddenlab.diagnosis.hypotheses import Layout
from hiddenlab.diagnosis.places import Place
from hiddenlab.errors import HiddenlabError
from hiddenlab.models import TruncatedModel
from hiddenlab.types import DTYPE_NAMES, QUANTIZATIONS

CLEARER = 2.0  # a form of the model is named where its states are so many times nearer to the rows
# A dtype is named where every number is one of it and the model's states in it are within so much of the rows' length.
# They are no nearer than others where another attention function rounds otherwise than ours.
ROUNDED = 0.05


def other_numbers(model: TruncatedModel, place: Place, layout: Layout, chain: Chain, distance: float) -> str:
    """Return the form of the model whose vectors are the rows, such as ``bfloat16``; empty where none is.

    Args:
        chain: tokens that explain some of the rows. distance: of those rows to the model's own vectors.
    """
    own = str(model.dtype).removeprefix("torch.")
    forms: list[dict[str, str]] = [{"dtype": name} for name in DTYPE_NAMES if name != own]
    forms += [{"quantization": name} for name in QUANTIZATIONS]
    coarse = _coarsest(layout.rows[chain.start : chain.start + len(chain.tokens)])
    best, name = distance / CLEARER, ""
    for form in forms:
        with suppress(HiddenlabError, ImportError), _silence():
            other, kind = (
                model.sibling(None, stream="resid", engine="plain", **form),
                next(iter(form.values())),
            )
            there = distances_of(other, chain, [layout]).get((place, layout))
            del other
            if there is None:
                continue
            if kind == coarse and float(there.median()) <= ROUNDED:
                return kind
            if float(there.median()) < best:
                best, name = float(there.median()), kind
    return name


def _coarsest(rows: Float[Tensor, "n w"]) -> str:
    """Return the coarsest floating-point dtype that all numbers are exact in; empty for float32."""
    rows = rows.float()
    for name in ("bfloat16", "float16"):
        if torch.equal(rows.to(getattr(torch, name)).float(), rows):
            return name
    return ""


@contextmanager
def _silence() -> Iterator[None]:
    """Keep notes of quantization libraries off the terminal; that one is missing is no fault of the rows."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(logging.NOTSET)
