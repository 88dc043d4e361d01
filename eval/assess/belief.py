"""Weigh answers of attacks, as the attacker does: by rows and language, or by tokens that are sure and language."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from hiddenlab.channels import Channel, in_order
from hiddenlab.eval.assess.ensemble import verified
from hiddenlab.matching.distance import Matcher, choose_matcher
from hiddenlab.models import Request, TruncatedModel
from hiddenlab.proposals.corpus import Corpus
from hiddenlab.row_facts import extra_rows
from hiddenlab.secret_maps import is_mapped
from hiddenlab.types import AttackResult, Observation, ObservationInfo
from hiddenlab.utils.random import generator

# How near to the likelihood of own texts a text is, as a share of the way from there to random tokens, and of how many.
NEARLY, USUAL = 0.25, 4
RARE = 0.01  # the probability below which a language model does not expect a token
# Tokens of own text from which it is learned what a defense makes of states: at least, and for each coordinate. The
# ridge of the regression, and what is added to the moments of its errors, in their mean.
TOKENS, FOR_EACH, RIDGE, SHRUNK = 4000, 6, 0.01, 0.02
WIDEST = 8192  # coordinates of rows for which a matrix of all pairs is not too large; logits have more
OWN = 11  # seed of own texts
EXPLAINS = 1.0  # nats a row: a text that says less of the rows may be the language model's invention
FAR = 4.0  # a row that is so much farther from the middle than most counts as no farther


@dataclass(frozen=True)
class Release:
    """What a defense makes of states: a linear map of them, and errors of which the second moments are known.

    Noise on embeddings bends states: behind it a token's state lies nearer to the others than in the plain model, so
    that the plain state of a wrong token may be nearer to a row than that of the right one.

    Attributes:
        matcher: the form in which rows and states are compared. middle, shown: the means of states, and of rows.
            slope: of a row by the state, as a matrix. whitening: behind it errors are alike in all directions.
    """

    matcher: Matcher
    middle: Float[Tensor, " k"]
    shown: Float[Tensor, " k"]
    slope: Float[Tensor, "k k"]
    whitening: Float[Tensor, "k k"]

    @classmethod
    def learned(cls, model: TruncatedModel, info: ObservationInfo) -> "Release | None":
        """Learn it from texts of the attacker's own; return None where the defense does not release these."""
        try:
            matcher, channel = choose_matcher("auto", info), Channel.parse(info.channel)
            texts = list(Corpus(model, OWN).windows(max(TOKENS, FOR_EACH * model.width)))
            drawn = generator(OWN, "what a defense makes of states")
            released = channel.release_batch(model, [text.tolist() for text in texts], drawn)
        except Exception:  # the code of somebody else's defense; attacks tell what fails there
            return None
        plain = model.run_all([Request(model.prefix(), text) for text in texts], keep=False)
        states, rows = list[Tensor](), list[Tensor]()
        for own, (observation, truth) in zip(plain, released, strict=True):
            bound = matcher.bound(observation.states.float().cpu())
            states.append(bound.view(own.states.float().cpu())[1:])
            rows.append(bound.prepare(in_order(observation, truth).float().cpu())[1:])
        given, seen = torch.cat(states), torch.cat(rows)
        return None if given.shape != seen.shape else cls.fitted(matcher, given, seen)

    @classmethod
    def fitted(
        cls, matcher: Matcher, given: Float[Tensor, "n k"], seen: Float[Tensor, "n k"]
    ) -> "Release | None":
        """Return the ridge regression of rows by states; None where there is nothing to see."""
        middle, shown = given.mean(0), seen.mean(0)
        away, one = (given - middle).double(), torch.eye(given.shape[1], dtype=torch.float64)
        moments = away.T @ away
        slope = torch.linalg.solve(
            moments + RIDGE * moments.diag().mean() * one, away.T @ (seen - shown).double()
        )
        errors = (seen - shown).double() - away @ slope
        spread = errors.T @ errors / len(errors)
        least = 1e-9 * float(seen.double().square().mean())  # what rounding leaves
        root, failed = torch.linalg.cholesky_ex(spread + (SHRUNK * spread.diag().mean() + least) * one)
        if int(failed) or not bool(torch.isfinite(root).all()):
            return None
        whitening = torch.linalg.inv(root).T
        return cls(matcher, middle, shown, slope.float(), whitening.float())

    def expected(self, states: Float[Tensor, "n k"]) -> Float[Tensor, "n k"]:
        """Return the rows that are expected of states, whitened."""
        return self.whitened(self.shown + (states - self.middle) @ self.slope)

    def whitened(self, rows: Float[Tensor, "n k"]) -> Float[Tensor, "n k"]:
        """Return rows in coordinates in which errors are alike."""
        return (rows - self.shown) @ self.whitening

    def apart(self, rows: Float[Tensor, "n k"], others: Float[Tensor, "m k"]) -> Float[Tensor, "n m"]:
        """Return squared distances: twice the nats by which a row is less likely than one without an error."""
        return torch.cdist(rows, others, compute_mode="donot_use_mm_for_euclid_dist").square()


class Belief:
    """How far the attacker believes an answer: by the rows and the language, or by tokens that are sure.

    Args:
        replaced: tokens were replaced before the model ran, which is public; verified ones say nothing of the prompt.
    """

    def __init__(self, model: TruncatedModel, replaced: bool = False) -> None:
        self._model, self._replaced = model, replaced
        self._lengths: dict[int, tuple[float, float]] = {}
        self._learned: tuple[Release | None] | None = None

    @cached_property
    def _whole(self) -> TruncatedModel:
        """The whole model, loaded when it is first asked."""
        return self._model.sibling(stream="logits")

    def weigh(self, answers: Sequence[AttackResult], observation: Observation) -> list[tuple[int, float]]:
        """Return for each answer to one prompt how far it is believed; the larger the better.

        Answers are weighed by the rows and the language model. Where one cannot be weighed by the rows, verified tokens
        come first, and then the language model. So do they where the prompt is of one token, or all answers are:
        neither rows nor language say anything of a first token. (An attack verifies a token behind those that it took
        before. Where noise or rounding makes right and wrong overlap, these may be wrong, and the token all the same.)
        """
        explained = [self._evidence(answer, observation) for answer in answers]
        short = len(observation.states) - extra_rows(observation.info) < 2
        unknown = None in explained or short or all(len(answer.ids) < 2 for answer in answers)
        return [
            (
                verified(answer) if unknown and not self._replaced else 0,
                self._likelihood(answer.ids) + (0.0 if unknown else evidence or 0.0),
            )
            for answer, evidence in zip(answers, explained, strict=True)
        ]

    @torch.inference_mode()
    def _evidence(self, answer: AttackResult, observation: Observation) -> float | None:
        """Return how well a text explains the rows, in nats a row; 0 where it explains nothing, None if unknown.

        The attacker has learned what the defense makes of states (``Release``). The rows are likelier given the text's
        states than given the mean state alone; the result is by how much. Rows that go with no token, or that the mean
        state explains better, count as not explained. The first token is left out: its state is unlike all others.
        Shuffled rows get the order that suits a text best.
        """
        info, shown = observation.info, observation.states.float().cpu()
        if self._replaced or is_mapped(info) or info.positions is not None or shown.shape[1] > WIDEST:
            return None
        if not answer.ids or answer.positions is not None or (release := self._release_of(info)) is None:
            return None
        matcher = release.matcher.bound(shown)
        states = matcher.view(self._model.encode(torch.tensor(answer.ids)).float().cpu())
        rows = matcher.prepare(shown)
        if not rows.shape[1] == states.shape[1] == len(release.middle):
            return None
        rows = release.whitened(rows)
        apart = release.apart(rows, release.expected(states))
        nothing = release.apart(rows, release.expected(release.middle[None]))[:, 0]
        if not bool(torch.isfinite(apart).all()):
            return None
        if info.rows_permuted:
            of_rows, of_tokens = map(torch.as_tensor, linear_sum_assignment(apart.numpy()))
        else:
            pairs = [(token.row, i) for i, token in enumerate(answer.tokens) if 0 <= token.row < len(rows)]
            of_rows, of_tokens = torch.tensor(pairs, dtype=torch.long).reshape(-1, 2).T
        of_rows, of_tokens = of_rows[of_tokens > 0], of_tokens[of_tokens > 0]
        nothing = nothing.clamp(max=FAR * float(nothing.median()))
        explained = (nothing[of_rows] - apart[of_rows, of_tokens]).clamp(min=0)
        return float(explained.sum()) / 2 / len(rows)

    def _release_of(self, info: ObservationInfo) -> "Release | None":
        """Return what the defense makes of states, learned when it is first asked; None where it cannot be learned."""
        if self._learned is None:
            self._learned = (Release.learned(self._model, info),)
        return self._learned[0]

    def convinces(self, result: AttackResult, observation: Observation) -> bool:
        """Return whether an answer is surely much of the prompt: half of it verified, or a text that explains the rows.

        A text is nearly as likely as one of the attacker's own, and far likelier than random tokens.
        """
        if not self._replaced and 2 * verified(result) >= len(result.ids):
            return True
        evidence = self._evidence(result, observation)
        if evidence is not None and evidence < EXPLAINS:
            return False
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
