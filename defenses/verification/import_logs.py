"""Convert logs of greedy answers of OpenAI-style APIs to transcripts (DiFR, appendix D): ``hiddenlab verify import``.

What a log is, ``logs`` says; what its fields mean, ``log_tokens``.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hiddenlab.defenses.verification.command import FORMAT, Made
from hiddenlab.defenses.verification.log_tokens import LoggedTokens
from hiddenlab.defenses.verification.logs import Exchange, read_log
from hiddenlab.defenses.verification.transcript import Transcript, write_transcripts
from hiddenlab.errors import InputError
from hiddenlab.models.load import BUILTIN, ModelRef, load_config, load_tokenizer, resolve_model
from hiddenlab.types import Progress, silent

# What is noted of requests; the braces stand for their number and first names.
NOTES = {
    "failed": "requests that the server did not answer: {}",
    "unanswered": "requests of the batch without a line in the log: {}",
    "left_out": "requests left out: {}",
    "prompts_differ": "prompts with other token ids than the tokenizer and chat template of --model give: {}; the "
    "log's are taken",
    "prompts_counted": "requests whose prompt has another number of tokens than the log's usage says: {}; the server "
    "may have read something else",
    "texts_differ": "answers whose token ids are another text than the log's: {}; the ids are taken",
    "ids_counted": "requests with more token ids than the log's usage says: {}",
    "unfinished": "streams that broke off: {}; what had come is taken",
    "cut": "answers that may have ended at a stop text, which may have cut their last token: {}; it is left out",
    "ends_unseen": "answers whose end token or stop text is not shown by a log without token ids: {}; "
    "it is no part of the output",
}
NAMED = 3  # requests that a note names


class WrongLogError(InputError):
    """A log as a whole cannot be imported, so that leaving out a request does not help."""


@dataclass
class Imported:
    """The transcripts and notes that were read from a log.

    Attributes:
        transcripts: their model is the one that the log names.
        asked: models that requests named, where they differ.
        noted: by the names of ``NOTES``, the requests that each is about; ``from_ids``, those whose output was taken
            from token ids. A request stands once for each of its choices.
        reasons: why requests were left out, in order.
    """

    transcripts: list[Transcript] = field(default_factory=list)
    asked: set[str] = field(default_factory=set)
    noted: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    reasons: list[str] = field(default_factory=list)

    @property
    def counts(self) -> Counter[str]:
        """How many requests each note is about."""
        return Counter({name: len(requests) for name, requests in self.noted.items()})

    def notes(self) -> list[str]:
        """Return a line for each note that there is, with the first requests that it is about."""
        made = []
        for key, text in NOTES.items():
            if names := list(dict.fromkeys(self.noted[key])):
                more = ", …" if len(names) > NAMED else ""
                made.append(text.format(f"{len(self.noted[key])} ({', '.join(names[:NAMED])}{more})"))
                if key == "left_out":
                    made += [f"left out: {reason}" for reason in self.reasons[:NAMED]]
        return made


def import_openai(
    path: Path, out: Path, model: str | None = None, requests: Path | None = None, skip: bool = False,
    progress: Progress = silent,
) -> Made:  # fmt: skip
    """Convert a log of OpenAI-style requests and greedy answers to a transcript file.

    Args:
        path: the log, see ``logs``.
        out: the new transcript file.
        model: whose tokenizer and chat template read the texts, and whose vocabulary the ids belong to. It has to be
            named unless the log's own name is ``builtin``; transcripts keep the log's name.
        requests: the requests, where ``path`` holds responses alone.
        skip: leave out what cannot be imported, with a note, where it would be an error.

    Returns:
        ``model`` as the log names it, ``asked_model`` if requests named another one, ``transcripts``, of them
        ``from_ids``, ``left_out``, and ``notes``: lines on what the log lacks or contradicts.

    Raises:
        InputError: a request is not completely understood, or is not greedy; the log is of several models, or of one
            that ``model`` does not vouch for; the model has no tokenizer; or ``out`` exists.
    """
    if out.exists():
        raise InputError(f"{out} exists; name another file")
    for file in (path, requests):  # before a model is loaded, which takes long
        if file is not None and not file.exists():
            raise InputError(f"cannot read {file}: there is no such file")
    ref = resolve_model(model or BUILTIN)
    tokenizer = load_tokenizer(ref)
    if tokenizer is None:
        raise InputError(f"{model or BUILTIN} has no tokenizer to read the texts with")
    imported = from_openai(
        path,
        tokenizer,
        load_config(ref).vocab_size,
        model=model,
        requests=requests,
        skip=skip,
        progress=progress,
    )
    write_transcripts(out, imported.transcripts)
    return {
        "format": FORMAT, "file": str(out), "model": imported.transcripts[0].model,
        "asked_model": ", ".join(sorted(imported.asked)) or None,
        "transcripts": len(imported.transcripts), "from_ids": imported.counts["from_ids"],
        "left_out": imported.counts["left_out"], "notes": imported.notes() + _penalties(ref),
    }  # fmt: skip


def from_openai(
    path: Path, tokenizer: Any, vocabulary: int, *, model: str | None = None, requests: Path | None = None,
    skip: bool = False, progress: Progress = silent,
) -> Imported:  # fmt: skip
    """Read a log of OpenAI-style requests and greedy answers.

    Args:
        vocabulary: tokens that the model knows. model, requests, skip: as for ``import_openai``.

    Raises:
        InputError: as ``import_openai`` does.
    """
    log, imported = read_log(path, requests), Imported()
    names: set[str] = set()
    for i, entry in enumerate(log.entries):
        label = entry.name or f"line {entry.number}"
        if entry.failure is not None:
            imported.noted["failed"].append(label)
            continue
        try:
            exchange = entry.exchange()
            name = _model(exchange, model, imported)
            read = LoggedTokens(exchange, tokenizer)
            transcripts = read.transcripts(name)
            _check_vocabulary(transcripts, vocabulary, entry.where)
        except WrongLogError:
            raise
        except InputError as error:
            if not skip:
                raise InputError(f"{error}; --skip leaves such requests out") from None
            imported.noted["left_out"].append(label)
            imported.reasons.append(str(error))
            continue
        for transcript in transcripts:
            if transcript.id in names:
                raise WrongLogError(f"{entry.where}: the id {transcript.id!r} stands twice")
            names.add(transcript.id)
        for note in read.notes:
            imported.noted[note].append(exchange.name)
        imported.transcripts += transcripts
        progress("responses read", i + 1, len(log.entries))
    if not imported.transcripts:
        failures = [entry.failure for entry in log.entries if entry.failure is not None]
        first = f"; the first reason: {imported.reasons[0]}" if imported.reasons else ""
        first = first or (f"; the server failed, first by: {failures[0]}" if failures else "")
        raise InputError(f"no answer of {path} can be imported{first}")
    imported.noted["unanswered"] = log.unanswered
    return imported


def _check_vocabulary(transcripts: list[Transcript], vocabulary: int, where: str) -> None:
    try:
        for transcript in transcripts:
            transcript.check_vocabulary(vocabulary)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def _model(exchange: Exchange, model: str | None, so_far: Imported) -> str:
    """Return the name that the log gives the model that answered; one log has one model."""
    asked, name = exchange.request.model, exchange.response.model or exchange.request.model or model
    if name is None or (model is None and name != BUILTIN):
        problem = "names no model" if name is None else f"is an answer of the model {name!r}"
        raise WrongLogError(
            f"{exchange.where} {problem}; say with --model which one here has its tokenizer and chat template"
        )
    for what, text in (("model's name", name), ("id", exchange.name)):
        if not text.isprintable():
            raise WrongLogError(f"{exchange.where}: the {what} {text!r} is no text of one line")
    if so_far.transcripts and name != so_far.transcripts[0].model:
        raise WrongLogError(
            f"{exchange.where} is an answer of the model {name!r}, lines before are of "
            f"{so_far.transcripts[0].model!r}; import each model's answers by themselves"
        )
    if asked is not None and asked != name:
        so_far.asked.add(asked)
    return name


def _penalties(ref: ModelRef) -> list[str]:
    """Return a line where the model's own settings penalize repetition: servers apply it unless a request says 1."""
    from transformers import GenerationConfig

    try:
        settings = GenerationConfig.from_pretrained(ref.path, revision=ref.revision or "main")
    except Exception:  # there are none, or they are damaged; nothing here needs them
        return []
    penalty = settings.repetition_penalty
    if not isinstance(penalty, int | float) or penalty == 1:
        return []
    return [
        f"the model's generation_config.json has repetition_penalty {penalty:g}; vLLM applies it to each request that "
        "does not set repetition_penalty to 1, and such answers are not greedy"
    ]
