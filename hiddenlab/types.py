"""Define the types that every room shares: what a defense releases, what an attack returns, what stays secret.

Axis names used in shape annotations everywhere: ``n`` prompt tokens, ``rows`` observed rows, ``d`` width of a hidden
state, ``c`` candidates, ``v`` vocabulary, ``h`` attention heads, ``k`` key/value heads, ``t`` tokens of one forward
pass.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Protocol, cast, runtime_checkable

import torch
from jaxtyping import Float
from pydantic import AfterValidator, Field
from torch import Tensor

from hiddenlab.errors import InputError
from hiddenlab.text import Status, coloured, count_of, html
from hiddenlab.utils.schema import CLOSED, Count, Finite, Layer, Position, check, one_of

LAST_STREAMS = ("final_norm", "logits")  # which exist after the last layer only
INNER_STREAMS = ("q", "k", "v", "kv", "qkv", "attn")
STREAMS = ("resid", "embed", *INNER_STREAMS, *LAST_STREAMS)
DTYPE_NAMES = ("float32", "bfloat16", "float16")
QUANTIZATIONS = ("int8", "nf4")
MOST_PREFIX_TOKENS = 4096
Progress = Callable[[str, int, int], None]  # (what, done, total); a done below 0: it was given up


def _ascending(positions: tuple[int, ...]) -> tuple[int, ...]:
    if any(a >= b for a, b in pairwise(positions)):
        raise ValueError("should ascend, each position once")
    return positions


def _known_stream(stream: str) -> str:
    if stream not in STREAMS:
        raise ValueError(f"unknown stream {stream!r}; known are {', '.join(STREAMS)}")
    return stream


def silent(what: str, done: int, total: int) -> None:
    """Show no progress."""


@dataclass(frozen=True)
class Site:
    """The layer and stream of the model from which states are taken.

    ``resid`` at layer l is the state after l decoder layers and before any final norm; ``final_norm`` the state after
    the last layer and the final norm; ``logits`` the language-model head's output (used by proposals). ``embed`` is
    layer 0, the input of the first layer. ``q``, ``k`` and ``v`` are of layer l's attention (the first is 1), all heads
    side by side, after rotary embedding; k and v are what a KV cache holds (``kv``: both, side by side), ``qkv`` what
    an attention node receives. ``attn`` is the attention's output before its output projection; nodes of a distributed
    scheme see it in parts.
    """

    __pydantic_config__ = CLOSED

    layer: Layer
    stream: Annotated[str, AfterValidator(_known_stream)] = "resid"

    def __post_init__(self) -> None:
        try:
            _known_stream(self.stream)
        except ValueError as error:
            raise InputError(str(error)) from None

    def __str__(self) -> str:
        return f"{self.stream} at layer {self.layer}"


@dataclass(frozen=True)
class ObservationInfo:
    """What everyone may know of an observation, the attacker included (Kerckhoffs: the scheme is public).

    Attributes:
        model: name of the model, as the user gave it.
        signature: a few entries of the embedding table, to detect another model (compared with a tolerance, so that
            another dtype of the same weights passes).
        site: where the states were taken.
        channel: specs of the defenses that the states passed, in order.
        rows_permuted: the order of the rows was shuffled.
        columns_permuted: None, ``"per-row"`` or ``"shared"``: coordinates were shuffled.
        noise_sigma: standard deviation of Gaussian noise on the input embeddings, or None.
        prefix_tokens: unknown embeddings before the first token; their rows are not released.
        provider_dtype: dtype in which the provider ran the model.
        quantization: None, ``"int8"`` or ``"nf4"``: how the provider's weights were quantized.
        positions: positions of the rows in the prompt, ascending, where only some were seen; None is all.
        facts: further public facts that a third party's defense adds; JSON values only.
    """

    __pydantic_config__ = CLOSED

    model: str
    signature: tuple[Finite, ...]
    site: Site
    channel: tuple[str, ...] = ()
    rows_permuted: bool = False
    columns_permuted: Annotated[str, one_of("per-row", "shared")] | None = None
    noise_sigma: Annotated[Finite, Field(gt=0)] | None = None
    prefix_tokens: Annotated[Count, Field(le=MOST_PREFIX_TOKENS)] = 0
    provider_dtype: Annotated[str, one_of(*DTYPE_NAMES)] = "float32"
    quantization: Annotated[str, one_of(*QUANTIZATIONS)] | None = None
    positions: Annotated[tuple[Position, ...], AfterValidator(_ascending)] | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


@runtime_checkable
class Sited(Protocol):
    """A model with the site of its states."""

    ref: Any
    site: Site

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def signature(self) -> tuple[float, ...]: ...


@dataclass(frozen=True)
class Observation:
    """Hidden states as a defense released them, with every public fact about them.

    Attributes:
        states: one row for each prompt token, in the released order, dtype as released; more where the facts say that
            some rows are no token's (``hiddenlab.row_facts``).
        info: the public facts.
        known: further texts that passed the defense under the same key, and that the attacker has.
        first: the first of several releases, where the states are what they say together.
    """

    states: Float[Tensor, "rows d"]
    info: ObservationInfo
    known: "tuple[KnownText, ...]" = ()
    first: "Observation | None" = None

    def __post_init__(self) -> None:
        rows, positions = self.states.shape[0], self.info.positions
        if rows == 0:
            raise InputError("the observation has no rows")
        if positions is not None and len(positions) != rows:
            raise InputError(
                f"the observation has {count_of(rows, 'row')}, but {count_of(len(positions), 'position')}"
            )
        # Not every 8-bit float has such a test of its own.
        finite = torch.isfinite(self.states.float() if self.states.dtype.itemsize == 1 else self.states)
        if not bool(finite.all()):
            bad = int((~finite).any(dim=-1).nonzero()[0, 0])
            raise InputError(
                f"the observation holds NaN or infinity (first in row {bad}); nothing can be matched"
            )

    @classmethod
    def from_states(cls, states: Any, model: "Sited", **facts: Any) -> "Observation":
        """Build an observation from states of another source: rows ``[tokens, width]``, or ``[1, tokens, width]``.

        Args:
            states: a torch tensor or a NumPy array of floating-point numbers.
            model: the truncated model whose states they are; it gives model name, layer and stream.
            facts: other known facts, fields of ``ObservationInfo``: ``rows_permuted=True``, ``noise_sigma=0.01`` …
                ``provider_dtype`` is that of half-precision states, else the model's, unless it is given.

        Raises:
            InputError: another shape, no floating-point numbers, NaN or infinity, an unknown or impossible fact.
        """
        try:
            rows = torch.as_tensor(states).detach()
        except (
            TypeError,
            ValueError,
            RuntimeError,
        ) as error:  # bfloat16 and 8-bit floats of NumPy, texts, ragged lists
            raise InputError(f"the states are no tensor or array of ordinary numbers: {error}") from None
        if rows.ndim == 3 and rows.shape[0] == 1:
            rows = rows[0]
        if rows.ndim != 2 or not rows.is_floating_point():
            raise InputError(
                f"states should be floating-point numbers [tokens, width], not {rows.dtype} {list(rows.shape)}"
            )
        known = ObservationInfo.__dataclass_fields__
        if unknown := sorted(set(facts) - set(known)):
            raise InputError(f"an observation has no fact {unknown[0]!r}; known are {', '.join(known)}")
        # States in half precision were rounded, whatever the attacker computes in.
        half = rows.dtype in (torch.bfloat16, torch.float16)
        own = {
            "model": model.ref.name,
            "signature": model.signature,
            "site": asdict(model.site),
            "provider_dtype": str(rows.dtype if half else model.dtype).removeprefix("torch."),
        }
        return cls(rows, check({**own, **facts}, ObservationInfo, "the facts of the states"))

    @classmethod
    def from_file(cls, path: str | Path, model: "Sited", **reading: Any) -> "Observation":
        """Build an observation from a file of another program: NumPy, PyTorch, safetensors, Parquet, JSON …

        Args:
            path: a file with the states of one prompt.
            model: the truncated model whose states they are; it gives model name, layer and stream.
            reading: what the file does not say, as options of ``hiddenlab import``: ``axes="layers,tokens,width"``,
                ``tensor="x"``, ``format="vllm"``, ``layers=(2, 18)``, ``first_position=5``, ``mask="mask.npy"``,
                ``channel=("dtype:bfloat16",)``.

        Raises:
            InputError: the file cannot be read, does not fit the model, or holds several prompts
                (``hiddenlab.imports.import_observations`` reads those).
        """
        # By its name: the types know no room above them.
        observations = import_module("hiddenlab.imports").import_observations([path], model, **reading)
        if len(observations) != 1:
            raise InputError(
                f"{path} holds {len(observations)} prompts where one is wanted; "
                "use hiddenlab.imports.import_observations"
            )
        return cast("Observation", observations[0])

    def __repr__(self) -> str:
        rows, width = self.states.shape
        channel = " | ".join(self.info.channel) or "identity"
        return (
            f"Observation({count_of(rows, 'row')} × {width}, {self.info.site} of {self.info.model}, channel {channel}; "
            f"the attacker knows the states and the channel, not tokens, permutations or noise)"
        )


@dataclass(frozen=True)
class KnownText:
    """A text that the attacker has, with what the defense released of it under the key of another observation.

    Attributes:
        tokens: of the text. shown: its rows and their public facts.
    """

    tokens: tuple[int, ...]
    shown: Observation


@dataclass(frozen=True)
class GroundTruth:
    """The secret part of a release; only the defense, the runner and the scorer use it.

    Attributes:
        tokens: the prompt's token ids.
        row_order: released row r is the state of token ``row_order[r]``, of none if that is -1; None where rows are the
            tokens' in order.
        details: whatever else a defense drew (column permutations, noise …), by defense spec.
        text: the prompt's text, None where only its tokens are known.
        computed: token ids that the model ran in their place, where a defense replaced some; None where it ran the
            prompt's own.
    """

    tokens: tuple[int, ...]
    row_order: tuple[int, ...] | None = None
    details: Mapping[str, Any] = field(default_factory=dict)
    text: str | None = None
    computed: tuple[int, ...] | None = None

    @property
    def shown(self) -> tuple[int, ...]:
        """The token ids that rows are of: what the model ran."""
        return self.tokens if self.computed is None else self.computed

    def __repr__(self) -> str:
        return f"GroundTruth({count_of(len(self.tokens), 'token')}, not shown)"


@dataclass(frozen=True)
class TokenPrediction:
    """One recovered token and how certain the attack is of it.

    Attributes:
        token: the token id.
        row: the observed row it was matched with, -1 for a token that no row shows.
        distance: distance of its state to that row, in the matcher's norm.
        margin: how much farther the nearest other candidate was, or None where none was evaluated.
        evaluated: candidates evaluated for this position, the accepted one included.
        verified: the distance is within epsilon, where by chance no wrong one among those evaluated would be.
    """

    token: int
    row: int
    distance: float
    margin: float | None
    evaluated: int
    verified: bool


@dataclass(frozen=True)
class AttackResult:
    """What an attack recovered from one observation.

    ``evaluated_tokens`` counts every position run through the truncated model, verification passes included;
    ``forward_calls`` the passes this prompt took part in; ``seconds`` this prompt's share of its batch's time.
    ``positions`` are the tokens' places in the prompt where not all of its tokens were recovered, None where nothing is
    missing before the last. ``text`` is the recovered text, and ``pieces`` are its parts, each with a status; the base
    class of attacks sets both.
    """

    tokens: tuple[TokenPrediction, ...]
    evaluated_tokens: int
    forward_calls: int
    seconds: float
    stop_reason: str
    epsilon: float | None = None
    positions: tuple[int, ...] | None = None
    text: str | None = None
    pieces: tuple[tuple[str, Status], ...] = ()

    @property
    def verified(self) -> bool:
        """Whether tokens were recovered, and every one is verified."""
        return bool(self.tokens) and all(token.verified for token in self.tokens)

    @property
    def ids(self) -> list[int]:
        """The recovered token ids, in order."""
        return [token.token for token in self.tokens]

    def __str__(self) -> str:
        return self.text or " ".join(map(str, self.ids))

    def __repr__(self) -> str:
        sure = sum(token.verified for token in self.tokens)
        verified = f"{sure} of {count_of(len(self.tokens), 'token')} verified"
        return f"AttackResult({str(self)!r}, {verified}, {self.stop_reason})"

    def _repr_html_(self) -> str:
        """Show the text coloured in a notebook: green for verified tokens, yellow for others, grey for missing ones."""
        sure = sum(token.verified for token in self.tokens)
        said = f"{sure} of {count_of(len(self.tokens), 'token')} verified; {self.stop_reason}"
        return f"<div>{coloured(self.pieces or ((str(self), 'unverified'),))}<br><small>{html(said)}</small></div>"
