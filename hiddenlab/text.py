"""Make text safe to print and to show, whoever wrote it."""

import unicodedata
from collections.abc import Iterable, Sequence
from html import escape
from itertools import groupby
from typing import Literal

# Of a piece of recovered text. Without a truth to compare with, a matched token is "verified", any other "unverified".
Status = Literal["exact", "verified", "wrong", "unverified", "missing"]
# The styles of the report's page, but inline: a notebook has no style sheet of hiddenlab's.
_STYLES: dict[Status, str] = {
    "exact": "color:#14612f",
    "verified": "color:#14612f",
    "wrong": "color:#8f1414;background:#fde0de;text-decoration:underline wavy #c62828",
    "unverified": "color:#6b4a00;background:#fff0c2;text-decoration:underline dotted #a87900",
    "missing": "color:#5a6069;background:#eceef0",
}

# Joiners that Persian, Indian scripts and emoji need; they change neither order nor colour.
_KEPT = "\u200c\u200d"
_UNSAFE = {"Cc", "Cf", "Cs", "Zl", "Zp"}  # controls, formats (reading order), half pairs, line separators


def count_of(number: int | None, noun: str) -> str:
    """Return a number with its noun: ``1 prompt``, ``2 prompts``, ``3 entries``."""
    several = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{'?' if number is None else number} {noun if number == 1 else several}"


def first_line(error: BaseException) -> str:
    """Return the first line of an error of a library, or its kind where it says nothing."""
    lines = str(error).strip().splitlines()
    if isinstance(error, KeyError) and lines:
        return f"unknown or missing: {lines[0][:300]}"
    return lines[0][:300].rstrip(":") if lines else type(error).__name__


def visible(text: str) -> str:
    """Replace control characters with symbols, so that a printed text has no escapes and no reversed reading order."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(map(_shown, text))


def printable(text: str) -> str:
    """Replace control characters as ``visible`` does, but keep line breaks."""
    return text if text.isprintable() else "\n".join(map(visible, text.split("\n")))


def html(text: str) -> str:
    """Escape a text for a page: no tags, no control characters."""
    return escape(visible(text))


def coloured(pieces: Iterable[tuple[str, Status]]) -> str:
    """Colour pieces of text by their status, as HTML for a notebook; control characters are shown as symbols."""
    spans = (
        f'<span style="{_STYLES[status]}">{html("".join(piece for piece, _ in same))}</span>'
        for status, same in groupby(pieces, key=lambda piece: piece[1])
    )
    return f'<span style="font-family:monospace;white-space:pre-wrap">{"".join(spans)}</span>'


def markdown(text: str) -> str:
    """Escape a text for a line or a table's cell of Markdown: no HTML, no columns, no control characters."""
    return escape(visible(text), quote=False).replace("|", "\\|")


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]], left: int) -> list[str]:
    """Return the lines of a table of Markdown; all columns but the first ``left`` are aligned to the right."""
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return [lines[0], f"|{'---|' * left}{'---:|' * (len(head) - left)}", *lines[1:]]


def _shown(char: str) -> str:
    code = ord(char)
    if char == "\n":
        return "↵"
    if char == "\t":
        return "⇥"
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "\u2421"
    return "\ufffd" if unicodedata.category(char) in _UNSAFE and char not in _KEPT else char
