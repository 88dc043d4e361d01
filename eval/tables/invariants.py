"""Define the table of attacks on rows behind secret linear maps, by what the maps leave of them."""

from hiddenlab.eval.cells import Experiment, Setting, attack_cell, split_specs

CHANNELS = "orthogonal,row-mixing,row-mixing:kind=orthogonal,orthogonal:fresh=row"
RELEASES = "float32,bfloat16"


def invariants(
    setting: Setting,
    channels: str = CHANNELS,
    sigmas: str = "0,0.01,0.1",
    releases: str = RELEASES,
    candidates: int | None = None,
) -> Experiment:
    """Attack states behind secret orthogonal maps, maps of each row, and row mixing, by what these leave.

    Args:
        channels: maps, separated by commas.
        sigmas: of Gaussian noise on the states before they are mapped, separated by commas: its length as a share of a
            row's; 0 is none.
        releases: dtypes that the mapped rows are rounded to (``float32``, ``bfloat16``, ``float16``), separated by
            commas. Behind noise, which is far above rounding, rows are float32.
        candidates: for a token at most, behind each hypothesis and in each round; None sets no limit.
    """
    source = setting.source(limit=20, max_tokens=24)
    limit = (
        "Without noise a token may take the whole vocabulary."
        if candidates is None
        else f"A token takes at most {candidates:,} candidates behind each hypothesis and in each round."
    )
    cells = []
    for channel in split_specs(channels):
        for layer in setting.at((1, 6, 11)):
            for sigma in map(float, sigmas.split(",")):
                for release in ["float32"] if sigma else split_specs(releases):
                    rounded = release != "float32"
                    stages = (
                        [f"output-noise:sigma={sigma!r}"] * bool(sigma)
                        + [channel]
                        + [f"round:{release}"] * rounded
                    )
                    keys = {"channel": channel, "layer": layer, "sigma": sigma, "release": release}
                    cells.append(
                        attack_cell(setting, keys, layer, "+".join(stages), budget=candidates, **source)
                    )
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
            "Sigma is of noise on the states, as a share of a row's length. Maps are of float32 rows, and what is "
            "released is rounded.",
            f"Model {setting.model}, {source['limit']} prompts of {source['prompts'] or 'the shipped set'} of up to "
            f"{source['max_tokens']} tokens. {limit} Three weights and a bound of the proposals were chosen on "
            "shipped prompts at layer 1. Seconds leave out tables and thresholds, made once for each layer.",
        ],
    )  # fmt: skip
