"""Mutations of valid files: of bytes, of JSON values, and of JSON inside safetensors files."""

import json
import struct
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

ODD_TEXTS = (
    "0",
    "-1",
    "1e400",
    "-1e400",
    "NaN",
    "Infinity",
    "-Infinity",
    "null",
    "true",
    "false",
    '""',
    "[]",
    "{}",
    "1.5",
    "1e-400",
    "9" * 400,
    "-" + "9" * 25,
    "18446744073709551616",
    "2147483648",
    "4294967295",
    "200000000",
    "0.1",
    '"\\ud800"',
    '"\\u202e\\u001b]0;x\\u0007"',
    '"[bold]<script>alert(1)</script>"',
    '"../../../etc/passwd"',
    '"evil/model"',
    '"$\\\\frac$"',
    '"' + "x" * 5000 + '"',
    "[" * 300 + "]" * 300,
    '{"a":' * 300 + "1" + "}" * 300,
    "[" * 5000,
    "1" * 5000,
    '"shard:alpha=200000000,c=1,node=0"',
    '"random-prefix"',
    '"gaussian:sigma=1e308"',
)
ODD_BYTES = (
    b"\x00",
    b"\xff",
    b"\n",
    b"\r",
    b"\xef\xbb\xbf",
    b"{",
    b"}",
    b"[",
    b"]",
    b'"',
    b"\\",
    b",",
    b"1e999",
    b"\x1b[31m",
)
_MARK = "@fuzz@"


def mutated(data: bytes, others: Sequence[bytes], random: Random) -> bytes:
    """Change a valid file in one to three places; JSON, lines of JSON and safetensors headers mostly by structure."""
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        ways: list[Callable[[bytes, Random], bytes]] = [_bytes]
        if _header(data) is not None:
            ways += [_safetensors] * 4
        elif data[:1] in b"{[":
            ways += [_json_lines] * 4
        way = random.choice(ways)
        data = splice(data, random.choice(others), random) if random.random() < 0.05 else way(data, random)
    return data


def splice(data: bytes, other: bytes, random: Random) -> bytes:
    """The beginning of one file and the end of another."""
    return data[: random.randrange(len(data) + 1)] + other[random.randrange(len(other) + 1) :]


def _bytes(data: bytes, random: Random) -> bytes:
    at, size = random.randrange(len(data) + 1), random.choice((1, 1, 2, 4, 16, 200))
    kind = random.randrange(6)
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data[:at] + data[at + size :]
    if kind == 2:
        return data[: at + size] + data[at:]
    if kind == 3:
        return data[:at] + random.choice(ODD_BYTES) + data[at:]
    if kind == 4:
        return data[:at] + random.randbytes(size) + data[at + size :]
    flipped = bytearray(data)
    for _ in range(size if flipped else 0):
        flipped[random.randrange(len(flipped))] ^= 1 << random.randrange(8)
    return bytes(flipped)


def _json_lines(data: bytes, random: Random) -> bytes:
    """Change one value of one line (or of the whole file, where that is one value)."""
    try:
        json.loads(data)
        return _json(data, random)
    except (ValueError, RecursionError):
        lines = data.split(b"\n")
    at = random.randrange(len(lines))
    kind = random.randrange(8)
    if kind == 0:
        lines.insert(random.randrange(len(lines) + 1), lines[at])
    elif kind == 1:
        del lines[at]
    elif kind == 2:
        other = random.randrange(len(lines))
        lines[at], lines[other] = lines[other], lines[at]
    else:
        lines[at] = _json(lines[at], random)
    return b"\n".join(lines)


def _json(text: bytes, random: Random) -> bytes:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return _bytes(text, random)
    places = list(_places(value))
    holder, key = random.choice(places)
    odd = random.choice(ODD_TEXTS)
    kind = random.randrange(7)
    if holder is None:
        return odd.encode() + b"\n"
    if kind == 0:
        del holder[key]
        odd = ""
    elif kind == 1 and isinstance(holder, dict):
        holder[random.choice(("x", "format", "__class__", "", "é"))] = _MARK
    elif kind == 2 and isinstance(holder, list):
        holder.insert(random.randrange(len(holder) + 1), _MARK)
    elif kind == 3:
        holder[key] = random.choice(places)[0] or _MARK
    elif kind == 4 and isinstance(holder[key], int | float) and abs(holder[key]) < 2**64:
        holder[key] = random.choice(
            (holder[key] + 1, -holder[key], holder[key] * 1.0, holder[key] + 0.5, not holder[key])
        )
    else:
        holder[key] = _MARK
    try:
        written = json.dumps(value, separators=random.choice(((",", ":"), (", ", ": "))))
    except (ValueError, RecursionError):  # it holds itself
        return _bytes(text, random)
    if kind == 5 and isinstance(holder, dict):  # the same name once more
        written = written.replace("{", "{" + f"{json.dumps(key)}:{odd},", 1)
    return written.replace(f'"{_MARK}"', odd or "0").encode() + (b"\n" if text.endswith(b"\n") else b"")


def _places(value: Any) -> Any:
    yield None, None
    stack = [value]
    while stack:
        one = stack.pop()
        for key, inner in (
            one.items() if isinstance(one, dict) else enumerate(one) if isinstance(one, list) else ()
        ):
            yield one, key
            stack.append(inner)


def _header(data: bytes) -> int | None:
    """Bytes of a safetensors file's header, None for other files."""
    if len(data) < 9:
        return None
    (size,) = struct.unpack("<Q", data[:8])
    return size if 2 <= size <= len(data) - 8 and data[8:9] == b"{" else None


def _safetensors(data: bytes, random: Random) -> bytes:
    """Change the header, or JSON that stands as a text in its metadata; the rest of the file stays aligned."""
    size = _header(data)
    assert size is not None
    text, rest = data[8 : 8 + size], data[8 + size :]
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        return _bytes(data, random)
    metadata = header.get("__metadata__") if isinstance(header, dict) else None
    metadata = metadata if isinstance(metadata, dict) else {}
    inner = [key for key, value in metadata.items() if isinstance(value, str) and value[:1] == "{"]
    if inner and random.random() < 0.75:
        key = random.choice(inner)
        metadata[key] = _json(metadata[key].encode(), random).decode(errors="replace")
        new = json.dumps(header).encode()
    else:
        new = _json(text, random)
    new += b" " * (-len(new) % 8)
    return struct.pack("<Q", len(new)) + new + rest
