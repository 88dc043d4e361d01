"""Find a prompt that a defense hides where everybody can look: in low bits of rows, in their norms, in public facts.

A release may carry its prompt beside the states, by malice or by mistake: token ids in the last bits of coordinates, a
row's norm that grows with its id, a list of ids in the metadata. No distance between states shows that. This attack
lists the sequences of whole numbers below the vocabulary's size that such places hold, and runs those that look most
like text through the model: where the rows come out, the tokens are verified.
"""

import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hiddenlab.base import Attack
from hiddenlab.errors import InputError
from hiddenlab.models import Request, TruncatedModel
from hiddenlab.models.request import packs
from hiddenlab.proposals.corpus import Corpus, language_reference
from hiddenlab.secret_maps import is_mapped
from hiddenlab.types import AttackResult, Observation, ObservationInfo, TokenPrediction

TRIED = 8  # sequences of each kind of place that are run through the model, and of all that are read as texts
FEWEST = 4  # tokens of a sequence that nothing but a language model tells from chance
LONGEST = 2048  # tokens of a sequence
WINDOWS, WINDOW = (
    16,
    48,
)  # of the attacker's own text, from which the language model says how frequent tokens are
# Standard errors above random tokens: only sequences of such frequent tokens are read as a text.
FREQUENT = 3.0
# Nats a token above random tokens: a text that is so much likelier is one. Of few tokens more are asked.
CLEAR, CLEAR_OF_FEW = 2.0, 10.0
DISTINCT = 3  # a text of so many tokens has more than one that differs from the others
CHANCES = 4  # random texts that a text is compared with
# A token is verified where the direction of its state comes so near to the row's, and so much nearer than a random
# token's: some states, of first tokens above all, are nearly the same for every token.
SAME, NEARER = 1e-3, 0.05
TELLS = 0.25  # of a random token's distance: rows of which rounding leaves no more than that verify nothing
INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}  # by the bytes of a coordinate
WHOLE = 0.05  # how near a number comes to a whole one that was written there
LOW_BITS = 4  # how many of the lowest bits of coordinates are read one by one


Candidate = tuple[Tensor, str]  # ids, and where they stand


@dataclass(frozen=True)
class Sequences:
    """Sequences of token ids of one length, with the places where they stand.

    Attributes:
        ids: one row for each sequence. places: what a reader is told.
    """

    ids: Int[Tensor, "s n"]
    places: tuple[str, ...]


class Planted(Attack):
    """Look for the prompt's token ids in the low bits of rows, in their norms, and anywhere in the public facts.

    Sequences that are likelier than chance, by the tokens' frequency and then by the language model, are run through
    the model. Tokens whose states match the rows are verified. Where none match (noise), the text stays a guess of
    which the language model is far surer than of random tokens. Nothing is recovered where nothing is found.

    Knows: the weights, the rows, the public facts. Does not know: tokens, order, whether anything is hidden.

    Args:
        tried: sequences of each prompt that are run through the model.
    """

    any_width = True
    secret_maps = True
    use_when = "a release may carry its prompt beside the states: in low bits, norms or public facts"

    def __init__(self, tried: int = TRIED) -> None:
        if tried < 1:
            raise InputError(f"tried must be at least 1, not {tried}")
        self.tried = tried
        self._chances: dict[int, float] = {}

    def _forget(self) -> None:
        for name in ("_whole", "_frequency"):
            vars(self).pop(name, None)
        self._chances.clear()

    @cached_property
    def _whole(self) -> TruncatedModel:
        return self.model.sibling(stream="logits")

    @cached_property
    def _frequency(self) -> Float[Tensor, " v"]:
        """The log-probability of each token at any place of a text, by the language model."""
        corpus = Corpus(self.model, self.seed, language_reference)
        said = torch.zeros(self.model.vocab_size)
        for number in range(WINDOWS):
            self.progress("measuring how frequent tokens are", number, WINDOWS)
            states = self._whole.encode(corpus.text_window(WINDOW))
            said += states.float().softmax(-1).mean(0).cpu()[: len(said)]
        return (said / said.sum()).clamp(min=1e-12).log()

    @torch.inference_mode()
    def _recover(self, observation: Observation) -> AttackResult:
        started, before = time.perf_counter(), self.model.evaluated_tokens
        found: tuple[tuple[int, float], Int[Tensor, " n"], Bool[Tensor, " n"], str] | None = None
        for group in self._candidates(observation):
            flags = self._verified(observation, group)
            # Where one is sure, how far others are from chance does not matter.
            texts = [0.0] * len(group) if any(map(bool, map(Tensor.any, flags))) else self._texts(group)
            for (ids, place), verified, text in zip(group, flags, texts, strict=True):
                sure = int(verified.sum())
                if (sure or text > 0) and (found is None or (sure, text) > found[0]):
                    found = (sure, text), ids, verified, place
            if found is not None and found[0][0]:
                break
        spent, seconds = self.model.evaluated_tokens - before, time.perf_counter() - started
        if found is None:
            return AttackResult((), spent, 0, seconds, "nothing planted was found")
        _, ids, verified, place = found
        return AttackResult(
            _predictions(observation, ids, verified), spent, 0, seconds, f"found in {place}",
            positions=observation.info.positions if len(ids) == len(observation.states) else None,
        )  # fmt: skip

    # ---- where ids may stand

    def _candidates(self, observation: Observation) -> Iterator[list[Candidate]]:
        """Yield the sequences that look most like text: those of the public facts, then those of the rows."""
        self.progress("looking at public facts, bits and norms", 0, 0)
        v, rows = self.model.vocab_size, observation.states.detach().cpu()
        yield [
            (torch.tensor(ids), place)
            for ids, place in in_facts(observation.info, v)
            if len(ids) <= LONGEST and not _counts(ids)
        ]
        groups = (*in_low_bits(rows, v), *in_norms(rows, v))
        yield [candidate for group in groups for candidate in self._likeliest(group)]

    def _likeliest(self, group: Sequences) -> Iterator[Candidate]:
        """Yield the sequences of a kind of place whose tokens are the most frequent."""
        kept = [i for i, ids in enumerate(group.ids.tolist()) if not _counts(ids)]
        if len(kept) > self.tried:
            scores = self._frequency[group.ids[kept]].mean(1)
            kept = [kept[i] for i in scores.topk(self.tried).indices.tolist()]
        for i in kept:
            yield group.ids[i], group.places[i]

    # ---- whether they are the prompt

    def _verified(self, observation: Observation, group: Sequence[Candidate]) -> list[Bool[Tensor, " n"]]:
        """Return which tokens give the rows that were released, where these are states in order, up to their norm.

        Fewer than half of the rows verify none: the tokens are others then, and a few states are alike.
        """
        info, rows = observation.info, observation.states.float().cpu()
        flags = [torch.zeros(len(ids), dtype=torch.bool) for ids, _ in group]
        shown = torch.arange(len(rows)) if info.positions is None else torch.tensor(info.positions)
        fits = [
            i
            for i, (ids, _) in enumerate(group)
            if (len(ids) == len(rows) if info.positions is None else len(ids) > int(shown[-1]))
        ]
        if not fits or info.rows_permuted or is_mapped(info) or rows.shape[1] != self.model.width:
            return flags

        def direction(states: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
            # A norm that carries the id is no state's any more; the direction still is.
            states = states.float().cpu()
            states = states if info.columns_permuted is None else states.sort(1).values
            return states / states.norm(dim=1, keepdim=True)

        seen = direction(rows)
        control = direction(self.model.encode(self._random(int(shown[-1]) + 1, 0))[shown])
        apart = (control - seen).norm(dim=1)
        limit = (NEARER * apart).clamp(max=SAME)
        limit = limit.clamp(min=8 * torch.finfo(observation.states.dtype).eps)
        tells = limit <= TELLS * apart
        texts = [(i, group[i][0]) for i in fits]
        for pack in packs(texts, lambda one: len(one[1]), self.model.max_pass_tokens):
            answers = self.model.run([Request(self.model.prefix(), ids) for _, ids in pack], keep=False)
            for (i, _), answer in zip(pack, answers, strict=True):
                same = tells & ((direction(answer.states[shown]) - seen).norm(dim=1) <= limit)
                if 2 * int(same.sum()) >= len(rows):
                    flags[i][shown] = same
        return flags

    def _texts(self, group: Sequence[Candidate]) -> list[float]:
        """Return by how many nats a token each sequence is more than clearly likelier than chance; above 0: a text.

        The language model reads only sequences whose tokens are frequent by themselves, the most frequent ones, all of
        them together.
        """
        mean, deviation = self._frequency.mean(), self._frequency.std()
        errors = {
            i: float((self._frequency[ids].mean() - mean) / deviation) * math.sqrt(len(ids))
            for i, (ids, _) in enumerate(group)
            if len(ids) >= FEWEST
        }
        frequent = sorted((i for i in errors if errors[i] >= FREQUENT), key=lambda i: -errors[i])
        chosen = frequent[: self.tried]
        texts = [-math.inf] * len(group)
        for i, read in zip(chosen, self._log_probabilities([group[i][0] for i in chosen]), strict=True):
            length = len(group[i][0])
            texts[i] = read - self._by_chance(length) - CLEAR - CLEAR_OF_FEW / math.sqrt(length)
        return texts

    def _by_chance(self, length: int) -> float:
        """Return the mean log-probability of random tokens."""
        if length not in self._chances:
            drawn = self._log_probabilities([self._random(length, number) for number in range(CHANCES)])
            self._chances[length] = sum(drawn) / CHANCES
        return self._chances[length]

    def _random(self, length: int, number: int) -> Int[Tensor, " n"]:
        drawn = torch.Generator().manual_seed(self.seed + 7919 * (number + 1))
        return torch.randint(self.model.vocab_size, (length,), generator=drawn)

    def _log_probabilities(self, sequences: Sequence[Int[Tensor, " n"]]) -> list[float]:
        """Return the mean log-probability of the tokens of each sequence behind its first."""
        means, whole = list[float](), self._whole
        for pack in packs(list(sequences), len, whole.max_pass_tokens):
            answers = whole.run([Request(whole.prefix(), ids) for ids in pack], keep=False)
            for ids, answer in zip(pack, answers, strict=True):
                said = answer.states[:-1].float().log_softmax(-1).cpu()
                means.append(float(said.gather(1, ids[1:, None]).mean()))
        return means

    def __repr__(self) -> str:
        return "Planted: knows the weights, rows and public facts; not tokens, nor whether anything is hidden"


def _predictions(
    observation: Observation, ids: Int[Tensor, " n"], verified: Bool[Tensor, " n"]
) -> tuple[TokenPrediction, ...]:
    """Return tokens with their rows, -1 for those that no row shows."""
    positions, count = observation.info.positions, len(observation.states)
    places = range(count) if positions is None or len(ids) == count else positions
    rows = {place: row for row, place in enumerate(places)}
    return tuple(
        TokenPrediction(token, rows.get(place, -1), 0.0, None, 1, sure)
        for place, (token, sure) in enumerate(zip(ids.tolist(), verified.tolist(), strict=True))
    )


def in_facts(info: ObservationInfo, vocabulary: int) -> Iterator[tuple[list[int], str]]:
    """Yield each list of token ids that the public facts hold: in lists, in dictionaries' values, in texts."""
    for name, value in info.facts.items():
        for ids, place in _lists(value, f"the public fact {name!r}"):
            if len(ids) > 0 and all(0 <= one < vocabulary for one in ids):
                yield ids, place


def _lists(value: Any, place: str) -> Iterator[tuple[list[int], str]]:
    """Yield lists of whole numbers of a JSON value, the outermost ones that hold nothing else."""
    if isinstance(value, str):
        numbers = [int(found) for found in re.findall(r"\d{1,9}", value)]
        if len(numbers) >= FEWEST:
            yield numbers, place
        return
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list | tuple):
        return
    flat = list(_flat(value))
    if flat and all(_is_whole(one) for one in flat):
        yield [int(one) for one in flat], place
        return
    for item in value:
        yield from _lists(item, place)


def _flat(value: Sequence[Any]) -> Iterator[Any]:
    for item in value:
        if isinstance(item, list | tuple):
            yield from _flat(item)
        else:
            yield item


def _is_whole(value: Any) -> bool:
    return (
        not isinstance(value, bool)
        and isinstance(value, int | float)
        and math.isfinite(value)
        and value == int(value)
    )


def in_low_bits(rows: Float[Tensor, "n d"], vocabulary: int) -> Iterator[Sequences]:
    """Yield sequences in the last bits of coordinates: a whole id in one of them, or one bit in each of several."""
    size = rows.dtype.itemsize
    if size not in INTEGERS:
        return
    raw = rows.contiguous().view(INTEGERS[size]).long()
    needed = (vocabulary - 1).bit_length()
    widths = sorted({needed, max(needed, 16)})
    for width in widths if size >= 4 else ():
        yield _below((raw & ((1 << width) - 1)).T, vocabulary, f"the last {width} bits of coordinate {{}}")
    for low in range(LOW_BITS):
        bits = (raw >> low) & 1
        for width in (width for width in widths if width <= rows.shape[1]):
            windows, powers = bits.unfold(1, width, 1), 1 << torch.arange(width)
            told = f"bit {low} of {width} coordinates from {{}} on"
            yield _below((windows * powers).sum(2).T, vocabulary, told)
            yield _below((windows * powers.flip(0)).sum(2).T, vocabulary, f"{told}, the highest first")


def in_norms(rows: Float[Tensor, "n d"], vocabulary: int) -> Iterator[Sequences]:
    """Yield sequences that the rows' norms, or sums, are multiples of, in any unit; and these less one."""
    rows = rows.double()
    measures: dict[str, Callable[[Tensor], Tensor]] = {
        "the norm of each row": lambda x: x.norm(dim=1),
        "the L1 norm of each row": lambda x: x.abs().sum(1),
        "the largest coordinate of each row": lambda x: x.abs().amax(1),
        "the sum of each row": lambda x: x.sum(1),
    }
    for name, measure in measures.items():
        values = measure(rows)
        largest = values.max()
        if len(values) < FEWEST or not bool((values >= 0).all()) or not largest > 0:
            continue
        # The largest value is k units, for some k: for which k are all others whole?
        for shift in (0, 1):
            multiples = torch.arange(1, vocabulary + shift, dtype=torch.float64)
            shown = values[None] / largest * multiples[:, None]
            whole = ((shown - shown.round()).abs() <= WHOLE).all(1)
            ids = shown[whole].round().long() - shift
            yield _below(ids, vocabulary, name if shift == 0 else f"{name}, less one")


def _below(ids: Int[Tensor, "s n"], vocabulary: int, place: str) -> Sequences:
    """Return the sequences whose numbers are all ids of the vocabulary.

    Args:
        place: where they stand, with ``{}`` for the number of a sequence.
    """
    kept = ((ids >= 0) & (ids < vocabulary)).all(1).nonzero()[:, 0].tolist()
    return Sequences(ids[kept], tuple(place.format(number) for number in kept))


def _counts(ids: Sequence[int]) -> bool:
    """Return whether numbers only count, or are nearly all the same: positions, sizes, masks. Text is neither."""
    steps = {b - a for a, b in pairwise(ids)}
    return len(ids) > 1 and (len(steps) == 1 or DISTINCT * len(set(ids)) < len(ids))
