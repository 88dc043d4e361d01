"""Add noise of differential privacy to the input embeddings: d_χ-privacy, Split-and-Denoise, DP-Forward."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from hiddenlab.errors import InputError
from hiddenlab.input_noise import with_clipping, with_laplace
from hiddenlab.stages import Stage
from hiddenlab.types import ObservationInfo

HALVINGS = 200  # of an interval, more than double precision can tell
MOST_EPSILON = 500  # exp of more leaves the numbers of double precision soon
FAR = 1e6  # no smaller R is needed for any delta above the smallest number


class DChi(Stage):
    """Add noise of density exp(−η·length) to each input embedding: d_χ-privacy (Feyisetan et al., 1910.08902).

    Its direction is even, and its length has a Gamma distribution of shape d, the width, and rate η.

    Args:
        eta: rate of the noise, the privacy parameter per unit of distance between embeddings.

    Raises:
        InputError: eta is not a positive finite number.
    """

    def __init__(self, eta: float) -> None:
        self.eta = _positive("dchi", "eta", eta)
        self.spec = f"dchi:eta={self.eta!r}"

    def inputs(
        self, embeddings: Float[Tensor, "n d"], table: Float[Tensor, "v d"], generator: torch.Generator
    ) -> Float[Tensor, "m d"]:
        noise = _even_noise(len(embeddings), embeddings.shape[1], self.eta, generator)
        return (embeddings.float() + noise.to(embeddings.device)).to(embeddings.dtype)

    def averaged(self, count: int) -> "DChi":
        # The mean's direction is even too, and its deviation is the same.
        return self if count == 1 else DChi(self.eta * count**0.5)

    def publish(self, info: ObservationInfo) -> ObservationInfo:
        return with_laplace(info, self.eta, "sphere")

    def __repr__(self) -> str:
        return (
            f"{self.spec}: the attacker sees the states of noised embeddings and knows the model and eta; "
            "only the provider knows the noise"
        )


class SplitAndDenoise(Stage):
    """Add d_χ noise to each input embedding and clip it, as the client of Split-and-Denoise does (2310.09130).

    A noised embedding that is longer than the longest of the vocabulary is scaled down to that length. The client's
    denoising, which the server does not see, is left out.

    Args:
        eta: rate of the noise. noise: ``formula``: the density of the paper, exp(−η·length); ``code``: what its
            published code draws, a length and a factor between −1 and 1 for each coordinate by itself, which is far
            more noise.

    Raises:
        InputError: eta is not a positive finite number.
    """

    def __init__(self, eta: float, noise: Literal["formula", "code"] = "formula") -> None:
        self.eta, self.noise = _positive("snd", "eta", eta), noise
        self.spec = f"snd:eta={self.eta!r}" + ("" if noise == "formula" else f",noise={noise}")

    def inputs(
        self, embeddings: Float[Tensor, "n d"], table: Float[Tensor, "v d"], generator: torch.Generator
    ) -> Float[Tensor, "m d"]:
        draw = _even_noise if self.noise == "formula" else _noise_by_coordinate
        noise = draw(len(embeddings), embeddings.shape[1], self.eta, generator).to(embeddings.device)
        noised = embeddings.float() + noise
        longest = table.detach().norm(dim=1).amax().float().to(noised.device)
        return (noised * (longest / noised.norm(dim=1, keepdim=True)).clamp(max=1.0)).to(embeddings.dtype)

    def publish(self, info: ObservationInfo) -> ObservationInfo:
        law = "sphere" if self.noise == "formula" else "coordinates"
        return with_clipping(with_laplace(info, self.eta, law), "rows")

    def __repr__(self) -> str:
        return (
            f"{self.spec}: the attacker sees the states of noised and clipped embeddings and knows the model and eta; "
            "only the provider knows the noise"
        )


class DPForward(Stage):
    """Clip the matrix of input embeddings and add Gaussian noise to it, as DP-Forward does (2309.06746).

    The whole matrix of a prompt is scaled down to a Frobenius norm of at most ``clip``. The noise is the smallest that
    gives (ε, δ)-differential privacy for a sensitivity of ``clip``, by the paper's analytic matrix Gaussian mechanism
    with independent entries, as its published code computes it.

    Args:
        epsilon, delta: privacy parameters. clip: most Frobenius norm of a prompt's embeddings.

    Raises:
        InputError: epsilon or clip is not a positive finite number, epsilon is above 500, or delta is not between 0
            and 1.
    """

    def __init__(self, epsilon: float, delta: float = 1e-5, clip: float = 1.0) -> None:
        self.epsilon, self.clip = (
            _positive("dp-forward", "epsilon", epsilon),
            _positive("dp-forward", "clip", clip),
        )
        if not 0 < delta < 1:
            raise InputError(f"dp-forward needs delta between 0 and 1, not {delta}")
        if epsilon > MOST_EPSILON:
            raise InputError(
                f"dp-forward needs epsilon of at most {MOST_EPSILON}, not {epsilon}; numbers end above"
            )
        self.delta = delta
        self.sigma = self.clip / privacy_of_unit_noise(self.epsilon, delta)
        self.spec = f"dp-forward:epsilon={self.epsilon!r},delta={delta!r},clip={self.clip!r}"

    def inputs(
        self, embeddings: Float[Tensor, "n d"], table: Float[Tensor, "v d"], generator: torch.Generator
    ) -> Float[Tensor, "m d"]:
        rows = embeddings.float()
        rows = rows * (self.clip / rows.norm()).clamp(max=1.0)
        noise = torch.randn(rows.shape, generator=generator, device=generator.device)
        return (rows + self.sigma * noise.to(rows.device)).to(embeddings.dtype)

    def averaged(self, count: int) -> "DPForward":
        # The mechanism that would have drawn the mean's noise, within the epsilons that there are.
        epsilon = privacy_lost(self.clip / self.sigma * count**0.5, self.delta)
        return self if count == 1 or epsilon > MOST_EPSILON else DPForward(epsilon, self.delta, self.clip)

    def publish(self, info: ObservationInfo) -> ObservationInfo:
        noised = replace(info, noise_sigma=math.hypot(info.noise_sigma or 0.0, self.sigma))
        return with_clipping(noised, "prompt")

    def __repr__(self) -> str:
        return (
            f"{self.spec}: the attacker sees the states of clipped and noised embeddings and knows the model and the "
            f"noise's deviation, {self.sigma:.3g}; only the provider knows the noise"
        )


def privacy_of_unit_noise(epsilon: float, delta: float) -> float:
    """Return how large a sensitivity Gaussian noise of deviation 1 hides: the R for which (ε, δ) holds exactly.

    It is (ε, δ)-private for a sensitivity R where Φ(R/2 − ε/R) − exp(ε)·Φ(−R/2 − ε/R) is at most δ (Balle and Wang,
    1805.06530), which grows with R.
    """
    return _last(lambda sensitivity: _spent(sensitivity, epsilon) <= delta, FAR)


def privacy_lost(sensitivity: float, delta: float) -> float:
    """Return the ε for which Gaussian noise of deviation 1 is (ε, δ)-private for a sensitivity, or more than 500."""
    return _last(lambda epsilon: _spent(sensitivity, epsilon) > delta, 1.2 * MOST_EPSILON)


def _spent(sensitivity: float, epsilon: float) -> float:
    half, ratio = sensitivity / 2, epsilon / sensitivity
    return _normal(half - ratio) - math.exp(epsilon) * _normal(-half - ratio)


def _last(holds: Callable[[float], bool], most: float) -> float:
    """Return the largest number, up to ``most``, for which something holds that holds for all smaller ones."""
    low, high = 0.0, most
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _normal(x: float) -> float:
    return math.erfc(-x / math.sqrt(2)) / 2


def _even_noise(rows: int, width: int, eta: float, generator: torch.Generator) -> Float[Tensor, "n d"]:
    directions = torch.randn(rows, width, generator=generator, device=generator.device)
    # A sum of as many exponential numbers has the Gamma distribution.
    lengths = torch.empty(rows, width, device=generator.device).exponential_(generator=generator).sum(1)
    return directions * (lengths / eta / directions.norm(dim=1))[:, None]


def _noise_by_coordinate(
    rows: int, width: int, eta: float, generator: torch.Generator
) -> Float[Tensor, "n d"]:
    noise = torch.empty(rows, width)
    for row in noise:  # the exponential numbers of one row at a time are in memory
        lengths = torch.empty(width, width).exponential_(generator=generator).sum(1)
        row.copy_(lengths / eta * (1 - 2 * torch.rand(width, generator=generator)))
    return noise


def _positive(name: str, what: str, value: float) -> float:
    if not (math.isfinite(value) and value > 0):
        raise InputError(f"{name} needs {what} > 0, not {value}")
    return float(value)
