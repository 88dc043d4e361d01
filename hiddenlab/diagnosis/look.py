"""Look at observed rows: which place of the model, which layout and which first rows explain them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from hiddenlab.diagnosis.evidence import (
    EXACT,
    SHORTLISTS,
    STANDS_OUT,
    WHOLE,
    Chain,
    Reader,
    distances_of,
    explain,
    stand_alone,
    targets_of,
    vectors_at,
)
from hiddenlab.diagnosis.hypotheses import (
    AS_THEY_ARE,
    TYPICAL,
    Hypothesis,
    Layout,
    layouts,
    measure_places,
    rank,
)
from hiddenlab.diagnosis.norms import SAME, moved_by_norm
from hiddenlab.diagnosis.numerics import other_numbers
from hiddenlab.diagnosis.places import Place
from hiddenlab.models import TruncatedModel
from hiddenlab.models.tokens import most_tokens
from hiddenlab.proposals.corpus import Corpus
from hiddenlab.types import INNER_STREAMS, Observation, Site

TEXT, WINDOW, SINGLES = 2048, 32, 2048  # tokens of running text, in windows, and tokens that stand first
MOST_STARTS = 512  # rows asked whether another prompt begins there
GLANCED = 256, 512  # of the single tokens and of the text, which give the first estimates
TRIED = 12  # hypotheses that are read, beside those of the claimed place
TOGETHER = 8  # of them whose first rows are looked at in one go
CLOSELY = 3  # of them read where the first row tells too little, or is missing
STARTS = 12  # rows looked at as a prompt's first
MOST_ROWS = 64  # looked at where the vocabulary is small
CLEAR = 0.3  # log-likelihood of a coordinate by which one place is clearly likelier than another
FAR = 0.5  # of a row's length: vectors at this distance explain nothing
ALL = 0.8  # share of rows that fit a place without context
MOST_PREFIXES = 8  # special tokens tried before the first row


@dataclass(frozen=True)
class Finding:
    """What explains the rows.

    Attributes:
        place, layout: where such vectors lie, and how to read the numbers. chain: tokens that explain some rows.
        starts: the first rows of prompts. distance: of the explained rows to the model's vectors. numbers: the form of
            the model (a dtype, a quantization) whose vectors they are, where it is another one; else empty.
    """

    place: Place
    layout: Layout
    chain: Chain
    starts: tuple[int, ...]
    distance: float
    numbers: str = ""

    @property
    def exact(self) -> bool:
        """Whether some form of the model gives these rows within rounding."""
        return self.distance <= EXACT or bool(self.numbers)


class Sample:
    """The attacker's own tokens, and the embeddings that regressions predict; the same for every layer of a model."""

    def __init__(self, model: TruncatedModel, seed: int) -> None:
        corpus = Corpus(model, seed)
        length = min(WINDOW, most_tokens(model.module) or WINDOW)
        windows = [corpus.text_window(length) for _ in range(TEXT // length)]
        self.texts = torch.stack([window for window in windows if len(window) == length])
        order = torch.randperm(model.vocab_size, generator=torch.Generator().manual_seed(seed))
        count = model.vocab_size if model.vocab_size <= WHOLE else SINGLES
        self.singles = torch.cat([torch.tensor(model.special_ids, dtype=torch.long), order[:count]])
        self.targets = targets_of(model)


class Look:
    """One look at one observation with some layers of the model.

    Args:
        model: truncated or whole; places of its layers are known. claimed_only: look at no place but the one that the
            observation names.

    Attributes:
        normed: the places behind a norm whose output the rows can be, by their lengths: one in a trained model, whose
            norms all differ.
    """

    def __init__(
        self, observation: Observation, model: TruncatedModel, sample: Sample, *, claimed_only: bool = False
    ) -> None:
        self.model, self.sample = model, sample
        self.ways = layouts(observation, model)
        widths = {way.rows.shape[1] for way in self.ways}
        glanced, read = GLANCED
        texts = sample.texts[: max(1, read // sample.texts.shape[1])]
        self.places = measure_places(model, texts, sample.singles[:glanced], widths)
        self.claimed = next((place for place in self.places if place.site == observation.info.site), None)
        self.likelihoods = rank(self.places, self.ways)
        own = [hypothesis for hypothesis in self.likelihoods if hypothesis.place == self.claimed]
        self.own = sorted(own, key=lambda hypothesis: hypothesis.layout.name != AS_THEY_ARE)
        others = [hypothesis for hypothesis in self.likelihoods if hypothesis.place != self.claimed]
        moved = {} if claimed_only else {p: moved_by_norm(model, p, observation.states) for p in self.places}
        self.normed = [place for place, share in moved.items() if share <= SAME]
        # Where the rows are a norm's output, no other place needs reading.
        behind_norm = [hypothesis for hypothesis in others if hypothesis.place in self.normed]
        self.others = [] if claimed_only else behind_norm or others[:TRIED]
        self._readers: dict[Place, Reader] = {}

    def unread(self, site: Site) -> bool:
        """Return whether the rows can be of a site that no place stands for, by their width."""
        widths = {way.rows.shape[1] for way in self.ways}
        return site.stream in (*INNER_STREAMS, "logits") and self.model.width in widths

    def likely(self, hypothesis: Hypothesis) -> bool:
        """Return whether rows spread as the place's own vectors do, and hardly less so than at any other place."""
        likelihood = self.likelihoods[hypothesis]
        known = self.places[hypothesis.place]
        return likelihood >= max(*self.likelihoods.values(), known.expected) - TYPICAL

    def clearly(self, likeliest: Hypothesis) -> bool:
        """Return whether rows spread as this place's own vectors do, and unlike those of the claimed one."""
        own = self.likelihoods[self.own[0]] if self.own else -math.inf
        best = self.likelihoods[likeliest]
        return best >= self.places[likeliest.place].expected - 2 * TYPICAL and own <= best - CLEAR

    def finding(self) -> Finding | None:
        """Return what explains the rows, None where no token reproduces any."""
        self._read([hypothesis.place for hypothesis in (*self.own, *self.others)])
        chain = self._chain(self.own)
        for start in range(0, len(self.others), TOGETHER):
            if chain is None:
                chain = self._chain(self.others[start : start + TOGETHER])
        if chain is None and self.others:
            chain = self._closely((*self.own[:1], *self.others[: CLOSELY - 1]))
        return None if chain is None else self.nearest(chain)

    def nearest(self, chain: Chain) -> Finding | None:
        """Return the place and layout whose vectors of these tokens are nearest to the rows; None if none is near."""
        distances = {
            pair: float(found.median())
            for pair, found in distances_of(self.model, chain, self.ways).items()
            if pair[0] in self.places
        }
        if not distances:
            return None
        place, layout = min(distances, key=lambda pair: (distances[pair], pair[0].site is None))
        distance, hypothesis = distances[place, layout], Hypothesis(place, layout)
        if distance > FAR or (self._context_free(place, chain) and not self._all_fit(hypothesis)):
            return None
        starts = self._starts(hypothesis, chain)
        numbers = "" if distance <= EXACT else other_numbers(self.model, place, layout, chain, distance)
        return Finding(place, layout, chain, starts, distance, numbers)

    def shares(self) -> dict[Hypothesis, float]:
        """Return how far rows are from vectors of the tokens that they look like, beside those of unrelated tokens."""
        looked = (*self.own, *self.others)
        readers = self._read([hypothesis.place for hypothesis in looked])
        return {hypothesis: self._share(hypothesis, readers[hypothesis.place]) for hypothesis in looked}

    def _chain(self, hypotheses: Sequence[Hypothesis]) -> Chain | None:
        """Return tokens that explain rows by one of these hypotheses, the first that does."""
        if not hypotheses:
            return None
        readers = self._read([hypothesis.place for hypothesis in hypotheses])
        for hypothesis, starts in zip(hypotheses, self._first_rows(hypotheses), strict=True):
            for start in starts:
                if chain := explain(self.model, hypothesis, readers[hypothesis.place], start):
                    return chain
        return None

    def _closely(self, hypotheses: Sequence[Hypothesis]) -> Chain | None:
        """Return tokens that explain rows whose first row tells too little, or stands behind a special token."""
        special = [(token,) for token in self.model.special_ids[:MOST_PREFIXES]]
        for hypothesis in hypotheses:
            reader = self._readers[hypothesis.place]
            if chain := explain(self.model, hypothesis, reader, 0):
                return chain
            if special and len(hypothesis.rows) > 1:
                chain = explain(self.model, hypothesis, reader, 0, special, SHORTLISTS[:1])
            if chain:
                return chain
        return None

    def _read(self, places: Sequence[Place]) -> dict[Place, Reader]:
        """Return readers of places, made from the attacker's own tokens."""
        missing = list(dict.fromkeys(place for place in places if place not in self._readers))
        if missing:
            texts, singles = self.sample.texts, self.sample.singles
            behind = vectors_at(self.model, missing, texts)
            first = vectors_at(self.model, missing, singles[:, None])
            for place in missing:
                self._readers[place] = Reader(
                    self.sample.targets, behind[place][:, 1:].flatten(0, 1), texts[:, 1:].flatten(),
                    first[place][:, 0], singles,
                )  # fmt: skip
        return self._readers

    def _first_rows(self, hypotheses: Sequence[Hypothesis]) -> list[list[int]]:
        """Return for each hypothesis the rows that are near to the vector of one token by itself, and to no other."""
        readers, looked = self._read([h.place for h in hypotheses]), []
        for hypothesis in hypotheses:
            order = self.places[hypothesis.place].looks_first(hypothesis.rows).argsort(descending=True)
            chosen = torch.cat([torch.tensor([0]), order[: self._most()]]).unique()
            looked.append((hypothesis, readers[hypothesis.place], chosen))
        margins = stand_alone(self.model, looked)
        return [
            rows[alone >= STANDS_OUT].tolist() for (_, _, rows), alone in zip(looked, margins, strict=True)
        ]

    def _starts(self, hypothesis: Hypothesis, chain: Chain) -> tuple[int, ...]:
        """Return the rows that are first tokens' vectors, where vectors depend on the tokens before them."""
        if chain.before or self._context_free(hypothesis.place, chain):
            return (chain.start,)
        reader = self._read([hypothesis.place])[hypothesis.place]
        rows = torch.arange(min(len(hypothesis.rows), MOST_STARTS))
        (margins,) = stand_alone(self.model, [(hypothesis, reader, rows)])
        return tuple(sorted({chain.start, *rows[margins >= STANDS_OUT].tolist()}))

    def _all_fit(self, hypothesis: Hypothesis) -> bool:
        """Return whether nearly every row is a token's vector; where no context shows, two rows may be chance."""
        looked = min(len(hypothesis.rows), 1 + self._most())
        return len(self._first_rows([hypothesis])[0]) >= ALL * looked

    def _most(self) -> int:
        return MOST_ROWS if self.model.vocab_size <= WHOLE else STARTS

    def _context_free(self, place: Place, chain: Chain) -> bool:
        """Return whether a token's vector does not depend on what stands before it."""
        if len(chain.tokens) < 2:
            return place.layer == 0
        pair = vectors_at(self.model, [place], torch.tensor([chain.tokens[:2]]))[place][0, 1]
        alone = vectors_at(self.model, [place], torch.tensor([chain.tokens[1:2]]))[place][0, 0]
        return bool((pair - alone).norm() <= EXACT * pair.norm())

    def _share(self, hypothesis: Hypothesis, reader: Reader) -> float:
        rows: Float[Tensor, "rows w"] = hypothesis.rows[:WINDOW]
        if len(rows) < 2:
            return math.inf
        tokens = reader.behind(rows, 1)[:, 0]
        guess = torch.stack([tokens, tokens.roll(len(tokens) // 2)])
        vectors = vectors_at(self.model, [hypothesis.place], guess)[hypothesis.place]
        own, other = (torch.linalg.vector_norm(v - rows, dim=1)[1:].median() for v in vectors)
        return float(own / other.clamp(min=1e-12))
