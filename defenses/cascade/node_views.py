"""Turn what each node saw of a request into observations for attacks: ``cascade run --record``."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hiddenlab.defenses.cascade.nodes import CompWorker, Partial, Rows
from hiddenlab.models import decoder_layers
from hiddenlab.observation import save_observation
from hiddenlab.sharding import AttnNode, Message, Plan, Positions
from hiddenlab.truths import save_truth
from hiddenlab.types import GroundTruth, Observation, ObservationInfo, Site


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

    def observations(self, model: str, signature: Sequence[float], dtype: str) -> list[Observation]:
        """Return one observation for each stream, layer and key shard, with the rows of all passes by position.

        Args:
            model, signature: of the weights, see ``hiddenlab.types.ObservationInfo``.
            dtype: in which the nodes computed.
        """
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
    seen: Seen, plan: Plan, comp: CompWorker, layer: int, answers: Mapping[AttnNode, Sequence[Partial]]
) -> None:
    """Record partial outputs that a CompNode received; a row holds m, e (unless compressed) and u of all heads."""
    mine = set(comp.positions)
    for node, parts in answers.items():
        for block, part in zip(plan.blocks(node), parts, strict=True):
            positions = tuple(p for p in plan.splits[block.queries] if p in mine)
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


@contextmanager
def record_layers(
    seen: Seen | None, model: nn.Module, positions: Positions, mine: Callable[[], bool]
) -> Iterator[None]:
    """Record the node's own hidden states: ``embed`` before the first layer, ``resid`` after each.

    Args:
        seen: where to record; None records nothing.
        mine: whether the running pass is this node's; nodes of one process share their model.
    """
    if seen is None:
        yield
        return
    layers = decoder_layers(model)

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        if mine():
            seen.add("embed", 0, positions, (args[0] if args else kwargs["hidden_states"])[0])

    def after(layer: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if mine():
                seen.add("resid", layer, positions, (output[0] if isinstance(output, tuple) else output)[0])

        return hook

    hooks = [layers[0].register_forward_pre_hook(before, with_kwargs=True)]
    hooks += [layer.register_forward_hook(after(i + 1)) for i, layer in enumerate(layers)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def first_layer_view(observations: Sequence[Observation]) -> Observation | None:
    """Join all that a CompNode holds and receives in the first layer into one observation.

    A row is an embedding, then m, e and u of all heads for each key shard (m the logsumexp and e 1 where answers were
    compressed). The facts describe the columns: ``embed`` (width of the embedding), ``heads``, and ``shards``, the
    positions of each key shard. None where the node saw no such rows.
    """
    own = next((o for o in observations if o.info.site == Site(0, "embed")), None)
    answers = [o for o in observations if o.info.site == Site(1, "attn")]
    if own is None or not answers or any(o.info.positions != own.info.positions for o in answers):
        return None
    columns = [own.states.float()]
    for answer in answers:
        heads = int(answer.info.facts["heads"])
        rows = answer.states.float()
        if not answer.info.facts["has_total"]:
            rows = torch.cat([rows[:, :heads], torch.ones_like(rows[:, :heads]), rows[:, heads:]], 1)
        columns.append(rows)
    facts = {
        "node": own.info.facts["node"],
        "scheme": "cascade",
        "embed": own.states.shape[1],
        "heads": answers[0].info.facts["heads"],
        "shards": [list(o.info.facts["keys"]) for o in answers],
    }
    return Observation(torch.cat(columns, 1), replace(own.info, site=Site(1, "attn"), facts=facts))


def second_layer_view(observations: Sequence[Observation]) -> Observation | None:
    """Join what an AttnNode was sent in the second layer into one observation.

    It holds queries, keys and values (``qkv``) where they are of the same rows, else keys and values (``kv``). They are
    functions of the first layer's attention output of each row. None where the node was sent none.
    """
    sent = {o.info.site.stream: o for o in observations if o.info.site.layer == 2}
    if "k" not in sent or "v" not in sent:
        return None
    both = "q" in sent and sent["q"].info.positions == sent["k"].info.positions
    stream = "qkv" if both else "kv"
    states = torch.cat([sent[letter].states for letter in stream], 1)
    return Observation(states, replace(sent["k"].info, site=Site(2, stream)))


def save_seen(
    seen: Sequence[Seen],
    folder: Path,
    *,
    model: str,
    signature: Sequence[float],
    dtype: str,
    tokens: Sequence[int] = (),
) -> dict[str, dict[str, Any]]:
    """Write what nodes saw to ``folder/<node>/<stream>-<layer>.safetensors``.

    CompNodes also get ``partials-1``, AttnNodes ``qkv-2`` or ``kv-2``: the joint views that attacks read.

    Args:
        seen: what nodes saw.
        folder: where to write.
        model, signature, dtype: see ``Seen.observations``.
        tokens: of the prompt and what was generated. Those that any node computed on become ``truth.json`` in each
            folder, which scores attacks on what the node saw.

    Returns:
        For each node, the positions that it saw rows of, files and rows written.
    """
    written: dict[str, dict[str, Any]] = {}
    last = max((p for record in seen for entry in record.entries for p in entry.positions), default=0)
    for record in seen:
        target = folder / re.sub(r"[^A-Za-z0-9]+", "-", record.node).strip("-")
        if record.node in written:  # the request ran again after a node was lost
            target = target.with_name(f"{target.name}-{record.request}")
        target.mkdir(parents=True, exist_ok=True)
        held: set[int] = set()
        files = rows = 0
        observations = record.observations(model, signature, dtype)
        comp = record.node.startswith("CompNode")
        view = first_layer_view(observations) if comp else second_layer_view(observations)
        if view is not None:
            name = "partials-1" if comp else f"{view.info.site.stream}-2"
            save_observation(view, target / f"{name}.safetensors")
        for observation in observations:
            site, positions = observation.info.site, observation.info.positions
            shard = observation.info.facts.get("key_shard")
            name = f"{site.stream}-{site.layer}" + (f"-keys-{shard}" if shard is not None else "")
            save_observation(observation, target / f"{name}.safetensors")
            held.update(positions or ())
            files, rows = files + 1, rows + len(observation.states)
        if held and last < len(tokens):
            save_truth([GroundTruth(tuple(tokens[: last + 1]))], target / "truth.json")
        name = record.node if record.node not in written else f"{record.node}, request {record.request}"
        written[name] = {"positions": sorted(held), "files": files, "rows": rows, "folder": str(target)}
    return written
