"""The experiments on noise: which cells they ask for, what they refuse, and how rows are put together."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from hiddenlab.channels import Channel
from hiddenlab.cli import app
from hiddenlab.errors import InputError, NotApplicableError, UnknownNameError
from hiddenlab.eval.cells import Experiment, Setting, conduct
from hiddenlab.eval.measures import attack as measures
from hiddenlab.eval.tables import paper
from hiddenlab.eval.tables.attack import table_18, table_19, table_20, table_21, table_22
from hiddenlab.eval.tables.noise import noise, noise_utility, order
from hiddenlab.models import load_model
from hiddenlab.report.tables import grid, table_page
from hiddenlab.testing import PlainModel
from hiddenlab.types import Progress
from hiddenlab.utils.random import generator

TABLES = {"identity": table_18, "seq-perm": table_19, "hidden-perm": table_20, "2d-perm": table_21}


@pytest.fixture
def deep(tiny: Callable[..., str]) -> str:
    """A tiny model with as many layers as the experiments look into."""
    return tiny("llama", num_hidden_layers=24)


def digests(experiment: Experiment, **keys: Any) -> dict[tuple[str, int], str]:
    """Digests of the cells whose keys are the given ones, by method and layer."""
    cells = (cell for cell in experiment.cells if keys.items() <= cell.keys.items())
    return {(cell.keys["method"], cell.keys["layer"]): cell.digest for cell in cells}


# ---- noise


@pytest.mark.parametrize("channel", TABLES)
def test_matching_is_measured_once_for_all_tables(deep: str, channel: str) -> None:
    setting = Setting(model=deep)
    ours = digests(noise(setting, budget=48), channel=channel, attack="vocab-match")
    table = digests(TABLES[channel](setting, budget=48))
    assert len(ours) == 3 * 4
    common = ours.keys() & table.keys()
    assert len(common) == 3 * 3  # layer 21 is not among the tables' own
    assert all(ours[place] == table[place] for place in common)
    assert set(digests(TABLES[channel](setting, budget=49)).values()).isdisjoint(ours.values())


def test_every_method_channel_layer_and_attack_has_a_row(deep: str) -> None:
    found = noise(Setting(model=deep))
    assert len(found.cells) == len({cell.digest for cell in found.cells}) == 3 * 4 * 4 * 2
    (row,) = (
        cell
        for cell in found.cells
        if tuple(cell.keys.values()) == ("gaussian:sigma=0.1", "2d-perm", 11, "beam-decoding")
    )
    assert (row.spec["attack"], row.spec["budget"], row.spec["layer"]) == ("beam-decoding", None, 11)
    assert row.spec["defense"] == ["gaussian:sigma=0.1", "2d-perm"]
    assert row.paper == {f"ROUGE-L, {paper.GEMMA}": 0.0016}
    assert list(found.figures)[:2] == ["rouge_l", "bag_of_tokens_recall"]
    assert [note for note in found.notes if "at most 64 candidates" in note]


def test_what_is_asked_for_is_what_is_measured(deep: str) -> None:
    asked = noise(
        Setting(model=deep, layers=(2,)),
        channels="seq-perm",
        methods="gaussian:0.10, gaussian:sigma=0.1,int8",
        attacks="beam-decoding:beam=4,rounds=0,beam-decoding",
    )
    assert [tuple(cell.keys.values()) for cell in asked.cells] == [
        (method, "seq-perm", 2, attack)
        for method in ("gaussian:sigma=0.1", "int8")
        for attack in ("beam-decoding:beam=4,rounds=0", "beam-decoding")
    ]
    assert {cell.paper[f"ROUGE-L, {paper.GEMMA}"] for cell in asked.cells} == {None}
    assert not [note for note in asked.notes if "candidates a token" in note]
    # What the paper did not measure has no figure of its.
    strong = noise(Setting(model=deep, layers=(1,)), methods="gaussian:sigma=0.5", channels="identity")
    assert strong.cells[0].paper == {f"ROUGE-L, {paper.GEMMA}": None}


def test_strengths_relative_to_the_embeddings(deep: str) -> None:
    unit = measures.embedding_deviation(deep)
    model = load_model(deep, 0, stream="embed")
    table = model.embed(torch.arange(model.vocab_size)).double()
    assert unit == pytest.approx(float(table.std(correction=0)), rel=1e-5)
    asked = noise(
        Setting(model=deep, layers=(1,)), channels="identity", attacks="beam-decoding", relative="0.07,0.5"
    ).cells
    assert [cell.keys["over deviation"] for cell in asked] == [0.07, 0.5]
    for cell in asked:
        sigma = float(cell.spec["defense"][0].removeprefix("gaussian:sigma="))
        assert sigma == pytest.approx(cell.keys["over deviation"] * unit, rel=1e-3)
    (alone,) = noise(
        Setting(model=deep, layers=(1,)), channels="identity", attacks="beam-decoding", relative=0.5
    ).cells
    assert alone.digest == asked[1].digest


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"channels": "seq-perm,sideways"},
            InputError,
            "Tables 18 to 21 is called 'sideways'; they are ident",
        ),
        ({"channels": ""}, InputError, "is called ''"),
        ({"methods": "gausian:sigma=0.1"}, UnknownNameError, "unknown defense 'gausian'; did you mean gauss"),
        ({"methods": "gaussian:sigma=0"}, InputError, "gaussian needs sigma > 0"),
        ({"methods": ""}, InputError, "names nothing"),
        (
            {"attacks": "beam-decoding,beam-decodign"},
            UnknownNameError,
            "unknown attack 'beam-decodign'; did you mean beam-decoding",
        ),
        ({"attacks": "beam-decoding:beams=2"}, InputError, "beam-decoding has no parameter 'beams'"),
        ({"relative": "much"}, InputError, "a relative strength is a number, not 'much'"),
        ({"relative": ""}, InputError, "a relative strength is a number, not ''"),
        ({"relative": "-0.1"}, InputError, "gaussian needs sigma > 0"),
        ({"relative": "0.1", "methods": "int8"}, InputError, "exclude each other"),
    ],
)
def test_what_does_not_exist_is_refused(
    deep: str, options: dict[str, str], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message.replace("(", r"\(")):
        noise(Setting(model=deep), **options)


# ---- noise beside its cost


def test_recovery_and_cost_are_cells_of_other_tables_too(deep: str) -> None:
    setting = Setting(model=deep)
    both = {
        part: {c.digest for c in noise_utility(setting).cells if c.keys["part"] == part}
        for part in ("recovery", "utility", "embedding")
    }
    assert {part: len(found) for part, found in both.items()} == {"recovery": 9, "utility": 9, "embedding": 1}
    assert len(both["recovery"] & {cell.digest for cell in noise(setting).cells}) == 3
    # All of Table 22 but the clean model and LiveBench's questions.
    assert len(both["utility"] & {cell.digest for cell in table_22(setting).cells}) == 5


def test_layer_channel_and_sigmas(deep: str, tiny: Callable[..., str]) -> None:
    def read(model: str, layers: tuple[int, ...] | None = None, **options: Any) -> list[dict[str, Any]]:
        cells = noise_utility(Setting(model=model, layers=layers), **options).cells
        return [dict(cell.spec) for cell in cells if cell.keys["part"] == "recovery"]

    assert {spec["layer"] for spec in read(deep)} == {11}
    assert {spec["layer"] for spec in read(tiny("llama"))} == {2}
    found = read(deep, (3,), sigmas="0.2, 0.20,1e-3", channel="seq-perm")
    assert {(spec["layer"], spec["attack"]) for spec in found} == {(3, "beam-decoding")}
    assert [spec["defense"] for spec in found] == [
        [method, "seq-perm"]
        for method in ("gaussian:sigma=0.2", "gaussian:sigma=0.001", "random-prefix", "int8", "nf4")
    ]
    assert read(deep, sigmas=0.5)[0]["defense"] == ["gaussian:sigma=0.5"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sigmas": "0.1,much"}, "a sigma is a number, not 'much'"),
        ({"sigmas": "0.1,-1"}, "needs sigma > 0"),
        ({"sigmas": ""}, "a sigma is a number, not ''"),
        ({"channel": "sideways"}, "is called 'sideways'"),
        ({"channel": "identity,seq-perm"}, "one channel"),
    ],
)
def test_wrong_options(deep: str, options: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        noise_utility(Setting(model=deep), **options)


def test_one_layer_alone(deep: str) -> None:
    with pytest.raises(InputError, match="one layer"):
        noise_utility(Setting(model=deep, layers=(1, 2)))


def hand_made(part: str, status: str = "measured", reason: str | None = None, **more: Any) -> dict[str, Any]:
    keys = {"part": part, **more.pop("keys", {})}
    figures = {
        name: {"value": value, "low": value - 0.1, "high": value + 0.1, "n": 9}
        for name, value in more.items()
    }
    return {
        "keys": keys, "figures": figures, "paper": {f"of {part}": 0.5}, "status": status, "reason": reason,
        "commit": "abc", "cell": f"{part}-1",
    }  # fmt: skip


def test_a_row_is_a_defense(deep: str) -> None:
    fold = noise_utility(Setting(model=deep)).fold
    assert fold is not None
    weak, strong, prefix = (
        {"defense": "gaussian", "sigma": 0.1},
        {"defense": "gaussian", "sigma": 0.5},
        {"defense": "random-prefix"},
    )
    unit = hand_made("embedding", embedding_deviation=0.25)
    rows = [
        hand_made("recovery", keys=weak, rouge_l=0.9, bag_of_tokens_recall=0.95),
        hand_made("utility", keys=strong, kl=3.0),
        hand_made("utility", keys=weak, kl=0.2, top1_agreement=0.7),
        hand_made("recovery", keys=strong, status="not run", reason="no memory"),
        hand_made("recovery", keys=prefix, status="not run"),
        hand_made("utility", keys=prefix, status="not run"),
    ]
    first, second, third = fold([unit, *rows])
    assert [row["keys"] for row in (first, second, third)] == [weak, strong, prefix]
    assert {name: figure["value"] for name, figure in first["figures"].items()} == {
        "rouge_l": 0.9, "bag_of_tokens_recall": 0.95, "kl": 0.2, "top1_agreement": 0.7, "sigma_over_deviation": 0.4
    }  # fmt: skip
    assert first["paper"] == {"of recovery": 0.5, "of utility": 0.5}
    assert (first["status"], first["reason"], first["cell"]) == ("measured", None, "recovery-1")
    assert set(second["figures"]) == {"kl", "sigma_over_deviation"}
    assert (second["status"], second["reason"]) == ("measured", "recovery: no memory")
    assert (third["status"], third["figures"]) == ("not run", {})
    assert third["reason"] == "recovery: not measured yet; utility: not measured yet"
    # Without the embedding the ratio alone is missing.
    (alone, *_) = fold([{**unit, "figures": {}, "status": "not run"}, *rows])
    assert "sigma_over_deviation" not in alone["figures"] and alone["figures"]["kl"]["value"] == 0.2
    assert alone["reason"] == "embedding: not measured yet"


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_the_embeddings_spread(tiny: Callable[..., str], tmp_path: Path, architecture: str) -> None:
    """As the module gives them: Gemma's scales what it looks up by the root of the width."""
    path = tiny(architecture)
    found = measures.embedding({"model": path}, tmp_path)["embedding_deviation"]
    model = PlainModel(path).model
    table = model.get_input_embeddings().weight.detach().double()
    scale = model.config.hidden_size**0.5 if architecture == "gemma2" else 1.0
    expected = scale * float((table - table.mean()).square().mean().sqrt())
    assert found["value"] == pytest.approx(expected, rel=1e-3)
    assert found["low"] == found["value"] == found["high"]
    assert found["n"] == len(table) == load_model(path, 1, device="cpu").vocab_size


def test_the_whole_table(tiny: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured but for the attack, which is another test's business."""

    def attack(spec: dict[str, Any], folder: Path, progress: Progress) -> dict[str, dict[str, float]]:
        assert spec["attack"] == "beam-decoding"
        return {
            name: {"value": 0.5, "low": 0.4, "high": 0.6, "n": 2}
            for name in ("rouge_l", "bag_of_tokens_recall")
        }

    monkeypatch.setattr(measures, "attack", attack)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("hello there\nabc")
    model = tiny("llama", tokenizer=True)
    made = noise_utility(Setting(model=model, prompts=str(prompts)), sigmas="0.01,2")
    table = conduct("noise-utility", made, tmp_path, threads=torch.get_num_threads())
    rows = {(row["keys"]["defense"], row["keys"].get("sigma")): row["figures"] for row in table["rows"]}
    assert list(rows) == [
        ("gaussian", 0.01), ("gaussian", 2.0), ("random-prefix", None), ("int8", None), ("nf4", None)
    ]  # fmt: skip
    weak, strong = rows["gaussian", 0.01], rows["gaussian", 2.0]
    assert strong["kl"]["value"] > 10 * weak["kl"]["value"] > 0
    assert strong["sigma_over_deviation"]["value"] == pytest.approx(
        200 * weak["sigma_over_deviation"]["value"]
    )
    cells = grid(table)
    assert cells.header[:6] == ["defense", "sigma", "channel", "layer", "ROUGE-L", "tokens in any order"]
    assert cells.rows[2][:6] == [
        "random-prefix", "–", "identity", "2", "0.500 [0.400, 0.600]", "50.0 % [40.0, 60.0]"
    ]  # fmt: skip
    assert cells.reasons == []
    assert "| gaussian | 2 | identity | 2 |" in table_page(table)
    from hiddenlab.report.plots import draw_table

    assert draw_table(table, tmp_path) == tmp_path / "noise-utility.png"


def test_what_rows_tell_of_their_order(
    tiny: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted pair by pair, for a rule that says something of the true order."""
    texts = ["hello there, this is a prompt", "abc", "a"]
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(texts))

    def by_length(rows: torch.Tensor) -> torch.Tensor:
        lengths = rows.norm(dim=1)
        return lengths[:, None] - lengths

    monkeypatch.setattr(measures, "pairwise_order_for", lambda *_: (by_length, 0.0))
    model = tiny("llama", tokenizer=True)
    setting = Setting(model=model, prompts=str(prompts), layers=(2,))
    (cell,) = order(setting, sigmas=0.1).cells
    assert cell.spec["defense"] == ["gaussian:sigma=0.1", "seq-perm"]
    found = measures.order(dict(cell.spec), tmp_path)
    truncated = load_model(model, 2, device="cpu")
    counts, off = {"pairs": [0, 0], "near_pairs": [0, 0], "far_pairs": [0, 0]}, []
    for i, text in enumerate(texts[:2]):  # one row has no order
        release = generator(0, "release", i)
        observation, secret = Channel.parse(cell.spec["defense"]).release(
            truncated, truncated.tokenize(text), release
        )
        rows = dict(zip(secret.row_order, observation.states, strict=True))
        for a, b in itertools.combinations(sorted(rows), 2):
            right = bool(rows[a].norm() > rows[b].norm())
            for name, counted in (("pairs", True), ("near_pairs", b - a <= 4), ("far_pairs", b - a > 16)):
                counts[name][0] += right and counted
                counts[name][1] += counted
        ranked = sorted(rows, key=lambda place: -float(rows[place].norm()))
        off.append(sum(abs(place - rank) for rank, place in enumerate(ranked)) / len(ranked))
    for name, (hits, pairs) in counts.items():
        assert found[name]["value"] == pytest.approx(hits / pairs)
    assert found["places_off"]["value"] == pytest.approx(sum(off) / 2)
    with pytest.raises(NotApplicableError):
        measures.order({**cell.spec, "defense": ["hidden-perm"]}, tmp_path)
    for wrong in ("identity", "seq-perm,2d-perm"):
        with pytest.raises(InputError, match="one channel of seq-perm, 2d-perm"):
            order(setting, channel=wrong)
    assert [one.spec["defense"] for one in order(setting, sigmas="0,1").cells] == [
        ["seq-perm"], ["gaussian:sigma=1.0", "seq-perm"]
    ]  # fmt: skip


def test_the_command_knows_both(deep: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, option in (("noise", "methods=gaussian:sigma=0.1"), ("noise-utility", "sigmas=0.1")):
        result = CliRunner().invoke(
            app, ["eval", name, "--set", option, "--model", deep, "--cached-only", "--json"]
        )
        assert result.exit_code == 0, result.output
        rows = json.loads(result.stdout)["rows"]
        assert {row["status"] for row in rows} == {"not run"}
        assert len(rows) == (4 * 4 * 2 if name == "noise" else 4)
