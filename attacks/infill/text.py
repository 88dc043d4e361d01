"""Load texts to train on from a source of prompts, or sample them from the model itself."""

import hashlib
import json
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hiddenlab.errors import InputError
from hiddenlab.models import TruncatedModel
from hiddenlab.models.load import load_config, load_module
from hiddenlab.prompts import iter_prompts
from hiddenlab.proposals.probe import fast_dtype
from hiddenlab.text import count_of
from hiddenlab.types import Progress
from hiddenlab.utils.cache import cache_path
from hiddenlab.utils.digests import digest_of
from hiddenlab.utils.files import save_tensors

OWN = "own"
AT_ONCE = 256  # sequences generated together
TOP_K = 100


def windows(
    model: TruncatedModel, source: str, count: int, length: int, seed: int, progress: Progress
) -> Int[Tensor, "n length"]:
    """Return token windows of one length.

    Args:
        source: ``own``, or a source of ``hiddenlab.prompts.load_prompts``, whose texts are cut into windows.
        count: of windows at most.

    Raises:
        InputError: the source cannot be read, or no text of it is that long.
    """
    if source == OWN:
        return own_text(model, count, length, seed, progress)
    rows: list[Tensor] = []
    for prompt in islice(iter_prompts(source), count):
        ids = torch.tensor(model.tokenize(prompt))
        rows += list(ids[: len(ids) // length * length].view(-1, length))
        progress("reading texts", min(len(rows), count), count)
        if len(rows) >= count:
            break
    if not rows:
        raise InputError(
            f"no text of {source} has {count_of(length, 'token')}; give longer ones or a smaller length"
        )
    return torch.stack(rows[:count])


def own_text(
    truncated: TruncatedModel, count: int, length: int, seed: int, progress: Progress
) -> Int[Tensor, "n length"]:
    """Sample text from the whole model, each from a random first token, and keep it in the cache.

    It has the model's knowledge and style, not those of any data set; tables made from it say so.
    """
    path = _path(truncated, length, seed)
    done = _load(path, length)
    if len(done) >= count:
        return done[:count]
    model: Any = load_module(
        truncated.ref, load_config(truncated.ref), head=True, dtype=fast_dtype(truncated.device),
        device=truncated.device, attention=None,
    )  # fmt: skip
    # The library samples from the global generator, which is restored afterwards.
    with torch.random.fork_rng():
        while len(done) < count:
            progress("generating texts to train on", len(done), count)
            torch.manual_seed(hash_seed(seed, len(done)))
            start = torch.randint(0, truncated.vocab_size, (AT_ONCE, 1), device=truncated.device)
            with torch.inference_mode():
                new = model.generate(
                    start, attention_mask=torch.ones_like(start), do_sample=True, top_p=1.0, top_k=TOP_K,
                    temperature=1.0,
                    min_new_tokens=length - 1, max_new_tokens=length - 1,
                    pad_token_id=int(truncated.special_ids[0]) if truncated.special_ids else 0,
                )  # fmt: skip
            done = torch.cat([done, new.cpu()])
            _save(path, done)
    progress("generating texts to train on", count, count)
    return done[:count]


def hash_seed(*numbers: int) -> int:
    """Return a seed for each place in a sequence of draws."""
    return int.from_bytes(hashlib.sha256(json.dumps(numbers).encode()).digest()[:7], "big")


def _path(model: TruncatedModel, length: int, seed: int) -> Path:
    identity = [model.signature, model.vocab_size, length, seed, TOP_K, AT_ONCE]
    return cache_path("texts", f"{digest_of(identity)}.safetensors")


def _load(path: Path, length: int) -> Int[Tensor, "n length"]:
    with suppress(OSError, SafetensorError, KeyError), safe_open(path, "pt") as file:
        return file.get_tensor("tokens").long()
    return torch.empty(0, length, dtype=torch.long)


def _save(path: Path, tokens: Int[Tensor, "n length"]) -> None:
    save_tensors(path, {"tokens": tokens.int()}, {})
