"""Read a prompt from left to right: what rows say of each token, with a language model, in a beam search."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch
from jaxtyping import Float
from torch import Tensor

from hiddenlab.attacks.shard_reading.readers import OffsetReader
from hiddenlab.matching.ranking import LazyModel
from hiddenlab.models import Prefix, Request, TruncatedModel


@dataclass(frozen=True)
class Held:
    """Rows of a prompt with what reads them.

    Attributes:
        rows: the row of each position.
    """

    states: Float[Tensor, "_ d"]
    rows: Mapping[int, int]
    readers: tuple[OffsetReader, ...]


@dataclass(frozen=True)
class Path:
    """One reading of a prompt so far.

    Attributes:
        tokens, chances: what was read, and each token's probability when it was chosen. score: in nats.
        prefix: the language model behind these tokens. following: its log-probabilities of the next one.
    """

    tokens: tuple[int, ...] = ()
    chances: tuple[float, ...] = ()
    score: float = 0.0
    prefix: Prefix | None = None
    following: Float[Tensor, " v"] | None = None


@torch.inference_mode()
def read_prompts(
    views: Sequence[Sequence[Held]],
    speaker: LazyModel | None,
    weight: float,
    beam: int,
    late: Sequence[Mapping[int, Float[Tensor, " v"]]],
) -> list[dict[int, tuple[int, float]]]:
    """Read several prompts at once, from left to right.

    Args:
        views: the rows of each prompt.
        speaker: the language model, with the weight of its log-probabilities; None for none.
        late: what late rows say of some positions, in its place.

    Returns:
        For each prompt the token and its probability at each position up to the last row. Positions of which nothing
        says anything are left out.
    """
    start = Path() if speaker is None else Path(prefix=speaker.opened.fork(), following=_first(speaker))
    paths = [[start] for _ in views]
    read = [list[int]() for _ in views]  # the positions of each prompt that something is said of
    ends = [max(max(held.rows) for held in view) for view in views]
    for place in range(1 + max(ends)):
        for i, found in enumerate(evidence_of(views, place)):
            if place <= ends[i] and (found is not None or speaker is not None):
                read[i].append(place)
                said = late[i].get(place)
                if said is not None:
                    found = said if found is None else found + said
                paths[i] = extend(paths[i], found, weight if said is None else 0.0, beam)
        going = [i for i, end in enumerate(ends) if place < end]
        if speaker is not None and going:
            grown = iter(_continued(speaker.model, [path for i in going for path in paths[i]]))
            for i in going:
                paths[i] = list(islice(grown, len(paths[i])))
    return [
        dict(zip(at, zip(best.tokens, best.chances, strict=True), strict=True))
        for at, (best, *_) in zip(read, paths, strict=True)
    ]


def extend(
    paths: Sequence[Path], evidence: Float[Tensor, " v"] | None, weight: float, beam: int
) -> list[Path]:
    """Return the likeliest paths that are one token longer, best first.

    Args:
        evidence: log-probabilities of the token by the rows; None where no row says anything.
    """
    parts = [] if evidence is None else [evidence[None].expand(len(paths), -1)]
    if following := [path.following for path in paths if path.following is not None]:
        parts.append(weight * torch.stack(following))
    steps = torch.stack(parts).sum(0)
    scores = steps + torch.tensor([[path.score] for path in paths], device=steps.device)
    best = scores.flatten().topk(min(beam, scores.numel()))
    chances = steps.log_softmax(-1).flatten()[best.indices].exp()
    longer = list[Path]()
    for score, place, chance in zip(
        best.values.tolist(), best.indices.tolist(), chances.tolist(), strict=True
    ):
        path, token = paths[place // steps.shape[1]], place % steps.shape[1]
        tokens, sure = (*path.tokens, token), (*path.chances, chance)
        longer.append(replace(path, tokens=tokens, chances=sure, score=score))
    return longer


def evidence_of(views: Sequence[Sequence[Held]], place: int) -> list[Float[Tensor, " v"] | None]:
    """Return each prompt's log-probabilities of the token at a position: by its own rows, else by those right behind.

    What several rows say is added.
    """
    asked: dict[
        int, tuple[OffsetReader, list[int], list[Tensor]]
    ] = {}  # by reader: prompts, and a row of each
    for i, view in enumerate(views):
        own = any(place in held.rows for held in view)
        for held in view:
            for offset, reader in enumerate(held.readers[:1] if own else held.readers):
                if place + offset in held.rows:
                    _, prompts, rows = asked.setdefault(id(reader), (reader, [], []))
                    prompts.append(i)
                    rows.append(held.states[held.rows[place + offset]])
    evidence: list[Tensor | None] = [None] * len(views)
    for reader, prompts, rows in asked.values():
        for i, scores in zip(prompts, reader.log_probs(torch.stack(rows)), strict=True):
            known = evidence[i]
            evidence[i] = scores if known is None else known + scores
    return evidence


def _continued(model: TruncatedModel, paths: Sequence[Path]) -> list[Path]:
    """Return paths with what the language model says behind the last token of each."""
    left, requests = Counter(id(path.prefix) for path in paths), list[Request]()
    for path in paths:
        assert path.prefix is not None
        left[id(path.prefix)] -= 1
        prefix = path.prefix.fork() if left[id(path.prefix)] else path.prefix  # the last one needs no copy
        requests.append(Request(prefix, torch.tensor(path.tokens[-1:], device=model.device)))
    answers = model.run_all(requests, together=True)
    for request, answer in zip(requests, answers, strict=True):
        request.prefix.keep(answer, tokens=1)
    following = torch.stack([answer.states[-1] for answer in answers]).float().log_softmax(-1)
    return [
        replace(path, prefix=request.prefix, following=said)
        for path, request, said in zip(paths, requests, following, strict=True)
    ]


def _first(speaker: LazyModel) -> Float[Tensor, " v"]:
    """Return the log-probabilities of a prompt's first token, behind the opener or a special token; zeros without.

    A special token that the tokenizer puts before every prompt is the likeliest.
    """
    model = speaker.model
    start = speaker.opened.tokens or model.special_ids[:1]
    scores = torch.zeros(model.vocab_size, device=model.device)
    if start:
        request = Request(model.prefix(), torch.tensor(start, device=model.device))
        scores = model.run([request], keep=False)[0].states[-1].float().log_softmax(-1)
    put = [] if model.tokenizer is None else model.embedded(model.tokenizer("")["input_ids"])
    scores[put[:1]] = 0.0
    return scores
