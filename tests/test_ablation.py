"""Leaving out a part of an attack: the part is out, the rest works, and unknown parts are refused."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch

from hiddenlab import registry
from hiddenlab.attacks.beam_decoding import EVIDENCE, BeamDecoding
from hiddenlab.attacks.beam_decoding.features import FEATURES
from hiddenlab.attacks.vocab_match import VocabMatch, task
from hiddenlab.channels import Channel
from hiddenlab.errors import InputError
from hiddenlab.eval.cells import Setting
from hiddenlab.eval.tables.ablation import MADE_FOR, NOTHING, WITHOUT, ablation
from hiddenlab.models import TruncatedModel

LoadModel = Callable[..., TruncatedModel]
PROMPT = [5, 80, 7, 291, 33, 12]


def shown(model: TruncatedModel, *specs: str) -> Any:
    return Channel.parse(specs).release(model, PROMPT, torch.Generator().manual_seed(1))[0]


@pytest.mark.parametrize("name", ["vocab-match", "beam-decoding", "missing-tokens"])
def test_an_unknown_part_is_refused_with_those_that_there_are(name: str) -> None:
    with pytest.raises(
        InputError, match=r"no part 'wheel' can be left out; those that can are .*screening|probe"
    ):
        registry.build("attacks", f"{name}:without=wheel")


def test_every_row_of_the_experiment_names_parts_that_its_attack_has() -> None:
    measured = {cell.keys["defense"] for cell in ablation(Setting(layers=(1,))).cells}
    for channel in measured:
        Channel.parse([channel])
    assert len(measured) == len(MADE_FOR)
    for attack, parts in MADE_FOR.values():
        for part in (NOTHING, *parts):
            registry.build("attacks", f"{attack}:{WITHOUT[attack][part]}" if part != NOTHING else attack)
    named = {part for attack, parts in MADE_FOR.values() for part in parts if attack == "beam-decoding"}
    assert set(WITHOUT["beam-decoding"]) - {NOTHING} == named
    cells = ablation(Setting(layers=(1,)), channels="seq-perm", parts="opener,probe").cells
    assert [cell.keys["left out"] for cell in cells] == [NOTHING, "probe", "opener"]
    assert {cell.spec["limit"] for cell in cells} == {10}
    quick = ablation(Setting(layers=(1,)), channels="identity", setup="quick").cells
    assert {(cell.spec["setup"], cell.spec["independent"]) for cell in quick} == {("quick", True)}


@pytest.mark.slow
def test_vocabulary_matching_has_what_is_not_left_out(
    tiny_model: LoadModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, asked = tiny_model("llama", 2), list[int]()
    monkeypatch.setattr(
        "hiddenlab.attacks.vocab_match.first_token_table_for", lambda *_: asked.append(1) or (None, 0.0)
    )
    for channel in ([], ["seq-perm"]):
        observation = shown(model, *channel)
        for part in ("", "failures", "reading", "opener", "first-tokens", "first-tokens+reading"):
            asked.clear()
            attack = VocabMatch(without=part).fit(observation.info, model)
            assert sorted(attack.recover(observation).ids) == sorted(PROMPT)
            proposer = attack._prepared.proposer  # type: ignore[union-attr]
            reads = not channel and "reading" not in part
            assert (proposer.reader is not None, proposer.lm is not None) == (reads, not reads)
            assert (not asked) == ("first-tokens" in part)
            assert part != "failures" or proposer.adapter is None
            assert proposer.lm is None or (proposer.lm.opened.length > 0) == (part != "opener")


@pytest.mark.slow
def test_evidence_left_out_has_no_weight_and_the_others_are_learned_without_it(tiny_model: LoadModel) -> None:
    model = tiny_model("llama", 2)
    observation = shown(model, "gaussian:sigma=0.01")
    weights = {
        part: BeamDecoding(without=part).fit(observation.info, model).measured for part in ("", "probe")
    }
    assert weights["probe"]["weight_probe"] == 0 < weights[""]["weight_probe"]
    others = [name for name in FEATURES if name != "probe"]
    assert any(weights[""][f"weight_{name}"] != weights["probe"][f"weight_{name}"] for name in others)
    assert set(EVIDENCE) == {name.replace(" ", "-") for name in FEATURES if name != "language model"}


@pytest.mark.slow
def test_the_search_of_a_beam_without_its_parts(
    tiny_model: LoadModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama", 2)
    observation = shown(model, "gaussian:sigma=0.01", "seq-perm")
    moved = list[int]()
    monkeypatch.setattr("hiddenlab.attacks.beam_decoding.local_search.improve", lambda *_: moved.append(1))
    ahead = {}
    for part in ("", "lookahead", "moves", "widening"):
        attack = BeamDecoding(without=part, beam=2, width=8).fit(observation.info, model)
        prepared = attack.prepare(observation)
        before = len(moved)
        with torch.inference_mode():
            (decoding,) = attack._decode([observation], prepared)
        assert (len(moved) == before) == (part == "moves")
        assert decoding.ahead is not None
        ahead[part] = bool(decoding.ahead.any())
        assert part != "widening" or prepared.learned.lead == float("-inf")
    assert ahead == {"": True, "lookahead": False, "moves": True, "widening": True}


@pytest.mark.slow
@pytest.mark.parametrize("kept", [0, task.MOST_KEPT])
def test_the_table_of_rows_is_what_the_probe_says_of_the_free_ones(
    tiny_model: LoadModel, monkeypatch: pytest.MonkeyPatch, kept: int
) -> None:
    """Kept for the prompt or computed for each token: the same scores, asked with the rows that are free."""
    monkeypatch.setattr(task, "MOST_KEPT", kept)
    model = tiny_model("llama", 2)
    observation = shown(model, "seq-perm")
    attack = VocabMatch(setup="full").fit(observation.info, model)
    asked = list[list[int]]()
    of_rows = task.Task.of_rows

    def checked(self: task.Task, targets: Sequence[int]) -> torch.Tensor | None:
        said = of_rows(self, targets)
        assert self.proposer.probe is not None and said is not None
        slow = torch.stack([self.proposer.probe.log_probs(self.raw[[row]])[0] for row in targets]).amax(0)
        assert torch.allclose(said, slow, atol=1e-4)
        asked.append(list(targets))
        return said

    monkeypatch.setattr(task.Task, "of_rows", checked)
    assert sorted(attack.recover(observation).ids) == sorted(PROMPT)
    assert all(set(later) < set(earlier) for earlier, later in pairwise(dict.fromkeys(map(tuple, asked))))
