"""Learn on own text what noise at the client's embeddings does to keys and values, and how well tokens show behind it.

The attacker knows the weights, the plan and sigma. So it runs own text with noise of its own, computes the sums that
its node would get, and looks how far from them right and wrong tokens lie.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hiddenlab.attacks.partial_sums.clusters import Cluster, clusters_of
from hiddenlab.attacks.partial_sums.sums import View
from hiddenlab.matching.in_turn import TEXT
from hiddenlab.matching.inner_layer import InnerLayer
from hiddenlab.models import Prefix, Request
from hiddenlab.proposals.corpus import Corpus
from hiddenlab.types import Progress

Test = Callable[["Candidates", bool], dict[str, Tensor]]  # whether candidates were run behind their prefix

WINDOWS, LENGTH = 40, 96  # own text on which the noise of keys and values is learned
TEXTS = 6  # own prompts on which right and wrong tokens are compared
TAIL = 15.0  # degrees of freedom of Student's distribution, which allows for tokens unlike those of own text
TRIES = 100  # own texts that are looked at for a long enough one
WRONG = 8  # wrong candidates of a position
POWERS = (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0)
# Share of wrong candidates that look like right ones, by test. Tokens of the same cluster do so by their values.
DOUBT = {
    "value": 0.05,
    "table value": 0.05,
    "own": 1e-4,
    "table own value": 1e-4,
    "whole": 1e-3,
}


@dataclass(frozen=True)
class Evidence:
    """How logarithms of squares are distributed, of right tokens and of wrong ones: means and deviations.

    Attributes:
        doubt: share of wrong ones that look like right ones. It bounds what one token gains by looking right.
    """

    right: tuple[float, float]
    wrong: tuple[float, float]
    doubt: float

    @classmethod
    def of(cls, right: Sequence[Tensor], wrong: Sequence[Tensor], doubt: float) -> "Evidence":
        """Fit both distributions."""
        (a, b), (c, d) = (
            (float(one.mean()), max(0.1, float(one.std())))
            for one in (torch.cat([*right]), torch.cat([*wrong]))
        )
        return cls((a, b), (c, d), doubt)

    def nats(self, logs: Float[Tensor, "*c"]) -> Float[Tensor, "*c"]:
        """Return by how many nats each square speaks for a right token."""
        right, wrong = (
            -(TAIL + 1) / 2 * (((logs - mean) / spread).square() / TAIL).log1p() - math.log(spread)
            for mean, spread in (self.right, self.wrong)
        )
        # Nearer than usual is no evidence against a token.
        right = torch.where(logs < self.right[0], torch.full_like(right, -math.log(self.right[1])), right)
        beside = math.log1p(-self.doubt)
        return right - torch.logaddexp(wrong + beside, right + math.log(self.doubt))


@dataclass(frozen=True)
class Tempered:
    """A log density that counts in part, since it is right to first order only.

    Attributes:
        power: the part that names right tokens of own text best.
    """

    power: float

    @classmethod
    def of(cls, right: Sequence[Tensor], wrong: Sequence[Tensor]) -> "Tempered":
        """Choose the power under which the right tokens' share among the others is largest."""

        def loss(power: float) -> float:
            each = zip(right, wrong, strict=True)
            return sum(float(torch.cat(one).mul(power).log_softmax(0)[0]) for one in each)

        return cls(max(POWERS, key=loss))

    def nats(self, logs: Float[Tensor, "*c"]) -> Float[Tensor, "*c"]:
        """Return by how many nats each density speaks for a token, but for a constant."""
        return self.power * logs


class NoiseModel:
    """Keys and values behind noise of a known deviation, of one layer.

    Args:
        layer: the nodes' first one. sigma: of the noise at the client's embeddings. seed: of own text and noise.
    """

    def __init__(self, layer: InnerLayer, sigma: float, seed: int, progress: Progress) -> None:
        self.layer, self.sigma, self.seed, self.progress = layer, sigma, seed, progress
        self.draw = torch.Generator().manual_seed(seed)
        self.corpus = Corpus(layer.model, seed)
        self._evidence: dict[tuple[object, ...], dict[str, Evidence | Tempered]] = {}
        clean, moved = zip(*(self._window() for _ in range(WINDOWS)), strict=True)
        (self.k_map, k_cov), (self.v_map, v_cov) = (
            _regression(torch.cat([one[i] for one in clean]), torch.cat([one[i] for one in moved]))
            for i in (1, 2)
        )
        self.k_cov = k_cov
        self.k_whitener, self.v_whitener = (
            torch.linalg.cholesky(torch.linalg.inv(cov)) for cov in (k_cov, v_cov)
        )

    def _window(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        tokens = self.corpus.text_window(LENGTH).to(self.layer.model.device)
        # The first state is unlike all others.
        clean, moved = (self.split(self._states(x)) for x in (tokens, self.noised(tokens)))
        return tuple(x[1:] for x in clean), tuple(x[1:] for x in moved)

    def _states(self, inputs: Tensor) -> Float[Tensor, "n w"]:
        model = self.layer.model
        return model.run([Request(model.prefix(), inputs)], keep=False)[0].states.float()

    def split(self, states: Float[Tensor, "*n w"]) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values that stand side by side."""
        q, k, v = states.float().cpu().split(self.layer.widths, -1)
        return q, k, v

    def noised(self, tokens: Int[Tensor, " n"]) -> Float[Tensor, "n d"]:
        """Return embeddings of tokens with noise."""
        rows = self.layer.model.embed(tokens.to(self.layer.model.device))
        return (rows.float() + self.sigma * torch.randn(rows.shape, generator=self.draw).to(rows.device)).to(
            rows
        )

    def expected(self, k: Float[Tensor, "n k"], v: Float[Tensor, "n v"]) -> tuple[Tensor, Tensor]:
        """Return what noise leaves of keys and values in the mean."""
        return _mapped(k, self.k_map), _mapped(v, self.v_map)

    def own_test(self, k: Float[Tensor, " k"], v: Float[Tensor, " v"]) -> "Test":
        """Return the test of candidates against the key and value of one of the node's own rows.

        It is the logarithm of the mean square, in units of the noise, by which they miss. Keys of a table are of
        another position, so that values alone count there.
        """

        def test(candidates: "Candidates", behind: bool) -> dict[str, Tensor]:
            parts = [((v.double() - candidates.v) @ self.v_whitener).square() / candidates.v_scale[:, None]]
            if behind:
                parts.append(
                    ((k.double() - candidates.k) @ self.k_whitener).square() / candidates.k_scale[:, None]
                )
            return {"own" if behind else "own value": torch.cat(parts, 1).mean(1).log()}

        return test

    def cluster_test(self, cluster: Cluster, position: int) -> "Test":
        """Return the test of candidates for a position against the sums that show it.

        It is the logarithm of the mean square, in units of the noise, of value vectors outside of the span; and the log
        density of weights, which tell places.
        """

        def test(candidates: "Candidates", behind: bool) -> dict[str, Tensor]:
            found = {"value": (cluster.values_left(candidates.v, self.v_whitener) / candidates.v_scale).log()}
            if behind:
                found["weight"] = cluster.weights_nats(candidates.k, position, self.k_cov, candidates.k_scale)
            return found

        return test

    def tabulated(self, test: "Test", position: int) -> dict[str, Float[Tensor, " v"]]:
        """Return the test of the whole vocabulary by a table, under names of its own."""
        found = test(self.table.alike if position else self.opening, False)
        return {f"table {name}": logs for name, logs in found.items()}

    @cached_property
    def table(self) -> "Candidates":
        """The whole vocabulary behind a few tokens of own text."""
        return self._table(self.corpus.text_window(TEXT))

    @cached_property
    def opening(self) -> "Candidates":
        """The whole vocabulary as a prompt's first token."""
        return self._table(self.corpus.text_window(TEXT)[:0])

    def _table(self, before: Int[Tensor, " n"]) -> "Candidates":
        model = self.layer.model
        prefix, tokens = model.prefix(), torch.arange(model.vocab_size, device=model.device)
        if len(before):
            prefix.extend(before.to(model.device))
        k, v = self.expected(*self._behind(prefix, tokens))
        moved_k, moved_v = (part.double() for part in self._behind(prefix, self.noised(tokens)))
        return Candidates(
            k, v,
            ((moved_k - k) @ self.k_whitener).square().mean(1), ((moved_v - v) @ self.v_whitener).square().mean(1),
        )  # fmt: skip

    def _behind(self, prefix: Prefix, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of token ids, or of embeddings, as alternatives behind a prefix."""
        model = self.layer.model
        requests = [Request(prefix, part[:0], branches=part) for part in inputs.split(model.max_pass_tokens)]
        answers = model.run_all(requests, keep=False)
        _, k, v = self.split(torch.cat([one.branches for one in answers]))
        return k, v

    def evidence(
        self, positions: Sequence[int], shards: Sequence[Sequence[int]]
    ) -> dict[str, Evidence | Tempered]:
        """Return how tests tell right tokens from wrong ones in views of these positions.

        Args:
            positions: of the node's rows. shards: positions of each key shard.
        """
        key = tuple(positions), tuple(map(tuple, shards))
        if key not in self._evidence:
            self._evidence[key] = self._measured(list(positions), [list(keys) for keys in shards])
        return self._evidence[key]

    def _measured(self, positions: list[int], shards: list[list[int]]) -> dict[str, Evidence | Tempered]:
        right, wrong = defaultdict[str, list[Tensor]](list), defaultdict[str, list[Tensor]](list)
        for text in range(TEXTS):
            self.progress("own text", text, TEXTS)
            tokens = self._beginning(positions[-1] + 1).cpu()
            q, k, v = self.split(self._states(self.noised(tokens)))
            view = sums_of(self.layer, positions, shards, q, k, v)
            clusters = clusters_of(view, self.layer, self.layer.by_head(q[positions]))
            prefix, values = self.layer.model.prefix(), list[Tensor]()
            for position, token in enumerate(tokens.tolist()):
                cluster = clusters.get(position)
                if position in view.row_of:
                    test = self.own_test(k[position], v[position])
                elif cluster is not None and cluster.readable:
                    test = self.cluster_test(cluster, position)
                else:
                    break
                mates = [] if cluster is None else [int(tokens[s]) for s in cluster.new]
                found, value = self._compared(prefix, position, token, mates, test)
                values.append(value)
                if cluster is not None and position == cluster.new[-1] and len(cluster.new) > 1:
                    found["whole"] = _whole(cluster, values)
                for name, logs in found.items():
                    right[name].append(logs[:1])
                    wrong[name].append(logs[1:])
                prefix.extend(tokens[position : position + 1].to(self.layer.model.device))
        learned: dict[str, Evidence | Tempered] = {
            name: Evidence.of(right[name], wrong[name], DOUBT[name]) for name in right if name != "weight"
        }
        learned["weight"] = Tempered.of(right["weight"], wrong["weight"])
        # A cluster of one token has none that could stand twice.
        learned.setdefault("whole", Tempered(0.0))
        return learned

    def texts(self) -> list[Int[Tensor, " n"]]:
        """Return own text on which others may learn."""
        return [self.corpus.text_window(LENGTH) for _ in range(TEXTS)]

    def _beginning(self, length: int) -> Int[Tensor, " n"]:
        """Return the beginning of an own text that is long enough, or a window of one if none is found."""
        for _ in range(TRIES):
            if len(tokens := self.corpus.beginning(length)) == length:
                return tokens
        return self.corpus.text_window(length)

    def _compared(
        self, prefix: Prefix, position: int, token: int, mates: Sequence[int], test: "Test"
    ) -> tuple[dict[str, Float[Tensor, " c"]], Float[Tensor, " w"]]:
        """Return what tests say of the right token, and then of wrong ones, and the right one's expected value.

        Args:
            mates: tokens of the same cluster. In a wrong place they are what weights must tell apart.
        """
        other = torch.randint(self.layer.model.vocab_size, (WRONG,), generator=self.draw)
        drawn = torch.cat([torch.tensor([token]), other[other != token]])
        every = torch.cat([drawn, torch.tensor([one for one in mates if one != token], dtype=torch.long)])
        (behind,) = self.run([prefix], [every])
        known = (self.table.alike if position else self.opening).of(drawn)
        found = {f"table {name}": logs for name, logs in test(known, False).items()}
        for name, logs in test(behind, True).items():
            # A mate's value vector lies in the span as well.
            found[name] = logs[: len(drawn)] if name == "value" else logs
        return found, behind.v[0]

    def run(self, prefixes: Sequence[Prefix], candidates: Sequence[Int[Tensor, " c"]]) -> list["Candidates"]:
        """Return expected keys and values of candidates behind each prefix."""
        model, found = self.layer.model, []
        requests = []
        for prefix, tokens in zip(prefixes, candidates, strict=True):
            tokens = tokens.to(model.device)
            requests.append(Request(prefix, tokens[:0], branches=tokens))
        for answer, tokens in zip(model.run_all(requests, keep=False), candidates, strict=True):
            _, k, v = self.split(answer.branches)
            known = self.table if prefixes[0].length else self.opening
            found.append(Candidates(*self.expected(k, v), known.k_scale[tokens], known.v_scale[tokens]))
        return found


@dataclass(frozen=True)
class Candidates:
    """What is expected of candidates' keys and values, and how much more noise moves them than others.

    Attributes:
        k, v: expected keys and values. k_scale, v_scale: factors of the variance of their noise.
    """

    k: Float[Tensor, "n k"]
    v: Float[Tensor, "n v"]
    k_scale: Float[Tensor, " n"]
    v_scale: Float[Tensor, " n"]

    @property
    def alike(self) -> "Candidates":
        """The same as if noise moved all alike, as where other tokens before them move them more than noise."""
        one = torch.ones_like(self.k_scale)
        return Candidates(self.k, self.v, one, one)

    def of(self, which: Int[Tensor, " some"]) -> "Candidates":
        """Return some of them."""
        return Candidates(self.k[which], self.v[which], self.k_scale[which], self.v_scale[which])


def _whole(cluster: Cluster, values: list[Tensor]) -> Float[Tensor, " some"]:
    """Return what the right values of a cluster leave of its sums, and what they do where one stands twice."""
    right = torch.stack([values[p] for p in cluster.new])
    wrong = []
    for place in range(1, len(right)):
        repeated = right.clone()
        repeated[place] = right[place - 1]
        wrong.append(cluster.missing(repeated))
    return torch.tensor([cluster.missing(right), *wrong], dtype=torch.float64)


def sums_of(
    layer: InnerLayer, positions: list[int], shards: list[list[int]], q: Tensor, k: Tensor, v: Tensor
) -> View:
    """Return the view that a node has of a prompt with these queries, keys and values; it holds no own rows.

    Args:
        positions: of the node's rows. shards: positions of each key shard.
    """
    queries = layer.by_head(q[positions])
    divisors, visible, outputs = [], [], []
    for shard in shards:
        keys = [s for s in shard if s < len(k)]
        seen = layer.attention.visible(positions, keys)
        some = seen.any(1)[None].expand(queries.shape[:2])
        scores = layer.scored(queries, k[keys]).double().masked_fill(~seen, -torch.inf)
        divisor = torch.where(some, scores.logsumexp(2), 0.0)
        output = torch.einsum(
            "hrc,chd->hrd", (scores - divisor[..., None]).exp(), layer.spread(v[keys].double())
        )
        divisors.append(divisor.T.float())
        visible.append(some.T.float())
        outputs.append(output.transpose(0, 1).float())
    own = q[positions][:, :0]  # no states
    return View(positions, own, torch.stack(divisors), torch.stack(visible), torch.stack(outputs), shards)


def _regression(x: Float[Tensor, "n w"], y: Float[Tensor, "n w"]) -> tuple[Tensor, Tensor]:
    """Return the linear map from x and a 1 to y, and the covariance of what it leaves."""
    inputs = torch.cat([x, torch.ones_like(x[:, :1])], 1).double()
    y = y.double()
    gram = inputs.T @ inputs
    ridge = 1e-6 * gram.diagonal().mean() * torch.eye(len(gram), dtype=torch.float64)
    found = torch.linalg.solve(gram + ridge, inputs.T @ y)
    rest = y - inputs @ found
    covariance = rest.T @ rest / max(1, len(x) - 1)
    return found, covariance + 1e-6 * covariance.diagonal().mean() * torch.eye(
        len(covariance), dtype=torch.float64
    )


def _mapped(x: Float[Tensor, "n w"], by: Float[Tensor, "more w"]) -> Tensor:
    return x.double() @ by[:-1] + by[-1]
