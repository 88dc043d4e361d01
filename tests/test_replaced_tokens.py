"""Tokens that are replaced before the model runs: the mechanisms, what is scored, and what an attack decodes."""

import dataclasses
import math
from collections.abc import Callable
from itertools import pairwise, permutations
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hiddenlab as hl
from hiddenlab import registry
from hiddenlab.attacker import Attacker
from hiddenlab.attacks.replaced_tokens import Codebook, ReplacedTokens
from hiddenlab.batch import sample_of
from hiddenlab.channels import Channel
from hiddenlab.defenses import replace_tokens
from hiddenlab.defenses.replace_tokens import CusText, RanText, SanText, VocabularyBijection
from hiddenlab.errors import HiddenlabError, InputError, NotApplicableError
from hiddenlab.eval.assess import ensemble
from hiddenlab.eval.assess.belief import Belief
from hiddenlab.eval.assess.ensemble import Attempt
from hiddenlab.eval.assess.hiding import as_known
from hiddenlab.eval.assess.readings import Reading, is_misled, shown_accuracy_of, undecoded_of
from hiddenlab.eval.assess.verdict import Evidence, sentence_of, status_of
from hiddenlab.eval.measures.intervals import Estimate
from hiddenlab.job import Case
from hiddenlab.models import TruncatedModel
from hiddenlab.preparations import as_whole
from hiddenlab.stages import Replacement, Stage, Vocabulary, are_replaced
from hiddenlab.summary import conclusion, wrong_but_verified
from hiddenlab.testing import BOS, EOS
from hiddenlab.truths import load_truth, save_truth
from hiddenlab.types import AttackResult, GroundTruth, KnownText, TokenPrediction

Truncated = Callable[..., TruncatedModel]
PROMPT = [BOS, 5, 17, 40, 5, 203, 99]
MECHANISMS = (SanText(2.0), SanText(0.3), RanText(1.0), RanText(6.0), CusText(3.0, k=4), CusText(0.5, k=7))


def drawn(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def vocabulary(seed: int = 0, tokens: int = 40, width: int = 6) -> Vocabulary:
    return Vocabulary(torch.randn(tokens, width, generator=drawn(seed)), frozenset({0, 7}))


def oracle_of(stage: Replacement, token: int, words: Vocabulary) -> torch.Tensor:
    """How often each token is drawn in place of one, by drawing many."""
    many = stage.replaced([token] * 3000, words, drawn(1))
    return torch.bincount(torch.tensor(many), minlength=len(words.table)) / len(many)


@pytest.mark.parametrize("stage", MECHANISMS, ids=lambda stage: stage.spec)
def test_the_likelihood_is_how_often_a_token_is_drawn(
    stage: Replacement, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replace_tokens, "DRAWS", 100)  # of RANTEXT's length, which varies in few dimensions
    words = vocabulary()
    for token in (20,):
        often = oracle_of(stage, token, words)
        logs = [stage.likelihood(y, torch.tensor([token]), words)[0] for y in range(len(words.table))]
        chances = torch.stack(logs).exp()
        torch.testing.assert_close(chances, often, atol=0.035, rtol=0)
        assert float(chances.sum()) == pytest.approx(1, abs=1e-4)


def test_santext_follows_its_formula() -> None:
    words, epsilon = vocabulary(), 1.7
    candidates = torch.tensor([3, 11])
    keep = [i for i in range(len(words.table)) if i not in words.special]
    for i, token in enumerate(candidates.tolist()):
        terms = {
            y: math.exp(-epsilon * float(torch.dist(words.table[token], words.table[y])) / 2) for y in keep
        }
        for shown in (3, 25):
            said = SanText(epsilon).likelihood(shown, candidates, words)[i]
            assert float(said) == pytest.approx(math.log(terms[shown] / sum(terms.values())), abs=1e-4)


def test_the_sum_over_a_large_vocabulary_is_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    words, candidates = vocabulary(tokens=900), torch.arange(10, 60)
    exactly = SanText(0.8).likelihood(30, candidates, words)
    monkeypatch.setattr(replace_tokens, "REFERENCE", 300)
    estimated = SanText(0.8).likelihood(30, candidates, words)
    assert not torch.equal(estimated, exactly)
    torch.testing.assert_close(estimated, exactly, atol=0.3, rtol=0)


@given(st.integers(0, 50), st.integers(2, 9))
@settings(max_examples=20)
def test_groups_of_custext_hold_each_token_once(seed: int, k: int) -> None:
    words = vocabulary(seed, tokens=60)
    groups = replace_tokens._groups(words, k)
    sizes = torch.bincount(groups[words.ordinary()])
    assert set(groups[list(words.special)].tolist()) == {-1}
    # All are full but one.
    assert int((sizes != k).sum()) <= 1 and int(sizes.max()) <= k
    first = words.ordinary()[0]
    nearest = words.distances(int(first), words.ordinary()).argsort()[:k]
    assert set(words.ordinary()[nearest].tolist()) == set((groups == groups[first]).nonzero()[:, 0].tolist())


@given(st.integers(0, 2**31), st.lists(st.integers(0, 39), min_size=1, max_size=12))
@settings(max_examples=30)
def test_one_seed_gives_one_text_and_special_tokens_stay(seed: int, tokens: list[int]) -> None:
    words = vocabulary()
    for stage in (*MECHANISMS, VocabularyBijection(), VocabularyBijection(key=3)):
        once, again = (stage.replaced(tokens, words, drawn(seed)) for _ in range(2))
        assert once == again and len(once) == len(tokens)
        for before, after in zip(tokens, once, strict=True):
            assert (before == after) if before in words.special else after not in words.special


@pytest.mark.parametrize("spec", ["santext:epsilon=1e6", "rantext:epsilon=1e6", "custext:epsilon=1e6,k=5"])
def test_a_large_epsilon_gives_the_plain_states(spec: str, tiny_model: Truncated) -> None:
    model = tiny_model("llama", 2)
    plain, _ = Channel.parse([]).release(model, PROMPT)
    released, truth = Channel.parse([spec]).release(model, PROMPT)
    assert truth.computed == tuple(PROMPT) and torch.equal(released.states, plain.states)


def test_rows_are_of_the_substitutes_and_the_truth_is_the_prompt(tiny_model: Truncated) -> None:
    model = tiny_model("llama", 2)
    released, truth = Channel.parse(["santext:epsilon=0.01"]).release(model, PROMPT)
    assert truth.tokens == tuple(PROMPT) != truth.computed and truth.computed is not None
    assert truth.computed[0] == BOS and truth.shown == truth.computed
    plain, other = Channel.parse([]).release(model, truth.computed)
    assert (
        torch.equal(released.states, plain.states) and other.computed is None and other.shown == other.tokens
    )
    assert are_replaced(released.info) and not are_replaced(plain.info)
    # An attacker prepares for what happens behind the tokens that ran.
    assert as_whole(released.info) == plain.info


def test_a_bijection_is_one_for_all_prompts_with_a_key_alone(tiny_model: Truncated) -> None:
    model = tiny_model("llama", 2)
    for key, same in ((":key=4", True), ("", False)):
        channel = Channel.parse([f"vocab-bijection{key}"])
        first, second = (channel.release(model, PROMPT, seed) for seed in range(2))
        assert (first[1].computed == second[1].computed) == same
        assert first[0].info.channel == ("vocab-bijection",)  # nobody reads the key
        assert first[1].computed is not None and first[1].computed[1] == first[1].computed[4]  # both were 5
    words = vocabulary()
    coded = VocabularyBijection(key=1).replaced(range(40), words, drawn(0))
    assert sorted(coded) == list(range(40))


def test_bad_parameters_and_two_replacements_are_refused() -> None:
    for build in (
        lambda: SanText(0.0),
        lambda: RanText(math.inf),
        lambda: CusText(-1.0),
        lambda: CusText(1.0, k=1),
    ):
        with pytest.raises(InputError):
            build()
    with pytest.raises(InputError, match="only one stage may replace tokens"):
        Channel.parse(["santext:epsilon=1", "vocab-bijection"])


class Shortening(Stage):
    spec = "shortening"

    def replaced(self, tokens, vocabulary, generator):  # type: ignore[no-untyped-def]
        return list(tokens)[1:]

    def origins(self, shown, count, vocabulary):  # type: ignore[no-untyped-def]
        raise NotApplicableError("unknown")

    likelihood = origins


def test_a_replacement_that_loses_tokens_is_refused(tiny_model: Truncated) -> None:
    with pytest.raises(HiddenlabError, match="replaced 7 tokens by 6"):
        Channel([Shortening()]).release(tiny_model("llama", 2), PROMPT)


def test_scores_tell_the_prompt_from_what_ran() -> None:
    def reading(*ids: int) -> AttackResult:
        tokens = tuple(TokenPrediction(token, i, 0.0, None, 1, True) for i, token in enumerate(ids))
        return AttackResult(tokens, 0, 0, 0.0, "complete", text="".join(map(chr, ids)))

    truth = GroundTruth((65, 66, 67, 68), text="ABCD", computed=(65, 90, 91, 92))
    read = hl.score(reading(65, 90, 91, 92), truth)
    assert (read.shown_accuracy, read.token_accuracy, read.verified) == (1.0, 0.25, 1.0) and not read.exact
    guessed = hl.score(reading(65, 66, 67, 92), truth)
    assert (guessed.shown_accuracy, guessed.token_accuracy) == (0.5, 0.75)
    assert hl.score(reading(65), dataclasses.replace(truth, computed=None)).shown_accuracy is None


def test_a_record_does_not_call_a_verified_substitute_wrong(tiny: Callable[..., str]) -> None:
    model = hl.load_model(tiny("llama", tokenizer=True), 2, device="cpu")
    observation, truth = hl.channel("santext:epsilon=0.01").release(model, "a prompt")
    tokens = tuple(TokenPrediction(token, i, 0.0, None, 1, True) for i, token in enumerate(truth.shown))
    result = AttackResult(tokens, 0, 0, 0.0, "complete", text=model.text(truth.shown))
    sample = sample_of(model, Case(0, "p001", truth, observation), truth, result, None)
    assert wrong_but_verified([sample]) == 0 and sample["shown_accuracy"] == 1.0
    assert "8 of 8 of those were read" in conclusion([sample]) and "wrong" not in conclusion([sample])


def test_truth_files_hold_what_ran(tmp_path: Path) -> None:
    truths = [GroundTruth((1, 2), computed=(3, 4)), GroundTruth((5,))]
    save_truth(truths, tmp_path / "truth.json")
    assert load_truth(tmp_path / "truth.json") == truths
    (tmp_path / "bad.json").write_text('{"format": 1, "secrets": [{"tokens": [1, 2], "computed": [1]}]}')
    with pytest.raises(InputError, match="computed should have as many tokens"):
        load_truth(tmp_path / "bad.json")


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["santext:epsilon=6", "rantext:epsilon=9", "custext:epsilon=6,k=4"])
def test_the_attack_decodes_what_tokens_stood_for(
    stage: str, tiny_model: Truncated, small_probes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A language model that knows the text finds it again, where matching alone reads the substitutes."""
    model = tiny_model("llama", 2)
    prompt = [BOS, 5, 17, 40, 61, 203, 99]  # no token twice: one follows each
    released, truth = Channel.parse([stage]).release(model, prompt, 3)
    truth = dataclasses.replace(truth, text=model.text(truth.tokens))
    expected = dict(pairwise(prompt[1:]))

    class Knowing:
        """Ten nats surer of the token that follows in the prompt."""

        def __init__(self, model: TruncatedModel) -> None:
            self.opened = model.sibling(stream="logits").prefix()
            run = self.opened.model.run_all

            def told(requests, **options):  # type: ignore[no-untyped-def]
                answers = run(requests, **options)
                for answer in answers:
                    answer.states = torch.zeros_like(answer.states)
                    if (token := expected.get(int(answer.request.tokens[-1]))) is not None:
                        answer.states[-1, token] = 10.0
                return answers

            monkeypatch.setattr(self.opened.model, "run_all", told)

    monkeypatch.setattr("hiddenlab.attacks.replaced_tokens.LazyModel", Knowing)
    read = hl.score(hl.attack(released, model), truth)
    assert read.shown_accuracy == 1.0
    attack = ReplacedTokens().fit(released.info, model)
    result = attack.recover(released)
    decoded = hl.score(result, truth)
    assert decoded.token_accuracy > read.token_accuracy or decoded.token_accuracy == 1.0
    assert not any(token.verified for token in result.tokens)


def test_the_attack_says_where_it_does_not_apply(tiny_model: Truncated) -> None:
    model = tiny_model("llama", 2)
    for spec, reason in (("identity", "no token was replaced"), ("vocab-bijection:key=1", "without the key")):
        released = Channel.parse([spec]).release(model, PROMPT)[0]
        with pytest.raises(NotApplicableError, match=reason):
            ReplacedTokens().fit(released.info, model).recover(released)
    with pytest.raises(InputError):
        ReplacedTokens(beam=0)


def test_texts_of_the_same_key_show_what_a_bijection_hides(tiny_model: Truncated, small_probes: None) -> None:
    model, channel = tiny_model("llama", 2), Channel.parse(["vocab-bijection"])
    made = [
        channel.release(model, tokens, i, 5)[0]
        for i, tokens in enumerate([PROMPT, PROMPT[:4], [BOS, 203, 7]])
    ]
    known = tuple(
        KnownText(tuple(tokens), shown)
        for tokens, shown in zip([PROMPT[:4], [BOS, 203, 7]], made[1:], strict=True)
    )
    attack = ReplacedTokens().fit(made[0].info, model)
    result = attack.recover(dataclasses.replace(made[0], known=known))
    assert result.ids[:6] == PROMPT[:6]  # 99 stands in no known text
    assert not any(token.verified for token in result.tokens)
    assert result.ids[6] not in (*PROMPT[:6], 7)
    # Texts of another key say nothing; and without any the attack does not apply.
    other = channel.release(model, PROMPT, 9, 6)[0]
    told = attack.recover(dataclasses.replace(other, known=known))
    assert told.ids != PROMPT
    with pytest.raises(NotApplicableError, match="without the key"):
        attack.recover(made[0])


@pytest.mark.parametrize("behind", ["orthogonal", "decoys:count=2", ""])
def test_known_texts_show_a_bijection_behind_other_secrets_and_to_who_knows_its_facts_alone(
    behind: str, tiny_model: Truncated, small_probes: None
) -> None:
    model, channel = tiny_model("llama", 1), Channel.parse(["vocab-bijection", *([behind] if behind else [])])
    prompt, text = PROMPT[:5], PROMPT[:6]
    observation, shown = (channel.release(model, tokens, i, 5)[0] for i, tokens in enumerate((prompt, text)))
    seen = dataclasses.replace(observation, known=(KnownText(tuple(text), shown),))
    if not behind:
        seen = as_known(seen, model, Attacker(knows="facts"))
        assert not seen.info.channel
    assert ReplacedTokens(budget=400).fit(seen.info, model).recover(seen).ids == prompt


def test_texts_of_which_no_token_is_read_show_nothing(tiny_model: Truncated, small_probes: None) -> None:
    model, channel = tiny_model("llama", 2), Channel.parse(["vocab-bijection"])
    observation, shown = (channel.release(model, PROMPT, i, 5)[0] for i in range(2))
    spoilt = dataclasses.replace(shown, states=torch.randn(shown.states.shape))
    seen = dataclasses.replace(observation, known=(KnownText(tuple(PROMPT), spoilt),))
    with pytest.raises(NotApplicableError, match="of 7 tokens of known texts 0 were read surely"):
        ReplacedTokens(budget=4).fit(seen.info, model).recover(seen)


@pytest.mark.parametrize(
    ("spec", "count"), [("vocab-bijection", 1), ("santext:epsilon=5", 1), ("identity", 0)]
)
def test_no_defense_holds_whose_substitutes_were_not_decoded(
    spec: str, count: int, tiny_model: Truncated
) -> None:
    model = tiny_model("llama", 2)
    observation, truth = Channel.parse([spec]).release(model, PROMPT)
    reading, tried = Reading(Case(0, "p", truth), observation, None, None, None), Attempt("replaced-tokens")
    assert undecoded_of([reading], [tried]) == count
    tried.results[0] = AttackResult((), 0, 0, 0.0, "complete")
    assert undecoded_of([reading], [tried]) == 0
    held = Evidence(Estimate(0.0, 0.0, 0.01, 60), 0, (0, 4), able=["vocab-match"])
    assert status_of(held) == "HELD"
    untried = dataclasses.replace(held, undecoded=1)
    assert status_of(untried) == "INCONCLUSIVE"
    assert "of 1 prompt no attack decoded" in sentence_of(untried, 1.0, None)


def test_texts_of_several_keys_are_no_codebook(tiny_model: Truncated, small_probes: None) -> None:
    model, channel = tiny_model("llama", 2), Channel.parse(["vocab-bijection"])
    observation, *shown = (channel.release(model, PROMPT, i, None if i else 5)[0] for i in range(3))
    seen = dataclasses.replace(observation, known=tuple(KnownText(tuple(PROMPT), one) for one in shown))
    with pytest.raises(NotApplicableError, match="several keys"):
        ReplacedTokens().fit(seen.info, model).recover(seen)


@given(pairs=st.dictionaries(st.integers(1, 6), st.integers(1, 6)), shown=st.integers(0, 9))
def test_a_codebook_is_the_share_of_the_bijections_that_fit(pairs: dict[int, int], shown: int) -> None:
    """Beside all bijections of seven tokens, one by one; 0 and 7 are special."""
    words = Vocabulary(torch.zeros(8, 2), frozenset({0, 7}))
    shown = min(shown, 7)
    fits = [
        dict(zip(range(1, 7), order, strict=True))
        for order in permutations(range(1, 7))
        if all(order[a - 1] == b for a, b in pairs.items())
    ]
    book = Codebook(pairs)
    if not fits:  # no bijection: what was read is of several keys
        return
    said = book.likelihood(shown, torch.arange(8), words).exp()
    for token in range(8):
        share = (
            float(token == shown) if shown in (0, 7) else sum(one[shown] == token for one in fits) / len(fits)
        )
        assert float(said[token]) == pytest.approx(share)
    assert {int(i) for i in book.origins(shown, 8, words)} == {i for i in range(8) if said[i] > 0}
    assert len(book.origins(shown, 1, words)) == 1


@pytest.mark.slow
def test_no_attack_fails_behind_replaced_tokens(tiny_model: Truncated, small_probes: None) -> None:
    model = tiny_model("llama", 1)
    released = [Channel.parse(["santext:epsilon=1"]).release(model, PROMPT[:5], i)[0] for i in range(2)]
    attempts = ensemble.attack_all(released, model, 0, 600.0, lambda *_: None, ensemble.ATTACKS)
    assert {attempt.status for attempt in attempts} <= {
        ensemble.RAN,
        ensemble.NOT_APPLICABLE,
        ensemble.DONE_BEFORE,
    }
    assert attempts[0].status == ensemble.RAN


@pytest.mark.slow
def test_tokens_are_decoded_although_those_that_ran_were_read_before(
    tiny_model: Truncated, small_probes: None
) -> None:
    """Where the decoding ran out of time in the look, it goes on after the matching."""
    model = tiny_model("llama", 1)
    released = [Channel.parse(["santext:epsilon=1"]).release(model, PROMPT[:5], i)[0] for i in range(2)]
    decoding = next(step for step in ensemble.ATTACKS if step.attack == "replaced-tokens")
    matching = ensemble.Step("vocab-match:setup=quick")
    read, decoded = ensemble.attack_all(released, model, 0, 600.0, lambda *_: None, [matching, decoding])
    assert all(ensemble.solved(read.results[i], released[i]) for i in range(2))
    assert sorted(decoded.results) == [0, 1]


def test_tokens_that_ran_and_were_read_do_not_count_as_wrong(tiny_model: Truncated) -> None:
    model = tiny_model("llama", 1)
    observation, truth = Channel.parse(["vocab-bijection"]).release(model, PROMPT)
    tokens = tuple(TokenPrediction(token, i, 0.0, None, 1, True) for i, token in enumerate(truth.shown))
    right = ensemble.Attempt("a", results={0: AttackResult(tokens, 0, 0, 0.0, "complete")})
    wrong = ensemble.Attempt("a", results={0: AttackResult(tokens[::-1], 0, 0, 0.0, "complete")})
    reading = Reading(Case(0, "p", truth), observation, None, None, None)
    table = model.embedding.clone()
    assert not is_misled(reading, [right], 0, table) and is_misled(reading, [wrong], 0, table)
    assert not is_misled(reading, [], 0, table)
    table[:] = table[0]  # tokens with the same embedding give the same rows
    assert not is_misled(reading, [wrong], 0, table)
    assert shown_accuracy_of([reading], [right]) == 1.0
    # And the attacker, who knows that tokens were replaced, is sure of none of the prompt's.
    beliefs = [Belief(model, replaced) for replaced in (True, False)]
    for belief in beliefs:
        belief._evidence = lambda *_: None  # type: ignore[method-assign]
    weighed = [belief.weigh([right.results[0]], observation)[0] for belief in beliefs]
    assert [sure for sure, _ in weighed] == [0, len(PROMPT)]


def test_the_names_are_registered() -> None:
    for spec in ("santext:epsilon=1", "custext:epsilon=1", "rantext:epsilon=1", "vocab-bijection"):
        built = registry.build("defenses", spec)
        assert isinstance(built, Replacement) and registry.build("defenses", built.spec).spec == built.spec
    assert EOS not in Vocabulary(torch.zeros(300, 4), frozenset({BOS, EOS})).ordinary()
