"""Measure how near a row right and wrong earlier tokens come, to set the threshold of the gap search.

A wrong token before a row changes it less than a wrong token of its own, from which vocabulary matching measures its
threshold, and less the further back it stands. Where numbers are coarse or noised, wrong tokens come as near as
rounding or noise lets right ones: then the nearest is the best answer, and nothing is verified.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from hiddenlab.channels import Channel, in_order
from hiddenlab.matching.distance import Matcher
from hiddenlab.models import Request, TruncatedModel
from hiddenlab.models.tokens import longest_text
from hiddenlab.proposals.corpus import Corpus
from hiddenlab.types import ObservationInfo

WINDOWS, TOKENS = 16, 24  # of the attacker's own text, and tokens of each
BACK = (1, 2, 4, 8)  # how far before the row a token is replaced
WRONG = 8  # tokens that are tried at each
TOLERANCE = 0.01  # tokens whose embeddings differ by less than this share of the norm count as equal
FLOOR_ROOM = 8.0  # a sequence counts as right within so many times the largest right distance
# Share of the smallest wrong distance within which no wrong one is expected: in a whole vocabulary, and at rows that
# depend less on earlier tokens, wrong ones come a few times nearer than the few that are measured.
CLEAR = 0.2


@dataclass(frozen=True)
class Clearance:
    """Measured relative distances from a row.

    Attributes:
        floor: the largest of right sequences, run as the attack runs them; see ``least``.
        wrong: the smallest with one token replaced, by how far before the row it stands. resolution: of the dtype.
    """

    floor: float
    wrong: Mapping[int, float]
    resolution: float

    @property
    def least(self) -> float:
        """The floor, with a margin for errors that happened to cancel: both sides may round alike."""
        return max(self.floor, self.resolution / 4)

    def clear(self, missing: int) -> float:
        """Return the distance within which no sequence is wrong in any of so many tokens before the row."""
        return CLEAR * min(distance for back, distance in self.wrong.items() if back <= missing)

    def limit(self, missing: int, floor: float) -> float:
        """Return the distance within which a sequence counts as right, relative to the row's norm.

        Args:
            missing: unknown tokens before the row; 0 where only its own is. floor: another measurement's.
        """
        room = FLOOR_ROOM * max(self.floor, floor, self.resolution)
        return min(room, max(self.least, self.clear(missing))) if missing else room


def measure(model: TruncatedModel, info: ObservationInfo, matcher: Matcher, seed: int) -> Clearance:
    """Measure windows of text, released as by the provider, and matched behind a prefix as the attack does it.

    Args:
        info: of whole prompts (``preparations.as_whole``).
    """
    corpus, generator = Corpus(model, seed + 2), torch.Generator().manual_seed(seed)
    length = min(TOKENS, longest_text(model.module))
    text = torch.cat([corpus.text_window(length) for _ in range(WINDOWS)])  # some may be shorter
    windows = text.repeat(length)[: WINDOWS * length].view(WINDOWS, length).to(model.device)
    others = torch.randint(model.vocab_size, (WINDOWS, len(BACK), WRONG), generator=generator)
    channel = Channel.parse(info.channel)
    answers = channel.release_batch(model, windows.tolist(), generator)
    behind, floor, wrong = max(BACK) + 1, 0.0, dict.fromkeys(BACK, math.inf)
    with torch.inference_mode():
        for tokens, replaced, answer in zip(windows, others.to(model.device), answers, strict=True):
            rows = in_order(*answer).to(model.device)
            bound = matcher.bound(rows)
            row = bound.prepare(rows[-1:])
            branches = tokens[-behind:].repeat(len(BACK), WRONG, 1)
            for i, back in enumerate(BACK):
                branches[i, :, -1 - back] = replaced[i]
            prefix = model.prefix(offset=info.prefix_tokens)
            prefix.extend(tokens[:-behind])
            every = torch.cat([tokens[None, -behind:], branches.flatten(0, 1)])
            ran = model.run([Request(prefix, tokens[:0], branches=every)], keep=False)[0].branches
            states = bound.view(ran.unflatten(0, (len(every), -1))[:, -1])
            apart = matcher.pairs(candidates=states, observed=row.expand_as(states)) / matcher.norms(row)
            floor = max(floor, float(apart[0]))
            for i, (back, distances) in enumerate(zip(BACK, apart[1:].split(WRONG), strict=True)):
                right = model.embed(tokens[-1 - back : len(tokens) - back]).float()
                other = (model.embed(replaced[i]).float() - right).norm(dim=1) > TOLERANCE * right.norm()
                wrong[back] = min([wrong[back], *distances[other].tolist()])
    return Clearance(floor, wrong, torch.finfo(model.dtype).eps)
