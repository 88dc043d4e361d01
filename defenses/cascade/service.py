"""Answer requests over one Cascade: check them, limit how many run, and generate each answer in its own thread."""

import asyncio
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import prometheus_client as prometheus
import torch
from jaxtyping import Float
from starlette.exceptions import HTTPException
from torch import Tensor

from hiddenlab.defenses.cascade.backend import Cascade
from hiddenlab.defenses.cascade.bodies import Body, ChatBody, CompletionBody, RequestError
from hiddenlab.defenses.cascade.chat import Chat, ChatError, Conversation, tokenize
from hiddenlab.defenses.cascade.decoding import StopTexts, TextStream, TokenTexts
from hiddenlab.defenses.cascade.defaults import DRAWN, Defaults
from hiddenlab.defenses.cascade.generate import Cancellation, generate
from hiddenlab.defenses.cascade.sampling import Sampling
from hiddenlab.errors import InputError
from hiddenlab.sharding import Plan
from hiddenlab.text import count_of

RETRY_SECONDS = 1  # until a refused client may ask again
OPENAI = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}  # where neither request nor model says


@dataclass(frozen=True)
class Limits:
    """The limits of one request, and of how many run.

    Attributes:
        body: bytes of a request.
        tokens: of prompt and answer together.
        running: requests at once.
        new_tokens: of an answer, at most.
        default_new_tokens: of an answer where the request does not say.
    """

    body: int = 1 << 20
    tokens: int = 4096
    running: int = 16
    new_tokens: int = 1024
    default_new_tokens: int = 256

    def __post_init__(self) -> None:
        if min(self.body, self.running, self.new_tokens, self.default_new_tokens) < 1 or self.tokens < 2:
            raise InputError("limits must be at least 1, prompt and answer together at least 2 tokens")
        if self.default_new_tokens > self.new_tokens:
            raise InputError(
                f"an answer has {count_of(self.default_new_tokens, 'token')} by default, and may have "
                f"{self.new_tokens}; "
                "lower the default or raise the limit"
            )


@dataclass(frozen=True)
class TokenNote:
    """What is told of a generated token beside its text.

    Attributes:
        token: its id.
        logprob: natural logarithm of its probability, by the model's own logits.
        likeliest: ids of the likeliest tokens, with theirs.
        offset: characters of the answer before it.
    """

    token: int
    logprob: float
    likeliest: list[tuple[int, float]]
    offset: int


@dataclass(frozen=True)
class Piece:
    """A part of an answer: text of whole characters, and notes on tokens where they were asked for."""

    index: int
    text: str
    notes: list[TokenNote] = field(default_factory=list)


@dataclass
class Answer:
    """A growing text in pieces, until a stop text, a token that ends it, or the limit.

    Attributes:
        index: among the request's answers.
        pieces: the text, computed as it is asked for.
        prompt_tokens: of its prompt; 0 where an earlier answer to the same prompt counts them.
        cancellation: ends it early.
        tokens: that were generated, one that ends the answer included.
        finish: why it ended, ``stop`` or ``length``.
        ended: its thread is free again.
    """

    index: int
    pieces: Iterator[Piece]
    prompt_tokens: int
    cancellation: Cancellation
    tokens: int = 0
    finish: str = "length"
    ended: bool = False


# Pieces and answers that have ended, as they come; then None, or the error that ended it.
Queue: TypeAlias = "asyncio.Queue[Piece | Answer | BaseException | None]"


class Service:
    """A service that answers requests over one Cascade.

    Args:
        cascade: the nodes.
        plan: makes the plan of a prompt with so many tokens.
        tokenizer: of the model.
        name: under which the model is served.
        keys: digests of the keys of which requests must show one; empty for none.
        limits: of requests.
        defaults: of the model's answers; None for its tokenizer's end token alone.
    """

    def __init__(
        self,
        cascade: Cascade,
        plan: Callable[[int], Plan],
        tokenizer: Any,
        *,
        name: str,
        keys: Sequence[str] = (),
        limits: Limits | None = None,
        defaults: Defaults | None = None,
    ) -> None:
        self.cascade, self.plan, self.tokenizer, self.name = cascade, plan, tokenizer, name
        self.keys, self.limits = tuple(keys), limits or Limits()
        self.defaults = defaults or Defaults(frozenset({tokenizer.eos_token_id} - {None}))
        self.created = int(time.time())
        self.registry = prometheus.CollectorRegistry()
        self.requests = prometheus.Counter(
            "cascade_requests", "Requests by path and status", ["path", "status"], registry=self.registry
        )
        self.tokens = prometheus.Counter("cascade_tokens", "Tokens by kind", ["kind"], registry=self.registry)
        self.seconds = prometheus.Histogram(
            "cascade_request_seconds", "Time of an answer, to its last token", registry=self.registry
        )
        self.running = prometheus.Gauge("cascade_running", "Answers being generated", registry=self.registry)
        facts = cascade.facts
        self.context = min(self.limits.tokens, facts.context or self.limits.tokens)
        self.chat = Chat(tokenizer, name, self.context)
        self.texts = TokenTexts(tokenizer)
        self.taken = 0
        self._threads = ThreadPoolExecutor(self.limits.running, thread_name_prefix="answer")

    def ids(self, body: Body) -> list[torch.Tensor]:
        """Return the token ids of each prompt of a request.

        Control tokens in the text of a raw prompt keep their meaning; those in messages are plain text.

        Raises:
            InputError: a prompt is empty, too long or holds an id that is no token, or see ``Chat.ids``.
        """
        if isinstance(body, ChatBody):
            conversation = Conversation(
                [turn.rendered() for turn in body.messages], body.told, body.chat_template_kwargs
            )
            try:
                return [self._checked(self.chat.ids(conversation))]
            except ChatError as error:
                raise RequestError(str(error), error.field) from None
        assert isinstance(body, CompletionBody)
        return [
            self._checked(tokenize(self.tokenizer, prompt) if isinstance(prompt, str) else list(prompt))
            for prompt in body.prompts
        ]

    def _checked(self, ids: list[int]) -> torch.Tensor:
        if not ids:
            raise InputError("the prompt is empty; give at least one token")
        if max(ids) >= self.cascade.facts.vocabulary:
            raise InputError(
                f"a token id is outside of the vocabulary, 0 to {self.cascade.facts.vocabulary - 1}"
            )
        if len(ids) >= self.context:
            raise InputError(
                f"the prompt has {count_of(len(ids), 'token')}; prompt and answer may have {self.context} together"
            )
        return torch.tensor(ids, dtype=torch.long)

    def check(self, body: Body) -> None:
        """Refuse requests for another model, a longer answer or too many answers before any work.

        Raises:
            HTTPException: the model is another.
            RequestError: a field asks for more than is offered here.
        """
        self.check_model(body.model)
        if body.wanted is not None and body.wanted > self.limits.new_tokens:
            field = "max_tokens" if body.max_tokens is not None else "max_completion_tokens"
            raise RequestError(
                f"{field}: an answer may have {count_of(self.limits.new_tokens, 'token')} here", field
            )
        most = body.wanted or self.limits.default_new_tokens
        if body.min_tokens > most:
            raise RequestError(
                f"min_tokens: an answer that names no max_tokens has {count_of(most, 'token')} here",
                "min_tokens",
            )
        prompts = len(body.prompts) if isinstance(body, CompletionBody) else 1
        if prompts * body.n > self.limits.running:
            field = "n" if body.n > 1 else "prompt"
            raise RequestError(
                f"{field}: {prompts * body.n} answers are asked for, and {self.limits.running} may be generated at "
                "once here; send several requests",
                field,
            )
        vocabulary = self.cascade.facts.vocabulary
        for field, ids in (("logit_bias", list(body.biases)), ("stop_token_ids", body.stop_token_ids)):
            if max(ids, default=0) >= vocabulary:
                raise RequestError(
                    f"{field}: a token id is outside of the vocabulary, 0 to {vocabulary - 1}", field
                )

    def check_model(self, name: str) -> None:
        """Raise an HTTPException where a request names another model than this one."""
        if name != self.name:
            raise HTTPException(404, f"the model {name!r} is not served here; {self.name!r} is")

    def answers(self, body: Body, prompts: Sequence[torch.Tensor]) -> list[Answer]:
        """Return the answers to each prompt, in OpenAI's order, whose pieces are computed as they are asked for."""
        seed = body.seed if body.seed is not None else int.from_bytes(uuid.uuid4().bytes[:4], "big")
        found = list[Answer]()
        for ids in prompts:
            for choice in range(body.n):
                answer = Answer(len(found), iter(()), 0 if choice else len(ids), Cancellation())
                answer.pieces = self._pieces(answer, body, ids, self.sampling(body, seed + choice))
                found.append(answer)
        return found

    def sampling(self, body: Body, seed: int) -> Sampling:
        """Return how a request's tokens are chosen: as it says, else as the model's files say, else as OpenAI does."""
        drawn = {name: getattr(body, name) for name in DRAWN if getattr(body, name) is not None}
        drawn = OPENAI | dict(self.defaults.drawn) | drawn
        drawn["top_k"] = max(drawn["top_k"], 0)
        more: dict[str, Any] = {}
        if body.repetition_penalty is not None:
            more["repetition_penalty"] = body.repetition_penalty
        return self.defaults.greedy(
            **drawn, **more, seed=seed % 2**64, frequency_penalty=body.frequency_penalty,
            presence_penalty=body.presence_penalty, logit_bias=body.biases, min_tokens=body.min_tokens,
        )  # fmt: skip

    def _pieces(self, answer: Answer, body: Body, ids: torch.Tensor, sampling: Sampling) -> Iterator[Piece]:
        new = min(body.wanted or self.limits.default_new_tokens, self.context - len(ids))
        ends = frozenset(body.stop_token_ids) | (frozenset() if body.ignore_eos else self.defaults.stop)
        stream, stops = TextStream(self.tokenizer), StopTexts(body.stops)
        notes: list[TokenNote] = []
        text, given, unstoppable = "", 0, 0

        def observe(token: int, logits: Float[Tensor, " v"]) -> None:
            if body.likeliest is not None:
                notes.append(_note(token, logits, body.likeliest, len(text)))

        def piece(upto: int) -> Iterator[Piece]:
            nonlocal given
            if upto > given or notes:
                part = Piece(answer.index, text[given:upto], notes.copy())
                given = max(given, upto)
                notes.clear()
                yield part

        tokens = generate(
            self.cascade, ids, self.plan(len(ids)), new_tokens=new, sampling=sampling, stop=ends,
            cancellation=answer.cancellation, observe=observe,
        )  # fmt: skip
        try:
            for token in tokens:
                answer.tokens += 1
                # The plain model's text ends with this token, which is empty where the token is a special one.
                text = text if token in body.stop_token_ids else stream.push(token)
                if token in ends:
                    answer.finish = "stop"
                    break
                if answer.tokens < body.min_tokens:
                    unstoppable = len(text)
                if (cut := stops.find(text, unstoppable)) is not None:
                    answer.finish = "stop"
                    yield from piece(cut)
                    return
                if (safe := stops.safe(text)) > given:
                    yield from piece(safe)
            text = stream.text()
            # Text that only the end has settled may complete a stop text.
            if answer.tokens >= body.min_tokens and (cut := stops.find(text, unstoppable)) is not None:
                answer.finish = "stop"
                text = text[:cut]
            yield from piece(len(text))
        finally:
            tokens.close()  # type: ignore[attr-defined]

    def begin(self, answers: Sequence[Answer]) -> Queue:
        """Start to generate answers, each in its own thread.

        Their places among the running ones are free again once their threads have ended. A client that leaves cancels
        its answers; until they have stopped, others are refused. There is no queue.

        Returns:
            Pieces and ended answers as they come; after the last one None, or an error that ended one.

        Raises:
            HTTPException: too few places are free.
        """
        if self.taken + len(answers) > self.limits.running:
            raise HTTPException(
                429,
                f"{self.taken} of {self.limits.running} answers that may run are running; try again later",
                {"Retry-After": str(RETRY_SECONDS)},
            )
        loop: asyncio.AbstractEventLoop = asyncio.get_running_loop()
        queue: Queue = asyncio.Queue()
        left = len(answers)
        self.taken += len(answers)
        self.running.set(self.taken)
        started = time.perf_counter()

        def end(answer: Answer, error: BaseException | None) -> None:
            nonlocal left
            answer.ended = True
            self.taken -= 1
            left -= 1
            self.running.set(self.taken)
            self.seconds.observe(time.perf_counter() - started)
            self.tokens.labels("prompt").inc(answer.prompt_tokens)
            self.tokens.labels("completion").inc(answer.tokens)
            queue.put_nowait(error or answer)
            if not left:
                queue.put_nowait(None)

        def work(answer: Answer) -> None:
            failure: BaseException | None = None
            try:
                for piece in answer.pieces:
                    loop.call_soon_threadsafe(queue.put_nowait, piece)
            except BaseException as error:  # after any error, the place must be freed
                failure = error
            with suppress(RuntimeError):  # the server has ended meanwhile
                loop.call_soon_threadsafe(end, answer, failure)

        for answer in answers:
            self._threads.submit(work, answer)
        return queue


def _note(token: int, logits: Float[Tensor, " v"], likeliest: int, offset: int) -> TokenNote:
    scores = logits.float().log_softmax(-1)
    values, ids = scores.topk(min(likeliest, len(scores)))
    return TokenNote(
        token, float(scores[token]), list(zip(ids.tolist(), values.tolist(), strict=True)), offset
    )
