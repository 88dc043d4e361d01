"""Missing tokens behind one layer are solved for: each step against a slow way to the same, and whole prompts."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
import torch

from hiddenlab.attacks.missing_tokens import MissingTokenSearch, gap
from hiddenlab.attacks.missing_tokens import attention_sums as module
from hiddenlab.attacks.missing_tokens.attention_sums import AttentionSums, Shown
from hiddenlab.attacks.missing_tokens.expectation_propagation import Beliefs
from hiddenlab.attacks.missing_tokens.sum_search import EXPLAINED, Search, Sums
from hiddenlab.channels import Channel
from hiddenlab.matching.first_layer import FirstLayer
from hiddenlab.matching.layer_inversion import Equations
from hiddenlab.models import Request, TruncatedModel, load_model
from hiddenlab.testing import DECODERS, VOCABULARY, WINDOW
from hiddenlab.types import AttackResult
from tests.marks import slow_cases

LoadModel = Callable[..., TruncatedModel]

pytestmark = pytest.mark.usefixtures("small_probes")


def tokens_of(count: int, seed: int = 0) -> list[int]:
    return torch.randint(0, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def shown(model: TruncatedModel, tokens: Sequence[int], position: int, missing: Sequence[int]) -> Shown:
    known = {p: token for p, token in enumerate(tokens[:position]) if p not in missing}
    return Shown(model.encode(torch.tensor(tokens))[position], tokens[position], position, known)


def named(names: AttentionSums, rows: Sequence[Shown]) -> dict[int, int]:
    """The last first filling, in order of places."""
    found: dict[int, int] = {}
    with torch.inference_mode():
        for fillings in names.name(rows):
            found = fillings[0]
    return dict(sorted(found.items()))


@pytest.mark.parametrize("architecture", DECODERS)
def test_what_attention_brings_is_the_sum_of_what_tokens_contribute(
    tiny_model: LoadModel, architecture: str
) -> None:
    model, tokens = tiny_model(architecture, 1), torch.tensor(tokens_of(7))
    (answer,) = model.run([Request(model.prefix(), tokens)], keep=False, show="attn")
    layer = FirstLayer(model)
    for position in (2, 6):
        before = range(position + 1)
        # By the whole vocabulary's table, and by tokens alone.
        scores = [layer.scores(int(tokens[position]), position, p)[:, tokens[p]] for p in before]
        alone = [layer.scores(int(tokens[position]), position, p, tokens[p : p + 1])[:, 0] for p in before]
        torch.testing.assert_close(torch.stack(scores), torch.stack(alone))
        values = torch.stack([layer.spread(layer.values(p)[tokens[p]][None])[0] for p in before])
        brought = torch.einsum("ph,phw->hw", torch.stack(scores).softmax(0), values).flatten()
        torch.testing.assert_close(brought, answer.states[position], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gpt_neox"])
def test_a_row_gives_back_what_attention_brought_it(tiny_model: LoadModel, architecture: str) -> None:
    model, tokens = tiny_model(architecture, 1), torch.tensor(tokens_of(9))
    (answer,) = model.run([Request(model.prefix(), tokens)], keep=False, show="attn")
    places = torch.tensor([5, 8])
    brought, observed, embeddings = (
        answer.states[places],
        model.encode(tokens)[places],
        model.embed(tokens[places]),
    )
    away = 0.02 * torch.randn(brought.shape, generator=torch.Generator().manual_seed(2))
    with torch.inference_mode(False):
        usual, rest = (brought + away).clone(), torch.zeros(brought.shape).double()
        prior = torch.eye(brought.shape[1]).double().expand(2, -1, -1) / 0.02**2
        equations = Equations(
            model,
            embeddings.clone(),
            usual,
            observed.clone(),
            rest,
            prior,
            by_attention=True,
            positions=places,
        )
        moved = equations.solve(rest)
        every = torch.arange(2)
        left = (equations.states(every, moved) - observed).norm(dim=1) / observed.norm(dim=1)
        assert float(left.max()) < 1e-5
        # The Jacobian by attention, row by row.
        found = equations.jacobian(every, moved)
        for i in range(2):
            plain = torch.autograd.functional.jacobian(
                lambda a, i=i: model.run_given(
                    embeddings[i : i + 1].clone(), a[None], places[i : i + 1], grad=True
                )[0],
                usual[i] + moved[i].float(),
            )
            torch.testing.assert_close(found[i].float(), plain, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt2", "gpt_neox", "phi3", "qwen3", "olmo2"])
@pytest.mark.parametrize("size", [1, 2])
def test_missing_tokens_are_named_without_running_any(
    tiny_model: LoadModel, architecture: str, size: int
) -> None:
    model = tiny_model(architecture, 1)
    names = AttentionSums(model)
    right = 0
    for seed in range(4):
        tokens, position = tokens_of(10, seed), 8
        missing = list(range(position - size, position))
        right += named(names, [shown(model, tokens, position, missing)]) == {p: tokens[p] for p in missing}
    assert right >= 3  # a row may lie at a fold of the layer


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "stream"), [
    *((architecture, "qkv") for architecture in ("llama", "gemma2", "gpt2", "gpt_neox", "phi3", "qwen3", "olmo2")),
    ("llama", "kv"), ("llama", "q"), ("gpt2", "kv"), ("gpt2", "q"),
])  # fmt: skip
def test_so_they_are_from_what_an_attention_node_is_sent(
    tiny_model: LoadModel, architecture: str, stream: str
) -> None:
    model = tiny_model(architecture, 2, stream)
    names = AttentionSums(model)
    right = 0
    for seed in range(4):
        tokens = tokens_of(10, seed)
        right += named(names, [shown(model, tokens, 8, [7])]) == {7: tokens[7]}
    assert right >= 3


@pytest.mark.slow
def test_several_rows_tell_what_one_does_not(tiny_model: LoadModel) -> None:
    model = tiny_model("gpt_neox", 1)
    names, right = AttentionSums(model), [0, 0]
    for seed in range(4):
        tokens, missing = tokens_of(12, seed), list(range(1, 9))
        rows = [shown(model, tokens, p, missing) for p in (9, 10, 11)]
        for i, some in enumerate((rows[:1], rows)):
            right[i] += named(names, some) == {p: tokens[p] for p in missing}
    assert right[1] > right[0]


def test_rows_that_do_not_miss_the_same_are_asked_together(tiny_model: LoadModel) -> None:
    model = tiny_model("gpt_neox", 1)
    names = AttentionSums(model)
    tokens, missing = tokens_of(10, 1), [3, 4, 6, 7, 8]
    rows = [shown(model, tokens, p, missing) for p in (5, 9)]
    assert named(names, rows) == {p: tokens[p] for p in missing}


def test_what_no_row_sees_is_not_named(tiny_model: LoadModel) -> None:
    model, tokens = tiny_model("mistral", 1), tokens_of(12)
    names = AttentionSums(model)
    assert not named(names, [shown(model, tokens, 9, [9 - WINDOW])])
    assert list(named(names, [shown(model, tokens, 9, [8])])) == [8]
    assert not named(names, [shown(model, tokens, 9, [])])


def test_more_than_can_be_solved_for_is_left(tiny_model: LoadModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LONGEST", 2)
    model, tokens = tiny_model("llama", 1), tokens_of(9)
    assert not named(AttentionSums(model), [shown(model, tokens, 8, [5, 6, 7])])


@pytest.mark.slow
@pytest.mark.parametrize("scale", [0.0, 1.0, 1e20])
def test_rows_that_are_no_states_explain_nothing(tiny_model: LoadModel, scale: float) -> None:
    model, tokens = tiny_model("llama", 1), tokens_of(9)
    row = shown(model, tokens, 8, [6, 7])
    noise = torch.randn(row.state.shape, generator=torch.Generator().manual_seed(1))
    found = named(AttentionSums(model), [replace(row, state=scale * noise)])
    assert found != {p: tokens[p] for p in (6, 7)}


def searching(model: TruncatedModel, tokens: Sequence[int], missing: Sequence[int]) -> tuple[Search, Sums]:
    """The search for some tokens, and the sums of the right ones."""
    names, rows = AttentionSums(model), [shown(model, tokens, p, missing) for p in (7, 8)]
    search = Search(names._turned_back(rows), sorted(missing, reverse=True), names.prior, names.pool)
    sums = search.initial
    for place in search.places:
        sums = search.with_token(sums, place, torch.tensor([tokens[place]]))
    return search, sums


@pytest.mark.slow
def test_two_wrong_tokens_are_found_out_and_sought_anew(tiny: Callable[..., str]) -> None:
    model = load_model(
        tiny("gpt_neox", initializer_range=0.3), 1
    )  # so that places differ by what weighs there
    tokens, missing = tokens_of(9, 3), [2, 3, 4, 5, 6]
    with torch.inference_mode():
        search, right = searching(model, tokens, missing)
        assert search.explained(right)
        ranks = list[int]()
        for first, second in combinations(range(5), 2):
            wrong = search.initial
            for k, place in enumerate(search.places):
                token = tokens[place] if k not in (first, second) else (tokens[place] + 7) % VOCABULARY
                wrong = search.with_token(wrong, place, torch.tensor([token]))
            assert not search.explained(wrong)
            ranks.append(search.doubtful(wrong).index((first, second)))
            found = search.sought_anew(wrong, (first, second))
            assert search.explained(found)
            assert search.fillings(found)[0] == {p: tokens[p] for p in missing}
        assert sum(ranks) / len(ranks) < 3  # of ten; 4.5 by chance


@pytest.mark.slow
def test_sums_are_weighed_as_one_by_one(tiny_model: LoadModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage of the beam against every token's whole distance, in double precision."""
    model, tokens = tiny_model("llama", 1), tokens_of(9, 1)
    with torch.inference_mode():
        search, _ = searching(model, tokens, [4, 5, 6])
        place, others = search.places[0], search.places[1:]
        found = search._extended(search.initial, search.places, 1e-3)
        whitened = search._whitened(search.initial, search.places, [place], 1e-3)
        left = search.initial.left[0] - sum(search.moments[p].part for p in others)
        scores = torch.stack(
            [
                search.prior[t]
                - whitened((left - search.parts(place, torch.tensor([t]))[0])[None]).square().sum() / 2
                for t in range(VOCABULARY)
            ]
        )
        assert found.chosen[:10, 0].tolist() == scores.topk(10).indices.tolist()


def released(model: TruncatedModel, tokens: Sequence[int], *specs: str, **options: Any) -> AttackResult:
    observation = Channel.parse(specs).release(model, tokens, torch.Generator().manual_seed(1))[0]
    return MissingTokenSearch(**options).fit(observation.info, model).recover(observation)


@pytest.mark.slow
def test_what_is_solved_for_is_run_and_verified(tiny_model: LoadModel) -> None:
    model, tokens = tiny_model("gpt_neox", 1), tokens_of(13, 4)
    plan = "shard:alpha=4,c=1,node=0"
    found, tried = (released(model, tokens, plan, budget=40, sums=sums) for sums in (True, False))
    assert found.ids == tokens and found.stop_reason == "complete"
    assert all(one.verified for one in found.tokens)
    assert [one.row for one in found.tokens] == [p // 4 if p % 4 == 0 else -1 for p in range(13)]
    assert found.ids == released(model, tokens, plan, budget=40).ids
    assert tried.ids != tokens and tried.stop_reason != "complete"


@pytest.mark.slow
@pytest.mark.parametrize("stream", ["qkv", pytest.param("v", marks=pytest.mark.slow)])
def test_also_from_what_an_attention_node_is_sent(tiny_model: LoadModel, stream: str) -> None:
    model, tokens = tiny_model("gpt_neox", 2, stream), tokens_of(9, 4)
    found = released(model, tokens, "shard:alpha=4,c=1,m=1,queries=0,keys=2", budget=40)
    assert found.ids == tokens and found.stop_reason == "complete"
    assert all(one.verified for one in found.tokens)


@pytest.mark.slow
def test_a_gap_that_stays_open_is_closed_with_the_next(
    tiny_model: LoadModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokens = tiny_model("gpt_neox", 1), tokens_of(10, 4)
    name, asked = AttentionSums.name, list[list[int]]()

    def late(self: AttentionSums, rows: Sequence[Shown]) -> Iterator[list[dict[int, int]]]:
        asked.append([row.position for row in rows])
        return iter(()) if len(asked) == 1 else name(self, rows)

    monkeypatch.setattr(AttentionSums, "name", late)
    found = released(model, tokens, "shard:alpha=3,c=1,node=0", budget=1)
    assert asked == [[3], [3, 6], [9]]
    assert found.ids == tokens and found.stop_reason == "complete"
    assert all(one.verified for one in found.tokens)
    assert [one.row for one in found.tokens if one.row >= 0] == [0, 1, 2, 3]


@pytest.mark.slow
def test_wrong_sums_verify_nothing(tiny_model: LoadModel, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = tiny_model("gpt_neox", 1), tokens_of(7, 4)

    def wrong(self: AttentionSums, rows: Sequence[Shown]) -> Iterator[list[dict[int, int]]]:
        yield [{p: (tokens[p] + 1) % VOCABULARY for p in rows[-1].missing}]

    monkeypatch.setattr(AttentionSums, "name", wrong)
    monkeypatch.setattr(gap, "BEAM_POSITIONS", 1)
    found = released(model, tokens, "shard:alpha=3,c=1,node=0", budget=1)
    assert not any(one.verified for one in found.tokens[1:])
    assert found.stop_reason == "2 of 2 rows not matched within the budget"


@pytest.mark.slow
@pytest.mark.parametrize("silent", [0, 1])
def test_more_rows_of_a_cluster_are_asked_where_one_does_not_tell(
    tiny_model: LoadModel, monkeypatch: pytest.MonkeyPatch, silent: int
) -> None:
    model, tokens = tiny_model("gpt_neox", 1), tokens_of(15, 5)
    name, asked = AttentionSums.name, list[list[int]]()

    def noted(self: AttentionSums, rows: Sequence[Shown]) -> Iterator[list[dict[int, int]]]:
        asked.append([row.position for row in rows])
        return iter(()) if len(asked) <= silent else name(self, rows)

    monkeypatch.setattr(AttentionSums, "name", noted)
    found = released(model, tokens, "shard:alpha=2,c=3,node=0")
    assert asked == ([[6], [6, 7, 8], [12]] if silent else [[6], [12]])
    assert found.ids == tokens and all(one.verified for one in found.tokens)


@pytest.mark.parametrize(
    ("layer", "specs", "can"),
    [
        (1, ["shard:alpha=2,c=1,node=0"], True),
        (1, ["identity", "drop-rows:size=1,after=3"], True),
        ((2, "qkv"), ["drop-rows:size=1,after=3"], True),
        ((2, "v"), ["drop-rows:size=1,after=3"], True),
        ((2, "attn"), ["drop-rows:size=1,after=3"], False),
        ((3, "kv"), ["drop-rows:size=1,after=3"], False),
        (2, ["drop-rows:size=1,after=3"], False),
        (1, ["gaussian:sigma=0.01", "drop-rows:size=1,after=3"], False),
        (1, ["project:count=16", "drop-rows:size=1,after=3"], False),
        (1, ["hidden-perm", "drop-rows:size=1,after=3"], False),
        (1, ["random-prefix", "drop-rows:size=1,after=3"], False),
        (1, ["dtype:bfloat16", "drop-rows:size=1,after=3"], True),
        (1, ["int8", "drop-rows:size=1,after=3"], True),
    ],
)  # fmt: skip
def test_where_rows_can_be_turned_back(
    tiny_model: LoadModel, layer: int | tuple[int, str], specs: list[str], can: bool
) -> None:
    model = tiny_model("llama", *(layer if isinstance(layer, tuple) else (layer,)))
    observation = Channel.parse(specs).release(model, tokens_of(6), torch.Generator())[0]
    assert AttentionSums.applies(observation.info, model) is can


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", *slow_cases("float16")])
@pytest.mark.parametrize("here", [True, *slow_cases(False)])
def test_rows_that_are_rounded_are_explained_as_far_as_rounding_allows(
    tiny: Callable[..., str], dtype: str, here: bool
) -> None:
    """By the provider's dtype, which is also the attacker's own, or not."""
    model = load_model(tiny("gpt_neox"), 1, dtype=dtype if here else "float32", device="cpu")
    channel, right = Channel.parse([] if here else [f"dtype:{dtype}"]), 0
    for seed in range(4):
        tokens = tokens_of(9, seed)
        observation, _ = channel.release(model, tokens, torch.Generator())
        if seed == 0:
            names = AttentionSums(model, observation.info)
            assert 1e-4 < names.coarse < 0.02
        row = replace(shown(model, tokens, 8, [6, 7]), state=observation.states[-1].float())
        right += named(names, [row]) == dict(zip((6, 7), tokens[6:8], strict=True))
    assert right >= 3


def test_a_right_sum_leaves_what_rounding_leaves(tiny_model: LoadModel) -> None:
    with torch.inference_mode():
        search, right = searching(tiny_model("gpt_neox", 1), tokens_of(9, 3), [4, 5, 6])
    assert search.best(right) < EXPLAINED / 5


@pytest.mark.slow
def test_many_places_are_weighed_together(tiny_model: LoadModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BEAMED", 4)
    model, right = tiny_model("gpt_neox", 1), 0
    names = AttentionSums(model)
    for seed in range(4):
        tokens, missing = tokens_of(12, seed), list(range(1, 9))
        found = named(names, [shown(model, tokens, p, missing) for p in (9, 10, 11)])
        right += found == {p: tokens[p] for p in missing}
    assert right >= 3
    # Fewer rows than that many tokens need: not tried.
    monkeypatch.setattr(module, "PER_ROW", 4)
    assert not named(names, [shown(model, tokens, 9, missing)])


@pytest.mark.slow
def test_tokens_are_weighed_as_without_their_own_place(tiny_model: LoadModel) -> None:
    """Taking a place's own covariance out of what all may contribute, against factorising what the others may."""
    model, tokens = tiny_model("llama", 1), tokens_of(9, 1)
    with torch.inference_mode():
        search, _ = searching(model, tokens, [4, 5, 6])
        beliefs = Beliefs(search)
        beliefs._list(search.places, 16.0, 0.2, 3e-3)
        left, covariance, mass, spread = beliefs._missed(0.1)
        whitened = search.whitening(mass, covariance, 3e-3, spread)
        for place in search.places:
            belief = beliefs.held[place]
            said, _ = beliefs._log_likelihoods(belief, whitened, whitened(left[None])[0], 0.9)
            rows = belief.spread()
            others = search.whitening(mass, covariance - 0.9 * rows.T @ rows, 3e-3, spread)
            off = others(left + belief.mean() - belief.parts.double())
            plain = -off.square().sum(1) / 2
            torch.testing.assert_close(said - said.max(), plain - plain.max(), rtol=1e-3, atol=1e-2)
