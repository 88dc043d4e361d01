"""The attacker's corpus, what a probe learns from it, and the cache of trained probes."""

import math
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from hiddenlab.channels import Channel
from hiddenlab.models import TruncatedModel, load_model
from hiddenlab.proposals import probe as probe_module
from hiddenlab.proposals import store
from hiddenlab.proposals.corpus import MIN_CHARS, WINDOW_LENGTHS, Corpus, standard_library_texts
from hiddenlab.proposals.probe import (
    Probe,
    ProbeSettings,
    train_probe,
    whitened_table,
    whitening,
)
from hiddenlab.testing import VOCABULARY, WIDTH
from hiddenlab.types import ObservationInfo

LoadModel = Callable[..., TruncatedModel]
TinyPath = Callable[..., str]
QUICK = ProbeSettings(steps=150, batch=128, negatives=VOCABULARY, hidden=64)


# ---- corpus


@pytest.fixture(scope="module")
def spoken(tiny: TinyPath) -> TruncatedModel:
    return load_model(tiny("gemma2", tokenizer=True), 2, device="cpu")


def test_the_standard_library_has_texts_enough() -> None:
    texts = standard_library_texts()
    assert len(texts) > 500
    assert min(map(len, texts)) >= MIN_CHARS


@pytest.mark.slow
def test_windows_are_seeded_valid_and_varied(spoken: TruncatedModel) -> None:
    one, again, other = (
        [w.tolist() for w in islice(Corpus(spoken, s).windows(10**9), 400)] for s in (0, 0, 1)
    )
    assert one == again != other
    lengths = {len(window) for window in one}
    assert min(lengths) == 1
    assert max(lengths) == max(WINDOW_LENGTHS)
    flat = [token for window in one for token in window]
    assert min(flat) >= 0
    assert max(flat) < VOCABULARY
    # Running text holds bytes only; random tokens cover the rest of the vocabulary.
    assert set(range(258, VOCABULARY)) <= set(flat)
    assert sum(token < 256 for token in flat) > 0.7 * len(flat)
    # Openings, and repeats of the first token, are drawn on purpose: attention sinks sit there.
    assert sum(len(window) <= 6 for window in one) > 100
    assert sum(len(window) > 1 and window[0] == window[1] for window in one) > 20


def test_text_windows_are_readable_text(spoken: TruncatedModel) -> None:
    corpus = Corpus(spoken)
    texts = [spoken.text(corpus.text_window(64).tolist()) for _ in range(20)]
    assert sum(" " in text and text.isascii() for text in texts) > 15
    assert all(1 <= len(corpus.text_window(n)) <= n for n in (1, 2, 24))


def test_windows_hold_as_many_tokens_as_asked(spoken: TruncatedModel) -> None:
    sizes = [len(window) for window in Corpus(spoken).windows(500)]
    assert sum(sizes) >= 500 > sum(sizes[:-1])


def test_without_a_tokenizer_windows_are_random(tiny_model: LoadModel) -> None:
    corpus = Corpus(tiny_model("llama", 2))
    counts = torch.bincount(torch.cat(list(corpus.windows(20_000))), minlength=VOCABULARY)
    assert int(counts.min()) > 20
    assert int(counts.max()) < 300


# ---- training


def states_of(model: TruncatedModel, tokens: int, seed: int) -> tuple[Tensor, Tensor]:
    states, labels, _ = store.collect_states(model, [], tokens, seed)
    return states, labels


def mean_rank(probe: Probe, rows: Tensor, tokens: Tensor) -> float:
    scores = probe.log_probs(rows)
    return float((scores > scores.gather(1, tokens[:, None])).sum(1).float().mean())


@pytest.mark.parametrize("permuted", [False, True])
def test_training_brings_the_right_token_forward(tiny_model: LoadModel, permuted: bool) -> None:
    model = tiny_model("gpt_neox", 1) if permuted else tiny_model("gemma2", 2)
    settings = ProbeSettings(permuted, steps=150, batch=256, negatives=VOCABULARY, hidden=128)
    rows, tokens = states_of(model, 3000, 0)
    fresh, right = states_of(model, 500, 1)
    seen: list[tuple[str, int, int]] = []
    probe = train_probe(rows, tokens, model.embedding.clone(), settings, lambda *step: seen.append(step))
    if permuted:
        fresh = torch.stack([row[torch.randperm(WIDTH)] for row in fresh])
    rank = mean_rank(probe, fresh, right)
    assert rank < (60 if permuted else 2)  # by chance it would be 150
    # Log-probabilities, and progress that ends at its end.
    assert torch.allclose(probe.log_probs(fresh).exp().sum(1), torch.ones(len(fresh)), atol=1e-4)
    done = [step for _, step, _ in seen]
    assert done == sorted(done)
    assert seen[-1][1] == seen[-1][2]


def test_the_training_texts_own_prior_is_left_out() -> None:
    """Rows that say nothing: all that can be learned is how frequent tokens are."""
    table = torch.randn(VOCABULARY, WIDTH)
    rows = torch.randn(4000, WIDTH)
    tokens = torch.randint(0, VOCABULARY, (4000,)).where(torch.rand(4000) < 0.5, 7)

    def share(prior: float) -> float:
        settings = ProbeSettings(steps=150, batch=256, negatives=VOCABULARY, prior=prior)
        return float(train_probe(rows, tokens, table, settings).log_probs(rows).exp()[:, 7].mean())

    assert share(0.0) > 0.1
    assert share(1.0) < 0.02  # by chance 1 in 300


def test_whitening(tiny_model: LoadModel) -> None:
    table = tiny_model("llama", 1).embedding.clone()
    table[:, 0] *= 50
    mean, matrix = whitening(table)
    white = (table - mean) @ matrix
    assert torch.allclose(torch.cov(white.T), torch.eye(WIDTH), atol=1e-2)
    assert torch.allclose(whitened_table(table, mean, matrix).norm(dim=1), torch.ones(VOCABULARY))


def test_rows_of_very_different_norm_get_their_own_map() -> None:
    """Attention sinks: the same tokens, hundreds of times larger and turned."""
    table = torch.randn(VOCABULARY, WIDTH)
    tokens = torch.randint(0, VOCABULARY, (4000,))
    turn = torch.linalg.qr(torch.randn(WIDTH, WIDTH)).Q
    sink = torch.rand(4000) < 0.2
    rows = table[tokens] + 0.1 * torch.randn(4000, WIDTH)
    rows[sink] = 300 * rows[sink] @ turn
    probe = train_probe(rows, tokens, table, QUICK)
    assert len(probe.experts) == 2
    assert torch.equal(probe.group(rows), sink)
    for part in (sink, ~sink):
        assert mean_rank(probe, rows[part], tokens[part]) < 1
    one = train_probe(rows[~sink], tokens[~sink], table, QUICK)
    assert len(one.experts) == 1
    assert one.border == math.inf
    assert not bool(one.group(rows[~sink]).any())


@pytest.fixture(scope="module")
def trained(tiny_model: LoadModel) -> Probe:
    model = tiny_model("gemma2", 2)
    rows, tokens = states_of(model, 4000, 0)
    return train_probe(rows, tokens, model.embedding.clone(), QUICK)


def test_tensors_rebuild_the_probe(trained: Probe, tiny_model: LoadModel) -> None:
    model = tiny_model("gemma2", 2)
    rows, _ = states_of(model, 200, 3)
    again = Probe.from_tensors(QUICK, trained.tensors()).with_table(model.embedding)
    assert torch.equal(again.log_probs(rows), trained.log_probs(rows))


@pytest.mark.parametrize("k", [1, 8, 32, VOCABULARY, 10 * VOCABULARY])
def test_shortlists_are_the_best_of_the_vocabulary(trained: Probe, tiny_model: LoadModel, k: int) -> None:
    model = tiny_model("gemma2", 2)
    trained.with_table(model.embedding)
    rows, _ = states_of(model, 400, 3)
    scores, ids = trained.shortlist(rows, k)
    k = min(k, VOCABULARY)
    assert scores.shape == ids.shape == (len(rows), k)
    assert torch.equal(scores, scores.sort(dim=1, descending=True).values)
    assert torch.allclose(scores.exp().sum(1), torch.ones(len(rows)), atol=1e-3)
    assert all(len(set(row)) == k for row in ids.tolist())
    assert int(ids.min()) >= 0
    assert int(ids.max()) < VOCABULARY
    expected = trained.log_probs(rows).topk(k, dim=1).indices
    common = sum(len(set(a) & set(b)) for a, b in zip(ids.tolist(), expected.tolist(), strict=True))
    assert common > 0.97 * expected.numel()  # bfloat16 may swap neighbours at the border


def test_a_screen_keeps_the_right_tokens_in_the_shortlist(monkeypatch: pytest.MonkeyPatch) -> None:
    """A projection draws the shortlist; what it lets through is scored exactly."""
    table = torch.randn(4000, 256)
    mean, matrix = whitening(table)
    tokens = torch.randint(0, 4000, (500,))
    rows = table[tokens] + 0.5 * torch.randn(500, 256)
    probe = train_probe(rows, tokens, table, ProbeSettings(steps=2, batch=64, negatives=64))
    assert torch.allclose(probe.mean, mean) and torch.allclose(probe.matrix, matrix, atol=1e-4)
    assert probe.screen is not None
    screened = probe.shortlist(rows, 32)
    probe.screen = None
    exact = probe.with_table(table).shortlist(rows, 8)
    found = [set(a) for a in screened[1].tolist()]
    recall = sum(row[0] in seen for row, seen in zip(exact[1].tolist(), found, strict=True)) / len(rows)
    assert recall > 0.95
    agree = exact[1][:, 0] == screened[1][:, 0]
    assert float(agree.float().mean()) > 0.95
    # Directions that hold all predictions change nothing.
    monkeypatch.setattr(probe_module, "SCREEN_WIDTH", 255)
    wide = probe.screened_by(rows).with_table(table).shortlist(rows, 8)
    common = sum(len(set(a) & set(b)) for a, b in zip(wide[1].tolist(), exact[1].tolist(), strict=True))
    assert common > 0.97 * exact[1].numel()  # where the processor has bfloat16, near ones may swap places


# ---- cache


def public_of(model: TruncatedModel, *specs: str) -> ObservationInfo:
    channel = Channel.parse(specs)
    return channel.release(model, [1, 2, 3], torch.Generator().manual_seed(0))[0].info


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_probes: None) -> Path:
    monkeypatch.setenv("HIDDENLAB_CACHE", str(tmp_path))
    return tmp_path / "probes"


def test_a_trained_probe_is_kept(cache: Path, tiny_model: LoadModel) -> None:
    model = tiny_model("gemma2", 2)
    rows, _ = states_of(model, 200, 3)
    heard: list[str] = []
    first, seconds = store.probe_for(model, public_of(model), progress=lambda what, *_: heard.append(what))
    assert seconds > 0
    assert len(set(heard)) == 2
    assert [path.suffix for path in cache.iterdir()] == [".safetensors"]
    heard.clear()
    # Mere permutations of rows do not change what a probe has to learn.
    second, again = store.probe_for(
        model, public_of(model, "seq-perm"), progress=lambda what, *_: heard.append(what)
    )
    assert again == 0
    assert not heard
    assert torch.equal(first.log_probs(rows), second.log_probs(rows))


@pytest.mark.slow
def test_what_changes_states_needs_a_probe_of_its_own(
    cache: Path, tiny_model: LoadModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama", 2)
    cases: list[tuple[TruncatedModel, tuple[str, ...]]] = [
        (model, ()),
        (model, ("hidden-perm",)),
        (model, ("gaussian:sigma=0.1",)),
        (model, ("gaussian:sigma=0.2",)),
        (model, ("random-prefix",)),
        (tiny_model("llama", 3), ()),
        (tiny_model("mistral", 2), ()),
    ]
    with monkeypatch.context() as patch:
        patch.setattr(
            store, "probe_settings", lambda permuted: ProbeSettings(permuted, 3, 32, negatives=30, hidden=8)
        )
        for own, specs in cases:
            before = len(list(cache.glob("*"))) if cache.exists() else 0
            probe, seconds = store.probe_for(own, public_of(own, *specs))
            # Behind permuted columns with a table of states behind texts.
            new = 2 if "hidden-perm" in specs else 1
            assert (seconds > 0, len(list(cache.iterdir()))) == (True, before + new), specs
            assert probe.settings.sorted_states == ("hidden-perm" in specs)
        assert store.probe_for(model, public_of(model, "2d-perm"))[1] == 0
        assert store.probe_for(model, public_of(model, "seq-perm", "gaussian:sigma=0.1"))[1] == 0


@pytest.mark.slow
def test_a_finetuned_model_is_another_model(cache: Path, tiny: TinyPath, tmp_path: Path) -> None:
    """Fine-tuning often leaves the embeddings as they were."""
    store.probe_for(truncated := load_model(tiny("llama"), 2, device="cpu"), public_of(truncated))
    model = AutoModelForCausalLM.from_pretrained(tiny("llama"))
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight += 0.3 * torch.randn(128, WIDTH)
    model.save_pretrained(tmp_path / "tuned")
    tuned = load_model(str(tmp_path / "tuned"), 2, device="cpu")
    assert store.probe_for(tuned, public_of(tuned))[1] > 0


def test_a_damaged_file_is_trained_again(cache: Path, tiny_model: LoadModel) -> None:
    model = tiny_model("gemma2", 2)
    store.probe_for(model, public_of(model))
    (path,) = cache.iterdir()
    path.write_bytes(path.read_bytes()[:100])
    assert store.probe_for(model, public_of(model))[1] > 0
    assert store.probe_for(model, public_of(model))[1] == 0


def test_an_interrupted_training_leaves_nothing(cache: Path, tiny_model: LoadModel) -> None:
    model = tiny_model("gemma2", 2)

    def stop(what: str, done: int, total: int) -> None:
        if "training the" in what:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.probe_for(model, public_of(model), progress=stop)
    assert not cache.exists() or not list(cache.iterdir())


def test_a_training_that_was_stopped_goes_on_where_it_was(cache: Path, tiny_model: LoadModel) -> None:
    """In any number of parts, and with the probe of a training without a pause."""
    model = tiny_model("gemma2", 2)
    rows, _ = states_of(model, 200, 3)
    collected, trained = list[int](), list[int]()

    def stop(what: str, done: int, total: int) -> None:
        if what == "training the probe":
            trained.append(done)
            raise KeyboardInterrupt
        collected.append(done)

    parts = 0
    while parts < 1000:
        try:
            probe, seconds = store.probe_for(model, public_of(model), progress=stop)
            break
        except KeyboardInterrupt:
            parts += 1
    assert parts == len(trained) > 1 and trained == sorted(set(trained)) and not store._STOPPED
    assert collected == sorted(set(collected))  # once
    assert seconds > 0 and len(list(cache.iterdir())) == 1
    (path,) = cache.iterdir()
    path.unlink()
    at_once, _ = store.probe_for(model, public_of(model))
    assert torch.equal(probe.log_probs(rows), at_once.log_probs(rows))


def test_a_training_that_failed_begins_again(
    cache: Path, tiny_model: LoadModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("gemma2", 2)
    with monkeypatch.context() as patch:
        patch.setattr(probe_module, "sampled_softmax", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            store.probe_for(model, public_of(model))
    assert not store._STOPPED
    assert store.probe_for(model, public_of(model))[1] > 0


def test_training_states_are_those_of_the_channel(tiny_model: LoadModel) -> None:
    """Rows are put back in order, so that each stands beside its token."""
    model = tiny_model("gemma2", 2)
    plain = store.collect_states(model, [], 300, 0)
    shuffled = store.collect_states(model, ["seq-perm"], 300, 0)
    assert torch.equal(plain[1], shuffled[1])
    assert torch.allclose(plain[0], shuffled[0], atol=1e-5)
    assert torch.equal((plain[2] == 0).nonzero()[0], torch.tensor([0])) and int(plain[2].max()) > 5
    noised = store.collect_states(model, ["gaussian:sigma=0.1"], 300, 0)
    assert float((noised[0] - plain[0]).norm() / plain[0].norm()) > 0.01


@pytest.mark.slow
@pytest.mark.usefixtures("small_probes")
def test_probes_for_earlier_tokens(tiny: TinyPath, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A probe for earlier tokens knows them better than the one for own tokens; one collection of states serves all."""
    monkeypatch.setenv("HIDDENLAB_CACHE", str(tmp_path))
    model = load_model(tiny("llama"), 1, device="cpu")
    calls = []
    collect = store.collect_states
    monkeypatch.setattr(store, "collect_states", lambda *args: calls.append(args) or collect(*args))
    probes, seconds = store.probes_for(model, public_of(model), (0, 1))
    assert seconds > 0 and len(calls) == 1
    # In a random model a token among many leaves hardly a trace; among two it does.
    texts = torch.randint(0, VOCABULARY, (300, 2), generator=torch.Generator().manual_seed(5))
    rows = torch.cat([model.encode(text)[1:] for text in texts])
    own, before = texts[:, 1:].flatten(), texts[:, :-1].flatten()
    assert mean_rank(probes[0], rows, own) < 0.6 * mean_rank(probes[0], rows, before)
    assert mean_rank(probes[1], rows, before) < 0.9 * mean_rank(probes[0], rows, before)
    assert mean_rank(probes[1], rows, before) < 0.3 * VOCABULARY  # by chance half of them rank higher
    assert store.probes_for(model, public_of(model), (1,))[1] == 0 and len(calls) == 1


def test_the_training_allowance_depends_on_depth(monkeypatch: pytest.MonkeyPatch, tiny_model: Any) -> None:
    monkeypatch.setattr(store, "TRAINING_TOKENS", (10, 10**9))
    shallow, deep = (store.training_tokens(tiny_model("llama", layer)) for layer in (1, 4))
    assert shallow == pytest.approx(4 * deep, rel=0.01)
    monkeypatch.setattr(store, "TRAINING_TOKENS", (10, 500))
    assert store.training_tokens(tiny_model("llama", 1)) == 500
