"""Read logs of OpenAI-style APIs: define their fields, and pair requests with responses.

A log holds requests with their responses, a line of JSON each, ``{"request": …, "response": …}``. Or it holds responses
alone, and the requests are in a file of their own: in the same order, or, for the output of the Batch API, under the
same ``custom_id``. Instead of a response may stand the chunks of a stream, as a list or as the text of the stream; a
file of responses may itself be such text. Fields are those of OpenAI's API and of vLLM's additions.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, field_validator, model_validator

from hiddenlab.defenses.verification import streams
from hiddenlab.errors import InputError
from hiddenlab.utils.schema import OPEN, check, lines, loads

MOST_CHOICES = 1024  # of a prompt
SUCCESS = 200  # HTTP
BOM = b"\xef\xbb\xbf"  # with which some programs begin a text file
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


class TextPart(_Open):
    """A text part of a message."""

    type: str
    text: str


class Message(_Open):
    """One message of a chat."""

    role: str | None = None
    content: str | list[TextPart] | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _texts_alone(cls, value: Any) -> Any:
        if value is None or isinstance(value, str):
            return value
        if not isinstance(value, list):
            raise ValueError("should be a text or a list of text parts")
        for part in value:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            if kind != "text":
                raise ValueError(f"holds a part that is no text but {kind!r}; only texts can be replayed")
        return value


class Request(_Open):
    """A client's request: a chat (``messages``), or completions of one or several prompts."""

    model: str | None = None
    temperature: float | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    echo: bool | None = None
    messages: list[Message] | None = None
    prompt: str | list[str] | list[int] | list[list[int]] | None = None

    @model_validator(mode="before")
    @classmethod
    def _merged(cls, value: Any) -> Any:
        """Put the fields of ``extra_body`` beside the others, as OpenAI's client does when it sends them."""
        if isinstance(value, dict) and isinstance(further := value.get("extra_body"), dict):
            return {**{name: part for name, part in value.items() if name != "extra_body"}, **further}
        return value

    @field_validator("prompt", mode="before")
    @classmethod
    def _of_one_kind(cls, value: Any) -> Any:
        if value is None or isinstance(value, str):
            return value
        entries = value if isinstance(value, list) else [value]
        kinds = {type(entry) for entry in entries}
        inner = {type(token) for entry in entries if isinstance(entry, list) for token in entry}
        if not isinstance(value, list) or kinds not in (set(), {str}, {int}, {list}) or not inner <= {int}:
            raise ValueError(
                "should be a text, a list of texts, a list of token ids, or a list of such lists"
            )
        return value


class Choice(_Open):
    """One answer. ``token_ids`` and ``prompt_token_ids`` are vLLM's, on request (``return_token_ids``)."""

    index: int | None = None
    message: Message | None = None
    text: str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    finish_reason: str | None = None
    logprobs: Any = None

    @property
    def drawn(self) -> list[str] | None:
        """The tokens as the log-probabilities write them; None where there are none."""
        parts = self.logprobs if isinstance(self.logprobs, dict) else {}
        tokens = parts.get("tokens")
        if isinstance(content := parts.get("content"), list):
            tokens = [entry.get("token") if isinstance(entry, dict) else None for entry in content]
        if not isinstance(tokens, list) or not tokens:
            return None
        return (
            [token for token in tokens if isinstance(token, str)]
            if all(isinstance(t, str) for t in tokens)
            else None
        )


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


class _Asked(_Open):
    request: Request


class _Answered(_Open):
    response: Response


class _BatchOutput(_Open):
    custom_id: str


class _BatchInput(_Open):
    custom_id: str
    body: dict[str, Any]


@dataclass(frozen=True)
class Exchange:
    """A request with its response.

    Attributes:
        where: file and line, for error messages.
        name: the log's name of the request, else the line's number.
        streamed: whether the response was put together from the chunks of a stream.
    """

    where: str
    name: str
    request: Request
    response: Response
    streamed: bool = False


@dataclass(frozen=True)
class Entry:
    """A request with what came back for it, not checked yet.

    Attributes:
        where: file and line, for error messages.
        name: its ``custom_id``; None where it has none.
        number: of its line.
        request, response: as the log has them; of a stream the list of its chunks.
        failure: what the server said instead of an answer; None where there is one.
    """

    where: str
    name: str | None
    number: int
    request: Any
    response: Any
    failure: str | None = None

    def exchange(self) -> Exchange:
        """Check the fields of request and response.

        Raises:
            InputError: one of them has not the form that it has to have; the message names the field.
        """
        request = check({"request": self.request}, _Asked, self.where).request
        value, streamed = self.response, isinstance(self.response, list)
        if streamed:
            value = streams.joined(value, self.where, echoed=bool(request.echo))
        elif isinstance(value, dict) and str(value.get("object")).endswith(".chunk"):
            raise InputError(
                f"{self.where}: the response is one chunk of a stream; all of them are needed, as a list"
            )
        response = check({"response": value}, _Answered, self.where).response
        return Exchange(self.where, self.name or response.id or str(self.number), request, response, streamed)


@dataclass(frozen=True)
class Log:
    """What a log holds.

    Attributes:
        entries: in the log's order.
        unanswered: the ``custom_id`` of each request of a batch of which the log says nothing.
    """

    entries: list[Entry]
    unanswered: list[str]


def read_log(path: Path, requests: Path | None = None) -> Log:
    """Read the requests and responses of a log.

    Args:
        path: the log.
        requests: the requests, where ``path`` holds responses alone.

    Raises:
        InputError: a file cannot be read, is no log, or requests and responses cannot be paired; the message names the
            line.
    """
    asked = None if requests is None else list(_values(requests))
    answers = list(_values(path))
    if not answers:
        raise InputError(f"{path} holds no responses")
    named = [isinstance(value, dict) and "custom_id" in value for _, value in answers]
    if any(named):
        return _batch(path, answers, requests, asked)
    whole = [isinstance(value, dict) and "request" in value for _, value in answers]
    if asked is not None and any(whole):
        number = answers[whole.index(True)][0]
        raise InputError(f"{path}, line {number} holds its request itself; leave --requests out")
    if asked is not None:
        return Log(_in_order(path, answers, requests, asked), [])
    entries = []
    for number, value in answers:
        where = f"{path}, line {number}"
        if not isinstance(value, dict) or not {"request", "response"} <= set(value):
            missing = "response" if isinstance(value, dict) and "request" in value else "request"
            raise InputError(
                f'{where} has no {missing}: a line is {{"request": …, "response": …}}; where it is a response alone, '
                "name the file of the requests with --requests"
            )
        entries.append(_entry(where, None, number, value["request"], value["response"], value.get("error")))
    return Log(entries, [])


def _entry(
    where: str, name: str | None, number: int, request: Any, response: Any, error: Any = None
) -> Entry:
    if isinstance(response, str) and streams.is_stream(response.encode(errors="replace")):
        text = enumerate(response.encode(errors="replace").split(b"\n"), 1)
        parts = [chunks for _, chunks in streams.streams(text, f"{where}, response")]
        if len(parts) != 1:
            raise InputError(f"{where}: the response is the text of {len(parts)} streams; a request has one")
        response = parts[0]
    return Entry(where, name, number, request, response, _failure(response, error))


def _failure(response: Any, error: Any) -> str | None:
    """Return what a server said in place of an answer, on one line; None where it answered."""
    for value in response if isinstance(response, list) else [response]:
        if isinstance(value, dict) and error in (None, "", {}):
            error = value.get("error") or (value if value.get("object") == "error" else None)
    if error in (None, "", {}):
        return "no response" if response is None else None
    message = error.get("message") if isinstance(error, dict) else error
    return message[:_SHOWN] if isinstance(message, str) else json.dumps(error)[:_SHOWN]


def _batch(
    path: Path, answers: list[tuple[int, Any]], requests: Path | None, asked: list[tuple[int, Any]] | None
) -> Log:
    """Pair the output of the Batch API with its input."""
    bodies = None if asked is None or requests is None else _bodies(requests, asked)
    entries: dict[str, Entry] = {}
    for number, value in answers:
        where = f"{path}, line {number}"
        if not isinstance(value, dict) or "custom_id" not in value:
            raise InputError(f"{where} has no custom_id, and other lines of the file have one")
        name = check(value, _BatchOutput, where).custom_id
        if bodies is None:
            raise InputError(
                f"{where} is of an output of the Batch API, which holds no requests; name its input with --requests"
            )
        if name not in bodies:
            raise InputError(f"{where}: no request has the custom_id {name!r}")
        if name in entries:
            raise InputError(f"{where}: the custom_id {name!r} stands twice")
        answer, error = value.get("response"), value.get("error")
        body = answer
        if isinstance(answer, dict):
            body, status = answer.get("body"), answer.get("status_code", SUCCESS)
            if status != SUCCESS and error is None:
                error = f"status {status}"
        entries[name] = _entry(where, name, number, bodies[name], body, error)
    return Log(list(entries.values()), [name for name in bodies or () if name not in entries])


def _bodies(path: Path, asked: list[tuple[int, Any]]) -> dict[str, Any]:
    bodies: dict[str, Any] = {}
    for number, value in asked:
        line = check(value, _BatchInput, f"{path}, line {number}")
        if line.custom_id in bodies:
            raise InputError(f"{path}, line {number}: the custom_id {line.custom_id!r} stands twice")
        bodies[line.custom_id] = line.body
    return bodies


def _in_order(
    path: Path, answers: list[tuple[int, Any]], requests: Path | None, asked: list[tuple[int, Any]]
) -> list[Entry]:
    """Pair responses with the requests of another file, which stand in the same order."""
    if len(asked) != len(answers):
        raise InputError(
            f"{path} holds {len(answers)} responses and {requests} {len(asked)} requests; each response needs its "
            "request, in the same order"
        )
    return [
        _entry(f"{path}, line {number}", None, number, request, response)
        for (number, response), (_, request) in zip(answers, asked, strict=True)
    ]


def _values(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield the values of a file with their line numbers: of each line of JSON, or the chunks of each stream."""
    numbered = ((number, line.removeprefix(BOM) if number == 1 else line) for number, line in lines(path))
    filled = ((number, line) for number, line in numbered if line.strip())
    first = next(filled, None)
    if first is None:
        return
    if streams.is_stream(first[1]):
        yield from streams.streams(chain([first], filled), str(path))
        return
    for number, line in chain([first], filled):
        if streams.is_stream(line):
            raise InputError(
                f"{path}, line {number} is a line of a stream (data: …), and the lines before are JSON"
            )
        if line.strip() in (b"{", b"["):
            raise InputError(
                f"{path}, line {number} begins a value of several lines; a log has one a line (see 'jq -c .')"
            )
        yield number, loads(line, f"{path}, line {number}")
