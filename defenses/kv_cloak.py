"""Hide keys or values behind secret matrices of each head (KV-Cloak, Luo et al., NDSS 2026, arXiv 2508.09442)."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from hiddenlab.errors import InputError
from hiddenlab.secret_maps import CloakedBlocks, with_turned_blocks
from hiddenlab.stages import Stage
from hiddenlab.types import ObservationInfo
from hiddenlab.utils.random import key_of, orthogonal

STREAMS = ("k", "v", "kv")
# A row of a block gets an offset of three to four times the largest number that a key may have behind its rotation.
# That is the root of two times the largest number, for which twice the largest of this prompt is taken.
OFFSET, LARGEST = 3.0, 2.0 * 1.42


class KvCloak(Stage):
    """Release keys or values as KV-Cloak stores them: S P (K M + A) for each head and block of tokens.

    M turns pairs of coordinates and S mixes the rows of a block, both secret and drawn for each head; P shuffles the
    rows of a block, the same in all heads; A adds one secret row to one row of the block. A last block of fewer tokens
    has an S of its size. All belong to the key, but for the length of A's row, which follows the prompt.

    Args:
        heads: key/value heads that the stream holds side by side; ``kv`` holds twice as many as ``k``.
        block: tokens of a block.
        mask: add A.

    Raises:
        InputError: a number is below 1, the stream is none of ``k``, ``v`` and ``kv``, or the heads do not fit it.
    """

    def __init__(self, heads: int, block: int = 16, mask: bool = True) -> None:
        if min(heads, block) < 1:
            raise InputError(f"kv-cloak needs heads and block of 1 or more, not {heads}, {block}")
        self.heads, self.block, self.mask = heads, block, mask
        self.spec = f"kv-cloak:heads={heads},block={block}" + ",mask=false" * (not mask)

    def states(
        self, states: Float[Tensor, "rows d"], generator: torch.Generator
    ) -> tuple[Float[Tensor, "rows d"], tuple[int, ...] | None, dict[str, Any]]:
        rows, width = states.shape
        if width % (2 * self.heads):
            raise InputError(
                f"{self.spec}: rows of {width} numbers are not those of {self.heads} heads of even width"
            )
        sizes = [min(self.block, rows - start) for start in range(0, rows, self.block)]
        orders = [
            torch.randperm(size, generator=key_of(generator, "order", block, size)).to(states.device)
            for block, size in enumerate(sizes)
        ]
        heads = states.double().chunk(self.heads, dim=1)
        released = [self._head(head, number, orders, generator) for number, head in enumerate(heads)]
        return torch.cat(released, 1).to(states.dtype), None, {"orders": orders}

    def _head(
        self, head: Float[Tensor, "rows w"], number: int, orders: list[Tensor], generator: torch.Generator
    ) -> Float[Tensor, "rows w"]:
        largest = LARGEST * head.abs().max()
        half = head.shape[1] // 2
        turns = key_of(generator, "angles", number)
        angles = 2 * torch.pi * torch.rand(half, generator=turns, dtype=torch.float64).to(head)
        real, imaginary = head[:, :half], head[:, half:]
        turned = [
            real * angles.cos() - imaginary * angles.sin(), real * angles.sin() + imaginary * angles.cos()
        ]  # fmt: skip
        mixing = {
            size: orthogonal(size, key_of(generator, "mixing", number, size)).to(head)
            for size in {len(order) for order in orders}
        }
        secret = key_of(generator, "offset", number)
        offset = largest * (
            OFFSET + torch.rand(head.shape[1], generator=secret, dtype=torch.float64).to(head)
        )
        secret = key_of(generator, "place", number)
        place, blocks = int(torch.randint(self.block, (), generator=secret)), []
        for order, rows in zip(orders, torch.cat(turned, 1).split([len(o) for o in orders]), strict=True):
            rows = rows.clone()
            if self.mask:
                rows[place % len(rows)] += offset
            blocks.append(mixing[len(order)] @ rows[order])
        return torch.cat(blocks)

    def publish(self, info: ObservationInfo) -> ObservationInfo:
        if info.model and info.site.stream not in STREAMS:
            raise InputError(
                f"kv-cloak hides the streams {', '.join(STREAMS)}, not {info.site.stream}; use --stream"
            )
        return with_turned_blocks(info, CloakedBlocks(self.heads, self.block, self.mask))

    def __repr__(self) -> str:
        return (
            f"{self.spec}: the attacker sees mixed rows with turned coordinates and knows the model and the blocks; "
            "only the provider knows the matrices"
        )
