"""Compute a deeper layer's queries, keys and values: of tokens behind a prefix, and of rows that enter the layer."""

from collections.abc import Mapping

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hiddenlab.matching.first_layer import AttentionHeads
from hiddenlab.models import Prefix, Request, TruncatedModel
from hiddenlab.models.attention import Attention
from hiddenlab.models.checkpoint import some_layers
from hiddenlab.types import Site


class InnerLayer(AttentionHeads):
    """Queries, keys and values of a layer behind the first.

    Args:
        model: whose last layer it is. dtype: in which the provider computes.
    """

    def __init__(self, model: TruncatedModel, dtype: str) -> None:
        number = model.site.layer
        self.model = model.sibling(number, stream="qkv", dtype=dtype)
        # The last layer alone, which is given the states that enter it.
        self._alone = TruncatedModel(
            some_layers(self.model.module, number - 1, number), ref=model.ref, site=Site(number, "qkv"),
            engine=self.model.engine, left_out=number - 1,
        )  # fmt: skip
        self.heads = int(model.module.config.num_attention_heads)  # type: ignore[union-attr,arg-type]
        enters = torch.zeros(1, model.module.config.hidden_size, device=model.device)  # type: ignore[union-attr,arg-type]
        q, k, v = self.of_rows(enters, {0: 0})
        self._groups, self._keys, self._values = q.shape[1] // k.shape[1], k.shape[1], v.shape[1]

    @property
    def widths(self) -> tuple[int, int, int]:
        """Numbers of a token's queries, keys and values."""
        return self._keys * self._groups, self._keys, self._values

    @property
    def groups(self) -> int:
        return self._groups

    @property
    def value_width(self) -> int:
        return self._values * self._groups // self.heads

    def counters(self) -> tuple[int, int]:
        models = (self.model, self._alone)
        return sum(one.evaluated_tokens for one in models), sum(one.forward_calls for one in models)

    @property
    def attention(self) -> Attention:
        attention = self._alone.attention  # set, since queries were computed before
        assert attention is not None
        return attention

    def of_rows(
        self, rows: Float[Tensor, "rows d"], places: Mapping[int, int]
    ) -> tuple[Float[Tensor, "rows q"], Float[Tensor, "rows k"], Float[Tensor, "rows v"]]:
        """Return queries, keys and values of states that enter the layer.

        Args:
            places: the row of each position.
        """
        whole = torch.zeros(max(places) + 1, rows.shape[1], dtype=self._alone.dtype, device=rows.device)
        whole[list(places)] = rows[list(places.values())].to(whole)
        request = Request(self._alone.prefix(), whole)
        order = sorted(places, key=places.__getitem__)
        q, k, v = (
            self._alone.run([request], keep=False, show=stream)[0].states[order].float() for stream in "qkv"
        )
        return q, k, v

    def branch(
        self, prefix: Prefix, tokens: Int[Tensor, " c"]
    ) -> tuple[Float[Tensor, "c k"], Float[Tensor, "c v"]]:
        """Return keys and values of alternatives for the position behind a prefix of ``model``."""
        states = prefix.branch(tokens).float()[:, -self._keys - self._values :]
        return states[:, : self._keys], states[:, self._keys :]
