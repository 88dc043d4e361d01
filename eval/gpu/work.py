"""Measure the cells of one part in its own process, which ``program`` starts."""

import gc
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any, TypeVar
from unittest import mock

import torch

from hiddenlab.attacks.beam_decoding import distortion_model
from hiddenlab.errors import HiddenlabError
from hiddenlab.eval.gpu.program import Setting
from hiddenlab.proposals import corpus
from hiddenlab.testing import small_training
from hiddenlab.utils.environment import describe_environment

T = TypeVar("T")
Figures = dict[str, Any]
MATRIX, REHEARSED_MATRIX = 8192, 256
REHEARSED_TEXTS = 50  # one text in so many


@dataclass
class Lab:
    """The common state of measurements: the device, its clock, its measured matrix rate, and objects made last.

    Attributes:
        setting: the device and the size of everything that runs.
    """

    setting: Setting
    _kept: dict[str, tuple[Hashable, Any]] = field(default_factory=dict)
    _rates: dict[torch.dtype, float] = field(default_factory=dict)
    _folder: tempfile.TemporaryDirectory[str] | None = None

    @property
    def device(self) -> torch.device:
        return torch.device(self.setting.device)

    @property
    def folder(self) -> Path:
        """A temporary folder that lasts as long as the part."""
        self._folder = self._folder or tempfile.TemporaryDirectory(prefix="hiddenlab-gpu-")
        return Path(self._folder.name)

    def sized(self, full: T, rehearsed: T) -> T:
        """Return the first value on a card, and the second in a rehearsal."""
        return rehearsed if self.setting.rehearse else full

    def keep(self, what: str, key: Hashable, make: Callable[[], T]) -> T:
        """Return the object of that kind and key; if the last one had another key, free it and make a new one."""
        if what not in self._kept or self._kept[what][0] != key:
            self._kept.pop(what, None)
            self.free()
            self._kept[what] = key, make()
        return self._kept[what][1]  # type: ignore[no-any-return]

    def free(self) -> None:
        """Return unused memory to the card, and reset its peak."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def wait(self) -> None:
        """Wait until the device has done all that it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def now(self) -> float:
        """Return the seconds of the host's clock when the device has done all that it was given."""
        self.wait()
        return time.perf_counter()

    def peak_mb(self) -> float | None:
        """Return the most memory held on the card since ``free``, in MB (10⁶ bytes); None without a card."""
        return torch.cuda.max_memory_allocated() / 1e6 if self.device.type == "cuda" else None

    def seconds(self, work: Callable[[], Any], repeats: int = 5) -> float:
        """Return the median seconds of a piece of work on the device, after one run that is not counted."""
        times = []
        for _ in range(1 + self.sized(repeats, 1)):
            start = self.now()
            work()
            times.append(self.now() - start)
        return median(times[1:])

    def rate(self, dtype: torch.dtype = torch.bfloat16) -> float:
        """Measure the floating-point operations per second of a large square matrix product of random numbers."""
        if dtype not in self._rates:
            n = self.sized(MATRIX, REHEARSED_MATRIX)
            a, b = (torch.randn(n, n, device=self.device, dtype=dtype) for _ in range(2))
            work = lambda: [a @ b for _ in range(10)]  # noqa: E731
            self._rates[dtype] = 10 * 2 * n**3 / self.seconds(work)
        return self._rates[dtype]


def facts(setting: Setting) -> dict[str, Any]:
    """Return the card and its memory, and the versions of all software."""
    environment = {key: value for key, value in describe_environment().items() if key != "command"}
    device = torch.device(setting.device)
    if setting.commit is not None:
        environment["code"] = {**environment["code"], "commit": setting.commit, "dirty": False}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        environment["card"] = {
            "name": properties.name,
            "memory_mb": properties.total_memory / 1e6,
            "multiprocessors": properties.multi_processor_count,
            "capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda,
        }
    return environment


def measure_cells(orders: dict[str, Any]) -> None:
    """Measure each cell and append its row to the file that the orders name; a failed cell's row has its reason."""
    lab = Lab(Setting(**orders["setting"]))
    module, _, name = orders["measure"].partition(":")
    with Path(orders["rows"]).open("a", encoding="utf-8") as file:

        def append(row: dict[str, Any]) -> None:
            file.write(json.dumps(row, allow_nan=False) + "\n")
            file.flush()

        append({"facts": facts(lab.setting)})
        function = getattr(import_module(module), name)
        for cell in orders["cells"]:
            start, status, reason, figures = time.perf_counter(), "measured", None, None
            lab.free()
            try:
                figures = function(lab, **cell)
                lab.wait()
                if bad := [
                    name
                    for name, figure in figures.items()
                    if isinstance(figure, float) and not isfinite(figure)
                ]:
                    status, reason, figures = "failed", f"{', '.join(bad)}: not a finite number", None
            except torch.cuda.OutOfMemoryError as error:
                status, reason = "failed", f"out of memory: {str(error).splitlines()[0]}"
                lab._kept.clear()
            except HiddenlabError as error:
                status, reason = "failed", str(error)
            except Exception as error:
                traceback.print_exc()
                status, reason = "failed", ": ".join([type(error).__name__, *str(error).splitlines()[:1]])
            row = {
                "part": orders["part"],
                "cell": cell,
                "status": status,
                "reason": reason,
                "figures": figures,
            }
            append(row | {"seconds": time.perf_counter() - start})


@contextmanager
def rehearsed() -> Iterator[None]:
    """Train little, on few texts, with one thread; two threads beside another busy process are many times slower."""
    texts = corpus.standard_library_texts
    torch.set_num_threads(1)
    with (
        small_training(),
        mock.patch.object(distortion_model, "TOKENS", 600),
        mock.patch.object(corpus, "standard_library_texts", lambda: texts()[::REHEARSED_TEXTS]),
    ):
        yield


if __name__ == "__main__":
    orders = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    with rehearsed() if orders["setting"]["rehearse"] else nullcontext():
        measure_cells(orders)
