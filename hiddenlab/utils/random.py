"""Make random generators, one for each purpose."""

import hashlib
import json

import torch
from jaxtyping import Float
from torch import Tensor


def generator(seed: int, *what: object) -> torch.Generator:
    """Return a separate generator for each purpose, so that no result depends on what else is run.

    Args:
        seed: the run's seed. what: names the purpose; other names give other numbers.
    """
    digest = hashlib.sha256(json.dumps([seed, *map(str, what)]).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def orthogonal(width: int, generator: torch.Generator) -> Float[Tensor, "d d"]:
    """Draw an orthogonal matrix evenly (by Haar measure), in double precision."""
    drawn = torch.randn(width, width, generator=generator, device=generator.device, dtype=torch.float64)
    return orthonormal(drawn)


def orthonormal(drawn: Float[Tensor, "d k"]) -> Float[Tensor, "d k"]:
    """Return an orthonormal basis of what columns span; it is evenly distributed where normal numbers were drawn."""
    basis, upper = torch.linalg.qr(drawn)
    # Signs from the triangle's diagonal make the basis evenly distributed, and the same for every library.
    return basis * upper.diagonal().sign()


def alike(
    states: Float[Tensor, "rows d"], count: int, generator: torch.Generator, size: float = 1.0
) -> Float[Tensor, "count d"]:
    """Draw rows of independent normal numbers, ``size`` times the root mean square of the states' numbers."""
    drawn = torch.randn(count, states.shape[1], generator=generator, device=generator.device)
    return drawn.to(states.device) * size * states.float().square().mean().sqrt()
