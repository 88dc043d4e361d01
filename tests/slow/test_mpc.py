"""MPC baselines: the plain layer is a layer, parties are started and stopped, what cannot run says why."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from hiddenlab.cli import app
from hiddenlab.errors import HiddenlabError, InputError
from hiddenlab.eval.bench import mpc
from hiddenlab.eval.mpc import bert_layer, run


def test_the_plain_layer_is_transformers_own() -> None:
    from transformers import BertConfig
    from transformers.models.bert.modeling_bert import BertLayer

    config = BertConfig(
        hidden_size=16, num_attention_heads=2, intermediate_size=24, hidden_act="gelu_new", attn_implementation="eager",
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    layer: Any = BertLayer(config).eval()
    w = bert_layer.layer_weights(16, 24, 3)
    x = bert_layer.inputs(5, 16, 3)
    places = {
        "q": layer.attention.self.query, "k": layer.attention.self.key, "v": layer.attention.self.value,
        "o": layer.attention.output.dense, "up": layer.intermediate.dense, "down": layer.output.dense,
        "norm1": layer.attention.output.LayerNorm, "norm2": layer.output.LayerNorm,
    }  # fmt: skip
    with torch.no_grad():
        for name, module in places.items():
            weight = torch.tensor(w[f"{name}.w"])
            module.weight.copy_(weight.T if weight.ndim == 2 else weight)
            module.bias.copy_(torch.tensor(w[f"{name}.b"]))
        out = layer(torch.tensor(x)[None])
    wanted = (out[0] if isinstance(out, tuple) else out)[0].numpy()
    assert np.allclose(bert_layer.plain_layer(x, w, 2, "exact"), wanted, atol=1e-4)


def test_approximations() -> None:
    x = np.linspace(-6, 6, 400)
    exact = bert_layer.ACTIVATION["exact"](x)
    assert np.abs(bert_layer.ACTIVATION["puma"](x) - exact).max() < 0.02
    low, high = bert_layer.puma_polynomials(x, np.square)
    a, b, c = bert_layer.PUMA_BORDERS
    pieces = np.where(x < a, 0, np.where(x < b, low, np.where(x <= c, high, x)))
    assert np.allclose(pieces, bert_layer.ACTIVATION["puma"](x))
    shares = bert_layer.SOFTMAX["2quad"](x[None])
    assert shares.sum() == pytest.approx(1) and (shares >= 0).all()
    assert set(bert_layer.SOFTMAX) == set(bert_layer.ACTIVATION) == set(bert_layer.VARIANTS)


def party(tmp_path: Path, text: str) -> list[str]:
    path = tmp_path / f"{abs(hash(text))}.py"
    path.write_text(text)
    return [sys.executable, str(path)]


def test_errors_are_of_the_formulas_and_of_berts_own() -> None:
    job = {"tokens": 4, "width": 8, "inner": 16, "heads": 2, "layers": 2, "seed": 3, "variant": "2quad"}
    x = y = bert_layer.inputs(4, 8, 3)
    for i in range(2):
        weights = bert_layer.layer_weights(8, 16, 3 + i)
        x, y = bert_layer.plain_layer(x, weights, 2, "2quad"), bert_layer.plain_layer(y, weights, 2, "exact")
    found = bert_layer.errors(x + 0.25, job)
    assert found["error"] == pytest.approx(0.25)
    assert found["error_exact"] == pytest.approx(np.abs(x + 0.25 - y).max()) and found["error_exact"] != 0.25


@pytest.mark.parametrize("variant", bert_layer.VARIANTS)
@pytest.mark.parametrize("library", ["crypten", "spu"])
def test_a_layer_by_the_library_itself(library: str, variant: str) -> None:
    """Where 'make mpc' was run; everywhere else stand-ins take the libraries' place."""
    if not (run.ROOT / run.ENVIRONMENTS[library] / ".ready").is_file():
        pytest.skip("make mpc was not run")
    job = {
        "width": 32, "inner": 48, "heads": 2, "layers": 1, "tokens": 6, "seed": 0, "repeats": 1, "threads": 1,
        "vocabulary": 50, "variant": variant, "embedding": False, "protocol": "semi2k",
    }  # fmt: skip
    found = {"crypten": run.crypten, "spu": run.spu}[library](job, 120)
    assert found["error"] < 0.05 and found["rounds"][0] > 10 and found["bytes"][0] > 1000
    assert (found["error_exact"] > 0.05) == (variant == "2quad")


def test_parties_run_side_by_side(tmp_path: Path) -> None:
    command = party(tmp_path, "import os; print('I am', os.environ['RANK'])")
    texts = run.run_parties([command] * 2, [{"RANK": "0"}, {"RANK": "1"}], 60)
    assert texts == ["I am 0\n", "I am 1\n"]


def test_a_party_that_fails_takes_the_others_along(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    waits = party(
        tmp_path, f"import os, time; open({str(note)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    )
    fails = party(
        tmp_path, f"import os, time\nwhile not os.path.exists({str(note)!r}): time.sleep(0.01)\n1 / 0"
    )
    with pytest.raises(HiddenlabError, match="party 1 failed: ZeroDivisionError"):
        run.run_parties([waits, fails], [{}, {}], 60)
    assert gone(int(note.read_text() or 0))


def test_a_party_that_does_not_answer_is_stopped(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    waits = party(
        tmp_path, f"import os, time; open({str(note)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    )
    with pytest.raises(HiddenlabError, match="party 0 did not answer within 3 s; all parties were stopped"):
        run.run_parties([waits], [{}], 3)
    assert gone(int(note.read_text()))


def test_a_party_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    child = party(
        tmp_path,
        f"import sys, time; sys.path.insert(0, {str(Path(bert_layer.__file__).parent)!r}); import bert_layer\n"
        f"bert_layer.end_with_parent(); import os; open({str(note)!r}, 'w').write(str(os.getpid())); time.sleep(600)",
    )
    parent = party(
        tmp_path, f"from hiddenlab.eval.mpc.run import run_parties; run_parties([{child!r}], [{{}}], 600)"
    )
    running = subprocess.Popen(parent, cwd=Path(run.__file__).parents[2])
    while not note.is_file() or not note.read_text():
        assert running.poll() is None, "the process ended before its party began"
        time.sleep(0.05)
    running.terminate()
    running.wait()
    assert gone(int(note.read_text()))


def gone(pid: int) -> bool:
    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def test_results_are_put_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = Path(sys.executable)
    monkeypatch.setattr(run, "interpreter", lambda library: python)
    monkeypatch.setattr(run, "FOLDER", tmp_path)
    (tmp_path / "crypten_party.py").write_text(
        "import json, os; r = int(os.environ['RANK'])\n"
        "print('RESULT', json.dumps({'seconds': [1 + r, 5 - r], 'bytes': [10, 30], 'rounds': [4, 4], 'error': 0.5}))"
    )
    found = run.crypten({"variant": "exact"}, 60)
    assert (found["seconds"], found["bytes"]) == ([2, 5], [10, 30])
    (tmp_path / "spu_party.py").write_text(
        "import json, sys; job, r = json.loads(sys.argv[1]), int(sys.argv[2])\n"
        "assert len(set(job['ports'])) == 3\n"
        "sent = f'total send bytes {100 + r}, recv bytes 3, send actions {7 - r}, recv actions 5'\n"
        "print('[info] Link details:', sent)\n"
        "print('RESULT', json.dumps({'seconds': [1.5], 'error': 0.1}))"
    )
    found = run.spu({"protocol": "aby3"}, 60)
    assert (found["bytes"], found["rounds"], found["parties"]) == ([303.0], [7], 3)
    (tmp_path / "spu_party.py").write_text("print('nothing')")
    with pytest.raises(HiddenlabError, match="without a result"):
        run.spu({"protocol": "semi2k"}, 60)


@pytest.fixture
def without_libraries(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run, "ROOT", tmp_path)


@pytest.mark.usefixtures("without_libraries")
def test_the_bench_without_the_libraries_says_how_to_get_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError, match="make mpc"):
        run.interpreter("crypten")
    tiny = {
        "type": "bert",
        "hidden_size": 32,
        "num_attention_heads": 2,
        "intermediate_size": 48,
        "vocab_size": 99,
    }
    monkeypatch.setitem(mpc.SHAPES, "bert-base", tiny)
    args = ["bench", "mpc", "--max-tokens", "8", "--set", "alphas=4", "--set", "backends=local", "--json"]
    result = CliRunner().invoke(app, [*args, "--set", "repeats=2", "--set", f"plot={tmp_path / 'p.png'}"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    by_name = {row["scheme"]: row for row in found["rows"]}
    assert by_name["Cascade, threads α=4"]["error"] < 1e-4 and found["layers"] == 1
    assert "make mpc" in by_name["SPU ABY3, Puma's GELU"]["not_run"]
    assert by_name["plain"]["seconds_over_cascade"] is None  # α = 4 over TCP was not measured
    puma = [row for row in found["published"] if (row["model"], row["scheme"]) == ("bert-base", "Puma")]
    assert [(row["seconds"], row["megabytes"]) for row in puma] == [(33.913, 10773.0)]
    on_link = by_name["Cascade, on the link α=4"]
    assert on_link["error"] < 1e-4 and on_link["seconds_on_link"] > 0 and "simulated" in found["link"]
    assert (tmp_path / "p.png").stat().st_size > 5000


def test_ratios_are_of_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {
            "setting": "tcp α=4", "seconds": 2.0, "seconds_low": 1.0, "seconds_high": 3.0, "plain_seconds": 0.5,
            "mb_on_wire": 10.0, "mb_formula": 9.0, "max_difference": 1e-6, "seconds_formula": 1.0,
        }
    ]  # fmt: skip
    monkeypatch.setattr(mpc.bench_cascade, "bench", lambda **_: {"rows": rows})
    answer: Callable[..., dict[str, Any]] = lambda job, timeout: {  # noqa: E731
        "seconds": [8.0, 6.0, 7.0], "bytes": [4e7] * 3, "error": 0.1, "error_exact": 0.2,
        "rounds": [5] * 3, "parties": 2,
    }  # fmt: skip
    monkeypatch.setattr(mpc, "BASELINES", {"one": (answer, {"variant": "exact"})})
    found = {row["scheme"]: row for row in mpc.bench()["rows"]}
    assert found["one"]["seconds_over_cascade"] == 3.5 and found["one"]["megabytes_over_cascade"] == 4.0
    assert found["plain"]["seconds_over_cascade"] == 0.25
    assert found["one"]["seconds_on_link"] == pytest.approx(7 + 5 * 1e-3 + 2e7 / (1e9 / 8))
    bare = {row["scheme"]: row for row in mpc.bench(bandwidth=0)["rows"]}
    assert "seconds_on_link" not in bare["one"] and not [name for name in bare if "link" in name]
    for wrong, words in (
        ({"repeats": 0}, "repeats"), ({"only": "nobody"}, "no baseline.s name holds"),
        ({"plot": "/no/where/p.png"}, "folder"), ({"bandwidth": -1.0}, "bandwidth"),
        ({"max_tokens": 600}, "at most 512"), ({"depth": 99}, "at most 12"), ({"timeout": float("nan")}, "timeout"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=words):
            mpc.bench(**wrong)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="unknown shape"):
        mpc.bench(model="gpt")
