"""Parse device names."""

import os

import torch

from hiddenlab.errors import InputError


def parse_device(name: str) -> torch.device:
    """Return the torch device of a name; ``auto`` is CUDA where available, else the CPU.

    Each of several processes that torchrun or accelerate started gets its own device.

    Raises:
        InputError: the name is no device, or the device is not available.
    """
    if name == "auto":
        if not torch.cuda.is_available():
            return torch.device("cpu")
        rank = os.environ.get("LOCAL_RANK")
        return torch.device("cuda" if rank is None else f"cuda:{int(rank) % torch.cuda.device_count()}")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"unknown device {name!r}; use auto, cpu, cuda or cuda:N") from None
    if device.type == "meta":
        raise InputError("the device meta computes nothing; use auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InputError("no CUDA device is available here; use --device cpu or auto")
    return device
