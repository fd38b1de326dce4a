"""Fused SGD: proximal term, clipping, weight decay, momentum, update and rounding, in two passes over memory.

The first pass computes the norm of the gradient with the proximal term, the second does the rest. For one row, the
gradients of filters are read in bfloat16 from a second row. For a matrix with one client in each row, inactive rows are
not touched. See `updates.FusedUpdate` and `updates.FusedMaskedUpdate`.
"""
# mypy: ignore-errors

import triton
import triton.language as tl

BLOCK = 4096


def pieces(row):
    return triton.cdiv(row.shape[-1], BLOCK)


def squares(grad, low_grad, filters, row, anchor, twice, partial):
    """Σ (g + 2λ(p − a))² by pieces. The proximal term covers the first columns, as many as the anchor has."""
    pulled = 0 if anchor is None else anchor.numel()
    _squares[(pieces(row),)](
        grad, low_grad, filters.start, filters.stop, row, row if anchor is None else anchor, partial, row.numel(),
        pulled, twice, pulled > 0, BLOCK,
    )  # fmt: skip


def descend(grad, low_grad, filters, row, moment, anchor, low, excess, twice, lr, momentum, decay):
    """One step of SGD in place; also writes the row rounded to bfloat16."""
    pulled = 0 if anchor is None else anchor.numel()
    _descend[(pieces(row),)](
        grad, low_grad, filters.start, filters.stop, row, moment, row if anchor is None else anchor, low, excess,
        row.numel(), pulled, twice, lr, momentum, decay, pulled > 0, BLOCK,
    )  # fmt: skip


def squares_of_rows(grad, rows, anchor, twice, partial):
    """`squares` for each row of a matrix. The anchor covers all columns, or there is none."""
    _squares_of_rows[(pieces(rows), len(rows))](
        grad, rows, rows if anchor is None else anchor, partial, rows.shape[1], rows.stride(0), twice,
        anchor is not None, BLOCK,
    )  # fmt: skip


def descend_rows(grad, rows, moment, anchor, partial, clip, active, twice, lr, momentum, decay):
    """One step of SGD in place for every active row, clipped by the norm from the pieces."""
    _descend_rows[(pieces(rows), len(rows))](
        grad, rows, moment, rows if anchor is None else anchor, partial, active, rows.shape[1], rows.stride(0), clip,
        twice, lr, momentum, decay, clip > 0, anchor is not None, BLOCK, triton.next_power_of_2(pieces(rows)),
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


@triton.jit
def _squares_of_rows(grad, rows, anchor, partial, n, stride, twice, PULL: tl.constexpr, B: tl.constexpr):
    piece, row = tl.program_id(0), tl.program_id(1)
    at = piece * B + tl.arange(0, B)
    there = at < n
    g = tl.load(grad + row * n + at, mask=there, other=0.0)
    if PULL:
        p = tl.load(rows + row * stride + at, mask=there, other=0.0)
        g += twice * (p - tl.load(anchor + row * n + at, mask=there, other=0.0))
    tl.store(partial + row * tl.num_programs(0) + piece, tl.sum(g * g, 0))


@triton.jit
def _descend_rows(
    grad, rows, moment, anchor, partial, active, n, stride, clip, twice, lr, momentum, decay, CLIP: tl.constexpr,
    PULL: tl.constexpr, B: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    row, piece, number = tl.program_id(1), tl.arange(0, P), tl.num_programs(0)
    at = tl.program_id(0) * B + tl.arange(0, B)
    there = at < tl.where(tl.load(active + row) != 0, n, 0)
    p = tl.load(rows + row * stride + at, mask=there, other=0.0)
    g = tl.load(grad + row * n + at, mask=there, other=0.0)
    if PULL:
        g += twice * (p - tl.load(anchor + row * n + at, mask=there, other=0.0))
    if CLIP:
        squares = tl.load(partial + row * number + piece, mask=piece < number, other=0.0)
        g = g / tl.maximum((tl.sqrt(tl.sum(squares, 0)) + 1e-6) / clip, 1.0)
    g += decay * p
    m = momentum * tl.load(moment + row * n + at, mask=there, other=0.0) + g
    tl.store(moment + row * n + at, m, mask=there)
    tl.store(rows + row * stride + at, p - lr * m, mask=there)
