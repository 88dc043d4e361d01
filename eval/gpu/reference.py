"""Record what the attacks find on a CPU: ``python -m hiddenlab.eval.gpu.reference`` writes reference.json."""

import json
import sys

import typer

from hiddenlab.attacks.vocab_match import VocabMatch
from hiddenlab.eval.gpu.attacks import CHANNELS, LAYER, REFERENCE, attacked
from hiddenlab.eval.gpu.program import Setting
from hiddenlab.eval.gpu.work import Lab
from hiddenlab.models import load_model

PROMPTS = 8


def main() -> None:
    """Attack the first prompts behind each channel on the CPU and write the recovered ids; it takes half an hour."""
    lab = Lab(Setting("cpu"))
    model = load_model("builtin", LAYER, device="cpu")
    ids = {}
    for name, channel in CHANNELS.items():
        ids[name], figures = attacked(lab, model, VocabMatch(setup="full"), channel, PROMPTS, again=False)
        print(f"{name}: {figures}", file=sys.stderr)
    REFERENCE.write_text(json.dumps(ids) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
