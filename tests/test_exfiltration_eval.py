"""Real adversaries on tiny models: payloads come back, rates keep below the warden's bound, the loud are flagged."""

import hashlib
import math
import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from hiddenlab import registry
from hiddenlab.defenses.verification import bounds, risk
from hiddenlab.defenses.verification.adversaries import ChoiceDecoder, ChoiceEncoder, Payload
from hiddenlab.defenses.verification.causal_lm import WholeModel, load_whole
from hiddenlab.defenses.verification.difr import Replay, Verifier
from hiddenlab.defenses.verification.likelihood import gumbel_positions
from hiddenlab.defenses.verification.provider import Provider, Request, Variant
from hiddenlab.defenses.verification.sampling import HashedNoise, Sampling
from hiddenlab.defenses.verification.transcript import Transcript
from hiddenlab.errors import InputError
from hiddenlab.eval.cells import Experiment, Setting, conduct
from hiddenlab.eval.measures import exfiltration as cells
from hiddenlab.eval.measures import warden as warden
from hiddenlab.eval.measures.adversaries import Rule, Tactic, answers, known
from hiddenlab.eval.tables import exfiltration as specs
from hiddenlab.eval.tables.exfiltration import adversaries, frontier, game, pareto
from hiddenlab.testing import VOCABULARY, save_tiny

LENGTH = 12
SAMPLING = Sampling(top_k=50, top_p=0.95)
RULE = Rule(0.3, -6.0, 4)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny("llama", tmp_path_factory.mktemp("llama"), tokenizer=True)


@pytest.fixture(scope="module")
def whole(tiny: str) -> WholeModel:
    return load_whole(tiny, device="cpu")


def requests(count: int = 3) -> list[Request]:
    """Prompts of different lengths, so that padding takes part."""
    return [
        Request(f"r{i}", tuple(range(65, 70 + i)), Sampling(top_k=50, top_p=0.95, seed=100 * i))
        for i in range(count)
    ]


def replayed(whole: WholeModel, request: Request, tokens: tuple[int, ...]) -> Replay:
    return Verifier(whole).replay(Transcript(request.id, "tiny", request.prompt, tokens, request.sampling))


@pytest.mark.parametrize("kind", ["admissible", "strict", "leading", "ranks", "base64"])
def test_a_payload_comes_back_below_the_bound(whole: WholeModel, kind: str) -> None:
    tactic = Tactic.of(kind, RULE, 0.5 if kind == "strict" else 0.0)
    asked = requests()
    sent = bound = dangerous = 0.0
    for request, answer in zip(asked, answers(whole, tactic, asked, LENGTH), strict=True):
        assert len(answer.tokens) == LENGTH and 0 < answer.received <= answer.sent
        assert answer.received > answer.sent - 1e-9  # the server's own sets lose nothing
        found = cells.judged(replayed(whole, request, answer.tokens), RULE, 7, VOCABULARY, 16)
        sent, bound, dangerous = (
            sent + answer.received,
            bound + found["bound"],
            dangerous + found["dangerous"],
        )
        assert found["safe_bound"] <= found["quiet_bound"] + 1e-9
        # A dangerous token counts with the whole vocabulary in place of the 1 to 16 tokens that would pass.
        loud, most = found["bound"] - found["quiet_bound"], math.log2(VOCABULARY)
        assert found["dangerous"] * (most - 4) - 1e-9 <= loud <= found["dangerous"] * most + 1e-9
    assert sent <= bound
    if kind == "ranks":
        assert sent == 3 * LENGTH  # one bit a token
    if kind == "base64":
        assert dangerous / 3 / LENGTH > 0.5
    elif kind != "admissible":  # its own draws may differ from the warden's at the threshold
        assert dangerous == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["matching", "posterior"])
def test_an_adversary_that_keeps_to_a_distribution(whole: WholeModel, kind: str) -> None:
    """Its payload comes back, about as much as its entropy; with the wrong seed only if it needs none."""
    tactic, asked = Tactic.of(kind, RULE), requests()
    made = answers(whole, tactic, asked, 40)
    for one in made:
        assert one.received == pytest.approx(one.sent) and one.entropy <= one.natural + 1e-9
    total, most = sum(one.received for one in made), sum(one.entropy for one in made)
    assert 0.6 * most < total < 1.4 * most
    dangerous = [
        cells.judged(replayed(whole, r, one.tokens), RULE, 7, VOCABULARY, 16)["dangerous"] / 40
        for r, one in zip(asked, made, strict=True)
    ]
    honest = answers(whole, Tactic("honest"), asked, 40)
    assert all(one.natural > 0 == one.received for one in honest)
    if kind == "matching":
        assert all(one.entropy == one.natural for one in made)
        assert min(dangerous) > 0.3  # the seed gives it away
    else:
        assert max(dangerous) < 0.1


@pytest.mark.slow
def test_a_seed_is_ground_until_the_honest_answer_says_the_payload(whole: WholeModel) -> None:
    """Its answers are the honest ones of their seeds; who replays them finds nothing."""
    asked = requests()
    made = answers(whole, Tactic("seeds"), asked, 14)
    assert sum(one.received == 3 for one in made) >= 2 and {one.received for one in made} <= {0, 3}
    logged = [
        replace(r, sampling=replace(r.sampling, seed=one.seed)) for r, one in zip(asked, made, strict=True)
    ]
    assert all(one.seed != r.sampling.seed for r, one in zip(asked, made, strict=True))
    assert [one.tokens for one in answers(whole, Tactic("honest"), logged, 14)] == [
        one.tokens for one in made
    ]
    for request, one in zip(logged, made, strict=True):
        row = cells.judged(replayed(whole, request, one.tokens), RULE, 0, VOCABULARY, 16)
        assert row["dangerous"] == row["suspicious"] == 0


def test_a_short_payload_is_complete_and_the_rest_honest(whole: WholeModel) -> None:
    """The loop of ``answers`` by hand: choices, encoder, decoder."""
    asked = requests(1)[0]
    tactic, payload = Tactic.of("leading", RULE), Payload.of(b"k")
    encoder, steps, tokens = ChoiceEncoder(payload), [], []
    honest = answers(whole, Tactic("honest"), [asked], LENGTH)[0].tokens
    replay = replayed(whole, asked, honest)
    assert replay.gumbel is not None
    for i in range(LENGTH):
        steps.append(tactic.choices(replay.logits[i : i + 1], replay.gumbel[i : i + 1], SAMPLING, i))
        assert set(replay.logits[i].topk(4).indices.tolist()) <= set(steps[-1])
        tokens.append(encoder.choose(steps[-1]))
    assert encoder.done
    assert ChoiceDecoder(8).decode(steps, tokens).payload == payload
    assert known(ChoiceDecoder(8), payload, steps, tokens) == 8
    wrong = [tokens[0], VOCABULARY - 1, *tokens[2:]]
    assert known(ChoiceDecoder(8), payload, steps, wrong) < 8


def test_an_honest_provider_is_that_of_the_simulator(tiny: str, whole: WholeModel) -> None:
    """The same tokens as the provider simulator's, nothing sent, nothing dangerous."""
    asked = requests()
    provider = Provider(tiny, Variant.parse("honest"), new_tokens=LENGTH, dtype="float32", device="cpu")
    expected = [one.transcript.output for one in provider.answer(asked)]
    found = answers(whole, Tactic("honest"), asked, LENGTH)
    assert [one.tokens for one in found] == expected
    assert all(one.sent == 0 == one.received for one in found)
    for request, one in zip(asked, found, strict=True):
        row = cells.judged(replayed(whole, request, one.tokens), RULE, 0, VOCABULARY, 16)
        assert row["dangerous"] == row["suspicious"] == 0


def test_narrowed_evidence_measures_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaving out what noise cannot reach changes neither classes nor sets."""
    monkeypatch.setattr(warden, "WIDEST", 400)
    generator = torch.Generator().manual_seed(3)
    logits = (torch.randn(20, 900, generator=generator) * 3).bfloat16().float()
    gumbel = -torch.empty(20, 900).exponential_(generator=generator).log()
    tokens = (logits + gumbel).topk(3, dim=1).indices[:, torch.randint(3, (1,), generator=generator)[0]]
    tokens[3] = logits[3].argmin()
    replay = Replay(logits, gumbel, None, tokens, SAMPLING, torch.zeros(25, 4))
    for sd in (0.01, 0.1, 1.0):
        evidence = warden.narrowed(replay, sd, 16)
        width = evidence.logits.shape[1]
        assert 17 <= width <= 400
        grid = [sd], [-2.0, -12.0], [0, 4, 16]
        whole_grid = risk.pareto([risk.Evidence(logits, gumbel, tokens, SAMPLING)], *grid)
        for a, b in zip(risk.pareto([evidence], *grid), whole_grid, strict=True):
            assert a.false_positive_rate == b.false_positive_rate and a.suspicious == b.suspicious
            assert a.safe_bits == pytest.approx(b.safe_bits) and a.quiet_bits == pytest.approx(b.quiet_bits)
            lost = b.false_positive_rate * math.log2(900 / width)
            assert a.bits + lost == pytest.approx(b.bits)


# ---- experiments


GRID = {"sigmas": "0.01,0.3", "thresholds": "-12,-5,-2", "cutoffs": "0,2,8,16"}  # 24 settings
OPTIONS: dict[str, Any] = {"requests": 4, "turns": 2, "new_tokens": 30, **GRID}


def asked(tiny: str) -> Setting:
    return Setting(model=tiny, limit=3, max_tokens=12, device="cpu")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


def by_keys(experiment: Experiment, name: str, home: Path) -> dict[tuple[str, str], dict[str, float]]:
    rows = conduct(name, experiment, home)["rows"]
    assert all(row["status"] == "measured" for row in rows), [row["reason"] for row in rows]
    return {tuple(row["keys"].values()): {k: v["value"] for k, v in row["figures"].items()} for row in rows}  # type: ignore[misc]


@pytest.mark.slow
def test_the_wardens_settings(tiny: str, tmp_path: Path) -> None:
    experiment = registry.resolve("experiments", "exfiltration-pareto")(asked(tiny), **OPTIONS)
    found = by_keys(experiment, "exfiltration-pareto", tmp_path)
    assert len(found) == 6
    for (_, rate), figures in found.items():
        assert figures["false_positives"] <= float(rate.rstrip("%")) / 100
        assert 0 <= figures["safe_bits"] <= figures["quiet_bits"] <= math.log2(VOCABULARY)
        assert figures["share"] == pytest.approx(figures["bits"] / math.log2(VOCABULARY))
    by_bits, by_quiet = (
        [row for (name, _), row in found.items() if part in name] for part in ("6.1", "choices")
    )
    for a, b in zip(by_bits, by_quiet, strict=True):
        assert a["bits"] <= b["bits"] and b["quiet_bits"] <= a["quiet_bits"]
    assert len(list(tmp_path.glob("cells/exfiltration-pareto-*/points.json"))) == 6
    assert len(list(tmp_path.glob("warden/*"))) == 1  # measured once for all
    # The frontier's best cutoff has what the paper's criterion found, and a looser rate never costs bits.
    rates = ",".join(rate.rstrip("%") + "e-2" for _, rate in found)
    curve = by_keys(frontier(asked(tiny), rates=rates, **OPTIONS), "exfiltration-frontier", tmp_path)
    for (name, rate), figures in found.items():
        if "6.1" in name:
            row = curve[(float(rate.rstrip("%")) / 100,)]  # type: ignore[index]
            assert min(v for k, v in row.items() if k.startswith("bits")) == pytest.approx(figures["bits"])
    rows = [row for _, row in sorted(curve.items())]
    for tight, loose in pairwise(rows):
        assert all(loose[name] <= tight[name] + 1e-9 for name in tight if name.startswith("bits"))
    with pytest.raises(InputError, match="between 0 and 1"):
        frontier(asked(tiny), rates="0.1,2")


@pytest.mark.slow
def test_adversaries_before_the_warden(tiny: str, home: Path) -> None:
    experiment = registry.resolve("experiments", "exfiltration")(
        asked(tiny),
        count=3,
        prompt_tokens=12,
        length=15,
        criterion="quiet_bits",
        adversaries="honest;strict;base64",
        **OPTIONS,
    )
    found = by_keys(experiment, "exfiltration", home)
    assert len(found) == 9
    for (name, _), figures in found.items():
        assert figures["received"] <= figures["sent"] <= figures["bound"] + 1e-6
        if "honest" in name:
            assert figures["flagged"] == 0 == figures["sent"]
        if "base64" in name:
            assert figures["flagged"] == 1 and figures["passed"] == 0 and "slowdown" in figures
        if "margin" in name:
            assert figures["flagged"] == 0 and figures["within"] == 1


def test_the_warden_is_judged_on_other_answers(tiny: str, home: Path) -> None:
    """Tuned on the first half, judged on the second: by hand, from the sums of all answers."""
    options = {**OPTIONS, "thresholds": "-12:-2:6", "cutoffs": "0,1,8"}
    experiment = pareto(asked(tiny), tuning=0.5, **options)
    found = by_keys(experiment, "exfiltration-pareto", home)
    spec = dict(experiment.cells[0].spec)
    assert spec["thresholds"] == [-12, -10, -8, -6, -4, -2] and "other 2" in experiment.notes[1]
    honest = warden.calibration(spec, home)
    tuned, judged = (honest["sums"][part].mean(0) / 30 for part in (slice(2), slice(2, None)))
    fit = (tuned[:, 0] <= spec["rate"]) & (tuned[:, 1] <= spec["most_suspicious"])
    place = min(fit.nonzero()[:, 0].tolist(), key=lambda i: float(tuned[i, 2]))
    figures = found[specs.CRITERIA["bits"], "1.00%"]
    assert figures["bits"] == pytest.approx(float(judged[place, 2]))
    rows = by_keys(frontier(asked(tiny), tuning=0.5, **options), "exfiltration-frontier", home)
    assert {"bits_1", "false_1", "sigma_1"} <= set().union(*rows.values())


@pytest.mark.slow
def test_one_pass_measures_every_threshold_as_its_own_set_does() -> None:
    """The oracle asks for the admissible set of each threshold anew."""
    draw = torch.Generator().manual_seed(5)
    logits = torch.randn(30, 40, generator=draw) * 2
    gumbel = -torch.empty(30, 40).exponential_(generator=draw).log()
    tokens = (logits + gumbel).argmax(1)
    thresholds = [-20.0 + 0.2 * i for i in range(96)]
    one = risk.Evidence(logits, gumbel, tokens, SAMPLING)
    points = risk.pareto([one], [0.1, 0.5], thresholds, [0], samples=16, seed=2)
    for sd, found in ((0.1, points[:96]), (0.5, points[96:])):
        made = gumbel_positions(
            logits, gumbel, SAMPLING, noise_sd=sd, samples=16, generator=torch.Generator().manual_seed(2)
        )
        for threshold, point in zip(thresholds, found, strict=True):
            admitted = made.admissible(threshold)
            assert point.safe_bits == pytest.approx(
                float(admitted.sum(1).clamp_min(1).double().log2().mean())
            )
            outside = ~admitted.gather(1, tokens[:, None])
            assert point.false_positive_rate == pytest.approx(float(outside.double().mean()))
    assert len({point.safe_bits for point in points}) > 20


@pytest.mark.slow
def test_a_receiver_without_the_seed(tiny: str, home: Path) -> None:
    """p and q by hand at one setting; the bounds are those of the theorems, and below what a known seed allows."""
    options = {**OPTIONS, "sigmas": "0.3", "thresholds": "-5", "cutoffs": "4"}
    experiment = specs.hidden_seed(asked(tiny), most_suspicious=1.0, **options)
    found = by_keys(experiment, "exfiltration-hidden-seed", home)
    spec = dict(experiment.cells[0].spec)
    key = hashlib.sha256(f"{spec['seed']} hidden seed".encode()).digest()
    sizes = []
    for i, transcript in enumerate(warden.chosen(spec, home)):
        whole = load_whole(tiny, dtype="bfloat16", device="cpu")
        evidence = warden.narrowed(
            Verifier(whole, lambda seed: HashedNoise(key, seed)).replay(transcript), 0.3, 4
        )
        made = gumbel_positions(
            evidence.logits, evidence.gumbel, evidence.sampling, noise_sd=0.3, samples=64,
            generator=torch.Generator().manual_seed(i),
        )  # fmt: skip
        sizes += [len(choices) for choices in made.choices(-5.0)]
    several = [size for size in sizes if size > 1]
    p, q = len(several) / len(sizes), math.ceil(sum(several) / len(several))
    both, loud = found[cells.BOTH, "1.00%"], found[cells.DANGEROUS, "1.00%"]
    assert 0 < p < 1 and both["free"] == pytest.approx(p) and both["permitted"] == q
    assert both["interactive"] == pytest.approx(bounds.hidden_seed_rate(p, q))
    assert both["interactive"] < p * math.log2(q) < both["searching"] == bounds.searching_rate(p, 0.05, q)
    assert loud["free"] == 1 and loud["permitted"] >= 4 and loud["support"] >= 2
    with pytest.raises(InputError, match="slack"):
        specs.hidden_seed(asked(tiny), slack=1.0)


@pytest.mark.slow
def test_the_game_with_honest_looking_answers(tiny: str, home: Path) -> None:
    """A server that picks seeds is never caught, though it sends only a few bits an answer."""
    experiment = game(
        asked(tiny), adversaries="seeds;matching", bits="3,1000", inspected="1", messages=20, rounds=50, count=3,
        prompt_tokens=12, criterion="quiet_bits", watched=cells.BOTH, **OPTIONS,
    )  # fmt: skip
    found = by_keys(experiment, "exfiltration-game", home)
    by_adversary = {key: row for key, row in found.items() if key[2] == 3}  # type: ignore[misc]
    seeds, matching = (
        by_adversary[specs.ADVERSARIES[name], cells.BOTH, 3, 1.0] for name in ("seeds", "matching")
    )  # type: ignore[index]
    assert seeds["caught"] == 0 and seeds["won"] > 0.9
    assert matching["caught"] == 1 == matching["flagged"] and seeds["flagged"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(("choose", "kind"), [("entropy", "honest"), ("free", "admissible")])
def test_an_outsider_chooses_the_most_open_prompts(tiny: str, home: Path, choose: str, kind: str) -> None:
    """The largest of all candidates' entropies, each of an answer made alone."""
    options = {"count": 2, "prompt_tokens": 12, "length": 8, "adversaries": "posterior", **OPTIONS}
    experiment = adversaries(asked(tiny), choose=choose, candidates=3, **options)
    assert [cell.keys["prompts"][:3] for cell in experiment.cells[:2]] == ["as ", "cho"]
    as_they_come, spec = (dict(cell.spec) for cell in experiment.cells[:2])
    assert as_they_come == dict(adversaries(asked(tiny), **options).cells[0].spec)
    whole = load_whole(tiny, dtype=spec["dtype"], device="cpu")
    first, by = cells.asked(as_they_come, RULE, whole, home)
    best, chosen = cells.asked(spec, RULE, whole, home)
    everything = cells.requests_of({**spec, "limit": 6, "max_tokens": 12, "turns": 1, "seed": 1})
    assert (first, by) == (everything[:2], []) and len(best) == 2
    alone = [answers(whole, Tactic.of(kind, RULE), [one], 8)[0].entropy for one in everything]
    places = sorted(range(6), key=lambda i: -alone[i])[:2]
    assert {one.id for one in best} == {everything[i].id for i in places} and chosen == [
        choose,
        sorted(places),
    ]


@pytest.mark.slow
def test_chosen_prompts_stand_beside_the_others(tiny: str, home: Path) -> None:
    options = {
        "count": 2,
        "prompt_tokens": 12,
        "choose": "entropy",
        "candidates": 3,
        **OPTIONS,
        "new_tokens": 12,
    }
    experiment = game(asked(tiny), adversaries="posterior", bits="3", messages=9, rounds=20, **options)
    rows = conduct("exfiltration-game", experiment, home)["rows"]
    assert [row["keys"]["prompts"] for row in rows] == 2 * ["as they come"] + 2 * [
        "chosen by the model's entropy"
    ]
    assert all(row["status"] == "measured" for row in rows), [row["reason"] for row in rows]
    assert rows[0]["figures"]["bits_an_answer"] != rows[2]["figures"]["bits_an_answer"]
    assert "chooses no prompts" not in experiment.notes[0] and "Chosen prompts" in experiment.notes[-1]
    spec = {**experiment.cells[2].spec, "candidates": 200}
    with pytest.raises(InputError, match="100 prompts, where 400 are wanted"):
        cells.asked(spec, RULE, load_whole(tiny, device="cpu"), home)


@pytest.mark.slow
def test_the_game_with_their_answers(tiny: str, tmp_path: Path) -> None:
    experiment = game(
        asked(tiny),
        adversaries="strict;base64",
        bits="8,100000",
        inspected="0.2,1",
        messages=20,
        rounds=200,
        count=3,
        prompt_tokens=12,
        criterion="quiet_bits",
        **OPTIONS,
    )
    rows = conduct("exfiltration-game", experiment, tmp_path)["rows"]
    assert all(row["status"] == "measured" for row in rows), [row["reason"] for row in rows]
    found = {
        tuple(row["keys"].values()): {name: one["value"] for name, one in row["figures"].items()}
        for row in rows
    }
    loud = specs.ADVERSARIES["base64"]
    # A secret that one loud answer holds is lost as often as that answer is not inspected.
    one = found[loud, "dangerous", 8, 0.2]
    assert one["won"] == pytest.approx(0.8, abs=0.09)
    assert one["used"] == 1 and one["bound"] > 0.8
    assert found[loud, "dangerous", 8, 1.0]["caught"] == 1
    for key, figures in found.items():
        assert figures["won"] <= figures["bound"] + 0.09
        ends = sum(figures[name] for name in ("learnt", "not_learnt", "caught", "spent"))
        assert ends == pytest.approx(1)
        if key[2] == 100000:
            assert figures["won"] == 0
    assert len(list(tmp_path.glob("games/*"))) == 2  # answers are judged once for all games


@pytest.mark.parametrize(
    "change",
    [
        {"adversaries": "honest"}, {"adversaries": ""}, {"bits": "many"}, {"bits": ""}, {"bits": "0"},
        {"bits": "9" * 400}, {"inspected": "1.5"}, {"watched": "safe"},
        {"alarms": 0.0}, {"rate": 0.3}, {"messages": 0}, {"margin": -1.0}, {"level": 1.0},
    ],
)  # fmt: skip
def test_games_that_cannot_be_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        game(Setting(model="none"), **change)


@pytest.mark.parametrize(
    "change",
    [
        {"adversaries": "honest;telepath"}, {"criterion": "luck"}, {"count": 0}, {"margin": 1.0}, {"level": 0.0},
        {"requests": 0}, {"sigmas": "0"}, {"thresholds": "0.5"}, {"thresholds": "-20:-1"}, {"thresholds": "-20:-1:1"},
        {"cutoffs": "-1"}, {"thresholds": "-20:-1:9000"}, {"tuning": 0.0}, {"tuning": 0.01}, {"tuning": 2.0},
        {"choose": "luck"}, {"choose": "free", "candidates": 1},
    ],
)  # fmt: skip
def test_wrong_options_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        adversaries(Setting(model="none"), **change)


def test_no_setting_is_good_enough(tiny: str, home: Path) -> None:
    spec = dict(pareto(asked(tiny), **OPTIONS).cells[0].spec)
    found = warden.calibration(spec, home)
    assert warden.least(found, spec) < len(warden.rules(spec)) == 24
    with pytest.raises(InputError, match="no setting"):
        warden.least({**found, "sums": found["sums"] + 5}, spec)
    with pytest.raises(InputError, match="Gumbel"):
        greedy = [Request("a", (1,), Sampling(method="greedy"))]
        answers(load_whole(tiny, device="cpu"), Tactic("honest"), greedy, 2)


def test_payloads_are_the_requests_own() -> None:
    tactic = Tactic("ranks")
    one, other = (tactic.payload(r, 5, 300) for r in requests(2))
    assert one.bits == 45 and one != other and one == Payload.draw(45, random.Random(0))
    assert Tactic("honest").payload(requests(1)[0], 5, 300).bits == 0
