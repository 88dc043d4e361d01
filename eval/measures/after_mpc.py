"""Measure Cascade behind secret sharing: the first layers run under CrypTen, the rest on its nodes."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hiddenlab.config import AttackConfig
from hiddenlab.defenses.cascade.after_mpc import forward_after
from hiddenlab.defenses.cascade.hardening import Section
from hiddenlab.defenses.cascade.load import load_cascade_model
from hiddenlab.defenses.cascade.local import LocalCascade
from hiddenlab.defenses.protocols.decoder import Weights
from hiddenlab.defenses.protocols.forward import Plain, walk
from hiddenlab.errors import InputError
from hiddenlab.eval.cells import Figures
from hiddenlab.eval.measures.attack import as_figures, attack, exactly
from hiddenlab.eval.measures.intervals import mean, ratio
from hiddenlab.eval.measures.protocols import model_and_prompts
from hiddenlab.eval.mpc.run import crypten_decoder
from hiddenlab.job import capture_all
from hiddenlab.observation import save_observations
from hiddenlab.sharding import Plan
from hiddenlab.truths import save_truth
from hiddenlab.types import Progress, silent
from hiddenlab.utils.random import generator

CRYPTEN_FRACTION = 16  # CrypTen's own bits behind the point
OWN_PROMPTS, OWN_TOKENS = 2, 48  # the attacker's prompts that measure the error of CrypTen's approximations
EPSILON_ROOM = 2.0  # factor by which a user's row may differ more


def after_mpc(spec: dict[str, Any], folder: Path, progress: Progress = silent) -> Figures:
    """Run the first layers under CrypTen and the rest on Cascade; measure cost and the logits' error (appendix H).

    Args:
        spec: model, prompts, limit, max_tokens, seed, layers (on shares), alpha, c, m, timeout.

    Returns:
        ``mpc_seconds`` of the layers on shares, ``over_plain`` (these over the plain model's of all layers, one thread
            on both sides), ``megabytes``, errors, ``top1_agreement``.

    Raises:
        InputError: CrypTen's environment is missing, or the model is not of Llama type.
    """
    weights, prompts = model_and_prompts(spec)
    first = _OnShares(weights, spec)
    cascade = LocalCascade(
        load_cascade_model(spec["model"], section=Section(spec["layers"])), name=spec["model"]
    )
    rows = []
    for i, tokens in enumerate(prompts):
        shares, cost = first(tokens)
        plan = Plan.clustered(len(tokens), spec["c"], alpha=spec["alpha"], m=spec["m"])
        logits = forward_after(cascade, shares, CRYPTEN_FRACTION, plan)
        with torch.inference_mode():
            walk(weights, weights.inputs(tokens), Plain())  # what is prepared once counts on neither side
            begun = time.perf_counter()
            plain, states = walk(weights, weights.inputs(tokens), Plain())
            plain_seconds = time.perf_counter() - begun
        states_error = (_summed(shares) - states[spec["layers"]]).abs().max()
        agree = float((logits.argmax(1) == plain.argmax(1)).sum())
        rows.append(
            (
                cost["seconds"][0], cost["bytes"][0] / 1e6, float((logits - plain).abs().max()), float(states_error),
                agree, float(len(tokens)), cost["seconds"][0] / plain_seconds,
            )
        )  # fmt: skip
        progress("prompts", i + 1, len(prompts))
    seconds, megabytes, errors, states_errors, agreed, counts, over = (
        list(column) for column in zip(*rows, strict=True)
    )
    return as_figures(
        {
            "mpc_seconds": mean(seconds), "megabytes": mean(megabytes), "logit_error": mean(errors),
            "state_error": mean(states_errors), "top1_agreement": ratio(agreed, counts), "over_plain": mean(over),
        }
    ) | {"largest_logit_error": exactly(max(errors), len(errors))}  # fmt: skip


def after_mpc_attack(spec: dict[str, Any], folder: Path, progress: Progress = silent) -> Figures:
    """Attack what CompNodes add up: states behind layers under CrypTen, including its approximations.

    Args:
        spec: model, prompts, limit, max_tokens, seed, device, layers, timeout; channel: which rows are seen
            (``shard:…`` or ``identity``); attack: its spec; tolerant: whether it takes ``epsilon``, which is then
            measured on the attacker's own prompts, run on shares by itself.

    Raises:
        InputError: see ``after_mpc``.
    """
    weights, _ = model_and_prompts({**spec, "limit": 1})
    first = _OnShares(weights, spec)
    seen, truth = folder / "seen.safetensors", folder / "truth.json"
    where = {name: spec[name] for name in ("model", "seed", "device")}
    more: dict[str, Any] = {"attack": spec["attack"]}
    if spec["tolerant"]:
        more["epsilon"] = str(EPSILON_ROOM * first.largest_error(spec["seed"]))
    if not (seen.is_file() and truth.is_file()):
        released = AttackConfig(
            **where, **{name: spec[name] for name in ("prompts", "limit", "max_tokens")}, layer=spec["layers"],
            defense=tuple(stage for stage in (spec["channel"],) if stage != "identity"),
        )  # fmt: skip
        observations, secrets = [], []
        for observation, ground_truth in (captured := capture_all(released)):
            whole = _summed(first(ground_truth.tokens)[0])
            places = observation.info.positions
            rows = whole if places is None else whole[list(places)]
            observations.append(replace(observation, states=rows))
            secrets.append(ground_truth)
            progress("prompts on shares", len(secrets), len(captured))
        save_truth(secrets, truth)
        save_observations(observations, seen)
    own = AttackConfig(**where, **more, observation=str(seen), truth=str(truth))
    return attack(own.to_json(), folder, progress)


class _OnShares:
    """The first layers of a Llama-type decoder under CrypTen.

    Raises:
        InputError: the model is of another type.
    """

    def __init__(self, weights: Weights, spec: Mapping[str, Any]) -> None:
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
        if not 1 <= spec["layers"] < len(weights.blocks):
            most = len(weights.blocks) - 1
            raise InputError(f"1 to {most} layers of {spec['model']} can run on shares, not {spec['layers']}")
        self.weights, self.layers, self.timeout = weights, spec["layers"], spec["timeout"]
        self.job = {
            "threads": 1, "heads": weights.heads, "kv_heads": weights.kv_heads, "layers": self.layers,
            "eps": weights.blocks[0].norm1.eps,
        }  # fmt: skip
        self._scales = _norm_scales(weights, self._own(spec["seed"], "own prompts", 64), self.layers)

    def __call__(self, tokens: Sequence[int]) -> tuple[list[Tensor], dict[str, Any]]:
        """Return each party's share of the states behind the layers, in fixed point, and their cost."""
        arrays = _decoder_arrays(self.weights, tokens, self._scales)
        shares, cost = crypten_decoder(arrays, self.job, self.timeout)
        return [torch.from_numpy(share) for share in shares], cost

    @torch.inference_mode()
    def largest_error(self, seed: int) -> float:
        """Return the largest L1 distance by which the approximations moved a row of random prompts."""
        worst = 0.0
        for i in range(OWN_PROMPTS):
            tokens = self._own(seed, f"own prompt {i} on shares", OWN_TOKENS)
            exact = walk(self.weights, self.weights.inputs(tokens), Plain(), depth=self.layers)[1][-1]
            worst = max(worst, float((_summed(self(tokens)[0]) - exact).abs().sum(1).max()))
        return worst

    def _own(self, seed: int, what: str, count: int) -> list[int]:
        draw = generator(seed, what)
        return torch.randint(len(self.weights.head.weight), (count,), generator=draw).tolist()  # type: ignore[no-any-return]


def _summed(shares: Sequence[Tensor]) -> Tensor:
    """Add up CrypTen's shares and return the float32 numbers."""
    return (torch.stack(list(shares)).sum(0).double() / 2**CRYPTEN_FRACTION).float()


def _norm_scales(weights: Weights, tokens: Sequence[int], layers: int) -> list[tuple[float, float]]:
    """Return the factors that give typical inputs of each norm a mean square of 1; public, from the attacker's text."""
    seen: dict[tuple[int, str], float] = {}

    class NormScales(Plain):
        def norm(self, x: Tensor, norm: Any, layer: int, where: str) -> Tensor:
            seen[layer, where] = float(x.square().mean(1).median().rsqrt())
            return super().norm(x, norm, layer, where)

    with torch.inference_mode():
        walk(weights, weights.inputs(tokens), NormScales())
    return [(seen[layer, "norm1"], seen[layer, "norm2"]) for layer in range(1, layers + 1)]


def _decoder_arrays(
    weights: Weights, tokens: Sequence[int], scales: Sequence[tuple[float, float]]
) -> dict[str, Any]:
    """Return the arrays of the model and the prompt that ``eval/mpc/crypten_party.py`` reads."""
    assert weights.rotary is not None
    cos, sin = weights.rotary.tables(torch.arange(len(tokens)))
    arrays: dict[str, Any] = {"x": weights.inputs(tokens).numpy(), "cos": cos.numpy(), "sin": sin.numpy()}
    for i, ((first, second), block) in enumerate(zip(scales, weights.blocks, strict=False)):
        assert block.gate is not None
        arrays |= {
            f"{i}.{n}": getattr(block, n).weight.T.numpy() for n in ("q", "k", "v", "o", "gate", "up", "down")
        }
        arrays |= {f"{i}.norm1": block.norm1.weight.numpy(), f"{i}.norm2": block.norm2.weight.numpy()}
        arrays |= {f"{i}.scale1": np.float32(first), f"{i}.scale2": np.float32(second)}
    return arrays
