"""Mean sorted states behind texts: what they are, what they count beside a probe, and that they help."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hiddenlab.channels import Channel, in_order
from hiddenlab.models import TruncatedModel
from hiddenlab.proposals import sorted_states, store
from hiddenlab.proposals.first_token_table import SortedStates, packed
from hiddenlab.proposals.sorted_states import OF_DISTANCE, OF_PROBE, Contexts
from hiddenlab.types import ObservationInfo

LoadModel = Callable[..., TruncatedModel]
TEXTS = [torch.tensor([3, 40, 7]), torch.tensor([250, 9, 9, 61])]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def public_of(model: TruncatedModel, *specs: str) -> ObservationInfo:
    return Channel.parse(specs).release(model, [1, 2, 3], seeded())[0].info


@settings(max_examples=20)
@given(st.integers(0, 1000), st.integers(1, 5), st.floats(-3, 6))
def test_squared_distances_are_those_of_sorted_rows(seed: int, rows: int, size: float) -> None:
    generator = seeded(seed)
    states = torch.randn(30, 16, generator=generator).sort(1).values * 10**size
    observed = torch.randn(rows, 16, generator=generator) * 10**size
    found = SortedStates(*packed(states.split(7))).squares(observed)
    expected = (
        torch.cdist(observed.sort(1).values, states).square() / observed.norm(dim=1, keepdim=True).square()
    )
    assert torch.allclose(found, expected, rtol=1e-2, atol=1e-2)


def test_states_are_the_mean_behind_the_texts(tiny_model: LoadModel) -> None:
    model = tiny_model("gemma2", 2)
    made = Contexts.make(model, TEXTS)
    assert not made.useful
    token, each = 77, []
    for text in TEXTS:
        each.append(model.encode(torch.cat([text, torch.tensor([token])]))[-1].sort().values)
    kept = made.states.table[token].float() * made.states.scale[token]
    assert torch.allclose(kept, torch.stack(each).mean(0), rtol=2e-3, atol=2e-3)


def of_points(points: torch.Tensor) -> Contexts:
    return Contexts(SortedStates(*packed([points])))


def test_what_they_count_is_what_they_are_worth() -> None:
    generator = seeded(4)
    points = torch.randn(50, 12, generator=generator).sort(1).values
    tokens = torch.arange(50).repeat(4)
    near = points[tokens] + 0.05 * torch.randn(200, 12, generator=generator)
    nothing, prior = torch.zeros(50).log_softmax(0), torch.zeros(50)

    def ignorant(rows: torch.Tensor) -> torch.Tensor:
        return nothing.expand(len(rows), -1)

    one = of_points(points).weighed(ignorant, near, tokens, prior)
    assert one.useful
    assert float((one.with_probe(near, ignorant(near)).argmax(1) == tokens).float().mean()) > 0.9
    # Rows that have nothing to do with the states, and a probe that knows.
    elsewhere = torch.randn(200, 12, generator=generator)
    knowing = {tuple(row.tolist()): token for row, token in zip(elsewhere, tokens.tolist(), strict=True)}

    def knows(rows: torch.Tensor) -> torch.Tensor:
        own = torch.tensor([knowing[tuple(row.tolist())] for row in rows])
        return (4.0 * torch.nn.functional.one_hot(own, 50)).log_softmax(-1)

    other = of_points(points).weighed(knows, elsewhere, tokens, prior)
    assert other.weights == (1.0, 0.0)
    assert not other.useful


def test_the_best_pair_of_weights_is_taken() -> None:
    """Against every pair by itself."""
    generator = seeded(5)
    points = torch.randn(20, 6, generator=generator).sort(1).values
    tokens = torch.randint(0, 20, (100,), generator=generator)
    rows = points[tokens] + 0.3 * torch.randn(100, 6, generator=generator)
    said = torch.randn(100, 20, generator=generator)
    said[torch.arange(100), tokens] += 1.0
    said, prior = said.log_softmax(1), torch.randn(20, generator=generator)
    parts = iter(said.split(sorted_states.PART))
    found = of_points(points).weighed(lambda rows: next(parts), rows, tokens, prior)
    near = -of_points(points).states.squares(rows).clamp(min=sorted_states.LEAST).log()

    def loss(pair: tuple[float, float]) -> float:
        logits = pair[0] * said + pair[1] * near + prior
        return float(torch.nn.functional.cross_entropy(logits, tokens))

    assert found.weights == min(((a, b) for a in OF_PROBE for b in OF_DISTANCE), key=loss)


# ---- in the cache, and beside a probe


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_probes: None) -> Path:
    monkeypatch.setenv("HIDDENLAB_CACHE", str(tmp_path))
    return tmp_path / "probes"


@pytest.mark.slow
def test_a_probe_of_permuted_columns_scores_beside_them(
    tiny_model: LoadModel, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("gemma2", 2)
    info = public_of(model, "hidden-perm")
    both, seconds = store.probe_for(model, info)
    assert seconds > 0
    found = both._contexts
    assert found is not None and found.useful
    windows = [torch.randint(0, 256, (12,), generator=seeded(i)).tolist() for i in range(8)]
    released = Channel.parse(["hidden-perm"]).release_batch(model, windows, seeded())
    rows = torch.cat([in_order(one, secret)[1:] for one, secret in released])
    tokens = torch.tensor([token for window in windows for token in window[1:]])
    scores = both.log_probs(rows)
    assert torch.allclose(scores.exp().sum(1), torch.ones(len(rows)), atol=1e-4)
    top, ids = both.shortlist(rows, 5)
    best = scores.topk(5, dim=1)
    assert torch.equal(ids, best.indices)
    assert torch.allclose(top, best.values.log_softmax(1))
    # The second time nothing is made, and they count the same.
    heard: list[str] = []
    again, seconds = store.probe_for(model, info, lambda what, *_: heard.append(what))
    assert (seconds, heard) == (0.0, [])
    assert again._contexts is not None
    assert again._contexts.weights == found.weights
    assert torch.equal(again.log_probs(rows), scores)
    # A deep truncated model does without.
    monkeypatch.setattr(store, "_affordable_tokens", lambda model: 1.9 * model.vocab_size)
    alone, _ = store.probe_for(model, info)
    assert alone._contexts is None

    def rank(scores: torch.Tensor) -> float:
        own = scores.gather(1, tokens[:, None])
        return float((scores > own).sum(1).float().mean())

    assert rank(scores) < 0.9 * rank(alone.log_probs(rows))


@pytest.mark.slow
def test_rows_in_known_coordinates_do_without(tiny_model: LoadModel, cache: Path) -> None:
    model = tiny_model("llama", 2)
    probes, _ = store.probes_for(model, public_of(model, "seq-perm"), (0, 1))
    assert all(one._contexts is None for one in probes)
    permuted, _ = store.probes_for(model, public_of(model, "2d-perm"), (1,))
    assert permuted[0]._contexts is None
