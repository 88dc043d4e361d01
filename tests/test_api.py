"""The names at the top of the package: what a notebook uses."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import hiddenlab as hl
from hiddenlab import registry
from hiddenlab.errors import InputError
from hiddenlab.records import read_run
from tests.marks import slow_cases

TEXT = "My password is hunter2"
Load = Callable[..., hl.TruncatedModel]


@pytest.fixture(scope="module")
def model(tiny: Callable[..., str]) -> hl.TruncatedModel:
    """Two layers of a tiny model that knows letters."""
    return hl.load_model(tiny("llama", tokenizer=True), 2, device="cpu")


def test_importing_the_package_loads_no_torch() -> None:
    code = (
        "import sys, time; start = time.perf_counter(); import hiddenlab\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
        "assert hiddenlab.AttackConfig and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_name_is_there_and_documented() -> None:
    # Few enough to look through; 'assess' is the 23rd, since every other verb on one defense is here.
    assert set(hl.__all__) <= set(dir(hl)) and len(hl.__all__) <= 23
    for name in hl.__all__:
        value = getattr(hl, name)
        assert name.startswith("__") or (value.__doc__ or "").strip(), name
    with pytest.raises(AttributeError, match="No hiddenlab attribute atack"):
        hl.atack  # noqa: B018


def test_a_prompt_comes_back_in_five_lines(model: hl.TruncatedModel, small_probes: None) -> None:
    observation, truth = hl.channel("gaussian:sigma=1e-6", "seq-perm").release(model, TEXT, seed=3)
    assert truth.text == model.text(truth.tokens) and TEXT in truth.text
    again, _ = hl.channel("gaussian:sigma=1e-6", "seq-perm").release(model, TEXT, seed=3)
    assert torch.equal(observation.states, again.states)
    result = hl.attack(observation, model)
    assert result.text == str(result) == truth.text and result.verified
    assert result.pieces and "".join(text for text, _ in result.pieces) == truth.text
    assert hl.score(result, truth) == hl.Score(True, 1.0, 1.0, 1.0, 1.0, 1.0)
    several = hl.attack([observation, again], model, "vocab-match", proposal="vocab")
    assert [one.text for one in several] == [truth.text] * 2
    assert hl.attack([], model) == []
    own = hl.attacks.VocabMatch(proposal="vocab").fit(observation.info, model).recover(observation)
    assert own.ids == result.ids


def test_a_notebook_shows_what_was_recovered(model: hl.TruncatedModel) -> None:
    observation, _ = hl.channel().release(model, "<b>é</b>")
    shown = hl.attack(observation, model, proposal="vocab")._repr_html_()
    assert "&lt;b&gt;é&lt;/b&gt;" in shown and "<b>" not in shown
    missed = hl.AttackResult((), 0, 0, 0.0, "complete", text="two", pieces=(("t", "exact"), ("wo", "wrong")))
    assert "underline wavy" in missed._repr_html_()


class Steps(hl.Stage):
    """Release numbers rounded to multiples of a step."""

    def __init__(self, step: float) -> None:
        self.step, self.spec = step, f"own-steps:step={step}"

    def states(self, states: Tensor, generator: torch.Generator) -> tuple[Tensor, None, dict[str, Any]]:
        return (states / self.step).round() * self.step, None, {}


@pytest.fixture
def no_names_left() -> Iterator[None]:
    yield
    for own in registry._SESSION.values():
        own.clear()


@pytest.mark.usefixtures("no_names_left")
def test_a_defense_of_ones_own_is_attacked_as_a_builtin_is(model: hl.TruncatedModel) -> None:
    observation, truth = hl.channel(Steps(0.01), "seq-perm").release(model, TEXT)
    assert observation.info.channel == ("own-steps:step=0.01", "seq-perm")
    assert hl.score(hl.attack(observation, model, proposal="vocab"), truth).exact
    # Defined anew, as in a notebook's cell that runs again, it takes its own place.
    again = type("Steps", (Steps,), {"__qualname__": "Steps"})
    hl.channel(again(0.5))
    assert registry.resolve("defenses", "own-steps") is again


@pytest.mark.usefixtures("no_names_left")
def test_a_defense_that_would_be_taken_for_another_is_refused() -> None:
    class Nameless(hl.Stage):
        def states(self, states: Tensor, generator: torch.Generator) -> tuple[Tensor, None, dict[str, Any]]:
            return 2 * states, None, {}

    with pytest.raises(InputError, match="Nameless has no name: set its attribute spec"):
        hl.channel(Nameless())
    hl.channel(Steps(0.5))
    with pytest.raises(InputError, match="this session already has the defense 'own-steps'"):
        hl.channel(type("Other", (Steps,), {})(0.5))
    with pytest.raises(InputError, match="already has the defense 'seq-perm'"):
        registry.register("defenses", "seq-perm", Steps)


def test_what_the_call_refuses(model: hl.TruncatedModel) -> None:
    observation, truth = hl.channel().release(model, TEXT)
    with pytest.raises(InputError, match="no option 'serach'"):
        hl.attack(observation, model, serach="greedy")
    with pytest.raises(InputError, match="give proposal to the attack object"):
        hl.attack(observation, model, hl.attacks.VocabMatch(), proposal="vocab")
    with pytest.raises(InputError, match="call fit"):
        hl.attacks.VocabMatch().recover(observation)
    with pytest.raises(InputError, match="no text"):
        hl.score(hl.attack(observation, model, "nearest"), hl.GroundTruth(truth.tokens))
    with pytest.raises(TypeError, match="neither _recover nor _recover_batch"):
        type("Idle", (hl.Attack,), {})


@pytest.mark.parametrize("form", ["torch", "numpy", "batched", "half"])
def test_states_from_elsewhere(tiny_model: Load, form: str) -> None:
    model = tiny_model("llama", 2)
    tokens = [5, 80, 7]
    states = model.encode(torch.tensor(tokens))
    given = {
        "torch": states,
        "numpy": states.numpy(),
        "batched": states[None].numpy(),
        "half": states.bfloat16(),
    }[form]
    observation = hl.Observation.from_states(given, model)
    assert observation.states.shape == states.shape and observation.info.site == model.site
    assert observation.info.provider_dtype == ("bfloat16" if form == "half" else "float32")
    found = hl.attack(observation, model, proposal="vocab")
    assert found.ids == tokens and found.verified


def test_states_that_are_none(tiny_model: Load) -> None:
    model = tiny_model("llama", 2)
    states = np.zeros((3, 64), np.float32)
    for wrong, match in (
        (np.zeros((2, 3, 64), np.float32), r"\[2, 3, 64\]"),
        (np.zeros((3, 64), np.int64), "int64"),
        (np.zeros(64, np.float32), r"\[64\]"),
        (np.full((3, 64), np.nan, np.float32), "NaN"),
        (np.zeros((3, 64), "V1"), "ordinary numbers"),  # as NumPy keeps 8-bit floats of ml_dtypes
        (np.array([["a"]]), "ordinary numbers"),
        ([[1.0], [2.0, 3.0]], "ordinary numbers"),
    ):
        with pytest.raises(InputError, match=match):
            hl.Observation.from_states(wrong, model)
    for facts, match in (
        ({"sigma": 0.1}, "no fact 'sigma'"),
        ({"noise_sigma": -1.0}, "noise_sigma"),
        ({"columns_permuted": "per_row"}, "columns_permuted"),
        ({"rows_permuted": "no"}, "rows_permuted"),
        ({"positions": (0, 2)}, "3 rows, but 2 positions"),
        ({"facts": {"x": states}}, "JSON values"),
    ):
        with pytest.raises(InputError, match=match):
            hl.Observation.from_states(states, model, **facts)
    assert hl.Observation.from_states(states, model, rows_permuted=True).info.rows_permuted


def test_a_run_is_what_the_command_line_records(tiny: Callable[..., str], tmp_path: Path) -> None:
    config = hl.AttackConfig(
        attack="nearest", model=tiny("llama", tokenizer=True), layer=1, prompt="two\nlines", device="cpu"
    )
    made = hl.run(config, tmp_path / "x")
    assert made.path == tmp_path / "x" and len(made.samples) == 1
    record, samples = read_run(tmp_path / "x")
    assert record.spec == config.to_json() | {"stream": "resid"}
    assert samples[0]["recovered_ids"] == made.samples[0]["recovered_ids"]
    assert made.summary["prompts"] == 1 and "p001" in made._repr_html_()
    assert hl.run(config, keep=False).path is None
    with pytest.raises(InputError, match=r"the configuration: limit"):
        hl.run(hl.AttackConfig(limit=0))
    with pytest.raises(InputError, match="not an empty directory"):
        hl.run(config, tmp_path / "x")


def test_options_that_would_be_ignored_are_refused(model: hl.TruncatedModel, tmp_path: Path) -> None:
    """From Python as from the command line."""
    file = tmp_path / "o.safetensors"
    observation, _ = hl.channel("seq-perm").release(model, TEXT)
    hl.save_observations([observation], file)
    for options, match in (
        ({"prompt": "a", "prompts": "b.txt"}, "not both"),
        ({"prompt": "a", "column": "b"}, "no columns"),
        ({"truth": "t.json"}, "goes with --observation"),
        ({"observation": str(file), "prompt": "a"}, "leave out a PROMPT"),
        ({"observation": str(file), "max_tokens": 3}, "leave out --max-tokens"),
        ({"observation": str(file), "defense": ("hidden-perm",)}, "leave out --defense"),
    ):
        with pytest.raises(InputError, match=match):
            hl.run(hl.AttackConfig(attack="nearest", **options), keep=False)  # type: ignore[arg-type]
    made = hl.run(hl.AttackConfig(attack="nearest", observation=str(file), device="cpu"), keep=False)
    assert made.record.spec["defense"] == ["seq-perm"]
    again = hl.run(hl.AttackConfig.from_json(made.record.spec), keep=False)
    assert again.samples[0]["recovered_ids"] == made.samples[0]["recovered_ids"]


@pytest.mark.slow
@pytest.mark.usefixtures("small_probes")
@pytest.mark.parametrize(
    ("attack", "channel"),
    [
        (lambda: hl.attacks.SipIt(), "identity"),
        *slow_cases(
            (lambda: hl.attacks.VocabMatch(proposal="vocab"), "identity"),
            (lambda: hl.attacks.MissingTokenSearch(budget=50), "drop-rows:size=1,after=2"),
            (lambda: hl.attacks.BeamDecoding(lm=False), "gaussian:sigma=0.01"),
        ),
    ],
)
def test_another_seed_prepares_anew(
    model: hl.TruncatedModel, attack: Callable[[], hl.Attack], channel: str
) -> None:
    """What one seed prepared is never taken for another's."""
    info = hl.channel(channel).release(model, TEXT)[0].info

    def measured(fitted: hl.Attack) -> dict[str, object]:
        return {name: x for name, x in fitted.measured.items() if not name.endswith("seconds")}

    used = attack().fit(info, model, seed=0)
    first = measured(used)
    second = measured(used.fit(info, model, seed=1))
    assert second == measured(attack().fit(info, model, seed=1)) != first
    assert measured(used.fit(info, model, seed=0)) == first


def test_a_result_without_tokens_is_not_verified() -> None:
    empty = hl.AttackResult((), 0, 0, 0.0, "complete")
    assert not empty.verified
    with pytest.raises(InputError, match="the result has no text"):
        hl.score(empty, hl.GroundTruth((1,), text="a"))


def test_fingerprints_are_attacked_from_a_file(
    model: hl.TruncatedModel, tiny: Callable[..., str], tmp_path: Path
) -> None:
    """Their rows are as wide as the fingerprint, not as the model."""
    whole = hl.load_model(tiny("llama", tokenizer=True), stream="logits", device="cpu")
    observation, truth = hl.channel("logprobs:k=5").release(whole, "ab")
    hl.save_observations([observation], tmp_path / "o.safetensors")
    options = {"observation": str(tmp_path / "o.safetensors"), "device": "cpu"}
    made = hl.run(hl.AttackConfig(attack="fingerprint-inversion", **options), keep=False)  # type: ignore[arg-type]
    assert made.samples[0]["status"] == "attacked" and len(made.samples[0]["recovered_ids"]) == len(
        truth.tokens
    )
    with pytest.raises(InputError, match="10 wide"):
        hl.run(hl.AttackConfig(attack="nearest", **options), keep=False)  # type: ignore[arg-type]
