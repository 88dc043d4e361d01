"""Take positions out of queries and keys of known positions.

Rotary embedding multiplies each head's query or key at position p by the p-th power of one orthogonal matrix. The
model's own answers give this matrix: texts that begin one position later have the same states, turned once more. So
nothing has to be known of an architecture but the width of a head. No paper describes it.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hiddenlab.errors import InputError
from hiddenlab.models import Request, TruncatedModel

TURNED_ROWS = 2000  # rows of own text from which the matrix is computed
# Of rows' root mean square: below the first share nothing turns, above the second no one matrix turns all rows.
STILL, FAITHFUL = 1e-3, 2e-2


class Turning:
    """Undoes what a position does to rows.

    Args:
        back: undoes one position, head by head; None where positions do nothing that one matrix a head undoes.
    """

    def __init__(self, back: Float[Tensor, "heads d d"] | None = None) -> None:
        self._powers = [] if back is None else [back.double()]  # entry i undoes 2 ** i positions

    @classmethod
    def of(cls, model: TruncatedModel, windows: Sequence[Int[Tensor, " _"]]) -> "Turning":
        """Compute the matrix from texts that are run at two positions.

        Args:
            model: shows queries, keys or values, alone or side by side. windows: token ids of texts; the first ones of
                ``TURNED_ROWS`` rows in all are used.
        """
        used, rows = list[Tensor](), 0
        for window in windows:
            if rows >= TURNED_ROWS:
                break
            used.append(window)
            rows += len(window)
        try:
            before, behind = (
                torch.cat([answer.states for answer in answers]).double()
                for answers in (
                    model.run_all(
                        [Request(model.prefix(offset=start), window) for window in used], keep=False
                    )
                    for start in (0, 1)
                )
            )
        except InputError:  # the plain engine starts at the first position alone
            return cls()
        config = model.module.config.get_text_config()  # type: ignore[union-attr,operator]
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        width = before.shape[1]
        return cls() if width % head else cls.between(before, behind, width // head)

    @classmethod
    def between(
        cls, before: Float[Tensor, "rows w"], behind: Float[Tensor, "rows w"], heads: int
    ) -> "Turning":
        """Compute the orthogonal matrices that are nearest to taking rows to those one position later (Procrustes)."""
        before, behind = (rows.unflatten(1, (heads, -1)).transpose(0, 1) for rows in (before, behind))
        size = before.square().mean().sqrt()
        left, _, right = torch.linalg.svd(before.mT @ behind)
        turn = left @ right
        error = (before @ turn - behind).square().mean().sqrt()
        moved = (behind - before).square().mean().sqrt()
        if moved < STILL * size or error > FAITHFUL * size:
            return cls()
        return cls(turn.mT)

    @property
    def turns(self) -> bool:
        """Whether there is anything to undo."""
        return bool(self._powers)

    def undone(self, rows: Float[Tensor, "rows w"], places: Int[Tensor, " rows"]) -> Float[Tensor, "rows w"]:
        """Return rows as they would be at the first position.

        Args:
            places: the position of each.
        """
        if not self.turns:
            return rows
        places = places.to(rows.device)
        heads = rows.unflatten(1, (len(self._powers[0]), -1)).transpose(0, 1).clone()
        for bit in range(int(places.max()).bit_length()):
            if bit == len(self._powers):
                self._powers.append(self._powers[-1] @ self._powers[-1])
            chosen = (places >> bit) & 1 == 1
            heads[:, chosen] = heads[:, chosen] @ self._powers[bit].to(heads)
        return heads.transpose(0, 1).flatten(1)
