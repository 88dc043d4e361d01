"""Define the matrix of faults that files of hidden states have, and whether the diagnosis names them."""

from hiddenlab.errors import InputError
from hiddenlab.eval.cells import Cell, Experiment, Setting
from hiddenlab.eval.measures.diagnosis import FAULTS, TINY

LAYERS = {"builtin": 11, TINY: 2}


def diagnosis(setting: Setting, models: str = "builtin,tiny") -> Experiment:
    """Plant each fault on the built-in model and on a small random one, and ask what the rows are.

    Args:
        models: builtin, tiny, or both, joined by a comma.
    """
    cells = []
    names = dict.fromkeys(name.strip() for name in models.split(","))
    if unknown := [name for name in names if name not in LAYERS]:
        raise InputError(f"unknown model {unknown[0]!r}; known are {', '.join(LAYERS)}")
    for model, layer in ((name, LAYERS[name]) for name in names):
        for fault in FAULTS:
            spec = {"model": model, "layer": layer, "fault": fault, "prompt": 0, "seed": setting.seed}
            cells.append(Cell("planted", spec, {"model": model, "fault": fault}))
    return Experiment(
        "What rows are when nothing matches: faults planted, and named",
        cells,
        {"named": "named rightly", "wrong": "wrong tokens verified"},
        [
            "Rows of one prompt of 24 tokens claim to be states after layer 11 (built-in model) or 2 (random model of "
            "four layers), or what the fault needs. Where nothing is wrong, the diagnosis has to say so.",
            "The attack then runs on the rows as what they claim to be; none of its wrong tokens may be verified.",
        ],
    )
