"""Turn a prompt into token ids: its text, its messages in the model's chat template, or the ids that it brings."""

from typing import Any

from hiddenlab.errors import InputError
from hiddenlab.models.reading import reading_model
from hiddenlab.prompts import Prompt


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
    if not ids or not given.text:
        raise InputError("the prompt is empty; give at least one token")
    return ids[:most]


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
