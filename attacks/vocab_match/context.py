"""Say which matched tokens are confirmed where some of the rows are no token's."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from hiddenlab.models import TruncatedModel
from hiddenlab.types import TokenPrediction


def confirmed_by_context(
    tokens: Sequence[TokenPrediction], extra: int, model: TruncatedModel
) -> tuple[TokenPrediction, ...]:
    """Return the tokens; mark as unverified those that a row of another text gives as well.

    A decoy may be a state of another text. So a matched row shows that its token stands in the prompt only where it
    is computed in the context of the others: never where states do not depend on context, and for a first token only
    where the second one, which is found in its context, is verified.

    Args:
        extra: rows that are no token's; without any all tokens stay as they are.
    """
    if not extra or not tokens:
        return tuple(tokens)
    if not depends_on_context(model):
        return tuple(replace(token, verified=False) for token in tokens)
    first, *others = tokens
    return replace(first, verified=first.verified and any(o.verified for o in others[:1])), *others


@torch.inference_mode()
def depends_on_context(model: TruncatedModel) -> bool:
    """Return whether a token's state depends on the token before it."""
    ids = torch.tensor([[0, 1], [min(2, model.vocab_size - 1), 1]])
    one, other = (model.encode(text)[-1] for text in ids)
    return not torch.equal(one, other)
