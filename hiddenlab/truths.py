"""Write and read truth files: the tokens and row orders that attacks on saved observations are scored with."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from hiddenlab.errors import InputError
from hiddenlab.types import GroundTruth
from hiddenlab.utils.files import write_file
from hiddenlab.utils.schema import CLOSED, LARGEST, TokenId, parse, read_bytes

TRUTH_FORMAT = 1


@dataclass(frozen=True)
class _Truth:
    """One prompt of a truth file."""

    __pydantic_config__ = CLOSED

    tokens: Annotated[tuple[TokenId, ...], Field(min_length=1)]
    row_order: tuple[Annotated[int, Field(ge=-1, le=LARGEST)], ...] | None = None  # -1: a row of no token
    computed: tuple[TokenId, ...] | None = None

    def secret(self) -> GroundTruth:
        return GroundTruth(self.tokens, self.row_order, computed=self.computed)


@dataclass(frozen=True)
class _Truths:
    """A truth file."""

    __pydantic_config__ = CLOSED

    format: int
    secrets: Annotated[list[_Truth], Field(min_length=1)]


def save_truth(secrets: Sequence[GroundTruth], path: Path) -> None:
    """Write tokens, row orders and replaced tokens as JSON, to score attacks on saved observations.

    The file is readable by its owner only.

    Raises:
        InputError: the file cannot be written.
    """
    rows: list[dict[str, object]] = []
    for secret in secrets:
        rows.append({"tokens": secret.tokens, "row_order": secret.row_order})
        if secret.computed is not None:
            rows[-1]["computed"] = secret.computed
    write_file(path, json.dumps({"format": TRUTH_FORMAT, "secrets": rows}) + "\n", private=True)


def load_truth(path: Path) -> list[GroundTruth]:
    """Read what ``save_truth`` wrote.

    Raises:
        InputError: the file cannot be read, is no truth file, or names rows that its prompts do not have.
    """
    stored = parse(read_bytes(path), _Truths, str(path), TRUTH_FORMAT)
    secrets = [row.secret() for row in stored.secrets]
    for i, truth in enumerate(secrets):
        order = [place for place in truth.row_order or () if place >= 0]
        if len(set(order)) < len(order) or max(order, default=0) >= len(truth.tokens):
            raise InputError(f"{path}: secrets[{i}].row_order names a row twice, or one that there is not")
        if len(truth.shown) != len(truth.tokens):
            raise InputError(
                f"{path}: secrets[{i}].computed should have as many tokens as secrets[{i}].tokens"
            )
    return secrets
