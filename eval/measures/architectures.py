"""Measure which of transformers' decoders are read, attacked and sharded rightly, on small random models."""

from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hiddenlab.attacks.vocab_match import VocabMatch
from hiddenlab.channels import Channel
from hiddenlab.defenses.cascade.load import load_cascade_model, plain_outputs
from hiddenlab.defenses.cascade.local import LocalCascade
from hiddenlab.errors import InputError, NotApplicableError
from hiddenlab.eval.cells import Figures
from hiddenlab.eval.measures.attack import exactly
from hiddenlab.models import decoder_layers, load_model
from hiddenlab.models.reading import quiet_transformers
from hiddenlab.models.self_check import largest_difference
from hiddenlab.models.twin import VOCABULARY, build_twin
from hiddenlab.sharding import Plan
from hiddenlab.text import first_line
from hiddenlab.types import Progress, silent
from hiddenlab.utils.random import generator

TOKENS, KNOWN, ATTACKED = 14, 5, 6  # of the prompt; before it grows; of the prompt that is attacked


def architecture(spec: dict[str, Any], folder: Path, progress: Progress = silent) -> Figures:
    """Compare a model's states, as the engine gives them, with those of the whole model, and attack and shard it.

    The model is small and has random weights; its windows and chunks are shorter than the prompt. ``states`` and
    ``alternatives`` are the largest differences of a row relative to its length.

    Args:
        spec: type (transformers' name of the architecture), layer, seed, transformers (its version).

    Raises:
        NotApplicableError: the small model cannot be built, or the architecture is refused.
    """
    tokens = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator(spec["seed"], "architectures"))
    with TemporaryDirectory() as path, quiet_transformers():
        whole = _saved(spec["type"], path)
        expected = _layer_output(whole, tokens, spec["layer"])
        try:
            model = load_model(path, spec["layer"], device="cpu")
        except InputError as error:
            raise NotApplicableError(f"refused: {str(error).replace(path, spec['type'])}") from None
        prefix = model.prefix()
        parts = [prefix.extend(tokens[:KNOWN])]
        alternatives = prefix.branch(tokens[KNOWN : KNOWN + 2])[:1]
        prefix.commit(0)
        parts += [alternatives, prefix.extend(tokens[KNOWN + 1 :])]
        observation, truth = Channel.parse(["identity"]).release(
            model, tokens[:ATTACKED].tolist(), spec["seed"]
        )
        result = VocabMatch(proposal="vocab").fit(observation.info, model).recover(observation)
        figures = {
            "states": largest_difference(model.encode(tokens), expected),
            "alternatives": largest_difference(torch.cat(parts), expected),
            "exact": float(result.ids == list(truth.tokens)),
            "verified": float(result.verified),
            "plain": float(model.engine == "plain"),
        }
        with suppress(InputError):  # refused: no figure
            cascade = LocalCascade(load_cascade_model(path))
            sharded = cascade.forward(tokens, Plan.clustered(TOKENS, 2, alpha=2))
            figures["cascade"] = largest_difference(sharded.cpu(), plain_outputs(cascade.model, tokens))
    return {name: exactly(value, 1) for name, value in figures.items()}


def encoder(spec: dict[str, Any], folder: Path, progress: Progress = silent) -> Figures:
    """Shard a small random encoder by tokens, and compare its outputs with those of its own forward pass.

    Args:
        spec: type (transformers' name of the architecture), seed, transformers (its version).

    Raises:
        NotApplicableError: the small model cannot be built, or Cascade refuses the architecture.
    """
    tokens = torch.randint(8, VOCABULARY, (TOKENS,), generator=generator(spec["seed"], "architectures"))
    with TemporaryDirectory() as path, quiet_transformers():
        _saved(spec["type"], path, causal=False)
        try:
            cascade = LocalCascade(load_cascade_model(path))
        except InputError as error:
            raise NotApplicableError(f"refused: {str(error).replace(path, spec['type'])}") from None
        sharded = cascade.forward(tokens, Plan.clustered(TOKENS, 2, alpha=2))
        difference = largest_difference(sharded.cpu(), plain_outputs(cascade.model, tokens))
    return {"cascade": exactly(difference, 1)}


def _saved(kind: str, path: str, *, causal: bool = True) -> Any:
    """Save a small random model of an architecture, and return it; a causal one has its head.

    Raises:
        NotApplicableError: transformers does not build one from these sizes.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        config = CONFIG_MAPPING[kind]()
        if (
            not config.is_encoder_decoder
        ):  # of a pair of encoder and decoder the decoder's sizes have names of their own
            config = config.get_text_config(decoder=True)
        if causal and hasattr(config, "is_decoder"):
            config.is_decoder, config.is_encoder_decoder = True, False
        model: Any = build_twin(config, head=causal)
        with torch.inference_mode():
            model(input_ids=torch.arange(TOKENS)[None], use_cache=False)
            model.save_pretrained(path)
    except Exception as error:  # whatever a configuration class demands of its sizes
        raise NotApplicableError(f"no small model: {first_line(error)}") from None
    return model


@torch.inference_mode()
def _layer_output(model: Any, tokens: Int[Tensor, " n"], layer: int) -> Float[Tensor, "n d"]:
    """Return what a layer gives in a plain forward pass of the whole model.

    Raises:
        NotApplicableError: the model has no such list of layers, or its layers do not run on token ids.
    """
    outputs: list[Any] = []
    try:
        layers = decoder_layers(model)
    except InputError as error:
        raise NotApplicableError(f"refused: {error}") from None
    hook = layers[layer - 1].register_forward_hook(lambda _, __, output: outputs.append(output))
    model(input_ids=tokens[None], use_cache=False)
    hook.remove()
    if not outputs:
        raise NotApplicableError(
            f"refused: the layers of {type(model).__name__} do not run on token ids alone"
        )
    states = outputs[0][0] if isinstance(outputs[0], (tuple, list)) else outputs[0]
    return states[0]  # type: ignore[no-any-return]
