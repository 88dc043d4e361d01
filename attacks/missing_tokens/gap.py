"""Search for the unknown tokens before one observed row, and for the row's own token."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hiddenlab.attacks.missing_tokens import clearance
from hiddenlab.attacks.missing_tokens.attention_sums import AttentionSums
from hiddenlab.attacks.missing_tokens.gap_view import View
from hiddenlab.attacks.missing_tokens.slots import Likely, SlotCandidates, moved, swapped
from hiddenlab.attacks.vocab_match import Prepared, mark_chance_matches
from hiddenlab.matching.ranking import Continuations
from hiddenlab.matching.screening import near_ones
from hiddenlab.models import Answer, Prefix, Request
from hiddenlab.proposals.probe import Probe
from hiddenlab.types import TokenPrediction

# Positions, about, that the language model may run for the beam of one gap, as long as the beam is wider than one.
BEAM_POSITIONS = 8192
NEARNESS = 8  # power of the ratio of distances that lowers a likely sequence's weight against the nearest
WIDEN_AFTER = 512  # sequences tried after which one more of the likeliest is searched slot by slot
LM_WEIGHT = 0.8  # weight of the language model beside traces
FILLINGS_AT_ONCE = 32  # solved fillings that are run at once
# The truncated model runs sequences within so many times the screen's largest rounding of a row.
ROUNDING_FACTOR = 1.25


class Gap:
    """The search for the unknown tokens before one row, and for its own."""

    def __init__(
        self, prepared: Prepared, earlier: Sequence[Probe], clearance: clearance.Clearance,
        lm: Continuations, prefix: Prefix, raw: Float[Tensor, " d"],
        breadth: int, most: int,
    ) -> None:  # fmt: skip
        self.prepared, self.lm, self.prefix = prepared, lm, prefix
        self.breadth, self.most = breadth, most
        self.size, self.budget = 1, 0
        self.model, self.matcher = prefix.model, prepared.matcher
        self.row = self.matcher.prepare(raw[None])
        self.clearance, self.norm = clearance, float(self.matcher.norms(self.row)[0])
        assert prepared.proposer.probe is not None
        own = prepared.proposer.probe.log_probs(raw[None])[0]
        self.traces = [own, *(probe.log_probs(raw[None])[0] for probe in earlier)]
        self.pool: dict[tuple[int, ...], float] = {}
        self.rough: set[tuple[int, ...]] = set()  # sequences of the pool whose distance is the screen's
        self.shadow: Prefix | None = None
        self.likely: list[Likely] = []  # by the priors alone, likeliest first
        self.priors: dict[tuple[int, tuple[int, ...]], Tensor] = {}
        self.slots: dict[tuple[int, tuple[int, ...]], SlotCandidates] = {}
        self.rearranged: set[tuple[int, ...]] = set()
        self.spent = 0
        self.closed = False
        self.best: tuple[int, ...] = ()

    @property
    def limit(self) -> float:
        """The distance within which a sequence matches; smaller than for a row's own token alone."""
        threshold = self.prepared.threshold
        limit = float(threshold.limits(self.matcher, self.row)[0])
        if threshold.absolute is not None:
            return limit
        return min(limit, self.clearance.limit(self.size - 1, threshold.floor) * self.norm)

    @property
    def clear(self) -> bool:
        """Whether no sequence with a wrong token before the row is expected within ``limit``."""
        return self.size == 1 or self.limit <= self.clearance.clear(self.size - 1) * self.norm

    def search(self, missing: int, budget: int) -> bool:
        """Search a gap of so many unknown tokens; the prefix then holds them and the row's own token.

        Args:
            budget: sequences tried at most, apart from those that the priors propose at once.

        Returns:
            Whether a sequence matched.
        """
        self.size, self.budget = missing + 1, budget
        self._beam()
        while not self.closed and self.spent < budget:
            if self._look_again() or self._rearrange():
                continue
            context = self._most_promising()
            if context is None:
                break
            self._expand(context)
        while not self.closed and self._look_again():
            pass
        if not self.closed:
            self.best = min(self.pool, key=self.pool.__getitem__)
            self.prefix.extend(torch.tensor(self.best, device=self.model.device))
        return self.closed

    def named(self, names: AttentionSums, view: View, row: int) -> bool:
        """Solve for the tokens missing before a row, and run the solutions; return whether one matched."""
        known, asked = view.rows(row)
        places = range(view.first_unknown, view.positions[row] + 1)
        self.size = len(places)
        for rows in asked:
            for fillings in names.name(rows):
                self._run(
                    [tuple((known | filling)[p] for p in places) for filling in fillings[:FILLINGS_AT_ONCE]]
                )
                if self.closed:
                    return True
        return False

    def recovered(self, rows: Mapping[int, int], start: int) -> list[TokenPrediction]:
        """Return the tokens found from a position on; those without a row are verified by the row they explain.

        Args:
            rows: row index by position.
        """
        others = sorted(d for sequence, d in self.pool.items() if sequence != self.best)[:1]
        distance = self.pool[self.best]
        margin = others[0] - distance if others else None
        tokens = [
            TokenPrediction(
                token, rows.get(start + slot, -1), distance, margin, self.spent, self.closed and self.clear
            )
            for slot, token in enumerate(self.best)
        ]
        return list(mark_chance_matches(tokens, self.prepared.threshold.doubt)) if self.size == 1 else tokens

    # ---- what is tried

    def _beam(self) -> None:
        """Propose sequences from left to right by the priors alone and run them; their slots are searched later."""
        # The beam of a long gap takes more and longer passes: it is narrower, so that it costs as much as a short one.
        width = max(1, min(4 * self.breadth, BEAM_POSITIONS // self.size**2))
        beams = [Likely((), ())]
        first = beams[0]
        for slot in range(self.size):
            first = beams[0]
            scores = self._scores(slot, [sequence.tokens for sequence in beams]).log_softmax(1)
            top = scores.topk(min(width, scores.shape[1]), dim=1)
            grown = [
                sequence.with_token(token, value)
                for sequence, values, tokens in zip(
                    beams, top.values.tolist(), top.indices.tolist(), strict=True
                )
                for value, token in zip(values, tokens, strict=True)
            ]
            beams = sorted(grown, key=lambda sequence: -sum(sequence.scores))[
                : width if slot < self.size - 1 else 3 * width
            ]
        # The likeliest sequences often share their last token: add other last tokens behind the likeliest beginning.
        last = self.traces[0].log_softmax(0).topk(min(width, len(self.traces[0])))
        others = [
            first.with_token(token, value)
            for token, value in zip(last.indices.tolist(), last.values.tolist(), strict=True)
        ]
        unique = {sequence.tokens: sequence for sequence in beams + others}
        self.likely = sorted(unique.values(), key=lambda sequence: -sum(sequence.scores))
        first_batch = dict.fromkeys(sequence.tokens for sequence in beams[:width])
        rest = [sequence.tokens for sequence in self.likely if sequence.tokens not in first_batch]
        for part in (list(first_batch), rest):
            if not self.closed:
                self._run(part[: self.most - self.spent])
        self.likely = [
            replace(sequence, distance=self.pool[sequence.tokens])
            for sequence in self.likely
            if sequence.tokens in self.pool
        ]

    def _rearrange(self) -> bool:
        """Try the nearest sequence's unknown tokens in other orders, once; return False where none is left to try.

        A row shows which tokens stand before it better than where: the right ones in a wrong order come near.
        """
        nearest = min(self.pool, key=self.pool.__getitem__)
        if self.size < 3 or nearest in self.rearranged:
            return False
        self.rearranged.add(nearest)
        orders = {moved(nearest[:-1], i, j) for i in range(self.size - 1) for j in range(self.size - 1)}
        orders |= {swapped(nearest[:-1], i, j) for i, j in combinations(range(self.size - 1), 2)}
        fresh = sorted({(*order, nearest[-1]) for order in orders} - self.pool.keys())
        fresh = fresh[: self.budget - self.spent]
        if fresh:
            self._run(fresh)
        return bool(fresh)

    def _run(self, sequences: list[tuple[int, ...]]) -> None:
        """Run whole sequences behind the prefix."""
        limit = max(1, self.model.max_pass_tokens // self.size)
        for start in range(0, len(sequences), limit):
            part = sequences[start : start + limit]
            branches = torch.tensor(part, device=self.model.device)
            self._try(branches[0, :0], branches, part)
            if self.closed:
                return

    def _look_again(self) -> bool:
        """Run the nearest sequences that only the screen has run in the model; return False where there are none."""
        nearest = sorted(self.pool, key=self.pool.__getitem__)[: self.breadth]
        if not (doubtful := [sequence for sequence in nearest if sequence in self.rough]):
            return False
        branches = torch.tensor(doubtful, device=self.model.device)
        answer = self.model.run([Request(self.prefix, branches[0, :0], branches=branches)])[0]
        self._digest(answer, doubtful, 0)
        return True

    def _try(
        self, chain: Int[Tensor, " t"], branches: Int[Tensor, "c g"], sequences: list[tuple[int, ...]]
    ) -> Float[Tensor, "c d"]:
        """Run sequences that begin with the chain, note their distances, and return their last tokens' states.

        The screen runs large batches first. Then the model runs those that are near, or whose distance is within the
        screen's rounding.
        """
        screen = self.prepared.screen
        self.spent += len(sequences)
        parents = torch.full((len(branches),), len(chain), device=branches.device)
        # First tokens may be attention sinks, whose states half precision cannot tell apart.
        if screen is None or not self.prefix.length or not screen.runs(len(sequences)):
            answer = self.model.run([Request(self.prefix, chain, branches=branches, parents=parents)])[0]
            return self._digest(answer, sequences, len(chain))[0]
        self.shadow = self.shadow or screen.follow(self.prefix)
        request = Request(self.shadow, chain, branches=branches, parents=parents)
        states, distances = self._measured(screen.model.run([request], keep=False)[0], len(sequences))
        for sequence, distance in zip(sequences, distances.tolist(), strict=True):
            if sequence not in self.pool:  # keep distances that the truncated model measured
                self.pool[sequence] = distance
                self.rough.add(sequence)
        chosen, seen = near_ones(distances), torch.zeros_like(distances, dtype=torch.bool)
        while len(chosen) and not self.closed:
            seen[chosen] = True
            request = Request(self.prefix, chain, branches=branches[chosen], parents=parents[chosen])
            own, exact = self._digest(
                self.model.run([request])[0], [sequences[i] for i in chosen.tolist()], len(chain)
            )
            states[chosen] = own.to(states.dtype)
            rounding = ROUNDING_FACTOR * float((distances[chosen] ** 2 - exact**2).clamp(min=0).max().sqrt())
            (chosen,) = ((distances <= rounding) & ~seen).nonzero(as_tuple=True)
        return states

    def _scores(self, slot: int, before: Sequence[tuple[int, ...]]) -> Float[Tensor, "c v"]:
        """Return log-probabilities (not normalised) of a slot's token behind each choice of the tokens before it.

        The row's own token is scored by its probe alone: asking the language model for every sequence would cost more
        than it tells.
        """
        back = self.size - 1 - slot
        trace = self.traces[back] if back < len(self.traces) else torch.zeros_like(self.traces[0])
        following = self.lm.after(self.prefix.tokens, before) if back else None
        if following is None:
            return trace.expand(len(before), -1)
        return trace + LM_WEIGHT * following.to(trace.device)

    def _most_promising(self) -> "SlotCandidates | None":
        """Return the slot whose next candidates are likeliest to be right, of near and of likely sequences.

        Nearer sequences have more weight. Likely ones are weighted by the prior of the tokens that are held, and less
        where they are far. A row may come nearer with a wrong token of its own than with the right one, as long as
        those before it are wrong; the priors then show better where to search.
        """
        best: tuple[float, SlotCandidates] | None = None
        nearest = sorted(self.pool, key=self.pool.__getitem__)
        taken = 0
        for sequence in nearest:
            open_ = [c for slot in range(self.size) if not (c := self._context(slot, sequence)).exhausted]
            for context in open_:
                value = context.chance() / (1 + taken)
                if best is None or value > best[0]:
                    best = value, context
            taken += bool(open_)
            if taken == self.breadth:
                break
        least = self.pool[nearest[0]]
        for likely in self.likely[: self.breadth + self.spent // WIDEN_AFTER]:
            nearness = (least / max(likely.distance, 1e-30)) ** NEARNESS
            for slot in range(self.size):
                context = self._context(slot, likely.tokens)
                value = context.chance() * likely.held(slot) * nearness
                if not context.exhausted and (best is None or value > best[0]):
                    best = value, context
        return None if best is None else best[1]

    def _context(self, slot: int, sequence: tuple[int, ...]) -> SlotCandidates:
        key = slot, sequence[:slot] + sequence[slot + 1 :]
        if key not in self.slots:
            # The prior of the row's own token is its probe alone, whatever stands before it.
            before = sequence[:slot] if slot < self.size - 1 else ()
            if (slot, before) not in self.priors:
                self.priors[slot, before] = self._scores(slot, [sequence[:slot]])[0]
            self.slots[key] = SlotCandidates(slot, sequence, self.priors[slot, before])
        return self.slots[key]

    def _expand(self, context: SlotCandidates) -> None:
        """Run the next candidates of one slot; all of them share the tokens before it."""
        slot, held = context.slot, context.held
        tokens = context.next(min(self.budget - self.spent, self.model.max_pass_tokens // (self.size - slot)))
        chain = torch.tensor(held[:slot], dtype=torch.long, device=self.model.device)
        behind = torch.tensor(held[slot + 1 :], dtype=torch.long, device=self.model.device)
        branches = torch.cat([tokens[:, None], behind.expand(len(tokens), -1)], 1)
        sequences = [(*held[:slot], token, *held[slot + 1 :]) for token in tokens.tolist()]
        states = self._try(chain, branches, sequences)
        if self.prepared.proposer.adapter is not None and not self.closed:
            context.learn(tokens, states, self.row, self.prepared.proposer.adapter)

    def _measured(self, answer: Answer, count: int) -> tuple[Float[Tensor, "c d"], Float[Tensor, " c"]]:
        """Return the states of the last tokens of so many branches, and their distances from the row."""
        states = self.matcher.view(answer.branches.unflatten(0, (count, -1))[:, -1])
        return states, self.matcher.pairs(candidates=states, observed=self.row.expand_as(states))

    def _digest(
        self, answer: Answer, sequences: list[tuple[int, ...]], chain: int
    ) -> tuple[Float[Tensor, "c d"], Float[Tensor, " c"]]:
        """Note what the truncated model ran, and commit a sequence that matches; return states and distances."""
        states, distances = self._measured(answer, len(sequences))
        self.pool.update(zip(sequences, distances.tolist(), strict=True))
        self.rough.difference_update(sequences)
        if len(self.pool) > 4096:  # far sequences are not searched again
            kept = sorted(self.pool, key=self.pool.__getitem__)[:1024]
            self.pool = {sequence: self.pool[sequence] for sequence in kept}
            self.rough &= self.pool.keys()
        nearest = int(distances.argmin())
        if float(distances[nearest]) <= self.limit:
            self.closed, self.best = True, sequences[nearest]
            self.pool[self.best] = float(distances[nearest])
            self.prefix.keep(answer, tokens=chain, branch=nearest)
        return states, distances
