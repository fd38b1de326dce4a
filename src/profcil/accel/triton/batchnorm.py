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
    y = _normalised(x, weight, bias, added, mean, scale, groups, rectify)
    return y, mean, scale


def eval_forward(x, weight, bias, added, mean, var, eps, rectify):
    """Eval-mode BatchNorm: the same with given mean and variance."""
    scale = (var + eps).rsqrt()
    return _normalised(x, weight, bias, added, mean, scale, 1, rectify)


def moments(x, sums=None):
    """Every channel's mean and variance: running statistics with momentum 1."""
    channels = x.shape[1]
    count = x.numel() // channels
    mean, var = x.new_zeros(2, channels, dtype=torch.float32)
    _statistics(x, mean, var, 1.0, 0.0, 1, sums)
    return mean, var * ((count - 1) / count)


def affine(x, mean, factor, shift):
    """(x − mean) factor + shift, with one number a channel each."""
    scale = torch.ones_like(mean)
    return _normalised(x, factor, shift, None, mean, scale, 1, False)


def _statistics(x, running_mean, running_var, momentum, eps, groups, sums=None):
    """Each group's mean and inverse standard deviation; updates the running statistics."""
    rows, channels, pieces, _ = _layout(x, groups, PIXELS)
    mean = x.new_empty(groups, channels, dtype=torch.float32)
    scale = torch.empty_like(mean)
    known = sums is not None and len(sums) <= groups * TILES
    if known:
        pieces = len(sums) // groups
        piece_rows = rows // pieces
    else:
        tiles = triton.cdiv(triton.cdiv(rows, pieces), PIXELS)
        piece_rows = tiles * PIXELS
        sums = x.new_empty(groups * pieces, 2, channels, dtype=torch.float32)
        grid = (pieces, triton.cdiv(channels, CHANNELS), groups)
        _moments_of_pieces[grid](x, sums, rows, channels, pieces, piece_rows, PIXELS, CHANNELS)
    most_pieces = TILES if known else PIECES
    grid = (triton.cdiv(channels, FEW),)
    _combine_moments[grid](
        sums, mean, scale, running_mean, running_var, momentum, eps, groups, rows, channels, pieces, piece_rows,
        most_pieces, FEW,
    )  # fmt: skip
    return mean, scale


def _normalised(x, weight, bias, added, mean, scale, groups, rectify):
    rows, channels, _, tiles = _layout(x, groups, PIXELS)
    y = torch.empty_like(x)
    adds = added is not None
    addend = added if adds else x  # a placeholder for a missing tensor is not read
    grid = (tiles, triton.cdiv(channels, CHANNELS), groups)
    _forward[grid](
        x, addend, y, mean, scale, weight, bias, rows, channels, adds, rectify, PIXELS, CHANNELS
    )  # fmt: skip
    return y


def backward(grads, x, y, weight, bias, mean, scale, groups, rectify, adds):
    """See `resnet.backward`."""
    both = len(grads) == 2
    writes = adds or both
    grad = grads[0]
    other_grad = grads[-1]
    if y is None:
        y = x  # a placeholder that is not read
    pixels = FEWER if writes else MANY
    rows, channels, pieces, tiles = _layout(x, groups, pixels)
    dx = torch.empty_like(x)
    relu_grad = torch.empty_like(x) if writes else grad  # the gradient before ReLU
    partial = x.new_empty(groups, pieces, 2, channels, dtype=torch.float32)
    sums = x.new_empty(groups, 2, channels, dtype=torch.float32)
    dw = torch.empty_like(weight)
    db = torch.empty_like(weight)
    channel_tiles = triton.cdiv(channels, CHANNELS)
    _gradient_sums_of_pieces[(pieces, channel_tiles, groups)](
        grad, other_grad, x, y, relu_grad, mean, scale, weight, bias, partial, rows, channels, pieces,
        adds, both, rectify, pixels, CHANNELS,
    )  # fmt: skip
    grid = (triton.cdiv(channels, FEW),)
    _add_gradient_sums[grid](partial, sums, dw, db, groups, channels, pieces, PIECES, FEW)
    rectify_again = rectify and not writes
    _backward[(tiles, channel_tiles, groups)](
        relu_grad, x, dx, mean, scale, weight, bias, sums, rows, channels, rectify_again, PIXELS, CHANNELS
    )
    dadded = relu_grad if adds else None
    return dx, dw, db, dadded


def eval_backward(grads, x, y, weight, bias, mean, scale, rectify, adds, linear=None):
    """Eval-mode backward: gradients of x and of what was added. With `linear` = (centre, factor, shift), one number a
    channel each, (x − centre) factor + shift is added to the gradient of x."""
    rows, channels, _, tiles = _layout(x, 1, PIXELS)
    both = len(grads) == 2
    if y is None:
        y = x  # a placeholder that is not read, as are the next ones
    dx = torch.empty_like(x)
    dadded = torch.empty_like(x) if adds else x
    centre, factor, shift = linear or (mean, mean, mean)
    grid = (tiles, triton.cdiv(channels, CHANNELS))
    _eval_backward[grid](
        grads[0], grads[-1], x, y, dadded, dx, mean, scale, weight, bias, centre, factor, shift,
        rows, channels, adds, both, rectify, linear is not None, PIXELS, CHANNELS,
    )  # fmt: skip
    return dx, dadded if adds else None


def _layout(x: Tensor, groups: int, pixels: int) -> tuple[int, int, int, int]:
    """Pixels in a group, channels, pieces of a sum, and tiles."""
    channels = x.shape[1]
    rows = x.numel() // channels // groups
    long_pieces = triton.cdiv(rows, LONG * pixels)
    fewest = min(LEAST, triton.cdiv(rows, pixels))
    pieces = max(long_pieces, fewest)
    return rows, channels, min(PIECES, pieces), triton.cdiv(rows, PIXELS)


@triton.jit
def _channels(block, channels, B: tl.constexpr):
    """The channels of a block, and the mask of those that exist."""
    c = block * B + tl.arange(0, B)
    return c, c < channels


@triton.jit
def _rows(first, rows, B: tl.constexpr):
    """The B rows from `first` on, and the mask of those that exist."""
    m = first + tl.arange(0, B)
    return m, m < rows


@triton.jit
def _read(pointer, mask):
    return tl.load(pointer, mask=mask, other=0.0)


@triton.jit
def _read_float(pointer, mask):
    return tl.load(pointer, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _tile_mask(rows, columns):
    """The mask of a tile from those of its rows and columns."""
    return rows[:, None] & columns[None, :]


@triton.jit(do_not_specialize=["pieces", "piece_rows"])  # otherwise every number of pieces would compile a new variant
def _moments_of_pieces(x, sums, rows, channels, pieces, piece_rows, BM: tl.constexpr, BC: tl.constexpr):
    """Σ x, and Σ (x − mean)² with the mean over this piece of a group's pixels."""
    piece = tl.program_id(0)
    g = tl.program_id(2)
    c, exists = _channels(tl.program_id(1), channels, BC)
    group = x + g * rows * channels
    begin = piece * piece_rows
    end = tl.minimum((piece + 1) * piece_rows, rows)
    first = _read_float(group + c, exists)  # sums are of differences from the first pixel, against cancellation
    total = tl.zeros((BM, BC), tl.float32)
    squares = tl.zeros((BM, BC), tl.float32)
    for r in range(begin, end, BM):
        m, row_exists = _rows(r, rows, BM)
        inside = _tile_mask(row_exists, exists)
        v = _read_float(group + m[:, None] * channels + c[None, :], inside)
        v = tl.where(inside, v - first[None, :], 0.0)
        total += v
        squares += v * v
    count = tl.maximum(end - begin, 0)
    shift = tl.sum(total, 0)
    result = sums + (g * pieces + piece) * 2 * channels + c
    tl.store(result, shift + first * count, mask=exists)
    square = tl.sum(squares, 0) - shift * shift / tl.maximum(count, 1)
    tl.store(result + channels, square, mask=exists)


@triton.jit(do_not_specialize=["pieces", "piece_rows", "groups"])
def _combine_moments(
    sums, mean, scale, running_mean, running_var, momentum, eps, groups, rows, channels, pieces, piece_rows,
    BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Combines the pieces into each group's mean and inverse standard deviation; updates the running statistics."""
    c, exists = _channels(tl.program_id(0), channels, BC)
    new_mean = _read(running_mean + c, exists)
    new_var = _read(running_var + c, exists)
    rows_left = tl.maximum(rows - tl.arange(0, BP) * piece_rows, 0)
    count = tl.minimum(rows_left, piece_rows)[:, None]
    for g in range(groups):
        total, squares = _read_pieces(sums, g, c, exists, channels, pieces, BP)
        mu = tl.sum(total, 0) / rows
        difference = total / tl.maximum(count, 1) - mu[None, :]
        square = tl.sum(squares + count * difference * difference, 0)
        var = tl.maximum(square / rows, 0.0)
        tl.store(mean + g * channels + c, mu, mask=exists)
        tl.store(scale + g * channels + c, 1.0 / tl.sqrt(var + eps), mask=exists)
        new_mean += momentum * (mu - new_mean)
        unbiased = var * (rows / (rows - 1.0))
        new_var += momentum * (unbiased - new_var)
    tl.store(running_mean + c, new_mean, mask=exists)
    tl.store(running_var + c, new_var, mask=exists)


@triton.jit
def _read_pieces(partial, g, c, exists, channels, pieces, BP: tl.constexpr):
    """Both sums of all pieces of a group."""
    p = tl.arange(0, BP)
    pointer = partial + (g * pieces + p)[:, None] * 2 * channels + c[None, :]
    inside = _tile_mask(p < pieces, exists)
    first = _read(pointer, inside)
    second = _read(pointer + channels, inside)
    return first, second


@triton.jit
def _forward(
    x, added, y, mean, scale, weight, bias, rows, channels, ADDS: tl.constexpr, RECTIFY: tl.constexpr,
    BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """y = relu(w (x − mean) scale + b + added)."""
    g = tl.program_id(2)
    c, exists = _channels(tl.program_id(1), channels, BC)
    m, row_exists = _rows(tl.program_id(0) * BM, rows, BM)
    inside = _tile_mask(row_exists, exists)
    offset = g * rows * channels + m[:, None] * channels + c[None, :]
    w = _read(weight + c, exists)
    factor = w * _read(scale + g * channels + c, exists)
    mu = _read(mean + g * channels + c, exists)
    b = _read(bias + c, exists)
    centred = _read_float(x + offset, inside) - mu[None, :]
    v = centred * factor[None, :] + b[None, :]
    if ADDS:
        v += _read_float(added + offset, inside)
    if RECTIFY:
        v = tl.maximum(v, 0.0)
    tl.store(y + offset, v.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _relu_gradient(
    grad, other, y, offset, inside, preactivation, ADDS: tl.constexpr, BOTH: tl.constexpr, RECTIFY: tl.constexpr
):
    """The gradient before ReLU. Where nothing was added, the sign follows from x, and y is not read."""
    d = _read_float(grad + offset, inside)
    if BOTH:
        d += _read_float(other + offset, inside)
    if RECTIFY and ADDS:
        output = _read_float(y + offset, inside)
        d = tl.where(output > 0, d, 0.0)
    elif RECTIFY:
        d = tl.where(preactivation > 0, d, 0.0)
    return d


@triton.jit(do_not_specialize=["pieces"])
def _gradient_sums_of_pieces(
    grad, other, x, y, relu_grad, mean, scale, weight, bias, partial, rows, channels, pieces,
    ADDS: tl.constexpr, BOTH: tl.constexpr, RECTIFY: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Σ d and Σ d x̂ over a piece of a group's pixels; stores d where it is needed again."""
    piece = tl.program_id(0)
    g = tl.program_id(2)
    c, exists = _channels(tl.program_id(1), channels, BC)
    mu = _read(mean + g * channels + c, exists)
    s = _read(scale + g * channels + c, exists)
    w = _read(weight + c, exists)
    b = _read(bias + c, exists)
    piece_rows = tl.cdiv(tl.cdiv(rows, pieces), BM) * BM
    total = tl.zeros((BM, BC), tl.float32)
    products = tl.zeros((BM, BC), tl.float32)
    for r in range(piece * piece_rows, tl.minimum((piece + 1) * piece_rows, rows), BM):
        m, row_exists = _rows(r, rows, BM)
        inside = _tile_mask(row_exists, exists)
        offset = g * rows * channels + m[:, None] * channels + c[None, :]
        centred = _read_float(x + offset, inside) - mu[None, :]
        preactivation = centred * (w * s)[None, :] + b[None, :]
        d = _relu_gradient(grad, other, y, offset, inside, preactivation, ADDS, BOTH, RECTIFY)
        if ADDS or BOTH:
            rounded = d.to(relu_grad.dtype.element_ty)
            tl.store(relu_grad + offset, rounded, mask=inside)
            d = rounded.to(tl.float32)
        total += d
        products += d * (centred * s[None, :])
    result = partial + (g * pieces + piece) * 2 * channels + c
    tl.store(result, tl.sum(total, 0), mask=exists)
    tl.store(result + channels, tl.sum(products, 0), mask=exists)


@triton.jit(do_not_specialize=["pieces", "groups"])
def _add_gradient_sums(partial, sums, dw, db, groups, channels, pieces, BP: tl.constexpr, BC: tl.constexpr):
    """Sums the pieces of each group, and the groups for the gradients of weight and bias."""
    c, exists = _channels(tl.program_id(0), channels, BC)
    w = tl.zeros((BC,), tl.float32)
    b = tl.zeros((BC,), tl.float32)
    for g in range(groups):
        pieces_d, pieces_product = _read_pieces(partial, g, c, exists, channels, pieces, BP)
        total = tl.sum(pieces_d, 0)
        products = tl.sum(pieces_product, 0)
        tl.store(sums + g * 2 * channels + c, total, mask=exists)
        tl.store(sums + (g * 2 + 1) * channels + c, products, mask=exists)
        b += total
        w += products
    tl.store(dw + c, w, mask=exists)
    tl.store(db + c, b, mask=exists)


@triton.jit
def _backward(
    relu_grad, x, dx, mean, scale, weight, bias, sums, rows, channels, RECTIFY: tl.constexpr,
    BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """dx = w scale (d − mean d − x̂ mean(d x̂))."""
    g = tl.program_id(2)
    c, exists = _channels(tl.program_id(1), channels, BC)
    m, row_exists = _rows(tl.program_id(0) * BM, rows, BM)
    inside = _tile_mask(row_exists, exists)
    offset = g * rows * channels + m[:, None] * channels + c[None, :]
    mu = _read(mean + g * channels + c, exists)
    s = _read(scale + g * channels + c, exists)
    w = _read(weight + c, exists)
    b = _read(bias + c, exists)
    mean_d = _read(sums + g * 2 * channels + c, exists) / rows
    mean_product = _read(sums + (g * 2 + 1) * channels + c, exists) / rows
    centred = _read_float(x + offset, inside) - mu[None, :]
    preactivation = centred * (w * s)[None, :] + b[None, :]
    d = _relu_gradient(relu_grad, relu_grad, x, offset, inside, preactivation, False, False, RECTIFY)
    difference = d - mean_d[None, :] - centred * s[None, :] * mean_product[None, :]
    out = difference * (w * s)[None, :]
    tl.store(dx + offset, out.to(dx.dtype.element_ty), mask=inside)


@triton.jit
def _eval_backward(
    grad, other, x, y, dadded, dx, mean, scale, weight, bias, centre, factor, shift, rows, channels,
    ADDS: tl.constexpr, BOTH: tl.constexpr, RECTIFY: tl.constexpr, LINEAR: tl.constexpr, BM: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    """dx = w scale d, plus (x − centre) factor + shift with LINEAR."""
    c, exists = _channels(tl.program_id(1), channels, BC)
    m, row_exists = _rows(tl.program_id(0) * BM, rows, BM)
    inside = _tile_mask(row_exists, exists)
    offset = m[:, None] * channels + c[None, :]
    mu = _read(mean + c, exists)
    b = _read(bias + c, exists)
    w = _read(weight + c, exists)
    norm_factor = w * _read(scale + c, exists)
    v = _read_float(x + offset, inside)
    preactivation = (v - mu[None, :]) * norm_factor[None, :] + b[None, :]
    d = _relu_gradient(grad, other, y, offset, inside, preactivation, ADDS, BOTH, RECTIFY)
    if ADDS:
        tl.store(dadded + offset, d.to(dadded.dtype.element_ty), mask=inside)
    out = d * norm_factor[None, :]
    if LINEAR:
        difference = v - _read(centre + c, exists)[None, :]
        slope = _read(factor + c, exists)
        intercept = _read(shift + c, exists)
        out += difference * slope[None, :] + intercept[None, :]
    tl.store(dx + offset, out.to(dx.dtype.element_ty), mask=inside)
