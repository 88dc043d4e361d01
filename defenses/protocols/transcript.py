"""What parties of a protocol send each other, and what each of them learns from it."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from hiddenlab.errors import InputError
from hiddenlab.types import Observation, ObservationInfo


@dataclass(frozen=True)
class Learnt:
    """A value that a party got to know: of shares and masked values, which look random, there are none.

    Attributes:
        label: what it is (``inputs``, ``norm1``, ``softmax`` …). layer: of the decoder, from 1; 0 for the inputs.
    """

    party: str
    label: str
    layer: int
    value: Tensor


@dataclass
class Transcript:
    """A protocol run as seen from outside: bytes sent, rounds, and what each party learnt.

    Attributes:
        sent: bytes by sender and receiver. rounds: messages that had to wait for another; those sent at once count
            once. dealt: bytes of correlated randomness handed out beforehand by a trusted dealer.
    """

    parties: tuple[str, ...]
    learnt: list[Learnt] = field(default_factory=list)
    sent: Counter[tuple[str, str]] = field(default_factory=Counter)
    rounds: int = 0
    dealt: int = 0

    def send(self, sender: str, receiver: str, tensor: Tensor) -> Tensor:
        """Deliver a tensor from one party to another, counted: what the receiver goes on with.

        Raises:
            InputError: a party that there is not, or the sender itself.
        """
        if sender == receiver or not {sender, receiver} <= set(self.parties):
            raise InputError(
                f"no message from {sender!r} to {receiver!r}; parties are {', '.join(self.parties)}"
            )
        self.sent[sender, receiver] += tensor.numel() * tensor.element_size()
        return tensor

    def learn(self, party: str, label: str, layer: int, value: Tensor) -> Tensor:
        """Note a value that a party learns; returns it."""
        self.learnt.append(Learnt(party, label, layer, value))
        return value

    def turn(self) -> None:
        """A round ends: what comes next waits for what was sent."""
        self.rounds += 1

    @property
    def bytes(self) -> int:
        """Of all messages between the parties."""
        return sum(self.sent.values())

    def seen(self, party: str, **wanted: Any) -> Iterator[Learnt]:
        """What a party learnt, chosen by label or layer."""
        for one in self.learnt:
            if one.party == party and all(getattr(one, name) == value for name, value in wanted.items()):
                yield one

    def observations(self, party: str, label: str, layer: int, info: ObservationInfo) -> list[Observation]:
        """Hidden states that a party learnt, as attacks take them and ``save_observations`` writes them.

        Args:
            label, layer: of the values, see ``Learnt``. public: what everyone knows of them: site, what is permuted.

        Raises:
            InputError: the party learnt no such values.
        """
        found = [Observation(one.value, info) for one in self.seen(party, label=label, layer=layer)]
        if not found:
            raise InputError(f"the {party} learnt no {label!r} of layer {layer}")
        return found

    def __repr__(self) -> str:
        told = Counter(one.party for one in self.learnt)
        seen = ", ".join(f"{party} learnt {told[party]} tensors" for party in self.parties)
        return f"Transcript({self.bytes:,} bytes in {self.rounds} rounds; {seen})"
