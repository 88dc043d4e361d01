"""The command line from outside: what it prints, writes, refuses, and how a run is continued."""

import errno
import io
import json
import re
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner, Result

from hiddenlab import __version__, registry
from hiddenlab import records as record_module
from hiddenlab.base import Attack
from hiddenlab.cli import app, console
from hiddenlab.cli.rerun import differences
from hiddenlab.cli.show import figures_table, rows_table
from hiddenlab.errors import NotApplicableError
from hiddenlab.text import count_of
from hiddenlab.types import AttackResult, Observation, ObservationInfo, TokenPrediction

Run = Callable[..., Result]
ROOT = Path(__file__).parents[1]
PROMPTS = ["hello é", "two\nlines", "<b>bold</b> & more"]
SUMMARY = {
    "prompts", "exact", "token_accuracy", "bag_of_tokens_recall", "rouge_l", "bleu", "evaluated_tokens_per_token",
    "forward_calls_per_prompt", "attack_seconds", "prefill_seconds", "slowdown_vs_prefill", "verified",
    "probe_seconds", "setup_seconds", "peak_memory_mb", "epsilon",
}  # fmt: skip


class Nearest(Attack):
    """Tries the whole vocabulary at each position and takes the nearest state."""

    calls = 0
    stop_at: int | None = None  # raise KeyboardInterrupt at this call
    spoil: frozenset[int] = frozenset()

    def __init__(self, epsilon: float = 1e-2, budget: int | None = None) -> None:
        self.epsilon = epsilon
        self.budget = budget

    def _fit(self, info: ObservationInfo) -> dict[str, float | str]:
        return {"probe_seconds": 0.25}

    def _recover(self, observation: Observation) -> AttackResult:
        model = self.model
        Nearest.calls += 1
        if Nearest.calls == Nearest.stop_at:
            raise KeyboardInterrupt
        if observation.info.rows_permuted:
            raise NotApplicableError("nearest needs the rows in order")
        prefix, tokens = model.prefix(), []
        before = model.evaluated_tokens
        for row, state in enumerate(observation.states):
            distances = (prefix.branch(torch.arange(model.vocab_size)) - state.float()).abs().sum(-1)
            best = int(distances.argmin())
            prefix.commit(best)
            shown = (best + 1) % model.vocab_size if row in Nearest.spoil else best
            distance = float(distances[best])
            tokens.append(
                TokenPrediction(shown, row, distance, None, model.vocab_size, distance < self.epsilon)
            )
        evaluated = model.evaluated_tokens - before
        return AttackResult(tuple(tokens), evaluated, len(tokens), 0.5, "done", self.epsilon)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random llama of 3 layers whose tokens are bytes."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model")
    vocab = {char: n for n, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(path)  # type: ignore[no-untyped-call]
    config = LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(path)
    return str(path)


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    module = types.ModuleType("hiddenlab_test_fakes")
    module.Nearest = Nearest  # type: ignore[attr-defined]
    module.bench = _bench  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(registry.BUILTINS["attacks"], "nearest", f"{module.__name__}:Nearest")
    monkeypatch.setitem(registry.BUILTINS["benches"], "fake", f"{module.__name__}:bench")
    monkeypatch.chdir(tmp_path)
    Nearest.calls, Nearest.stop_at, Nearest.spoil = 0, None, frozenset()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _bench(*, layers: list[int], seed: int, progress: Any, limit: int = 3) -> dict[str, Any]:
    progress("measuring", 1, 1)
    print("a library speaks")
    return {"rows": [{"layer": n, "seed": seed, "limit": limit, "ratio": None} for n in layers]}


@pytest.fixture
def run(model: str) -> Run:
    def _run(*arguments: str, code: int = 0, **options: Any) -> Result:
        result = CliRunner().invoke(app, list(arguments), **options)
        assert result.exit_code == code, (result.output, result.exception)
        return result

    return _run


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in PROMPTS))
    return str(path)


def refused(result: Result) -> str:
    """The one line with which a command is refused."""
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("error: ")
    return lines[0]


def runs(root: Path) -> list[Path]:
    return sorted((root / "runs").iterdir()) if (root / "runs").exists() else []


# attack


def test_attack_json_is_one_object(run: Run, model: str, prompts: str, tmp_path: Path) -> None:
    result = run("attack", "--prompts", prompts, "--model", model, "--attack", "nearest", "--json")
    data = json.loads(result.stdout)
    assert data["format"] == 1
    assert data["spec"]["layer"] == 1
    assert data["spec"]["stream"] == "resid"
    assert set(data["summary"]) >= SUMMARY
    assert data["summary"]["exact"] == data["summary"]["token_accuracy"] == data["summary"]["verified"] == 1.0
    assert data["summary"]["prompts"] == 3
    assert data["summary"]["attack_seconds"] == 1.5
    assert data["summary"]["probe_seconds"] == 0.25
    assert data["summary"]["epsilon"] == 0.01
    assert data["summary"]["evaluated_tokens_per_token"] == 256
    ratio = data["summary"]["attack_seconds"] / data["summary"]["prefill_seconds"]
    assert data["summary"]["slowdown_vs_prefill"] == pytest.approx(ratio)
    assert [(s["text"], s["recovered"], s["exact"]) for s in data["samples"]] == [
        (t, t, True) for t in PROMPTS
    ]
    assert ["".join(text for text, _ in s["spans"]) for s in data["samples"]] == PROMPTS
    (directory,) = runs(tmp_path)
    kept = json.loads((directory / "record.json").read_text())
    assert kept["status"] == "finished"
    assert kept["summary"] == data["summary"]
    assert kept["packages"]["torch"] == torch.__version__
    assert kept["threads"] == 1
    assert [json.loads(x) for x in (directory / "samples.jsonl").read_text().splitlines()] == data["samples"]


def test_attack_on_a_terminal_marks_wrong_tokens(run: Run, model: str, tmp_path: Path) -> None:
    Nearest.spoil = frozenset({2})
    options = ("--model", model, "--attack", "nearest", "--layer", "2", "--no-record")
    result = run("attack", "abé [red]x[/red]\x1b[31m", *options, env={"COLUMNS": "200"})
    assert "ab" in result.stdout
    assert "[red]x[/red]␛[31m" in result.stdout
    assert "95.5 % of tokens" in result.stdout
    assert "\x1b" not in result.stdout
    assert "token accuracy" in result.stdout
    assert "layer 2" in result.stdout
    assert not runs(tmp_path)


def test_one_prompt_does_not_depend_on_the_others(run: Run, model: str, prompts: str) -> None:
    options = (
        "--prompts", prompts, "--model", model, "--attack", "nearest", "--no-record", "--json",
        "--defense", "gaussian:sigma=0.001",
    )  # fmt: skip
    every = json.loads(run("attack", *options, "--batch", "3").stdout)["samples"]
    first = json.loads(run("attack", *options, "--limit", "1").stdout)["samples"]
    assert first[0]["per_token"]["distance"] == every[0]["per_token"]["distance"]
    other = json.loads(run("attack", *options, "--seed", "1", "--limit", "1").stdout)["samples"]
    assert other[0]["per_token"]["distance"] != every[0]["per_token"]["distance"]


def test_not_applicable_is_said_and_not_zero(run: Run, model: str) -> None:
    options = ("--model", model, "--attack", "nearest", "--no-record", "--defense", "seq-perm")
    result = run("attack", "a prompt", *options, "--json", code=2)
    said = "error: nearest could not be applied to any prompt: nearest needs the rows in order"
    assert said in result.stderr.splitlines()
    data = json.loads(result.stdout)
    assert data["samples"][0]["status"] == "not applicable"
    assert data["samples"][0]["reason"] == "nearest needs the rows in order"
    assert data["summary"]["not_applicable"] == 1
    for name in ("exact", "token_accuracy", "rouge_l", "attack_seconds", "verified", "slowdown_vs_prefill"):
        assert data["summary"][name] is None
    result = run("attack", "a prompt", *options, code=2)
    assert "not applicable: nearest needs" in result.stdout and "–" not in result.stdout
    assert said in result.stderr.splitlines()


def test_the_engine_is_named_where_it_is_not_the_packed_one(run: Run, model: str) -> None:
    options = ("attack", "ab", "--model", model, "--attack", "nearest", "--no-record")
    said = "the plain engine ran the model, one sequence for each candidate; --engine plain"
    assert said in run(*options, "--engine", "plain").stderr.splitlines()
    assert said in run(*options, "--engine", "plain", "--json").stderr.splitlines()
    assert "engine" not in run(*options).stderr
    message = refused(run(*options, "--engine", "plain", "--stream", "q", code=2))
    assert message == "error: the stream q needs the packed engine; leave --engine out"


def test_one_is_one(run: Run, model: str) -> None:
    """No message counts "1 prompts"."""
    result = run("capture", "a", "--model", model, "-o", "a.safetensors")
    assert "a.safetensors: 1 prompt, 1 row, " in result.stdout
    assert [count_of(n, "entry") for n in (0, 1, 2)] == ["0 entries", "1 entry", "2 entries"]


def test_chats_nulls_and_token_ids(run: Run, model: str, tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows = [{"messages": chat}, {"messages": None}, {"messages": chat[:1]}]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ("--model", model, "--attack", "nearest", "--no-record", "--json")
    message = refused(run("attack", "--prompts", "p.jsonl", "--limit", "1", *options, code=2))
    assert f"{model} has no chat template for the messages of prompt p001; use --no-template" in message
    result = run("attack", "--prompts", "p.jsonl", "--no-template", *options)
    samples = json.loads(result.stdout)["samples"]
    assert [(sample["id"], sample["recovered"]) for sample in samples] == [("p001", "a\nb"), ("p003", "a")]
    assert (
        "p.jsonl: left out 1 of 3 entries, which hold no text (null or blank)" in result.stderr.splitlines()
    )
    (tmp_path / "ids.jsonl").write_text("[65, 66]\n")
    data = json.loads(run("attack", "--prompts", "ids.jsonl", *options).stdout)
    assert data["samples"][0]["recovered_ids"] == [65, 66]


def test_standard_input_is_kept_in_the_spec(run: Run, model: str) -> None:
    options = ("--model", model, "--attack", "nearest", "--no-record", "--json", "--max-tokens", "4")
    data = json.loads(run("attack", "-", *options, input="from stdin\n").stdout)
    assert data["spec"]["prompt"] == "from stdin"
    assert data["samples"][0]["recovered"] == "from"


def test_final_norm_is_after_the_last_layer(run: Run, model: str) -> None:
    options = ("--model", model, "--attack", "nearest", "--no-record", "--json", "--stream", "final_norm")
    data = json.loads(run("attack", "normed", *options).stdout)
    assert data["spec"]["layer"] == 3
    assert data["summary"]["exact"] == 1.0


# capture, then attack


def test_capture_and_attack_without_the_secret(run: Run, model: str, prompts: str, tmp_path: Path) -> None:
    options = (
        "--prompts",
        prompts,
        "--model",
        model,
        "--layer",
        "2",
        "-o",
        "o.safetensors",
        "--truth",
        "t.json",
    )
    assert "3 prompts" in run("capture", *options).stdout
    attack = ("attack", "--observation", "o.safetensors", "--attack", "nearest", "--no-record", "--json")
    blind = json.loads(run(*attack).stdout)
    assert blind["spec"]["layer"] == 2
    assert blind["spec"]["model"] == model
    assert [s["recovered"] for s in blind["samples"]] == PROMPTS
    for name in ("exact", "token_accuracy", "bag_of_tokens_recall", "rouge_l", "bleu"):
        assert blind["summary"][name] is None
        assert blind["samples"][0][name] is None
    assert blind["summary"]["verified"] == 1.0
    assert blind["summary"]["prefill_seconds"] > 0
    scored = json.loads(run(*attack, "--truth", "t.json").stdout)
    assert scored["summary"]["exact"] == 1.0
    assert blind["samples"][0]["recovered_ids"] == scored["samples"][0]["recovered_ids"]
    (tmp_path / "t.json").write_text('{"format": 1, "secrets": [{"tokens": [1], "row_order": null}]}')
    assert "is not the truth of" in refused(run(*attack, "--truth", "t.json", code=2))
    assert "layer 2" in refused(run(*attack, "--layer", "1", code=2))


def test_capture_is_what_an_attack_would_see(run: Run, model: str) -> None:
    options = ("some words", "--model", model, "--defense", "gaussian:sigma=0.01", "--seed", "3")
    run("capture", *options, "-o", "o.safetensors", "--truth", "t.json")
    common = ("--attack", "nearest", "--no-record", "--json")
    saved = json.loads(run("attack", "--observation", "o.safetensors", "--truth", "t.json", *common).stdout)
    direct = json.loads(run("attack", *options, *common).stdout)
    assert saved["spec"]["defense"] == direct["spec"]["defense"] == ["gaussian:sigma=0.01"]
    assert saved["samples"][0]["per_token"] == direct["samples"][0]["per_token"]


# records: interrupted, resumed, run again, full disk


def test_interrupted_run_is_resumed(run: Run, model: str, prompts: str, tmp_path: Path) -> None:
    options = ("--prompts", prompts, "--model", model, "--attack", "nearest")
    Nearest.stop_at = 2
    result = run("attack", *options, "--defense", "gaussian:sigma=0.01", code=130)
    (directory,) = runs(tmp_path)
    assert f"hiddenlab rerun runs/{directory.name} --resume" in result.stderr
    assert "1 of 3" in result.stderr
    assert "Traceback" not in result.stderr
    assert json.loads((directory / "record.json").read_text())["status"] == "interrupted"
    with open(directory / "samples.jsonl", "a") as handle:
        handle.write('{"index": 1, "torn')
    Nearest.stop_at = None
    run("rerun", str(directory), "--resume")
    assert Nearest.calls == 4
    again = [json.loads(line) for line in (directory / "samples.jsonl").read_text().splitlines()]
    kept = json.loads((directory / "record.json").read_text())
    assert kept["status"] == "finished"
    assert kept["summary"]["prompts"] == 3
    (part,) = kept["resumed"]
    assert part["after"] == 1
    assert part["code"] == kept["code"]
    whole = json.loads(run("rerun", str(directory), "--no-record", "--json").stdout)
    assert whole["same"] is True
    assert whole["compared"] == 3
    pick = [(s["id"], s["per_token"]["distance"]) for s in again]
    assert pick == [(s["id"], s["per_token"]["distance"]) for s in whole["samples"]]
    assert "nothing to resume" in run("rerun", str(directory), "--resume").stderr


class Pairs(Nearest):
    """Takes several prompts at once."""


def test_what_an_attack_takes_at_once_is_recorded_at_once(
    run: Run, model: str, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["hiddenlab_test_fakes"], "Nearest", Pairs)
    options = ("attack", "--prompts", prompts, "--model", model, "--attack", "nearest")
    # The third call is interrupted: of three prompts taken at once none is recorded.
    for batch, asked, recorded in ((1, (), 2), (2, (), 2), (3, ("--batch", "1"), 2), (3, (), 0)):
        monkeypatch.setattr(Pairs, "batch", batch)
        Nearest.calls, Nearest.stop_at = 0, 3
        run(*options, *asked, "--out", f"out-{batch}{len(asked)}", code=130)
        samples = tmp_path / f"out-{batch}{len(asked)}" / "samples.jsonl"
        assert len(samples.read_text().splitlines() if samples.exists() else []) == recorded


def test_resume_refuses_changed_prompts(run: Run, model: str, prompts: str, tmp_path: Path) -> None:
    Nearest.stop_at = 2
    run("attack", "--prompts", prompts, "--model", model, "--attack", "nearest", "--batch", "1", code=130)
    Path(prompts).write_text('{"text": "hello é"}\n{"text": "other"}\n')
    (directory,) = runs(tmp_path)
    assert "have changed" in refused(run("rerun", str(directory), "--resume", code=2))
    assert json.loads((directory / "record.json").read_text())["status"] == "interrupted"


def test_rerun_says_what_differs(run: Run, model: str, prompts: str, tmp_path: Path) -> None:
    run("attack", "--prompts", prompts, "--model", model, "--attack", "nearest", "--out", "first")
    assert "same results" in run("rerun", "first", "--out", "second").stdout
    assert (tmp_path / "second" / "record.json").exists()
    Nearest.spoil = frozenset({0})
    result = run("rerun", "first", "--no-record", code=1)
    assert "different results for 3 of 3" in result.stdout
    assert "p001: recovered_ids" in result.stdout


@pytest.mark.slow
def test_a_probe_that_learned_since_makes_no_difference(run: Run, model: str, tmp_path: Path) -> None:
    """A second run of the same prompts is cheaper, as the cache holds their rows."""
    run("attack", "twelve bytes", "--model", model, "--layer", "2", "--out", "first")
    record, lines = tmp_path / "first" / "record.json", tmp_path / "first" / "samples.jsonl"
    assert json.loads(record.read_text())["setup"]["probe"] == "regression"
    sample = json.loads(lines.read_text())
    dearer = {**sample, "evaluated_tokens": 999, "forward_calls": 99}
    lines.write_text(json.dumps(dearer) + "\n")
    assert "same results" in run("rerun", "first", "--no-record").stdout
    assert json.loads(run("rerun", "first", "--no-record", "--json").stdout)["same"] is True
    lines.write_text(json.dumps({**dearer, "recovered_ids": sample["recovered_ids"][:-1]}) + "\n")
    other = run("rerun", "first", "--no-record", code=1).stdout
    assert "p001: recovered_ids\n" in other and "--setup full" in other
    assert differences([dearer], [sample]) == [
        {"id": sample["id"], "what": ["evaluated_tokens", "forward_calls"]}
    ]


def test_full_disk(
    run: Run, model: str, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, written = record_module._write_all, []

    def fills_up(handle: Any, data: bytes) -> None:
        written.append(data)
        if sum(b'"index"' in item for item in written) >= 2:
            write(handle, data[:7])
            raise OSError(errno.ENOSPC, "No space left on device")
        write(handle, data)

    monkeypatch.setattr(record_module, "_write_all", fills_up)
    result = run(
        "attack", "--prompts", prompts, "--model", model, "--attack", "nearest", "--batch", "1", code=2
    )
    assert "No space left on device" in refused(result)
    assert "--resume" in result.stderr
    monkeypatch.setattr(record_module, "_write_all", write)
    (directory,) = runs(tmp_path)
    assert sorted(path.name for path in directory.iterdir()) == ["record.json", "samples.jsonl"]
    _, samples = record_module.read_run(directory)
    assert [sample["recovered"] for sample in samples] == PROMPTS[:1]
    run("rerun", str(directory), "--resume")
    assert len(record_module.read_run(directory)[1]) == 3


# what is refused


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("x", "--layer", "4"), "layer 4 is out of range"),
        (("x", "--layer", "0"), "layer 0 is out of range"),
        (("x", "--layer", "2", "--stream", "final_norm"), "exists only after the last layer"),
        (("x", "--defense", "seq-prm"), "did you mean seq-perm"),
        (("x", "--defense", "gaussian:sgma=1"), "sgma"),
        (("x", "--attack", "neerest"), "did you mean nearest"),
        (("x", "--attack", "nearest", "--search", "greedy"), "has no option --search"),
        (("x", "--attack", "nearest:epsilon=abc"), "epsilon"),
        (("x", "--device", "gpu"), "unknown device"),
        (("x", "--prompts", "p.txt"), "not both"),
        (("x", "--no-template"), "--no-template goes with --prompts"),
        (("x", "--truth", "t.json"), "--truth goes with --observation"),
        (("x", "--observation", "o.safetensors"), "leave out a PROMPT"),
        (("--observation", "absent.safetensors"), "no observation file"),
        (("--prompts", "absent.txt"), "no such file"),
        (("",), "the prompt is empty"),
        (("x" * 65,), "65 tokens"),
        (("x", "--out", "taken"), "not an empty directory"),
        (("x", "--out", "new", "--no-record"), "give one of them"),
    ],
)  # fmt: skip
def test_wrong_input_leaves_nothing_behind(
    run: Run, model: str, tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    default = () if "--attack" in arguments else ("--attack", "nearest")
    assert said in refused(run("attack", *arguments, "--model", model, *default, code=2))
    assert not runs(tmp_path)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("verb", [("attack",), ("capture", "-o", "o.safetensors"), ("cascade", "run")])
def test_a_path_is_no_prompt(run: Run, tmp_path: Path, verb: tuple[str, ...]) -> None:
    """Its letters would be attacked, after minutes of training."""
    (tmp_path / "p0.pt").touch()
    (tmp_path / "states").mkdir()
    for path in ("p0.pt", "./p0.pt", "states", str(tmp_path / "p0.pt")):
        message = refused(run(*verb, path, code=2))
        assert message.startswith(f"error: {path} is a file or a folder")
        assert "--observation" in message
    assert not runs(tmp_path)


def test_unknown_model(run: Run, tmp_path: Path) -> None:
    message = refused(run("attack", "x", "--model", "./absent", "--attack", "nearest", code=2))
    assert "no such directory" in message
    assert not runs(tmp_path)


@pytest.mark.parametrize(
    "arguments", [("attack", "--limit", "0"), ("attack", "--dtype", "int4"), ("nonsense",), ("capture", "x")]
)
def test_usage_errors(run: Run, arguments: tuple[str, ...]) -> None:
    result = run(*arguments, code=2)
    assert "Traceback" not in result.stderr
    assert not result.stdout


def test_a_wrong_choice_is_said_without_the_validators_words(run: Run) -> None:
    message = run("attack", "x", "--engine", "fast", code=2, env={"COLUMNS": "200"}).stderr
    assert "Invalid value for '--engine': 'fast' is not one of 'auto', 'packed', 'plain'." in message


def test_version(run: Run) -> None:
    assert run("--version").stdout == f"hiddenlab {__version__}\n"


def test_an_interrupt_while_the_command_line_is_imported_leaves_no_traceback() -> None:
    code = (
        "import sys\n"
        "class Interrupting:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name == 'hiddenlab.cli':\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupting())\n"
        "from hiddenlab.__main__ import main\n"
        "main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


def test_capture_into_nowhere(run: Run, model: str) -> None:
    assert "does not exist" in refused(run("capture", "x", "-o", "no/where.safetensors", code=2))
    assert "same file" in refused(run("capture", "x", "-o", "a", "--truth", "./a", code=2))


def test_rerun_of_what_is_no_run(run: Run, tmp_path: Path) -> None:
    assert "is no run directory" in refused(run("rerun", str(tmp_path), code=2))
    (tmp_path / "record.json").write_text('{"format": 99}')
    assert "format 99" in refused(run("rerun", str(tmp_path), code=2))
    (tmp_path / "record.json").write_text("[")
    assert "is no valid JSON" in refused(run("rerun", str(tmp_path), code=2))


# the other verbs


def test_bench(run: Run) -> None:
    result = run("bench", "fake", "--layers", "1,6", "--limit", "2", "--seed", "5", "--json")
    assert json.loads(result.stdout)["rows"][1] == {"layer": 6, "seed": 5, "limit": 2, "ratio": None}
    assert "a library speaks" in result.stderr
    assert "layer" in run("bench", "fake", "--layers", "1").stdout
    assert "no list of numbers" in refused(run("bench", "fake", "--layers", "1,x", code=2))
    message = refused(run("bench", "fake", "--layers", "1", "--greedy-limit", "2", code=2))
    assert "fake has no option --greedy-limit" in message
    message = refused(run("bench", "fake", "--layers", "1", "--set", "seed=3", code=2))
    assert "seed is not for --set" in message
    assert "unknown bench" in refused(run("bench", "none", code=2))


def test_list_and_eval(run: Run) -> None:
    listed = json.loads(run("list", "defenses", "--json").stdout)["defenses"]
    assert {"seq-perm", "gaussian"} <= {one["name"] for one in listed}
    assert "nearest" in run("list", "attacks", env={"COLUMNS": "200"}).stdout
    assert "unknown experiment 'table-0'; did you mean table-" in refused(run("eval", "table-0", code=2))


def test_cascade(run: Run, model: str) -> None:
    numbers = ("--alpha", "3", "--c", "2", "--model", model)
    planned = json.loads(run("cascade", "plan", "--tokens", "20", *numbers, "--json").stdout)
    assert planned["plan"]["attn_nodes"] == 9
    shown = run("cascade", "plan", "--tokens", "20", *numbers, "--rho", "9", env={"COLUMNS": "80"}).stdout
    assert "██····██····██····██" in shown
    assert "not secure by Theorem 7.3" in shown
    out = run("cascade", "run", "hello é", *numbers, "--logsumexp", "--compare", "--threads", "1", "--json")
    result = json.loads(out.stdout)
    assert (result["tokens"], result["comp_nodes"]) == (8, 3)
    assert result["max_difference"] <= 1e-4
    # Of one pass, though several were timed.
    attns = [counts for name, counts in result["nodes"].items() if name.startswith("AttnNode")]
    assert attns and {counts["passes"] for counts in attns} == {1}
    assert "max difference" in run("cascade", "run", "hello", *numbers, "--compare").stdout
    assert "alpha must be at least 1" in refused(
        run("cascade", "plan", "--tokens", "4", "--alpha", "0", "--model", model, code=2)
    )
    assert "give a prompt" in refused(run("cascade", "run", *numbers, code=2))
    assert "give exactly one of --alpha" in refused(
        run("cascade", "run", "abc", *numbers, "--shards", "0", code=2)
    )


VERBS = ["attack", "capture", "eval", "bench", "report", "rerun", "list", "cascade", ""]


@pytest.mark.parametrize("verb", VERBS)
def test_help_loads_no_torch(verb: str) -> None:
    code = (
        "import sys\n"
        "from hiddenlab.cli import app\n"
        "try:\n"
        "    app(sys.argv[1:])\n"
        "except SystemExit as end:\n"
        "    assert not end.code\n"
        "print({'torch', 'transformers', 'numpy', 'matplotlib'} & set(sys.modules), file=sys.stderr)"
    )
    command = [sys.executable, "-c", code, *([verb] if verb else []), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stderr.strip() == "set()"
    assert "Usage" in done.stdout


def test_help_shows_every_option_of_the_contract(run: Run) -> None:
    text = run("attack", "--help", env={"COLUMNS": "200", "TERM": "dumb"}).stdout
    wanted = (
        "prompts column no-template limit max-tokens observation model layer stream defense search proposal distance "
        "epsilon budget seed device dtype out no-record json attack threads runs-dir batch device-map truth"
    )
    assert [name for name in wanted.split() if f"--{name}" not in text] == []


def test_details_of_progress_are_no_part_of_its_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "SLOW_SECONDS", -1.0)
    with console.bars() as progress:
        for done, loss in ((0, "loss 3.2"), (1, "loss 2.9"), (2, "loss 2.1")):
            progress(f"training\t{loss}", done, 2)
    written = capsys.readouterr().err
    assert written.startswith("training: 2/2 in ") and written.count("\n") == 1


def test_long_work_says_now_and_then_how_far_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "QUIET_SECONDS", -1.0)
    with console.bars() as progress:
        for done in (400, 401, 800):
            progress(f"training\tloss {done}", done, 800)
    first, second = capsys.readouterr().err.splitlines()
    assert first == "training: 400/800, loss 400, 0 s"  # what was done before says nothing of the time
    assert second.startswith("training: 401/800, loss 401, 0 s, about ")


def test_work_without_news_says_that_it_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no terminal shows a bar: of the task that began last, and only as long as it runs."""
    monkeypatch.setattr(console, "FIRST_SIGN", 0.02)
    written = ""
    with console.bars() as progress:
        progress("prompts", 0, 1)
        progress("loading the model", 0, 1)
        end = time.monotonic() + 20
        while "loading" not in written:
            assert time.monotonic() < end
            time.sleep(0.01)
            written += capsys.readouterr().err
        assert re.fullmatch(r"loading the model: running, \d+ s\n", written)
        progress("loading the model", 1, 1)
        while "prompts" not in written:
            assert time.monotonic() < end
            time.sleep(0.01)
            written += capsys.readouterr().err
    assert [re.sub(r"\d+ s$", "… s", line) for line in written.splitlines()[1:]] == ["prompts: running, … s"]


def test_work_that_was_given_up_is_not_shown_any_more(capsys: pytest.CaptureFixture[str]) -> None:
    with console.bars() as progress:
        progress("outer", 0, 1)
        progress("training\tloss 3", 5, 10)
        progress("training", -1, 10)
        assert list(progress._running) == ["outer"]
    with console.bars() as progress:
        progress._console = console.SafeConsole(file=io.StringIO(), force_terminal=True)
        progress("outer", 0, 1)
        progress("training\tloss 3", 5, 10)
        progress("training", -1, 10)
        assert [task.description for task in progress._live.tasks] == ["outer"]  # type: ignore[union-attr]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("name", "option", "message"),
    [
        ("exfiltration-game", "alarms=x", "alarms is a number"),
        ("exfiltration-game", "rounds=1.5", "rounds is a whole number"),
        ("permuted-model", "channels=3", "unknown channel '3'"),
        ("permuted-model", "channels=", "unknown channel ''"),
    ],
)
def test_options_of_experiments_of_another_kind(
    run: Run, tiny: Callable[..., str], name: str, option: str, message: str
) -> None:
    assert message in refused(run("eval", name, "--model", tiny("llama"), "--set", option, code=2))


@pytest.mark.parametrize("width", [200, 80, 40])
def test_tables_break_no_heading_and_no_number(width: int) -> None:
    """At the width of a terminal, what does not fit stands below."""
    columns = (
        "id",
        "verdict",
        "tokens",
        "covered",
        "exponents",
        "mantissa mean",
        "mantissa median",
        "without value",
    )
    row: dict[str, Any] = dict.fromkeys(columns, 0.123456)
    row |= {"id": "a-request-with-a-name-that-is-long", "verdict": "valid"}
    screen = console.SafeConsole(width=width, file=io.StringIO())
    screen.print(rows_table([row], "requests"))
    text = screen.file.getvalue()
    assert max(map(len, text.splitlines())) <= width
    words = re.findall(r"\w[\w.-]*", text)
    assert {word for name in columns for word in name.split()} <= set(words)
    assert words.count("0.1235") == 6


@pytest.mark.parametrize("width", [80, 40])
def test_a_long_text_among_figures_leaves_room_for_their_names(width: int) -> None:
    figures = {
        "figure": "value",
        "tokens": 36,
        "text": "you can board the ferry at the gate. " * 5,
        "seconds": 0.5,
    }
    screen = console.SafeConsole(width=width, file=io.StringIO())
    screen.print(figures_table([figures], "cascade, ray"))
    text = screen.file.getvalue()
    assert max(map(len, text.splitlines())) <= width
    assert all(f"│ {name} " in text for name in ("tokens", "text", "seconds")) and text.count("gate") == 5
