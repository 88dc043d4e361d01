"""What a first prompt needs: the layers behind the observed ones, weights, rows that grow, and a clock that stands."""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from hiddenlab.attacks.vocab_match import VocabMatch
from hiddenlab.errors import InputError
from hiddenlab.matching.observed_context import likeliest_weights
from hiddenlab.models import TruncatedModel
from hiddenlab.models.rest import Rest, load_rest
from hiddenlab.proposals import regressions, ridge, store
from hiddenlab.proposals.corpus import Corpus
from hiddenlab.proposals.ridge import KnownRows, likeliest_scale
from hiddenlab.types import AttackResult, Observation, ObservationInfo
from hiddenlab.utils.clock import Clock, Rental
from tests.test_attack import random_prompts, release
from tests.test_probe import public_of

LoadModel = Callable[..., TruncatedModel]


# ---- the layers behind


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt2", "qwen3", "olmo2"])
@pytest.mark.parametrize("layer", [1, 2])
def test_the_last_layers_continue_states_as_the_whole_model(
    tiny: Callable[[str], str], tiny_model: LoadModel, architecture: str, layer: int
) -> None:
    model, whole = tiny_model(architecture, layer), tiny_model(architecture, None, "final_norm")
    (prompt,) = random_prompts(11)
    tokens = torch.tensor(prompt)
    rest = load_rest(model, "float32")
    assert isinstance(rest, Rest)
    states = rest.layers.encode(model.encode(tokens))
    assert torch.allclose(states, whole.encode(tokens), atol=1e-4)
    logits = tiny_model(architecture, None, "logits").encode(tokens)
    if architecture != "gemma2":  # which caps its scores; they only order candidates
        assert torch.allclose(rest.log_probs(states), logits.log_softmax(-1), atol=1e-4)
    ids = torch.arange(33).view(11, 3)
    some, all_of_them = rest.scores(states, ids), rest.log_probs(states).gather(1, ids)
    assert torch.allclose(some.diff(dim=1), all_of_them.diff(dim=1), atol=1e-4)
    table = model.module.get_input_embeddings().weight  # type: ignore[operator]
    assert rest.layers.embedding is table  # one table in memory
    left = [p for name, p in rest.layers.module.named_parameters() if ".0." in name]
    assert not left


def test_states_that_cannot_be_continued_are_not(tiny_model: LoadModel) -> None:
    assert load_rest(tiny_model("llama", 0, "embed"), "float32") is None
    assert load_rest(tiny_model("llama", 2, "k"), "float32") is None
    changed = tiny_model("llama", 2)
    changed.embeddings = False
    try:
        assert load_rest(changed, "float32") is None
    finally:
        changed.embeddings = True


@pytest.mark.slow
def test_a_search_reads_the_observed_rows(tiny_model: LoadModel, small_probes: None) -> None:
    model, prompts = tiny_model("llama", 2), random_prompts(*[12] * 6)
    observations = release(model, prompts)
    attack = VocabMatch(setup="full").fit(observations[0].info, model)
    assert attack._prepared is not None
    observed = attack._prepared.proposer.reader
    assert observed is not None and observed.rest is not None
    assert [result.ids for result in attack.recover_batch(observations)] == prompts
    assert observed.rest.layers.forward_calls > 0
    for channel in ("2d-perm", "seq-perm", "random-prefix"):
        (shown,) = release(model, prompts[:1], channel)
        other = VocabMatch(setup="full").fit(shown.info, model)
        assert other._prepared is not None and other._prepared.proposer.reader is None


# ---- weights and temperature


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_weights_are_the_likeliest(seed: int) -> None:
    tokens = torch.randint(30, (80,), generator=torch.Generator().manual_seed(seed))
    right = F.one_hot(tokens, 30).float()
    read, said = ((3 * drawn(80, 30, seed=seed + i) + (1 + 2 * i) * right).log_softmax(1) for i in (5, 6))

    def loss(a: float, b: float) -> float:
        return float(F.cross_entropy(a * read + b * said, tokens))

    found = likeliest_weights(read, said, tokens)
    grid = torch.linspace(0, 3, 61).tolist()
    assert loss(*found) <= min(loss(a, b) for a in grid for b in grid) + 1e-3


def test_a_language_model_that_says_nothing_has_no_weight() -> None:
    tokens = torch.arange(20)
    read = (5 * torch.eye(20) + drawn(20, 20, seed=1)).log_softmax(1)
    said = (9 * drawn(20, 20, seed=2)).log_softmax(1)
    assert likeliest_weights(read, said, tokens)[1] < 0.2


@given(st.floats(3, 300))
def test_a_scale_is_found_where_it_was_put(scale: float) -> None:
    cosines = F.normalize(drawn(400, 16, seed=3), dim=1) @ F.normalize(drawn(50, 16, seed=4), dim=1).T
    chances = (cosines * scale).softmax(1)
    tokens = torch.multinomial(chances, 1, generator=torch.Generator().manual_seed(5))[:, 0]
    found = likeliest_scale(cosines, tokens)
    losses = [float(F.cross_entropy(cosines * s, tokens)) for s in (found, 0.9 * found, 1.1 * found)]
    assert losses[0] <= min(losses) + 1e-3


# ---- rows that grow


def damaged(path: Path, how: str) -> None:
    tensors = load_file(path)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    numbers = {name: value for name, value in tensors.items() if value.ndim}
    if how == "one byte":
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    elif how == "cut":
        path.write_bytes(path.read_bytes()[:-9])
    elif how == "other names":
        save_file({f"{name}_": value for name, value in tensors.items()}, path, metadata)
    elif how == "other rows":
        save_file(tensors | {name: value.roll(1, 0) for name, value in numbers.items()}, path, metadata)
    elif how == "other dtype":
        save_file({name: value.double() for name, value in tensors.items()}, path, metadata)
    else:  # as another version wrote it
        save_file(tensors, path, {"hiddenlab": "{}"})


@pytest.mark.slow
@pytest.mark.parametrize("how", ["one byte", "cut", "other names", "other rows", "other dtype", "no digest"])
def test_a_damaged_cache_is_made_again(
    tiny_model: LoadModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setenv("HIDDENLAB_CACHE", str(tmp_path))
    monkeypatch.setattr(regressions, "KNOWN_TEXT", 400)
    monkeypatch.setattr(regressions, "KNOWN_SINGLE", 300)
    model, prompts = tiny_model("llama", 2), random_prompts(*[8] * 3)
    observations = release(model, prompts)
    VocabMatch().fit(observations[0].info, model).recover_batch(observations[:1])
    files = sorted((tmp_path / "probes").glob("*.safetensors"))
    whole = {file.name: load_file(file) for file in files}
    assert len(files) >= 4
    for file in files:
        damaged(file, how)
    attack = VocabMatch().fit(observations[0].info, model)
    for file in files:
        made, before = load_file(file), whole[file.name]
        assert made.keys() == before.keys()
        assert {name: value.dtype for name, value in made.items()} == {
            name: value.dtype for name, value in before.items()
        }
        if "own" in before:  # the verified rows went with the damage
            for name in ("states", "tokens"):
                assert torch.equal(made[name], before[name][: int(before["own"])])
    assert [result.ids for result in attack.recover_batch(observations)] == prompts


@pytest.mark.slow
def test_verified_rows_are_kept_and_found_again(
    tiny_model: LoadModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HIDDENLAB_CACHE", str(tmp_path))
    monkeypatch.setattr(regressions, "KNOWN_TEXT", 400)
    monkeypatch.setattr(regressions, "KNOWN_SINGLE", 800)
    monkeypatch.setattr(ridge, "FEWEST_NEW", 50)
    model, prompts = tiny_model("llama", 1), random_prompts(*[10] * 8)
    observations = release(model, prompts)
    attack = VocabMatch(batch=4).fit(observations[0].info, model)
    assert attack.measured["probe"] == "regression"
    assert attack._known is not None and attack._prepared is not None
    own, before = attack._known.own, attack._prepared.proposer.probe
    # First tokens stand among the attacker's own already: every single token does in so small a vocabulary. Where the
    # processor rounds another pass differently, such a row is new.
    held = set(ridge._marks(attack._known.states, attack._known.tokens))
    added = list[int]()
    for observation, prompt in zip(observations, prompts, strict=True):
        marks = ridge._marks(observation.states[:1].float(), torch.tensor(prompt[:1]))
        added += prompt[int(marks[0] in held) :]
    assert len(added) in range(72, 81)
    results = attack.recover_batch(observations)
    assert [result.ids for result in results] == prompts
    assert attack._known.tokens[own:].tolist() == added
    assert attack._prepared.proposer.probe is not before
    again = VocabMatch().fit(observations[0].info, model)
    assert again._known is not None and len(again._known) == own + len(added)
    assert torch.equal(again._known.tokens[own:], torch.tensor(added))
    assert again.measured["probe_seconds"] == 0.0
    again.recover_batch(observations)
    assert len(again._known) == own + len(added)  # the same rows are not added twice
    given = VocabMatch(epsilon="1000").fit(observations[0].info, model)
    assert given._known is not None
    (other,) = release(model, random_prompts(7, seed=5))
    given.recover(other)
    assert len(given._known) == own + len(added)  # any token is within such an epsilon
    files = list((tmp_path / "probes").glob("*.safetensors"))
    assert files and all(file.stat().st_mode & 0o077 == 0 for file in files)


@pytest.mark.slow
def test_an_attack_that_is_not_to_learn_neither_uses_nor_adds_verified_rows(
    tiny_model: LoadModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several attacks on the same prompts are compared so: what was attacked before makes no difference."""
    monkeypatch.setenv("HIDDENLAB_CACHE", str(tmp_path))
    monkeypatch.setattr(regressions, "KNOWN_TEXT", 400)
    monkeypatch.setattr(regressions, "KNOWN_SINGLE", 800)
    monkeypatch.setattr(ridge, "FEWEST_NEW", 50)
    model, prompts = tiny_model("llama", 1), random_prompts(*[10] * 8)
    observations = release(model, prompts)

    def evaluated(learns: bool) -> int:
        attack = VocabMatch(batch=4)
        attack.learns = learns
        results = attack.fit(observations[0].info, model).recover_batch(observations)
        assert [result.ids for result in results] == prompts
        assert attack._known is not None
        assert learns or attack._known.verified == 0
        return sum(result.evaluated_tokens for result in results)

    def kept() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in (tmp_path / "probes").glob("*.safetensors")}

    first = evaluated(learns=False)
    own = kept()
    assert evaluated(learns=False) == first and kept() == own
    evaluated(learns=True)
    learned = kept()
    assert learned != own and evaluated(learns=True) < first
    assert evaluated(learns=False) == first
    assert set(kept()) == set(learned)


def test_wrong_tokens_are_not_learned(
    tiny_model: LoadModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HIDDENLAB_CACHE", str(tmp_path))
    model = tiny_model("llama", 2)
    (observation,) = release(model, random_prompts(6))
    spoilt = replace(observation, states=observation.states + 1)
    attack = VocabMatch(budget=5).fit(spoilt.info, model)
    assert attack._known is not None
    before = len(attack._known)
    assert not any(token.verified for token in attack.recover(spoilt).tokens)
    assert len(attack._known) == before


@given(st.integers(1, 40), st.integers(0, 60))
def test_the_oldest_verified_rows_go_first(own: int, verified: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ridge, "MOST_ROWS", 50)
        known = KnownRows(torch.zeros(own, 2), torch.arange(own), own)
        for start in range(0, verified, 7):
            new = torch.arange(start, min(start + 7, verified))
            known.add(torch.ones(len(new), 2), 100 + new)
    wanted = [*range(own), *[100 + i for i in range(verified)][max(0, own + verified - 50) :]]
    assert known.tokens.tolist() == wanted
    assert len(known.states) == len(known)


@given(st.integers(1, 300), st.integers(0, 300), st.integers(0, 400))
def test_a_regression_is_outgrown_by_a_quarter_or_by_half_of_the_verified_rows(
    own: int, old: int, new: int
) -> None:
    known = KnownRows(torch.zeros(own + old + new, 1), torch.zeros(own + old + new, dtype=torch.long), own)
    grown = 4 * new >= own + old
    assert known.outgrown(own + old) == (grown or new >= max(100, old // 2))
    assert known.verified == old + new


@pytest.mark.slow
def test_few_prompts_are_attacked_at_once_before_any_was_learned_from(
    tiny_model: LoadModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HIDDENLAB_CACHE", str(tmp_path))
    monkeypatch.setattr("hiddenlab.attacks.vocab_match.FEWEST_TOGETHER", 20)
    model, prompts = tiny_model("llama", 2), random_prompts(*[9] * 12)
    observations = release(model, prompts)
    groups: list[int] = []
    attack = VocabMatch().fit(observations[0].info, model)
    recover = attack._recover_group

    def counting(group: Sequence[Observation]) -> list[AttackResult]:
        groups.append(len(group))
        return recover(group)

    monkeypatch.setattr(attack, "_recover_group", counting)
    assert [result.ids for result in attack.recover_batch(observations)] == prompts
    assert sum(groups) == 12 and groups[0] == 2 and groups == sorted(groups[:-1]) + groups[-1:]
    assert len(groups) < 6  # each learns from those before it, and holds as many rows
    (longer,) = release(model, random_prompts(25))
    assert attack.recover(longer).verified  # a prompt of more rows goes alone


def test_a_trained_probe_is_taken_where_there_is_one(
    tiny_model: LoadModel, small_probes: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HIDDENLAB_CACHE", str(tmp_path))
    model = tiny_model("llama", 2)
    assert not store.has_trained_probe(model, public_of(model))
    assert VocabMatch(setup="full").fit(public_of(model), model).measured["probe"] == "trained"
    assert store.has_trained_probe(model, public_of(model))
    assert VocabMatch().fit(public_of(model), model).measured["probe"] == "trained"
    assert VocabMatch(proposal="vocab").fit(public_of(model), model).measured["probe"] == "none"


def test_an_unknown_setup_is_refused() -> None:
    with pytest.raises(InputError, match="unknown setup 'slow'; known are quick, full"):
        VocabMatch(setup="slow")


# ---- what is kept, and what is not counted


def test_a_threshold_is_measured_once(
    tiny_model: LoadModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hiddenlab.matching import epsilon

    monkeypatch.setenv("HIDDENLAB_CACHE", str(tmp_path))
    model = tiny_model("llama", 2)
    counted, measure = list[bool](), epsilon.measure

    def counting(*args: object, few: bool = False) -> object:
        counted.append(few)
        return measure(*args, few=few)  # type: ignore[arg-type]

    monkeypatch.setattr(epsilon, "measure", counting)

    def threshold(info: ObservationInfo, seed: int = 0, name: str = "auto") -> object:
        return VocabMatch(proposal="vocab", epsilon=name).fit(info, model, seed)._prepared.threshold  # type: ignore[union-attr]

    plain, noisy = public_of(model), public_of(model, "gaussian:sigma=0.5")
    first = threshold(plain)
    assert counted == [True]  # right and wrong lie far apart: a few windows are enough
    assert threshold(plain) == first and counted == [True]
    assert threshold(plain, seed=1) != first and counted == [True, True]
    threshold(noisy)
    assert counted == [True, True, True, False]


def test_a_clock_leaves_preparation_out() -> None:
    clock = Clock()
    before = clock.now()
    with clock.stopped():
        time.sleep(0.02)
        with clock.stopped():
            time.sleep(0.02)
    assert clock.preparing >= 0.04
    assert clock.now() - before < clock.preparing


@given(st.floats(0, 100), st.lists(st.floats(0, 10), max_size=40))
def test_a_rental_is_bought_when_it_has_cost_its_price(price: float, costs: list[float]) -> None:
    rental, spent = Rental(price), 0.0
    for cost in costs:
        spent += cost
        assert rental.due(cost) == (spent >= price)


def test_texts_become_tokens_when_they_are_drawn(
    tiny_model: LoadModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Words:
        def __init__(self) -> None:
            self.seen = list[str]()

        def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
            self.seen.append(text)
            return {"input_ids": [len(word) % 200 for word in text.split()]}

    model = tiny_model("llama", 1)
    words = Words()
    monkeypatch.setattr(model, "tokenizer", words)
    texts = [f"{'word ' * 30}{i}" for i in range(50)] + ["short"]
    corpus = Corpus(model, 3, lambda: list(texts))
    assert len(corpus.text_window(12)) == 12
    assert len(words.seen) <= 3  # the empty one, the text, and the short one if it was drawn
    for _ in range(300):
        assert len(corpus.text_window(12)) == 12  # never the short one
    assert len(words.seen) <= 2 + 2 * len(texts)


def test_single_tokens_are_each_drawn_once(tiny_model: LoadModel) -> None:
    drawn_tokens = Corpus(tiny_model("llama", 1)).single_tokens(10**6)
    assert sorted(drawn_tokens.tolist()) == list(range(tiny_model("llama", 1).vocab_size))


@pytest.mark.slow
def test_states_that_overflow_are_left_out(
    tiny_model: LoadModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HIDDENLAB_CACHE", str(tmp_path))
    model, (prompt,) = tiny_model("llama", 2), random_prompts(7)
    (observation,) = release(model, [prompt])
    released = regressions.release_windows
    for spoilt, kind in (("one", "regression"), ("all", "none")):
        for file in (tmp_path / "probes").glob("*"):
            file.unlink()

        def overflowing(*args: object, spoilt: str = spoilt) -> tuple[torch.Tensor, ...]:
            states, *others = released(*args)  # type: ignore[arg-type]
            states[: 1 if spoilt == "one" else None] = float("inf")
            return states, *others

        monkeypatch.setattr(regressions, "release_windows", overflowing)
        attack = VocabMatch().fit(observation.info, model)
        assert attack.measured["probe"] == kind
        assert attack.recover(observation).ids == prompt


def test_a_threshold_behind_a_plugin_is_always_measured(
    tiny_model: LoadModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plugin's code may change without a word; a threshold of other code would verify wrong tokens."""
    from hiddenlab import registry
    from hiddenlab.matching import epsilon
    from hiddenlab.matching.distance import Matcher

    monkeypatch.setenv("HIDDENLAB_CACHE", str(tmp_path))
    noise = registry.resolve("defenses", "gaussian")
    foreign = type("Foreign", (noise,), {"__module__": "somebody.elses"})
    monkeypatch.setitem(registry.BUILTINS["defenses"], "foreign", "somebody_elses:Foreign")
    monkeypatch.setitem(sys.modules, "somebody_elses", SimpleNamespace(Foreign=foreign))  # type: ignore[misc]
    model = tiny_model("llama", 2)
    for spec, files in (("gaussian:sigma=0.01", 1), ("foreign:sigma=0.01", 1)):
        info = replace(public_of(model), channel=(spec,))
        epsilon.threshold_for(model, info, Matcher(1, False), 0, "auto")
        assert len(list((tmp_path / "checks").glob("epsilon-*"))) == files
