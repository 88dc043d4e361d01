"""Read a prompt from attention sums behind layers of the client, token after token.

Behind other layers than the first a value vector depends on all tokens before it, so that there is no table of the
vocabulary. But the tokens before are known, if one goes from the first to the last: a candidate's value vector and key
follow from running it behind them. The rows of the node's next cluster mix the value vectors of the keys that they see,
and query heads that share a key/value head mix the same ones. What is left of the sums without the known keys spans the
space of the unknown value vectors, and only the right token's lies in it. A token of the node itself is told by its own
row. No paper describes this.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hiddenlab.attacks.partial_sums.first import Found
from hiddenlab.attacks.partial_sums.sums import Step, View, step_of
from hiddenlab.matching.in_turn import TEXT, in_chunks, likeliest, nearness
from hiddenlab.matching.inner_layer import InnerLayer
from hiddenlab.matching.ranking import Continuations, LazyModel
from hiddenlab.models import Prefix
from hiddenlab.proposals.corpus import Corpus
from hiddenlab.sharding import ROOM
from hiddenlab.types import Progress

# Share of a square that the right token leaves outside, at most. Below the first limit a token is taken at once. Up to
# the second one, others are run too, since the next token of a cluster may lie as near (docs/log/055).
SURE, WITHIN = 1e-5, 1e-3
APART = 30.0  # how many times as much the next best of all tokens leaves where a token between the limits is verified

Test = Callable[[Float[Tensor, "c k"], Float[Tensor, "c v"]], Float[Tensor, " c"]]


class Reader:
    """Reads views of one layer.

    Args:
        layer: the nodes' first one. speaker: the language model that proposes. budget: tokens tried for one position at
            most; None is the whole vocabulary. seed: of own text. progress: called with each position.
    """

    def __init__(
        self, layer: InnerLayer, speaker: LazyModel, budget: int | None, seed: int, progress: Progress
    ) -> None:
        self.layer, self.speaker, self.budget, self.seed = layer, speaker, budget, seed
        self.progress = progress

    @cached_property
    def table(self) -> tuple[Float[Tensor, "v k"], Float[Tensor, "v w"]]:
        """Keys and values of the whole vocabulary behind a few tokens of own text: nearly those behind any others."""
        model = self.layer.model
        prefix = model.prefix()
        prefix.extend(Corpus(model, self.seed).text_window(TEXT).to(model.device))
        return self.layer.branch(prefix, torch.arange(model.vocab_size, device=model.device))

    def read(self, view: View) -> Found:
        """Read the tokens up to the node's last row, or up to the first that too few rows show or none explains."""
        last, prompt = view.positions[-1], _Prompt(view, self)
        for position in range(last + 1):
            self.progress("tokens", position, last + 1)
            prompt.go_on(position)
            if prompt.found.stopped:
                break
        return prompt.checked()


@dataclass
class _Prompt:
    """One prompt, of which the first tokens are known.

    Attributes:
        unfinished: by key shard, the first position of a cluster of which not all tokens are found.
    """

    view: View
    reader: Reader
    tokens: list[int] = field(default_factory=list)
    found: Found = field(default_factory=lambda: Found({}, {}, {}))
    unfinished: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        layer, view = self.reader.layer, self.view
        self.rows = view.row_of
        q, k, v = layer.of_rows(view.own, self.rows)
        self.queries = layer.by_head(q)
        size = view.positions[-1] + 1
        self.keys, self.values = k.new_zeros(size, k.shape[1]), v.new_zeros(size, v.shape[1])
        self.keys[view.positions], self.values[view.positions] = k, v
        self.prefix: Prefix = layer.model.prefix()
        self.left = 0  # unknown tokens of the cluster that was looked at last
        self.following = Continuations(self.reader.speaker, layer.model.special_ids)

    def go_on(self, position: int) -> None:
        """Find the token at a position; all before it are known."""
        test = self._own(position) if position in self.rows else self._other(position)
        if test is None:
            self.found.stopped = f"too few rows show the token at position {position}"
            return
        order = self._likeliest(test)[: self.reader.budget]
        best, second, chosen = math.inf, math.inf, 0
        tried = order[:0]
        for tokens in in_chunks(order):
            left = test(*self.reader.layer.branch(self.prefix, tokens))
            tried = torch.cat([tried, tokens])
            least = left.topk(min(2, len(left)), largest=False)
            best, second = sorted([best, second, *least.values.tolist()])[:2]
            if float(least.values[0]) == best:
                chosen = int(tokens[least.indices[0]])
            if best < SURE:
                break
        self.found.tried[position] = len(tried)
        if best >= WITHIN:
            coarse = "numbers of 16 bits are too coarse for it"
            self.found.stopped = f"no token that was tried explains position {position}; {coarse}"
            return
        keys, values = self.reader.layer.branch(self.prefix, order.new_tensor([chosen]))
        self.prefix.commit(0)
        self.tokens.append(chosen)
        if position not in self.rows:
            self.keys[position], self.values[position] = keys[0], values[0]
        self.found.tokens[position], self.found.left[position] = chosen, best
        # What rests on a token that may be wrong verifies nothing.
        alone = len(tried) == self.reader.layer.model.vocab_size and best * APART < second
        self.found.verified[position] = (best < SURE or alone) and all(self.found.verified.values())

        if position not in self.rows:
            self.unfinished.setdefault(self._shard(position), position)
            if self.left == 1:
                del self.unfinished[self._shard(position)]

    def checked(self) -> Found:
        """Return what was found; from the first cluster on that has no end, no token counts as verified.

        Far from a prompt's beginning, a later token of the same cluster may lie in the span as well. Its weights are
        not those of its place, so that the cluster does not end with one token that explains what is left.
        """
        first = min(self.unfinished.values(), default=len(self.tokens))
        for position in self.found.verified:
            self.found.verified[position] &= position < first
        return self.found

    def _shard(self, position: int) -> int:
        """Return the key shard that holds a position."""
        return next(i for i, keys in enumerate(self.view.shards) if position in keys)

    def _likeliest(self, test: Test) -> Int[Tensor, " v"]:
        """Return the vocabulary, the likeliest tokens first, by the language model and by a test of the table."""
        left = test(*self.reader.table)
        said = self.following.after(self.tokens, [()])
        return likeliest(nearness(left), None if said is None else said[0])

    def _own(self, position: int) -> Test:
        """Compare keys and values with those of the node's own row."""
        key, value = self.keys[position], self.values[position]
        size = key.square().sum() + value.square().sum()
        return lambda keys, values: ((keys - key).square().sum(1) + (values - value).square().sum(1)) / size

    def _other(self, position: int) -> Test | None:
        """Compare value vectors with the span of the sums of the first rows that show the token."""
        step = self._step(position)
        if step is None:
            return None
        self.left = len(step.new)
        # A head whose sums span less, since a weight is near 0 or two keys have one value vector, may leave a right
        # one outside.
        full = [g for g, (_, basis) in enumerate(step.spans) if len(basis) == len(step.new)]
        heads = [g for g in full or range(len(step.spans)) if step.room[g] >= ROOM]
        # A value vector that is a known one's, as of a prompt of one token again and again, tells nothing.
        return lambda keys, values: step.outside(values)[:, heads].nan_to_num(1.0).mean(1)

    def _step(self, position: int) -> Step | None:
        """Return the sums of the first rows behind a position that show it, and have room for a wrong token to show."""
        view, layer = self.view, self.reader.layer
        index = self._shard(position)
        shard = view.shards[index]
        behind = [row for row, place in enumerate(view.positions) if place > position]
        unknown = [s for s in shard if s >= position and s not in self.rows]
        rows = list[int]()
        while len(rows) < len(behind):
            following = behind[len(rows) :]
            seen = sum(s <= view.positions[following[0]] for s in unknown)
            rows += [row for row in following if sum(s <= view.positions[row] for s in unknown) == seen]
            shown = layer.attention.visible([view.positions[row] for row in rows], unknown).any(0)
            new = [s for s, seen in zip(unknown, shown.tolist(), strict=True) if seen]
            if position not in new:
                continue
            end = view.positions[rows[-1]]
            known = [s for s in shard if (s < position or s in self.rows) and s <= end]
            step = step_of(
                view,
                layer,
                index,
                rows,
                self.queries[:, rows],
                known,
                self.keys[known],
                self.values[known],
                new,
                ROOM,
            )
            if step is not None and max(step.room) >= ROOM:
                return step
        return None
