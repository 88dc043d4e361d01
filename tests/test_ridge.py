"""The probe in closed form: its errors, what it takes in later, and the norms that need no token."""

import math
from collections.abc import Callable

import pytest
import torch

from hiddenlab.diagnosis.norms import SAME, moved_by_norm
from hiddenlab.diagnosis.places import Place, read_places
from hiddenlab.models import TruncatedModel
from hiddenlab.proposals.probe import ProbeSettings
from hiddenlab.proposals.ridge import GrowingProbe, Sums, errors_without_own, metric_of

LoadModel = Callable[..., TruncatedModel]


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_errors_are_those_of_regressions_without_the_row() -> None:
    rows, targets = drawn(40, 6), drawn(40, 3, seed=1)
    sums = Sums.start(rows, 3)
    features = sums.expert.features(rows)
    sums.add(features, targets)
    errors = errors_without_own(features, targets, sums.regularised(), sums.weights())
    for i in (0, 17, 39):
        others = torch.arange(40) != i
        without = Sums(sums.mean, sums.scale, torch.zeros(6, 6), torch.zeros(6, 3))
        without.add(features[others], targets[others])
        assert torch.allclose(errors[i], targets[i] - features[i] @ without.weights(), atol=1e-4)


def test_a_metric_undoes_the_covariance_of_errors() -> None:
    errors = drawn(500, 4) * torch.tensor([1.0, 2.0, 4.0, 8.0])
    changed = errors @ metric_of(errors.T @ errors, 1.0)
    assert torch.allclose(changed.T @ changed, torch.eye(4), atol=1e-4)


def noisy(vocabulary: int, count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return an embedding table, tokens, and states that hold them beside much noise in some directions."""
    table, mixing = drawn(vocabulary, 16), drawn(16, 24, seed=1)
    tokens = torch.randint(vocabulary, (count,), generator=torch.Generator().manual_seed(seed))
    blurred = table[tokens] + drawn(count, 16, seed=seed) * torch.linspace(0.02, 2, 16)
    return table, tokens, blurred @ mixing


def share_first(growing: GrowingProbe, table: torch.Tensor) -> float:
    _, tokens, states = noisy(len(table), 400, seed=9)
    best = growing.probe(table).parents(table).log_probs(states).argmax(1)
    return float((best == tokens).float().mean())


def test_directions_that_are_read_well_count_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    table, tokens, states = noisy(300, 1500, seed=2)
    growing = GrowingProbe.start(states, tokens, table, ProbeSettings())
    weighted = share_first(growing, table)
    monkeypatch.setattr("hiddenlab.proposals.ridge.POWERS", (0.0,))
    assert weighted > share_first(growing, table) + 0.03


def test_rows_that_come_later_count_as_those_at_the_start() -> None:
    table, tokens, states = noisy(300, 1500, seed=2)
    growing = GrowingProbe.start(states[:300], tokens[:300], table, ProbeSettings())
    before = share_first(growing, table)
    features = growing.groups[0].expert.features(states[300:])
    gram = growing.groups[0].gram + features.T @ features
    growing.add(states[300:], tokens[300:], table)
    assert torch.allclose(growing.groups[0].gram, gram, rtol=1e-4)
    assert share_first(growing, table) > before
    kept = GrowingProbe.from_tensors(growing.settings, growing.tensors())
    assert share_first(kept, table) == share_first(growing, table)


def test_only_a_norms_own_output_is_what_it_gives_back(tiny_model: LoadModel) -> None:
    model = tiny_model("llama", None)
    with torch.no_grad():
        for i, (name, weight) in enumerate(model.module.named_parameters()):
            if "norm" in name:
                weight.copy_(drawn(len(weight), seed=i) + 3)
    vectors = dict[Place, torch.Tensor]()
    read_places(model, torch.tensor([[5, 17, 3, 40]]), lambda place, rows: vectors.update({place: rows[0]}))
    norms = [place for place in vectors if place.name.endswith("layernorm") and "output" in place.name]
    norms += [place for place in vectors if place.site is not None and place.site.stream == "final_norm"]
    assert len(norms) >= 3
    for norm in norms:
        for place, rows in vectors.items():
            if rows.shape[1] == model.width and (place in norms or place.site is not None):
                moved = moved_by_norm(model, norm, rows)
                assert (moved <= SAME) == (place == norm), (str(norm), str(place), moved)
    inner = next(place for place in vectors if place.name.endswith("mlp") and "output" in place.name)
    assert math.isinf(moved_by_norm(model, inner, vectors[inner]))
