"""Invert one layer: solve for the embedding or the attention output that produced a row.

A row is a function of its own embedding and of what attention adds to it. Where one of the two is known, or held at a
guess, the row determines the other: there are as many equations as unknowns. Most rows can be solved up to rounding
(docs/log/031-row-displacements.md), though the layer's Jacobian is nearly singular in some directions and the path to
the solution is curved.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hiddenlab.models import TruncatedModel

BELIEVED = 0.006  # residual that a linearisation of the layer may leave, as share of a row
EXACT = 3e-5  # residual that the solve may leave in the end; rounding makes a tenth of that
STEPS, TRIES = 15, 4  # of the solve, and dampings tried at each
AHEAD = 0.5  # share of a step at which the second derivative is measured
LARGEST_CORRECTION = 0.375  # largest length of the second-order correction, relative to the step
SETTLED = 0.1  # a step that gains fewer nats is the last
GRADIENTS_AT_ONCE = 48  # outputs of which gradients are taken together


@dataclass(frozen=True)
class Equations:
    """The equations that tie each row to the unknown's distance from a guess; all but the guess in double precision.

    Attributes:
        model: of one layer. embeddings, attended: the guess of each row's embedding and of its attention output (the
            layer's stream ``attn``). by_attention: the unknown is the attention output, not the embedding.
        observed: the rows. mean, prior: mean of the unknown's distance from the guess, and the inverse of its
            covariance.
        positions: of the rows; None where they make no difference (see ``TruncatedModel.run_given``).
        exact: share of a row that the solve may leave unexplained.
    """

    model: TruncatedModel
    embeddings: Float[Tensor, "n d"]
    attended: Float[Tensor, "n a"]
    observed: Float[Tensor, "n e"]
    mean: Float[Tensor, "n u"]
    prior: Float[Tensor, "n u u"]
    by_attention: bool = False
    positions: Int[Tensor, " n"] | None = None
    exact: float = EXACT

    def _at(self, rows: Tensor, moved: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        embeddings, attended = self.embeddings[rows], self.attended[rows]
        positions = None if self.positions is None else self.positions[rows]
        if self.by_attention:
            return embeddings, (attended + moved).float(), positions
        return (embeddings + moved).float(), attended, positions

    def states(self, rows: Int[Tensor, " r"], moved: Float[Tensor, "r u"]) -> Float[Tensor, "r e"]:
        """Return what some rows would be if the unknown lay so far from the guess."""
        return self.model.run_given(*self._at(rows, moved)).double()

    def jacobian(self, rows: Int[Tensor, " r"], moved: Float[Tensor, "r u"]) -> Float[Tensor, "r e u"]:
        """Return the Jacobian of some rows by the unknown."""
        embeddings, attended, positions = self._at(rows, moved)
        wanted = (False, True) if self.by_attention else (True, False)
        return jacobians(self.model, embeddings, attended, wanted, positions)[0]

    def unlikely(self, rows: Int[Tensor, " r"], moved: Float[Tensor, "r u"]) -> Float[Tensor, "r u"]:
        """Return the gradient of the prior's cost, in nats."""
        return times(self.prior[rows], moved - self.mean[rows])

    def unit(self) -> Float[Tensor, "n 1"]:
        """Return the root mean square of each row's coordinates."""
        rows = self.observed.double()
        return rows.norm(dim=1, keepdim=True).clamp(min=1e-12) / rows.shape[1] ** 0.5

    def solve(self, start: Float[Tensor, "n u"]) -> Float[Tensor, "n u"]:
        """Solve for the likeliest unknown of each row that explains it, by damped Gauss-Newton steps from ``start``.

        Steps are corrected by the layer's second derivative along them (geodesic acceleration: Transtrum, Machta and
        Sethna, Phys. Rev. E 83, 2011): the residual falls along narrow, curved valleys, in which straight steps would
        have to be several times as many. Most rows whose residual ends at rounding are solved, and some are at another
        solution beyond a fold of the layer; rows with a larger residual lie at folds.
        """
        moved, tau = start.clone(), self.exact * self.unit()
        every = torch.arange(len(moved), device=moved.device)

        def cost(rows: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
            left = (self.observed[rows].double() - self.states(rows, at)) / tau[rows]
            off = at - self.mean[rows]
            return left, (left.square().sum(1) + (off * self.unlikely(rows, at)).sum(1)) / 2

        left, least = cost(every, moved)
        # The first damping allows the residual of a linearisation.
        damping = torch.full_like(least, max(1.0, BELIEVED / self.exact) ** 2)
        growth = torch.full_like(least, 2.0)
        settled = torch.zeros_like(every, dtype=torch.bool)
        for _ in range(STEPS):
            rows = (~settled).nonzero()[:, 0]
            if not len(rows):
                break
            jacobian = self.jacobian(rows, moved[rows]) / tau[rows, None]
            normal = jacobian.transpose(1, 2) @ jacobian
            descent = times(jacobian.transpose(1, 2), left[rows]) - self.unlikely(rows, moved[rows])
            for _ in range(TRIES):
                prior, here = self.prior[rows], moved[rows]
                lower = torch.linalg.cholesky(normal + (1 + damping[rows, None, None]) * prior)
                straight = torch.cholesky_solve(descent[..., None], lower)[..., 0]
                # The second derivative along the step, from a point ahead on it.
                shown = (cost(rows, here + AHEAD * straight)[0] - left[rows]) / AHEAD
                shown = shown + times(jacobian, straight)
                bend = times(jacobian.transpose(1, 2), 2 / AHEAD * shown)
                bend = torch.cholesky_solve(bend[..., None], lower)[..., 0] / 2
                near = bend.norm(dim=1) < LARGEST_CORRECTION * straight.norm(dim=1)
                trial = here + straight + bend * near[:, None]
                residuals, nats = cost(rows, trial)
                promised = (straight * (descent + damping[rows, None] * times(prior, straight))).sum(1) / 2
                better, gain = nats < least[rows], least[rows] - nats
                good, bad = rows[better], rows[~better]
                moved[good], left[good], least[good] = trial[better], residuals[better], nats[better]
                settled[good] = gain[better] < SETTLED
                agreed = 1 - (2 * gain / promised - 1).pow(3)
                damping[good], growth[good] = damping[good] * agreed[better].clamp(0.1, 1.0), 2.0
                damping[bad], growth[bad] = damping[bad] * growth[bad] * 2, growth[bad] * 2
                settled[bad] = promised[~better] < SETTLED  # else the damping overflows
                if not len(bad):
                    break
                rows, jacobian, normal, descent = (
                    tensor[~better] for tensor in (rows, jacobian, normal, descent)
                )
        return moved


def jacobians(
    model: TruncatedModel,
    embeddings: Float[Tensor, "n d"],
    attended: Float[Tensor, "n a"],
    wanted: tuple[bool, bool] = (True, True),
    positions: Int[Tensor, " n"] | None = None,
) -> list[Float[Tensor, "n e _"]]:
    """Return the Jacobians of each row behind one layer by embedding and by attention output, in double precision.

    Args:
        wanted: which of the two.
    """
    parts = list[tuple[Tensor, ...]]()
    with torch.inference_mode(False), torch.enable_grad():
        inputs, given = (tensor.detach().clone().requires_grad_() for tensor in (embeddings, attended))
        states = model.run_given(inputs, given, positions, grad=True)
        by = [tensor for tensor, asked in zip((inputs, given), wanted, strict=True) if asked]
        n, width = states.shape
        # Rows are independent: the gradient of one output summed over all of them is that of each.
        for part in torch.arange(width, device=states.device).split(GRADIENTS_AT_ONCE):
            outputs = torch.nn.functional.one_hot(part, width).to(states.dtype)[:, None].expand(-1, n, -1)
            parts.append(torch.autograd.grad(states, by, outputs, retain_graph=True, is_grads_batched=True))
    return [torch.cat(gradients).double().transpose(0, 1) for gradients in zip(*parts, strict=True)]


def times(matrices: Float[Tensor, "n a b"], vectors: Float[Tensor, "n b"]) -> Float[Tensor, "n a"]:
    """Multiply each matrix with its own vector."""
    return torch.bmm(matrices, vectors[..., None])[..., 0]
