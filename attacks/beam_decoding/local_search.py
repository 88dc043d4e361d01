"""Improve the order of a decoded prompt's rows by moving parts of it to where they fit better.

Beam search goes from left to right: a row that it passes over is left for the end, though the tokens decoded since show
where it belongs. So every token is run at every place of the decoded order, which approximates the gain of each move of
a part. Prompts with the most promising moves are scored again, and the language model rescores the best of these. Until
then, as the costliest feature, it only scores pairs of tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hiddenlab.attacks.beam_decoding.features import FEATURES, PLACE, PRECEDES, TRACES, Candidates, Rows
from hiddenlab.attacks.beam_decoding.future_cost import after_each
from hiddenlab.attacks.beam_decoding.hypotheses import Decoding, Effort, Engines, Hypothesis
from hiddenlab.models import Prefix, Request
from hiddenlab.types import Progress, silent

LONGEST = 24  # rows that move together
SCORED, RESCORED = 48, 8  # moves of a round that are scored again, and those that the language model rescores
ROUNDS = 24
GAIN = 0.1  # nats that a move must bring


@runtime_checkable
class OrderScorer(Protocol):
    """An additional score of orders, in nats, beside states and language model; rows are given by number."""

    def orders(self, rows: Int[Tensor, "m n"]) -> Float[Tensor, "m n"]:
        """Return the score of each row of each order at its place there."""
        ...

    def places(self, rows: Int[Tensor, " n"]) -> Float[Tensor, "n n"]:
        """Return the score of each row of an order (first axis) at each place, behind the rows that stand before it."""
        ...


@dataclass(frozen=True)
class Parts:
    """The decoded tokens with their rows, in the order in which they were decoded.

    Attributes:
        columns: index of each token among the rows' distinct ones, -1 without. after: weighted log-probability, by
            language model and traces, of each token (second axis) right behind each of the others (first axis).
        before: what stands before the first token; never extended itself.
    """

    tokens: Int[Tensor, " n"]
    rows: Int[Tensor, " n"]
    columns: Int[Tensor, " n"]
    after: Float[Tensor, "n n"]
    before: Prefix


def move_parts(
    decodings: Sequence[Decoding],
    engines: Engines,
    weights: Float[Tensor, " features"],
    effort: Effort,
    progress: Progress = silent,
) -> None:
    """Put decoded prompts whose rows are in unknown order into a likelier order, where there is one."""
    if not effort.moves:
        return
    unordered = [
        candidate for candidate in decodings if candidate.ahead is not None and candidate.view.length > 1
    ]
    for i, decoding in enumerate(unordered):
        improve(decoding, engines, weights)
        progress("moving parts", i + 1, len(unordered))


def improve(
    decoding: Decoding,
    engines: Engines,
    weights: Float[Tensor, " features"],
    scorer: OrderScorer | None = None,
) -> bool:
    """Move parts of one decoded prompt as long as that raises its score.

    Args:
        scorer: an additional score of orders, or None.

    Returns:
        Whether anything was moved.
    """
    view, best = decoding.view, decoding.beam[0]
    device = view.shown.device
    parts = _parts(decoding, engines, weights)
    rows, after = parts.rows, parts.after
    order = torch.arange(len(rows), device=device)

    def score(orders: Tensor) -> tuple[Tensor, Tensor]:
        decoding.evaluated += orders.numel()
        decoding.calls += 1
        scores, distances = _score(parts, orders, view, engines, weights)
        return (scores if scorer is None else scores + scorer.orders(rows[orders])), distances

    (scores,), (distances,) = score(order[None])
    lm_scores = _language_scores(parts, order[None], engines, weights)[0]
    initial = float(scores.sum() + lm_scores.sum())
    for _ in range(ROUNDS):
        before = engines.model.evaluated_tokens
        table = None if scorer is None else scorer.places(rows[order])
        orders = _moved(order, _gains(parts, order, view, engines, weights, table))
        decoding.evaluated += engines.model.evaluated_tokens - before
        decoding.calls += 1
        new_scores, new_distances = score(orders)
        pairs = after[orders[:, :-1], orders[:, 1:]].sum(1)
        likely = (new_scores.sum(1) + pairs).topk(min(RESCORED, len(orders))).indices
        new_lm = _language_scores(parts, orders[likely], engines, weights)
        totals = new_scores[likely].sum(1) + new_lm.sum(1)
        chosen = int(totals.argmax())
        if float(totals[chosen]) < float(scores.sum() + lm_scores.sum()) + GAIN:
            break
        i = likely[chosen]
        order, scores, distances, lm_scores = orders[i], new_scores[i], new_distances[i], new_lm[chosen]
    if torch.equal(order, torch.arange(len(order), device=device)):
        return False
    gained = float(scores.sum() + lm_scores.sum()) - initial
    decoding.beam[0] = replace(_arranged(best, parts, order, distances), score=best.score + gained)
    return True


def rearrange(
    decoding: Decoding, order: Int[Tensor, " n"], engines: Engines, weights: Float[Tensor, " features"]
) -> None:
    """Put one decoded prompt into another order, given as places of the present one; its score does not change."""
    parts = _parts(decoding, engines, weights)
    _, (distances,) = _score(parts, order[None], decoding.view, engines, weights)
    decoding.evaluated += len(order)
    decoding.calls += 1
    decoding.beam[0] = _arranged(decoding.beam[0], parts, order, distances)


def _arranged(
    best: Hypothesis, parts: Parts, order: Int[Tensor, " n"], distances: Float[Tensor, " n"]
) -> Hypothesis:
    """Return a hypothesis in another order; tokens that moved lose their margins, which no longer hold."""
    steps = tuple(
        replace(best.steps[k], distance=float(distance), margin=best.steps[k].margin if k == place else None)
        for place, (k, distance) in enumerate(zip(order.tolist(), distances, strict=True))
    )
    return replace(best, steps=steps, columns=tuple(parts.columns[order].tolist()))


def order_score(decoding: Decoding, engines: Engines, weights: Float[Tensor, " features"]) -> float:
    """Return the score of a decoded prompt's order in nats, without order scorers; the probe is left out."""
    parts = _parts(decoding, engines, weights)
    order = torch.arange(len(parts.rows), device=parts.rows.device)[None]
    scores, _ = _score(parts, order, decoding.view, engines, weights)
    decoding.evaluated += order.numel()
    decoding.calls += 1
    return float(scores.sum() + _language_scores(parts, order, engines, weights).sum())


def _parts(decoding: Decoding, engines: Engines, weights: Tensor) -> Parts:
    best, device = decoding.beam[0], decoding.view.shown.device
    tokens = torch.tensor([step.token for step in best.steps], device=device)
    rows = torch.tensor([step.row for step in best.steps], device=device)
    after = torch.zeros(len(tokens), len(tokens), device=device)
    if engines.speaker is not None:
        after += weights[1] * after_each(tokens, engines.speaker).to(device)
    columns = torch.tensor(best.columns, device=device)
    return Parts(tokens, rows, columns, after, engines.beginning(decoding.before))


def _gains(
    parts: Parts,
    order: Int[Tensor, " n"],
    view: Rows,
    engines: Engines,
    weights: Tensor,
    place_scores: Float[Tensor, "n n"] | None = None,
) -> list[Float[Tensor, "_ n"]]:
    """Return the approximate gain of moving the part of each length that starts at a place (first axis) before another.

    States are those of single tokens behind the tokens of the present order; for pairs, only new neighbours count.
    Places within the part, or without room for it, gain minus infinity. ``place_scores``: see ``OrderScorer.places``.
    """
    n, device = len(order), order.device
    tokens, rows = parts.tokens[order], parts.rows[order]
    each, where = tokens.repeat_interleave(n), torch.arange(n, device=device).repeat(n)
    size = max(n, engines.model.max_pass_tokens - n)
    requests = [
        Request(parts.before, tokens, branches=branches, parents=parents)
        for branches, parents in zip(each.split(size), where.split(size), strict=True)
    ]
    answers = engines.model.run_all(requests, keep=False)
    states = engines.matcher.view(torch.cat([answer.branches for answer in answers]))
    features = torch.zeros(n * n, len(FEATURES), device=device)
    if view.when is not None:
        features[:, PLACE] = view.when[rows].flatten()
    candidates = Candidates(each, rows.repeat_interleave(n), torch.full_like(each, -1), features)
    candidates.measure(states, torch.arange(n * n, device=device), view, engines.matcher)
    alone = (candidates.features @ weights).view(n, n)  # a token of the order, at a place
    alone = alone if place_scores is None else alone + place_scores
    pair = parts.after[order][:, order].clone()
    if view.traces is not None and bool((parts.columns >= 0).all()):
        pair += weights[2] * view.traces[0][rows][:, parts.columns[order]].T
    edged = torch.zeros(
        n + 1, n + 1, device=device
    )  # the last index stands for what precedes the first token and follows the last
    edged[:n, :n] = pair
    here, gains = torch.arange(n, device=device), []
    # Moving a part past others reverses their pairs: the gain is twice the difference of sums of odds.
    odds = torch.zeros(n + 1, n, device=device)  # of all rows up to one (first axis) before all up to another
    if view.precedes is not None:
        ordered = weights[PRECEDES] * view.precedes[rows][:, rows]
        odds[1:] = (ordered.cumsum(1) - ordered).cumsum(0)
    for length in range(1, min(LONGEST, n - 1) + 1):
        first = here[: n - length + 1]
        last, left, right = first + length - 1, first - 1, (first + length).where(first + length < n, n)
        left = left.where(left >= 0, n)
        to = here.where(here > 0, n + 1) - 1  # what stands before each place
        gain = edged[left, right] - edged[left, first] - edged[last, right]  # without the part
        gain = gain[:, None] + edged[to][:, first].T + edged[last][:, here] - edged[to, here]
        for step in range(length):
            new = (here + step).clamp(max=n - 1)
            gain = gain + alone[first + step][:, new] - alone[first + step, first + step][:, None]
        part = odds[first + length] - odds[first]
        gain = gain + 2 * (part.gather(1, first[:, None]) - part)
        inside = (here >= first[:, None]) & (here <= last[:, None] + 1)
        gains.append(gain.masked_fill(inside, float("-inf")))
    return gains


def _moved(order: Int[Tensor, " n"], gains: Sequence[Float[Tensor, "_ n"]]) -> Int[Tensor, "m n"]:
    """Return the order with each of the most promising moves made."""
    n = len(order)
    flat = torch.cat([gain.flatten() for gain in gains])
    best = flat.topk(min(SCORED, len(flat)))
    chosen = best.indices[best.values > float("-inf")].tolist()
    bounds = [0]
    for gain in gains:
        bounds.append(bounds[-1] + gain.numel())
    orders = []
    for index in chosen:
        length = next(i for i in range(1, len(bounds)) if index < bounds[i])
        first, to = divmod(index - bounds[length - 1], n)
        part = order[first : first + length]
        if to < first:
            orders.append(torch.cat([order[:to], part, order[to:first], order[first + length :]]))
        else:
            orders.append(torch.cat([order[:first], order[first + length : to], part, order[to:]]))
    return torch.stack(orders)


def _score(
    parts: Parts, orders: Int[Tensor, "m n"], view: Rows, engines: Engines, weights: Tensor
) -> tuple[Float[Tensor, "m n"], Float[Tensor, "m n"]]:
    """Return each token's score in each order, without probe (constant) and language model, and its distance."""
    m, n = orders.shape
    tokens, rows, columns = parts.tokens[orders], parts.rows[orders], parts.columns[orders]
    features = torch.zeros(m, n, len(FEATURES), device=tokens.device)
    for i, offset in enumerate(TRACES if view.traces is not None else ()):
        assert view.traces is not None
        before = columns[:, :-offset]
        trace = view.traces[i, rows[:, offset:], before.clamp(min=0)]
        features[:, offset:, 2 + i] = trace.masked_fill(before < 0, 0.0)
    if view.when is not None:
        features[..., PLACE] = view.when[rows, torch.arange(n, device=tokens.device)]
    if view.precedes is not None:
        features[..., PRECEDES] = view.precedes[rows[:, :, None], rows[:, None, :]].triu(1).sum(2)
    requests = [Request(parts.before, sequence) for sequence in tokens]
    answers = engines.model.run_all(requests, keep=False)
    states = engines.matcher.view(torch.cat([answer.states for answer in answers]))
    candidates = Candidates(tokens.flatten(), rows.flatten(), columns.flatten(), features.flatten(0, 1))
    candidates.measure(states, torch.arange(m * n, device=tokens.device), view, engines.matcher)
    assert candidates.distances is not None
    return (candidates.features @ weights).view(m, n), candidates.distances.view(m, n)


def _language_scores(
    parts: Parts, orders: Int[Tensor, "m n"], engines: Engines, weights: Tensor
) -> Float[Tensor, "m n"]:
    """Return the language model's weighted log-probability of each token of each order."""
    speaker, tokens = engines.speaker, parts.tokens[orders]
    scores = torch.zeros(orders.shape, device=tokens.device)
    if speaker is None:
        return scores
    at_once = max(1, speaker.model.max_pass_tokens // tokens.shape[1])
    for rows, sequences in zip(scores.split(at_once), tokens.split(at_once), strict=True):
        requests = [Request(speaker, sequence[:-1].to(speaker.model.device)) for sequence in sequences]
        answers = speaker.model.run(requests, keep=False)
        for row, sequence, answer in zip(rows, sequences, answers, strict=True):
            following = answer.states.float().log_softmax(-1).to(scores.device)
            row[1:] = following.gather(1, sequence[1:, None])[:, 0]
    if engines.opening is not None:
        scores[:, 0] = engines.opening.to(scores.device)[tokens[:, 0]]
    return weights[1] * scores
