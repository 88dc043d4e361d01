"""Convert a conversation to token ids in the model's chat format, so that users' text cannot write control tokens.

A tokenizer finds its control tokens in any text: a message that holds ``<|im_end|>`` would end its own turn and could
begin another. Here each control token within a message is split by a mark, an added token of a copy of the tokenizer,
which no other text contains. The mark's id is removed from the result. Where no message holds a control token, there is
no mark, and the ids are those of the plain template.
"""

import copy
import inspect
import re
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hiddenlab.errors import InputError
from hiddenlab.text import first_line

# A text of this form in tools, calls and options is a name: a template may compare it, and it ends no turn.
NAME = re.compile(r"[\w.-]{0,64}", re.ASCII)


@dataclass(frozen=True)
class Conversation:
    """What a chat template renders.

    Attributes:
        messages: each has a ``role``, which users cannot choose, and a ``content``; it may have a ``name``,
            ``tool_calls`` with arguments as objects, and a ``tool_call_id``.
        tools: as JSON schemas.
        options: further variables of the template.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    def changed(self, content: Callable[[str], str], text: Callable[[str], str]) -> "Conversation":
        """Return the conversation with each content changed, and each text of tools, calls, names and options."""
        messages = [
            {
                key: value if key == "role" else content(value) if key == "content" else _each(value, text)
                for key, value in message.items()
            }
            for message in self.messages
        ]
        return Conversation(messages, _each(list(self.tools), text), _each(dict(self.options), text))

    def without(self, key: str) -> "Conversation":
        """Return the conversation without a key of its messages."""
        messages = [{name: value for name, value in one.items() if name != key} for one in self.messages]
        return replace(self, messages=messages)

    def saying(self, role: str, content: str) -> "Conversation":
        """Return the conversation with other contents in a role's messages."""
        messages = [{**one, "content": content} if one["role"] == role else one for one in self.messages]
        return replace(self, messages=messages)


class ChatError(InputError):
    """A conversation cannot be rendered; ``field`` names the part at fault as a request does."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.field = field


def _each(value: Any, change: Callable[[str], str]) -> Any:
    """Return a JSON value with every text in it changed, except the names of an object's entries."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _each(one, change) for key, one in value.items()}
    return [_each(one, change) for one in value] if isinstance(value, list) else value


def _texts(value: Any, keys: bool) -> list[str]:
    """Return every text of a JSON value: the names of objects' entries, or all others."""
    if isinstance(value, str):
        return [] if keys else [value]
    if isinstance(value, Mapping):
        return [*(value if keys else ()), *(text for one in value.values() for text in _texts(one, keys))]
    return [text for one in value for text in _texts(one, keys)] if isinstance(value, list | tuple) else []


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
        self._variables = _variables(self.template)
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

    def ids(self, asked: Conversation) -> list[int]:
        """Return the token ids of a conversation, up to where the model's turn begins.

        Raises:
            InputError: the model has no chat template, it refuses this conversation, or a text holds a control token of
                a single sign, which cannot be written as text.
            ChatError: the template does not render a part of it.
        """
        if not self.template:
            raise InputError(f"{self.name} has no chat template; use /v1/completions")
        self._check_texts(asked)
        self._check_options(asked.options)
        with self._lock:
            self._check_rendered(asked)
            return self._ids_of(asked)

    def _check_texts(self, asked: Conversation) -> None:
        everything = [list(asked.messages), list(asked.tools), asked.options]
        for text in _texts(everything, keys=False):
            if control := self._single & set(text):
                raise InputError(
                    f"{min(control)!r} is a control token of {self.name}; it cannot be part of a message"
                )
        for key in _texts(everything, keys=True):
            if self._single & set(key) or self._pattern.search(key):
                raise InputError(f"the name {key!r:.80} holds a control token of {self.name}; choose another")

    def _check_options(self, options: Mapping[str, Any]) -> None:
        own = {*inspect.signature(self._tokenizer.apply_chat_template).parameters, "messages"}
        own |= {*self._tokenizer.special_tokens_map, "raise_exception", "strftime_now"}
        for name in options:
            where = f"chat_template_kwargs.{name:.60}"
            if name in own:
                raise ChatError(f"{where} is not offered: the server sets it", where)
            if name not in self._variables:
                raise ChatError(f"{where}: the model's chat template has no such variable", where)

    def _check_rendered(self, asked: Conversation) -> None:
        """Refuse what a template passes over: the text is then the same without it."""
        text = self._text(asked)

        def passed_over(other: Conversation) -> bool:
            try:
                return self._text(other) == text
            except InputError:  # the template looked at it
                return False

        if asked.tools and passed_over(replace(asked, tools=())):
            raise ChatError("tools: the model's chat template does not render tools", "tools")
        for key in ("name", "tool_calls"):
            at = next((i for i, message in enumerate(asked.messages) if key in message), None)
            if at is not None and passed_over(asked.without(key)):
                where = f"messages.{at}.{key}"
                raise ChatError(f"{where}: the model's chat template does not render it", where)
        for role in dict.fromkeys(message["role"] for message in asked.messages):
            said = [
                (i, message["content"]) for i, message in enumerate(asked.messages) if message["role"] == role
            ]
            at, content = next(((i, content) for i, content in said if content), said[0])
            if content and passed_over(asked.saying(role, "y" if content == "x" else "x")):
                raise ChatError(
                    f"messages.{at}: the model's chat template does not render the role {role}",
                    f"messages.{at}",
                )

    def _ids_of(self, asked: Conversation) -> list[int]:
        ids = self._tokens(asked.changed(self._cut, self._cut))
        if len(ids) > self.longest:
            return ids

        def plain(text: str) -> str:
            return "x" if text.strip() else text

        def marked(text: str) -> str:
            return self._mark + self._mark.join(text) + self._mark

        try:
            own = self._tokens(asked.changed(plain, self._free(plain)))
        except InputError:  # a template that accepts only certain contents
            own = []
        if self._control(ids) == self._control(own):
            return ids
        # A control token arose from a message's end and the template's text, or from the tokenizer's normalizer.
        return self._tokens(asked.changed(marked, self._free(marked)))

    def _free(self, change: Callable[[str], str]) -> Callable[[str], str]:
        """Return a change that leaves out names."""
        return lambda text: text if NAME.fullmatch(text) and not self._pattern.search(text) else change(text)

    def _cut(self, text: str) -> str:
        return self._pattern.sub(lambda match: match[1] + self._mark, text)

    def _control(self, ids: Sequence[int]) -> list[int]:
        return [token for token in ids if token in self._ids]

    def _text(self, asked: Conversation) -> str:
        tools = [dict(tool) for tool in asked.tools] or None
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    [dict(message) for message in asked.messages], tools=tools, add_generation_prompt=True,
                    tokenize=False, **asked.options,
                )
            )  # fmt: skip
        except Exception as error:  # templates are programs by the model's authors
            raise InputError(
                f"the model's chat template refuses these messages: {first_line(error)}"
            ) from None

    def _tokens(self, asked: Conversation) -> list[int]:
        return [
            token
            for token in tokenize(self._tokenizer, self._text(asked), add_special_tokens=False)
            if token != self._mark_id
        ]


def _variables(template: Any) -> frozenset[str]:
    """Return the names that a chat template reads and does not set itself; of several templates, those of each."""
    from jinja2 import Environment, TemplateError, meta

    texts = [template] if isinstance(template, str) else list((template or {}).values())
    found: set[str] = set()
    for text in texts:
        # transformers' own tag, which marks what the model said and reads nothing.
        plain = re.sub(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}", "", text)
        try:
            parsed = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(plain)
        except TemplateError:  # it will refuse every conversation, with its own error
            continue
        found |= meta.find_undeclared_variables(parsed)
    return frozenset(found)


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
