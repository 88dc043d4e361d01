"""``hiddenlab cascade``: private inference sharded by tokens: plan it, and run it in one process."""

from typing import Annotated, Any

import typer
from typer import Option

from hiddenlab import registry
from hiddenlab.cli import options as o
from hiddenlab.cli.console import only_json, print_json, stdout
from hiddenlab.errors import InputError

app = typer.Typer(no_args_is_help=True, help="Cascade: private inference sharded by tokens.")


@app.callback()
def cascade() -> None:
    """Cascade: private inference sharded by tokens."""


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
        rows_table(result["rows"], f"{settings['tokens']} tokens over {settings['alpha']} CompNodes")
    )
    lines = [
        f"AttnNodes: {settings['attn_nodes']} (β = {settings['beta']}), each with at most "
        f"{attn['most_tokens']} tokens, smallest gap {cell(attn['smallest_gap'])}, at most "
        f"{attn['most_recoverable_tokens']} tokens recoverable",
        f"on the wire, {settings['model']}, {cost['layers']} layers: {cost['bytes_paper'] / 1e6:.1f} MB with row "
        f"maximum and sum, {cost['bytes_logsumexp'] / 1e6:.1f} MB with one logsumexp; "
        f"{cost['messages_per_layer']} messages a layer",
        f"time of the traffic alone: {cost['seconds'] * 1e3:.1f} ms at {bandwidth:g} Gbit/s and {latency:g} ms",
        f"recoverable: by vocabulary matching over fewer than {rho} unknown tokens at a time, from left to right",
    ]
    found = result["violations"]
    if found:
        more = f" (and {len(found) - 1} more such gaps)" if len(found) > 1 else ""
        lines.append(f"not secure by Theorem 7.3: {found[0]}{more}")
    for line in lines:
        screen.print(line, highlight=False, markup=False)


@app.command("run")
def run(
    prompt: o.PromptArg = None,
    alpha: AlphaOpt = None,
    c: ClusterOpt = 1,
    delta: DeltaOpt = None,
    m: SplitOpt = 1,
    shards: ShardsOpt = None,
    symmetric: SymmetricOpt = False,
    compress: Annotated[
        bool, Option("--logsumexp", help="Send one logsumexp a row, not row maximum and sum.")
    ] = False,
    model: o.ModelOpt = None,
    compare: Annotated[bool, Option("--compare", help="Run the plain model too.")] = False,
    threads: o.ThreadsOpt = None,
    json: o.JsonOpt = False,
) -> None:
    """Run one forward pass over the nodes of a plan, all in this process."""
    from hiddenlab.prompts import load_prompts

    if prompt is None:
        raise InputError("give a prompt, or '-' to read it from standard input")
    text = load_prompts("-")[0].text if prompt == "-" else prompt
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    with only_json(json):
        result: dict[str, Any] = registry.resolve("cascade", "run")(
            prompt=text, alpha=alpha, c=c, delta=delta, m=m, shards=shards, symmetric=symmetric,
            compress=compress, model=model or "builtin", compare=compare,
        )  # fmt: skip
    if json:
        print_json(result)
        return
    from hiddenlab.cli.show import figures_table

    stdout().print(figures_table([{"figure": "value", **result}], "cascade, in one process"))
