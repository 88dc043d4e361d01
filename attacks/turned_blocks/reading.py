"""Read a prompt from blocks of mixed rows whose coordinate pairs were turned, token after token."""

import math
from dataclasses import dataclass, field
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hiddenlab.attacks.turned_blocks.angles import (
    beyond_known,
    fit,
    outside_of,
    search,
    share_outside,
    turned,
)
from hiddenlab.matching.in_turn import TEXT, in_chunks, likeliest, nearness
from hiddenlab.matching.ranking import Continuations, LazyModel
from hiddenlab.models import Request, TruncatedModel
from hiddenlab.proposals.corpus import Corpus
from hiddenlab.secret_maps import CloakedBlocks
from hiddenlab.types import Progress
from hiddenlab.utils.random import generator

# Share of a square outside of the space. A right token leaves 2e-11 at most. The smallest of a wrong one that was seen
# is 3e-4 where angles are free, and 5e-5 where they are known: the next token, run one place early (docs/log/056).
RIGHT = 1e-7
STARTS = 4  # random beginnings for each candidate and head in one round; each succeeds in about one of ten
FIRST, GROWTH = 64, 2  # likeliest candidates of the first round, and how many times as many in the next
TOGETHER = 64  # candidates whose angles are searched at once
KNOWN_STARTS = 64  # for a head whose angles are still unknown, with a token that is known
REFINED = 8  # tokens of the first block from which a head's angles are computed anew
LIKELY = 8  # next tokens that are tried behind each candidate of a token which no head shows
GUESSED = 4096  # such candidates
# Different tokens that the first block must have where rows are hidden and states depend on places alone. With fewer,
# tokens that repeat may stand at another place in each head.
DIFFERENT = 4
# Share of a square by which one place more must change a head's states, so that it tells places.
TELLING = 1e-3
BEAM = 32  # orders of a block's tokens that are followed where states do not tell their places


@dataclass
class Found:
    """What was read of one prompt: by position the token, the share outside, candidates tried; and why it ended."""

    tokens: list[int] = field(default_factory=list)
    left: list[float] = field(default_factory=list)
    tried: list[int] = field(default_factory=list)
    verified: list[bool] = field(default_factory=list)
    stopped: str = ""


class Reader:
    """Reads prompts of one model.

    Args:
        blocks: how rows were mixed and turned. speaker: the language model that proposes. budget: tokens tried for one
            position at most; None is the whole vocabulary. seed: of own text and random beginnings.
    """

    def __init__(
        self, model: TruncatedModel, blocks: CloakedBlocks, speaker: LazyModel, budget: int | None, seed: int
    ) -> None:
        self.model, self.blocks, self.speaker, self.budget, self.seed = model, blocks, speaker, budget, seed

    @cached_property
    def table(self) -> Float[Tensor, "v d"]:
        """States of the whole vocabulary behind a few tokens of own text: nearly those behind any others."""
        return self._behind(self._text, torch.arange(self.model.vocab_size))

    @cached_property
    def placed(self) -> list[int]:
        """The heads whose states depend on a token's place; values at the first layer do not.

        At the first layer positions alone make the difference. Heads that they hardly turn would let a token pass at
        the place beside its own.
        """
        behind = [self.heads(self._behind(text, self._few)) for text in (self._text, self._text[:1])]
        placed = [n for n, pair in enumerate(zip(*behind, strict=True)) if not torch.equal(*pair)]
        if not placed or not self.alike_behind_any_text:
            return placed
        beside = self.heads(self._behind(self._text[1:], self._few))
        changed = [
            (a - b).square().sum(1) / a.square().sum(1).clamp(min=1e-30)
            for a, b in zip(behind[0], beside, strict=True)
        ]
        return [n for n in placed if float(changed[n].median()) > TELLING]

    @property
    def used(self) -> list[int]:
        """The heads that are looked at: those that show places, if there are any."""
        return self.placed or list(range(self.blocks.heads))

    @cached_property
    def alike_behind_any_text(self) -> bool:
        """Whether a state depends on its own token and place alone, as at the first layer."""
        one, other = (self.heads(self._behind(text, self._few)) for text in (self._text, self._text.flip(0)))
        return all(torch.equal(*pair) for pair in zip(one, other, strict=True))

    @cached_property
    def single(self) -> Bool[Tensor, " v"]:
        """Whether no other token of the vocabulary has the same state as each; untrained tokens often share one."""
        _, which, counts = self.table.unique(dim=0, return_inverse=True, return_counts=True)
        return counts[which] == 1

    def heads(self, states: Float[Tensor, "*n d"]) -> tuple[Float[Tensor, "*n w"], ...]:
        """Return states by head."""
        return states.chunk(self.blocks.heads, -1)

    @cached_property
    def _text(self) -> Int[Tensor, " n"]:
        return Corpus(self.model, self.seed).text_window(TEXT).to(self.model.device)

    @property
    def _few(self) -> Int[Tensor, " n"]:
        return torch.arange(min(self.model.vocab_size, TEXT))

    def _behind(self, text: Int[Tensor, " n"], tokens: Int[Tensor, " c"]) -> Float[Tensor, "c d"]:
        prefix = self.model.prefix()
        prefix.extend(text)
        return prefix.branch(tokens.to(self.model.device)).float()

    def read(self, rows: Float[Tensor, "rows d"], progress: Progress) -> Found:
        """Read tokens from the first on, up to the first that none explains."""
        prompt = _Prompt(self, rows.float().to(self.model.device), progress)
        while len(prompt.found.tokens) < len(rows) and not prompt.found.stopped:
            progress("tokens", len(prompt.found.tokens), len(rows))
            if self.placed:
                prompt.go_on()
            else:
                prompt.take_block()
        return prompt.checked()


class _Prompt:
    """One prompt, of which the first tokens are known."""

    def __init__(self, reader: Reader, rows: Float[Tensor, "rows d"], progress: Progress) -> None:
        self.reader, self.found, self.progress = reader, Found(), progress
        self.prefix = reader.model.prefix()
        self.following = Continuations(reader.speaker, reader.model.special_ids)
        # By block and head, what its rows do not span.
        self.outside = [
            [outside_of(head) for head in self._heads(block)] for block in rows.split(reader.blocks.block)
        ]
        self.sizes = [len(block) for block in rows.split(reader.blocks.block)]
        self.angles: list[Tensor | None] = [None for _ in reader.used]
        self.hidden: list[int | None] = [None for _ in reader.used]  # the place in a block that is not seen
        self.known: list[list[Tensor]] = [[] for _ in reader.used]
        self.moved = self.doubtful = False
        self.states = list[Tensor]()  # of the tokens that were found
        self.drawn = generator(reader.seed, "turned blocks")

    def go_on(self) -> None:
        """Find the next token; all before it are known."""
        position, verified = len(self.found.tokens), True
        if all(angles is None for angles in self.angles):
            best, token, tried = self._opened()
        elif self._shown(position):
            best, token, tried = self._next(position)
        else:
            best, token, tried = math.inf, 0, 0
        if best >= RIGHT and self.reader.blocks.offset and position:
            best, token, more = self._of_hidden(position)
            tried, verified = tried + more, False  # another one may do as little to the next token's state
        if best < RIGHT:
            self._take(token, best, tried, verified)
        elif self.reader.alike_behind_any_text and 0 < position < self.sizes[0] and not self.moved:
            self._move(self.sizes[0] - position)
        else:
            self.found.stopped = f"no token that was tried explains position {position}"

    def checked(self) -> Found:
        """Return what was found, with tokens as unverified that stand in doubt.

        These are tokens of a block that was not read to its end, and all where the places of the first are in doubt.
        """
        read = len(self.found.tokens)
        hides = self.reader.blocks.offset and self.reader.alike_behind_any_text
        few = hides and len({*self.found.tokens[: self.sizes[0]]}) < DIFFERENT
        if self.doubtful or few:
            self.found.verified = [False] * read
        if read < sum(self.sizes):
            for position in range(read - read % self.reader.blocks.block, read):
                self.found.verified[position] = False
        return self.found

    def _move(self, places: int) -> None:
        """Begin again, with the angles of tokens that stand so many places later than they were found.

        Where positions turn pairs of coordinates as well, the angles found are those of a place and of the secret
        together. A sequence that ends too early was found too early: it ends where the first block does.
        """
        late = self.reader.model.prefix()
        device = self.reader.model.device
        late.extend(torch.zeros(places, dtype=torch.long, device=device))
        states = late.extend(torch.tensor(self.found.tokens, device=device)).float()
        self.found, self.moved, self.prefix = Found(), True, self.reader.model.prefix()
        self.angles, self.known = [None for _ in self.angles], [[] for _ in self.known]
        for state in states:
            self._learn(state)
        self.states = []

    def take_block(self) -> None:
        """Find all tokens of the next block, and the likeliest order of them; their states show no places."""
        start = len(self.found.tokens)
        block = start // self.reader.blocks.block
        if all(angles is None for angles in self.angles):
            best, token, _ = self._opened()
            if best >= RIGHT:
                self.found.stopped = "no token that was tried is in the first block"
                return
            self._learn(self.reader.table[token])
        within = self._shares(self.reader.table, block)
        members = (within < RIGHT).nonzero()[:, 0].tolist()
        for token in members if block == 0 else ():
            self._learn(self.reader.table[token])
        if not 0 < len(members) <= self.sizes[block]:
            self.found.stopped = f"{len(members)} tokens explain a block of {self.sizes[block]}"
            return
        for token in self._in_order(members, self.sizes[block]):
            self._take(token, float(within[token]), len(within), verified=self.sizes[block] == 1)

    def _in_order(self, members: list[int], size: int) -> list[int]:
        """Return the likeliest sequence of so many tokens that has every member, by the language model."""
        beams: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
        for step in range(size):
            said = self.following.after(self.found.tokens, [tokens for _, tokens in beams])
            grown = list[tuple[float, tuple[int, ...]]]()
            for n, (score, tokens) in enumerate(beams):
                missing = [member for member in members if member not in tokens]
                for member in missing if len(missing) == size - step else members:
                    more = 0.0 if said is None else float(said[n, member])
                    grown.append((score + more, (*tokens, member)))
            beams = sorted(grown, reverse=True)[:BEAM]
        return list(beams[0][1])

    def _take(self, token: int, left: float, tried: int, verified: bool) -> None:
        """Add a token behind those that were found."""
        position = len(self.found.tokens)
        state = self.prefix.branch(torch.tensor([token], device=self.reader.model.device)).float()[0]
        self.prefix.commit(0)
        self.states.append(state)
        if self.reader.placed and position < self.sizes[0]:
            self._learn(state)
        self.found.tokens.append(token)
        self.found.left.append(left)
        self.found.tried.append(tried)
        self.found.verified.append(verified and bool(self.reader.single[token]))
        if self.reader.placed and position + 1 == self.sizes[0]:
            self._find_hidden()

    def _shown(self, position: int) -> bool:
        """Return whether some head may show the token at a position."""
        block = position // self.reader.blocks.block
        place = position % self.reader.blocks.block
        return any(
            angles is not None and (hidden is None or hidden % self.sizes[block] != place)
            for angles, hidden in zip(self.angles, self.hidden, strict=True)
        )

    def _of_hidden(self, position: int) -> tuple[float, int, int]:
        """Return a token that no head shows.

        At the first layer no other token's state depends on it, and it is guessed. But there the failure may also mean
        that tokens were found too early. So their places must be known: the block's end was met.
        """
        if not self.reader.alike_behind_any_text:
            return self._by_the_next(position)
        if (self.moved or position >= self.sizes[0]) and self.found.verified[-1]:
            return 0.0, self._guess(), 0
        return math.inf, 0, 0

    def _guess(self) -> int:
        said = self.following.after(self.found.tokens, [()])
        return 0 if said is None else int(said[0, : self.reader.model.vocab_size].argmax())

    def _by_the_next(self, position: int) -> tuple[float, int, int]:
        """Return a token that no head shows, by the state of the token behind it; the last by the language model.

        Each candidate is run with the likeliest tokens behind it. Only behind the right one the next token's state is.
        """
        size, device = self.reader.model.vocab_size, self.reader.model.device
        said = self.following.after(self.found.tokens, [()])
        order = (torch.arange(size) if said is None else said[0, :size].argsort(descending=True)).to(device)
        order = order[: min(GUESSED, self.reader.budget or GUESSED)]
        if position + 1 == sum(self.sizes):
            return 0.0, int(order[0]), 0
        block = (position + 1) // self.reader.blocks.block
        near, left = self._nearness(block), list[Tensor]()
        for candidates in order.split(TOGETHER):
            self.progress("candidates for a token that no row shows", len(left) * TOGETHER, len(order))
            said = self.following.after(self.found.tokens, [(token,) for token in candidates.tolist()])
            scores = near.expand(len(candidates), -1) if said is None else near + said[:, :size].to(near)
            likely = scores.topk(min(LIKELY, size)).indices
            pairs = torch.stack([candidates.repeat_interleave(likely.shape[1]), likely.flatten()], 1)
            answer = self.reader.model.run([Request(self.prefix, order[:0], branches=pairs)], keep=False)[0]
            states = answer.branches.unflatten(0, pairs.shape)[:, 1].float()
            left.append(self._shares(states, block).unflatten(0, (len(candidates), -1)).amin(1))
            if float(left[-1].min()) < RIGHT:
                break
        every = torch.cat(left)
        least = int(every.argmin())
        return float(every[least]), int(order[least]), len(every)

    def _opened(self) -> tuple[float, int, int]:
        """Return the first token: the one whose state some angles turn into the space of the first block."""
        said = self.reader.speaker.beginning
        order = (
            torch.arange(self.reader.model.vocab_size)
            if said is None
            else said[: self.reader.model.vocab_size].argsort(descending=True).cpu()
        )[: self.reader.budget]
        best, token, size = math.inf, int(order[0]), FIRST
        while True:
            for number, candidates in enumerate(order[:size].split(TOGETHER)):
                self.progress("candidates for the first token", number * TOGETHER, size)
                states = self.prefix.branch(candidates.to(self.reader.model.device)).float()
                for head, outside in zip(self._heads(states), self.outside[0], strict=True):
                    shares, _ = search(head, outside, STARTS, self.drawn)
                    if float(shares.min()) < best:
                        best, token = float(shares.min()), int(candidates[shares.argmin()])
                if best < RIGHT:
                    return best, token, size
            if size >= len(order):
                return best, token, len(order)
            size *= GROWTH

    def _next(self, position: int) -> tuple[float, int, int]:
        """Return the token whose turned state lies in the space of its block."""
        block = position // self.reader.blocks.block
        order = self._likeliest(block)[: self.reader.budget]
        best, token, tried = math.inf, 0, 0
        for candidates in in_chunks(order):
            shares = self._shares(self.prefix.branch(candidates).float(), block)
            tried += len(candidates)
            if float(shares.min()) < best:
                best, token = float(shares.min()), int(candidates[shares.argmin()])
            if best < RIGHT:
                break
        return best, token, tried

    def _learn(self, state: Float[Tensor, " d"]) -> None:
        """Find unknown angles with a token of the first block, and compute known ones anew with more of them."""
        for n, (head, outside) in enumerate(zip(self._heads(state[None]), self.outside[0], strict=True)):
            angles, known = self.angles[n], self.known[n]
            if angles is None:
                share, found = search(head, outside, KNOWN_STARTS, self.drawn)
                if float(share[0]) < RIGHT:
                    self.angles[n] = found[0]
                    known.append(head[0])
            elif (
                len(known) < REFINED and float(share_outside(turned(head, angles[None]), outside)[0]) < RIGHT
            ):
                known.append(head[0])
                self.angles[n] = fit(torch.stack(known)[None], outside, angles[None])[1][0]

    def _find_hidden(self) -> None:
        """Find the place of a block that no row of a head shows, from the first block's tokens.

        A head that more of them are missing from has the angles of another place, and is left out. Where states depend
        on places alone and a place is hidden in all heads, nothing is verified: all tokens may stand a place later,
        with the last one hidden in place of the first.
        """
        seen = torch.zeros(self.sizes[0], dtype=torch.bool, device=self.reader.model.device)
        for n, head in enumerate(self._heads(torch.stack(self.states))):
            angles = self.angles[n]
            if angles is not None:
                left = share_outside(turned(head, angles[None]), self.outside[0][n])
                if int((left >= RIGHT).sum()) > self.reader.blocks.offset:
                    self.angles[n] = None
                    continue
                self.hidden[n] = int(left.argmax()) if float(left.max()) >= RIGHT else None
                seen |= left < RIGHT
        for position in (~seen).nonzero()[:, 0].tolist():
            self.found.verified[position] = False
        self.doubtful = self.reader.alike_behind_any_text and not bool(seen.all())
        if not bool(seen.any()):
            self.found.stopped = "the places of the first block's tokens are not known"

    def _likeliest(self, block: int) -> Int[Tensor, " v"]:
        """Return the vocabulary, the likeliest tokens first, by the language model and by nearly right states."""
        said = self.following.after(self.found.tokens, [()])
        return likeliest(self._nearness(block), None if said is None else said[0])

    def _nearness(self, block: int) -> Float[Tensor, " v"]:
        """Return how near the vocabulary's states behind own text are to the space of a block, in weighted nats."""
        return nearness(self._shares(self.reader.table, block))

    def _shares(self, states: Float[Tensor, "c d"], block: int) -> Float[Tensor, " c"]:
        """Return the least share outside over heads: a token that an offset hides in one head shows in another.

        Where places alone make the difference, and the place that each head hides is known, all others must show it.

        The share is of what known tokens of the block do not span. Otherwise a token that is run once more, whose state
        is nearly the same again, would pass.
        """
        known, shares = self.states[block * self.reader.blocks.block :], list[Tensor]()
        known_heads = self._heads(torch.stack(known)) if known else [None for _ in self.angles]
        place = len(self.found.tokens) - block * self.reader.blocks.block
        strict = bool(block) and bool(self.reader.placed) and self.reader.alike_behind_any_text
        for head, beside, angles, outside, hidden in zip(
            self._heads(states), known_heads, self.angles, self.outside[block], self.hidden, strict=True
        ):
            hides = strict and hidden is not None and hidden % self.sizes[block] == place
            if angles is not None and not hides:
                own = None if beside is None else turned(beside, angles[None])
                shares.append(beyond_known(turned(head, angles[None]), own, outside))
        every = torch.stack(shares)
        if strict:
            return every.nan_to_num(-1.0).amax(0).where(~every.isnan().all(0), 1.0)
        return every.nan_to_num(1.0).amin(0)

    def _heads(self, states: Float[Tensor, "c d"]) -> tuple[Float[Tensor, "c w"], ...]:
        heads = self.reader.heads(states)
        return tuple(heads[n] for n in self.reader.used)
