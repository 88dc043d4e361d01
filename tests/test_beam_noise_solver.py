"""Beam decoding of rows in unknown order behind noise, for which candidates are solved."""

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from hiddenlab.attacks.beam_decoding import BeamDecoding
from hiddenlab.attacks.beam_decoding.embedding_inversion import UNEXPLAINED, Problem, step
from hiddenlab.attacks.beam_decoding.features import NOISE, candidates_of
from hiddenlab.attacks.beam_decoding.hypotheses import Effort
from hiddenlab.attacks.beam_decoding.noise_solver import DESCENTS, append, explain
from hiddenlab.attacks.beam_decoding.row_features import Reader
from hiddenlab.channels import Channel
from hiddenlab.errors import InputError
from hiddenlab.matching.distance import Matcher
from hiddenlab.models import Request, TruncatedModel, load_model

TOKENS = [5, 17, 40, 99, 140, 7, 63, 201, 33, 120]


@pytest.fixture(autouse=True)
def small(small_probes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Little is learned from, and every token is among a row's candidates."""
    monkeypatch.setattr("hiddenlab.attacks.beam_decoding.row_features.SHORTLIST", 300)
    for name, value in {"NOISED": 2, "BEGINNING": 6}.items():
        monkeypatch.setattr(f"hiddenlab.attacks.beam_decoding.weights.{name}", value)


def strength(model: TruncatedModel, share: float) -> float:
    return share * float(model.embedding.std())


def prepared(model: TruncatedModel, specs: list[str], **options: object) -> tuple:
    observation, secret = Channel.parse(specs).release(model, TOKENS, torch.Generator().manual_seed(0))
    attack = BeamDecoding(lm=False, **options)  # type: ignore[arg-type]
    return observation, secret, attack, attack.fit(observation.info, model).prepare(observation)


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt2"])
def test_candidates_are_solved_for_as_one_by_one(
    tiny_model: Callable[..., TruncatedModel], architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In parts, behind what was appended; the oracle runs the whole prompt anew for every candidate."""
    model = tiny_model(architecture, 2)
    sigma = strength(model, 0.3)
    observation, _, _, made = prepared(model, [f"gaussian:sigma={sigma}", "seq-perm"])
    monkeypatch.setattr(model, "max_pass_tokens", 4)
    generator = torch.Generator().manual_seed(1)
    with torch.inference_mode():
        view, asked, chains = made.reader.read(observation), [], []
        for length in (0, 3, 5):
            plain = model.embed(torch.tensor(TOKENS[:length]).long()).float()
            chains.append(plain + sigma * torch.randn(plain.shape, generator=generator))
            prefix = model.prefix()
            for embedding in chains[-1]:
                append([(prefix, embedding)])
            candidates = candidates_of(view, length, range(length, len(TOKENS)), [], None)
            some = torch.randperm(len(candidates), generator=generator)[:3]
            asked.append((prefix, view, candidates.keep(some)))
        before = model.evaluated_tokens
        found, run = explain(asked, model, Matcher(1, False), sigma)
        assert run * sum(map(len, found)) == model.evaluated_tokens - before
    tau = UNEXPLAINED / model.width**0.5 * observation.states.norm(dim=1, keepdim=True)
    for chain, (_, _, candidates), embeddings in zip(chains, asked, found, strict=True):
        for i, (token, row) in enumerate(zip(candidates.tokens, candidates.rows, strict=True)):
            centre = model.embed(token[None]).float().clone()
            problem = Problem(
                torch.cat([chain.clone(), centre]), torch.tensor([len(chain)]), centre,
                observation.states[row][None].clone(), tau[row][None], torch.zeros_like(centre), torch.zeros(1),
            )  # fmt: skip
            for _ in range(DESCENTS):
                step(model, [problem], sigma)
            cost = float(problem.cost) / centre.shape[1]
            assert float(candidates.features[i, NOISE].exp()) == pytest.approx(cost, rel=0.05)
            whole = model.encode(torch.cat([chain, embeddings[i : i + 1]]))[-1]
            noise = (embeddings[i : i + 1] - centre) / sigma
            left = ((observation.states[row] - whole) / tau[row]).square().sum() + noise.square().sum()
            assert float(left) / 2 / centre.shape[1] == pytest.approx(cost, rel=0.05)


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


@pytest.mark.parametrize(("layer", "options"), [(2, {"solved": 16}), (1, {"orders": True})])
def test_an_order_that_noise_hides_comes_back(
    tiny_model: Callable[..., TruncatedModel],
    monkeypatch: pytest.MonkeyPatch,
    layer: int,
    options: dict[str, int],
) -> None:
    """Noise as strong as embeddings differ; tokens are known, and nothing but states tells of their order."""
    model = tiny_model("llama", layer)
    specs = [f"gaussian:sigma={strength(model, 1.0)}", "seq-perm"]
    right = []
    for chosen in ({}, options):
        observation, secret, attack, made = prepared(model, specs, beam=2, sweeps=0, **chosen)
        assert (made.engines.sigma is not None) == ("solved" in chosen)
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
            assert (decoding.evaluated > before) == ("orders" in chosen)
        order = [secret.row_order[one.row] for one in decoding.beam[0].steps]
        assert sorted(order) == list(range(len(TOKENS)))
        right.append(sum(b == a + 1 for a, b in itertools.pairwise(order)))
    assert right[1] > right[0]


def test_it_is_solved_for_only_where_that_can_help(
    tiny_model: Callable[..., TruncatedModel], tiny: Callable[..., str]
) -> None:
    model = tiny_model("llama", 1)
    _, _, _, made = prepared(model, ["gaussian:sigma=0.1", "seq-perm"])
    assert made.solves
    assert made.engines.sigma is None
    for other in (
        {"rows_permuted": False}, {"columns_permuted": "shared"}, {"noise_sigma": None}, {"prefix_tokens": 1}
    ):  # fmt: skip
        assert not replace(made, info=replace(made.info, **other)).solves  # type: ignore[arg-type]
    assert not replace(made, model=load_model(tiny("llama"), 1, dtype="bfloat16", device="cpu")).solves
    with pytest.raises(InputError, match="solved"):
        BeamDecoding(solved=-1)


def test_more_is_solved_for_at_the_beginning() -> None:
    assert [Effort(solved=16).solves(place) for place in (0, 2, 3, 6, 50)] == [64, 64, 32, 16, 16]
