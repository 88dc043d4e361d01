"""Predict the states of all untried tokens at one position from those of candidates that failed there.

A probe is trained once and has no context. At a position where it fails, the attacker has already run some hundred
wrong candidates in the exact context; their states show what this context does to a token. A kernel ridge regression
maps a context-free description of every token (its state after the first layers, behind a fixed opening) to its state
here, and so predicts the states of the whole vocabulary. Tokens whose prediction lies nearest to the observed row come
first. "Nearest" is measured with the covariance of the leave-one-out errors, since some directions are predicted well
and others not at all. No paper describes this (docs/log/002-cheaper-proposals.md has figures).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hiddenlab.models import TruncatedModel
from hiddenlab.proposals.probe import fast_dtype
from hiddenlab.types import Progress, silent

# Deeper descriptions predict no better, and these cost little (docs/log/002-cheaper-proposals.md).
FEATURE_LAYERS = 2
OPENING = "x = 3\n"
MAX_FEATURES = 1024  # wider states are projected
RIDGE, SHRINK, LINEAR, BANDWIDTH, CLIP = 0.3, 0.1, 0.5, 1.0, 6.0
CHUNK = 2048
LEARN_HALF = 1000  # candidates at which a prediction has half its weight (docs/log/005-better-probe.md)


@dataclass(frozen=True)
class Adapter:
    """Predicts in-context states from those of candidates already tried.

    Attributes:
        features: a context-free description of every token, see ``describe``.
    """

    features: Float[Tensor, "v f"]

    @classmethod
    def describe(cls, shallow: TruncatedModel, progress: Progress = silent) -> "Adapter":
        """Describe tokens by their states in a shallow truncated model, behind a fixed opening; standardised, bounded.

        Args:
            shallow: the first ``FEATURE_LAYERS`` layers (or fewer) of the model under attack.
        """
        known = [] if shallow.tokenizer is None else shallow.tokenizer(OPENING)["input_ids"]
        opening = shallow.embedded(known) or [1 % shallow.vocab_size] * 4
        prefix = shallow.prefix()
        prefix.extend(torch.tensor(opening, device=shallow.device))
        parts, narrower = [], None
        if shallow.width > MAX_FEATURES:
            generator = torch.Generator().manual_seed(0)
            narrower = torch.randn(shallow.width, MAX_FEATURES, generator=generator).to(shallow.device)
        vocabulary = torch.arange(shallow.vocab_size, device=shallow.device)
        for i, tokens in enumerate(vocabulary.split(shallow.max_pass_tokens)):
            progress("describing the vocabulary", i * shallow.max_pass_tokens, shallow.vocab_size)
            states = prefix.branch(tokens).float()
            parts.append(states if narrower is None else states @ narrower)
        progress("describing the vocabulary", shallow.vocab_size, shallow.vocab_size)
        features = torch.cat(parts)
        features = (features - features.mean(0)) / (features.std(0) + 1e-6)
        return cls(features.clamp_(-CLIP, CLIP).to(fast_dtype(shallow.device)))

    def distances(
        self,
        tokens: Int[Tensor, " n"],
        states: Float[Tensor, "n d"],
        observed: Float[Tensor, "rows d"],
    ) -> Float[Tensor, " v"]:
        """Return the squared distance from each token's predicted state to the nearest observed row.

        Args:
            tokens, states: candidates tried in this context and their states, in the matcher's form.
            observed: the target rows, in the same form.
        """
        known = self.features[tokens]
        mean = states.mean(0)
        # In half precision the gram matrix of tokens that are nearly equal is not positive definite.
        gram = _kernel(known.float(), known.float())
        gram.diagonal().add_(RIDGE)
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(gram))
        weights = inverse @ (states - mean)
        errors = (
            weights / inverse.diagonal()[:, None]
        )  # leave-one-out errors: what each candidate's own prediction misses without it
        covariance = errors.T @ errors / len(errors)
        covariance.diagonal().add_(SHRINK * covariance.diagonal().mean() + 1e-20)
        root = torch.linalg.cholesky(covariance)
        # Whitened once here, not for every token of the vocabulary.
        weights = torch.linalg.solve_triangular(root, weights.T, upper=False).T
        targets = torch.linalg.solve_triangular(root, (observed - mean).T, upper=False).T
        squares = [
            torch.cdist(predicted, targets).square().amin(1)
            for predicted in _predicted(self.features, known, weights)
        ]
        return torch.cat(squares)

    def log_likelihoods(
        self, tokens: Int[Tensor, " n"], states: Float[Tensor, "n d"], observed: Float[Tensor, "rows d"]
    ) -> Float[Tensor, " v"]:
        """Return ``distances`` as log-likelihoods, up to a constant: see ``log_likelihood``."""
        return log_likelihood(self.distances(tokens, states, observed), len(tokens))


def log_likelihood(distances: Float[Tensor, " v"], count: int) -> Float[Tensor, " v"]:
    """Return a Gaussian log-likelihood: minus half the squared distance, in nats, weighted by a candidate count.

    The weight is smaller the fewer candidates the prediction and its covariance were learned from.
    """
    return -count / (count + LEARN_HALF) / 2 * distances


def _predicted(
    features: Float[Tensor, "v f"], known: Float[Tensor, "n f"], weights: Float[Tensor, "n d"]
) -> Iterator[Float[Tensor, "_ d"]]:
    """Yield ``_kernel(features, known) @ weights``, part by part.

    The linear kernel is one small product. Of the Gaussian one only exp(a·b) is computed for every pair; the factors of
    a alone and of b alone are applied to the rows of the result and of the weights.
    """
    dtype, count = features.dtype, features.shape[1]
    linear = (LINEAR / count * (known.float().T @ weights)).to(dtype)
    scaled = 2 * _own_factor(known)[:, None] * weights
    scaled = scaled.to(dtype)
    scale = 1 / (BANDWIDTH * count)
    for part in features.split(CHUNK):
        pairs = ((part * scale) @ known.T).exp_()
        yield (pairs @ scaled).float().mul_(_own_factor(part)[:, None]).add_((part @ linear).float())


def _own_factor(a: Float[Tensor, "m f"]) -> Float[Tensor, " m"]:
    """Return exp(−|a|²/2) in the kernel's units."""
    return (a.float().square().sum(1) / (-2 * BANDWIDTH * a.shape[1])).exp_()


def _kernel(a: Float[Tensor, "m f"], b: Float[Tensor, "n f"]) -> Float[Tensor, "m n"]:
    """Return a Gaussian kernel plus a linear one, in units of the number of features."""
    inner = (a @ b.T).float()
    half = inner - b.float().square().sum(1) / 2
    half -= a.float().square().sum(1)[:, None] / 2  # minus half the squared distance
    return inner.mul_(LINEAR / a.shape[1]).add_(half.div_(BANDWIDTH * a.shape[1]).exp_(), alpha=2)
