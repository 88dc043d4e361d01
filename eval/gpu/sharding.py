"""Time Cascade on one device: the whole model against the same model run by the nodes of a plan."""

import time
from itertools import pairwise
from statistics import median
from typing import Any

import torch

from hiddenlab.defenses.cascade.generate import generate
from hiddenlab.defenses.cascade.load import load_cascade_model
from hiddenlab.defenses.cascade.local import LocalCascade
from hiddenlab.errors import InputError
from hiddenlab.eval.bench.cascade import plain_tokens
from hiddenlab.eval.gpu.work import Figures, Lab
from hiddenlab.sharding import Plan

SEED, NEW_TOKENS = 0, 16


def cascade(lab: Lab, *, tokens: int, alpha: int, dtype: str) -> Figures:
    """Time one prompt and 16 new tokens, sharded and plain; all nodes are threads of one process on one device."""
    name, kind = lab.setting.model, getattr(torch, dtype)
    if name is None:
        raise InputError("the built-in model is not here; see docs/how-to/gpu.md for how it is packed")
    device = str(lab.device)
    plain: Any = lab.keep(
        "plain", dtype, lambda: load_cascade_model(name, dtype=kind, device=device, attention="sdpa")
    )
    sharded = lab.keep(
        "sharded", dtype, lambda: LocalCascade(load_cascade_model(name, dtype=kind, device=device))
    )
    drawn = torch.Generator().manual_seed(SEED)
    ids = torch.randint(0, sharded.facts.vocabulary, (tokens,), generator=drawn)
    plan = Plan.clustered(tokens, 1, alpha=alpha)
    with torch.inference_mode():
        whole = plain(ids[None].to(lab.device), use_cache=False).logits[0]
        parts = sharded.forward(ids, plan)
        on_card = ids[None].to(lab.device)
        plain_seconds = lab.seconds(lambda: plain(on_card, use_cache=False))
        seconds = lab.seconds(lambda: sharded.forward(ids, plan))
    difference = float(((parts.float() - whole.float()).norm(dim=-1) / whole.float().norm(dim=-1)).max())
    new = lab.sized(NEW_TOKENS, 3)
    ours, theirs = (
        _tokens(lab, lambda: generate(sharded, ids, plan, new_tokens=new)),
        _tokens(lab, lambda: plain_tokens(plain, ids.to(lab.device), new)),
    )
    return {
        "prefill_ms": 1e3 * seconds,
        "plain_prefill_ms": 1e3 * plain_seconds,
        "prefill_over_plain": seconds / plain_seconds,
        "ms_per_token": 1e3 * ours[1],
        "plain_ms_per_token": 1e3 * theirs[1],
        "token_over_plain": ours[1] / theirs[1],
        "same_tokens": ours[0] == theirs[0],
        "difference": difference,
    }


def _tokens(lab: Lab, start: Any) -> tuple[list[int], float]:
    """Generate tokens twice, the first time to warm up; return them and the median seconds between them."""
    for _ in range(2):
        tokens, times = [], []
        for token in start():
            tokens.append(token)
            times.append(time.perf_counter())
    return tokens, median(b - a for a, b in pairwise(times))
