"""Recover a prompt of which a defense replaced tokens: read the tokens that ran, then decode what they stood for."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
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
from hiddenlab.scoring import places_of
from hiddenlab.stages import Replacement, Vocabulary, are_replaced
from hiddenlab.types import (
    AttackResult,
    GroundTruth,
    KnownText,
    Observation,
    ObservationInfo,
    TokenPrediction,
)

MOST_CONTRARY = 0.1  # share of pairs that may contradict others: a token that was verified by chance


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


class Codebook:
    """What is known of a secret bijection of the vocabulary: which token each of some shown ones stands for.

    Args:
        origins: by the shown token.
    """

    def __init__(self, origins: Mapping[int, int]) -> None:
        self._origins = dict(origins)

    def origins(self, shown: int, count: int, vocabulary: Vocabulary) -> Int[Tensor, " c"]:
        """Return the token that a shown one stands for; else free ones of low ids, which often are frequent ones."""
        if (known := self._known(shown, vocabulary)) is not None:
            return torch.tensor([known])
        free = ~torch.isin(ordinary := vocabulary.ordinary(), torch.tensor(list(self._origins.values())))
        return ordinary[free][:count]

    def likelihood(
        self, shown: int, candidates: Int[Tensor, " c"], vocabulary: Vocabulary
    ) -> Float[Tensor, " c"]:
        """Return the log-probability that each candidate stands behind a shown token: all free ones are alike."""
        if (known := self._known(shown, vocabulary)) is not None:
            return torch.where(candidates == known, 0.0, -math.inf)
        ordinary = vocabulary.ordinary()
        taken = torch.tensor(list(self._origins.values()), dtype=torch.long)
        free = torch.isin(candidates, ordinary) & ~torch.isin(candidates, taken)
        return torch.where(free, -math.log(max(1, len(ordinary) - len(taken))), -math.inf)

    def behind(self, shown: Sequence[int], tokens: Sequence[int]) -> "Codebook":
        """Return what is known if shown tokens stand for these."""
        return Codebook(self._origins | dict(zip(shown, tokens, strict=True)))

    def _known(self, shown: int, vocabulary: Vocabulary) -> int | None:
        return shown if shown in vocabulary.special else self._origins.get(shown)


class ReplacedTokens(Attack):
    """Recover the likeliest prompt behind tokens that were replaced before the model ran.

    Vocabulary matching reads the tokens that ran. What they stood for is decoded by a beam search: the language model
    says how likely a prompt is, and the mechanism, which is public, how likely it is replaced by what was read. Nothing
    is verified, since a row says nothing of the token that its own replaced.

    A secret bijection of the vocabulary is read from texts of the same key: their tokens and the tokens that ran are
    its pairs. Other tokens are guessed by the language model, alike wherever the same token ran.

    Knows: the weights, the released states, the mechanism, texts of the same key where there are any. Does not know:
    the prompt's tokens, what was drawn.

    Args:
        beam: hypotheses kept. width: candidates at each position: so many that may have been replaced by the token
            that was read, and as many that the language model expects behind each hypothesis.
        budget: candidates for one position of the matching at most.
    """

    secret_maps = extra_rows = True  # the matching reads these rows
    use_when = "a defense replaced tokens before the model ran (santext, custext, rantext, a bijection of known texts)"

    def __init__(self, beam: int = 8, width: int = 64, budget: int = 256) -> None:
        if min(beam, width) < 1:
            raise InputError(f"beam and width must be at least 1, not {beam} and {width}")
        self.beam, self.width = beam, width
        self.matching = VocabMatch(setup="quick", budget=budget)
        self._lm: tuple[TruncatedModel, LazyModel] | None = None
        self._kept: tuple[tuple[tuple[str, ...], TruncatedModel], Replacement | None, Vocabulary] | None = (
            None
        )
        self._read: dict[tuple[int, ...], tuple[Tensor, list[tuple[int, int]]]] = {}

    def reset(self) -> None:
        """Forget what the matching learned from earlier prompts."""
        self.matching.reset()
        self._read.clear()

    def _fit(self, info: ObservationInfo) -> dict[str, float | str]:
        """Prepare the matching.

        Raises:
            NotApplicableError: no token was replaced.
        """
        self._mechanism(info)
        self._read.clear()
        self.matching.progress, self.matching.learns = self.progress, self.learns
        return dict(self.matching.fit(info, self.model, self.seed).measured)

    def _mechanism(self, info: ObservationInfo) -> tuple[Replacement | None, Vocabulary]:
        """Return the stage that replaces tokens, None where the attacker does not know it, and the model's tokens."""
        if not are_replaced(info):
            raise NotApplicableError("no token was replaced; vocab-match reads these rows")
        if self._kept is None or self._kept[0] != (info.channel, self.model):
            channel = Channel.parse(list(info.channel))
            stage = next((stage for stage in channel.defenses if isinstance(stage, Replacement)), None)
            self._kept = (info.channel, self.model), stage, channel.vocabulary(self.model)
        return self._kept[1:]

    def _recover_batch(self, observations: Sequence[Observation]) -> list[AttackResult]:
        results = []
        told = [self._told(observation) for observation in observations]
        for observation, stage, read in zip(
            observations, told, self.matching.recover_batch(observations), strict=True
        ):
            started = time.perf_counter()
            _, vocabulary = self._mechanism(observation.info)
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

    def _told(self, observation: Observation) -> Replacement | Codebook:
        """Return what is known of the tokens behind those that ran: the public mechanism, or pairs of known texts.

        Raises:
            NotApplicableError: without its key nothing is known of the mechanism, or no stage says it, and no text of
                the key shows it.
        """
        stage, vocabulary = self._mechanism(observation.info)
        try:
            if stage is None:
                raise NotApplicableError("tokens were replaced, and no stage of the channel says how")
            stage.origins(int(vocabulary.ordinary()[0]), 1, vocabulary)
            return stage
        except NotApplicableError:
            if not observation.known:
                raise
        return self._codebook(observation.known)

    def _codebook(self, texts: Sequence[KnownText]) -> Codebook:
        """Return what known texts show of a bijection.

        Raises:
            NotApplicableError: less than half of their tokens is read surely, or they are of several keys.
        """
        total = sum(len(text.tokens) for text in texts)
        found = [pair for text in texts for pair in self._pairs(text)]
        if 2 * len(found) < total:  # what is guessed instead says nothing of the defense
            raise NotApplicableError(
                f"of {total} tokens of known texts {len(found)} were read surely: too few"
            )
        origins, back, contrary = dict[int, int](), dict[int, int](), 0
        for shown, token in found:
            contrary += origins.setdefault(shown, token) != token or back.setdefault(token, shown) != shown
        if contrary > MOST_CONTRARY * len(found):
            raise NotApplicableError("known texts contradict each other: they passed under several keys")
        return Codebook(origins)

    def _pairs(self, text: KnownText) -> list[tuple[int, int]]:
        """Return each token that surely ran for a text that the attacker has, with the text's own one at its place.

        Prompts of one key share their known texts, which are read once.
        """
        kept = self._read.get(text.tokens)
        if kept is None or not torch.equal(kept[0], text.shown.states):
            read = self.matching.recover(text.shown)
            places = places_of(read, GroundTruth(text.tokens))
            pairs = [
                (token.token, text.tokens[place])
                for place, token in zip(places, read.tokens, strict=True)
                if token.verified and place < len(text.tokens)
            ]
            self._read[text.tokens] = kept = text.shown.states, pairs
        return kept[1]

    def _decode(
        self, shown: Sequence[int], stage: Replacement | Codebook, vocabulary: Vocabulary
    ) -> tuple[_Hypothesis, int, int]:
        """Return the likeliest prompt behind the tokens that were read, and the positions and passes it took."""
        if self._lm is None or self._lm[0] is not self.model:
            self._lm = self.model, LazyModel(self.model)
        opened = self._lm[1].opened
        most = min(self.width, len(vocabulary.table))
        beam, evaluated = [_Hypothesis(0.0, (), (), opened, None)], 0
        for number, token in enumerate(shown):
            # A token that ran before stands for the same one again, which each hypothesis says for itself.
            ways: list[Replacement | Codebook] = [
                stage.behind(shown[:number], h.tokens) if isinstance(stage, Codebook) else stage for h in beam
            ]
            likely = [way.origins(token, self.width, vocabulary).cpu() for way in dict.fromkeys(ways)]
            expected = [h.following.topk(most).indices.cpu() for h in beam if h.following is not None]
            candidates = torch.cat([*likely, *expected]).unique()
            replaced = {
                way: way.likelihood(token, candidates, vocabulary).cpu() for way in dict.fromkeys(ways)
            }
            beam = list(self._extended(beam, candidates, [replaced[way] for way in ways]))
            evaluated += len(beam)
            self.progress("decoding what tokens stood for", number + 1, len(shown))
        return beam[0], evaluated, len(shown)

    def _extended(
        self,
        beam: Sequence[_Hypothesis],
        candidates: Int[Tensor, " c"],
        replaced: Sequence[Float[Tensor, " c"]],
    ) -> Iterator[_Hypothesis]:
        """Yield the best hypotheses with one token more, the best first."""
        scores = torch.stack(
            [
                seen + h.score + (0.0 if h.following is None else h.following.cpu()[candidates])
                for h, seen in zip(beam, replaced, strict=True)
            ]
        )
        finite = int(scores.isfinite().sum())
        best = scores.flatten().topk(min(self.beam, max(1, finite))).indices
        chosen = [divmod(int(i), len(candidates)) for i in best]
        prefixes = [beam[parent].prefix.fork() for parent, _ in chosen]
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
                (*beam[parent].tokens, int(candidates[place])),
                (*beam[parent].surprises, -float(replaced[parent][place])),
                prefix,
                answer.states[-1].float().log_softmax(-1),
            )

    def __repr__(self) -> str:
        return (
            f"ReplacedTokens(beam {self.beam}; knows the weights, the released states, the mechanism that replaced "
            "tokens and texts of the same key, not what it drew)"
        )
