"""Make docs/demo.svg, an animated recording of real commands: ``python -m tests.recording``, or ``make recording``.

The commands run now, and what they print is what the picture shows; only the pauses are made up. The picture is still
where the reader asks for reduced motion.
"""

import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "docs" / "demo.svg"
COLUMNS = 80
COMMANDS = (
    'hiddenlab attack "My password is hunter2, please do not tell." --layer 11 --defense seq-perm',
    "hiddenlab compare --limit 5 --max-tokens 30 --layer 6 --defense seq-perm --defense gaussian:sigma=0.01",
)
TYPED, SHOWN, PAUSE = 1.2, 0.25, 4.0  # seconds: to type a command, between lines, behind a command
STYLE = """
.t { opacity: 0; animation: appear 0.05s forwards; }
@keyframes appear { to { opacity: 1; } }
@media (prefers-reduced-motion: reduce) { .t { opacity: 1; animation: none; } }
"""


def main() -> None:
    """Run the commands and write the picture."""
    TARGET.write_text(animated(recorded()), encoding="utf-8")
    print(TARGET.relative_to(ROOT))


def recorded() -> list[tuple[float, Text]]:
    """Return the lines of the recording, each with the second at which it appears."""
    lines: list[tuple[float, Text]] = []
    now = 0.5
    for command in COMMANDS:
        prompt = Text.assemble(("$ ", "bold green"), (command, "bold"))
        lines.append((now, prompt))
        now += TYPED
        for text in Text.from_ansi(output(command)).split():
            lines.append((now, text))
            now += SHOWN
        lines.append((now, Text()))
        now += PAUSE
    return lines


def output(command: str) -> str:
    """Return what a command prints on standard output, with its colours.

    Raises:
        subprocess.CalledProcessError: it fails.
    """
    environment = os.environ | {"COLUMNS": str(COLUMNS), "FORCE_COLOR": "1"}
    words = [sys.executable, "-m", *shlex.split(command), "--no-record"]
    done = subprocess.run(words, check=True, text=True, env=environment, cwd=ROOT, stdout=subprocess.PIPE)
    return done.stdout.strip("\n")


def animated(lines: list[tuple[float, Text]]) -> str:
    """Return an SVG in which each line appears at its second."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    starts: list[float] = []  # of each row of the screen
    for start, text in lines:
        rows = text.wrap(console, COLUMNS) or [Text()]
        for row in rows:
            console.print(row)
            starts.append(start)
    picture = console.export_svg(title="hiddenlab", code_format=_format())

    def timed(match: re.Match[str]) -> str:
        start = starts[int(match["row"])]
        return f'<text class="{match["class"]} t" style="animation-delay:{start:.2f}s" {match["rest"]}'

    return re.sub(r'<text class="(?P<class>[^"]+)" (?P<rest>[^>]*?-line-(?P<row>\d+)\)")', timed, picture)


def _format() -> str:
    """Return rich's frame of an SVG, with the animation's style, and without fonts from elsewhere."""
    from rich._export_format import CONSOLE_SVG_FORMAT

    frame = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.S)
    return frame.replace("{styles}", "{styles}" + STYLE.replace("{", "{{").replace("}", "}}"))


if __name__ == "__main__":
    main()
