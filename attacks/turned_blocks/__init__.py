"""Read keys or values that were mixed by block and turned by pairs of coordinates, as KV-Cloak stores them."""

import time

import torch

from hiddenlab.attacks.turned_blocks.reading import Reader
from hiddenlab.base import Attack
from hiddenlab.errors import InputError, NotApplicableError
from hiddenlab.matching.ranking import LazyModel
from hiddenlab.models import TruncatedModel
from hiddenlab.secret_maps import CloakedBlocks, turned_blocks
from hiddenlab.stages import is_supposed
from hiddenlab.types import AttackResult, Observation, ObservationInfo, TokenPrediction

SPARE = 4  # directions outside of a block's rows that must be left beside the unknown angles


class TurnedBlocks(Attack):
    """Recover a prompt from rows that were mixed within blocks, and whose pairs of coordinates were turned.

    The space that a block's rows span is seen. The first token's state, turned by angles that are found with it, lies
    in it. With these angles the other tokens follow one after another: the state of the right one, behind those before
    it, lies in the space as well. A row to which an offset was added does not; its token shows in another head. No
    paper describes this.

    Knows: the weights, the size of blocks, the rows. Does not know: tokens, matrices, angles, orders, offsets.

    Args:
        budget: tokens tried for one position at most; None is the whole vocabulary.
    """

    secret_maps = True
    use_when = "keys or values were mixed by block and turned by secret angles (kv-cloak)"

    def __init__(self, budget: int | None = None) -> None:
        if budget is not None and budget < 1:
            raise InputError(f"the budget must be at least 1 token, not {budget}")
        self.budget = budget
        self._reader: tuple[tuple[TruncatedModel, CloakedBlocks], Reader] | None = None

    def _forget(self) -> None:
        self._reader = None

    def _fit(self, info: ObservationInfo) -> dict[str, float | str]:
        """Check the facts, and tabulate the vocabulary's states behind own text.

        Raises:
            NotApplicableError: rows were not mixed so, or something else was done to them.
        """
        _ = self._reads(info).table
        return {}

    def _reads(self, info: ObservationInfo) -> Reader:
        blocks = turned_blocks(info)
        if blocks is None:
            raise NotApplicableError(
                "this attack reads keys or values that were mixed by block and turned (kv-cloak), and no others"
            )
        if info.positions is not None or (len(info.channel) > 1 and not is_supposed(info)):
            raise NotApplicableError("blocks of rows are read as they are: all of them, behind nothing else")
        if info.provider_dtype != "float32":
            raise NotApplicableError(
                f"angles are found from 32-bit numbers; those of {info.provider_dtype} are too coarse"
            )
        width = self.model.width // blocks.heads
        if width - blocks.block - width // 2 < SPARE:
            raise NotApplicableError(
                f"blocks of {blocks.block} rows leave too little of heads of {width} numbers to find their angles"
            )
        key = (self.model, blocks)
        if self._reader is None or self._reader[0] != key:
            made = Reader(self.model, blocks, LazyModel(self.model), self.budget, self.seed)
            self._reader = key, made
        return self._reader[1]

    @torch.inference_mode()
    def _recover(self, observation: Observation) -> AttackResult:
        started, reader = time.perf_counter(), self._reads(observation.info)
        run, passes = self.model.evaluated_tokens, self.model.forward_calls
        found = reader.read(observation.states, self.progress)
        tokens = tuple(
            TokenPrediction(token, -1, left, None, tried, verified)
            for token, left, tried, verified in zip(
                found.tokens, found.left, found.tried, found.verified, strict=True
            )
        )
        return AttackResult(
            tokens, self.model.evaluated_tokens - run, self.model.forward_calls - passes,
            time.perf_counter() - started, found.stopped or "complete",
        )  # fmt: skip

    def __repr__(self) -> str:
        return (
            "TurnedBlocks: knows the weights, the size of blocks and the rows; not tokens, matrices or angles"
        )
