"""Hide a payload in the output of an inference server, and recover it from the tokens: encoders and their decoders.

At each step an encoder receives the tokens that it may send and picks one. `ChoiceEncoder` uses the full capacity of
each choice; restricted to the two likeliest tokens it is the naive coding of Rinberg et al. 2025, section 2.4
(`rank_encoder`). Over `Weighted` tokens it keeps to a given distribution. `TextEncoder` sends base64 and ignores the
allowed set (section 4.2). `SeedEncoder` sends honest tokens, and hides its bits in the seed (appendix D.5). Decoders
receive the same tokens. Where these depend on the seed, the decoder has to know it (the setting of Theorem 4.1).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import math
import random
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal, Protocol, runtime_checkable

from hiddenlab.errors import InputError


@dataclass(frozen=True)
class Payload:
    """The bits to be sent, as a number whose highest bit comes first.

    Attributes:
        value: from 0, below 2^bits.
        bits: number of bits.
    """

    value: int
    bits: int

    def __post_init__(self) -> None:
        if self.bits < 0 or not 0 <= self.value < 1 << self.bits:
            raise InputError(f"a payload of {self.bits} bits cannot be a number of {self.value.bit_length()}")

    @classmethod
    def of(cls, data: bytes) -> Payload:
        """Convert bytes to a payload."""
        return cls(int.from_bytes(data, "big"), 8 * len(data))

    @classmethod
    def draw(cls, bits: int, generator: random.Random) -> Payload:
        """Draw a payload of uniformly random bits."""
        return cls(generator.getrandbits(bits) if bits else 0, bits)

    @property
    def data(self) -> bytes:
        """The payload in bytes; the last byte is filled up with zeros."""
        spare = -self.bits % 8
        return (self.value << spare).to_bytes((self.bits + spare) // 8, "big")


@dataclass(frozen=True)
class Received:
    """The range of values in which a payload of `bits` bits lies, as far as the receiver knows: [low, high).

    Attributes:
        low, high: the range.
        bits: length of the whole payload.
    """

    low: int
    high: int
    bits: int

    @property
    def known_bits(self) -> float:
        """The information received, in bits; the whole length once the payload is complete."""
        return self.bits - math.log2(self.high - self.low)

    @property
    def payload(self) -> Payload:
        """The payload, once it is known completely.

        Raises:
            InputError: more than one payload is still possible.
        """
        if self.high - self.low != 1:
            raise InputError(f"only {self.known_bits:.1f} of {self.bits} bits were received")
        return Payload(self.low, self.bits)

    def guess(self, generator: random.Random) -> Payload:
        """Draw one of the payloads that are still possible, uniformly."""
        return Payload(self.low + generator.randrange(self.high - self.low), self.bits)


@runtime_checkable
class Encoder(Protocol):
    """The half of an adversary that runs on the server."""

    def choose(self, step_tokens: Sequence[int]) -> int:
        """Choose the token to send at this step among those that it may send (best first)."""
        ...

    @property
    def bits_sent(self) -> float:
        """The part of the payload, in bits, that the tokens so far carry."""
        ...

    @property
    def done(self) -> bool:
        """Whether the whole payload is sent."""
        ...


@runtime_checkable
class Decoder(Protocol):
    """The half of an adversary outside of the server, which sees the tokens only."""

    def decode(self, steps: Sequence[Sequence[int]], tokens: Sequence[int]) -> Received:
        """Decode the next message from its tokens and from what could have been sent at each step.

        Messages are passed in their order.
        """
        ...


# ---- choices


UNIT = 1 << 32  # of weights


class Weighted(tuple[int, ...]):
    """The tokens of a step with whole weights; a coder gives each a part of the payload's range in proportion.

    With a distribution's probabilities as weights, random bits as payload make tokens of just this distribution:
    arithmetic decoding, which sends as many bits as the distribution has entropy (Definition 2.1, Theorem 2.3). All
    that differs is rounding to 2⁻³².

    Args:
        tokens: of the step.
        shares: their probabilities, up to a factor; what is below 2⁻³³ of their sum is left out.

    Raises:
        InputError: no token has a share.
    """

    weights: tuple[int, ...]

    def __new__(cls, tokens: Sequence[int], shares: Sequence[float]) -> Weighted:
        total = math.fsum(shares)
        whole = [round(share / total * UNIT) for share in shares] if total > 0 else []
        step = super().__new__(cls, (t for t, weight in zip(tokens, whole, strict=False) if weight))
        step.weights = tuple(weight for weight in whole if weight)
        if not step:
            raise InputError("a step at which no token has a probability")
        return step


def step_entropy(step: Sequence[int]) -> float:
    """Return the entropy, in bits, of the token that a random payload picks at a step: what it can carry at most.

    Summed over an answer, in the mean this is the entropy of Theorem 2.2.
    """
    starts = _starts(step)
    shares = [(b - a) / starts[-1] for a, b in pairwise(starts)]
    return -math.fsum(share * math.log2(share) for share in shares)


def _starts(step: Sequence[int]) -> list[int]:
    """Return where each token's part of a step begins, and at the end the sum of all weights."""
    return list(accumulate(step.weights if isinstance(step, Weighted) else (1,) * len(step), initial=0))


def _part(low: int, high: int, starts: Sequence[int], index: int) -> tuple[int, int]:
    """Return the `index`-th part of a range, nearly in proportion to the weights; a part may be empty."""
    width = high - low
    return low + width * starts[index] // starts[-1], low + width * starts[index + 1] // starts[-1]


class ChoiceEncoder:
    """Arithmetic coder: choosing one of c tokens keeps one c-th of the payload's range; or its share, if `Weighted`.

    Ranges are exact integers, so the payload is complete once the product of the numbers of choices reaches 2^bits.
    After that the first token is sent. The cost of a step grows with the payload's length; cut megabytes into blocks.

    Args:
        payload: what to send.
        most: use at most so many tokens of each step (0: all).
    """

    def __init__(self, payload: Payload, most: int = 0) -> None:
        self._payload, self._most = payload, most
        self._range, self._carried = Received(0, 1 << payload.bits, payload.bits), 0.0

    def choose(self, step_tokens: Sequence[int]) -> int:
        """Choose the token whose part of the range holds the payload.

        Raises:
            InputError: no token may be sent.
        """
        usable = _usable(step_tokens, self._most)
        low, high = self._range.low, self._range.high
        if self.done:
            return usable[0]
        starts = _starts(usable)
        # Find the part that holds the payload: the last one that does not begin above it.
        index = (
            bisect_right(
                starts,
                self._payload.value,
                hi=len(usable),
                key=lambda start: low + (high - low) * start // starts[-1],
            )
            - 1
        )
        self._range = Received(*_part(low, high, starts, index), self._payload.bits)
        self._carried += math.log2(starts[-1] / (starts[index + 1] - starts[index]))
        return usable[index]

    @property
    def bits_sent(self) -> float:
        """The bits sent, at most what the choices so far can carry.

        A payload may become known up to a bit sooner where ranges were rounded down; that is not counted.
        """
        return min(self._carried, self._range.known_bits)

    @property
    def done(self) -> bool:
        """Whether the whole payload is sent."""
        return self._range.high - self._range.low == 1


class ChoiceDecoder:
    """The decoder of `ChoiceEncoder`.

    Args:
        bits: length of the payload. most: as the encoder's.
    """

    def __init__(self, bits: int, most: int = 0) -> None:
        self._range, self._most = Received(0, 1 << bits, bits), most

    def decode(self, steps: Sequence[Sequence[int]], tokens: Sequence[int]) -> Received:
        """Narrow the payload's range by one message.

        Raises:
            InputError: a token could not have been sent.
        """
        for step_tokens, token in zip(steps, tokens, strict=True):
            usable = _usable(step_tokens, self._most)
            low, high = self._range.low, self._range.high
            if high - low == 1:
                break
            if token not in usable:
                raise InputError(f"token {token} is not among the {len(usable)} that carry the payload here")
            low, high = _part(low, high, _starts(usable), usable.index(token))
            if low == high:
                raise InputError(f"token {token} stands for no payload here")
            self._range = Received(low, high, self._range.bits)
        return self._range


def _usable(step_tokens: Sequence[int], most: int) -> Sequence[int]:
    usable = step_tokens[:most] if most > 0 else step_tokens
    if not usable:
        raise InputError("a step at which no token may be sent")
    return usable


def rank_encoder(payload: Payload) -> ChoiceEncoder:
    """Make the naive encoder of one bit per step: the likeliest token means 0, the second likeliest 1.

    The tokens of a step have to be sorted by falling logit.
    """
    return ChoiceEncoder(payload, most=2)


def rank_decoder(bits: int) -> ChoiceDecoder:
    """Make the decoder of `rank_encoder`; it needs the model, but no seed."""
    return ChoiceDecoder(bits, most=2)


# ---- text


class TextEncoder:
    """Encoder that sends the payload as base64 text, token by token, and ignores the allowed set.

    Args:
        payload: what to send.
        encode: the tokenizer's function, without special tokens.
    """

    def __init__(self, payload: Payload, encode: Callable[[str], Sequence[int]]) -> None:
        self._bits = payload.bits
        self._tokens = list(encode(base64.b64encode(payload.data).decode()))
        self._sent = 0

    def choose(self, step_tokens: Sequence[int]) -> int:
        """Send the next token of the text; once all is sent, the first token of the step.

        Raises:
            InputError: all is sent, and no token may be sent.
        """
        if self.done:
            return _usable(step_tokens, 0)[0]
        self._sent += 1
        return self._tokens[self._sent - 1]

    @property
    def bits_sent(self) -> float:
        """The bits sent, in proportion to the tokens of the text."""
        return self._bits * self._sent / len(self._tokens) if self._tokens else 0.0

    @property
    def done(self) -> bool:
        """Whether the whole text is sent."""
        return self._sent == len(self._tokens)


class TextDecoder:
    """The decoder of `TextEncoder`, which needs the tokenizer but neither model nor seed.

    Args:
        bits: length of the payload.
        decode: the tokenizer's function.
    """

    def __init__(self, bits: int, decode: Callable[[Sequence[int]], str]) -> None:
        self._bits, self._decode, self._tokens = bits, decode, list[int]()

    def decode(self, steps: Sequence[Sequence[int]], tokens: Sequence[int]) -> Received:
        """Decode the text of all messages so far; what follows the payload is ignored.

        Raises:
            InputError: the tokens are no base64.
        """
        self._tokens += tokens
        size = (self._bits + 7) // 8
        text = self._decode(self._tokens)[: 4 * ((size + 2) // 3)]
        text = text[: len(text) // 4 * 4]
        try:
            data = base64.b64decode(text, validate=True)[:size]
        except (binascii.Error, ValueError) as error:
            raise InputError(f"no base64 text: {error}") from error
        known = min(self._bits, 8 * len(data))
        missing = self._bits - known
        low = (int.from_bytes(data, "big") >> (8 * len(data) - known)) << missing
        return Received(low, low + (1 << missing), self._bits)


# ---- seeds


@dataclass(frozen=True)
class Mark:
    """A keyed hash of an answer's first tokens, which both halves know.

    Attributes:
        key: shared before the game. tokens: how many are hashed. bits: of the hash, up to 256.
    """

    key: bytes
    tokens: int
    bits: int

    def value(self, tokens: Sequence[int]) -> int:
        """Return the hash of an answer."""
        text = b"".join(int(token).to_bytes(8, "big") for token in tokens[: self.tokens])
        return int.from_bytes(hashlib.sha256(self.key + text).digest(), "big") >> (256 - self.bits)


class SeedEncoder:
    """Encoder that sends the honest tokens of a seed whose answer hashes to the payload (appendix D.5).

    A payload of b bits takes about 2^b tries. Who replays the answer with its seed finds nothing wrong; only a seed
    that the server cannot choose prevents it.

    Args:
        payload: as many bits as the mark has.
        mark: the hash.
    """

    def __init__(self, payload: Payload, mark: Mark) -> None:
        self._payload, self._mark, self._tokens = payload, mark, list[int]()

    def hits(self, tokens: Sequence[int]) -> bool:
        """Return whether the answer of a seed carries the payload."""
        return self._mark.value(tokens) == self._payload.value

    def choose(self, step_tokens: Sequence[int]) -> int:
        """Send the honest token, which is the first."""
        self._tokens.append(_usable(step_tokens, 0)[0])
        return self._tokens[-1]

    @property
    def bits_sent(self) -> float:
        """All bits, once the hashed tokens are sent and hash to the payload."""
        return float(self._payload.bits) if self.done and self.hits(self._tokens) else 0.0

    @property
    def done(self) -> bool:
        """Whether all tokens that are hashed are sent."""
        return len(self._tokens) >= self._mark.tokens


class SeedDecoder:
    """The decoder of `SeedEncoder`, which needs neither model nor seed.

    Args:
        mark: the hash.
    """

    def __init__(self, mark: Mark) -> None:
        self._mark, self._tokens = mark, list[int]()

    def decode(self, steps: Sequence[Sequence[int]], tokens: Sequence[int]) -> Received:
        """Hash the answer, once it is long enough."""
        self._tokens += tokens
        if len(self._tokens) < self._mark.tokens:
            return Received(0, 1 << self._mark.bits, self._mark.bits)
        value = self._mark.value(self._tokens)
        return Received(value, value + 1, self._mark.bits)


# ---- both halves together


class Adversary:
    """Both halves of an adversary, as the exfiltration game plays them.

    Args:
        encoder, decoder: its halves. generator: of the guess at what could not be sent.
        choose_from: "admissible", the warden's set at each step, or "ranked", the likeliest tokens.
        turns: the messages that it uses, by number (None: all until the payload is sent).
    """

    def __init__(
        self,
        encoder: Encoder,
        decoder: Decoder,
        generator: random.Random,
        *,
        choose_from: Literal["admissible", "ranked"] = "admissible",
        turns: Sequence[int] | None = None,
    ) -> None:
        self._encoder, self._decoder, self._generator = encoder, decoder, generator
        self._ranked = choose_from == "ranked"
        self._turns = None if turns is None else frozenset(turns)
        self._received: Received | None = None

    def reply(
        self,
        turn: int,
        admissible: Sequence[Sequence[int]],
        ranked: Sequence[Sequence[int]],
        honest: Sequence[int],
    ) -> list[int]:
        """Return the tokens of one message, and pass them to the decoder as well.

        Where no token may be chosen, or all is sent, the honest token stays.

        Args:
            turn: number of the message.
            admissible, ranked: both kinds of choices at each step, best first.
            honest: the honest tokens.
        """
        if self._encoder.done or (self._turns is not None and turn not in self._turns):
            return list(honest)
        steps = ranked if self._ranked else admissible
        carrying = [i for i, choices in enumerate(steps) if choices]
        tokens = list(honest)
        for i in carrying:
            if not self._encoder.done:
                tokens[i] = self._encoder.choose(steps[i])
        self._received = self._decoder.decode([steps[i] for i in carrying], [tokens[i] for i in carrying])
        return tokens

    def guess(self) -> int:
        """Return the payload's value as the decoder knows it; unknown bits are guessed.

        Raises:
            InputError: no message was used.
        """
        if self._received is None:
            raise InputError("the adversary has sent nothing to guess from")
        return self._received.guess(self._generator).value
