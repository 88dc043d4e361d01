"""A stream's text is the whole answer's: for every family of tokenizers and whatever tokens come."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from hiddenlab.defenses.cascade.decoding import StopTexts, TextStream, TokenTexts
from hiddenlab.models.load import load_tokenizer, resolve_model
from hiddenlab.testing import byte_tokenizer
from tests.marks import slow_cases

TEXT = [
    "the ferry leaves at nine , and nobody on the pier believes the loudspeaker .",
    "do n't say it 's late ! we 've no ' idea ' ? they 're here , I 'm there .",
]


def byte_level() -> Any:
    """GPT-2's kind, with merges, so that a token may hold half a character."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, special_tokens=["</s>"])
    inner.train_from_iterator([*TEXT, "né à Zürich 😀😃 €5 名前 " * 9], trainer)
    inner.add_tokens([AddedToken("<|x|>", special=False, normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>")


def sentencepiece() -> Any:
    """Llama's kind: pieces with a mark for the space, bytes to fall back to, the first space left out."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁the", "▁ferry", "the", "▁.", ".", "é", "s", "▁'", "名", "▁▁"]
    inner = Tokenizer(
        models.BPE({piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    )
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    inner.add_special_tokens(["<unk>", "<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", eos_token="</s>")


def metaspace() -> Any:
    """Unigram pieces, and the clean-up of spaces."""
    inner = Tokenizer(models.Unigram())
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    inner.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=110, special_tokens=["<unk>", "</s>"], unk_token="<unk>")
    inner.train_from_iterator(TEXT * 9, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="<unk>", eos_token="</s>", clean_up_tokenization_spaces=True
    )


def words() -> Any:
    """BERT's kind, which cleans up spaces; every part of its texts is a token of its own."""
    inner = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece(cleanup=False)
    inner.train_from_iterator(
        TEXT * 9, trainers.WordPieceTrainer(vocab_size=120, special_tokens=["[UNK]", "</s>"])
    )
    inner.add_tokens(["n't", "'s", "'ve", "'re", "'m"])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="[UNK]", eos_token="</s>", clean_up_tokenization_spaces=True
    )


def cleaning_bytes() -> Any:
    """The clean-up over single bytes, which transformers applies to such a tokenizer only when it is forced."""
    made = byte_tokenizer()
    made.clean_up_tokenization_spaces = True
    made.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output = True
    return made


def claimed() -> Any:
    """It says that it cleans up, and transformers leaves that out: many models' files say so."""
    made = byte_tokenizer()
    made.clean_up_tokenization_spaces = True
    return made


def suffixes() -> Any:
    """Words that end with a mark, of which the last one's is left out."""
    inner = Tokenizer(
        models.BPE({"low</w>": 0, "er</w>": 1, "l": 2, "</s>": 3}, [], end_of_word_suffix="</w>")
    )
    inner.decoder = decoders.BPEDecoder("</w>")
    inner.add_special_tokens(["</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>")


FAMILIES: dict[str, Callable[[], Any]] = {
    "byte-level": byte_level, "sentencepiece": sentencepiece, "metaspace": metaspace, "words": words,
    "cleaning bytes": cleaning_bytes, "claimed": claimed, "suffixes": suffixes,
    "builtin": lambda: load_tokenizer(resolve_model("builtin")),
}  # fmt: skip
SMALL = [name for name in FAMILIES if name != "builtin"]
_MADE: dict[str, Any] = {}


def made(name: str) -> Any:
    if name not in _MADE:
        _MADE[name] = FAMILIES[name]()
    return _MADE[name]


def check_stream(tokenizer: Any, ids: list[int]) -> None:
    """Each settled text begins with the one before, and the whole text with the last."""
    stream, given = TextStream(tokenizer), ""
    for token in ids:
        settled = stream.push(token)
        assert settled.startswith(given), (ids, given, settled)
        given = settled
    whole = tokenizer.decode(ids, skip_special_tokens=True)
    assert stream.text() == whole
    assert whole.startswith(given), (ids, given, whole)


@settings(max_examples=150)
@given(st.sampled_from(SMALL), st.data())
def test_settled_text_stays(name: str, data: st.DataObject) -> None:
    tokenizer = made(name)
    check_stream(tokenizer, data.draw(st.lists(st.integers(0, len(tokenizer) + 2), max_size=14)))


@settings(max_examples=150)
@given(st.sampled_from([name for name in SMALL if name != "suffixes"]), st.data())
def test_settled_text_stays_where_tokens_hang_together(name: str, data: st.DataObject) -> None:
    """Texts that the clean-up changes, and characters that are split over tokens and bytes."""
    parts = [" .", " n't", " ' ", " 've", " 're", "'", " ", "n", "v", "é", "😀", "名", "the", "\ufffd"]
    text = "".join(data.draw(st.lists(st.sampled_from(parts), max_size=10)))
    ids = made(name)(text, add_special_tokens=False)["input_ids"]
    cut = data.draw(st.lists(st.integers(0, max(len(ids) - 1, 0)), max_size=2))
    check_stream(made(name), [token for i, token in enumerate(ids) if i not in cut])


@pytest.mark.parametrize("name", slow_cases("builtin"))
def test_settled_text_of_the_builtin_model_stays(name: str) -> None:
    tokenizer = made(name)
    for text in (*TEXT, "né 😀 名前"):
        ids = tokenizer(text)["input_ids"]
        check_stream(tokenizer, ids)
        check_stream(tokenizer, ids[::-1])


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("byte-level", "ü", ["", "ü"]),
        ("cleaning bytes", "a .", ["a", "a", "a."]),
        ("cleaning bytes", "do n't", ["d", "do", "do", "do", "do", "don't"]),
        ("claimed", "a .", ["a", "a", "a ."]),
    ],
)
def test_text_settles_with_the_first_token_that_can_settle_it(
    name: str, text: str, expected: list[str]
) -> None:
    tokenizer = made(name)
    stream = TextStream(tokenizer)
    assert [stream.push(token) for token in tokenizer(text)["input_ids"]] == expected


def test_bytes_that_do_not_fit_change_the_text_before_them() -> None:
    """One run of fallback bytes is text, or signs for unknown characters, as a whole."""
    tokenizer = made("sentencepiece")
    c3, a9, odd, end = (tokenizer.convert_tokens_to_ids(f"<0x{b:02X}>") for b in (0xC3, 0xA9, 0xFF, 0x61))
    assert tokenizer.decode([c3, a9]) == "é"
    assert tokenizer.decode([c3, a9, odd]) == "\ufffd" * 3
    stream = TextStream(tokenizer)
    assert [stream.push(token) for token in (c3, a9, end)] == ["", "", ""]
    assert stream.text() == "éa"
    assert stream.push(tokenizer.convert_tokens_to_ids("▁the")) == "éa the"


# ---- stop texts


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_no_part_of_a_stop_text_is_given_however_it_comes(text: str, stops: list[str]) -> None:
    """The stop that is complete first ends the text, one sign at a time or all at once."""
    found = StopTexts(stops)
    ends = [i for i in range(1, len(text) + 1) if any(text[:i].endswith(stop) for stop in stops)]
    expected = None
    if ends:
        expected = ends[0] - max(len(stop) for stop in stops if text[: ends[0]].endswith(stop))
    assert found.find(text) == expected
    limit = len(text) if expected is None else expected
    for end in range(1, (ends[0] if ends else len(text) + 1)):
        assert found.safe(text[:end]) <= limit
    held = text[found.safe(text) :]
    assert held == "" or any(stop.startswith(held) for stop in stops)


# ---- single tokens


@pytest.mark.parametrize("name", SMALL)
def test_the_bytes_of_tokens_are_the_text(name: str) -> None:
    """Joined, they are the text that the tokenizer writes, but for the space before the first and the clean-up."""
    tokenizer = made(name)
    texts = TokenTexts(tokenizer)
    said = "low er low" if name == "suffixes" else "the ferry é 😀 名 the"
    ids = [0, 1, 0] if name == "suffixes" else tokenizer(said, add_special_tokens=False)["input_ids"]
    joined = b"".join(texts.bytes_of(token) or b"" for token in ids)
    written = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    assert joined.decode().strip() == written.strip()


def test_tokens_without_text_are_named() -> None:
    texts = TokenTexts(byte_tokenizer())
    assert texts.text_of(299) == "<id 299>"
    assert texts.bytes_of(299) is None
    assert texts.text_of(257) == "</s>"
    (byte,) = (token for token in range(256) if texts.bytes_of(token) == b"\xe2")
    assert texts.text_of(byte) == "bytes:\\xe2"
