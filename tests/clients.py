"""Ask the HTTP interface in the shapes that clients send, and print which are answered: ``python -m tests.clients``.

A tiny model is served on this machine and asked by raw HTTP and by the ``openai`` package. LiteLLM needs packages that
the development set-up lacks: the environment variable ``LITELLM_PYTHON`` names an interpreter that has it. Open WebUI's
shapes are those that its backend sends, without Open WebUI itself.
"""

import http.client
import inspect
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from hiddenlab.defenses.cascade.api import digest, make_app
from hiddenlab.defenses.cascade.defaults import Defaults
from hiddenlab.defenses.cascade.load import load_cascade_model
from hiddenlab.defenses.cascade.local import LocalCascade
from hiddenlab.defenses.cascade.testing import NAME, make_service
from hiddenlab.testing import VOCABULARY, byte_tokenizer, save_tiny

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
KEY, PATIENCE = "sk-clients", 30.0
PYTHON = os.environ.get("LITELLM_PYTHON")
TEMPLATE = (
    "{% for tool in tools or [] %}<tool>{{ tool | tojson }}</tool>{% endfor %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<call>{{ call.function | tojson }}</call>{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% if think is defined %}{{ think }}{% endif %}{% endif %}"
)
USER = [{"role": "user", "content": "Say it."}]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tell the weather of a place.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}
CALLED = [
    {"role": "user", "content": "How is it in Rome?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "c1",
                "type": "function",
                "function": {"name": "weather", "arguments": '{"place": "Rome"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "Dry."},
]


@dataclass(frozen=True)
class Shape:
    """One shape of request.

    Attributes:
        name: as the table shows it.
        fields: beside the model.
        chat: of chat, else of completions.
        field: that a refusal must name; None where it must be answered.
    """

    name: str
    fields: Mapping[str, Any]
    chat: bool = True
    field: str | None = None

    @property
    def path(self) -> str:
        return CHAT if self.chat else COMPLETIONS


GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 6}
SHAPES = [
    Shape("prompt: a text", GREEDY | {"prompt": "Say it. "}, chat=False),
    Shape("prompt: several texts", GREEDY | {"prompt": ["Say it. ", "Go on."]}, chat=False),
    Shape("prompt: token ids", GREEDY | {"prompt": [51, 68, 75]}, chat=False),
    Shape("prompt: lists of token ids", GREEDY | {"prompt": [[51, 68], [75]]}, chat=False),
    Shape("completions, stream", GREEDY | {"prompt": "Say it. ", "stream": True}, chat=False),
    Shape("completions, logprobs: 2", GREEDY | {"prompt": "Say it. ", "logprobs": 2}, chat=False),
    Shape("completions, echo", GREEDY | {"prompt": "Say it. ", "echo": True}, chat=False, field="echo"),
    Shape("completions, suffix", GREEDY | {"prompt": "Say it. ", "suffix": "x"}, chat=False, field="suffix"),
    Shape("messages", GREEDY | {"messages": USER}),
    Shape("messages, stream", GREEDY | {"messages": USER, "stream": True}),
    Shape(
        "stream_options.include_usage",
        GREEDY | {"messages": USER, "stream": True, "stream_options": {"include_usage": True}},
    ),
    Shape("system message", GREEDY | {"messages": [{"role": "system", "content": "Be short."}, *USER]}),
    Shape(
        "content in parts",
        GREEDY | {"messages": [{"role": "user", "content": [{"type": "text", "text": "Ja?"}]}]},
    ),
    Shape(
        "content with an image",
        GREEDY
        | {
            "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
        },
        field="messages.0.content",
    ),
    Shape("n: 3, seed", {"messages": USER, "n": 3, "seed": 5, "max_tokens": 4}),
    Shape("stop", GREEDY | {"messages": USER, "stop": ["x", "y"]}),
    Shape("logprobs, top_logprobs", GREEDY | {"messages": USER, "logprobs": True, "top_logprobs": 2}),
    Shape("max_completion_tokens", {"messages": USER, "temperature": 0, "max_completion_tokens": 4}),
    Shape(
        "frequency_penalty, presence_penalty",
        GREEDY | {"messages": USER, "frequency_penalty": 0.5, "presence_penalty": 0.5},
    ),
    Shape("logit_bias", GREEDY | {"messages": USER, "logit_bias": {"50": -100}}),
    Shape("tools", GREEDY | {"messages": USER, "tools": [TOOL]}),
    Shape("tools, tool_choice: auto", GREEDY | {"messages": USER, "tools": [TOOL], "tool_choice": "auto"}),
    Shape(
        "tools, tool_choice: required",
        GREEDY | {"messages": USER, "tools": [TOOL], "tool_choice": "required"},
        field="tool_choice",
    ),
    Shape("a call and its answer (content: null)", GREEDY | {"messages": CALLED, "tools": [TOOL]}),
    Shape(
        "response_format: json_object",
        GREEDY | {"messages": USER, "response_format": {"type": "json_object"}},
        field="response_format",
    ),
    Shape("user", GREEDY | {"messages": USER, "user": "me"}),
]
# Fields of vLLM's, which clients send beside OpenAI's.
EXTRA = [
    Shape(
        "top_k, min_p, repetition_penalty",
        {"messages": USER, "max_tokens": 4, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2},
    ),
    Shape("ignore_eos, min_tokens", GREEDY | {"messages": USER, "ignore_eos": True, "min_tokens": 4}),
    Shape("chat_template_kwargs", GREEDY | {"messages": USER, "chat_template_kwargs": {"think": True}}),
    Shape(
        "chat_template_kwargs without effect",
        GREEDY | {"messages": USER, "chat_template_kwargs": {"enable_thinking": False}},
        field="chat_template_kwargs.enable_thinking",
    ),
]
# What Open WebUI's backend sends: a chat with the settings of its page, its own questions for a title, tags and
# follow-ups, and a turn after a tool of its own.
WEBUI = [
    Shape("Open WebUI: chat", {"stream": True, "messages": [{"role": "system", "content": "Be short."}, *USER]}),
    Shape(
        "Open WebUI: chat with usage and settings",
        {
            "stream": True, "stream_options": {"include_usage": True}, "messages": USER, "max_tokens": 6,
            "temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "frequency_penalty": 0.1,
            "presence_penalty": 0.1, "seed": 42, "stop": ["###"], "logit_bias": {"50": -100},
        },
    ),
    Shape("Open WebUI: title, tags, follow-ups", {"stream": False, "messages": USER, "max_completion_tokens": 1000}),
    Shape("Open WebUI: own tools", {"stream": True, "messages": CALLED, "tools": [TOOL], "max_tokens": 6}),
    Shape(
        "Open WebUI: reasoning_effort",
        {"stream": True, "messages": USER, "reasoning_effort": "low"},
        field="reasoning_effort",
    ),
]  # fmt: skip


@dataclass
class Outcome:
    """What a client got.

    Attributes:
        texts: of each choice.
        error: the message of a refusal with status 400.
        field: that it names.
    """

    texts: list[str] = field(default_factory=list)
    error: str | None = None
    field: str | None = None


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a tiny model on a free port of this machine; yield the address."""
    import uvicorn

    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    cascade = LocalCascade(load_cascade_model(save_tiny("llama", folder)))
    # A random model rarely ends by itself: a tenth of its tokens ends its answers.
    defaults = Defaults(frozenset(range(VOCABULARY * 9 // 10, VOCABULARY)))
    app = make_app(make_service(cascade, tokenizer=tokenizer, keys=[digest(KEY)], defaults=defaults))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(PATIENCE)


def joined(events: Iterable[dict[str, Any]]) -> list[str]:
    """Join the pieces of a stream by choice."""
    texts: dict[int, str] = {}
    for event in events:
        for choice in event["choices"]:
            piece = choice["text"] if "text" in choice else choice["delta"].get("content")
            texts[choice["index"]] = texts.get(choice["index"], "") + (piece or "")
    return [texts[index] for index in sorted(texts)]


def raw(url: str, shape: Shape) -> Outcome:
    """Ask as curl does: JSON over HTTP, and server-sent events read line by line."""
    client = http.client.HTTPConnection(url.removeprefix("http://"), timeout=PATIENCE)
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    client.request("POST", shape.path, json.dumps({"model": NAME, **shape.fields}), headers)
    reply = client.getresponse()
    text = reply.read().decode()
    client.close()
    if reply.status == 400:
        error = json.loads(text)["error"]
        return Outcome(error=error["message"], field=error["param"])
    assert reply.status == 200, text
    if not shape.fields.get("stream"):
        choices = json.loads(text)["choices"]
        return Outcome([c["text"] if "text" in c else c["message"]["content"] for c in choices])
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return Outcome(joined(json.loads(line) for line in lines[:-1]))


def through_openai(url: str, shape: Shape) -> Outcome:
    """Ask through the ``openai`` package; fields that it does not know go into ``extra_body``."""
    import openai

    official = _official(url)
    where = official.chat.completions if shape.chat else official.completions
    known = inspect.signature(where.create).parameters
    more = {name: value for name, value in shape.fields.items() if name not in known}
    own = {name: value for name, value in shape.fields.items() if name in known}
    try:
        answer = where.create(model=NAME, **own, extra_body=more or None)
        if shape.fields.get("stream"):
            return Outcome(joined(event.model_dump() for event in answer))
        return Outcome([c.message.content if shape.chat else c.text for c in answer.choices])
    except openai.BadRequestError as error:
        return Outcome(error=str(error), field=error.param)


@lru_cache(2)
def _official(url: str) -> Any:
    import openai

    return openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=PATIENCE)


def through_litellm(python: str, url: str, shapes: list[Shape]) -> list[Outcome]:
    """Ask through LiteLLM, in another interpreter that has it."""
    asked = [{"chat": shape.chat, "fields": dict(shape.fields)} for shape in shapes]
    ran = subprocess.run(
        [python, str(Path(__file__).parent / "clients_litellm.py"), url, NAME],
        input=json.dumps(asked), capture_output=True, text=True, timeout=10 * PATIENCE,
        env=os.environ | {"OPENAI_API_KEY": KEY, "PYTHONPATH": ""},
    )  # fmt: skip
    if ran.returncode:
        raise SystemExit(f"LiteLLM's interpreter ended with {ran.returncode}: {ran.stderr[-2000:]}")
    return [Outcome(**found) for found in json.loads(ran.stdout.splitlines()[-1])]


def verdict(shape: Shape, outcome: Outcome, expected: Outcome) -> str:
    """Return one cell of the table: ``answered``, ``400``, or what is wrong.

    Args:
        expected: what raw HTTP got, for an answer that is greedy or drawn by a seed.
    """
    if shape.field is not None:
        if outcome.error is None:
            return "WRONG: answered"
        return "400" if shape.field in outcome.error else f"WRONG: {outcome.error}"
    if outcome.error is not None:
        return f"WRONG: {outcome.error}"
    fixed = shape.fields.get("temperature") == 0 or "seed" in shape.fields
    if fixed and outcome.texts != expected.texts:
        return f"WRONG: {outcome.texts}, not {expected.texts}"
    return "answered"


CLIENTS: dict[str, Callable[[str, Shape], Outcome]] = {"HTTP": raw, "openai": through_openai}


def table(url: str, python: str | None = None) -> dict[str, dict[str, str]]:
    """Ask every shape through every client; return the verdicts by shape and client.

    Args:
        python: an interpreter that has LiteLLM; None leaves it out.
    """
    shapes = [*SHAPES, *EXTRA, *WEBUI]
    rows: dict[str, dict[str, str]] = {}
    expected = {shape.name: raw(url, shape) for shape in shapes}
    for shape in shapes:
        # Open WebUI's backend sends plain HTTP.
        clients = {"HTTP": raw} if shape in WEBUI else CLIENTS
        rows[shape.name] = {
            name: verdict(shape, ask(url, shape), expected[shape.name]) for name, ask in clients.items()
        }
    if python is not None:
        asked = [*SHAPES, *EXTRA]
        for shape, found in zip(asked, through_litellm(python, url, asked), strict=True):
            rows[shape.name]["LiteLLM"] = verdict(shape, found, expected[shape.name])
    return rows


def main() -> int:
    """Print the table as Markdown; return 1 where a cell is wrong."""
    with tempfile.TemporaryDirectory() as folder, served(Path(folder) / "model") as url:
        rows = table(url, PYTHON)
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    print(f"| request | {' | '.join(names)} |\n|{'---|' * (len(names) + 1)}")
    for shape, row in rows.items():
        print(f"| {shape} | {' | '.join(row.get(name, '') for name in names)} |")
    return int(any("WRONG" in cell for row in rows.values() for cell in row.values()))


if __name__ == "__main__":
    sys.exit(main())
