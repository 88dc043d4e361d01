"""``hiddenlab verify`` from outside: honest transcripts pass, others do not, and nothing wrong is ever called valid."""

import base64
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner, Result

from hiddenlab.cli import app
from hiddenlab.cli.verify_run import PICTURES
from hiddenlab.defenses.verification.audit import _admissible, _risks
from hiddenlab.defenses.verification.bounds import Risk
from hiddenlab.defenses.verification.difr import Replay
from hiddenlab.defenses.verification.durable import sole_writer
from hiddenlab.defenses.verification.sampling import Sampling
from hiddenlab.defenses.verification.scoring import _verdict
from hiddenlab.defenses.verification.transcript import read_transcripts
from hiddenlab.testing import save_tiny

Files = dict[str, Path]
Words = tuple[object, ...]
COMMON = ("--dtype", "float32", "--device", "cpu")
AGREED = ("--fingerprint", 4, "--every", 2)


def verify(*words: object) -> Result:
    return CliRunner().invoke(app, ["verify", *map(str, words)])


def answer(*words: object) -> Any:
    result = verify(*words, "--json")
    assert result.exit_code in (0, 1), result.output
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return json.loads(result.stdout)


@pytest.fixture(scope="module", autouse=True)
def _elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Records go to ``runs/`` where one stands."""
    before = os.getcwd()
    os.chdir(tmp_path_factory.mktemp("elsewhere"))
    yield
    os.chdir(before)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny("llama", tmp_path_factory.mktemp("llama"), tokenizer=True)


@pytest.fixture(scope="module")
def files(model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Transcripts of an honest provider, of one with another seed, and of one with fewer layers, all with proofs."""
    folder = tmp_path_factory.mktemp("transcripts")
    prompts = folder / "prompts.txt"
    prompts.write_text("one prompt of bytes\nanother prompt\nand a third\n")
    out = {}
    for name, variant in {"honest": "honest", "seed": "seed=1", "layers": "layers=2"}.items():
        out[name] = folder / f"{name}.jsonl"
        made = answer(
            "simulate", "--out", out[name], "--provider", variant, "--model", model, "--prompts", prompts,
            "--new-tokens", 40, "--proofs", "--fingerprint", 4, "--every", 2, *COMMON,
        )  # fmt: skip
        assert made["requests"] == 3 and made["output_tokens"] == 120
    return out


@pytest.fixture(scope="module")
def reference(model: str) -> Words:
    """What the verifier runs."""
    return ("--model", model, *COMMON)


@pytest.mark.slow
def test_honest_proofs_are_valid_and_others_rejected(files: Files, reference: Words) -> None:
    assert answer("check", files["honest"], *AGREED, *reference)["counts"] == {
        "valid": 3,
        "rejected": 0,
        "unchecked": 0,
    }
    result = verify("check", files["layers"], *reference)
    assert result.exit_code == 1
    assert answer("check", files["layers"], *reference)["counts"]["rejected"] == 3
    # Another seed is another text, truly computed: proofs do not see it.
    assert answer("check", files["seed"], *reference)["counts"]["valid"] == 3


@pytest.mark.slow
def test_scores_tell_a_wrong_seed_from_an_honest_one(files: Files, reference: Words) -> None:
    level = ("--false-positives", 0.1)  # three requests a side cannot give less than 0.05
    trusted = files["honest"].with_name("trusted")
    trusted.write_text(files["honest"].read_text())
    honest = answer("score", files["honest"], "--honest", trusted, *level, *reference)
    assert honest["summary"]["same_token"] > 0.97 and not honest["verdict"]["diverges"]
    other = answer("score", files["seed"], "--honest", files["honest"], *level, *reference)
    assert other["summary"]["same_token"] < 0.7 and other["verdict"]["diverges"]
    assert other["verdict"]["least_p"] == 0.05
    assert verify("score", files["seed"], "--honest", files["honest"], *level, *reference).exit_code == 1
    assert verify("score", files["honest"], "--honest", trusted, *level, *reference).exit_code == 0
    itself = verify("score", files["honest"], "--honest", files["honest"], *level, *reference)
    assert itself.exit_code == 2 and "compared with itself" in itself.stderr


@pytest.mark.slow
def test_without_a_verdict_nothing_is_called_right(files: Files, reference: Words) -> None:
    for words, missing in (
        ((), "--honest"),
        (("--honest", files["honest"]), "3 honest requests and 3 to be judged cannot give a p below 0.05"),
    ):
        result = verify("score", files["seed"], *words, *reference)
        assert result.exit_code == 1 and missing in result.stdout
        found = answer("score", files["seed"], *words, *reference)
        assert missing in found["undecided"] and not (found["verdict"] or {}).get("diverges")


@pytest.mark.slow
def test_files_to_be_reviewed_are_not_passed(files: Files, reference: Words, tmp_path: Path) -> None:
    """Random bytes may look like encoded data: one request a file, of which some are to be reviewed and one is not."""
    for i, line in enumerate(files["honest"].read_text().splitlines()):
        (tmp_path / f"{i}.jsonl").write_text(line + "\n")
    classes = {row["file"]: row["class"] for row in answer("audit", tmp_path, *reference)["files"]}
    assert sorted(set(classes.values())) == ["quiet", "review"]
    assert verify("audit", tmp_path, *reference).exit_code == 1
    for name, level in classes.items():
        if level == "review":
            (tmp_path / name).unlink()
    assert verify("audit", tmp_path, *reference).exit_code == 0


def test_commit_gives_the_provider_s_own_proofs(files: Files, reference: Words, tmp_path: Path) -> None:
    out = tmp_path / "proven.jsonl"
    made = answer("commit", files["honest"], "--out", out, "--fingerprint", 4, "--every", 2, *reference)
    assert made["bytes_per_output_token"] > 0
    assert answer("check", out, *AGREED, *reference)["counts"]["valid"] == 3
    assert verify("commit", files["honest"], "--out", out, *reference).exit_code == 2


Change = Callable[[dict[str, Any]], object]
TAMPERED: dict[str, Change] = {
    "an output token": lambda one: one["output"].__setitem__(5, (one["output"][5] + 1) % 256),
    "a prompt token": lambda one: one["prompt"].__setitem__(2, (one["prompt"][2] + 1) % 256),
    "no proof": lambda one: one["proofs"].pop(),
    "an empty list of proofs": lambda one: one["proofs"].clear(),
    "one proof more": lambda one: one["proofs"].append(one["proofs"][0]),
    "proofs in another order": lambda one: one["proofs"].reverse(),
    "no base64": lambda one: one["proofs"].__setitem__(0, "%%"),
    "an empty proof": lambda one: one["proofs"].__setitem__(0, ""),
    "zeros": lambda one: one["proofs"].__setitem__(0, base64.b64encode(bytes(258)).decode()),
    "a fingerprint of zeros": lambda one: one["fingerprint"].__setitem__(
        "data", base64.b64encode(bytes(2 * 4 * 20)).decode()
    ),
    "a short fingerprint": lambda one: one["fingerprint"].__setitem__(
        "data", base64.b64encode(bytes(8)).decode()
    ),
    "too many directions": lambda one: one["fingerprint"].__setitem__("count", 80),
    "another stride": lambda one: one["fingerprint"].__setitem__("every", 10**8),
    "another projection": lambda one: one["fingerprint"].__setitem__("seed", 5),
    "no fingerprint": lambda one: one.pop("fingerprint"),
    "a token outside": lambda one: one["output"].__setitem__(0, 100_000),
}


@pytest.mark.parametrize("what", TAMPERED)
def test_what_was_tampered_with_is_never_valid(
    what: str, files: Files, reference: Words, tmp_path: Path
) -> None:
    rows = [json.loads(line) for line in files["honest"].read_text().splitlines()]
    TAMPERED[what](rows[1])
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = answer("check", path, *AGREED, *reference)
    assert [row["verdict"] for row in found["requests"]] == ["valid", "rejected", "valid"]
    assert found["requests"][1]["reason"]


def test_nothing_to_check_is_not_valid(files: Files, reference: Words, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in files["honest"].read_text().splitlines()]
    path = tmp_path / "t.jsonl"
    for row in rows:
        del row["proofs"], row["proof_rule"], row["fingerprint"]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert answer("check", path, *reference)["counts"] == {"valid": 0, "rejected": 0, "unchecked": 3}


def test_simulate_refuses_to_overwrite_and_goes_on(model: str, files: Files, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    whole = files["honest"].read_text().splitlines(keepends=True)
    path.write_text(whole[0])
    words = (
        "simulate", "--out", path, "--model", model, "--prompts", files["honest"].parent / "prompts.txt",
        "--new-tokens", 40, "--proofs", "--fingerprint", 4, "--every", 2, *COMMON,
    )  # fmt: skip
    assert verify(*words).exit_code == 2
    assert answer(*words, "--resume")["taken_up"] == 1
    tokens = [[one.output for one in read_transcripts(p)] for p in (path, files["honest"])]
    assert tokens[0] == tokens[1]


@pytest.mark.slow
def test_speculative_answers_are_scored_with_their_draft(
    model: str, files: Files, reference: Words, tmp_path: Path
) -> None:
    prompts = files["honest"].parent / "prompts.txt"
    asked = (
        "--model",
        model,
        "--prompts",
        prompts,
        "--new-tokens",
        30,
        "--draft",
        "layers=3",
        "--ahead",
        2,
        *COMMON,
    )
    for name, variant in {"honest": "honest", "cheap": "layers=2"}.items():
        answer("simulate", "--out", tmp_path / name, "--provider", variant, *asked)
    found = [json.loads(line) for line in (tmp_path / "honest").read_text().splitlines()]
    assert {mode for one in found for mode in one["modes"]} == {"accept", "reject", "bonus"}
    how = ("--draft", "layers=3", "--ahead", 2)
    honest = answer("score", tmp_path / "honest", *reference, *how)
    assert honest["summary"]["same_token"] == 1
    other = answer("score", tmp_path / "cheap", "--honest", tmp_path / "honest", *reference, *how)
    assert other["verdict"]["score"] == "mismatch"
    assert other["summary"]["same_token"] < 0.9
    noisy = ("--monte-carlo", 20, "--score", "monte_carlo")
    other = answer("score", tmp_path / "cheap", "--honest", tmp_path / "honest", *reference, *how, *noisy)
    assert other["verdict"]["score"] == "monte_carlo"
    assert other["summary"]["monte_carlo"] > 1 > 0.3 > other["honest"]["monte_carlo"]
    # Proofs are of states, however tokens were drawn.
    answer("commit", tmp_path / "honest", "--out", tmp_path / "proven", *reference)
    assert answer("check", tmp_path / "proven", *reference)["counts"]["valid"] == 3
    (tmp_path / "drawn").write_text((tmp_path / "honest").read_text().replace('"gumbel"', '"ipt"'))
    narrow, short = (
        save_tiny("llama", tmp_path / next(iter(change)), **change)
        for change in ({"vocab_size": 200}, {"max_position_embeddings": 16})
    )
    for words, said in (
        (("score", tmp_path / "honest", *reference), "--draft"),
        (("score", files["honest"], *reference, *how), "has no modes"),
        (("score", tmp_path / "honest", *reference, *how, "--score", "margin"), "mismatch or monte_carlo"),
        (("score", tmp_path / "honest", *reference, "--draft", "batch=3"), "batch has no meaning"),
        (("simulate", "--out", tmp_path / "x", *asked, "--provider", "kv=fp8"), "kv has no meaning"),
        (("simulate", "--out", tmp_path / "x", *asked, "--proofs"), "verify commit"),
        (("score", tmp_path / "honest", *reference, "--draft", f"model={narrow}"), "needs the target's"),
        (("score", tmp_path / "drawn", *reference, *how), "Gumbel-max"),
        (("score", tmp_path / "honest", *reference, "--draft", f"model={short}"), "takes 16 together"),
    ):
        result = verify(*words)
        assert result.exit_code == 2 and said in " ".join(result.stderr.split())


@pytest.mark.slow
def test_audit_classifies_and_bounds(files: Files, reference: Words, tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    for name in ("honest", "seed"):
        (folder / f"{name}.jsonl").write_text(files[name].read_text())
    (folder / "broken.jsonl").write_text("{")
    found = {row["file"]: row for row in answer("audit", folder, *reference)["files"]}
    assert found["honest.jsonl"]["class"] != "quarantine"
    assert found["seed.jsonl"]["class"] == found["broken.jsonl"]["class"] == "quarantine"
    assert found["honest.jsonl"]["bits_per_token"] < found["seed.jsonl"]["bits_per_token"]
    assert found["honest.jsonl"]["safe_bits_per_token"] <= found["honest.jsonl"]["bits_per_token"]
    assert "line 1" in found["broken.jsonl"]["reasons"][0]
    assert verify("audit", folder, *reference).exit_code == 1
    assert verify("audit", tmp_path / "nowhere").exit_code == 2


@pytest.mark.slow
def test_audit_wants_every_request_in_the_ledger(files: Files, reference: Words, tmp_path: Path) -> None:
    folder, ledger, key = tmp_path / "logs", tmp_path / "ledger.jsonl", tmp_path / "key"
    folder.mkdir()
    log = folder / "a.jsonl"
    log.write_text(files["honest"].read_text())
    made = answer("record", log, "--ledger", ledger, "--key", key)
    assert made["records"] == made["appended"] == 3

    def classed(public: str) -> Any:
        return answer("audit", folder, "--ledger", ledger, "--public-key", public, *reference)

    assert classed(made["public_key"])["files"][0]["class"] != "quarantine"
    assert classed("00" * 32)["files"][0]["class"] == "quarantine"
    rows = log.read_text().splitlines()
    changed = json.loads(rows[0]) | {"id": "other"}
    log.write_text("\n".join([json.dumps(changed), *rows[1:]]) + "\n")
    assert "ledger" in classed(made["public_key"])["files"][0]["reasons"][0]
    assert verify("audit", folder, "--ledger", ledger).exit_code == 2


def test_an_untrusted_file_does_not_choose_the_model(files: Files, model: str, tmp_path: Path) -> None:
    for command in ("check", "score"):
        result = verify(command, files["honest"], *COMMON)
        assert result.exit_code == 2 and "--model" in result.output
    folder = tmp_path / "logs"
    folder.mkdir()
    (folder / "a.jsonl").write_text(files["honest"].read_text())
    pruned = save_tiny("llama", tmp_path / "other", seed=1, tokenizer=True)
    assert answer("check", files["honest"], "--model", pruned, *COMMON)["counts"]["valid"] == 0


def test_choosing_among_leading_tokens_is_seen(model: str, files: Files, tmp_path: Path) -> None:
    """An adversary who ignores the seed and keeps to the first ranks has no dangerous token.

    docs/log/009-verification-and-leaks.md has the figures.
    """
    folder = tmp_path / "logs"
    folder.mkdir()
    made = answer(
        "simulate", "--out", folder / "a.jsonl", "--provider", "bug=8+rate=1", "--model", model, "--prompts",
        files["honest"].parent / "prompts.txt", "--new-tokens", 40, *COMMON,
    )  # fmt: skip
    (row,) = answer("audit", folder, "--model", model, *COMMON)["files"]
    assert row["class"] == "quarantine" and "suspicious" in row["reasons"][0]
    assert row["bits_per_token"] >= 3.0 and made["requests"] == 3


def test_verdicts_have_the_stated_rate_of_false_alarms() -> None:
    rng = np.random.default_rng(0)

    def requests(n: int) -> list[dict[str, np.ndarray]]:
        return [{"margin": np.where(rng.random(60) < 0.03, rng.exponential(1, 60), 0.0)} for _ in range(n)]

    alarms = [_verdict("margin", requests(8), requests(12), 0.05, draws=200)["diverges"] for _ in range(200)]
    assert sum(alarms) <= 20
    few = _verdict("margin", requests(1), requests(1), 0.01)
    assert few["least_p"] == 0.5 and few["diverges"] is None


def test_a_damaged_reference_judges_nobody(model: str, files: Files, tmp_path: Path) -> None:
    """What the verifier's own checkpoint lacks is an error, and no fault of the provider's."""
    gone = "model.layers.1.mlp.up_proj.weight"
    tensors = load_file(Path(model) / "model.safetensors")
    for name, change, said in (
        ("lacks", {key: value for key, value in tensors.items() if key != gone}, f"does not give {gone}"),
        (
            "spoiled",
            tensors | {gone: tensors[gone] * torch.nan},
            "computes NaN or infinity for request 'p001'",
        ),
    ):
        damaged = tmp_path / name
        shutil.copytree(model, damaged)
        save_file(change, damaged / "model.safetensors", {"format": "pt"})
        for words in (
            ("check", files["honest"]), ("score", files["honest"], "--honest", files["seed"]),
            ("audit", files["honest"].parent), ("commit", files["honest"], "--out", tmp_path / "out.jsonl"),
        ):  # fmt: skip
            result = verify(*words, "--model", damaged, *COMMON)
            assert result.exit_code == 2 and said in result.stderr, result.output


def test_bounds_and_sampling_rate_say_what_the_papers_say() -> None:
    found = answer("bounds", "--free", 0.02, "--permitted", 2)
    assert found["theorem_4_2_printed"] == pytest.approx(0.858559, abs=1e-6)
    assert found["theorem_4_2_corrected"] == pytest.approx(0.000289, abs=1e-6)
    assert found["theorem_4_3"] == pytest.approx(0.03)
    assert found["game"] == pytest.approx(0.9199690, abs=1e-6)
    assert found["theorem_4_1"] == pytest.approx(0.02) and found["lemma_4_4"] == 1  # ε of 0.01 is soon found
    more = answer("bounds", "--free", 0.02, "--permitted", 2, "--rate", 0.005, "--slack", 0.2)
    assert more["theorem_4_1"] == 0.005 and more["lemma_4_4"] < 1e-50
    # 120 bits at 0.000289 a token, less what a wrong message in 100 saves.
    assert found["theorem_2_4_tokens"] == pytest.approx(0.99 * 120 / 0.000289, rel=0.01)
    assert answer("sampling-rate", "--share", 0.01)["messages"] == 459


def test_sampling_rate_has_the_shares_and_confidences_of_figure_4(tmp_path: Path) -> None:
    words = ("sampling-rate", "--share", 0.05, "--needed", 3, "--level", 0.5, "--level", 0.9)
    counted, percent = answer(*words), answer(*words, "--traffic", 200)
    for row, part in zip(counted["shares"], percent["shares"], strict=True):
        for level in (0.5, 0.9):
            drawn, share = row[f"messages_at_{level}"], row["share"]

            def met(draws: int, share: float = share) -> float:  # P(at least 3), term by term
                return 1 - sum(math.comb(draws, k) * share**k * (1 - share) ** (draws - k) for k in range(3))

            assert met(drawn) >= level and (drawn == 3 or met(drawn - 1) < level)
            assert part[f"percent_at_{level}"] == (drawn / 2 if drawn <= 200 else None)
    assert any(part["percent_at_0.9"] is None for part in percent["shares"])
    for number, made in enumerate((counted, percent)):
        PICTURES["sampling-rate"](made, tmp_path / f"{number}.png")
        assert (tmp_path / f"{number}.png").stat().st_size > 0
    assert verify("sampling-rate", "--share", "0.1", "--level", "1", "--no-record").exit_code == 2


@pytest.mark.parametrize(
    "words",
    [
        ("simulate", "--out", "x.jsonl", "--provider", "honest+magic=1"),
        ("simulate", "--out", "x.jsonl", "--model", "/no/such/model"),
        ("simulate", "--out", "x.jsonl", "--top-p", "2"),
        ("simulate", "--out", "x.jsonl", "--noise-key-env", "NO_SUCH_VARIABLE_HERE"),
        ("check", "nothing.jsonl"),
        ("simulate", "--out", "x.jsonl", "--provider", "batch=0"),
        ("simulate", "--out", "x.jsonl", "--provider", "kv=fp8+cache=0"),
        ("simulate", "--out", "x.jsonl", "--provider", "bug=2+rate=nan"),
        ("simulate", "--out", "x.jsonl", "--temperature", "1e-30"),
        ("audit", ".", "--sigma", "nan"),
        ("audit", ".", "--tau", "0"),
        ("audit", ".", "--public-key", "00"),
        ("bounds", "--free", "0.5", "--permitted", "9" * 30),
        ("sampling-rate", "--share", "0.5", "--needed", "9" * 30),
        ("score", "nothing.jsonl"),
        ("bounds", "--free", "2"),
        ("score", "nothing.jsonl", "--sigma", "0"),
        ("audit", ".", "--ipt-sigma", "-1"),
        ("audit", ".", "--checkpoint", "nothing.json"),
        ("record", "nothing.jsonl", "--ledger", "l", "--key", "k"),
        ("prove", "nothing", "--request", "a", "--checkpoint", "c", "--public-key", "00", "--out", "p"),
        ("included", "nothing", "--checkpoint", "c", "--public-key", "00"),
        ("repair", "nothing", "--public-key", "00"),
        ("import", "nothing.jsonl", "--out", "x.jsonl"),
        ("sampling-rate", "--share", "0"),
    ],
)  # fmt: skip
def test_wrong_input_gets_one_line_and_exit_code_2(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = verify(*words)
    assert result.exit_code == 2
    assert "Traceback" not in result.output
    assert not (tmp_path / "runs").exists()  # nothing was done, so there is nothing to record


# ---- records and plots


@pytest.mark.slow
def test_runs_are_recorded_with_a_plot(
    model: str, files: Files, reference: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NOISE", "a key of twenty-six bytes.")
    prompts = files["honest"].parent / "prompts.txt"
    out = tmp_path / "logs" / "a.jsonl"
    keyed = ("--noise-key-env", "NOISE", "--noise-form", "by-place")
    answer("simulate", "--out", out, "--model", model, "--prompts", prompts, "--new-tokens", 40, "--proofs",
           "--proof-values", 64, "--fingerprint", 4, "--fingerprint-dtype", "float32", *keyed, *COMMON)  # fmt: skip
    answer("commit", out, "--out", tmp_path / "b.jsonl", *reference)
    answer("check", out, "--fingerprint", 4, "--proof-values", 64, *reference)
    trusted = tmp_path / "trusted"
    trusted.write_text(out.read_text())
    answer("score", out, "--honest", trusted, *keyed, *reference)
    answer("audit", out.parent, *keyed, *reference)
    answer("bounds", "--free", 0.1, "--permitted", 4)
    answer("sampling-rate", "--share", 0.1)
    commands = {}
    for folder in (tmp_path / "runs").iterdir():
        record = json.loads((folder / "record.json").read_text())
        rows = (folder / "samples.jsonl").read_text().splitlines()
        assert record["status"] == "finished" and "twenty-six" not in json.dumps(record)
        assert (folder / "plot.png").read_bytes().startswith(b"\x89PNG")
        commands[record["verb"]] = len(rows), record["summary"], record["spec"]
    names = ("simulate", "commit", "check", "score", "audit", "bounds", "sampling-rate")
    assert set(commands) == {f"verify-{name}" for name in names}
    assert commands["verify-check"][0] == 3 and commands["verify-check"][1]["counts"]["valid"] == 3
    assert commands["verify-score"][1]["summary"]["same_token"] > 0.97  # the key was the same on both sides
    assert commands["verify-score"][2]["noise_key_env"] == "NOISE"
    assert commands["verify-simulate"][2]["projection"] == {"count": 4, "seed": 0, "kind": "orthogonal"}
    # 64 values a proof, three proofs of an answer of 40 tokens; four float32 a token.
    assert commands["verify-simulate"][1]["bytes"] == {
        "proofs": pytest.approx(3 * 130 / 40),
        "fingerprints": 16.0,
    }
    count = len(list((tmp_path / "runs").iterdir()))
    answer("check", out, "--fingerprint", 4, "--proof-values", 64, "--no-record", *reference)
    assert len(list((tmp_path / "runs").iterdir())) == count
    # Without the key, or in the other form, tokens look drawn by another seed.
    for how in ((), ("--noise-key-env", "NOISE")):
        assert answer("score", out, *how, *reference)["summary"]["same_token"] < 0.7
    # Proofs of another size than agreed on are rejected.
    wrong = answer("check", out, "--fingerprint", 4, *reference)
    assert wrong["counts"]["rejected"] == 3
    assert "a proof of 130 bytes" in wrong["requests"][0]["reason"]


def test_an_interrupted_run_says_so(
    model: str, files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hiddenlab.defenses.verification import command

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    calls = iter([command._checked, interrupted])
    monkeypatch.setattr(command, "_checked", lambda *given: next(calls)(*given))
    assert verify("check", files["honest"], "--model", model, *COMMON).exit_code == 130
    (folder,) = (tmp_path / "runs").iterdir()
    assert json.loads((folder / "record.json").read_text())["status"] == "interrupted"


def test_check_says_what_no_proof_covers(files: Files, reference: Words) -> None:
    found = answer("check", files["honest"], *AGREED, *reference)
    limits = found["limits"]
    for row in found["requests"]:
        # Every token but the answer's last, behind which no state follows.
        assert row["covered"] == row["tokens"] - 1 and row["without_value"] == 1
        assert f"compared {row['covered']} of {row['tokens']} tokens" in row["reason"]
        assert "no value depends on the last 1" in row["reason"] and row["faulty_rows"] == 0
        assert all(row[name] <= limits[name] for name in ("distance", "row_distance", "exponents"))
    tokens, covered = (sum(row[name] for row in found["requests"]) for name in ("tokens", "covered"))
    assert found["coverage"] == {"tokens": tokens, "covered": covered, "without_value": 3}
    shown = verify("check", files["honest"], *AGREED, *reference).stdout
    assert (
        f"{covered} of {tokens} tokens were compared directly. A change in the other 3 shows only if"
        in " ".join(shown.split())
    )
    pruned = answer("check", files["layers"], *AGREED, *reference)
    assert pruned["coverage"] == {"tokens": 0, "covered": 0, "without_value": 0}
    pruned = pruned["requests"]
    assert all(
        row["covered"] == 0 and row["distance"] > 0.1 and "proofs fail" in row["reason"] for row in pruned
    )


# ---- the inverse transform, and other scores


@pytest.fixture(scope="module")
def inverse(model: str, files: Files, tmp_path_factory: pytest.TempPathFactory) -> Files:
    """The same providers with inverse transform sampling."""
    folder = tmp_path_factory.mktemp("inverse")
    out = {}
    for name, variant in {"honest": "honest", "seed": "seed=1"}.items():
        out[name] = folder / f"{name}.jsonl"
        answer(
            "simulate", "--out", out[name], "--provider", variant, "--model", model, "--method", "ipt", "--prompts",
            files["honest"].parent / "prompts.txt", "--new-tokens", 40, *COMMON,
        )  # fmt: skip
    return out


def test_inverse_transform_answers_are_scored_and_audited(
    inverse: Files, files: Files, reference: Words
) -> None:
    level = ("--false-positives", 0.1)
    found = answer("score", inverse["seed"], "--honest", inverse["honest"], *level, *reference)
    assert found["verdict"]["score"] == "likelihood" and found["verdict"]["diverges"]
    assert found["summary"]["mean_margin"] is None
    assert found["summary"]["likelihood"] > found["honest"]["likelihood"] + 1
    assert verify("score", inverse["seed"], "--score", "margin", *reference).exit_code == 2
    # Honest numbers depend on how tokens are drawn.
    mixed = verify("score", inverse["seed"], "--honest", files["honest"], *reference)
    assert mixed.exit_code == 2 and "sampled differently" in mixed.stderr
    rows = {row["file"]: row for row in answer("audit", inverse["seed"].parent, *reference)["files"]}
    assert rows["honest.jsonl"]["class"] != "quarantine" and rows["seed.jsonl"]["class"] == "quarantine"
    assert rows["honest.jsonl"]["safe_bits_per_token"] <= rows["honest.jsonl"]["bits_per_token"]


def test_the_monte_carlo_score_depends_on_the_request_alone(
    files: Files, reference: Words, tmp_path: Path
) -> None:
    how = ("--monte-carlo", 30, "--score", "monte_carlo", "--false-positives", 0.1)
    found = answer("score", files["seed"], "--honest", files["honest"], *how, *reference)
    assert found["verdict"]["diverges"] and found["verdict"]["score"] == "monte_carlo"
    last = tmp_path / "last.jsonl"
    last.write_text(files["seed"].read_text().splitlines(keepends=True)[-1])
    alone = answer("score", last, "--monte-carlo", 30, *reference)
    assert alone["requests"][0] == found["requests"][-1]


def test_likelihood_knows_how_much_noise_is_honest(files: Files, reference: Words) -> None:
    values = [
        answer("score", files["seed"], *how, *reference)["summary"]["likelihood"]
        for how in ((), ("--sigma", 1.0), ("--sigma", 1.0, "--noise-on", "one"))
    ]
    assert values[1] < values[2] < values[0]


@pytest.mark.slow
def test_an_audit_with_honest_examples_looks_at_perplexity(
    model: str, files: Files, reference: Words, tmp_path: Path
) -> None:
    folder, many = tmp_path / "logs", tmp_path / "many"
    folder.mkdir()
    (tmp_path / "prompts.txt").write_text("".join(f"prompt number {i}\n" for i in range(24)))
    answer(
        "simulate",
        "--out",
        many,
        "--model",
        model,
        "--prompts",
        tmp_path / "prompts.txt",
        "--new-tokens",
        30,
        *COMMON,
    )
    rows = [json.loads(line) for line in files["honest"].read_text().splitlines()]
    for row in rows:
        row["output"] = [7] * len(row["output"])  # nothing that was drawn
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (row,) = answer("audit", folder, "--honest", many, *reference)["files"]
    assert "3 answers with a perplexity" in " ".join(row["reasons"])
    # What three honest answers lie between says little of three others.
    (row,) = answer("audit", folder, "--honest", files["honest"], *reference)["files"]
    assert "perplexity" not in " ".join(row["reasons"])


def test_rare_tokens_of_the_inverse_transform_are_no_danger() -> None:
    """The noise's mass on a rare token's interval is small even around its middle; what counts is how far that is."""
    shares = torch.tensor([0.5, 1e-6, 0.5 - 1e-6, 1e-13])
    settings = {"threshold": 1e-3, "ipt_sigma": 0.01, "rank_cutoff": 0}
    for uniform, wanted in ((0.5, [True, True, True, False]), (0.6, [False, False, True, False])):
        replay = Replay(
            shares.log()[None], None, torch.tensor([uniform], dtype=torch.float64), torch.tensor([1]),
            Sampling(method="ipt"), torch.zeros(2, 4),
        )  # fmt: skip
        assert _admissible(replay, math.log(1e-3), settings)[0].tolist() == wanted
        risks, _, _ = _risks(replay, settings)
        assert risks.tolist() == [Risk.SAFE if wanted[1] else Risk.DANGEROUS]


@pytest.mark.slow
def test_a_file_may_be_called_anything(files: Files, reference: Words, tmp_path: Path) -> None:
    names = ["cost$\\frac$5.jsonl", "a$1_{$.jsonl", os.fsdecode(b"\xff.jsonl")]
    for name in names:
        (tmp_path / name).write_text(files["honest"].read_text())
    found = answer("audit", tmp_path, *reference)
    assert len(found["files"]) == 3 and {row["class"] for row in found["files"]} != {"quarantine"}


@pytest.mark.slow
def test_short_honest_files_are_not_condemned_for_one_token(
    files: Files, reference: Words, tmp_path: Path
) -> None:
    rows = [json.loads(line) for line in files["seed"].read_text().splitlines()]
    classes = []
    for n, row in enumerate(rows):
        for start in range(0, 36, 4):
            cut = {**row, "id": f"{n}-{start}", "output": row["output"][: start + 1]}
            cut = {k: v for k, v in cut.items() if k not in ("proofs", "proof_rule", "fingerprint")}
            (tmp_path / f"{n}-{start}.jsonl").write_text(json.dumps(cut) + "\n")
    for row in answer("audit", tmp_path, *reference)["files"]:
        classes.append((row["suspicious"] + row["dangerous"], row["class"]))
    # One odd token is one honest file's in a hundred or more where there are few of them.
    assert all(level != "quarantine" for count, level in classes if count == 0)
    assert any(level == "quarantine" for count, level in classes if count > 1)


# ---- the ledger


def test_a_ledger_without_its_end_is_noticed_by_its_checkpoint(
    files: Files, reference: Words, tmp_path: Path
) -> None:
    folder, ledger, point = tmp_path / "logs", tmp_path / "ledger", tmp_path / "point"
    folder.mkdir()
    (folder / "a.jsonl").write_text("".join(files["honest"].read_text().splitlines(keepends=True)[:1]))
    how = ("--ledger", ledger, "--key", tmp_path / "key", "--checkpoint", point)
    public = answer("record", files["honest"], *how)["public_key"]
    whole = ledger.read_text()

    def audited(*more: object) -> Any:
        return answer("audit", folder, "--ledger", ledger, "--public-key", public, *more, *reference)

    found = audited("--checkpoint", point)
    assert found["ledger"]["valid"] and found["ledger"]["end_checked"]
    assert found["files"][0]["class"] != "quarantine"
    ledger.write_text("".join(whole.splitlines(keepends=True)[:2]))
    short = audited()
    assert short["ledger"]["valid"] and "go unnoticed" in short["ledger"]["reason"]
    found = audited("--checkpoint", point)
    assert not found["ledger"]["valid"] and found["files"][0]["class"] == "quarantine"
    # Nor is it continued.
    assert verify("record", files["seed"], *how).exit_code == 2
    ledger.unlink()
    assert verify("record", files["seed"], *how).exit_code == 2 and not ledger.exists()
    ledger.write_text(whole)
    assert answer("record", files["seed"], *how)["records"] == 6
    assert json.loads(point.read_text())["size"] == 6


def test_who_has_the_checkpoint_needs_no_ledger(files: Files, tmp_path: Path) -> None:
    ledger, point, proof = tmp_path / "ledger", tmp_path / "point", tmp_path / "proof"
    how = ("--ledger", ledger, "--key", tmp_path / "key")
    public = answer("record", files["honest"], *how, "--checkpoint", point)["public_key"]
    answer("record", files["seed"], *how)  # beyond the checkpoint
    ids = [one.id for one in read_transcripts(files["honest"])]
    agreed = ("--checkpoint", point, "--public-key", public)
    made = answer("prove", ledger, "--request", ids[1], *agreed, "--out", proof)
    assert made["record"] == 1 and made["under"] == 3
    assert (
        verify("prove", ledger, "--request", ids[1], *agreed, "--out", proof).exit_code == 2
    )  # not overwritten
    assert verify("prove", ledger, "--request", "nobody", *agreed, "--out", tmp_path / "x").exit_code == 2
    found = answer("included", proof, *agreed, "--transcripts", files["honest"])
    assert found["valid"] and found["request"] == ids[1]
    assert not answer("included", proof, *agreed, "--transcripts", files["seed"])["valid"]
    value = json.loads(proof.read_text())
    for change in (
        {"record": value["record"].replace(ids[1], "other")}, {"proof": {**value["proof"], "index": 0}},
        {"proof": {**value["proof"], "path": []}}, {"proof": 3}, {"record": None}, {"format": 7}, {"more": 1},
    ):  # fmt: skip
        proof.write_text(json.dumps(value | change, sort_keys=True, separators=(",", ":")))
        result = verify("included", proof, *agreed)
        assert result.exit_code == 1 and "True" not in result.stdout, change
    proof.write_text("no JSON")
    assert not answer("included", proof, *agreed)["valid"]


def test_files_of_the_ledger_are_kept_apart_and_work_is_not_done_twice(files: Files, tmp_path: Path) -> None:
    ledger, key, point = tmp_path / "ledger", tmp_path / "key", tmp_path / "point"
    for names in ((key, key, None), (ledger, ledger, None), (ledger, key, key), (ledger, key, ledger)):
        how = (
            "--ledger",
            names[0],
            "--key",
            names[1],
            *(() if names[2] is None else ("--checkpoint", names[2])),
        )
        result = verify("record", files["honest"], *how)
        assert result.exit_code == 2 and "named twice" in result.stderr
    nowhere = tmp_path / "no" / "point"
    assert (
        verify("record", files["honest"], "--ledger", ledger, "--key", key, "--checkpoint", nowhere).exit_code
        == 2
    )
    assert not any(one.exists() for one in (ledger, key, point, nowhere))  # nothing is half done
    first = answer("record", files["honest"], "--ledger", ledger, "--key", key, "--checkpoint", point)
    again = answer("record", files["honest"], "--ledger", ledger, "--key", key, "--checkpoint", point)
    assert first["records"] == again["records"] == 3 and again["appended"] == 0 and again["already"] == 3
    # Of requests with the same id, the one in a file is meant.
    public = answer("record", files["seed"], "--ledger", ledger, "--key", key, "--checkpoint", point)[
        "public_key"
    ]
    agreed = ("--checkpoint", point, "--public-key", public)
    name = read_transcripts(files["seed"])[0].id
    assert (
        "2 such records"
        in verify("prove", ledger, "--request", name, *agreed, "--out", tmp_path / "p").stderr
    )
    answer(
        "prove", ledger, "--request", name, "--transcripts", files["seed"], *agreed, "--out", tmp_path / "p"
    )
    assert answer("included", tmp_path / "p", "--transcripts", files["seed"], *agreed)["valid"]
    value = json.loads((tmp_path / "p").read_text())
    for change in ({"record": value["record"] + "\n"}, {"format": True}, {"format": 1.0}):
        (tmp_path / "p").write_text(json.dumps(value | change, sort_keys=True, separators=(",", ":")))
        assert verify("included", tmp_path / "p", *agreed).exit_code == 1
    shown = verify("record", files["seed"], "--ledger", ledger, "--key", key)
    assert f"public key: {public}" in shown.stdout  # whole, whatever the width of the screen


@pytest.mark.slow
def test_commands_that_record_at_once_lose_nothing(files: Files, tmp_path: Path) -> None:
    how = ("--ledger", tmp_path / "ledger", "--key", tmp_path / "key", "--checkpoint", tmp_path / "point")
    program = (sys.executable, "-m", "hiddenlab", "verify", "record")
    more = ("--no-record", "--json", "--wait", 300)
    processes = [
        subprocess.Popen(
            [str(word) for word in (*program, files[name], *how, *more)],
            cwd=Path(__file__).resolve().parents[1],
            stdout=subprocess.PIPE,
        )
        for name in ("honest", "seed", "layers")
    ]
    answers = [json.loads(process.communicate(timeout=600)[0]) for process in processes]
    assert [process.returncode for process in processes] == [0] * 3
    assert sorted(one["records"] for one in answers) == [3, 6, 9]
    made = answer("record", files["honest"], *how)
    assert made["records"] == 9 and made["already"] == 3


def test_who_waits_for_a_ledger_is_told_so(files: Files, tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"
    how = ("--ledger", ledger, "--key", tmp_path / "key", "--wait", 0.2)
    with ThreadPoolExecutor(1) as other, sole_writer(ledger):
        result = other.submit(verify, "record", files["honest"], *how).result()
    said = result.stderr.splitlines()
    assert result.exit_code == 2 and not ledger.exists() and not (tmp_path / "key").exists()
    assert "another process is writing to" in said[0] and "waiting up to 0.2 s" in said[0]
    assert said[-1].startswith("error: another process is writing to") and "--wait" in said[-1]
    assert answer("record", files["honest"], *how)["records"] == 3


def test_a_torn_ledger_is_repaired_and_continued(files: Files, tmp_path: Path) -> None:
    ledger, point = tmp_path / "ledger", tmp_path / "point"
    how = ("--ledger", ledger, "--key", tmp_path / "key")
    public = answer("record", files["honest"], *how, "--checkpoint", point)["public_key"]
    answer("record", files["seed"], *how)
    ledger.write_bytes(ledger.read_bytes()[:-40])
    result = verify("record", files["seed"], *how)
    assert result.exit_code == 2 and "hiddenlab verify repair" in result.stderr
    agreed = ("--public-key", public, "--checkpoint", point)
    shown = verify("repair", ledger, *agreed)
    assert shown.exit_code == 0 and "kept in" in shown.stdout and "5 records" in shown.stdout
    assert answer("record", files["seed"], *how)["appended"] == 1
    assert answer("repair", ledger, *agreed)["dropped_bytes"] == 0
    ledger.write_bytes(b"".join(ledger.read_bytes().splitlines(keepends=True)[:3]) + b"torn")
    result = verify("repair", ledger, *agreed)  # a record that the checkpoint counts is gone
    assert result.exit_code == 2 and "2 records, of 3 when the checkpoint was made" in result.stderr
    assert ledger.read_bytes().endswith(b"torn")


def test_a_place_for_records_is_looked_at_first(files: Files, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    out = tmp_path / "x"
    how = ("--ledger", out, "--key", tmp_path / "key", "--runs-dir", tmp_path / "file" / "runs")
    assert verify("record", files["honest"], *how).exit_code == 2
    assert not out.exists() and not (tmp_path / "key").exists()


def test_resuming_needs_the_same_command(model: str, files: Files, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    whole = files["honest"].read_text().splitlines(keepends=True)
    path.write_text(whole[0] + whole[1][:-30])  # killed while it wrote
    prompts = files["honest"].parent / "prompts.txt"
    words = ("simulate", "--out", path, "--model", model, "--prompts", prompts, "--resume", *COMMON)
    assert "another command" in verify(*words, "--new-tokens", 7).stderr
    assert "another command" in verify(*words, "--new-tokens", 40, "--temperature", 0.5).stderr
    assert answer(*words, "--new-tokens", 40)["taken_up"] == 1
    assert len(read_transcripts(path)) == 3


def test_few_wrong_tokens_among_many_are_found_by_row(files: Files, reference: Words, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in files["honest"].read_text().splitlines()]
    for row in rows:
        del row["proofs"], row["proof_rule"]
        row["output"][-3] = (row["output"][-3] + 1) % 256  # the last row sent is of the token before
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = answer("check", path, *AGREED, "--no-proofs", *reference)
    assert found["counts"]["rejected"] == 3, found["requests"]
    assert all("no proofs" not in row["reason"] for row in found["requests"])
    how = ("--no-proofs", "--fingerprint", 4, "--every", 2, "--largest-distance", 0.2)
    sparse = answer("check", path, *how, *reference)
    assert all(row["row_distance"] > sparse["limits"]["distance"] for row in sparse["requests"])


def test_a_fingerprint_alone_covers_what_it_depends_on(
    model: str, files: Files, reference: Words, tmp_path: Path
) -> None:
    path = tmp_path / "t.jsonl"
    prompts = files["honest"].parent / "prompts.txt"
    how = ("--fingerprint", 4, "--every", 16)
    answer(
        "simulate", "--out", path, "--model", model, "--prompts", prompts, "--new-tokens", 40, *how, *COMMON
    )
    # Who changed a prompt would leave out its proof.
    left_out = answer("check", path, *how, *reference)
    assert left_out["counts"]["valid"] == 0 and "no proofs" in left_out["requests"][0]["reason"]
    for row in answer("check", path, *how, "--no-proofs", *reference)["requests"]:
        # Rows of tokens 0, 16 and 32: the states behind the prompt's last token, and the answer's 16th and 32nd.
        assert row["verdict"] == "valid" and (row["covered"], row["without_value"]) == (3, row["tokens"] - 3)
        assert "no value depends on the last 8" in row["reason"]


def test_the_rule_of_proofs_is_agreed_on(model: str, files: Files, reference: Words, tmp_path: Path) -> None:
    out, old = tmp_path / "paper.jsonl", tmp_path / "old.jsonl"
    answer("commit", files["honest"], "--out", out, "--proof-rule", "paper", *reference)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert {row["proof_rule"] for row in rows} == {"paper"}
    assert answer("check", out, "--proof-rule", "paper", *reference)["counts"]["valid"] == 3
    wrong = answer("check", out, *reference)
    assert wrong["counts"]["rejected"] == 3
    assert "'paper'; 'rows' was agreed on (--proof-rule)" in wrong["requests"][0]["reason"]
    for change in ({"proof_rule": "mine"}, {"proof_rule": None}):
        old.write_text(json.dumps(rows[0] | change) + "\n")
        result = verify("check", old, *reference)
        assert result.exit_code == 2 and "line 1" in result.stderr and "rule" in result.stderr
        assert "Traceback" not in result.output
    words = (
        "simulate", "--out", files["honest"], "--model", model, "--prompts", files["honest"].parent / "prompts.txt",
        "--new-tokens", 40, "--proofs", "--proof-rule", "largest", "--resume", *COMMON,
    )  # fmt: skip
    assert "another command" in verify(*words).stderr


@pytest.mark.slow
def test_proofs_of_float32_values_see_what_others_do_not(
    files: Files, reference: Words, tmp_path: Path
) -> None:
    """TOPLOC, table 5: a verifier in float32 accepts float32 alone; one in bfloat16 accepts both."""
    single = ("--proof-dtype", "float32")
    exact, coarse = tmp_path / "exact.jsonl", tmp_path / "coarse.jsonl"
    made = answer("commit", files["honest"], "--out", exact, *single, *reference)
    half = answer("commit", files["honest"], "--out", coarse, *reference)
    assert made["bytes"]["proofs"] == pytest.approx(half["bytes"]["proofs"] * 514 / 258)
    found = answer("check", exact, *single, *reference)
    assert found["counts"]["valid"] == 3
    assert (found["limits"]["exponents"], found["limits"]["mantissa_mean"]) == (8, 256)
    assert answer("check", exact, *reference)["counts"]["valid"] == 3
    padded = answer("check", coarse, *single, *reference)
    assert padded["counts"]["rejected"] == 3 and padded["requests"][0]["mantissa_mean"] > 256
    rest = reference[:2]
    for words in (("check", exact), ("commit", exact, "--out", tmp_path / "new.jsonl")):
        result = verify(*words, *single, *rest, "--dtype", "bfloat16", "--device", "cpu")
        assert result.exit_code == 2 and "take --dtype float32 too" in " ".join(result.stderr.split())
    assert not (tmp_path / "new.jsonl").exists()
