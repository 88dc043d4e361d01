"""Missing tokens behind one layer, solved for: a row is turned back into what attention brought it, which is a sum.

Behind one layer a row is a function of its own token and of what attention brings it, and gives the latter back to
rounding (``attacks.inverted``). What attention brings is an average over all tokens before the row, in which each
takes part with a softmax weight times a value. Both are functions of that token and its place alone. So for every
query head, with o what attention brings the row, s over all places and x their tokens,

    sum over s of  exp(q k(x_s)) (v(x_s) - o) = 0,

where what is known contributes a known part, and every missing token one column of a table as long as the vocabulary.
There are as many equations as attention's output has coordinates, hundreds a row, for a handful of missing tokens:
a beam goes over the places, nearest first, weighing each sum by how far those still missing can be expected to
change it, and needs neither a language model nor a single run of the model (eval/LOG.md, thirty-second entry).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import combinations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from attacks.first_layer import FirstLayer
from attacks.gap.slots import moved, swapped
from attacks.inverted import Equations
from hiddenlab.channel import as_whole
from hiddenlab.core import Public, Site
from hiddenlab.propose.corpus import Corpus
from hiddenlab.slice import Slice

DRAWS = 600  # fillings from which is learned what attention may bring a row
OWN = 0.05  # share of its mean variance in the covariance of that, as draws are hardly more than directions
STARTS = 6  # of the solve, the first from the mean, the others from drawn fillings; some lead astray
ROUNDING = 1e-5  # share of a row that the solve leaves unexplained, at most
POOL = 6000  # tokens that stand for what may be missing
UNIFORM = 0.2  # share of them that are any of the vocabulary; the others come as often as in text
TEXTS = 60_000  # tokens of text that tell how often that is
# Share of a row that a sum may miss by where others are still missing, from the first place to the last: as their
# contributions are no normal distribution, little is believed at first.
BELIEVED = (3e-3, 2e-3, 2e-3, 1e-3, 5e-4, 3e-4)
JITTER = 1e-12  # share of all variance that is added to each, so that rounding makes none negative
BEAM, LONGLIST = 64, 8  # sums kept, and how many times as many are looked at in all directions
ALONG = 128  # directions in which the vocabulary is looked at first, those in which it varies most
PAIRED, KEPT = 16, 8  # sums whose last two places are sought together, and pairs kept of each
PAIRS, PAIR_ALONG = (
    2000,
    64,
)  # tokens of one place that are tried with all of the other, and directions looked at
AT_ONCE, PAIRS_AT_ONCE = 4096, 256  # tokens tabulated at once, and tried with all others at once
EXPLAINED = (
    1e-4  # share of a row that the right sum leaves unexplained at most; wrong ones leave ten times as much
)
REARRANGED = 8  # sums whose tokens are tried in other orders
NEARER = 0.99  # share of what a sum leaves unexplained that another order has to stay below
REFINED = 1  # of the best sums that do not explain their rows, in which pairs of tokens are sought anew
ANEW, DOUBTFUL = 4, 6  # times that is done, and pairs that are tried at most each time
LONGEST, ROWS = 16, 4  # missing tokens that are solved for, and rows that are asked together, at most


@dataclass(frozen=True)
class Shown:
    """A row: its state, its own token, its position, and the tokens before it that are known, by position."""

    state: Float[Tensor, " e"]
    token: int
    position: int
    known: Mapping[int, int]

    @property
    def missing(self) -> list[int]:
        return [p for p in range(self.position) if p not in self.known]


@dataclass
class _Row:
    """What one row tells of the sum of what is missing before it.

    Attributes:
        jacobian: of the row by what attention brings it, in units of the row's root mean square. unsure: covariance of
            what the solve errs. brought: what attention brings, by head. sum, mass: what the missing tokens contribute
            in all, and how much the known ones weigh. scale: logarithm by head that all weights are divided by.
    """

    layer: FirstLayer
    shown: Shown
    jacobian: Float[Tensor, "e a"]
    unsure: Float[Tensor, "a a"]
    brought: Float[Tensor, "h w"]
    sum: Float[Tensor, " a"]
    mass: Float[Tensor, " h"]
    scale: Float[Tensor, "h 1"]
    _weights: dict[int, Tensor] = field(default_factory=dict)

    def weights(self, place: int, tokens: Int[Tensor, " c"] | None = None) -> Float[Tensor, "h c"]:
        """What tokens would weigh at a place; nothing where the row does not see it."""
        if place not in self._weights:
            scores = self.layer.scores(self.shown.token, self.shown.position, place)
            self._weights[place] = (scores - self.scale).exp()
        every = self._weights[place]
        return every if tokens is None else every[:, tokens]

    def parts(self, place: int, tokens: Int[Tensor, " c"]) -> Float[Tensor, "c a"]:
        """What tokens would contribute at a place."""
        values = self.layer.spread(self.layer.values(place)[tokens])
        return (self.weights(place, tokens).T[..., None] * (values - self.brought)).flatten(1)


@dataclass(frozen=True)
class _Moments:
    """Of what a missing token contributes at a place, and of what it weighs: mean and covariance."""

    part: Float[Tensor, " a"]
    parts: Float[Tensor, "a a"]
    weight: Float[Tensor, " h"]
    weights: Float[Tensor, "h h"]


@dataclass
class _Sums:
    """Choices of tokens for some places, one a row.

    Attributes:
        chosen: the tokens. left: what the other places still have to contribute. mass: what all that are known weigh.
        prior: log-probability of the tokens.
    """

    chosen: Int[Tensor, "b k"]
    left: Float[Tensor, "b a"]
    mass: Float[Tensor, "b h"]
    prior: Float[Tensor, " b"]

    def __getitem__(self, which: Tensor | slice) -> "_Sums":
        return _Sums(self.chosen[which], self.left[which], self.mass[which], self.prior[which])


class MissingTokens:
    """Names the tokens before rows of one layer that no row shows.

    Args:
        slice: of one layer. seed: of draws of what may be missing.
    """

    def __init__(self, slice: Slice, seed: int = 0) -> None:
        self.slice, self.layer, self.seed = slice, FirstLayer(slice), seed
        size, device = slice.vocab_size, slice.device
        corpus = Corpus(slice, seed=0)
        texts = torch.cat([corpus.text_window(64) for _ in range(TEXTS // 64)])
        counts = torch.bincount(texts, minlength=size).double()
        share = (1 - UNIFORM) * counts / counts.sum() + UNIFORM / size
        self.prior: Float[Tensor, " v"] = share.log().to(device)
        drawn = torch.multinomial(share.float(), POOL, replacement=True, generator=self._draws())
        self.pool: Int[Tensor, " n"] = drawn.to(device)

    def _draws(self) -> torch.Generator:
        """The same draws for every gap, so that none depends on those before it."""
        return torch.Generator().manual_seed(self.seed)

    @staticmethod
    def applies(public: Public, slice: Slice) -> bool:
        """Whether rows can be turned back: states of one layer, in full precision, shown as they are."""
        plain = slice.dtype == torch.float32 and slice.quantization is None
        return plain and slice.site == Site(1, "resid") and set(as_whole(public).channel) <= {"identity"}

    def counters(self) -> tuple[int, int]:
        """Positions and passes run so far, those of the slice itself left out."""
        return self.layer.counters()

    def name(self, rows: Sequence[Shown]) -> Iterator[list[dict[int, int]]]:
        """Tokens of the places that are missing before some rows.

        Args:
            rows: at most ``ROWS`` of them count, the last ones.

        Yields:
            Fillings by place, the one that explains the rows best first, and then, as long as none explains them, the
            fillings found when pairs of tokens are sought anew. Nothing where too many places are missing, no row
            sees one of them, or a row cannot be turned back.
        """
        # Rows may be no states of this layer: their numbers fit nothing then.
        with suppress(torch.linalg.LinAlgError):  # type: ignore[attr-defined]
            yield from self._name(rows)

    def _name(self, rows: Sequence[Shown]) -> Iterator[list[dict[int, int]]]:
        rows = rows[-ROWS:]
        if not 0 < len({p for row in rows for p in row.missing}) <= LONGEST:
            return
        turned = self._turned_back(rows)
        own = [row.shown.position for row in turned]
        places = sorted({p for row in rows for p in row.missing}, reverse=True)  # the nearest weigh most
        if not turned or not bool(self.layer.attention.visible(own, places).any(0).all()):
            return  # nothing can be said of what no row sees
        search = _Search(self, turned, places)
        found = search.beam()
        yield search.fillings(found)
        if search.explained(found):
            return
        for _ in range(ANEW):
            # A sum that misses little is wrong at few places: which two would explain what it misses?
            for pair in search.doubtful(found)[:DOUBTFUL]:
                anew = search.sought_anew(found[:REFINED], pair)
                if search.best(anew) < search.best(found):
                    found = anew
                    break
            else:
                return
            yield search.fillings(found)
            if search.explained(found):
                return

    def _turned_back(self, rows: Sequence[Shown]) -> list[_Row]:
        """What attention brought rows, and what that says of a sum; those that nothing explains are left out."""
        known = [self._known(row) for row in rows]
        draws = self._draws()
        guesses = [self._fillings(row, *part, draws) for row, part in zip(rows, known, strict=True)]
        tokens = torch.tensor([row.token for row in rows], device=self.slice.device)
        embeddings = self.slice.embed(tokens).float()
        with torch.inference_mode(False):
            usual = torch.stack([one.mean(0) for one in guesses]).clone()
            spread = torch.stack([one - one.mean(0) for one in guesses]).double()
            covariance = spread.transpose(1, 2) @ spread / DRAWS
            own = covariance.diagonal(dim1=1, dim2=2).mean(1)[:, None, None].clamp(min=JITTER)
            covariance = (1 - OWN) * covariance + OWN * own * torch.eye(usual.shape[1]).to(covariance)
            prior = torch.linalg.inv(covariance)
            equations = Equations(
                self.slice, embeddings.clone(), usual,
                torch.stack([row.state for row in rows]).float().clone(), torch.zeros_like(usual).double(), prior,
                by_attention=True, positions=torch.tensor([row.position for row in rows], device=tokens.device),
            )  # fmt: skip
            every = torch.arange(len(rows), device=tokens.device)
            moved = torch.zeros_like(usual).double()
            explained = torch.zeros_like(every, dtype=torch.bool)
            for start in range(STARTS):
                begun = moved if start == 0 else torch.where(explained[:, None], moved, spread[:, start])
                moved = equations.solve(begun)
                left = (equations.observed - equations.states(every, moved)) / equations.unit()
                explained = left.square().mean(1) < ROUNDING**2
                if bool(explained.all()):
                    break
            jacobian = equations.jacobian(every, moved) / equations.unit()[..., None]
        precision = jacobian.transpose(1, 2) @ jacobian / ROUNDING**2 + prior
        unsure = torch.cholesky_inverse(torch.linalg.cholesky(precision))
        out = list[_Row]()
        for i, (row, (weights, values, scale)) in enumerate(zip(rows, known, strict=True)):
            if not explained[i]:
                continue
            brought = (usual[i] + moved[i]).unflatten(0, values.shape[1:])
            mass = weights.sum(1)
            left = mass[:, None] * brought - torch.einsum("hk,khw->hw", weights, values)
            out.append(
                _Row(self.layer, row, jacobian[i], unsure[i], brought.float(), left.flatten(), mass, scale)
            )
        return out

    def _known(self, row: Shown) -> tuple[Tensor, Tensor, Tensor]:
        """Weights ``[h, k]`` and values ``[k, h, w]`` of what a row sees that is known, itself too, and their scale."""
        tokens = {**{p: t for p, t in row.known.items() if p < row.position}, row.position: row.token}
        scores, values = [], []
        for place, token in tokens.items():
            one = torch.tensor([token], device=self.slice.device)
            scores.append(self.layer.scores(row.token, row.position, place, one))
            values.append(self.layer.values(place)[one])
        every = torch.cat(scores, 1)
        scale = every.amax(1, keepdim=True)
        spread = self.layer.spread(torch.cat(values))
        return (every - scale).exp().double(), spread.double(), scale

    def _fillings(
        self, row: Shown, weights: Tensor, values: Tensor, scale: Tensor, draws: torch.Generator
    ) -> Float[Tensor, "n a"]:
        """What attention would bring a row behind drawn tokens."""
        total = torch.einsum("hk,khw->hw", weights, values).float().expand(DRAWS, -1, -1).clone()
        mass = weights.sum(1).float().expand(DRAWS, -1).clone()
        for place in row.missing:
            drawn = torch.randint(len(self.pool), (DRAWS,), generator=draws)
            tokens = self.pool[drawn.to(self.pool.device)]
            own = (self.layer.scores(row.token, row.position, place, tokens) - scale).exp().T
            total += own[..., None] * self.layer.spread(self.layer.values(place)[tokens])
            mass += own
        return (total / mass[..., None]).flatten(1)


class _Search:
    """The sums of one gap."""

    def __init__(self, names: MissingTokens, rows: Sequence[_Row], places: Sequence[int]) -> None:
        self.rows, self.places, self.prior = list(rows), list(places), names.prior
        self.size = len(names.prior)
        self.jacobian = torch.block_diag(*(row.jacobian for row in rows))
        self.width = rows[0].brought.shape[1]
        self.moments = {place: self._moments(place, names.pool) for place in places}
        self.begun = _Sums(
            torch.zeros(1, 0, dtype=torch.long, device=self.prior.device),
            torch.cat([row.sum for row in rows])[None],
            torch.cat([row.mass for row in rows])[None],
            torch.zeros(1, dtype=torch.double, device=self.prior.device),
        )

    # ---- the tables

    def _parts(self, place: int, tokens: Int[Tensor, " c"]) -> Float[Tensor, "c a"]:
        return torch.cat([row.parts(place, tokens) for row in self.rows], 1)

    def _weights(self, place: int, tokens: Int[Tensor, " c"]) -> Float[Tensor, "c h"]:
        return torch.cat([row.weights(place, tokens) for row in self.rows]).T

    def _moments(self, place: int, pool: Int[Tensor, " n"]) -> _Moments:
        parts, weights = self._parts(place, pool).double(), self._weights(place, pool).double()
        return _Moments(parts.mean(0), torch.cov(parts.T), weights.mean(0), torch.cov(weights.T))

    def _along(self, place: int, directions: Float[Tensor, "r a"]) -> Float[Tensor, "v r"]:
        """What the whole vocabulary contributes at a place, along some directions."""
        turned = directions.float().T.contiguous()
        out = torch.empty(self.size, turned.shape[1], device=turned.device)
        for tokens in torch.arange(self.size, device=turned.device).split(AT_ONCE):
            out[tokens] = self._parts(place, tokens) @ turned
        return out

    # ---- how sums are weighed

    def _whitened(self, sums: _Sums, rest: Sequence[int], free: Sequence[int], believed: float) -> Tensor:
        """Turns what is left of a sum into units of what it may miss by ``[e, a]``.

        Args:
            rest: places still missing. free: those of them that are about to be chosen, which only their weight makes
                uncertain: it is what the sum is divided by.
        """
        mass = sums.mass.mean(0) + sum(self.moments[p].weight for p in rest)
        by_head = mass.repeat_interleave(self.width)
        divided = self.jacobian / by_head
        zero = torch.zeros(len(by_head), len(by_head), dtype=torch.double, device=mass.device)
        covariance = sum((self.moments[p].parts for p in rest if p not in free), zero)
        spread = sum(
            (self.moments[p].weights for p in rest), torch.zeros_like(zero[: len(mass), : len(mass)])
        )
        unsure = torch.block_diag(*(row.unsure for row in self.rows))
        covariance = covariance + unsure * spread.repeat_interleave(self.width, 0).repeat_interleave(
            self.width, 1
        )
        noise = divided @ covariance @ divided.T
        return torch.linalg.solve_triangular(_lower(noise, believed), divided, upper=False)

    def _most_telling(self, whitened: Float[Tensor, "e a"], places: Sequence[int], count: int) -> Tensor:
        """Directions ``[count, a]`` in which what is about to be chosen varies most."""
        covariance = whitened @ sum(self.moments[p].parts for p in places) @ whitened.T
        _, directions = torch.linalg.eigh(covariance)
        return directions[:, -count:].T @ whitened

    def _with(self, sums: _Sums, place: int, tokens: Int[Tensor, " b"]) -> _Sums:
        """Sums, each with a token at a place."""
        return _Sums(
            torch.cat([sums.chosen, tokens[:, None]], 1),
            sums.left - self._parts(place, tokens).double(),
            sums.mass + self._weights(place, tokens).double(),
            sums.prior + self.prior[tokens],
        )

    def beam(self) -> _Sums:
        """Sums over all places, those that explain the rows best first."""
        sums, places = self.begun, self.places
        for k in range(len(places) - 2 if len(places) > 1 else 1):
            sums = self._extended(sums, places[k:], BELIEVED[min(k, len(BELIEVED) - 1)])
        if len(places) > 1:
            sums = self._paired(sums[:PAIRED], places[-2], places[-1])
        return self._rearranged(self._ordered(sums))

    def _extended(self, sums: _Sums, rest: Sequence[int], believed: float) -> _Sums:
        """Sums with the first of the remaining places chosen, the others at what they may be."""
        place, others = rest[0], rest[1:]
        whitened = self._whitened(sums, rest, [place], believed)
        mean = sum((self.moments[p].part for p in others), torch.zeros_like(sums.left[0]))
        left = sums.left - mean
        directions = self._most_telling(whitened, [place], ALONG)
        table, target = self._along(place, directions), (left @ directions.T).float()
        said = torch.addmm(self.prior.float() - table.square().sum(1) / 2, target, table.T)
        said += (sums.prior - (target.square().sum(1) / 2).double()).float()[:, None]
        which = said.flatten().topk(min(LONGLIST * BEAM, said.numel())).indices
        before, tokens = which // self.size, which % self.size
        exactly = (left[before] - self._parts(place, tokens).double()) @ whitened.T
        score = sums.prior[before] + self.prior[tokens] - exactly.square().sum(1) / 2
        best = score.topk(min(BEAM, len(score))).indices
        return self._with(sums[before[best]], place, tokens[best])

    def _paired(self, sums: _Sums, first: int, second: int) -> _Sums:
        """Sums with their last two places chosen together: what one is believed to be does not fit every token."""
        ahead = self._whitened(sums, [first, second], [first], BELIEVED[-1])
        directions = self._most_telling(ahead, [first], ALONG)
        table = self._along(first, directions)
        target = ((sums.left - self.moments[second].part) @ directions.T).float()
        likely = torch.addmm(self.prior.float() - table.square().sum(1) / 2, target, table.T)
        both = self._whitened(sums, [first, second], [first, second], BELIEVED[-1])
        directions = self._most_telling(both, [first, second], PAIR_ALONG)
        firsts, seconds = self._along(first, directions), self._along(second, directions)
        target, cost = (sums.left @ directions.T).float(), self.prior.float() - seconds.square().sum(1) / 2
        out = list[_Sums]()
        for i, row in enumerate(likely):
            one = row.topk(min(PAIRS, self.size)).indices
            left = target[i] - firsts[one]
            score, other = list[Tensor](), list[Tensor]()
            for part in left.split(PAIRS_AT_ONCE):
                value, token = torch.addmm(cost, part, seconds.T).max(1)
                score.append(value)
                other.append(token)
            total = torch.cat(score) + self.prior[one].float() - left.square().sum(1) / 2
            best = total.topk(min(KEPT, len(total))).indices
            at = torch.full_like(best, i)
            grown = self._with(self._with(sums[at], first, one[best]), second, torch.cat(other)[best])
            out.append(grown)
            if self.explained(grown):
                break
        return _joined(out)

    # ---- what comes out

    def _unexplained(self, sums: _Sums) -> Float[Tensor, " b"]:
        """Share of the rows that whole sums leave unexplained."""
        left = (sums.left / sums.mass.repeat_interleave(self.width, 1)) @ self.jacobian.T
        return left.square().mean(1).sqrt()

    def best(self, sums: _Sums) -> float:
        return float(self._unexplained(sums).min())

    def explained(self, sums: _Sums) -> bool:
        """Whether one of some whole sums is right."""
        return self.best(sums) < EXPLAINED

    def _ordered(self, sums: _Sums) -> _Sums:
        return sums[self._unexplained(sums).argsort()]

    def _rearranged(self, sums: _Sums) -> _Sums:
        """Whole sums, of which the best got their tokens in the order that explains the rows best.

        Which tokens are missing shows better than where: the right ones in a wrong order come near.
        """
        if len(self.places) == 1 or self.explained(sums):
            return sums
        out = list[_Sums]()
        for i in range(min(REARRANGED, len(sums.chosen))):
            best = sums[i : i + 1]
            tokens = best.chosen[0]
            parts = torch.stack([self._parts(place, tokens) for place in self.places]).double()
            weights = torch.stack([self._weights(place, tokens) for place in self.places]).double()
            places, order = torch.arange(len(tokens), device=tokens.device), tuple(range(len(tokens)))
            while True:
                orders = {swapped(order, *pair) for pair in combinations(order, 2)}
                orders |= {moved(order, a, b) for a in order for b in order}
                which = torch.tensor(sorted(orders - {order}), device=tokens.device)
                tried = _Sums(
                    tokens[which],
                    self.begun.left - parts[places, which].sum(1),
                    self.begun.mass + weights[places, which].sum(1),
                    best.prior.expand(len(which)),
                )
                nearest = int(self._unexplained(tried).argmin())
                if self.best(tried) > NEARER * self.best(
                    best
                ):  # and not by rounding, where a token is there twice
                    break
                best, order = tried[nearest : nearest + 1], tuple(which[nearest].tolist())
            out.append(best)
            if self.explained(best):
                break
        return self._ordered(_joined([*out, sums]))

    def fillings(self, sums: _Sums) -> list[dict[int, int]]:
        """Tokens by place."""
        return [dict(zip(self.places, one, strict=True)) for one in sums.chosen.tolist()]

    def doubtful(self, sums: _Sums) -> list[tuple[int, int]]:
        """Pairs of places by index, first those where other tokens, each by itself, explain most of what is missed."""
        one = sums[:1]
        divided = self.jacobian / one.mass[0].repeat_interleave(self.width)
        change = sum(
            (self.moments[p].parts for p in self.places), torch.zeros_like(self.jacobian.T @ divided)
        )
        change = change * (2 / len(self.places))  # what another wrong token adds
        lower = _lower(divided @ change @ divided.T, BELIEVED[-1])
        whitened = torch.linalg.solve_triangular(lower, divided, upper=False)
        directions = self._most_telling(whitened, self.places, ALONG)
        gains = list[float]()
        for k, place in enumerate(self.places):
            token = one.chosen[:, k]
            target = ((one.left + self._parts(place, token).double()) @ directions.T).float()[0]
            table = self._along(place, directions)
            said = self.prior.float() + table @ target - table.square().sum(1) / 2
            gains.append(float(said.max() - said[token[0]]))
        return sorted(combinations(range(len(gains)), 2), key=lambda pair: -gains[pair[0]] - gains[pair[1]])

    def sought_anew(self, sums: _Sums, pair: tuple[int, int]) -> _Sums:
        """Whole sums with the tokens at two of their places (by index) sought anew."""
        kept = [k for k in range(len(self.places)) if k not in pair]
        base = self.begun[torch.zeros(len(sums.chosen), dtype=torch.long)]
        for k in kept:
            base = self._with(base, self.places[k], sums.chosen[:, k])
        found = self._paired(base, *(self.places[k] for k in pair))
        order = torch.tensor([*kept, *pair]).argsort()
        return self._rearranged(
            self._ordered(_Sums(found.chosen[:, order], found.left, found.mass, found.prior))
        )


def _lower(covariance: Float[Tensor, "n n"], believed: float) -> Float[Tensor, "n n"]:
    """Cholesky's factor of a covariance to which what may be missed anyway is added."""
    least = believed**2 + JITTER * float(covariance.trace())
    return torch.linalg.cholesky(covariance + least * torch.eye(len(covariance)).to(covariance))


def _joined(sums: Sequence[_Sums]) -> _Sums:
    parts = zip(*((one.chosen, one.left, one.mass, one.prior) for one in sums), strict=True)
    return _Sums(*(torch.cat(part) for part in parts))
