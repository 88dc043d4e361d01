"""What one observation says by itself, before any hypothesis: of its rows' tokens, their places, the channel's mark."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from hiddenlab.attacks.joint.clock import Clock
from hiddenlab.attacks.joint.evidence import EUCLIDEAN, TRACES, Rows
from hiddenlab.attacks.joint.gauge import Gauge
from hiddenlab.attacks.vocab_match.screen import Screen
from hiddenlab.channel import Channel, in_order
from hiddenlab.core import Observation
from hiddenlab.errors import InputError, NotApplicableError
from hiddenlab.job import generator
from hiddenlab.match import Matcher
from hiddenlab.propose.corpus import Corpus
from hiddenlab.propose.openings import Openings
from hiddenlab.propose.precedence import Precedence
from hiddenlab.propose.probe import PART, Probe
from hiddenlab.slice import Slice

SHORTLIST = 128  # tokens of each row that the probe names
ROUNDED, WINDOW = 8, 64  # texts that are rounded, and how long they are
SMALL = 0.25  # how small a share of the channel's doing rounding may be


def length_of(observation: Observation) -> int:
    """Tokens of the prompt.

    Raises:
        InputError: the facts contradict the rows. NotApplicableError: rows are missing and in unknown order.
    """
    public = observation.public
    if public.positions is None:
        return len(observation.states)
    if public.rows_permuted:
        raise NotApplicableError(
            "joint decoding needs to know which rows are missing; these are in unknown order"
        )
    least = 1 + max(public.positions)
    length = public.facts.get("tokens", least)
    if not isinstance(length, int) or isinstance(length, bool) or length < least:
        raise InputError(f"the prompt's length must be a number of at least {least} tokens, not {length!r}")
    if len(public.positions) != len(observation.states):
        raise InputError(f"{len(observation.states)} rows cannot have {len(public.positions)} positions")
    return length


def fast_enough(screen: Screen, channel: Channel, matcher: Matcher, seed: int) -> bool:
    """Whether the screen's rounding is small beside what the channel does to states, so that it may decide."""
    slice, fast = screen.of, screen.slice
    corpus = Corpus(slice, seed + 4)
    windows = [corpus.text_window(WINDOW).tolist() for _ in range(ROUNDED)]
    moved, rounded = list[Tensor](), list[Tensor]()
    released = channel.release_batch(slice, windows, generator(seed, "joint", "rounding"))
    for window, (one, secret) in zip(windows, released, strict=True):
        tokens = torch.tensor(window, device=slice.device)
        plain = matcher.view(slice.encode(tokens))
        rows = matcher.prepare(in_order(one, secret).to(slice.device))
        moved.append(matcher.pairs(candidates=rows, observed=plain) / matcher.norms(plain))
        near = matcher.view(fast.encode(tokens))
        rounded.append(matcher.pairs(candidates=near, observed=plain) / matcher.norms(plain))
    return bool(torch.cat(rounded).median() <= SMALL * torch.cat(moved).median())


@dataclass(frozen=True)
class Reader:
    """Reads observations of one channel.

    Attributes:
        probes: for a row's own token, and for those before it (or none). clock, precedence: where rows are in unknown
            order. gauge: where rows are in unknown order or columns shuffled; elsewhere a row's own length says enough.
            openings: of shuffled columns, or None.
    """

    slice: Slice
    channel: Channel
    matcher: Matcher
    probes: tuple[Probe, ...]
    clock: Clock | None
    gauge: Gauge | None = None
    openings: Openings | None = None
    precedence: Precedence | None = None

    def read(self, observation: Observation) -> Rows:
        """What the rows say."""
        public = observation.public
        length = length_of(observation)
        places = None if public.rows_permuted else public.positions or tuple(range(length))
        states = observation.states.to(self.slice.device).float()
        scores, ids = self.probes[0].shortlist(states, SHORTLIST)
        distinct, columns = ids.unique(return_inverse=True)
        told = [one.log_probs(states) for one in self.probes[1:]]
        traces = torch.stack([one[:, distinct] for one in told]) if told else None
        shown = self.matcher.prepare(states)
        white, units, expected, whitening = shown, EUCLIDEAN.norms(shown), None, None
        if self.gauge is not None:
            expected, whitening = self.gauge.expected(shown), self.gauge.whitening
            if whitening is not None:
                white, units = shown @ whitening, expected
        return Rows(
            shown, self.matcher.norms(shown), white, units, ids, scores, columns, traces, places, length,
            None if self.clock is None else self.clock(shown, length),
            None if self.precedence is None else self.precedence(shown), expected, whitening,
            torch.cat([self.probes[0].log_probs(part).half() for part in states.split(PART)])
            if self.matcher.sorted
            else None,
            {} if places is None or not told else _missed(told, places, length),
            None if self.openings is None else self.openings.nearest(states, SHORTLIST),
        )  # fmt: skip


def _missed(
    told: Sequence[Float[Tensor, "rows v"]], places: Sequence[int], length: int
) -> dict[int, Float[Tensor, "offsets v"]]:
    """What rows tell (for each offset) of tokens shortly before them that have no row of their own."""
    row_of, out = {place: row for row, place in enumerate(places)}, {}
    for place in sorted(set(range(length)) - set(places)):
        rows = [row_of.get(place + offset) for offset in TRACES]
        if any(row is not None for row in rows):
            out[place] = torch.stack([
                torch.zeros_like(one[0]) if row is None else one[row] for one, row in zip(told, rows, strict=True)
            ])  # fmt: skip
    return out
