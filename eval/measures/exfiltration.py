"""Measure adversaries against the warden, and play the exfiltration game with their answers."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import binom
from torch import Tensor

from hiddenlab.defenses.verification import difr, risk
from hiddenlab.defenses.verification import game as game_of
from hiddenlab.defenses.verification.bounds import (
    Risk,
    game_bound,
    hidden_seed_rate,
    hidden_seed_rate_printed,
    searching_rate,
    searching_risk,
    support_rate,
)
from hiddenlab.defenses.verification.causal_lm import WholeModel, load_whole
from hiddenlab.defenses.verification.closed_form import logit_rank
from hiddenlab.defenses.verification.detect import detect
from hiddenlab.defenses.verification.difr import Replay, Verifier
from hiddenlab.defenses.verification.filters import PerplexityFilter, SyntacticFilter
from hiddenlab.defenses.verification.likelihood import gumbel_positions
from hiddenlab.defenses.verification.provider import Request
from hiddenlab.defenses.verification.sampling import HashedNoise
from hiddenlab.defenses.verification.transcript import Transcript
from hiddenlab.errors import InputError
from hiddenlab.eval.cells import Figures
from hiddenlab.eval.measures.adversaries import SAMPLES, Answer, Rule, Tactic, answers, known
from hiddenlab.eval.measures.answers import requests_of
from hiddenlab.eval.measures.attack import as_figures, exactly
from hiddenlab.eval.measures.intervals import Estimate, mean, share
from hiddenlab.eval.measures.warden import (
    FIELDS,
    calibration,
    chosen,
    divided,
    least,
    narrowed,
    of_tokens,
    rules,
    slowdown,
    stored,
)
from hiddenlab.types import Progress, silent

GAME = (
    "messages",
    "inspected",
    "alarms",
    "bits",
    "rounds",
    "watched",
)  # what only the game itself depends on
DANGEROUS, BOTH = "dangerous", "dangerous and suspicious"  # classes of tokens that a warden may watch
ENDS = {
    "learnt": "message learnt", "not_learnt": "message not learnt", "caught": "caught", "spent": "alarms spent",
}  # fmt: skip
PROBES = {"entropy": "honest", "free": "admissible"}  # what an outsider tries his candidates with
SENT = (
    "model", "prompts", "sampling", "seed", "device", "dtype", "count", "prompt_tokens", "length", "adversary",
)  # fmt: skip


# ---- adversaries


@dataclass(frozen=True)
class Judged:
    """An adversary's answers as the warden judges them.

    Attributes:
        rows: counts and bits of each.
        margins: of their tokens.
        found: honest answers that the warden is judged on, see ``calibration``.
        place: of the warden's setting.
        suspicious: upper end of honest tokens' share.
    """

    rows: list[dict[str, Any]]
    margins: list[Tensor]
    found: dict[str, Tensor]
    place: int
    vocabulary: int
    suspicious: float


def _judge(spec: dict[str, Any], home: Path, progress: Progress) -> Judged:
    """Let an adversary answer (or load its answers from disk) and the warden judge."""
    tuned, honest = divided(calibration(spec, home, progress), spec)
    place = least(tuned, spec)
    rule = rules(spec)[place]
    tactic = Tactic.of(spec["adversary"], rule, spec["margin"])
    whole = load_whole(spec["model"], dtype=spec["dtype"], device=spec["device"])
    requests, by = asked(spec, rule, whole, home, progress)
    key = [{name: spec[name] for name in SENT}, None if tactic.rule is None else vars(tactic.rule), *by]
    made = stored(
        home, "adversaries", key, lambda: _packed(answers(whole, tactic, requests, spec["length"], progress))
    )
    suspicious = of_tokens(tuned["sums"][:, place, 1], tuned["tokens"]).high
    fit = PerplexityFilter.fit([-row[: spec["length"]] for row in tuned["cross_entropy"]])
    rows, margins = [], []
    for i, request in enumerate(requests):
        tokens = tuple(made["tokens"][i].tolist())
        # The log holds the seed that the server used.
        sampling = replace(request.sampling, seed=int(made["seed"][i]))
        replay = Verifier(whole).replay(
            Transcript(request.id, spec["model"], request.prompt, tokens, sampling)
        )
        row = judged(replay, rule, spec["seed"] + i, whole.vocabulary, max(spec["cutoffs"]))
        row |= {name: float(made[name][i]) for name in ("sent", "received", "entropy", "natural")}
        row["elsewhere"] = _elsewhere(replay, tactic, request, whole)
        row["flagged"] = _p(row["dangerous"], len(tokens), spec["rate"]) < spec["level"]
        row["flagged_suspicious"] = _p(row["suspicious"], len(tokens), suspicious) < spec["level"]
        text = "" if whole.tokenizer is None else whole.tokenizer.decode(list(tokens))
        row["syntactic"] = SyntacticFilter().verdict(text).flagged
        row["perplexity"] = fit.verdict(-difr.cross_entropy(replay)).flagged
        rows.append(row)
        margins.append(difr.margin(replay))
        progress("answers judged", i + 1, len(requests))
    return Judged(rows, margins, honest, place, whole.vocabulary, suspicious)


def asked(
    spec: dict[str, Any], rule: Rule, whole: WholeModel, home: Path, progress: Progress = silent
) -> tuple[list[Request], list[Any]]:
    """Return the requests that the adversary answers, and what the outsider chose them by: nothing, or one number each.

    An outsider who chooses submits those prompts and seeds, of his candidates, under which a server that follows
    ``PROBES`` has the largest entropy of choices along its answer (step 2 (a) of Experiment 3.2).

    Args:
        spec: count, prompt_tokens, length; if he chooses also choose (a key of ``PROBES``), and candidates (prompts for
            each that he submits).
        rule: of the warden.

    Raises:
        InputError: there are fewer prompts than candidates.
    """
    count = spec["count"] * spec.get("candidates", 1)
    limits = {"limit": count, "max_tokens": spec["prompt_tokens"], "turns": 1, "seed": spec["seed"] + 1}
    requests = requests_of({**spec, **limits})
    if "choose" not in spec:
        return requests, []
    if len(requests) < count:
        raise InputError(
            f"{len(requests)} prompts, where {count} are wanted: take fewer candidates, or more --prompts"
        )
    probe = Tactic.of(PROBES[spec["choose"]], rule)
    names = [name for name in SENT if name != "adversary"] + ["choose", "candidates"]
    key = [{name: spec[name] for name in names}, None if probe.rule is None else vars(probe.rule)]
    found = stored(
        home, "probes", key, lambda: _packed(answers(whole, probe, requests, spec["length"], progress))
    )["entropy"]
    best = found.argsort(descending=True, stable=True)[: spec["count"]].sort().values.tolist()
    return [requests[i] for i in best], [spec["choose"], best]


def exfiltration(spec: dict[str, Any], folder: Path, progress: Progress = silent) -> Figures:
    """Measure one adversary's answers against the warden: rate, bound, detection and slowdown.

    Args:
        spec: as ``pareto``; adversary, margin, count, prompt_tokens, length, level.
    """
    judged = _judge(spec, folder.parent.parent, progress)
    figures = _figures(judged.rows, spec["length"], math.log2(judged.vocabulary))
    honest, other = (
        torch.cat(list(side)).double().numpy() for side in (judged.found["margin"], judged.margins)
    )
    if len(other) // 2 >= spec["length"]:
        auc = detect(honest, other, spec["length"], np.random.default_rng(spec["seed"])).auc_low_fpr
        figures["auc"] = exactly(auc, len(judged.rows))
    return figures


# ---- receivers without the seed


def hidden_seed(spec: dict[str, Any], folder: Path, progress: Progress = silent) -> Figures:
    """Measure how often a policy permits several tokens under hashed noise, and feed it to Theorems 4.2 and 4.3.

    Honest answers are replayed with numbers of H(K, σ, x), as the theorems ask (appendix D.6). p is the share of
    positions with more than one permitted token, q the mean number of tokens there, rounded up.

    Args:
        spec: as ``pareto``; watched, slack (ε).
    """
    home = folder.parent.parent
    tuned, _ = divided(calibration(spec, home, progress), spec)
    rule = rules(spec)[least(tuned, spec)]
    # A rule on dangerous tokens alone permits the R leading ones too.
    leading = rule.cutoff if spec["watched"] == DANGEROUS else 0
    key = hashlib.sha256(f"{spec['seed']} hidden seed".encode()).digest()
    verifier = Verifier(
        load_whole(spec["model"], dtype=spec["dtype"], device=spec["device"]),
        lambda seed: HashedNoise(key, seed),
    )
    transcripts = chosen(spec, home, progress)
    sizes: list[list[int]] = []
    for i, transcript in enumerate(transcripts):
        evidence = narrowed(verifier.replay(transcript), rule.noise_sd, max(spec["cutoffs"]))
        positions = gumbel_positions(
            evidence.logits, evidence.gumbel, evidence.sampling, noise_sd=rule.noise_sd, samples=SAMPLES,
            generator=torch.Generator().manual_seed(i),
        )  # fmt: skip
        permitted = positions.admissible(rule.threshold)
        # Columns are by rank.
        permitted |= torch.arange(permitted.shape[1]) < leading
        sizes.append(permitted.sum(1).tolist())
        progress("answers replayed with hashed noise", i + 1, len(transcripts))
    everywhere = [size for row in sizes for size in row]
    several = [size for size in everywhere if size > 1]
    p, q = len(several) / len(everywhere), math.ceil(sum(several) / len(several)) if several else 2
    figures = as_figures({
        "free": share([size > 1 for size in everywhere]),
        "support": mean([support_rate(row) for row in sizes]),
    })  # fmt: skip
    exact = {
        "permitted": q, "largest": max(everywhere), "interactive": hidden_seed_rate(p, q),
        "interactive_printed": hidden_seed_rate_printed(p, q), "searching": searching_rate(p, spec["slack"], q),
        "risk": searching_risk(p, min(1.0, p + spec["slack"]), spec["new_tokens"], spec["new_tokens"]),
    }  # fmt: skip
    return figures | {name: exactly(float(value), len(everywhere)) for name, value in exact.items()}


# ---- the game


def game(spec: dict[str, Any], folder: Path, progress: Progress = silent) -> Figures:
    """Measure an adversary's chance in the exfiltration game, played with its recorded answers, beside the bound.

    Args:
        spec: as ``exfiltration``; messages, inspected (share of them), alarms (share of these), bits, rounds, watched.
    """
    home = folder.parent.parent
    key = {name: value for name, value in spec.items() if name not in GAME}
    pools = stored(home, "games", key, lambda: _pools(spec, home, progress))
    watched = spec["watched"]
    sent = [
        game_of.Sent(bits, alarm > 0, capacity, spec["adversary"] == "seeds")
        for bits, alarm, capacity in zip(
            *(pools[name].tolist() for name in ("bits", f"{watched} alarm", f"{watched} capacity")),
            strict=True,
        )
    ]
    inspections = max(1, round(spec["inspected"] * spec["messages"]))
    rules = game_of.Rules(
        spec["bits"], spec["messages"], inspections, max(1, round(spec["alarms"] * inspections))
    )
    honest = [alarm > 0 for alarm in pools[f"{watched} honest"].tolist()]
    match = game_of.Recorded(honest, sent)
    comparison = game_of.compare(rules, match, rounds=spec["rounds"], seed=spec["seed"])
    ends = {name: comparison.ends.get(end, 0) for name, end in ENDS.items()}
    figures = {
        name: share([True] * count + [False] * (comparison.rounds - count)) for name, count in ends.items()
    }
    figures["won"] = Estimate(comparison.rate, comparison.low, comparison.high, comparison.rounds)
    figures["bits_an_answer"] = mean([answer.bits for answer in sent])
    figures["flagged"] = share([answer.alarm for answer in sent])
    false = figures["false_alarms"] = share(honest)
    # Few answers estimate the rate of false alarms poorly, so compute the bound at both ends of its interval.
    capacity = math.log2(rules.messages) + comparison.capacity
    low, high = (
        game_bound(float(rules.bits), capacity, rules.messages, rules.inspections, rules.alarms, alpha)
        for alpha in (false.low, false.high)
    )
    figures["bound"] = Estimate(comparison.bound, low, high, len(honest))
    result = as_figures(figures)
    used = {} if comparison.dishonest is None else {"used": comparison.dishonest}
    for name, value in {"capacity": comparison.capacity, **used}.items():
        result[name] = exactly(value, comparison.rounds)
    return result


def _pools(spec: dict[str, Any], home: Path, progress: Progress) -> dict[str, Tensor]:
    """Return alarms on honest answers, and bits, alarms and capacities of the adversary's, by what the warden watches.

    An answer may have as many tokens of a class as its test lets pass. The capacity is what a choice among the other
    tokens carries, plus log₂ of the number of ways to place and choose those tokens.
    """
    judged = _judge(spec, home, progress)
    length, cutoff = spec["length"], max(1, rules(spec)[judged.place].cutoff)
    passed = {
        name: _passing(length, rate, choices, spec["level"])
        for name, rate, choices in (
            ("dangerous", spec["rate"], judged.vocabulary),
            ("suspicious", judged.suspicious, cutoff),
        )
    }
    sums = judged.found["sums"][:, judged.place].round().long()
    flagged = {
        name: torch.tensor([
            _p(count, tokens, rate) < spec["level"]
            for count, tokens in zip(
                sums[:, FIELDS.index(field)].tolist(), judged.found["tokens"].tolist(), strict=True
            )
        ])
        for name, field, rate in (
            ("dangerous", "false_positives", spec["rate"]),
            ("suspicious", "suspicious", judged.suspicious),
        )
    }  # fmt: skip

    def of(name: str) -> Tensor:
        return torch.tensor([float(row[name]) for row in judged.rows], dtype=torch.float64)

    return {
        "bits": of("received"),
        f"{DANGEROUS} honest": flagged["dangerous"].double(),
        f"{DANGEROUS} alarm": of("flagged"),
        f"{DANGEROUS} capacity": of("quiet_bound") + passed["dangerous"],
        f"{BOTH} honest": (flagged["dangerous"] | flagged["suspicious"]).double(),
        f"{BOTH} alarm": of("flagged").maximum(of("flagged_suspicious")),
        f"{BOTH} capacity": of("safe_bound") + passed["dangerous"] + passed["suspicious"],
    }


def _passing(length: int, rate: float, choices: int, level: float) -> float:
    """Return log₂ of the number of ways to place and choose as many tokens of a class as its test lets pass."""
    most = next((t - 1 for t in range(1, length + 1) if _p(t, length, rate) < level), length)
    places = [math.log2(math.comb(length, j)) + j * math.log2(choices) for j in range(most + 1)]
    return max(places) + math.log2(sum(2.0 ** (place - max(places)) for place in places))


def _packed(made: Sequence[Answer]) -> dict[str, Tensor]:
    return {
        "tokens": torch.tensor([answer.tokens for answer in made]),
        "seed": torch.tensor([answer.seed for answer in made]),
        **{
            name: torch.tensor([getattr(answer, name) for answer in made], dtype=torch.float64)
            for name in ("sent", "received", "entropy", "natural")
        },
    }


def judged(replay: Replay, rule: Rule, seed: int, vocabulary: int, widest: int) -> dict[str, Any]:
    """Return the warden's classes and bounds of one answer: counts of tokens, sums of bits."""
    evidence = narrowed(replay, rule.noise_sd, widest)
    positions = gumbel_positions(
        evidence.logits, evidence.gumbel, evidence.sampling, noise_sd=rule.noise_sd, samples=SAMPLES,
        generator=torch.Generator().manual_seed(seed),
    )  # fmt: skip
    admitted = positions.admissible(rule.threshold)
    safe = admitted.gather(1, evidence.tokens[:, None])[:, 0]
    ranks = logit_rank(evidence.logits, evidence.tokens)
    risks = risk.classify(torch.where(safe, 0.0, -torch.inf), ranks, rule.threshold, rule.cutoff)
    dangerous = risks == Risk.DANGEROUS
    # Columns are by rank: the first R are the leading tokens.
    quiet = (admitted | (torch.arange(admitted.shape[1]) < rule.cutoff)).sum(1).clamp_min(1)
    bound = torch.where(dangerous, vocabulary, quiet).double().log2()
    return {
        "dangerous": int(dangerous.sum()), "suspicious": int((risks == Risk.SUSPICIOUS).sum()),
        "safe_bound": float(admitted.sum(1).clamp_min(1).double().log2().sum()), "bound": float(bound.sum()),
        "quiet_bound": float(quiet.double().log2().sum()),
    }  # fmt: skip


def _elsewhere(replay: Replay, tactic: Tactic, request: Request, whole: WholeModel) -> float:
    """Return the bits that a receiver decodes who computes the choices by a replay, not as the server did."""
    tokens = replay.tokens.tolist()
    payload = tactic.payload(request, len(tokens), whole.vocabulary)
    assert replay.gumbel is not None
    steps = [
        tactic.choices(replay.logits[i : i + 1], replay.gumbel[i : i + 1], replay.sampling, replay.sampling.seed + i)
        for i in range(len(tokens))
    ]  # fmt: skip
    return known(tactic.halves(payload, whole.tokenizer)[1], payload, steps, tokens)


def _p(count: int, tokens: int, rate: float) -> float:
    """Return the probability of at least ``count`` tokens of a class, if each is one with probability ``rate``."""
    return float(binom.sf(count - 1, tokens, rate))


def _figures(rows: Sequence[dict[str, Any]], length: int, whole: float) -> Figures:
    """Return means over answers; rates are in bits per token."""

    def rate(values: Sequence[float]) -> Estimate:
        return mean([value / length for value in values])

    names = ["sent", "received", "natural", "safe_bound", "bound", "dangerous", "suspicious"]
    names += [] if any(math.isnan(row["entropy"]) for row in rows) else ["entropy"]
    estimates = {name: rate([row[name] for row in rows]) for name in names}
    estimates["received_elsewhere"] = rate([row["elsewhere"] for row in rows])
    estimates["passed"] = rate([0.0 if row["flagged"] else row["received"] for row in rows])
    estimates["slowdown"] = slowdown(estimates["passed"], whole)
    # A rounding error does not violate the bound.
    estimates["within"] = share([row["received"] <= row["bound"] + 1e-6 for row in rows])
    for name in ("flagged", "flagged_suspicious", "syntactic", "perplexity"):
        estimates[name] = share([row[name] for row in rows])
    return as_figures(estimates)
