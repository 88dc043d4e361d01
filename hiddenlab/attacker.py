"""Declare once what the attacker of an assessment knows and has; the command line and records read it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from pydantic import Field
from typer import Option

from hiddenlab.errors import InputError
from hiddenlab.text import count_of
from hiddenlab.utils.schema import CLOSED, check

PANEL = "Attacker"  # the group of options in help
MOST_TEXTS = 1000
Texts = Annotated[int, Field(ge=0, le=MOST_TEXTS)]


@dataclass(frozen=True)
class Attacker:
    """Hold what an attacker knows, of which texts he also sees the rows, how long a key lives, and attacks of his own.

    A key is what a defense draws once for several requests, if several share it: an order, a permutation, a matrix
    (``hiddenlab.utils.random.key_of``). Noise is drawn afresh for each request, whatever the key.
    """

    __pydantic_config__ = CLOSED

    knows: Annotated[
        Literal["code", "facts", "nothing"],
        Option(
            "--knows",
            rich_help_panel=PANEL,
            help="What the attacker knows of the defense. code: its code and public facts; he may release texts of his "
            "own. facts: the public facts alone. nothing: he sees rows, and supposes one defense after another.",
        ),
    ] = "code"
    key: Annotated[
        Literal["request", "session", "forever"],
        Option(
            "--key",
            rich_help_panel=PANEL,
            help="How long a key of the defense lives. request: each text has its own. session: a prompt and its known "
            "texts share one. forever: all prompts and known texts share one.",
        ),
    ] = "request"
    releases: Annotated[
        int,
        Field(ge=1, le=MOST_TEXTS),
        Option(
            "--releases",
            metavar="N",
            min=1,
            max=MOST_TEXTS,
            rich_help_panel=PANEL,
            help="How often each prompt is released, each time with fresh noise. The attacker sees all releases. With "
            "--key request, each has a key of its own.",
        ),
    ] = 1
    known: Annotated[
        Texts,
        Option(
            "--known",
            metavar="N",
            min=0,
            max=MOST_TEXTS,
            rich_help_panel=PANEL,
            help="Ordinary texts, as long as the prompt, that the attacker has together with their released rows.",
        ),
    ] = 0
    chosen: Annotated[
        Texts,
        Option(
            "--chosen",
            metavar="N",
            min=0,
            max=MOST_TEXTS,
            rich_help_panel=PANEL,
            help="The same of texts that he picks himself, of the length that teaches most: random tokens, or frequent "
            "ones where tokens are replaced.",
        ),
    ] = 0

    attacks: Annotated[
        tuple[str, ...],
        Option(
            "--attack",
            metavar="FILE.py",
            rich_help_panel=PANEL,
            help="An attack of your own that is made for this defense; it goes first, beside those of the lab. May be "
            "given several times.",
        ),
    ] = ()

    def __post_init__(self) -> None:
        if self.releases > 1 and self.knows == "nothing":
            raise InputError(
                "who knows nothing of a defense cannot say what the mean of its releases is; give --knows facts"
            )
        if self.key != "request" and self.releases == 1 and not self.known + self.chosen:
            raise InputError(
                f"--key {self.key} alone changes nothing, since no attack reads the rows of several prompts together; "
                "say what else passes under the key: --known N, --chosen N or --releases N"
            )

    @property
    def words(self) -> str:
        """What differs from who knows the code and has no texts, behind "an attacker who"; empty for that one."""
        under = {
            "request": "keys of their own", "session": "the key of each prompt", "forever": "the one key of all prompts"
        }  # fmt: skip
        texts = [
            count_of(count, f"{kind} text")
            for kind, count in (("known", self.known), ("chosen", self.chosen))
            if count
        ]
        knows = {
            "code": "", "facts": "knows the public facts of the defense and not its code",
            "nothing": "knows nothing of the defense",
        }[self.knows]  # fmt: skip
        has = f"has {' and '.join(texts)} under {under[self.key]}" if texts else ""
        seen = "under one key" if self.key != "request" else "under a fresh key each time"
        sees = f"sees each prompt released {self.releases} times {seen}" if self.releases > 1 else ""
        made = f"has {count_of(len(self.attacks), 'attack')} of his own" if self.attacks else ""
        return " and ".join(filter(None, (knows, sees, has, made)))

    def to_json(self) -> dict[str, Any]:
        """Return all options by name, as JSON values."""
        return {**asdict(self), "attacks": list(self.attacks)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any], where: str = "the attacker") -> "Attacker":
        """Rebuild an attacker from the result of ``to_json``, with every option checked.

        Raises:
            InputError: an option is unknown to this version, or has an invalid value.
        """
        # Records keep numbers as floats.
        whole = {
            name: int(value) if isinstance(value, float) and value.is_integer() else value
            for name, value in data.items()
        }
        return check(whole, cls, where)
