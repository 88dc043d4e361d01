"""Run a hardened Cascade: nodes between layers that the client computes (``hardening``)."""

import secrets
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from hiddenlab.defenses.cascade.backend import Cascade
from hiddenlab.defenses.cascade.comp_host import ATTENTION_NAME, register_cascade_attention
from hiddenlab.defenses.cascade.hardening import ClientLayers, ClientNoise
from hiddenlab.defenses.cascade.load import first_difference, section_of
from hiddenlab.defenses.cascade.local import LocalCascade
from hiddenlab.defenses.cascade.node_state import NodeError
from hiddenlab.defenses.cascade.node_views import Seen
from hiddenlab.defenses.cascade.passes import Pass
from hiddenlab.defenses.cascade.secret_maps import KEY_BYTES, Stream
from hiddenlab.errors import InputError
from hiddenlab.models.attention import use_attention
from hiddenlab.models.checkpoint import decoder_layers
from hiddenlab.models.choice import CODE, Verdict, facts_of, remembered
from hiddenlab.models.self_check import TWIN_TOLERANCE
from hiddenlab.models.twin import LENGTHS, TRAINED_POSITIONS, build_twin
from hiddenlab.sharding import Plan

CLIENT = "client"  # its name in counters


class BetweenClientLayers(Cascade):
    """A Cascade whose nodes run a model's middle layers, between the client's.

    The client's layers run in this process, as a Cascade of one node, so that it keeps keys as nodes do.

    Args:
        first, nodes, last: run the three sections of one model. noise: added to the embeddings of each request.
    """

    def __init__(
        self, first: LocalCascade, nodes: Cascade, last: Cascade, noise: ClientNoise | None = None
    ) -> None:
        self._first, self._nodes, self._last, self._noise = first, nodes, last, noise
        self._key = secrets.token_bytes(KEY_BYTES)
        self.facts, self.started = last.facts, nodes.started

    def step(self, work: Pass, tokens: Tensor) -> Float[Tensor, "n width"]:
        self._check(work, tokens)
        tokens_so_far = work.plan.tokens
        mine = replace(work, plan=Plan.clustered(tokens_so_far, tokens_so_far, alpha=1), last=False)
        states = self._first.step(mine, self._noised(work, tokens))
        # The client's last layers attend to every row.
        states = self._nodes.step(replace(work, last=False), states)
        return self._last.step(replace(mine, last=work.last), states)

    def _noised(self, work: Pass, tokens: Tensor) -> Tensor:
        """Return the new tokens, or their embeddings with noise, which depends on the request and the position."""
        if self._noise is None:
            return tokens
        model: Any = self._first.model
        rows = tokens if tokens.is_floating_point() else model.get_input_embeddings()(tokens).detach()
        names = (f"{work.request}\0{work.since + i}".encode() for i in range(len(rows)))
        # A seed of torch's generator would not do: it uses 32 bits of one, which can be tried out.
        drawn = torch.stack([Stream(b"\0".join((self._key, name))).normal(rows.shape[1]) for name in names])
        return rows + (self._noise.sigma * drawn).to(rows)

    def close(self, request: str) -> None:
        for part in (self._first, self._nodes, self._last):
            part.close(request)

    def counters(self) -> dict[str, dict[str, Any]]:
        times = [
            counts
            for part in (self._first, self._last)
            for counts in part.counters().values()
            if "compute" in counts
        ]
        # Its merge and its waiting are of nobody else.
        return {CLIENT: {"compute": sum(sum(counts.values()) for counts in times)}} | self._nodes.counters()

    def seen(self) -> list[Seen]:
        return self._nodes.seen()

    def recover(self, error: NodeError) -> bool:
        return self._nodes.recover(error)

    def healthy(self) -> dict[str, str]:
        return self._nodes.healthy()

    def shutdown(self) -> None:
        self._nodes.shutdown()


def check_sections(name: str, config: Any) -> None:
    """Check on a small random copy that a model's layers can be parted, once for each configuration.

    Raises:
        InputError: they cannot, as in a model that adds positions to whatever comes in.
    """
    code = (*CODE, Path(__file__).parent)
    facts = {"config": facts_of(config)}
    if difference := remembered("cascade-sections", facts, Verdict, lambda: _parted(config), code).difference:
        raise InputError(f"the layers of {name} cannot be shared between client and nodes: {difference}")


def _parted(config: Any) -> Verdict:
    try:
        twin = build_twin(config, head=True)
    except InputError as error:
        return Verdict(difference=str(error))
    register_cascade_attention()
    use_attention(twin, ATTENTION_NAME)
    n = max(LENGTHS)
    sections = ClientLayers(1, 1).sections(len(decoder_layers(twin)))
    first, nodes, last = (LocalCascade(section_of(twin, section)) for section in sections)
    found = first_difference(
        BetweenClientLayers(first, nodes, last), twin, n, n - TRAINED_POSITIONS + 2, TWIN_TOLERANCE
    )
    return Verdict(difference=f"a small random copy gives something else so ({found})" if found else "")
