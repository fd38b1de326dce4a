"""The gradient of cross_entropy(tail.classify(u), y, allowed) for a stack of adapters and linear heads, in six kernels.

Rehearsal is many steps on little data: launching torch's kernels takes longer than computing them. Here every matrix
product is one fused kernel, with the normalisation, ReLU or softmax before or after it. A program computes some columns
of some examples of one client, so that even a few clients occupy a GPU. Products have float32 precision, as three
TensorFloat32 products each ("tf32x3"). The reference is `cross_entropy` with autograd.
"""
# mypy: ignore-errors

from math import prod

import torch
import triton
import triton.language as tl
from torch import Tensor

FEW, MANY, CLIENTS = 16, 32, 8  # examples of a program: in stacks of up to CLIENTS clients, and in larger ones
DEEP = 64  # block size along the summed axis
NARROW, WIDE = 32, 64  # columns of a program: for long sums, and for short ones
SLIM = 16  # columns of a program of `_before`
HOW = {"num_warps": 4, "num_stages": 3}


class HeadGradient:
    """The buffers for stacks of one shape. `shapes`: a client's tensors in the order of its row."""

    def __init__(self, flat: Tensor, shapes: dict[str, torch.Size], batch: int) -> None:
        (narrow, d), classes, self.width = shapes["down"], shapes["weight"][0], len(flat)
        self.at, end = {}, 0  # offset of each tensor in a row
        for name, shape in shapes.items():
            self.at[name.upper()], end = end, end + prod(shape)
        self.rows = FEW if self.width <= CLIENTS else MANY
        self.parts = triton.cdiv(batch, self.rows)
        self.sizes = {"B": batch, "D": d, "N": narrow, "C": classes}
        columns = {"normed": d, "hidden": narrow, "out": d, "logits": classes, "slope": classes, "dz": d, "dh": narrow}
        self.room = {name: flat.new_empty(self.width, batch, n) for name, n in columns.items()}
        self.losses = flat.new_empty(self.width, self.parts)

    def __call__(self, flat: Tensor, u: Tensor, y: Tensor, number: Tensor, allowed: Tensor, grad: Tensor) -> None:
        """Writes the gradient of every row for the next batch of the tables u and y, and partial sums of its loss."""
        at, r, (b, d, n, c) = self.at, self.room, self.sizes.values()
        due, short, long = (number, len(u), self.width, flat, flat.stride(0)), {"J": WIDE}, {"K": DEEP, "J": NARROW}
        narrow, classes = max(16, triton.next_power_of_2(n)), max(16, triton.next_power_of_2(c))
        _hidden[(self.width, triton.cdiv(b, FEW), triton.cdiv(n, NARROW))](  # more examples would spill registers
            u, *due, r["normed"], r["hidden"], b, d, n, FEW, triton.next_power_of_2(d),
            at["SCALE"], at["SHIFT"], at["DOWN"], at["DOWN_BIAS"], **long, **HOW,
        )  # fmt: skip
        _times[self.grid(d, WIDE)](
            u, *due, r["hidden"], r["out"], b, n, d, self.rows, at["UP"], at["UP_BIAS"],
            TURNED=True, ADDS=True, RECTIFIED=False, K=DEEP, **short, **HOW,
        )  # fmt: skip
        _times[self.grid(c, NARROW)](
            u, *due, r["out"], r["logits"], b, d, c, self.rows, at["WEIGHT"], 0,
            TURNED=True, ADDS=False, RECTIFIED=False, **long, **HOW,
        )  # fmt: skip
        _softmax[self.grid(d, WIDE)](
            y, *due, allowed, r["logits"], r["slope"], r["dz"], self.losses, b, d, c, self.rows, classes,
            at["WEIGHT"], **short, **(HOW if classes <= 128 else HOW | {"num_warps": 8}),
        )  # fmt: skip
        _times[self.grid(n, NARROW)](
            r["hidden"], *due, r["dz"], r["dh"], b, d, n, self.rows, at["UP"], 0,
            TURNED=False, ADDS=False, RECTIFIED=True, **long, **HOW,
        )  # fmt: skip
        tiles = [triton.cdiv(i, NARROW) * triton.cdiv(j, WIDE) for i, j in ((c, d), (d, n))]
        _over[(self.width, sum(tiles) + triton.cdiv(d, SLIM))](
            flat, r["normed"], r["hidden"], r["out"], r["slope"], r["dz"], r["dh"], grad, flat.stride(0),
            grad.stride(0), *tiles, **self.sizes, **at, K=triton.next_power_of_2(b), BN=narrow, TALL=NARROW, SLIM=SLIM,
            **short, num_warps=4,
        )  # fmt: skip

    def grid(self, columns: int, tile: int) -> tuple[int, int, int]:
        return self.width, self.parts, triton.cdiv(columns, tile)

    def count(self, total: Tensor, number: Tensor, active: Tensor) -> None:
        """Adds the losses of the active clients to `total`, and 1 to the step counter."""
        _count[(1,)](self.losses, total, number, active, len(total), self.parts, triton.next_power_of_2(len(total)))


@triton.jit
def _read(x, i, j, stride, high, wide):
    return tl.load(x + i[:, None] * stride + j[None, :], mask=(i < high)[:, None] & (j < wide)[None, :], other=0.0)


@triton.jit
def _turned(x, i, j, stride, high, wide):
    """The transposed block, [j, i]."""
    return tl.load(x + i[None, :] * stride + j[:, None], mask=(i < high)[None, :] & (j < wide)[:, None], other=0.0)


@triton.jit
def _write(x, i, j, stride, high, wide, value):
    tl.store(x + i[:, None] * stride + j[None, :], value, mask=(i < high)[:, None] & (j < wide)[None, :])


@triton.jit
def _row(x, j, wide):
    return tl.load(x + j, mask=j < wide, other=0.0)


@triton.jit
def _place(R: tl.constexpr, J: tl.constexpr):
    """This program's client, examples and columns."""
    return tl.program_id(0), tl.program_id(1) * R + tl.arange(0, R), tl.program_id(2) * J + tl.arange(0, J)


@triton.jit
def _due(table, number, chunk, width, who, size):
    """The address of the client's next batch."""
    return table + ((tl.load(number) % chunk) * width + who) * size


@triton.jit
def _hidden(
    u, number, chunk, width, flat, stride, normed, hidden, B: tl.constexpr, D: tl.constexpr, N: tl.constexpr,
    R: tl.constexpr, ALL: tl.constexpr, SCALE: tl.constexpr, SHIFT: tl.constexpr, DOWN: tl.constexpr,
    DOWN_BIAS: tl.constexpr, K: tl.constexpr, J: tl.constexpr,
):  # fmt: skip
    """n = LayerNorm(u), h = ReLU(down (scale n + shift) + bias)."""
    who, m, j = _place(R, J)
    u, w, normed = _due(u, number, chunk, width, who, B * D), flat + who * stride, normed + who * B * D
    every = tl.arange(0, ALL)
    whole = _read(u, m, every, D, B, D)
    mean = tl.sum(whole, 1) / D
    off = tl.where((every < D)[None, :], whole - mean[:, None], 0.0)
    inverse = 1.0 / tl.sqrt(tl.sum(off * off, 1) / D + 1e-5)
    if tl.program_id(2) == 0:
        _write(normed, m, every, D, B, D, off * inverse[:, None])
    h = tl.zeros((R, J), tl.float32)
    for k in range(0, D, K):
        f = k + tl.arange(0, K)
        x = (_read(u, m, f, D, B, D) - mean[:, None]) * inverse[:, None]
        v = tl.where((f < D)[None, :], x * _row(w + SCALE, f, D)[None, :] + _row(w + SHIFT, f, D)[None, :], 0.0)
        h = tl.dot(v, _turned(w + DOWN, j, f, D, N, D), h, input_precision="tf32x3")
    h = tl.maximum(h + _row(w + DOWN_BIAS, j, N)[None, :], 0.0)
    _write(hidden + who * B * N, m, j, N, B, N, h)


@triton.jit
def _times(
    other, number, chunk, width, flat, stride, a, made, B: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr,
    R: tl.constexpr, AT: tl.constexpr, BIAS: tl.constexpr, TURNED: tl.constexpr, ADDS: tl.constexpr,
    RECTIFIED: tl.constexpr, K: tl.constexpr, J: tl.constexpr,
):  # fmt: skip
    """The product of `a` with a client's matrix or its transpose. ADDS: plus the batch and a bias. RECTIFIED: masked by
    `other` > 0."""
    who, m, j = _place(R, J)
    a, w, total = a + who * B * IN, flat + who * stride, tl.zeros((R, J), tl.float32)
    for k in range(0, IN, K):
        f = k + tl.arange(0, K)
        b = _turned(w + AT, j, f, IN, OUT, IN) if TURNED else _read(w + AT, f, j, OUT, IN, OUT)
        total = tl.dot(_read(a, m, f, IN, B, IN), b, total, input_precision="tf32x3")
    if ADDS:
        u = _due(other, number, chunk, width, who, B * OUT)
        total += _read(u, m, j, OUT, B, OUT) + _row(w + BIAS, j, OUT)[None, :]
    if RECTIFIED:
        total = tl.where(_read(other + who * B * OUT, m, j, OUT, B, OUT) > 0, total, 0.0)
    _write(made + who * B * OUT, m, j, OUT, B, OUT, total)


@triton.jit
def _softmax(
    y, number, chunk, width, flat, stride, allowed, logits, slope, dz, losses, B: tl.constexpr, D: tl.constexpr,
    C: tl.constexpr, R: tl.constexpr, ALL: tl.constexpr, WEIGHT: tl.constexpr, J: tl.constexpr,
):  # fmt: skip
    """g = (softmax − one-hot) / B over the allowed classes, and dz = g weight. The programs of the first columns also
    store g and the loss."""
    who, m, j = _place(R, J)
    q, y = tl.arange(0, ALL), _due(y, number, chunk, width, who, B)
    may = tl.load(allowed + who * C + q, mask=q < C, other=0) != 0
    value = tl.where(may[None, :], _read(logits + who * B * C, m, q, C, B, C), float("-inf"))
    top = tl.max(value, 1)
    e = tl.exp(value - top[:, None])
    total = tl.sum(e, 1)
    true = q[None, :] == tl.load(y + m, mask=m < B, other=0)[:, None]
    g = tl.where(may[None, :] & (m < B)[:, None], (e / total[:, None] - true.to(tl.float32)) / B, 0.0)
    if tl.program_id(2) == 0:
        loss = tl.log(total) + top - tl.sum(tl.where(true, value, 0.0), 1)
        tl.store(losses + who * tl.num_programs(1) + tl.program_id(1), tl.sum(tl.where(m < B, loss, 0.0), 0) / B)
        _write(slope + who * B * C, m, q, C, B, C, g)
    d = tl.dot(g, _read(flat + who * stride + WEIGHT, q, j, D, C, D), input_precision="tf32x3")
    _write(dz + who * B * D, m, j, D, B, D, d)


@triton.jit
def _over(
    flat, normed, hidden, out, slope, dz, dh, grad, stride, apart, first, second, B: tl.constexpr, D: tl.constexpr,
    N: tl.constexpr, C: tl.constexpr, SCALE: tl.constexpr, SHIFT: tl.constexpr, DOWN: tl.constexpr,
    DOWN_BIAS: tl.constexpr, UP: tl.constexpr, UP_BIAS: tl.constexpr, WEIGHT: tl.constexpr, K: tl.constexpr,
    BN: tl.constexpr, TALL: tl.constexpr, SLIM: tl.constexpr, J: tl.constexpr,
):  # fmt: skip
    """Sums over the batch: tiles of the gradients of the head and of `up` with its bias, then columns of `_before`."""
    who, tile = tl.program_id(0), tl.program_id(1)
    m, w, to = tl.arange(0, K), flat + who * stride, grad + who * apart
    if tile < first:
        i, j = _spot(tile, D, TALL, J)
        g = _turned(slope + who * B * C, m, i, C, B, C)
        made = tl.dot(g, _read(out + who * B * D, m, j, D, B, D), input_precision="tf32x3")
        _write(to + WEIGHT, i, j, D, C, D, made)
    elif tile < first + second:
        i, j = _spot(tile - first, N, TALL, J)
        g = _turned(dz + who * B * D, m, i, D, B, D)
        made = tl.dot(g, _read(hidden + who * B * N, m, j, N, B, N), input_precision="tf32x3")
        _write(to + UP, i, j, N, D, N, made)
        tl.store(to + UP_BIAS + i, tl.sum(g, 1), mask=i < tl.where((tile - first) % tl.cdiv(N, J) == 0, D, 0))
    else:
        column = (tile - first - second) * SLIM
        _before(normed, dh, w, to, who, m, column, B, D, N, SCALE, SHIFT, DOWN, DOWN_BIAS, BN, SLIM)


@triton.jit
def _spot(tile, columns, TALL: tl.constexpr, J: tl.constexpr):
    across = tl.cdiv(columns, J)
    return (tile // across) * TALL + tl.arange(0, TALL), (tile % across) * J + tl.arange(0, J)


@triton.jit
def _before(
    normed, dh, w, to, who, m, column, B: tl.constexpr, D: tl.constexpr, N: tl.constexpr, SCALE: tl.constexpr,
    SHIFT: tl.constexpr, DOWN: tl.constexpr, DOWN_BIAS: tl.constexpr, BN: tl.constexpr, J: tl.constexpr,
):  # fmt: skip
    """Some columns of the gradients of `scale`, `shift`, `down` and its bias. With G = Σ n dhᵀ and b = Σ dh, the
    gradient of `down`ᵀ is scale G + shift bᵀ, that of `scale` the row sums of `down`ᵀ ⊙ G, of `shift` `down`ᵀ b."""
    i, j = tl.arange(0, BN), column + tl.arange(0, J)
    g = _read(dh + who * B * N, m, i, N, B, N)
    made = tl.dot(_turned(normed + who * B * D, m, j, D, B, D), g, input_precision="tf32x3")
    down, bias = _turned(w + DOWN, i, j, D, N, D), tl.sum(g, 0)
    tl.store(to + SCALE + j, tl.sum(down * made, 1), mask=j < D)
    tl.store(to + SHIFT + j, tl.sum(down * bias[None, :], 1), mask=j < D)
    made = made * _row(w + SCALE, j, D)[:, None] + _row(w + SHIFT, j, D)[:, None] * bias[None, :]
    tl.store(to + DOWN + i[None, :] * D + j[:, None], made, mask=(i < N)[None, :] & (j < D)[:, None])
    tl.store(to + DOWN_BIAS + i, bias, mask=i < tl.where(column == 0, N, 0))


@triton.jit
def _count(losses, total, number, active, width, parts, W: tl.constexpr):
    i = tl.arange(0, W)
    at_work = (i < width) & (tl.load(active + i, mask=i < width, other=0) != 0)
    loss = tl.load(total + i, mask=i < width, other=0.0)
    for part in range(parts):
        loss += tl.load(losses + i * parts + part, mask=at_work, other=0.0)
    tl.store(total + i, loss, mask=i < width)
    tl.store(number, tl.load(number) + 1)
