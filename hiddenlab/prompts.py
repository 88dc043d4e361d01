"""Load prompts from the shipped set, standard input, a file (text, JSON, CSV, parquet, Arrow), or a Hub data set."""

import sys
import warnings
from collections.abc import Generator, Mapping
from contextlib import closing
from dataclasses import dataclass
from importlib import resources
from itertools import islice
from typing import Any

from hiddenlab.errors import HiddenlabWarning, InputError
from hiddenlab.utils.rows import Rows, decoded, jsonl_rows, kind_of, pick, rows_of

BUILTIN = "builtin"
ROLES = {"human": "user", "gpt": "assistant"}  # names of ShareGPT -> of chat templates

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Prompt:
    """One prompt; ``id`` is its place in the source (``p001`` is the first), so unique within it.

    Attributes:
        text: as it was read; of a conversation the contents of its messages, joined by line breaks.
        messages: a conversation that goes through the model's chat template. None for a plain text.
        tokens: token ids, where the source holds these. None where a tokenizer makes them.
    """

    id: str
    text: str
    source: str
    messages: tuple[Message, ...] | None = None
    tokens: tuple[int, ...] | None = None


def load_prompts(
    source: str | None = None, *, column: str | None = None, limit: int | None = None, template: bool = True
) -> list[Prompt]:
    """Load prompts, unchanged including white space.

    A value is a string; a list of messages (a conversation), each with a ``role`` and a ``content`` (a string or parts
    that are texts) or with ShareGPT's ``from`` and ``value``; a list of strings (the turns of a user), of which the
    first counts; or a list of token ids. Nulls and blank texts are left out, and a warning says how many.

    Args:
        source: one of

            - None or ``builtin``: the 100 prompts shipped with the package.
            - ``-``: the whole of standard input as one prompt, less one final newline.
            - ``FILE.jsonl``, ``FILE.ndjson``, ``FILE.json``: one object or value per line, or a list of them; an object
              or a conversation alone is one prompt.
            - ``FILE.csv``, ``FILE.tsv``: one column of it. The first line names the columns; commas, semicolons, tabs
              or bars part them. Blank lines are skipped.
            - ``FILE.parquet``, ``FILE.arrow``, ``FILE.feather``: one column of it, read in batches.
            - ``hf:NAME[:config[:split[:column]]]``: a data set, streamed. NAME is a Hub name or a local
              directory of data files (no colon in its path); an empty split means ``train``.
            - any other file: text. Lines that are exactly ``---`` part the prompts (one may also stand first
              or last in the file); without such a line, every line that is not blank is a prompt.
        column: which column holds the prompts, where there are columns; by default the first of ``text``, ``prompt``,
            ``messages`` and ``conversations`` that exists, else the only one that holds texts. Wins over a column named
            in ``source``.
        limit: at most so many prompts, from the start. What follows need not be checked.
        template: conversations keep their messages, for the model's chat template; else they are their contents alone.

    Raises:
        InputError: limit < 1; the source cannot be read, has no such column or no prompts, or holds something
            that is no prompt: broken JSON or quotes, a row of another length than the header, a value of another kind,
            bytes that are not UTF-8.
    """
    if limit is not None and limit < 1:
        raise InputError(f"limit is {limit}; it must be 1 or more (or left out, for all prompts)")
    source = BUILTIN if source is None else source
    with closing(iter_prompts(source, column=column, template=template)) as found:
        prompts = list(islice(found, limit))
    if not prompts:
        raise InputError(f"{'standard input' if source == '-' else source} holds no prompts")
    return prompts


def iter_prompts(
    source: str, *, column: str | None = None, template: bool = True
) -> Generator[Prompt, None, None]:
    """Yield the prompts of a source one after another, reading only what is needed where its form allows.

    Raises:
        InputError: as ``load_prompts``, when the invalid part is reached.
    """
    read = skipped = 0
    try:
        for read, (where, value) in enumerate(_values(source, column), 1):
            prompt = _prompt(f"p{read:03d}", value, source, where, template)
            if prompt.tokens or prompt.text.strip():
                yield prompt
            else:
                skipped += 1
    except InputError:
        skipped = 0  # the error is all that is said
        raise
    finally:
        if 0 < skipped < read:
            said = f"{source}: left out {skipped} of {read} entries, which hold no text (null or blank)"
            warnings.warn(said, HiddenlabWarning, stacklevel=2)


def _values(source: str, column: str | None) -> Rows:
    if source not in (BUILTIN, "-"):
        return rows_of(source, column)
    if column is not None:
        raise InputError(f"{source} has no columns to choose from; leave out the column {column!r}")
    if source == BUILTIN:
        with resources.as_file(resources.files("hiddenlab").joinpath("data", "prompts.jsonl")) as path:
            return iter(list(pick(jsonl_rows(str(path)), BUILTIN)))
    if sys.stdin is None:
        raise InputError("there is no standard input to read the prompt from")
    text = decoded(sys.stdin.buffer.read(), "standard input")
    return iter([("the whole input", text.removesuffix("\n").removesuffix("\r"))])


def _prompt(id: str, value: Any, source: str, where: str, template: bool) -> Prompt:
    """Return the prompt that a value is; an empty one for null."""
    messages, tokens = None, None
    if isinstance(value, list) and value:
        if all(isinstance(item, str) for item in value):
            value = value[0]
        elif all(type(item) is int for item in value):
            tokens, value = tuple(value), " ".join(map(str, value))
        elif all(isinstance(item, dict) for item in value):
            messages = tuple(_message(item, f"{source}, {where}") for item in value)
            value = "\n".join(message["content"] for message in messages)
    text = "" if value is None or value == [] else value
    if not isinstance(text, str):
        raise InputError(
            f"{source}, {where}: a prompt must be a string, a list of messages, or one of token ids, and this is "
            f"{kind_of(value)}"
        )
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InputError(
            f"{source}, {where}: the prompt holds half a surrogate pair, which is no text"
        ) from None
    return Prompt(id, text, source, messages if template else None, tokens)


def _message(message: Mapping[str, Any], where: str) -> Message:
    """Return a message as chat templates take it: ``role``, ``content`` as one text, and what else it has."""
    fields = {name: value for name, value in message.items() if value is not None}
    role, content = (
        fields.pop("role", fields.pop("from", None)),
        fields.pop("content", fields.pop("value", "")),
    )
    if isinstance(content, list):
        content = "".join(_part(part, where) for part in content)
    if not isinstance(role, str) or not isinstance(content, str):
        raise InputError(
            f"{where}: a message has a role and a content that are texts; this one has {list(message)}"
        )
    return {**fields, "role": ROLES.get(role, role), "content": content}


def _part(part: Any, where: str) -> str:
    text = part.get("text") if isinstance(part, dict) else part
    if not isinstance(text, str):
        kind = part.get("type") if isinstance(part, dict) else kind_of(part)
        raise InputError(f"{where}: a message has a part that is no text ({kind}); the lab reads texts alone")
    return text
