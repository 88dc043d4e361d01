"""Read the prompt of a node that gets states of some positions alone, behind layers that it did not compute itself.

Behind the first layers no algebra gives tokens (``partial_sums`` needs the first one). What is left is what a state
still shows: its own token, traces of the tokens right before it, and at late layers which token the model expects next.
No paper describes this attack; it is written against Cascade with layers at the client
(``defenses/cascade/hardening.py``).
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from hiddenlab.attacks.shard_reading.beam import Held, read_prompts
from hiddenlab.attacks.shard_reading.readers import (
    Columns,
    Kind,
    Rows,
    Sites,
    collect_columns,
    likeliest_weight,
    places_of,
    readers_of,
    sites_of,
)
from hiddenlab.base import Attack
from hiddenlab.errors import InputError, NotApplicableError
from hiddenlab.matching.ranking import LazyModel
from hiddenlab.models import TruncatedModel
from hiddenlab.observation import parts_of_attention
from hiddenlab.preparations import as_whole, by_channel
from hiddenlab.projections import projection_of
from hiddenlab.proposals.lens import TunedLens
from hiddenlab.proposals.own_text import own_text
from hiddenlab.types import AttackResult, Observation, ObservationInfo, Site, TokenPrediction

__all__ = ["Rows", "ShardReading"]

Late = tuple[Columns, TunedLens]  # what reads late rows


@dataclass(frozen=True)
class Prepared:
    """Everything that views of some kinds of rows need.

    Attributes:
        weight: of the language model, 0 without one.
    """

    model: TruncatedModel
    kinds: tuple[Kind, ...]
    weight: float

    def held(self, view: Sequence[Rows]) -> list[Held]:
        """Return a view with what reads it."""
        held = list[Held]()
        for rows in view:
            sites = sites_of(rows.read)
            kind = next(kind for kind in self.kinds if kind.columns.sites == sites)
            held.append(Held(kind.columns.of(rows.read), places_of(rows.read[0]), kind.readers))
        return held


class ShardReading(Attack):
    """Read own tokens and those between, behind any layer, from the rows of one node.

    Regressions on the attacker's own text name the token of a row, and the ones up to ``reach`` positions before it. A
    row's own token is named by its own state, a token without a row by the rows right behind it. A beam search from
    left to right adds what the language model says. Nothing is verified: the right state cannot be computed without
    the tokens in between. Where neither a row nor a language model says anything, a token is left out.

    What rotary embedding does to queries and keys is undone first, as their positions are known. ``recover_views``
    reads rows of several layers or streams, of one position side by side, of other positions by readers of their own.

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
        prepared = self.prepare((info,))
        shares: dict[str, float | str] = {
            f"read_{offset}": reader.right for offset, reader in enumerate(prepared.kinds[0].readers)
        }
        return {**shares, "weight_lm": prepared.weight}

    def prepare(self, *kinds: Sites) -> Prepared:
        """Return what views of some kinds of rows need, and keep it for the next ones.

        Args:
            kinds: of each kind, the facts of the rows that stand side by side.

        Raises:
            NotApplicableError: rows without positions, coordinates out of order, or rows that are no states.
        """
        for info in (info for sites in kinds for info in sites):
            if info.rows_permuted or info.columns_permuted is not None:
                raise NotApplicableError(
                    "shard-reading needs rows of known positions and coordinates in order; "
                    "vocab-match attacks shuffled states"
                )
            if projection_of(info) is not None or parts_of_attention(info) or info.site.stream == "logits":
                raise NotApplicableError("shard-reading needs whole states, or queries, keys or values")
        kinds, model = tuple(tuple(map(as_whole, sites)) for sites in kinds), self.model
        known = self._prepared
        if (
            known is None
            or known.model is not model
            or [one.columns.sites for one in known.kinds] != [*kinds]
        ):
            table, made, read = model.embedding.detach().float(), list[Kind](), []
            for sites in kinds:
                columns, text = collect_columns(model, sites, self.seed, self.progress)
                made.append(Kind(columns, readers_of(table, text, self.reach)))
                read.append((text, made[-1].readers))
            speaker = self._speaker(model)
            weight = 0.0 if speaker is None else likeliest_weight(read, speaker)
            self._prepared = known = Prepared(model, tuple(made), weight)
        return known

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
            prepared = self.prepare((group[0].info,))
            results += self._read(prepared, [[Rows((one,))] for one in group], [{}] * len(group))
        return results

    def recover_views(self, views: Sequence[Sequence[Rows]]) -> list[AttackResult]:
        """Recover prompts from all that a node holds: rows of several layers or streams, and of other positions.

        A token is read from its own rows where the view holds any, else from those right behind it.

        A late row says what the model expects next, and the model has read the others' tokens too. So where the row
        before a token is the node's, a tuned lens takes the language model's place, which knows what was read alone.

        Args:
            views: of each prompt, what the node holds; rows of one kind come from the same channel and sites.

        Raises:
            NotApplicableError: see ``prepare``.
        """
        if not views:
            return []
        rows, results = [one for view in views for one in view], list[AttackResult]()
        prepared = self.prepare(*_unlike(sites_of(one.read) for one in rows))
        lenses = [self._lens(sites) for sites in _unlike(sites_of(one.late) for one in rows if one.late)]
        for start in range(0, len(views), self.batch):
            group = views[start : start + self.batch]
            results += self._read(prepared, group, [_said(view, lenses) for view in group])
        return results

    @torch.inference_mode()
    def _lens(self, sites: Sites) -> Late:
        """Return the lens of late rows: from those of own text to the states behind the last norm."""
        columns, text = collect_columns(self.model, sites, self.seed, self.progress)
        final = self.model.sibling(stream="final_norm", dtype=sites[0].provider_dtype)
        site = Site(final.site.layer, "final_norm")
        # What comes next is a matter of the text, whatever a channel does to the states that are read.
        finals = own_text(final, replace(sites[0], site=site, channel=()), self.seed, self.progress)
        fitted = (text.places[: text.fitted] > 0).nonzero()[:, 0]
        held, following = text.at(-1, held_out=True)
        head = LazyModel(self.model).model.module.get_output_embeddings()  # type: ignore[operator]
        lens = TunedLens.fit(
            text.states[fitted], finals.states[fitted], head.weight.detach().float(), held, following
        )
        return columns, lens

    def _read(
        self,
        prepared: Prepared,
        views: Sequence[Sequence[Rows]],
        late: Sequence[Mapping[int, Float[Tensor, " v"]]],
    ) -> list[AttackResult]:
        """Read prompts at once.

        Args:
            late: for each prompt, log-probabilities of the tokens that late rows say something of, by position.
        """
        started, held = time.perf_counter(), [prepared.held(view) for view in views]
        found = read_prompts(held, self._speaker(self.model), prepared.weight, self.beam, late)
        seconds = (time.perf_counter() - started) / len(views)
        return [_result(one, view, seconds) for one, view in zip(found, held, strict=True)]

    def __repr__(self) -> str:
        return "ShardReading: knows the weights, one node's rows and their positions; not the other rows or tokens"


def _unlike(kinds: Iterable[Sites]) -> list[Sites]:
    """Return each kind of rows once, in order of their first appearance."""
    unlike = list[Sites]()
    for sites in kinds:
        if sites not in unlike:  # facts are not hashable
            unlike.append(sites)
    return unlike


def _said(view: Sequence[Rows], lenses: Sequence[Late]) -> dict[int, Float[Tensor, " v"]]:
    """Return what late rows say of the tokens behind them, by these tokens' positions."""
    said = dict[int, Tensor]()
    for late in (rows.late for rows in view if rows.late):
        sites = sites_of(late)
        columns, lens = next(one for one in lenses if one[0].sites == sites)
        told = lens.log_probs(columns.of(late))
        for position, row in places_of(late[0]).items():
            known = said.get(position + 1)
            said[position + 1] = told[row] if known is None else known + told[row]
    return said


def _result(found: Mapping[int, tuple[int, float]], view: Sequence[Held], seconds: float) -> AttackResult:
    """Return what was read at each position as an attack's result; rows are numbered by position."""
    places = sorted({place for held in view for place in held.rows})
    rows = {place: row for row, place in enumerate(places)}
    tokens = tuple(
        TokenPrediction(token, rows.get(place, -1), 1 - chance, None, 0, False)
        for place, (token, chance) in found.items()
    )
    positions = None if len(found) == 1 + places[-1] else tuple(found)
    return AttackResult(tokens, 0, 0, seconds, "complete", positions=positions)
