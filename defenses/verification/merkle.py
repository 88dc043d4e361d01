"""Build Merkle trees over the hashes of records: one root for all, and a short path that proves one record's place.

The shape follows RFC 9162 (section 2.1): the left half of a tree is the largest full tree that leaves something on the
right. Hashes are SHA3-256. Leaves and inner nodes are hashed with different first bytes, so that neither passes for the
other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence


def _leaf(data: bytes) -> bytes:
    return hashlib.sha3_256(b"\0" + data).digest()


def _node(left: bytes, right: bytes) -> bytes:
    return hashlib.sha3_256(b"\1" + left + right).digest()


def _above(level: Sequence[bytes]) -> list[bytes]:
    """Return the next level: neighbours are joined, and an odd last one is carried up unchanged."""
    joined = [_node(level[i], level[i + 1]) for i in range(0, len(level) - 1, 2)]
    return joined + list(level[len(joined) * 2 :])


def merkle_root(leaves: Sequence[bytes]) -> bytes:
    """Return the hash of the tree's root; without leaves, the hash of no bytes."""
    level = [_leaf(leaf) for leaf in leaves]
    while len(level) > 1:
        level = _above(level)
    return level[0] if level else hashlib.sha3_256(b"").digest()


def merkle_path(leaves: Sequence[bytes], index: int) -> list[bytes]:
    """Return the sibling hashes on the way from a leaf to the root, lowest first."""
    level, path = [_leaf(leaf) for leaf in leaves], []
    while len(level) > 1:
        if index ^ 1 < len(level):
            path.append(level[index ^ 1])
        level, index = _above(level), index // 2
    return path


def climb(leaf: bytes, index: int, size: int, path: Sequence[bytes]) -> bytes | None:
    """Return the root that a path leads to from the leaf at `index` of `size`; None if the path's length is wrong."""
    if not 0 <= index < size < 1 << 64 or len(path) > size.bit_length():
        return None
    return _climb(_leaf(leaf), index, size, list(path))


def _climb(own: bytes, index: int, size: int, path: list[bytes]) -> bytes | None:
    if size == 1 or not path:
        return own if size == 1 and not path else None
    half = 1 << ((size - 1).bit_length() - 1)
    on_left = index < half
    below = _climb(own, index if on_left else index - half, half if on_left else size - half, path[:-1])
    if below is None:
        return None
    return _node(below, path[-1]) if on_left else _node(path[-1], below)
