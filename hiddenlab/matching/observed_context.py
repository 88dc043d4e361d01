"""Let a language model read the observed states in place of tokens: its last layers continue every row at once.

A row is the state of its whole context. The layers behind it, and the head, turn it into the very prediction that the
language model makes behind the true tokens, while no token is known yet. So one pass of the last layers gives the next
token's probabilities at every position, and the probe reads each row beside them (docs/log/040-first-prompt.md; no
paper describes it).
"""

import math
from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from hiddenlab.matching.batching import ForwardCall, Search
from hiddenlab.models import Answer, Request, TruncatedModel
from hiddenlab.models.load import load_config
from hiddenlab.models.rest import Rest, load_rest
from hiddenlab.proposals.probe import Probe, fast_dtype
from hiddenlab.proposals.text_rows import TextRows
from hiddenlab.utils.clock import Clock, Rental

LOADING = 300  # tokens: the price of loading the last layers, in what they run; hard tokens cost more than one round
MOST_WEIGHT, NEWTON_STEPS = 20.0, 12


@dataclass
class StateReader:
    """A language model's last layers, loaded when a search first needs them, and the weights of what they say.

    Attributes:
        model: the truncated model under attack.
        text: rows of the attacker's own text, on which the weights are set. probe: what the predictions are beside.
        clock: stands still while anything is loaded. patient: load only once doing without has cost about as much.
    """

    model: TruncatedModel
    text: TextRows
    probe: Probe
    clock: Clock
    patient: bool = False
    weights: tuple[float, float] = (1.0, 1.0)
    _rental: Rental = field(init=False)

    def __post_init__(self) -> None:
        self._rental = Rental(LOADING * self.cost if self.patient else 0.0)

    @cached_property
    def layers(self) -> int:
        """The number of layers of the whole model."""
        return int(load_config(self.model.ref).num_hidden_layers)

    @cached_property
    def cost(self) -> float:
        """The cost of one pass over a prompt, in passes of the truncated model; the head reads few tokens only."""
        return self.layers / self.model.site.layer - 1

    def wanted(self, cost: float) -> bool:
        """Return whether to use it now: it can be loaded, and is worth it; see ``LazyModel.wanted``."""
        return self._rental.due(cost) and self.rest is not None

    def reset(self) -> None:
        """Wait again until it is worth loading; see ``LazyModel.reset``."""
        self._rental.restart()

    @cached_property
    def rest(self) -> Rest | None:
        """The last layers; None where states of this model cannot be continued."""
        with self.clock.stopped():
            rest = load_rest(self.model, str(fast_dtype(self.model.device)).removeprefix("torch."))
            if rest is not None:
                self._weigh(rest)
        return rest

    def read_by(self, probe: Probe) -> None:
        """Take another probe, and weigh it."""
        self.probe = probe
        if "rest" in vars(self) and self.rest is not None:
            self._weigh(self.rest)

    def _weigh(self, rest: Rest) -> None:
        """Set the weights under which the tokens of the attacker's own text are likeliest."""
        read, said = [], []
        for window in self.text.states:
            read.append(self.probe.log_probs(window[1:]))
            said.append(rest.log_probs(continued(rest, window[:-1])).to(window.device))
        self.weights = likeliest_weights(
            torch.cat(read), torch.cat(said), self.text.tokens[:, 1:].flatten().to(self.text.states.device)
        )


def continued(rest: Rest, rows: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
    """Return the states behind the last layer for rows of one prompt."""
    return rest.layers.encode(rows.to(rest.layers.dtype))


def likeliest_weights(
    read: Float[Tensor, "n v"], said: Float[Tensor, "n v"], tokens: Int[Tensor, " n"]
) -> tuple[float, float]:
    """Return the weights of two log-probabilities under which some tokens are likeliest, by Newton's method.

    The likelihood is concave in them, so that there is one best pair.

    Args:
        read: by the probe. said: by the language model.
    """
    both = torch.stack([read, said])
    right = both.gather(2, tokens[None, :, None].expand(2, -1, 1))[..., 0]
    weights = torch.tensor([1.0, 1.0], device=read.device)

    def loss(weights: Tensor) -> float:
        return float(F.cross_entropy((weights[:, None, None] * both).sum(0), tokens))

    least = loss(weights)
    for _ in range(NEWTON_STEPS):
        chances = (weights[:, None, None] * both).sum(0).softmax(1)
        means = (chances * both).sum(2)
        slope = (means - right).mean(1)
        products = torch.stack([torch.stack([(chances * x * y).sum(1).mean() for x in both]) for y in both])
        curvature = products - (means[:, None] * means[None]).mean(2)
        curvature += 1e-6 * curvature.trace() * torch.eye(2, device=read.device)
        step = torch.linalg.solve(curvature, slope)
        for _ in range(6):  # halve a step that leads too far
            tried = (weights - step).clamp(0, MOST_WEIGHT)
            if (now := loss(tried)) < least:
                break
            step = step / 2
        else:
            break
        if least - now < 1e-4:
            weights, least = tried, now
            break
        weights, least = tried, now
    of_probe, of_model = weights.tolist()
    return (of_probe, of_model) if math.isfinite(least) else (1.0, 0.0)


class ObservedContext:
    """One prompt's view of the continuation: what the language model expects behind each of its rows.

    Args:
        rows: the observed states, in the prompt's order.
    """

    def __init__(self, model: StateReader, rows: Float[Tensor, "n d"]) -> None:
        self.model, self.rows = model, rows
        self._ahead: Tensor | None = None

    @property
    def weights(self) -> tuple[float, float]:
        """Weights of the probe's log-probabilities and of the language model's."""
        return self.model.weights

    def wanted(self, cost: float) -> bool:
        """Return whether to use it now, see ``StateReader.wanted``."""
        return self.model.wanted(cost)

    def cost(self, tokens: list[int], model_layers: int) -> float:
        """Return the cost of ``next_token``, in candidates of the truncated model."""
        return 1.0 if self._ahead is not None else len(self.rows) * self.model.cost

    def cost_of_prefill(self, model: TruncatedModel) -> float:
        """Return the cost of one pass over a prompt, in passes of the truncated model over the same prompt."""
        return self.model.cost

    def _run(self) -> Search:
        """Return the states behind the last layer of all rows but the last; they are computed once."""
        rest = self.model.rest
        assert rest is not None
        if self._ahead is None:
            rows = self.rows[:-1].to(rest.layers.dtype)
            answer: Answer = yield ForwardCall(rest.layers, Request(rest.layers.prefix(), rows), counts=False)
            self._ahead = answer.states
        return self._ahead

    def next_token(self, tokens: list[int]) -> Search:
        """Return log-probabilities ``[v]`` of the token after ``tokens``; None for the first token."""
        if not tokens:
            return None
        ahead: Tensor = yield from self._run()
        assert self.model.rest is not None
        return self.model.rest.log_probs(ahead[len(tokens) - 1 : len(tokens)])[0]

    def reranked(self, order: Int[Tensor, "n k"], scores: Float[Tensor, "n k"]) -> Search:
        """Return the candidates of each row in a better order; see ``LanguageModel.reranked``."""
        ahead: Tensor = yield from self._run()
        rest, (of_probe, of_model) = self.model.rest, self.weights
        assert rest is not None
        mixed = scores.clone()
        mixed[1:] = of_probe * scores[1:] + of_model * rest.scores(ahead, order[1:]).to(scores.device)
        values, place = mixed.log_softmax(1).sort(dim=1, descending=True)
        return order.gather(1, place), values
