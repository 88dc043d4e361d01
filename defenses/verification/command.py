"""Simulate a provider, and prove and check what one claims: ``hiddenlab verify simulate``, ``commit``, ``check``."""

from __future__ import annotations

import math
from base64 import b64decode
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hiddenlab.defenses.verification import difr, speculative, toploc
from hiddenlab.defenses.verification.causal_lm import WholeModel, load_whole
from hiddenlab.defenses.verification.difr import Replay, Verifier
from hiddenlab.defenses.verification.formats import DTYPE as PROOF_DTYPE
from hiddenlab.defenses.verification.formats import format_of
from hiddenlab.defenses.verification.provider import LOADED, SAMPLED, Provider, Request, Variant
from hiddenlab.defenses.verification.rules import DEFAULT as DEFAULT_RULE
from hiddenlab.defenses.verification.rules import Rule, rule_of
from hiddenlab.defenses.verification.sampling import HashedNoise, Noise, Sampling, StreamNoise
from hiddenlab.defenses.verification.transcript import (
    FINGERPRINT_DTYPES,
    Fingerprint,
    Transcript,
    cut_torn_line,
    read_transcripts,
    write_transcripts,
)
from hiddenlab.errors import InputError
from hiddenlab.models.load import BUILTIN, load_tokenizer, resolve_model
from hiddenlab.models.tokens import token_ids
from hiddenlab.projections import Projection
from hiddenlab.prompts import load_prompts
from hiddenlab.text import count_of
from hiddenlab.types import Progress, silent
from hiddenlab.utils.random import generator

FORMAT = 1
FINGERPRINT_DTYPE = "bfloat16"
KEY_FORMS = ("adaptive", "by-place")
ROWS_MORE = 5.0  # factor on the limit over all rows for a single one, as honest rounding differs by row
LARGEST_DISTANCE = 0.1  # of a fingerprint, relative to its norm; a larger one means another computation

Made = dict[str, Any]


def noise_of(key: str | None, form: str = KEY_FORMS[0]) -> Callable[[int], Noise]:
    """Return the noise of requests: vLLM's stream, or hashed numbers where a key is given.

    Args:
        key: text, whose bytes are the key.
        form: ``adaptive`` for H(K, σ, x), ``by-place`` for H(K, σ) (see ``HashedNoise``).

    Raises:
        InputError: the key is too short, or the form is unknown.
    """
    if form not in KEY_FORMS:
        raise InputError(f"noise of the form {form!r}: {' or '.join(KEY_FORMS)}")
    if key is None:
        if form != KEY_FORMS[0]:
            raise InputError(f"noise of the form {form!r} is hashed with a key; none is given")
        return StreamNoise
    raw = key.encode()
    HashedNoise(raw, 0)  # raises an error about a wrong key
    return lambda seed: HashedNoise(raw, seed, adaptive=form == KEY_FORMS[0])


def simulate(
    out: Path,
    *,
    model: str = "builtin",
    provider: str = "honest",
    prompts: str | None = None,
    column: str | None = None,
    template: bool = True,
    limit: int | None = None,
    max_tokens: int | None = None,
    new_tokens: int = 100,
    sampling: dict[str, Any] | None = None,
    dtype: str = "bfloat16",
    device: str = "auto",
    proofs: bool = False,
    projection: Projection | None = None,
    every: int = 1,
    fingerprint_dtype: str = FINGERPRINT_DTYPE,
    proof_values: int = toploc.TOP,
    proof_rule: str = DEFAULT_RULE,
    proof_dtype: str = PROOF_DTYPE,
    resume: bool = False,
    key: str | None = None,
    key_form: str = KEY_FORMS[0],
    draft: str | None = None,
    ahead: int = 4,
    progress: Progress = silent,
) -> Made:
    """Answer prompts as a provider would, honest or not, and write what it claims to a transcript file.

    Args:
        out: the file, a new one unless ``resume``.
        provider: what it really does, see ``Variant``.
        sampling: fields of ``Sampling``, for all requests; each has a seed of its own, derived from this one.
        proofs: add TOPLOC proofs.
        projection: Activation-DiFR's, for every ``every``-th output token, sent in ``fingerprint_dtype``.
        proof_values: values of a TOPLOC proof.
        proof_rule: which values it commits to (``rules``).
        proof_dtype: of its values.
        key: of hashed noise, in ``key_form``.
        draft: decode speculatively with this draft model (``speculative.load_draft``), ``ahead`` tokens at a time,
            and record each token's mode.

    Raises:
        InputError: the file exists, or the options cannot be combined.
    """
    asked, noise = Sampling(**(sampling or {})), noise_of(key, key_form)
    rule = rule_of(proof_rule)
    _check_sent(fingerprint_dtype, proof_values, proof_dtype, dtype)
    done, variant = _answered_before(out, resume), Variant.parse(provider)
    if draft is not None and (proofs or projection is not None):
        raise InputError("speculative answers are proven afterwards, with 'hiddenlab verify commit'")
    # The advertised model's tokenizer reads the prompts, whichever model runs.
    tokenizer = load_tokenizer(resolve_model(model))
    requests = []
    for i, prompt in enumerate(load_prompts(prompts, column=column, limit=limit, template=template)):
        tokens = tuple(token_ids(tokenizer, prompt, model, most=max_tokens))
        seed = int(torch.randint(2**31, (1,), generator=generator(asked.seed, "request", i)))
        requests.append(Request(prompt.id, tokens, replace(asked, seed=seed)))
    todo = [request for request in requests if request.id not in done]
    if done:
        _same_work(read_transcripts(out), requests, model, new_tokens, rule.name if proofs else None, out)
    if draft is not None:
        variant.check_only((*LOADED, *SAMPLED), "speculative decoding is simulated request by request")
        asked_for = {request.id: request.sampling for request in todo}
        answers = speculative.answer(
            variant.load(model, dtype, device), speculative.load_draft(draft, model, dtype, device),
            [replace(request, sampling=variant.sampling(request.sampling)) for request in todo],
            model=model, new_tokens=new_tokens, ahead=ahead, noise=noise,
        )  # fmt: skip
        for i, transcript in enumerate(answers):
            write_transcripts(out, [replace(transcript, sampling=asked_for[transcript.id])])
            progress("requests", i + 1, len(todo))
    else:
        made = Provider(model, variant, new_tokens=new_tokens, dtype=dtype, device=device, noise=noise)
        for answer in made.answer(todo, progress):
            transcript = answer.transcript
            if proofs:
                states = answer.prompt_states, answer.output_states
                sent = _proofs(*states, proof_values, rule, made.whole, proof_dtype)
                transcript = replace(transcript, proofs=sent, proof_rule=rule.name)
            if projection is not None:
                print_ = _fingerprint(answer.output_states, projection, every, fingerprint_dtype)
                transcript = replace(transcript, fingerprint=print_)
            write_transcripts(out, [transcript])
    return {
        "format": FORMAT, "file": str(out), "provider": provider, "model": model, "requests": len(requests),
        "taken_up": len(done), "output_tokens": new_tokens * len(requests), **_sent(read_transcripts(out)),
    }  # fmt: skip


def _check_sent(dtype: str, proof_values: int, proof_dtype: str, computed: str) -> None:
    """Check the options of proofs and fingerprints before anything is computed."""
    if format_of(proof_dtype).bits == 32 and computed != "float32":
        raise InputError(
            f"a model in {computed} has no digits for proofs of {proof_dtype} values; take --dtype float32 too"
        )
    if dtype not in FINGERPRINT_DTYPES:
        raise InputError(f"a fingerprint of dtype {dtype!r}: one of {', '.join(FINGERPRINT_DTYPES)}")
    if proof_values < 1:
        raise InputError(f"a proof of {count_of(proof_values, 'value')}: at least 1")


def _sent(transcripts: Sequence[Transcript]) -> Made:
    """Return the bytes per output token that a provider sends beside the answer, in total and by kind."""
    tokens = sum(len(transcript.output) for transcript in transcripts)
    proofs = sum(len(b64decode(text)) for transcript in transcripts for text in transcript.proofs or ())
    prints = sum(
        transcript.fingerprint.size for transcript in transcripts if transcript.fingerprint is not None
    )
    parts = {"proofs": proofs / tokens, "fingerprints": prints / tokens}
    return {"bytes_per_output_token": sum(parts.values()), "bytes": parts}


def _same_work(
    transcripts: Sequence[Transcript], requests: Sequence[Request], model: str, new_tokens: int,
    rule: str | None, out: Path,
) -> None:  # fmt: skip
    """Check that a file to be resumed was asked for with the same options.

    A transcript does not say what the provider really did; that is not checked.

    Raises:
        InputError: the options differ.
    """
    asked = {request.id: request for request in requests}
    for transcript in transcripts:
        same = transcript.id in asked and (transcript.prompt, transcript.sampling) == (
            asked[transcript.id].prompt,
            asked[transcript.id].sampling,
        )
        other_rule = rule is not None and transcript.proof_rule not in (None, rule)
        if not same or other_rule or transcript.model != model or len(transcript.output) != new_tokens:
            raise InputError(
                f"{out} holds request {transcript.id!r} of another command; --resume needs the same options"
            )


def _answered_before(out: Path, resume: bool) -> set[str]:
    if not out.exists():
        return set()
    if not resume:
        raise InputError(f"{out} exists; name another file, or --resume to go on with it")
    cut_torn_line(out)
    return {transcript.id for transcript in read_transcripts(out)} if out.stat().st_size else set()


def _proofs(
    prompt: Tensor, outputs: Tensor, values: int, rule: Rule, whole: WholeModel, dtype: str
) -> tuple[str, ...]:
    scale = whole.scale if rule.by_row else None
    made = toploc.commit_all(prompt, outputs, values, rule=rule, scale=scale, dtype=dtype)
    return tuple(proof.to_base64() for proof in made)


def _fingerprint(outputs: Tensor, projection: Projection, every: int, dtype: str) -> Fingerprint:
    rows = projection(difr.rows_every(outputs, every))
    return Fingerprint.of(rows, every=every, seed=projection.seed, kind=projection.kind, dtype=dtype)


def verifier_for(
    transcripts: Sequence[Transcript], model: str | None, dtype: str, device: str, key: str | None = None,
    key_form: str = KEY_FORMS[0],
) -> Verifier:  # fmt: skip
    """Load the reference to verify against: ``model``, or else ``builtin``, but never a model that a file names.

    Raises:
        InputError: no model was given, and the transcripts claim another one than ``builtin``.
    """
    if model is None and (others := sorted({transcript.model for transcript in transcripts} - {BUILTIN})):
        raise InputError(
            f"the transcripts claim the model {others[0]!r}; say with --model which one is to be verified"
        )
    return Verifier(load_whole(model or BUILTIN, dtype=dtype, device=device), noise_of(key, key_form))


def commit(
    path: Path, out: Path, *, model: str | None = None, dtype: str = "bfloat16", device: str = "auto",
    projection: Projection | None = None, every: int = 1, fingerprint_dtype: str = FINGERPRINT_DTYPE,
    proof_values: int = toploc.TOP, proof_rule: str = DEFAULT_RULE, proof_dtype: str = PROOF_DTYPE,
    progress: Progress = silent,
) -> Made:  # fmt: skip
    """Add TOPLOC proofs, and fingerprints where asked for, to transcripts, from one prefill of each request.

    Raises:
        InputError: the transcripts cannot be read or replayed, or ``out`` exists.
    """
    if out.exists():
        raise InputError(f"{out} exists; name another file")
    _check_sent(fingerprint_dtype, proof_values, proof_dtype, dtype)
    rule = rule_of(proof_rule)
    transcripts = read_transcripts(path)
    verifier = verifier_for(transcripts, model, dtype, device)
    for i, transcript in enumerate(transcripts):
        replay = verifier.replay(replace(transcript, modes=None))  # how tokens were drawn changes no states
        prompt = replay.states[: len(transcript.prompt)]
        # An existing fingerprint was made by somebody else, so it is dropped.
        sent = _proofs(prompt, replay.output_states, proof_values, rule, verifier.model, proof_dtype)
        proven = replace(transcript, proofs=sent, proof_rule=rule.name, fingerprint=None)
        if projection is not None:
            print_ = _fingerprint(replay.output_states, projection, every, fingerprint_dtype)
            proven = replace(proven, fingerprint=print_)
        write_transcripts(out, [proven])
        progress("requests proven", i + 1, len(transcripts))
    return {
        "format": FORMAT, "file": str(out), "requests": len(transcripts), **_sent(read_transcripts(out)),
    }  # fmt: skip


def check(
    path: Path, *, model: str | None = None, dtype: str = "bfloat16", device: str = "auto",
    projection: Projection | None = None, every: int = 1, largest_distance: float = LARGEST_DISTANCE,
    proof_values: int = toploc.TOP, proof_rule: str = DEFAULT_RULE, proof_dtype: str = PROOF_DTYPE,
    no_proofs: bool = False,
    progress: Progress = silent,
) -> Made:  # fmt: skip
    """Check the proofs and fingerprints of transcripts against a recomputation.

    Args:
        projection, every: the projection and stride that were agreed on. Fingerprints are checked only where the
            verifier states them, because a provider who could choose them would choose ones that hide the difference.
        largest_distance: of a fingerprint, relative to its norm.
        proof_values: values of a TOPLOC proof, as agreed on; of bfloat16 a share of 38 in 128 may disagree.
        proof_rule: which values proofs commit to (``rules``), as agreed on; a provider would choose the weakest rule.
        proof_dtype: in which values are compared, within the published limits of it. Proofs of another dtype are
            rounded, or padded with zero bits (TOPLOC, section 5.7).
        no_proofs: fingerprints alone were agreed on. Else a request without proofs is rejected where a projection is
            stated, since a provider who changed a prompt would leave out its proof.

    Returns:
        ``requests``: for each its verdict, ``valid``, ``rejected`` or ``unchecked`` (it carries nothing that was
        checked), the reason, ``tokens`` (of prompt and answer), ``covered``, and where they were measured the
        fingerprint's ``distance`` and ``row_distance``, and of all proofs the largest ``exponents`` (values in
        disagreement), ``mantissa_mean`` and ``mantissa_median`` and the sum of ``faulty_rows``; of a valid one
        ``without_value`` too. ``counts`` of verdicts; the ``limits``; ``coverage``: the sums of ``tokens``, ``covered``
        and ``without_value`` over valid requests.

        A token is covered if a value of its own state was committed to, was compared, and agrees; in a fingerprint, if
        its row was sent. ``without_value`` counts all others: a change there shows only if it moves the values of later
        tokens. The answer's last token is always among them, as no state follows it. Covered does not mean verified:
        the limits tolerate other hardware.

    Raises:
        InputError: the file cannot be read, or a limit is no number from 0.
    """
    if not 0 <= largest_distance < math.inf:
        raise InputError(f"a largest distance of {largest_distance}; a number from 0")
    _check_sent(FINGERPRINT_DTYPE, proof_values, proof_dtype, dtype)
    rule, within = rule_of(proof_rule), toploc.PUBLISHED[proof_dtype]
    transcripts = read_transcripts(path)
    verifier = verifier_for(transcripts, model, dtype, device)
    rows = []
    for i, transcript in enumerate(transcripts):
        row: Made = {
            "id": transcript.id,
            "verdict": "unchecked",
            "reason": "",
            "tokens": len(transcript.prompt) + len(transcript.output),
        }
        try:
            replay = verifier.replay(replace(transcript, modes=None))
            scale = verifier.model.scale if rule.by_row and transcript.proofs is not None else None
            row |= _checked(
                transcript,
                replay,
                projection,
                every,
                largest_distance,
                proof_values,
                None if no_proofs else rule,
                scale,
                within,
            )
        except InputError as error:
            row |= {"verdict": "rejected", "reason": str(error)}
        row.setdefault("covered", 0)
        rows.append(row)
        progress("requests checked", i + 1, len(transcripts))
    counts = {
        name: sum(row["verdict"] == name for row in rows) for name in ("valid", "rejected", "unchecked")
    }
    limits = {
        "distance": largest_distance, "row_distance": ROWS_MORE * largest_distance,
        "exponents": within.allowed(proof_values),
        "mantissa_mean": within.mean, "mantissa_median": within.median,
    }  # fmt: skip
    valid = [row for row in rows if row["verdict"] == "valid"]
    coverage = {name: sum(row[name] for row in valid) for name in ("tokens", "covered", "without_value")}
    return {"format": FORMAT, "counts": counts, "coverage": coverage, "limits": limits, "requests": rows}


def _checked(
    transcript: Transcript, replay: Replay, projection: Projection | None, every: int, largest: float,
    values: int, rule: Rule | None, scale: Tensor | None, within: toploc.Thresholds = toploc.BFLOAT16,
) -> Made:  # fmt: skip
    reasons: list[str] = []
    faults: list[str] = []
    row = Made()
    covered = set[int]()  # positions of states
    before = len(transcript.prompt) - 1  # of the state from which the first token of the answer was drawn
    if transcript.proofs is not None and rule is not None:
        if transcript.proof_rule != rule.name:
            raise InputError(
                f"proofs by the rule {transcript.proof_rule!r}; {rule.name!r} was agreed on (--proof-rule)"
            )
        proofs = [toploc.Proof.from_base64(text, values) for text in transcript.proofs]
        prompt = replay.states[: len(transcript.prompt)]
        result = toploc.verify_all(
            prompt, replay.output_states, proofs, within, k=values, rule=rule, scale=scale
        )
        covered |= {*result.prompt, *(before + row for row in result.output)}
        for name, part in (
            ("exponents", "mismatches"),
            ("mantissa_mean", "mean"),
            ("mantissa_median", "median"),
        ):
            seen = [value for check in result.checks if (value := getattr(check, part)) is not None]
            row[name] = max(seen, default=None)
        if rule.by_row:
            row["faulty_rows"] = sum(check.faulty_rows or 0 for check in result.checks)
        (reasons if result.accepted else faults).append(result.reason)
    elif rule is not None and projection is not None:
        faults.append("no proofs; they were agreed on (else: --no-proofs)")
    if projection is not None and transcript.fingerprint is None:
        faults.append("no fingerprint; one was agreed on")
    elif projection is not None and transcript.fingerprint is not None:
        distance, farthest = relative_distance(
            transcript.fingerprint, replay.output_states, projection, every
        )
        row |= {"distance": distance, "row_distance": farthest}
        message = f"the fingerprint differs by {distance:.3f} of its size, in a row by {farthest:.3f}"
        if distance <= largest and farthest <= ROWS_MORE * largest:
            reasons.append(message)
            covered |= {before + place for place in range(0, len(transcript.output), every)}
        else:
            faults.append(f"{message}, allowed: {largest:g} and {ROWS_MORE * largest:g}")
    if faults:
        return row | {"verdict": "rejected", "reason": "; ".join(faults)}
    if not reasons:
        message = (
            "" if transcript.fingerprint is None else "; its fingerprint is checked with --fingerprint K"
        )
        return row | {"reason": f"no proofs{message}"}
    tokens = len(transcript.prompt) + len(transcript.output)
    row |= {"covered": len(covered), "without_value": tokens - len(covered)}
    behind = tokens - 1 - max(covered, default=-1)
    message = (
        f"compared {len(covered)} of {count_of(tokens, 'token')} by values of their own, "
        f"{tokens - len(covered)} by none"
    )
    reasons.append(f"{message}; no value depends on the last {behind}")
    return row | {"verdict": "valid", "reason": "; ".join(reasons)}


def relative_distance(
    sent: Fingerprint, own: Tensor, projection: Projection, every: int
) -> tuple[float, float]:
    """Return the distance of a fingerprint from the verifier's own: over all rows, and in the worst row.

    Both are relative to the verifier's norm, of all rows or of a mean row. The worst row matters because a few wrong
    rows are little among many.

    Raises:
        InputError: the projection or stride is not the one agreed on, or the number of rows differs.
    """
    if (sent.count, sent.seed, sent.kind, sent.every) != (
        projection.count,
        projection.seed,
        projection.kind,
        every,
    ):
        raise InputError("the fingerprint is of another projection or stride than agreed on")
    values = sent.values()
    rows = projection(difr.rows_every(own, every))
    apart, size = difr.activation_distance(values, rows), rows.norm().clamp(min=1e-12)
    return float(apart.norm() / size), float(apart.max() / size * len(rows) ** 0.5)
