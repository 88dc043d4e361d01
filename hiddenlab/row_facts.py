"""Say what is public of released rows: noise on them, rows that are no token's, what of each state they show."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hiddenlab.errors import InputError
from hiddenlab.types import ObservationInfo

NOISE = "output_noise"  # a list: of each stage that adds noise to the rows, with its strength
EXTRA = "extra_rows"  # how many of the rows are no token's
ROW_SPACE = (
    "row_space"  # rows were projected to a space of at most so many dimensions; null where that is not told
)

KEPT = "kept_share"  # only this share of each row's numbers is not zero


def with_noise(info: ObservationInfo, **drawn: Any) -> ObservationInfo:
    """Return public facts with one more noise on the rows: its standard deviation, unit and kind."""
    return replace(info, facts={**info.facts, NOISE: [*info.facts.get(NOISE, ()), drawn]})


def with_extra_rows(info: ObservationInfo, count: int) -> ObservationInfo:
    """Return public facts of rows among which there are some more that are no token's."""
    kept = {name: value for name, value in info.facts.items() if name != ROW_SPACE}
    return replace(info, facts={**kept, EXTRA: extra_rows(info) + count})


def with_row_space(info: ObservationInfo, rank: int | None) -> ObservationInfo:
    """Return public facts of rows that were projected to a space which they span themselves.

    Args:
        rank: dimensions of the space at most, None where only the rows tell.
    """
    return replace(info, facts={**info.facts, ROW_SPACE: rank})


def with_kept_share(info: ObservationInfo, share: float) -> ObservationInfo:
    """Return public facts of rows of which only the largest numbers are left."""
    kept = {name: value for name, value in info.facts.items() if name != ROW_SPACE}
    return replace(info, facts={**kept, KEPT: min(share, info.facts.get(KEPT, 1.0))})


def kept_share(info: ObservationInfo) -> float | None:
    """Return which share of each row's numbers is left, None where all are.

    Raises:
        InputError: the fact is no share.
    """
    share = info.facts.get(KEPT)
    if share is not None and (not isinstance(share, int | float) or not 0 < share <= 1):
        raise InputError(f"the fact {KEPT} is a share above 0 and up to 1, not {share!r}")
    return share


def extra_rows(info: ObservationInfo) -> int:
    """Return how many of the rows are no token's.

    Raises:
        InputError: the fact is no number of rows.
    """
    count = info.facts.get(EXTRA, 0)
    if not isinstance(count, int) or isinstance(count, bool) or count < 0:
        raise InputError(f"the fact {EXTRA} is a number of rows, not {count!r}")
    return count


def lies_in_row_space(info: ObservationInfo) -> bool:
    """Return whether rows are tokens' states projected to the space that the rows span, coordinate by coordinate."""
    return ROW_SPACE in info.facts and info.columns_permuted is None and "projection" not in info.facts


def rank_of(facts: Mapping[str, Any]) -> int | None:
    """Return the most dimensions of the space that rows were projected to, None where only the rows tell.

    Raises:
        InputError: the fact is no number of dimensions.
    """
    rank = facts.get(ROW_SPACE)
    if rank is not None and (not isinstance(rank, int) or isinstance(rank, bool) or rank < 1):
        raise InputError(f"the fact {ROW_SPACE} is a number of dimensions or null, not {rank!r}")
    return rank
