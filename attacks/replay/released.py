"""Compare candidates by releasing texts with each of them in place through the defense."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hiddenlab.attacks.replay.own_texts import OwnTexts


@dataclass(frozen=True)
class Replayed:
    """Releases of the tokens found, a candidate, and an own text behind it up to the prompt's length.

    What a defense draws may depend on how many rows there are, so no shorter text will do.
    """

    own: OwnTexts
    rows: Float[Tensor, "more d"]
    places: Sequence[int]
    limits: Float[Tensor, " n"]

    @classmethod
    def of(cls, own: OwnTexts, rows: Float[Tensor, "more d"]) -> "Replayed":
        """Return the comparison with observed rows.

        Raises:
            NotApplicableError: rows depend on later tokens, so that no prefix of a prompt can be compared.
        """
        places, limits = own.places
        return cls(own, rows, places, limits)

    def cost(self, candidates: int) -> int:
        return candidates * self.own.length

    def distances(self, found: list[int], candidates: Int[Tensor, " c"]) -> Float[Tensor, " c"]:
        behind = self.own.text[len(found) + 1 :]
        before, row = torch.tensor(found, dtype=torch.long), self.places[len(found)]
        texts = [torch.cat([before, one[None], behind]) for one in candidates.cpu()]
        most = max(1, self.own.model.max_pass_tokens // self.own.length)
        apart = list[Tensor]()
        for start in range(0, len(texts), most):  # not all released rows at once: they are kept whole
            shown = self.own.release(texts[start : start + most])
            apart.append(torch.stack([one[row] for one in shown]))
        return (torch.cat(apart) - self.rows[row]).norm(dim=1)
