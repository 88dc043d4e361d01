"""Time the next token of many hypotheses, attended together or one after another: ``hiddenlab bench chains``."""

import time
from statistics import median
from typing import Any

import torch

from hiddenlab.errors import InputError
from hiddenlab.models import Prefix, Request, TruncatedModel, load_model
from hiddenlab.models.tokens import most_tokens
from hiddenlab.proposals.probe import fast_dtype
from hiddenlab.types import Progress, silent
from hiddenlab.utils.random import generator


def bench(
    model: str = "builtin",
    limit: int = 256,
    max_tokens: int = 25,
    repeats: int = 5,
    seed: int = 0,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Time one token after each of many prefixes of one length, in the whole model and its fastest dtype.

    A beam of hypotheses needs this of the language model after every token. Prompts are drawn at random, because time
    does not depend on them.

    Args:
        limit: number of hypotheses.
        max_tokens: length of each prefix.
        repeats: of each way, in alternation; the median counts.

    Returns:
        ``rows``: one, with the seconds of both ways and their ratio; and the settings.

    Raises:
        InputError: a number is below 1.
    """
    if min(limit, max_tokens, repeats) < 1:
        raise InputError(
            f"limit, max_tokens and repeats must be at least 1, not {limit}, {max_tokens}, {repeats}"
        )
    dtype = str(fast_dtype(torch.device("cpu"))).removeprefix("torch.")
    truncated = load_model(model, stream="logits", device="cpu", dtype=dtype)
    random = generator(seed, "bench", "chains")
    longest = most_tokens(truncated.module)
    if longest is not None and max_tokens >= longest:
        raise InputError(f"{model} reads at most {longest} tokens; max_tokens leaves no room for one more")
    prompts = torch.randint(0, truncated.vocab_size, (limit, max_tokens + 1), generator=random)
    requests = [Request(_held(truncated, prompt[:-1]), prompt[-1:]) for prompt in prompts]
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(repeats + 1):
        for together, spent in seconds.items():
            start = time.perf_counter()
            truncated.run_all(requests, keep=False, together=together)
            spent.append(time.perf_counter() - start)
        progress("running chains", turn + 1, repeats + 1)
    fast, slow = (median(spent[1:]) for spent in seconds.values())  # the first of each warms up
    row = {"seconds_together": fast, "seconds_apart": slow, "apart_over_together": slow / fast}
    return {
        "rows": [{"hypotheses": limit, "prefix": max_tokens, **row}],
        "repeats": repeats, "dtype": str(truncated.dtype), "threads": torch.get_num_threads(), "seed": seed,
    }  # fmt: skip


def _held(model: TruncatedModel, tokens: torch.Tensor) -> Prefix:
    prefix = model.prefix()
    prefix.extend(tokens)
    return prefix
