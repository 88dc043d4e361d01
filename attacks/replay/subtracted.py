"""Take off observed rows what a defense adds to every request's states, and compare candidates' own states.

Known plaintext: of own texts both states and released rows are known. Their difference is the same in every text, or in
one direction (noise whose size follows the states), where the defense adds what it drew once. This direction is left
out of all comparisons, so that its size need not be known.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hiddenlab.attacks.replay.own_texts import TEXTS, OwnTexts, limits_between
from hiddenlab.errors import NotApplicableError
from hiddenlab.models import Prefix, Request


@dataclass(frozen=True)
class Added:
    """What a defense does to the states of every text of one length.

    Attributes:
        places: of each position, its row. columns: of each position, which coordinate of its state each number of its
            row is. directions: of each position, the direction of what is added; zeros where nothing is. limits: of
            each position, the distance within which a candidate is right.
    """

    places: tuple[int, ...]
    columns: Int[Tensor, "n d"]
    directions: Float[Tensor, "n d"]
    limits: Float[Tensor, " n"]

    @classmethod
    def of(cls, own: OwnTexts) -> "Added | None":
        """Learn it from own texts; None where released rows are not states and something added."""
        texts = [own.another() for _ in range(TEXTS)]
        states = torch.stack(_states(own, texts)).double()
        released = own.release(texts)
        if own.extra or any(rows.shape != states.shape[1:] for rows in released):
            return None
        rows = torch.stack(released).double()
        for places, columns in _arrangements(own, states, rows):
            moved = states.gather(2, columns.expand(len(texts), -1, -1))
            added = rows[:, list(places)] - moved
            directions = _main_directions(added)
            limits = _limits(own, places, columns, directions)
            if limits is not None:
                return cls(places, columns, directions, limits)
        return None

    def apart(
        self, position: int | slice, rows: Float[Tensor, "*b d"], states: Float[Tensor, "*b d"]
    ) -> Float[Tensor, "*b"]:
        """Return how far rows are from states, whatever the size of what was added."""
        return _apart(self.columns[position], self.directions[position], rows, states)


@dataclass
class Subtracted:
    """Candidates' own states beside one prompt's rows."""

    own: OwnTexts
    added: Added
    rows: Float[Tensor, "n d"]
    _prefix: Prefix | None = field(default=None, init=False)
    _tried: list[int] = field(default_factory=list, init=False)

    @property
    def places(self) -> Sequence[int]:
        return self.added.places

    @property
    def limits(self) -> Float[Tensor, " n"]:
        return self.added.limits

    def cost(self, candidates: int) -> int:
        return candidates

    def distances(self, found: list[int], candidates: Int[Tensor, " c"]) -> Float[Tensor, " c"]:
        model, at = self.own.model, len(found)
        self._prefix = self._prefix or model.prefix()
        if len(missing := found[self._prefix.length :]) == 1 and missing[0] in self._tried:
            self._prefix.commit(self._tried.index(missing[0]))  # its pass is still there
        elif missing:
            self._prefix.extend(torch.tensor(missing, device=model.device))
        self._tried = candidates.tolist()
        states = self._prefix.branch(candidates.to(model.device)).double().cpu()
        row = self.rows[self.places[at]].double().expand_as(states)
        return self.added.apart(at, row, states).float()


def _states(own: OwnTexts, texts: Sequence[Int[Tensor, " n"]]) -> list[Float[Tensor, "n d"]]:
    model = own.model
    requests = [Request(model.prefix(), text.to(model.device)) for text in texts]
    return [answer.states.float().cpu() for answer in model.run_all(requests, keep=False)]


def _arrangements(
    own: OwnTexts, states: Float[Tensor, "t n d"], rows: Float[Tensor, "t n d"]
) -> list[tuple[tuple[int, ...], Int[Tensor, "n d"]]]:
    """Return orders of rows and of coordinates that the releases could have: as they are, or as own texts show."""
    as_it_is = torch.arange(states.shape[2]).expand(states.shape[1], -1)
    found = list[tuple[tuple[int, ...], Tensor]]()
    if (order := _order(states, rows)) is not None:
        found.append((order, as_it_is))
    try:
        places, _ = own.places
    except NotApplicableError:
        return found
    for pooled in (True, False):
        columns = _columns(states, rows[:, list(places)], pooled)
        if columns is not None:
            found.append((places, columns))
    return found


def _order(states: Float[Tensor, "t n d"], rows: Float[Tensor, "t n d"]) -> tuple[int, ...] | None:
    """Return the row of each position, whose difference from its states has one direction in all texts."""
    nearest = []
    for row in rows.unbind(1):
        apart = (row[:, None] - states).transpose(0, 1)  # position, text
        spread = torch.linalg.eigvalsh(apart @ apart.transpose(1, 2))
        nearest.append(int(spread[:, :-1].sum(1).argmin()))
    if sorted(nearest) != list(range(len(nearest))):
        return None
    return tuple(torch.tensor(nearest).argsort().tolist())


def _columns(
    states: Float[Tensor, "t n d"], rows: Float[Tensor, "t n d"], pooled: bool
) -> Int[Tensor, "n d"] | None:
    """Return which coordinate of a state each number of its row is: the one that differs alike between texts.

    Args:
        pooled: the order is one for all positions.
    """
    change, shown = (
        (one[1:] - one[0]).permute(1, 2, 0) for one in (states, rows)
    )  # position, coordinate, text
    if pooled:
        change, shown = (one.transpose(0, 1).flatten(1)[None] for one in (change, shown))
    found = torch.stack([torch.cdist(s, c).argmin(1) for s, c in zip(shown, change, strict=True)])
    if not bool((found.sort(1).values == torch.arange(found.shape[1])).all()):
        return None
    return found.expand(states.shape[1], -1)


def _main_directions(added: Float[Tensor, "t n d"]) -> Float[Tensor, "n d"]:
    """Return the main direction of what is added to each position; zeros where nothing is."""
    of_position = added.transpose(0, 1)
    _, vectors = torch.linalg.eigh(of_position @ of_position.transpose(1, 2))
    main = (of_position.transpose(1, 2) @ vectors[:, :, -1:])[:, :, 0]
    length = main.norm(dim=1, keepdim=True)
    return torch.where(length > 0, main / length.clamp(min=1e-300), 0.0)


def _apart(
    columns: Int[Tensor, "*b d"],
    directions: Float[Tensor, "*b d"],
    rows: Float[Tensor, "*c d"],
    states: Float[Tensor, "*c d"],
) -> Float[Tensor, "*c"]:
    difference = rows - states.gather(-1, columns.expand_as(states))
    along = (difference * directions).sum(-1, keepdim=True)
    return (difference - along * directions).norm(dim=-1)


def _limits(
    own: OwnTexts, places: Sequence[int], columns: Int[Tensor, "n d"], directions: Float[Tensor, "n d"]
) -> Float[Tensor, " n"] | None:
    """Return limits by a text from which nothing was learned; None where it is not explained."""
    model = own.model
    text, near = own.text.to(model.device), own.near.to(model.device)
    parents = torch.arange(own.length, device=model.device)
    request = Request(model.prefix(), text, branches=near, parents=parents)
    (answer,) = model.run([request], keep=False)
    (shown,) = own.release([own.text])
    rows = shown[list(places)].double()
    right, wrong = (
        _apart(columns, directions, rows, one.double().cpu()) for one in (answer.states, answer.branches)
    )
    floor = torch.maximum(4 * right, own.resolution * rows.norm(dim=1))
    return limits_between(floor.float(), wrong.float())
