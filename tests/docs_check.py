"""Run the shell commands of README and docs: ``python -m tests.docs_check [PAGE …]``, or ``make docs-check``.

The blocks of a page run one after another in one temporary folder. A block behind ``<!-- not run: REASON -->`` is
left out. A command whose comment begins with "exit 1" or "exit 2" has to end so. A Python block whose first line is
``# NAME.py`` becomes that file. The log, the results and the findings are no manuals, and are not run.

A block of language ``text`` directly behind the commands is their output. ``--refresh`` writes into it what the
commands print now. Without it the two are compared: line by line, with every figure replaced by ``#`` and with runs of
blanks and rules shortened, as times and table widths change from run to run. A wrong figure is therefore not noticed.
An output behind ``<!-- not refreshed: REASON -->`` is neither compared nor written; of one behind
``<!-- without tables -->`` or ``<!-- without tables but the first -->`` a page shows "…" in place of the tables.
"""

import argparse
import contextlib
import difflib
import itertools
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow
import pyarrow.parquet

ROOT = Path(__file__).resolve().parents[1]
LEFT_OUT = {"findings.md", "log", "results"}
SHELL = ("sh", "bash", "shell", "console")
FILES = {
    "prompts.txt": "Where is the key?\nUnder the mat.\n",
    "chats.jsonl": '{"question": "Where is the key?"}\n',
    "chats.csv": "id,question\n1,Where is the key?\n",
    "messages.jsonl": '{"messages": [{"role": "user", "content": "Where is the key?"}]}\n',
}
ENDS_SO = re.compile(r"^(hiddenlab .*?)\s+# exit ([12])\b.*$", re.M)
LONGEST = 900.0  # seconds of one block
FENCE = re.compile(r"^```(\S*)\n(.*?)^```$", re.M | re.S)
REASON = re.compile(r"<!-- not (?:run|refreshed): (.+?) -->\n*\Z")
WITHOUT_TABLES = re.compile(r"<!-- without tables( but the first)? -->\n*\Z")
TABLE = re.compile(r"(?:^ +\S.*\n)?^┏.*\n(?:^[┃┡│├└].*\n)+", re.M)  # with its title, which is centred
NOTHING = re.compile(r"(?:\s|<!--.*?-->)*", re.S)
SCRIPT = re.compile(r"# (\w+\.py)\n")

COLUMNS = 80
STAND_IN = "~/lab"  # what a page shows in place of the temporary folder
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# Lines that a terminal shows as a bar, and removes: those of hiddenlab, and those of tqdm.
# And the line that announces a first probe, as the cache decides whether it comes.
PROGRESS = re.compile(
    r".+: \d+/\d+(?: in [\d.]+ s|, .+ left)|.+: running, \d+ s|.*\d%\|.*\|.*|no probe for .+ yet: .*"
)
FIGURE = re.compile(r"\b(?=[0-9a-f]*\d)[0-9a-f]{6,}\b|\d+(?:[.,]\d+)*(?:e[-+]?\d+)?")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page: its language, its text, and the reason why it is not run or refreshed, if any."""

    page: Path
    line: int
    language: str
    text: str
    reason: str | None
    span: tuple[int, int] = (0, 0)  # of the text, in the page
    follows: bool = False  # nothing but blank lines and comments stands between it and the block before
    tables: int | None = None  # so many tables of an output are shown; None: all

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


@dataclass
class Tally:
    """What was run, and what went wrong."""

    commands: int = 0
    pages: int = 0
    failed: int = 0
    stale: int = 0
    refreshed: int = 0

    def __str__(self) -> str:
        parts = [f"{self.commands} commands executed on {self.pages} pages", f"{self.failed} blocks failed"]
        if self.refreshed:
            parts.append(f"{self.refreshed} outputs written anew")
        return ", ".join([*parts, f"{self.stale} outputs differ"])


def pages() -> list[Path]:
    """README and the manuals."""
    docs = ROOT / "docs"
    found = sorted(path for path in docs.rglob("*.md") if not LEFT_OUT & set(path.relative_to(docs).parts))
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *found]


def blocks(page: Path) -> list[Block]:
    """Every fenced block of a page."""
    text = page.read_text(encoding="utf-8")
    made: list[Block] = []
    last = None
    for match in FENCE.finditer(text):
        before = text[: match.start()]
        reason = REASON.search(before)
        line = before.count("\n") + 1
        follows = last is not None and NOTHING.fullmatch(text, last, match.start()) is not None
        without = WITHOUT_TABLES.search(before)
        tables = without and int(without[1] is not None)
        made.append(
            Block(page, line, match[1], match[2], reason and reason[1], match.span(2), follows, tables)
        )
        last = match.end()
    return made


def commands(page: Path) -> list[Block]:
    """The blocks of a page that a shell would run."""
    return [block for block in blocks(page) if block.language in SHELL]


def with_outputs(page: Path) -> Iterator[tuple[Block, Block | None]]:
    """Yield every block with the block that shows its output, if there is one."""
    found = blocks(page)
    for block, following in itertools.zip_longest(found, found[1:]):
        is_output = following is not None and following.follows and following.language == "text"
        yield block, following if block.language in SHELL and is_output else None


def main(arguments: list[str]) -> int:
    """Run the pages that are named, or all; 1 if a command failed or an output differs."""
    parser = argparse.ArgumentParser(prog="python -m tests.docs_check")
    parser.add_argument("--refresh", action="store_true", help="write the outputs that the pages show anew")
    parser.add_argument("pages", nargs="*", metavar="PAGE", help="a name or a path; default: all")
    options = parser.parse_args(arguments)
    tally = Tally()
    for page in chosen(options.pages) if options.pages else pages():
        check_page(page, options.refresh, tally)
    print(tally)
    return int(tally.failed + tally.stale > 0)


def chosen(names: list[str]) -> list[Path]:
    """Return the pages that are named, each by its file name or its path.

    Raises:
        SystemExit: there is no such page.
    """
    found = []
    for name in names:
        matching = [page for page in pages() if page.name == name or page == Path(name).resolve()]
        if not matching:
            raise SystemExit(f"there is no page {name}")
        found += matching
    return found


def check_page(page: Path, refresh: bool, tally: Tally) -> None:
    """Run the blocks of a page in a folder of their own, and compare or write the outputs that it shows."""
    written: list[tuple[Block, str]] = []
    count = tally.commands
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        prepare(folder)
        for block, output in with_outputs(page):
            script = SCRIPT.match(block.text) if block.language == "python" else None
            if script is not None:
                (folder / script[1]).write_text(block.text, encoding="utf-8")
            if block.language not in SHELL:
                continue
            if block.reason is not None:
                print(f"{block}  not run: {block.reason}", flush=True)
                continue
            started = time.perf_counter()
            problem, printed = run(block, folder)
            print(f"{block}  {problem or 'ok'}, {time.perf_counter() - started:.0f} s", flush=True)
            tally.commands += count_commands(block)
            tally.failed += problem is not None
            if output is None or problem is not None:
                continue
            if output.reason is not None:
                print(f"{output}  not refreshed: {output.reason}", flush=True)
                continue
            text = without_tables(cleaned(printed, folder), output.tables)
            if refresh:
                written.append((output, text))
            else:
                tally.stale += report(output, text)
    tally.pages += tally.commands > count
    tally.refreshed += len(written)
    if written:
        rewrite(page, written)


def count_commands(block: Block) -> int:
    """Return how many lines of a block are commands; a continued line counts once."""
    lines = block.text.replace("\\\n", " ").splitlines()
    return sum(bool(line.strip()) and not line.lstrip().startswith("#") for line in lines)


def prepare(folder: Path) -> None:
    """Make the files that pages read and do not make."""
    for name, text in FILES.items():
        (folder / name).write_text(text, encoding="utf-8")
    table = pyarrow.table({"text": ["Where is the key?"]})
    pyarrow.parquet.write_table(table, folder / "table.parquet")


def script_of(block: Block) -> str:
    """The block as a script that ends with the first command that ends otherwise than the page says."""
    return ENDS_SO.sub(r"if \1; then exit 99; else test $? -eq \2; fi", block.text)


def run(block: Block, folder: Path) -> tuple[str | None, str]:
    """Run one block as a script that ends with the first error; what went wrong, if anything, and what it printed."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    plain = {"COLUMNS": str(COLUMNS), "NO_COLOR": "1", "TERM": "dumb"}
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as printed:
        process = subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", script_of(block)],
            cwd=folder,
            env={**os.environ, "PATH": path, **plain},
            stdin=subprocess.DEVNULL,
            stdout=printed,  # a file: a pipe would stay open as long as a server that the block leaves behind
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(LONGEST)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            # What a block started in the background ends with it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        printed.seek(0)
        text = printed.read()
    if code == 0:
        return None, text
    print(text[-4000:], file=sys.stderr)
    return f"took more than {LONGEST:.0f} s" if code is None else f"failed with exit code {code}", text


# ---- outputs


def cleaned(printed: str, folder: Path) -> str:
    """Return what a page shows of an output: no colours, progress or blank ends, and a stand-in for the folder."""
    text = ESCAPE.sub("", printed).replace(str(folder), STAND_IN).replace(str(Path.home()), "~")
    lines = [line.rstrip() for line in text.splitlines()]
    kept = "\n".join(line for line in lines if not PROGRESS.fullmatch(line)).strip("\n")
    return kept + "\n" if kept else ""


def without_tables(text: str, kept: int | None) -> str:
    """Return an output with so many of its tables, and "…" in place of the others."""
    numbers = itertools.count()
    shortened = TABLE.sub(lambda table: table[0] if kept is None or next(numbers) < kept else "…\n", text)
    return re.sub(r"(?:^…\n)+", "…\n", shortened, flags=re.M)


def stable(text: str) -> list[str]:
    """Return the lines of an output without what may change: figures, hashes, widths of tables."""
    return [re.sub(r"[\s─━]+", " ", FIGURE.sub("#", line)).strip() for line in text.splitlines()]


def report(output: Block, printed: str) -> bool:
    """Print how an output differs from the one that a page shows, and return whether it does."""
    lines = list(
        difflib.unified_diff(stable(output.text), stable(printed), "shown", "printed", n=0, lineterm="")
    )
    if lines:
        print(f"{output}  the output differs; --refresh writes it anew", *lines, sep="\n  ", flush=True)
    return bool(lines)


def rewrite(page: Path, written: list[tuple[Block, str]]) -> None:
    """Put new outputs into a page, from its end to its beginning, so that places before them stay.

    Raises:
        SystemExit: somebody changed the page since it was read; its commands may take minutes.
    """
    text = page.read_text(encoding="utf-8")
    for block, printed in reversed(written):
        start, end = block.span
        if text[start:end] != block.text:
            raise SystemExit(f"{block}  the page was changed meanwhile; nothing was written")
        text = text[:start] + printed + text[end:]
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
