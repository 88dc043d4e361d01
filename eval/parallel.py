"""Measure the cells of an experiment in several processes or on several machines, over Ray."""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from hiddenlab.errors import HiddenlabError
from hiddenlab.text import first_line

Item = TypeVar("Item")
Outcome = TypeVar("Outcome")


def measure_all(
    measure: Callable[[Item, Path, bool], Outcome],
    items: Sequence[Item],
    home: Path,
    fresh: bool,
    workers: int,
    threads: int | None,
) -> Iterator[Outcome]:
    """Measure items, as many at once as there are workers, and yield each result when it is ready.

    It joins a running Ray where the environment names one (``RAY_ADDRESS``), which then must see ``home`` under the
    same path; else it starts one on this machine and stops it again.

    Args:
        measure: takes an item, the folder of results, and whether to measure anew.
        items: what to measure.
        home: folder of results.
        fresh: measure anew.
        workers: processes.
        threads: of torch, in each process.

    Raises:
        HiddenlabError: Ray is not installed or not reached, or a worker died.
    """
    try:
        import ray
    except ImportError:
        raise HiddenlabError("--workers needs Ray; install hiddenlab with its ray extra") from None
    from hiddenlab.defenses.cascade.ray_connection import check_reachable

    own = not ray.is_initialized()
    if own:
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        address = os.environ.get("RAY_ADDRESS")
        try:
            if address:
                check_reachable(address)
                ray.init(address, **quiet)
            else:
                ray.init(address="local", num_cpus=workers, include_dashboard=False, **quiet)
        except (ConnectionError, ValueError, RuntimeError) as error:
            place = address or "this machine"
            raise HiddenlabError(f"cannot join Ray at {place}: {first_line(error)}") from None

    where = home.resolve()  # workers have another current directory

    def work(item: Item) -> Outcome:
        import torch

        torch.set_num_threads(threads or 1)
        return measure(item, where, fresh)

    remote = ray.remote(work)
    waiting = list(items)
    running: list[ray.ObjectRef] = []
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                running.append(remote.remote(waiting.pop(0)))
            ready, running = ray.wait(running)
            yield ray.get(ready[0])
    except ray.exceptions.RayError as error:
        raise HiddenlabError(f"a worker failed: {str(error).strip().splitlines()[-1]}") from None
    finally:
        if own:
            ray.shutdown()
