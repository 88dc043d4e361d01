"""An attack: each row is read as the token whose input embedding points the same way."""

import time

import torch
from torch.nn.functional import normalize

from hiddenlab.core import Observation, Recovery, TokenRecovery
from hiddenlab.errors import NotApplicableError
from hiddenlab.slice import Slice


class NearestEmbedding:
    """Takes the token whose input embedding has the largest cosine with the state; for shallow layers."""

    def recover(self, observation: Observation, slice: Slice, generator: torch.Generator) -> Recovery:
        if observation.public.columns_permuted is not None:
            raise NotApplicableError("nearest-embedding needs the coordinates in order")
        start = time.perf_counter()
        table = normalize(slice.embedding.float(), dim=-1)
        rows = normalize(observation.states.to(table), dim=-1)
        best = (rows @ table.T).topk(2, dim=-1)
        tokens = tuple(
            TokenRecovery(
                token=int(best.indices[row, 0]),
                row=row,
                distance=1 - float(best.values[row, 0]),
                margin=float(best.values[row, 0] - best.values[row, 1]),
                evaluated=slice.vocab_size,
                verified=False,
            )
            for row in range(len(rows))
        )
        return Recovery(
            tokens,
            evaluated_tokens=0,
            forward_calls=0,
            seconds=time.perf_counter() - start,
            stop_reason="complete",
        )

    def __repr__(self) -> str:
        return "nearest-embedding: knows the model and the states; never runs the model"
