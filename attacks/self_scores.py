"""Recover tokens from the attention score of each row with itself, which secret coordinates leave as it is.

An AttnNode of a hardened Cascade gets queries ``q R`` and keys ``k R⁻ᵀ`` with secret matrices R
(``defenses/cascade/secret_maps.py``). It must be able to compute scores, so ``q·k`` is the same as without. The score
of a row with itself does not depend on its position either, where positions rotate queries and keys alike. At the first
layer it depends on one token alone: one number for each query head names it, by a table over the vocabulary. At deeper
layers, and in models that add positions to embeddings (GPT-2), a regression on rows of the attacker's own text reads
what is left of it.
"""

import time
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from hiddenlab.base import Attack
from hiddenlab.errors import InputError, NotApplicableError
from hiddenlab.proposals.corpus import Corpus
from hiddenlab.proposals.probe import whitened_table, whitening
from hiddenlab.proposals.ridge import RidgeReader
from hiddenlab.types import AttackResult, Observation, ObservationInfo, TokenPrediction

WINDOW = 48  # tokens of a text of the attacker's own
ROWS = 12_000


class SelfScores(Attack):
    """Recover each row's token from its attention score with itself, one for each query head.

    Needs queries and keys of the same rows, side by side (stream ``qkv``). An invertible map of queries, with its
    inverse on keys, changes nothing. Nothing is verified, since values are not looked at.

    Knows: the weights, queries and keys in secret coordinates. Does not know: the coordinates, tokens, other rows.

    Args:
        rows: of the attacker's own text, from which deeper layers than the first are read.
    """

    any_width = True
    use_when = "you have a recorded Cascade run behind secret maps: queries and keys of the same rows"

    def __init__(self, rows: int = ROWS) -> None:
        if rows < WINDOW:
            raise InputError(f"rows must be at least {WINDOW}, not {rows}")
        self.rows = rows

    def _forget(self) -> None:
        vars(self).pop("_table", None)
        vars(self).pop("_token_alone", None)
        vars(self).pop("_reader", None)

    def _fit(self, info: ObservationInfo) -> dict[str, float | str]:
        if info.site.stream != "qkv":
            raise NotApplicableError(
                f"this attack reads queries and keys of the same rows (--stream qkv), not {info.site.stream}"
            )
        started = time.perf_counter()
        _ = self._table if self._token_alone else self._reader
        return {"preparation_seconds": time.perf_counter() - started}

    @cached_property
    def _heads(self) -> tuple[int, int, int]:
        """Query heads, key/value heads, and the width of a head."""
        heads = int(self.model.module.config.num_attention_heads)  # type: ignore[union-attr,arg-type]
        site = self.model.site
        queries, keys = (self.model.sibling(site.layer, stream=stream).width for stream in ("q", "k"))
        width = queries // heads
        return heads, keys // width, width

    def _scores(self, rows: Float[Tensor, "n w"]) -> Float[Tensor, "n h"]:
        """Return each row's score with itself, before scale and softmax."""
        heads, kv, d = self._heads
        queries = rows[:, : heads * d].unflatten(1, (kv, heads // kv, d))
        keys = rows[:, heads * d : (heads + kv) * d].unflatten(1, (kv, 1, d))
        return (queries * keys).sum(-1).flatten(1)

    @cached_property
    def _token_alone(self) -> bool:
        """Whether scores depend on the token alone: at the first layer, where its position is not added to it."""
        if self.model.site.layer != 1:
            return False
        twice = torch.full((2,), self.model.vocab_size // 2, device=self.model.device)
        first, second = self._scores(self.model.encode(twice).float())
        return torch.allclose(first, second, rtol=1e-2, atol=1e-2 * float(first.norm()))

    @cached_property
    def _table(self) -> Float[Tensor, "v h"]:
        """The scores of every token, which at the first layer no other token changes."""
        tokens = torch.arange(self.model.vocab_size, device=self.model.device)
        return torch.cat(
            [self._scores(self.model.prefix().branch(part).float()) for part in tokens.split(8192)]
        )

    @cached_property
    def _reader(self) -> tuple[RidgeReader, Tensor]:
        """A regression on scores of own text, and the whitened embeddings of the vocabulary."""
        corpus, tokens, scores = Corpus(self.model, seed=self.seed), list[Tensor](), list[Tensor]()
        for begun in range(0, self.rows, WINDOW):
            self.progress("reading text of one's own", begun, self.rows)
            window = corpus.text_window(WINDOW)
            tokens.append(window)
            scores.append(self._scores(self.model.encode(window.to(self.model.device)).float()))
        self.progress("reading text of one's own", self.rows, self.rows)
        embedding = self.model.embedding.detach().float()
        table = whitened_table(embedding, *whitening(embedding))
        return RidgeReader(_products(torch.cat(scores)), table[torch.cat(tokens).to(table.device)]), table

    @torch.inference_mode()
    def _recover(self, observation: Observation) -> AttackResult:
        """Recover one prompt, in the order of its rows."""
        started = time.perf_counter()
        scores = self._scores(observation.states.to(self.model.device).float())
        if self._token_alone:
            near, tokens = torch.cdist(scores, self._table).topk(2, dim=1, largest=False)
            distances, margins = near[:, 0] / scores.norm(dim=1).clamp(min=1e-9), near[:, 1] - near[:, 0]
        else:
            reader, table = self._reader
            likely, tokens = reader.scores(_products(scores), table).topk(2, dim=1)
            distances, margins = -likely[:, 0], likely[:, 0] - likely[:, 1]
        predictions = tuple(
            TokenPrediction(int(token), row, float(distance), float(margin), self.model.vocab_size, False)
            for row, (token, distance, margin) in enumerate(
                zip(tokens[:, 0], distances, margins, strict=True)
            )
        )
        seconds = time.perf_counter() - started
        return AttackResult(predictions, 0, 0, seconds, "complete", positions=observation.info.positions)

    def __repr__(self) -> str:
        return "SelfScores: knows the weights, queries and keys; not the secret coordinates, nor tokens"


def _products(scores: Float[Tensor, "n h"]) -> Float[Tensor, "n f"]:
    """Return scores and their products in pairs, so that a linear map may read more than a linear one of scores."""
    first, second = torch.triu_indices(scores.shape[1], scores.shape[1])
    return torch.cat([scores, scores[:, first] * scores[:, second]], 1)
