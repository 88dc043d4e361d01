"""A streamed answer is the one that it would have been in one piece, however it was cut into chunks and saved."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hiddenlab.defenses.verification.import_logs import Imported, from_openai
from hiddenlab.defenses.verification.streams import joined, streams
from hiddenlab.errors import InputError
from hiddenlab.testing import EOS, VOCABULARY, byte_tokenizer

Chunk = dict[str, Any]
NAME = "some/model"
TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}<a>"
CHAT = {"model": NAME, "messages": [{"role": "user", "content": "Is it?"}], "temperature": 0, "stream": True}
PLAIN = {"model": NAME, "prompt": "Once", "temperature": 0, "stream": True}


def ids(text: str) -> list[int]:
    """The byte-level tokenizer's."""
    return list(byte_tokenizer()(text)["input_ids"])


def chunk(*choices: Mapping[str, Any], **fields: Any) -> Chunk:
    return {
        "id": "r",
        "object": "chunk",
        "model": NAME,
        "choices": [{"index": 0, **each} for each in choices],
        **fields,
    }


def delta(
    *, index: int = 0, token_ids: Sequence[int] | None = None, end: str | None = None, **said: Any
) -> Chunk:
    return chunk(
        {"index": index, "delta": said, "finish_reason": end, "token_ids": token_ids, "logprobs": None}
    )


def events(*chunks: Any, done: bool = True) -> str:
    return "".join(f"data: {json.dumps(part)}\n\n" for part in chunks) + ("data: [DONE]\n\n" if done else "")


def read(path: Path, requests: Path | None = None, **how: Any) -> Imported:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return from_openai(path, tokenizer, VOCABULARY, model="here", requests=requests, **how)


def imported(folder: Path, *pairs: tuple[Mapping[str, Any], Any], **how: Any) -> Imported:
    """What a log of requests with streams is."""
    path = folder / "log.jsonl"
    lines = [json.dumps({"request": request, "response": response}) for request, response in pairs]
    path.write_text("\n".join(lines))
    return read(path, **how)


# What vLLM sends: ids of the prompt come first, reasoning has its own field, and a control token no text.
REASONED = [
    chunk({"delta": {"role": "assistant", "content": ""}}, prompt_token_ids=[4, 5]),
    delta(reasoning="Well", token_ids=[1, 2]),
    delta(token_ids=[3]),
    delta(content="Yes", token_ids=[6]),
    delta(content=".", token_ids=[7, EOS], end="stop"),
    chunk(usage={"prompt_tokens": 2, "completion_tokens": 6}),
]
TEXT = [delta(role="assistant", content=""), delta(content="Ye"), delta(content="s."), delta(end="stop")]


def test_chunks_are_put_together(tmp_path: Path) -> None:
    plain = [
        chunk(id="", model=""),  # Azure's first chunk
        chunk({"text": " mo", "logprobs": {"tokens": [" ", "m", "o"]}}, id="t"),
        chunk({"text": "re", "logprobs": {"tokens": ["r", "e"]}, "finish_reason": "length"}, id="t"),
    ]
    text = events(*[{**part, "id": "s"} for part in TEXT])
    found = imported(tmp_path, (CHAT, REASONED), (CHAT, text), (PLAIN, plain))
    assert [(one.id, list(one.prompt), list(one.output)) for one in found.transcripts] == [
        ("r", [4, 5], [1, 2, 3, 6, 7, EOS]),
        ("s", ids("<user>Is it?<a>"), ids("Yes.")),
        ("t", ids("Once"), ids(" more")),
    ]
    assert found.counts["ends_unseen"] == 1 and not found.counts["unfinished"]


def test_a_stream_that_lacks_something_is_refused_or_noted(tmp_path: Path) -> None:
    lost = [part for part in REASONED if part["choices"] != REASONED[2]["choices"]]
    unnumbered = [*REASONED[:3], delta(content="Yes"), *REASONED[4:]]
    other = [REASONED[0], {**REASONED[1], "id": "s"}]
    for chunks, said in (
        (lost, "5 token ids, and its usage says 6"),
        (unnumbered, "of choice 0 some chunks have token_ids"),
        (other, "several answers, with id 'r' and 's'"),
        ([], "0 choices"),
        ([3], r"response\[0\] should"),
        ([chunk({"token_ids": ["a"]})], r"response\[0\].choices\[0\].token_ids\[0\] should"),
        (["a", None], r"response\[0\] should"),
        (events(*TEXT) + events(*TEXT), "2 streams; a request has one"),
        (TEXT[:1], "an empty answer"),
        ([delta(reasoning="Well"), *TEXT], r"reasoning \('reasoning'\)"),
        ([chunk({"text": "a", "reasoning": "b"})], r"reasoning \('reasoning'\)"),
        ([delta(tool_calls=[{"index": 0}]), delta(end="tool_calls")], "tool calls"),
    ):
        with pytest.raises(InputError, match=f"line 1.*{said}"):
            imported(tmp_path, (CHAT, chunks))
    last = {"text": "", "finish_reason": "stop", "stop_reason": None}
    ended = (
        [chunk({"text": "ab"}), chunk(last)],
        [chunk({"text": "ab"}), chunk(last | {"stop_reason": "!"}, id="q")],
    )
    for chunks, wanted in zip(ended, ("ab", "a"), strict=True):
        found = imported(tmp_path, ({**PLAIN, "stop": "!"}, [{**part, "id": "r"} for part in chunks]))
        assert list(found.transcripts[0].output) == ids(wanted)
    found = imported(tmp_path, (CHAT, REASONED[:3]))
    assert found.transcripts[0].output == (1, 2, 3) and found.noted["unfinished"] == ["r"]


def test_usage_of_one_choice_is_not_that_of_all(tmp_path: Path) -> None:
    """With ``continuous_usage_stats`` each chunk has the numbers of its own choice."""
    parts = [
        chunk({"index": i, "text": text, "finish_reason": "length"}, usage={"completion_tokens": len(text)})
        for i, text in enumerate(("one", "three"))
    ]
    assert len(imported(tmp_path, ({**PLAIN, "n": 2}, parts)).transcripts) == 2
    with pytest.raises(InputError, match="8 tokens here, and its usage says 9"):
        imported(tmp_path, ({**PLAIN, "n": 2}, [*parts, chunk(usage={"completion_tokens": 9})]))


def test_saved_streams_are_paired_with_their_requests(tmp_path: Path) -> None:
    saved, asked = tmp_path / "saved.txt", tmp_path / "requests.jsonl"
    asked.write_text("\n".join(json.dumps(request) for request in (CHAT, PLAIN, PLAIN)))
    plain = [chunk({"text": " more", "finish_reason": "length"}, id="p")]
    saved.write_text(
        "\ufeff: a comment\r\n\r\nevent: chunk\r\n" + events(*REASONED).replace("\n", "\r\n")
        + events(*plain, done=False) + events({**plain[0], "id": "q"}).replace("\n\n", "\n")
    )  # fmt: skip
    found = read(saved, asked)
    assert [one.id for one in found.transcripts] == ["r", "p", "q"]
    with pytest.raises(InputError, match=r"line 4 has no request.*--requests"):
        read(saved)
    asked.write_text(json.dumps(CHAT))
    with pytest.raises(InputError, match=r"3 responses and .* 1 requests"):
        read(saved, asked)
    for text, said in (
        (events(*TEXT) + "{}\n", "line 11 is no line of a stream"),
        ("data: {\n", "line 1 is no valid JSON"),
        (json.dumps(PLAIN) + "\n" + events(*TEXT), "line 2 is a line of a stream"),
        ("data: [DONE]\n", "holds no responses"),
        (events(chunk(), {"error": {"message": "full"}}), "the server failed, first by: full"),
    ):
        saved.write_text(text)
        with pytest.raises(InputError, match=said):
            read(saved, asked)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40)
@given(
    answers=st.lists(
        st.lists(st.tuples(st.text("ab\n", max_size=3), st.lists(st.integers(0, 255), max_size=3)))
    ),
    data=st.data(),
)
def test_however_choices_are_interleaved(
    answers: list[list[tuple[str, list[int]]]], data: st.DataObject
) -> None:
    parts = [chunk({"index": i, "text": "", "token_ids": []}) for i in range(len(answers))]
    places = data.draw(st.permutations([i for i, answer in enumerate(answers) for _ in answer]))
    left = [list(answer) for answer in answers]
    for i in places:
        text, tokens = left[i].pop(0)
        parts.append(chunk({"index": i, "text": text, "token_ids": tokens}))
    text = events(*parts)
    pieces = [chunks for _, chunks in streams(enumerate(text.encode().split(b"\n"), 1), "file")]
    assert pieces == ([parts] if parts else [])
    made = joined(parts, "file")["choices"]
    assert [choice["text"] for choice in made] == ["".join(text for text, _ in answer) for answer in answers]
    assert [choice["token_ids"] for choice in made] == [
        [t for _, ids in answer for t in ids] for answer in answers
    ]
