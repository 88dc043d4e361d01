"""Turn a growing answer's token ids into text that no later token changes, so that a stream is the whole answer's text.

The text of some tokens is not a prefix of the text of more tokens. A character may be split over tokens; bytes that a
tokenizer falls back to are one run, and the whole run is shown as signs for unknown characters if one byte does not
fit; and a tokenizer that cleans up spaces removes one before a full stop that comes later. Such text is held back until
the tokens after it have settled it.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

UNKNOWN = "\ufffd"  # stands for bytes that are no character, or not yet
# transformers' clean-up removes spaces in ten fixed texts such as " ." and " n't". Of the characters of these texts,
# only these are followed by another one, so that nothing behind any other character changes what stands before it.
OPEN = frozenset(" 'nvr")


class TextStream:
    """The text of a growing answer, special tokens left out, as ``tokenizer.decode`` writes it.

    Args:
        tokenizer: of the model.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._cleans = bool(getattr(tokenizer, "clean_up_tokenization_spaces", False))
        self._odd = _odd_byte(tokenizer)

    def push(self, token: int) -> str:
        """Add a token, and return the whole text so far that no later token can change."""
        self._ids.append(token)
        return self._settled()

    def text(self) -> str:
        """Return the whole text so far, as it is if no token follows."""
        return str(self._tokenizer.decode(self._ids, skip_special_tokens=True))

    def _settled(self) -> str:
        text = raw = self._raw(self._ids)
        if self._odd is not None:
            # A byte that fits nowhere shows which characters still hang on the bytes that may follow.
            text = _common(text, self._raw([*self._ids, self._odd]))
        text = text.rstrip(UNKNOWN)
        if not self._cleans:
            return text
        while text and text[-1] in OPEN:
            text = text[:-1]
        # Where the clean-up left all as it was, this tokenizer may have none despite its setting.
        return text if self.text() == raw else str(self._tokenizer.clean_up_tokenization(text))

    def _raw(self, ids: Sequence[int]) -> str:
        return str(
            self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )


def _common(one: str, other: str) -> str:
    """Return the text with which both begin."""
    pairs = enumerate(zip(one, other, strict=False))
    return one[: next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))]


def _odd_byte(tokenizer: Any) -> int | None:
    """Return the token of a byte that no UTF-8 text holds, where a tokenizer falls back to bytes."""
    name = "<0xFF>"
    token = tokenizer.convert_tokens_to_ids(name)
    # A name that is not in the vocabulary gives no id, or that of unknown text.
    return token if token is not None and tokenizer.convert_ids_to_tokens(token) == name else None


class StopTexts:
    """Texts that end an answer.

    Args:
        stops: the texts; whichever is complete first ends the answer, of several the longest.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]

    def find(self, text: str, since: int = 0) -> int | None:
        """Return where the stop text begins that ends the answer, or None.

        Args:
            since: characters in which none is looked for.
        """
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop, since)) >= 0]
        return min(found)[1] if found else None

    def safe(self, text: str) -> int:
        """Return how much of a text may be given: its end may be the beginning of a stop text."""
        held = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(text)), held, -1):
                if text.endswith(stop[:length]):
                    held = length
                    break
        return len(text) - held


class TokenTexts:
    """The text and the bytes of single tokens, special ones included, for log-probabilities.

    Args:
        tokenizer: of the model.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # These are in the vocabulary as they are written.
        self._plain = frozenset(tokenizer.all_special_ids) | frozenset(tokenizer.added_tokens_decoder)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._levels = "ByteLevel" in str(getattr(backend, "decoder", ""))
        self.bytes_of = lru_cache(4096)(self._bytes_of)

    def _bytes_of(self, token: int) -> bytes | None:
        """Return a token's bytes; None where it has no text."""
        name = self._tokenizer.convert_ids_to_tokens(token)
        if not isinstance(name, str):
            return None
        if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
            return bytes.fromhex(name[3:5])
        if self._levels and token not in self._plain and all(sign in _level_bytes() for sign in name):
            return bytes(_level_bytes()[sign] for sign in name)

        def decoded(ids: list[int]) -> str:
            return str(
                self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            )

        # Some tokenizers leave out the space before the first token: the second one is not the first.
        return decoded([token, token]).removeprefix(decoded([token])).encode()

    def text_of(self, token: int) -> str:
        """Return a token's text; bytes that are no text are written as OpenAI does, ``bytes:\\xe2\\x82``."""
        found = self.bytes_of(token)
        if found is None:
            return f"<id {token}>"
        try:
            return found.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)


@lru_cache(1)
def _level_bytes() -> dict[str, int]:
    """Return the byte that each sign of a byte-level vocabulary stands for."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {sign: byte for byte, sign in bytes_to_unicode().items()}
