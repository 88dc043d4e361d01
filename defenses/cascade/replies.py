"""Write answers and errors in the form of OpenAI's interface: whole, or as server-sent events."""

import json
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from starlette.responses import JSONResponse

from hiddenlab.defenses.cascade.bodies import Body, ChatBody
from hiddenlab.defenses.cascade.decoding import TokenTexts
from hiddenlab.defenses.cascade.service import Answer, Piece, Queue, TokenNote
from hiddenlab.errors import HiddenlabError


class Form:
    """The form of one reply.

    Args:
        body: of the request.
        model: under which name the model is served.
        texts: of single tokens.
    """

    def __init__(self, body: Body, model: str, texts: TokenTexts) -> None:
        self.body, self.chat, self._texts = body, isinstance(body, ChatBody), texts
        self._about = {
            "id": f"{'chatcmpl' if self.chat else 'cmpl'}-{uuid.uuid4().hex[:24]}",
            "created": int(time.time()),
            "model": model,
        }

    async def whole(self, answers: Sequence[Answer], queue: Queue) -> JSONResponse:
        """Return all answers once they have ended.

        Raises:
            Exception: the error that ended one of them.
        """
        texts, notes = [""] * len(answers), [list[TokenNote]() for _ in answers]
        async for piece in _from(queue):
            if isinstance(piece, Piece):
                texts[piece.index] += piece.text
                notes[piece.index] += piece.notes
        choices = []
        for answer, text, said in zip(answers, texts, notes, strict=True):
            choice: dict[str, Any] = {"index": answer.index, "finish_reason": answer.finish}
            choice["logprobs"] = self._logprobs(said, len(text))
            if self.chat:
                choice["message"] = {"role": "assistant", "content": text}
            else:
                choice["text"] = text
            choices.append(choice)
        kind = "chat.completion" if self.chat else "text_completion"
        return JSONResponse(self._about | {"object": kind, "choices": choices, "usage": _usage(answers)})

    async def events(self, answers: Sequence[Answer], queue: Queue) -> AsyncIterator[str]:
        """Yield the server-sent events of streamed answers; an error is the last event of its stream."""
        about = self._about | {"object": "chat.completion.chunk" if self.chat else "text_completion"}
        options = self.body.stream_options
        if options is not None and options.include_usage:
            about["usage"] = None  # as in OpenAI's chunks before the last

        def chunk(index: int, delta: dict[str, Any], text: str, **more: Any) -> str:
            choice: dict[str, Any] = {"index": index, "finish_reason": None, "logprobs": None, **more}
            choice |= {"delta": delta} if self.chat else {"text": text}
            return _event(about | {"choices": [choice]})

        try:
            if self.chat:
                for answer in answers:
                    yield chunk(answer.index, {"role": "assistant", "content": ""}, "")
            given = [0] * len(answers)
            async for item in _from(queue):
                if isinstance(item, Answer):
                    yield chunk(item.index, {}, "", finish_reason=item.finish)
                    continue
                given[item.index] += len(item.text)
                said = self._logprobs(item.notes, given[item.index])
                yield chunk(item.index, {"content": item.text}, item.text, logprobs=said)
            if options is not None and options.include_usage:
                yield _event(about | {"choices": [], "usage": _usage(answers)})
            yield "data: [DONE]\n\n"
        except Exception as error:
            text = str(error) if isinstance(error, HiddenlabError) else failed(error)
            yield _event(json.loads(bytes(problem(503, text, kind="server_error").body)))

    def _logprobs(self, notes: Sequence[TokenNote], length: int) -> dict[str, Any] | None:
        """Return log-probabilities in the form of chat or completions; None where none were asked for.

        Args:
            notes: one for each token.
            length: characters of the answer; tokens that only a stop text removed begin at its end.
        """
        if self.body.likeliest is None:
            return None
        if self.chat:
            return {
                "content": [
                    self._entry(note.token, note.logprob)
                    | {"top_logprobs": [self._entry(token, value) for token, value in note.likeliest]}
                    for note in notes
                ],
                "refusal": None,
            }
        name = self._texts.text_of
        return {
            "tokens": [name(note.token) for note in notes],
            "token_logprobs": [note.logprob for note in notes],
            "top_logprobs": [
                # With the generated token, which may be none of the likeliest.
                {name(token): value for token, value in [*note.likeliest, (note.token, note.logprob)]}
                for note in notes
            ]
            if self.body.likeliest
            else None,
            "text_offset": [min(note.offset, length) for note in notes],
        }

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        found = self._texts.bytes_of(token)
        return {
            "token": self._texts.text_of(token),
            "logprob": logprob,
            "bytes": None if found is None else list(found),
        }


async def _from(queue: Queue) -> AsyncIterator[Piece | Answer]:
    while (item := await queue.get()) is not None:
        if isinstance(item, BaseException):
            raise item
        yield item


def _event(data: Any) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"


def _usage(answers: Sequence[Answer]) -> dict[str, int]:
    prompt = sum(answer.prompt_tokens for answer in answers)
    completion = sum(answer.tokens for answer in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def failed(error: Exception) -> str:
    """Return what a client is told of a server fault: the kind of error, and nothing about its content."""
    return f"the server failed: {type(error).__name__}"


def problem(
    status: int,
    message: str,
    *,
    kind: str = "invalid_request_error",
    param: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    """Return an error in the form that OpenAI's clients read, on one line."""
    return JSONResponse(
        {"error": {"message": _line(message), "type": kind, "param": param and _line(param), "code": None}},
        status_code=status,
        headers=headers and dict(headers),
    )


def _line(text: str) -> str:
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text)
