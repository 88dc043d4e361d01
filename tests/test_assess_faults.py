"""Defenses with planted faults: an assessment finds what they leak, and calls none of them held that is not."""

import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hiddenlab import registry
from hiddenlab.config import AttackConfig
from hiddenlab.eval.assess import command
from hiddenlab.eval.assess.command import assess, judge
from hiddenlab.eval.assess.ensemble import ATTACKS
from hiddenlab.eval.assess.verdict import BROKEN, HELD, INCONCLUSIVE, LEAKS
from hiddenlab.job import cases_of
from hiddenlab.models import load_model
from hiddenlab.prompts import Prompt
from hiddenlab.records import Recorder, RunRecord
from tests.planted_faults import HIDERS, OneOrder, OnlyNoise, SeedZero, Zeros, planted_in
from tests.test_assess import fakes, steps  # noqa: F401  (a fixture, used by every test)

TEXTS = ("The key is under the mat", "Ask Marie about room nine", "Nothing to see here today")
# Fewer tokens are not told from chance where nothing can be verified.
LONGER = (
    "The spare key to the cellar is under the blue mat by the door",
    "Please ask Marie whether room nine is free on Tuesday afternoon",
)
STAGES = {"all-zeros": Zeros, "only-noise": OnlyNoise, "seed-zero": SeedZero, "one-order": OneOrder}
REAL = ("vocab-match:setup=quick,budget=256", "planted", "vocab-match")


@pytest.fixture(autouse=True)
def stages(fakes: None) -> None:  # noqa: F811
    for name, stage in STAGES.items():
        registry.register("defenses", name, stage)


def found(tiny: Callable[..., str], tmp_path: Path, defense: str, *attacks: str) -> dict[str, Any]:
    """Return the findings on a defense of a tiny model's embeddings, with prompts of one sign each.

    They are so many that the interval of none read ends below 5 %.
    """
    path = tmp_path / "letters.txt"
    path.write_text("\n".join(string.ascii_letters + string.digits + string.punctuation))
    config = AttackConfig(
        model=tiny("llama", tokenizer=True), prompts=str(path), layer=0, stream="embed", defense=(defense,)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "ATTACKS", steps(*attacks))
        return dict(assess(config, 1.0, keep=False).findings)


def test_no_defense_is_broken(tiny: Callable[..., str], tmp_path: Path) -> None:
    assert found(tiny, tmp_path, "identity", "unsure", "planted")["status"] == BROKEN


@pytest.mark.slow
@pytest.mark.parametrize("defense", ["all-zeros", "only-noise"])
def test_what_shows_nothing_is_not_broken_and_useless(
    tiny: Callable[..., str], tmp_path: Path, defense: str
) -> None:
    """Attacks that read the same prompts without it read nothing: it held, and nobody can use it."""
    made = found(tiny, tmp_path, defense, "unsure", "planted")
    assert made["status"] == HELD and made["undefended"][0]["leak"]["value"] == 1
    path = tmp_path / "texts.txt"
    path.write_text("\n".join(TEXTS))
    config = AttackConfig(
        model=tiny("llama", tokenizer=True), prompts=str(path), layer=2, defense=(defense,), max_tokens=16
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "ATTACKS", steps("never"))
        utility = assess(config, 1.0, keep=False).findings["utility"]
    assert utility["perplexity"]["value"] > utility["clean_perplexity"]["value"] or (
        utility["top1_agreement"]["value"] < 0.5
    )


@pytest.mark.slow
def test_a_defense_that_makes_attacks_crash_does_not_hold(tiny: Callable[..., str], tmp_path: Path) -> None:
    made = found(tiny, tmp_path, "only-noise", "failing", "unsure")
    assert made["status"] == INCONCLUSIVE and "failing failed with an error" in made["sentence"]


@pytest.mark.parametrize("name", [*HIDERS, "facts"])
def test_a_planted_prompt_breaks_a_release(
    tiny: Callable[..., str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The channel is the identity, behind which the prompt is planted; no other attack of this run reads rows."""
    model = load_model(tiny("llama", tokenizer=True), 2, device="cpu")
    cases = cases_of([Prompt(f"p{n}", text, "PROMPT") for n, text in enumerate(TEXTS)], model)
    subject = command.Subject(model, command.Channel([]), cases, [], 0, (name,), "tiny")
    rows = [
        planted_in(name, *subject.channel.release(model, command.truth_of(case).tokens))  # type: ignore[union-attr]
        for case in cases
    ]
    monkeypatch.setattr(command, "ATTACKS", steps("never", "planted"))
    made = judge(subject, rows, 1.0, Recorder.create(RunRecord(verb="assess", spec={}), keep=False))
    assert made["status"] == BROKEN and made["leakiest"]["recovered"] == made["leakiest"]["text"]
    assert made["attacks"][1]["token_accuracy"] == 1 and made["verified"] > 0.9


@pytest.mark.parametrize(
    ("defense", "other"),
    [
        ("seed-zero", "planted"),
        ("one-order", "planted"),
        pytest.param("seed-zero", "vocab-match:setup=quick,budget=256", marks=pytest.mark.slow),
    ],
)
def test_what_is_drawn_once_for_all_requests_is_found(
    tiny: Callable[..., str], tmp_path: Path, defense: str, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else reads rows that noise drowns."""
    path = tmp_path / "texts.txt"
    path.write_text("\n".join(TEXTS))
    config = AttackConfig(
        model=tiny("llama", tokenizer=True), prompts=str(path), layer=2, defense=(defense,), max_tokens=10
    )
    monkeypatch.setattr(command, "ATTACKS", steps(other, "replay"))
    monkeypatch.setattr(command, "plantable", lambda *_: [])
    made = assess(config, 5.0, keep=False).findings
    assert made["status"] == BROKEN and made["exact"]["value"] == 1 and "by replay" in made["sentence"]
    assert (made["attacks"][0]["token_accuracy"] or 0) < 0.1


@pytest.mark.parametrize("attack", ["planted", "replay"])
def test_the_ensemble_looks_for_planted_faults(attack: str) -> None:
    assert attack in [step.attack for step in ATTACKS]


# ---- the built-in model


@pytest.mark.slow
@pytest.mark.parametrize("name", [*HIDERS, "facts"])
def test_the_builtin_model_s_prompt_is_found_in_noise(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the states is left, so that nothing can be verified: the language model alone knows the text."""
    model = load_model("builtin", 6)
    cases = cases_of([Prompt(f"p{n}", text, "PROMPT") for n, text in enumerate(LONGER)], model)
    subject = command.Subject(model, command.Channel([]), cases, [], 0, (name,), "builtin")
    rows = [
        planted_in(name, *subject.channel.release(model, command.truth_of(case).tokens), noise=True)  # type: ignore[union-attr]
        for case in cases
    ]
    monkeypatch.setattr(command, "ATTACKS", steps("planted"))
    made = judge(subject, rows, 10.0, Recorder.create(RunRecord(verb="assess", spec={}), keep=False))
    assert made["exact"]["value"] == 1 and made["verified"] == 0, made["sentence"]
    assert made["status"] in (BROKEN, LEAKS)  # of so few tokens the bound may lie below half


@pytest.mark.slow
@pytest.mark.parametrize(
    ("defense", "status"), [("identity", BROKEN), ("all-zeros", None), ("only-noise", None)]
)
def test_the_builtin_model_behind_the_two_ends(defense: str, status: str | None, tmp_path: Path) -> None:
    path = tmp_path / "texts.txt"
    path.write_text("\n".join(TEXTS))
    config = AttackConfig(prompts=str(path), layer=2, defense=(defense,))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "ATTACKS", steps(*REAL))
        made = assess(config, 3.0, keep=False)
    assert made.status == status if status else made.status in (HELD, INCONCLUSIVE)
    assert torch.isfinite(torch.tensor(made.leak))
