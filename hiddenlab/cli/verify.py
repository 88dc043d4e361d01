"""``hiddenlab verify``: did a provider run what it advertises, and what could it have smuggled out?"""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer import Argument, Option

from hiddenlab import registry
from hiddenlab.cli import options as o
from hiddenlab.cli.console import bars, only_json, print_json, stdout
from hiddenlab.errors import InputError

REJECTED = 1  # exit code where something was checked and found wrong

app = typer.Typer(no_args_is_help=True, help="Inference verification: simulate, prove, check, score, audit.")


@app.callback()
def verify() -> None:
    """Inference verification: simulate, prove, check, score, audit."""


FileArg = Annotated[Path, Argument(metavar="FILE", help="Transcripts, one request a line of JSON.")]
OutArg = Annotated[Path, Option("--out", metavar="FILE", help="Where transcripts are written.")]
ComputeOpt = Annotated[o.Dtype, Option("--dtype", help="In which the model computes.")]
CountOpt = Annotated[
    int,
    Option("--fingerprint", metavar="K", min=0, help="Activation-DiFR with K numbers a position; 0: none."),
]
EveryOpt = Annotated[int, Option("--every", metavar="N", min=1, help="Fingerprint each N-th output token.")]
KindOpt = Annotated[
    Literal["orthogonal", "gaussian"], Option("--projection", help="Directions of the fingerprint.")
]
ProjectionSeedOpt = Annotated[
    int, Option("--projection-seed", metavar="S", min=0, help="Of the directions; both sides need it.")
]
KeyOpt = Annotated[
    str | None,
    Option(
        "--noise-key-env", metavar="NAME",
        help="Environment variable with the key of hashed noise H(K, seed, tokens); default: vLLM's stream.",
    ),
]  # fmt: skip
DraftOpt = Annotated[
    str | None,
    Option(
        "--draft", metavar="VARIANT", help="Speculative decoding's draft model: layers=N, model=NAME, nf4 …"
    ),
]
AheadOpt = Annotated[
    int, Option("--ahead", metavar="K", min=1, help="Tokens that the draft model proposes at a time.")
]
FalseOpt = Annotated[
    float,
    Option(
        "--false-positives", metavar="RATE", min=0.0, max=1.0, help="Share of the honest that is flagged."
    ),
]


def _key(name: str | None) -> str | None:
    import os

    if name is None:
        return None
    if not (found := os.environ.get(name)):
        raise InputError(f"the environment variable {name} is not set")
    return found


def _lens(count: int, seed: int, kind: str) -> Any:
    from hiddenlab.lens import Projection

    return Projection(count, seed, kind) if count else None


def _run(command: str, json: bool, threads: int | None, **options: Any) -> dict[str, Any]:
    import torch

    if threads is not None:
        torch.set_num_threads(threads)
    with only_json(json), bars() as progress:
        found: dict[str, Any] = registry.resolve("verify", command)(**options, progress=progress)
    return found


def _show(found: dict[str, Any], title: str, rows: str | None = None) -> None:
    """Plain figures of an answer as a table, and its rows as another."""
    from hiddenlab.cli.show import figures_table, rows_table

    plain = {k: v for k, v in found.items() if not isinstance(v, dict | list) and k != "format"}
    for name, value in found.items():
        if isinstance(value, dict):
            plain |= {f"{name}: {k}".replace("_", " "): v for k, v in value.items()}
    screen = stdout()
    if plain:
        screen.print(figures_table([{"figure": "value", **plain}], title))
    if rows is not None:
        screen.print(rows_table([_flat(row) for row in found[rows]], rows))


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    return {k.replace("_", " "): "; ".join(map(str, v)) if isinstance(v, list) else v for k, v in row.items()}


@app.command("simulate")
def simulate(
    out: OutArg,
    provider: Annotated[
        str,
        Option(
            "--provider",
            metavar="VARIANT",
            help="What it really does, parts joined by '+': honest, nf4, int8, kv=fp8, temperature=1.1, seed=1, "
            "top_p=0.85, bug=2, system=TEXT, model=NAME, layers=N, batch=N, attention=eager, dtype=…, cache=0.",
        ),
    ] = "honest",
    model: o.ModelOpt = None,
    prompts: o.PromptsOpt = None,
    column: o.ColumnOpt = None,
    limit: o.LimitOpt = None,
    max_tokens: o.MaxTokensOpt = None,
    new_tokens: Annotated[int, Option("--new-tokens", metavar="N", min=1, help="Of each answer.")] = 100,
    method: Annotated[Literal["gumbel", "ipt", "greedy"], Option("--method", help="Sampler.")] = "gumbel",
    temperature: Annotated[float, Option("--temperature", metavar="T")] = 1.0,
    top_k: Annotated[int, Option("--top-k", metavar="K", help="0: all.")] = 50,
    top_p: Annotated[float, Option("--top-p", metavar="P")] = 0.95,
    seed: o.SeedOpt = 0,
    proofs: Annotated[bool, Option("--proofs", help="Add TOPLOC proofs.")] = False,
    fingerprint: CountOpt = 0,
    every: EveryOpt = 1,
    projection: KindOpt = "orthogonal",
    projection_seed: ProjectionSeedOpt = 0,
    noise_key_env: KeyOpt = None,
    draft: DraftOpt = None,
    ahead: AheadOpt = 4,
    resume: Annotated[bool, Option("--resume", help="Go on with an existing file.")] = False,
    dtype: ComputeOpt = "bfloat16",
    device: o.DeviceOpt = "auto",
    threads: o.ThreadsOpt = None,
    json: o.JsonOpt = False,
) -> None:
    """Answer prompts as an honest or dishonest provider would, and write its transcripts."""
    options = {"method": method, "temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    found = _run(
        "simulate", json, threads, out=out, provider=provider, model=model or "builtin", prompts=prompts, column=column,
        limit=limit, max_tokens=max_tokens, new_tokens=new_tokens, sampling=options, proofs=proofs,
        lens=_lens(fingerprint, projection_seed, projection), every=every, key=_key(noise_key_env),
        resume=resume, dtype=dtype, device=device, draft=draft, ahead=ahead,
    )  # fmt: skip
    print_json(found) if json else _show(found, "simulated")


@app.command("commit")
def commit(
    file: FileArg,
    out: OutArg,
    model: o.ModelOpt = None,
    fingerprint: CountOpt = 0,
    every: EveryOpt = 1,
    projection: KindOpt = "orthogonal",
    projection_seed: ProjectionSeedOpt = 0,
    dtype: ComputeOpt = "bfloat16",
    device: o.DeviceOpt = "auto",
    threads: o.ThreadsOpt = None,
    json: o.JsonOpt = False,
) -> None:
    """Add TOPLOC proofs and fingerprints to transcripts, from one prefill of each."""
    found = _run(
        "commit", json, threads, path=file, out=out, model=model, dtype=dtype, device=device,
        lens=_lens(fingerprint, projection_seed, projection), every=every,
    )  # fmt: skip
    print_json(found) if json else _show(found, "proven")


@app.command("check")
def check(
    file: FileArg,
    model: o.ModelOpt = None,
    fingerprint: CountOpt = 0,
    every: EveryOpt = 1,
    projection: KindOpt = "orthogonal",
    projection_seed: ProjectionSeedOpt = 0,
    largest_distance: Annotated[
        float,
        Option("--largest-distance", metavar="D", min=0.0, help="Of a fingerprint, relative to its size."),
    ] = 0.1,
    dtype: ComputeOpt = "bfloat16",
    device: o.DeviceOpt = "auto",
    threads: o.ThreadsOpt = None,
    json: o.JsonOpt = False,
) -> None:
    """Check proofs, and fingerprints as agreed on; exit code 1 where a request is rejected or has nothing to check."""
    found = _run(
        "check", json, threads, path=file, model=model, dtype=dtype, device=device,
        lens=_lens(fingerprint, projection_seed, projection), every=every, largest_distance=largest_distance,
    )  # fmt: skip
    print_json(found) if json else _show(found, "checked", "requests")
    if found["counts"]["valid"] < len(found["requests"]):
        raise typer.Exit(REJECTED)


@app.command("score")
def score(
    file: FileArg,
    honest: Annotated[
        Path | None, Option("--honest", metavar="FILE", help="Trusted transcripts, to say what is normal.")
    ] = None,
    model: o.ModelOpt = None,
    false_positives: FalseOpt = 0.01,
    noise_key_env: KeyOpt = None,
    draft: DraftOpt = None,
    ahead: AheadOpt = 4,
    dtype: ComputeOpt = "bfloat16",
    device: o.DeviceOpt = "auto",
    threads: o.ThreadsOpt = None,
    json: o.JsonOpt = False,
) -> None:
    """Token-DiFR: how far tokens are from those of a trusted run with the same seed; exit code 1 if it diverges."""
    found = _run(
        "score", json, threads, path=file, honest=honest, model=model, dtype=dtype, device=device,
        key=_key(noise_key_env), false_positives=false_positives, draft=draft, ahead=ahead,
    )  # fmt: skip
    print_json(found) if json else _show(found, "Token-DiFR", "requests")
    if found["verdict"] and found["verdict"]["diverges"]:
        raise typer.Exit(REJECTED)


@app.command("audit")
def audit(
    folder: Annotated[Path, Argument(metavar="DIR", help="Directory of transcript files, *.jsonl.")],
    model: o.ModelOpt = None,
    sigma: Annotated[float, Option("--sigma", metavar="S", help="Noise of honest logits.")] = 0.1,
    tau: Annotated[
        float, Option("--tau", metavar="P", help="Likelihood below which a token is not safe.")
    ] = 1e-3,
    rank: Annotated[
        int, Option("--rank", metavar="R", min=0, help="Up to this rank it is only suspicious.")
    ] = 8,
    false_positives: FalseOpt = 0.01,
    suspicious: Annotated[
        float, Option("--suspicious", metavar="RATE", help="Share of honest tokens that is suspicious.")
    ] = 0.005,
    ledger: Annotated[
        Path | None,
        Option("--ledger", metavar="FILE", help="Signed ledger in which every request has to stand."),
    ] = None,
    public_key: Annotated[
        str | None, Option("--public-key", metavar="HEX", help="Of who keeps the ledger.")
    ] = None,
    noise_key_env: KeyOpt = None,
    dtype: ComputeOpt = "bfloat16",
    device: o.DeviceOpt = "auto",
    threads: o.ThreadsOpt = None,
    json: o.JsonOpt = False,
) -> None:
    """Classify files of transcripts: quiet, review or quarantine, and the bits a token that could have been sent."""
    found = _run(
        "audit", json, threads, folder=folder, model=model, dtype=dtype, device=device, noise_sd=sigma, threshold=tau,
        rank_cutoff=rank, false_positives=false_positives, suspicious=suspicious, ledger=ledger, public_key=public_key,
        key=_key(noise_key_env),
    )  # fmt: skip
    if json:
        print_json(found)
    else:
        reasons = [(file["file"], file.pop("reasons")) for file in found["files"]]
        for file in found["files"]:
            file.pop("safe", None)
            file.pop("slowdown", None)
        _show(found, "audit", "files")
        for name, why in reasons:
            if why:
                stdout().print(f"{name}: {'; '.join(why)}", highlight=False, markup=False, soft_wrap=True)
    if any(file["class"] == "quarantine" for file in found["files"]):
        raise typer.Exit(REJECTED)


@app.command("record")
def record(
    file: FileArg,
    ledger: Annotated[Path, Option("--ledger", metavar="FILE", help="Made if it does not exist.")],
    key: Annotated[Path, Option("--key", metavar="FILE", help="Private key; made if it does not exist.")],
    json: o.JsonOpt = False,
) -> None:
    """Append transcripts to a hash-chained, signed ledger."""
    found = registry.resolve("verify", "record")(path=file, ledger=ledger, key_file=key)
    print_json(found) if json else _show(found, "recorded")


@app.command("import")
def import_(
    file: Annotated[Path, Argument(metavar="FILE", help='Lines of {"request": …, "response": …}.')],
    out: OutArg,
    model: o.ModelOpt = None,
    json: o.JsonOpt = False,
) -> None:
    """Turn OpenAI-style requests and answers at temperature 0 into transcripts, for 'score'."""
    found = registry.resolve("verify", "import")(path=file, out=out, model=model or "builtin")
    print_json(found) if json else _show(found, "imported")


@app.command("bounds")
def bounds(
    free: Annotated[
        float, Option("--free", metavar="P", help="Share of positions with more than one permitted token.")
    ],
    permitted: Annotated[int, Option("--permitted", metavar="Q", min=2, help="Permitted tokens there.")] = 2,
    slack: Annotated[float, Option("--slack", metavar="E", help="ε of Theorem 4.3.")] = 0.01,
    messages: Annotated[int, Option("--messages", metavar="M", min=1)] = 10_000,
    inspections: Annotated[int, Option("--inspections", metavar="N", min=1)] = 1000,
    alarms: Annotated[int, Option("--alarms", metavar="N", min=1)] = 20,
    false_positives: FalseOpt = 0.01,
    capacity: Annotated[float, Option("--capacity", metavar="BITS", help="C of the game.")] = 100.0,
    bits: Annotated[float, Option("--bits", metavar="N", help="Of the message to be smuggled.")] = 120.0,
    json: o.JsonOpt = False,
) -> None:
    """Bits a token that theorems allow an adversary who is not caught, and his chance in the exfiltration game."""
    found = registry.resolve("verify", "bounds")(
        free=free, permitted=permitted, slack=slack, messages=messages, inspections=inspections, alarms=alarms,
        false_positives=false_positives, capacity=capacity, bits=bits,
    )  # fmt: skip
    print_json(found) if json else _show(found, "bits a token, and the game's bound")


@app.command("sampling-rate")
def sampling_rate(
    share: Annotated[float, Option("--share", metavar="P", help="Share of messages that are dishonest.")],
    confidence: Annotated[float, Option("--confidence", metavar="C")] = 0.99,
    needed: Annotated[int, Option("--needed", metavar="K", min=1, help="Dishonest ones to meet.")] = 1,
    json: o.JsonOpt = False,
) -> None:
    """How many messages have to be verified to meet so many dishonest ones."""
    found = registry.resolve("verify", "sampling-rate")(share=share, confidence=confidence, needed=needed)
    print_json(found) if json else _show(found, "messages to verify")
