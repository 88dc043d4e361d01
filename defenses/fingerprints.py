"""Release what inference verification publishes in place of states: TOPLOC proofs, or the top-k log-probabilities.

Both, and the random projections of Activation-DiFR (the stage ``project``), are meant to prove which model ran. Here
they are observations, so that an attack can measure what they reveal about the prompt.
"""

import hashlib
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from hiddenlab.defenses.verification.rules import PAPER
from hiddenlab.defenses.verification.toploc import TOP, commit, values_at
from hiddenlab.errors import InputError
from hiddenlab.stages import Stage
from hiddenlab.types import ObservationInfo
from hiddenlab.utils.random import key_of


class Toploc(Stage):
    """Release the TOPLOC proof of a prompt as the values of its polynomial at every index (TOPLOC, Algorithm 1).

    The proof follows the published rule: one proof for the whole prompt, of its k largest values (``rules.PAPER``).

    Row i, column j of the release is the value at the flat index i · width + j. It is the state's value where that is
    among the k largest, and arbitrary elsewhere. The release holds the same information as the 2 + 2k bytes of the
    proof.

    Args:
        k: values in the proof.
        keyed: permute all coordinates of the prompt with a secret permutation, which belongs to the key, before the
            proof is made (see ``scatter``).

    Raises:
        InputError: k < 1.
    """

    def __init__(self, k: int = TOP, keyed: bool = False) -> None:
        if k < 1:
            raise InputError(f"a proof has 1 value or more, not {k}")
        self.k, self.keyed = k, keyed
        self.spec = f"toploc:k={k}" + ",keyed=true" * keyed

    def states(
        self, states: Float[Tensor, "rows d"], generator: torch.Generator
    ) -> tuple[Float[Tensor, "rows d"], tuple[int, ...] | None, dict[str, Any]]:
        drawn = key_of(generator, "permutation")
        key = int(torch.randint(2**63 - 1, (), generator=drawn)) if self.keyed else None
        proof = commit(states if key is None else scatter(states, key), self.k, PAPER)
        everywhere = torch.arange(states.numel(), device=states.device).reshape(states.shape)
        values = values_at(proof, everywhere)
        # Committed values are finite, so NaN and infinity are arbitrary values and can be replaced.
        values = torch.where(torch.isfinite(values), values, 0)
        facts = {} if key is None else {"key": key}
        return values, None, {"proof": proof.to_base64(), **facts}

    def publish(self, info: ObservationInfo) -> ObservationInfo:
        _only(info, "final_norm", "TOPLOC proofs are of")
        return replace(info, facts={**info.facts, "toploc": {"k": self.k, "keyed": self.keyed}})

    def __repr__(self) -> str:
        key = ", not the permutation of its indices" * self.keyed
        return f"{self.spec}: the attacker sees the proof and knows the model{key}"


class Logprobs(Stage):
    """Release the k largest log-probabilities of the next token at each position, as many providers do.

    Row i holds k log-probabilities in nats, in descending order, and then the k token ids that they belong to.

    Args:
        k: number of log-probabilities.

    Raises:
        InputError: k < 1, or k exceeds the size of the vocabulary.
    """

    def __init__(self, k: int = 5) -> None:
        if k < 1:
            raise InputError(f"1 log-probability or more can be shown, not {k}")
        self.k = k
        self.spec = f"logprobs:k={k}"

    def states(
        self, states: Float[Tensor, "rows v"], generator: torch.Generator
    ) -> tuple[Float[Tensor, "rows k2"], tuple[int, ...] | None, dict[str, Any]]:
        if self.k > states.shape[1]:
            raise InputError(f"{self.k} log-probabilities of a vocabulary of {states.shape[1]}")
        largest = states.float().log_softmax(1).topk(self.k, dim=1)
        # Ids up to 2²⁴ are exact in float32.
        return torch.cat([largest.values, largest.indices.float()], 1), None, {}

    def publish(self, info: ObservationInfo) -> ObservationInfo:
        _only(info, "logits", "log-probabilities are made of")
        return replace(info, facts={**info.facts, "logprobs": {"k": self.k}})

    def __repr__(self) -> str:
        return f"{self.spec}: the attacker sees {self.k} log-probabilities a position and knows the model"


def scatter(states: Float[Tensor, "n d"], key: int) -> Float[Tensor, "n d"]:
    """Permute all coordinates of a chunk with the permutation that a key gives.

    A proof with keyed indices is made of the result. Provider and verifier share the key; both permute and then commit
    and check as before, because the k largest values stay the same. Without the key, nobody knows which index of the
    polynomial belongs to which coordinate.
    """
    order = torch.randperm(states.numel(), generator=torch.Generator().manual_seed(key))
    return states.flatten()[order.to(states.device)].reshape(states.shape)


def request_seed(key: str, request: str = "") -> int:
    """Derive the seed of a secret projection or permutation from a key, or from a key and a request id.

    The seed is 63 bits of the SHA-256 hash of both texts with their lengths, so that different pairs give different
    input.
    """
    parts = (part.encode() for part in (key, request))
    text = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 1


def _only(info: ObservationInfo, stream: str, what: str) -> None:
    # A channel also calls ``publish`` without a model, to find out what stages do to the rows.
    if info.model and info.site.stream != stream:
        raise InputError(f"{what} the stream {stream}, not {info.site.stream}; use --stream {stream}")
