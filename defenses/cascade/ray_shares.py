"""Run the two share nodes as actors of a Ray cluster; shares and answers go by Ray's calls."""

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any

import ray
import torch
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from torch import Tensor

from hiddenlab.defenses.cascade.hardening import SHARE_NODES
from hiddenlab.defenses.cascade.ray_connection import FEWEST_CPUS, connect, start_up
from hiddenlab.defenses.cascade.share_nodes import ShareNode, load_matrices, share_name
from hiddenlab.errors import InputError
from hiddenlab.models.load import resolve_model
from hiddenlab.models.same_checkpoint import check_same, checkpoint_digest
from hiddenlab.types import Progress, silent

PLACING = 60.0  # seconds for which the cluster may look for room
PING_SECONDS = 3.0


class _Node(ShareNode):
    """A share node as a Ray actor, which loads the weights itself."""

    def __init__(self, index: int, model: str, dtype: torch.dtype, device: str, threads: int) -> None:
        torch.set_num_threads(threads)
        super().__init__(index, *load_matrices(model, dtype, device))
        self._checkpoint = checkpoint_digest(resolve_model(model))

    def start(self) -> str:
        return self._checkpoint

    def counted(self) -> dict[str, Any]:
        return asdict(self.counters)


class _Room:
    """What the nodes of one start hold of the cluster, given back once."""

    def __init__(self, group: Any, own: bool) -> None:
        self._group, self._own = group, own

    def leave(self) -> None:
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None
            if self._own and ray.is_initialized():
                ray.shutdown()


class RayPeer:
    """A share node behind Ray's calls.

    Args:
        room: given back with the last of the peers.
    """

    def __init__(self, index: int, actor: Any, room: _Room | None) -> None:
        self.name, self._actor, self._room = share_name(index), actor, room

    def ask(self, number: int, rows: int, given: Tensor) -> "Future[Tensor]":
        return self._actor.products.remote(number, rows, given).future()  # type: ignore[no-any-return]

    def counters(self) -> dict[str, Any]:
        counted: Mapping[str, Any] = ray.get(self._actor.counted.remote())
        return dict(counted)

    def healthy(self) -> str:
        try:
            ray.get(self._actor.start.remote(), timeout=PING_SECONDS)
        except ray.exceptions.GetTimeoutError:
            return f"{self.name} did not answer within {PING_SECONDS:g} s"
        except ray.exceptions.RayActorError:
            return f"{self.name} died"
        return "ok"

    def close(self) -> None:
        ray.kill(self._actor, no_restart=True)
        if self._room is not None:
            self._room.leave()


def start_peers(
    model: str,
    *,
    dtype: torch.dtype,
    device: str = "cpu",
    address: str | None = None,
    tls: bool = True,
    threads: int = 1,
    cpus: float = 1.0,
    gpus: float = 0.0,
    strategy: str = "SPREAD",
    progress: Progress = silent,
) -> list[RayPeer]:
    """Start the two nodes; see ``RayCascade`` for the options.

    Raises:
        InputError: the cluster cannot be reached or has too little, or a node cannot load the model or has another.
        NodeError: a node died at once.
    """
    cpus = max(cpus, FEWEST_CPUS)
    own = connect(address, SHARE_NODES, SHARE_NODES * cpus, SHARE_NODES * gpus, tls)
    group = placement_group(
        [{"CPU": cpus} | ({"GPU": gpus} if gpus else {})] * SHARE_NODES, strategy=strategy
    )
    room = _Room(group, own)
    try:
        if not group.wait(timeout_seconds=PLACING):
            raise InputError(f"the cluster could not place {SHARE_NODES} nodes ({strategy})")
        actors: list[Any] = [
            ray.remote(_Node)
            .options(
                num_cpus=cpus, num_gpus=gpus, runtime_env={"env_vars": {"OMP_NUM_THREADS": str(threads)}},
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=i),
            )
            .remote(i, model, dtype, device, threads)
            for i in range(SHARE_NODES)
        ]  # fmt: skip
        digests = {"the client": checkpoint_digest(resolve_model(model))}
        for i, actor in enumerate(actors):
            digests[share_name(i)] = start_up(share_name(i), actor.start.remote())
            progress("starting nodes", i + 1, SHARE_NODES)
        check_same(model, digests)
    except BaseException:
        room.leave()
        raise
    return [RayPeer(i, actor, room if i == SHARE_NODES - 1 else None) for i, actor in enumerate(actors)]
