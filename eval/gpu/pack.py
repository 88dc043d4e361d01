"""Pack what a bare CUDA machine lacks into pieces to copy, and unpack it there.

``python -m hiddenlab.eval.gpu.pack FOLDER`` writes the built-in model's GGUF file in compressed pieces, and the Python
packages that CUDA images seldom have. With ``--unpack TARGET`` the same command joins them on the other machine.
"""

import hashlib
import json
import lzma
import math
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Annotated

import typer

from hiddenlab.errors import HiddenlabError, InputError
from hiddenlab.models.load import BUILTIN_PACKAGE, builtin_gguf
from hiddenlab.utils.schema import loads, read_bytes

MANIFEST, PACKAGES = "pieces.json", "packages.tar.xz"
# gguf reads the model file; bitsandbytes quantizes to int8 and nf4; jaxtyping annotates shapes.
NEEDED = ("gguf", "bitsandbytes", "jaxtyping", "wadler_lindig", "lazy-loader")
BLOCK = 1 << 20


def pack(folder: Path, piece_mb: float, cuda: str) -> list[Path]:
    """Pack the model into compressed pieces and the packages into one archive.

    Args:
        folder: where the files go.
        piece_mb: the largest piece, in MB (10⁶ bytes).
        cuda: version of the machine's torch, such as 13.0. bitsandbytes has one library per CUDA version; only this
            one is packed.

    Returns:
        The files, the manifest first.

    Raises:
        InputError: the model, a package, or bitsandbytes's library for that version is not installed.
    """
    if not (math.isfinite(piece_mb) and piece_mb >= 1):
        raise InputError(f"a piece is at least 1 MB, not {piece_mb}")
    gguf = builtin_gguf()
    folder.mkdir(parents=True, exist_ok=True)
    packages = _pack_packages(folder / PACKAGES, cuda)
    pieces: list[Path] = []
    with tempfile.TemporaryDirectory() as work:
        whole = Path(work) / "model.xz"
        with gguf.open("rb") as source, lzma.open(whole, "wb", preset=1) as target:
            shutil.copyfileobj(source, target, BLOCK)
        with whole.open("rb") as source:
            while part := source.read(int(piece_mb * 1e6)):
                pieces.append(folder / f"model.{len(pieces)}")
                pieces[-1].write_bytes(part)
    manifest = folder / MANIFEST
    manifest.write_text(
        json.dumps(
            {"file": gguf.name, "sha256": _digest(gguf), "pieces": [piece.name for piece in pieces]}, indent=1
        )
        + "\n",
        encoding="utf-8",
    )
    return [manifest, packages, *pieces]


def unpack(folder: Path, target: Path) -> bool:
    """Unpack packages and model where ``PYTHONPATH=target`` finds them; pieces may arrive one after another.

    Returns:
        Whether the model is complete.

    Raises:
        InputError: the folder holds no packed model, or pieces that do not belong together.
    """
    name, digest, pieces = _read_manifest(folder / MANIFEST)
    home, held = (
        target / BUILTIN_PACKAGE,
        target / "pieces" / hashlib.sha256(digest.encode()).hexdigest()[:16],
    )
    for place in (home, held):
        place.mkdir(parents=True, exist_ok=True)
    if (folder / PACKAGES).is_file():
        try:
            with tarfile.open(folder / PACKAGES) as archive:
                archive.extractall(target, filter="data")
        except (tarfile.TarError, lzma.LZMAError, EOFError, KeyError, OSError) as error:
            raise InputError(f"cannot unpack the packages in {folder / PACKAGES}: {error}") from None
    for piece in pieces:
        if (folder / piece).is_file():
            shutil.copyfile(folder / piece, held / piece)
    if missing := [piece for piece in pieces if not (held / piece).is_file()]:
        print(f"still to come: {', '.join(missing)}", file=sys.stderr)
        return False
    (home / "__init__.py").touch()
    model = held / "whole"  # moved when it is whole, so that nothing half-written is ever taken for a model
    decompressor = lzma.LZMADecompressor()
    try:
        with model.open("wb") as file:
            for piece in pieces:
                for block in _blocks(held / piece):
                    file.write(decompressor.decompress(block))
        whole = _digest(model) == digest
    except (lzma.LZMAError, EOFError):
        whole = False
    if not whole:
        model.unlink(missing_ok=True)
        raise InputError("the pieces do not make the model that was packed; pack and carry them again")
    model.replace(home / name)
    return True


def _read_manifest(path: Path) -> tuple[str, str, list[str]]:
    """Read file name, digest and pieces' names of a packed model; names have no folder.

    Raises:
        InputError: there is no manifest, or it is malformed.
    """
    try:
        manifest = loads(read_bytes(path), str(path))
        name, digest, pieces = manifest["file"], manifest["sha256"], manifest["pieces"]
        names = [name, *pieces]
        if not pieces or not all(isinstance(part, str) and Path(part).name for part in [digest, *names]):
            raise ValueError("names are missing")
    except (InputError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{path.parent} holds no packed model: {error}; 'python -m hiddenlab.eval.gpu.pack' makes one"
        ) from None
    return Path(name).name, digest, [Path(piece).name for piece in pieces]


def _pack_packages(archive: Path, cuda: str) -> Path:
    library = f"libbitsandbytes_cuda{cuda.replace('.', '')}.so"
    has_library = False
    with tarfile.open(archive, "w:xz") as tar:
        for package in NEEDED:
            try:
                files = distribution(package).files or []
            except PackageNotFoundError:
                raise InputError(f"{package} is not installed here; 'make setup' installs it") from None
            for file in files:
                if ".." in file.parts or "__pycache__" in file.parts:
                    continue
                has_library |= file.name == library
                # There is one library of twenty megabytes for each version of CUDA and ROCm.
                if file.name.startswith("libbitsandbytes_") and file.name not in (
                    library,
                    "libbitsandbytes_cpu.so",
                ):
                    continue
                tar.add(str(file.locate()), arcname=str(file))
    if not has_library:
        archive.unlink()
        raise InputError(f"bitsandbytes here has no library for CUDA {cuda}")
    return archive


def _blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            yield block


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main(
    folder: Annotated[Path, typer.Argument(help="Where the pieces go, or lie.")],
    to: Annotated[Path | None, typer.Option("--unpack", help="Unpack into this folder instead.")] = None,
    piece_mb: Annotated[float, typer.Option(help="Largest piece in MB.")] = 47.5,
    cuda: Annotated[str, typer.Option(help="CUDA version of the machine's torch.")] = "13.0",
) -> None:
    """Pack the built-in model and the packages that a bare CUDA machine lacks, or unpack them there."""
    try:
        if to is not None:
            whole = unpack(folder, to)
            print(f"PYTHONPATH={to}" if whole else "the model is not whole yet", file=sys.stderr)
            return
        for path in pack(folder, piece_mb, cuda):
            print(f"{path} {path.stat().st_size / 1e6:.1f} MB", file=sys.stderr)
    except HiddenlabError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from None


if __name__ == "__main__":
    typer.run(main)
