"""Cascade behind secret sharing: CompNodes add up shares of their rows, and the rest of the model runs on them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from hiddenlab.defenses.cascade.after_mpc import forward_after, rows_from_shares
from hiddenlab.defenses.cascade.hardening import Section
from hiddenlab.defenses.cascade.load import load_cascade_model
from hiddenlab.defenses.cascade.local import LocalCascade
from hiddenlab.defenses.protocols.checkpoint import load_weights
from hiddenlab.defenses.protocols.forward import Plain, walk
from hiddenlab.errors import InputError
from hiddenlab.eval.measures import after_mpc
from hiddenlab.sharding import Plan
from tests.marks import slow_cases

TinyPath = Callable[..., str]
TOKENS = [5, 17, 3, 3, 250, 41, 8, 99, 100]
FRACTION = 16


def shared(values: Tensor, parties: int = 2) -> list[Tensor]:
    whole = (values.double() * 2**FRACTION).round().long()
    masks = [torch.randint(-(2**62), 2**62, whole.shape) for _ in range(parties - 1)]
    return [whole - sum(masks, torch.zeros_like(whole)), *masks]


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "qwen3", "mistral"])
@pytest.mark.parametrize("layers", [0, 1])
def test_the_rest_of_the_model_runs_on_rows_from_shares(
    tiny: TinyPath, architecture: str, layers: int
) -> None:
    path = tiny(architecture)
    with torch.no_grad():
        out = AutoModelForCausalLM.from_pretrained(path)(torch.tensor([TOKENS]), output_hidden_states=True)
    states = out.hidden_states[layers][0]
    cascade = LocalCascade(load_cascade_model(path, section=Section(layers)))
    plan = Plan.clustered(len(TOKENS), 2, alpha=3, m=2)
    found = forward_after(cascade, shared(states, 3), FRACTION, plan)
    assert torch.allclose(found, out.logits[0], atol=2e-3)


def test_each_node_adds_up_its_own_rows() -> None:
    values = torch.randn(9, 4)
    plan = Plan.clustered(9, 2, alpha=3)
    rows = rows_from_shares(shared(values), FRACTION, plan)
    assert set(rows) == {0, 1, 2}
    for i, part in rows.items():
        assert torch.allclose(part, values[list(plan.shards[i])], atol=1e-4)
    for wrong in ([], [torch.zeros(8, 4, dtype=torch.long)]):
        with pytest.raises(InputError, match="not all of a prompt of 9 tokens"):
            rows_from_shares(wrong, FRACTION, plan)


def test_rows_of_other_positions_are_refused(tiny: TinyPath) -> None:
    model = load_cascade_model(tiny("llama"))
    plan = Plan.clustered(4, 2, alpha=2)
    with pytest.raises(InputError, match="rows of its own positions"):
        LocalCascade(model).forward_rows({0: torch.zeros(1, 64), 1: torch.zeros(2, 64)}, plan)


@pytest.fixture
def on_shares(tiny: TinyPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A spec of two prompts, with another protocol in CrypTen's place; ``seen`` is what that was given."""
    path = tiny("llama", tokenizer=True)
    weights, _ = load_weights(path)
    seen: dict[str, Any] = {}

    def stand_in(
        arrays: dict[str, Any], job: dict[str, Any], timeout: float
    ) -> tuple[list[Any], dict[str, Any]]:
        seen.update(arrays)
        states = walk(weights, torch.tensor(arrays["x"]), Plain())[1]
        parts = [share.numpy() for share in shared(states[job["layers"]])]
        return parts, {"seconds": [1.5], "bytes": [2e6]}

    monkeypatch.setattr(after_mpc, "crypten_decoder", stand_in)
    prompts = tmp_path / "p.txt"
    prompts.write_text("hello there\nanother one")
    return {
        "model": path, "prompts": str(prompts), "limit": 2, "max_tokens": 8, "seed": 0, "layers": 1, "timeout": 5.0,
        "seen": seen,
    }  # fmt: skip


def test_measured_with_another_protocol_in_cryptens_place(on_shares: dict[str, Any], tmp_path: Path) -> None:
    seen = on_shares.pop("seen")
    found = after_mpc.after_mpc({**on_shares, "alpha": 2, "c": 2, "m": 1}, tmp_path)
    assert found["logit_error"]["value"] < 2e-3 and found["state_error"]["value"] < 1e-3
    assert found["top1_agreement"]["value"] == 1 and found["megabytes"]["value"] == 2
    weights, _ = load_weights(on_shares["model"])
    assert seen["0.q"].shape == (64, len(weights.blocks[0].q.weight)) and seen["cos"].shape[0] == 8
    typical = np.sqrt((weights.inputs(range(64)).numpy() ** 2).mean(1))
    assert float(seen["0.scale1"]) == pytest.approx(1 / float(np.median(typical)), rel=0.3)


@pytest.mark.parametrize("layers", [0, 4, 99])
def test_layers_that_cannot_run_on_shares(on_shares: dict[str, Any], tmp_path: Path, layers: int) -> None:
    del on_shares["seen"]
    with pytest.raises(InputError, match="1 to 3 layers of"):
        after_mpc.after_mpc({**on_shares, "layers": layers, "alpha": 2, "c": 2, "m": 1}, tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("small_probes")
@pytest.mark.parametrize(
    ("channel", "attack", "tolerant", "read"),
    [
        *slow_cases(
            ("identity", "vocab-match", True, 1.0),
            ("shard:alpha=2,c=2,node=0", "missing-tokens:budget=500", True, 0.25),
        ),
        ("shard:alpha=2,c=2,node=0", "vocab-match:search=speculative", False, 0.25),
    ],
)
def test_what_comp_nodes_add_up_is_read(
    on_shares: dict[str, Any], tmp_path: Path, channel: str, attack: str, tolerant: bool, read: float
) -> None:
    del on_shares["seen"]
    spec = {**on_shares, "device": "cpu", "channel": channel, "attack": attack, "tolerant": tolerant}
    found = after_mpc.after_mpc_attack(spec, tmp_path)
    assert found["token_accuracy"]["value"] >= read
    if tolerant:  # the threshold is that of the approximations, which here are of 2^-16 only
        assert found["epsilon"]["value"] < 0.1
    again = after_mpc.after_mpc_attack(spec, tmp_path)  # what was put on shares is taken up again
    assert again["token_accuracy"] == found["token_accuracy"]
