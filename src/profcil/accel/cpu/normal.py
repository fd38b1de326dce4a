"""Standard normal numbers on a CPU: those of torch up to rounding, in a quarter of the time.

Torch advances its Mersenne twister one number at a time. `normal.c` advances the same state by whole SIMD vectors, and
leaves it where torch would. The layout of a generator's state is no stable API of torch, so a self-check compares both
before the first draw.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from profcil.accel.loader import c_library

SIZE = 5056  # bytes of a generator's state
LEFT = 8  # offset of: the number of unused words plus one
NEXT = 16  # offset of: the index of the next word
STATE = 24  # offset of: the words, eight bytes each
WORDS = 624  # words of the Mersenne twister
LEAST = 16  # for fewer numbers torch uses another algorithm


def normal_(out: Tensor, rng: torch.Generator) -> Tensor:
    """Fills a tensor with standard normal numbers."""
    is_supported_type = out.device.type == "cpu" and out.dtype == torch.float32
    fits = is_supported_type and out.is_contiguous() and out.numel() >= LEAST
    library = checked_library() if fits else None
    if library is None:
        return out.normal_(generator=rng)
    return draw_(library, out, rng)


def draw_(library: ctypes.CDLL, out: Tensor, rng: torch.Generator) -> Tensor:
    """Fills a tensor by the compiled library and updates the generator's state."""
    state = rng.get_state()
    left = state[LEFT : LEFT + 4].view(torch.int32)
    following = state[NEXT:STATE].view(torch.int64)
    stored = state[STATE : STATE + 8 * WORDS].view(torch.int64)
    words = stored.to(torch.int32)  # bit patterns of unsigned numbers
    used = WORDS if int(left) == 1 else int(following)
    words_pointer = ctypes.c_void_p(words.data_ptr())
    out_pointer = ctypes.c_void_p(out.data_ptr())
    used = library.normal(words_pointer, ctypes.c_int64(used), out_pointer, ctypes.c_int64(out.numel()))
    stored.copy_(words.long() & 0xFFFFFFFF)
    left.fill_(WORDS - used + 1)
    following.fill_(used)
    rng.set_state(state)
    return out


def check() -> str:
    """The result of the self-check of the compiled draws: "passed", "failed" or "no compiler"."""
    if c_library("cpu/normal.c") is None:
        return "no compiler"
    return "passed" if checked_library() is not None else "failed"


@cache
def checked_library() -> ctypes.CDLL | None:
    """The compiled library if its self-check passes."""
    library = c_library("cpu/normal.c")
    return library if library is not None and agrees(library) else None


def agrees(library: ctypes.CDLL) -> bool:
    """The self-check: the same numbers as torch up to rounding, and the same final state."""
    library.normal.restype = ctypes.c_int64
    theirs = torch.Generator().manual_seed(0)
    ours = torch.Generator().manual_seed(0)
    if len(ours.get_state()) != SIZE:
        return False
    for count in (LEAST, WORDS + 5):  # within the state's words; beyond them, with a remainder
        expected = torch.empty(count).normal_(generator=theirs)
        drawn = draw_(library, torch.empty(count), ours)
        if not torch.allclose(drawn, expected, rtol=1e-4, atol=1e-5):
            return False
    return torch.equal(theirs.get_state(), ours.get_state())
