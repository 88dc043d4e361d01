"""Define the leaderboard: defenses assessed one by one, with the verdict, what read most, utility and cost."""

from hiddenlab.code_files import load_named
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
