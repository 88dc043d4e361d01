"""How far, and in which directions, the channel moves rows like some that are observed.

A right candidate's plain state lies as far from its row as the channel moved it: how far that is depends on the row (an
attention sink's state is moved ten times further than others), and noise moves states further in some directions than
in others. Both are learned from texts of the attacker's own, released as by the provider: how far rows that look alike
were moved, and the second moments of their displacements, by which coordinates are whitened. In these a Euclidean
distance counts what the channel seldom does (Mahalanobis, shrunk).
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from attacks.joint.evidence import EUCLIDEAN, ROUNDING
from hiddenlab.channel import Channel, in_order
from hiddenlab.job import generator
from hiddenlab.match import Matcher
from hiddenlab.propose.corpus import Corpus
from hiddenlab.slice import Slice

TOKENS = 12_000  # of the attacker's own texts
REFERENCE = 0.75  # share of the rows that others are compared with; the rest says which directions count
NEAREST = 8  # rows that are taken to be alike
SHRUNK = 0.3  # of the mean second moment, added to each
LEAST = 1e-12  # distances are no smaller, so that their logarithms are finite


@dataclass(frozen=True)
class Gauge:
    """What the channel does to rows.

    Attributes:
        rows: the attacker's own, as released, in the matcher's form. moved: logarithms of how far each is from its
            plain state, in the matcher's norm.
        whitening: displacements over what is expected, times this, have moments that are alike in all directions;
            None where the channel moves rows no further than rounding does, which says nothing of directions.
    """

    matcher: Matcher
    rows: Float[Tensor, "n d"]
    moved: Float[Tensor, " n"]
    whitening: Float[Tensor, "d d"] | None

    def expected(self, shown: Float[Tensor, "rows d"]) -> Float[Tensor, " rows"]:
        """How far rows like these were moved, in the matcher's norm: no less than rounding moves them."""
        return _expected(shown, self.rows, self.moved, self.matcher)

    @classmethod
    def of(cls, matcher: Matcher, rows: Float[Tensor, "n d"], plain: Float[Tensor, "n d"]) -> "Gauge":
        """From released rows and their plain states, both in the matcher's form."""
        cut = max(1, round(REFERENCE * len(rows)))
        moved = matcher.pairs(candidates=rows, observed=plain).clamp(min=LEAST).log()
        known, own = rows[:cut], moved[:cut]
        if bool((moved.exp() / matcher.norms(rows)).median() <= ROUNDING):
            return cls(matcher, known, own, None)
        displaced = rows[cut:] - plain[cut:]
        displaced = (displaced / _expected(rows[cut:], known, own, matcher)[:, None]).double()
        values, vectors = torch.linalg.eigh(displaced.T @ displaced)
        scale = (values.clamp(min=0) / values.mean() + SHRUNK).rsqrt()
        return cls(matcher, known, own, (vectors * scale).to(rows.dtype))


def _expected(
    shown: Float[Tensor, "rows d"], known: Float[Tensor, "n d"], moved: Float[Tensor, " n"], matcher: Matcher
) -> Float[Tensor, " rows"]:
    """The geometric mean of what those of some rows were moved that are alike: in direction, and in length."""
    (direction, length), (others, lengths) = (
        (rows / norms[:, None], norms.log())
        for rows, norms in ((one, EUCLIDEAN.norms(one)) for one in (shown, known))
    )
    apart = torch.cdist(direction, others) + (length[:, None] - lengths).abs()
    alike = apart.topk(min(NEAREST, len(known)), largest=False).indices
    return moved[alike].mean(1).exp().maximum(ROUNDING * matcher.norms(shown))


def learn_gauge(slice: Slice, channel: Channel, matcher: Matcher, seed: int) -> Gauge:
    """A gauge from texts of the attacker's own, released as the provider does."""
    corpus = Corpus(slice, seed + 8)
    windows = [one.tolist() for one in corpus.windows(TOKENS)]
    shown, plain = list[Tensor](), list[Tensor]()
    released = channel.release_batch(slice, windows, generator(seed, "joint", "gauge"))
    for window, (one, secret) in zip(windows, released, strict=True):
        shown.append(matcher.prepare(in_order(one, secret).to(slice.device)))
        plain.append(matcher.view(slice.encode(torch.tensor(window, device=slice.device))))
    return Gauge.of(matcher, torch.cat(shown), torch.cat(plain))
