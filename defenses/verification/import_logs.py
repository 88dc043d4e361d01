"""Convert logs of greedy answers of OpenAI-style APIs to transcripts (DiFR, appendix D): ``hiddenlab verify import``.

Token ids are taken from the log where it has them; else texts are tokenized with the public tokenizer and chat
template. A field that may change what the model read or drew, and that is not understood here, is an error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hiddenlab.defenses.verification.command import FORMAT, Made
from hiddenlab.defenses.verification.logs import Choice, Exchange, Message, exchanges, unanswered
from hiddenlab.defenses.verification.sampling import GREEDY
from hiddenlab.defenses.verification.transcript import Transcript, write_transcripts
from hiddenlab.errors import InputError
from hiddenlab.models.load import BUILTIN, load_config, load_tokenizer, resolve_model
from hiddenlab.types import Progress, silent

Prompt = Sequence[Message] | str | Sequence[int]

# Fields of a request that change neither what a greedy model reads nor what it draws, except where it ends.
HARMLESS = {
    "ignore_eos", "include_stop_str_in_output", "logprobs", "max_completion_tokens", "max_tokens", "metadata", "min_p",
    "priority", "prompt_cache_key", "prompt_logprobs", "request_id", "return_token_ids", "return_tokens_as_token_ids",
    "safety_identifier", "seed", "service_tier", "skip_special_tokens", "spaces_between_special_tokens", "stop",
    "stop_token_ids", "store", "stream", "stream_options", "top_k", "top_logprobs", "top_p", "user",
}  # fmt: skip
# Fields that change nothing with one of these values.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,), "presence_penalty": (0,), "repetition_penalty": (1,), "best_of": (1,),
    "min_tokens": (0,), "echo": (False,), "use_beam_search": (False,), "response_format": ({"type": "text"},),
    "tool_choice": ("none", "auto"), "add_generation_prompt": (True,), "continue_final_message": (False,),
    "add_special_tokens": (True,), "parallel_tool_calls": (True, False),
}  # fmt: skip
# Fields that change the prompt only; if its token ids are in the log, they may have any value.
OF_THE_PROMPT = {
    "add_generation_prompt", "add_special_tokens", "chat_template", "chat_template_kwargs", "continue_final_message",
    "documents", "functions", "reasoning_effort", "tools", "truncate_prompt_tokens",
}  # fmt: skip
# Fields of an answer that do not describe what was drawn.
BESIDE = {
    "content_filter_results", "hidden_states", "logprobs", "matched_stop", "native_finish_reason", "prompt_logprobs",
    "routed_experts", "stop_reason",
}  # fmt: skip
ENDS = (None, "stop", "length")  # why an answer of text alone may have ended
BROKEN = "\ufffd"  # stands for bytes that are no text

NOTES = {
    "prompts_differ": "prompts with other token ids than the tokenizer and chat template of --model give; the log's "
    "are taken",
    "texts_differ": "answers whose token ids are another text than the log's; the ids are taken",
    "counts_differ": "requests with another number of tokens than the log's usage says",
    "ends_unseen": "answers that ended by an end token or a stop text, which a log without token ids does not show; "
    "it is no part of the output",
    "unanswered": "requests of the batch without an answer in the log",
}


@dataclass
class Imported:
    """The transcripts and notes that were read from a log.

    Attributes:
        transcripts: their model is the one that the log names.
        asked: models that requests named, where they differ.
        counts: by the names of ``NOTES``, and ``from_ids``, the outputs taken from token ids.
    """

    transcripts: list[Transcript] = field(default_factory=list)
    asked: set[str] = field(default_factory=set)
    counts: Counter[str] = field(default_factory=Counter)


def import_openai(
    path: Path, out: Path, model: str | None = None, requests: Path | None = None, progress: Progress = silent
) -> Made:
    """Convert a log of OpenAI-style requests and greedy answers to a transcript file.

    Args:
        path: the log, see ``logs``.
        out: the new transcript file.
        model: whose tokenizer and chat template read the texts, and whose vocabulary the ids belong to. It has to be
            named unless the log's own name is ``builtin``; transcripts keep the log's name.
        requests: the Batch API's input, where ``path`` is its output.

    Returns:
        ``model`` as the log names it, ``asked_model`` if requests named another one, ``requests``, ``from_ids``, and
        ``notes``: lines on what the log lacks or contradicts.

    Raises:
        InputError: a line is not completely understood, or is not greedy; the log is of several models, or of one
            that ``model`` does not vouch for; the model has no tokenizer; or ``out`` exists.
    """
    if out.exists():
        raise InputError(f"{out} exists; name another file")
    ref = resolve_model(model or BUILTIN)
    tokenizer = load_tokenizer(ref)
    if tokenizer is None:
        raise InputError(f"{model or BUILTIN} has no tokenizer to read the texts with")
    imported = from_openai(
        path, tokenizer, load_config(ref).vocab_size, model=model, requests=requests, progress=progress
    )
    write_transcripts(out, imported.transcripts)
    name = imported.transcripts[0].model
    return {
        "format": FORMAT, "file": str(out), "model": name,
        "asked_model": ", ".join(sorted(imported.asked)) or None,
        "requests": len(imported.transcripts), "from_ids": imported.counts["from_ids"],
        "notes": [f"{imported.counts[key]} {note}" for key, note in NOTES.items() if imported.counts[key]],
    }  # fmt: skip


def from_openai(
    path: Path, tokenizer: Any, vocabulary: int, *, model: str | None = None, requests: Path | None = None,
    progress: Progress = silent,
) -> Imported:  # fmt: skip
    """Read a log of OpenAI-style requests and greedy answers.

    Args:
        vocabulary: tokens that the model knows. model, requests: as for ``import_openai``.

    Raises:
        InputError: as ``import_openai`` does.
    """
    imported = Imported()
    names: set[str] = set()
    logged = list(exchanges(path, requests))
    for i, exchange in enumerate(logged):
        name = _model(exchange, model, imported)
        for transcript in _Line(exchange, tokenizer, imported.counts).transcripts(name):
            try:
                transcript.check_vocabulary(vocabulary)
            except InputError as error:
                raise InputError(f"{exchange.where}: {error}") from None
            if transcript.id in names or not transcript.id.isprintable():
                raise InputError(
                    f"{exchange.where}: the id {transcript.id!r} stands twice, or is no text of one line"
                )
            names.add(transcript.id)
            imported.transcripts.append(transcript)
        progress("responses read", i + 1, len(logged))
    if not imported.transcripts:
        raise InputError(f"{path} holds no responses")
    if requests is not None:
        imported.counts["unanswered"] = len(unanswered(path, requests))
    return imported


def _model(exchange: Exchange, model: str | None, so_far: Imported) -> str:
    """Return the name that the log gives the model that answered; one log has one model."""
    asked, name = exchange.request.model, exchange.response.model or exchange.request.model or model
    if name is None or (model is None and name != BUILTIN):
        problem = "names no model" if name is None else f"is an answer of the model {name!r}"
        raise InputError(
            f"{exchange.where} {problem}; say with --model which one here has its tokenizer and chat template"
        )
    if not name.isprintable():
        raise InputError(f"{exchange.where}: the model's name {name!r} is no text of one line")
    if so_far.transcripts and name != so_far.transcripts[0].model:
        raise InputError(
            f"{exchange.where} is an answer of the model {name!r}, lines before are of "
            f"{so_far.transcripts[0].model!r}; import each model's answers by themselves"
        )
    if asked is not None and asked != name:
        so_far.asked.add(asked)
    return name


class _Line:
    """One request and its choices, to be turned into transcripts."""

    def __init__(self, exchange: Exchange, tokenizer: Any, counts: Counter[str]) -> None:
        self.exchange, self.tokenizer, self.counts = exchange, tokenizer, counts
        self.request, self.response = exchange.request, exchange.response

    def transcripts(self, model: str) -> list[Transcript]:
        """Make one transcript for each choice; a list of prompts has ``n`` choices for each prompt in turn."""
        self._check_greedy()
        prompts, each = self._prompts(), self.request.n or 1
        choices = {
            place if choice.index is None else choice.index: choice
            for place, choice in enumerate(self.response.choices)
        }
        if sorted(choices) != list(range(len(prompts) * each)) or len(choices) < len(self.response.choices):
            raise self._error(
                f"{len(self.response.choices)} choices, numbered {sorted(choices)}, for prompts: {len(prompts)}, "
                f"each with n = {each}"
            )
        transcripts = []
        for i, choice in sorted(choices.items()):
            prompt = self._prompt(prompts[i // each], choice, alone=len(prompts) == 1)
            output = self._output(choice)
            if not prompt or not output:
                raise self._error("an empty prompt or answer")
            name = self.exchange.name if len(choices) == 1 else f"{self.exchange.name}-{i}"
            transcripts.append(Transcript(name, model, tuple(prompt), tuple(output), GREEDY))
        self._check_usage(transcripts)
        return transcripts

    def _error(self, problem: str) -> InputError:
        return InputError(f"{self.exchange.where}: {problem}")

    # ---- what was asked for

    def _check_greedy(self) -> None:
        temperature = self.request.temperature
        if temperature != 0:
            problem = (
                f"temperature {temperature}" if temperature is not None else "no temperature, which means 1"
            )
            raise self._error(
                f"{problem}; only greedy answers (temperature 0) can be replayed without the provider's seed"
            )
        for name, value in self.request.further.items():
            if name not in HARMLESS | OF_THE_PROMPT and value not in NEUTRAL.get(name, ()):
                raise self._error(
                    f"the request has {name!r}, which may change what is read or drawn; it is not understood here"
                )

    def _prompts(self) -> list[Prompt]:
        messages, prompt = self.request.messages, self.request.prompt
        if (messages is None) == (prompt is None):
            raise self._error("a request has either messages or a prompt")
        if messages is not None:
            return [messages]
        if isinstance(prompt, list) and all(isinstance(entry, str | list) for entry in prompt):
            return [entry for entry in prompt if isinstance(entry, str | list)]
        return [prompt]  # type: ignore[list-item]  # one text, or one list of token ids

    def _prompt(self, asked: Prompt, choice: Choice, alone: bool) -> list[int]:
        """Return the token ids that the model read: the log's, or else the tokenizer's."""
        logged = choice.prompt_token_ids
        if logged is None and alone:
            logged = self.response.prompt_token_ids
        if logged is None:
            return self._rendered(asked)
        try:
            own = self._rendered(asked)
        except InputError:
            return logged  # there is nothing to compare it with
        self.counts["prompts_differ"] += own != logged
        return logged

    def _rendered(self, asked: Prompt) -> list[int]:
        for name in sorted(OF_THE_PROMPT & set(self.request.further)):
            if self.request.further[name] not in NEUTRAL.get(name, ()):
                raise self._error(
                    f"the request has {name!r}, which changes the prompt, and no prompt_token_ids"
                )
        if isinstance(asked, str):
            return self._tokenized(asked)
        if all(isinstance(token, int) for token in asked):
            return [token for token in asked if isinstance(token, int)]
        turns = [self._turn(message) for message in asked if isinstance(message, Message)]
        try:
            return list(
                self.tokenizer.apply_chat_template(
                    turns, add_generation_prompt=True, tokenize=True, return_dict=False
                )
            )
        except Exception as error:  # templates fail in their own ways
            detail = str(error).strip().partition("\n")[0] or type(error).__name__
            raise self._error(f"the chat template cannot render the messages ({detail:.200})") from None

    def _turn(self, message: Message) -> dict[str, str]:
        if further := sorted(set(message.further) - {"name"}):
            raise self._error(f"a message has {further[0]!r}, and the log no prompt_token_ids")
        content = message.content
        if isinstance(content, list) and len(content) == 1:
            content = content[0].text
        if not isinstance(content, str) or message.role is None:
            raise self._error(
                "a message without a role, without text, or with several parts of text, which servers join each in "
                "their own way, and no prompt_token_ids"
            )
        return {"role": message.role, "content": content}

    # ---- what was answered

    def _output(self, choice: Choice) -> list[int]:
        """Return the token ids that the model drew: the log's with the end token, or the tokenizer's without it."""
        text = self._text(choice)
        if choice.token_ids is not None:
            self.counts["from_ids"] += 1
            self.counts["texts_differ"] += text is not None and not self._says(choice.token_ids, text)
            return choice.token_ids
        beside = {**choice.further, **(choice.message.further if choice.message else {})}
        if hidden := sorted(set(beside) - BESIDE):
            raise self._error(
                f"the answer has {hidden[0]!r} beside its text, and no token_ids that say what was drawn"
            )
        usage = self.response.usage
        details = usage.completion_tokens_details if usage else None
        if details and details.reasoning_tokens:
            raise self._error(
                f"{details.reasoning_tokens} tokens of reasoning were drawn that are not in the log"
            )
        if text is None:
            raise self._error("the answer has no text (content is null; a tool call, or part of a stream?)")
        if choice.finish_reason not in ENDS:
            raise self._error(
                f"the answer ended by {choice.finish_reason!r}, so that its text may not be all that was drawn"
            )
        if BROKEN in text:
            raise self._error(
                "the text has U+FFFD, bytes that are no text; their tokens are known by token_ids only"
            )
        self.counts["ends_unseen"] += choice.finish_reason == "stop"
        return self._tokenized(text, add_special_tokens=False)

    def _tokenized(self, text: str, **how: Any) -> list[int]:
        try:
            return list(self.tokenizer(text, **how)["input_ids"])
        except (TypeError, UnicodeError):
            raise self._error("a text holds half of a surrogate pair, which is no character") from None

    def _text(self, choice: Choice) -> str | None:
        if choice.message is None:
            return choice.text
        content = choice.message.content
        return "".join(part.text for part in content) if isinstance(content, list) else content

    def _says(self, ids: Sequence[int], text: str) -> bool:
        """Return whether ids decode to that text, up to special tokens and to what a server cuts off at a stop text."""
        try:
            read = [self.tokenizer.decode(list(ids), skip_special_tokens=skip) for skip in (True, False)]
        except (OverflowError, TypeError, IndexError):  # an id outside of the vocabulary is reported later
            return False
        cut = {"stop", "stop_token_ids"} & set(self.request.further)
        return text in read or (bool(cut) and read[0].startswith(text))

    def _check_usage(self, transcripts: Sequence[Transcript]) -> None:
        """Count requests whose number of tokens differs from the log's usage; an end token may be included there."""
        usage = self.response.usage
        if usage is None or len(transcripts) != 1:
            return
        (transcript,) = transcripts
        read, drawn = usage.prompt_tokens, usage.completion_tokens
        ends = self.response.choices[0].token_ids is None and self.response.choices[0].finish_reason == "stop"
        self.counts["counts_differ"] += (read is not None and read != len(transcript.prompt)) or (
            drawn is not None and drawn - len(transcript.output) not in ((0, 1) if ends else (0,))
        )
