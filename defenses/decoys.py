"""Mix rows that are no state of the prompt among the released rows, at secret places."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from hiddenlab.errors import InputError
from hiddenlab.models import TruncatedModel
from hiddenlab.proposals.corpus import Corpus, language_reference
from hiddenlab.row_facts import with_extra_rows
from hiddenlab.stages import Stage
from hiddenlab.types import ObservationInfo
from hiddenlab.utils.random import alike

Rows = Float[Tensor, "rows d"]


class Decoys(Stage):
    """Mix rows that are no state of the prompt among its rows, at secret places; the prompt's rows stay in order.

    It comes before stages that change states, which then change the decoys too.

    Args:
        count: decoys of each prompt. The attacker knows it.
        kind: ``texts``: each decoy is a state of another text, at a position that the prompt has as well; ``gaussian``:
            of independent normal numbers, as large as the prompt's (the redundant embeddings of SCX's code).

    Raises:
        InputError: ``count`` is below 1.
    """

    exact = True

    def __init__(self, count: int, kind: Literal["texts", "gaussian"] = "texts") -> None:
        if count < 1:
            raise InputError(f"decoys need a count of 1 or more, not {count}; for none leave the defense out")
        self.adds, self.kind = count, kind
        self.spec = f"decoys:count={count}" + f",kind={kind}" * (kind != "texts")

    def texts(self, model: TruncatedModel, tokens: int, generator: torch.Generator) -> list[list[int]]:
        """Draw texts of which the channel computes the states, for ``mixed``; the decoy is the last state of each."""
        if self.kind == "gaussian":
            return []
        seed = int(torch.randint(2**31, (), generator=generator))
        corpus = Corpus(model, seed, language_reference)
        lengths = 1 + torch.randint(tokens, (self.adds,), generator=generator)
        return [corpus.text_window(length).tolist() for length in lengths.tolist()]

    def mixed(
        self, states: Rows, others: Sequence[Float[Tensor, "_ d"]], generator: torch.Generator
    ) -> tuple[Float[Tensor, "more d"], tuple[int, ...], dict[str, Any]]:
        """Return the states with decoys among them, and which row each was, -1 for a decoy.

        Args:
            others: the states of each text that ``texts`` drew.
        """
        ends = [other[-1:] for other in others]
        decoys = torch.cat(ends) if ends else alike(states, self.adds, generator)
        total = len(states) + self.adds
        places = torch.randperm(total, generator=generator)[: self.adds].to(states.device)
        real = torch.ones(total, dtype=torch.bool, device=states.device)
        real[places] = False
        released = states.new_empty(total, states.shape[1])
        released[real], released[~real] = states, decoys.to(states)
        order = torch.where(real, real.long().cumsum(0) - 1, -1)
        return released, tuple(order.tolist()), {}

    def publish(self, info: ObservationInfo) -> ObservationInfo:
        return with_extra_rows(info, self.adds)

    def __repr__(self) -> str:
        return (
            f"{self.spec}: the attacker sees {self.adds} more rows than there are tokens and knows the model; "
            "only the provider knows which are decoys"
        )
