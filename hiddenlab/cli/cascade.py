"""Plan, run and serve private inference that is sharded by tokens (``hiddenlab cascade``)."""

from typing import Annotated, Any, Literal

from typer import Option

from hiddenlab import options as o
from hiddenlab import registry
from hiddenlab.cli import cluster
from hiddenlab.cli.console import bars, only_json, print_json, stderr, stdout
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
HardenOpt = Annotated[
    str | None,
    Option(
        "--harden",
        metavar="SPEC",
        help="Change what nodes get: client:first=6,last=1, noise, secret-maps, masked-sums, several with '+'; or "
        "shares (two nodes, without a plan), which alone hides a prompt.",
    ),
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
    harden: HardenOpt = None,
    hide: Annotated[
        float | None,
        Option(
            "--hide",
            metavar="0.05",
            help="Name the cheapest --harden that was measured to leave nodes less of others' tokens.",
        ),
    ] = None,
    rho: Annotated[
        int, Option("--rho", metavar="N", help="Vocab-matching threshold: unknown tokens in a row, plus 1.")
    ] = 3,
    model: o.ModelOpt = None,
    element_bytes: Annotated[int, Option("--bytes", metavar="N", help="Bytes of a number on the wire.")] = 2,
    bandwidth: Annotated[float, Option("--bandwidth", metavar="GBPS", help="Gigabits a second.")] = 2.0,
    latency: Annotated[float, Option("--latency", metavar="MS", help="Milliseconds, one way.")] = 0.38,
    client: Annotated[
        str | None,
        Option("--client", metavar="0,3", help="CompNodes that the client runs, who knows the prompt."),
    ] = None,
    most_bytes: Annotated[
        float | None,
        Option(
            "--at-most-bytes",
            metavar="N",
            min=0,
            help="Cost of the best plan, a pass; default: that of this plan.",
        ),
    ] = None,
    most_seconds: Annotated[
        float | None, Option("--at-most-seconds", metavar="S", min=0, help="The same, time of the traffic.")
    ] = None,
    json: o.JsonOpt = False,
) -> None:
    """Say what each node of a plan reads, show who holds which tokens, and what it costs."""
    with only_json(json):
        result: dict[str, Any] = registry.resolve("cascade", "plan")(
            tokens=tokens, alpha=alpha, c=c, delta=delta, m=m, shards=shards, symmetric=symmetric, rho=rho,
            model=model or "builtin", element_bytes=element_bytes, bandwidth=bandwidth * 1e9 / 8,
            latency=latency / 1e3, client=client, most_bytes=most_bytes, most_seconds=most_seconds, harden=harden,
            hide=hide,
        )  # fmt: skip
    if json:
        print_json(result)
        return
    from hiddenlab.cli.plans import show_plan

    show_plan(result, f"{bandwidth:g} Gbit/s and {latency:g} ms")


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
FolderOpt = Annotated[
    str | None,
    Option("--folder", metavar="DIR", help="Files of the cluster that 'cascade up' or 'join' started here."),
]
TlsOpt = Annotated[
    bool, Option("--tls/--no-tls", help="Refuse a cluster of several machines that sends in clear.")
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
    harden: HardenOpt = None,
    compress: CompressOpt = False,
    wire: WireOpt = None,
    model: o.ModelOpt = None,
    dtype: o.DtypeOpt = "float32",
    device: NodeDeviceOpt = "cpu",
    backend: BackendOpt = "local",
    address: AddressOpt = None,
    folder: FolderOpt = None,
    tls: TlsOpt = True,
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
            address=address, folder=folder, tls=tls, transport=transport, timeout=timeout, restarts=restarts,
            threads=threads, cpus=cpus, gpus=gpus,
            bandwidth=None if bandwidth is None else bandwidth * 1e9 / 8, latency=latency / 1e3, strategy=placement,
            harden=harden,
        )  # fmt: skip
        result: dict[str, Any] = registry.resolve("cascade", "run")(
            prompt=text, backend=nodes, alpha=alpha, c=c, delta=delta, m=m, shards=shards, symmetric=symmetric,
            compare=compare, new_tokens=new_tokens, record=record, progress=progress,
            sampling={"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed},
        )  # fmt: skip
    if json:
        print_json(result)
        return
    from hiddenlab.cli.plans import show_run

    show_run(result, backend, record)


@app.command("serve")
def serve(
    alpha: Annotated[int, Option("--alpha", metavar="N", min=1, help="CompNodes.")] = 2,
    c: ClusterOpt = 1,
    m: SplitOpt = 1,
    symmetric: Annotated[bool, Option("--symmetric/--full", help="β(β + 1)/2 AttnNodes, or all β².")] = True,
    harden: Annotated[
        str | None,
        Option(
            "--harden",
            metavar="shares",
            help="Two nodes compute on additive shares, without a plan. Nothing else hides a prompt from nodes.",
        ),
    ] = None,
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
            "--api-key-env",
            metavar="NAME",
            help="Environment variable with the keys, separated by commas, of which requests must show one.",
        ),
    ] = None,
    cors: Annotated[
        list[str] | None,
        Option(
            "--cors",
            metavar="ORIGIN",
            help="Web pages of this origin may ask the server, as https://chat.example; again for more, '*' for any.",
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
    max_running: Annotated[int, Option("--max-running", metavar="N", min=1, help="Answers at once.")] = 16,
    address: AddressOpt = None,
    folder: FolderOpt = None,
    tls: TlsOpt = True,
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

    given = os.environ.get(api_key_env, "") if api_key_env else ""
    keys = [key for part in given.split(",") if (key := part.strip())]
    if api_key_env and not keys:
        raise InputError(
            f"the environment variable {api_key_env} holds no key; set it, several with commas between"
        )
    nodes = registry.resolve("cascade", "backend")(
        kind="ray", model=model or "builtin", dtype=dtype, device=device, compress=compress, wire=wire,
        address=address, folder=folder, tls=tls, transport=transport, timeout=timeout, restarts=restarts,
        threads=threads, cpus=cpus, gpus=gpus, strategy=placement, harden=harden,
    )  # fmt: skip
    shares = nodes.hardening.shares is not None
    if harden is not None and not shares:
        raise InputError(
            f"serve takes --harden shares alone: behind {harden!r} CompNodes read prompts, or no attack was tried; "
            "hiddenlab cascade plan --harden says which"
        )
    screen = stdout()
    stderr().print(_what_nodes_read(alpha, c, m, symmetric, shares), soft_wrap=True)
    stderr().print("starting Ray and the nodes; this takes from half a minute to some minutes")

    def ready() -> None:
        where = f"http://{host}:{port}/v1"
        screen.print(f"serving {nodes.model} at {where}; Ctrl-C stops")

    registry.resolve("cascade", "serve")(
        backend=nodes, ready=ready, keys=keys, origins=cors or [], alpha=alpha, c=c, m=m, symmetric=symmetric,
        host=host, port=port,
        limits={
            "body": max_body, "tokens": max_tokens, "running": max_running, "new_tokens": max_new_tokens,
            "default_new_tokens": default_new_tokens,
        },
    )  # fmt: skip


def _what_nodes_read(alpha: int, c: int, m: int, symmetric: bool, shares: bool) -> str:
    """Say what the nodes of a server read of short prompts, and which command tells of others."""
    if shares:
        return "each node gets random numbers; both together read every prompt"
    options = f"--alpha {alpha} --c {c} --m {m}" + " --symmetric" * symmetric
    return (
        f"CompNode 0 reads all of a prompt of up to {count_of(c, 'token')}. What nodes read of a prompt of 96 tokens: "
        f"hiddenlab cascade plan --tokens 96 {options}"
    )


cluster.add_to(app)
