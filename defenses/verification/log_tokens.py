"""Find which tokens a logged request read and drew: by its token ids where the log has them, else by its texts.

A field that may change what the model read or drew, and that is not understood here, is an error, and so is an answer
of which something is missing: a token imported wrongly looks like a dishonest provider.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from hiddenlab.defenses.verification.logs import Choice, Exchange, Message
from hiddenlab.defenses.verification.sampling import GREEDY
from hiddenlab.defenses.verification.transcript import Transcript
from hiddenlab.errors import InputError

Prompt = Sequence[Message] | str | Sequence[int]

# Fields of a request that change neither what a greedy model reads nor what it draws, except where it ends.
HARMLESS = {
    "cache_salt", "extra_headers", "extra_query", "ignore_eos", "include_reasoning", "include_stop_str_in_output",
    "length_penalty", "logprob_token_ids", "logprobs", "max_completion_tokens", "max_tokens", "metadata", "min_p",
    "priority", "prompt_cache_key", "prompt_cache_retention", "prompt_logprobs", "repetition_detection", "request_id",
    "return_hidden_states", "return_mm_kwargs", "return_prompt_text", "return_token_ids", "return_token_offsets",
    "return_tokens_as_token_ids", "routed_experts_prompt_start", "safety_identifier", "seed", "service_tier",
    "session_id", "skip_special_tokens", "spaces_between_special_tokens", "stop", "stop_token_ids", "store", "stream",
    "stream_interval", "stream_options", "timeout", "top_k", "top_logprobs", "top_p", "user",
}  # fmt: skip
# Fields that change nothing with one of these values.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,), "presence_penalty": (0,), "repetition_penalty": (1,), "best_of": (1,),
    "min_tokens": (0,), "use_beam_search": (False,), "response_format": ({"type": "text"},),
    "tool_choice": ("none", "auto"), "add_generation_prompt": (True,), "continue_final_message": (False,),
    "parallel_tool_calls": (True, False), "watermarking": (False,), "thinking_token_budget": (-1,),
    "modalities": (["text"],),
}  # fmt: skip
# Fields that change the prompt only; if its token ids are in the log, they may have any value.
OF_THE_PROMPT = {
    "add_generation_prompt", "add_special_tokens", "chat_template", "chat_template_kwargs", "continue_final_message",
    "documents", "functions", "reasoning_effort", "tools", "truncate_prompt_tokens", "truncation_side",
}  # fmt: skip
# Fields of an answer that do not describe what was drawn.
BESIDE = {
    "annotations", "content_filter_results", "hidden_states", "matched_stop", "native_finish_reason",
    "prompt_logprobs", "routed_experts", "stop_reason",
}  # fmt: skip
# Fields of an answer that do, and what they hold.
APART = {
    "reasoning": "reasoning", "reasoning_content": "reasoning", "reasoning_details": "reasoning",
    "thinking": "reasoning", "refusal": "a refusal", "tool_calls": "tool calls", "function_call": "a function call",
    "audio": "audio",
}  # fmt: skip
ENDS = (None, "stop", "length")  # why an answer of text alone may have ended
BROKEN = "\ufffd"  # stands for bytes that are no text
NUMBER = re.compile("[0-9]{1,10}")
TOKEN_ID = "token_id:"  # with which vLLM writes a token as a number (return_tokens_as_token_ids)
ASK = "have token ids logged (vLLM: return_token_ids)"


@dataclass
class Said:
    """One choice, read.

    Attributes:
        prompt, tokens: ids.
        from_ids: whether ``tokens`` are the log's.
        slack: how many more may have been drawn: an end token, and those of a stop text.
        cut: whether the text may end at a stop text, which may have taken a part of the last token with it.
    """

    prompt: list[int]
    tokens: list[int]
    from_ids: bool
    slack: int = 0
    cut: bool = False


@dataclass
class LoggedTokens:
    """The tokens of one request and its choices.

    Attributes:
        notes: names of ``import_logs.NOTES``, one for each thing that was noticed.
    """

    exchange: Exchange
    tokenizer: Any
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.request, self.response = self.exchange.request, self.exchange.response

    def transcripts(self, model: str) -> list[Transcript]:
        """Make one transcript for each choice; a list of prompts has ``n`` choices for each prompt in turn.

        Raises:
            InputError: something is not understood, is missing, or contradicts itself.
        """
        self._check_request()
        prompts, each = self._prompts(), self.request.n or 1
        choices = self._choices(len(prompts), each)
        said = []
        for i, choice in enumerate(choices):
            asked = prompts[i // each]
            prompt = self._prompt(asked, choice, alone=len(prompts) == 1)
            said.append(self._said(choice, asked, prompt))
        self._part_echoed_ids(said)
        self._check_counts(said, each)
        name, several = self.exchange.name, len(said) > 1
        transcripts = []
        for i, answer in enumerate(said):
            tokens = answer.tokens[:-1] if answer.cut else answer.tokens
            if not answer.prompt or not tokens:
                problem = "an empty prompt" if not answer.prompt else "an empty answer"
                if answer.prompt and not answer.from_ids:
                    problem += (
                        f"{' before a stop text' if answer.cut else ''}, of which no text shows the end token"
                    )
                raise self._error(problem)
            self.notes += ["cut"] * answer.cut + ["from_ids"] * answer.from_ids
            place = f"{name}-{i}" if several else name
            transcripts.append(Transcript(place, model, tuple(answer.prompt), tuple(tokens), GREEDY))
        return transcripts

    def _error(self, problem: str) -> InputError:
        return InputError(f"{self.exchange.where}: {problem}")

    # ---- what was asked for

    def _check_request(self) -> None:
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
                only = f" with any value but {NEUTRAL[name][0]!r}" if name in NEUTRAL else ""
                raise self._error(
                    f"the request has {name!r}, which may change what is read or drawn; it is not understood here{only}"
                )
        if 0 in (self.request.further.get("max_tokens"), self.request.further.get("max_completion_tokens")):
            raise self._error("the request asked for 0 tokens, so that there is no answer")

    def _prompts(self) -> list[Prompt]:
        messages, prompt = self.request.messages, self.request.prompt
        if (messages is None) == (prompt is None):
            raise self._error("a request has either messages or a prompt")
        if messages is not None:
            return [messages]
        if isinstance(prompt, list) and all(isinstance(entry, str | list) for entry in prompt):
            return [entry for entry in prompt if isinstance(entry, str | list)]
        return [prompt]  # type: ignore[list-item]  # one text, or one list of token ids

    def _choices(self, prompts: int, each: int) -> list[Choice]:
        """Return the choices in the order of their numbers."""
        given, wanted = self.response.choices, prompts * each
        choices = {
            place if choice.index is None else choice.index: choice for place, choice in enumerate(given)
        }
        if not len(choices) == len(given) == wanted or sorted(choices) != list(range(wanted)):
            numbers = ", ".join(map(str, sorted(choices)[:5])) or "none"
            raise self._error(
                f"{len(given)} choices (numbers: {numbers}{', …' if len(choices) > 5 else ''}) for {prompts} prompts, "
                f"each with n = {each}: {wanted} are needed, numbered from 0"
            )
        return [choices[i] for i in range(wanted)]

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
        self.notes += ["prompts_differ"] * (own != logged)
        return logged

    def _rendered(self, asked: Prompt) -> list[int]:
        chat = self.request.messages is not None
        # In chats it is the template that writes special tokens.
        neutral = NEUTRAL | {"add_special_tokens": (not chat,)}
        for name in sorted(OF_THE_PROMPT & set(self.request.further)):
            if self.request.further[name] not in neutral.get(name, ()):
                raise self._error(
                    f"the request has {name!r}, which changes the prompt, and the log no prompt_token_ids; {ASK}"
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
            raise self._error(f"a message has {further[0]!r}, and the log no prompt_token_ids; {ASK}")
        content = message.content
        if isinstance(content, list) and len(content) == 1:
            content = content[0].text
        if not isinstance(content, str) or message.role is None:
            problem = "several parts of text, which servers join each in their own way"
            if not isinstance(content, list):
                problem = "no role" if message.role is None else "no text"
            raise self._error(f"a message has {problem}, and the log no prompt_token_ids; {ASK}")
        return {"role": message.role, "content": content}

    # ---- what was answered

    def _said(self, choice: Choice, asked: Prompt, prompt: list[int]) -> Said:
        """Return what the model drew: the log's token ids with the end token, or the tokenizer's without it."""
        ids, text = self._ids(choice), self._text(choice)
        rest = text if text is None else self._without_prompt(text, asked)
        self.notes += ["unfinished"] * (self.exchange.streamed and choice.finish_reason is None)
        if ids is not None:
            readable = [shown for shown in (text, rest) if shown is not None]
            self.notes += ["texts_differ"] * (
                bool(readable) and not self._fits(ids, prompt, readable, choice)
            )
            return Said(prompt, ids, from_ids=True)
        self._check_text_alone(choice)
        if text is None:
            raise self._error(f"the answer has no text (content is null), and no token_ids; {ASK}")
        if rest is None:
            raise self._error("the request has 'echo', and the text does not begin with the prompt")
        if BROKEN in rest:
            raise self._error(f"the text has U+FFFD, bytes that are no text; {ASK}")
        said = Said(prompt, self._tokenized(rest, add_special_tokens=False), from_ids=False)
        if choice.finish_reason != "length":
            said.slack = 1
            self.notes += ["ends_unseen"] * (choice.finish_reason == "stop")
            stops = self.request.further.get("stop") or []
            stops = [stop for stop in ([stops] if isinstance(stops, str) else stops) if isinstance(stop, str)]
            said.slack += max(
                (len(self._tokenized(stop, add_special_tokens=False)) for stop in stops), default=0
            )
            # vLLM says what ended an answer: a stop text, the number of a token, or null for the end token.
            said.cut = bool(stops) and isinstance((choice.model_extra or {}).get("stop_reason", ""), str)
        entries = choice.drawn
        if entries is not None and not self.request.echo:
            self._check_number(len(said.tokens), len(entries), said.slack, "its logprobs are of")
        return said

    def _ids(self, choice: Choice) -> list[int] | None:
        """Return the drawn token ids of a choice, where the log has them."""
        if choice.token_ids is not None:
            return choice.token_ids
        tokens = choice.drawn
        if tokens is None or not all(token.startswith(TOKEN_ID) for token in tokens):
            return None
        numbers = [token.removeprefix(TOKEN_ID) for token in tokens]
        wrong = next((number for number in numbers if not NUMBER.fullmatch(number)), None)
        if wrong is not None:
            raise self._error(f"its logprobs have the token {TOKEN_ID}{wrong[:20]!r}, which is no number")
        return [int(number) for number in numbers]

    def _check_text_alone(self, choice: Choice) -> None:
        """Check that the text is all that was drawn, as far as the log shows it."""
        if apart := sorted(self._shown_apart(choice) - BESIDE):
            what = f"{APART[apart[0]]} ({apart[0]!r})" if apart[0] in APART else repr(apart[0])
            raise self._error(
                f"the answer has {what} beside its text, of which no text shows the tokens that were drawn; {ASK}"
            )
        if self.request.further.get("include_reasoning") is False:
            raise self._error(f"the request has include_reasoning false, which hides what was drawn; {ASK}")
        usage = self.response.usage
        details = usage.completion_tokens_details if usage else None
        if details and details.reasoning_tokens:
            raise self._error(
                f"{details.reasoning_tokens} tokens of reasoning were drawn that are not in the log; {ASK}"
            )
        if choice.finish_reason not in ENDS:
            raise self._error(
                f"the answer ended by {choice.finish_reason!r}, so that its text may not be all that was drawn; {ASK}"
            )

    def _tokenized(self, text: str, **how: Any) -> list[int]:
        try:
            return list(self.tokenizer(text, **how)["input_ids"])
        except (TypeError, UnicodeError):
            raise self._error("a text holds half of a surrogate pair, which is no character") from None

    @staticmethod
    def _text(choice: Choice) -> str | None:
        if choice.message is None:
            return choice.text
        content = choice.message.content
        return "".join(part.text for part in content) if isinstance(content, list) else content

    def _without_prompt(self, text: str, asked: Prompt) -> str | None:
        """Return a text without the prompt that was echoed before it; None where it should be there and is not."""
        if not self.request.echo:
            return text
        return next((text.removeprefix(echo) for echo in self._echoes(asked) if text.startswith(echo)), None)

    def _echoes(self, asked: Prompt) -> Iterator[str]:
        if isinstance(asked, str):
            yield asked
        elif all(isinstance(token, int) for token in asked):
            yield from self._read([token for token in asked if isinstance(token, int)])
        else:
            # A chat echoes its last message, and that only where the answer goes on with it.
            last = asked[-1] if asked else None
            goes_on = isinstance(last, Message) and last.role == "assistant"
            content = last.content if goes_on and isinstance(last, Message) else ""
            yield "\n".join(part.text for part in content) if isinstance(content, list) else content or ""

    def _read(self, ids: Sequence[int]) -> list[str]:
        """Return the text of ids with special tokens, and without; nothing where one is outside of the vocabulary."""
        try:
            return [self.tokenizer.decode(list(ids), skip_special_tokens=skip) for skip in (False, True)]
        except (OverflowError, TypeError, ValueError, LookupError):  # it is reported later
            return []

    def _fits(self, ids: list[int], prompt: list[int], texts: Sequence[str], choice: Choice) -> bool:
        """Return whether ids decode to one of the texts, up to what a server cuts off or shows apart."""
        parts = [ids, ids[len(prompt) :]] if self.request.echo and ids[: len(prompt)] == prompt else [ids]
        read = [text for part in parts for text in self._read(part)]
        if set(APART) & self._shown_apart(choice):
            return any(text.strip() in whole for text in texts for whole in read)
        cut = {"stop", "stop_token_ids"} & set(self.request.further)
        return any(
            text in read or (bool(cut) and any(whole.startswith(text) for whole in read)) for text in texts
        )

    @staticmethod
    def _shown_apart(choice: Choice) -> set[str]:
        """Return the names of what an answer holds beside its text."""
        return set(choice.further) | set(choice.message.further if choice.message else {})

    # ---- what the log counts

    def _part_echoed_ids(self, said: Sequence[Said]) -> None:
        """Take the prompt off ids that begin with it, where it was echoed; vLLM echoes no ids, other servers may."""
        answers = [answer for answer in said if answer.from_ids]
        if not self.request.echo or not answers:
            return
        if any(answer.tokens[: len(answer.prompt)] != answer.prompt for answer in answers):
            return
        usage = self.response.usage
        drawn = usage.completion_tokens if usage else None
        whole = sum(len(answer.tokens) for answer in said)
        if drawn == whole:
            return
        if drawn != whole - sum(len(answer.prompt) for answer in said):
            raise self._error(
                "the request has 'echo', and its ids begin with the prompt's; no usage says whether they are its echo"
            )
        for answer in answers:
            answer.tokens = answer.tokens[len(answer.prompt) :]

    def _check_counts(self, said: Sequence[Said], each: int) -> None:
        """Compare the numbers of tokens with the log's usage, which is the sum over prompts and choices."""
        usage = self.response.usage
        if usage is None:
            return
        read, drawn = usage.prompt_tokens, usage.completion_tokens
        if read is not None and read != sum(len(answer.prompt) for answer in said[::each]):
            self.notes.append("prompts_counted")
        if drawn is None:
            return
        here = sum(len(answer.tokens) for answer in said)
        if not all(answer.from_ids for answer in said):
            self._check_number(here, drawn, sum(answer.slack for answer in said), "its usage says")
        elif here < drawn:
            raise self._error(f"{here} token ids, and its usage says {drawn}: some are missing")
        else:
            self.notes += ["ids_counted"] * (here > drawn)

    def _check_number(self, here: int, drawn: int, slack: int, source: str) -> None:
        if not 0 <= drawn - here <= slack:
            raise self._error(
                f"the text is {here} tokens here, and {source} {drawn}: it does not tokenize back to what was drawn, "
                f"or something that was drawn is not shown; {ASK}"
            )
