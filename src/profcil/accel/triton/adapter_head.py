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

FEW, MANY = 16, 32  # examples of a program: in stacks of up to CLIENTS clients, and in larger ones
CLIENTS = 8
DEEP = 64  # block size along the summed axis
NARROW, WIDE = 32, 64  # columns of a program: for long sums, and for short ones
SLIM = 16  # columns of a program of `_adapter_input_gradients`
LONG = {"K": DEEP, "J": NARROW}  # the blocks of a long sum
OPTIONS = {"num_warps": 4, "num_stages": 3}


class HeadGradient:
    """The buffers for stacks of one shape. `shapes`: a client's tensors in the order of its row."""

    def __init__(self, flat: Tensor, shapes: dict[str, torch.Size], batch: int) -> None:
        narrow, d = shapes["down"]
        classes = shapes["weight"][0]
        self.width = len(flat)
        self.offsets: dict[str, int] = {}  # of each tensor in a row
        end = 0
        for name, shape in shapes.items():
            self.offsets[name.upper()] = end
            end += prod(shape)
        self.rows = FEW if self.width <= CLIENTS else MANY
        self.parts = triton.cdiv(batch, self.rows)
        self.sizes = {"B": batch, "D": d, "N": narrow, "C": classes}
        columns = {
            "normed": d,
            "hidden": narrow,
            "out": d,
            "logits": classes,
            "dlogits": classes,
            "dz": d,
            "dh": narrow,
        }
        self.buffers = {name: flat.new_empty(self.width, batch, n) for name, n in columns.items()}
        self.losses = flat.new_empty(self.width, self.parts)

    def __call__(self, flat: Tensor, u: Tensor, y: Tensor, number: Tensor, allowed: Tensor, grad: Tensor) -> None:
        """Writes the gradient of every row for the next batch of the tables u and y, and partial sums of its loss."""
        batch_and_weights = (number, len(u), self.width, flat, flat.stride(0))
        self.write_logits(u, batch_and_weights)
        self.write_feature_gradients(y, allowed, batch_and_weights)
        self.write_weight_gradients(flat, grad)

    def write_logits(self, u: Tensor, batch_and_weights: tuple) -> None:
        """The forward pass."""
        at = self.offsets
        r = self.buffers
        b, d, n, c = self.sizes.values()
        all_inputs = triton.next_power_of_2(d)
        few_examples = triton.cdiv(b, FEW)  # more examples would spill registers
        grid = (self.width, few_examples, triton.cdiv(n, NARROW))
        _hidden[grid](
            u, *batch_and_weights, r["normed"], r["hidden"], b, d, n, FEW, all_inputs,
            at["SCALE"], at["SHIFT"], at["DOWN"], at["DOWN_BIAS"], **LONG, **OPTIONS,
        )  # fmt: skip
        _product[self.grid(d, WIDE)](
            u, *batch_and_weights, r["hidden"], r["out"], b, n, d, self.rows, at["UP"], at["UP_BIAS"],
            TRANSPOSED=True, ADDS=True, RECTIFIED=False, K=DEEP, J=WIDE, **OPTIONS,
        )  # fmt: skip
        _product[self.grid(c, NARROW)](
            u, *batch_and_weights, r["out"], r["logits"], b, d, c, self.rows, at["WEIGHT"], 0,
            TRANSPOSED=True, ADDS=False, RECTIFIED=False, **LONG, **OPTIONS,
        )  # fmt: skip

    def write_feature_gradients(self, y: Tensor, allowed: Tensor, batch_and_weights: tuple) -> None:
        """The losses, and the gradients of logits, z and h."""
        at = self.offsets
        r = self.buffers
        b, d, n, c = self.sizes.values()
        all_classes = max(16, triton.next_power_of_2(c))
        options = OPTIONS if all_classes <= 128 else OPTIONS | {"num_warps": 8}
        _softmax[self.grid(d, WIDE)](
            y, *batch_and_weights, allowed, r["logits"], r["dlogits"], r["dz"], self.losses, b, d, c, self.rows,
            all_classes, at["WEIGHT"], J=WIDE, **options,
        )  # fmt: skip
        _product[self.grid(n, NARROW)](
            r["hidden"], *batch_and_weights, r["dz"], r["dh"], b, d, n, self.rows, at["UP"], 0,
            TRANSPOSED=False, ADDS=False, RECTIFIED=True, **LONG, **OPTIONS,
        )  # fmt: skip

    def write_weight_gradients(self, flat: Tensor, grad: Tensor) -> None:
        """The gradients of adapter and head, from those of the features."""
        r = self.buffers
        b, d, n, c = self.sizes.values()
        head_tiles = triton.cdiv(c, NARROW) * triton.cdiv(d, WIDE)
        up_tiles = triton.cdiv(d, NARROW) * triton.cdiv(n, WIDE)
        tiles = head_tiles + up_tiles + triton.cdiv(d, SLIM)
        all_hidden = max(16, triton.next_power_of_2(n))
        all_examples = triton.next_power_of_2(b)
        features = (r["normed"], r["hidden"], r["out"])
        gradients = (r["dlogits"], r["dz"], r["dh"])
        strides = (flat.stride(0), grad.stride(0))
        _batch_sums[(self.width, tiles)](
            flat, *features, *gradients, grad, *strides, head_tiles, up_tiles, **self.sizes, **self.offsets,
            K=all_examples, BN=all_hidden, TALL=NARROW, SLIM=SLIM, J=WIDE, num_warps=4,
        )  # fmt: skip

    def grid(self, columns: int, tile: int) -> tuple[int, int, int]:
        """Programs for clients, for examples and for columns."""
        return self.width, self.parts, triton.cdiv(columns, tile)

    def count(self, total: Tensor, number: Tensor, active: Tensor) -> None:
        """Adds the losses of the active clients to `total`, and 1 to the step counter."""
        clients = len(total)
        all_clients = triton.next_power_of_2(clients)
        _count[(1,)](self.losses, total, number, active, clients, self.parts, all_clients)


@triton.jit
def _read(x, i, j, stride, high, wide):
    pointer = x + i[:, None] * stride + j[None, :]
    return tl.load(pointer, mask=(i < high)[:, None] & (j < wide)[None, :], other=0.0)


@triton.jit
def _read_transposed(x, i, j, stride, high, wide):
    """The transposed block, [j, i]."""
    pointer = x + i[None, :] * stride + j[:, None]
    return tl.load(pointer, mask=(i < high)[None, :] & (j < wide)[:, None], other=0.0)


@triton.jit
def _write(x, i, j, stride, high, wide, value):
    pointer = x + i[:, None] * stride + j[None, :]
    tl.store(pointer, value, mask=(i < high)[:, None] & (j < wide)[None, :])


@triton.jit
def _read_vector(x, j, wide):
    return tl.load(x + j, mask=j < wide, other=0.0)


@triton.jit
def _place(R: tl.constexpr, J: tl.constexpr):
    """This program's client, examples and columns."""
    examples = tl.program_id(1) * R + tl.arange(0, R)
    columns = tl.program_id(2) * J + tl.arange(0, J)
    return tl.program_id(0), examples, columns


@triton.jit
def _next_batch(table, number, chunk, width, client, size):
    """The address of the client's next batch."""
    step = tl.load(number) % chunk
    return table + (step * width + client) * size


@triton.jit
def _hidden(
    u, number, chunk, width, flat, stride, normed, hidden, B: tl.constexpr, D: tl.constexpr, N: tl.constexpr,
    R: tl.constexpr, ALL: tl.constexpr, SCALE: tl.constexpr, SHIFT: tl.constexpr, DOWN: tl.constexpr,
    DOWN_BIAS: tl.constexpr, K: tl.constexpr, J: tl.constexpr,
):  # fmt: skip
    """n = LayerNorm(u), h = ReLU(down (scale n + shift) + bias)."""
    client, m, j = _place(R, J)
    u = _next_batch(u, number, chunk, width, client, B * D)
    w = flat + client * stride
    normed = normed + client * B * D
    all_inputs = tl.arange(0, ALL)
    rows = _read(u, m, all_inputs, D, B, D)
    mean = tl.sum(rows, 1) / D
    centred = tl.where((all_inputs < D)[None, :], rows - mean[:, None], 0.0)
    var = tl.sum(centred * centred, 1) / D
    inverse = 1.0 / tl.sqrt(var + 1e-5)
    if tl.program_id(2) == 0:
        _write(normed, m, all_inputs, D, B, D, centred * inverse[:, None])
    h = tl.zeros((R, J), tl.float32)
    for k in range(0, D, K):
        f = k + tl.arange(0, K)
        x = (_read(u, m, f, D, B, D) - mean[:, None]) * inverse[:, None]
        scaled = x * _read_vector(w + SCALE, f, D)[None, :]
        shifted = scaled + _read_vector(w + SHIFT, f, D)[None, :]
        v = tl.where((f < D)[None, :], shifted, 0.0)
        down = _read_transposed(w + DOWN, j, f, D, N, D)
        h = tl.dot(v, down, h, input_precision="tf32x3")
    bias = _read_vector(w + DOWN_BIAS, j, N)
    h = tl.maximum(h + bias[None, :], 0.0)
    _write(hidden + client * B * N, m, j, N, B, N, h)


@triton.jit
def _product(
    other, number, chunk, width, flat, stride, a, result, B: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr,
    R: tl.constexpr, MATRIX: tl.constexpr, BIAS: tl.constexpr, TRANSPOSED: tl.constexpr, ADDS: tl.constexpr,
    RECTIFIED: tl.constexpr, K: tl.constexpr, J: tl.constexpr,
):  # fmt: skip
    """The product of `a` with a client's matrix or its transpose. ADDS: plus the batch and a bias. RECTIFIED: masked by
    `other` > 0."""
    client, m, j = _place(R, J)
    a = a + client * B * IN
    w = flat + client * stride
    total = tl.zeros((R, J), tl.float32)
    for k in range(0, IN, K):
        f = k + tl.arange(0, K)
        b = _read_transposed(w + MATRIX, j, f, IN, OUT, IN) if TRANSPOSED else _read(w + MATRIX, f, j, OUT, IN, OUT)
        total = tl.dot(_read(a, m, f, IN, B, IN), b, total, input_precision="tf32x3")
    if ADDS:
        u = _next_batch(other, number, chunk, width, client, B * OUT)
        inputs = _read(u, m, j, OUT, B, OUT)
        total += inputs + _read_vector(w + BIAS, j, OUT)[None, :]
    if RECTIFIED:
        activation = _read(other + client * B * OUT, m, j, OUT, B, OUT)
        total = tl.where(activation > 0, total, 0.0)
    _write(result + client * B * OUT, m, j, OUT, B, OUT, total)


@triton.jit
def _softmax(
    y, number, chunk, width, flat, stride, allowed, logits, dlogits, dz, losses, B: tl.constexpr, D: tl.constexpr,
    C: tl.constexpr, R: tl.constexpr, ALL: tl.constexpr, WEIGHT: tl.constexpr, J: tl.constexpr,
):  # fmt: skip
    """g = (softmax − one-hot) / B over the allowed classes, and dz = g weight. The programs of the first columns also
    store g and the loss."""
    client, m, j = _place(R, J)
    q = tl.arange(0, ALL)  # classes
    y = _next_batch(y, number, chunk, width, client, B)
    is_allowed = tl.load(allowed + client * C + q, mask=q < C, other=0) != 0
    logit = _read(logits + client * B * C, m, q, C, B, C)
    value = tl.where(is_allowed[None, :], logit, float("-inf"))
    largest = tl.max(value, 1)
    e = tl.exp(value - largest[:, None])
    total = tl.sum(e, 1)
    label = tl.load(y + m, mask=m < B, other=0)
    one_hot = q[None, :] == label[:, None]
    difference = e / total[:, None] - one_hot.to(tl.float32)
    g = tl.where(is_allowed[None, :] & (m < B)[:, None], difference / B, 0.0)
    if tl.program_id(2) == 0:
        loss = tl.log(total) + largest - tl.sum(tl.where(one_hot, value, 0.0), 1)
        part = losses + client * tl.num_programs(1) + tl.program_id(1)
        tl.store(part, tl.sum(tl.where(m < B, loss, 0.0), 0) / B)
        _write(dlogits + client * B * C, m, q, C, B, C, g)
    weight = _read(flat + client * stride + WEIGHT, q, j, D, C, D)
    d = tl.dot(g, weight, input_precision="tf32x3")
    _write(dz + client * B * D, m, j, D, B, D, d)


@triton.jit
def _batch_sums(
    flat, normed, hidden, out, dlogits, dz, dh, grad, stride, grad_stride, head_tiles, up_tiles, B: tl.constexpr,
    D: tl.constexpr, N: tl.constexpr, C: tl.constexpr, SCALE: tl.constexpr, SHIFT: tl.constexpr, DOWN: tl.constexpr,
    DOWN_BIAS: tl.constexpr, UP: tl.constexpr, UP_BIAS: tl.constexpr, WEIGHT: tl.constexpr, K: tl.constexpr,
    BN: tl.constexpr, TALL: tl.constexpr, SLIM: tl.constexpr, J: tl.constexpr,
):  # fmt: skip
    """Sums over the batch: tiles of the gradients of the head and of `up` with its bias, then columns of
    `_adapter_input_gradients`."""
    client = tl.program_id(0)
    tile = tl.program_id(1)
    m = tl.arange(0, K)
    w = flat + client * stride
    own_grad = grad + client * grad_stride
    if tile < head_tiles:
        i, j = _tile(tile, D, TALL, J)
        g = _read_transposed(dlogits + client * B * C, m, i, C, B, C)
        features = _read(out + client * B * D, m, j, D, B, D)
        dweight = tl.dot(g, features, input_precision="tf32x3")
        _write(own_grad + WEIGHT, i, j, D, C, D, dweight)
    elif tile < head_tiles + up_tiles:
        i, j = _tile(tile - head_tiles, N, TALL, J)
        g = _read_transposed(dz + client * B * D, m, i, D, B, D)
        h = _read(hidden + client * B * N, m, j, N, B, N)
        dup = tl.dot(g, h, input_precision="tf32x3")
        _write(own_grad + UP, i, j, N, D, N, dup)
        first_column = (tile - head_tiles) % tl.cdiv(N, J) == 0
        tl.store(own_grad + UP_BIAS + i, tl.sum(g, 1), mask=i < tl.where(first_column, D, 0))
    else:
        column = (tile - head_tiles - up_tiles) * SLIM
        _adapter_input_gradients(
            normed, dh, w, own_grad, client, m, column, B, D, N, SCALE, SHIFT, DOWN, DOWN_BIAS, BN, SLIM
        )


@triton.jit
def _tile(tile, columns, TALL: tl.constexpr, J: tl.constexpr):
    """Rows and columns of a tile."""
    across = tl.cdiv(columns, J)
    i = (tile // across) * TALL + tl.arange(0, TALL)
    j = (tile % across) * J + tl.arange(0, J)
    return i, j


@triton.jit
def _adapter_input_gradients(
    normed, dh, w, grad, client, m, column, B: tl.constexpr, D: tl.constexpr, N: tl.constexpr, SCALE: tl.constexpr,
    SHIFT: tl.constexpr, DOWN: tl.constexpr, DOWN_BIAS: tl.constexpr, BN: tl.constexpr, J: tl.constexpr,
):  # fmt: skip
    """Some columns of the gradients of `scale`, `shift`, `down` and its bias. With G = Σ n dhᵀ and b = Σ dh, the
    gradient of `down`ᵀ is scale G + shift bᵀ, that of `scale` the row sums of `down`ᵀ ⊙ G, of `shift` `down`ᵀ b."""
    i = tl.arange(0, BN)
    j = column + tl.arange(0, J)
    dh_rows = _read(dh + client * B * N, m, i, N, B, N)
    n = _read_transposed(normed + client * B * D, m, j, D, B, D)
    g = tl.dot(n, dh_rows, input_precision="tf32x3")
    down = _read_transposed(w + DOWN, i, j, D, N, D)
    b = tl.sum(dh_rows, 0)
    tl.store(grad + SCALE + j, tl.sum(down * g, 1), mask=j < D)
    tl.store(grad + SHIFT + j, tl.sum(down * b[None, :], 1), mask=j < D)
    scaled = g * _read_vector(w + SCALE, j, D)[:, None]
    ddown = scaled + _read_vector(w + SHIFT, j, D)[:, None] * b[None, :]
    tl.store(grad + DOWN + i[None, :] * D + j[:, None], ddown, mask=(i < N)[None, :] & (j < D)[:, None])
    tl.store(grad + DOWN_BIAS + i, b, mask=i < tl.where(column == 0, N, 0))


@triton.jit
def _count(losses, total, number, active, width, parts, W: tl.constexpr):
    i = tl.arange(0, W)
    exists = i < width
    is_active = exists & (tl.load(active + i, mask=exists, other=0) != 0)
    loss = tl.load(total + i, mask=exists, other=0.0)
    for part in range(parts):
        loss += tl.load(losses + i * parts + part, mask=is_active, other=0.0)
    tl.store(total + i, loss, mask=exists)
    tl.store(number, tl.load(number) + 1)
