"""Collect states of the attacker's own text, from which regressions learn what a layer's rows show."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import cycle, pairwise

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hiddenlab.channels import Channel
from hiddenlab.errors import HiddenlabError, InputError
from hiddenlab.models import TruncatedModel
from hiddenlab.proposals.corpus import WINDOW_LENGTHS, Corpus
from hiddenlab.proposals.store import identity_of, load_cached, release_windows, save_cached, training_channel
from hiddenlab.types import ObservationInfo, Progress

ROWS = 12_000  # of the attacker's own text, from which readers are computed
HELD_OUT = 6  # further windows, which set temperatures and the language model's weight
STAGE = "collecting states of own text"


@dataclass(frozen=True)
class OwnText:
    """States of the attacker's own text, window behind window; the last windows are held out.

    Attributes:
        places: each row's position in its window. fitted: how many of the first rows are not held out.
    """

    states: Float[Tensor, "rows d"]
    tokens: Int[Tensor, " rows"]
    places: Int[Tensor, " rows"]
    fitted: int

    def at(self, offset: int, held_out: bool) -> tuple[Float[Tensor, "some d"], Int[Tensor, " some"]]:
        """Return rows that have a token ``offset`` positions before them (behind them if negative), and these tokens.

        First rows are left out: models attend to the first position whatever stands there, and its states are unlike
        all others.
        """
        chosen = self.places >= max(1, offset)
        if offset < 0:
            chosen[offset:] = False
            chosen[:offset] &= self.places[-offset:] > self.places[:offset]  # of the same window
        chosen[: self.fitted] &= not held_out
        chosen[self.fitted :] &= held_out
        rows = chosen.nonzero()[:, 0]
        return self.states[rows], self.tokens[rows - offset]

    def windows(self) -> list[Int[Tensor, " _"]]:
        """Return the tokens of each window."""
        starts = [*(self.places == 0).nonzero()[:, 0].tolist(), len(self.places)]
        return [self.tokens[start:end] for start, end in pairwise(starts)]

    def held_windows(self) -> list[tuple[Float[Tensor, "n d"], Int[Tensor, " n"]]]:
        """Return the states and tokens of each window that is held out."""
        starts = (self.places[self.fitted :] == 0).nonzero()[:, 0].tolist()
        sizes = [end - start for start, end in pairwise([*starts, len(self.places) - self.fitted])]
        parts = (self.states[self.fitted :].split(sizes), self.tokens[self.fitted :].split(sizes))
        return list(zip(*parts, strict=True))


def own_text(model: TruncatedModel, info: ObservationInfo, seed: int, progress: Progress) -> OwnText:
    """Return states of own text as a channel releases them, from the cache or collected now."""
    stages = training_channel(model, info)
    identity = identity_of(model, stages) | {"shard_reading": [ROWS, HELD_OUT, seed]}
    if (kept := load_cached(identity, model)) is None:
        corpus, windows, drawn = Corpus(model, seed), list[Tensor](), 0
        lengths = cycle(WINDOW_LENGTHS)  # as long as prompts are
        while drawn < ROWS:
            windows.append(corpus.text_window(next(lengths)))
            drawn += len(windows[-1])
        windows += [corpus.text_window(next(lengths)) for _ in range(HELD_OUT)]
        states, tokens, places = release_windows(model, Channel.parse(stages), windows, seed, STAGE, progress)
        kept = {
            "states": states.nan_to_num(0, 0, 0).bfloat16(), "tokens": tokens.int(), "places": places.int(),
            "fitted": torch.tensor(drawn),
        }  # fmt: skip
        with suppress(InputError):  # there is no folder to write in
            save_cached(identity, kept)
    device = model.device
    tokens, places = (kept[name].long().to(device) for name in ("tokens", "places"))
    return OwnText(kept["states"].float().to(device), tokens, places, int(kept["fitted"]))


def side_by_side(texts: Sequence[OwnText]) -> OwnText:
    """Return states of one text at several sites as if they were of one, the columns of each behind the last one's.

    Raises:
        HiddenlabError: they are not of the same text.
    """
    first = texts[0]
    if not all(torch.equal(first.tokens, text.tokens) for text in texts):
        raise HiddenlabError("states of different texts cannot stand side by side")
    return replace(first, states=torch.cat([text.states for text in texts], 1))
