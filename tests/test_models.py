"""The engine against its oracle: one full forward of the plain transformers model per candidate."""

import copy
import gc
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hiddenlab.errors import InputError
from hiddenlab.eval.bench import chains, kv_cache
from hiddenlab.models import Prefix, Request, TruncatedModel, engine, load_model
from hiddenlab.models.tokens import token_ids
from hiddenlab.prompts import Prompt
from hiddenlab.testing import DECODERS, LAYERS, VOCABULARY, WIDTH, WINDOW, PlainModel, byte_tokenizer

LoadModel = Callable[..., TruncatedModel]
TinyPath = Callable[..., str]
Plain = Callable[[str], PlainModel]

TOLERANCE = 1e-4
TOKEN = st.integers(0, VOCABULARY - 1)
LONG = [17, 250, 3, 3, 99, 180, 41, 7, 256, 299, 0, 64, 3, 128, 77, 212, 5, 31]


@pytest.fixture(params=["each request", "one product"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small passes attend request by request, as on a CPU, and as one product, as on a card."""
    if request.param == "one product":
        monkeypatch.setattr(engine, "DENSE_DEVICES", frozenset({"cpu"}))


@pytest.fixture(scope="session")
def plain(tiny: TinyPath) -> Plain:
    loaded: dict[str, PlainModel] = {}

    def load(architecture: str) -> PlainModel:
        if architecture not in loaded:
            loaded[architecture] = PlainModel(tiny(architecture))
        return loaded[architecture]

    return load


def ids(tokens: Iterable[int]) -> Tensor:
    return torch.tensor(list(tokens), dtype=torch.long)


def close(actual: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> None:
    assert actual.shape == expected.shape
    assert torch.isfinite(actual).all()
    if actual.numel():
        assert float((actual - expected).abs().max()) < tolerance


# ---- one prefill


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("architecture", DECODERS)
def test_encode_is_the_plain_model_at_every_layer(
    tiny_model: LoadModel, plain: Plain, architecture: str
) -> None:
    for layer in range(1, LAYERS + 1):
        close(tiny_model(architecture, layer).encode(ids(LONG)), plain(architecture).states(LONG, layer))
    for stream in ("final_norm", "logits"):
        expected = plain(architecture).states(LONG, LAYERS, stream)
        close(tiny_model(architecture, LAYERS, stream).encode(ids(LONG)), expected)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("architecture", DECODERS)
def test_embeddings_in_place_of_tokens_give_the_same(
    tiny_model: LoadModel, plain: Plain, architecture: str
) -> None:
    model = tiny_model(architecture, 3)
    embedded = model.embed(ids(LONG))
    assert embedded.shape == (len(LONG), WIDTH)
    close(model.encode(embedded), model.encode(ids(LONG)), 1e-5)
    noised = embedded + 0.3 * torch.randn_like(embedded)
    if architecture.startswith("gemma"):
        return  # the plain model's embeddings as input are scaled by the caller, as model.embed does
    close(model.encode(noised), plain(architecture).states(noised, 3))


@pytest.mark.parametrize("architecture", ["gemma2", "gemma3_text", "mistral"])
def test_tiny_windows_and_caps_matter(tiny: TinyPath, tiny_model: LoadModel, architecture: str) -> None:
    """Else the tests above would pass without them."""
    states = tiny_model(architecture, 3).encode(ids(LONG))
    unlimited = load_model(tiny(architecture, sliding_window=400), 3, device="cpu").encode(ids(LONG))
    close(states[:WINDOW], unlimited[:WINDOW])
    assert float((states - unlimited).abs().max()) > 1
    if architecture == "gemma2":
        uncapped = load_model(tiny(architecture, attn_logit_softcapping=None), 3, device="cpu")
        assert float((states - uncapped.encode(ids(LONG))).abs().max()) > 1


def test_only_the_first_layers_are_in_memory(tiny_model: LoadModel) -> None:
    def weights(model: TruncatedModel) -> int:
        return sum(p.numel() for p in model.module.parameters())

    sizes = [weights(tiny_model("llama", layer)) for layer in (1, 2, 3)]
    assert sizes[2] - sizes[1] == sizes[1] - sizes[0] > 0
    # No head beside the embedding, save for the logits.
    model, head = tiny_model("llama", LAYERS), tiny_model("llama", LAYERS, "logits")
    assert weights(head) - weights(model) == model.embedding.numel()


# ---- trees of candidates


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("architecture", DECODERS)
@pytest.mark.parametrize("layer", [1, LAYERS])
def test_branch_is_one_full_forward_per_candidate(
    tiny_model: LoadModel, plain: Plain, architecture: str, layer: int
) -> None:
    model, oracle = tiny_model(architecture, layer), plain(architecture)
    candidates = [0, 3, 256, 299, 41, 41, 120]
    for before in (LONG, LONG[:2], []):
        prefix = model.prefix()
        if before:
            close(prefix.extend(ids(before)), oracle.states(before, layer))
        expected = torch.stack([oracle.states([*before, token], layer)[-1] for token in candidates])
        close(prefix.branch(ids(candidates)), expected)
        assert prefix.tokens == before


@dataclass
class Tree:
    """What one request asks for."""

    before: list[int]
    chain: list[int]
    branches: list[tuple[list[int], int]]  # (tokens, chain tokens before them)

    def check(self, chain: Tensor, branches: Tensor, oracle: PlainModel, layer: int) -> None:
        whole = self.before + self.chain
        if self.chain:
            close(chain, oracle.states(whole, layer)[len(self.before) :])
        rest = branches
        for tokens, parents in self.branches:
            states, rest = rest[: len(tokens)], rest[len(tokens) :]
            expected = oracle.states([*whole[: len(self.before) + parents], *tokens], layer)
            close(states, expected[-len(tokens) :])
        assert not len(rest)


@st.composite
def trees(draw: Any) -> Tree:
    before = draw(st.lists(TOKEN, max_size=3 * WINDOW))
    chain = draw(st.lists(TOKEN, max_size=2 * WINDOW))
    depth = draw(st.sampled_from([1, 1, 2, WINDOW + 1]))
    tokens = st.lists(TOKEN, min_size=depth, max_size=depth)
    branch = st.tuples(tokens, st.integers(0, len(chain)))
    branches = draw(st.lists(branch, min_size=0 if chain else 1, max_size=4))
    return Tree(before, chain, branches)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("architecture", DECODERS)
@settings(max_examples=12)
@given(forest=st.lists(trees(), min_size=1, max_size=3), layer=st.sampled_from([2, LAYERS]))
def test_packed_trees_of_several_prompts(
    tiny_model: LoadModel, plain: Plain, architecture: str, forest: list[Tree], layer: int
) -> None:
    model = tiny_model(architecture, layer)
    requests = []
    for tree in forest:
        prefix = model.prefix()
        if tree.before:
            prefix.extend(ids(tree.before))
        tokens = torch.tensor([t for t, _ in tree.branches], dtype=torch.long)
        if tokens.shape[-1] == 1:
            tokens = tokens[:, 0]  # both forms of a branch of one token
        parents = ids(a for _, a in tree.branches)
        requests.append(Request(prefix, ids(tree.chain), branches=tokens, parents=parents))
    counted = model.evaluated_tokens, model.forward_calls
    answers = model.run(requests)
    size = sum(len(tree.chain) + sum(len(t) for t, _ in tree.branches) for tree in forest)
    assert (model.evaluated_tokens, model.forward_calls) == (counted[0] + size, counted[1] + 1)
    for tree, answer in zip(forest, answers, strict=True):
        tree.check(answer.states, answer.branches, plain(architecture), layer)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("architecture", DECODERS)
@settings(max_examples=6)
@given(
    prefixes=st.lists(st.lists(TOKEN, max_size=5), min_size=2, max_size=6),
    chains=st.lists(st.lists(TOKEN, min_size=1, max_size=6), min_size=6, max_size=6),
    equal=st.tuples(st.integers(0, 5), st.integers(1, 4)),
    small=st.booleans(),
)
def test_short_chains_attend_together(
    tiny_model: LoadModel,
    plain: Plain,
    architecture: str,
    prefixes: list[list[int]],
    chains: list[list[int]],
    equal: tuple[int, int],
    small: bool,
) -> None:
    """Those of one length behind prefixes of one length, between others; what they leave behind is kept."""
    model, oracle, requests = tiny_model(architecture, 3), plain(architecture), []
    before, after = equal
    cases = []
    for prefix, chain in zip(prefixes, chains, strict=False):
        held = [1, 2, 3, 4, 5, *prefix]
        cases.append((held[len(held) - before :], (chain + [9] * after)[:after]))
    cases += list(zip(prefixes, chains, strict=False))
    for held, chain in cases:
        prefix = model.prefix()
        if held:
            prefix.extend(ids(held))
        requests.append(Request(prefix, ids(chain)))
    with pytest.MonkeyPatch.context() as patch:
        if small:
            patch.setattr("hiddenlab.models.packed_attention.SCORE_ELEMENTS", 1)
        answers = model.run(requests, together=True)
    for (held, chain), request, answer in zip(cases, requests, answers, strict=True):
        close(answer.states, oracle.states(held + chain, 3)[len(held) :])
        request.prefix.keep(answer, tokens=len(chain))
        close(request.prefix.branch(ids([7]))[0], oracle.states([*held, *chain, 7], 3)[-1])


def test_bench_of_candidates_with_and_without_a_cache(tiny: TinyPath) -> None:
    made = kv_cache.bench(model=tiny("llama"), layer=2, limit=4, max_tokens=6, repeats=1)
    assert [row["tokens_found"] for row in made["rows"]] == [0, 1, 2, 3, 5, "all"]
    assert all(row["times"] == row["seconds_whole"] / row["seconds_cached"] for row in made["rows"])
    model = load_model(tiny("llama"), 2, device="cpu")
    found, candidates = torch.tensor([5, 80, 7]), torch.tensor([3, 299, 7])
    prefix = model.prefix()
    prefix.extend(found)
    both = kv_cache.behind(prefix, candidates), kv_cache.as_sequences(model, found, candidates)
    assert torch.allclose(*both, atol=1e-5)
    with pytest.raises(InputError, match="max_tokens at least 5"):
        kv_cache.bench(model=tiny("llama"), max_tokens=4)
    with pytest.raises(InputError, match="reads at most"):
        kv_cache.bench(model=tiny("llama"), layer=2, max_tokens=100_000)


def test_bench_of_chains(tiny: TinyPath) -> None:
    made = chains.bench(model=tiny("llama"), limit=5, max_tokens=3, repeats=1)
    (row,) = made["rows"]
    assert (row["hypotheses"], row["prefix"]) == (5, 3)
    assert row["apart_over_together"] == row["seconds_apart"] / row["seconds_together"] > 0
    with pytest.raises(InputError, match="at least 1"):
        chains.bench(model=tiny("llama"), repeats=0)
    with pytest.raises(InputError, match="reads at most"):
        chains.bench(model=tiny("llama"), max_tokens=100_000)


Step = tuple[str, list[int], int]


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("architecture", DECODERS)
@settings(max_examples=15)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["extend", "commit", "look", "keep", "keep chain"]),
            st.lists(TOKEN, min_size=1, max_size=6),
            st.integers(0, 5),
        ),
        min_size=2,
        max_size=6,
    )
)
def test_any_way_of_growing_a_prefix(
    tiny_model: LoadModel, plain: Plain, architecture: str, steps: list[Step]
) -> None:
    model, prefix, oracle = (
        tiny_model(architecture, 3),
        tiny_model(architecture, 3).prefix(),
        plain(architecture),
    )
    held: list[int] = []
    for what, tokens, pick in steps:
        pick %= len(tokens)
        if what == "extend":
            close(prefix.extend(ids(tokens)), oracle.states(held + tokens, 3)[len(held) :])
            held += tokens
        elif what.startswith("keep"):
            # The first tokens of a chain, and perhaps a branch where the chain was left.
            branches = torch.tensor([[7, 8], [tokens[pick], 9]])
            request = Request(prefix, ids(tokens), branches=branches, parents=ids([pick, pick]))
            prefix.keep(model.run([request])[0], tokens=pick, branch=1 if what == "keep" else None)
            held += tokens[:pick] + ([tokens[pick], 9] if what == "keep" else [])
        else:
            states = prefix.branch(ids(tokens))
            close(states[pick], oracle.states([*held, tokens[pick]], 3)[-1])
            if what == "commit":
                prefix.commit(pick)
                held.append(tokens[pick])
        assert prefix.tokens == held
        assert prefix.length == len(held)
    expected = oracle.states([*held, 9], 3)[-1]
    close(prefix.branch(ids([9]))[0], expected)


@pytest.mark.usefixtures("way")
def test_more_candidates_than_one_pass_holds(tiny_model: LoadModel, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("gemma2", 3)
    prefix, candidates = model.prefix(), torch.arange(100)
    prefix.extend(ids(LONG))
    whole = prefix.branch(candidates)
    monkeypatch.setattr(model, "max_pass_tokens", 32)
    close(prefix.branch(candidates), whole, 1e-5)
    prefix.commit(77)
    assert prefix.tokens == [*LONG, 77]
    close(prefix.branch(ids([5]))[0], model.encode(ids([*LONG, 77, 5]))[-1])


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt2"])
def test_scores_in_small_chunks_are_the_same(
    tiny_model: LoadModel, monkeypatch: pytest.MonkeyPatch, architecture: str
) -> None:
    model = tiny_model(architecture, 3)
    whole = model.encode(ids(LONG))
    monkeypatch.setattr("hiddenlab.models.packed_attention.SCORE_ELEMENTS", 3 * 4 * (len(LONG) + 1))
    close(model.encode(ids(LONG)), whole, 1e-5)


@pytest.mark.usefixtures("way")
def test_positions_start_after_an_unknown_prefix(tiny_model: LoadModel, plain: Plain) -> None:
    """Learned positions (gpt2) show the offset; its own state and keys are unknown and take no part."""
    truncated, model = tiny_model("gpt2", 2), plain("gpt2").model
    prefix = truncated.prefix(offset=1)
    states = torch.cat([prefix.extend(ids(LONG[:-1])), prefix.branch(ids(LONG[-1:]))])
    with torch.no_grad():
        positions = torch.arange(1, len(LONG) + 1)[None]
        output = model(ids(LONG)[None], position_ids=positions, output_hidden_states=True)
    close(states, output.hidden_states[2][0])
    assert float((states - truncated.encode(ids(LONG))).abs().max()) > 0.01


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt_neox"])
def test_gradients_reach_the_embeddings(tiny_model: LoadModel, plain: Plain, architecture: str) -> None:
    model, oracle = tiny_model(architecture, 3), plain(architecture).model
    given_, expected = (model.embed(ids(LONG)).clone().requires_grad_() for _ in range(2))
    weight = torch.randn(len(LONG), WIDTH)
    answer = model.run([Request(model.prefix(), given_)], keep=False, grad=True)[0]
    (answer.states * weight).sum().backward()
    inputs = expected[None]
    output = oracle(inputs_embeds=inputs, output_hidden_states=True, use_cache=False)
    (output.hidden_states[3][0] * weight).sum().backward()
    assert given_.grad is not None and expected.grad is not None
    close(given_.grad / expected.grad.norm(), expected.grad / expected.grad.norm(), 1e-5)


# ---- memory


class LargestTensor(TorchDispatchMode):
    """Notes the largest tensor that any operation gives; an expanded view counts as large as it looks."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for one in out if isinstance(out, tuple | list) else [out]:
            if isinstance(one, Tensor) and one.numel() > self.largest:
                self.largest = one.numel()
        return out


def largest_of_branch(model: TruncatedModel, prefix: int, candidates: int) -> int:
    held = model.prefix()
    held.extend(torch.randint(0, VOCABULARY, (prefix,)))
    tokens = torch.randint(0, VOCABULARY, (candidates,))
    with LargestTensor() as seen:
        held.branch(tokens)
    return seen.largest


def test_branch_holds_nothing_that_grows_with_candidates_times_prefix(
    tiny_model: LoadModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, many = tiny_model("llama", 2), 8192
    monkeypatch.setattr(model, "max_pass_tokens", many)
    states = many * model.module.config.intermediate_size  # the widest activation of so many tokens
    # As shipped, the scores are bounded by a constant …
    assert largest_of_branch(model, 400, many) <= 1 << 22 < many * 4 * 400
    # … and with a small constant nothing depends on the prefix at all.
    monkeypatch.setattr("hiddenlab.models.packed_attention.SCORE_ELEMENTS", states // 2)
    short, long = (largest_of_branch(model, prefix, many) for prefix in (50, 200))
    assert short == long <= states
    # Passes of the usual size bound even the activations.
    monkeypatch.setattr(model, "max_pass_tokens", 1024)
    assert largest_of_branch(model, 200, 2048) == largest_of_branch(model, 200, 1024)


def test_one_product_is_for_passes_with_few_scores(
    tiny_model: LoadModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """heads × tokens × keys scores, at most DENSE_ELEMENTS; a larger pass attends in chunks of SCORE_ELEMENTS."""
    model, heads, prefix, most = tiny_model("llama", 2), 4, 300, 1 << 20
    monkeypatch.setattr(engine, "DENSE_DEVICES", frozenset({"cpu"}))
    monkeypatch.setattr(engine, "DENSE_ELEMENTS", most)
    monkeypatch.setattr("hiddenlab.models.packed_attention.SCORE_ELEMENTS", most // 4)
    fits, exceeds = 380, 400
    assert heads * fits * (prefix + fits) <= most < heads * exceeds * (prefix + exceeds)
    assert largest_of_branch(model, prefix, fits) == heads * fits * (prefix + fits)
    assert largest_of_branch(model, prefix, exceeds) <= most // 4


def test_prefix_keys_and_values_are_views(tiny_model: LoadModel) -> None:
    model = tiny_model("llama", 2)
    prefix = model.prefix()
    prefix.extend(ids(LONG))

    def places() -> list[int]:
        return [part.data_ptr() for layer in range(2) for part in prefix.store.view(layer)]

    before = places()
    assert before == places()
    keys, values = prefix.store.view(0)
    assert keys.shape == values.shape == (2, len(LONG), WIDTH // 4)
    prefix.branch(torch.arange(50))
    prefix.commit(7)
    prefix.extend(ids(LONG))
    assert places() == before  # written after what was there, which stayed where it was
    # A branch hands over no keys or values of the prefix: its own are as many as its candidates.
    answer = model.run([Request(prefix, ids([]), branches=torch.arange(5))])[0]
    own = answer.keys_values(0, torch.arange(5))[0]
    assert own.shape == (2, 5, WIDTH // 4)


# ---- dtypes, placement


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.05), ("float16", 0.01)])
@pytest.mark.parametrize("architecture", DECODERS)
def test_half_precision(
    tiny: TinyPath, plain: Plain, architecture: str, dtype: str, tolerance: float
) -> None:
    model = load_model(tiny(architecture), 2, dtype=dtype, device="cpu")
    prefix = model.prefix()
    states = torch.cat([prefix.extend(ids(LONG[:-1])), prefix.branch(ids(LONG[-1:]))])
    assert str(states.dtype) == f"torch.{dtype}"
    expected = plain(architecture).states(LONG, 2)
    assert float((states.float() - expected).norm() / expected.norm()) < tolerance


def test_device_map_of_accelerate(tiny: TinyPath, plain: Plain) -> None:
    model = load_model(tiny("llama"), 3, device_map="auto", device="cpu")
    close(model.encode(ids(LONG)), plain("llama").states(LONG, 3))


def test_the_signature_tells_models_apart_and_not_dtypes(tiny: TinyPath) -> None:
    first, half = (load_model(tiny("llama"), 1, dtype=dtype) for dtype in ("float32", "bfloat16"))
    other = load_model(tiny("llama", 1), 1)
    assert first.signature == half.signature != other.signature


# ---- tokens and text


def test_tokens_and_text(tiny: TinyPath) -> None:
    model = load_model(tiny("llama", tokenizer=True), 1)
    text = "  hé\n\nx\t~"
    assert model.text(model.tokenize(text)) == text
    assert model.tokenize(text, max_tokens=3) == model.tokenize(text)[:3]
    assert model.special_ids == [256, 257]
    with pytest.raises(InputError, match="empty"):
        model.tokenize("")


def test_messages_go_through_the_chat_template() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
        "<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    asked = {"role": "user", "content": "é?"}
    chat = Prompt("p001", "é?", "s", messages=(asked,))
    text = tokenizer.decode(token_ids(tokenizer, chat, "m"))
    assert text == "<s><user>é?<assistant>"
    assert token_ids(tokenizer, chat, "m")[0] == 256  # a control token, and none put before it
    answered = replace(chat, messages=(asked, {"role": "assistant", "content": "!"}))
    assert tokenizer.decode(token_ids(tokenizer, answered, "m")) == "<s><user>é?<assistant>!"
    assert token_ids(tokenizer, chat, "m", most=2) == token_ids(tokenizer, chat, "m")[:2]
    with pytest.raises(InputError, match=r"template of m refuses the messages of prompt p001 \(no tools\)"):
        token_ids(tokenizer, replace(chat, messages=({"role": "tool", "content": "x"},)), "m")
    with pytest.raises(
        InputError, match="m has no chat template for the messages of prompt p001; use --no-template"
    ):
        token_ids(byte_tokenizer(), chat, "m")
    assert tokenizer.decode(token_ids(tokenizer, replace(chat, messages=None), "m")) == "é?"


def test_token_ids_need_no_tokenizer(tiny_model: LoadModel) -> None:
    model, prompt = tiny_model("llama", 1), Prompt("p001", "5 7", "s", tokens=(5, 7))
    assert model.tokenizer is None and model.tokenize(prompt) == [5, 7]
    with pytest.raises(InputError, match=f"p001 holds the token id {model.vocab_size}, and .* tokens"):
        model.tokenize(replace(prompt, tokens=(5, model.vocab_size)))


@pytest.mark.parametrize("architecture", DECODERS)
def test_a_model_without_tokenizer_files_has_no_tokenizer(tiny_model: LoadModel, architecture: str) -> None:
    """transformers makes an empty one up for some architectures, which reads every text as nothing."""
    model = tiny_model(architecture, 1)
    assert model.special_ids == [256, 257]
    with pytest.raises(InputError, match="no tokenizer"):
        model.tokenize("hello")


# ---- queries, keys and values


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("architecture", DECODERS)
def test_keys_and_values_are_those_of_the_plain_models_cache(
    tiny_model: LoadModel, plain: Plain, architecture: str
) -> None:
    with torch.no_grad():
        cache = plain(architecture).model(input_ids=ids(LONG)[None], use_cache=True).past_key_values
    for layer in (1, LAYERS):
        for stream, kept in (("k", cache.layers[layer - 1].keys), ("v", cache.layers[layer - 1].values)):
            # A sliding window's cache holds no more than the window needs.
            expected = kept[0].transpose(0, 1).flatten(1)
            actual = tiny_model(architecture, layer, stream).encode(ids(LONG))
            close(actual[-len(expected) :], expected)


@pytest.mark.parametrize("stream", ["kv", "qkv"])
def test_queries_keys_and_values_side_by_side(tiny_model: LoadModel, stream: str) -> None:
    parts = [tiny_model("gemma2", 2, one).encode(ids(LONG)) for one in stream]
    close(tiny_model("gemma2", 2, stream).encode(ids(LONG)), torch.cat(parts, 1))


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("stream", ["q", "k", "v", "kv", "qkv", "attn"])
def test_inner_streams_of_alternatives(tiny_model: LoadModel, stream: str) -> None:
    model = tiny_model("gemma2", 3, stream)
    assert model.width == model.encode(ids(LONG)).shape[1]
    prefix = model.prefix()
    prefix.extend(ids(LONG[:5]))
    expected = torch.stack([model.encode(ids([*LONG[:5], token]))[-1] for token in (3, 200, 299)])
    close(prefix.branch(ids([3, 200, 299])), expected)


# ---- wrong input


def refused(match: str, *args: Any, **options: Any) -> None:
    with pytest.raises(InputError, match=match) as caught:
        load_model(*args, **options)
    assert "\n" not in str(caught.value)


def test_an_encoder_only_model_is_refused(tiny: TinyPath) -> None:
    refused("bidirectional", tiny("bert"), 2)


@pytest.mark.parametrize("layer", [0, -1, LAYERS + 1])
def test_layers_out_of_range(tiny: TinyPath, layer: int) -> None:
    refused(f"layer {layer} is out of range.*1 to {LAYERS}", tiny("llama"), layer)


def test_streams_after_the_last_layer_only(tiny: TinyPath) -> None:
    for stream in ("final_norm", "logits"):
        refused("only after the last layer, 4", tiny("llama"), 2, stream=stream)
    refused("unknown stream 'cheese'", tiny("llama"), LAYERS, stream="cheese")


def test_unknown_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    refused("no model at './nowhere'", "./nowhere", 1)
    refused("cannot find or read the model 'nobody/nothing'", "nobody/nothing", 1)
    refused("no config.json", str(tmp_path), 1)
    (tmp_path / "model.bin").write_bytes(b"x")
    refused("no .gguf", str(tmp_path / "model.bin"), 1)


def test_damaged_models(tiny: TinyPath, tmp_path: Path) -> None:
    source = Path(tiny("llama"))
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    refused("cannot load the model", str(tmp_path), 1)
    weights = (source / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    refused("cannot read .*damaged or incomplete", str(tmp_path), 1)
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    refused("cannot read the config.json of", str(tmp_path), 1)


def test_unknown_options(tiny: TinyPath) -> None:
    refused("unknown dtype 'float8'", tiny("llama"), 1, dtype="float8")
    refused("unknown device 'tpu9'", tiny("llama"), 1, device="tpu9")
    refused("unknown quantization 'int3'", tiny("llama"), 1, quantization="int3")


def test_a_model_is_not_called_directly(tiny_model: LoadModel) -> None:
    with pytest.raises(RuntimeError, match=r"TruncatedModel\.run"):
        tiny_model("llama", 1).module(ids([1])[None])


def test_a_model_is_freed_at_once_and_can_be_copied(tiny: TinyPath) -> None:
    for stream in ("resid", "embed", "final_norm"):
        model = load_model(tiny("llama"), stream=stream, device="cpu")
        expected = model.encode(ids(LONG))
        weights = weakref.ref(model.module)
        copied = copy.deepcopy(model)
        gc.disable()  # nothing but the last reference frees it
        try:
            del model
            assert weights() is None
        finally:
            gc.enable()
        assert torch.equal(copied.encode(ids(LONG)), expected)


@pytest.mark.usefixtures("way")
def test_a_prompt_that_overflowed_spoils_no_other(tiny_model: LoadModel) -> None:
    model = tiny_model("llama", 2)
    clean, spoilt = model.embed(ids(LONG[:6])), model.embed(ids(LONG[6:12])).clone()
    spoilt[2] = float("nan")
    good, bad = model.run([Request(model.prefix(), one) for one in (clean, spoilt)])
    close(good.states, model.encode(ids(LONG[:6])), 1e-5)
    assert bad.states[2:].isnan().all()


@pytest.mark.usefixtures("way")
def test_prefixes_of_one_model_do_not_disturb_one_another(tiny_model: LoadModel) -> None:
    model = tiny_model("mistral", 2)
    prompts: Sequence[list[int]] = (LONG, LONG[::-1], [5] * 9)
    prefixes: list[Prefix] = [model.prefix() for _ in prompts]
    for i in range(9):
        answers = model.run([Request(p, ids([t[i]])) for p, t in zip(prefixes, prompts, strict=True)])
        for prefix, tokens, answer in zip(prefixes, prompts, answers, strict=True):
            prefix.keep(answer, tokens=1)
            close(answer.states[0], model.encode(ids(tokens[: i + 1]))[-1])
