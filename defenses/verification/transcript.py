"""What a provider claims to have done, one request a line of JSON; a real provider's log can be turned into it."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from defenses.verification.rules import rule_of
from defenses.verification.sampling import Sampling
from hiddenlab.core import Progress, silent
from hiddenlab.errors import HiddenlabError, InputError
from hiddenlab.lens import Projection

FORMAT = 1
Mode = Literal["accept", "reject", "bonus"]
FINGERPRINT_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Fingerprint:
    """Activation-DiFR's projections of a request (DiFR, Algorithm 2).

    Attributes:
        count: k, numbers a position. every: positions from one recorded output token to the next (stride).
        seed: of the projection. kind: ``orthogonal`` or ``gaussian``. dtype: of the numbers sent. data: them, base64.
    """

    count: int
    every: int
    seed: int
    kind: str
    dtype: str
    data: str

    def __post_init__(self) -> None:
        Projection(self.count, self.seed, self.kind)  # says what is wrong with them
        if not 1 <= self.every < 2**31:
            raise InputError(f"a fingerprint of every {self.every} tokens: a whole number from 1")

    @classmethod
    def of(
        cls, values: Float[Tensor, "rows k"], *, every: int, seed: int, kind: str, dtype: str
    ) -> Fingerprint:
        """Pack projected rows."""
        raw = values.to(FINGERPRINT_DTYPES[dtype]).contiguous().view(torch.uint8).numpy().tobytes()
        return cls(values.shape[1], every, seed, kind, dtype, base64.b64encode(raw).decode())

    @property
    def size(self) -> int:
        """On the wire, without base64."""
        return len(self._raw())

    def _raw(self) -> bytes:
        try:
            return base64.b64decode(self.data, validate=True)
        except (binascii.Error, ValueError):
            raise InputError("a fingerprint is not base64") from None

    def values(self) -> Float[Tensor, "rows k"]:
        """The numbers.

        Raises:
            InputError: they do not fit the stated shape or dtype, or are not finite.
        """
        if self.dtype not in FINGERPRINT_DTYPES:
            raise InputError(f"a fingerprint of dtype {self.dtype!r}: one of {', '.join(FINGERPRINT_DTYPES)}")
        raw, kind = self._raw(), FINGERPRINT_DTYPES[self.dtype]
        if self.count < 1 or not raw or len(raw) % (kind.itemsize * self.count):
            raise InputError(
                f"a fingerprint of {len(raw)} bytes does not hold rows of {self.count} {self.dtype}"
            )
        out = torch.frombuffer(bytearray(raw), dtype=kind).reshape(-1, self.count).float()
        if not bool(out.isfinite().all()):
            raise InputError("a fingerprint holds NaN or infinity")
        return out


@dataclass(frozen=True)
class Transcript:
    """One request as the provider reports it.

    Attributes:
        id: of the request, unique in its file. model: as advertised. prompt, output: token ids; the prompt includes
            everything the model is said to have read. sampling: as requested. proofs: TOPLOC proofs, base64, the
            prompt's first. proof_rule: which values they commit to (``rules``). fingerprint: Activation-DiFR's. modes:
            of speculative decoding, one an output token.
    """

    id: str
    model: str
    prompt: tuple[int, ...]
    output: tuple[int, ...]
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
            raise InputError(f"request {self.id!r}: {len(self.modes)} modes for {len(self.output)} tokens")

    def check_vocabulary(self, size: int) -> None:
        """Every token has to be one of the model's.

        Raises:
            InputError: one is not; the transcript is of another tokenizer, or damaged.
        """
        for token in (*self.prompt, *self.output):
            if not 0 <= token < size:
                raise InputError(
                    f"request {self.id!r}: token {token} is not in a vocabulary of {size}; another tokenizer's?"
                )

    def to_json(self) -> dict[str, Any]:
        """As it stands in a file."""
        return {"format": FORMAT, **{k: v for k, v in asdict(self).items() if v is not None}}

    @classmethod
    def from_json(cls, value: Any) -> Transcript:
        """What ``to_json`` gave, every field checked.

        Raises:
            InputError: a field is missing, unknown, or of another kind.
        """
        if (
            not isinstance(value, Mapping)
            or type(value.get("format")) is not int
            or value["format"] != FORMAT
        ):
            raise InputError(f"not a transcript of format {FORMAT}")
        known = {f.name for f in fields(cls)} | {"format"}
        if extra := sorted(set(value) - known):
            raise InputError(f"unknown field {extra[0]!r}")
        sampling = _record(Sampling, value.get("sampling"), "sampling", needed=("seed",))
        print_ = value.get("fingerprint")
        modes = value.get("modes")
        if modes is not None and not (isinstance(modes, list) and all(m in get_args(Mode) for m in modes)):
            raise InputError(f"modes: a list of {', '.join(get_args(Mode))}")
        proofs = value.get("proofs")
        if proofs is not None and not (isinstance(proofs, list) and all(isinstance(p, str) for p in proofs)):
            raise InputError("proofs: a list of base64 texts")
        return cls(
            id=_text(value, "id"), model=_text(value, "model"), prompt=_tokens(value, "prompt"),
            output=_tokens(value, "output"), sampling=sampling,
            proofs=None if proofs is None else tuple(proofs),
            proof_rule=None if value.get("proof_rule") is None else _text(value, "proof_rule"),
            modes=None if modes is None else tuple(modes),
            fingerprint=None if print_ is None else _record(Fingerprint, print_, "fingerprint"),
        )  # fmt: skip


def _text(value: Mapping[str, Any], name: str) -> str:
    found = value.get(name)
    if not isinstance(found, str) or not found.isprintable():
        raise InputError(f"{name}: a text of one line is missing")
    return found


def _tokens(value: Mapping[str, Any], name: str) -> tuple[int, ...]:
    found = value.get(name)
    if not isinstance(found, list) or not all(type(t) is int for t in found):
        raise InputError(f"{name}: a list of token ids (whole numbers) is missing")
    return tuple(found)


def _record(kind: type, value: Any, name: str, needed: Sequence[str] | None = None) -> Any:
    """A small dataclass from JSON: known fields of the right type; ``needed`` ones (default: all) present."""
    if not isinstance(value, Mapping):
        raise InputError(f"{name}: missing, or no object")
    types = {f.name: f.type for f in fields(kind)}
    if extra := sorted(set(value) - set(types)):
        raise InputError(f"{name}: unknown field {extra[0]!r}")
    for field in types if needed is None else needed:
        if field not in value:
            raise InputError(f"{name}: {field!r} is missing")
    out = {}
    for field, found in value.items():
        number = types[field] == "float" and type(found) in (int, float)
        if not (number or (types[field] == "int" and type(found) is int) or isinstance(found, str)):
            raise InputError(f"{name}: {field} is {found!r}")
        if isinstance(found, str) and types[field] in ("int", "float"):
            raise InputError(f"{name}: {field} is {found!r}, not a number")
        try:
            out[field] = float(found) if number else found
        except OverflowError:
            raise InputError(f"{name}: {field} is too large") from None
    return kind(**out)


def write_transcripts(path: Path, transcripts: Iterable[Transcript]) -> int:
    """Append to a JSONL file, each line complete before the next is begun; returns how many.

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
    """Cut off a last line without its end, which an interrupted run may leave.

    Raises:
        InputError: the file cannot be read or changed.
    """
    try:
        content = path.read_bytes()
        if content and not content.endswith(b"\n"):
            with path.open("r+b") as file:
                file.truncate(content.rfind(b"\n") + 1)
    except OSError as error:
        raise InputError(f"cannot go on with {path}: {error.strerror or error}") from None


def read_transcripts(path: Path) -> list[Transcript]:
    """All requests of a JSONL file.

    Raises:
        InputError: it cannot be read, is empty, a line is no transcript (the line is named), or an id stands twice.
    """
    out: dict[str, Transcript] = {}
    for place, line in _lines(path):
        try:
            one = Transcript.from_json(json.loads(line))
        except (ValueError, RecursionError):
            raise InputError(f"{path}, line {place}: no JSON") from None
        except InputError as error:
            raise InputError(f"{path}, line {place}: {error}") from None
        if one.id in out:
            raise InputError(f"{path}, line {place}: request {one.id!r} stands twice")
        out[one.id] = one
    if not out:
        raise InputError(f"{path} holds no transcripts")
    return list(out.values())


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        with path.open(encoding="utf-8") as file:
            yield from ((i, line) for i, line in enumerate(file, 1) if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}: {error}") from None


def from_openai(path: Path, model: str, tokenizer: Any, progress: Progress = silent) -> list[Transcript]:
    """Turn a JSONL file of OpenAI-style chat requests and responses at temperature 0 into transcripts.

    Each line is ``{"request": {...}, "response": {...}}`` with ``messages`` or ``prompt`` in the request and one
    choice in the response (DiFR, appendix D). The texts are tokenized anew with the public tokenizer and chat template,
    so that a differing template or tokenization shows as divergence.

    Raises:
        InputError: a line is something else, or was not greedy (only a greedy answer needs no seed).
    """
    out: list[Transcript] = []
    given = list(_lines(path))
    for i, (place, line) in enumerate(given):
        progress("responses read", i + 1, len(given))
        try:
            value = json.loads(line)
            request, response = value["request"], value["response"]
            choice = response["choices"][0]
            temperature = request["temperature"]
            text = choice["message"]["content"] if "message" in choice else choice["text"]
            if text is None:
                raise InputError(
                    f"{path}, line {place}: the answer has no text (content is null; a tool call?)"
                )
            if "messages" in request:
                prompt = tokenizer.apply_chat_template(
                    request["messages"], add_generation_prompt=True, tokenize=True, return_dict=False
                )
            else:
                prompt = tokenizer(request["prompt"])["input_ids"]
            output = tokenizer(text, add_special_tokens=False)["input_ids"]
            name = str(response.get("id", place))
        except InputError:
            raise
        except Exception as error:  # templates fail in their own ways
            raise InputError(f"{path}, line {place}: no request with its response ({error!r})") from None
        if temperature != 0:
            raise InputError(
                f"{path}, line {place}: temperature {temperature}; only greedy answers (temperature 0) can be replayed "
                "without the provider's seed"
            )
        if name in {one.id for one in out} or not prompt or not output:
            raise InputError(f"{path}, line {place}: an empty prompt or answer, or an id that stands twice")
        greedy = Sampling(method="greedy", temperature=0.0)
        out.append(Transcript(name, model, tuple(prompt), tuple(output), greedy))
    if not out:
        raise InputError(f"{path} holds no responses")
    return out
