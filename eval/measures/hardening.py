"""Measure what nodes of a hardened Cascade read of a prompt, own tokens and others', and what hardening costs."""

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch

from hiddenlab.attacks.shard_reading import Rows, ShardReading
from hiddenlab.channels import Channel
from hiddenlab.defenses.cascade.backend import Cascade
from hiddenlab.defenses.cascade.command import Backend
from hiddenlab.defenses.cascade.cost import Shape
from hiddenlab.defenses.cascade.load import load_cascade_model
from hiddenlab.defenses.cascade.planning import make_plan, plan
from hiddenlab.errors import InputError, NotApplicableError
from hiddenlab.eval.cells import Figures
from hiddenlab.eval.measures.attack import as_figures, exactly
from hiddenlab.eval.measures.intervals import mean, ratio
from hiddenlab.models import TruncatedModel, load_model
from hiddenlab.models.checkpoint import decoder_layers
from hiddenlab.models.load import load_config, load_tokenizer, parse_dtype, resolve_model
from hiddenlab.models.tokens import token_ids
from hiddenlab.prompts import load_prompts
from hiddenlab.scoring import tokens_by_row
from hiddenlab.sharding import Plan, Positions
from hiddenlab.types import AttackResult, GroundTruth, Observation, Progress, Site, silent
from hiddenlab.utils.clock import timed
from hiddenlab.utils.random import generator

ATTENTION = ("attn", "attn-pair")  # what AttnNodes see
SEES = ("ends", "layers", *ATTENTION)
# What the control depends on.
CONTROLLED = ("model", "prompts", "limit", "max_tokens", "seed", "device", "dtype", "alpha", "c", "nodes")


def node_reading(spec: dict[str, Any], folder: Path, progress: Progress = silent) -> Figures:
    """Attack what nodes hold between layers of the client (``shard-reading``), beside a control.

    The control is the same attack on the embeddings of the same positions, where no row is asked about other tokens:
    what a language model guesses from the tokens that the nodes are meant to hold.

    Args:
        spec: model, prompts, limit, max_tokens, seed, device, dtype; alpha, c; nodes, CompNodes whose rows are joined;
            first, last (layers of the client; where last is 0, late rows are not looked at); noise (standard deviation
            at the client's embeddings, 0 for none); sees, where it is not ``ends`` (see ``_parts``), and joined, how
            many layers ``layers`` puts side by side.

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
    prompts, held = _prompts(_model(spec, Site(spec["first"])), spec)
    views: list[list[Rows]] = [[] for _ in prompts]
    noise = [f"gaussian:sigma={spec['noise']}"] if spec["noise"] else []
    for part in _parts(spec, end):
        places = [_held(spec, tokens, part.nodes) for tokens in prompts]
        read, late = (
            [_released(_model(spec, site), prompts, places, noise, spec["seed"]) for site in sites]
            for sites in (part.read, part.late)
        )
        for i in read[0]:
            views[i].append(Rows(tuple(rows[i] for rows in read), tuple(rows[i] for rows in late)))
    info = next(rows.read[0].info for view in views for rows in view)
    attack = ShardReading()
    attack.progress = progress
    attack.fit(info, _model(spec, info.site), spec["seed"])
    guessed = _guessed(json.dumps({name: spec[name] for name in CONTROLLED}))
    return _figures(prompts, held, attack.recover_views(views), guessed)


@dataclass(frozen=True)
class _Part:
    """Rows that nodes hold at the same positions.

    Attributes:
        nodes: CompNodes whose positions they are. read: sites from which tokens are read. late: from which the next
            ones are.
    """

    nodes: tuple[int, ...]
    read: tuple[Site, ...]
    late: tuple[Site, ...]


def _parts(spec: dict[str, Any], end: int) -> list[_Part]:
    """Return what nodes see of a prompt.

    ``ends`` are rows of CompNodes before their first layer and behind their last one; ``layers`` these and others
    between, all side by side. ``attn`` is what AttnNodes (j, j) get of their CompNode j at the first and the last
    layer, and ``attn-pair`` what AttnNode (i, j) gets: queries of the first of the nodes, keys and values of the last.

    Args:
        end: how many layers there are before the client's last ones.
    """
    nodes, first, sees = tuple(spec["nodes"]), spec["first"], spec.get("sees", "ends")
    if sees in ATTENTION:
        pairs = [(nodes, "qkv")] if sees == "attn" else [(nodes[:1], "q"), (nodes[-1:], "kv")]
        ends = [(own, Site(first + 1, stream), Site(end, stream)) for own, stream in pairs]
        return [_Part(own, (early,), (late,) if spec["last"] else ()) for own, early, late in ends]
    count = min(spec["joined"], end - first + 1) if sees == "layers" else 2
    between = [Site(first + round(i * (end - first) / (count - 1))) for i in range(count)]
    every = tuple(between) if sees == "layers" else (between[0],)
    return [_Part(nodes, every, (every if sees == "layers" else (between[-1],)) if spec["last"] else ())]


def hardened_cost(spec: dict[str, Any], folder: Path, progress: Progress = silent) -> Figures:
    """Run hardened plans over TCP and the plain model in turn, in one loop, and compare time and outputs.

    Args:
        spec: model, prompts, max_tokens, dtype; alpha, c, hardenings (None for a plan as it is), repeats.

    Returns:
        For each hardening, named by its place as in ``over_plain 0``: ``over_plain`` (time over the plain model's, with
            an interval over passes), ``megabytes`` (of a pass, counted), ``rounds_per_layer`` (messages of the nodes'
            layers; on shares, questions), ``client_share`` (of the operations of a pass), ``largest_error`` (of a
            logit) and ``top1_agreement`` (of tokens that follow).

    Raises:
        InputError: see ``Backend.start``.
    """
    plain: Any = load_cascade_model(spec["model"], dtype=parse_dtype(spec["dtype"]), attention="sdpa")
    tokenizer = load_tokenizer(resolve_model(spec["model"]))
    (text,) = load_prompts(spec["prompts"], limit=1)
    tokens = torch.tensor(token_ids(tokenizer, text, spec["model"])[: spec["max_tokens"]])
    figures: Figures = {}
    with ExitStack() as stack, torch.inference_mode():
        expected, runs = plain(input_ids=tokens[None]).logits[0], list[_Run]()
        for harden in spec["hardenings"]:
            backend = Backend(kind="wire", model=spec["model"], dtype=spec["dtype"], harden=harden)
            cascade = stack.enter_context(backend.start(spec["alpha"], 1, False, progress))
            alpha, c = (None, 1) if backend.hardening.shares else (spec["alpha"], spec["c"])
            causal = cascade.facts.causal
            made = make_plan(len(tokens), alpha, c, None, 1, None, False, backend.hardening)
            runs.append(_Run(cascade, partial(cascade.forward, tokens, replace(made, causal=causal))))
            found = runs[-1].call()
            cost = plan(len(tokens), alpha, c, model=spec["model"], harden=harden)["cost"]
            share = cost.get("client_share")
            one = {
                "rounds_per_layer": cost["rounds_per_layer"]
                if share
                else cost["causal"]["messages_per_layer"],
                "client_share": share or _client_share(plain, len(tokens), cost["client_layers"]),
                "largest_error": float((found - expected).abs().max()),
                "top1_agreement": float((found.argmax(1) == expected.argmax(1)).float().mean()),
            }
            figures |= {f"{name} {len(runs) - 1}": exactly(value, 1) for name, value in one.items()}
        before = [_sent(run.cascade) for run in runs]
        for i in range(spec["repeats"]):
            seconds = timed(partial(plain, input_ids=tokens[None]), 0)[1]
            for run in runs:
                run.over_plain.append(timed(run.call, 0)[1] / seconds)
            progress("measuring", i + 1, spec["repeats"])
        for i, (run, earlier) in enumerate(zip(runs, before, strict=True)):
            figures[f"megabytes {i}"] = exactly((_sent(run.cascade) - earlier) / spec["repeats"] / 1e6, 1)
            figures |= as_figures({f"over_plain {i}": mean(run.over_plain)})
    return figures


@dataclass
class _Run:
    """One hardened plan that is timed: its nodes, a pass, and each pass' time over the plain model's."""

    cascade: Cascade
    call: Callable[[], Any]
    over_plain: list[float] = field(default_factory=list)


def _sent(cascade: Cascade) -> float:
    """Return the bytes that all parties have sent so far."""
    return sum(float(counts.get("sent_payload", 0)) for counts in cascade.counters().values())


def _client_share(plain: Any, rows: int, layers: int) -> float:
    """Return the client's share of the operations of a pass: his layers', and the head's where he has layers.

    Counted are matrix products with weights and in attention, as ``cost.shared_cost`` does.
    """
    config = plain.config
    shape = Shape.of(config)
    weights = (
        sum(p.numel() for p in decoder_layers(plain).parameters() if p.ndim == 2) / config.num_hidden_layers
    )
    layer = 2 * rows * weights + 4 * rows**2 * shape.heads * shape.head_dim
    head = 2 * rows * config.vocab_size * config.hidden_size
    whole = config.num_hidden_layers * layer + head
    return (layers * layer + head) / whole if layers else 0.0


@lru_cache(maxsize=16)
def _guessed(key: str) -> list[AttackResult]:
    """Return what the control reads, which is the same whatever the client's layers are.

    Args:
        key: what it depends on of the spec, as JSON.
    """
    spec = json.loads(key)
    model = _model(spec, Site(0, "embed"))
    prompts, held = _prompts(model, spec)
    shown = list(_released(model, prompts, held, [], spec["seed"]).values())
    control: Any = ShardReading(reach=0).fit(shown[0].info, model, spec["seed"])
    return control.recover_batch(shown)  # type: ignore[no-any-return]


def _prompts(model: TruncatedModel, spec: dict[str, Any]) -> tuple[list[list[int]], list[Positions]]:
    """Return the prompts of which the nodes hold something, and the positions that they hold.

    Raises:
        NotApplicableError: there is none.
    """
    texts = load_prompts(spec["prompts"], limit=spec["limit"])
    prompts = [model.tokenize(text, spec["max_tokens"]) for text in texts]
    held = [_held(spec, tokens, spec["nodes"]) for tokens in prompts]
    chosen = [i for i, places in enumerate(held) if places]
    if not chosen:
        raise NotApplicableError("the nodes hold no token of any prompt")
    return [prompts[i] for i in chosen], [held[i] for i in chosen]


def _held(spec: dict[str, Any], tokens: Sequence[int], nodes: Sequence[int]) -> Positions:
    """Return the positions of a prompt that some CompNodes hold."""
    plan = Plan.clustered(len(tokens), spec["c"], alpha=spec["alpha"])
    return tuple(sorted(place for node in nodes for place in plan.shards[node]))


def _model(spec: dict[str, Any], site: Site) -> TruncatedModel:
    where = {"device": spec["device"], "dtype": spec["dtype"]}
    return load_model(spec["model"], site.layer, stream=site.stream, **where)


def _released(
    model: TruncatedModel,
    prompts: Sequence[list[int]],
    held: Sequence[Positions],
    noise: list[str],
    seed: int,
) -> dict[int, Observation]:
    """Return the rows at some positions of each prompt; noise is the same at every layer of one prompt.

    Returns:
        By the place of a prompt, without those that have no such positions: short ones may leave a node nothing.
    """
    channel, result = Channel.parse(noise), dict[int, Observation]()
    for i, (tokens, places) in enumerate(zip(prompts, held, strict=True)):
        if places:
            whole = channel.release(model, tokens, generator(seed, "release", i))[0]
            info = replace(whole.info, positions=places)
            result[i] = Observation(whole.states[list(places)], info)
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
