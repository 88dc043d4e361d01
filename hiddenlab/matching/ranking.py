"""Rank the candidates to try by probe, language model, both, or the plain vocabulary."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hiddenlab.errors import InputError
from hiddenlab.matching.batching import ForwardCall, Search
from hiddenlab.matching.observed_context import StateReader
from hiddenlab.models import Answer, Prefix, Request, TruncatedModel
from hiddenlab.models.load import load_config
from hiddenlab.proposals.first_token_table import FirstTokenTable
from hiddenlab.proposals.in_context import Adapter
from hiddenlab.proposals.lm_context import opened
from hiddenlab.proposals.probe import Probe, fast_dtype
from hiddenlab.utils.clock import Clock, Rental

PROPOSALS = ("probe+lm", "probe", "lm", "vocab")
SHORTLIST = 32  # tokens for each row that the probe proposes cheaply
# The same where the language model is likely to be used: it reranks them.
WIDE_SHORTLIST = 128
DEEP = 4  # the language model is used where it has at most so many layers for each of the truncated model's
# Weight of the language model's log-probability beside the probe's (docs/log/013-opener.md).
LM_WEIGHT = 1.2
LOADING = 2000  # tokens that the language model runs in the time of loading it


class LazyModel:
    """The proposing language model, all layers and the head, loaded when a search first needs it.

    Args:
        model: the truncated model under attack. clock: stands still while the language model is loaded.
        patient: load it only once searching without it has cost about as much as loading it does.
        opener: let it read a text before every prompt, behind which it predicts first tokens better.

    Attributes:
        layers: how many layers it has, known without loading it.
    """

    def __init__(
        self, model: TruncatedModel, clock: Clock | None = None, *, patient: bool = False, opener: bool = True
    ) -> None:
        self._of, self._clock, self._opener = model, clock or Clock(), opener
        self.layers = int(load_config(model.ref).num_hidden_layers)
        self._rental = Rental(LOADING * self.layers / max(1, model.site.layer) if patient else 0.0)

    def wanted(self, cost: float) -> bool:
        """Return whether to use it now: what was done without it would have paid for loading it.

        Args:
            cost: of going on without it, in tokens that the truncated model runs.
        """
        return self._rental.due(cost)

    def reset(self) -> None:
        """Wait again until it is worth loading, as if no prompt had asked for it; loaded weights stay."""
        self._rental.restart()

    @cached_property
    def model(self) -> TruncatedModel:
        """The model, loaded in the fastest dtype available: it only orders candidates, so rounding does not matter."""
        dtype = str(fast_dtype(self._of.device)).removeprefix("torch.")
        with self._clock.stopped():
            return self._of.sibling(stream="logits", dtype=dtype)

    @cached_property
    def opened(self) -> Prefix:
        """What the model reads before every prompt; fork it to continue."""
        with self._clock.stopped():
            return opened(self.model) if self._opener else self.model.prefix()

    @cached_property
    def first(self) -> Float[Tensor, " v"] | None:
        """Log-probabilities of a prompt's first token; None where an opener is read or there is no special token.

        A special token that the tokenizer puts before every prompt is the likeliest. Others are as likely as behind it,
        or behind the model's first special token.
        """
        model = self.model
        if self._opener or not model.special_ids:
            return None
        put = [] if model.tokenizer is None else model.embedded(model.tokenizer("")["input_ids"])
        start = torch.tensor([*put, *model.special_ids][:1], device=model.device)
        states = model.run([Request(model.prefix(), start)], keep=False)[0].states
        scores = states[-1].float().log_softmax(-1)
        scores[put[:1]] = 0.0
        return scores

    @cached_property
    def beginning(self) -> Float[Tensor, " v"] | None:
        """Log-probabilities of a prompt's first token behind the opener; as ``first`` where nothing is read before."""
        if not self.opened.tokens:
            return self.first
        tokens = torch.tensor(self.opened.tokens, device=self.model.device)
        states = self.model.run([Request(self.model.prefix(), tokens)], keep=False)[0].states
        return states[-1].float().log_softmax(-1)


@dataclass(frozen=True)
class Proposer:
    """The engines behind a proposal name; any may be absent.

    Attributes:
        reader: the language model's last layers, which read the observed rows; used in place of ``lm``.
        describe: gives the vocabulary's descriptions for in-context learning, the same ones in every call.
    """

    vocab_size: int
    probe: Probe | None
    lm: LazyModel | None
    first_tokens: FirstTokenTable | None = None
    reader: StateReader | None = None
    describe: Callable[[], Adapter | None] = lambda: None

    @property
    def adapter(self) -> Adapter | None:
        """The vocabulary's descriptions, made now if they are not yet; None where they do not pay."""
        return self.describe()

    @property
    def weights(self) -> tuple[float, float]:
        """Weights of the probe's log-probabilities, and of those of a language model that reads tokens."""
        return 1.0, 1.0 if self.probe is None else LM_WEIGHT

    def asks_model(self, layer: int) -> bool:
        """Return whether the language model is likely to be used: without a probe, or where it is relatively cheap."""
        if self.reader is not None:
            return True
        return self.lm is not None and (self.probe is None or self.lm.layers <= DEEP * layer)

    def scores(
        self,
        of_rows: Float[Tensor, " v"] | None,
        next_token: Float[Tensor, " v"] | None,
        weights: tuple[float, float] | None = None,
    ) -> Float[Tensor, " v"]:
        """Return each token's score: the probe's log-probability for the best of the rows plus the model's, weighted.

        All scores are 0 where neither is available.

        Args:
            of_rows: the probe's part. next_token: the language model's. weights: of both; None is ``self.weights``.
        """
        of_probe, of_model = self.weights if weights is None else weights
        if next_token is None:
            return torch.zeros(self.vocab_size) if of_rows is None else of_rows
        if of_rows is None:
            return of_model * next_token
        return of_probe * of_rows + of_model * next_token.to(of_rows.device)


class LanguageModel:
    """One prompt's view of the proposing language model: its prefix follows the recovered tokens."""

    def __init__(self, model: LazyModel, weights: tuple[float, float] = (1.0, LM_WEIGHT)) -> None:
        self.model, self.weights = model, weights
        self._prefix: Prefix | None = None
        self._next: Tensor | None = None

    def fork(self) -> "LanguageModel":
        """Return the same view, to follow other tokens from here on."""
        other = LanguageModel(self.model, self.weights)
        other._prefix = None if self._prefix is None else self._prefix.fork()
        other._next = self._next
        return other

    def wanted(self, cost: float) -> bool:
        """Return whether to use it now, see ``LazyModel.wanted``."""
        return self.model.wanted(cost)

    def cost(self, tokens: list[int], model_layers: int) -> float:
        """Return the cost of ``next_token``, in candidates of a truncated model with so many layers."""
        held = self._prefix.length - self.model.opened.length if self._prefix is not None else 0
        return (len(tokens) - held) * self.model.layers / model_layers

    def cost_of_prefill(self, model: TruncatedModel) -> float:
        """Return the cost of one pass over a prompt, in passes of the truncated model over the same prompt."""
        return self.model.layers / max(1, model.site.layer)

    def next_token(self, tokens: list[int]) -> Search:
        """Return log-probabilities ``[v]`` of the token after ``tokens``; None for the first where none are known."""
        lm = self.model.model
        if not tokens:
            return self.model.first
        self._prefix = self._prefix or self.model.opened.fork()
        missing = tokens[self._prefix.length - self.model.opened.length :]
        if missing:
            answer: Answer = yield ForwardCall(
                lm, Request(self._prefix, torch.tensor(missing, device=lm.device)), counts=False
            )
            self._prefix.keep(answer, tokens=len(missing))
            self._next = answer.states[-1].float().log_softmax(-1)
        return self._next

    def along(self, guess: list[int]) -> Search:
        """Return log-probabilities ``[len(guess) - 1, v]`` of the second and later tokens of a guess."""
        lm = self.model.model
        tokens = torch.tensor(guess[:-1], device=lm.device)
        answer: Answer = yield ForwardCall(lm, Request(self.model.opened, tokens), counts=False)
        return answer.states.float().log_softmax(-1)

    def reranked(self, order: Int[Tensor, "n k"], scores: Float[Tensor, "n k"]) -> Search:
        """Return the candidates of each row in a better order, and their log-probabilities among themselves.

        The language model reads the best guesses.

        Args:
            order, scores: the candidates and their log-probabilities by the probe.
        """
        along = yield from self.along(order[:, 0].tolist())
        mixed = scores.clone()
        mixed[1:] += self.weights[1] * along.gather(1, order[1:].to(along.device)).to(scores.device)
        values, place = mixed.log_softmax(1).sort(dim=1, descending=True)
        return order.gather(1, place), values


class Continuations:
    """The proposing language model's predictions behind a prompt's recovered tokens and several more.

    Unlike ``LanguageModel`` it answers at once, outside of any search's passes.
    """

    def __init__(self, model: LazyModel | None, special_ids: Sequence[int]) -> None:
        self.model, self.start = model, list(special_ids[:1])
        self._first: Tensor | None = None
        self._prefix: Prefix | None = None
        self._next: Tensor | None = None

    def after(self, tokens: list[int], more: Sequence[tuple[int, ...]]) -> Float[Tensor, "c v"] | None:
        """Return log-probabilities of the token after each continuation of one length; None without a model.

        The first token of a prompt is predicted behind a special token, the others behind the model's opener.
        """
        if self.model is None:
            return None
        model = self.model.model
        branches = torch.tensor(more, dtype=torch.long, device=model.device)
        if not tokens and branches.shape[1] == 0:
            if not self.start:
                return None
            if self._first is None:
                start = torch.tensor(self.start, device=model.device)
                answer = model.run([Request(model.prefix(), start)], keep=False)[0]
                self._first = answer.states[-1].float().log_softmax(-1)
            return self._first.expand(len(more), -1)
        opened = self.model.opened.length
        if self._prefix is None or self._prefix.tokens[opened:] != tokens[: self._prefix.length - opened]:
            self._prefix = self.model.opened.fork()
        if missing := tokens[self._prefix.length - opened :]:
            self._next = self._prefix.extend(torch.tensor(missing, device=model.device))[-1]
        if branches.shape[1] == 0:
            assert self._next is not None
            return self._next.float().log_softmax(-1).expand(len(more), -1)
        answer = model.run([Request(self._prefix, branches[0, :0], branches=branches)], keep=False)[0]
        return answer.branches.unflatten(0, branches.shape)[:, -1].float().log_softmax(-1)


def check_proposal(name: str) -> None:
    """Check the name of a proposal.

    Raises:
        InputError: the name is unknown.
    """
    if name not in PROPOSALS:
        raise InputError(f"unknown proposal {name!r}; known are {', '.join(PROPOSALS)}")
