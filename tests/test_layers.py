"""Several layers of one model in one command: what each gets is what it gets alone."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import hiddenlab as hl
from hiddenlab.channels import Channel
from hiddenlab.cli import app
from hiddenlab.errors import InputError
from hiddenlab.job import _numbered
from hiddenlab.models import Request, TruncatedModel
from hiddenlab.proposals import regressions
from hiddenlab.runner import Interrupted, run, run_layers
from hiddenlab.types import Site
from tests.test_attack import random_prompts
from tests.test_probe import public_of

LoadModel = Callable[..., TruncatedModel]
Tiny = Callable[..., str]


@pytest.mark.parametrize("engine", ["packed", "plain"])
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt2", "qwen3", "olmo2"])
def test_one_pass_gives_the_states_of_every_layer(tiny: Tiny, architecture: str, engine: str) -> None:
    deep = hl.load_model(tiny(architecture), 2, engine=engine)
    prompts = [torch.tensor(prompt) for prompt in random_prompts(5, 9, 9)]
    found = deep.run_layers([Request(deep.prefix(), prompt) for prompt in prompts], [1, 2])
    for layer in (1, 2):
        alone = hl.load_model(tiny(architecture), layer, engine=engine)
        for states, prompt in zip(found, prompts, strict=True):
            torch.testing.assert_close(states[layer], alone.encode(prompt), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("stream", ["resid", "k"])
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt2"])
def test_a_shallower_model_is_the_one_that_is_loaded(tiny: Tiny, architecture: str, stream: str) -> None:
    deep, alone = (hl.load_model(tiny(architecture), layer, stream=stream) for layer in (2, 1))
    shallow = deep.shallower(1)
    (prompt,) = random_prompts(8)
    torch.testing.assert_close(shallow.encode(torch.tensor(prompt)), alone.encode(torch.tensor(prompt)))
    assert regressions.identity_of(shallow, []) == regressions.identity_of(alone, [])
    assert shallow.embedding.data_ptr() == deep.embedding.data_ptr()
    assert shallow.site == alone.site and deep.site.layer == 2
    before = deep.encode(torch.tensor(prompt))
    shallow.encode(torch.tensor(prompt))
    assert torch.equal(deep.encode(torch.tensor(prompt)), before)
    for layer in (0, 3):
        with pytest.raises(InputError, match=f"layer {layer} is out of range"):
            deep.shallower(layer)


@pytest.mark.parametrize(
    "specs", [[], ["gaussian:sigma=0.1", "seq-perm"], ["dtype:bfloat16"], ["random-prefix"]]
)
def test_a_channel_releases_layers_as_it_releases_each(tiny_model: LoadModel, specs: list[str]) -> None:
    channel, prompts = Channel.parse(specs), random_prompts(6, 4, 11)
    at_layers = channel.release_layers(
        tiny_model("llama", 2), [1, 2], prompts, torch.Generator().manual_seed(3)
    )
    for layer, released in zip((1, 2), at_layers, strict=True):
        alone = channel.release_batch(tiny_model("llama", layer), prompts, torch.Generator().manual_seed(3))
        for (observation, truth), (own, secret) in zip(released, alone, strict=True):
            torch.testing.assert_close(observation.states, own.states, rtol=1e-4, atol=1e-5)
            assert observation.info == own.info
            assert (truth.tokens, truth.row_order) == (secret.tokens, secret.row_order)


@pytest.mark.slow
def test_first_probes_of_several_layers_come_from_the_same_passes(
    tiny_model: LoadModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(regressions, "KNOWN_TEXT", 300)
    deep = tiny_model("llama", 2)
    models, info = [deep.shallower(1), deep], public_of(deep)
    kept: list[dict[str, torch.Tensor]] = []
    for folder, held in (("together", 1 << 29), ("in groups", 1), ("each", 0)):
        monkeypatch.setenv("HIDDENLAB_CACHE", str(tmp_path / folder))
        before = deep.evaluated_tokens
        if held:
            monkeypatch.setattr(regressions, "MOST_HELD", held)
            regressions.collect_layers(models, info)
            passes = deep.evaluated_tokens - before
            if folder == "together":
                once = passes
                regressions.collect_layers(models, info)  # it is there
                assert deep.evaluated_tokens - before == passes
            else:
                assert passes == once  # the shallower group ran in the shallower model
        else:
            for model in models:
                own = replace(info, site=model.site)
                regressions.known_rows_for(model, own)
                regressions.text_rows_for(model, own)
        files = sorted((tmp_path / folder / "probes").glob("*"))
        kept.append(
            {f"{file.name} {name}": value for file in files for name, value in load_file(file).items()}
        )
    assert len(kept[0]) == 2 * 3 + 2 * 2
    for other in kept[1:]:
        assert other.keys() == kept[0].keys()
        for name, value in other.items():
            torch.testing.assert_close(value.float(), kept[0][name].float(), rtol=2e-2, atol=1e-4)


def settings(model: str, **options: object) -> hl.AttackConfig:
    return hl.AttackConfig(model=model, prompt="twelve bytes", **options)  # type: ignore[arg-type]


@pytest.mark.slow
def test_runs_at_layers_are_runs_at_each(tiny: Tiny, tmp_path: Path) -> None:
    config = settings(tiny("llama", tokenizer=True), defense=("gaussian:sigma=0.001",))
    seen: list[int] = []
    runs = run_layers(config, out=tmp_path / "runs", ended=lambda run: seen.append(run.record.spec["layer"]))
    assert seen == [1, 2, 3, 4]
    assert [run.path for run in runs] == [tmp_path / "runs" / f"layer-0{layer}" for layer in seen]
    for layer, made in zip(seen, runs, strict=True):
        alone = run(replace(config, layer=layer), keep=False)
        assert made.record.spec == alone.record.spec
        assert made.record.status == "finished"
        for name in ("recovered_ids", "exact", "verified"):
            assert made.samples[0][name] == alone.samples[0][name]
    assert [run.record.spec["layer"] for run in run_layers(config, [2, 1], keep=False)] == [2, 1]


def test_layers_that_are_none_are_refused(tiny: Tiny, tmp_path: Path) -> None:
    name = tiny("llama", tokenizer=True)
    cases: list[tuple[hl.AttackConfig, Any, str]] = [
        (settings(name), [1, 5], "layer 5 is out of range"),
        *(
            (settings(name), wrong, "give 'all', or a list of numbers from 1 on, each once")
            for wrong in ([0, 1], [1, 1], [])
        ),
        (settings(name, stream="final_norm"), [1, 2], "the stream final_norm exists at one layer"),
        (
            hl.AttackConfig(model=name, observation="x.safetensors"),
            [1, 2],
            "states of a file are of one layer",
        ),
    ]
    for config, layers, message in cases:
        with pytest.raises(InputError, match=message):
            run_layers(config, layers, out=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("wrong", [[True, 2], ["1"], "1,2", 3, None, [1.0, 2.0]])
def test_what_is_no_list_of_layers_is_refused(wrong: object) -> None:
    with pytest.raises(InputError, match="give 'all', or a list of numbers from 1 on, each once"):
        _numbered(wrong)


@pytest.mark.slow
def test_an_interruption_names_the_layers_that_are_left(tiny: Tiny, tmp_path: Path) -> None:
    def stop(sample: object) -> None:
        raise KeyboardInterrupt

    config = settings(tiny("llama", tokenizer=True))
    with pytest.raises(Interrupted) as stopped:
        run_layers(config, [2, 1], out=tmp_path / "runs", show=stop)
    assert stopped.value.left == (1,) and not stopped.value.ended
    assert stopped.value.run is not None and stopped.value.run.record.status == "interrupted"
    (rest,) = run_layers(config, stopped.value.left, out=tmp_path / "runs")  # beside what is there
    assert rest.path == tmp_path / "runs" / "layer-01"
    with pytest.raises(InputError, match="layer-02 exists and is not an empty directory"):
        run_layers(config, [3, 2], out=tmp_path / "runs")
    assert not (tmp_path / "runs" / "layer-03").exists()


@pytest.mark.slow
def test_an_interruption_between_layers_says_what_was_recorded(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hiddenlab import runner

    build, built = runner._created, list[object]()

    def created(*given: object) -> object:
        built.append(given)
        if len(built) == 2:
            raise KeyboardInterrupt
        return build(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(runner, "_created", created)
    name, out = tiny("llama", tokenizer=True), str(tmp_path / "runs")
    stopped = CliRunner().invoke(
        app, ["attack", "twelve bytes", "--model", name, "--layer", "1,2,3", "--out", out]
    )
    assert stopped.exit_code == 130
    assert "nothing was recorded" not in stopped.stderr
    assert "not begun: --layer 2,3; finished: 1" in stopped.stderr


@pytest.mark.slow
def test_the_command_takes_layers(tiny: Tiny) -> None:
    name = tiny("llama", tokenizer=True)
    given = ["attack", "twelve bytes", "--model", name, "--no-record"]
    result = CliRunner().invoke(app, [*given, "--layer", "1,2", "--json"])
    assert result.exit_code == 0, result.output
    made = json.loads(result.stdout)
    assert [one["spec"]["layer"] for one in made["runs"]] == [1, 2]
    assert all(one["summary"]["exact"] == 1.0 for one in made["runs"])
    shown = CliRunner().invoke(app, [*given, "--layer", "all"])
    assert "layer 2 (2 of 4)" in shown.stderr
    lines = [line for line in shown.stdout.splitlines() if "100 %" in line]
    assert [line.split()[1] for line in lines] == ["1", "2", "3", "4"]
    for layer, message in (
        ("1,x", "is no list of numbers"),
        ("2,2", "twice"),
        ("every", "or 'all'"),
    ):
        refused = CliRunner().invoke(app, [*given, "--layer", layer])
        assert refused.exit_code == 2 and message in refused.stderr, refused.output


def test_a_site_of_one_layer_stays_one_run(tiny: Tiny) -> None:
    given = ["attack", "twelve bytes", "--model", tiny("llama", tokenizer=True), "--no-record", "--json"]
    made = json.loads(CliRunner().invoke(app, [*given, "--layer", "1"]).stdout)
    assert made["spec"]["layer"] == 1 == Site(1).layer and "runs" not in made


def test_models_that_share_the_first_values_share_no_cache(tiny: Tiny) -> None:
    """An edited or fine-tuned model may have most weights of its base, and its states are others."""
    base, edited = (hl.load_model(tiny("llama"), 2) for _ in range(2))
    assert regressions.identity_of(base, []) == regressions.identity_of(edited, [])
    with torch.no_grad():
        for name, weights in edited.module.named_parameters():
            if name.endswith("1.mlp.down_proj.weight"):
                weights[1:] += 1e-4
    assert edited.signature == base.signature
    assert regressions.identity_of(base, []) != regressions.identity_of(edited, [])
