"""Compute the traffic and time of a Cascade plan, by the paper's formulas (section 7.3.1, appendix O) and exactly."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from hiddenlab.errors import InputError
from hiddenlab.sharding import Plan

STATISTICS = {"paper": 2, "logsumexp": 1}  # numbers per head and row beside the partial output


@dataclass(frozen=True)
class Shape:
    """The properties of a model that determine the traffic.

    Attributes:
        layers, heads, kv_heads, head_dim: of the attention.
        element_bytes: bytes of a number on the wire.
    """

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    element_bytes: int = 2

    @classmethod
    def of(cls, config: Any, element_bytes: int = 2) -> "Shape":
        """Read the shape from a Hugging Face configuration.

        Raises:
            InputError: the model has no attention heads.
        """
        heads = getattr(config, "num_attention_heads", None)
        if not heads:
            raise InputError(f"{getattr(config, 'model_type', 'this model')} has no attention to shard")
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        return cls(config.num_hidden_layers, heads, kv_heads, head_dim, element_bytes)


@dataclass(frozen=True)
class Link:
    """A network link between nodes.

    Attributes:
        bandwidth: bytes per second.
        latency: seconds, one way.
    """

    bandwidth: float
    latency: float

    def __post_init__(self) -> None:
        if not self.bandwidth > 0 or not self.latency >= 0:
            raise InputError("a link needs a bandwidth above 0 and a latency of at least 0")


def layer_bytes(plan: Plan, shape: Shape, mode: str = "paper") -> int:
    """Return the bytes that all nodes send in one layer: βF(2dH + 2dH_KV + sH)N (Equation 1), less blocks left out.

    It is a sum over blocks (j, k): queries and answers of ``S_j``, keys and values of ``S_k``. Generation keeps the
    keys of blocks that are left out, so that its pass over the prompt sends more.

    Args:
        plan, shape: of the prompt and the model.
        mode: ``paper`` sends row maximum and sum (s = 2) beside each partial output, ``logsumexp`` one number (s = 1).
    """
    h, kv, d = shape.heads, shape.kv_heads, shape.head_dim
    asks, keeps = 2 * d * h + STATISTICS[mode] * h, 2 * d * kv
    sizes = [len(split) for split in plan.splits]
    left_out = sum(asks * sizes[block.queries] + keeps * sizes[block.keys] for block in plan.left_out)
    return shape.element_bytes * (plan.beta * (asks + keeps) * plan.tokens - left_out)


def layer_seconds(plan: Plan, shape: Shape, link: Link, mode: str = "paper") -> float:
    """Return the seconds of one layer's traffic, where nodes send in parallel and wait for each other (Equation 2).

    An exact count replaces the formula's maxima, which are for β² nodes; without ``symmetric`` and blocks left out both
    agree. Nodes that wait only for what they need (a causal plan) take at most as long.
    """
    by_comp, by_attn = sent(plan, shape, mode)
    slowest = max(by_comp.values(), default=0) + max(by_attn.values(), default=0)
    return 2 * link.latency + slowest / link.bandwidth


def extra_operations(plan: Plan, shape: Shape) -> int:
    """Return the operations of one layer that the plain model does not do (Hidden No More, appendix N).

    They are HNd to merge partial outputs, a multiplication for each number of a head's output, and one for each
    attention score, to sum exponentials within its block: H Σ |S_j| |S_k|. The paper gives their order, HN(d + N).
    """
    scores = sum(
        len(plan.asked(block)) * len(plan.splits[block.keys])
        for node in plan.attn_nodes
        for block in plan.blocks(node)
    )
    return shape.heads * (plan.tokens * shape.head_dim + scores)


def rounds(plan: Plan) -> int:
    """Return the number of messages of one layer: both directions of every pair that talks.

    At most 2αβ² (appendix O).
    """
    return sum(1 + bool(message.answers) for message in plan.messages())


def sent(plan: Plan, shape: Shape, mode: str = "paper") -> tuple[Counter[int], Counter[Any]]:
    """Return the bytes that each CompNode and each AttnNode sends in one layer, counted message by message."""
    size, d = shape.element_bytes, shape.head_dim
    by_comp: Counter[int] = Counter()
    by_attn: Counter[Any] = Counter()
    for message in plan.messages():
        queries, keys = len(message.queries) * shape.heads, 2 * len(message.keys) * shape.kv_heads
        by_comp[message.comp] += size * d * (queries + keys)
        by_attn[message.attn] += size * len(message.answers) * shape.heads * (d + STATISTICS[mode])
    return by_comp, by_attn
