"""Run the shell commands of README and docs: ``python -m tests.docs_check [PAGE …]``, or ``make docs-check``.

The blocks of a page run one after another in one temporary folder. A block behind ``<!-- not run: REASON -->`` is
left out. A command whose comment begins with "exit 1" has to end so. The log, the results and the findings are no
manuals, and are not run.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
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
ENDS_SO = re.compile(r"^(hiddenlab .*?)\s+# exit 1\b.*$", re.M)
LONGEST = 900.0  # seconds of one block
FENCE = re.compile(r"^```(\S*)\n(.*?)^```$", re.M | re.S)
REASON = re.compile(r"<!-- not run: (.+?) -->\n*\Z")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page: its language, its text, and the reason why it is not run, if any."""

    page: Path
    line: int
    language: str
    text: str
    reason: str | None

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def pages() -> list[Path]:
    """README and the manuals."""
    docs = ROOT / "docs"
    found = sorted(path for path in docs.rglob("*.md") if not LEFT_OUT & set(path.relative_to(docs).parts))
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *found]


def blocks(page: Path) -> list[Block]:
    """Every fenced block of a page."""
    text = page.read_text(encoding="utf-8")
    made = []
    for match in FENCE.finditer(text):
        before = text[: match.start()]
        reason = REASON.search(before)
        line = before.count("\n") + 1
        made.append(Block(page, line, match[1], match[2], reason and reason[1]))
    return made


def commands(page: Path) -> list[Block]:
    """The blocks of a page that a shell would run."""
    return [block for block in blocks(page) if block.language in SHELL]


def main(names: list[str]) -> int:
    """Run the pages that are named, or all; 1 if a command failed."""
    failed = 0
    chosen = [path for path in pages() if not names or path.name in names or str(path) in names]
    for page in chosen:
        with tempfile.TemporaryDirectory() as folder:
            prepare(Path(folder))
            for block in commands(page):
                if block.reason is not None:
                    print(f"{block}  not run: {block.reason}", flush=True)
                    continue
                started = time.perf_counter()
                problem = run(block, Path(folder))
                print(f"{block}  {problem or 'ok'}, {time.perf_counter() - started:.0f} s", flush=True)
                failed += problem is not None
    return int(failed > 0)


def prepare(folder: Path) -> None:
    """Make the files that pages read and do not make."""
    for name, text in FILES.items():
        (folder / name).write_text(text, encoding="utf-8")
    table = pyarrow.table({"text": ["Where is the key?"]})
    pyarrow.parquet.write_table(table, folder / "table.parquet")


def script_of(block: Block) -> str:
    """The block as a script that ends with the first command that ends otherwise than the page says."""
    return ENDS_SO.sub(r"if \1; then exit 99; else test $? -eq 1; fi", block.text)


def run(block: Block, folder: Path) -> str | None:
    """Run one block as a script that ends with the first error; what went wrong, if anything."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    script = ["bash", "-euo", "pipefail", "-c", script_of(block)]
    try:
        done = subprocess.run(
            script,
            cwd=folder,
            env={**os.environ, "PATH": path},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LONGEST,
        )
    except subprocess.TimeoutExpired:
        return f"took more than {LONGEST:.0f} s"
    if done.returncode == 0:
        return None
    print(done.stdout[-2000:], done.stderr[-2000:], sep="\n", file=sys.stderr)
    return f"failed with exit code {done.returncode}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
