"""Searches that share passes, and searches whose parts do."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hiddenlab.matching.batching import ForwardCall, Search, Together, run_batched
from hiddenlab.models import Request, TruncatedModel

# A plan is a chain of steps: a token that is read, or a list of plans that run side by side.
PLANS = st.recursive(
    st.integers(0, 99), lambda inner: st.lists(st.lists(inner, max_size=4), max_size=3), max_leaves=12
)


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., TruncatedModel]) -> TruncatedModel:
    return tiny_model("llama", 1)


def searched(model: TruncatedModel, plan: list, apart: bool) -> Search:
    """Follow a plan, and return the norm of every answer's state in the order of the plan."""
    norms: list = []
    for step in plan:
        if isinstance(step, int):
            answer = yield ForwardCall(
                model, Request(model.prefix(), torch.tensor([step, 3])), counts=step % 2 == 0
            )
            norms.append(round(float(answer.states[-1].norm()), 3))
            continue
        parts = [searched(model, part, apart) for part in step]
        if apart:
            results = []
            for part in parts:
                results.append((yield from part))
            norms.append(results)
        else:
            norms.append((yield Together(parts)))
    return norms


@settings(max_examples=40)
@given(plans=st.lists(st.lists(PLANS, max_size=4), min_size=1, max_size=3))
def test_parts_of_a_search_find_and_cost_the_same_side_by_side(model: TruncatedModel, plans: list) -> None:
    slow = [run_batched([searched(model, plan, True)])[0] for plan in plans]
    fast = run_batched([searched(model, plan, False) for plan in plans])
    for (one, alone), (other, shared) in zip(slow, fast, strict=True):
        assert one == other
        assert (alone.evaluated, alone.calls) == (shared.evaluated, shared.calls)


def test_parts_share_passes_and_the_seconds_add_up(
    model: TruncatedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, ticks = list[int](), iter(range(10_000))
    run = type(model).run
    monkeypatch.setattr(
        type(model),
        "run",
        lambda self, requests, **kw: [sizes.append(len(requests)), run(self, requests, **kw)][1],
    )
    plans = [[[[1, 2], [3], []]], [4]]
    found = run_batched([searched(model, plan, False) for plan in plans], now=lambda: float(next(ticks)))
    assert sizes == [3, 1]  # two parts and the other search, then the rest of the first part
    assert sum(cost.seconds for _, cost in found) == 3
