"""The first 3x3 convolution of a network: forward and gradient of the filters, for the GPUs of `conv3x3`.

Images have few channels, so all inputs of an output pixel, nine taps of each channel, are one row of a product, padded
with zeros to COLUMNS. They are gathered from any memory format and rounded to the type of the filters. A program
computes a tile of pixels in output order; a tile may begin and end within a row, and span images. The tile's sums for a
following BatchNorm are computed before it is written. For the gradient of the filters, a program sums over some tiles,
and the parts are added afterwards in a fixed order.

As in `conv3x3`, the matrix is the first factor and the gathered inputs are the second, and a self-check compares each
kind of kernel with the formula once. Strides, addresses and the number of images are not part of a kind.
"""
# mypy: ignore-errors

import math
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from profcil.accel.triton import conv3x3

COLUMNS = 32  # of a product: at least nine taps of three channels
PIXELS, CHANNELS = 128, 64  # of a tile
FORWARD = {"num_warps": 4, "num_stages": 1}
GRADIENT = {"num_warps": 8, "num_stages": 3}  # for the gradient of the filters
PARTS = 256  # most parts of the gradient of the filters, a power of two: about two programs for each of 132 SMs


def supports(x: Tensor, weight: Tensor, step: int, padding: tuple[int, ...] | str, groups: int) -> bool:
    """Whether the kernels support this: pixels and filters are multiples of a tile, no tile spans two groups, and the
    self-check passes."""
    if x.dim() != 4 or x.dtype not in (torch.float32, torch.bfloat16):
        return False
    if step != 1 or padding != (1, 1):
        return False
    n, c, h, w = x.shape
    outputs = len(weight)
    if weight.shape[1:] != (c, 3, 3):
        return False
    if 9 * c > COLUMNS or outputs % CHANNELS:
        return False
    if x.numel() == 0 or n % groups:
        return False
    group_pixels = n // groups * h * w
    if group_pixels % PIXELS:
        return False
    return agrees(c, outputs, h, w, x.dtype, x.device)


@cache
def agrees(channels: int, outputs: int, high: int, wide: int, dtype: torch.dtype, device: torch.device) -> bool:
    """The self-check of one kind of kernel: it compiles, and agrees with the formula on generated images."""
    return conv3x3.passes(_compare, channels, outputs, high, wide, dtype, device)


def _compare(channels: int, outputs: int, high: int, wide: int, dtype: torch.dtype, device: torch.device) -> bool:
    pixels = high * wide
    multiple = PIXELS // math.gcd(PIXELS, pixels)  # the fewest images with a multiple of PIXELS
    least_pixels = 2 * PARTS * PIXELS  # so that parts have several tiles
    number = multiple * triton.cdiv(least_pixels, multiple * pixels)
    images = (number, channels, high, wide)
    filters = (outputs, channels, 3, 3)
    output_grads = (number, outputs, high, wide)
    x, weight, d = conv3x3.random_images(images, filters, output_grads, device=device)
    weight *= (9 * channels) ** -0.5
    inputs = x.to(dtype)
    y, sums = forward(inputs, weight)
    dw = filter_gradient(d, inputs, weight)
    expected = conv3x3.formula(x, weight, d, 1, len(sums))
    computed = (y, sums[:, 0], sums[:, 1], dw)
    return conv3x3.close(computed, expected)


def forward(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The convolution, and for each tile every channel's sum and sum of squared differences from the tile's mean."""
    n, c, h, w = x.shape
    k = len(weight)
    channels_last = weight.new_empty(n, h, w, k)
    y = channels_last.permute(0, 3, 1, 2)
    tiles = n * h * w // PIXELS
    sums = x.new_empty(tiles, 2, k, dtype=torch.float32)
    grid = (tiles, k // CHANNELS)
    _forward[grid](
        x, weight, _pixel_rows(y), sums, *x.stride(), *weight.stride(),
        c, k, h, w, PIXELS, CHANNELS, COLUMNS, **FORWARD,
    )  # fmt: skip
    return y, sums


def filter_gradient(d: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """The gradient of the filters, in their memory format. The last part may have fewer tiles."""
    n, c, h, w = x.shape
    k = len(weight)
    tiles = n * h * w // PIXELS
    number = triton.cdiv(tiles, PARTS)
    parts = triton.cdiv(tiles, number)
    dw = torch.empty_like(weight)
    sums = x.new_empty(parts, k, COLUMNS, dtype=torch.float32)
    grid = (k // CHANNELS, parts)
    _filter_gradient[grid](
        _pixel_rows(d), x, sums, tiles, number, *x.stride(),
        c, k, h, w, PIXELS, CHANNELS, COLUMNS, **GRADIENT,
    )  # fmt: skip
    _add_parts[(k,)](sums, dw, parts, *dw.stride(), c, k, PARTS, COLUMNS)
    return dw


def _pixel_rows(y: Tensor) -> TensorDescriptor:
    """Images as [pixels, channels]."""
    channels_last = y.permute(0, 2, 3, 1)
    rows = channels_last.reshape(-1, y.shape[1])
    return TensorDescriptor.from_tensor(rows, [PIXELS, CHANNELS])


@triton.jit
def _taps(IN: tl.constexpr, COLUMNS: tl.constexpr):
    """Channel, row and column of every tap; padding has a row of 3 or more."""
    t = tl.arange(0, COLUMNS)
    return t % IN, t // IN // 3, t // IN % 3


@triton.jit
def _inputs_under_tap(
    x, tile, image, channel, row, column, IN: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr,
    PIXELS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The inputs under every tap at a tile's pixels, zeros outside; neighbouring pixels are read together. A bit mask
    for each pixel marks the taps outside the image, and all after the ninth."""
    p = tile * PIXELS + tl.arange(0, PIXELS)
    i = p // (HIGH * WIDE)
    h = p // WIDE % HIGH
    w = p % WIDE
    outside = -0b1000000000 | tl.where(h == 0, 0b000000111, 0) | tl.where(h == HIGH - 1, 0b111000000, 0)
    outside |= tl.where(w == 0, 0b001001001, 0) | tl.where(w == WIDE - 1, 0b100100100, 0)
    c, r, s = _taps(IN, COLUMNS)
    pixel = i * image + h * row + w * column
    tap = c * channel + (r - 1) * row + (s - 1) * column
    tap_bit = 1 << (3 * r + s)
    inside = (outside[None, :] & tap_bit[:, None]) == 0
    return tl.load(x + (pixel[None, :] + tap[:, None]), mask=inside, other=0.0)


@triton.jit(
    do_not_specialize=["image", "channel", "row", "column", "outer", "inner", "across", "along"],
    do_not_specialize_on_alignment=["x", "weight"],
)
def _forward(
    x, weight, y, sums, image, channel, row, column, outer, inner, across, along, IN: tl.constexpr, OUT: tl.constexpr,
    HIGH: tl.constexpr, WIDE: tl.constexpr, PIXELS: tl.constexpr, BO: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """IN input and OUT output channels; the strides are those of the images and of the filters."""
    tile = tl.program_id(0)
    out = tl.program_id(1) * BO
    inputs = _inputs_under_tap(x, tile, image, channel, row, column, IN, HIGH, WIDE, PIXELS, COLUMNS)
    c, r, s = _taps(IN, COLUMNS)
    k = out + tl.arange(0, BO)
    tap = c * inner + r * across + s * along
    filters = tl.load(weight + k[:, None] * outer + tap[None, :], mask=(r < 3)[None, :], other=0.0)
    total = tl.dot(filters, inputs.to(filters.dtype))
    channel_sum = tl.sum(total, 1)
    difference = total - channel_sum[:, None] / PIXELS
    pointer = sums + tile * 2 * OUT + k
    tl.store(pointer, channel_sum)
    tl.store(pointer + OUT, tl.sum(difference * difference, 1))
    y.store([tile * PIXELS, out], total.T.to(y.dtype))


@triton.jit(
    do_not_specialize=["tiles", "number", "image", "channel", "row", "column"], do_not_specialize_on_alignment=["x"]
)
def _filter_gradient(
    d, x, sums, tiles, number, image, channel, row, column, IN: tl.constexpr, OUT: tl.constexpr, HIGH: tl.constexpr,
    WIDE: tl.constexpr, PIXELS: tl.constexpr, BO: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The gradient of the weights from IN to OUT channels, summed over `number` tiles of pixels."""
    out = tl.program_id(0) * BO
    part = tl.program_id(1)
    total = tl.zeros((BO, COLUMNS), tl.float32)
    for tile in range(part * number, tl.minimum((part + 1) * number, tiles)):
        inputs = _inputs_under_tap(x, tile, image, channel, row, column, IN, HIGH, WIDE, PIXELS, COLUMNS)
        grads = d.load([tile * PIXELS, out])
        total = tl.dot(grads.T, inputs.to(d.dtype).T, total)
    filters = part * OUT + out + tl.arange(0, BO)
    pointer = sums + (filters * COLUMNS)[:, None] + tl.arange(0, COLUMNS)
    tl.store(pointer, total)


@triton.jit(do_not_specialize=["parts", "outer", "inner", "across", "along"])
def _add_parts(
    sums, dw, parts, outer, inner, across, along, IN: tl.constexpr, OUT: tl.constexpr, PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Adds the parts of one filter."""
    k = tl.program_id(0)
    p = tl.arange(0, PARTS)[:, None]
    pointer = sums + (p * OUT + k) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    by_part = tl.load(pointer, mask=p < parts, other=0.0)
    total = tl.sum(by_part, 0)
    c, r, s = _taps(IN, COLUMNS)
    result = dw + k * outer + c * inner + r * across + s * along
    tl.store(result, total.to(dw.dtype.element_ty), mask=r < 3)
