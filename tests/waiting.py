"""Wait in tests for what another thread or process is about to do."""

import time
from collections.abc import Callable

PATIENCE = 60.0  # seconds


def eventually(holds: Callable[[], object]) -> None:
    """Wait until something holds, and fail where it does not within a minute."""
    until = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.01)
