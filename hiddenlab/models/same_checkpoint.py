"""Tell whether two machines hold the same checkpoint, without sending it."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

from hiddenlab.errors import InputError
from hiddenlab.models.checkpoint import weight_files
from hiddenlab.models.choice import facts_of
from hiddenlab.models.load import ModelRef, load_config
from hiddenlab.utils.digests import digest_of

PIECES, PIECE = 64, 4096  # of each file: pieces that are read, and their bytes


def checkpoint_digest(ref: ModelRef) -> str:
    """Return a digest of a checkpoint: of its configuration, and of pieces spread over each file of weights.

    A training step changes nearly all weights, so that it changes the pieces. Files whose few other bytes differ are
    not told apart: the whole files of a large model take minutes to read.

    Raises:
        InputError: there are no weights, or they cannot be read.
    """
    files = weight_files(ref.name, ref.path, ref.revision)
    if ref.adapter is not None:
        files += sorted(Path(ref.adapter).glob("*.safetensors"))
    return digest_of([facts_of(load_config(ref)), [(file.name, _pieces(file)) for file in files]])


def check_same(model: str, digests: Mapping[str, str]) -> None:
    """Check that all machines hold one checkpoint.

    Args:
        model: its name in errors. digests: of each, by the name of the one who read it.

    Raises:
        InputError: they do not.
    """
    (first, expected), *others = digests.items()
    if other := next((name for name, found in others if found != expected), None):
        raise InputError(
            f"{other} holds another checkpoint under the name {model} than {first}, so that the output would be "
            "wrong; copy the same files to each machine"
        )


def _pieces(file: Path) -> str:
    size = file.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with file.open("rb") as opened:
        for piece in range(PIECES):
            opened.seek(max(0, size - PIECE) * piece // (PIECES - 1))
            digest.update(opened.read(PIECE))
    return digest.hexdigest()
