"""A key serves as many releases as it is given for; what is no key's is fresh in each."""

from collections.abc import Callable

import pytest
import torch

from hiddenlab.channels import Channel
from hiddenlab.models import TruncatedModel
from hiddenlab.utils.random import Draws, generator, key_of

Truncated = Callable[..., TruncatedModel]
SHORT, LONG = [84, 105, 32, 84], [84, 105, 32, 84, 201, 9, 77]


def released(model: TruncatedModel, spec: str, tokens: list[int], seed: int, key: int | None) -> torch.Tensor:
    return Channel.parse(spec.split("+")).release(model, tokens, seed, key)[0].states


@pytest.mark.parametrize(
    "spec", ["seq-perm", "hidden-perm", "hidden-perm:shared", "2d-perm", "orthogonal", "row-mixing"]
)
def test_one_key_gives_the_same_rows_whatever_is_drawn_afresh(tiny_model: Truncated, spec: str) -> None:
    model = tiny_model("llama", 2)
    first = released(model, spec, LONG, 1, key=5)
    torch.testing.assert_close(first, released(model, spec, LONG, 2, key=5))
    assert not torch.allclose(first, released(model, spec, LONG, 1, key=6))
    assert not torch.allclose(released(model, spec, LONG, 1, None), released(model, spec, LONG, 2, None))


@pytest.mark.parametrize("spec", ["hidden-perm", "hidden-perm:shared", "orthogonal"])
def test_the_first_rows_of_a_longer_prompt_are_those_of_a_shorter_one(
    tiny_model: Truncated, spec: str
) -> None:
    model = tiny_model("llama", 2)
    short, long = released(model, spec, SHORT, 1, 5), released(model, spec, LONG, 2, 5)
    torch.testing.assert_close(short, long[: len(SHORT)], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "spec",
    ["output-noise:sigma=0.1", "gaussian:sigma=0.1", "orthogonal:fresh=row", "decoys:count=1,kind=gaussian"],
)
def test_noise_belongs_to_no_key(tiny_model: Truncated, spec: str) -> None:
    model = tiny_model("llama", 2)
    assert not torch.allclose(released(model, spec, LONG, 1, 5), released(model, spec, LONG, 2, 5))


def test_stages_have_keys_of_their_own(tiny_model: Truncated) -> None:
    model = tiny_model("llama", 2)
    once = released(model, "orthogonal", LONG, 1, 5)
    truth = Channel.parse(["orthogonal", "orthogonal"]).release(model, LONG, 1, 5)[1]
    maps = [details["map"] for name, details in truth.details.items() if name.startswith("orthogonal")]
    assert not torch.allclose(maps[0], maps[1])
    noised = Channel.parse(["output-noise:sigma=1.0", "orthogonal"]).release(model, LONG, 1, 5)[1]
    assert once.shape == (len(LONG), model.width)
    torch.testing.assert_close(
        noised.details["orthogonal"]["map"], maps[1]
    )  # by its place, not by what was drawn before


def test_a_bijection_serves_a_session(tiny_model: Truncated) -> None:
    model, channel = tiny_model("llama", 2), Channel.parse(["vocab-bijection"])
    computed = [channel.release(model, LONG, seed, 5)[1].computed for seed in (1, 2)]
    assert computed[0] == computed[1] != channel.release(model, LONG, 1, 6)[1].computed


def test_kv_cloak_has_one_key_for_all_lengths(tiny_model: Truncated) -> None:
    model = tiny_model("llama", 1, "k")
    spec = f"kv-cloak:heads={model.width // 8},block=2,mask=false"
    short, long = released(model, spec, SHORT, 1, 5), released(model, spec, LONG, 2, 5)
    torch.testing.assert_close(short, long[: len(SHORT)], rtol=1e-4, atol=1e-4)


def test_a_key_of_one_request_is_drawn_with_everything_else() -> None:
    plain, draws = torch.Generator().manual_seed(3), Draws.seeded(3, None)
    assert key_of(plain, "map") is plain
    assert key_of(draws.for_stage(0), "map") is draws
    torch.testing.assert_close(torch.randn(4, generator=draws), torch.randn(4, generator=plain))


def test_parts_of_a_key_do_not_depend_on_what_was_drawn_before() -> None:
    draws = Draws.seeded(3, 7).for_stage(0, "states")
    torch.randn(5, generator=key_of(draws, "other"))
    first = torch.randn(4, generator=key_of(draws, "map"))
    again = torch.randn(4, generator=key_of(Draws.seeded(9, 7).for_stage(0, "states"), "map"))
    torch.testing.assert_close(first, again)
    torch.testing.assert_close(first, torch.randn(4, generator=generator(7, "key", 0, "states", "map")))
