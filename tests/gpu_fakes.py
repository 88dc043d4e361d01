"""Measurements with a known answer, for tests of the GPU program; its parts run in processes of their own."""

import math
import os
import signal
import time
from pathlib import Path

from hiddenlab.errors import InputError
from hiddenlab.eval.gpu.work import Figures, Lab


def double(lab: Lab, *, n: int) -> Figures:
    return {"twice": 2 * n, "equal": n < 100}


def sometimes(lab: Lab, *, n: int, marker: str) -> Figures:
    """Fails with an error of ours, fails with one of Python's, never ends, dies, or is killed, by n."""
    if n == 1:
        raise InputError("one is not wanted")
    if n == 2:
        raise ValueError("two lines\nof which the first counts")
    if n == 3 and not Path(marker).exists():
        time.sleep(600)
    if n == 4 and not Path(marker).exists():
        os._exit(7)
    if n == 6:
        os.kill(os.getpid(), signal.SIGSEGV)
    if n == 7:
        return {"n": math.nan}
    return {"n": n}
