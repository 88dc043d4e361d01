"""``hiddenlab verify``: simulate a provider, prove, check, score and record what one claims."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from defenses.verification import bounds as theory
from defenses.verification import difr, speculative, toploc
from defenses.verification.detect import clipping
from defenses.verification.difr import Replay, Verifier
from defenses.verification.ledger import Ledger
from defenses.verification.provider import LOADED, SAMPLED, Provider, Request, Variant
from defenses.verification.sampling import HashedNoise, Noise, Sampling, StreamNoise
from defenses.verification.signing import create_key, public, read_key
from defenses.verification.transcript import (
    Fingerprint,
    Transcript,
    from_openai,
    read_transcripts,
    write_transcripts,
)
from defenses.verification.whole import WholeModel, load_whole
from hiddenlab.core import Progress, silent
from hiddenlab.errors import InputError
from hiddenlab.job import generator
from hiddenlab.lens import Projection
from hiddenlab.prompts import load_prompts
from hiddenlab.slice.load import BUILTIN, load_tokenizer, resolve_model

FORMAT = 1
LARGEST_MARGIN = 3.0  # where margins are clipped when nothing honest says where
LARGEST_DISTANCE = 0.1  # of a fingerprint, relative to its size: above it another computation

Made = dict[str, Any]


def noise_of(key: str | None) -> Callable[[int], Noise]:
    """vLLM's stream, or numbers from H(K, σ, x) where a key is given (text; its bytes are the key)."""
    if key is None:
        return StreamNoise
    raw = key.encode()
    HashedNoise(raw, 0)  # says what is wrong with the key
    return lambda seed: HashedNoise(raw, seed)


def simulate(
    out: Path,
    *,
    model: str = "builtin",
    provider: str = "honest",
    prompts: str | None = None,
    column: str | None = None,
    limit: int | None = None,
    max_tokens: int | None = None,
    new_tokens: int = 100,
    sampling: dict[str, Any] | None = None,
    dtype: str = "bfloat16",
    device: str = "auto",
    proofs: bool = False,
    lens: Projection | None = None,
    every: int = 1,
    resume: bool = False,
    key: str | None = None,
    draft: str | None = None,
    ahead: int = 4,
    progress: Progress = silent,
) -> Made:
    """Answer prompts as a provider would, honest or not, and write what it claims to a transcript file.

    Args:
        out: the file, a new one unless ``resume``. provider: see ``Variant``. sampling: fields of ``Sampling``, for all
            requests; each has a seed of its own, drawn from the one here. proofs: TOPLOC's. lens: Activation-DiFR's
            projection, for every ``every``-th output token. key: of hashed noise. draft: decode speculatively with this
            draft model (``speculative.load_draft``), ``ahead`` tokens at a time, and record how each token came about.

    Raises:
        InputError: the file exists, or something asked for is impossible.
    """
    asked = Sampling(**(sampling or {}))
    done, variant = _answered_before(out, resume), Variant.parse(provider)
    if draft is not None and (proofs or lens is not None):
        raise InputError("speculative answers are proven afterwards, with 'hiddenlab verify commit'")
    # What is advertised reads the prompts, whatever runs.
    tokenizer = load_tokenizer(resolve_model(model))
    if tokenizer is None:
        raise InputError(f"{model} has no tokenizer to read prompts with")
    requests = []
    for i, prompt in enumerate(load_prompts(prompts, column=column, limit=limit)):
        tokens = tuple(tokenizer(prompt.text)["input_ids"])[:max_tokens]
        seed = int(torch.randint(2**31, (1,), generator=generator(asked.seed, "request", i)))
        requests.append(Request(prompt.id, tokens, replace(asked, seed=seed)))
    todo = [request for request in requests if request.id not in done]
    if draft is not None:
        variant.check_only((*LOADED, *SAMPLED), "speculative decoding is simulated request by request")
        asked_for = {request.id: request.sampling for request in todo}
        answers = speculative.answer(
            variant.load(model, dtype, device), speculative.load_draft(draft, model, dtype, device),
            [replace(request, sampling=variant.sampling(request.sampling)) for request in todo],
            model=model, new_tokens=new_tokens, ahead=ahead, noise=noise_of(key),
        )  # fmt: skip
        for i, one in enumerate(answers):
            write_transcripts(out, [replace(one, sampling=asked_for[one.id])])
            progress("requests", i + 1, len(todo))
    else:
        made = Provider(
            model, variant, new_tokens=new_tokens, dtype=dtype, device=device, noise=noise_of(key)
        )
        for answer in made.answer(todo, progress):
            one = answer.transcript
            if proofs:
                one = replace(one, proofs=_proofs(answer.prompt_states, answer.output_states))
            if lens is not None:
                one = replace(one, fingerprint=_fingerprint(answer.output_states, lens, every))
            write_transcripts(out, [one])
    return {
        "format": FORMAT, "file": str(out), "provider": provider, "model": model, "requests": len(requests),
        "taken_up": len(done), "output_tokens": new_tokens * len(requests),
    }  # fmt: skip


def _answered_before(out: Path, resume: bool) -> set[str]:
    if not out.exists():
        return set()
    if not resume:
        raise InputError(f"{out} exists; name another file, or --resume to go on with it")
    return {one.id for one in read_transcripts(out)}


def _proofs(prompt: Tensor, outputs: Tensor) -> tuple[str, ...]:
    return tuple(proof.to_base64() for proof in toploc.commit_all(prompt, outputs))


def _fingerprint(outputs: Tensor, lens: Projection, every: int) -> Fingerprint:
    rows = lens(difr.rows_every(outputs, every))
    return Fingerprint.of(rows, every=every, seed=lens.seed, kind=lens.kind, dtype="bfloat16")


def verifier_for(
    found: Sequence[Transcript], model: str | None, dtype: str, device: str, key: str | None = None
) -> Verifier:
    """The reference to verify against: ``model``, or else ``builtin``; never what an untrusted file names.

    Raises:
        InputError: no model was given, and the transcripts claim another one than ``builtin``.
    """
    if model is None and (others := sorted({one.model for one in found} - {BUILTIN})):
        raise InputError(
            f"the transcripts claim the model {others[0]!r}; say with --model which one is to be verified"
        )
    return Verifier(load_whole(model or BUILTIN, dtype=dtype, device=device), noise_of(key))


def commit(
    path: Path, out: Path, *, model: str | None = None, dtype: str = "bfloat16", device: str = "auto",
    lens: Projection | None = None, every: int = 1, progress: Progress = silent,
) -> Made:  # fmt: skip
    """Add TOPLOC proofs, and fingerprints where asked for, to transcripts, from one prefill of each.

    Raises:
        InputError: the transcripts cannot be read or replayed, or ``out`` exists.
    """
    if out.exists():
        raise InputError(f"{out} exists; name another file")
    found = read_transcripts(path)
    verifier = verifier_for(found, model, dtype, device)
    size = 0
    for i, one in enumerate(found):
        replay = verifier.replay(replace(one, modes=None))  # how tokens were drawn changes no states
        prompt = replay.states[: len(one.prompt)]
        proven = replace(one, proofs=_proofs(prompt, replay.output_states))
        if lens is not None:
            proven = replace(proven, fingerprint=_fingerprint(replay.output_states, lens, every))
            assert proven.fingerprint is not None
            size += proven.fingerprint.size
        size += toploc.proof_bytes() * len(proven.proofs or ())
        write_transcripts(out, [proven])
        progress("requests proven", i + 1, len(found))
    tokens = sum(len(one.output) for one in found)
    return {
        "format": FORMAT,
        "file": str(out),
        "requests": len(found),
        "bytes_per_output_token": size / tokens,
    }


def check(
    path: Path, *, model: str | None = None, dtype: str = "bfloat16", device: str = "auto",
    lens: Projection | None = None, every: int = 1, largest_distance: float = LARGEST_DISTANCE,
    progress: Progress = silent,
) -> Made:  # fmt: skip
    """Check the proofs and fingerprints of transcripts against a recomputation.

    Args:
        lens, every: the projection and stride that were agreed on. A provider who could choose them would choose ones
            that hide the difference, so that fingerprints are checked only where the verifier states them.

    Returns:
        ``requests``: for each its verdict, ``valid``, ``rejected`` or ``unchecked`` (it carries nothing that was
        checked), and the reason; and counts of these.

    Raises:
        InputError: the file cannot be read, or a limit is no number from 0.
    """
    if not 0 <= largest_distance < math.inf:
        raise InputError(f"a largest distance of {largest_distance}; a number from 0")
    found = read_transcripts(path)
    verifier = verifier_for(found, model, dtype, device)
    rows = []
    for i, one in enumerate(found):
        try:
            verdict, reason = _checked(
                one, verifier.replay(replace(one, modes=None)), lens, every, largest_distance
            )
        except InputError as error:
            verdict, reason = "rejected", str(error)
        rows.append({"id": one.id, "verdict": verdict, "reason": reason})
        progress("requests checked", i + 1, len(found))
    counts = {
        name: sum(row["verdict"] == name for row in rows) for name in ("valid", "rejected", "unchecked")
    }
    return {"format": FORMAT, "counts": counts, "requests": rows}


def _checked(
    one: Transcript, replay: Replay, lens: Projection | None, every: int, largest: float
) -> tuple[str, str]:
    reasons = []
    if one.proofs is not None:
        proofs = [toploc.Proof.from_base64(text) for text in one.proofs]
        result = toploc.verify_all(replay.states[: len(one.prompt)], replay.output_states, proofs)
        if not result.accepted:
            return "rejected", result.reason
        reasons.append(result.reason)
    if lens is not None:
        if one.fingerprint is None:
            return "rejected", "no fingerprint; one was agreed on"
        distance = relative_distance(one.fingerprint, replay.output_states, lens, every)
        if not distance <= largest:
            return "rejected", f"the fingerprint differs by {distance:.3f} of its size, allowed: {largest:g}"
        reasons.append(f"the fingerprint differs by {distance:.3f} of its size")
    if not reasons:
        told = "" if one.fingerprint is None else "; its fingerprint is checked with --fingerprint K"
        return "unchecked", f"no proofs{told}"
    return "valid", "; ".join(reasons)


def relative_distance(sent: Fingerprint, own: Tensor, lens: Projection, every: int) -> float:
    """The distance of a fingerprint from the verifier's own over all rows, relative to the latter's size.

    Raises:
        InputError: it is of another projection or stride than agreed on, or has too few or too many rows.
    """
    if (sent.count, sent.seed, sent.kind, sent.every) != (lens.count, lens.seed, lens.kind, every):
        raise InputError("the fingerprint is of another projection or stride than agreed on")
    values = sent.values()
    rows = lens(difr.rows_every(own, every))
    return float(difr.activation_distance(values, rows).square().sum().sqrt() / rows.norm().clamp(min=1e-12))


def score(
    path: Path, *, honest: Path | None = None, model: str | None = None, dtype: str = "bfloat16",
    device: str = "auto", key: str | None = None, false_positives: float = 0.01, draft: str | None = None,
    ahead: int = 4, progress: Progress = silent,
) -> Made:  # fmt: skip
    """Token-DiFR scores of transcripts, and a verdict where honest transcripts calibrate it.

    Answers that were decoded speculatively need the ``draft`` model and how many tokens it was ``ahead``; their only
    score is whether the verifier, in the recorded mode, draws the same token (DiFR, appendix F).

    The verdict compares mean margins, clipped at the 99.9th percentile of all, by a permutation test of requests.
    ``least_p`` is the smallest p that so many requests can give: with few of them nothing is ever found.

    Raises:
        InputError: a file cannot be read or replayed, or a share outside (0, 1).
    """
    if not 0 < false_positives < 1:
        raise InputError(f"a share of {false_positives} of the honest to be flagged; between 0 and 1")
    found = read_transcripts(path)
    reference = None if honest is None else read_transcripts(honest)
    verifier = verifier_for([*found, *(reference or [])], model, dtype, device, key)
    drafting = None if draft is None else speculative.load_draft(draft, model or BUILTIN, dtype, device)
    judge = _judge(verifier, drafting, ahead)
    parts = _scored(found, judge, "requests scored", progress)
    rows = [{"id": one.id, **_figures(scores)} for one, scores in zip(found, parts, strict=True)]
    made: Made = {"format": FORMAT, "summary": _figures(_joined(parts)), "requests": rows, "verdict": None}
    if reference is not None:
        own = _scored(reference, judge, "honest requests scored", progress)
        made["honest"] = _figures(_joined(own))
        made["verdict"] = _verdict(own, parts, false_positives)
    return made


def _judge(
    verifier: Verifier, draft: WholeModel | None, ahead: int
) -> Callable[[Transcript], dict[str, Tensor]]:
    """What scores one request's tokens."""
    if draft is None:
        return lambda one: difr.token_scores(verifier.replay(one))

    def speculated(one: Transcript) -> dict[str, Tensor]:
        found = speculative.replay(one, verifier.model, draft)
        said = difr.surprise(found.target, torch.tensor(one.output), one.sampling)
        return {"mismatch": speculative.mismatch(found, ahead, verifier.noise), "cross_entropy": said}

    return speculated


def _scored(
    found: Sequence[Transcript],
    judge: Callable[[Transcript], dict[str, Tensor]],
    what: str,
    progress: Progress,
) -> list[dict[str, np.ndarray]]:
    out = []
    for i, one in enumerate(found):
        scores = judge(one)
        out.append({name: value.double().numpy() for name, value in scores.items()})
        progress(what, i + 1, len(found))
    return out


def _joined(parts: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    shared = set.intersection(*(set(part) for part in parts))
    return {name: np.concatenate([part[name] for part in parts]) for name in sorted(shared)}


def _figures(scores: dict[str, np.ndarray]) -> Made:
    out: Made = {
        "tokens": len(scores["mismatch"]), "same_token": float(1 - scores["mismatch"].mean()),
        "cross_entropy": float(scores["cross_entropy"].mean()), "mean_margin": None, "filtered": None,
    }  # fmt: skip
    if "margin" in scores:
        finite = np.isfinite(scores["margin"])
        out["mean_margin"] = float(np.minimum(scores["margin"], LARGEST_MARGIN).mean())
        out["filtered"] = int((~finite).sum())
    return out


def _verdict(
    honest: Sequence[dict[str, np.ndarray]],
    other: Sequence[dict[str, np.ndarray]],
    level: float,
    draws: int = 10_000,
) -> Made:
    """A permutation test of whole requests: how often does a random division of them differ as much?

    Tokens of one request share their text, so that requests are exchanged, not tokens.
    """
    name = "margin" if all("margin" in part for part in (*honest, *other)) else "mismatch"
    pooling = clipping(np.concatenate([part[name] for part in (*honest, *other)]))
    sums = np.array([[pooling(part[name]).sum(), len(part[name])] for part in (*honest, *other)])
    n = len(honest)

    def apart(order: np.ndarray) -> np.ndarray:
        first, second = sums[order[..., :n]].sum(-2), sums[order[..., n:]].sum(-2)
        return second[..., 0] / second[..., 1] - first[..., 0] / first[..., 1]

    found = apart(np.arange(len(sums))[None])
    rng = np.random.default_rng(0)
    orders = np.stack([rng.permutation(len(sums)) for _ in range(draws)])
    p = float((1 + (apart(orders) >= found - 1e-12).sum()) / (draws + 1))
    least = max(1 / (draws + 1), 1 / math.comb(len(sums), n))
    means = [float(part[:, 0].sum() / part[:, 1].sum()) for part in (sums[:n], sums[n:])]
    return {
        "diverges": p < level, "score": name, "mean": means[1], "honest_mean": means[0], "p": p, "least_p": least,
        "clipped_at": pooling.top,
    }  # fmt: skip


def record(path: Path, ledger: Path, key_file: Path) -> Made:
    """Append transcripts to a signed ledger; ledger and key are made where they do not exist.

    Raises:
        InputError: something cannot be read or written, or the ledger is not valid.
    """
    found = read_transcripts(path)
    if not key_file.exists():
        create_key(key_file)
    key = read_key(key_file)
    book = Ledger.open(ledger, key) if ledger.exists() else Ledger.create(ledger, key)
    for one in found:
        book.append(one.to_json())
    return {
        "format": FORMAT, "ledger": str(ledger), "records": len(book), "appended": len(found),
        "public_key": public(key),
        "checkpoint": vars(book.checkpoint()),
    }  # fmt: skip


def import_openai(path: Path, out: Path, model: str = BUILTIN) -> Made:
    """Turn OpenAI-style requests and answers at temperature 0 into a transcript file (DiFR, appendix D).

    Raises:
        InputError: a line is something else, the model has no tokenizer, or ``out`` exists.
    """
    if out.exists():
        raise InputError(f"{out} exists; name another file")
    tokenizer = load_tokenizer(resolve_model(model))
    if tokenizer is None:
        raise InputError(f"{model} has no tokenizer to read the texts with")
    found = from_openai(path, model, tokenizer)
    write_transcripts(out, found)
    return {"format": FORMAT, "file": str(out), "model": model, "requests": len(found)}


def bounds(
    *, free: float, permitted: int, slack: float = 0.01, messages: int = 10_000, inspections: int = 1000,
    alarms: int = 20, false_positives: float = 0.01, capacity: float = 100.0, bits: float = 120.0,
) -> Made:  # fmt: skip
    """The exfiltration theorems in numbers.

    Args:
        free: p, share of positions with more than one permitted token. permitted: q. slack: ε of Theorem 4.3.
        messages, inspections, alarms, false_positives, capacity, bits: M, B_I, B_A, α, C and n of the game.
    """
    return {
        "format": FORMAT,
        "theorem_4_1": free * math.log2(permitted) if permitted > 1 else 0.0,
        "theorem_4_2_printed": theory.hidden_seed_rate_printed(free, permitted),
        "theorem_4_2_corrected": theory.hidden_seed_rate(free, permitted),
        "theorem_4_3": theory.searching_rate(free, slack, permitted),
        "game": theory.game_bound(bits, capacity, messages, inspections, alarms, false_positives),
    }


def sampling_rate(*, share: float, confidence: float = 0.99, needed: int = 1) -> Made:
    """How many messages have to be verified to meet so many dishonest ones (exfiltration paper, appendix C.2)."""
    return {"format": FORMAT, "messages": theory.required_samples(share, confidence, needed)}
