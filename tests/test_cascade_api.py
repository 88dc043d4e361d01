"""The HTTP interface answers as OpenAI's does: the same text streamed or whole, and errors that clients can read."""

import asyncio
import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient
from transformers import AutoModelForCausalLM, AutoTokenizer

from hiddenlab.defenses.cascade.api import digest, make_app
from hiddenlab.defenses.cascade.generate import generate
from hiddenlab.defenses.cascade.load import load_cascade_model
from hiddenlab.defenses.cascade.local import LocalCascade
from hiddenlab.defenses.cascade.sampling import Sampling
from hiddenlab.defenses.cascade.service import Limits
from hiddenlab.defenses.cascade.testing import NAME, PATIENCE, Scripted, asend, make_service, send
from hiddenlab.errors import InputError
from hiddenlab.models.reading import quiet_transformers
from hiddenlab.sharding import Plan
from hiddenlab.testing import EOS, byte_tokenizer
from tests.waiting import eventually

TinyPath = Callable[..., str]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture
def scripted() -> Scripted:
    return Scripted()


@pytest.fixture
def client(scripted: Scripted) -> Iterator[TestClient]:
    with TestClient(make_app(make_service(scripted)), raise_server_exceptions=False) as found:
        yield found


@pytest.fixture(scope="module")
def tiny_llama(tiny: TinyPath) -> str:
    return tiny("llama", tokenizer=True)


@pytest.fixture(scope="module")
def real(tiny_llama: str) -> Iterator[TestClient]:
    """Over a model that really runs."""
    with TestClient(make_app(make_service(LocalCascade(load_cascade_model(tiny_llama))))) as found:
        yield found


def asks(path: str = COMPLETIONS, **changes: Any) -> dict[str, Any]:
    """A request for a greedy answer, as the arguments of a post."""
    body: dict[str, Any] = {"model": NAME, "temperature": 0}
    body |= (
        {"prompt": "Say it. "}
        if path == COMPLETIONS
        else {"messages": [{"role": "user", "content": "Say it."}]}
    )
    return {"url": path, "json": {key: value for key, value in (body | changes).items() if value is not ...}}


def text_of(path: str, answer: dict[str, Any]) -> str:
    (choice,) = answer["choices"]
    return choice["text"] if path == COMPLETIONS else choice["message"]["content"]


def events(text: str) -> list[Any]:
    """The data of server-sent events, read as the standard says."""
    blocks = text.split("\n\n")
    assert blocks[-1] == ""
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks[:-1])
    return [block if block == "data: [DONE]" else json.loads(block[6:]) for block in blocks[:-1]]


def streamed(client: TestClient, path: str, **changes: Any) -> tuple[list[str], str, dict[str, int]]:
    """The pieces of a streamed answer, why it ended, and its usage; checks what every stream must be."""
    response = client.post(**asks(path, stream=True, stream_options={"include_usage": True}, **changes))
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, usage, done = events(response.text)
    assert done == "data: [DONE]"
    assert usage["choices"] == []
    assert len({chunk["id"] for chunk in (*chunks, usage)}) == 1
    kind = "text_completion" if path == COMPLETIONS else "chat.completion.chunk"
    assert {chunk["object"] for chunk in (*chunks, usage)} == {kind}
    assert {chunk["model"] for chunk in (*chunks, usage)} == {NAME}
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
    if path == CHAT:
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert choices[-1]["delta"] == {}
        pieces = [choice["delta"]["content"] for choice in choices[1:-1]]
    else:
        assert choices[-1]["text"] == ""
        pieces = [choice["text"] for choice in choices[:-1]]
    return pieces, choices[-1]["finish_reason"], usage["usage"]


# ---- answers


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_an_answer_is_the_models_own(real: TestClient, tiny_llama: str, path: str) -> None:
    """Greedy text equals transformers' own generation, streamed or whole, and tokens are counted."""
    asked = "Say it. " if path == COMPLETIONS else "[user]Say it.\n[assistant]"
    with quiet_transformers(), torch.no_grad():
        plain = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()
        tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
        ids = torch.tensor([tokenizer(asked)["input_ids"]])
        out = plain.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
    new = out[0, ids.shape[1] :].tolist()
    expected = tokenizer.decode(new, skip_special_tokens=True)
    finish = "stop" if new[-1] == EOS else "length"
    usage = {
        "prompt_tokens": len(asked), "completion_tokens": len(new), "total_tokens": len(asked) + len(new)
    }  # fmt: skip
    answer = real.post(**asks(path, max_tokens=12)).json()
    assert text_of(path, answer) == expected
    assert answer["choices"][0]["finish_reason"] == finish
    assert answer["usage"] == usage
    assert answer["model"] == NAME
    assert answer["object"] == ("text_completion" if path == COMPLETIONS else "chat.completion")
    pieces, ended, counted = streamed(real, path, max_tokens=12)
    assert ("".join(pieces), ended, counted) == (expected, finish, usage)


@pytest.mark.slow
def test_answers_at_once_are_kept_apart(real: TestClient) -> None:
    def text(prompt: str) -> str:
        return text_of(COMPLETIONS, real.post(**asks(prompt=prompt, max_tokens=6)).json())

    prompts = [f"prompt {'x' * i}" for i in range(6)]
    expected = [text(prompt) for prompt in prompts]
    assert len(set(expected)) > 1
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(text, prompts)) == expected


@pytest.mark.slow
def test_a_seed_decides_the_text(real: TestClient, tiny_llama: str) -> None:
    """It is the same as of the same settings elsewhere; without a seed each answer is another."""
    changes = {"max_tokens": 10, "temperature": 1.7, "top_p": 0.9, "top_k": 40}

    def text(**more: Any) -> str:
        return text_of(COMPLETIONS, real.post(**asks(**changes, **more)).json())

    tokenizer = byte_tokenizer()
    ids = torch.tensor(tokenizer("Say it. ")["input_ids"])
    drawn = generate(
        LocalCascade(load_cascade_model(tiny_llama)), ids, Plan.clustered(len(ids), 1, alpha=1),
        new_tokens=10, sampling=Sampling(1.7, 40, 0.9, 7), stop=[EOS],
    )  # fmt: skip
    expected = tokenizer.decode(list(drawn), skip_special_tokens=True)
    assert text(seed=7) == text(seed=7) == expected
    assert len({text(seed=seed) for seed in range(4)}) == 4
    assert len({text() for _ in range(4)}) == 4


def test_prompts_may_be_token_ids(client: TestClient, scripted: Scripted) -> None:
    scripted.says("ok")
    response = client.post(**asks(prompt=[1, 299, 0], max_tokens=2))
    assert text_of(COMPLETIONS, response.json()) == "ok"
    assert response.json()["usage"]["prompt_tokens"] == 3
    assert scripted.asked[0].tolist() == [1, 299, 0]


def test_a_conversation_goes_through_the_models_template(client: TestClient, scripted: Scripted) -> None:
    """Roles, parts of text, and the turn that the model is to take; no special tokens beside the template's."""
    scripted.says("ok")
    messages = [
        {"role": "developer", "content": "Be short."},
        {"role": "user", "content": [{"type": "text", "text": "Ja"}, {"type": "text", "text": "?"}]},
        {"role": "assistant", "content": "Ja."},
        {"role": "user", "content": "Oder nein?"},
    ]
    answer = client.post(**asks(CHAT, messages=messages, max_completion_tokens=2)).json()
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "ok"}
    asked = byte_tokenizer().decode(scripted.asked[0])
    assert asked == "[system]Be short.\n[user]Ja?\n[assistant]Ja.\n[user]Oder nein?\n[assistant]"


def test_an_answer_ends_with_the_models_stop_token(client: TestClient, scripted: Scripted) -> None:
    scripted.says("Genug.", EOS, 0, 0)
    for path in (COMPLETIONS, CHAT):
        answer = client.post(**asks(path, max_tokens=100)).json()
        assert text_of(path, answer) == "Genug."
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] == 7
        assert "".join(streamed(client, path, max_tokens=100)[0]) == "Genug."


def test_an_answer_is_as_long_as_may_be(scripted: Scripted) -> None:
    """The server's default where a request asks for no number; never beyond the room for prompt and answer."""
    scripted.says("x")
    cases: list[tuple[str, dict[str, Any], int]] = [
        (COMPLETIONS, {}, 30),
        (COMPLETIONS, {"max_tokens": None}, 30),
        (COMPLETIONS, {"max_tokens": 21}, 21),
        (COMPLETIONS, {"max_tokens": 50}, 50),
        (COMPLETIONS, {"max_tokens": 50, "prompt": "x" * 40}, 20),
        (CHAT, {}, 30),
        (CHAT, {"max_tokens": 5}, 5),
        (CHAT, {"max_completion_tokens": 4}, 4),
    ]
    limits = Limits(tokens=60, new_tokens=50, default_new_tokens=30)
    with TestClient(make_app(make_service(scripted, limits=limits))) as client:
        for path, changes, expected in cases:
            answer = client.post(**asks(path, **changes)).json()
            assert answer["usage"]["completion_tokens"] == expected, changes
            assert answer["choices"][0]["finish_reason"] == "length"
        problem(
            client.post(**asks(prompt="x" * 60)), 400, "has 60 tokens; prompt and answer may have 60 together"
        )
        for path, field in (
            (COMPLETIONS, "max_tokens"),
            (CHAT, "max_tokens"),
            (CHAT, "max_completion_tokens"),
        ):
            for wanted in (51, 2**31 - 1):
                error = problem(
                    client.post(**asks(path, **{field: wanted})), 400, "an answer may have 50 tokens here"
                )
                assert error["param"] == field
        assert len(scripted.asked) == sum(expected for *_, expected in cases)


@pytest.mark.parametrize(
    "changes", [{"new_tokens": 10}, {"running": 0}, {"tokens": 1}, {"default_new_tokens": 0}], ids=str
)
def test_limits_that_cannot_be_are_refused(changes: dict[str, int]) -> None:
    with pytest.raises(InputError, match=r"default|at least"):
        Limits(**changes)


# ---- stop texts


def until_stop(text: str, stops: list[str]) -> tuple[str, str]:
    """The text before whichever stop is complete first, the longest of them; and why it ends. One sign at a time."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))], "stop"
    return text, "length"


@pytest.fixture(scope="module")
def talker() -> Iterator[tuple[Scripted, TestClient]]:
    scripted = Scripted()
    with TestClient(make_app(make_service(scripted))) as client:
        yield scripted, client


@settings(max_examples=60)
@given(
    st.text("abé€😀", min_size=1, max_size=12),
    st.lists(st.text("abé€😀", min_size=1, max_size=4), max_size=4),
    st.sampled_from([COMPLETIONS, CHAT]),
)
@example("aab€", ["b", "ab"], COMPLETIONS)
@example("ab€a", ["b€b", "€", "b€"], CHAT)
def test_stop_texts_end_an_answer(
    talker: tuple[Scripted, TestClient], text: str, stops: list[str], path: str
) -> None:
    """Also where they, and single signs, are split over tokens; nothing of a stop text is ever streamed."""
    scripted, client = talker
    scripted.says(text)
    n = len(scripted.script)
    expected, finish = until_stop(text, stops)
    answer = client.post(**asks(path, max_tokens=n, stop=stops)).json()
    assert (text_of(path, answer), answer["choices"][0]["finish_reason"]) == (expected, finish)
    pieces, ended, usage = streamed(client, path, max_tokens=n, stop=stops)
    assert ("".join(pieces), ended) == (expected, finish)
    assert all(pieces)
    assert usage == answer["usage"]
    assert usage["completion_tokens"] <= n
    if len(stops) == 1:
        assert client.post(**asks(path, max_tokens=n, stop=stops[0])).json()["usage"] == usage


def test_text_comes_as_soon_as_it_is_certain(client: TestClient, scripted: Scripted) -> None:
    """One piece a sign, held back only while it could begin a stop text."""
    scripted.says("aé€😀b")
    assert streamed(client, COMPLETIONS, max_tokens=11)[0] == ["a", "é", "€", "😀", "b"]
    assert streamed(client, COMPLETIONS, max_tokens=11, stop="xyz")[0] == ["a", "é", "€", "😀", "b"]
    scripted.says("axyb")
    assert streamed(client, COMPLETIONS, max_tokens=4, stop="xyz")[0] == ["a", "xyb"]


def test_a_broken_sign_at_the_end_is_given_as_it_is(client: TestClient, scripted: Scripted) -> None:
    scripted.says("a€")
    for n, expected in ((1, "a"), (2, "a\ufffd"), (3, "a\ufffd"), (4, "a€")):
        assert text_of(COMPLETIONS, client.post(**asks(max_tokens=n)).json()) == expected
        assert "".join(streamed(client, COMPLETIONS, max_tokens=n)[0]) == expected


def test_spaces_stay_where_they_are(client: TestClient, scripted: Scripted) -> None:
    said = " a , b . do n't  !\n\n ok"
    scripted.says(said)
    assert "".join(streamed(client, COMPLETIONS, max_tokens=len(said))[0]) == said


# ---- refusals


def problem(response: Any, status: int, says: str, kind: str = "invalid_request_error") -> dict[str, Any]:
    """The error of a response, which must have the shape that OpenAI's clients read."""
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert says in error["message"]
    assert error["type"] == kind
    return error


@pytest.mark.parametrize(
    ("path", "changes", "says"),
    [
        (COMPLETIONS, {"prompt": ...}, "prompt: Field required"),
        (COMPLETIONS, {"model": ...}, "model: Field required"),
        (COMPLETIONS, {"prompt": ""}, "the prompt is empty; give at least one token"),
        (COMPLETIONS, {"prompt": []}, "the prompt is empty; give at least one token"),
        (COMPLETIONS, {"prompt": [300]}, "outside of the vocabulary, 0 to 299"),
        (COMPLETIONS, {"prompt": [-1]}, "prompt: give one text"),
        (COMPLETIONS, {"prompt": [2**63]}, "prompt: give one text"),
        (COMPLETIONS, {"prompt": {"text": "x"}}, "prompt"),
        (COMPLETIONS, {"prompt": "x" * 600}, "prompt and answer may have 512 together"),
        (COMPLETIONS, {"temperature": -0.1}, "temperature: Input should be greater than or equal to 0"),
        (COMPLETIONS, {"temperature": 2.1}, "temperature"),
        (COMPLETIONS, {"top_p": 0}, "top_p"),
        (COMPLETIONS, {"top_p": 1.1}, "top_p"),
        (COMPLETIONS, {"top_k": -2}, "top_k"),
        (COMPLETIONS, {"seed": 2**63, "temperature": 1}, "seed"),
        (COMPLETIONS, {"max_tokens": 0}, "max_tokens"),
        (COMPLETIONS, {"max_tokens": True}, "max_tokens: Input should be a valid integer"),
        (COMPLETIONS, {"max_tokens": "5"}, "max_tokens"),
        (COMPLETIONS, {"temperature": "0"}, "temperature"),
        (COMPLETIONS, {"stream": 1}, "stream: Input should be a valid boolean"),
        (COMPLETIONS, {"prompt": [True]}, "prompt: give one text, a list of texts"),
        (COMPLETIONS, {"prompt": ["a", 1]}, "prompt: give one text, a list of texts"),
        (COMPLETIONS, {"prompt": ["a", ""]}, "the prompt is empty; give at least one token"),
        (COMPLETIONS, {"prompt": [[1], []]}, "the prompt is empty; give at least one token"),
        (COMPLETIONS, {"prompt": ["x"] * 17}, "prompt: 17 answers are asked for, and 16 may be generated"),
        (COMPLETIONS, {"prompt": [2**31]}, "prompt: give one text"),
        (COMPLETIONS, {"top_k": 2**63}, "top_k"),
        (COMPLETIONS, {"n": 0}, "n: Input should be greater than or equal to 1"),
        (COMPLETIONS, {"n": 17}, "n: 17 answers are asked for, and 16 may be generated at once here"),
        (COMPLETIONS, {"n": True}, "n: Input should be a valid integer"),
        (COMPLETIONS, {"stop": [""]}, "stop: give up to 4 texts of 1 to 200 characters"),
        (COMPLETIONS, {"stop": list("abcde")}, "stop: give up to 4 texts"),
        (COMPLETIONS, {"stop": "x" * 201}, "stop: give up to 4 texts"),
        (COMPLETIONS, {"logprobs": 21}, "logprobs: Input should be less than or equal to 20"),
        (COMPLETIONS, {"logprobs": False}, "logprobs: Input should be a valid integer"),
        (COMPLETIONS, {"top_logprobs": 1}, "top_logprobs is not offered"),
        (COMPLETIONS, {"echo": True}, "echo is not offered"),
        (COMPLETIONS, {"echo": 0}, "echo is not offered"),
        (COMPLETIONS, {"best_of": 2}, "best_of is not offered"),
        (COMPLETIONS, {"suffix": ""}, "suffix is not offered"),
        (COMPLETIONS, {"min_p": 1.1}, "min_p: Input should be less than or equal to 1"),
        (COMPLETIONS, {"repetition_penalty": 0}, "repetition_penalty: Input should be greater than 0"),
        (COMPLETIONS, {"frequency_penalty": 2.5}, "frequency_penalty: Input should be less"),
        (COMPLETIONS, {"presence_penalty": -2.5}, "presence_penalty: Input should be greater"),
        (COMPLETIONS, {"logit_bias": {"a": 1}}, "logit_bias: give an object from token ids"),
        (COMPLETIONS, {"logit_bias": {"1": 101}}, "logit_bias: give an object from token ids"),
        (COMPLETIONS, {"logit_bias": {"300": 1}}, "logit_bias: a token id is outside of the vocabulary"),
        (COMPLETIONS, {"stop_token_ids": [300]}, "stop_token_ids: a token id is outside of the vocabulary"),
        (COMPLETIONS, {"min_tokens": 3, "max_tokens": 2}, "min_tokens is 3, and the answer may have 2"),
        (
            COMPLETIONS,
            {"min_tokens": 257},
            "min_tokens: an answer that names no max_tokens has 256 tokens here",
        ),
        (COMPLETIONS, {"ignore_eos": 1}, "ignore_eos: Input should be a valid boolean"),
        (COMPLETIONS, {"store": True}, "store is not offered"),
        (COMPLETIONS, {"service_tier": "flex"}, "service_tier is not offered"),
        (COMPLETIONS, {"use_beam_search": False}, "use_beam_search is not offered"),
        (COMPLETIONS, {"max_completion_tokens": 3}, "max_completion_tokens is not offered"),
        (COMPLETIONS, {"": 1}, " is not offered"),
        (COMPLETIONS, {"stream_options": {"include_usage": True}}, "stream_options goes with stream: true"),
        (COMPLETIONS, {"stream": True, "stream_options": {"x": 1}}, "stream_options.x is not offered"),
        (CHAT, {"logprobs": 0}, "logprobs: Input should be a valid boolean"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs goes with logprobs: true"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs: Input should be less"),
        (CHAT, {"tool_choice": "auto"}, "tool_choice goes with tools"),
        (CHAT, {"tool_choice": "required", "tools": [TOOL]}, "tool_choice: give none or auto"),
        (CHAT, {"parallel_tool_calls": False, "tools": [TOOL]}, "parallel_tool_calls is not offered"),
        (CHAT, {"modalities": ["text", "audio"]}, "modalities is not offered"),
        (CHAT, {"metadata": {}}, "metadata is not offered"),
        (CHAT, {"reasoning_effort": "low"}, "reasoning_effort is not offered"),
        (CHAT, {"max_tokens": 3, "max_completion_tokens": 3}, "are one limit; give one of them"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": "x", "name": "n"}]},
            "messages.0.name: the model's chat template does not render it",
        ),
        (CHAT, {"messages": [{"role": "user", "content": None}]}, "messages.0.content: give one text"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "y": 1}]}]},
            "messages.0",
        ),
        (CHAT, {"tools": [{"type": "function"}]}, "tools.0.function: Field required"),
        (CHAT, {"tools": [TOOL]}, "tools: the model's chat template does not render tools"),
        (
            CHAT,
            {"response_format": {"type": "json_object"}},
            "response_format: only the type text is offered",
        ),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": [{"role": "oracle", "content": "x"}]}, "messages.0.role"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages.0.content: Field required"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "only text can be read"),
        (CHAT, {"messages": [{"role": "user", "content": "refuse"}]}, "refuses these messages: not this"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_impossible_requests_are_refused(
    client: TestClient, scripted: Scripted, path: str, changes: dict[str, Any], says: str
) -> None:
    """With 400, and the field where it is one's fault; the server goes on."""
    scripted.says("ok")
    error = problem(client.post(**asks(path, **changes)), 400, says)
    if "Field required" in says:
        assert error["param"] == says.partition(":")[0]
    assert text_of(COMPLETIONS, client.post(**asks(max_tokens=2)).json()) == "ok"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "the body is no valid JSON"),
        (b"{{{", "the body is no valid JSON"),
        (b"[]", "the body must be one JSON object"),
        (b'"text"', "the body must be one JSON object"),
        (b"null", "the body must be one JSON object"),
        (b"\xff\xfe", "the body is not UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 300 + b"1" + b"}" * 300, "nested too deeply"),
        (b'{"model": "tiny/model", "prompt": "x", "temperature": NaN}', "NaN is no number"),
        (b'{"model": "tiny/model", "prompt": "x", "temperature": 1e999}', "beyond the range of float64"),
        (b'{"model": "tiny/model", "prompt": "x", "seed": ' + b"9" * 5000 + b"}", "beyond 64 bits"),
        (b'{"model": "tiny/model", "prompt": "x", "seed": ' + b"9" * 4000 + b"}", "beyond 64 bits"),
        (b'{"model": "tiny/model", "prompt": "\\ud800"}', "half of a surrogate pair"),
        (b'{"model": "tiny/model", "prompt": "x", "\\ud800": 1}', "half of a surrogate pair"),
        (b'{"model": "tiny/model", "prompt": "x", "prompt": "y"}', "the name 'prompt' stands twice"),
    ],
    ids=lambda value: repr(value)[:24],
)
def test_bodies_that_are_no_request_are_refused(
    client: TestClient, scripted: Scripted, body: bytes, says: str
) -> None:
    scripted.says("ok")
    for path in (COMPLETIONS, CHAT):
        response = client.post(path, content=body, headers={"content-type": "application/json"})
        error = problem(
            response, 400, says if path == COMPLETIONS or "tiny" not in body.decode("latin1") else ""
        )
        assert "\n" not in error["message"]
    assert client.post(**asks()).status_code == 200


def test_half_signs_in_a_conversation_are_refused(client: TestClient) -> None:
    body = b'{"model": "tiny/model", "messages": [{"role": "user", "content": "\\ud800"}]}'
    problem(client.post(CHAT, content=body, headers={"content-type": "application/json"}), 400, "half of")


def test_a_body_must_say_that_it_is_json(client: TestClient, scripted: Scripted) -> None:
    """A page of another site can send a form unasked, and no JSON."""
    scripted.says("ok")
    body = json.dumps(asks()["json"]).encode()
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        problem(client.post(COMPLETIONS, content=body, headers={"content-type": kind}), 415, "Content-Type")
    assert scripted.asked == []
    for kind in ("application/json", "Application/JSON; charset=utf-8"):
        assert client.post(COMPLETIONS, content=body, headers={"content-type": kind}).status_code == 200


def test_defaults_that_are_said_change_nothing(client: TestClient, scripted: Scripted) -> None:
    """What clients send by themselves: a null of any known field, and the one value of what is not offered."""
    scripted.says("ok")
    nulls = {
        "tools": None,
        "logprobs": None,
        "stop": None,
        "seed": None,
        "max_tokens": 2,
        "user": "me",
        "n": 1,
    }
    nulls |= {"min_p": None, "best_of": None, "store": False, "service_tier": "auto", "logit_bias": {}}
    nulls |= {"frequency_penalty": 0, "presence_penalty": 0.0, "stream": False, "response_format": None}
    for path, more in (
        (COMPLETIONS, {"echo": False, "best_of": 1, "suffix": None}),
        (CHAT, {"logprobs": False}),
    ):
        assert text_of(path, client.post(**asks(path, **(nulls | more))).json()) == "ok"


_ODD = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
_FIELDS = [
    "model", "prompt", "messages", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "seed", "n",
    "stream", "stream_options", "stop", "logprobs", "top_logprobs", "echo", "user", "tools", "min_p", "role",
    "logit_bias", "chat_template_kwargs", "tool_choice", "min_tokens", "repetition_penalty", "stop_token_ids",
    "response_format",
]  # fmt: skip


@settings(max_examples=80)
@given(
    st.sampled_from([COMPLETIONS, CHAT]),
    st.dictionaries(st.sampled_from(_FIELDS) | st.text(max_size=6), _ODD, max_size=3),
    st.integers(0, 300),
    st.binary(max_size=3),
)
def test_odd_bodies_are_answered_or_refused(
    path: str, changes: dict[str, Any], at: int, bytes_: bytes
) -> None:
    """Values of all kinds in all fields, then bytes put over the text: 200 or 4xx in one line, never a 5xx."""
    app = make_app(make_service(limits=Limits(new_tokens=8, default_new_tokens=2)))
    plain = json.dumps(asks(path)["json"] | changes).encode()
    for body in (plain, plain[:at] + bytes_ + plain[at + len(bytes_) :]):
        reply = send(app, path, body)
        assert reply.status in (200, 400, 404), reply
        if reply.status != 200:
            error = json.loads(reply.body)["error"]
            assert error["message"] and "\n" not in error["message"] and "Traceback" not in error["message"]


@pytest.mark.parametrize("temperature", [1e-30, 5e-324])
def test_hardly_any_temperature_is_greedy(real: TestClient, temperature: float) -> None:
    """It divides the logits beyond what a number can hold."""
    greedy = real.post(**asks(max_tokens=4)).json()
    warmer = real.post(**asks(max_tokens=4, temperature=temperature, seed=1))
    assert warmer.status_code == 200
    assert text_of(COMPLETIONS, warmer.json()) == text_of(COMPLETIONS, greedy)


def test_what_is_not_there_is_not_found(client: TestClient) -> None:
    problem(client.post(**asks(model="gpt-5")), 404, "the model 'gpt-5' is not served here; 'tiny/model' is")
    problem(client.post(**asks(CHAT, model="gpt-5")), 404, "is not served here")
    problem(client.get("/v1/nothing"), 404, "Not Found")
    problem(client.get(COMPLETIONS), 405, "Method Not Allowed")


def test_a_model_without_a_template_has_no_chat(scripted: Scripted) -> None:
    scripted.says("ok")
    with TestClient(make_app(make_service(scripted, template=None))) as client:
        problem(client.post(**asks(CHAT)), 400, "tiny/model has no chat template; use /v1/completions")
        assert client.post(**asks()).status_code == 200


def test_a_key_opens_the_api_and_is_kept_as_its_digest(scripted: Scripted) -> None:
    scripted.says("ok")
    key = "sk-key"
    service = make_service(scripted, keys=[digest(key)])
    assert service.keys == (hashlib.sha256(key.encode()).hexdigest(),)
    assert not any(key in str(value) for value in vars(service).values())
    with TestClient(make_app(service)) as client:

        def ask(authorization: str | None, path: str = COMPLETIONS) -> Any:
            return client.post(
                **asks(path), headers={} if authorization is None else {"authorization": authorization}
            )

        wrong = (
            None,
            "",
            key,
            "Bearer",
            f"Bearer {digest(key)}",
            f"Basic {key}",
            f"Bearer {key}x",
            "Bearer Sk-key",
        )
        for shown in wrong:
            for path in (COMPLETIONS, CHAT):
                problem(ask(shown, path), 401, "wants its API key as 'Authorization: Bearer …'")
        assert client.get("/v1/models").status_code == 401
        problem(client.post(COMPLETIONS, content=b"{{{"), 401, "API key")
        assert scripted.asked == []
        for shown in (f"Bearer {key}", f"bearer {key}"):
            assert ask(shown).status_code == ask(shown, CHAT).status_code == 200
        assert client.get("/v1/models", headers={"authorization": f"Bearer {key}"}).status_code == 200
        assert client.get("/health").status_code == client.get("/metrics").status_code == 200


# ---- the size of a body


def call(
    app: Any, path: str, receive: Callable[[], Any], headers: Mapping[str, str] = {}, version: str = "2.4"
) -> Callable[[Callable[[dict[str, Any]], Any]], Any]:
    """One request as a server would bring it, message by message."""
    scope = {
        "type": "http", "asgi": {"version": "3.0", "spec_version": version}, "http_version": "1.1",
        "method": "POST", "scheme": "http", "path": path, "raw_path": path.encode(), "root_path": "",
        "query_string": b"", "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80),
        "headers": [
            (name.encode(), value.encode())
            for name, value in ({"content-type": "application/json"} | dict(headers)).items()
        ],
    }  # fmt: skip
    return lambda send: app(scope, receive, send)


@pytest.mark.parametrize("announced", [None, 10, 10_000])
def test_a_body_is_measured_as_it_comes(scripted: Scripted, announced: int | None) -> None:
    """With no length, or a wrong one: what is too long is refused before the rest of it is read."""
    app = make_app(make_service(scripted, limits=Limits(body=1000)))
    read, sent = 0, []

    async def receive() -> dict[str, Any]:
        nonlocal read
        read += 1
        assert read < 100
        return {"type": "http.request", "body": b"x" * 100, "more_body": True}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    headers = {} if announced is None else {"content-length": str(announced)}
    asyncio.run(asyncio.wait_for(call(app, COMPLETIONS, receive, headers)(send), PATIENCE))
    assert read == 11
    assert sent[0]["status"] == 413
    error = json.loads(b"".join(message.get("body", b"") for message in sent))["error"]
    assert error["message"] == "the request is larger than 1000 bytes"
    assert error["type"] == "invalid_request_error"


def test_a_body_of_just_the_limit_is_read(scripted: Scripted) -> None:
    scripted.says("ok")
    body = json.dumps({"model": NAME, "prompt": "x", "temperature": 0, "max_tokens": 2}).encode()
    for limit, status in ((len(body), 200), (len(body) - 1, 413)):
        with TestClient(make_app(make_service(scripted, limits=Limits(body=limit)))) as client:
            headers = {"content-type": "application/json"}
            for content in (body, iter([body[:20], b"", body[20:]])):
                assert client.post(COMPLETIONS, content=content, headers=headers).status_code == status


# ---- many requests, lost nodes, clients that leave


@pytest.mark.parametrize("stream", [False, True])
def test_too_many_requests_are_sent_away(scripted: Scripted, stream: bool) -> None:
    """And served again as soon as there is room."""
    scripted.says("ok")
    service = make_service(scripted, limits=Limits(running=2))
    scripted.wait.clear()
    with TestClient(make_app(service)) as client, ThreadPoolExecutor(2) as pool:
        running = [pool.submit(client.post, **asks(stream=stream)) for _ in range(2)]
        eventually(lambda: len(scripted.asked) == 2)
        sent_away = client.post(**asks(stream=stream))
        problem(sent_away, 429, "2 of 2 answers that may run are running; try again later")
        assert int(sent_away.headers["retry-after"]) > 0
        assert "cascade_running 2.0" in client.get("/metrics").text
        scripted.wait.set()
        assert [one.result(PATIENCE).status_code for one in running] == [200, 200]
        assert client.post(**asks(stream=stream)).status_code == 200
        assert "cascade_running 0.0" in client.get("/metrics").text


def test_refused_requests_take_no_place(scripted: Scripted) -> None:
    scripted.says("ok")
    with TestClient(make_app(make_service(scripted, limits=Limits(running=1)))) as client:
        for changes in ({"stop": [""]}, {"prompt": [300]}, {"prompt": [300], "stream": True}, {"model": "x"}):
            client.post(**asks(**changes))
        assert client.post(**asks()).status_code == 200


def test_a_lost_node_is_told(scripted: Scripted) -> None:
    """As 503 before an answer has begun, as an event within a stream; the place among the running is free again."""
    scripted.says("Hallo")
    with TestClient(make_app(make_service(scripted, limits=Limits(running=1)))) as client:
        scripted.fail_at = 3
        for path in (COMPLETIONS, CHAT):
            problem(client.post(**asks(path)), 503, "AttnNode (0, 1) died in layer 3", "server_error")
            *pieces, last = events(client.post(**asks(path, stream=True)).text)
            assert last["error"]["message"] == "AttnNode (0, 1) died in layer 3"
            assert last["error"]["type"] == "server_error"
            deltas = [piece["choices"][0] for piece in pieces]
            assert (
                "".join(d["text"] if path == COMPLETIONS else d["delta"]["content"] for d in deltas) == "Hal"
            )
        scripted.fail_at = None
        assert client.post(**asks(max_tokens=5)).status_code == 200
    assert len(scripted.closed) == 5


@pytest.mark.parametrize("stream", [False, True])
def test_a_fault_in_the_server_is_one_line(
    scripted: Scripted, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """Nothing of what it was about, and the place is free again."""

    def fails(*_: Any) -> None:
        raise RuntimeError("the secret prompt")

    monkeypatch.setattr(scripted, "step", fails)
    with TestClient(
        make_app(make_service(scripted, limits=Limits(running=1))), raise_server_exceptions=False
    ) as client:
        for _ in range(2):
            response = client.post(**asks(stream=stream))
            error = events(response.text)[-1]["error"] if stream else response.json()["error"]
            assert error["message"] == "the server failed: RuntimeError"
            assert error["type"] == "server_error"
            assert response.status_code == (200 if stream else 500)


@pytest.mark.parametrize("version", ["2.3", "2.4"])
@pytest.mark.parametrize(
    ("at", "thinking"),
    [(1, False), (4, False), (4, True)],
    ids=["before the answer", "between tokens", "within a token"],
)
def test_a_client_that_leaves_frees_its_place(
    scripted: Scripted, at: int, thinking: bool, version: str
) -> None:
    """Nothing more is computed for it, the nodes forget the request, and others are served.

    Servers tell of it in two ways: a message (2.3), or an error when they are given more to send (2.4).
    """
    scripted.says("ab")
    service = make_service(scripted, limits=Limits(running=2))
    app = make_app(service)
    body = json.dumps(asks(stream=True, max_tokens=400)["json"]).encode()

    def settled() -> bool:
        forgotten = set(scripted.requests) <= set(scripted.closed)
        return forgotten and service.registry.get_sample_value("cascade_running") == 0

    async def leave() -> None:
        gone = asyncio.Event()
        requests = iter([{"type": "http.request", "body": body, "more_body": False}])
        sent = 0

        async def receive() -> dict[str, Any]:
            if (message := next(requests, None)) is not None:
                return message
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            nonlocal sent
            sent += 1
            if sent == at:
                if thinking:
                    scripted.wait.clear()
                    threading.Timer(0.05, scripted.wait.set).start()
                gone.set()
                if version == "2.4":
                    raise OSError("the client is gone")

        try:
            await asyncio.wait_for(call(app, COMPLETIONS, receive, version=version)(send), PATIENCE)
        except OSError:
            assert version == "2.4"

    async def several() -> None:
        for _ in range(3):
            await leave()
            for _ in range(200):
                if settled():
                    break
                await asyncio.sleep(0.01)

    asyncio.run(several())
    assert settled()
    assert len(scripted.asked) < 3 * 100
    with TestClient(app) as client:
        assert client.post(**asks()).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_clients_that_hang_up_leave_the_server_free(scripted: Scripted, stream: bool) -> None:
    """Each ends within the token that is being made, and its place is free; nothing is replaced or run again."""
    scripted.says("ab")
    scripted.fail_at = 0  # once they go on, each would find a node lost
    service = make_service(scripted, limits=Limits(running=4, tokens=512, new_tokens=400))
    app = make_app(service)
    body = json.dumps(asks(stream=stream, max_tokens=400)["json"]).encode()
    scripted.wait.clear()

    async def several() -> None:
        replies = await asyncio.gather(*(asend(app, COMPLETIONS, body, leave_after=0.2) for _ in range(4)))
        assert {reply.status for reply in replies} == ({200} if stream else {0})
        assert service.taken == 4  # their threads are still within a token
        assert (await asend(app, COMPLETIONS, body)).status == 429
        scripted.wait.set()
        for _ in range(int(PATIENCE / 0.01)):
            if service.taken == 0:
                break
            await asyncio.sleep(0.01)
        assert service.taken == 0
        scripted.fail_at = None
        assert (await asend(app, COMPLETIONS, json.dumps(asks(max_tokens=2)["json"]).encode())).status == 200

    asyncio.run(several())
    assert len(scripted.asked) == 4 + 2
    assert scripted.recovered == 0
    assert set(scripted.requests) <= set(scripted.closed)


def test_a_client_that_leaves_before_its_turn_costs_nothing(
    scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While its prompt waits to be read into tokens: nothing of it is computed."""
    service = make_service(scripted)
    app = make_app(service)
    reading, go_on = threading.Event(), threading.Event()
    plain = service.ids

    def slowly(prompt: Any) -> Any:
        reading.set()
        assert go_on.wait(PATIENCE)
        return plain(prompt)

    monkeypatch.setattr(service, "ids", slowly)

    async def leave() -> None:
        await asend(app, COMPLETIONS, json.dumps(asks()["json"]).encode(), leave_after=0.1)
        assert reading.is_set()
        go_on.set()
        await asyncio.sleep(0.1)

    threading.Timer(1.0, go_on.set).start()
    asyncio.run(leave())
    assert scripted.asked == []
    assert service.taken == 0
    assert (
        service.registry.get_sample_value("cascade_requests_total", {"path": COMPLETIONS, "status": "499"})
        == 1
    )


# ---- beside the answers


def test_health_is_the_nodes(client: TestClient, scripted: Scripted) -> None:
    assert client.get("/health").json() == {"status": "ok", "nodes": {}}
    scripted.states = {"CompNode 0": "ok", "AttnNode (0, 0)": "ok"}
    assert client.get("/health").json() == {"status": "ok", "nodes": scripted.states}
    scripted.states["AttnNode (0, 0)"] = "AttnNode (0, 0) died"
    response = client.get("/health")
    assert response.status_code == 503
    assert response.json() == {"status": "degraded", "nodes": scripted.states}


def test_the_one_model_is_listed(client: TestClient) -> None:
    listed = client.get("/v1/models").json()
    (entry,) = listed["data"]
    assert listed["object"] == "list"
    assert (entry["id"], entry["object"]) == (NAME, "model")
    assert isinstance(entry["created"], int)


def test_a_model_is_found_by_its_name(client: TestClient) -> None:
    """A name may hold slashes."""
    (entry,) = client.get("/v1/models").json()["data"]
    assert client.get(f"/v1/models/{NAME}").json() == entry
    problem(client.get("/v1/models/tiny"), 404, "the model 'tiny' is not served here; 'tiny/model' is")


def test_any_of_several_keys_opens(scripted: Scripted) -> None:
    service = make_service(scripted, keys=[digest("one"), digest("two")])
    with TestClient(make_app(service)) as client:
        found = {
            key: client.get("/v1/models", headers={"authorization": f"Bearer {key}"}).status_code
            for key in ("one", "two", "one,two", "three")
        }
    assert found == {"one": 200, "two": 200, "one,two": 401, "three": 401}


def test_only_named_origins_are_let_in(scripted: Scripted) -> None:
    """Off by default; with the key, for questions before a request and for refusals too."""
    origin = "https://chat.example"
    ask = {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    allowed = "access-control-allow-origin"
    with TestClient(make_app(make_service(scripted))) as client:
        assert allowed not in client.get("/v1/models", headers={"origin": origin}).headers
        problem(client.options(COMPLETIONS, headers={"origin": origin, **ask}), 405, "Method Not Allowed")
    service = make_service(scripted, keys=[digest("key")])
    with TestClient(make_app(service, [origin])) as client:
        before = client.options(COMPLETIONS, headers={"origin": origin, **ask})
        assert (before.status_code, before.headers[allowed]) == (200, origin)
        refused = client.post(**asks(), headers={"origin": origin})
        assert (refused.status_code, refused.headers[allowed]) == (401, origin)
        assert "access-control-allow-credentials" not in refused.headers
        assert allowed not in client.get("/v1/models", headers={"origin": "https://other.example"}).headers
    with TestClient(make_app(make_service(scripted), ["*"])) as client:
        assert client.get("/v1/models", headers={"origin": origin}).headers[allowed] == "*"


def test_metrics_count_what_was_done(scripted: Scripted) -> None:
    service = make_service(scripted)
    scripted.says("ok")
    with TestClient(make_app(service)) as client:
        for stream in (False, True):
            client.post(**asks(prompt="12345", max_tokens=2, stream=stream))
        client.post(**asks(n=0))
        client.post(**asks(CHAT, max_tokens=3))
        client.get("/elsewhere")
        text = client.get("/metrics").text
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    found = {name: float(value) for name, value in lines.items()}
    assert found['cascade_requests_total{path="/v1/completions",status="200"}'] == 2
    assert found['cascade_requests_total{path="/v1/completions",status="400"}'] == 1
    assert found['cascade_requests_total{path="/v1/chat/completions",status="200"}'] == 1
    assert found['cascade_requests_total{path="other",status="404"}'] == 1
    assert found['cascade_tokens_total{kind="prompt"}'] == 5 + 5 + len("[user]Say it.\n[assistant]")
    assert found['cascade_tokens_total{kind="completion"}'] == 2 + 2 + 3
    assert found["cascade_request_seconds_count"] == 3
    assert found["cascade_running"] == 0


def test_strangers_cannot_fill_the_metrics(scripted: Scripted) -> None:
    """Paths that do not exist share one entry, whatever the answer is: each entry is kept for ever."""
    service = make_service(scripted, keys=[digest("key")], limits=Limits(body=10))
    with TestClient(make_app(service)) as client:
        for i in range(5):
            assert client.get(f"/v1/{i}").status_code == 401
            assert client.post(f"/{i}", content=b"x" * 11).status_code == 413
            assert client.get(f"/{i}").status_code == 404
    paths = {
        sample.labels["path"] for metric in service.registry.collect() for sample in metric.samples
        if "path" in sample.labels
    }  # fmt: skip
    assert paths == {"other"}
