"""Compute the traffic and time of a Cascade plan, by the paper's formulas (section 7.3.1, appendix O) and exactly."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hiddenlab.defenses.cascade.fixed_point import SEED_BYTES
from hiddenlab.defenses.cascade.wide import BYTES
from hiddenlab.errors import InputError
from hiddenlab.sharding import Plan

SHARE_BYTES = 8  # of a number modulo 2^64
STATISTICS = {"paper": 2, "logsumexp": 1}  # numbers per head and row beside the partial output
MASKED = "masked"  # answers are masked sums, whose numbers have a size of their own


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

    @property
    def value_heads(self) -> tuple[int, int]:
        """Query heads of a key/value head, and numbers of a value vector."""
        return self.heads // self.kv_heads, self.head_dim


@dataclass(frozen=True)
class Round:
    """Linear maps of one input, which the nodes compute together.

    Attributes:
        names: of the modules, from the list of layers: ``0.self_attn.q_proj``. width: of the input.
        outs: widths of their outputs.
    """

    names: tuple[str, ...]
    width: int
    outs: tuple[int, ...]

    @property
    def layer(self) -> int:
        """The layer of the first of them, from 0."""
        return int(self.names[0].partition(".")[0])


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
            ``masked`` sends one number more with each query, and d + 1 wide ones in place of an answer (``wide``).
    """
    query, answer, keeps = row_bytes(shape, mode)
    asks = query + answer
    sizes = [len(split) for split in plan.splits]
    left_out = sum(asks * sizes[block.queries] + keeps * sizes[block.keys] for block in plan.left_out)
    return plan.beta * (asks + keeps) * plan.tokens - left_out


def row_bytes(shape: Shape, mode: str) -> tuple[int, int, int]:
    """Return the bytes of a query row, of its answer by one block, and of a key and value row, all heads together.

    Args:
        mode: see ``layer_bytes``.
    """
    h, d, size = shape.heads, shape.head_dim, shape.element_bytes
    keeps = size * 2 * d * shape.kv_heads
    if mode == MASKED:
        return size * h * (d + 1), BYTES * h * (d + 1), keeps
    return size * h * d, size * h * (d + STATISTICS[mode]), keeps


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
    query, answer, keeps = row_bytes(shape, mode)
    by_comp: Counter[int] = Counter()
    by_attn: Counter[Any] = Counter()
    for message in plan.messages():
        by_comp[message.comp] += len(message.queries) * query + len(message.keys) * keeps
        by_attn[message.attn] += len(message.answers) * answer
    return by_comp, by_attn


def shared_bytes(rounds: Sequence[Round], rows: int) -> tuple[int, int]:
    """Return the bytes that the client sends and gets in rounds on shares.

    In each he sends a seed to one node and a share ``[rows, in]`` to the other, and gets ``[rows, out]`` of both.
    """
    up = sum(SEED_BYTES + SHARE_BYTES * rows * one.width for one in rounds)
    return up, sum(2 * SHARE_BYTES * rows * sum(one.outs) for one in rounds)


def shared_cost(rounds: Sequence[Round], rows: int, shape: Shape, head: int, link: Link) -> dict[str, Any]:
    """Return the cost of a pass on shares.

    Floating-point operations: each node does 2·rows·in·out for each linear map, the client 4 rows² H d in each layer's
    attention (scores, and their product with values) and 2·rows·``head`` in the head. What grows with the rows alone
    (norms, softmax, activation functions, the shares) is not counted. A node's products are of integers; by float64
    they take three times as many operations.

    Args:
        rounds: of the model. rows: tokens of the prompt. shape: of the model. head: numbers of the head's matrix.
        link: the client's, through which all bytes pass.
    """
    up, down = shared_bytes(rounds, rows)
    linear = sum(2 * rows * one.width * sum(one.outs) for one in rounds)
    own = shape.layers * 4 * rows**2 * shape.heads * shape.head_dim + 2 * rows * head
    return {
        "layers": shape.layers,
        "rounds": len(rounds),
        "rounds_per_layer": len(rounds) / shape.layers,
        "bytes_up": up,
        "bytes_down": down,
        "bytes_up_per_layer": up / shape.layers,
        "bytes_down_per_layer": down / shape.layers,
        "seconds": len(rounds) * 2 * link.latency + (up + down) / link.bandwidth,
        "node_operations": linear,
        "client_operations": own,
        "client_share": own / (own + linear),
    }
