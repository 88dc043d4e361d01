"""Which values a TOPLOC proof commits to, and which tokens are covered: fast paths against slow oracles."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hiddenlab.cli.verify import RuleOpt
from hiddenlab.defenses.verification.causal_lm import load_whole
from hiddenlab.defenses.verification.command import _checked
from hiddenlab.defenses.verification.difr import Replay
from hiddenlab.defenses.verification.rules import (
    DEFAULT,
    EVERY,
    LARGEST,
    PAPER,
    ROWS,
    RULES,
    Rule,
    rule_of,
    shares,
)
from hiddenlab.defenses.verification.sampling import Sampling
from hiddenlab.defenses.verification.toploc import Thresholds, commit, commit_all, verify, verify_all
from hiddenlab.defenses.verification.transcript import Transcript
from hiddenlab.errors import InputError
from hiddenlab.testing import save_tiny

WIDTH = 64
ONES = torch.ones(WIDTH)
Choice = list[int]


def bits_of(values: Tensor) -> np.ndarray:
    return values.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)


def slow_choice(rule: Rule, values: list[list[float]], k: int, scale: list[float]) -> Choice:
    """The rule in its own words: sort, take the first; ties by place."""
    width = len(values[0])
    if not rule.by_row:
        flat = [value for row in values for value in row]
        return sorted(sorted(range(len(flat)), key=lambda i: (-abs(flat[i]), i))[:k])
    out, n = list[int](), len(values)
    for row, line in enumerate(values):
        places = (row + 1) * k // n - row * k // n
        order = sorted(range(width), key=lambda j: (-abs(line[j]) / scale[j], j))
        out += sorted(row * width + j for j in order[:places])
    return out


# Few different numbers, all exact in bfloat16, so that ties are common.
numbers = st.sampled_from([-8.0, -3.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0, 3.0, 8.0, 100.0])


@st.composite
def chunk(draw: st.DrawFn) -> tuple[list[list[float]], int, list[float]]:
    rows, width = draw(st.integers(1, 7)), draw(st.integers(1, 6))
    line = st.lists(numbers, min_size=width, max_size=width)
    values = draw(st.lists(line, min_size=rows, max_size=rows))
    scale = draw(st.lists(st.sampled_from([0.5, 1.0, 3.0, 100.0]), min_size=width, max_size=width))
    return values, draw(st.integers(1, rows * width)), scale


@settings(max_examples=200)
@given(given_chunk=chunk(), rule=st.sampled_from(list(RULES.values())))
def test_the_choice_is_the_slow_one(
    given_chunk: tuple[list[list[float]], int, list[float]], rule: Rule
) -> None:
    values, k, scale = given_chunk
    found = rule.choose(bits_of(torch.tensor(values)), k, np.array(scale))
    assert found.tolist() == slow_choice(rule, values, k, scale)


@given(k=st.integers(0, 300), rows=st.integers(1, 70))
def test_places_are_dealt_out_evenly(k: int, rows: int) -> None:
    places = shares(k, rows)
    assert len(places) == rows and sum(places) == k and max(places) - min(places) <= 1


@given(prompt=st.integers(1, 100), answer=st.integers(0, 100), every=st.integers(1, 40))
def test_chunks_are_the_request(prompt: int, answer: int, every: int) -> None:
    states = torch.arange(prompt + answer)[:, None].float()
    for rule in RULES.values():
        parts = rule.chunks(states[:prompt], states[prompt:], every)
        assert torch.equal(torch.cat(parts), states)
        in_prompt = [part for part in parts if float(part[0, 0]) < prompt]
        assert all(float(part[-1, 0]) < prompt for part in in_prompt)
        longest = [len(part) for part in (parts[1:] if rule.whole_prompt else parts)]
        assert max(longest, default=0) <= every
        assert len(in_prompt) == (1 if rule.whole_prompt else -(-prompt // every))


# ---- coverage


@settings(max_examples=60)
@given(
    prompt=st.integers(1, 70), answer=st.integers(0, 40), seed=st.integers(0, 10**6),
    k=st.sampled_from([1, 5, 16, 40]), rule=st.sampled_from(list(RULES.values())), massive=st.booleans(),
)  # fmt: skip
def test_coverage_counts_rows_with_values_exactly(
    prompt: int, answer: int, seed: int, k: int, rule: Rule, massive: bool
) -> None:
    draws = torch.Generator().manual_seed(seed)
    states = torch.randn(prompt + answer, WIDTH, generator=draws).bfloat16()
    if massive:
        states[:, 3] = 90.0
    sides = states[:prompt], states[prompt:]
    verdict = verify_all(*sides, commit_all(*sides, k, rule=rule, scale=ONES), k=k, rule=rule, scale=ONES)
    assert verdict.accepted
    wanted, start = set[int](), 0
    for part in rule.chunks(*sides):
        chosen = slow_choice(rule, part.float().tolist(), k, ONES.tolist())
        wanted |= {start + index // WIDTH for index in chosen}
        start += len(part)
    assert verdict.prompt == tuple(sorted(row for row in wanted if row < prompt))
    assert verdict.output == tuple(sorted(row - prompt for row in wanted if row >= prompt))


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    changed=st.sets(st.integers(0, 31), max_size=8),
    rule=st.sampled_from([LARGEST, ROWS]),
)
def test_a_row_whose_values_disagree_is_not_covered(seed: int, changed: set[int], rule: Rule) -> None:
    draws = torch.Generator().manual_seed(seed)
    own = torch.randn(EVERY, WIDTH, generator=draws).bfloat16()
    sent = own.clone()
    sent[sorted(changed)] *= -1  # the same places are chosen, every value has another sign
    check = verify(own, commit(sent, rule=rule, scale=ONES), rule=rule, scale=ONES)
    chosen = {index // WIDTH for index in slow_choice(rule, own.float().tolist(), 128, ONES.tolist())}
    assert check.covered == tuple(sorted(chosen - changed))
    assert check.mismatches is not None and check.mismatches >= len(changed & chosen)
    if rule is ROWS:
        assert check.faulty_rows == len(changed) and check.accepted == (not changed)


# ---- a model whose values are known


KNOWN = 128  # its width
MASSIVE = 5
SCALE = torch.ones(KNOWN)
SCALE[MASSIVE] = 2.0**70
words = st.integers(0, 49)


def known(tokens: list[int]) -> Tensor:
    """States of a model in which token t has its own, whatever its context: four values of 2^(t + 1), others smaller.

    No two tokens share an exponent, but in the massive column, which is the same for all of them.
    """
    sizes = 2.0 ** torch.tensor(tokens, dtype=torch.float64)
    states = (sizes[:, None] / 4).repeat(1, KNOWN)
    states[:, :4] = 2 * sizes[:, None]
    states[:, MASSIVE] = 2.0**60
    return states.bfloat16()


@pytest.mark.slow
@settings(max_examples=100)
@given(
    tokens=st.lists(words, min_size=32, max_size=100).filter(lambda one: len(one) % EVERY != 1),
    place=st.integers(0, 99),
    token=words,
)
def test_one_changed_token_is_found(tokens: list[int], place: int, token: int) -> None:
    place %= len(tokens)
    claimed = [*tokens[:place], token, *tokens[place + 1 :]]
    own, none = known(claimed), known([0])[:0]
    proofs = commit_all(known(tokens), none, rule=ROWS, scale=SCALE)
    verdict = verify_all(own, none, proofs, rule=ROWS, scale=SCALE)
    assert verdict.accepted == (token == tokens[place]), verdict
    assert verdict.prompt == tuple(i for i in range(len(tokens)) if i != place or verdict.accepted)
    # The published rule compares nothing of a token but its massive value, which is the same for every token.
    proofs = commit_all(known(tokens), none, k=16, rule=PAPER)
    verdict = verify_all(own, none, proofs, k=16, rule=PAPER)
    assert verdict.accepted and verdict.prompt == tuple(range(16))


def answered(
    rule: Rule, prompt: list[int], claimed: list[int], output: list[int]
) -> tuple[Transcript, Replay]:
    """What a provider claims who computed one prompt and names another, and what the verifier has of it."""
    states = known([*prompt, *output])
    sides = states[: len(prompt)], states[len(prompt) - 1 : -1]
    proofs = tuple(proof.to_base64() for proof in commit_all(*sides, rule=rule, scale=SCALE))
    greedy = Sampling(method="greedy", temperature=0.0)
    one = Transcript("r", "fake", tuple(claimed), tuple(output), greedy, proofs, rule.name)
    replay = Replay(
        torch.zeros(len(output), 4), None, None, torch.tensor(output), greedy, known([*claimed, *output])
    )
    return one, replay


def test_a_massive_column_does_not_speak_for_a_prompt() -> None:
    """400 prompt tokens, the last 120 replaced: the published rule accepts, and used to call 431 of 432 covered."""
    prompt, output = [i * 7 % 50 for i in range(400)], [i * 3 % 50 for i in range(32)]
    claimed = [*prompt[:280], *((token + 1) % 50 for token in prompt[280:])]

    def checked(rule: Rule, claimed: list[int]) -> dict[str, object]:
        one, replay = answered(rule, prompt, claimed, output)
        return _checked(one, replay, None, 1, 0.1, 128, rule, SCALE)

    blind = checked(PAPER, claimed)
    # Of the prompt its first 128 tokens, of the answer's states all 32, the first of them the last prompt token's.
    assert blind["verdict"] == "valid" and (blind["covered"], blind["without_value"]) == (160, 272)
    assert "compared 160 of 432 tokens by values of their own, 272 by none" in str(blind["reason"])
    found = checked(ROWS, claimed)
    assert found["verdict"] == "rejected" and found["faulty_rows"] == 120 + 1
    honest = checked(ROWS, prompt)
    assert honest["verdict"] == "valid" and (honest["covered"], honest["without_value"]) == (431, 1)
    assert "no value depends on the last 1" in str(honest["reason"])


# ---- agreed on by name


def test_a_rule_stands_beside_proofs_and_is_known() -> None:
    one, replay = answered(ROWS, [1, 2, 3], [1, 2, 3], [4, 5])
    value = json.loads(json.dumps(one.to_json()))
    assert value["proof_rule"] == "rows" and Transcript.from_json(value) == one
    refused: list[tuple[Callable[[], object], str]] = [
        (
            lambda: Transcript.from_json(value | {"proof_rule": "mine"}),
            "unknown rule 'mine'; known are paper",
        ),
        (
            lambda: Transcript.from_json({k: v for k, v in value.items() if k != "proof_rule"}),
            "belong together",
        ),
        (lambda: Transcript.from_json({k: v for k, v in value.items() if k != "proofs"}), "belong together"),
        (lambda: Transcript.from_json(value | {"proof_rule": 3}), "proof_rule should be a valid string"),
        (lambda: rule_of("Rows"), "unknown rule"),
        (lambda: _checked(one, replay, None, 1, 0.1, 128, PAPER, None), "'rows'; 'paper' was agreed on"),
    ]
    for act, reason in refused:
        with pytest.raises(InputError, match=reason):
            act()
    assert _checked(one, replay, None, 1, 0.1, 128, ROWS, SCALE)["verdict"] == "valid"


def test_the_command_line_knows_every_rule() -> None:
    assert set(get_args(get_args(RuleOpt)[0])) == set(RULES) and DEFAULT in RULES


@pytest.mark.parametrize("bad", [None, 0 * SCALE, -SCALE, SCALE / 0])
def test_a_rule_by_row_needs_a_scale(bad: Tensor | None) -> None:
    states = known([1, 2, 3])
    with pytest.raises(InputError, match="needs a scale"):
        commit(states, rule=ROWS, scale=bad)
    assert commit(states, rule=PAPER) == commit(states, rule=LARGEST)


def test_the_limit_of_a_row() -> None:
    """Four values: one has to agree. Fewer: their row has no limit, as honest rounding can move any one of them."""
    own = known([7] * 32)
    for k, faulty in ((128, 1), (96, 0), (256, 1)):
        sent = own.clone()
        sent[9] *= -1
        check = verify(own, commit(sent, k, ROWS, SCALE), k=k, rule=ROWS, scale=SCALE)
        assert check.faulty_rows == faulty and check.accepted == (not faulty)
    assert verify(own, commit(sent, 256, ROWS, SCALE), Thresholds(row=0.0), 256, ROWS, SCALE).accepted
    with pytest.raises(InputError, match="has to agree"):
        replace(Thresholds(), row=1.5)


def test_the_scale_is_the_models_own(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = save_tiny("llama", tmp_path_factory.mktemp("llama"))
    exact, coarse = (load_whole(path, dtype=dtype, device="cpu") for dtype in ("float32", "bfloat16"))
    assert exact.scale.shape == (exact.width,) and bool((exact.scale > 0).all())
    assert torch.equal(exact.scale, load_whole(path, dtype="float32", device="cpu").scale)
    assert torch.allclose(exact.scale, coarse.scale, rtol=0.05)
    most = int(exact.model.config.max_position_embeddings)  # type: ignore[union-attr,arg-type]
    tokens = [place * 2654435761 % exact.vocabulary for place in range(1, min(256, most) + 1)]
    states, _ = exact.prefill([*tokens, 0], 1)
    wanted = states[:-1].double().square().mean(0).sqrt()
    assert torch.allclose(exact.scale, wanted, rtol=1e-4)
