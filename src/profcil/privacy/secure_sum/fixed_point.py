"""Real numbers as integers modulo 2^64, in which sums are exact and masks can be added.

A number v becomes round(v · 2^bits) modulo 2^64. Sums of n clients must stay below 2^63, so each client's numbers must
be below 2^63 / n / 2^bits. A larger one is an error: nothing is clipped.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from profcil.errors import Failure

Ring = NDArray[np.uint64]
Real = NDArray[np.float64]


def encode(values: Mapping[str, Real], bits: int, clients: int, client: int) -> Ring:
    """The numbers of a client's named arrays as one vector, in the order of the mapping. `clients` are to be added."""
    parts = [np.zeros(0, np.uint64)]
    for name, array in values.items():
        scaled = np.rint(np.ldexp(array.ravel(), bits))
        check_range(scaled, name, bits, clients, client)
        parts.append(scaled.astype(np.int64).view(np.uint64))
    return np.concatenate(parts)


def check_range(scaled: Real, name: str, bits: int, clients: int, client: int) -> None:
    """Raises an error if a number is too large for a sum of so many clients, or not a number."""
    limit = 2.0**63 / clients
    if not bool((np.abs(scaled) < limit).all()):
        largest = float(np.abs(scaled).max()) / 2.0**bits
        raise Failure(
            f"{name} of client {client} has a value of size {largest:.3g}, but a secure sum of {clients} clients with "
            f"privacy.sum_bits = {bits} holds values below {limit / 2.0**bits:.3g}; lower privacy.sum_bits"
        )


def decode(total: Ring, shapes: Mapping[str, tuple[int, ...]], bits: int) -> dict[str, Real]:
    """The named arrays in a vector of `encode`, or in a sum of such vectors."""
    numbers = np.ldexp(total.view(np.int64).astype(np.float64), -bits)
    arrays = {}
    start = 0
    for name, shape in shapes.items():
        end = start + int(np.prod(shape))
        arrays[name] = numbers[start:end].reshape(shape)
        start = end
    return arrays
