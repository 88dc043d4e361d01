"""Define the leaderboard of assessed defenses, and the comparison of the ensemble with single attacks."""

from hiddenlab.code_files import load_named
from hiddenlab.errors import InputError
from hiddenlab.eval.cells import Cell, Experiment, Setting, attack_cell, split_specs

DEFENSES = (
    "identity,seq-perm,hidden-perm,hidden-perm:shared,2d-perm,orthogonal,orthogonal:fresh=row,row-mixing,"
    "row-mixing:kind=orthogonal,gaussian:sigma=0.01,gaussian:sigma=0.1,random-prefix,int8,nf4,round:int8,"
    "shard:alpha=4,c=8,node=2"
)
COMPOSITIONS = (
    "gaussian:sigma=0.1|seq-perm,gaussian:sigma=0.1|hidden-perm,nf4|seq-perm,gaussian:sigma=0.1|orthogonal,"
    "round:int8|seq-perm,gaussian:sigma=0.3|seq-perm"
)
# Two rows of each family, with the attack that reads most of them alone.
RIVALS = (
    ("gaussian:sigma=0.1", 1, "beam-decoding"),
    ("gaussian:sigma=0.01", 6, "beam-decoding"),
    ("seq-perm", 6, "vocab-match"),
    ("2d-perm", 6, "vocab-match"),
    ("nf4", 6, "beam-decoding"),
    ("int8|seq-perm", 6, "beam-decoding"),
    ("shard:alpha=2,c=2,node=1", 1, "missing-tokens"),
    ("drop-rows:size=2,after=10", 6, "missing-tokens"),
)


def leaderboard(
    setting: Setting, defenses: str = f"{DEFENSES},{COMPOSITIONS}", minutes: float = 10.0
) -> Experiment:
    """Assess defenses one by one, as ``hiddenlab assess`` does, and put the verdicts side by side.

    Args:
        defenses: separated by commas, the stages of one joined by ``|``; files of your own (``FILE.py:KEY=VALUE``) too.
        minutes: for all attacks on one defense; as much again may go to the same attacks without it.

    Raises:
        InputError: a file of one's own cannot be loaded.
    """
    source, cells = setting.source(limit=20, max_tokens=40), list[Cell]()
    for spec in split_specs(defenses):
        for stage in spec.split("|"):
            load_named("defenses", stage)
        for layer in setting.at((1, 6)):
            cell = attack_cell(setting, {"defense": spec, "layer": layer}, layer, spec, **source)
            cells.append(Cell("assess", {**cell.spec, "minutes": minutes}, cell.keys))
    return Experiment(
        "Which defense holds?",
        cells,
        {
            "leak": "leak beyond a guess", "exact": "exact prompts", "secrets_read": "planted secrets read",
            "top1_agreement": "same next token", "perplexity": "perplexity", "kl": "KL",
            "time_over_plain": "time over plain", "bytes_over_plain": "bytes over plain", "control": "guessed",
            "minutes": "minutes of attacks",
        },
        [
            "The leak is the share of tokens that were read, of those that a language model does not guess from a "
            "prompt's length alone. BROKEN: at least half, by the lower bound. LEAKS: at least 5 %, or an exact "
            "prompt, or a planted secret. HELD: at most 5 %, by the upper bound, against these attacks within these "
            "minutes; this is no proof. INCONCLUSIVE: nothing follows.",
            "The attack and the recovered text are of the prompt that leaked most.",
            "Same next token, perplexity and KL are of the model behind the defense, for who may undo it.",
            f"Model {setting.model}, {source['limit']} prompts of {source['prompts'] or 'the shipped set'} of up to "
            f"{source['max_tokens']} tokens, four planted secrets, {minutes:g} minutes of attacks at most.",
        ],
    )  # fmt: skip


def ensemble(setting: Setting, minutes: float = 10.0, channels: str = "") -> Experiment:
    """Give the ensemble of ``assess`` and the best single attack of each kind of rows the same time.

    Args:
        minutes: for each of the two. channels: of those that are compared by default, separated by commas; all of them
            if empty.

    Raises:
        InputError: no attack is known for a channel.
    """
    source, cells = setting.source(limit=20, max_tokens=40), list[Cell]()
    asked = split_specs(channels) if channels else [channel for channel, _, _ in RIVALS]
    known = {channel: (layer, attack) for channel, layer, attack in RIVALS}
    for channel in asked:
        if channel not in known:
            raise InputError(f"no single attack is known for {channel!r}; compared are {', '.join(known)}")
        layer, attack = known[channel]
        keys = {"rows": channel, "layer": layer, "single attack": attack}
        spec = attack_cell(setting, keys, layer, channel, **source).spec
        cells.append(Cell("ensemble", {**spec, "single": attack, "minutes": minutes}, keys))
    return Experiment(
        "Does the ensemble read as much as the best single attack?",
        cells,
        {
            "ensemble": "tokens, ensemble", "single": "tokens, single attack", "gained": "ensemble less single",
            "ensemble_minutes": "minutes, ensemble", "single_minutes": "minutes, single attack",
        },
        [
            f"Model {setting.model}, {source['limit']} prompts of {source['prompts'] or 'the shipped set'} of up to "
            f"{source['max_tokens']} tokens; both have {minutes:g} minutes, and the same rows. What an attack did not "
            "reach counts as not read. The ensemble spends a quarter of the time on a look at one prompt.",
            "The single attack is the one that reads most of such rows in the lab's other tables; the ensemble does "
            "not know which it is.",
        ],
    )  # fmt: skip
