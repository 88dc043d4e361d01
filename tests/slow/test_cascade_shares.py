"""Two share nodes as actors of a Ray cluster give what one process gives; a dead one is named."""

from collections.abc import Callable
from pathlib import Path

import pytest
import ray
import torch

from hiddenlab.defenses.cascade import cluster, ray_shares
from hiddenlab.defenses.cascade.command import Backend
from hiddenlab.defenses.cascade.generate import generate
from hiddenlab.defenses.cascade.node_state import NodeError
from hiddenlab.errors import InputError
from hiddenlab.sharding import Plan
from hiddenlab.testing import VOCABULARY


def test_ray_gives_what_one_process_gives_and_names_a_dead_node(tiny: Callable[..., str]) -> None:
    path = tiny("gemma2")
    tokens = torch.randint(0, VOCABULARY, (9,), generator=torch.Generator().manual_seed(1))
    whole = Plan.clustered(9, 9, alpha=1)
    with Backend(model=path, harden="shares").start(2, 1, False) as local:
        expected, answer = local.forward(tokens, whole), list(generate(local, tokens, whole, new_tokens=5))
    with Backend(kind="ray", model=path, harden="shares", cpus=0.1).start(2, 1, False) as cascade:
        # Sums modulo 2^64 are exact, so that only the client's own arithmetic could differ.
        assert torch.allclose(cascade.forward(tokens, whole), expected, atol=1e-6)
        assert list(generate(cascade, tokens, whole, new_tokens=5)) == answer
        assert cascade.healthy() == {"ShareNode 0": "ok", "ShareNode 1": "ok"}
        counts = cascade.counters()
        assert counts["ShareNode 0"]["rounds"] == counts["ShareNode 1"]["rounds"] == 6 * 16
        ray.kill(cascade.peers[1]._actor, no_restart=True)  # type: ignore[attr-defined]
        try:
            cascade.forward(tokens, whole)
        except NodeError as error:
            assert error.node == "ShareNode 1"
        else:
            raise AssertionError("a dead node answers")
        assert cascade.healthy()["ShareNode 1"] == "ShareNode 1 died"
    assert not ray.is_initialized()


def test_an_unknown_model_is_refused_before_a_cluster_starts(tmp_path: Path) -> None:
    try:
        Backend(kind="ray", model=f"{tmp_path}/none", harden="shares").start(2, 1, False)
    except InputError as error:
        assert "none" in str(error)
    assert not ray.is_initialized()


@pytest.mark.parametrize(("spec", "module"), [("shares", ray_shares), ("client:first=1,last=1", cluster)])
def test_nodes_with_another_checkpoint_than_the_client_are_refused(
    tiny: Callable[..., str], monkeypatch: pytest.MonkeyPatch, spec: str, module: object
) -> None:
    monkeypatch.setattr(
        module, "checkpoint_digest", lambda ref: "the client's"
    )  # nodes have processes of their own
    with pytest.raises(InputError, match=r"0 holds another checkpoint .* than the client"):
        Backend(kind="ray", model=tiny("llama"), harden=spec, cpus=0.1).start(2, 1, False)
    assert not ray.is_initialized()
