"""A log is imported whole and as it is meant, or refused with the line: what is imported wrongly blames the honest."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from hiddenlab.cli import app
from hiddenlab.defenses.verification.import_logs import Imported, from_openai
from hiddenlab.defenses.verification.transcript import read_transcripts
from hiddenlab.errors import InputError
from hiddenlab.testing import EOS, VOCABULARY, byte_tokenizer, save_tiny

Line = dict[str, Any]
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
NAME = "some/model"


def ids(text: str) -> tuple[int, ...]:
    """The byte-level tokenizer's."""
    return tuple(byte_tokenizer()(text)["input_ids"])


def completion(request: Mapping[str, Any] = {}, choice: Mapping[str, Any] = {}, **response: Any) -> Line:
    """A line of the completion API, with changes."""
    return {
        "request": {"model": NAME, "prompt": "Once", "temperature": 0, **request},
        "response": {"model": NAME, "choices": [{"index": 0, "text": " more", **choice}], **response},
    }


def chat(
    request: Mapping[str, Any] = {}, message: Mapping[str, Any] = {}, choice: Mapping[str, Any] = {}, **response: Any
) -> Line:  # fmt: skip
    """A line of the chat API, with changes."""
    said = {"role": "assistant", "content": "Yes.", **message}
    return {
        "request": {"model": NAME, "messages": [{"role": "user", "content": "Is it?"}], "temperature": 0, **request},
        "response": {
            "model": NAME, "choices": [{"index": 0, "message": said, "finish_reason": "stop", **choice}], **response,
        },
    }  # fmt: skip


def imported(folder: Path, lines: Sequence[Line], **how: Any) -> Imported:
    """What a log of these lines is."""
    path = folder / "log.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return from_openai(path, tokenizer, VOCABULARY, **{"model": "here", **how})


def test_texts_are_tokenized_and_ids_are_taken(tmp_path: Path) -> None:
    found = imported(
        tmp_path,
        [
            completion(id="a"),
            chat(id="b"),
            chat(
                id="c", message={"content": [{"type": "text", "text": "Ye"}, {"type": "text", "text": "s."}]}
            ),
            chat({"messages": [{"role": "user", "content": [{"type": "text", "text": "Is it?"}]}]}, id="d"),
            chat(
                choice={"token_ids": [*ids("Yes."), EOS]},
                prompt_token_ids=list(ids("<user>Is it?<a>")),
                id="e",
            ),
            completion(
                choice={
                    "token_ids": [7, 8],
                    "prompt_token_ids": [5, 6],
                    "text": byte_tokenizer().decode([7, 8]),
                },
                id="f",
            ),
            completion({"prompt": [1, 2]}),
        ],
    )
    assert [(one.id, one.prompt, one.output) for one in found.transcripts] == [
        ("a", ids("Once"), ids(" more")),
        ("b", ids("<user>Is it?<a>"), ids("Yes.")),
        ("c", ids("<user>Is it?<a>"), ids("Yes.")),
        ("d", ids("<user>Is it?<a>"), ids("Yes.")),
        ("e", ids("<user>Is it?<a>"), (*ids("Yes."), EOS)),  # ids have the end token
        ("f", (5, 6), (7, 8)),
        ("7", (1, 2), ids(" more")),
    ]
    assert all(one.sampling.greedy and one.model == NAME for one in found.transcripts)
    assert found.counts["from_ids"] == 2 and found.counts["prompts_differ"] == 1
    assert found.counts["ends_unseen"] == 3 and not found.counts["texts_differ"]


def test_each_prompt_and_choice_is_a_transcript_of_its_own(tmp_path: Path) -> None:
    choices = [{"index": i, "text": text} for i, text in enumerate("abcd")]
    found = imported(tmp_path, [completion({"prompt": ["x", "y"], "n": 2}, id="r", choices=choices[::-1])])
    assert [(one.id, one.prompt, one.output) for one in found.transcripts] == [
        (f"r-{i}", ids("xxyy"[i]), ids("abcd"[i])) for i in range(4)
    ]
    found = imported(tmp_path, [completion({"prompt": [[1, 2], [3]]}, id="r", choices=choices[:2])])
    assert [one.prompt for one in found.transcripts] == [(1, 2), (3,)]
    for request, answers in (
        ({"prompt": ["x", "y"]}, choices[:1]), ({}, choices[:2]), ({"n": 3}, choices[:2]),
        ({"prompt": []}, choices[:1]), ({"n": 2}, [choices[0], {**choices[1], "index": -1}]),
        ({"n": 2}, [choices[0], choices[0]]), ({"n": 2}, [choices[0], choices[2]]), ({}, []),
    ):  # fmt: skip
        with pytest.raises(InputError, match=r"line 1: \d choices"):
            imported(tmp_path, [completion(request, choices=answers)])


THOUGHT = {"reasoning_content": "Well"}
REFUSED: dict[str, tuple[Line, str]] = {
    "no temperature": (completion({"temperature": None}), "means 1"),
    "warm": (completion({"temperature": 0.5}), "temperature 0.5"),
    "an echo of another prompt": (completion({"echo": True}, {"text": "Twice more"}), "'echo'"),
    "an echo alone": (completion({"echo": True, "max_tokens": 0}, {"text": "Once"}), "0 tokens"),
    "reasoning that is hidden": (chat({"include_reasoning": False}), "include_reasoning"),
    "reasoning_content": (chat(message=THOUGHT), "'reasoning_content'"),
    "reasoning": (chat(message={"reasoning": "Well"}), "'reasoning'"),
    "reasoning in the choice": (completion(choice={"reasoning": "Well"}), "'reasoning'"),
    "reasoning that is counted": (
        chat(usage={"completion_tokens_details": {"reasoning_tokens": 9}}),
        "9 tokens of reasoning",
    ),
    "tool calls": (chat(message={"content": None, "tool_calls": [{"id": "x"}]}), "'tool_calls'"),
    "a refusal": (chat(message={"content": None, "refusal": "No"}), "'refusal'"),
    "no text": (chat(message={"content": None}), "no text"),
    "a picture": (
        chat({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}),
        r"messages\[0\].content holds a part that is no text but 'image_url'",
    ),
    "several texts": (
        chat({"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 2}]}),
        "several parts",
    ),
    "a tool's answer": (
        chat({"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}),
        "'tool_call_id'",
    ),
    "tools": (chat({"tools": [{"type": "function"}]}), "'tools'"),
    "another template": (chat({"chat_template_kwargs": {"enable_thinking": False}}), "'chat_template_kwargs'"),
    "a penalty": (completion({"frequency_penalty": 0.5}), "'frequency_penalty'"),
    "a grammar": (chat({"response_format": {"type": "json_object"}}), "'response_format'"),
    "something new": (chat({"wild": 1}), "'wild'"),
    "cut by a filter": (chat(choice={"finish_reason": "content_filter"}), "'content_filter'"),
    "half a character": (completion(choice={"text": "caf\ufffd"}), "U\\+FFFD"),
    "half a pair": (completion(choice={"text": "caf\ud800"}), "surrogate"),
    "half a pair in the prompt": (completion({"prompt": "caf\ud800"}), "surrogate"),
    "half a pair in a message": (chat({"messages": [{"role": "user", "content": "\ud800"}]}), "half of a surrogate"),
    "a foreign id": (completion(choice={"token_ids": [VOCABULARY]}), f"token {VOCABULARY} is not in a vocabulary"),
    "a negative id": (completion(choice={"token_ids": [-1]}), "token -1 is not in a vocabulary"),
    "a foreign id in the prompt": (chat(prompt_token_ids=[1, 10**6]), "token 1000000 is not in a vocabulary"),
    "no ids": (completion(choice={"token_ids": ["a"]}), r"choices\[0\].token_ids\[0\]"),
    "a text for ids": (completion(choice={"token_ids": "1, 2"}), r"choices\[0\].token_ids should"),
    "an id that is no number": (completion(choice={"logprobs": {"tokens": ["token_id:x"]}}), "'x', which is no number"),
    "an id of many digits": (
        completion(choice={"logprobs": {"tokens": [f"token_id:{'9' * 5000}"]}}),
        "'9{20}', which is no number",
    ),
    "a mixed prompt": (completion({"prompt": ["a", 1]}), "request.prompt should be a text, a list of texts"),
    "a prompt of fractions": (completion({"prompt": [0.5]}), "request.prompt should be a text, a list of texts"),
    "a number for a prompt": (completion({"prompt": 3}), "request.prompt should be a text, a list of texts"),
    "a prompt of tables": (completion({"prompt": {"a": 1}}), "request.prompt should be a text, a list of texts"),
    "a deep prompt": (completion({"prompt": [[[1]]]}), "request.prompt should be a text, a list of texts"),
    "no prompts": (completion({"prompt": []}), "for 0 prompts"),
    "too many choices": (completion({"n": 10**9}), "request.n should be less than or equal to 1024"),
    "a content that is a number": (chat({"messages": [{"role": "user", "content": 3}]}), "should be a text or a list"),
    "an answer that is a picture": (chat(message={"content": [{"type": "image"}]}), "no text but 'image'"),
    "fewer ids than were drawn": (
        completion(choice={"token_ids": [1, 2]}, usage={"completion_tokens": 3}),
        "2 token ids, and its usage says 3",
    ),
    "a text that tokenizes otherwise": (
        completion(choice={"finish_reason": "length"}, usage={"completion_tokens": 6}),
        "5 tokens here, and its usage says 6",
    ),
    "more logprobs than tokens": (
        chat(choice={"logprobs": {"content": [{"token": "Y"}] * 9}}),
        "4 tokens here, and its logprobs are of 9",
    ),
    "a text that stopped at once": (
        completion({"stop": "!"}, {"text": "a", "finish_reason": "stop"}),
        "an empty answer before a stop text",
    ),
    "an empty answer": (completion(choice={"text": ""}), "an empty answer"),
    "an answer of no ids": (completion(choice={"token_ids": []}), "an empty answer"),
    "an empty prompt": (completion({"prompt": ""}), "an empty prompt"),
    "one chunk": (completion(object="text_completion.chunk"), "one chunk of a stream"),
    "neither prompt": (completion({"prompt": None}), "either messages or a prompt"),
    "no choices": ({"request": {"prompt": "a", "temperature": 0}, "response": {}}, "response.choices"),
    "a request alone": ({"request": {}}, "response"),
    "a response alone": (completion()["response"], "no request.*--requests"),
    "a list": ([1, 2], "no request"),
    "a response that is text": ({"request": {}, "response": "sure"}, "response should"),
    "a name of two lines": (completion(model="a\nb"), "no text of one line"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_understood_whole_is_refused_with_its_line(what: str, tmp_path: Path) -> None:
    line, said = REFUSED[what]
    with pytest.raises(InputError, match=rf"log.jsonl, line 2.*{said}"):
        imported(tmp_path, [completion(id="good"), line])


@pytest.mark.parametrize("text", ["{", "[" * 100_000, '{"request": NaN}', "\xff", "3"])
def test_damaged_lines_are_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b"\n" + text.encode("latin-1") + b"\n")
    with pytest.raises(InputError, match="line 2"):
        from_openai(path, byte_tokenizer(), VOCABULARY, model="here")


def test_token_ids_hold_what_a_text_does_not_show(tmp_path: Path) -> None:
    drawn = {"token_ids": [*ids("hm</think>Yes."), EOS]}
    read = {"prompt_token_ids": [4, 5]}
    found = imported(
        tmp_path,
        [
            chat({"tools": [{"type": "function"}], "reasoning_effort": "low"}, THOUGHT, drawn, id="a", **read),
            chat({"tools": [{"type": "function"}]}, {"content": None, "tool_calls": [{"id": "x"}]},
                 drawn | {"finish_reason": "tool_calls"}, id="b", **read),
        ],
    )  # fmt: skip
    assert [(one.prompt, one.output) for one in found.transcripts] == [
        ((4, 5), tuple(drawn["token_ids"]))
    ] * 2
    assert not found.counts["texts_differ"]  # the text is a part of what was drawn
    other = imported(tmp_path, [chat({}, THOUGHT | {"content": "No."}, drawn, **read)])
    assert other.counts["texts_differ"] == 1
    written = {"logprobs": {"tokens": [f"token_id:{token}" for token in drawn["token_ids"]]}}
    logged = {"logprobs": {"content": [{"token": token} for token in written["logprobs"]["tokens"]]}}
    found = imported(
        tmp_path,
        [
            completion(choice=written, id="a"),
            chat({}, THOUGHT, logged, id="b"),
            completion(choice=written | drawn),
        ],
    )
    assert [one.output for one in found.transcripts] == [tuple(drawn["token_ids"])] * 3


def test_an_echoed_prompt_is_parted_from_the_answer(tmp_path: Path) -> None:
    asked, said = list(ids("Once")), list(ids(" more"))
    usage = {"usage": {"prompt_tokens": 4, "completion_tokens": 5}}
    logged = {"prompt_token_ids": asked}
    names = [{"logprobs": {"tokens": [f"token_id:{token}" for token in asked + said]}}]
    lines = [
        completion({"echo": True}, {"text": "Once more"}, **usage),
        completion({"echo": True, "prompt": asked}, {"text": "Once more"}),
        # vLLM leaves the prompt out of text and ids where it gives ids
        completion({"echo": True}, {"token_ids": said, **logged}, **usage),
        completion({"echo": True}, {"text": "Once more", "token_ids": asked + said, **logged}, **usage),
        completion({"echo": True}, {"text": "Once more", **names[0]}, **usage),
        # the answer begins as the prompt does
        completion(
            {"echo": True},
            {"text": "Once m", "token_ids": [*asked, *said[:2]]},
            usage={"completion_tokens": 6},
        ),
    ]
    found = imported(tmp_path, lines)
    assert [one.prompt for one in found.transcripts] == [ids("Once")] * 6
    assert [one.output for one in found.transcripts] == [ids(" more")] * 5 + [ids("Once m")]
    assert not found.counts["texts_differ"] and not found.counts["ids_counted"]
    with pytest.raises(InputError, match="no usage says whether"):
        imported(tmp_path, [completion({"echo": True}, {"text": "Once more", "token_ids": asked + said})])
    two = [
        {"index": i, "text": f"{text}!", "token_ids": list(ids(f"{text}!"))} for i, text in enumerate("ab")
    ]
    several = completion({"echo": True, "prompt": ["a", "b"]}, choices=two, usage={"completion_tokens": 2})
    assert [one.output for one in imported(tmp_path, [several]).transcripts] == [ids("!")] * 2
    # A chat echoes a last message of the assistant, and no other.
    assert imported(tmp_path, [chat({"echo": True})]).transcripts[0].output == ids("Yes.")
    prefilled = {"messages": [{"role": "assistant", "content": "Y"}], "echo": True}
    assert imported(tmp_path, [chat(prefilled)]).transcripts[0].output == ids("es.")


def test_a_text_that_was_cut_at_a_stop_text_loses_its_last_token(tmp_path: Path) -> None:
    """A token may have gone on into the stop text: "." was ".\\n\\n"."""
    lines = [
        completion({"stop": ["!!"]}, {"finish_reason": "stop"}, id="a", usage={"completion_tokens": 7}),
        completion({"stop": "!!"}, {"finish_reason": "stop", "stop_reason": None}, id="b"),
        completion({"stop": "!!"}, {"finish_reason": "length"}, id="c"),
    ]
    found = imported(tmp_path, lines)
    assert [one.output for one in found.transcripts] == [ids(" mor"), ids(" more"), ids(" more")]
    assert found.noted["cut"] == ["a"]


def test_what_cannot_be_imported_is_left_out_on_request(tmp_path: Path) -> None:
    lines = [chat(message={"refusal": "No"}, id="a"), completion(id="b"), completion({"wild": 1}, id="c")]
    with pytest.raises(InputError, match=r"line 1.*a refusal \('refusal'\).*return_token_ids.*--skip"):
        imported(tmp_path, lines)
    found = imported(tmp_path, lines, skip=True)
    assert [one.id for one in found.transcripts] == ["b"] and found.counts["left_out"] == 2
    notes = found.notes()
    assert notes[0] == "requests left out: 2 (line 1, line 3)"
    assert "line 1: the answer has a refusal" in notes[1] and "line 3: the request has 'wild'" in notes[2]
    with pytest.raises(
        InputError, match=r"no answer of .* can be imported; the first reason: .*line 1.*refusal"
    ):
        imported(tmp_path, lines[:1], skip=True)
    with pytest.raises(InputError, match="import each model's answers by themselves"):
        imported(tmp_path, [completion(id="a"), completion(model="other")], skip=True)


def test_requests_that_the_server_did_not_answer_are_counted(tmp_path: Path) -> None:
    asked = completion()["request"]
    failed: list[Line] = [
        {"request": asked, "response": {"error": {"message": "full", "code": 500}}},
        {"request": asked, "response": {"object": "error", "message": "full", "code": 400}},
        {"request": asked, "response": None},
        {"request": asked, "response": [completion()["response"], {"error": {"message": "full"}}]},
        completion() | {"error": "timeout"},
    ]
    found = imported(tmp_path, [completion(id="a"), *failed])
    assert len(found.transcripts) == 1 and found.counts["failed"] == len(failed)
    assert found.notes() == ["requests that the server did not answer: 5 (line 2, line 3, line 4, …)"]
    with pytest.raises(
        InputError, match=r"no answer of .* can be imported; the server failed, first by: full"
    ):
        imported(tmp_path, failed)


def test_logs_of_openai_s_client_are_read(tmp_path: Path) -> None:
    """Its dumps have every field that there may be, empty; options that it does not know are in ``extra_body``."""
    from openai.types import Completion
    from openai.types.chat import ChatCompletion

    request = {
        "extra_body": {"return_token_ids": True, "top_k": 1},
        "timeout": 5,
        "add_special_tokens": False,
    }
    whole = ChatCompletion.model_validate(
        chat(choice={"token_ids": [8, 9]}, id="a", object="chat.completion", created=1, prompt_token_ids=[7])[
            "response"
        ]
    )
    text = Completion.model_validate(
        completion(choice={"finish_reason": "length"}, id="b", object="text_completion", created=1)[
            "response"
        ]
    )
    lines = [
        chat(request) | {"response": whole.model_dump(mode="json"), "seconds": 0.5},
        completion() | {"response": text.model_dump(mode="json")},
    ]
    found = imported(tmp_path, lines)
    assert [(one.prompt, one.output) for one in found.transcripts] == [
        ((7,), (8, 9)),
        (ids("Once"), ids(" more")),
    ]
    with pytest.raises(InputError, match="'logit_bias'"):
        imported(tmp_path, [chat({"extra_body": {"logit_bias": {"5": 1}}})])


def test_files_of_other_programs_are_read(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    lines = [json.dumps(completion(id="a")), "", json.dumps(completion(id="b"))]
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    found = from_openai(path, byte_tokenizer(), VOCABULARY, model="here")
    assert [one.id for one in found.transcripts] == ["a", "b"]
    path.write_text(json.dumps(completion(), indent=1))
    with pytest.raises(InputError, match=r"line 1 begins a value of several lines"):
        from_openai(path, byte_tokenizer(), VOCABULARY, model="here")
    path.write_text("")
    with pytest.raises(InputError, match="holds no responses"):
        from_openai(path, byte_tokenizer(), VOCABULARY, model="here")


def test_responses_are_paired_with_requests_in_order(tmp_path: Path) -> None:
    asked = tmp_path / "requests.jsonl"
    asked.write_text("".join(json.dumps(completion({"prompt": text})["request"]) + "\n" for text in "xy"))
    answers = [completion(id=name)["response"] for name in "ab"]
    found = imported(tmp_path, answers, requests=asked)
    assert [(one.id, one.prompt) for one in found.transcripts] == [("a", ids("x")), ("b", ids("y"))]
    with pytest.raises(InputError, match=r"holds 1 responses and .* 2 requests"):
        imported(tmp_path, answers[:1], requests=asked)
    with pytest.raises(InputError, match="line 2 holds its request itself; leave --requests out"):
        imported(tmp_path, [answers[0], completion()], requests=asked)


def test_what_does_not_fit_together_is_counted(tmp_path: Path) -> None:
    usage = {"prompt_tokens": 4, "completion_tokens": 5}
    both = [{"index": i, "text": text} for i, text in enumerate(("one", "two"))]
    lines = [
        completion(choice={"token_ids": list(ids(" more"))}, usage=usage),
        completion(choice={"token_ids": list(ids(" less"))}),
        completion(usage=usage),
        completion(choice={"finish_reason": "stop"}, usage=usage | {"completion_tokens": 6}),
        completion(usage=usage | {"prompt_tokens": 5}),
        completion({"stop": ["!"]}, {"token_ids": list(ids(" more!"))}),
        completion(choice={"token_ids": list(ids(" more"))}, usage=usage | {"completion_tokens": 4}),
        # usage is the sum: prompts once, answers all
        completion({"n": 2}, choices=both, usage={"prompt_tokens": 4, "completion_tokens": 8}),
        completion({"prompt": ["a", "b"]}, choices=both, usage={"prompt_tokens": 2, "completion_tokens": 6}),
    ]
    found = imported(tmp_path, lines)
    counts = found.counts
    wanted = {
        "from_ids": 4, "texts_differ": 1, "prompts_counted": 1, "ids_counted": 1, "ends_unseen": 1, "prompts_differ": 0,
    }  # fmt: skip
    assert found.noted["prompts_counted"] == ["5"] and found.noted["ids_counted"] == ["7"]
    with pytest.raises(InputError, match="6 tokens here, and its usage says 9"):
        imported(
            tmp_path, [lines[-1] | {"response": lines[-1]["response"] | {"usage": {"completion_tokens": 9}}}]
        )
    assert {name: counts[name] for name in wanted} == wanted


def test_the_log_s_own_model_is_kept(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"line 1 is an answer of the model 'some/model'; say with --model"):
        imported(tmp_path, [completion()], model=None)
    with pytest.raises(InputError, match=r"line 2 is an answer of the model 'other', .*'some/model'"):
        imported(tmp_path, [completion(id="a"), completion(model="other")])
    nameless = completion({"model": None}, model=None)
    with pytest.raises(InputError, match=r"line 1 names no model; say with --model"):
        imported(tmp_path, [nameless], model=None)
    assert imported(tmp_path, [nameless]).transcripts[0].model == "here"
    own = completion({"model": "builtin"}, model=None)
    assert imported(tmp_path, [own], model=None).transcripts[0].model == "builtin"
    found = imported(tmp_path, [completion({"model": "alias"})])
    assert found.transcripts[0].model == NAME and found.asked == {"alias"}


def test_batches_are_read_with_their_input(tmp_path: Path) -> None:
    asked = tmp_path / "input.jsonl"
    lines = [
        {
            "custom_id": name,
            "method": "POST",
            "url": "/v1/completions",
            "body": completion({"prompt": name})["request"],
        }
        for name in ("one", "two", "three")
    ]
    asked.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def answered(name: str, **change: Any) -> Line:
        body = {"status_code": 200, "request_id": "r", "body": completion(id="same")["response"]}
        return {"id": "b", "custom_id": name, "response": body, "error": None, **change}

    found = imported(tmp_path, [answered("two"), answered("one")], requests=asked)
    assert [(one.id, one.prompt) for one in found.transcripts] == [("two", ids("two")), ("one", ids("one"))]
    assert found.counts["unanswered"] == 1
    for failure in (
        {"error": {"message": "full"}}, {"response": {"status_code": 429, "body": {}}}, {"response": None},
        {"response": {"status_code": 200, "body": {"error": {"message": "full"}}}},
    ):  # fmt: skip
        found = imported(tmp_path, [answered("two"), answered("one", **failure)], requests=asked)
        assert found.noted["failed"] == ["one"] and found.counts["unanswered"] == 1
    with pytest.raises(InputError, match=r"log.jsonl, line 1 is of an output of the Batch API.*--requests"):
        imported(tmp_path, [answered("two")])
    for line, said in (
        (answered("four"), "no request has the custom_id 'four'"),
        (answered("two"), "stands twice"),
        (answered(3), "custom_id"),  # type: ignore[arg-type]
        (answered("one", response=3), "response should"),
        (completion(), "no custom_id"),
    ):
        with pytest.raises(InputError, match=f"line 2.*{said}"):
            imported(tmp_path, [answered("two"), line], requests=asked)
    asked.write_text(json.dumps(lines[0]) + "\n" + json.dumps(lines[0]) + "\n")
    with pytest.raises(InputError, match=r"input.jsonl, line 2: the custom_id 'one' stands twice"):
        imported(tmp_path, [answered("one")], requests=asked)


def test_an_imported_log_is_judged_by_simulated_honest_answers(tmp_path: Path) -> None:
    """Greedy is greedy, whatever temperature and filters a request names beside it."""
    model = save_tiny("llama", tmp_path / "model", tokenizer=True)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one prompt of bytes\nanother prompt\nand a third\n")
    how = ("--model", model, "--dtype", "float32", "--device", "cpu")

    def verify(*words: object) -> Result:
        return CliRunner().invoke(app, ["verify", *map(str, words), "--no-record"])

    for name, variant in {"honest": "honest", "cheap": "layers=2"}.items():
        asked = ("--prompts", prompts, "--method", "greedy", "--new-tokens", 12, "--provider", variant)
        assert verify("simulate", "--out", tmp_path / name, *asked, *how).exit_code == 0
    for name, code in {"honest": 0, "cheap": 1}.items():
        log, out = tmp_path / f"{name}.log", tmp_path / f"{name}.jsonl"
        lines = [
            completion({"prompt": list(one.prompt)}, {"text": None, "token_ids": list(one.output)}, id=one.id)
            for one in read_transcripts(tmp_path / name)
        ]
        log.write_text("".join(json.dumps(line) + "\n" for line in lines))
        assert verify("import", log, "--out", out, "--model", model).exit_code == 0
        level = ("--honest", tmp_path / "honest", "--false-positives", 0.1)
        result = verify("score", out, *level, *how, "--json")
        assert result.exit_code == code, result.output
        assert json.loads(result.stdout)["verdict"]["diverges"] is bool(code)


@pytest.mark.slow
def test_an_imported_log_of_another_model_needs_the_model(tmp_path: Path) -> None:
    """The built-in model, which is meant where none is named, does not vouch for it."""
    log, out = tmp_path / "log.jsonl", tmp_path / "out.jsonl"
    log.write_text(json.dumps(completion()) + "\n")
    refused = CliRunner().invoke(app, ["verify", "import", str(log), "--out", str(out), "--no-record"])
    assert refused.exit_code == 2 and "some/model" in refused.stderr and not out.exists()


def test_an_imported_log_of_another_model_gets_no_verdict_for_free(tmp_path: Path) -> None:
    """None of its tokens is the model's: whatever is asked, the exit code is not 0."""
    model = save_tiny("llama", tmp_path / "model", tokenizer=True)
    log, out = tmp_path / "log.jsonl", tmp_path / "out.jsonl"
    log.write_text(json.dumps(completion(choice={"token_ids": [9, 9, 9, 9]})) + "\n")

    def verify(*words: object) -> Result:
        return CliRunner().invoke(app, ["verify", *map(str, words), "--no-record"])

    told = verify("import", log, "--out", out, "--model", model)
    assert told.exit_code == 0 and "another text than the log's: 1 (1); the ids are taken" in told.stdout
    assert verify("import", log, "--out", out, "--model", model).exit_code == 2  # it exists
    assert "repetition" not in told.stdout
    (Path(model) / "generation_config.json").write_text('{"repetition_penalty": 1.05}')
    again = verify("import", log, "--out", tmp_path / "again.jsonl", "--model", model)
    assert again.exit_code == 0 and "has repetition_penalty 1.05" in again.stdout
    assert read_transcripts(out)[0].model == NAME
    how = ("--dtype", "float32", "--device", "cpu")
    assert verify("score", out, *how).exit_code == 2  # nobody said which model it is
    result = verify("score", out, "--model", model, *how, "--json")
    found = json.loads(result.stdout)
    assert result.exit_code == 1 and found["summary"]["same_token"] == 0 and "--honest" in found["undecided"]
