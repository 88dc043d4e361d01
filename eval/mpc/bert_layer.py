"""Compute a BERT layer in numpy, with public weights from a seed; secret computations are compared with it.

The parties' programs import this file in their own environments, so it needs numpy only.
"""

import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

EPS = 1e-12
TWO_QUAD_SHIFT = 5.0
# Puma's GELU (Dong et al. 2023): polynomials of degree 3 below -1.95 and 6 from there to 3.
PUMA_LOW = (-0.5054031199708174, -0.42226581151983866, -0.11807612951181953, -0.011034134030615728)
PUMA_HIGH = (
    0.008526321541038084, 0.5, 0.3603292692789629, 0.0, -0.037688200365904236, 0.0, 0.0018067462606141187
)  # fmt: skip
PUMA_BORDERS = (-4.0, -1.95, 3.0)
VARIANTS = ("2quad", "puma", "exact")

Array = Any
Layer = dict[str, Array]


def end_with_parent() -> None:
    """End this process when its parent is gone, which closes the parent's end of standard input."""

    def watch() -> None:
        sys.stdin.read()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def layer_weights(width: int, inner: int, seed: int) -> Layer:
    """Draw the weights of one layer, of shape ``in out``, by BERT's initialisation N(0, 0.02²).

    Biases are drawn alike.
    """
    draw = np.random.default_rng(seed)

    def linear(a: int, b: int) -> tuple[Array, Array]:
        return (0.02 * draw.standard_normal((a, b))).astype(np.float32), (
            0.02 * draw.standard_normal(b)
        ).astype(np.float32)

    weights: Layer = {}
    for name, a, b in (
        ("q", width, width), ("k", width, width), ("v", width, width), ("o", width, width),
        ("up", width, inner), ("down", inner, width),
    ):  # fmt: skip
        weights[f"{name}.w"], weights[f"{name}.b"] = linear(a, b)
    for name in ("norm1", "norm2"):
        weights[f"{name}.w"] = np.ones(width, np.float32)
        weights[f"{name}.b"] = np.zeros(width, np.float32)
    return weights


def inputs(tokens: int, width: int, seed: int) -> Array:
    """Draw embeddings after their norm, which are standard normal."""
    return np.random.default_rng(seed + 10_000).standard_normal((tokens, width)).astype(np.float32)


def plain_layer(x: Array, w: Layer, heads: int, variant: str) -> Array:
    """Compute one layer in float64 by the variant's own formulas."""
    x = x.astype(np.float64)
    q, k, v = (_heads(x @ w[f"{n}.w"] + w[f"{n}.b"], heads) for n in "qkv")
    chances = SOFTMAX[variant](q @ k.transpose(0, 2, 1) / np.sqrt(q.shape[-1]))
    mixed = (chances @ v).transpose(1, 0, 2).reshape(len(x), -1)
    x = _norm(x + mixed @ w["o.w"] + w["o.b"], w, "norm1")
    inner = ACTIVATION[variant](x @ w["up.w"] + w["up.b"])
    return _norm(x + inner @ w["down.w"] + w["down.b"], w, "norm2")


def errors(output: Array, job: dict[str, Any]) -> dict[str, float]:
    """Return the largest differences from the same layers in float64, by the variant's formulas and by BERT's.

    Args:
        job: tokens, width, inner, heads, layers, seed, variant.
    """
    differences = {}
    for name, variant in (("error", job["variant"]), ("error_exact", "exact")):
        wanted = inputs(job["tokens"], job["width"], job["seed"])
        for i in range(job["layers"]):
            weights = layer_weights(job["width"], job["inner"], job["seed"] + i)
            wanted = plain_layer(wanted, weights, job["heads"], variant)
        differences[name] = float(np.abs(output - wanted).max())
    return {**differences, "scale": float(np.abs(wanted).max())}


def _heads(x: Array, heads: int) -> Array:
    return x.reshape(len(x), heads, -1).transpose(1, 0, 2)


def _norm(x: Array, w: Layer, name: str) -> Array:
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * w[f"{name}.w"] + w[f"{name}.b"]


def _softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def _two_quad(x: Array) -> Array:
    s = (x + TWO_QUAD_SHIFT) ** 2
    return s / s.sum(-1, keepdims=True)


def _gelu(x: Array) -> Array:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def _quad(x: Array) -> Array:
    return 0.125 * x**2 + 0.25 * x + 0.5


def puma_polynomials(x: Array, square: Callable[[Array], Array]) -> tuple[Array, Array]:
    """Compute both of Puma's polynomials with few products, on any type that adds and multiplies.

    Args:
        x: the values.
        square: the cheapest way to square them.
    """
    second = square(x)
    third, fourth = second * x, square(second)
    sixth = fourth * second
    low = third * PUMA_LOW[3] + second * PUMA_LOW[2] + x * PUMA_LOW[1] + PUMA_LOW[0]
    high = (
        sixth * PUMA_HIGH[6] + fourth * PUMA_HIGH[4] + second * PUMA_HIGH[2] + x * PUMA_HIGH[1] + PUMA_HIGH[0]
    )
    return low, high


def _puma(x: Array) -> Array:
    low = sum(c * x**i for i, c in enumerate(PUMA_LOW))
    high = sum(c * x**i for i, c in enumerate(PUMA_HIGH))
    a, b, c = PUMA_BORDERS
    return np.where(x < a, 0.0, np.where(x < b, low, np.where(x <= c, high, x)))


SOFTMAX: dict[str, Callable[[Array], Array]] = {"2quad": _two_quad, "puma": _softmax, "exact": _softmax}
ACTIVATION: dict[str, Callable[[Array], Array]] = {"2quad": _quad, "puma": _puma, "exact": _gelu}
