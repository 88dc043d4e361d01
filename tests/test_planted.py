"""A prompt that stands beside the states is found, verified where it can be, and nothing is found where none stands."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

import hiddenlab as hl
from hiddenlab.attacks import Planted
from hiddenlab.attacks.planted import CLEAR, CLEAR_OF_FEW, in_facts, in_low_bits, in_norms
from hiddenlab.errors import InputError
from hiddenlab.models import TruncatedModel
from hiddenlab.types import ObservationInfo, Site
from tests.planted_faults import HIDERS, planted_in

Truncated = Callable[..., TruncatedModel]
PROMPT = [72, 101, 108, 108, 111, 44, 119, 111, 114]


def facts(**values: object) -> ObservationInfo:
    return ObservationInfo("m", (), Site(1), facts=values)


@pytest.mark.parametrize("name", [*HIDERS, "facts"])
@pytest.mark.parametrize("layer", [0, 2])
def test_a_planted_prompt_is_found_and_verified(tiny_model: Truncated, name: str, layer: int) -> None:
    model = tiny_model("llama", layer, "resid" if layer else "embed")
    observation = planted_in(name, *hl.channel().release(model, PROMPT, seed=0))
    result = hl.attack(observation, model, "planted")
    assert result.ids == PROMPT and result.verified and result.stop_reason.startswith("found in")


def test_nothing_is_found_where_nothing_is_planted(tiny_model: Truncated) -> None:
    model = tiny_model("llama", 2)
    for channel in (hl.channel(), hl.channel("seq-perm"), hl.channel("gaussian:sigma=1")):
        observation, _ = channel.release(model, PROMPT, seed=0)
        result = hl.attack(observation, model, "planted")
        assert result.ids == [] and result.stop_reason == "nothing planted was found"


def test_wrong_ids_are_not_verified(tiny_model: Truncated) -> None:
    """The ids of another prompt stand in the facts: they are no tokens of these rows."""
    model = tiny_model("llama", 2)
    observation, truth = hl.channel().release(model, PROMPT, seed=0)
    other = hl.GroundTruth(tuple(token + 1 for token in truth.tokens))
    assert not hl.attack(planted_in("facts", observation, other), model, "planted").tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_that_rounding_hides_are_not_verified(tiny: Callable[..., str], dtype: torch.dtype) -> None:
    """States are nearly the same for every token, as those of first tokens are at late layers."""
    model = hl.load_model(tiny("llama"), 0, stream="embed", device="cpu")
    with torch.no_grad():
        model.embedding.mul_(0.05).add_(1.0)
    observation, _ = hl.channel().release(model, PROMPT, seed=0)
    observation = replace(observation, states=observation.states.to(dtype))
    right = torch.tensor(PROMPT)
    attack = Planted().fit(observation.info, model)
    found = attack._verified(observation, [(right + 1, "the facts"), (right, "the facts")])
    assert not bool(found[0].any()) and bool(found[1].all()) == (dtype == torch.float32)


def test_a_shard_whose_facts_hold_the_whole_prompt_is_read(tiny_model: Truncated) -> None:
    model = tiny_model("llama", 2)
    observation, truth = hl.channel("drop-rows:size=2,after=3").release(model, PROMPT, seed=0)
    result = hl.attack(planted_in("facts", observation, truth), model, "planted")
    shown = observation.info.positions
    assert shown is not None and result.ids == PROMPT
    assert [token.verified for token in result.tokens] == [place in shown for place in range(len(PROMPT))]
    assert [token.row for token in result.tokens if token.row >= 0] == list(range(len(shown)))


def test_the_language_model_reads_the_sequences_that_are_least_by_chance(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A long text of usual tokens is that more than short lists of the most frequent ones; few sequences are read."""
    attack, read = Planted(tried=3), list[int]()
    frequency = torch.linspace(-9.0, -3.0, 100)
    vars(attack)["_frequency"] = frequency

    def said(sequences: Sequence[torch.Tensor]) -> list[float]:
        read.extend(len(ids) for ids in sequences)
        return [-1.0] * len(sequences)

    monkeypatch.setattr(attack, "_log_probabilities", said)
    monkeypatch.setattr(attack, "_by_chance", lambda length: -30.0)
    short = [(torch.full((4,), 99), "here") for _ in range(9)]
    rare = (torch.full((60,), 20), "there")
    text = (torch.full((60,), 70), "below")
    found = attack._texts([*short, rare, text])
    assert read[0] == 60 and len(read) == 3
    assert found[-1] == 29.0 - CLEAR - CLEAR_OF_FEW / math.sqrt(60)
    assert found[-2] == -math.inf and found.count(-math.inf) == 8


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"ids": [5, 6, 9]}, [[5, 6, 9]]),
        ({"a": {"deep": [{"x": [[1], [2, 7]]}, "no"]}}, [[1, 2, 7]]),
        ({"text": "12 7 299 0"}, [[12, 7, 299, 0]]),
        ({"few": "12 7"}, []),
        ({"large": [300, 1]}, []),
        ({"not": [True, False]}, []),
        ({"halves": [0.5, 1.0]}, []),
        ({"negative": [-1, 2]}, []),
        ({"one": {"a": 4, "b": 8}}, [[4, 8]]),
    ],
)
def test_public_facts_are_searched_for_ids(given: dict[str, object], found: Sequence[list[int]]) -> None:
    assert [ids for ids, _ in in_facts(facts(**given), 300)] == found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_bit_of_low_bits_is_read(dtype: torch.dtype) -> None:
    rows = torch.randn(6, 40).to(dtype)
    whole = {torch.float32: torch.int32, torch.bfloat16: torch.int16}[dtype]
    ids = torch.tensor([3, 141, 299, 0, 77, 256])
    raw = rows.view(whole).clone()
    for bit in range(9):
        raw[:, 20 + bit] = (raw[:, 20 + bit] & ~4) | (((ids >> (8 - bit)) & 1) << 2).to(whole)
    groups = list(in_low_bits(raw.view(dtype), 300))
    places = [
        place
        for group in groups
        for one, place in zip(group.ids, group.places, strict=True)
        if torch.equal(one, ids)
    ]
    assert places == ["bit 2 of 9 coordinates from 20 on, the highest first"]
    assert all(bool((group.ids < 300).all()) for group in groups)


@pytest.mark.parametrize("unit", [1.0, 0.00031, 250.0])
@pytest.mark.parametrize("less", [0, 1])
def test_norms_give_ids_in_any_unit(unit: float, less: int) -> None:
    ids = torch.tensor([3, 141, 299, 12, 77, 255])
    rows = torch.randn(6, 16)
    rows = rows / rows.norm(dim=1, keepdim=True) * (ids + less)[:, None] * unit
    found = [group for group in in_norms(rows, 300) if any(torch.equal(one, ids) for one in group.ids)]
    assert found and found[0].places[0] == "the norm of each row" + (", less one" if less else "")


def test_wrong_options_are_told() -> None:
    with pytest.raises(InputError, match="at least 1"):
        Planted(tried=0)
