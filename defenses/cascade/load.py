"""Load a model for CompNodes, and check that Cascade gives what the model itself gives."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from hiddenlab.defenses.cascade.backend import new_request
from hiddenlab.defenses.cascade.local import LocalCascade
from hiddenlab.defenses.cascade.node_state import ATTENTION_NAME, Pass, register_cascade_attention
from hiddenlab.errors import InputError
from hiddenlab.models.attention import EAGER, attending, unchanged_rotary, use_attention
from hiddenlab.models.choice import CODE, facts_of, fingerprint, remembered
from hiddenlab.models.load import load_config, load_module, resolve_model
from hiddenlab.models.self_check import TOLERANCE, TWIN_TOLERANCE, difference_of
from hiddenlab.models.twin import LENGTHS, TRAINED_POSITIONS, build_twin, has_borders
from hiddenlab.sharding import Plan
from hiddenlab.utils.schema import CLOSED

TOKENS, CACHED_STEPS, SEED = 12, 2, 47


@dataclass(frozen=True)
class Fault:
    """Why Cascade is wrong for a model: the comparison that failed; empty where it is right."""

    __pydantic_config__ = CLOSED

    reason: str = ""


def load_cascade_model(
    name: str, *, dtype: torch.dtype = torch.float32, device: str = "cpu", attention: str = ATTENTION_NAME
) -> nn.Module:
    """Load a model for CompNodes: a causal LM with its head, any other model without one.

    Before Cascade's own attention is used, sharded passes and cached steps are compared with the model's own forward
    pass: with its weights on a short prompt, and on a small random copy beyond windows and other borders.

    Args:
        name, dtype, device: see ``load_model``.
        attention: one of transformers' own gives the plain model, to compare with.

    Raises:
        InputError: the model or device is unknown, the model has no attention, or Cascade does not reproduce it.
    """
    from hiddenlab.models.device import parse_device

    register_cascade_attention()
    torch_device = parse_device(device)
    ref = resolve_model(name)
    config = load_config(ref)
    if not getattr(config, "num_attention_heads", None):
        raise InputError(f"{name} ({config.model_type}) has no attention to shard")
    head = any("CausalLM" in kind or "LMHead" in kind for kind in config.architectures or ())
    sharded = attention == ATTENTION_NAME
    model = load_module(
        ref, config, head=head, dtype=dtype, device=torch_device, attention=EAGER if sharded else attention
    )
    if not sharded:
        return model
    use_attention(model, ATTENTION_NAME)
    facts = {"config": facts_of(config), "head": head}
    own = {**facts, "weights": fingerprint(model), "dtype": str(dtype), "device": torch_device.type}
    code = (*CODE, Path(__file__).parent)
    fault = remembered(
        "cascade", own, Fault, lambda: _fault(model, TOKENS, CACHED_STEPS, TOLERANCE[dtype]), code
    ).reason
    fault = fault or remembered("cascade-twin", facts, Fault, lambda: _twin_fault(config, head), code).reason
    if fault:
        raise InputError(
            f"Cascade does not reproduce {name} ({fault}): its tokens meet elsewhere than in attention, or it counts "
            "positions itself; such models cannot be sharded by tokens"
        )
    return model


def _fault(model: nn.Module, tokens: int, steps: int, tolerance: float) -> Fault:
    """Compare Cascade with the model's own forward pass."""
    comparison = "a plain forward pass"
    try:
        for comparison, states, expected in _comparisons(model, tokens, steps):
            size = difference_of(states, expected)
            if not size <= tolerance:
                return Fault(f"{comparison}: outputs differ by {size:.2g} of their length")
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever an architecture does that Cascade does not expect
        lines = str(error).strip().splitlines()
        return Fault(f"{comparison}: {lines[0][:200] if lines else type(error).__name__}")
    return Fault()


@torch.inference_mode()
def _comparisons(model: nn.Module, n: int, steps: int) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield the name of each comparison, Cascade's outputs, and those of the model itself."""
    generator = torch.Generator().manual_seed(SEED)
    table = model.get_input_embeddings().weight  # type: ignore[operator,union-attr]
    tokens = torch.randint(0, len(table), (n,), generator=generator)
    expected = plain_outputs(model, tokens)
    cascade = LocalCascade(model)
    for name, plan in (
        ("one node", Plan.clustered(n, n, alpha=1)),
        ("two nodes", Plan.clustered(n, 2, alpha=2)),
    ):
        yield name, cascade.forward(tokens, plan).cpu(), expected
    if not cascade.facts.head:
        return
    begun = n - steps
    work = Pass(new_request(), Plan.clustered(begun, 2, alpha=2), keep=True, last=True)
    try:
        for end in range(begun, n + 1):
            (logits,) = cascade.step(work, tokens[work.since : end])
            yield "a cached step", logits[None].cpu(), expected[end - 1 : end]
            if end < n:
                grown = work.plan.grown(end + 1)
                work = Pass(work.request, grown, work.number + 1, end, keep=True, last=True)
    finally:
        cascade.close(work.request)


@torch.inference_mode()
def plain_outputs(model: nn.Module, tokens: Int[Tensor, " n"]) -> Float[Tensor, "n width"]:
    """Return the outputs of the model's own forward pass: logits, or last hidden states without a head."""
    table = model.get_input_embeddings().weight  # type: ignore[operator,union-attr]
    with attending(model, EAGER), unchanged_rotary(model):
        output: Any = model(input_ids=tokens[None].to(table.device))
    return (output.logits if "logits" in output else output.last_hidden_state)[0].cpu()


def _twin_fault(config: Any, head: bool) -> Fault:
    """Compare on a small random copy, with a prompt beyond its borders."""
    try:
        twin = build_twin(config, head=head)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a configuration that this reduction does not fit
        if not has_borders(config):
            return Fault()
        lines = str(error).strip().splitlines()
        reason = lines[0][:200] if lines else type(error).__name__
        return Fault(f"its windows and borders cannot be checked on a small copy: {reason}")
    use_attention(twin, ATTENTION_NAME)
    n = max(LENGTHS)  # cached steps begin before the borders, and pass them
    fault = _fault(twin, n, n - TRAINED_POSITIONS + 2, TWIN_TOLERANCE)
    return Fault(f"{fault.reason} (a small random copy)") if fault.reason else fault
