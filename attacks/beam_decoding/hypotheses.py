"""Define the data of a decoding: hypotheses, the models they run on, and the limits of the search."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hiddenlab.attacks.beam_decoding.features import Candidates, Rows
from hiddenlab.attacks.beam_decoding.future_cost import ahead_of
from hiddenlab.matching.distance import Matcher
from hiddenlab.matching.screening import Screen
from hiddenlab.models import Answer, Prefix, TruncatedModel
from hiddenlab.proposals.in_context import Adapter

BEAM_FACTOR = 4  # factor of hypotheses kept where rows are in unknown order or missing


@dataclass(frozen=True)
class Engines:
    """The models that hypotheses run on: the attacked truncated model in some dtype, and the language model or None.

    Attributes:
        speaker: the language model, with what it reads before every prompt; never extended itself.
        screen: runs many candidates at once first, where it is faster than ``model``, or None.
        before: assumed content before every prompt, where that is not known; never extended itself.
        offset: positions before the first token, where nothing is assumed to stand there.
    """

    model: TruncatedModel
    matcher: Matcher
    speaker: Prefix | None
    opening: Tensor | None = None  # the language model's log-probabilities [v] of a first token
    adapter: Adapter | None = None  # learns from candidates that failed
    screen: Screen | None = None
    before: Prefix | None = None
    offset: int = 0

    def beginning(self, before: Prefix | None = None) -> Prefix:
        """Return the prefix of a prompt: embeddings that were found, those that are assumed, or empty positions."""
        before = before or self.before
        return self.model.prefix(offset=self.offset) if before is None else before.fork()

    @property
    def lm(self) -> TruncatedModel | None:
        """The language model."""
        return None if self.speaker is None else self.speaker.model


@dataclass(frozen=True)
class Effort:
    """The limits of the search.

    Attributes:
        beam: hypotheses kept. width: candidates run for each. gap: nats below the best, before running, beyond which
            candidates are not run. behind: nats below the best beyond which hypotheses are dropped.
        opening: hypotheses kept after the first token where rows are in unknown order, halved with each token that
            follows, and after a token that no row shows: only later tokens show whether these are right.
        most: candidates run at once where the best is in doubt (see ``adaptive_width``). spare: limit of these for each
            token of a prompt.
        lookahead: count what unused rows are expected to bring (see ``future_cost``). moves: improve the order of rows
            once all are placed (see ``local_search``).
    """

    beam: int = 8
    width: int = 48
    gap: float = 12.0
    opening: int = 64
    behind: float = 20.0
    most: int = 8192
    spare: int = 2048
    lookahead: bool = True
    moves: bool = True

    def less(self) -> "Effort":
        """Return smaller limits, for prompts of which most is known."""
        return replace(self, beam=-(-self.beam // BEAM_FACTOR), opening=-(-self.opening // BEAM_FACTOR))

    def kept(self, view: Rows, place: int) -> int:
        """Return how many hypotheses are kept after a position: more where rows are out of order or missing."""
        if view.places is None:
            return max(BEAM_FACTOR * self.beam, self.opening >> place)
        if len(view.shown) == view.length:
            return self.beam
        return max(BEAM_FACTOR * self.beam, self.opening if view.row_at(place) is None else 0)


@dataclass(frozen=True)
class Step:
    """One decided token.

    Attributes:
        row: its row, -1 without. distance: to that row. margin: how far the runner-up was behind, in nats.
        others: the row's other tokens and how far each was behind, the nearest first.
    """

    token: int
    row: int
    distance: float
    margin: float | None
    evaluated: int
    others: tuple[tuple[int, float], ...] = ()


@dataclass
class Hypothesis:
    """A beginning of the prompt: its tokens, the rows they used, and its score."""

    prefix: Prefix
    free: tuple[int, ...]
    lm_prefix: Prefix | None = None
    following: Tensor | None = None  # the language model's log-probabilities [v] of the next token
    columns: tuple[int, ...] = ()
    steps: tuple[Step, ...] = ()
    score: float = 0.0
    used: float = 0.0  # what its rows were expected to score


@dataclass
class Decoding:
    """One prompt that is being decoded."""

    view: Rows
    beam: list[Hypothesis]
    evaluated: int = 0
    calls: int = 0
    widened: int = 0  # positions run because the best was in doubt
    before: Prefix | None = None  # found before the first token (see ``prefix_inversion``), or None
    ahead: Float[Tensor, " rows"] | None = None  # see ``ahead_of``

    @property
    def place(self) -> int:
        return len(self.beam[0].steps)

    @property
    def finished(self) -> bool:
        return self.place == self.view.length

    def expects(self, rows: Int[Tensor, " c"]) -> Float[Tensor, " c"]:
        """Return the score that each row is expected to bring; 0 where rows do not compete."""
        return torch.zeros(rows.shape, device=rows.device) if self.ahead is None else self.ahead[rows]


def start(
    view: Rows,
    engines: Engines,
    weights: Float[Tensor, " features"],
    effort: Effort,
    before: Prefix | None = None,
) -> Decoding:
    """Return a decoding without tokens, behind what stands before the first token where that is known."""
    free = tuple(range(len(view.shown)))
    lm_prefix = None if engines.speaker is None else engines.speaker.fork()
    initial = Hypothesis(engines.beginning(before), free, lm_prefix, engines.opening)
    ahead = ahead_of(view, engines.speaker, weights)
    if ahead is not None and not effort.lookahead:
        ahead = torch.zeros_like(ahead)
    return Decoding(view, [initial], before=before, ahead=ahead)


@dataclass
class Trial:
    """Candidates of one hypothesis that were run.

    Attributes:
        answers: of the passes that ran them. answer: index of each candidate's answer. branch: index within it.
            evaluated: positions run.
        tokens, states: all that were run so far, kept or not, and their states in the matcher's form, part by part.
    """

    candidates: Candidates
    answers: list[Answer]
    answer: Int[Tensor, " c"]
    branch: Int[Tensor, " c"]
    evaluated: int
    tokens: list[Int[Tensor, " _"]]
    states: list[Float[Tensor, "_ d"]]

    def add(self, other: "Trial") -> None:
        """Add candidates of the same hypothesis."""
        self.candidates = self.candidates.and_also(other.candidates)
        self.answer = torch.cat([self.answer, other.answer + len(self.answers)])
        self.branch = torch.cat([self.branch, other.branch])
        self.answers += other.answers
        self.evaluated += other.evaluated
        self.tokens += other.tokens
        self.states += other.states

    def keep(self, which: Tensor) -> None:
        """Keep the selected candidates and forget the others."""
        self.candidates = self.candidates.keep(which)
        self.answer, self.branch = self.answer[which], self.branch[which]
