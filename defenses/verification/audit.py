"""``hiddenlab verify audit``: what could have been smuggled out in a directory of transcripts, and what to do about it.

Source: Rinberg et al. 2025, section 6 and appendix F.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from defenses.verification import bounds as theory
from defenses.verification import difr
from defenses.verification.bounds import Risk
from defenses.verification.command import FORMAT, Made, verifier_for
from defenses.verification.difr import Replay, Verifier
from defenses.verification.filters import SyntacticFilter
from defenses.verification.ledger import verify as verify_ledger
from defenses.verification.likelihood import gumbel_positions
from defenses.verification.records import canonical, lines, parsed
from defenses.verification.risk import classify
from defenses.verification.signing import LedgerError
from defenses.verification.transcript import Transcript, read_transcripts
from defenses.verification.whole import WholeModel
from hiddenlab.core import Progress, silent
from hiddenlab.errors import InputError
from hiddenlab.slice.load import BUILTIN

QUIET, REVIEW, QUARANTINE = "quiet", "review", "quarantine"


def audit(
    folder: Path, *, model: str | None = None, dtype: str = "bfloat16", device: str = "auto", key: str | None = None,
    noise_sd: float = 0.1, threshold: float = 1e-3, rank_cutoff: int = 8, false_positives: float = 0.01,
    suspicious: float = 0.005, ledger: Path | None = None, public_key: str | None = None, progress: Progress = silent,
) -> Made:  # fmt: skip
    """Look for smuggled data in a directory of transcript files (exfiltration paper, section 6, appendix F).

    Args:
        folder: of ``*.jsonl`` files. noise_sd, threshold, rank_cutoff: σ, τ and R of the three classes.
        false_positives, suspicious: shares of dangerous and of suspicious tokens up to which a file is quiet, being
            what honest noise gives. Without the second, bits pass among the suspicious (eval/LOG.md).
        ledger: a signed ledger in which every request has to stand; needs ``public_key``.

    Returns:
        ``files``: for each its class (``quiet``, ``review``, ``quarantine``), why, tokens by class, and the most bits a
        token that an adversary could have sent through them. A file that cannot be read or replayed is in quarantine.

    Raises:
        InputError: no such directory, no transcripts in it, or a ledger without a key.
    """
    _check_settings(noise_sd, threshold, rank_cutoff, false_positives, suspicious)
    if public_key is not None and ledger is None:
        raise InputError("a public key is given, and no ledger that it is for")
    files = sorted(folder.glob("*.jsonl")) if folder.is_dir() else []
    files = [file for file in files if ledger is None or file.resolve() != ledger.resolve()]
    if not files:
        raise InputError(f"{folder} is no directory with transcript files (*.jsonl)")
    written, ledger_row = _ledger(ledger, public_key)
    settings = {
        "noise_sd": noise_sd, "threshold": threshold, "rank_cutoff": rank_cutoff,
        "false_positives": false_positives, "suspicious": suspicious,
    }  # fmt: skip
    verifier = verifier_for([], model, dtype, device, key)
    rows = []
    for i, file in enumerate(files):
        try:
            found = read_transcripts(file)
            if model is None and any(one.model != BUILTIN for one in found):
                raise InputError(f"claims another model than {BUILTIN!r}, against which it would be verified")
            rows.append({"file": file.name, **_audited(found, verifier, settings, written)})
        except InputError as error:
            rows.append({"file": file.name, "class": QUARANTINE, "reasons": [str(error)], "tokens": None})
        progress("files audited", i + 1, len(files))
    return {"format": FORMAT, "settings": settings, "ledger": ledger_row, "files": rows}


def _ledger(ledger: Path | None, public_key: str | None) -> tuple[set[bytes] | None, Made | None]:
    """Entries of a ledger, if it is valid; else none of them, so that no request stands in it."""
    if ledger is None:
        return None, None
    if public_key is None:
        raise InputError("a ledger is checked with the public key of who keeps it; give --public-key")
    try:
        verdict = verify_ledger(ledger, public_key)
    except LedgerError as error:
        return set(), {"valid": False, "reason": str(error), "records": 0}
    entries: set[bytes] = set()
    if verdict.valid:
        read = (parsed(line.removesuffix(b"\n")) for line in lines(ledger))
        entries = {canonical(one["entry"]) for one in read if isinstance(one, dict) and "entry" in one}
    return entries, {"valid": verdict.valid, "reason": verdict.reason, "records": verdict.records}


def _check_settings(noise_sd: float, threshold: float, rank_cutoff: int, *shares: float) -> None:
    if not 0 < noise_sd < math.inf or not 0 < threshold < 1 or not 0 <= rank_cutoff <= 2**31:
        raise InputError(
            f"sigma {noise_sd}, tau {threshold}, rank {rank_cutoff}: above 0, between 0 and 1, and from 0"
        )
    if not all(0 < share < 1 for share in shares):
        raise InputError("shares of dangerous and suspicious tokens are between 0 and 1")


def _audited(
    found: Sequence[Transcript], verifier: Verifier, settings: Made, written: set[bytes] | None
) -> Made:
    counts = np.zeros(3, dtype=int)
    bits, safe_bits = 0.0, 0.0
    reasons: list[str] = []
    flagged = 0
    for one in found:
        risks, carried, admissible = _risks(verifier.replay(one), settings)
        counts += np.bincount(risks.numpy(), minlength=3)
        bits, safe_bits = bits + float(carried.sum()), safe_bits + float(admissible.sum())
        flagged += _looks_like_data(one, verifier.model)
        if written is not None and canonical(one.to_json()) not in written:
            reasons.append(f"request {one.id!r} does not stand in the ledger")
    tokens = int(counts.sum())
    hints = []
    for risk, limit in (
        (Risk.DANGEROUS, settings["false_positives"]),
        (Risk.SUSPICIOUS, settings["suspicious"]),
    ):
        share = counts[risk] / tokens
        # More than honest noise explains at 99 %: a short file is not quarantined for one token.
        allowed = limit + 2.33 * math.sqrt(limit * (1 - limit) / tokens)
        told = f"{share:.2%} of tokens are {risk.name.lower()}; honest noise gives up to {allowed:.2%}"
        if share > allowed:
            reasons.append(told)
        elif share > limit:
            hints.append(told)
    if flagged:
        hints.append(f"{flagged} answers look like encoded data")
    level = QUARANTINE if reasons else REVIEW if hints else QUIET
    return {
        "class": level, "reasons": [*reasons, *hints], "tokens": tokens, "safe": int(counts[Risk.SAFE]),
        "suspicious": int(counts[Risk.SUSPICIOUS]), "dangerous": int(counts[Risk.DANGEROUS]),
        "bits_per_token": bits / tokens, "safe_bits_per_token": safe_bits / tokens,
        "slowdown": theory.slowdown(bits / tokens, verifier.model.vocabulary),
    }  # fmt: skip


def _risks(replay: Replay, settings: Made) -> tuple[Tensor, Tensor, Tensor]:
    """Classes of a request's tokens, the bits that each can have carried, and those of its admissible set.

    Who sent a token that is not dangerous had the admissible ones and those of the first R ranks to choose from, even
    where the one sent is safe; a dangerous one may be any of the vocabulary.
    """
    if replay.uniform is not None:
        raise InputError("audits are for Gumbel-max and greedy sampling")
    gumbel = torch.zeros_like(replay.logits) if replay.gumbel is None else replay.gumbel
    draws = torch.Generator().manual_seed(0)
    positions = gumbel_positions(
        replay.logits, gumbel, replay.sampling, noise_sd=settings["noise_sd"], generator=draws
    )
    threshold = math.log(settings["threshold"])
    admitted = positions.admissible(threshold)
    safe = admitted.gather(1, replay.tokens[:, None])[:, 0]
    ranks = difr.rank(replay).long()
    risks = classify(torch.where(safe, 0.0, -torch.inf), ranks, threshold, settings["rank_cutoff"])
    leading = replay.logits.topk(min(settings["rank_cutoff"], replay.logits.shape[1]), dim=1).indices
    choices = admitted.scatter(1, leading, True).sum(1).clamp(min=1)
    choices = torch.where(risks == Risk.DANGEROUS, replay.logits.shape[1], choices)
    return risks, choices.double().log2(), admitted.sum(1).clamp(min=1).double().log2()


def _looks_like_data(one: Transcript, model: WholeModel) -> bool:
    if model.tokenizer is None:
        return False
    return SyntacticFilter().verdict(model.tokenizer.decode(list(one.output))).flagged
