"""Release prompts as an attacker sees them: under keys that live for a while, beside texts that he has."""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Int
from torch import Tensor

from hiddenlab.attacker import Attacker
from hiddenlab.channels import Channel
from hiddenlab.eval.assess.hiding import as_known
from hiddenlab.eval.assess.readings import truth_of
from hiddenlab.job import Case
from hiddenlab.models import TruncatedModel
from hiddenlab.models.tokens import most_tokens
from hiddenlab.proposals.corpus import Corpus, language_reference
from hiddenlab.repeated import together
from hiddenlab.secret_maps import mixes_rows
from hiddenlab.stages import are_replaced
from hiddenlab.types import GroundTruth, KnownText, Observation, ObservationInfo, Progress, silent
from hiddenlab.utils.random import generator

LONGEST = 512  # tokens of a chosen text
MORE = 64  # rows of chosen texts beyond the width of a state, so that no direction is seen once alone


def release_all(
    model: TruncatedModel,
    channel: Channel,
    cases: Sequence[Case],
    seed: int,
    attacker: Attacker | None = None,
    progress: Progress = silent,
) -> list[tuple[Observation, GroundTruth]]:
    """Release prompts through a channel, each with fresh draws, under the keys and beside the texts of an attacker.

    Args:
        attacker: None has no texts, and every prompt has a key of its own.
    """
    attacker = attacker or Attacker()
    keys = [_key(attacker, seed, case.index) for case in cases]
    made = list[tuple[Observation, GroundTruth]]()
    for case, key in zip(cases, keys, strict=True):
        progress("releasing prompts", len(made), len(cases))
        made.append(_repeatedly(model, channel, case, seed, key, attacker))
    progress("releasing prompts", len(made), len(cases))
    if not attacker.known + attacker.chosen:
        return made
    lengths = [len(truth_of(case).tokens) for case in cases]
    if attacker.key == "forever":  # one session, whose texts are known once
        texts = _texts(model, attacker, seed, "forever", max(lengths), made[0][0].info)
        shared = _released(model, channel, texts, seed, "forever", keys[0])
        known = [shared] * len(cases)
    else:
        known = [
            _released(
                model, channel,
                _texts(model, attacker, seed, case.index, length, shown.info), seed, case.index, key,
            )
            for case, length, key, (shown, _) in zip(cases, lengths, keys, made, strict=True)
        ]  # fmt: skip
    return [
        (
            replace(
                shown,
                known=tuple(replace(text, shown=as_known(text.shown, model, attacker)) for text in texts),
            ),
            truth,
        )
        for (shown, truth), texts in zip(made, known, strict=True)
    ]


def _repeatedly(
    model: TruncatedModel, channel: Channel, case: Case, seed: int, key: int | None, attacker: Attacker
) -> tuple[Observation, GroundTruth]:
    """Release a prompt as often as the attacker sees it, and return what he makes of it.

    The truth is of the first release. A later one that replaces tokens by others than that one is not put together
    with it, since its rows differ otherwise than by noise.
    """
    # The first release draws what a single one would draw.
    draws = [generator(seed, "release", case.index)]
    draws += [generator(seed, "release", case.index, again) for again in range(1, attacker.releases)]
    made = [channel.release(model, truth_of(case).tokens, fresh, key) for fresh in draws]
    shown = [as_known(observation, model, attacker) for observation, _ in made]
    one = together(shown, model, key is not None, seed) if len(shown) > 1 else shown[0]
    return one, made[0][1]


def _key(attacker: Attacker, seed: int, index: int) -> int | None:
    if attacker.key == "request":
        return None
    of = () if attacker.key == "forever" else (index,)
    return int(torch.randint(2**63 - 1, (), generator=generator(seed, "session key", *of)))


def _texts(
    model: TruncatedModel, attacker: Attacker, seed: int, session: object, length: int, info: ObservationInfo
) -> list[Int[Tensor, " n"]]:
    """Return the texts that the attacker has of a session: ordinary ones, and those that he picks.

    Args:
        length: of the prompt, in tokens.
    """
    drawn = generator(seed, "known texts", session)
    corpus = Corpus(model, int(torch.randint(2**31, (), generator=drawn)), language_reference)
    known = [corpus.text_of(length) for _ in range(attacker.known)]
    lengths = chosen_lengths(model, attacker, length, info)
    if lengths and are_replaced(info):  # each token of a text shows what stands for it, and no other one
        frequent, wanted = corpus.frequent(sum(lengths)), torch.arange(sum(lengths))
        return [*known, *frequent[wanted % len(frequent)].split(lengths[0])]
    return [*known, *map(corpus.uniform, lengths)]


def chosen_lengths(
    model: TruncatedModel, attacker: Attacker, length: int, info: ObservationInfo
) -> list[int]:
    """Return the length of each chosen text, by what the attacker knows of the rows.

    An order or a mixture of rows belongs to one length: the texts are as long as the prompt. Where tokens are replaced,
    they are as long as may be, to hold many tokens. Else their rows together have to span all coordinates. Who knows
    nothing of the defense picks both in turn.
    """
    count, unsure = attacker.chosen, attacker.knows == "nothing"
    if not count or info.rows_permuted or mixes_rows(info):
        return [length] * count
    most = most_tokens(model.module) or LONGEST
    wanted = math.ceil((model.width + MORE) / max(1, count // 2 if unsure else count))
    if are_replaced(info):
        return [max(length, min(LONGEST, most))] * count
    long = max(length, min(wanted, LONGEST, most))
    return [length if unsure and number % 2 == 0 else long for number in range(count)]


def _released(
    model: TruncatedModel,
    channel: Channel,
    texts: Sequence[Int[Tensor, " n"]],
    seed: int,
    session: object,
    key: int | None,
) -> tuple[KnownText, ...]:
    made = [
        (tokens, channel.release(model, tokens, generator(seed, "known", session, number), key)[0])
        for number, tokens in enumerate(text.tolist() for text in texts)
    ]
    return tuple(KnownText(tuple(tokens), shown) for tokens, shown in made)
