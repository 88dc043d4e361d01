"""What joins the probe where it knows little: the table of first tokens, and learning from failed candidates."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hiddenlab.attacks.vocab_match import VocabMatch, task
from hiddenlab.channels import Channel
from hiddenlab.models import Prefix, TruncatedModel
from hiddenlab.proposals import in_context, store
from hiddenlab.proposals.first_token_table import FirstTokenTable
from hiddenlab.proposals.in_context import Adapter
from hiddenlab.testing import VOCABULARY
from hiddenlab.types import ObservationInfo

LoadModel = Callable[..., TruncatedModel]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HIDDENLAB_CACHE", str(tmp_path))
    return tmp_path / "probes"


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def public_of(model: TruncatedModel, *specs: str) -> ObservationInfo:
    return Channel.parse(specs).release(model, [1], seeded())[0].info


# ---- the table of first tokens


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt2"])
def test_the_table_names_every_first_token(tiny_model: LoadModel, architecture: str) -> None:
    model = tiny_model(architecture, 2)
    table, seconds = store.first_token_table_for(model, public_of(model, "hidden-perm"))
    assert table is not None
    assert seconds > 0
    tokens = torch.randint(0, VOCABULARY, (40,), generator=seeded())
    for token in tokens.tolist():
        (observation, _), *_ = Channel.parse(["hidden-perm"]).release_batch(
            model, [[token, 5]], seeded(token)
        )
        assert int(table.nearest(observation.states[:1], 1)) == token
        # Among rows in unknown order the first one still has the nearest entry.
        assert token in table.nearest(observation.states, 2).tolist()


def test_the_table_is_kept_and_agrees_with_an_exact_search(tiny_model: LoadModel, cache: Path) -> None:
    model = tiny_model("gemma2", 2)
    info = public_of(model, "hidden-perm")
    made, _ = store.first_token_table_for(model, info)
    kept, seconds = store.first_token_table_for(model, info)
    assert made is not None
    assert kept is not None
    assert seconds == 0
    assert torch.equal(made.table, kept.table)
    rows = torch.randn(3, model.width, generator=seeded()) * 20
    exact = torch.cdist(made.table.float() * made.scale[:, None], rows.sort(1).values)
    best = (exact / rows.norm(dim=1)).amin(1).argsort()[:20]
    assert kept.nearest(rows, 20).tolist() == best.tolist()


def test_huge_first_states_fit_the_table(tiny_model: LoadModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention sinks can be beyond the range of float16, and rows of zeros have no scale."""
    model = tiny_model("llama", 2)
    states = torch.randn(VOCABULARY, model.width, generator=seeded()) * 1e6
    states[7] = 0
    monkeypatch.setattr(Prefix, "branch", lambda self, tokens: states[tokens])
    table = FirstTokenTable.make(model)
    assert torch.isfinite(table.table).all()
    assert [int(table.nearest(states[i : i + 1], 1)) for i in (0, 7, 299)] == [0, 7, 299]


def test_no_table_where_it_would_not_help_or_not_pay(
    tiny_model: LoadModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama", 2)
    permuted = public_of(model, "hidden-perm")
    assert store.first_token_table_for(model, public_of(model, "seq-perm")) == (None, 0.0)
    assert store.first_token_table_for(model, replace(permuted, prefix_tokens=1)) == (None, 0.0)
    monkeypatch.setattr(store, "STATE_FLOPS", {"cpu": 1e3})
    assert store.first_token_table_for(model, permuted) == (None, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("channel", ["hidden-perm", "2d-perm"])
def test_a_first_token_is_tried_first(tiny_model: LoadModel, small_probes: None, channel: str) -> None:
    model = tiny_model("llama", 2)
    prompts = [[200, 7, 31], [123, 123, 9]]
    released = [one for one, _ in Channel.parse([channel]).release_batch(model, prompts, seeded(1))]
    recoveries = VocabMatch(proposal="probe").fit(released[0].info, model).recover_batch(released)
    assert [r.ids for r in recoveries] == prompts
    assert all(r.tokens[0].evaluated <= task.FIRST_BATCH for r in recoveries)


# ---- learning from candidates that failed


def in_place(model: TruncatedModel, prompt: list[int]) -> Tensor:
    prefix = model.prefix()
    prefix.extend(torch.tensor(prompt))
    return prefix.branch(torch.arange(model.vocab_size)).float()


def described(model: TruncatedModel) -> Adapter:
    return Adapter.describe(model.sibling(in_context.FEATURE_LAYERS, dtype="float32"))


def slow_distances(features: Tensor, tokens: Tensor, states: Tensor, observed: Tensor) -> Tensor:
    """The same regression in float64, each leave-one-out error from a regression without that candidate."""
    x, y = features.double(), states.double()
    known = x[tokens]

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        squares = torch.cdist(a, b).square()
        wide = (squares / (-2 * in_context.BANDWIDTH * a.shape[1])).exp()
        return 2 * wide + in_context.LINEAR * (a @ b.T) / a.shape[1]

    def predict(at: Tensor, keep: Tensor) -> Tensor:
        gram = kernel(known[keep], known[keep]) + in_context.RIDGE * torch.eye(int(keep.sum()), dtype=x.dtype)
        mean = y.mean(0)
        return mean + kernel(at, known[keep]) @ torch.linalg.solve(gram, y[keep] - mean)

    every = torch.ones(len(tokens), dtype=torch.bool)
    errors = []
    for i in range(len(tokens)):
        keep = every.clone()
        keep[i] = False
        errors.append(y[i] - predict(known[i : i + 1], keep)[0])
    stacked = torch.stack(errors)
    covariance = stacked.T @ stacked / len(stacked)
    covariance += torch.eye(len(covariance)) * in_context.SHRINK * covariance.diagonal().mean()
    precision = torch.linalg.inv(covariance)
    predicted = predict(x, every)
    out = []
    for row in observed.double():
        difference = predicted - row
        out.append((difference @ precision * difference).sum(1))
    return torch.stack(out).amin(0)


def test_distances_equal_the_slow_regression(tiny_model: LoadModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_context, "fast_dtype", lambda device: torch.float32)
    model = tiny_model("llama", 2)
    adapter, states = described(model), in_place(model, [3, 200, 41])
    tokens = torch.randperm(VOCABULARY, generator=seeded())[:48]
    observed = states[[250, 251]]
    fast = adapter.distances(tokens, states[tokens], observed)
    slow = slow_distances(adapter.features, tokens, states[tokens], observed)
    assert torch.allclose(fast.double(), slow, rtol=2e-3)


@pytest.mark.parametrize("architecture", ["gpt2", "gemma2"])
def test_failed_candidates_bring_the_right_one_forward(tiny_model: LoadModel, architecture: str) -> None:
    """Sorted states of random weights hold no more than chance would.

    docs/log/002-cheaper-proposals.md has them on a real model.
    """
    model = tiny_model(architecture, 3)
    adapter = described(model)
    ranks = []
    for seed in range(12):
        order = torch.randperm(VOCABULARY, generator=seeded(seed))
        states = in_place(model, order[:5].tolist())
        tried, truth = order[5:105], int(order[-1])
        distances = adapter.distances(tried, states[tried], states[truth : truth + 1])
        rest = torch.tensor([t for t in range(VOCABULARY) if t not in set(tried.tolist())])
        ranks.append(int((distances[rest] < distances[truth]).sum()))
    # By chance the mean would be 100 of the 200 that are left.
    assert sum(ranks) / len(ranks) < 15


def test_wide_states_are_projected(tiny_model: LoadModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_context, "MAX_FEATURES", 16)
    model = tiny_model("llama", 3)
    assert described(model).features.shape == (VOCABULARY, 16)


@pytest.mark.slow
@pytest.mark.parametrize("channel", ["seq-perm", pytest.param("identity", marks=pytest.mark.slow)])
def test_the_attack_learns_and_stays_exact(
    tiny_model: LoadModel, small_probes: None, monkeypatch: pytest.MonkeyPatch, channel: str
) -> None:
    """A probe that knows nothing stands for one that fails; what was tried then has to do."""
    model = tiny_model("gpt2", 3)
    prompts = [torch.randint(0, VOCABULARY, (9,), generator=seeded(s)).tolist() for s in range(6)]
    released = [one for one, _ in Channel.parse([channel]).release_batch(model, prompts, seeded(1))]
    monkeypatch.setattr(
        store.Probe, "direction", lambda self, rows: torch.zeros(len(rows), self.mean.shape[0])
    )
    evaluated = {}
    for start in ((16, 64), ()):
        monkeypatch.setattr(task, "ADAPT_AT", start)
        recoveries = VocabMatch(proposal="probe").fit(released[0].info, model).recover_batch(released)
        assert [r.ids for r in recoveries] == prompts
        evaluated[start] = sum(r.evaluated_tokens for r in recoveries)
    assert evaluated[16, 64] < 0.8 * evaluated[()]


def test_descriptions_are_kept_for_all_layers_of_a_model(
    tiny_model: LoadModel, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, seconds = store.adapter_for(tiny_model("llama", 3))
    assert seconds > 0
    kept, seconds = store.adapter_for(tiny_model("llama", 4))
    assert seconds == 0
    assert made is not None
    assert kept is not None
    assert torch.equal(made.features, kept.features)
    assert torch.isfinite(made.features).all()
    assert store.adapter_for(tiny_model("llama", 1))[1] > 0
    monkeypatch.setattr(store, "REGRESSION_SPEED", 0.01)
    assert store.adapter_for(tiny_model("llama", 4)) == (None, 0.0)


def test_tokens_that_are_nearly_equal_can_be_learned_from_in_half_precision() -> None:
    """Their gram matrix in bfloat16 has negative eigenvalues, of which no Cholesky factor exists."""
    generator = torch.Generator().manual_seed(0)
    one = torch.randn(1, 64, generator=generator)
    features = one + 0.1 * torch.randn(400, 64, generator=generator)
    rounded = features.bfloat16()
    gram = in_context._kernel(rounded, rounded)
    gram.diagonal().add_(in_context.RIDGE)
    assert float(torch.linalg.eigvalsh(gram).min()) < 0
    states = torch.randn(300, 8, generator=generator)
    found = Adapter(rounded).distances(torch.arange(300), states, states[:2])
    assert bool(found.isfinite().all()) and found.shape == (400,)
