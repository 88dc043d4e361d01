"""Plant secrets that nobody can guess: numbers, names and keys in short texts, drawn anew for each seed."""

import string
from dataclasses import dataclass

import torch

from hiddenlab.utils.random import generator

FORMS = (
    ("Please call me back on {}, I am at home until six.", "dddd dddddd"),
    ("The new password of the archive is {} and nobody else has it.", "aadaadaa"),
    ("Patient {} reports chest pain since Monday; see the attached note.", "A. Aaaaaa"),
    ("Use the key {} for the test account, then delete it.", "aadd-ddaa-adad"),
)
LETTERS = {"a": string.ascii_lowercase, "A": string.ascii_uppercase, "d": string.digits}


@dataclass(frozen=True)
class Planted:
    """A text and the secret in it."""

    text: str
    secret: str


def planted(seed: int) -> list[Planted]:
    """Return one text for each form, with a secret drawn for this seed."""
    made = []
    for number, (text, form) in enumerate(FORMS):
        drawn = generator(seed, "planted secret", number)
        secret = "".join(_draw(LETTERS[sign], drawn) if sign in LETTERS else sign for sign in form)
        made.append(Planted(text.format(secret), secret))
    return made


def _draw(letters: str, drawn: torch.Generator) -> str:
    return letters[int(torch.randint(len(letters), (1,), generator=drawn))]
