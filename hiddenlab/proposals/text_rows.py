"""Hold states of the attacker's own running text, on which proposals are calibrated."""

from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True)
class TextRows:
    """States of windows of running text, as a channel releases them, and their tokens."""

    states: Float[Tensor, "windows n d"]
    tokens: Int[Tensor, "windows n"]
