"""Beam decoding: the beam against every sequence there is, the solver against linear algebra, whole runs."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hiddenlab.attacks.beam_decoding import BeamDecoding
from hiddenlab.attacks.beam_decoding.beam import decode
from hiddenlab.attacks.beam_decoding.embedding_inversion import _conjugate, newton
from hiddenlab.attacks.beam_decoding.features import (
    BEFORE,
    FEATURES,
    PLACE,
    PRECEDES,
    Learned,
    Rows,
    _distances,
    candidates_of,
    chosen,
    likeliest,
    unseen,
)
from hiddenlab.attacks.beam_decoding.future_cost import OWN, SHARE, ahead_of
from hiddenlab.attacks.beam_decoding.hypotheses import Effort, Engines, start
from hiddenlab.attacks.beam_decoding.local_search import Parts, _language_scores, _score
from hiddenlab.attacks.beam_decoding.position_model import PositionModel
from hiddenlab.attacks.beam_decoding.row_features import length_of
from hiddenlab.attacks.beam_decoding.weights import START, Table, fit, lead_of
from hiddenlab.channels import Channel
from hiddenlab.errors import InputError, NotApplicableError
from hiddenlab.matching.distance import Matcher
from hiddenlab.models import TruncatedModel, load_model
from hiddenlab.types import Observation, ObservationInfo, Site
from tests.marks import slow_cases

WEIGHTS = torch.tensor([0.7, 0.5, 0.3, 0.2, 1.0, 0.4, -2.0, -1.0, -0.5])
MATCHER = Matcher(1, False)


def rows_of(states: Tensor, ids: Tensor, places: tuple[int, ...] | None, length: int) -> Rows:
    """Rows with probabilities, traces and places drawn at random."""
    generator = torch.Generator().manual_seed(7)
    distinct, columns = ids.unique(return_inverse=True)
    n = len(states)
    odds, units = torch.randn(n, n, generator=generator), 1 + torch.rand(n, generator=generator)
    mixed = torch.randn(states.shape[1], states.shape[1], generator=generator)
    return Rows(
        MATCHER.prepare(states), MATCHER.norms(states), states @ mixed, units, ids,
        torch.randn(ids.shape, generator=generator).log_softmax(1), columns,
        torch.randn(2, n, len(distinct), generator=generator).log_softmax(2), places, length,
        None if places is not None else torch.randn(n, length, generator=generator),
        None if places is not None else odds - odds.T,
        None if places is not None else units,
        mixed,
    )  # fmt: skip


def score(view: Rows, model: TruncatedModel, lm: TruncatedModel, path: list[tuple[int, int]]) -> float:
    """The score of one whole sequence of (row, place in the row's shortlist), by plain passes: the oracle."""
    tokens = torch.tensor([int(view.ids[row, k]) for row, k in path])
    states, following = model.encode(tokens), lm.encode(tokens).log_softmax(-1)
    total = 0.0
    for i, (row, k) in enumerate(path):
        features = torch.zeros(len(FEATURES))
        features[0] = view.scores[row, k]
        if i:
            features[1] = following[i - 1, tokens[i]]
        assert view.traces is not None
        for t, offset in enumerate((1, 2)):
            if view.places is not None and i + offset < len(path):
                features[2 + t] = view.traces[t, i + offset, view.columns[row, k]]
            if view.places is None and i >= offset:
                before = path[i - offset]
                features[2 + t] = view.traces[t, row, view.columns[before]]
        distance = (states[i] - view.shown[row]).abs().sum()
        features[BEFORE] = (distance / view.norms[row]).log()
        features[BEFORE + 1] = (
            ((states[i] - view.shown[row]) @ view.whitening).norm() / view.units[row]
        ).log()
        if view.places is None:
            assert view.when is not None
            assert view.expected is not None
            features[PLACE] = view.when[row, i]
            assert view.precedes is not None
            features[PRECEDES] = sum(view.precedes[row, later] for later, _ in path[i + 1 :])
            features[BEFORE + 2] = (distance / view.expected[row]).log()
        total += float(features @ WEIGHTS)
    return total


@pytest.mark.slow
@pytest.mark.parametrize("ordered", [True, False])
def test_a_wide_beam_finds_the_best_of_all_sequences(
    tiny_model: Callable[..., TruncatedModel], ordered: bool
) -> None:
    model, lm = tiny_model("llama", 2), tiny_model("llama", None, "logits")
    generator = torch.Generator().manual_seed(3)
    n = 3
    ids = torch.stack([torch.randperm(300, generator=generator)[:3] for _ in range(n)])
    states = model.encode(ids[:, 0]) + 0.5 * torch.randn(n, model.width, generator=generator)
    view = rows_of(states, ids, tuple(range(n)) if ordered else None, n)
    engines = Engines(model, MATCHER, lm.prefix())
    with torch.inference_mode():
        decoding = start(view, engines, WEIGHTS, Effort())
        decode([decoding], engines, Learned(WEIGHTS), Effort(beam=1000, width=1000, gap=1e9, behind=1e9))
        orders = [tuple(range(n))] if ordered else list(itertools.permutations(range(n)))
        everything = {
            tuple(zip(order, ks, strict=True)): score(view, model, lm, list(zip(order, ks, strict=True)))
            for order in orders
            for ks in itertools.product(range(3), repeat=n)
        }
    best = max(everything, key=lambda path: everything[path])
    found = decoding.beam[0]
    assert [(one.row, one.token) for one in found.steps] == [(row, int(ids[row, k])) for row, k in best]
    assert found.score == pytest.approx(everything[best], rel=1e-3)
    assert len(decoding.beam) > 10
    assert found.score == max(one.score for one in decoding.beam)


def test_positions_without_a_row_are_left_to_the_language_model(
    tiny_model: Callable[..., TruncatedModel],
) -> None:
    model = tiny_model("llama", 2)
    states = model.encode(torch.tensor([5, 6, 7]))[[0, 2]]
    view = rows_of(states, torch.tensor([[5, 8], [7, 9]]), (0, 2), 3)
    following = torch.arange(300.0).log_softmax(0)
    unseen = candidates_of(view, 1, [0, 1], [0], following, torch.tensor([299, 298, 297, 296]))
    assert set(unseen.rows.tolist()) == {-1}
    unseen.measure(torch.zeros(4, model.width), torch.arange(4), view, MATCHER)
    assert not unseen.features[:, BEFORE:].any()
    seen = candidates_of(view, 2, [0, 1], [0, -1], following)
    assert seen.rows.tolist() == [1, 1]
    assert chosen(view, 1)
    assert not chosen(view, 2)
    assert likeliest(view, 1, [0, 1], following, WEIGHTS, 4).tolist() == [299, 298, 297, 296]
    # The row behind it remembers another token.
    told = torch.zeros(2, 300)
    told[0, 7] = 1e4
    reminded = replace(view, missed={1: told})
    assert likeliest(reminded, 1, [0, 1], following, WEIGHTS, 2).tolist() == [7, 299]
    features = candidates_of(reminded, 1, [0, 1], [0], following, torch.tensor([7, 299])).features
    assert features[:, 2].tolist() == [1e4, 0.0]


@settings(max_examples=20)
@given(st.integers(0, 10_000), st.integers(2, 5))
def test_the_weights_find_what_decides(seed: int, wrong: int) -> None:
    """Where one feature alone tells the right candidate, its weight grows until it does."""
    generator = torch.Generator().manual_seed(seed)
    begin = torch.tensor(START)
    tables = []
    for _ in range(60):
        table = torch.randn(1 + wrong, len(FEATURES), generator=generator)
        table[0, 4] = table[:, 4].max() + 1.0
        tables.append(table)
    weights = fit([Table(one, torch.zeros(len(one)), torch.ones(len(one)).bool()) for one in tables], begin)
    right = sum(int((table @ weights).argmax()) == 0 for table in tables)
    assert right > sum(int((table @ begin).argmax()) == 0 for table in tables)
    assert right >= 55


def test_without_tables_the_weights_stay() -> None:
    assert torch.equal(fit([], torch.tensor(START)), torch.tensor(START))


def test_the_clock_reads_positions() -> None:
    generator = torch.Generator().manual_seed(0)
    places = torch.randint(0, 60, (4000,), generator=generator).float()
    rows = torch.randn(4000, 48, generator=generator)
    rows[:, 3] += 2 * places.log1p()
    position_model = PositionModel.learn(rows[:3000], places[:3000])
    told = position_model(rows[3000:], 80)
    torch.testing.assert_close(told.exp().mean(1), torch.ones(1000))  # over all positions alike
    own = told.gather(1, places[3000:, None].long())[:, 0]
    assert own.mean() > 0.4
    assert own[places[3000:] < 4].mean() > 1.5
    assert position_model(rows[:5], 3).shape == (5, 3)
    noise = PositionModel.learn(torch.randn(12_000, 8, generator=generator), torch.arange(12_000) % 64.0)
    for length in (37, 47, 64, 200):  # rows that say nothing say it of all places, however long the prompt
        assert noise(rows[:50, :8], length).mean(0).abs().max() < 0.4


def test_a_clock_that_reads_nothing_says_nothing() -> None:
    """A regression's guess, the middle, would speak against every row at the first places."""
    generator = torch.Generator().manual_seed(0)
    places = torch.randint(0, 60, (6000,), generator=generator).float()
    rows = torch.randn(6000, 48, generator=generator)
    own = PositionModel.learn(rows[:3000], places[:3000])(rows[3000:], 60).gather(
        1, places[3000:, None].long()
    )[:, 0]
    assert own[places[3000:] < 4].mean() > -0.3
    assert own.mean() > -0.2


def test_conjugate_gradients_solve_each_row(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    half = torch.randn(3, 6, 6, generator=generator)
    matrices = half @ half.transpose(1, 2) + torch.eye(6)
    right = torch.randn(3, 6, generator=generator)
    monkeypatch.setattr("hiddenlab.attacks.beam_decoding.embedding_inversion.PRODUCTS", 30)
    found = _conjugate(lambda v: torch.einsum("rij,rj->ri", matrices, v), right)
    torch.testing.assert_close(found, torch.linalg.solve(matrices, right), rtol=1e-3, atol=1e-3)


def test_a_step_solves_what_is_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    """The least of a sum of squares, in coordinates of their own deviation, for each problem by itself."""
    generator = torch.Generator().manual_seed(0)
    maps = torch.randn(3, 8, 5, generator=generator)
    centre, observed = torch.randn(3, 5, generator=generator), torch.randn(3, 8, generator=generator)
    sigma, tau = torch.rand(5, generator=generator) + 0.1, torch.rand(3, 8, generator=generator) + 0.5
    monkeypatch.setattr("hiddenlab.attacks.beam_decoding.embedding_inversion.PRODUCTS", 30)

    def states(points: torch.Tensor, grad: bool) -> torch.Tensor:
        return torch.einsum("reu,ru->re", maps, points)

    noise, cost = newton(states, centre, sigma, torch.zeros(3, 5), observed, tau)
    scaled = maps * sigma / tau[..., None]
    missing = (observed - states(centre, False)) / tau
    least = torch.linalg.solve(
        scaled.transpose(1, 2) @ scaled + torch.eye(5), torch.einsum("reu,re->ru", scaled, missing)
    )
    torch.testing.assert_close(noise, least, rtol=1e-3, atol=1e-3)
    left = missing - torch.einsum("reu,ru->re", scaled, least)
    torch.testing.assert_close(cost, (left.square().sum(1) + least.square().sum(1)) / 2, rtol=1e-3, atol=1e-3)


def attack(model: TruncatedModel, specs: list[str], tokens: list[int], **options: object) -> list[int]:
    observation, _ = Channel.parse(specs).release(model, tokens, torch.Generator().manual_seed(0))
    attack = BeamDecoding(lm=False, **options)  # type: ignore[arg-type]
    attack.fit(observation.info, model)
    return attack.fit(observation.info, model).recover(observation).ids


@pytest.mark.slow
@pytest.mark.usefixtures("small_probes")
@pytest.mark.parametrize(
    "specs",
    [
        ["gaussian:sigma=0.003"],
        *slow_cases(["identity"], ["gaussian:sigma=0.003", "seq-perm"], ["hidden-perm"]),
    ],
)
def test_prompts_come_back_where_every_token_is_tried(
    tiny_model: Callable[..., TruncatedModel], monkeypatch: pytest.MonkeyPatch, specs: list[str]
) -> None:
    """A tiny model's probe knows little: with all tokens among the candidates, states in context decide."""
    monkeypatch.setattr("hiddenlab.attacks.beam_decoding.row_features.SHORTLIST", 300)
    tokens = torch.randint(0, 256, (7,), generator=torch.Generator().manual_seed(5)).tolist()
    assert attack(tiny_model("llama", 2), specs, tokens, width=3000, beam=2) == tokens


@pytest.mark.parametrize("ordered", [True, False])
def test_what_was_not_run_is_weighed_as_candidates_are(ordered: bool) -> None:
    generator = torch.Generator().manual_seed(7)
    ids = torch.randperm(300, generator=generator)[:9].view(3, 3)
    states = torch.randn(3, 32, generator=generator)
    wide = torch.randn(3, 300, generator=generator).log_softmax(1)
    view = replace(rows_of(states, ids, tuple(range(3)) if ordered else None, 3), wide=wide)
    following = torch.randn(300, generator=generator).log_softmax(0)
    free, run = [0, 2], torch.tensor([3, 40, 299])
    everything = candidates_of(view, 2, free, [], following, torch.arange(300))
    totals = everything.features[:, :BEFORE] @ WEIGHTS[:BEFORE]
    best = torch.full((300,), float("-inf")).scatter_reduce(0, everything.tokens, totals, "amax")
    expected = float(best[~torch.isin(torch.arange(300), run)].logsumexp(0))
    assert unseen(view, 2, free, following, WEIGHTS, run) == pytest.approx(expected, rel=1e-5)


def table_of(scores: Sequence[float], tried: Sequence[bool], unseen: float | None) -> Table:
    """Candidates whose scores the probe alone makes."""
    features = torch.zeros(len(scores), len(FEATURES))
    features[:, 0] = torch.tensor(scores)
    mass = None if unseen is None else lambda weights: unseen * float(weights[0])
    return Table(features, torch.zeros(len(scores)), torch.tensor(tried), mass)


def test_how_far_the_best_must_be_ahead_is_learned_from_right_ones_and_from_where_they_were_not_run() -> None:
    weights = torch.zeros(len(FEATURES))
    weights[0] = 2.0

    def leads(of: Tensor, right: bool) -> list[Table]:
        return [table_of([9.0, lead, 0.0], [right, True, True], 1.0) for lead in of] if not right else [
            table_of([lead, 0.0], [True, True], 1.0) for lead in of
        ]  # fmt: skip

    spread = torch.linspace(0, 1, 101).double()
    wrong = leads(spread, right=False)
    swapped = [table_of([5.0, 8.0, 9.0], [True, True, True], 1.0)]  # run, but a wrong one is better
    # Overlapping: two in a hundred wrong ones are further ahead than 0.98, times the weight.
    near = leads(0.5 + spread, right=True)
    assert lead_of([*near, *swapped, *wrong], weights) == pytest.approx(2 * (0.98 - 1.0), abs=1e-3)
    # Apart: all but two in a hundred right ones.
    far = leads(5.0 + spread, right=True)
    assert lead_of([*far, *wrong], weights) == pytest.approx(2 * (5.02 - 1.0), abs=1e-3)
    # Right ones that are no further ahead than wrong ones say nothing.
    assert lead_of([*leads(spread, right=True), *wrong], weights) == float("-inf")
    assert lead_of(wrong, weights) == float("-inf")
    assert lead_of([*far, *swapped], weights) == float("-inf")
    assert lead_of([table_of([5.0, 1.0], [True, True], None)], weights) == float("-inf")
    assert lead_of([], weights) == float("-inf")


@pytest.mark.usefixtures("small_probes")
def test_rows_are_worth_what_the_best_of_the_others_leads_to(
    tiny_model: Callable[..., TruncatedModel],
) -> None:
    model, lm = tiny_model("llama", 2), tiny_model("llama", None, "logits")
    ids = torch.tensor([[5, 6], [7, 8], [9, 10]])
    view = rows_of(model.encode(ids[:, 0]), ids, None, 3)
    with torch.inference_mode():
        found = ahead_of(view, lm.prefix(), WEIGHTS)
        assert ahead_of(replace(view, places=(0, 1, 2)), lm.prefix(), WEIGHTS) is None
        following = {int(one): lm.encode(one[None])[0].log_softmax(-1) for one in ids[:, 0]}
    assert found is not None
    assert view.traces is not None
    assert view.expected is not None
    for row in range(3):
        token, others = int(ids[row, 0]), [q for q in range(3) if q != row]
        one = max(
            WEIGHTS[2] * view.traces[0, row, view.columns[q, 0]]
            + WEIGHTS[1] * following[int(ids[q, 0])][token]
            for q in others
        )
        two = max(WEIGHTS[3] * view.traces[1, row, view.columns[q, 0]] for q in others)
        sure = WEIGHTS[0] * (view.scores[row].exp() * view.scores[row]).sum()
        distance = WEIGHTS[BEFORE] * (view.expected[row] / view.norms[row]).log()
        expected = SHARE * float(one + two) + OWN * float(sure + distance)
        assert float(found[row]) == pytest.approx(expected, rel=1e-4)


@pytest.mark.usefixtures("small_probes")
def test_scores_of_whole_orders_are_the_beams(tiny_model: Callable[..., TruncatedModel]) -> None:
    model, lm = tiny_model("llama", 2), tiny_model("llama", None, "logits")
    generator = torch.Generator().manual_seed(3)
    ids = torch.randperm(300, generator=generator)[:12].view(4, 3)
    states = model.encode(ids[:, 0])
    view = rows_of(states + 0.1 * torch.randn(states.shape, generator=generator), ids, None, 4)
    engines = Engines(model, MATCHER, lm.prefix())
    orders = torch.tensor([[0, 1, 2, 3], [2, 0, 3, 1]])
    parts = Parts(ids[:, 0], torch.arange(4), view.columns[:, 0], torch.zeros(4, 4), model.prefix())
    with torch.inference_mode():
        scores, _ = _score(parts, orders, view, engines, WEIGHTS)
        totals = (scores + _language_scores(parts, orders, engines, WEIGHTS)).sum(1)
        probe = float(WEIGHTS[0] * view.scores[:, 0].sum())
        for order, total in zip(orders.tolist(), totals.tolist(), strict=True):
            oracle = score(view, model, lm, [(row, 0) for row in order])
            assert total + probe == pytest.approx(oracle, rel=1e-3)


@pytest.mark.slow
@pytest.mark.usefixtures("small_probes")
def test_batches_are_answered_as_one_by_one(tiny_model: Callable[..., TruncatedModel]) -> None:
    model = tiny_model("llama", 2)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, 256, (n,), generator=generator).tolist() for n in (9, 4, 12)]
    released = Channel.parse(["gaussian:sigma=0.01"]).release_batch(model, prompts, generator)
    attack = BeamDecoding(lm=False)
    together = attack.fit((shown := [one for one, _ in released])[0].info, model).recover_batch(shown)
    alone = [attack.fit(one.info, model).recover(one) for one, _ in released]
    assert [one.ids for one in together] == [one.ids for one in alone]
    assert all(not token.verified for one in together for token in one.tokens)


@pytest.mark.slow
@pytest.mark.usefixtures("small_probes")
@pytest.mark.parametrize("node", [0, 1])
def test_a_shards_missing_tokens_are_guessed(tiny: Callable[..., str], node: int) -> None:
    """One recovered token for each position, and rows only where the node holds them."""
    model = load_model(tiny("llama", tokenizer=True), 2, device="cpu")
    channel = Channel.parse([f"shard:alpha=2,c=2,node={node}"])
    observation, secret = channel.release(
        model, model.tokenize("ten bytes!"), torch.Generator().manual_seed(0)
    )
    found = BeamDecoding(beam=2).fit(observation.info, model).recover(observation)
    held = observation.info.positions
    assert held is not None
    assert len(found.tokens) == len(secret.tokens)
    assert [i for i, token in enumerate(found.tokens) if token.row >= 0] == list(held)
    assert all(token.distance != token.distance for token in found.tokens if token.row < 0)


@pytest.mark.slow
@pytest.mark.usefixtures("small_probes")
def test_a_partly_shown_prompt_beside_it_changes_nothing(tiny_model: Callable[..., TruncatedModel]) -> None:
    """A prompt short enough to be held whole by one node is decoded alike in any company."""
    model = tiny_model("llama", 2)
    channel = Channel.parse(["gaussian:sigma=0.15", "shard:alpha=2,c=6,node=0"])
    generator = torch.Generator().manual_seed(3)
    short = channel.release(model, [5, 17, 40, 99, 140], generator)[0]
    assert short.info.positions is None
    long = channel.release(model, list(range(14)), generator)[0]
    attack = BeamDecoding(lm=False)
    with pytest.raises(NotApplicableError, match="language model"):
        attack.fit((shown := [short, long])[0].info, model).recover_batch(shown)
    attack = BeamDecoding(beam=2)
    alone = attack.fit(short.info, model).recover(short)
    together = attack.fit((shown := [short, long])[0].info, model).recover_batch(shown)[0]
    assert (alone.ids, alone.evaluated_tokens) == (together.ids, together.evaluated_tokens)


@pytest.mark.slow
@pytest.mark.usefixtures("small_probes")
@pytest.mark.parametrize("specs", [["gaussian:sigma=0.05"], ["gaussian:sigma=0.05", "seq-perm"]])
def test_every_position_run_is_counted(tiny_model: Callable[..., TruncatedModel], specs: list[str]) -> None:
    model = tiny_model("llama", 2)
    observation, _ = Channel.parse(specs).release(model, list(range(9)), torch.Generator().manual_seed(1))
    attack = BeamDecoding(lm=False, beam=2)
    attack.fit(observation.info, model).prepare(observation)
    before = model.evaluated_tokens
    found = attack.fit(observation.info, model).recover(observation)
    assert abs(model.evaluated_tokens - before - found.evaluated_tokens) <= 6  # a sweep's share is rounded


@pytest.mark.slow
@pytest.mark.usefixtures("small_probes")
def test_a_half_precision_attacker_gets_no_second_look(tiny: Callable[..., str]) -> None:
    model = load_model(tiny("llama"), 2, dtype="bfloat16", device="cpu")
    observation, _ = Channel.parse(["gaussian:sigma=0.05"]).release(
        model, [1, 2, 3, 4], torch.Generator().manual_seed(1)
    )
    assert len(BeamDecoding(lm=False).fit(observation.info, model).recover(observation).ids) == 4


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"positions": (0, 2, 5), "facts": {"tokens": 4}}, InputError),
        ({"positions": (0, 2, 5), "facts": {"tokens": "x"}}, InputError),
        ({"positions": (0, 2)}, InputError),
        ({"positions": (0, 2, 5), "rows_permuted": True}, NotApplicableError),
    ],
)
def test_lengths_that_contradict_the_rows(changes: dict[str, object], error: type[Exception]) -> None:
    info = ObservationInfo("m", (), Site(1), **changes)  # type: ignore[arg-type]
    with pytest.raises(error):
        length_of(Observation(torch.zeros(3, 4), info))


@pytest.mark.slow
@pytest.mark.usefixtures("small_probes")
def test_noise_with_missing_rows_alone(tiny_model: Callable[..., TruncatedModel]) -> None:
    """No prompt to look at again is no error."""
    model = tiny_model("llama", 2)
    channel = Channel.parse(["gaussian:sigma=0.15", "shard:alpha=2,c=6,node=0"])
    observation = channel.release(model, list(range(14)), torch.Generator().manual_seed(3))[0]
    assert len(BeamDecoding(beam=2).fit(observation.info, model).recover(observation).ids) == 14


def test_lengths() -> None:
    def length(**changes: object) -> int:
        info = ObservationInfo("m", (), Site(1), **changes)  # type: ignore[arg-type]
        return length_of(Observation(torch.zeros(3, 4), info))

    assert length() == 3
    assert length(facts={"tokens": "whatever another defense says"}) == 3
    assert length(positions=(0, 2, 5)) == 6
    assert length(positions=(0, 2, 5), facts={"tokens": 9}) == 9


@pytest.mark.usefixtures("small_probes")
def test_what_it_cannot_use_is_refused(tiny_model: Callable[..., TruncatedModel]) -> None:
    model = tiny_model("llama", 2)
    observation, _ = Channel.parse(["project:count=4"]).release(
        model, [1, 2, 3], torch.Generator().manual_seed(0)
    )
    with pytest.raises(NotApplicableError, match="whole states"):
        BeamDecoding().fit(observation.info, model).recover(observation)
    whole, _ = Channel.parse([]).release(model, [1, 2, 3])
    narrow = Observation(whole.states[:, :3], whole.info)
    with pytest.raises(InputError):
        BeamDecoding().fit(narrow.info, model).recover(narrow)
    for options in ({"beam": 0}, {"width": 0}, {"rounds": -1}):
        with pytest.raises(InputError):
            BeamDecoding(**options)  # type: ignore[arg-type]


@settings(max_examples=40)
@given(
    states=st.integers(1, 6),
    rows=st.integers(1, 5),
    pairs=st.integers(1, 40),
    norm=st.sampled_from([1, 2]),
    seed=st.integers(0, 1000),
)
def test_distances_of_pairs(states: int, rows: int, pairs: int, norm: int, seed: int) -> None:
    """Whether a table of all is made or not, and with pairs that are asked for twice."""
    generator = torch.Generator().manual_seed(seed)
    found, shown = (torch.randn(n, 7, generator=generator) for n in (states, rows))
    of = torch.randint(0, states, (pairs,), generator=generator)
    which = torch.randint(0, rows, (pairs,), generator=generator)
    distances = _distances(found, of, shown, which, Matcher(norm, False))
    difference = found[of] - shown[which]
    torch.testing.assert_close(distances, torch.linalg.vector_norm(difference, ord=norm, dim=1))
