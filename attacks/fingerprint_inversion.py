"""Recover the prompt behind fingerprints of inference verification, by a beam search over the model's proposals.

A fingerprint is evidence about the state at each position (``hiddenlab.matching.fingerprint_evidence``). With the
public language model as prior it gives a posterior over prompts.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hiddenlab.base import Attack
from hiddenlab.errors import InputError, NotApplicableError
from hiddenlab.matching.fingerprint_evidence import Evidence, evidence_of
from hiddenlab.models import Prefix, Request, TruncatedModel
from hiddenlab.proposals.lm_context import opened
from hiddenlab.types import AttackResult, Observation, ObservationInfo, TokenPrediction

CERTAIN = 7.0  # nats: less than one in a thousand
FIRST_PATHS = 8  # factor of paths kept behind the first token: later tokens distinguish them
SETTLED = 4.6  # nats: less than one in a hundred
MIN_WRONG = 40  # wrong tokens needed to estimate the usual evidence of wrong ones
MAX_LAG = 25.0  # nats behind the best path at which a path is dropped
OPENERS = 4  # special tokens that are compared as the context of first tokens
SPECIAL_FIRST = 1e-3  # least probability of a special token as a prompt's first


class FingerprintInversion(Attack):
    """Recover the prompt behind verification fingerprints by a beam search from left to right.

    The language model proposes continuations; each is run, and its state compared with the fingerprint of its position.
    A path's score is the language model's log-probability plus these log-likelihood ratios. Positions whose fingerprint
    says nothing rest on the prior and on what follows: a wrong token changes later states as well. Proposals are taken
    in the order of score over all paths, in chunks that double. This ends when one stands out, when the remaining ones
    are unlikely to contain the right one (where evidence is calibrated), when the largest possible evidence would not
    bring the next one near the best, or when the budget is spent.

    A token is verified where its evidence exceeds every other tried token's by e⁷, and so far exceeds that of wrong
    ones that not one in a thousand vocabularies would contain such a token by chance. ``distance`` in the answer is
    minus the evidence, in nats. States of first tokens are the same for all prompts: they are run once, in ``fit``.

    Knows: the weights, the fingerprints, the channel. Does not know: the states, keys of projections or indices.

    Args:
        breadth: paths kept; behind the first token eight times as many. candidates: continuations in the first chunk.
        budget: tokens tried for a position at most, and up to ``breadth`` × ``candidates`` behind other paths where
            none stands out.
        first_tokens: first tokens compared. evidence: false ignores the fingerprints and leaves the language model's
            own guess, a lower bound.
        every: only one row in so many is used, as if the provider had sent no others (DiFR's stride).
        directions: of a secret projection, as learned (``hiddenlab.matching.fingerprint_evidence``). error: typical
            error of their inner products, as a share of these; None is that of half precision.
    """

    any_width = True
    use_when = (
        "you have what an audit publishes (toploc, logprobs or project at the last layer) and no state itself"
    )

    def __init__(
        self,
        breadth: int = 16,
        candidates: int = 64,
        budget: int = 512,
        first_tokens: int = 2048,
        evidence: bool = True,
        every: int = 1,
        directions: Tensor | None = None,
        error: float | None = None,
    ) -> None:
        if min(breadth, candidates, budget, first_tokens, every) < 1:
            raise InputError(
                f"breadth, candidates, budget, first_tokens and every must be at least 1, not {breadth}, {candidates}, "
                f"{budget}, {first_tokens} and {every}"
            )
        if error is not None and not error > 0:
            raise InputError(f"the error of a learned projection is above 0, not {error}")
        self.breadth, self.candidates, self.budget, self.first_tokens = (
            breadth,
            candidates,
            budget,
            first_tokens,
        )
        self.evidence, self.every = evidence, every
        self.directions, self.error = directions, error
        self._prepared: tuple[TruncatedModel, _Opening] | None = None

    def _fit(self, info: ObservationInfo) -> dict[str, float | str]:
        """Run the first tokens that the language model expects, once for all prompts."""
        started, before = time.perf_counter(), self.model.evaluated_tokens
        self._opening(self.model)
        return {
            "opening_seconds": time.perf_counter() - started,
            "opening_tokens": float(self.model.evaluated_tokens - before),
        }

    def _recover(self, observation: Observation) -> AttackResult:
        """Recover one prompt.

        Raises:
            InputError, NotApplicableError: see ``evidence_of``.
        """
        model = self.model
        evidence = evidence_of(observation, model, self.directions, self.error)
        opening = self._opening(model)
        started, before = time.perf_counter(), (model.evaluated_tokens, model.forward_calls)
        paths, rows, spent = [opening.path()], len(observation.states), False
        for row in range(rows):
            speaks = self.evidence and row % self.every == 0
            tried, enough = self._try(opening, paths, row, evidence if speaks else None)
            spent |= speaks and not enough
            breadth = self.breadth * (FIRST_PATHS if row == 0 and speaks else 1)
            paths = _survivors(opening, paths, tried, row, breadth, last=row == rows - 1)
            self.progress("positions", row + 1, rows)
        evaluated, calls = model.evaluated_tokens - before[0], model.forward_calls - before[1]
        reason = "budget exhausted" if spent else "complete"
        return AttackResult(paths[0].predictions, evaluated, calls, time.perf_counter() - started, reason)

    def _opening(self, model: TruncatedModel) -> "_Opening":
        if self._prepared is None or self._prepared[0] is not model:
            self._prepared = model, _Opening(model, self.first_tokens, self.evidence)
        return self._prepared[1]

    def _try(
        self, opening: "_Opening", paths: list["_Path"], row: int, evidence: Evidence | None
    ) -> tuple["_Continuations", bool]:
        """Try the likeliest tokens behind the paths that expect them most; return them and whether the budget sufficed.

        The budget sufficed where one token stands out, where the others are too unlikely for any evidence, or where
        none is left. The best are then tried behind the other paths too: a wrong earlier token may change little here,
        and later rows decide which path is right.
        """
        model, limit = opening.model, self.first_tokens if row == 0 else self.budget
        scores = torch.stack([path.score + path.following for path in paths])
        if evidence is None:
            best = scores.flatten().topk(min(limit, scores.numel()))
            parents, tokens = best.indices // model.vocab_size, best.indices % model.vocab_size
            return _Continuations(
                parents, tokens, best.values, torch.zeros_like(best.values), model.vocab_size
            ), True
        prior, parents = scores.max(0)
        tokens = prior.topk(min(limit, len(prior))).indices
        options = _Continuations(
            parents[tokens], tokens, prior[tokens], torch.zeros_like(prior[tokens]), model.vocab_size
        )
        if row == 0:
            options.evidence = evidence.score(0, opening.states)
            return options, options.stands_out() or len(tokens) == model.vocab_size
        everything = float(torch.tensor([path.score for path in paths]).logsumexp(0))
        # The prior falls along the tokens: from ``reach`` on no evidence brings a token near the best.
        start, size, reach = 0, self.candidates, len(tokens)
        while start < reach:
            end = start + min(size, model.max_pass_tokens, reach - start)
            options.evidence[start:end] = _scored(
                model, paths, options.parents[start:end], tokens[start:end], evidence, row
            )
            start, size = end, 2 * size
            if options.first(end).stands_out() or (
                evidence.calibrated and options.first(end).settled(everything)
            ):
                break
            reach = min(reach, int((options.prior >= options.first(end).floor(evidence.most)).sum()))
        options, enough = options.first(start), reach < len(tokens) or len(tokens) == model.vocab_size
        decided = options.stands_out() or (evidence.calibrated and options.settled(everything))
        # The whole vocabulary again would double the cost, mostly to decide between paths.
        others = self.candidates if decided else min(self.budget, self.breadth * self.candidates)
        parents, tokens = options.elsewhere(scores, evidence.most, others)
        more = _scored(model, paths, parents, tokens, evidence, row)
        return options.with_more(parents, tokens, scores[parents, tokens], more), decided or enough

    def __repr__(self) -> str:
        return (
            "FingerprintInversion: knows the weights, the fingerprints and the channel; "
            "not the states, tokens or keys"
        )


@dataclass
class _Path:
    """One hypothesis: the tokens so far.

    Attributes:
        score: log-probability plus evidence. known: prefix as the provider ran it. prior: the same tokens behind the
            opener, for the language model. following: log-probabilities of the next token. predictions: the answer
            so far.
    """

    score: float
    known: Prefix
    prior: Prefix
    following: Float[Tensor, " v"]
    predictions: tuple[TokenPrediction, ...] = ()


@dataclass
class _Continuations:
    """Continuations at one position.

    Attributes:
        parents: the path each continues. tokens: by which token. prior: score before the evidence. evidence: nats.
    """

    parents: Int[Tensor, " c"]
    tokens: Int[Tensor, " c"]
    prior: Float[Tensor, " c"]
    evidence: Float[Tensor, " c"]
    vocabulary: int

    def first(self, count: int) -> "_Continuations":
        """Return the first ``count`` continuations."""
        return _Continuations(
            self.parents[:count], self.tokens[:count], self.prior[:count], self.evidence[:count], self.vocabulary
        )  # fmt: skip

    def floor(self, most: float) -> float:
        """Return the prior below which even the largest evidence leaves a continuation behind the best by e⁷."""
        return float((self.prior + self.evidence).max()) - most - CERTAIN

    def elsewhere(
        self, scores: Float[Tensor, "paths v"], most: float, limit: int
    ) -> tuple[Int[Tensor, " more"], Int[Tensor, " more"]]:
        """Return good tokens with paths that they were not tried behind, as (paths, tokens), the likeliest first."""
        total = self.prior + self.evidence
        open_ = torch.zeros_like(scores, dtype=torch.bool)
        open_[:, self.tokens[total >= total.max() - MAX_LAG]] = True
        open_ &= scores >= self.floor(most)
        open_[self.parents, self.tokens] = False
        order = scores.masked_fill(~open_, -math.inf).flatten().topk(min(limit, int(open_.sum()))).indices
        return order // scores.shape[1], order % scores.shape[1]

    def with_more(self, parents: Tensor, tokens: Tensor, prior: Tensor, evidence: Tensor) -> "_Continuations":
        """Return these and further continuations."""
        return _Continuations(
            torch.cat([self.parents, parents]), torch.cat([self.tokens, tokens]),
            torch.cat([self.prior, prior]), torch.cat([self.evidence, evidence]), self.vocabulary,
        )  # fmt: skip

    def margin(self, i: int) -> float | None:
        """Return how far a continuation's evidence is above any other token's; None where there is no other."""
        others = self.evidence[self.tokens != self.tokens[i]]
        return float(self.evidence[i] - others.max()) if len(others) else None

    def sure(self, i: int) -> bool:
        """Return whether a continuation's evidence cannot be chance, see ``FingerprintInversion``."""
        others = self.evidence[self.tokens != self.tokens[i]]
        if len(others) < MIN_WRONG:
            return False
        # Wrong tokens of one context resemble each other, so that some agree more than by chance alone:
        # their evidence is extrapolated from its largest tenth with an exponential tail.
        start = others.quantile(0.9)
        fall = float((others[others >= start] - start).mean().clamp(min=1.0))
        usual = float(start.clamp(min=0.0)) + fall * (
            CERTAIN + math.log(max(self.vocabulary, len(others)) / 10)
        )
        return float(self.evidence[i]) >= max(usual, CERTAIN + float(others.max()))

    def settled(self, everything: float) -> bool:
        """Return whether the untried continuations contain the right one with a chance below one in a hundred.

        Evidence compares a state with any other, so the posterior of untried continuations is their prior.

        Args:
            everything: logarithm of the weight of all paths, which is that of all their continuations.
        """
        posterior, tried = (
            float(part.double().logsumexp(0)) for part in (self.prior + self.evidence, self.prior)
        )
        rest = everything + math.log1p(-min(math.exp(tried - everything), 1 - 1e-6))
        return posterior - rest >= SETTLED

    def stands_out(self) -> bool:
        """Return whether the best by score is certain, so that further candidates cannot be better."""
        return self.sure(int((self.prior + self.evidence).argmax()))


class _Opening:
    """What precedes every prompt: the opener of the language model, and the states of first tokens.

    First tokens are predicted behind the special token with the highest entropy, all others behind the opener that
    suits the attacker's own text (``hiddenlab.proposals.lm_context``).

    Attributes:
        tokens: first tokens, likeliest first. states: theirs, without the opener.
    """

    def __init__(self, model: TruncatedModel, count: int, run: bool) -> None:
        self.model, self._head = model, _head(model)
        self.following = torch.full((model.vocab_size,), -math.log(model.vocab_size), device=model.device)
        self._opened = opened(model, log_probs=self.log_probs)
        special = model.special_ids[:OPENERS]
        if special:
            openers = torch.tensor(special, device=model.device)
            guesses = self.log_probs(model.prefix().branch(openers))
            most = int((-(guesses.exp() * guesses).sum(1)).argmax())
            self.following = guesses[most].clone()
            # A tokenizer may put a special token first, which the model never saw behind another.
            self.following[openers] = self.following[openers].clamp(min=math.log(SPECIAL_FIRST))
        self.tokens = self.following.topk(min(count, model.vocab_size)).indices
        self.states = model.prefix().branch(self.tokens) if run else model.embedding[:0].detach()

    def log_probs(self, states: Float[Tensor, "c d"]) -> Float[Tensor, "c v"]:
        """Return log-probabilities of the next token from the truncated model's states."""
        return self._head(states).float().log_softmax(1)

    def path(self) -> _Path:
        """Return the empty hypothesis."""
        return _Path(0.0, self.model.prefix(), self._opened.fork(), self.following)


def _head(model: TruncatedModel) -> Callable[[Tensor], Tensor]:
    """Return the map from a model's states to logits: a product with the head, which may be the embedding table."""
    if model.site.stream == "logits":
        return lambda states: states
    if model.site.stream != "final_norm":
        raise NotApplicableError(f"fingerprints are of the streams final_norm and logits, not {model.site}")
    config = model.module.config
    tied = bool(getattr(config, "tie_word_embeddings", False))
    whole = None if tied else model.sibling(stream="logits").module
    table = (model.embedding if whole is None else whole.get_output_embeddings().weight).detach()  # type: ignore[operator,union-attr]
    cap = getattr(config, "final_logit_softcapping", None)

    def logits(states: Tensor) -> Tensor:
        plain = states.to(table.dtype) @ table.T
        return plain if cap is None else torch.tanh(plain / cap) * cap

    return logits


def _scored(
    model: TruncatedModel,
    paths: Sequence[_Path],
    parents: Int[Tensor, " c"],
    tokens: Int[Tensor, " c"],
    evidence: Evidence,
    row: int,
) -> Float[Tensor, " c"]:
    """Return the evidence of tokens behind their paths, in passes of bounded size, since states may be very wide."""
    scores = torch.zeros(len(tokens), device=parents.device)
    for part in torch.arange(len(tokens), device=parents.device).split(model.max_pass_tokens):
        states = _continued(model, paths, parents[part], tokens[part])
        scores[part] = evidence.score(row, states).to(scores)
    return scores


def _continued(
    model: TruncatedModel, paths: Sequence[_Path], parents: Int[Tensor, " c"], tokens: Int[Tensor, " c"]
) -> Float[Tensor, "c d"]:
    """Return states of tokens behind their paths, in one pass; tokens of one path share its keys and values."""
    if not len(tokens):
        return model.embedding[:0].detach()
    order = parents.argsort(stable=True)
    requests = [
        Request(paths[parent].known, tokens[:0], branches=tokens[parents == parent])
        for parent in parents.unique().tolist()
    ]
    states = torch.cat([answer.branches for answer in model.run(requests, keep=False)])
    return states[order.argsort()]


def _survivors(
    opening: _Opening,
    paths: Sequence[_Path],
    options: _Continuations,
    row: int,
    breadth: int,
    last: bool,
) -> list[_Path]:
    """Return the best continuations as paths, best first, without those too far behind to recover."""
    scores = options.prior + options.evidence
    best = scores.topk(min(breadth, len(scores)))
    kept = best.indices[best.values >= best.values[0] - MAX_LAG].tolist()
    results, chains, requests = [], [], []
    for i in kept:
        parent, token = paths[int(options.parents[i])], options.tokens[i : i + 1]
        recovery = TokenPrediction(
            int(token),
            row,
            -float(options.evidence[i]),
            options.margin(i),
            len(options.tokens),
            options.sure(i),
        )
        known, prior = parent.known, parent.prior
        if not last:
            known, prior = known.fork(), prior.fork()
            requests += [Request(known, token), Request(prior, token)]
        chains.append((known, prior))
        results.append((float(scores[i]), (*parent.predictions, recovery)))
    following = [opening.following] * len(kept)
    if not last:
        answers = opening.model.run(requests)
        for request, answer in zip(requests, answers, strict=True):
            request.prefix.keep(answer, tokens=1)
        following = list(opening.log_probs(torch.cat([answer.states for answer in answers[1::2]])))
    return [
        _Path(score, known, prior, after, recoveries)
        for (score, recoveries), (known, prior), after in zip(results, chains, following, strict=True)
    ]
