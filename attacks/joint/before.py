"""What stood before a prompt whose beginning is unknown: the embedding that explains what its rows leave over.

A random embedding before the prompt (paper, appendix F.1) moves every row, and all of them in ways that one vector of d
numbers decides: a prompt of n tokens has n·d numbers to find it by. Behind the decoded tokens it is found by gradients
through the slice (L-BFGS), with a loss that grows with the logarithm of what is left, so that tokens decoded wrongly
or in a wrong place count little. Behind what was found, distances tell right from wrong again, and decoding is done
once more.

The first time a prompt is decoded behind a draw of the attacker's own. Nothing in that place would be worse: the first
token of all that a model reads is an attention sink, whose state is like no other.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from attacks.joint.beam import Decoding
from hiddenlab.match import Matcher
from hiddenlab.slice import Prefix, Request, Slice

STAGES, STEPS = 6, 10  # of the optimiser; between stages the loss is adapted to what is left
BETTER = 0.9  # of what is left: a stage that leaves more is the last
EXPLAINED = 1e-5  # of a row's norm: less is rounding


def prefix_of(points: Float[Tensor, "p d"], slice: Slice) -> Prefix:
    """Embeddings as what was committed before a prompt: their keys and values."""
    prefix = slice.prefix()
    prefix.keep(slice.run([Request(prefix, points.to(slice.dtype))])[0], chain=len(points))
    return prefix


class Unknown:
    """The embeddings before one decoded prompt, of which every token has a row.

    Attributes:
        evaluated: positions run to find them. calls: passes.
    """

    def __init__(self, decoding: Decoding, slice: Slice, matcher: Matcher) -> None:
        steps, device = decoding.beam[0].steps, slice.device
        self.slice, self.matcher = slice, matcher
        tokens, rows = (
            torch.tensor([getattr(one, name) for one in steps], device=device) for name in ("token", "row")
        )
        with torch.inference_mode(False):  # copies, as autograd takes no tensors of inference mode
            self.tokens = slice.embed(tokens).clone()
            self.observed = decoding.view.shown[rows].clone()
            self.lengths = self.observed.norm(dim=1).clamp(min=1e-12)
        self.evaluated = self.calls = 0

    def solve(self, start: Float[Tensor, "p d"]) -> Float[Tensor, "p d"]:
        """The embeddings that leave least unexplained, found from some others."""
        with torch.inference_mode(False), torch.enable_grad():
            points = start.clone().requires_grad_()
            left = self.left(points)
            best = left, start
            for _ in range(STAGES):
                scale = max(left, EXPLAINED) ** 2
                optimiser = torch.optim.LBFGS([points], max_iter=STEPS, line_search_fn="strong_wolfe")

                def loss(optimiser: torch.optim.LBFGS = optimiser, scale: float = scale) -> Tensor:
                    optimiser.zero_grad()
                    value = (self._squared(points, grad=True) / scale).log1p().mean()
                    value.backward()  # type: ignore[no-untyped-call]
                    return value

                optimiser.step(loss)  # type: ignore[no-untyped-call]
                before, left = left, self.left(points)
                if left < best[0]:
                    best = left, points.detach().clone()
                if not EXPLAINED <= left <= BETTER * before:  # nor where it is not a number
                    break
            return best[1]

    def left(self, points: Float[Tensor, "p d"]) -> float:
        """Median share of the rows' norms that some embeddings leave unexplained."""
        return float(self._squared(points.detach()).median().sqrt())

    def prefix(self, points: Float[Tensor, "p d"]) -> Prefix:
        """For prompts to stand behind."""
        self.evaluated += len(points)
        self.calls += 1
        return prefix_of(points, self.slice)

    def _squared(self, points: Tensor, grad: bool = False) -> Float[Tensor, " n"]:
        request = Request(self.slice.prefix(), torch.cat([points.to(self.tokens), self.tokens]))
        (answer,) = self.slice.run([request], keep=False, grad=grad)
        self.evaluated += request.size
        self.calls += 1
        states = self.matcher.view(answer.chain[len(points) :])
        return (states - self.observed).square().sum(1) / self.lengths.square()
