"""Standard normal numbers on a CPU: those that torch draws but for rounding, in a quarter of its time.

Torch turns its generator one number at a time; `normal.c` turns the same one by whole vectors, and leaves it where
torch would. How torch keeps a generator's state is not promised to anyone, so both are compared before the first draw.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from profcil.accel.loader import built

SIZE = 5056  # bytes of a state
LEFT, NEXT, STATE = 8, 16, 24  # bytes at which it holds: words left and one; the next one; the words, eight each
WORDS, LEAST = 624, 16  # fewer numbers than that torch draws in another way


def normal_(out: Tensor, rng: torch.Generator) -> Tensor:
    """Fills a tensor with standard normal numbers."""
    fits = out.device.type == "cpu" and out.dtype == torch.float32 and out.is_contiguous() and out.numel() >= LEAST
    library = trusted() if fits else None
    return out.normal_(generator=rng) if library is None else draw_(library, out, rng)


def draw_(library: ctypes.CDLL, out: Tensor, rng: torch.Generator) -> Tensor:
    state = rng.get_state()
    left, following = state[LEFT : LEFT + 4].view(torch.int32), state[NEXT:STATE].view(torch.int64)
    held = state[STATE : STATE + 8 * WORDS].view(torch.int64)
    words = held.to(torch.int32)  # of which only the bits count
    used = WORDS if int(left) == 1 else int(following)
    where = [ctypes.c_void_p(t.data_ptr()) for t in (words, out)]
    used = library.normal(where[0], ctypes.c_int64(used), where[1], ctypes.c_int64(out.numel()))
    held.copy_(words.long() & 0xFFFFFFFF)
    left.fill_(WORDS - used + 1)
    following.fill_(used)
    rng.set_state(state)
    return out


def check() -> str:
    """Whether the compiled draws are used, in a word."""
    if built("cpu/normal.c") is None:
        return "no compiler"
    return "passed" if trusted() is not None else "failed"


@cache
def trusted() -> ctypes.CDLL | None:
    library = built("cpu/normal.c")
    return library if library is not None and agrees(library) else None


def agrees(library: ctypes.CDLL) -> bool:
    """Whether it draws what torch draws, and leaves the generator where torch does."""
    library.normal.restype = ctypes.c_int64
    theirs, ours = (torch.Generator().manual_seed(0) for _ in range(2))
    if len(ours.get_state()) != SIZE:
        return False
    for count in (LEAST, WORDS + 5):  # within the words that there are, beyond them, and with a rest
        expected = torch.empty(count).normal_(generator=theirs)
        if not torch.allclose(draw_(library, torch.empty(count), ours), expected, rtol=1e-4, atol=1e-5):
            return False
    return torch.equal(theirs.get_state(), ours.get_state())
