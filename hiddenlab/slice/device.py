"""Device names."""

import torch

from hiddenlab.errors import InputError


def parse_device(name: str) -> torch.device:
    """The torch device of a name; ``auto`` is CUDA where there is one, else the CPU.

    Raises:
        InputError: the name is no device, or the device is not there.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"unknown device {name!r}; use auto, cpu, cuda or cuda:N") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InputError("no CUDA device is available here; use --device cpu or auto")
    return device
