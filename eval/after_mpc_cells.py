"""What is measured of Cascade behind secret sharing: the first layers under CrypTen, the rest by its nodes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from defenses.cascade.after_mpc import forward_after, without_first
from defenses.cascade.backend import load_cascade_model
from defenses.cascade.local import LocalCascade
from defenses.cascade.plan import Plan
from defenses.schemes.walk import Plain, walk
from defenses.schemes.weights import Weights
from eval.experiment import Figures
from eval.intervals import mean, ratio
from eval.measures import as_figures
from eval.mpc.run import crypten_decoder
from eval.scheme_cells import model_and_prompts
from hiddenlab.core import Progress, silent
from hiddenlab.errors import InputError
from hiddenlab.job import generator

CRYPTEN_FRACTION = 16  # CrypTen's own bits behind the point


def after_mpc(spec: dict[str, Any], folder: Path, progress: Progress = silent) -> Figures:
    """The first layers under CrypTen, Cascade for the rest: cost of the first part, and the logits' error (appendix H).

    Args:
        spec: model, prompts, limit, max_tokens, seed, layers (on shares), alpha, c, m, timeout.

    Raises:
        InputError: CrypTen's environment is missing, or the model is not of Llama type.
    """
    weights, prompts = model_and_prompts(spec)
    plain_llama = (
        weights.rotary is not None and weights.window is None and weights.activation in ("silu", "swish")
    )
    for block in weights.blocks:
        linear = [block.q, block.k, block.v, block.o, block.up, block.down]
        plain_llama &= block.gate is not None and not any(part.bias is not None for part in linear)
        plain_llama &= (
            not block.norm1.centred and block.norm1.eps == block.norm2.eps == weights.blocks[0].norm1.eps
        )
    if not plain_llama:
        raise InputError(
            f"{spec['model']} is not of Llama's plain type, which the layers on shares are written for"
        )
    cascade = LocalCascade(
        without_first(load_cascade_model(spec["model"]), spec["layers"]), name=spec["model"]
    )
    draw = generator(spec["seed"], "own prompts")
    own = torch.randint(len(weights.head.weight), (64,), generator=draw).tolist()
    scales = _norm_scales(weights, own, spec["layers"])
    rows = []
    for i, tokens in enumerate(prompts):
        job = {
            "threads": 1, "heads": weights.heads, "kv_heads": weights.kv_heads, "layers": spec["layers"],
            "eps": weights.blocks[0].norm1.eps,
        }  # fmt: skip
        shares, cost = crypten_decoder(_decoder_arrays(weights, tokens, scales), job, spec["timeout"])
        plan = Plan.clustered(len(tokens), spec["c"], alpha=spec["alpha"], m=spec["m"])
        logits = forward_after(cascade, [torch.from_numpy(share) for share in shares], CRYPTEN_FRACTION, plan)
        with torch.inference_mode():
            plain, states = walk(weights, weights.inputs(tokens), Plain())
        summed = sum(torch.from_numpy(share) for share in shares)
        states_error = (summed / 2**CRYPTEN_FRACTION - states[spec["layers"]]).abs().max()  # type: ignore[operator]
        agree = float((logits.argmax(1) == plain.argmax(1)).sum())
        rows.append(
            (
                cost["seconds"][0], cost["bytes"][0] / 1e6, float((logits - plain).abs().max()), float(states_error),
                agree, float(len(tokens)),
            )
        )  # fmt: skip
        progress("prompts", i + 1, len(prompts))
    seconds, megabytes, errors, states_errors, agreed, counts = (
        list(column) for column in zip(*rows, strict=True)
    )
    return as_figures(
        {
            "mpc_seconds": mean(seconds), "megabytes": mean(megabytes), "logit_error": mean(errors),
            "state_error": mean(states_errors), "top1_agreement": ratio(agreed, counts),
        }
    )  # fmt: skip


def _norm_scales(weights: Weights, tokens: Sequence[int], layers: int) -> list[tuple[float, float]]:
    """What typical inputs of each norm must be multiplied with to have a mean square of 1: public, from own text."""
    seen: dict[tuple[int, str], float] = {}

    class Looking(Plain):
        def norm(self, x: Tensor, norm: Any, layer: int, where: str) -> Tensor:
            seen[layer, where] = float(x.square().mean(1).median().rsqrt())
            return super().norm(x, norm, layer, where)

    with torch.inference_mode():
        walk(weights, weights.inputs(tokens), Looking())
    return [(seen[layer, "norm1"], seen[layer, "norm2"]) for layer in range(1, layers + 1)]


def _decoder_arrays(
    weights: Weights, tokens: Sequence[int], scales: Sequence[tuple[float, float]]
) -> dict[str, Any]:
    """What ``eval/mpc/crypten_party.py`` reads of the model and the prompt."""
    assert weights.rotary is not None
    cos, sin = weights.rotary.tables(torch.arange(len(tokens)))
    out: dict[str, Any] = {"x": weights.inputs(tokens).numpy(), "cos": cos.numpy(), "sin": sin.numpy()}
    for i, ((first, second), block) in enumerate(zip(scales, weights.blocks, strict=False)):
        assert block.gate is not None
        out |= {
            f"{i}.{n}": getattr(block, n).weight.T.numpy() for n in ("q", "k", "v", "o", "gate", "up", "down")
        }
        out |= {f"{i}.norm1": block.norm1.weight.numpy(), f"{i}.norm2": block.norm2.weight.numpy()}
        out |= {f"{i}.scale1": np.float32(first), f"{i}.scale2": np.float32(second)}
    return out
