"""Define experiments on what verification fingerprints reveal about the prompt, by bytes per token."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hiddenlab.attacks.fingerprint_inversion import FingerprintInversion
from hiddenlab.channels import Channel
from hiddenlab.config import AttackConfig
from hiddenlab.defenses.fingerprints import request_seed
from hiddenlab.defenses.verification.toploc import proof_bytes
from hiddenlab.errors import InputError
from hiddenlab.eval.cells import MEASURED, NOT_RUN, Cell, Experiment, Figures, Setting, attack_cell
from hiddenlab.eval.measures.attack import as_figures
from hiddenlab.eval.measures.intervals import mean, ratio, share
from hiddenlab.eval.measures.metrics import score_text
from hiddenlab.eval.tables.verification import FEW, base, detected
from hiddenlab.job import build_attack
from hiddenlab.matching.fingerprint_evidence import learn_projection
from hiddenlab.models import TruncatedModel, load_model
from hiddenlab.models.load import load_config, resolve_model
from hiddenlab.projections import ORTHOGONAL, Projection
from hiddenlab.prompts import load_prompts
from hiddenlab.types import Observation, Progress, silent
from hiddenlab.utils.random import generator

PROVIDER = "dtype:bfloat16"
COUNTS, PROOF_COUNTS = (1, 2, 4, 8, 16, 32), (1, 4, 16)  # numbers, and values of proofs, of a token
PROOFS, LOGPROBS, STRIDES = (16, 32, 128, 512), (1, 5, 20), (2, 4)
SECRET_COUNT, STRIDE_COUNT = 8, 32
SHARES = (0.25, 0.5, 1.0, 2.0, 4.0)  # known positions, as multiples of a state's width
OWN_TOKENS, HELD_OUT = 32, 0.2
KEY = "provider"
FIRST_TOKENS = 2048  # first tokens compared


def leak(
    setting: Setting, budget: int = 256, breadth: int = 16, first_tokens: int = FIRST_TOKENS, only: str = ""
) -> Experiment:
    """Measure how much of a prompt TOPLOC proofs, DiFR fingerprints and log-probabilities reveal, by bytes per token.

    Args:
        budget: most candidates tried for one position.
        breadth: paths of the beam.
        first_tokens: first tokens compared.
        only: rows of these names, joined by ``;``, or else whose names contain these parts (all rows take hours of one
            core on a model of 30 layers).

    Raises:
        InputError: ``only`` names no row.
    """
    source = setting.source(4, 12)
    length = source["max_tokens"]
    cells: list[Cell] = []

    effort = _effort(budget, breadth, first_tokens)

    def add(
        label: str, known: str, size: float, stage: str, stream: str = "final_norm", more: str = ""
    ) -> None:
        keys = {"released": label, "attacker": known, "bytes a token": round(size, 2)}
        cells.append(_search(setting, keys, stage, effort + more, stream))

    def proof(k: int) -> float:
        return proof_bytes(k) / length

    add("nothing (language model alone)", "weights", 0.0, "toploc:k=1", more=",evidence=false")
    for k in COUNTS:
        add(f"Activation-DiFR, k = {k}", "directions", 4.0 * k, f"project:count={k},kind={ORTHOGONAL}")
    for k in PROOFS:
        add(f"TOPLOC, {k} values", "proof", proof(k), f"toploc:k={k}")
    for k in LOGPROBS:
        add(f"log-probabilities, {k}", "values and tokens", 8.0 * k, f"logprobs:k={k}", "logits")
    for every in STRIDES:
        stage = f"project:count={STRIDE_COUNT},kind={ORTHOGONAL}"
        label = f"Activation-DiFR, k = {STRIDE_COUNT}, every {every} tokens"
        add(label, "directions", 4.0 * STRIDE_COUNT / every, stage, more=f",every={every}")
    add("TOPLOC, 128 values, keyed indices", "no key", proof(128), "toploc:k=128,keyed=true")
    cells += _secret_cells(setting, source, budget, breadth, first_tokens)
    if only != "":
        cells = _chosen(cells, [part.strip() for part in str(only).split(";")])
    return Experiment(
        "What fingerprints leak of the prompt",
        cells,
        {
            "exact": "exact prompts", "token_accuracy": "token accuracy", "verified": "verified tokens",
            "evaluated_tokens_per_token": "evaluated tokens per token",
            "projection_error": "relative error of the learned projection",
        },
        [
            f"Prompts of {length} tokens; the provider runs bfloat16, the attacker {setting.dtype}. Beam search over "
            f"the model's own proposals: {breadth} paths, at most {budget:,} candidates a position.",
            "Bytes: 4k a fingerprint (float32; the experiment 'activations' sends half of it), 2 + 2k a proof over the "
            "prompt's tokens, 8k for log-probabilities (4 a value, 4 a token id). Fingerprints are taken of the "
            "prompt's positions; who sends those of answers only shows less of the prompt. What the same fingerprints "
            "detect, by numbers and tokens: the experiment 'activations'.",
            "Every so many tokens: rows between are taken as not sent. A secret projection is learned from requests of "
            "the attacker's own, of random tokens; keyed per request, those say nothing of the next one.",
        ],
    )  # fmt: skip


def leak_pareto(
    setting: Setting,
    provider: str = "nf4",
    tokens: int = 4,
    counts: str = ",".join(map(str, COUNTS)),
    proofs: str = ",".join(map(str, PROOF_COUNTS)),
    budget: int = 256,
    breadth: int = 16,
    first_tokens: int = FIRST_TOKENS,
) -> Experiment:
    """Compare bytes per token, detection and recovered prompts of each fingerprint in one picture.

    Args:
        provider: the variant to be detected.
        tokens: number of tokens that detection uses.
        counts: numbers per token of Activation-DiFR's fingerprints.
        proofs: values per token of TOPLOC's proofs.
        budget, breadth, first_tokens: see ``leak``.

    Raises:
        InputError: a number that is not among those of the experiment ``activations``.
    """
    source, answers = setting.source(4, 12), base(setting)
    effort = _effort(budget, breadth, first_tokens)
    if tokens not in FEW:
        raise InputError(f"detection is measured from {', '.join(map(str, FEW))} tokens, not from {tokens}")
    settings = [
        (
            f"activation:orthogonal:{k}",
            f"Activation-DiFR, k = {k}",
            4.0 * k,
            f"project:count={k},kind={ORTHOGONAL}",
        )
        for k in _numbers(counts, COUNTS)
    ]
    for v in _numbers(proofs, PROOF_COUNTS):
        whole = v * source["max_tokens"]
        size = proof_bytes(whole) / source["max_tokens"]
        settings.append((f"toploc:{v}:1:exponents", f"TOPLOC, {v} values a token", size, f"toploc:k={whole}"))
    cells = []
    for score, label, size, stage in settings:
        keys = {"fingerprint": label, "bytes a token": round(size, 2)}
        cells += [
            _search(setting, keys, stage, effort),
            *detected(answers, (provider,), {score: ""}, FEW, keys),
        ]
    return Experiment(
        "What fingerprints detect, and what they leak",
        cells,
        {
            f"auc_{tokens}": f"detection, {tokens} tokens", "token_accuracy": "tokens recovered",
            "exact": "exact prompts",
        },
        [
            f"Detection of {provider}: AUC up to 1 % false positives, standardised (0.5 chance, 1 perfect), from "
            f"{tokens} tokens, as in the experiment 'activations'. Recovery: as in the experiment 'leak', prompts of "
            f"{source['max_tokens']} tokens, at most {budget:,} candidates a position.",
            "Bytes: 4k a fingerprint (float32; rounded to bfloat16, as 'activations' sends it, half of it), 2 + 2k for "
            "one proof over the prompt's tokens (TOPLOC detects from a proof a token: 2 bytes more each; by exponents "
            "and signs alone).",
        ],
        fold=_both,
        over="bytes a token",
    )  # fmt: skip


def _both(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Make one row per fingerprint, from its attack and its detection."""
    merged: dict[str, dict[str, Any]] = {}
    for row in rows:
        name = row["keys"]["fingerprint"]
        entry = merged.setdefault(name, {**row, "figures": {}, "reason": None})
        entry["figures"] |= row["figures"]
        if row["status"] != MEASURED:
            part = "detection" if row["cell"].startswith("detection") else "recovery"
            missing = f"{part}: {row['reason'] or 'not measured yet'}"
            entry["reason"] = f"{entry['reason']}; {missing}" if entry["reason"] else missing
        entry["status"] = MEASURED if entry["figures"] else NOT_RUN
    return list(merged.values())


def _numbers(text: str, known: Sequence[int]) -> list[int]:
    parts = [part.strip() for part in str(text).split(",") if part.strip()]
    if wrong := [part for part in parts if part not in map(str, known)]:
        raise InputError(
            f"{wrong[0]!r} is none of {', '.join(map(str, known))}, which 'activations' measures"
        )
    return [int(part) for part in parts]


def _search(
    setting: Setting, keys: dict[str, Any], stage: str, effort: str, stream: str = "final_norm"
) -> Cell:
    """Make the cell of a beam search for prompts behind one kind of fingerprint."""
    layer = int(load_config(resolve_model(setting.model)).num_hidden_layers)
    source = setting.source(4, 12)
    return attack_cell(
        setting,
        keys,
        layer,
        f"{PROVIDER}+{stage}",
        stream=stream,
        attack=f"fingerprint-inversion:{effort}",
        **source,
    )


def _effort(budget: int, breadth: int, first_tokens: int) -> str:
    """Return the attack's parameters; unchanged ones are left out, so that their cells stay the same.

    Raises:
        InputError: one of them is no whole number from 1.
    """
    effort = f"budget={budget},breadth={breadth}" + (
        f",first_tokens={first_tokens}" if first_tokens != FIRST_TOKENS else ""
    )
    build_attack(AttackConfig(attack=f"fingerprint-inversion:{effort}"))
    return effort


def _chosen(cells: list[Cell], parts: list[str]) -> list[Cell]:
    """Return the rows with exactly that name, or where there is none, those whose names contain it."""
    names = [str(cell.keys["released"]) for cell in cells]
    wanted: set[str] = set()
    for part in parts:
        if not part:
            raise InputError("a row without a name was asked for")
        matches = {name for name in names if name == part} or {name for name in names if part in name}
        if not matches:
            raise InputError(
                f"no row of this experiment is called {part!r}; they are {', '.join(dict.fromkeys(names))}"
            )
        wanted |= matches
    return [cell for cell, name in zip(cells, names, strict=True) if name in wanted]


def _secret_cells(
    setting: Setting, source: dict[str, Any], budget: int, breadth: int, first_tokens: int
) -> list[Cell]:
    """Make the cells of a projection that the attacker learns from a number of its own positions."""
    width = int(load_config(resolve_model(setting.model)).hidden_size)
    cells = []
    for keyed, shares in ((False, SHARES), (True, SHARES[-1:])):
        for part in shares:
            known = max(1, round(part * width))
            spec = {
                **setting.where(), **source, "count": SECRET_COUNT, "known": known, "keyed": keyed, "budget": budget,
                "breadth": breadth,
            }  # fmt: skip
            if first_tokens != FIRST_TOKENS:
                spec["first_tokens"] = first_tokens
            label = "keyed per request" if keyed else "one secret projection"
            keys = {
                "released": f"Activation-DiFR, k = {SECRET_COUNT}, {label}", "attacker": f"{known} own positions",
                "bytes a token": 4.0 * SECRET_COUNT,
            }  # fmt: skip
            cells.append(Cell("learned-projection", spec, keys))
    return cells


def learned_projection(spec: dict[str, Any], folder: Path, progress: Progress = silent) -> Figures:
    """Learn a secret projection from the attacker's own requests, and attack others' prompts with it.

    Args:
        spec: model, prompts, limit, max_tokens, seed, device, dtype; count (of directions), known (positions of the
            attacker's own), keyed (another projection for each request), budget, breadth, first_tokens.
    """
    model = load_model(spec["model"], stream="final_norm", device=spec["device"], dtype=spec["dtype"])
    channel = Channel.parse([PROVIDER])
    prompts = [
        model.tokenize(p, spec["max_tokens"]) for p in load_prompts(spec["prompts"], limit=spec["limit"])
    ]
    learned, error = _learn(spec, model, channel)
    attack = FingerprintInversion(
        spec["breadth"], budget=spec["budget"], first_tokens=spec.get("first_tokens", FIRST_TOKENS), directions=learned,
        error=error
    )  # fmt: skip
    rows = []
    for i, tokens in enumerate(prompts):
        whole, _ = channel.release(model, tokens, generator(spec["seed"], "release", i))
        true = _secret(spec, f"user {i}")
        recovery = attack.fit(whole.info, model, spec["seed"]).recover(
            Observation(true(whole.states), whole.info)
        )
        score = score_text(
            truth_ids=tokens, recovered_ids=recovery.ids,
            truth_text=model.text(tokens), recovered_text=model.text(recovery.ids),
        )  # fmt: skip
        apart = torch.linalg.matrix_norm(learned - (basis := _matrix(true, model.width)))
        off = float(apart / torch.linalg.matrix_norm(basis))
        sure = sum(token.verified for token in recovery.tokens)
        rows.append((score, off, float(sure), float(recovery.evaluated_tokens), float(len(tokens))))
        progress("prompts", i + 1, len(prompts))
    counts = [row[4] for row in rows]
    return as_figures(
        {
            "exact": share([row[0]["exact"] for row in rows]),
            "token_accuracy": mean([row[0]["token_accuracy"] for row in rows]),
            "verified": ratio([row[2] for row in rows], counts),
            "evaluated_tokens_per_token": ratio([row[3] for row in rows], counts),
            "projection_error": mean([row[1] for row in rows]),
        }
    )


def _learn(spec: dict[str, Any], model: TruncatedModel, channel: Channel) -> tuple[Tensor, float]:
    """Return the learned directions, and the typical error of an inner product on held-out positions."""
    draw = generator(spec["seed"], "own requests")
    total = spec["known"] + max(OWN_TOKENS, round(HELD_OUT * spec["known"]))
    own, shown = [], []
    for i in range(-(-total // OWN_TOKENS)):
        tokens = torch.randint(model.vocab_size, (OWN_TOKENS,), generator=draw)
        provided, _ = channel.release(model, tokens.tolist(), draw)
        own.append(model.encode(tokens).float().cpu())
        shown.append(_secret(spec, f"attacker {i}")(provided.states).cpu())
    states, fingerprints = torch.cat(own)[:total], torch.cat(shown)[:total]
    known = spec["known"]
    # The provider's rounding error is about this share of a state; a closer fit would fit the noise.
    directions = learn_projection(states[:known], fingerprints[:known], ridge=known * 2e-4)
    size = torch.linalg.vector_norm(states[known:], dim=1, keepdim=True) / states.shape[1] ** 0.5
    error = float(((states[known:] @ directions - fingerprints[known:]).abs() / size).mean())
    return directions, max(error, 1e-4)


def _secret(spec: dict[str, Any], request: str) -> Projection:
    seed = request_seed(f"{KEY} {spec['seed']}", request if spec["keyed"] else "")
    return Projection(spec["count"], seed, ORTHOGONAL)


def _matrix(projection: Projection, width: int) -> Tensor:
    return projection(torch.eye(width))
