"""What the channel does to rows, as beam decoding expects it."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hiddenlab.attacks.beam_decoding.distortion_model import (
    NEAREST,
    SHRUNK,
    DistortionModel,
    learn_distortion_model,
)
from hiddenlab.attacks.beam_decoding.features import ROUNDING
from hiddenlab.attacks.beam_decoding.prefix_inversion import prefix_of
from hiddenlab.channels import Channel, in_order
from hiddenlab.matching.distance import Matcher
from hiddenlab.models import Prefix, Request, TruncatedModel
from hiddenlab.utils.random import generator

SORTED = Matcher(1, True)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_what_is_expected_is_the_mean_over_rows_that_are_alike() -> None:
    plain, shown = drawn(40, 6), drawn(3, 6, seed=2)
    rows = plain + 0.1 * drawn(40, 6, seed=1)
    distortion_model = DistortionModel.of(Matcher(1, False), rows, plain)
    assert len(distortion_model.rows) == 30
    found = distortion_model.expected(shown)
    for row, value in zip(shown, found, strict=True):
        apart = []
        for own, state in zip(rows[:30], plain[:30], strict=True):
            angle = float((row / row.norm() - own / own.norm()).norm())
            length = abs(math.log(float(row.norm() / own.norm())))
            apart.append((angle + length, math.log(float((own - state).abs().sum()))))
        nearest = [moved for _, moved in sorted(apart)[:NEAREST]]
        assert float(value) == pytest.approx(math.exp(sum(nearest) / len(nearest)), rel=1e-4)


def test_long_rows_are_expected_to_be_moved_as_long_ones_are() -> None:
    plain = drawn(200, 8)
    plain[::4] *= 20
    moved = torch.where(torch.arange(200) % 4 == 0, 3.0, 0.1)[:, None]
    distortion_model = DistortionModel.of(Matcher(2, False), plain + moved * drawn(200, 8, seed=1), plain)
    short, long = distortion_model.expected(torch.stack([drawn(8, seed=2), 20 * drawn(8, seed=2)])).tolist()
    assert 0.1 < short < 1
    assert 3 < long < 20


def test_whitened_displacements_count_what_is_seldom_done() -> None:
    plain, often = drawn(4000, 5), torch.tensor([9.0, 3.0, 1.0, 0.1, 0.1])
    rows = plain + 0.01 * often * drawn(4000, 5, seed=1)
    distortion_model = DistortionModel.of(Matcher(2, False), rows, plain)
    displaced = (rows - plain)[3000:] / distortion_model.expected(rows[3000:])[:, None]
    moments = (displaced.T @ displaced).double()
    shrunk = moments / moments.diagonal().mean() + SHRUNK * torch.eye(5)
    whitening = distortion_model.whitening.double()
    torch.testing.assert_close(whitening @ whitening.T, torch.linalg.inv(shrunk), rtol=1e-3, atol=1e-4)
    costs = whitening.norm(dim=1)
    assert float(costs[4]) > 3 * float(costs[0])


@pytest.mark.parametrize("rounded", [0, 1e-7, 1e-6])
def test_where_nothing_is_moved_directions_say_nothing(rounded: float) -> None:
    directions = drawn(20, 4)
    rows = directions / directions.abs().sum(1, keepdim=True)
    distortion_model = DistortionModel.of(Matcher(1, False), rows, rows + rounded * drawn(20, 4, seed=1))
    assert distortion_model.whitening is None
    torch.testing.assert_close(distortion_model.expected(rows), torch.full((20,), ROUNDING))


def test_rows_that_were_not_moved_are_as_far_as_rounding_moves_them() -> None:
    plain = drawn(400, 6)
    moved = torch.where(torch.arange(400) % 4 == 0, 0.0, 0.1)[:, None]
    rows, matcher = plain + moved * drawn(400, 6, seed=1), Matcher(1, False)
    distortion_model = DistortionModel.of(matcher, rows, plain)
    still = moved[:300, 0] == 0
    torch.testing.assert_close(
        distortion_model.moved[still].exp(), ROUNDING * matcher.norms(rows[:300])[still]
    )
    assert distortion_model.whitening is not None
    assert float(distortion_model.expected(drawn(50, 6, seed=2)).min()) > 1e-4


@pytest.mark.parametrize("count", [1, 2, 40])
def test_without_displacements_to_whiten_by_directions_say_nothing(count: int) -> None:
    plain = drawn(count, 4)
    rows = plain + 0.1 * drawn(count, 4, seed=1)
    last = max(1, round(0.75 * count))
    rows[last:] = plain[last:]
    distortion_model = DistortionModel.of(Matcher(1, False), rows, plain)
    assert distortion_model.whitening is None
    assert distortion_model.expected(rows).isfinite().all()


def surprises(
    model: TruncatedModel,
    channel: Channel,
    matcher: Matcher,
    distortion_model: DistortionModel,
    before: Prefix,
) -> Tensor:
    """Logarithms of how far rows of other texts were moved, over what is expected of them."""
    drawn = [torch.Generator().manual_seed(i) for i in range(8)]
    tokens = [torch.randint(0, 300, (20,), generator=one).tolist() for one in drawn]
    found, released = [], channel.release_batch(model, tokens, generator(1, "others"))
    for one, (shown, secret) in zip(tokens, released, strict=True):
        rows = matcher.prepare(in_order(shown, secret))
        (plain,) = model.run([Request(before, torch.tensor(one))], keep=False)
        moved = matcher.pairs(candidates=rows, observed=matcher.view(plain.states))
        found.append((moved / distortion_model.expected(rows)).log())
    return torch.cat(found)


@pytest.mark.parametrize("stages", [["gaussian:sigma=0.05", "2d-perm"], ["gaussian:sigma=0.05", "seq-perm"]])
@pytest.mark.usefixtures("small_probes")
def test_other_texts_are_moved_as_the_attackers_own(
    tiny_model: Callable[..., TruncatedModel], stages: list[str]
) -> None:
    model, channel = tiny_model("llama", 2), Channel.parse(stages)
    matcher = SORTED if "2d-perm" in stages else Matcher(1, False)
    with torch.inference_mode():
        distortion_model = learn_distortion_model(model, channel, matcher, 3)
        again = learn_distortion_model(model, channel, matcher, 3)
        assert torch.equal(distortion_model.moved, again.moved)
        assert torch.equal(distortion_model.whitening, again.whitening)
        errors = surprises(model, channel, matcher, distortion_model, model.prefix())
    assert abs(float(errors.mean())) < 0.2
    assert float(errors.std()) < 0.5


@pytest.mark.usefixtures("small_probes")
def test_what_is_expected_is_seen_from_behind_an_unknown_beginning(
    tiny_model: Callable[..., TruncatedModel],
) -> None:
    model, channel, matcher = (
        tiny_model("gpt2", 2),
        Channel.parse(["random-prefix", "seq-perm"]),
        Matcher(1, False),
    )
    with torch.inference_mode():
        before = prefix_of(channel.added(model, generator(3, "before")), model)
        behind, alone = (
            surprises(
                model, channel, matcher, learn_distortion_model(model, channel, matcher, 3, place), before
            )
            for place in (before, None)
        )
    assert float(behind.abs().mean()) < 0.5 * float(alone.abs().mean())
