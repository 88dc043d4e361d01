"""Checkpoints as people have them load rightly, or one line says what is wrong with them and names the way out."""

import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hiddenlab.errors import InputError
from hiddenlab.models import load_model
from hiddenlab.testing import LAYERS, PlainModel, byte_tokenizer, save_tiny, write_tiny_gguf

TinyPath = Callable[..., str]
Tensors = dict[str, Tensor]
IDS = torch.tensor([17, 250, 3, 3, 99, 180, 41, 7, 256, 299, 5, 64])


def states(path: Path | str, layer: int | None = 2, stream: str = "resid", **options: Any) -> Tensor:
    return load_model(str(path), layer, stream=stream, device="cpu", **options).encode(IDS)


def same(path: Path | str, other: Path | str, *, within: float = 1e-5) -> None:
    actual, expected = states(path), states(other)
    assert float((actual - expected).abs().max()) <= within * float(expected.abs().max())


def refused(match: str, path: Path | str, layer: int = 1, **options: Any) -> str:
    with pytest.raises(InputError, match=match) as caught:
        load_model(str(path), layer, device="cpu", **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def configured(source: Path | str, folder: Path, **changes: Any) -> Path:
    """A copy of a model with other settings in its config.json; ``...`` leaves one out."""
    shutil.copytree(source, folder)
    values = json.loads((folder / "config.json").read_text()) | changes
    left = {name: value for name, value in values.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(left))
    return folder


def rewrite(folder: Path, change: Callable[[Tensors], Tensors]) -> Path:
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, {"format": "pt"})
    return folder


# ---- files of a checkpoint


def test_weights_that_stand_twice(tiny: TinyPath, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(tiny("llama"))
    parts = tmp_path / "parts"
    model.save_pretrained(parts, max_shard_size="200KB")
    # A part of another split does not count, nor does an index whose files are gone.
    shutil.copy(Path(tiny("llama")) / "model.safetensors", parts / "model-00001-of-00009.safetensors")
    same(parts, tiny("llama"))
    left = tmp_path / "left"
    shutil.copytree(tiny("llama"), left)
    shutil.copy(parts / "model.safetensors.index.json", left)
    same(left, tiny("llama"))
    shutil.copy(Path(tiny("llama")) / "model.safetensors", parts)
    refused(r"weights twice, in model.safetensors and in the \d files .*may be stale: move", parts)


def test_a_pickle_is_refused_with_the_command_that_converts_it(tiny: TinyPath, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = tmp_path / "it's a model"
    shutil.copytree(tiny("llama"), folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    told = refused("pytorch_model.bin is a pickle.*convert it, if you trust it: python -c", folder)
    program, option, code = shlex.split(told.split("if you trust it: ")[1])
    assert (program, option) == ("python", "-c")
    exec(code, {})
    same(folder, tiny("llama"))


def test_what_a_folder_holds_instead(tiny: TinyPath, tmp_path: Path) -> None:
    folder = tmp_path / "pointer"
    shutil.copytree(tiny("llama"), folder)
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\nsize 12\n")
    refused("is a pointer of Git LFS.*git lfs pull", folder)
    for name, file, match in (
        ("gguf", "m.gguf", "holds a GGUF file, m.gguf: name that"),
        ("mistral", "consolidated.safetensors", "in their maker's own form"),
        ("hub", "snapshots/abc/config.json", r"snapshots/abc holds one: name that"),
        ("empty", "nothing", "holds no config.json; it is not a transformers model$"),
    ):
        (tmp_path / name / file).parent.mkdir(parents=True)
        (tmp_path / name / file).write_text("{}")
        refused(match, tmp_path / name)


def test_configurations_that_are_none(tiny: TinyPath, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny("llama"), folder)
    for text, match in (
        ("{", "cannot read the config.json of .*not a valid JSON"),
        ("[]", "config.json of .* holds no object"),
        ("{}", "cannot read the config.json of .*model_type"),
        ('{"model_type": "nobody"}', "cannot read the config.json of .*model type `nobody`"),
    ):
        (folder / "config.json").write_text(text)
        refused(match, folder)


@pytest.mark.parametrize("tied", [True, False, None])
def test_the_last_state_does_not_depend_on_what_transformers_shows_last(
    tiny: TinyPath, tmp_path: Path, tied: bool | None
) -> None:
    path = configured(tiny("llama"), tmp_path / "model", tie_last_hidden_states=tied)
    plain = PlainModel(tiny("llama"))
    for stream in ("resid", "final_norm"):
        expected = plain.states(IDS.tolist(), LAYERS, stream)
        assert float((states(path, LAYERS, stream) - expected).abs().max()) < 1e-4


# ---- rope


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, {"rope_type": "linear", "factor": 2.0}),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, {"rope_type": "linear", "factor": 2.0}),
        ({"rope_scaling": None}, {"rope_type": "default"}),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        ),
    ],
)
def test_old_rope_settings_are_the_new_ones(
    tiny: TinyPath, tmp_path: Path, old: dict[str, Any], new: dict[str, Any]
) -> None:
    first = configured(tiny("llama"), tmp_path / "old", rope_parameters=..., rope_theta=500.0, **old)
    second = configured(tiny("llama"), tmp_path / "new", rope_parameters={**new, "rope_theta": 500.0})
    same(first, second)
    assert float((states(first) - states(tiny("llama"))).abs().max()) > 1e-3


def test_rope_settings_of_each_kind_of_layer(tiny: TinyPath, tmp_path: Path) -> None:
    whole, local = (
        {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e5},
        {"rope_type": "default", "rope_theta": 50.0},
    )
    nested = {"full_attention": whole, "sliding_attention": local}
    first = configured(tiny("gemma3_text"), tmp_path / "nested", rope_parameters=nested)
    second = configured(
        tiny("gemma3_text"), tmp_path / "old", rope_parameters=..., rope_theta=1e5, rope_local_base_freq=50.0,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    )  # fmt: skip
    same(first, second)
    unknown = configured(
        tiny("llama"), tmp_path / "unknown", rope_parameters={"rope_type": "fancy", "rope_theta": 1.0}
    )
    refused("unknown or missing: 'fancy'", unknown)


# ---- GGUF


def test_a_gguf_file_without_a_tokenizer(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "with.gguf")
    write_tiny_gguf(tmp_path / "without.gguf", tokenizer=False)
    model = load_model(str(tmp_path / "without.gguf"), 2, device="cpu")
    assert model.tokenizer is None
    assert torch.equal(model.encode(IDS), states(tmp_path / "with.gguf"))
    with pytest.raises(InputError, match="has no tokenizer to read text with"):
        model.tokenize("hello")


# ---- quantized weights


def float8(folder: Path, block: tuple[int, int] | None, only: str = "_proj") -> Path:
    """Quantize a model's weights to float8; write the same weights, plainly dequantized, into ``plain`` beside it."""
    values, quantized, plain = load_file(folder / "model.safetensors"), Tensors(), Tensors()
    for name, value in values.items():
        quantized[name] = plain[name] = value
        if only in name and value.ndim == 2:
            rows, columns = value.shape
            high, wide = block or (rows, columns)
            largest = torch.nn.functional.max_pool2d(value.abs()[None], (high, wide), ceil_mode=True)[0]
            scale = largest / 448
            spread = scale.repeat_interleave(high, 0)[:rows].repeat_interleave(wide, 1)[:, :columns]
            quantized[name] = (value / spread).to(torch.float8_e4m3fn)
            quantized[f"{name}_scale_inv"] = scale if block else scale.reshape(())
            plain[name] = quantized[name].float() * spread
    shutil.copytree(folder, folder.parent / "plain")
    rewrite(folder.parent / "plain", lambda _: plain)
    rewrite(folder, lambda _: quantized)
    config = json.loads((folder / "config.json").read_text())
    settings = {"quant_method": "fp8", "weight_block_size": block, "activation_scheme": "dynamic"}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return folder.parent / "plain"


@pytest.mark.parametrize("block", [(32, 32), (16, 64), None])
def test_float8_weights_are_dequantized(
    tiny: TinyPath, tmp_path: Path, block: tuple[int, int] | None
) -> None:
    shutil.copytree(tiny("llama"), tmp_path / "model")
    plain = float8(tmp_path / "model", block)
    same(tmp_path / "model", plain)
    assert float((states(plain) - states(tiny("llama"))).abs().max()) > 1e-3
    assert load_model(str(tmp_path / "model"), 1, device="cpu").engine == "packed"


def test_float8_weights_in_cut_blocks_are_refused(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path / "model", intermediate_size=96)
    float8(tmp_path / "model", (64, 64))
    refused(
        r"mlp\.down_proj\.weight of shape \(64, 96\) in blocks of \(64, 64\), which cut it",
        tmp_path / "model",
    )


def test_float8_weights_of_which_the_configuration_says_nothing(tiny: TinyPath, tmp_path: Path) -> None:
    shutil.copytree(tiny("llama"), tmp_path / "model")
    float8(tmp_path / "model", (32, 32))
    silent = configured(tmp_path / "model", tmp_path / "silent", quantization_config=...)
    refused(r"_scale_inv.*quantized weights of which config.json says nothing", silent)

    def packed(tensors: Tensors) -> Tensors:
        gone = "model.layers.0.mlp.up_proj"
        return {n: t for n, t in tensors.items() if n != f"{gone}.weight"} | {
            f"{gone}.qweight": torch.ones(8, 8)
        }

    shutil.copytree(tiny("llama"), tmp_path / "packed")
    refused("does not give .*it holds .*qweight, of quantized weights", rewrite(tmp_path / "packed", packed))


def test_float8_weights_of_a_multimodal_model(tmp_path: Path) -> None:
    from tests.test_load import save_multimodal

    save_multimodal("gemma3", tmp_path / "model", head_dim=32)
    plain = float8(tmp_path / "model", (32, 32), "language_model.layers.0.mlp")
    same(tmp_path / "model", plain)


FLOAT4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def test_mxfp4_weights_are_dequantized(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "gpt_oss", vocab_size=300, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_local_experts=2, num_experts_per_tok=1, initializer_range=0.15,
        sliding_window=4, pad_token_id=None,
    )  # fmt: skip
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(tmp_path / "model")
    shutil.copytree(tmp_path / "model", tmp_path / "plain")

    def draw(name: str, shape: torch.Size) -> tuple[Tensors, Tensor]:
        """Random codes of a weight [experts, in, out], two a byte, with a scale for each 32, and their values."""
        experts, inner, outer = shape
        codes = torch.randint(0, 16, (experts, outer, inner // 32, 32))
        scales = torch.randint(123, 126, (experts, outer, inner // 32))
        values = FLOAT4[codes % 8] * torch.where(codes < 8, 1.0, -1.0) * 2.0 ** (scales[..., None] - 127)
        blocks = codes[..., 0::2] | (codes[..., 1::2] << 4)
        packed = {f"{name}_blocks": blocks.to(torch.uint8), f"{name}_scales": scales.to(torch.uint8)}
        return packed, values.reshape(experts, outer, inner).transpose(1, 2).contiguous()

    plain, quantized = load_file(tmp_path / "plain" / "model.safetensors"), Tensors()
    for name, value in plain.items():
        if name.endswith(("gate_up_proj", "down_proj")):
            packed, plain[name] = draw(name, value.shape)
            quantized |= packed
        else:
            quantized[name] = value
    rewrite(tmp_path / "plain", lambda _: plain)
    rewrite(tmp_path / "model", lambda _: quantized)
    path = configured(tmp_path / "model", tmp_path / "mxfp4", quantization_config={"quant_method": "mxfp4"})
    same(path, tmp_path / "plain")


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_weights_quantized_by_bitsandbytes(tiny: TinyPath, tmp_path: Path, kind: str) -> None:
    from transformers import AutoModelForCausalLM

    from hiddenlab.models.load import quantization_config

    model: Any = AutoModelForCausalLM.from_pretrained(
        tiny("llama"), quantization_config=quantization_config(kind), device_map={"": "cpu"}
    )
    model.save_pretrained(tmp_path / "model")
    with torch.no_grad():
        expected = model(input_ids=IDS[None], output_hidden_states=True).hidden_states[2][0]
    actual = states(tmp_path / "model")
    assert float((actual - expected).norm() / expected.norm()) < 0.02
    refused(
        "is quantized by bitsandbytes already, and is not quantized to int8",
        tmp_path / "model",
        quantization="int8",
    )


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        (
            {"quant_method": "gptq", "bits": 4},
            "by gptq, .*optimum.*install it, or give the model in bfloat16",
        ),
        (
            {"quant_method": "awq", "bits": 4},
            "by awq, .*gptqmodel.*install it, or give the model in bfloat16",
        ),
        ({"quant_method": "compressed-tensors"}, "by compressed-tensors, .*pip install compressed-tensors"),
        ({"quant_method": "aqlm"}, "by aqlm, .*pip install aqlm"),
        ({"quant_method": "torchao"}, "by torchao, .*torchao"),
        ({"quant_method": "nvfp4"}, "by nvfp4, .*not supported.*; give the model in bfloat16"),
        ({"quant_method": "squish"}, "by 'squish', which transformers does not know"),
        ({"quant_method": 5}, "by '5', which transformers does not know"),
        ({"bits": 4}, "quantized and does not say by what method"),
        ("gptq", "quantized and does not say by what method"),
    ],
)
def test_weights_that_no_library_here_reads(
    tiny: TinyPath, tmp_path: Path, settings: Any, match: str
) -> None:
    refused(match, configured(tiny("llama"), tmp_path / "model", quantization_config=settings))


# ---- tokenizers


def with_tokenizer(folder: Path, tokenizer: Any, **changes: Any) -> str:
    save_tiny("llama", folder, **changes)
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_tokens_without_a_text_are_shown_by_their_id(tmp_path: Path) -> None:
    model = load_model(with_tokenizer(tmp_path, byte_tokenizer()), 1, device="cpu")
    hello = model.tokenize("hello")
    assert model.text(hello) == "hello"
    assert model.text([299, *hello[:2], 258, 259, *hello[2:], 257]) == "<id 299>he<id 258><id 259>llo</s>"
    euro = model.tokenize("€")
    assert len(euro) == 3 and model.text([*euro, 270, *euro]) == "€<id 270>€"


def test_a_space_behind_a_token_without_a_text_stays(tmp_path: Path) -> None:
    """Tokenizers made of SentencePiece leave out the space before the first token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<unk>": 0, "▁one": 1, "▁two": 2}
    inner = Tokenizer(models.WordLevel(words, "<unk>"))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")
    model = load_model(with_tokenizer(tmp_path, tokenizer), 1, device="cpu")
    assert model.text([1, 2]) == "one two"
    assert model.text([1, 290, 2, 2]) == "one<id 290> two two"
    assert model.text([290, 2]) == "<id 290>two"


@pytest.mark.slow
@pytest.mark.usefixtures("small_probes")
def test_a_tokenizer_that_knows_more_tokens_than_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hiddenlab import AttackConfig, run
    from hiddenlab.defenses.verification.causal_lm import load_whole

    path = with_tokenizer(tmp_path, byte_tokenizer(), vocab_size=128, bos_token_id=0, eos_token_id=1)
    model = load_model(path, 1, device="cpu")
    assert max(model.special_ids) < 128
    with pytest.raises(
        InputError, match=r"reads '<s>' as token 256, and the model has 128 tokens; give it its own"
    ):
        model.tokenize("<s>hello")
    with pytest.raises(InputError, match="request 'a': token 256 is not in a vocabulary of 128"):
        load_whole(path, device="cpu").check_tokens([3, 256], "request 'a'")
    # The attacker's own texts are full of such tokens.
    texts = ["Some text with line ends,\nand others: é, ü, €.\n" * 20] * 20
    monkeypatch.setattr("hiddenlab.proposals.corpus.standard_library_texts", lambda: list(texts))
    config = AttackConfig(prompt="hello", model=path, layer=1, proposal="probe+lm", device="cpu")
    assert run(config, keep=False).summary["exact"] == 1
