"""Run requests by the model's own forward pass: slower than the packed engine, and right for every decoder.

Each chain, and each branch behind its prefix, is a whole sequence of its own, with the model's own masks, positions and
recurrent states. Sequences of one length share a pass. Between passes nothing is kept but the prefix's inputs.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hiddenlab.errors import NotApplicableError
from hiddenlab.models.request import Answer, Request, packs

if TYPE_CHECKING:
    from hiddenlab.models import TruncatedModel


def run_plain(model: "TruncatedModel", requests: Sequence[Request], *, grad: bool = False) -> list[Answer]:
    """Return the answers to requests, each chain and each branch run as a sequence of its own.

    Args:
        grad: record gradients (inputs given as embeddings).

    Raises:
        NotApplicableError: there are positions before the first token, but the model numbers positions itself.
    """
    if any(request.prefix.offset for request in requests):
        raise NotApplicableError(
            f"{model.ref.name} runs in the plain engine, which cannot leave room for unknown tokens before the prompt"
        )
    sequences = [
        (i, rows, inputs) for i, request in enumerate(requests) for rows, inputs in _sequences(model, request)
    ]
    sequences.sort(
        key=lambda sequence: (sequence[2].ndim, len(sequence[2]))
    )  # sequences of one shape share passes
    states: list[list[tuple[int, Tensor]]] = [[] for _ in requests]
    for _, alike in groupby(sequences, key=lambda sequence: sequence[2].shape):
        for group in packs(alike, lambda sequence: len(sequence[2]), model.max_pass_tokens):
            output = model.forward_plain(torch.stack([inputs for _, _, inputs in group]), grad=grad)
            for (i, rows, _), own in zip(group, output, strict=True):
                states[i].append((rows.start, own[len(own) - (rows.stop - rows.start) :]))
    answers = []
    for request, parts in zip(requests, states, strict=True):
        whole = torch.cat([own for _, own in sorted(parts, key=lambda part: part[0])])
        chain = len(request.tokens)
        answers.append(Answer(whole[:chain], whole[chain:], request, {}, 0))
    return answers


def _sequences(model: "TruncatedModel", request: Request) -> Iterator[tuple[slice, Tensor]]:
    """Yield each sequence's rows in the request, and its inputs from the first token on: ids, or embeddings."""
    device, chain = model.device, len(request.tokens)
    before = [part.to(device) for part in request.prefix.inputs]
    tokens = request.tokens.to(device)
    if chain:
        yield slice(0, chain), _joined(model, [*before, tokens])
    if request.branches is None:
        return
    branches = request.branches.to(device)
    for start in range(0, len(branches), request.depth):
        parent = int(request.reach[chain + start])
        rows = slice(chain + start, chain + start + request.depth)
        branch = branches[start : start + request.depth]
        yield rows, _joined(model, [*before, tokens[:parent], branch])


def _joined(model: "TruncatedModel", parts: Sequence[Tensor]) -> Tensor:
    """Join inputs: token ids where all are ids, else embeddings."""
    parts = [part for part in parts if len(part)]
    if any(part.is_floating_point() for part in parts):
        parts = [part if part.is_floating_point() else model.embed(part) for part in parts]
    return torch.cat(parts)
