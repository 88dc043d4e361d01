"""Rows behind one layer, in unknown order behind noise: how much noise does an order need?

Behind one layer a row is a function of two things: its own noised embedding, and what attention brings it from the
rows before it. So it can be solved for by itself, in no order at all: attention is held at what it brings the row on
average, and what is different about the row, its noise and attention's deviation, comes out as one displacement of its
embedding. An order then says what attention does bring, and with that how much of each displacement is noise. The true
order needs the least: by hundreds of nats less than others in a prompt of fifty tokens, where distances between rows
and candidates say next to nothing (eval/LOG.md, twenty-eighth entry).
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hiddenlab.slice import Request, Slice

DRAWS = 1000  # random orders of a prompt from which is learned what attention brings its rows
OWN = 0.05  # share of the noise's covariance in that of displacements, where draws are fewer than directions
# Share of a row that a step may leave unexplained: from what is sure to arrive to what rounding allows.
SHARES = (0.2, 0.1, 0.06, 0.06, 0.03, 0.03, 0.02, 0.012, *[0.006] * 14)
SETTLED = 1.0  # nats that another step has to gain at the least share
DAMPED = (1e-3, 0.3, 3.0, 30.0)  # tried in turn until a step lessens the cost
AT_ONCE = 48  # outputs of which gradients are taken together
SLACK = 0.2  # sigma; what an order may leave unexplained of a displacement, a coordinate
SEARCHED = 80  # steps towards the noised embeddings that explain an order
TRUST = 0.3  # of a nat that the noise says: embeddings are estimates, and their errors count as noise


@dataclass
class Displaced:
    """What moved each row of a prompt; a witness of orders (``moves.Witness``).

    Attributes:
        centre: embedding of each row's token. moved: displacement that explains each row with attention as ``usual``.
        mixing: what a change of a row's attention does, as displacement. sigma: of the noise on each coordinate.
        begun: noised embeddings as far as rows by themselves tell. noised: the same behind the order of ``explain``.
    """

    slice: Slice
    sigma: float
    centre: Float[Tensor, "n d"]
    moved: Float[Tensor, "n d"]
    usual: Float[Tensor, "n a"]
    mixing: Float[Tensor, "n d a"]
    begun: Float[Tensor, "n d"]
    noised: Float[Tensor, "n d"]

    def needed(self, attended: Float[Tensor, "n m a"]) -> Float[Tensor, "n m"]:
        """Nats of the noise that each row needs if attention brings it this, in m cases."""
        change = torch.bmm(attended - self.usual[:, None], self.mixing.transpose(1, 2))
        return ((self.moved[:, None] - change) / self.sigma).square().sum(2) / 2

    def orders(self, rows: Int[Tensor, "m n"]) -> Float[Tensor, "m n"]:
        """What speaks for each row of each order; see ``moves.Witness``."""
        answers = self.slice.run_all(
            [Request(self.slice.prefix(), self.noised[one]) for one in rows], keep=False, show="attn"
        )
        attended, places = torch.stack([one.chain for one in answers]), rows.argsort(1)
        own = attended.gather(1, places[..., None].expand_as(attended))  # by row
        return -TRUST * self.needed(own.transpose(0, 1)).T.gather(1, rows)

    def places(self, rows: Int[Tensor, " n"]) -> Float[Tensor, "n n"]:
        """What speaks for each row of an order at each place; see ``moves.Witness``."""
        n, chain = len(rows), self.noised[rows]
        where = torch.arange(n, device=rows.device)
        requests = [
            Request(self.slice.prefix(), chain, leaves=one.expand(n, -1), attach=where) for one in chain
        ]
        answers = self.slice.run_all(requests, keep=False, show="attn")
        attended = torch.empty(n, n, self.usual.shape[1], device=rows.device)
        attended[rows] = torch.stack([one.leaves for one in answers])
        return -TRUST * self.needed(attended)[rows]

    def explain(self, rows: Int[Tensor, " n"]) -> float:
        """Solve for the noised embeddings behind an order, and go on with them.

        Returns:
            Nats of the noise and of what it leaves unexplained; infinity where the search for them fails.
        """
        with torch.inference_mode(False), torch.enable_grad():
            own = [one[rows].clone() for one in (self.centre, self.moved, self.usual, self.mixing)]
            centre, moved, usual, mixing = own
            point = self.begun[rows].clone().requires_grad_()
            search = torch.optim.LBFGS(
                [point], max_iter=SEARCHED, history_size=20, line_search_fn="strong_wolfe"
            )

            def cost() -> Tensor:
                search.zero_grad()
                request = Request(self.slice.prefix(), point)
                (answer,) = self.slice.run([request], keep=False, grad=True, show="attn")
                change = torch.einsum("nda,na->nd", mixing, answer.chain - usual)
                noise = point - centre
                left = (moved - noise - change) / (SLACK * self.sigma)
                nats = (left.square().sum() + (noise / self.sigma).square().sum()) / 2
                nats.backward()  # type: ignore[no-untyped-call]
                return nats.detach()

            search.step(cost)  # type: ignore[no-untyped-call]
            found = float(cost())
        if not math.isfinite(found):  # the search went astray: what rows tell by themselves stays
            self.noised = self.begun
            return math.inf
        self.noised = self.begun.clone()
        self.noised[rows] = point.detach()
        return found


def displaced(
    slice: Slice,
    tokens: Int[Tensor, " n"],
    observed: Float[Tensor, "n e"],
    sigma: float,
    generator: torch.Generator,
) -> Displaced:
    """Solve for what moved each row; rows · d² numbers in double precision are held several times.

    Args:
        slice: of one layer. tokens: of each row. observed: the rows. sigma: of the noise. generator: for drawn orders.
    """
    centre = slice.embed(tokens).float()
    noise, attended = _draw(slice, centre, sigma, generator)
    usual = attended.mean(0)
    with torch.inference_mode(False):
        centre, observed, usual = centre.clone(), observed.float().clone(), usual.clone()
    by_input, by_attention = _jacobians(slice, centre, usual)
    mixing = torch.linalg.solve(by_input, by_attention).float()
    # What displaces a row: the noise itself, and attention where it is not the usual one.
    drawn = noise + torch.bmm((attended - usual).transpose(0, 1), mixing.transpose(1, 2)).transpose(0, 1)
    mean = drawn.mean(0)
    spread = (drawn - mean).transpose(0, 1)
    own = sigma**2 * torch.eye(centre.shape[1], device=centre.device)
    covariance = (1 - OWN) * torch.bmm(spread.transpose(1, 2), spread) / len(drawn) + OWN * own
    moved = _solve(slice, centre, usual, observed, mean.double(), covariance.double())
    # The share of noise in it, by regression on what was drawn.
    together = (1 - OWN) * torch.bmm(spread.transpose(1, 2), noise.transpose(0, 1)) / len(drawn) + OWN * own
    share = torch.linalg.solve(covariance.double(), (moved - mean).double()[..., None]).float()
    begun = centre + noise.mean(0) + torch.bmm(together.transpose(1, 2), share)[..., 0]
    return Displaced(slice, sigma, centre, moved, usual, mixing, begun, begun)


def _draw(
    slice: Slice, centre: Tensor, sigma: float, generator: torch.Generator
) -> tuple[Float[Tensor, "draws n d"], Float[Tensor, "draws n a"]]:
    """Noise on each row, and what attention brings it, in random orders."""
    noises, attended = list[Tensor](), list[Tensor]()
    n = len(centre)
    for first in range(0, DRAWS, 100):
        drawn = range(min(100, DRAWS - first))
        orders = torch.stack([torch.randperm(n, generator=generator) for _ in drawn]).to(centre.device)
        noise = torch.randn(len(orders), *centre.shape, generator=generator).to(centre.device) * sigma
        requests = [
            Request(slice.prefix(), (centre + one)[order]) for order, one in zip(orders, noise, strict=True)
        ]
        answers = slice.run_all(requests, keep=False, show="attn")
        own = zip(orders, answers, strict=True)
        attended += [answer.chain[order.argsort()] for order, answer in own]
        noises.append(noise)
    return torch.cat(noises), torch.stack(attended).float()


def _jacobians(
    slice: Slice, points: Float[Tensor, "n d"], usual: Float[Tensor, "n a"], both: bool = True
) -> list[Tensor]:
    """Of each row's state ``[n, e, …]``, by its embedding and, for ``both``, by what attention brings it; in double."""
    parts = list[tuple[Tensor, ...]]()
    with torch.inference_mode(False), torch.enable_grad():
        inputs, given = (one.detach().clone().requires_grad_() for one in (points, usual))
        states = slice.run_given(inputs, given, grad=True)
        n, width = states.shape
        # Rows have nothing to do with one another: the gradient of one output of all of them is that of each.
        for part in torch.arange(width, device=states.device).split(AT_ONCE):
            wanted = torch.nn.functional.one_hot(part, width).to(states.dtype)[:, None].expand(-1, n, -1)
            by = (inputs, given) if both else (inputs,)
            parts.append(torch.autograd.grad(states, by, wanted, retain_graph=True, is_grads_batched=True))
    return [torch.cat(one).double().transpose(0, 1) for one in zip(*parts, strict=True)]


def _solve(
    slice: Slice,
    centre: Float[Tensor, "n d"],
    usual: Float[Tensor, "n a"],
    observed: Float[Tensor, "n e"],
    mean: Float[Tensor, "n d"],
    covariance: Float[Tensor, "n d d"],
) -> Float[Tensor, "n d"]:
    """The likeliest displacement of each row that explains it, by damped Gauss-Newton steps of ever more rigour."""
    prior, moved = torch.linalg.inv(covariance), mean.clone()
    unit = observed.double().norm(dim=1, keepdim=True).clamp(min=1e-12) / observed.shape[1] ** 0.5
    open = torch.arange(len(moved), device=moved.device)  # rows that are not settled

    def cost(of: Tensor, tried: Tensor, tau: Tensor) -> tuple[Tensor, Tensor]:
        points = (centre[of] + tried).float()
        left = (observed[of].double() - slice.run_given(points, usual[of]).double()) / tau
        off = tried - mean[of]
        return left, (left.square().sum(1) + (off * _times(prior[of], off)).sum(1)) / 2

    for share in SHARES:
        tau = share * unit[open]
        left, least = cost(open, moved[open], tau)
        (jacobian,) = _jacobians(slice, (centre[open] + moved[open]).float(), usual[open], both=False)
        jacobian /= tau[..., None]
        normal = jacobian.transpose(1, 2) @ jacobian
        towards = _times(jacobian.transpose(1, 2), left) - _times(prior[open], moved[open] - mean[open])
        rows, gained = torch.arange(len(open), device=open.device), torch.zeros_like(least)
        for damping in DAMPED:
            damped = torch.linalg.cholesky(normal[rows] + (1 + damping) * prior[open[rows]])
            tried = moved[open[rows]] + torch.cholesky_solve(towards[rows, :, None], damped)[..., 0]
            gain = least[rows] - cost(open[rows], tried, tau[rows])[1]
            moved[open[rows[gain > 0]]], gained[rows] = tried[gain > 0], gain
            rows = rows[gain <= 0]
            if not len(rows):
                break
        if share == SHARES[-1]:
            open = open[gained > SETTLED]
            if not len(open):
                break
    return moved.float()


def _times(matrices: Tensor, vectors: Tensor) -> Tensor:
    return torch.bmm(matrices, vectors[..., None])[..., 0]


def place_free(slice: Slice) -> bool:
    """Whether a position shows in nothing but attention, so that a row can be solved for without its place."""
    if slice.site.layer != 1 or slice.site.stream != "resid":
        return False
    with torch.inference_mode():
        one = slice.embed(torch.zeros(2, dtype=torch.long))
        (answer,) = slice.run([Request(slice.prefix(), one)], keep=False, show="attn")
        given = answer.chain[:1].expand(2, -1)
        first, second = slice.run_given(one, given, torch.tensor([0, 7]))
    return torch.allclose(first, second, rtol=1e-4, atol=1e-6)
