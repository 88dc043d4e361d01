"""Find the embeddings that explain observed states, and measure how far they are from the tokens' own embeddings.

Noise on the input embeddings destroys no information: behind a known prefix the state at layer l is a function of one
noised embedding with as many dimensions. For a row and a token the most probable noise u minimises

    |observed - state(embedding + sigma u)|² / tau² + |u|²

with tau a small share of the row (the prefix's own noise is known only roughly). The right token needs noise of about
one sigma a coordinate and explains the row; a wrong one needs more, or leaves a residual. Steps are Gauss-Newton's,
each solved by conjugate gradients: J v is a finite difference (one pass), Jᵀ v a gradient through the truncated model.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hiddenlab.models import Request, TruncatedModel

PRODUCTS = 12  # conjugate gradient iterations of a step
UNEXPLAINED = 0.1  # share of a row that the noise before it may leave unexplained
STEPS = (1.0, 0.5, 0.2)  # step lengths that are tried
FINITE = 0.05  # root mean square, in sigma, of the displacement of a finite difference


@dataclass
class Problem:
    """Rows of one prompt, each explained by one token's noised embedding behind a common chain.

    Attributes:
        chain: embeddings of the prompt, as estimated now. parents: position of each row. centre: embedding of each
            row's token. observed: the rows. tau: standard deviation of the residual of each coordinate. noise: in units
            of sigma. cost: see ``step``.
    """

    chain: Float[Tensor, "n d"]
    parents: Int[Tensor, " r"]
    centre: Float[Tensor, "r d"]
    observed: Float[Tensor, "r e"]
    tau: Float[Tensor, "r 1"]
    noise: Float[Tensor, "r d"]
    cost: Float[Tensor, " r"]


def step(model: TruncatedModel, prompts: Sequence[Problem], sigma: float, offset: int = 0) -> None:
    """Take one Gauss-Newton step for every row independently; replace ``noise`` and ``cost`` (in nats) in place."""
    sizes = [len(problem.parents) for problem in prompts]
    centre, observed, tau, noise = (
        torch.cat([getattr(problem, name) for problem in prompts])
        for name in ("centre", "observed", "tau", "noise")
    )

    def states(rows: Tensor, grad: bool) -> Tensor:
        requests = [
            Request(model.prefix(offset=offset), problem.chain, branches=part, parents=problem.parents)
            for problem, part in zip(prompts, rows.split(sizes), strict=True)
        ]
        return torch.cat([answer.branches for answer in model.run(requests, keep=False, grad=grad)])

    best, least = newton(states, centre, sigma, noise, observed, tau)
    for problem, own, value in zip(prompts, best.split(sizes), least.split(sizes), strict=True):
        problem.noise, problem.cost = own, value


def newton(
    states: Callable[[Tensor, bool], Tensor],
    centre: Float[Tensor, "r d"],
    sigma: float | Float[Tensor, " d"],
    noise: Float[Tensor, "r d"],
    observed: Float[Tensor, "r e"],
    tau: Float[Tensor, "_ _"],
    products: int = PRODUCTS,
) -> tuple[Float[Tensor, "r d"], Float[Tensor, " r"]]:
    """Take one Gauss-Newton step for independent problems.

    Args:
        states: maps points [r, d] to what would be observed [r, e]; its second argument asks for gradients. Other
            arguments are as in ``Problem``, a point being centre + sigma * noise; tau may differ from number to number.
        products: conjugate gradient iterations.

    Returns:
        The noise after the step, and its cost in nats; the cost is never higher than before.
    """

    def cost(noise: Tensor, residual: Tensor) -> Tensor:
        return ((residual / tau).square().sum(1) + noise.square().sum(1)) / 2

    with torch.inference_mode(False), torch.enable_grad():
        point = (centre + sigma * noise).detach().clone().requires_grad_()
        shown = states(point, True)
        here = shown.detach()
        residual = observed - here

        def back(v: Tensor) -> Tensor:
            return torch.autograd.grad(shown, point, v / tau.square(), retain_graph=True)[0] * sigma

        def ahead(v: Tensor) -> Tensor:
            size = FINITE * v.shape[1] ** 0.5 / v.norm(dim=1, keepdim=True).clamp(min=1e-12)
            return (states(point.detach() + sigma * size * v, False) - here) / size

        change = _conjugate(lambda v: back(ahead(v)) + v, back(residual) - noise, products)
        best, least = noise, cost(noise, residual)
        for length in STEPS:
            tried = noise + length * change
            value = cost(tried, observed - states(centre + sigma * tried, False))
            better = value < least
            best, least = torch.where(better[:, None], tried, best), torch.where(better, value, least)
    return best, least


def _conjugate(
    apply: Callable[[Tensor], Tensor], right: Float[Tensor, "r d"], products: int = PRODUCTS
) -> Float[Tensor, "r d"]:
    """Solve A x = b for every row independently by conjugate gradients, A symmetric and positive definite."""
    solution, left = torch.zeros_like(right), right.clone()
    direction, size = left.clone(), left.square().sum(1, keepdim=True)
    for _ in range(products):
        image = apply(direction)
        length = size / (direction * image).sum(1, keepdim=True).clamp(min=1e-20)
        solution, left = solution + length * direction, left - length * image
        new = left.square().sum(1, keepdim=True)
        direction, size = left + new / size.clamp(min=1e-20) * direction, new
    return solution
