"""Rows behind one layer, behind noise: prompts are ordered anew by how much noise an order needs (``displaced``).

By turns: parts of the prompt move to where the rows need less noise, and the noised embeddings are solved for behind
the order that is believed then. Where nothing moves any more the prompt is decoded once more from its beginning, what
each row needs at each place counting as what the row says of it. The order that explains most is kept.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from attacks.joint.beam import decode
from attacks.joint.displaced import TRUST, Displaced, displaced
from attacks.joint.evidence import PLACE, Learned
from attacks.joint.hypotheses import Decoding, Effort, Engines, start
from attacks.joint.moves import improve, spoken_for
from hiddenlab.core import Progress, silent
from hiddenlab.job import generator

TURNS = 4  # of moving and solving
AGAIN = 2  # times that a prompt is decoded anew
FEW = 3  # rows of which an order is not worth this


def reorder_decodings(
    decodings: Sequence[Decoding],
    states: Sequence[Float[Tensor, "_ d"]],
    engines: Engines,
    learned: Learned,
    effort: Effort,
    sigma: float,
    seed: int,
    progress: Progress = silent,
) -> None:
    """Put decoded prompts into the order that needs the least noise, the language model asked as well.

    Args:
        states: the rows of each as observed. sigma: of the noise on each embedding's coordinate.
    """
    for i, (decoding, observed) in enumerate(zip(decodings, states, strict=True)):
        if decoding.ahead is not None and decoding.view.length >= FEW:
            _reorder(decoding, observed, engines, learned, effort, sigma, seed)
        progress("ordering by noise", i + 1, len(decodings))


def _reorder(
    decoding: Decoding,
    observed: Tensor,
    engines: Engines,
    learned: Learned,
    effort: Effort,
    sigma: float,
    seed: int,
) -> None:
    slice, weights = engines.slice, learned.weights
    before, calls = slice.evaluated_tokens, slice.forward_calls
    asked = decoding.evaluated, decoding.calls
    tokens = torch.empty(decoding.view.length, dtype=torch.long, device=observed.device)
    tokens[_order(decoding)] = torch.tensor(
        [step.token for step in decoding.beam[0].steps], device=observed.device
    )
    witness = displaced(slice, tokens, observed, sigma, generator(seed, "joint", "displaced"))
    tried = [(_settle(decoding, witness, engines, weights), decoding.beam[0])]
    for _ in range(AGAIN if float(weights[PLACE]) > 0 else 0):
        again = _decode_again(decoding, witness, engines, learned, effort)
        tried.append((_settle(again, witness, engines, weights), again.beam[0]))
        decoding.beam[0] = again.beam[0]
    decoding.beam[0] = max(tried, key=lambda one: one[0])[1]
    # The slice itself counts them all, solves and gradients too.
    decoding.evaluated = asked[0] + slice.evaluated_tokens - before
    decoding.calls = asked[1] + slice.forward_calls - calls


def _order(decoding: Decoding) -> Tensor:
    return torch.tensor([step.row for step in decoding.beam[0].steps], device=decoding.view.shown.device)


def _settle(decoding: Decoding, witness: Displaced, engines: Engines, weights: Tensor) -> float:
    """Move and solve by turns until nothing moves; what speaks for the order that it ends with, in nats.

    Moves come first: embeddings that were solved for behind a wrong order hold it where it is.
    """
    witness.noised, nats = witness.begun, float("inf")
    for _ in range(TURNS):
        moved = improve(decoding, engines, weights, witness)
        if not moved and nats < float("inf"):
            break
        nats = witness.explain(_order(decoding))
    return spoken_for(decoding, engines, weights) - TRUST * nats


def _decode_again(
    decoding: Decoding, witness: Displaced, engines: Engines, learned: Learned, effort: Effort
) -> Decoding:
    """Decode from the beginning, each row's need of noise at each place being what it says of its place."""
    order = _order(decoding)
    told = torch.empty(len(order), len(order), device=order.device)
    told[order] = witness.places(order)
    told[order] -= told[order].diag()[:, None].clone()  # over what it needs where it stands
    view = decoding.view
    when = told / learned.weights[PLACE] + (0.0 if view.when is None else view.when)
    again = start(replace(view, when=when), engines, learned.weights, decoding.before)
    decode([again], engines, learned, effort)
    again.view = view
    return again
