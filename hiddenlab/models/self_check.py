"""Compare the packed engine with the model's own forward pass, and name the first comparison that fails."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from hiddenlab.errors import InputError
from hiddenlab.models.attention import EAGER, attending, unchanged_rotary
from hiddenlab.models.checkpoint import decoder_layers
from hiddenlab.models.request import Request
from hiddenlab.text import first_line

if TYPE_CHECKING:
    from hiddenlab.models import TruncatedModel

# Largest difference of a row, relative to its length. Rounding stays a tenth below; another mask or another position
# moves rows by a hundredth and more.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}
TWIN_TOLERANCE = 5e-5  # of a small random model in float32, in which borders move rows less
QUANTIZED_TOLERANCE = 1e-1  # int8 rounds activations by what else is in the pass
SHORT = (7, 4, 9)  # lengths of the sequences that real weights run
SEED = 47


@dataclass(frozen=True)
class Difference:
    """A comparison that failed.

    Attributes:
        comparison: what was compared. size: the difference of a row relative to its length; None where the fast way did
            not run at all. reason: the error that it raised.
    """

    comparison: str
    size: float | None = None
    reason: str = ""

    def __str__(self) -> str:
        if self.size is None:
            return f"{self.comparison}: {self.reason}"
        return f"{self.comparison}: states differ by {self.size:.2g} of their length"


def random_sequences(model: "TruncatedModel", lengths: tuple[int, ...]) -> list[Int[Tensor, " n"]]:
    """Return random token ids of these lengths; the same for every model of one vocabulary."""
    generator = torch.Generator().manual_seed(SEED)
    return [torch.randint(0, model.vocab_size, (n,), generator=generator) for n in lengths]


def first_difference(
    model: "TruncatedModel", lengths: tuple[int, ...] = SHORT, tolerance: float | None = None
) -> Difference | None:
    """Compare what the packed engine can do with plain forward passes; None where all agree within rounding.

    The model's counters, and rotary factors that a long prompt changes, stay as they were.

    Args:
        lengths: of the random sequences; at least four tokens each. tolerance: of a difference; None is that of the
            model's dtype.
    """
    with uncounted(model), unchanged_rotary(model.module):
        return first_of(_comparisons(model, lengths), _tolerance(model) if tolerance is None else tolerance)


def first_of(comparisons: Iterator[tuple[str, Tensor, Tensor]], tolerance: float) -> Difference | None:
    """Return the first comparison whose states differ by more than the tolerance; None where there is none.

    Args:
        comparisons: the name of each, its states and the expected ones; an error that it raises is a difference too,
            but for memory that is full.
    """
    comparison = "the first pass"
    try:
        for comparison, states, expected in comparisons:
            size = difference_of(states, expected)
            if not size <= tolerance:
                return Difference(comparison, size)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever an architecture does that the fast way does not expect
        return Difference(comparison, None, first_line(error))
    return None


@contextmanager
def uncounted(model: "TruncatedModel") -> Iterator[None]:
    """Leave the model's counters as they were."""
    counted = model.evaluated_tokens, model.forward_calls
    try:
        yield
    finally:
        model.evaluated_tokens, model.forward_calls = counted


def _tolerance(model: "TruncatedModel") -> float:
    quantized = model.quantization or getattr(model.module, "is_quantized", False)
    return QUANTIZED_TOLERANCE if quantized else TOLERANCE[model.dtype]


def difference_of(states: Float[Tensor, "n d"], expected: Float[Tensor, "n d"]) -> float:
    """Return the largest relative difference of a row; in half precision that of the middle row.

    There rounding alone may send a token to other experts, which moves single rows far.
    """
    if expected.dtype == torch.float32 or states.shape != expected.shape:
        return largest_difference(states, expected)
    rows = [largest_difference(row[None], other[None]) for row, other in zip(states, expected, strict=True)]
    return sorted(rows)[len(rows) // 2]


def largest_difference(states: Float[Tensor, "n d"], expected: Float[Tensor, "n d"]) -> float:
    """Return the largest difference of a row relative to its length; infinite where shapes or NaN differ."""
    if states.shape != expected.shape:
        return float("inf")
    difference = torch.linalg.vector_norm((states - expected).float(), dim=1)
    largest = (difference / torch.linalg.vector_norm(expected.float(), dim=1).clamp(min=1e-12)).max()
    return float(largest) if bool(largest.isfinite()) else float("inf")


def _comparisons(model: "TruncatedModel", lengths: tuple[int, ...]) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield the name of each comparison, the packed engine's states, and those of plain passes."""
    sequences = random_sequences(model, lengths)
    plain = [_plain(model, tokens) for tokens in sequences]
    yield "one prompt", model.encode(sequences[0]), plain[0]
    for name, together in (("several prompts in one pass", False), ("short prompts in one product", True)):
        answers = model.run([Request(model.prefix(), tokens) for tokens in sequences], together=together)
        yield name, torch.cat([answer.states for answer in answers]), torch.cat(plain)
    grown, alternatives, longer = list[tuple[Tensor, Tensor]](), list[tuple[Tensor, Tensor]](), []
    for tokens, expected in zip(sequences, plain, strict=True):
        prefix = model.prefix()
        prefix.extend(tokens[:2])
        grown.append((prefix.extend(tokens[2:-1]), expected[2:-1]))
        other = (tokens[-1:] + 1) % model.vocab_size
        behind = _plain(model, torch.cat([tokens[:-1], other, tokens[:1]]))
        alternatives.append(
            (prefix.branch(torch.cat([tokens[-1:], other])), torch.cat([expected[-1:], behind[-2:-1]]))
        )
        prefix.commit(1)
        longer.append((prefix.extend(tokens[:1]), behind[-1:]))
    for name, pairs in (
        ("a prompt that grows", grown),
        ("alternatives behind a prompt", alternatives),
        ("a prompt that took an alternative", longer),
    ):
        states, expected = (torch.cat(side) for side in zip(*pairs, strict=True))
        yield name, states, expected
    tokens, expected = sequences[0], plain[0]
    prefix = model.prefix()
    prefix.extend(tokens[:1])
    branches = torch.stack([tokens[2:4], tokens[1:3]])
    (answer,) = model.run([Request(prefix, tokens[1:-1], branches, torch.tensor([1, 0]))], keep=False)
    yield "alternatives beside a prompt", answer.branches, torch.cat([expected[2:4], expected[1:3]])


def _plain(model: "TruncatedModel", tokens: Tensor) -> Float[Tensor, "n d"]:
    return model.forward_plain(tokens[None])[0]


def not_causal(model: "TruncatedModel") -> bool:
    """Return whether a later token changes earlier states of the model's own forward pass.

    Raises:
        InputError: states overflow in the model's dtype.
    """
    (tokens,) = random_sequences(model, (6,))
    changed = torch.cat([tokens[:-1], (tokens[-1:] + 1) % model.vocab_size])
    with uncounted(model):
        states, others = (_plain(model, sequence)[:-1] for sequence in (tokens, changed))
    if not bool(states.isfinite().all()):
        dtype = str(model.dtype).removeprefix("torch.")
        way = "its weights are damaged" if dtype == "float32" else "use --dtype float32"
        raise InputError(f"the states of {model.ref.name} overflow in {dtype}; {way}")
    return difference_of(states, others) > _tolerance(model)


def reads_embeddings(model: "TruncatedModel") -> bool:
    """Return whether the model gives the same states from input embeddings as from their token ids.

    Models that look tokens up a second time (embeddings for each layer, pairs of tokens) do not.
    """
    (tokens,) = random_sequences(model, (6,))
    with uncounted(model):
        expected = _plain(model, tokens)
        return first_of(iter([("", _plain(model, model.embed(tokens)), expected)]), _tolerance(model)) is None


@torch.inference_mode()
def misplaced_layer(module: nn.Module, tokens: Int[Tensor, " n"]) -> int | None:
    """Return the first layer whose output is not what transformers calls its hidden state; None where all are.

    Transformers mostly shows the embeddings first; some models show the first layer's output first. Behind the last
    layer a norm changes what is shown, so that this one is not compared.

    Args:
        module: a model with all of its layers.
    """
    inputs, outputs = list[Tensor](), list[Tensor]()

    def keep(_: nn.Module, args: tuple[Any, ...], options: dict[str, Any], output: Any) -> None:
        inputs.append(args[0] if args else options["hidden_states"])
        outputs.append(output[0] if isinstance(output, (tuple, list)) else output)

    hooks = [layer.register_forward_hook(keep, with_kwargs=True) for layer in decoder_layers(module)]
    try:
        with attending(module, EAGER), unchanged_rotary(module):
            shown = module(input_ids=tokens[None], use_cache=False, output_hidden_states=True).hidden_states
    finally:
        for hook in hooks:
            hook.remove()
    if len(outputs) != len(hooks):
        return len(outputs) + 1
    first = 1 if shown[0].shape == inputs[0].shape and torch.equal(shown[0], inputs[0]) else 0
    for number, (states, expected) in enumerate(zip(outputs[:-1], shown[first:], strict=False), 1):
        if (
            states.shape != expected.shape
            or largest_difference(states[0], expected[0]) > TOLERANCE[states.dtype]
        ):
            return number
    return None
