"""Time the plain model, Cascade, CrypTen and SPU on the same shape in one run: ``hiddenlab bench mpc``.

Compare the paper's Tables 6 and 7.
"""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hiddenlab.defenses.cascade.cost import Link
from hiddenlab.errors import HiddenlabError, InputError
from hiddenlab.eval.bench import cascade as bench_cascade
from hiddenlab.eval.bench.cascade import SHAPES
from hiddenlab.eval.mpc.run import crypten, spu
from hiddenlab.eval.tables import paper
from hiddenlab.registry import parse_numbers
from hiddenlab.types import Progress, silent

BASELINES: dict[str, tuple[Any, dict[str, str]]] = {
    "CrypTen, 2Quad + quad (MPCFormer)": (crypten, {"variant": "2quad"}),
    "CrypTen, softmax + Puma's GELU": (crypten, {"variant": "puma"}),
    "CrypTen, softmax + tanh GELU": (crypten, {"variant": "exact"}),
    "SPU ABY3, Puma's GELU": (spu, {"variant": "puma", "protocol": "aby3"}),
    "SPU SEMI2K, Puma's GELU": (spu, {"variant": "puma", "protocol": "semi2k"}),
    "SPU SEMI2K, softmax + tanh GELU": (spu, {"variant": "exact", "protocol": "semi2k"}),
    "SPU SEMI2K, 2Quad + quad": (spu, {"variant": "2quad", "protocol": "semi2k"}),
}
PLACES = {"local": "threads", "tcp": "Ray over TCP", "objects": "Ray's objects", "wire": "on the link"}
REFERENCE, REFERENCE_ON_LINK = (
    "Cascade, Ray over TCP α=4",
    "Cascade, on the link α=4",
)  # to which ratios are taken
# What the screen shows of a row; the rest is in the JSON.
COLUMNS = {
    "scheme": "scheme", "seconds": "s", "seconds_over_cascade": "ratio", "megabytes": "MB",
    "megabytes_over_cascade": "ratio", "rounds": "rounds", "seconds_on_link": "s on link",
    "seconds_on_link_over_cascade": "ratio", "error": "error",
}  # fmt: skip
LINKED = "wire"  # the backend on the simulated link: threads of one process, so that any α fits the memory


def bench(
    model: str = "bert-base",
    max_tokens: int = 128,
    depth: int = 1,
    alphas: str = "1,4,8",
    backends: str = "local,tcp",
    tcp_alpha: int = 4,
    repeats: int = 3,
    only: str = "",
    bandwidth: float = 1.0,
    latency: float = 1.0,
    plot: str | None = None,
    seed: int = 0,
    threads: int | None = None,
    timeout: float = 600.0,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Measure time and bytes of a forward pass: the plain model, Cascade, and unmodified MPC libraries.

    Args:
        model: ``bert-base`` or ``bert-large``, with random public weights.
        depth: layers, 0 for all.
        alphas, backends: of Cascade, see the bench ``cascade``; all on bare loopback.
        tcp_alpha: largest α that runs as processes (α of 8 are 72 of them).
        repeats: of everything.
        only: baselines whose name contains this.
        bandwidth, latency: of a link between all parties, gigabits per second and milliseconds one way; 0 gigabits
            leaves out rows and columns of a link.
        plot: a PNG to draw.
        timeout: for each baseline, seconds.

    Returns:
        ``rows`` with median seconds and their range, megabytes sent, rounds (SPU's are messages of the party that sent
        most), the largest difference from a plain computation of the same formulas (``error``) and of BERT's own
        (``error_exact``), and time and bytes as ratios to Cascade with α = 4 over TCP in this run.
        ``seconds_on_link``: Cascade's nodes are measured on a simulated link. The libraries' transports cannot be
        slowed from outside, so theirs are computed: seconds on loopback, a latency for each round, and each party's
        bytes over the bandwidth. ``published``: the papers' figures for the full model on other machines.

    Raises:
        InputError: the shape is unknown.
        HiddenlabError: the plot cannot be written.
    """
    if model not in SHAPES:
        raise InputError(f"unknown shape {model!r}; known are {', '.join(SHAPES)}")
    shape = _shape(model)
    depth = depth or shape["layers"]
    numbers = parse_numbers("alphas", str(alphas))
    for name, value, most in (
        ("repeats", repeats, None), ("depth", depth, shape["layers"]), ("tcp_alpha", tcp_alpha, None),
        ("max_tokens", max_tokens, shape["positions"]),
    ):  # fmt: skip
        if not isinstance(value, int) or value < 1 or (most is not None and value > most):
            raise InputError(
                f"{name} must be a whole number of at least 1{'' if most is None else f' and at most {most}'}, "
                f"not {value!r}"
            )
    if not timeout > 0:
        raise InputError(f"timeout must be seconds above 0, not {timeout!r}")
    chosen = {name: how for name, how in BASELINES.items() if only in name}
    if not chosen:
        raise InputError(f"no baseline's name holds {only!r}; they are {', '.join(BASELINES)}")
    if plot is not None and not Path(plot).resolve().parent.is_dir():
        raise InputError(f"the folder of {plot} does not exist")
    if not bandwidth >= 0 or not latency >= 0:
        raise InputError("a link has a bandwidth and a latency of at least 0")
    link = Link(bandwidth * 1e9 / 8, latency / 1e3) if bandwidth else None

    def cascade(backend: str, alphas: list[int], **network: Any) -> list[dict[str, Any]]:
        if not alphas:
            return []
        result = bench_cascade.bench(
            model=model, depth=depth, max_tokens=max_tokens, alphas=",".join(map(str, alphas)), backends=backend,
            repeats=repeats, seed=seed, threads=threads, progress=progress, **network,
        )  # fmt: skip
        return list(result["rows"])

    cascades: list[dict[str, Any]] = []
    for backend in (part.strip() for part in backends.split(",")):
        cascades += cascade(backend, [alpha for alpha in numbers if backend != "tcp" or alpha <= tcp_alpha])
    rows = [
        {
            "scheme": "plain", "seconds": statistics.median(r["plain_seconds"] for r in cascades) if cascades else None,
            "megabytes": 0.0, "error": 0.0,
        }
    ]  # fmt: skip
    for row in cascades:
        rows.append(
            {
                "scheme": _cascade_name(row), "seconds": row["seconds"],
                "seconds_low": row["seconds_low"], "seconds_high": row["seconds_high"],
                "megabytes": row["mb_on_wire"], "megabytes_formula": row["mb_formula"], "error": row["max_difference"],
            }
        )  # fmt: skip
    for row in cascade(LINKED, numbers, bandwidth=bandwidth, latency=latency) if link else []:
        rows.append(
            {
                "scheme": _cascade_name(row),
                "seconds_on_link": row["seconds"], "traffic_seconds_formula": row["seconds_formula"],
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
                **_baseline(run, {**job, **how, "embedding": name.startswith("CrypTen, 2")}, timeout, link),
            }
        )
    progress("running MPC baselines", len(chosen), len(chosen))
    for name, of in (
        ("seconds", REFERENCE), ("megabytes", REFERENCE), ("seconds_on_link", REFERENCE_ON_LINK)
    ):  # fmt: skip
        base = next((row.get(name) for row in rows if row["scheme"] == of), None)
        for row in rows:
            row[f"{name}_over_cascade"] = row[name] / base if base and row.get(name) is not None else None
    if plot is not None:
        draw(rows, f"{model}, {depth} layer{'s' if depth > 1 else ''}, {max_tokens} tokens", Path(plot))
    return {
        "rows": rows, "columns": COLUMNS, "published": _published(), "published_source": paper.MPC_SOURCE,
        "model": model, "layers": depth, "tokens": max_tokens,
        "repeats": repeats, "threads": threads or 1, "seed": seed,
        "link": f"{bandwidth:g} Gbit/s, {latency:g} ms one way: simulated for Cascade, reckoned for libraries"
        if link else "none",
        "ratios": f"to {REFERENCE}, on the link to {REFERENCE_ON_LINK}, in this run",
    }  # fmt: skip


def _shape(model: str) -> dict[str, int]:
    settings = dict(SHAPES[model])
    from transformers import AutoConfig

    config = AutoConfig.for_model(settings.pop("type"), **settings)
    return {
        "width": config.hidden_size, "inner": config.intermediate_size, "heads": config.num_attention_heads,
        "layers": config.num_hidden_layers, "vocabulary": config.vocab_size,
        "positions": config.max_position_embeddings,
    }  # fmt: skip


def _cascade_name(row: Mapping[str, Any]) -> str:
    """Return a row's name: where Cascade's nodes ran, and with what α."""
    place, _, alpha = row["setting"].partition(" ")
    return f"Cascade, {PLACES.get(place, place)} {alpha}"


def _published() -> list[dict[str, Any]]:
    """Return the papers' own figures, of whole models on other machines."""
    return [
        {"scheme": scheme, "model": model, "seconds": seconds, "megabytes": 1e3 * gigabytes}
        for model, schemes in paper.MPC.items()
        for scheme, (seconds, gigabytes) in schemes.items()
    ]  # fmt: skip


def _baseline(run: Any, job: Mapping[str, Any], timeout: float, link: Link | None) -> dict[str, Any]:
    """Run a library and return its row; where it cannot run, the row holds the reason."""
    try:
        result = run(job, timeout)
    except HiddenlabError as error:
        return {"seconds": None, "megabytes": None, "error": None, "not_run": str(error)}
    row = {
        "seconds": statistics.median(result["seconds"]),
        "seconds_low": min(result["seconds"]),
        "seconds_high": max(result["seconds"]),
        "megabytes": statistics.median(result["bytes"]) / 1e6,
        "error": result["error"],
        "error_exact": result["error_exact"],
    }
    row["rounds"] = statistics.median(result["rounds"])
    if link is not None:
        each = row["megabytes"] * 1e6 / result["parties"]
        row["seconds_on_link"] = row["seconds"] + row["rounds"] * link.latency + each / link.bandwidth
    if "embedding" in result:
        row |= {f"embedding_{name}": value for name, value in result["embedding"].items()}
    return row


def draw(rows: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Draw seconds (also on a link, where there is one) and megabytes of every scheme as bars on logarithmic scales.

    Raises:
        HiddenlabError: the file cannot be written.
    """
    from hiddenlab.report.bars import draw_bars

    panels = {"seconds": "seconds", "seconds_on_link": "seconds on the link", "megabytes": "megabytes sent"}
    panels = {name: label for name, label in panels.items() if any(row.get(name) for row in rows)}
    try:
        draw_bars(rows, "scheme", panels, title, path)
    except (OSError, ValueError) as error:
        raise HiddenlabError(f"cannot write {path}: {error}") from None
