"""Name tokens by rows of one site or of several side by side: regressions on the attacker's own text."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from hiddenlab.matching.ranking import LazyModel
from hiddenlab.models import Request, TruncatedModel
from hiddenlab.preparations import as_whole
from hiddenlab.proposals.own_text import OwnText, own_text, side_by_side
from hiddenlab.proposals.probe import whitened_table, whitening
from hiddenlab.proposals.ridge import RidgeReader, likeliest_scale
from hiddenlab.proposals.turning import Turning
from hiddenlab.types import INNER_STREAMS, Observation, ObservationInfo, Progress

WEIGHTS = (0.5, 1.0, 2.0)  # of the language model's log-probabilities, from which the likeliest is taken
POSITIONED = "qk"  # streams whose names hold one of these letters are rows behind rotary embedding

Sites = tuple[ObservationInfo, ...]  # the public facts of rows that stand side by side


@dataclass(frozen=True)
class Rows:
    """Rows that a node holds at the same positions of a prompt; several of them, at other positions, are its view.

    Attributes:
        read: name tokens: an observation for each layer or stream, whose columns are put side by side.
        late: say what comes next, put side by side too; empty where no rows do.
    """

    read: tuple[Observation, ...]
    late: tuple[Observation, ...] = ()


@dataclass(frozen=True)
class OffsetReader:
    """Names the token at a distance before a row.

    Attributes:
        scale: the inverse temperature of scores. right: share of held-out rows whose token scores best.
    """

    reader: RidgeReader
    table: Float[Tensor, "v e"]
    scale: float
    right: float

    def log_probs(self, rows: Float[Tensor, "rows d"]) -> Float[Tensor, "rows v"]:
        """Return each token's log-probability."""
        return (self.reader.scores(rows, self.table) * self.scale).log_softmax(-1)


@dataclass(frozen=True)
class Columns:
    """Puts rows of several sites side by side, without what positions do to them.

    Attributes:
        turnings: what positions do at each site.
    """

    sites: Sites
    turnings: tuple[Turning, ...]
    device: torch.device

    def of(self, shown: Sequence[Observation]) -> Float[Tensor, "rows d"]:
        """Return a prompt's rows.

        Args:
            shown: an observation for each site.
        """
        places = torch.tensor(list(places_of(shown[0])), device=self.device)
        states = [one.states.to(self.device).float() for one in shown]
        parts = [turning.undone(own, places) for turning, own in zip(self.turnings, states, strict=True)]
        return torch.cat(parts, 1)


@dataclass(frozen=True)
class Kind:
    """What reads rows of some sites.

    Attributes:
        readers: entry d names the token d positions before a row.
    """

    columns: Columns
    readers: tuple[OffsetReader, ...]


def places_of(observation: Observation) -> dict[int, int]:
    """Return the row of each shown position, in order."""
    positions = observation.info.positions or range(len(observation.states))
    return {position: row for row, position in enumerate(positions)}


def sites_of(shown: Sequence[Observation]) -> Sites:
    """Return the public facts of rows side by side, as if every row had been shown."""
    return tuple(as_whole(one.info) for one in shown)


def collect_columns(
    model: TruncatedModel, sites: Sites, seed: int, progress: Progress
) -> tuple[Columns, OwnText]:
    """Return what puts rows of some sites side by side, and own text in the same form.

    Args:
        model: the attacker's own, of any of the sites or of another.
    """
    texts, turnings = list[OwnText](), list[Turning]()
    for info in sites:
        site, own = info.site, model
        if site != model.site:
            own = model.sibling(site.layer, stream=site.stream, dtype=info.provider_dtype)
        text = own_text(own, info, seed, progress)
        turned = site.stream in INNER_STREAMS and not set(POSITIONED).isdisjoint(site.stream)
        turnings.append(Turning.of(own, text.windows()) if turned else Turning())
        texts.append(replace(text, states=turnings[-1].undone(text.states, text.places)))
    return Columns(sites, tuple(turnings), model.device), side_by_side(texts)


def readers_of(embedding: Float[Tensor, "v e"], text: OwnText, reach: int) -> tuple[OffsetReader, ...]:
    """Return a reader for each offset up to ``reach``, with the temperature that is likeliest on held-out rows."""
    table = whitened_table(embedding, *whitening(embedding))
    readers = list[OffsetReader]()
    for offset in range(reach + 1):
        rows, tokens = text.at(offset, held_out=False)
        reader = RidgeReader(rows, table[tokens])
        rows, tokens = text.at(offset, held_out=True)
        scores = reader.scores(rows, table)
        unit = float(scores.abs().max().clamp(min=1e-30))
        scale = likeliest_scale(scores / unit, tokens) / unit
        right = float((scores.argmax(1) == tokens).float().mean())
        readers.append(OffsetReader(reader, table, scale, right))
    return tuple(readers)


@torch.inference_mode()
def likeliest_weight(read: Sequence[tuple[OwnText, Sequence[OffsetReader]]], speaker: LazyModel) -> float:
    """Return the weight of the language model under which held-out tokens are likeliest, beside one reader each.

    The language model is given the true tokens before each.

    Args:
        read: readers, with own text as they read it.
    """
    totals = dict.fromkeys(WEIGHTS, 0.0)
    for text, readers in read:
        for states, tokens in text.held_windows():
            answer = speaker.model.run([Request(speaker.opened, tokens)], keep=False)[0]
            following = answer.states[:-1].float().log_softmax(-1)  # entry i is of the token at i + 1
            for offset, reader in enumerate(readers):
                rows = reader.log_probs(states[offset + 1 :])
                targets = tokens[1 : len(tokens) - offset, None]
                for weight in WEIGHTS:
                    mixed = rows + weight * following[: len(rows)]
                    totals[weight] += float(mixed.log_softmax(-1).gather(1, targets).sum())
    return max(WEIGHTS, key=lambda weight: totals[weight])
