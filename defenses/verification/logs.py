"""Read logs of OpenAI-style APIs: define their fields, and pair requests with responses.

A log is a JSONL file. A line is ``{"request": …, "response": …}``, or a line of the Batch API's output; its request is
in the batch's input file under the same ``custom_id``. Fields are those of OpenAI's API and of vLLM's additions.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, Field

from hiddenlab.errors import InputError
from hiddenlab.utils.schema import CLOSED, OPEN, check, lines, loads

MOST_CHOICES = 1024  # of a prompt
SUCCESS = 200  # HTTP
_SHOWN = 200  # characters of foreign text that an error message shows


class _Open(BaseModel):
    """A model that keeps unknown fields; the code that interprets the rest decides which of them are allowed."""

    model_config = OPEN

    @property
    def further(self) -> dict[str, Any]:
        """The unknown fields that are not empty."""
        return {
            name: value for name, value in (self.model_extra or {}).items() if value not in (None, "", [], {})
        }


class _Closed(BaseModel):
    model_config = CLOSED


class TextPart(_Closed):
    """A text part of a message."""

    type: Literal["text"]
    text: str


class Message(_Open):
    """One message of a chat."""

    role: str | None = None
    content: str | list[TextPart] | None = None


class Request(_Open):
    """A client's request: a chat (``messages``), or completions of one or several prompts."""

    model: str | None = None
    temperature: float | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    messages: list[Message] | None = None
    prompt: str | list[str] | list[int] | list[list[int]] | None = None


class Choice(_Open):
    """One answer. ``token_ids`` and ``prompt_token_ids`` are vLLM's, on request (``return_token_ids``)."""

    index: int | None = None
    message: Message | None = None
    text: str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    finish_reason: str | None = None


class Details(_Open):
    """The number of drawn tokens that were reasoning."""

    reasoning_tokens: int | None = None


class Usage(_Open):
    """The numbers of tokens that were read and drawn, over all choices."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    completion_tokens_details: Details | None = None


class Response(_Open):
    """The server's response."""

    id: str | None = None
    model: str | None = None
    choices: list[Choice]
    prompt_token_ids: list[int] | None = None
    usage: Usage | None = None


class _Pair(_Closed):
    request: Request
    response: Response


class _Answered(_Open):
    status_code: int = SUCCESS
    body: Response


class _BatchOutput(_Open):
    custom_id: str
    response: _Answered


class _BatchInput(_Open):
    custom_id: str
    body: Request


@dataclass(frozen=True)
class Exchange:
    """A request with its response.

    Attributes:
        where: file and line, for error messages.
        name: the log's name of the request, else the line's number.
    """

    where: str
    name: str
    request: Request
    response: Response


def exchanges(path: Path, requests: Path | None = None) -> Iterator[Exchange]:
    """Read the requests and responses of a log.

    Args:
        path: the log.
        requests: the input of the Batch API, where ``path`` is its output.

    Raises:
        InputError: a file cannot be read, or a line is no request with its response; the message names it.
    """
    asked = None if requests is None else _asked(requests)
    for number, value in _values(path):
        where = f"{path}, line {number}"
        if isinstance(value, dict) and "custom_id" in value:
            yield _batched(value, asked, where)
        elif asked is not None:
            raise InputError(f"{where} has no custom_id; with --requests, FILE is an output of the Batch API")
        else:
            pair = _checked(value, _Pair, where)
            yield Exchange(where, pair.response.id or str(number), pair.request, pair.response)


def unanswered(path: Path, requests: Path) -> list[str]:
    """Return the ``custom_id`` of each request of a batch that has no line in its output.

    Raises:
        InputError: as ``exchanges`` does.
    """
    answered = {value["custom_id"] for _, value in _values(path)}
    return [name for name in _asked(requests) if name not in answered]


def _batched(value: dict[str, Any], asked: dict[str, Request] | None, where: str) -> Exchange:
    error, answered = value.get("error"), value.get("response")
    status = answered.get("status_code", SUCCESS) if isinstance(answered, dict) else SUCCESS
    if error is not None or status != SUCCESS:
        detail = json.dumps(status if error is None else error)[:_SHOWN]
        raise InputError(f"{where}: the request failed ({detail}) and has no answer; remove the line")
    line = _checked(value, _BatchOutput, where)
    if asked is None:
        raise InputError(
            f"{where} is of an output of the Batch API, which holds no requests; name its input with --requests"
        )
    if line.custom_id not in asked:
        raise InputError(f"{where}: no request has the custom_id {line.custom_id!r}")
    return Exchange(where, line.custom_id, asked[line.custom_id], line.response.body)


def _asked(path: Path) -> dict[str, Request]:
    requests: dict[str, Request] = {}
    for number, value in _values(path):
        line = _checked(value, _BatchInput, f"{path}, line {number}")
        if line.custom_id in requests:
            raise InputError(f"{path}, line {number}: the custom_id {line.custom_id!r} stands twice")
        requests[line.custom_id] = line.body
    return requests


def _values(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield the values of a JSONL file with their line numbers."""
    for number, line in lines(path):
        if line.strip():
            yield number, loads(line, f"{path}, line {number}")


_F = TypeVar("_F", bound=BaseModel)


def _checked(value: Any, form: type[_F], where: str) -> _F:
    try:
        return check(value, form, where)
    except InputError as error:
        raise InputError(f"no request with its response: {error}") from None
