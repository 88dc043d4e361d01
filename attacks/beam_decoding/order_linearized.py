"""Measure how much noise an order of rows needs, behind one layer with noised embeddings.

Behind one layer a row is a function of two things: its own noised embedding, and what attention adds from the rows
before it. So it can be solved for by itself, without any order: attention is held at its average, and the difference of
the row (its noise and attention's deviation) is solved for as one displacement of its embedding. An order then
determines what attention adds, and so how much of each displacement is noise. The true order needs the least: hundreds
of nats less than others in a prompt of fifty tokens, where distances between rows and candidates tell almost nothing
(docs/log/028-order-in-noise.md).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hiddenlab.attacks.beam_decoding.embedding_inversion import newton
from hiddenlab.matching.layer_inversion import BELIEVED, Equations, jacobians, times
from hiddenlab.models import Prefix, Request, TruncatedModel

DRAWS = 1000  # random orders of a prompt from which attention's effect on its rows is learned
OWN = 0.05  # weight of the noise's covariance in the covariance of displacements (shrinkage)
LINEARISED = 12  # linearisations of each row over its posterior
STEP_LENGTH = 0.4  # step length of each update towards the new posterior
# Points at which Jacobians are taken, and at which their errors are measured.
JACOBIAN_POINTS, ERROR_POINTS = 2, 32
ERROR_FACTOR = 2.0  # factor on the linearisation's error, as errors of coordinates are not independent
SLACK = 0.4  # residual of a displacement's coordinate that an order may leave, in sigma
SEARCH_STEPS = 80  # steps towards the noised embeddings that explain an order
PRODUCTS = 5  # conjugate gradient iterations for the embedding of one row behind others
TRUST = 0.85  # weight of a nat of the noise, relative to a nat of the language model
EQUAL_TOLERANCE = 1e-2  # relative difference up to which all rows' mixing counts as one
DIRECTIONS = 24  # directions in which attention's deviation from its average may exceed the noise


@dataclass
class Displaced:
    """The displacement of each row of a prompt; scores orders (a ``local_search.OrderScorer``).

    Attributes:
        centre: embedding of each row's token. moved: displacement that explains each row with attention at ``usual``,
            its average.
        mixing: maps a change of a row's attention to a displacement; one matrix for all rows where it is the same.
        sigma: standard deviation of the noise on each coordinate.
        initial: noised embeddings estimated from each row alone. noised: those with which orders are run, ``initial``
            at first and then what ``explain`` found.
        expected: nats of the noise that each row is expected to need behind the right rows. trust: weight of one of
            these nats: embeddings are estimates, and their errors count as noise.
    """

    model: TruncatedModel
    sigma: float
    centre: Float[Tensor, "n d"]
    moved: Float[Tensor, "n d"]
    usual: Float[Tensor, "n a"]
    mixing: Float[Tensor, "_ d a"]
    initial: Float[Tensor, "n d"]
    noised: Float[Tensor, "n d"]
    expected: Float[Tensor, " n"]
    trust: float = 1.0

    def _mixing(self, rows: Int[Tensor, " r"]) -> Float[Tensor, "_ d a"]:
        return self.mixing.clone() if len(self.mixing) == 1 else self.mixing[rows].clone()

    def needed(self, attended: Float[Tensor, "n m a"]) -> Float[Tensor, "n m"]:
        """Return the nats of noise that each row needs if attention adds ``attended`` to it, in m cases."""
        change = _displacing(self.mixing, attended - self.usual[:, None])
        return ((self.moved[:, None] - change) / self.sigma).square().sum(2) / 2

    def orders(self, rows: Int[Tensor, "m n"]) -> Float[Tensor, "m n"]:
        """Return the score of each row of each order; see ``local_search.OrderScorer``."""
        answers = self.model.run_all(
            [Request(self.model.prefix(), self.noised[order]) for order in rows], keep=False, show="attn"
        )
        attended, places = torch.stack([answer.states for answer in answers]), rows.argsort(1)
        own = attended.gather(1, places[..., None].expand_as(attended))  # by row
        return -self.trust * self.needed(own.transpose(0, 1)).T.gather(1, rows)

    def places(self, rows: Int[Tensor, " n"]) -> Float[Tensor, "n n"]:
        """Return the score of each row of an order at each place; see ``local_search.OrderScorer``."""
        n, chain = len(rows), self.noised[rows]
        where = torch.arange(n, device=rows.device)
        requests = [
            Request(self.model.prefix(), chain, branches=embedding.expand(n, -1), parents=where)
            for embedding in chain
        ]
        answers = self.model.run_all(requests, keep=False, show="attn")
        attended = torch.empty(n, n, self.usual.shape[1], device=rows.device)
        attended[rows] = torch.stack([answer.branches for answer in answers])
        return -self.trust * self.needed(attended)[rows]

    def explain(self, rows: Int[Tensor, " n"]) -> float:
        """Solve for the noised embeddings behind an order, and use them from now on.

        Returns:
            Nats of the noise and of the residual; infinity where the solve fails.
        """
        with torch.inference_mode(False), torch.enable_grad():
            centre, moved, usual = (table[rows].clone() for table in (self.centre, self.moved, self.usual))
            mixing = self._mixing(rows)
            point = self.initial[rows].clone().requires_grad_()
            search = torch.optim.LBFGS(
                [point], max_iter=SEARCH_STEPS, history_size=20, line_search_fn="strong_wolfe"
            )

            def cost() -> Tensor:
                search.zero_grad()
                request = Request(self.model.prefix(), point)
                (answer,) = self.model.run([request], keep=False, grad=True, show="attn")
                change = _displacing(mixing, answer.states - usual)
                noise = point - centre
                left = (moved - noise - change) / (SLACK * self.sigma)
                nats = (left.square().sum() + (noise / self.sigma).square().sum()) / 2
                nats.backward()  # type: ignore[no-untyped-call]
                return nats.detach()

            search.step(cost)  # type: ignore[no-untyped-call]
            total = float(cost())
        if not math.isfinite(total):  # the solve diverged: keep the estimates from rows alone
            self.noised = self.initial
            return math.inf
        self.noised = self.initial.clone()
        self.noised[rows] = point.detach()
        return total

    def behind(
        self, prefixes: Sequence[Prefix], rows: Sequence[Int[Tensor, " _"]]
    ) -> tuple[Float[Tensor, "r d"], Float[Tensor, " r"]]:
        """Solve for the noised embeddings of rows behind prefixes.

        Args:
            prefixes: of embeddings that were solved for. rows: those that may follow each.

        Returns:
            Embeddings and scores of all rows, grouped by prefix.
        """
        every, sizes = torch.cat(list(rows)), [len(group) for group in rows]
        with torch.inference_mode(False):
            own = [table[every].clone() for table in (self.centre, self.moved, self.usual, self.initial)]
            centre, moved, usual, initial = own
            mixing = self._mixing(every)

            def attended(points: Tensor, grad: bool) -> Tensor:
                requests = [
                    Request(prefix, points[:0], branches=part)
                    for prefix, part in zip(prefixes, points.split(sizes), strict=True)
                ]
                answers = self.model.run(requests, keep=False, grad=grad, show="attn")
                return torch.cat([answer.branches for answer in answers])

            def explained(points: Tensor, grad: bool) -> Tensor:
                return points + _displacing(mixing, attended(points, grad) - usual)

            noise = (initial - centre) / self.sigma
            tau = torch.full((1, 1), SLACK * self.sigma, device=centre.device)
            target = centre + moved
            noise, _ = newton(explained, centre, self.sigma, noise, target, tau, PRODUCTS)
            solution = centre + self.sigma * noise
            # Noise: what attention does not explain.
            left = target - explained(solution, False) + solution - centre
        return solution, -self.trust * (left / self.sigma).square().sum(1) / 2


def displaced(
    model: TruncatedModel,
    tokens: Int[Tensor, " n"],
    observed: Float[Tensor, "n e"],
    sigma: float,
    generator: torch.Generator,
) -> Displaced:
    """Solve for the displacement of each row; several arrays of rows · d² numbers in double precision are held.

    Args:
        model: of one layer. tokens: of each row. observed: the rows. sigma: of the noise. generator: for drawn orders.
    """
    centre = model.embed(tokens).float()
    noise, attended = _draw(model, centre, sigma, generator)
    usual = attended.mean(0)
    with torch.inference_mode(False):
        centre, observed, usual = centre.clone(), observed.float().clone(), usual.clone()
    by_input, by_attention = jacobians(model, centre, usual)
    mixing = torch.linalg.solve(by_input, by_attention).float()
    if float((mixing - mixing[:1]).norm(dim=(1, 2)).max()) < EQUAL_TOLERANCE * float(mixing[0].norm()):
        mixing = mixing[:1].clone()  # attention's output is simply added
    # A displacement is the noise and attention's deviation from its average.
    drawn = noise + _displacing(mixing, (attended - usual).transpose(0, 1)).transpose(0, 1)
    mean = drawn.mean(0)
    spread = (drawn - mean).transpose(0, 1)
    own = sigma**2 * torch.eye(centre.shape[1], device=centre.device)
    covariance = (1 - OWN) * torch.bmm(spread.transpose(1, 2), spread) / len(drawn) + OWN * own
    equations = Equations(
        model, centre, usual, observed, mean.double(), torch.linalg.inv(covariance.double())
    )
    moved = equations.solve(_linearised(equations, generator)).float()
    # The share of noise in it, by regression on the draws.
    together = (1 - OWN) * torch.bmm(spread.transpose(1, 2), noise.transpose(0, 1)) / len(drawn) + OWN * own
    share = torch.linalg.solve(covariance.double(), (moved - mean).double()[..., None]).float()
    initial = centre + noise.mean(0) + torch.bmm(together.transpose(1, 2), share)[..., 0]
    expected = _expected(moved, attended - usual, mixing, sigma)
    return Displaced(model, sigma, centre, moved, usual, mixing, initial, initial, expected)


def _expected(
    moved: Float[Tensor, "n d"],
    changes: Float[Tensor, "draws n a"],
    mixing: Float[Tensor, "_ d a"],
    sigma: float,
) -> Float[Tensor, " n"]:
    """Return the expected nats of noise in each displacement, averaged over attention's possible contributions."""
    expected = list[Tensor]()
    for i, own in enumerate(moved):
        shown = changes[:, i] @ mixing[min(i, len(mixing) - 1)].T / len(changes) ** 0.5
        variances, directions = (part[..., -DIRECTIONS:] for part in torch.linalg.eigh(shown.T @ shown))
        along, signal = directions.T @ own / sigma, variances.clamp(min=0) / sigma**2
        # In each direction: the noise's share of the observation, by variances, and its posterior variance.
        noise = (along / (1 + signal)).square() + signal / (1 + signal)
        expected.append(((own / sigma).square().sum() - along.square().sum() + noise.sum()) / 2)
    return torch.stack(expected)


def _draw(
    model: TruncatedModel, centre: Tensor, sigma: float, generator: torch.Generator
) -> tuple[Float[Tensor, "draws n d"], Float[Tensor, "draws n a"]]:
    """Draw noise on each row and measure what attention adds to it, in random orders."""
    noises, attended = list[Tensor](), list[Tensor]()
    n = len(centre)
    for first in range(0, DRAWS, 100):
        drawn = range(min(100, DRAWS - first))
        orders = torch.stack([torch.randperm(n, generator=generator) for _ in drawn]).to(centre.device)
        noise = torch.randn(len(orders), *centre.shape, generator=generator).to(centre.device) * sigma
        requests = [
            Request(model.prefix(), (centre + offsets)[order])
            for order, offsets in zip(orders, noise, strict=True)
        ]
        answers = model.run_all(requests, keep=False, show="attn")
        own = zip(orders, answers, strict=True)
        attended += [answer.states[order.argsort()] for order, answer in own]
        noises.append(noise)
    return torch.cat(noises), torch.stack(attended).float()


def _linearised(equations: Equations, generator: torch.Generator) -> Float[Tensor, "n d"]:
    """Return the approximate displacement of each row, by linearising the layer over its posterior.

    The noise moves a row so far that the layer is not linear on the way, and steps that linearise it at one point end
    in minima close to their start. So it is linearised over a normal distribution: the Jacobian is the mean over a few
    drawn points, and its error at drawn points counts as noise on the row. The first linearisations have little weight,
    and more as the distribution narrows (statistical linearisation, as in iterated sigma-point filters).
    """
    moved, prior, observed = equations.mean, equations.prior, equations.observed.double()
    precision, least = prior, BELIEVED * equations.unit()
    every = torch.arange(len(moved), device=moved.device)
    for _ in range(LINEARISED):
        upper = torch.linalg.cholesky(precision).transpose(1, 2)
        drawn = torch.randn(ERROR_POINTS // 2, *moved.shape, generator=generator).to(moved)
        off = torch.linalg.solve_triangular(upper, torch.cat([drawn, -drawn]).permute(1, 2, 0), upper=True)
        at = moved + off.permute(2, 0, 1)
        shown = equations.states(every.repeat(ERROR_POINTS), at.flatten(0, 1)).unflatten(0, at.shape[:2])
        jacobian = torch.zeros_like(precision)
        for k in range(JACOBIAN_POINTS):  # a point and its mirror image, then another one
            jacobian += equations.jacobian(every, at[k // 2 + k % 2 * (ERROR_POINTS // 2)]) / JACOBIAN_POINTS
        middle = shown.mean(0)
        errors = shown - middle - (jacobian @ off).permute(2, 0, 1)
        weighed = (
            jacobian.transpose(1, 2) / (ERROR_FACTOR * errors.square().mean(0) + least.square())[:, None]
        )
        precision = (1 - STEP_LENGTH) * precision + STEP_LENGTH * (prior + weighed @ jacobian)
        towards = times(weighed, observed - middle) - equations.unlikely(every, moved)
        lower = torch.linalg.cholesky(precision)
        moved = moved + STEP_LENGTH * torch.cholesky_solve(towards[..., None], lower)[..., 0]
    return moved


def _displacing(mixing: Float[Tensor, "_ d a"], changes: Float[Tensor, "n *m a"]) -> Float[Tensor, "n *m d"]:
    """Return the displacements that changes of attention cause."""
    return changes @ mixing[0].T if len(mixing) == 1 else torch.einsum("nda,n...a->n...d", mixing, changes)


def place_free(model: TruncatedModel) -> bool:
    """Return whether positions affect states through attention alone, so that a row can be solved without its place."""
    if model.site.layer != 1 or model.site.stream != "resid":
        return False
    with torch.inference_mode():
        embeddings = model.embed(torch.zeros(2, dtype=torch.long))
        (answer,) = model.run([Request(model.prefix(), embeddings)], keep=False, show="attn")
        given = answer.states[:1].expand(2, -1)
        first, second = model.run_given(embeddings, given, torch.tensor([0, 7]))
    return torch.allclose(first, second, rtol=1e-4, atol=1e-6)
