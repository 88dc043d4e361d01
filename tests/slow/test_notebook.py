"""The notebook in docs, run as a reader runs it, on the built-in model."""

import json
from pathlib import Path

from tests.notebook import run

NOTEBOOK = Path(__file__).parents[2] / "docs" / "quickstart.ipynb"


def test_the_notebook_shows_what_it_showed() -> None:
    stored = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    for before, now in zip(stored["cells"], run(stored)["cells"], strict=True):
        for old, new in zip(before.get("outputs", []), now.get("outputs", []), strict=True):
            assert new["data"]["text/plain"] == old["data"]["text/plain"], before["source"]
