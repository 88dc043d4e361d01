"""Show what the nodes of a Cascade plan read, what it costs, and what the nodes of a run did and saw."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from hiddenlab.cli.console import stdout
from hiddenlab.cli.show import cell, figures_table, holders_picture, rows_table
from hiddenlab.text import count_of

MOST_LINES = 6  # of a table with a line for each node
DID = {
    "client": {"node": "client", "compute": "computing, s", "wait": "waiting, s"},
    "ShareNode": {
        "node": "node", "compute": "computing, s", "rounds": "rounds", "bytes_in": "bytes in", "bytes_out": "bytes out",
    },
    "CompNode": {
        "node": "node", "compute": "computing, s", "send": "sending, s", "wait": "waiting, s", "merge": "merging, s",
    },
    "AttnNode": {
        "node": "node", "passes": "passes answered", "stored": "passes kept", "elements_in": "numbers in",
        "elements_out": "numbers out",
    },
}  # fmt: skip
SAW = {"node": "node", "positions": "positions seen", "rows": "rows recorded"}


def show_plan(result: Mapping[str, Any], link: str) -> None:
    """Print the verdicts first, then the plan, its cost, single attacks, and the plan that leaks least."""
    screen = stdout()
    settings, cost = result["plan"], result["cost"]
    for line in result["summary"]:
        screen.print(line)
    for line in result.get("hide", {}).get("lines", ()):
        screen.print(line)
    if "share_nodes" in settings:
        for line in _on_shares(settings, cost, link):
            screen.print(line)
        return
    attn = result["attn"]
    for line in result["evidence"]:
        screen.print(f"measured: {line}")
    screen.print("Each node by itself: nodes that share what they see read more.\n")
    screen.print(holders_picture(result["holders"], settings["alpha"], screen.width))
    columns = {
        "node": "node", "tokens": "tokens held", "smallest_gap": "smallest gap",
        "by_partial_sums": "read by partial sums", "by_missing_tokens": "read by missing tokens",
        "by_row_matching_alone": "by row matching alone (Theorem 7.3)",
    }  # fmt: skip
    screen.print(
        rows_table(
            short(result["rows"]),
            f"{count_of(settings['tokens'], 'token')} over {count_of(settings['alpha'], 'CompNode')}, single attacks",
            columns,
        )
    )
    lines = [
        f"AttnNodes: {settings['attn_nodes']} (β = {settings['beta']}), each with at most "
        f"{count_of(attn['most_tokens'], 'token')}, smallest gap {cell(attn['smallest_gap'])}; at most "
        f"{attn['most_by_row_matching_alone']} by row matching alone",
        *_kept(settings["harden"], cost),
        f"on the wire, {settings['model']}, {count_of(cost['layers'], 'layer')}: {_bytes(cost)}; "
        f"{count_of(cost['messages_per_layer'], 'message')} a layer",
        f"time of the traffic alone: {cost['seconds'] * 1e3:.1f} ms at {link}",
        f"computation beyond the plain model's: {cost['extra_operations_per_layer'] / 1e6:.2f} million operations a "
        f"layer, {100 * cost['extra_operations_share']:.1f} % of those that multiply attention scores with values",
        f"row matching: from left to right over fewer than {settings['rho']} unknown tokens at a time",
    ]
    if left_out := cost["causal"]["blocks_left_out"]:
        needed, every = cost["causal"], count_of(settings["beta"] ** 2, "block")
        lines.append(
            f"a causal model sends {needed['bytes_' + cost['answers']] / 1e6:.1f} MB of that, in "
            f"{count_of(needed['messages_per_layer'], 'message')} a layer: {left_out} of {every} hold no key that "
            "their queries see, and are left out"
        )
    violations = result["violations"]
    if violations:
        more = f" (and {len(violations) - 1} more such gaps)" if len(violations) > 1 else ""
        lines.append(f"not secure by Theorem 7.3: {violations[0]}{more}")
    for line in [*lines, *best_lines(result)]:
        screen.print(line)


def _bytes(cost: Mapping[str, Any]) -> str:
    """Return the bytes of a plan by the form of its answers."""
    plain = f"{cost['bytes_paper'] / 1e6:.1f} MB"
    if (form := cost["answers"]) != "paper":
        return f"{cost[f'bytes_{form}'] / 1e6:.1f} MB with {form} sums, {plain} without"
    return f"{plain} with row maximum and sum, {cost['bytes_logsumexp'] / 1e6:.1f} MB with one logsumexp"


def _on_shares(settings: Mapping[str, Any], cost: Mapping[str, Any], link: str) -> list[str]:
    """Return what is said of the cost on shares."""
    return [
        "By construction, as long as the two do not join what they get; nothing was measured.\n",
        f"on the wire, {settings['model']}, {count_of(settings['tokens'], 'token')}: "
        f"{cost['bytes_up_per_layer'] / 1e6:.2f} MB up and {cost['bytes_down_per_layer'] / 1e6:.2f} MB down a layer, "
        f"{(cost['bytes_up'] + cost['bytes_down']) / 1e6:.1f} MB in all {cost['layers']}",
        f"rounds, in which the client asks both nodes and waits: {cost['rounds_per_layer']:g} a layer, "
        f"{cost['rounds']} a pass",
        f"time of the traffic alone: {cost['seconds'] * 1e3:.1f} ms at {link}",
        f"computation: {cost['node_operations'] / 1e9:.2f} GFLOP at each node; {cost['client_operations'] / 1e9:.2f} "
        f"GFLOP at the client ({cost['client_share']:.0%} of the plain model's), in attention and head",
    ]


def _kept(harden: str | None, cost: Mapping[str, Any]) -> list[str]:
    """Return what the client computes under a hardening."""
    if not cost["client_layers"]:
        return []
    share = cost["client_layers"] / (cost["client_layers"] + cost["layers"])
    layers = count_of(cost["client_layers"], "layer")
    return [f"{harden}: the client computes the embedding, {layers} ({share:.0%}) and the head"]


def best_lines(result: Mapping[str, Any]) -> list[str]:
    """Return what is said of the plan that leaks least within the cost."""
    best, searched = result["best"], result["searched"]
    bounds = []
    if searched["most_bytes"] is not None:
        bounds.append(f"{searched['most_bytes'] / 1e6:.1f} MB")
    if searched["most_seconds"] is not None:
        bounds.append(f"{searched['most_seconds'] * 1e3:.1f} ms")
    bound = " and ".join(bounds)
    if best is None:
        return [f"No plan of this prompt costs at most {bound}."]
    comp, attn = best["mean_share_at_comp_node"], best["mean_share_at_attn_node"]
    own_comp, own_attn = searched["own_mean_share_at_comp_node"], searched["own_mean_share_at_attn_node"]
    lines = [
        f"Of {count_of(searched['plans'], 'plan')} of at most {bound} the one that leaks least: {best['options']} "
        f"({best['bytes'] / 1e6:.1f} MB, {count_of(best['comp_nodes'], 'CompNode')}, "
        f"{count_of(best['attn_nodes'], 'AttnNode')}).",
        f"Under it {comp:.0%} of the prompt reach a CompNode on average ({own_comp:.0%} under this plan), {attn:.0%} "
        f"an AttnNode ({own_attn:.0%}); all of it reaches the node with the last token.",
    ]
    return [*lines, "No plan is private: what reaches a node is read, or was not measured."]


def show_run(result: Mapping[str, Any], backend: str, record: str | None) -> None:
    """Print the figures of a run, what its nodes did, and where what they saw is, with the command that attacks it."""
    screen = stdout()
    apart = ("nodes", "seen", "worst", "attack")
    figures = {name: value for name, value in result.items() if name not in apart}
    if isinstance(figures.get("next_token"), str):
        figures["next_token"] = f"{figures['next_token']!r}"  # a space or line break would be nothing to see
    screen.print(figures_table([{"figure": "value", **figures}], f"cascade, {backend}"))
    for kind, columns in DID.items():
        rows = [{"node": name, **result["nodes"][name]} for name in _of_kind(kind, result["nodes"])]
        if rows:
            there = {name: title for name, title in columns.items() if any(name in row for row in rows)}
            screen.print(rows_table(short(rows), f"{kind}s", there))
    if record is None:
        return
    seen = result["seen"]
    for kind in DID:
        rows = [
            {"node": name, "positions": len(seen[name]["positions"]), "rows": seen[name]["rows"]}
            for name in _of_kind(kind, seen)
        ]
        if rows:  # the client computes, and records nothing
            screen.print(rows_table(short(rows), f"what {kind}s saw", SAW))
    screen.print(
        f"{count_of(len(seen), 'file')} in {record}: one for each node, and the prompt in truth.json"
    )
    if result["worst"] is not None:
        screen.print(
            f"\n{result['worst']['sentence']}." + " Read what it saw:" * (result["attack"] is not None)
        )
    if result["attack"] is not None:
        screen.print(result["attack"], soft_wrap=True)


def _of_kind(kind: str, nodes: Mapping[str, Any]) -> list[str]:
    """Return the names of one kind of node by their numbers."""
    return sorted(
        (name for name in nodes if name.startswith(kind)),
        key=lambda name: [int(n) for n in re.findall(r"\d+", name)],
    )


def short(rows: Sequence[Mapping[str, Any]], most: int = MOST_LINES) -> list[Mapping[str, Any]]:
    """Return the first rows, and one that says how many more ``--json`` shows, so that there are at most ``most``."""
    if len(rows) <= most:
        return list(rows)
    return [*rows[: most - 1], {"node": f"{len(rows) - most + 1:,} more: --json"}]
