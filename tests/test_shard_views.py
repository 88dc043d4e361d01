"""Views of several rows: sites side by side, other positions with readers of their own, and rotations undone."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hiddenlab.attacks.shard_reading import Rows, ShardReading
from hiddenlab.attacks.shard_reading.beam import Held, evidence_of
from hiddenlab.attacks.shard_reading.readers import OffsetReader, collect_columns, sites_of
from hiddenlab.channels import Channel
from hiddenlab.errors import HiddenlabError
from hiddenlab.models import Request, TruncatedModel
from hiddenlab.proposals import own_text as texts
from hiddenlab.proposals.own_text import OwnText, own_text, side_by_side
from hiddenlab.proposals.probe import whitened_table, whitening
from hiddenlab.proposals.ridge import RidgeReader
from hiddenlab.proposals.turning import Turning
from hiddenlab.testing import VOCABULARY
from hiddenlab.types import Observation, silent

LoadModel = Callable[..., TruncatedModel]
TOKENS = torch.randint(0, VOCABULARY, (24,), generator=torch.Generator().manual_seed(0)).tolist()
OF_0, OF_1 = (0, 1, 2, 3, 12, 13, 14, 15), (4, 5, 6, 7, 16, 17, 18, 19)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "ROWS", 4000)
    monkeypatch.setattr(texts, "HELD_OUT", 4)


def released(model: TruncatedModel, node: int = 1) -> Observation:
    channel = Channel.parse([f"shard:alpha=3,c=4,node={node}"])
    return channel.release(model, TOKENS, torch.Generator().manual_seed(1))[0]


# ---- views


@pytest.mark.slow
def test_rows_of_one_site_are_read_as_one_observation_is(tiny_model: LoadModel) -> None:
    model = tiny_model("llama", 1)
    shown = released(model)
    attack = ShardReading(beam=3).fit(shown.info, model)
    (found,), alone = attack.recover_views([[Rows((shown,))]]), attack.recover(shown)
    assert found.tokens == alone.tokens and found.positions == alone.positions
    assert attack.recover_views([]) == []


@pytest.mark.slow
def test_queries_of_one_node_and_keys_of_another_name_the_tokens_of_both(tiny_model: LoadModel) -> None:
    """At the first layer both are linear in the embeddings, but for their norm, once positions are undone."""
    model = tiny_model("llama", 1, "q")
    queries, keys = released(model, 0), released(model.sibling(1, stream="kv"), 1)
    attack = ShardReading(reach=0, without="language-model").fit(queries.info, model)
    (both,) = attack.recover_views([[Rows((queries,)), Rows((keys,))]])
    assert both.positions == tuple(sorted(OF_0 + OF_1))
    assert [one.row for one in both.tokens] == list(range(16))  # numbered by position
    for places in (OF_0, OF_1):
        right = [both.ids[both.positions.index(place)] == TOKENS[place] for place in places]
        assert sum(right) >= 6
    # A short prompt leaves the second node nothing; prompts may differ in what is held.
    first, second = attack.recover_views([[Rows((queries,))], [Rows((queries,)), Rows((keys,))]])
    assert first.positions == OF_0 and second.ids == both.ids


@pytest.mark.slow
def test_joined_layers_are_read_by_one_regression_over_their_columns(tiny_model: LoadModel) -> None:
    """The oracle concatenates rows of own text by hand and keeps those that have the token in their window."""
    model = tiny_model("llama", 1)
    layers = [model, model.sibling(2), model.sibling(3)]
    shown = [released(one) for one in layers]
    attack = ShardReading(reach=1, without="language-model").fit(shown[0].info, model)
    prepared = attack.prepare(sites_of(shown))
    (held,) = prepared.held([Rows(tuple(shown))])
    kept = [own_text(one, sites_of([own])[0], 0, silent) for one, own in zip(layers, shown, strict=True)]
    table = whitened_table(model.embedding.float(), *whitening(model.embedding.float()))
    joined = torch.tensor(
        [[x for text in kept for x in text.states[row].tolist()] for row in range(kept[0].fitted)]
    )
    by_hand = torch.stack([torch.cat([own.states[row] for own in shown]) for row in range(len(OF_1))])
    assert torch.equal(held.states, by_hand)
    for offset, reader in enumerate(held.readers):
        used = [row for row in range(kept[0].fitted) if kept[0].places[row] >= max(1, offset)]
        tokens = kept[0].tokens[[row - offset for row in used]]
        oracle = RidgeReader(joined[used], table[tokens])
        assert torch.allclose(reader.reader.scores(by_hand, table), oracle.scores(by_hand, table), atol=1e-3)


class Says(RidgeReader):
    """Scores that are known: a row is one number, which tells what was asked."""

    def __init__(self, scores: list[float]) -> None:
        self._own = torch.tensor(scores)

    def scores(self, rows: Tensor, table: Tensor) -> Tensor:
        return rows * self._own


def test_what_rows_of_several_kinds_say_is_added_and_own_rows_come_first() -> None:
    a, b = (
        tuple(OffsetReader(Says(scores), torch.zeros(2, 1), 1.0, 0.0) for scores in both)
        for both in (([1.0, 2.0], [-1.0, 1.0]), ([3.0, 5.0], [2.0, 7.0]))
    )
    view = [Held(torch.tensor([[0.1], [0.2]]), {1: 0, 4: 1}, a), Held(torch.tensor([[0.3]]), {4: 0}, b)]

    def said(place: int) -> Tensor | None:
        (evidence,) = evidence_of([view], place)
        return evidence

    def scored(*parts: tuple[OffsetReader, float]) -> Tensor:
        return torch.stack([one.log_probs(torch.tensor([[row]]))[0] for one, row in parts]).sum(0)

    expected = {
        0: scored((a[1], 0.1)),  # by the row behind it
        1: scored((a[0], 0.1)),  # by its own
        3: scored((a[1], 0.2), (b[1], 0.3)),
        4: scored((a[0], 0.2), (b[0], 0.3)),
    }
    assert said(2) is None
    for place, evidence in expected.items():
        found = said(place)
        assert found is not None and torch.allclose(found, evidence)


def test_different_texts_do_not_stand_side_by_side() -> None:
    one = OwnText(torch.zeros(4, 2), torch.arange(4), torch.arange(4), 2)
    assert side_by_side([one, one]).states.shape == (4, 4)
    with pytest.raises(HiddenlabError, match="different texts"):
        side_by_side([one, OwnText(one.states, one.tokens.flip(0), one.places, 2)])


# ---- rotations by position


@pytest.mark.parametrize("stream", ["q", "qkv"])
def test_a_text_at_a_later_position_gives_the_same_rows_once_positions_are_undone(
    tiny_model: LoadModel, stream: str
) -> None:
    model = tiny_model("llama", 2, stream)
    shown = released(model)
    columns, text = collect_columns(model, sites_of([shown]), 0, silent)
    (turning,) = columns.turnings
    assert turning.turns
    places = torch.arange(len(TOKENS))
    early, late = (
        model.run([Request(model.prefix(offset=start), torch.tensor(TOKENS))], keep=False)[0].states
        for start in (0, 37)
    )
    assert not torch.allclose(early, late, atol=1e-2)
    undone = turning.undone(early, places)
    assert torch.allclose(undone, turning.undone(late, places + 37), atol=1e-3)
    assert torch.allclose(columns.of([shown]), undone[list(OF_1)], atol=1e-5)
    assert torch.equal(columns.of([shown])[0].isfinite(), torch.ones(undone.shape[1], dtype=torch.bool))
    assert [len(window) for window in text.windows()][:2] == [24, 48]


def test_rows_that_positions_do_not_turn_stay_as_they_are(tiny_model: LoadModel) -> None:
    model = tiny_model("llama", 2, "v")
    windows = [torch.tensor(TOKENS)] * 3
    assert not Turning.of(model, windows).turns
    rows = torch.randn(6, 3)
    assert Turning().undone(rows, torch.arange(6)) is rows
    # Nor does one matrix turn rows that learned positions change.
    assert not Turning.between(torch.randn(50, 4).double(), torch.randn(50, 4).double(), 2).turns


def test_a_planted_turn_of_each_head_is_found() -> None:
    draws = torch.Generator().manual_seed(0)
    rows = torch.randn(40, 10, generator=draws, dtype=torch.float64)
    turns = [torch.linalg.qr(torch.randn(5, 5, generator=draws, dtype=torch.float64)).Q for _ in range(2)]
    turn, places = torch.block_diag(*turns), torch.arange(40)
    turned = torch.stack(
        [row @ torch.matrix_power(turn, int(p)) for row, p in zip(rows, places, strict=True)]
    )
    found = Turning.between(turned, turned @ turn, 2).undone(turned, places)
    assert torch.allclose(found, rows, atol=1e-8)
