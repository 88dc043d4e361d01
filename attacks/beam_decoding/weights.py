"""Learn the weight of each feature on the attacker's own texts, released as by the provider."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hiddenlab.attacks.beam_decoding.features import (
    BEFORE,
    Candidates,
    Learned,
    Rows,
    candidates_of,
    likeliest,
    unseen,
)
from hiddenlab.attacks.beam_decoding.hypotheses import Engines
from hiddenlab.attacks.beam_decoding.row_features import Reader
from hiddenlab.channels import Channel
from hiddenlab.models import Request
from hiddenlab.proposals.corpus import Corpus
from hiddenlab.types import GroundTruth, Progress, silent
from hiddenlab.utils.random import generator

WINDOWS, LENGTH = 16, 40
# Start of the fit, and the mean of its prior, in the order of ``FEATURES``.
START = (1.0, 0.8, 0.3, 0.15, 1.0, 0.05, -3.0, -3.0, -3.0)
RIDGE = 1e-3
STEPS = 60  # of the optimiser
WRONG_CANDIDATES = 32  # wrong candidates a position
# Shares: of wrong best candidates that may count as reliable; of right ones that may count as unreliable though no
# wrong one comes near; and of right ones that must count as reliable for the rule to be used.
MAX_WRONG, MAX_MISSED, MIN_RELIABLE = 0.02, 0.02, 0.1


@dataclass(frozen=True)
class Table:
    """Candidates for one position, the right one first.

    Attributes:
        offset: logarithm of how many vocabulary tokens each candidate stands for. Wrong ones that score well are
            included themselves; a randomly drawn one stands for many. Without this, a good score would count against a
            token.
        tried: the likeliest before any is run, as a decoder runs them. unseen: maps weights to ``features.unseen`` of
            all others; None where the whole vocabulary is not available.
    """

    features: Float[Tensor, "c features"]
    offset: Float[Tensor, " c"]
    tried: Bool[Tensor, " c"]
    unseen: Callable[[Float[Tensor, " features"]], float] | None = None


def learn_weights(
    channel: Channel,
    engines: Engines,
    reader: Reader,
    seed: int,
    used: Sequence[bool],
    progress: Progress = silent,
) -> Learned:
    """Fit a conditional logit that picks the right candidate at each position of the attacker's texts.

    Args:
        used: whether each of ``FEATURES`` may have a weight.
    """
    corpus = Corpus(reader.model, seed + 2)
    windows = [corpus.text_window(LENGTH) for _ in range(WINDOWS)]
    drawn = generator(seed, "joint")
    released = channel.release_batch(reader.model, [w.tolist() for w in windows], drawn)
    kept = torch.tensor(used, device=engines.model.device).float()
    start = torch.tensor(START, device=engines.model.device) * kept
    tables: list[Table] = []
    for i, (observation, truth) in enumerate(released):
        tables += _tables(reader.read(observation), truth, engines, start, drawn)
        progress("weighing the evidence", i + 1, len(released))
    # Without any evidence of it, the weight of a feature stays 0.
    tables = [replace(table, features=table.features * kept) for table in tables]
    weights = fit(tables, start)
    return Learned(weights, lead_of(tables, weights))


def _tables(
    view: Rows, ground_truth: GroundTruth, engines: Engines, weights: Tensor, drawn: torch.Generator
) -> list[Table]:
    """Return the candidates at each position of one text, the right one first."""
    device, vocabulary = view.shown.device, engines.model.vocab_size
    truth = torch.tensor(ground_truth.tokens, device=device)
    following = following_log_probs(engines, truth)
    where = (
        torch.arange(len(truth))
        if ground_truth.row_order is None
        else torch.tensor(ground_truth.row_order).argsort()
    )
    rows, path, pairs = where.tolist(), list[int](), list[tuple[Candidates, Table]]()
    branches, parents = list[Tensor](), list[Tensor]()
    for place, token in enumerate(ground_truth.tokens):
        free, tokens, chance, unrun = rows[place:], None, truth[:0], None
        if view.wide is not None:
            hard = likeliest(view, place, free, following[place], weights, WRONG_CANDIDATES)
            chance = torch.randperm(vocabulary, generator=drawn)[:WRONG_CANDIDATES].to(device)
            chance = chance[~torch.isin(chance, hard) & (chance != token)]
            tokens = torch.cat([truth[place : place + 1], hard[hard != token], chance])
            log_probs = following[place]
            # In half precision to save memory: they are kept for every position.
            unrun = partial(
                unseen, view, place, free, None if log_probs is None else log_probs.half(), tokens=hard
            )
        candidates = candidates_of(view, place, free, path, following[place], tokens)
        right = (candidates.tokens == token) & (candidates.rows == rows[place])
        path.append(int(candidates.columns[right][0]) if bool(right.any()) else -1)
        if not bool(right.any()) or len(right) == 1:
            continue
        before = (candidates.features[:, :BEFORE] @ weights[:BEFORE]).masked_fill(right, float("inf"))
        most = 1 + WRONG_CANDIDATES if tokens is None else len(before)
        candidates = candidates.keep(before.topk(min(most, len(before))).indices)
        stands_for = (vocabulary - (0 if tokens is None else len(tokens))) / max(1, len(chance))
        offset = torch.where(torch.isin(candidates.tokens, chance), math.log(max(1.0, stands_for)), 0.0)
        tried = torch.isin(candidates.tokens, hard) if tokens is not None else torch.ones_like(offset).bool()
        pairs.append((candidates, Table(candidates.features, offset, tried, unrun)))
        branches.append(candidates.tokens.unique())
        parents.append(torch.full_like(branches[-1], place))
    if not pairs:
        return []
    request = Request(engines.beginning(), truth, branches=torch.cat(branches), parents=torch.cat(parents))
    states = engines.matcher.view(engines.model.run_all([request])[0].branches)
    parts = states.split([len(branch) for branch in branches])
    for (candidates, _), ran, own in zip(pairs, branches, parts, strict=True):
        candidates.measure(own, torch.searchsorted(ran, candidates.tokens), view, engines.matcher)
    return [table for _, table in pairs]


def following_log_probs(engines: Engines, tokens: Tensor) -> list[Tensor | None]:
    """Return the language model's log-probabilities of every token of a text and of what follows it."""
    speaker = engines.speaker
    if speaker is None:
        return [None] * (len(tokens) + 1)
    answer = speaker.model.run_all([Request(speaker, tokens.to(speaker.model.device))])[0]
    return [engines.opening, *answer.states.float().log_softmax(-1)]


def lead_of(tables: Sequence[Table], weights: Float[Tensor, " features"]) -> float:
    """Return the lead over all candidates not run that makes the best candidate reliable, in nats.

    At positions whose right candidate was not run, a share of ``MAX_WRONG`` has a best candidate that is further ahead.
    Where the two cases lie apart, all but ``MAX_MISSED`` of the right ones are further ahead, since leads of wrong ones
    grow with the number of candidates run. Minus infinity where there are none of either, or where fewer than
    ``MIN_RELIABLE`` of the right ones would be reliable.
    """
    right, wrong = list[float](), list[float]()
    for table in tables:
        if table.unseen is None:
            continue
        totals = (table.features @ weights).masked_fill(~table.tried, float("-inf"))
        lead = float(totals.max()) - table.unseen(weights)
        if not bool(table.tried[0]):
            wrong.append(lead)
        elif int(totals.argmax()) == 0:
            right.append(lead)
    if not right or not wrong:
        return -math.inf
    right_leads = torch.tensor(right)
    limit = torch.tensor(wrong).quantile(1 - MAX_WRONG).maximum(right_leads.quantile(MAX_MISSED))
    return float(limit) if float((right_leads >= limit).float().mean()) >= MIN_RELIABLE else -math.inf


def fit(tables: Sequence[Table], start: Float[Tensor, " features"]) -> Float[Tensor, " features"]:
    """Return the weights under which each table's first candidate is likeliest, with a penalty around ``start``."""
    if not tables:
        return start
    scale = torch.cat([entry.features - entry.features[:1] for entry in tables]).std(0).clamp(min=1e-3)
    padded = pad_sequence([entry.features for entry in tables], batch_first=True)
    # Padding gets probability 0.
    offset = pad_sequence([entry.offset for entry in tables], batch_first=True, padding_value=float("-inf"))
    with torch.inference_mode(False), torch.enable_grad():
        table, chance = padded.clone(), offset.clone()
        weights = start.clone().requires_grad_()
        optimiser = torch.optim.LBFGS([weights], max_iter=STEPS, line_search_fn="strong_wolfe")

        def loss() -> Tensor:
            optimiser.zero_grad()
            drawn = ((weights - start) * scale.clone()).square().sum()
            value = -(table @ weights + chance).log_softmax(1)[:, 0].mean() + RIDGE * drawn
            value.backward()
            return value

        optimiser.step(loss)
    learned = weights.detach().clone()
    learned[:BEFORE].clamp_(min=0)  # these features never count against a token
    return learned if bool(learned.isfinite().all()) else start
