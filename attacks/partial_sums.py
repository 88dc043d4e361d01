"""Recover tokens from the partial attention sums that a CompNode receives at the first layer.

See the paper, Theorem 7.3 and appendix P. For each of its rows r and each key shard a CompNode receives m, e and u.
From these follows the sum over the shard's visible keys s of p(r, s) [1, v(s)], p being softmax weights. At the first
layer p and v depend on one unknown token each, and the node knows its own queries. Appendix P.2 calls finding the
tokens of such a sum a subset-sum problem, and assumption B2 takes it to be intractable. It is not: all rows of one
cluster and all query heads of one key/value head mix the *same* few value vectors with different weights, so that these
span the rows' common space. A token is in the sum if and only if its value vector lies in that span (the idea of MUSIC
in array processing): one projection of the vocabulary finds the tokens, whatever their positions. Their positions
follow from the weights, by non-negative least squares over a handful of candidates. Under (c, delta)-sharding with m
splits there are c/m unknown tokens and c rows at every step with a full cluster, so there are enough equations.
"""

import math
import time
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Float, Int
from scipy.optimize import nnls
from torch import Tensor

from hiddenlab.base import Attack
from hiddenlab.errors import InputError, NotApplicableError
from hiddenlab.matching.first_layer import FirstLayer
from hiddenlab.models import TruncatedModel
from hiddenlab.types import AttackResult, Observation, ObservationInfo, TokenPrediction

NOISE = 1e-4  # singular values below this share of the largest are rounding
EXPLAINED = 1e-6  # share of a sum's square that the right tokens leave unexplained, at most
CANDIDATES = 4  # candidates of a missing token that are compared with their weights
SWEEPS, STARTS = 20, 16


class PartialSums(Attack):
    """Recover the tokens before a CompNode's last row from what it receives at the first layer.

    Needs a CompNode's stream ``attn`` at layer 1 of ``hiddenlab cascade run --record``: its embeddings, and m, e, u of
    every key shard. A sum that is explained exactly verifies its tokens; their distance is the share of the
    sum's square that stays unexplained.

    Knows: the weights of the first layer, the plan, what the node holds and receives. Does not know: other nodes' rows.

    Args:
        candidates: tokens compared for each missing one.
    """

    use_when = (
        "you have a recorded Cascade run: the sums m, e and u that a CompNode receives at the first layer"
    )

    def __init__(self, candidates: int = CANDIDATES) -> None:
        if candidates < 1:
            raise InputError(f"candidates must be at least 1, not {candidates}")
        self.candidates = candidates
        self._layer: tuple[TruncatedModel, FirstLayer] | None = None

    def _fit(self, info: ObservationInfo) -> dict[str, float | str]:
        """Load the first layer's projections and tabulate the vocabulary's value vectors, once for each model."""
        layer = self._first(self.model)
        if not layer.moves:
            layer.values(0)
        return {}

    def _first(self, model: TruncatedModel) -> "FirstLayer":
        if self._layer is None or self._layer[0] is not model:
            self._layer = model, FirstLayer(model)
        return self._layer[1]

    def _recover(self, observation: Observation) -> AttackResult:
        """Recover one prompt up to the node's last row.

        Raises:
            NotApplicableError: the observation is no CompNode's combined view of the first layer.
        """
        facts, info = observation.info.facts, observation.info
        if not {"heads", "shards", "embed"} <= set(facts) or info.positions is None or info.site.layer != 1:
            raise NotApplicableError(
                "this attack reads a CompNode's combined view of layer 1 (--stream attn of 'cascade run --record')"
            )
        layer = self._first(self.model)
        started, before = time.perf_counter(), layer.counters()
        with torch.inference_mode():
            view = _View.of(observation, self.model.device)
            own = layer.own_tokens(view.embeddings, view.positions)
            known = dict(zip(view.positions, own, strict=True))
            heads = view.total.shape[2]
            queries = layer.along(layer.q, known)[view.positions].unflatten(1, (heads, -1)).transpose(0, 1)
            held = set(known)
            verified = dict.fromkeys(known, True)
            left = dict.fromkeys(known, math.nan)  # own tokens are looked up, not explained
            for index, keys in enumerate(view.shards):
                self.progress("key shards", index, len(view.shards))
                visible = [s for s in keys if s <= view.positions[-1]]
                steps = _Shard(layer, view, queries, index, visible, held)
                solved, sure = steps.solve(known, self.candidates, self.seed)
                known |= solved
                verified |= sure
                left |= steps.left
        positions = sorted(known)
        row_of = {position: row for row, position in enumerate(view.positions)}
        tokens = tuple(
            TokenPrediction(known[p], row_of.get(p, -1), left[p], None, 0, verified[p]) for p in positions
        )
        complete = positions == list(range(len(positions)))
        positions_run, passes = (now - then for now, then in zip(layer.counters(), before, strict=True))
        return AttackResult(
            tokens,
            positions_run,
            passes,
            time.perf_counter() - started,
            "complete",
            positions=None if complete else tuple(positions),
        )

    def __repr__(self) -> str:
        return (
            "PartialSums: knows the first layer's weights, the plan and what one CompNode holds and receives, not the "
            "other rows or tokens"
        )


@dataclass(frozen=True)
class _View:
    """A node's combined view.

    Attributes:
        maximum, total: ``[shards, rows, h]``. output: ``[shards, rows, h, dv]``. shards: positions of each key shard.
    """

    positions: list[int]
    embeddings: Float[Tensor, "rows d"]
    maximum: Float[Tensor, "s rows h"]
    total: Float[Tensor, "s rows h"]
    output: Float[Tensor, "s rows h dv"]
    shards: list[list[int]]

    @classmethod
    def of(cls, observation: Observation, device: torch.device) -> "_View":
        facts = observation.info.facts
        heads, shards, width = (
            int(facts["heads"]),
            [list(map(int, s)) for s in facts["shards"]],
            int(facts["embed"]),
        )
        rows = observation.states.to(device).float()
        parts = rows[:, width:]
        if not shards or parts.shape[1] % (len(shards) * heads) or parts.shape[1] < 3 * len(shards) * heads:
            raise InputError(
                f"{parts.shape[1]} columns do not hold m, e and u of {len(shards)} shards and {heads} heads"
            )
        # m, e and u of all heads stand side by side, a shard after another
        each = parts.unflatten(1, (len(shards), -1)).transpose(0, 1)
        maximum, total, output = each[..., :heads], each[..., heads : 2 * heads], each[..., 2 * heads :]
        return cls(
            list(observation.info.positions or ()), rows[:, :width], maximum, total,
            output.unflatten(2, (heads, -1)), shards,
        )  # fmt: skip


@dataclass
class _Shard:
    """One key shard's sums, solved from the first rows to the last."""

    layer: FirstLayer
    view: _View
    queries: Float[Tensor, "h rows d"]
    index: int
    keys: list[int]
    held: set[int]
    exact: dict[int, bool] = field(default_factory=dict)
    left: dict[int, float] = field(default_factory=dict)

    def solve(
        self, known: dict[int, int], candidates: int, seed: int
    ) -> tuple[dict[int, int], dict[int, bool]]:
        """Return the tokens of the shard's unknown keys, and whether the sums they are in were explained."""
        unknown = [s for s in self.keys if s not in self.held]
        solved: dict[int, int] = {}
        groups: dict[int, list[int]] = {}
        for row, position in enumerate(self.view.positions):
            groups.setdefault(sum(s <= position for s in unknown), []).append(row)
        before = 0
        for count, rows in sorted(groups.items()):
            # A sliding window may hide a key from every row: it cannot be found then.
            positions = [self.view.positions[row] for row in rows]
            seen = self.layer.attention.visible(positions, unknown[before:count]).any(0)
            if new := [s for s, shown in zip(unknown[before:count], seen.tolist(), strict=True) if shown]:
                step = self._step(rows, self._seen(rows, known | solved), new)
                tokens, left = step.solve(candidates, seed)
                # A fit that rests on a wrong token verifies nothing.
                sure = left < EXPLAINED and all(self.exact.values())
                solved |= tokens
                self.exact |= dict.fromkeys(new, sure)
                self.left |= dict.fromkeys(new, left)
            before = count
        return solved, self.exact

    def _seen(self, rows: list[int], known: dict[int, int]) -> dict[int, int]:
        last = self.view.positions[rows[-1]]
        return {s: known[s] for s in self.keys if s in known and s <= last}

    def _step(self, rows: list[int], seen: dict[int, int], new: list[int]) -> "_Step":
        """Return the sums of some rows over the new keys, with the contributions of known keys subtracted."""
        view, layer = self.view, self.layer
        total = view.total[self.index, rows].T
        some = total > 0  # otherwise the row sees no key of the shard, and its numbers are meaningless
        scale = torch.where(some, view.maximum[self.index, rows].T + total.clamp(min=1e-30).log(), 0.0)
        sums = view.output[self.index, rows].transpose(0, 1).clone()
        positions = [view.positions[row] for row in rows]
        step = _Step(layer, self.queries[:, rows], scale, some.to(scale), sums, new, positions)
        if seen:
            keys, values = layer.along(layer.k, seen), layer.along(layer.v, seen)
            for position in seen:
                weights = step.weights(keys[position][None], position)[:, :, 0]
                step.mass.sub_(weights)
                step.sums.sub_(weights[..., None] * step.spread(values[position][None])[:, :, 0])
        return step


@dataclass(frozen=True)
class _Step:
    """Rows that see the same unknown keys, and what these contribute to them.

    Attributes:
        queries: ``[h, rows, d]``. scale: ``[h, rows]``, log of the divisor of the weights. mass, sums: what the unknown
            keys contribute, ``[h, rows]`` and ``[h, rows, dv]``. new: their positions.
    """

    layer: FirstLayer
    queries: Float[Tensor, "h rows d"]
    scale: Float[Tensor, "h rows"]
    mass: Float[Tensor, "h rows"]
    sums: Float[Tensor, "h rows dv"]
    new: list[int]
    positions: list[int]

    def weights(self, keys: Float[Tensor, "c w"], position: int) -> Float[Tensor, "h rows c"]:
        """Return the softmax weights of tokens with these keys at a position, for every row."""
        scores = self.layer.scored(self.queries, keys)
        seen = self.layer.attention.visible(self.positions, [position]).to(scores.device)
        return (scores - self.scale[..., None]).exp().masked_fill(~seen, 0.0)

    def spread(self, values: Float[Tensor, "c w"]) -> Float[Tensor, "h 1 c dv"]:
        """Return value vectors for every query head."""
        return self.layer.spread(values).transpose(0, 1)[:, None]

    def shortlist(self, count: int) -> Int[Tensor, "n c"]:
        """Return for each missing position the tokens whose value vectors lie nearest to the span of the sums."""
        lists = []
        for position in self.new:
            values = self.layer.values(position)
            kv = values.shape[1] // self.sums.shape[2]
            outside = torch.zeros(len(values), device=values.device)
            for g in range(kv):
                own = values.view(len(values), kv, -1)[:, g]
                rows = self.sums.unflatten(0, (kv, -1))[g].flatten(0, 1)
                _, sizes, basis = torch.linalg.svd(rows, full_matrices=False)
                basis = basis[: len(self.new)][sizes[: len(self.new)] > NOISE * sizes[0]]
                total = own.square().sum(1).clamp(min=1e-30)
                outside += 1 - (own @ basis.T).square().sum(1) / total
            lists.append(outside.topk(min(count, len(values)), largest=False).indices)
            if not self.layer.moves:
                return lists[0].expand(len(self.new), -1)
        return torch.stack(lists)

    def solve(self, candidates: int, seed: int) -> tuple[dict[int, int], float]:
        """Return the tokens of the missing positions, and the share of the sums' square that they leave unexplained."""
        tokens = self.shortlist(max(16, candidates * len(self.new)))
        atoms = []
        for position, own in zip(self.new, tokens, strict=True):
            weights = self.weights(self.layer.keys(own, position), position)
            values = self.spread(self.layer.values(position)[own])
            parts = torch.cat([weights[..., None], weights[..., None] * values], -1)
            atoms.append(parts.permute(2, 0, 1, 3).flatten(1))
        dictionary = torch.stack(atoms).double()  # [n, c, equations]
        target = torch.cat([self.mass[..., None], self.sums], -1).flatten().double()
        chosen, left = _one_of_each(dictionary, target, seed)
        return {p: int(tokens[i, chosen[i]]) for i, p in enumerate(self.new)}, left


def _one_of_each(
    dictionary: Float[Tensor, "n c equations"], target: Float[Tensor, " equations"], seed: int
) -> tuple[list[int], float]:
    """Choose one atom of each of n lists so that they add up to the target; also return the unexplained share.

    The share is of the target's square. Non-negative least squares over all atoms gives a start. Then each list's atom
    is chosen again with the others held, from several starts, until nothing changes.
    """
    n, c, _ = dictionary.shape
    flat = dictionary.flatten(0, 1)
    gram, along = (flat @ flat.T).cpu().numpy(), (flat @ target).cpu().numpy()
    total = float(target.square().sum())
    # This has the same minimum as the equations themselves, which are many more than the atoms.
    root = np.linalg.cholesky(gram + 1e-12 * np.trace(gram) / len(gram) * np.eye(len(gram)))
    relaxed = nnls(root.T, np.linalg.solve(root, along))[0].reshape(n, c)
    draw = np.random.default_rng(seed)
    best: tuple[float, list[int]] | None = None
    for start in range(STARTS):
        noise = 0.0 if start == 0 else draw.gumbel(size=(n, c)) * 0.3
        chosen = [int(i) for i in (np.log(relaxed + 1e-9) + noise).argmax(1)]
        for _ in range(SWEEPS):
            before = list(chosen)
            for i in draw.permutation(n):
                others = [j * c + chosen[j] for j in range(n) if j != i]
                own = slice(i * c, (i + 1) * c)
                cost = np.diag(gram)[own] - 2 * (along[own] - gram[own][:, others].sum(1))
                chosen[i] = int(cost.argmin())
            if chosen == before:
                break
        places = [j * c + chosen[j] for j in range(n)]
        left = float(total - 2 * along[places].sum() + gram[np.ix_(places, places)].sum()) / total
        if best is None or left < best[0]:
            best = left, chosen
        if best[0] < EXPLAINED:
            break
    assert best is not None
    return best[1], max(0.0, best[0])
