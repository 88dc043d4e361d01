"""Regressions with weighted directions, and norms that are known without a token."""

import math
from collections.abc import Callable

import pytest
import torch

from hiddenlab.diagnosis.norms import SAME, moved_by_norm
from hiddenlab.diagnosis.places import Place, read_places
from hiddenlab.models import TruncatedModel
from hiddenlab.proposals.probe import ridge_expert
from hiddenlab.proposals.ridge import RIDGE, RidgeReader, errors_without_own, metric_of

LoadModel = Callable[..., TruncatedModel]


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_errors_are_those_of_regressions_without_the_row() -> None:
    rows, targets = drawn(40, 6), drawn(40, 3, seed=1)
    expert = ridge_expert(rows, targets, RIDGE)
    features = expert.features(rows)
    errors = errors_without_own(features, targets, expert.parameters["linear"])
    for i in (0, 17, 39):
        own, wanted = torch.arange(40) != i, targets[i]
        gram = features[own].T @ features[own] + RIDGE * torch.eye(6)
        without = torch.linalg.solve(gram, features[own].T @ targets[own])
        assert torch.allclose(errors[i], wanted - features[i] @ without, atol=1e-4)


def test_a_metric_undoes_the_covariance_of_errors() -> None:
    errors = drawn(500, 4) * torch.tensor([1.0, 2.0, 4.0, 8.0])
    changed = errors @ metric_of(errors, 1.0)
    assert torch.allclose(changed.T @ changed, torch.eye(4), atol=1e-4)


def noisy(table: torch.Tensor, count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens, and states that hold them beside much noise in some directions."""
    tokens = torch.randint(len(table), (count,), generator=torch.Generator().manual_seed(seed))
    blurred = table[tokens] + drawn(count, 16, seed=seed) * torch.linspace(0.02, 2, 16)
    return tokens, blurred @ drawn(16, 24, seed=1)


def test_directions_that_are_read_well_count_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    table = torch.nn.functional.normalize(drawn(300, 16), dim=1) * 4
    tokens, states = noisy(table, 1500, seed=2)
    wanted, rows = noisy(table, 400, seed=9)

    def share_first() -> float:
        best = RidgeReader(states, table[tokens]).scores(rows, table).argmax(1)
        return float((best == wanted).float().mean())

    weighted = share_first()
    monkeypatch.setattr("hiddenlab.proposals.ridge.POWER", 0.0)  # plain cosines
    plain = ridge_expert(states, table[tokens], RIDGE)
    cosines = plain.direction(plain.features(rows)) @ torch.nn.functional.normalize(table, dim=1).T
    assert share_first() == float((cosines.argmax(1) == wanted).float().mean())
    assert weighted > share_first() + 0.03


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
