"""Beam search over whole prompts: which token comes next, and which row is its."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from attacks.joint.evidence import BEFORE, Candidates, Rows, candidates_of
from hiddenlab.core import Progress, silent
from hiddenlab.match import Matcher
from hiddenlab.slice import Answer, Prefix, Request, Slice
from hiddenlab.slice.engine import packs

OTHERS = 4  # of a row's tokens that were not taken, how many are remembered
RECENT = 3  # of hypotheses that agree in so many last tokens and in the rows they used, the best is kept


@dataclass(frozen=True)
class Engines:
    """What hypotheses are run on: the slice under attack, and the language model or None."""

    slice: Slice
    matcher: Matcher
    model: Slice | None
    offset: int = 0  # positions before the first token
    opening: Tensor | None = None  # the language model's log-probabilities [v] of a first token


@dataclass(frozen=True)
class Effort:
    """How much is tried.

    Attributes:
        beam: hypotheses kept. width: candidates run for each. gap: candidates whose score before they are run is so
            much (nats) under the best's are not. unseen: tokens tried for a position that no row shows.
    """

    beam: int = 8
    width: int = 48
    gap: float = 12.0
    unseen: int = 48


@dataclass(frozen=True)
class Step:
    """One decided token.

    Attributes:
        row: its row, -1 without. distance: to it. margin: how far the runner-up was behind, in nats.
        others: the row's other tokens and how far each was behind, the nearest first.
    """

    token: int
    row: int
    distance: float
    margin: float | None
    evaluated: int
    others: tuple[tuple[int, float], ...] = ()


@dataclass
class Hypothesis:
    """A beginning of the prompt."""

    prefix: Prefix
    free: tuple[int, ...]
    spoken: Prefix | None = None
    following: Tensor | None = None  # the language model's log-probabilities [v] of the next token
    columns: tuple[int, ...] = ()
    steps: tuple[Step, ...] = ()
    score: float = 0.0


@dataclass
class Decoding:
    """One prompt under way."""

    view: Rows
    beam: list[Hypothesis]
    evaluated: int = 0
    calls: int = 0

    @property
    def place(self) -> int:
        return len(self.beam[0].steps)

    @property
    def finished(self) -> bool:
        return self.place == self.view.length


def start(view: Rows, engines: Engines) -> Decoding:
    """A decoding that knows nothing yet."""
    free = tuple(range(len(view.shown)))
    spoken = None if engines.model is None else engines.model.prefix()
    begun = Hypothesis(engines.slice.prefix(offset=engines.offset), free, spoken, engines.opening)
    return Decoding(view, [begun], view.evaluated)


def propose(
    decoding: Decoding, hypothesis: Hypothesis, weights: Float[Tensor, " features"], effort: Effort
) -> Candidates:
    """The candidates of one hypothesis that are worth running."""
    found = candidates_of(
        decoding.view, decoding.place, hypothesis.free, hypothesis.columns, hypothesis.following, effort.unseen
    )  # fmt: skip
    before = found.features[:, :BEFORE] @ weights[:BEFORE]
    best = before.topk(min(effort.width, len(before)))
    return found.keep(best.indices[best.values >= best.values[0] - effort.gap])


def decode(
    decodings: Sequence[Decoding],
    engines: Engines,
    weights: Float[Tensor, " features"],
    effort: Effort,
    progress: Progress = silent,
) -> None:
    """Take all decodings to their ends, token by token in common passes."""
    total = sum(one.view.length for one in decodings)
    while active := [one for one in decodings if not one.finished]:
        pairs = [(one, hypothesis) for one in active for hypothesis in one.beam]
        tried = [propose(one, hypothesis, weights, effort) for one, hypothesis in pairs]
        answers = run(
            engines.slice,
            [
                Request(hypothesis.prefix, candidates.tokens[:0], leaves=candidates.tokens)
                for (_, hypothesis), candidates in zip(pairs, tried, strict=True)
            ],
        )
        for (one, _), candidates, answer in zip(pairs, tried, answers, strict=True):
            one.evaluated += len(candidates)
            candidates.measure(answer.leaves, one.view, engines.matcher)
        index = 0
        for one in active:
            one.calls += 1
            count = len(one.beam)
            part = slice(index, index + count)
            one.beam = _extend(one, tried[part], answers[part], weights, effort)
            index += count
        _listen([hypothesis for one in active for hypothesis in one.beam], engines.model)
        progress("decoding", sum(one.place for one in decodings), total)


def _extend(
    decoding: Decoding,
    tried: Sequence[Candidates],
    answers: Sequence[Answer],
    weights: Tensor,
    effort: Effort,
) -> list[Hypothesis]:
    """The best continuations of all hypotheses."""
    totals = [
        hypothesis.score + candidates.features @ weights
        for hypothesis, candidates in zip(decoding.beam, tried, strict=True)
    ]
    order = torch.cat(totals).argsort(descending=True).tolist()
    starts = [0]
    for part in totals:
        starts.append(starts[-1] + len(part))
    kept: list[Hypothesis] = []
    seen = set()
    for place in order:
        parent = next(i for i in range(len(totals)) if place < starts[i + 1])
        i = place - starts[parent]
        before, step, free = _step(decoding.beam[parent], tried[parent], totals[parent], i)
        key = free, tuple(one.token for one in (*before.steps, step)[-RECENT:])
        if key in seen:
            continue
        seen.add(key)
        prefix = before.prefix.fork()
        prefix.keep(answers[parent], leaf=i)
        columns = (*before.columns, int(tried[parent].columns[i]))
        steps = (*before.steps, step)
        kept.append(Hypothesis(prefix, free, before.spoken, None, columns, steps, float(totals[parent][i])))
        if len(kept) == effort.beam:
            break
    return kept


def _step(
    parent: Hypothesis, candidates: Candidates, totals: Tensor, i: int
) -> tuple[Hypothesis, Step, tuple[int, ...]]:
    """What taking a candidate means: the step, and the rows that are free after it."""
    row = int(candidates.rows[i])
    others = torch.cat([totals[:i], totals[i + 1 :]])
    margin = float(totals[i] - others.max()) if len(others) else None
    assert candidates.distances is not None
    same = ((candidates.rows == row) & (candidates.tokens != candidates.tokens[i])).nonzero()[:, 0]
    best = same[totals[same].argsort(descending=True)][:OTHERS]
    behind = (totals[i] - totals[best]).tolist()
    step = Step(
        int(candidates.tokens[i]), row, float(candidates.distances[i]), margin, len(candidates),
        tuple(zip(candidates.tokens[best].tolist(), behind, strict=True)),
    )  # fmt: skip
    return parent, step, parent.free if row < 0 else tuple(r for r in parent.free if r != row)


def _listen(hypotheses: Sequence[Hypothesis], model: Slice | None) -> None:
    """Let the language model read the last token of each hypothesis."""
    if model is None:
        return
    requests = []
    for one in hypotheses:
        assert one.spoken is not None
        one.spoken = one.spoken.fork()
        requests.append(Request(one.spoken, torch.tensor([one.steps[-1].token], device=model.device)))
    for one, answer in zip(hypotheses, run(model, requests), strict=True):
        assert one.spoken is not None
        one.spoken.keep(answer, chain=1)
        one.following = answer.chain[0].float().log_softmax(-1)


def run(engine: Slice, requests: Sequence[Request]) -> list[Answer]:
    """Run requests in passes of at most ``engine.max_pass_tokens`` positions."""
    passes = packs(requests, lambda one: one.size, engine.max_pass_tokens)
    return [answer for one in passes for answer in engine.run(one)]
