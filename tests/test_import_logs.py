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
        ({"prompt": []}, choices[:1]),
        ({"n": 2}, [choices[0], choices[0]]), ({"n": 2}, [choices[0], choices[2]]), ({}, []),
    ):  # fmt: skip
        with pytest.raises(InputError, match=r"line 1: \d choices"):
            imported(tmp_path, [completion(request, choices=answers)])


THOUGHT = {"reasoning_content": "Well"}
REFUSED: dict[str, tuple[Line, str]] = {
    "no temperature": (completion({"temperature": None}), "means 1"),
    "warm": (completion({"temperature": 0.5}), "temperature 0.5"),
    "echo": (completion({"echo": True}, {"text": "Once more"}), "'echo'"),
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
        r"messages\[0\].content",
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
    "an empty answer": (completion(choice={"text": ""}), "empty prompt or answer"),
    "an answer of no ids": (completion(choice={"token_ids": []}), "empty prompt or answer"),
    "an empty prompt": (completion({"prompt": ""}), "empty prompt or answer"),
    "neither prompt": (completion({"prompt": None}), "either messages or a prompt"),
    "no choices": ({"request": {"prompt": "a", "temperature": 0}, "response": {}}, "response.choices"),
    "a request alone": ({"request": {}}, "response"),
    "a batch without its input": (
        {"custom_id": "a", "response": {"status_code": 200, "body": completion()["response"]}},
        "--requests",
    ),
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
    with pytest.raises(InputError, match="'echo'"):  # of ids, too, nobody knows what they are then
        imported(tmp_path, [completion({"echo": True}, {"token_ids": [1]})])


def test_what_does_not_fit_together_is_counted(tmp_path: Path) -> None:
    usage = {"prompt_tokens": 4, "completion_tokens": 5}
    lines = [
        completion(choice={"token_ids": list(ids(" more"))}, usage=usage),
        completion(choice={"token_ids": list(ids(" less"))}),
        completion(usage=usage),
        completion(choice={"finish_reason": "stop"}, usage=usage | {"completion_tokens": 6}),
        completion(choice={"finish_reason": "length"}, usage=usage | {"completion_tokens": 6}),
        completion(usage=usage | {"prompt_tokens": 5}),
        completion({"stop": ["!"]}, {"token_ids": list(ids(" more!"))}),
    ]
    counts = imported(tmp_path, lines).counts
    wanted = {"from_ids": 3, "texts_differ": 1, "counts_differ": 2, "ends_unseen": 1, "prompts_differ": 0}
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
    for line, said in (
        (answered("four"), "no request has the custom_id 'four'"),
        (answered("two"), "stands twice"),
        (answered("one", error={"message": "full"}), "failed"),
        (answered("one", response={"status_code": 429, "body": {}}), "failed \\(429\\)"),
        (answered("one", response=None), "response"),
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
    assert told.exit_code == 0 and "1 answers whose token ids are another text" in told.stdout
    assert verify("import", log, "--out", out, "--model", model).exit_code == 2  # it exists
    assert read_transcripts(out)[0].model == NAME
    how = ("--dtype", "float32", "--device", "cpu")
    assert verify("score", out, *how).exit_code == 2  # nobody said which model it is
    result = verify("score", out, "--model", model, *how, "--json")
    found = json.loads(result.stdout)
    assert result.exit_code == 1 and found["summary"]["same_token"] == 0 and "--honest" in found["undecided"]
