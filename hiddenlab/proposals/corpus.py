"""Generate the attacker's own token sequences for training and calibration, without any data set.

Text is the documentation and source of the running Python's standard library, cut into windows. Random tokens, alone
and mixed into text, cover the vocabulary that such text never uses. The first few positions behave unlike the rest
(attention sinks: huge states at position 0 and at repeats of the first token), so short windows and repeats are drawn
on purpose.
"""

import ast
import random
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor

from hiddenlab.models import TruncatedModel

MIN_CHARS, MAX_SOURCE_CHARS = 200, 4000
WINDOW_LENGTHS = (24, 48, 64, 96)


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


class Corpus:
    """An endless, seeded stream of token windows for one vocabulary.

    Args:
        model: gives tokenizer and vocabulary; without a tokenizer all windows are random tokens.
        seed: of every draw.
    """

    def __init__(self, model: TruncatedModel, seed: int = 0) -> None:
        self.vocab_size = model.vocab_size
        self._random = random.Random(seed)
        self._torch = torch.Generator().manual_seed(seed)
        self._documents = self._tokenized(model) if model.tokenizer is not None else []

    def _tokenized(self, model: TruncatedModel) -> list[list[int]]:
        texts = standard_library_texts()
        self._random.shuffle(texts)
        documents = model.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        self._special = model.embedded(model.tokenizer("")["input_ids"])
        return [ids for ids in map(model.embedded, documents) if len(ids) > 8]

    def _uniform(self, n: int) -> Tensor:
        return torch.randint(0, self.vocab_size, (n,), generator=self._torch)

    def text_window(self, n: int) -> Int[Tensor, " n"]:
        """Return up to n tokens of running text, from a random place, as the tokenizer would start a prompt."""
        if not self._documents:
            return self._uniform(n)
        ids = self._random.choice(self._documents)
        start = self._random.randrange(max(1, len(ids) - n))
        return torch.tensor((self._special + ids[start : start + n])[:n])

    def window(self) -> Int[Tensor, " n"]:
        """Return one training window: text, text mixed with random tokens, random tokens, or an opening."""
        draw = self._random.random()
        if draw < 0.55:
            return self._opening()
        n = self._random.choice(WINDOW_LENGTHS)
        if draw < 0.62:
            return self._uniform(n)
        ids = self.text_window(n)
        return self.strewn(ids) if draw < 0.80 else ids

    def strewn(self, ids: Int[Tensor, " n"]) -> Int[Tensor, " n"]:
        """Replace about a third of the tokens with random ones."""
        places = torch.rand(len(ids), generator=self._torch) < 0.35
        return torch.where(places, self._uniform(len(ids)), ids)

    def _opening(self) -> Tensor:
        """Return one to six tokens, sometimes with the first one repeated."""
        n = self._random.randint(1, 6)
        ids = self._uniform(n) if self._random.random() < 0.5 else self.text_window(n)
        if self._random.random() < 0.2:
            repeats = self._random.randint(1, len(ids))
            ids[:repeats] = ids[0]
        return ids

    def windows(self, tokens: int) -> Iterator[Int[Tensor, " n"]]:
        """Yield windows that hold at least ``tokens`` tokens in all."""
        drawn = 0
        while drawn < tokens:
            window = self.window()
            drawn += len(window)
            yield window
