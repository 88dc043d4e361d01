"""Put rows of known texts before a prompt's, where both are behind the same turn of coordinates.

Such a turn keeps inner products. So each row shows its inner products with all rows of known states, from the first
token on.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from hiddenlab.matching.distance import Matcher
from hiddenlab.models import TruncatedModel
from hiddenlab.types import Observation

MOST = 64  # rows of known texts; each takes a number for every token of the vocabulary


def with_known(
    matcher: Matcher, observation: Observation, rows: Float[Tensor, "rows d"], model: TruncatedModel
) -> Matcher:
    """Return the matcher of an observation's first row, behind the rows of its known texts if these help."""
    if matcher.invariant != "gram" or not observation.known:
        return matcher.bound(rows)
    texts = [torch.tensor(known.tokens, device=model.device) for known in observation.known]
    plain = torch.cat([model.encode(text).float() for text in texts])[:MOST]
    shown = torch.cat([known.shown.states.to(rows) for known in observation.known])[:MOST]
    return matcher.bound(torch.cat([shown, rows])).behind(plain)
