"""Parse requests to the HTTP interface; every field is honoured or refused by name, and none is ignored."""

import json
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

MAX_STOPS, MAX_STOP_LENGTH, MAX_LOGPROBS, MAX_TOOLS = 4, 200, 20, 128
# Fields of OpenAI's interface that are not offered: null means the default, anything else is refused.
NOT_OFFERED = (
    "audio", "function_call", "functions", "metadata", "moderation", "prediction", "prompt_cache_options",
    "prompt_cache_retention", "reasoning_effort", "suffix", "verbosity", "web_search_options",
)  # fmt: skip
# Fields of a message that clients send back as they got them. They say nothing where they are null or empty.
ECHOED = ("annotations", "audio", "function_call", "reasoning_content", "refusal")

Count = Annotated[int, Field(ge=1, lt=2**31)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Stop = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP_LENGTH)]
Name = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
Logprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
TokenKey = Annotated[str, StringConstraints(pattern=r"^\d{1,10}$")]


def _only(allowed: Any) -> AfterValidator:
    """Return a validator that allows one value: the one that changes nothing."""

    def check(value: Any) -> Any:
        if value != allowed:
            raise ValueError(f"Input should be {json.dumps(allowed)}")
        return value

    return AfterValidator(check)


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
    include_obfuscation: Annotated[bool, _only(False)] = False


class Body(_Strict):
    """The fields that completions and chat share.

    A field that is None takes the model's default, or OpenAI's. Some fields allow one value only, which changes
    nothing; clients send them by default.
    """

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        """Remove fields of OpenAI's interface that are null, so that they take their default."""
        if not isinstance(data, dict):
            return data
        known = {*CompletionBody.model_fields, *ChatBody.model_fields, *NOT_OFFERED}
        return {k: v for k, v in data.items() if v is not None or k not in known}

    model: str
    max_tokens: Count | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] = 0
    temperature: Annotated[float | None, Field(ge=0, le=2)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    top_k: Annotated[int | None, Field(ge=-1, lt=2**31)] = None
    min_p: Annotated[float | None, Field(ge=0, le=1)] = None
    repetition_penalty: Annotated[float | None, Field(gt=0, le=100)] = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    logit_bias: dict[TokenKey, Annotated[float, Field(ge=-100, le=100)]] = {}
    seed: Annotated[int | None, Field(ge=-(2**63), lt=2**63)] = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] = []
    stop_token_ids: list[TokenId] = []
    ignore_eos: bool = False
    n: Annotated[int, Field(ge=1, le=128)] = 1
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: Literal["auto", "default"] | None = None
    store: Annotated[bool, _only(False)] = False

    @model_validator(mode="after")
    def _together(self) -> "Body":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options goes with stream: true")
        if self.wanted is not None and self.min_tokens > self.wanted:
            raise ValueError(f"min_tokens is {self.min_tokens}, and the answer may have {self.wanted} tokens")
        return self

    @property
    def stops(self) -> list[str]:
        """Texts that end the answer."""
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def wanted(self) -> int | None:
        """The number of tokens asked for; None where the request does not say."""
        return self.max_tokens

    @property
    def likeliest(self) -> int | None:
        """The number of likeliest tokens whose log-probabilities are asked for; None for no log-probabilities."""
        return None

    @property
    def biases(self) -> dict[int, float]:
        """What is added to the logits of token ids."""
        return {int(token): bias for token, bias in self.logit_bias.items()}


class CompletionBody(Body):
    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
    best_of: int | None = None
    echo: Annotated[bool, _only(False)] = False
    logprobs: Logprobs | None = None

    @model_validator(mode="after")
    def _no_best(self) -> "CompletionBody":
        if self.best_of not in (None, self.n):
            raise ValueError(f"best_of is not offered: Input should be {self.n}, as n")
        return self

    @property
    def likeliest(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts; each gets its own answers."""
        prompt: Any = self.prompt
        several = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
        return prompt if several else [prompt]


class Part(_Strict):
    type: Literal["text"]
    text: str


class CalledFunction(_Strict):
    name: Name
    arguments: str


class ToolCall(_Strict):
    """A call of a tool by the model, in a conversation so far."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction

    def rendered(self) -> dict[str, Any]:
        """Return the call as chat templates take it: its arguments as an object.

        Raises:
            InputError: the arguments are no JSON object.
        """
        arguments = loads(self.function.arguments or "{}", "the arguments")
        if not isinstance(arguments, dict):
            raise InputError("no object")
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": self.type, "function": function}


class Turn(_Strict):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part]
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _echoed(cls, data: Any) -> Any:
        """Remove what says nothing; a message that calls tools needs no content."""
        if not isinstance(data, dict):
            return data
        data = {name: value for name, value in data.items() if name not in ECHOED or value not in (None, [])}
        if data.get("tool_calls") == []:
            data["tool_calls"] = None
        if data.get("role") == "assistant" and data.get("tool_calls") and data.get("content") is None:
            data["content"] = ""
        return data

    @model_validator(mode="after")
    def _of_its_role(self) -> "Turn":
        if self.tool_calls is not None and self.role != "assistant":
            raise ValueError(f"tool_calls goes with the role assistant, not {self.role}")
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise ValueError("tool_call_id goes with the role tool, which needs it")
        for call in self.tool_calls or ():
            try:
                call.rendered()
            except InputError:
                raise ValueError("tool_calls: the arguments must be a JSON object, as a text") from None
        return self

    def rendered(self) -> dict[str, Any]:
        """Return the message as chat templates take it."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        found: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": text,
        }
        if self.tool_calls:
            found["tool_calls"] = [call.rendered() for call in self.tool_calls]
        for name in ("name", "tool_call_id"):
            if (value := getattr(self, name)) is not None:
                found[name] = value
        return found


class Function(_Strict):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Annotated[bool, _only(False)] | None = None


class Tool(_Strict):
    """A function that the model is told of."""

    type: Literal["function"]
    function: Function


class TextFormat(_Strict):
    type: Literal["text"]


class ChatBody(Body):
    messages: Annotated[list[Turn], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: Logprobs | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] = []
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: Annotated[bool, _only(True)] | None = None
    chat_template_kwargs: dict[str, Any] = {}
    response_format: TextFormat | None = None
    modalities: Annotated[list[str], _only(["text"])] | None = None

    @model_validator(mode="after")
    def _goes_together(self) -> "ChatBody":
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("max_tokens and max_completion_tokens are one limit; give one of them")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs goes with logprobs: true")
        for field in ("tool_choice", "parallel_tool_calls"):
            if getattr(self, field) is not None and not self.tools:
                raise ValueError(f"{field} goes with tools")
        called: set[str] = set()
        for i, turn in enumerate(self.messages):
            if turn.tool_call_id is not None and turn.tool_call_id not in called:
                raise ValueError(f"messages.{i}.tool_call_id is of no call in the messages before it")
            called |= {call.id for call in turn.tool_calls or ()}
        return self

    @property
    def wanted(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def likeliest(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def told(self) -> list[dict[str, Any]]:
        """The tools that the model is told of, as chat templates take them."""
        return (
            [] if self.tool_choice == "none" else [tool.model_dump(exclude_none=True) for tool in self.tools]
        )


B = TypeVar("B", bound=Body)
# Error messages for fields with more than one form, and the fields that allow one value only.
RULES = {
    "prompt": "give one text, a list of texts, one list of token ids, or a list of such lists",
    "stop": f"give up to {MAX_STOPS} texts of 1 to {MAX_STOP_LENGTH} characters",
    "messages.content": "give one text, or a list of parts of type text; only text can be read",
    "logit_bias": "give an object from token ids, as texts, to numbers from -100 to 100",
    "tool_choice": "give none or auto; a call cannot be forced",
    "response_format": "only the type text is offered",
}
ONE_VALUE = ("echo", "store", "parallel_tool_calls", "modalities", "service_tier")


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
    if kind == "value_error":  # a rule between fields; its text names them first
        named = text.split()[0].rstrip(":")
        inner = f"{where}.{named}" if where else named
        known = not where or named in Turn.model_fields
        return RequestError(f"{where}: {text}" if where else text, inner if known else where)
    return RequestError(f"{where}: {text}" if where else text, where or None)


def _shown(name: str) -> str:
    return name if len(name) <= 60 else f"{name[:60]}…"
