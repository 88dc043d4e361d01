"""Vocabulary matching: recover a prompt from hidden states by matching candidate states (paper, sections 4 to 6)."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from hiddenlab.attacks.vocab_match.drive import Search, drive
from hiddenlab.attacks.vocab_match.epsilon import (
    Threshold,
    auto_threshold,
    calibrated_threshold,
    measure,
    parse_epsilon,
)
from hiddenlab.attacks.vocab_match.rank import SHORTLIST, WIDE_SHORTLIST, LazyModel, Proposer, check_proposal
from hiddenlab.attacks.vocab_match.screen import Screen
from hiddenlab.attacks.vocab_match.search import speculative, stepwise
from hiddenlab.attacks.vocab_match.shard import before_gap, behind_gap, with_rest
from hiddenlab.attacks.vocab_match.task import Task
from hiddenlab.channel import as_whole, by_channel
from hiddenlab.core import Observation, Progress, Public, Recovery, TokenRecovery, silent
from hiddenlab.errors import InputError, NotApplicableError
from hiddenlab.lens import lens_of
from hiddenlab.match import Matcher, choose_matcher
from hiddenlab.observation import check_observation
from hiddenlab.propose.adapt import Adapter
from hiddenlab.propose.openings import Openings
from hiddenlab.propose.probe import Probe
from hiddenlab.propose.store import adapter_for, openings_for, probe_for
from hiddenlab.slice import Slice
from hiddenlab.slice.load import parse_dtype
from hiddenlab.summary import NO_STATE

# The language model is loaded before the attack where the slice has at least one layer for so many of its.
LOAD_AHEAD = 8
DOUBT = 0.05  # wrong candidates within the threshold, expected among those tried for a token that counts as verified
SEARCHES = {"speculative": speculative, "greedy": stepwise}


@dataclass(frozen=True)
class Prepared:
    """What one channel at one site needs: how states are compared, in which order candidates come, what matches."""

    public: Public
    slice: Slice
    matcher: Matcher
    proposer: Proposer
    threshold: Threshold
    screen: Screen | None


class VocabMatch:
    """Recover tokens by running candidates through the open weights and matching their states.

    Knows: the model's weights, the released states, the channel. Does not know: tokens, permutations, noise.

    Args:
        search: ``speculative`` (a probe's guess verified in one pass) or ``greedy`` (the paper's algorithms).
        proposal: ``probe+lm``, ``probe``, ``lm`` or ``vocab``: the order in which candidates are tried.
        distance: ``auto``, ``l1``, ``l2``, ``sorted-l1`` or ``sorted-l2``.
        epsilon: ``auto``, ``calibrated`` or a number (an absolute distance, as in the paper).
        budget: candidates for one position at most; None searches the whole vocabulary.
        batch: prompts attacked at once. seed: of calibration. progress: where progress is reported.
        screen: run large batches in a faster dtype first, where the processor has one (not in greedy search, which is
            the paper's).
    """

    def __init__(
        self,
        search: str = "speculative",
        proposal: str = "probe+lm",
        distance: str = "auto",
        epsilon: str = "auto",
        budget: int | None = None,
        batch: int = 32,
        seed: int = 0,
        screen: bool = True,
        progress: Progress = silent,
    ) -> None:
        if search not in SEARCHES:
            raise InputError(f"unknown search {search!r}; known are {', '.join(SEARCHES)}")
        check_proposal(proposal)
        parse_epsilon(epsilon)
        if budget is not None and budget < 1:
            raise InputError(f"the budget must be at least 1 candidate, not {budget}")
        if batch < 1:
            raise InputError(f"the batch must be at least 1 prompt, not {batch}")
        self.search, self.proposal, self.distance, self.epsilon = search, proposal, distance, epsilon
        self.budget, self.batch, self.seed, self.progress = budget, batch, seed, progress
        self.screen = screen and search != "greedy"
        self._prepared: Prepared | None = None
        self._model: tuple[Slice, LazyModel] | None = None
        self._screen: Screen | None = None

    def setup(self, observation: Observation, slice: Slice, generator: torch.Generator) -> dict[str, float]:
        """Train or load the probe and measure epsilon, for all observations of one channel.

        Returns:
            ``probe_seconds`` (of the probe and the tables beside it; 0 where all were cached) and
            ``epsilon_relative`` (fraction of a row's norm), with ``epsilon_floor`` and ``epsilon_gap``, between
            which it was put.
        """
        prepared, seconds = self.prepare(observation, slice)
        threshold = prepared.threshold
        return {
            "probe_seconds": seconds,
            "epsilon_relative": threshold.relative,
            "epsilon_floor": threshold.floor,
            "epsilon_gap": threshold.gap,
        }

    def prepare(self, observation: Observation, slice: Slice) -> tuple[Prepared, float]:
        """What ``setup`` makes, kept for the next observation of the same channel, and the seconds probes took.

        Raises:
            InputError: the observation does not fit the slice.
        """
        check_observation(observation, slice)
        if observation.states.shape[1] != slice.width and lens_of(observation.public) is None:
            raise NotApplicableError(
                "these rows are parts of an attention's output; see the attack partial-sums"
            )
        public = as_whole(observation.public)
        seconds = 0.0
        kept = self._prepared
        if kept is None or (kept.public, kept.slice) != (public, slice):
            matcher = choose_matcher(self.distance, public)
            # The language model first: while it is loaded its file is in memory as well, when little else is.
            proposer, seconds = self._proposer(slice, public)
            threshold = self._threshold(slice, public, matcher)
            screen = self._screened(slice, public) if threshold.separable else None
            kept = Prepared(public, slice, matcher, proposer, threshold, screen)
            self._prepared = kept
        return kept, seconds

    def _screened(self, slice: Slice, public: Public) -> Screen | None:
        if not self.screen or not Screen.pays(slice):
            return None
        if self._screen is None or self._screen.of is not slice:
            self._screen = Screen(slice)
        if public.columns_permuted is not None:
            # Every prompt will need it: now, so that the time of the attack is the attack's.
            _ = self._screen.slice
        return self._screen

    def _proposer(self, slice: Slice, public: Public) -> tuple[Proposer, float]:
        probe: Probe | None = None
        openings: Openings | None = None
        adapter: Adapter | None = None
        seconds = 0.0
        model = None
        if "lm" in self.proposal:
            if self._model is None or self._model[0] is not slice:
                self._model = (slice, LazyModel(slice))
            model = self._model[1]
            if "probe" not in self.proposal or model.layers <= LOAD_AHEAD * slice.site.layer:
                # Now, so that the time of the attack is the attack's, and before the probe: while a model is
                # loaded its file is in memory as well.
                _ = model.opened
        if "probe" in self.proposal:
            probe, trained = probe_for(slice, public, progress=self.progress)
            openings, made = openings_for(slice, public, self.progress)
            adapter, described = adapter_for(slice, self.progress)
            seconds = trained + made + described
        proposer = Proposer(slice.vocab_size, probe, model, openings, adapter)
        return proposer, seconds

    def _threshold(self, slice: Slice, public: Public, matcher: Matcher) -> Threshold:
        number = parse_epsilon(self.epsilon)
        if number is not None:
            return Threshold(float("nan"), float("nan"), float("nan"), absolute=number)
        self.progress("measuring epsilon", 0, 1)
        sample = measure(slice, public, matcher, self.seed)
        self.progress("measuring epsilon", 1, 1)
        if self.epsilon == "calibrated":
            return calibrated_threshold(sample, self.seed)
        coarser = max(torch.finfo(slice.dtype).eps, torch.finfo(parse_dtype(public.provider_dtype)).eps)
        return auto_threshold(sample, coarser)

    def recover(self, observation: Observation, slice: Slice, generator: torch.Generator) -> Recovery:
        """Recover one prompt; see ``recover_batch``."""
        return self.recover_batch([observation], slice, generator)[0]

    def recover_batch(
        self, observations: Sequence[Observation], slice: Slice, generator: torch.Generator
    ) -> list[Recovery]:
        """Recover prompts of one channel together; every answer is the same as alone, up to rounding.

        Raises:
            InputError: an observation does not fit the slice.
        """
        groups = by_channel(observations, self.batch)
        return [one for group in groups for one in self._recover_group(group, slice, generator)]

    def _recover_group(
        self, observations: Sequence[Observation], slice: Slice, generator: torch.Generator
    ) -> list[Recovery]:
        for observation in observations:
            check_observation(observation, slice)
        probe = self.prepare(observations[0], slice)[0].proposer.probe
        parts = [before_gap(observation) for observation in observations]
        matched = iter(self._match([part for part in parts if part is not None], slice))
        return [
            with_rest(None if part is None else next(matched), behind_gap(observation, probe), observation)
            for observation, part in zip(observations, parts, strict=True)
        ]

    def _match(self, observations: Sequence[Observation], slice: Slice) -> list[Recovery]:
        if not observations:
            return []
        assert self._prepared is not None
        started, threshold = time.perf_counter(), self._prepared.threshold
        with torch.inference_mode():
            tasks = self._tasks(observations, slice)
            searches: list[Search] = [SEARCHES[self.search](task) for task in tasks]
            spent = time.perf_counter() - started
            results = drive(searches, self.progress, share=spent)
        recoveries = []
        for task, (_, cost) in zip(tasks, results, strict=True):
            reason = "complete"
            if task.exhausted:
                reason = "budget exhausted" if self.budget else "vocabulary exhausted"
            if task.foreign:
                reason = NO_STATE
            recoveries.append(
                Recovery(
                    believed(task.found, threshold.chance),
                    cost.evaluated,
                    cost.calls,
                    cost.seconds,
                    reason,
                    epsilon=float(task.limits.median()),
                )
            )
        return recoveries

    def _tasks(self, observations: Sequence[Observation], slice: Slice) -> list[Task]:
        assert self._prepared is not None
        public, matcher = self._prepared.public, self._prepared.matcher
        proposer, threshold = self._prepared.proposer, self._prepared.threshold
        states = [o.states.to(slice.device).float() for o in observations]
        scores = ids = [None] * len(states)
        if proposer.probe is not None and self.search == "speculative":
            counts = [len(s) for s in states]
            width = WIDE_SHORTLIST if proposer.asks_model(slice.site.layer) else SHORTLIST
            top, tokens = proposer.probe.shortlist(torch.cat(states), width)
            scores, ids = top.split(counts), tokens.split(counts)  # type: ignore[assignment]
        tasks = []
        for raw, score, shortlist in zip(states, scores, ids, strict=True):
            rows = matcher.prepare(raw)
            tasks.append(
                Task(
                    slice,
                    matcher,
                    proposer,
                    raw,
                    rows,
                    threshold.limits(matcher, rows),
                    slice.prefix(offset=public.prefix_tokens),
                    not public.rows_permuted,
                    self.budget,
                    shortlist,
                    score,
                    overlapping=not (threshold.separable or threshold.absolute),
                    screen=self._prepared.screen,
                )
            )
        return tasks

    def __repr__(self) -> str:
        return (
            f"VocabMatch({self.search}, {self.proposal}; knows the weights, the released states and the channel, "
            "not tokens, permutations or noise)"
        )


def believed(tokens: Sequence[TokenRecovery], chance: float) -> tuple[TokenRecovery, ...]:
    """Tokens, those unverified for which a wrong candidate among so many tried could well be within the threshold.

    Where noise or few numbers leave right and wrong candidates apart by chance alone, the first within the threshold
    is still the best answer, but it proves nothing.

    Args:
        chance: of one wrong candidate, as measured (``Threshold``).
    """
    return tuple(
        replace(token, verified=token.verified and chance * token.evaluated <= DOUBT) for token in tokens
    )
