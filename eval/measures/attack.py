"""Measure attacks, defenses' effect on the model, row order and benches; return figures with intervals over prompts."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from hiddenlab import registry
from hiddenlab.channels import Channel
from hiddenlab.config import AttackConfig
from hiddenlab.errors import NotApplicableError
from hiddenlab.eval.cells import RUN, Figures
from hiddenlab.eval.measures.intervals import Estimate, mean, ratio, share
from hiddenlab.matching.distance import choose_matcher
from hiddenlab.models import Request, TruncatedModel, load_model
from hiddenlab.models.rest import load_rest
from hiddenlab.prompts import load_prompts
from hiddenlab.proposals.store import pairwise_order_for
from hiddenlab.records import RECORD, read_run
from hiddenlab.registry import parse_spec
from hiddenlab.runner import run
from hiddenlab.summary import NOT_APPLICABLE, Sample
from hiddenlab.types import Progress, silent
from hiddenlab.utils.random import generator

NEAR, FAR = 4, 16  # positions
# A perplexity of more is given as this, the exponential of it: not far above it are no finite numbers any more.
MOST_NATS = 300.0


def attack(spec: dict[str, Any], folder: Path, progress: Progress = silent) -> Figures:
    """Run an attack (``AttackConfig``) and estimate its figures; an interrupted run resumes where it was.

    Raises:
        NotApplicableError: the attack cannot use what the channel releases.
        HiddenlabError: see ``hiddenlab.runner.run``.
    """
    path = folder / RUN
    if (path / RECORD).is_file() and read_run(path)[0].status == "finished":
        samples = read_run(path)[1]
    else:
        has_record = (path / RECORD).is_file()
        config = AttackConfig.from_json(spec)
        if config.setup is None and parse_spec(config.attack)[0] == "vocab-match":
            config = replace(
                config, setup="full"
            )  # a table shows the attack at its best, whatever came before
        samples = run(
            config, None if has_record else path, resume=path if has_record else None, progress=progress
        ).samples
    return figures_of(samples)


def figures_of(samples: Sequence[Sample]) -> Figures:
    """Estimate figures from the samples of an attack run; prompts to which it does not apply are left out.

    Raises:
        NotApplicableError: it applies to none of them.
    """
    done = [sample for sample in samples if sample["status"] != NOT_APPLICABLE]
    if not done:
        raise NotApplicableError(samples[0]["reason"] if samples else "there are no prompts")
    tokens = [sample["tokens"] for sample in done]
    estimates = {
        "exact": share([sample["exact"] for sample in done]),
        "verified": ratio([sample["verified"] * sample["tokens"] for sample in done], tokens),
        "evaluated_tokens_per_token": ratio([sample["evaluated_tokens"] for sample in done], tokens),
        "forward_calls_per_prompt": mean([sample["forward_calls"] for sample in done]),
        "last_evaluated": mean([sample["per_token"]["evaluated"][-1] for sample in done]),
        "seconds_per_prompt": mean([sample["seconds"] for sample in done]),
    }
    for name in ("token_accuracy", "rouge_l", "bleu"):
        estimates[name] = mean([sample[name] for sample in done])
    if all("bag_of_tokens_recall" in sample for sample in done):  # records of older versions lack it
        estimates["bag_of_tokens_recall"] = mean([sample["bag_of_tokens_recall"] for sample in done])
    for name in ("held", "missing"):  # records of older versions lack the first
        counts, right = (
            [sample.get(key) or 0 for sample in done] for key in (f"{name}_tokens", f"{name}_tokens_right")
        )
        if sum(counts):
            estimates[f"{name}_token_accuracy"] = ratio(right, counts)
    if all(sample["prefill_seconds"] for sample in done):
        seconds, prefills = ([sample[name] for sample in done] for name in ("seconds", "prefill_seconds"))
        estimates["slowdown_vs_prefill"] = ratio(seconds, prefills)
    if all(sample["epsilon"] is not None for sample in done):
        estimates["epsilon"] = mean([sample["epsilon"] for sample in done])
    return as_figures(estimates)


def thresholds(spec: dict[str, Any], folder: Path, progress: Progress = silent) -> Figures:
    """Measure epsilon by the paper's search over its own attack, and as our attack measures it, as L1 distances.

    Args:
        spec: model, layer, defense (a list), texts (on which epsilon is searched), budget, seed, device, dtype.
    """
    model = load_model(spec["model"], spec["layer"], device=spec["device"], dtype=spec["dtype"])
    channel = Channel.parse(spec["defense"])
    info = channel.release(model, model.special_ids[:1] or [0], generator(spec["seed"], "release"))[0].info
    options = {"calibration_texts": spec["texts"], "budget": spec["budget"]}
    printed: Any = registry.build("attacks", "vocab-match:preset=paper", **options)
    own: Any = registry.build("attacks", "vocab-match:proposal=vocab")
    printed.progress = own.progress = progress
    searched, auto = (
        attack.fit(info, model, spec["seed"]).prepare(info)[0].threshold for attack in (printed, own)
    )
    unit = searched.absolute / searched.relative  # L1 norm of the median row
    figures = {"epsilon": searched.absolute, "right": searched.floor * unit, "edge": searched.gap * unit}
    figures |= {"found": searched.found, "beyond": searched.beyond, "auto": auto.relative * unit}
    return {name: exactly(value, spec["texts"]) for name, value in figures.items()}


class _Answers:
    """What a model says of the next tokens of a text that passes a channel."""

    def __init__(self, model: TruncatedModel, seed: int) -> None:
        self.model, self.seed = model, seed
        self.rest = None if model.site.stream == "logits" else load_rest(model, name_of(model.dtype))
        if self.rest is None and model.site.stream != "logits":
            raise NotApplicableError("what a receiver does with these states is not known")

    def behind(self, channel: Channel, prompt: Sequence[int], number: int) -> Float[Tensor, "n v"]:
        """Return the log-probabilities of the token after each token of a prompt."""
        observation, truth = channel.release(self.model, prompt, generator(self.seed, "release", number))
        if self.rest is None:
            if len(observation.states) != len(prompt):
                raise NotApplicableError("some rows are no token's, and say nothing of what comes next")
            return observation.states.float().log_softmax(-1)
        states = channel.received(observation, truth).to(self.model.dtype)
        if states.shape[1] != self.model.width:
            raise NotApplicableError("the released rows are no states, and no receiver goes on from them")
        (answer,) = self.rest.layers.run([Request(self.rest.layers.prefix(), states)], keep=False)
        return self.rest.log_probs(answer.states)


def utility(spec: dict[str, Any], folder: Path, progress: Progress = silent) -> Figures:
    """Measure how a defense degrades the model itself: perplexity, KL from the clean model, top-1 agreement.

    Texts pass the channel at the stream ``logits`` of the whole model, beside a clean pass of the same weights. With a
    ``layer`` they pass it there: the rightful receiver undoes what he can, and the layers behind it, with their full
    weights, compute the rest. Both passes are teacher-forced: the model predicts every token of the text after the
    first.

    Args:
        spec: model, prompts, limit, max_tokens, defense (a list), seed, device, dtype; layer and stream, or neither.

    Raises:
        NotApplicableError: only some rows are released, or the model cannot go on from its states.
    """
    channel = Channel.parse(spec["defense"])
    _check_all_rows(channel)
    model = load_model(
        spec["model"], spec.get("layer"), stream=spec.get("stream", "logits"), device=spec["device"],
        dtype=spec["dtype"],
    )  # fmt: skip
    texts = load_prompts(spec["prompts"], limit=spec["limit"])
    tokens = [model.tokenize(text, spec["max_tokens"]) for text in texts]
    return degradation(model, channel, tokens, spec["seed"], progress)


def name_of(dtype: torch.dtype) -> str:
    """Return a dtype's name, as options write it."""
    return str(dtype).removeprefix("torch.")


def _check_all_rows(channel: Channel) -> None:
    if channel.whole().specs != channel.specs:
        raise NotApplicableError("a channel that shows only some rows leaves the model itself as it is")


def degradation(
    model: TruncatedModel,
    channel: Channel,
    texts: Sequence[Sequence[int]],
    seed: int,
    progress: Progress = silent,
) -> Figures:
    """Measure how a channel degrades what a model says of some texts, see ``utility``.

    Args:
        model: the whole one at the stream ``logits``, or its first layers, behind which the rest goes on.
        texts: token ids; those of one token predict nothing.

    Raises:
        NotApplicableError: the channel shows only some rows, no text has two tokens, or the model cannot go on.
    """
    _check_all_rows(channel)
    said, clean = _Answers(model, seed), Channel.parse([])
    tokens = [prompt for prompt in texts if len(prompt) > 1]
    if not tokens:
        raise NotApplicableError("no prompt has two tokens")
    rows: list[tuple[int, float, float, float, float]] = []
    for i, prompt in enumerate(tokens):
        plain, changed = (said.behind(one, prompt, i)[:-1] for one in (clean, channel))
        following = torch.tensor(prompt[1:], device=plain.device)[:, None]
        rows.append(
            (
                len(following),
                -float(plain.gather(1, following).sum()),
                -float(changed.gather(1, following).sum()),
                float((plain.exp() * (plain - changed)).sum()),
                float((plain.argmax(1) == changed.argmax(1)).sum()),
            )
        )
        progress("measuring the model's own quality", i + 1, len(tokens))
    counts, before, after, divergence, agreed = (list(column) for column in zip(*rows, strict=True))
    return as_figures(
        {
            "perplexity": _exp(ratio(after, counts)),
            "clean_perplexity": _exp(ratio(before, counts)),
            "kl": ratio(divergence, counts),
            "top1_agreement": ratio(agreed, counts),
        }
    )


def order(spec: dict[str, Any], folder: Path, progress: Progress = silent) -> Figures:
    """Measure how well the order of shuffled rows is recovered from pairs of rows alone.

    No token and no language model is used. For every two rows of a prompt it is predicted which stood first
    (``hiddenlab.proposals.pairwise_order``). Pairs up to ``NEAR`` positions apart and those more than ``FAR`` apart are
    also counted separately. Then rows are sorted by the sum of their log-odds, and the error in positions is measured.

    Args:
        spec: model, prompts, limit, max_tokens, layer, defense (a list that shuffles rows), seed, device, dtype.

    Raises:
        NotApplicableError: rows are in order, or some are not shown; no prompt has two tokens, or there are no texts
            long enough to learn from.
    """
    model = load_model(spec["model"], spec["layer"], device=spec["device"], dtype=spec["dtype"])
    channel = Channel.parse(spec["defense"])
    texts = load_prompts(spec["prompts"], limit=spec["limit"])
    prompts = [tokens for text in texts if len(tokens := model.tokenize(text, spec["max_tokens"])) > 1]
    counts: dict[str, list[tuple[float, float]]] = {"pairs": [], "near_pairs": [], "far_pairs": []}
    off, pairwise_order = list[float](), None
    if not prompts:
        raise NotApplicableError("no prompt has two tokens")
    for i, tokens in enumerate(prompts):
        observation, truth = channel.release(model, tokens, generator(spec["seed"], "release", i))
        if truth.row_order is None or len(truth.row_order) != len(tokens):
            raise NotApplicableError("only rows that are all shown, out of order, have an order to tell")
        if pairwise_order is None:
            pairwise_order, _ = pairwise_order_for(model, observation.info, progress)
        if pairwise_order is None:
            raise NotApplicableError("there are no texts long enough to learn an order from")
        rows = choose_matcher("auto", observation.info).prepare(observation.states.to(model.device))
        odds = pairwise_order(rows).cpu()
        places = torch.tensor(truth.row_order)
        first, second = torch.triu_indices(len(places), len(places), 1)
        apart = places[second] - places[first]
        right, apart = odds[first, second] * apart > 0, apart.abs()
        for name, mask in (("pairs", apart > 0), ("near_pairs", apart <= NEAR), ("far_pairs", apart > FAR)):
            if bool(mask.any()):
                counts[name].append((float(right[mask].sum()), float(mask.sum())))
        ranks = odds.sum(1).argsort(descending=True).argsort()
        off.append(float((ranks - places).abs().float().mean()))
        progress("comparing rows", i + 1, len(prompts))
    shares = {
        name: ratio([hits for hits, _ in outcomes], [pairs for _, pairs in outcomes])
        for name, outcomes in counts.items()
        if outcomes
    }
    return as_figures({**shares, "places_off": mean(off)})


def embedding(spec: dict[str, Any], folder: Path, progress: Progress = silent) -> Figures:
    """Measure the standard deviation of all coordinates of the vocabulary's input embeddings.

    It is the unit for the strength of noise on embeddings. It has no interval, since it covers the whole vocabulary.

    Args:
        spec: ``model``.
    """
    deviation, tokens = _deviation(spec["model"])
    return as_figures({"embedding_deviation": Estimate(deviation, deviation, deviation, tokens)})


def embedding_deviation(model: str) -> float:
    """Return the standard deviation of input embeddings, for noise of a strength relative to it.

    Raises:
        HiddenlabError: see ``load_model``.
    """
    return _deviation(model)[0]


def _deviation(model: str) -> tuple[float, int]:
    truncated = load_model(model, 0, stream="embed", device="cpu")
    table = truncated.embed(torch.arange(truncated.vocab_size))
    return float(table.float().std(correction=0)), len(table)


def bench(spec: dict[str, Any], folder: Path, progress: Progress = silent) -> Figures:
    """Run one setting of a bench (``hiddenlab bench``), which repeats it in its own process; return its row's figures.

    Args:
        spec: ``bench`` names it, ``options`` are its arguments.
    """
    result = registry.resolve("benches", spec["bench"])(**spec["options"], progress=progress)
    row = result["rows"][0]
    repeats = result.get("repeats", 1)
    figures = {
        name: {"value": float(value), "low": float(value), "high": float(value), "n": repeats}
        for name, value in row.items()
        if isinstance(value, int | float)
    }
    if {"seconds", "seconds_low", "seconds_high"} <= set(row):
        figures["seconds"] |= {"low": row["seconds_low"], "high": row["seconds_high"]}
    return figures


def as_figures(estimates: dict[str, Estimate]) -> Figures:
    """Convert estimates to plain data."""
    return {name: dict(estimate._asdict()) for name, estimate in estimates.items()}


def exactly(value: float, n: int) -> dict[str, float]:
    """Return a figure that is counted, not estimated, with an interval of zero width."""
    return {"value": value, "low": value, "high": value, "n": n}


def _exp(estimate: Estimate) -> Estimate:
    value, low, high = torch.tensor(estimate[:3], dtype=torch.float64).clamp(max=MOST_NATS).exp().tolist()
    return Estimate(value, low, high, estimate.n)
