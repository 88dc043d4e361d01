"""Time the plain model, Cascade in one process and Cascade on Ray in one run: ``hiddenlab bench cascade``.

Compare the paper's Tables 6 and 7.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import psutil
import torch
from torch import Tensor

from hiddenlab.defenses.cascade.backend import Cascade
from hiddenlab.defenses.cascade.command import Backend
from hiddenlab.defenses.cascade.cost import Shape, layer_bytes, layer_seconds
from hiddenlab.defenses.cascade.generate import generate
from hiddenlab.defenses.cascade.load import load_cascade_model
from hiddenlab.defenses.cascade.node_state import comp_name
from hiddenlab.errors import InputError
from hiddenlab.models.load import DTYPES, load_config, parse_dtype, resolve_model
from hiddenlab.models.reading import quiet_transformers
from hiddenlab.registry import parse_numbers
from hiddenlab.sharding import Plan
from hiddenlab.types import Progress, silent

# Shapes whose weights are drawn at random: time and bytes depend on nothing else.
SHAPES: dict[str, dict[str, Any]] = {
    "bert-base": {"type": "bert"},
    "bert-large": {
        "type": "bert",
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
    },
}

BACKENDS: dict[str, dict[str, Any]] = {
    "local": {"kind": "local"},
    "wire": {"kind": "wire"},
    "tcp": {"kind": "ray", "transport": "tcp"},
    "objects": {"kind": "ray", "transport": "objects"},
}
ON_WIRE = ("wire", "tcp")
KINDS = ("compute", "send", "wait", "merge")  # of a CompNode's seconds


def bench(
    model: str = "bert-base",
    depth: int | None = None,
    max_tokens: int = 128,
    alphas: str = "1,2,4",
    backends: str = "local,tcp,objects",
    objects_alpha: int = 1,
    c: int = 1,
    m: int = 1,
    symmetric: bool = False,
    causal: bool = False,
    compress: bool = False,
    wire: str | None = None,
    repeats: int = 10,
    seed: int = 0,
    threads: int | None = None,
    bandwidth: float | None = None,
    latency: float = 0.0,
    timeout: float = 120.0,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Time one forward pass of random tokens, plain and sharded in alternation.

    Args:
        model: a shape of ``SHAPES`` with random weights, or a model.
        depth: layers of the shape, None for all.
        max_tokens: length of the prompt.
        alphas: numbers of CompNodes to measure with.
        backends: ``local`` (threads of this process), ``wire`` (the same over TCP), ``tcp`` and ``objects`` (Ray).
        objects_alpha: largest α for ``objects``.
        causal: leave out blocks in which no query of a causal model sees a key, and time the plan with them beside.
        repeats: passes that are timed, after two that are not.
        threads: of torch in every process.
        bandwidth, latency: of a simulated network (``wire`` and ``tcp``), gigabits per second and milliseconds one way.

    Returns:
        ``rows``, one per setting: median seconds with the 2.5th and 97.5th percentile, the ratio to the plain model
        in the same loop, megabytes counted on the wire and by Equation 1, the longest CompNode's seconds by kind and
        all seconds of CompNode 0, the largest difference from the plain output, start-up time and memory of a node.
        Where blocks are left out, also the ratio to the same plan with all blocks in the same loop, and the seconds of
        CompNode 0 under it.
    """
    kinds = [part.strip() for part in backends.split(",") if part.strip()]
    if unknown := set(kinds) - set(BACKENDS):
        raise InputError(f"unknown backend {unknown.pop()!r}; known are {', '.join(BACKENDS)}")
    counts = parse_numbers("alphas", str(alphas))
    threads = threads or 1
    torch.set_num_threads(threads)
    rows: list[dict[str, Any]] = []
    with _random_weights(model, seed, depth) as name:
        plain, config, tokens = _plain_and_prompt(name, max_tokens, seed)
        for kind in kinds:
            for alpha in counts:
                if kind == "objects" and alpha > objects_alpha:
                    continue
                nodes = Backend(
                    **BACKENDS[kind], model=name, compress=compress, wire=wire, timeout=timeout, threads=threads,
                    bandwidth=None if bandwidth is None or kind not in ON_WIRE else bandwidth * 1e9 / 8,
                    latency=latency / 1e3,
                )  # fmt: skip
                plan = Plan.clustered(max_tokens, c, alpha=alpha, m=m, symmetric=symmetric, causal=causal)
                started = time.perf_counter()
                with nodes.start(alpha, m, symmetric, progress) as cascade:
                    row = {"setting": f"{kind} α={alpha}", "nodes": alpha + len(plan.attn_nodes)}
                    row["start_seconds"] = time.perf_counter() - started
                    row |= _measure(cascade, plan, tokens, plain, repeats, progress)
                shape = Shape.of(config, parse_dtype(wire or "float32").itemsize)
                mode = "logsumexp" if compress else "paper"
                row["mb_formula"] = shape.layers * layer_bytes(plan, shape, mode) / 1e6
                if bandwidth is not None and kind in ON_WIRE:
                    link = nodes.link()
                    assert link is not None
                    row["seconds_formula"] = shape.layers * layer_seconds(plan, shape, link, mode)
                rows.append(row)
    return {
        "rows": rows,
        "model": model,
        "tokens": max_tokens,
        "c": c,
        "m": m,
        "symmetric": symmetric,
        "causal": causal,
        "compress": compress,
        "wire": wire or "as computed",
        "network": "none" if bandwidth is None else f"{bandwidth:g} Gbit/s, {latency:g} ms one way",
        "repeats": repeats,
        "threads": threads,
        "seed": seed,
    }


def bench_decode(
    model: str = "builtin",
    lengths: str = "64,256,512,1024",
    new_tokens: int = 16,
    alpha: int = 2,
    m: int = 1,
    c: int = 1,
    backend: str = "local",
    seed: int = 0,
    threads: int | None = None,
    timeout: float = 120.0,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Time a new token after prompts of several lengths: Cascade with token-sharded caching, and the plain model.

    Args:
        lengths: tokens of the prompts, drawn at random.
        new_tokens: generated after each, greedily; the median of all but the first counts.
        backend: ``local`` or ``ray``.

    Returns:
        ``rows``, one per length: median milliseconds per token of both and their ratio, whether both gave the same
        tokens, and each one's time relative to its own after the shortest prompt.
    """
    torch.set_num_threads(threads or 1)
    rows: list[dict[str, Any]] = []
    plain: Any = load_cascade_model(model, attention="sdpa")
    nodes = Backend(kind=backend, model=model, timeout=timeout, threads=threads or 1)
    generator = torch.Generator().manual_seed(seed)
    counts = parse_numbers("lengths", str(lengths))
    with nodes.start(alpha, m, True, progress) as cascade:
        for done, length in enumerate(counts):
            tokens = torch.randint(0, cascade.facts.vocabulary, (length,), generator=generator)
            plan = Plan.clustered(length, c, alpha=alpha, m=m, symmetric=True)
            output, ours = _timed_tokens(generate(cascade, tokens, plan, new_tokens=new_tokens))
            expected, theirs = _timed_tokens(plain_tokens(plain, tokens, new_tokens))
            rows.append(
                {
                    "prompt_tokens": length,
                    "ms_per_token": 1e3 * ours,
                    "plain_ms_per_token": 1e3 * theirs,
                    "over_plain": ours / theirs,
                    "growth": 1e3 * ours / rows[0]["ms_per_token"] if rows else 1.0,
                    "plain_growth": 1e3 * theirs / rows[0]["plain_ms_per_token"] if rows else 1.0,
                    "same_tokens": output == expected,
                }
            )
            progress("decoding", done + 1, len(counts))
    return {"rows": rows, "model": model, "backend": backend, "alpha": alpha, "m": m, "c": c, "seed": seed}


def _timed_tokens(tokens: Iterator[int]) -> tuple[list[int], float]:
    """Return the tokens, and the median seconds between them."""
    ids, times = [], []
    for token in tokens:
        ids.append(token)
        times.append(time.perf_counter())
    return ids, statistics.median(b - a for a, b in pairwise(times))


def plain_tokens(model: Any, tokens: Tensor, new: int) -> Iterator[int]:
    """Generate greedily with transformers' own cache."""
    cache, inputs = None, tokens[None]
    for _ in range(new):
        with torch.inference_mode():
            output = model(input_ids=inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache, inputs = output.past_key_values, output.logits[:, -1:].argmax(-1)
        yield int(inputs)


def bench_largest(
    model: str = "bert-base",
    max_tokens: int = 128,
    share: float = 0.8,
    m: int = 1,
    symmetric: bool = False,
    seed: int = 0,
    threads: int | None = None,
    timeout: float = 300.0,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Run plans of more and more nodes on this machine, until the next would not fit its memory.

    Args:
        share: of the memory that is free at the start, which the nodes may take.

    Returns:
        ``rows``, one per plan: nodes, seconds to start, memory of nodes in megabytes (largest of each kind, and all
        together), seconds of one pass, largest difference from the plain output.
    """
    torch.set_num_threads(threads or 1)
    rows: list[dict[str, Any]] = []
    free = psutil.virtual_memory().available * share
    with _random_weights(model, seed) as name:
        plain, _, tokens = _plain_and_prompt(name, max_tokens, seed)
        comp, attn = 3.0 * sum(p.nbytes for p in plain.parameters()), 4e8  # until measured
        alpha = 1
        while True:
            plan = Plan.clustered(max_tokens, 1, alpha=alpha, m=m, symmetric=symmetric)
            if alpha * comp + len(plan.attn_nodes) * attn > free:
                break
            nodes = Backend(kind="ray", model=name, timeout=timeout, threads=threads or 1)
            started = time.perf_counter()
            with nodes.start(alpha, m, symmetric, progress) as cascade:
                row: dict[str, Any] = {"comp_nodes": alpha, "attn_nodes": len(plan.attn_nodes)}
                row["start_seconds"] = time.perf_counter() - started
                figures = _measure(cascade, plan, tokens, plain, 3, progress)
            row |= {
                key: figures[key] for key in ("comp_memory_mb", "attn_memory_mb", "seconds", "max_difference")
            }
            comp, attn = 1e6 * row["comp_memory_mb"], 1e6 * row["attn_memory_mb"]
            row["all_memory_mb"] = (alpha * comp + len(plan.attn_nodes) * attn) / 1e6
            rows.append(row)
            alpha += 1
    return {
        "rows": rows,
        "model": model,
        "tokens": max_tokens,
        "m": m,
        "symmetric": symmetric,
        "free_mb": free / 1e6,
    }


def _measure(
    cascade: Cascade, plan: Plan, tokens: Tensor, plain: Any, repeats: int, progress: Progress
) -> dict[str, Any]:
    with torch.inference_mode():
        output = plain(input_ids=tokens[None])
    expected = (output.logits if cascade.facts.head else output.last_hidden_state)[0]
    difference = float((cascade.forward(tokens, plan) - expected).abs().max())
    cascade.forward(tokens, plan)
    # A plan without some blocks is timed beside the same one with all of them.
    timed = [plan, replace(plan, causal=False)] if plan.causal else [plan]
    ours: list[list[float]] = [[] for _ in timed]
    counted: list[dict[str, dict[str, float]]] = [{} for _ in timed]
    theirs = []
    for i in range(repeats):
        for one, times, total in zip(timed, ours, counted, strict=True):
            before = cascade.counters()
            times.append(_seconds(partial(cascade.forward, tokens, one)))
            for name, counters in cascade.counters().items():
                sums = total.setdefault(name, dict.fromkeys(counters, 0.0))
                for key, value in counters.items():
                    sums[key] += (value - before.get(name, {}).get(key, 0)) / repeats
        theirs.append(_seconds(lambda: _plain(plain, tokens)))
        progress("measuring", i + 1, repeats)
    spent = counted[0]
    comps = [counters for name, counters in spent.items() if name.startswith("Comp")]
    totals = [sum(counters[key] for key in KINDS) for counters in comps]
    slowest = comps[totals.index(max(totals))]
    payload = sum(counters.get("sent_payload", 0) for counters in spent.values())
    framing = sum(counters.get("sent_framing", 0) for counters in spent.values())
    memory: dict[str, int] = getattr(cascade, "memory", dict)()
    return {
        "seconds": statistics.median(ours[0]),
        "seconds_low": _percentile(ours[0], 0.025),
        "seconds_high": _percentile(ours[0], 0.975),
        "plain_seconds": statistics.median(theirs),
        "over_plain": _ratio(ours[0], theirs),
        **({"over_all_blocks": _ratio(*ours)} if plan.causal else {}),
        "max_difference": difference,
        **{f"{key}_seconds": slowest[key] for key in KINDS},
        **{
            name: sum(total[comp_name(0)][key] for key in KINDS)
            for name, total in zip(("first_node_seconds", "first_node_all_blocks"), counted, strict=False)
        },
        "mb_on_wire": payload / 1e6 or None,
        "mb_framing": framing / 1e6 or None,
        "comp_memory_mb": max((v / 1e6 for k, v in memory.items() if k.startswith("Comp")), default=None),
        "attn_memory_mb": max((v / 1e6 for k, v in memory.items() if k.startswith("Attn")), default=None),
    }


def _ratio(ours: Sequence[float], others: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(ours, others, strict=True))


def _plain(model: Any, tokens: Tensor) -> None:
    with torch.inference_mode():
        model(input_ids=tokens[None])


def _seconds(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))]


def _plain_and_prompt(name: str, tokens: int, seed: int) -> tuple[Any, Any, Tensor]:
    """Return the plain model, its configuration, and random tokens."""
    config = load_config(resolve_model(name))
    generator = torch.Generator().manual_seed(seed)
    return (
        load_cascade_model(name, attention="sdpa"),
        config,
        torch.randint(0, config.vocab_size, (tokens,), generator=generator),
    )


@contextmanager
def _random_weights(model: str, seed: int, depth: int | None = None) -> Iterator[str]:
    """Yield a folder with random weights of a shape, removed afterwards; yield other names unchanged.

    Raises:
        InputError: ``depth`` is given for a model that is no shape.
    """
    if model not in SHAPES:
        if depth is not None:
            raise InputError(f"depth is for the shapes {', '.join(SHAPES)}, not for {model}")
        yield model
        return
    from transformers import AutoConfig, AutoModel

    settings = SHAPES[model] | ({} if depth is None else {"num_hidden_layers": depth})
    config = AutoConfig.for_model(settings.pop("type"), **settings)
    with tempfile.TemporaryDirectory(prefix="hiddenlab-") as folder, torch.random.fork_rng():
        torch.manual_seed(seed)
        with quiet_transformers():
            AutoModel.from_config(config, dtype=DTYPES["float32"]).save_pretrained(folder)
        yield folder
