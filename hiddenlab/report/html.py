"""Write the report as HTML pages without scripts or requests: answers first, then prompts, tables and pictures."""

import base64
from collections.abc import Iterator, Sequence
from html import escape

from hiddenlab.report import assessed
from hiddenlab.report.answers import answer, main_figures, range_of, remarks
from hiddenlab.report.data import Picture, Run, Study
from hiddenlab.report.prompts import legend, marked, prompts_html
from hiddenlab.report.questions import ASSESSED, OTHER, QUESTIONS, RUNS, Question, question_of
from hiddenlab.report.style import STYLE
from hiddenlab.report.tables import NOTHING, Grid, brackets, gaps, grid, measured
from hiddenlab.summary import NOT_APPLICABLE, Sample, figure
from hiddenlab.text import html, printable

SHOWN = 12  # prompts shown of each cell of an experiment; its run directory holds all
MOST_CARDS = 4  # runs that get a card with a prompt; more are a list of sentences
LONG = 36  # letters of a row's name; longer ones are broken into lines
MOST_BYTES = 1_200_000  # of a page; a longer report is split
MOST_TABLES = 12  # of a page with everything on it
# No script runs and nothing is loaded, whatever a record holds.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
LEAD = (
    "Hidden states are the numbers that a language model computes from a prompt. An attack tries to read the prompt "
    "from them. Each sentence below tells what one attack read."
)
DASH = "A dash means: not measured."

COLUMNS = (
    "<details><summary>What the columns mean</summary><p>Shares and scores are means over the prompts to which the "
    "attack applies.</p><ul><li>Exact prompts came back token for token.</li><li>Tokens in any order came back "
    "somewhere in the text.</li><li>Verified tokens: the state that the model computes for them matches a released "
    "state within the threshold epsilon.</li><li>ROUGE-L and BLEU compare texts; 1 means the same text.</li>"
    "<li>Evaluated tokens per token count every position that the attack ran through the model, for one token of "
    "the prompt.</li><li>Attack over prefill is the time of the attack, divided by that of one plain pass of the "
    "model over the same prompts.</li></ul></details>"
)

Section = tuple[Question, str, str]  # a question, the line of the index, and the section itself


def pages(
    name: str, title: str, runs: Grid | None, listed: Sequence[Run], studies: Sequence[Study],
    images: Sequence[Picture], judged: Sequence[Run] = (),
) -> dict[str, str]:  # fmt: skip
    """Return the pages of a report by file name: one, or an index and pages by question where one gets too long.

    Args:
        name: of the page, or of the index. The others: see ``page``.
    """
    whole = page(title, runs, listed, studies, images, judged)
    if len(studies) + len(judged) <= MOST_TABLES and len(whole.encode()) <= MOST_BYTES:
        return {name: whole}
    own = _own_pictures(studies, judged)
    sections = [*_assessed_sections(judged, images), *_study_sections(studies, images)]
    if runs is not None:
        free = [image for image in images if image.name not in own]
        content = f"{_cards(listed)}\n{_runs(runs, listed, free)}\n{_made(listed)}"
        sections.insert(0, (RUNS, _sentences(listed), content))
    stem = name.removesuffix(".html")
    found, entries = {}, []
    for question in (ASSESSED, RUNS, *QUESTIONS, OTHER):
        parts = list(_parts([s for s in sections if s[0] is question]))
        for number, part in enumerate(parts):
            file = f"{stem}-{question.name}{f'-{number + 1}' if number else ''}.html"
            head = f"{question.text} (part {number + 1} of {len(parts)})" if len(parts) > 1 else question.text
            back = f'<nav aria-label="Pages"><a href="{name}">All questions</a></nav>'
            listing = _contents(part)
            found[file] = _page(head, f"{back}\n{listing}", [content for _, _, content in part])
            entries.append(_entry(file, head, part))
    lead = (
        "<p>Each question below has a page of its own. Its tables are listed under it, each with one figure: the "
        "lowest and the highest value over the rows.</p>"
    )
    return {name: _page(title, lead, entries), **found}


def page(
    title: str, runs: Grid | None, listed: Sequence[Run], studies: Sequence[Study], images: Sequence[Picture],
    judged: Sequence[Run] = (),
) -> str:  # fmt: skip
    """Return everything on one page.

    Args:
        runs: the table of the runs, where there are any. listed: these runs, with their prompts. studies: tables of
            experiments. images: all pictures; those of an experiment or assessment have its name. judged: assessments.
    """
    own = _own_pictures(studies, judged)
    sections = [*_assessed_sections(judged, images), *_study_sections(studies, images)]
    body = []
    if runs is not None:
        body += ["<h2>What came back</h2>", _cards(listed)]
    if len(sections) > 1:
        body.append(_contents(sections))
    if runs is not None:
        body.append(_runs(runs, listed, [image for image in images if image.name not in own]))
    body += [content for _, _, content in sections]
    body.append(_made([*judged, *listed, *(run for study in studies for run in study.runs)]))
    return _page(title, f"<p>{LEAD}</p>" if listed else "", body)


def _page(title: str, lead: str, body: Sequence[str]) -> str:
    head = (
        f'<meta charset="utf-8">\n<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        f'<meta name="referrer" content="no-referrer">\n'
        f"<title>{html(title)}</title>\n<style>\n{STYLE}</style>"
    )
    content = "\n".join(part for part in body if part)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n{head}\n</head>\n<body>\n'
        f'<a class="skip" href="#main">Skip to the content</a>\n<header>\n<h1>{html(title)}</h1>\n{lead}\n</header>\n'
        f'<main id="main" tabindex="-1">\n{content}\n</main>\n</body>\n</html>\n'
    )


def _parts(sections: Sequence[Section]) -> Iterator[list[Section]]:
    """Divide the sections of a question into pages that are not too long."""
    part: list[Section] = []
    size = 0
    for section in sections:
        own = len(section[2].encode())
        if part and size + own > MOST_BYTES:
            yield part
            part, size = [], 0
        part.append(section)
        size += own
    if part:
        yield part


def _contents(sections: Sequence[Section]) -> str:
    """Return links to the sections of a page."""
    named = [line for question, line, _ in sections if question is not RUNS]
    links = "".join(f"<li>{line}</li>" for line in named)
    return f'<nav aria-label="Tables of this page"><ul>{links}</ul></nav>' if len(named) > 1 else ""


def _entry(file: str, head: str, sections: Sequence[Section]) -> str:
    """Return the part of the index on one page."""
    here, there = 'href="#', f'href="{file}#'
    lines = [
        line if question is RUNS else f"<li>{line.replace(here, there, 1)}</li>"
        for question, line, _ in sections
    ]
    listed = "".join(lines)
    listed = listed if listed.startswith("<ul>") else f"<ul>{listed}</ul>"
    return f'<h2><a href="{file}">{html(head)}</a></h2>\n{listed}'


def _own_pictures(studies: Sequence[Study], judged: Sequence[Run]) -> set[str]:
    """Return the names of the pictures that belong to a section."""
    return {study.table["experiment"] for study in studies} | set(map(assessed.name_of, judged))


# ---- assessments


def _assessed_sections(judged: Sequence[Run], images: Sequence[Picture]) -> list[Section]:
    """Return the section of each assessment, with its line of the index."""
    sections = []
    for run in judged:
        title, said = assessed.heading(run)
        name = assessed.name_of(run)
        picture = "".join(_image(image) for image in images if image.name == name)
        content = [f'<h2 id="{html(name)}">{html(title)}</h2>', *assessed.lines(run, picture, table_html)]
        line = f'<a href="#{html(name)}">{html(title)}</a><br>{html(said)}'
        sections.append((ASSESSED, line, "\n".join(content)))
    return sections


# ---- runs


def _sentence(run: Run) -> str:
    """Return the main sentence on a run, with what came back in bold."""
    what, source = answer(run)
    return f"<strong>{html(what)}</strong> {html(source)}"


def _sentences(runs: Sequence[Run]) -> str:
    """Return the sentences on many runs as a list, each with its share of tokens, and its attack where they differ."""
    several = len({str(run.record.spec.get("attack")) for run in runs}) > 1
    lines = []
    for run in runs:
        share = run.summary.get("token_accuracy")
        more = f" Tokens right: {figure('token_accuracy', share)}." if share is not None else ""
        more += f" Attack: {run.record.spec.get('attack')}." if several else ""
        lines.append(f"<li>{_sentence(run)}{html(more)}</li>")
    return f"<ul>{''.join(lines)}</ul>"


def _cards(runs: Sequence[Run]) -> str:
    """Return the answer of each run; of few runs also the main figures and the first prompt."""
    first = [shown for run in runs if (shown := _first(run)) is not None]
    if len(runs) <= MOST_CARDS:
        return "\n".join([legend(first), *map(_card, runs)])
    example = [_as_it_came_back(shown) + legend([shown]) for shown in first[:1]]
    return "\n".join([_sentences(runs), *example])


def _first(run: Run) -> Sample | None:
    """Return the first prompt that was attacked."""
    shown = [sample for sample in run.samples if sample["status"] != NOT_APPLICABLE]
    return min(shown, key=lambda sample: sample["index"], default=None)


def _as_it_came_back(first: Sample) -> str:
    return f'<p>The first prompt, as it came back:</p>\n<p class="text">{marked(first)}</p>'


def _card(run: Run) -> str:
    attack = run.record.spec.get("attack")
    named = [("attack", str(attack))] if attack else []
    figures = [*named, ("model", str(run.record.spec["model"])), *main_figures(run)]
    listed = "".join(f"<div><dt>{html(label)}</dt><dd>{html(text)}</dd></div>" for label, text in figures)
    notes = " ".join(remarks(run))
    lines = [f'<p class="said">{_sentence(run)}</p>']
    share = run.summary.get("exact")
    if share is not None:
        width = f"{100 * min(1.0, max(0.0, share)):.1f}"
        lines.append(f'<div class="meter" aria-hidden="true"><span style="width:{width}%"></span></div>')
    lines.append(f'<dl class="main">{listed}</dl>')
    if notes:
        lines.append(f"<p>{html(notes)}</p>")
    first = _first(run)
    if first is not None:
        lines.append(_as_it_came_back(first))
    return f'<div class="card">{"".join(lines)}</div>'


def _runs(table: Grid, listed: Sequence[Run], images: Sequence[Picture]) -> str:
    """Return the table, the pictures and the prompts of runs."""
    body = ["<h2>All figures</h2>", table_html(table, "All figures of the runs")]
    body += [f'<p class="note">{DASH}</p>'] * gaps(table.rows)
    body.append(COLUMNS)
    if len(listed) > 1:  # one run is told by its sentence
        body += map(_image, images)
    body += ["<h2>Recovered prompts</h2>", legend([sample for run in listed for sample in run.samples])]
    for run in listed:
        name = f"{html(run.record.spec['model'])}, layer {run.layer}, {html(run.label)}"
        prompts = prompts_html(run.samples)
        folded = f"<details><summary>{name}</summary>\n{prompts}\n</details>"
        body.append(folded if len(listed) > MOST_CARDS else f"<h3>{name}</h3>\n{prompts}")
    return "\n".join(body)


def _made(runs: Sequence[Run]) -> str:
    """Return how runs were made: commands and versions."""
    if not runs:
        return ""
    told = dict.fromkeys(run.made() for run in runs)
    listed = "\n".join(f"<pre>{escape(printable(text))}</pre>" for text in told)
    return (
        f"<h2>How it was made</h2>\n<details><summary>Commands and versions</summary>\n{listed}\n</details>"
    )


# ---- tables


def _study_sections(studies: Sequence[Study], images: Sequence[Picture]) -> list[Section]:
    """Return the section of each table; where tables have the same title, their names tell them apart."""
    titles = [study.table["title"] for study in studies]
    return [_study_section(study, images, titles.count(study.table["title"]) > 1) for study in studies]


def _study_section(study: Study, images: Sequence[Picture], repeated: bool) -> Section:
    """Return the section of an experiment's table, with its line of the index."""
    table = study.table
    name, title = html(table["experiment"]), html(table["title"])
    if repeated:
        title += f" ({name})"
    line = f'<a href="#{name}">{title}</a><br>{html(range_of(table))}'
    return question_of(table["experiment"]), line, "\n".join(_study_lines(study, name, title, images))


def _study_lines(study: Study, name: str, title: str, images: Sequence[Picture]) -> Iterator[str]:
    table = study.table
    yield f'<h2 id="{name}">{title}</h2>'
    cells = measured(grid(table))
    yield table_html(cells, table["title"])
    dash = f" {DASH}" * gaps(cells.rows)
    yield f'<p class="note">{html(brackets(table))}{dash}</p>'
    yield from (_image(image) for image in images if image.name == table["experiment"])
    notes = [*table["notes"], *cells.reasons]
    if notes:
        yield f"<ul>{''.join(f'<li>{html(note)}</li>' for note in notes)}</ul>"
    yield f"<details><summary>Command</summary><pre>{html(table['command'])}</pre></details>"
    if study.runs:
        yield legend([sample for run in study.runs for sample in run.samples])
    for run in study.runs:
        number = len(run.samples)
        more = f", the first {SHOWN} of {number}" if number > SHOWN else ""
        yield f"<details><summary>Prompts: {html(run.label)}{more}</summary>"
        yield f"{prompts_html(run.samples, SHOWN)}</details>"


def table_html(cells: Grid, caption: str) -> str:
    """Return a table as HTML in a box of its own that scrolls; the paper's figures are grey."""
    if not cells.rows:
        return f"<p>{NOTHING}.</p>"
    first = len(cells.header) - cells.published

    def classes(index: int) -> str:
        return ' class="key"' if index < cells.keys else ' class="paper"' if index >= first else ""

    def cell(index: int, text: str) -> str:
        if index < cells.keys:
            long = " long" if len(text) > LONG else ""
            return f'<th scope="row" class="key{long}">{html(text)}</th>'
        return f"<td{classes(index)}>{html(text)}</td>"

    head = "".join(f'<th scope="col"{classes(i)}>{html(text)}</th>' for i, text in enumerate(cells.header))
    rows = "\n".join(f"<tr>{''.join(cell(i, text) for i, text in enumerate(row))}</tr>" for row in cells.rows)
    named = f'<caption class="sr">{html(caption)}</caption>'
    table = f"<table>\n{named}\n<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table>"
    return _scrolling(table, f"Table: {caption}")


def _image(picture: Picture) -> str:
    data = base64.b64encode(picture.svg.encode()).decode()
    return _scrolling(
        f'<img alt="{html(picture.alt)}" width="{picture.width}" height="{picture.height}" '
        f'src="data:image/svg+xml;base64,{data}">',
        f"Picture: {picture.alt}",
    )


def _scrolling(content: str, label: str) -> str:
    """Return content in a box that scrolls sideways, by keyboard too."""
    return f'<div class="wide" role="region" tabindex="0" aria-label="{html(label)}">{content}</div>'
