"""Several releases of one prompt are averaged where only noise differs, and named as unread where more does."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import hiddenlab as hl
from hiddenlab.attacker import Attacker
from hiddenlab.channels import Channel
from hiddenlab.config import AttackConfig
from hiddenlab.errors import InputError
from hiddenlab.eval.assess import command
from hiddenlab.eval.assess.command import assess
from hiddenlab.eval.assess.ensemble import Step
from hiddenlab.eval.assess.session import release_all
from hiddenlab.job import Case
from hiddenlab.models import TruncatedModel, load_model
from hiddenlab.repeated import reads
from hiddenlab.types import GroundTruth, Observation

Truncated = Callable[..., TruncatedModel]
TOKENS = (84, 105, 32, 84, 201, 9, 77)
COUNT = 16


def shown(model: TruncatedModel, spec: str, **attacker: Any) -> Observation:
    case = Case(0, "p", GroundTruth(TOKENS))
    channel = Channel.parse([stage for stage in spec.split("+") if stage])
    ((observation, _),) = release_all(model, channel, [case], 0, Attacker(releases=COUNT, **attacker))
    return observation


def off(model: TruncatedModel, rows: torch.Tensor) -> float:
    """Return the root mean square of what separates rows from the prompt's states, whatever their order."""
    plain = model.encode(torch.tensor(TOKENS)).double()
    near = torch.cdist(rows.double(), plain).argmin(1)
    assert sorted(near.tolist()) == list(range(len(TOKENS)))
    return float((rows.double() - plain[near]).square().mean().sqrt())


@pytest.mark.parametrize(
    ("spec", "key"),
    [
        ("output-noise:sigma=0.01", "request"),
        ("output-noise:sigma=0.01,kind=laplace", "request"),
        ("output-noise:sigma=0.01+seq-perm", "session"),
        ("output-noise:sigma=0.01+seq-perm", "request"),
        ("gaussian:sigma=0.01", "request"),
    ],
)
def test_the_mean_of_releases_has_a_quarter_of_the_noise_of_one(
    tiny_model: Truncated, spec: str, key: str
) -> None:
    model = tiny_model("llama", 2)
    one = Channel.parse(spec.split("+")).release(model, TOKENS, 5)[0]
    mean = shown(model, spec, key=key)
    assert reads(mean.info) == "mean" and reads(one.info) is None
    assert off(model, mean.states) < 0.4 * off(model, one.states)
    (stage,) = [name for name in mean.info.channel if "sigma" in name]
    assert stage.partition(",")[0] == spec.partition(":")[0] + ":sigma=0.0025"
    assert mean.info.rows_permuted is ("seq-perm" in spec)
    if spec.startswith("gaussian"):
        assert mean.info.noise_sigma is not None and math.isclose(mean.info.noise_sigma, 0.0025)


@pytest.mark.parametrize("spec", ["dchi:eta=3000", "dp-forward:epsilon=8,clip=30"])
def test_noise_of_differential_privacy_is_averaged_within_its_own_kind(
    tiny_model: Truncated, spec: str
) -> None:
    """The mean's noise, measured, is that of the stage which it is said to have passed, and a quarter of one's."""
    model = tiny_model("llama", 0, "embed")
    (stage,) = Channel.parse([spec]).defenses
    weaker = stage.averaged(COUNT)
    plain = model.encode(torch.tensor(TOKENS)).double()

    def noise(channel: Channel, count: int) -> float:
        shown = [channel.release(model, TOKENS, seed)[0].states.double() for seed in range(count)]
        return float((torch.stack(shown).mean(0) - plain).square().mean().sqrt())

    one, said = (noise(Channel([each]), 1) for each in (stage, weaker))
    assert said == pytest.approx(one / 4, rel=0.15)
    assert noise(Channel([stage]), COUNT) == pytest.approx(said, rel=0.15)
    assert type(weaker) is type(stage) and reads(shown(model, spec).info) == "mean"
    assert shown(model, spec).info.channel == (weaker.spec,)
    assert stage.averaged(1) is stage


def test_noise_so_weak_that_no_epsilon_names_it_is_not_averaged(tiny_model: Truncated) -> None:
    (stage,) = Channel.parse(["dp-forward:epsilon=400"]).defenses
    assert stage.averaged(10**6) is stage
    # A mean of clipped rows is not a clipped mean.
    for noise in ("gaussian:sigma=0.5", "unknown-gaussian:sigma=0.5"):
        assert reads(shown(tiny_model("llama", 2), f"{noise}+dp-forward:epsilon=20,clip=0.5").info) == "first"
    both = shown(tiny_model("llama", 2), "dp-forward:epsilon=20,clip=0.5+gaussian:sigma=0.5").info
    assert reads(both) == "mean"
    assert reads(shown(tiny_model("llama", 2), "snd:eta=3000").info) == "first"


def test_a_mean_of_the_facts_alone_is_the_same(tiny_model: Truncated) -> None:
    model = tiny_model("llama", 2)
    code, facts = (
        shown(model, "output-noise:sigma=0.01+seq-perm", knows=knows) for knows in ("code", "facts")
    )
    assert torch.equal(code.states, facts.states) and reads(facts.info) == "mean"
    with pytest.raises(InputError, match="knows nothing of a defense cannot say what the mean"):
        Attacker(releases=2, knows="nothing")


@pytest.mark.parametrize(
    ("spec", "key", "read"),
    [
        ("identity", "request", "same"),
        ("hidden-perm", "session", "same"),
        ("int8", "request", "same"),
        ("hidden-perm", "request", "first"),
        ("output-noise:sigma=0.01+hidden-perm", "request", "first"),
        ("output-noise:sigma=0.01+hidden-perm", "session", "mean"),
        ("random-prefix", "session", "first"),
        # So much noise hides which rows belong together.
        ("output-noise:sigma=3+seq-perm", "request", "first"),
        ("output-noise:sigma=3+seq-perm", "session", "mean"),
        ("unknown-gaussian:sigma=0.01", "request", "mean"),
        ("output-noise:sigma=0.01+orthogonal", "forever", "mean"),
        ("decoys:count=2", "request", "first"),
        # A mean of what such a stage makes of noise is not what it makes of weaker noise.
        ("output-noise:sigma=0.5+round:int4", "request", "first"),
        ("output-noise:sigma=0.5+sparsify:keep=0.1", "session", "first"),
        ("gaussian:sigma=0.01+truncated-svd:rank=4", "request", "first"),
        ("round:int4+output-noise:sigma=0.01", "request", "mean"),
        ("output-noise:sigma=0.01+project:count=8", "request", "mean"),
        ("output-noise:sigma=0.01+row-mixing", "session", "mean"),
        # Tokens may be others in each release, although those of the attacker's own text were the same twice.
        ("santext:epsilon=50+output-noise:sigma=0.01", "session", "first"),
        ("vocab-bijection+output-noise:sigma=0.01", "session", "mean"),
    ],
)
def test_what_is_no_noise_and_drawn_anew_is_not_averaged(
    tiny_model: Truncated, spec: str, key: str, read: str
) -> None:
    model = tiny_model("llama", 2)
    found = shown(model, spec, key=key)
    assert reads(found.info) == read
    if read == "mean":
        return
    (one,) = release_all(
        model,
        Channel.parse(spec.split("+")),
        [Case(0, "p", GroundTruth(TOKENS))],
        0,
        Attacker(key=key, known=int(key != "request")),
    )
    assert torch.equal(found.states, one[0].states) and found.info.channel == one[0].info.channel


def test_the_own_text_is_as_long_as_a_prompt_of_which_some_rows_are_shown(tiny_model: Truncated) -> None:
    model, case = tiny_model("llama", 2), Case(0, "p", GroundTruth(TOKENS * 10))
    channel = Channel.parse(["shard:alpha=4,c=16,node=3", "output-noise:sigma=0.01"])
    ((observation, _),) = release_all(model, channel, [case], 0, Attacker(releases=4))
    assert len(observation.states) < 17 and reads(observation.info) == "mean"


def test_log_probabilities_of_several_releases_are_not_averaged(tiny: Callable[..., str]) -> None:
    model = load_model(tiny("llama"), stream="logits", device="cpu")
    assert reads(shown(model, "gaussian:sigma=0.01+logprobs:k=5").info) == "first"


def test_a_verdict_tells_what_was_read_of_the_releases(
    tiny: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No defense holds of whose releases the first alone was read."""
    monkeypatch.setattr(command, "ATTACKS", (Step("nearest"),))
    monkeypatch.setattr(command, "plantable", lambda *_: [])
    config = AttackConfig(
        prompts=str(tmp_path / "p.txt"), model=tiny("llama", tokenizer=True), layer=2, device="cpu"
    )
    (tmp_path / "p.txt").write_text("abcdefgh\nsome words\n")
    for defense, read in ((("output-noise:sigma=0.01",), "mean"), (("hidden-perm",), "first")):
        made = assess(replace(config, defense=defense), 1.0, attacker=Attacker(releases=4), keep=False)
        assert (
            made.findings["attacker"]["reads"] == read
            and "released 4 times under a fresh key" in made.sentence
        )
    assert made.status == "INCONCLUSIVE" and "the first release alone was attacked" in made.sentence


@pytest.mark.slow
@pytest.mark.parametrize("sigma", [0.1, 0.4, 1.0])
def test_noise_that_bends_on_its_way_verifies_no_wrong_token(tiny_model: Truncated, sigma: float) -> None:
    """The mean of states behind noised inputs lies beside the plain states, by more than the noise that is left."""
    model = tiny_model("llama", 2)
    mean = shown(model, f"gaussian:sigma={sigma}")
    assert reads(mean.info) == "mean"
    found = hl.attack(mean, model, "vocab-match", budget=256)
    assert all(one.token == token for one, token in zip(found.tokens, TOKENS, strict=False) if one.verified)
