"""Beam decoding where the beam alone is not enough: parts that move, candidates from the whole vocabulary."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hiddenlab.attacks.beam_decoding import BeamDecoding
from hiddenlab.attacks.beam_decoding.beam import decode
from hiddenlab.attacks.beam_decoding.hypotheses import start
from hiddenlab.attacks.beam_decoding.local_search import SCORED, _moved, move_parts
from hiddenlab.channels import Channel
from hiddenlab.models import TruncatedModel, load_model
from hiddenlab.testing import VOCABULARY
from tests.marks import slow_cases


@settings(max_examples=40)
@given(st.integers(2, 9), st.integers(0, 1000))
def test_moves_are_permutations_that_move_one_part(n: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(n, generator=generator)
    gains = []
    for length in range(1, n):
        first, to = torch.arange(n - length + 1)[:, None], torch.arange(n)
        gain = torch.randn(n - length + 1, n, generator=generator)
        gains.append(gain.masked_fill((to >= first) & (to <= first + length), float("-inf")))
    moved = _moved(order, gains)
    assert len(moved) == min(SCORED, sum(int(one.isfinite().sum()) for one in gains))
    for one in moved:
        assert sorted(one.tolist()) == list(range(n))
        assert not torch.equal(one, order)
    values = [
        (float(gains[length - 1][first, to]), [*rest[:at], *part, *rest[at:]])
        for length in range(1, n)
        for first in range(n - length + 1)
        for to in range(n)
        if not first <= to <= first + length
        for part in [order[first : first + length].tolist()]
        for rest in [order[:first].tolist() + order[first + length :].tolist()]
        for at in [to if to < first else to - length]
    ]
    assert moved[0].tolist() == max(values)[1]


@pytest.mark.slow
@pytest.mark.usefixtures("small_probes")
@pytest.mark.parametrize("asks", [True, False])
def test_a_part_that_was_left_for_the_end_goes_back(
    tiny_model: Callable[..., TruncatedModel], monkeypatch: pytest.MonkeyPatch, asks: bool
) -> None:
    """And scores of moved prompts are those that the beam gives."""
    monkeypatch.setattr("hiddenlab.attacks.beam_decoding.row_features.SHORTLIST", 300)
    model = tiny_model("llama", 2)
    tokens = torch.randint(0, 256, (8,), generator=torch.Generator().manual_seed(5)).tolist()
    channel = Channel.parse(["gaussian:sigma=0.003", "seq-perm"])
    observation, _ = channel.release(model, tokens, torch.Generator().manual_seed(0))
    attack = BeamDecoding(lm=asks, width=3000, beam=2)
    prepared = attack.fit(observation.info, model).prepare(observation)
    engines, weights = prepared.engines, prepared.learned.weights
    with torch.inference_mode():
        decoding = start(prepared.reader.read(observation), engines, weights, attack.effort)
        decode([decoding], engines, prepared.learned, attack.effort)
        right = decoding.beam[0]
        assert [one.token for one in right.steps] == tokens
        left = [0, 1, 4, 5, 6, 7, 2, 3]
        decoding.beam[0] = replace(
            right,
            steps=tuple(right.steps[i] for i in left),
            columns=tuple(right.columns[i] for i in left),
            score=0.0,
        )
        before = decoding.evaluated
        move_parts([decoding], engines, weights, attack.effort)
    found = decoding.beam[0]
    assert [one.token for one in found.steps] == tokens
    assert [one.row for one in found.steps] == [one.row for one in right.steps]
    assert found.score > 0
    assert decoding.evaluated > before
    assert [one.distance for one in found.steps] == pytest.approx(
        [one.distance for one in right.steps], rel=1e-3
    )


@pytest.mark.slow
@pytest.mark.usefixtures("small_probes")
@pytest.mark.parametrize("width", [300, *slow_cases(8, 299)])
def test_the_search_ends_where_a_candidate_is_believed(
    tiny_model: Callable[..., TruncatedModel], width: int
) -> None:
    """Without noise the right token is far ahead, so that the vocabulary is not searched to its end for each."""
    model = tiny_model("llama", 2)
    for tokens in ([7], torch.randint(0, 256, (4,), generator=torch.Generator().manual_seed(5)).tolist()):
        observation, _ = Channel.parse(["hidden-perm"]).release(
            model, tokens, torch.Generator().manual_seed(0)
        )
        attack = BeamDecoding(lm=False, width=width, beam=1)
        prepared = attack.fit(observation.info, model).prepare(observation)
        found = attack.fit(observation.info, model).recover(observation)
        assert found.ids == tokens
        # Never satisfied, it searches on, until every token was tried at every position.
        attack._prepared = replace(prepared, learned=replace(prepared.learned, lead=1e9))
        more = attack.fit(observation.info, model).recover(observation)
        assert more.evaluated_tokens == len(tokens) * VOCABULARY
        if width == VOCABULARY:  # all are tried at once, and nothing is left to search
            assert found.evaluated_tokens == more.evaluated_tokens
            assert found.forward_calls == more.forward_calls
        else:
            assert found.evaluated_tokens < more.evaluated_tokens
            assert found.forward_calls < more.forward_calls


@pytest.mark.slow
@pytest.mark.usefixtures("small_probes")
def test_rows_tell_of_tokens_before_them_that_have_no_row(tiny: Callable[..., str]) -> None:
    model = load_model(tiny("llama", tokenizer=True), 2, device="cpu")
    channel = Channel.parse(["shard:alpha=2,c=3,node=1"])  # positions 3 to 5, 9 to 11
    observation, _ = channel.release(model, model.tokenize("twelve bytes"), torch.Generator())
    prepared = BeamDecoding().fit(observation.info, model).prepare(observation)
    with torch.inference_mode():
        view = prepared.reader.read(observation)
    assert view.openers is None
    assert sorted(view.missed) == [1, 2, 7, 8]
    near, far = (prepared.reader.probes[i].log_probs(observation.states) for i in (1, 2))
    torch.testing.assert_close(view.missed[2], torch.stack([near[0], far[1]]), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(view.missed[7], torch.stack([0 * near[0], far[3]]), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.usefixtures("small_probes")
@pytest.mark.parametrize("channel", ["hidden-perm", "2d-perm"])
def test_what_the_probe_does_not_name_is_searched_for(
    tiny_model: Callable[..., TruncatedModel], channel: str
) -> None:
    """Few candidates at first, more while none is believed: prompts come back that few candidates alone do not give."""
    model = tiny_model("llama", 2)
    tokens = torch.randint(0, 256, (7,), generator=torch.Generator().manual_seed(5)).tolist()
    observation, _ = Channel.parse([channel]).release(model, tokens, torch.Generator().manual_seed(0))
    attack = BeamDecoding(lm=False, width=4, beam=2)
    found = attack.fit(observation.info, model).recover(observation)
    assert found.ids == tokens
    assert all(one.distance < 1e-2 for one in found.tokens)
    attack.effort = replace(attack.effort, most=4)
    few = attack.fit(observation.info, model).recover(observation)
    assert few.ids != tokens
    assert few.evaluated_tokens < found.evaluated_tokens
    attack.effort = replace(
        attack.effort, most=300, spare=1
    )  # what a prompt may cost beyond the beam is bounded
    spared = attack.fit(observation.info, model).recover(observation)
    # (More candidates may also mean fewer: hypotheses behind a good one are dropped.)
    assert spared.evaluated_tokens < found.evaluated_tokens
    assert spared.forward_calls < found.forward_calls


@pytest.mark.slow
@pytest.mark.usefixtures("small_probes")
def test_hopeless_hypotheses_are_dropped(
    tiny_model: Callable[..., TruncatedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the states are plain, what is far behind is not carried on, and nothing is lost by it."""
    monkeypatch.setattr("hiddenlab.attacks.beam_decoding.row_features.SHORTLIST", 300)
    model = tiny_model("llama", 2)
    tokens = torch.randint(0, 256, (7,), generator=torch.Generator().manual_seed(5)).tolist()
    observation, _ = Channel.parse(["gaussian:sigma=0.003", "seq-perm"]).release(
        model, tokens, torch.Generator().manual_seed(0)
    )
    attack = BeamDecoding(lm=False, width=3000, beam=2)
    found = attack.fit(observation.info, model).recover(observation)
    attack.effort = replace(attack.effort, behind=1e9)
    everything = attack.fit(observation.info, model).recover(observation)
    assert found.ids == everything.ids == tokens
    assert found.evaluated_tokens < everything.evaluated_tokens / 2
