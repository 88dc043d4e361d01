"""Time the first prompt, from the start of a process to its result: ``hiddenlab bench first``."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from hiddenlab.errors import HiddenlabError
from hiddenlab.models.load import resolve_model
from hiddenlab.prompts import load_prompts
from hiddenlab.types import Progress, silent
from hiddenlab.utils.cache import cache_dir

DEFAULT_LAYERS = (6, 11, 21)
COLUMNS = {
    "layer": "layer", "cold_seconds": "empty cache, s", "warm_seconds": "again, s", "naive_seconds": "naive, s",
    "cold_over_naive": "over naive", "exact": "exact", "verified": "verified", "peak_memory_mb": "peak MB",
}  # fmt: skip


def bench(
    model: str = "builtin",
    layers: Sequence[int] = DEFAULT_LAYERS,
    prompts: str | None = None,
    limit: int = 10,
    max_tokens: int = 50,
    naive: bool = True,
    seed: int = 0,
    threads: int | None = None,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Time ``hiddenlab attack`` on one prompt, process by process: with an empty cache, once more, and naively.

    The cache is empty but for converted models, which stay. Naive is the paper's greedy search with the language
    model's order of candidates, and the threshold given, so that it prepares nothing. Both run on the same prompts,
    one after the other. Seconds are medians over prompts, from the start of a process to its end.

    Args:
        limit: prompts at each layer. naive: also run the naive search.

    Returns:
        ``rows``, one per layer, and the settings. ``exact`` and ``verified`` are shares of prompts with an empty cache,
        ``naive_exact`` of the naive search.

    Raises:
        HiddenlabError: an attack fails.
    """
    resolve_model(model)  # converted now, so that no process converts it
    texts, rows = load_prompts(prompts, limit=limit), []
    for i, layer in enumerate(layers):
        timed: dict[str, list[dict[str, Any]]] = {"cold": [], "warm": [], "naive": []}
        for j, prompt in enumerate(texts):
            progress("first prompts", i * len(texts) + j, len(layers) * len(texts))
            given = [
                "--model",
                model,
                "--layer",
                str(layer),
                "--max-tokens",
                str(max_tokens),
                "--seed",
                str(seed),
            ]
            given += [] if threads is None else ["--threads", str(threads)]
            with tempfile.TemporaryDirectory() as cache:
                (Path(cache) / "models").symlink_to(cache_dir() / "models")
                timed["cold"].append(_run(str(prompt.text), given, cache))
                timed["warm"].append(_run(str(prompt.text), given, cache))
            if naive:
                epsilon = timed["cold"][-1]["epsilon"]
                slow = ["--search", "greedy", "--proposal", "lm", "--epsilon", str(epsilon)]
                with tempfile.TemporaryDirectory() as cache:
                    (Path(cache) / "models").symlink_to(cache_dir() / "models")
                    timed["naive"].append(_run(str(prompt.text), [*given, *slow], cache))
        rows.append({"model": model, "layer": layer, **_row(timed)})
    progress("first prompts", len(layers) * len(texts), len(layers) * len(texts))
    return {
        "rows": rows,
        "columns": COLUMNS,
        "prompts": len(texts),
        "max_tokens": max_tokens,
        "threads": threads,
    }


def _run(prompt: str, options: list[str], cache: str) -> dict[str, Any]:
    """Attack one prompt in a process of its own, with this cache."""
    command = [sys.executable, "-m", "hiddenlab", "attack", "-", *options, "--no-record", "--json"]
    started = time.perf_counter()
    done = subprocess.run(
        command, input=prompt, capture_output=True, text=True, env={**os.environ, "HIDDENLAB_CACHE": cache}
    )
    seconds = time.perf_counter() - started
    if done.returncode:
        raise HiddenlabError(f"{' '.join(command[2:])} failed: {done.stderr.strip()[-300:]}")
    result = json.loads(done.stdout)
    (sample,) = result["samples"]
    return {
        "seconds": seconds,
        "exact": float(sample["exact"]),
        "verified": float(sample["verified"] == 1),
        "epsilon": sample["epsilon"],
        "peak_memory_mb": result["summary"]["peak_memory_mb"],
    }


def _row(timed: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return one layer's figures; None stands for what was not run."""

    def of(kind: str, figure: str) -> list[float]:
        return [run[figure] for run in timed[kind]]

    seconds = {kind: median(of(kind, "seconds")) if runs else None for kind, runs in timed.items()}
    ratios = [a / b for a, b in zip(of("cold", "seconds"), of("naive", "seconds"), strict=False)]
    count = len(timed["cold"])
    return {
        **{f"{kind}_seconds": value for kind, value in seconds.items()},
        "cold_over_naive": median(ratios) if ratios else None,
        "exact": sum(of("cold", "exact")) / count,
        "verified": sum(of("cold", "verified")) / count,
        "naive_exact": sum(of("naive", "exact")) / count if timed["naive"] else None,
        "peak_memory_mb": max(of("cold", "peak_memory_mb")),
    }
