"""Define the table of attacks on rows behind secret linear maps, by what the maps leave of them."""

from hiddenlab.eval.cells import Experiment, Setting, attack_cell, split_specs

CHANNELS = "orthogonal,row-mixing,row-mixing:kind=orthogonal,orthogonal:fresh=row"


def invariants(setting: Setting, channels: str = CHANNELS, sigmas: str = "0") -> Experiment:
    """Attack states behind secret orthogonal maps, maps of each row, and row mixing, by what these leave.

    Args:
        channels: maps, separated by commas.
        sigmas: standard deviations of Gaussian noise on the input embeddings, separated by commas; 0 is none.
    """
    source = setting.source(limit=20)
    cells = []
    for channel in split_specs(channels):
        for layer in setting.at((1, 6, 11)):
            for sigma in map(float, sigmas.split(",")):
                whole = f"gaussian:sigma={sigma!r}|{channel}" if sigma else channel
                keys = {"channel": channel, "layer": layer, "sigma": sigma}
                cells.append(attack_cell(setting, keys, layer, whole, **source))
    return Experiment(
        "Rows behind secret linear maps",
        cells,
        {
            "exact": "exact prompts", "token_accuracy": "token accuracy", "verified": "verified tokens",
            "evaluated_tokens_per_token": "evaluated tokens per token", "seconds_per_prompt": "seconds a prompt",
        },
        [
            "No paper has such a table. A secret orthogonal map keeps inner products of rows; with a map for each row "
            "only norms are left; mixed rows keep the space that they span. Maps are drawn anew for every prompt.",
            f"Model {setting.model}, {source['limit']} prompts of {source['prompts'] or 'the shipped set'} of up to "
            f"{source['max_tokens']} tokens. Two weights and a bound of the proposals were chosen on ten of the "
            "shipped prompts at layer 1. Seconds leave out tables and thresholds, which are made once for each layer.",
        ],
    )  # fmt: skip
