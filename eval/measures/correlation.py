"""Measure random directions of states, and distance correlation of released states with inputs (paper, appendix J)."""

import math
from pathlib import Path
from typing import Any

import torch

from hiddenlab.channels import Channel
from hiddenlab.errors import HiddenlabError
from hiddenlab.eval.cells import Figures
from hiddenlab.eval.measures.attack import as_figures, exactly
from hiddenlab.eval.measures.intervals import mean, share
from hiddenlab.models import load_model
from hiddenlab.prompts import load_prompts
from hiddenlab.registry import stages_of
from hiddenlab.types import Progress, silent
from hiddenlab.utils.random import generator

LINEAR_MAPS = {"linear": None, "projection": 1}  # columns of the map; None: as many as there are dimensions
DISCORR_ROWS = 500  # tokens that one value is computed from


def theorem_j1(spec: dict[str, Any], folder: Path, progress: Progress = silent) -> Figures:
    """Measure how often a random one-dimensional projection keeps two states apart, beside Theorem J.1's bound.

    Two states of L1 distance D are apart by at least kD in a Gaussian direction of unit variance with probability
    2 − 2Φ(k√d) or more.

    Args:
        spec: model, prompts, limit, max_tokens, seed, device, layer; k; draws (of directions and of pairs of states).
    """
    model = load_model(spec["model"], spec["layer"], device=spec["device"])
    texts = load_prompts(spec["prompts"], limit=spec["limit"])
    rows = torch.cat(
        [model.encode(torch.tensor(model.tokenize(t, spec["max_tokens"]))).float().cpu() for t in texts]
    )
    draw = generator(spec["seed"], "pairs")
    first, second = torch.randint(len(rows), (2, spec["draws"]), generator=draw)
    apart = (rows[first] - rows[second])[first != second]
    directions = torch.randn(apart.shape, generator=draw)
    kept = (apart * directions).sum(1).abs() >= spec["k"] * apart.abs().sum(1)
    return as_figures({"apart": share(kept.tolist())}) | {
        "apart_bound": exactly(projection_bound(spec["k"], rows.shape[1]), len(kept))
    }


def projection_bound(k: float, width: int) -> float:
    """Return Theorem J.1's lower bound, for directions of independent standard normal numbers."""
    return math.erfc(k * math.sqrt(width / 2))


def theorem_j3(spec: dict[str, Any], folder: Path, progress: Progress = silent) -> Figures:
    """Measure the counterexample of Theorem J.3: of two pairs the one with less distance correlation is readable.

    W and X are standard normal with a correlation. Y is uniform between -delta and delta, and Z is its absolute value.
    Then 0 is within delta of every Y, and no estimate is within delta of W more often than the conditional mean is.

    Args:
        spec: delta; correlation (of W and X, above 0.945 and below 1); draws; seed.

    Raises:
        HiddenlabError: the package dcor is not installed.
    """
    dcor = _dcor()
    delta, rho, draws = spec["delta"], spec["correlation"], spec["draws"]
    draw = generator(spec["seed"], "pairs")
    w, error = torch.randn(2, draws, generator=draw, dtype=torch.float64)
    x = rho * w + math.sqrt(1 - rho**2) * error
    y = delta * (2 * torch.rand(draws, generator=draw, dtype=torch.float64) - 1)
    pairs = {"normal": (w, x), "folded": (y, y.abs())}
    figures = {
        f"{name}_discorr": exactly(float(dcor.distance_correlation(a.numpy(), b.numpy())), draws)
        for name, (a, b) in pairs.items()
    }
    figures |= as_figures(
        {
            "normal_read": share(((w - rho * x).abs() <= delta).tolist()),
            "folded_read": share((y.abs() <= delta).tolist()),
        }
    )
    return figures | {"normal_bound": exactly(math.erf(delta / math.sqrt(2 * (1 - rho**2))), draws)}


def discorr(spec: dict[str, Any], folder: Path, progress: Progress = silent) -> Figures:
    """Measure distance correlation of input embeddings and what is shown (Székely et al. 2007; Equation 3).

    Squared and bias-corrected (Székely and Rizzo 2014), so that independent vectors have 0 whatever their width.

    Args:
        spec: model, prompts, limit, max_tokens, seed, device, layer; shown: a channel's stages joined by ``|``, or
            ``linear`` (x W π, W square and Gaussian) or ``projection`` (x w, one Gaussian direction), of the embeddings
            themselves; draws (of those maps, and of rows).

    Raises:
        HiddenlabError: the package dcor is not installed.
    """
    dcor = _dcor()
    model = load_model(spec["model"], spec["layer"], device=spec["device"])
    texts = load_prompts(spec["prompts"], limit=spec["limit"])
    prompts = [model.tokenize(text, spec["max_tokens"]) for text in texts]
    inputs = torch.cat([model.embed(torch.tensor(tokens)).float() for tokens in prompts])
    mapped = spec["shown"] in LINEAR_MAPS
    shown = inputs
    if not mapped:
        channel = Channel.parse([stage for stage in stages_of(spec["shown"]) if stage != "identity"])
        released = channel.release_batch(model, prompts, generator(spec["seed"], "release"))
        shown = torch.cat([observation.states.float() for observation, _ in released])
    draw = generator(spec["seed"], "maps")
    values = []
    for i in range(spec["draws"]):
        pick = torch.randperm(len(inputs), generator=draw)[:DISCORR_ROWS]
        x, y = inputs[pick].double(), shown[pick].double()
        if mapped:
            weights = torch.randn(
                y.shape[1], LINEAR_MAPS[spec["shown"]] or y.shape[1], generator=draw
            ).double()
            y = y @ weights  # the permutation behind it changes no distance
        # The plain estimate is near 0.9 for independent vectors of this width, so the bias has to be removed.
        values.append(float(dcor.u_distance_correlation_sqr(x.numpy(), y.numpy())))
        progress("draws", i + 1, spec["draws"])
    return as_figures({"discorr": mean(values)})


def _dcor() -> Any:
    try:
        import dcor
    except ImportError:
        raise HiddenlabError(
            "distance correlation needs the package dcor: pip install 'hiddenlab[schemes]'"
        ) from None
    return dcor
