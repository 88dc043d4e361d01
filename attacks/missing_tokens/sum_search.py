"""Choose missing tokens whose contributions add up to the sums that rows of one layer leave open (``attention_sums``).

A beam goes over the places, nearest first. A partial sum is weighed by how far the tokens still missing can be expected
to change it. The last two places are chosen together, and sums with a small residual are corrected.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hiddenlab.attacks.missing_tokens.slots import moved, swapped
from hiddenlab.matching.first_layer import FirstLayer

# Residual allowed while other places are still missing, as share of a row, from the first place to the last: their
# contributions are not normally distributed, so the first values are larger.
TOLERANCES = (3e-3, 2e-3, 2e-3, 1e-3, 5e-4, 3e-4)
JITTER = 1e-12  # share of all variance that is added to each, so that rounding makes none negative
BEAM, LONGLIST = 64, 8  # sums kept, and how many times as many are scored in all directions
DIRECTIONS = 128  # directions in which the vocabulary is scored first: those in which it varies most
SAMPLED = 768  # tokens from which these directions are computed
PAIRED, KEPT = 16, 8  # sums whose last two places are searched together, and pairs kept of each
PAIRS = 2000  # tokens of one of the two that are tried with all of the other
PAIR_DIRECTIONS = 64  # directions in which pairs are scored
AT_ONCE, PAIRS_AT_ONCE = 4096, 256  # tokens tabulated at once, and tried with all others at once
# Share of a row that the right sum leaves unexplained at most; wrong ones leave several times as much.
EXPLAINED = 1e-4
REARRANGED = 8  # sums whose tokens are tried in other orders
MAX_SHIFT, ORDERS_AT_ONCE = 16, 32  # places at most between which a token is moved, and orders tried at once
MAX_RESIDUAL_RATIO = 0.99  # share of what a sum leaves unexplained that another order has to stay below


@dataclass
class Row:
    """What one row tells about the sum of the tokens missing before it.

    Attributes:
        token, position: the row's own. jacobian: of the row by its attention output, in units of the row's root mean
            square. unsure: covariance of the solve's error. brought: attention output, by head.
        sum, mass: total contribution of the missing tokens, and total weight of the known ones. scale: logarithm by
            head that all weights are divided by.
    """

    layer: FirstLayer
    token: int
    position: int
    jacobian: Float[Tensor, "e a"]
    unsure: Float[Tensor, "a a"]
    brought: Float[Tensor, "h w"]
    sum: Float[Tensor, " a"]
    mass: Float[Tensor, " h"]
    scale: Float[Tensor, "h 1"]
    _weights: dict[int, Tensor] = field(default_factory=dict)

    def weights(self, place: int, tokens: Int[Tensor, " c"] | None = None) -> Float[Tensor, "h c"]:
        """Return the attention weights of tokens at a place; zero where the row does not see it."""
        if place not in self._weights:
            scores = self.layer.scores(self.token, self.position, place)
            self._weights[place] = (scores - self.scale).exp()
        every = self._weights[place]
        return every if tokens is None else every[:, tokens]

    def parts(self, place: int, tokens: Int[Tensor, " c"]) -> Float[Tensor, "c a"]:
        """Return the contributions of tokens at a place."""
        values = self.layer.spread(self.layer.values(place)[tokens])
        return (self.weights(place, tokens).T[..., None] * (values - self.brought)).flatten(1)


@dataclass(frozen=True)
class _Moments:
    """Moments of a random missing token at a place: mean contribution, mean weight, covariance of weights."""

    part: Float[Tensor, " a"]
    weight: Float[Tensor, " h"]
    weights: Float[Tensor, "h h"]


@dataclass(frozen=True)
class Whitening:
    """Whitens residuals of sums by their expected covariance: divided row by row, then whitened together."""

    divided: Float[Tensor, "r e a"]
    lower: Float[Tensor, "x x"]

    def __call__(self, sums: Float[Tensor, "b y"]) -> Float[Tensor, "b x"]:
        seen = _by_row(sums.double(), self.divided)
        return torch.linalg.solve_triangular(self.lower, seen.T, upper=False).T

    def back(self, directions: Float[Tensor, "x k"]) -> Float[Tensor, "k y"]:
        """Return the vectors whose products with sums give their whitened values along some directions."""
        turned = torch.linalg.solve_triangular(self.lower.T, directions, upper=True)
        rows = turned.unflatten(0, self.divided.shape[:2])
        return (self.divided.transpose(1, 2) @ rows).flatten(0, 1).T


@dataclass
class Sums:
    """Choices of tokens for some places, one a row.

    Attributes:
        chosen: the tokens. left: what the other places still have to contribute. mass: total weight of all known
            tokens.
        prior: log-probability of the tokens.
    """

    chosen: Int[Tensor, "b k"]
    left: Float[Tensor, "b a"]
    mass: Float[Tensor, "b h"]
    prior: Float[Tensor, " b"]

    def __getitem__(self, which: Tensor | slice) -> "Sums":
        return Sums(self.chosen[which], self.left[which], self.mass[which], self.prior[which])


class Search:
    """The search for tokens whose sums explain some rows.

    Args:
        places: that are missing, in the order in which they are chosen. prior: log-probability of every token.
        pool: sampled tokens that represent what may be missing. rounding: share of a row that no sum explains.
    """

    def __init__(
        self, rows: Sequence[Row], places: Sequence[int], prior: Float[Tensor, " v"], pool: Int[Tensor, " n"],
        rounding: float = 0.0,
    ) -> None:  # fmt: skip
        self.rows, self.places, self.prior, self.pool = list(rows), list(places), prior, pool
        self.size, self.rounding = len(prior), rounding
        self.jacobian = torch.stack([row.jacobian for row in rows])
        self.unsure = torch.stack([row.unsure for row in rows])
        self.width = rows[0].brought.shape[1]
        tokens, counts = pool.unique(return_counts=True)
        self.usual = tokens, counts.double() / len(pool)
        self.moments = {place: self._moments(place) for place in places}
        self.varied: tuple[tuple[int, ...], Tensor] | None = None  # see ``covariance``
        self.initial = Sums(
            torch.zeros(1, 0, dtype=torch.long, device=self.prior.device),
            torch.cat([row.sum for row in rows])[None],
            torch.cat([row.mass for row in rows])[None],
            torch.zeros(1, dtype=torch.double, device=self.prior.device),
        )

    # ---- the tables

    def parts(self, place: int, tokens: Int[Tensor, " c"]) -> Float[Tensor, "c a"]:
        return torch.cat([row.parts(place, tokens) for row in self.rows], 1)

    def weights(self, place: int, tokens: Int[Tensor, " c"]) -> Float[Tensor, "c h"]:
        return torch.cat([row.weights(place, tokens) for row in self.rows]).T

    def _moments(self, place: int) -> _Moments:
        tokens, share = self.usual
        weights = self.weights(place, tokens).double()
        mean = share @ weights
        spread = (weights - mean) * share.sqrt()[:, None]
        return _Moments(share @ self.parts(place, tokens).double(), mean, spread.T @ spread)

    def varies(self, place: int) -> Float[Tensor, "y y"]:
        """Return the covariance of a random token's contribution at a place; too large to be stored for all places."""
        tokens, share = self.usual
        spread = (self.parts(place, tokens).double() - self.moments[place].part) * share.sqrt()[:, None]
        return spread.T @ spread

    def covariance(self, places: Sequence[int]) -> Float[Tensor, "y y"]:
        """Return the covariance of random tokens' contributions at some places; the last result serves subsets."""
        held, total = self.varied or ((), torch.empty(0))
        gone = [p for p in held if p not in places]
        if self.varied is not None and set(places) <= set(held) and len(gone) < len(places):
            for place in gone:
                total = total - self.varies(place)
        else:
            wide = self.initial.left.shape[1]
            total = torch.zeros(wide, wide, dtype=torch.double, device=self.prior.device)
            for place in places:
                total += self.varies(place)
        self.varied = tuple(places), total
        return total

    def along(self, place: int, directions: Float[Tensor, "r a"]) -> Float[Tensor, "v r"]:
        """Return the contributions of the whole vocabulary at a place, along some directions."""
        turned = directions.float().T.contiguous()
        contributions = torch.empty(self.size, turned.shape[1], device=turned.device)
        for tokens in torch.arange(self.size, device=turned.device).split(AT_ONCE):
            contributions[tokens] = self.parts(place, tokens) @ turned
        return contributions

    # ---- how sums are weighed

    def _divided(self, mass: Float[Tensor, " h"]) -> Float[Tensor, "r e a"]:
        """Return how rows change with the residual of their sums, which is divided by the mass."""
        return self.jacobian / mass.repeat_interleave(self.width).unflatten(0, (len(self.rows), 1, -1))

    def _whitened(self, sums: Sums, rest: Sequence[int], free: Sequence[int], tolerance: float) -> Whitening:
        """Return the whitening of partial sums by what is still missing.

        Args:
            rest: places still missing. free: those of them that are about to be chosen; only the uncertainty of their
                weight counts, since it divides the sum.
        """
        mass = sums.mass.mean(0) + sum(self.moments[p].weight for p in rest)
        spread = torch.stack([self.moments[p].weights for p in rest]).sum(0)
        return self.whitening(mass, self.covariance([p for p in rest if p not in free]), tolerance, spread)

    def whitening(
        self,
        mass: Float[Tensor, " h"],
        covariance: Float[Tensor, "y y"],
        tolerance: float,
        spread: Float[Tensor, "h h"] | None = None,
    ) -> Whitening:
        """Return the whitening by the covariance of what may still be contributed and the allowed residual.

        Args:
            mass: that sums are divided by. spread: its covariance, which scales the error of each row's solve.
        """
        divided = self._divided(mass)
        rows, seen, width = divided.shape
        blocks = covariance.unflatten(1, (rows, width)).unflatten(0, (rows, width)).transpose(1, 2).clone()
        if spread is not None:
            own = spread.unflatten(1, (rows, -1)).unflatten(0, (rows, -1))
            for r in range(rows):
                alike = own[r, :, r].repeat_interleave(self.width, 0).repeat_interleave(self.width, 1)
                blocks[r, r] += self.unsure[r] * alike
        noise = divided[:, None] @ blocks @ divided.transpose(1, 2)[None]
        noise = noise.transpose(1, 2).reshape(rows * seen, rows * seen)
        noise.diagonal().add_(tolerance**2 + self.rounding**2 + JITTER * float(noise.trace()))
        return Whitening(divided, torch.linalg.cholesky(noise))

    def most_telling(self, whitening: Whitening, places: Sequence[int], count: int) -> Float[Tensor, "k y"]:
        """Return the directions in which the places about to be chosen vary most, measured on sampled tokens."""
        some = self.pool[: SAMPLED // len(places)]
        spread = [self.parts(p, some).double() - self.moments[p].part for p in places]
        seen = whitening(torch.cat(spread))
        # Samples by samples: where rows are used together there are fewer samples than coordinates.
        length, of = torch.linalg.eigh(seen @ seen.T)
        significant = length[-count:] > JITTER * length[-1]
        return whitening.back(
            seen.T @ (of[:, -count:] / length[-count:].clamp(min=1e-300).sqrt())[:, significant]
        )

    def with_token(self, sums: Sums, place: int, tokens: Int[Tensor, " b"]) -> Sums:
        """Return the sums, each with one more token at a place."""
        return Sums(
            torch.cat([sums.chosen, tokens[:, None]], 1),
            sums.left - self.parts(place, tokens).double(),
            sums.mass + self.weights(place, tokens).double(),
            sums.prior + self.prior[tokens],
        )

    def beam(self) -> Sums:
        """Return sums over all places, those that explain the rows best first."""
        sums, places = self.initial, self.places
        for k in range(len(places) - 2 if len(places) > 1 else 1):
            stage = len(TOLERANCES) - 1 - (len(places) - 2 - k) if len(places) > len(TOLERANCES) else k
            sums = self._extended(sums, places[k:], TOLERANCES[max(stage, 0)])
        if len(places) > 1:
            sums = self._paired(sums[:PAIRED], places[-2], places[-1])
        return self.rearranged(self._ordered(sums))

    def _extended(self, sums: Sums, rest: Sequence[int], tolerance: float) -> Sums:
        """Return sums with the first remaining place chosen, the others at their mean."""
        place, others = rest[0], rest[1:]
        whitened = self._whitened(sums, rest, [place], tolerance)
        mean = sum((self.moments[p].part for p in others), torch.zeros_like(sums.left[0]))
        left = sums.left - mean
        directions = self.most_telling(whitened, [place], DIRECTIONS)
        table, target = self.along(place, directions), (left @ directions.T).float()
        scores = torch.addmm(self.prior.float() - table.square().sum(1) / 2, target, table.T)
        scores += (sums.prior - (target.square().sum(1) / 2).double()).float()[:, None]
        which = scores.flatten().topk(min(LONGLIST * BEAM, scores.numel())).indices
        before, tokens = which // self.size, which % self.size
        exactly = whitened(left[before] - self.parts(place, tokens).double())
        score = sums.prior[before] + self.prior[tokens] - exactly.square().sum(1) / 2
        best = score.topk(min(BEAM, len(score))).indices
        return self.with_token(sums[before[best]], place, tokens[best])

    def _paired(self, sums: Sums, first: int, second: int) -> Sums:
        """Return sums with their last two places chosen together; a normal approximation excludes rare tokens."""
        ahead = self._whitened(sums, [first, second], [first], TOLERANCES[-1])
        directions = self.most_telling(ahead, [first], DIRECTIONS)
        table = self.along(first, directions)
        target = ((sums.left - self.moments[second].part) @ directions.T).float()
        likely = torch.addmm(self.prior.float() - table.square().sum(1) / 2, target, table.T)
        both = self._whitened(sums, [first, second], [first, second], TOLERANCES[-1])
        directions = self.most_telling(both, [first, second], PAIR_DIRECTIONS)
        firsts, seconds = self.along(first, directions), self.along(second, directions)
        target, cost = (sums.left @ directions.T).float(), self.prior.float() - seconds.square().sum(1) / 2
        results = list[Sums]()
        for i, row in enumerate(likely):
            shortlist = row.topk(min(PAIRS, self.size)).indices
            left = target[i] - firsts[shortlist]
            score, other = list[Tensor](), list[Tensor]()
            for part in left.split(PAIRS_AT_ONCE):
                value, token = torch.addmm(cost, part, seconds.T).max(1)
                score.append(value)
                other.append(token)
            total = torch.cat(score) + self.prior[shortlist].float() - left.square().sum(1) / 2
            best = total.topk(min(KEPT, len(total))).indices
            at = torch.full_like(best, i)
            grown = self.with_token(
                self.with_token(sums[at], first, shortlist[best]), second, torch.cat(other)[best]
            )
            results.append(grown)
            if self.explained(grown):
                break
        return _joined(results)

    # ---- what comes out

    def _unexplained(self, sums: Sums) -> Float[Tensor, " b"]:
        """Return the share of the rows that whole sums leave unexplained."""
        left = sums.left / sums.mass.repeat_interleave(self.width, 1)
        return _by_row(left, self.jacobian).square().mean(1).sqrt()

    def best(self, sums: Sums) -> float:
        return float(self._unexplained(sums).min())

    def explained(self, sums: Sums) -> bool:
        """Return whether one of some whole sums explains the rows."""
        return self.best(sums) < EXPLAINED

    def _ordered(self, sums: Sums) -> Sums:
        return sums[self._unexplained(sums).argsort()]

    def rearranged(self, sums: Sums) -> Sums:
        """Return whole sums, the best of them with their tokens in the order that explains the rows best.

        Which tokens are missing shows better than where: the right ones in a wrong order come near.
        """
        if len(self.places) == 1 or self.explained(sums):
            return sums
        results = list[Sums]()
        for i in range(min(REARRANGED, len(sums.chosen))):
            best = sums[i : i + 1]
            tokens = best.chosen[0]
            parts = torch.stack([self.parts(place, tokens) for place in self.places]).double()
            weights = torch.stack([self.weights(place, tokens) for place in self.places]).double()
            places, order = torch.arange(len(tokens), device=tokens.device), tuple(range(len(tokens)))
            while True:
                orders = {swapped(order, *pair) for pair in combinations(order, 2)}
                orders |= {moved(order, a, b) for a in order for b in order if abs(a - b) <= MAX_SHIFT}
                which = torch.tensor(sorted(orders - {order}), device=tokens.device)
                left, mass = (
                    torch.cat([initial - of[places, some].sum(1) for some in which.split(ORDERS_AT_ONCE)])
                    for initial, of in ((self.initial.left, parts), (-self.initial.mass, weights))
                )
                alternatives = Sums(tokens[which], left, -mass, best.prior.expand(len(which)))
                nearest = int(self._unexplained(alternatives).argmin())
                # Orders that swap equal tokens differ by rounding alone.
                if self.best(alternatives) > MAX_RESIDUAL_RATIO * self.best(best):
                    break
                best, order = alternatives[nearest : nearest + 1], tuple(which[nearest].tolist())
            results.append(best)
            if self.explained(best):
                break
        return self._ordered(_joined([*results, sums]))

    def fillings(self, sums: Sums) -> list[dict[int, int]]:
        """Return the tokens by place."""
        return [dict(zip(self.places, tokens, strict=True)) for tokens in sums.chosen.tolist()]

    def doubtful(self, sums: Sums) -> list[tuple[int, int]]:
        """Return pairs of places by index, first those where other tokens would explain most of the residual."""
        best = sums[:1]
        # A wrong token adds as much as a random token varies.
        usual = 2 / len(self.places) * self.covariance(self.places)
        whitened = self.whitening(best.mass[0], usual, TOLERANCES[-1])
        directions = self.most_telling(whitened, self.places, DIRECTIONS)
        gains = list[float]()
        for k, place in enumerate(self.places):
            token = best.chosen[:, k]
            target = ((best.left + self.parts(place, token).double()) @ directions.T).float()[0]
            table = self.along(place, directions)
            scores = self.prior.float() + table @ target - table.square().sum(1) / 2
            gains.append(float(scores.max() - scores[token[0]]))
        return sorted(combinations(range(len(gains)), 2), key=lambda pair: -gains[pair[0]] - gains[pair[1]])

    def sought_anew(self, sums: Sums, pair: tuple[int, int]) -> Sums:
        """Return the first of whole sums with the tokens at two of its places (by index) searched again."""
        kept = [k for k in range(len(self.places)) if k not in pair]
        base = self.initial
        for k in kept:
            base = self.with_token(base, self.places[k], sums.chosen[:1, k])
        result = self._paired(base, *(self.places[k] for k in pair))
        order = torch.tensor([*kept, *pair]).argsort()
        result = Sums(result.chosen[:, order], result.left, result.mass, result.prior)
        return self.rearranged(self._ordered(result))


def _by_row(sums: Float[Tensor, "b y"], matrices: Float[Tensor, "r e a"]) -> Float[Tensor, "b x"]:
    """Return each row's part of sums, multiplied by the row's matrix."""
    parts = sums.unflatten(1, (len(matrices), -1)).transpose(0, 1)
    return (parts @ matrices.transpose(1, 2)).transpose(0, 1).flatten(1)


def _joined(sums: Sequence[Sums]) -> Sums:
    parts = zip(*((group.chosen, group.left, group.mass, group.prior) for group in sums), strict=True)
    return Sums(*(torch.cat(part) for part in parts))
