"""Rows behind secret linear maps: what the maps leave, distances by it against slow oracles, and prompts recovered."""

import importlib
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import lstsq, orthogonal_procrustes
from scipy.stats import multivariate_normal, norm
from torch import Tensor

from hiddenlab.attacks.beam_decoding import BeamDecoding
from hiddenlab.attacks.nearest import NearestEmbedding
from hiddenlab.attacks.sipit import SipIt
from hiddenlab.attacks.vocab_match import VocabMatch
from hiddenlab.attacks.vocab_match.task import Task
from hiddenlab.channels import Channel
from hiddenlab.errors import InputError, NotApplicableError
from hiddenlab.matching.batching import Search
from hiddenlab.matching.distance import Matcher, choose_matcher
from hiddenlab.matching.epsilon import Apart, Sample, _auto
from hiddenlab.matching.explained import FLOOR, USUAL, explained_by
from hiddenlab.matching.invariants import RELEASED, Span
from hiddenlab.matching.row_space import ROUNDED
from hiddenlab.models import TruncatedModel
from hiddenlab.proposals.expected_states import RIDGE, ExpectedStates
from hiddenlab.proposals.regressions import expected_states_for
from hiddenlab.proposals.ridge import KnownRows
from hiddenlab.proposals.store import training_channel
from hiddenlab.secret_maps import FACT, invariant_of
from hiddenlab.types import Observation, ObservationInfo, Site, TokenPrediction
from hiddenlab.utils.random import orthogonal

# The package holds the function of that name.
behind_map = importlib.import_module("hiddenlab.attacks.vocab_match.behind_map")

LoadModel = Callable[..., TruncatedModel]
SPECS = ("orthogonal", "orthogonal:fresh=row", "row-mixing", "row-mixing:kind=orthogonal")
TOKENS = [5, 77, 3, 3, 200, 41, 8, 150, 5, 77]
PUBLIC = ObservationInfo("m", (0.0,), Site(1))
COLUMNS, EACH_ROW, ROWS = (replace(PUBLIC, facts={FACT: [of]}) for of in ("columns", "each-row", "rows"))


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=seeded(seed))


def behind(info: ObservationInfo, released: Tensor, known: Tensor) -> Matcher:
    return choose_matcher("auto", info).bound(released).behind(known)


def distances(matcher: Matcher, candidates: Tensor, place: int) -> Tensor:
    assert matcher.frame is not None
    rows = matcher.frame.shown[place : place + 1]
    return matcher.table(candidates=matcher.view(candidates), observed=rows)[:, 0]


# ---- what the channels keep


def test_maps_keep_their_invariant_and_nothing_else(tiny_model: LoadModel) -> None:
    model = tiny_model("llama", 2)
    states = model.encode(torch.tensor(TOKENS))

    def released(spec: str, seed: int = 0) -> Tensor:
        return Channel.parse([spec]).release(model, TOKENS, seed)[0].states

    def same(a: Tensor, b: Tensor) -> bool:
        return torch.allclose(a, b, rtol=1e-3, atol=1e-3)

    one, each = released("orthogonal"), released("orthogonal:fresh=row")
    for rows in (one, each):
        assert same(rows.norm(dim=1), states.norm(dim=1)) and not same(rows, states)
    assert same(one @ one.T, states @ states.T) and not same(each @ each.T, states @ states.T)
    for spec in SPECS[2:]:
        mixed = released(spec)
        assert not same(mixed @ mixed.T, states @ states.T)
        weights = torch.linalg.lstsq(mixed.double().T, states.double().T).solution
        assert same((mixed.double().T @ weights).float(), states.T)
    for spec in SPECS:
        assert torch.equal(released(spec), released(spec)) and not same(released(spec), released(spec, 1))


def test_orthogonal_maps_are_drawn_evenly() -> None:
    """The first moments of a Haar matrix; without signs the diagonal of R would make the first entry positive."""
    generator = seeded(1)
    maps = torch.stack([orthogonal(3, generator) for _ in range(2000)])
    assert torch.allclose(maps[0] @ maps[0].T, torch.eye(3).double(), atol=1e-12)
    assert float(maps.mean(0).abs().max()) < 0.05
    assert torch.allclose(maps.square().mean(0), torch.full((3, 3), 1 / 3).double(), atol=0.03)
    assert abs(float(torch.linalg.det(maps).mean())) < 0.1


def test_what_is_left_follows_from_the_public_facts() -> None:
    assert [invariant_of(info) for info in (PUBLIC, COLUMNS, EACH_ROW, ROWS)] == [
        None,
        "gram",
        "norms",
        "span",
    ]
    both = replace(PUBLIC, facts={FACT: ["columns", "each-row"]})
    assert invariant_of(both) == invariant_of(replace(COLUMNS, columns_permuted="per-row")) == "norms"
    assert invariant_of(replace(COLUMNS, columns_permuted="shared")) == "gram"
    assert invariant_of(replace(ROWS, rows_permuted=True)) == "span"
    for wrong in (
        replace(PUBLIC, facts={FACT: ["columns", "rows"]}), replace(ROWS, columns_permuted="shared"),
        replace(COLUMNS, rows_permuted=True), replace(COLUMNS, positions=(0, 2)),
        replace(COLUMNS, facts={**COLUMNS.facts, "projection": {"count": 2, "seed": 0}}),
    ):  # fmt: skip
        with pytest.raises(NotApplicableError):
            invariant_of(wrong)
    for facts in ("columns", [], ["diagonal"], {"columns": 1}):
        with pytest.raises(InputError, match="secret_map"):
            invariant_of(replace(PUBLIC, facts={FACT: facts}))


# ---- distances against slow oracles


@settings(max_examples=30)
@given(known=st.integers(0, 6), width=st.integers(7, 12), seed=st.integers(0, 999))
def test_the_gram_distance_is_the_least_over_all_maps_that_fit(known: int, width: int, seed: int) -> None:
    """Procrustes: the best orthogonal map of known rows, which weigh so much that they fit, and of the candidate."""
    rows, candidates = drawn(known + 1, width, seed=seed), drawn(4, width, seed=seed + 1)
    released = rows @ orthogonal(width, seeded(seed)).float()
    found = distances(behind(COLUMNS, released, rows[:known]), torch.cat([candidates, rows[-1:]]), known)
    for candidate, distance in zip(candidates, found, strict=False):
        weights = torch.tensor([1e4] * known + [1.0]).double()[:, None]
        a, b = weights * torch.cat([rows[:known], candidate[None]]).double(), weights * released.double()
        best, _ = orthogonal_procrustes(a.numpy(), b.numpy())
        missed = candidate.double() @ torch.from_numpy(best) - released[-1].double()
        assert float(distance) == pytest.approx(float(missed.norm()), abs=2e-3)
    assert float(found[-1]) < 1e-4


@settings(max_examples=30)
@given(known=st.integers(0, 4), unknown=st.integers(1, 3), seed=st.integers(0, 999))
def test_the_span_distance_is_that_of_two_least_squares(known: int, unknown: int, seed: int) -> None:
    rows, candidates = drawn(known + unknown, 12, seed=seed), drawn(4, 12, seed=seed + 1)
    released = drawn(len(rows), len(rows), seed=seed + 2) @ rows
    found = distances(behind(ROWS, released, rows[:known]), torch.cat([candidates, rows[known:]]), known)

    def outside(candidate: Tensor, of: Tensor) -> float:
        if len(of) == 0:
            return float(candidate.norm())
        return float(lstsq(of.double().T.numpy(), candidate.double().numpy())[1]) ** 0.5

    for candidate, distance in zip(candidates, found, strict=False):
        sine = outside(candidate, released) / outside(candidate, rows[:known])
        assert float(distance) == pytest.approx((2 - 2 * (1 - sine**2) ** 0.5) ** 0.5, abs=1e-3)
    # Every token of the prompt that is still unknown fits, whatever its place.
    assert float(found[4:].max()) < 1e-2


def test_norms_alone_are_compared_where_each_row_has_a_map() -> None:
    rows = drawn(3, 8)
    matcher = behind(EACH_ROW, rows, rows[:1])
    wanted = (rows.double().norm(dim=1) - rows[1].double().norm()).abs()
    assert torch.allclose(distances(matcher, rows, 1), wanted, atol=1e-5)


@pytest.mark.parametrize("info", [COLUMNS, ROWS])
def test_a_row_that_repeats_the_first_is_no_direction(info: ObservationInfo) -> None:
    """A prompt that begins with one token twice has one state twice, up to rounding, which must not be compared."""
    first, others = drawn(1, 16), drawn(3, 16, seed=1)
    rows = torch.cat([first, first + 1e-6 * drawn(1, 16, seed=2), others])
    secret = orthogonal(16 if info is COLUMNS else 5, seeded()).float()
    released = rows @ secret if info is COLUMNS else secret @ rows
    for place in range(5):
        found = distances(
            behind(info, released, rows[:place]), torch.cat([rows, drawn(20, 16, seed=3)]), place
        )
        assert float(found[place]) < 2e-3 < 0.1 < float(found[5:].min())
    # Where no row repeats, the first one does not fit a second time.
    whole = torch.cat([first, others])
    secret = orthogonal(16 if info is COLUMNS else 4, seeded()).float()
    released = whole @ secret if info is COLUMNS else secret @ whole
    assert float(distances(behind(info, released, first), first, 1)) > 0.5


def test_a_mixture_that_makes_a_direction_small_does_not_lose_it() -> None:
    """States that are nearly alike are mixed by a matrix that nearly drops one: the smallest direction is theirs."""
    rows = drawn(1, 16) + 1e-2 * drawn(5, 16, seed=1)
    left, right = (orthogonal(5, seeded(seed)) for seed in (2, 3))
    secret = (left * torch.tensor([1, 1, 1, 1, 1e-4], dtype=torch.float64)) @ right
    released = (secret @ rows.double()).float()
    sizes = torch.linalg.svdvals(released.double())
    assert RELEASED < float(sizes[-1] / sizes[0]) < ROUNDED
    others = drawn(1, 16) + 1e-2 * drawn(20, 16, seed=4)
    for place in range(5):
        found = distances(behind(ROWS, released, rows[:place]), torch.cat([rows, others]), place)
        assert float(found[place]) < 0.02 and (place == 0 or float(found[5:].min()) > 0.1)


def test_states_of_which_little_is_new_are_not_lost_to_rounding() -> None:
    """Each state lies nearly in the space of those before it: what is new of one is 3e-4 of it, and rounding 3e-7."""
    first = drawn(1, 16)
    fresh = first.norm() * orthogonal(16, seeded(1)).float()[:5]
    rows = torch.cat([first, first + 3e-4 * fresh[1:]])
    released = orthogonal(5, seeded(2)).float() @ (rows + 3e-7 * fresh.roll(1, 0))
    others = first + 3e-3 * first.norm() * orthogonal(16, seeded(3)).float()[5:]
    for place in range(1, 5):
        matcher = behind(ROWS, released, rows[:place])
        found = distances(matcher, torch.cat([rows, others]), place)
        assert float(found[place]) < 1e-3 < 0.02 < float(found[5:].min())
        assert float(found[0]) > 0.9  # what the known rows span is no proof


@pytest.mark.parametrize("share", [1e-6, 1e-5, 4e-5])
def test_a_state_that_nearly_repeats_those_before_it_counts_as_a_repeat(share: float) -> None:
    """Else no candidate for it would fit: rounding is compared, and rows of fewer directions than tokens."""
    *rows, fresh = drawn(7, 64)
    rows[3] = sum(rows[:3]) + share * sum(rows[:3]).norm() * fresh / fresh.norm()
    rows = torch.stack(rows)
    for seed in range(5):
        matcher = behind(ROWS, orthogonal(6, seeded(seed)).float() @ rows, rows[:3])
        assert float(distances(matcher, rows[3:4], 3)) < 1e-3


def test_a_whole_prompt_is_viewed_like_its_positions_one_by_one() -> None:
    rows, beside = drawn(5, 16), drawn(5, 2, 16, seed=1)
    for info in (COLUMNS, EACH_ROW, ROWS):
        along, others = choose_matcher("auto", info).bound(rows).along(rows, beside)
        for place in range(5):
            matcher = behind(info, rows, rows[:place])
            assert torch.equal(
                along[place], matcher.view(torch.cat([rows[place : place + 1], beside[place]]))[0]
            )
            assert torch.allclose(others[place], matcher.view(beside[place]))


def test_distances_by_name_are_refused() -> None:
    with pytest.raises(NotApplicableError, match=r"span.*--distance auto"):
        choose_matcher("l1", ROWS)


# ---- what is expected of tokens


def expectation(width: int = 10, tokens: int = 30) -> ExpectedStates:
    """Invented states: errors of a known covariance, expected states of unit size."""
    root = drawn(width, width, seed=5)
    variances, directions = torch.linalg.eigh((root @ root.T / width + 0.1 * torch.eye(width)).double())
    half, inverse = ((directions * variances.pow(p) @ directions.T).float() for p in (0.5, -0.5))
    states = drawn(tokens, width, seed=6)
    one = torch.ones(tokens)
    return ExpectedStates(
        states @ inverse, one, half, inverse, states.square().sum(1), torch.tensor(0.2), states, one, one
    )


def test_coordinates_are_explained_as_by_the_normal_density() -> None:
    expected, rows = expectation(), drawn(5, 10, seed=7)
    states = expected.table @ expected.root
    released = rows @ orthogonal(10, seeded()).float()
    matcher = behind(COLUMNS, released, rows[:0])
    explained = explained_by(matcher.frame, expected)
    assert explained is not None
    for place in range(5):
        assert matcher.frame is not None
        basis = torch.linalg.qr(rows[:place].double().T).Q
        covariance = basis.T @ expected.covariance.double() @ basis
        slow = torch.zeros(len(states)).double()
        if place:
            inside = (rows[place].double() @ basis).numpy()
            slow = torch.tensor(
                [
                    multivariate_normal.logpdf(inside, (state.double() @ basis).numpy(), covariance.numpy())
                    for state in states
                ]
            )
        rest = rows[place].double() - basis @ (basis.T @ rows[place].double())
        left = states.double() - states.double() @ basis @ basis.T
        likely = left.square().sum(1) + expected.covariance.double().trace() - covariance.trace()
        slow = slow - ((likely.log() / 2 - rest.norm().log()) / expected.spread).square() / 2
        slow = -FLOOR * ((slow.max() - slow) / FLOOR).log1p()
        fast = explained.scores(matcher.frame).double()
        assert torch.allclose(fast - fast.max(), slow, atol=1e-3)
        matcher = matcher.behind(rows[place : place + 1])


@pytest.mark.parametrize("together", [False, True])
def test_what_explains_rows_follows_two_hypotheses_apart(together: bool) -> None:
    """Long enough for the buffer of coordinates to grow twice."""
    expected, rows = expectation(40), drawn(20, 40, seed=8)
    matcher = behind(COLUMNS, rows @ orthogonal(40, seeded()).float(), rows[:7])
    explained = explained_by(matcher.frame, expected)
    assert explained is not None and matcher.frame is not None
    explained.scores(matcher.frame)
    forks = [explained.fork(), explained.fork()]
    matchers = [matcher.behind(others) for others in (rows[7:19], drawn(12, 40, seed=9))]
    frames = [one.frame for one in matchers if one.frame is not None]
    if together:
        type(explained).follow(list(zip(forks, frames, strict=True)))
    for fork, own in zip(forks, matchers, strict=True):
        alone = explained_by(own.frame, expected)
        assert alone is not None and own.frame is not None
        assert torch.allclose(fork.scores(own.frame), alone.scores(own.frame), atol=1e-3)


def test_the_space_is_explained_by_the_nearest_state_within_it() -> None:
    """The nearest in units of the errors, by least squares for every token."""
    expected, rows = expectation(), drawn(3, 10, seed=8)
    explained = explained_by(behind(ROWS, rows, rows[:0]).frame, expected)
    frame = behind(ROWS, rows, rows[:0]).frame
    assert explained is not None and frame is not None
    slow = []
    for state in expected.table:
        missed = float(lstsq((rows @ expected.whitening).double().T.numpy(), state.double().numpy())[1])
        slow.append(-max(0.0, (missed - 7) / 14**0.5 - USUAL))
    bounded = -FLOOR * ((max(slow) - torch.tensor(slow)) / FLOOR).log1p()
    assert torch.allclose(explained.scores(frame), bounded, atol=1e-3)


@pytest.mark.slow
def test_expected_states_are_a_fit_to_known_rows(tiny_model: LoadModel) -> None:
    """What is kept, rounded and whitened, against the regression itself, on all rows, and the plain passes."""
    model, text = tiny_model("llama", 1), torch.tensor([7, 7, 250])
    tokens = torch.randint(0, 256, (900,), generator=seeded())
    states = torch.cat([model.encode(part) for part in tokens.split(30)])
    made = ExpectedStates.make(model, KnownRows(states, tokens, len(tokens)), text)
    behind_text = torch.stack([model.encode(torch.cat([text, torch.tensor([t])]))[-1] for t in range(256)])
    own = behind_text[tokens].double()
    # Ridge regression as least squares with further rows, of length sqrt(ridge) and target 0.
    inputs, targets = own - own.mean(0), states.double() - states.double().mean(0)
    ridge = (RIDGE * inputs.square().sum(0).mean()).sqrt() * torch.eye(model.width).double()
    fitted = torch.linalg.lstsq(
        torch.cat([inputs, ridge]), torch.cat([targets, torch.zeros_like(ridge)])
    ).solution
    wanted = (behind_text.double() - own.mean(0)) @ fitted + states.double().mean(0)
    kept = made.along(torch.eye(model.width))[:256].double()
    assert float((kept - wanted).norm() / wanted.norm()) < 0.01
    errors = states.double() - wanted[tokens]
    covariance = made.covariance.double()
    assert float((covariance - errors.T @ errors / len(errors)).norm() / covariance.norm()) < 0.1
    first = torch.cat(list(made.alone()))
    alone = torch.stack([model.encode(torch.tensor([t]))[0] for t in range(model.vocab_size)])
    assert torch.allclose(first.float(), alone, rtol=1e-2, atol=1e-2)
    assert torch.allclose(first.norm(dim=1), alone.double().norm(dim=1), rtol=1e-6)


def test_maps_are_left_out_of_what_proposals_learn_from(tiny_model: LoadModel) -> None:
    model = tiny_model("llama", 1)
    plain = training_channel(model, replace(PUBLIC, channel=("gaussian:sigma=0.1",)))
    assert training_channel(model, replace(PUBLIC, channel=("gaussian:sigma=0.1", *SPECS))) == plain
    expected_states_for(model, replace(PUBLIC, channel=(SPECS[0],)))
    assert expected_states_for(model, replace(PUBLIC, channel=(SPECS[2],)))[1] == 0  # they lie in the cache


# ---- the attack


def released(model: TruncatedModel, *specs: str, tokens: list[int] = TOKENS) -> Observation:
    return Channel.parse(specs).release(model, tokens, seeded())[0]


@pytest.mark.slow
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("tokens", [TOKENS, [9, 9, 9, 4, 9, 30], [31]], ids=["text", "repeats", "one"])
@pytest.mark.parametrize(("architecture", "layer"), [("llama", 1), ("gemma3_text", 3)])
def test_prompts_come_back_exactly(
    tiny_model: LoadModel, spec: str, tokens: list[int], architecture: str, layer: int
) -> None:
    observation = released(tiny_model(architecture, layer), spec, tokens=tokens)
    found = VocabMatch().fit(observation.info, tiny_model(architecture, layer)).recover(observation)
    assert found.ids == tokens
    if spec.startswith("row-mixing") and tokens[:2] == [9, 9]:  # what the first state spans proves nothing
        assert [token.verified for token in found.tokens] == [True, False, False, True, True, True]
        return
    # A single row shows a norm at most, or its direction: nothing else confirms it. Of norms alone, wrong tokens come
    # as near by chance where many are tried.
    if spec != "orthogonal:fresh=row":
        assert found.verified == (len(tokens) > 1)


def test_a_token_that_repeats_a_state_does_not_come_before_one_that_adds_a_direction(
    tiny_model: LoadModel,
) -> None:
    """Of mixed rows with one direction too few every repeated state fits at once, and is no proof."""
    model, tokens = tiny_model("llama", 1), [9, 4, 30, 9, 9, 4]
    for seed in range(4):
        observation = Channel.parse(["row-mixing"]).release(model, [9, *tokens], seeded(seed))[0]
        found = VocabMatch().fit(observation.info, model).recover(observation)
        assert all(
            token.token == true
            for token, true in zip(found.tokens, [9, *tokens], strict=True)
            if token.verified
        )
        assert [token.verified for token in found.tokens][:4].count(True) >= 3


@pytest.mark.parametrize("matches", [1, 5, 99])
def test_a_second_token_counts_what_ran_behind_other_first_tokens(
    tiny_model: LoadModel, monkeypatch: pytest.MonkeyPatch, matches: int
) -> None:
    """Each of them is a chance of a wrong match."""
    model, ran = tiny_model("llama", 1), list[int]()
    observation = released(model, "orthogonal:fresh=row", tokens=[5, 77])

    def openings(task: Task) -> Search:
        return [TokenPrediction(token, 0, 0.0, None, 1, True) for token in (3, 5, 9)]
        yield

    def searched(task: Task) -> Search:
        ran.append(10 + len(ran))
        task.accept(TokenPrediction(77, len(task.found), 0.0, None, ran[-1], len(ran) == matches))
        yield from ()

    monkeypatch.setattr(behind_map, "_openings", openings)
    monkeypatch.setattr(behind_map, "find_next", searched)
    found = VocabMatch().fit(observation.info, model).recover(observation)
    assert found.tokens[1].evaluated == sum(ran) and len(ran) == min(matches, 10)


@pytest.mark.parametrize("budget", [None, 100])
def test_behind_a_token_that_nothing_matches_few_candidates_run(
    tiny_model: LoadModel, monkeypatch: pytest.MonkeyPatch, budget: int | None
) -> None:
    """A row that belongs to no token; behind it the right tokens match no more."""
    model = tiny_model("llama", 1)
    monkeypatch.setattr(behind_map, "LOST", (50, 20))
    observation = released(model, "orthogonal", tokens=TOKENS)
    states = observation.states.clone()
    states[4] = states[4].roll(1)
    attack = VocabMatch(budget=budget).fit(observation.info, model)
    tokens = attack.recover(replace(observation, states=states)).tokens
    known = [one.verified for one in tokens].index(False)
    assert not any(one.verified for one in tokens[known:]) and (known == 4 or budget)
    assert [one.token for one in tokens[:known]] == TOKENS[:known]
    few = [budget or model.vocab_size, 50, *[20] * len(TOKENS)]
    assert [one.evaluated for one in tokens[known:]] == few[: len(TOKENS) - known]


@pytest.mark.parametrize("spec", SPECS)
def test_rows_of_another_prompt_are_not_verified(tiny_model: LoadModel, spec: str) -> None:
    """Rows with noise on them match nothing: the search ends, and says so."""
    model = tiny_model("llama", 1)
    observation = released(model, spec)
    noisy = observation.states + 0.3 * observation.states.std() * drawn(*observation.states.shape)
    found = VocabMatch().fit(observation.info, model).recover(replace(observation, states=noisy))
    assert sum(token.verified for token in found.tokens) <= 1


@given(
    right=st.floats(-5, -3), wrong=st.floats(-2, 0), spread=st.floats(0.1, 1), position=st.integers(0, 40),
    distance=st.floats(1e-3, 1.0),
)  # fmt: skip
def test_a_distance_weighs_as_much_as_two_normal_densities_say(
    right: float, wrong: float, spread: float, position: int, distance: float
) -> None:
    apart = Apart((right, right + 0.5), (wrong, wrong + 0.5), spread, 0.1)
    shift = 0.0 if position < 2 else 0.5
    log = max(math.log(distance), right + shift)
    slow = norm.logpdf(log, right + shift, spread) - norm.logpdf(log, wrong + shift, spread)
    assert float(apart.evidence(position, torch.tensor([distance]))) == pytest.approx(
        slow, abs=1e-2, rel=1e-3
    )


@pytest.mark.parametrize(("info", "most"), [(ROWS, Span.farthest), (COLUMNS, 0.016)])
def test_the_threshold_of_mixed_rows_is_a_thousandth_at_most(info: ObservationInfo, most: float) -> None:
    """Right candidates of an ill-conditioned mixture came far away; the threshold must not follow them."""
    right, wrong = torch.full((50,), 1e-3), torch.full((50, 4), 0.7)
    sample = Sample(right, wrong, torch.ones(50), torch.arange(50))
    found = _auto(sample, 1.2e-7, choose_matcher("auto", info))
    assert found.separable and found.relative == pytest.approx(most, rel=1e-3)
    assert found.reach == 1 and found.doubt < 1e-3


def test_where_right_candidates_are_beyond_the_largest_threshold_nothing_is_certain() -> None:
    """So rounded rows are searched like noised ones, although wrong candidates are far."""
    right, wrong = torch.full((50,), 3e-3), torch.full((50, 4), 0.5)
    sample = Sample(right, wrong, torch.ones(50), torch.arange(50))
    found = _auto(sample, 8e-3, choose_matcher("auto", ROWS))
    assert found.separable and found.reach == 0 and found.doubt == 1


@pytest.mark.parametrize(("gap", "certain"), [(0.012, False), (0.15, False), (0.2, True)])
def test_where_wrong_candidates_come_nearly_as_near_as_right_ones_nothing_is_certain(
    gap: float, certain: bool
) -> None:
    """Those of a whole vocabulary come nearer than the few that were measured."""
    sample = Sample(torch.full((50,), 0.01), torch.full((50, 4), gap), torch.ones(50), torch.arange(50))
    found = _auto(sample, 8e-3, choose_matcher("auto", COLUMNS))
    assert found.separable and (found.doubt < 1) is certain


@pytest.mark.parametrize(("rows", "tells"), [(59, True), (60, True), (61, False), (64, False), (69, False)])
def test_mixed_rows_that_span_the_whole_space_tell_nothing(rows: int, tells: bool) -> None:
    assert Span.of(drawn(rows, 64)).tells is tells


def test_mixed_rows_that_span_the_whole_space_are_refused(tiny_model: LoadModel) -> None:
    model = tiny_model("llama", 1)
    observation = released(model, f"row-mixing:shield={model.width}")
    attack = VocabMatch().fit(observation.info, model)
    with pytest.raises(NotApplicableError, match="every token lies in the space that they span"):
        attack.recover(observation)


def test_distances_are_learned_position_by_position() -> None:
    places = torch.arange(1, 4).repeat(50)
    right, wrong = ((level + 0.1 * drawn(150, seed=i) + places).exp() for i, level in enumerate((-9.0, -6.0)))
    apart = Apart.of(Sample(right, wrong[:, None], torch.ones(150), places), 0.1)
    assert apart.right == pytest.approx((-8, -7, -6), abs=0.1)
    assert apart.wrong == pytest.approx((-5, -4, -3), abs=0.1) and apart.spread == pytest.approx(0.1, rel=0.2)


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["orthogonal", "row-mixing"])
def test_behind_noise_prompts_are_read_and_nothing_is_verified(tiny_model: LoadModel, spec: str) -> None:
    model = tiny_model("llama", 1)
    observation = released(model, "gaussian:sigma=0.005", spec)
    found = VocabMatch(proposal="probe").fit(observation.info, model).recover(observation)
    assert found.ids == TOKENS and not any(token.verified for token in found.tokens)
    assert [token.row for token in found.tokens] == list(range(len(TOKENS)))


@pytest.mark.slow
def test_behind_noise_more_candidates_run_where_none_explains_a_row(
    tiny_model: LoadModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama", 1)
    observation = released(model, "gaussian:sigma=0.005", "orthogonal")
    attack = VocabMatch(proposal="probe").fit(observation.info, model)
    usual = attack.recover(observation)
    assert usual.ids == TOKENS
    later = usual.tokens[behind_map.FEW :]
    assert all(token.evaluated < behind_map.WIDTHS[-1][1] for token in later)  # one is clearly ahead
    few = (*behind_map.WIDTHS[:-1], (16, 8))
    for spare, read in ((behind_map.SPARE, True), (0, False)):
        monkeypatch.setattr(behind_map, "TRIES", (behind_map._Try(few, spare, last=True),))
        assert (attack.recover(observation).ids == TOKENS) is read


@pytest.mark.parametrize(
    ("told", "scores", "tokens", "clear"),
    [
        ((9.0, 1.0), (20.0, 9.0), (1, 2), True),
        ((9.0, 1.0), (20.0, 11.0), (1, 2), False),  # the other is near in all
        ((9.0, 5.0), (20.0, 9.0), (1, 2), False),  # by the row
        ((9.0, 9.0), (20.0, 20.0), (1, 1), True),  # the same token behind another beginning
        ((4.0, -9.0), (20.0, 0.0), (1, 2), False),  # ahead, and explains nothing
    ],
)
def test_a_token_is_clearly_ahead_by_all_and_by_its_row(
    told: tuple[float, ...], scores: tuple[float, ...], tokens: tuple[int, ...], clear: bool
) -> None:
    apart = Apart((-9.0,), (-8.0,), 0.2236, 0.1)
    assert apart.most(3) == pytest.approx(10, abs=0.01)
    grown = []
    for score, own, token in zip(scores, told, tokens, strict=True):
        grown.append(object.__new__(behind_map._Grown))  # without the search behind it
        vars(grown[-1]).update(score=score, told=own, prediction=behind_map._guess(token, 3, 1.0))
    assert behind_map._is_clear(grown, 3, apart) is clear


def test_attacks_that_take_rows_for_states_refuse(tiny_model: LoadModel) -> None:
    model = tiny_model("llama", 1)
    info = released(model, "orthogonal").info
    for attack in (BeamDecoding(), NearestEmbedding(), SipIt()):
        with pytest.raises(NotApplicableError, match="vocab-match does"):
            attack.fit(info, model)
    for options in ({"search": "greedy"}, {"epsilon": "calibrated"}):
        with pytest.raises(NotApplicableError, match="paper's search"):
            VocabMatch(**options).fit(info, model)
    with pytest.raises(NotApplicableError, match="singular values"):
        VocabMatch().fit(released(model, "orthogonal", "row-mixing").info, model)
