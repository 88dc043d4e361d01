"""Find the embeddings that explain observed states, and measure how far they are from the tokens' own embeddings.

Noise on the input embeddings destroys no information: behind a known prefix the state at layer l is a function of one
noised embedding with as many dimensions. For a row and a token the most probable noise u minimises

    |observed - state(embedding + sigma u)|² / tau² + |u|²

Tau is what may stay unexplained of a row. Steps are Gauss-Newton's, each solved by conjugate gradients: J v is a finite
difference (one pass), Jᵀ v a gradient through the truncated model.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

PRODUCTS = 12  # conjugate gradient iterations of a step
STEPS = (1.0, 0.5, 0.2)  # step lengths that are tried
FINITE = 0.05  # root mean square, in sigma, of the displacement of a finite difference


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
        states: maps points [r, d] to what would be observed [r, e]; its second argument asks for gradients. A point
            is centre + sigma * noise.
        observed: the rows. tau: standard deviation of what is left unexplained, of a row or of each number.
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
