"""Measure which tokens of other nodes a CompNode reads from partial attention at the first layer."""

from pathlib import Path
from typing import Any

import torch

from hiddenlab.attacks.partial_sums import PartialSums
from hiddenlab.channels import Channel
from hiddenlab.defenses.cascade.nodes import attention_pass
from hiddenlab.errors import InputError
from hiddenlab.eval.cells import Figures
from hiddenlab.eval.measures.attack import as_figures
from hiddenlab.eval.measures.intervals import mean, ratio, share
from hiddenlab.eval.measures.metrics import score_text
from hiddenlab.models import TruncatedModel, load_model
from hiddenlab.prompts import load_prompts
from hiddenlab.sharding import Plan
from hiddenlab.types import Observation, ObservationInfo, Progress, Site, silent
from hiddenlab.utils.random import generator

STREAMS = ("q", "k", "v")


def node_streams(model: str, first: int, device: str) -> dict[str, TruncatedModel]:
    """Load the streams that ``node_view`` needs.

    Args:
        first: how many layers the client computes before the nodes.
    """
    streams = {name: load_model(model, first + 1, stream=name, device=device) for name in STREAMS}
    return streams | {"own": load_model(model, first, stream="resid" if first else "embed", device=device)}


def node_view(
    streams: dict[str, TruncatedModel],
    tokens: list[int],
    plan: Plan,
    node: int,
    masked: bool = False,
    noise: float = 0.0,
    seed: int = 0,
) -> Observation:
    """Compute what a CompNode holds and receives in the first layer that nodes compute, as an observation.

    The rows are those of ``node_views.joined_answers``. They are computed with the AttnNodes' own function on the
    model's queries, keys and values, so that no cluster is started for each prompt.

    Args:
        streams: truncated models of ``q``, ``k``, ``v`` at that layer, and of the states that enter it (``own``).
        tokens: of the prompt.
        plan: of the prompt.
        node: index of the CompNode.
        masked: whether masked sums leave it the attention output alone.
        noise: standard deviation at the client's embeddings. seed: of the noise.
    """
    held = list(plan.shards[node])
    channel = Channel.parse([f"gaussian:sigma={noise}"] if noise else [])
    # Each stream gets the same noise.
    q, k, v, enters = (
        channel.release(streams[name], tokens, generator(seed, "release", 0))[0].states
        for name in (*STREAMS, "own")
    )
    attention = streams["k"].attention
    assert attention is not None
    heads = int(streams["q"].module.config.num_attention_heads)  # type: ignore[union-attr,arg-type]
    width = q.shape[1] // heads
    q, k, v = (rows.unflatten(1, (-1, width)).transpose(0, 1) for rows in (q, k, v))
    columns = [enters[held]]
    facts: dict[str, Any] = {"heads": heads, "own": columns[0].shape[1]}
    splits = [list(split) for split in plan.splits]
    for keys in [list(range(len(tokens)))] if masked else splits:
        part = attention_pass(q[:, held], k[:, keys], v[:, keys], attention.visible(held, keys), attention)
        assert part.total is not None
        statistics = [] if masked else [part.maximum.T, part.total.T]
        columns += [*statistics, part.output.transpose(0, 1).flatten(1)]
    lowest = torch.finfo(columns[0].dtype).min  # rows that see no key
    own = streams["own"]
    info = ObservationInfo(
        own.ref.name, own.signature, Site(streams["k"].site.layer, "attn"), positions=tuple(held),
        facts=facts if masked else {**facts, "shards": splits},
    )  # fmt: skip
    return Observation(torch.cat(columns, 1).clamp(min=lowest), channel.published(info))


def partial_sums(spec: dict[str, Any], folder: Path, progress: Progress = silent) -> Figures:
    """Run the attack ``partial-sums`` on one CompNode of a plan, prompt by prompt.

    Figures have the same names as those of every other attack. ``missing_…`` are of the tokens before the node's last
    row that it does not hold: ``missing_exact`` is the share of prompts in which all of them are right, and the others
    are shares of these tokens. ``exact``, ``verified`` and the text scores are of the whole prompt, in which tokens
    after the node's last row count as wrong.

    Prompts shorter than ``max_tokens`` are left out.

    Args:
        spec: model, prompts, limit, max_tokens, alpha, c, m, node, seed, device; masked, where sums are masked; first,
            how many layers the client computes before, where he computes some; noise, the standard deviation at his
            embeddings, where he adds some.

    Raises:
        InputError: no prompt is long enough, or the node misses no token before its last row.
    """
    model, length, device = spec["model"], spec["max_tokens"], spec["device"]
    first = spec.get("first", 0)
    streams = node_streams(model, first, device)
    truncated = load_model(model, first + 1, stream="attn", device=device)
    attack = PartialSums()
    prompts = [truncated.tokenize(p, length) for p in load_prompts(spec["prompts"])]
    prompts = [tokens for tokens in prompts if len(tokens) == length][: spec["limit"]]
    plan = Plan.clustered(length, spec["c"], alpha=spec["alpha"], m=spec["m"])
    held = plan.shards[spec["node"]]
    missing = [p for p in range(max(held, default=0)) if p not in held]
    if not prompts or not missing:
        raise InputError(f"no prompt of {length} tokens gives CompNode {spec['node']} anything to find")
    rows = []
    for i, tokens in enumerate(prompts):
        observation = node_view(
            streams,
            tokens,
            plan,
            spec["node"],
            spec.get("masked", False),
            spec.get("noise", 0.0),
            spec["seed"] + i,
        )
        result = attack.fit(observation.info, truncated, spec["seed"]).recover(observation)
        places = result.positions or range(len(result.tokens))
        right = {
            p: (token.token == tokens[p], token.verified)
            for p, token in zip(places, result.tokens, strict=True)
        }
        hits = [right.get(p, (False, False)) for p in missing]
        recovered = dict(zip(places, result.ids, strict=True))
        score = score_text(
            truth_ids=tokens, recovered_ids=[recovered.get(p, -1) for p in range(max(recovered) + 1)],
            truth_text=truncated.text(tokens), recovered_text=truncated.text(result.ids),
        )  # fmt: skip
        rows.append(
            (
                score["exact"],
                score["token_accuracy"],
                score["rouge_l"],
                score["bleu"],
                sum(token.verified for token in result.tokens),
                sum(hit for hit, _ in hits),
                sum(sure for _, sure in hits),
                sum(sure and not hit for hit, sure in hits),
                sum(right.get(p, (False, False))[0] for p in held),
                result.seconds,
            )
        )
        progress("prompts", i + 1, len(prompts))
    columns = [[float(x) for x in column] for column in zip(*rows, strict=True)]
    exact, accuracy, rouge_l, bleu, verified, hits_, sure, wrong, own, seconds = columns
    total = [float(len(missing))] * len(rows)
    return as_figures(
        {
            "exact": share([value == 1 for value in exact]),
            "token_accuracy": mean(accuracy),
            "rouge_l": mean(rouge_l),
            "bleu": mean(bleu),
            "verified": ratio(verified, [float(length)] * len(rows)),
            "held_token_accuracy": ratio(own, [float(len(held))] * len(rows)),
            "missing_exact": share([hit == len(missing) for hit in hits_]),
            "missing_token_accuracy": ratio(hits_, total),
            "missing_verified": ratio(sure, total),
            "missing_wrong_verified": ratio(wrong, total),
            "missing": mean(total),
            "seconds_per_prompt": mean(seconds),
        }
    )
