"""The gradient of cross_entropy(tail.classify(u), y, allowed) for a stack of adapters and linear heads, in two kernels.

Rehearsal is many steps on little data, and step by step the library's kernels for it take longer to begin than to
compute. Here the first kernel takes some examples of one client all the way ahead and back, and leaves their parts in
the gradient; the second multiplies and adds these over the batch. Products are in float32 precision, each put together
from three in TensorFloat32. `cross_entropy` and autograd are the reference.
"""
# mypy: ignore-errors

from math import prod

import torch
import triton
import triton.language as tl
from torch import Tensor

EXAMPLES = 16  # of a program that goes ahead and back
DEEP, WARPS, STAGES = 64, 8, 2  # features at a time; where classes are many, half of them
TALL, WIDE = 32, 64  # a tile of what is multiplied over the batch


class Slopes:
    """What the kernels need for stacks of one shape: `shapes` of a client's tensors, in the order of its row."""

    def __init__(self, flat: Tensor, shapes: dict[str, torch.Size], batch: int) -> None:
        (narrow, d), classes, width = shapes["down"], shapes["weight"][0], len(flat)
        starts, at = {}, 0
        for name, shape in shapes.items():
            starts[name.upper()], at = at, at + prod(shape)
        self.parts = triton.cdiv(batch, EXAMPLES)
        room = [(batch, d), (batch, narrow), (batch, d), (batch, classes), (batch, d), (batch, narrow)]
        self.room = [flat.new_empty(width, *shape) for shape in (*room, (self.parts, 2, d))]
        self.losses = flat.new_empty(width, self.parts)
        self.sizes = {"B": batch, "D": d, "N": narrow, "C": classes, **starts}
        self.padded = {"BN": max(16, triton.next_power_of_2(narrow)), "BC": max(16, triton.next_power_of_2(classes))}
        self.deep = DEEP if max(self.padded.values()) <= 128 else DEEP // 2

    def __call__(self, flat: Tensor, u: Tensor, y: Tensor, number: Tensor, allowed: Tensor, grad: Tensor) -> None:
        """Writes the gradient of every row for the batch that is due of the tables u and y, and its loss by parts."""
        width, (b, d, n, c) = len(flat), (self.sizes[k] for k in "BDNC")
        _through[(width, self.parts)](
            u, y, number, allowed, flat, *self.room, self.losses, len(u), width, flat.stride(0),
            **self.sizes, **self.padded, R=EXAMPLES, K=self.deep, num_warps=WARPS, num_stages=STAGES,
        )  # fmt: skip
        tiles = [triton.cdiv(i, TALL) * triton.cdiv(j, WIDE) for i, j in ((c, d), (d, n), (n, d))]
        sides = triton.cdiv(max(d, n), WIDE)
        _over[(width, sum(tiles) + sides)](
            flat, *self.room, grad, flat.stride(0), grad.stride(0), self.parts, *tiles, **self.sizes,
            K=triton.next_power_of_2(b), TALL=TALL, WIDE=WIDE, num_warps=4,
        )  # fmt: skip

    def count(self, total: Tensor, number: Tensor, active: Tensor) -> None:
        """Adds the losses of those at work, and a step."""
        _count[(1,)](self.losses, total, number, active, len(total), self.parts, triton.next_power_of_2(len(total)))


@triton.jit
def _read(x, i, j, stride, high, wide):
    return tl.load(x + i[:, None] * stride + j[None, :], mask=(i < high)[:, None] & (j < wide)[None, :], other=0.0)


@triton.jit
def _turned(x, i, j, stride, high, wide):
    """The same block with rows as columns: [j, i]."""
    return tl.load(x + i[None, :] * stride + j[:, None], mask=(i < high)[None, :] & (j < wide)[:, None], other=0.0)


@triton.jit
def _write(x, i, j, stride, high, wide, value):
    tl.store(x + i[:, None] * stride + j[None, :], value, mask=(i < high)[:, None] & (j < wide)[None, :])


@triton.jit
def _row(x, j, J):
    return tl.load(x + j, mask=j < J, other=0.0)


@triton.jit
def _through(
    u, y, number, allowed, flat, normed, hidden, out, slope, dz, dh, sides, losses, chunk, width, stride,
    B: tl.constexpr, D: tl.constexpr, N: tl.constexpr, C: tl.constexpr, SCALE: tl.constexpr, SHIFT: tl.constexpr,
    DOWN: tl.constexpr, DOWN_BIAS: tl.constexpr, UP: tl.constexpr, UP_BIAS: tl.constexpr, WEIGHT: tl.constexpr,
    BN: tl.constexpr, BC: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Some examples of one client. What was left in memory is computed again where it is needed: other threads wrote
    it."""
    who, part = tl.program_id(0), tl.program_id(1)
    m, j, q = part * R + tl.arange(0, R), tl.arange(0, BN), tl.arange(0, BC)
    due = (tl.load(number) % chunk) * width + who
    u, y, w = u + due * B * D, y + due * B, flat + who * stride
    normed, out, dz = normed + who * B * D, out + who * B * D, dz + who * B * D
    hidden, dh, slope = hidden + who * B * N, dh + who * B * N, slope + who * B * C

    mean = tl.zeros((R,), tl.float32)
    for k in range(0, D, K):
        mean += tl.sum(_read(u, m, k + tl.arange(0, K), D, B, D), 1) / D
    var = tl.zeros((R,), tl.float32)
    for k in range(0, D, K):
        f = k + tl.arange(0, K)
        off = tl.where((f < D)[None, :], _read(u, m, f, D, B, D) - mean[:, None], 0.0)
        var += tl.sum(off * off, 1) / D
    inverse = 1.0 / tl.sqrt(var + 1e-5)

    h = tl.zeros((R, BN), tl.float32)
    for k in range(0, D, K):
        f = k + tl.arange(0, K)
        x = (_read(u, m, f, D, B, D) - mean[:, None]) * inverse[:, None]
        _write(normed, m, f, D, B, D, x)
        v = tl.where((f < D)[None, :], x * _row(w + SCALE, f, D)[None, :] + _row(w + SHIFT, f, D)[None, :], 0.0)
        h = tl.dot(v, _turned(w + DOWN, j, f, D, N, D), h, input_precision="tf32x3")
    h = tl.maximum(h + _row(w + DOWN_BIAS, j, N)[None, :], 0.0)
    _write(hidden, m, j, N, B, N, h)

    logits = tl.zeros((R, BC), tl.float32)
    for k in range(0, D, K):
        f = k + tl.arange(0, K)
        z = tl.dot(h, _turned(w + UP, f, j, N, D, N), input_precision="tf32x3")
        z += _read(u, m, f, D, B, D) + _row(w + UP_BIAS, f, D)[None, :]
        _write(out, m, f, D, B, D, z)
        logits = tl.dot(z, _turned(w + WEIGHT, q, f, D, C, D), logits, input_precision="tf32x3")

    may = tl.load(allowed + who * C + q, mask=q < C, other=0) != 0
    logits = tl.where(may[None, :], logits, float("-inf"))
    top = tl.max(logits, 1)
    e = tl.exp(logits - top[:, None])
    total = tl.sum(e, 1)
    true = q[None, :] == tl.load(y + m, mask=m < B, other=0)[:, None]
    loss = tl.log(total) + top - tl.sum(tl.where(true, logits, 0.0), 1)
    tl.store(losses + who * tl.num_programs(1) + part, tl.sum(tl.where(m < B, loss, 0.0), 0) / B)
    g = tl.where(may[None, :] & (m < B)[:, None], (e / total[:, None] - true.to(tl.float32)) / B, 0.0)
    _write(slope, m, q, C, B, C, g)

    back = tl.zeros((R, BN), tl.float32)
    for k in range(0, D, K):
        f = k + tl.arange(0, K)
        d = tl.dot(g, _read(w + WEIGHT, q, f, D, C, D), input_precision="tf32x3")
        _write(dz, m, f, D, B, D, d)
        back = tl.dot(d, _read(w + UP, f, j, N, D, N), back, input_precision="tf32x3")
    back = tl.where(h > 0, back, 0.0)
    _write(dh, m, j, N, B, N, back)

    sides += (who * tl.num_programs(1) + part) * 2 * D
    for k in range(0, D, K):
        f = k + tl.arange(0, K)
        dv = tl.dot(back, _read(w + DOWN, j, f, D, N, D), input_precision="tf32x3")
        x = (_read(u, m, f, D, B, D) - mean[:, None]) * inverse[:, None]
        tl.store(sides + f, tl.sum(dv * x, 0), mask=f < D)
        tl.store(sides + D + f, tl.sum(dv, 0), mask=f < D)


@triton.jit
def _over(
    flat, normed, hidden, out, slope, dz, dh, sides, grad, stride, apart, parts, first, second, third,
    B: tl.constexpr, D: tl.constexpr, N: tl.constexpr, C: tl.constexpr, SCALE: tl.constexpr, SHIFT: tl.constexpr,
    DOWN: tl.constexpr, DOWN_BIAS: tl.constexpr, UP: tl.constexpr, UP_BIAS: tl.constexpr, WEIGHT: tl.constexpr,
    K: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Tiles of the three matrices' gradients in turn, then pieces of the four vectors'."""
    who, tile = tl.program_id(0), tl.program_id(1)
    m, w, to = tl.arange(0, K), flat + who * stride, grad + who * apart
    normed, out, dz = normed + who * B * D, out + who * B * D, dz + who * B * D
    hidden, dh, slope = hidden + who * B * N, dh + who * B * N, slope + who * B * C
    if tile < first:
        i, f = _spot(tile, D, TALL, WIDE)
        _product(slope, _read(out, m, f, D, B, D), to + WEIGHT, m, i, f, B, C, D)
    elif tile < first + second:
        i, f = _spot(tile - first, N, TALL, WIDE)
        _product(dz, _read(hidden, m, f, N, B, N), to + UP, m, i, f, B, D, N)
    elif tile < first + second + third:
        i, f = _spot(tile - first - second, D, TALL, WIDE)
        v = _read(normed, m, f, D, B, D) * _row(w + SCALE, f, D)[None, :] + _row(w + SHIFT, f, D)[None, :]
        _product(dh, tl.where((m < B)[:, None], v, 0.0), to + DOWN, m, i, f, B, N, D)
    else:
        f = (tile - first - second - third) * WIDE + tl.arange(0, WIDE)
        tl.store(to + UP_BIAS + f, tl.sum(_read(dz, m, f, D, B, D), 0), mask=f < D)
        tl.store(to + DOWN_BIAS + f, tl.sum(_read(dh, m, f, N, B, N), 0), mask=f < N)
        one, two = tl.zeros((WIDE,), tl.float32), tl.zeros((WIDE,), tl.float32)
        for part in range(parts):
            at = sides + (who * parts + part) * 2 * D
            one += _row(at, f, D)
            two += _row(at + D, f, D)
        tl.store(to + SCALE + f, one, mask=f < D)
        tl.store(to + SHIFT + f, two, mask=f < D)


@triton.jit
def _spot(tile, columns, TALL: tl.constexpr, WIDE: tl.constexpr):
    across = tl.cdiv(columns, WIDE)
    return (tile // across) * TALL + tl.arange(0, TALL), (tile % across) * WIDE + tl.arange(0, WIDE)


@triton.jit
def _product(a, b, to, m, i, f, batch, high, wide):
    """aᵀ b, of which `b` is here already."""
    _write(to, i, f, wide, high, wide, tl.dot(_turned(a, m, i, high, batch, high), b, input_precision="tf32x3"))


@triton.jit
def _count(losses, total, number, active, width, parts, W: tl.constexpr):
    i = tl.arange(0, W)
    at_work = (i < width) & (tl.load(active + i, mask=i < width, other=0) != 0)
    loss = tl.load(total + i, mask=i < width, other=0.0)
    for part in range(parts):
        loss += tl.load(losses + i * parts + part, mask=at_work, other=0.0)
    tl.store(total + i, loss, mask=i < width)
    tl.store(number, tl.load(number) + 1)
