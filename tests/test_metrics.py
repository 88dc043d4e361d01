"""Scores of recovered texts."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hiddenlab.eval.measures.attack import figures_of
from hiddenlab.eval.measures.metrics import TextScore, score_text
from hiddenlab.scoring import MISSING
from hiddenlab.summary import summarise


def score(
    truth: str, recovered: str, truth_ids: list[int] | None = None, recovered_ids: list[int] | None = None
) -> TextScore:
    """Score with the characters as tokens where no ids are given."""
    return score_text(
        truth_ids=[ord(c) for c in truth] if truth_ids is None else truth_ids,
        recovered_ids=[ord(c) for c in recovered] if recovered_ids is None else recovered_ids,
        truth_text=truth,
        recovered_text=recovered,
    )


@pytest.mark.parametrize("text", ["the cat sat on the mat", "a", "你好世界", " \n\t", "!?", "x = 1"])
def test_a_perfect_recovery_scores_one(text: str) -> None:
    assert score(text, text) == {
        "exact": True,
        "token_accuracy": 1.0,
        "bag_of_tokens_recall": 1.0,
        "rouge_l": 1.0,
        "bleu": 1.0,
    }


def test_known_values() -> None:
    found = score("the cat sat on the mat", "the cat is on the mat", [1, 2, 3, 4, 1, 5], [1, 2, 9, 4, 1, 5])
    assert found["exact"] is False
    assert found["token_accuracy"] == pytest.approx(5 / 6)
    assert found["rouge_l"] == pytest.approx(5 / 6)
    # n-gram precisions 5/6, 3/5, 1/4 and, smoothed, 1/(2·3); equal lengths, so no brevity penalty.
    assert found["bleu"] == pytest.approx((5 / 6 * 3 / 5 * 1 / 4 * 1 / 6) ** 0.25)


def test_token_accuracy_is_over_the_truth() -> None:
    assert score("x", "y", [1, 2, 3, 4], [1, 2])["token_accuracy"] == 0.5
    assert score("x", "y", [1, 2], [1, 2, 3, 4]) == pytest.approx(
        {"exact": False, "token_accuracy": 1.0, "bag_of_tokens_recall": 1.0, "rouge_l": 0.0, "bleu": 0.0}
    )
    assert score("x", "y", [1, 2, 3, 4], [9, 1, 2, 3])["token_accuracy"] == 0.0


def test_texts_without_latin_words_are_compared_by_their_ids() -> None:
    assert score("你好世界", "你好时间", [1, 2, 3, 4], [1, 2, 8, 9])["rouge_l"] == 0.5
    assert score("你好世界", "something else", [1, 2, 3, 4], [7, 8])["rouge_l"] == 0.0


def test_nothing_recovered_and_nothing_to_recover() -> None:
    nothing = dict.fromkeys(("token_accuracy", "bag_of_tokens_recall", "rouge_l", "bleu"), 0.0)
    assert score("the cat", "") == {"exact": False, **nothing}
    with pytest.raises(ValueError, match="no tokens"):
        score("", "")


def test_tokens_are_counted_in_any_order() -> None:
    assert score("x", "y", [1, 2, 3, 4], [4, 3, 2, 1])["bag_of_tokens_recall"] == 1.0
    assert score("x", "y", [1, 2, 3, 4], [9, 1, 2, 3])["bag_of_tokens_recall"] == 0.75
    # Each only as often as both hold it; a missing token stands for none.
    assert score("x", "y", [1, 1, 1, 2], [1, 1, 3, 3])["bag_of_tokens_recall"] == 0.5
    assert score("x", "y", [1, 2, 3, 4], [1, 1, 1, 1])["bag_of_tokens_recall"] == 0.25
    assert score("x", "y", [1, 2], [MISSING, 1])["bag_of_tokens_recall"] == 0.5
    assert score("x", "y", [1, 2], [MISSING, MISSING])["bag_of_tokens_recall"] == 0.0


few = st.integers(0, 5)


@given(truth=st.lists(few, min_size=1), recovered=st.lists(few | st.just(MISSING)), data=st.data())
def test_order_matters_to_accuracy_alone(truth: list[int], recovered: list[int], data: st.DataObject) -> None:
    found = score("x", "x", truth, recovered)
    assert found["token_accuracy"] <= found["bag_of_tokens_recall"] <= 1
    assert (found["bag_of_tokens_recall"] == 1) == all(
        recovered.count(token) >= truth.count(token) for token in truth
    )
    shuffled = score("x", "x", truth, data.draw(st.permutations(recovered)))
    assert shuffled["bag_of_tokens_recall"] == found["bag_of_tokens_recall"]


def test_older_records_lack_the_figure() -> None:
    sample: dict[str, Any] = {
        "status": "attacked", "tokens": 4, "exact": False, "token_accuracy": 0.5, "rouge_l": 0.5, "bleu": 0.5,
        "bag_of_tokens_recall": 0.75, "verified": 0.0, "evaluated_tokens": 8, "forward_calls": 2, "seconds": 1.0,
        "prefill_seconds": None, "epsilon": None, "per_token": {"evaluated": [2, 2, 2, 2]},
    }  # fmt: skip
    older = {name: value for name, value in sample.items() if name != "bag_of_tokens_recall"}
    assert figures_of([sample, sample])["bag_of_tokens_recall"]["value"] == 0.75
    assert summarise([sample])["bag_of_tokens_recall"] == 0.75
    for samples in ([older], [sample, older]):
        assert "bag_of_tokens_recall" not in figures_of(samples)
    assert summarise([older])["bag_of_tokens_recall"] is None
