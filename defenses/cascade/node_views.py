"""Turn what each node saw of a request into observations for attacks: ``cascade run --record``."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hiddenlab.channels import Channel
from hiddenlab.defenses.cascade.nodes import Answer, Partial, Rows
from hiddenlab.defenses.cascade.passes import Pass
from hiddenlab.defenses.cascade.secret_maps import LayerMaps
from hiddenlab.models.checkpoint import LeftOut, decoder_layers
from hiddenlab.observation import parts_of_attention, save_observations
from hiddenlab.sharding import AttnNode, Message, Positions
from hiddenlab.truths import save_truth
from hiddenlab.types import GroundTruth, Observation, ObservationInfo, Progress, Site, silent


@dataclass(frozen=True)
class Entry:
    """Rows that a node held or received, of one stream and layer, with the position of each row."""

    site: Site
    positions: Positions
    rows: Float[Tensor, "rows d"]
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Seen:
    """Everything that one node saw of one request, in order."""

    node: str
    request: str
    entries: list[Entry] = field(default_factory=list)

    def add(
        self, stream: str, layer: int, positions: Positions, rows: Float[Tensor, "rows d"], **facts: Any
    ) -> None:
        if positions:
            self.entries.append(Entry(Site(layer, stream), positions, rows.detach().cpu().clone(), facts))

    def observations(
        self, model: str, signature: Sequence[float], dtype: str, channel: Sequence[str] = ()
    ) -> list[Observation]:
        """Return one observation for each stream, layer and key shard, with the rows of all passes by position.

        Args:
            model, signature: of the weights, see ``hiddenlab.types.ObservationInfo``.
            dtype: in which the nodes computed. channel: what the client did to his embeddings.
        """
        stages = Channel.parse(channel)
        groups: dict[tuple[str, int, Any], list[Entry]] = {}
        for entry in self.entries:
            name = entry.site.stream, entry.site.layer, entry.facts.get("key_shard")
            groups.setdefault(name, []).append(entry)
        observations = []
        for group in groups.values():
            positions = [p for entry in group for p in entry.positions]
            order = sorted(range(len(positions)), key=positions.__getitem__)
            info = ObservationInfo(
                model,
                tuple(signature),
                group[0].site,
                provider_dtype=dtype,
                positions=tuple(positions[i] for i in order),
                facts={"node": self.node, "scheme": "cascade", **group[-1].facts},
            )
            info = stages.published(info)
            observations.append(Observation(torch.cat([entry.rows for entry in group])[order], info))
        return observations


def record_attn(seen: Seen, messages: Mapping[int, Message], layer: int, rows: Mapping[int, Rows]) -> None:
    """Record queries, keys and values that an AttnNode received in a layer."""
    for comp, sent in rows.items():
        message = messages[comp]
        for stream, positions, tensor in (
            ("q", message.queries, sent.queries),
            ("k", message.keys, sent.keys),
            ("v", message.keys, sent.values),
        ):
            seen.add(stream, layer + 1, positions, tensor.transpose(0, 1).flatten(1))


def record_partials(
    seen: Seen,
    work: Pass,
    held: Iterable[int],
    layer: int,
    answers: Mapping[AttnNode, Sequence[Answer]],
    maps: LayerMaps | None = None,
) -> None:
    """Record partial outputs that a CompNode received; a row holds m, e (unless compressed) and u of all heads.

    Args:
        maps: secret ones, which the node can undo.
    """
    mine, plan = set(held), work.plan
    for node, parts in answers.items():
        for block, part in zip(plan.blocks(node), parts, strict=True):
            assert isinstance(part, Partial)
            if maps is not None:
                part = replace(part, output=maps.restored(part.output))
            positions = tuple(p for p in work.asked(block) if p in mine)
            tensors = [t if t.ndim == 3 else t[..., None] for t in part.tensors]
            rows = torch.cat([t.float().transpose(0, 1).flatten(1) for t in tensors], 1)
            # Rows that see no key have a maximum of minus infinity, which an observation cannot hold.
            rows = rows.clamp(min=torch.finfo(rows.dtype).min)
            facts = {
                "key_shard": block.keys,
                "keys": list(plan.splits[block.keys]),
                "heads": part.output.shape[0],
                "has_total": part.total is not None,
            }
            seen.add("attn", layer + 1, positions, rows, **facts)


def record_merged(seen: Seen, held: Iterable[int], layer: int, output: Float[Tensor, "h rows dv"]) -> None:
    """Record the attention output, which is all that masked sums show a CompNode; see ``joined_answers``."""
    rows = output.float().transpose(0, 1).flatten(1)
    seen.add("attn", layer + 1, tuple(held), rows, heads=output.shape[0])


@contextmanager
def record_layers(
    seen: Seen | None, model: nn.Module, positions: Positions, mine: Callable[[], bool]
) -> Iterator[None]:
    """Record the node's own hidden states: what its first layer gets (``embed`` at layer 0), and ``resid`` after each.

    Args:
        seen: where to record; None records nothing.
        mine: whether the running pass is this node's; nodes of one process share their model.
    """
    if seen is None:
        yield
        return
    layers = [(i, layer) for i, layer in enumerate(decoder_layers(model)) if not isinstance(layer, LeftOut)]
    first = layers[0][0]

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        if mine():
            rows = (args[0] if args else kwargs["hidden_states"])[0]
            seen.add("resid" if first else "embed", first, positions, rows)

    def after(layer: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if mine():
                seen.add("resid", layer, positions, (output[0] if isinstance(output, tuple) else output)[0])

        return hook

    hooks = [layers[0][1].register_forward_pre_hook(before, with_kwargs=True)]
    hooks += [layer.register_forward_hook(after(i + 1)) for i, layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def joined_answers(observations: Sequence[Observation]) -> list[Observation]:
    """Join the partial outputs that a CompNode received, one observation for each layer.

    A row holds m, e and u of all heads for each key shard, side by side (m the logsumexp and e 1 where answers were
    compressed). At the first layer that nodes compute, the state that enters it stands before them: this is what
    attacks read. The facts describe the columns: ``heads``, ``shards``, the positions of each key shard, and at that
    layer ``own``, the state's width. Where sums are masked a row holds the attention output, and there are no
    ``shards``; at later layers it is a stream like any other, without ``heads``.
    """
    groups: dict[int, list[Observation]] = {}
    for one in observations:
        if parts_of_attention(one.info):
            groups.setdefault(one.info.site.layer, []).append(one)
    first, joined = min(groups, default=0), []
    enters = Site(first - 1, "resid" if first > 1 else "embed")
    own = next((o for o in observations if o.info.site == enters), None)
    for layer, answers in groups.items():
        positions = tuple(sorted({p for answer in answers for p in answer.info.positions or ()}))
        facts = {"node": answers[0].info.facts["node"], "scheme": "cascade"}
        columns = [answer.states.float() for answer in answers]
        masked = not all("keys" in answer.info.facts for answer in answers)
        if not masked:
            facts["shards"] = [list(answer.info.facts["keys"]) for answer in answers]
            columns = [_with_totals(answer, positions) for answer in answers]
        if layer == first or not masked:
            facts["heads"] = answers[0].info.facts["heads"]
        if layer == first and own is not None and own.info.positions == positions:
            columns.insert(0, own.states.float())
            facts["own"] = own.states.shape[1]
        info = replace(answers[0].info, positions=positions, facts=facts)
        joined.append(Observation(torch.cat(columns, 1), info))
    return joined


def _with_totals(answer: Observation, positions: Positions) -> Float[Tensor, "rows d"]:
    """Return m, e and u at some positions; rows that were not asked for see no key: the plan left their block out."""
    heads, answered = int(answer.info.facts["heads"]), answer.info.positions or ()
    rows = torch.zeros(len(positions), answer.states.shape[1])
    rows[:, :heads] = torch.finfo(rows.dtype).min
    rows[[positions.index(p) for p in answered]] = answer.states.float()
    if answer.info.facts["has_total"]:
        return rows
    return torch.cat([rows[:, :heads], torch.ones_like(rows[:, :heads]), rows[:, heads:]], 1)


def joined_sent(observations: Sequence[Observation]) -> list[Observation]:
    """Join what an AttnNode was sent in the first two layers of the nodes, one observation for each.

    It holds queries, keys and values (``qkv``) where they are of the same rows, else keys and values (``kv``). In the
    first layer they are functions of each row's input, in the second of the first one's attention output.
    """
    joined = []
    for layer in sorted({o.info.site.layer for o in observations if o.info.site.stream in ("k", "v")})[:2]:
        sent = {o.info.site.stream: o for o in observations if o.info.site.layer == layer}
        if "k" not in sent or "v" not in sent:
            continue
        both = "q" in sent and sent["q"].info.positions == sent["k"].info.positions
        stream = "qkv" if both else "kv"
        states = torch.cat([sent[letter].states for letter in stream], 1)
        joined.append(Observation(states, replace(sent["k"].info, site=Site(layer, stream))))
    return joined


def _by_kind_and_numbers(seen: Seen) -> tuple[bool, list[int]]:
    return not seen.node.startswith("CompNode"), [int(number) for number in re.findall(r"\d+", seen.node)]


def file_name(node: str) -> str:
    """Return the name of a node's file: ``CompNode-7.safetensors``, ``AttnNode-0-16.safetensors``."""
    return re.sub(r"[^A-Za-z0-9]+", "-", node).strip("-") + ".safetensors"


def save_seen(
    seen: Sequence[Seen],
    folder: Path,
    *,
    model: str,
    signature: Sequence[float],
    dtype: str,
    channel: Sequence[str] = (),
    tokens: Sequence[int] = (),
    progress: Progress = silent,
) -> dict[str, dict[str, Any]]:
    """Write what nodes saw, one file for each node, with an observation for each stream and layer.

    CompNodes have ``embed``, ``resid`` and ``attn`` (see ``joined_answers``; behind the nodes' first layer the
    attention output alone where sums are masked), AttnNodes ``q``, ``k`` and ``v``, and at their first two layers also
    ``qkv`` or ``kv`` (see ``joined_sent``), what attacks read. ``load_site`` takes one of them from a file.

    Args:
        seen: what nodes saw.
        folder: where to write.
        model, signature, dtype, channel: see ``Seen.observations``.
        tokens: of the prompt and what was generated. Those that any node computed on become ``truth.json``, which
            scores attacks on what any of the nodes saw.
        progress: called with each node.

    Returns:
        For each node, the positions that it saw rows of, the observations and rows written, and the file.
    """
    written: dict[str, dict[str, Any]] = {}
    last = max((p for record in seen for entry in record.entries for p in entry.positions), default=-1)
    folder.mkdir(parents=True, exist_ok=True)
    if 0 <= last < len(tokens):
        save_truth([GroundTruth(tuple(tokens[: last + 1]))], folder / "truth.json")
    for number, record in enumerate(sorted(seen, key=_by_kind_and_numbers)):
        progress("writing what nodes saw", number, len(seen))
        observations = record.observations(model, signature, dtype, channel)
        if not observations:
            continue
        # Where a node was lost the request ran again, and a node saw two.
        name = record.node if record.node not in written else f"{record.node}, request {record.request}"
        kept = [o for o in observations if not parts_of_attention(o.info)]
        kept += joined_answers(observations) + joined_sent(observations)
        target = folder / file_name(name)
        save_observations(kept, target)
        written[name] = {
            "positions": sorted({p for o in observations for p in o.info.positions or ()}),
            "observations": len(kept),
            "rows": sum(len(o.states) for o in observations),
            "file": str(target),
        }
    progress("writing what nodes saw", len(seen), len(seen))
    return written
