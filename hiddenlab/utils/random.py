"""Make random generators, one for each purpose, and part what is drawn afresh from what a key draws."""

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


class Draws(torch.Generator):
    """Draw what a release needs: fresh numbers for each request, and those of a key that may serve several requests.

    What is drawn from it as from any generator is fresh. ``key_of`` draws what belongs to the key.
    """

    _secret: int | None = None
    _stage: tuple[object, ...] = ()

    @classmethod
    def seeded(cls, seed: int, secret: int | None) -> "Draws":
        """Return draws of one release.

        Args:
            seed: of what is fresh. secret: of the key; None where the key serves this request alone.
        """
        draws = cls()
        draws.manual_seed(seed)
        draws._secret = secret
        return draws

    def for_stage(self, *stage: object) -> "Draws":
        """Return the same draws; what belongs to the key is that of one stage of a channel from here on."""
        self._stage = stage
        return self

    def key(self, *what: object) -> torch.Generator:
        """Return a generator of one part of the key."""
        return self if self._secret is None else generator(self._secret, "key", *self._stage, *what)


def key_of(drawn: torch.Generator, *what: object) -> torch.Generator:
    """Return the generator of a part of a defense's key: what stays the same as long as the key lives.

    A key that serves one request alone is drawn afresh with everything else. One of a session gives the same numbers in
    every call with the same name, whatever else was drawn.

    Args:
        drawn: what a stage is given. what: names the part, with all that it depends on, such as a number of rows.
    """
    return drawn.key(*what) if isinstance(drawn, Draws) else drawn


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
