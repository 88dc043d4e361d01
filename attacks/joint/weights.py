"""How much each piece of evidence counts: learned on the attacker's own texts, released as by the provider."""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from attacks.joint.beam import Engines
from attacks.joint.evidence import BEFORE, FIT, Candidates, Learned, Rows, candidates_of, likeliest
from attacks.joint.reading import Reader
from hiddenlab.channel import Channel
from hiddenlab.core import Progress, Secret, silent
from hiddenlab.job import generator
from hiddenlab.propose.corpus import Corpus
from hiddenlab.slice import Request

WINDOWS, LENGTH = 16, 40
# Where learning starts, and what it is drawn to: as ``FEATURES``.
START = (1.0, 0.8, 0.3, 0.15, 4.0, -3.0, -3.0, -3.0)
RIDGE = 1e-3
STEPS = 60  # of the optimiser
TRIED = 32  # wrong candidates a position
FITS = 0.98  # share of right candidates whose distance counts as fitting


def learn_weights(
    channel: Channel, engines: Engines, reader: Reader, seed: int, progress: Progress = silent
) -> Learned:
    """Fit a conditional logit: at each position of the attacker's texts, behind the right tokens, what is right?"""
    corpus = Corpus(engines.slice, seed + 2)
    windows = [corpus.text_window(LENGTH) for _ in range(WINDOWS)]
    released = channel.release_batch(engines.slice, [w.tolist() for w in windows], generator(seed, "joint"))
    start = torch.tensor(START, device=engines.slice.device)
    tables: list[Tensor] = []
    for i, (observation, secret) in enumerate(released):
        tables += _tables(reader.read(observation), secret, engines, start)
        progress("weighing the evidence", i + 1, len(released))
    right = [float(table[0, FIT]) for table in tables]
    return Learned(fit(tables, start), float(torch.tensor(right).quantile(FITS)) if right else math.inf)


def _tables(
    view: Rows, secret: Secret, engines: Engines, weights: Tensor
) -> list[Float[Tensor, "c features"]]:
    """The features of candidates at each position of one text, the right one first."""
    device = view.shown.device
    truth = torch.tensor(secret.tokens, device=device)
    following = spoken(engines, truth)
    where = torch.arange(len(truth)) if secret.row_order is None else torch.tensor(secret.row_order).argsort()
    rows, path, found, attach = where.tolist(), list[int](), list[Candidates](), list[int]()
    for place, token in enumerate(secret.tokens):
        free = rows[place:]
        tokens = None
        if view.wide is not None:
            tokens = likeliest(view, place, free, following[place], weights, TRIED)
            tokens = torch.cat([truth[place : place + 1], tokens[tokens != token]])
        everything = candidates_of(view, place, free, path, following[place], TRIED, tokens)
        right = (everything.tokens == token) & ((everything.rows == rows[place]) | (everything.rows < 0))
        path.append(int(everything.columns[right][0]) if bool(right.any()) else -1)
        if not bool(right.any()) or len(right) == 1:
            continue
        before = (everything.features[:, :BEFORE] @ weights[:BEFORE]).masked_fill(right, float("inf"))
        found.append(everything.keep(before.topk(min(1 + TRIED, len(before))).indices))
        attach += [place] * len(found[-1])
    if not found:
        return []
    request = Request(
        engines.slice.prefix(offset=engines.offset), truth, leaves=torch.cat([one.tokens for one in found]),
        attach=torch.tensor(attach, device=device),
    )  # fmt: skip
    states = engines.slice.run_all([request])[0].leaves.split([len(one) for one in found])
    for candidates, own in zip(found, states, strict=True):
        candidates.measure(own, torch.arange(len(own), device=device), view, engines.matcher)
    return [candidates.features for candidates in found]


def spoken(engines: Engines, tokens: Tensor) -> list[Tensor | None]:
    """The language model's log-probabilities of every token of a text and of what follows it."""
    if engines.model is None:
        return [None] * (len(tokens) + 1)
    answer = engines.model.run_all([Request(engines.model.prefix(), tokens.to(engines.model.device))])[0]
    return [engines.opening, *answer.chain.float().log_softmax(-1)]


def fit(
    tables: Sequence[Float[Tensor, "_ features"]], start: Float[Tensor, " features"]
) -> Float[Tensor, " features"]:
    """The weights under which the first of each table is likeliest, drawn to where they start."""
    if not tables:
        return start
    scale = torch.cat([table - table[:1] for table in tables]).std(0).clamp(min=1e-3)
    longest = max(len(table) for table in tables)
    padded = torch.stack([
        torch.cat([table, torch.full((longest - len(table), table.shape[1]), float("nan"), device=table.device)])
        for table in tables
    ])  # fmt: skip
    missing = padded[..., 0].isnan()
    with torch.inference_mode(False), torch.enable_grad():
        table = padded.nan_to_num(0.0).clone()
        weights = start.clone().requires_grad_()
        optimiser = torch.optim.LBFGS([weights], max_iter=STEPS, line_search_fn="strong_wolfe")

        def loss() -> Tensor:
            optimiser.zero_grad()
            scores = (table @ weights).masked_fill(missing.clone(), float("-inf"))
            drawn = ((weights - start) * scale.clone()).square().sum()
            value = -scores.log_softmax(1)[:, 0].mean() + RIDGE * drawn
            value.backward()
            return value

        optimiser.step(loss)
    learned = weights.detach()
    return learned if bool(learned.isfinite().all()) else start
