"""Turn logits into tokens, so that provider and verifier draw the same token from the same seed.

The random numbers of a request come from one `Noise`: the stream of a seeded generator, as vLLM draws them, or a hash
of key, seed and all tokens so far (exfiltration paper, appendix D.6). Everything else is a function of logits, noise
and `Sampling`, for one position or for all positions of a prefill at once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hiddenlab.errors import InputError
from hiddenlab.utils.schema import CLOSED

TEMPERATURES = (
    0.01,
    100.0,
)  # beyond them float32 logits over the temperature lose their order, or all difference
METHODS = ("gumbel", "ipt", "greedy")


@dataclass(frozen=True)
class Sampling:
    """The sampling parameters of a request.

    Attributes:
        method: "gumbel" (argmax of probabilities over exponential noise, as vLLM samples), "ipt" (inverse probability
            transform: the first token whose cumulative probability exceeds one uniform number) or "greedy".
        temperature: divides the logits; 0 is greedy.
        top_k: only so many of the likeliest tokens, 0 for all.
        top_p: only the likeliest tokens that together have this probability (after temperature and top-k).
        seed: of the request's random numbers.
    """

    __pydantic_config__ = CLOSED

    method: str = "gumbel"
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise InputError(f"sampling method {self.method!r}: one of {', '.join(METHODS)}")
        if not (self.temperature == 0 or TEMPERATURES[0] <= self.temperature <= TEMPERATURES[1]):
            low, high = TEMPERATURES
            raise InputError(f"temperature {self.temperature}: 0, or from {low:g} to {high:g}")
        if self.top_k < 0:
            raise InputError(f"top_k {self.top_k}: a whole number from 0 (0: all tokens)")
        if not 0 < self.top_p <= 1:
            raise InputError(f"top_p {self.top_p}: above 0, at most 1")
        if not -(2**63) <= self.seed < 2**63:
            raise InputError(f"seed {self.seed}: a whole number of 64 bits")

    @property
    def greedy(self) -> bool:
        """Whether sampling uses no randomness."""
        return self.method == "greedy" or self.temperature == 0


GREEDY = Sampling(method="greedy", temperature=0.0)


@runtime_checkable
class Noise(Protocol):
    """The random numbers of one request, in the order of its tokens; each call is for the next token."""

    def gumbel(self, width: int, before: Sequence[int]) -> Float[Tensor, " v"]:
        """Return Gumbel(0, 1) noise for each of `width` tokens, given all tokens `before` this one."""
        ...

    def uniform(self, before: Sequence[int]) -> float:
        """Return one number in [0, 1), given all tokens `before` this one."""
        ...


class StreamNoise:
    """Random numbers of one generator with the request's seed, as vLLM draws them.

    It draws `width` exponentials for each token. The generator runs on the CPU: a CUDA generator gives other numbers
    from the same seed. So both sides have to agree on the device and on `width`, the width of the logits.
    """

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def gumbel(self, width: int, before: Sequence[int]) -> Float[Tensor, " v"]:
        """Draw the next token's Gumbel noise."""
        return _gumbel(width, self._generator)

    def uniform(self, before: Sequence[int]) -> float:
        """Draw the next token's uniform number."""
        return float(torch.rand(1, generator=self._generator, dtype=torch.float64))


class HashedNoise:
    """Random numbers from a hash of a key, the seed and all tokens so far: H(K, σ, x) with SHAKE-256.

    Without the key nobody can compute them in advance, and a token has to be committed to before the next numbers exist
    (exfiltration paper, theorems 4.2, 4.3; appendix D.6). Every number is output of the hash itself: a generator seeded
    from it would have no more entropy than its seed.

    Args:
        key: K, at least 16 bytes.
        seed: σ.
        adaptive: hash the tokens as well. Else only H(K, σ) is expanded: numbers depend on a token's place alone, and
            the owner of the key can compute them in advance (theorem 4.1 needs no more).

    Raises:
        InputError: the key is shorter.
    """

    def __init__(self, key: bytes, seed: int, adaptive: bool = True) -> None:
        if len(key) < 16:
            raise InputError(f"a key of {len(key)} bytes: at least 16 are needed")
        self.adaptive = adaptive
        # The length precedes the content, so that different (form, key, seed) give different bytes.
        self._start = hashlib.shake_256(b"adaptive" if adaptive else b"by place")
        self._start.update(len(key).to_bytes(8, "big") + key + seed.to_bytes(16, "big", signed=True))

    def _bytes(self, before: Sequence[int], count: int) -> bytes:
        digest = self._start.copy()
        for number in before if self.adaptive else (len(before),):
            digest.update(int(number).to_bytes(8, "big"))
        return digest.digest(count)

    def gumbel(self, width: int, before: Sequence[int]) -> Float[Tensor, " v"]:
        """Compute the next token's Gumbel noise."""
        drawn = np.frombuffer(self._bytes(before, 4 * width), dtype=">u4").astype(np.float64)
        # Take the middle of one of 2³² equal steps, so that 0 and 1, which have no finite result, are never drawn.
        return torch.from_numpy(-np.log(-np.log((drawn + 0.5) / 2**32))).float()

    def uniform(self, before: Sequence[int]) -> float:
        """Compute the next token's uniform number."""
        return (int.from_bytes(self._bytes(before, 8), "big") >> 11) / 2**53


def _gumbel(width: int, generator: torch.Generator) -> Float[Tensor, " v"]:
    """Draw −log E with E exponential: vLLM's argmax(p / E) equals argmax(log p + Gumbel)."""
    return torch.empty(width).exponential_(generator=generator).log_().neg_()


def kept(logits: Float[Tensor, "n v"], sampling: Sampling) -> Bool[Tensor, "n v"]:
    """Return which tokens the filters keep: first top-k, then top-p of the rest, with the temperature applied.

    Tokens that tie with the last one kept are kept too where top-k alone filters.
    """
    everything = torch.ones_like(logits, dtype=torch.bool)
    width = logits.shape[1]
    count = sampling.top_k if 0 < sampling.top_k < width else width
    if sampling.greedy or (count == width and sampling.top_p == 1):
        return everything
    scaled = logits.float() / sampling.temperature
    if sampling.top_p == 1:
        return scaled >= scaled.topk(count, dim=1).values[:, -1:]
    # Sort only what top-k leaves: sorting a whole vocabulary costs more than a step of a small model.
    ordered, order = scaled.topk(count, dim=1)
    share = ordered.softmax(dim=1)
    # A token stays while those before it have not yet reached top_p; the first always does.
    stays = share.cumsum(dim=1) - share < sampling.top_p
    return torch.zeros_like(everything).scatter_(1, order, stays)


def probabilities(logits: Float[Tensor, "n v"], sampling: Sampling) -> Float[Tensor, "n v"]:
    """Return the distribution that the sampler draws from, one row per position.

    It is the softmax of the filtered logits over the temperature.
    """
    if sampling.greedy:
        return torch.nn.functional.one_hot(logits.argmax(dim=1), logits.shape[1]).float()
    masked = logits.float().masked_fill(~kept(logits, sampling), float("-inf"))
    return (masked / sampling.temperature).softmax(dim=1)


def perturbed(
    logits: Float[Tensor, "n v"], gumbel: Float[Tensor, "n v"], sampling: Sampling
) -> Float[Tensor, "n v"]:
    """Return post-Gumbel scores ℓ + T·g, −∞ for filtered tokens; their argmax is the token (DiFR, Algorithm 1)."""
    if sampling.greedy:
        return logits.float()
    scores = logits.float() + sampling.temperature * gumbel
    return scores.masked_fill_(~kept(logits, sampling), float("-inf"))


def invert(probability: Float[Tensor, "n v"], uniform: Float[Tensor, " n"]) -> Int[Tensor, " n"]:
    """Return the first token whose cumulative probability exceeds the uniform number (DiFR, Algorithm 4)."""
    cumulative = probability.double().cumsum(dim=1)
    # Rounding may leave the last sum below 1; then the last token with any probability takes the rest.
    last = probability.shape[1] - 1 - (probability.flip(1) > 0).int().argmax(dim=1)
    return torch.minimum((cumulative <= uniform.double()[:, None]).sum(dim=1), last)


def sample(logits: Float[Tensor, "1 v"], noise: Noise, sampling: Sampling, before: Sequence[int]) -> int:
    """Sample the next token of one request; draw from `noise` what the method needs."""
    if sampling.greedy:
        return int(logits.argmax())
    if sampling.method == "gumbel":
        gumbel = noise.gumbel(logits.shape[1], before).to(logits.device)
        return int(perturbed(logits, gumbel[None], sampling).argmax())
    uniform = torch.tensor([noise.uniform(before)], dtype=torch.float64, device=logits.device)
    return int(invert(probabilities(logits, sampling), uniform))
