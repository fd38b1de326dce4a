"""Shamir's secret sharing: any `threshold` shares give a secret of 32 bytes, fewer say nothing about it.

The shares are the values of a random polynomial over a prime field, whose constant term is the secret.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import reduce

from profcil.errors import Failure

PRIME = 2**256 + 297  # the smallest prime above 2^256
SECRET_BYTES = 32
SHARE_BYTES = 33
Draw = Callable[[str, int], bytes]  # random bytes for a purpose, of a size


def split(secret: bytes, points: Iterable[int], threshold: int, draw: Draw) -> dict[int, bytes]:
    """A share of the secret for each of the points, which are positive numbers."""
    constant = int.from_bytes(secret, "big")
    drawn = [draw(f"coefficient {power}", 64) for power in range(1, threshold)]
    # 64 bytes modulo a prime of 33 bytes are uniform but for a share of 2^-255.
    coefficients = [constant, *(int.from_bytes(number, "big") % PRIME for number in drawn)]
    return {point: evaluate(coefficients, point).to_bytes(SHARE_BYTES, "big") for point in points}


def evaluate(coefficients: list[int], point: int) -> int:
    """The value of a polynomial, by Horner's rule."""
    return reduce(lambda value, c: (value * point + c) % PRIME, reversed(coefficients), 0)


def recover(shares: Mapping[int, bytes]) -> bytes:
    """The secret, by interpolation at zero. The mapping has as many shares as the threshold."""
    secret = 0
    for point, share in shares.items():
        weight = 1
        for other in shares:
            if other != point:
                weight = weight * other * pow(other - point, -1, PRIME) % PRIME
        secret = (secret + weight * int.from_bytes(share, "big")) % PRIME
    if secret >= 2 ** (8 * SECRET_BYTES):
        raise Failure("the shares of a secret do not fit together; one of them is wrong")
    return secret.to_bytes(SECRET_BYTES, "big")
