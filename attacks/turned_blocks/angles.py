"""Find the secret angles by which pairs of coordinates were turned, from one state that lies in a released space.

Rows of a block were mixed by a secret matrix, so that only the space which they span is known. The turned state of each
of the block's tokens lies in it. A candidate's state is known; the angles are not. Where the space leaves more
directions outside than there are angles, a right candidate has angles that put it inside, and a wrong one has none.
They are found by least squares from several random beginnings.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

STEPS = 25  # of least squares
WITHIN = 1e-6  # share outside of a known state whose row was mixed with the others, and has no offset
LEAST_REST = 1e-2  # share of a state's length that known states must leave, to be told from rounding
# The damping of a step: at first, least and most; what it is divided by after a step that helps, and multiplied by
# after one that does not.
DAMPING, LEAST, MOST, LESS, MORE = 1e-2, 1e-7, 1e4, 3.0, 4.0


def outside_of(rows: Float[Tensor, "r w"]) -> Float[Tensor, "w e"]:
    """Return orthonormal directions of all that rows do not span."""
    return torch.linalg.svd(rows.double(), full_matrices=True).Vh[len(rows) :].T.float()


def turned(states: Float[Tensor, "*n w"], angles: Float[Tensor, "*#n half"]) -> Float[Tensor, "*n w"]:
    """Return states whose coordinates i and i + w/2 are turned by angle i."""
    real, imaginary = states.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([real * cos - imaginary * sin, real * sin + imaginary * cos], -1)


def share_outside(states: Float[Tensor, "*n w"], outside: Float[Tensor, "w e"]) -> Float[Tensor, "*n"]:
    """Return which share of each state's square lies outside of the space."""
    return (states @ outside).square().sum(-1) / states.square().sum(-1).clamp(min=1e-30)


def beyond_known(
    states: Float[Tensor, "c w"], known: Float[Tensor, "k w"] | None, outside: Float[Tensor, "w e"]
) -> Float[Tensor, " c"]:
    """Return which share of a square lies outside of the space, of what known states within it do not span.

    It is no number where they span nearly all of a state, so that nothing can be said of it.
    """
    inside = None if known is None else known[share_outside(known, outside) < WITHIN]
    if inside is None or not len(inside):
        return share_outside(states, outside)
    basis = torch.linalg.qr(inside.double().T).Q
    whole = states.double()
    rest = whole - whole @ basis @ basis.T
    some = rest.norm(dim=1) > LEAST_REST * whole.norm(dim=1)
    return torch.where(some, share_outside(rest.float(), outside), math.nan)


def fit(
    states: Float[Tensor, "n t w"], outside: Float[Tensor, "w e"], angles: Float[Tensor, "n half"]
) -> tuple[Float[Tensor, " n"], Float[Tensor, "n half"]]:
    """Turn states into a space as well as angles allow, by damped Gauss-Newton steps (Levenberg and Marquardt).

    Args:
        states: ``t`` of one prompt, which the same angles turn. outside: directions that the space lacks. angles: to
            begin with.

    Returns:
        The mean share of their squares that stays outside, and the angles.
    """
    states = states / states.norm(dim=2, keepdim=True).clamp(min=1e-30)
    half = states.shape[2] // 2
    first, second = outside[:half], outside[half:]
    products = first @ first.T, second @ second.T, first @ second.T

    def at(angles: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = turned(states, angles[:, None])
        left = x @ outside
        return left.square().sum(2).mean(1), x, left

    least, x, left = at(angles)
    damping = torch.full_like(least, DAMPING)
    for _ in range(STEPS):
        real, imaginary = x[..., :half], x[..., half:]
        # d left / d angle_i = real_i second_i - imaginary_i first_i
        slope = (real * (left @ second.T) - imaginary * (left @ first.T)).sum(1)
        crossed = torch.einsum("nti,ntj->nij", imaginary, real) * products[2]
        curve = (
            torch.einsum("nti,ntj->nij", imaginary, imaginary) * products[0]
            + torch.einsum("nti,ntj->nij", real, real) * products[1]
            - crossed
            - crossed.mT
        )
        diagonal = curve.diagonal(dim1=1, dim2=2)
        floor = 1e-4 * diagonal.mean(1, keepdim=True) + 1e-9
        curve = curve + torch.diag_embed(damping[:, None] * (diagonal + floor) + 1e-9)
        there = angles - torch.linalg.solve(curve, slope)
        less, x_there, left_there = at(there)
        better = less < least
        angles = torch.where(better[:, None], there, angles)
        x = torch.where(better[:, None, None], x_there, x)
        left = torch.where(better[:, None, None], left_there, left)
        least = torch.where(better, less, least)
        damping = torch.where(better, damping / LESS, damping * MORE).clamp(LEAST, MOST)
    return least, angles


def search(
    states: Float[Tensor, "c w"], outside: Float[Tensor, "w e"], starts: int, generator: torch.Generator
) -> tuple[Float[Tensor, " c"], Float[Tensor, "c half"]]:
    """Return the least share outside that any angles found leave of each candidate, and these angles.

    Args:
        starts: random beginnings for each candidate.
    """
    count, half = len(states), states.shape[1] // 2
    drawn = torch.rand(count * starts, half, generator=generator).to(states)
    shares, angles = fit(states.repeat_interleave(starts, 0)[:, None], outside, 2 * math.pi * drawn)
    least = shares.unflatten(0, (count, starts)).min(1)
    return least.values, angles.unflatten(0, (count, starts))[torch.arange(count), least.indices]
