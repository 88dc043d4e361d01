"""A self-check chooses the engine: whatever it chooses gives the states of the model's own forward pass."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import AutoModel

import hiddenlab as hl
from hiddenlab.attacks import VocabMatch
from hiddenlab.defenses.cascade.load import load_cascade_model
from hiddenlab.defenses.cascade.local import LocalCascade
from hiddenlab.errors import InputError, NotApplicableError
from hiddenlab.models import Request, TruncatedModel, choice, load_model, self_check
from hiddenlab.models.attention import attending
from hiddenlab.models.twin import build_twin, small_config
from hiddenlab.sharding import Plan
from hiddenlab.testing import DECODERS, tiny_config
from tests.marks import slow_cases

TinyPath = Callable[..., str]
IDS = torch.tensor([5, 17, 3, 3, 99, 41, 8, 77, 60, 21, 5, 9])
# Tokens meet in a recurrence, in a bias of positions, in chunks, or positions are counted by the model itself.
FOREIGN = ("mamba", "bloom", "llama4_text", "openai-gpt", "falcon")
MORE_FOREIGN = (
    "rwkv",
    "gpt_oss",
    "recurrent_gemma",
    "qwen3_next",
    "jamba",
    "marian",
    "diffllama",
    "roberta",
    "xglm",
)


def save_foreign(architecture: str, folder: Path) -> Any:
    """Save a tiny random causal model of any of transformers' architectures; return it."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = CONFIG_MAPPING[architecture]()
    if hasattr(config, "is_decoder"):
        config.is_decoder = True
    model: Any = build_twin(config, head=True)
    model.save_pretrained(folder)
    return model


def close(actual: Tensor, expected: Tensor) -> None:
    assert actual.shape == expected.shape
    assert float((actual - expected).abs().max() / expected.abs().max()) < 1e-4


def layers_outputs(model: Any, tokens: Tensor, layer: int) -> Tensor:
    """What the layer gives in a plain forward pass of the whole model."""
    outputs: list[Any] = []
    hook = self_check.decoder_layers(model)[layer - 1].register_forward_hook(
        lambda _, __, out: outputs.append(out)
    )
    with torch.inference_mode():
        model(input_ids=tokens[None], use_cache=False)
    hook.remove()
    states = outputs[0][0] if isinstance(outputs[0], (tuple, list)) else outputs[0]
    return states[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("architecture", [*FOREIGN, *slow_cases(*MORE_FOREIGN)])
def test_what_the_packed_engine_cannot_do_the_plain_one_does(architecture: str, tmp_path: Path) -> None:
    whole = save_foreign(architecture, tmp_path)
    model = load_model(str(tmp_path), 2, device="cpu")
    assert model.engine == "plain" and model.difference
    expected = layers_outputs(whole, IDS, 2)
    close(model.encode(IDS), expected)
    prefix = model.prefix()
    close(prefix.extend(IDS[:4]), expected[:4])
    close(prefix.branch(IDS[4:7])[:1], expected[4:5])
    prefix.commit(0)
    close(prefix.fork().extend(IDS[5:]), expected[5:])
    request = Request(prefix, IDS[5:8], torch.stack([IDS[6:8], IDS[5:7]]), torch.tensor([1, 0]))
    (answer,) = model.run([request])
    close(answer.states, expected[5:8])
    close(answer.branches, torch.cat([expected[6:8], expected[5:7]]))
    observation, truth = hl.channel("identity").release(model, IDS[:5].tolist(), seed=0)
    result = VocabMatch(proposal="vocab").fit(observation.info, model).recover(observation)
    assert result.verified and result.ids == list(truth.tokens)
    with pytest.raises(InputError, match="packed engine does not reproduce"):
        load_model(str(tmp_path), 2, device="cpu", engine="packed")
    with pytest.raises(InputError, match="stream q needs the packed engine"):
        load_model(str(tmp_path), 2, stream="q", device="cpu")


@pytest.mark.parametrize("architecture", DECODERS)
def test_what_it_can_do_stays_packed(tiny: TinyPath, architecture: str) -> None:
    model = load_model(tiny(architecture), 3, device="cpu")
    assert model.engine == "packed" and not model.difference
    config = tiny_config(architecture)
    assert "twin" not in str(choice._twin_verdict(config).difference)
    assert choice._twin_verdict(config) == choice.Verdict()


TOKEN = st.integers(0, 299)


@settings(max_examples=20)
@given(
    before=st.lists(TOKEN, max_size=5), chain=st.lists(TOKEN, max_size=5), depth=st.integers(1, 3),
    seed=st.integers(0, 9), embedded=st.booleans(), data=st.data(),
)  # fmt: skip
def test_both_engines_answer_alike(
    tiny: TinyPath,
    before: list[int],
    chain: list[int],
    depth: int,
    seed: int,
    embedded: bool,
    data: st.DataObject,
) -> None:
    path, count = tiny("gemma2"), data.draw(st.integers(0 if chain else 1, 4))
    parents = torch.tensor(data.draw(st.lists(st.integers(0, len(chain)), min_size=count, max_size=count)))
    branches = torch.randint(0, 300, (count, depth), generator=torch.Generator().manual_seed(seed))
    answers, longer = [], []
    for engine in ("packed", "plain"):
        model = _loaded(path, engine)
        tokens, leaves = torch.tensor(chain, dtype=torch.long), branches
        if embedded:
            tokens, leaves = model.embed(tokens), model.embed(leaves.flatten()).unflatten(0, leaves.shape)
        prefix = model.prefix()
        if before:
            prefix.extend(torch.tensor(before))
        (answer,) = model.run(
            [Request(prefix, tokens, leaves if count else None, parents.long() if count else None)]
        )
        answers.append(torch.cat([answer.states, answer.branches]))
        prefix.keep(answer, tokens=len(chain))
        longer.append(prefix.extend(torch.tensor([7])))
    close(answers[0], answers[1])
    close(longer[0], longer[1])


_MODELS: dict[tuple[str, str], TruncatedModel] = {}


def _loaded(path: str, engine: str) -> TruncatedModel:
    if (path, engine) not in _MODELS:
        _MODELS[path, engine] = load_model(path, 3, device="cpu", engine=engine)
    return _MODELS[path, engine]


def test_the_plain_engine_on_request(tiny: TinyPath) -> None:
    model = load_model(tiny("llama"), 2, device="cpu", engine="plain")
    assert model.engine == "plain" and not model.difference
    assert model.sibling(3).engine == "plain"
    close(model.encode(IDS), load_model(tiny("llama"), 2, device="cpu").encode(IDS))
    counted = model.evaluated_tokens
    model.prefix().branch(IDS)
    assert model.evaluated_tokens == counted + len(IDS)
    with pytest.raises(NotApplicableError, match="unknown tokens before the prompt"):
        model.prefix(offset=1).extend(IDS)
    with pytest.raises(NotApplicableError, match="stream attn needs the packed engine"):
        model.run([Request(model.prefix(), IDS)], show="attn")
    with pytest.raises(InputError, match="unknown engine"):
        load_model(tiny("llama"), 2, engine="fast")
    with pytest.raises(InputError, match="leave --engine out"):
        load_model(tiny("llama"), 2, stream="q", engine="plain")


def test_a_difference_is_named(tiny: TinyPath, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check sees a mask, a position and a scale that are wrong, on prompts of a few tokens."""
    model = load_model(tiny("llama"), 2, device="cpu")
    assert self_check.first_difference(model) is None
    counted = model.evaluated_tokens, model.forward_calls
    with monkeypatch.context() as patch:
        patch.setattr(
            "hiddenlab.models.engine.PackedPass.positions",
            lambda self, device: torch.arange(self.starts[-1])[None],
        )
        difference = self_check.first_difference(model)
    assert difference is not None and difference.comparison != "one prompt"
    assert "states differ by" in str(difference) and counted == (model.evaluated_tokens, model.forward_calls)
    with monkeypatch.context() as patch:
        patch.setattr(
            "hiddenlab.models.engine.Alone.attend",
            lambda *_: (_ for _ in ()).throw(RuntimeError("no mask\nat all")),
        )
        assert str(self_check.first_difference(model)) == "the first pass: no mask"


def test_borders_are_checked_on_a_small_copy() -> None:
    """A window that only a mask knows, and rotary factors that change with length, show on a few tokens."""
    config = tiny_config("llama", max_position_embeddings=65536, rope_parameters={
        "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 4096, "factor": 16.0,
        "short_factor": [1.0] * 8, "long_factor": [3.0] * 8,
    })  # fmt: skip
    small = small_config(config)
    assert small.rope_parameters["original_max_position_embeddings"] == 8 and small.hidden_size == 64
    assert "small random copy" in choice._twin_verdict(config).difference


def test_what_was_checked_is_remembered(tiny: TinyPath, monkeypatch: pytest.MonkeyPatch) -> None:
    load_model(tiny("llama"), 1, device="cpu")
    monkeypatch.setattr(choice, "first_difference", lambda *_: pytest.fail("checked again"))
    monkeypatch.setattr(choice, "build_twin", lambda *_: pytest.fail("built again"))
    load_model(tiny("llama"), 1, device="cpu")


def test_layers_that_are_not_the_hidden_states_are_seen() -> None:
    """Here transformers leaves one state out, so that numbers of layers no longer agree."""
    twin: Any = build_twin(tiny_config("llama"))
    assert self_check.misplaced_layer(twin, IDS) is None

    def shown(*_: Any, **__: Any) -> Any:
        output = forward(*_, **__)
        output.hidden_states = (output.hidden_states[0], *output.hidden_states[2:], output.hidden_states[-1])
        return output

    forward, twin.forward = twin.forward, shown
    assert self_check.misplaced_layer(twin, IDS) == 1


@pytest.mark.parametrize(
    "architecture", ["bloom", "llama4_text", *slow_cases("openai-gpt", "jamba", "diffllama")]
)
def test_cascade_refuses_what_it_would_compute_wrongly(architecture: str, tmp_path: Path) -> None:
    save_foreign(architecture, tmp_path)
    with pytest.raises(InputError, match=r"cannot be sharded by tokens: Cascade does not reproduce"):
        load_cascade_model(str(tmp_path))


def test_a_whole_configuration_computes_the_first_layers(tmp_path: Path) -> None:
    """Scales that depend on the number of layers are those of the whole model (MiniCPM's residuals)."""
    whole = save_foreign("minicpm3", tmp_path)
    for layer in (1, 2):
        close(load_model(str(tmp_path), layer, device="cpu").encode(IDS), layers_outputs(whole, IDS, layer))


def test_a_long_prompt_leaves_nothing_behind(tiny: TinyPath) -> None:
    """Dynamic rotary factors are those of the longest prompt so far, in transformers' own module."""
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    path = tiny("llama", max_position_embeddings=8, num_hidden_layers=2, rope_parameters=dynamic)
    model = load_model(path, 1, device="cpu")
    assert model.engine == "plain"
    before = model.encode(IDS[:6])
    model.encode(IDS)
    assert torch.equal(model.encode(IDS[:6]), before)
    # The check itself ran longer prompts: a model that nothing has touched gives the same.
    untouched: Any = AutoModel.from_pretrained(path, attn_implementation="eager").eval()
    close(before, layers_outputs(untouched, IDS[:6], 1))


def test_embeddings_that_are_not_the_whole_input_are_refused(
    tiny: TinyPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model may look tokens up a second time, so that noise on embeddings is not the model's own pass."""
    model = load_model(tiny("llama"), 2, device="cpu")
    assert model.embeddings and self_check.reads_embeddings(model)
    forward = TruncatedModel.forward_plain

    def twice(self: Any, inputs: Tensor, **options: Any) -> Tensor:
        return forward(self, inputs, **options) + (0 if inputs.is_floating_point() else inputs[..., None])

    with monkeypatch.context() as patch:
        patch.setattr(TruncatedModel, "forward_plain", twice)
        assert not self_check.reads_embeddings(model)
    site = TruncatedModel(model.module, ref=model.ref, site=model.site, embeddings=False)
    with pytest.raises(NotApplicableError, match="looks tokens up more than once"):
        site.encode(site.embed(IDS))


def test_without_a_small_copy_the_plain_engine_runs(tiny: TinyPath, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config("llama")
    monkeypatch.setattr(
        "hiddenlab.models.twin.small_config", lambda _: tiny_config("llama", num_attention_heads=5)
    )
    assert "for lack of a small copy" in choice._twin_verdict(config).difference


def test_a_list_of_layers_is_known_by_its_name(tmp_path: Path) -> None:
    """Another list may be as long as the first layers are many."""
    save_foreign("mixtral", tmp_path)
    model = load_model(str(tmp_path), 1, device="cpu")
    model.module.embed_tokens.extra = nn.ModuleList([nn.Identity()])
    assert self_check.decoder_layers(model.module) is model.module.layers


def test_cascade_steps_over_a_border(tiny: TinyPath) -> None:
    """Rotary factors that change with length spoil what is cached, once an answer passes the border."""
    longrope = {
        "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64, "factor": 16.0,
        "short_factor": [1.0] * 8, "long_factor": [3.0] * 8,
    }  # fmt: skip
    path = tiny("phi3", rope_parameters=longrope, original_max_position_embeddings=64)
    with pytest.raises(InputError, match="small random copy"):
        load_cascade_model(path)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounding_is_no_difference(tiny: TinyPath, dtype: str) -> None:
    """In half precision a token may go to other experts for the last digit alone."""
    assert load_model(tiny("qwen3_moe"), 4, device="cpu", dtype=dtype).engine == "packed"


def test_no_verdict_without_a_check(tiny: TinyPath, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers that overflow and memory that is full say nothing of a model."""
    model = load_model(tiny("llama"), 3, device="cpu")
    with monkeypatch.context() as patch:
        patch.setattr(
            TruncatedModel, "encode", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("full"))
        )
        with pytest.raises(torch.OutOfMemoryError):
            self_check.first_difference(model)
    with monkeypatch.context() as patch:
        patch.setattr(
            TruncatedModel, "forward_plain", lambda _, ids, **__: torch.full((*ids.shape, 64), torch.nan)
        )
        with pytest.raises(InputError, match="overflow in float32"):
            self_check.not_causal(model)
    other = load_model(tiny("llama", seed=1), 3, device="cpu")
    assert choice.fingerprint(model.module) != choice.fingerprint(other.module)


@pytest.mark.parametrize("architecture", ["roberta", "albert", *slow_cases("distilbert", "xlm-roberta")])
def test_encoders_are_sharded_whatever_they_number(architecture: str, tmp_path: Path) -> None:
    """RoBERTa counts positions from behind its padding; Albert's layers have no numbers, as they are one layer."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    build_twin(CONFIG_MAPPING[architecture]()).save_pretrained(tmp_path)
    model = load_cascade_model(str(tmp_path))
    cascade = LocalCascade(model)
    tokens = IDS + 8
    with torch.inference_mode(), attending(model, "eager"):
        expected = model(input_ids=tokens[None]).last_hidden_state[0]
    close(cascade.forward(tokens, Plan.clustered(len(tokens), 2, alpha=2)), expected)
    if "roberta" in architecture:
        padding, places = model.config.pad_token_id, model.config.max_position_embeddings
        assert cascade.facts.padding == padding
        assert cascade.facts.context == places - padding - 1
        with pytest.raises(InputError, match=f"token {padding} is padding"):
            cascade.forward(
                torch.cat([tokens, torch.tensor([padding])]), Plan.clustered(len(tokens) + 1, 2, alpha=2)
            )


def test_a_model_that_attends_by_itself_is_named(tmp_path: Path) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    build_twin(CONFIG_MAPPING["rembert"]()).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="attends by code of its own"):
        load_cascade_model(str(tmp_path))
