"""Recover tokens from the attention sums that a CompNode receives at the first layer.

See the paper, Theorem 7.3 and appendix P. For each of its rows r and each key shard a CompNode receives m, e and u.
From these follows the sum over the shard's visible keys s of p(r, s) [1, v(s)], p being softmax weights. At the first
layer p and v depend on one unknown token each, and the node knows its own queries. Appendix P.2 calls finding the
tokens of such a sum a subset-sum problem, and assumption B2 takes it to be intractable. It is not: all rows of one
cluster and all query heads of one key/value head mix the *same* few value vectors with different weights, so that these
span the rows' common space. A token is in the sum if and only if its value vector lies in that span (the idea of MUSIC
in array processing): one projection of the vocabulary finds the tokens, whatever their positions. Their positions
follow from the weights, by non-negative least squares over a handful of candidates. Under (c, delta)-sharding with m
splits there are c/m unknown tokens and c rows at every step with a full cluster, so there are enough equations.

With masked sums a CompNode gets the attention output alone, over all keys and without the divisor. The known tokens'
part of it is then known up to a factor for each row and head. Without the directions of these parts, the outputs still
span what the unknown value vectors span. The weights need no divisor either: over all keys, exp(score) (v - o) adds up
to 0, o being the output. So the tokens of a gap follow, and their order, where they are at most as many as the rows
behind it have query heads for a key/value head.
"""

import math
import time
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Float, Int
from scipy.optimize import nnls
from torch import Tensor
from torch.nn.functional import normalize

from hiddenlab.base import Attack
from hiddenlab.errors import InputError, NotApplicableError
from hiddenlab.matching.first_layer import FirstLayer
from hiddenlab.models import TruncatedModel
from hiddenlab.sharding import rows_for_span
from hiddenlab.text import count_of
from hiddenlab.types import AttackResult, Observation, ObservationInfo, TokenPrediction

NOISE = 1e-4  # singular values below this share of the largest are rounding
BESIDE_KNOWN = 3e-7  # the same where mixes of known value vectors are removed from normalized outputs
KNOWN = (
    1e-9  # the same of these mixes; and what of a value vector's square they must leave, to be told from them
)
EXPLAINED = 1e-6  # share of a sum's square that the right tokens leave unexplained, at most
LEAST = 1e-6  # share of the attention outputs' square that counts as a sum's square, at least
CANDIDATES = 4  # candidates of a missing token that are compared with their weights
SWEEPS, STARTS = 20, 16


class PartialSums(Attack):
    """Recover the tokens before a CompNode's last row from what it receives at the first layer.

    Needs a CompNode's stream ``attn`` at layer 1 of ``hiddenlab cascade run --record``: its embeddings, and m, e, u of
    every key shard, or with ``--harden masked-sums`` the attention output. A sum that is explained exactly verifies its
    tokens; their distance is the share of the sum's square that stays unexplained. Of attention outputs, gaps of more
    tokens than the rows behind them have query heads for a key/value head are left out.

    Knows: the weights of the first layer, the plan, what the node holds and receives. Does not know: other nodes' rows.

    Args:
        candidates: tokens compared for each missing one.
    """

    use_when = (
        "you have a recorded Cascade run: the sums m, e and u, or with masked-sums the attention output, that a "
        "CompNode receives at the first layer"
    )

    def __init__(self, candidates: int = CANDIDATES) -> None:
        if candidates < 1:
            raise InputError(f"candidates must be at least 1, not {candidates}")
        self.candidates = candidates
        self._layer: tuple[TruncatedModel, FirstLayer] | None = None

    def _fit(self, info: ObservationInfo) -> dict[str, float | str]:
        """Load the first layer's projections and tabulate the vocabulary's value vectors, once for each model."""
        _check(info)
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
            NotApplicableError: the observation is no CompNode's combined view of the first layer, or holds attention
                outputs of too few rows to read any other token.
        """
        _check(observation.info)
        layer = self._first(self.model)
        started, before = time.perf_counter(), layer.counters()
        with torch.inference_mode():
            view = _View.of(observation, self.model.device)
            if view.output.shape[2:] != (layer.heads, layer.value_width):
                raise InputError(
                    "the view holds outputs of {} heads with {} numbers each, where the model has {} with {}".format(
                        *view.output.shape[2:], layer.heads, layer.value_width
                    )
                )
            own = layer.own_tokens(view.embeddings, view.positions)
            known = dict(zip(view.positions, own, strict=True))
            queries = (
                layer.along(layer.q, known)[view.positions].unflatten(1, (layer.heads, -1)).transpose(0, 1)
            )
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
        positions, missing = sorted(known), view.positions[-1] + 1 - len(held)
        left_out = view.positions[-1] + 1 - len(positions)
        if view.divisor is None and 0 < missing == left_out:
            raise NotApplicableError(
                f"the attention output of a row names at most {count_of(layer.groups, 'token')} before it, and each "
                "gap has more for its rows; take --attack missing-tokens on --stream resid"
            )
        row_of = {position: row for row, position in enumerate(view.positions)}
        tokens = tuple(
            TokenPrediction(known[p], row_of.get(p, -1), left[p], None, 0, verified[p]) for p in positions
        )
        positions_run, passes = (now - then for now, then in zip(layer.counters(), before, strict=True))
        return AttackResult(
            tokens,
            positions_run,
            passes,
            time.perf_counter() - started,
            f"{count_of(left_out, 'token')} left out, with too few rows behind" if left_out else "complete",
            positions=tuple(positions) if left_out else None,
        )

    def __repr__(self) -> str:
        return (
            "PartialSums: knows the first layer's weights, the plan and what one CompNode holds and receives, not the "
            "other rows or tokens"
        )


@dataclass(frozen=True)
class _View:
    """A node's combined view: outputs by key shard, or with masked sums the attention output of all keys.

    Attributes:
        divisor: log of what each shard's weights were divided by, ``[shards, rows, h]``; None where the node does not
            learn it. sees: 1 where a row sees a key of the shard. output: ``[shards, rows, h, dv]``. shards: positions
            of each key shard.
    """

    positions: list[int]
    embeddings: Float[Tensor, "rows d"]
    divisor: Float[Tensor, "s rows h"] | None
    sees: Float[Tensor, "s rows h"]
    output: Float[Tensor, "s rows h dv"]
    shards: list[list[int]]

    @classmethod
    def of(cls, observation: Observation, device: torch.device) -> "_View":
        facts, positions = observation.info.facts, list(observation.info.positions or ())
        heads, width = int(facts["heads"]), int(facts["embed"])
        rows = observation.states.to(device).float()
        embeddings, parts = rows[:, :width], rows[:, width:]
        if "shards" not in facts:
            if not parts.shape[1] or parts.shape[1] % heads:
                raise InputError(f"{parts.shape[1]} columns do not hold the output of {heads} heads")
            output = parts.unflatten(1, (heads, -1))[None]
            every = list(range(positions[-1] + 1))
            return cls(positions, embeddings, None, torch.ones_like(output[..., 0]), output, [every])
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
        return cls(positions, embeddings, divisor, some.to(rows), output.unflatten(2, (heads, -1)), shards)


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
        """Return the tokens of the shard's unknown keys, and whether the sums they are in were explained.

        Without divisors, tokens that have too few rows, or whose sums are not explained, are solved for again with the
        next ones: rows behind them see both. What has too few rows to the end is left out.
        """
        unknown = [s for s in self.keys if s not in self.held]
        groups: dict[int, list[int]] = {}
        for row, position in enumerate(self.view.positions):
            groups.setdefault(sum(s <= position for s in unknown), []).append(row)
        before, solved, used = 0, dict[int, int](), dict(known)
        for count, rows in sorted(groups.items()):
            # A sliding window may hide a key from every row: it cannot be found then.
            positions = [self.view.positions[row] for row in rows]
            seen = self.layer.attention.visible(positions, unknown[before:count]).any(0)
            if new := [s for s, shown in zip(unknown[before:count], seen.tolist(), strict=True) if shown]:
                step = self._step(rows, self._seen(rows, used), new)
                if step is None:
                    continue
                tokens, left = step.solve(candidates, seed)
                # A fit that rests on a wrong token verifies nothing.
                sure = left < EXPLAINED and all(self.exact.get(s, True) for s in used)
                solved |= tokens
                self.exact |= dict.fromkeys(new, sure)
                self.left |= dict.fromkeys(new, left)
                if not sure and self.view.divisor is None:
                    continue
                used |= tokens
            before = count
        return solved, self.exact

    def _seen(self, rows: list[int], known: dict[int, int]) -> dict[int, int]:
        last = self.view.positions[rows[-1]]
        return {s: known[s] for s in self.keys if s in known and s <= last}

    def _step(self, rows: list[int], seen: dict[int, int], new: list[int]) -> "_Step | None":
        """Return what some rows show of the new keys, without the contributions of known keys.

        None where attention outputs are of too few rows.
        """
        view, layer = self.view, self.layer
        positions, queries = [view.positions[row] for row in rows], self.queries[:, rows]
        sees = view.sees[self.index, rows].T[..., None]
        shown = torch.cat([sees, view.output[self.index, rows].transpose(0, 1)], -1).double()
        scores, values = shown.new_zeros(*shown.shape[:2], 0), shown.new_zeros(len(shown), 0, shown.shape[2])
        if places := sorted(seen):
            keys = layer.along(layer.k, seen)[places]
            hidden = ~layer.attention.visible(positions, places).to(keys.device)
            scores = layer.scored(queries, keys).double().masked_fill(hidden, -math.inf)
            values = _with_mass(layer.spread(layer.along(layer.v, seen)[places].double())).transpose(0, 1)
        if view.divisor is not None:
            scale = view.divisor[self.index, rows].T.double()
            left = shown - (scores - scale[..., None]).exp() @ values
            return _Step(
                layer, queries, scale, left, torch.zeros_like(left), left, left[:, :0], new, positions
            )
        # Weights are relative to those of the known keys together; a row's own is always one of them.
        scale = scores.logsumexp(2)
        known = (scores - scale[..., None]).exp() @ values
        count = rows_for_span(len(rows), layer.groups, len(seen), len(new), shown.shape[2] - 1)
        if not count:
            return None
        left, spanning, removed = shown - known, shown[:, -count:], known[:, -count:]
        return _Step(layer, queries, scale, left, shown, spanning, removed, new, positions)


def _with_mass(values: Float[Tensor, "*shape dv"]) -> Float[Tensor, "*shape width"]:
    """Return value vectors behind a 1, so that a weighted sum of them begins with the sum of the weights."""
    return torch.cat([torch.ones_like(values[..., :1]), values], -1)


@dataclass(frozen=True)
class _Step:
    """Rows that see the same unknown keys, and what these contribute to them.

    Contributions are weights times a 1 and the value vector, less ``centre``. With divisors the centre is 0, and
    ``left`` the shard's sums without the known keys. Without, the centre is the output o: over all keys, exp(score)
    (v - o) adds up to 0, so that ``left`` is what known keys lack.

    Attributes:
        queries: of each head and row. scale: log of what weights are relative to. left: what the contributions add up
            to. spanning: rows that mix the unknown value vectors, and beside them those in ``removed``, to an unknown
            share. new: positions of the unknown keys. positions: of the rows.
    """

    layer: FirstLayer
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

    def shortlist(self, count: int) -> Int[Tensor, "n c"]:
        """Return for each missing position the tokens whose value vectors lie nearest to the span of the sums.

        Nothing excludes a value vector that lies among what is removed: such tokens come first.
        """
        lists = []
        for position in self.new:
            values = self.layer.values(position)
            kv = len(self.spanning) // self.layer.groups
            values = values.unflatten(1, (kv, -1)).double()
            outside = values.new_zeros(len(values))
            for g, (rows, removed) in enumerate(
                zip(
                    *(part[..., 1:].unflatten(0, (kv, -1)) for part in (self.spanning, self.removed)),
                    strict=True,
                )
            ):
                known, rows = _directions(removed.flatten(0, 1), KNOWN), rows.flatten(0, 1)
                noise = NOISE
                if len(known):
                    rows, noise = normalize(rows, dim=1), BESIDE_KNOWN
                basis = _directions(rows - rows @ known.T @ known, noise)[: len(self.new)]
                rest = values[:, g] - values[:, g] @ known.T @ known
                size = rest.square().sum(1)
                beyond = (size - (rest @ basis.T).square().sum(1)).clamp(min=0) / size.clamp(min=1e-30)
                outside += torch.where(size > KNOWN * values[:, g].square().sum(1), beyond, 0.0)
            lists.append(outside.topk(min(count, len(values)), largest=False).indices)
            if not self.layer.moves:
                return lists[0].expand(len(self.new), -1)
        return torch.stack(lists)

    def solve(self, candidates: int, seed: int) -> tuple[dict[int, int], float]:
        """Return the tokens of the missing positions, and the share of the sums' square that they leave unexplained."""
        # Where known tokens lack next to nothing, as before a repeated token, the outputs themselves set the measure.
        least = LEAST * float(self.centre[..., 1:].square().sum())
        # Time grows with the square of the candidates, and half of them mostly do.
        for each in sorted({-(-candidates // 2), candidates}):
            tokens = self.shortlist(max(16, each * len(self.new)))
            chosen, left = _one_of_each(self._atoms(tokens), self.left.flatten(), seed, least)
            if left < EXPLAINED:
                break
        return {p: int(tokens[i, chosen[i]]) for i, p in enumerate(self.new)}, left

    def _atoms(self, tokens: Int[Tensor, "n c"]) -> Float[Tensor, "n c equations"]:
        """Return what each candidate of each missing position would contribute to the sums."""
        atoms = []
        for position, own in zip(self.new, tokens, strict=True):
            weights = self.weights(self.layer.keys(own, position), position)
            values = _with_mass(self.layer.spread(self.layer.values(position)[own].double())).transpose(0, 1)
            parts = weights[..., None] * (values[:, None] - self.centre[:, :, None])
            atoms.append(parts.permute(2, 0, 1, 3).flatten(1))
        return torch.stack(atoms)


def _directions(rows: Float[Tensor, "r dv"], noise: float) -> Float[Tensor, "s dv"]:
    """Return orthonormal directions that rows span, the strongest first; weaker ones than a share are rounding."""
    _, sizes, basis = torch.linalg.svd(rows, full_matrices=False)
    return basis[sizes > noise * sizes.amax()] if len(rows) else basis


def _one_of_each(
    dictionary: Float[Tensor, "n c equations"],
    target: Float[Tensor, " equations"],
    seed: int,
    least: float = 0.0,
) -> tuple[list[int], float]:
    """Choose one atom of each of n lists so that they add up to the target; also return the unexplained share.

    The share is of the target's square, or of ``least`` where that is more. Non-negative least squares over all atoms
    gives a start. Then each list's atom is chosen again with the others held, from several starts, until nothing
    changes.
    """
    n, c, _ = dictionary.shape
    flat = dictionary.flatten(0, 1)
    gram, along = (flat @ flat.T).cpu().numpy(), (flat @ target).cpu().numpy()
    square = float(target.square().sum())
    total = max(square, least)
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
        left = float(square - 2 * along[places].sum() + gram[np.ix_(places, places)].sum()) / total
        if best is None or left < best[0]:
            best = left, chosen
        if best[0] < EXPLAINED:
            break
    assert best is not None
    return best[1], max(0.0, best[0])


def _check(info: ObservationInfo) -> None:
    """Refuse what is no CompNode's combined view of the first layer, before anything is tabulated."""
    if not {"heads", "embed"} <= set(info.facts) or info.positions is None or info.site.layer != 1:
        raise NotApplicableError(
            "this attack reads a CompNode's combined view of layer 1 (--stream attn of 'cascade run --record')"
        )
