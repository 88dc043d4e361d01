"""An attack: each row is read as the token whose input embedding points the same way."""

import time

from torch.nn.functional import normalize

from hiddenlab.base import Attack
from hiddenlab.errors import NotApplicableError
from hiddenlab.types import AttackResult, Observation, TokenPrediction


class NearestEmbedding(Attack):
    """Takes the token whose input embedding has the largest cosine with the state; for shallow layers."""

    def _recover(self, observation: Observation) -> AttackResult:
        if observation.info.columns_permuted is not None:
            raise NotApplicableError("nearest-embedding needs the coordinates in order")
        start = time.perf_counter()
        table = normalize(self.model.embedding.float(), dim=-1)
        rows = normalize(observation.states.to(table), dim=-1)
        best = (rows @ table.T).topk(2, dim=-1)
        tokens = tuple(
            TokenPrediction(
                token=int(best.indices[row, 0]),
                row=row,
                distance=1 - float(best.values[row, 0]),
                margin=float(best.values[row, 0] - best.values[row, 1]),
                evaluated=self.model.vocab_size,
                verified=False,
            )
            for row in range(len(rows))
        )
        return AttackResult(
            tokens,
            evaluated_tokens=0,
            forward_calls=0,
            seconds=time.perf_counter() - start,
            stop_reason="complete",
        )

    def __repr__(self) -> str:
        return "nearest-embedding: knows the model and the states; never runs the model"
