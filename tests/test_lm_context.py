"""What the proposing language model reads before every prompt."""

from collections.abc import Callable

import pytest
import torch

from hiddenlab.matching.batching import run_batched
from hiddenlab.matching.ranking import LanguageModel, LazyModel
from hiddenlab.models import TruncatedModel, load_model
from hiddenlab.proposals.lm_context import LENGTH, WINDOWS, beginnings, opened, openers_of


@pytest.fixture
def lm(tiny: Callable[..., str]) -> TruncatedModel:
    return load_model(tiny("llama", tokenizer=True), stream="logits")


def test_the_opener_is_that_behind_which_own_text_is_likeliest(lm: TruncatedModel) -> None:
    openers = [one.tolist() for one in openers_of(lm)]
    assert [] in openers and len(openers) == len({tuple(one) for one in openers}) >= 2
    windows = beginnings(lm, 3)
    assert len(windows) == WINDOWS and max(map(len, windows)) == LENGTH
    totals = []
    for opener in openers:
        total = 0.0
        for window in windows:
            said = lm.encode(torch.tensor([*opener, *window.tolist()])).log_softmax(-1)[len(opener) : -1]
            total += float(said.gather(1, window[1:, None]).sum())
        totals.append(total)
    chosen = opened(lm, seed=3)
    assert chosen.tokens == openers[totals.index(max(totals))]
    assert opened(lm, seed=3).tokens == chosen.tokens


@pytest.mark.parametrize("opener", [[], [7, 9]])
def test_the_language_model_reads_on_behind_it(
    lm: TruncatedModel, monkeypatch: pytest.MonkeyPatch, opener: list[int]
) -> None:
    prefix = lm.prefix()
    if opener:
        prefix.extend(torch.tensor(opener))
    monkeypatch.setattr("hiddenlab.matching.ranking.opened", lambda model: prefix)
    lazy = LazyModel(lm)
    monkeypatch.setattr(lazy, "model", lm)
    one, tokens = LanguageModel(lazy), [5, 17, 3, 40]
    assert one.cost(tokens, lazy.layers) == 4
    for count in (1, 3, 4):
        ((found, _),) = run_batched([one.next_token(tokens[:count])])
        wanted = lm.encode(torch.tensor([*opener, *tokens[:count]]))[-1].log_softmax(-1)
        assert torch.allclose(found, wanted, atol=1e-4)
    assert one.cost(tokens, lazy.layers) == 0
    ((along, _),) = run_batched([one.along(tokens)])
    wanted = lm.encode(torch.tensor([*opener, *tokens[:-1]]))[len(opener) :].log_softmax(-1)
    assert torch.allclose(along, wanted, atol=1e-4)
    assert prefix.tokens == opener  # what all prompts share stays as it is


def test_without_a_tokenizer_there_may_be_nothing_to_read(tiny_model: Callable[..., TruncatedModel]) -> None:
    model = tiny_model("llama", None, "logits")
    assert opened(model).tokens in [one.tolist() for one in openers_of(model)]
