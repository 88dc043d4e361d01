"""Record what the parties of a protocol send each other, and what each of them learns in the clear."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from hiddenlab.errors import InputError
from hiddenlab.text import count_of
from hiddenlab.types import Observation, ObservationInfo


@dataclass(frozen=True)
class Learnt:
    """A value that a party learnt in the clear; shares and masked values, which look random, do not count.

    Attributes:
        party: who learnt it.
        label: what it is (``inputs``, ``norm1``, ``softmax`` …).
        layer: of the decoder, from 1; 0 for the inputs.
    """

    party: str
    label: str
    layer: int
    value: Tensor


@dataclass
class Transcript:
    """The record of a protocol run: bytes sent, rounds, and what each party learnt.

    Attributes:
        sent: bytes by sender and receiver.
        rounds: number of sequential rounds; messages sent at once count once.
        dealt: bytes of correlated randomness that a trusted dealer handed out in advance.
    """

    parties: tuple[str, ...]
    learnt: list[Learnt] = field(default_factory=list)
    sent: Counter[tuple[str, str]] = field(default_factory=Counter)
    rounds: int = 0
    dealt: int = 0

    def send(self, sender: str, receiver: str, tensor: Tensor) -> Tensor:
        """Deliver a tensor from one party to another and count its bytes; return it.

        Raises:
            InputError: a party is unknown, or sends to itself.
        """
        if sender == receiver or not {sender, receiver} <= set(self.parties):
            raise InputError(
                f"no message from {sender!r} to {receiver!r}; parties are {', '.join(self.parties)}"
            )
        self.sent[sender, receiver] += tensor.numel() * tensor.element_size()
        return tensor

    def learn(self, party: str, label: str, layer: int, value: Tensor) -> Tensor:
        """Record a value that a party learns, and return it."""
        self.learnt.append(Learnt(party, label, layer, value))
        return value

    def turn(self) -> None:
        """End a round: what follows waits for what was sent."""
        self.rounds += 1

    @property
    def bytes(self) -> int:
        """The bytes of all messages between the parties."""
        return sum(self.sent.values())

    def seen(self, party: str, **wanted: Any) -> Iterator[Learnt]:
        """Yield what a party learnt, chosen by label or layer."""
        for item in self.learnt:
            if item.party == party and all(getattr(item, name) == value for name, value in wanted.items()):
                yield item

    def observations(self, party: str, label: str, layer: int, info: ObservationInfo) -> list[Observation]:
        """Return hidden states that a party learnt as observations for attacks and ``save_observations``.

        Args:
            party: whose values.
            label, layer: of the values, see ``Learnt``.
            info: the public facts: site, and what is permuted.

        Raises:
            InputError: the party learnt no such values.
        """
        observations = [Observation(item.value, info) for item in self.seen(party, label=label, layer=layer)]
        if not observations:
            raise InputError(f"the {party} learnt no {label!r} of layer {layer}")
        return observations

    def __repr__(self) -> str:
        counts = Counter(item.party for item in self.learnt)
        seen = ", ".join(f"{party} learnt {counts[party]} tensors" for party in self.parties)
        return f"Transcript({self.bytes:,} bytes in {count_of(self.rounds, 'round')}; {seen})"
