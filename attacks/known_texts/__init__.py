"""Read prompts behind a key that also served texts which the attacker has.

What a defense did to the known texts' rows is fitted, undone on the prompt's, and what comes out is read by the attacks
on plain states. So a key that serves a session need not be known: a few texts of the session stand for it.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from hiddenlab.attacks.beam_decoding import BeamDecoding
from hiddenlab.attacks.known_texts.fits import Pair, Undo, best_fit
from hiddenlab.attacks.vocab_match import VocabMatch
from hiddenlab.base import Attack
from hiddenlab.channels import Channel
from hiddenlab.errors import InputError, NotApplicableError
from hiddenlab.secret_maps import is_mapped
from hiddenlab.stages import Defense, are_replaced
from hiddenlab.types import AttackResult, KnownText, Observation, ObservationInfo, Site

BUDGET = 4096  # candidates for one token at most
CLEAN = 0.02  # relative errors up to here leave tokens apart, so that they can be matched one by one
UNUSABLE = 0.7  # rows undone with so large an error show nothing
# Rows that are known within few directions alone agree by chance with wrong tokens' states.
FEWEST_DIRECTIONS = 12


class KnownTexts(Attack):
    """Fit what a defense does to rows from known texts of the same key, undo it, and read the rows that come out.

    Fitted are: a matrix that mixes rows, an order of coordinates for each position or for all, a turn of the
    coordinates (Procrustes), any linear map of them (least squares); an order of rows together with the last three.
    What fits best rows that it was not learned from is taken. Few known texts show a turn in the space of their rows
    alone: tokens are compared by inner products with these rows, and behind noise within that space. Where hardly any
    error is left, vocabulary matching reads the rows, and verifies tokens by them; else beam decoding does, which
    verifies nothing.

    Knows: the weights, the rows, some texts that passed under the same key, with their rows; of the defense's code what
    is left of it behind the fit (noise, say). Does not know: tokens of the prompt, the key.

    Args:
        budget: candidates for one token at most.
    """

    any_width = secret_maps = extra_rows = True
    use_when = (
        "texts that you have passed the defense under the same key as the prompt (hiddenlab assess --known)"
    )

    def __init__(self, budget: int = BUDGET) -> None:
        if budget < 1:
            raise InputError(f"the budget must be at least 1 candidate, not {budget}")
        self.budget = budget

    def _forget(self) -> None:
        for name in ("_matching", "_decoding"):
            vars(self).pop(name, None)

    @cached_property
    def _matching(self) -> VocabMatch:
        matching = VocabMatch(budget=self.budget)
        matching.shares_key = True
        return matching

    @cached_property
    def _decoding(self) -> BeamDecoding:
        return BeamDecoding()

    def _recover(self, observation: Observation) -> AttackResult:
        """Recover one prompt.

        Raises:
            NotApplicableError: no text of the same key is known, or the known ones show nothing that can be undone.
        """
        undo = self.fitted(observation)
        undone = turned(undo, observation) or undone_by(undo, observation)
        attack: Attack = self._matching if undo.error <= CLEAN else self._decoding
        attack.progress, attack.learns = self.progress, self.learns
        result = attack.fit(undone.info, self.model, self.seed).recover(undone)
        if undo.basis is not None and min(len(undo.basis), len(undone.states)) < FEWEST_DIRECTIONS:
            result = replace(result, tokens=tuple(replace(token, verified=False) for token in result.tokens))
        rows = undo.order or range(len(undone.states))
        placed = sorted(range(len(rows)), key=rows.__getitem__) if undo.order else list(rows)
        tokens = tuple(
            replace(token, row=placed[token.row] if token.row >= 0 else -1) for token in result.tokens
        )
        return replace(result, tokens=tokens, stop_reason=f"{result.stop_reason}, behind {undo.name}")

    @torch.inference_mode()
    def fitted(self, observation: Observation) -> Undo:
        """Return how to undo what the defense did, from the known texts of an observation.

        Raises:
            NotApplicableError: see ``_recover``.
        """
        if not observation.known:
            raise NotApplicableError("no text is known that passed under the same key (--known, --chosen)")
        if observation.info.positions is not None or are_replaced(observation.info):
            raise NotApplicableError("known texts help only where every token has a row of its own state")
        self.progress("fitting what was done to known texts", 0, 0)
        pairs = [self._pair(known) for known in observation.known]
        undo = best_fit(pairs, len(observation.states))
        if not undo.name:
            raise NotApplicableError("known texts show no map or order that can be undone")
        if not undo.error <= UNUSABLE:
            raise NotApplicableError(
                f"what known texts show of the defense leaves an error of {100 * undo.error:.0f} % of a row"
            )
        return undo

    def _pair(self, known: KnownText) -> Pair:
        plain = self.model.encode(torch.tensor(known.tokens, device=self.model.device))
        shown = known.shown.states
        place = torch.arange(len(shown)).clamp(max=len(plain) - 1)
        return Pair(_numbers(plain), _numbers(shown), place)

    def __repr__(self) -> str:
        return (
            "KnownTexts: knows the weights, the rows, and some texts under the same key with their rows; not the "
            "prompt's tokens, nor the key"
        )


def undone_by(undo: Undo, observation: Observation) -> Observation:
    """Return the observation of a prompt's rows behind what was fitted: plain states, up to what the fit leaves.

    Rows whose order is known come out in order, others as they were released.
    """
    shown = _numbers(observation.states)
    place = torch.tensor(undo.order) if undo.order else torch.arange(len(shown))
    rows = undo.of(shown, place)
    if undo.order:
        rows = rows[place.argsort()]
    return Observation(rows.float(), facts_behind(undo, observation.info, len(rows)))


def turned(undo: Undo, observation: Observation) -> Observation | None:
    """Return the prompt's rows in order, still turned, where the turn is exact and known in a part of the space alone.

    Inner products with the rows of known texts, which vocabulary matching compares then, show all that is known of the
    turn, and the length of what is not. None where the fit is another, or the order of rows is not known.
    """
    if undo.basis is None or not undo.exact or undo.order == ():
        return None
    order = (
        torch.arange(len(observation.states)) if undo.order is None else torch.tensor(undo.order).argsort()
    )
    alike = [text for text in observation.known if undo.order is None or len(text.tokens) == len(order)]
    info = observation.info
    info = Channel.parse(["orthogonal"]).published(ObservationInfo(info.model, info.signature, info.site))
    known = tuple(
        KnownText(
            text.tokens,
            Observation(text.shown.states if undo.order is None else text.shown.states[order], info),
        )
        for text in alike
    )
    return Observation(observation.states[order], info, known)


def facts_behind(undo: Undo, info: ObservationInfo, rows: int) -> ObservationInfo:
    """Return the public facts of undone rows: what hid order or coordinates is gone, and noise is left.

    Of noise the stages say what it is, where any are left; else it is taken for noise on the rows, of the strength that
    the known texts show.
    """
    left = (
        [] if undo.exact else [stage for stage in Channel.parse(info.channel).defenses if not _hides(stage)]
    )
    bare = ObservationInfo(info.model, info.signature, info.site, rows_permuted=undo.order == ())
    if left:
        bare = replace(bare, provider_dtype=info.provider_dtype, quantization=info.quantization)
    specs = [stage.spec for stage in left]
    if not undo.exact and not left:
        specs.append(f"output-noise:sigma={_rounded_up(undo.error)!r}")
    if undo.basis is not None:
        specs.append(f"truncated-svd:rank={min(rows, len(undo.basis))}")
    if bare.rows_permuted:
        specs.append("seq-perm")
    return Channel.parse(specs).published(bare)


def _hides(stage: Defense) -> bool:
    """Return whether a stage hides the order of rows or coordinates, or maps them: what a fit undoes."""
    try:
        told = stage.publish(ObservationInfo("", (), Site(1)))
    except InputError:  # of another stream, which it names
        return True
    return told.rows_permuted or told.columns_permuted is not None or is_mapped(told)


def _rounded_up(error: float) -> float:
    """Return an error with one digit, so that prompts of a channel share what is prepared for it."""
    unit = 10.0 ** math.floor(math.log10(error))
    return float(f"{math.ceil(error / unit) * unit:.1g}")


def _numbers(rows: Tensor) -> Tensor:
    return rows.detach().float().cpu()


__all__: Sequence[str] = ("KnownTexts",)
