"""Convert a conversation to token ids in the model's chat format, so that users' text cannot write control tokens.

A tokenizer finds its control tokens in any text: a message that holds ``<|im_end|>`` would end its own turn and could
begin another. Here each control token within a message is split by a mark, an added token of a copy of the tokenizer,
which no other text contains. The mark's id is removed from the result. Where no message holds a control token, there is
no mark, and the ids are those of the plain template.
"""

import copy
import re
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hiddenlab.errors import InputError
from hiddenlab.text import first_line

Message = Mapping[str, str]


def tokenize(tokenizer: Any, text: str, **options: Any) -> list[int]:
    """Return the token ids of a text, including control tokens in it.

    Raises:
        InputError: the text is not valid Unicode.
    """
    try:
        return list(tokenizer(text, **options)["input_ids"])
    except (TypeError, UnicodeError):
        raise InputError("the text holds half of a surrogate pair, which is no character") from None


class Chat:
    """A converter from conversations to token ids.

    Args:
        tokenizer: of the model.
        name: of the model, for error messages.
        longest: most tokens of a conversation; ids of a longer one only show that it is too long.
    """

    def __init__(self, tokenizer: Any, name: str, longest: int) -> None:
        self.name, self.longest = name, longest
        self.template: str | None = getattr(tokenizer, "chat_template", None)
        self._mark = f"\ue000{secrets.token_hex(8)}\ue001"
        self._tokenizer = copy.deepcopy(tokenizer)
        self._controls = control_tokens(tokenizer)
        # The pattern also finds overlapping ones; each is split after its first character.
        several = [re.escape(text) for text in self._controls if len(text) > 1]
        self._pattern = re.compile(f"(?={'|'.join(several)})(?s:(.))" if several else "(?!)")
        self._single = frozenset(text for text in self._controls if len(text) == 1)
        self._ids = turning_ids(tokenizer)
        self._add_mark()
        # Tokenizers change their own state while they work.
        self._lock = threading.Lock()

    def _add_mark(self) -> None:
        from tokenizers import AddedToken

        mark = AddedToken(self._mark, normalized=False, special=True)
        self._tokenizer.add_tokens([mark], special_tokens=True)
        self._mark_id = self._tokenizer.convert_tokens_to_ids(self._mark)

    def ids(self, messages: Sequence[Message]) -> list[int]:
        """Return the token ids of a conversation, up to where the model's turn begins.

        Args:
            messages: each has a ``role``, which users cannot choose, and a ``content``.

        Raises:
            InputError: the model has no chat template, it refuses these messages, or one holds a control token of a
                single sign, which cannot be written as text.
        """
        if not self.template:
            raise InputError(f"{self.name} has no chat template; use /v1/completions")
        for message in messages:
            if control := self._single & set(message["content"]):
                raise InputError(
                    f"{min(control)!r} is a control token of {self.name}; it cannot be part of a message"
                )
        with self._lock:
            return self._ids_of(messages)

    def _ids_of(self, messages: Sequence[Message]) -> list[int]:
        ids = self._tokens(messages, self._cut)
        if len(ids) > self.longest:
            return ids
        try:
            own = self._tokens(messages, lambda text: "x" if text.strip() else text)
        except InputError:  # a template that accepts only certain contents
            own = []
        if self._control(ids) == self._control(own):
            return ids
        # A control token arose from a message's end and the template's text, or from the tokenizer's normalizer.
        return self._tokens(messages, lambda text: self._mark + self._mark.join(text) + self._mark)

    def _cut(self, text: str) -> str:
        return self._pattern.sub(lambda match: match[1] + self._mark, text)

    def _control(self, ids: Sequence[int]) -> list[int]:
        return [token for token in ids if token in self._ids]

    def _tokens(self, messages: Sequence[Message], change: Callable[[str], str]) -> list[int]:
        turns = [{**message, "content": change(message["content"])} for message in messages]
        try:
            text = self._tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        except Exception as error:  # templates are programs by the model's authors
            raise InputError(
                f"the model's chat template refuses these messages: {first_line(error)}"
            ) from None
        return [
            token
            for token in tokenize(self._tokenizer, text, add_special_tokens=False)
            if token != self._mark_id
        ]


def control_tokens(tokenizer: Any) -> dict[str, int]:
    """Return the tokens that no user may write: special ones, and added ones that the chat template writes.

    Some models mark turns with the second kind. Added tokens of blanks alone are text.
    """
    template = getattr(tokenizer, "chat_template", None) or ""
    tokens = {text: tokenizer.convert_tokens_to_ids(text) for text in tokenizer.all_special_tokens if text}
    for token, entry in tokenizer.added_tokens_decoder.items():
        text = entry.content
        if entry.special or (text.strip() and text in template):
            tokens[text] = token
    return tokens


def turning_ids(tokenizer: Any) -> frozenset[int]:
    """Return the ids of control tokens, except the one for unknown text, which ordinary text produces."""
    named = tokenizer.special_tokens_map
    unknown = named.get("unk_token")
    others = [text for role, text in named.items() if role != "unk_token"]
    controls = control_tokens(tokenizer)
    return frozenset(token for text, token in controls.items() if text != unknown or text in others)
