"""Load prompts from the shipped set, standard input, a file (text, JSON, CSV, parquet), or a Hub data set."""

import csv
import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module, resources
from itertools import islice, pairwise
from typing import Any

from hiddenlab.errors import InputError

BUILTIN = "builtin"
DEFAULT_COLUMNS = ("text", "prompt")
SEPARATOR = "---"
_SOURCES = "'builtin', '-' (standard input), a file, or 'hf:NAME[:config[:split[:column]]]'"
_BATCH_ROWS = 256
TAB = "\t"
_DELIMITERS = {".csv": ",", ".tsv": TAB}
_CARRIAGE_RETURN = re.compile(r"(?<=\r)")  # behind each

_Items = Iterator[tuple[str, Any]]  # where it stands ("line 3"), and the value found there


@dataclass(frozen=True)
class Prompt:
    """One prompt; ``id`` is its place in the source (``p001`` is the first), so unique within it."""

    id: str
    text: str
    source: str


def load_prompts(
    source: str | None = None, *, column: str | None = None, limit: int | None = None
) -> list[Prompt]:
    """Load prompts, unchanged including white space.

    Args:
        source: one of

            - None or ``builtin``: the 100 prompts shipped with the package.
            - ``-``: the whole of standard input as one prompt, less one final newline.
            - ``FILE.jsonl``, ``FILE.ndjson``, ``FILE.json``: one object or string per line, or a list of them.
            - ``FILE.csv``, ``FILE.tsv``: one column of it, fields parted by commas or tabs, and quoted where they hold
              these, quotes or line ends. The first line names the columns. Blank lines are skipped.
            - ``FILE.parquet``: one column of it, read in batches.
            - ``hf:NAME[:config[:split[:column]]]``: a data set, streamed. NAME is a Hub name or a local
              directory of data files (no colon in its path); an empty split means ``train``.
            - any other file: text. Lines that are exactly ``---`` part the prompts (one may also stand first
              or last in the file); without such a line, every line that is not blank is a prompt.
        column: which column holds the text, where there are columns; by default ``text``, else ``prompt``.
            Wins over a column named in ``source``. Of a list of strings in it (turns of a conversation) the first
            counts.
        limit: at most so many prompts, from the start. What follows is neither read nor checked, save that
            text and ``.json`` files are always read whole.

    Raises:
        InputError: limit < 1; the source cannot be read, has no such column or no prompts, or holds something
            that is no prompt: broken JSON or quotes, a row of another length than the header, a value that is no
            string, a blank text, bytes that are not UTF-8.
    """
    if limit is not None and limit < 1:
        raise InputError(f"limit is {limit}; it must be 1 or more (or left out, for all prompts)")
    source = BUILTIN if source is None else source
    prompts = list(islice(iter_prompts(source, column=column), limit))
    if not prompts:
        raise InputError(f"{source} holds no prompts")
    return prompts


def iter_prompts(source: str, *, column: str | None = None) -> Iterator[Prompt]:
    """Yield the prompts of a source one after another, reading only what is needed where its form allows.

    Raises:
        InputError: as ``load_prompts``, when the invalid part is reached.
    """
    for n, (where, value) in enumerate(_items(source, column), 1):
        yield Prompt(f"p{n:03d}", _checked(value, f"{source}, {where}"), source)


def _items(source: str, column: str | None) -> _Items:
    """Yield the raw values of a source, lazily where its form allows."""
    if source.startswith("hf:"):
        return _hub_items(source, column)
    if source not in (BUILTIN, "-"):
        _check_file(source)
        kind = os.path.splitext(source)[1].lower()
        if kind == ".parquet":
            return _parquet_items(source, column)
        if kind in _DELIMITERS:
            return _table_items(source, column, _DELIMITERS[kind])
        if kind in (".json", ".jsonl", ".ndjson"):
            return _pick(_json_rows(source) if kind == ".json" else _jsonl_rows(source), source, column)
    if column is not None:
        raise InputError(f"{source} has no columns to choose from; leave out the column {column!r}")
    if source == BUILTIN:
        return _builtin_items()
    if source == "-":
        if sys.stdin is None:
            raise InputError("there is no standard input to read the prompt from")
        text = _decoded(sys.stdin.buffer.read(), "standard input")
        return iter([("the whole input", text.removesuffix("\n").removesuffix("\r"))])
    return _text_items(_decoded(b"".join(_lines(source)), source))


def _first_turn(value: Any) -> Any:
    """Return the first of a list of strings (the turns of a conversation); any other value unchanged."""
    turns = isinstance(value, list) and bool(value) and all(isinstance(turn, str) for turn in value)
    return value[0] if turns else value


def _checked(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise InputError(f"{where}: a prompt must be a string, and this is {_kind(value)}")
    if not value.strip():
        raise InputError(f"{where}: the prompt is empty")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InputError(f"{where}: the prompt holds half a surrogate pair, which is no text") from None
    return value


def _kind(value: Any) -> str:
    return "null" if value is None else f"of type {type(value).__name__}"


def _check_file(path: str) -> None:
    if not os.path.exists(path):
        shown = path if len(path) <= 80 else path[:77] + "..."
        raise InputError(f"no such file: {shown!r}; prompts come from {_SOURCES}")
    if os.path.isdir(path):
        raise InputError(f"{path} is a directory; name a file in it, or 'hf:{path}' for all its data files")


def _lines(path: str) -> Iterator[bytes]:
    try:
        with open(path, "rb") as handle:
            yield from handle
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from None


def _decoded(data: bytes, what: str) -> str:
    return _utf8(data, what).removeprefix("\ufeff")  # without a byte order mark


def _utf8(data: bytes, what: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        at = f"byte 0x{data[error.start]:02x} at offset {error.start}"
        raise InputError(f"{what} is not UTF-8 text ({at}); convert it to UTF-8") from None


def _text_items(text: str) -> _Items:
    lines = text.removesuffix("\n").split("\n")  # splitlines would also split at form feeds and the like
    marks = [n for n, line in enumerate(lines) if line.removesuffix("\r") == SEPARATOR]
    if not marks:
        yield from ((f"line {n}", line.removesuffix("\r")) for n, line in enumerate(lines, 1) if line.strip())
        return
    for before, after in pairwise([-1, *marks, len(lines)]):
        block = lines[before + 1 : after]
        if block or (before >= 0 and after < len(lines)):
            yield f"the prompt at line {before + 2}", "\n".join(block).removesuffix("\r")


def _builtin_items() -> _Items:
    with resources.as_file(resources.files("hiddenlab").joinpath("data", "prompts.jsonl")) as path:
        yield from _pick(_jsonl_rows(str(path)), BUILTIN, None)


def _jsonl_rows(path: str) -> _Items:
    for n, line in enumerate(_lines(path), 1):
        if line.strip():
            yield f"line {n}", _parsed(line, f"{path}, line {n}")


def _json_rows(path: str) -> _Items:
    rows = _parsed(b"".join(_lines(path)), path)
    if not isinstance(rows, list):
        raise InputError(f"{path} should hold a list of objects or of strings, and it is {_kind(rows)}")
    yield from ((f"item {n}", row) for n, row in enumerate(rows, 1))


def _parsed(data: bytes, what: str) -> Any:
    try:
        return json.loads(_decoded(data, what))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{what} is not valid JSON: {error}") from None


def _table_items(path: str, column: str | None, delimiter: str) -> _Items:
    """Yield one column of a table whose first line names its columns."""
    rows = _table_rows(path, delimiter)
    header = next(rows, None)
    if header is None:
        return
    first, names = header
    what = f"{path}, line {first} (the names of the columns),"
    column = _column(names, what, column)
    if names.count(column) > 1:
        raise InputError(f"{what} has {names.count(column)} columns {column!r}")
    place = names.index(column)
    for line, row in rows:
        if len(row) != len(names):
            raise InputError(
                f"{path}, line {line}: {len(row)} fields, where there are {len(names)} columns; a field with a "
                f"{'tab' if delimiter == TAB else 'comma'} in it must stand in quotes"
            )
        yield f"line {line}", row[place]


def _table_rows(path: str, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the rows that are not blank, each with the line at which it starts."""
    reader = csv.reader(_table_lines(path), delimiter=delimiter, strict=True)
    while True:
        line = reader.line_num + 1
        try:
            row = next(reader, None)
        except csv.Error as error:
            raise InputError(f"{path}, line {line}: {_table_fault(str(error))}") from None
        if row is None:
            return
        if row:
            yield line, row


def _table_fault(said: str) -> str:
    """Return the parser's error in words that help."""
    if "field limit" in said:
        return (
            f"a field of more than {csv.field_size_limit():,} characters; is a quote not closed? "
            "(.jsonl takes longer prompts)"
        )
    if "new-line" in said:
        return "a carriage return outside of quotes, where lines end otherwise"
    if "end of data" in said:
        return "a quote is opened here and not closed"
    return f"the quotes are not balanced ({said}); a quote in a quoted field is written twice"


def _table_lines(path: str) -> Iterator[str]:
    """Yield lines with their ends, which a quoted field keeps."""
    for n, data in enumerate(_lines(path), 1):
        what = f"{path}, line {n}"
        text = _decoded(data, what) if n == 1 else _utf8(data, what)
        # Carriage returns alone end lines only where nothing else does.
        yield from _CARRIAGE_RETURN.split(text) if n == 1 and "\n" not in text else [text]


def _pick(rows: _Items, source: str, column: str | None) -> _Items:
    """Yield the text of each row: a string row itself, or its column (found in the first object)."""
    for where, row in rows:
        if isinstance(row, dict):
            column = _column(list(row), f"{source}, {where},", column)
            yield where, _first_turn(row[column])
        elif column is not None:
            raise InputError(f"{source}, {where}: no column {column!r}, this is {_kind(row)}")
        else:
            yield where, row


def _column(names: list[str], what: str, wanted: str | None) -> str:
    """Return the column to read: the requested one, otherwise the first default that exists."""
    chosen = [name for name in (DEFAULT_COLUMNS if wanted is None else [wanted]) if name in names]
    if chosen:
        return chosen[0]
    asked = "'text' or 'prompt'" if wanted is None else repr(wanted)
    raise InputError(f"{what} has no column {asked}; it has {', '.join(map(repr, names)) or 'none at all'}")


@contextmanager
def _loading(source: str, unreachable: str = "") -> Iterator[None]:
    """Turn any error of a loader into one line; such errors (network, hub, arrow ...) share no base class."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        hint = unreachable if isinstance(error, OSError) else ""
        raise InputError(f"cannot load {source}: {reason}{hint}") from None


def _parquet_items(path: str, column: str | None) -> _Items:
    with _loading(path):
        parquet: Any = import_module("pyarrow.parquet")
        with parquet.ParquetFile(path) as file:
            column = _column(file.schema_arrow.names, path, column)
            batches = file.iter_batches(batch_size=_BATCH_ROWS, columns=[column])
            values = (value for batch in batches for value in batch.column(column).to_pylist())
            yield from ((f"row {n}", _first_turn(value)) for n, value in enumerate(values, 1))


def _hub_items(source: str, column: str | None) -> _Items:
    parts = source.removeprefix("hf:").split(":")
    if not parts[0] or len(parts) > 4:
        raise InputError(f"{source!r} is not of the form 'hf:NAME[:config[:split[:column]]]'")
    name, config, split, own = parts + [""] * (4 - len(parts))
    with _loading(source, "; is NAME a data set on the Hub, or a local directory of data files?"):
        datasets: Any = import_module("datasets")
        data = datasets.load_dataset(name, config or None, split=split or "train", streaming=True)
        if names := data.column_names or list(next(iter(data), {})):
            column = _column(names, source, column if column is not None else own or None)
            rows = data.select_columns([column])  # so that images and audio beside it are not decoded
            yield from ((f"row {n}", _first_turn(row[column])) for n, row in enumerate(rows, 1))
