"""Time the same plan with TLS between its nodes and without, in alternation: ``hiddenlab bench cascade-tls``."""

import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hiddenlab.defenses.cascade.certificates import make_authority, make_certificate
from hiddenlab.defenses.cascade.load import load_cascade_model
from hiddenlab.defenses.cascade.remote import WireCascade
from hiddenlab.defenses.cascade.secured import Tls
from hiddenlab.defenses.cascade.wire import LOCAL, Endpoint
from hiddenlab.sharding import Plan
from hiddenlab.types import Progress, silent
from hiddenlab.utils.files import write_file


def bench(
    model: str = "builtin",
    max_tokens: int = 128,
    alpha: int = 2,
    m: int = 1,
    c: int = 1,
    repeats: int = 10,
    seed: int = 0,
    threads: int | None = None,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Time a forward pass of random tokens over TCP on this machine, in clear and with mutual TLS.

    Args:
        max_tokens: length of the prompt.
        alpha, m, c: of the plan.
        repeats: passes of each that are timed, after one that is not.
        threads: of torch.

    Returns:
        ``rows``: for clear and TLS the median seconds of a pass, its ratio to clear (median over pairs of passes, with
        the lowest and highest), megabytes of tensors, and the largest difference between both outputs.
    """
    torch.set_num_threads(threads or 1)
    loaded = load_cascade_model(model)
    plan = Plan.clustered(max_tokens, c, alpha=alpha, m=m)
    clear = WireCascade(loaded, alpha, m=m, name=model)
    with clear, WireCascade(loaded, alpha, m=m, name=model, endpoint=Endpoint(tls=_throwaway())) as secured:
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(0, clear.facts.vocabulary, (max_tokens,), generator=generator)
        both = clear, secured
        outputs = [cascade.forward(tokens, plan) for cascade in both]
        seconds: list[list[float]] = [[], []]
        for done in range(repeats):
            for i in (0, 1) if done % 2 else (1, 0):
                seconds[i].append(_timed(partial(both[i].forward, tokens, plan)))
            progress("passes", done + 1, repeats)
        sent = [sum(one["sent_payload"] for one in cascade.counters().values()) for cascade in both]
    ratios = [b / a for a, b in zip(*seconds, strict=True)]
    difference = float((outputs[0] - outputs[1]).abs().max())
    rows = [
        {
            "setting": setting, "seconds": statistics.median(seconds[i]), "over_clear": ratio,
            "lowest": low, "highest": high, "mb": sent[i] / (repeats + 1) / 1e6, "max_difference": difference,
        }
        for i, (setting, ratio, low, high) in enumerate(
            (("clear", 1.0, 1.0, 1.0), ("TLS", statistics.median(ratios), min(ratios), max(ratios)))
        )
    ]  # fmt: skip
    return {
        "rows": rows, "model": model, "tokens": max_tokens, "alpha": alpha, "m": m, "c": c, "repeats": repeats,
        "threads": threads or 1, "seed": seed,
    }  # fmt: skip


def _throwaway() -> Tls:
    """Return the TLS of a node on loopback, under an authority that nobody keeps."""
    authority = make_authority()
    certificate, key = make_certificate(authority, LOCAL.host)
    with tempfile.TemporaryDirectory() as folder:
        paths = [f"{folder}/{name}" for name in ("node.pem", "node.key", "authority.pem")]
        for path, content in zip(paths, (certificate, key, authority[0]), strict=True):
            write_file(Path(path), content, private=True)
        return Tls.of(*paths)


def _timed(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started
