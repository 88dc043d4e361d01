"""Plan which node would hold which tokens, what each node reads, and at which cost: ``hiddenlab cascade plan``."""

from dataclasses import replace
from typing import Any

from hiddenlab.defenses.cascade import hiding
from hiddenlab.defenses.cascade.cost import (
    STATISTICS,
    Link,
    Shape,
    extra_operations,
    layer_bytes,
    layer_seconds,
    rounds,
    shared_cost,
)
from hiddenlab.defenses.cascade.exposure import (
    evidence_lines,
    gaps_read,
    outputs_read,
    shared_verdicts,
    summary,
    sums_read,
    verdicts,
)
from hiddenlab.defenses.cascade.hardening import NOT_HARDENED, SHARE_NODES, Hardening
from hiddenlab.defenses.cascade.plan_search import best_plan, described, mean_shares
from hiddenlab.errors import InputError
from hiddenlab.sharding import Plan, gaps, recoverable, smallest_gap


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
    client: str | None = None,
    most_bytes: float | None = None,
    most_seconds: float | None = None,
    harden: str | None = None,
    hide: float | None = None,
) -> dict[str, Any]:
    """Make a plan, say what each of its nodes reads, and compute its cost.

    Args:
        tokens: length of the prompt.
        shards: positions written by hand, ``0,1,4;2,3,5``, in place of (c, δ)-sharding.
        rho: threshold of vocabulary matching in Theorem 7.3.
        model: gives the shape for the cost.
        element_bytes: bytes of a number on the wire.
        bandwidth: bytes per second.
        latency: seconds, one way.
        client: CompNodes that the client runs, ``0,3``.
        most_bytes, most_seconds: of a pass of the best plan; where neither is given, the bytes of this plan.
        harden: spec of a hardening, see ``hardening``. hide: also name the cheapest one that was measured to leave a
            CompNode less than this share of others' tokens, see ``hiding``.
        alpha, c, delta, m, symmetric: see ``Plan.clustered``.

    Returns:
        ``verdicts`` (what each node reads, see ``exposure.Verdict``), ``summary`` (the same in sentences, one for
        all nodes that are alike), ``evidence`` (what the verdicts rest on), ``best`` (the plan that leaks least within
        the cost; None where there is none), ``plan`` (settings and node counts), ``rows`` (single attacks on each
        CompNode), ``attn`` (single attacks over all AttnNodes), ``holders`` (the CompNode of each token),
        ``violations`` of Theorem 7.3 and ``cost``, by the paper's formulas for all blocks, and under ``causal`` without
        the blocks that a causal model leaves out; its seconds are with the ``answers`` that the plan has. On shares
        only ``verdicts``, ``summary``, ``evidence``, ``plan`` and ``cost`` (see ``cost.shared_cost``). With
        ``hide`` also ``hide`` (see ``hiding.described``).

    Raises:
        InputError: the plan does not exist, the model is unknown, or ``hide`` is no share.
    """
    from hiddenlab.models.load import load_config, resolve_model

    if rho < 1 or element_bytes < 1:
        raise InputError("rho and the bytes of an element must be at least 1")
    link, hardening = Link(bandwidth, latency), Hardening.parse(harden)
    asked = {} if hide is None else {"hide": hiding.described(hide)}
    made = make_plan(tokens, alpha, c, delta, m, shards, symmetric, hardening)
    whole = Shape.of(load_config(resolve_model(model)), element_bytes)
    if hardening.shares is not None:
        if (client, most_bytes, most_seconds, rho, element_bytes) != (None, None, None, 3, 2):
            raise InputError(
                "--harden shares has two nodes and no plan: leave --client, --at-most-bytes, --at-most-seconds, --rho "
                "and --bytes out"
            )
        return _on_shares(tokens, model, whole, link) | asked
    shape = replace(whole, layers=hardening.node_layers(whole.layers))
    held = [made.held_by(node) for node in made.attn_nodes]
    closest = [gap for gap in map(smallest_gap, held) if gap is not None]
    cost: dict[str, Any] = {
        "layers": shape.layers,
        "client_layers": hardening.client_layers,
        "messages_per_layer": rounds(made),
    }
    form = hardening.answers
    modes = dict.fromkeys((*STATISTICS, form))
    for mode in modes:
        cost[f"bytes_per_layer_{mode}"] = layer_bytes(made, shape, mode)
        cost[f"bytes_{mode}"] = shape.layers * layer_bytes(made, shape, mode)
    cost["extra_operations_per_layer"] = extra_operations(made, shape)
    # Of the product of attention scores and values, H N² d, with which the paper compares them.
    of = shape.heads * made.tokens**2 * shape.head_dim
    cost["extra_operations_share"] = cost["extra_operations_per_layer"] / of
    cost["answers"] = form
    cost["seconds_per_layer"] = layer_seconds(made, shape, link, form)
    cost["seconds"] = shape.layers * cost["seconds_per_layer"]
    causal = replace(made, causal=True)
    cost["causal"] = {
        "blocks_left_out": len(causal.left_out),
        "messages_per_layer": rounds(causal),
        **{f"bytes_{mode}": shape.layers * layer_bytes(causal, shape, mode) for mode in modes},
        "seconds": shape.layers * layer_seconds(causal, shape, link, form),
    }
    owner = {position: i for i, shard in enumerate(made.shards) for position in shard}
    found = verdicts(made, _client_nodes(client), hardening, shape.value_heads)
    bound = float(cost[f"bytes_{form}"]) if most_bytes is None and most_seconds is None else most_bytes
    shares = mean_shares(made)
    best, compared = best_plan(tokens, shape, link, bound, most_seconds, form)
    return {
        "summary": summary(found),
        "evidence": evidence_lines(found, hardening),
        "verdicts": [one.to_json() for one in found],
        "best": None if best is None else described(best, tokens),
        "searched": {
            "plans": compared,
            "most_bytes": bound,
            "most_seconds": most_seconds,
            "own_mean_share_at_comp_node": shares[0],
            "own_mean_share_at_attn_node": shares[1],
        },
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
            "harden": harden,
        },
        "rows": [
            {
                "node": f"CompNode {i}",
                "tokens": len(shard),
                "clusters": len(gaps(shard)) + bool(shard),
                "smallest_gap": smallest_gap(shard),
                "by_row_matching_alone": recoverable(shard, rho),
                # Both were measured of nodes that begin with layer 0.
                "by_missing_tokens": len(shard) + len(gaps_read(shard))
                if not hardening.first_layer
                else None,
                "by_partial_sums": len(shard)
                + len(
                    outputs_read(shard, *shape.value_heads) if hardening.masked_sums else sums_read(made, i)
                )
                if not hardening.first_layer
                else None,
            }
            for i, shard in enumerate(made.shards)
        ],
        "attn": {
            "most_tokens": max(map(len, held)),
            "smallest_gap": min(closest, default=None),
            "most_by_row_matching_alone": max(recoverable(positions, rho) for positions in held),
            "most_read": max(one.read for one in found if not one.comp),
        },
        "holders": [owner[position] for position in range(made.tokens)],
        "violations": made.violations(rho),
        "cost": cost,
    } | asked


def _on_shares(tokens: int, model: str, shape: Shape, link: Link) -> dict[str, Any]:
    """Return what the two nodes of ``shares`` read, and the cost of a pass."""
    from hiddenlab.defenses.cascade.share_rounds import find_rounds
    from hiddenlab.models.load import load_config, resolve_model

    found = shared_verdicts(tokens)
    config = load_config(resolve_model(model))
    head = int(config.vocab_size) * int(config.hidden_size)
    return {
        "summary": summary(found),
        "evidence": [],
        "verdicts": [one.to_json() for one in found],
        "plan": {"tokens": tokens, "share_nodes": SHARE_NODES, "model": model, "harden": "shares"},
        "cost": shared_cost(find_rounds(model), tokens, shape, head, link),
    }


def _client_nodes(text: str | None) -> list[int]:
    try:
        return [] if text is None else [int(part) for part in text.split(",")]
    except ValueError:
        raise InputError(
            f"--client {text!r} is no list of CompNodes; write for instance --client 0,3"
        ) from None


def make_plan(
    tokens: int,
    alpha: int | None,
    c: int,
    delta: int | None,
    m: int,
    shards: str | None,
    symmetric: bool,
    hardening: Hardening = NOT_HARDENED,
) -> Plan:
    """Make a plan by (c, δ)-sharding, or from shards given by hand; on shares one in which nothing is sharded.

    Raises:
        InputError: the plan does not exist, both were given, or something was given beside shares.
    """
    if hardening.shares is not None:
        if (alpha, c, delta, m, shards, symmetric) != (None, 1, None, 1, None, False):
            raise InputError(
                "--harden shares has two nodes and no plan: leave --alpha, --c, --delta, --m, --shards and "
                "--symmetric out"
            )
        return Plan.clustered(tokens, tokens, alpha=1)
    if sum(given is not None for given in (alpha, delta, shards)) != 1:
        raise InputError(
            "give exactly one of --alpha (number of CompNodes), --delta (distance from one cluster of a node to its "
            "next) and --shards (positions by hand)"
        )
    if shards is None:
        return Plan.clustered(tokens, c, alpha=alpha, delta=delta, m=m, symmetric=symmetric)
    made = Plan.by_hand(parse_shards(shards), m=m, symmetric=symmetric)
    if made.tokens != tokens:
        raise InputError(f"the shards hold {made.tokens} tokens, not {tokens}")
    return made


def parse_shards(text: str) -> list[list[int]]:
    """Parse ``0,1,4;2,3,5`` into the positions of each CompNode.

    Raises:
        InputError: a part is no number.
    """
    try:
        return [
            [int(position) for position in part.split(",") if position.strip()] for part in text.split(";")
        ]
    except ValueError:
        raise InputError(
            f"--shards {text!r} is no list of positions; write for instance --shards '0,1,4;2,3,5'"
        ) from None
