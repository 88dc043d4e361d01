"""What inference verification publishes in place of states: TOPLOC proofs, and top-k log-probabilities.

Fingerprints of Activation-DiFR are random projections, which the stage ``project`` releases. All three are meant to
prove which model ran; here they are observations, so that an attack can be asked what they tell of the prompt.
"""

import hashlib
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from hiddenlab.channels import Stage
from hiddenlab.defenses.verification.rules import PAPER
from hiddenlab.defenses.verification.toploc import TOP, commit, values_at
from hiddenlab.errors import InputError
from hiddenlab.types import ObservationInfo


class Toploc(Stage):
    """Releases the TOPLOC proof of the prompt, as what its polynomial gives at every index (TOPLOC, Algorithm 1).

    The proof is by the published rule: one over the whole prompt, of its k largest values (``rules.PAPER``).

    Row i, column j of the release is the value at the flat index i · width + j: that of the state where it was among
    the k largest, garbage elsewhere. It says as much as the proof's 2 + 2k bytes, since each follows from the other.

    Args:
        k: values in the proof. keyed: coordinates are scattered over the prompt by a secret permutation, drawn for
            each prompt, before the polynomial is laid through them (see ``scatter``).

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
        key = int(torch.randint(2**63 - 1, (), generator=generator)) if self.keyed else None
        proof = commit(states if key is None else scatter(states, key), self.k, PAPER)
        everywhere = torch.arange(states.numel(), device=states.device).reshape(states.shape)
        values = values_at(proof, everywhere)
        # Patterns of NaN and infinity are garbage in any case: no committed value is one.
        values = torch.where(torch.isfinite(values), values, 0)
        secret = {} if key is None else {"key": key}
        return values, None, {"proof": proof.to_base64(), **secret}

    def publish(self, info: ObservationInfo) -> ObservationInfo:
        _only(info, "final_norm", "TOPLOC proofs are of")
        return replace(info, facts={**info.facts, "toploc": {"k": self.k, "keyed": self.keyed}})

    def __repr__(self) -> str:
        key = ", not the permutation of its indices" * self.keyed
        return f"{self.spec}: the attacker sees the proof and knows the model{key}"


class Logprobs(Stage):
    """Releases the k largest log-probabilities of the next token at each position, as many providers do.

    Row i holds k log-probabilities in nats, descending, and then the k token ids that they belong to.

    Args:
        k: how many.

    Raises:
        InputError: k < 1, or more than the vocabulary has.
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
    """All coordinates of a chunk in the order that a key gives; what a proof with keyed indices is made of.

    Provider and verifier, who share the key, both scatter and then commit and check as before: the k largest values
    stay the k largest. Whoever lacks the key does not know which place of the polynomial belongs to which coordinate.
    """
    order = torch.randperm(states.numel(), generator=torch.Generator().manual_seed(key))
    return states.flatten()[order.to(states.device)].reshape(states.shape)


def request_seed(key: str, request: str = "") -> int:
    """The seed of a secret projection or permutation: of a whole key, or of one request's under that key.

    SHA-256 of both with their lengths, so that no two pairs read the same; 63 bits.
    """
    parts = (part.encode() for part in (key, request))
    text = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 1


def _only(info: ObservationInfo, stream: str, what: str) -> None:
    # A channel asks stages about an observation of no model, to learn what they do to the rows.
    if info.model and info.site.stream != stream:
        raise InputError(f"{what} the stream {stream}, not {info.site.stream}; use --stream {stream}")
