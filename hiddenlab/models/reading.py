"""Read a model's files through transformers without output, and report failures in one line."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from hiddenlab.errors import InputError
from hiddenlab.text import first_line

OTHER_MODEL = (  # what to do about an architecture that is refused
    "choose a model of another architecture; 'hiddenlab eval architectures' shows which run, as does "
    "docs/results/architectures.md"
)


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


def foreign_layers(module: nn.Module, states: Tensor | None) -> InputError:
    """Return the error for layers whose output is no state for each token."""
    shape = "nothing" if states is None else f"states {list(states.shape)}"
    return InputError(
        f"the layers of {type(module).__name__} give {shape} and not [prompts, tokens, width]; {OTHER_MODEL}"
    )
