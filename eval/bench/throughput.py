"""Measure how many tokens a second Cascade gives to many clients at once: ``hiddenlab bench throughput``."""

import http.client
import json
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from hiddenlab.defenses.cascade.command import Backend
from hiddenlab.defenses.cascade.generate import generate
from hiddenlab.defenses.cascade.load import load_cascade_model
from hiddenlab.defenses.cascade.port import reserved
from hiddenlab.errors import HiddenlabError, InputError
from hiddenlab.registry import parse_numbers
from hiddenlab.sharding import Plan
from hiddenlab.types import Progress, silent

PATIENCE = 900.0
WAYS = ("local", "wire", "ray", "http")

# Seconds until the first token, and the number of tokens.
Answer = tuple[float, int]


def bench(
    model: str = "builtin",
    way: str = "http",
    clients: str = "1,4,16,64",
    alpha: int = 2,
    m: int = 1,
    prompt_tokens: int = 32,
    new_tokens: int = 32,
    threads: int | None = None,
    seed: int = 0,
    timeout: float = 120.0,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Let clients ask at once for answers of the same length, and let the plain model answer as many in one batch.

    Args:
        way: ``http`` asks a server on Ray by streamed requests; ``local``, ``wire`` and ``ray`` call that backend.
        clients: numbers of clients.
        alpha, m: see ``Plan``.
        prompt_tokens: drawn at random, other ones for each client.
        new_tokens: of each answer, greedy.
        threads: of torch in every process.

    Returns:
        ``rows``, one per number of clients: tokens a second of all together, the ratio to one client and to the plain
        model's batch in the same run, and seconds until the first token (median and largest over the clients).
    """
    if way not in WAYS:
        raise InputError(f"unknown way {way!r}; known are {', '.join(WAYS)}")
    counts = parse_numbers("clients", str(clients))
    threads = threads or 1
    torch.set_num_threads(threads)
    plain: Any = load_cascade_model(model, attention="sdpa")
    generator = torch.Generator().manual_seed(seed)
    vocabulary = int(plain.config.vocab_size)
    rows: list[dict[str, Any]] = []
    nodes = Backend(
        kind="ray" if way == "http" else way, model=model, compress=True, threads=threads, timeout=timeout,
        concurrent=max(counts),
    )  # fmt: skip
    with _asking(nodes, way, alpha, m, max(counts), new_tokens) as ask:
        _together(ask, torch.randint(0, vocabulary, (2, prompt_tokens), generator=generator))  # warm
        for done, count in enumerate(counts):
            prompts = torch.randint(0, vocabulary, (count, prompt_tokens), generator=generator)
            plain_first, plain_seconds = _plain(plain, prompts, new_tokens)
            answers, seconds = _together(ask, prompts)
            tokens = sum(count for _, count in answers)
            rate, plain_rate = tokens / seconds, count * new_tokens / plain_seconds
            firsts = [first for first, _ in answers]
            rows.append(
                {
                    "clients": count,
                    "tokens": tokens,
                    "tokens_per_second": rate,
                    "over_one_client": rate / rows[0]["tokens_per_second"] if rows else 1.0,
                    "plain_tokens_per_second": plain_rate,
                    "of_plain": rate / plain_rate,
                    "first_token_seconds": statistics.median(firsts),
                    "last_first_token_seconds": max(firsts),
                    "plain_first_token_seconds": plain_first,
                }
            )
            progress("numbers of clients", done + 1, len(counts))
    return {
        "rows": rows,
        "model": model,
        "way": way,
        "alpha": alpha,
        "m": m,
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
        "threads": threads,
        "seed": seed,
    }


def _together(
    ask: Callable[[Int[Tensor, " n"]], Answer], prompts: Int[Tensor, "clients n"]
) -> tuple[list[Answer], float]:
    """Ask for all answers at once; return them and the seconds until the last one ended."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        started = time.perf_counter()
        answers = list(pool.map(ask, prompts))
        return answers, time.perf_counter() - started


@torch.inference_mode()
def _plain(model: Any, prompts: Int[Tensor, "clients n"], new_tokens: int) -> tuple[float, float]:
    """Generate greedily for all prompts in one batch; return seconds until the first tokens, and in all."""
    started, first, cache, inputs = time.perf_counter(), 0.0, None, prompts
    for _ in range(new_tokens):
        output = model(input_ids=inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache, inputs = output.past_key_values, output.logits[:, -1:].argmax(-1)
        first = first or time.perf_counter() - started
    return first, time.perf_counter() - started


@contextmanager
def _asking(
    nodes: Backend, way: str, alpha: int, m: int, clients: int, new_tokens: int
) -> Iterator[Callable[[Int[Tensor, " n"]], Answer]]:
    """Start the nodes, and give what asks them for one answer."""
    if way != "http":
        with nodes.start(alpha, m, True) as cascade:

            def call(prompt: Int[Tensor, " n"]) -> Answer:
                plan = Plan.clustered(len(prompt), 1, alpha=alpha, m=m, symmetric=True)
                started, first, count = time.perf_counter(), 0.0, 0
                for _ in generate(cascade, prompt, plan, new_tokens=new_tokens):
                    count += 1
                    first = first or time.perf_counter() - started
                return first, count

            yield call
        return
    from hiddenlab.defenses.cascade import serve
    from hiddenlab.defenses.cascade.service import Limits

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = int(listener.getsockname()[1])
    limits = Limits(running=clients, new_tokens=new_tokens, default_new_tokens=new_tokens)
    with reserved("127.0.0.1", port):
        own = serve.start(nodes, alpha=alpha, m=m, port=port, limits=limits)
        try:
            yield lambda prompt: _streamed(port, nodes.model, prompt.tolist(), new_tokens)
        finally:
            serve.stop(own)


def _streamed(port: int, model: str, prompt: list[int], new_tokens: int) -> Answer:
    """Ask for a streamed answer. Text may come later than its token, so the server's count of tokens is taken."""
    body = {
        "model": model, "prompt": prompt, "temperature": 0, "max_tokens": new_tokens, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    started, first, tokens = time.perf_counter(), 0.0, 0
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise HiddenlabError(f"the server answers with {response.status}")
    for line in response:
        if not line.startswith(b"data: {"):
            continue
        first = first or time.perf_counter() - started
        event = json.loads(line.removeprefix(b"data: "))
        if "error" in event:
            raise HiddenlabError(f"the server answers with an error: {event['error']['message']}")
        if usage := event.get("usage"):
            tokens = usage["completion_tokens"]
    connection.close()
    return first, tokens
