"""Say which secret linear map rows went through, and what of them such a map cannot change.

An orthogonal map of the columns, the same for all rows, keeps inner products of rows (their Gram matrix). One that is
drawn anew for every row keeps the rows' norms alone. A square map that mixes rows keeps the space that they span.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from hiddenlab.errors import InputError, NotApplicableError
from hiddenlab.row_facts import KEPT, ROW_SPACE, extra_rows
from hiddenlab.types import ObservationInfo
from hiddenlab.utils.schema import CLOSED, check

FACT = "secret_map"
Invariant = Literal["gram", "norms", "span"]
# What a map is of -> what it leaves. The order matters: of two maps of columns the later in this order is what remains.
LEAVES: dict[str, Invariant] = {"columns": "gram", "each-row": "norms", "rows": "span"}

# How near inner products, lengths or spaces are alike, as a share: rounding to bfloat16 leaves 1e-3. Noise moves inner
# products as far as it moves the rows: ``LESS`` of that is no noise. Rows count as changed that moved by ``MOVED`` of
# their length. A row whose cosine with itself is below ``ANOTHER`` is another row. A mixture in which less than
# ``OWN`` of a row is of the row itself hides which token it is of; smoothing leaves two thirds.
ALIKE, LESS, MOVED, ANOTHER, OWN = 0.01, 0.1, 0.1, 0.25, 1 / 3
FEWEST = 4  # rows; two have one inner product, which noise keeps by chance

TURNED = "turned_blocks"  # the fact that rows were hidden as KV-Cloak does


@dataclass(frozen=True)
class CloakedBlocks:
    """How rows of heads were hidden: pairs of coordinates turned, rows of a block mixed, drawn for each head.

    Attributes:
        heads: that stand side by side in a row. block: rows that were mixed at a time. offset: whether one row of each
            block has a secret offset.
    """

    __pydantic_config__ = CLOSED

    heads: Annotated[int, Field(ge=1)]
    block: Annotated[int, Field(ge=1)]
    offset: bool


def with_turned_blocks(info: ObservationInfo, blocks: CloakedBlocks) -> ObservationInfo:
    """Return public facts of rows whose coordinates were turned by pairs, and which were mixed by block."""
    mapped = with_map(with_map(info, "columns"), "rows")
    return replace(mapped, facts={**mapped.facts, TURNED: asdict(blocks)})


def turned_blocks(info: ObservationInfo) -> CloakedBlocks | None:
    """Return how rows were turned and mixed by block, None where they were not.

    Raises:
        InputError: the facts are malformed.
    """
    facts = info.facts.get(TURNED)
    return None if facts is None else check(facts, CloakedBlocks, f"the fact {TURNED}")


def with_map(info: ObservationInfo, of: str) -> ObservationInfo:
    """Return public facts with one more secret map.

    Args:
        of: what the map is of, a key of ``LEAVES``.
    """
    maps = sorted({*info.facts.get(FACT, ()), of}, key=list(LEAVES).index)
    return replace(info, facts={**info.facts, FACT: maps})


def map_between(before: Float[Tensor, "rows d"], after: Float[Tensor, "more k"]) -> str | None:
    """Return which map explains what became of rows, a key of ``LEAVES``; None where none does, or rows are too few.

    Behind noise or rounding of more than a fiftieth of a row none is seen.
    """
    rows, width = before.shape
    if after.shape != before.shape or not FEWEST <= rows <= width // 2:
        return None
    lengths, others = (states.double().norm(dim=1).clamp(min=1e-30) for states in (before, after))
    # Row by row: one attention sink may be a hundred times as long as other rows.
    before, after = before.double() / lengths[:, None], after.double() / others[:, None]
    moved = (after - before).norm(dim=1)
    if float(moved.median()) < MOVED:
        return None
    turned = (after @ after.T - before @ before.T).abs()
    if bool((turned <= ALIKE).all() and (turned <= LESS * moved.outer(moved)).all()):
        return "columns"
    cosine = float((before * after).sum(1).abs().median())
    if cosine < ANOTHER and bool(((others - lengths).abs() <= ALIKE * lengths).all()):
        return "each-row"
    mixture = after @ torch.linalg.pinv(before)
    back = before @ torch.linalg.pinv(after)
    if bool(
        ((after - mixture @ before).norm(dim=1) > ALIKE).any()
        or ((before - back @ after).norm(dim=1) > ALIKE).any()
    ):
        return None
    own = mixture.diagonal().square() / mixture.square().sum(1)
    return "rows" if float(own.median()) < OWN else None


def is_mapped(info: ObservationInfo) -> bool:
    """Return whether rows went through a secret map."""
    return FACT in info.facts


def mixes_rows(info: ObservationInfo) -> bool:
    """Return whether each released row is a mixture of rows, so that none is of one token."""
    return "rows" in info.facts.get(FACT, ())


def invariant_of(info: ObservationInfo) -> Invariant | None:
    """Return what the secret maps of an observation's rows leave, None where there is no map.

    Raises:
        InputError: the facts are malformed.
        NotApplicableError: no known invariant is left, or it cannot be compared with what else was done to the rows.
    """
    maps = info.facts.get(FACT)
    if maps is None:
        return None
    if isinstance(maps, str | Mapping) or not maps or not set(maps) <= set(LEAVES):
        raise InputError(f"the fact {FACT} lists some of {', '.join(LEAVES)}, not {maps!r}")
    if "rows" in maps and (len(set(maps)) > 1 or info.columns_permuted is not None):
        raise NotApplicableError(
            "rows are mixed and coordinates mapped as well: only singular values are left, and no attack reads them"
            if TURNED not in info.facts
            else "coordinates are turned by pairs, and rows mixed by block; take --attack turned-blocks"
        )
    if info.rows_permuted and "rows" not in maps:
        raise NotApplicableError("rows behind a secret map of their coordinates are read in order only")
    if extra_rows(info) and "rows" not in maps:
        raise NotApplicableError(
            "rows behind a secret map of their coordinates are read only where all are tokens'"
        )
    if info.positions is not None:
        raise NotApplicableError("rows behind a secret map are read only where every token has a row")
    if "projection" in info.facts:
        raise NotApplicableError("projections of mapped rows cannot be compared with a candidate's")
    if info.facts.keys() & {KEPT, ROW_SPACE}:
        raise NotApplicableError(
            "mapped rows that show only a part of each state cannot be compared with a candidate's"
        )
    if info.columns_permuted == "per-row":
        return "norms"
    return LEAVES[[of for of in LEAVES if of in maps][-1]]
