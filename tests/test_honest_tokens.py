"""Honest servers' tokens on a tiny model: forks of their answers, scores and ranks, and what a seed leaves."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from hiddenlab import registry
from hiddenlab.defenses.verification.causal_lm import load_whole
from hiddenlab.defenses.verification.difr import Verifier
from hiddenlab.defenses.verification.sampling import Sampling, invert, perturbed, probabilities
from hiddenlab.errors import InputError
from hiddenlab.eval.cells import Setting, conduct
from hiddenlab.eval.measures import honest_tokens as honest
from hiddenlab.eval.measures import warden
from hiddenlab.eval.measures.answers import answered
from hiddenlab.report.plots import draw_table
from hiddenlab.testing import VOCABULARY, save_tiny

LENGTH, COUNT = 12, 2
SIZES: dict[str, Any] = {"turns": 1, "new_tokens": LENGTH}
Rows = dict[tuple[str, str], dict[str, float]]


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    tiny = save_tiny("llama", tmp_path_factory.mktemp("llama"), tokenizer=True)
    return Setting(model=tiny, limit=COUNT, max_tokens=12, device="cpu")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


def conducted(name: str, setting: Setting, home: Path, **options: Any) -> tuple[Rows, dict[str, Any]]:
    table = conduct(name, registry.resolve("experiments", name)(setting, **options), home)
    assert all(row["status"] == "measured" for row in table["rows"]), [row["reason"] for row in table["rows"]]
    assert draw_table(table, home) == home / f"{name}.png"
    rows = {
        tuple(row["keys"].values()): {k: v["value"] for k, v in row["figures"].items()}
        for row in table["rows"]
    }
    return rows, table  # type: ignore[return-value]


def slow_factors(answers: list[tuple[int, ...]]) -> list[int]:
    """Fork factors by recursion: a node's children are the groups of answers by their first token."""
    going = [answer for answer in answers if answer]
    if not going:
        return []
    firsts = {answer[0] for answer in going}
    below = [slow_factors([a[1:] for a in going if a[0] == first]) for first in firsts]
    return [len(firsts), *(factor for row in below for factor in row)]


def test_fork_factors_are_the_recursions() -> None:
    answers = [(1, 2, 3), (1, 2, 3), (1, 4, 3), (1, 2, 5), (6,)]
    tree = honest.next_tokens(answers)
    assert sorted(map(len, tree.values())) == sorted(slow_factors(answers)) == [1, 2, 2, 2]
    assert tree[()] == {1, 6} and tree[1, 2] == {3, 5} and (1, 2, 3) not in tree


def test_servers_that_differ_more_fork_more(setting: Setting, home: Path) -> None:
    servers = "honest;threads=1;seed=1"
    found, table = conducted(
        "exfiltration-forks", setting, home, servers=servers, methods="gumbel;ipt", **SIZES
    )
    assert table["scales"] == ["linear", "log"]
    for method in ("gumbel", "ipt"):
        same, other, everyone = (
            found[method, name] for name in ("honest, threads=1", "honest, seed=1", "all 3")
        )
        assert (same["forks"], same["answers"], same["agreed"], same["prefixes"]) == (
            0,
            1,
            LENGTH,
            LENGTH * COUNT,
        )
        assert other["answers"] == 2 and other["agreed"] < LENGTH
        # Two answers that part once: one prefix has two next tokens.
        assert other["children_2"] == pytest.approx(other["forks"]) and other["forks"] > 0
        assert everyone["answers"] == 2 and everyone["prefixes"] == other["prefixes"]
        assert sum(v for k, v in everyone.items() if k.startswith("children")) == pytest.approx(1)


@pytest.mark.parametrize("servers", ["honest", "honest;telepath"])
def test_servers_that_cannot_be(servers: str) -> None:
    with pytest.raises(InputError):
        registry.resolve("experiments", "exfiltration-forks")(Setting(model="none"), servers=servers)


@pytest.mark.slow
def test_scores_and_ranks_are_those_of_the_whole_vocabulary(setting: Setting, home: Path) -> None:
    """All tokens' scores without narrowing, and ranks by comparison with every other token."""
    found, _ = conducted("exfiltration-scores", setting, home, sigmas="0.3", **SIZES)
    spec = dict(
        registry.resolve("experiments", "exfiltration-scores")(setting, sigmas="0.3", **SIZES).cells[0].spec
    )
    transcripts = answered(spec, home).transcripts
    verifier = Verifier(load_whole(setting.model, dtype=spec["dtype"], device="cpu"))
    scores, ranks, logit_ranks, entropies = [], [], [], []
    for i, transcript in enumerate(transcripts):
        replay = verifier.replay(transcript)
        positions, tokens = honest._gumbel(replay, 0.3, i, whole=True)
        everything = honest.all_scores(positions)
        assert everything.shape == (LENGTH, VOCABULARY)
        for place, token in enumerate(tokens.tolist()):
            row = everything[place].tolist()
            scores.append(row[token])
            ranks.append(sum(other >= row[token] for other in row) - 1)
            logits = replay.logits[place].tolist()
            logit_ranks.append(sum((-other, j) < (-logits[token], token) for j, other in enumerate(logits)))
            shares = [p for p in probabilities(replay.logits, replay.sampling)[place].tolist() if p]
            entropies.append(-sum(p * math.log2(p) for p in shares))
    n = len(scores)
    assert n == LENGTH * COUNT
    for key, values in (
        (("score, as −log", "σ = 0.3"), [-score for score in scores]),
        (("rank by score", "σ = 0.3"), ranks),
        (("rank by logit", "any"), logit_ranks),
    ):
        wanted = [min(20, int(max(0.0, value))) for value in values]
        assert [found[key][f"at_{k}"] for k in range(21)] == pytest.approx(
            [wanted.count(k) / n for k in range(21)]
        )
    place = max(range(n), key=entropies.__getitem__)
    positions, _ = honest._gumbel(
        verifier.replay(transcripts[place // LENGTH]), 0.3, place // LENGTH, whole=True
    )
    row = honest.all_scores(positions)[place % LENGTH]
    at = found["scores of all tokens, most open position", "σ = 0.3"]
    assert at["at_20"] == pytest.approx(float((row <= -20).double().mean()))
    assert at["at_0"] == pytest.approx(float((row > -1).double().mean())) and at["at_0"] > 0
    assert sorted(entropies)[(n - 1) // 2] == pytest.approx(
        float(honest.measured(spec, home)["entropy"].sort().values[(n - 1) // 2]), abs=1e-4
    )


def test_a_token_that_cannot_be_is_last() -> None:
    scores = torch.tensor([[-1.0, -3.0, -torch.inf, -3.0]])
    ranks = [int(honest.score_rank(scores, scores[:, token], missing=100)) for token in range(4)]
    assert ranks == [1, 3, 104, 3]


def test_a_seed_leaves_what_noise_would_draw(setting: Setting, home: Path) -> None:
    """Shares beside frequencies of the sampler's own draws from logits with noise added."""
    options = {"sigmas": "0.4", "ipt_sigma": 0.01, **SIZES}
    found, _ = conducted("exfiltration-posterior", setting, home, **options)
    cells = registry.resolve("experiments", "exfiltration-posterior")(setting, **options).cells
    spec = next(dict(cell.spec) for cell in cells if cell.spec["sampler"] == "gumbel")
    entropy = honest.measured(spec, home)["entropy"]
    place = honest.position_of(entropy, honest.OPEN)
    replay = Verifier(load_whole(setting.model, dtype=spec["dtype"], device="cpu")).replay(
        answered(spec, home).transcripts[place // LENGTH]
    )
    assert replay.gumbel is not None
    logits, gumbel = (value[place % LENGTH].expand(4000, -1) for value in (replay.logits, replay.gumbel))
    noise = 0.4 * torch.randn(logits.shape, generator=torch.Generator().manual_seed(0))
    drawn = perturbed(logits + noise, gumbel, replay.sampling).argmax(1)
    order = logits[0].sort(descending=True, stable=True).indices[: honest.PLACES].tolist()
    wanted = [float((drawn == token).double().mean()) for token in order]
    shares = [found["most open position", "Gumbel-max, σ = 0.4"][f"place_{k}"] for k in range(1, 11)]
    assert shares == pytest.approx(wanted, abs=0.1)
    plain = [found["most open position", "no seed"][f"place_{k}"] for k in range(1, 11)]
    assert plain == pytest.approx(
        probabilities(replay.logits, replay.sampling)[place % LENGTH, order].tolist()
    )
    # A seed leaves less than none, and the largest share is no smaller than the next.
    for name, row in found.items():
        values = [row[f"place_{k}"] for k in range(1, 11)] + [row["others"]]
        assert min(values) >= 0 and sum(values) == pytest.approx(1)
        if name[0].startswith("mean"):
            assert (
                values[:-1] == sorted(values[:-1], reverse=True)
                and values[0] >= found[name[0], "no seed"]["place_1"]
            )


def test_the_inverse_transforms_posterior_is_a_draw_with_noise() -> None:
    logits = torch.randn(1, 12, generator=torch.Generator().manual_seed(3))
    sampling, uniform = Sampling(method="ipt", top_k=8), torch.tensor([0.37])
    shares = honest.ipt_posterior(logits, uniform, sampling, 0.05)[0]
    noisy = 0.37 + 0.05 * torch.randn(20000, generator=torch.Generator().manual_seed(0))
    probability = probabilities(logits, sampling).expand(20000, -1)
    drawn = torch.bincount(invert(probability, noisy.clamp(0, 1 - 1e-9)), minlength=12) / 20000
    assert shares.tolist() == pytest.approx(drawn.tolist(), abs=0.01) and shares.sum() == pytest.approx(1)


def test_the_threshold_is_the_wardens(setting: Setting, home: Path) -> None:
    options = {"requests": COUNT, "sigmas": "0.3", "thresholds": "-6:-1:6", **SIZES}
    found, table = conducted("exfiltration-thresholds", setting, home, **options)
    low, high = (list(found[key].values()) for key in found)
    assert low == sorted(low) and high == sorted(high, reverse=True) and len(low) == 6
    cell = registry.resolve("experiments", "exfiltration-thresholds")(setting, **options).cells[0]
    sums = warden.calibration(dict(cell.spec), home)["sums"].sum(0) / (LENGTH * COUNT)
    assert low == pytest.approx(sums[:, 0].tolist())
    assert high == pytest.approx((sums[:, 3] / math.log2(VOCABULARY)).tolist())
    assert table["scales"] == ["linear", "log"]
