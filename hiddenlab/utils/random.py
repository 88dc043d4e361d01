"""Make random generators, one for each purpose."""

import hashlib
import json

import torch


def generator(seed: int, *what: object) -> torch.Generator:
    """Return a separate generator for each purpose, so that no result depends on what else is run.

    Args:
        seed: the run's seed. what: names the purpose; other names give other numbers.
    """
    digest = hashlib.sha256(json.dumps([seed, *map(str, what)]).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
