"""A defense that draws nothing fresh for a request is read by own releases; any other is refused in one line."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hiddenlab import registry
from hiddenlab.attacks.replay import Replay
from hiddenlab.channels import Channel
from hiddenlab.errors import InputError, NotApplicableError
from hiddenlab.models import TruncatedModel
from hiddenlab.row_facts import with_extra_rows
from hiddenlab.secret_maps import with_map
from hiddenlab.stages import Stage
from hiddenlab.types import AttackResult, Observation, ObservationInfo
from tests.planted_faults import OneOrder, SeedZero, noised

Truncated = Callable[..., TruncatedModel]
TOKENS = (84, 105, 32, 84, 201)


def always(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


class Constant(Stage):
    """Noise that does not follow the states' size, in half precision."""

    spec = "constant"

    def states(self, states: Tensor, generator: torch.Generator) -> Any:
        return (states + 3 * always(*states.shape)).bfloat16(), None, {}


class Shared(Stage):
    spec = "one-column-order"

    def states(self, states: Tensor, generator: torch.Generator) -> Any:
        return states[:, always(states.shape[1]).argsort()] + 30 * always(*states.shape), None, {}

    def publish(self, info: ObservationInfo) -> ObservationInfo:
        return replace(info, columns_permuted="shared")


class EachRow(Stage):
    spec = "an-order-for-each-row"

    def states(self, states: Tensor, generator: torch.Generator) -> Any:
        return states.gather(1, always(*states.shape).argsort(1)) + 30 * always(*states.shape), None, {}

    def publish(self, info: ObservationInfo) -> ObservationInfo:
        return replace(info, columns_permuted="per-row")


class Rotated(Stage):
    """A secret map that is the same for all requests, which no own text undoes by itself."""

    spec = "one-map"

    def states(self, states: Tensor, generator: torch.Generator) -> Any:
        turned = states @ torch.linalg.qr(always(states.shape[1], states.shape[1])).Q
        return turned + 30 * always(*states.shape), None, {}


class Inputs(Stage):
    spec = "input-seed-zero"

    def inputs(self, embeddings: Tensor, table: Tensor, generator: torch.Generator) -> Tensor:
        return embeddings + 0.5 * always(*embeddings.shape)


class Decoyed(Stage):
    spec = "one-decoy"
    adds = 1

    def states(self, states: Tensor, generator: torch.Generator) -> Any:
        rows = torch.cat([always(1, states.shape[1]), states + 30 * always(*states.shape)])
        order = always(len(rows)).argsort()
        return rows[order], tuple((order - 1).tolist()), {}

    def publish(self, info: ObservationInfo) -> ObservationInfo:
        return replace(with_extra_rows(info, 1), rows_permuted=True)


class Mixed(Stage):
    spec = "mixed"

    def states(self, states: Tensor, generator: torch.Generator) -> Any:
        return always(len(states), len(states)) @ states, None, {}

    def publish(self, info: ObservationInfo) -> ObservationInfo:
        return with_map(info, "rows")


class Nothing(Stage):
    spec = "nothing"

    def states(self, states: Tensor, generator: torch.Generator) -> Any:
        return torch.zeros_like(states), None, {}


class Fresh(Stage):
    spec = "fresh"

    def states(self, states: Tensor, generator: torch.Generator) -> Any:
        return noised(states, int(torch.randint(2**31, (), generator=generator))), None, {}


class Subtle(Stage):
    """Draws so little that only equal generators give equal rows."""

    spec = "subtle"

    def states(self, states: Tensor, generator: torch.Generator) -> Any:
        return noised(states) + 1e-2 * torch.randn(states.shape, generator=generator), None, {}


STAGES: tuple[type[Stage], ...] = (
    SeedZero, OneOrder, Constant, Shared, EachRow, Rotated, Inputs, Decoyed, Mixed, Nothing, Fresh, Subtle
)  # fmt: skip


@pytest.fixture(autouse=True)
def stages(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in registry._SESSION:
        monkeypatch.setitem(registry._SESSION, kind, {})  # a test's names end with it
    for stage in STAGES:
        registry.register("defenses", stage.spec, stage)


def released(model: TruncatedModel, *specs: str) -> Observation:
    return Channel.parse(specs).release(model, TOKENS, 5)[0]


def attacked(model: TruncatedModel, *specs: str, **options: Any) -> AttackResult:
    shown = released(model, *specs)
    return Replay(**options).fit(shown.info, model).recover(shown)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "layer", "stage"),
    [*(("llama", 2, stage) for stage in STAGES[:8]), ("gpt2", 1, OneOrder), ("gpt2", 1, Decoyed)],
)
def test_what_is_drawn_once_for_all_requests_hides_nothing(
    tiny_model: Truncated, architecture: str, layer: int, stage: type[Stage]
) -> None:
    model = tiny_model(architecture, layer)
    found = attacked(model, stage.spec)
    assert found.ids == list(TOKENS) and found.verified and found.stop_reason == "complete"


def test_rows_name_the_token_that_they_are_of(tiny_model: Truncated) -> None:
    model = tiny_model("llama", 2)
    shown, truth = Channel.parse(["one-order"]).release(model, TOKENS, 5)
    found = Replay().fit(shown.info, model).recover(shown)
    assert truth.row_order is not None and [truth.row_order[token.row] for token in found.tokens] == list(
        range(len(TOKENS))
    )


@pytest.mark.parametrize(
    ("specs", "says"),
    [
        ([], "no defense changes"),
        (["identity"], "the states themselves"),
        (["gaussian:sigma=1"], "draws afresh"),
        (["seq-perm"], "draws afresh"),
        (["fresh"], "draws afresh"),
        (["subtle"], "draws afresh"),
        (["seed-zero", "seq-perm"], "draws afresh"),
        (["unknown-gaussian:sigma=1"], "strength is not known"),
        (["mixed"], "depend on later tokens, or show nothing"),
        (["nothing"], "depend on later tokens, or show nothing"),
        (["seed-zero", "drop-rows:size=2,after=1"], "row of every token"),
    ],
)
def test_other_defenses_are_refused_in_one_line(tiny_model: Truncated, specs: list[str], says: str) -> None:
    with pytest.raises(NotApplicableError, match=says) as refused:
        attacked(tiny_model("llama", 2), *specs)
    assert "\n" not in str(refused.value)


def test_rows_that_no_token_gives_are_not_read(tiny_model: Truncated) -> None:
    """As it is where the provider's key is another one than the attacker's."""
    model = tiny_model("llama", 2)
    shown = released(model, "seed-zero")
    found = Replay().fit(shown.info, model).recover(replace(shown, states=noised(shown.states, seed=3)))
    assert not found.tokens and found.stop_reason == "no token gives row 0"


def test_the_budget_ends_the_search(tiny_model: Truncated) -> None:
    model = tiny_model("llama", 2)
    found = attacked(model, "one-map", budget=600)
    assert found.stop_reason == "budget exhausted" and len(found.tokens) < len(TOKENS)
    with pytest.raises(InputError, match="budget must be at least 1"):
        Replay(budget=0)


def test_one_token_is_read(tiny_model: Truncated) -> None:
    model = tiny_model("llama", 2)
    shown = Channel.parse(["seed-zero"]).release(model, [77])[0]
    assert Replay().fit(shown.info, model).recover(shown).ids == [77]
