"""Import hidden states that another program saved: files to rows of prompts, with what is public of them.

``containers`` reads a file, ``formats`` recognises what its arrays are, ``layouts`` brings them to [tokens, width],
``choose`` takes those of one site, ``rounding`` says how their numbers were rounded. Nothing is guessed silently: every
decision is a note for the user, and where two readings are possible the error names the option that decides. Token ids
in a file are the truth: they come out apart from the observations.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from hiddenlab.channels import Channel
from hiddenlab.errors import InputError
from hiddenlab.imports import containers
from hiddenlab.imports.choose import Choice, Reading, axes_in, batched, choices_in, of_site
from hiddenlab.imports.containers import Contents
from hiddenlab.imports.formats import Recognised, listing, recognise
from hiddenlab.imports.layouts import ModelShape, arranged, padding_said, without_padding
from hiddenlab.imports.rounding import Rounded, restored, told
from hiddenlab.models import TruncatedModel
from hiddenlab.text import count_of
from hiddenlab.types import GroundTruth, Observation, ObservationInfo, Site
from hiddenlab.utils.schema import LARGEST, MOST_POSITIONS

__all__ = ["Imported", "ModelShape", "Reading", "import_observations", "read_states"]

MOST_NOTES = 6  # of one file
UNIT_NORM = 1e-3  # how near to 1 all norms are where a program normalised the rows


@dataclass(frozen=True)
class Rows:
    """The rows of one prompt.

    Attributes:
        positions: of the rows in the prompt, None where none is missing before the last. tokens: the prompt's ids.
        channel: specs of the stages that the rows passed.
    """

    states: Float[Tensor, "rows d"]
    channel: tuple[str, ...] = ()
    positions: tuple[int, ...] | None = None
    tokens: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Imported:
    """What files of states hold.

    Attributes:
        notes: one line for each decision, for the user.
    """

    site: Site
    prompts: tuple[Rows, ...]
    notes: tuple[str, ...]

    @property
    def truths(self) -> list[GroundTruth | None]:
        """The token ids that the files hold, for scoring alone; None where a file holds none."""
        return [None if rows.tokens is None else GroundTruth(rows.tokens) for rows in self.prompts]

    def observations(self, model: TruncatedModel) -> list[Observation]:
        """Return the observations, without any token id.

        Args:
            model: the truncated model whose states they are.

        Raises:
            InputError: NaN or infinity, or facts that contradict each other.
        """
        return [_observation(rows, model, i) for i, rows in enumerate(self.prompts, 1)]


def _observation(rows: Rows, model: TruncatedModel, number: int) -> Observation:
    info = ObservationInfo(
        model=model.ref.name, signature=model.signature, site=model.site, channel=rows.channel,
        provider_dtype=str(model.dtype).removeprefix("torch."),
    )  # fmt: skip
    for stage in Channel.parse(rows.channel).defenses:
        info = stage.publish(info)
    if rows.positions is not None:
        info = replace(info, positions=rows.positions, facts={**info.facts, "tokens": rows.positions[-1] + 1})
    try:
        return Observation(rows.states.contiguous(), info)
    except InputError as error:
        raise InputError(f"prompt {number}: {error}") from None


def import_observations(
    paths: Sequence[Path | str], model: TruncatedModel, **reading: Any
) -> list[Observation]:
    """Read the observations of prompts from files of any kind, for a model that is loaded.

    Args:
        reading: fields of ``Reading``; layer and stream are the model's.

    Raises:
        InputError: see ``read_states``; or an unknown option.
    """
    known = sorted(set(Reading.__dataclass_fields__) - {"layer", "stream"})
    if unknown := sorted(set(reading) - set(known)):
        raise InputError(f"an import has no option {unknown[0]!r}; known are {', '.join(known)}")
    said = Reading(layer=model.site.layer, stream=model.site.stream, **reading)
    return read_states(paths, ModelShape.of(model.ref), said).observations(model)


def read_states(paths: Sequence[Path | str], shape: ModelShape, reading: Reading | None = None) -> Imported:
    """Read the states of prompts from files of any kind.

    Args:
        shape: the sizes of the model whose states they are.

    Raises:
        InputError: a file cannot be read, holds no states of this model, or can be read in several ways.
    """
    reading = reading or Reading()
    files = [Path(path) for path in paths]
    if not files:
        raise InputError("name at least one file of states")
    if twice := [path for i, path in enumerate(files) if path.resolve() in {p.resolve() for p in files[:i]}]:
        raise InputError(f"{twice[0]} is named twice")
    if len(files) > 1 and (beside := next((n for n in ("ids", "mask") if getattr(reading, n)), None)):
        raise InputError(f"--{beside} goes with one file of states, and {len(files)} are given")
    prompts: list[Rows] = []
    notes: list[str] = []
    sites: dict[Site, Path] = {}
    for path in files:
        site, rows, said = _file(path, shape, reading)
        sites.setdefault(site, path)
        prompts += rows
        notes += said
    if len({rows.channel for rows in prompts}) > 1:
        stages = " and ".join(sorted({" | ".join(rows.channel) or "identity" for rows in prompts}))
        raise InputError(
            f"the states were rounded in different ways ({stages}); import them one after another, or say with "
            "--defense how all of them came about"
        )
    if len(sites) > 1:
        said_of = " and ".join(f"{path} holds {site}" for site, path in list(sites.items())[:2])
        raise InputError(f"{said_of}; import files of one layer and stream at a time")
    return Imported(next(iter(sites)), tuple(prompts), tuple(notes))


def _file(path: Path, shape: ModelShape, reading: Reading) -> tuple[Site, list[Rows], list[str]]:
    contents = containers.read(path)
    recognised = recognise(contents, shape, reading.format)
    if reading.mask is not None:
        recognised = replace(recognised, mask=_numbers_of(reading.mask, "--mask"))
    if reading.ids is not None:
        recognised = replace(recognised, ids={0: _numbers_of(reading.ids, "--ids")})
    choices = choices_in(contents, recognised, shape, reading)
    site, chosen = of_site(choices, path, shape, reading)
    prompts: list[Rows] = []
    notes: list[str] = []
    for choice in chosen:
        rows, said = _prompts(choice, site, contents, recognised, shape, reading)
        prompts += rows
        notes += said
    notes = list(dict.fromkeys(notes))
    more = [f"and so on, {len(notes)} lines"] if len(notes) > MOST_NOTES else []
    heading = f"{path} ({contents.kind}, {recognised.format}): {site}"
    return site, prompts, [heading, *notes[:MOST_NOTES], *more]


def _numbers_of(path: str, option: str) -> Tensor:
    """Return the one array of whole numbers in a file."""
    arrays = containers.read(Path(path)).arrays
    whole = [array for array in arrays.values() if array.ndim in (1, 2)]
    if len(whole) != 1:
        raise InputError(
            f"{option} {path} should hold one array of whole numbers; it holds {listing(arrays)}"
        )
    return whole[0]


# ---- its rows


def _prompts(
    choice: Choice,
    site: Site,
    contents: Contents,
    recognised: Recognised,
    shape: ModelShape,
    reading: Reading,
) -> tuple[list[Rows], list[str]]:
    """Return the rows of the prompts that an array holds, and what was decided."""
    part, where = choice.part, str(contents.path)
    rounded, axes = _joined(choice, site, contents, recognised, shape, reading)
    batch, notes = rounded.values, [rounded.said] if rounded.said else []
    stages = reading.channel or rounded.stages or recognised.stages
    if stages and stages == recognised.stages:
        notes.append(f"{recognised.format} computes coarser than float32: matched as {' | '.join(stages)}")
    if part.added:
        notes.append(f"{part.names[0]} and {part.names[1]} are added")
    mask = None if recognised.mask is None else batched(recognised.mask)
    if mask is not None and list(mask.shape) != list(batch.shape[:2]):
        raise InputError(
            f"{where}: the attention mask is {list(mask.shape)}, and the states are of {len(batch)} prompts of "
            f"{batch.shape[1]} tokens"
        )
    ids = _ids_of(recognised.ids.get(part.prompt), mask, len(batch), where)
    rows, ids, cut = _cut(without_padding(batch, mask), ids, reading, where)
    notes += cut
    lengths = ", ".join(str(len(prompt)) for prompt in rows[:6]) + (" …" if len(rows) > 6 else "")
    prompts = count_of(len(rows), "prompt")
    if len(part.names) > 1 and not part.added:
        notes.append(f"{len(part.names)} arrays joined along the tokens, in the order of their numbers")
    notes.insert(0, f"read as [{', '.join(axes)}]: {prompts} of {lengths} tokens{padding_said(mask)}")
    if mask is None and len(rows) > 1:
        notes.append(
            "no attention mask: every row is taken for a token; give --mask FILE where some are padding"
        )
    for number, states in enumerate(rows, 1):
        _refuse_not_finite(states, where if len(rows) == 1 else f"{where}, prompt {number}")
    _refuse_normalised(rows, site, where)
    made = []
    for i, (states, tokens) in enumerate(zip(rows, ids, strict=True), 1):
        positions, truth, said = _placed(states, tokens, reading.first_position, f"{where}, prompt {i}")
        notes += [said] if said else []
        made.append(Rows(states, stages, positions, truth))
    return made, notes


def _joined(
    choice: Choice,
    site: Site,
    contents: Contents,
    recognised: Recognised,
    shape: ModelShape,
    reading: Reading,
) -> tuple[Rounded, tuple[str, ...]]:
    """Return the states [batch, tokens, width] of one layer, and how the axes of the last array were read."""
    part, where = choice.part, str(contents.path)
    pieces: list[Rounded] = []
    axes: tuple[str, ...] = ()
    for name in part.names:
        if contents.arrays[name].ndim == 1:
            contents.arrays[name] = contents.arrays[name][None]  # the row of one token
        axes = choice.axes or axes_in(name, part, site.stream, contents, recognised, shape, reading)
        piece = restored(name, contents.arrays, where)
        pieces.append(replace(piece, values=arranged(piece.values, axes)[choice.entry or 0]))
    if len({(len(piece.values), piece.values.dtype, piece.stages) for piece in pieces}) > 1:
        raise InputError(f"{where}: the arrays of {part} are of different batches or types")
    states = [piece.values for piece in pieces]
    joined = replace(pieces[0], values=states[0] + states[1] if part.added else torch.cat(states, dim=1))
    # Numbers of 8 bits say themselves how they were rounded; of others the numbers tell, all of them together.
    return joined if joined.stages else told(joined.values), axes


def _cut(
    rows: list[Tensor], ids: list[tuple[int, ...] | None], reading: Reading, where: str
) -> tuple[list[Tensor], list[tuple[int, ...] | None], list[str]]:
    """Return prompts without their first rows, and cut where further prompts begin, as the user says.

    Raises:
        InputError: there are fewer rows, or several prompts already.
    """
    skipped, starts = reading.skip_rows, reading.split
    if not skipped and not starts:
        return rows, ids, []
    if skipped >= (shortest := min(map(len, rows))):
        raise InputError(f"{where}: --skip-rows {skipped} leaves no row of {shortest}")
    # Ids of padding stand before the prompt's, where there is one for each row (and one for a last generated token).
    ids = [
        tokens[skipped:] if tokens is not None and 0 <= len(tokens) - len(states) <= 1 else tokens
        for tokens, states in zip(ids, rows, strict=True)
    ]
    rows = [states[skipped:] for states in rows]
    notes = [f"{count_of(skipped, 'row')} before each prompt left out"] if skipped else []
    if not starts:
        return rows, ids, notes
    if len(rows) > 1:
        raise InputError(f"{where} holds {len(rows)} prompts, and --split goes with one")
    (states,), (tokens,) = rows, ids
    borders = [0, *starts, len(states)]
    if any(a >= b for a, b in pairwise(borders)):
        raise InputError(f"{where}: --split should name rows from 1 to {len(states) - 1}, in ascending order")
    if tokens is not None and len(tokens) != len(states):
        raise InputError(
            f"{where}: {len(tokens)} token ids and {len(states)} rows; --split needs one for each row"
        )
    parts = list(pairwise(borders))
    notes.append(f"cut into {len(parts)} prompts")
    return [states[a:b] for a, b in parts], [None if tokens is None else tokens[a:b] for a, b in parts], notes


def _refuse_not_finite(states: Float[Tensor, "rows d"], where: str) -> None:
    if not bool((finite := torch.isfinite(states.float()).all(dim=-1)).all()):
        bad = int((~finite).nonzero()[0, 0])
        raise InputError(
            f"{where} holds NaN or infinity (first in row {bad}); where such rows are padding, give --mask FILE"
        )


def _refuse_normalised(rows: Sequence[Tensor], site: Site, where: str) -> None:
    """Refuse rows that a program divided by their norms, which no state matches."""
    norms = torch.cat([prompt.float().norm(dim=-1) for prompt in rows])
    if len(norms) > 1 and site.stream == "final_norm" and bool(((norms - 1).abs() < UNIT_NORM).all()):
        raise InputError(
            f"{where}: every row has the norm 1, so that a program normalised them; llama-embedding leaves them as "
            "they are with --embd-normalize -1"
        )


def _ids_of(ids: Tensor | None, mask: Tensor | None, count: int, where: str) -> list[tuple[int, ...] | None]:
    """Return the token ids of each prompt, padding dropped.

    Raises:
        InputError: they are no ids, or of another number of prompts.
    """
    if ids is None:
        return [None] * count
    if ids.is_floating_point() or ids.ndim not in (1, 2) or not ids.numel():
        raise InputError(
            f"{where}: the token ids should be whole numbers, and are {ids.dtype} {list(ids.shape)}"
        )
    if int(ids.min()) < 0 or int(ids.max()) > LARGEST:
        raise InputError(f"{where}: the token ids are not between 0 and {LARGEST}")
    batch = batched(ids)
    if len(batch) != count:
        raise InputError(f"{where}: the token ids are of {len(batch)} prompts, and the states of {count}")
    if mask is None:
        return [tuple(row.tolist()) for row in batch]
    # Generated tokens come after the mask's.
    kept = (
        [row[: mask.shape[1]][keep.bool()] for row, keep in zip(batch, mask, strict=True)]
        if batch.shape[1] >= mask.shape[1]
        else None
    )
    if kept is None:
        raise InputError(
            f"{where}: the token ids are {list(batch.shape)}, and the attention mask {list(mask.shape)}"
        )
    return [(*own.tolist(), *row[mask.shape[1] :].tolist()) for own, row in zip(kept, batch, strict=True)]


def _placed(
    states: Tensor, tokens: tuple[int, ...] | None, first: int | None, where: str
) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None, str]:
    """Return where the rows stand in their prompt, and the tokens up to the last of them.

    Raises:
        InputError: there are more rows than tokens, or so many fewer that it is not known which are missing.
    """
    rows, start = len(states), first or 0
    if start + rows > MOST_POSITIONS:
        raise InputError(
            f"{where}: the last row would stand at position {start + rows - 1}; {MOST_POSITIONS} are read"
        )
    positions = tuple(range(start, start + rows)) if start else None
    if tokens is None:
        return positions, None, ""
    count = len(tokens)
    if start + rows > count:
        raise InputError(
            f"{where}: {rows} rows from position {start} on, and {count} token ids; they contradict"
        )
    if first is None and rows < count - 1:
        raise InputError(
            f"{where}: {rows} rows and {count} token ids; say where the first row stands: --first-position "
            f"{count - rows} where the first {count - rows} are missing (a cached prefix), 0 where the last are"
        )
    missing = count - start - rows
    said = "the last token has no row (a generated token that was never run)" if missing == 1 else ""
    said = f"the last {missing} tokens have no row" if missing > 1 else said
    return positions, tokens[: start + rows], said
