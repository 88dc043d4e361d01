"""Hidden states that other programs saved: every format comes in as the rows that the model gave, ids apart."""

import dataclasses
import io
import json
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.feather
import pyarrow.parquet
import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

import hiddenlab as hl
from hiddenlab.cli import app
from hiddenlab.errors import InputError
from hiddenlab.imports import ModelShape, Reading, read_states
from hiddenlab.job import prepare
from hiddenlab.models import ModelRef
from hiddenlab.testing import HEADS, KV_HEADS, LAYERS, WIDTH, PlainModel, byte_tokenizer
from hiddenlab.truths import load_truth

TEXT = "My password is hunter2"
HEAD = WIDTH // HEADS
Rows = list[torch.Tensor]


@pytest.fixture(scope="module")
def folder(tiny: Callable[..., str]) -> str:
    """A tiny Llama that knows letters."""
    return tiny("llama", tokenizer=True)


@pytest.fixture(scope="module")
def shape(folder: str) -> ModelShape:
    return ModelShape.of(ModelRef(folder, folder))


@pytest.fixture(scope="module")
def plain(folder: str) -> PlainModel:
    return PlainModel(folder)


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.tensor([byte_tokenizer()(TEXT)["input_ids"]])


@pytest.fixture(scope="module")
def output(plain: PlainModel, ids: torch.Tensor) -> Any:
    """What transformers returns for the prompt: hidden states and a DynamicCache."""
    with torch.no_grad():
        return plain.model(ids, output_hidden_states=True, use_cache=True)


def read(path: Path, shape: ModelShape, **reading: Any) -> Any:
    return read_states([path], shape, Reading(**reading))


def same(imported: Any, *expected: torch.Tensor) -> bool:
    """Whether the rows of each prompt are exactly these."""
    rows = [prompt.states.float() for prompt in imported.prompts]
    return len(rows) == len(expected) and all(map(torch.equal, rows, [states.float() for states in expected]))


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, list(arguments))
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, " ".join(done.output.split())


# ---- the newcomer's way


def test_six_lines_of_transformers_and_one_command(
    output: Any, folder: str, tmp_path: Path, small_probes: None
) -> None:
    np.save(tmp_path / "x.npy", output.hidden_states[2].numpy())
    file, made = str(tmp_path / "x.npy"), str(tmp_path / "o.safetensors")
    code, said = run("import", file, "--model", folder, "--layer", "2", "-o", made)
    assert code == 0 and "read as [batch, tokens, width]: 1 prompt of 22 tokens" in said
    (observation,) = hl.load_observations(made)
    assert torch.equal(observation.states, output.hidden_states[2][0])
    code, said = run(
        "attack", "--states", file, "--model", folder, "--layer", "2", "--proposal", "vocab", "--no-record"
    )
    assert code == 0 and TEXT in said


@pytest.mark.slow
def test_from_python(output: Any, folder: str, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", output.hidden_states[2].numpy())
    model = hl.load_model(folder, 2, device="cpu")
    observation = hl.Observation.from_file(tmp_path / "x.npy", model)
    assert torch.equal(observation.states, output.hidden_states[2][0])
    assert hl.attack(observation, model, proposal="vocab").text == TEXT
    torch.save({"hidden_states": list(output.hidden_states)}, tmp_path / "x.pt")
    with pytest.raises(InputError, match="does not hold resid at layer 4"):
        hl.Observation.from_file(tmp_path / "x.pt", hl.load_model(folder, 4, device="cpu"))
    np.save(tmp_path / "two.npy", np.zeros((2, 3, WIDTH), np.float32))
    with pytest.raises(InputError, match="2 prompts"):
        hl.Observation.from_file(tmp_path / "two.npy", model)
    with pytest.raises(InputError, match="no option 'axis'"):
        hl.Observation.from_file(tmp_path / "x.npy", model, axis="tokens,width")


def test_ids_are_the_truth_and_never_in_the_observation(
    output: Any, ids: torch.Tensor, folder: str, tmp_path: Path
) -> None:
    file, made, truth = (str(tmp_path / name) for name in ("x.safetensors", "o.safetensors", "t.json"))
    save_file({"states": output.hidden_states[1][0].clone(), "input_ids": ids[0].clone()}, file)
    code, _ = run("import", file, "--model", folder, "--layer", "1", "-o", made, "--truth", truth)
    assert code == 0 and stat.S_IMODE(Path(truth).stat().st_mode) == 0o600
    (secret,) = load_truth(Path(truth))
    assert secret.tokens == tuple(ids[0].tolist())
    (observation,) = hl.load_observations(made)
    assert observation.info.facts == {} and str(list(secret.tokens))[1:-1] not in Path(
        made
    ).read_bytes().decode("latin1")
    np.save(tmp_path / "x.npy", output.hidden_states[1][0].numpy())
    code, said = run(
        "import", str(tmp_path / "x.npy"), "--model", folder, "--layer", "1", "-o", made, "--truth", truth
    )
    assert code == 2 and "hold no token ids" in said
    np.save(tmp_path / "ids.npy", ids.numpy())
    options = ("--model", folder, "--layer", "1", "--ids", str(tmp_path / "ids.npy"))
    assert run("import", str(tmp_path / "x.npy"), *options, "-o", made, "--truth", truth)[0] == 0


@pytest.mark.slow
def test_a_run_from_states_is_scored_recorded_and_run_again(
    output: Any, ids: torch.Tensor, folder: str, tmp_path: Path
) -> None:
    save_file(
        {"hidden_states": output.hidden_states[1].bfloat16(), "input_ids": ids.clone()},
        tmp_path / "x.safetensors",
    )
    config = hl.AttackConfig(
        attack="nearest", states=(str(tmp_path / "x.safetensors"),), model=folder, layer=1, device="cpu"
    )
    job = prepare(config)
    assert job.cases[0].truth == hl.GroundTruth(tuple(ids[0].tolist()))
    assert job.cases[0].observation is not None and job.cases[0].observation.info.facts == {}
    made = hl.run(config, tmp_path / "run")
    assert made.samples[0]["truth_ids"] == ids[0].tolist() and made.samples[0]["token_accuracy"] is not None
    assert made.record.spec["defense"] == ["dtype:bfloat16"] and made.record.spec["layer"] == 1
    shuffled = prepare(dataclasses.replace(config, defense=("dtype:bfloat16", "seq-perm")))
    assert shuffled.cases[0].observation is not None and shuffled.cases[0].observation.info.rows_permuted
    assert (
        shuffled.cases[0].truth is not None
    )  # in which order the rows stand is not known, and not needed to score
    code, said = run("rerun", str(tmp_path / "run"), "--no-record")
    assert code == 0 and "same results" in said


# ---- what the rows are


@pytest.mark.slow
def test_rows_of_another_layer_are_refused_before_anything_is_searched(
    output: Any, folder: str, tmp_path: Path
) -> None:
    file, made = tmp_path / "x.npy", tmp_path / "o.safetensors"
    np.save(file, output.hidden_states[3].numpy())
    words = ("import", str(file), "--model", folder, "--layer", "2", "-o", str(made))
    code, said = run(*words)
    assert code == 2 and "the rows are resid at layer 3" in said and "use --layer 3" in said
    assert not made.exists()
    assert run(*words, "--no-check")[0] == 0 and made.exists()
    code, said = run("attack", "--states", str(file), "--model", folder, "--layer", "2", "--no-record")
    assert code == 2 and "use --layer 3" in said


@pytest.mark.slow
def test_what_the_look_advises_is_right(output: Any, folder: str, shape: ModelShape, tmp_path: Path) -> None:
    """Two prompts behind rows of padding, in one array: the options that the look names read them."""
    states, model = output.hidden_states[2][0], hl.load_model(folder, 2, device="cpu")
    other = model.encode(torch.arange(4, 9))
    padding = torch.full((2, WIDTH), 7.0)
    np.save(tmp_path / "x.npy", torch.cat([padding, states, other]).numpy())
    words = ("import", str(tmp_path / "x.npy"), "--model", folder, "--layer", "2", "-o", str(tmp_path / "o"))
    advice = ("--skip-rows", "2", "--split", str(len(states)))
    assert f"use {' '.join(advice)}" in run(*words)[1]
    code, said = run(*words, *advice)
    assert code == 0 and "cut into 2 prompts" in said
    assert same(read(tmp_path / "x.npy", shape, layer=2, skip_rows=2, split=(len(states),)), states, other)


def test_ids_are_cut_like_rows(output: Any, ids: torch.Tensor, shape: ModelShape, tmp_path: Path) -> None:
    states = output.hidden_states[1][0]
    save_file({"states": states.clone(), "input_ids": ids[0].clone()}, tmp_path / "x.safetensors")
    imported = read(tmp_path / "x.safetensors", shape, layer=1, skip_rows=3, split=(4,))
    assert [truth.tokens for truth in imported.truths] == [
        tuple(ids[0, 3:7].tolist()),
        tuple(ids[0, 7:].tolist()),
    ]
    assert same(imported, states[3:7], states[7:])
    padded = torch.cat([torch.full((2, WIDTH), 7.0), states])
    save_file({"states": padded, "input_ids": ids[0].clone()}, tmp_path / "p.safetensors")  # none of padding
    (truth,) = read(tmp_path / "p.safetensors", shape, layer=1, skip_rows=2).truths
    assert truth.tokens == tuple(ids[0].tolist())
    generated = torch.cat(
        [ids[0], torch.tensor([7, 7, 7, 7, 7])]
    )  # whose rows are missing: which ids are padding's?
    save_file({"states": padded, "input_ids": generated}, tmp_path / "g.safetensors")
    with pytest.raises(InputError, match="--first-position"):
        read(tmp_path / "g.safetensors", shape, layer=1, skip_rows=2)


@pytest.mark.slow
def test_rows_of_padding_are_refused_where_they_stand_in_front(
    output: Any, folder: str, tmp_path: Path
) -> None:
    states = output.hidden_states[2][0]
    padded = torch.cat([torch.full((2, WIDTH), 7.0), states])
    words = ("--model", folder, "--layer", "2", "-o", str(tmp_path / "o"))
    np.save(tmp_path / "one.npy", padded.numpy())
    code, said = run("import", str(tmp_path / "one.npy"), *words)
    assert code == 2 and "use --skip-rows 2" in said
    np.save(tmp_path / "two.npy", torch.stack([padded, torch.cat([states, states[:2]])]).numpy())
    code, said = run(
        "import", str(tmp_path / "two.npy"), *words
    )  # what is right for one is wrong for the other
    assert code == 2 and "give --mask FILE" in said and "--skip-rows" not in said


def test_right_rows_are_not_refused(folder: str, tmp_path: Path) -> None:
    """Streams that no look reads, prompts of one token, repeated tokens, rows in a wrong order."""
    for name, stream, tokens in (
        ("attn", "attn", [5, 6]), ("v", "v", [9]), ("same", "resid", [7, 7, 7, 7, 8]), ("one", "resid", [3]),
    ):  # fmt: skip
        model = hl.load_model(folder, 0 if stream == "embed" else 2, stream=stream, device="cpu")
        np.save(tmp_path / f"{name}.npy", model.encode(torch.tensor(tokens)).numpy())
        code, said = run(
            "import", str(tmp_path / f"{name}.npy"), "--model", folder, "--layer", str(model.site.layer),
            "--stream", stream, "-o", str(tmp_path / "o"),
        )  # fmt: skip
        assert code == 0, (name, said)


@pytest.mark.parametrize(
    ("reading", "words"),
    [
        ({"skip_rows": 22}, "leaves no row of 22"),
        ({"split": (22,)}, "name rows from 1 to 21"),
        ({"split": (0,)}, "name rows from 1 to 21"),
        ({"split": (5, 3)}, "in ascending order"),
    ],
)
def test_cuts_that_cannot_be(
    reading: dict[str, Any], words: str, output: Any, shape: ModelShape, tmp_path: Path
) -> None:
    np.save(tmp_path / "x.npy", output.hidden_states[2].numpy())
    with pytest.raises(InputError, match=words):
        read(tmp_path / "x.npy", shape, layer=2, **reading)


# ---- containers


def npy(array: np.ndarray) -> bytes:
    np.save(file := io.BytesIO(), array)
    return file.getvalue()


def saved(states: torch.Tensor, kind: str, path: Path) -> None:
    """Save [tokens, width] as a program of that kind would."""
    rows = states.numpy()
    if kind == "npz":
        np.savez_compressed(path, states=rows)
    elif kind == "fortran":
        path.write_bytes(npy(np.asfortranarray(rows)))
    elif kind == "big-endian":
        path.write_bytes(npy(rows.astype(">f4")))
    elif kind == "safetensors":
        save_file({"x": states.clone()}, path)
    elif kind == "pt":
        torch.save(states.clone(), path)
    elif kind == "pt, old":
        torch.save(states.clone(), path, _use_new_zipfile_serialization=False)
    elif kind == "json":
        path.write_text(json.dumps(rows.tolist()))
    elif kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows.tolist()))
    elif kind == "text":
        path.write_text("".join(" ".join(map(str, row)) + "\n" for row in rows.tolist()))
    else:
        table = pyarrow.table({"embedding": pyarrow.array(rows.tolist(), pyarrow.list_(pyarrow.float32()))})
        if kind == "parquet":
            pyarrow.parquet.write_table(table, path)
        elif kind == "feather":
            pyarrow.feather.write_feather(table, str(path))
        else:
            with pyarrow.ipc.new_stream(path, table.schema) as stream:
                stream.write_table(table)


KINDS = (
    "npz", "fortran", "big-endian", "safetensors", "pt", "pt, old", "json", "jsonl", "text", "parquet", "feather",
    "arrow stream",
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_file(kind: str, output: Any, shape: ModelShape, tmp_path: Path) -> None:
    """By its bytes, whatever its name."""
    saved(output.hidden_states[3][0], kind, path := tmp_path / "states.npz")
    imported = read(path, shape, layer=3)
    assert same(imported, output.hidden_states[3][0]) and imported.site == hl.Site(3)


def test_a_table_with_a_prompt_in_each_row(
    output: Any, ids: torch.Tensor, shape: ModelShape, tmp_path: Path
) -> None:
    states = output.hidden_states[1][0]
    rows = [states.tolist(), states[:5].tolist()]
    table = pyarrow.table(
        {"states": rows, "input_ids": [ids[0].tolist(), ids[0, :5].tolist()], "note": ["a", "b"]}
    )
    pyarrow.parquet.write_table(table, tmp_path / "x.parquet")
    imported = read(tmp_path / "x.parquet", shape, layer=1)
    assert same(imported, states, states[:5])
    assert [rows.tokens for rows in imported.prompts] == [tuple(ids[0].tolist()), tuple(ids[0, :5].tolist())]


# ---- formats


def test_transformers_tuple(output: Any, ids: torch.Tensor, shape: ModelShape, tmp_path: Path) -> None:
    torch.save(output.hidden_states, tmp_path / "tuple.pt")
    np.savez(tmp_path / "tuple.npz", *[states.numpy() for states in output.hidden_states])
    torch.save({"hidden_states": list(output.hidden_states), "input_ids": ids}, tmp_path / "dict.pt")
    torch.save({"hidden_states": torch.stack(output.hidden_states)}, tmp_path / "stack.pt")
    stack = tmp_path / "stack.npy"
    np.save(stack, torch.stack([states[0] for states in output.hidden_states]).numpy())
    assert read(stack, shape, layer=LAYERS, axes="layers,tokens,width").site == hl.Site(LAYERS, "final_norm")
    assert same(read(stack, shape, layer=2, axes="layers,tokens,width"), output.hidden_states[2][0])
    stack.unlink()
    for path in tmp_path.iterdir():
        assert same(read(path, shape, layer=2), output.hidden_states[2][0]), path
        assert read(path, shape, layer=0).site == hl.Site(0, "embed"), path
        imported = read(path, shape, stream="final_norm")
        assert same(imported, output.hidden_states[-1][0]) and imported.site == hl.Site(
            LAYERS, "final_norm"
        ), path
        with pytest.raises(InputError, match="after the final norm"):
            read(path, shape, layer=LAYERS, stream="resid")
        with pytest.raises(InputError, match=r"resid at layer 1 to 3.*choose with --layer"):
            read(path, shape, stream="resid")


def test_the_configuration_says_whether_the_last_state_is_normed(
    output: Any, folder: str, tmp_path: Path
) -> None:
    other = tmp_path / "model"
    other.mkdir()
    config = json.loads((Path(folder) / "config.json").read_text()) | {"tie_last_hidden_states": False}
    (other / "config.json").write_text(json.dumps(config))
    torch.save(output.hidden_states, tmp_path / "tuple.pt")
    assert read(
        tmp_path / "tuple.pt", ModelShape.of(ModelRef(str(other), str(other))), layer=LAYERS
    ).site == hl.Site(LAYERS)


def test_transformers_generate(
    plain: PlainModel, ids: torch.Tensor, shape: ModelShape, tmp_path: Path
) -> None:
    """A tuple for each step: the prompt's rows, then one for each generated token but the last."""
    made = plain.model.generate(
        ids, max_new_tokens=4, do_sample=False, output_hidden_states=True, return_dict_in_generate=True,
        pad_token_id=0,
    )  # fmt: skip
    torch.save({"hidden_states": made.hidden_states, "sequences": made.sequences}, tmp_path / "g.pt")
    imported = read(tmp_path / "g.pt", shape, layer=2)
    tokens = made.sequences[0].tolist()[:-1]
    (rows,) = imported.prompts
    assert torch.allclose(rows.states, plain.states(tokens, 2), atol=1e-5) and rows.tokens == tuple(tokens)
    assert any("the last token has no row" in note for note in imported.notes)


def caches(cache: Any) -> Iterator[tuple[str, Any]]:
    """The ways in which people put a DynamicCache into a file."""
    layers = [(layer.keys, layer.values) for layer in cache.layers]
    yield "legacy tuples", tuple(layers)
    yield "iterated", tuple(cache)  # version 5 yields triples
    yield "past_key_values", {"past_key_values": layers}
    yield "two lists", {"key_cache": [k for k, _ in layers], "value_cache": [v for _, v in layers]}
    yield (
        "names",
        {
            f"layers.{i}.{name}": x
            for i, pair in enumerate(layers)
            for name, x in zip("kv", pair, strict=True)
        },
    )
    yield (
        "attributes",
        {
            f"layers.{i}.{name}": x
            for i, pair in enumerate(layers)
            for name, x in zip(("keys", "values"), pair, strict=True)
        },
    )


def test_dynamic_cache(
    output: Any, ids: torch.Tensor, folder: str, shape: ModelShape, tmp_path: Path
) -> None:
    for stream in "kv":
        expected = hl.load_model(folder, 3, stream=stream, device="cpu").encode(ids[0])
        for name, value in caches(output.past_key_values):
            torch.save(value, tmp_path / "cache.pt")
            imported = read(tmp_path / "cache.pt", shape, layer=3, stream=stream)
            (rows,) = imported.prompts
            assert torch.allclose(rows.states, expected, atol=1e-5), (name, stream)
            assert imported.site == hl.Site(3, stream)
    with pytest.raises(InputError, match=r"k at layer 3; v at layer 3; choose with --stream"):
        read(tmp_path / "cache.pt", shape, layer=3)
    keys = output.past_key_values.layers[0].keys
    np.save(tmp_path / "k.npy", keys.numpy())
    assert same(read(tmp_path / "k.npy", shape, layer=1, stream="k"), keys[0].transpose(0, 1).flatten(1))


def test_objects_are_never_unpickled(output: Any, shape: ModelShape, tmp_path: Path) -> None:
    torch.save(output.past_key_values, tmp_path / "cache.pt")
    with pytest.raises(InputError, match=r"DynamicCache.*never unpickled.*torch.save\(tensors, FILE\)"):
        read(tmp_path / "cache.pt", shape, layer=1)
    torch.save(output, tmp_path / "output.pt")
    with pytest.raises(InputError, match=r"CausalLMOutput.*never unpickled"):
        read(tmp_path / "output.pt", shape, layer=1)


def test_vllm_hidden_states(output: Any, ids: torch.Tensor, shape: ModelShape, tmp_path: Path) -> None:
    """As vllm/distributed/kv_transfer/kv_connector/v1/example_hidden_states_connector.py writes them."""
    states = torch.stack([output.hidden_states[layer][0] for layer in (1, 3)], dim=1)
    path = tmp_path / "request.safetensors"
    save_file({"hidden_states": states.bfloat16(), "token_ids": ids[0].clone()}, path)
    imported = read(path, shape, layer=3, layers=(1, 3))
    assert same(imported, states[:, 1].bfloat16()) and imported.prompts[0].tokens == tuple(ids[0].tolist())
    assert imported.prompts[0].channel == ("dtype:bfloat16",)
    with pytest.raises(InputError, match=r"states of 2 layers and does not say which.*--layers"):
        read(path, shape, layer=3)
    with pytest.raises(InputError, match="names 3 layers"):
        read(path, shape, layer=3, layers=(1, 2, 3))
    with pytest.raises(InputError, match="does not hold states at layer 2; it holds resid at layer 1, 3"):
        read(path, shape, layer=2, layers=(1, 3))
    # One layer; the front rows came from a cached prefix.
    save_file({"hidden_states": states[6:, 1:].clone(), "token_ids": ids[0].clone()}, path)
    with pytest.raises(InputError, match=r"16 rows and 22 token ids.*--first-position 6"):
        read(path, shape, layer=3)
    (rows,) = read(path, shape, layer=3, first_position=6).prompts
    assert rows.positions == tuple(range(6, 22)) and rows.tokens == tuple(ids[0].tolist())
    (rows,) = read(path, shape, layer=3, first_position=0).prompts
    assert rows.positions is None and rows.tokens == tuple(ids[0, :16].tolist())
    with pytest.raises(InputError, match="contradict"):
        read(path, shape, layer=3, first_position=7)


def test_vllm_residual_pair(output: Any, shape: ModelShape, tmp_path: Path) -> None:
    """A decoder layer of vLLM returns (hidden_states, residual): their sum is the state."""
    state = output.hidden_states[2][0]
    residual = state * 0.75
    torch.save({"hidden_states": state - residual, "residual": residual}, tmp_path / "named.pt")
    torch.save((state - residual, residual), tmp_path / "pair.pt")
    for name, form in (("named.pt", "auto"), ("pair.pt", "vllm-pair")):
        (rows,) = read(tmp_path / name, shape, layer=2, format=form).prompts
        assert torch.allclose(rows.states, state, atol=1e-5)
    with pytest.raises(InputError, match=r"two arrays of one shape.*--format vllm-pair"):
        read(tmp_path / "pair.pt", shape, layer=2)
    assert len(read(tmp_path / "pair.pt", shape, layer=2, format="plain").prompts) == 2


def test_sglang_answers(output: Any, ids: torch.Tensor, shape: ModelShape, tmp_path: Path) -> None:
    """As /generate answers with return_hidden_states: the prompt's rows, then a row for each further token."""
    states = output.hidden_states[-1][0]
    prompt = ids[0, :18].tolist()
    info = {
        "prompt_tokens": 18, "hidden_states": [states[:18].tolist(), *states[18:].tolist()],
        "input_token_logprobs": [[None, prompt[0], None], *[[-1.0, i, None] for i in prompt[1:]]],
    }  # fmt: skip
    answer = {"text": "a", "output_ids": [*ids[0, 18:].tolist(), 7], "meta_info": info}
    short = {"text": "", "meta_info": {"hidden_states": [states[:3].tolist()]}}
    (tmp_path / "one.json").write_text(json.dumps(answer))
    (tmp_path / "two.jsonl").write_text(json.dumps(answer) + "\n" + json.dumps(short) + "\n")
    imported = read(tmp_path / "one.json", shape)
    assert same(imported, states) and imported.site == hl.Site(LAYERS, "final_norm")
    assert imported.prompts[0].tokens == tuple(ids[0].tolist())
    imported = read(tmp_path / "two.jsonl", shape)
    assert same(imported, states, states[:3]) and imported.prompts[1].tokens is None
    with pytest.raises(InputError, match="does not hold states at layer 2"):
        read(tmp_path / "one.json", shape, layer=2)


def test_transformer_lens(output: Any, shape: ModelShape, tmp_path: Path) -> None:
    """The names of ``ActivationCache.cache_dict``; keys are [batch, tokens, heads, head width]."""
    keys = output.past_key_values.layers[1].keys.transpose(1, 2)
    cache = {
        "hook_embed": output.hidden_states[0],
        "blocks.0.hook_resid_pre": output.hidden_states[0],
        "blocks.1.hook_resid_mid": output.hidden_states[1],
        "blocks.1.hook_resid_post": output.hidden_states[2],
        "blocks.1.hook_out": output.hidden_states[2],
        "blocks.2.hook_resid_pre": output.hidden_states[2],
        "blocks.2.hook_in": output.hidden_states[2],
        "blocks.1.attn.hook_k": keys,
        "blocks.1.attn.hook_rot_k": keys,
        "blocks.2.attn.hook_k": keys,
        "blocks.1.attn.hook_pattern": torch.zeros(1, HEADS, 22, 22),
    }
    torch.save(cache, tmp_path / "c.pt")
    assert same(read(tmp_path / "c.pt", shape, layer=2), output.hidden_states[2][0])
    assert read(tmp_path / "c.pt", shape, stream="embed").site == hl.Site(0, "embed")
    with pytest.raises(InputError, match="before the rotary embedding; save hook_rot_k"):
        read(tmp_path / "c.pt", shape, layer=3, stream="k")
    assert same(read(tmp_path / "c.pt", shape, layer=2, stream="k"), keys[0].flatten(1))


def test_module_names(output: Any, shape: ModelShape, tmp_path: Path) -> None:
    """What nnsight and forward hooks save under the names of modules; GPT-2's blocks return a tuple."""
    for name in ("model.layers.1", "model.layers.1.output", "transformer.h.1.output.0", "gpt_neox.layers.1"):
        torch.save({name: output.hidden_states[2], "model.norm": output.hidden_states[-1]}, tmp_path / "h.pt")
        assert same(read(tmp_path / "h.pt", shape, layer=2), output.hidden_states[2][0]), name
    assert read(tmp_path / "h.pt", shape, stream="final_norm").site == hl.Site(LAYERS, "final_norm")
    torch.save({"model.layers.1": (output.hidden_states[2], None)}, tmp_path / "h.pt")
    assert same(read(tmp_path / "h.pt", shape, layer=2), output.hidden_states[2][0])
    torch.save({"model.layers.1.self_attn.k_proj": torch.zeros(1, 4, KV_HEADS * HEAD)}, tmp_path / "h.pt")
    with pytest.raises(InputError, match="before the rotary embedding"):
        read(tmp_path / "h.pt", shape, layer=2)


def test_llama_cpp(output: Any, shape: ModelShape, tmp_path: Path) -> None:
    """Names of its graph, and examples/embedding/embedding.cpp with --embd-output-format json or array."""
    np.savez(tmp_path / "g.npz", **{"l_out-1": output.hidden_states[2][0].numpy(), "kq-1": np.zeros((4, 4))})
    imported = read(tmp_path / "g.npz", shape, layer=2)
    assert same(imported, output.hidden_states[2][0]) and imported.prompts[0].channel == ("dtype:float16",)
    states = output.hidden_states[-1][0]
    data = [{"object": "embedding", "index": i, "embedding": row.tolist()} for i, row in enumerate(states)]
    (tmp_path / "e.json").write_text(json.dumps({"object": "list", "data": data}))
    (tmp_path / "server.json").write_text(json.dumps([{"index": 0, "embedding": states.tolist()}]))
    for name in ("e.json", "server.json"):
        imported = read(tmp_path / name, shape)
        assert same(imported, states) and imported.site == hl.Site(LAYERS, "final_norm"), name
    several = [{"index": i, "embedding": states[: 5 + i].tolist()} for i in range(2)]
    (tmp_path / "server.json").write_text(json.dumps(several))
    assert same(read(tmp_path / "server.json", shape), states[:5], states[:6])
    unit = torch.nn.functional.normalize(states)
    data = [{"object": "embedding", "index": i, "embedding": row.tolist()} for i, row in enumerate(unit)]
    (tmp_path / "e.json").write_text(json.dumps({"object": "list", "data": data}))
    with pytest.raises(InputError, match="--embd-normalize -1"):
        read(tmp_path / "e.json", shape)
    (tmp_path / "e.txt").write_text("embedding 0:  0.1  0.2  0.3  ...  0.4  0.5  0.6 \n")
    with pytest.raises(InputError, match="--embd-output-format json"):
        read(tmp_path / "e.txt", shape)
