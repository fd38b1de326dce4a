"""Discrete Gaussian noise: integers k with probabilities proportional to exp(−k²/2σ²).

Numbers of a secure sum are integers, so their noise must be integers, too: the sum of rounded Gaussian numbers is no
rounded Gaussian number. A number is drawn by rejection. Candidates are the uniform integers of a range of a power of
two, in which no value is preferred. Each is accepted with probability exp(−k²/2σ²), by comparing it with a uniform
number of 128 bits. All bits come from AES-128 in counter mode.

Two facts let the accountant of Gaussian noise be used as it is (by Poisson summation; `SLACK` is t below):
- Gaussian noise of variance σ² − t² on integers, rounded at random to an integer, has this distribution up to a factor
  of 1 ± 4·exp(−2π²t²) for each number: 1 ± 10⁻³⁷ for t² = 4.5. Rounding reveals nothing more.
- The sum of shares with deviations σ_i ≥ `LEAST` has it for Σσ_i², up to a factor of 1 ± 10⁻⁶⁷ for each number.
Candidates end at 10σ or farther (a chance of 10⁻²³ for each number), and float64 has probabilities to 1 ± 10⁻¹³.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES128
from cryptography.hazmat.primitives.ciphers.modes import CTR
from numpy.typing import NDArray

REACH = 10.0  # deviations, beyond which no candidate has to be
SLACK = 3.0  # t, of numbers with weight 1; those with weight √2 have t² = 4.5
LEAST = 4.0  # deviation of a share, from which on sums of shares are as described above
MOST = 2.0**56  # deviation for which candidates have 64 bits
BATCH = 1 << 17  # candidates at a time, at most; one in 8 to 16 is accepted
Integers = NDArray[np.int64]
Words = Callable[[int], NDArray[np.uint64]]  # so many random words of 64 bits


def words_of(key: bytes) -> Words:
    """The stream of random words of a key of 16 bytes. A key is used for one stream."""
    encryptor = Cipher(AES128(key), CTR(bytes(16))).encryptor()
    return lambda count: np.frombuffer(encryptor.update(bytes(8 * count)), dtype="<u8")


def discrete_gaussian(deviation: float, count: int, words: Words) -> Integers:
    """So many independent numbers."""
    if not LEAST <= deviation <= MOST:
        raise ValueError(f"a deviation of {deviation:g} is not between {LEAST:g} and {MOST:g}")
    bits = math.ceil(math.log2(2 * REACH * deviation))
    found = [np.zeros(0, np.int64)]
    missing = count
    while missing > 0:
        batch = min(BATCH, 16 * missing + 64)
        candidates = (words(batch) >> np.uint64(64 - bits)).astype(np.int64) - (1 << (bits - 1))
        chance = np.exp(np.square(candidates / deviation) * -0.5)
        found.append(candidates[uniform(words, batch) < chance][:missing])
        missing -= len(found[-1])
    return np.concatenate(found)


def uniform(words: Words, count: int) -> NDArray[np.float64]:
    """Numbers between 0 and 1 of 128 bits, so that small ones are precise, too."""
    return np.ldexp(words(count).astype(np.float64), -64) + np.ldexp(words(count).astype(np.float64), -128)
