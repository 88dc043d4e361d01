"""Read a CompNode's sums of each key shard as spans, without knowing any token exactly.

Rows that see the same keys of a shard mix the same value vectors. So the sums span a small space, and their columns,
one number for each row and query head, span another. A value vector lies in the first space, and the softmax weights of
its key in the second. Rows further back mix the keys of later clusters as well. What earlier rows span is taken out of
their sums then, so that nothing has to be known of the earlier keys.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from hiddenlab.attacks.partial_sums.sums import View, with_mass
from hiddenlab.matching.first_layer import AttentionHeads
from hiddenlab.sharding import ROOM

WEAKEST = 1e-5  # singular values below this share of the largest are too near to rounding to tell a direction
RIDGE = 1e-10  # of the covariance of weights beside their own length


@dataclass(frozen=True)
class HeadSpan:
    """What the sums of one key/value head span.

    Attributes:
        point, along: the affine space in which the unknown value vectors lie. columns: orthonormal, what no weights of
            the unknown keys have. basis, known: orthonormal directions, of a 1 and a value vector, that these sums add,
            and those of earlier keys. complete: whether each unknown key has a direction of its own.
    """

    point: Float[Tensor, " dv"]
    along: Float[Tensor, "k dv"]
    columns: Float[Tensor, "mixes free"]
    basis: Float[Tensor, "n width"]
    known: Float[Tensor, "other width"]
    complete: bool


@dataclass(frozen=True)
class Cluster:
    """Keys of one shard that the same rows show first.

    Attributes:
        new: their positions. positions: of the rows. queries, scale: of each head and row; weights are relative to the
            exponential of the scale.
    """

    layer: AttentionHeads
    new: list[int]
    positions: list[int]
    queries: Float[Tensor, "h rows d"]
    scale: Float[Tensor, "h rows"]
    heads: list[HeadSpan]

    @property
    def readable(self) -> bool:
        """Whether some head shows a wrong value vector, and gives each key a direction."""
        return any(head.complete and _room(head) >= ROOM for head in self.heads)

    def values_left(
        self, values: Float[Tensor, "c w"], whitener: Float[Tensor, "w w"]
    ) -> Float[Tensor, " c"]:
        """Return the mean square, in units of the noise, of what no mix of directions explains of value vectors.

        Args:
            values: expected ones. whitener: such that whitened noise has unit variance in each direction.
        """
        point, basis, free = self._joint(whitener)
        rest = (values.double() - point) @ whitener
        rest = rest - rest @ basis.T @ basis
        return rest.square().sum(1) / free

    def _joint(self, whitener: Float[Tensor, "w w"]) -> tuple[Float[Tensor, " w"], Float[Tensor, "k w"], int]:
        """Return the affine space of all heads side by side, whitened, and how many directions it leaves.

        A head that lacks a direction excludes nothing.
        """
        width = len(self.heads[0].point)
        blocks = []
        for i, head in enumerate(self.heads):
            along = head.along if head.complete else torch.eye(width, dtype=torch.float64)
            block = along.new_zeros(len(along), width * len(self.heads))
            block[:, i * width : (i + 1) * width] = along
            blocks.append(block)
        basis = torch.linalg.qr((torch.cat(blocks) @ whitener).T)[0].T
        return torch.cat([head.point for head in self.heads]), basis, max(1, len(whitener) - len(basis))

    def weights_nats(
        self,
        keys: Float[Tensor, "c w"],
        position: int,
        covariance: Float[Tensor, "w w"],
        scale: Float[Tensor, " c"],
    ) -> Float[Tensor, " c"]:
        """Return the log density with which weights of keys lie among the columns of the sums, to first order.

        Args:
            keys: expected ones. covariance: of their noise. scale: of each one's variance.
        """
        groups, width = self.layer.groups, keys.shape[1] // len(self.heads)
        scores = self.layer.scored(self.queries.double(), keys.double()) - self.scale[..., None]
        seen = self.layer.attention.visible(self.positions, [position])
        weights = scores.exp().masked_fill(~seen, 0.0)
        nats = torch.zeros(len(keys), dtype=torch.float64)
        for i, head in enumerate(self.heads):
            if not head.columns.shape[1]:
                continue
            own = slice(i * groups, (i + 1) * groups)
            mixes = weights[own].flatten(0, 1)
            mixes = (mixes / mixes.norm(dim=0).clamp(min=1e-300)).T
            part = slice(i * width, (i + 1) * width)
            # A weight changes by itself times the change of its score.
            moved = mixes[:, :, None] * head.columns
            queries = self.queries[own].flatten(0, 1).double() * self.layer.attention.scaling
            spread = moved.transpose(1, 2) @ (queries @ covariance[part, part] @ queries.T @ moved)
            spread = spread * scale[:, None, None] + RIDGE * torch.eye(moved.shape[2], dtype=torch.float64)
            rest = mixes @ head.columns
            square = (rest * torch.linalg.solve(spread, rest[..., None])[..., 0]).sum(1)
            nats -= (square + torch.logdet(spread)) / 2
        return nats

    def missing(self, values: Float[Tensor, "n w"]) -> float:
        """Return the logarithm of the share of the sums' directions that the values of all new keys do not span."""
        shares = []
        for head, part in zip(
            self.heads, values.double().unflatten(1, (len(self.heads), -1)).unbind(1), strict=True
        ):
            if head.complete:
                rows = with_mass(part)
                rows = rows - rows @ head.known.T @ head.known
                spanned = torch.linalg.qr(rows.T)[0]
                shares.append(1 - (head.basis @ spanned).square().sum() / len(head.basis))
        return float(torch.stack(shares).mean().clamp(min=1e-12).log())


def _room(head: HeadSpan) -> int:
    return len(head.point) - len(head.along)


def clusters_of(view: View, layer: AttentionHeads, queries: Float[Tensor, "h rows d"]) -> dict[int, Cluster]:
    """Return for each position of another node that some row shows the cluster that it is in.

    Clusters with fewer mixes than keys are left out, and all behind them in the same shard.
    """
    assert view.divisor is not None
    found = dict[int, Cluster]()
    held, last = set(view.positions), view.positions[-1]
    for index, keys in enumerate(view.shards):
        unknown = [s for s in keys if s not in held and s < last]
        before, groups = 0, dict[int, list[int]]()
        for row, position in enumerate(view.positions):
            groups.setdefault(sum(s <= position for s in unknown), []).append(row)
        removed: list[Tensor] = []
        for count, rows in sorted(groups.items()):
            new = unknown[before:count]
            if not new:
                continue
            if len(rows) * layer.groups < len(new):
                break
            cluster, spans = _cluster(view, layer, index, rows, queries[:, rows], new, removed)
            found |= dict.fromkeys(new, cluster)
            removed = [torch.cat(both) for both in zip(removed, spans, strict=True)] if removed else spans
            before = count
    return found


def _cluster(
    view: View,
    layer: AttentionHeads,
    index: int,
    rows: list[int],
    queries: Float[Tensor, "h some d"],
    new: list[int],
    removed: Sequence[Tensor],
) -> tuple[Cluster, list[Tensor]]:
    """Return a cluster, and what its rows span of each key/value head beside what is removed."""
    assert view.divisor is not None
    sees = view.sees[index, rows].T[..., None]
    shown = torch.cat([sees, view.output[index, rows].transpose(0, 1)], -1).double()
    heads, spans = [], []
    for i, sums in enumerate(shown.unflatten(0, (-1, layer.groups)).flatten(1, 2)):
        known = removed[i] if removed else sums[:0]
        columns, sizes, basis = torch.linalg.svd(sums - sums @ known.T @ known)
        rank = min(len(new), int((sizes > WEAKEST * sums.norm()).sum()))
        spans.append(basis[:rank])
        mixed = torch.cat([basis[:rank], known])
        # A value vector with a 1 before it is a mix: its first number is known.
        mass = mixed[:, 0]
        point = mass / mass.square().sum().clamp(min=1e-300) @ mixed[:, 1:]
        along = torch.linalg.svd(mass[None])[2][1:] @ mixed[:, 1:]
        heads.append(HeadSpan(point, along, columns[:, rank:], basis[:rank], known, rank == len(new)))
    positions = [view.positions[row] for row in rows]
    return Cluster(layer, new, positions, queries, view.divisor[index, rows].T.double(), heads), spans
