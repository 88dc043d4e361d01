"""Say in which order tokens are tried where one is tested after another, by a table of states and a language model."""

from collections.abc import Iterator

from jaxtyping import Float, Int
from torch import Tensor

TEXT = 16  # tokens of own text behind which the vocabulary's states are tabulated: nearly those behind any others
WEIGHT = 2.0  # of a standard deviation nearer to what is looked for, beside a nat of the language model's
CHUNKS = (16, 64, 512, 4096)  # candidates that are run at once, before all others


def nearness(left: Float[Tensor, " v"]) -> Float[Tensor, " v"]:
    """Return how near tokens come to what is looked for, in weighted nats.

    Args:
        left: what a test of tabulated states leaves unexplained.
    """
    return WEIGHT * (left.mean() - left) / left.std().clamp(min=1e-12)


def likeliest(near: Float[Tensor, " v"], said: Float[Tensor, " more"] | None) -> Int[Tensor, " v"]:
    """Return the vocabulary, the likeliest tokens first.

    Args:
        near: see ``nearness``. said: the language model's log-probabilities, where there are any.
    """
    return (near if said is None else near + said[: len(near)].to(near)).argsort(descending=True)


def in_chunks(order: Int[Tensor, " c"]) -> Iterator[Int[Tensor, " some"]]:
    """Yield the first tokens in growing chunks, and then all others."""
    start = 0
    for size in (*CHUNKS, len(order)):
        if start < len(order):
            yield order[start : start + size]
        start += size
