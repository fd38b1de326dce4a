"""Every draw has an address; there is no global seeding.

An address is the seed followed by who draws, where and what for: `generator(seed, "participation", p, r)`. The same
address gives the same numbers on any machine, in any order and with any number of workers.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch


def number(seed: int, *address: object) -> int:
    """A 63-bit number that depends on the whole address and nothing else."""
    text = "/".join([str(int(seed)), *map(str, address)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def generator(seed: int, *address: object) -> np.random.Generator:
    """The numpy generator that lives at an address."""
    return np.random.Generator(np.random.PCG64(number(seed, *address)))


def torch_generator(seed: int, *address: object, device: str | torch.device = "cpu") -> torch.Generator:
    """The torch generator that lives at an address, on the device that will use it."""
    import torch

    return torch.Generator(device=device).manual_seed(number(seed, *address))
