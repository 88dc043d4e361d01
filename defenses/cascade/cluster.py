"""Run Cascade on a Ray cluster: Ray places, keeps and calls the nodes, and tensors go from node to node.

Only this file, ``object_carrier``, ``ray_connection``, ``ray_shares``, ``serve`` and ``eval.parallel`` import Ray.
"""

import math
import secrets
import threading
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import psutil
import ray
import torch
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from torch import Tensor

from hiddenlab.defenses.cascade import secured
from hiddenlab.defenses.cascade.backend import ModelFacts, NodeCascade, Settings
from hiddenlab.defenses.cascade.cost import Link
from hiddenlab.defenses.cascade.faults import Restarts, Watch, stalled
from hiddenlab.defenses.cascade.hardening import WHOLE, Section
from hiddenlab.defenses.cascade.masked_sums import SumSecret
from hiddenlab.defenses.cascade.membership import tensor_ports
from hiddenlab.defenses.cascade.node_state import GIVEN_UP, NodeError, attn_name, comp_name, remember
from hiddenlab.defenses.cascade.node_views import Seen
from hiddenlab.defenses.cascade.object_carrier import ObjectCarrier
from hiddenlab.defenses.cascade.passes import Batch
from hiddenlab.defenses.cascade.ray_connection import FEWEST_CPUS, connect, free_resources, start_up
from hiddenlab.defenses.cascade.remote import RemoteAttn, RemoteComp
from hiddenlab.defenses.cascade.secret_maps import Secret
from hiddenlab.defenses.cascade.secured import Tls
from hiddenlab.defenses.cascade.wire import LOCAL, Endpoint
from hiddenlab.errors import InputError
from hiddenlab.models.load import resolve_model
from hiddenlab.models.same_checkpoint import check_same, checkpoint_digest
from hiddenlab.sharding import AttnNode, Plan
from hiddenlab.types import Progress, silent

TRANSPORTS = ("tcp", "objects")
SPARE = 16  # calls that a node accepts beside its running requests
PING_SECONDS = 3.0  # limit for answers to a question to all nodes; a slower answer does not mean a fault
POLL_SECONDS = 5.0  # longest time between two checks of the nodes while a pass runs
STARTING = 4  # nodes started at once


class _Comp(RemoteComp):
    """A CompNode as a Ray actor."""

    def __init__(self, index: int, *args: Any, transport: str, threads: int, **options: Any) -> None:
        torch.set_num_threads(threads)
        options["endpoint"] = _endpoint(options.pop("loopback"), options.pop("tls"))
        super().__init__(index, *args, **options)
        self._checkpoint = checkpoint_digest(resolve_model(self.facts.name))
        if transport == "objects":
            self.carrier = ObjectCarrier(index, self.mailbox.aborted)

    def start(self) -> tuple[ModelFacts, str]:
        return self.facts, self._checkpoint

    def run(self, batch: Batch, inputs: Tensor) -> Tensor:
        try:
            return super().run(batch, inputs)
        finally:
            if isinstance(self.carrier, ObjectCarrier):
                self.carrier.forget(batch.name)

    def meet(self, addresses: Mapping[AttnNode, Any], handles: Mapping[AttnNode, Any]) -> None:
        """Connect to AttnNodes, by addresses over the wire or by Ray's handles."""
        if isinstance(self.carrier, ObjectCarrier):
            self.carrier.attns.update(handles)
        else:
            self.connect({attn_name(node): address for node, address in addresses.items()})

    def memory(self) -> int:
        return psutil.Process().memory_info().rss


class _Attn(RemoteAttn):
    """An AttnNode as a Ray actor."""

    def __init__(self, *args: Any, threads: int, **options: Any) -> None:
        torch.set_num_threads(threads)
        options["endpoint"] = _endpoint(options.pop("loopback"), options.pop("tls"))
        super().__init__(*args, **options)

    def start(self) -> tuple[str, int]:
        return self.hub.address

    def abort(self, batch: str) -> None:
        self.host.abort(batch)

    def close(self, request: str) -> None:
        self.host.close(request)

    def waiting(self, batch: str) -> dict[str, Any] | None:
        return self.host.waiting(batch)

    def memory(self) -> int:
        return psutil.Process().memory_info().rss


def _endpoint(loopback: bool, tls: bool) -> Endpoint:
    """Return where a node of this machine listens: on loopback in clear, else at the machine's address in Ray."""
    if loopback:
        return LOCAL
    ports, host = tensor_ports(), ray.util.get_node_ip_address()
    return Endpoint(host, ports, Tls.of_environment() if tls else None)


class RayCascade(NodeCascade):
    """A model run by Ray actors: α CompNodes and the AttnNodes of β = mα key shards.

    Args:
        model: name of the model.
        alpha, m, symmetric: as in ``Plan``; plans of requests must fit.
        settings: how the nodes work.
        section: of the model, which the CompNodes run.
        secret: see ``CompHost``; AttnNodes are not given it. masks: see ``WireCascade``; CompNodes are not given them.
        address: of a running cluster (``auto`` finds it); None starts one here, and stops it in the end.
        transport: ``tcp`` from node to node, or ``objects``, the paper's form.
        timeout: seconds without any progress after which a node counts as stalled; a slow one is waited for.
        restarts: how many lost nodes are replaced within an hour.
        threads: of torch in each node.
        cpus, gpus: that Ray reserves for each node (only CompNodes take gpus).
        dtype, device: of the CompNodes.
        link: simulate a network.
        concurrent: requests at once.
        strategy: of Ray's placement group; ``STRICT_SPREAD`` puts no two nodes on one machine.
        loopback: nodes listen on this machine alone; None does so in a cluster that is started here.
        tls: refuse a cluster of several machines that does not encrypt (``RAY_USE_TLS``).
        progress: where the start is reported.

    Raises:
        InputError: the cluster cannot be reached or has too little for all nodes, or the model is unknown.
    """

    def __init__(
        self,
        model: str,
        alpha: int,
        *,
        m: int = 1,
        symmetric: bool = False,
        settings: Settings | None = None,
        section: Section = WHOLE,
        secret: Secret | None = None,
        masks: SumSecret | None = None,
        address: str | None = None,
        transport: str = "tcp",
        timeout: float = 60.0,
        restarts: int = 0,
        threads: int = 1,
        cpus: float = 1.0,
        gpus: float = 0.0,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        link: Link | None = None,
        concurrent: int = 16,
        strategy: str = "SPREAD",
        loopback: bool | None = None,
        tls: bool = True,
        progress: Progress = silent,
    ) -> None:
        if transport not in TRANSPORTS:
            raise InputError(f"unknown transport {transport!r}; known are {', '.join(TRANSPORTS)}")
        if alpha < 1 or m < 1 or not 0 < timeout < math.inf or restarts < 0 or threads < 1:
            raise InputError("alpha, m and threads must be at least 1, timeout above 0, restarts at least 0")
        if not 0 <= cpus < math.inf or not 0 <= gpus < math.inf:
            raise InputError("cpus and gpus must be at least 0")
        cpus = max(cpus, FEWEST_CPUS)
        if transport == "objects" and link is not None:
            raise InputError("a simulated link needs the transport tcp; Ray's objects take Ray's own way")
        self.settings, self.timeout, self.alpha = settings or Settings(), timeout, alpha
        super().__init__(record=self.settings.record)
        self._concurrent = concurrent
        self.restarts, self._times_replaced = Restarts(restarts), dict[str, int]()
        self._watch, self._watching = Watch(timeout), threading.Lock()
        self._questions: dict[str, Any] = {}
        self._looked = time.monotonic()
        self._given_up: dict[str, None] = {}
        shape = Plan.clustered(alpha, 1, alpha=alpha, m=m, symmetric=symmetric)
        nodes = shape.attn_nodes
        self._own = connect(address, alpha + len(nodes), (alpha + len(nodes)) * cpus, alpha * gpus, tls)
        self._lock = threading.Lock()
        self._group: Any = None
        self._actors: dict[str, Any] = {}
        try:
            bundles = [{"CPU": cpus} | ({"GPU": gpus} if gpus else {})] * alpha + [{"CPU": cpus}] * len(nodes)
            self._group = placement_group(bundles, strategy=strategy)
            if not self._group.wait(timeout_seconds=max(timeout, 60.0)):
                raise InputError(
                    f"the cluster could not place {len(bundles)} nodes ({strategy}); free resources: "
                    f"{free_resources('CPU'):g} CPUs, {free_resources('GPU'):g} GPUs"
                )
            key = secrets.token_bytes(32)
            # A cluster that is started here runs on this machine alone, so its nodes listen on loopback.
            common: dict[str, Any] = {
                "link": link,
                "threads": threads,
                "loopback": self._own if loopback is None else loopback,
                "tls": secured.enabled(),
            }
            self._make: dict[str, partial[Any]] = {}
            for i in range(alpha):
                options = self._options(i, threads, cpus, gpus)
                self._make[comp_name(i)] = partial(
                    ray.remote(_Comp).options(**options).remote, i, model, self.settings, key,
                    transport=transport, section=section, secret=secret, dtype=dtype, device=device, **common,
                )  # fmt: skip
            for place, node in enumerate(nodes):
                options = self._options(alpha + place, threads, cpus, 0.0)
                own = None if masks is None else masks.keys_of(node, shape)
                self._make[attn_name(node)] = partial(
                    ray.remote(_Attn).options(**options).remote, node, self.settings, key, masks=own, **common
                )
            self._nodes = {attn_name(node): node for node in nodes}
            self.started = alpha, frozenset(self._nodes)
            answers: dict[str, Any] = {}
            names = list(self._make)
            for begin in range(0, len(names), STARTING):
                # Starting all at once is no faster: they share the machine's processors while they import.
                wave = names[begin : begin + STARTING]
                self._actors |= {name: self._make[name]() for name in wave}
                calls = {name: self._actors[name].start.remote() for name in wave}
                answers |= {name: start_up(name, call) for name, call in calls.items()}
                progress("starting nodes", len(answers), len(names))
            comps = {name: answer for name, answer in answers.items() if name not in self._nodes}
            self.facts, self._checkpoint = comps[comp_name(0)]
            client = {} if section == WHOLE else {"the client": checkpoint_digest(resolve_model(model))}
            check_same(model, client | {name: digest for name, (_, digest) in comps.items()})
            self._addresses = {name: answers[name] for name in self._nodes}
            ray.get([self._meet(comp_name(i), list(self._nodes)) for i in range(alpha)])
        except BaseException:
            self.shutdown()
            raise

    def _options(self, place: int, threads: int, cpus: float, gpus: float) -> dict[str, Any]:
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=place)
        return {
            "num_cpus": cpus, "num_gpus": gpus, "max_concurrency": self._concurrent + SPARE,
            "scheduling_strategy": strategy,
            "runtime_env": {"env_vars": {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}},
        }  # fmt: skip

    def _meet(self, comp: str, attns: list[str]) -> Any:
        addresses = {self._nodes[name]: self._addresses[name] for name in attns}
        handles = {self._nodes[name]: self._actors[name] for name in attns}
        return self._actors[comp].meet.remote(addresses, handles)

    def _run(self, batch: Batch, shares: Mapping[int, Tensor]) -> dict[int, Tensor]:
        replaced, started = dict(self._times_replaced), time.monotonic()
        calls = {self._actors[comp_name(i)].run.remote(batch, share): i for i, share in shares.items()}
        waiting, outputs = list(calls), {}
        while waiting:
            done, waiting = ray.wait(waiting, timeout=self._poll)
            try:
                for call in done:
                    outputs[calls[call]] = ray.get(call)
                if not done and (lost := self._stalled(batch, started)) is not None:
                    raise lost
            except Exception as error:
                if batch.name in self._given_up:
                    raise NodeError(GIVEN_UP) from None  # the driver gave it up, so no node is at fault
                fault = self._diagnose(batch, _cause(error, calls, done))
                fault.replaced = replaced.get(fault.node or "", 0)
                self._tell(batch.name)
                # CompNodes that only waited return now; their work must not outlive the batch.
                if waiting:
                    ray.wait(waiting, num_returns=len(waiting), timeout=PING_SECONDS)
                raise fault from None
        return outputs

    @property
    def _poll(self) -> float:
        return min(POLL_SECONDS, self.timeout / 3)

    def _stalled(self, batch: Batch, started: float) -> NodeError | None:
        """Find the node that has stalled and keeps a batch waiting; None while the batch makes progress."""
        silent, still = self._look(started)
        silent = [name for name in silent if name in self._involved(batch)]
        if not silent and not still:
            return None
        comps = {name: "layer" for name in self._actors if name not in self._nodes}
        layers = {k: v for k, v in self._ask(comps, batch.name).items() if isinstance(v, int)}
        where = f"in layer {min(layers.values())}" if layers else ""
        if silent:
            return NodeError(f"{silent[0]} stalled {where}", silent[0])
        waiting = self._ask(dict.fromkeys(self._nodes, "waiting"), batch.name)
        name = stalled({k: v for k, v in waiting.items() if not isinstance(v, NodeError)}, layers)
        if name is not None:
            return NodeError(f"{name} stalled {where}", name)
        return NodeError(f"no node got on for {self.timeout:g} s {where}")

    def _involved(self, batch: Batch) -> set[str]:
        """Return the names of the nodes that a batch needs; a dead one of the others is not its fault."""
        shards = [shards for work in batch.passes for shards in enumerate(work.plan.shards)]
        comps = {comp_name(i) for i, shard in shards if shard}
        return comps | {attn_name(message.attn) for work in batch.passes for message in work.messages()}

    def _look(self, started: float) -> tuple[list[str], bool]:
        """Return the silent nodes, and whether all stand still.

        Passes that ask soon after each other share one look.
        """
        with self._watching:
            if time.monotonic() - self._looked >= self._poll / 2:
                for name, actor in list(self._actors.items()):
                    if name not in self._questions:
                        self._questions[name] = actor.progress.remote()
                        self._watch.ask(name)
                questions = {call: name for name, call in self._questions.items()}
                ready, _ = ray.wait(list(questions), num_returns=len(questions), timeout=self._poll / 2)
                for call in ready:
                    del self._questions[questions[call]]
                    try:
                        ticks = ray.get(call)
                    except ray.exceptions.RayError:
                        ticks = -1  # dead; the requests that need it report it
                    self._watch.answered(questions[call], ticks)
                self._looked = time.monotonic()
            return self._watch.silent(), self._watch.still(started)

    def _ask(self, methods: Mapping[str, str], *args: Any) -> dict[str, Any]:
        """Call a method of each of several nodes; dead or slow ones answer with a NodeError."""
        calls = {name: getattr(self._actors[name], method).remote(*args) for name, method in methods.items()}
        ray.wait(list(calls.values()), num_returns=len(calls), timeout=PING_SECONDS)
        answers: dict[str, Any] = {}
        for name, call in calls.items():
            try:
                answers[name] = ray.get(call, timeout=0)
            except ray.exceptions.GetTimeoutError:
                answers[name] = NodeError(f"{name} did not answer within {PING_SECONDS:g} s", name)
            except ray.exceptions.RayActorError:
                answers[name] = _Died(f"{name} died", name)
        return answers

    def _diagnose(self, batch: Batch, error: NodeError) -> NodeError:
        """Name the node at fault, its shard and the layer; a node that is slow or waits is not at fault."""
        layer = (
            f"in layer {text.split()[0].rstrip(':')}" if (text := str(error).partition("layer ")[2]) else ""
        )
        states = self._ask(dict.fromkeys(self._actors, "progress"))
        needed = self._involved(batch)
        died = [state for name, state in states.items() if name in needed and isinstance(state, _Died)]
        # A dead node may have caused others to die; the error names the first one that was missed.
        named: NodeError | None = next(
            (fault for fault in died if fault.node == error.node), died[0] if died else None
        )
        if named is None:
            what = next((word for word in ("died", "stalled") if f"{error.node} {word}" in str(error)), None)
            if error.node is None or what is None:
                return error
            named = NodeError(f"{error.node} {what}", error.node)
        name = named.node or ""
        if len(batch.passes) == 1:
            plan = batch.passes[0].plan
            node = self._nodes.get(name)
            held = plan.shards[int(name.split()[-1])] if node is None else plan.held_by(node)
            holds = f"it holds tokens {_short(held)}"
        else:
            holds = f"it holds tokens of {len(batch.passes)} requests"
        within = f" (no progress for {self.timeout:g} s)" if "stalled" in str(named) else ""
        return NodeError(f"{named} {layer}{within}; {holds}".replace("  ", " "), name)

    def recover(self, error: NodeError) -> bool:
        """Replace a lost node, once for all requests that lost it."""
        name = error.node
        if name is None or name not in self._actors:
            return False
        with self._lock:
            if error.forgot:
                # It was replaced already, so the request only has to run again.
                return self._times_replaced.get(name, 0) > 0
            if self._times_replaced.get(name, 0) > error.replaced:
                return True  # another request has done it
            if not self.restarts.take():
                return False
            ray.kill(self._actors[name], no_restart=True)
            self._actors[name] = self._make[name]()
            answer = start_up(name, self._actors[name].start.remote())
            if name in self._nodes:
                self._addresses[name] = answer
                ray.get([self._meet(comp_name(i), [name]) for i in range(self.alpha)])
            else:
                check_same(self.facts.name, {"the other nodes": self._checkpoint, name: answer[1]})
                ray.get(self._meet(name, list(self._nodes)))
            self._times_replaced[name] = self._times_replaced.get(name, 0) + 1
            with self._watching:
                self._questions.pop(name, None)
                self._watch.forget(name)
            return True

    def _tell(self, batch: str) -> None:
        for actor in self._actors.values():
            actor.abort.remote(batch)

    def _abort(self, batch: str) -> None:
        remember(self._given_up, batch)
        self._tell(batch)

    def _forget(self, request: str) -> None:
        for name in self._nodes:
            self._actors[name].close.remote(request)

    def counters(self) -> dict[str, dict[str, Any]]:
        return self._ask(dict.fromkeys(self._actors, "counters"))

    def memory(self) -> dict[str, int]:
        """Return the resident bytes of each node's process."""
        return self._ask(dict.fromkeys(self._actors, "memory"))

    def seen(self) -> list[Seen]:
        return [view for views in self._ask(dict.fromkeys(self._actors, "seen")).values() for view in views]

    def healthy(self) -> dict[str, str]:
        """Return ``ok`` or the fault of each node."""
        states = self._ask(dict.fromkeys(self._actors, "memory"))
        return {name: str(state) if isinstance(state, NodeError) else "ok" for name, state in states.items()}

    def shutdown(self) -> None:
        for actor in self._actors.values():
            ray.kill(actor, no_restart=True)
        self._actors = {}
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None
        if self._own and ray.is_initialized():
            ray.shutdown()


class _Died(NodeError):
    """A node whose process is gone."""


def _cause(error: Exception, calls: Mapping[Any, int], done: list[Any]) -> NodeError:
    """Return the error of a CompNode's failed call as a NodeError."""
    comp = comp_name(calls[done[0]]) if done else None
    if isinstance(error, ray.exceptions.RayTaskError):
        cause = error.cause
        if isinstance(cause, NodeError):
            return cause
        return NodeError(f"{comp} failed: {cause}", comp)
    if isinstance(error, ray.exceptions.RayActorError):
        return NodeError(f"{comp} died", comp)
    return error if isinstance(error, NodeError) else NodeError(f"{comp} failed: {error}", comp)


def _short(positions: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, positions[:6]))
    return shown + (f" … ({len(positions)} in all)" if len(positions) > 6 else "")
