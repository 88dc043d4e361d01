"""Partial attention behind noise of the client names tokens, by likelihoods of own text; nothing is verified."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hiddenlab.attacks.partial_sums import PartialSums
from hiddenlab.attacks.partial_sums import noise_model as module
from hiddenlab.attacks.partial_sums.clusters import Cluster, clusters_of
from hiddenlab.attacks.partial_sums.noise_model import Evidence, Tempered, sums_of
from hiddenlab.attacks.partial_sums.sums import View
from hiddenlab.channels import Channel
from hiddenlab.defenses.cascade import command
from hiddenlab.errors import InputError, NotApplicableError
from hiddenlab.eval.cells import Setting
from hiddenlab.eval.measures.partial_sums import node_view
from hiddenlab.eval.tables.sharding import partial_sums as experiment
from hiddenlab.matching.inner_layer import InnerLayer
from hiddenlab.models import TruncatedModel, load_model
from hiddenlab.observation import load_site
from hiddenlab.sharding import Plan
from hiddenlab.testing import KV_HEADS, VOCABULARY
from hiddenlab.truths import load_truth
from hiddenlab.types import AttackResult, Observation
from hiddenlab.utils.random import generator

LoadModel = Callable[..., TruncatedModel]
TinyPath = Callable[..., str]
PLAN = Plan.clustered(24, 3, alpha=3)


@pytest.fixture(autouse=True)
def little_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Learn on less own text than usual."""
    monkeypatch.setattr(module, "WINDOWS", 8)
    monkeypatch.setattr(module, "TEXTS", 2)


def tokens_of(count: int, seed: int = 0) -> list[int]:
    return torch.randint(0, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def streams(tiny_model: LoadModel, architecture: str) -> dict[str, TruncatedModel]:
    return {name: tiny_model(architecture, 2, name) for name in "qkv"} | {"own": tiny_model(architecture, 1)}


def recover(tiny_model: LoadModel, architecture: str, observation: Observation) -> AttackResult:
    model = tiny_model(architecture, 2, "attn")
    return PartialSums(budget=VOCABULARY).fit(observation.info, model).recover(observation)


def noisy_states(
    tiny_model: LoadModel, architecture: str, tokens: list[int], sigma: float
) -> dict[str, torch.Tensor]:
    channel = Channel.parse([f"gaussian:sigma={sigma}"])
    return {
        name: channel.release(model, tokens, generator(0, "release", 0))[0].states
        for name, model in streams(tiny_model, architecture).items()
    }


@pytest.mark.parametrize(("architecture", "sigma"), [("llama", 0.002), ("gemma2", 0.01)])
def test_a_node_reads_others_tokens_behind_noise(
    tiny_model: LoadModel, architecture: str, sigma: float
) -> None:
    tokens = tokens_of(24)
    seen = node_view(streams(tiny_model, architecture), tokens, PLAN, 2, noise=sigma)
    assert seen.info.channel == (f"gaussian:sigma={sigma}",)
    found = recover(tiny_model, architecture, seen)
    assert found.ids == tokens[:18]
    # Nothing is exact behind noise, so that nothing is verified, right as it may be.
    assert not any(one.verified for one in found.tokens)
    assert [one.row >= 0 for one in found.tokens] == [p in PLAN.shards[2] for p in range(18)]
    assert all(one.evaluated >= VOCABULARY for one in found.tokens) and found.evaluated_tokens > 0


@pytest.mark.slow
def test_strong_noise_is_read_less_and_verifies_nothing(tiny_model: LoadModel) -> None:
    tokens = tokens_of(24)
    found = recover(tiny_model, "llama", node_view(streams(tiny_model, "llama"), tokens, PLAN, 2, noise=1.0))
    right = sum(a == b for a, b in zip(found.ids, tokens, strict=False))
    assert right < 9 and not any(one.verified for one in found.tokens)


def test_sums_of_own_text_are_those_of_a_node(tiny_model: LoadModel) -> None:
    tokens = tokens_of(24)
    states = noisy_states(tiny_model, "llama", tokens, 0.1)
    layer = InnerLayer(tiny_model("llama", 2, "attn"), "float32")
    seen = View.of(node_view(streams(tiny_model, "llama"), tokens, PLAN, 2, noise=0.1), torch.device("cpu"))
    made = sums_of(layer, seen.positions, seen.shards, states["q"], states["k"], states["v"])
    assert seen.divisor is not None and made.divisor is not None
    for one, other in ((made.divisor, seen.divisor), (made.sees, seen.sees), (made.output, seen.output)):
        assert torch.allclose(one, other, atol=1e-5)
    # Without the noise they are not.
    clean = View.of(node_view(streams(tiny_model, "llama"), tokens, PLAN, 2), torch.device("cpu"))
    assert not torch.allclose(made.output, clean.output, atol=1e-3)


def test_spans_hold_the_noised_values_and_weights_of_their_keys(tiny_model: LoadModel) -> None:
    tokens = tokens_of(24)
    states = noisy_states(tiny_model, "llama", tokens, 0.1)
    layer = InnerLayer(tiny_model("llama", 2, "attn"), "float32")
    positions, shards = list(PLAN.shards[2]), [list(split) for split in PLAN.splits]
    view = sums_of(layer, positions, shards, states["q"], states["k"], states["v"])
    clusters = clusters_of(view, layer, layer.by_head(states["q"][positions]))
    assert sorted(clusters) == [p for p in range(17) if p not in positions]
    whitener = torch.linalg.cholesky(
        torch.eye(states["v"].shape[1], dtype=torch.float64) * 2 + 0.1
    )  # any that is no multiple of the identity
    for position, cluster in clusters.items():
        assert cluster.readable
        values, rotated = states["v"].double(), states["k"].double()
        inside = cluster.values_left(values[position : position + 1], whitener)
        # Earlier keys of the same shard are taken out, so that their values are inside as well.
        (shard,) = (keys for keys in shards if position in keys)
        outside = cluster.values_left(values[[p for p in range(24) if p not in shard]], whitener)
        assert float(inside) < 1e-6 * float(outside.min())
        _against_least_squares(cluster, values, whitener)
        # Weights of the right key lie among the columns; of the right key in another place they do not.
        tight = torch.eye(rotated.shape[1], dtype=torch.float64) * 1e-6
        ones = torch.ones(24, dtype=torch.float64)
        assert int(cluster.weights_nats(rotated, position, tight, ones).argmax()) in cluster.new
        right = cluster.missing(values[cluster.new])
        twice = [cluster.new[0], cluster.new[0], *cluster.new[2:]]
        assert right < -10 < cluster.missing(values[twice])


def _against_least_squares(cluster: Cluster, values: torch.Tensor, whitener: torch.Tensor) -> None:
    """Compare with the slow way: the least squares of all mixes of directions."""
    blocks = []
    width = values.shape[1] // KV_HEADS
    for i, head in enumerate(cluster.heads):
        block = torch.zeros(len(head.along), values.shape[1], dtype=torch.float64)
        block[:, i * width : (i + 1) * width] = head.along
        blocks.append(block)
    along = torch.cat(blocks) @ whitener
    point = torch.cat([head.point for head in cluster.heads])
    for value in values[:4]:
        target = (value - point) @ whitener
        best = torch.linalg.lstsq(along.T, target[:, None]).solution
        left = (target - (along.T @ best)[:, 0]).square().sum() / (len(whitener) - len(along))
        assert torch.allclose(left, cluster.values_left(value[None], whitener)[0], rtol=1e-6, atol=1e-12)


def test_evidence_is_bounded_for_a_token_and_grows_against_it() -> None:
    draw = torch.Generator().manual_seed(0)
    right, wrong = torch.randn(400, generator=draw) * 0.3, 3 + torch.randn(400, generator=draw) * 0.2
    evidence = Evidence.of([right], [wrong], doubt=0.05)
    nats = evidence.nats(torch.tensor([-2.0, 0.0, 1.5, 3.0], dtype=torch.float64))
    assert nats[0] == pytest.approx(3.0, abs=0.05) and nats[1] == pytest.approx(3.0, abs=0.05)  # log 20
    assert nats[1] >= nats[2] > nats[3] and nats[3] < -10


def test_a_density_counts_as_far_as_it_names_right_tokens() -> None:
    draw = torch.Generator().manual_seed(0)
    wrong = [10 * torch.randn(5, generator=draw) for _ in range(200)]
    blind = [10 * torch.randn(1, generator=draw) for _ in range(200)]
    assert Tempered.of(blind, wrong).power == 0
    telling = [one.amax()[None] + 8 for one in wrong]
    assert Tempered.of(telling, wrong).power >= 0.3
    assert Tempered(0.5).nats(torch.tensor([4.0])).item() == 2


@pytest.mark.slow
def test_a_recorded_request_is_read_behind_noise(tiny: TinyPath, tmp_path: Path) -> None:
    path = tiny("llama", tokenizer=True)
    harden = "client:first=1,last=1+noise:sigma=0.002"
    backend = command.Backend(kind="local", model=path, harden=harden)
    command.run("the ferry leaves at nine", backend, alpha=3, c=3, record=f"{tmp_path}/noise")
    (seen,) = load_site(f"{tmp_path}/noise/CompNode-2.safetensors", 2, "attn")
    attack = PartialSums(budget=VOCABULARY)
    found = attack.fit(seen.info, load_model(path, 2, stream="attn", device="cpu")).recover(seen)
    (truth,) = load_truth(tmp_path / "noise/truth.json")
    right = sum(a == b for a, b in zip(found.ids, truth.tokens, strict=False))
    assert right >= 16 and len(found.ids) == 18
    assert not any(one.verified for one in found.tokens)


def test_what_it_does_not_read_behind_noise(tiny_model: LoadModel) -> None:
    seen = node_view(streams(tiny_model, "llama"), tokens_of(24), PLAN, 2, masked=True, noise=0.01)
    with pytest.raises(NotApplicableError, match="behind noise this attack reads the sums of each key shard"):
        recover(tiny_model, "llama", seen)
    two = replace(seen.info, channel=("gaussian:sigma=0.01", "seq-perm"))
    with pytest.raises(NotApplicableError, match=r"not behind gaussian:sigma=0.01 \+ seq-perm"):
        recover(tiny_model, "llama", replace(seen, info=two))
    with pytest.raises(InputError, match="needs first of at least 1"):
        experiment(Setting(), noise=0.03)
