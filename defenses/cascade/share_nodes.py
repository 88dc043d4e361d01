"""Be one of the two nodes that compute a model's linear maps on shares, in this process or over TCP."""

import secrets
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Int
from torch import Tensor, nn

from hiddenlab.defenses.cascade.client_layers import CLIENT
from hiddenlab.defenses.cascade.cost import Link, Round
from hiddenlab.defenses.cascade.fixed_point import SEED_BYTES, Matrix, mask_of
from hiddenlab.defenses.cascade.node_state import NodeError
from hiddenlab.defenses.cascade.share_rounds import rounds_of, weight_of
from hiddenlab.defenses.cascade.wire import Hub, WireError
from hiddenlab.models.attention import EAGER
from hiddenlab.models.checkpoint import decoder_layers
from hiddenlab.models.device import parse_device
from hiddenlab.models.load import empty_model, load_config, load_module, resolve_model


def share_name(index: int) -> str:
    """Return the name of a share node in messages, errors and counters."""
    return f"ShareNode {index}"


@dataclass
class Counters:
    """What a share node did.

    Attributes:
        compute: seconds in products. bytes_in, bytes_out: of numbers and seeds. rounds: answered.
    """

    compute: float = 0.0
    bytes_in: int = 0
    bytes_out: int = 0
    rounds: int = 0


def matrices_of(layers: nn.Module, rounds: Sequence[Round], device: str = "cpu") -> list[Matrix]:
    """Return the matrix of each round: the weights of its maps, one below the other.

    Args:
        layers: of the model.

    Raises:
        InputError: a weight is not finite.
    """
    made = []
    for one in rounds:
        weights = [weight_of(layers.get_submodule(name)) for name in one.names]
        made.append(Matrix.of(torch.cat([weight.to(parse_device(device)) for weight in weights])))
    return made


def load_matrices(model: str, dtype: torch.dtype, device: str = "cpu") -> tuple[list[Round], list[Matrix]]:
    """Load what a share node needs of a model.

    Raises:
        InputError: the model or device is unknown, or the model cannot be computed on shares.
    """
    ref = resolve_model(model)
    config = load_config(ref)
    rounds = rounds_of(empty_model(ref, config), model)
    module = load_module(
        ref, config, head=False, dtype=dtype, device=torch.device("cpu"), attention=EAGER, final_norm=False
    )
    return list(rounds), matrices_of(decoder_layers(module), rounds, device)


class ShareNode:
    """A node that multiplies shares with the model's weights.

    Args:
        index: 0 gets seeds and makes its shares of them, 1 gets shares. rounds, matrices: see ``load_matrices``.
    """

    def __init__(self, index: int, rounds: Sequence[Round], matrices: Sequence[Matrix]) -> None:
        self.name, self.counters = share_name(index), Counters()
        self._rounds, self._matrices = rounds, matrices

    def products(self, number: int, rows: int, given: Tensor) -> Int[Tensor, "rows o"]:
        """Return the products of a share with the matrix of a round.

        Args:
            number: of the round. given: the share ``[rows, in]``, of 64-bit integers, or the seed that it is made of,
                32 bytes.

        Raises:
            NodeError: there is no such round, or what is given is neither.
        """
        if not 0 <= number < len(self._rounds):
            raise NodeError(f"{self.name} has no round {number}", self.name)
        width, started = self._rounds[number].width, time.perf_counter()
        shapes = {torch.uint8: (SEED_BYTES,), torch.int64: (rows, width)}
        if tuple(given.shape) != shapes.get(given.dtype):
            raise NodeError(f"{self.name} got a share of another shape or type than the round's", self.name)
        with torch.inference_mode():
            share = mask_of(given, rows, width) if given.dtype == torch.uint8 else given
            matrix = self._matrices[number]
            output = matrix.times(share.to(matrix.weights.device)).cpu()
        did = self.counters
        did.compute += time.perf_counter() - started
        did.bytes_in, did.bytes_out = did.bytes_in + given.nbytes, did.bytes_out + output.nbytes
        did.rounds += 1
        return output


@runtime_checkable
class Peer(Protocol):
    """A share node as its client reaches it."""

    name: str

    def ask(self, number: int, rows: int, given: Tensor) -> "Future[Tensor]":
        """Ask for products (see ``ShareNode.products``); do not wait for them."""
        ...

    def counters(self) -> dict[str, Any]: ...

    def healthy(self) -> str:
        """Return ``ok`` or the fault."""
        ...

    def close(self) -> None: ...


class LocalPeer:
    """A share node that is a thread of this process."""

    def __init__(self, node: ShareNode) -> None:
        self.name, self._node = node.name, node
        self._thread = ThreadPoolExecutor(1, node.name)

    def ask(self, number: int, rows: int, given: Tensor) -> "Future[Tensor]":
        return self._thread.submit(self._node.products, number, rows, given)

    def counters(self) -> dict[str, Any]:
        return asdict(self._node.counters)

    def healthy(self) -> str:
        return "ok"

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


class WirePeer:
    """A share node behind TCP, with both ends in this process: to count bytes, and to simulate a network.

    Args:
        link: of this node and its client alone; the other node has one of its own.
    """

    def __init__(self, node: ShareNode, link: Link | None = None) -> None:
        self.name, self._node = node.name, node
        self._lock, self._asked = threading.Lock(), 0
        self._waiting: dict[int, Future[Tensor]] = {}
        key = secrets.token_bytes(32)
        self._there = Hub(node.name, key, self._answer, lambda peer: None, link=link)
        self._here = Hub(CLIENT, key, self._take, self._lose, link=link)
        self._here.connect({node.name: self._there.address})

    def ask(self, number: int, rows: int, given: Tensor) -> "Future[Tensor]":
        answer: Future[Tensor] = Future()
        with self._lock:
            self._asked += 1
            asked = self._asked
            self._waiting[asked] = answer
        try:
            self._here.send(self.name, {"asked": asked, "round": number, "rows": rows}, [given])
        except WireError as error:
            self._fail(asked, f"{self.name} is lost: {error}")
        return answer

    def counters(self) -> dict[str, Any]:
        sent = (self._here.sent, self._there.sent)
        return {
            **asdict(self._node.counters),
            "sent_payload": sum(one.payload for one in sent),
            "sent_framing": sum(one.framing for one in sent),
        }

    def healthy(self) -> str:
        return "ok"

    def close(self) -> None:
        self._here.close()
        self._there.close()

    def _answer(self, sender: str, head: dict[str, Any], tensors: list[Tensor]) -> None:
        answer: dict[str, Any] = {"asked": head["asked"], "failed": None}
        products: list[Tensor] = []
        try:
            products = [self._node.products(head["round"], head["rows"], *tensors)]
        except NodeError as error:
            answer["failed"] = str(error)
        with suppress(WireError):  # the client is gone
            self._there.send(sender, answer, products)

    def _take(self, sender: str, head: dict[str, Any], tensors: list[Tensor]) -> None:
        if head["failed"] is not None:
            self._fail(head["asked"], head["failed"])
            return
        with self._lock:
            answer = self._waiting.pop(head["asked"], None)
        if answer is not None:
            answer.set_result(tensors[0])

    def _lose(self, peer: str) -> None:
        for asked in list(self._waiting):
            self._fail(asked, f"{self.name} died")

    def _fail(self, asked: int, why: str) -> None:
        with self._lock:
            answer = self._waiting.pop(asked, None)
        if answer is not None:
            answer.set_exception(NodeError(why, self.name))
