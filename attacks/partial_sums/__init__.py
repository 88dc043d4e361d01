"""Recover tokens from the attention sums that a CompNode receives at the first layer that nodes compute.

See the paper, Theorem 7.3 and appendix P. For each of its rows r and each key shard a CompNode receives m, e and u.
From these follows the sum over the shard's visible keys s of p(r, s) [1, v(s)], p being softmax weights. At the first
layer p and v depend on one unknown token each, and the node knows its own queries. Appendix P.2 calls finding the
tokens of such a sum a subset-sum problem, and assumption B2 takes it to be intractable. It is not: all rows of one
cluster and all query heads of one key/value head mix the *same* few value vectors with different weights, so that these
span the rows' common space. A token is in the sum if and only if its value vector lies in that span (the idea of MUSIC
in array processing): one projection of the vocabulary finds the tokens, whatever their positions. Their positions
follow from the weights, by non-negative least squares over a handful of candidates. Under (c, delta)-sharding with m
splits there are c/m unknown tokens and c rows at every step with a full cluster, so there are enough equations.

With masked sums a CompNode gets the attention output alone, over all keys and without the divisor. The known tokens'
part of it is then known up to a factor for each row and head. Without the directions of these parts, the outputs still
span what the unknown value vectors span. The weights need no divisor either: over all keys, exp(score) (v - o) adds up
to 0, o being the output. So the tokens of a gap follow, and their order, where they are at most as many as the rows
behind it have query heads for a key/value head.

Where the client computes the first layers, value vectors depend on the tokens before. They are read in order then, see
``in_order``; behind noise that the client adds by a beam, see ``in_noise``.
"""

import time

import torch

from hiddenlab.attacks.partial_sums.first import solve
from hiddenlab.attacks.partial_sums.in_noise import NoisyReader
from hiddenlab.attacks.partial_sums.in_order import Reader
from hiddenlab.attacks.partial_sums.sums import View
from hiddenlab.base import Attack
from hiddenlab.errors import InputError, NotApplicableError
from hiddenlab.matching.first_layer import FirstLayer
from hiddenlab.matching.inner_layer import InnerLayer
from hiddenlab.matching.ranking import LazyModel
from hiddenlab.models import TruncatedModel
from hiddenlab.text import count_of
from hiddenlab.types import AttackResult, Observation, ObservationInfo, TokenPrediction

Reads = FirstLayer | Reader | NoisyReader  # what reads views, by what the client does

CANDIDATES = 4  # candidates of a missing token that are compared with their weights


class PartialSums(Attack):
    """Recover the tokens before a CompNode's last row from what it receives at the first layer that nodes compute.

    Needs a CompNode's stream ``attn`` of ``hiddenlab cascade run --record`` at that layer, which is layer 1 or, with
    ``--harden client:first=4``, layer 5: the states that enter the layer, and m, e, u of every key shard, or with
    ``--harden masked-sums`` the attention output.

    At layer 1 sums are solved by algebra. A sum that is explained exactly verifies its tokens; their distance is the
    share of the sum's square that stays unexplained. Of attention outputs, gaps of more tokens than the rows behind
    them have query heads for a key/value head are left out.

    Behind layers of the client the tokens are found one after another. Candidates are run behind the tokens before, and
    the value vector of the right one lies in the span of the sums: their distance is the share of its square outside.
    The first token that too few rows show ends the attack. Tokens of a cluster that it leaves unfinished are not
    verified.

    Behind Gaussian noise of a known deviation (``--harden 'client:…+noise:…'``) several hypotheses are weighed. How far
    from the sums right and wrong tokens lie is learned on own text, a minute or more for each plan and length of
    prompt. No token is verified.

    Knows: the weights, the plan, what the node holds and receives. Does not know: other nodes' rows.

    Args:
        candidates: tokens compared for each missing one, at layer 1.
        budget: tokens tried for one position at most, behind other layers; None is the whole vocabulary. Behind noise,
            tokens tried behind each of eight hypotheses; None is 160.
    """

    use_when = (
        "you have a recorded Cascade run: the sums m, e and u, or with masked-sums the attention output, that a "
        "CompNode receives at the first layer of the nodes"
    )

    def __init__(self, candidates: int = CANDIDATES, budget: int | None = None) -> None:
        if candidates < 1 or (budget is not None and budget < 1):
            raise InputError(f"candidates and budget must be at least 1, not {candidates} and {budget}")
        self.candidates, self.budget = candidates, budget
        self._prepared: tuple[tuple[TruncatedModel, str, float | None], Reads] | None = None

    def _forget(self) -> None:
        self._prepared = None

    def _fit(self, info: ObservationInfo) -> dict[str, float | str]:
        """Tabulate the vocabulary's value vectors, once for each model.

        Raises:
            NotApplicableError: no combined view of a CompNode, or one behind a defense that is not read.
        """
        found = self._reads(info)
        if isinstance(found, NoisyReader):
            found.noise.evidence(info.positions or (), info.facts["shards"])
        elif isinstance(found, Reader):
            _ = found.table
        elif not found.moves:
            found.values(0)
        return {}

    def _reads(self, info: ObservationInfo) -> Reads:
        _check(info)
        key = (self.model, info.provider_dtype, info.noise_sigma)
        if self._prepared is None or self._prepared[0] != key:
            if self.model.site.layer == 1:
                made: Reads = FirstLayer(self.model)
            elif info.noise_sigma is not None:
                layer, speaker = InnerLayer(self.model, info.provider_dtype), LazyModel(self.model)
                made = NoisyReader(layer, speaker, info.noise_sigma, self.budget, self.seed, self.progress)
            else:
                layer = InnerLayer(self.model, info.provider_dtype)
                made = Reader(layer, LazyModel(self.model), self.budget, self.seed, self.progress)
            self._prepared = key, made
        return self._prepared[1]

    @torch.inference_mode()
    def _recover(self, observation: Observation) -> AttackResult:
        """Recover one prompt up to the node's last row.

        Raises:
            NotApplicableError: see ``_fit``; or the view holds attention outputs of too few rows to read any other
                token.
        """
        reads = self._reads(observation.info)
        layer = reads if isinstance(reads, FirstLayer) else reads.layer
        started, before = time.perf_counter(), layer.counters()
        # Behind noise all but the model's passes is on the CPU.
        where = torch.device("cpu") if isinstance(reads, NoisyReader) else self.model.device
        view = View.of(observation, where)
        view.check(layer)
        if isinstance(reads, FirstLayer):
            found = solve(view, reads, self.candidates, self.seed, self.progress)
        else:
            found = reads.read(view)
        positions, missing = sorted(found.tokens), view.positions[-1] + 1 - len(view.positions)
        left_out = view.positions[-1] + 1 - len(positions)
        if view.divisor is None and missing and not any(p not in view.row_of for p in positions):
            if isinstance(reads, Reader):
                raise NotApplicableError(
                    f"{found.stopped}; --attack shard-reading reads rows, with --stream resid"
                )
            raise NotApplicableError(
                f"the attention output of a row names at most {count_of(layer.groups, 'token')} before it, and each "
                "gap has more for its rows; take --attack missing-tokens on --stream resid"
            )
        tokens = tuple(
            TokenPrediction(
                found.tokens[p],
                view.row_of.get(p, -1),
                found.left[p],
                None,
                found.tried.get(p, 0),
                found.verified[p],
            )
            for p in positions
        )
        positions_run, passes = (now - then for now, then in zip(layer.counters(), before, strict=True))
        return AttackResult(
            tokens,
            positions_run,
            passes,
            time.perf_counter() - started,
            f"{count_of(left_out, 'token')} left out: {found.stopped}" if left_out else "complete",
            positions=tuple(positions) if left_out else None,
        )

    def __repr__(self) -> str:
        return (
            "PartialSums: knows the weights, the plan and what one CompNode holds and receives, not the other rows or "
            "tokens"
        )


def _check(info: ObservationInfo) -> None:
    """Refuse what is no CompNode's combined view, before anything is tabulated.

    Raises:
        NotApplicableError: it is another stream or layer, or was changed.
    """
    if not {"heads", "own"} <= set(info.facts) or info.positions is None:
        raise NotApplicableError(
            f"{info.site} is no combined view of a CompNode: that is --stream attn at the first layer that nodes "
            "compute, which is 1, or 5 behind --harden client:first=4 ('cascade run --record' names the command)"
        )
    noisy = info.noise_sigma is not None and [one.partition(":")[0] for one in info.channel] == ["gaussian"]
    if info.channel and not noisy:
        raise NotApplicableError(
            f"this attack reads sums as they are or behind gaussian, not behind {' + '.join(info.channel)}; "
            "shard-reading reads rows, with --stream resid"
        )
    if noisy and (info.site.layer == 1 or "shards" not in info.facts):
        raise NotApplicableError(
            "behind noise this attack reads the sums of each key shard, behind layers of the client; shard-reading "
            "reads rows, with --stream resid"
        )
