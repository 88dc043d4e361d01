"""Compute what an observation's rows tell before any hypothesis: likely tokens, positions and expected distances."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from hiddenlab.attacks.beam_decoding.distortion_model import DistortionModel
from hiddenlab.attacks.beam_decoding.features import EUCLIDEAN, TRACES, Rows
from hiddenlab.attacks.beam_decoding.position_model import PositionModel
from hiddenlab.channels import Channel, in_order
from hiddenlab.errors import InputError, NotApplicableError
from hiddenlab.matching.distance import Matcher
from hiddenlab.matching.screening import Screen
from hiddenlab.models import TruncatedModel
from hiddenlab.proposals.corpus import Corpus
from hiddenlab.proposals.first_token_table import FirstTokenTable
from hiddenlab.proposals.pairwise_order import PairwiseOrder
from hiddenlab.proposals.probe import PART, Probe
from hiddenlab.types import Observation
from hiddenlab.utils.random import generator

SHORTLIST = 128  # tokens that the probe proposes for each row
ROUNDED, WINDOW = 8, 64  # texts on which rounding is measured, and their length
SMALL = 0.25  # largest ratio of the screen's rounding to the channel's displacement


def length_of(observation: Observation) -> int:
    """Return the number of the prompt's tokens.

    Raises:
        InputError: the facts contradict the rows.
        NotApplicableError: rows are missing and in unknown order.
    """
    info = observation.info
    if info.positions is None:
        return len(observation.states)
    if info.rows_permuted:
        raise NotApplicableError(
            "beam decoding needs to know which rows are missing; these are in unknown order"
        )
    least = 1 + max(info.positions)
    length = info.facts.get("tokens", least)
    if not isinstance(length, int) or isinstance(length, bool) or length < least:
        raise InputError(f"the prompt's length must be a number of at least {least} tokens, not {length!r}")
    if len(info.positions) != len(observation.states):
        raise InputError(f"{len(observation.states)} rows cannot have {len(info.positions)} positions")
    return length


def fast_enough(screen: Screen, channel: Channel, matcher: Matcher, seed: int) -> bool:
    """Return whether the screen's rounding is small beside the channel's displacements, so that it may decide alone."""
    model, fast = screen.of, screen.model
    corpus = Corpus(model, seed + 4)
    windows = [corpus.text_window(WINDOW).tolist() for _ in range(ROUNDED)]
    moved, rounded = list[Tensor](), list[Tensor]()
    released = channel.release_batch(model, windows, generator(seed, "joint", "rounding"))
    for window, (observation, truth) in zip(windows, released, strict=True):
        tokens = torch.tensor(window, device=model.device)
        plain = matcher.view(model.encode(tokens))
        rows = matcher.prepare(in_order(observation, truth).to(model.device))
        moved.append(matcher.pairs(candidates=rows, observed=plain) / matcher.norms(plain))
        near = matcher.view(fast.encode(tokens))
        rounded.append(matcher.pairs(candidates=near, observed=plain) / matcher.norms(plain))
    return bool(torch.cat(rounded).median() <= SMALL * torch.cat(moved).median())


@dataclass(frozen=True)
class Reader:
    """Reads observations of one channel.

    Attributes:
        probes: for a row's own token, and for those before it (or none).
        position_model, pairwise_order: where rows are in unknown order.
        distortion_model: where rows are in unknown order or columns shuffled; elsewhere a row's own length suffices.
        first_tokens: of shuffled columns, or None.
    """

    model: TruncatedModel
    channel: Channel
    matcher: Matcher
    probes: tuple[Probe, ...]
    position_model: PositionModel | None
    distortion_model: DistortionModel | None = None
    first_tokens: FirstTokenTable | None = None
    pairwise_order: PairwiseOrder | None = None

    def read(self, observation: Observation) -> Rows:
        """Compute the features of an observation's rows."""
        info = observation.info
        length = length_of(observation)
        places = None if info.rows_permuted else info.positions or tuple(range(length))
        states = observation.states.to(self.model.device).float()
        scores, ids = self.probes[0].shortlist(states, SHORTLIST)
        distinct, columns = ids.unique(return_inverse=True)
        log_probs = [probe.log_probs(states) for probe in self.probes[1:]]
        traces = torch.stack([table[:, distinct] for table in log_probs]) if log_probs else None
        shown = self.matcher.prepare(states)
        white, units, expected, whitening = shown, EUCLIDEAN.norms(shown), None, None
        if self.distortion_model is not None:
            expected, whitening = self.distortion_model.expected(shown), self.distortion_model.whitening
            if whitening is not None:
                white, units = shown @ whitening, expected
        return Rows(
            shown, self.matcher.norms(shown), white, units, ids, scores, columns, traces, places, length,
            None if self.position_model is None else self.position_model(shown, length),
            None if self.pairwise_order is None else self.pairwise_order(shown), expected, whitening,
            torch.cat([self.probes[0].log_probs(part).half() for part in states.split(PART)])
            if self.matcher.sorted
            else None,
            {} if places is None or not log_probs else _missed(log_probs, places, length),
            None if self.first_tokens is None else self.first_tokens.nearest(states, SHORTLIST),
        )  # fmt: skip


def _missed(
    log_probs: Sequence[Float[Tensor, "rows v"]], places: Sequence[int], length: int
) -> dict[int, Float[Tensor, "offsets v"]]:
    """Return what rows predict (for each offset) about tokens shortly before them that have no row."""
    row_of, missed = {place: row for row, place in enumerate(places)}, {}
    for place in sorted(set(range(length)) - set(places)):
        rows = [row_of.get(place + offset) for offset in TRACES]
        if any(row is not None for row in rows):
            missed[place] = torch.stack([
                torch.zeros_like(table[0]) if row is None else table[row]
                for table, row in zip(log_probs, rows, strict=True)
            ])  # fmt: skip
    return missed
