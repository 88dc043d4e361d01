"""What stood before a prompt is found from what its rows leave over, and what is found makes rows exact again."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from hiddenlab.attacks import beam_decoding as package
from hiddenlab.attacks.beam_decoding import BeamDecoding, prefix_inversion
from hiddenlab.attacks.beam_decoding.hypotheses import Decoding, Hypothesis, Step
from hiddenlab.attacks.beam_decoding.prefix_inversion import Unknown, arrives
from hiddenlab.attacks.beam_decoding.row_features import Reader
from hiddenlab.channels import Channel
from hiddenlab.defenses.noise import RandomPrefix
from hiddenlab.errors import InputError
from hiddenlab.matching.distance import Matcher, choose_matcher
from hiddenlab.models import Request, TruncatedModel
from hiddenlab.proposals.store import probes_for
from tests.marks import slow_cases

LoadModel = Callable[..., TruncatedModel]
DRAW = RandomPrefix.inputs
TOKENS = torch.randint(0, 256, (12,), generator=torch.Generator().manual_seed(5)).tolist()


def decoding_of(model: TruncatedModel, specs: list[str], tokens: list[int]) -> tuple[Decoding, torch.Tensor]:
    """A decoding that believes some tokens, each in its own row, of a prompt of ``TOKENS``; and what stood before."""
    channel = Channel.parse(specs)
    drawn = list[torch.Tensor]()

    def inputs(self: RandomPrefix, *given: torch.Tensor) -> torch.Tensor:
        drawn.append(DRAW(self, *given))  # type: ignore[arg-type]
        return drawn[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RandomPrefix, "inputs", inputs)
        observation, _ = channel.release(model, TOKENS, torch.Generator().manual_seed(0))
    matcher = choose_matcher("auto", observation.info)
    probes, _ = probes_for(model, observation.info, (0,))
    view = Reader(model, channel, matcher, tuple(probes), None).read(observation)
    steps = tuple(Step(token, row, 0.0, None, 1) for row, token in enumerate(tokens))
    return Decoding(view, [Hypothesis(model.prefix(), (), steps=steps)]), drawn[0][:1]


@pytest.mark.usefixtures("small_probes")
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt2"])
@pytest.mark.parametrize(
    ("specs", "share"), [(["random-prefix"], 0.2), (["random-prefix", "hidden-perm"], 0.8)]
)
def test_what_stood_before_is_found_behind_tokens_that_are_mostly_right(
    tiny_model: LoadModel, architecture: str, specs: list[str], share: float
) -> None:
    """Behind the tokens' own coordinates nearly all is explained; sorted ones have many hollows to end in."""
    model = tiny_model(architecture, 2)
    believed = [*TOKENS[:8], 7, *TOKENS[9:]]
    decoding, hidden = decoding_of(model, specs, believed)
    search = Unknown.of(decoding, model, Matcher(1, len(specs) > 1))
    nothing = model.embed(torch.arange(model.vocab_size)).mean(0, keepdim=True)
    assert search.left(hidden) < 1e-4 < search.left(nothing)
    found = search.solve(nothing)
    assert search.left(found) < share * search.left(nothing)
    behind = model.run([Request(search.prefix(found), torch.tensor(TOKENS))], keep=False)[0].states
    both = model.run([Request(model.prefix(), torch.cat([found, model.embed(torch.tensor(TOKENS))]))])
    torch.testing.assert_close(behind, both[0].states[1:], atol=1e-5, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.usefixtures("small_probes")
@pytest.mark.parametrize(("architecture", "size", "share"), [
    ("gpt2", 1, 0.3),
    ("llama", 2, 0.6),
    ("gemma2", 1, 0.3),
])  # fmt: skip
def test_few_rows_tell_which_of_them_are_first(
    tiny_model: LoadModel, architecture: str, size: int, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However wrong the order in which the rows were decoded, the true one is explained by what is found."""
    model = tiny_model(architecture, 2)
    decoding, _ = decoding_of(model, ["random-prefix"] * size, TOKENS)
    ordered = Unknown.of(decoding, model, Matcher(1, False))
    best = decoding.beam[0]
    wrong = torch.randperm(len(TOKENS), generator=torch.Generator().manual_seed(1)).tolist()
    best.steps = tuple(best.steps[i] for i in wrong)
    search = Unknown.of(decoding, model, Matcher(1, False))
    table = model.embed(torch.arange(model.vocab_size)).float()
    centre, deviation = table.mean(0).expand(size, -1), table.std(0)
    before = model.evaluated_tokens
    monkeypatch.setattr("hiddenlab.attacks.beam_decoding.prefix_inversion.AT_ONCE", 32)  # in several parts
    found, order = search.begin(centre, deviation, centre + 0.1)
    assert [wrong[i] for i in order[:2]] == [0, 1]
    assert search.evaluated == model.evaluated_tokens - before
    assert ordered.left(found) < share * ordered.left(centre)
    assert ordered.left(found) < share * search.left(search.solve(centre))


@pytest.mark.slow
@pytest.mark.usefixtures("small_probes")
@pytest.mark.parametrize(("specs", "found_in_own", "asked"), [
    (["random-prefix", "seq-perm"], True, True),
    (["random-prefix"], True, False),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        (["random-prefix", "seq-perm"], False, False),
        (["random-prefix", "2d-perm"], True, False),
        (["random-prefix", "gaussian:sigma=0.001", "seq-perm"], True, False),
    )),
])  # fmt: skip
def test_shuffled_prompts_that_stay_unexplained_are_begun_anew(
    tiny_model: LoadModel, monkeypatch: pytest.MonkeyPatch, specs: list[str], found_in_own: bool, asked: bool
) -> None:
    """Orders are spoilt until then, and nothing else could mend them."""
    monkeypatch.setattr("hiddenlab.attacks.beam_decoding.arrives", lambda *_: found_in_own)
    monkeypatch.setattr("hiddenlab.attacks.beam_decoding.row_features.SHORTLIST", 300)
    model = tiny_model("gpt2", 1)
    observation, _ = Channel.parse(specs).release(model, TOKENS, torch.Generator().manual_seed(0))
    begun, begin, decode = list[int](), Unknown.begin, prefix_inversion.decode

    def spoilt(decodings: Sequence[Decoding], *given: Any) -> None:
        decode(decodings, *given)
        for one in [] if begun else decodings:
            steps = one.beam[0].steps
            one.beam[0].steps = (*steps[6:], *steps[:6])

    def counted(self: Unknown, *given: torch.Tensor) -> torch.Tensor:
        begun.append(len(self.tokens))
        return begin(self, *given)

    for module in (package, prefix_inversion):
        monkeypatch.setattr(module, "decode", spoilt)
        monkeypatch.setattr(module, "move_parts", lambda *_: None)
    monkeypatch.setattr(Unknown, "begin", counted)
    attack = BeamDecoding(lm=False, width=3000, beam=2, rounds=1)
    attack.fit(observation.info, model).prepare(observation)
    start = model.evaluated_tokens
    found = attack.fit(observation.info, model).recover(observation)
    assert model.evaluated_tokens - start == found.evaluated_tokens
    assert begun == [len(TOKENS)] * asked
    if asked:
        assert found.ids == TOKENS


def test_beginnings_are_looked_for_where_those_of_own_texts_are_found(
    tiny_model: LoadModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("gpt2", 1)
    channel, begin, orders = Channel.parse(["random-prefix", "seq-perm"]), Unknown.begin, list[list[int]]()

    def kept(self: Unknown, *given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        points, order = begin(self, *given)
        orders.append(order.tolist())
        return points, order

    monkeypatch.setattr(Unknown, "begin", kept)
    assert arrives(channel, model, Matcher(1, False), 1, seed=0)
    assert orders == [[0, 1, 2, 3]]
    # Where the first rows are found, but not in their order, a prompt would be begun wrongly.
    monkeypatch.setattr(Unknown, "begin", lambda self, *given: (given[0], torch.tensor([0, 1, 3, 2])))
    assert not arrives(channel, model, Matcher(1, False), 1, seed=0)


@pytest.mark.slow
@pytest.mark.usefixtures("small_probes")
@pytest.mark.parametrize("specs", [["random-prefix"], *slow_cases(["random-prefix", "seq-perm"])])
def test_prompts_behind_a_random_prefix_are_decoded_again(
    tiny_model: LoadModel, monkeypatch: pytest.MonkeyPatch, specs: list[str]
) -> None:
    """A tiny model's probe knows little: with all tokens among the candidates, states in context decide."""
    monkeypatch.setattr("hiddenlab.attacks.beam_decoding.row_features.SHORTLIST", 300)
    model = tiny_model("gpt2", 1)
    observation, _ = Channel.parse(specs).release(model, TOKENS, torch.Generator().manual_seed(0))
    right, distances = [], []
    for rounds in (0, 3):
        attack = BeamDecoding(lm=False, width=3000, beam=2, rounds=rounds)
        attack.fit(observation.info, model).prepare(observation)
        before = model.evaluated_tokens, model.forward_calls
        found = attack.fit(observation.info, model).recover(observation)
        assert model.evaluated_tokens - before[0] == found.evaluated_tokens
        right.append(sum(a == b for a, b in zip(found.ids, TOKENS, strict=True)))
        distances.append(sum(one.distance for one in found.tokens))
    assert right[1] == len(TOKENS)
    assert distances[1] < 0.1 * distances[0]


@pytest.mark.slow
@pytest.mark.usefixtures("small_probes")
def test_a_decoding_that_explains_less_is_not_taken(
    tiny_model: LoadModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("gpt2", 1)
    observation, _ = Channel.parse(["random-prefix"]).release(model, TOKENS, torch.Generator().manual_seed(0))
    found = []
    for rounds in (0, 1):
        growing = itertools.count(0.0, -1.0)  # the new decoding is asked first
        monkeypatch.setattr(Unknown, "left", lambda *_, growing=growing: next(growing))
        monkeypatch.setattr(Unknown, "solve", lambda self, start: start)
        attack = BeamDecoding(lm=False, beam=2, rounds=rounds)
        found.append(attack.fit(observation.info, model).recover(observation))
    assert [one.distance for one in found[0].tokens] == [one.distance for one in found[1].tokens]
    assert found[0].evaluated_tokens < found[1].evaluated_tokens


@pytest.mark.slow
@pytest.mark.usefixtures("small_probes")
def test_the_facts_count_where_no_stage_says_what_stands_before(tiny_model: LoadModel) -> None:
    """Positions are those behind as many embeddings as there are said to be, though nothing is known of them."""
    model = tiny_model("gpt2", 1)
    observation, _ = Channel.parse([]).release(model, TOKENS, torch.Generator().manual_seed(0))
    info = replace(observation.info, prefix_tokens=2)
    attack = BeamDecoding(lm=False, beam=2)
    prepared = attack.fit(replace(observation, info=info).info, model).prepare(
        replace(observation, info=info)
    )
    beginning = prepared.engines.beginning()
    assert (beginning.length, beginning.offset) == (0, 2)


@pytest.mark.usefixtures("small_probes")
def test_what_is_not_a_number_is_not_kept(tiny_model: LoadModel, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama", 1)
    decoding, _ = decoding_of(model, ["random-prefix"], TOKENS)
    search, start = Unknown.of(decoding, model, Matcher(1, False)), model.embed(torch.tensor([3])).clone()
    monkeypatch.setattr(
        torch.optim.LBFGS,
        "step",
        lambda self, loss: self.param_groups[0]["params"][0].data.fill_(float("nan")),
    )
    assert torch.equal(search.solve(start), start)


def test_rounds_are_a_number() -> None:
    with pytest.raises(InputError, match="rounds must be at least 0, not -1"):
        BeamDecoding(rounds=-1)
