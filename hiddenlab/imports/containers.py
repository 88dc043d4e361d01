"""Read files of arrays, whatever wrote them: safetensors, NumPy, PyTorch, Arrow, Parquet, JSON, text.

The first bytes of a file say what it is, not its name. Nothing is unpickled but plain containers of tensors, and no
file gets more memory than its size explains: a header that claims more than the file holds is refused before it is
believed.
"""

import io
import math
import pickle
import re
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hiddenlab.errors import HiddenlabError, InputError
from hiddenlab.text import first_line
from hiddenlab.utils.schema import LONGEST_LINE, lines, loads, opened, read_bytes

WHOLE = "array"  # the name of the array in a file that holds one without a name
MOST_ARRAYS = 100_000
DEEPEST = 16  # levels of lists and dictionaries
MOST_AXES = 8
# Compressed states of real models are never much smaller than the states.
MOST_EXPANSION, FREE_BYTES = 100, 1 << 26
OBSERVATION = "hiddenlab"  # the metadata key of the lab's own files
SAVE_AGAIN = (
    "save its tensors instead: tensors = {f'layers.{i}.keys': x.keys for i, x in enumerate(cache.layers)} (for a "
    "cache), or {'hidden_states': list(output.hidden_states)} (for a model's output), then torch.save(tensors, FILE)"
)


@dataclass(frozen=True)
class Contents:
    """What a file holds.

    Attributes:
        path: for messages. kind: what kind of file it is.
        arrays: tensors by name; a name within lists and dictionaries is parted by points (``hidden_states.11``).
        metadata: texts beside the tensors (safetensors). value: the whole value of a JSON file.
    """

    path: Path
    kind: str
    arrays: dict[str, Tensor]
    metadata: dict[str, str] = field(default_factory=dict)
    value: Any = None


def read(path: Path) -> Contents:
    """Read a file of arrays.

    Raises:
        InputError: it cannot be read, is of no known kind, is damaged, claims more than it holds, or holds objects.
    """
    try:
        with opened(path) as file:
            head, size = file.read(16), path.stat().st_size
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from None
    except ValueError:
        raise InputError(f"cannot read {str(path)!r}: that is no name of a file") from None
    if not size:
        raise InputError(f"{path} is empty")
    kind, reader = _reader(head, path)
    with _damaged(path, kind), warnings.catch_warnings(action="ignore"):  # a damaged header makes numpy talk
        contents = reader(path)
    if not contents.arrays:
        raise InputError(f"{path} holds no arrays of numbers ({kind})")
    return contents


def _reader(head: bytes, path: Path) -> tuple[str, Callable[[Path], Contents]]:
    """Return the kind of a file by its first bytes, and its reader."""
    if head.startswith(b"\x93NUMPY"):
        return "NumPy", _npy
    if head.startswith(b"PK\x03\x04"):
        return ("PyTorch", _torch) if _is_torch(path) else ("NumPy archive", _npz)
    if head.startswith(b"PAR1"):
        return "Parquet", _parquet
    if head.startswith((b"ARROW1", b"\xff\xff\xff\xff")):
        return "Arrow", _arrow
    if head.startswith(b"(\xb5/\xfd"):
        raise InputError(f"{path} is compressed with zstd; 'zstd -d {path}' gives the file that it was")
    if head.startswith(b"\x1f\x8b"):
        raise InputError(f"{path} is compressed with gzip; 'gunzip -k {path}' gives the file that it was")
    if head.startswith(b"\x80") and head[1:2] in b"\x02\x03\x04\x05":
        return "PyTorch", _torch
    if len(head) > 8 and head[8:9] == b"{" and head[7] == 0:
        return "safetensors", _safetensors
    if re.match(rb"(\xef\xbb\xbf)?\s*[\[{]", head):
        return "JSON", _json
    return "text", _text


@contextmanager
def _damaged(path: Path, kind: str) -> Iterator[None]:
    """Turn any error of a reader into one line; the errors of such libraries share no base class."""
    try:
        yield
    except HiddenlabError:
        raise
    except MemoryError:
        raise InputError(f"{path} does not fit into the memory") from None
    except Exception as error:
        raise InputError(f"{path} is no {kind} file, or damaged: {first_line(error)}") from None


def _bounded(claimed: int, path: Path) -> None:
    """Refuse a file that claims more bytes than its size explains.

    Raises:
        InputError: it does.
    """
    size = path.stat().st_size
    if claimed > MOST_EXPANSION * size + FREE_BYTES:
        raise InputError(f"{path} has {size} bytes and claims to hold {claimed}; it is damaged")


# ---- safetensors


def _safetensors(path: Path) -> Contents:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        names = list(file.keys())
        arrays = {name: file.get_tensor(name) for name in _counted(names, path)}
    return Contents(path, "safetensors", arrays, metadata)


def _counted(names: list[str], path: Path) -> list[str]:
    if len(names) > MOST_ARRAYS:
        raise InputError(f"{path} holds {len(names)} arrays; {MOST_ARRAYS} are read")
    return names


# ---- NumPy


def _npy(path: Path) -> Contents:
    with opened(path) as file:
        array = _array(file, path.stat().st_size, f"{path}")
    return Contents(path, "NumPy", {WHOLE: array})


def _npz(path: Path) -> Contents:
    with opened(path) as file, zipfile.ZipFile(file) as archive:
        members = [member for member in archive.infolist() if member.filename.endswith(".npy")]
        _counted([member.filename for member in members], path)
        _bounded(sum(member.file_size for member in members), path)
        arrays: dict[str, Tensor] = {}
        for member in members:
            name = member.filename.removesuffix(".npy")
            with archive.open(member) as part:
                # numpy reads a pipe of a zip in pieces; a member is bounded above, so that it is read whole.
                data = part.read(member.file_size + 1)
            _add(arrays, name, _array(io.BytesIO(data), len(data), f"{path}, {name}"), path)
    return Contents(path, "NumPy archive", arrays)


def _array(file: Any, size: int, where: str) -> Tensor:
    """Read one ``.npy``; the shape is checked against the file's size before anything is allocated."""
    version = np.lib.format.read_magic(file)
    if version not in ((1, 0), (2, 0), (3, 0)):
        raise InputError(f"{where} has version {version} of the NumPy format, which is unknown")
    header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = header(file)
    if dtype.hasobject:
        raise InputError(
            f"{where} holds Python objects, which are never loaded; save numbers of one shape: "
            "np.save(FILE, np.asarray(states, dtype=np.float32))"
        )
    if dtype.kind == "V" or dtype.names:
        raise InputError(
            f"{where} holds {dtype.itemsize} raw bytes for each number, as NumPy saves bfloat16 and float8; "
            "save np.float32 numbers (states.float().numpy()), or safetensors"
        )
    count = math.prod(shape)
    if min(shape, default=0) < 0 or count * dtype.itemsize > size - file.tell():
        raise InputError(f"{where} is truncated: its shape {list(shape)} needs more bytes than it has")
    data = np.frombuffer(file.read(count * dtype.itemsize), dtype=dtype, count=count)
    return _tensor(data.reshape(shape, order="F" if fortran else "C"), where)


def _tensor(array: np.ndarray, where: str) -> Tensor:
    """Return a NumPy array as a tensor of its own.

    Raises:
        InputError: it holds no real numbers.
    """
    if array.dtype.kind not in "biuf":
        raise InputError(f"{where} holds {array.dtype}, and no real numbers")
    native = array.astype(array.dtype.newbyteorder("="), copy=True)
    if native.dtype == np.longdouble:
        native = native.astype(np.float64)
    return torch.from_numpy(np.ascontiguousarray(native).reshape(array.shape))


# ---- PyTorch


def _is_torch(path: Path) -> bool:
    try:
        with opened(path) as file, zipfile.ZipFile(file) as archive:
            return any(name.endswith("data.pkl") for name in archive.namelist())
    except (OSError, zipfile.BadZipFile, ValueError, NotImplementedError):
        return False


def _torch(path: Path) -> Contents:
    with opened(path) as file:
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as archive:
                _bounded(sum(member.file_size for member in archive.infolist()), path)
    try:
        value = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:  # torch's own message advises to unpickle
        named = re.search(r"GLOBAL ([\w.]+)", str(error))
        what = f"an object ({named[1][:100]})" if named else "more than tensors in lists and dictionaries"
        raise InputError(f"{path} holds {what}, and objects are never unpickled; {SAVE_AGAIN}") from None
    arrays: dict[str, Tensor] = {}
    _flatten(value, "", arrays, path)
    return Contents(path, "PyTorch", arrays)


# ---- Arrow and Parquet


def _parquet(path: Path) -> Contents:
    parquet: Any = import_module("pyarrow.parquet")
    with parquet.ParquetFile(path) as file:
        groups = range(file.metadata.num_row_groups)
        _bounded(sum(file.metadata.row_group(i).total_byte_size for i in groups), path)
        return _columns(file.schema_arrow, file.iter_batches(batch_size=64), path, "Parquet")


def _arrow(path: Path) -> Contents:
    arrow: Any = import_module("pyarrow")
    with arrow.memory_map(str(path)) as source:
        head = source.read(6)
        source.seek(0)
        if head == b"ARROW1":
            reader = arrow.ipc.open_file(source)
            batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
        else:
            reader = arrow.ipc.open_stream(source)
            batches = iter(reader)
        return _columns(reader.schema, batches, path, "Arrow")


def _columns(schema: Any, batches: Iterator[Any], path: Path, kind: str) -> Contents:
    """Return columns of numbers; a row is a token where its value is a list, a prompt where it is a list of lists."""
    names = [name for name, type in zip(schema.names, schema.types, strict=True) if _numeric(type)]
    if len(set(schema.names)) < len(schema.names):
        raise InputError(f"{path} has two columns of one name")
    rows: dict[str, list[Any]] = {name: [] for name in names}
    size = 0
    for batch in batches:
        size += batch.nbytes
        _bounded(size, path)
        for name in names:
            rows[name] += [_numbers(value, f"{path}, {name}") for value in batch.column(name)]
    arrays: dict[str, Tensor] = {}
    for name in names:
        values = rows[name]
        shapes = {None if value is None else value.shape for value in values}
        if len(shapes) == 1 and None not in shapes:
            _add(arrays, name, _tensor(np.stack(values), f"{path}, {name}"), path)
        else:
            for i, value in enumerate(values):
                if value is not None:
                    _add(arrays, f"{name}.{i}", _tensor(value, f"{path}, {name}"), path)
    return Contents(path, kind, arrays)


def _numeric(type: Any) -> bool:
    """Return whether a column holds numbers, or lists of them."""
    arrow: Any = import_module("pyarrow")
    while (
        arrow.types.is_list(type) or arrow.types.is_large_list(type) or arrow.types.is_fixed_size_list(type)
    ):
        type = type.value_type
    return bool(arrow.types.is_integer(type) or arrow.types.is_floating(type))


def _numbers(value: Any, where: str) -> np.ndarray | None:
    """Return one value of a column as an array; None for an empty one."""
    if not value.is_valid:
        return None
    try:
        return np.asarray(value.as_py(), dtype=np.float64 if "double" in str(value.type) else None)
    except ValueError:
        raise InputError(f"{where} holds lists of unequal lengths in one row") from None


# ---- JSON and text


def _json(path: Path) -> Contents:
    try:
        value = loads(read_bytes(path), str(path))
    except InputError as whole:
        # Not one value: perhaps one on each line.
        try:
            values = [loads(line, f"{path}, line {n}") for n, line in lines(path) if line.strip()]
        except InputError:
            raise whole from None
        value = values
    arrays: dict[str, Tensor] = {}
    _flatten(value, "", arrays, path)
    return Contents(path, "JSON", arrays, value=value)


_KINDS = "safetensors, .npy, .npz, .pt, Parquet, Arrow, JSON, or rows of numbers as text"
_TEXT_ROW = re.compile(r"^(?:embedding\s+\d+\s*:)?\s*(.*?)\s*$")


def _text(path: Path) -> Contents:
    """Read rows of numbers, one on each line, parted by blanks or commas; ``embedding 0:`` may stand before them."""
    rows: list[list[float]] = []
    for number, line in lines(path):
        try:
            text = line.decode()
        except UnicodeDecodeError:
            raise InputError(f"{path} is of no kind that is read: {_KINDS}") from None
        if "..." in text or text.startswith(("ggml_debug", "common_debug")):
            raise InputError(
                f"{path}, line {number}: the program printed some numbers of each row and left out the rest ('...'); "
                "llama-embedding prints all with --embd-output-format json --embd-normalize -1"
            )
        if not (shown := _TEXT_ROW.sub(r"\1", text)) or text.startswith("#"):
            continue
        if len(line) >= LONGEST_LINE:
            raise InputError(f"{path}, line {number} is too long")
        try:
            rows.append([float(word) for word in re.split(r"[\s,;]+", shown.strip(",; \t\r"))])
        except ValueError:
            where = f"{path}, line {number}: {shown[:40]!r} holds no numbers"
            raise InputError(where if rows else f"{where}; read are {_KINDS}") from None
        if len(rows[-1]) != len(rows[0]):
            raise InputError(
                f"{path}, line {number} has {len(rows[-1])} numbers, and the first row has {len(rows[0])}"
            )
    return Contents(path, "text", {WHOLE: torch.tensor(rows)} if rows else {})


# ---- what lists and dictionaries hold


def _flatten(value: Any, name: str, arrays: dict[str, Tensor], path: Path, depth: int = 0) -> None:
    """Collect tensors and lists of numbers within lists and dictionaries; texts and the like are left out."""
    if depth > DEEPEST:
        raise InputError(f"{path} is nested too deeply; {DEEPEST} levels are read")
    if isinstance(value, Tensor):
        _add(arrays, name or WHOLE, _plain(value, name or WHOLE, path), path)
    elif isinstance(value, dict):
        for key, item in value.items():
            _flatten(item, f"{name}.{key}" if name else str(key), arrays, path, depth + 1)
    elif isinstance(value, list | tuple):
        numbers = _rectangular(value)
        if numbers is not None:
            _add(arrays, name or WHOLE, _tensor(numbers, name or WHOLE), path)
        else:
            for i, item in enumerate(value):
                _flatten(item, f"{name}.{i}" if name else str(i), arrays, path, depth + 1)
    elif isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**63:
        _add(arrays, name or WHOLE, torch.tensor(value), path)


def _rectangular(value: list[Any] | tuple[Any, ...]) -> np.ndarray | None:
    """Return nested lists of numbers as an array; None where they are ragged or hold anything else."""
    leaf: Any = value
    for _ in range(MOST_AXES):
        if not isinstance(leaf, list | tuple) or not leaf:
            break
        leaf = leaf[0]
    if isinstance(leaf, bool) or not isinstance(leaf, int | float):
        return None
    try:
        array = np.asarray(value)
    except (ValueError, OverflowError, TypeError, RuntimeError):
        return None
    return array if array.dtype.kind in "if" else None


def _plain(tensor: Tensor, name: str, path: Path) -> Tensor:
    """Return a tensor of a file as an ordinary one; its claimed size is checked first."""
    where = f"{path}, {name}"
    if tensor.layout is not torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
        raise InputError(f"{where} is no ordinary tensor; save it as .to_dense().cpu(), dequantized")
    if tensor.is_complex():
        raise InputError(f"{where} holds complex numbers")
    if tensor.ndim > MOST_AXES:
        raise InputError(f"{where} has {tensor.ndim} axes; {MOST_AXES} are read")
    _bounded(tensor.numel() * tensor.itemsize, path)
    return tensor.detach()


def _add(arrays: dict[str, Tensor], name: str, tensor: Tensor, path: Path) -> None:
    if name in arrays:
        raise InputError(f"{path} holds the name {name!r} twice")
    if len(arrays) >= MOST_ARRAYS:
        raise InputError(f"{path} holds more than {MOST_ARRAYS} arrays")
    arrays[name] = tensor
