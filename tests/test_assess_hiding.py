"""What an attacker does not know of a defense is in nothing that an attack gets; a verdict says whom it is about."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hiddenlab.attacker import Attacker
from hiddenlab.attacks.replay import Replay
from hiddenlab.channels import Channel
from hiddenlab.config import AttackConfig
from hiddenlab.errors import NEEDS_CODE, InputError, NotApplicableError
from hiddenlab.eval.assess import command
from hiddenlab.eval.assess.command import assess
from hiddenlab.eval.assess.ensemble import ATTACKS, SUPPOSED, Step, attack_all, steps_of
from hiddenlab.eval.assess.hiding import as_known, stand_ins
from hiddenlab.models import TruncatedModel
from hiddenlab.preparations import as_whole
from hiddenlab.stages import Stage, is_supposed
from hiddenlab.types import Observation, ObservationInfo, Site, silent
from tests.planted_faults import OneOrder

Truncated = Callable[..., TruncatedModel]
TOKENS = (84, 105, 32, 84, 201, 9, 77, 13)
TOLD = [
    "seq-perm", "hidden-perm", "hidden-perm:shared", "2d-perm", "orthogonal", "orthogonal:fresh=row", "row-mixing",
    "row-mixing:shield=2", "decoys:count=2,kind=gaussian", "gaussian:sigma=0.25", "random-prefix", "dchi:eta=40.0",
    "snd:eta=40.0", "snd:eta=40.0,noise=code", "output-noise:sigma=0.1", "output-noise:sigma=0.1,kind=laplace",
    "truncated-svd:rank=4", "sparsify:keep=0.5", "project:count=8,seed=3", "dtype:bfloat16", "identity",
    "output-noise:sigma=0.1+orthogonal", "gaussian:sigma=0.25+2d-perm",
]  # fmt: skip


class Odd(Stage):
    """Publishes facts by names of the lab, in another form."""

    spec = "odd"

    def publish(self, info: ObservationInfo) -> ObservationInfo:
        from dataclasses import replace

        return replace(info, facts={"output_noise": 3, "secret_map": [["columns"]]})


def release(model: TruncatedModel, spec: str) -> Observation:
    return Channel.parse(spec.split("+")).release(model, TOKENS)[0]


@pytest.mark.parametrize("spec", TOLD)
def test_what_stands_in_has_the_same_public_facts(tiny_model: Truncated, spec: str) -> None:
    model = tiny_model("llama", 2)
    observation = release(model, spec)
    known = as_known(observation, model, Attacker(knows="facts"))
    assert is_supposed(known.info) and torch.equal(known.states, observation.states)
    bare = ObservationInfo(
        observation.info.model, observation.info.signature, observation.info.site,
        provider_dtype=observation.info.provider_dtype, quantization=observation.info.quantization,
    )  # fmt: skip
    again = Channel.parse(known.info.channel).published(bare)
    mine, theirs = ({**asdict(as_whole(info)), "channel": None} for info in (observation.info, again))
    assert mine == theirs


def test_facts_of_another_form_have_no_stand_in() -> None:
    info = Channel([Odd()]).published(ObservationInfo("m", (1.0,), Site(1)))
    assert stand_ins(info) == ()
    assert (
        stand_ins(Channel.parse(["round:dtype=int8"]).published(ObservationInfo("m", (1.0,), Site(1)))) == ()
    )
    secret = Channel.parse(["unknown-gaussian:sigma=0.5"]).published(ObservationInfo("m", (1.0,), Site(1)))
    assert stand_ins(secret) == ("unknown-gaussian",)


@pytest.mark.parametrize(
    "spec", ["2d-perm", "output-noise:sigma=0.1+orthogonal", "decoys:count=2,kind=gaussian"]
)
def test_who_knows_nothing_gets_rows_model_and_site(tiny_model: Truncated, spec: str) -> None:
    model = tiny_model("llama", 2)
    observation = release(model, spec)
    known = as_known(observation, model, Attacker(knows="nothing"))
    plain = release(model, "identity").info
    assert torch.equal(known.states, observation.states)
    assert asdict(known.info) == {
        **asdict(plain),
        "channel": (),
        "facts": {**plain.facts, "supposed_channel": True},
    }
    told = json.dumps(asdict(known.info))
    assert not any(name.partition(":")[0] in told for name in spec.split("+"))


def test_who_knows_nothing_has_no_attack_on_rows_that_are_no_states(tiny_model: Truncated) -> None:
    model = tiny_model("llama", 2)
    with pytest.raises(InputError, match=r"8 wide.*--knows facts"):
        as_known(release(model, "project:count=8"), model, Attacker(knows="nothing"))


def test_who_knows_the_code_gets_the_observation_itself(tiny_model: Truncated) -> None:
    model = tiny_model("llama", 2)
    observation = release(model, "2d-perm")
    assert as_known(observation, model, Attacker()) is observation


def test_replay_needs_the_code(tiny_model: Truncated) -> None:
    model = tiny_model("llama", 2)
    observation = Channel.parse([OneOrder()]).release(model, TOKENS)[0]
    Replay().fit(observation.info, model)
    for knows in ("facts", "nothing"):
        hidden = as_known(observation, model, Attacker(knows=knows))
        with pytest.raises(NotApplicableError, match=NEEDS_CODE):
            Replay().fit(hidden.info, model)


def test_a_step_supposes_a_defense(tiny_model: Truncated) -> None:
    model = tiny_model("llama", 1)
    observation, truth = Channel.parse(["seq-perm"]).release(model, TOKENS, seed=2)
    assert truth.row_order != tuple(range(len(TOKENS)))
    rows = [as_known(observation, model, Attacker(knows="nothing"))]
    steps = [Step("vocab-match"), Step("vocab-match", supposes=("seq-perm",))]
    found = attack_all(rows, model, 0, 120, silent, steps)
    assert [one.attack for one in found] == ["vocab-match", "vocab-match (supposes seq-perm)"]
    assert not found[0].results[0].verified
    assert found[1].results[0].ids == list(TOKENS) and found[1].results[0].verified


def test_who_knows_nothing_tries_suppositions_before_what_has_no_end() -> None:
    names = [step.name for step in steps_of(Attacker(knows="nothing"), ATTACKS)]
    assert len(set(names)) == len(names) == len(ATTACKS) + len(SUPPOSED) and names[-1] == ATTACKS[-1].name
    assert steps_of(Attacker(knows="facts"), ATTACKS) == steps_of(Attacker(), ATTACKS) == ATTACKS


class Turned(Stage):
    """Noise of one seed, of which nothing is published: known code breaks it."""

    spec = "turned"

    def states(self, states: Tensor, generator: torch.Generator) -> Any:
        noise = torch.randn(states.shape, generator=torch.Generator().manual_seed(0))
        return states + 30 * noise * states.norm(dim=1, keepdim=True), None, {}


@pytest.mark.parametrize("knows", ["code", "facts", "nothing"])
def test_a_verdict_says_whom_it_is_about(
    tiny: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, knows: Any, capsys: Any
) -> None:
    from hiddenlab.cli.assess import show
    from hiddenlab.registry import register

    register("defenses", "turned", Turned)
    monkeypatch.setattr(command, "ATTACKS", (Step("replay"), Step("nearest")))
    monkeypatch.setattr(command, "plantable", lambda *_: [])
    monkeypatch.setattr("hiddenlab.eval.assess.ensemble.SUPPOSED", (Step("nearest", supposes=("seq-perm",)),))
    (tmp_path / "prompts.txt").write_text("abcdefgh\nsome words\n")
    config = AttackConfig(
        model=tiny("llama", tokenizer=True), prompts=str(tmp_path / "prompts.txt"), layer=1, device="cpu",
        defense=("turned",),
    )  # fmt: skip
    made = assess(config, 1.0, attacker=Attacker(knows=knows), runs_dir=tmp_path / "runs")
    show(made.findings)
    shown, attacks = capsys.readouterr().out, made.findings["attacks"]
    if knows == "code":
        assert made.status == "BROKEN" and made.sentence.startswith("BROKEN: 100.0 %")
        return
    words = {
        "facts": "knows the public facts of the defense and not its code",
        "nothing": "knows nothing of the defense",
    }
    assert (
        made.status != "BROKEN" and f"{made.status} against an attacker who {words[knows]}" in made.sentence
    )
    assert attacks[0]["reason"] == NEEDS_CODE and f"Not used, since {NEEDS_CODE}: replay." in " ".join(
        shown.split()
    )
    assert len(attacks) == (3 if knows == "nothing" else 2)
