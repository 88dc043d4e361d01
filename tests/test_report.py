"""Reports of runs made by hand: tables, plots, and prompts that try to break out of the page."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from hiddenlab import registry
from hiddenlab.cli import app
from hiddenlab.cli.bench import fit, parse_settings
from hiddenlab.errors import HiddenlabError, InputError
from hiddenlab.records import Recorder, RunRecord
from hiddenlab.report.leaderboard import is_board
from hiddenlab.report.markdown import load, load_runs, write_report
from hiddenlab.report.prompts import prompt_html
from hiddenlab.report.tables import table_page
from hiddenlab.summary import figure, summarise
from hiddenlab.testing import attack_sample
from hiddenlab.text import visible

STORED = sorted((Path(__file__).resolve().parents[1] / "docs" / "results" / "tables").glob("*.json"))


def sample(index: int, spans: list[tuple[str, str]], **changes: Any) -> dict[str, Any]:
    return attack_sample(index, spans, **changes)


def make(
    path: Path, samples: list[dict[str, Any]], *, layer: int = 1, status: str = "finished", **spec: Any
) -> Path:
    full = {"model": "builtin", "layer": layer, "stream": "resid", "defense": [], "seed": 0, **spec}
    record = RunRecord(verb="attack", spec=full, prompts=3)
    recorder = Recorder.create(record, out=path)
    for one in samples:
        recorder.append(one)
    recorder.close(status, summarise(samples) if status == "finished" else None)
    return path


GOOD = [("Hello", "exact"), (" world", "exact")]
BAD = [("<script>", "exact"), ('alert("x")', "wrong"), ("\n", "wrong"), (" & |\x1b\u202e", "unverified")]


def test_report_of_several_runs(tmp_path: Path) -> None:
    paths = [
        make(tmp_path / f"{name}{layer}", [sample(0, GOOD), sample(1, BAD)], layer=layer, defense=defense)
        for layer in (1, 6)
        for name, defense in (("raw", []), ("perm", ["gaussian:sigma=0.01", "seq-perm"]))
    ]
    files = write_report(paths, tmp_path / "report")
    assert sorted(path.name for path in files) == ["cost.png", "recovery.png", "report.html", "report.md"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in files if path.suffix == ".png")
    text = (tmp_path / "report" / "report.md").read_text()
    rows = [line for line in text.splitlines() if re.match(r"\| \d", line)]
    assert [row.split(" | ")[0] for row in rows] == ["| 1", "| 6", "| 1", "| 6"]
    assert "| 50.0 % | 62.5 % |" in rows[0]
    assert "2.50 ×" in rows[0]
    head = next(line for line in text.splitlines() if line.startswith("| layer"))
    columns = len(head.split("|"))
    assert {len(re.split(r"(?<!\\)\|", row)) for row in rows} == {columns}
    assert "gaussian:sigma=0.01, then seq-perm" in rows[0] and "no defense" in rows[2]
    assert "peak memory" not in head  # nobody measured it
    assert "- 1 of 2 prompts came back exactly from states of layer 6 without a defense." in text
    assert "](recovery.png)" in text
    assert "](cost.png)" in text
    assert "`report.html`, written beside this page" in text


def test_prompts_cannot_break_out_of_the_page(tmp_path: Path) -> None:
    html = write_report([make(tmp_path / "r", [sample(0, BAD)])], tmp_path / "out")[1].read_text()
    assert prompt_html(sample(0, BAD)) in html
    assert "<script" not in html
    assert "&lt;script&gt;" in html
    # Adjacent wrong tokens share a mark, which a screen reader says.
    said = '<span class="sr"> (wrong: </span>{}<span class="sr">) </span>'
    assert f'<span class="wrong">{said.format("alert(&quot;x&quot;)↵" + chr(10))}</span>' in html
    assert '(not verified: </span> &amp; |␛\ufffd<span class="sr">' in html
    assert "<code>" not in html.partition("</style>")[2] and "script-src" not in html
    assert "default-src 'none'; style-src 'unsafe-inline'; img-src data:" in html


def test_runs_are_told_apart_by_what_differs(tmp_path: Path) -> None:
    paths = [make(tmp_path / s, [sample(0, GOOD)], search=s, seed=1) for s in ("greedy", "speculative")]
    assert [run.label for run in load_runs(paths)] == [
        "identity, search greedy",
        "identity, search speculative",
    ]


def test_unfinished_and_unscored_runs(tmp_path: Path) -> None:
    scores = dict.fromkeys(("exact", "token_accuracy", "bag_of_tokens_recall", "rouge_l", "bleu"))
    unscored = sample(0, [("a", "verified")], **scores)
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
    other = {
        "index": 1, "id": "p002", "status": "not applicable", "reason": "no <rows>", **dict.fromkeys(scores),
    }  # fmt: skip
    make(tmp_path / "r", [unscored, other], status="interrupted")
    files = write_report([tmp_path / "r"], tmp_path / "out")
    text = files[0].read_text()
    assert "interrupted, 2 of 3 prompts" in text
    assert "exact prompts" not in text  # nothing was measured of them
    page = files[1].read_text()
    assert "not applicable: no &lt;rows&gt;" in page
    assert "true text not known" in page
    assert (
        "<strong>1 prompt was read</strong> from states of layer 1 without a defense. The true text is"
        in page
    )
    assert (
        "This run is not finished (interrupted, 2 of 3 prompts). The attack does not apply to 1 more prompt."
        in page
    )


def test_what_cannot_be_reported(tmp_path: Path) -> None:
    make(tmp_path / "empty", [], status="interrupted")
    with pytest.raises(InputError, match="holds no samples"):
        write_report([tmp_path / "empty"], tmp_path / "out")
    Recorder.create(RunRecord(verb="bench", spec={}), out=tmp_path / "bench").close("finished")
    with pytest.raises(InputError, match="is a run of 'bench'"):
        write_report([tmp_path / "bench"], tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (tmp_path / "file").touch()
    with pytest.raises(HiddenlabError, match="cannot write the report"):
        write_report([make(tmp_path / "r", [sample(0, GOOD)])], tmp_path / "file" / "out")


def table(name: str = "t", **changes: Any) -> dict[str, Any]:
    def row(layer: int, low: float, value: float | None, high: float) -> dict[str, Any]:
        figures = {} if value is None else {"exact": {"value": value, "low": low, "high": high, "n": 9}}
        return {
            "keys": {"channel": "<b>|x", "layer": layer}, "figures": figures, "paper": {"exact, Gemma": 0.9},
            "status": "not run" if value is None else "measured", "reason": "no <data>", "cell": "attack-1",
            "commit": None,
        }  # fmt: skip

    return {
        "format": 1, "experiment": name, "title": "A & B", "figures": {"exact": "exact prompts"},
        "rows": [row(1, 0.5, 0.75, 1.0), row(6, 0.2, 0.25, 0.3), row(11, 0, None, 0)], "notes": ["so & so"],
        "command": "hiddenlab eval t --limit 3", **changes,
    }  # fmt: skip


def test_report_of_experiments(tmp_path: Path) -> None:
    (tmp_path / "eval").mkdir()
    for name in ("t", "u"):
        (tmp_path / "eval" / f"{name}.json").write_text(json.dumps(table(name)))
    make(tmp_path / "eval/cells/attack-1/run", [sample(i, BAD) for i in range(14)])
    files = write_report([tmp_path / "eval"], tmp_path / "out")
    assert [path.name for path in files] == ["report.md", "report.html", "t.png", "u.png"]
    text, html = files[0].read_text(), files[1].read_text()
    assert "| &lt;b&gt;\\|x | 1 | 75.0 % [50.0, 100] | 90.0 % |" in text
    assert "- not run: &lt;b&gt;\\|x, 11: no &lt;data&gt;" in text
    assert "<b>" not in html.partition("<style>")[2].partition("</style>")[2]
    assert "not run: &lt;b&gt;|x, 11: no &lt;data&gt;" in html
    key = '<th scope="row" class="key">'
    assert f"{key}&lt;b&gt;|x</th>{key}1</th><td>75.0 % [50.0, 100]</td>" in html
    assert f"{key}11</th>" not in html  # not measured, so hidden
    assert '<td class="paper">90.0 %</td>' in html
    assert html.count('src="data:image/svg+xml;base64,') == 2
    assert "http" not in html.replace("http-equiv", "")  # nothing is fetched
    # Both have the same title, so their names are added.
    assert all(
        f'href="#{n}">A &amp; B ({n})' in html and f'<h2 id="{n}">A &amp; B ({n})' in html for n in "tu"
    )
    assert "exact prompts: 25.0 % to 75.0 % in 2 rows" in html
    assert "the first 12 of 14" in html and html.count('<div class="prompt">') == 12 * 3 * 2
    both = write_report([tmp_path / "eval/t.json", make(tmp_path / "r", [sample(0, GOOD)])], tmp_path / "out")
    assert {path.name for path in both} == {"report.md", "report.html", "t.png", "recovery.png", "cost.png"}


def test_tables_of_one_experiment_have_pictures_of_their_own(tmp_path: Path) -> None:
    for name in ("t", "t-other", "a file"):
        (tmp_path / f"{name}.json").write_text(json.dumps(table("t")))
    files = write_report([tmp_path / "t.json", tmp_path / "t-other.json"], tmp_path / "out")
    assert {path.name for path in files} == {"report.md", "report.html", "t.png", "t-other.png"}
    assert all(files[0].read_text().count(f"({name}.png)") == 1 for name in ("t", "t-other"))
    assert {path.name for path in write_report([tmp_path / "a file.json"], tmp_path / "one")} >= {"t.png"}


def test_tables_of_nothing_and_of_one_layer(tmp_path: Path) -> None:
    empty = table(rows=[{**row, "figures": {}} for row in table()["rows"]])
    (tmp_path / "empty.json").write_text(json.dumps(empty))
    assert len(write_report([tmp_path / "empty.json"], tmp_path / "out")) == 2
    assert "Nothing was measured." in (tmp_path / "out" / "report.html").read_text()
    (tmp_path / "one.json").write_text(json.dumps(table(rows=table()["rows"][:1])))
    assert len(write_report([tmp_path / "one.json"], tmp_path / "out")) == 2  # a bar alone says nothing


def test_a_picture_over_a_key_shows_every_figure(tmp_path: Path) -> None:
    from hiddenlab.report.plots import draw_table

    figures = {"rouge_l, a": "ROUGE-L, a", "rouge_l, b": "ROUGE-L, b"}

    def row(megabytes: float, **values: float) -> dict[str, Any]:
        found = {
            f"rouge_l, {name}": {"value": v, "low": v - 0.1, "high": v + 0.1, "n": 5}
            for name, v in values.items()
        }
        keys = {"c": 1, "m": 2, "MB": megabytes}
        return {
            "keys": keys,
            "figures": found,
            "paper": {},
            "status": "measured",
            "reason": "no b" * ("b" not in values),
            "commit": None,
            "cell": None,
        }

    plans = table(
        "p",
        figures=figures,
        over="MB",
        rows=[row(3.5, a=0.5, b=0.9), row(3.5, a=0.4, b=0.8), row(40.0, a=0.2)],
    )
    path = draw_table(plans, tmp_path)
    assert path == tmp_path / "p.png" and path.stat().st_size > 5000
    (tmp_path / "p.json").write_text(json.dumps(plans))
    text = write_report([tmp_path / "p.json"], tmp_path / "out")[0].read_text()
    assert "| 1 | 2 | 40 | 0.200 [0.100, 0.300] | – |" in text
    assert "- in part not run: 1, 2, 40: no b" in text


@pytest.mark.parametrize("text", ["", "[]", '{"format": 1}', '{"rows": []}'])
def test_what_is_no_table(tmp_path: Path, text: str) -> None:
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(InputError, match=r"is no table of 'hiddenlab eval'"):
        write_report([tmp_path / "t.json"], tmp_path / "out")
    with pytest.raises(InputError, match="cannot read"):
        write_report([tmp_path / "none.json"], tmp_path / "out")


def test_figures() -> None:
    assert figure("exact", 1.0) == "100 %"
    assert figure("exact", 0.99999) == "99.9 %"
    assert figure("exact", 0) == "0.0 %"
    assert figure("exact", None) == "–"
    assert figure("prompts", 100) == "100"
    assert figure("slowdown_vs_prefill", 3.456) == "3.46 ×"
    assert figure("evaluated_tokens_per_token", 27653.3) == "27,653"
    assert figure("epsilon", 0.000123456) == "0.0001235"


def test_visible_text_holds_no_controls() -> None:
    shown = visible("".join(map(chr, range(0xA0))) + "\u2028\u202e\u2066é漢")
    assert all(char.isprintable() for char in shown)
    assert shown.endswith("é漢")
    assert visible("a\tb\n") == "a⇥b↵"
    assert json.loads(json.dumps(shown)) == shown


def test_curves_are_panels_by_the_first_key(tmp_path: Path) -> None:
    from hiddenlab.report.plots import _curves, draw_table

    def row(provider: str, score: str, **values: float) -> dict[str, Any]:
        figures = {name: {"value": v, "low": v, "high": v, "n": 5} for name, v in values.items()}
        return {
            "keys": {"provider": provider, "score": score},
            "figures": figures,
            "paper": {},
            "status": "measured",
        }

    rows = [row("a", "x", auc_1=0.5, auc_30=0.9), row("a", "y", auc_1=0.5), row("b", "x", auc_30=0.7)]
    made = table("c", figures={"auc_1": "1", "auc_30": "30"}, rows=rows, curves="tokens")
    assert (path := draw_table(made, tmp_path)) is not None and path.stat().st_size > 1000
    first, second = _curves(rows, ["auc_1", "auc_30"], made).axes
    assert [list(line.get_xdata()) for line in first.lines] == [[1.0, 30.0], [1.0]]
    assert [line.get_label() for line in first.lines] == ["x", "y"]
    assert list(second.lines[0].get_ydata()) == [0.7]
    assert (first.get_xscale(), first.get_yscale()) == ("log", "linear")
    # Other scales; what has no number stands in the table alone, and a line of a later panel is in the legend.
    rows = [row("a", "x", at_0=0.5, **{"at_-3": 0.0}, total=9.0), row("b", "z", at_0=0.1, total=9.0)]
    names = ["total", "at_-3", "at_0"]
    made = table("h", figures=dict.fromkeys(names, ""), rows=rows, curves="score", scales=["linear", "log"])
    assert draw_table(made, tmp_path) is not None
    first, second = _curves(rows, names, made).axes
    assert (first.get_xscale(), second.get_yscale()) == ("linear", "log")
    assert list(first.lines[0].get_xdata()) == [-3.0, 0.0]
    assert [line.get_label() for line in first.lines] == ["x", "z"]


def test_a_picture_over_another_figure(tmp_path: Path) -> None:
    from matplotlib.figure import Figure

    from hiddenlab.report.plots import draw_table
    from hiddenlab.report.points import NAME_WIDTH, over_figure

    def row(sigma: float, **values: float) -> dict[str, Any]:
        figures = {name: {"value": v, "low": v - 0.1, "high": v + 0.1, "n": 5} for name, v in values.items()}
        keys = {"defense": "gaussian", "sigma": sigma}
        return {"keys": keys, "figures": figures, "paper": {}, "status": "measured"}

    rows = [row(0.1, read=0.9, bag=0.95, kept=0.4), row(0.5, read=0.2, kept=0.1), row(1.0, kept=0.0)]
    labels = {"read": "recovered", "bag": "in any order", "kept": "agreement"}
    made = table("n", figures=labels, rows=rows, against="kept")
    assert (path := draw_table(made, tmp_path)) is not None and path.stat().st_size > 1000
    axis = Figure().subplots()
    over_figure(axis, rows[:2], "kept", labels, ["read", "bag"])
    assert [list(one.lines[0].get_xdata()) for one in axis.containers] == [[0.4, 0.1], [0.4]]
    assert {one.get_text() for one in axis.texts} == {"sigma 0.1", "sigma 0.5"}
    assert axis.get_xlabel() == "agreement"
    together = Figure().subplots()
    same = [row(sigma, read=0.9, kept=0.4) for sigma in (0.1, 0.2, 0.3)] + [row(0.5, read=0.2, kept=0.1)]
    over_figure(together, same, "kept", labels, ["read"])
    begins = sorted(one.get_position()[0] for one in together.texts if one.get_text() != "sigma 0.5")
    assert begins == pytest.approx(
        [3, 3 + NAME_WIDTH, 3 + 2 * NAME_WIDTH]
    )  # names of one point lie side by side
    # Without what it is to be drawn over, it is drawn as any other table.
    assert (
        draw_table(
            table("o", figures=labels, rows=[row(0.1, read=0.9), row(0.5, read=0.2)], against="kept"),
            tmp_path,
        )
        is not None
    )


def test_a_row_of_a_picture_has_its_verdict_beside_its_name() -> None:
    from matplotlib.figure import Figure

    from hiddenlab.report.points import points_by_row

    figures = {"leak": {"value": 0.1, "low": 0.0, "high": 0.2, "n": 5}}
    rows = [
        {"keys": {"defense": "a", "layer": 1}, "figures": figures, "words": {"verdict": "INCONCLUSIVE"}},
        {"keys": {"defense": "a", "layer": 6}, "figures": figures},
    ]
    axis = Figure().subplots()
    points_by_row(axis, rows, ["leak"], {"leak": "what leaks"})
    assert [label.get_text() for label in axis.get_yticklabels()] == ["layer 1 INCONCLUSIVE", "layer 6"]


def test_lines_over_layers_stand_beside_the_papers(tmp_path: Path) -> None:
    from matplotlib.figure import Figure

    from hiddenlab.report.plots import _over_layers

    def row(channel: str, attack: str, layer: int, value: float, paper: float | None) -> dict[str, Any]:
        keys = {"method": "nf4", "channel": channel, "layer": layer, "attack": attack}
        figures = {"read": {"value": value, "low": value, "high": value, "n": 5}}
        return {"keys": keys, "figures": figures, "paper": {"ROUGE-L, Gemma": paper}, "status": "measured"}

    rows = [
        row(channel, attack, layer, 0.9, paper)
        for channel, paper in (("identity", 0.5), ("seq-perm", 0.1), ("2d-perm", None))
        for attack in ("old", "new")
        for layer in (1, 6)
    ]
    axis = Figure().subplots()
    _over_layers(axis, rows, "read", [1, 6], "ROUGE-L")
    names = [
        f"{channel}, {attack}" for channel in ("identity", "seq-perm", "2d-perm") for attack in ("old", "new")
    ]
    _, told = axis.get_legend_handles_labels()
    assert told == [*names, "the paper's, hollow"]
    assert axis.get_xlabel() == "layer (nf4)"  # what all rows share
    # One mark for two attacks on the same states, in the first one's colour.
    marks = axis.collections[-1]
    assert marks.get_offsets().tolist() == [[1, 0.5], [6, 0.5], [1, 0.1], [6, 0.1]]
    colours = marks.get_edgecolors().tolist()
    assert colours[0] == colours[1] != colours[2] == colours[3]


# ---- stored tables


def read_command(words: list[str]) -> str:
    """Read a command of ``hiddenlab eval`` as the command line does, and return which experiment it is of."""
    assert words[:2] == ["hiddenlab", "eval"]
    group: Any = typer.main.get_command(app)
    with group.commands["eval"].make_context("eval", words[2:]) as context:
        given = context.params
    experiment = str(given["name"])
    numbers = {k: given[k] for k in ("alpha", "c", "m") if given[k] is not None}
    fit(
        experiment,
        registry.resolve("experiments", experiment),
        parse_settings(given["others"] or []) | numbers,
    )
    if given["layers"] is not None:
        registry.parse_numbers("--layers", given["layers"])
    return experiment


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)
def test_a_stored_tables_command_can_be_run(path: Path) -> None:
    """Several are joined by ``&&``."""
    table = json.loads(path.read_text(encoding="utf-8"))
    for command in table["command"].split(" && "):
        assert table["experiment"].startswith(read_command(shlex.split(command)))


@pytest.mark.parametrize(
    "command",
    [
        "hiddenlab eval noise --layers L",
        "hiddenlab eval noise --limit 4 (layer 1: 5)",
        "hiddenlab eval noise --set nothing=1",
        "hiddenlab eval noise --alpha 4",
        "python noise.py",
    ],
)
def test_what_is_no_command_is_noticed(command: str) -> None:
    with pytest.raises(Exception):  # noqa: B017 - of the parser, of the settings, or an assertion
        read_command(shlex.split(command))


def test_every_stored_table_stands_in_the_stored_report() -> None:
    _, studies, _ = load([STORED[0].parent])
    assert len(studies) >= len(STORED) - sum(path.stem.startswith("leaderboard") for path in STORED) + 1
    for study in studies:
        page, title = (
            ("leaderboard.md", "All figures") if is_board(study.table["experiment"]) else ("report.md", None)
        )
        assert table_page(study.table, title) in (STORED[0].parents[1] / page).read_text(encoding="utf-8"), (
            page
        )
