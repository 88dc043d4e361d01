"""Check whether a provider runs what it advertises, and what it could leak (``hiddenlab verify``)."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer import Argument, Option

from hiddenlab import options as o
from hiddenlab.cli import verdicts
from hiddenlab.cli.console import stdout
from hiddenlab.cli.program import Program
from hiddenlab.cli.verify_run import conduct, explain, show
from hiddenlab.text import count_of

REJECTED = 1  # exit code where something was checked and found wrong
RUNS = Path("runs")

app = Program("Check whether a provider runs what it advertises, and what it could leak.")


@app.callback()
def verify() -> None:
    """Check whether a provider runs what it advertises, and what it could leak."""


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
FormOpt = Annotated[
    Literal["adaptive", "by-place"],
    Option("--noise-form", help="Of hashed noise: H(K, seed, tokens), or H(K, seed) alone."),
]
SentOpt = Annotated[
    Literal["bfloat16", "float16", "float32"],
    Option("--fingerprint-dtype", help="In which fingerprints are sent."),
]
ValuesOpt = Annotated[
    int, Option("--proof-values", metavar="K", min=1, help="Values of a TOPLOC proof; 128 as published.")
]
RuleOpt = Annotated[
    Literal["rows", "largest", "paper"],
    Option(
        "--proof-rule",
        help="Values of a TOPLOC proof. rows: some of every token. largest: of each 32 tokens. paper: as published, "
        "the largest of the whole prompt and of each 32 tokens of the answer.",
    ),
]
ProofDtypeOpt = Annotated[
    Literal["bfloat16", "float32"],
    Option(
        "--proof-dtype",
        help="Of a TOPLOC proof's values: in which they are sent, or compared within the published limits. float32 "
        "needs --dtype float32.",
    ),
]
DraftOpt = Annotated[
    str | None,
    Option(
        "--draft", metavar="VARIANT", help="Speculative decoding's draft model: layers=N, model=NAME, nf4 …"
    ),
]
AheadOpt = Annotated[
    int, Option("--ahead", metavar="K", min=1, help="Tokens that the draft model proposes at a time.")
]
IptOpt = Annotated[
    float,
    Option("--ipt-sigma", metavar="S", help="Noise of honest probabilities: inverse transform sampling."),
]
VerboseOpt = Annotated[
    bool,
    Option("--verbose", rich_help_panel=o.OUTPUT, help="Show the limits and settings of the verdict too."),
]
FalseOpt = Annotated[
    float,
    Option(
        "--false-positives", metavar="RATE", min=0.0, max=1.0, help="Share of the honest that is flagged."
    ),
]


def _projection(count: int, seed: int, kind: str) -> Any:
    from hiddenlab.projections import Projection

    return Projection(count, seed, kind) if count else None


@app.command("simulate")
def simulate(
    out: OutArg,
    provider: Annotated[
        str,
        Option(
            "--provider",
            metavar="VARIANT",
            help="What it really does, parts joined by '+': honest, nf4, int8, weights=fp8, kv=fp8, temperature=1.1, "
            "seed=1, top_p=0.85, bug=2, system=TEXT, model=NAME, layers=N, batch=N, attention=eager, dtype=…, cache=0.",
        ),
    ] = "honest",
    model: o.ModelOpt = None,
    prompts: o.PromptsOpt = None,
    column: o.ColumnOpt = None,
    template: o.TemplateOpt = True,
    limit: o.LimitOpt = None,
    max_tokens: o.MaxTokensOpt = None,
    new_tokens: Annotated[int, Option("--new-tokens", metavar="N", min=1, help="Of each answer.")] = 100,
    method: Annotated[Literal["gumbel", "ipt", "greedy"], Option("--method", help="Sampler.")] = "gumbel",
    temperature: Annotated[float, Option("--temperature", metavar="T")] = 1.0,
    top_k: Annotated[int, Option("--top-k", metavar="K", help="0: all.")] = 50,
    top_p: Annotated[float, Option("--top-p", metavar="P")] = 0.95,
    seed: o.SeedOpt = 0,
    proofs: Annotated[bool, Option("--proofs", help="Add TOPLOC proofs.")] = False,
    proof_values: ValuesOpt = 128,
    proof_rule: RuleOpt = "rows",
    proof_dtype: ProofDtypeOpt = "bfloat16",
    fingerprint: CountOpt = 0,
    fingerprint_dtype: SentOpt = "bfloat16",
    every: EveryOpt = 1,
    projection: KindOpt = "orthogonal",
    projection_seed: ProjectionSeedOpt = 0,
    noise_key_env: KeyOpt = None,
    noise_form: FormOpt = "adaptive",
    draft: DraftOpt = None,
    ahead: AheadOpt = 4,
    resume: Annotated[bool, Option("--resume", help="Go on with an existing file.")] = False,
    dtype: ComputeOpt = "bfloat16",
    device: o.DeviceOpt = "auto",
    threads: o.ThreadsOpt = None,
    runs_dir: o.RunsDirOpt = RUNS,
    no_record: o.NoRecordOpt = False,
    json: o.JsonOpt = False,
) -> None:
    """Answer prompts as an honest or dishonest provider would, and write its transcripts."""
    options = {"method": method, "temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    result = conduct(
        "simulate", json=json, threads=threads, runs_dir=runs_dir, keep=not no_record,
        out=out, provider=provider, model=model or "builtin", prompts=prompts, column=column,
        template=template, limit=limit, max_tokens=max_tokens, new_tokens=new_tokens, sampling=options, proofs=proofs,
        projection=_projection(fingerprint, projection_seed, projection), every=every,
        key_env=noise_key_env, key_form=noise_form, resume=resume, dtype=dtype, device=device, draft=draft,
        ahead=ahead, proof_values=proof_values, proof_rule=proof_rule, fingerprint_dtype=fingerprint_dtype,
        proof_dtype=proof_dtype,
    )  # fmt: skip
    show(result, "simulated", json=json)


@app.command("commit")
def commit(
    file: FileArg,
    out: OutArg,
    model: o.ModelOpt = None,
    proof_values: ValuesOpt = 128,
    proof_rule: RuleOpt = "rows",
    proof_dtype: ProofDtypeOpt = "bfloat16",
    fingerprint: CountOpt = 0,
    fingerprint_dtype: SentOpt = "bfloat16",
    every: EveryOpt = 1,
    projection: KindOpt = "orthogonal",
    projection_seed: ProjectionSeedOpt = 0,
    dtype: ComputeOpt = "bfloat16",
    device: o.DeviceOpt = "auto",
    threads: o.ThreadsOpt = None,
    runs_dir: o.RunsDirOpt = RUNS,
    no_record: o.NoRecordOpt = False,
    json: o.JsonOpt = False,
) -> None:
    """Add TOPLOC proofs and fingerprints to transcripts, from one prefill of each."""
    result = conduct(
        "commit", json=json, threads=threads, runs_dir=runs_dir, keep=not no_record,
        path=file, out=out, model=model, dtype=dtype, device=device,
        projection=_projection(fingerprint, projection_seed, projection), every=every, proof_values=proof_values,
        proof_rule=proof_rule, fingerprint_dtype=fingerprint_dtype, proof_dtype=proof_dtype,
    )  # fmt: skip
    show(result, "proven", json=json)


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
    proof_values: ValuesOpt = 128,
    proof_rule: RuleOpt = "rows",
    proof_dtype: ProofDtypeOpt = "bfloat16",
    no_proofs: Annotated[
        bool, Option("--no-proofs", help="Fingerprints alone were agreed on; else proofs may not be missing.")
    ] = False,
    dtype: ComputeOpt = "bfloat16",
    device: o.DeviceOpt = "auto",
    threads: o.ThreadsOpt = None,
    runs_dir: o.RunsDirOpt = RUNS,
    no_record: o.NoRecordOpt = False,
    verbose: VerboseOpt = False,
    json: o.JsonOpt = False,
) -> None:
    """Check proofs, and fingerprints as agreed on; exit code 1 where a request is rejected or has nothing to check."""
    result = conduct(
        "check", json=json, threads=threads, runs_dir=runs_dir, keep=not no_record,
        path=file, model=model, dtype=dtype, device=device,
        projection=_projection(fingerprint, projection_seed, projection), every=every,
        largest_distance=largest_distance, proof_values=proof_values, proof_rule=proof_rule, no_proofs=no_proofs,
        proof_dtype=proof_dtype,
    )  # fmt: skip
    nothing = () if result["coverage"]["tokens"] else ("coverage",)  # counted over valid requests alone
    show(
        result, "checked", "requests", json=json, left_out=("reason", *nothing), verbose=verbose,
        verdict=verdicts.of_check(result, f"{model or 'the advertised model'} in {dtype}"),
    )  # fmt: skip
    if not json:
        explain((row["id"], row["reason"]) for row in result["requests"] if row["verdict"] != "valid")
    if not json and (seen := result["coverage"])["tokens"]:
        stdout().print(
            f"Valid requests: {seen['covered']} of {count_of(seen['tokens'], 'token')} were compared directly. "
            f"A change in the other {seen['without_value']} shows only if it changes the values of later tokens. "
            "Compared is not proven: limits leave room, so that a single replaced token may pass; a fingerprint "
            "of every token (--fingerprint) leaves less.",
            style="dim", soft_wrap=True, highlight=False,
        )  # fmt: skip
    if result["counts"]["valid"] < len(result["requests"]):
        raise typer.Exit(REJECTED)


@app.command("score")
def score(
    file: FileArg,
    honest: Annotated[
        Path | None, Option("--honest", metavar="FILE", help="Trusted transcripts, to say what is normal.")
    ] = None,
    model: o.ModelOpt = None,
    false_positives: FalseOpt = 0.01,
    score_name: Annotated[
        Literal["margin", "likelihood", "mismatch", "monte_carlo", "cross_entropy"] | None,
        Option(
            "--score",
            help="The verdict's score; default: the first of the first three that all requests have.",
        ),
    ] = None,
    sigma: Annotated[
        float, Option("--sigma", metavar="S", help="Noise of honest logits: likelihood, Monte Carlo.")
    ] = 0.08,
    noise_on: Annotated[
        Literal["both", "one"], Option("--noise-on", help="Logits of a comparison that have it.")
    ] = "both",
    ipt_sigma: IptOpt = 0.01,
    monte_carlo: Annotated[
        int,
        Option(
            "--monte-carlo",
            metavar="N",
            min=0,
            max=1_000_000,
            help="Trials of the Monte Carlo score; 0: none.",
        ),
    ] = 0,
    noise_key_env: KeyOpt = None,
    noise_form: FormOpt = "adaptive",
    draft: DraftOpt = None,
    ahead: AheadOpt = 4,
    dtype: ComputeOpt = "bfloat16",
    device: o.DeviceOpt = "auto",
    threads: o.ThreadsOpt = None,
    runs_dir: o.RunsDirOpt = RUNS,
    no_record: o.NoRecordOpt = False,
    verbose: VerboseOpt = False,
    json: o.JsonOpt = False,
) -> None:
    """Measure how far tokens are from a trusted run's, and whether that is more than honest ones are (Token-DiFR).

    Exit codes: 0 they do not diverge; 1 they do, or there is no verdict (no --honest, or too few requests); 2 it could
    not be done.
    """
    result = conduct(
        "score", json=json, threads=threads, runs_dir=runs_dir, keep=not no_record,
        path=file, honest=honest, model=model, dtype=dtype, device=device,
        key_env=noise_key_env, key_form=noise_form, false_positives=false_positives, draft=draft, ahead=ahead,
        score_name=score_name, sigma=sigma, noise_on=noise_on, ipt_sigma=ipt_sigma, trials=monte_carlo,
    )  # fmt: skip
    show(
        result, "Token-DiFR", "requests", json=json, left_out=("undecided",), verbose=verbose,
        verdict=verdicts.of_score(result, false_positives),
    )  # fmt: skip
    if result["verdict"] is None or result["verdict"]["diverges"] is not False:
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
    ipt_sigma: IptOpt = 0.01,
    honest: Annotated[
        Path | None,
        Option("--honest", metavar="FILE", help="Trusted transcripts, to say what perplexity is normal."),
    ] = None,
    ledger: Annotated[
        Path | None,
        Option("--ledger", metavar="FILE", help="Signed ledger in which every request has to stand."),
    ] = None,
    public_key: Annotated[
        str | None, Option("--public-key", metavar="HEX", help="Of who keeps the ledger.")
    ] = None,
    checkpoint: Annotated[
        Path | None,
        Option("--checkpoint", metavar="FILE", help="Of the ledger: shows if its end is missing."),
    ] = None,
    noise_key_env: KeyOpt = None,
    noise_form: FormOpt = "adaptive",
    dtype: ComputeOpt = "bfloat16",
    device: o.DeviceOpt = "auto",
    threads: o.ThreadsOpt = None,
    runs_dir: o.RunsDirOpt = RUNS,
    no_record: o.NoRecordOpt = False,
    verbose: VerboseOpt = False,
    json: o.JsonOpt = False,
) -> None:
    """Classify each transcript file of a directory as quiet, review or quarantine; bound the bits that it carries.

    Exit codes: 0 every file is quiet; 1 one is to be reviewed or in quarantine; 2 it could not be done.
    """
    result = conduct(
        "audit", json=json, threads=threads, runs_dir=runs_dir, keep=not no_record,
        folder=folder, model=model, dtype=dtype, device=device, noise_sd=sigma, threshold=tau,
        rank_cutoff=rank, false_positives=false_positives, suspicious=suspicious, ledger=ledger, public_key=public_key,
        ipt_sigma=ipt_sigma, honest=honest, checkpoint=checkpoint,
        key_env=noise_key_env, key_form=noise_form,
    )  # fmt: skip
    show(
        result, "audit", "files", json=json, left_out=("reasons", "safe", "slowdown", "safe_bits_per_token"),
        verbose=verbose, verdict=verdicts.of_audit(result),
    )  # fmt: skip
    if not json:
        explain((file["file"], "; ".join(file["reasons"])) for file in result["files"])
        stdout().print(
            f"suspicious: less likely than {tau:g}, though among the model's {rank} likeliest tokens. dangerous: less "
            "likely, and not among them; such a token could carry hidden data. bits per token: the most that the "
            "answers could have carried.",
            style="dim", soft_wrap=True,
        )  # fmt: skip
    if any(file["class"] != "quiet" for file in result["files"]):
        raise typer.Exit(REJECTED)


@app.command("import")
def import_(
    file: Annotated[
        Path,
        Argument(
            metavar="FILE",
            help='Lines of {"request": …, "response": …}, an output of the Batch API, or saved streams (data: …).',
        ),
    ],
    out: OutArg,
    model: Annotated[
        str | None,
        Option(
            "--model",
            metavar="NAME",
            help="Whose tokenizer and chat template read the log. Needed unless the log itself says 'builtin'; "
            "transcripts keep the log's own name of the model.",
        ),
    ] = None,
    requests: Annotated[
        Path | None,
        Option(
            "--requests",
            metavar="FILE",
            help="The requests, where FILE has responses alone: the Batch API's input, or requests in the same order.",
        ),
    ] = None,
    skip: Annotated[
        bool, Option("--skip", help="Leave out requests that cannot be imported, and say which and why.")
    ] = False,
    runs_dir: o.RunsDirOpt = RUNS,
    no_record: o.NoRecordOpt = False,
    json: o.JsonOpt = False,
) -> None:
    """Turn a log of OpenAI-style requests and answers at temperature 0 into transcripts, for 'score'.

    Token ids of the log (vLLM's return_token_ids) are taken where they are; else texts are tokenized anew. What cannot
    be imported whole (pictures, penalties, and without token ids tool calls, reasoning …) is refused, with its line.
    """  # fmt: skip
    result = conduct(
        "import", json=json, runs_dir=runs_dir, keep=not no_record, path=file, out=out, model=model, requests=requests,
        skip=skip,
    )  # fmt: skip
    show(result, "imported", json=json)
    if not json:
        explain(("note", line) for line in result["notes"])


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
    tokens: Annotated[int, Option("--tokens", metavar="K", min=1, help="Of an answer (Lemma 4.4).")] = 1000,
    queries: Annotated[
        int, Option("--queries", metavar="N", min=1, help="Answers that the adversary searches (Lemma 4.4).")
    ] = 1_000_000,
    error: Annotated[
        float,
        Option(
            "--error", metavar="E", min=0.0, max=1.0, help="Messages that may arrive wrong (Theorem 2.4)."
        ),
    ] = 0.01,
    rate: Annotated[
        float | None,
        Option("--rate", metavar="BITS", help="A token that the warden lets pass (Theorem 4.1)."),
    ] = None,
    runs_dir: o.RunsDirOpt = RUNS,
    no_record: o.NoRecordOpt = False,
    json: o.JsonOpt = False,
) -> None:
    """Compute the bits per token that theorems allow an uncaught adversary, and his chance in the exfiltration game."""
    result = conduct(
        "bounds", json=json, runs_dir=runs_dir, keep=not no_record,
        free=free, permitted=permitted, slack=slack, messages=messages, inspections=inspections, alarms=alarms,
        false_positives=false_positives, capacity=capacity, bits=bits, tokens=tokens, queries=queries,
        error=error, rate=rate,
    )  # fmt: skip
    show(result, "what the theorems say", json=json)


@app.command("sampling-rate")
def sampling_rate(
    share: Annotated[float, Option("--share", metavar="P", help="Share of messages that are dishonest.")],
    confidence: Annotated[float, Option("--confidence", metavar="C")] = 0.99,
    needed: Annotated[int, Option("--needed", metavar="K", min=1, help="Dishonest ones to meet.")] = 1,
    levels: Annotated[
        list[float] | None,
        Option("--level", metavar="C", help="One more confidence, as a column. Repeatable."),
    ] = None,
    traffic: Annotated[
        int | None,
        Option("--traffic", metavar="N", min=1, help="Messages in all: --level is in percent of them."),
    ] = None,
    runs_dir: o.RunsDirOpt = RUNS,
    no_record: o.NoRecordOpt = False,
    json: o.JsonOpt = False,
) -> None:
    """Compute how many messages have to be verified to meet so many dishonest ones."""
    result = conduct(
        "sampling-rate", json=json, runs_dir=runs_dir, keep=not no_record,
        share=share, confidence=confidence, needed=needed, levels=levels or [], traffic=traffic,
    )  # fmt: skip
    show(result, "messages to verify", "shares", json=json)
