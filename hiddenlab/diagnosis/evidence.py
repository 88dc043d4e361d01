"""Name tokens whose vectors at a place are the observed rows, and compare those vectors at every place."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hiddenlab.diagnosis.hypotheses import PASS_TOKENS, Hypothesis, Layout
from hiddenlab.diagnosis.places import Place, read_places
from hiddenlab.models import TruncatedModel
from hiddenlab.proposals.probe import whitened_table, whitening
from hiddenlab.proposals.ridge import RidgeReader

STANDS_OUT = 3.0  # a row fits a token whose vector is this many times nearer than that of any other token
NEAR = 0.7  # of a row's length: a vector that is farther away is no match, whatever the others are
SHORTLISTS = (64, 512)  # tokens tried for a row; more where none of the first stands out
NOTHING = 1e-4  # of the median length: a shorter row is taken for zeros
GLANCE = 16  # tokens tried for a row that is probably no first one
SEVERAL = 4  # first tokens that stay possible where none stands out
WHOLE = 4096  # a vocabulary up to this size is tried whole
LONGEST = 4  # rows that are explained before the look ends
EXACT = 1e-3  # distance of a row that rounding in float32 explains, relative to its length


@dataclass(frozen=True)
class Chain:
    """Tokens whose vectors explain rows that follow one another.

    Attributes:
        start: the first explained row. tokens: one for each row from there on, behind ``before``. distances: of each
            row to its token's vector, relative to the row's length. before: tokens before the first explained row.
    """

    start: int
    tokens: tuple[int, ...] = ()
    distances: tuple[float, ...] = ()
    before: tuple[int, ...] = ()


class Reader:
    """Rank tokens for rows of one place, by ridge regressions on vectors of known tokens.

    Args:
        targets: the whitened embeddings of all tokens. vectors, tokens: of tokens in running text. first, singles: of
            tokens that stand first.
    """

    def __init__(
        self,
        targets: Float[Tensor, "v d"],
        vectors: Float[Tensor, "m w"],
        tokens: Int[Tensor, " m"],
        first: Float[Tensor, "s w"],
        singles: Int[Tensor, " s"],
    ) -> None:
        self._targets = targets
        self._behind = RidgeReader(vectors, targets[tokens])
        self._first = RidgeReader(first, targets[singles])

    def first(self, rows: Float[Tensor, "rows w"], count: int) -> Int[Tensor, "rows k"]:
        """Return likely tokens of rows that stand first in their prompt."""
        return self._best(self._first, rows, count)

    def behind(self, rows: Float[Tensor, "rows w"], count: int) -> Int[Tensor, "rows k"]:
        """Return likely tokens of rows that stand behind others."""
        return self._best(self._behind, rows, count)

    def _best(self, reader: RidgeReader, rows: Tensor, count: int) -> Tensor:
        vocabulary = len(self._targets)
        return (
            reader.scores(rows, self._targets)
            .topk(vocabulary if vocabulary <= WHOLE and count > 1 else min(count, vocabulary), dim=1)
            .indices
        )


def targets_of(model: TruncatedModel) -> Float[Tensor, "v d"]:
    """Return the model's embeddings, whitened: what regressions predict."""
    table = model.embedding.detach().float().cpu()
    return whitened_table(table, *whitening(table))


def vectors_at(
    model: TruncatedModel, places: Sequence[Place], tokens: Int[Tensor, "b n"]
) -> dict[Place, Float[Tensor, "b n w"]]:
    """Return the vectors of sequences of one length at some places."""
    parts: dict[Place, list[Tensor]] = {place: [] for place in places}

    def visit(place: Place, vectors: Tensor) -> None:
        if place in parts:
            parts[place].append(vectors.float().cpu())

    for batch in tokens.split(max(1, PASS_TOKENS // tokens.shape[1])):
        read_places(model, batch, visit)
    return {place: torch.cat(batches) for place, batches in parts.items() if batches}


def stand_alone(
    model: TruncatedModel,
    looked: Sequence[tuple[Hypothesis, Reader, Int[Tensor, " rows"]]],
) -> list[Float[Tensor, " rows"]]:
    """Return how much nearer each row is to the vector of one token by itself than to that of any other.

    Args:
        looked: hypotheses, their readers, and the rows to look at; the tokens of all are run together.
    """
    tokens = torch.cat(
        [
            reader.first(h.rows[rows], SHORTLISTS[0] if i == 0 else GLANCE).flatten()
            for h, reader, places in looked
            for i, rows in enumerate(places.split(1))
        ]
    ).unique()
    known = vectors_at(model, list({h.place for h, _, _ in looked}), tokens[:, None])
    margins = []
    for hypothesis, _, rows in looked:
        seen = hypothesis.rows[rows]
        near = torch.cdist(seen, known[hypothesis.place][:, 0]).topk(2, largest=False).values
        length = torch.linalg.vector_norm(seen, dim=1)
        # A row of zeros is as near to every small vector: padding, or an embedding that was never trained.
        matching = (near[:, 0] <= NEAR * length) & (length > NOTHING * length.median())
        margins.append(torch.where(matching, near[:, 1] / near[:, 0].clamp(min=1e-12), 0))
    return margins


def explain(
    model: TruncatedModel,
    hypothesis: Hypothesis,
    reader: Reader,
    start: int,
    befores: Sequence[tuple[int, ...]] = ((),),
    shortlists: Sequence[int] = SHORTLISTS,
) -> Chain | None:
    """Name tokens for rows from ``start`` on, each behind those before it; None where no token stands out.

    Args:
        befores: sequences of tokens that may stand before the row, tried each. shortlists: how many tokens are tried
            for a row; the next number where none stood out.
    """
    chains = [Chain(start, before=before) for before in befores]
    while len(chains[0].tokens) < LONGEST and start + len(chains[0].tokens) < len(hypothesis.rows):
        longer: list[Chain] = []
        for count in shortlists:
            longer = _longer(model, hypothesis, reader, chains, count)
            if len(longer) == 1 or model.vocab_size <= WHOLE:
                break
        if len(longer) > 1 and chains[0].tokens:  # the next row must tell
            break
        chains = longer
    return chains[0] if len(chains) == 1 and _tells(chains[0], len(hypothesis.rows)) else None


def _tells(chain: Chain, rows: int) -> bool:
    """Return whether a chain is more than chance: one row alone has to be a token's vector within rounding."""
    return len(chain.tokens) >= min(2, rows) or (len(chain.tokens) == 1 and chain.distances[0] <= EXACT)


def _longer(
    model: TruncatedModel, hypothesis: Hypothesis, reader: Reader, chains: Sequence[Chain], count: int
) -> list[Chain]:
    """Return the chains with one more token: the one whose vector stands out, else the nearest few."""
    first = chains[0]
    row = hypothesis.rows[first.start + len(first.tokens)][None]
    ids = (reader.behind if first.before or first.tokens else reader.first)(row, count)[0]
    prefixes = torch.tensor([chain.before + chain.tokens for chain in chains], dtype=torch.long)
    sequences = torch.cat([prefixes.repeat_interleave(len(ids), 0), ids.repeat(len(chains))[:, None]], dim=1)
    vectors = vectors_at(model, [hypothesis.place], sequences)[hypothesis.place][:, -1]
    distances = torch.linalg.vector_norm(vectors - row, dim=1) / row.norm().clamp(min=1e-12)
    near = distances.topk(min(SEVERAL, len(distances)), largest=False)
    nearest = float(near.values[0])
    alone = nearest <= NEAR and (len(near.values) < 2 or STANDS_OUT * nearest <= float(near.values[1]))
    longer = []
    for i in near.indices[: 1 if alone else SEVERAL].tolist():
        chain, token = chains[i // len(ids)], int(sequences[i, -1])
        longer.append(
            replace(chain, tokens=(*chain.tokens, token), distances=(*chain.distances, float(distances[i])))
        )
    return longer


def distances_of(
    model: TruncatedModel, chain: Chain, ways: Sequence[Layout]
) -> dict[tuple[Place, Layout], Float[Tensor, " k"]]:
    """Return how far a chain's rows are from its tokens' vectors at every place, relative to the rows' length."""
    distances = dict[tuple[Place, Layout], Tensor]()
    stop = chain.start + len(chain.tokens)

    def visit(place: Place, vectors: Tensor) -> None:
        own = vectors[0, len(chain.before) :].float().cpu()
        for layout in ways:
            rows = layout.rows[chain.start : stop]
            if rows.shape == own.shape:
                norms = torch.linalg.vector_norm(rows, dim=1).clamp(min=1e-12)
                distances[place, layout] = torch.linalg.vector_norm(own - rows, dim=1) / norms

    read_places(model, torch.tensor([chain.before + chain.tokens]), visit)
    return distances
