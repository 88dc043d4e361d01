"""Prompts arrive unchanged from every source, and every unusable source is refused in one clear line."""

import csv
import io
import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hiddenlab.errors import HiddenlabWarning, InputError
from hiddenlab.prompts import Prompt, load_prompts

TEXTS = st.lists(st.text(min_size=1).filter(str.strip), min_size=1, max_size=5)
Write = Callable[[str, str | bytes], str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def _write(name: str, content: str | bytes) -> str:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return str(path)

    return _write


@pytest.fixture
def parquet(tmp_path: Path) -> Callable[..., str]:
    def _parquet(table: dict[str, object], name: str = "p.parquet", rows_a_group: int = 100) -> str:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        pq.write_table(pa.table(table), path, row_group_size=rows_a_group)
        return str(path)

    return _parquet


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing outside the test's own folder is written, and nothing is asked of the network."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def texts(source: str | None, **options: object) -> list[str]:
    return [prompt.text for prompt in load_prompts(source, **options)]  # type: ignore[arg-type]


def refusal(source: str, **options: object) -> str:
    """The one line with which a source is refused."""
    with pytest.raises(InputError) as caught:
        load_prompts(source, **options)  # type: ignore[arg-type]
    message = str(caught.value)
    assert message and "\n" not in message
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    return message


# The shipped set


def test_builtin_is_a_hundred_unique_prompts() -> None:
    prompts = load_prompts()
    assert len({p.text for p in prompts}) == len(prompts) == 100
    assert [p.id for p in prompts] == [f"p{n:03d}" for n in range(1, 101)]
    assert {p.source for p in prompts} == {"builtin"}
    assert load_prompts("builtin") == prompts


def test_builtin_ids_are_those_in_the_file() -> None:
    path = Path(sys.modules[load_prompts.__module__].__file__ or "").parent / "data" / "prompts.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [(row["id"], row["text"]) for row in rows] == [(p.id, p.text) for p in load_prompts()]
    kinds = {row["kind"].partition(":")[0] for row in rows}
    assert kinds == {"prose", "chat", "code", "list", "data", "language", "odd", "private"}


def test_of_the_turns_of_a_conversation_the_first_counts(tmp_path: Path) -> None:
    (tmp_path / "turns.jsonl").write_text('{"turns": ["a b", "c"]}\n{"turns": ["d", 5]}\n')
    where = str(tmp_path / "turns.jsonl")
    assert [prompt.text for prompt in load_prompts(where, column="turns", limit=1)] == ["a b"]
    with pytest.raises(InputError, match=r"line 2: a prompt must be a string, .* and this is of type list"):
        load_prompts(where, column="turns")


def test_builtin_is_varied() -> None:
    found = texts(None)
    assert len({text.split()[0] for text in found}) == 100
    assert len({text[:40] for text in found}) == 100
    assert len({char for text in found for char in text}) > 300
    assert sum("\n" in text for text in found) > 30
    assert any(text[0].isspace() for text in found) and any(text[-1].isspace() for text in found)
    for text in found:  # 50 to 200 tokens, roughly: one to five bytes each, by script and style
        assert 90 <= len(text.encode()) <= 1000
        assert len(text) >= 35
        assert "\ufffd" not in text


def test_builtin_shares_few_long_phrases() -> None:
    """No template: hardly any run of five words stands in two prompts."""
    seen: dict[tuple[str, ...], int] = {}
    shared = 0
    for n, text in enumerate(texts(None)):
        words = text.split()
        for run in zip(*(words[i:] for i in range(5)), strict=False):
            shared += seen.setdefault(run, n) != n
    assert shared <= 3


# Every source, unchanged


@settings(max_examples=50)
@given(TEXTS)
def test_jsonl_round_trip(tmp_path_factory: pytest.TempPathFactory, prompts: list[str]) -> None:
    path = tmp_path_factory.mktemp("round") / "p.jsonl"
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in prompts), encoding="utf-8")
    assert texts(str(path)) == prompts
    path.write_text("\n".join(json.dumps(t, ensure_ascii=False) for t in prompts), encoding="utf-8")
    assert texts(str(path)) == prompts


CELL = st.text(
    st.characters(codec="utf-8"), min_size=1
)  # NUL, quotes, tabs and every kind of line end included


@settings(max_examples=100)
@given(
    rows=st.lists(st.tuples(CELL.filter(str.strip), CELL), min_size=1, max_size=5),
    kind=st.sampled_from([("csv", ","), ("tsv", "\t")]),
    ends=st.sampled_from(["\n", "\r\n"]),
    quoting=st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
    mark=st.booleans(),
)
def test_tables_round_trip(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[tuple[str, str]],
    kind: tuple[str, str],
    ends: str,
    quoting: Any,
    mark: bool,
) -> None:
    if any("\r" in cell for row in rows for cell in row):
        quoting = csv.QUOTE_ALL  # a carriage return alone is not quoted by every version of the writer
    path = tmp_path_factory.mktemp("round") / f"p.{kind[0]}"
    with path.open("w", encoding="utf-8-sig" if mark else "utf-8", newline="") as file:
        writer = csv.writer(file, delimiter=kind[1], lineterminator=ends, quoting=quoting)
        writer.writerow(["an, odd\tname", "text"])
        writer.writerows((other, text) for text, other in rows)
    assert texts(str(path)) == [text for text, _ in rows]
    assert texts(str(path), limit=1) == [rows[0][0]]
    if all(other.strip() for _, other in rows):
        assert texts(str(path), column="an, odd\tname") == [other for _, other in rows]


@settings(max_examples=50)
@given(TEXTS)
def test_separated_text_round_trip(tmp_path_factory: pytest.TempPathFactory, prompts: list[str]) -> None:
    prompts = [t.replace("\r", "") for t in prompts]
    prompts = [t for t in prompts if t.strip() and "---" not in t.split("\n")]
    if not prompts:
        return
    path = tmp_path_factory.mktemp("round") / "p.md"
    path.write_bytes(("---\n" + "\n---\n".join(prompts) + "\n").encode())
    assert texts(str(path)) == prompts


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("one\ntwo\n", ["one", "two"]),
        ("  one \n\n \t\n\ttwo  ", ["  one ", "\ttwo  "]),
        ("one\r\ntwo\r\n", ["one", "two"]),
        ("a\x0cb\u2028c\nd\n", ["a\x0cb\u2028c", "d"]),
        ("\ufeffmarked\n", ["marked"]),
        ("a\nb\n---\n\nc\n\n", ["a\nb", "\nc\n"]),
        ("a\r\nb\r\n---\r\nc\r\n", ["a\r\nb", "c"]),
        ("---\nonly\none\n---\n", ["only\none"]),
        (" ---\n--- x\n----\n", [" ---", "--- x", "----"]),
    ],
)
def test_text_files(write: Write, content: str, expected: list[str]) -> None:
    assert texts(write("p.txt", content)) == expected
    assert texts(write("p.unknown", content)) == expected


def test_standard_input_is_one_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    def feed(content: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))

    feed(" a\n---\nb é \n\n".encode())
    assert load_prompts("-") == [Prompt("p001", " a\n---\nb é \n", "-")]
    feed(b" \n")
    assert refusal("-") == "standard input holds no prompts"
    feed(b"\xff")
    assert "standard input is not UTF-8" in refusal("-")


def test_columns(write: Write) -> None:
    both = write("b.jsonl", '{"prompt": "p", "text": "t"}\n\n{"text": "u", "prompt": "q", "x": 1}\n')
    assert texts(both) == ["t", "u"]
    assert texts(both, column="prompt") == ["p", "q"]
    assert texts(write("p.JSONL", '{"prompt": "p"}\n')) == ["p"]


def test_tables(write: Write) -> None:
    table = write("t.csv", 'id,prompt\n1,"a, ""b""\nc"\n\n2, d \n')
    assert texts(table) == ['a, "b"\nc', " d "]
    assert texts(table, column="id") == ["1", "2"]
    assert [p.id for p in load_prompts(table)] == ["p001", "p002"]
    assert texts(write("t.TSV", "prompt\ttext\np\tt, u\n")) == ["t, u"]
    assert texts(write("mac.csv", "text\rone\rtwo\r")) == ["one", "two"]
    assert texts(write("n.ndjson", '{"text": "a"}\n"b"\n'), limit=1) == ["a"]


def test_the_first_line_of_a_table_decides_its_delimiter(write: Write) -> None:
    assert texts(write("p.csv", "id;text\n1;a, b\n")) == ["a, b"]
    assert texts(write("p.csv", '\ufeff"text"|id\r\na;b, c;d|1\r\n')) == ["a;b, c;d"]
    assert texts(write("p.csv", "text\na; b\n")) == ["a; b"]
    assert texts(write("p.csv", '"a; b; c",text\n1,x\n')) == ["x"]


def test_json_list(write: Write) -> None:
    assert texts(write("s.json", '["a", " b\\n"]')) == ["a", " b\n"]
    assert texts(write("o.json", '[{"text": "a"}, {"text": "b"}]')) == ["a", "b"]


def test_parquet(parquet: Callable[..., str]) -> None:
    path = parquet({"n": [1, 2], "prompt": ["a ", "é\nb"], "dotted.name": ["x", "y"]})
    assert texts(path) == ["a ", "é\nb"]
    assert texts(path, column="dotted.name") == ["x", "y"]


CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "é?"}]


def test_conversations(write: Write, parquet: Callable[..., str]) -> None:
    """The same messages come out of every form in which people keep them."""
    parts = [{**CHAT[0], "name": None}, {"role": "user", "content": [{"type": "text", "text": "é"}, "?"]}]
    sharegpt = [{"from": "system", "value": "Be brief."}, {"from": "human", "value": "é?"}]
    sources = [
        write("plain.jsonl", json.dumps({"id": "7", "messages": CHAT})),
        write("parts.jsonl", json.dumps({"messages": parts})),
        write("share.jsonl", json.dumps({"conversations": sharegpt})),
        write("bare.jsonl", json.dumps(CHAT)),
        write("request.json", json.dumps({"model": "m", "messages": CHAT})),
        write("one.json", json.dumps(CHAT)),
        write("chat.csv", "id;messages\n1;" + '"' + json.dumps(CHAT).replace('"', '""') + '"\n'),
        parquet({"id": ["7"], "messages": [parts[:1] + CHAT[1:]]}),
        parquet({"id": [7], "chat": [CHAT]}, name="named.parquet"),
    ]
    for source in sources:
        (prompt,) = load_prompts(source)
        assert prompt.text == "Be brief.\né?" and list(prompt.messages or ()) == CHAT, source
        (plain,) = load_prompts(source, template=False)
        assert plain.text == prompt.text and plain.messages is None


def test_what_else_a_message_has_is_kept_for_the_template(write: Write) -> None:
    called = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    (prompt,) = load_prompts(write("p.jsonl", json.dumps({"messages": [*CHAT, called]})))
    assert prompt.messages is not None
    assert prompt.messages[-1] == {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]}


def test_token_ids(write: Write) -> None:
    (prompt,) = load_prompts(write("p.jsonl", "[5, 0, 7]\n"))
    assert prompt.tokens == (5, 0, 7) and prompt.text == "5 0 7"


def test_nulls_are_left_out_and_counted(write: Write, parquet: Callable[..., str]) -> None:
    sources = [
        parquet({"text": ["a", None, " \n", "b"]}),
        write("p.jsonl", '{"text": "a"}\n{"text": null}\n{"text": ""}\n{"text": "b"}\n'),
        write("p.csv", 'id,text\n1,a\n2,\n3," "\n4,b\n'),
        write("p.json", '["a", null, [], "b"]'),
        write("p.txt", "a\n---\n \n---\n---\nb\n"),
    ]
    for source in sources:
        with pytest.warns(HiddenlabWarning) as said:
            prompts = load_prompts(source)
        assert [(p.id, p.text) for p in prompts] == [("p001", "a"), ("p004", "b")]
        expected = f"{source}: left out 2 of 4 entries, which hold no text (null or blank)"
        assert [str(warning.message) for warning in said] == [expected]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert texts(sources[0], limit=1) == ["a"]


@pytest.mark.parametrize("name", ["p.arrow", "p.feather"])
@pytest.mark.parametrize("stream", [False, True])
def test_arrow(tmp_path: Path, name: str, stream: bool) -> None:
    path, table = (
        tmp_path / name,
        pa.table({"n": [1, 2, 3], "question": ["a", None, "é\nb"], "text.x": [1, 2, 3]}),
    )
    with (pa.ipc.new_stream if stream else pa.ipc.new_file)(str(path), table.schema) as file:
        for batch in table.to_batches(max_chunksize=2):
            file.write_batch(batch)
    with pytest.warns(HiddenlabWarning, match="1 of 3"):
        assert texts(str(path)) == ["a", "é\nb"]
    assert texts(str(path), limit=1) == ["a"]


def test_offsets_of_an_arrow_file_stay_inside_of_it(tmp_path: Path) -> None:
    """They come from the file, and pyarrow reads where they point to unless it is asked to check."""
    text = pa.Array.from_buffers(
        pa.string(), 2, [None, pa.py_buffer(np.array([0, 2**30, 2], "int32").tobytes()), pa.py_buffer(b"ab")]
    )
    batch = pa.record_batch([text], ["text"])
    with pa.ipc.new_file(str(tmp_path / "p.arrow"), batch.schema) as file:
        file.write_batch(batch)
    assert "cannot load" in refusal(str(tmp_path / "p.arrow"))


def test_limit_reads_no_further(write: Write, parquet: Callable[..., str]) -> None:
    broken_later = write("p.jsonl", '{"text": "a"}\n{"text": "b"}\n{broken\n')
    assert texts(broken_later, limit=2) == ["a", "b"]
    assert texts(parquet({"text": ["a", "b", None]}, rows_a_group=1), limit=2) == ["a", "b"]
    assert texts(write("p.txt", "a\nb\nc\n"), limit=2) == ["a", "b"]
    assert texts(write("p.txt", "a\nb\nc\n"), limit=9) == ["a", "b", "c"]
    assert load_prompts(limit=3) == load_prompts()[:3]


@pytest.mark.usefixtures("hub_cache")
def test_data_set_in_a_local_directory(write: Write, parquet: Callable[..., str], tmp_path: Path) -> None:
    write("rows/train.jsonl", '{"text": " a\\n", "other": "x"}\n{"text": "b", "other": "y"}\n')
    write("rows/test.jsonl", '{"text": "c", "other": "z"}\n')
    where = f"hf:{tmp_path / 'rows'}"
    assert load_prompts(where)[0] == Prompt("p001", " a\n", where)
    assert texts(where) == [" a\n", "b"]
    assert texts(where, limit=1) == [" a\n"]
    assert texts(f"{where}::test") == ["c"]
    assert texts(f"{where}:default:test:other") == ["z"]
    assert texts(f"{where}:::other", column="text") == [" a\n", "b"]
    parquet({"n": [1], "prompt": ["p"]}, name="arrow/train.parquet")
    assert texts(f"hf:{tmp_path / 'arrow'}") == ["p"]


@pytest.mark.usefixtures("hub_cache")
def test_unusable_data_sets(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write("rows/train.jsonl", '{"a": "x", "b": null}\n')
    where = f"hf:{tmp_path / 'rows'}"
    assert texts(where) == ["x"]
    assert "it has 'a', 'b'" in refusal(where, column="text")
    assert refusal(f"{where}:::b") == f"{where}:::b holds no prompts"
    assert "Bad split: none" in refusal(f"{where}::none")
    assert "'none' not found" in refusal(f"{where}:none")
    assert "is not of the form" in refusal("hf:")
    assert "is not of the form" in refusal("hf:a:b:c:d:e")

    def unreachable(*args: object, **options: object) -> None:
        raise ConnectionError("Couldn't reach 'no/such' on the Hub\nand a long story")

    monkeypatch.setattr("datasets.load_dataset", unreachable)
    assert refusal("hf:no/such").startswith(
        "cannot load hf:no/such: Couldn't reach 'no/such' on the Hub; is NAME"
    )


# What is refused


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("p.jsonl", '{"a": 2, "b": 1}\n', "line 1, has no column with texts; it has 'a', 'b'"),
        (
            "p.jsonl",
            '{"a": "x", "b": "y"}\n',
            "line 1, has several columns with texts: 'a', 'b'; choose with --column NAME",
        ),
        ("p.jsonl", '{"text": "x"}\n{"a": 1}\n', "line 2, has no column 'text'; it has 'a'"),
        ("p.jsonl", '{"text": "x"}\n{}\n', "line 2, has no column 'text'; it has none at all"),
        ("p.jsonl", '{"text": "x"}\n\n{"text": \n', "line 3 is not valid JSON"),
        ("p.jsonl", "[" * 100_000, "line 1 is not valid JSON"),
        (
            "p.jsonl",
            '{"text": 5}\n',
            "line 1: a prompt must be a string, a list of messages, or one of token ids, and this is of type int",
        ),
        ("p.jsonl", '{"text": null}\n', "holds no prompts"),
        ("p.jsonl", "[1.5]\n", "line 1: a prompt must be a string"),
        ("p.jsonl", '{"messages": [1, "x"]}\n', "line 1: a prompt must be a string"),
        ("p.jsonl", '{"messages": [{"role": "user"}, 5]}\n', "line 1: a prompt must be a string"),
        (
            "p.jsonl",
            '{"messages": [{"content": "x"}]}\n',
            "line 1: a message has a role and a content that are texts",
        ),
        ("p.jsonl", '{"messages": [{"role": "user", "content": 5}]}\n', "this one has ['role', 'content']"),
        (
            "p.jsonl",
            '{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}\n',
            "line 1: a message has a part that is no text (image_url)",
        ),
        ("p.csv", "messages\n[{'role': 'user'}]\n", "row 1, 'messages' is not valid JSON"),
        ("p.jsonl", '{"text": "x"}\n"y"\n', "line 2: no column 'text', this is of type str"),
        ("p.jsonl", '{"text": "\\ud800"}\n', "line 1: the prompt holds half a surrogate pair"),
        (
            "p.jsonl",
            b'{"text": "x"}\n{"text": "\xe9"}\n',
            "line 2 is not UTF-8 text (byte 0xe9 at offset 10)",
        ),
        ("p.jsonl", "\n\n", "holds no prompts"),
        ("p.json", "[]", "holds no prompts"),
        ("p.json", "5", "should hold a list of objects or of strings, and it is of type int"),
        ("p.json", '["x", 3]', "item 2: a prompt must be a string"),
        ("p.json", "[,]", "is not valid JSON"),
        ("p.txt", "", "holds no prompts"),
        ("p.txt", " \n\n", "holds no prompts"),
        ("p.txt", "---\n", "holds no prompts"),
        ("p.txt", "---\n \n---\n", "holds no prompts"),
        ("p.txt", b"caf\xe9\n", "is not UTF-8 text (byte 0xe9 at offset 3)"),
        ("p.csv", "", "Empty CSV file"),
        ("p.csv", "text\n\n", "holds no prompts"),
        (
            "p.csv",
            "question,answer\nx,y\n",
            "has several columns with texts: 'question', 'answer'; choose with --column NAME",
        ),
        ("p.csv", "id,n\n1,2\n", "has no column with texts; it has 'id', 'n'"),
        ("p.csv", "text,text\na,b\n", "has 2 columns 'text'"),
        ("p.csv", "id,text\n1,a\n2,b, c\n", "Row #3: Expected 2 columns, got 3: 2,b, c"),
        ("p.tsv", "id\ttext\n1\n", "Row #2: Expected 2 columns, got 1"),
        ("p.csv", 'text\na\n"b\nc\n', "a quote is opened and not closed"),
        ("p.csv", 'id,text\n1,"a\n2,b\n', "a quote is opened and not closed"),
        ("p.csv", 'text,id\n"a,1\nb,2\n', "Row #2: Expected 2 columns, got 1"),
        ("p.csv", "id,text\n1,a\rb\n", "Row #3: Expected 2 columns, got 1: b"),
        ("p.csv", 'text\n"' + "a\n" * 70_000, "a quote is opened and not closed"),
        ("p.csv", b"text\na\ncaf\xe9\n", "invalid UTF8 data; convert it to UTF-8"),
        ("p.csv", "text\na\n".encode("utf-16"), "convert it to UTF-8"),
        ("p.csv", "id,text\n1,\n2,\n", "holds no prompts"),
        ("p.arrow", "not arrow at all", "cannot load"),
        ("p.feather", "", "cannot load"),
        ("p.ndjson", '{"text": \n', "line 1 is not valid JSON"),
        ("p.parquet", "not parquet at all", "cannot load"),
        ("p.parquet", "", "cannot load"),
    ],
)
def test_unusable_files(write: Write, name: str, content: str | bytes, said: str) -> None:
    path = write(name, content)
    message = refusal(path)
    assert path in message and said in message


def test_unusable_parquet(parquet: Callable[..., str]) -> None:
    path = parquet({"a": ["x"], "b": [1]})
    assert refusal(path, column="c") == f"{path} has no column 'c'; it has 'a', 'b'"
    assert "row 1: a prompt must be a string" in refusal(path, column="b")
    assert refusal(parquet({"q": [None, "x"], "r": ["y", None], "n": [1, 2]})).endswith(
        "has several columns with texts: 'q', 'r'; choose with --column NAME"
    )
    assert refusal(parquet({"text": pa.array([], pa.string())})).endswith("holds no prompts")


def test_missing_files_and_directories(tmp_path: Path) -> None:
    message = refusal(str(tmp_path / "absent.txt"))
    assert "no such file" in message and "'builtin'" in message and "hf:NAME" in message
    assert f"{tmp_path} is a directory" in refusal(str(tmp_path))
    assert len(refusal("a pasted prompt " * 1000)) < 300
    assert "no such file" in refusal("null\0byte")
    assert "no such file" in refusal("")


def test_a_file_that_cannot_be_opened(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*args: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied")

    path = write("p.txt", "a\n")
    monkeypatch.setattr("builtins.open", denied)
    assert refusal(path) == f"cannot read {path}: Permission denied"


@pytest.mark.parametrize("limit", [0, -3])
def test_limit_below_one(limit: int) -> None:
    assert f"limit is {limit}; it must be 1 or more" in refusal("builtin", limit=limit)


def test_a_column_where_there_are_none(write: Write) -> None:
    assert "has no columns" in refusal("builtin", column="text")
    assert "has no columns" in refusal("-", column="text")
    assert "has no columns" in refusal(write("p.txt", "a\n"), column="text")
    assert "item 1: no column 'text'" in refusal(write("p.json", '["a"]'), column="text")


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys; from hiddenlab.prompts import load_prompts; load_prompts();"
        "print({'torch', 'numpy', 'pyarrow', 'datasets', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
