"""Keep in the cache what a first probe is made of: rows of known tokens, rows of running text, and their regression."""

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from hiddenlab.channels import Channel
from hiddenlab.errors import InputError
from hiddenlab.models import TruncatedModel
from hiddenlab.models.self_check import uncounted
from hiddenlab.models.tokens import longest_text, most_tokens
from hiddenlab.proposals.corpus import Corpus, language_reference
from hiddenlab.proposals.expected_states import ExpectedStates
from hiddenlab.proposals.probe import Probe, ProbeSettings, whitening
from hiddenlab.proposals.ridge import KnownRows, ridge_probe
from hiddenlab.proposals.store import (
    FORMAT,
    Released,
    collected,
    has_trained_probe,
    identity_of,
    is_cached,
    load_cached,
    release_windows,
    save_cached,
    training_channel,
)
from hiddenlab.proposals.text_rows import TextRows
from hiddenlab.types import ObservationInfo, Progress, silent
from hiddenlab.utils.digests import digest_of

# What a regression starts from (docs/log/041-layers-and-screens.md): text of which most tokens are random, and tokens
# that stand alone, as the first of a prompt does.
KNOWN_TEXT, KNOWN_WINDOW, KNOWN_RANDOM, KNOWN_SINGLE = 4600, 128, 0.7, 200
FIRST_PROBE, RUNNING_TEXT = "collecting states for a first probe", "collecting states of running text"
SPREAD = 16  # rows of an embedding table that tell it from others
MOST_HELD = 1 << 29  # bytes of rows that are held at once when several layers are collected
ANNOUNCED, TIMED = 2.0, 128  # seconds from which a wait is announced; tokens of the pass that estimates it
# Running text on which proposals are calibrated, and how often at most a window is drawn.
BEHIND = 24  # tokens of the text behind which every token is run
TEXT_WINDOWS, TEXT_LENGTH, TEXT_SEED, TEXT_DRAWS = 4, 32, 9, 64


def known_rows_for(
    model: TruncatedModel, info: ObservationInfo, progress: Progress = silent
) -> tuple[KnownRows, float]:
    """Return rows of known tokens for a channel, from the cache or collected now, and the seconds that took."""
    stages = training_channel(model, info)
    tensors = load_cached(_known_identity(model, stages), model)
    if tensors is not None:
        return KnownRows(tensors["states"].float(), tensors["tokens"].long(), int(tensors["own"])), 0.0
    started = time.perf_counter()
    drawn, pipe = known_windows(model), Channel.parse(stages)
    if (seconds := _estimate(pipe.provider_model(model), sum(map(len, drawn)))) > ANNOUNCED:
        told = f"no probe for layer {model.site.layer} of {model.ref.name} yet: a first one takes about {seconds:.0f} s"
        progress(f"{told}; it stays, and learns from every token that is verified", 0, 0)
    states, tokens, _ = release_windows(model, pipe, drawn, 0, FIRST_PROBE, progress)
    known = _whole(
        states.bfloat16().float(), tokens
    )  # as the cache keeps them, so that all processes begin alike
    keep_known_rows(model, info, known)
    return known, time.perf_counter() - started


def _whole(states: torch.Tensor, tokens: torch.Tensor) -> KnownRows:
    """Return the rows without infinities; float16 may overflow."""
    whole = states.isfinite().all(1)
    states, tokens = states[whole], tokens.to(states.device)[whole]
    return KnownRows(states, tokens, len(tokens))


def collect_layers(
    models: Sequence[TruncatedModel], info: ObservationInfo, progress: Progress = silent
) -> None:
    """Collect what first probes of several layers of one model are made of from the same passes, unless it is cached.

    Args:
        models: of growing depth, which show the states behind a layer. info: the facts of one of them; they differ by
            the layer alone.
    """
    stages = training_channel(models[-1], info)
    models = [
        model
        for model in models
        if not has_trained_probe(model, info) and not is_cached(_known_identity(model, stages))
    ]
    if not models:
        return
    pipe, drawn, text = Channel.parse(stages), known_windows(models[-1]), _text_windows(models[-1])
    held = max(1, MOST_HELD // (4 * models[-1].width * sum(map(len, drawn))))
    for start in range(0, len(models), held):
        group = models[start : start + held]
        rows = _release_layers(group, pipe, drawn, 0, FIRST_PROBE, progress)
        for model, (states, tokens, _) in zip(group, rows, strict=True):
            keep_known_rows(model, info, _whole(states, tokens))
        rows = _release_layers(group, pipe, text, TEXT_SEED, RUNNING_TEXT, progress)
        for model, (states, tokens, _) in zip(group, rows, strict=True):
            _keep_text_rows(model, stages, states, tokens)


def _release_layers(
    models: Sequence[TruncatedModel], pipe: Channel, windows: Sequence[torch.Tensor], seed: int, stage: str,
    progress: Progress,
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:  # fmt: skip
    """Return for each layer what ``release_windows`` returns there; the passes are those of the last model."""
    layers, draws = [model.site.layer for model in models], torch.Generator().manual_seed(seed)

    def release(pack: list[list[int]]) -> list[list[Released]]:
        return pipe.release_layers(models[-1], layers, pack, draws)

    return collected(models[-1], windows, release, stage, progress)


def text_rows_for(model: TruncatedModel, info: ObservationInfo, progress: Progress = silent) -> TextRows:
    """Return states of running text for a channel, from the cache or collected now."""
    stages = training_channel(model, info)
    tensors = load_cached(_text_identity(model, stages), model)
    if tensors is None:
        windows, pipe = _text_windows(model), Channel.parse(stages)
        states, tokens, _ = release_windows(model, pipe, windows, TEXT_SEED, RUNNING_TEXT, progress)
        tensors = _keep_text_rows(model, stages, states, tokens)
    return TextRows(tensors["states"], tensors["tokens"])


def _text_windows(model: TruncatedModel) -> list[torch.Tensor]:
    corpus, windows = Corpus(model, TEXT_SEED, language_reference), list[torch.Tensor]()
    length = _text_length(model)
    for _ in range(TEXT_DRAWS):
        if len(windows) < TEXT_WINDOWS and len(window := corpus.text_window(length)) == length:
            windows.append(window)
    return windows + [corpus.uniform(length) for _ in range(TEXT_WINDOWS - len(windows))]


def _text_length(model: TruncatedModel) -> int:
    return min(TEXT_LENGTH, longest_text(model.module))


def _keep_text_rows(
    model: TruncatedModel, stages: list[str], states: torch.Tensor, tokens: torch.Tensor
) -> dict[str, torch.Tensor]:
    shape = (TEXT_WINDOWS, _text_length(model))
    states = states.nan_to_num(0, 0, 0)  # float16 may overflow
    tensors = {"states": states.unflatten(0, shape), "tokens": tokens.unflatten(0, shape)}
    with suppress(InputError):
        save_cached(_text_identity(model, stages), tensors)
    return tensors


def _text_identity(model: TruncatedModel, stages: list[str]) -> dict[str, Any]:
    return identity_of(model, stages) | {"text_rows": [TEXT_WINDOWS, _text_length(model)]}


def _estimate(model: TruncatedModel, tokens: int) -> float:
    """Return about how many seconds the model takes for so many tokens, from one small pass."""
    with uncounted(model):
        model.encode(torch.zeros(1, dtype=torch.long))  # the first pass is slower
        started = time.perf_counter()
        timed = min(TIMED, most_tokens(model.module) or TIMED)
        model.encode(torch.zeros(timed, dtype=torch.long))
    return (time.perf_counter() - started) * tokens / timed


def known_windows(model: TruncatedModel) -> list[torch.Tensor]:
    """Return what a regression starts from: text strewn with random tokens, and single tokens."""
    corpus, windows, drawn = Corpus(model, texts=language_reference), list[torch.Tensor](), 0
    while drawn < KNOWN_TEXT:
        windows.append(corpus.strewn(corpus.text_window(KNOWN_WINDOW), KNOWN_RANDOM))
        drawn += len(windows[-1])
    return windows + list(corpus.single_tokens(KNOWN_SINGLE)[:, None])


def expected_states_for(
    model: TruncatedModel, info: ObservationInfo, progress: Progress = silent
) -> tuple[ExpectedStates, float]:
    """Return the state that is expected of every token, from the cache or computed now, and the seconds that took."""
    stages = training_channel(model, info)
    exact = [info.provider_dtype, info.quantization]
    identity = identity_of(model, stages) | {"expected": BEHIND, "exact": exact}
    tensors, seconds = load_cached(identity, model), 0.0
    if tensors is None:
        started = time.perf_counter()
        known, _ = known_rows_for(model, info, progress)
        # Single tokens stand alone at the end: their states are those of first tokens, which are unlike later ones.
        later = known.own - KNOWN_SINGLE
        known = KnownRows(known.states[:later], known.tokens[:later], later)
        text = Corpus(model, TEXT_SEED, language_reference).text_window(BEHIND)
        fast, provider = (Channel.parse(of).provider_model(model) for of in (stages, info.channel))
        tensors = dict(vars(ExpectedStates.make(fast, known, text, progress, exact=provider)))
        with suppress(InputError):
            save_cached(identity, tensors)
        seconds = time.perf_counter() - started
    return ExpectedStates(**tensors), seconds


def keep_known_rows(model: TruncatedModel, info: ObservationInfo, known: KnownRows) -> None:
    """Write rows of known tokens to the cache, rounded: a regression resolves less. No folder to write in is no error.

    They reveal the prompts that were recovered; only their owner may read the file.
    """
    tensors = {
        "states": known.states.bfloat16(),
        "tokens": known.tokens.int(),
        "own": torch.tensor(known.own),
    }
    with suppress(InputError):
        save_cached(_known_identity(model, training_channel(model, info)), tensors)


def regression_for(
    model: TruncatedModel, info: ObservationInfo, known: KnownRows, progress: Progress = silent
) -> tuple[Probe, int]:
    """Return a regression of known rows, and of how many; from the cache where few were added since."""
    table = model.embedding.detach()
    identity = _known_identity(model, training_channel(model, info)) | {"regression": True}
    tensors, rows = load_cached(identity, model), 0
    if tensors is not None:
        rows = int(tensors.pop("rows"))
        if rows <= len(known) and not known.outgrown(rows):
            return Probe.from_tensors(ProbeSettings(), tensors).with_table(table), rows
    text = text_rows_for(model, info, progress)
    tensors = ridge_probe(known, text, table, *_whitening_for(model)).tensors()
    probe = Probe.from_tensors(ProbeSettings(), tensors).with_table(table)
    if rows > len(known):
        return probe, len(known)  # the cache holds one of more rows, and keeps it
    with suppress(InputError):
        save_cached(identity, tensors | {"rows": torch.tensor(len(known))})
    return probe, len(known)


def _whitening_for(model: TruncatedModel) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and whitening matrix of the model's embedding table, from the cache or computed now."""
    table = model.embedding.detach()
    identity = {
        "format": FORMAT, "shape": list(table.shape), "dtype": str(table.dtype), "signature": model.signature,
        "rows": digest_of([repr(row.tolist()) for row in table[:: max(1, len(table) // SPREAD)].float()]),
        "whitening": True,
    }  # fmt: skip
    tensors = load_cached(identity, model)
    if tensors is None:
        mean, matrix = whitening(table)
        tensors = {"mean": mean, "matrix": matrix}
        with suppress(InputError):
            save_cached(identity, tensors)
    return tensors["mean"], tensors["matrix"]


def _known_identity(model: TruncatedModel, stages: list[str]) -> dict[str, Any]:
    drawn = [KNOWN_TEXT, KNOWN_WINDOW, KNOWN_RANDOM, KNOWN_SINGLE]
    return identity_of(model, stages) | {"known": drawn}
