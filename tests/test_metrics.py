"""Scores of recovered texts."""

import pytest

from eval.metrics import TextScore, score_text


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
    assert score(text, text) == {"exact": True, "token_accuracy": 1.0, "rouge_l": 1.0, "bleu": 1.0}


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
        {"exact": False, "token_accuracy": 1.0, "rouge_l": 0.0, "bleu": 0.0}
    )
    assert score("x", "y", [1, 2, 3, 4], [9, 1, 2, 3])["token_accuracy"] == 0.0


def test_texts_without_latin_words_are_compared_by_their_ids() -> None:
    assert score("你好世界", "你好时间", [1, 2, 3, 4], [1, 2, 8, 9])["rouge_l"] == 0.5
    assert score("你好世界", "something else", [1, 2, 3, 4], [7, 8])["rouge_l"] == 0.0


def test_nothing_recovered_and_nothing_to_recover() -> None:
    assert score("the cat", "") == {"exact": False, "token_accuracy": 0.0, "rouge_l": 0.0, "bleu": 0.0}
    with pytest.raises(ValueError, match="no tokens"):
        score("", "")
