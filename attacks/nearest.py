"""The simplest reading of a state: the token whose input embedding points the same way."""

import time

import torch
from torch.nn.functional import normalize

from hiddenlab.core import Observation, Recovery, TokenRecovery
from hiddenlab.errors import NotApplicableError
from hiddenlab.observation import check_observation
from hiddenlab.slice import Slice


class NearestEmbedding:
    """Reads each row as the token with the nearest input embedding by cosine; never runs the model.

    A baseline: exact at layer 0, and a measure of how far a deeper state has moved from its token. Nothing is
    verified, since nothing is recomputed.

    Knows: the embedding table, the released states. Does not know: tokens, permutations.
    """

    def recover(self, observation: Observation, slice: Slice, generator: torch.Generator) -> Recovery:
        """Recover one prompt, in the order of its rows.

        Raises:
            NotApplicableError: permuted coordinates, or a stream that is no hidden state.
        """
        public = observation.public
        check_observation(observation, slice)
        if public.columns_permuted is not None:
            raise NotApplicableError("the nearest embedding needs the coordinates in order")
        if observation.states.shape[1] != slice.embedding.shape[1]:
            raise NotApplicableError(f"the stream {public.site.stream} is not as wide as an embedding")
        started = time.perf_counter()
        # As the embedding module gives them: some models scale what they look up.
        table = slice.embed(torch.arange(slice.vocab_size, device=slice.device)).float()
        rows = observation.states.to(table)
        cosines, tokens = (normalize(rows, dim=1) @ normalize(table, dim=1).T).topk(2, dim=1)
        found = tuple(
            TokenRecovery(int(token), row, 1 - float(best), float(best - second), slice.vocab_size, False)
            for row, (token, best, second) in enumerate(
                zip(tokens[:, 0], cosines[:, 0], cosines[:, 1], strict=True)
            )
        )
        seconds = time.perf_counter() - started
        return Recovery(found, 0, 0, seconds, "complete", positions=public.positions)

    def __repr__(self) -> str:
        return "NearestEmbedding: knows the embedding table and the released states; never runs the model"
