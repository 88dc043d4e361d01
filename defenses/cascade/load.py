"""Load a model for CompNodes, and check that Cascade gives what the model itself gives."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from hiddenlab.defenses.cascade.backend import Cascade
from hiddenlab.defenses.cascade.comp_host import (
    ATTENTION_NAME,
    UNSEEN,
    first_position,
    has_head,
    register_cascade_attention,
)
from hiddenlab.defenses.cascade.hardening import WHOLE, Section
from hiddenlab.defenses.cascade.local import LocalCascade
from hiddenlab.defenses.cascade.passes import Pass, new_name
from hiddenlab.errors import InputError
from hiddenlab.models.attention import EAGER, attending, unchanged_rotary, use_attention
from hiddenlab.models.checkpoint import LeftOut, decoder_layers, final_norm, replaced, some_layers
from hiddenlab.models.choice import CODE, Verdict, facts_of, fingerprint, remembered
from hiddenlab.models.load import load_config, load_module, resolve_model
from hiddenlab.models.self_check import TOLERANCE, TWIN_TOLERANCE, first_of
from hiddenlab.models.twin import LENGTHS, TRAINED_POSITIONS, build_twin
from hiddenlab.sharding import Plan

TOKENS, CACHED_STEPS, SEED = 12, 2, 47
MEETS = ". Tokens meet elsewhere than in attention, or the model counts positions itself"


def section_of(model: nn.Module, section: Section) -> nn.Module:
    """Return the layers of a section of a whole model; they share its weights."""
    if section.end is None:
        return some_layers(model, section.first, None)
    return _states_only(some_layers(model.base_model, section.first, section.end))  # type: ignore[arg-type]


def load_cascade_model(
    name: str,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    attention: str = ATTENTION_NAME,
    section: Section = WHOLE,
) -> nn.Module:
    """Load a model for CompNodes: a causal LM with its head, any other model without one.

    Before Cascade's own attention is used, sharded passes and cached steps are compared with the model's own forward
    pass: with its weights on a short prompt, and on a small random copy beyond windows and other borders.

    Args:
        name, dtype, device: see ``load_model``.
        attention: one of transformers' own gives the plain model, to compare with.
        section: the layers that are loaded, see ``Section``.

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
    ends = section.end is None
    model = load_module(
        ref, config, head=head and ends, dtype=dtype, device=torch_device, attention=EAGER if sharded else attention,
        layers=section.end, left_out=section.first, final_norm=ends,
    )  # fmt: skip
    if not ends:
        if has_head(model):
            raise InputError(
                f"{name} ({config.model_type}) cannot be loaded without its head; its layers stay together"
            )
        model = _states_only(model)
    if section != WHOLE:
        _check_layers(model, section, int(config.num_hidden_layers), name)
    if not sharded:
        return model
    use_attention(model, ATTENTION_NAME)
    facts = {"config": facts_of(config), "head": head}
    own = {
        **facts,
        "section": asdict(section),
        "weights": fingerprint(model),
        "dtype": str(dtype),
        "device": torch_device.type,
    }
    code = (*CODE, Path(__file__).parent)
    for kind, key, compute in (
        (
            "cascade",
            own,
            lambda: _verdict(LocalCascade(model), model, TOKENS, CACHED_STEPS, TOLERANCE[dtype]),
        ),
        ("cascade-twin", facts, lambda: _twin_difference(config, head)),
    ):
        if difference := remembered(kind, key, Verdict, compute, code).difference:
            raise InputError(f"{name} cannot be sharded by tokens: {difference}")
    return model


def _check_layers(model: nn.Module, section: Section, layers: int, name: str) -> None:
    """Check that a model has the layers of its section alone: some keep all, as layers share weights.

    Raises:
        InputError: it has others.
    """
    found = [i for i, layer in enumerate(decoder_layers(model)) if not isinstance(layer, LeftOut)]
    if found != list(range(layers))[section.first : section.end]:
        raise InputError(
            f"the layers of {name} share weights, so that they cannot be parted; leave --harden client out"
        )


def _states_only(model: nn.Module) -> nn.Module:
    """Return a model without its final norm, which shares all weights with the given one."""
    norm = final_norm(model)
    return model if norm is None else replaced(model, norm[0].split("."), nn.Identity())


def _verdict(
    cascade: Cascade, model: nn.Module, tokens: int, steps: int, tolerance: float, where: str = ""
) -> Verdict:
    """Compare Cascade with the model's own forward pass."""
    difference = first_difference(cascade, model, tokens, steps, tolerance)
    if difference is None:
        return Verdict()
    meets = "" if UNSEEN in difference else MEETS
    return Verdict(difference=f"Cascade does not reproduce its own forward pass ({difference}{where}){meets}")


def first_difference(
    cascade: Cascade, model: nn.Module, tokens: int, steps: int, tolerance: float
) -> str | None:
    """Compare a Cascade with a model's own forward pass, on a random prompt and in cached steps at its end.

    Args:
        tokens: of the prompt. steps: of them, that are cached. tolerance: relative to the largest number.

    Returns:
        What differs; None where nothing does.
    """
    with unchanged_rotary(model):
        difference = first_of(_comparisons(cascade, model, tokens, steps), tolerance)
    return None if difference is None else str(difference)


@torch.inference_mode()
def _comparisons(
    cascade: Cascade, model: nn.Module, n: int, steps: int
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield the name of each comparison, Cascade's outputs, and those of the model itself."""
    generator = torch.Generator().manual_seed(SEED)
    table = model.get_input_embeddings().weight  # type: ignore[operator,union-attr]
    tokens = torch.randint(first_position(model), len(table), (n,), generator=generator)  # no padding
    expected = plain_outputs(model, tokens)
    for name, plan in (
        ("one node", Plan.clustered(n, n, alpha=1)),
        ("two nodes", Plan.clustered(n, 2, alpha=2)),
    ):
        yield name, cascade.forward(tokens, plan).cpu(), expected
    if not cascade.facts.head:
        return
    begun, rows = n - steps, list[Tensor]()
    work = Pass(new_name(), Plan.clustered(begun, 2, alpha=2), keep=True, last=True)
    try:
        for end in range(begun, n + 1):
            rows.append(cascade.step(work, tokens[work.since : end])[0].cpu())
            if end < n:
                grown = work.plan.grown(end + 1)
                work = Pass(work.request, grown, work.number + 1, end, keep=True, last=True)
    finally:
        cascade.close(work.request)
    yield "cached steps", torch.stack(rows), expected[begun - 1 :]


@torch.inference_mode()
def plain_outputs(model: nn.Module, tokens: Int[Tensor, " n"]) -> Float[Tensor, "n width"]:
    """Return the outputs of the model's own forward pass: logits, or last hidden states without a head."""
    table = model.get_input_embeddings().weight  # type: ignore[operator,union-attr]
    with attending(model, EAGER), unchanged_rotary(model):
        output: Any = model(input_ids=tokens[None].to(table.device))
    return (output.logits if "logits" in output else output.last_hidden_state)[0].cpu()


def _twin_difference(config: Any, head: bool) -> Verdict:
    """Compare on a small random copy; cached steps begin before its borders, and pass them."""
    try:
        twin = build_twin(config, head=head)
    except InputError as error:
        return Verdict(difference=str(error))
    use_attention(twin, ATTENTION_NAME)
    n = max(LENGTHS)
    return _verdict(
        LocalCascade(twin), twin, n, n - TRAINED_POSITIONS + 2, TWIN_TOLERANCE, "; a small random copy"
    )
