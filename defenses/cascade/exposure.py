"""Say for each node of a Cascade plan which tokens it reads, by the attacks that were measured, and which it may.

The rules follow from the shape of the plan. Each is as wide as the experiment behind it (``EVIDENCE``) and no wider:
what lies beyond is "not measured", never "private".
"""

import re
from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

from hiddenlab.defenses.cascade.hardening import NOT_HARDENED, SHARE_NODES, Hardening
from hiddenlab.defenses.cascade.node_state import attn_name, comp_name
from hiddenlab.errors import InputError
from hiddenlab.sharding import ROOM, AttnNode, Plan, Positions, rows_for_span
from hiddenlab.text import count_of

NOT_PRIVATE = "NOT PRIVATE"
OWN = "OWN TOKENS ONLY"
NOT_MEASURED = "NOT MEASURED"
NOTHING = "NOTHING TO READ"
CLIENT = "RUN BY THE CLIENT"
RANDOM = "RANDOM NUMBERS ONLY"
STATUSES = (NOT_PRIVATE, NOT_MEASURED, OWN, CLIENT, RANDOM, NOTHING)  # from what is worst to know

MOST_IN_SUM = 8  # unknown tokens of one key shard that a cluster's rows mix; measured for 1, 2, 4 and 8
MOST_NOISE = 0.03  # standard deviation at the client's embeddings behind which sums were read
GAP_PER_ROW = (
    7  # missing tokens for each row behind them: gaps of 7, of 28 behind 4 rows, of 56 behind 8 rows
)
MOST_ROWS = 8
GAP_AT_ATTN = 3  # missing tokens before a row of keys and values
# Query heads of a key/value head, and numbers of a value vector, of the built-in model, where no other is known.
PER_ROW, VALUE_WIDTH = 3, 64


@dataclass(frozen=True)
class Evidence:
    """What was measured of an attack.

    Attributes:
        attack: its name. at: what it reads. figure: share of the tokens that it read; the lowest of the shapes that the
            rule covers. prompts: how many. command: that measures it.
    """

    attack: str
    at: str
    figure: float
    prompts: int
    command: str


EVIDENCE = {
    "partial sums": Evidence(
        "partial-sums", "partial sums at layer 1", 1.0, 50, "hiddenlab eval partial-sums --limit 50"
    ),
    "attention outputs": Evidence(
        "partial-sums", "attention outputs at layer 1", 1.0, 5,
        "hiddenlab eval partial-sums --limit 5 --set masked=true",
    ),
    "sums behind layers": Evidence(
        "partial-sums", "partial sums behind the client's layers, in float32", 1.0, 20, "hiddenlab eval hardening"
    ),
    "outputs behind layers": Evidence(
        "partial-sums", "attention outputs behind the client's layers, in float32", 1.0, 20, "hiddenlab eval hardening"
    ),
    "sums behind noise": Evidence(
        "partial-sums", "partial sums behind the client's layers and noise, none verified", 0.318, 3,
        "hiddenlab eval hardening --limit 3 --set variants=client:first=4,last=4+noise:sigma=0.03",
    ),
    "missing tokens": Evidence(
        "missing-tokens", "gaps between rows at layer 1", 0.936, 20,
        "hiddenlab eval gap-plans --limit 20 --set attacks=missing-tokens --set budget=20000 --set grid=1/8",
    ),
    "cached values": Evidence(
        "missing-tokens", "gaps between keys and values at layer 2", 0.956, 20,
        "hiddenlab eval gap-plans --limit 20 --set attacks=missing-tokens --set grid=1/4 --set streams=qkv,v",
    ),
    "self scores": Evidence(
        "self-scores", "an AttnNode's own tokens, from scores of rows with themselves at layer 1", 1.0, 20,
        "hiddenlab eval secret-coordinates",
    ),
    # Of the tokens up to the node's last row, its own and the missing ones; a quarter of them are its own.
    "rows of values": Evidence(
        "missing-tokens", "tokens up to an AttnNode's last row, its own among them, from its values", 0.955, 20,
        "hiddenlab eval gap-plans --limit 20 --set attacks=missing-tokens --set grid=1/4 --set streams=qkv,v",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Verdict:
    """What one node reads of a prompt.

    Attributes:
        node: its name. status: one of ``STATUSES``.
        own: tokens that it is given, or whose queries, keys and values it is given. others: tokens of other nodes that
            a measured attack reads. not_measured: other tokens that reach it, for which no attack was measured; they
            may be readable. tokens: of the prompt. The rest does not reach it.
        evidence: the key of ``EVIDENCE`` of the attack that reads ``others``; None where none does.
    """

    node: str
    status: str
    own: int
    others: int
    not_measured: int
    tokens: int
    evidence: str | None = None

    @property
    def read(self) -> int:
        """The number of tokens that the node reads."""
        return self.own + self.others

    @property
    def reached(self) -> int:
        """The number of tokens that reach the node in any form."""
        return self.read + self.not_measured

    @property
    def comp(self) -> bool:
        """Whether it is a CompNode."""
        return self.node.startswith("CompNode")

    def to_json(self) -> dict[str, Any]:
        """Return all fields, and the verdict in one sentence."""
        return {**asdict(self), "sentence": sentence([self])}


def verdicts(
    plan: Plan,
    client: Collection[int] = (),
    hardening: Hardening = NOT_HARDENED,
    heads: tuple[int, int] = (PER_ROW, VALUE_WIDTH),
) -> list[Verdict]:
    """Return the verdict on each CompNode, then on each AttnNode.

    Each node is judged by itself; nodes that share what they see read more.

    Args:
        client: CompNodes that the client runs, who knows the prompt.
        hardening: of the plan. Masked sums leave a CompNode its own rows and their attention output to read others'
            tokens from. Behind layers of the client tokens are read in order, up to the first that nothing shows.
        heads: query heads of a key/value head, and numbers of a value vector, of the model.

    Raises:
        InputError: the plan has no such CompNode.
    """
    if wrong := [i for i in client if not 0 <= i < plan.alpha]:
        raise InputError(f"there is no CompNode {wrong[0]}; the plan has 0 to {plan.alpha - 1}")
    comps = [_comp(plan, i, i in client, hardening, heads) for i in range(plan.alpha)]
    attns = [_attn(plan, node) for node in plan.attn_nodes]
    if hardening.first_layer:
        # One stream must show all rows: what is split over queries and values was not measured.
        attns = [
            _unmeasured(one, max(map(len, given)) == one.own and any(map(_gapless, given)))
            for one, given in zip(attns, map(plan.given, plan.attn_nodes), strict=True)
        ]
    if hardening.secret_maps is not None:
        attns = [_behind_maps(plan, one, hardening.first_layer) for one in attns]
    return comps + attns


def shared_verdicts(tokens: int) -> list[Verdict]:
    """Return the verdicts on the two nodes of ``shares``, and on both together.

    They follow from the construction: a seed is drawn without the prompt, and a number less a uniform one is uniform.
    """
    each = [Verdict(f"ShareNode {i}", RANDOM, 0, 0, 0, tokens) for i in range(SHARE_NODES)]
    return [*each, Verdict("ShareNodes together", NOT_PRIVATE, tokens, 0, 0, tokens)]


def _gapless(rows: Positions) -> bool:
    """Return whether there are rows of all tokens up to the last row."""
    return bool(rows) and rows[-1] == len(rows) - 1


def _unmeasured(verdict: Verdict, all_rows: bool) -> Verdict:
    """Return the verdict where no attack was measured that reads other nodes' tokens.

    Args:
        all_rows: the node is given rows of all tokens up to its last, which are attacked like any states.
    """
    if verdict.status in (CLIENT, NOTHING):
        return verdict
    status = NOT_PRIVATE if all_rows else NOT_MEASURED
    return replace(
        verdict, status=status, others=0, not_measured=verdict.not_measured + verdict.others, evidence=None
    )


def _behind_maps(plan: Plan, verdict: Verdict, first_layer: int) -> Verdict:
    """Return the verdict on an AttnNode that is given rows in secret coordinates.

    At the first layer it reads its own tokens where it has queries and keys of the same rows.
    """
    found = _unmeasured(verdict, False)
    if found.status == NOTHING or first_layer or _keys_and_values(plan, verdict) != "qkv":
        return found
    return replace(found, status=NOT_PRIVATE, evidence="self scores")


def _comp(plan: Plan, node: int, client: bool, hardening: Hardening, heads: tuple[int, int]) -> Verdict:
    """Return the verdict on a CompNode."""
    rows, name = plan.shards[node], comp_name(node)
    if not rows:
        return Verdict(name, NOTHING, 0, 0, 0, plan.tokens)
    missing = rows[-1] + 1 - len(rows)
    found = _attacks_on(plan, node, hardening, heads)
    best = max(found, key=lambda attack: len(found[attack]), default="")
    others = len(found.get(best, []))
    if client:
        status = CLIENT
    elif others or len(rows) == plan.tokens or (hardening.first_layer and _gapless(rows)):
        status = NOT_PRIVATE
    else:
        status = NOT_MEASURED if missing else OWN
    return Verdict(
        name, status, len(rows), others, missing - others, plan.tokens, best if others else None
    )  # fmt: skip


def _attacks_on(plan: Plan, node: int, hardening: Hardening, heads: tuple[int, int]) -> dict[str, list[int]]:
    """Return the tokens of other nodes that each attack on a CompNode reads, by the key of ``EVIDENCE``."""
    rows, room = plan.shards[node], ROOM if hardening.first_layer else 1
    masked = outputs_read(rows, *heads, room) if hardening.masked_sums is not None else None
    if hardening.noise is not None:
        # Behind masked sums no attack was written, and stronger noise was not measured.
        if masked is not None or hardening.noise.sigma > MOST_NOISE:
            return {}
        return {"sums behind noise": in_order(rows, sums_read(plan, node, heads[1] - ROOM))}
    if hardening.first_layer:
        if masked is not None:
            return {"outputs behind layers": in_order(rows, masked)}
        return {"sums behind layers": in_order(rows, sums_read(plan, node))}
    sums = {"partial sums": sums_read(plan, node)} if masked is None else {"attention outputs": masked}
    return sums | {"missing tokens": gaps_read(rows)}


def _attn(plan: Plan, node: AttnNode) -> Verdict:
    given = plan.held_by(node)
    if not given:
        return Verdict(attn_name(node), NOTHING, 0, 0, 0, plan.tokens)
    # What is solved for between the keys may be a token whose query the node is given.
    others = len(set(values_read(plan.given(node)[1])) - set(given))
    missing = given[-1] + 1 - len(given)
    return Verdict(
        attn_name(node), NOT_PRIVATE, len(given), others, missing - others, plan.tokens,
        "cached values" if others else None,
    )  # fmt: skip


def sums_read(plan: Plan, node: int, most: int | None = None) -> list[int]:
    """Return the tokens of other nodes that a CompNode reads from partial sums of the first layer, as measured.

    The rows that see the same unknown tokens of a key shard mix their value vectors. It was measured for up to eight
    new tokens of a shard and at least as many rows that see them. Behind the first step of a shard with fewer rows its
    later tokens are not counted, since the attack subtracts what it found before.

    Args:
        most: tokens of one shard that count, where the attack takes out directions in place of tokens; None is all.
    """
    rows = plan.shards[node]
    own, read, last = set(rows), [], max(rows, default=0)
    for split in plan.splits:
        unknown = [p for p in split if p not in own and p < last]
        start = 0
        while start < len(unknown):
            first = bisect_left(rows, unknown[start])
            end = bisect_left(unknown, rows[first])
            until = bisect_left(rows, unknown[end]) if end < len(unknown) else len(rows)
            if end - start > min(until - first, MOST_IN_SUM) or (most is not None and end > most):
                break
            read += unknown[start:end]
            start = end
    return sorted(read)


def outputs_read(
    rows: Positions, per_row: int = PER_ROW, width: int = VALUE_WIDTH, room: int = 1
) -> list[int]:
    """Return the tokens of other nodes that a CompNode reads from attention outputs, as measured.

    Gaps that have more tokens than equations are open until some later rows have enough for all of them.

    Args:
        rows: of the node. per_row, width, room: see ``hiddenlab.sharding.rows_for_span``.
    """
    read, missing, next_one = list[int](), list[int](), 0
    for cluster in _clusters(rows):
        missing += range(next_one, cluster[0])
        next_one = cluster[-1] + 1
        if rows_for_span(len(cluster), per_row, next_one - len(missing), len(missing), width, room):
            read, missing = read + missing, []
    return read


def in_order(rows: Positions, read: Collection[int]) -> list[int]:
    """Return what can be read of some tokens of others if all tokens before each must be known.

    Args:
        rows: of the node, whose tokens are read too.
    """
    known = {*rows, *read}
    first = next((p for p in range(max(known, default=-1) + 1) if p not in known), max(known, default=-1) + 1)
    return sorted(p for p in read if p < first)


def gaps_read(rows: Positions) -> list[int]:
    """Return the tokens that a CompNode reads in the gaps of its shard from its states of layer 1, as measured."""
    return _left_to_right(rows, GAP_PER_ROW, MOST_ROWS)


def values_read(rows: Positions) -> list[int]:
    """Return the tokens that an AttnNode reads in the gaps between its keys and values of layer 2, as measured."""
    return _left_to_right(rows, GAP_AT_ATTN, 1)


def _left_to_right(rows: Positions, per_row: int, most_rows: int) -> list[int]:
    """Return the missing tokens of all gaps up to the first that is too large.

    Args:
        per_row: missing tokens of a gap for each row of the cluster behind it. most_rows: of the cluster that count; a
            gap before the node's first row was measured for one row only.
    """
    read, next_one = list[int](), 0
    for cluster in _clusters(rows):
        if cluster[0] - next_one > per_row * (min(len(cluster), most_rows) if next_one else 1):
            break
        read += range(next_one, cluster[0])
        next_one = cluster[-1] + 1
    return read


def _clusters(rows: Positions) -> list[Positions]:
    """Return the rows that follow each other without a gap."""
    starts = [i for i in range(len(rows)) if i == 0 or rows[i] > rows[i - 1] + 1]
    return [rows[start:end] for start, end in pairwise([*starts, len(rows)])]


def attack_on(plan: Plan, verdict: Verdict, first_layer: int = 0) -> tuple[str, int, str]:
    """Return the attack that reads what the verdict says, and the layer and stream of the observation that it reads.

    Args:
        first_layer: of the nodes.
    """
    if verdict.evidence is not None:
        attack = EVIDENCE[verdict.evidence].attack
        if not verdict.comp:
            layer = 1 if verdict.evidence == "self scores" else 2
            return attack, layer, _keys_and_values(plan, verdict)
        if attack == "partial-sums":
            return attack, first_layer + 1, "attn"
        return attack, 1, "resid"
    # Its own tokens: from states, or from whatever an AttnNode is given.
    if verdict.comp:
        return "vocab-match", max(1, first_layer), "resid"
    queries, keys = plan.given(_node(verdict))
    return "vocab-match", first_layer + 1, "v" if len(keys) >= len(queries) else "q"


def _node(verdict: Verdict) -> AttnNode:
    return AttnNode(*(int(n) for n in re.findall(r"\d+", verdict.node)))


def _keys_and_values(plan: Plan, verdict: Verdict) -> str:
    """Return ``qkv`` where an AttnNode is given queries, keys and values of the same rows, else ``kv``."""
    queries, keys = plan.given(_node(verdict))
    return "qkv" if queries == keys else "kv"


# ---- sentences


def summary(found: Sequence[Verdict]) -> list[str]:
    """Return one sentence for each group of nodes of which the same is true, CompNodes first."""
    groups: dict[tuple[Any, ...], list[Verdict]] = {}
    for one in found:
        key = one.comp, one.status, one.evidence, one.not_measured > 0, one.own == one.tokens
        groups.setdefault(key, []).append(one)
    return [sentence(group) for group in groups.values()]


def sentence(group: Sequence[Verdict]) -> str:
    """Return what is true of nodes of the same kind and status, in one sentence that ends with the status."""
    one, many = group[0], len(group) > 1
    who, read = _names(group), "read" if many else "reads"
    total = count_of(one.tokens, "token")
    its = "their" if many else "its"
    if one.status == RANDOM:
        get = "each get" if many else "gets"
        what = (
            f"{get} random numbers, whatever the prompt, and {'learn' if many else 'learns'} its length alone"
        )
    elif one.node.startswith("ShareNodes"):
        what = f"add their shares, and read all of {total}"
    elif one.status == NOTHING:
        what = f"{'get' if many else 'gets'} no token of this prompt"
    elif one.status == CLIENT:
        what = f"{'are' if many else 'is'} the client's, who knows the prompt"
    elif one.comp and one.own == one.tokens:
        what = f"{'hold' if many else 'holds'} the whole prompt"
    elif not one.comp and one.status == NOT_MEASURED:
        own, get = _range(v.own for v in group), "get" if many else "gets"
        what = f"{get} q, k or v of {own} of {total}, not measured in this form"
    elif not one.comp:
        own, get = _range(v.own for v in group), "they get" if many else "it gets"
        what = f"{read} the {own} of {total} whose q, k or v {get}"
        if one.others:
            what += f", and {_range(v.others for v in group)} more ({EVIDENCE[one.evidence or ''].at})"
    elif not one.others:
        what = f"{read} {its} own {_range(v.own for v in group)} of {total}"
        if one.status == NOT_PRIVATE:
            what += f", since {'they hold' if many else 'it holds'} rows of all tokens up to the last of them"
    elif one.not_measured:
        what = (
            f"{read} {_range(v.read for v in group)} of {total}, {_range(v.others for v in group)} of them held by "
            f"others ({EVIDENCE[one.evidence or ''].at})"
        )
    else:
        # An attack that fails on some prompts reads all of others.
        most = "all" if EVIDENCE[one.evidence or ""].figure > 0.9 else "up to all"
        what = (
            f"{read} {most} tokens before {its} last row, {_range(v.read for v in group)} of {one.tokens:,} "
            f"({EVIDENCE[one.evidence or ''].at})"
        )
    if one.not_measured and one.status != CLIENT:
        what += f"; {_range(v.not_measured for v in group)} earlier ones reach {'them' if many else 'it'}, not measured"
    return f"{who} {what}: {one.status}"


def _names(group: Sequence[Verdict]) -> str:
    if group[0].status == RANDOM:
        return " and ".join(one.node for one in group)
    if not group[0].comp:
        if len(group) == 1:
            return group[0].node
        return f"{len(group):,} AttnNodes such as {group[0].node.removeprefix('AttnNode ')}"
    numbers = [int(one.node.split()[1]) for one in group]
    return f"CompNode{'s' if len(numbers) > 1 else ''} {_runs(numbers)}"


def _runs(numbers: Sequence[int]) -> str:
    """Return ascending numbers as text: ``1 to 7``, ``0, 2 and 5 to 9``."""
    starts = [i for i, n in enumerate(numbers) if i == 0 or n != numbers[i - 1] + 1]
    parts = []
    for start, end in pairwise([*starts, len(numbers)]):
        first, last = numbers[start], numbers[end - 1]
        parts += (
            [f"{first}"]
            if first == last
            else [f"{first}", f"{last}"]
            if last == first + 1
            else [f"{first} to {last}"]
        )
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _range(values: Iterable[int]) -> str:
    ordered = sorted(values)
    low, high = ordered[0], ordered[-1]
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def evidence_lines(found: Sequence[Verdict], hardening: Hardening = NOT_HARDENED) -> list[str]:
    """Return for each attack that some verdict rests on what was measured, and by which command.

    Args:
        hardening: see ``verdicts``.
    """
    used = dict.fromkeys(one.evidence for one in found if one.evidence is not None)
    by_values = [one for one in found if not one.comp and one.status == NOT_PRIVATE]
    measured = any(one.evidence != "self scores" for one in by_values) and not hardening.first_layer
    used |= dict.fromkeys(["rows of values"] * measured)
    lines = [
        f"{it.at}: {100 * it.figure:g} % read, {it.prompts} prompts ({it.command})"
        for it in (EVIDENCE[key] for key in used)
    ]
    return lines
