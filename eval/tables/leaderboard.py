"""Define the leaderboard of assessed defenses, and the comparison of the ensemble with single attacks."""

from typing import Any

from hiddenlab.channels import Channel
from hiddenlab.errors import InputError
from hiddenlab.eval.assess.command import check_minutes
from hiddenlab.eval.assess.price import UTILITY_TOKENS
from hiddenlab.eval.assess.trade import TEXTS, specs_of
from hiddenlab.eval.cells import Cell, Experiment, Setting, attack_cell, split_specs
from hiddenlab.types import STREAMS

DEFENSES = (
    "identity,seq-perm,hidden-perm:shared,2d-perm,orthogonal,row-mixing,row-mixing:kind=orthogonal,shield=8,"
    "decoys:count=8,kind=gaussian+seq-perm,gaussian:sigma=0.01,gaussian:sigma=0.1,output-noise:sigma=0.1,"
    "sparsify:keep=0.1,truncated-svd:rank=8,round:int4,random-prefix,int8,nf4,shard:alpha=4,c=8,node=2,"
    "custext:epsilon=5,k=20,santext:epsilon=5,rantext:epsilon=6,vocab-bijection,dchi:eta=200,snd:eta=200,"
    "dp-forward:epsilon=8"
)
COMPOSITIONS = (
    "gaussian:sigma=0.1+seq-perm,gaussian:sigma=0.1+hidden-perm,nf4+seq-perm,gaussian:sigma=0.1+orthogonal,"
    "round:int8+seq-perm,gaussian:sigma=0.3+seq-perm"
)
FIGURES = {
    "leak": "leak beyond a guess", "top1_agreement": "same next token", "exact": "exact prompts",
    "secrets_read": "planted secrets read", "perplexity": "perplexity", "kl": "KL",
    "time_over_plain": "time over plain", "bytes_over_plain": "bytes over plain", "control": "guessed",
    "minutes": "minutes of attacks",
}  # fmt: skip
NOTES = (
    "The leak is the share of tokens that were read, of those that a language model does not guess from a prompt's "
    "length alone. It is below 0 where less was read than is guessed. BROKEN: the lower bound is 50 % or more. "
    "LEAKS: the lower bound is 5 % or more, or a prompt that is not guessed came back exactly, or a planted secret was "
    "read. HELD: the upper bound is below 5 %, and the attacks ran to their end; this is no proof. INCONCLUSIVE: "
    "nothing follows: attacks ran out of time, failed or did not apply, or the interval is too wide.",
    "The attack and the recovered text are of the prompt that leaked most.",
    "Same next token, perplexity and KL are of the model behind the defense, for who may undo it.",
)
# Two rows of each family, with the attack that reads most of them alone.
RIVALS = (
    ("gaussian:sigma=0.1", 1, "beam-decoding"),
    ("gaussian:sigma=0.01", 6, "beam-decoding"),
    ("seq-perm", 6, "vocab-match"),
    ("2d-perm", 6, "vocab-match"),
    ("nf4", 6, "beam-decoding"),
    ("int8+seq-perm", 6, "beam-decoding"),
    ("shard:alpha=2,c=2,node=1", 1, "missing-tokens"),
    ("drop-rows:size=2,after=10", 6, "missing-tokens"),
)
# From the weakest to the strongest: all kinds of noise with a strength, on embeddings, on the released rows, on tokens.
FAMILIES = (
    "gaussian:sigma=0.0001..1,output-noise:sigma=0.0001..10,sparsify:keep=0.99..0.01,truncated-svd:rank=64..1,"
    "dchi:eta=100000..10,round:int8,round:int4"
)
MAPS = "identity,seq-perm,2d-perm,orthogonal,orthogonal:fresh=row,row-mixing"


def leaderboard(
    setting: Setting,
    defenses: str = f"{DEFENSES},{COMPOSITIONS}",
    minutes: float = 10.0,
    stream: str = "resid",
) -> Experiment:
    """Assess defenses one by one, as ``hiddenlab assess`` does, and put the verdicts side by side.

    Args:
        defenses: separated by commas, the stages of one joined by ``+``; files of your own (``FILE.py:KEY=VALUE``) too.
        minutes: for all attacks on one defense; as much again may go to the same attacks without it.
        stream: what the defense releases of a layer, as for ``hiddenlab attack``: ``k`` or ``v`` for one on a KV cache.

    Raises:
        InputError: there is no such defense or stream, or minutes are not above 0.
    """
    if stream not in STREAMS:
        raise InputError(f"unknown stream {stream!r}; known are {', '.join(STREAMS)}")
    check_minutes(minutes)
    source, cells = setting.source(limit=20, max_tokens=40), list[Cell]()
    released: dict[str, Any] = {} if stream == "resid" else {"stream": stream}
    for spec in split_specs(defenses):
        _check_stages(spec)
        for layer in setting.at((1, 6)):
            spec_of = attack_cell(setting, {}, layer, spec, **released, **source).spec
            keys = {"defense": spec, "model": setting.model, "stream": spec_of["stream"], "layer": layer}
            cells.append(Cell("assess", {**spec_of, "minutes": minutes}, keys))
    return Experiment(
        "Which defense holds?",
        cells,
        FIGURES,
        [*NOTES, _asked(setting, source, minutes)],
        against="top1_agreement",
    )  # fmt: skip


def _asked(setting: Setting, source: dict[str, Any], minutes: float) -> str:
    return (
        f"Model {setting.model}, {source['limit']} prompts of {source['prompts'] or 'the shipped set'} of up to "
        f"{source['max_tokens']} tokens, four planted secrets, {minutes:g} minutes of attacks at most."
    )


def _check_stages(spec: str) -> None:
    """Refuse a defense that there is not, before anything is measured; its stages are joined by ``+``."""
    Channel.parse([spec], files=True)


def trade_off(
    setting: Setting, families: str = FAMILIES, maps: str = MAPS, loss: float = 0.1, minutes: float = 4.0
) -> Experiment:
    """Assess the strongest noise of each kind that keeps the model useful, alone and behind secret maps.

    A weaker noise leaks more. So if the strongest one that is allowed leaks, all of its kind that are allowed do.

    Args:
        families: specs with a range of strengths, the weakest first, such as ``gaussian:sigma=0.001..1``; those of
            files of your own (``FILE.py:KEY=0.1..1``) too.
        maps: secrets that who holds the key undoes, and which cost no quality; the stages of one joined by ``+``.
        loss: share of the model's next tokens that the noise may change.
        minutes: for all attacks on one row; as much again may go to the same attacks without the defense.

    Raises:
        InputError: a range that is none, a loss outside 0 to 1, no such defense, or minutes that are not above 0.
    """
    check_minutes(minutes)
    if not 0 <= loss < 1:
        raise InputError(f"loss is from 0 to below 1, not {loss:g}")
    # With ten prompts of which no token is read the upper bound is above 5 %, and nothing could hold.
    source, cells = setting.source(limit=20, max_tokens=24), list[Cell]()
    for family in split_specs(families):
        _check_stages(specs_of(family)(0.0))
        for secret in split_specs(maps):
            _check_stages(secret)
            for layer in setting.at((1, 6)):
                spec = attack_cell(setting, {}, layer, **source).spec
                asked = {"family": family, "map": secret, "loss": loss, "minutes": minutes}
                keys = {"noise": family, "secret map": secret, "layer": layer}
                cells.append(Cell("assess-strongest", {**spec, **asked}, keys))
    return Experiment(
        "Does any noise that keeps the model useful hide a prompt?",
        cells,
        {**FIGURES, "kept": "kept by the noise alone, on longer texts"},
        [
            f"Strongest: the most noise of its kind with which at least {1 - loss:.0%} of the model's next tokens stay "
            "the same, found by halving the range. Of noise without a range there is one strength.",
            f"The strength is found without the map, on {TEXTS} texts of up to {UTILITY_TOKENS} tokens or all that "
            "there are. 'Same next token' is of noise and map together, on the shorter prompts that are attacked: it "
            "is lower where a map costs quality as well, and since noise does more harm behind few tokens.",
            *NOTES, _asked(setting, source, minutes),
        ],
        against="top1_agreement",
    )  # fmt: skip


def ensemble(setting: Setting, minutes: float = 10.0, channels: str = "") -> Experiment:
    """Give the ensemble of ``assess`` and the best single attack of each kind of rows the same time.

    Args:
        minutes: for each of the two. channels: of those that are compared by default, separated by commas; all of them
            if empty.

    Raises:
        InputError: no attack is known for a channel, or minutes are not above 0.
    """
    check_minutes(minutes)
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
        against="single",
    )  # fmt: skip
