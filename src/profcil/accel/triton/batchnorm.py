"""BatchNorm kernels (see `accel.resnet`). Channels-last images are a matrix, one row a pixel and one column a channel.

Sums over pixels take two steps: first over pieces, then over the pieces in a fixed order. No additions are atomic,
so results are deterministic. Squares are of differences from a piece's own mean, which avoids cancellation for large
means. Arithmetic is in float32.
"""
# Triton compiles these functions from their source and has its own types.
# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from torch import Tensor

PIXELS, CHANNELS = 64, 64  # of a tile; these and the next were tuned on an H200
MANY, FEWER = 128, 32  # pixels of a tile in the backward sums; FEWER where the kernel also writes
LONG, LEAST = 8, 8  # tiles in a piece, unless there would be fewer than LEAST pieces
PIECES, TILES = 256, 512  # most pieces of a sum: here, and where a convolution has computed it
FEW = 8  # channels whose pieces one program sums


def forward(x, weight, bias, added, running_mean, running_var, momentum, eps, groups, rectify, sums=None):
    """See `resnet.forward`. `sums`: partial sums of equal pieces of all pixels, in order, where they are known."""
    mean, scale = _statistics(x, running_mean, running_var, momentum, eps, groups, sums)
    return _normalised(x, weight, bias, added, mean, scale, groups, rectify), mean, scale


def apply(x, weight, bias, added, mean, var, eps, rectify):
    """Eval-mode BatchNorm: the same with given mean and variance."""
    return _normalised(x, weight, bias, added, mean, (var + eps).rsqrt(), 1, rectify)


def moments(x, sums=None):
    """Every channel's mean and variance: running statistics with momentum 1."""
    mean, var = x.new_zeros(2, x.shape[1], dtype=torch.float32)
    _statistics(x, mean, var, 1.0, 0.0, 1, sums)
    count = x.numel() // x.shape[1]
    return mean, var * ((count - 1) / count)


def affine(x, mean, factor, shift):
    """(x − mean) factor + shift, with one number a channel each."""
    return _normalised(x, factor, shift, None, mean, torch.ones_like(mean), 1, False)


def _statistics(x, running_mean, running_var, momentum, eps, groups, sums=None):
    """Each group's mean and inverse standard deviation; updates the running statistics."""
    rows, channels, pieces, _ = _layout(x, groups, PIXELS)
    mean = x.new_empty(groups, channels, dtype=torch.float32)
    scale = torch.empty_like(mean)
    if known := sums is not None and len(sums) <= groups * TILES:
        pieces = len(sums) // groups
        per = rows // pieces
    else:
        per = triton.cdiv(triton.cdiv(rows, pieces), PIXELS) * PIXELS
        sums = x.new_empty(groups * pieces, 2, channels, dtype=torch.float32)
        _moments[(pieces, triton.cdiv(channels, CHANNELS), groups)](
            x, sums, rows, channels, pieces, per, PIXELS, CHANNELS
        )
    _settle[(triton.cdiv(channels, FEW),)](
        sums, mean, scale, running_mean, running_var, momentum, eps, groups, rows, channels, pieces, per,
        TILES if known else PIECES, FEW,
    )  # fmt: skip
    return mean, scale


def _normalised(x, weight, bias, added, mean, scale, groups, rectify):
    y, (rows, channels, _, tiles) = torch.empty_like(x), _layout(x, groups, PIXELS)
    _forward[(tiles, triton.cdiv(channels, CHANNELS), groups)](
        x, x if added is None else added, y, mean, scale, weight, bias, rows, channels, added is not None, rectify,
        PIXELS, CHANNELS,
    )  # fmt: skip
    return y


def backward(grads, x, y, weight, bias, mean, scale, groups, rectify, adds):
    """See `resnet.backward`."""
    both = len(grads) == 2
    writes = adds or both
    grad, other, y = grads[0], grads[-1], x if y is None else y  # placeholders for missing tensors are not read
    pixels = FEWER if writes else MANY
    rows, channels, pieces, tiles = _layout(x, groups, pixels)
    dx, slope = torch.empty_like(x), torch.empty_like(x) if writes else grad
    partial = x.new_empty(groups, pieces, 2, channels, dtype=torch.float32)
    sums = x.new_empty(groups, 2, channels, dtype=torch.float32)
    dw, db = torch.empty_like(weight), torch.empty_like(weight)
    wide = triton.cdiv(channels, CHANNELS)
    _products[(pieces, wide, groups)](
        grad, other, x, y, slope, mean, scale, weight, bias, partial, rows, channels, pieces,
        adds, both, rectify, pixels, CHANNELS,
    )  # fmt: skip
    _collect[(triton.cdiv(channels, FEW),)](partial, sums, dw, db, groups, channels, pieces, PIECES, FEW)
    _backward[(tiles, wide, groups)](
        slope, x, dx, mean, scale, weight, bias, sums, rows, channels, rectify and not writes, PIXELS, CHANNELS
    )
    return dx, dw, db, slope if adds else None


def through(grads, x, y, weight, bias, mean, scale, rectify, adds, line=None):
    """Eval-mode backward: gradients of x and of what was added. With `line` = (centre, stretch, shift), one number a
    channel each, (x − centre) stretch + shift is added to the gradient of x."""
    rows, channels, _, tiles = _layout(x, 1, PIXELS)
    dx, slope = torch.empty_like(x), torch.empty_like(x) if adds else x
    centre, stretch, shift = line or (mean, mean, mean)
    _through[(tiles, triton.cdiv(channels, CHANNELS))](
        grads[0], grads[-1], x, x if y is None else y, slope, dx, mean, scale, weight, bias, centre, stretch, shift,
        rows, channels, adds, len(grads) == 2, rectify, line is not None, PIXELS, CHANNELS,
    )  # fmt: skip
    return dx, slope if adds else None


def _layout(x: Tensor, groups: int, pixels: int) -> tuple[int, int, int, int]:
    """Pixels in a group, channels, pieces of a sum, and tiles."""
    rows = x.numel() // x.shape[1] // groups
    pieces = max(triton.cdiv(rows, LONG * pixels), min(LEAST, triton.cdiv(rows, pixels)))
    return rows, x.shape[1], min(PIECES, pieces), triton.cdiv(rows, PIXELS)


@triton.jit
def _tile(block, channels, B: tl.constexpr):
    c = block * B + tl.arange(0, B)
    return c, c < channels


@triton.jit(do_not_specialize=["pieces", "per"])  # otherwise every number of pieces would compile a new variant
def _moments(x, sums, rows, channels, pieces, per, BM: tl.constexpr, BC: tl.constexpr):
    """Σ x, and Σ (x − mean)² with the mean over this piece of a group's pixels."""
    piece, g = tl.program_id(0), tl.program_id(2)
    c, real = _tile(tl.program_id(1), channels, BC)
    start, begin, end = x + g * rows * channels, piece * per, tl.minimum((piece + 1) * per, rows)
    near = tl.load(start + c, mask=real, other=0.0).to(tl.float32)
    one, two = tl.zeros((BM, BC), tl.float32), tl.zeros((BM, BC), tl.float32)
    for r in range(begin, end, BM):
        m = r + tl.arange(0, BM)
        there = (m < rows)[:, None] & real[None, :]
        v = tl.load(start + m[:, None] * channels + c[None, :], mask=there, other=0.0).to(tl.float32)
        v = tl.where(there, v - near[None, :], 0.0)
        one += v
        two += v * v
    count = tl.maximum(end - begin, 0)
    shift = tl.sum(one, 0)
    at = sums + (g * pieces + piece) * 2 * channels + c
    tl.store(at, shift + near * count, mask=real)
    tl.store(at + channels, tl.sum(two, 0) - shift * shift / tl.maximum(count, 1), mask=real)


@triton.jit(do_not_specialize=["pieces", "per", "groups"])
def _settle(
    sums, mean, scale, running_mean, running_var, momentum, eps, groups, rows, channels, pieces, per,
    BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Combines the pieces into each group's mean and inverse standard deviation; updates the running statistics."""
    c, real = _tile(tl.program_id(0), channels, BC)
    rm, rv = tl.load(running_mean + c, mask=real, other=0.0), tl.load(running_var + c, mask=real, other=0.0)
    count = tl.minimum(tl.maximum(rows - tl.arange(0, BP) * per, 0), per)[:, None]
    for g in range(groups):
        one, two = _pieces(sums, g, c, real, channels, pieces, BP)
        mu = tl.sum(one, 0) / rows
        off = one / tl.maximum(count, 1) - mu[None, :]
        var = tl.maximum(tl.sum(two + count * off * off, 0) / rows, 0.0)
        tl.store(mean + g * channels + c, mu, mask=real)
        tl.store(scale + g * channels + c, 1.0 / tl.sqrt(var + eps), mask=real)
        rm += momentum * (mu - rm)
        rv += momentum * (var * (rows / (rows - 1.0)) - rv)
    tl.store(running_mean + c, rm, mask=real)
    tl.store(running_var + c, rv, mask=real)


@triton.jit
def _pieces(partial, g, c, real, channels, pieces, BP: tl.constexpr):
    p = tl.arange(0, BP)
    at = partial + (g * pieces + p)[:, None] * 2 * channels + c[None, :]
    there = (p < pieces)[:, None] & real[None, :]
    return tl.load(at, mask=there, other=0.0), tl.load(at + channels, mask=there, other=0.0)


@triton.jit
def _forward(
    x, added, y, mean, scale, weight, bias, rows, channels, ADDS: tl.constexpr, RECTIFY: tl.constexpr,
    BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """y = relu(w (x − mean) scale + b + added)."""
    g = tl.program_id(2)
    c, real = _tile(tl.program_id(1), channels, BC)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    there = (m < rows)[:, None] & real[None, :]
    at = g * rows * channels + m[:, None] * channels + c[None, :]
    factor = tl.load(weight + c, mask=real, other=0.0) * tl.load(scale + g * channels + c, mask=real, other=0.0)
    mu, shift = tl.load(mean + g * channels + c, mask=real, other=0.0), tl.load(bias + c, mask=real, other=0.0)
    v = (tl.load(x + at, mask=there, other=0.0).to(tl.float32) - mu[None, :]) * factor[None, :] + shift[None, :]
    if ADDS:
        v += tl.load(added + at, mask=there, other=0.0).to(tl.float32)
    if RECTIFY:
        v = tl.maximum(v, 0.0)
    tl.store(y + at, v.to(y.dtype.element_ty), mask=there)


@triton.jit
def _relu_gradient(grad, other, y, at, there, before, ADDS: tl.constexpr, BOTH: tl.constexpr, RECTIFY: tl.constexpr):
    """The gradient before ReLU. Where nothing was added, the sign follows from x, and y is not read."""
    d = tl.load(grad + at, mask=there, other=0.0).to(tl.float32)
    if BOTH:
        d += tl.load(other + at, mask=there, other=0.0).to(tl.float32)
    if RECTIFY and ADDS:
        d = tl.where(tl.load(y + at, mask=there, other=0.0).to(tl.float32) > 0, d, 0.0)
    elif RECTIFY:
        d = tl.where(before > 0, d, 0.0)
    return d


@triton.jit(do_not_specialize=["pieces"])
def _products(
    grad, other, x, y, slope, mean, scale, weight, bias, partial, rows, channels, pieces,
    ADDS: tl.constexpr, BOTH: tl.constexpr, RECTIFY: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Σ d and Σ d x̂ over a piece of a group's pixels; stores d where it is needed again."""
    piece, g = tl.program_id(0), tl.program_id(2)
    c, real = _tile(tl.program_id(1), channels, BC)
    mu = tl.load(mean + g * channels + c, mask=real, other=0.0)
    s = tl.load(scale + g * channels + c, mask=real, other=0.0)
    w, b = tl.load(weight + c, mask=real, other=0.0), tl.load(bias + c, mask=real, other=0.0)
    per = tl.cdiv(tl.cdiv(rows, pieces), BM) * BM
    one, two = tl.zeros((BM, BC), tl.float32), tl.zeros((BM, BC), tl.float32)
    for r in range(piece * per, tl.minimum((piece + 1) * per, rows), BM):
        m = r + tl.arange(0, BM)
        there = (m < rows)[:, None] & real[None, :]
        at = g * rows * channels + m[:, None] * channels + c[None, :]
        v = tl.load(x + at, mask=there, other=0.0).to(tl.float32) - mu[None, :]
        d = _relu_gradient(grad, other, y, at, there, v * (w * s)[None, :] + b[None, :], ADDS, BOTH, RECTIFY)
        if ADDS or BOTH:
            rounded = d.to(slope.dtype.element_ty)
            tl.store(slope + at, rounded, mask=there)
            d = rounded.to(tl.float32)
        one += d
        two += d * (v * s[None, :])
    at = partial + (g * pieces + piece) * 2 * channels + c
    tl.store(at, tl.sum(one, 0), mask=real)
    tl.store(at + channels, tl.sum(two, 0), mask=real)


@triton.jit(do_not_specialize=["pieces", "groups"])
def _collect(partial, sums, dw, db, groups, channels, pieces, BP: tl.constexpr, BC: tl.constexpr):
    """Sums the pieces of each group, and the groups for the gradients of weight and bias."""
    c, real = _tile(tl.program_id(0), channels, BC)
    w, b = tl.zeros((BC,), tl.float32), tl.zeros((BC,), tl.float32)
    for g in range(groups):
        one, two = _pieces(partial, g, c, real, channels, pieces, BP)
        one, two = tl.sum(one, 0), tl.sum(two, 0)
        tl.store(sums + g * 2 * channels + c, one, mask=real)
        tl.store(sums + (g * 2 + 1) * channels + c, two, mask=real)
        b += one
        w += two
    tl.store(dw + c, w, mask=real)
    tl.store(db + c, b, mask=real)


@triton.jit
def _backward(
    slope, x, dx, mean, scale, weight, bias, sums, rows, channels, RECTIFY: tl.constexpr,
    BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """dx = w scale (d − mean d − x̂ mean(d x̂))."""
    g = tl.program_id(2)
    c, real = _tile(tl.program_id(1), channels, BC)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    there = (m < rows)[:, None] & real[None, :]
    at = g * rows * channels + m[:, None] * channels + c[None, :]
    mu = tl.load(mean + g * channels + c, mask=real, other=0.0)
    s = tl.load(scale + g * channels + c, mask=real, other=0.0)
    w, b = tl.load(weight + c, mask=real, other=0.0), tl.load(bias + c, mask=real, other=0.0)
    one = tl.load(sums + g * 2 * channels + c, mask=real, other=0.0) / rows
    two = tl.load(sums + (g * 2 + 1) * channels + c, mask=real, other=0.0) / rows
    v = tl.load(x + at, mask=there, other=0.0).to(tl.float32) - mu[None, :]
    d = _relu_gradient(slope, slope, x, at, there, v * (w * s)[None, :] + b[None, :], False, False, RECTIFY)
    out = (d - one[None, :] - v * s[None, :] * two[None, :]) * (w * s)[None, :]
    tl.store(dx + at, out.to(dx.dtype.element_ty), mask=there)


@triton.jit
def _through(
    grad, other, x, y, slope, dx, mean, scale, weight, bias, centre, stretch, shift, rows, channels,
    ADDS: tl.constexpr, BOTH: tl.constexpr, RECTIFY: tl.constexpr, LINE: tl.constexpr, BM: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    """dx = w scale d, plus (x − centre) stretch + shift with LINE."""
    c, real = _tile(tl.program_id(1), channels, BC)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    there = (m < rows)[:, None] & real[None, :]
    at = m[:, None] * channels + c[None, :]
    mu, b = tl.load(mean + c, mask=real, other=0.0), tl.load(bias + c, mask=real, other=0.0)
    factor = tl.load(weight + c, mask=real, other=0.0) * tl.load(scale + c, mask=real, other=0.0)
    v = tl.load(x + at, mask=there, other=0.0).to(tl.float32)
    before = (v - mu[None, :]) * factor[None, :] + b[None, :]
    d = _relu_gradient(grad, other, y, at, there, before, ADDS, BOTH, RECTIFY)
    if ADDS:
        tl.store(slope + at, d.to(slope.dtype.element_ty), mask=there)
    out = d * factor[None, :]
    if LINE:
        near = tl.load(centre + c, mask=real, other=0.0)
        steep, up = tl.load(stretch + c, mask=real, other=0.0), tl.load(shift + c, mask=real, other=0.0)
        out += (v - near[None, :]) * steep[None, :] + up[None, :]
    tl.store(dx + at, out.to(dx.dtype.element_ty), mask=there)
