"""Score how close a recovered prompt is to the true one, as text and as tokens."""

from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any, TypedDict


class TextScore(TypedDict):
    """Scores of one recovered prompt; all but ``exact`` are fractions from 0 to 1."""

    exact: bool
    token_accuracy: float
    bag_of_tokens_recall: float
    rouge_l: float
    bleu: float


def score_text(
    *, truth_ids: Sequence[int], recovered_ids: Sequence[int], truth_text: str, recovered_text: str
) -> TextScore:
    """Compare a recovered prompt with the true one.

    ``exact`` is equality of the token ids. ``token_accuracy`` is the share of the truth's positions that hold
    the right token, so that a recovery that is too short loses what is missing and one shifted by a token
    loses nearly all. ``bag_of_tokens_recall`` is the share of the truth's tokens that the recovery holds in any order,
    each as often as both hold it: of permuted rows the words may be known but not their order. ``rouge_l`` is
    ROUGE-L's F1 (rouge-score, its own tokenizer, no stemming) on the texts, the score of the tables of Hidden
    No More; that tokenizer knows only latin letters and digits, so that where it finds no word in the truth the
    token ids are compared instead. ``bleu`` is sacrebleu's sentence BLEU over 100, with the effective order, so
    that a text of fewer than four words can reach 1.

    Raises:
        ValueError: the truth has no tokens.
    """
    if not truth_ids:
        raise ValueError("the truth has no tokens to compare with")
    hits = sum(a == b for a, b in zip(truth_ids, recovered_ids, strict=False))
    return TextScore(
        exact=list(truth_ids) == list(recovered_ids),
        token_accuracy=hits / len(truth_ids),
        bag_of_tokens_recall=(Counter(truth_ids) & Counter(recovered_ids)).total() / len(truth_ids),
        rouge_l=_rouge_l(truth_ids, recovered_ids, truth_text, recovered_text),
        bleu=_bleu(truth_text, recovered_text),
    )


@cache
def _rouge_scorer() -> Any:
    from rouge_score import rouge_scorer

    return rouge_scorer.RougeScorer(["rougeL"], use_stemmer=False)


def _rouge_l(truth_ids: Sequence[int], recovered_ids: Sequence[int], truth: str, recovered: str) -> float:
    if truth == recovered:
        return 1.0
    scorer = _rouge_scorer()  # its import takes a second
    if not scorer._tokenizer.tokenize(truth):
        truth, recovered = (" ".join(map(str, ids)) for ids in (truth_ids, recovered_ids))
    return float(scorer.score(target=truth, prediction=recovered)["rougeL"].fmeasure)


def _bleu(truth: str, recovered: str) -> float:
    # Texts of white space have no words, and sacrebleu scores equal texts without words as 0.
    if truth == recovered:
        return 1.0
    import sacrebleu

    return min(float(sacrebleu.sentence_bleu(recovered, [truth], use_effective_order=True).score) / 100, 1.0)
