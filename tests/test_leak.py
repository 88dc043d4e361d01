"""Fingerprints meant for verification give prompts away where their key is known, and say when they do not."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hiddenlab.attacks.fingerprint_inversion import FingerprintInversion, _Continuations
from hiddenlab.channels import Channel
from hiddenlab.defenses.fingerprints import Logprobs, Toploc, request_seed, scatter
from hiddenlab.defenses.verification.toploc import Proof, commit, values_at, verify
from hiddenlab.errors import InputError, NotApplicableError
from hiddenlab.eval.cells import Setting, measure_cell, row_of
from hiddenlab.eval.tables import leak
from hiddenlab.matching.fingerprint_evidence import agreement, evidence_of, learn_projection, ordinals
from hiddenlab.models import TruncatedModel
from hiddenlab.projections import ORTHOGONAL, Projection
from hiddenlab.types import AttackResult, Observation

Slices = Callable[..., TruncatedModel]
HALF = "dtype:bfloat16"
LENGTH = 10


def draw(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def prompt(seed: int = 0, length: int = LENGTH) -> list[int]:
    return torch.randint(0, 256, (length,), generator=draw(seed)).tolist()


def release(model: TruncatedModel, channel: str, tokens: list[int], seed: int = 3) -> Observation:
    return Channel.parse([channel]).release(model, tokens, draw(seed))[0]


def attacked(observation: Observation, model: TruncatedModel, **options: object) -> AttackResult:
    search = FingerprintInversion(**{"breadth": 4, "candidates": 300, "budget": 300, **options})  # type: ignore[arg-type]
    return search.fit(observation.info, model).recover(observation)


# ---- recovery


@pytest.mark.parametrize(
    ("channel", "stream"),
    [
        ("toploc:k=64", "final_norm"),
        (f"{HALF}+toploc:k=64", "final_norm"),
        ("project:count=4", "final_norm"),
        (f"{HALF}+project:count=16,kind=orthogonal", "final_norm"),
        ("logprobs:k=5", "logits"),
        (f"{HALF}+logprobs:k=5", "logits"),
    ],
)
def test_a_fingerprint_gives_the_prompt_away(tiny_model: Slices, channel: str, stream: str) -> None:
    model = tiny_model("llama", None, stream)
    tokens = prompt(length=8)
    recovery = attacked(release(model, channel, tokens), model)
    assert recovery.ids == tokens
    sure = sum(token.verified for token in recovery.tokens)
    assert (
        sure == 8 or HALF in channel or "project" in channel
    )  # where rounding blurs, some are right and not sure


@pytest.mark.parametrize("architecture", ["gemma2", "gpt2", "qwen3_moe"])
def test_other_architectures_and_tied_heads(tiny_model: Slices, architecture: str) -> None:
    model = tiny_model(architecture, None, "final_norm")
    tokens = prompt(1, 6)
    assert attacked(release(model, f"{HALF}+toploc:k=64", tokens), model).ids == tokens


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_the_prior_is_the_models_own(tiny_model: Slices, architecture: str) -> None:
    states, logits = (tiny_model(architecture, None, stream) for stream in ("final_norm", "logits"))
    one, other = (FingerprintInversion()._opening(model) for model in (states, logits))
    torch.testing.assert_close(one.following, other.following, atol=1e-4, rtol=1e-4)


def test_evidence_of_the_answer_is_that_of_a_plain_prefill(tiny_model: Slices) -> None:
    model = tiny_model("llama", None, "final_norm")
    tokens = prompt(2)
    observation = release(model, f"{HALF}+toploc:k=64", tokens)
    recovery = attacked(observation, model)
    evidence, states = evidence_of(observation, model), model.encode(torch.tensor(tokens))
    for row, found in enumerate(recovery.tokens):
        assert -found.distance == pytest.approx(float(evidence.score(row, states[row : row + 1])), abs=0.5)


def test_every_position_run_is_counted(tiny_model: Slices) -> None:
    model = tiny_model("llama", None, "final_norm")
    observation = release(model, "toploc:k=64", prompt())
    search = FingerprintInversion(breadth=2, candidates=300)
    assert search.fit(observation.info, model).measured["opening_tokens"] > 250
    before = model.evaluated_tokens
    recovery = search.fit(observation.info, model).recover(observation)
    assert recovery.evaluated_tokens == model.evaluated_tokens - before > 300 * (LENGTH - 1)
    assert recovery.tokens[0].evaluated == 300  # the first tokens' states, from the setup


@pytest.mark.slow
def test_passes_stay_small(tiny_model: Slices, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing stands out, the whole budget is tried again behind other paths: in parts, with the same answer."""
    model = tiny_model("llama", None, "final_norm")
    observation = release(model, f"{HALF}+project:count=2", prompt())
    monkeypatch.setattr("hiddenlab.attacks.fingerprint_inversion.SETTLED", math.inf)
    whole = attacked(observation, model)
    monkeypatch.setattr(model, "max_pass_tokens", 64)
    sizes = []
    run = model.run
    monkeypatch.setattr(
        model,
        "run",
        lambda asked, **options: sizes.append(sum(one.size for one in asked)) or run(asked, **options),
    )
    parts = attacked(observation, model)
    assert max(sizes) <= 64
    assert parts.ids == whole.ids and parts.evaluated_tokens == whole.evaluated_tokens


@pytest.mark.slow
@pytest.mark.parametrize("channel", [f"{HALF}+project:count=2", f"{HALF}+project:count=1", "toploc:k=64"])
def test_tokens_that_no_evidence_would_save_are_not_run(
    tiny_model: Slices, monkeypatch: pytest.MonkeyPatch, channel: str
) -> None:
    """Behind a language model that is sure of much, the same prompt is found as when every token is run."""
    model = tiny_model("llama", None, "final_norm")

    def sharp(self: Any, states: torch.Tensor) -> torch.Tensor:
        return (30 * self._head(states).float()).log_softmax(1)

    monkeypatch.setattr("hiddenlab.attacks.fingerprint_inversion._Opening.log_probs", sharp)
    opening = FingerprintInversion()._opening(model)
    tokens, prior = list[int](), opening.path().prior
    for _ in range(8):
        following = (
            opening.following if not tokens else opening.log_probs(prior.extend(torch.tensor(tokens[-1:])))[0]
        )
        tokens.append(int(torch.multinomial(following.exp(), 1, generator=draw(len(tokens)))))
    observation = release(model, channel, tokens)
    settled = attacked(observation, model, candidates=8)
    monkeypatch.setattr("hiddenlab.attacks.fingerprint_inversion.SETTLED", math.inf)
    found = attacked(observation, model, candidates=8)
    assert settled.ids == found.ids and settled.evaluated_tokens <= found.evaluated_tokens
    kind = type(evidence_of(observation, model))
    least = min(-one.distance for one in found.tokens)
    assert least <= evidence_of(observation, model).most
    monkeypatch.setattr(kind, "most", property(lambda self: 1e9))
    whole = attacked(observation, model, candidates=8)
    assert found.ids == whole.ids
    assert found.stop_reason == "complete"
    if "project" in channel:
        assert found.evaluated_tokens < 0.7 * whole.evaluated_tokens


@pytest.mark.parametrize("channel", ["toploc:k=64", f"{HALF}+project:count=3"])
def test_the_right_states_have_the_most_evidence(tiny_model: Slices, channel: str) -> None:
    model = tiny_model("llama", None, "final_norm")
    evidence = evidence_of(release(model, channel, prompt()), model)
    states = model.encode(torch.tensor(prompt()))
    right = torch.cat([evidence.score(row, states[row : row + 1]) for row in range(LENGTH)])
    assert bool((right <= evidence.most + 1e-4).all()) and float(right.max()) > 0.5 * evidence.most


# ---- what is not there is not found, and not claimed


def test_one_inner_product_verifies_nothing(tiny_model: Slices) -> None:
    model = tiny_model("llama", None, "final_norm")
    recovery = attacked(release(model, f"{HALF}+project:count=1", prompt()), model, budget=200)
    assert not any(token.verified for token in recovery.tokens)
    assert recovery.stop_reason == "budget exhausted"


@pytest.mark.slow
def test_without_the_key_of_the_indices_nothing_is_recovered(tiny_model: Slices) -> None:
    model = tiny_model("llama", None, "final_norm")
    for seed in range(2):
        tokens = prompt(seed)
        recovery = attacked(release(model, f"{HALF}+toploc:k=64,keyed=true", tokens), model, budget=300)
        assert sum(a == b for a, b in zip(recovery.ids, tokens, strict=True)) <= 2
        assert not any(token.verified for token in recovery.tokens)


def test_the_floor_runs_no_candidates(tiny_model: Slices) -> None:
    model = tiny_model("llama", None, "final_norm")
    recovery = attacked(release(model, "toploc:k=64", prompt()), model, evidence=False)
    assert len(recovery.ids) == LENGTH and not any(token.verified for token in recovery.tokens)
    assert recovery.evaluated_tokens <= 1 + 2 * 4 * LENGTH


def test_positions_without_a_fingerprint_are_left_to_the_prior(tiny_model: Slices) -> None:
    model = tiny_model("llama", None, "final_norm")
    tokens = prompt()
    recovery = attacked(release(model, "project:count=16", tokens), model, every=2)
    assert not any(token.verified for token in recovery.tokens[1::2])
    assert sum(a == b for a, b in zip(recovery.ids, tokens, strict=True)) < LENGTH


# ---- the released form


def test_a_release_holds_the_committed_values(tiny_model: Slices) -> None:
    model = tiny_model("llama", None, "final_norm")
    tokens = prompt()
    observation, secret = Channel.parse([HALF, "toploc:k=64"]).release(model, tokens, draw())
    provider = Channel.parse([HALF]).release(model, tokens, draw())[0].states
    largest = provider.float().abs().flatten().topk(40).indices  # not up to the last, where there may be ties
    assert torch.equal(observation.states.flatten()[largest], provider.flatten()[largest])
    details = next(value for value in secret.details.values() if isinstance(value, dict))
    again = values_at(Proof.from_base64(details["proof"], 64), torch.arange(provider.numel()))
    finite = torch.isfinite(again)
    assert torch.equal(observation.states.flatten()[finite], again[finite])


def test_log_probabilities_are_the_models(tiny_model: Slices) -> None:
    model = tiny_model("llama", None, "logits")
    tokens = prompt()
    shown = release(model, "logprobs:k=3", tokens).states
    plain = model.encode(torch.tensor(tokens)).log_softmax(1)
    assert torch.allclose(shown[:, :3], plain.gather(1, shown[:, 3:].long()), atol=1e-5)
    assert torch.equal(shown[:, 3], plain.argmax(1).float())


def test_ordinals_count_in_units_of_the_last_bit() -> None:
    values = torch.tensor([-1.0, -0.0, 0.0, 1.0, 1.0078125, 2.0]).bfloat16()
    assert ordinals(values).tolist() == [-0x3F80, 0, 0, 0x3F80, 0x3F81, 0x4000]


def test_agreement_falls_with_the_gap_down_to_no_relation() -> None:
    scores = agreement(torch.tensor([[0.0, 1.0, 3.0, 1e6]]), 1.0, 1e-4, 0.5)[0]
    assert scores.diff().max() < 0 and scores[0] > 7 and scores[-1] == pytest.approx(-0.693, abs=1e-3)


# ---- keys


def test_proofs_with_keyed_indices_still_verify(tiny_model: Slices) -> None:
    model = tiny_model("llama", None, "final_norm")
    tokens = prompt(4, 24)
    provider, own = release(model, HALF, tokens).states, model.encode(torch.tensor(tokens))
    key, other = request_seed("a", "1"), request_seed("a", "2")
    proof = commit(scatter(provider, key), 64)
    assert verify(scatter(own, key), proof, k=64).accepted
    assert not verify(scatter(own, other), proof, k=64).accepted
    assert not verify(own, proof, k=64).accepted
    assert not verify(scatter(model.encode(torch.tensor(prompt(5, 24))), key), proof, k=64).accepted


def test_seeds_differ_by_key_and_request() -> None:
    seeds = {request_seed(*pair) for pair in (("a",), ("a", "b"), ("ab",), ("", "ab"), ("b", "a"))}
    assert len(seeds) == 5 and min(seeds) >= 0


def test_a_secret_projection_is_learned_from_enough_positions(tiny_model: Slices) -> None:
    model = tiny_model("llama", None, "final_norm")
    secret = Projection(8, request_seed("key"), ORTHOGONAL)
    states = model.encode(torch.tensor(prompt(7, 160)))
    true = secret(torch.eye(model.width))
    errors = []
    for known in (16, 32, 160):
        learned = learn_projection(states[:known], secret(states[:known]))
        errors.append(float(torch.linalg.matrix_norm(learned - true) / torch.linalg.matrix_norm(true)))
    assert errors[0] > 0.7 and errors[0] > errors[1] > 0.5 and errors[2] < 1e-3
    tokens = prompt(8)
    plain = release(model, "identity", tokens)
    observation = Observation(secret(plain.states), plain.info)
    assert attacked(observation, model, directions=learned).ids == tokens
    keyed = Observation(
        Projection(8, request_seed("key", "user"), ORTHOGONAL)(plain.states), observation.info
    )
    recovery = attacked(keyed, model, directions=learned)
    assert recovery.ids != tokens and not any(token.verified for token in recovery.tokens)


def test_ridge_does_not_fit_noise(tiny_model: Slices) -> None:
    model = tiny_model("llama", None, "final_norm")
    secret = Projection(4, 1, ORTHOGONAL)
    states = model.encode(torch.tensor(prompt(7, 70)))
    noisy = secret(states) + 0.05 * torch.randn(70, 4, generator=draw())
    true = secret(torch.eye(model.width))
    plain, ridged = (learn_projection(states, noisy, ridge) for ridge in (0.0, 0.1))
    assert torch.linalg.matrix_norm(ridged - true) < torch.linalg.matrix_norm(plain - true)


# ---- wrong input


@pytest.mark.slow
def test_wrong_observations_get_a_clear_answer(tiny_model: Slices) -> None:
    model = tiny_model("llama", None, "final_norm")
    tokens = prompt()
    fine = release(model, "toploc:k=64", tokens)
    with pytest.raises(NotApplicableError, match="vocab-match is for whole states"):
        attacked(release(model, "identity", tokens), model)
    with pytest.raises(NotApplicableError, match="in order"):
        attacked(release(model, "toploc:k=64+seq-perm", tokens), model)
    with pytest.raises(NotApplicableError, match="gaps"):
        attacked(release(model, "toploc:k=64+drop-rows:size=2,after=3", tokens), model)
    with pytest.raises(InputError, match="the truncated model gives"):
        attacked(fine, tiny_model("llama", None, "logits"))
    with pytest.raises(InputError, match="other weights"):
        attacked(fine, tiny_model("qwen3", None, "final_norm"))
    for fact in (None, {"k": 0}, {"k": True}, "128"):
        with pytest.raises(InputError, match="how many values k"):
            attacked(Observation(fine.states, replace(fine.info, facts={"toploc": fact})), model)
    with pytest.raises(InputError, match="wide"):
        attacked(Observation(fine.states[:, 1:], fine.info), model)
    with pytest.raises(InputError, match="wide"):
        attacked(fine, model, directions=torch.zeros(model.width, 3))
    resid = tiny_model("llama", 2)
    info = replace(release(resid, "identity", tokens).info, facts=fine.info.facts)
    with pytest.raises(NotApplicableError, match="final_norm and logits"):
        attacked(Observation(fine.states, info), resid)


def test_tokens_outside_the_vocabulary_are_refused(tiny_model: Slices) -> None:
    model = tiny_model("llama", None, "logits")
    observation = release(model, "logprobs:k=2", prompt())
    states = observation.states.clone()
    states[0, 2] = 300.0
    with pytest.raises(InputError, match="outside the vocabulary"):
        attacked(Observation(states, observation.info), model)


def test_wrong_settings_get_a_clear_answer(tiny_model: Slices) -> None:
    model = tiny_model("llama", None, "final_norm")
    for make in (
        lambda: Toploc(0),
        lambda: Logprobs(0),
        lambda: FingerprintInversion(0),
        lambda: FingerprintInversion(error=0.0),
    ):
        with pytest.raises(InputError):
            make()
    with pytest.raises(InputError, match="use --stream logits"):
        release(model, "logprobs", prompt())
    with pytest.raises(InputError, match="use --stream final_norm"):
        release(tiny_model("llama", 2), "toploc", prompt())
    with pytest.raises(InputError, match="640 values"):
        release(model, "toploc:k=641", prompt())
    with pytest.raises(InputError, match="vocabulary of 300"):
        release(tiny_model("llama", None, "logits"), "logprobs:k=301", prompt())
    with pytest.raises(InputError):
        learn_projection(torch.zeros(3, 4), torch.zeros(2, 1))


# ---- the experiment


@pytest.mark.slow
def test_the_experiment_measures(tiny: Callable[..., str], tmp_path: Path) -> None:
    model = tiny("llama", tokenizer=True)
    experiment = leak.leak(Setting(model=model, limit=2, max_tokens=6, device="cpu"), budget=300, breadth=4)
    rows = {cell.keys["released"]: cell for cell in experiment.cells}
    assert len({cell.digest for cell in experiment.cells}) == len(experiment.cells) == 23
    assert rows["TOPLOC, 128 values"].keys["bytes a token"] == 43.0
    wanted = {"exact", "token_accuracy", "evaluated_tokens_per_token"}
    for name in ("TOPLOC, 128 values", "nothing (language model alone)"):
        result = measure_cell(rows[name], tmp_path)
        assert result["status"] == "measured" and wanted <= set(result["figures"])
    learned = [cell for cell in experiment.cells if cell.measure == "learned-projection"]
    results = [measure_cell(cell, tmp_path)["figures"] for cell in (learned[0], learned[-2], learned[-1])]
    few, many, keyed = (figures["projection_error"]["value"] for figures in results)
    assert many < 0.2 < few and keyed > 0.9
    assert results[1]["token_accuracy"]["value"] > results[2]["token_accuracy"]["value"]


def test_rows_are_chosen_by_name_or_by_part(tiny: Callable[..., str]) -> None:
    setting = Setting(model=tiny("llama", tokenizer=True), limit=1, max_tokens=6, device="cpu")

    def chosen(only: str) -> set[str]:
        return {cell.keys["released"] for cell in leak.leak(setting, only=only).cells}

    assert chosen("Activation-DiFR, k = 8") == {"Activation-DiFR, k = 8"}
    assert chosen("secret; TOPLOC, 16 values") == {
        "Activation-DiFR, k = 8, one secret projection", "TOPLOC, 16 values"
    }  # fmt: skip
    assert chosen("k = 3") == {"Activation-DiFR, k = 32"} | {
        f"Activation-DiFR, k = 32, every {n} tokens" for n in (2, 4)
    }
    with pytest.raises(InputError, match="no row of this experiment is called 'k = 7'"):
        chosen("TOPLOC, 16 values;k = 7")
    with pytest.raises(InputError, match="without a name"):
        chosen(";")
    with pytest.raises(InputError):
        leak.leak(setting, budget="abc")  # type: ignore[arg-type]
    same = {cell.digest for cell in leak.leak(setting, first_tokens=2048).cells}
    assert same == {cell.digest for cell in leak.leak(setting).cells}
    assert "first_tokens=9" in leak.leak(setting, first_tokens=9).cells[0].spec["attack"]


def test_detection_and_recovery_share_a_row(tiny: Callable[..., str], tmp_path: Path) -> None:
    setting = Setting(model=tiny("llama", tokenizer=True), max_tokens=6, device="cpu")
    experiment = leak.leak_pareto(setting, counts="2,8", proofs="4", budget=300)
    measures = [cell.measure for cell in experiment.cells]
    assert measures == ["attack", "detection"] * 3
    assert "toploc:k=24" in experiment.cells[4].spec["defense"]
    assert experiment.cells[5].spec["score"] == "toploc:4:1:exponents"
    alone = {cell.digest for cell in leak.leak(setting, budget=300).cells}
    assert {cell.digest for cell in experiment.cells[:4:2]} <= alone
    recovered = {"figures": {"exact": {"value": 1.0}}, "status": "measured"}
    rows = [row_of(cell, recovered if cell.measure == "attack" else {}) for cell in experiment.cells]
    rows[5] = row_of(experiment.cells[5], {"figures": {"auc_4": {"value": 0.9}}, "status": "measured"})
    assert experiment.fold is not None
    first, second, third = experiment.fold(rows)
    assert [one["status"] for one in (first, second, third)] == ["measured"] * 3
    assert first["keys"] == {"fingerprint": "Activation-DiFR, k = 2", "bytes a token": 8.0}
    assert set(third["figures"]) == {"exact", "auc_4"} and third["reason"] is None
    assert second["reason"] == "detection: not measured yet"


@pytest.mark.parametrize("wrong", [{"counts": "3"}, {"proofs": "4,x"}, {"tokens": 5}])
def test_what_activations_do_not_measure_is_refused(tiny: Callable[..., str], wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        leak.leak_pareto(Setting(model=tiny("llama", tokenizer=True)), **wrong)


def test_a_position_is_settled_where_the_rest_has_little_weight() -> None:
    """Against the posterior written out: 100 continuations of weight 1 in all, of which some were tried."""
    prior = torch.linspace(0, -8, 100).log_softmax(0)
    evidence = torch.full((100,), -1.0)
    for best, tried in ((8.0, 5), (8.0, 60), (2.0, 60), (2.0, 99)):
        evidence[3] = best
        part = _Continuations(
            torch.zeros(tried).long(), torch.arange(tried), prior[:tried], evidence[:tried], 100
        )
        seen = (prior + evidence)[:tried].double().exp().sum()
        unseen = prior[tried:].double().exp().sum()
        assert part.settled(0.0) == bool(seen / unseen >= math.exp(4.6))
    whole = _Continuations(torch.zeros(100).long(), torch.arange(100), prior, evidence, 100)
    assert whole.settled(0.0)
