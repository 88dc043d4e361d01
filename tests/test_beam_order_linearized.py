"""Rows behind one layer: given attention, Jacobians, and how much noise an order needs, against plain ways."""

from collections.abc import Callable
from itertools import permutations

import pytest
import torch

from hiddenlab.attacks.beam_decoding import order_linearized as module
from hiddenlab.attacks.beam_decoding.hypotheses import Engines
from hiddenlab.attacks.beam_decoding.order_beam import append, ordered
from hiddenlab.attacks.beam_decoding.order_linearized import (
    Displaced,
    _expected,
    displaced,
    place_free,
)
from hiddenlab.errors import InputError
from hiddenlab.matching.distance import Matcher
from hiddenlab.matching.layer_inversion import Equations, jacobians
from hiddenlab.models import Request, TruncatedModel, decoder_layers, load_model
from hiddenlab.testing import DECODERS

TOKENS = torch.tensor([11, 45, 203, 7, 99, 150])
SIGMA = 0.05


@pytest.mark.parametrize("architecture", DECODERS)
def test_a_layer_that_is_given_its_attention_gives_the_same_states(
    tiny: Callable[..., str], architecture: str
) -> None:
    model = load_model(tiny(architecture), 1)
    inputs = model.embed(TOKENS)
    request = Request(model.prefix(), inputs)
    states = model.run([request], keep=False)[0].states
    attended = model.run([request], keep=False, show="attn")[0].states
    given = model.run_given(inputs, attended, torch.arange(len(TOKENS)))
    torch.testing.assert_close(given, states, rtol=1e-5, atol=1e-5)


def test_a_pass_ends_where_it_has_shown_what_was_asked(tiny: Callable[..., str]) -> None:
    model, ran = load_model(tiny("llama"), 2), list[int]()
    for i, layer in enumerate(decoder_layers(model.module)):
        layer.register_forward_hook(lambda *_, i=i: ran.append(i))
    states = model.encode(TOKENS)
    assert ran == [0, 1]
    counted = model.evaluated_tokens, model.forward_calls
    model.run([Request(model.prefix(), TOKENS)], show="attn")
    assert ran == [0, 1, 0]
    assert (model.evaluated_tokens - counted[0], model.forward_calls - counted[1]) == (len(TOKENS), 1)
    torch.testing.assert_close(model.encode(TOKENS), states)  # nothing of it is left behind


@pytest.mark.parametrize("architecture", DECODERS)
@pytest.mark.parametrize("stream", ["q", "kv", "qkv"])
def test_what_the_second_layer_asks_follows_from_what_the_first_ones_attention_gives(
    tiny: Callable[..., str], architecture: str, stream: str
) -> None:
    first, model = load_model(tiny(architecture), 1), load_model(tiny(architecture), 2, stream=stream)
    attended = first.run([Request(first.prefix(), TOKENS)], keep=False, show="attn")[0].states
    given = model.run_given(model.embed(TOKENS), attended, torch.arange(len(TOKENS)))
    torch.testing.assert_close(given, model.encode(TOKENS), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("layer", "stream"), [(2, "resid"), (3, "q"), (2, "attn"), (1, "k")])
def test_attention_is_given_to_one_layer_only(tiny: Callable[..., str], layer: int, stream: str) -> None:
    model = load_model(tiny("llama"), layer, stream=stream)
    with pytest.raises(InputError, match=f"models of one layer.* not for {model.site}"):
        model.run_given(model.embed(TOKENS), torch.zeros(len(TOKENS), 64))


@pytest.mark.parametrize(("architecture", "free"), [("llama", True), ("gemma2", True), ("gpt2", False)])
def test_learned_positions_show_in_a_row_by_itself(
    tiny: Callable[..., str], architecture: str, free: bool
) -> None:
    assert place_free(load_model(tiny(architecture), 1)) is free
    assert not place_free(load_model(tiny(architecture), 2))


@pytest.mark.parametrize("architecture", ["llama", "gpt_neox", "olmo2"])
def test_jacobians_are_those_of_each_row_by_itself(tiny: Callable[..., str], architecture: str) -> None:
    model = load_model(tiny(architecture), 1)
    points = model.embed(TOKENS[:3]).clone()
    (answer,) = model.run([Request(model.prefix(), points)], keep=False, show="attn")
    usual = answer.states.clone()
    found = jacobians(model, points, usual)
    for i in range(3):
        plain = torch.autograd.functional.jacobian(
            lambda x, u: model.run_given(x[None], u[None], grad=True)[0], (points[i], usual[i])
        )
        for fast, slow in zip(found, plain, strict=True):
            torch.testing.assert_close(fast[i].float(), slow, rtol=1e-3, atol=1e-4)


def released(model: TruncatedModel) -> tuple[torch.Tensor, torch.Tensor, torch.Generator]:
    """Noised rows of a prompt out of order, and which token each row is of."""
    embeddings, order, generator = noised(model)
    return model.encode(embeddings)[order], order, generator


def noised(model: TruncatedModel) -> tuple[torch.Tensor, torch.Tensor, torch.Generator]:
    """The embeddings behind the released rows, in the prompt's order, and the order of the rows."""
    generator = torch.Generator().manual_seed(3)
    noise = SIGMA * torch.randn(len(TOKENS), model.embedding.shape[1], generator=generator)
    return model.embed(TOKENS) + noise, torch.randperm(len(TOKENS), generator=generator), generator


@pytest.fixture
def solved(tiny: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> tuple[Displaced, torch.Tensor]:
    """What moved the noised rows of a prompt, and the order in which they stood."""
    monkeypatch.setattr(module, "DRAWS", 200)
    model = load_model(tiny("llama", initializer_range=0.1), 1)
    states, order, generator = released(model)
    with torch.inference_mode():
        witness = displaced(model, TOKENS[order], states, SIGMA, generator)
    return witness, order.argsort()


def test_the_same_seed_solves_for_the_same(solved: tuple[Displaced, torch.Tensor]) -> None:
    witness, _ = solved
    states, order, generator = released(witness.model)
    torch.manual_seed(99)  # nobody else's draws count
    with torch.inference_mode():
        again = displaced(witness.model, TOKENS[order], states, SIGMA, generator)
    for name in ("moved", "mixing", "initial", "expected"):
        assert torch.equal(getattr(again, name), getattr(witness, name))


def test_displacements_explain_their_rows(solved: tuple[Displaced, torch.Tensor]) -> None:
    witness, _ = solved
    observed, _, _ = released(witness.model)
    states = witness.model.run_given(witness.centre + witness.moved, witness.usual)
    assert float(((states - observed).norm(dim=1) / observed.norm(dim=1)).max()) < 1e-4
    missed = (witness.moved - truly(witness)).norm(dim=1) / (SIGMA * witness.moved.shape[1] ** 0.5)
    assert float(missed.max()) < 0.01  # of the noise


@pytest.mark.parametrize("astray", [0.0, 1.0])
def test_rows_that_nothing_more_explains_stay(tiny: Callable[..., str], astray: float) -> None:
    """Explained from the beginning on, or by no displacement at all: no step is left to try, and none fails."""
    model = load_model(tiny("llama", initializer_range=0.1), 1)
    centre = model.embed(TOKENS)
    n, width = centre.shape
    usual, rest = torch.zeros(n, width), torch.zeros(n, width).double()
    with torch.inference_mode():
        states = model.run_given(centre, usual)
        observed = states + astray * torch.randn(states.shape, generator=torch.Generator().manual_seed(4))
        prior = torch.eye(width).double().expand(n, -1, -1) / SIGMA**2
        equations = Equations(model, centre, usual, observed, rest, prior)
        moved = rest
        for _ in range(3):  # begun anew where it ended
            moved = equations.solve(moved)
    assert moved.isfinite().all()
    assert bool((moved == 0).all()) == (astray == 0)


def truly(witness: Displaced) -> torch.Tensor:
    """What did move each released row: its noise, and what attention brought it beyond the usual."""
    embeddings, order, _ = noised(witness.model)
    request = Request(witness.model.prefix(), embeddings)
    attended = witness.model.run([request], keep=False, show="attn")[0].states[order]
    noise = embeddings[order] - witness.centre
    return noise + (attended - witness.usual) @ witness.mixing[0].T


@pytest.mark.slow
def test_the_true_order_needs_the_least_noise(solved: tuple[Displaced, torch.Tensor]) -> None:
    witness, true = solved
    with torch.inference_mode():
        least = witness.explain(true)
        others = [witness.explain(true.roll(shift)) for shift in range(1, len(true))]
        others.append(witness.explain(true.flip(0)))
    assert least < min(others)
    # About half a nat a coordinate is what noise of the channel's strength needs.
    assert 0.2 < least / witness.moved.numel() < 0.8


def test_orders_and_places_are_what_single_passes_say(solved: tuple[Displaced, torch.Tensor]) -> None:
    witness, true = solved
    orders = torch.stack([true, true.flip(0), true.roll(2)])
    with torch.inference_mode():
        told, table = witness.orders(orders), witness.places(true)
    for order, own in zip(orders, told, strict=True):
        for place, row in enumerate(order.tolist()):
            assert float(own[place]) == pytest.approx(slowly(witness, order[:place], row), rel=1e-4)
    for i, row in enumerate(true.tolist()):
        for place in range(len(true)):
            assert float(table[i, place]) == pytest.approx(slowly(witness, true[:place], row), rel=1e-4)


def test_a_row_is_solved_for_behind_those_before_it(solved: tuple[Displaced, torch.Tensor]) -> None:
    witness, true = solved
    prefix, wrong, distances = witness.model.prefix(), witness.model.prefix(), list[tuple[float, float]]()
    with torch.inference_mode():
        append([(wrong, witness.initial[true[3]])])
        for row in true.tolist():
            rows = [torch.tensor([row]), torch.tensor([row, (row + 1) % len(true)])]
            found, told = witness.behind([prefix, wrong], rows)
            alone, own = witness.behind([prefix], rows[:1])  # others make no difference
            torch.testing.assert_close(found[:1], alone, rtol=1e-3, atol=1e-4)
            assert float(told[0]) == pytest.approx(float(own[0]), rel=1e-2)
            request = Request(prefix, found[:1])
            attended = witness.model.run([request], keep=False, show="attn")[0].states
            needed = witness.needed(attended.expand(len(true), -1)[:, None])[row]
            assert float(told[0]) == pytest.approx(-witness.trust * float(needed), rel=1e-3)
            distances.append((off(witness, row, found[0]), off(witness, row, witness.initial[row])))
            append([(prefix, found[0])])
    nearer, before = (torch.tensor(one).mean() for one in zip(*distances, strict=True))
    assert nearer < before


def off(witness: Displaced, row: int, embedding: torch.Tensor) -> float:
    """How far an embedding is from the noised one that is behind a released row."""
    embeddings, order, _ = noised(witness.model)
    return float((embedding - embeddings[order[row]]).norm())


@pytest.mark.slow
@pytest.mark.parametrize("spoken", [0.0, pytest.param(40.0, marks=pytest.mark.slow)])
def test_the_search_finds_what_trying_all_orders_finds(
    tiny: Callable[..., str], monkeypatch: pytest.MonkeyPatch, spoken: float
) -> None:
    monkeypatch.setattr(module, "DRAWS", 200)
    path = tiny("llama", initializer_range=0.1)
    truncated, model = load_model(path, 1), load_model(path, stream="logits")
    tokens, order = TOKENS[:4], torch.tensor([2, 0, 3, 1])
    noise = SIGMA * torch.randn(4, truncated.embedding.shape[1], generator=torch.Generator().manual_seed(5))
    with torch.inference_mode():
        states = truncated.encode(truncated.embed(tokens) + noise)[order]
        witness = displaced(truncated, tokens[order], states, SIGMA, torch.Generator().manual_seed(6))
        engines = Engines(truncated, Matcher(1, False), model.prefix() if spoken else None)
        found, embeddings = ordered(witness, tokens[order], engines, spoken)
        totals = dict[tuple[int, ...], float]()
        for one in permutations(range(4)):
            prefix, placed, totals[one] = truncated.prefix(), list[torch.Tensor](), 0.0
            for row in one:
                solved, told = witness.behind([prefix], [torch.tensor([row])])
                append([(prefix, solved[0])])
                placed.append(solved[0])
                totals[one] += float(told[0])
            said = model.encode(tokens[order][list(one)]).log_softmax(-1)
            totals[one] += spoken * sum(float(said[i, tokens[order][row]]) for i, row in enumerate(one[1:]))
            if list(one) == found.tolist():
                torch.testing.assert_close(embeddings[found], torch.stack(placed), rtol=1e-3, atol=1e-3)
    best = max(totals, key=lambda one: totals[one])
    assert found.tolist() == list(best)
    assert spoken or list(best) == order.argsort().tolist()


def test_what_rows_can_be_expected_to_need_is_what_they_need_on_average() -> None:
    generator = torch.Generator().manual_seed(0)
    rows, width, sigma = 400, 30, 0.1
    spread = torch.diag(torch.tensor([1.0, 0.5, 0.1] + [0.0] * (width - 3)))
    changes = torch.randn(500, 1, width, generator=generator) @ spread
    brought = torch.randn(rows, width, generator=generator) @ spread
    noise = sigma * torch.randn(rows, width, generator=generator)
    mixing = torch.linalg.qr(torch.randn(width, width, generator=generator)).Q[None]
    moved = noise + brought @ mixing[0].T
    needed = (noise / sigma).square().sum(1) / 2
    expected = _expected(moved, changes.expand(-1, rows, -1), mixing, sigma)
    assert float((needed - expected).mean()) == pytest.approx(0.0, abs=0.3)
    # Nearer than what does not know in which directions attention brings something.
    assert float((needed - expected).std()) < 0.2 * float((moved / sigma).square().sum(1).std() / 2)


def slowly(witness: Displaced, before: torch.Tensor, row: int) -> float:
    """What speaks for a row right behind others, by a pass of its own."""
    model = witness.model
    chain = witness.noised[torch.cat([before, torch.tensor([row])])]
    (answer,) = model.run([Request(model.prefix(), chain)], keep=False, show="attn")
    change = witness.mixing[min(row, len(witness.mixing) - 1)] @ (answer.states[-1] - witness.usual[row])
    noise = (witness.moved[row] - change) / witness.sigma
    return -witness.trust * float(noise @ noise) / 2
