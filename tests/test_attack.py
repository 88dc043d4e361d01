"""Vocabulary matching: exact on every decoder, the same by every way of searching, honest where it cannot know."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from hiddenlab.attacks.vocab_match import VocabMatch, mark_chance_matches, search
from hiddenlab.attacks.vocab_match.task import FIRST_BATCH, SETTLE_AFTER, Candidates, Task, Trials
from hiddenlab.channels import Channel
from hiddenlab.errors import InputError, NotApplicableError
from hiddenlab.matching.batching import run_batched
from hiddenlab.matching.distance import Matcher, choose_matcher
from hiddenlab.matching.epsilon import Sample, Threshold, auto_threshold
from hiddenlab.matching.ranking import Proposer
from hiddenlab.models import TruncatedModel, load_model
from hiddenlab.summary import NO_STATE
from hiddenlab.testing import DECODERS, LAYERS, VOCABULARY, WIDTH
from hiddenlab.types import AttackResult, Observation, TokenPrediction
from tests.marks import slow_cases

LoadModel = Callable[..., TruncatedModel]
TinyPath = Callable[..., str]
Prompt = list[int]

slow = pytest.mark.slow
CHANNELS = ("identity", "seq-perm", "hidden-perm", "hidden-perm:shared", "2d-perm")


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_prompts(*lengths: int, seed: int = 0, below: int = VOCABULARY) -> list[Prompt]:
    generator = seeded(seed)
    return [torch.randint(0, below, (n,), generator=generator).tolist() for n in lengths]


def release(model: TruncatedModel, prompts: Sequence[Prompt], *specs: str) -> list[Observation]:
    return [one for one, _ in Channel.parse(specs).release_batch(model, prompts, seeded(1))]


def attack(
    model: TruncatedModel, prompts: Sequence[Prompt], *specs: str, **options: Any
) -> list[AttackResult]:
    options.setdefault("proposal", "vocab")
    return (
        VocabMatch(**options)
        .fit((shown := release(model, prompts, *specs))[0].info, model)
        .recover_batch(shown)
    )


def assert_exact(recoveries: Sequence[AttackResult], prompts: Sequence[Prompt]) -> None:
    for recovery, prompt in zip(recoveries, prompts, strict=True):
        assert recovery.ids == prompt
        assert all(token.verified for token in recovery.tokens)
        assert sorted(token.row for token in recovery.tokens) == list(range(len(prompt)))
        assert recovery.stop_reason == "complete"


# ---- exact recovery


# Every decoder behind one channel, and one decoder behind every channel; the rest of the square is slow.
@pytest.mark.parametrize(("architecture", "channel"), [
    pytest.param(architecture, channel, marks=() if architecture == "llama" or channel == "2d-perm" else slow)
    for architecture in DECODERS
    for channel in CHANNELS
])  # fmt: skip
def test_random_tokens_are_recovered_exactly(tiny_model: LoadModel, architecture: str, channel: str) -> None:
    prompts = random_prompts(12, 1, 7)
    assert_exact(attack(tiny_model(architecture, 3), prompts, channel), prompts)


@pytest.mark.slow
@pytest.mark.parametrize(("layer", "stream"), [(1, "resid"), (LAYERS, "resid"), (LAYERS, "final_norm")])
@pytest.mark.parametrize("channel", ["identity", "2d-perm"])
def test_first_and_last_layer_and_final_norm(
    tiny_model: LoadModel, layer: int, stream: str, channel: str
) -> None:
    prompts = random_prompts(6, 3)
    for architecture in ("gemma2", "qwen3_moe"):
        assert_exact(attack(tiny_model(architecture, layer, stream), prompts, channel), prompts)


@pytest.mark.parametrize("stream", ["q", "k", "v"])
@pytest.mark.parametrize("channel", ["identity", "2d-perm"])
def test_queries_keys_and_values(tiny_model: LoadModel, stream: str, channel: str) -> None:
    prompts = random_prompts(6, 3)
    for architecture in ("gemma2", "gpt_neox"):
        assert_exact(attack(tiny_model(architecture, 3, stream), prompts, channel), prompts)


@pytest.mark.slow
@pytest.mark.parametrize("leading", [0, 3, 9])
def test_rows_behind_a_gap_are_guessed_and_not_verified(
    tiny_model: LoadModel, small_probes: None, leading: int
) -> None:
    model, prompts = tiny_model("llama", 1), random_prompts(*[9] * 12)
    positions, right = (*range(leading), *range(leading + 2, 9)), 0
    for whole, prompt in zip(release(model, prompts), prompts, strict=True):
        part = Observation(whole.states[list(positions)], replace(whole.info, positions=positions))
        found = VocabMatch().fit(part.info, model).recover(part)
        assert len(found.tokens) == len(positions)
        assert found.ids[:leading] == prompt[:leading]
        assert [one.verified for one in found.tokens] == [i < leading for i in range(len(positions))]
        assert [one.row for one in found.tokens] == list(range(len(positions)))
        assert found.stop_reason == ("complete" if leading == 9 else f"gap before position {leading + 2}")
        guessed = [prompt[p] for p in positions[leading:]]
        right += sum(a == b for a, b in zip(found.ids[leading:], guessed, strict=True))
    if leading < 9:
        assert right >= len(prompts) * (7 - leading) / 28  # by chance one in 300 would be
    if leading == 0:
        with pytest.raises(NotApplicableError, match="behind tokens that no row shows"):
            VocabMatch(proposal="vocab").fit(part.info, model).recover(part)


@pytest.mark.parametrize("channel", CHANNELS)
def test_repeated_tokens(tiny_model: LoadModel, channel: str) -> None:
    """Rows may be equal then: any of them is the right one."""
    prompts = [[5] * 6, [7, 7, 3, 7, 3, 3], [256, 256, 9]]
    for architecture in ("llama", "gemma2", "gpt2"):
        assert_exact(attack(tiny_model(architecture, 2), prompts, channel), prompts)


@pytest.mark.parametrize("distance", ["l1", "l2", "sorted-l1", "sorted-l2"])
def test_every_distance(tiny_model: LoadModel, distance: str) -> None:
    prompts = random_prompts(8)
    permuted = ["2d-perm"] if distance.startswith("sorted") else []
    for specs in ([], permuted):
        assert_exact(attack(tiny_model("llama", 2), prompts, *specs, distance=distance), prompts)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", *slow_cases("float16")])
@pytest.mark.parametrize("channel", ["identity", *slow_cases("2d-perm")])
def test_half_precision_models(tiny: TinyPath, dtype: str, channel: str) -> None:
    prompts = random_prompts(10, 3)
    for architecture in ("llama", "gemma2", "gpt2"):
        model = load_model(tiny(architecture), 2, dtype=dtype, device="cpu")
        assert_exact(attack(model, prompts, channel), prompts)


@pytest.mark.slow
@pytest.mark.parametrize("channel", ["identity", "seq-perm", "hidden-perm"])
def test_released_in_another_dtype(tiny: TinyPath, tiny_model: LoadModel, channel: str) -> None:
    prompts = random_prompts(10, 3)
    assert_exact(attack(tiny_model("gpt2", 2), prompts, "dtype:bfloat16", channel), prompts)
    half = load_model(tiny("gpt2"), 2, dtype="bfloat16", device="cpu")
    assert_exact(attack(half, prompts, "dtype:float32", channel), prompts)


@pytest.mark.parametrize(("quantization", "least"), [("int8", 0.5), ("nf4", 5.0)])
def test_quantized_providers(tiny_model: LoadModel, quantization: str, least: float) -> None:
    """Attacked with the full-precision weights, whose states are some way off, and nearest all the same."""
    prompts = random_prompts(10)
    (recovery,) = attack(tiny_model("gpt_neox", 1), prompts, quantization)
    assert recovery.ids == prompts[0]
    assert min(token.distance for token in recovery.tokens) > least


# ---- searches and proposals


@pytest.fixture(params=[0.0, 2.0], ids=["chain", "stepwise"])
def forced(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Verify guesses however unsure they are, or never: both must end in the same tokens."""
    monkeypatch.setattr(search, "STEPWISE_BELOW", request.param)
    return "chain" if request.param == 0 else "stepwise"


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["gemma2", *slow_cases("llama")])
@pytest.mark.parametrize(
    "channel", ["identity", "hidden-perm", *slow_cases("seq-perm", "hidden-perm:shared", "2d-perm")]
)
def test_speculative_is_greedy(
    tiny_model: LoadModel, small_probes: None, forced: str, architecture: str, channel: str
) -> None:
    """Greedy with the plain vocabulary is the oracle. gemma2's probe is good, llama's mostly wrong."""
    model, prompts = tiny_model(architecture, 2), random_prompts(8, 1, 2, 5)
    observations = release(model, prompts, channel)
    oracle = (
        VocabMatch(search="greedy", proposal="vocab")
        .fit(observations[0].info, model)
        .recover_batch(observations)
    )
    assert_exact(oracle, prompts)
    for proposal in ("probe", "probe+lm"):
        fast = VocabMatch(proposal=proposal).fit(observations[0].info, model).recover_batch(observations)
        assert_exact(fast, prompts)
        for one, other in zip(fast, oracle, strict=True):
            assert [t.distance for t in one.tokens] == pytest.approx(
                [t.distance for t in other.tokens], abs=1e-3
            )


def test_a_good_guess_takes_one_pass(tiny_model: LoadModel, small_probes: None) -> None:
    model, prompts = tiny_model("gemma2", 2), random_prompts(20, 30)
    recoveries = attack(model, prompts, proposal="probe")
    assert_exact(recoveries, prompts)
    for recovery, prompt in zip(recoveries, prompts, strict=True):
        assert recovery.forward_calls <= 3
        assert recovery.evaluated_tokens <= 3 * len(prompt)


@pytest.mark.parametrize("proposal", ["vocab", "lm", "probe", "probe+lm"])
@pytest.mark.parametrize("channel", ["identity", "2d-perm"])
def test_greedy_with_every_proposal(
    tiny_model: LoadModel, small_probes: None, proposal: str, channel: str
) -> None:
    prompts = random_prompts(9, 4)
    recoveries = attack(tiny_model("gemma2", 2), prompts, channel, search="greedy", proposal=proposal)
    assert_exact(recoveries, prompts)
    if proposal == "probe" and channel == "identity":
        # The probe's first batch of 8 holds most tokens; without it half the vocabulary would be tried.
        assert sum(token.evaluated for token in recoveries[0].tokens) <= 15 * 9


def test_greedy_tries_no_special_token_first(tiny_model: LoadModel) -> None:
    (recovery,) = attack(tiny_model("llama", 2), [[256, 0, 299]], search="greedy")
    assert [token.evaluated for token in recovery.tokens] == [257, 1, VOCABULARY]


def test_vocab_is_tried_in_order_special_tokens_first(tiny_model: LoadModel) -> None:
    model = tiny_model("llama", 2)
    (recovery,) = attack(model, [[256, 0, 299]])
    assert [token.evaluated for token in recovery.tokens] == [2, FIRST_BATCH, VOCABULARY]


@pytest.mark.slow
@pytest.mark.parametrize("channel", ["identity", pytest.param("2d-perm", marks=pytest.mark.slow)])
def test_a_batch_is_one_by_one(tiny_model: LoadModel, small_probes: None, channel: str) -> None:
    """A regression would learn from one prompt for the next; a trained probe does not."""
    model, prompts = tiny_model("llama", 2), random_prompts(4, 1, 6, 3)
    observations = release(model, prompts, channel)
    for proposal in ("vocab", "probe+lm"):
        whole = (
            VocabMatch(proposal=proposal, batch=4, setup="full")
            .fit(observations[0].info, model)
            .recover_batch(observations)
        )
        parts = (
            VocabMatch(proposal=proposal, batch=2, setup="full")
            .fit(observations[0].info, model)
            .recover_batch(observations)
        )
        single = [
            VocabMatch(proposal=proposal, setup="full").fit(o.info, model).recover(o) for o in observations
        ]
        assert_exact(whole, prompts)
        for recoveries in (parts, single):
            for one, other in zip(recoveries, whole, strict=True):
                assert one.ids == other.ids
                assert [t.row for t in one.tokens] == [t.row for t in other.tokens]
                assert [t.evaluated for t in one.tokens] == [t.evaluated for t in other.tokens]
                assert one.evaluated_tokens == other.evaluated_tokens


def test_observations_of_two_channels_are_each_their_own(tiny_model: LoadModel) -> None:
    """Attacked in one call, a permuted observation must not spoil a plain one."""
    model, prompts = tiny_model("llama", 2), random_prompts(7, 7)
    plain, permuted = release(model, prompts[:1]), release(model, prompts[1:], "2d-perm")
    assert_exact(
        VocabMatch(proposal="vocab").fit((shown := plain + permuted)[0].info, model).recover_batch(shown),
        prompts,
    )
    assert_exact(
        VocabMatch(proposal="vocab").fit((shown := permuted + plain)[0].info, model).recover_batch(shown),
        prompts[::-1],
    )


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"proposal": "vocab"}, {"proposal": "probe+lm"}])
def test_costs_are_what_the_model_counted(
    tiny_model: LoadModel, small_probes: None, forced: str, options: dict[str, Any]
) -> None:
    model, prompts = tiny_model("gemma2", LAYERS), random_prompts(14, 6)
    observations = release(model, prompts)
    attacker = VocabMatch(**options, without="screening")
    attacker.fit(observations[0].info, model)
    before = model.evaluated_tokens
    recoveries = attacker.fit(observations[0].info, model).recover_batch(observations)
    assert sum(r.evaluated_tokens for r in recoveries) == model.evaluated_tokens - before
    for recovery in recoveries:
        assert recovery.forward_calls >= 1
        assert recovery.seconds > 0
        for token in recovery.tokens:
            assert 1 <= token.evaluated <= VOCABULARY
            assert token.margin is None or token.margin > 0


# ---- epsilon, budget


def test_a_number_is_an_absolute_distance(tiny_model: LoadModel) -> None:
    model, prompts = tiny_model("llama", 2), random_prompts(6)
    (right,) = attack(model, prompts, epsilon="0.5")
    assert_exact([right], prompts)
    assert right.epsilon == 0.5
    # Nothing is so near: all is tried, the nearest is taken and not called verified.
    tight = attack(model, prompts, epsilon="1e-12", search="greedy")[0]
    assert tight.ids == prompts[0]
    assert not any(token.verified for token in tight.tokens if token.distance > 1e-12)
    assert all(token.evaluated == VOCABULARY for token in tight.tokens if not token.verified)
    # Anything is so near: the first candidate is taken.
    (loose,) = attack(model, prompts, epsilon="1e9")
    assert all(token.verified and token.evaluated <= 8 for token in loose.tokens)
    assert loose.ids != prompts[0]


@pytest.mark.parametrize(
    ("channel", "epsilon"),
    [
        *((channel, "auto") for channel in ("identity", "2d-perm", "dtype:bfloat16")),
        *slow_cases(*((channel, "calibrated") for channel in ("identity", "2d-perm", "dtype:bfloat16"))),
    ],
)
def test_measured_thresholds_lie_between_floor_and_gap(
    tiny_model: LoadModel, epsilon: str, channel: str
) -> None:
    model, prompts = tiny_model("gpt2", 2), random_prompts(9, 4)
    attacker = VocabMatch(proposal="vocab", epsilon=epsilon)
    observations = release(model, prompts, channel)
    measured = attacker.fit(observations[0].info, model).measured
    assert measured["epsilon_floor"] < measured["epsilon_relative"] < measured["epsilon_gap"]
    assert_exact(attacker.fit(observations[0].info, model).recover_batch(observations), prompts)


def sample(right: Tensor, wrong: Tensor, sinks: int = 0) -> Sample:
    """The first so many rows are ten times as long as the others."""
    norms = 1.0 + 9.0 * (torch.arange(len(right)) < sinks)
    return Sample(right.float(), wrong.float(), norms, torch.arange(len(norms)))


def test_thresholds_from_distances() -> None:
    uniform = torch.rand(2000, generator=seeded())
    clear = sample(1e-6 * uniform, 0.1 + torch.rand(2000, 4, generator=seeded()))
    found = auto_threshold(clear, 1e-7)
    assert 1e-5 < found.relative < 0.05
    assert found.separable
    # An error-free measurement still leaves room for rounding.
    silent = auto_threshold(sample(torch.zeros(9), torch.ones(9, 4)), 1e-7)
    assert 1e-5 < silent.relative < 0.5
    # Where both overlap a little, the threshold lies where they cross.
    crossing = sample(0.5 * uniform, 0.45 + torch.rand(2000, 4, generator=seeded()))
    found = auto_threshold(crossing, 1e-7)
    assert not found.separable
    assert 0.4 < found.relative < 0.55
    assert 0.8 < found.reach < 1 and found.doubt == found.chance / found.reach
    rows = torch.randn(5, 8)
    matcher = Matcher(1, sorted=False)
    assert torch.allclose(found.limits(matcher, rows), found.relative * rows.abs().sum(1))
    assert Threshold(0.1, 0.0, 1.0, absolute=3.0).limits(matcher, rows).tolist() == [3.0] * 5


def test_attention_sinks_get_a_threshold_of_their_own_where_one_does_not_fit_all() -> None:
    """Right and wrong are both near there, and one threshold for all would be far too narrow."""
    sinks = 0.003 + 0.001 * torch.rand(100, generator=seeded()), 0.02 + torch.rand(100, 4, generator=seeded())
    others = 0.1 * torch.rand(900, generator=seeded()), 0.2 + torch.rand(900, 4, generator=seeded())
    both = torch.cat([sinks[0], others[0]]), torch.cat([sinks[1], others[1]])
    found = auto_threshold(sample(*both, sinks=100), 1e-7)
    assert found.sinks is not None
    assert 0.004 < found.sinks < 0.02
    assert 0.1 < found.relative < 0.2
    rows, matcher = torch.ones(5, 8) / 8, Matcher(1, sorted=False)
    rows[[0, 2]] *= 10
    limits = found.limits(matcher, rows) / rows.abs().sum(1)
    own = [found.sinks, found.relative, found.sinks, found.relative, found.relative]
    assert torch.allclose(limits, torch.tensor(own))
    # Where rows are of one length, or one threshold does, there is one.
    assert auto_threshold(sample(*both), 1e-7).sinks is None
    assert auto_threshold(sample(both[0], both[1] + 1, sinks=100), 1e-7).sinks is None


def test_a_threshold_that_accepts_anything_is_no_threshold() -> None:
    """Under noise that hides everything, wrong tokens must not be called verified."""
    right, wrong = 1 + torch.rand(500, generator=seeded()), 0.3 + torch.rand(500, 4, generator=seeded())
    found = auto_threshold(sample(right, wrong), 1e-7)
    assert float((wrong.amin(1) <= found.relative).float().mean()) < 0.5
    assert found.chance >= float((wrong <= found.relative).float().mean()) > 0
    # So few right ones are within it that what passes is wrong as likely as not, however few were tried.
    assert found.reach < 0.5 and found.doubt == 1


@pytest.mark.parametrize("numbers", [1, 2, 6])
def test_the_chance_of_a_wrong_match_is_known_beyond_what_was_met(numbers: int) -> None:
    """Distances that fall within t with chance t to the power of how many numbers a row has."""
    wrong = torch.rand(2000, 4, generator=seeded()) ** (1 / numbers)
    norms = torch.ones(2000)
    for limit in (0.003, 0.2):
        found = (
            Threshold(limit, 0.0, 1.0)
            .seen_on(Sample(torch.zeros(2000), wrong, norms, torch.arange(2000)))
            .chance
        )
        assert limit**numbers / 3 < found < 3 * limit**numbers + 1e-12


def test_a_match_that_chance_explains_is_not_called_verified() -> None:
    tokens = [
        TokenPrediction(7, 0, 0.1, None, tried, within) for tried in (1, 50, 51) for within in (True, False)
    ]
    of = [token.verified for token in mark_chance_matches(tokens, 1e-3)]
    assert of == [True, False, True, False, False, False]
    assert mark_chance_matches(tokens, 0.0) == tuple(tokens)
    assert not any(token.verified for token in mark_chance_matches(tokens, 0.06))


@pytest.mark.parametrize("count", [1, 64])
def test_one_number_of_a_row_proves_nothing_under_noise(
    tiny_model: LoadModel, small_probes: None, count: int
) -> None:
    model, prompts = tiny_model("llama", 2), random_prompts(12, 3)
    found = attack(model, prompts, f"project:count={count},sigma=0.05", budget=VOCABULARY)
    assert any(token.distance <= recovery.epsilon for recovery in found for token in recovery.tokens)
    assert [token.verified for recovery in found for token in recovery.tokens] == [count == 64] * 15
    assert (count == 64) == ([recovery.ids for recovery in found] == prompts)


@pytest.mark.parametrize("budget", [1, 5, 20])
@pytest.mark.parametrize("channel", ["identity", "2d-perm"])
def test_a_budget_bounds_the_candidates_of_a_position(
    tiny_model: LoadModel, budget: int, channel: str
) -> None:
    model, prompts = tiny_model("llama", 2), [[0, 3, 200, 299]]
    (recovery,) = attack(model, prompts, channel, budget=budget)
    assert len(recovery.tokens) == 4
    assert all(token.evaluated <= budget for token in recovery.tokens)
    assert recovery.stop_reason == "budget exhausted"
    assert not recovery.tokens[-1].verified
    # What a budget does reach is verified.
    assert [token.verified for token in recovery.tokens][:2] == ([False] * 2 if budget == 1 else [True] * 2)
    if budget == 1:
        assert not any(token.verified for token in recovery.tokens)
    whole = attack(model, prompts, channel, budget=VOCABULARY)
    assert_exact(whole, prompts)


@pytest.mark.parametrize("budget", [1, 3])
def test_a_budget_bounds_speculation_too(
    tiny_model: LoadModel, small_probes: None, forced: str, budget: int
) -> None:
    """llama's probe is often wrong, so that alternatives stand beside most guesses."""
    (recovery,) = attack(tiny_model("llama", 2), random_prompts(20), proposal="probe", budget=budget)
    assert max(token.evaluated for token in recovery.tokens) <= budget


# ---- what cannot be explained


@pytest.mark.parametrize("channel", CHANNELS)
def test_noise_is_never_verified(tiny_model: LoadModel, channel: str) -> None:
    model = tiny_model("gemma2", 3)
    (real,) = release(model, random_prompts(5), channel)
    states = torch.randn(5, WIDTH, generator=seeded()) * real.states.std()
    (recovery,) = (
        VocabMatch(proposal="vocab")
        .fit((shown := [replace(real, states=states)])[0].info, model)
        .recover_batch(shown)
    )
    assert [token.verified for token in recovery.tokens] == [False] * 5
    assert recovery.tokens[0].evaluated == VOCABULARY
    assert recovery.stop_reason == NO_STATE
    assert sorted(token.row for token in recovery.tokens) == list(range(5))


@pytest.mark.parametrize("proposal", ["vocab", "probe+lm"])
def test_one_row_of_noise_spoils_only_what_follows(
    tiny_model: LoadModel, small_probes: None, proposal: str
) -> None:
    model, prompts = tiny_model("gemma2", 3), random_prompts(9)
    (real,) = release(model, prompts)
    states = real.states.clone()
    states[5] = torch.randn(WIDTH, generator=seeded()) * states.std()
    (recovery,) = (
        VocabMatch(proposal=proposal)
        .fit((shown := [replace(real, states=states)])[0].info, model)
        .recover_batch(shown)
    )
    assert recovery.ids[:5] == prompts[0][:5]
    assert [token.verified for token in recovery.tokens] == [True] * 5 + [False] * 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "specs", [("gaussian:sigma=0.3",), ("random-prefix",), ("random-prefix", "seq-perm")]
)
@pytest.mark.parametrize("proposal", ["vocab", "probe+lm"])
def test_noised_inputs_leave_tokens_unverified(
    tiny_model: LoadModel, small_probes: None, specs: tuple[str, ...], proposal: str
) -> None:
    prompts = random_prompts(8, 3)
    for recovery, prompt in zip(
        attack(tiny_model("llama", 2), prompts, *specs, proposal=proposal), prompts, strict=True
    ):
        assert len(recovery.tokens) == len(prompt)
        assert not all(token.verified for token in recovery.tokens)
        assert recovery.stop_reason == "vocabulary exhausted"


def test_little_noise_does_not_hide_the_tokens(tiny_model: LoadModel) -> None:
    prompts = random_prompts(10)
    assert attack(tiny_model("gpt2", 1), prompts, "gaussian:sigma=0.001")[0].ids == prompts[0]


# ---- models with peculiar embeddings


@pytest.fixture(scope="module")
def peculiar(
    tiny: TinyPath, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., TruncatedModel]]:
    """A llama whose embedding table was changed by hand."""

    def make(change: Callable[[Tensor], Any]) -> TruncatedModel:
        folder: Path = tmp_path_factory.mktemp("peculiar")
        model = AutoModelForCausalLM.from_pretrained(tiny("llama"))
        with torch.no_grad():
            change(model.get_input_embeddings().weight)
        model.save_pretrained(folder)
        return load_model(str(folder), 2, device="cpu")

    yield make


@pytest.mark.slow
@pytest.mark.parametrize("channel", ["identity", "2d-perm"])
@pytest.mark.parametrize("size", [1, pytest.param(0, marks=slow)])
def test_tokens_with_one_embedding_do_not_spoil_epsilon(
    peculiar: Callable[..., TruncatedModel], channel: str, size: int
) -> None:
    """Padding of the vocabulary: many models hold tokens whose embeddings are all the same, or all zero."""
    model = peculiar(lambda table: table[290:].copy_(size * table[290].expand(10, -1)))
    prompts = random_prompts(40, below=290)
    assert_exact(attack(model, prompts, channel), prompts)


@pytest.mark.parametrize("specs", [("identity",), ("seq-perm",), ("dtype:bfloat16", "seq-perm")])
def test_rows_of_very_different_norm(peculiar: Callable[..., TruncatedModel], specs: tuple[str, ...]) -> None:
    """Attention sinks: what is near for the large first row is far for the others beside it."""
    model = peculiar(lambda table: table[257].mul_(20_000))
    prompts = [[257, *random_prompts(16, below=256)[0]]]
    assert_exact(attack(model, prompts, *specs), prompts)


# ---- wrong input


def test_an_observation_of_something_else_is_refused(tiny: TinyPath, tiny_model: LoadModel) -> None:
    (observation,) = release(tiny_model("llama", 2), random_prompts(4))
    narrow = Observation(observation.states[:, :32].clone(), observation.info)
    cases: list[tuple[Observation, TruncatedModel, str]] = [
        (narrow, tiny_model("llama", 2), "32 wide"),
        (observation, tiny_model("mistral", 2), "other weights"),
        (observation, load_model(tiny("llama", 1), 2), "other weights"),
        (observation, tiny_model("llama", 3), "--layer 2"),
    ]
    for wrong, model, match in cases:
        with pytest.raises(InputError, match=match):
            VocabMatch(proposal="vocab").fit(wrong.info, model).recover(wrong)
    # A batch is refused whole, wherever the wrong one stands.
    model = tiny_model("llama", 2)
    with pytest.raises(InputError, match="32 wide"):
        VocabMatch(proposal="vocab").fit(observation.info, model).recover_batch([observation, narrow])


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"search": "beam"}, "unknown search 'beam'.*greedy"),
        ({"proposal": "oracle"}, "unknown proposal 'oracle'.*probe"),
        ({"preset": "authors"}, "unknown preset 'authors'.*paper"),
        ({"epsilon": "calibrated", "calibration_texts": 0}, "at least 1 text"),
        ({"epsilon": "tiny"}, "neither auto, calibrated nor a positive number"),
        ({"epsilon": "-1"}, "positive number"),
        ({"epsilon": "nan"}, "positive number"),
        ({"epsilon": "inf"}, "positive number"),
        ({"budget": 0}, "budget must be at least 1"),
        ({"batch": 0}, "batch must be at least 1"),
    ],
)
def test_options_are_checked_before_anything_runs(options: dict[str, Any], match: str) -> None:
    with pytest.raises(InputError, match=match):
        VocabMatch(**options)


def test_an_unknown_distance_is_refused(tiny_model: LoadModel) -> None:
    with pytest.raises(InputError, match="unknown distance 'l7'"):
        attack(tiny_model("llama", 2), random_prompts(2), distance="l7")


def test_one_of_many_candidates_may_stand_out() -> None:
    """Far nearer than any other after a thousand tries, though outside of its limit."""
    distances = 10 + torch.rand(SETTLE_AFTER, 1, generator=seeded())
    tried = Trials(torch.tensor([1.0]))
    tried.add(torch.arange(SETTLE_AFTER - 1), distances[1:])
    assert not tried.stands_out()  # nothing does, and too few were tried
    tried.add(torch.tensor([SETTLE_AFTER]), torch.tensor([[4.0]]))
    assert tried.stands_out()
    tried.add(torch.tensor([SETTLE_AFTER + 1]), torch.tensor([[7.0]]))
    assert not tried.stands_out()
    tried.add(torch.arange(SETTLE_AFTER), distances + 1)  # twice as many: a margin of 1.5 is enough
    assert tried.stands_out()


def test_the_nearest_few_are_those_of_a_full_sort() -> None:
    limits = torch.tensor([1.0, 3.0])
    tried = Trials(limits)
    table = torch.rand(40, 2, generator=seeded()) * 9
    tried.add(torch.arange(100, 140), table)
    units = (table / limits).amin(1)
    few = tried.nearest_few(5, [0, 1], limits)
    assert [one.token - 100 for one in few] == units.argsort()[:5].tolist()
    for one in few:
        assert one.distance == float(table[one.token - 100, one.row])
        assert one.verified == (one.distance <= float(limits[one.row]))
    assert few[0].margin is not None
    assert few[0].margin >= 0
    assert few[1].margin is not None
    assert few[1].margin <= 0
    assert tried.best([0, 1], limits) == (few[0], few[0].verified)


def prepared(model: TruncatedModel, rows: Tensor, guess: Prompt, **options: Any) -> Task:
    """A task without engines behind it, whose shortlist is one guess a row."""
    info = release(model, [guess])[0].info
    return Task(
        model, choose_matcher("l2", info), Proposer(VOCABULARY, None, None), rows, rows,
        torch.full((len(rows),), 1e-3), model.prefix(), True,
        shortlist=torch.tensor(guess)[:, None], scores=torch.zeros(len(rows), 1), **options,
    )  # fmt: skip


@pytest.mark.parametrize("overlapping", [True, False])
def test_a_settled_position_is_told_by_what_follows(tiny_model: LoadModel, overlapping: bool) -> None:
    """A row that was spoiled points to a wrong token; the rows behind it know better."""
    model = tiny_model("llama", 2)
    (prompt,) = random_prompts(8)
    with torch.inference_mode():
        rows = model.encode(torch.tensor(prompt)).float().clone()
        prefix = model.prefix()
        prefix.extend(torch.tensor(prompt[:3]))
        states = prefix.branch(torch.arange(VOCABULARY)).float()
        wrong = int((states - rows[3]).norm(dim=1).argsort()[9])
        rows[3] = 0.45 * rows[3] + 0.55 * states[wrong]
        task = prepared(model, rows, prompt, overlapping=overlapping)
        run_batched([search.stepwise(task)])
    assert task.found[3].token == (prompt[3] if overlapping else wrong)
    assert not task.found[3].verified
    assert (task.tokens == prompt) == overlapping


def test_what_was_learned_counts_for_more_the_more_it_was_learned_from(tiny_model: LoadModel) -> None:
    model = tiny_model("llama", 2)
    (prompt,) = random_prompts(4)
    task = prepared(model, model.encode(torch.tensor(prompt)).float(), prompt)
    likely = torch.zeros(VOCABULARY)
    likely[[5, 6, 7]] = torch.tensor([9.0, 6.0, 3.0])
    distances = torch.full((VOCABULARY,), 40.0)
    distances[[5, 6, 7]] = torch.tensor([30.0, 20.0, 0.0])

    def next_of(count: int) -> list[int]:
        candidates = Candidates(task, Trials(task.limits[:1]), [0])
        candidates.rank(likely)
        candidates.learn(distances, count)
        batch = candidates.next_batch()
        assert batch is not None
        assert len(batch) == FIRST_BATCH
        return batch.tolist()[:3]

    assert next_of(1) == [5, 6, 7]
    assert next_of(1000) == [7, 5, 6]


def test_passes_grow_by_a_quarter_and_never_repeat_a_candidate(tiny_model: LoadModel) -> None:
    model = tiny_model("llama", 2)
    (prompt,) = random_prompts(4)
    candidates = Candidates(
        prepared(model, model.encode(torch.tensor(prompt)).float(), prompt), Trials(torch.ones(1)), [0]
    )
    batches = []
    while (batch := candidates.next_batch()) is not None:
        batches.append(batch)
    sizes = [len(batch) for batch in batches]
    assert sizes[0] <= FIRST_BATCH
    assert all(n <= max(16, sum(sizes[:i]) // 4) for i, n in enumerate(sizes))
    assert torch.cat(batches).sort().values.tolist() == list(range(VOCABULARY))
