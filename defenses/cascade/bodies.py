"""Parse requests to the HTTP interface; every field is honoured or refused by name, and none is ignored."""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    Field,
    StringConstraints,
    ValidationError,
    model_validator,
)

from hiddenlab.errors import InputError
from hiddenlab.utils.schema import CLOSED, loads

MAX_STOPS, MAX_STOP_LENGTH = 4, 200
# Fields of OpenAI's interface that are not offered: null means the default, anything else is refused.
NOT_OFFERED = (
    "audio", "function_call", "functions", "logit_bias", "max_completion_tokens", "metadata", "modalities",
    "parallel_tool_calls", "prediction", "reasoning_effort", "response_format", "service_tier", "store", "suffix",
    "tool_choice", "tools", "top_logprobs", "web_search_options",
)  # fmt: skip

Count = Annotated[int, Field(ge=1, lt=2**31)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Stop = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP_LENGTH)]


def _only_false(value: bool) -> bool:
    if value:
        raise ValueError("Input should be false")
    return value


OnlyFalse = Annotated[bool, AfterValidator(_only_false)]
Zero = Annotated[float, Field(ge=0, le=0)]


class RequestError(InputError):
    """A request is not understood.

    Attributes:
        field: the field at fault, None where it is the whole body.
    """

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class _Strict(BaseModel):
    model_config = CLOSED


class StreamOptions(_Strict):
    include_usage: bool = False


class Body(_Strict):
    """The fields that completions and chat share.

    Some fields allow one value only, which changes nothing; clients send them by default.
    """

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        """Remove known fields that are null, so that they take their default."""
        if not isinstance(data, dict):
            return data
        return {k: v for k, v in data.items() if v is not None or k not in (*cls.model_fields, *NOT_OFFERED)}

    model: str
    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0, lt=2**31)] = 0
    seed: Annotated[int | None, Field(ge=-(2**63), lt=2**63)] = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] = []
    n: Annotated[int, Field(ge=1, le=1)] = 1
    frequency_penalty: Zero = 0.0
    presence_penalty: Zero = 0.0
    user: str | None = None

    @model_validator(mode="after")
    def _streamed(self) -> "Body":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options goes with stream: true")
        return self

    @property
    def stops(self) -> list[str]:
        """Texts that end the answer."""
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def wanted(self) -> int | None:
        """The number of tokens asked for; None where the request does not say."""
        return self.max_tokens


class CompletionBody(Body):
    prompt: str | list[TokenId]
    best_of: Annotated[int, Field(ge=1, le=1)] = 1
    echo: OnlyFalse = False
    logprobs: None = None


class Part(_Strict):
    type: Literal["text"]
    text: str


class Turn(_Strict):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Part]

    def text(self) -> str:
        """Return the content as one text."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class ChatBody(Body):
    messages: Annotated[list[Turn], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: OnlyFalse = False

    @model_validator(mode="after")
    def _one_limit(self) -> "ChatBody":
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("max_tokens and max_completion_tokens are one limit; give one of them")
        return self

    @property
    def wanted(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


B = TypeVar("B", bound=Body)
# Error messages for fields with more than one form, and the fields that allow one value only.
RULES = {
    "prompt": "give one text, or one list of token ids",
    "stop": f"give up to {MAX_STOPS} texts of 1 to {MAX_STOP_LENGTH} characters",
    "messages.content": "give one text, or a list of parts of type text; only text can be read",
}
ONE_VALUE = ("n", "best_of", "echo", "logprobs", "frequency_penalty", "presence_penalty")


def parse(kind: type[B], content: bytes) -> B:
    """Parse the body of a request.

    Raises:
        RequestError: it is no JSON object, or a field is wrong, missing, or not offered; the message names it.
    """
    try:
        data = loads(content, "the body")
    except InputError as error:
        raise RequestError(str(error)) from None
    if not isinstance(data, dict):
        raise RequestError("the body must be one JSON object")
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise _fault(error) from None


def _fault(error: ValidationError) -> RequestError:
    """Return the first fault as one line that names the field."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    place, kind, text = first["loc"], first["type"], first["msg"].removeprefix("Value error, ")
    if kind == "extra_forbidden":
        where = ".".join(map(str, place))
        return RequestError(f"{_shown(where)} is not offered", where)
    for field, rule in RULES.items():
        names = field.split(".")
        if kind != "missing" and [part for part in place if isinstance(part, str)][: len(names)] == names:
            # The rest of the place is the form that was tried, which does not belong to the name.
            where = ".".join(map(str, place[: place.index(names[-1]) + 1]))
            return RequestError(f"{where}: {rule}", where)
    where = ".".join(map(str, place))
    if where in ONE_VALUE:
        return RequestError(f"{where} is not offered: {text}", where)
    return RequestError(f"{where}: {text}" if where else text, where or None)


def _shown(name: str) -> str:
    return name if len(name) <= 60 else f"{name[:60]}…"
