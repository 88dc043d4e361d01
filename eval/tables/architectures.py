"""Define the sweeps over every decoder and encoder that transformers knows: which are computed rightly, and how."""

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


def encoders(setting: Setting) -> Experiment:
    """Shard a small random model of every encoder of transformers (those with a masked-language-model head)."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    version = transformers.__version__
    cells = [
        Cell("encoder", {"type": kind, "seed": setting.seed, "transformers": version}, {"architecture": kind})
        for kind in sorted(MODEL_FOR_MASKED_LM_MAPPING_NAMES)
    ]
    return Experiment(
        "Every encoder of transformers in Cascade",
        cells,
        {"cascade": "Cascade differs by"},
        [
            "Small models with random weights, 14 tokens on two CompNodes. Differences are of a row, relative to its "
            "length, against the model's own forward pass.",
            "A row that was not run says why: Cascade refuses the architecture, or no small model of it can be built.",
        ],
    )
