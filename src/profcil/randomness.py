"""Seeds derived from addresses; there is no global random state.

An address is a seed followed by who draws, where and for what: `generator(seed, "participation", position, round)`. The
same address gives the same numbers on any machine, in any order and with any number of workers.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch


def derive_seed(seed: int, *address: object) -> int:
    """A 63-bit seed that depends on the whole address and on nothing else."""
    parts = [str(int(seed)), *map(str, address)]
    text = "/".join(parts)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def derive_bytes(seed: int, *address: object, size: int) -> bytes:
    """Up to 64 bytes that depend on the whole address: the keys of a simulation. They are as secret as the seed."""
    text = "/".join([str(int(seed)), *map(str, address)])
    return hashlib.blake2b(text.encode(), digest_size=size).digest()


def generator(seed: int, *address: object) -> np.random.Generator:
    """A numpy generator for an address."""
    bits = np.random.PCG64(derive_seed(seed, *address))
    return np.random.Generator(bits)


def torch_generator(seed: int, *address: object, device: str | torch.device = "cpu") -> torch.Generator:
    """A torch generator for an address, on the device that uses it."""
    import torch

    return torch.Generator(device=device).manual_seed(derive_seed(seed, *address))
