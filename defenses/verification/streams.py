"""Read the streamed answers of OpenAI-style APIs: split saved streams, and put the chunks of one together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from pydantic import BaseModel, Field

from hiddenlab.errors import InputError
from hiddenlab.utils.schema import OPEN, check, loads

STARTS = (b"data:", b"event:", b"id:", b"retry:", b":")  # how a line of server-sent events begins
DONE = b"[DONE]"


class _Open(BaseModel):
    model_config = OPEN


class _Delta(_Open):
    content: str | None = None


class _Choice(_Open):
    index: int = 0
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    logprobs: Any = None


class _Chunk(_Open):
    id: str | None = None
    model: str | None = None
    choices: list[_Choice] = Field(default_factory=list)
    prompt_token_ids: list[int] | None = None
    usage: dict[str, Any] | None = None


class _Chunks(_Open):
    response: list[_Chunk]


def is_stream(line: bytes) -> bool:
    """Return whether a line is one of server-sent events, and not JSON."""
    return line.lstrip().startswith(STARTS)


def streams(lines: Iterable[tuple[int, bytes]], where: str) -> Iterator[tuple[int, list[Any]]]:
    """Split server-sent events into streams, each with the number of its first line.

    A stream ends with ``data: [DONE]``. One that was cut off ends where a chunk has another id.

    Args:
        where: the file's name in errors.

    Raises:
        InputError: a line is no event, or holds no JSON; the message names it.
    """
    chunks: list[Any] = []
    start, name = 0, None
    for number, line in lines:
        place = f"{where}, line {number}"
        if not line.strip():
            continue
        if not is_stream(line):
            raise InputError(f"{place} is no line of a stream (data: …), as the lines before are")
        head, _, data = line.strip().partition(b":")
        if head != b"data" or not data.strip():
            continue
        chunk = None if data.strip() == DONE else loads(data.strip(), place)
        other = (chunk.get("id") or None) if isinstance(chunk, dict) else None
        if chunks and (chunk is None or (None not in (name, other) and name != other)):
            yield start, chunks
            chunks, name = [], None
        if chunk is not None:
            start = start if chunks else number
            name = name if other is None else other
            chunks.append(chunk)
    if chunks:
        yield start, chunks


def joined(chunks: Sequence[Any], where: str, *, echoed: bool = False) -> dict[str, Any]:
    """Put the chunks of one stream together, to the response that it would have been without streaming.

    Args:
        where: names the stream in errors. echoed: whether the request asked for its prompt, whose chunk has no ids.

    Raises:
        InputError: something is no chunk, chunks are of several answers, or only some of them have token ids.
    """
    parts = check({"response": list(chunks)}, _Chunks, where).response
    for field in ("id", "model"):
        values = sorted({value for part in parts if (value := getattr(part, field))})
        if len(values) > 1:
            raise InputError(
                f"{where}: its chunks are of several answers, with {field} {values[0]!r} and {values[1]!r}"
            )
    by_index: defaultdict[int, list[_Choice]] = defaultdict(list)
    for part in parts:
        for choice in part.choices:
            by_index[choice.index].append(choice)
    # Usage that comes with a choice may be of this choice alone.
    usage = [part.usage for part in parts if part.usage and (not part.choices or len(by_index) == 1)]
    return {
        "id": _first(part.id or None for part in parts),
        "model": _first(part.model or None for part in parts),
        "choices": [_choice(index, by_index[index], where, echoed) for index in sorted(by_index)],
        "prompt_token_ids": _first(part.prompt_token_ids for part in parts),
        "usage": usage[-1] if usage else None,
    }


def _choice(index: int, parts: Sequence[_Choice], where: str, echoed: bool) -> dict[str, Any]:
    ids: list[int] | None = None
    if any(part.token_ids is not None for part in parts):
        ids = [token for part in parts for token in part.token_ids or ()]
        if not echoed and any(part.token_ids is None and _drawn(part) for part in parts):
            raise InputError(
                f"{where}: of choice {index} some chunks have token_ids and others text alone, so that ids are missing"
            )
    made: dict[str, Any] = {}
    for part in parts:
        made |= {name: value for name, value in (part.model_extra or {}).items() if name not in made or value}
    made |= {
        "index": index, "token_ids": ids, "logprobs": _logprobs([part.logprobs for part in parts]),
        "prompt_token_ids": _first(part.prompt_token_ids for part in parts),
        "finish_reason": _first(part.finish_reason for part in reversed(parts)),
    }  # fmt: skip
    deltas = [part.delta for part in parts if part.delta is not None]
    if deltas:
        message: dict[str, Any] = {}
        for delta in deltas:
            for name, value in delta.model_dump().items():
                before = message.get(name)
                if name == "role" or not isinstance(value, str) or not isinstance(before, str):
                    message[name] = before if value is None else value
                else:
                    message[name] = before + value
        made["message"] = message
    texts = [part.text for part in parts if part.text is not None]
    return made | ({"text": "".join(texts)} if texts else {})


def _drawn(part: _Choice) -> bool:
    """Return whether a chunk shows something that was drawn."""
    fields = {} if part.delta is None else part.delta.model_dump()
    return bool(part.text) or any(value for name, value in fields.items() if name != "role")


def _logprobs(parts: Sequence[Any]) -> dict[str, list[Any]] | None:
    """Put lists of log-probabilities together; None where a chunk's are of another form."""
    made: dict[str, list[Any]] = {}
    for part in parts:
        if part is None:
            continue
        if not isinstance(part, dict):
            return None
        for name, values in part.items():
            if isinstance(values, list):
                made.setdefault(name, []).extend(values)
    return made or None


def _first(values: Iterable[Any]) -> Any:
    return next((value for value in values if value is not None), None)
