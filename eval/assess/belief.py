"""Weigh answers of attacks, as the attacker does: by tokens that are sure, then by rows and language together."""

import math
from collections.abc import Sequence
from functools import cached_property

import torch
from jaxtyping import Float
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from hiddenlab.eval.assess.ensemble import verified
from hiddenlab.models import TruncatedModel
from hiddenlab.proposals.corpus import Corpus
from hiddenlab.secret_maps import is_mapped
from hiddenlab.types import AttackResult, Observation

# How near to the likelihood of own texts a text is, as a share of the way from there to random tokens, and of how many.
NEARLY, USUAL = 0.25, 4
RARE = 0.01  # the probability below which a language model does not expect a token
# So many of a row's coordinates count, since noise is alike in many of them; and a share that counts as none.
COUNTED, TINY = 32, 1e-6


class Belief:
    """How far the attacker believes an answer: by tokens that are sure, then by how likely its text is.

    Args:
        replaced: tokens were replaced before the model ran, which is public; verified ones say nothing of the prompt.
    """

    def __init__(self, model: TruncatedModel, replaced: bool = False) -> None:
        self._model, self._replaced = model, replaced
        self._lengths: dict[int, tuple[float, float]] = {}

    @cached_property
    def _whole(self) -> TruncatedModel:
        """The whole model, loaded when it is first asked."""
        return self._model.sibling(stream="logits")

    def __call__(self, result: AttackResult, observation: Observation) -> tuple[int, float]:
        sure = 0 if self._replaced else verified(result)
        return sure, self._likelihood(result.ids) + self._evidence(result, observation)

    @torch.inference_mode()
    def _evidence(self, result: AttackResult, observation: Observation) -> float:
        """Return how well a text explains the rows, in nats a row; 0 where it explains nothing, or nobody can say.

        What the text's states leave of a row is taken for noise of unknown strength. Rows that go with no token, or
        that lie farther from the token's state than from the mean row, are not explained. Where coordinates are
        shuffled, rows and states are compared in order of size; where rows are, each text gets its best order.
        """
        rows, info = observation.states.float().cpu(), observation.info
        if self._replaced or is_mapped(info) or rows.shape[1] != self._model.width or len(rows) < 2:
            return 0.0
        if not result.ids or result.positions is not None:  # tokens are missing between those that were read
            return 0.0
        states = self._model.encode(torch.tensor(result.ids)).float().cpu()
        if info.columns_permuted is not None:
            rows, states = rows.sort(1).values, states.sort(1).values
        middle = rows.median(0).values
        spread = (rows - middle).abs().median(0).values
        unit = spread + spread.mean()  # the first row is often far longer than the others
        if not bool((unit > 0).all()):
            return 0.0
        apart = torch.cdist(rows / unit, states / unit).square()
        if info.rows_permuted:
            of_rows, of_tokens = map(torch.as_tensor, linear_sum_assignment(apart.numpy()))
        else:
            pairs = [(one.row, i) for i, one in enumerate(result.tokens) if 0 <= one.row < len(rows)]
            of_rows, of_tokens = torch.tensor(pairs, dtype=torch.long).reshape(-1, 2).T
        whole = ((rows - rows.mean(0)) / unit).square().sum(1)
        left = whole.clone()
        left[of_rows] = torch.minimum(left[of_rows], apart[of_rows, of_tokens])
        explained = (left / whole.clamp(min=TINY)).clamp(min=TINY).log()
        return -0.5 * min(COUNTED, rows.shape[1]) * float(explained.mean())

    def convinces(self, result: AttackResult) -> bool:
        """Return whether an answer is surely much of the prompt: half of it verified, or a text.

        A text is nearly as likely as one of the attacker's own, and far likelier than random tokens.
        """
        if not self._replaced and 2 * verified(result) >= len(result.ids):
            return True
        own, chance = self._usual(len(result.ids))
        return self._likelihood(result.ids) > own - NEARLY * (own - chance)

    def _usual(self, length: int) -> tuple[float, float]:
        """Return the likelihood of texts of the attacker's own with so many tokens, and of random tokens."""
        if length not in self._lengths:
            corpus = Corpus(self._model, 0)
            own, chance = (
                sum(self._likelihood(drawn(length).tolist()) for _ in range(USUAL)) / USUAL
                for drawn in (corpus.text_of, corpus.uniform)
            )
            self._lengths[length] = own, chance
        return self._lengths[length]

    def rare(self, ids: Sequence[int]) -> set[int]:
        """Return where tokens stand that the model expects with less than 1 % behind those before them.

        They are names, numbers and the like: what a text says that others do not. The first token is none of them.
        """
        if len(ids) < 2:
            return set()
        return {place + 1 for place in (self._said(ids) < math.log(RARE)).nonzero()[:, 0].tolist()}

    def _likelihood(self, ids: Sequence[int]) -> float:
        """Return the mean log-probability of a text's tokens behind its first."""
        return float("-inf") if len(ids) < 2 else float(self._said(ids).mean())

    @torch.inference_mode()
    def _said(self, ids: Sequence[int]) -> Float[Tensor, " n"]:
        """Return the log-probability of each token behind the first."""
        tokens = torch.tensor(list(ids))
        said = self._whole.encode(tokens)[:-1].float().log_softmax(-1)
        return said.gather(1, tokens[1:, None].to(said.device))[:, 0]
