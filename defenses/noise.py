"""Add noise to the input of the model (Hidden No More, section 6 and appendix F), or to the states it releases."""

import math
from dataclasses import replace
from typing import Any, Literal
from weakref import ReferenceType, ref

import torch
from jaxtyping import Float
from torch import Tensor

from hiddenlab.errors import InputError, NotApplicableError
from hiddenlab.row_facts import with_noise
from hiddenlab.stages import Stage
from hiddenlab.types import ObservationInfo

CHUNK_ROWS = 16384  # of the vocabulary at once, so that no second table is held in double precision


class Gaussian(Stage):
    """Add Gaussian noise N(0, sigma²) to every coordinate of the input embeddings (Hidden No More, appendix F).

    Args:
        sigma: standard deviation of the noise, in the units of the embedding module's output.

    Raises:
        InputError: sigma is not a positive finite number.
    """

    def __init__(self, sigma: float) -> None:
        if not (math.isfinite(sigma) and sigma > 0):
            raise InputError(f"gaussian needs sigma > 0, not {sigma}; for no noise leave the defense out")
        self.sigma = float(sigma)
        self.spec = f"gaussian:sigma={self.sigma!r}"

    def inputs(
        self, embeddings: Float[Tensor, "n d"], table: Float[Tensor, "v d"], generator: torch.Generator
    ) -> Float[Tensor, "m d"]:
        # In single precision, so that one seed gives the same noise for every dtype of the provider.
        noise = torch.randn(embeddings.shape, generator=generator, device=generator.device)
        return (embeddings.float() + self.sigma * noise.to(embeddings.device)).to(embeddings.dtype)

    def averaged(self, count: int) -> "Gaussian":
        return self if count == 1 else Gaussian(self.sigma / count**0.5)

    def publish(self, info: ObservationInfo) -> ObservationInfo:
        return replace(info, noise_sigma=math.hypot(info.noise_sigma or 0.0, self.sigma))

    def __repr__(self) -> str:
        return (
            f"{self.spec}: the attacker sees the states of noised embeddings and knows the model and sigma; "
            "only the provider knows the noise"
        )


class UnknownGaussian(Stage):
    """Add Gaussian noise like ``gaussian``, but keep its standard deviation secret.

    The attacker has to estimate sigma. Together with a random prefix the estimate is too high, because the effect of an
    unknown prefix looks like noise.

    Args:
        sigma: as for ``gaussian``; the attacker's own copy of the stage has none.

    Raises:
        InputError: sigma is not a positive finite number.
    """

    name = "unknown-gaussian"

    def __init__(self, sigma: float | None = None) -> None:
        self._stage = None if sigma is None else Gaussian(sigma)
        self.spec = self.name if self._stage is None else f"{self.name}:sigma={self._stage.sigma!r}"

    def inputs(
        self, embeddings: Float[Tensor, "n d"], table: Float[Tensor, "v d"], generator: torch.Generator
    ) -> Float[Tensor, "m d"]:
        if self._stage is None:
            raise NotApplicableError(
                f"{self.name} has no sigma here: to release states give {self.name}:sigma=S; of the attacks on such "
                "states, beam-decoding estimates it"
            )
        return self._stage.inputs(embeddings, table, generator)

    def publish(self, info: ObservationInfo) -> ObservationInfo:
        return replace(info, channel=tuple(self.name if spec == self.spec else spec for spec in info.channel))

    def averaged(self, count: int) -> "UnknownGaussian":
        return self if count == 1 else UnknownGaussian()  # of another strength, which nobody told either

    def supposed(self, strength: float) -> Gaussian:
        """Return the stage with the standard deviation that an attacker supposes."""
        return Gaussian(strength)

    def __repr__(self) -> str:
        return (
            f"{self.spec}: the attacker sees the states of noised embeddings and knows the model; "
            "only the provider knows sigma and the noise"
        )


class OutputNoise(Stage):
    """Add noise to every coordinate of the released states, behind the last layer that the provider runs.

    Args:
        sigma: standard deviation of the noise, as a fraction of the root mean square of the row (``scale=row``), so
            that the noise is about ``sigma`` times as long as the row; or in the states' own units (``scale=none``).
        scale: ``row`` or ``none``.
        kind: ``gaussian`` or ``laplace``.

    Raises:
        InputError: sigma is not a positive finite number.
    """

    def __init__(
        self,
        sigma: float,
        scale: Literal["row", "none"] = "row",
        kind: Literal["gaussian", "laplace"] = "gaussian",
    ) -> None:
        if not (math.isfinite(sigma) and sigma > 0):
            raise InputError(f"output-noise needs sigma > 0, not {sigma}; for no noise leave the defense out")
        self.sigma, self.scale, self.kind = float(sigma), scale, kind
        extra = f",scale={scale}" * (scale != "row") + f",kind={kind}" * (kind != "gaussian")
        self.spec = f"output-noise:sigma={self.sigma!r}{extra}"

    def states(
        self, states: Float[Tensor, "rows d"], generator: torch.Generator
    ) -> tuple[Float[Tensor, "rows d"], tuple[int, ...] | None, dict[str, Any]]:
        rows = states.float()
        noise = torch.randn(rows.shape, generator=generator, device=generator.device)
        if self.kind == "laplace":
            # A Gaussian times the root of an exponential number is Laplace, here of variance 1.
            noise *= torch.empty_like(noise).exponential_(generator=generator).sqrt()
        size = rows.square().mean(1, keepdim=True).sqrt() if self.scale == "row" else 1.0
        return (rows + self.sigma * size * noise.to(rows)).to(states.dtype), None, {}

    def averaged(self, count: int) -> "OutputNoise":
        # A sum of independent noise of any kind is nearly Gaussian.
        return self if count == 1 else OutputNoise(self.sigma / count**0.5, self.scale)

    def publish(self, info: ObservationInfo) -> ObservationInfo:
        return with_noise(info, sigma=self.sigma, scale=self.scale, kind=self.kind)

    def __repr__(self) -> str:
        return (
            f"{self.spec}: the attacker sees noised states in order and knows the model and sigma; "
            "only the provider knows the noise"
        )


class RandomPrefix(Stage):
    """Put one random embedding before the prompt, and do not release its state (Hidden No More, appendix F.1).

    Each coordinate is drawn from a Gaussian with the coordinate's mean and standard deviation over the vocabulary.
    """

    spec = "random-prefix"

    def __init__(self) -> None:
        self._moments: tuple[ReferenceType[Tensor], Tensor, Tensor] | None = None

    def inputs(
        self, embeddings: Float[Tensor, "n d"], table: Float[Tensor, "v d"], generator: torch.Generator
    ) -> Float[Tensor, "m d"]:
        mean, deviation = self._of(table)
        noise = torch.randn(embeddings.shape[1], generator=generator, device=generator.device)
        row = mean + deviation * noise.to(mean.device)
        return torch.cat([row[None].to(embeddings), embeddings])

    def publish(self, info: ObservationInfo) -> ObservationInfo:
        return replace(info, prefix_tokens=info.prefix_tokens + 1)

    def _of(self, table: Float[Tensor, "v d"]) -> tuple[Float[Tensor, " d"], Float[Tensor, " d"]]:
        """Return the mean and standard deviation of each coordinate; the result for the last table is cached."""
        if self._moments is None or self._moments[0]() is not table:
            parts = [table.detach()[i : i + CHUNK_ROWS] for i in range(0, len(table), CHUNK_ROWS)]
            mean = torch.stack([part.double().sum(0) for part in parts]).sum(0) / len(table)
            square = torch.stack([(part.double() - mean).square().sum(0) for part in parts]).sum(0) / len(
                table
            )
            self._moments = (ref(table), mean.float(), square.sqrt().float())
        return self._moments[1:]

    def __repr__(self) -> str:
        return (
            "random-prefix: the attacker sees the tokens' states in order and knows the model; "
            "only the provider knows the embedding before them"
        )
