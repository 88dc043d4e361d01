"""Replace tokens before the model runs: by others with near embeddings, at random, or through a secret bijection."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from weakref import ReferenceType, ref

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hiddenlab.errors import InputError, NotApplicableError
from hiddenlab.stages import Stage, Vocabulary, with_replacement
from hiddenlab.types import ObservationInfo
from hiddenlab.utils.random import generator as generator_of
from hiddenlab.utils.random import key_of

REFERENCE = 2048  # tokens on which the attacker estimates a sum over the vocabulary
DRAWS = 8  # of what a mechanism draws beside the substitute, over which the attacker averages
NO_KEY = "without the key of a bijection every token is as likely to stand for every other"
SEEDS_AT_ONCE, SPARE = 128, 8  # groups begun together; times a group's size of neighbours looked up for each


class _Perturbation(Stage, ABC):
    """Draw a substitute for each token by itself, by the distance of their input embeddings."""

    @abstractmethod
    def substitutes(
        self, token: int, vocabulary: Vocabulary, scale: float
    ) -> tuple[Int[Tensor, " o"], Float[Tensor, " o"]]:
        """Return ids that may stand for a token, and the logarithms of their probabilities up to a constant."""

    def scales(self, vocabulary: Vocabulary, count: int, generator: torch.Generator) -> list[float]:
        """Draw what a mechanism draws for each of ``count`` tokens beside the substitute; by default nothing."""
        return [0.0] * count

    def replaced(
        self, tokens: Sequence[int], vocabulary: Vocabulary, generator: torch.Generator
    ) -> list[int]:
        drawn = []
        for token, scale in zip(tokens, self.scales(vocabulary, len(tokens), generator), strict=True):
            if token in vocabulary.special:
                drawn.append(token)
                continue
            places, weights = self.substitutes(token, vocabulary, scale)
            chances = weights.double().softmax(0).cpu()
            drawn.append(int(places[torch.multinomial(chances, 1, generator=generator)]))
        return drawn

    def publish(self, info: ObservationInfo) -> ObservationInfo:
        return with_replacement(info)

    def __repr__(self) -> str:
        return (
            f"{self.spec}: the attacker sees the states of substituted tokens, in order, and knows the model and the "
            "mechanism; only the provider knows the prompt's own tokens"
        )


class _OverVocabulary(_Perturbation, ABC):
    """Substitutes are drawn from the whole vocabulary, by their distance alone."""

    def __init__(self) -> None:
        self._sums: tuple[ReferenceType[Tensor], dict[int, Tensor]] | None = None

    @abstractmethod
    def log_weights(self, distances: Float[Tensor, "..."], scale: float) -> Float[Tensor, "..."]:
        """Return the logarithms of probabilities of substitutes at these distances, up to a constant."""

    def substitutes(
        self, token: int, vocabulary: Vocabulary, scale: float
    ) -> tuple[Int[Tensor, " o"], Float[Tensor, " o"]]:
        places = vocabulary.ordinary()
        return places, self.log_weights(vocabulary.distances(token, places), scale)

    def origins(self, shown: int, count: int, vocabulary: Vocabulary) -> Int[Tensor, " c"]:
        if shown in vocabulary.special:
            return torch.tensor([shown])
        distances = vocabulary.distances(shown)
        distances[shown] = -1.0
        distances[list(vocabulary.special)] = math.inf
        most = min(count, len(distances) - len(vocabulary.special))
        return distances.topk(most, largest=False).indices.cpu()

    def likelihood(
        self, shown: int, candidates: Int[Tensor, " c"], vocabulary: Vocabulary
    ) -> Float[Tensor, " c"]:
        """Return log-probabilities; sums over more than ``REFERENCE`` tokens are estimated on as many of them."""
        drawn = generator_of(0, "substitutes")
        scales = list(dict.fromkeys(self.scales(vocabulary, DRAWS, drawn)))
        places = vocabulary.ordinary()
        if len(places) > REFERENCE:
            places = places[torch.randperm(len(places), generator=drawn)[:REFERENCE]]
        if self._sums is None or self._sums[0]() is not vocabulary.table:
            self._sums = ref(vocabulary.table), {}
        sums = self._sums[1]
        if missing := sorted(set(candidates.tolist()) - set(sums)):
            found = self._log_sums(torch.tensor(missing), places, vocabulary, scales)
            sums |= dict(zip(missing, found, strict=True))
        near = vocabulary.distances(shown, candidates.cpu()).cpu()
        totals = torch.stack([sums[token] for token in candidates.tolist()], 1)
        logs = torch.stack([self.log_weights(near, scale) for scale in scales])
        # An estimate that missed the shown token must not make it likelier than certain.
        own = torch.stack([self.log_weights(torch.zeros(()), scale) for scale in scales])[:, None]
        least = torch.where(candidates.cpu() == shown, own, torch.logaddexp(own, logs))
        found = (logs - torch.maximum(totals, least)).logsumexp(0) - math.log(len(scales))
        special = [
            (token in vocabulary.special) or (shown in vocabulary.special) for token in candidates.tolist()
        ]
        kept = torch.where(candidates.cpu() == shown, 0.0, -math.inf)
        return torch.where(torch.tensor(special), kept, found)

    def _log_sums(
        self,
        tokens: Int[Tensor, " c"],
        places: Int[Tensor, " o"],
        vocabulary: Vocabulary,
        scales: Sequence[float],
    ) -> Float[Tensor, "c s"]:
        """Return the logarithm of the sum of each token's weights at each scale.

        The token itself counts as it is; the others, ``places``, stand for all there are.
        """
        table, squares = vocabulary.table.detach(), vocabulary.squares
        rows, others = tokens.to(table.device), places.to(table.device)
        products = (table[rows] @ table[others].T).float()
        distances = (squares[rows, None] + squares[others] - 2 * products).clamp(min=0).sqrt().cpu()
        own = tokens[:, None] == places
        counted = (len(places) - own.sum(1, keepdim=True)).clamp(min=1)
        total = len(table) - len(vocabulary.special) - 1
        more = (total / counted).clamp(min=1.0).log()
        sums = []
        for scale in scales:
            weights = self.log_weights(distances, scale).masked_fill(own, -math.inf) + more
            itself = self.log_weights(torch.zeros(len(tokens), 1), scale)
            sums.append(torch.cat([itself, weights], 1).logsumexp(1))
        return torch.stack(sums, 1)


class SanText(_OverVocabulary):
    """Replace each token by one that the exponential mechanism draws from the whole vocabulary (SanText, 2106.01221).

    A substitute at the distance d of the token's input embedding has a probability proportional to exp(−ε·d/2).

    Args:
        epsilon: privacy parameter ε of metric local differential privacy, in the inverse units of the distance.

    Raises:
        InputError: epsilon is not a positive finite number.
    """

    def __init__(self, epsilon: float) -> None:
        super().__init__()
        self.epsilon = _positive("santext", epsilon)
        self.spec = f"santext:epsilon={self.epsilon!r}"

    def log_weights(self, distances: Float[Tensor, "..."], scale: float) -> Float[Tensor, "..."]:
        return -self.epsilon * distances / 2


class RanText(_OverVocabulary):
    """Replace each token by a nearer one than noise is long, by the exponential mechanism (InferDPT, 2310.12214).

    Laplace noise is drawn for the token's embedding; the tokens that are nearer than the noise is long are its random
    adjacency list, in which a substitute at distance d has a probability proportional to exp(ε/2 · (1 − d / length)).
    The noise's scale is that of the published code.

    Args:
        epsilon: privacy parameter ε.

    Raises:
        InputError: epsilon is not a positive finite number.
    """

    def __init__(self, epsilon: float) -> None:
        super().__init__()
        self.epsilon = _positive("rantext", epsilon)
        self.spec = f"rantext:epsilon={self.epsilon!r}"

    def scales(self, vocabulary: Vocabulary, count: int, generator: torch.Generator) -> list[float]:
        """Draw the lengths of the noise."""
        table = vocabulary.table.detach()
        spread = (table.amax(0) - table.amin(0)).float().cpu()
        # Laplace noise is exponential noise of a random sign, and a length has no sign.
        drawn = torch.empty(count, len(spread)).exponential_(generator=generator)
        return (drawn * spread / _strength(self.epsilon)).norm(dim=1).tolist()

    def log_weights(self, distances: Float[Tensor, "..."], scale: float) -> Float[Tensor, "..."]:
        return (self.epsilon / 2 * (1 - distances / scale)).masked_fill(distances >= scale, -math.inf)


class CusText(_Perturbation):
    """Replace each token by one of the k tokens of its group, by the exponential mechanism (CusText, 2207.01193).

    Groups hold a token and its k − 1 nearest ones that have no group yet; so all of a group have the same substitutes.
    Their scores are distances scaled to between 0 and 1.

    Args:
        epsilon: privacy parameter ε of differential privacy of a token within its group. k: tokens of a group.

    Raises:
        InputError: epsilon is not a positive finite number, or k is below 2.
    """

    def __init__(self, epsilon: float, k: int = 20) -> None:
        self.epsilon = _positive("custext", epsilon)
        if k < 2:
            raise InputError(f"custext needs groups of at least 2 tokens, not {k}")
        self.k = k
        self.spec = f"custext:epsilon={self.epsilon!r},k={k}"

    def substitutes(
        self, token: int, vocabulary: Vocabulary, scale: float
    ) -> tuple[Int[Tensor, " o"], Float[Tensor, " o"]]:
        groups = _groups(vocabulary, self.k)
        places = (groups == groups[token]).nonzero()[:, 0]
        distances = vocabulary.distances(token, places)
        scores = distances / distances.max().clamp(min=torch.finfo(torch.float32).tiny)
        return places, -self.epsilon * scores / 2

    def origins(self, shown: int, count: int, vocabulary: Vocabulary) -> Int[Tensor, " c"]:
        if shown in vocabulary.special:
            return torch.tensor([shown])
        places, _ = self.substitutes(shown, vocabulary, 0.0)
        nearest = vocabulary.distances(shown, places).cpu().argsort(stable=True)
        return places[nearest][:count]

    def likelihood(
        self, shown: int, candidates: Int[Tensor, " c"], vocabulary: Vocabulary
    ) -> Float[Tensor, " c"]:
        groups = _groups(vocabulary, self.k)
        found = torch.full((len(candidates),), -math.inf)
        for i, token in enumerate(candidates.tolist()):
            if token in vocabulary.special or groups[token] != groups[shown]:
                found[i] = 0.0 if token == shown else -math.inf
                continue
            places, weights = self.substitutes(token, vocabulary, 0.0)
            found[i] = weights.log_softmax(0).cpu()[places == shown].squeeze()
        return found


class VocabularyBijection(Stage):
    """Replace each token by another through a secret permutation of the vocabulary.

    The provider's model is the public one. In schemes that adapt it to the permuted language (AlienLM, 2601.22710) it
    would answer sensibly; here it does not, and what rows show is the same: which permuted token stands where.

    Args:
        key: of a permutation that serves all prompts; None draws one that lives as long as the key of the release.
    """

    name = "vocab-bijection"

    def __init__(self, key: int | None = None) -> None:
        self.key = key
        self.spec = self.name if key is None else f"{self.name}:key={key}"

    def replaced(
        self, tokens: Sequence[int], vocabulary: Vocabulary, generator: torch.Generator
    ) -> list[int]:
        ordinary = vocabulary.ordinary()
        what = "vocabulary bijection"
        drawn = key_of(generator, what) if self.key is None else generator_of(self.key, what)
        coded = torch.arange(len(vocabulary.table))
        coded[ordinary] = ordinary[torch.randperm(len(ordinary), generator=drawn)]
        return [int(coded[token]) for token in tokens]

    def origins(self, shown: int, count: int, vocabulary: Vocabulary) -> Int[Tensor, " c"]:
        raise NotApplicableError(NO_KEY)

    def likelihood(
        self, shown: int, candidates: Int[Tensor, " c"], vocabulary: Vocabulary
    ) -> Float[Tensor, " c"]:
        raise NotApplicableError(NO_KEY)

    def publish(self, info: ObservationInfo) -> ObservationInfo:
        """Publish that tokens are replaced, and not the key."""
        hidden = tuple(self.name if spec == self.spec else spec for spec in info.channel)
        return with_replacement(replace(info, channel=hidden))

    def __repr__(self) -> str:
        scope = "one for each prompt" if self.key is None else "one for all prompts"
        return (
            f"{self.spec}: the attacker sees the states of permuted tokens, in order, and knows the model; only the "
            f"provider knows the permutation ({scope})"
        )


def _positive(name: str, epsilon: float) -> float:
    if not (math.isfinite(epsilon) and epsilon > 0):
        raise InputError(f"{name} needs epsilon > 0, not {epsilon}; for no replacement leave the defense out")
    return float(epsilon)


def _strength(epsilon: float) -> float:
    """Return by what RANTEXT divides the range of a coordinate for the scale of its noise.

    The numbers are those of the published code, where they belong to embeddings of another model.
    """
    if epsilon < 2:
        return epsilon
    return 0.01658160142016071 * math.log(19.064721649556482 * epsilon - 38.1294334077209) + 9.311083811697406


_KEPT: tuple[ReferenceType[Tensor], int, frozenset[int], Tensor] | None = None


def _groups(vocabulary: Vocabulary, k: int) -> Int[Tensor, " v"]:
    """Return the group of each token, −1 for special ones; the result for the last table is kept.

    Groups are begun in the order of ids, in which byte-pair tokenizers list frequent tokens first.
    """
    global _KEPT
    if _KEPT is not None and _KEPT[0]() is vocabulary.table and _KEPT[1:3] == (k, vocabulary.special):
        return _KEPT[3]
    ordinary = vocabulary.ordinary()
    table = vocabulary.table.detach()[ordinary.to(vocabulary.table.device)].float()
    group = torch.full((len(ordinary),), -1, dtype=torch.long)
    count = 0
    while len(free := (group < 0).nonzero()[:, 0]):
        rows = table[free.to(table.device)]
        seeds = free[:SEEDS_AT_ONCE]
        near = (
            torch.cdist(rows[: len(seeds)], rows).topk(min(len(free), SPARE * k), largest=False).indices.cpu()
        )
        for seed, places in zip(seeds.tolist(), near, strict=True):
            if group[seed] >= 0:
                continue
            others = free[places]
            others = others[(group[others] < 0) & (others != seed)][: k - 1]
            if len(others) < k - 1 and len(free) > SPARE * k:
                break  # its neighbours were taken meanwhile: look again among those that are left
            group[torch.cat([torch.tensor([seed]), others])] = count
            count += 1
    every = torch.full((len(vocabulary.table),), -1, dtype=torch.long)
    every[ordinary] = group
    _KEPT = ref(vocabulary.table), k, vocabulary.special, every
    return every
