"""Read a CompNode's attention sums as equations: what unknown keys add to them, and which values can be in them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import normalize

from hiddenlab.errors import InputError
from hiddenlab.matching.first_layer import AttentionHeads
from hiddenlab.sharding import rows_for_span
from hiddenlab.types import Observation

NOISE = 1e-6  # singular values below this share of the largest are rounding
BESIDE_KNOWN = 3e-7  # the same where mixes of known value vectors are removed from normalized outputs
KNOWN = (
    1e-9  # the same of these mixes; and what of a value vector's square they must leave, to be told from them
)


@dataclass(frozen=True)
class View:
    """A node's combined view: its own rows, and outputs by key shard, or with masked sums the attention output.

    Attributes:
        own: states that enter the layer. divisor: log of what each shard's weights were divided by, ``[shards, rows,
            h]``; None where the node does not learn it. sees: 1 where a row sees a key of the shard. output: ``[shards,
            rows, h, dv]``. shards: positions of each key shard.
    """

    positions: list[int]
    own: Float[Tensor, "rows d"]
    divisor: Float[Tensor, "s rows h"] | None
    sees: Float[Tensor, "s rows h"]
    output: Float[Tensor, "s rows h dv"]
    shards: list[list[int]]

    @classmethod
    def of(cls, observation: Observation, device: torch.device) -> "View":
        """Take a recorded view apart.

        Raises:
            InputError: the columns do not fit the facts.
        """
        facts, positions = observation.info.facts, list(observation.info.positions or ())
        heads, width = int(facts["heads"]), int(facts["own"])
        rows = observation.states.to(device).float()
        own, parts = rows[:, :width], rows[:, width:]
        if "shards" not in facts:
            if not parts.shape[1] or parts.shape[1] % heads:
                raise InputError(f"{parts.shape[1]} columns do not hold the output of {heads} heads")
            output = parts.unflatten(1, (heads, -1))[None]
            every = list(range(positions[-1] + 1))
            return cls(positions, own, None, torch.ones_like(output[..., 0]), output, [every])
        shards = [list(map(int, s)) for s in facts["shards"]]
        if not shards or parts.shape[1] % (len(shards) * heads) or parts.shape[1] < 3 * len(shards) * heads:
            raise InputError(
                f"{parts.shape[1]} columns do not hold m, e and u of {len(shards)} shards and {heads} heads"
            )
        # m, e and u of all heads stand side by side, a shard after another
        each = parts.unflatten(1, (len(shards), -1)).transpose(0, 1)
        maximum, total, output = each[..., :heads], each[..., heads : 2 * heads], each[..., 2 * heads :]
        some = total > 0  # otherwise the row sees no key of the shard, and its numbers are meaningless
        divisor = torch.where(some, maximum + total.clamp(min=1e-30).log(), 0.0)
        return cls(positions, own, divisor, some.to(rows), output.unflatten(2, (heads, -1)), shards)

    @property
    def row_of(self) -> dict[int, int]:
        """The row of each position."""
        return {position: row for row, position in enumerate(self.positions)}

    def check(self, layer: AttentionHeads) -> None:
        """Refuse outputs of other heads than the layer has.

        Raises:
            InputError: they have another number or width.
        """
        if self.output.shape[2:] != (layer.heads, layer.value_width):
            raise InputError(
                "the view holds outputs of {} heads with {} numbers each, where the model has {} with {}".format(
                    *self.output.shape[2:], layer.heads, layer.value_width
                )
            )


@dataclass(frozen=True)
class Step:
    """Rows that see the same unknown keys, and what these contribute to them.

    Contributions are weights times a 1 and the value vector, less ``centre``. With divisors the centre is 0, and
    ``left`` the shard's sums without the known keys. Without, the centre is the output o: over all keys, exp(score)
    (v - o) adds up to 0, so that ``left`` is what known keys lack.

    Attributes:
        queries: of each head and row. scale: log of what weights are relative to. left: what the contributions add up
            to. spanning: rows that mix the unknown value vectors, and beside them those in ``removed``, to an unknown
            share. new: positions of the unknown keys. positions: of the rows.
    """

    layer: AttentionHeads
    queries: Float[Tensor, "h rows d"]
    scale: Float[Tensor, "h rows"]
    left: Float[Tensor, "h rows width"]
    centre: Float[Tensor, "h rows width"]
    spanning: Float[Tensor, "h some width"]
    removed: Float[Tensor, "h other width"]
    new: list[int]
    positions: list[int]

    def weights(self, keys: Float[Tensor, "c w"], position: int) -> Float[Tensor, "h rows c"]:
        """Return the softmax weights of tokens with these keys at a position, for every row."""
        scores = self.layer.scored(self.queries, keys).double()
        seen = self.layer.attention.visible(self.positions, [position]).to(scores.device)
        return (scores - self.scale[..., None]).exp().masked_fill(~seen, 0.0)

    @cached_property
    def spans(self) -> list[tuple[Float[Tensor, "k dv"], Float[Tensor, "b dv"]]]:
        """For each key/value head, directions of what is removed, and those that mixes of unknown values span."""
        kv, found = len(self.spanning) // self.layer.groups, list[tuple[Tensor, Tensor]]()
        for rows, removed in zip(
            *(part[..., 1:].unflatten(0, (kv, -1)) for part in (self.spanning, self.removed)), strict=True
        ):
            known, rows = directions(removed.flatten(0, 1), KNOWN), rows.flatten(0, 1)
            noise = NOISE
            if len(known):
                rows, noise = normalize(rows, dim=1), BESIDE_KNOWN
            basis = directions(rows - rows @ known.T @ known, noise)[: len(self.new)]
            found.append((known, basis))
        return found

    @property
    def room(self) -> list[int]:
        """For each key/value head, in how many directions a wrong value vector shows.

        0 where there are fewer mixes than unknown keys: a right vector lies outside of their span as well.
        """
        width, mixes = self.spanning.shape[2] - 1, self.spanning.shape[1] * self.layer.groups
        enough = mixes >= len(self.new)
        return [max(0, width - len(known) - len(basis)) * enough for known, basis in self.spans]

    def outside(self, values: Float[Tensor, "c w"]) -> Float[Tensor, "c kv"]:
        """Return which share of each value vector's square lies outside of the span of the sums, by key/value head.

        It is no number where nothing is left of a vector beside what is removed, so that nothing can be said of it.
        """
        parts, shares = values.unflatten(1, (len(self.spans), -1)).double(), list[Tensor]()
        for part, (known, basis) in zip(parts.unbind(1), self.spans, strict=True):
            whole = part.square().sum(1)
            size = whole - (part @ known.T).square().sum(1)
            beyond = (size - (part @ basis.T).square().sum(1)).clamp(min=0) / size.clamp(min=1e-30)
            shares.append(torch.where(size > KNOWN * whole, beyond, torch.nan))
        return torch.stack(shares, 1)


def step_of(
    view: View,
    layer: AttentionHeads,
    index: int,
    rows: list[int],
    queries: Float[Tensor, "h rows d"],
    places: Sequence[int],
    keys: Float[Tensor, "n k"],
    values: Float[Tensor, "n v"],
    new: list[int],
    room: int = 1,
) -> Step | None:
    """Return what some rows show of the new keys of a shard, without the contributions of known keys.

    None where attention outputs are of too few rows.

    Args:
        index: of the key shard. queries: of these rows. places, keys, values: of the shard's known keys. new: positions
            of its unknown keys that the rows see. room: see ``rows_for_span``.
    """
    positions = [view.positions[row] for row in rows]
    sees = view.sees[index, rows].T[..., None]
    shown = torch.cat([sees, view.output[index, rows].transpose(0, 1)], -1).double()
    scores, mixed = shown.new_zeros(*shown.shape[:2], 0), shown.new_zeros(len(shown), 0, shown.shape[2])
    if len(places):
        hidden = ~layer.attention.visible(positions, places).to(keys.device)
        scores = layer.scored(queries, keys).double().masked_fill(hidden, -torch.inf)
        mixed = with_mass(layer.spread(values.double())).transpose(0, 1)
    if view.divisor is not None:
        scale = view.divisor[index, rows].T.double()
        left = shown - (scores - scale[..., None]).exp() @ mixed
        return Step(layer, queries, scale, left, torch.zeros_like(left), left, left[:, :0], new, positions)
    # Weights are relative to those of the known keys together; a row's own is always one of them.
    scale = scores.logsumexp(2)
    known = (scores - scale[..., None]).exp() @ mixed
    count = rows_for_span(len(rows), layer.groups, len(places), len(new), shown.shape[2] - 1, room)
    if not count:
        return None
    left, spanning, removed = shown - known, shown[:, -count:], known[:, -count:]
    return Step(layer, queries, scale, left, shown, spanning, removed, new, positions)


def with_mass(values: Float[Tensor, "*shape dv"]) -> Float[Tensor, "*shape width"]:
    """Return value vectors behind a 1, so that a weighted sum of them begins with the sum of the weights."""
    return torch.cat([torch.ones_like(values[..., :1]), values], -1)


def directions(rows: Float[Tensor, "r dv"], noise: float) -> Float[Tensor, "s dv"]:
    """Return orthonormal directions that rows span, the strongest first; weaker ones than a share are rounding."""
    _, sizes, basis = torch.linalg.svd(rows, full_matrices=False)
    return basis[sizes > noise * sizes.amax()] if len(rows) else basis
