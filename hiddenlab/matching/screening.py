"""Run large batches of candidates in a faster dtype first, and only the near ones in the model itself.

A processor that multiplies bfloat16 natively runs candidates three to four times as fast as in float32
(docs/log/012-prompts-from-fingerprints.md). The screen's distance never decides: a candidate counts as matched only
after the truncated model itself ran it. Vocabulary matching gives up a position only after the model ran all of its
candidates. The search for missing tokens has too many sequences for that: it runs those in the model that are nearer
than the rounding seen so far.
"""

from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hiddenlab.models import Prefix, TruncatedModel
from hiddenlab.proposals.probe import fast_dtype
from hiddenlab.utils.clock import Rental

FEWEST = 16  # candidates in a batch at least for two passes to be cheaper than one
# Candidates in such batches before the screen is loaded: loading takes about as long as running them in the model.
# Where every prompt needs the screen it is loaded at once (``Screen.load``).
LOAD_AFTER = 4096
LEAST_LAYERS = 4  # with fewer layers, sorting and comparing states costs as much as running them
# The truncated model runs screened candidates nearer than this share of the median, and at least one in so many.
NEAR, ONE_IN, AT_LEAST = 0.5, 32, 2


class Screen:
    """The truncated model in a faster dtype, loaded when it is first needed.

    Attributes:
        of: the truncated model itself.
    """

    def __init__(self, model: TruncatedModel) -> None:
        self.of = model
        self._rental = Rental(LOAD_AFTER + 1.0)

    @staticmethod
    def pays(model: TruncatedModel) -> bool:
        """Return whether a faster dtype exists and the model is deep enough, not quantized and on one device."""
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
        """Whether the faster model was loaded already."""
        return "model" in vars(self)

    def runs(self, batch: int) -> bool:
        """Return whether a batch of so many candidates is screened."""
        return batch >= FEWEST and self._rental.due(float(batch))

    def load(self) -> None:
        """Load the faster model now, and screen every large batch from the first one on."""
        self._rental = Rental(0.0)
        _ = self.model

    def reset(self) -> None:
        """Screen batches again only after ``LOAD_AFTER`` candidates, unless ``load`` was called."""
        self._rental.restart()

    def follow(self, prefix: Prefix, shadow: Prefix | None = None) -> Prefix:
        """Return the screen's form of a prefix: exact keys and values, rounded; ``shadow`` is the last such form."""
        shadow = shadow or self.model.prefix(offset=prefix.offset)
        shadow.follow(prefix)
        return shadow


def near_ones(relative: Float[Tensor, " c"]) -> Int[Tensor, " n"]:
    """Return the indices of a screened batch's candidates that the truncated model itself runs, nearest first.

    Args:
        relative: distance of each to its nearest row, in units of that row's limit.
    """
    near = int((relative < NEAR * relative.median()).sum())
    return relative.argsort()[: max(near, AT_LEAST, len(relative) // ONE_IN)]


def counted(model: TruncatedModel, screen: Screen | None) -> tuple[int, int]:
    """Return the positions and passes that ran so far, in the truncated model and in its screen."""
    engines = [model, *([screen.model] if screen is not None and screen.loaded else [])]
    return sum(engine.evaluated_tokens for engine in engines), sum(engine.forward_calls for engine in engines)
