"""Turn token ids into text; ids for which a tokenizer has no text are shown as ``<id 299>``."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any


def known_ids(tokenizer: Any) -> frozenset[int]:
    """Return the ids that a tokenizer knows. Many models have rows of the embedding table beyond them."""
    return frozenset(tokenizer.get_vocab().values())


def shown(tokenizer: Any, known: frozenset[int], ids: Sequence[int]) -> str:
    """Return the text of token ids, special tokens included.

    Args:
        known: what ``known_ids`` returns.
    """
    text, last = "", list[int]()
    for is_known, group in groupby(ids, key=known.__contains__):
        run = list(group)
        if not is_known:
            text += "".join(f"<id {token}>" for token in run)
            continue
        # Some tokenizers leave out the space before the first token: this one is not the first.
        before, whole = _decoded(tokenizer, last), _decoded(tokenizer, last + run)
        text += whole.removeprefix(before) if whole.startswith(before) else _decoded(tokenizer, run)
        last = run[-1:]
    return text


def _decoded(tokenizer: Any, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))
