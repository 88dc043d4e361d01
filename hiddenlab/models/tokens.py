"""Turn prompts into token ids, and token ids into text.

A prompt is a text, messages in the model's chat template, or the ids that it brings. Ids for which a tokenizer has no
text are shown as ``<id 299>``.
"""

import sys
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from torch import nn

from hiddenlab.errors import InputError
from hiddenlab.models.reading import reading_model
from hiddenlab.prompts import Prompt

ROOM = 2  # tokens that a model takes beside a text of the attacker's own


def most_tokens(module: nn.Module) -> int | None:
    """Return how many tokens a model takes, None where its configuration does not say."""
    most = getattr(module.config, "max_position_embeddings", None)
    return most if isinstance(most, int) and most > 0 else None


def longest_text(module: nn.Module) -> int:
    """Return how long an attacker's own text may be: an embedding may stand before it, and a token behind it."""
    return max(1, (most_tokens(module) or sys.maxsize) - ROOM)


def token_ids(
    tokenizer: Any, prompt: str | Prompt, name: str, *, most: int | None = None, size: int | None = None
) -> list[int]:
    """Return the token ids of a prompt; of a text with the tokenizer's own special tokens.

    Messages go through the chat template, up to where the model's turn begins if the last one is not the model's.

    Args:
        name: of the model, for errors. most: cut to so many ids.
        size: of the vocabulary; None for the tokenizer's own.

    Raises:
        InputError: the prompt is empty, or gives no tokens; it has messages, and the model no chat template; its ids
            are not the model's; or it is text, and the model has no tokenizer.
    """
    given = prompt if isinstance(prompt, Prompt) else Prompt("", prompt, "")
    if given.tokens is not None:
        ids, known = list(given.tokens), len(tokenizer or ()) if size is None else size
        if wrong := [token for token in ids if not 0 <= token < known]:
            raise InputError(
                f"prompt {given.id} holds the token id {wrong[0]}, and {name} has {known} tokens"
            )
    elif tokenizer is None:
        raise InputError(
            f"{name} has no tokenizer to read text with; put one beside its weights, or give token ids: "
            "'--prompts FILE.jsonl', a list of ids in each line"
        )
    else:
        with reading_model(f"the tokenizer of {name!r} cannot read the prompt"):
            ids = (
                list(tokenizer(given.text)["input_ids"])
                if given.messages is None
                else list(tokenizer(_chat(tokenizer, given, name), add_special_tokens=False)["input_ids"])
            )
    ids = ids[:most]
    if not ids or not given.text:
        raise InputError("the prompt is empty; give at least one token")
    if size is not None and (beyond := [token for token in ids if token >= size]):
        text = shown(tokenizer, known_ids(tokenizer), beyond[:1])
        raise InputError(
            f"the tokenizer of {name} reads {text!r} as token {beyond[0]}, and the model has {size} tokens; give it "
            "its own tokenizer, or another prompt"
        )
    return ids


def _chat(tokenizer: Any, prompt: Prompt, name: str) -> str:
    messages = [dict(message) for message in prompt.messages or ()]
    if not getattr(tokenizer, "chat_template", None):
        raise InputError(
            f"{name} has no chat template for the messages of prompt {prompt.id}; use --no-template, which takes their "
            "contents alone, or a file of plain texts"
        )
    with reading_model(f"the chat template of {name} refuses the messages of prompt {prompt.id}"):
        return str(
            tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=messages[-1]["role"] != "assistant"
            )
        )


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
