"""Read untrusted JSON strictly: bounded, checked against a form, with errors that name their place.

A form is a type: a dataclass, a TypedDict (of typing_extensions) or a pydantic model. Its annotations say which fields
there are, of which kind, and within which range. Everything that hiddenlab reads as JSON, or as metadata of a file,
comes through here, so that a damaged or hostile file ends as one ``InputError`` with file, line and field.

What is refused whatever the form: bytes that are not UTF-8, half a surrogate pair, a name that stands twice in one
object, NaN and infinity, numbers beyond 64 bits or beyond the range of float64, and more than 200 levels of nesting.
"""

import json
import math
import os
import re
import stat
from collections.abc import Hashable, Iterator
from functools import cache
from pathlib import Path
from typing import Annotated, Any, BinaryIO, TypeVar, cast

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import from_json

from hiddenlab.errors import HiddenlabError, InputError
from hiddenlab.text import visible

T = TypeVar("T")

# Configurations of a form (``__pydantic_config__``): unknown fields are errors, "1" is no number, nor is NaN.
CLOSED = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
OPEN = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

LARGEST = 2**31 - 1
MOST_THREADS = 1024  # each takes memory
MOST_POSITIONS = 2**20  # of a prompt
Positive = Annotated[int, Field(ge=1, le=LARGEST)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Threads = Annotated[int, Field(ge=1, le=MOST_THREADS)]
Count = Annotated[int, Field(ge=0, le=LARGEST)]
TokenId = Annotated[int, Field(ge=0, le=LARGEST)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Position = Annotated[int, Field(ge=0, lt=MOST_POSITIONS)]
Layer = Annotated[int, Field(ge=0, le=65536)]

LONGEST_FILE = 1 << 30  # bytes; no file of JSON here comes near it, and /dev/zero has more
LONGEST_LINE = 1 << 26
DEEPEST = 200  # levels of nesting, the parser's own bound
_SHOWN = 60  # characters of a wrong value
_DIGITS = 20  # of a whole number of 64 bits


def one_of(*names: str) -> AfterValidator:
    """Return a validator that allows these texts alone."""

    def known(name: str) -> str:
        if name not in names:
            raise ValueError(f"should be one of {', '.join(names)}")
        return name

    return AfterValidator(known)


def loads(data: bytes | str, where: str) -> Any:
    """Parse one JSON value by the rules above, without a form.

    Args:
        where: what an error names, such as ``"run/record.json"``.

    Raises:
        InputError: it is no JSON, or breaks a rule.
    """
    try:
        text = data.decode() if isinstance(data, bytes) else data
        value = json.loads(
            text,
            object_pairs_hook=_object,
            parse_int=_whole,
            parse_float=_fraction,
            parse_constant=_constant,
        )
    except UnicodeError:
        raise InputError(f"{where} is not UTF-8 text") from None
    except RecursionError:
        raise InputError(f"{where} is nested too deeply; {DEEPEST} levels are read") from None
    except json.JSONDecodeError as error:
        place = (
            f"line {error.lineno}, character {error.colno}"
            if error.lineno > 1
            else f"character {error.colno}"
        )
        raise InputError(
            f"{where} is no valid JSON: {_one_line(error.msg.removesuffix(' starting at'))} at {place}"
        ) from None
    except ValueError as error:
        raise InputError(f"{where} is no valid JSON: {_one_line(str(error))}") from None
    try:
        from_json(text.encode(), allow_inf_nan=False)
    except ValueError as error:  # errors that Python's own parser does not find
        if "recursion" in str(error):
            raise InputError(f"{where} is nested too deeply; {DEEPEST} levels are read") from None
        raise InputError(f"{where}: a text holds half of a surrogate pair, which is no character") from None
    return value


def parse(data: bytes | str, form: type[T], where: str, version: int | None = None) -> T:
    """Parse one JSON value and check it against a form.

    Args:
        version: the newest format version that is known, where the file names one; see ``check_format``.

    Raises:
        InputError: it is no JSON, has a newer version, or not that form; the message names the field.
    """
    value = loads(data, where)
    if version is not None:
        check_format(value, version, where)
    return _checked(data, form, where)


def check(value: Any, form: type[T], where: str) -> T:
    """Check a parsed JSON value against a form.

    Raises:
        InputError: it does not have that form; the message names the field.
    """
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"{where} should be JSON values: {error}") from None
    return _checked(text, form, where)


def check_format(value: Any, known: int, where: str) -> None:
    """Check the format version of a parsed file, so that a newer one gets a line that says so.

    Raises:
        InputError: there is no version, or this hiddenlab does not know it.
    """
    version = value.get("format") if isinstance(value, dict) else None
    if type(version) is not int or version < 1:
        raise InputError(f"{where} names no format version; it is damaged, or no file of this kind")
    if version > known:
        raise InputError(
            f"{where} has format {version}, this hiddenlab reads up to {known}; install a newer one"
        )


def read(path: Path, form: type[T]) -> T:
    """Read a file that holds one JSON value of a form.

    Raises:
        InputError: the file cannot be read, is no JSON, or does not have that form.
    """
    return parse(read_bytes(path), form, str(path))


def lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield a file's lines without their ends, with their numbers from 1.

    Raises:
        InputError: the file cannot be read, or a line is longer than 64 MiB.
    """
    try:
        with opened(path) as file:
            number = 0
            while line := file.readline(LONGEST_LINE + 1):
                number += 1
                if len(line) > LONGEST_LINE:
                    raise InputError(f"{path}, line {number} is longer than {LONGEST_LINE} bytes")
                yield number, line.removesuffix(b"\n")
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from None
    except ValueError:  # a null byte in the name
        raise InputError(f"cannot read {str(path)!r}: that is no name of a file") from None


def read_bytes(path: Path) -> bytes:
    """Read a whole file of bounded size.

    Raises:
        InputError: it cannot be read, or is larger than 1 GiB.
    """
    try:
        with opened(path) as file:
            data = file.read(LONGEST_FILE + 1)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from None
    except ValueError:
        raise InputError(f"cannot read {str(path)!r}: that is no name of a file") from None
    if len(data) > LONGEST_FILE:
        raise InputError(f"{path} is larger than {LONGEST_FILE} bytes; it is no file of hiddenlab's")
    return data


def opened(path: Path) -> BinaryIO:
    """Open a regular file for reading; a pipe could block its reader forever, and devices are refused too.

    Raises:
        OSError: it cannot be opened.
        InputError: it is no regular file.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise InputError(f"cannot read {path}: it is no regular file")
    return open(handle, "rb")


@cache
def _adapter(form: Any) -> Any:
    return TypeAdapter(form)


def _checked(data: bytes | str, form: type[T], where: str) -> T:
    try:
        return _adapter(cast(Hashable, form)).validate_json(data)
    except ValidationError as error:
        raise InputError(f"{where}{_complaint(error)}") from None
    except HiddenlabError as error:  # of a type's own checks
        raise InputError(f"{where}: {error}") from None


def _complaint(error: ValidationError) -> str:
    """Return the first error as ``, field: what``."""
    first = error.errors(include_url=False)[0]
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
    place = visible(place.removeprefix("."))[: 2 * _SHOWN]
    if first["type"] == "missing":
        return f": {place} is missing"
    if first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return f": {place} is unknown"
    message = _one_line(first["msg"].replace("Input should be", "should be").removeprefix("Value error, "))
    message = re.sub(r"^(List|Tuple|Dictionary|Set) should", "should", message)
    shown = visible(repr(first["input"]))
    shown = shown if len(shown) <= _SHOWN else shown[: _SHOWN - 1] + "…"
    return f": {place or 'the value'} {message}, and is {shown}"


def _one_line(text: str) -> str:
    return visible(text.partition("\n")[0])[:300]


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"the name {twice!r:.{_SHOWN}} stands twice in one object")
    return result


def _whole(text: str) -> int:
    if len(text) > _DIGITS or not -(2**63) <= (value := int(text)) < 2**64:
        raise ValueError(f"the number {text[:_DIGITS]}… is beyond 64 bits")
    return value


def _fraction(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:_DIGITS]} is beyond the range of float64")
    return value


def _constant(text: str) -> Any:
    raise ValueError(f"{text} is no number in JSON")
