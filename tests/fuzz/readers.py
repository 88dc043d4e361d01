"""What is fuzzed: every reader of files and texts of others, each with valid files to start from.

A reader gives the content that was accepted as JSON values, None where a damaged file counts as absent, or raises a
``HiddenlabError``. Anything else that it raises is a fault.
"""

import dataclasses
import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hiddenlab.errors import HiddenlabWarning
from hiddenlab.records import Recorder, RunRecord
from hiddenlab.testing import attack_sample
from hiddenlab.types import GroundTruth, Observation, ObservationInfo, Site
from tests.fuzz import reference

if TYPE_CHECKING:
    from hiddenlab.defenses.verification.transcript import Transcript

Read = Callable[[bytes], Any]


@dataclass(frozen=True)
class Target:
    """One reader.

    Attributes:
        seeds: valid files. read: by hiddenlab. reference: by the strict reader, or None where acceptance is judged by
            ``same`` alone. same: whether accepted content must be that of the first seed (signed and committed things).
        every: only each so manyth case is run, where one takes long.
    """

    name: str
    seeds: tuple[bytes, ...]
    read: Read
    reference: Read | None = None
    same: bool = False
    every: int = 1


def targets(folder: Path) -> list[Target]:
    """All of them; their files are written to a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    return [
        _observation(folder),
        _truth(folder),
        *_run(folder),
        _spec(),
        _table(folder),
        _cell(folder),
        _transcripts(folder),
        *_ledger(folder),
        *_prompts(folder),
        *_states(folder),
        _view(folder),
        _proof(),
        _fingerprint(),
        _specs(),
        *_logs(folder),
        *_http(),
        *_models(folder),
    ]


def _observation(folder: Path) -> Target:
    from hiddenlab.observation import load_observations, save_observations

    path = folder / "observation.safetensors"
    generator = torch.Generator().manual_seed(0)
    info = ObservationInfo(
        "builtin",
        (0.5, -0.25),
        Site(2),
        channel=("gaussian:sigma=0.01",),
        noise_sigma=0.01,
        facts={"a": [1, {"b": None}]},
    )
    part = dataclasses.replace(
        info, positions=(0, 2, 5), noise_sigma=None, columns_permuted="shared", quantization="nf4"
    )
    seeds = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2):
        states = torch.randn(3, 4, generator=generator).to(dtype)
        save_observations([Observation(states, info), Observation(states, part)], path)
        seeds.append(path.read_bytes())
    names = {
        torch.float64: "F64",
        torch.float32: "F32",
        torch.float16: "F16",
        torch.bfloat16: "BF16",
        torch.float8_e4m3fn: "F8_E4M3",
        torch.float8_e5m2: "F8_E5M2",
    }

    def read(data: bytes) -> Any:
        path.write_bytes(data)
        out = []
        for one in load_observations(path):
            given = dict(dataclasses.asdict(one.info))
            raw = one.states.contiguous().view(torch.uint8).numpy().tobytes().hex()
            out.append(
                [given, names.get(one.states.dtype, str(one.states.dtype)), list(one.states.shape), raw]
            )
        return out

    def strict(data: bytes) -> Any:
        out = []
        for said, dtype, shape, raw in reference.observation(data):
            site = {"stream": "resid"} | said["site"]
            defaults = {
                "channel": [],
                "rows_permuted": False,
                "columns_permuted": None,
                "noise_sigma": None,
                "prefix_tokens": 0,
                "provider_dtype": "float32",
                "quantization": None,
                "positions": None,
                "facts": {},
            }
            out.append([defaults | said | {"site": site}, dtype, shape, raw])
        if reference.further_fields(data):
            raise reference.Either(out)
        return out

    return Target("observation", tuple(seeds), read, strict)


def _truth(folder: Path) -> Target:
    from hiddenlab.truths import load_truth, save_truth

    path = folder / "truth.json"
    save_truth([GroundTruth((5, 7, 9), (2, 0, 1)), GroundTruth((1,))], path)

    def read(data: bytes) -> Any:
        path.write_bytes(data)
        return [[one.tokens, one.row_order] for one in load_truth(path)]

    return Target("truth", (path.read_bytes(),), read, reference.truth)


def _made_run(folder: Path) -> Path:
    spec = {"model": "builtin", "layer": 2, "stream": "resid", "defense": ["seq-perm"], "seed": 0}
    if not folder.exists():
        recorder = Recorder.create(
            RunRecord(verb="attack", spec=spec, prompts=3, inputs_sha256="ab"), out=folder
        )
        for i in range(2):
            recorder.append(
                attack_sample(
                    i, [("hello", "exact"), (" there", "wrong")], missing_tokens=2, missing_tokens_right=1
                )
            )
        scores = (
            "text",
            "truth_ids",
            "recovered",
            "exact",
            "token_accuracy",
            "bag_of_tokens_recall",
            "rouge_l",
            "bleu",
        )
        recorder.append(
            {"index": 2, "id": "p003", "status": "not applicable", "reason": "no", **dict.fromkeys(scores)}
        )
        code = {"version": "1", "commit": "a" * 40, "dirty": False}
        recorder.record.resumed.append({"at": "2026-01-01", "after": 1, "code": code})
        recorder.close("finished", {"prompts": 2, "exact": 0.5})
    return folder


def _run(folder: Path) -> list[Target]:
    from hiddenlab.records import RECORD, SAMPLES, read_run
    from hiddenlab.report.markdown import grid_of, load_runs, markdown

    run = _made_run(folder / "run")
    record, samples = (run / RECORD).read_bytes(), (run / SAMPLES).read_bytes()

    def read(data: bytes) -> Any:
        (run / SAMPLES).write_bytes(samples)
        (run / RECORD).write_bytes(data)
        return dataclasses.asdict(read_run(run)[0])

    def strict(data: bytes) -> Any:
        said = reference.record(data)
        defaults = dataclasses.asdict(RunRecord(verb="", spec={}))
        if said["verb"] == "attack":
            reference.samples(samples)
        return defaults | said

    def read_samples(data: bytes) -> Any:
        (run / RECORD).write_bytes(record)
        (run / SAMPLES).write_bytes(data)
        return read_run(run)[1]

    def report(data: bytes) -> Any:
        kind, _, rest = data.partition(b"\n")
        (run / RECORD).write_bytes(rest if kind == b"record" else record)
        (run / SAMPLES).write_bytes(samples if kind == b"record" else rest)
        from hiddenlab.report.html import page

        runs = load_runs([run])
        shown = markdown(runs, [], []) + page("x", grid_of(runs), runs, [], [])
        _safe(shown)
        return None

    return [
        Target("record", (record,), read, strict),
        Target("samples", (samples,), read_samples, reference.samples),
        Target("report of a run", (b"record\n" + record, b"samples\n" + samples), report),
    ]


def _safe(shown: str) -> None:
    """What is shown of a file holds no control character and no tag of its own."""
    from hiddenlab.text import printable

    if printable(shown) != shown or "<script" in shown.lower():
        raise AssertionError("a control character or a tag of the file came through")


def _spec() -> Target:
    from hiddenlab.config import AttackConfig
    from hiddenlab.utils.schema import loads

    seed = json.dumps(AttackConfig(defense=("gaussian:sigma=0.1", "seq-perm"), limit=3).to_json()).encode()

    def read(data: bytes) -> Any:
        value = loads(data, "spec.json")
        from hiddenlab.channels import Channel
        from hiddenlab.errors import InputError

        if not isinstance(value, dict):
            raise InputError("spec.json is no object")
        spec = AttackConfig.from_json(value, "spec.json")
        Channel.parse(spec.defense)
        return None

    return Target("spec", (seed,), read)


def _table(folder: Path) -> Target:
    from hiddenlab.report.html import page
    from hiddenlab.report.markdown import load_study, markdown
    from hiddenlab.report.plots import draw_table

    path, out = folder / "table.json", folder / "plots"
    out.mkdir(exist_ok=True)
    figures = {
        "exact": {"value": 0.5, "low": 0.25, "high": 0.75, "n": 4},
        "rouge_l": {"value": None, "low": None, "high": None, "n": 0},
    }
    row = {
        "keys": {"channel": "seq-perm", "layer": 1},
        "figures": figures,
        "paper": {"exact": 0.9, "x": None},
        "status": "measured",
        "reason": None,
        "commit": "abc",
        "cell": None,
    }
    table = {
        "format": 1,
        "experiment": "t-1",
        "title": "A table",
        "figures": {"exact": "exact prompts", "rouge_l": "ROUGE-L"},
        "rows": [row, row | {"keys": {"channel": "x", "layer": 11}}],
        "versions": ["abc"],
        "notes": ["a note"],
        "over": None,
        "curves": None,
        "against": None,
        "command": "hiddenlab eval t-1",
    }
    over = table | {"over": "layer"}
    against = table | {"against": "rouge_l"}
    seeds = tuple(json.dumps(one).encode() for one in (table, over, against))
    drawn = iter(range(10**9))

    def read(data: bytes) -> Any:
        path.write_bytes(data)
        study = load_study(path)
        _safe(markdown([], [study], []) + page("x", None, [], [study], []))
        if next(drawn) % 40 == 0:  # a plot takes a hundred times as long as all else
            draw_table(study.table, out)
        return dict(study.table)

    return Target("table", seeds, read, reference.table)


def _cell(folder: Path) -> Target:
    from hiddenlab.eval.cells import Cell, load_result

    cell = Cell(measure="attack", spec={"layer": 1}, keys={}, paper={})
    path = cell.folder(folder / "cells") / "result.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    seed = json.dumps(
        {
            "format": 1,
            "measure": "attack",
            "spec": {"layer": 1},
            "digest": cell.digest,
            "status": "measured",
            "reason": None,
            "figures": {"exact": {"value": 1.0, "low": 0.5, "high": 1.0, "n": 3}},
            "seconds": 1.5,
            "made": {"code": {"commit": "abc"}},
        }
    ).encode()

    def read(data: bytes) -> Any:
        path.write_bytes(data)
        load_result(cell, folder / "cells")
        return None

    return Target("cell", (seed,), read)


def _transcripts(folder: Path) -> Target:
    from hiddenlab.defenses.verification.transcript import read_transcripts

    path = folder / "transcripts.jsonl"
    seed = b"".join(json.dumps(one.to_json()).encode() + b"\n" for one in requests())

    def read(data: bytes) -> Any:
        path.write_bytes(data)
        return [one.to_json() for one in read_transcripts(path)]

    def strict(data: bytes) -> Any:
        sampling = {"method": "gumbel", "temperature": 1.0, "top_k": 0, "top_p": 1.0}
        return [one | {"sampling": sampling | one["sampling"]} for one in reference.transcripts(data)]

    return Target("transcripts", (seed,), read, strict)


def requests() -> list["Transcript"]:
    """Two transcripts, one of them with everything that a transcript may have."""
    from hiddenlab.defenses.verification.sampling import Sampling
    from hiddenlab.defenses.verification.transcript import Fingerprint, Transcript

    values = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
    printed = Fingerprint.of(values, every=1, seed=3, kind="gaussian", dtype="bfloat16")
    sampling = Sampling(temperature=0.7, top_k=5, top_p=0.9, seed=11)
    plain = Transcript("r1", "builtin", (1, 2, 3), (4, 5), sampling, modes=("accept", "bonus"))
    full = Transcript(
        "r2", "builtin", (1,), (4, 5), sampling, proofs=("AAAA",), proof_rule="rows", fingerprint=printed
    )
    return [plain, full]


def _ledger(folder: Path) -> list[Target]:
    from hiddenlab.defenses.verification.ledger import Ledger, read_checkpoint, verify, write_statement
    from hiddenlab.defenses.verification.ledger_commands import included, prove
    from hiddenlab.defenses.verification.signing import create_key, public, read_key

    folder = folder / "ledger"
    folder.mkdir(exist_ok=True)
    path, key_file, proof, point_file = (folder / name for name in ("ledger", "key", "proof", "point"))
    for one in (path, key_file, proof):
        one.unlink(missing_ok=True)
    create_key(key_file)
    key = read_key(key_file)
    book = Ledger.create(path, key)
    for one in requests():
        book.append(one.to_json())
    point = book.checkpoint()
    point_file.write_text(write_statement(point) + "\n")
    prove(path, "r1", point_file, public(key), proof)
    good, statement, proven, secret = (one.read_bytes() for one in (path, point_file, proof, key_file))

    def read_ledger(data: bytes) -> Any:
        path.write_bytes(data)
        verdict = verify(path, public(key), point)
        return _signed(verdict.valid, data)

    def read_point(data: bytes) -> Any:
        found = read_checkpoint(data.decode(errors="replace"))
        return _signed(found.authentic(public(key)), dataclasses.asdict(found))

    def read_proof(data: bytes) -> Any:
        proof.write_bytes(data)
        return _signed(included(proof, point_file, public(key))["valid"], data.strip())

    def read_private(data: bytes) -> Any:
        key_file.write_bytes(data)
        read_key(key_file)
        return None

    return [
        Target("ledger", (good,), read_ledger, same=True),
        Target("checkpoint", (statement,), read_point, same=True),
        Target("proof of inclusion", (proven,), read_proof, same=True),
        Target("key", (secret,), read_private),
    ]


class NotValid(Exception):
    """A verdict that something is not valid: a refusal, said in another way."""


def _signed(valid: bool, content: Any) -> Any:
    if not valid:
        raise NotValid
    return content


def _prompts(folder: Path) -> list[Target]:
    import pyarrow
    import pyarrow.ipc
    import pyarrow.parquet

    from hiddenlab.prompts import load_prompts

    rows = [{"text": "héllo\nthere", "n": 1}, {"text": 'x, "y"', "n": 2}]
    lines = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    parquet = folder / "seed.parquet"
    table = pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(table, parquet)
    arrow = folder / "seed.arrow"
    with pyarrow.ipc.new_file(str(arrow), table.schema) as file:
        file.write_table(table)
    chat = json.dumps(
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "é"}, "x"]}]}
    ).encode()
    csv = b'text,n\n"a ""b"", c",1\nx,2\n'
    seeds: dict[str, tuple[bytes, ...]] = {
        "jsonl": (lines, b'"a"\n"b"\n', chat, b"[5, 7]\n"),
        "json": (json.dumps(rows).encode(), b'["a", "b"]'),
        "txt": (b"one\ntwo\n", b"---\none\n\ntwo\n---\nthree\n"),
        "csv": (csv,),
        "tsv": (csv.replace(b",", b"\t"),),
        "ndjson": (lines,),
        "parquet": (parquet.read_bytes(),),
        "arrow": (arrow.read_bytes(),),
    }

    def reader(kind: str) -> Read:
        path = folder / f"prompts.{kind}"

        def read(data: bytes) -> Any:
            path.write_bytes(data)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", HiddenlabWarning)
                return [prompt.text for prompt in load_prompts(str(path))]

        return read

    strict = {"jsonl": reference.prompts, "ndjson": reference.prompts}
    return [Target(f"prompts.{kind}", data, reader(kind), strict.get(kind)) for kind, data in seeds.items()]


def _states(folder: Path) -> list[Target]:
    """Files of states that other programs saved; what they hold is judged by no second reader."""
    import io

    import numpy as np
    import pyarrow
    import pyarrow.parquet
    from safetensors.torch import save

    from hiddenlab.imports import ModelShape, Reading, read_states

    shape = ModelShape("m", layers=3, width=4, heads=2, kv_heads=1, head_width=2, vocabulary=9)
    states = torch.randn(1, 3, 4, generator=torch.Generator().manual_seed(0))
    rows, ids = states[0].tolist(), torch.tensor([1, 2, 3])

    def written(write: Callable[[Any], Any]) -> bytes:
        write(file := io.BytesIO())
        return file.getvalue()

    cache = {f"past_key_values.{i}.{j}": torch.zeros(1, 1, 3, 2) for i in range(3) for j in range(2)}
    named = {"model.layers.1": states, "input_ids": ids}
    eight = {"x": states[0].to(torch.float8_e4m3fn), "x_scale": torch.ones(3)}
    table = pyarrow.table({"states": [rows, rows[:2]], "input_ids": [[1, 2, 3], [1, 2]]})
    answer = {"output_ids": [1], "meta_info": {"hidden_states": [rows, rows[0]]}}
    seeds: dict[str, tuple[bytes, ...]] = {
        "npy": (written(lambda file: np.save(file, states.numpy())),),
        "npz": (written(lambda file: np.savez(file, a=states.numpy(), attention_mask=np.ones((1, 3), int))),),
        "safetensors": (save(named), save(cache), save(eight)),
        "pt": (
            written(lambda file: torch.save([states] * 4, file)),
            written(lambda file: torch.save(named, file)),
        ),
        "parquet": (written(lambda file: pyarrow.parquet.write_table(table, file)),),
        "json": (json.dumps(rows).encode(), json.dumps(answer).encode()),
        "txt": (b"1 2 3 4\n5 6 7 8\n",),
    }

    def reader(kind: str) -> Read:
        path = folder / f"states.{kind}"

        def read(data: bytes) -> Any:
            path.write_bytes(data)
            stream = "k" if b"past_key_values" in data else None
            imported = read_states([path], shape, Reading(None if b"meta_info" in data else 2, stream))
            if any(note.splitlines() != [note] for note in imported.notes):
                raise AssertionError("a note that is no line")
            return None

        return read

    return [Target(f"states.{kind}", data, reader(kind)) for kind, data in seeds.items()]


def _view(folder: Path) -> Target:
    from hiddenlab.attacks.closed_weights.view import ServerView

    generator = torch.Generator().manual_seed(0)
    head, rows = (torch.randn(size, 4, generator=generator) for size in (6, 3))
    path = ServerView(head, (rows, rows[:2]), 0.5).save(folder / "view")

    def read(data: bytes) -> Any:
        path.write_bytes(data)
        ServerView.load(path.parent)
        return None

    return Target("server view", (path.read_bytes(),), read)


def _proof() -> Target:
    from hiddenlab.defenses.verification.toploc import Proof, commit

    states = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
    seed = commit(states, 8).to_base64().encode()

    def read(data: bytes) -> Any:
        from hiddenlab.errors import InputError

        try:
            text = data.decode()
        except UnicodeDecodeError:
            raise InputError("no text") from None
        proof = Proof.from_base64(text, 8)
        proof.bits_at(torch.arange(64).numpy())
        return None

    return Target("proof", (seed,), read)


def _fingerprint() -> Target:
    from hiddenlab.defenses.verification.transcript import Fingerprint
    from hiddenlab.utils.schema import parse

    seed = json.dumps(requests()[1].to_json()["fingerprint"]).encode()

    def read(data: bytes) -> Any:
        parse(data, Fingerprint, "fingerprint.json").values()
        return None

    return Target("fingerprint", (seed,), read)


def _specs() -> Target:
    from hiddenlab import registry
    from hiddenlab.errors import InputError

    seeds = (
        b"gaussian:sigma=0.01",
        b"shard:alpha=8,c=2,node=1",
        b"shard:alpha=4,c=1,m=2,queries=1,keys=0",
        b"drop-rows:size=3,after=5",
        b"project:count=8,seed=1",
        b"toploc:k=8",
        b"logprobs:k=3",
        b"hidden-perm:per-row",
        b"dtype:bfloat16",
        b"random-prefix",
        b"unknown-gaussian",
    )

    def read(data: bytes) -> Any:
        try:
            spec = data.decode()
        except UnicodeDecodeError:
            raise InputError("no text") from None
        registry.build("defenses", spec)
        return None

    return Target("spec of a defense", seeds, read)


def _logs(folder: Path) -> tuple[Target, Target]:
    """A log with its requests, streamed answers among them, and a saved stream whose requests are in another file."""
    from hiddenlab.defenses.verification.import_logs import from_openai
    from hiddenlab.testing import VOCABULARY, byte_tokenizer

    path = folder / "log.jsonl"
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}<a>"
    chat = {
        "request": {"model": "m", "messages": [{"role": "user", "content": "Is it?"}], "temperature": 0},
        "response": {
            "id": "a",
            "model": "m",
            "choices": [
                {"index": 0, "message": {"role": "assistant", "content": "Yes."}, "finish_reason": "stop"}
            ],
            "usage": {"prompt_tokens": 12, "completion_tokens": 4},
        },
    }
    plain = {
        "request": {"model": "m", "prompt": ["Once", "Twice"], "temperature": 0, "n": 1},
        "response": {
            "id": "b",
            "model": "m",
            "choices": [
                {"index": i, "text": " more", "token_ids": [32, 109], "prompt_token_ids": [79]}
                for i in range(2)
            ],
        },
    }
    chunks = [
        {
            "id": "c",
            "model": "m",
            "prompt_token_ids": [5],
            "choices": [{"index": 0, "delta": {"content": ""}}],
        },
        {"id": "c", "choices": [{"index": 0, "delta": {"reasoning": "Well"}, "token_ids": [1, 2]}]},
        {
            "id": "c",
            "choices": [{"index": 0, "delta": {"content": "."}, "token_ids": [3], "finish_reason": "stop"}],
        },
        {"id": "c", "choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 3}},
    ]
    streamed = {"request": chat["request"], "response": chunks}
    seed = b"".join(json.dumps(line).encode() + b"\n" for line in (chat, plain, streamed))
    saved = (
        b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks) + b"data: [DONE]\n\n"
    )
    requests = folder / "requests.jsonl"
    requests.write_text(json.dumps(chat["request"]))

    def read(data: bytes, asked: Path | None = None) -> Any:
        path.write_bytes(data)
        for transcript in from_openai(path, tokenizer, VOCABULARY, model="here", requests=asked).transcripts:
            transcript.check_vocabulary(VOCABULARY)
        return None

    return Target("log of an API", (seed,), read), Target(
        "stream of an API", (saved,), lambda data: read(data, requests)
    )


def _http() -> list[Target]:
    from hiddenlab.defenses.cascade.api import make_app
    from hiddenlab.defenses.cascade.testing import NAME, Scripted, make_service, send

    scripted = Scripted()
    app = make_app(make_service(scripted))
    common: dict[str, Any] = {"model": NAME, "max_tokens": 2, "temperature": 0}
    said = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": [{"type": "text", "text": "Yes?"}]},
    ]
    bodies: dict[str, list[dict[str, Any]]] = {
        "/v1/completions": [
            common | {"prompt": "Once", "stop": ["."], "seed": 1},
            common | {"prompt": [1, 2], "top_k": 5, "top_p": 0.5, "logprobs": None, "stream": True},
        ],
        "/v1/chat/completions": [
            common | {"messages": said, "n": 1, "user": "x"},
            common | {"messages": said[:1], "stream": True, "stream_options": {"include_usage": True}},
        ],
    }

    def reader(path: str) -> Read:
        def read(data: bytes) -> Any:
            reply = send(app, path, data)
            for kept in (scripted.asked, scripted.requests, scripted.closed):  # else its log takes the memory
                kept.clear()
            if not 200 <= reply.status < 500:
                raise AssertionError(f"status {reply.status}")
            if reply.status != 200:
                told = json.loads(reply.body)["error"]["message"]
                if not told or "\n" in told or "Traceback" in told:
                    raise AssertionError("an error that is no line")
                raise NotValid
            return None

        return read

    def strict(path: str) -> Read:
        return lambda data: reference.request(data, chat="chat" in path)

    return [
        Target(f"POST {path}", tuple(json.dumps(one).encode() for one in ones), reader(path), strict(path))
        for path, ones in bodies.items()
    ]


def _models(folder: Path) -> list[Target]:
    """A model directory's files, one mutated at a time, and a GGUF file; loading must refuse or give finite weights."""
    import os

    from hiddenlab.models import load_model
    from hiddenlab.testing import save_tiny, write_tiny_gguf

    os.environ["HIDDENLAB_CACHE"] = str(folder / "cache")
    model = Path(save_tiny("llama", folder / "model", tokenizer=True))
    names = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
    good = {name: (model / name).read_bytes() for name in names}
    gguf = folder / "tiny.gguf"
    write_tiny_gguf(gguf)

    def reader(name: str) -> Read:
        def read(data: bytes) -> Any:
            (model / name).write_bytes(data)
            try:
                load_model(str(model), 1, device="cpu").tokenize("hello")
            finally:
                (model / name).write_bytes(good[name])
            return None

        return read

    def read_gguf(data: bytes) -> Any:
        import shutil

        gguf.write_bytes(data)
        shutil.rmtree(folder / "cache", ignore_errors=True)
        load_model(str(gguf), 1, device="cpu")
        return None

    return [
        *(Target(f"model, {name}", (content,), reader(name), every=10) for name, content in good.items()),
        Target("model, GGUF", (gguf.read_bytes(),), read_gguf, every=40),
    ]
