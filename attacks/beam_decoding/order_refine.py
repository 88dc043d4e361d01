"""Order rows of a noised prompt by how much noise each order needs, behind one layer.

An order is found from its beginning on (``order_beam``). Then two steps alternate: parts of the prompt move to where
the rows need less noise, and the noised embeddings are solved for behind the present order (``order_linearized``). The
order with the highest score is kept, the decoder's own among them.
"""

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from hiddenlab.attacks.beam_decoding.features import Learned
from hiddenlab.attacks.beam_decoding.hypotheses import Decoding, Engines, Hypothesis
from hiddenlab.attacks.beam_decoding.local_search import improve, order_score, rearrange
from hiddenlab.attacks.beam_decoding.order_beam import ordered
from hiddenlab.attacks.beam_decoding.order_linearized import TRUST, Displaced, displaced
from hiddenlab.types import Progress, silent
from hiddenlab.utils.random import generator

SHARES = (1.0, 0.6)  # weights of the noise's score, one search each
STAGES = 1 + len(SHARES)  # the solve, and a search each
TURNS = 3  # of moving and solving
FEW = 3  # rows at least for which this is done


def reorder_decodings(
    decodings: Sequence[Decoding],
    states: Sequence[Float[Tensor, "_ d"]],
    engines: Engines,
    learned: Learned,
    sigma: float,
    seed: int,
    progress: Progress = silent,
) -> None:
    """Put decoded prompts into the order that needs the least noise, also scored by the language model.

    Args:
        states: the rows of each as observed. sigma: standard deviation of the noise on each embedding coordinate.
    """
    for i, (decoding, observed) in enumerate(zip(decodings, states, strict=True)):
        if decoding.ahead is not None and decoding.view.length >= FEW:
            for done in _reorder(decoding, observed, engines, learned.weights, sigma, seed):
                progress("ordering by noise", i * STAGES + done, STAGES * len(decodings))
        progress("ordering by noise", (i + 1) * STAGES, STAGES * len(decodings))


def _reorder(
    decoding: Decoding, observed: Tensor, engines: Engines, weights: Tensor, sigma: float, seed: int
) -> Iterator[int]:
    """Order one prompt, and yield after each stage how many are done."""
    model = engines.model
    before, calls = model.evaluated_tokens, model.forward_calls
    asked = decoding.evaluated, decoding.calls
    order = _order(decoding)
    tokens = torch.empty_like(order)
    tokens[order] = torch.tensor([step.token for step in decoding.beam[0].steps], device=order.device)
    scorer = displaced(model, tokens, observed, sigma, generator(seed, "joint", "displaced"))
    lm_weight = 1.0 if engines.speaker is None else float(weights[1])
    scorer.trust = TRUST * lm_weight
    yield 1
    candidates = [_met(decoding, scorer, engines, weights)]
    for done, share in enumerate(SHARES, 2):
        rows, noised = ordered(scorer, tokens, engines, lm_weight, share)
        rearrange(decoding, _order(decoding).argsort()[rows], engines, weights)
        candidates += _settle(decoding, scorer, noised, engines, weights)
        yield done
    decoding.beam[0] = max(candidates, key=lambda candidate: candidate[0])[1]
    # The truncated model's own counters include solves and gradients.
    decoding.evaluated = asked[0] + model.evaluated_tokens - before
    decoding.calls = asked[1] + model.forward_calls - calls


def _order(decoding: Decoding) -> Tensor:
    return torch.tensor([step.row for step in decoding.beam[0].steps], device=decoding.view.shown.device)


def _met(
    decoding: Decoding, scorer: Displaced, engines: Engines, weights: Tensor
) -> tuple[float, Hypothesis]:
    """Return the score of the present order in nats, and its hypothesis; the scorer keeps the embeddings found."""
    nats = scorer.explain(_order(decoding))
    return order_score(decoding, engines, weights) - scorer.trust * nats, decoding.beam[0]


def _settle(
    decoding: Decoding, scorer: Displaced, noised: Tensor, engines: Engines, weights: Tensor
) -> list[tuple[float, Hypothesis]]:
    """Return the order of a decoding, and those that moving its parts leads to.

    Embeddings solved for behind a wrong order favour that order; those estimated from rows alone are less exact. Parts
    move by either.
    """
    initial = decoding.beam[0]
    candidates = [_met(decoding, scorer, engines, weights)]
    for first in (noised, scorer.initial):
        decoding.beam[0], scorer.noised = initial, first
        for _ in range(TURNS):
            if not improve(decoding, engines, weights, scorer):
                break
            candidates.append(_met(decoding, scorer, engines, weights))
    return candidates
