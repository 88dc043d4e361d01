"""Weigh answers of attacks, as the attacker does: by tokens that are sure, then by rows and language together."""

import math
from collections.abc import Sequence
from functools import cached_property

import torch
from jaxtyping import Float
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from hiddenlab.errors import HiddenlabError
from hiddenlab.eval.assess.ensemble import verified
from hiddenlab.matching.distance import choose_matcher
from hiddenlab.models import TruncatedModel
from hiddenlab.proposals.corpus import Corpus
from hiddenlab.secret_maps import is_mapped
from hiddenlab.types import AttackResult, Observation

# How near to the likelihood of own texts a text is, as a share of the way from there to random tokens, and of how many.
NEARLY, USUAL = 0.25, 4
RARE = 0.01  # the probability below which a language model does not expect a token
# So many of a row's coordinates count, since noise is alike in many of them; and a share of a row that counts as none.
COUNTED, NONE = 32, 1e-6


class Belief:
    """How far the attacker believes an answer: by tokens that are sure, then by the rows and the language together.

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

    def weigh(self, answers: Sequence[AttackResult], observation: Observation) -> list[tuple[int, float]]:
        """Return for each answer to one prompt how far it is believed; the larger the better.

        Answers of which one cannot be weighed by the rows are weighed by the language model alone.
        """
        explained = [self._evidence(answer, observation) for answer in answers]
        return [
            (
                0 if self._replaced else verified(answer),
                self._likelihood(answer.ids) + (0.0 if None in explained else evidence or 0.0),
            )
            for answer, evidence in zip(answers, explained, strict=True)
        ]

    @torch.inference_mode()
    def _evidence(self, answer: AttackResult, observation: Observation) -> float | None:
        """Return how well a text explains the rows, in nats a row; 0 where it explains nothing, None if nobody can say.

        What the text's states leave of a row is taken for noise of unknown strength. Rows that go with no token, or
        that lie farther from the token's state than from the middle of the rows, are not explained. States are seen as
        the rows show them: projected, cut, or with coordinates in order of size. Shuffled rows get the order that suits
        a text best.
        """
        info, shown = observation.info, observation.states.float().cpu()
        if (
            self._replaced
            or is_mapped(info)
            or len(shown) < 2
            or not answer.ids
            or answer.positions is not None
        ):
            return None
        try:
            matcher = choose_matcher("auto", info).bound(shown)
            states = matcher.view(self._model.encode(torch.tensor(answer.ids)).float().cpu())
        except HiddenlabError:
            return None
        rows = matcher.prepare(shown)
        if states.shape[1] != rows.shape[1]:
            return None
        away = rows - rows.median(0).values
        # Of rows of one length: the first row is often far longer than the others.
        unit = (away.abs() / away.norm(dim=1, keepdim=True).clamp(min=1e-30)).mean(0)
        unit = unit + unit.mean()
        apart = torch.cdist(rows / unit, states / unit, compute_mode="donot_use_mm_for_euclid_dist").square()
        whole = (away / unit).square().sum(1)
        if not bool(torch.isfinite(apart).all()) or not bool((whole > 0).any()):
            return None
        if info.rows_permuted:
            of_rows, of_tokens = map(torch.as_tensor, linear_sum_assignment(apart.numpy()))
        else:
            pairs = [(token.row, i) for i, token in enumerate(answer.tokens) if 0 <= token.row < len(rows)]
            of_rows, of_tokens = torch.tensor(pairs, dtype=torch.long).reshape(-1, 2).T
        left = whole.clone()
        left[of_rows] = torch.minimum(left[of_rows], apart[of_rows, of_tokens])
        explained = (left / whole.clamp(min=1e-30)).clamp(min=NONE).log()
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
