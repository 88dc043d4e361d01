"""Recover a prompt from hidden states by running candidate tokens and matching states (paper, sections 4 to 6)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from pathlib import Path

import torch

from hiddenlab.attacks.vocab_match.behind_map import behind_map
from hiddenlab.attacks.vocab_match.calibration import CANDIDATES, calibrate
from hiddenlab.attacks.vocab_match.context import confirmed_by_context
from hiddenlab.attacks.vocab_match.known import with_known
from hiddenlab.attacks.vocab_match.printed import as_printed
from hiddenlab.attacks.vocab_match.search import speculative
from hiddenlab.attacks.vocab_match.task import Task
from hiddenlab.attacks.vocab_match.visible_rows import before_gap, behind_gap, with_rest
from hiddenlab.base import Attack
from hiddenlab.errors import InputError, NotApplicableError
from hiddenlab.matching.batching import Search, run_batched
from hiddenlab.matching.distance import Matcher, choose_matcher
from hiddenlab.matching.epsilon import Threshold, kept_threshold, parse_epsilon, threshold_for
from hiddenlab.matching.explained import explained_by
from hiddenlab.matching.observed_context import StateReader
from hiddenlab.matching.ranking import SHORTLIST, WIDE_SHORTLIST, LazyModel, Proposer, check_proposal
from hiddenlab.matching.screening import Screen
from hiddenlab.models import TruncatedModel
from hiddenlab.models.load import load_config
from hiddenlab.models.rest import continues
from hiddenlab.observation import parts_of_attention
from hiddenlab.preparations import as_whole, by_channel
from hiddenlab.projections import projection_of
from hiddenlab.proposals.expected_states import ExpectedStates
from hiddenlab.proposals.first_token_table import FirstTokenTable
from hiddenlab.proposals.in_context import Adapter
from hiddenlab.proposals.probe import Probe
from hiddenlab.proposals.regressions import (
    collect_layers,
    expected_states_for,
    keep_known_rows,
    known_rows_for,
    regression_for,
    text_rows_for,
)
from hiddenlab.proposals.ridge import FEWEST_ROWS, KnownRows
from hiddenlab.proposals.store import adapter_for, first_token_table_for, has_trained_probe, probe_for
from hiddenlab.row_facts import extra_rows
from hiddenlab.secret_maps import is_mapped
from hiddenlab.summary import NO_STATE
from hiddenlab.types import AttackResult, Observation, ObservationInfo, TokenPrediction
from hiddenlab.utils.clock import Clock, Rental

# The language model is loaded before the attack where it has at most so many layers for each of the truncated model's.
LOAD_AHEAD = 8
# A regression costs about one product of the embedding table and a square matrix; the search may cost so many times as
# much before it is computed again.
REFIT_PATIENCE = 6.0
FEWEST_TOGETHER = 400  # rows of prompts that are attacked at once before any was learned from
# Most wrong candidates expected within the threshold, among those tried, for a token to count as verified.
MAX_CHANCE_MATCHES = 0.05
SEARCHES = {"speculative": speculative, "greedy": as_printed}
SETUPS = ("quick", "full")
OWN = {"search": "speculative", "proposal": "probe+lm", "distance": "auto", "epsilon": "auto"}
# The attack of the paper as printed: Algorithms 1, 4, 5 and 6, L1 distances, epsilon of Appendix D.
PRESETS = {"paper": {"search": "greedy", "proposal": "lm", "distance": "auto", "epsilon": "calibrated"}}


@dataclass(frozen=True)
class Prepared:
    """Everything that matching needs for one channel at one site: matcher, order of candidates, threshold, screen.

    Attributes:
        expected: the state of every token, where rows are behind a secret map.
    """

    info: ObservationInfo
    model: TruncatedModel
    matcher: Matcher
    proposer: Proposer
    threshold: Threshold
    screen: Screen | None
    expected: ExpectedStates | None = None


class VocabMatch(Attack):
    """Recover tokens by running candidates through the open weights and matching their states.

    Knows: the model's weights, the released states, the channel. Does not know: tokens, permutations, maps, noise.

    Args:
        preset: ``paper``: Algorithms 1, 4, 5 and 6 as printed. It sets ``search=greedy``, ``proposal=lm``,
            ``distance=auto`` and ``epsilon=calibrated`` where these are not given.
        search: ``speculative`` (a probe's guess verified in one pass) or ``greedy`` (the paper's algorithms: one token
            after another, and the first candidate within epsilon in the order of the proposal); default speculative.
        proposal: ``probe+lm``, ``probe``, ``lm`` or ``vocab``: the order in which candidates are tried; default
            probe+lm.
        distance: ``auto``, ``l1``, ``l2``, ``sorted-l1`` or ``sorted-l2``; default auto.
        epsilon: ``auto``, ``calibrated`` (the ternary search of the paper's Appendix D over its own attack, with the
            budget of this one) or a number (an absolute distance, as in the paper); default auto.
        calibration_texts: texts of the attacker's own on which ``calibrated`` searches.
        budget: candidates for one position at most; None searches the whole vocabulary.
        batch: prompts attacked at once.
        setup: ``quick`` begins at once with a regression from few states, which grows with every verified token, and
            loads the language model when a search has missed it long enough; ``full`` trains a probe and loads
            everything before the first prompt.
        without: parts left out, joined by ``+``. ``screening``: large batches in a faster dtype first, where the
            processor has one (never in greedy search, which is the paper's). ``failures``: learning from candidates
            that failed. ``reading``: the language model's last layers read the observed rows, in place of its reading
            the tokens found. ``opener``: a text that the language model reads before the prompt. ``first-tokens``: the
            table of states of first tokens.

    Attributes:
        shares_key: the known texts of an observation went through the same secret map as its prompt.
    """

    secret_maps = extra_rows = True
    shares_key: bool = False
    use_when = "you have the state of every token, in order or shuffled, and the weights of the model"
    parts = ("screening", "failures", "reading", "opener", "first-tokens")

    def __init__(
        self,
        preset: str | None = None,
        search: str | None = None,
        proposal: str | None = None,
        distance: str | None = None,
        epsilon: str | None = None,
        calibration_texts: int = 50,
        budget: int | None = None,
        batch: int = 32,
        without: str = "",
        setup: str = "quick",
    ) -> None:
        if preset is not None and preset not in PRESETS:
            raise InputError(f"unknown preset {preset!r}; known are {', '.join(PRESETS)}")
        given = {"search": search, "proposal": proposal, "distance": distance, "epsilon": epsilon}
        chosen = OWN if preset is None else PRESETS[preset]
        chosen = chosen | {name: value for name, value in given.items() if value is not None}
        search, proposal, distance, epsilon = (chosen[name] for name in given)
        if setup not in SETUPS:
            raise InputError(f"unknown setup {setup!r}; known are {', '.join(SETUPS)}")
        if search not in SEARCHES:
            raise InputError(f"unknown search {search!r}; known are {', '.join(SEARCHES)}")
        check_proposal(proposal)
        parse_epsilon(epsilon)
        if budget is not None and budget < 1:
            raise InputError(f"the budget must be at least 1 candidate, not {budget}")
        if calibration_texts < 1:
            raise InputError(f"epsilon is calibrated on at least 1 text, not {calibration_texts}")
        if batch < 1:
            raise InputError(f"the batch must be at least 1 prompt, not {batch}")
        self.search, self.proposal, self.distance, self.epsilon = search, proposal, distance, epsilon
        self.budget, self.batch, self.calibration_texts = budget, batch, calibration_texts
        self.without, self.setup = self.left_out(without), setup
        self._prepared: Prepared | None = None
        self._lm: tuple[TruncatedModel, LazyModel] | None = None
        self._screen: Screen | None = None
        self._known: KnownRows | None = None  # what the prepared probe is a regression of
        self._fitted_rows, self._refit = 0, Rental(0.0)
        self._clock = Clock()

    def _forget(self) -> None:
        self._prepared = self._known = None

    def reset(self) -> None:
        """Forget when language model and screen were needed; what was verified is learned only where ``learns``."""
        prepared = self._prepared
        waiting = [self._screen, None if self._lm is None else self._lm[1]]
        for held in [*waiting, None if prepared is None else prepared.proposer.reader]:
            if held is not None:
                held.reset()

    def _fit(self, info: ObservationInfo) -> dict[str, float | str]:
        """Prepare a probe and measure epsilon, for all observations of one channel.

        Returns:
            ``probe`` (``trained``, ``regression`` or ``none``), ``probe_seconds`` (of the probe and its tables; 0 where
                all were cached) and ``epsilon_relative`` (share of a row's norm), with ``epsilon_floor`` and
                ``epsilon_gap``, between which it was chosen.
        """
        prepared, seconds = self.prepare(info)
        threshold = prepared.threshold
        kind = (
            "none" if prepared.proposer.probe is None else "trained" if self._known is None else "regression"
        )
        return {
            "probe": kind,
            "probe_seconds": seconds,
            "epsilon_relative": threshold.relative,
            "epsilon_floor": threshold.floor,
            "epsilon_gap": threshold.gap,
        }

    def prepare(self, info: ObservationInfo) -> tuple[Prepared, float]:
        """Prepare what a channel needs and keep it for its next observation; also return the seconds that probes took.

        Raises:
            NotApplicableError: the rows are no states.
        """
        if parts_of_attention(info):
            raise NotApplicableError(
                "these rows are parts of an attention's output; see the attack partial-sums"
            )
        model, info = self.model, as_whole(info)
        seconds = 0.0
        kept = self._prepared
        if kept is None or (kept.info, kept.model) != (info, model):
            self._known = None
            matcher, expected = choose_matcher(self.distance, info), None
            if matcher.invariant is not None:
                if self._printed or self.epsilon == "calibrated":
                    raise NotApplicableError("the paper's search compares rows; a secret map hides them")
                expected, seconds = expected_states_for(model, info, self.progress)
            # The language model is loaded first, while memory is free: its file is in memory as well.
            proposer, made = self._proposer(model, info)
            seconds += made
            threshold = self._threshold(model, info, matcher, proposer)
            matcher = threshold.measured_by(matcher)
            screen = self._screened(model, info) if threshold.separable else None
            kept = self._prepared = Prepared(info, model, matcher, proposer, threshold, screen, expected)
        return kept, seconds

    def expect(self, info: ObservationInfo, models: Sequence[TruncatedModel]) -> None:
        """Collect the states that regressions of several layers start from, from the same passes."""
        regressed = (
            self._begins_at_once
            and not is_mapped(info)
            and info.columns_permuted is None
            and info.site.stream == "resid"
        )
        if regressed and not parts_of_attention(info):
            collect_layers(models, as_whole(info), self.progress)

    @property
    def _printed(self) -> bool:
        return self.search == "greedy"

    @property
    def _begins_at_once(self) -> bool:
        return self.setup == "quick" and "probe" in self.proposal

    def _screened(self, model: TruncatedModel, info: ObservationInfo) -> Screen | None:
        if self._printed or is_mapped(info) or "screening" in self.without or not Screen.pays(model):
            return None
        if self._screen is None or self._screen.of is not model:
            self._screen = Screen(model)
        if info.columns_permuted is not None:
            # Every prompt needs it: load it now, so that loading does not count in the attack's time.
            self._screen.load()
        return self._screen

    def _proposer(self, model: TruncatedModel, info: ObservationInfo) -> tuple[Proposer, float]:
        probe: Probe | None = None
        first_tokens: FirstTokenTable | None = None
        describe: Callable[[], Adapter | None] = lambda: None  # noqa: E731
        lm = reader = None
        seconds, quick = 0.0, self._begins_at_once
        reads = self._may_read(info) and continues(model, load_config(model.ref))
        if "lm" in self.proposal and not reads:
            opener = not self._printed and "opener" not in self.without
            if self._lm is None or self._lm[0] is not model:
                patient = quick and not is_mapped(info)
                self._lm = (model, LazyModel(model, self._clock, patient=patient, opener=opener))
            lm = self._lm[1]
            if "probe" not in self.proposal or (not quick and lm.layers <= LOAD_AHEAD * model.site.layer):
                # Load it now, so that loading does not count in the attack's time, and before the probe: its
                # file is in memory as well.
                _ = lm.opened
        if "probe" in self.proposal and not is_mapped(info):
            probe, trained = self._probe(model, info, quick)
            made = 0.0
            if not self._printed and "first-tokens" not in self.without:
                first_tokens, made = first_token_table_for(model, info, self.progress)

            @cache
            def describe() -> Adapter | None:
                if "failures" in self.without:
                    return None
                with self._clock.stopped():
                    return adapter_for(model, self.progress)[0]

            before = self._clock.preparing
            if reads and probe is not None:
                text = text_rows_for(model, info, self.progress)
                reader = StateReader(model, text, probe, self._clock, patient=quick)
                if not quick and reader.layers <= LOAD_AHEAD * model.site.layer:
                    _ = reader.rest
            if not quick:
                describe()
            seconds = trained + made + self._clock.preparing - before
        return Proposer(model.vocab_size, probe, lm, first_tokens, reader, describe), seconds

    def _probe(self, model: TruncatedModel, info: ObservationInfo, quick: bool) -> tuple[Probe | None, float]:
        """Return the probe, and the seconds of making it; None where the attacker's own states overflow."""
        # Sorted coordinates need a network, which is trained.
        if not quick or info.columns_permuted is not None or has_trained_probe(model, info):
            return probe_for(model, info, progress=self.progress)
        known, seconds = known_rows_for(model, info, self.progress)
        if not self.learns:
            known = known.attackers_own()
        if len(known) < FEWEST_ROWS:
            return None, seconds
        self._known = known
        return self._regression(info), seconds

    def _may_read(self, info: ObservationInfo) -> bool:
        """Return whether rows are whole states in a known order, which the layers behind them can read."""
        known = info.columns_permuted is None and not info.rows_permuted and not info.prefix_tokens
        asked = self.search == "speculative" and self.proposal == "probe+lm" and "reading" not in self.without
        own = projection_of(info) is None and not is_mapped(info) and not extra_rows(info)
        return asked and known and own

    def _regression(self, info: ObservationInfo) -> Probe:
        """Return the regression of the known rows."""
        assert self._known is not None
        model = self.model
        probe, self._fitted_rows = regression_for(model, info, self._known, self.progress)
        self._refit = Rental(REFIT_PATIENCE * model.embedding.numel() * model.width / model.layer_weights)
        return probe

    @property
    def _may_learn(self) -> bool:
        """Whether verified rows make the probe better.

        Behind a given epsilon, and where right and wrong distances overlap, what is verified may be wrong. It would
        stay in the cache, so nothing is learned.
        """
        if not self.learns or self._known is None or self._prepared is None:
            return False
        return self._prepared.threshold.absolute is None and self._prepared.threshold.separable

    def _learn(self, tasks: Sequence[Task], evaluated: Sequence[int]) -> None:
        """Add the verified rows of prompts to those that the probe is a regression of.

        The regression is computed again when the search has cost more than that several times over.

        Args:
            evaluated: how many tokens each prompt's search ran.
        """
        if not self._may_learn:
            return
        assert self._known is not None and self._prepared is not None
        doubt, pairs = self._prepared.threshold.doubt, []
        for task in tasks:
            pairs += [
                (task.raw[t.row], t.token) for t in mark_chance_matches(task.found, doubt) if t.verified
            ]
        if not pairs:
            return
        with self._clock.stopped():
            self._known.add(
                torch.stack([row for row, _ in pairs]), torch.tensor([token for _, token in pairs])
            )
            keep_known_rows(self.model, self._prepared.info, self._known)
            due = self._refit.due(float(sum(evaluated)))
            if due and self._known.outgrown(self._fitted_rows):
                proposer = replace(self._prepared.proposer, probe=self._regression(self._prepared.info))
                self._prepared = replace(self._prepared, proposer=proposer)
                if proposer.reader is not None and proposer.probe is not None:
                    proposer.reader.read_by(proposer.probe)

    def _threshold(
        self, model: TruncatedModel, info: ObservationInfo, matcher: Matcher, proposer: Proposer
    ) -> Threshold:
        self.progress("measuring epsilon", 0, 1)
        if self.epsilon == "calibrated":
            # Whatever this search proposes: the paper's order is that of the language model.
            budget = min(self.budget or CANDIDATES, CANDIDATES)
            key = {"calibrated": self.calibration_texts, "budget": budget, "seed": self.seed}
            lm = proposer.lm if self._printed and proposer.lm is not None else None
            papers = Proposer(model.vocab_size, None, lm or LazyModel(model, self._clock, opener=False))
            with self._clock.stopped():
                threshold = kept_threshold(
                    model, info, matcher,
                    lambda: calibrate(
                        model, info, matcher, papers, self.seed,
                        texts=self.calibration_texts, budget=budget, progress=self.progress,
                    ),
                    key, [Path(__file__).parent],
                )  # fmt: skip
        else:
            threshold = threshold_for(model, info, matcher, self.seed, self.epsilon)
        self.progress("measuring epsilon", 1, 1)
        return threshold

    def _recover_batch(self, observations: Sequence[Observation]) -> list[AttackResult]:
        """Recover prompts of one channel together, as many at once as the probe has learned from."""
        results: list[AttackResult] = []
        for same in by_channel(observations, self.batch):
            self.prepare(same[0].info)
            while same:
                group, same = self._split(same)
                results += self._recover_group(group)
        return results

    def _split(self, observations: Sequence[Observation]) -> tuple[list[Observation], list[Observation]]:
        """Return the first observations and the others.

        What a probe learns from the first prompts saves more than running many at once does. So a group has about as
        many rows as were verified before it. Behind a map and noise a prompt has many hypotheses, and goes alone.
        """
        most = 1 if self._prepared is not None and self._prepared.threshold.apart else len(observations)
        if self._may_learn:
            assert self._known is not None
            rows = accumulate(len(observation.states) for observation in observations)
            most = sum(count <= max(FEWEST_TOGETHER, self._known.verified) for count in rows)
        return list(observations[: max(1, most)]), list(observations[max(1, most) :])

    def _recover_group(self, observations: Sequence[Observation]) -> list[AttackResult]:
        model = self.model
        probe = self.prepare(observations[0].info)[0].proposer.probe
        parts = [before_gap(observation) for observation in observations]
        matched = iter(self._match([part for part in parts if part is not None], model))
        return [
            with_rest(None if part is None else next(matched), behind_gap(observation, probe), observation)
            for observation, part in zip(observations, parts, strict=True)
        ]

    def _match(self, observations: Sequence[Observation], model: TruncatedModel) -> list[AttackResult]:
        if not observations:
            return []
        assert self._prepared is not None
        started, threshold, aside = self._clock.now(), self._prepared.threshold, self._clock.preparing
        with torch.inference_mode():
            tasks = self._tasks(observations, model)
            search = SEARCHES[self.search] if self._prepared.expected is None else behind_map
            searches: list[Search] = [search(task) for task in tasks]
            spent = self._clock.now() - started
            results = run_batched(searches, self.progress, share=spent, now=self._clock.now)
            self._learn(tasks, [cost.evaluated for _, cost in results])
        if self._clock.preparing > aside:
            self.measured = {**self.measured, "estimation_seconds": self._clock.preparing - aside}
        recoveries = []
        for task, (_, cost) in zip(tasks, results, strict=True):
            reason = "complete"
            if task.exhausted:
                reason = "budget exhausted" if self.budget else "vocabulary exhausted"
            if task.foreign:
                reason = NO_STATE
            recoveries.append(
                AttackResult(
                    confirmed_by_context(mark_chance_matches(task.found, threshold.doubt), task.extra, model),
                    cost.evaluated,
                    cost.calls,
                    cost.seconds,
                    reason,
                    epsilon=float(task.limits.median()),
                )
            )
        return recoveries

    def _tasks(self, observations: Sequence[Observation], model: TruncatedModel) -> list[Task]:
        prepared = self._prepared
        assert prepared is not None
        info, matcher, expected = prepared.info, prepared.matcher, prepared.expected
        proposer, threshold = prepared.proposer, prepared.threshold
        scores = ids = [None] * len(states := [o.states.to(model.device).float() for o in observations])
        if proposer.probe is not None and self.search == "speculative":
            counts = [len(s) for s in states]
            width = WIDE_SHORTLIST if proposer.asks_model(model.site.layer) else SHORTLIST
            top, tokens = proposer.probe.shortlist(torch.cat(states), width)
            scores, ids = top.split(counts), tokens.split(counts)  # type: ignore[assignment]
        tasks = []
        for one, raw, score, shortlist in zip(observations, states, scores, ids, strict=True):
            bound = with_known(matcher, one, raw, model) if self.shares_key else matcher.bound(raw)
            # Rows of known texts come first in their frame.
            rows = bound.prepare(raw)[0 if bound.frame is None else bound.frame.count :]
            # Mixed rows may be more than there are tokens; nothing reads one of them alone.
            task = Task(
                model, bound, proposer, raw[: len(rows)], rows, threshold.limits(matcher, rows),
                model.prefix(offset=info.prefix_tokens), not info.rows_permuted or expected is not None,
                self.budget, shortlist, score, screen=prepared.screen,
                overlapping=not (threshold.separable or threshold.absolute),
                explained=explained_by(bound.frame, expected), apart=threshold.apart,
                extra=0 if bound.frame is not None else bound.extra,
            )  # fmt: skip
            tasks.append(task)
        return tasks

    def __repr__(self) -> str:
        return (
            f"VocabMatch({self.search}, {self.proposal}; knows the weights, the released states and the channel, "
            "not tokens, permutations, maps or noise)"
        )


def mark_chance_matches(tokens: Sequence[TokenPrediction], doubt: float) -> tuple[TokenPrediction, ...]:
    """Return the tokens; mark as unverified those that a wrong candidate could well have matched by chance.

    Where noise or few numbers leave right and wrong candidates apart by chance alone, the first within the threshold is
    still the best answer, but it proves nothing.

    Args:
        doubt: chance of one wrong candidate over that of the right one, as measured (``Threshold``).
    """
    return tuple(
        replace(token, verified=token.verified and doubt * token.evaluated <= MAX_CHANCE_MATCHES)
        for token in tokens
    )
