"""Search a prompt's tokens as the paper prints it: Algorithms 1, 4, 5 and 6 of Hidden No More, without additions.

At each position candidates are tried in the order of the proposal. The first one within epsilon of a row is taken, and
that row is used up. Where none is, the nearest of all candidates is taken with its nearest row. The matcher decides
between Algorithms 1 and 5 or 4 and 6 (sorted coordinates), the targets between 1 and 4 or 5 and 6 (rows in order).
"""

from collections.abc import Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hiddenlab.attacks.vocab_match.task import FIRST_BATCH, Task, larger_batch
from hiddenlab.matching.batching import ForwardCall, Search
from hiddenlab.models import Answer, Request
from hiddenlab.types import TokenPrediction


def as_printed(task: Task) -> Search:
    """Search one position after the other, to the end of the vocabulary or of the budget."""
    while len(task.found) < task.count:
        next_token = None if task.lm is None else (yield from task.lm.next_token(task.tokens))
        yield from _search_position(task, in_proposal_order(task, next_token))


def in_proposal_order(task: Task, next_token: Float[Tensor, " v"] | None) -> Int[Tensor, " v"]:
    """Return all tokens, the likeliest first; equally likely ones by their ids.

    The paper does not say what its language model proposes for the first token; see ``LazyModel.first``.
    """
    scores = task.proposer.scores(task.of_rows(task.targets()), next_token)
    return scores.argsort(descending=True, stable=True).to(task.rows.device)[: task.budget]


def batches_of(order: Int[Tensor, " v"]) -> Iterator[Int[Tensor, " c"]]:
    """Yield the candidates in order, in batches that grow; what stands behind a match in its batch runs in vain."""
    tried, size = 0, FIRST_BATCH
    while tried < len(order):
        yield order[tried : tried + size]
        tried += size
        size = larger_batch(size, tried)


def first_within(
    table: Float[Tensor, "c targets"], limits: Float[Tensor, " targets"]
) -> tuple[int, int] | None:
    """Return the first candidate below the limit of a row, and the first such row; None where there is none."""
    hits = (table < limits).flatten().nonzero()
    return None if len(hits) == 0 else divmod(int(hits[0, 0]), table.shape[1])


def nearest_of(table: Float[Tensor, "c targets"]) -> tuple[int, int]:
    """Return the first candidate with the least distance to any row, and that row."""
    return divmod(int(table.flatten().argmin()), table.shape[1])


def _search_position(task: Task, order: Int[Tensor, " v"]) -> Search:
    """Search one position and commit what it took."""
    targets = list(task.targets())
    observed, limits = task.rows[targets], task.limits[targets]
    nearest: tuple[float, int, int] | None = None  # distance, token, target
    near: list[tuple[float, int]] = []  # distance and token of the two candidates that came nearest to a row
    tried = 0
    for batch in batches_of(order):
        answer: Answer = yield ForwardCall(task.model, Request(task.prefix, batch[:0], branches=batch))
        table = task.matcher.table(candidates=task.matcher.view(answer.branches), observed=observed)
        two = table.amin(1).topk(min(2, len(batch)), largest=False)
        near = sorted([*near, *zip(two.values.tolist(), batch[two.indices].tolist(), strict=True)])[:2]
        hit = first_within(table, limits)
        place, target = hit or nearest_of(table)
        distance, token = float(table[place, target]), int(batch[place])
        if hit is not None or nearest is None or distance < nearest[0]:
            nearest = distance, token, target
        if hit is not None:
            tried += place + 1  # what stands behind it in the batch is no candidate of the algorithm
            task.keep(answer, branch=place)
            break
        tried += len(batch)
    else:
        assert nearest is not None
        chain = torch.tensor([nearest[1]], device=order.device)
        answer = yield ForwardCall(task.model, Request(task.prefix, chain))
        task.keep(answer, tokens=1)
        task.exhausted = True
    distance, token, target = nearest
    # Where another candidate is nearer than the one that was taken, the margin is negative.
    margin = next((other - distance for other, candidate in near if candidate != token), None)
    task.accept(TokenPrediction(token, targets[target], distance, margin, tried, hit is not None))
