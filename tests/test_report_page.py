"""The report's pages as a browser and a screen reader meet them: width, contrast, keyboard, size, requests."""

import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from hiddenlab.registry import BUILTINS
from hiddenlab.report.html import MOST_BYTES, page, pages
from hiddenlab.report.markdown import grid_of, load, load_runs, write_report
from hiddenlab.report.pictures import COLOURS, new_figure, save
from hiddenlab.report.plots import draw, table_picture
from hiddenlab.report.questions import OTHER, question_of
from tests import browser
from tests.test_report import BAD, GOOD, STORED, make, sample, table

WIDTHS = (360, 800, 1440)
SCHEMES = ("light", "dark")
LONG = "unbroken" * 40
# The smallest contrast of any text with what is behind it, and that text.
CONTRAST = """(() => {
  const parts = c => { const n = c.match(/[\\d.]+/g).map(Number); return n.length < 4 ? [...n, 1] : n; };
  const light = c => { const [r, g, b] = c.map(v => { v /= 255;
    return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  let least = [99, ""];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const text = walk.currentNode.data.trim(), own = walk.currentNode.parentElement;
    if (!text || !own.getClientRects().length) continue;
    let behind = own, back = [255, 255, 255, 0];
    while (behind && (back = parts(getComputedStyle(behind).backgroundColor))[3] === 0) behind = behind.parentElement;
    if (!behind) back = [255, 255, 255, 1];
    const a = light(parts(getComputedStyle(own).color).slice(0, 3)), b = light(back.slice(0, 3));
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < least[0]) least = [ratio, text.slice(0, 40)];
  }
  return least;
})()"""
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browser.Browser]:
    program = browser.found()
    if program is None:
        pytest.skip(f"no browser: none of {', '.join(browser.NAMES)} is installed")
    try:
        with_page = browser.Browser(program, tmp_path_factory.mktemp("profile"))
    except (OSError, AssertionError) as error:
        pytest.skip(f"{program} does not start: {error}")
    yield with_page
    with_page.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with everything that may be on it: runs, prompts, gaps, a table with long words, pictures."""
    folder = tmp_path_factory.mktemp("report")
    gap = [("Hello", "exact"), ("⟨3⟩", "missing"), (LONG, "wrong"), (" a", "unverified")]
    runs = [
        make(folder / f"run{layer}", [sample(0, GOOD), sample(1, BAD), sample(2, gap)], layer=layer)
        for layer in (1, 6)
    ]
    rows = table()["rows"]
    rows[0]["keys"]["channel"] = f"{LONG} <img src=http://example.org/x>"
    columns = {f"figure {n}": f"figure number {n}" for n in range(20)}
    for row in rows[:2]:
        row["figures"] |= dict.fromkeys(columns, row["figures"]["exact"])
    wide = table(
        "wide", rows=rows, title=f"A title with {LONG}", figures={"exact": "exact prompts", **columns}
    )
    (folder / "wide.json").write_text(json.dumps(wide | {"notes": [LONG], "command": LONG}))
    write_report([*runs, folder / "wide.json"], folder / "out")
    return folder / "out" / "report.html"


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_a_page_fits_any_screen_and_asks_for_nothing(
    chromium: browser.Browser, report: Path, width: int, scheme: str
) -> None:
    chromium.open(report, width, scheme)
    chromium.run("document.querySelectorAll('details').forEach(one => one.open = true)")
    assert chromium.run(OVERFLOW) == 0
    assert chromium.messages == []
    assert [url for url in chromium.requests if not url.startswith("data:")] == [report.as_uri()]
    assert chromium.run("[...document.images].every(one => one.complete && one.naturalWidth > 0)")
    ratio, text = chromium.run(CONTRAST)
    assert ratio >= 4.5, text


def test_faults_of_a_page_are_noticed(chromium: browser.Browser, tmp_path: Path) -> None:
    """What the test above looks for: a wide line, a message, a request, a broken picture, a pale text."""
    bad = tmp_path / "bad.html"
    bad.write_text(
        '<!doctype html><p style="width:2000px;color:#999">pale</p><img src="missing.png">'
        "<script>console.error('x')</script>"
    )
    chromium.open(bad, 360)
    assert chromium.run(OVERFLOW) > 1000
    assert chromium.messages
    assert (tmp_path / "missing.png").as_uri() in chromium.requests
    assert not chromium.run("[...document.images].every(one => one.complete && one.naturalWidth > 0)")
    assert chromium.run(CONTRAST)[0] < 4.5


def test_a_page_is_read_by_keyboard(chromium: browser.Browser, report: Path) -> None:
    """The first stop is the skip link; tables scroll by keys, prompts unfold; what has the focus shows it."""
    chromium.open(report, 360)
    stops = []
    for _ in range(12):
        chromium.press("Tab", 9)
        stops.append(
            chromium.run(
                "(() => { const e = document.activeElement, s = getComputedStyle(e);"
                "return [e.tagName, e.className, s.outlineStyle, parseFloat(s.outlineWidth)]; })()"
            )
        )
    assert stops[0][:2] == ["A", "skip"]
    assert {"SUMMARY", "DIV"} <= {tag for tag, *_ in stops}
    assert all(style == "solid" and wide >= 2 for _, _, style, wide in stops)
    chromium.open(report, 360)
    chromium.press("Tab", 9)
    assert chromium.run("document.activeElement.getBoundingClientRect().left") >= 0
    chromium.run("document.activeElement.click()")
    assert chromium.run("document.activeElement.id") == "main"


def test_a_recorded_policy_holds_where_escaping_would_fail(chromium: browser.Browser, report: Path) -> None:
    """Were a script ever let into a page, it would not run, and a picture from elsewhere would not be fetched."""
    worse = report.with_name("worse.html")
    text = report.read_text(encoding="utf-8")
    evil = "<script>document.title = 'broken'</script><img src='http://127.0.0.1:9/x.png'>"
    worse.write_text(text.replace("</main>", f"{evil}</main>"), encoding="utf-8")
    chromium.open(worse, 800)
    assert chromium.run("document.title") == "Recovery of prompts from hidden states"
    assert any("Content Security Policy" in message for message in chromium.messages)


# ---- without a browser


class Outline(HTMLParser):
    """Headings, and tables with their captions, heads and row heads."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def test_structure_for_screen_readers(report: Path) -> None:
    text = report.read_text(encoding="utf-8")
    outline = Outline()
    outline.feed(text)
    levels = [int(tag[1]) for tag, _ in outline.tags if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    tags = [tag for tag, _ in outline.tags]
    assert tags.count("table") == tags.count("caption") == tags.count("thead") == 2
    assert all(attrs.get("scope") in ("row", "col") for tag, attrs in outline.tags if tag == "th")
    assert ("html", {"lang": "en"}) in outline.tags
    assert all(attrs["alt"] for tag, attrs in outline.tags if tag == "img") and "img" in tags
    ids = [attrs["id"] for _, attrs in outline.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    # A mark is said in words; its sign and its line need no colour.
    assert f'<span class="sr"> (wrong: </span>{LONG}<span class="sr">) </span>' in text
    assert '<span class="sr"> (3 tokens not recovered) </span>' in text
    assert "underline wavy" in text and "underline dotted" in text
    for told in (
        "plain: the token is verified",
        "dotted line: not verified, but right",
        "wavy line: the token is",
    ):
        assert told in text


def test_the_first_sentences_answer(tmp_path: Path) -> None:
    """What leaked, how much, and from behind which defense; few runs with figures, many as a list."""
    samples = [sample(n, GOOD if n < 17 else BAD) for n in range(20)]
    one = make(tmp_path / "one", samples, layer=11, defense=["seq-perm"], attack="vocab-match")
    runs = load_runs([one])
    text = page("x", grid_of(runs), runs, [], [])
    answer = "<strong>17 of 20 prompts came back exactly</strong> from states of layer 11 behind seq-perm."
    assert answer in text and text.index(answer) < text.index("<h2>All figures</h2>")
    assert "<dt>attack</dt><dd>vocab-match</dd>" in text
    assert "<dt>tokens right, mean over prompts</dt><dd>88.8 %</dd>" in text
    none = make(tmp_path / "none", [sample(0, BAD)], stream="k", defense=["gaussian:sigma=1", "seq-perm"])
    runs = load_runs([none] * 5)
    text = page("x", grid_of(runs), runs, [], [])
    told = "<strong>None of 1 prompt came back exactly</strong> from states (k) of layer 1 behind"
    assert text.count(f"<li>{told} gaussian:sigma=1, then seq-perm. Tokens right: 25.0 %.</li>") == 5
    assert '<div class="card">' not in text and "Attack:" not in text
    more = load_runs([one, *[none] * 4])
    text = page("x", grid_of(more), more, [], [])
    first = text.partition("<h2>All figures</h2>")[0]
    assert "behind seq-perm. Tokens right: 88.8 %. Attack: vocab-match.</li>" in first
    assert '<p class="text">Hello world</p>' in first


def test_only_what_was_measured_is_shown(tmp_path: Path) -> None:
    """A column for the attack where there are several; none for what no run measured."""
    unmeasured = {"verified": 0.0, "epsilon": None, "seconds": None, "prefill_seconds": None}
    runs = load_runs([
        make(tmp_path / "a", [sample(0, GOOD, **unmeasured)], attack="nearest"),
        make(tmp_path / "b", [sample(0, BAD, **unmeasured)], attack="inverter"),
    ])  # fmt: skip
    cells = grid_of(runs)
    assert cells.header[:3] == ["layer", "defense", "attack"]
    assert [row[2] for row in cells.rows] == ["inverter", "nearest"]
    assert "exact prompts" in cells.header
    assert not {"verified tokens", "attack over prefill", "attack, seconds", "peak memory, MB"} & {
        *cells.header
    }
    text = page("x", cells, runs, [], [])
    assert "This attack does not verify tokens." in text and "<dt>time of the attack" not in text


def test_a_page_of_a_hundred_prompts_is_small(tmp_path: Path) -> None:
    """The worst case of marks: each token differs in state from the one before."""
    states = ("exact", "wrong", "unverified")
    spans = [(f" <word{n}>", states[n % 3]) for n in range(50)]
    run = make(tmp_path / "r", [sample(n, spans) for n in range(100)])
    written = write_report([run], tmp_path / "out")
    text = next(path for path in written if path.name == "report.html").read_bytes()
    assert text.count(b'<div class="prompt">') == 100 and b"<summary>88 more prompts</summary>" in text
    assert len(text) < 1_000_000


def test_every_experiment_belongs_to_a_question() -> None:
    assert [name for name in BUILTINS["experiments"] if question_of(name) is OTHER] == []
    assert [path.stem for path in STORED if question_of(path.stem) is OTHER] == []
    assert question_of("table-2-rows-deep").name == "states" and question_of("table-22").name == "noise"
    assert question_of("a-plugins") is OTHER


@pytest.mark.slow
def test_a_long_report_is_an_index_and_pages_by_question(tmp_path: Path) -> None:
    runs, studies, _ = load([*STORED, make(tmp_path / "r", [sample(0, GOOD)])])
    made = pages("report.html", "All", grid_of(runs), runs, studies, [])
    index = made.pop("report.html")
    assert set(re.findall(r'href="(report-[\w-]+\.html)', index)) == set(made)
    assert "came back exactly</strong>" in index
    for study in studies:
        name = study.table["experiment"]
        holders = [file for file, text in made.items() if f'<h2 id="{name}">' in text]
        assert len(holders) == 1 and f'href="{holders[0]}#{name}"' in index
    assert all('<a href="report.html">All questions</a>' in text for text in made.values())
    assert max(map(len, made.values())) <= 1_500_000
    assert len(re.findall(r'<h2><a href="report-[a-z]+\.html">', index)) >= 8


def test_a_question_that_is_too_long_for_a_page_gets_several(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert MOST_BYTES < 1_500_000
    monkeypatch.setattr("hiddenlab.report.html.MOST_BYTES", 30_000)
    _, studies, _ = load([path for path in STORED if question_of(path.stem).name == "noise"])
    made = pages("report.html", "All", None, [], studies, [])
    assert "report-noise-2.html" in made and "(part 2 of" in made["report-noise-2.html"]
    assert sum(text.count("<h2 id=") for text in made.values()) == len(studies)


# ---- pictures


def touched(path: Path) -> bool:
    """Return whether anything is drawn at the very edge of a picture, as a label is that is cut there."""
    from PIL import Image

    with Image.open(path) as image:
        shown = image.convert("L")
    width, height = shown.size
    sides = [
        (0, 0, width, 1),
        (0, height - 1, width, height),
        (0, 0, 1, height),
        (width - 1, 0, width, height),
    ]
    return any(shown.crop(side).getextrema() != (255, 255) for side in sides)


@pytest.mark.parametrize(
    "name", ["detection-no-cache", "plans", "noise-utility", "gap-plans", "noise-001", "leaderboard-plain"]
)
def test_no_label_of_a_picture_is_cut(tmp_path: Path, name: str) -> None:
    stored = json.loads(next(path for path in STORED if path.stem == name).read_text(encoding="utf-8"))
    made = table_picture(stored, tmp_path)
    assert made is not None and not touched(made.path)
    runs = [
        make(
            tmp_path / f"{n}",
            [sample(0, GOOD)],
            attack=f"an-attack-of-a-long-name-{n}",
            defense=["seq-perm"] * 5,
        )
        for n in range(3)
    ]
    for drawn in draw(load_runs(runs), tmp_path):
        assert not touched(drawn.path)


def test_a_label_that_is_cut_is_noticed(tmp_path: Path) -> None:
    drawing = new_figure(2.0, 2.0)
    drawing.text(0.9, 0.5, "beyond the edge")
    save(drawing, tmp_path / "cut.png")
    assert touched(tmp_path / "cut.png")


@pytest.mark.parametrize("name", ["detection-no-cache", "plans", "gap-plans"])
def test_no_label_is_cut_in_the_fonts_of_a_browser(
    chromium: browser.Browser, tmp_path: Path, name: str
) -> None:
    stored = json.loads(next(path for path in STORED if path.stem == name).read_text(encoding="utf-8"))
    made = table_picture(stored, tmp_path)
    assert made is not None
    (tmp_path / "x.svg").write_text(made.svg, encoding="utf-8")
    chromium.open(tmp_path / "x.svg", 1440)
    inside = (
        "(() => { const out = document.documentElement.getBoundingClientRect();"
        "return [...document.querySelectorAll('text')].map(one => [one.textContent, one.getBoundingClientRect()])"
        ".filter(([_, b]) => b.left < out.left - 1 || b.right > out.right + 1 || b.bottom > out.bottom + 1 ||"
        " b.top < out.top - 1).map(([text, _]) => text); })()"
    )
    assert chromium.run("document.querySelectorAll('text').length") > 5
    assert chromium.run(inside) == []


def test_a_picture_is_plain_svg_whatever_a_table_says(tmp_path: Path) -> None:
    """Names are text: no formula, no tag, no control character; colours of ink follow the reader's scheme."""
    rows = table()["rows"][:2]
    rows[0]["keys"] = {"channel": "$\\frac{$ <script>\x1b &"}
    rows[1]["keys"] = {"channel": "-->"}
    made = table_picture(table(rows=rows, title="$x^{$ \u202e"), tmp_path)
    assert made is not None
    root = ElementTree.fromstring(made.svg)
    texts = ["".join(one.itertext()) for one in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "channel $\\frac{$ <script>␛ &" in texts and "75.0 %" in texts
    assert "<script" not in made.svg and "prefers-color-scheme:dark" in made.svg and "#000000" not in made.svg
    assert made.path.read_bytes().startswith(b"\x89PNG")


def test_a_picture_that_would_show_nothing_is_not_drawn(tmp_path: Path) -> None:
    def with_value(row: dict[str, Any], value: float, name: str = "exact") -> dict[str, Any]:
        figures = {name: {"value": value, "low": 0.0, "high": 0.5, "n": 9}}
        return {**row, "figures": {**row["figures"], **figures}}

    rows = table()["rows"][:2]
    zeros = [with_value(row, 0.0) for row in rows]
    assert table_picture(table(rows=zeros), tmp_path) is None
    assert table_picture(table(rows=rows[:1]), tmp_path) is None
    # The next figure tells more than zeros do.
    both = [with_value(row, 0.2, "bleu") for row in zeros]
    made = table_picture(table(rows=both, figures={"exact": "exact prompts", "bleu": "BLEU"}), tmp_path)
    assert made is not None and made.alt == "A & B (BLEU by layer)"


def test_colours_of_a_small_picture_are_kept(tmp_path: Path) -> None:
    from PIL import Image

    drawing = new_figure(4.0, 2.0)
    drawing.subplots().bar(range(len(COLOURS)), 1, color=COLOURS)
    save(drawing, tmp_path / "x.png")
    with Image.open(tmp_path / "x.png") as image:
        assert image.mode == "P"
        shown = {colour for _, colour in image.convert("RGB").getcolors()}
    assert {(255, 255, 255), *(tuple(bytes.fromhex(colour[1:])) for colour in COLOURS)} <= shown


@pytest.mark.slow
def test_the_report_of_all_stored_results(chromium: browser.Browser, tmp_path: Path) -> None:
    """Built as ``make report`` does: every page is below 1.5 MB and keeps what the short tests ask of one page."""
    results = STORED[0].parents[1]
    written = write_report([results / "tables", *sorted((results / "examples").iterdir())], tmp_path)
    made = [path for path in written if path.suffix == ".html"]
    assert len(made) > 8 and max(path.stat().st_size for path in made) < 1_500_000
    assert not any(touched(path) for path in written if path.suffix == ".png")
    for path in made:
        for width in WIDTHS:
            chromium.open(path, width, SCHEMES[width == 800])
            chromium.run("document.querySelectorAll('details').forEach(one => one.open = true)")
            assert chromium.run(OVERFLOW) == 0 and chromium.messages == []
            assert [url for url in chromium.requests if not url.startswith("data:")] == [path.as_uri()]
            ratio, text = chromium.run(CONTRAST)
            assert ratio >= 4.5, text
