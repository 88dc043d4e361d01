"""Simulate a provider, honest or not: it turns prompts into tokens, and gives a verifier the states behind them.

A `Variant` says what the provider really does. It is written as parts joined by ``+``: ``nf4``,
``kv=fp8+temperature=0.96``, ``batch=1+attention=eager``. Its transcripts *claim* the model and the sampling that were
asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import DynamicCache

from hiddenlab.defenses.verification.causal_lm import WholeModel, load_whole
from hiddenlab.defenses.verification.sampling import Noise, Sampling, StreamNoise, sample
from hiddenlab.defenses.verification.transcript import Transcript
from hiddenlab.errors import InputError
from hiddenlab.types import Progress, silent

BATCH = 50
QUANTIZATIONS = ("int8", "nf4")
KV_DTYPES = ("fp8", "int8", "int4")
WEIGHT_DTYPES = ("fp8",)
HONEST = "honest"
LOADED = (
    "dtype",
    "attention",
    "quantization",
    "weights",
    "model",
    "layers",
)  # parts of a variant: which model runs
SAMPLED = ("temperature", "top_p", "top_k", "seed")  # and how it draws


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A provider's deviations from what was asked; None and 0 mean no deviation.

    Attributes:
        dtype, attention, batch, threads: how it computes.
        cache: 1 for a KV cache; 0 computes every token by a prefill of all before it.
        quantization: of weights, by bitsandbytes.
        weights: rounding of the weights of all linear layers but the head, and of what enters these layers.
        kv: rounding of the KV cache.
        model: another one than advertised.
        layers: run only so many of the first.
        system: a text put before every prompt.
        temperature, top_p, top_k: used in place of those asked for.
        seed: added to the one asked for.
        bug, rate: with probability ``rate`` a token is drawn uniformly from the ``bug`` likeliest (DiFR, section 5.1).
    """

    dtype: str | None = None
    attention: str | None = None
    batch: int | None = None
    threads: int | None = None
    cache: int = 1
    quantization: str | None = None
    weights: str | None = None
    kv: str | None = None
    model: str | None = None
    layers: int | None = None
    system: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int = 0
    bug: int = 0
    rate: float = 0.01

    def __post_init__(self) -> None:
        for name, least in (("batch", 1), ("threads", 1), ("layers", 1), ("bug", 0)):
            if (value := getattr(self, name)) is not None and value < least:
                raise InputError(f"provider: {name} is {value}; a whole number from {least}")
        if self.cache not in (0, 1) or not 0 <= self.rate <= 1:
            raise InputError(f"provider: cache is {self.cache} (0 or 1), rate is {self.rate} (from 0 to 1)")
        if self.kv is not None and not self.cache:
            raise InputError("provider: kv says how a cache rounds, and cache=0 leaves the cache out")
        if self.weights is not None and self.quantization is not None:
            raise InputError(
                f"provider: weights={self.weights} and {self.quantization} both round the weights"
            )

    @classmethod
    def parse(cls, text: str) -> Variant:
        """Read a variant from text.

        Raises:
            InputError: a part is unknown, or a value is of another kind.
        """
        known = {f.name: str(f.type) for f in fields(cls)}
        options: dict[str, Any] = {}
        for part in text.split("+"):
            name, _, value = part.strip().partition("=")
            if name == HONEST and not value:
                continue
            if name in QUANTIZATIONS and not value:
                name, value = "quantization", name
            if name not in known or not value:
                raise InputError(
                    f"provider {text!r}: {part!r} is no part of a variant; known are {HONEST}, "
                    f"{', '.join(QUANTIZATIONS)} and NAME=VALUE with {', '.join(known)}"
                )
            if name in options:
                raise InputError(f"provider {text!r}: {name} stands twice")
            options[name] = _number(text, name, value, known[name])
        for name, kinds in (("kv", KV_DTYPES), ("weights", WEIGHT_DTYPES)):
            if options.get(name) not in (None, *kinds):
                raise InputError(f"provider {text!r}: {name} is one of {', '.join(kinds)}")
        return cls(**options)

    def check_only(self, names: Sequence[str], why: str) -> None:
        """Check that the variant deviates in these parts only.

        Args:
            names: the parts that are allowed.
            why: reason for the error message.

        Raises:
            InputError: another part deviates.
        """
        for part in fields(self):
            if part.name not in names and getattr(self, part.name) != part.default:
                raise InputError(f"provider: {part.name} has no meaning here: {why}")

    def sampling(self, asked: Sampling) -> Sampling:
        """Return how the provider really samples."""
        changes = {
            name: value
            for name in ("temperature", "top_p", "top_k")
            if (value := getattr(self, name)) is not None
        }
        return replace(asked, **changes, seed=asked.seed + self.seed)

    def load(self, model: str, dtype: str, device: str) -> WholeModel:
        """Load the model that the provider runs where ``model`` in ``dtype`` was advertised."""
        whole = load_whole(
            self.model or model, dtype=self.dtype or dtype, device=device, quantization=self.quantization,
            attention=self.attention, layers=self.layers,
        )  # fmt: skip
        if self.weights is not None:
            coarsen(whole)
        return whole


def _number(text: str, name: str, value: str, kind: str) -> Any:
    for word, parse in (("int", int), ("float", float)):
        if kind.startswith(word):
            try:
                return parse(value)
            except ValueError:
                raise InputError(f"provider {text!r}: {name} is {value!r}, no number") from None
    return value


class CoarseCache(DynamicCache):
    """A KV cache whose new entries are rounded as in a low-precision cache.

    fp8 is float8 e4m3 with one scale per tensor; int8 and int4 have one scale for each position and head.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Round new entries, then store them."""
        return super().update(
            coarse(key_states, self.kind), coarse(value_states, self.kind), layer_idx, *args, **kwargs
        )


def coarse(values: Float[Tensor, "*shape d"], kind: str) -> Float[Tensor, "*shape d"]:
    """Return values rounded as a cache of ``kind`` stores them."""
    if kind == "fp8":
        return _eight_bits(values, values.abs().amax())
    top = {"int8": 127, "int4": 7}[kind]
    scale = values.abs().amax(-1, keepdim=True).clamp(min=1e-12) / top
    return (values / scale).round().clamp(-top, top) * scale


def _eight_bits(values: Float[Tensor, "*shape"], largest: Float[Tensor, ...]) -> Float[Tensor, "*shape"]:
    """Return values rounded to float8 e4m3, whose range ends at ``largest``."""
    scale = largest.float().clamp(min=1e-12) / torch.finfo(torch.float8_e4m3fn).max
    return ((values / scale).to(torch.float8_e4m3fn).to(values.dtype) * scale).to(values.dtype)


def coarsen(whole: WholeModel) -> None:
    """Round a model's linear layers to float8 e4m3, as vLLM's ``quantization="fp8"`` does (DiFR, appendix C).

    Weights have one scale for each tensor. What enters a layer is rounded at each pass, with one scale for each token.
    The head stays as it is. Sums are taken in the model's dtype.

    Raises:
        InputError: the model has no linear layers.
    """
    head = whole.model.get_output_embeddings()  # type: ignore[operator]
    layers = [m for m in whole.model.modules() if isinstance(m, nn.Linear) and m is not head]
    if not layers:
        raise InputError(f"provider: weights=fp8 rounds linear layers, and {whole.name} has none")
    for layer in layers:
        with torch.no_grad():
            layer.weight.copy_(coarse(layer.weight, "fp8"))
        layer.register_forward_pre_hook(_coarse_input)


def _coarse_input(layer: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    first, *others = inputs
    return _eight_bits(first, first.abs().amax(-1, keepdim=True)), *others


@dataclass(frozen=True)
class Request:
    """A user's request: its id, the prompt's token ids, and the sampling."""

    id: str
    prompt: tuple[int, ...]
    sampling: Sampling


@dataclass(frozen=True)
class Answer:
    """A provider's answer: the transcript, and the final-norm states that it computed for it.

    Attributes:
        prompt_states: of the prompt. output_states: row i is the state from which output token i was drawn.
    """

    transcript: Transcript
    prompt_states: Float[Tensor, "t d"]
    output_states: Float[Tensor, "n d"]


class Provider:
    """A simulated provider that generates as its variant says, and claims what was asked.

    Args:
        model: as advertised.
        variant: what it does.
        new_tokens: length of each answer; generation does not stop at an end token.
        dtype, device: as advertised.
        noise: makes a request's noise from its seed; default: vLLM's stream.
    """

    def __init__(
        self,
        model: str,
        variant: Variant,
        *,
        new_tokens: int,
        dtype: str = "bfloat16",
        device: str = "auto",
        noise: Callable[[int], Noise] = StreamNoise,
    ) -> None:
        self.advertised = model
        self.variant = variant
        self.new_tokens = new_tokens
        self.noise = noise
        self.whole = variant.load(model, dtype, device)
        self.system = () if variant.system is None else tuple(self._tokenize(variant.system))
        if variant.bug > self.whole.vocabulary:
            raise InputError(f"provider: the {variant.bug} likeliest of {self.whole.vocabulary} tokens")

    def _tokenize(self, text: str) -> list[int]:
        if self.whole.tokenizer is None:
            raise InputError(f"{self.whole.name} has no tokenizer for a system prompt")
        return list(self.whole.tokenizer(text)["input_ids"])

    def answer(self, requests: Sequence[Request], progress: Progress = silent) -> Iterator[Answer]:
        """Answer requests in order, computed in batches."""
        size = self.variant.batch or BATCH
        before = torch.get_num_threads()
        if self.variant.threads is not None:
            torch.set_num_threads(self.variant.threads)
        try:
            for start in range(0, len(requests), size):
                batch = requests[start : start + size]
                yield from self._batch(batch)
                progress("requests", start + len(batch), len(requests))
        finally:
            torch.set_num_threads(before)

    def _batch(self, requests: Sequence[Request]) -> Iterator[Answer]:
        prompts = [(*self.system, *request.prompt) for request in requests]
        longest = max(map(len, prompts))
        for request, prompt in zip(requests, prompts, strict=True):
            self.whole.check_tokens(prompt, f"request {request.id!r}")
        self.whole.check_length(
            longest + self.new_tokens, f"a prompt of {longest} tokens and {self.new_tokens} new ones"
        )
        padded = torch.tensor([[p[0]] * (longest - len(p)) + list(p) for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        drawers = [self._drawer(request) for request in requests]
        kept: list[Tensor] = []
        first: Tensor | None = None
        tokens = padded.to(self.whole.device)
        mask = mask.to(self.whole.device)
        cache = self._cache()
        feed = tokens
        for _ in range(self.new_tokens):
            step = self.whole.step(feed, mask, cache)
            first = step.states.cpu() if first is None else first
            kept.append(step.states[:, -1].cpu())
            drawn = torch.tensor(
                [draw(step.logits[i : i + 1].float().cpu()) for i, draw in enumerate(drawers)],
                device=self.whole.device,
            )[:, None]
            tokens = torch.cat([tokens, drawn], 1)
            mask = torch.cat([mask, torch.ones_like(drawn)], 1)
            feed = drawn if cache is not None else tokens
        assert first is not None
        rows = torch.stack(kept, 1)
        output = tokens[:, longest:].tolist()
        for i, request in enumerate(requests):
            transcript = Transcript(
                request.id, self.advertised, request.prompt, tuple(output[i]), request.sampling
            )
            # A hidden system prompt's states are not shown: the provider hides it.
            shown = first[i, longest - len(request.prompt) :]
            yield Answer(transcript, shown.clone(), rows[i].clone())

    def _cache(self) -> Any:
        if not self.variant.cache:
            return None
        return DynamicCache() if self.variant.kv is None else CoarseCache(self.variant.kv)

    def _drawer(self, request: Request) -> Callable[[Float[Tensor, "1 v"]], int]:
        """Return a function that draws one request's tokens, one after the other."""
        sampling = self.variant.sampling(request.sampling)
        noise = self.noise(sampling.seed)
        bugs = torch.Generator().manual_seed(sampling.seed ^ 0x5EED)
        before = list(request.prompt)

        def draw(logits: Tensor) -> int:
            token = sample(logits, noise, sampling, before)
            if self.variant.bug and float(torch.rand(1, generator=bugs)) < self.variant.rate:
                place = int(torch.randint(self.variant.bug, (1,), generator=bugs))
                token = int(logits[0].topk(self.variant.bug).indices[place])
            before.append(token)
            return token

        return draw
