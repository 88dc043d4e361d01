"""Known texts of one key undo what it hides; what they do not show is refused, and nothing wrong is verified."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hiddenlab.attacks.known_texts import KnownTexts, facts_behind, turned, undone_by
from hiddenlab.attacks.known_texts.fits import EXACT, Pair, Undo, best_fit
from hiddenlab.attacks.vocab_match import VocabMatch
from hiddenlab.attacks.vocab_match.known import with_known
from hiddenlab.channels import Channel
from hiddenlab.errors import InputError, NotApplicableError
from hiddenlab.matching.distance import choose_matcher
from hiddenlab.models import TruncatedModel
from hiddenlab.observation import save_observation
from hiddenlab.secret_maps import is_mapped
from hiddenlab.stages import Stage
from hiddenlab.types import GroundTruth, KnownText, Observation
from hiddenlab.utils.random import key_of

Truncated = Callable[..., TruncatedModel]
PROMPT = (84, 105, 32, 84, 201, 9, 77, 13, 40, 41, 42, 250, 3, 77, 16, 99)


class Scaled(Stage):
    """A secret linear map that is no turn, with an offset; it publishes nothing."""

    spec = "scaled"

    def states(self, states: Tensor, generator: torch.Generator) -> Any:
        width = states.shape[1]
        drawn = key_of(generator, "map")
        map_ = torch.eye(width) + torch.randn(width, width, generator=drawn) / width**0.5
        return states @ map_ + torch.randn(width, generator=drawn), None, {}


class Squared(Stage):
    """No linear map."""

    spec = "squared"

    def states(self, states: Tensor, generator: torch.Generator) -> Any:
        return torch.rand(states.shape, generator=generator) * states.square(), None, {}


def seen(
    model: TruncatedModel, stages: Sequence[Any], texts: int, length: int = len(PROMPT), key: int | None = 5
) -> tuple[Observation, GroundTruth]:
    """Release the prompt, and random texts under the same key."""
    channel, drawn = Channel.parse(stages), torch.Generator().manual_seed(3)
    shown, truth = channel.release(model, PROMPT, 1, key)
    known = []
    for number in range(texts):
        tokens = torch.randint(model.vocab_size, (length,), generator=drawn).tolist()
        known.append(KnownText(tuple(tokens), channel.release(model, tokens, 100 + number, key)[0]))
    return replace(shown, known=tuple(known)), truth


def fitted(model: TruncatedModel, observation: Observation) -> Undo:
    return KnownTexts().fit(observation.info, model).fitted(observation)


@pytest.mark.parametrize(
    ("stages", "texts", "length", "name"),
    [
        (["seq-perm"], 1, 16, "mixed rows"),
        (["row-mixing"], 1, 16, "mixed rows"),
        (["row-mixing:kind=orthogonal,shield=3"], 2, 16, "mixed rows"),
        (["hidden-perm"], 1, 16, "an order of coordinates for each row"),
        (["hidden-perm:shared"], 1, 7, "one order of coordinates"),
        (["2d-perm"], 1, 16, "an order of coordinates for each row"),
        (["orthogonal"], 5, 40, "a turn of the coordinates"),
        (["orthogonal", "seq-perm"], 12, 16, "a turn of the coordinates"),
        ([Scaled()], 5, 40, "a linear map of the coordinates"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_a_key_hides_is_undone_exactly(
    tiny_model: Truncated, stages: list[Any], texts: int, length: int, name: str
) -> None:
    model = tiny_model("llama", 2)
    observation, _ = seen(model, stages, texts, length)
    undo = fitted(model, observation)
    assert (undo.name, undo.basis) == (name, None)
    plain = model.encode(torch.tensor(PROMPT)).float()
    torch.testing.assert_close(undone_by(undo, observation).states, plain, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "stages", [["hidden-perm"], ["orthogonal"], ["orthogonal", "seq-perm"], ["row-mixing"]]
)
def test_prompts_are_read_behind_them_and_what_is_verified_is_right(
    tiny_model: Truncated, stages: list[str]
) -> None:
    model = tiny_model("llama", 2)
    observation, truth = seen(model, stages, 3)
    result = KnownTexts().fit(observation.info, model).recover(observation)
    right = [token.token == wanted for token, wanted in zip(result.tokens, truth.tokens, strict=True)]
    assert sum(right) >= 14 and not any(
        token.verified and not ok for token, ok in zip(result.tokens, right, strict=True)
    )
    assert sum(token.verified for token in result.tokens) >= 14
    order = truth.row_order or tuple(range(len(PROMPT)))
    if "row-mixing" not in stages:
        assert [order[token.row] for token in result.tokens] == list(range(len(PROMPT)))


def test_few_known_rows_show_a_turn_within_their_space(tiny_model: Truncated) -> None:
    model = tiny_model("llama", 2)
    observation, _ = seen(model, ["orthogonal"], 1)
    undo = fitted(model, observation)
    assert undo.basis is not None and len(undo.basis) < model.width and undo.error <= EXACT
    plain = model.encode(torch.tensor(PROMPT)).double()
    undone = undone_by(undo, observation)
    torch.testing.assert_close(undone.states, undo.seen(plain).float(), rtol=1e-3, atol=1e-3)
    assert undone.info.facts["row_space"] == min(len(undo.basis), len(PROMPT))


def test_texts_under_the_turn_of_a_prompt_come_before_its_rows(tiny_model: Truncated) -> None:
    model = tiny_model("llama", 2)
    observation, _ = seen(model, ["orthogonal"], 2)
    handed = turned(fitted(model, observation), observation)
    assert handed is not None and handed.info.channel == ("orthogonal",) and len(handed.known) == 2
    matcher = with_known(choose_matcher("auto", handed.info), handed, handed.states, model)
    assert matcher.frame is not None and matcher.frame.count == 2 * len(PROMPT)
    first = model.encode(torch.tensor(PROMPT[:1])), model.encode(torch.tensor([PROMPT[0] + 1]))
    row = matcher.prepare(handed.states)[matcher.frame.count :][:1]
    right, wrong = (matcher.pairs(candidates=matcher.view(state), observed=row) for state in first)
    assert float(right) < 1e-4 < 0.05 < float(wrong)
    alone = replace(handed, known=())
    assert with_known(choose_matcher("auto", alone.info), alone, alone.states, model).frame.count == 0  # type: ignore[union-attr]


def test_texts_of_other_keys_are_no_use_to_vocabulary_matching(tiny_model: Truncated) -> None:
    model = tiny_model("llama", 2)
    observation, truth = seen(model, ["orthogonal"], 1, key=None)
    result = VocabMatch().fit(observation.info, model).recover(observation)
    assert result.ids == list(truth.tokens)


def test_noise_behind_a_fit_stays_in_the_facts_and_leaves_tokens_unverified(tiny_model: Truncated) -> None:
    model = tiny_model("llama", 2)
    observation, _ = seen(model, ["output-noise:sigma=0.1", "hidden-perm"], 6)
    undo = fitted(model, observation)
    assert 0.05 < undo.error < 0.4
    info = facts_behind(undo, observation.info, len(PROMPT))
    assert (
        info.channel == ("output-noise:sigma=0.1",) and info.columns_permuted is None and not is_mapped(info)
    )
    hidden = facts_behind(
        undo, replace(observation.info, channel=()), len(PROMPT)
    )  # who does not know the stages
    (measured,) = hidden.channel
    assert undo.error <= float(measured.removeprefix("output-noise:sigma=")) <= 2 * undo.error


@pytest.mark.parametrize(
    ("stages", "texts", "key", "said"),
    [
        (["orthogonal"], 0, 5, "no text is known"),
        (["identity"], 3, 5, "no map or order"),
        (["output-noise:sigma=0.1"], 3, 5, "no map or order"),
        (["orthogonal"], 3, None, "no map or order|an error of"),
        ([Squared()], 3, 5, "no map or order|an error of"),
        (["drop-rows:size=2,after=4"], 3, 5, "a row of its own state"),
        (["vocab-bijection"], 3, 5, "a row of its own state"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_known_texts_do_not_show_is_refused(
    tiny_model: Truncated, stages: list[Any], texts: int, key: int | None, said: str
) -> None:
    model = tiny_model("llama", 2)
    observation, _ = seen(model, stages, texts, key=key)
    with pytest.raises(NotApplicableError, match=said):
        fitted(model, observation)


def test_a_single_text_proves_no_order_of_coordinates() -> None:
    drawn = torch.Generator().manual_seed(0)
    plain = torch.randn(6, 32, generator=drawn)
    other = torch.randn(6, 32, generator=drawn)  # sorted, they look alike up to a tenth
    undo = best_fit([Pair(plain, other, torch.arange(6))], 6)
    assert not undo.name or undo.error > 0.7


def test_an_observation_with_known_texts_is_not_saved_without_them(
    tiny_model: Truncated, tmp_path: Any
) -> None:
    observation, _ = seen(tiny_model("llama", 2), ["orthogonal"], 1)
    with pytest.raises(InputError, match="holds no known texts"):
        save_observation(observation, tmp_path / "rows.safetensors")
