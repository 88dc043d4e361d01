"""Create and read Ed25519 keys on disk, and check signatures."""

from __future__ import annotations

from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from hiddenlab.defenses.verification.durable import LedgerError
from hiddenlab.errors import InputError
from hiddenlab.utils.files import write_file


def create_key(path: Path) -> str:
    """Write a new private key (PEM, readable by its owner only) and return its public key in hexadecimal.

    Raises:
        LedgerError: the file exists, or cannot be written.
    """
    key = Ed25519PrivateKey.generate()
    text = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    try:
        write_file(path, text, private=True, new=True)
    except InputError as error:
        raise LedgerError(f"no key was made: {error}") from None
    return public(key)


def read_key(path: Path) -> Ed25519PrivateKey:
    """Read the private key in a file.

    Raises:
        LedgerError: no such file, or no Ed25519 key in it.
    """
    try:
        key = load_pem_private_key(path.read_bytes(), password=None)
    except OSError as error:
        raise LedgerError(f"cannot read the key {path}: {error.strerror}") from error
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise LedgerError(f"{path} holds no unencrypted private key in PEM format") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise LedgerError(f"{path} holds a key of another kind than Ed25519")
    return key


def public(key: Ed25519PrivateKey) -> str:
    """Return a private key's public key in hexadecimal."""
    return key.public_key().public_bytes_raw().hex()


def signed(public_key: str, signature: str, statement: bytes) -> bool:
    """Return whether that key (hexadecimal) made that signature (hexadecimal); False for malformed ones."""
    try:
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(public_key))
        key.verify(bytes.fromhex(signature), statement)
    except (InvalidSignature, ValueError):
        return False
    return True
