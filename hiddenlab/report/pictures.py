"""Save drawings: compact PNG for Markdown, SVG that follows a page's light or dark colours for HTML."""

import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import fill
from typing import Any

from hiddenlab.report.data import Picture
from hiddenlab.text import printable
from hiddenlab.utils.files import write_file

DPI = 130
FONTS = "'DejaVu Sans',Verdana,sans-serif"  # alike in width: several lines of a label are placed by the first one's
ROOM = 8  # points beside an SVG, for letters of a reader's font that are wider
INK, GRID = "#1c1e21", "#e3e5e8"
# Okabe and Ito's colours, which colour-blind readers can distinguish; the marker changes with every line.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
SHADES = 20  # of each colour towards white in a PNG; flat drawings need no more
# On a dark page ink and lines turn light; the series keep their colours.
SVG_STYLE = (
    f"<style>svg{{--ink:{INK};--grid:{GRID}}}text{{fill:var(--ink);text-rendering:geometricPrecision}}"
    "@media (prefers-color-scheme:dark){svg{--ink:#e8eaed;--grid:#3a4048}}</style>"
)


@contextmanager
def drawn() -> Iterator[None]:
    """Set how drawings look; a ``$`` in a name is a dollar, and text in an SVG stays text."""
    import matplotlib

    look: Any = {
        "text.parse_math": False,
        "font.sans-serif": ["DejaVu Sans"],
        "svg.fonttype": "none",
        "svg.hashsalt": "hiddenlab",
    }
    with matplotlib.rc_context(look), warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "Glyph .* missing"
        )  # the SVG shows the sign in a font of the reader's
        yield


def new_figure(width: float, height: float, title: str = "") -> Any:
    """Return an empty figure whose title fits its width."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(drawing)
    if title:
        lines = "\n".join(fill(line, int(width * 11)) for line in title.split("\n"))
        drawing.suptitle(lines, x=0.01, ha="left", fontsize=11)
    return drawing


def save(drawing: Any, path: Path) -> None:
    """Write a drawing as a PNG whose palette holds the colours of drawings and their shades."""
    import numpy as np
    from PIL import Image

    content, small = io.BytesIO(), io.BytesIO()
    drawing.savefig(content, format="png", dpi=DPI, pil_kwargs={"compress_level": 1})
    content.seek(0)
    with Image.open(content) as image:
        pixels = np.asarray(image.convert("RGB"), dtype=np.int32)
    weights = np.array([1 << 16, 1 << 8, 1], dtype=np.int32)
    found, places = np.unique(pixels @ weights, return_inverse=True)
    colours = found[:, None] // weights % 256
    palette = np.array(list(_shades()), dtype=np.int32).reshape(-1, 3)
    nearest = ((colours[:, None] - palette) ** 2).sum(axis=2).argmin(axis=1).astype(np.uint8)
    few = Image.fromarray(nearest[places].reshape(pixels.shape[:2]))
    few.putpalette(palette.astype(np.uint8).tobytes())
    few.save(small, "png", optimize=True, dpi=(DPI, DPI))
    write_file(path, small.getvalue())


def _shades() -> Iterator[int]:
    """Yield the palette of a PNG: white, the grid, and the shades of each colour."""
    yield from bytes.fromhex(f"ffffff{GRID[1:]}")
    for colour in (*COLOURS, INK, "#666666", "#444444"):
        channels = bytes.fromhex(colour[1:])
        for step in range(1, SHADES + 1):
            yield from (round(255 - step * (255 - channel) / SHADES) for channel in channels)


def picture(drawing: Any, path: Path, alt: str) -> Picture:
    """Write a drawing as PNG, and return it with its SVG.

    Args:
        alt: what a reader who does not see it is told.
    """
    save(drawing, path)
    drawing.set_layout_engine("none")  # keep the layout; another would take as long again
    width, height = (96 * side for side in drawing.get_size_inches())
    return Picture(path, svg_of(drawing), alt, round(width + 2 * ROOM * 96 / 72), round(height))


def svg_of(drawing: Any) -> str:
    """Return a drawing as SVG without metadata, with the colours of ink and grid left to the reader's scheme."""
    content = io.StringIO()
    drawing.savefig(content, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = content.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.S)
    text = re.sub(r'<g id="[^"]*"', "<g", text)
    text = re.sub(r"#000000|#1c1e21", "var(--ink)", text)
    text = text.replace(GRID, "var(--grid)")
    text = re.sub(r"'DejaVu Sans'(, sans-serif)?", FONTS, text)
    text = text.replace(">", f">{SVG_STYLE}", 1)
    text = re.sub(
        r'viewBox="0 0 ([\d.]+)', lambda found: f'viewBox="-{ROOM} 0 {float(found[1]) + 2 * ROOM:g}', text
    )
    return printable(re.sub(r"\n\s*", "\n", text))
