"""Screening: large batches of candidates run in a faster dtype first, and only the near ones in the model itself.

A processor that multiplies bfloat16 natively runs candidates three to four times as fast as in float32
(docs/log/012-prompts-from-fingerprints.md).
What decides is never the screen's distance: a candidate counts as matched only after the truncated model itself ran it.
Vocabulary matching calls a position searched in vain only after the model ran all of its candidates; the search for
missing tokens, whose sequences are too many for that, runs those in the model that are nearer than the rounding seen
so far.
"""

from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hiddenlab.models import Prefix, TruncatedModel
from hiddenlab.proposals.probe import fast_dtype

FEWEST = 16  # candidates in a batch from which two passes are cheaper than one
# Candidates in such batches after which it is loaded, which takes about as long as running them in the model; at once
# where every prompt will need it.
LOAD_AFTER = 4096
LEAST_LAYERS = 4  # below, sorting and comparing states costs as much as running them
# Of a screened batch the truncated model runs those nearer than so much of the median, and in any case one in so many.
NEAR, ONE_IN, AT_LEAST = 0.5, 32, 2


class Screen:
    """The truncated model in a faster dtype, loaded when it is first asked for.

    Attributes:
        of: the truncated model itself.
    """

    def __init__(self, model: TruncatedModel) -> None:
        self.of = model
        self._wanted = 0

    @staticmethod
    def pays(model: TruncatedModel) -> bool:
        """Whether a faster dtype exists, and the truncated model is deep and whole enough for it to matter."""
        fast = fast_dtype(model.device)
        return (
            torch.finfo(fast).bits < torch.finfo(model.dtype).bits
            and model.site.layer >= LEAST_LAYERS
            and model.quantization is None
            and not model.divided
        )

    @cached_property
    def model(self) -> TruncatedModel:
        dtype = str(fast_dtype(self.of.device)).removeprefix("torch.")
        return self.of.sibling(self.of.site.layer, stream=self.of.site.stream, dtype=dtype)

    @property
    def loaded(self) -> bool:
        """Whether it was asked for yet."""
        return "model" in vars(self)

    def runs(self, batch: int) -> bool:
        """Whether a batch of so many candidates is to be screened."""
        if batch < FEWEST:
            return False
        self._wanted += batch
        return self.loaded or self._wanted > LOAD_AFTER

    def follow(self, prefix: Prefix, shadow: Prefix | None = None) -> Prefix:
        """The screen's form of a prefix: the exact keys and values, rounded; ``shadow`` is the last such form."""
        shadow = shadow or self.model.prefix(offset=prefix.offset)
        shadow.store.follow(prefix.store, self.model.dtype)
        return shadow


def near_ones(relative: Float[Tensor, " c"]) -> Int[Tensor, " n"]:
    """Places of a screened batch's candidates that the truncated model itself is to run, nearest first.

    Args:
        relative: distance of each to its nearest row, in units of that row's limit.
    """
    near = int((relative < NEAR * relative.median()).sum())
    return relative.argsort()[: max(near, AT_LEAST, len(relative) // ONE_IN)]


def counted(model: TruncatedModel, screen: Screen | None) -> tuple[int, int]:
    """Positions and passes that ran so far, in the truncated model and in its screen."""
    engines = [model, *([screen.model] if screen is not None and screen.loaded else [])]
    return sum(one.evaluated_tokens for one in engines), sum(one.forward_calls for one in engines)
