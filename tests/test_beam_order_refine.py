"""Rows in unknown order behind noise, ordered by how much noise an order needs."""

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from hiddenlab.attacks.beam_decoding import BeamDecoding
from hiddenlab.attacks.beam_decoding.order_beam import append
from hiddenlab.attacks.beam_decoding.row_features import Reader
from hiddenlab.channels import Channel
from hiddenlab.models import Request, TruncatedModel, load_model

TOKENS = [5, 17, 40, 99, 140, 7, 63, 201, 33, 120]


@pytest.fixture(autouse=True)
def small(small_probes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Little is learned from, and every token is among a row's candidates."""
    monkeypatch.setattr("hiddenlab.attacks.beam_decoding.row_features.SHORTLIST", 300)


def strength(model: TruncatedModel, share: float) -> float:
    return share * float(model.embedding.std())


def prepared(model: TruncatedModel, specs: list[str], **options: object) -> tuple:
    observation, secret = Channel.parse(specs).release(model, TOKENS, torch.Generator().manual_seed(0))
    attack = BeamDecoding(lm=False, **options)  # type: ignore[arg-type]
    return observation, secret, attack, attack.fit(observation.info, model).prepare(observation)


def test_noised_embeddings_continue_a_prompt(tiny_model: Callable[..., TruncatedModel]) -> None:
    model = tiny_model("llama", 2)
    points = torch.randn(3, 4, model.width, generator=torch.Generator().manual_seed(0))
    prefixes = [model.prefix() for _ in points]
    with torch.inference_mode():
        append([])
        for place in range(3):
            append([(prefix, own[place]) for prefix, own in zip(prefixes, points, strict=True)])
        for prefix, own in zip(prefixes, points, strict=True):
            answer = model.run([Request(prefix, own[3:])])[0]
            torch.testing.assert_close(answer.states, model.encode(own)[3:], atol=1e-5, rtol=1e-4)


@pytest.mark.slow
def test_an_order_that_noise_hides_comes_back(
    tiny_model: Callable[..., TruncatedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Noise as strong as embeddings differ; tokens are known, and nothing but states tells of their order."""
    model = tiny_model("llama", 1)
    specs = [f"gaussian:sigma={strength(model, 1.0)}", "seq-perm"]
    right = []
    for orders in (False, True):
        observation, secret, attack, made = prepared(model, specs, beam=2, orders=orders)
        view = made.reader.read(observation)
        tokens = torch.tensor([TOKENS[place] for place in secret.row_order])
        known = replace(
            view,
            ids=tokens[:, None],
            scores=torch.zeros(len(tokens), 1),
            columns=view.columns[:, :1] * 0,
            traces=None,
            when=None,
            precedes=None,
        )
        with monkeypatch.context() as patch, torch.inference_mode():
            patch.setattr(Reader, "read", lambda *_, known=known: known)
            (decoding,) = attack._decode([observation], made)
            before = decoding.evaluated
            attack._reorder([observation], [decoding], made)
            assert (decoding.evaluated > before) == orders
        order = [secret.row_order[one.row] for one in decoding.beam[0].steps]
        assert sorted(order) == list(range(len(TOKENS)))
        right.append(sum(b == a + 1 for a, b in itertools.pairwise(order)))
    assert right[1] > right[0]


@pytest.mark.slow
def test_orders_are_refined_only_where_that_can_help(
    tiny_model: Callable[..., TruncatedModel], tiny: Callable[..., str]
) -> None:
    model = tiny_model("llama", 1)
    _, _, _, made = prepared(model, ["gaussian:sigma=0.1", "seq-perm"])
    assert made.solves
    for other in (
        {"rows_permuted": False}, {"columns_permuted": "shared"}, {"noise_sigma": None}, {"prefix_tokens": 1}
    ):  # fmt: skip
        assert not replace(made, info=replace(made.info, **other)).solves  # type: ignore[arg-type]
    assert not replace(made, model=load_model(tiny("llama"), 1, dtype="bfloat16", device="cpu")).solves
