"""Rows that are no states of the site end an attack soon, as a result; nothing that can be read is given up."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from hiddenlab.attacks.vocab_match import VocabMatch, search
from hiddenlab.attacks.vocab_match.mismatch import CANDIDATES, ROWS
from hiddenlab.attacks.vocab_match.search import FEW
from hiddenlab.channels import Channel
from hiddenlab.cli import app
from hiddenlab.models import TruncatedModel, load_model
from hiddenlab.observation import save_observation
from hiddenlab.summary import ADVICE, NO_STATE, advice
from hiddenlab.testing import LAYERS, VOCABULARY
from hiddenlab.types import AttackResult, Observation

LoadModel = Callable[..., TruncatedModel]
TOKENS = torch.randint(0, VOCABULARY, (24,), generator=torch.Generator().manual_seed(3)).tolist()

CASES = ("layer", "final norm", "noised first row", "missing first rows")


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def release(model: TruncatedModel, *specs: str, tokens: list[int] = TOKENS) -> Observation:
    return Channel.parse(specs).release(model, tokens, seeded(1))[0]


def recover(model: TruncatedModel, observation: Observation, **options: Any) -> AttackResult:
    return VocabMatch(**options).fit(observation.info, model).recover(observation)


def noised(states: torch.Tensor) -> torch.Tensor:
    out = states.clone()
    out[0] += 20 * states.abs().mean() * torch.randn(states.shape[1], generator=seeded())
    return out


def foreign(tiny_model: LoadModel, case: str, *specs: str) -> tuple[TruncatedModel, Observation]:
    """A truncated model, and what is said to be its states."""
    if case == "final norm":
        model = tiny_model("llama", LAYERS)
        states = release(tiny_model("llama", LAYERS, "final_norm"), *specs).states
    else:
        model = tiny_model("llama", 2)
        states = release(tiny_model("llama", 4) if case == "layer" else model, *specs).states
    said = release(model, *specs)
    if case == "noised first row":
        states = noised(states)
    if case == "missing first rows":
        states = states[3:]
    return model, replace(said, states=states)


@pytest.mark.usefixtures("small_probes")
@pytest.mark.parametrize(
    ("case", "options"),
    [
        *((case, {"proposal": "vocab"}) for case in CASES),
        pytest.param("layer", {}, marks=pytest.mark.slow),
        ("noised first row", {"proposal": "probe"}),
    ],
)
def test_what_is_not_of_the_site_ends_soon(tiny_model: LoadModel, case: str, options: dict[str, str]) -> None:
    model, observation = foreign(tiny_model, case)
    found = recover(model, observation, **options)
    assert found.stop_reason == NO_STATE
    assert len(found.tokens) == len(observation.states)
    assert not any(token.verified for token in found.tokens)
    looked = 1 + ROWS * min(CANDIDATES, VOCABULARY) + VOCABULARY
    assert found.evaluated_tokens <= looked + 2 * FEW * len(observation.states)
    assert found.evaluated_tokens < 0.5 * VOCABULARY * len(observation.states)


@pytest.mark.parametrize("channel", ["hidden-perm", "seq-perm", "2d-perm"])
def test_permuted_states_of_another_layer_end_soon(tiny_model: LoadModel, channel: str) -> None:
    model, observation = foreign(tiny_model, "layer", channel)
    found = recover(model, observation, proposal="vocab")
    assert found.stop_reason == NO_STATE
    assert sorted(token.row for token in found.tokens) == list(range(len(TOKENS)))
    assert found.evaluated_tokens < 0.5 * VOCABULARY * len(TOKENS)


@pytest.mark.slow
@pytest.mark.usefixtures("small_probes")
@pytest.mark.parametrize("proposal", ["vocab", "probe"])
def test_a_first_row_whose_nearest_token_is_right_is_gone_beyond(
    tiny_model: LoadModel, monkeypatch: pytest.MonkeyPatch, proposal: str
) -> None:
    """The rows behind it match, and what comes back is what came back before anybody looked ahead."""
    model = tiny_model("llama", 2)
    observation = release(model)
    spoiled = observation.states.clone()
    spoiled[0] += 0.05 * spoiled[0].abs().mean() * torch.randn(spoiled.shape[1], generator=seeded())
    observation = replace(observation, states=spoiled)
    found = recover(model, observation, proposal=proposal)
    assert found.ids == TOKENS
    assert [token.verified for token in found.tokens] == [False] + [True] * (len(TOKENS) - 1)
    assert found.stop_reason == "vocabulary exhausted"
    monkeypatch.setattr(search, "unexplained", lambda task: False)
    plain = recover(model, observation, proposal=proposal)
    assert [t.token for t in plain.tokens] == found.ids
    assert [t.verified for t in plain.tokens] == [t.verified for t in found.tokens]


@pytest.mark.slow
def test_a_number_as_epsilon_that_is_too_small_loses_nothing(tiny_model: LoadModel) -> None:
    """The threshold does not decide there: the nearest token is so much nearer than any other."""
    model = tiny_model("llama", 2)
    observation = release(model)
    rounded = observation.states + 1e-4 * torch.randn(observation.states.shape, generator=seeded())
    found = recover(model, replace(observation, states=rounded), proposal="vocab", epsilon="1e-9")
    assert found.ids == TOKENS and not any(token.verified for token in found.tokens)
    assert found.stop_reason == "vocabulary exhausted"


@pytest.mark.slow
def test_a_number_as_epsilon(tiny_model: LoadModel) -> None:
    model, observation = foreign(tiny_model, "layer")
    assert recover(model, observation, proposal="vocab", epsilon="0.01").stop_reason == NO_STATE
    assert recover(model, release(model), proposal="vocab", epsilon="0.01").stop_reason == "complete"


def test_a_budget_is_what_the_user_wants(tiny_model: LoadModel) -> None:
    """Of a vocabulary that was tried in part nothing follows."""
    model, observation = foreign(tiny_model, "layer")
    assert recover(model, observation, proposal="vocab", budget=20).stop_reason == "budget exhausted"


@pytest.mark.parametrize("spec", ["gaussian:sigma=0.5", "random-prefix"])
def test_what_is_declared_is_no_reason(tiny_model: LoadModel, spec: str) -> None:
    """Right and wrong candidates overlap behind noise, and the first row is not free of context behind a prefix."""
    model = tiny_model("llama", 2)
    tokens = TOKENS[:6]
    assert recover(model, release(model, spec, tokens=tokens), proposal="vocab").stop_reason != NO_STATE


@pytest.mark.usefixtures("small_probes")
def test_a_nodes_rows(tiny_model: LoadModel) -> None:
    """The rows before the first gap tell it; the rest is read by the probe as ever."""
    model, spec = tiny_model("llama", 2), "shard:alpha=3,c=4"
    right = release(model, spec)
    assert recover(model, right).stop_reason == "gap before position 12"
    wrong = replace(right, states=release(tiny_model("llama", 4), spec).states)
    found = recover(model, wrong)
    assert found.stop_reason == NO_STATE and found.positions == right.info.positions


@pytest.mark.slow
def test_the_command_line_says_what_the_rows_are(
    tiny: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tiny("llama", tokenizer=True)
    two, four = (load_model(path, layer, device="cpu") for layer in (2, 4))
    save_observation(replace(release(two), states=release(four).states), "wrong.safetensors")
    save_observation(release(two), "right.safetensors")
    texts = {}
    for name in ("wrong", "right"):
        shown = CliRunner().invoke(
            app, ["attack", "--observation", f"{name}.safetensors", "--proposal", "vocab", "--no-record"]
        )
        assert shown.exit_code == 0, shown.output
        texts[name] = shown.output
    assert "p001: the rows are resid at layer 4" in texts["wrong"] and "use --layer 4" in texts["wrong"]
    assert "the rows are" not in texts["right"]


def test_advice_counts_prompts() -> None:
    samples = [{"stop_reason": NO_STATE}, {"stop_reason": "complete"}, {"status": "not applicable"}]
    assert advice(samples) == [f"1 of 3 prompts: {ADVICE[NO_STATE]}"]
    assert advice(samples[1:]) == []
