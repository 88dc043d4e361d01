"""Write files so that nothing is lost: whole or not at all, on the disk, and secrets for their owner alone."""

import os
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from torch import Tensor

from hiddenlab.errors import InputError

PRIVATE, SHARED = 0o600, 0o666  # before the user's umask


def write_file(path: Path, content: str | bytes, *, private: bool = False) -> None:
    """Write a file atomically: the path holds the whole content or what was there before.

    Args:
        private: the file holds a secret; only its owner may read it, from the first byte on.

    Raises:
        InputError: it cannot be written.
    """
    data = content.encode() if isinstance(content, str) else content

    def write(work: Path) -> None:
        handle = os.open(work, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE if private else SHARED)
        with open(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(handle)

    _replace(path, write)


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file atomically, readable for its owner alone: hidden states are as good as the prompt.

    Raises:
        InputError: it cannot be written.
    """
    from safetensors.torch import save_file

    def write(work: Path) -> None:
        os.close(os.open(work, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE))
        save_file(dict(tensors), work, metadata=dict(metadata))
        work.chmod(PRIVATE)  # where safetensors made the file anew

    _replace(path, write)


def _replace(path: Path, write: Callable[[Path], None]) -> None:
    from safetensors import SafetensorError

    work = path.with_name(f".{path.name[:100]}.{secrets.token_hex(6)}.tmp")
    try:
        write(work)
        os.replace(work, path)
    except (OSError, SafetensorError, ValueError) as error:
        raise InputError(f"cannot write {path}: {getattr(error, 'strerror', None) or error}") from None
    finally:
        with suppress(OSError, ValueError):
            work.unlink(missing_ok=True)
