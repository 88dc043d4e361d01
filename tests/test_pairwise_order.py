"""Which of two rows came first: learned from rows in their order, and of use where rows alone do not say."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hiddenlab.attacks.beam_decoding import BeamDecoding
from hiddenlab.attacks.beam_decoding.features import FEATURES, PRECEDES
from hiddenlab.attacks.beam_decoding.local_search import Parts, _gains, _moved
from hiddenlab.channels import Channel
from hiddenlab.models import TruncatedModel
from hiddenlab.proposals import store
from hiddenlab.proposals.corpus import Corpus
from hiddenlab.proposals.pairwise_order import SURE, PairwiseOrder, PairwiseOrderSettings
from hiddenlab.proposals.store import pairwise_order_for

SMALL = PairwiseOrderSettings(length=16, rank=8, steps=120, batch=16, every=20)
WIDTH = 24


def texts(count: int, drift: float, trace: float, seed: int) -> list[torch.Tensor]:
    """Rows that drift with their position, and hold traces of the row right before them."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(count, SMALL.length, WIDTH, generator=generator)
    rows[:, 1:, : WIDTH // 2] += trace * rows[:, :-1, WIDTH // 2 :]
    rows[:, :, 0] += drift * torch.arange(SMALL.length)
    return list(rows)


def right(model: PairwiseOrder, given: list[torch.Tensor], apart: range) -> float:
    """Share of pairs so far apart whose order is told."""
    odds = torch.stack([model(rows) for rows in given])
    torch.testing.assert_close(odds, -odds.transpose(1, 2))
    assert odds.abs().max() <= SURE
    return float(torch.cat([odds.diagonal(offset, 1, 2).flatten() > 0 for offset in apart]).float().mean())


def test_rows_that_drift_tell_their_order() -> None:
    model = PairwiseOrder.learn(texts(300, 0.4, 0.0, 1), SMALL)
    near, far = (right(model, texts(40, 0.4, 0.0, 2), apart) for apart in (range(1, 2), range(8, 16)))
    assert far > 0.85
    assert 0.5 < near < far


def test_traces_of_one_row_in_the_next_tell_their_order() -> None:
    assert (
        right(PairwiseOrder.learn(texts(300, 0.0, 1.0, 1), SMALL), texts(40, 0.0, 1.0, 2), range(1, 2)) > 0.75
    )


def test_of_rows_without_an_order_little_is_said() -> None:
    model = PairwiseOrder.learn(texts(300, 0.0, 0.0, 1), SMALL)
    assert torch.stack([model(rows) for rows in texts(40, 0.0, 0.0, 2)]).abs().mean() < 0.3
    assert 0.45 < right(model, texts(40, 0.0, 0.0, 2), range(1, 16)) < 0.55


@pytest.mark.usefixtures("small_probes")
@pytest.mark.parametrize("specs", [["gaussian:sigma=0.01", "seq-perm"], ["2d-perm"]])
def test_it_is_learned_once_for_a_channel(
    tiny_model: Callable[..., TruncatedModel],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    specs: list[str],
) -> None:
    monkeypatch.setenv("HIDDENLAB_CACHE", str(tmp_path))
    model = tiny_model("llama", 2)
    tokens = torch.randint(0, 256, (8,), generator=torch.Generator().manual_seed(5)).tolist()
    info = Channel.parse(specs).release(model, tokens, torch.Generator().manual_seed(0))[0].info
    first, seconds = pairwise_order_for(model, info)
    assert seconds > 0
    again, seconds = pairwise_order_for(model, info)
    assert seconds == 0
    assert first is not None
    assert again is not None
    rows = torch.randn(5, model.width, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(first(rows), again(rows))
    assert pairwise_order_for(model, replace(info, rows_permuted=False)) == (None, 0.0)
    # What it is learned from are rows in their order, as they are compared.
    seen: list[Any] = []

    def learn(given: list[torch.Tensor], *_: object) -> PairwiseOrder:
        seen.extend(given)
        return first

    monkeypatch.setattr(PairwiseOrder, "learn", learn)
    monkeypatch.setattr(store, "load_cached", lambda *_: None)
    pairwise_order_for(model, info)
    assert len(seen) == -(-4000 // len(seen[0])) == 63
    assert all(bool((one.diff(dim=1) >= 0).all()) == ("2d-perm" in specs) for one in seen)
    # Texts that are all too short teach nothing, and rows are decoded without.
    monkeypatch.setattr(Corpus, "text_window", lambda self, n: self.uniform(min(n, 40)))
    assert pairwise_order_for(model, info) == (None, 0.0)


@pytest.mark.slow
@pytest.mark.usefixtures("small_probes")
def test_moves_gain_what_they_change_in_the_order_of_pairs(tiny_model: Callable[..., TruncatedModel]) -> None:
    model = tiny_model("llama", 1)
    tokens = torch.randint(0, 256, (7,), generator=torch.Generator().manual_seed(5)).tolist()
    observation, _ = Channel.parse(["seq-perm"]).release(model, tokens, torch.Generator().manual_seed(0))
    prepared = BeamDecoding(lm=False, width=8).fit(observation.info, model).prepare(observation)
    with torch.inference_mode():
        view = prepared.reader.read(observation)
        odds = torch.randn(7, 7, generator=torch.Generator().manual_seed(1))
        view = replace(view, precedes=odds - odds.T)
        order, weights = torch.tensor([3, 1, 0, 5, 6, 2, 4]), torch.zeros(len(FEATURES))
        weights[PRECEDES] = 0.5
        parts = Parts(
            torch.tensor(tokens),
            torch.arange(7),
            torch.full((7,), -1),
            torch.zeros(7, 7),
            prepared.engines.beginning(),
        )
        gains = _gains(parts, order, view, prepared.engines, weights)
    assert view.precedes is not None

    def total(rows: torch.Tensor) -> float:
        assert view.precedes is not None
        return 0.5 * float(view.precedes[rows][:, rows].triu(1).sum())

    checked = 0
    for length, gain in enumerate(gains, 1):
        for first, to in gain.isfinite().nonzero().tolist():
            alone = [torch.full_like(one, float("-inf")) for one in gains]
            alone[length - 1][first, to] = 1.0
            (moved,) = _moved(order, alone)
            assert float(gain[first, to]) == pytest.approx(total(moved) - total(order), abs=1e-4)
            checked += 1
    assert checked > 50
