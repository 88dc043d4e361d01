"""Keep the answers of simulated providers and a verifier's scores of them on disk, for all experiments."""

import math
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hiddenlab.defenses.verification import difr, toploc
from hiddenlab.defenses.verification.causal_lm import load_whole
from hiddenlab.defenses.verification.difr import Replay, Verifier
from hiddenlab.defenses.verification.formats import DTYPE, format_of
from hiddenlab.defenses.verification.provider import Provider, Request, Variant
from hiddenlab.defenses.verification.rules import EVERY, PAPER
from hiddenlab.defenses.verification.sampling import Sampling
from hiddenlab.defenses.verification.transcript import Transcript, read_transcripts, write_transcripts
from hiddenlab.errors import InputError
from hiddenlab.projections import KINDS, Projection
from hiddenlab.prompts import load_prompts
from hiddenlab.types import Progress, silent
from hiddenlab.utils.digests import digest_of
from hiddenlab.utils.files import new_folder
from hiddenlab.utils.random import generator

COUNTS = (1, 2, 4, 8, 16, 32, 64)  # numbers of a fingerprint, and values of a TOPLOC proof of one token
PROOF_PARTS = ("exponents", "mean", "median")  # what TOPLOC's rule looks at
PROJECTION_SEED = 1234
ANSWERS, STATES, SCORES = "transcripts.jsonl", "states.safetensors", "scores.safetensors"
MONTE_CARLO = "monte_carlo"  # a score of its own
TUNED = "tuned"  # as a temperature: where mean cross-entropy is that of the honest provider
TUNING_AT, TUNING_SHARE = 0.85, 5
TUNING_RANGE = (0.5, 1.5)  # of the temperature asked for


@dataclass(frozen=True)
class Answered:
    """A provider's answers to all requests, and its final-norm states of prompts and outputs."""

    transcripts: list[Transcript]
    prompts: list[Tensor]
    outputs: list[Tensor]
    seconds: float


def requests_of(spec: dict[str, Any]) -> list[Request]:
    """Return the requests of a spec: every prompt ``turns`` times, each time with another seed."""
    from hiddenlab.models.load import load_tokenizer, resolve_model
    from hiddenlab.models.tokens import token_ids

    tokenizer = load_tokenizer(resolve_model(spec["model"]))
    asked = Sampling(**spec["sampling"])
    requests = []
    for i, prompt in enumerate(load_prompts(spec["prompts"], limit=spec["limit"])):
        tokens = tuple(token_ids(tokenizer, prompt, spec["model"], most=spec["max_tokens"]))
        for turn in range(spec["turns"]):
            seed = int(torch.randint(2**31, (1,), generator=generator(spec["seed"], "request", i, turn)))
            requests.append(Request(f"{prompt.id}-{turn}", tokens, replace(asked, seed=seed)))
    return requests


def answered(spec: dict[str, Any], home: Path, progress: Progress = silent) -> Answered:
    """Return the answers of the provider that a spec names; they are generated once.

    Args:
        spec: model, prompts, limit, max_tokens, turns, new_tokens, sampling, variant, seed, device, dtype; values: in
            which dtype states are kept and proven, bfloat16 unless said.
        home: folder of results.
    """
    folder = _folder(home, "answers", spec)
    if not (folder / STATES).is_file():
        provider = Provider(
            spec["model"], Variant.parse(_settled(spec, home, progress)), new_tokens=spec["new_tokens"],
            dtype=spec["dtype"], device=spec["device"],
        )  # fmt: skip
        started = time.perf_counter()
        answers = list(provider.answer(requests_of(spec), progress))
        seconds = time.perf_counter() - started
        kept = format_of(_values(spec)).dtype
        tensors = {f"prompt.{i}": answer.prompt_states.to(kept) for i, answer in enumerate(answers)}
        tensors |= {f"output.{i}": answer.output_states.to(kept) for i, answer in enumerate(answers)}
        with _kept(folder) as work:
            write_transcripts(work / ANSWERS, (answer.transcript for answer in answers))
            save_file(tensors | {"seconds": torch.tensor(seconds)}, work / STATES)
    transcripts, states = read_transcripts(folder / ANSWERS), load_file(folder / STATES)
    prompts, outputs = (
        [states[f"{kind}.{i}"] for i in range(len(transcripts))] for kind in ("prompt", "output")
    )
    return Answered(transcripts, prompts, outputs, float(states["seconds"]))


def _settled(spec: dict[str, Any], home: Path, progress: Progress) -> str:
    """Return the variant, with the temperature that an adversary would choose where it asks for that (DiFR, figure 2).

    Mean cross-entropy under the verifier is close to linear in the temperature. It is measured at two temperatures; the
    temperature at which the line meets the honest provider's is taken.
    """
    variant = str(spec["variant"])
    part = f"temperature={TUNED}"
    if part not in variant.split("+"):
        return variant
    plain = "+".join(p for p in variant.split("+") if p != part)
    asked = float(spec["sampling"].get("temperature", 1.0))
    few = {"limit": max(1, (spec["limit"] or 100) // TUNING_SHARE)}
    target = _entropy({**spec, "variant": "honest"}, home, progress)
    at_asked = _entropy({**spec, "variant": plain}, home, progress)
    low = TUNING_AT * asked
    cold = _entropy({**spec, **few, "variant": f"{plain}+temperature={low!r}"}, home, progress)
    hot = _entropy({**spec, **few, "variant": plain}, home, progress)
    slope = (hot - cold) / (asked - low)
    if slope <= 0:
        raise InputError(
            f"{variant}: cross-entropy does not rise with the temperature; there is nothing to tune"
        )
    least, most = (asked * part for part in TUNING_RANGE)
    temperature = round(min(most, max(least, asked - (at_asked - target) / slope)), 4)
    return "+".join(f"temperature={temperature!r}" if p == part else p for p in variant.split("+"))


def _entropy(spec: dict[str, Any], home: Path, progress: Progress) -> float:
    return float(np.mean(scored(spec, home, progress)["cross_entropy"]))


def scored(spec: dict[str, Any], home: Path, progress: Progress = silent) -> dict[str, np.ndarray]:
    """Return a verifier's scores of all answers, by name: one number per token, or one per proof for TOPLOC's.

    ``margin``, ``likelihood``, ``mismatch``, ``cross_entropy``, ``filtered_cross_entropy``, ``rank`` (see ``difr``);
    ``activation:KIND:K``; ``toploc:128:32:exponents`` (values in disagreement), ``…:mean``, ``…:median``,
    ``…:accepted``, by the published rule and limits, and ``…:lacking`` (see ``toploc.lacking``). ``drawn`` and
    ``length`` are the output tokens and their count by request.
    """

    def scores(i: int, answers: Answered, replay: Replay) -> dict[str, Tensor]:
        return (
            difr.token_scores(replay)
            | {"filtered_cross_entropy": difr.filtered_cross_entropy(replay)}
            | {"drawn": replay.tokens, "length": torch.tensor([len(replay.tokens)])}
            | _activation_scores(answers.outputs[i], replay)
            | _proof_scores(answers.prompts[i], answers.outputs[i], replay, _values(spec))
        )

    return _verified(spec, home, "token-scores", "requests verified", scores, progress)


def proven(spec: dict[str, Any], home: Path, progress: Progress = silent) -> dict[str, np.ndarray]:
    """Return TOPLOC's comparison of a proof of each single output token, as DiFR's paper compares it (figure 4).

    The names are ``toploc:K:1:PART`` with ``PROOF_PARTS``. Where none of a token's values agrees, mean and median of
    the mantissas are infinite. The many proofs are slow, so they are kept separately.
    """

    def scores(i: int, answers: Answered, replay: Replay) -> dict[str, Tensor]:
        found = dict[str, Tensor]()
        for count in COUNTS:
            pairs = zip(answers.outputs[i].split(1), replay.output_states.split(1), strict=True)
            checks = [
                toploc.verify(own, toploc.commit(sent, count, PAPER), k=count, rule=PAPER)
                for sent, own in pairs
            ]
            found |= _compared(f"toploc:{count}:1", count, checks)
        return found

    return _verified(spec, home, "proofs", "requests proven", scores, progress)


def simulated(
    spec: dict[str, Any], home: Path, trials: int, progress: Progress = silent
) -> dict[str, np.ndarray]:
    """Return the Monte Carlo score of all answers' tokens (DiFR, appendix B.1).

    It is costly, so it is kept separately.
    """

    def scores(i: int, answers: Answered, replay: Replay) -> dict[str, Tensor]:
        draws = generator(spec["seed"], "trials", i)
        return {MONTE_CARLO: difr.monte_carlo(replay, difr.SIGMA, draws, trials=trials)}

    return _verified(spec, home, f"trials-{trials}", "requests simulated", scores, progress)


def _verified(
    spec: dict[str, Any],
    home: Path,
    kind: str,
    what: str,
    scores: Callable[[int, Answered, Replay], dict[str, Tensor]],
    progress: Progress,
) -> dict[str, np.ndarray]:
    """Return scores of all answers, from a file of their kind if there is one.

    Args:
        kind: names the folder. what: is counted. scores: of the answer at a place, from its replay.
    """
    folder = _folder(home, kind, spec)
    path = folder / SCORES
    if not path.is_file():
        answers = answered(spec, home, progress)
        verifier = Verifier(load_whole(spec["model"], dtype=spec["dtype"], device=spec["device"]))
        parts: list[dict[str, Tensor]] = []
        for i, transcript in enumerate(answers.transcripts):
            parts.append(scores(i, answers, verifier.replay(transcript)))
            progress(what, i + 1, len(answers.transcripts))
        together = {name: torch.cat([part[name] for part in parts]).contiguous() for name in parts[0]}
        with _kept(folder) as work:
            save_file(together, work / SCORES)
    return {name: value.numpy() for name, value in load_file(path).items()}


def uniform_ranks(spec: dict[str, Any], home: Path, requests: int, progress: Progress = silent) -> np.ndarray:
    """Return ranks of the first requests' tokens in the verifier's distribution, from 0 to 1 (see ``difr``)."""
    transcripts = answered(spec, home, progress).transcripts[:requests]
    verifier = Verifier(load_whole(spec["model"], dtype=spec["dtype"], device=spec["device"]))
    draws = generator(spec["seed"], "ranks")
    parts = []
    for i, transcript in enumerate(transcripts):
        parts.append(difr.uniform_ranks(verifier.replay(transcript), draws))
        progress("requests ranked", i + 1, len(transcripts))
    return torch.cat(parts).numpy()


def _activation_scores(outputs: Tensor, replay: Replay) -> dict[str, Tensor]:
    """Return the distances of fingerprints sent in bfloat16."""
    scores = {}
    for kind in KINDS:
        for count in COUNTS:
            projection = Projection(count, PROJECTION_SEED, kind)
            sent = projection(outputs).bfloat16().float()
            scores[f"activation:{kind}:{count}"] = difr.activation_distance(
                sent, projection(replay.output_states)
            )
    return scores


def _proof_scores(prompt: Tensor, outputs: Tensor, replay: Replay, dtype: str) -> dict[str, Tensor]:
    """Return TOPLOC's comparison of proofs by the published rule: for the prompt, and for each 32 tokens."""
    sent = PAPER.chunks(prompt, outputs, EVERY)
    own = PAPER.chunks(replay.states[: len(prompt)], replay.output_states, EVERY)
    pairs = list(zip(sent, own, strict=True))
    limits = toploc.PUBLISHED[dtype]
    checks = [
        toploc.verify(b, toploc.commit(a, dtype=dtype, rule=PAPER), limits, rule=PAPER) for a, b in pairs
    ]
    lacking = [toploc.lacking(a, b, toploc.TOP, dtype=dtype) for a, b in pairs]
    name = f"toploc:{toploc.TOP}:{EVERY}"
    return _compared(name, toploc.TOP, checks) | {
        f"{name}:accepted": torch.tensor([float(check.accepted) for check in checks]),
        f"{name}:lacking": torch.tensor(lacking, dtype=torch.float32),
    }


def _compared(name: str, count: int, checks: Sequence[toploc.Check]) -> dict[str, Tensor]:
    """Return the three statistics of proofs of ``count`` values."""
    return {
        f"{name}:exponents": torch.tensor([_or(check.mismatches, count) for check in checks]),
        f"{name}:mean": torch.tensor([_or(check.mean, math.inf) for check in checks]),
        f"{name}:median": torch.tensor([_or(check.median, math.inf) for check in checks]),
    }


def _values(spec: dict[str, Any]) -> str:
    return str(spec.get("values", DTYPE))


def _or(value: float | None, other: float) -> float:
    return float(other if value is None else value)


def _folder(home: Path, kind: str, spec: dict[str, Any]) -> Path:
    names = (
        "model", "prompts", "limit", "max_tokens", "turns", "new_tokens", "sampling", "variant", "seed", "device",
        "dtype",
    )  # fmt: skip
    named = {name: spec[name] for name in (*names, "values") if name in names or name in spec}
    return home / kind / digest_of(named)


@contextmanager
def _kept(folder: Path) -> Iterator[Path]:
    """Yield a folder that takes the place of what is damaged; several processes may measure at once."""
    with new_folder(folder) as work:
        yield work
        shutil.rmtree(folder, ignore_errors=True)


def pooled(
    specs: Sequence[dict[str, Any]], home: Path, score: str, progress: Progress = silent
) -> np.ndarray:
    """Return one score of several providers' answers, as one array.

    Besides the names of ``scored`` and ``proven``: ``likelihood:SIGMA`` (of the margins), ``monte_carlo:TRIALS``, and
    ``toploc:K:1`` (one row a token, with the three statistics of its proof).

    Raises:
        InputError: no provider, or no such score.
    """
    if not specs:
        raise InputError("no honest provider is left to compare with: name another one with --set honest=")
    return np.concatenate([_score(spec, home, score, progress).astype(float) for spec in specs])


def _score(spec: dict[str, Any], home: Path, score: str, progress: Progress) -> np.ndarray:
    name, _, number = score.partition(":")
    if name == MONTE_CARLO:
        return simulated(spec, home, int(number), progress)[name]
    if name == "toploc" and number.split(":")[1] == "1":
        proofs = proven(spec, home, progress)
        if score in proofs:
            return proofs[score]
        return np.stack([proofs[f"{score}:{part}"] for part in PROOF_PARTS], 1)
    scores = scored(spec, home, progress)
    if name == "likelihood" and number:
        return difr.likelihood(torch.from_numpy(scores["margin"]), float(number)).numpy()
    if score not in scores:
        raise InputError(f"answers sampled by {spec['sampling']['method']} have no score {score!r}")
    return scores[score]
