"""Recover a prompt of which a defense replaced tokens: read the tokens that ran, then decode what they stood for."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hiddenlab.attacks.vocab_match import VocabMatch
from hiddenlab.base import Attack
from hiddenlab.channels import Channel
from hiddenlab.errors import InputError, NotApplicableError
from hiddenlab.matching.ranking import LazyModel
from hiddenlab.models import Prefix, Request, TruncatedModel
from hiddenlab.stages import Replacement, Vocabulary, are_replaced
from hiddenlab.types import AttackResult, Observation, ObservationInfo, TokenPrediction


@dataclass(frozen=True)
class _Hypothesis:
    """A beginning of the prompt.

    Attributes:
        score: its log-probability with that of what it was replaced by. following: log-probabilities of the next token,
            None before the first. surprises: of each token, minus the log-probability of its substitute.
    """

    score: float
    tokens: tuple[int, ...]
    surprises: tuple[float, ...]
    prefix: Prefix
    following: Float[Tensor, " v"] | None


class ReplacedTokens(Attack):
    """Recover the likeliest prompt behind tokens that were replaced before the model ran.

    Vocabulary matching reads the tokens that ran. What they stood for is decoded by a beam search: the language model
    says how likely a prompt is, and the mechanism, which is public, how likely it is replaced by what was read. Nothing
    is verified, since a row says nothing of the token that its own replaced.

    Knows: the weights, the released states, the mechanism. Does not know: the prompt's tokens, what was drawn.

    Args:
        beam: hypotheses kept. width: candidates at each position: so many that may have been replaced by the token
            that was read, and as many that the language model expects behind each hypothesis.
        budget: candidates for one position of the matching at most.
    """

    use_when = "a defense replaced tokens before the model ran (santext, custext, rantext)"

    def __init__(self, beam: int = 8, width: int = 64, budget: int = 256) -> None:
        if min(beam, width) < 1:
            raise InputError(f"beam and width must be at least 1, not {beam} and {width}")
        self.beam, self.width = beam, width
        self.matching = VocabMatch(setup="quick", budget=budget)
        self._lm: tuple[TruncatedModel, LazyModel] | None = None
        self._kept: tuple[tuple[tuple[str, ...], TruncatedModel], Replacement, Vocabulary] | None = None

    def reset(self) -> None:
        """Forget what the matching learned from earlier prompts."""
        self.matching.reset()

    def _fit(self, info: ObservationInfo) -> dict[str, float | str]:
        """Prepare the matching.

        Raises:
            NotApplicableError: no token was replaced, or nothing is known of what was put in its place.
        """
        stage, vocabulary = self._mechanism(info)
        stage.origins(int(vocabulary.ordinary()[0]), 1, vocabulary)
        self.matching.progress, self.matching.learns = self.progress, self.learns
        return dict(self.matching.fit(info, self.model, self.seed).measured)

    def _mechanism(self, info: ObservationInfo) -> tuple[Replacement, Vocabulary]:
        if not are_replaced(info):
            raise NotApplicableError("no token was replaced; vocab-match reads these rows")
        if self._kept is None or self._kept[0] != (info.channel, self.model):
            channel = Channel.parse(list(info.channel))
            stages = [stage for stage in channel.defenses if isinstance(stage, Replacement)]
            if not stages:
                raise NotApplicableError("tokens were replaced, and no stage of the channel says how")
            self._kept = (info.channel, self.model), stages[0], channel.vocabulary(self.model)
        return self._kept[1:]

    def _recover_batch(self, observations: Sequence[Observation]) -> list[AttackResult]:
        results = []
        for observation, read in zip(observations, self.matching.recover_batch(observations), strict=True):
            started = time.perf_counter()
            stage, vocabulary = self._mechanism(observation.info)
            with torch.inference_mode():
                best, evaluated, calls = self._decode(read.ids, stage, vocabulary)
            tokens = tuple(
                TokenPrediction(token, old.row, surprise, None, old.evaluated, False)
                for token, surprise, old in zip(best.tokens, best.surprises, read.tokens, strict=True)
            )
            results.append(
                AttackResult(
                    tokens, read.evaluated_tokens + evaluated, read.forward_calls + calls,
                    read.seconds + time.perf_counter() - started, read.stop_reason, read.epsilon, read.positions,
                )
            )  # fmt: skip
        return results

    def _decode(
        self, shown: Sequence[int], stage: Replacement, vocabulary: Vocabulary
    ) -> tuple[_Hypothesis, int, int]:
        """Return the likeliest prompt behind the tokens that were read, and the positions and passes it took."""
        if self._lm is None or self._lm[0] is not self.model:
            self._lm = self.model, LazyModel(self.model)
        opened = self._lm[1].opened
        most = min(self.width, len(vocabulary.table))
        beam, evaluated = [_Hypothesis(0.0, (), (), opened, None)], 0
        for number, token in enumerate(shown):
            likely = stage.origins(token, self.width, vocabulary)
            expected = [h.following.topk(most).indices.cpu() for h in beam if h.following is not None]
            candidates = torch.cat([likely, *expected]).unique()
            replaced = stage.likelihood(token, candidates, vocabulary).cpu()
            beam = list(self._extended(beam, candidates, replaced))
            evaluated += len(beam)
            self.progress("decoding what tokens stood for", number + 1, len(shown))
        return beam[0], evaluated, len(shown)

    def _extended(
        self, beam: Sequence[_Hypothesis], candidates: Int[Tensor, " c"], replaced: Float[Tensor, " c"]
    ) -> Iterator[_Hypothesis]:
        """Yield the best hypotheses with one token more, the best first."""
        scores = torch.stack(
            [
                replaced + h.score + (0.0 if h.following is None else h.following.cpu()[candidates])
                for h in beam
            ]
        )
        finite = int(scores.isfinite().sum())
        best = scores.flatten().topk(min(self.beam, max(1, finite))).indices
        chosen = [(beam[int(i) // len(candidates)], int(i) % len(candidates)) for i in best]
        prefixes = [parent.prefix.fork() for parent, _ in chosen]
        model = prefixes[0].model
        requests = [
            Request(prefix, candidates[place : place + 1].to(model.device))
            for prefix, (_, place) in zip(prefixes, chosen, strict=True)
        ]
        for prefix, answer, (parent, place), i in zip(
            prefixes, model.run_all(requests), chosen, best, strict=True
        ):
            prefix.keep(answer, tokens=1)
            yield _Hypothesis(
                float(scores.flatten()[i]),
                (*parent.tokens, int(candidates[place])),
                (*parent.surprises, -float(replaced[place])),
                prefix,
                answer.states[-1].float().log_softmax(-1),
            )

    def __repr__(self) -> str:
        return (
            f"ReplacedTokens(beam {self.beam}; knows the weights, the released states and the mechanism that replaced "
            "tokens, not what it drew)"
        )
