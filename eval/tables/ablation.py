"""Define the ablation of the attacks: one of their parts is left out at a time, on the rows that it was made for."""

from typing import Any

from hiddenlab.attacks.vocab_match import SETUPS
from hiddenlab.errors import InputError
from hiddenlab.eval.cells import Cell, Experiment, Setting, attack_cell, split_specs
from hiddenlab.registry import parse_spec, stages_of

LAYERS = (1, 6)
NOTHING = "nothing"
MATCHING, BEAM = "vocab-match", "beam-decoding"
FOUND = {"token_accuracy": "token accuracy", "rouge_l": "ROUGE-L", "exact": "exact prompts"}
COST = {"evaluated_tokens_per_token": "evaluated tokens per token", "seconds_per_prompt": "seconds a prompt"}
# How each attack is asked to do without a part.
WITHOUT = {
    MATCHING: {
        NOTHING: "", "probe": "proposal=lm", "language model": "proposal=probe", "rows read": "without=reading",
        "opener": "without=opener", "first tokens": "without=first-tokens",
        "learning from failures": "without=failures", "screening": "without=screening",
    },
    BEAM: {
        NOTHING: "", "probe": "without=probe", "language model": "lm=false", "trace 1": "without=trace-1",
        "trace 2": "without=trace-2", "place": "without=place", "pairwise order": "without=pairwise-order",
        "log distance": "without=log-distance", "whitened distance": "without=log-whitened-distance",
        "distance over expected": "without=log-distance-over-expected",
        "all distances": "without=log-distance+log-whitened-distance+log-distance-over-expected",
        "beam": "beam=1", "lookahead": "without=lookahead", "widening": "without=widening",
        "local search": "without=moves", "solving for the prefix": "rounds=0",
    },
}  # fmt: skip
_SHUFFLED = ("probe", "language model", "opener", "learning from failures", "screening")
_READ = ("probe", "language model")
_DISTANCES = ("log distance", "whitened distance", "distance over expected", "all distances")
# Of beam decoding where rows are shuffled.
_ORDER = ("trace 1", "trace 2", "place", "pairwise order", "lookahead", "local search")
# Channels (of any strength of noise), the attack that is for them, and its parts that bear on them.
MADE_FOR: dict[str, tuple[str, tuple[str, ...]]] = {
    "identity": (MATCHING, ("probe", "language model", "rows read", "learning from failures")),
    "seq-perm": (MATCHING, _SHUFFLED),
    # The table of first tokens is made where coordinates are permuted.
    "hidden-perm": (MATCHING, (*_SHUFFLED, "first tokens")),
    "2d-perm": (MATCHING, (*_SHUFFLED, "first tokens")),
    # What a row is expected to lie away is learned where rows or coordinates are shuffled.
    "gaussian": (BEAM, (*_READ, "log distance", "beam")),
    "gaussian+seq-perm": (BEAM, (*_READ, *_DISTANCES, *_ORDER, "beam")),
    "gaussian+hidden-perm": (BEAM, (*_READ, *_DISTANCES, "beam", "widening")),
    "random-prefix": (BEAM, (*_READ, "solving for the prefix")),
    "random-prefix+seq-perm": (BEAM, (*_READ, *_ORDER, "solving for the prefix")),
}
# Noise under which the whole attack reads much, but not all: there a part can show what it brings.
CHANNELS = (
    "identity,seq-perm,hidden-perm,2d-perm,gaussian:sigma=0.2,gaussian:sigma=0.03+seq-perm,"
    "gaussian:sigma=0.01+hidden-perm,random-prefix,random-prefix+seq-perm"
)


def _made_for(channel: str) -> tuple[str, tuple[str, ...]]:
    """Return the attack that is for a channel, and its parts.

    Raises:
        InputError: no ablation is known for it.
    """
    family = "+".join(parse_spec(stage)[0] for stage in stages_of(channel))
    if family not in MADE_FOR:
        raise InputError(f"no ablation is known for {channel!r}; these have one: {', '.join(MADE_FOR)}")
    return MADE_FOR[family]


def ablation(
    setting: Setting, channels: str = CHANNELS, parts: str | None = None, setup: str = "full"
) -> Experiment:
    """Measure what each part of vocabulary matching and beam decoding brings: leave out one at a time.

    Args:
        channels: defenses, separated by commas; each is attacked by the attack that is for it.
        parts: left out, separated by commas. Default: all that bear on the defense.
        setup: of vocab-match: full (a trained probe) or quick (what a first prompt meets).

    Raises:
        InputError: no ablation is known for a defense, or no part or setup has such a name.
    """
    behind = {channel: _made_for(channel) for channel in split_specs(channels)}
    known = {part for _, names in MADE_FOR.values() for part in names}
    asked = known if parts is None else {part.strip() for part in parts.split(",")}
    if wrong := sorted(asked - known):
        raise InputError(f"no part is called {wrong[0]!r}; known are {', '.join(sorted(known))}")
    if setup not in SETUPS:
        raise InputError(f"unknown setup {setup!r}; known are {', '.join(SETUPS)}")
    cells: list[Cell] = []
    for channel, (attack, names) in behind.items():
        for layer in setting.at(LAYERS):
            for part in (NOTHING, *(name for name in names if name in asked)):
                keys = {"defense": channel, "layer": layer, "attack": attack, "left out": part}
                spec = ":".join(text for text in (attack, WITHOUT[attack][part]) if text)
                options: dict[str, Any] = {"attack": spec, "limit": setting.limit or 10}
                if setup == "quick" and attack == MATCHING:
                    options |= {"setup": setup, "independent": True}  # no row may profit from another
                cells.append(attack_cell(setting, keys, layer, channel, **options))
    return Experiment(
        "What each part of an attack brings",
        cells,
        # Pictures show the first. Vocabulary matching finds every prompt without any one part, at another cost.
        COST | FOUND if {attack for attack, _ in behind.values()} == {MATCHING} else FOUND | COST,
        [
            "A row leaves out one part of an attack. The same prompts are attacked in every row of a defense, and no "
            "budget ends a search of vocab-match.",
            "Probes are prepared beforehand, and their preparation is not counted"
            + (". " if setup == "full" else "; those of vocab-match are what '--setup quick' has for a first prompt. ")
            + "Screening runs only on processors with "
            "native bfloat16; on others, leaving it out changes nothing.",
            "'Beam' keeps one hypothesis in place of eight; where rows are shuffled it keeps more of both.",
        ],
    )  # fmt: skip
