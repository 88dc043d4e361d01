"""Say what is public of noise on input embeddings that is not Gaussian, or that came with clipping."""

import math
from collections.abc import Mapping
from dataclasses import replace

from hiddenlab.errors import InputError
from hiddenlab.types import ObservationInfo

LAPLACE, CLIPPED = "laplace_noise", "clipped_inputs"  # facts
# Law -> variance of one coordinate for a width d, in units of 1 / eta²
VARIANCES = {"sphere": lambda d: d + 1.0, "coordinates": lambda d: d * (d + 1.0) / 3}


def with_laplace(info: ObservationInfo, eta: float, law: str) -> ObservationInfo:
    """Return public facts with noise of a Laplace kind on the input embeddings.

    Args:
        eta: its rate. law: a key of ``VARIANCES``.
    """
    noise = [*info.facts.get(LAPLACE, ()), {"eta": eta, "law": law}]
    return replace(info, facts={**info.facts, LAPLACE: noise})


def with_clipping(info: ObservationInfo, of: str) -> ObservationInfo:
    """Return public facts that say that input embeddings were scaled down where they were too long.

    Args:
        of: what was clipped, ``rows`` or ``prompt``.
    """
    return replace(info, facts={**info.facts, CLIPPED: of})


def is_noisy(info: ObservationInfo) -> bool:
    """Return whether noise of known strength was added to the input embeddings."""
    return info.noise_sigma is not None or LAPLACE in info.facts


def are_clipped(info: ObservationInfo) -> bool:
    """Return whether input embeddings were scaled down where they were too long."""
    return CLIPPED in info.facts


def sigma_of(info: ObservationInfo, width: int) -> float | None:
    """Return the standard deviation of one coordinate of the noise on input embeddings; None where there is none.

    In hundreds of dimensions noise of a Laplace kind differs little from Gaussian noise of the same deviation.

    Raises:
        InputError: the facts are malformed.
    """
    if not is_noisy(info):
        return None
    variance = (info.noise_sigma or 0.0) ** 2
    for noise in info.facts.get(LAPLACE, ()):
        eta = noise.get("eta") if isinstance(noise, Mapping) else None
        law = VARIANCES.get(noise["law"]) if isinstance(noise, Mapping) and "law" in noise else None
        if law is None or not isinstance(eta, int | float) or not eta > 0:
            raise InputError(f"the fact {LAPLACE} lists eta above 0 and a law of {', '.join(VARIANCES)}")
        variance += law(width) / eta**2
    return math.sqrt(variance)
