"""Read rows of data that others made: text, JSON, CSV, parquet and Arrow files, and data sets of the Hub."""

import csv
import json
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from io import BytesIO
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any

from hiddenlab.errors import InputError
from hiddenlab.text import first_line
from hiddenlab.utils.schema import read_bytes

CHATS = ("messages", "conversations")  # columns that hold conversations
DEFAULT_COLUMNS = ("text", "prompt", *CHATS)
SEPARATOR = "---"
_BATCH_ROWS = 256
_SAMPLE_ROWS = 100
_DELIMITERS = ",;\t|"
_LONGEST_ROW = 1 << 24  # bytes of a row of CSV
_JSON = (".json", ".jsonl", ".ndjson")

Rows = Iterator[tuple[str, Any]]  # where a row stands ("line 3"), and its value
_Table = tuple[list[str], Iterator[Any]]  # names of columns, and record batches of pyarrow


def rows_of(source: str, column: str | None) -> Rows:
    """Yield the values of a file or data set, of one column where there are columns, as far as they are asked for.

    Args:
        source: a file, or ``hf:NAME[:config[:split[:column]]]``.
        column: None for the first of ``DEFAULT_COLUMNS`` that exists, else the only one with texts.

    Raises:
        InputError: the source cannot be read, or it has no such column.
    """
    if source.startswith("hf:"):
        return _hub_rows(source, column)
    _check_file(source)
    kind = os.path.splitext(source)[1].lower()
    if kind in _TABLES:
        return _table_rows(source, kind, column)
    if kind in _JSON:
        return pick(json_rows(source) if kind == ".json" else jsonl_rows(source), source, column)
    if column is not None:
        raise InputError(f"{source} has no columns to choose from; leave out the column {column!r}")
    return _text_rows(decoded(b"".join(_lines(source)), source))


def pick(rows: Rows, source: str, column: str | None = None) -> Rows:
    """Yield of each row its column, which the first object decides; a row that is no object is the value itself."""
    for where, row in rows:
        if isinstance(row, dict):
            column = _column(list(row), f"{source}, {where},", column, [row])
            yield where, _value(row[column], column, f"{source}, {where}")
        elif column is not None:
            raise InputError(f"{source}, {where}: no column {column!r}, this is {kind_of(row)}")
        else:
            yield where, row


def jsonl_rows(path: str) -> Rows:
    """Yield the values of a file with one JSON value a line."""
    for n, line in enumerate(_lines(path), 1):
        if line.strip():
            yield f"line {n}", _parsed(line, f"{path}, line {n}")


def json_rows(path: str) -> Rows:
    """Yield the items of a list; an object, or a list of messages, is one row."""
    value = _parsed(b"".join(_lines(path)), path)
    if isinstance(value, dict) or is_conversation(value):
        value = [value]
    if not isinstance(value, list):
        raise InputError(f"{path} should hold a list of objects or of strings, and it is {kind_of(value)}")
    yield from ((f"item {n}", row) for n, row in enumerate(value, 1))


def is_conversation(value: Any) -> bool:
    """Return whether a value is a list of messages, as OpenAI's interface or ShareGPT writes them."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(m, dict) and (m.keys() >= {"role", "content"} or "from" in m) for m in value)
    )


def kind_of(value: Any) -> str:
    """Return what a value is, for an error."""
    return "null" if value is None else f"of type {type(value).__name__}"


def decoded(data: bytes, what: str) -> str:
    """Return UTF-8 text without a byte order mark.

    Raises:
        InputError: it is no UTF-8.
    """
    try:
        return data.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        at = f"byte 0x{data[error.start]:02x} at offset {error.start}"
        raise InputError(f"{what} is not UTF-8 text ({at}); convert it to UTF-8") from None


def _check_file(path: str) -> None:
    if not os.path.exists(path):
        shown = path if len(path) <= 80 else path[:77] + "..."
        raise InputError(
            f"no such file: {shown!r}; prompts come from 'builtin', '-' (standard input), a file, or "
            "'hf:NAME[:config[:split[:column]]]'"
        )
    if os.path.isdir(path):
        raise InputError(f"{path} is a directory; name a file in it, or 'hf:{path}' for all its data files")


def _lines(path: str) -> Iterator[bytes]:
    try:
        with open(path, "rb") as handle:
            yield from handle
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from None


def _text_rows(text: str) -> Rows:
    lines = text.removesuffix("\n").split("\n")  # splitlines would also split at form feeds and the like
    marks = [n for n, line in enumerate(lines) if line.removesuffix("\r") == SEPARATOR]
    if not marks:
        yield from ((f"line {n}", line.removesuffix("\r")) for n, line in enumerate(lines, 1) if line.strip())
        return
    for before, after in pairwise([-1, *marks, len(lines)]):
        block = lines[before + 1 : after]
        if block or (before >= 0 and after < len(lines)):
            yield f"the prompt at line {before + 2}", "\n".join(block).removesuffix("\r")


def _parsed(data: bytes | str, what: str) -> Any:
    try:
        return json.loads(decoded(data, what) if isinstance(data, bytes) else data)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{what} is not valid JSON: {error}") from None


def _column(names: Sequence[str], what: str, wanted: str | None, sample: Iterable[Mapping[str, Any]]) -> str:
    """Return the column to read: the requested one, the first default that exists, or the only one with texts."""
    chosen = [name for name in (DEFAULT_COLUMNS if wanted is None else [wanted]) if name in names]
    if not chosen and wanted is None:
        rows = list(sample)
        chosen = [name for name in names if any(_is_text(row.get(name)) for row in rows)]
    if len(set(chosen)) > 1 and chosen[0] not in DEFAULT_COLUMNS:
        raise InputError(
            f"{what} has several columns with texts: {_listed(chosen)}; choose with --column NAME"
        )
    if not chosen:
        asked = "column with texts" if wanted is None else f"column {wanted!r}"
        raise InputError(f"{what} has no {asked}; it has {_listed(names) or 'none at all'}")
    if names.count(chosen[0]) > 1:
        raise InputError(f"{what} has {names.count(chosen[0])} columns {chosen[0]!r}")
    return chosen[0]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))


def _is_text(value: Any) -> bool:
    return isinstance(value, str) or is_conversation(value)


def _value(value: Any, column: str, where: str) -> Any:
    """Return a value; a conversation that is written as JSON, in a format without lists, is parsed."""
    written = column in CHATS and isinstance(value, str) and value.lstrip().startswith("[")
    return _parsed(value, f"{where}, {column!r}") if written else value


@contextmanager
def _loading(source: str, unreachable: str = "") -> Iterator[None]:
    """Turn any error of a loader into one line; such errors (network, hub, arrow ...) share no base class."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        # It may cite the file.
        reason = "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in first_line(error))
        hint = unreachable if isinstance(error, OSError) else ""
        if "utf-8" in reason or "UTF8" in reason:
            hint = "; convert it to UTF-8"
        raise InputError(f"cannot load {source}: {reason}{hint}") from None


def _table_rows(path: str, kind: str, wanted: str | None) -> Rows:
    """Yield one column of a table, read by pyarrow in batches."""
    with _loading(path):
        names, batches = _TABLES[kind](path, None)
        sample = (row for batch in islice(batches, 1) for row in batch.slice(0, _SAMPLE_ROWS).to_pylist())
        column = _column(names, path, wanted, sample)
        _, batches = _TABLES[kind](path, column)
        values = chain.from_iterable(batch.column(column).to_pylist() for batch in batches)
        for n, value in enumerate(values, 1):
            yield f"row {n}", _value(value, column, f"{path}, row {n}")


def _parquet_table(path: str, column: str | None) -> _Table:
    file: Any = import_module("pyarrow.parquet").ParquetFile(path)
    columns = None if column is None else [column]
    return file.schema_arrow.names, file.iter_batches(batch_size=_BATCH_ROWS, columns=columns)


def _arrow_table(path: str, column: str | None) -> _Table:
    """Open an Arrow file (Feather is one) or a stream, which data sets are kept as."""
    pyarrow: Any = import_module("pyarrow")
    source = pyarrow.memory_map(path)
    try:
        file = pyarrow.ipc.open_file(source)
        batches = (file.get_batch(i) for i in range(file.num_record_batches))
    except pyarrow.ArrowInvalid:
        source.seek(0)
        file = batches = pyarrow.ipc.open_stream(source)
    return file.schema.names, (_valid(batch, column) for batch in batches)


def _valid(batch: Any, column: str | None) -> Any:
    """Return a batch whose offsets, which come from a file, are checked: they must not point outside of it."""
    kept = batch if column is None else batch.select([column])
    kept.validate(full=True)
    return kept


def _csv_table(path: str, column: str | None) -> _Table:
    """Open a table of text; its delimiter is the one that parts its first line into the most columns.

    pyarrow takes all that follows a quote which is not closed as one field, and says nothing. Therefore a row that
    nobody wrote is read behind the last one: it has to arrive as a row of its own.
    """
    table: Any = import_module("pyarrow.csv")
    text = import_module("pyarrow").string()
    data, mark = read_bytes(Path(path)), secrets.token_hex(16)
    header = next(iter(data[:_LONGEST_ROW].splitlines()), b"").decode(errors="replace")
    delimiter = max(_DELIMITERS, key=lambda sign: len(next(csv.reader([header], delimiter=sign), ())))

    def read(data: bytes, **options: Any) -> Any:
        # Not ``open_csv``: threads that it starts may still run when an error ends the program, and abort it.
        return table.read_csv(
            BytesIO(data),
            table.ReadOptions(use_threads=False, block_size=_LONGEST_ROW),
            table.ParseOptions(delimiter=delimiter, newlines_in_values=True),
            table.ConvertOptions(**options),
        )

    plain = read(data)
    names = plain.schema.names
    if column is None:
        return names, iter(plain.to_batches())
    data += b"\n" + delimiter.join([mark] * len(names)).encode()
    chosen = read(data, column_types={column: text}, include_columns=[column])
    return names, _closed(iter(chosen.to_batches()), mark, path)


def _closed(batches: Iterator[Any], mark: str, path: str) -> Iterator[Any]:
    """Yield the batches without the mark behind the last row."""
    for batch in batches:
        last = batch.column(0)[-1].as_py() if len(batch) else ""
        if mark in last and last != mark:
            raise InputError(f"{path}: a quote is opened and not closed")
        yield batch.slice(0, len(batch) - (last == mark))


_TABLES: dict[str, Callable[[str, str | None], _Table]] = {
    ".csv": _csv_table,
    ".tsv": _csv_table,
    ".parquet": _parquet_table,
    ".arrow": _arrow_table,
    ".feather": _arrow_table,
}


def _hub_rows(source: str, wanted: str | None) -> Rows:
    parts = source.removeprefix("hf:").split(":")
    if not parts[0] or len(parts) > 4:
        raise InputError(f"{source!r} is not of the form 'hf:NAME[:config[:split[:column]]]'")
    name, config, split, own = parts + [""] * (4 - len(parts))
    with _loading(source, "; is NAME a data set on the Hub, or a local directory of data files?"):
        datasets: Any = import_module("datasets")
        data = datasets.load_dataset(name, config or None, split=split or "train", streaming=True)
        if names := data.column_names or list(next(iter(data), {})):
            wanted = wanted if wanted is not None else own or None
            column = _column(names, source, wanted, islice(data, 1))
            rows = data.select_columns([column])  # so that images and audio beside it are not decoded
            for n, row in enumerate(rows, 1):
                yield f"row {n}", _value(row[column], column, f"{source}, row {n}")
