"""Define the sweep over every decoder that transformers knows: which engine reads it, and whether rightly."""

from hiddenlab.eval.cells import Cell, Experiment, Setting


def architectures(setting: Setting) -> Experiment:
    """Read, attack and shard a small random model of every causal architecture of transformers, at two layers."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    cells = []
    for kind in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        for layer in setting.layers or (1, 3):
            spec = {
                "type": kind,
                "layer": layer,
                "seed": setting.seed,
                "transformers": transformers.__version__,
            }
            cells.append(Cell("architecture", spec, {"architecture": kind, "layer": layer}))
    return Experiment(
        "Every decoder of transformers: states, attack, Cascade",
        cells,
        {
            "exact": "attacked exactly", "verified": "verified", "plain": "in the plain engine",
            "states": "states differ by", "alternatives": "alternatives differ by", "cascade": "Cascade differs by",
        },
        [
            "Small models with random weights; windows, chunks and rotary borders are shorter than the prompt of 14 "
            "tokens. Differences are of a row, relative to its length, against the whole model's own forward pass.",
            "A row that was not run says why: the architecture is refused, or no small model of it can be built. "
            "A dash under Cascade: refused, since tokens meet elsewhere than in attention.",
        ],
    )  # fmt: skip
