"""Decode speculatively so that it can be verified: a draft model proposes, the target accepts, modes are recorded.

The random numbers of an output position are drawn once, in the order of positions: the draft's Gumbel noise, a uniform
number for the acceptance, and the target's Gumbel noise. So they stay the same however often a position is drafted, and
a verifier who knows the recorded modes needs one prefill of each model (DiFR, appendix F).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hiddenlab.defenses.verification.causal_lm import WholeModel
from hiddenlab.defenses.verification.provider import LOADED, Request, Variant
from hiddenlab.defenses.verification.sampling import Noise, Sampling, StreamNoise, perturbed, probabilities
from hiddenlab.defenses.verification.transcript import Mode, Transcript
from hiddenlab.errors import InputError

ACCEPT: Mode = "accept"
REJECT: Mode = "reject"
BONUS: Mode = "bonus"


@dataclass(frozen=True)
class Numbers:
    """The random numbers of one output position."""

    draft: Float[Tensor, " v"]
    uniform: float
    target: Float[Tensor, " v"]


class Positions:
    """The random numbers of output positions, each drawn once; they do not depend on tokens."""

    def __init__(self, noise: Noise, width: int) -> None:
        self._noise = noise
        self._width = width
        self._drawn: list[Numbers] = []

    def __getitem__(self, place: int) -> Numbers:
        while len(self._drawn) <= place:
            # Hashed noise depends on the tokens before, or on their number; here the place and the use replace both.
            now = 3 * len(self._drawn)
            draft = self._noise.gumbel(self._width, range(now))
            uniform = self._noise.uniform(range(now + 1))
            self._drawn.append(Numbers(draft, uniform, self._noise.gumbel(self._width, range(now + 2))))
        return self._drawn[place]


def draft_tokens(logits: Float[Tensor, "n v"], numbers: Numbers, sampling: Sampling) -> Int[Tensor, " n"]:
    """Return the token that the draft model proposes, for each row of logits of one position."""
    return perturbed(logits, numbers.draft.expand_as(logits), sampling).argmax(1)


def accepts(
    target: Float[Tensor, "n v"],
    draft: Float[Tensor, "n v"],
    tokens: Int[Tensor, " n"],
    numbers: Numbers,
    sampling: Sampling,
) -> Bool[Tensor, " n"]:
    """Return whether the target keeps a proposed token: u < q(x) / p(x) (Leviathan et al. 2023; Chen et al. 2023)."""
    q, p = (
        probabilities(side, sampling).gather(1, tokens[:, None])[:, 0].double() for side in (target, draft)
    )
    return numbers.uniform * p < q


def own_tokens(
    target: Float[Tensor, "n v"], draft: Float[Tensor, "n v"] | None, numbers: Numbers, sampling: Sampling
) -> Int[Tensor, " n"]:
    """Draw the target's own token: from max(q − p, 0) after a rejection, from q where there was no draft (bonus)."""
    shares = probabilities(target, sampling)
    if draft is not None:
        rest = (shares - probabilities(draft, sampling)).clamp(min=0)
        # Equal distributions leave nothing; a token can then be rejected only because of rounding.
        shares = torch.where(rest.sum(1, keepdim=True) > 0, rest, shares)
    if sampling.greedy:
        return shares.argmax(1)
    return (shares.log() + numbers.target).argmax(1)


def load_draft(spec: str, model: str, dtype: str, device: str) -> WholeModel:
    """Load the draft model beside ``model``: ``layers=N`` (its own first layers), ``model=NAME``, ``nf4`` …

    Raises:
        InputError: the text says more than which model runs.
    """
    variant = Variant.parse(spec)
    variant.check_only(LOADED, "a draft model is only loaded")
    return variant.load(model, dtype, device)


def answer(
    target: WholeModel,
    draft: WholeModel,
    requests: Sequence[Request],
    *,
    model: str,
    new_tokens: int,
    ahead: int = 4,
    noise: Callable[[int], Noise] = StreamNoise,
) -> Iterator[Transcript]:
    """Answer requests by speculative decoding, one after the other, and record each token's mode.

    Args:
        target, draft: models with the same vocabulary. model: as advertised. ahead: tokens drafted at a time (K).

    Raises:
        InputError: the vocabularies differ, or the sampler is not Gumbel-max.
    """
    if ahead < 1:
        raise InputError(f"{ahead} tokens ahead: a draft model proposes at least one")
    _check_pair(target, draft)
    for request in requests:
        _check_sampler(request.sampling)
        for side in (target, draft):
            side.check_tokens(request.prompt, f"request {request.id!r}")
            # Drafts may run beyond the end.
            side.check_length(len(request.prompt) + new_tokens + ahead, f"request {request.id!r}, speculated")
        numbers = Positions(noise(request.sampling.seed), target.vocabulary)
        output: list[int] = []
        modes: list[Mode] = []
        while len(output) < new_tokens:
            tokens, how = _round(
                target, draft, (*request.prompt, *output), len(output), ahead, numbers, request.sampling
            )
            output += tokens
            modes += how
        yield Transcript(
            request.id, model, request.prompt, tuple(output[:new_tokens]), request.sampling,
            modes=tuple(modes[:new_tokens]),
        )  # fmt: skip


def _check_pair(target: WholeModel, draft: WholeModel) -> None:
    if target.vocabulary != draft.vocabulary:
        raise InputError(
            f"vocabularies of {target.vocabulary} and {draft.vocabulary} tokens: a draft model needs the target's"
        )


def _check_sampler(sampling: Sampling) -> None:
    if sampling.method == "ipt":
        raise InputError("speculative decoding is simulated for Gumbel-max and greedy sampling")


def _round(
    target: WholeModel,
    draft: WholeModel,
    before: Sequence[int],
    place: int,
    ahead: int,
    numbers: Positions,
    sampling: Sampling,
) -> tuple[list[int], list[Mode]]:
    """Draft K tokens and let the target check them all in one pass."""
    proposed: list[int] = []
    rows: list[Tensor] = []
    for i in range(ahead):
        # Run a prefill for each drafted token: it gives the same as a cache, and a simulation need not be fast.
        row = draft.prefill((*before, *proposed, 0), 1)[1][0].float().cpu()
        rows.append(row[None])
        proposed.append(int(draft_tokens(row[None], numbers[place + i], sampling)))
    judged = target.prefill((*before, *proposed, 0), ahead + 1)[1].float().cpu().split(1)
    for i, token in enumerate(proposed):
        if not bool(accepts(judged[i], rows[i], torch.tensor([token]), numbers[place + i], sampling)):
            own = own_tokens(judged[i], rows[i], numbers[place + i], sampling)
            return [*proposed[:i], int(own)], [ACCEPT] * i + [REJECT]
    bonus = own_tokens(judged[ahead], None, numbers[place + ahead], sampling)
    return [*proposed, int(bonus)], [ACCEPT] * ahead + [BONUS]


@dataclass(frozen=True)
class Speculated:
    """The logits of target and draft at each output token, which a verifier gets from one prefill of each."""

    target: Float[Tensor, "n v"]
    draft: Float[Tensor, "n v"]
    transcript: Transcript


def replay(transcript: Transcript, target: WholeModel, draft: WholeModel) -> Speculated:
    """Recompute a request with one prefill of each model.

    Raises:
        InputError: the transcript has no modes, another sampler, tokens outside the vocabulary, or too many for one
            of the models; or these have not the same vocabulary.
    """
    if transcript.modes is None:
        raise InputError(f"request {transcript.id!r} has no modes; was it decoded speculatively?")
    _check_pair(target, draft)
    _check_sampler(transcript.sampling)
    transcript.check_vocabulary(target.vocabulary)
    everything = (*transcript.prompt, *transcript.output)
    for side in (target, draft):
        side.check_length(len(everything), f"request {transcript.id!r}")
    seen, guessed = (
        side.prefill(everything, len(transcript.output))[1].float().cpu() for side in (target, draft)
    )
    return Speculated(seen, guessed, transcript)


def possible(modes: Sequence[Mode], ahead: int) -> bool:
    """Return whether modes are consistent: a bonus follows after K accepted tokens, and nowhere else."""
    run = 0
    for mode in modes:
        if (mode == BONUS) != (run == ahead):
            return False
        run = run + 1 if mode == ACCEPT else 0
    return True


def mismatch(
    replayed: Speculated, ahead: int, noise: Callable[[int], Noise] = StreamNoise
) -> Float[Tensor, " n"]:
    """Return 1 where the verifier gets another token, or another mode, than the one recorded; else 0.

    Raises:
        InputError: the modes are impossible for so many tokens ahead.
    """
    modes, sampling = _modes(replayed, ahead), replayed.transcript.sampling
    numbers = Positions(noise(sampling.seed), replayed.target.shape[1])
    expected = [
        _in_mode(mode, replayed.target[i : i + 1], replayed.draft[i : i + 1], numbers[i], sampling)
        for i, mode in enumerate(modes)
    ]
    return (torch.cat(expected) != torch.tensor(replayed.transcript.output)).float()


def _modes(replayed: Speculated, ahead: int) -> Sequence[Mode]:
    modes = replayed.transcript.modes or ()
    if not possible(modes, ahead):
        raise InputError(
            f"request {replayed.transcript.id!r}: its modes cannot come from {ahead} tokens ahead"
        )
    return modes


def _in_mode(
    mode: Mode,
    target: Float[Tensor, "n v"],
    draft: Float[Tensor, "n v"],
    numbers: Numbers,
    sampling: Sampling,
) -> Int[Tensor, " n"]:
    """Return the token of each row in a recorded mode; −1 where the mode itself would have been another."""
    if mode == BONUS:
        return own_tokens(target, None, numbers, sampling)
    proposed = draft_tokens(draft, numbers, sampling)
    kept = accepts(target, draft, proposed, numbers, sampling)
    if mode == ACCEPT:
        return torch.where(kept, proposed, -1)
    return torch.where(kept, -1, own_tokens(target, draft, numbers, sampling))


def monte_carlo(
    replayed: Speculated,
    ahead: int,
    sigma: float,
    generator: torch.Generator,
    *,
    trials: int = 1000,
    top: int = 100,
    epsilon: float = 1e-6,
    noise: Callable[[int], Noise] = StreamNoise,
) -> Float[Tensor, " n"]:
    """Return −log share of trials with noisy logits that give the claimed token in its mode (DiFR, B.1 and F.2).

    The noise is Gaussian with standard deviation σ, on the logits of both models. Only the ``top`` largest logits of
    either model take part, as in appendix B.1; the random numbers of the request stay the same.

    Raises:
        InputError: the modes are impossible for so many tokens ahead.
    """
    modes, sampling = _modes(replayed, ahead), replayed.transcript.sampling
    width = replayed.target.shape[1]
    numbers = Positions(noise(sampling.seed), width)
    scores = []
    for i, (mode, claimed) in enumerate(zip(modes, replayed.transcript.output, strict=True)):
        sides = replayed.target[i], replayed.draft[i]
        places = torch.cat([side.topk(min(top, width)).indices for side in sides]).unique()
        target, draft = (
            side[places] + sigma * torch.randn(trials, len(places), generator=generator) for side in sides
        )
        own = Numbers(numbers[i].draft[places], numbers[i].uniform, numbers[i].target[places])
        drawn = _in_mode(mode, target, draft, own, sampling)
        hits = (drawn >= 0) & (places[drawn] == claimed)
        scores.append(hits.float().mean())
    return -(torch.stack(scores) + epsilon).log()
