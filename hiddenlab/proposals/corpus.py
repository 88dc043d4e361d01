"""Generate the attacker's own token sequences for training and calibration, without any data set.

Text is the documentation and source of the running Python's standard library, cut into windows. Random tokens, alone
and mixed into text, cover the vocabulary that such text never uses. The first few positions behave unlike the rest
(attention sinks: huge states at position 0 and at repeats of the first token), so short windows and repeats are drawn
on purpose.
"""

import ast
import random
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor

from hiddenlab.models import TruncatedModel
from hiddenlab.models.tokens import longest_text

MIN_CHARS, MAX_SOURCE_CHARS = 200, 4000
FEWEST_TOKENS = 9  # shorter texts are left out
WINDOW_LENGTHS = (24, 48, 64, 96)
COUNTED, COUNTED_LENGTH = 256, 256  # windows of text, and their tokens, of which the frequent ones are taken


def standard_library_texts() -> list[str]:
    """Return docstrings and source openings of the standard library's top-level modules, and its language reference."""
    return [text for source in standard_library_sources() for text in source]


@cache
def standard_library_sources() -> list[list[str]]:
    """Return these texts by source: each module's texts, which overlap, and each topic of the reference by itself.

    They are read once, which takes two seconds; callers must not change the lists.
    """
    import pydoc_data.topics as reference

    sources = [[str(text)] for text in reference.topics.values()]
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        try:
            source = path.read_text(encoding="utf-8")
            tree = ast.parse(source)
        except (OSError, ValueError, SyntaxError):
            continue
        texts = [source[:MAX_SOURCE_CHARS]]
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
                texts.append(ast.get_docstring(node) or "")
        sources.append(texts)
    return [[text for text in texts if len(text) >= MIN_CHARS] for texts in sources]


def language_reference() -> list[str]:
    """Return the topics of Python's language reference: a tenth of the texts, at hand without parsing a library."""
    import pydoc_data.topics as reference

    return [text for text in map(str, reference.topics.values()) if len(text) >= MIN_CHARS]


class Corpus:
    """An endless, seeded stream of token windows for one vocabulary.

    Texts become tokens when they are first drawn.

    Args:
        model: gives tokenizer and vocabulary; without a tokenizer all windows are random tokens.
        seed: of every draw.
        texts: gives the texts; None is ``standard_library_texts``, which takes two seconds.
    """

    def __init__(
        self, model: TruncatedModel, seed: int = 0, texts: Callable[[], list[str]] | None = None
    ) -> None:
        self.vocab_size, self._model = model.vocab_size, model
        self._most = longest_text(model.module)
        self._random = random.Random(seed)
        self._torch = torch.Generator().manual_seed(seed)
        self._texts: list[str] = []
        self._tokens: dict[int, list[int]] = {}
        if model.tokenizer is not None:
            self._texts = (texts or standard_library_texts)()
            self._random.shuffle(self._texts)
            self._special = model.embedded(model.tokenizer("")["input_ids"])

    def _document(self) -> list[int]:
        """Return the tokens of a text; none where texts are too short for this tokenizer."""
        while self._texts:
            place = self._random.choice(range(len(self._texts)))
            if place not in self._tokens:
                tokenized = self._model.tokenizer(self._texts[place], add_special_tokens=False, verbose=False)
                self._tokens[place] = self._model.embedded(tokenized["input_ids"])
            if len(self._tokens[place]) >= FEWEST_TOKENS:
                return self._tokens[place]
            self._texts = [text for i, text in enumerate(self._texts) if i != place]
            self._tokens = {}
        return []

    def uniform(self, n: int) -> Int[Tensor, " n"]:
        """Return random tokens."""
        return torch.randint(0, self.vocab_size, (n,), generator=self._torch)

    def text_window(self, n: int) -> Int[Tensor, " n"]:
        """Return up to n tokens of running text, from a random place, as the tokenizer would start a prompt.

        No window is longer than the model takes behind one embedding and before one token (``longest_text``).
        """
        n = min(n, self._most)
        ids = self._document()
        if not ids:
            return self.uniform(n)
        start = self._random.randrange(max(1, len(ids) - n))
        return torch.tensor((self._special + ids[start : start + n])[:n])

    def text_of(self, n: int) -> Int[Tensor, " n"]:
        """Return exactly n tokens of running text; texts that are too short are joined."""
        parts, missing = list[Tensor](), n
        while missing > 0:
            parts.append(self.text_window(missing))
            missing -= len(parts[-1])
        return torch.cat(parts)

    def beginning(self, n: int) -> Int[Tensor, " n"]:
        """Return the first tokens of a text, up to n, as the tokenizer would start a prompt."""
        n = min(n, self._most)
        ids = self._document()
        return torch.tensor((self._special + ids)[:n]) if ids else self.uniform(n)

    def window(self) -> Int[Tensor, " n"]:
        """Return one training window: text, text mixed with random tokens, random tokens, or an opening."""
        draw = self._random.random()
        if draw < 0.55:
            return self._opening()
        n = min(self._random.choice(WINDOW_LENGTHS), self._most)
        if draw < 0.62:
            return self.uniform(n)
        ids = self.text_window(n)
        return self.strewn(ids) if draw < 0.80 else ids

    def strewn(self, ids: Int[Tensor, " n"], share: float = 0.35) -> Int[Tensor, " n"]:
        """Replace about a share of the tokens with random ones."""
        places = torch.rand(len(ids), generator=self._torch) < share
        return torch.where(places, self.uniform(len(ids)), ids)

    def _opening(self) -> Tensor:
        """Return one to six tokens, sometimes with the first one repeated."""
        n = min(self._random.randint(1, 6), self._most)
        ids = self.uniform(n) if self._random.random() < 0.5 else self.text_window(n)
        if self._random.random() < 0.2:
            repeats = self._random.randint(1, len(ids))
            ids[:repeats] = ids[0]
        return ids

    def frequent(self, count: int) -> Int[Tensor, " n"]:
        """Return up to ``count`` tokens, each once: of running text, the most frequent first, then random ones."""
        seen = Counter(token for _ in range(COUNTED) for token in self.text_window(COUNTED_LENGTH).tolist())
        first = [token for token, _ in seen.most_common()]
        rest = [token for token in self.single_tokens(self.vocab_size).tolist() if token not in seen]
        return torch.tensor((first + rest)[:count])

    def single_tokens(self, count: int) -> Int[Tensor, " count"]:
        """Return random tokens, each once, all of them where the vocabulary has no more."""
        return torch.randperm(self.vocab_size, generator=self._torch)[:count]

    def windows(self, tokens: int) -> Iterator[Int[Tensor, " n"]]:
        """Yield windows that hold at least ``tokens`` tokens in all."""
        drawn = 0
        while drawn < tokens:
            window = self.window()
            drawn += len(window)
            yield window
