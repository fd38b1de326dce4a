"""Pull, clip, decay, momentum, step and rounding of a row of parameters, in two passes over memory.

The first pass gives the length of the pulled gradient, the second does the rest. Gradients of filters are read in
bfloat16, as convolutions leave them, from a row of their own; of the two rows, each is read only in its part. See
`static.Descent`.
"""
# mypy: ignore-errors

import triton
import triton.language as tl

BLOCK = 4096


def pieces(row):
    return triton.cdiv(row.numel(), BLOCK)


def squares(grad, low_grad, filters, row, anchor, twice, partial):
    """Σ (g + 2λ(p − a))² by pieces; the pull covers as much of the row as there is an anchor for."""
    pulled = 0 if anchor is None else anchor.numel()
    _squares[(pieces(row),)](
        grad, low_grad, filters.start, filters.stop, row, row if anchor is None else anchor, partial, row.numel(),
        pulled, twice, pulled > 0, BLOCK,
    )  # fmt: skip


def descend(grad, low_grad, filters, row, moment, anchor, low, excess, twice, lr, momentum, decay):
    """One step of SGD in place, and the row rounded to bfloat16."""
    pulled = 0 if anchor is None else anchor.numel()
    _descend[(pieces(row),)](
        grad, low_grad, filters.start, filters.stop, row, moment, row if anchor is None else anchor, low, excess,
        row.numel(), pulled, twice, lr, momentum, decay, pulled > 0, BLOCK,
    )  # fmt: skip


@triton.jit
def _pulled(grad, low_grad, first, end, anchor, at, there, p, pulled, twice, PULL: tl.constexpr):
    low = (at >= first) & (at < end)
    g = tl.load(grad + at, mask=there & ~low, other=0.0)
    g += tl.load(low_grad + at, mask=low, other=0.0).to(tl.float32)
    if PULL:
        near = there & (at < pulled)
        g += tl.where(near, twice * (p - tl.load(anchor + at, mask=near, other=0.0)), 0.0)
    return g


@triton.jit
def _squares(grad, low_grad, first, end, row, anchor, partial, n, pulled, twice, PULL: tl.constexpr, B: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    there = at < n
    p = tl.load(row + at, mask=there, other=0.0) if PULL else 0.0
    g = _pulled(grad, low_grad, first, end, anchor, at, there, p, pulled, twice, PULL)
    tl.store(partial + tl.program_id(0), tl.sum(g * g, 0))


@triton.jit
def _descend(
    grad, low_grad, first, end, row, moment, anchor, low, excess, n, pulled, twice, lr, momentum, decay,
    PULL: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * B + tl.arange(0, B)
    there = at < n
    p = tl.load(row + at, mask=there, other=0.0)
    g = _pulled(grad, low_grad, first, end, anchor, at, there, p, pulled, twice, PULL) / tl.load(excess) + decay * p
    m = momentum * tl.load(moment + at, mask=there, other=0.0) + g
    p -= lr * m
    tl.store(moment + at, m, mask=there)
    tl.store(row + at, p, mask=there)
    tl.store(low + at, p.to(low.dtype.element_ty), mask=there)
