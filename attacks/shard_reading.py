"""Read the prompt of a node that gets states of some positions alone, behind layers that it did not compute itself.

Behind the first layers no algebra gives tokens (``partial_sums`` needs the first one). What is left is what a state
still shows: its own token, traces of the tokens right before it, and at late layers which token the model expects next.
No paper describes this attack; it is written against Cascade with layers at the client
(``defenses/cascade/hardening.py``).
"""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import cycle, islice, pairwise

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hiddenlab.base import Attack
from hiddenlab.channels import Channel, as_whole, by_channel
from hiddenlab.errors import InputError, NotApplicableError
from hiddenlab.matching.ranking import LazyModel
from hiddenlab.models import Prefix, Request, TruncatedModel
from hiddenlab.observation import parts_of_attention
from hiddenlab.projections import projection_of
from hiddenlab.proposals.corpus import WINDOW_LENGTHS, Corpus
from hiddenlab.proposals.lens import TunedLens
from hiddenlab.proposals.probe import whitened_table, whitening
from hiddenlab.proposals.ridge import RidgeReader, likeliest_scale
from hiddenlab.proposals.store import identity_of, load_cached, release_windows, save_cached, training_channel
from hiddenlab.types import AttackResult, Observation, ObservationInfo, Progress, Site, TokenPrediction

ROWS = 12_000  # of the attacker's own text, from which readers are computed
HELD_OUT = 6  # further windows, which set temperatures and the language model's weight
WEIGHTS = (0.5, 1.0, 2.0)  # of the language model's log-probabilities, from which the likeliest is taken
STAGE = "collecting states of own text"


@dataclass(frozen=True)
class OffsetReader:
    """Names the token at a distance before a row.

    Attributes:
        scale: the inverse temperature of scores. right: share of held-out rows whose token scores best.
    """

    reader: RidgeReader
    table: Float[Tensor, "v e"]
    scale: float
    right: float

    def log_probs(self, rows: Float[Tensor, "rows d"]) -> Float[Tensor, "rows v"]:
        """Return each token's log-probability."""
        return (self.reader.scores(rows, self.table) * self.scale).log_softmax(-1)


@dataclass(frozen=True)
class Prepared:
    """Everything that one channel at one site needs.

    Attributes:
        readers: entry d names the token d positions before a row. weight: of the language model, 0 without one.
    """

    info: ObservationInfo
    model: TruncatedModel
    readers: tuple[OffsetReader, ...]
    weight: float


@dataclass(frozen=True)
class Path:
    """One reading of a prompt so far.

    Attributes:
        tokens, chances: what was read, and each token's probability when it was chosen. score: in nats.
        prefix: the language model behind these tokens. following: its log-probabilities of the next one.
    """

    tokens: tuple[int, ...] = ()
    chances: tuple[float, ...] = ()
    score: float = 0.0
    prefix: Prefix | None = None
    following: Float[Tensor, " v"] | None = None


class ShardReading(Attack):
    """Read own tokens and those between, behind any layer, from the rows of one node.

    Regressions on the attacker's own text name the token of a row, and the ones up to ``reach`` positions before it. A
    row's own token is named by its own state, a token without a row by the rows right behind it. A beam search from
    left to right adds what the language model says. Nothing is verified: the right state cannot be computed without
    the tokens in between. Where neither a row nor a language model says anything, a token is left out.

    With ``reach=0`` tokens without a row are guessed by the language model alone. This is the control: what the plan
    lets a node guess from the tokens that it is meant to hold.

    Knows: the weights, the shown rows, their positions. Does not know: tokens, other rows.

    Args:
        reach: how many positions before a row its state is asked about; 0 asks for its own token alone.
        beam: readings kept for each prompt.
        batch: prompts at once.
        without: parts left out, joined by ``+``: ``language-model``.
    """

    use_when = "a node gets some rows behind layers that it does not compute, with many tokens between"
    parts = ("language-model",)

    def __init__(self, reach: int = 2, beam: int = 8, batch: int = 16, without: str = "") -> None:
        if reach < 0 or min(beam, batch) < 1:
            raise InputError(
                f"reach must be at least 0, beam and batch at least 1, not {reach}, {beam} and {batch}"
            )
        self.reach, self.beam, self.batch = reach, beam, batch
        self.without = self.left_out(without)
        self._prepared: Prepared | None = None
        self._lm: tuple[TruncatedModel, LazyModel] | None = None

    def _forget(self) -> None:
        self._prepared = None

    def _fit(self, info: ObservationInfo) -> dict[str, float | str]:
        """Compute the readers and the language model's weight, for all observations of one channel.

        Returns:
            ``read_0``, ``read_1`` … (the share of own held-out text that each reader names) and ``weight_lm``.
        """
        prepared = self.prepare(info)
        shares: dict[str, float | str] = {
            f"read_{offset}": reader.right for offset, reader in enumerate(prepared.readers)
        }
        return {**shares, "weight_lm": prepared.weight}

    def prepare(self, info: ObservationInfo) -> Prepared:
        """Return what a channel needs, and keep it for its next observation.

        Raises:
            NotApplicableError: rows without positions, coordinates out of order, or rows that are no states.
        """
        if info.rows_permuted or info.columns_permuted is not None:
            raise NotApplicableError(
                "shard-reading needs rows of known positions and coordinates in order; "
                "vocab-match attacks shuffled states"
            )
        if projection_of(info) is not None or parts_of_attention(info) or info.site.stream == "logits":
            raise NotApplicableError("shard-reading needs whole states, or queries, keys or values")
        info, model = as_whole(info), self.model
        if self._prepared is None or (self._prepared.info, self._prepared.model) != (info, model):
            text = own_text(model, info, self.seed, self.progress)
            readers = readers_of(model.embedding.detach().float(), text, self.reach)
            speaker = self._speaker(model)
            weight = 0.0 if speaker is None else likeliest_weight(text, readers, speaker)
            self._prepared = Prepared(info, model, readers, weight)
        return self._prepared

    def _speaker(self, model: TruncatedModel) -> LazyModel | None:
        if "language-model" in self.without:
            return None
        if self._lm is None or self._lm[0] is not model:
            self._lm = model, LazyModel(model)
        return self._lm[1]

    def _recover_batch(self, observations: Sequence[Observation]) -> list[AttackResult]:
        """Recover prompts: own tokens and those between them, up to the last row, unverified.

        Raises:
            NotApplicableError: see ``prepare``.
        """
        results = list[AttackResult]()
        for group in by_channel(observations, self.batch):
            results += self._read(group, [{}] * len(group))
        return results

    def recover_ends(self, first: Sequence[Observation], last: Sequence[Observation]) -> list[AttackResult]:
        """Recover prompts from the rows that a node holds at its first layer and those behind its last one.

        A late row says what the model expects next, and the model has read the others' tokens too. So where the row
        before a token is the node's, a tuned lens takes the language model's place, which knows what was read alone.

        Args:
            first, last: of each prompt, at the same positions; all of one channel each, ``first`` at the attack's site.

        Raises:
            NotApplicableError: see ``prepare``.
        """
        if not first:
            return []
        lens, results = self._lens(last[0].info), list[AttackResult]()
        for start in range(0, len(first), self.batch):
            late = [_said(lens, observation) for observation in last[start : start + self.batch]]
            results += self._read(first[start : start + self.batch], late)
        return results

    @torch.inference_mode()
    def _lens(self, info: ObservationInfo) -> TunedLens:
        """Return the lens of a late layer: from its states of own text to those behind the last norm."""
        late = self.model.sibling(info.site.layer, dtype=info.provider_dtype)
        final = self.model.sibling(stream="final_norm", dtype=info.provider_dtype)
        text = own_text(late, as_whole(info), self.seed, self.progress)
        site = Site(final.site.layer, "final_norm")
        # What comes next is a matter of the text, whatever a channel does to the states that are read.
        finals = own_text(final, replace(as_whole(info), site=site, channel=()), self.seed, self.progress)
        fitted = (text.places[: text.fitted] > 0).nonzero()[:, 0]
        held, following = text.at(-1, held_out=True)
        head = LazyModel(self.model).model.module.get_output_embeddings()  # type: ignore[operator]
        return TunedLens.fit(
            text.states[fitted], finals.states[fitted], head.weight.detach().float(), held, following
        )

    def _read(
        self, group: Sequence[Observation], late: Sequence[Mapping[int, Float[Tensor, " v"]]]
    ) -> list[AttackResult]:
        """Read prompts at once.

        Args:
            late: for each prompt, log-probabilities of the tokens that late rows say something of, by position.
        """
        started, prepared = time.perf_counter(), self.prepare(group[0].info)
        places = [_places(observation) for observation in group]
        rows = [observation.states.to(self.model.device).float() for observation in group]
        found = read_prompts(
            rows, places, prepared.readers, self._speaker(self.model), prepared.weight, self.beam, late
        )
        seconds = (time.perf_counter() - started) / len(group)
        return list(map(_result, found, places, [seconds] * len(group)))

    def __repr__(self) -> str:
        return "ShardReading: knows the weights, one node's rows and their positions; not the other rows or tokens"


def _places(observation: Observation) -> dict[int, int]:
    """Return the row of each shown position, in order."""
    positions = observation.info.positions or range(len(observation.states))
    return {position: row for row, position in enumerate(positions)}


def _said(lens: TunedLens, observation: Observation) -> dict[int, Float[Tensor, " v"]]:
    """Return what each late row says of the token behind it, by that token's position."""
    said = lens.log_probs(observation.states.to(lens.head.device).float())
    return {position + 1: said[row] for position, row in _places(observation).items()}


def _result(found: Mapping[int, tuple[int, float]], rows: Mapping[int, int], seconds: float) -> AttackResult:
    """Return what was read at each position as an attack's result."""
    tokens = tuple(
        TokenPrediction(token, rows.get(place, -1), 1 - chance, None, 0, False)
        for place, (token, chance) in found.items()
    )
    positions = None if len(found) == 1 + max(rows) else tuple(found)
    return AttackResult(tokens, 0, 0, seconds, "complete", positions=positions)


# ---- preparation


@dataclass(frozen=True)
class OwnText:
    """States of the attacker's own text, window behind window; the last windows are held out.

    Attributes:
        places: each row's position in its window. fitted: how many of the first rows are not held out.
    """

    states: Float[Tensor, "rows d"]
    tokens: Int[Tensor, " rows"]
    places: Int[Tensor, " rows"]
    fitted: int

    def at(self, offset: int, held_out: bool) -> tuple[Float[Tensor, "some d"], Int[Tensor, " some"]]:
        """Return rows that have a token ``offset`` positions before them (behind them if negative), and these tokens.

        First rows are left out: models attend to the first position whatever stands there, and its states are unlike
        all others.
        """
        chosen = self.places >= max(1, offset)
        if offset < 0:
            chosen[offset:] = False
            chosen[:offset] &= self.places[-offset:] > self.places[:offset]  # of the same window
        chosen[: self.fitted] &= not held_out
        chosen[self.fitted :] &= held_out
        rows = chosen.nonzero()[:, 0]
        return self.states[rows], self.tokens[rows - offset]

    def held_windows(self) -> list[tuple[Float[Tensor, "n d"], Int[Tensor, " n"]]]:
        """Return the states and tokens of each window that is held out."""
        starts = (self.places[self.fitted :] == 0).nonzero()[:, 0].tolist()
        sizes = [end - start for start, end in pairwise([*starts, len(self.places) - self.fitted])]
        parts = (self.states[self.fitted :].split(sizes), self.tokens[self.fitted :].split(sizes))
        return list(zip(*parts, strict=True))


def own_text(model: TruncatedModel, info: ObservationInfo, seed: int, progress: Progress) -> OwnText:
    """Return states of own text as a channel releases them, from the cache or collected now."""
    stages = training_channel(model, info)
    identity = identity_of(model, stages) | {"shard_reading": [ROWS, HELD_OUT, seed]}
    if (kept := load_cached(identity, model)) is None:
        corpus, windows, drawn = Corpus(model, seed), list[Tensor](), 0
        lengths = cycle(WINDOW_LENGTHS)  # as long as prompts are
        while drawn < ROWS:
            windows.append(corpus.text_window(next(lengths)))
            drawn += len(windows[-1])
        windows += [corpus.text_window(next(lengths)) for _ in range(HELD_OUT)]
        states, tokens, places = release_windows(model, Channel.parse(stages), windows, seed, STAGE, progress)
        kept = {
            "states": states.nan_to_num(0, 0, 0).bfloat16(), "tokens": tokens.int(), "places": places.int(),
            "fitted": torch.tensor(drawn),
        }  # fmt: skip
        with suppress(InputError):  # there is no folder to write in
            save_cached(identity, kept)
    device = model.device
    tokens, places = (kept[name].long().to(device) for name in ("tokens", "places"))
    return OwnText(kept["states"].float().to(device), tokens, places, int(kept["fitted"]))


def readers_of(embedding: Float[Tensor, "v e"], text: OwnText, reach: int) -> tuple[OffsetReader, ...]:
    """Return a reader for each offset up to ``reach``, with the temperature that is likeliest on held-out rows."""
    table = whitened_table(embedding, *whitening(embedding))
    readers = list[OffsetReader]()
    for offset in range(reach + 1):
        rows, tokens = text.at(offset, held_out=False)
        reader = RidgeReader(rows, table[tokens])
        rows, tokens = text.at(offset, held_out=True)
        scores = reader.scores(rows, table)
        unit = float(scores.abs().max().clamp(min=1e-30))
        scale = likeliest_scale(scores / unit, tokens) / unit
        right = float((scores.argmax(1) == tokens).float().mean())
        readers.append(OffsetReader(reader, table, scale, right))
    return tuple(readers)


@torch.inference_mode()
def likeliest_weight(text: OwnText, readers: Sequence[OffsetReader], speaker: LazyModel) -> float:
    """Return the weight of the language model under which held-out tokens are likeliest, beside one reader each.

    The language model is given the true tokens before each.
    """
    totals = dict.fromkeys(WEIGHTS, 0.0)
    for states, tokens in text.held_windows():
        answer = speaker.model.run([Request(speaker.opened, tokens)], keep=False)[0]
        following = answer.states[:-1].float().log_softmax(-1)  # entry i is of the token at i + 1
        for offset, reader in enumerate(readers):
            rows = reader.log_probs(states[offset + 1 :])
            targets = tokens[1 : len(tokens) - offset, None]
            for weight in WEIGHTS:
                mixed = rows + weight * following[: len(rows)]
                totals[weight] += float(mixed.log_softmax(-1).gather(1, targets).sum())
    return max(WEIGHTS, key=lambda weight: totals[weight])


# ---- reading


@torch.inference_mode()
def read_prompts(
    states: Sequence[Float[Tensor, "_ d"]],
    places: Sequence[Mapping[int, int]],
    readers: Sequence[OffsetReader],
    speaker: LazyModel | None,
    weight: float,
    beam: int,
    late: Sequence[Mapping[int, Float[Tensor, " v"]]],
) -> list[dict[int, tuple[int, float]]]:
    """Read several prompts at once, from left to right.

    Args:
        states: the rows of each prompt. places: for each prompt, the row of each shown position.
        speaker: the language model, with the weight of its log-probabilities; None for none.
        late: what late rows say of some positions, in its place.

    Returns:
        For each prompt the token and its probability at each position up to the last row. Positions of which nothing
        says anything are left out.
    """
    start = Path() if speaker is None else Path(prefix=speaker.opened.fork(), following=_first(speaker))
    paths = [[start] for _ in states]
    read = [list[int]() for _ in states]  # the positions of each prompt that something is said of
    ends = [max(rows) for rows in places]
    for place in range(1 + max(ends)):
        for i, found in enumerate(_evidence(states, places, readers, place)):
            if place <= ends[i] and (found is not None or speaker is not None):
                read[i].append(place)
                said = late[i].get(place)
                if said is not None:
                    found = said if found is None else found + said
                paths[i] = extend(paths[i], found, weight if said is None else 0.0, beam)
        going = [i for i, end in enumerate(ends) if place < end]
        if speaker is not None and going:
            grown = iter(_continued(speaker.model, [path for i in going for path in paths[i]]))
            for i in going:
                paths[i] = list(islice(grown, len(paths[i])))
    return [
        dict(zip(at, zip(best.tokens, best.chances, strict=True), strict=True))
        for at, (best, *_) in zip(read, paths, strict=True)
    ]


def extend(
    paths: Sequence[Path], evidence: Float[Tensor, " v"] | None, weight: float, beam: int
) -> list[Path]:
    """Return the likeliest paths that are one token longer, best first.

    Args:
        evidence: log-probabilities of the token by the rows; None where no row says anything.
    """
    parts = [] if evidence is None else [evidence[None].expand(len(paths), -1)]
    if following := [path.following for path in paths if path.following is not None]:
        parts.append(weight * torch.stack(following))
    steps = torch.stack(parts).sum(0)
    scores = steps + torch.tensor([[path.score] for path in paths], device=steps.device)
    best = scores.flatten().topk(min(beam, scores.numel()))
    chances = steps.log_softmax(-1).flatten()[best.indices].exp()
    longer = list[Path]()
    for score, place, chance in zip(
        best.values.tolist(), best.indices.tolist(), chances.tolist(), strict=True
    ):
        path, token = paths[place // steps.shape[1]], place % steps.shape[1]
        tokens, sure = (*path.tokens, token), (*path.chances, chance)
        longer.append(replace(path, tokens=tokens, chances=sure, score=score))
    return longer


def _evidence(
    states: Sequence[Float[Tensor, "_ d"]],
    places: Sequence[Mapping[int, int]],
    readers: Sequence[OffsetReader],
    place: int,
) -> list[Float[Tensor, " v"] | None]:
    """Return each prompt's log-probabilities of the token at a position: by its own row, else by those right behind."""
    evidence: list[Tensor | None] = [None] * len(states)
    for offset, reader in enumerate(readers):
        told = [
            i
            for i, rows in enumerate(places)
            if place + offset in rows and (offset == 0 or place not in rows)
        ]
        if not told:
            continue
        rows = torch.stack([states[i][places[i][place + offset]] for i in told])
        for i, scores in zip(told, reader.log_probs(rows), strict=True):
            known = evidence[i]
            evidence[i] = scores if known is None else known + scores
    return evidence


def _continued(model: TruncatedModel, paths: Sequence[Path]) -> list[Path]:
    """Return paths with what the language model says behind the last token of each."""
    left, requests = Counter(id(path.prefix) for path in paths), list[Request]()
    for path in paths:
        assert path.prefix is not None
        left[id(path.prefix)] -= 1
        prefix = path.prefix.fork() if left[id(path.prefix)] else path.prefix  # the last one needs no copy
        requests.append(Request(prefix, torch.tensor(path.tokens[-1:], device=model.device)))
    answers = model.run_all(requests, together=True)
    for request, answer in zip(requests, answers, strict=True):
        request.prefix.keep(answer, tokens=1)
    following = torch.stack([answer.states[-1] for answer in answers]).float().log_softmax(-1)
    return [
        replace(path, prefix=request.prefix, following=said)
        for path, request, said in zip(paths, requests, following, strict=True)
    ]


def _first(speaker: LazyModel) -> Float[Tensor, " v"]:
    """Return the log-probabilities of a prompt's first token, behind the opener or a special token; zeros without.

    A special token that the tokenizer puts before every prompt is the likeliest.
    """
    model = speaker.model
    start = speaker.opened.tokens or model.special_ids[:1]
    scores = torch.zeros(model.vocab_size, device=model.device)
    if start:
        request = Request(model.prefix(), torch.tensor(start, device=model.device))
        scores = model.run([request], keep=False)[0].states[-1].float().log_softmax(-1)
    put = [] if model.tokenizer is None else model.embedded(model.tokenizer("")["input_ids"])
    scores[put[:1]] = 0.0
    return scores
