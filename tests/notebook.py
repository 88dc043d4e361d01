"""Run a notebook's code cells in order and keep what they show: ``python -m tests.notebook docs/quickstart.ipynb``.

A cell shows what its prints write and the value of its last line, as HTML or as a picture where it has such a form.
"""

import ast
import base64
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


def run(notebook: dict[str, Any]) -> dict[str, Any]:
    """Return the notebook with the outputs that its cells have now; an error in a cell is raised."""
    names: dict[str, Any] = {"__name__": "__main__"}
    cells = []
    for number, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] == "code":
            cell = {**cell, "outputs": _outputs("".join(cell["source"]), f"cell {number}", names)}
        cells.append(cell)
    return {**notebook, "cells": cells}


def _outputs(source: str, where: str, names: dict[str, Any]) -> list[dict[str, Any]]:
    tree = ast.parse(source, where)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, where, "exec"), names)
        value = None if last is None else eval(compile(ast.Expression(last.value), where, "eval"), names)
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        outputs.append({"output_type": "stream", "name": "stdout", "text": printed.getvalue()})
    if value is not None:
        data = {"text/plain": repr(value)}
        if hasattr(value, "_repr_html_") and (shown := value._repr_html_()) is not None:
            data["text/html"] = shown
        if isinstance(value, Figure):
            data["image/png"] = _png(value)
        outputs.append(
            {"output_type": "execute_result", "execution_count": None, "metadata": {}, "data": data}
        )
    return outputs


def _png(figure: Figure) -> str:
    drawn = io.BytesIO()
    FigureCanvasAgg(figure).print_png(drawn)
    return base64.b64encode(drawn.getvalue()).decode()


if __name__ == "__main__":
    for name in sys.argv[1:]:
        path = Path(name)
        made = run(json.loads(path.read_text(encoding="utf-8")))
        path.write_text(json.dumps(made, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
