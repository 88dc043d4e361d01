"""STIP's server reads its users with nothing but its own view; substitutions fall to statistics."""

import math
import os
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

import hiddenlab as hl
from hiddenlab import registry
from hiddenlab.attacks import ClosedWeights
from hiddenlab.attacks.closed_weights import prior
from hiddenlab.attacks.closed_weights.model import with_table
from hiddenlab.attacks.closed_weights.order import common_order, match_sorted, number
from hiddenlab.attacks.closed_weights.prior import refine
from hiddenlab.attacks.closed_weights.recover import collect_untied, rebuild_tied
from hiddenlab.attacks.closed_weights.substitution import solve
from hiddenlab.attacks.closed_weights.view import FILE, ServerView
from hiddenlab.defenses.protocols.checkpoint import load_weights, write_checkpoint
from hiddenlab.defenses.protocols.forward import Plain, walk
from hiddenlab.defenses.protocols.shares import Centaur
from hiddenlab.defenses.protocols.stip import Stip
from hiddenlab.errors import InputError, NotApplicableError
from hiddenlab.eval.cells import Setting
from hiddenlab.eval.command import run as run_experiments
from hiddenlab.eval.measures import protocols
from hiddenlab.eval.measures.correlation import projection_bound
from hiddenlab.eval.measures.protocols import centaur_view, read_view, stip_view
from hiddenlab.eval.tables.protocols import permuted_model, projections, schemes, substitution, theorem_j3
from hiddenlab.models import Request, TruncatedModel, load_model
from hiddenlab.proposals import corpus
from hiddenlab.types import silent

TinyPath = Callable[..., str]
LoadModel = Callable[..., TruncatedModel]
PROMPTS = [[5, 17, 3, 3, 250], [41, 8], [250, 41, 99, 7, 5, 5]]


@pytest.fixture
def tied(tiny: TinyPath) -> Stip:
    return Stip(load_weights(tiny("llama", tie_word_embeddings=True))[0], seed=3)


@pytest.fixture
def untied(tiny: TinyPath) -> Stip:
    return Stip(load_weights(tiny("llama", tie_word_embeddings=False))[0], seed=3)


# ---- orders


@settings(max_examples=40)
@given(
    rows=st.integers(1, 6),
    width=st.integers(1, 12),
    seed=st.integers(0, 99),
    levels=st.sampled_from([3, 10**6]),
)
def test_a_common_order_is_found_even_where_values_repeat(
    rows: int, width: int, seed: int, levels: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    matched = torch.randint(0, levels, (rows, width), generator=draw).float()
    order = torch.randperm(width, generator=draw)
    found = common_order(matched[:, order], matched)
    assert torch.equal(matched[:, found], matched[:, order])
    assert sorted(found.tolist()) == list(range(width))


def test_no_common_order() -> None:
    rows = torch.randn(4, 9)
    shuffled = torch.stack([row[torch.randperm(9)] for row in rows])
    with pytest.raises(NotApplicableError, match="no common order"):
        common_order(shuffled, rows)


def test_sorted_matching_is_that_of_full_distances() -> None:
    table, rows = torch.randn(3000, 20), torch.randn(50, 20)
    found, distance, margin = match_sorted(rows, table)
    full = torch.cdist(rows.sort(1).values, table.sort(1).values).double()
    best = full.topk(2, largest=False).values
    assert torch.equal(found, full.argmin(1))
    assert torch.allclose(distance.double(), best[:, 0], atol=1e-4)
    assert torch.allclose(margin.double(), best[:, 1] - best[:, 0], atol=1e-4)
    alone = match_sorted(rows[:2], table[:1])
    assert alone[0].tolist() == [0, 0] and bool(alone[2].isinf().all())


def test_equal_vectors_get_equal_numbers() -> None:
    rows = torch.tensor([[1.0, 2.0], [2.0, 1.0], [1.0, 1.0], [2.0, 1.0]])
    assert number(rows) == [0, 0, 1, 0]


# ---- reading users


@pytest.mark.parametrize("tie", [True, False])
def test_a_public_embedding_names_every_token(tiny: TinyPath, tie: bool) -> None:
    path = tiny("llama", tie_word_embeddings=tie)
    public = load_model(path, 0, stream="embed", device="cpu")
    assert read_view(stip_view(Stip(load_weights(path)[0], seed=3), PROMPTS), public) == PROMPTS


@pytest.mark.parametrize("channel", ["identity", "hidden-perm:shared", "2d-perm"])
def test_the_attack_reads_any_one_order_of_coordinates(tiny: TinyPath, channel: str) -> None:
    """What a row proves is verified; rounded numbers prove no more than their step allows."""
    public = load_model(tiny("llama"), 0, stream="embed", device="cpu")
    observation, truth = hl.channel(channel).release(public, PROMPTS[0], seed=1)
    attack = ClosedWeights().fit(observation.info, public)
    if channel == "2d-perm":
        with pytest.raises(NotApplicableError, match="one order of coordinates"):
            attack.recover(observation)
        return
    result = attack.recover(observation)
    assert result.ids == list(truth.tokens) and result.verified
    step = 2.0**-12
    rounded = replace(observation, states=(observation.states / step).round() * step)
    unverified = attack.recover(rounded)
    assert unverified.ids == list(truth.tokens) and not any(token.verified for token in unverified.tokens)
    assert ClosedWeights(step).fit(rounded.info, public).recover(rounded).verified


def test_the_attack_refuses_what_it_cannot_read(tiny: TinyPath) -> None:
    deep = load_model(tiny("llama"), 1, device="cpu")
    observation, _ = hl.channel("identity").release(deep, PROMPTS[0], seed=1)
    with pytest.raises(NotApplicableError, match="reads embeddings"):
        ClosedWeights().fit(observation.info, deep).recover(observation)
    with pytest.raises(InputError, match="between 0 and 1"):
        ClosedWeights(1.0)


def test_a_tied_embedding_is_rebuilt_from_the_view(tied: Stip) -> None:
    rebuilt = rebuild_tied(stip_view(tied, PROMPTS))
    keys = tied.user.keys
    assert rebuilt.residual == 0
    assert [[int(keys.vocabulary[s]) for s in row] for row in rebuilt.symbols] == PROMPTS
    for symbol in (0, 7, 299):
        assert torch.equal(rebuilt.table[symbol], tied.user.embedding[keys.vocabulary[symbol]][keys.hidden])


def test_another_order_between_head_and_requests_is_found(tied: Stip) -> None:
    """The paper allows π_d to differ from π."""
    view = stip_view(tied, PROMPTS)
    other = torch.randperm(view.head.shape[1])
    rebuilt = rebuild_tied(ServerView(view.head[:, other], view.requests))
    assert rebuilt.residual == 0
    assert torch.equal(view.head[:, other][:, rebuilt.order], view.head)


def test_an_untied_embedding_gives_symbols_only(untied: Stip) -> None:
    view = stip_view(untied, PROMPTS)
    with pytest.raises(NotApplicableError, match="not tied"):
        rebuild_tied(view)
    symbols = collect_untied(view.requests)
    pairs = {
        (s, t) for row, tokens in zip(symbols, PROMPTS, strict=True) for s, t in zip(row, tokens, strict=True)
    }
    assert len({s for s, _ in pairs}) == len({t for _, t in pairs}) == len(pairs)


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_centaurs_server_reads_what_it_puts_together(tiny: TinyPath, architecture: str) -> None:
    weights, _ = load_weights(tiny(architecture, tie_word_embeddings=True))
    centaur = Centaur(weights, seed=3)
    view, plain = centaur_view(centaur, PROMPTS), stip_view(Stip(weights, seed=3), PROMPTS)
    for seen, sent in zip(view.requests, plain.requests, strict=True):
        assert not torch.equal(seen, sent)  # rounded to fixed-point numbers
        assert float((seen - sent).abs().max()) <= view.step
    rebuilt = rebuild_tied(view)
    keys = centaur.user.keys
    assert [[int(keys.vocabulary[s]) for s in row] for row in rebuilt.symbols] == PROMPTS
    assert 0 < rebuilt.residual <= view.step
    public = load_model(tiny(architecture, tie_word_embeddings=True), 0, stream="embed", device="cpu")
    assert read_view(view, public) == PROMPTS
    assert collect_untied(view.requests) == collect_untied(plain.requests)
    other = load_weights(tiny(architecture, tie_word_embeddings=False))[0]
    with pytest.raises(NotApplicableError, match="not tied"):
        rebuild_tied(centaur_view(Centaur(other, seed=3), PROMPTS))


@pytest.mark.slow
@pytest.mark.parametrize("attack", ["tied", "untied"])
def test_the_attack_needs_no_file_but_its_view(tied: Stip, tmp_path: Path, attack: str) -> None:
    """In another process and an empty folder: no weights, no embedding, no order can be reached."""
    view = stip_view(tied, PROMPTS)
    view.save(tmp_path)
    keys = tied.user.keys
    held = [view.head, *view.requests]
    for secret in (tied.user.embedding, keys.hidden, keys.vocabulary):
        assert not any(t.shape == secret.shape and torch.equal(t, secret) for t in held)
    # Untied: symbols by equality, named by the attacker's own text, here the very requests with other numbers.
    found = {
        "tied": "rebuild_tied(view).symbols",
        "untied": f"collect_untied(view.requests); solve(rows, {PROMPTS}); rows",
    }[attack]
    program = (
        "from pathlib import Path; from hiddenlab.attacks.closed_weights.view import ServerView\n"
        "from hiddenlab.attacks.closed_weights.recover import collect_untied, rebuild_tied\n"
        "from hiddenlab.attacks.closed_weights.substitution import solve\n"
        "import sys; view = ServerView.load(Path('.'))\n"
        f"rows = {found}\nprint([list(row) for row in rows])\n"
        "assert not [name for name in sys.modules if name.startswith('hiddenlab.defenses')]"
    )
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parent.parent),
        "HIDDENLAB_CACHE": str(tmp_path / "no"),
    }
    out = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert out.returncode == 0, out.stderr
    first = list(dict.fromkeys(t for row in PROMPTS for t in row))
    names = keys.vocabulary.tolist() if attack == "tied" else first
    assert out.stdout.strip() == str([[names.index(t) for t in row] for row in PROMPTS])


def test_symbols_of_an_untied_embedding_depend_on_equality_alone(untied: Stip, tiny: TinyPath) -> None:
    """Any private embedding gives the same symbols, so that figures of 'substitution' are those of any."""
    weights, _ = load_weights(tiny("llama", tie_word_embeddings=False))
    assert weights.embedding is not None
    other = Stip(replace(weights, embedding=torch.randn_like(weights.embedding)), seed=9)
    one, two = (collect_untied(stip_view(stip, PROMPTS).requests) for stip in (untied, other))
    assert one == two


def test_views_on_disk(tied: Stip, tmp_path: Path) -> None:
    view = stip_view(tied, PROMPTS)
    back = ServerView.load(view.save(tmp_path).parent)
    assert torch.equal(back.head, view.head) and all(map(torch.equal, back.requests, view.requests))
    assert "3 requests" in repr(back) and back.step == 0
    path = tmp_path / FILE
    rounded = ServerView(view.head, view.requests, 2.0**-16)
    assert ServerView.load(rounded.save(tmp_path).parent).step == 2.0**-16
    save_file({"head": view.head, "vectors": view.requests[0], "lengths": torch.tensor([5])}, path)
    assert ServerView.load(tmp_path).step == 0
    with pytest.raises(InputError, match="step"):
        ServerView(view.head, view.requests, -1.0)
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(InputError, match="no server's view"):
        ServerView.load(tmp_path)
    bad: tuple[tuple[Tensor, ...], ...] = (
        (torch.zeros(2, 5),),
        (torch.full((1, 64), torch.nan),),
        (torch.zeros(0, 64),),
    )
    with pytest.raises(InputError, match="no requests"):
        ServerView(torch.zeros(9, 64), ())
    for requests in bad:
        with pytest.raises(InputError, match="request 0"):
            ServerView(torch.zeros(9, 64), requests)


# ---- substitution


def chain(count: int, length: int, seed: int) -> list[list[int]]:
    """Texts of a source with structure: each of 40 tokens has a few favourites to follow it."""
    shape = random.Random(0)
    follow = [[shape.randrange(40) for _ in range(3)] for _ in range(40)]
    draw = random.Random(seed)
    out = []
    for _ in range(count):
        text = [draw.choice([0, 0, 1, 2])]
        while len(text) < length:
            text.append(
                draw.choices(follow[text[-1]], [6, 3, 1])[0] if draw.random() < 0.9 else draw.randrange(40)
            )
        out.append(text)
    return out


def test_a_substitution_falls_with_enough_requests() -> None:
    secret = list(range(40))
    random.Random(5).shuffle(secret)
    reference = chain(400, 50, 1)
    shares = []
    for count in (2, 300):
        requests = chain(count, 50, 2)
        cipher = [[secret[t] for t in row] for row in requests]
        named = solve(cipher, reference, size=40)
        assert len(set(named.values())) == len(named)
        hits = [
            named.get(s) == t
            for x, y in zip(cipher, requests, strict=True)
            for s, t in zip(x, y, strict=True)
        ]
        shares.append(sum(hits) / len(hits))
    assert shares[1] > 0.95 and shares[1] > shares[0]


def test_what_is_known_already_is_kept() -> None:
    requests = chain(3, 30, 2)
    token = requests[0][4]
    cipher = [[t + 100 for t in row] for row in requests]
    assert solve(cipher, chain(100, 50, 1), size=40, seeds={token + 100: token})[token + 100] == token
    assert solve([], chain(3, 5, 1)) == {}


# ---- the language model's say


def hits(named: dict[int, int], cipher: list[list[int]], truth: list[list[int]]) -> float:
    pairs = [(s, t) for x, y in zip(cipher, truth, strict=True) for s, t in zip(x, y, strict=True)]
    return sum(named.get(s) == t for s, t in pairs) / len(pairs)


@pytest.fixture
def knowing(tiny_model: LoadModel, monkeypatch: pytest.MonkeyPatch) -> TruncatedModel:
    """A language model that knows ``chain``: it has read far more of it than the attacker has at hand."""
    table = torch.full((300, 300), 1e-6)
    table[:40, :40] = 0.01
    for text in chain(2000, 30, 9):
        for a, b in pairwise(text):
            table[a, b] += 1
    model = tiny_model("llama", None, "logits")

    def run(requests: Sequence[Request], *, keep: bool = True) -> list[SimpleNamespace]:
        return [
            SimpleNamespace(states=(table / table.sum(1, keepdim=True)).log()[r.tokens]) for r in requests
        ]

    monkeypatch.setattr(model, "run", run)
    return model


def test_a_language_model_names_what_statistics_miss(knowing: TruncatedModel) -> None:
    secret = list(range(40))
    random.Random(5).shuffle(secret)
    requests, reference = chain(60, 30, 2), chain(12, 30, 1)
    cipher = [[secret[t] for t in row] for row in requests]
    before = solve(cipher, reference, size=12)
    after = refine(cipher, reference, before, knowing, rounds=8)
    unread = refine(cipher, reference, before, knowing, rounds=8, requests=0)
    candidates = {t for row in reference for t in row}
    assert len(before) == 12 and set(after.values()) == candidates and len(after) == len(candidates)
    shares = [hits(named, cipher, requests) for named in (before, unread, after)]
    assert shares[2] > 0.4 > 0.2 > max(shares[:2]), shares


def test_what_is_known_stays_and_too_few_candidates_go_to_whom_they_fit(tiny_model: LoadModel) -> None:
    model = tiny_model("llama", None, "logits")
    cipher = [[t + 100 for t in row] for row in chain(6, 30, 2)]
    kinds = {s for row in cipher for s in row}
    token = 7
    symbol = cipher[0][3]
    named = refine(cipher, [[1, 7, 9, 9, 7], []], {}, model, seeds={symbol: token}, rounds=2)
    assert named[symbol] == token and sorted(named.values()) == [1, 7, 9] and len(kinds) > 3
    often = refine([[5, 5, 6, 5, 5, 7, 5, 8]], [[1, 1, 2, 1, 1, 1]], {}, model, requests=0)
    assert often[5] == 1 and len(often) == 2
    assert refine([], [[1]], {}, model) == {} and refine(cipher, [], {5: 6}, model) == {5: 6}
    assert len(refine([[5]], [[1], [2]], {}, model)) == 1  # nothing stands before anything


def test_a_prior_must_be_a_language_model_of_these_tokens(tiny_model: LoadModel) -> None:
    with pytest.raises(InputError, match="needs a language model's logits, not resid"):
        refine([[1, 2]], [[1, 2]], {}, tiny_model("llama", 1))
    with pytest.raises(InputError, match="does not know"):
        refine([[1, 2]], [[1, 2000]], {}, tiny_model("llama", None, "logits"))


def test_what_is_read_is_what_each_place_says_by_itself(tiny_model: LoadModel) -> None:
    """The pass over whole requests, beside one forward pass for each place."""
    model = tiny_model("llama", None, "logits")
    symbols, tokens = prior._Texts.of(chain(4, 9, 2)), prior._Texts.of(chain(30, 9, 1))
    n, c = len(symbols.kinds), len(tokens.kinds)
    match, sure = np.random.default_rng(0).permutation(c)[:n], np.random.default_rng(1).random(n)
    found = prior._read(model, symbols, tokens, range(4), match, sure, silent)
    wanted = np.zeros((n, c))
    for row in symbols.rows:
        for at in range(1, len(row)):
            context = torch.tensor([tokens.kinds[match[s]] for s in row[:at]])
            probable = model.encode(context)[-1].double().softmax(0)
            last = [float(sure[s]) for s in row[:at][::-1]][: len(prior.RECENT)]
            used = prior.RECENT[: len(last)]
            low, high = prior.TRUST
            trust = min(
                max(high * math.fsum(w * x for w, x in zip(used, last, strict=True)) / sum(used), low), high
            )
            for j, token in enumerate(tokens.kinds):
                share = tokens.counts[j] / tokens.counts.sum()
                wanted[row[at], j] += math.log(1 - trust + trust * float(probable[token]) / share)
    assert found == pytest.approx(wanted, abs=1e-3)


def test_statistics_are_sums_over_occurrences() -> None:
    symbols, tokens = prior._Texts.of([[5, 6, 5, 8], [6, 6]]), prior._Texts.of([[1, 2, 1, 3, 4], [2, 2, 4]])
    match, sure = np.array([2, -1, 0]), np.array([0.5, 0.9, 0.25])
    found = prior._Statistics(symbols, tokens).scores(match, sure)
    share = tokens.counts / tokens.counts.sum()
    pairs, smooth = tokens.pairs.toarray(), prior.SMOOTHING
    counts = symbols.counts[:, None]
    wanted = counts * np.log(share) - counts.sum() * share - (counts * np.log(counts / counts.sum()) - counts)
    for row in symbols.rows:
        for a, b in pairwise(row.tolist()):
            for j in range(len(share)):
                for own, other, table, weight in ((a, b, pairs, 1.0), (b, a, pairs.T, prior.LEFT_PAIRS)):
                    if match[other] >= 0:
                        beside = share[match[other]]
                        p = (table[j, match[other]] + smooth * beside) / (table[j].sum() + smooth)
                        wanted[own, j] += weight * math.log(1 - sure[other] + sure[other] * p / beside)
    assert found == pytest.approx(wanted, abs=1e-4)


def test_the_surest_requests_are_read_first() -> None:
    rows = [np.array([0, 1]), np.array([2, 2]), np.array([0]), np.array([1, 2])]
    sure = np.array([0.1, 0.5, 0.9])
    assert prior._chosen(rows, sure, 2) == [1, 3] and prior._chosen(rows, sure, 9) == [1, 3, 0]
    assert prior._chosen([rows[0]] * (prior.EACH + 1) + [rows[3]], sure, 2) == [prior.EACH + 1, 0]


# ---- the experiments


@pytest.fixture
def spec(tiny: TinyPath, tmp_path: Path) -> dict[str, object]:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("hello there\nanother one")
    model = tiny("llama", tokenizer=True, tie_word_embeddings=True)
    return {"model": model, "prompts": str(prompts), "limit": 2, "max_tokens": 8, "seed": 0, "device": "cpu"}


def test_measures_of_schemes(spec: dict[str, object], tmp_path: Path) -> None:
    for name in (protocols.PLAIN, *protocols.SCHEMES):
        found = protocols.scheme({**spec, "scheme": name, "generate": 0}, tmp_path)
        assert found["top1_agreement"]["value"] == 1
        assert ("megabytes" in found) == (name != "plain")
        assert 0 < found["largest_logit_error"]["value"] < 2e-3
        assert found.get("transformers_error", {"value": 0})["value"] < 1e-3
    found = protocols.scheme({**spec, "scheme": "stip", "generate": 3}, tmp_path)
    assert found["same_generated"]["value"] == 1
    wide = protocols.scheme({**spec, "scheme": "stip", "generate": 0, "dtype": "float64"}, tmp_path)
    assert wide["largest_logit_error"]["value"] < 1e-10


@pytest.mark.parametrize(
    ("embedding", "drift", "exact"), [("public", 0.0, 1), ("tied", 0.0, 1), ("base", 0.01, 1)]
)
def test_measures_of_closed_weights(
    spec: dict[str, object], tmp_path: Path, embedding: str, drift: float, exact: int
) -> None:
    found = protocols.closed_weights({**spec, "embedding": embedding, "drift": drift}, tmp_path)
    assert found["exact"]["value"] == exact and (tmp_path / FILE).is_file()
    shared = {**spec, "embedding": embedding, "drift": drift, "scheme": "centaur"}
    assert protocols.closed_weights(shared, tmp_path)["exact"]["value"] == exact
    far = protocols.closed_weights({**spec, "embedding": "base", "drift": 30.0}, tmp_path)
    assert far["exact"]["value"] == 0


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_the_permuted_model_is_made_whole(tiny: TinyPath, tmp_path: Path, architecture: str) -> None:
    """From files of the server's alone comes a model whose states are those that the server computes."""
    name = tiny(architecture, tie_word_embeddings=True)
    weights, _ = load_weights(name)
    stip = Stip(weights, seed=3)
    write_checkpoint(stip.server.permuted, name, tmp_path / "server")
    view = ServerView.load(stip_view(stip, PROMPTS).save(tmp_path).parent)
    rebuilt = rebuild_tied(view)
    model = load_model(str(with_table(tmp_path / "server", rebuilt.table, tmp_path / "whole")), 2)
    for tokens, symbols in zip(PROMPTS, rebuilt.symbols, strict=True):
        wanted = walk(stip.server.permuted, stip.user.encrypt(tokens), Plain())[1][2]
        assert torch.allclose(model.encode(torch.tensor(symbols)), wanted, atol=1e-4)
    # Nothing of the token embedding was in the checkpoint.
    empty = load_model(str(tmp_path / "server"), 1).embedding
    assert not bool(empty.any())
    write_checkpoint(weights, name, tmp_path / "copy")
    plain, copy = (load_model(str(one), None, stream="logits") for one in (name, tmp_path / "copy"))
    assert torch.equal(plain.encode(torch.arange(9)), copy.encode(torch.arange(9)))
    with pytest.raises(InputError, match="other shapes"):
        write_checkpoint(weights, tiny(architecture, num_hidden_layers=1), tmp_path / "none")
    with pytest.raises(InputError, match="not"):
        with_table(tmp_path / "server", rebuilt.table[:5], tmp_path / "none")


@pytest.mark.slow
@pytest.mark.usefixtures("small_probes")
@pytest.mark.parametrize("channel", ["identity", "2d-perm"])
def test_states_are_matched_with_the_permuted_model(
    spec: dict[str, object], tmp_path: Path, channel: str
) -> None:
    found = protocols.permuted_model({**spec, "layer": 1, "channel": channel, "budget": None}, tmp_path)
    assert found["exact"]["value"] == 1 and found["verified"]["value"] == 1
    assert found["evaluated_tokens_per_token"]["value"] > 1
    assert [one.name for one in tmp_path.iterdir()] == [
        "prompts.txt"
    ]  # the models are as large as the original: they do not stay
    with pytest.raises(InputError, match="unknown channel"):
        permuted_model(Setting(), channels="identity,gaussian:sigma=1")


@pytest.mark.slow
@pytest.mark.usefixtures("small_probes")
@pytest.mark.parametrize("scheme", list(protocols.REVEALING))
def test_states_that_schemes_reveal_are_matched(spec: dict[str, object], tmp_path: Path, scheme: str) -> None:
    found = protocols.revealed({**spec, "scheme": scheme, "layer": 1, "budget": None}, tmp_path)
    assert found["token_accuracy"]["value"] > 0.9 and found["verified"]["value"] > 0.9
    with pytest.raises(InputError, match="behind layers 1 to"):
        protocols.revealed({**spec, "scheme": scheme, "layer": 99, "budget": None}, tmp_path)


@pytest.mark.slow
def test_substitution_is_measured(
    spec: dict[str, object], tiny: TinyPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = corpus.standard_library_sources()[:12]
    monkeypatch.setattr(protocols, "standard_library_sources", lambda: few)
    options = {**spec, "requests": 20, "request_tokens": 10, "size": 30}
    found = registry.resolve("measures", "substitution")(options, tmp_path)
    assert 0 < found["token_accuracy"]["value"] <= 1
    helped = {**options, "prior": spec["model"], "rounds": 1, "read": 5}
    assert 0 < protocols.substitution(helped, tmp_path)["kinds_named"]["value"] <= 1
    with pytest.raises(InputError, match="another vocabulary"):
        protocols.substitution({**helped, "prior": tiny("llama")}, tmp_path)
    with pytest.raises(InputError, match="not 10000000"):
        protocols.substitution({**options, "requests": 10**7}, tmp_path)


def test_statistics_alone_stay_measurable() -> None:
    both, alone = substitution(Setting(model="m")), substitution(Setting(model="m"), prior="none")
    assert len(both.cells) == 2 * len(alone.cells) and set(alone.cells[0].spec) < set(both.cells[1].spec)
    assert {cell.digest for cell in alone.cells} < {cell.digest for cell in both.cells}
    assert both.cells[1].spec["prior"] == "m"
    assert substitution(Setting(), prior="other").cells[1].spec["prior"] == "other"


@pytest.mark.slow
def test_the_attackers_text_is_not_the_users() -> None:
    def tokenizer(text: str) -> dict[str, list[str]]:
        return {"input_ids": text.split()}  # type: ignore[dict-item]

    users, own = protocols._two_parts(tokenizer, 0)
    assert sum(map(len, users)) > sum(map(len, own)) > 10_000
    texts = [" ".join(map(str, ids)) for ids in (*users, *own)]
    assert len(set(texts)) == len(texts)
    grams = [
        {tuple(ids[i : i + 20]) for ids in part for i in range(0, len(ids) - 19, 20)} for part in (users, own)
    ]
    assert len(grams[0] & grams[1]) < 0.01 * len(grams[1])


def test_distance_correlation_is_measured(
    spec: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the definition in dcor's place, which compiles itself for half a minute; the next test has dcor itself."""
    own = SimpleNamespace(
        u_distance_correlation_sqr=lambda x, y: slow_discorr(torch.as_tensor(x), torch.as_tensor(y))
    )
    monkeypatch.setitem(sys.modules, "dcor", own)
    measure = registry.resolve("measures", "discorr")
    options = {**spec, "layer": 1, "draws": 2, "limit": 1}
    shown = {name: measure({**options, "shown": name}, tmp_path)["discorr"]["value"] for name in (
        "identity", "hidden-perm", "hidden-perm:shared", "linear", "projection"
    )}  # fmt: skip
    assert all(value <= 1 for value in shown.values()) and shown["identity"] > 0
    # An order of the coordinates that all rows of the one prompt share moves no distance.
    assert shown["identity"] == pytest.approx(shown["hidden-perm:shared"], abs=1e-6)
    wide = [torch.randn(200, 300).double() for _ in range(2)]
    assert abs(slow_discorr(*wide)) < 0.05  # independent, whatever the width


@pytest.mark.slow
def test_distance_correlation_is_dcors() -> None:
    import dcor

    x, y = torch.randn(30, 3).double(), torch.randn(30, 2).double()
    found = dcor.u_distance_correlation_sqr(x.numpy(), y.numpy())
    assert found == pytest.approx(slow_discorr(x, y), abs=1e-9)


def test_random_directions_keep_states_apart_as_the_theorem_says(
    spec: dict[str, object], tmp_path: Path
) -> None:
    measure = registry.resolve("measures", "theorem-j1")
    assert projection_bound(1 / 64, 4096) == pytest.approx(0.3173, abs=1e-4)  # the paper's examples
    assert projection_bound(1 / 32, 4096) == pytest.approx(0.0455, abs=1e-4)
    for k in (1 / 64, 1 / 8, 1.0):
        found = measure({**spec, "layer": 1, "k": k, "draws": 4000}, tmp_path)
        assert found["apart"]["value"] >= found["apart_bound"]["value"] - 0.03
    assert found["apart"]["value"] < 0.01
    for wrong in ("x", "-1", "0,nan"):
        with pytest.raises(InputError, match="numbers from 0"):
            projections(Setting(model=str(spec["model"])), noise=wrong)
    with pytest.raises(InputError, match="number from 0"):
        schemes(Setting(model=str(spec["model"])), generate=-1)


@pytest.mark.slow
def test_the_pair_with_less_distance_correlation_is_the_readable_one(tmp_path: Path) -> None:
    (table,) = run_experiments(["theorem-j3"], {}, {"draws": 1000}, tmp_path)
    assert [row["keys"]["delta"] for row in table["rows"]] == [0.1, 0.3, 0.6]
    for row in table["rows"]:
        value = {name: figure["value"] for name, figure in row["figures"].items()}
        assert value["normal_discorr"] > 0.841 > value["folded_discorr"]  # the bounds of the proof
        assert value["folded_read"] == 1 > value["normal_read"]
        assert value["normal_read"] == pytest.approx(value["normal_bound"], abs=0.05)
    with pytest.raises(InputError, match=r"above 0\.945 and below 1, not 0\.5"):
        theorem_j3(Setting(), correlation=0.5)
    with pytest.raises(InputError, match="draws must be at least 2"):
        theorem_j3(Setting(), draws=1)


def slow_discorr(x: Tensor, y: Tensor) -> float:
    """By the definition: U-centred distance matrices (Szekely and Rizzo 2014)."""
    n = len(x)

    def centred(t: Tensor) -> Tensor:
        d = torch.cdist(t, t, compute_mode="donot_use_mm_for_euclid_dist")
        rows = d.sum(0) / (n - 2)
        return (d - rows - rows[:, None] + d.sum() / ((n - 1) * (n - 2))).fill_diagonal_(0)

    a, b = centred(x), centred(y)
    return float((a * b).sum() / ((a * a).sum() * (b * b).sum()).sqrt())
