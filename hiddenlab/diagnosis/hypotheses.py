"""Rank what observed rows could be, by the mean and spread of the vectors at every place of the model."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hiddenlab.diagnosis.places import Place, read_places
from hiddenlab.models import TruncatedModel
from hiddenlab.types import Observation

PASS_TOKENS = 512  # run at once: vectors of every place of a pass are in memory
SAMPLED_ROWS = 48  # of the observation, which decide the order of hypotheses
RELATIVE_SPREAD = 1e-3  # a coordinate spreads by at least this share of the place's mean spread
TYPICAL = 0.1  # log-likelihood of a coordinate by which rows may be less likely than a place's own
AS_THEY_ARE, TRANSPOSED = "as they are", "transposed"


@dataclass(frozen=True, eq=False)
class Layout:
    """A way to read the observed numbers as rows.

    Attributes:
        name: what was done to the numbers. rows: the result. way_out: how to give them so. of_heads: this only makes
            sense for keys and values.
    """

    name: str
    rows: Float[Tensor, "rows w"]
    way_out: str = ""
    of_heads: bool = False


@dataclass(frozen=True)
class Hypothesis:
    """A place in the model, and a way to read the numbers as vectors of this place."""

    place: Place
    layout: Layout

    @property
    def rows(self) -> Float[Tensor, "rows w"]:
        return self.layout.rows


class Moments:
    """Mean and spread of vectors, gathered pass by pass."""

    def __init__(self, width: int) -> None:
        self.count = 0
        self._sum, self._squares = torch.zeros(2, width, dtype=torch.float64)

    def add(self, rows: Float[Tensor, "n w"]) -> None:
        rows = rows.double().cpu()
        self.count += len(rows)
        self._sum += rows.sum(0)
        self._squares += rows.square().sum(0)

    @property
    def mean(self) -> Float[Tensor, " w"]:
        return (self._sum / self.count).float()

    @property
    def spread(self) -> Float[Tensor, " w"]:
        variance = (self._squares / self.count - (self._sum / self.count).square()).clamp(min=0)
        spread = variance.sqrt().float()
        return spread.clamp(min=max(1e-12, RELATIVE_SPREAD * float(spread.mean())))

    def likelihood(self, rows: Float[Tensor, "rows w"]) -> Float[Tensor, " rows"]:
        """Return the mean log-likelihood of each row's coordinates, taken as independent and normal."""
        spread = self.spread
        return (-0.5 * ((rows - self.mean) / spread).square() - spread.log()).mean(1)


@dataclass
class Statistics:
    """What is known of a place: vectors of tokens in running text, and of tokens that stand first."""

    behind: Moments
    first: Moments

    @property
    def expected(self) -> float:
        """The log-likelihood of a coordinate of this place's own rows."""
        return float((-0.5 - self.behind.spread.log()).mean())

    def likelihood(self, rows: Float[Tensor, "rows w"]) -> Float[Tensor, " rows"]:
        return torch.maximum(self.behind.likelihood(rows), self.first.likelihood(rows))

    def looks_first(self, rows: Float[Tensor, "rows w"]) -> Float[Tensor, " rows"]:
        """Return how much likelier each row is as the vector of a first token than of a later one."""
        return self.first.likelihood(rows) - self.behind.likelihood(rows)


def layouts(observation: Observation, model: TruncatedModel) -> list[Layout]:
    """Return every way to read the numbers: as they are, transposed, and with the axes of heads exchanged."""
    states = observation.states.detach().float().cpu()
    count, width = states.shape
    ways = [Layout(AS_THEY_ARE, states)]
    if count > 1:
        ways.append(Layout(TRANSPOSED, states.T.contiguous(), "they are transposed; use --axes width,tokens"))
    config = model.module.config
    h = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", None)
    if isinstance(h, int) and h > 1 and width % h == 0:
        inside = states.view(count, width // h, h).transpose(1, 2).flatten(1)
        outside = states.reshape(-1).view(h, count, width // h).transpose(0, 1).flatten(1)
        inner = f"a row is [{width // h} of a head, {h} heads]; save the axes apart, and give --axes tokens,head,heads"
        outer = f"they are [{h} heads, tokens, {width // h}]; save the axes apart, and give --axes heads,tokens,head"
        ways.append(Layout("coordinates before heads", inside, inner, True))
        ways.append(Layout("heads before tokens", outside, outer, True))
    return ways


def measure_places(
    model: TruncatedModel, texts: Int[Tensor, "b n"], singles: Int[Tensor, " m"], widths: Iterable[int]
) -> dict[Place, Statistics]:
    """Return the statistics of every place of these widths; places with the same vectors once.

    Args:
        texts: running text. singles: tokens, each run as a prompt of its own.
    """
    wanted, places = set(widths), dict[Place, Statistics]()

    def visit(place: Place, vectors: Tensor) -> None:
        if vectors.shape[2] not in wanted:
            return
        if place not in places:
            places[place] = Statistics(Moments(vectors.shape[2]), Moments(vectors.shape[2]))
        if vectors.shape[1] == 1:
            places[place].first.add(vectors[:, 0])
        else:
            places[place].behind.add(vectors[:, 1:].flatten(0, 1))

    for part in texts.split(max(1, PASS_TOKENS // texts.shape[1])):
        read_places(model, part, visit)
    for part in singles[:, None].split(PASS_TOKENS):
        read_places(model, part, visit)
    return _distinct(places)


def _distinct(places: dict[Place, Statistics]) -> dict[Place, Statistics]:
    """Return places without those that hold what another one holds; one that an attack reads stays."""
    kept = dict[tuple[float, ...], Place]()
    for place in sorted(places, key=lambda place: place.site is None):
        known = places[place]
        if known.behind.count and known.first.count:
            digest = torch.cat([known.behind.mean, known.first.mean])[:16]
            kept.setdefault((len(known.behind.mean), *digest.tolist()), place)
    chosen = set(kept.values())
    return {place: known for place, known in places.items() if place in chosen}


def rank(places: dict[Place, Statistics], ways: Sequence[Layout]) -> dict[Hypothesis, float]:
    """Return the rows' log-likelihood by every hypothesis, of a coordinate of the median row; the likeliest first."""
    scored = []
    for place, known in places.items():
        for layout in ways:
            if layout.rows.shape[1] != len(known.behind.mean) or not _makes_sense(place, layout):
                continue
            every = max(1, len(layout.rows) // SAMPLED_ROWS)
            score = float(known.likelihood(layout.rows[::every]).median())
            scored.append((score, Hypothesis(place, layout)))
    return {hypothesis: score for score, hypothesis in sorted(scored, key=lambda pair: -pair[0])}


def _makes_sense(place: Place, layout: Layout) -> bool:
    return not layout.of_heads or (place.site is not None and place.site.stream in ("k", "v"))
