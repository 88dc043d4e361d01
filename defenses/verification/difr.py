"""Score how far a provider's tokens and activations are from a trusted reference's (DiFR), token by token.

Scores grow with divergence. All positions of a request are scored from one prefill over prompt and output.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import DynamicCache

from hiddenlab.defenses.verification.causal_lm import WholeModel
from hiddenlab.defenses.verification.closed_form import NoiseOn, ipt_interval, logit_rank, margins, pairwise
from hiddenlab.defenses.verification.sampling import (
    Noise,
    Sampling,
    StreamNoise,
    invert,
    kept,
    perturbed,
    probabilities,
    sample,
)
from hiddenlab.defenses.verification.transcript import Transcript
from hiddenlab.errors import HiddenlabError, InputError

SCORES = ("margin", "likelihood", "mismatch", "cross_entropy", "rank")
SIGMA = 0.08  # of the likelihood score's noise, in logits
IPT_SIGMA = 0.01  # of the same for the inverse transform, in probability


@dataclass(frozen=True)
class Replay:
    """What the verifier knows about a request after one prefill.

    Attributes:
        logits: at each output token, float32.
        gumbel: shared noise (gumbel sampling only).
        uniform: shared numbers (inverse probability transform only).
        tokens: as claimed.
        sampling: of the request.
        states: final-norm states of all positions.
    """

    logits: Float[Tensor, "n v"]
    gumbel: Float[Tensor, "n v"] | None
    uniform: Float[Tensor, " n"] | None
    tokens: Int[Tensor, " n"]
    sampling: Sampling
    states: Float[Tensor, "t d"]

    @property
    def output_states(self) -> Float[Tensor, "n d"]:
        """The states from which the output tokens were drawn, one row per token."""
        return self.states[-1 - len(self.tokens) : -1]


class Verifier:
    """A trusted reference that recomputes requests.

    Args:
        model: as advertised. noise: the same as the provider's.
    """

    def __init__(self, model: WholeModel, noise: Callable[[int], Noise] = StreamNoise) -> None:
        self.model = model
        self.noise = noise

    def replay(self, transcript: Transcript) -> Replay:
        """Recompute a request with one prefill, and draw its random numbers.

        Raises:
            InputError: tokens outside the vocabulary, or too many for the model.
            HiddenlabError: the model computes no numbers; that is no fault of the request's.
        """
        if transcript.modes is not None:
            raise InputError(
                f"request {transcript.id!r} was decoded speculatively: its random numbers are drawn in another order, "
                "and its draft model is needed ('hiddenlab verify score --draft')"
            )
        transcript.check_vocabulary(self.model.vocabulary)
        everything = (*transcript.prompt, *transcript.output)
        self.model.check_length(len(everything), f"request {transcript.id!r}")
        states, logits = self.model.prefill(everything, len(transcript.output))
        if not bool(states.isfinite().all()) or bool(logits.isnan().any()):
            raise HiddenlabError(
                f"the reference {self.model.name} computes NaN or infinity for request {transcript.id!r}, so that "
                "nobody can be judged by it; its checkpoint is damaged, or --dtype is too narrow for it"
            )
        gumbel, uniform = draws(transcript, logits.shape[1], self.noise)
        return Replay(
            logits.float().cpu(), gumbel, uniform, torch.tensor(transcript.output), transcript.sampling, states.cpu()
        )  # fmt: skip

    def stepwise(self, transcript: Transcript) -> Float[Tensor, " n"]:
        """Return 1 where the verifier samples another token, by one decoding step a token: the slow ``mismatch``.

        Each step is fed the claimed tokens so far. Source: Rinberg et al. 2025, Algorithm 5, which counts the tokens
        that agree; ``mismatch`` of a ``replay`` is Algorithm 6.
        """
        source, cache = self.noise(transcript.sampling.seed), DynamicCache()
        before, found = list(transcript.prompt), list[float]()
        fed = 0
        for token in transcript.output:
            feed = torch.tensor([before[fed:]], device=self.model.device)
            mask = torch.ones(1, len(before), dtype=torch.long, device=self.model.device)
            logits = self.model.step(feed, mask, cache).logits.float().cpu()
            found.append(float(sample(logits, source, transcript.sampling, before) != token))
            fed = len(before)
            before.append(token)
        return torch.tensor(found)


def draws(
    transcript: Transcript, width: int, noise: Callable[[int], Noise]
) -> tuple[Float[Tensor, "n v"] | None, Float[Tensor, " n"] | None]:
    """Draw the random numbers of a request's output tokens: Gumbel noise or uniform numbers, as its method needs."""
    sampling = transcript.sampling
    if sampling.greedy:
        return None, None
    source, before = noise(sampling.seed), list(transcript.prompt)
    rows: list[Tensor] = []
    for token in transcript.output:
        if sampling.method == "gumbel":
            rows.append(source.gumbel(width, before))
        else:
            rows.append(torch.tensor(source.uniform(before), dtype=torch.float64))
        before.append(token)
    together = torch.stack(rows)
    return (together, None) if sampling.method == "gumbel" else (None, together)


def _gumbel(replay: Replay) -> Float[Tensor, "n v"]:
    """Return the shared Gumbel noise; zeros for a greedy request."""
    if replay.gumbel is not None:
        return replay.gumbel
    if not replay.sampling.greedy:
        raise InputError("the margin is defined for Gumbel-max and greedy sampling; see ipt_likelihood")
    return torch.zeros_like(replay.logits)


def margin(replay: Replay) -> Float[Tensor, " n"]:
    """Return how far the claimed token is below the verifier's, in logits after noise (DiFR, Equation 1).

    Infinite for a filtered token.
    """
    everything = margins(replay.logits, _gumbel(replay), replay.sampling)
    return everything.gather(1, replay.tokens[:, None])[:, 0].float()


def likelihood(
    behind: Float[Tensor, " n"], sigma: float = SIGMA, noise_on: NoiseOn = "both"
) -> Float[Tensor, " n"]:
    """Return −log of the probability that noise of σ per logit closes a margin (DiFR, appendix A).

    Larger values mean more divergence.

    Args:
        behind: margins.
        sigma: standard deviation of the noise, in logits.
        noise_on: see ``closed_form.pairwise``.
    """
    # Where tokens agree the margin is 0 and the score is 0, as in the paper's tables; its formula gives log 2.
    return torch.where(behind == 0, 0.0, -pairwise(behind, sigma, noise_on=noise_on)).float()


def mismatch(replay: Replay) -> Float[Tensor, " n"]:
    """Return 1 where the verifier draws another token from the same random numbers, else 0."""
    return (verifier_tokens(replay) != replay.tokens).float()


def verifier_tokens(replay: Replay) -> Int[Tensor, " n"]:
    """Return the token that the verifier draws at each position."""
    if replay.uniform is not None:
        return invert(probabilities(replay.logits, replay.sampling), replay.uniform)
    return perturbed(replay.logits, _gumbel(replay), replay.sampling).argmax(1)


def cross_entropy(replay: Replay) -> Float[Tensor, " n"]:
    """Return −log probability of each claimed token, in nats, at the request's temperature and without filters.

    It is the baseline that needs no seed. A greedy request is scored at temperature 1.
    """
    return surprise(replay.logits, replay.tokens, replay.sampling)


def filtered_cross_entropy(replay: Replay) -> Float[Tensor, " n"]:
    """Return −log probability of each claimed token in the distribution that is sampled from (DiFR, table 5), in nats.

    That is after top-k and top-p. A filtered token has no probability left: its value is infinite. The tokens that are
    kept share the whole probability, so that their values are smaller than those of ``cross_entropy``. A greedy request
    has no filters, and the two are equal.
    """
    kept_only = replay.logits.masked_fill(~kept(replay.logits, replay.sampling), -torch.inf)
    return surprise(kept_only, replay.tokens, replay.sampling)


def surprise(
    logits: Float[Tensor, "n v"], tokens: Int[Tensor, " n"], sampling: Sampling
) -> Float[Tensor, " n"]:
    """Return −log probability of tokens, in nats, at a request's temperature (see ``cross_entropy``)."""
    temperature = 1.0 if sampling.greedy else sampling.temperature
    logs = (logits / temperature).log_softmax(1)
    return -logs.gather(1, tokens[:, None])[:, 0]


def rank(replay: Replay) -> Float[Tensor, " n"]:
    """Return the claimed token's rank by raw logit; the likeliest has rank 1."""
    return logit_rank(replay.logits, replay.tokens).float()


def ipt_likelihood(replay: Replay, sigma: float = IPT_SIGMA) -> Float[Tensor, " n"]:
    """Return −log of the Gaussian mass, around the shared uniform number, on the claimed token's interval.

    DiFR, appendix B.2.

    Raises:
        InputError: the request was not sampled by inverse probability transform.
    """
    if replay.uniform is None:
        raise InputError("this score needs a request that was sampled by inverse probability transform")
    shares = probabilities(replay.logits, replay.sampling).double()
    own = replay.tokens[:, None]
    upper = shares.cumsum(1).gather(1, own)[:, 0]
    lower = upper - shares.gather(1, own)[:, 0]
    return -ipt_interval(lower, upper, replay.uniform, noise_sd=sigma).float()


def monte_carlo(
    replay: Replay,
    sigma: float,
    generator: torch.Generator,
    *,
    trials: int = 1000,
    top: int = 100,
    epsilon: float = 1e-6,
) -> Float[Tensor, " n"]:
    """Return −log share of trials with noisy logits in which the sampler draws the claimed token (appendix B.1).

    The noise is Gaussian with standard deviation σ. Only the ``top`` largest logits take part, as in the paper; the
    random numbers of the request stay the same.
    """
    top = min(top, replay.logits.shape[1])
    values, places = replay.logits.topk(top, dim=1)
    hits = torch.zeros(len(replay.tokens))
    # Restore the order of the vocabulary, which the inverse transform depends on.
    places, order = places.sort(dim=1)
    values = values.gather(1, order)
    gumbel = None if replay.gumbel is None else replay.gumbel.gather(1, places)
    for _ in range(trials):
        noisy = values + sigma * torch.randn(values.shape, generator=generator)
        if replay.uniform is not None:
            drawn = invert(probabilities(noisy, replay.sampling), replay.uniform)
        else:
            drawn = perturbed(
                noisy, torch.zeros_like(noisy) if gumbel is None else gumbel, replay.sampling
            ).argmax(1)
        hits += places.gather(1, drawn[:, None])[:, 0] == replay.tokens
    return -(hits / trials + epsilon).log()


def token_scores(
    replay: Replay, sigma: float = SIGMA, *, noise_on: NoiseOn = "both", ipt_sigma: float = IPT_SIGMA
) -> dict[str, Float[Tensor, " n"]]:
    """Return all cheap per-token scores of a request, by name (``SCORES``).

    Args:
        sigma, noise_on: of ``likelihood``. ipt_sigma: of ``ipt_likelihood``.
    """
    if replay.uniform is None:
        behind = margin(replay)
        first = {"margin": behind, "likelihood": likelihood(behind, sigma, noise_on)}
    else:
        first = {"likelihood": ipt_likelihood(replay, ipt_sigma)}
    return {
        **first, "mismatch": mismatch(replay), "cross_entropy": cross_entropy(replay), "rank": rank(replay)
    }  # fmt: skip


def uniform_ranks(replay: Replay, generator: torch.Generator) -> Float[Tensor, " n"]:
    """Return the claimed token's place in the verifier's distribution, in [0, 1] (rank-uniformity test).

    Tokens in order of falling probability fill the unit interval; a number is drawn uniformly from the claimed token's
    piece. Under the claimed distribution it is uniform for any seed. A filtered token gives 1.
    """
    shares = probabilities(replay.logits, replay.sampling)
    own = shares.gather(1, replay.tokens[:, None])
    # Logits of 16 bits are often equal; an order among equals keeps their pieces from overlapping.
    before = torch.arange(shares.shape[1]) < replay.tokens[:, None]
    above = (shares * ((shares > own) | ((shares == own) & before))).sum(1)
    drawn = above + own[:, 0] * torch.rand(len(above), generator=generator)
    return torch.where(own[:, 0] > 0, drawn, torch.ones_like(drawn))


def activation_distance(
    fingerprint: Float[Tensor, "_ _"], own: Float[Tensor, "rows k"]
) -> Float[Tensor, " rows"]:
    """Return the L2 distance of fingerprints in each row, the score of Activation-DiFR (DiFR, Algorithm 3).

    Raises:
        InputError: the numbers of rows or of projections differ.
    """
    if fingerprint.shape != own.shape:
        raise InputError(
            f"the fingerprint has {tuple(fingerprint.shape)} numbers, the verifier's {tuple(own.shape)}"
        )
    return torch.linalg.vector_norm(fingerprint.float() - own.float(), dim=1)


def rows_every(rows: Float[Tensor, "n d"], every: int) -> Float[Tensor, "m d"]:
    """Return every ``every``-th row, from the first on."""
    if every < 1:
        raise InputError(f"every {every}: a whole number from 1")
    return rows[::every]
