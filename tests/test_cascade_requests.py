"""What a request says is done as transformers and vLLM define it: the plain model is the oracle."""

import json
import time
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from starlette.testclient import TestClient
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from hiddenlab.defenses.cascade import command
from hiddenlab.defenses.cascade.api import make_app
from hiddenlab.defenses.cascade.defaults import Defaults, load_defaults
from hiddenlab.defenses.cascade.generate import generate
from hiddenlab.defenses.cascade.load import load_cascade_model
from hiddenlab.defenses.cascade.local import LocalCascade
from hiddenlab.defenses.cascade.service import Limits
from hiddenlab.defenses.cascade.testing import NAME, Scripted, make_service
from hiddenlab.errors import InputError
from hiddenlab.models.load import load_tokenizer, resolve_model
from hiddenlab.models.reading import quiet_transformers
from hiddenlab.sharding import Plan
from hiddenlab.testing import EOS, VOCABULARY, byte_tokenizer, save_tiny
from tests.test_cascade_decoding import made as tokenizer_of

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT: list[int] = byte_tokenizer()("Tell me.")["input_ids"]


def model_with(folder: Path, tokenizer: Any = None, architecture: str = "llama", **generation: Any) -> str:
    """A tiny model whose generation_config.json says this."""
    path = save_tiny(architecture, folder, eos_token_id=EOS)
    (tokenizer or byte_tokenizer()).save_pretrained(path)
    if generation:
        GenerationConfig(**generation).save_pretrained(path)
    return path


@lru_cache(4)
def plain_model(path: str) -> Any:
    with quiet_transformers():
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def plain(path: str, ids: list[int] = PROMPT, **options: Any) -> list[int]:
    """transformers' own greedy answer, with all that the model's files say."""
    given = torch.tensor([ids])
    options = {"max_new_tokens": 12, "do_sample": False, **options}
    with quiet_transformers(), torch.no_grad():
        out = plain_model(path).generate(given, attention_mask=torch.ones_like(given), **options)
    return out[0, len(ids) :].tolist()


def client_of(path: str, **options: Any) -> TestClient:
    ref = resolve_model(path)
    tokenizer = load_tokenizer(ref)
    cascade = LocalCascade(load_cascade_model(path))
    service = make_service(cascade, tokenizer=tokenizer, defaults=load_defaults(ref, tokenizer), **options)
    return TestClient(make_app(service))


def ask(client: TestClient, path: str = COMPLETIONS, **fields: Any) -> dict[str, Any]:
    body: dict[str, Any] = {"model": NAME, "temperature": 0, "max_tokens": 12} | fields
    if path == COMPLETIONS:
        body.setdefault("prompt", PROMPT)
    reply = client.post(path, json={name: value for name, value in body.items() if value is not ...})
    assert reply.status_code == 200, reply.text
    if not body.get("stream"):
        return reply.json()
    return {"events": [json.loads(e[6:]) for e in reply.text.split("\n\n")[:-2]]}


def texts(answer: dict[str, Any]) -> list[str]:
    if "events" not in answer:
        return [choice.get("text", choice.get("message", {}).get("content")) for choice in answer["choices"]]
    found: dict[int, str] = {}
    for event in answer["events"]:
        for choice in event["choices"]:
            more = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            found[choice["index"]] = found.get(choice["index"], "") + more
    return [found[index] for index in sorted(found)]


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return model_with(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def nodes(tiny_model: str) -> LocalCascade:
    return LocalCascade(load_cascade_model(tiny_model))


@pytest.fixture(scope="module")
def client(tiny_model: str) -> Iterator[TestClient]:
    with client_of(tiny_model) as found:
        yield found


@pytest.fixture(scope="module")
def likeliest(tiny_model: str) -> list[int]:
    return plain(tiny_model)


# ---- the plain model's text


@pytest.mark.slow
@pytest.mark.parametrize("family", ["byte-level", "sentencepiece", "metaspace", "words"])
def test_the_text_is_the_plain_models_streamed_or_not(tmp_path: Path, family: str) -> None:
    """Character for character, over families of tokenizers."""
    tokenizer = tokenizer_of(family)
    path = model_with(tmp_path / family, tokenizer, eos_token_id=[tokenizer.eos_token_id])
    tokenizer = AutoTokenizer.from_pretrained(path)
    with client_of(path) as client:
        for start in range(3, 40, 12):
            ids = [start, start + 1, start + 2]
            expected = tokenizer.decode(plain(path, ids, max_new_tokens=10), skip_special_tokens=True)
            asked = {"prompt": ids, "max_tokens": 10}
            assert texts(ask(client, **asked)) == [expected]
            assert texts(ask(client, **asked, stream=True)) == [expected]


# ---- generation_config.json


def test_several_stop_tokens_of_the_models_file_end_an_answer(tmp_path: Path, likeliest: list[int]) -> None:
    """Over the server and over ``cascade run``; the tokenizer knows one of them alone."""
    other = likeliest[4]
    path = model_with(tmp_path / "model", eos_token_id=[EOS, other], repetition_penalty=1.0001)
    expected = plain(path)
    assert len(expected) == likeliest.index(other) + 1 < 12
    with client_of(path) as client:
        answer = ask(client)
        assert answer["usage"]["completion_tokens"] == len(expected)
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert texts(answer) == [byte_tokenizer().decode(expected, skip_special_tokens=True)]
        assert ask(client, ignore_eos=True)["usage"]["completion_tokens"] == 12
    text = byte_tokenizer().decode(PROMPT)
    ran = command.run(text, command.Backend(model=path), alpha=2, new_tokens=12, compare=True)
    assert ran["new_tokens"] == len(expected)
    assert ran["same_tokens"]


@pytest.mark.parametrize(
    "generation",
    [
        {"repetition_penalty": 1.7},
        {"no_repeat_ngram_size": 2},
        {"suppress_tokens": "likeliest"},
        {"begin_suppress_tokens": "likeliest"},
        {"bad_words_ids": "words"},
        {"sequence_bias": "bias"},
        {"min_new_tokens": 9, "eos_token_id": "fifth"},
        {"min_length": 12, "eos_token_id": "fifth"},
        {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.3},
    ],
    ids=str,
)
def test_rules_of_the_models_file_hold_for_greedy_answers(
    tmp_path: Path, nodes: LocalCascade, likeliest: list[int], generation: dict[str, Any]
) -> None:
    """As in transformers' own greedy ``generate``."""
    values = {
        "likeliest": likeliest[:2], "words": [[likeliest[0]], likeliest[1:3]], "fifth": [EOS, likeliest[4]],
        "bias": [[[likeliest[0]], -50.0]],
    }  # fmt: skip
    generation = {
        name: values.get(value, value) if isinstance(value, str) else value
        for name, value in generation.items()
    }
    path = model_with(tmp_path / "model", **({"eos_token_id": EOS} | generation))
    expected = plain(path)
    assert expected != likeliest
    defaults = load_defaults(resolve_model(path), byte_tokenizer())
    given, made = torch.tensor(PROMPT), Plan.clustered(len(PROMPT), 1, alpha=2)
    answer = generate(nodes, given, made, new_tokens=12, sampling=defaults.greedy(), stop=defaults.stop)
    assert list(answer) == expected


def test_stop_tokens_come_from_the_first_file_that_names_any(tmp_path: Path) -> None:
    for name, generation, expected in (
        ("generation", {"eos_token_id": [7, 9]}, {7, 9}),
        ("config", {"temperature": 0.5, "do_sample": True}, {EOS}),
        ("no file", {}, {EOS}),
    ):
        path = model_with(tmp_path / name, **generation)
        if not generation:
            (Path(path) / "generation_config.json").unlink(missing_ok=True)
        assert load_defaults(resolve_model(path), byte_tokenizer()).stop == expected
    config = json.loads((Path(path) / "config.json").read_text())
    (Path(path) / "config.json").write_text(json.dumps(config | {"eos_token_id": None}))
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = "<s>"
    assert load_defaults(resolve_model(path), tokenizer).stop == {tokenizer.eos_token_id}


def test_a_models_file_that_asks_for_more_is_refused(tmp_path: Path) -> None:
    path = model_with(tmp_path / "model")
    for content, says in (
        ({"num_beams": 4}, "asks for num_beams, which is not offered over nodes; remove it from that file"),
        ({"no_repeat_ngram_size": "two"}, "generation_config.json of .* is damaged|cannot read"),
        ({"repetition_penalty": -1.0}, "repetition_penalty above 0"),
    ):
        (Path(path) / "generation_config.json").write_text(json.dumps(content))
        with pytest.raises(InputError, match=says):
            load_defaults(resolve_model(path), byte_tokenizer())
    (Path(path) / "generation_config.json").write_text(json.dumps({"num_beams": 1, "temperature": 0.5}))
    assert load_defaults(resolve_model(path), byte_tokenizer()).drawn == {"temperature": 0.5}


def test_draws_take_the_models_values_where_a_request_says_none() -> None:
    """And a request's own before them, OpenAI's where neither says."""
    from hiddenlab.defenses.cascade.bodies import CompletionBody

    service = make_service(defaults=Defaults(frozenset(), {"temperature": 0.6, "top_k": 20}, 1.2))
    body = CompletionBody(model=NAME, prompt="x", top_k=-1, min_p=0.1)
    found = service.sampling(body, 5)
    drawn = (found.temperature, found.top_k, found.top_p, found.min_p)
    assert (*drawn, found.repetition_penalty, found.seed) == (0.6, 0, 1.0, 0.1, 1.2, 5)
    plainly = make_service().sampling(CompletionBody(model=NAME, prompt="x"), 0)
    assert (plainly.temperature, plainly.top_k, plainly.top_p, plainly.repetition_penalty) == (
        1.0,
        0,
        1.0,
        1.0,
    )


# ---- fields that change which token is chosen


@pytest.mark.slow
def test_penalties_and_biases_change_the_likeliest_token(client: TestClient, tiny_model: str) -> None:
    """Step by step, from the plain model's logits."""
    model = plain_model(tiny_model)

    def expected(change: Callable[[torch.Tensor, list[int]], torch.Tensor]) -> str:
        ids = list(PROMPT)
        for _ in range(12):
            with torch.no_grad():
                logits = model(torch.tensor([ids])).logits[0, -1]
            ids.append(int(change(logits.clone(), ids).argmax()))
            if ids[-1] == EOS:
                break
        return byte_tokenizer().decode(ids[len(PROMPT) :], skip_special_tokens=True)

    def counted(ids: list[int]) -> torch.Tensor:
        return torch.bincount(torch.tensor(ids[len(PROMPT) :], dtype=torch.long), minlength=VOCABULARY)

    def repeated(logits: torch.Tensor, ids: list[int]) -> torch.Tensor:
        for token in set(ids):
            logits[token] = logits[token] / 1.6 if logits[token] > 0 else logits[token] * 1.6
        return logits

    usual = expected(lambda logits, ids: logits)
    favourite = plain(tiny_model)[1]

    def biased(logits: torch.Tensor, ids: list[int]) -> torch.Tensor:
        logits[favourite] -= 100
        logits[5] += 1.5
        return logits

    cases: list[tuple[dict[str, Any], str]] = [
        ({"frequency_penalty": 2.0}, expected(lambda logits, ids: logits - 2 * counted(ids))),
        ({"presence_penalty": 2.0}, expected(lambda logits, ids: logits - 2 * (counted(ids) > 0))),
        ({"repetition_penalty": 1.6}, expected(repeated)),
        ({"logit_bias": {str(favourite): -100, "5": 1.5}}, expected(biased)),
    ]
    assert texts(ask(client)) == [usual]
    assert usual not in [text for _, text in cases]
    for fields, text in cases:
        assert texts(ask(client, **fields)) == [text], fields


def test_min_p_leaves_only_likely_tokens(client: TestClient, likeliest: list[int]) -> None:
    greedy = byte_tokenizer().decode(likeliest, skip_special_tokens=True)
    warm = {"temperature": 1.5, "seed": 3}
    assert texts(ask(client, **warm, min_p=1.0)) == [greedy] != texts(ask(client, **warm))


def test_min_tokens_and_stop_token_ids(client: TestClient, likeliest: list[int]) -> None:
    """No token or text ends an answer before it has so many tokens; a stop token's text is left out."""
    third = likeliest[2]
    first = likeliest.index(third)
    answer = ask(client, stop_token_ids=[third])
    assert answer["usage"]["completion_tokens"] == first + 1
    assert texts(answer) == [byte_tokenizer().decode(likeliest[:first], skip_special_tokens=True)]
    longer = ask(client, stop_token_ids=[third], min_tokens=8)
    assert 8 <= longer["usage"]["completion_tokens"] <= 12


def test_a_stop_text_ends_no_answer_before_its_min_tokens() -> None:
    scripted = Scripted()
    scripted.says("abXcdXef")
    with TestClient(make_app(make_service(scripted))) as client:
        for stream in (False, True):
            assert texts(ask(client, prompt="x", max_tokens=8, stop="X", stream=stream)) == ["ab"]
            asked = {"prompt": "x", "max_tokens": 8, "stop": "X", "min_tokens": 4, "stream": stream}
            assert texts(ask(client, **asked)) == ["abXcd"]


# ---- several prompts and choices


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_get_answers_in_their_order(client: TestClient, stream: bool) -> None:
    said = ["Hello", "Say it. ", "x"]
    alone = [texts(ask(client, prompt=one, max_tokens=5))[0] for one in said]
    assert texts(ask(client, prompt=said, max_tokens=5, stream=stream)) == alone
    ids = [byte_tokenizer()(one)["input_ids"] for one in said]
    assert texts(ask(client, prompt=ids, max_tokens=5, stream=stream)) == alone
    assert texts(ask(client, prompt=[said[0]], max_tokens=5)) == alone[:1]


def test_choices_are_drawn_by_seeds_of_their_own(client: TestClient) -> None:
    """The first is that of the seed alone, and several prompts get each their own choices."""
    warm = {"temperature": 1.5, "seed": 11, "max_tokens": 4}
    three = ask(client, **warm, n=3)
    assert [choice["index"] for choice in three["choices"]] == [0, 1, 2]
    assert len(set(texts(three))) == 3
    assert texts(three)[0] == texts(ask(client, **warm))[0]
    assert texts(ask(client, **warm, n=3)) == texts(three)
    assert texts(ask(client, **warm, n=3, stream=True)) == texts(three)
    both = ask(client, **warm, n=3, prompt=[PROMPT, [72, 105]])
    assert texts(both)[:3] == texts(three)
    assert texts(both)[3:] == texts(ask(client, **warm, n=3, prompt=[72, 105]))
    assert both["usage"]["prompt_tokens"] == len(PROMPT) + 2


def test_usage_comes_last_in_a_stream(client: TestClient) -> None:
    whole = ask(client, n=2, temperature=1, seed=2)
    *chunks, last = ask(
        client, n=2, temperature=1, seed=2, stream=True, stream_options={"include_usage": True}
    )["events"]
    assert last["choices"] == [] and last["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in chunks)
    reasons = {c["choices"][0]["index"]: c["choices"][0]["finish_reason"] for c in chunks}
    assert reasons == {choice["index"]: choice["finish_reason"] for choice in whole["choices"]}


@pytest.mark.parametrize("fail_at", [None, 3])
def test_each_answer_takes_a_place_and_frees_it(fail_at: int | None) -> None:
    scripted = Scripted()
    scripted.says("ok")
    service = make_service(scripted, limits=Limits(running=3))
    with TestClient(make_app(service)) as client:
        scripted.fail_at = fail_at
        for _ in range(2):
            reply = client.post(COMPLETIONS, json={"model": NAME, "prompt": "x", "n": 3, "max_tokens": 5})
            assert reply.status_code == (200 if fail_at is None else 503)
            for _ in range(500):  # answers beside the one that failed end behind the reply
                if not service.taken:
                    break
                time.sleep(0.02)
            assert service.taken == 0
        scripted.fail_at = None
        service.taken += 1
        body = {"model": NAME, "prompt": "x", "n": 3, "max_tokens": 2}
        assert client.post(COMPLETIONS, json=body).status_code == 429
        service.taken -= 1
        assert client.post(COMPLETIONS, json=body).status_code == 200


# ---- log-probabilities


def test_log_probabilities_are_the_plain_models(
    client: TestClient, tiny_model: str, likeliest: list[int]
) -> None:
    """Of completions and chat, streamed or not: natural logarithms over the whole vocabulary, before any setting."""
    with torch.no_grad():
        scores = (
            plain_model(tiny_model)(torch.tensor([PROMPT + likeliest]))
            .logits[0]
            .log_softmax(-1)[len(PROMPT) - 1 : -1]
        )
    own = [float(row[token]) for row, token in zip(scores, likeliest, strict=True)]
    found = ask(client, logprobs=3)["choices"][0]
    said = found["logprobs"]
    assert said["token_logprobs"] == pytest.approx(own, abs=1e-4)
    assert len(said["tokens"]) == len(said["text_offset"]) == len(likeliest)
    for top, row in zip(said["top_logprobs"], scores, strict=True):
        assert sorted(top.values(), reverse=True)[:3] == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)
    assert ask(client, logprobs=0)["choices"][0]["logprobs"]["top_logprobs"] is None
    parts = [e["choices"][0]["logprobs"] for e in ask(client, logprobs=3, stream=True)["events"]]
    for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
        assert [one for part in parts if part for one in part[name]] == said[name]
    # A penalty changes the choice, and not what is told of it.
    penalized = ask(client, logprobs=0, logit_bias={str(likeliest[0]): -100}, max_tokens=1)["choices"][0]
    assert penalized["logprobs"]["token_logprobs"][0] < own[0]


def test_log_probabilities_of_a_chat_have_texts_and_bytes() -> None:
    scripted = Scripted()
    scripted.says("a€", EOS)
    with TestClient(make_app(make_service(scripted))) as client:
        fields = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 2}
        for stream in (False, True):
            answer = ask(client, CHAT, **fields, stream=stream)
            choices = [e["choices"][0] for e in answer.get("events", [answer])]
            entries = [
                entry for choice in choices for entry in (choice["logprobs"] or {"content": []})["content"]
            ]
            assert [entry["token"] for entry in entries] == [
                "a", "bytes:\\xe2", "bytes:\\x82", "bytes:\\xac", "</s>"
            ]  # fmt: skip
            assert bytes(byte for entry in entries[:4] for byte in entry["bytes"]).decode() == "a€"
            assert all(len(entry["top_logprobs"]) == 2 for entry in entries)
            assert entries[0]["top_logprobs"][0]["token"] == "a"
        assert (
            ask(client, CHAT, **(fields | {"logprobs": False, "top_logprobs": None}))["choices"][0][
                "logprobs"
            ]
            is None
        )
