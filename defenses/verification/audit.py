"""Measure how much data could have been smuggled out in a directory of transcripts: ``hiddenlab verify audit``.

Source: Rinberg et al. 2025, section 6 and appendix F.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool
from scipy.stats import binom
from torch import Tensor

from hiddenlab.defenses.verification import bounds as theory
from hiddenlab.defenses.verification import difr
from hiddenlab.defenses.verification.bounds import Risk
from hiddenlab.defenses.verification.causal_lm import WholeModel
from hiddenlab.defenses.verification.closed_form import FLOOR, fssl_ipt
from hiddenlab.defenses.verification.command import FORMAT, Made, verifier_for
from hiddenlab.defenses.verification.difr import Replay, Verifier
from hiddenlab.defenses.verification.durable import LedgerError
from hiddenlab.defenses.verification.filters import PerplexityFilter, SyntacticFilter
from hiddenlab.defenses.verification.ledger import Checkpoint
from hiddenlab.defenses.verification.ledger import verify as verify_ledger
from hiddenlab.defenses.verification.ledger_commands import entries, read_point
from hiddenlab.defenses.verification.likelihood import gumbel_positions
from hiddenlab.defenses.verification.records import canonical
from hiddenlab.defenses.verification.risk import classify
from hiddenlab.defenses.verification.sampling import probabilities
from hiddenlab.defenses.verification.transcript import Transcript, read_transcripts
from hiddenlab.errors import InputError
from hiddenlab.models.load import BUILTIN
from hiddenlab.text import count_of
from hiddenlab.types import Progress, silent

CONFIDENCE = 0.99
RARE = 0.01  # share of honest answers whose perplexity is outside of the usual range
QUIET, REVIEW, QUARANTINE = "quiet", "review", "quarantine"


def audit(
    folder: Path, *, model: str | None = None, dtype: str = "bfloat16", device: str = "auto", key: str | None = None,
    key_form: str = "adaptive", noise_sd: float = 0.1, threshold: float = 1e-3, rank_cutoff: int = 8,
    false_positives: float = 0.01, suspicious: float = 0.005, ipt_sigma: float = difr.IPT_SIGMA,
    honest: Path | None = None, ledger: Path | None = None, public_key: str | None = None,
    checkpoint: Path | None = None,
    progress: Progress = silent,
) -> Made:  # fmt: skip
    """Estimate how much data could have been smuggled out in a directory of transcript files.

    Source: the exfiltration paper (Rinberg et al. 2025), section 6 and appendix F.

    Args:
        folder: directory of ``*.jsonl`` files.
        model, dtype, device, key, key_form: see ``command.verifier_for``.
        noise_sd, threshold, rank_cutoff: σ, τ and R of the three classes.
        false_positives, suspicious: shares of dangerous and of suspicious tokens that honest noise gives; a file within
            both is quiet. Without the second, bits pass among the suspicious tokens
            (docs/log/009-verification-and-leaks.md).
        ipt_sigma: noise in probability, for answers drawn by the inverse transform (FSSL-IPT, Algorithm 3).
        honest: trusted transcripts; answers whose perplexity is outside of theirs are reviewed (section 4.2).
        ledger: a signed ledger that has to contain every request; needs ``public_key``.
        checkpoint: file of a checkpoint that was kept elsewhere. Without it, nobody notices if the ledger's end is
            missing, and the verdict says so.

    Returns:
        ``files``: for each its class (``quiet``, ``review``, ``quarantine``), why, tokens by class, and the most bits
        per token that an adversary could have sent through them. A file that cannot be read or replayed is in
        quarantine.

    Raises:
        InputError: there is no such directory, it has no transcripts, or a ledger comes without a key.
    """
    _check_settings(noise_sd, threshold, rank_cutoff, false_positives, suspicious)
    if not 0 < ipt_sigma < math.inf:
        raise InputError(f"ipt-sigma {ipt_sigma}: a number above 0")
    if public_key is not None and ledger is None:
        raise InputError("a public key is given, and no ledger that it is for")
    if checkpoint is not None and ledger is None:
        raise InputError("a checkpoint is given, and no ledger that it is of")
    files = sorted(folder.glob("*.jsonl")) if folder.is_dir() else []
    files = [file for file in files if ledger is None or file.resolve() != ledger.resolve()]
    if not files:
        raise InputError(f"{folder} is no directory with transcript files (*.jsonl)")
    written, ledger_row = _ledger(ledger, public_key, read_point(checkpoint))
    settings = {
        "noise_sd": noise_sd, "threshold": threshold, "rank_cutoff": rank_cutoff,
        "false_positives": false_positives, "suspicious": suspicious, "ipt_sigma": ipt_sigma,
    }  # fmt: skip
    trusted = [] if honest is None else read_transcripts(honest)
    verifier = verifier_for(trusted, model, dtype, device, key, key_form)
    usual = _usual(trusted, verifier, progress)
    rows = []
    for i, file in enumerate(files):
        try:
            transcripts = read_transcripts(file)
            if model is None and any(transcript.model != BUILTIN for transcript in transcripts):
                raise InputError(f"claims another model than {BUILTIN!r}, against which it would be verified")
            rows.append({"file": _name(file), **_audited(transcripts, verifier, settings, written, usual)})
        except InputError as error:
            rows.append({"file": _name(file), "class": QUARANTINE, "reasons": [str(error)], "tokens": None})
        progress("files audited", i + 1, len(files))
    return {"format": FORMAT, "settings": settings, "ledger": ledger_row, "files": rows}


def _name(file: Path) -> str:
    """Return a file's name with characters that cannot be encoded replaced."""
    return file.name.encode(errors="replace").decode()


def _usual(
    transcripts: Sequence[Transcript], verifier: Verifier, progress: Progress
) -> tuple[PerplexityFilter, float] | None:
    """Fit a perplexity filter to honest answers; return it with the share of further honest answers that it flags.

    None if there are no honest answers.
    """
    logs = []
    for i, transcript in enumerate(transcripts):
        logs.append(-difr.cross_entropy(verifier.replay(transcript)))
        progress("honest requests read", i + 1, len(transcripts))
    if not logs:
        return None
    # The next value lies between the least and the most of n with probability (n − 1) / (n + 1).
    return PerplexityFilter.fit(logs, RARE), max(RARE, 2 / (len(logs) + 1))


def _ledger(
    ledger: Path | None, public_key: str | None, checkpoint: Checkpoint | None
) -> tuple[set[bytes] | None, Made | None]:
    """Return the entries of a ledger and its verdict; an invalid ledger counts as empty."""
    if ledger is None:
        return None, None
    if public_key is None:
        raise InputError("a ledger is checked with the public key of who keeps it; give --public-key")
    try:
        verdict = verify_ledger(ledger, public_key, checkpoint)
    except LedgerError as error:
        return set(), {"valid": False, "reason": str(error), "records": 0, "end_checked": False}
    return entries(ledger) if verdict.valid else set(), asdict(verdict)


def _check_settings(noise_sd: float, threshold: float, rank_cutoff: int, *shares: float) -> None:
    if not 0 < noise_sd < math.inf or not 0 < threshold < 1 or not 0 <= rank_cutoff <= 2**31:
        raise InputError(
            f"sigma {noise_sd}, tau {threshold}, rank {rank_cutoff}: above 0, between 0 and 1, and from 0"
        )
    if not all(0 < share < 1 for share in shares):
        raise InputError("shares of dangerous and suspicious tokens are between 0 and 1")


def _audited(
    transcripts: Sequence[Transcript],
    verifier: Verifier,
    settings: Made,
    written: set[bytes] | None,
    usual: tuple[PerplexityFilter, float] | None,
) -> Made:
    counts = np.zeros(3, dtype=int)
    bits, safe_bits = 0.0, 0.0
    reasons: list[str] = []
    missing: list[str] = []
    flagged = unusual = 0
    for transcript in transcripts:
        replay = verifier.replay(transcript)
        risks, carried, admissible = _risks(replay, settings)
        unusual += usual is not None and usual[0].verdict(-difr.cross_entropy(replay)).flagged
        counts += np.bincount(risks.numpy(), minlength=3)
        bits, safe_bits = bits + float(carried.sum()), safe_bits + float(admissible.sum())
        flagged += _looks_like_data(transcript, verifier.model)
        if written is not None and canonical(transcript.to_json()) not in written:
            missing.append(transcript.id)
    if missing:
        reasons.append(
            f"{len(missing)} of {count_of(len(transcripts), 'request')} do not stand in the ledger, "
            f"{missing[0]!r} the first"
        )
    tokens = int(counts.sum())
    hints = []
    for risk, limit in (
        (Risk.DANGEROUS, settings["false_positives"]),
        (Risk.SUSPICIOUS, settings["suspicious"]),
    ):
        share = counts[risk] / tokens
        # Allow what honest noise gives in 99 of 100 files of this length, so that one token does not fail a short file.
        allowed = int(binom.ppf(CONFIDENCE, tokens, limit))
        statement = (
            f"{share:.2%} of tokens are {risk.name.lower()}; honest noise gives up to {allowed / tokens:.2%}"
        )
        if counts[risk] > allowed:
            reasons.append(statement)
        elif share > limit:
            hints.append(statement)
    if flagged:
        hints.append(f"{count_of(flagged, 'answer')} like encoded data")
    if usual is not None and unusual > binom.ppf(CONFIDENCE, len(transcripts), usual[1]):
        hints.append(f"{count_of(unusual, 'answer')} with a perplexity that honest ones do not have")
    level = QUARANTINE if reasons else REVIEW if hints else QUIET
    return {
        "class": level, "reasons": [*reasons, *hints], "tokens": tokens, "safe": int(counts[Risk.SAFE]),
        "suspicious": int(counts[Risk.SUSPICIOUS]), "dangerous": int(counts[Risk.DANGEROUS]),
        "bits_per_token": bits / tokens, "safe_bits_per_token": safe_bits / tokens,
        "slowdown": theory.slowdown(bits / tokens, verifier.model.vocabulary),
    }  # fmt: skip


def _risks(replay: Replay, settings: Made) -> tuple[Tensor, Tensor, Tensor]:
    """Return each token's class, the bits that it can have carried, and the bits of its admissible set.

    A sender of a token that is not dangerous could choose among the admissible tokens and the first R ranks, even where
    the one sent is safe. A dangerous token may be any of the vocabulary.
    """
    threshold = math.log(settings["threshold"])
    admitted = _admissible(replay, threshold, settings)
    safe = admitted.gather(1, replay.tokens[:, None])[:, 0]
    ranks = difr.rank(replay).long()
    risks = classify(torch.where(safe, 0.0, -torch.inf), ranks, threshold, settings["rank_cutoff"])
    leading = replay.logits.topk(min(settings["rank_cutoff"], replay.logits.shape[1]), dim=1).indices
    choices = admitted.scatter(1, leading, True).sum(1).clamp(min=1)
    choices = torch.where(risks == Risk.DANGEROUS, replay.logits.shape[1], choices)
    return risks, choices.double().log2(), admitted.sum(1).clamp(min=1).double().log2()


def _admissible(replay: Replay, threshold: float, settings: Made) -> Bool[Tensor, "n v"]:
    """Find the tokens that honest noise can have drawn, by FSSL-GM (Algorithm 4), or by FSSL-IPT (Algorithm 3).

    FSSL-IPT is for tokens drawn by the inverse transform.
    """
    if replay.uniform is not None:
        shares = probabilities(replay.logits, replay.sampling)
        log_mass = fssl_ipt(shares, replay.uniform, noise_sd=settings["ipt_sigma"])
        # A rare token's interval never holds much of the noise's mass, even around its middle. So the evidence against
        # a token is how much less mass it has than it could have.
        half = torch.special.erf(shares.double() / (2 * math.sqrt(2) * settings["ipt_sigma"]))
        near = (log_mass - (half + FLOOR).log() >= threshold) & (half * math.exp(threshold) > FLOOR)
        return (log_mass >= threshold) | near
    gumbel = torch.zeros_like(replay.logits) if replay.gumbel is None else replay.gumbel
    draws = torch.Generator().manual_seed(0)
    return gumbel_positions(
        replay.logits, gumbel, replay.sampling, noise_sd=settings["noise_sd"], generator=draws
    ).admissible(threshold)


def _looks_like_data(transcript: Transcript, model: WholeModel) -> bool:
    if model.tokenizer is None:
        return False
    return SyntacticFilter().verdict(model.tokenizer.decode(list(transcript.output))).flagged
