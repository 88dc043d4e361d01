"""Adversaries on an inference server that hide a payload in its output, each with the receiver that gets it back.

At each step an encoder is shown tokens that it may send and picks one. `ChoiceEncoder` loses nothing of what a choice
carries; among the two likeliest tokens it is the naive coding of Rinberg et al. 2025, section 2.4 (`rank_encoder`).
`TextEncoder` sends base64 and heeds nothing (section 4.2). Receivers are shown the same tokens; where these depend on
the seed, the receiver has to know it (the setting of Theorem 4.1).
"""

from __future__ import annotations

import base64
import binascii
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from hiddenlab.errors import InputError


@dataclass(frozen=True)
class Payload:
    """Bits to be sent, as a number; the first bit is the highest.

    Attributes:
        value: from 0, below 2^bits. bits: how many.
    """

    value: int
    bits: int

    def __post_init__(self) -> None:
        if self.bits < 0 or not 0 <= self.value < 1 << self.bits:
            raise InputError(f"a payload of {self.bits} bits cannot be a number of {self.value.bit_length()}")

    @classmethod
    def of(cls, data: bytes) -> Payload:
        """Bytes as a payload."""
        return cls(int.from_bytes(data, "big"), 8 * len(data))

    @classmethod
    def draw(cls, bits: int, generator: random.Random) -> Payload:
        """Uniformly random bits."""
        return cls(generator.getrandbits(bits) if bits else 0, bits)

    @property
    def data(self) -> bytes:
        """The payload in bytes, the last filled up with zeros."""
        spare = -self.bits % 8
        return (self.value << spare).to_bytes((self.bits + spare) // 8, "big")


@dataclass(frozen=True)
class Received:
    """What a receiver knows of a payload of `bits` bits: it lies in [low, high).

    Attributes:
        low, high: the range. bits: length of the whole payload.
    """

    low: int
    high: int
    bits: int

    @property
    def known_bits(self) -> float:
        """Information received; the whole length when complete."""
        return self.bits - math.log2(self.high - self.low)

    @property
    def payload(self) -> Payload:
        """The payload.

        Raises:
            InputError: more than one is possible.
        """
        if self.high - self.low != 1:
            raise InputError(f"only {self.known_bits:.1f} of {self.bits} bits were received")
        return Payload(self.low, self.bits)

    def guess(self, generator: random.Random) -> Payload:
        """One of the payloads that are still possible, each as likely."""
        return Payload(self.low + generator.randrange(self.high - self.low), self.bits)


@runtime_checkable
class Encoder(Protocol):
    """The half of an adversary that sits on the server."""

    def choose(self, step_tokens: Sequence[int]) -> int:
        """The token to send at this step, of those that it may send, best first."""
        ...

    @property
    def bits_sent(self) -> float:
        """How much of the payload the tokens so far carry, in bits."""
        ...

    @property
    def done(self) -> bool:
        """Whether all of it is sent."""
        ...


@runtime_checkable
class Decoder(Protocol):
    """The half outside, which sees tokens only."""

    def decode(self, steps: Sequence[Sequence[int]], tokens: Sequence[int]) -> Received:
        """What a message's tokens say, given what could have been sent at each step. Messages follow each other."""
        ...


# ---- choices


def _part(low: int, high: int, count: int, index: int) -> tuple[int, int]:
    """The `index`-th of `count` nearly equal parts of a range, which may be empty."""
    width = high - low
    return low + index * width // count, low + (index + 1) * width // count


class ChoiceEncoder:
    """Arithmetic coding with equal weights: a choice among c tokens leaves one c-th of the range of the payload.

    Ranges are exact integers, so all is sent by the time that the product of the numbers of choices reaches 2^bits,
    whatever they are. After that the first token is sent. The work of a step grows with the payload's length;
    megabytes should be cut into blocks.

    Args:
        payload: what to send. most: use at most so many tokens of each step (0: all).
    """

    def __init__(self, payload: Payload, most: int = 0) -> None:
        self._payload, self._most = payload, most
        self._range, self._carried = Received(0, 1 << payload.bits, payload.bits), 0.0

    def choose(self, step_tokens: Sequence[int]) -> int:
        """See `Encoder`.

        Raises:
            InputError: nothing may be sent.
        """
        usable = _usable(step_tokens, self._most)
        low, high = self._range.low, self._range.high
        if self.done:
            return usable[0]
        # The part that holds the payload: the largest index whose part does not begin above it.
        index = ((self._payload.value - low + 1) * len(usable) - 1) // (high - low)
        self._range = Received(*_part(low, high, len(usable), index), self._payload.bits)
        self._carried += math.log2(len(usable))
        return usable[index]

    @property
    def bits_sent(self) -> float:
        """See `Encoder`; never more than the choices so far can carry.

        A lucky payload, in ranges that were rounded down, is known up to a bit sooner. That is no rate to count on.
        """
        return min(self._carried, self._range.known_bits)

    @property
    def done(self) -> bool:
        """See `Encoder`."""
        return self._range.high - self._range.low == 1


class ChoiceDecoder:
    """The receiver of `ChoiceEncoder`.

    Args:
        bits: length of the payload. most: as the encoder's.
    """

    def __init__(self, bits: int, most: int = 0) -> None:
        self._range, self._most = Received(0, 1 << bits, bits), most

    def decode(self, steps: Sequence[Sequence[int]], tokens: Sequence[int]) -> Received:
        """See `Decoder`.

        Raises:
            InputError: a token that could not have been sent.
        """
        for step_tokens, token in zip(steps, tokens, strict=True):
            usable = _usable(step_tokens, self._most)
            low, high = self._range.low, self._range.high
            if high - low == 1:
                break
            if token not in usable:
                raise InputError(f"token {token} is not among the {len(usable)} that carry the payload here")
            low, high = _part(low, high, len(usable), usable.index(token))
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
    """Naive coding of one bit per step: the likeliest token for 0, the second for 1. Steps are by falling logit."""
    return ChoiceEncoder(payload, most=2)


def rank_decoder(bits: int) -> ChoiceDecoder:
    """The receiver of `rank_encoder`. It needs the model, but no seed."""
    return ChoiceDecoder(bits, most=2)


# ---- text


class TextEncoder:
    """Sends the payload as base64 text, token by token, whatever the steps allow.

    Args:
        payload: what to send. encode: the tokenizer's, without special tokens.
    """

    def __init__(self, payload: Payload, encode: Callable[[str], Sequence[int]]) -> None:
        self._bits = payload.bits
        self._tokens = list(encode(base64.b64encode(payload.data).decode()))
        self._sent = 0

    def choose(self, step_tokens: Sequence[int]) -> int:
        """See `Encoder`; the step counts only when all is sent.

        Raises:
            InputError: nothing may be sent.
        """
        if self.done:
            return _usable(step_tokens, 0)[0]
        self._sent += 1
        return self._tokens[self._sent - 1]

    @property
    def bits_sent(self) -> float:
        """See `Encoder`; in proportion to the tokens."""
        return self._bits * self._sent / len(self._tokens) if self._tokens else 0.0

    @property
    def done(self) -> bool:
        """See `Encoder`."""
        return self._sent == len(self._tokens)


class TextDecoder:
    """The receiver of `TextEncoder`. It needs the tokenizer, and neither model nor seed.

    Args:
        bits: length of the payload. decode: the tokenizer's.
    """

    def __init__(self, bits: int, decode: Callable[[Sequence[int]], str]) -> None:
        self._bits, self._decode, self._tokens = bits, decode, list[int]()

    def decode(self, steps: Sequence[Sequence[int]], tokens: Sequence[int]) -> Received:
        """See `Decoder`. What follows the payload is ignored.

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


# ---- both halves together


class Adversary:
    """Inside and outside of an attack, as the exfiltration game plays against it.

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
        """The tokens of one message, given both kinds of choices at each step and the honest tokens.

        The outside reads them too. Where nothing may be chosen, or all is sent, the honest token stays.
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
        """The payload's value as the outside has it, the unknown rest guessed.

        Raises:
            InputError: no message was used.
        """
        if self._received is None:
            raise InputError("the adversary has sent nothing to guess from")
        return self._received.guess(self._generator).value
