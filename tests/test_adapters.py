"""A LoRA adapter's states are those of peft's; what is not plain LoRA, or of another model, is refused in one line."""

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
from hiddenlab.testing import LAYERS, WIDTH, save_tiny

TinyPath = Callable[..., str]
Tensors = dict[str, Tensor]
IDS = torch.tensor([17, 250, 3, 3, 99, 180, 41, 7, 256, 299, 5, 64])


def trained(base: str, folder: Path, kind: str = "LoraConfig", **settings: Any) -> Any:
    """Save an adapter with random weights; return peft's model."""
    import peft
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(base)
    model = peft.get_peft_model(model, getattr(peft, kind)(task_type="CAUSAL_LM", **settings))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(str(folder))
    return model.eval()


def changed(folder: Path, **settings: Any) -> Path:
    """Change settings of an adapter."""
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    return folder


def rewritten(folder: Path, change: Callable[[Tensors], Tensors]) -> Path:
    file = folder / "adapter_model.safetensors"
    save_file(change(load_file(file)), file)
    return folder


def check(folder: Path, model: Any) -> None:
    """Check states of the first layers and logits of the whole model against peft's own forward pass."""
    with torch.no_grad():
        output = model(input_ids=IDS[None], output_hidden_states=True, use_cache=False)
    for layer, stream, expected in ((2, "resid", output.hidden_states[2]), (LAYERS, "logits", output.logits)):
        actual = load_model(str(folder), layer, stream=stream, device="cpu").encode(IDS)
        assert float((actual - expected[0]).abs().max()) < 1e-3 * float(expected.abs().max())


def refused(match: str, folder: Path | str, layer: int = 1) -> str:
    with pytest.raises(InputError, match=match) as caught:
        load_model(str(folder), layer, device="cpu")
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def plain(tiny: TinyPath, tmp_path: Path) -> Path:
    trained(tiny("llama"), tmp_path / "adapter", r=2, target_modules=["q_proj", "v_proj"])
    return tmp_path / "adapter"


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "all linear layers": ("llama", {"r": 3, "target_modules": "all-linear", "lora_alpha": 6}),
    "rank-stabilized": ("llama", {"r": 4, "target_modules": ["q_proj", "down_proj"], "use_rslora": True}),
    "patterns": (
        "llama",
        {
            "r": 4, "lora_alpha": 4, "target_modules": ["q_proj", "k_proj", "up_proj"],
            "rank_pattern": {"up_proj": 2, "^model.layers.0.self_attn.q_proj": 3},
            "alpha_pattern": {
                "layers.1.self_attn.k_proj": 16, "proj": 100, "up_proj": 1, "^layers.0.self_attn.q_proj": 50,
            },
        },
    ),
    "embeddings": ("llama", {"r": 2, "target_modules": ["embed_tokens", "lm_head", "q_proj"]}),
    "whole modules": ("llama", {"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}),
    "norms": ("llama", {"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["input_layernorm"]}),
    "some layers": ("llama", {"r": 2, "target_modules": ["q_proj"], "layers_to_transform": [1, 3]}),
    "later layers alone": ("llama", {"r": 2, "target_modules": ["q_proj"], "layers_to_transform": [3]}),
    "transposed weights": ("gpt2", {"r": 2, "target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    "biases": ("gpt2", {"r": 2, "target_modules": ["c_attn"], "bias": "all", "fan_in_fan_out": True}),
    "another family": ("gpt_neox", {"r": 2, "target_modules": ["query_key_value"], "bias": "lora_only"}),
    "outer beginnings": ("qwen3", {"r": 2, "target_modules": ["o_proj"], "init_lora_weights": "gaussian"}),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_states_are_those_of_peft(tiny: TinyPath, tmp_path: Path, case: str) -> None:
    architecture, settings = CASES[case]
    check(tmp_path / "adapter", trained(tiny(architecture), tmp_path / "adapter", **settings))


def test_other_parts_of_the_same_model_have_the_adapter_too(tiny: TinyPath, plain: Path) -> None:
    model = load_model(str(plain), 1, device="cpu")
    assert model.ref.name == str(plain) and model.tokenizer is None
    deeper = model.sibling(2)
    assert deeper.ref == model.ref
    assert torch.equal(deeper.encode(IDS), load_model(str(plain), 2, device="cpu").encode(IDS))
    base = load_model(tiny("llama"), 2, device="cpu").encode(IDS)
    assert float((deeper.encode(IDS) - base).abs().max()) > 1e-2
    half = load_model(str(plain), 2, device="cpu", dtype="bfloat16").encode(IDS).float()
    assert float((half - deeper.encode(IDS)).norm() / deeper.encode(IDS).norm()) < 0.05


def test_an_adapter_brings_its_own_tokenizer_or_takes_its_models(tiny: TinyPath, tmp_path: Path) -> None:
    from hiddenlab.testing import byte_tokenizer

    base = tiny("llama", tokenizer=True)
    trained(base, tmp_path / "adapter", r=2, target_modules=["q_proj"])
    assert load_model(str(tmp_path / "adapter"), 1, device="cpu").tokenize("a")
    other = byte_tokenizer()
    other.add_tokens(["hello"])
    other.save_pretrained(tmp_path / "adapter")
    assert load_model(str(tmp_path / "adapter"), 1, device="cpu").tokenize("hello") == [258]


def test_an_adapter_of_a_multimodal_model(tmp_path: Path) -> None:
    import peft

    from tests.test_load import save_multimodal

    model = save_multimodal("gemma3", tmp_path / "base")
    # The image part has layers of the same names.
    adapted: Any = peft.get_peft_model(
        model, peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    )
    adapted.save_pretrained(str(tmp_path / "adapter"))
    changed(tmp_path / "adapter", base_model_name_or_path=str(tmp_path / "base"))
    with torch.no_grad():
        expected = adapted(input_ids=IDS[None], output_hidden_states=True, use_cache=False).hidden_states[2][
            0
        ]
    actual = load_model(str(tmp_path / "adapter"), 2, device="cpu").encode(IDS)
    assert float((actual - expected).abs().max()) < 1e-3 * float(expected.abs().max())


# ---- no plain LoRA


@pytest.mark.parametrize(
    ("kind", "settings", "match"),
    [
        (
            "LoraConfig",
            {"r": 2, "target_modules": ["q_proj"], "use_dora": True},
            "no plain LoRA .use_dora is set.",
        ),
        (
            "IA3Config",
            {"target_modules": ["k_proj"], "feedforward_modules": []},
            "of type IA3, and only LoRA",
        ),
        ("LoHaConfig", {"r": 2, "target_modules": ["q_proj"]}, "of type LOHA, and only LoRA"),
    ],
)
def test_other_adapters_come_with_the_command_that_merges_them(
    tiny: TinyPath, tmp_path: Path, kind: str, settings: dict[str, Any], match: str
) -> None:
    folder = tmp_path / "it's one"
    model = trained(tiny("llama", tokenizer=True), folder, kind, **settings)
    told = refused(f"{match}.*let peft merge it, and name the result: python -c", folder)
    program, option, code = shlex.split(told.split("name the result: ")[1])
    assert (program, option) == ("python", "-c")
    exec(code, {})
    check(Path(f"{folder}-merged"), model)
    assert load_model(f"{folder}-merged", 1, device="cpu").tokenizer is not None


def test_settings_that_change_what_weights_mean(tiny: TinyPath, plain: Path, tmp_path: Path) -> None:
    for settings, match in (
        ({"init_lora_weights": "pissa"}, "began as 'pissa', which changes the model's own weights"),
        ({"layer_replication": [[0, 2]]}, "no plain LoRA .layer_replication is set"),
        ({"something_new": True}, "no plain LoRA .something_new is set"),
        ({"alpha_pattern": {"(a+)+b": 3}}, "no name of a module"),
        ({"peft_type": "PREFIX_TUNING"}, "tokens and no weights, which cannot be merged"),
        ({"peft_type": None}, "of type None, and only LoRA"),
        ({"lora_alpha": "8"}, "lora_alpha should be a valid number"),
        ({"r": 0}, "r should be greater"),
        ({"base_model_name_or_path": None}, "does not say of which model it is"),
        (
            {"base_model_name_or_path": "a/b"},
            r"adapter of 'a/b', which is not on this machine; fetch it .*as base_model",
        ),
        ({"base_model_name_or_path": "/none"}, "adapter of '/none', and there is no such folder"),
        ({"base_model_name_or_path": str(tmp_path)}, "adapter of .*: the directory .* holds no config.json"),
        ({"base_model_name_or_path": str(plain)}, "which is an adapter itself"),
    ):
        folder = tmp_path / "other"
        shutil.copytree(plain, folder)
        refused(match, changed(folder, **settings))
        shutil.rmtree(folder)
    # Where the embeddings are the head's too, peft's two ways differ.
    tied = tiny("llama", tie_word_embeddings=True)
    trained(tied, tmp_path / "tied", r=2, target_modules=["embed_tokens", "q_proj"])
    refused("changes embeddings that are the head's too; let peft merge it", tmp_path / "tied")


# ---- another model, or damaged


def test_an_adapter_of_another_model(tiny: TinyPath, plain: Path, tmp_path: Path) -> None:
    for name, changes, match in (
        (
            "wide",
            {"hidden_size": 2 * WIDTH},
            rf"q_proj.*of shape \({WIDTH}, {WIDTH}\), and the model's is .*another model",
        ),
        ("shallow", {"num_hidden_layers": 2}, "layers.2.self_attn.*which LlamaForCausalLM has no place for"),
        (
            "deep",
            {"num_hidden_layers": 6},
            "lacks model.layers.4.self_attn.q_proj.weight.*incomplete, or of another",
        ),
    ):
        refused(match, changed(plain, base_model_name_or_path=save_tiny("llama", tmp_path / name, **changes)))
    refused("c_attn|no place for", changed(plain, base_model_name_or_path=tiny("gpt2")))
    # Experts stand in one tensor.
    moe = tiny("qwen3_moe")
    trained(moe, tmp_path / "moe", r=2, target_modules=["q_proj"])

    def with_expert(tensors: Tensors) -> Tensors:
        name = "base_model.model.model.layers.0.mlp.experts.0.up_proj.lora"
        return tensors | {f"{name}_A.weight": torch.ones(2, WIDTH), f"{name}_B.weight": torch.ones(64, 2)}

    load_model(str(tmp_path / "moe"), 1, device="cpu")
    refused(
        r"experts\.0\.up_proj.*or of parts that transformers joins: let peft",
        rewritten(tmp_path / "moe", with_expert),
    )


def test_files_of_an_adapter(tiny: TinyPath, plain: Path, tmp_path: Path) -> None:
    file = plain / "adapter_model.safetensors"
    whole, settings = file.read_bytes(), (plain / "adapter_config.json").read_text()
    first = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    for change, match in (
        (lambda t: {n: v for n, v in t.items() if n != first}, "lora_B.weight without its other factor"),
        (lambda t: {n: v for n, v in t.items() if ".layers.3." not in n}, "lacks model.layers.3.*incomplete"),
        (lambda t: t | {first: torch.ones(3, WIDTH)}, r"lora_A.weight of shape \(3, 64\) and"),
        (lambda t: t | {first: torch.ones(2, WIDTH, 1)}, "only LoRA of linear layers"),
        (
            lambda t: t | {"base_model.model.model.layers.0.zzz.lora_A.weight": torch.ones(1, 1)},
            "zzz.*has no place for",
        ),
        (lambda _: {"a": torch.ones(1)}, "gives a, which .* has no place for"),
        (lambda _: {}, "has no place for|lacks|holds no tensors"),
    ):
        refused(match, rewritten(plain, change))
        file.write_bytes(whole)
    file.write_bytes(whole[: len(whole) // 2])
    refused("cannot read .*adapter_model.safetensors.*copy it again", plain)
    file.unlink()
    refused("holds no adapter_model.safetensors; copy the adapter again", plain)
    file.write_bytes(whole)
    torch.save(load_file(file), plain / "adapter_model.bin")
    file.unlink()
    told = refused("adapter_model.bin is a pickle.*convert it, if you trust it: python -c", plain)
    exec(shlex.split(told.split("if you trust it: ")[1])[2], {})
    load_model(str(plain), 1, device="cpu")
    for text in ("{", "[]", '{"peft_type": "LORA"}', ""):
        (plain / "adapter_config.json").write_text(text)
        refused("adapter_config.json", plain)
    (plain / "adapter_config.json").write_text(settings)
    shutil.copy(Path(tiny("llama")) / "model.safetensors", plain)
    refused("holds an adapter .* and a model .model.safetensors.; move one", plain)


def test_no_adapter_is_added_to_quantized_weights(plain: Path) -> None:
    with pytest.raises(InputError, match=r"cannot be added to .*q_proj.weight, which is quantized"):
        load_model(str(plain), 1, device="cpu", quantization="nf4")
