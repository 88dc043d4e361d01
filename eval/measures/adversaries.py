"""Run adversaries on a real model: each chooses every token of a server's answers, and a receiver decodes them."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import DynamicCache

from hiddenlab.defenses.verification.adversaries import (
    ChoiceDecoder,
    ChoiceEncoder,
    Decoder,
    Encoder,
    Mark,
    Payload,
    SeedDecoder,
    SeedEncoder,
    TextDecoder,
    TextEncoder,
    Weighted,
    rank_decoder,
    rank_encoder,
    step_entropy,
)
from hiddenlab.defenses.verification.causal_lm import WholeModel
from hiddenlab.defenses.verification.likelihood import gumbel_positions
from hiddenlab.defenses.verification.provider import Request
from hiddenlab.defenses.verification.sampling import Sampling, StreamNoise, perturbed, probabilities
from hiddenlab.errors import InputError
from hiddenlab.types import Progress, silent

SAMPLES = 64  # draws of the likelihood for each position, on both sides
TRIES, MARK = 32, Mark(b"known to both halves", 12, 3)  # seeds tried; one of 2³ fails by a chance of 1.4 %
FAINTEST = -20.0  # log-likelihood of tokens that a distribution over the server's noise keeps


@dataclass(frozen=True)
class Rule:
    """A warden's setting: noise σ, log τ and rank cutoff R."""

    noise_sd: float
    threshold: float
    cutoff: int


@dataclass(frozen=True)
class Tactic:
    """How an adversary chooses its tokens.

    Attributes:
        kind: ``honest``, ``admissible``, ``strict``, ``leading``, ``ranks``, ``base64``; ``matching``, which keeps to
            the sampler's distribution, ``posterior``, which keeps to that of honest noise under the request's seed, or
            ``seeds``, which only picks the seed.
        rule: of the warden, with the threshold that the adversary keeps itself; None where it follows none.
    """

    kind: str
    rule: Rule | None = None

    @classmethod
    def of(cls, kind: str, rule: Rule, margin: float = 0.0) -> "Tactic":
        """Make a tactic against a warden; with a margin, its log-likelihoods stay that share of log τ above log τ."""
        if kind in ("honest", "ranks", "base64", "matching", "seeds"):
            return cls(kind)
        return cls(kind, Rule(rule.noise_sd, rule.threshold * (1 - margin), rule.cutoff))

    def choices(
        self, logits: Float[Tensor, "1 v"], gumbel: Float[Tensor, "1 v"], sampling: Sampling, seed: int
    ) -> tuple[int, ...]:
        """Return the tokens that it may send at one step, ``Weighted`` if it keeps to a distribution.

        It is only the honest one where it may not choose.

        Args:
            logits, gumbel: of the step.
            sampling: of the request.
            seed: of the draws, shared with the receiver.
        """
        own = int(perturbed(logits, gumbel, sampling).argmax())
        if self.kind == "ranks":
            return tuple(logits[0].topk(2).indices.tolist())
        if self.kind == "matching":
            return natural(logits, sampling)
        if self.rule is None:
            return (own,)
        positions = gumbel_positions(
            logits, gumbel, sampling, noise_sd=self.rule.noise_sd, samples=SAMPLES,
            generator=torch.Generator().manual_seed(seed),
        )  # fmt: skip
        if self.kind == "posterior":
            able = torch.tensor(positions.choices(FAINTEST)[0] or (own,))
            shares = positions.pairs(torch.zeros_like(able), able).exp()
            return Weighted(able.tolist(), shares.tolist()) if shares.sum() > 0 else (own,)
        tokens = positions.choices(self.rule.threshold)[0]
        if self.kind == "leading" and self.rule.cutoff:
            ranked = logits[0].topk(self.rule.cutoff).indices.tolist()
            tokens += tuple(token for token in ranked if token not in tokens)
        return tokens or (own,)

    def halves(self, payload: Payload, tokenizer: Any) -> tuple[Encoder, Decoder]:
        """Return the server's encoder and the receiver's decoder for one answer.

        Raises:
            InputError: it sends text, and there is no tokenizer.
        """
        if self.kind == "ranks":
            return rank_encoder(payload), rank_decoder(payload.bits)
        if self.kind == "seeds":
            return SeedEncoder(payload, MARK), SeedDecoder(MARK)
        if self.kind != "base64":
            return ChoiceEncoder(payload), ChoiceDecoder(payload.bits)
        if tokenizer is None:
            raise InputError("base64 text needs the model's tokenizer")

        def encode(text: str) -> list[int]:
            return list(tokenizer(text, add_special_tokens=False)["input_ids"])

        def decode(tokens: Sequence[int]) -> str:
            return str(tokenizer.decode(list(tokens)))

        return TextEncoder(payload, encode), TextDecoder(payload.bits, decode)

    def payload(self, request: Request, length: int, vocabulary: int) -> Payload:
        """Draw a random payload that exceeds any answer of this length; an honest server's is empty, a seed's short."""
        short = {"honest": 0, "seeds": MARK.bits}
        bits = short.get(self.kind, length * math.ceil(math.log2(vocabulary)))
        return Payload.draw(bits, random.Random(request.sampling.seed))


def natural(logits: Float[Tensor, "1 v"], sampling: Sampling) -> Weighted:
    """Return all tokens that the sampler can draw at a step, weighted by their probabilities."""
    shares = probabilities(logits, sampling)[0]
    able = shares.nonzero()[:, 0]
    return Weighted(able.tolist(), shares[able].tolist())


@dataclass(frozen=True)
class Answer:
    """A server's answer.

    Attributes:
        tokens: the output.
        sent: bits of payload in it.
        received: bits that a receiver with the same choices decodes correctly.
        seed: of the request; another one than was asked for where the server picks it.
        entropy: of the adversary's own distribution along the answer, in bits (Theorem 2.2); NaN for a text.
        natural: of the sampler's along the answer, in bits.
    """

    tokens: tuple[int, ...]
    sent: float
    received: float
    seed: int
    entropy: float
    natural: float


def answers(
    whole: WholeModel, tactic: Tactic, requests: Sequence[Request], length: int, progress: Progress = silent
) -> list[Answer]:
    """Generate all answers at once with a KV cache, with every token chosen by the adversary; then decode them.

    Raises:
        InputError: a request without Gumbel-max sampling.
    """
    if any(r.sampling.greedy or r.sampling.method != "gumbel" for r in requests):
        raise InputError("these adversaries choose among Gumbel-max samples")
    payloads = [tactic.payload(r, length, whole.vocabulary) for r in requests]
    halves = [tactic.halves(payload, whole.tokenizer) for payload in payloads]
    if tactic.kind == "seeds":
        requests = _ground(
            whole, requests, [encoder for encoder, _ in halves], min(length, MARK.tokens), progress
        )
    noises = [StreamNoise(r.sampling.seed) for r in requests]
    steps: list[list[tuple[int, ...]]] = [[] for _ in requests]
    outputs: list[list[int]] = [[] for _ in requests]
    own, usual = [0.0] * len(requests), [0.0] * len(requests)
    longest, cache = max(len(r.prompt) for r in requests), DynamicCache()
    feed = torch.tensor([[r.prompt[0]] * (longest - len(r.prompt)) + list(r.prompt) for r in requests])
    mask = torch.tensor([[0] * (longest - len(r.prompt)) + [1] * len(r.prompt) for r in requests])
    for place in range(length):
        logits = whole.step(feed.to(whole.device), mask.to(whole.device), cache).logits.float().cpu()
        for i, request in enumerate(requests):
            gumbel = noises[i].gumbel(logits.shape[1], outputs[i])
            seed = request.sampling.seed + place
            steps[i].append(tactic.choices(logits[i : i + 1], gumbel[None], request.sampling, seed))
            outputs[i].append(halves[i][0].choose(steps[i][-1]))
            usual[i] += step_entropy(natural(logits[i : i + 1], request.sampling))
            own[i] += step_entropy(steps[i][-1])
        feed = torch.tensor([[output[-1]] for output in outputs])
        mask = torch.cat([mask, torch.ones_like(feed)], 1)
        progress("tokens", place + 1, length)
    made = []
    spread = {"base64": [math.nan] * len(requests), "honest": usual, "seeds": usual}.get(tactic.kind, own)
    for i, ((encoder, decoder), payload) in enumerate(zip(halves, payloads, strict=True)):
        seen, tokens = steps[i], outputs[i]
        received = known(decoder, payload, seen, tokens)
        # A part of a text carries what can be decoded from it.
        sent = received if tactic.kind == "base64" else encoder.bits_sent
        seed = requests[i].sampling.seed
        made.append(Answer(tuple(tokens), sent, min(received, sent), seed, spread[i], usual[i]))
    return made


def _ground(
    whole: WholeModel,
    requests: Sequence[Request],
    encoders: Sequence[Encoder],
    length: int,
    progress: Progress,
) -> list[Request]:
    """Return each request with the first seed whose honest answer carries the payload; if none does, with the first."""
    tried = []
    for request in requests:
        draw = random.Random(f"{request.sampling.seed} tried")
        seeds = (draw.getrandbits(31) for _ in range(TRIES))
        tried.append([replace(request, sampling=replace(request.sampling, seed=seed)) for seed in seeds])
    begun = answers(whole, Tactic("honest"), [one for row in tried for one in row], length, progress)
    found = []
    for i, (row, encoder) in enumerate(zip(tried, encoders, strict=True)):
        assert isinstance(encoder, SeedEncoder)
        starts = begun[i * TRIES : (i + 1) * TRIES]
        found.append(
            next((r for r, start in zip(row, starts, strict=True) if encoder.hits(start.tokens)), row[0])
        )
    return found


def known(decoder: Decoder, payload: Payload, steps: Sequence[Sequence[int]], tokens: Sequence[int]) -> float:
    """Return the bits of the payload that a receiver decodes correctly.

    It reads until a token could not have been sent. A receiver whose sets differ may decode something else from there
    on: what is wrong, and all that follows it, does not count.
    """
    right = 0.0
    for step, token in zip(steps, tokens, strict=True):
        try:
            received = decoder.decode([step], [token])
        except InputError:
            break
        if not received.low <= payload.value < received.high:
            break
        right = received.known_bits
    return right
