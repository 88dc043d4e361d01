"""Learn how far, and in which directions, a channel moves rows from their plain states.

A right candidate's plain state lies as far from its row as the channel moved it. This distance depends on the row (an
attention sink's state is moved ten times further than others), and noise moves states further in some directions than
in others. Both are learned from the attacker's own texts, released as by the provider: how far similar rows were moved,
and the second moments of their displacements, by which coordinates are whitened. In whitened coordinates a Euclidean
distance weighs rare displacements more (Mahalanobis distance, with shrinkage).
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from hiddenlab.attacks.beam_decoding.features import EUCLIDEAN, ROUNDING
from hiddenlab.channels import Channel, in_order
from hiddenlab.matching.distance import Matcher
from hiddenlab.models import Prefix, Request, TruncatedModel
from hiddenlab.proposals.corpus import Corpus
from hiddenlab.utils.random import generator

TOKENS = 12_000  # of the attacker's own texts
REFERENCE = 0.75  # share of the rows that others are compared with; the rest gives the second moments
NEAREST = 8  # similar rows that are averaged
SHRUNK = 0.3  # of the mean second moment, added to each


@dataclass(frozen=True)
class DistortionModel:
    """A model of what a channel does to rows.

    Attributes:
        rows: the attacker's own rows, as released, in the matcher's form. moved: logarithm of each row's distance from
            its plain state, in the matcher's norm, at least as large as rounding makes it.
        whitening: matrix that makes the moments of displacements, each divided by its expected length, more alike in
            all directions (a moment m becomes m / (m + 0.3), in units of their mean); None where the channel moves rows
            no further than rounding does, which says nothing about directions.
    """

    matcher: Matcher
    rows: Float[Tensor, "n d"]
    moved: Float[Tensor, " n"]
    whitening: Float[Tensor, "d d"] | None

    def expected(self, shown: Float[Tensor, "rows d"]) -> Float[Tensor, " rows"]:
        """Return how far rows like these were moved, in the matcher's norm."""
        return _expected(shown, self.rows, self.moved)

    @classmethod
    def of(
        cls, matcher: Matcher, rows: Float[Tensor, "n d"], plain: Float[Tensor, "n d"]
    ) -> "DistortionModel":
        """Build the model from released rows and their plain states, both in the matcher's form."""
        cut = max(1, round(REFERENCE * len(rows)))
        distances, rounding = matcher.pairs(candidates=rows, observed=plain), ROUNDING * matcher.norms(rows)
        known, moved = rows[:cut].clone(), distances.maximum(rounding).log()[:cut]
        displaced = ((rows[cut:] - plain[cut:]) / _expected(rows[cut:], known, moved)[:, None]).double()
        values, vectors = torch.linalg.eigh(displaced.T @ displaced)
        if not bool((distances > rounding).double().mean() > 0.5 and values.mean() > 0):
            return cls(matcher, known, moved, None)
        scale = (values.clamp(min=0) / values.mean() + SHRUNK).rsqrt()
        return cls(matcher, known, moved, (vectors * scale).to(rows.dtype))


def _expected(
    shown: Float[Tensor, "rows d"], known: Float[Tensor, "n d"], moved: Float[Tensor, " n"]
) -> Float[Tensor, " rows"]:
    """Return the geometric mean of the displacements of the most similar known rows, by direction and length."""
    (direction, length), (others, lengths) = (
        (rows / norms[:, None], norms.log())
        for rows, norms in ((vectors, EUCLIDEAN.norms(vectors)) for vectors in (shown, known))
    )
    distances = torch.cdist(direction, others) + (length[:, None] - lengths).abs()
    alike = distances.topk(min(NEAREST, len(known)), largest=False).indices
    return moved[alike].mean(1).exp()


def learn_distortion_model(
    model: TruncatedModel, channel: Channel, matcher: Matcher, seed: int, before: Prefix | None = None
) -> DistortionModel:
    """Learn a distortion model from the attacker's own texts, released as the provider does.

    Args:
        before: prefix that candidates are run behind where a prompt's beginning is unknown; displacements are then
            measured from the plain states behind it.
    """
    windows = list(Corpus(model, seed + 8).windows(TOKENS))
    prefix = model.prefix() if before is None else before
    plain = [
        answer.states for answer in model.run_all([Request(prefix, window) for window in windows], keep=False)
    ]
    drawn = generator(seed, "joint", "gauge")
    released = channel.release_batch(model, [window.tolist() for window in windows], drawn)
    shown = [in_order(observation, truth).to(model.device) for observation, truth in released]
    return DistortionModel.of(matcher, matcher.prepare(torch.cat(shown)), matcher.view(torch.cat(plain)))
