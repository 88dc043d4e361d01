"""Keep worker processes over Ray: start them, share tasks among them, and go on when one is lost."""

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from hiddenlab.errors import HiddenlabError, InputError, WorkersLostError
from hiddenlab.text import count_of, first_line
from hiddenlab.types import Progress, silent

POLL_SECONDS = 0.5  # between two looks at what workers say
START_SECONDS = 300.0  # longest time that workers may take to start
# What workers take over from this process: a record of somebody else must not make them contact the hub.
PASSED_ON = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
PASSED_ON_HERE = (*PASSED_ON, "HIDDENLAB_CACHE", "XDG_CACHE_HOME")
STARTING = "starting workers"

Task = TypeVar("Task")
# Runs in a worker: takes the worker's state, which lasts as long as the worker, its progress, and the arguments.
Function = Callable[..., Any]


class _Actor:
    """A worker's process."""

    def __init__(self, threads: int, folder: str) -> None:
        if Path(folder).is_dir():  # relative paths mean the same as where the command runs
            os.chdir(folder)
        self.threads, self.state = threads, dict[str, Any]()
        self.lines, self.now = list[str](), ("", 0, 0)

    def start(self) -> dict[str, Any]:
        """Return what this process is."""
        import ray
        import torch

        import hiddenlab
        from hiddenlab.utils.environment import describe_environment

        versions = {"hiddenlab": hiddenlab.__version__, "torch": torch.__version__}
        torch.set_num_threads(self.threads)
        place = {"host": ray.util.get_node_ip_address(), "pid": os.getpid()}
        return {"versions": versions, "hardware": describe_environment()["hardware"], **place}

    def call(self, function: Function, *args: Any) -> Any:
        """Run a function with this worker's state."""
        import torch

        torch.set_num_threads(self.threads)  # of the thread that runs it
        return function(self.state, self._note, *args)

    def said(self) -> tuple[list[str], tuple[str, int, int]]:
        """Return the lines that were said since the last call, and how far the present work is."""
        lines, self.lines = self.lines, []
        return lines, self.now

    def _note(self, what: str, done: int, total: int) -> None:
        if not total:
            self.lines.append(what)
        elif done >= 0:  # else it was given up
            self.now = (what, done, total)


@dataclass(eq=False)
class _Worker:
    """A worker as this process sees it. ``question`` is a call of ``said`` that is not answered yet."""

    number: int
    actor: Any
    host: str = "?"
    question: Any = None

    def __str__(self) -> str:
        return f"worker {self.number} on {self.host}"


class Crew:
    """Workers over Ray, on this machine or on a cluster; they start when they are first needed.

    Args:
        address: of a running cluster (``auto`` finds it); None starts Ray here, and stops it in the end.
        count: of workers; None is one for each card of the cluster, or for each machine where there is no card.
        threads: of torch in each worker; None divides the processors.
        device: ``cpu`` takes no card; otherwise each worker has one of its own where there are any.
    """

    def __init__(
        self,
        address: str | None = None,
        count: int | None = None,
        *,
        threads: int | None = None,
        device: str = "auto",
    ) -> None:
        if device.startswith("cuda:"):
            raise InputError(f"each worker has a card of its own; give --device cuda in place of {device}")
        self.address, self.count, self.device = address, 1 if address is None and not count else count, device
        self.threads = threads or 1
        self._given_threads = threads
        self._workers: list[_Worker] = []
        self._started = self._leave = False
        self._lines: set[str] = set()
        self.lost: list[str] = []
        self.facts: dict[str, Any] = {}

    def __enter__(self) -> "Crew":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @cached_property
    def _ray(self) -> Any:
        from hiddenlab.defenses.cascade.membership import enter

        enter(self.address, None)  # Ray reads the cluster's token and certificates when it is imported
        try:
            import ray
        except ImportError:
            raise InputError(
                "workers need Ray, which is not installed; pip install 'hiddenlab[ray]'"
            ) from None
        return ray

    @property
    def workers(self) -> int:
        """How many workers there are now."""
        return len(self._workers)

    @property
    def here(self) -> bool:
        """Whether all workers are processes of this machine that this process started."""
        return self.address is None

    def start(self, progress: Progress = silent) -> None:
        """Start the workers, unless they were started already.

        Raises:
            HiddenlabError: Ray is not installed or not reached, there is too little for so many workers, or they run
                other versions of the code.
        """
        if self._started:
            return
        joined = self._ray.is_initialized()  # before anything else that imports Ray
        from hiddenlab.defenses.cascade.ray_connection import connect, free_resources

        wanted = self.count or 1
        own = connect(self.address, wanted, float(wanted), 0.0)
        self._started, self._leave = True, own or not joined
        self._let_ray_print(False)
        cards = 0 if self.device == "cpu" else int(free_resources("GPU"))
        if self.device.startswith("cuda") and not cards:
            raise InputError("no card is free for the workers; give --device cpu or auto")
        if cards and (self.count or 0) > cards:
            raise InputError(
                f"{count_of(self.count, 'worker')} need as many cards, {cards} are free; give --workers {cards} or "
                "--device cpu"
            )
        machines = [float(n["Resources"].get("CPU", 0.0)) for n in self._ray.nodes() if n["Alive"]]
        count = self.count or cards or max(1, len(machines))
        processors = len(os.sched_getaffinity(0)) if own else int(free_resources("CPU"))
        most = processors if own else int(min((n for n in machines if n), default=1.0))
        self.threads = self._given_threads or max(1, min(processors // count, most))
        cpus = 1 if own else min(self.threads, most)
        environment = {
            "OMP_NUM_THREADS": str(self.threads),
            "TOKENIZERS_PARALLELISM": "false",
            **{k: os.environ[k] for k in (PASSED_ON_HERE if own else PASSED_ON) if k in os.environ},
        }
        make = self._ray.remote(concurrency_groups={"aside": 1})(_Actor).options(
            num_cpus=cpus, num_gpus=1 if cards else 0, scheduling_strategy="SPREAD", max_restarts=0,
            runtime_env={"env_vars": environment},
        )  # fmt: skip
        for number in range(1, count + 1):
            self._workers.append(_Worker(number, make.remote(self.threads, os.getcwd())))
        self._await_start(progress)

    def _let_ray_print(self, allowed: bool) -> None:
        """Turn off or on what Ray prints of lost workers: a page on standard output, where a line says the same.

        ``log_to_driver`` does not concern it; Ray has this switch for its debugger.
        """
        self._ray._private.worker._worker_logs_enabled = allowed

    def _await_start(self, progress: Progress) -> None:
        import torch

        import hiddenlab

        ours = {"hiddenlab": hiddenlab.__version__, "torch": torch.__version__}
        count = len(self._workers)
        progress(STARTING, 0, count)
        calls = {worker.actor.start.remote(): worker for worker in self._workers}
        late = dict(calls)
        left = START_SECONDS
        while late and left > 0:
            ready, _ = self._ray.wait(list(late), timeout=POLL_SECONDS)
            left -= 0 if ready else POLL_SECONDS
            for call in ready:
                worker = late.pop(call)
                if (facts := self._answer(call, worker, progress)) is not None:
                    worker.host = facts["host"]
                    if others := {k: v for k, v in facts["versions"].items() if v != ours[k]}:
                        name, version = next(iter(others.items()))
                        raise InputError(
                            f"{worker} runs {name} {version}, and this process {ours[name]}; install the same on both"
                        )
                    self.facts = self.facts or facts
                progress(STARTING, count - len(late), count)
        for worker in late.values():
            self._lose(worker, f"did not start within {START_SECONDS:.0f} s", progress)
        if not self._workers:
            raise self._all_lost()

    def put(self, value: Any) -> Any:
        """Give the workers a value once; the result stands for it as an argument of a call."""
        return self._ray.put(value)

    def first(self, function: Function, *args: Any, progress: Progress = silent) -> Any:
        """Run a function in one worker, in the next one where that is lost, and return the result.

        Raises:
            HiddenlabError: the function's own; or every worker was lost.
        """
        while self._workers:
            worker = self._workers[0]
            call, told = worker.actor.call.remote(function, *args), ("", 0, 0)
            while not self._ray.wait([call], timeout=POLL_SECONDS)[0]:
                told = self._tell(worker, told, progress)
            self._tell(worker, told, progress, ended=True)
            answer = self._answer(call, worker, progress)
            if worker in self._workers:
                return answer
        raise self._all_lost()

    def begin(self, function: Function, *args: Any) -> None:
        """Let all workers but the first begin with a function, whose result they keep; nobody waits for it."""
        for worker in self._workers[1:]:
            worker.actor.call.remote(function, *args)

    def share(
        self,
        function: Function,
        tasks: Sequence[Task],
        *,
        before: tuple[Any, ...] = (),
        progress: Progress = silent,
    ) -> Iterator[tuple[Task, Any]]:
        """Run a function for each task in the next free worker; yield each task with its result when it is ready.

        The task of a worker that is lost runs again in another.

        Args:
            before: a function, with arguments, that each worker runs before its first task.

        Raises:
            HiddenlabError: a function's own; or every worker was lost.
        """
        waiting, running = deque(tasks), dict[Any, tuple[_Worker, Task | None]]()
        idle = [] if before else list(self._workers)
        if before:
            running |= {worker.actor.call.remote(*before): (worker, None) for worker in self._workers}
        while waiting or any(task is not None for _, task in running.values()):
            while waiting and idle:
                worker, task = idle.pop(0), waiting.popleft()
                running[worker.actor.call.remote(function, task)] = (worker, task)
            if not running:
                raise self._all_lost()
            ready, _ = self._ray.wait(list(running), timeout=POLL_SECONDS)
            for worker in self._workers:
                self._tell(worker, ("", 0, 0), progress, lines_only=True)
            for call in ready:
                worker, done = running.pop(call)
                answer = self._answer(call, worker, progress)
                if worker in self._workers:
                    idle.append(worker)
                    if done is not None:
                        yield done, answer
                elif done is not None:
                    waiting.appendleft(done)

    def _answer(self, call: Any, worker: _Worker, progress: Progress) -> Any:
        """Return a call's result; None where the worker is lost, which is then one of the workers no more.

        Raises:
            HiddenlabError: the call failed.
        """
        errors = self._ray.exceptions
        try:
            return self._ray.get(call)
        except errors.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, HiddenlabError):
                raise cause from None
            raise HiddenlabError(f"{worker} failed: {type(cause).__name__}: {first_line(cause)}") from None
        except errors.RayError as error:
            self._lose(worker, _reason(error), progress)
            return None

    def _lose(self, worker: _Worker, why: str, progress: Progress) -> None:
        self._workers.remove(worker)
        self.lost.append(f"{worker} {why}")
        with suppress(Exception):  # it may be unreachable, and still at work
            self._ray.kill(worker.actor)
        if self._workers:
            progress(f"{worker} {why}; the others go on with its work", 0, 0)

    def _all_lost(self) -> WorkersLostError:
        return WorkersLostError(f"every worker was lost: {'; '.join(self.lost)}")

    def _tell(
        self,
        worker: _Worker,
        told: tuple[str, int, int],
        progress: Progress,
        *,
        ended: bool = False,
        lines_only: bool = False,
    ) -> tuple[str, int, int]:
        """Pass on what a worker says, each line once; return how far its work was said to be."""
        if worker.question is None:
            worker.question = worker.actor.said.options(concurrency_group="aside").remote()
        now = told
        if self._ray.wait([worker.question], timeout=2 * POLL_SECONDS if ended else 0)[0]:
            question, worker.question = worker.question, None
            try:
                lines, now = self._ray.get(question)
            except self._ray.exceptions.RayError:
                return told  # its work says what happened
            for line in lines:
                if line not in self._lines:
                    self._lines.add(line)
                    progress(line, 0, 0)
        if lines_only:
            return told
        if told[0] and (ended or now[0] != told[0]) and told[1] < told[2]:
            progress(told[0], told[2], told[2])
        if now[0] and now != told and not ended:
            progress(*now)
        return now

    def close(self) -> None:
        """End the workers, and Ray where it was started or joined for them."""
        for worker in self._workers:
            with suppress(Exception):
                self._ray.kill(worker.actor)
        self._workers = []
        if self._leave:
            self._leave = False
            self._ray.shutdown()
        if self._started:
            self._let_ray_print(True)


def _reason(error: BaseException) -> str:
    """Return why a worker was lost, in a few words: Ray's own text is a page."""
    name = type(error).__name__
    if "OutOfMemory" in name:
        return "was ended for lack of memory"
    if "Unavailable" in name:
        return "cannot be reached"
    text = str(error)
    if "creation task" in text or "RuntimeEnv" in name:
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return f"could not start: {lines[-1]}" if lines else "could not start"
    return "was lost (its process or its machine ended)"
