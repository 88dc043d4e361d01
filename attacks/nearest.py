"""Predict each row's token as the one whose input embedding is nearest by cosine."""

import time

import torch
from torch.nn.functional import normalize

from hiddenlab.base import Attack
from hiddenlab.errors import NotApplicableError
from hiddenlab.types import AttackResult, Observation, TokenPrediction


class NearestEmbedding(Attack):
    """Recover each row's token as the one with the nearest input embedding by cosine, without running the model.

    A baseline: exact at layer 0, and a measure of how far a deeper state has moved from its token. Nothing is verified,
    since nothing is recomputed.

    Knows: the embedding table, the released states. Does not know: tokens, permutations.
    """

    use_when = "the states are input embeddings (layer 0), or a cheap baseline is enough"

    def _recover(self, observation: Observation) -> AttackResult:
        """Recover one prompt, in the order of its rows.

        Raises:
            NotApplicableError: permuted coordinates, or a stream that is no hidden state.
        """
        info, model = observation.info, self.model
        if info.columns_permuted is not None:
            raise NotApplicableError("the nearest embedding needs the coordinates in order")
        if observation.states.shape[1] != model.embedding.shape[1]:
            raise NotApplicableError(f"the stream {info.site.stream} is not as wide as an embedding")
        started = time.perf_counter()
        # From the embedding module: some models scale the table's rows.
        table = model.embed(torch.arange(model.vocab_size, device=model.device)).float()
        rows = observation.states.to(table)
        cosines, tokens = (normalize(rows, dim=1) @ normalize(table, dim=1).T).topk(2, dim=1)
        predictions = tuple(
            TokenPrediction(int(token), row, 1 - float(best), float(best - second), model.vocab_size, False)
            for row, (token, best, second) in enumerate(
                zip(tokens[:, 0], cosines[:, 0], cosines[:, 1], strict=True)
            )
        )
        seconds = time.perf_counter() - started
        return AttackResult(predictions, 0, 0, seconds, "complete", positions=info.positions)

    def __repr__(self) -> str:
        return "NearestEmbedding: knows the embedding table and the released states; never runs the model"
