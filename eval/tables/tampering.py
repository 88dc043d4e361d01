"""Measure how often TOPLOC proofs reveal changed prompt tokens, for each rule of choosing values.

A provider computes one prompt, and claims another in which some tokens are replaced. Its proofs, of prompt and answer,
are those of what it computed. The verifier recomputes what is claimed.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from hiddenlab.defenses.verification import toploc
from hiddenlab.defenses.verification.causal_lm import WholeModel, load_whole
from hiddenlab.defenses.verification.provider import Provider, Request, Variant
from hiddenlab.defenses.verification.rules import EVERY, RULES, rule_of
from hiddenlab.defenses.verification.sampling import Sampling
from hiddenlab.defenses.verification.transcript import Transcript
from hiddenlab.errors import InputError
from hiddenlab.eval.cells import Cell, Experiment, Figures, Setting
from hiddenlab.eval.measures.attack import as_figures
from hiddenlab.eval.measures.intervals import mean, share
from hiddenlab.eval.tables.verification import HONEST, base
from hiddenlab.prompts import load_prompts
from hiddenlab.types import Progress, silent
from hiddenlab.utils.random import generator

PLACES = ("head", "middle", "tail", "spread")
SHARES = (0.01, 0.05, 0.1, 0.3)  # the whole prompt, which has no place, is added
LEAST, MOST = 100, 400  # tokens of a prompt
HONEST_PROMPTS, PROMPTS = 50, 20
OTHER_MODELS = ("nf4", "int8")


def tampering(setting: Setting, rules: str = ",".join(RULES), honest: int = HONEST_PROMPTS) -> Experiment:
    """Measure how often TOPLOC proofs reveal changed prompt tokens, by share, place and rule, and false alarms.

    Args:
        rules: of choosing values, joined by commas.
        honest: prompts of each honest provider, different for each; ``--limit`` is of all other rows.
    """
    names = [rule_of(name.strip()).name for name in rules.split(",")]
    most = setting.max_tokens or MOST
    common = {
        **base(setting, new_tokens=EVERY, turns=1),
        "limit": setting.limit or PROMPTS, "least": min(LEAST, most), "most": most, "rules": names,
        "variant": HONEST[0], "share": 0.0, "place": PLACES[0], "first": 0,
    }  # fmt: skip
    del common["max_tokens"]

    def cell(keys: tuple[str, str], **more: Any) -> Cell:
        return Cell("tampering", {**common, **more}, dict(zip(("changed", "where"), keys, strict=True)))

    cells = [
        cell((f"{100 * part:.0f} % of the prompt", place), share=part, place=place)
        for part in SHARES
        for place in PLACES
    ]
    cells.append(cell(("100 % of the prompt", "everywhere"), share=1.0))
    cells += [cell(("model", variant), variant=variant) for variant in OTHER_MODELS]
    cells += [
        cell(("nothing (honest)", variant), variant=variant, limit=honest, first=i * honest)
        for i, variant in enumerate(HONEST)
    ]
    labels = {"rejected": "rejected", "covered": "tokens covered", "bytes": "bytes a prompt token"}
    return Experiment(
        "TOPLOC: changed prompt tokens that proofs notice, by the rule of choosing values",
        cells,
        {f"{name},{rule}": f"{label}, {rule}" for name, label in labels.items() for rule in names},
        [
            "Rules: paper is the published one: the 128 largest values of the whole prompt, and of each 32 tokens of "
            "the answer. largest: those of each 32 tokens of the prompt too. rows: 4 values of every token, which are "
            "the largest in units of their column's scale, and a token is at fault if less than a quarter of its "
            "values agree. The rest has published limits: 38 of 128 exponents, mantissas by 10 on average, by 8 in the "
            "median.",
            f"Prompts of {common['least']} to {most} tokens, made of texts of the source in a random order. Changed "
            f"tokens are those of another such prompt at the same places. The answer has {EVERY} tokens, and its proof "
            "counts too: a request is rejected if any of its proofs is.",
            "Honest: share of false alarms; the verifier computes in bfloat16, one prompt at a time. nf4, int8: a "
            "provider with a quantized model; it takes the columns' scale from the full model.",
            "Tokens covered: those with a value of their own that was compared and agrees, of the prompt.",
        ],
    )  # fmt: skip


@dataclass(frozen=True)
class _Sent:
    """A provider's answers to some prompts, and its proofs by rule."""

    answers: list[Transcript]
    proofs: dict[str, list[list[toploc.Proof]]]


def measure(spec: dict[str, Any], folder: Path, progress: Progress = silent) -> Figures:
    """Measure the share of requests whose proofs are rejected, by rule.

    Where no token is changed, measure what the proofs cover and their bytes too.

    Args:
        spec: model, prompts, first and limit (of the long prompts), least, most, new_tokens, sampling, variant, seed,
            device, dtype; share of tokens to change, place, rules.
    """
    made = {name: spec[name] for name in spec if name not in ("share", "place")}
    sent = _sent(json.dumps(made, sort_keys=True), progress)
    whole = _whole(spec["model"], spec["dtype"], spec["device"])
    rejected: dict[str, list[bool]] = {name: [] for name in spec["rules"]}
    covered: dict[str, list[float]] = {name: [] for name in spec["rules"]}
    size: dict[str, list[float]] = {name: [] for name in spec["rules"]}
    truths = [transcript.prompt for transcript in sent.answers]
    for i, answer in enumerate(sent.answers):
        draws = generator(spec["seed"], "changed", i)
        claimed = changed(
            truths[i], truths[(i + 1) % len(truths)], spec["share"], spec["place"], whole.vocabulary, draws
        )
        states = whole.prefill((*claimed, *answer.output), 0)[0].cpu()
        prompt, output = states[: len(claimed)], states[len(claimed) - 1 : -1]
        for name in spec["rules"]:
            proofs, rule = sent.proofs[name][i], RULES[name]
            verdict = toploc.verify_all(prompt, output, proofs, rule=rule, scale=whole.scale)
            rejected[name].append(not verdict.accepted)
            covered[name].append(len(verdict.prompt) / len(claimed))
            parts = len(rule.chunks(prompt, output[:0]))
            size[name].append(parts * toploc.proof_bytes() / len(claimed))
        progress("requests checked", i + 1, len(sent.answers))
    figures = {f"rejected,{name}": share(values) for name, values in rejected.items()}
    if not spec["share"] and spec["variant"] in HONEST:
        figures |= {f"covered,{name}": mean(values) for name, values in covered.items()}
        figures |= {f"bytes,{name}": mean(values) for name, values in size.items()}
    return as_figures(figures)


def changed(
    tokens: Sequence[int], others: Sequence[int], part: float, place: str, vocabulary: int, draws: torch.Generator
) -> tuple[int, ...]:  # fmt: skip
    """Replace a share of tokens by those of another prompt at the same places; an equal one becomes the next token id.

    Args:
        tokens: the prompt.
        others: the other prompt, repeated where it is shorter.
        part: share, at least one token unless it is 0.
        place: ``head``, ``middle``, ``tail`` (in a row) or ``spread`` (drawn at random).
        vocabulary: number of tokens.
        draws: generator for ``spread``.

    Raises:
        InputError: the place is unknown, or the share is outside of 0 to 1.
    """
    if place not in PLACES or not 0 <= part <= 1:
        raise InputError(
            f"{part} of the tokens at {place!r}: a share from 0 to 1, one of {', '.join(PLACES)}"
        )
    total = len(tokens)
    count = max(1, round(part * total)) if part else 0
    start = {"head": 0, "middle": (total - count) // 2, "tail": total - count}.get(place)
    places = (
        torch.randperm(total, generator=draws)[:count].tolist()
        if start is None
        else range(start, start + count)
    )
    result = list(tokens)
    for at in places:
        other = others[at % len(others)]
        result[at] = other if other != result[at] else (other + 1) % vocabulary
    return tuple(result)


def prompts_of(spec: dict[str, Any], tokenizer: Any) -> list[tuple[int, ...]]:
    """Make prompts of ``least`` to ``most`` tokens: join texts of the source in a random order, then cut them."""
    texts = [prompt.text for prompt in load_prompts(spec["prompts"])]
    prompts = []
    for i in range(spec["first"], spec["first"] + spec["limit"]):
        draws = generator(spec["seed"], "long prompt", i)
        length = int(torch.randint(spec["least"], spec["most"] + 1, (), generator=draws))
        text, tokens = "", list[int]()
        while len(tokens) < length:
            text += texts[int(torch.randint(len(texts), (), generator=draws))] + "\n\n"
            tokens = tokenizer(text)["input_ids"]
        prompts.append(tuple(tokens[:length]))
    return prompts


@lru_cache(maxsize=1)
def _sent(key: str, progress: Progress) -> _Sent:
    """Return a provider's answers and proofs; consecutive cells of one process share them."""
    spec = json.loads(key)
    variant = Variant.parse(spec["variant"])
    provider = Provider(
        spec["model"], variant, new_tokens=spec["new_tokens"], dtype=spec["dtype"], device=spec["device"]
    )
    if provider.whole.tokenizer is None:
        raise InputError(f"{spec['model']} has no tokenizer to read prompts with")
    asked = Sampling(**spec["sampling"])
    requests = [
        Request(f"t{i}", tokens, replace(asked, seed=i))
        for i, tokens in enumerate(prompts_of(spec, provider.whole.tokenizer))
    ]
    # A provider with a cheaper model can compute the full model's scale once, as it is the same for all requests.
    honest = spec["variant"] in HONEST
    own = provider.whole if honest else _whole(spec["model"], spec["dtype"], spec["device"])
    sent = _Sent([], {name: [] for name in spec["rules"]})
    for answer in provider.answer(requests, progress):
        sent.answers.append(answer.transcript)
        for name, proofs in sent.proofs.items():
            states = answer.prompt_states, answer.output_states
            proofs.append(toploc.commit_all(*states, rule=RULES[name], scale=own.scale))
    return sent


@lru_cache(maxsize=1)
def _whole(model: str, dtype: str, device: str) -> WholeModel:
    """Load the verifier's model."""
    return load_whole(model, dtype=dtype, device=device)
