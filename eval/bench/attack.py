"""Time prefill, speculative search and the paper's greedy search in one process: ``hiddenlab bench attack``."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hiddenlab import registry
from hiddenlab.base import Attack
from hiddenlab.batch import time_prefill
from hiddenlab.channels import Channel
from hiddenlab.eval.parallel import Crew
from hiddenlab.models import TruncatedModel, load_model
from hiddenlab.prompts import Prompt, load_prompts
from hiddenlab.types import GroundTruth, Observation, Progress, silent
from hiddenlab.utils.environment import peak_memory_mb
from hiddenlab.utils.random import generator

DEFAULT_LAYERS = (1, 6, 11)
BATCH = 32


@dataclass(frozen=True)
class Timed:
    """The result of one search on some prompts: shares of tokens or prompts, and total seconds."""

    exact: float
    token_accuracy: float
    verified: float
    evaluated_per_token: float
    seconds: float
    setup: dict[str, float | str]


def bench(
    model: str = "builtin",
    layers: Sequence[int] = DEFAULT_LAYERS,
    defense: Sequence[str] = (),
    prompts: str | None = None,
    limit: int = 8,
    max_tokens: int = 50,
    greedy_limit: int = 1,
    seed: int = 0,
    unscreened: bool = False,
    crew: Crew | None = None,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Time a plain prefill, the speculative attack and the greedy attack at each layer.

    The greedy baseline (lm proposal) runs on the first ``greedy_limit`` prompts only. ``over_prefill`` is the
    speculative attack's time, with a cached probe, over one plain forward of the same prompts in the same batches.
    ``greedy_over_speculative`` compares both searches on the same prompts, one at a time. ``unscreened`` runs the
    attack once more with every candidate in the model itself: ``unscreened_over_screened``. With a ``crew`` each layer
    is measured in a worker; layers that run at once on one machine slow each other down.

    Returns:
        ``rows``, one per layer, and the settings.
    """
    texts = load_prompts(prompts, limit=limit)
    threads, options = (
        torch.get_num_threads(),
        (texts, max_tokens, list(defense), greedy_limit, seed, unscreened),
    )
    if crew is None:
        rows = [_at_layer({}, progress, (model, layer, *options)) for layer in layers]
    else:
        crew.start(progress)
        threads = crew.threads
        tasks = [(model, layer, *options) for layer in layers]
        found = {task[1]: row for task, row in crew.share(_at_layer, tasks, progress=progress)}
        rows = [found[layer] for layer in layers]
    return {
        "rows": rows,
        "prompts": len(texts),
        "max_tokens": max_tokens,
        "defense": " | ".join(defense) or "identity",
        "threads": threads,
        "seed": seed,
    }


def _at_layer(
    state: dict[str, Any],
    progress: Progress,
    task: tuple[str, int, list[Prompt], int, list[str], int, int, bool],
) -> dict[str, Any]:
    """Measure the row of one layer, in this process or in a worker."""
    model, layer, texts, max_tokens, defense, greedy_limit, seed, unscreened = task
    truncated = load_model(model, layer)
    tokens = [truncated.tokenize(text, max_tokens) for text in texts]
    return _row(truncated, tokens, defense, greedy_limit, seed, unscreened, progress)


def _row(
    model: TruncatedModel,
    tokens: list[list[int]],
    defense: list[str],
    greedy_limit: int,
    seed: int,
    unscreened: bool,
    progress: Progress,
) -> dict[str, Any]:
    channel = Channel.parse(defense)
    released = [
        channel.release(model, prompt, generator(seed, "release", i)) for i, prompt in enumerate(tokens)
    ]
    speculative = registry.build("attacks", "vocab-match", setup="full", batch=BATCH, progress=progress)
    # The first pass trains or loads the probe and warms up; the second is timed.
    first = _attack(speculative, released[:BATCH], model, seed)
    fast = _attack(speculative, released, model, seed)
    prefill = 0.0
    for start in range(0, len(tokens), BATCH):
        prefill += sum(s or 0.0 for s in time_prefill(model, tokens[start : start + BATCH]))
    row: dict[str, Any] = {
        "layer": model.site.layer,
        "exact": fast.exact,
        "token_accuracy": fast.token_accuracy,
        "verified": fast.verified,
        "evaluated_per_token": fast.evaluated_per_token,
        "prefill_seconds": prefill,
        "attack_seconds": fast.seconds,
        "over_prefill": fast.seconds / prefill,
        "probe_seconds": first.setup["probe_seconds"],
    }
    if greedy_limit:
        few = released[:greedy_limit]
        greedy = registry.build("attacks", "vocab-match", search="greedy", proposal="lm", batch=1)
        single = registry.build("attacks", "vocab-match", setup="full", batch=1)
        slow, alone = _attack(greedy, few, model, seed), _attack(single, few, model, seed)
        row |= {
            "greedy_seconds": slow.seconds,
            "greedy_evaluated_per_token": slow.evaluated_per_token,
            "greedy_exact": slow.exact,
            "greedy_over_speculative": slow.seconds / alone.seconds,
        }
    if unscreened:
        plain = registry.build("attacks", "vocab-match", setup="full", batch=BATCH, without="screening")
        plain.progress = progress
        _attack(plain, released[:1], model, seed)
        row["unscreened_over_screened"] = _attack(plain, released, model, seed).seconds / fast.seconds
    return row | {"peak_memory_mb": peak_memory_mb()}


def _attack(
    attack: Attack, released: list[tuple[Observation, GroundTruth]], model: TruncatedModel, seed: int
) -> Timed:
    observations = [observation for observation, _ in released]
    recoveries = attack.fit(observations[0].info, model, seed).recover_batch(observations)
    pairs = [(r, list(s.tokens)) for r, (_, s) in zip(recoveries, released, strict=True)]
    total = sum(len(truth) for _, truth in pairs)
    return Timed(
        exact=sum(r.ids == truth for r, truth in pairs) / len(pairs),
        token_accuracy=sum(a == b for r, truth in pairs for a, b in zip(r.ids, truth, strict=True)) / total,
        verified=sum(t.verified for r, _ in pairs for t in r.tokens) / total,
        evaluated_per_token=sum(r.evaluated_tokens for r in recoveries) / total,
        seconds=sum(r.seconds for r in recoveries),
        setup=dict(attack.measured),
    )
