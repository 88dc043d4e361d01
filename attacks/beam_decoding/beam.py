"""Search whole prompts with a beam: choose the next token of each hypothesis and the row that belongs to it."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from hiddenlab.attacks.beam_decoding.adaptive_width import Widening
from hiddenlab.attacks.beam_decoding.features import (
    BEFORE,
    FIT,
    Candidates,
    Learned,
    candidates_of,
    chosen,
    likeliest,
    rows_at,
)
from hiddenlab.attacks.beam_decoding.hypotheses import Decoding, Effort, Engines, Hypothesis, Step, Trial
from hiddenlab.matching.screening import near_ones
from hiddenlab.models import Request, TruncatedModel
from hiddenlab.types import Progress, silent

OTHERS = 4  # runners-up of a row that a step keeps
RECENT = 3  # hypotheses that agree in so many last tokens and in the rows used are merged into the best
MIN_FAILED = 256  # failed candidates at least before the adapter learns from them
MAX_FAILED = 1024  # failed candidates at most that the adapter learns from
BEAM_CANDIDATES = 256  # candidates of a hypothesis that may become part of the beam


def propose(
    decoding: Decoding, hypothesis: Hypothesis, weights: Float[Tensor, " features"], effort: Effort
) -> Candidates:
    """Return the candidates of one hypothesis that are worth running."""
    view, place = decoding.view, decoding.place
    if not chosen(view, place):
        candidates = candidates_of(view, place, hypothesis.free, hypothesis.columns, hypothesis.following)
    else:
        candidates = _from_all(decoding, hypothesis, weights, effort.width)
        if int(candidates.rows[0]) >= 0:
            return candidates
    before = candidates.features[:, :BEFORE] @ weights[:BEFORE]
    best = before.topk(min(effort.width, len(before)))
    return candidates.keep(best.indices[best.values >= best.values[0] - effort.gap])


def _from_all(
    decoding: Decoding,
    hypothesis: Hypothesis,
    weights: Tensor,
    most: int,
    but: Tensor | None = None,
    learned: Tensor | None = None,
) -> Candidates:
    """Return the vocabulary's likeliest tokens except ``but``, each for every row: one state serves all rows."""
    place = decoding.view, decoding.place, hypothesis.free
    tokens = likeliest(*place, hypothesis.following, weights, most, learned)
    if but is not None:
        tokens = tokens[~torch.isin(tokens, but)]
    elif not decoding.place and decoding.view.openers is not None and rows_at(*place) is not None:
        tokens = torch.cat([tokens, decoding.view.openers]).unique()
    return candidates_of(*place, hypothesis.columns, hypothesis.following, tokens)


def decode(
    decodings: Sequence[Decoding],
    engines: Engines,
    learned: Learned,
    effort: Effort,
    progress: Progress = silent,
) -> None:
    """Extend all decodings to their ends, token by token in shared passes."""
    total = sum(decoding.view.length for decoding in decodings)
    while active := [decoding for decoding in decodings if not decoding.finished]:
        pairs = [(decoding, hypothesis) for decoding in active for hypothesis in decoding.beam]
        proposed = [propose(*pair, learned.weights, effort) for pair in pairs]
        trials = iter(_try(pairs, proposed, engines, learned.weights))
        beams = [[next(trials) for _ in decoding.beam] for decoding in active]
        _widen(active, beams, engines, learned, effort)
        for decoding, beam in zip(active, beams, strict=True):
            decoding.calls += 1
            decoding.beam = _extend(decoding, beam, learned.weights, effort)
        del trials, beams  # frees the keys and values of all candidates
        listen(
            [hypothesis for decoding in active if not decoding.finished for hypothesis in decoding.beam],
            engines.lm,
        )
        progress("decoding", sum(decoding.place for decoding in decodings), total)


def _try(
    pairs: Sequence[tuple[Decoding, Hypothesis]],
    proposed: Sequence[Candidates],
    engines: Engines,
    weights: Tensor,
) -> list[Trial]:
    """Run each hypothesis' candidates, every token once, and keep the best."""
    distinct = [candidates.tokens.unique(return_inverse=True) for candidates in proposed]
    requests = [
        Request(hypothesis.prefix, tokens[:0], branches=tokens)
        for (_, hypothesis), (tokens, _) in zip(pairs, distinct, strict=True)
    ]
    trials = []
    for (decoding, _), candidates, (tokens, branch), answer in zip(
        pairs, proposed, distinct, engines.model.run_all(requests), strict=True
    ):
        decoding.evaluated += len(tokens)
        states = engines.matcher.view(answer.branches)
        candidates.measure(states, branch, decoding.view, engines.matcher)
        ran = [tokens], [states]
        trial = Trial(candidates, [answer], torch.zeros_like(branch), branch, len(tokens), *ran)
        if len(candidates) > BEAM_CANDIDATES:
            trial.keep((candidates.features @ weights).topk(BEAM_CANDIDATES).indices)
        trials.append(trial)
    return trials


def _screened(
    pairs: Sequence[tuple[Decoding, Hypothesis]],
    proposed: Sequence[Candidates],
    engines: Engines,
    weights: Tensor,
) -> list[Trial]:
    """Run candidates in the screen first, and only those near a row in the truncated model."""
    assert engines.screen is not None
    distinct = [candidates.tokens.unique(return_inverse=True) for candidates in proposed]
    requests = [
        Request(engines.screen.follow(hypothesis.prefix), tokens[:0], branches=tokens)
        for (_, hypothesis), (tokens, _) in zip(pairs, distinct, strict=True)
    ]
    answers = engines.screen.model.run_all(requests, keep=False)
    seen, near = list[Tensor](), list[Candidates]()
    for (decoding, _), candidates, (tokens, branch), answer in zip(
        pairs, proposed, distinct, answers, strict=True
    ):
        decoding.evaluated += len(tokens)
        seen.append(engines.matcher.view(answer.branches))
        candidates.measure(seen[-1], branch, decoding.view, engines.matcher)
        fits = candidates.features[:, FIT]
        nearest = torch.full_like(tokens, float("inf"), dtype=fits.dtype)
        nearest.scatter_reduce_(0, branch, fits.exp(), "amin")
        near.append(candidates.keep(torch.isin(branch, near_ones(nearest))))
    trials = _try(pairs, near, engines, weights)
    for trial, (tokens, _), states in zip(trials, distinct, seen, strict=True):
        trial.evaluated, trial.tokens, trial.states = trial.evaluated + len(tokens), [tokens], [states]
    return trials


def _widen(
    active: Sequence[Decoding],
    beams: Sequence[list[Trial]],
    engines: Engines,
    learned: Learned,
    effort: Effort,
) -> None:
    """Run more candidates where the best is not reliable and the whole vocabulary is available.

    Each time the hypothesis with the likeliest candidates not yet run gets more: first the best one. If its beginning
    is wrong, another hypothesis gets its turn once enough candidates have failed.
    """
    widenings = [
        Widening.of(decoding, beam, learned.weights, effort)
        for decoding, beam in zip(active, beams, strict=True)
        if learned.lead > float("-inf")
        and decoding.view.wide is not None
        and int(beam[0].candidates.rows[0]) >= 0
    ]
    while open := [widening for widening in widenings if widening.remains(learned)]:
        pairs = [(widening.decoding, widening.decoding.beam[widening.next]) for widening in open]
        suggested = [
            _from_all(
                *pair, learned.weights, widening.wider(), torch.cat(widening.tried[widening.next].tokens),
                _suggested(*pair, widening.tried[widening.next], engines),
            )
            for widening, pair in zip(open, pairs, strict=True)
        ]  # fmt: skip
        # Skip hypotheses whose candidates were all run.
        rest = [i for i, candidates in enumerate(suggested) if len(candidates)]
        # First tokens may be attention sinks, whose states half precision cannot tell apart.
        run = _screened if engines.screen is not None and active[0].place else _try
        more = iter(run([pairs[i] for i in rest], [suggested[i] for i in rest], engines, learned.weights))
        for i, widening in enumerate(open):
            widening.add(next(more) if i in rest else None, learned.weights)


def _suggested(
    decoding: Decoding, hypothesis: Hypothesis, trial: Trial, engines: Engines
) -> Float[Tensor, " v"] | None:
    """Return log-likelihoods of the whole vocabulary learned from failed candidates; None where there are too few."""
    tokens, view = torch.cat(trial.tokens), decoding.view
    rows = rows_at(view, decoding.place, hypothesis.free)
    if engines.adapter is None or len(tokens) < MIN_FAILED or rows is None:
        return None
    some = torch.linspace(0, len(tokens) - 1, min(MAX_FAILED, len(tokens)), device=tokens.device).long()
    return engines.adapter.log_likelihoods(tokens[some], torch.cat(trial.states)[some], view.shown[rows])


def _totals(
    decoding: Decoding, trials: Sequence[Trial], weights: Tensor
) -> tuple[list[Float[Tensor, " _"]], list[Float[Tensor, " _"]]]:
    """Return each candidate's total score and the score that its used rows were expected to reach."""
    pairs = list(zip(decoding.beam, trials, strict=True))
    return (
        [hypothesis.score + trial.candidates.features @ weights for hypothesis, trial in pairs],
        [hypothesis.used + decoding.expects(trial.candidates.rows) for hypothesis, trial in pairs],
    )


def _likeliest(
    decoding: Decoding,
    trials: Sequence[Trial],
    totals: Sequence[Tensor],
    used: Sequence[Tensor],
    most: int,
    behind: float,
) -> list[tuple[int, int]]:
    """Return the best candidates as (hypothesis, index) pairs; of equivalent candidates only the best."""
    ranks = torch.cat(list(totals)) - torch.cat(list(used))
    order = ranks.argsort(descending=True)
    order = order[ranks[order] >= ranks[order[0]] - behind]
    starts = [0]
    for part in totals:
        starts.append(starts[-1] + len(part))
    kept, seen = list[tuple[int, int]](), set()
    for place in order.tolist():
        parent = next(i for i in range(len(totals)) if place < starts[i + 1])
        i, before = place - starts[parent], decoding.beam[parent]
        row, token = (int(x[i]) for x in (trials[parent].candidates.rows, trials[parent].candidates.tokens))
        key = without(before.free, row), (*[step.token for step in before.steps[1 - RECENT :]], token)
        if key in seen:
            continue
        seen.add(key)
        kept.append((parent, i))
        if len(kept) == most:
            break
    return kept


def without(free: tuple[int, ...], row: int) -> tuple[int, ...]:
    """Return the free rows after one is taken."""
    return free if row < 0 else tuple(r for r in free if r != row)


def _extend(decoding: Decoding, trials: Sequence[Trial], weights: Tensor, effort: Effort) -> list[Hypothesis]:
    """Return the best continuations of all hypotheses."""
    totals, used = _totals(decoding, trials, weights)
    most = effort.kept(decoding.view, decoding.place)
    kept = list[Hypothesis]()
    for parent, i in _likeliest(decoding, trials, totals, used, most, effort.behind):
        before, trial = decoding.beam[parent], trials[parent]
        step = _step(trial, totals[parent], i)
        prefix = before.prefix.fork()
        prefix.keep(trial.answers[int(trial.answer[i])], branch=int(trial.branch[i]))
        columns = (*before.columns, int(trial.candidates.columns[i]))
        sums = float(totals[parent][i]), float(used[parent][i])
        free, steps = without(before.free, step.row), (*before.steps, step)
        kept.append(Hypothesis(prefix, free, before.lm_prefix, None, columns, steps, *sums))
    return kept


def _step(trial: Trial, totals: Tensor, i: int) -> Step:
    """Return the decided step of a candidate: token, row, distance, margin and runners-up."""
    candidates = trial.candidates
    row = int(candidates.rows[i])
    others = torch.cat([totals[:i], totals[i + 1 :]])
    margin = float(totals[i] - others.max()) if len(others) else None
    assert candidates.distances is not None
    same = ((candidates.rows == row) & (candidates.tokens != candidates.tokens[i])).nonzero()[:, 0]
    best = same[totals[same].argsort(descending=True)][:OTHERS]
    behind = (totals[i] - totals[best]).tolist()
    return Step(
        int(candidates.tokens[i]), row, float(candidates.distances[i]), margin, trial.evaluated,
        tuple(zip(candidates.tokens[best].tolist(), behind, strict=True)),
    )  # fmt: skip


def listen(hypotheses: Sequence[Hypothesis], model: TruncatedModel | None) -> None:
    """Let the language model read the last token of each hypothesis."""
    if model is None:
        return
    requests = []
    for hypothesis in hypotheses:
        assert hypothesis.lm_prefix is not None
        hypothesis.lm_prefix = hypothesis.lm_prefix.fork()
        requests.append(
            Request(hypothesis.lm_prefix, torch.tensor([hypothesis.steps[-1].token], device=model.device))
        )
    for hypothesis, answer in zip(hypotheses, model.run_all(requests, together=True), strict=True):
        assert hypothesis.lm_prefix is not None
        hypothesis.lm_prefix.keep(answer, tokens=1)
        hypothesis.following = answer.states[0].float().log_softmax(-1)
