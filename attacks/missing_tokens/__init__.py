"""Recover tokens that no row shows by searching sequences that explain the next observed row.

This is the generalised vocabulary-matching attack, with priors (paper, appendix C, Algorithm 3). Between two observed
rows lie g unknown tokens. Algorithm 3 enumerates V^(g+1) sequences (the unknown tokens and the row's own); the paper
calls it a theoretical threat. Here four sources order the search: the language model, probes that predict *earlier*
tokens from the observed row (attention leaves traces of them), the probe for its own token, and the distances of the
sequences already run. Distances fall with every right token of a sequence, so that one slot can be searched while the
others are held.

Behind one layer no sequence needs to be tried: a row gives a sum to which every missing token contributes separately,
and the tokens are solved for (``attention_sums``). A solution is run like any other sequence, and counts once it
matches.
"""

import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from hiddenlab.attacks.missing_tokens import clearance
from hiddenlab.attacks.missing_tokens.attention_sums import AttentionSums
from hiddenlab.attacks.missing_tokens.gap import Gap
from hiddenlab.attacks.missing_tokens.gap_view import View
from hiddenlab.attacks.vocab_match import Prepared, VocabMatch
from hiddenlab.base import Attack
from hiddenlab.errors import InputError, NotApplicableError
from hiddenlab.matching.ranking import Continuations
from hiddenlab.matching.screening import counted
from hiddenlab.models import Prefix, TruncatedModel
from hiddenlab.preparations import as_whole
from hiddenlab.proposals.probe import Probe
from hiddenlab.proposals.store import probes_for
from hiddenlab.text import count_of
from hiddenlab.types import AttackResult, Observation, ObservationInfo, TokenPrediction

REACH = 3  # how many tokens before a row probes predict
BEHIND = 512  # sequences tried for a row behind tokens that were not found


class MissingTokenSearch(Attack):
    """Recover every token up to the last observed row, including those that no row shows.

    Rows before the first gap are matched one by one (``vocab-match``). At a gap behind one layer the missing tokens are
    solved for, from the gap's row and those that follow it at once; what one gap leaves open is solved for again with
    the next one's rows. Then, and at other layers, whole sequences are run: first those that the priors favour, then
    one slot at a time of the nearest sequences. A gap that is not closed within the budget gets the nearest sequence,
    unverified. The search goes on behind it with few candidates a row, since none can match there.

    Knows: the weights, the released rows and their positions in the prompt. Does not know: the other rows, tokens.

    Args:
        budget: sequences tried for one gap at most; an unknown token can take V values.
        breadth: nearest sequences of which single slots are searched at once; the beam of the priors, whose slots are
            searched later as well, is four times as wide.
        longest: gaps of more unknown tokens are not searched: they get the nearest of what the priors propose.
        sums: solve for missing tokens where that is possible: behind one layer (or from the second one's queries, keys
            and values), without noise or unknown prefix, though rows may be rounded; up to 64 tokens at once, and of
            more than 16 no more than eight for each row used, whatever ``longest`` says.
        proposal: ``probe+lm`` or ``probe``. distance, epsilon: as in ``vocab-match``.
        without: ``screening``, or nothing.
    """

    parts = ("screening",)
    use_when = (
        "some rows of the prompt are missing, as they are for one node of Cascade, and no noise was added"
    )

    def __init__(
        self,
        budget: int = 200_000,
        breadth: int = 8,
        longest: int = 8,
        sums: bool = True,
        proposal: str = "probe+lm",
        distance: str = "auto",
        epsilon: str = "auto",
        without: str = "",
    ) -> None:
        if min(budget, breadth, longest) < 1:
            raise InputError(
                f"budget, breadth and longest must be at least 1, not {budget}, {breadth} and {longest}"
            )
        if "probe" not in proposal:
            raise InputError(
                f"the search for missing tokens cannot do without the probe; {proposal!r} has none"
            )
        self.budget, self.breadth, self.longest = budget, breadth, longest
        self.sums = sums
        self.left_out(without)
        self.matching = VocabMatch(
            proposal=proposal, distance=distance, epsilon=epsilon, without=without, setup="full"
        )
        self._earlier: tuple[Prepared, list[Probe], clearance.Clearance] | None = None
        self._named: tuple[TruncatedModel, ObservationInfo, AttentionSums] | None = None

    def _forget(self) -> None:
        self._named = None

    def reset(self) -> None:
        """Forget when the screen was needed; see ``VocabMatch.reset``."""
        self.matching.reset()

    def _fit(self, info: ObservationInfo) -> dict[str, float | str]:
        """Prepare epsilon and the probes for the rows' own and for earlier tokens; see ``VocabMatch``."""
        self.matching.progress = self.progress
        measured = self.matching.fit(info, self.model, self.seed).measured
        *_, seconds = self._prepare(info)
        self._names(info)
        return {**measured, "probe_seconds": float(measured["probe_seconds"]) + seconds}

    def _prepare(self, info: ObservationInfo) -> tuple[list[Probe], clearance.Clearance, float]:
        """Return the probes for tokens before a row, the clearance, and the seconds of training.

        There is one probe for each offset from 1 to ``REACH``. The clearance says how near right and wrong tokens there
        bring the row.
        """
        prepared, _ = self.matching.prepare(info)
        seconds = 0.0
        if self._earlier is None or self._earlier[0] is not prepared:
            probes, seconds = probes_for(self.model, prepared.info, range(1, REACH + 1), self.progress)
            measured = clearance.measure(self.model, prepared.info, prepared.matcher, self.seed)
            self._earlier = prepared, probes, measured
        return *self._earlier[1:], seconds

    def _names(self, info: ObservationInfo) -> AttentionSums | None:
        """Return the solver for missing tokens; None where solving is impossible or not wanted."""
        model = self.model
        if not self.sums or not AttentionSums.applies(info, model):
            return None
        info = as_whole(info)
        if self._named is None or self._named[:2] != (model, info):
            self.progress("tabulating the first layer", 0, 1)
            self._named = model, info, AttentionSums(model, info, self.seed, self.progress)
        return self._named[2]

    def _recover(self, observation: Observation) -> AttackResult:
        """Recover one prompt.

        Raises:
            NotApplicableError: rows in unknown order, or of layer 0, where a row does not depend on other tokens.
        """
        info, model = observation.info, self.model
        if info.rows_permuted:
            raise NotApplicableError("the search for missing tokens needs to know where each row stands")
        if info.site.stream == "embed":
            raise NotApplicableError(
                "rows of layer 0 say nothing of other tokens; no gap can be closed there"
            )
        earlier, clearance, _ = self._prepare(info)
        prepared, _ = self.matching.prepare(info)
        positions = list(info.positions or range(len(observation.states)))
        names = self._names(info)
        started, before = time.perf_counter(), self._counters(model, prepared)
        lead = next((i for i, p in enumerate(positions) if p != i), len(positions))
        predictions: list[TokenPrediction] = []
        epsilon = None
        if lead:
            whole = replace(info, positions=None)
            first = self.matching.recover(Observation(observation.states[:lead], whole))
            predictions, epsilon = list(first.tokens), first.epsilon
        lm = Continuations(prepared.proposer.lm, model.special_ids)
        rows = {position: row for row, position in enumerate(positions)}
        searched = dict[int, bool]()  # rows that were not matched, and whether they were searched for
        left = set[int]()  # places in gaps that were not closed
        unclear = set[int]()  # rows that wrong tokens before them would match too
        with torch.inference_mode():
            prefix = _prefix_of(model, info.prefix_tokens, predictions)
            states = observation.states.to(model.device).float()
            prepared = replace(prepared, matcher=prepared.matcher.bound(states))
            for row in range(lead, len(positions)):
                gap = Gap(prepared, earlier, clearance, lm, prefix, states[row], self.breadth, self.budget)
                missing = positions[row] - len(predictions)
                closed = False
                if names is not None and missing:
                    assert prepared.proposer.probe is not None
                    view, new_gap = View(states, positions, predictions, prepared.proposer.probe, left), gap
                    if view.first_unknown < len(predictions):
                        base = _prefix_of(model, info.prefix_tokens, predictions[: view.first_unknown])
                        new_gap = Gap(
                            prepared, earlier, clearance, lm, base, states[row], self.breadth, self.budget
                        )
                    if closed := new_gap.named(names, view, row):
                        gap, prefix, predictions = new_gap, new_gap.prefix, predictions[: view.first_unknown]
                        unclear = {r for r in unclear if positions[r] < view.first_unknown}
                        searched.clear()
                        left.clear()
                if not closed:
                    within = missing <= self.longest
                    # Behind unknown tokens no row can match: only the nearest of a few candidates is taken.
                    budget = (min(self.budget, BEHIND) if searched else self.budget) if within else 0
                    if not gap.search(missing, budget):
                        searched[row] = within
                        left |= set(range(len(predictions), positions[row]))
                if gap.closed and not gap.clear:
                    unclear.add(row)
                predictions += gap.recovered(rows, len(predictions))
                self.progress("closing gaps", row - lead + 1, len(positions) - lead)
        evaluated, calls = (
            now - then for now, then in zip(self._counters(model, prepared), before, strict=True)
        )
        unclosed, count = sum(searched.values()), len(positions) - lead
        skipped = len(searched) - unclosed
        reasons = [f"{unclosed} of {count_of(count, 'row')} not matched within the budget"] * bool(unclosed)
        reasons += [f"{skipped} of {count} gaps longer than {self.longest}, not searched"] * bool(skipped)
        near_reason = (
            f"{len(unclear)} of {count_of(count, 'row')} matched where wrong tokens come as "
            f"near as right ones"
        )
        reasons += [near_reason] * bool(unclear)
        reason = "; ".join(reasons) or "complete"
        return AttackResult(
            tuple(predictions), evaluated, calls, time.perf_counter() - started, reason, epsilon
        )

    def _counters(self, model: TruncatedModel, prepared: Prepared) -> tuple[int, int]:
        """Return the positions and passes that ran so far."""
        positions, passes = counted(model, prepared.screen)
        tabulated = self._named[2].counters() if self._named is not None else (0, 0)
        return positions + tabulated[0], passes + tabulated[1]

    def __repr__(self) -> str:
        return (
            f"MissingTokenSearch(budget {self.budget}); knows the weights, the shown rows and where they stand, "
            "not the other rows nor any token"
        )


def _prefix_of(model: TruncatedModel, offset: int, predictions: Sequence[TokenPrediction]) -> Prefix:
    prefix = model.prefix(offset=offset)
    if predictions:
        prefix.extend(torch.tensor([prediction.token for prediction in predictions], device=model.device))
    return prefix
