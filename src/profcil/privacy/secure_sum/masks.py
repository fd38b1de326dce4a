"""Masks: streams of numbers that look random to all who do not have their key.

Two clients agree on a key by X25519. HKDF-SHA256 derives from it one key for each use and each sum. AES-128 in counter
mode makes the stream of a mask.
"""

from __future__ import annotations

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES128
from cryptography.hazmat.primitives.ciphers.modes import CTR
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from profcil.errors import Failure
from profcil.privacy.secure_sum.fixed_point import WIDEST, Ring, from_bytes

KEY_BYTES = 32  # of an X25519 key, private or public


def public_key(private: bytes) -> bytes:
    """The public key of a private one."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def agree(private: bytes, public: bytes) -> bytes:
    """The secret that only the owners of two key pairs can compute."""
    other = X25519PublicKey.from_public_bytes(public)
    try:
        return X25519PrivateKey.from_private_bytes(private).exchange(other)
    except ValueError:  # such a key gives the same secret with every other key
        raise Failure("a public key is none that a secret can be agreed on with") from None


def derive_key(secret: bytes, use: str, size: int) -> bytes:
    """A key for one use of a secret."""
    return HKDF(SHA256(), length=size, salt=None, info=use.encode()).derive(secret)


def stream(secret: bytes, use: str, length: int, width: int = WIDEST) -> Ring:
    """The mask of a secret: so many numbers of so many bytes."""
    key = derive_key(secret, f"mask {use}", 16)
    zero = bytes(16)  # a counter may start at zero, because each key is used once
    encryptor = Cipher(AES128(key), CTR(zero)).encryptor()
    return from_bytes(encryptor.update(bytes(width * length)), width)
