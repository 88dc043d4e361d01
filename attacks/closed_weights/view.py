"""Save and load what the server of a permuted model has: its output layer and the vectors that users sent."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hiddenlab.errors import InputError
from hiddenlab.text import count_of
from hiddenlab.utils.files import save_tensors

FILE = "view.safetensors"


@dataclass(frozen=True)
class ServerView:
    """The part of the server's knowledge that these attacks use: its permuted output layer, and users' vectors.

    It holds neither the weights, nor the token embedding, nor an order of dimensions or tokens.

    Attributes:
        head: the permuted output layer, a row for each token of the (permuted) vocabulary.
        requests: for each request the permuted embeddings that the user sent. step: distance between the fixed-point
            numbers that these were rounded to; 0 where they were not.
    """

    head: Float[Tensor, "v d"]
    requests: tuple[Float[Tensor, "_ _"], ...]
    step: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.step < 1:
            raise InputError(f"the step of fixed-point numbers is between 0 and 1, not {self.step:g}")
        if not self.requests:
            raise InputError("the view holds no requests; there is nothing to read")
        width = self.head.shape[1]
        for i, rows in enumerate(self.requests):
            if rows.ndim != 2 or rows.shape[1] != width or not len(rows):
                raise InputError(
                    f"request {i} is {tuple(rows.shape)}, not rows of {width} numbers like the head"
                )
            if not bool(rows.isfinite().all()):
                raise InputError(f"request {i} holds NaN or infinity")

    def save(self, folder: Path) -> Path:
        """Write it as one safetensors file.

        Raises:
            InputError: the folder cannot be written.
        """
        path = folder / FILE
        tensors = {
            "head": self.head.contiguous(),
            "vectors": torch.cat(list(self.requests)),
            "lengths": torch.tensor([len(rows) for rows in self.requests], dtype=torch.int64),
            "step": torch.tensor([self.step], dtype=torch.float64),
        }
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"cannot write {path}: {error.strerror or error}") from None
        save_tensors(path, tensors, {})
        return path

    @classmethod
    def load(cls, folder: Path) -> "ServerView":
        """Read what ``save`` wrote.

        Raises:
            InputError: there is no such file, or it is damaged or something else.
        """
        path = folder / FILE
        try:
            with safe_open(path, "pt") as file:
                head, vectors, lengths = (file.get_tensor(name) for name in ("head", "vectors", "lengths"))
                step = file.get_tensor("step") if "step" in file.keys() else torch.zeros(1)  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise InputError(f"{path} is no server's view ({error})") from None
        if step.numel() != 1:
            raise InputError(f"{path} is no server's view: it has {step.numel()} steps of numbers")
        counts = [int(n) for n in lengths.flatten()]
        if head.ndim != 2 or vectors.ndim != 2 or min(counts, default=1) < 1 or sum(counts) != len(vectors):
            raise InputError(f"{path} is no server's view: its lengths do not fit its vectors")
        return cls(head.float(), tuple(vectors.float().split(counts)), float(step.flatten()))

    def __repr__(self) -> str:
        return (
            f"ServerView(a permuted head of {count_of(len(self.head), 'token')}, "
            f"{count_of(len(self.requests), 'request')}; knows neither the "
            "weights nor the embedding nor any order)"
        )


def rows_of(requests: Sequence[Float[Tensor, "_ d"]]) -> tuple[Float[Tensor, "rows d"], list[int]]:
    """Return all rows of some requests, and how many each has."""
    return torch.cat(list(requests)), [len(rows) for rows in requests]
