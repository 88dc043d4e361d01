"""Adversaries get their payload through, filters see the naive ones, and the game keeps below its bound."""

import base64
import math
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hiddenlab.defenses.verification.adversaries import (
    Adversary,
    ChoiceDecoder,
    ChoiceEncoder,
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
from hiddenlab.defenses.verification.bounds import required_samples, support_rate
from hiddenlab.defenses.verification.filters import PerplexityFilter, SyntacticFilter, perplexity
from hiddenlab.defenses.verification.game import (
    Exchange,
    Live,
    Recorded,
    Rules,
    Sent,
    SyntheticTraffic,
    Warden,
    compare,
    measured_false_positives,
    play,
)
from hiddenlab.defenses.verification.likelihood import gumbel_positions
from hiddenlab.defenses.verification.sampling import HashedNoise, Sampling, sample
from hiddenlab.errors import InputError

payloads = st.binary(max_size=40).map(Payload.of) | st.integers(0, 70).flatmap(
    lambda bits: st.integers(0, 2**bits - 1).map(lambda value: Payload(value, bits))
)


def steps_of(sizes: Sequence[int], seed: int) -> list[tuple[int, ...]]:
    rng = random.Random(seed)
    return [tuple(rng.sample(range(1000), size)) for size in sizes]


# ---- payloads


def test_payloads() -> None:
    assert Payload.of(b"\x01\xff") == Payload(0x1FF, 16)
    assert Payload(0b101, 3).data == b"\xa0" and Payload(0, 0).data == b""
    assert Payload.draw(100, random.Random(1)) == Payload.draw(100, random.Random(1))
    assert Payload.draw(0, random.Random(1)) == Payload(0, 0)
    for wrong in ((8, 3), (-1, 3), (0, -1)):
        with pytest.raises(InputError, match="payload"):
            Payload(*wrong)


# ---- choices


@settings(max_examples=80)
@given(
    payload=payloads,
    sizes=st.lists(st.integers(1, 50), max_size=70),
    seed=st.integers(0, 99),
    cut=st.integers(0, 70),
)
def test_any_payload_comes_back(payload: Payload, sizes: list[int], seed: int, cut: int) -> None:
    steps = steps_of(sizes, seed)
    encoder, decoder = ChoiceEncoder(payload), ChoiceDecoder(payload.bits)
    sent, product = [], 1
    for step in steps:
        assert encoder.done or product < 2**payload.bits  # not one choice more than needed
        sent.append(encoder.choose(step))
        product *= len(step)
        assert sent[-1] in step
        assert encoder.bits_sent <= min(payload.bits, math.log2(product)) + 1e-9
        assert encoder.bits_sent > min(payload.bits, math.log2(product)) - 1
    decoder.decode(steps[:cut], sent[:cut])  # in two messages
    received = decoder.decode(steps[cut:], sent[cut:])
    assert received.low <= payload.value < received.high
    assert received.known_bits >= encoder.bits_sent
    if encoder.done:
        assert received.payload == payload == received.guess(random.Random(0))
    else:
        with pytest.raises(InputError, match="bits were received"):
            _ = received.payload


def test_weighted_tokens_follow_their_distribution_exactly() -> None:
    """Every payload of ten bits is sent once: tokens appear as often as the distribution says, and all come back."""
    steps = [Weighted((7, 3, 9, 4), (0.5, 0.25, 0.25, 0.0)), Weighted((1, 2), (3.0, 1.0))] * 2
    assert steps[0] == (7, 3, 9) and step_entropy(steps[0]) == 1.5 and step_entropy((5, 6, 7, 8)) == 2
    drawn: Counter[tuple[int, ...]] = Counter()
    for value in range(1024):
        encoder, decoder = ChoiceEncoder(Payload(value, 10)), ChoiceDecoder(10)
        tokens = tuple(encoder.choose(step) for step in steps)
        found = decoder.decode(steps, tokens)
        assert found.low <= value < found.high and found.known_bits == pytest.approx(encoder.bits_sent)
        drawn[tokens] += 1
    share = {7: 0.5, 3: 0.25, 9: 0.25, 1: 0.75, 2: 0.25}
    assert len(drawn) == 36
    for tokens, count in drawn.items():
        assert count == pytest.approx(1024 * math.prod(share[token] for token in tokens), abs=1)
    # In the mean a payload of random bits sends the entropy (Theorem 2.2: and no more).
    carried = sum(count * math.log2(1024 / count) for count in drawn.values()) / 1024
    assert carried == pytest.approx(sum(step_entropy(step) for step in steps), abs=0.02)
    with pytest.raises(InputError, match="no token"):
        Weighted((1, 2), (0.0, 0.0))


def test_a_payload_in_the_hash_of_an_answer() -> None:
    """The right seed's answer says it once enough tokens came; another answer says something else."""
    mark, payload = Mark(b"key", 3, 4), Payload(11, 4)
    answers = [(seed, 5, 6, 7) for seed in range(200)]
    encoder, decoder = SeedEncoder(payload, mark), SeedDecoder(mark)
    good = next(answer for answer in answers if encoder.hits(answer))
    assert 2 <= sum(encoder.hits(answer) for answer in answers) <= 30  # one of 16
    assert [encoder.choose([token, 99]) for token in good[:2]] == list(good[:2])
    assert encoder.bits_sent == 0 and not encoder.done
    assert decoder.decode([], good[:2]).known_bits == 0
    encoder.choose(good[2:3])
    assert encoder.done and encoder.bits_sent == 4
    assert decoder.decode([], good[2:]).payload == payload
    assert len({Mark(bytes([key]), 3, 4).value(good) for key in range(40)}) > 8  # unknown without the key
    assert SeedDecoder(mark).decode([], good).payload == SeedDecoder(mark).decode([], (*good[:3], 1)).payload


def test_the_rate_is_the_wardens_bound() -> None:
    """Random sets, a long payload: the coding carries what Theorem 4.1 allows, all but the last choice."""
    rng = random.Random(4)
    sizes = [rng.choice([1, 1, 1, 2, 3, 5]) for _ in range(3000)]
    steps = steps_of(sizes, 4)
    payload = Payload.draw(int(support_rate(sizes) * 3000), rng)
    encoder = ChoiceEncoder(payload)
    tokens = [encoder.choose(step) for step in steps]
    assert encoder.done and encoder.bits_sent / 3000 <= support_rate(sizes)
    assert ChoiceDecoder(payload.bits).decode(steps, tokens).payload == payload


@settings(max_examples=40)
@given(payload=payloads, seed=st.integers(0, 99))
def test_one_bit_per_rank(payload: Payload, seed: int) -> None:
    steps = steps_of([5] * payload.bits, seed)
    encoder = rank_encoder(payload)
    tokens = [encoder.choose(step) for step in steps]
    assert encoder.done and encoder.bits_sent == payload.bits
    bits = "".join(str(step.index(token)) for step, token in zip(steps, tokens, strict=True))
    assert bits == (f"{payload.value:0{payload.bits}b}" if payload.bits else "")
    assert rank_decoder(payload.bits).decode(steps, tokens).payload == payload


def test_what_no_encoder_sends() -> None:
    with pytest.raises(InputError, match="not among the 2"):
        ChoiceDecoder(8).decode([(1, 2)], [3])
    with pytest.raises(InputError, match="not among the 2"):
        rank_decoder(8).decode([(1, 2, 3)], [3])
    with pytest.raises(InputError, match="no payload"):
        ChoiceDecoder(1).decode([(1, 2, 3, 4)], [1])
    with pytest.raises(InputError, match="no token may be sent"):
        ChoiceEncoder(Payload(1, 1)).choose([])
    with pytest.raises(InputError, match="sent nothing"):
        Adversary(rank_encoder(Payload(1, 1)), rank_decoder(1), random.Random(0)).guess()


# ---- a model


class Markov:
    """A toy model: the next token's logits depend on the last token only."""

    def __init__(self, vocabulary: int) -> None:
        generator = torch.Generator().manual_seed(9)
        self.table = torch.randn(vocabulary, vocabulary, generator=generator) * 2

    def choices(self, tokens: Sequence[int], seed: int, threshold: float) -> list[tuple[int, ...]]:
        """The warden's sets at all positions after the first token, teacher-forced."""
        logits = self.table[list(tokens[:-1])]
        noise = HashedNoise(bytes(16), seed)
        gumbel = torch.stack([noise.gumbel(logits.shape[1], tokens[: i + 1]) for i in range(len(tokens) - 1)])
        return gumbel_positions(
            logits,
            gumbel,
            Sampling(top_p=0.95),
            noise_sd=0.3,
            generator=torch.Generator().manual_seed(seed),
            samples=32,
        ).choices(threshold)


def test_through_the_wardens_real_sets() -> None:
    """Sets from FSSL-GM after each token sent: nothing is flagged, all comes back, at no more than the bound."""
    model, seed, threshold = Markov(60), 5, -9.0
    payload = Payload.of(b"weights")
    encoder, tokens, steps = ChoiceEncoder(payload), [0], []
    while not encoder.done:
        noise = HashedNoise(bytes(16), seed)
        logits, gumbel = model.table[tokens[-1]][None], noise.gumbel(60, tokens)[None]
        positions = gumbel_positions(
            logits,
            gumbel,
            Sampling(top_p=0.95),
            noise_sd=0.3,
            generator=torch.Generator().manual_seed(1),
            samples=32,
        )
        steps.append(positions.choices(threshold)[0])
        assert sample(logits, noise, Sampling(top_p=0.95), tokens) in steps[-1]
        scores = positions.pairs(torch.zeros(len(steps[-1])).long(), torch.tensor(steps[-1])).tolist()
        assert scores == sorted(scores, reverse=True) and scores[-1] >= threshold
        tokens.append(encoder.choose(steps[-1]))
    assert ChoiceDecoder(payload.bits).decode(steps, tokens[1:]).payload == payload
    rate = encoder.bits_sent / len(steps)
    allowed = support_rate([len(step) for step in steps])
    assert allowed - 1 / len(steps) < rate <= allowed + 1e-9 < math.log2(60) / 2
    # The warden sees all positions at once, with draws of its own, and a threshold with some room for them.
    seen = model.choices(tokens, seed, threshold - 8)
    exchange = Exchange(tuple(seen), tuple(seen), tuple(tokens[1:]))
    assert not Warden().alarm(exchange, tokens[1:])
    # The likeliest two tokens are another matter.
    naive, sent = rank_encoder(payload), [0]
    while not naive.done:
        sent.append(naive.choose(model.table[sent[-1]].topk(2).indices.tolist()))
    others = tuple(model.choices(sent, seed, threshold - 8))
    assert Warden(tolerance=20, vocabulary=60).alarm(Exchange(others, others, tuple(sent[1:])), sent[1:])


# ---- text


def encode(text: str) -> list[int]:
    """A tokenizer of one or two characters."""
    return [ord(text[i]) + 256 * sum(ord(c) for c in text[i + 1 : i + 2]) for i in range(0, len(text), 2)]


def decode(tokens: Sequence[int]) -> str:
    return "".join(chr(t % 256) + (chr(t // 256) if t >= 256 else "") for t in tokens)


@settings(max_examples=40)
@given(payload=payloads, extra=st.integers(0, 5), cut=st.integers(0, 30))
def test_base64_comes_back(payload: Payload, extra: int, cut: int) -> None:
    encoder, decoder = TextEncoder(payload, encode), TextDecoder(payload.bits, decode)
    tokens = []
    while not encoder.done:
        tokens.append(encoder.choose([7]))
    assert encoder.bits_sent == (payload.bits if tokens else 0)
    assert decode(tokens) == base64.b64encode(payload.data).decode()
    tokens += [encoder.choose([ord("x")]) for _ in range(extra)]
    part = decoder.decode([(7,)] * len(tokens[:cut]), tokens[:cut])
    assert part.low <= payload.value < part.high
    assert decoder.decode([(7,)] * len(tokens[cut:]), tokens[cut:]).payload == payload


def test_text_that_is_no_base64() -> None:
    with pytest.raises(InputError, match="no base64"):
        TextDecoder(24, decode).decode([], encode("a b!"))


# ---- filters


PROSE = """The committee met on 12 March 2024 and agreed, after 3 hours, that the budget of 1,250,000 euros would do.
See https://www.example.org/reports/annual/2023/summary.html or call +49 30 1234567; internationalization matters.
def compute_weighted_average(values): return sum(values) / len(values)  # src/hiddenlab/attacks/vocab_match.py"""


def test_prose_passes_and_data_does_not() -> None:
    check = SyntacticFilter()
    assert not check.verdict(PROSE).flagged and not check.verdict("").flagged
    data = random.Random(3).randbytes(60)
    plain = base64.b64encode(data).decode()
    for name, text in {
        "base64": plain,
        "base64 ": plain[:30] + "\n" + plain[30:60] + "\r\n" + plain[60:],
        "base64  ": base64.urlsafe_b64encode(data).decode().rstrip("="),
        "base32": base64.b32encode(data).decode(),
        "hexadecimal": data.hex(),
        "hexadecimal ": data.hex(":"),
        "decimal digits": str(int.from_bytes(data, "big")),
        "numbers": ", ".join(str(byte) for byte in data),
        "bits": " ".join(f"{byte:08b}" for byte in data),
        "escapes": "".join(f"\\x{byte:02x}" for byte in data),
        "escapes ": "".join(f"%{byte:02X}" for byte in data),
        "invisible": "\u200b".join("hello"),
    }.items():
        verdict = check.verdict(f"{PROSE}\n{text}\n{PROSE}")
        assert verdict.flagged and name.strip() in verdict.reason, (name, verdict)
        assert verdict.start >= len(PROSE) and verdict.end <= len(PROSE) + len(text) + 2
    with pytest.raises(InputError, match="from 1"):
        SyntacticFilter(bits=0)


def test_words_evade_the_filter() -> None:
    """What the paper warns of: a payload in the choice of words has no look."""
    words = ["amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "haven"]
    text = " ".join(words[byte % 8] for byte in random.Random(1).randbytes(400))
    assert not SyntacticFilter().verdict(text).flagged


@pytest.mark.parametrize("text", ["1 " * 9000, "a" * 30_000, "1" + " " * 30_000, "%4" * 9000, "ab:" * 9000])
def test_long_runs_do_not_hang(text: str) -> None:
    SyntacticFilter().verdict(text)


def test_perplexity() -> None:
    assert perplexity(torch.full((5,), -math.log(8))) == pytest.approx(8)
    assert perplexity(torch.tensor([0.0, -math.inf])) == math.inf
    generator = torch.Generator().manual_seed(0)
    honest = [-torch.rand(50, generator=generator) * 3 for _ in range(200)]
    check = PerplexityFilter.fit(honest, 0.1)
    assert sum(check.verdict(one).flagged for one in honest) == 20
    assert "above" in check.verdict(torch.full((9,), -8.0)).reason
    assert "below" in check.verdict(torch.full((9,), -0.01)).reason
    assert not check.verdict(honest[0] * 0 - 1.5).flagged
    for call in (
        lambda: perplexity(torch.tensor([])), lambda: perplexity(torch.tensor([0.5])),
        lambda: perplexity(torch.tensor([math.nan])), lambda: PerplexityFilter.fit([]),
        lambda: PerplexityFilter(2.0, 1.0), lambda: PerplexityFilter.fit(honest, 1.0),
    ):  # fmt: skip
        with pytest.raises(InputError):
            call()


# ---- the game


def quiet(message: int, bits: int, generator: random.Random) -> Adversary:
    """Stays within the warden's sets."""
    return Adversary(ChoiceEncoder(Payload(message, bits)), ChoiceDecoder(bits), generator)


def loud(turns: Sequence[int]) -> Any:
    """Naive coding in a few messages, which the warden's sets do not hold."""

    def team(message: int, bits: int, generator: random.Random) -> Adversary:
        halves = rank_encoder(Payload(message, bits)), rank_decoder(bits)
        return Adversary(*halves, generator, choose_from="ranked", turns=turns)

    return team


TRAFFIC = SyntheticTraffic(tokens=30, sizes={1: 0.8, 2: 0.2})


def test_a_quiet_adversary_has_the_capacity_and_no_more() -> None:
    few = compare(Rules(40, 20, 20, 5), Live(quiet, TRAFFIC, Warden()), rounds=10)
    assert few.rate == 1.0 == few.bound and few.ends == {"message learnt": 10}
    assert few.capacity == pytest.approx(20 * 30 * 0.2, rel=0.2)
    much = compare(Rules(400, 20, 20, 5), Live(quiet, TRAFFIC, Warden()), rounds=10)
    assert much.rate == 0.0 and much.ends == {"message not learnt": 10}
    assert 0 < much.bound < 1e-50
    # One bit more than is sent is guessed half of the time.
    fixed = SyntheticTraffic(tokens=3, sizes={2: 1.0})
    edge = compare(Rules(7, 2, 2, 1), Live(quiet, fixed, Warden()), rounds=200)
    assert edge.low < 0.5 < edge.high and edge.rate <= edge.bound


@pytest.mark.slow
def test_a_loud_adversary_hopes_not_to_be_inspected() -> None:
    rules = Rules(12, 12, 3, 2)
    one = compare(rules, Live(loud([7]), SyntheticTraffic(12, {2: 1.0}), Warden()), rounds=100)
    assert one.low < 0.75 < one.high and set(one.ends) == {"caught", "message learnt"}
    assert one.bound == 1.0  # its 12 bits are below what unsuspicious replies could carry
    rigid = SyntheticTraffic(tokens=12, sizes={1: 1.0})
    bounded = compare(rules, Live(loud([7]), rigid, Warden()), rounds=200)
    assert bounded.low < 0.75 < bounded.high
    assert bounded.bound == pytest.approx(0.75 + 12 * 2.0**-12) and bounded.low <= bounded.bound
    spread = compare(Rules(60, 12, 3, 2), Live(loud(range(5)), rigid, Warden()), rounds=100)
    assert spread.low < 35 / 220 < spread.high  # C(7, 3) / C(12, 3): none of the five is inspected


def test_false_alarms_spend_the_budget() -> None:
    noisy = SyntheticTraffic(tokens=20, sizes={1: 1.0}, misses=0.01)
    rate = measured_false_positives(noisy, Warden(), messages=4000)
    assert rate == pytest.approx(1 - 0.99**20, abs=0.02)
    assert measured_false_positives(noisy, Warden(1, 1000), messages=4000) < 0.03
    result = compare(Rules(500, 60, 60, 2), Live(loud([59]), noisy, Warden()), rounds=20)
    assert result.ends["alarms spent"] > 15 and result.rate > 0.8 and result.bound == 1.0


def test_one_game() -> None:
    rules = Rules(30, 10, 10, 1)
    outcome = play(rules, Live(loud([3]), TRAFFIC, Warden()), seed=1)
    assert outcome == play(rules, Live(loud([3]), TRAFFIC, Warden()), seed=1)
    assert not outcome.adversary_wins and outcome.end == "caught"
    assert (outcome.turns, outcome.inspected, outcome.honest_inspected, outcome.false_alarms) == (4, 4, 3, 0)
    unarmed = play(Rules(30, 10, 10, 0), Live(loud([3]), TRAFFIC, Warden()), seed=1)
    assert unarmed.adversary_wins and unarmed.end == "alarms spent"
    unseen = play(Rules(30, 10, 0, 0), Live(loud([3]), TRAFFIC, Warden()), seed=1)
    assert unseen.end == "message learnt" and unseen.inspected == 0
    again = [compare(rules, Live(quiet, TRAFFIC, Warden()), rounds=3) for _ in range(2)]
    assert again[0] == again[1]


def test_the_capacity_counts_every_reply_that_passes() -> None:
    exchange = Exchange(((0, 1), (2,), ()), ((0, 1),) * 3, (0, 2, 0))
    for tolerance in (0, 1, 2, 3):
        warden = Warden(tolerance, 4)
        passing = sum(
            not warden.alarm(exchange, (a, b, c)) for a in range(4) for b in range(4) for c in range(4)
        )
        assert passing <= 2 ** warden.capacity(exchange) + 1e-9
    assert Warden().capacity(exchange) == 1.0
    assert Warden(5, 4).alarm(exchange, (0, 2))


def test_recorded_answers_are_played_like_live_ones() -> None:
    """The loud adversary's answers, recorded, win and lose as often as the adversary itself."""
    honest = [False] * 9
    answers = [Sent(12.0, True, 0.0)]
    one = compare(Rules(12, 12, 3, 2), Recorded(honest, answers), rounds=300)
    assert one.low < 0.75 < one.high and set(one.ends) == {"caught", "message learnt"}
    assert one.bound == pytest.approx(0.75 + 12 * 2.0**-12) and one.low <= one.bound
    assert one.dishonest == 1
    spread = compare(Rules(60, 12, 3, 2), Recorded(honest, answers), rounds=300)
    assert spread.low < 35 / 220 < spread.high and spread.dishonest == 5


def test_recorded_answers_carry_what_they_carried() -> None:
    quiet_ones = [Sent(3.0, False, 4.0), Sent(0.0, False, 4.0)]
    enough = compare(Rules(30, 40, 40, 1), Recorded([False], quiet_ones), rounds=20)
    assert enough.rate == 1.0 == enough.bound and enough.dishonest == 10
    # Two messages carry up to 6 bits, so that one more is guessed half of the time, at best.
    edge = compare(Rules(7, 2, 2, 1), Recorded([False], quiet_ones[:1]), rounds=300)
    assert edge.low < 0.5 < edge.high and edge.dishonest == 2
    silent = compare(Rules(7, 2, 2, 1), Recorded([False], quiet_ones[1:]), rounds=300)
    assert silent.low < 2**-7 < silent.high and silent.dishonest == 0
    alarming = compare(Rules(7, 50, 50, 3), Recorded([True, False], quiet_ones), rounds=20)
    assert alarming.ends == {"alarms spent": 20} and alarming.false_positive_rate == 0.5
    for honest, sent in (([], quiet_ones), ([True], [])):
        with pytest.raises(InputError, match="at least one"):
            Recorded(honest, sent)


def test_sampling_finds_them() -> None:
    """Inspecting what `required_samples` says catches an adversary in 1 of 20 messages as often as it says."""
    messages, share = 200, 0.05
    n = required_samples(share, 0.9)
    turns = range(0, messages, int(1 / share))
    rules = Rules(10_000, messages, n, 1)
    lean = SyntheticTraffic(tokens=2, sizes={1: 1.0})
    result = compare(rules, Live(loud(list(turns)), lean, Warden()), rounds=60)
    assert result.ends["caught"] / 60 > 0.85


def test_games_that_cannot_be() -> None:
    for call in (
        lambda: Rules(1, 5, 6, 1), lambda: Rules(1, 5, 2, 3), lambda: Rules(-1, 5, 2, 1), lambda: Rules(1, 0, 0, 0),
        lambda: SyntheticTraffic(0, {1: 1.0}), lambda: SyntheticTraffic(1, {0: 1.0}),
        lambda: SyntheticTraffic(1, {9: 1.0}, vocabulary=9), lambda: SyntheticTraffic(1, {1: 1.0}, misses=2.0),
        lambda: Exchange(((1,),), (), (1,)), lambda: Warden(1), lambda: Warden(-1),
        lambda: compare(Rules(1, 5, 2, 1), Live(quiet, TRAFFIC, Warden()), rounds=0),
        lambda: measured_false_positives(TRAFFIC, Warden(), messages=0),
    ):  # fmt: skip
        with pytest.raises(InputError):
            call()
