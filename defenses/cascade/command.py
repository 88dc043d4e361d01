"""``hiddenlab cascade``: plan who would hold what at which cost, and run a model that way."""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

from defenses.cascade.cost import STATISTICS, Link, Shape, layer_bytes, layer_seconds, rounds
from defenses.cascade.plan import Plan, gaps, recoverable, smallest_gap
from hiddenlab.errors import InputError


def plan(
    tokens: int,
    alpha: int | None = None,
    c: int = 1,
    delta: int | None = None,
    m: int = 1,
    shards: str | None = None,
    symmetric: bool = False,
    rho: int = 3,
    model: str = "builtin",
    element_bytes: int = 2,
    bandwidth: float = 2.5e8,
    latency: float = 0.38e-3,
) -> dict[str, Any]:
    """A plan and its figures.

    Args:
        shards: positions written by hand, ``0,1,4;2,3,5``, in place of (c, δ)-sharding.
        rho: vocab-matching threshold. model: gives the shape for the cost. bandwidth: bytes a second.
        latency: seconds, one way. The other arguments are those of ``Plan.clustered``.

    Returns:
        ``plan`` (settings and node counts), ``rows`` (one a CompNode), ``attn`` (over all AttnNodes), ``holders``
        (the CompNode of each token), ``violations`` of Theorem 7.3 and ``cost``.

    Raises:
        InputError: the plan does not exist, or the model is unknown.
    """
    from hiddenlab.slice.load import load_config, resolve_model

    if rho < 1 or element_bytes < 1:
        raise InputError("rho and the bytes of an element must be at least 1")
    link = Link(bandwidth, latency)
    made = make_plan(tokens, alpha, c, delta, m, shards, symmetric)
    shape = Shape.of(load_config(resolve_model(model)), element_bytes)
    held = [made.held_by(node) for node in made.attn_nodes]
    closest = [gap for gap in map(smallest_gap, held) if gap is not None]
    cost: dict[str, Any] = {"layers": shape.layers, "messages_per_layer": rounds(made)}
    for mode in STATISTICS:
        cost[f"bytes_per_layer_{mode}"] = layer_bytes(made, shape, mode)
        cost[f"bytes_{mode}"] = shape.layers * layer_bytes(made, shape, mode)
    cost["seconds_per_layer"] = layer_seconds(made, shape, link)
    cost["seconds"] = shape.layers * layer_seconds(made, shape, link)
    owner = {position: i for i, shard in enumerate(made.shards) for position in shard}
    return {
        "plan": {
            "tokens": tokens,
            "alpha": made.alpha,
            "beta": made.beta,
            "m": m,
            "symmetric": symmetric,
            "comp_nodes": made.alpha,
            "attn_nodes": len(made.attn_nodes),
            "rho": rho,
            "model": model,
        },
        "rows": [
            {
                "node": f"CompNode {i}",
                "tokens": len(shard),
                "clusters": len(gaps(shard)) + bool(shard),
                "smallest_gap": smallest_gap(shard),
                "recoverable_tokens": recoverable(shard, rho),
            }
            for i, shard in enumerate(made.shards)
        ],
        "attn": {
            "most_tokens": max(map(len, held)),
            "smallest_gap": min(closest, default=None),
            "most_recoverable_tokens": max(recoverable(positions, rho) for positions in held),
        },
        "holders": [owner[position] for position in range(made.tokens)],
        "violations": made.violations(rho),
        "cost": cost,
    }


def run(
    prompt: str,
    alpha: int | None = None,
    c: int = 1,
    delta: int | None = None,
    m: int = 1,
    shards: str | None = None,
    symmetric: bool = False,
    compress: bool = False,
    model: str = "builtin",
    compare: bool = False,
    repeats: int = 3,
) -> dict[str, Any]:
    """One forward pass of a prompt over the nodes of a plan, in one process.

    Args:
        compress: send one logsumexp a row. compare: run the plain model as well. repeats: passes that are timed,
            after one that is not. The other arguments are those of ``plan``.

    Returns:
        ``tokens``, ``comp_nodes``, ``attn_nodes``, ``next_token`` (None for a model without a head), ``seconds``
        (median), ``elements_sent``; and, compared, ``plain_seconds``, ``over_plain`` and ``max_difference``.

    Raises:
        InputError: the plan does not exist, the model is unknown, or the prompt is empty or too long.
    """
    import torch

    from defenses.cascade.local import LocalCascade, load_cascade_model
    from hiddenlab.slice.load import load_tokenizer, resolve_model

    tokenizer = load_tokenizer(resolve_model(model))
    if tokenizer is None:
        raise InputError(f"{model} has no tokenizer")
    ids = torch.tensor(tokenizer(prompt)["input_ids"], dtype=torch.long)
    if not len(ids):
        raise InputError("the prompt is empty; give at least one token")
    made = make_plan(len(ids), alpha, c, delta, m, shards, symmetric)
    cascade = LocalCascade(load_cascade_model(model), compress=compress)
    out, seconds = _timed(lambda: cascade.forward(ids, made), repeats)
    head = cascade.has_head
    result: dict[str, Any] = {
        "tokens": len(ids),
        "comp_nodes": made.alpha,
        "attn_nodes": len(made.attn_nodes),
        "next_token": tokenizer.decode(int(out[-1].argmax())) if head else None,
        "seconds": seconds,
        "elements_sent": cascade.traffic.to_attn + cascade.traffic.to_comp,
    }
    if compare:
        plain = load_cascade_model(model, attention="sdpa")
        with torch.inference_mode():
            output, plain_seconds = _timed(lambda: plain(input_ids=ids[None]), repeats)
        expected = output.logits if head else output.last_hidden_state
        result |= {
            "plain_seconds": plain_seconds,
            "over_plain": seconds / plain_seconds,
            "max_difference": float((out - expected[0]).abs().max()),
        }
    return result


def _timed(call: Callable[[], Any], repeats: int) -> tuple[Any, float]:
    """The first result, and the median time of the calls after it."""
    first, seconds = call(), []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return first, median(seconds)


def make_plan(
    tokens: int, alpha: int | None, c: int, delta: int | None, m: int, shards: str | None, symmetric: bool
) -> Plan:
    """(c, δ)-sharding, or the shards given by hand.

    Raises:
        InputError: the plan does not exist, or both were given.
    """
    if shards is None:
        return Plan.clustered(tokens, c, alpha=alpha, delta=delta, m=m, symmetric=symmetric)
    if alpha is not None or delta is not None:
        raise InputError("give either shards by hand or the numbers of a (c, δ)-sharding")
    made = Plan.by_hand(parse_shards(shards), m=m, symmetric=symmetric)
    if made.tokens != tokens:
        raise InputError(f"the shards hold {made.tokens} tokens, not {tokens}")
    return made


def parse_shards(text: str) -> list[list[int]]:
    """``0,1,4;2,3,5`` as positions of each CompNode.

    Raises:
        InputError: something in it is no number.
    """
    try:
        return [
            [int(position) for position in part.split(",") if position.strip()] for part in text.split(";")
        ]
    except ValueError:
        raise InputError(
            f"--shards {text!r} is no list of positions; write for instance --shards '0,1,4;2,3,5'"
        ) from None
