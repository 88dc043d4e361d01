"""Finding and loading models: what is not whole or not understood is refused, and never loads as random weights."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig

from hiddenlab.errors import InputError
from hiddenlab.models import load_model
from hiddenlab.models.load import load_config, load_module, resolve_model
from hiddenlab.testing import HEADS, KV_HEADS, LAYERS, MLP, VOCABULARY, WIDTH, WINDOW, PlainModel

TinyPath = Callable[..., str]
Tensors = dict[str, Tensor]

LONG = [17, 250, 3, 3, 99, 180, 41, 7, 256, 299, 5, 64, 3, 128, 77, 212, 5, 31]
IDS = torch.tensor(LONG)
TOLERANCE = 1e-4


def states(path: Path | str, layer: int | None, stream: str = "resid") -> Tensor:
    return load_model(str(path), layer, stream=stream, device="cpu").encode(IDS)


def close(actual: Tensor, expected: Tensor) -> None:
    assert actual.shape == expected.shape
    assert float((actual - expected).abs().max()) < TOLERANCE
    assert float(expected.abs().max()) > 0.1


def refused(match: str, *args: Any, **options: Any) -> None:
    with pytest.raises(InputError, match=match) as caught:
        load_model(*args, device="cpu", **options)
    assert "\n" not in str(caught.value)


def changed(source: Path | str, folder: Path, change: Callable[[Tensors], Tensors]) -> str:
    """A copy of a model with other tensors."""
    shutil.copytree(source, folder)
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, {"format": "pt"})
    return str(folder)


def without(*names: str) -> Callable[[Tensors], Tensors]:
    def change(tensors: Tensors) -> Tensors:
        assert all(any(name in one for one in tensors) for name in names)
        return {one: value for one, value in tensors.items() if not any(name in one for name in names)}

    return change


# ---- names of models


def test_local_only_never_asks_the_hub(
    tiny: TinyPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("a connection was made"))
    for name in ("nobody/nothing", "nothing", "not a name"):
        with pytest.raises(InputError, match=f"{name}.* is not on this machine; name it with --model"):
            resolve_model(name, local_only=True)
    assert resolve_model(tiny("llama"), local_only=True).path == tiny("llama")
    # One that was downloaded before is on this machine.
    home = tmp_path / "models--somebody--something"
    shutil.copytree(tiny("llama"), home / "snapshots" / "abc")
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text("abc")
    ref = resolve_model("somebody/something", local_only=True)
    assert ref.name == "somebody/something"
    assert load_model(ref.path, 1).signature == load_model(tiny("llama"), 1).signature


def test_adapters_within_a_model_are_refused(tiny: TinyPath, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base: Any = AutoModelForCausalLM.from_pretrained(tiny("llama"))
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    # Its weights within the model's, with and without peft's names for the base weights.
    model.base_model.model.save_pretrained(tmp_path / "inside")
    refused("lora_A.*has no place for|does not give", str(tmp_path / "inside"), 1)

    def with_lora(tensors: Tensors) -> Tensors:
        return tensors | {"model.layers.0.self_attn.q_proj.lora_A.weight": torch.ones(2, WIDTH)}

    path = changed(tiny("llama"), tmp_path / "beside", with_lora)
    refused(r"layers\.0\.self_attn\.q_proj\.lora_A\.weight, which Llama.* has no place for", path, 1)
    # Merged, it is a model like any other.
    merged: Any = model.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    close(states(tmp_path / "merged", 2), PlainModel(str(tmp_path / "merged")).states(LONG, 2))


def test_no_code_of_others_and_no_pickles(tiny: TinyPath, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    pickled = tmp_path / "pickled"
    pickled.mkdir()
    shutil.copy(Path(tiny("llama")) / "config.json", pickled)
    model: Any = AutoModelForCausalLM.from_pretrained(tiny("llama"))
    torch.save(model.state_dict(), pickled / "pytorch_model.bin")
    refused("pytorch_model.bin is a pickle, which is not loaded; convert it", str(pickled), 1)
    code = tmp_path / "code"
    shutil.copytree(tiny("llama"), code)
    config = json.loads((code / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Own", "AutoModel": "own.OwnModel"}}
    (code / "config.json").write_text(json.dumps(config))
    (code / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    refused("brings its own code .auto_map in its config.json., which is not run unasked", str(code), 1)
    assert not (tmp_path / "ran").exists()


# ---- what stands before the names


def renamed(base: str, head: str, own: str) -> Callable[[Tensors], Tensors]:
    def change(tensors: Tensors) -> Tensors:
        return {
            base + name.removeprefix(own) if name.startswith(own) else head + name: value
            for name, value in tensors.items()
        }

    return change


OWN = {
    "llama": "model.",
    "gpt2": "transformer.",
    "gpt_neox": "gpt_neox.",
    "qwen3_moe": "model.",
    "gemma2": "model.",
}
PREFIXES = {
    "the decoder alone": ("", ""),
    "adapter, merged": ("base_model.model.{}", "base_model.model."),
    "multimodal, old": ("language_model.{}", "language_model."),
    "multimodal, new": ("model.language_model.", ""),
    "language model alone": ("language_model.", "language_model."),
    "parallel": ("module.{}", "module."),
    "compiled": ("_orig_mod.{}", "_orig_mod."),
}


# A file of GPT-NeoX calls the head ``embed_out``: it is not told from a part of the decoder that stands beside it.
CASES = [(a, k) for a in OWN for k in PREFIXES if (a, k) != ("gpt_neox", "language model alone")]


@pytest.mark.parametrize(("architecture", "kind"), CASES)
def test_what_stands_before_the_names_is_found_in_the_file(
    tiny: TinyPath, tmp_path: Path, architecture: str, kind: str
) -> None:
    own = OWN[architecture]
    base, head = PREFIXES[kind]
    path = changed(tiny(architecture), tmp_path / "model", renamed(base.format(own), head, own))
    plain = PlainModel(tiny(architecture))
    close(states(path, 2), plain.states(LONG, 2))
    close(states(path, LAYERS, "logits"), plain.states(LONG, LAYERS, "logits"))
    # A missing tensor is still missed, and the error tells what stands there.
    lacks = changed(
        path, tmp_path / "lacks", without(".1.input_layernorm" if architecture != "gpt2" else ".1.ln_1")
    )
    refused(f"'{base.format(own)}'" if base else "nothing stands before", lacks, 2)


def test_what_was_mapped_is_saved_as_a_plain_model(tiny: TinyPath, tmp_path: Path) -> None:
    change = renamed("language_model.model.", "language_model.", "model.")
    ref = resolve_model(changed(tiny("llama"), tmp_path / "mapped", change))
    model: Any = load_module(
        ref, load_config(ref), head=True, dtype=torch.float32, device=torch.device("cpu"), attention=None
    )
    model.save_pretrained(tmp_path / "saved")
    first, second = (
        load_file(Path(path) / "model.safetensors") for path in (tiny("llama"), tmp_path / "saved")
    )
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_two_language_models_in_one_file(tiny: TinyPath, tmp_path: Path) -> None:
    def change(tensors: Tensors) -> Tensors:
        return {
            f"{part}.{name}": value.clone()
            for part in ("thinker", "talker")
            for name, value in tensors.items()
        }

    refused("several language models, beneath 'talker.model.' and 'thinker.model.'",
            changed(tiny("llama"), tmp_path / "two", change), 1)  # fmt: skip
    # Beside one under the model's own names, others do not matter.
    path = changed(tiny("llama"), tmp_path / "one", lambda tensors: tensors | change(tensors))
    close(states(path, 1), PlainModel(tiny("llama")).states(LONG, 1))


# ---- what is missing


@pytest.mark.parametrize(
    ("architecture", "gone", "layer"),
    [
        ("llama", "model.embed_tokens.weight", 1),
        ("llama", "model.layers.1.self_attn.k_proj.weight", 2),
        ("llama", "model.layers.0.post_attention_layernorm.weight", 1),
        ("gpt2", "transformer.h.0.mlp.c_fc.bias", 1),
        ("gpt2", "transformer.wpe.weight", 1),
        ("gemma2", "model.layers.1.pre_feedforward_layernorm.weight", 3),
        ("qwen3_moe", "model.layers.0.mlp.gate.weight", 1),
        ("phi3", "model.layers.0.self_attn.qkv_proj.weight", 2),
    ],
)
def test_a_tensor_that_the_model_needs(
    tiny: TinyPath, tmp_path: Path, architecture: str, gone: str, layer: int
) -> None:
    path = changed(tiny(architecture), tmp_path / "model", without(gone))
    own = gone.split(".")[0]
    refused(rf"does not give {gone.removeprefix(own + '.')}, which is needed.*'{own}\.'", path, layer)
    with pytest.raises(InputError, match="does not give"):
        ref = resolve_model(path)
        load_module(
            ref, load_config(ref), head=True, dtype=torch.bfloat16, device=torch.device("cpu"), attention=None
        )


def test_one_expert_of_many(tiny: TinyPath, tmp_path: Path) -> None:
    path = changed(tiny("qwen3_moe"), tmp_path / "model", without("layers.0.mlp.experts.2.up_proj"))
    with pytest.raises(InputError, match=r"layers\.0\.mlp\.experts\.gate_up_proj|conversion of the weights"):
        load_model(path, 1)


def test_no_tensor_of_the_architecture(tiny: TinyPath, tmp_path: Path) -> None:
    path = changed(tiny("llama"), tmp_path / "model", lambda _: {"something": torch.ones(1)})
    refused("none of its tensors has a name of this architecture", path, 1)


def test_what_the_model_does_not_need_may_be_missing(tiny: TinyPath, tmp_path: Path) -> None:
    plain = PlainModel(tiny("llama"))
    path = changed(
        tiny("llama"), tmp_path / "model", without("model.norm", "lm_head", "layers.2.", "layers.3.")
    )
    close(states(path, 2), plain.states(LONG, 2))
    refused("does not give layers.2", path, 3)
    path = changed(tiny("llama"), tmp_path / "norm", without("model.norm"))
    close(states(path, LAYERS), plain.states(LONG, LAYERS))
    refused("does not give norm.weight", path, LAYERS, stream="final_norm")
    refused("does not give model.norm.weight", path, LAYERS, stream="logits")
    path = changed(tiny("gpt2"), tmp_path / "gpt2", without("transformer.ln_f"))
    close(states(path, LAYERS), PlainModel(tiny("gpt2")).states(LONG, LAYERS))
    refused(r"does not give ln_f.bias, ln_f.weight, which", path, LAYERS, stream="final_norm")


def test_heads_tied_and_not(tiny: TinyPath, tmp_path: Path) -> None:
    path = changed(tiny("llama"), tmp_path / "model", without("lm_head"))
    close(states(path, LAYERS, "final_norm"), PlainModel(tiny("llama")).states(LONG, LAYERS, "final_norm"))
    refused("does not give lm_head.weight", path, LAYERS, stream="logits")
    tied = tiny("llama", tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(Path(tied) / "model.safetensors")
    close(states(tied, LAYERS, "logits"), PlainModel(tied).states(LONG, LAYERS, "logits"))


def test_tensors_of_another_shape_and_of_another_architecture(tiny: TinyPath, tmp_path: Path) -> None:
    def narrow(tensors: Tensors) -> Tensors:
        return tensors | {"model.layers.0.mlp.up_proj.weight": torch.ones(MLP, WIDTH - 1)}

    path = changed(tiny("llama"), tmp_path / "narrow", narrow)
    refused(
        rf"layers.0.mlp.up_proj.weight in another shape.*\({MLP}, {WIDTH - 1}\) and not \({MLP}, {WIDTH}\)",
        path,
        1,
    )

    def biased(tensors: Tensors) -> Tensors:
        return tensors | {f"model.layers.{i}.self_attn.q_proj.bias": torch.ones(WIDTH) for i in range(2, 4)}

    path = changed(tiny("llama"), tmp_path / "biased", biased)
    close(states(path, 2), PlainModel(tiny("llama")).states(LONG, 2))
    refused(r"layers\.2\.self_attn\.q_proj\.bias, which LlamaModel has no place for", path, 3)


# ---- files


def test_files_that_are_damaged_or_missing(tiny: TinyPath, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    path = changed(tiny("llama"), tmp_path / "empty", lambda tensors: tensors)
    (tmp_path / "empty" / "model.safetensors").write_bytes(b"")
    refused("cannot read .*model.safetensors.*copy it again", path, 1)
    path = changed(tiny("llama"), tmp_path / "nothing", lambda _: {})
    refused("does not give embed_tokens.weight", path, 1)
    model: Any = AutoModelForCausalLM.from_pretrained(tiny("llama"))
    model.save_pretrained(tmp_path / "parts", max_shard_size="200KB")
    path, files = str(tmp_path / "parts"), sorted((tmp_path / "parts").glob("*.safetensors"))
    assert len(files) > 2
    close(states(path, 3), PlainModel(tiny("llama")).states(LONG, 3))
    whole = files[1].read_bytes()
    files[1].write_bytes(whole[:-10])
    refused(f"cannot read .*{files[1].name}.*copy it again", path, 1)
    files[1].unlink()
    refused(f"names {files[1].name}, which is missing", path, 1)
    # Without one that no layer of the truncated model is in, transformers does not read the others either.
    files[1].write_bytes(whole)
    files[-1].unlink()
    refused(f"names {files[-1].name}, which is missing", path, 1)
    index = tmp_path / "parts" / "model.safetensors.index.json"
    for text in ("", "{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}'):
        index.write_text(text)
        refused("index.json does not say .*weight_map", path, 1)


# ---- multimodal models


COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": MLP, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": 24, "max_position_embeddings": 512,
    "initializer_range": 0.15, "bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 0,
}  # fmt: skip
WINDOWS: dict[str, Any] = {
    "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2)
}  # fmt: skip
EYES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
PLAIN_GEMMA4: dict[str, Any] = {
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "global_head_dim": 24,
}
MULTIMODAL: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": COMMON | WINDOWS | {"query_pre_attn_scalar": 20},
        "vision_config": EYES,
        "mm_tokens_per_image": 4,
    },
    "gemma4": {
        "text_config": COMMON | WINDOWS | PLAIN_GEMMA4,
        "vision_config": EYES | {"num_key_value_heads": 2, "head_dim": 16},
    },
    "llava": {
        "text_config": COMMON | {"model_type": "llama"},
        "vision_config": EYES | {"model_type": "clip_vision_model"},
    },
    "mistral3": {
        "text_config": COMMON | {"model_type": "mistral", "sliding_window": WINDOW},
        "vision_config": EYES | {"model_type": "pixtral", "head_dim": 16},
    },
    "qwen3_vl": {
        "text_config": COMMON,
        "vision_config": {
            "hidden_size": 32, "intermediate_size": 64, "depth": 2, "num_heads": 2, "out_hidden_size": WIDTH,
            "deepstack_visual_indexes": [0],
        },
    },
}  # fmt: skip


def save_multimodal(family: str, folder: Path, tied: bool = False, **text: Any) -> Any:
    from transformers import AutoModelForImageTextToText

    settings = MULTIMODAL[family]
    settings = settings | {"text_config": settings["text_config"] | text, "tie_word_embeddings": tied}
    config = AutoConfig.for_model(family, **settings)
    model: Any = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model.eval()


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", MULTIMODAL)
def test_the_language_model_of_a_multimodal_one(tmp_path: Path, family: str, tied: bool) -> None:
    model = save_multimodal(family, tmp_path / "model", tied)
    with torch.no_grad():
        out = model(input_ids=IDS[None], output_hidden_states=True, use_cache=False)
    for layer in (1, 2, 3):
        close(states(tmp_path / "model", layer), out.hidden_states[layer][0])
    close(states(tmp_path / "model", LAYERS, "final_norm"), out.hidden_states[-1][0])
    if family == "qwen3_vl":
        refused("qwen3_vl_text, for which transformers has no AutoModelForCausalLM",
                str(tmp_path / "model"), LAYERS, stream="logits")  # fmt: skip
    else:
        close(states(tmp_path / "model", LAYERS, "logits"), out.logits[0])
    # The image part and the layers behind the truncated model may be missing.
    path = changed(
        tmp_path / "model", tmp_path / "blind", without("visual" if family == "qwen3_vl" else "vision")
    )
    path = changed(
        path,
        tmp_path / "short",
        lambda t: {
            name: value for name, value in t.items() if not re.search(r"language_model\..*layers\.3\.", name)
        },
    )
    close(states(path, 2), out.hidden_states[2][0])
    path = changed(path, tmp_path / "lacks", without("layers.1.mlp.up_proj"))
    refused("does not give layers.1.mlp.up_proj.weight.*language_model", path, 2)


def test_multimodal_models_that_cannot_be_sliced_are_refused(tmp_path: Path) -> None:
    save_multimodal("llava", tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    refused("multimodal model quantized by gptq", str(tmp_path / "model"), 1)


def test_embeddings_of_each_layer_are_not_cut(tmp_path: Path) -> None:
    """Small Gemma 4 models hold one table for all layers, and the last layers share keys and values."""
    model = save_multimodal(
        "gemma4", tmp_path / "model", num_kv_shared_layers=2, hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCABULARY,
    )  # fmt: skip
    with torch.no_grad():
        out = model(input_ids=IDS[None], output_hidden_states=True, use_cache=False)
    close(states(tmp_path / "model", LAYERS, "final_norm"), out.hidden_states[-1][0])
    for layer in (1, 3):
        close(states(tmp_path / "model", layer), out.hidden_states[layer][0])
