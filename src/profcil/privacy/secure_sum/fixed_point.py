"""Real numbers as integers modulo 2^(8w), in which sums are exact and masks can be added. w is the width in bytes.

A number v becomes round(v · 2^bits). Sums of n clients must stay below 2^(8w − 1), so each client's numbers must be
below 2^(8w − 1) / n / 2^bits. A larger one is an error: nothing is clipped. A number has w bytes in a message, and
32 or 64 bits in memory, of which those above 8w mean nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from profcil.errors import Failure

Ring = NDArray[np.unsignedinteger]
Real = NDArray[np.float64]
WIDEST = 8  # bytes of a number


def width_for(largest: float, bits: int, clients: int) -> int:
    """The bytes of a number that hold sums of so many clients' numbers up to this size; `WIDEST` if the size is 0."""
    if not largest:
        return WIDEST
    width = math.ceil((1 + bits + math.log2(largest * clients)) / 8)
    if width > WIDEST:
        raise Failure(
            f"privacy.sum_range = {largest:g} with privacy.sum_bits = {bits} takes {width} bytes a number for "
            f"{clients} clients, {WIDEST} are possible; lower one of them"
        )
    return max(width, 1)


def word_of(width: int) -> np.dtype[np.unsignedinteger]:
    """The type of numbers of a width in memory."""
    return np.dtype("<u4") if width <= 4 else np.dtype("<u8")


def encode(values: Mapping[str, Real], bits: int, clients: int, client: int, width: int = WIDEST) -> Ring:
    """The numbers of a client's named arrays as one vector, in the order of the mapping. `clients` are to be added."""
    word = word_of(width)
    parts = [np.zeros(0, word)]
    for name, array in values.items():
        scaled = np.rint(np.ldexp(array.ravel(), bits))
        check_range(scaled, name, bits, clients, client, width)
        parts.append(scaled.astype(np.int64).view(np.uint64).astype(word))
    return np.concatenate(parts)


def check_range(scaled: Real, name: str, bits: int, clients: int, client: int, width: int) -> None:
    """Raises an error if a number is too large for a sum of so many clients, or not a number."""
    limit = 2.0 ** (8 * width - 1) / clients
    if not bool((np.abs(scaled) < limit).all()):
        largest = float(np.abs(scaled).max()) / 2.0**bits
        advice = "lower privacy.sum_bits" if width == WIDEST else "raise privacy.sum_range, or lower privacy.sum_bits"
        raise Failure(
            f"{name} of client {client} has a value of size {largest:.3g}, but a secure sum of {clients} clients with "
            f"privacy.sum_bits = {bits} and {width} bytes a number holds values below {limit / 2.0**bits:.3g}; {advice}"
        )


def decode(total: Ring, shapes: Mapping[str, tuple[int, ...]], bits: int, width: int = WIDEST) -> dict[str, Real]:
    """The named arrays in a vector of `encode`, or in a sum of such vectors."""
    word = word_of(width)
    unused = 8 * (word.itemsize - width)
    signed = (total << word.type(unused)).view(f"<i{word.itemsize}") >> unused
    numbers = np.ldexp(signed.astype(np.float64), -bits)
    arrays = {}
    start = 0
    for name, shape in shapes.items():
        end = start + int(np.prod(shape))
        arrays[name] = numbers[start:end].reshape(shape)
        start = end
    return arrays


def to_bytes(vector: Ring, width: int) -> bytes:
    """A vector as it is sent: the lowest bytes of each number."""
    word = word_of(width)
    if width == word.itemsize:
        return vector.astype(word).tobytes()
    return vector.astype(word).view(np.uint8).reshape(-1, word.itemsize)[:, :width].tobytes()


def from_bytes(data: bytes, width: int) -> Ring:
    """The vector in the bytes of `to_bytes`."""
    word = word_of(width)
    if width == word.itemsize:
        return np.frombuffer(data, word)
    numbers = np.zeros((len(data) // width, word.itemsize), np.uint8)
    numbers[:, :width] = np.frombuffer(data, np.uint8).reshape(-1, width)
    return numbers.view(word).reshape(-1)
