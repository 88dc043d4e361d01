"""Read a model's files through transformers without output, and report failures in one line."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hiddenlab.errors import InputError


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence progress bars and the report of layers that are left out on purpose."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def reading_model(failure: str, advice: str = "") -> Iterator[None]:
    """Turn any error of a library over a model's files into one InputError line; files may be damaged.

    Args:
        failure: what cannot be done, for the error. advice: what to do about it.
    """
    try:
        yield
    except (InputError, torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:
        raise InputError(f"{failure} ({first_line(error)}){advice}") from None


def first_line(error: Exception) -> str:
    """Return the first line of an error of a library, or its kind where it says nothing."""
    lines = str(error).strip().splitlines()
    if isinstance(error, KeyError) and lines:
        return f"unknown or missing: {lines[0][:300]}"
    return lines[0][:300].rstrip(":") if lines else type(error).__name__
