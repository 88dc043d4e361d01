"""Correct a decoded prompt with noised embeddings: find the tokens that need the least noise to explain their rows.

Every row is solved for its embedding (``embedding_inversion``) under its decoded token and, where the decoder was not
sure, under the runners-up. After each sweep a row's best explanation becomes part of the chain behind which later rows
are solved, so that a corrected token improves the ones behind it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from hiddenlab.attacks.beam_decoding.embedding_inversion import UNEXPLAINED, Problem, step
from hiddenlab.attacks.beam_decoding.hypotheses import Decoding
from hiddenlab.models import TruncatedModel
from hiddenlab.models.request import packs
from hiddenlab.types import Progress, silent

UNSURE = 5.0  # runners-up at most so many nats behind are solved for too
RUNNERS_UP = 3  # of them at most
# Solves that have not converged differ by tens of nats by chance: so many nats count as one of the decoder's.
TEMPER = 20.0


@dataclass
class Refined:
    """A decoded prompt after its tokens were corrected.

    Attributes:
        tokens: as estimated now. margins: nats by which each token's runner-up is behind, None without one.
        noise: root mean square of the noise that explains each row, in sigma. evaluated: positions run. calls: passes.
    """

    tokens: list[int]
    margins: list[float | None]
    noise: list[float]
    evaluated: int
    calls: int


def refine_decodings(
    decodings: Sequence[Decoding],
    states: Sequence[Float[Tensor, "_ d"]],
    model: TruncatedModel,
    sigma: float,
    sweeps: int,
    offset: int = 0,
    progress: Progress = silent,
) -> list[Refined]:
    """Correct decoded prompts in which every token has a row.

    Args:
        states: the rows as observed. sigma: standard deviation of the noise on each embedding coordinate.
        sweeps: over all rows. offset: positions before the first token.
    """
    cases = [_Case(decoding, rows, model) for decoding, rows in zip(decodings, states, strict=True)]
    for sweep in range(sweeps):
        for group in packs(cases, lambda case: case.size, model.max_pass_tokens):
            before, passes = model.evaluated_tokens, model.forward_calls
            step(model, [case.problem for case in group], sigma, offset)
            run, rows = model.evaluated_tokens - before, sum(case.size for case in group)
            for case in group:
                case.evaluated += run * case.size // rows
                case.calls += model.forward_calls - passes
                case.choose(sigma)
        progress("solving for embeddings", sweep + 1, sweeps)
    return [case.result() for case in cases]


class _Case:
    """One prompt: the explanations of its rows, and the chosen one of each row."""

    def __init__(self, decoding: Decoding, states: Tensor, model: TruncatedModel) -> None:
        steps = decoding.beam[0].steps
        explained = []
        for place, decoded in enumerate(steps):
            others = [(token, behind) for token, behind in decoded.others if behind < UNSURE][:RUNNERS_UP]
            explained += [(place, token, behind) for token, behind in [(decoded.token, 0.0), *others]]
        places, tokens, behind = zip(*explained, strict=True)
        device = states.device
        self.places, self.tokens = torch.tensor(places, device=device), torch.tensor(tokens, device=device)
        self.behind = torch.tensor(behind, device=device)
        order = torch.tensor([decoded.row for decoded in steps], device=device)
        observed = states[order][self.places].float().clone()
        # Attention sinks are far longer than other rows, but the noise on them is not.
        lengths = observed.norm(dim=1, keepdim=True)
        unit = lengths.minimum(lengths.median()) / observed.shape[1] ** 0.5
        centre = model.embed(self.tokens).float().clone()
        self.selected = torch.tensor([places.index(place) for place in range(len(steps))], device=device)
        self.problem = Problem(
            centre[self.selected], self.places, centre, observed, UNEXPLAINED * unit.clamp(min=1e-12),
            torch.zeros_like(centre), torch.zeros(len(places), device=device),
        )  # fmt: skip
        self.evaluated = self.calls = 0

    @property
    def size(self) -> int:
        return len(self.places) + len(self.selected)

    def choose(self, sigma: float) -> None:
        """Choose the best explanation of each row and put it into the chain."""
        scores = self._scores()
        for place in range(len(self.selected)):
            own = (self.places == place).nonzero()[:, 0]
            self.selected[place] = own[scores[own].argmax()]
        chosen = self.selected
        self.problem.chain = self.problem.centre[chosen] + sigma * self.problem.noise[chosen]

    def _scores(self) -> Tensor:
        return -self.behind - self.problem.cost / TEMPER

    def result(self) -> Refined:
        scores, margins = self._scores(), list[float | None]()
        for place, chosen in enumerate(self.selected.tolist()):
            others = scores[
                (self.places == place) & (torch.arange(len(scores), device=scores.device) != chosen)
            ]
            margins.append(float(scores[chosen] - others.max()) if len(others) else None)
        noise = self.problem.noise[self.selected].square().mean(1).sqrt()
        return Refined(
            self.tokens[self.selected].tolist(), margins, noise.tolist(), self.evaluated, self.calls
        )
