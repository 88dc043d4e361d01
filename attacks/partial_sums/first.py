"""Solve the attention sums of the first layer, where keys and values depend on one unknown token each."""

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Float, Int
from scipy.optimize import nnls
from torch import Tensor

from hiddenlab.attacks.partial_sums.sums import Step, View, step_of, with_mass
from hiddenlab.matching.first_layer import FirstLayer
from hiddenlab.types import Progress

EXPLAINED = 1e-6  # share of a sum's square that the right tokens leave unexplained, at most
LEAST = 1e-6  # share of the attention outputs' square that counts as a sum's square, at least
SWEEPS, STARTS = 20, 16


@dataclass
class Found:
    """Tokens that were read, by position.

    Attributes:
        left: share of a sum's square, or of a row's, that a token leaves unexplained; not a number for what was looked
            up. verified: whether that is rounding. tried: candidates of each token. stopped: why the rest
            is left out, if some are.
    """

    tokens: dict[int, int]
    left: dict[int, float]
    verified: dict[int, bool]
    tried: dict[int, int] = field(default_factory=dict)
    stopped: str = ""


def solve(view: View, layer: FirstLayer, candidates: int, seed: int, progress: Progress) -> Found:
    """Read own tokens from their embeddings, and the others' from the sums of each key shard.

    Args:
        candidates: tokens compared for each missing one.
    """
    own = layer.own_tokens(view.own, view.positions)
    known = dict(zip(view.positions, own, strict=True))
    queries = layer.by_head(layer.along(layer.q, known)[view.positions])
    held = set(known)
    left = dict.fromkeys(known, math.nan)  # own tokens are looked up, not explained
    found = Found(known, left, dict.fromkeys(known, True), stopped="with too few rows behind")
    for index, keys in enumerate(view.shards):
        progress("key shards", index, len(view.shards))
        visible = [s for s in keys if s <= view.positions[-1]]
        shard = _Shard(layer, view, queries, index, visible, held)
        solved, sure = shard.solve(known, candidates, seed)
        known |= solved
        found.verified.update(sure)
        found.left.update(shard.left)
    return found


@dataclass
class _Shard:
    """One key shard's sums, solved from the first rows to the last."""

    layer: FirstLayer
    view: View
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
                tokens, left = _solved(step, self.layer, candidates, seed)
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

    def _step(self, rows: list[int], seen: dict[int, int], new: list[int]) -> Step | None:
        """Return what some rows show of the new keys, without the contributions of known keys."""
        layer, places = self.layer, sorted(seen)
        keys, values = (
            layer.along(model, seen)[places] if seen else torch.zeros(0, model.width)
            for model in (layer.k, layer.v)
        )
        return step_of(self.view, layer, self.index, rows, self.queries[:, rows], places, keys, values, new)


def _shortlist(step: Step, layer: FirstLayer, count: int) -> Int[Tensor, "n c"]:
    """Return for each missing position the tokens whose value vectors lie nearest to the span of the sums.

    Nothing excludes a value vector that lies among what is removed: such tokens come first.
    """
    lists = []
    for position in step.new:
        outside = step.outside(layer.values(position)).nan_to_num(0.0).sum(1)
        lists.append(outside.topk(min(count, len(outside)), largest=False).indices)
        if not layer.moves:
            return lists[0].expand(len(step.new), -1)
    return torch.stack(lists)


def _solved(step: Step, layer: FirstLayer, candidates: int, seed: int) -> tuple[dict[int, int], float]:
    """Return the tokens of the missing positions, and the share of the sums' square that they leave unexplained."""
    # Where known tokens lack next to nothing, as before a repeated token, the outputs themselves set the measure.
    least = LEAST * float(step.centre[..., 1:].square().sum())
    # Time grows with the square of the candidates, and half of them mostly do.
    for each in sorted({-(-candidates // 2), candidates}):
        tokens = _shortlist(step, layer, max(16, each * len(step.new)))
        chosen, left = one_of_each(_atoms(step, layer, tokens), step.left.flatten(), seed, least)
        if left < EXPLAINED:
            break
    return {p: int(tokens[i, chosen[i]]) for i, p in enumerate(step.new)}, left


def _atoms(step: Step, layer: FirstLayer, tokens: Int[Tensor, "n c"]) -> Float[Tensor, "n c equations"]:
    """Return what each candidate of each missing position would contribute to the sums."""
    atoms = []
    for position, own in zip(step.new, tokens, strict=True):
        weights = step.weights(layer.keys(own, position), position)
        values = with_mass(layer.spread(layer.values(position)[own].double())).transpose(0, 1)
        parts = weights[..., None] * (values[:, None] - step.centre[:, :, None])
        atoms.append(parts.permute(2, 0, 1, 3).flatten(1))
    return torch.stack(atoms)


def one_of_each(
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
