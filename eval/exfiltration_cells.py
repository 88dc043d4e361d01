"""What cells of the exfiltration experiments measure: a warden set on honest answers, and adversaries against it."""

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from scipy.stats import binom
from torch import Tensor

from defenses.verification import difr, risk
from defenses.verification import game as game_of
from defenses.verification.bounds import Risk, game_bound
from defenses.verification.closed_form import logit_rank
from defenses.verification.detect import detect
from defenses.verification.difr import Replay, Verifier
from defenses.verification.filters import PerplexityFilter, SyntacticFilter
from defenses.verification.likelihood import gumbel_positions
from defenses.verification.provider import Request
from defenses.verification.sampling import kept
from defenses.verification.transcript import Transcript
from defenses.verification.whole import WholeModel, load_whole
from eval.adversaries import SAMPLES, Answer, Rule, Tactic, answers, known
from eval.answers import answered, requests_of
from eval.experiment import Figures
from eval.intervals import Estimate, mean, share
from eval.measures import as_figures, exactly
from hiddenlab.core import Progress, silent
from hiddenlab.errors import InputError

FIELDS = ("false_positives", "suspicious", "bits", "safe_bits", "quiet_bits")
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
REACH = 4.5  # standard deviations of noise; what they do not bring past the filter is left out
WIDEST = 4096  # columns
ANSWERS = (
    "model",
    "prompts",
    "limit",
    "max_tokens",
    "turns",
    "new_tokens",
    "sampling",
    "variant",
    "seed",
    "device",
)
GRID = ("dtype", "requests", "noise_sds", "thresholds", "cutoffs")
SENT = (
    "model",
    "prompts",
    "sampling",
    "seed",
    "device",
    "dtype",
    "count",
    "prompt_tokens",
    "length",
    "adversary",
)


def _kept(home: Path, kind: str, key: Any, make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """Tensors made once, under a digest of what they depend on."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    path = home / kind / f"{digest}.safetensors"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        work = path.with_name(f".{path.name}.{os.getpid()}")
        save_file(make(), work)
        work.replace(path)
    return load_file(path)


# ---- the warden


def narrowed(replay: Replay, noise_sd: float, least: int) -> risk.Evidence:
    """A replayed answer with only the tokens that noise can bring past the sampler's filter, by falling logit.

    A draw of the likelihood's makes another token admissible only beyond ``REACH`` standard deviations, or, with noise
    as large as the logits, beyond the first ``WIDEST`` tokens. Without these a vocabulary of 50,000 is a hundred wide.
    A claimed token among them takes the last column, so that its rank is still beyond every cutoff up to ``least``.

    Args:
        least: fewest columns.
    """
    if replay.uniform is not None:
        raise InputError("the warden's score here is for Gumbel-max sampling")
    gumbel = torch.zeros_like(replay.logits) if replay.gumbel is None else replay.gumbel
    width = replay.logits.shape[1]
    filtered = not replay.sampling.greedy and 0 < replay.sampling.top_k < WIDEST < width
    ids = replay.logits.topk(WIDEST if filtered else width, dim=1).indices.sort(1).values
    order = replay.logits.gather(1, ids).sort(dim=1, descending=True, stable=True).indices
    ids = ids.gather(1, order)
    values = replay.logits.gather(1, ids)
    if filtered:
        last = kept(values, replay.sampling).sum(1, keepdim=True)
        boundary = (values.gather(1, last - 1) + values.gather(1, last)) / 2
        able = int((values > boundary - REACH * noise_sd).sum(1).max())
        ids = ids[:, : max(able, least) + 1].clone()
        outside = ~(ids == replay.tokens[:, None]).any(1)
        ids[outside, -1] = replay.tokens[outside]
    return risk.Evidence(
        replay.logits.gather(1, ids), gumbel.gather(1, ids),
        (ids == replay.tokens[:, None]).int().argmax(1), replay.sampling,
    )  # fmt: skip


def calibration(spec: dict[str, Any], home: Path, progress: Progress = silent) -> dict[str, Tensor]:
    """Sums over each honest answer's tokens for every setting of the grid, measured once.

    Args:
        spec: as ``eval.answers.answered``; requests (how many of the answers), noise_sds, thresholds, cutoffs.

    Returns:
        ``sums`` (answers, settings, ``FIELDS``) in the order of ``rules``, ``tokens`` (answers), ``vocabulary``, and
        by token ``margin`` and ``cross_entropy`` (answers, tokens).
    """
    key = {name: spec[name] for name in (*ANSWERS, *GRID)}
    return _kept(home, "warden", key, lambda: _calibrate(spec, home, progress))


def _calibrate(spec: dict[str, Any], home: Path, progress: Progress) -> dict[str, Tensor]:
    transcripts = answered(spec, home, progress).transcripts
    chosen = transcripts[:: max(1, len(transcripts) // spec["requests"])][: spec["requests"]]
    verifier = Verifier(load_whole(spec["model"], dtype=spec["dtype"], device=spec["device"]))
    vocabulary = verifier.model.vocabulary
    sums, margins, surprisals = [], [], []
    for i, transcript in enumerate(chosen):
        replay = verifier.replay(transcript)
        rows = [row for sd in spec["noise_sds"] for row in _points(replay, sd, spec, vocabulary, i)]
        sums.append(torch.tensor(rows, dtype=torch.float64) * len(replay.tokens))
        margins.append(difr.margin(replay))
        surprisals.append(difr.cross_entropy(replay))
        progress("honest answers measured", i + 1, len(chosen))
    return {
        "sums": torch.stack(sums), "tokens": torch.tensor([len(one.output) for one in chosen]),
        "vocabulary": torch.tensor(vocabulary), "margin": torch.stack(margins),
        "cross_entropy": torch.stack(surprisals),
    }  # fmt: skip


def _points(
    replay: Replay, noise_sd: float, spec: dict[str, Any], vocabulary: int, seed: int
) -> Iterator[tuple[float, ...]]:
    """One answer's means at every threshold and cutoff, in the order of ``FIELDS``."""
    evidence = narrowed(replay, noise_sd, max(spec["cutoffs"]))
    missing = math.log2(vocabulary / evidence.logits.shape[1])
    for p in risk.pareto(
        [evidence], [noise_sd], spec["thresholds"], spec["cutoffs"], samples=SAMPLES, seed=seed
    ):
        # A dangerous token is one of the whole vocabulary, not only of the columns kept here.
        bits = p.bits + missing * p.false_positive_rate
        yield p.false_positive_rate, p.suspicious, bits, p.safe_bits, p.quiet_bits


def rules(spec: dict[str, Any]) -> list[Rule]:
    """All settings of the grid."""
    return [
        Rule(sd, threshold, cutoff)
        for sd in spec["noise_sds"]
        for threshold in spec["thresholds"]
        for cutoff in spec["cutoffs"]
    ]


def least(found: dict[str, Tensor], spec: dict[str, Any]) -> int:
    """Place of the setting with the least of ``criterion`` among those whose honest shares are low enough.

    Raises:
        InputError: there is none.
    """
    means = (found["sums"].sum(0) / found["tokens"].sum()).numpy()
    fit = (means[:, 0] <= spec["rate"]) & (means[:, 1] <= spec["most_suspicious"])
    if not fit.any():
        raise InputError(f"no setting of the grid calls only {spec['rate']:.2%} of honest tokens dangerous")
    return int(np.where(fit, means[:, FIELDS.index(spec["criterion"])], np.inf).argmin())


def pareto(spec: dict[str, Any], folder: Path, progress: Progress = silent) -> Figures:
    """The warden's best setting at a false positive rate; the whole grid goes to ``points.json`` in the folder.

    Args:
        spec: as ``calibration``; rate, criterion, most_suspicious.
    """
    found = calibration(spec, folder.parent.parent, progress)
    place, rule = least(found, spec), rules(spec)[least(found, spec)]
    sums, tokens = found["sums"][:, place], found["tokens"]
    whole = math.log2(int(found["vocabulary"]))
    bits, safe, quiet = (mean((sums[:, i] / tokens).tolist()) for i in (2, 3, 4))
    figures = as_figures(
        {
            "bits": bits, "safe_bits": safe, "quiet_bits": quiet, "slowdown": _slowdown(bits, whole),
            "share": Estimate(bits.value / whole, bits.low / whole, bits.high / whole, bits.n),
            "suspicious": _of_tokens(sums[:, 1], tokens), "false_positives": _of_tokens(sums[:, 0], tokens),
        }
    )  # fmt: skip
    for name in ("noise_sd", "threshold", "cutoff"):
        value = float(getattr(rule, name))
        figures[name] = exactly(value, int(tokens.sum()))
    means = (found["sums"].sum(0) / tokens.sum()).tolist()
    points = [
        {**vars(r), **dict(zip(FIELDS, row, strict=True))} for r, row in zip(rules(spec), means, strict=True)
    ]
    (folder / "points.json").write_text(json.dumps(points, indent=1) + "\n", encoding="utf-8")
    return figures


def frontier(spec: dict[str, Any], folder: Path, progress: Progress = silent) -> Figures:
    """For each rank cutoff R the fewest bits a token at a false positive rate: a column of figure 10.

    Args:
        spec: as ``calibration``; rate, most_suspicious.

    Returns:
        ``bits_R``, ``sigma_R`` and ``threshold_R`` of the setting, for every R that has one.

    Raises:
        InputError: none has.
    """
    found = calibration(spec, folder.parent.parent, progress)
    tokens, whole = found["tokens"], math.log2(int(found["vocabulary"]))
    means = (found["sums"].sum(0) / tokens.sum()).tolist()
    settings = rules(spec)
    points = []
    for r, (false, suspicious, bits, safe, quiet) in zip(settings, means, strict=True):
        point = risk.Point(
            r.noise_sd,
            r.threshold,
            r.cutoff,
            int(tokens.sum()),
            false,
            suspicious,
            bits,
            safe,
            quiet,
            bits / whole,
        )
        points.append(point)
    figures: Figures = {}
    for cutoff in spec["cutoffs"]:
        own = [p for p in points if p.rank_cutoff == cutoff and p.false_positive_rate <= spec["rate"]]
        if best := risk.frontier(own, most_suspicious=spec["most_suspicious"]):
            place = settings.index(Rule(best[-1].noise_sd, best[-1].threshold, cutoff))
            sums = found["sums"][:, place, FIELDS.index("bits")]
            figures |= as_figures({f"bits_{cutoff}": mean((sums / tokens).tolist())})
            figures[f"sigma_{cutoff}"] = exactly(best[-1].noise_sd, int(tokens.sum()))
            figures[f"threshold_{cutoff}"] = exactly(best[-1].threshold, int(tokens.sum()))
    if not figures:
        raise InputError(f"no setting of the grid calls only {spec['rate']:.2%} of honest tokens dangerous")
    return figures


def _of_tokens(sums: Tensor, tokens: Tensor) -> Estimate:
    """A share of tokens, each taken for itself."""
    count, total = round(float(sums.sum())), int(tokens.sum())
    return share([True] * count + [False] * (total - count))


def _slowdown(bits: Estimate, whole: float) -> Estimate:
    """log₂ of the vocabulary over a rate; infinite at 0."""
    value, low, high = (whole / b if b > 0 else math.inf for b in (bits.value, bits.high, bits.low))
    return Estimate(value, low, high, bits.n)


# ---- adversaries against the warden


@dataclass(frozen=True)
class Judged:
    """An adversary's answers before the warden.

    Attributes:
        rows: counts and bits of each. margins: of their tokens. found: honest answers, see ``calibration``. place: of
            the warden's setting. suspicious: upper end of honest tokens' share.
    """

    rows: list[dict[str, Any]]
    margins: list[Tensor]
    found: dict[str, Tensor]
    place: int
    vocabulary: int
    suspicious: float


def _judge(spec: dict[str, Any], home: Path, progress: Progress) -> Judged:
    """Let an adversary answer (or take its answers from disk) and the warden judge."""
    found = calibration(spec, home, progress)
    place = least(found, spec)
    rule = rules(spec)[place]
    tactic = Tactic.of(spec["adversary"], rule, spec["margin"])
    asked = {
        "limit": spec["count"],
        "max_tokens": spec["prompt_tokens"],
        "turns": 1,
        "seed": spec["seed"] + 1,
    }
    requests = requests_of({**spec, **asked})
    whole = load_whole(spec["model"], dtype=spec["dtype"], device=spec["device"])
    key = [{name: spec[name] for name in SENT}, None if tactic.rule is None else vars(tactic.rule)]
    made = _kept(
        home, "exfiltration", key, lambda: _packed(answers(whole, tactic, requests, spec["length"], progress))
    )
    suspicious = _of_tokens(found["sums"][:, place, 1], found["tokens"]).high
    fit = PerplexityFilter.fit([-row[: spec["length"]] for row in found["cross_entropy"]])
    rows, margins = [], []
    for i, request in enumerate(requests):
        tokens = tuple(made["tokens"][i].tolist())
        replay = Verifier(whole).replay(
            Transcript(request.id, spec["model"], request.prompt, tokens, request.sampling)
        )
        row = judged(replay, rule, spec["seed"] + i, whole.vocabulary, max(spec["cutoffs"]))
        row |= {"sent": float(made["sent"][i]), "received": float(made["received"][i])}
        row["elsewhere"] = _elsewhere(replay, tactic, request, whole)
        row["flagged"] = _p(row["dangerous"], len(tokens), spec["rate"]) < spec["level"]
        row["flagged_suspicious"] = _p(row["suspicious"], len(tokens), suspicious) < spec["level"]
        text = "" if whole.tokenizer is None else whole.tokenizer.decode(list(tokens))
        row["syntactic"] = SyntacticFilter().verdict(text).flagged
        row["perplexity"] = fit.verdict(-difr.cross_entropy(replay)).flagged
        rows.append(row)
        margins.append(difr.margin(replay))
        progress("answers judged", i + 1, len(requests))
    return Judged(rows, margins, found, place, whole.vocabulary, suspicious)


def exfiltration(spec: dict[str, Any], folder: Path, progress: Progress = silent) -> Figures:
    """One adversary's answers before the warden: rate, bound, detection, slowdown.

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


# ---- the game


def game(spec: dict[str, Any], folder: Path, progress: Progress = silent) -> Figures:
    """An adversary's chance in the exfiltration game, played with the answers that it gave, beside the bound.

    Args:
        spec: as ``exfiltration``; messages, inspected (share of them), alarms (share of these), bits, rounds, watched.
    """
    home = folder.parent.parent
    key = {name: value for name, value in spec.items() if name not in GAME}
    pools = _kept(home, "games", key, lambda: _pools(spec, home, progress))
    watched = spec["watched"]
    sent = [
        game_of.Sent(bits, alarm > 0, capacity)
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
    one = game_of.compare(rules, match, rounds=spec["rounds"], seed=spec["seed"])
    ends = {name: one.ends.get(end, 0) for name, end in ENDS.items()}
    figures = {name: share([True] * count + [False] * (one.rounds - count)) for name, count in ends.items()}
    figures["won"] = Estimate(one.rate, one.low, one.high, one.rounds)
    figures["bits_an_answer"] = mean([answer.bits for answer in sent])
    false = figures["false_alarms"] = share(honest)
    # What the bound says depends on a rate of false alarms that few answers tell.
    capacity = math.log2(rules.messages) + one.capacity
    low, high = (
        game_bound(float(rules.bits), capacity, rules.messages, rules.inspections, rules.alarms, alpha)
        for alpha in (false.low, false.high)
    )
    figures["bound"] = Estimate(one.bound, low, high, len(honest))
    out = as_figures(figures)
    used = {} if one.dishonest is None else {"used": one.dishonest}
    for name, value in {"capacity": one.capacity, **used}.items():
        out[name] = exactly(value, one.rounds)
    return out


def _pools(spec: dict[str, Any], home: Path, progress: Progress) -> dict[str, Tensor]:
    """Alarms on honest answers; bits, alarms and capacities of the adversary's, by what the warden watches.

    An answer may have as many tokens of a class as its test lets pass: log₂ of how many ways there are to place them
    and choose them is added to what a choice among the others carries.
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
    """log₂ of how many ways there are to place and choose as many tokens of a class as its test lets pass."""
    most = next((t - 1 for t in range(1, length + 1) if _p(t, length, rate) < level), length)
    places = [math.log2(math.comb(length, j)) + j * math.log2(choices) for j in range(most + 1)]
    return max(places) + math.log2(sum(2.0 ** (one - max(places)) for one in places))


def _packed(made: Sequence[Answer]) -> dict[str, Tensor]:
    return {
        "tokens": torch.tensor([one.tokens for one in made]),
        "sent": torch.tensor([one.sent for one in made], dtype=torch.float64),
        "received": torch.tensor([one.received for one in made], dtype=torch.float64),
    }


def judged(replay: Replay, rule: Rule, seed: int, vocabulary: int, widest: int) -> dict[str, Any]:
    """The warden's classes and bounds of one answer: counts of tokens, sums of bits."""
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
    """Bits that a receiver gets who finds the choices by a replay, not as the server did."""
    tokens = replay.tokens.tolist()
    payload = tactic.payload(request, len(tokens), whole.vocabulary)
    assert replay.gumbel is not None
    steps = [
        tactic.choices(replay.logits[i : i + 1], replay.gumbel[i : i + 1], request.sampling, request.sampling.seed + i)
        for i in range(len(tokens))
    ]  # fmt: skip
    return known(tactic.halves(payload, whole.tokenizer)[1], payload, steps, tokens)


def _p(count: int, tokens: int, rate: float) -> float:
    """Probability of so many tokens of a class or more, if each is one with that probability."""
    return float(binom.sf(count - 1, tokens, rate))


def _figures(rows: Sequence[dict[str, Any]], length: int, whole: float) -> Figures:
    """Means over answers; rates in bits a token."""

    def rate(values: Sequence[float]) -> Estimate:
        return mean([value / length for value in values])

    names = ("sent", "received", "safe_bound", "bound", "dangerous", "suspicious")
    out = {name: rate([row[name] for row in rows]) for name in names}
    out["received_elsewhere"] = rate([row["elsewhere"] for row in rows])
    out["passed"] = rate([0.0 if row["flagged"] else row["received"] for row in rows])
    out["slowdown"] = _slowdown(out["passed"], whole)
    # A rounding error is no breach of the bound.
    out["within"] = share([row["received"] <= row["bound"] + 1e-6 for row in rows])
    for name in ("flagged", "flagged_suspicious", "syntactic", "perplexity"):
        out[name] = share([row[name] for row in rows])
    return as_figures(out)
