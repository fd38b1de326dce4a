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
    anchored = 0 if anchor is None else anchor.numel()
    if anchor is None:
        anchor = row  # a placeholder that is not read, also in the next functions
    grid = (pieces(row),)
    _squares[grid](
        grad, low_grad, filters.start, filters.stop, row, anchor, partial, row.numel(),
        anchored, twice, anchored > 0, BLOCK,
    )  # fmt: skip


def descend(grad, low_grad, filters, row, moment, anchor, low, excess, twice, lr, momentum, decay):
    """One step of SGD in place; also writes the row rounded to bfloat16."""
    anchored = 0 if anchor is None else anchor.numel()
    if anchor is None:
        anchor = row
    grid = (pieces(row),)
    _descend[grid](
        grad, low_grad, filters.start, filters.stop, row, moment, anchor, low, excess,
        row.numel(), anchored, twice, lr, momentum, decay, anchored > 0, BLOCK,
    )  # fmt: skip


def squares_of_rows(grad, rows, anchor, twice, partial):
    """`squares` for each row of a matrix. The anchor covers all columns, or there is none."""
    proximal = anchor is not None
    if anchor is None:
        anchor = rows
    grid = (pieces(rows), len(rows))
    _squares_of_rows[grid](grad, rows, anchor, partial, rows.shape[1], rows.stride(0), twice, proximal, BLOCK)


def descend_rows(grad, rows, moment, anchor, partial, clip, active, twice, lr, momentum, decay):
    """One step of SGD in place for every active row, clipped by the norm from the pieces."""
    proximal = anchor is not None
    if anchor is None:
        anchor = rows
    grid = (pieces(rows), len(rows))
    most_pieces = triton.next_power_of_2(pieces(rows))
    _descend_rows[grid](
        grad, rows, moment, anchor, partial, active, rows.shape[1], rows.stride(0), clip,
        twice, lr, momentum, decay, clip > 0, proximal, BLOCK, most_pieces,
    )  # fmt: skip


@triton.jit
def _read(pointer, mask):
    return tl.load(pointer, mask=mask, other=0.0)


@triton.jit
def _gradient(grad, low_grad, first, end, anchor, offset, exists, p, anchored, twice, PROXIMAL: tl.constexpr):
    """The gradient of a row, from both of its buffers, with the proximal term."""
    low = (offset >= first) & (offset < end)
    g = _read(grad + offset, exists & ~low)
    g += _read(low_grad + offset, low).to(tl.float32)
    if PROXIMAL:
        has_anchor = exists & (offset < anchored)
        difference = p - _read(anchor + offset, has_anchor)
        g += tl.where(has_anchor, twice * difference, 0.0)
    return g


@triton.jit
def _squares(
    grad, low_grad, first, end, row, anchor, partial, n, anchored, twice, PROXIMAL: tl.constexpr, B: tl.constexpr
):
    offset = tl.program_id(0) * B + tl.arange(0, B)
    exists = offset < n
    p = _read(row + offset, exists) if PROXIMAL else 0.0
    g = _gradient(grad, low_grad, first, end, anchor, offset, exists, p, anchored, twice, PROXIMAL)
    tl.store(partial + tl.program_id(0), tl.sum(g * g, 0))


@triton.jit
def _descend(
    grad, low_grad, first, end, row, moment, anchor, low, excess, n, anchored, twice, lr, momentum, decay,
    PROXIMAL: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    offset = tl.program_id(0) * B + tl.arange(0, B)
    exists = offset < n
    p = _read(row + offset, exists)
    g = _gradient(grad, low_grad, first, end, anchor, offset, exists, p, anchored, twice, PROXIMAL)
    g = g / tl.load(excess) + decay * p
    m = momentum * _read(moment + offset, exists) + g
    p -= lr * m
    tl.store(moment + offset, m, mask=exists)
    tl.store(row + offset, p, mask=exists)
    tl.store(low + offset, p.to(low.dtype.element_ty), mask=exists)


@triton.jit
def _squares_of_rows(grad, rows, anchor, partial, n, stride, twice, PROXIMAL: tl.constexpr, B: tl.constexpr):
    piece = tl.program_id(0)
    row = tl.program_id(1)
    offset = piece * B + tl.arange(0, B)
    exists = offset < n
    g = _read(grad + row * n + offset, exists)
    if PROXIMAL:
        p = _read(rows + row * stride + offset, exists)
        a = _read(anchor + row * n + offset, exists)
        g += twice * (p - a)
    tl.store(partial + row * tl.num_programs(0) + piece, tl.sum(g * g, 0))


@triton.jit
def _descend_rows(
    grad, rows, moment, anchor, partial, active, n, stride, clip, twice, lr, momentum, decay, CLIP: tl.constexpr,
    PROXIMAL: tl.constexpr, B: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1)
    piece = tl.arange(0, P)
    number = tl.num_programs(0)
    offset = tl.program_id(0) * B + tl.arange(0, B)
    is_active = tl.load(active + row) != 0
    exists = offset < tl.where(is_active, n, 0)
    p = _read(rows + row * stride + offset, exists)
    g = _read(grad + row * n + offset, exists)
    if PROXIMAL:
        a = _read(anchor + row * n + offset, exists)
        g += twice * (p - a)
    if CLIP:
        squares = _read(partial + row * number + piece, piece < number)
        norm = tl.sqrt(tl.sum(squares, 0))
        g = g / tl.maximum((norm + 1e-6) / clip, 1.0)
    g += decay * p
    m = momentum * _read(moment + row * n + offset, exists) + g
    tl.store(moment + row * n + offset, m, mask=exists)
    tl.store(rows + row * stride + offset, p - lr * m, mask=exists)
