"""Solve for missing tokens behind one layer from the sum that attention adds to each row.

Behind one layer a row is a function of its own token and of what attention adds to it, and the latter can be solved for
up to rounding (``hiddenlab.matching.layer_inversion``). Attention's output is an average over all tokens before the
row, each with a softmax weight times a value. Both are functions of that token and its position alone. So for every
query head, with o the attention output of the row, s over all positions and x their tokens,

    sum over s of  exp(q k(x_s)) (v(x_s) - o) = 0,

where known tokens contribute a known part, and every missing token one column of a table as long as the vocabulary.
There are as many equations as attention's output has coordinates, hundreds a row, for a handful of missing tokens. A
beam goes over the places, nearest first, and weighs each sum by how far the tokens still missing can be expected to
change it (``sum_search``). It needs neither a language model nor a single run of the model
(docs/log/032-missing-tokens-solved.md, thirty-second entry). Dozens of tokens, behind as many rows of a cluster, are
estimated together (``expectation_propagation``, thirty-third entry).

Queries, keys and values of the second layer, which attention nodes receive, are functions of the same.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hiddenlab.attacks.missing_tokens.expectation_propagation import Beliefs
from hiddenlab.attacks.missing_tokens.sum_search import JITTER, Row, Search, Sums
from hiddenlab.channels import Channel
from hiddenlab.matching.first_layer import FirstLayer
from hiddenlab.matching.layer_inversion import EXACT, Equations
from hiddenlab.models import TruncatedModel
from hiddenlab.preparations import as_whole
from hiddenlab.proposals.corpus import Corpus
from hiddenlab.registry import parse_spec
from hiddenlab.types import ObservationInfo, Progress, silent

DRAWS = 600  # drawn fillings from which the prior of a row's attention is learned
OWN = 0.05  # weight of the mean variance in the prior's covariance (shrinkage: draws are hardly more than directions)
STARTS = 6  # starts of the solve: the first is the mean, the others drawn fillings; some do not converge
ROUNDING = 1e-5  # share of a row that the solve leaves unexplained, at most, in full precision
ROUNDED = {"identity", "dtype", "int8", "nf4"}  # channels that only round rows
MAX_ROUNDING_RATIO = 2.0  # largest residual of a rounded row, in multiples of the mean rounding
WINDOWS, TOKENS = 8, 32  # on which that is measured
POOL = 6000  # sampled tokens that represent what may be missing
UNIFORM = 0.2  # share of them drawn uniformly from the vocabulary; the others are as frequent as in text
TEXTS = 60_000  # tokens of text that tell how often that is
# Rounds of searching pairs of tokens again, and pairs tried at most in each.
MENDING_ROUNDS, MENDED_PAIRS = 4, 6
LONGEST, ROWS = 64, 8  # missing tokens that are solved for, and rows used together, at most
BEAMED, PER_ROW = 16, 8  # missing tokens of which a beam is tried; of more than these at most so many a row


@dataclass(frozen=True)
class Shown:
    """A row: its state, its own token, its position, and the known tokens before it, by position."""

    state: Float[Tensor, " e"]
    token: int
    position: int
    known: Mapping[int, int]

    @property
    def missing(self) -> list[int]:
        return [p for p in range(self.position) if p not in self.known]


class AttentionSums:
    """Finds the tokens before rows of one layer that no row shows.

    Args:
        model: whose states depend on no attention but the first layer's. info: facts of whole prompts; rows may be
            rounded.
        seed: of draws of what may be missing. progress: where progress is reported.
    """

    def __init__(
        self,
        model: TruncatedModel,
        info: ObservationInfo | None = None,
        seed: int = 0,
        progress: Progress = silent,
    ) -> None:
        self.progress = progress
        full = model.dtype == torch.float32 and model.quantization is None
        self.model = (
            model if full else model.sibling(model.site.layer, stream=model.site.stream, dtype="float32")
        )
        self.layer, self.seed = FirstLayer(model), seed
        self.coarse = self._coarseness(model, info.channel if info else ())
        size, device = model.vocab_size, model.device
        corpus = Corpus(model, seed=0)
        texts = torch.cat([corpus.text_window(64) for _ in range(TEXTS // 64)])
        counts = torch.bincount(texts, minlength=size).double()
        share = (1 - UNIFORM) * counts / counts.sum() + UNIFORM / size
        self.prior: Float[Tensor, " v"] = share.log().to(device)
        drawn = torch.multinomial(share.float(), POOL, replacement=True, generator=self._draws())
        self.pool: Int[Tensor, " n"] = drawn.to(device)

    def _draws(self) -> torch.Generator:
        """Return the same random draws for every gap, so that no gap depends on those before it."""
        return torch.Generator().manual_seed(self.seed)

    @staticmethod
    def applies(info: ObservationInfo, model: TruncatedModel) -> bool:
        """Return whether rows can be solved: states of one layer, released unchanged or only rounded."""
        names = {parse_spec(spec)[0] for spec in as_whole(info).channel}
        return model.behind_one_attention and names <= ROUNDED

    def _coarseness(self, model: TruncatedModel, channel: Sequence[str]) -> float:
        """Return the mean relative difference of rows from full precision, released as by the provider."""
        if model is self.model and set(channel) <= {"identity"}:
            return 0.0
        corpus = Corpus(model, seed=1)
        windows = [corpus.window()[:TOKENS] for _ in range(WINDOWS)]
        released = Channel.parse(channel).release_batch(model, [w.tolist() for w in windows], self._draws())
        apart = list[Tensor]()
        for window, (observation, _) in zip(windows, released, strict=True):
            exact = self.model.encode(window.to(model.device)).float()
            off = observation.states.to(exact.device).float() - exact
            apart.append(off.norm(dim=1) / exact.norm(dim=1))
        return float(torch.cat(apart).mean())

    def counters(self) -> tuple[int, int]:
        """Return positions and passes run so far, without those of the truncated model itself."""
        return self.layer.counters()

    def name(self, rows: Sequence[Shown]) -> Iterator[list[dict[int, int]]]:
        """Find the tokens at the missing places before some rows.

        Args:
            rows: at most ``ROWS`` of them count, the last ones.

        Yields:
            Fillings by place, the one that explains the rows best first. As long as none explains them, further
                fillings found when pairs of tokens are searched again. Nothing where too many places are missing, in
                all or for so many rows, no row sees one of them, or no row can be solved.
        """
        # Rows may be no states of this layer: the equations then have no solution.
        with suppress(torch.linalg.LinAlgError):  # type: ignore[attr-defined]
            yield from self._name(rows)

    def _name(self, rows: Sequence[Shown]) -> Iterator[list[dict[int, int]]]:
        rows = rows[-ROWS:]
        places = sorted({p for row in rows for p in row.missing}, reverse=True)  # the nearest weigh most
        if not 0 < len(places) <= min(LONGEST, max(BEAMED, PER_ROW * len(rows))):
            return
        turned = self._turned_back(rows)
        own = [row.position for row in turned]
        if not turned or not bool(self.layer.attention.visible(own, places).any(0).all()):
            return  # a token that no row sees cannot be found
        search = Search(turned, places, self.prior, self.pool, self.coarse)
        few = len(places) <= BEAMED
        sums = search.beam() if few else Beliefs(search, self.progress).settle()
        yield search.fillings(sums)
        if few and not search.explained(sums):
            together = Beliefs(search, self.progress).settle()
            if search.best(together) < search.best(sums):
                sums = together
                yield search.fillings(sums)
        if not search.explained(sums):
            yield from self._mended(search, sums)

    @staticmethod
    def _mended(search: Search, sums: Sums) -> Iterator[list[dict[int, int]]]:
        """Yield fillings whose sum was improved by searching pairs of tokens again, until one explains the rows."""
        for _ in range(MENDING_ROUNDS):
            for pair in search.doubtful(sums)[:MENDED_PAIRS]:
                improved = search.sought_anew(sums, pair)
                if search.best(improved) < search.best(sums):
                    sums = improved
                    break
            else:
                return
            yield search.fillings(sums)
            if search.explained(sums):
                return

    def _turned_back(self, rows: Sequence[Shown]) -> list[Row]:
        """Solve for each row's attention output and the sum it implies; rows that nothing explains are left out."""
        known = [self._known(row) for row in rows]
        draws = self._draws()
        guesses = [self._fillings(row, *part, draws) for row, part in zip(rows, known, strict=True)]
        tokens = torch.tensor([row.token for row in rows], device=self.model.device)
        embeddings = self.model.embed(tokens).float()
        with torch.inference_mode(False):
            usual = torch.stack([guess.mean(0) for guess in guesses]).clone()
            spread = torch.stack([guess - guess.mean(0) for guess in guesses]).double()
            covariance = spread.transpose(1, 2) @ spread / DRAWS
            own = covariance.diagonal(dim1=1, dim2=2).mean(1)[:, None, None].clamp(min=JITTER)
            covariance = (1 - OWN) * covariance + OWN * own * torch.eye(usual.shape[1]).to(covariance)
            prior = torch.linalg.inv(covariance)
            equations = Equations(
                self.model, embeddings.clone(), usual,
                torch.stack([row.state for row in rows]).float().clone(), torch.zeros_like(usual).double(), prior,
                by_attention=True, positions=torch.tensor([row.position for row in rows], device=tokens.device),
                exact=max(EXACT, self.coarse),
            )  # fmt: skip
            every = torch.arange(len(rows), device=tokens.device)
            moved = torch.zeros_like(usual).double()
            explained = torch.zeros_like(every, dtype=torch.bool)
            for start in range(STARTS):
                initial = moved if start == 0 else torch.where(explained[:, None], moved, spread[:, start])
                moved = equations.solve(initial)
                left = (equations.observed - equations.states(every, moved)) / equations.unit()
                explained = left.square().mean(1) < max(ROUNDING, MAX_ROUNDING_RATIO * self.coarse) ** 2
                if bool(explained.all()):
                    break
            jacobian = equations.jacobian(every, moved) / equations.unit()[..., None]
        precision = jacobian.transpose(1, 2) @ jacobian / max(ROUNDING, self.coarse) ** 2 + prior
        unsure = torch.cholesky_inverse(torch.linalg.cholesky(precision))
        turned = list[Row]()
        for i, (row, (weights, values, scale)) in enumerate(zip(rows, known, strict=True)):
            if not explained[i]:
                continue
            brought = (usual[i] + moved[i]).unflatten(0, values.shape[1:])
            mass = weights.sum(1)
            left = mass[:, None] * brought - torch.einsum("hk,khw->hw", weights, values)
            terms = jacobian[i], unsure[i], brought.float(), left.flatten(), mass, scale
            turned.append(Row(self.layer, row.token, row.position, *terms))
        return turned

    def _known(self, row: Shown) -> tuple[Tensor, Tensor, Tensor]:
        """Return weights ``[h, k]``, values ``[k, h, w]`` and scale of the known tokens a row sees, with its own."""
        tokens = {**row.known, row.position: row.token}
        scores, values = [], []
        for place, token in tokens.items():
            ids = torch.tensor([token], device=self.model.device)
            scores.append(self.layer.scores(row.token, row.position, place, ids))
            values.append(self.layer.values(place, ids))
        every = torch.cat(scores, 1)
        scale = every.amax(1, keepdim=True)
        spread = self.layer.spread(torch.cat(values))
        return (every - scale).exp().double(), spread.double(), scale

    def _fillings(
        self, row: Shown, weights: Tensor, values: Tensor, scale: Tensor, draws: torch.Generator
    ) -> Float[Tensor, "n a"]:
        """Return what attention would add to a row behind randomly drawn tokens."""
        total = torch.einsum("hk,khw->hw", weights, values).float().expand(DRAWS, -1, -1).clone()
        mass = weights.sum(1).float().expand(DRAWS, -1).clone()
        for place in row.missing:
            drawn = torch.randint(len(self.pool), (DRAWS,), generator=draws)
            tokens = self.pool[drawn.to(self.pool.device)]
            own = (self.layer.scores(row.token, row.position, place, tokens) - scale).exp().T
            total += own[..., None] * self.layer.spread(self.layer.values(place)[tokens])
            mass += own
        return (total / mass[..., None]).flatten(1)
