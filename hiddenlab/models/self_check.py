"""Compare the packed engine with the model's own forward pass, and name the first comparison that fails."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from hiddenlab.errors import InputError
from hiddenlab.models.attention import EAGER, attending, unchanged_rotary
from hiddenlab.models.checkpoint import decoder_layers
from hiddenlab.models.request import Request

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
        comparison: what was compared. size: the largest difference of a row relative to its length; None where the
            packed engine did not run at all. reason: the error that it raised.
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

    Counters of the model stay as they were.

    Args:
        lengths: of the random sequences; at least four tokens each. tolerance: of a difference; None is that of the
            model's dtype.
    """
    counted = model.evaluated_tokens, model.forward_calls
    sequences = random_sequences(model, lengths)
    tolerance = _tolerance(model) if tolerance is None else tolerance
    comparison = "a plain forward pass"
    try:
        plain = [model.forward_plain(tokens[None])[0] for tokens in sequences]
        comparison = "one prompt"
        for comparison, states, expected in _comparisons(model, sequences, plain):
            size = difference_of(states, expected)
            if not size <= tolerance:
                return Difference(comparison, size)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever an architecture does that the packed engine does not expect
        lines = str(error).strip().splitlines()
        return Difference(comparison, None, lines[0] if lines else type(error).__name__)
    finally:
        model.evaluated_tokens, model.forward_calls = counted
    return None


def _tolerance(model: "TruncatedModel") -> float:
    return QUANTIZED_TOLERANCE if model.quantization else TOLERANCE[model.dtype]


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


def _comparisons(
    model: "TruncatedModel", sequences: list[Tensor], plain: list[Tensor]
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield the name of each comparison, the packed engine's states, and those of plain passes."""
    yield "one prompt", model.encode(sequences[0]), plain[0]
    for name, together in (("several prompts in one pass", False), ("short prompts in one product", True)):
        answers = model.run([Request(model.prefix(), tokens) for tokens in sequences], together=together)
        yield name, torch.cat([answer.states for answer in answers]), torch.cat(plain)
    prefixes = []
    for tokens, expected in zip(sequences, plain, strict=True):
        prefix = model.prefix()
        prefix.extend(tokens[:2])
        yield "a prompt that grows", prefix.extend(tokens[2:-1]), expected[2:-1]
        prefixes.append(prefix)
    others = [(tokens[-1:] + shift) % model.vocab_size for tokens in sequences for shift in (1, 2)]
    for i, (prefix, tokens, expected) in enumerate(zip(prefixes, sequences, plain, strict=True)):
        rivals = others[2 * i : 2 * i + 2]
        states = prefix.branch(torch.cat([tokens[-1:], *rivals]))
        behind = torch.stack([torch.cat([tokens[:-1], rival]) for rival in rivals])
        yield (
            "alternatives behind a prompt",
            states,
            torch.cat([expected[-1:], model.forward_plain(behind)[:, -1]]),
        )
        prefix.commit(1)
        longer = torch.cat([behind[0], tokens[:1]])
        yield (
            "a prompt that took an alternative",
            prefix.extend(tokens[:1]),
            model.forward_plain(longer[None])[0, -1:],
        )
    tokens, expected = sequences[0], plain[0]
    prefix = model.prefix()
    prefix.extend(tokens[:1])
    request = Request(
        prefix, tokens[1:-1], torch.stack([tokens[2:4], tokens[1:3]]), torch.tensor([1, 0]),
    )  # fmt: skip
    (answer,) = model.run([request], keep=False)
    yield "alternatives beside a prompt", answer.branches, torch.cat([expected[2:4], expected[1:3]])


def not_causal(model: "TruncatedModel") -> bool:
    """Return whether a later token changes earlier states of the model's own forward pass."""
    counted = model.evaluated_tokens, model.forward_calls
    (tokens,) = random_sequences(model, (6,))
    changed = torch.cat([tokens[:-1], (tokens[-1:] + 1) % model.vocab_size])
    states, others = (model.forward_plain(sequence[None])[0, :-1] for sequence in (tokens, changed))
    model.evaluated_tokens, model.forward_calls = counted
    if not bool(states.isfinite().all()):
        raise InputError(
            f"the states of {model.ref.name} overflow in {str(model.dtype).removeprefix('torch.')}; use --dtype float32"
        )
    return difference_of(states, others) > _tolerance(model)


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
