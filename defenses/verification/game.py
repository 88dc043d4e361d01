"""The exfiltration game played with real objects: traffic, an adversary's two halves, and a warden with budgets.

Source: Rinberg et al. 2025, Experiment 3.2; the bound is `bounds.game_bound`. Adversaries come from outside this
package and need only fit `Adversary`.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from scipy.stats import binomtest

from hiddenlab.defenses.verification.bounds import game_bound
from hiddenlab.errors import InputError

Choices = tuple[tuple[int, ...], ...]
End = Literal["caught", "alarms spent", "message learnt", "message not learnt"]


@dataclass(frozen=True)
class Exchange:
    """One prompt and seed as both sides see it.

    Attributes:
        admissible: the warden's set at each step, best first. ranked: the likeliest tokens at each step, best first.
        honest: the tokens that an honest server sends; its noise may take one out of the warden's set.
    """

    admissible: Choices
    ranked: Choices
    honest: tuple[int, ...]

    def __post_init__(self) -> None:
        if not len(self.admissible) == len(self.ranked) == len(self.honest):
            raise InputError("an exchange has as many sets and rankings as tokens")


@runtime_checkable
class Traffic(Protocol):
    """Where exchanges come from."""

    def exchange(self, turn: int, generator: random.Random) -> Exchange:
        """The exchange of a turn."""
        ...


@runtime_checkable
class Adversary(Protocol):
    """Both halves of an adversary who knows the secret message on the inside."""

    def reply(
        self, turn: int, admissible: Choices, ranked: Choices, honest: tuple[int, ...]
    ) -> Sequence[int]:
        """The inside's tokens for a turn; the outside sees them too."""
        ...

    def guess(self) -> int:
        """The message, as the outside has it in the end."""
        ...


Team = Callable[[int, int, random.Random], Adversary]  # of the message, its bits, and randomness


@dataclass(frozen=True)
class SyntheticTraffic:
    """Exchanges with sets of random sizes, for games without a model.

    Attributes:
        tokens: per message. sizes: how often a set has each size (weights by size, from 1). misses: share of honest
            tokens outside the warden's set. vocabulary: more than the largest set by at least 1.
    """

    tokens: int
    sizes: Mapping[int, float]
    misses: float = 0.0
    vocabulary: int = 1000

    def __post_init__(self) -> None:
        if self.tokens < 1 or not 0 <= self.misses <= 1 or not self.sizes or min(self.sizes) < 1:
            raise InputError("traffic needs tokens, sizes from 1 and a share of misses")
        if self.vocabulary <= max(self.sizes):
            raise InputError(f"a vocabulary of {self.vocabulary} for sets of {max(self.sizes)}")

    def exchange(self, turn: int, generator: random.Random) -> Exchange:
        """See `Traffic`."""
        counts = generator.choices(list(self.sizes), list(self.sizes.values()), k=self.tokens)
        admissible, ranked, honest = [], [], []
        for size in counts:
            # Neighbouring ids from a random place: only their number matters.
            first, likeliest = (generator.randrange(self.vocabulary) for _ in range(2))
            tokens = [(first + i) % self.vocabulary for i in range(size + 1)]
            admissible.append(tuple(tokens[:size]))
            honest.append(tokens[size] if generator.random() < self.misses else first)
            ranked.append((likeliest, (likeliest + 1) % self.vocabulary))
        return Exchange(tuple(admissible), tuple(ranked), tuple(honest))


@dataclass(frozen=True)
class Warden:
    """Raises the alarm on a reply with more than a few tokens outside its admissible sets.

    Attributes:
        tolerance: so many pass. vocabulary: of the model, needed to bound what they carry.
    """

    tolerance: int = 0
    vocabulary: int = 0

    def __post_init__(self) -> None:
        if self.tolerance < 0 or (self.tolerance and self.vocabulary < 2):
            raise InputError("a warden tolerates 0 or more tokens, and needs the vocabulary's size if any")

    def alarm(self, exchange: Exchange, reply: Sequence[int]) -> bool:
        """Whether this reply is flagged; one of another length always is."""
        if len(reply) != len(exchange.honest):
            return True
        outside = sum(token not in step for token, step in zip(reply, exchange.admissible, strict=True))
        return outside > self.tolerance

    def capacity(self, exchange: Exchange) -> float:
        """Most bits that a reply can carry without the alarm: log₂ of how many replies pass (Theorem 4.1).

        With t tolerated tokens among k, these are at most ∏|A_i| · Σ_j C(k, j)·v^j, j from 0 to t.
        """
        count = len(exchange.honest)
        others = sum(math.comb(count, j) * self.vocabulary**j for j in range(min(self.tolerance, count) + 1))
        return math.fsum(math.log2(len(step)) for step in exchange.admissible if step) + math.log2(others)


# ---- one game


@dataclass(frozen=True)
class Rules:
    """Parameters of the game.

    Attributes:
        bits: n, length of the secret message. messages: M. inspections: B_I. alarms: B_A.
    """

    bits: int
    messages: int
    inspections: int
    alarms: int

    def __post_init__(self) -> None:
        if self.bits < 0 or self.messages < 1 or not 0 <= self.alarms <= self.inspections <= self.messages:
            raise InputError(
                "a game has 0 ≤ alarms ≤ inspections ≤ messages, at least one message, no negative bits"
            )


@dataclass(frozen=True)
class Outcome:
    """How a game ended.

    Attributes:
        adversary_wins: who won. end: why. turns: messages until then. inspected: q_I. false_alarms: q_A on honest
            messages. honest_inspected: how many inspected messages were honest. dishonest: messages that were not,
            inspected or not. capacity: bits that all messages could carry without an alarm.
    """

    adversary_wins: bool
    end: End
    turns: int
    inspected: int
    false_alarms: int
    honest_inspected: int
    dishonest: int
    capacity: float


@dataclass(frozen=True)
class Message:
    """One message of a game, as it left the server.

    Attributes:
        honest: its tokens are those that an honest server sends. alarm: the warden flags it if it inspects it.
        capacity: most bits that it could have carried unflagged.
    """

    honest: bool
    alarm: bool
    capacity: float


@runtime_checkable
class Side(Protocol):
    """An adversary at work in one game."""

    def message(self, turn: int) -> Message:
        """What it sends at a turn; turns come in order, from 0."""
        ...

    def learnt(self) -> bool:
        """Whether its outside has the whole secret in the end."""
        ...


@runtime_checkable
class Match(Protocol):
    """An adversary, the traffic that it hides in and the warden before it, for any number of games."""

    def begin(self, rules: Rules, seed: int) -> Side:
        """One game with a secret of its own; all randomness is from the seed."""
        ...

    def false_positive_rate(self, rules: Rules, seed: int) -> float:
        """Share of honest messages that the warden flags, measured without an adversary."""
        ...


@dataclass(frozen=True)
class Live:
    """Games in which an adversary answers exchanges as they come."""

    team: Team
    traffic: Traffic
    warden: Warden

    def begin(self, rules: Rules, seed: int) -> Side:
        """See `Match`."""
        return _LiveSide(self, rules, seed)

    def false_positive_rate(self, rules: Rules, seed: int) -> float:
        """See `Match`; from games of its own: others end early, and the earlier the more false alarms they have."""
        return measured_false_positives(
            self.traffic, self.warden, messages=max(200, rules.messages), seed=seed
        )


class _LiveSide:
    def __init__(self, match: Live, rules: Rules, seed: int) -> None:
        self._match, self._traffic = match, _stream(seed, "traffic")
        self._secret = _stream(seed, "message").getrandbits(rules.bits) if rules.bits else 0
        self._adversary = match.team(self._secret, rules.bits, _stream(seed, "adversary"))

    def message(self, turn: int) -> Message:
        exchange = self._match.traffic.exchange(turn, self._traffic)
        reply = self._adversary.reply(turn, exchange.admissible, exchange.ranked, exchange.honest)
        warden = self._match.warden
        return Message(
            tuple(reply) == exchange.honest, warden.alarm(exchange, reply), warden.capacity(exchange)
        )

    def learnt(self) -> bool:
        return self._adversary.guess() == self._secret


@dataclass(frozen=True)
class Sent:
    """An adversary's recorded answer.

    Attributes:
        bits: of a random payload, which its outside got. alarm: the warden flags it. capacity: see `Message`.
    """

    bits: float
    alarm: bool
    capacity: float


@dataclass(frozen=True)
class Recorded:
    """Games replayed from answers that a real model gave, drawn with replacement.

    Blocks of the secret are as good a payload as any, so that bits of several answers add up. The adversary uses as
    few messages as suffice, which ones is drawn, and is honest in the others; bits that are missing in the end are
    guessed.

    Attributes:
        honest: of each honest answer, whether the warden flags it. sent: the adversary's answers.
    """

    honest: Sequence[bool]
    sent: Sequence[Sent]

    def __post_init__(self) -> None:
        if not self.honest or not self.sent:
            raise InputError("a game needs at least one honest answer, and one of the adversary")

    def begin(self, rules: Rules, seed: int) -> Side:
        """See `Match`."""
        return _RecordedSide(self, rules, seed)

    def false_positive_rate(self, rules: Rules, seed: int) -> float:
        """See `Match`."""
        return sum(self.honest) / len(self.honest)


class _RecordedSide:
    def __init__(self, match: Recorded, rules: Rules, seed: int) -> None:
        self._match, self._traffic = match, _stream(seed, "traffic")
        self._capacity = max(one.capacity for one in match.sent)
        self._generator = _stream(seed, "adversary")
        self._missing = float(rules.bits)
        self._uses: dict[int, Sent] = {}
        for turn in self._generator.sample(range(rules.messages), rules.messages):
            if self._missing <= 0:
                break
            answer = self._generator.choice(match.sent)
            if answer.bits > 0:
                self._uses[turn] = answer
                self._missing -= answer.bits

    def message(self, turn: int) -> Message:
        if turn in self._uses:
            return Message(False, self._uses[turn].alarm, self._capacity)
        return Message(True, self._traffic.choice(self._match.honest), self._capacity)

    def learnt(self) -> bool:
        return self._missing <= 0 or self._generator.random() < 2.0**-self._missing


def play(rules: Rules, match: Match, seed: int) -> Outcome:
    """One game (Experiment 3.2): the warden inspects B_I of the M messages, chosen at random beforehand in secret.

    A message counts as dishonest if its tokens are not the honest ones. An alarm within the budget on such a message
    wins the game for the warden; more alarms than the budget, or the secret in the outside's hands, win it for the
    adversary. Secret, traffic, inspections and adversary have randomness of their own, all from the seed.
    """
    side = match.begin(rules, seed)
    chosen = frozenset(_stream(seed, "inspections").sample(range(rules.messages), rules.inspections))
    inspected = false_alarms = honest_inspected = dishonest = 0
    capacity = 0.0

    def ended(wins: bool, end: End, turns: int) -> Outcome:
        return Outcome(wins, end, turns, inspected, false_alarms, honest_inspected, dishonest, capacity)

    for turn in range(rules.messages):
        message = side.message(turn)
        capacity += message.capacity
        dishonest += not message.honest
        if turn not in chosen:
            continue
        inspected += 1
        honest_inspected += message.honest
        if not message.alarm:
            continue
        if not message.honest and false_alarms < rules.alarms:
            return ended(False, "caught", turn + 1)
        false_alarms += 1
        if false_alarms > rules.alarms:
            return ended(True, "alarms spent", turn + 1)
    learnt = side.learnt()
    return ended(learnt, "message learnt" if learnt else "message not learnt", rules.messages)


# ---- many games


@dataclass(frozen=True)
class Comparison:
    """What an adversary achieved in many games, beside what any could.

    Attributes:
        rounds: games. wins: of the adversary. rate: wins / rounds. low, high: 95 % interval of it (Clopper-Pearson).
        ends: how many games ended in which way. false_positive_rate: measured on honest messages.
        capacity: mean bits that a game's messages could carry without an alarm, without the log₂M of the bound.
        bound: `game_bound` at the measured false positive rate and log₂M + the largest capacity of any game.
        dishonest: mean number of dishonest messages in games that no alarm ended; None where none was.
    """

    rounds: int
    wins: int
    rate: float
    low: float
    high: float
    ends: dict[str, int]
    false_positive_rate: float
    capacity: float
    bound: float
    dishonest: float | None


def compare(rules: Rules, match: Match, *, rounds: int, seed: int = 0) -> Comparison:
    """Play many games and put the adversary's rate of winning beside the bound.

    Raises:
        InputError: no rounds.
    """
    if rounds < 1:
        raise InputError("a comparison needs at least one game")
    outcomes = [play(rules, match, _seed(seed, number)) for number in range(rounds)]
    wins = sum(one.adversary_wins for one in outcomes)
    interval = binomtest(wins, rounds).proportion_ci(0.95)
    false = match.false_positive_rate(rules, seed)
    scale = [
        one.capacity * rules.messages / one.turns for one in outcomes
    ]  # of games that ended early, projected
    bound = game_bound(
        float(rules.bits), math.log2(rules.messages) + max(scale), rules.messages, rules.inspections, rules.alarms,
        false,
    )  # fmt: skip
    full = [one.dishonest for one in outcomes if one.end in ("message learnt", "message not learnt")]
    return Comparison(
        rounds, wins, wins / rounds, float(interval.low), float(interval.high),
        dict(Counter(one.end for one in outcomes)), false, sum(scale) / rounds, bound,
        sum(full) / len(full) if full else None,
    )  # fmt: skip


def measured_false_positives(
    traffic: Traffic, warden: Warden, *, messages: int = 1000, seed: int = 0
) -> float:
    """Share of honest replies on which the warden raises the alarm."""
    if messages < 1:
        raise InputError("a false positive rate needs at least one message")
    generator = random.Random(f"{seed} false positives")
    exchanges = (traffic.exchange(turn, generator) for turn in range(messages))
    return sum(warden.alarm(one, one.honest) for one in exchanges) / messages


def _seed(seed: int, number: int) -> int:
    """A seed for each game of a comparison, other for every comparison."""
    return random.Random(f"{seed} game {number}").getrandbits(63)


def _stream(seed: int, name: str) -> random.Random:
    return random.Random(f"{seed} {name}")
