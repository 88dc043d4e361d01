"""Find the unknown embeddings before a prompt from what its rows leave unexplained.

A random embedding before the prompt (paper, appendix F.1) moves every row, in ways that one vector of d numbers
determines: a prompt of n tokens gives n·d numbers to find it from. Behind the decoded tokens it is found by gradients
through the model (L-BFGS). The loss grows with the logarithm of the residual, so that tokens decoded wrongly or in a
wrong place count little. Behind the embedding found, distances tell right from wrong again, and the prompt is decoded
once more.

At first a prompt is decoded behind a random draw of the attacker's own. Leaving that place empty would be worse: the
first token that a model reads is an attention sink, whose state is unlike any other.

Where rows are shuffled, a first order may be too wrong for any embedding to explain it. But a few rows are enough to
find one, if they are the first. So each row is tried as the first, then the nearest rows behind the best of these, and
so on, each time with the embedding that explains them best. Where one embedding is unknown and the layers are few, only
the right rows are explained (docs/log/020-prefix-by-four-rows.md). Through many layers the solve does not converge:
so before any prompt is started again, the attacker tests it on his own texts, whose first rows he knows.
"""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hiddenlab.attacks.beam_decoding.beam import decode
from hiddenlab.attacks.beam_decoding.embedding_inversion import newton
from hiddenlab.attacks.beam_decoding.features import Learned
from hiddenlab.attacks.beam_decoding.hypotheses import Decoding, Effort, Engines, start
from hiddenlab.attacks.beam_decoding.local_search import move_parts
from hiddenlab.channels import Channel, in_order
from hiddenlab.matching.distance import Matcher
from hiddenlab.models import Prefix, Request, TruncatedModel
from hiddenlab.proposals.corpus import Corpus
from hiddenlab.types import Progress, silent
from hiddenlab.utils.random import generator

STAGES, STEPS = 6, 10  # of the optimiser; between stages the loss is adapted to what is left
BETTER = 0.9  # a stage that leaves more than this share of the residual is the last
EXPLAINED = 1e-5  # of a row's norm: less is rounding
STUCK_RESIDUAL = 0.01  # of a row's norm: with a larger residual the order may be too wrong
FIRST = 4  # rows of a beginning, where one embedding is unknown; one more for each further embedding
KEPT, NEAREST = 8, 6  # beginnings kept after each of them, and rows tried behind each of these
DESCENTS, TAU = 4, 0.1  # steps for each beginning, and the share of a row it may leave unexplained
OWN, LENGTH = 2, 40  # the attacker's own texts that the search is tested on, and their length
AT_ONCE = 256  # positions that gradients are taken through at once, or as many as the prompt has


def prefix_of(points: Float[Tensor, "p d"], model: TruncatedModel) -> Prefix:
    """Return embeddings as a committed prefix: their keys and values."""
    prefix = model.prefix()
    prefix.keep(model.run([Request(prefix, points.to(model.dtype))])[0], tokens=len(points))
    return prefix


def decode_behind(
    decodings: Sequence[Decoding],
    engines: Engines,
    learned: Learned,
    effort: Effort,
    size: int,
    rounds: int,
    anew: Callable[[], bool],
    progress: Progress = silent,
) -> list[Decoding]:
    """Find the embeddings before each prompt and decode behind them, as long as more is explained.

    Args:
        size: embeddings before each prompt. rounds: searches for them at most. anew: returns whether shuffled prompts
            that stay unexplained are started again, with as many rounds; called only where there are any (see
            ``arrives``).
    """
    model, matcher, results = engines.model, engines.matcher, list(decodings)
    if not results or not rounds:
        return results
    centre, deviation = prefix_prior(model, size)
    known = [centre] * len(results)  # what is found
    left = [float("inf")] * len(results)  # what that leaves unexplained

    def look(which: list[int], find: Callable[[Unknown, Tensor], Tensor]) -> list[int]:
        """Decode some prompts behind the embeddings found; return those of which more is explained now."""
        searches = [Unknown.of(results[i], model, matcher) for i in which]
        points, again = list[Tensor](), list[Decoding]()
        for done, (i, search) in enumerate(zip(which, searches, strict=True)):
            points.append(find(search, known[i]))
            again.append(start(results[i].view, engines, learned.weights, effort, search.prefix(points[-1])))
            again[-1].evaluated = 0  # the rows were read before
            progress("looking before the prompts", done + 1, len(which))
        decode(again, engines, learned, effort, progress)
        move_parts(again, engines, learned.weights, effort, progress)
        better = []
        for i, search, point, new in zip(which, searches, points, again, strict=True):
            after = Unknown.of(new, model, matcher)
            if find is begin:  # fitted to few rows: fit it to all of them before the comparison
                point = after.solve(point)
            now, was = after.left(point), search.left(point)
            new.evaluated += results[i].evaluated + search.evaluated + after.evaluated
            new.calls += results[i].calls + search.calls + after.calls
            if was < left[i]:
                known[i], left[i] = point, was
            if now <= left[i]:  # with equal tokens too: their distances are now behind the embedding found
                if now < left[i]:
                    better.append(i)
                results[i], known[i], left[i] = new, point, now
            else:
                results[i].evaluated, results[i].calls = new.evaluated, new.calls
        return better

    def begin(search: Unknown, point: Tensor) -> Tensor:
        return search.begin(centre, deviation, point)[0]

    open = list(range(len(results)))
    for _ in range(rounds):
        open = look(open, Unknown.solve)
    # With sorted coordinates an explanation of few rows proves nothing.
    stuck = [
        i
        for i, decoding in enumerate(results)
        if decoding.ahead is not None and STUCK_RESIDUAL < left[i] < float("inf")
    ]
    stuck = stuck if stuck and not matcher.sorted and anew() else []
    for find in (begin, *[Unknown.solve] * rounds):
        stuck = look(stuck, find)
    return results


def prefix_prior(model: TruncatedModel, size: int) -> tuple[Float[Tensor, "p d"], Float[Tensor, " d"]]:
    """Return the prior of an embedding before a prompt: the mean, and the standard deviation of each coordinate."""
    table = model.embed(torch.arange(model.vocab_size, device=model.device)).float()
    return table.mean(0).expand(size, -1), table.std(0).clamp(min=1e-12)


def arrives(
    channel: Channel,
    model: TruncatedModel,
    matcher: Matcher,
    size: int,
    seed: int,
    progress: Progress = silent,
) -> bool:
    """Return whether the search finds the first rows of the attacker's own texts, whose tokens are known."""
    corpus, (centre, deviation) = Corpus(model, seed + 6), prefix_prior(model, size)
    texts = [corpus.text_window(LENGTH).tolist() for _ in range(OWN)]
    released, arrived = channel.release_batch(model, texts, generator(seed, "joint", "first rows")), False
    for done, (observation, truth) in enumerate(released):
        progress("looking before own texts", done, OWN)
        rows = matcher.prepare(in_order(observation, truth).to(model.device).float())
        search = Unknown(torch.tensor(truth.tokens, device=model.device), rows, model, matcher)
        _, order = search.begin(centre, deviation, centre)
        arrived = order.tolist() == list(range(len(order)))
        if arrived:
            break
    progress("looking before own texts", OWN, OWN)
    return arrived


class Unknown:
    """The search for the embeddings before one prompt, given its tokens and its rows in order.

    Attributes:
        evaluated: positions run to find them. calls: passes.
    """

    def __init__(
        self,
        tokens: Int[Tensor, " n"],
        observed: Float[Tensor, "n e"],
        model: TruncatedModel,
        matcher: Matcher,
    ) -> None:
        self.model, self.matcher = model, matcher
        with torch.inference_mode(False):  # copies, as autograd takes no tensors of inference mode
            self.tokens = model.embed(tokens).clone()
            self.observed = observed.clone()
            self.lengths = self.observed.norm(dim=1).clamp(min=1e-12)
        self.evaluated = self.calls = 0

    @classmethod
    def of(cls, decoding: Decoding, model: TruncatedModel, matcher: Matcher) -> "Unknown":
        """Build the search behind a decoding in which every token has a row."""
        steps = decoding.beam[0].steps
        tokens, rows = (
            torch.tensor([getattr(step, name) for step in steps], device=model.device)
            for name in ("token", "row")
        )
        return cls(tokens, decoding.view.shown[rows], model, matcher)

    def begin(
        self, centre: Float[Tensor, "p d"], deviation: Float[Tensor, " d"], start: Float[Tensor, "p d"]
    ) -> tuple[Float[Tensor, "p d"], Int[Tensor, " place"]]:
        """Find the embeddings that best explain a few rows as the first of the prompt; return both, rows in order.

        Args:
            centre, deviation: mean and standard deviation of what may stand before the prompt, in each coordinate.
            start: a first estimate of what stands there, tried as well as the mean.
        """
        before, passes = self.model.evaluated_tokens, self.model.forward_calls
        noise = torch.stack([torch.zeros_like(centre), (start - centre) / deviation]).flatten(1).unique(dim=0)
        kept = torch.empty(len(noise), 0, dtype=torch.long, device=centre.device)
        at_once = max(AT_ONCE, len(centre) + len(self.tokens))
        for _ in range(min(FIRST + len(centre) - 1, len(self.tokens))):
            behind, rows = self._next(kept, centre + deviation * noise.view(-1, *centre.shape))
            orders = torch.cat([kept[behind], rows[:, None]], 1)
            size = max(1, at_once // (len(centre) + orders.shape[1]))
            parts = zip(orders.split(size), noise[behind].split(size), strict=True)
            noises, costs = zip(*[self._explain(*part, centre, deviation) for part in parts], strict=True)
            best, seen = list[int](), set[tuple[int, ...]]()
            for place in torch.cat(costs).argsort().tolist():
                if len(best) < KEPT and (order := tuple(orders[place].tolist())) not in seen:
                    best.append(place)
                    seen.add(order)
            kept, noise = orders[best], torch.cat(noises)[best]
        self.evaluated += self.model.evaluated_tokens - before
        self.calls += self.model.forward_calls - passes
        return centre + deviation * noise[0].view_as(centre), kept[0]

    def _next(
        self, orders: Int[Tensor, "k place"], points: Float[Tensor, "k p d"]
    ) -> tuple[Int[Tensor, " c"], Int[Tensor, " c"]]:
        """Return the pairs of a beginning (by index) and a row to try behind it; at first all rows."""
        every = torch.arange(len(self.tokens), device=self.tokens.device)
        if not orders.shape[1]:
            starts = torch.arange(len(orders), device=every.device)
            return starts.repeat_interleave(len(every)), every.repeat(len(orders))
        rests = [every[~torch.isin(every, order)] for order in orders]
        chains = [
            torch.cat([point.to(self.tokens), self.tokens[order]])
            for order, point in zip(orders, points, strict=True)
        ]
        requests = [
            Request(self.model.prefix(), chain, self.tokens[rest], torch.full_like(rest, len(chain)))
            for rest, chain in zip(rests, chains, strict=True)
        ]
        behind, rows = list[Tensor](), list[Tensor]()
        answers = self.model.run_all(requests, keep=False)
        for i, (rest, answer) in enumerate(zip(rests, answers, strict=True)):
            left = (self.matcher.view(answer.branches) - self.observed[rest]).norm(dim=1) / self.lengths[rest]
            rows.append(rest[left.topk(min(NEAREST, len(rest)), largest=False).indices])
            behind.append(torch.full_like(rows[-1], i))
        return torch.cat(behind), torch.cat(rows)

    def _explain(
        self, orders: Int[Tensor, "c place"], noise: Float[Tensor, "c n"], centre: Tensor, deviation: Tensor
    ) -> tuple[Float[Tensor, "c n"], Float[Tensor, " c"]]:
        """Solve for the embeddings that best explain each beginning; return their deviations and the costs in nats.

        All beginnings are alternatives behind an empty prefix: one product serves them all.
        """
        with torch.inference_mode(False), torch.enable_grad():
            tokens = self.tokens[orders]
            observed = self.observed[orders].flatten(1)
            width = self.observed.shape[1]
            tau = (TAU / width**0.5 * self.lengths[orders]).repeat_interleave(width, 1)

            def states(points: Tensor, grad: bool) -> Tensor:
                whole = torch.cat([points.view(-1, *centre.shape).to(tokens), tokens], 1)
                request = Request(self.model.prefix(), whole[0, :0], whole)
                branches = self.model.run([request], keep=False, grad=grad)[0].branches.view(
                    *whole.shape[:2], -1
                )
                return self.matcher.view(branches[:, len(centre) :].flatten(0, 1)).view(len(whole), -1)

            noise, cost = noise.clone(), noise[:, 0]
            middle = centre.flatten().expand_as(noise).clone()
            for _ in range(DESCENTS):
                noise, cost = newton(states, middle, deviation.repeat(len(centre)), noise, observed, tau)
            return noise, cost

    def solve(self, start: Float[Tensor, "p d"]) -> Float[Tensor, "p d"]:
        """Return the embeddings with the smallest residual, found from ``start``."""
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
                if not EXPLAINED <= left <= BETTER * before:  # also ends where the residual is not a number
                    break
            return best[1]

    def left(self, points: Float[Tensor, "p d"]) -> float:
        """Return the median share of the rows' norms that some embeddings leave unexplained."""
        return float(self._squared(points.detach()).median().sqrt())

    def prefix(self, points: Float[Tensor, "p d"]) -> Prefix:
        """Return the embeddings as a prefix for prompts."""
        self.evaluated += len(points)
        self.calls += 1
        return prefix_of(points, self.model)

    def _squared(self, points: Tensor, grad: bool = False) -> Float[Tensor, " n"]:
        request = Request(self.model.prefix(), torch.cat([points.to(self.tokens), self.tokens]))
        (answer,) = self.model.run([request], keep=False, grad=grad)
        self.evaluated += request.size
        self.calls += 1
        states = self.matcher.view(answer.states[len(points) :])
        return (states - self.observed).square().sum(1) / self.lengths.square()
