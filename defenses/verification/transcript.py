"""Read and write transcripts: what a provider claims to have done, one request per line of JSON."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from jaxtyping import Float
from pydantic import AfterValidator
from torch import Tensor

from hiddenlab.defenses.verification.rules import rule_of
from hiddenlab.defenses.verification.sampling import Sampling
from hiddenlab.errors import HiddenlabError, InputError
from hiddenlab.projections import Projection
from hiddenlab.text import count_of
from hiddenlab.utils.schema import CLOSED, TokenId, check, check_format, lines, loads, read_bytes

FORMAT = 1
_BEGINNING = f'{{"format":{FORMAT},"id":'.encode()  # every line written here begins so
Mode = Literal["accept", "reject", "bonus"]
FINGERPRINT_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def _one_line(text: str) -> str:
    if not text.isprintable():
        raise ValueError("should be a text of one line")
    return text


OneLine = Annotated[str, AfterValidator(_one_line)]


@dataclass(frozen=True)
class Fingerprint:
    """The random projections of a request's states that Activation-DiFR sends (DiFR, Algorithm 2).

    Attributes:
        count: k, numbers per position.
        every: positions from one recorded output token to the next (stride).
        seed: of the projection.
        kind: ``orthogonal`` or ``gaussian``.
        dtype: of the numbers sent.
        data: the numbers in base64.
    """

    __pydantic_config__ = CLOSED

    count: int
    every: int
    seed: int
    kind: str
    dtype: str
    data: str

    def __post_init__(self) -> None:
        Projection(self.count, self.seed, self.kind)  # raises an error about wrong values
        if not 1 <= self.every < 2**31:
            raise InputError(f"a fingerprint of every {count_of(self.every, 'token')}: a whole number from 1")

    @classmethod
    def of(
        cls, values: Float[Tensor, "rows k"], *, every: int, seed: int, kind: str, dtype: str
    ) -> Fingerprint:
        """Pack projected rows into a fingerprint."""
        raw = values.to(FINGERPRINT_DTYPES[dtype]).contiguous().view(torch.uint8).numpy().tobytes()
        return cls(values.shape[1], every, seed, kind, dtype, base64.b64encode(raw).decode())

    @property
    def size(self) -> int:
        """The size in bytes on the wire, without base64."""
        return len(self._raw())

    def _raw(self) -> bytes:
        try:
            return base64.b64decode(self.data, validate=True)
        except (binascii.Error, ValueError):
            raise InputError("a fingerprint is not base64") from None

    def values(self) -> Float[Tensor, "rows k"]:
        """Return the numbers as float32, one row for each recorded token.

        Raises:
            InputError: they do not fit the stated shape or dtype, or are not finite.
        """
        if self.dtype not in FINGERPRINT_DTYPES:
            raise InputError(f"a fingerprint of dtype {self.dtype!r}: one of {', '.join(FINGERPRINT_DTYPES)}")
        raw, kind = self._raw(), FINGERPRINT_DTYPES[self.dtype]
        if self.count < 1 or not raw or len(raw) % (kind.itemsize * self.count):
            raise InputError(
                f"a fingerprint of {count_of(len(raw), 'byte')} does not hold rows of {self.count} {self.dtype}"
            )
        values = torch.frombuffer(bytearray(raw), dtype=kind).reshape(-1, self.count).float()
        if not bool(values.isfinite().all()):
            raise InputError("a fingerprint holds NaN or infinity")
        return values


@dataclass(frozen=True)
class Transcript:
    """One request as the provider reports it.

    Attributes:
        id: of the request, unique in its file.
        model: as advertised.
        prompt, output: token ids; the prompt includes everything the model is said to have read.
        sampling: as requested.
        proofs: TOPLOC proofs, base64, the prompt's first.
        proof_rule: which values they commit to (``rules``).
        fingerprint: Activation-DiFR's.
        modes: of speculative decoding, one per output token.
    """

    __pydantic_config__ = CLOSED

    id: OneLine
    model: OneLine
    prompt: tuple[TokenId, ...]
    output: tuple[TokenId, ...]
    sampling: Sampling
    proofs: tuple[str, ...] | None = None
    proof_rule: str | None = None
    fingerprint: Fingerprint | None = None
    modes: tuple[Mode, ...] | None = None

    def __post_init__(self) -> None:
        if not self.prompt or not self.output:
            raise InputError(f"request {self.id!r}: prompt and output need at least one token each")
        if (self.proofs is None) != (self.proof_rule is None):
            raise InputError(
                f"request {self.id!r}: proofs and their rule (proof_rule) belong together; 'hiddenlab verify commit' "
                "makes both anew"
            )
        if self.proof_rule is not None:
            rule_of(self.proof_rule)
        if self.modes is not None and len(self.modes) != len(self.output):
            raise InputError(
                f"request {self.id!r}: {count_of(len(self.modes), 'mode')} for {count_of(len(self.output), 'token')}"
            )

    def check_vocabulary(self, size: int) -> None:
        """Check that every token is in the model's vocabulary.

        Args:
            size: of the vocabulary.

        Raises:
            InputError: a token is not; the transcript is of another tokenizer, or damaged.
        """
        for token in (*self.prompt, *self.output):
            if not 0 <= token < size:
                raise InputError(
                    f"request {self.id!r}: token {token} is not in a vocabulary of {size}; another tokenizer's?"
                )

    def to_json(self) -> dict[str, Any]:
        """Return the transcript as it is written to a file."""
        return {"format": FORMAT, **{k: v for k, v in asdict(self).items() if v is not None}}

    @classmethod
    def from_json(cls, value: Any, where: str = "the transcript") -> Transcript:
        """Rebuild a transcript from what ``to_json`` gave, and check every field.

        Args:
            where: names its place in an error.

        Raises:
            InputError: a field is missing, unknown, or of another kind.
        """
        check_format(value, FORMAT, where)
        transcript = check({name: part for name, part in value.items() if name != "format"}, cls, where)
        if "seed" not in value["sampling"]:  # without one nothing can be sampled again
            raise InputError(f"{where}: sampling.seed is missing")
        return transcript


def write_transcripts(path: Path, transcripts: Iterable[Transcript]) -> int:
    """Append transcripts to a JSONL file, each line complete before the next is begun; return how many.

    Raises:
        HiddenlabError: the file cannot be written.
    """
    count = 0
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            for transcript in transcripts:
                file.write(json.dumps(transcript.to_json(), separators=(",", ":")) + "\n")
                file.flush()
                count += 1
    except OSError as error:
        raise HiddenlabError(f"cannot write {path}: {error.strerror or error}") from None
    return count


def cut_torn_line(path: Path) -> None:
    """Cut off a last line without its end, which an interrupted run may leave; leave any other file unchanged.

    Raises:
        InputError: the file cannot be read or changed, or is no file of transcripts.
    """
    content = read_bytes(path)
    end = content.rfind(b"\n") + 1
    tail = content[end:]
    for number, line in enumerate(content[:end].split(b"\n"), 1):
        if line.strip():
            where = f"{path}, line {number}"
            Transcript.from_json(loads(line, where), where)
    if not tail.startswith(_BEGINNING) and not _BEGINNING.startswith(tail):
        raise InputError(f"{path} does not end in a line of a transcript; it was not changed")
    try:
        if tail:
            with path.open("r+b") as file:
                file.truncate(end)
    except OSError as error:
        raise InputError(f"cannot go on with {path}: {error.strerror or error}") from None


def read_transcripts(path: Path) -> list[Transcript]:
    """Read all requests of a JSONL file.

    Raises:
        InputError: it cannot be read, is empty, a line is no transcript (the line is named), or an id occurs twice.
    """
    transcripts: dict[str, Transcript] = {}
    for place, line in _lines(path):
        where = f"{path}, line {place}"
        transcript = Transcript.from_json(loads(line, where), where)
        if transcript.id in transcripts:
            raise InputError(f"{path}, line {place}: request {transcript.id!r} stands twice")
        transcripts[transcript.id] = transcript
    if not transcripts:
        raise InputError(f"{path} holds no transcripts")
    return list(transcripts.values())


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    yield from ((number, line) for number, line in lines(path) if line.strip())
