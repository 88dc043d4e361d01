"""Time candidates behind kept keys and values, and as whole sequences (Appendix A): ``hiddenlab bench kv-cache``."""

import time
from statistics import median
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from hiddenlab.errors import InputError
from hiddenlab.models import Prefix, Request, TruncatedModel, load_model
from hiddenlab.models.tokens import most_tokens
from hiddenlab.types import Progress, silent
from hiddenlab.utils.random import generator


def bench(
    model: str = "builtin",
    layer: int = 11,
    limit: int = 128,
    max_tokens: int = 50,
    repeats: int = 3,
    seed: int = 0,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Time candidates for one position with and without a KV cache that they share (Hidden No More, Appendix A).

    With it, candidates run behind the keys and values of the tokens found so far. Without it, each runs as a whole
    sequence. Tokens are drawn at random, because time does not depend on them.

    Args:
        limit: number of candidates.
        max_tokens: length of a prompt; candidates are timed behind a fifth of it, two fifths, and so on.
        repeats: of each way, in alternation; the median counts.

    Returns:
        ``rows``: for each number of tokens found, and for all together, the seconds of both ways and their ratio; and
        the settings.

    Raises:
        InputError: a number is below 1, or a prompt is longer than the model reads.
    """
    if min(layer, limit, repeats) < 1 or max_tokens < 5:
        raise InputError(
            "layer, limit and repeats must be at least 1 and max_tokens at least 5, "
            f"not {layer}, {limit}, {repeats} and {max_tokens}"
        )
    truncated = load_model(model, layer, device="cpu")
    longest = most_tokens(truncated.module)
    if longest is not None and max_tokens > longest:
        raise InputError(f"{model} reads at most {longest} tokens, not {max_tokens}")
    random = generator(seed, "bench", "kv-cache")
    prompt = torch.randint(0, truncated.vocab_size, (max_tokens,), generator=random)
    candidates = torch.randint(0, truncated.vocab_size, (limit,), generator=random)
    rows = []
    lengths = [max_tokens * part // 5 for part in range(1, 6)]
    for i, length in enumerate(lengths):
        found, prefix = prompt[: length - 1], truncated.prefix()
        if len(found):
            prefix.extend(found)
        kept, whole = list[float](), list[float]()
        for _ in range(repeats + 1):
            kept.append(_timed(lambda prefix=prefix: behind(prefix, candidates)))
            whole.append(_timed(lambda found=found: as_sequences(truncated, found, candidates)))
        # The first of each warms up.
        rows.append(_row(length - 1, median(kept[1:]), median(whole[1:])))
        progress("timing candidates", i + 1, len(lengths))
    sums = (sum(row[name] for row in rows) for name in ("seconds_cached", "seconds_whole"))
    rows.append(_row("all", *sums))
    return {
        "rows": rows, "candidates": limit, "layer": layer, "repeats": repeats, "dtype": str(truncated.dtype),
        "threads": torch.get_num_threads(), "seed": seed,
    }  # fmt: skip


def behind(prefix: Prefix, candidates: Int[Tensor, " c"]) -> Tensor:
    """Return the candidates' states ``[c, d]`` behind a prefix whose keys and values are kept."""
    return prefix.branch(candidates)


def as_sequences(model: TruncatedModel, found: Int[Tensor, " n"], candidates: Int[Tensor, " c"]) -> Tensor:
    """Return the candidates' states ``[c, d]``, each from a pass over all tokens before it."""
    requests = [Request(model.prefix(), torch.cat([found, candidate[None]])) for candidate in candidates]
    return torch.stack([answer.states[-1] for answer in model.run_all(requests, keep=False)])


def _row(length: int | str, cached: float, whole: float) -> dict[str, Any]:
    return {"tokens_found": length, "seconds_cached": cached, "seconds_whole": whole, "times": whole / cached}


def _timed(run: Any) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
