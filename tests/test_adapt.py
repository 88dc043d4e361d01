"""What joins the probe where it knows little: the table of first tokens, and learning from failed candidates."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hiddenlab.attacks.vocab_match import VocabMatch, task
from hiddenlab.channel import Channel
from hiddenlab.core import Public
from hiddenlab.propose import adapt, store
from hiddenlab.propose.adapt import Adapter
from hiddenlab.propose.openings import Openings
from hiddenlab.slice import Prefix, Slice
from hiddenlab.testing import VOCABULARY

TinySlice = Callable[..., Slice]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HIDDENLAB_CACHE", str(tmp_path))
    return tmp_path / "probes"


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def public_of(slice: Slice, *specs: str) -> Public:
    return Channel.parse(specs).release(slice, [1], seeded())[0].public


# ---- the table of first tokens


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt2"])
def test_the_table_names_every_first_token(tiny_slice: TinySlice, architecture: str) -> None:
    slice = tiny_slice(architecture, 2)
    table, seconds = store.openings_for(slice, public_of(slice, "hidden-perm"))
    assert table is not None
    assert seconds > 0
    tokens = torch.randint(0, VOCABULARY, (40,), generator=seeded())
    for token in tokens.tolist():
        (observation, _), *_ = Channel.parse(["hidden-perm"]).release_batch(
            slice, [[token, 5]], seeded(token)
        )
        assert int(table.nearest(observation.states[:1], 1)) == token
        # Among rows in unknown order the first one still has the nearest entry.
        assert token in table.nearest(observation.states, 2).tolist()


def test_the_table_is_kept_and_agrees_with_an_exact_search(tiny_slice: TinySlice, cache: Path) -> None:
    slice = tiny_slice("gemma2", 2)
    public = public_of(slice, "hidden-perm")
    made, _ = store.openings_for(slice, public)
    kept, seconds = store.openings_for(slice, public)
    assert made is not None
    assert kept is not None
    assert seconds == 0
    assert torch.equal(made.table, kept.table)
    rows = torch.randn(3, slice.width, generator=seeded()) * 20
    exact = torch.cdist(made.table.float() * made.scale[:, None], rows.sort(1).values)
    best = (exact / rows.norm(dim=1)).amin(1).argsort()[:20]
    assert kept.nearest(rows, 20).tolist() == best.tolist()


def test_huge_first_states_fit_the_table(tiny_slice: TinySlice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention sinks can be beyond the range of float16, and rows of zeros have no scale."""
    slice = tiny_slice("llama", 2)
    states = torch.randn(VOCABULARY, slice.width, generator=seeded()) * 1e6
    states[7] = 0
    monkeypatch.setattr(Prefix, "branch", lambda self, tokens: states[tokens])
    table = Openings.make(slice)
    assert torch.isfinite(table.table).all()
    assert [int(table.nearest(states[i : i + 1], 1)) for i in (0, 7, 299)] == [0, 7, 299]


def test_no_table_where_it_would_not_help_or_not_pay(
    tiny_slice: TinySlice, monkeypatch: pytest.MonkeyPatch
) -> None:
    slice = tiny_slice("llama", 2)
    permuted = public_of(slice, "hidden-perm")
    assert store.openings_for(slice, public_of(slice, "seq-perm")) == (None, 0.0)
    assert store.openings_for(slice, replace(permuted, prefix_tokens=1)) == (None, 0.0)
    monkeypatch.setattr(store, "STATE_FLOPS", {"cpu": 1e3})
    assert store.openings_for(slice, permuted) == (None, 0.0)


@pytest.mark.parametrize("channel", ["hidden-perm", "2d-perm"])
def test_a_first_token_is_tried_first(tiny_slice: TinySlice, small_probes: None, channel: str) -> None:
    slice = tiny_slice("llama", 2)
    prompts = [[200, 7, 31], [123, 123, 9]]
    released = [one for one, _ in Channel.parse([channel]).release_batch(slice, prompts, seeded(1))]
    for search in ("speculative", "greedy"):
        recoveries = VocabMatch(proposal="probe", search=search).recover_batch(released, slice, seeded())
        assert [r.ids for r in recoveries] == prompts
        assert all(r.tokens[0].evaluated <= task.FIRST_BATCH for r in recoveries)


# ---- learning from candidates that failed


def in_context(slice: Slice, prompt: list[int]) -> Tensor:
    prefix = slice.prefix()
    prefix.extend(torch.tensor(prompt))
    return prefix.branch(torch.arange(slice.vocab_size)).float()


def described(slice: Slice) -> Adapter:
    return Adapter.describe(slice.sibling(adapt.FEATURE_LAYERS, dtype="float32"))


def slow_distances(features: Tensor, tokens: Tensor, states: Tensor, observed: Tensor) -> Tensor:
    """The same regression in float64, each leave-one-out error from a regression without that candidate."""
    x, y = features.double(), states.double()
    known = x[tokens]

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        squares = torch.cdist(a, b).square()
        wide = (squares / (-2 * adapt.BANDWIDTH * a.shape[1])).exp()
        return 2 * wide + adapt.LINEAR * (a @ b.T) / a.shape[1]

    def predict(at: Tensor, keep: Tensor) -> Tensor:
        gram = kernel(known[keep], known[keep]) + adapt.RIDGE * torch.eye(int(keep.sum()), dtype=x.dtype)
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
    covariance += torch.eye(len(covariance)) * adapt.SHRINK * covariance.diagonal().mean()
    precision = torch.linalg.inv(covariance)
    predicted = predict(x, every)
    out = []
    for row in observed.double():
        difference = predicted - row
        out.append((difference @ precision * difference).sum(1))
    return torch.stack(out).amin(0)


def test_distances_equal_the_slow_regression(tiny_slice: TinySlice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapt, "fast_dtype", lambda device: torch.float32)
    slice = tiny_slice("llama", 2)
    adapter, states = described(slice), in_context(slice, [3, 200, 41])
    tokens = torch.randperm(VOCABULARY, generator=seeded())[:48]
    observed = states[[250, 251]]
    fast = adapter.distances(tokens, states[tokens], observed)
    slow = slow_distances(adapter.features, tokens, states[tokens], observed)
    assert torch.allclose(fast.double(), slow, rtol=2e-3)


@pytest.mark.parametrize("architecture", ["gpt2", "gemma2"])
def test_failed_candidates_bring_the_right_one_forward(tiny_slice: TinySlice, architecture: str) -> None:
    """Sorted states of random weights hold no more than chance would; eval/LOG.md has them on a real model."""
    slice = tiny_slice(architecture, 3)
    adapter = described(slice)
    ranks = []
    for seed in range(12):
        order = torch.randperm(VOCABULARY, generator=seeded(seed))
        states = in_context(slice, order[:5].tolist())
        tried, truth = order[5:105], int(order[-1])
        distances = adapter.distances(tried, states[tried], states[truth : truth + 1])
        rest = torch.tensor([t for t in range(VOCABULARY) if t not in set(tried.tolist())])
        ranks.append(int((distances[rest] < distances[truth]).sum()))
    # By chance the mean would be 100 of the 200 that are left.
    assert sum(ranks) / len(ranks) < 15


def test_wide_states_are_projected(tiny_slice: TinySlice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapt, "MAX_FEATURES", 16)
    slice = tiny_slice("llama", 3)
    assert described(slice).features.shape == (VOCABULARY, 16)


@pytest.mark.parametrize("channel", ["identity", "seq-perm"])
def test_the_attack_learns_and_stays_exact(
    tiny_slice: TinySlice, small_probes: None, monkeypatch: pytest.MonkeyPatch, channel: str
) -> None:
    """A probe that knows nothing stands for one that fails; what was tried then has to do."""
    slice = tiny_slice("gpt2", 3)
    prompts = [torch.randint(0, VOCABULARY, (9,), generator=seeded(s)).tolist() for s in range(6)]
    released = [one for one, _ in Channel.parse([channel]).release_batch(slice, prompts, seeded(1))]
    monkeypatch.setattr(
        store.Probe, "direction", lambda self, rows: torch.zeros(len(rows), self.mean.shape[0])
    )
    evaluated = {}
    for start in ((16, 64), ()):
        monkeypatch.setattr(task, "ADAPT_AT", start)
        recoveries = VocabMatch(proposal="probe").recover_batch(released, slice, seeded())
        assert [r.ids for r in recoveries] == prompts
        evaluated[start] = sum(r.evaluated_tokens for r in recoveries)
    assert evaluated[16, 64] < 0.8 * evaluated[()]


def test_descriptions_are_kept_for_all_layers_of_a_model(
    tiny_slice: TinySlice, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, seconds = store.adapter_for(tiny_slice("llama", 3))
    assert seconds > 0
    kept, seconds = store.adapter_for(tiny_slice("llama", 4))
    assert seconds == 0
    assert made is not None
    assert kept is not None
    assert torch.equal(made.features, kept.features)
    assert torch.isfinite(made.features).all()
    assert store.adapter_for(tiny_slice("llama", 1))[1] > 0
    monkeypatch.setattr(store, "REGRESSION_SPEED", 0.01)
    assert store.adapter_for(tiny_slice("llama", 4)) == (None, 0.0)


def test_tokens_that_are_nearly_equal_can_be_learned_from_in_half_precision() -> None:
    """Their gram matrix in bfloat16 has negative eigenvalues, of which no Cholesky factor exists."""
    generator = torch.Generator().manual_seed(0)
    one = torch.randn(1, 64, generator=generator)
    features = one + 0.1 * torch.randn(400, 64, generator=generator)
    rounded = features.bfloat16()
    gram = adapt._kernel(rounded, rounded)
    gram.diagonal().add_(adapt.RIDGE)
    assert float(torch.linalg.eigvalsh(gram).min()) < 0
    states = torch.randn(300, 8, generator=generator)
    found = Adapter(rounded).distances(torch.arange(300), states, states[:2])
    assert bool(found.isfinite().all()) and found.shape == (400,)
