"""``hiddenlab bench mpc``: plain, Cascade, CrypTen and SPU on the same shape in one run (paper, Tables 6 and 7)."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eval import bench_cascade, paper
from eval.bench_cascade import SHAPES
from eval.mpc.run import crypten, spu
from hiddenlab.core import Progress, silent
from hiddenlab.errors import HiddenlabError, InputError
from hiddenlab.registry import parse_numbers

BASELINES: dict[str, tuple[Any, dict[str, str]]] = {
    "CrypTen, 2Quad + quad (MPCFormer)": (crypten, {"variant": "2quad"}),
    "CrypTen, softmax + Puma's GELU": (crypten, {"variant": "puma"}),
    "CrypTen, softmax + tanh GELU": (crypten, {"variant": "exact"}),
    "SPU ABY3, Puma's GELU": (spu, {"variant": "puma", "protocol": "aby3"}),
    "SPU SEMI2K, Puma's GELU": (spu, {"variant": "puma", "protocol": "semi2k"}),
}
REFERENCE = "tcp α=4"  # Cascade's setting to which ratios are taken


def bench(
    model: str = "bert-base",
    max_tokens: int = 128,
    depth: int = 1,
    alphas: str = "1,4,8",
    backends: str = "local,tcp",
    tcp_alpha: int = 4,
    repeats: int = 3,
    only: str = "",
    bandwidth: float | None = None,
    latency: float = 0.0,
    plot: str | None = None,
    seed: int = 0,
    threads: int | None = None,
    timeout: float = 600.0,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Time and bytes of a forward pass: the plain model, Cascade, and MPC libraries as they are.

    Args:
        model: ``bert-base`` or ``bert-large``, random weights, known to all. depth: layers, 0 for all.
        alphas, backends: of Cascade, see the bench ``cascade``. tcp_alpha: largest α that runs as processes (α of 8 are
            72 of them). repeats: of everything.
        only: baselines whose name holds this. bandwidth, latency: of a simulated network, for Cascade over TCP only:
            the libraries' own transports run on bare loopback, which is to their advantage.
        plot: a PNG to draw. timeout: for each baseline, seconds.

    Returns:
        ``rows`` with median seconds and their range, megabytes sent, the largest difference from a plain computation
        of the same formulas, and both as ratios to Cascade with α = 4 over TCP in this run; ``published``, the
        figures of the papers, which are for the full model on other machines.

    Raises:
        InputError: an unknown shape. HiddenlabError: the plot cannot be written.
    """
    if model not in SHAPES:
        raise InputError(f"unknown shape {model!r}; known are {', '.join(SHAPES)}")
    shape = _shape(model)
    depth = depth or shape["layers"]
    numbers = parse_numbers("alphas", str(alphas))
    for name, value, least in (("repeats", repeats, 1), ("depth", depth, 1), ("tcp_alpha", tcp_alpha, 1)):
        if not isinstance(value, int) or value < least:
            raise InputError(f"{name} must be a whole number of at least {least}, not {value!r}")
    chosen = {name: how for name, how in BASELINES.items() if only in name}
    if not chosen:
        raise InputError(f"no baseline's name holds {only!r}; they are {', '.join(BASELINES)}")
    if plot is not None and not Path(plot).resolve().parent.is_dir():
        raise InputError(f"the folder of {plot} does not exist")
    cascades: list[dict[str, Any]] = []
    network = "none"
    for backend in (part.strip() for part in backends.split(",")):
        fitting = [str(alpha) for alpha in numbers if backend != "tcp" or alpha <= tcp_alpha]
        if not fitting:
            continue
        result = bench_cascade.bench(
            model=model, depth=depth, max_tokens=max_tokens, alphas=",".join(fitting), backends=backend,
            repeats=repeats, bandwidth=bandwidth, latency=latency, seed=seed, threads=threads, progress=progress,
        )  # fmt: skip
        cascades += result["rows"]
        network = result["network"]
    rows = [
        {
            "scheme": "plain", "seconds": statistics.median(r["plain_seconds"] for r in cascades) if cascades else None,
            "megabytes": 0.0, "error": 0.0,
        }
    ]  # fmt: skip
    for row in cascades:
        rows.append(
            {
                "scheme": f"Cascade, {row['setting']}", "seconds": row["seconds"],
                "seconds_low": row["seconds_low"], "seconds_high": row["seconds_high"],
                "megabytes": row["mb_on_wire"], "megabytes_formula": row["mb_formula"], "error": row["max_difference"],
            }
        )  # fmt: skip
    job = {
        **{name: shape[name] for name in ("width", "inner", "heads", "vocabulary")},
        "layers": depth, "tokens": max_tokens, "seed": seed, "repeats": repeats, "threads": threads or 1,
    }  # fmt: skip
    for i, (name, (run, how)) in enumerate(chosen.items()):
        progress("running MPC baselines", i, len(chosen))
        rows.append(
            {
                "scheme": name,
                **_baseline(run, {**job, **how, "embedding": name.startswith("CrypTen, 2")}, timeout),
            }
        )
    progress("running MPC baselines", len(chosen), len(chosen))
    reference = next((row for row in rows if row["scheme"] == f"Cascade, {REFERENCE}"), None)
    for row in rows:
        for name in ("seconds", "megabytes"):
            known = reference is not None and reference.get(name) and row.get(name) is not None
            row[f"{name}_over_cascade"] = row[name] / reference[name] if known and reference else None
    if plot is not None:
        draw(rows, f"{model}, {depth} layer{'s' if depth > 1 else ''}, {max_tokens} tokens", Path(plot))
    return {
        "rows": rows, "published": paper.MPC, "model": model, "layers": depth, "tokens": max_tokens,
        "repeats": repeats, "threads": threads or 1, "network": network, "seed": seed,
        "ratios": f"to Cascade, {REFERENCE}, in this run",
    }  # fmt: skip


def _shape(model: str) -> dict[str, int]:
    settings = dict(SHAPES[model])
    from transformers import AutoConfig

    config = AutoConfig.for_model(settings.pop("type"), **settings)
    return {
        "width": config.hidden_size, "inner": config.intermediate_size, "heads": config.num_attention_heads,
        "layers": config.num_hidden_layers, "vocabulary": config.vocab_size,
    }  # fmt: skip


def _baseline(run: Any, job: Mapping[str, Any], timeout: float) -> dict[str, Any]:
    """A library's row; where it cannot run, the reason."""
    try:
        found = run(job, timeout)
    except HiddenlabError as error:
        return {"seconds": None, "megabytes": None, "error": None, "not_run": str(error)}
    out = {
        "seconds": statistics.median(found["seconds"]),
        "seconds_low": min(found["seconds"]),
        "seconds_high": max(found["seconds"]),
        "megabytes": statistics.median(found["bytes"]) / 1e6,
        "error": found["error"],
    }
    if "rounds" in found:
        out["rounds"] = statistics.median(found["rounds"])
    if "embedding" in found:
        out |= {f"embedding_{name}": value for name, value in found["embedding"].items()}
    return out


def draw(rows: Sequence[Mapping[str, Any]], title: str, out: Path) -> None:
    """Seconds and megabytes of every scheme, as bars on logarithmic scales.

    Raises:
        HiddenlabError: the file cannot be written.
    """
    from hiddenlab.plots import draw_bars

    panels = {"seconds": "seconds", "megabytes": "megabytes sent"}
    try:
        draw_bars(rows, "scheme", panels, title, out)
    except (OSError, ValueError) as error:
        raise HiddenlabError(f"cannot write {out}: {error}") from None
