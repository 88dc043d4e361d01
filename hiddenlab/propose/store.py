"""Trained probes in the cache, by model, layer, channel and settings, so that the second attack starts at once."""

import hashlib
import json
import os
import time
from contextlib import suppress
from dataclasses import asdict, replace

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from hiddenlab.channel import Channel
from hiddenlab.core import Progress, Public, silent
from hiddenlab.propose.corpus import Corpus
from hiddenlab.propose.probe import Probe, ProbeSettings, train_probe
from hiddenlab.slice import Slice
from hiddenlab.slice.load import cache_dir

FORMAT = 2
# Floating-point operations spent on the attacker's own training states: an estimated 45 s on two CPU cores.
STATE_FLOPS = {"cpu": 9e12, "cuda": 3e15}
SCREEN_WIDTH = 128
TRAINING_TOKENS = (20_000, 100_000)


def training_tokens(slice: Slice) -> int:
    """How many training positions the compute allowance buys at this depth."""
    weights = sum(p.numel() for p in slice.model.parameters()) - slice.embedding.numel()
    allowed = STATE_FLOPS.get(slice.device.type, STATE_FLOPS["cpu"]) / (2 * max(weights, 1))
    low, high = TRAINING_TOKENS
    return int(min(max(allowed, low), high))


def screen_width(slice: Slice) -> int | None:
    """Width of the shortlist's projection where the vocabulary is dearer than the slice itself, else None."""
    weights = sum(p.numel() for p in slice.model.parameters()) - slice.embedding.numel()
    return SCREEN_WIDTH if slice.embedding.numel() > 4 * weights else None


def training_channel(public: Public) -> list[str]:
    """The stages that change values; mere permutations do not change what a probe must learn."""
    channel = Channel.parse(list(public.channel))
    return [defense.spec for defense in channel.defenses if not _only_permutes(defense)]


def _only_permutes(defense: object) -> bool:
    options = {"dtype": "float32", "quantization": None}
    if defense.provider(dict(options)) != options:  # type: ignore[attr-defined]
        return False
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(5, 64, generator=generator)
    if not torch.equal(defense.inputs(rows, rows, generator), rows):  # type: ignore[attr-defined]
        return False
    out = defense.states(rows, generator)[0]  # type: ignore[attr-defined]
    return out.shape == rows.shape and torch.equal(out.flatten().sort().values, rows.flatten().sort().values)


def collect_states(
    slice: Slice, channel: list[str], tokens: int, seed: int, progress: Progress = silent
) -> tuple[torch.Tensor, torch.Tensor]:
    """The attacker's training set: states as the channel releases them, and the token of each row."""
    corpus, pipe = Corpus(slice, seed), Channel.parse(channel)
    generator = torch.Generator().manual_seed(seed)
    states: list[torch.Tensor] = []
    labels: list[torch.Tensor] = []
    pack: list[torch.Tensor] = []
    done = 0

    def flush() -> None:
        for observation, secret in pipe.release_batch(slice, [w.tolist() for w in pack], generator):
            rows = observation.states
            states.append(rows[torch.tensor(secret.row_order).argsort()] if secret.row_order else rows)
            labels.append(torch.tensor(secret.tokens))

    for window in corpus.windows(tokens):
        pack.append(window)
        if sum(map(len, pack)) >= slice.max_pass_tokens // 2:
            flush()
            done += sum(map(len, pack))
            pack = []
            progress("collecting the probe's training states", min(done, tokens), tokens)
    if pack:
        flush()
    progress("collecting the probe's training states", tokens, tokens)
    return torch.cat(states).float().to(slice.device), torch.cat(labels)


def probe_for(
    slice: Slice, public: Public, settings: ProbeSettings | None = None, progress: Progress = silent
) -> tuple[Probe, float]:
    """The probe for a channel, from the cache or trained now, and the seconds that training took (0 if cached)."""
    settings = replace(settings or ProbeSettings(), sorted_states=public.columns_permuted is not None)
    if settings.sorted_states:
        settings = replace(settings, steps=600)
    channel = training_channel(public)
    tokens = training_tokens(slice)
    identity = {
        "format": FORMAT,
        "signature": slice.signature,
        "site": asdict(slice.site),
        "width": slice.width,
        "vocabulary": slice.vocab_size,
        # Fine-tuned models often share their embeddings, hence their signature.
        "weights": [round(float(p.flatten()[0]), 6) for p in slice.model.parameters()],
        "dtype": str(slice.dtype),
        "channel": channel,
        "tokens": tokens,
        "settings": asdict(settings),
    }
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    path = cache_dir() / "probes" / f"{key}.safetensors"
    if path.is_file():
        with suppress(OSError, SafetensorError, KeyError, ValueError), safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name).to(slice.device) for name in file.keys()}  # noqa: SIM118
            return Probe.from_tensors(settings, tensors).attach(slice.embedding, screen_width(slice)), 0.0
    started = time.perf_counter()
    states, labels = collect_states(slice, channel, tokens, settings.seed, progress)
    with torch.inference_mode(False):
        probe = train_probe(states, labels, slice.embedding.detach().clone(), settings, progress)
    path.parent.mkdir(parents=True, exist_ok=True)
    work = path.with_suffix(f".{os.getpid()}.tmp")
    save_file(
        {name: value.cpu().contiguous() for name, value in probe.tensors().items()},
        work,
        {"hiddenlab": json.dumps(identity)},
    )
    work.replace(path)
    return probe.attach(slice.embedding, screen_width(slice)), time.perf_counter() - started
