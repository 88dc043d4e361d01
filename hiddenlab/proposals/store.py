"""Keep probes and token tables in the cache, by model, layer, channel and settings."""

import json
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from hiddenlab.channels import Channel, in_order
from hiddenlab.errors import InputError
from hiddenlab.models import TruncatedModel
from hiddenlab.models.request import packs
from hiddenlab.models.self_check import uncounted
from hiddenlab.proposals import sorted_states
from hiddenlab.proposals.corpus import Corpus, language_reference
from hiddenlab.proposals.first_token_table import FirstTokenTable, SortedStates
from hiddenlab.proposals.in_context import FEATURE_LAYERS, Adapter
from hiddenlab.proposals.pairwise_order import PairwiseOrder, pairwise_order_settings
from hiddenlab.proposals.probe import Probe, fast_dtype, probe_settings, token_prior, train_probe
from hiddenlab.proposals.ridge import KnownRows
from hiddenlab.proposals.sorted_states import Contexts
from hiddenlab.proposals.text_rows import TextRows
from hiddenlab.types import ObservationInfo, Progress, Site, silent
from hiddenlab.utils.cache import cache_path
from hiddenlab.utils.digests import digest_of
from hiddenlab.utils.files import save_tensors

FORMAT = 3
# Floating-point operations spent on the attacker's own training states: about 50 s on two CPU cores that multiply
# bfloat16.
STATE_FLOPS = {"cpu": 10.8e12, "cuda": 3e15}
SCREEN_WIDTH = 128
# Speed of the in-context regression's large half-precision products, relative to small passes of a truncated model.
REGRESSION_SPEED = 4
TRAINING_TOKENS = (20_000, 100_000)
# A probe for an earlier token has less to learn: it can mostly tell which kind of token it is.
EARLIER_STEPS = 1000
# Cost limit of states behind texts, relative to that of training states: two texts up to layer 16 of the built-in
# model. At its layer 26 such states make the ranking worse (docs/log/014-states-behind-texts.md).
TEXTS_ALLOWANCE = 1.05
FEWEST_TEXTS = 16  # fewest texts from which an order is learned
DRAWN = 2  # texts drawn for each one wanted, as some are too short
# What a regression starts from (docs/log/039-closed-form-probe.md): text of which every second token is random, and
# tokens that stand alone, as the first of a prompt does.
KNOWN_TEXT, KNOWN_WINDOW, KNOWN_RANDOM, KNOWN_SINGLE = 4000, 64, 0.5, 800
ANNOUNCED, TIMED = 2.0, 128  # seconds from which a wait is announced; tokens of the pass that estimates it
# Running text on which proposals are calibrated, and how often at most a window is drawn.
TEXT_WINDOWS, TEXT_LENGTH, TEXT_SEED, TEXT_DRAWS = 4, 32, 9, 64
CONTEXT_WINDOWS, CONTEXT_LENGTH = 8, 40  # windows on which the weights of states behind texts are set


def _affordable_tokens(model: TruncatedModel) -> float:
    """Return how many positions the compute allowance runs through the truncated model."""
    return STATE_FLOPS.get(model.device.type, STATE_FLOPS["cpu"]) / (2 * model.layer_weights)


def training_tokens(model: TruncatedModel) -> int:
    """Return how many training positions the compute allowance buys at this depth."""
    low, high = TRAINING_TOKENS
    return int(min(max(_affordable_tokens(model), low), high))


def screen_width(model: TruncatedModel) -> int | None:
    """Return the width of the shortlist's projection, None where scoring the vocabulary is cheaper than the model."""
    return SCREEN_WIDTH if model.embedding.numel() > 4 * model.layer_weights else None


def training_channel(model: TruncatedModel, info: ObservationInfo) -> list[str]:
    """Return the stages that change values; mere permutations do not change what a probe must learn.

    Where the processor is faster in bfloat16, the attacker's own states are computed in it: its rounding is far below
    what a probe can resolve (docs/log/002-cheaper-proposals.md).
    """
    channel = Channel.parse(list(info.channel))
    stages = [defense.spec for defense in channel.defenses if not _only_permutes(defense)]
    fast = fast_dtype(model.device)
    plain = info.provider_dtype == "float32" and info.quantization is None
    if plain and model.dtype == torch.float32 and model.quantization is None and fast != torch.float32:
        stages.append(f"dtype:{str(fast).removeprefix('torch.')}")
    return stages


def _only_permutes(defense: object) -> bool:
    options = {"dtype": "float32", "quantization": None}
    if defense.provider(dict(options)) != options:  # type: ignore[attr-defined]
        return False
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(5, 64, generator=generator)
    if not torch.equal(defense.inputs(rows, rows, generator), rows):  # type: ignore[attr-defined]
        return False
    states = defense.states(rows, generator)[0]  # type: ignore[attr-defined]
    return states.shape == rows.shape and torch.equal(
        states.flatten().sort().values, rows.flatten().sort().values
    )


def collect_states(
    model: TruncatedModel, channel: list[str], tokens: int, seed: int, progress: Progress = silent
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Collect the attacker's training set: states as the channel releases them, and each row's token and position."""
    windows = Corpus(model, seed).windows(tokens)
    return release_windows(
        model,
        Channel.parse(channel),
        windows,
        seed,
        "collecting the probe's training states",
        progress,
        tokens,
    )


def release_windows(
    model: TruncatedModel, pipe: Channel, windows: Iterable[torch.Tensor], seed: int, stage: str,
    progress: Progress = silent, tokens: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the states of windows as a channel releases them, and each row's token and position.

    Args:
        windows: token ids. seed: of the channel's draws. stage: what progress is called.
        tokens: how many they are about; None counts those of a list.
    """
    if tokens is None:
        windows = list(windows)
        tokens = sum(map(len, windows))
    generator = torch.Generator().manual_seed(seed)
    states: list[torch.Tensor] = []
    labels: list[torch.Tensor] = []
    places: list[torch.Tensor] = []
    pack: list[torch.Tensor] = []
    done = 0

    def flush() -> None:
        for observation, truth in pipe.release_batch(model, [w.tolist() for w in pack], generator):
            states.append(in_order(observation, truth))
            labels.append(torch.tensor(truth.tokens))
            places.append(torch.arange(len(truth.tokens)))

    for window in windows:
        pack.append(window)
        if sum(map(len, pack)) >= model.max_pass_tokens // 2:
            flush()
            done += sum(map(len, pack))
            pack = []
            progress(stage, min(done, tokens), tokens)
    if pack:
        flush()
    progress(stage, tokens, tokens)
    return torch.cat(states).float().to(model.device), torch.cat(labels), torch.cat(places)


def probe_for(
    model: TruncatedModel, info: ObservationInfo, progress: Progress = silent
) -> tuple[Probe, float]:
    """Return the probe for a channel, from the cache or trained now, and the seconds of training (0 if cached)."""
    probes, seconds = probes_for(model, info, (0,), progress)
    return probes[0], seconds


def probes_for(
    model: TruncatedModel, info: ObservationInfo, offsets: Sequence[int], progress: Progress = silent
) -> tuple[list[Probe], float]:
    """Return probes for a channel that predict tokens at some offsets before the row's own, and the seconds they took.

    Attention leaves traces of earlier tokens in a state; a probe for them is a proposal where their own rows are not
    shown. All are trained on the same states.

    Args:
        offsets: 0 is the row's own token.
    """
    own = probe_settings(info.columns_permuted is not None)
    channel = training_channel(model, info)
    tokens = training_tokens(model)
    base = identity_of(model, channel) | {"tokens": tokens}
    collected = None
    started = time.perf_counter()
    probes = []
    for offset in offsets:
        settings = own if offset == 0 else replace(own, steps=EARLIER_STEPS)
        identity = base | {"settings": asdict(settings)} | ({"offset": offset} if offset else {})
        tensors = _load(identity, model)
        if tensors is None:
            if collected is None:
                collected = collect_states(model, channel, tokens, settings.seed, progress)
            states, labels, places = collected
            if offset:  # the first rows of a window have no token at that offset
                states, labels = (
                    states[(places >= offset).to(states.device)],
                    labels.roll(offset)[places >= offset],
                )
            with torch.inference_mode(False):
                probe = train_probe(states, labels, model.embedding.detach().clone(), settings, progress)
            tensors = probe.tensors()
            _save(identity, tensors)
        probes.append(Probe.from_tensors(settings, tensors).parents(model.embedding, screen_width(model)))
    trained = collected is not None
    if own.sorted_states and 0 in offsets:
        probe = probes[list(offsets).index(0)]
        contexts, made = _contexts_for(model, channel, probe, base, progress)
        trained |= made
        if contexts is not None and contexts.useful:
            probe.beside(contexts)
    return probes, time.perf_counter() - started if trained else 0.0


def has_trained_probe(model: TruncatedModel, info: ObservationInfo) -> bool:
    """Return whether the cache holds a trained probe for a channel."""
    settings = probe_settings(info.columns_permuted is not None)
    identity = identity_of(model, training_channel(model, info)) | {"tokens": training_tokens(model)}
    return _path(identity | {"settings": asdict(settings)}).is_file()


def known_rows_for(
    model: TruncatedModel, info: ObservationInfo, progress: Progress = silent
) -> tuple[KnownRows, float]:
    """Return rows of known tokens for a channel, from the cache or collected now, and the seconds that took."""
    stages = training_channel(model, info)
    tensors = _load(_known_identity(model, stages), model)
    if tensors is not None:
        return KnownRows(tensors["states"].float(), tensors["tokens"].long(), int(tensors["own"])), 0.0
    started = time.perf_counter()
    drawn, pipe = known_windows(model), Channel.parse(stages)
    if (seconds := _estimate(pipe.provider_model(model), sum(map(len, drawn)))) > ANNOUNCED:
        told = f"no probe for layer {model.site.layer} of {model.ref.name} yet: a first one takes about {seconds:.0f} s"
        progress(f"{told}; it stays, and learns from every token that is verified", 0, 0)
    states, tokens, _ = release_windows(
        model, pipe, drawn, 0, "collecting states for a first probe", progress
    )
    whole = states.isfinite().all(1)  # float16 may overflow
    states, tokens = states[whole], tokens.to(states.device)[whole]
    known = KnownRows(states, tokens, len(tokens))
    keep_known_rows(model, info, known)
    return known, time.perf_counter() - started


def text_rows_for(model: TruncatedModel, info: ObservationInfo, progress: Progress = silent) -> TextRows:
    """Return states of running text for a channel, from the cache or collected now."""
    stages = training_channel(model, info)
    identity = identity_of(model, stages) | {"text_rows": [TEXT_WINDOWS, TEXT_LENGTH]}
    tensors = _load(identity, model)
    if tensors is None:
        corpus, windows = Corpus(model, TEXT_SEED, language_reference), list[torch.Tensor]()
        for _ in range(TEXT_DRAWS):
            if len(windows) < TEXT_WINDOWS and len(window := corpus.text_window(TEXT_LENGTH)) == TEXT_LENGTH:
                windows.append(window)
        windows += [corpus.uniform(TEXT_LENGTH) for _ in range(TEXT_WINDOWS - len(windows))]
        stage = "collecting states of running text"
        states, tokens, _ = release_windows(model, Channel.parse(stages), windows, TEXT_SEED, stage, progress)
        shape = (TEXT_WINDOWS, TEXT_LENGTH)
        states = states.nan_to_num(0, 0, 0)  # float16 may overflow
        tensors = {"states": states.unflatten(0, shape), "tokens": tokens.unflatten(0, shape)}
        with suppress(InputError):
            _save(identity, tensors)
    return TextRows(tensors["states"], tensors["tokens"])


def _estimate(model: TruncatedModel, tokens: int) -> float:
    """Return about how many seconds the model takes for so many tokens, from one small pass."""
    with uncounted(model):
        model.encode(torch.zeros(1, dtype=torch.long))  # the first pass is slower
        started = time.perf_counter()
        model.encode(torch.zeros(TIMED, dtype=torch.long))
    return (time.perf_counter() - started) * tokens / TIMED


def known_windows(model: TruncatedModel) -> list[torch.Tensor]:
    """Return what a regression starts from: text strewn with random tokens, and single tokens."""
    corpus, windows, drawn = Corpus(model, texts=language_reference), list[torch.Tensor](), 0
    while drawn < KNOWN_TEXT:
        windows.append(corpus.strewn(corpus.text_window(KNOWN_WINDOW), KNOWN_RANDOM))
        drawn += len(windows[-1])
    return windows + list(corpus.single_tokens(KNOWN_SINGLE)[:, None])


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
        _save(_known_identity(model, training_channel(model, info)), tensors)


def _known_identity(model: TruncatedModel, stages: list[str]) -> dict[str, Any]:
    drawn = [KNOWN_TEXT, KNOWN_WINDOW, KNOWN_RANDOM, KNOWN_SINGLE]
    return identity_of(model, stages) | {"known": drawn}


def _contexts_for(
    model: TruncatedModel, channel: list[str], probe: Probe, base: dict[str, Any], progress: Progress
) -> tuple[Contexts | None, bool]:
    """Return mean states behind texts with their weights, and whether they were made now; none for deep models.

    Args:
        base: what the probe depends on, apart from its settings.
    """
    count = min(sorted_states.MOST, int(TEXTS_ALLOWANCE * _affordable_tokens(model) // model.vocab_size))
    if count < sorted_states.FEWEST:
        return None, False
    identity = base | {"contexts": count, "settings": asdict(probe.settings)}
    tensors = _load(identity, model)
    if tensors is not None:
        weights = tensors.pop("weights").tolist()
        return Contexts(SortedStates(**tensors), (weights[0], weights[1])), False
    pipe, corpus = Channel.parse(channel), Corpus(model, probe.settings.seed + 5)
    texts = [corpus.text_window(sorted_states.LENGTH) for _ in range(count)]
    made = Contexts.make(pipe.provider_model(model), texts, progress)
    windows = [corpus.text_window(CONTEXT_LENGTH).tolist() for _ in range(CONTEXT_WINDOWS)]
    drawn = torch.Generator().manual_seed(probe.settings.seed)
    released = pipe.release_batch(model, windows, drawn)
    # First rows are left to the table of first tokens.
    rows = (
        torch.cat([in_order(observation, truth)[1:] for observation, truth in released])
        .float()
        .to(model.device)
    )
    tokens = torch.tensor([token for window in windows for token in window[1:]], device=model.device)
    usual = torch.cat(list(Corpus(model, probe.settings.seed).windows(TRAINING_TOKENS[0]))).to(model.device)
    prior = token_prior(usual, model.vocab_size, probe.settings)
    made = made.weighed(probe.log_probs, rows, tokens, prior)
    _save(identity, made.states.tensors() | {"weights": torch.tensor(made.weights)})
    return made, True


def first_token_table_for(
    model: TruncatedModel, info: ObservationInfo, progress: Progress = silent
) -> tuple[FirstTokenTable | None, float]:
    """Return the states of all one-token prompts for a channel, from the cache or made now, and the seconds that took.

    Useful where columns are permuted, since the probe then predicts the first token badly. None where they are not,
    where unknown embeddings stand before the first token, and where the vocabulary is more than the attacker's
    allowance runs through the truncated model.
    """
    if info.columns_permuted is None or info.prefix_tokens or _affordable_tokens(model) < model.vocab_size:
        return None, 0.0
    channel = training_channel(model, info)
    identity = identity_of(model, channel) | {"openings": True}
    tensors = _load(identity, model)
    seconds = 0.0
    if tensors is None:
        started = time.perf_counter()
        tensors = FirstTokenTable.make(Channel.parse(channel).provider_model(model), progress).tensors()
        _save(identity, tensors)
        seconds = time.perf_counter() - started
    return FirstTokenTable(**tensors), seconds


def pairwise_order_for(
    model: TruncatedModel, info: ObservationInfo, progress: Progress = silent
) -> tuple[PairwiseOrder | None, float]:
    """Return the pairwise order model of a channel, cached or learned now, and the seconds that took (0 if cached).

    None where rows are in known order, and where the attacker's texts are too short to learn from.
    """
    if not info.rows_permuted:
        return None, 0.0
    settings = pairwise_order_settings(info.columns_permuted is not None)
    channel, tokens = training_channel(model, info), training_tokens(model)
    identity = identity_of(model, channel) | {"tokens": tokens, "precedence": asdict(settings)}
    tensors = _load(identity, model)
    if tensors is not None:
        return PairwiseOrder.from_tensors(tensors), 0.0
    started = time.perf_counter()
    pipe, corpus = Channel.parse(channel), Corpus(model, settings.seed + 7)
    generator = torch.Generator().manual_seed(settings.seed)
    wanted, whole = -(-tokens // settings.length), list[list[int]]()
    for i in range(DRAWN * wanted):
        if len(whole) == wanted:
            break
        window = corpus.text_window(settings.length)
        if len(window) == settings.length:
            # Half of them with random tokens in it: of text alone it learns more about its subjects than about order.
            whole.append((window if i % 2 else corpus.strewn(window)).tolist())
    if len(whole) < FEWEST_TEXTS:
        return None, 0.0
    texts = list[torch.Tensor]()
    for group in packs(whole, len, model.max_pass_tokens // 2):
        progress("collecting rows in their order", len(texts), len(whole))
        rows = [
            in_order(*pair).float().to(model.device) for pair in pipe.release_batch(model, group, generator)
        ]
        rows = [states for states in rows if bool(states.isfinite().all())]  # float16 may overflow
        texts += [states.sort(dim=1).values for states in rows] if settings.sorted_states else rows
    progress("collecting rows in their order", len(whole), len(whole))
    if len(texts) < FEWEST_TEXTS:
        return None, time.perf_counter() - started
    learned = PairwiseOrder.learn(texts, settings, progress)
    _save(identity, learned.tensors())
    return learned, time.perf_counter() - started


def adapter_for(model: TruncatedModel, progress: Progress = silent) -> tuple[Adapter | None, float]:
    """Return the vocabulary's descriptions for in-context learning, and the seconds they took (0 if cached).

    They are the same at every layer and for every channel of a model. None where the truncated model is so shallow that
    running the vocabulary costs less than predicting it.
    """
    if REGRESSION_SPEED * model.layer_weights < model.vocab_size * 2 * model.width:
        return None, 0.0
    layers = max(1, min(FEATURE_LAYERS, model.site.layer))
    shallow = model
    if model.site != Site(layers) or model.quantization is not None:
        shallow = model.sibling(layers, dtype=str(model.dtype).removeprefix("torch."))
    identity = identity_of(shallow, []) | {"features": True}
    tensors = _load(identity, model)
    seconds = 0.0
    if tensors is None:
        started = time.perf_counter()
        adapter = Adapter.describe(shallow, progress)
        tensors = {"features": adapter.features}
        _save(identity, tensors)
        seconds = time.perf_counter() - started
    return Adapter(**tensors), seconds


def identity_of(model: TruncatedModel, channel: list[str]) -> dict[str, Any]:
    """Return what states depend on, the first part of the key of a cached file."""
    return {
        "format": FORMAT,
        "signature": model.signature,
        "site": asdict(model.site),
        "width": model.width,
        "vocabulary": model.vocab_size,
        # Fine-tuned models often share their embeddings, and so their signature.
        "weights": [round(float(p.flatten()[0]), 6) for p in model.module.parameters()],
        "dtype": str(model.dtype),
        "channel": channel,
        # Without a tokenizer the training windows hold no text.
        **({} if model.tokenizer is not None else {"text": False}),
    }


def _path(identity: dict[str, Any]) -> Path:
    return cache_path("probes", f"{digest_of(identity)}.safetensors")


def _load(identity: dict[str, Any], model: TruncatedModel) -> dict[str, torch.Tensor] | None:
    path = _path(identity)
    if path.is_file():
        with suppress(OSError, SafetensorError, KeyError, ValueError), safe_open(path, "pt") as file:
            return {name: file.get_tensor(name).to(model.device) for name in file.keys()}  # noqa: SIM118
    return None


def _save(identity: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    given = {name: value.cpu().contiguous() for name, value in tensors.items()}
    save_tensors(_path(identity), given, {"hiddenlab": json.dumps(identity)})
