"""Measure what nodes of a hardened Cascade read of a prompt: own tokens, and others' beyond a control."""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from hiddenlab.attacks.shard_reading import ShardReading
from hiddenlab.channels import Channel
from hiddenlab.errors import InputError, NotApplicableError
from hiddenlab.eval.cells import Figures
from hiddenlab.eval.measures.attack import as_figures
from hiddenlab.eval.measures.intervals import mean, ratio
from hiddenlab.models import TruncatedModel, load_model
from hiddenlab.models.load import load_config, resolve_model
from hiddenlab.prompts import load_prompts
from hiddenlab.scoring import tokens_by_row
from hiddenlab.sharding import Plan, Positions
from hiddenlab.types import AttackResult, GroundTruth, Observation, Progress, silent
from hiddenlab.utils.random import generator


def node_reading(spec: dict[str, Any], folder: Path, progress: Progress = silent) -> Figures:
    """Attack what CompNodes hold between layers of the client (``shard-reading``), beside a control.

    The control is the same attack on the embeddings of the same positions, where no row is asked about other tokens:
    what a language model guesses from the tokens that the nodes are meant to hold.

    Args:
        spec: model, prompts, limit, max_tokens, seed, device, dtype; alpha, c; nodes, whose rows are joined; first,
            last (layers of the client; where last is 0, rows behind the nodes' last layer are not looked at); noise
            (standard deviation at the client's embeddings, 0 for none).

    Returns:
        ``held_token_accuracy``, ``missing_token_accuracy`` and ``control_token_accuracy`` (others' tokens before the
            last row), ``beyond_control`` ((attack - control) / (1 - control)) and ``seconds_per_prompt``.

    Raises:
        InputError: no layer remains for the nodes. NotApplicableError: they hold nothing of any prompt.
    """
    layers = int(load_config(resolve_model(spec["model"])).num_hidden_layers)
    end = layers - spec["last"]
    if spec["first"] >= end:
        raise InputError(
            f"the model has {layers} layers; {spec['first']} first and {spec['last']} last leave none"
        )
    model = _model(spec, spec["first"])
    prompts, held = _prompts(model, spec)
    noise = [f"gaussian:sigma={spec['noise']}"] if spec["noise"] else []
    shown = _released(model, prompts, held, noise, spec["seed"])
    attack = ShardReading()
    attack.progress = progress
    attack.fit(shown[0].info, model, spec["seed"])
    if spec["last"]:
        late = _released(_model(spec, end), prompts, held, noise, spec["seed"])
        found = attack.recover_ends(shown, late)
    else:
        found = attack.recover_batch(shown)
    names = ("model", "prompts", "limit", "max_tokens", "seed", "device", "dtype", "alpha", "c", "nodes")
    guessed = _guessed(json.dumps({name: spec[name] for name in names}))
    return _figures(prompts, held, found, guessed)


@lru_cache(maxsize=16)
def _guessed(key: str) -> list[AttackResult]:
    """Return what the control reads, which is the same whatever the client's layers are.

    Args:
        key: what it depends on of the spec, as JSON.
    """
    spec = json.loads(key)
    model = _model(spec, 0)
    prompts, held = _prompts(model, spec)
    shown = _released(model, prompts, held, [], spec["seed"])
    control: Any = ShardReading(reach=0).fit(shown[0].info, model, spec["seed"])
    return control.recover_batch(shown)  # type: ignore[no-any-return]


def _prompts(model: TruncatedModel, spec: dict[str, Any]) -> tuple[list[list[int]], list[Positions]]:
    """Return the prompts of which the nodes hold something, and the positions that they hold.

    Raises:
        NotApplicableError: there is none.
    """
    texts = load_prompts(spec["prompts"], limit=spec["limit"])
    prompts = [model.tokenize(text, spec["max_tokens"]) for text in texts]
    plans = [Plan.clustered(len(tokens), spec["c"], alpha=spec["alpha"]) for tokens in prompts]
    held = [tuple(sorted(p for node in spec["nodes"] for p in plan.shards[node])) for plan in plans]
    chosen = [i for i, places in enumerate(held) if places]
    if not chosen:
        raise NotApplicableError("the nodes hold no token of any prompt")
    return [prompts[i] for i in chosen], [held[i] for i in chosen]


def _model(spec: dict[str, Any], layer: int) -> TruncatedModel:
    where = {"device": spec["device"], "dtype": spec["dtype"]}
    return load_model(spec["model"], layer, stream="resid" if layer else "embed", **where)


def _released(
    model: TruncatedModel,
    prompts: Sequence[list[int]],
    held: Sequence[Positions],
    noise: list[str],
    seed: int,
) -> list[Observation]:
    """Return the rows at some positions of each prompt; noise is the same at every layer of one prompt."""
    channel, result = Channel.parse(noise), list[Observation]()
    for i, (tokens, places) in enumerate(zip(prompts, held, strict=True)):
        whole = channel.release(model, tokens, generator(seed, "release", i))[0]
        info = replace(whole.info, positions=places)
        result.append(Observation(whole.states[list(places)], info))
    return result


def _figures(
    prompts: Sequence[list[int]],
    held: Sequence[Positions],
    found: Sequence[AttackResult],
    guessed: Sequence[AttackResult],
) -> Figures:
    """Count tokens that are right; intervals are over prompts, each with its own control."""
    counts, control = (
        [
            tokens_by_row(result, GroundTruth(tuple(tokens)), places)
            for result, tokens, places in zip(results, prompts, held, strict=True)
        ]
        for results in (found, guessed)
    )
    own, own_right = ([one[f"held_tokens{end}"] for one in counts] for end in ("", "_right"))
    others, right = ([one[f"missing_tokens{end}"] for one in counts] for end in ("", "_right"))
    by_guess = [one["missing_tokens_right"] for one in control]
    figures = {"held_token_accuracy": ratio(own_right, own)}
    if sum(others):
        figures["missing_token_accuracy"] = ratio(right, others)
        figures["control_token_accuracy"] = ratio(by_guess, others)
        if sum(others) > sum(by_guess):
            more = [a - b for a, b in zip(right, by_guess, strict=True)]
            unknown = [a - b for a, b in zip(others, by_guess, strict=True)]
            figures["beyond_control"] = ratio(more, unknown)
    return as_figures(figures | {"seconds_per_prompt": mean([one.seconds for one in found])})
