"""3x3 convolutions of channels-last images in bfloat16: forward, gradient of the inputs, gradient of the filters.

They need a GPU with the Tensor Memory Accelerator (compute capability 9), which loads a tile of a tensor with zeros
outside. 1x1 convolutions with stride 2 beside a 3x3 one with stride 2, as in a residual block that changes shape, are
supported, too.

Forward: a program computes a tile of outputs, some rows of some images. For every tap of the filters it loads the
inputs under the tile and the tap's weights, and multiplies. With stride 2, images are viewed as [images, H/2, 2, W/2,
2 C], so that the used pixels are again a tile. The sums for a following BatchNorm are computed before the tile is
written.

Gradient of the filters: a program computes a tile of one tap's weights, a sum over pixels. Where there are few weights,
it sums over a part of the pixels, and the parts are added afterwards, in order, so that results are deterministic.

A 1x1 filter is a filter with the centre tap only. Where both convolutions read the same images, only the even pixels of
even rows contribute to the 1x1 one. The program that computes their gradient adds the gradients of both.

In every product the matrix (filters, or the gradient of the outputs) is the first factor and the images are the second.
With the other order, Triton 3.6 passes the images through registers and overwrites them while an earlier product may
still read them (triton issue 9433). A second factor stays in shared memory. Because the result depends on the compiler,
a self-check compares each kind of kernel with the formula at its first use.
"""
# mypy: ignore-errors

import math
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

SUPPORTED = ((3, 3, 1), (3, 3, 2), (1, 1, 2))  # rows and columns of filters, and stride
DEPTH = 64  # block size along the summed channels
NARROW = (128, 64, 4, 3)  # pixels and channels of a tile, warps, pipeline stages, for 64 channels
WIDE = (128, 128, 4, 3)  # the same for more channels
GRADIENT_TILES = {  # pixels, outputs and inputs of a product, parts of a sum, warps, stages; by the fewer channels
    64: (128, 64, 64, 8, 4, 3),
    128: (128, 128, 128, 4, 8, 3),
    256: (128, 128, 128, 1, 8, 3),
    512: (64, 128, 256, 1, 8, 3),
}
ONE_TAP_PARTS = 32  # parts of a sum for filters of one tap
PORTION = 512  # weights whose parts one program adds
ROUNDING = 1e-2  # tolerance of the self-check in bfloat16, relative to the largest value


def supports(x: Tensor, weight: Tensor, step: int, groups: int) -> bool:
    """Whether the kernels support this: images and channels are multiples of a tile, no tile spans two groups, and the
    self-check passes."""
    n, c, h, w = x.shape
    k = weight.shape[0]
    high = h // step
    wide = w // step
    kind = (*weight.shape[2:], step)
    if weight.shape[1] != c or kind not in SUPPORTED:
        return False
    if h % step or w % step or c % DEPTH or k % DEPTH:
        return False
    power_of_two = wide & (wide - 1) == 0
    if not power_of_two or not 4 <= wide <= 32:
        return False
    if not _aligned(weight) or not _aligned(x):
        return False
    channels_last = weight.is_contiguous(memory_format=torch.channels_last)
    if not channels_last or not _multiples_of_tiles(c, k):
        return False
    summed_pixels, *_ = _gradient_tile(c, k)
    for pixels in (_tile(c)[0], _tile(k)[0], summed_pixels):
        images, rows, _ = _box(wide, pixels)
        if n // groups % images or high % rows:
            return False
    return agrees(c, k, wide, step, x.device)


def _aligned(tensor: Tensor) -> bool:
    """Whether a tensor begins where a descriptor may begin."""
    return tensor.data_ptr() % 16 == 0


def _multiples_of_tiles(inputs: int, outputs: int) -> bool:
    """Whether these numbers of channels are multiples of the tiles of all three kernels."""
    for channels in (inputs, outputs):
        if channels % _tile(channels)[1]:
            return False
    _, tile_outputs, tile_inputs, *_ = _gradient_tile(inputs, outputs)
    return outputs % tile_outputs == 0 and inputs % tile_inputs == 0


@cache
def agrees(channels: int, outputs: int, wide: int, step: int, device: torch.device) -> bool:
    """The self-check of one kind of kernel: it compiles, and agrees with the formula on generated images."""
    return passes(_compare, channels, outputs, wide, step, device)


@torch.no_grad()
def passes(self_check: Callable[..., bool], *kind: Any) -> bool:
    """Runs a self-check. Where it fails, a warning gives the reason."""
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("a convolution's first call came inside a recording")
    try:
        with torch.autocast("cuda", enabled=False):  # otherwise the formula would be rounded, too
            wrong = "" if self_check(*kind) else "their results are wrong"
    except Exception as error:  # any error of the compiler
        wrong = f"{type(error).__name__}: {error}"
    if wrong:
        warnings.warn(f"Triton's convolutions are not used here ({wrong}); the library's are", stacklevel=3)
    return not wrong


def _compare(channels: int, outputs: int, wide: int, step: int, device: torch.device) -> bool:
    size = wide * step
    sides = (3, 1)[:step]  # with stride 2, there is a 1x1 filter, too
    shapes = [(32, channels, size, size)]
    for side in sides:
        shapes += (outputs, channels, side, side), (32, outputs, wide, wide)
    x, *others = random_images(*shapes, device=device)
    computed: list[Tensor] = []
    expected: list[Tensor] = []
    convolutions = []  # output gradients and filters, up to the current one
    expected_dx = 0
    for side, weight, d in zip(sides, others[::2], others[1::2], strict=True):
        weight *= (side * side * channels) ** -0.5  # outputs of order one
        convolutions.append((d, weight))
        y, sums = forward(x, weight, step)
        dx = input_gradient(*convolutions[0], step, *convolutions[1:])
        dw = filter_gradient(d, x, step, side)
        computed += y, sums[:, 0], sums[:, 1], dw, dx
        filters = weight.float().flatten(1)
        columns = filters.T @ d.float().flatten(2)
        added_dx = F.fold(columns, (size, size), side, padding=side // 2, stride=step)
        expected_dx = expected_dx + added_dx
        expected += *formula(x, weight, d, step, len(sums)), expected_dx
    return close(computed, expected)


def random_images(*shapes: tuple[int, ...], device: torch.device) -> list[Tensor]:
    """Random tensors of these shapes with a fixed seed."""
    rng = torch.Generator(device).manual_seed(0)
    tensors = []
    for shape in shapes:
        values = torch.randn(shape, generator=rng, device=device, dtype=torch.bfloat16)
        tensors.append(values.to(memory_format=torch.channels_last))
    return tensors


def formula(x: Tensor, weight: Tensor, d: Tensor, step: int, tiles: int) -> tuple[Tensor, ...]:
    """The convolution, both sums of its tiles, and the gradient of the filters, in float32."""
    side = weight.shape[-1]
    inputs = F.unfold(x.float(), side, padding=side // 2, stride=step)  # the pixels under every tap, as columns
    y = weight.float().flatten(1) @ inputs
    by_tile = y.transpose(1, 2).reshape(tiles, -1, len(weight))
    sums = by_tile.sum(1)
    squares = by_tile.var(1, correction=0) * by_tile.shape[1]
    d_columns = d.float().flatten(2)
    d_rows = d_columns.transpose(0, 1).flatten(1)
    input_rows = inputs.transpose(0, 1).flatten(1)
    dw = d_rows @ input_rows.T
    return y.view(d.shape), sums, squares, dw.view(weight.shape)


def close(computed: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """Whether all tensors agree up to rounding in bfloat16."""
    for a, b in zip(computed, expected, strict=True):
        error = (a.float() - b).abs().max()
        largest = b.abs().max()
        if not bool(error <= ROUNDING * largest):  # also where the error is NaN
            return False
    return True


def forward(x: Tensor, weight: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """The convolution, and for each tile every channel's sum and sum of squared differences from the tile's mean."""
    _, c, h, w = x.shape
    k, _, side, _ = weight.shape
    high = h // step
    wide = w // step
    pixels, channels, warps, stages = _tile(k)
    box = _box(wide, pixels)
    y = _empty(x, k, high, wide)
    tiles = y.numel() // k // pixels
    sums = x.new_empty(tiles, 2, k, dtype=torch.float32)
    inputs = _image_tiles(x, [*box, DEPTH], step)
    outputs = _image_tiles(y, [*box, channels])
    filters = _filter_tiles(weight, [channels, DEPTH])
    _forward[(tiles, k // channels)](
        inputs, filters, outputs, sums, high,
        c, k, *box, DEPTH, channels, step, side, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return y, sums


def input_gradient(d: Tensor, weight: Tensor, step: int, beside: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """The gradient of the inputs of a 3x3 convolution. `beside`: output gradient and filters of a 1x1 convolution of
    the same inputs, with stride 2 and as many outputs."""
    n, k, h, w = d.shape
    c = weight.shape[1]
    pixels, channels, warps, stages = _tile(c)
    box = _box(w, pixels)
    dx = _empty(d, c, h * step, w * step)
    output_grads = _image_tiles(d, [*box, DEPTH])
    filters = _filter_tiles(weight, [DEPTH, channels])
    thin_grads = None
    thin_filters = None
    if beside is not None:
        thin_d, thin = beside
        thin_grads = _image_tiles(thin_d, [*box, DEPTH])
        thin_filters = _filter_tiles(thin, [DEPTH, channels])
    input_grads = _image_tiles(dx, [*box, channels], step)
    tiles = n * h * w // pixels
    grid = (tiles, c // channels, step * step)
    _input_gradient[grid](
        output_grads, filters, thin_grads, thin_filters, input_grads, h,
        k, c, *box, DEPTH, channels, step, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return dx


def filter_gradient(d: Tensor, x: Tensor, step: int, side: int = 3) -> Tensor:
    """The gradient of the filters, summed in a number of parts that divides the pixels."""
    n, k, h, w = d.shape
    c = x.shape[1]
    pixels, outputs, inputs, tap_parts, warps, stages = _gradient_tile(c, k)
    box = _box(w, pixels)
    tiles = n * h * w // pixels
    most_parts = tap_parts if side == 3 else ONE_TAP_PARTS
    parts = math.gcd(most_parts, tiles)
    dw = x.new_empty(k, side, side, c)
    sums = dw
    if parts > 1:
        sums = x.new_empty(parts, *dw.shape, dtype=torch.float32)
    d_rows = d.permute(0, 2, 3, 1).reshape(-1, k)
    output_grads = TensorDescriptor.from_tensor(d_rows, [pixels, outputs])
    images = _image_tiles(x, [*box, inputs], step)
    channel_tiles = (c // inputs) * (k // outputs)
    weight_tiles = side * side * channel_tiles
    _filter_gradient[(weight_tiles, parts)](
        output_grads, images, sums, h, tiles // parts,
        c, k, *box, inputs, outputs, step, side, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    if parts > 1:
        weights = dw.numel()
        _add_parts[(weights // PORTION,)](sums, dw, weights, parts, PORTION)
    return dw.permute(0, 3, 1, 2)


def _tile(channels: int) -> tuple[int, int, int, int]:
    """Pixels and channels of a tile, warps and pipeline stages."""
    return NARROW if channels <= NARROW[1] else WIDE


def _gradient_tile(inputs: int, outputs: int) -> tuple[int, int, int, int, int, int]:
    fewer = min(inputs, outputs)
    largest = max(channels for channels in GRADIENT_TILES if channels <= fewer)
    return GRADIENT_TILES[largest]


def _box(columns: int, pixels: int) -> tuple[int, int, int]:
    """Images, rows and columns of a tile."""
    rows = min(columns, pixels // columns)
    images = pixels // (rows * columns)
    return images, rows, columns


def _empty(like: Tensor, channels: int, high: int, wide: int) -> Tensor:
    return like.new_empty(len(like), high, wide, channels).permute(0, 3, 1, 2)


def _image_tiles(x: Tensor, block: list[int], step: int = 1) -> TensorDescriptor:
    """A descriptor of images; with stride 2, even and odd rows and columns are separate axes."""
    pixels = x.permute(0, 2, 3, 1)
    if step == 2:
        n, h, w, c = pixels.shape
        pixels = pixels.view(n, h // 2, 2, w // 2, 2 * c)
        images, rows, columns, channels = block
        block = [images, rows, 1, columns, channels]
    return TensorDescriptor.from_tensor(pixels, block)


def _filter_tiles(weight: Tensor, block: list[int]) -> TensorDescriptor:
    """Filters as [outputs, taps x inputs]."""
    matrix = weight.permute(0, 2, 3, 1).reshape(len(weight), -1)
    return TensorDescriptor.from_tensor(matrix, block)


@triton.jit
def _tile_start(m, high, BI: tl.constexpr, BH: tl.constexpr):
    """The first image and row of tile m."""
    rows = high // BH
    return (m // rows) * BI, (m % rows) * BH


@triton.jit
def _inputs_under_tap(x, i, h, r, s, c, IN: tl.constexpr, STEP: tl.constexpr):
    """The inputs under a tap."""
    if STEP == 1:
        return x.load([i, h + r, s, c])
    else:  # offset −1: the odd pixel of the previous pair; offset 1: the odd pixel of this pair
        return x.load([i, h + (r - r * r) // 2, r * r, (s - s * s) // 2, s * s * IN + c])


@triton.jit
def _forward(
    x, w, y, sums, high, IN: tl.constexpr, OUT: tl.constexpr, BI: tl.constexpr, BH: tl.constexpr, BW: tl.constexpr,
    BR: tl.constexpr, BO: tl.constexpr, STEP: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """IN input and OUT output channels; filters have SIDE x SIDE taps."""
    i, h = _tile_start(tl.program_id(0), high, BI, BH)
    out = tl.program_id(1) * BO
    total = tl.zeros((BO, BI * BH * BW), tl.float32)
    for t in range(SIDE * SIDE * (IN // BR)):
        c = (t // (SIDE * SIDE)) * BR
        tap = t % (SIDE * SIDE)
        r = tap // SIDE - SIDE // 2
        s = tap % SIDE - SIDE // 2
        inputs = _inputs_under_tap(x, i, h, r, s, c, IN, STEP)
        inputs = inputs.reshape(BI * BH * BW, BR)
        filters = w.load([out, tap * IN + c])
        total = tl.dot(filters, inputs.T, total)
    channel_sum = tl.sum(total, 1)
    difference = total - channel_sum[:, None] / (BI * BH * BW)
    pointer = sums + tl.program_id(0) * 2 * OUT + out + tl.arange(0, BO)
    tl.store(pointer, channel_sum)
    tl.store(pointer + OUT, tl.sum(difference * difference, 1))
    outputs = total.T.to(y.dtype)
    y.store([i, h, 0, out], outputs.reshape(BI, BH, BW, BO))


@triton.jit
def _input_gradient(
    d, w, thin_d, thin, dx, high, IN: tl.constexpr, OUT: tl.constexpr, BI: tl.constexpr, BH: tl.constexpr,
    BW: tl.constexpr, BR: tl.constexpr, BO: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """`_forward` with reversed taps. With stride 2, even rows are under the centre tap only and odd rows under the two
    others; columns likewise. Each of the four combinations has its own programs. Pixels with even row and column are
    also under the 1x1 filters `thin`, if they are given."""
    i, h = _tile_start(tl.program_id(0), high, BI, BH)
    out = tl.program_id(1) * BO
    odd_row = tl.program_id(2) // 2
    odd_column = tl.program_id(2) % 2
    taps = 9 if STEP == 1 else (1 + odd_row) * (1 + odd_column)
    total = tl.zeros((BO, BI * BH * BW), tl.float32)
    for t in range(taps * (IN // BR)):
        c = (t // taps) * BR
        j = t % taps
        if STEP == 1:
            r = 1 - j // 3
            s = 1 - j % 3
            tap = j
        else:
            r = j // (1 + odd_column)
            s = j % (1 + odd_column)
            tap = (odd_row * (1 - 2 * r) + 1) * 3 + odd_column * (1 - 2 * s) + 1
        grads = d.load([i, h + r, s, c]).reshape(BI * BH * BW, BR)
        filters = w.load([c, tap * OUT + out])
        total = tl.dot(filters.T, grads.T, total)
    if thin_d is not None:
        for t in range((1 - odd_row) * (1 - odd_column) * (IN // BR)):
            grads = thin_d.load([i, h, 0, t * BR]).reshape(BI * BH * BW, BR)
            filters = thin.load([t * BR, out])
            total = tl.dot(filters.T, grads.T, total)
    result = total.T.to(dx.dtype)
    if STEP == 1:
        dx.store([i, h, 0, out], result.reshape(BI, BH, BW, BO))
    else:
        dx.store([i, h, odd_row, 0, odd_column * OUT + out], result.reshape(BI, BH, 1, BW, BO))


@triton.jit(
    do_not_specialize=["number"]
)  # otherwise other batch sizes would compile variants that no self-check has seen
def _filter_gradient(
    d, x, dw, high, number, IN: tl.constexpr, OUT: tl.constexpr, BI: tl.constexpr, BH: tl.constexpr,
    BW: tl.constexpr, BC: tl.constexpr, BO: tl.constexpr, STEP: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """A tap's weights from IN to OUT channels, summed over this many tiles of pixels."""
    tap = tl.program_id(0) % (SIDE * SIDE)
    tile = tl.program_id(0) // (SIDE * SIDE)
    part = tl.program_id(1)
    c = tile % (IN // BC) * BC
    out = tile // (IN // BC) * BO
    total = tl.zeros((BO, BC), tl.float32)
    for m in range(part * number, (part + 1) * number):
        i, h = _tile_start(m, high, BI, BH)
        r = tap // SIDE - SIDE // 2
        s = tap % SIDE - SIDE // 2
        inputs = _inputs_under_tap(x, i, h, r, s, c, IN, STEP)
        inputs = inputs.reshape(BI * BH * BW, BC)
        grads = d.load([m * BI * BH * BW, out])
        total = tl.dot(grads.T, inputs, total)
    filters = part * OUT + out + tl.arange(0, BO)
    rows = dw + (filters * (SIDE * SIDE) * IN)[:, None]
    pointer = rows + tap * IN + c + tl.arange(0, BC)
    tl.store(pointer, total.to(dw.dtype.element_ty))


@triton.jit
def _add_parts(parts, dw, size, PARTS: tl.constexpr, PORTION: tl.constexpr):
    offset = tl.program_id(0) * PORTION + tl.arange(0, PORTION)
    total = tl.load(parts + offset)
    for part in tl.static_range(1, PARTS):
        total += tl.load(parts + part * size + offset)
    tl.store(dw + offset, total.to(dw.dtype.element_ty))
