"""Read a prompt from attention sums behind noise of the client, by a beam over tokens.

No value vector is known exactly then, so that nothing can be subtracted and no token is verified. Three tests remain,
each with a likelihood that was learned on own text (``noise_model``): a value vector lies near the span of the sums,
the weights of its key lie near their columns, which tells a token's place, and the tokens of a whole cluster span what
the sums span, which tells a token that stands twice. A language model says what is likely. No paper describes this.
"""

import math
from dataclasses import dataclass, field
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hiddenlab.attacks.partial_sums.clusters import Cluster, clusters_of
from hiddenlab.attacks.partial_sums.first import Found
from hiddenlab.attacks.partial_sums.noise_model import Evidence, NoiseModel, Tempered, Test
from hiddenlab.attacks.partial_sums.sums import View
from hiddenlab.matching.inner_layer import InnerLayer
from hiddenlab.matching.ranking import Continuations, LazyModel
from hiddenlab.models import Prefix, Request
from hiddenlab.types import Progress

BEAM = 8  # hypotheses
BEHIND = 15.0  # nats by which one may lie behind the best
SHORT = 160  # candidates that are run behind each


@dataclass
class _Hypothesis:
    """The first tokens of a prompt.

    Attributes:
        score: nats. prefix: of the model up to the nodes' first layer. speaker: of the language model. said: its
            log-probabilities of the next token, as far as they are trusted. values: expected ones of each token.
    """

    prefix: Prefix
    speaker: Prefix
    said: Float[Tensor, " v"] | None
    tokens: list[int] = field(default_factory=list)
    score: float = 0.0
    values: list[Float[Tensor, " w"]] = field(default_factory=list)


class NoisyReader:
    """Reads views of one layer behind noise.

    Args:
        layer: the nodes' first one. speaker: the language model. sigma: of the noise at the client's embeddings.
        short: tokens that are run behind each hypothesis at most; None is 160. seed: of own text and noise.
        progress: called with each position.
    """

    def __init__(
        self,
        layer: InnerLayer,
        speaker: LazyModel,
        sigma: float,
        short: int | None,
        seed: int,
        progress: Progress,
    ) -> None:
        self.layer, self.speaker, self.progress = layer, speaker, progress
        self.short = SHORT if short is None else short
        self.noise = NoiseModel(layer, sigma, seed, progress)

    @cached_property
    def trust(self) -> float:
        """By how much the language model's log-probabilities count: as much as names tokens of own text best."""
        model, right, wrong = self.speaker.model, [], []
        for text in self.noise.texts():
            tokens = text.to(model.device)
            prefix = self.speaker.opened.fork()
            said = (
                model.run([Request(prefix, tokens)], keep=False)[0].states[:-1].float().log_softmax(-1).cpu()
            )
            for row, token in zip(said, text[1:].tolist(), strict=True):
                right.append(row[token : token + 1])
                wrong.append(torch.cat([row[:token], row[token + 1 :]]))
        return Tempered.of(right, wrong).power

    def read(self, view: View) -> Found:
        """Read the tokens up to the node's last row, or up to the first that too few rows show; none is verified."""
        q, *rows = (part.cpu() for part in self.layer.of_rows(view.own, view.row_of))
        clusters = clusters_of(view, self.layer, self.layer.by_head(q))
        evidence = self.noise.evidence(view.positions, view.shards)
        first = Continuations(self.speaker, self.layer.model.special_ids).after([], [()])
        start = None if first is None else self.trust * first[0].cpu()
        beam = [_Hypothesis(self.layer.model.prefix(), self.speaker.opened.fork(), start)]
        found, last = Found({}, {}, {}), view.positions[-1]
        prior = torch.zeros(self.layer.model.vocab_size)
        for position in range(last + 1):
            self.progress("tokens", position, last + 1)
            cluster = clusters.get(position)
            if position in view.row_of:
                key, value = (part[view.row_of[position]] for part in rows)
                test = self.noise.own_test(key, value)
            elif cluster is not None and cluster.readable:
                test = self.noise.cluster_test(cluster, position)
            else:
                found.stopped = f"too few rows show the token at position {position}"
                break
            if cluster is None or position < 2 or position == cluster.new[0]:
                prior = _nats(evidence, self.noise.tabulated(test, position))
            step = _Step(self, test, evidence, prior)
            beam, found.tried[position] = step.grown(beam)
            if cluster is not None and position == cluster.new[-1]:
                self._complete(beam, cluster, evidence)
        for place, token in enumerate(beam[0].tokens):
            found.tokens[place], found.left[place], found.verified[place] = token, math.nan, False
        return found

    def _complete(
        self, beam: list[_Hypothesis], cluster: Cluster, evidence: dict[str, Evidence | Tempered]
    ) -> None:
        """Weigh what all tokens of a cluster together leave of the sums, and put the best hypothesis first."""
        for one in beam:
            left = cluster.missing(torch.stack([one.values[p] for p in cluster.new]))
            one.score += float(evidence["whole"].nats(torch.tensor([left]))[0])
        beam.sort(key=lambda one: -one.score)


def _nats(evidence: dict[str, Evidence | Tempered], logs: dict[str, Tensor]) -> Float[Tensor, " c"]:
    return torch.stack([evidence[name].nats(each).float() for name, each in logs.items()]).sum(0)


@dataclass(frozen=True)
class _Step:
    """One position that is read.

    Attributes:
        test: of candidates. prior: nats of the whole vocabulary by a table.
    """

    reader: NoisyReader
    test: Test
    evidence: dict[str, Evidence | Tempered]
    prior: Float[Tensor, " v"]

    def grown(self, beam: list[_Hypothesis]) -> tuple[list[_Hypothesis], int]:
        """Return the best hypotheses with one token more, and how many candidates were run."""
        short = [self._shortlist(one) for one in beam]
        every = self.reader.noise.run([one.prefix for one in beam], short)
        grown: list[tuple[float, int, int, Tensor]] = []
        for i, (one, tokens, candidates) in enumerate(zip(beam, short, every, strict=True)):
            said = torch.zeros(len(tokens)) if one.said is None else one.said[tokens]
            total = one.score + said + _nats(self.evidence, self.test(candidates, True))
            grown += zip(total.tolist(), [i] * len(tokens), tokens.tolist(), candidates.v, strict=True)
        grown = sorted(grown, key=lambda one: -one[0])[:BEAM]
        kept = [one for one in grown if one[0] > grown[0][0] - BEHIND]
        return self._followed(beam, kept), sum(map(len, short))

    def _shortlist(self, one: _Hypothesis) -> Int[Tensor, " c"]:
        scores = self.prior if one.said is None else self.prior + one.said
        return scores.topk(min(self.reader.short, len(scores))).indices

    def _followed(
        self, beam: list[_Hypothesis], grown: list[tuple[float, int, int, Tensor]]
    ) -> list[_Hypothesis]:
        """Run the chosen tokens behind their hypotheses, in both models."""
        model, speaker = self.reader.layer.model, self.reader.speaker.model
        new = []
        for score, i, token, value in grown:
            old = beam[i]
            tokens, values = [*old.tokens, token], [*old.values, value]
            new.append(_Hypothesis(old.prefix.fork(), old.speaker.fork(), None, tokens, score, values))
        steps = [torch.tensor(one.tokens[-1:]) for one in new]
        ours = model.run_all(
            [Request(one.prefix, step.to(model.device)) for one, step in zip(new, steps, strict=True)]
        )
        said = speaker.run_all(
            [Request(one.speaker, step.to(speaker.device)) for one, step in zip(new, steps, strict=True)]
        )
        for one, own, other in zip(new, ours, said, strict=True):
            one.prefix.keep(own, tokens=1)
            one.speaker.keep(other, tokens=1)
            one.said = self.reader.trust * other.states[-1].float().log_softmax(-1).cpu()
        return new
