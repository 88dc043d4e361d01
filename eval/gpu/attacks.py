"""Attack real states of the built-in model on the device, and compare with the same attack on a CPU."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hiddenlab.attacks.beam_decoding import BeamDecoding
from hiddenlab.attacks.vocab_match import VocabMatch
from hiddenlab.base import Attack
from hiddenlab.batch import time_prefill
from hiddenlab.channels import Channel
from hiddenlab.errors import InputError
from hiddenlab.eval.gpu.work import Figures, Lab
from hiddenlab.models import TruncatedModel, load_model
from hiddenlab.prompts import load_prompts
from hiddenlab.types import GroundTruth, Observation
from hiddenlab.utils.random import generator

LAYER, NOISE_LAYER, TOKENS, SEED = 11, 6, 50, 0
WARM_UP = 5.0  # seconds; an attack that takes longer is not run twice
REFERENCE = Path(__file__).with_name("reference.json")
CHANNELS = {
    "raw": (),
    "rows permuted": ("seq-perm",),
    "columns permuted": ("hidden-perm",),
    "both permuted": ("seq-perm", "hidden-perm"),
    "noise 0.01": ("gaussian:sigma=0.01",),
    "int8": ("int8",),
    "nf4": ("nf4",),
}


def attack(lab: Lab, *, channel: str, prompts: int, options: dict[str, Any]) -> Figures:
    """Attack prompts of 50 tokens at layer 11 in float32, and compare with the CPU's answers in reference.json.

    ``reference`` records these answers.
    """
    model = model_at(lab, LAYER)
    if channel in ("int8", "nf4"):
        _need_bitsandbytes()
    expected = expected_ids(lab, channel, prompts)
    ids, figures = attacked(lab, model, VocabMatch(setup="full", **options), CHANNELS[channel], prompts)
    same = sum(a == b for a, b in zip(ids, expected, strict=True))
    return {"same_as_cpu": same, "equal": same == prompts and not figures["wrong_verified"], **figures}


def noise(lab: Lab, *, sigma: float, prompts: int) -> Figures:
    """Attack prompts of 50 tokens at layer 6 by beam decoding, from shuffled rows of noised embeddings."""
    model = model_at(lab, NOISE_LAYER)
    less: dict[str, Any] = {"lm": False, "beam": 2, "width": 8}
    attack = BeamDecoding(**lab.sized({}, less))
    channel = (f"gaussian:sigma={sigma}", "seq-perm")
    _, figures = attacked(lab, model, attack, channel, prompts, again=False)
    return {
        **figures,
        "prompts_a_minute": 60 * prompts / figures["attack_seconds"],
    }


def expected_ids(lab: Lab, channel: str, prompts: int) -> list[list[int]]:
    """Return what the attack finds on a CPU: recorded for the built-in model, measured now in a rehearsal.

    Raises:
        InputError: it was not recorded for this channel and as many prompts.
    """
    if lab.setting.rehearse:
        model = load_model(str(lab.setting.model), depth_of(lab, LAYER), device="cpu")
        return attacked(lab, model, VocabMatch(setup="full"), CHANNELS[channel], prompts)[0]
    recorded = json.loads(REFERENCE.read_text(encoding="utf-8")) if REFERENCE.is_file() else {}
    ids: list[list[int]] = recorded.get(channel, [])[:prompts]
    if len(ids) < prompts:
        raise InputError(
            f"the CPU's answers for {channel!r} are not recorded; run 'python -m hiddenlab.eval.gpu.reference'"
        )
    return ids


def attacked(
    lab: Lab,
    model: TruncatedModel,
    attack: Attack,
    channel: Sequence[str],
    prompts: int,
    again: bool = True,
) -> tuple[list[list[int]], dict[str, Any]]:
    """Attack the first shipped prompts; return their recovered ids and figures.

    Args:
        lab: the device.
        model: truncated at the attacked layer.
        attack: to run.
        channel: the stages' specs.
        prompts: how many.
        again: run a short attack twice, and time the second run, which finds everything warm.
    """
    texts = [prompt.text for prompt in load_prompts(limit=prompts)]
    tokens = [model.tokenize(text, lab.sized(TOKENS, 20)) for text in texts]
    pairs = released(model, channel, tokens)
    observations, secrets = [observation for observation, _ in pairs], [truth for _, truth in pairs]
    start = lab.now()
    attack.fit(observations[0].info, model, SEED)
    setup = lab.now() - start
    seconds = 0.0
    for _ in range(2 if again else 1):
        if seconds > WARM_UP:
            break
        start = lab.now()
        results = attack.recover_batch(observations)
        seconds = lab.now() - start
    prefill = sum(prefill_seconds or 0.0 for prefill_seconds in time_prefill(model, tokens))
    truths = [list(truth.tokens) for truth in secrets]
    total = sum(map(len, tokens))
    recovered = list(zip(results, truths, strict=True))
    right = sum(a == b for result, truth in recovered for a, b in zip(result.ids, truth, strict=True))
    ids = [result.ids for result in results]
    return ids, {
        "exact": sum(result.ids == truth for result, truth in recovered),
        "token_accuracy": right / total,
        "verified": sum(t.verified for result in results for t in result.tokens) / total,
        "wrong_verified": sum(
            t.verified and t.token != a
            for result, truth in recovered
            for t, a in zip(result.tokens, truth, strict=True)
        ),
        "setup_seconds": setup,
        "attack_seconds": seconds,
        "over_prefill": seconds / prefill,
        "evaluated_per_token": sum(result.evaluated_tokens for result in results) / total,
        "peak_mb": lab.peak_mb(),
    }


def released(
    model: TruncatedModel, channel: Sequence[str], tokens: Sequence[Sequence[int]]
) -> list[tuple[Observation, GroundTruth]]:
    """Release prompts through a channel, each with its own draws."""
    pipe = Channel.parse(list(channel))
    return [pipe.release(model, prompt, generator(SEED, "release", i)) for i, prompt in enumerate(tokens)]


def model_at(lab: Lab, layer: int) -> TruncatedModel:
    """Load the available model up to a layer, or reuse the one that was loaded last.

    Raises:
        InputError: the built-in model is not here.
    """
    if lab.setting.model is None:
        raise InputError("the built-in model is not here; see docs/how-to/gpu.md for how it is packed")
    name, depth = lab.setting.model, depth_of(lab, layer)
    return lab.keep("slice", depth, lambda: load_model(name, depth, device=str(lab.device)))


def depth_of(lab: Lab, layer: int) -> int:
    """Return the layer to attack; a rehearsal's tiny model has four."""
    return lab.sized(layer, 2)


def _need_bitsandbytes() -> None:
    try:
        import bitsandbytes  # noqa: F401
    except ImportError as error:
        raise InputError(f"bitsandbytes is not here: {error}") from None
