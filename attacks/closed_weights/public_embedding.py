"""Read users of a model with secret, permuted weights by the embedding of a public model (paper, appendix I.2)."""

import time

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hiddenlab.attacks.closed_weights.order import likeliest_order, match_sorted, nearest
from hiddenlab.base import Attack
from hiddenlab.errors import InputError, NotApplicableError
from hiddenlab.types import AttackResult, Observation, TokenPrediction

ORDER_ROUNDS = 20
EXACT = 1e-5  # of a vector's norm: a match up to float rounding


class ClosedWeights(Attack):
    """Recover tokens from the embeddings that users send to a server with secret, permuted weights (STIP, Centaur).

    The coordinates of all rows are in one secret order. Rows are matched by their sorted values first. Where these are
    not the table's own, because the secret model was tuned from the public one, the order is estimated from the first
    guesses and tokens are guessed again in that order, and so on: few right guesses are enough. Rows of several
    requests may be one observation; more rows show the order better. (Paper, appendix I.2; the estimated order is our
    own.) A token is verified where the row is the token's own vector in another order, and no other token's.

    Knows: the embedding table of a public model, the rows. Does not know: the secret weights, orders, tokens.

    Args:
        step: distance between the fixed-point numbers that rows were rounded to; 0 where they were not.
    """

    use_when = (
        "the coordinates of input embeddings (layer 0) are in one secret order, as a STIP server sees them"
    )

    def __init__(self, step: float = 0.0) -> None:
        if not 0 <= step < 1:
            raise InputError(f"the step of fixed-point numbers is between 0 and 1, not {step:g}")
        self.step = step

    def _recover(self, observation: Observation) -> AttackResult:
        """Recover the token of each row, in the order of the rows.

        Raises:
            NotApplicableError: rows of another site than the embeddings, or an order of its own for every row.
        """
        info, model = observation.info, self.model
        if info.site.stream != "embed":
            raise NotApplicableError(
                f"closed-weights reads embeddings (--layer 0 --stream embed), not {info.site}"
            )
        if info.columns_permuted == "per-row":
            raise NotApplicableError("closed-weights needs one order of coordinates for all rows")
        started = time.perf_counter()
        table = model.embed(torch.arange(model.vocab_size, device=model.device)).float().cpu()
        rows = observation.states.float().cpu()
        limit = EXACT * torch.linalg.vector_norm(rows, dim=1) + self.step * rows.shape[1] ** 0.5
        tokens, distance, margin = match_sorted(rows, table)
        if bool((distance > limit).any()):  # not these very vectors: find their order
            tokens, distance, margin = _in_one_order(rows, table, tokens)
        verified = (distance <= limit) & (distance + margin > limit)
        predictions = tuple(
            TokenPrediction(
                int(token), row, float(distance[row]), float(margin[row]), len(table), bool(verified[row])
            )
            for row, token in enumerate(tokens)
        )
        seconds = time.perf_counter() - started
        return AttackResult(predictions, 0, 0, seconds, "complete", positions=info.positions)

    def __repr__(self) -> str:
        return "ClosedWeights: knows a public model's embedding table and the rows; never runs a model"


def _in_one_order(
    rows: Float[Tensor, "rows d"], table: Float[Tensor, "v d"], tokens: Int[Tensor, " rows"]
) -> tuple[Int[Tensor, " rows"], Float[Tensor, " rows"], Float[Tensor, " rows"]]:
    """Guess tokens and the one order of coordinates in turns, until the guesses do not change."""
    centre = table.mean(0)
    for _ in range(ORDER_ROUNDS):
        order = likeliest_order(rows, table[tokens] - centre)
        before = tokens
        tokens, distance, margin = nearest(rows, table[:, order])
        if torch.equal(tokens, before):
            break
    return tokens, distance, margin
