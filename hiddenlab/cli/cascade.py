"""Plan, run and serve private inference that is sharded by tokens (``hiddenlab cascade``)."""

from typing import Annotated, Any, Literal

from typer import Option

from hiddenlab import options as o
from hiddenlab import registry
from hiddenlab.cli.console import bars, only_json, print_json, stdout
from hiddenlab.cli.program import Program
from hiddenlab.errors import InputError
from hiddenlab.text import count_of

app = Program("Plan, run and serve private inference that is sharded by tokens (Cascade).")


@app.callback()
def cascade() -> None:
    """Plan, run and serve private inference that is sharded by tokens (Cascade)."""


AlphaOpt = Annotated[int | None, Option("--alpha", metavar="N", help="CompNodes.")]
ClusterOpt = Annotated[int, Option("--c", metavar="N", help="Neighbouring tokens in one cluster.")]
DeltaOpt = Annotated[
    int | None,
    Option("--delta", metavar="N", help="From one cluster of a node to its next; in place of --alpha."),
]
SplitOpt = Annotated[int, Option("--m", metavar="N", help="Query and key shards per CompNode.")]
ShardsOpt = Annotated[
    str | None, Option("--shards", metavar="0,1,4;2,3,5", help="Positions by hand, counted from 0.")
]
SymmetricOpt = Annotated[bool, Option("--symmetric", help="AttnNodes (j, k) and (k, j) are one node.")]


@app.command("plan")
def plan(
    tokens: Annotated[int, Option("--tokens", metavar="N", min=1, help="Tokens of the prompt.")],
    alpha: AlphaOpt = None,
    c: ClusterOpt = 1,
    delta: DeltaOpt = None,
    m: SplitOpt = 1,
    shards: ShardsOpt = None,
    symmetric: SymmetricOpt = False,
    rho: Annotated[
        int, Option("--rho", metavar="N", help="Vocab-matching threshold: unknown tokens in a row, plus 1.")
    ] = 3,
    model: o.ModelOpt = None,
    element_bytes: Annotated[int, Option("--bytes", metavar="N", help="Bytes of a number on the wire.")] = 2,
    bandwidth: Annotated[float, Option("--bandwidth", metavar="GBPS", help="Gigabits a second.")] = 2.0,
    latency: Annotated[float, Option("--latency", metavar="MS", help="Milliseconds, one way.")] = 0.38,
    json: o.JsonOpt = False,
) -> None:
    """Show who would hold which tokens, what they could recover, and what it would cost."""
    with only_json(json):
        result: dict[str, Any] = registry.resolve("cascade", "plan")(
            tokens=tokens, alpha=alpha, c=c, delta=delta, m=m, shards=shards, symmetric=symmetric, rho=rho,
            model=model or "builtin", element_bytes=element_bytes, bandwidth=bandwidth * 1e9 / 8,
            latency=latency / 1e3,
        )  # fmt: skip
    if json:
        print_json(result)
        return
    from hiddenlab.cli.show import cell, holders_picture, rows_table

    screen = stdout()
    settings, cost, attn = result["plan"], result["cost"], result["attn"]
    screen.print(holders_picture(result["holders"], settings["alpha"], screen.width))
    screen.print(
        rows_table(
            result["rows"],
            f"{count_of(settings['tokens'], 'token')} over {count_of(settings['alpha'], 'CompNode')}",
        )
    )
    lines = [
        f"AttnNodes: {settings['attn_nodes']} (β = {settings['beta']}), each with at most "
        f"{count_of(attn['most_tokens'], 'token')}, smallest gap {cell(attn['smallest_gap'])}, at most "
        f"{count_of(attn['most_recoverable_tokens'], 'token')} recoverable",
        f"on the wire, {settings['model']}, {count_of(cost['layers'], 'layer')}: "
        f"{cost['bytes_paper'] / 1e6:.1f} MB with row "
        f"maximum and sum, {cost['bytes_logsumexp'] / 1e6:.1f} MB with one logsumexp; "
        f"{count_of(cost['messages_per_layer'], 'message')} a layer",
        f"time of the traffic alone: {cost['seconds'] * 1e3:.1f} ms at {bandwidth:g} Gbit/s and {latency:g} ms",
        f"recoverable: by vocabulary matching over fewer than {rho} unknown tokens at a time, from left to right",
    ]
    violations = result["violations"]
    if violations:
        more = f" (and {len(violations) - 1} more such gaps)" if len(violations) > 1 else ""
        lines.append(f"not secure by Theorem 7.3: {violations[0]}{more}")
    lines.append(
        "not counted here: partial attention at the first layer gave CompNodes all earlier tokens under every plan "
        "that was measured (attack partial-sums)"
    )
    for line in lines:
        screen.print(line)


BackendOpt = Annotated[
    Literal["local", "wire", "ray"],
    Option("--backend", help="Threads of this process, the same over TCP, or actors of a Ray cluster."),
]
AddressOpt = Annotated[
    str | None,
    Option(
        "--address",
        metavar="HOST:PORT",
        help="A running Ray cluster; default: one of our own, whatever RAY_ADDRESS says.",
    ),
]
TransportOpt = Annotated[
    Literal["tcp", "objects"], Option("--transport", help="From node to node, or through Ray's object store.")
]
TimeoutOpt = Annotated[
    float,
    Option(
        "--timeout",
        metavar="S",
        help="Seconds without any progress after which a node counts as stalled; a slow one is waited for.",
    ),
]
RestartsOpt = Annotated[
    int, Option("--restarts", metavar="N", min=0, help="Lost nodes that may be replaced within an hour.")
]
CompressOpt = Annotated[
    bool,
    Option("--logsumexp/--no-logsumexp", help="Send one logsumexp a row, not row maximum and sum."),
]
WireOpt = Annotated[
    o.Dtype | None, Option("--wire", help="Dtype of numbers on the wire; default: as computed.")
]
CpusOpt = Annotated[float, Option("--cpus", metavar="N", help="CPUs that Ray reserves for each node.")]
GpusOpt = Annotated[float, Option("--gpus", metavar="N", help="GPUs that Ray reserves for each CompNode.")]
NodeDeviceOpt = Annotated[str, Option("--device", help="Of the CompNodes: cpu, cuda.")]
StrategyOpt = Annotated[
    Literal["SPREAD", "STRICT_SPREAD", "PACK"],
    Option("--placement", help="Of nodes on machines; STRICT_SPREAD puts no two on one."),
]


@app.command("run")
def run(
    prompt: o.PromptArg = None,
    alpha: AlphaOpt = None,
    c: ClusterOpt = 1,
    delta: DeltaOpt = None,
    m: SplitOpt = 1,
    shards: ShardsOpt = None,
    symmetric: SymmetricOpt = False,
    compress: CompressOpt = False,
    wire: WireOpt = None,
    model: o.ModelOpt = None,
    dtype: o.DtypeOpt = "float32",
    device: NodeDeviceOpt = "cpu",
    backend: BackendOpt = "local",
    address: AddressOpt = None,
    transport: TransportOpt = "tcp",
    timeout: TimeoutOpt = 60.0,
    restarts: RestartsOpt = 0,
    cpus: CpusOpt = 1.0,
    gpus: GpusOpt = 0.0,
    placement: StrategyOpt = "SPREAD",
    bandwidth: Annotated[
        float | None, Option("--bandwidth", metavar="GBPS", help="Simulate a network: gigabits a second.")
    ] = None,
    latency: Annotated[
        float, Option("--latency", metavar="MS", help="Simulated network: milliseconds, one way.")
    ] = 0.0,
    new_tokens: Annotated[
        int, Option("--new-tokens", metavar="N", min=0, help="Generate so many tokens; 0: one forward pass.")
    ] = 0,
    temperature: Annotated[float, Option("--temperature", metavar="T", help="0 is greedy.")] = 0.0,
    top_k: Annotated[
        int, Option("--top-k", metavar="K", min=0, help="Only among the K likeliest; 0: all.")
    ] = 0,
    top_p: Annotated[
        float, Option("--top-p", metavar="P", help="Only among those with probability P.")
    ] = 1.0,
    seed: o.SeedOpt = 0,
    record: Annotated[
        str | None, Option("--record", metavar="DIR", help="Save what each node saw, as observations.")
    ] = None,
    compare: Annotated[bool, Option("--compare", help="Run the plain model too.")] = False,
    threads: Annotated[int, Option("--threads", metavar="N", min=1, help="Of torch, in each process.")] = 1,
    json: o.JsonOpt = False,
) -> None:
    """Run one forward pass, or generate, over the nodes of a plan."""
    from hiddenlab.prompts import load_prompts

    if prompt is None:
        raise InputError("give a prompt, or '-' to read it from standard input")
    text = load_prompts("-")[0].text if prompt == "-" else prompt
    import torch

    torch.set_num_threads(threads)
    with only_json(json), bars() as progress:
        nodes = registry.resolve("cascade", "backend")(
            kind=backend, model=model or "builtin", dtype=dtype, device=device, compress=compress, wire=wire,
            address=address, transport=transport, timeout=timeout, restarts=restarts, threads=threads, cpus=cpus,
            gpus=gpus, bandwidth=None if bandwidth is None else bandwidth * 1e9 / 8, latency=latency / 1e3,
            strategy=placement,
        )  # fmt: skip
        result: dict[str, Any] = registry.resolve("cascade", "run")(
            prompt=text, backend=nodes, alpha=alpha, c=c, delta=delta, m=m, shards=shards, symmetric=symmetric,
            compare=compare, new_tokens=new_tokens, record=record, progress=progress,
            sampling={"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed},
        )  # fmt: skip
    if json:
        print_json(result)
        return
    from hiddenlab.cli.show import figures_table, rows_table

    screen = stdout()
    per_node = result.pop("nodes")
    seen = result.pop("seen", None)
    screen.print(figures_table([{"figure": "value", **result}], f"cascade, {backend}"))
    for kind in ("CompNode", "AttnNode"):
        rows = [{"node": name, **counters} for name, counters in per_node.items() if name.startswith(kind)]
        screen.print(rows_table(rows, f"{kind}s"))
    if seen is not None:
        rows = [{"node": name, "positions": len(view["positions"]), "rows": view["rows"],
                 "files": view["files"]}
                for name, view in seen.items()]  # fmt: skip
        screen.print(rows_table(rows, f"what each node saw, in {record}"))


@app.command("serve")
def serve(
    alpha: Annotated[int, Option("--alpha", metavar="N", min=1, help="CompNodes.")] = 2,
    c: ClusterOpt = 1,
    m: SplitOpt = 1,
    symmetric: Annotated[bool, Option("--symmetric/--full", help="β(β + 1)/2 AttnNodes, or all β².")] = True,
    compress: CompressOpt = True,
    wire: WireOpt = None,
    model: o.ModelOpt = None,
    dtype: o.DtypeOpt = "float32",
    device: NodeDeviceOpt = "cpu",
    host: Annotated[str, Option("--host", metavar="ADDRESS", help="Where the server listens.")] = "127.0.0.1",
    port: Annotated[int, Option("--port", metavar="N", min=1, max=65535)] = 8000,
    api_key_env: Annotated[
        str | None,
        Option(
            "--api-key-env", metavar="NAME", help="Environment variable with the key that requests must show."
        ),
    ] = None,
    max_body: Annotated[int, Option("--max-body", metavar="BYTES", min=1, help="Of one request.")] = 1 << 20,
    max_tokens: Annotated[
        int, Option("--max-tokens", metavar="N", min=2, help="Prompt and answer of one request together.")
    ] = 4096,
    max_new_tokens: Annotated[
        int,
        Option(
            "--max-new-tokens", metavar="N", min=1, help="The most that a request may ask for as max_tokens."
        ),
    ] = 1024,
    default_new_tokens: Annotated[
        int,
        Option("--default-new-tokens", metavar="N", min=1, help="Of a request that does not say max_tokens."),
    ] = 256,
    max_running: Annotated[int, Option("--max-running", metavar="N", min=1, help="Requests at once.")] = 16,
    address: AddressOpt = None,
    transport: TransportOpt = "tcp",
    timeout: TimeoutOpt = 60.0,
    restarts: RestartsOpt = 10,
    cpus: CpusOpt = 1.0,
    gpus: GpusOpt = 0.0,
    placement: StrategyOpt = "SPREAD",
    threads: Annotated[int, Option("--threads", metavar="N", min=1, help="Of torch, in each node.")] = 1,
) -> None:
    """Serve a model over Cascade nodes: /v1/completions, /v1/chat/completions, /health, /metrics."""
    import os

    key = os.environ.get(api_key_env) if api_key_env else None
    if api_key_env and not key:
        raise InputError(f"the environment variable {api_key_env} is not set")
    nodes = registry.resolve("cascade", "backend")(
        kind="ray", model=model or "builtin", dtype=dtype, device=device, compress=compress, wire=wire,
        address=address, transport=transport, timeout=timeout, restarts=restarts, threads=threads, cpus=cpus,
        gpus=gpus, strategy=placement,
    )  # fmt: skip
    screen = stdout()

    def ready() -> None:
        where = f"http://{host}:{port}/v1"
        screen.print(f"serving {nodes.model} at {where}; Ctrl-C stops")

    registry.resolve("cascade", "serve")(
        backend=nodes, ready=ready, key=key, alpha=alpha, c=c, m=m, symmetric=symmetric, host=host, port=port,
        limits={
            "body": max_body, "tokens": max_tokens, "running": max_running, "new_tokens": max_new_tokens,
            "default_new_tokens": default_new_tokens,
        },
    )  # fmt: skip
