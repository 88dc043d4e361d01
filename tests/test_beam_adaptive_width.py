"""Beam decoding: how much of the vocabulary is tried, and behind which beginning."""

from collections.abc import Callable

import pytest
import torch

from hiddenlab.attacks.beam_decoding import BeamDecoding
from hiddenlab.attacks.beam_decoding.adaptive_width import Widening
from hiddenlab.attacks.beam_decoding.beam import _try, _widen, propose
from hiddenlab.attacks.beam_decoding.features import BEFORE, Learned, candidates_of
from hiddenlab.attacks.beam_decoding.hypotheses import (
    Decoding,
    Effort,
    Engines,
    Hypothesis,
    Step,
    Trial,
    start,
)
from hiddenlab.channels import Channel
from hiddenlab.models import Request, TruncatedModel

FEW = Effort(width=2)
PROMPT = [17, 203, 88, 41, 150, 9]
Begun = tuple[Decoding, list[Trial], Engines, torch.Tensor]


@pytest.mark.slow
@pytest.mark.usefixtures("small_probes")
@pytest.mark.parametrize("channel", ["hidden-perm", "2d-perm"])
def test_more_is_tried_until_the_right_token_is_found(
    tiny_model: Callable[..., TruncatedModel], channel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tiny model's probe knows little of sorted states, and 48 candidates are too few."""
    model = tiny_model("llama", 2)
    prompts = [
        torch.randint(0, 256, (9,), generator=torch.Generator().manual_seed(i)).tolist() for i in (0, 1)
    ]
    released = Channel.parse([channel]).release_batch(model, prompts, torch.Generator().manual_seed(0))
    observations = [one for one, _ in released]

    def found() -> list[list[int]]:
        attack = BeamDecoding(lm=False)
        return [one.ids for one in attack.fit(observations[0].info, model).recover_batch(observations)]

    assert found() == prompts
    monkeypatch.setattr(Widening, "lead", lambda *_: float("inf"))
    assert found() != prompts


@pytest.fixture
def begun(tiny_model: Callable[..., TruncatedModel], small_probes: None) -> Begun:
    """Two beginnings of a prompt, of which the better one is wrong, and two candidates for the next token of each."""
    model = tiny_model("llama", 2)
    observation, _ = Channel.parse(["hidden-perm"]).release(model, PROMPT, torch.Generator().manual_seed(0))
    attack = BeamDecoding(lm=False)
    prepared = attack.fit(observation.info, model).prepare(observation)
    engines, weights = prepared.engines, prepared.learned.weights
    decoding = start(prepared.reader.read(observation), engines, weights, attack.effort)
    beam = []
    for first, score in ((60, 0.5), (PROMPT[0], 0.0)):
        prefix = engines.beginning()
        prefix.keep(engines.model.run([Request(prefix, torch.tensor([first]))])[0], tokens=1)
        step = Step(first, 0, 0.0, None, 1)
        beam.append(Hypothesis(prefix, decoding.beam[0].free, columns=(-1,), steps=(step,), score=score))
    decoding.beam = beam
    pairs = [(decoding, one) for one in beam]
    tried = _try(pairs, [propose(*pair, weights, FEW) for pair in pairs], engines, weights)
    assert PROMPT[1] not in torch.cat(tried[1].tokens)
    return decoding, tried, engines, weights


@pytest.mark.slow
def test_more_is_tried_where_it_was_the_likeliest(begun: Begun) -> None:
    """Of two hypotheses the one whose candidates that were not run are likelier; counted one by one here."""
    decoding, tried, _, weights = begun
    assert decoding.view.wide is not None
    doubt, expected, best = Widening.of(decoding, tried, weights, FEW), [], []
    for one, own in zip(decoding.beam, tried, strict=True):
        everything = candidates_of(
            decoding.view, 1, one.free, [-1], None, torch.arange(decoding.view.wide.shape[1])
        )
        before = everything.features[:, :BEFORE] @ weights[:BEFORE]
        rest = before[~torch.isin(everything.tokens, torch.cat(own.tokens))]
        expected.append(one.score + float(rest.logsumexp(0)))
        best.append(one.score + float((own.candidates.features @ weights).max()))
    assert doubt.unrun == pytest.approx(expected, rel=1e-4)
    assert doubt.next == expected.index(max(expected))
    assert doubt.lead(weights) == pytest.approx(max(best) - max(expected), rel=1e-4)
    assert doubt.remains(Learned(weights, doubt.lead(weights) + 1))
    assert not doubt.remains(Learned(weights, doubt.lead(weights) - 1))


@pytest.mark.slow
@pytest.mark.parametrize("hypotheses", [1, 2])
def test_a_right_beginning_that_is_the_second_gets_its_turn(
    begun: Begun, hypotheses: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hiddenlab.attacks.beam_decoding.adaptive_width.HYPOTHESES", hypotheses)
    decoding, tried, engines, weights = begun
    _widen([decoding], [tried], engines, Learned(weights, float("inf")), FEW)
    assert decoding.view.wide is not None
    assert len(torch.cat(tried[0].tokens)) == decoding.view.wide.shape[1]
    assert (PROMPT[1] in torch.cat(tried[1].tokens)) == (hypotheses == 2)
    if hypotheses == 2:
        totals = [
            one.score + (own.candidates.features @ weights).max()
            for one, own in zip(decoding.beam, tried, strict=True)
        ]
        own = tried[1].candidates
        assert int(own.tokens[(own.features @ weights).argmax()]) == PROMPT[1]
        assert totals[1] > totals[0]


def test_no_more_is_tried_than_a_prompt_may_cost(begun: Begun) -> None:
    decoding, tried, engines, weights = begun
    _widen([decoding], [tried], engines, Learned(weights, float("inf")), Effort(width=2, spare=3))
    allowed = 3 * len(PROMPT)
    assert allowed <= decoding.widened <= allowed + 2 * 4 * 4  # what began within the allowance is ended


def test_where_nothing_is_ever_believed_nothing_more_is_tried(begun: Begun) -> None:
    decoding, tried, engines, weights = begun
    _widen([decoding], [tried], engines, Learned(weights), FEW)
    assert decoding.widened == 0
