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

KNOWN = ((3, 3, 1), (3, 3, 2), (1, 1, 2))  # rows and columns of filters, and stride
DEPTH = 64  # block size along the summed channels
NARROW = (128, 64, 4, 3)  # pixels and channels of a tile, warps, pipeline stages, for 64 channels
WIDE = (128, 128, 4, 3)  # the same for more channels
SLOPES = {  # pixels, outputs and inputs of a product, parts of a sum, warps, stages; by the smaller channel number
    64: (128, 64, 64, 8, 4, 3),
    128: (128, 128, 128, 4, 8, 3),
    256: (128, 128, 128, 1, 8, 3),
    512: (64, 128, 256, 1, 8, 3),
}
ALONE = 32  # parts of a sum for filters of one tap
PORTION = 512  # weights whose parts one program adds
ROUNDING = 1e-2  # tolerance of the self-check in bfloat16, relative to the largest value


def takes(x: Tensor, weight: Tensor, step: int, groups: int) -> bool:
    """Whether the kernels support this: images and channels are multiples of a tile, no tile spans two groups, and the
    self-check passes."""
    n, c, h, w = x.shape
    k, high, wide = weight.shape[0], h // step, w // step
    known = weight.shape[1] == c and (*weight.shape[2:], step) in KNOWN
    if not known or h % step or w % step or c % DEPTH or k % DEPTH:
        return False
    if wide & (wide - 1) or not 4 <= wide <= 32 or weight.data_ptr() % 16 or x.data_ptr() % 16:
        return False
    summed, outputs, inputs, *_ = _gradient_tile(c, k)
    boxes = [_box(wide, pixels) for pixels in (_shape(c)[0], _shape(k)[0], summed)]
    whole = all(n // groups % images == 0 and high % rows == 0 for images, rows, _ in boxes)
    divides = all(channels % _shape(channels)[1] == 0 for channels in (c, k)) and k % outputs == c % inputs == 0
    last = weight.is_contiguous(memory_format=torch.channels_last)
    return whole and divides and last and agrees(c, k, wide, step, x.device)


@cache
def agrees(channels: int, outputs: int, wide: int, step: int, device: torch.device) -> bool:
    """The self-check of one kind of kernel: it compiles, and agrees with the formula on generated images."""
    return right(_compare, channels, outputs, wide, step, device)


@torch.no_grad()
def right(compare: Callable[..., bool], *kind: Any) -> bool:
    """Runs a self-check. Where it fails, a warning gives the reason."""
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("a convolution's first call came inside a recording")
    try:
        with torch.autocast("cuda", enabled=False):  # otherwise the formula would be rounded, too
            wrong = "" if compare(*kind) else "their results are wrong"
    except Exception as error:  # any error of the compiler
        wrong = f"{type(error).__name__}: {error}"
    if wrong:
        warnings.warn(f"Triton's convolutions are not used here ({wrong}); the library's are", stacklevel=3)
    return not wrong


def _compare(channels: int, outputs: int, wide: int, step: int, device: torch.device) -> bool:
    size, sides = wide * step, (3, 1)[:step]  # with stride 2, there is a 1x1 filter, too
    images, outer = (32, channels, size, size), (32, outputs, wide, wide)
    x, *rest = drawn(images, *(s for side in sides for s in ((outputs, channels, side, side), outer)), device=device)
    found, expected, read, folded = [], [], [], 0
    for side, weight, d in zip(sides, rest[::2], rest[1::2], strict=True):
        weight *= (side * side * channels) ** -0.5  # outputs of order one
        read.append((d, weight))
        (y, sums), dx, dw = ahead(x, weight, step), back(*read[0], step, *read[1:]), slopes(d, x, step, side)
        columns = weight.float().flatten(1).T @ d.float().flatten(2)
        folded = folded + F.fold(columns, (size, size), side, padding=side // 2, stride=step)
        found += y, sums[:, 0], sums[:, 1], dw, dx
        expected += *formula(x, weight, d, step, len(sums)), folded
    return near(found, expected)


def drawn(*shapes: tuple[int, ...], device: torch.device) -> list[Tensor]:
    """Random tensors of these shapes with a fixed seed."""
    rng = torch.Generator(device).manual_seed(0)
    made = (torch.randn(shape, generator=rng, device=device, dtype=torch.bfloat16) for shape in shapes)
    return [t.to(memory_format=torch.channels_last) for t in made]


def formula(x: Tensor, weight: Tensor, d: Tensor, step: int, tiles: int) -> tuple[Tensor, ...]:
    """The convolution, both sums of its tiles, and the gradient of the filters, in float32."""
    side = weight.shape[-1]
    under = F.unfold(x.float(), side, padding=side // 2, stride=step)  # the pixels under every tap, as columns
    made = weight.float().flatten(1) @ under
    parts = made.transpose(1, 2).reshape(tiles, -1, len(weight))
    sums, squares = parts.sum(1), parts.var(1, correction=0) * parts.shape[1]
    outputs, inputs = (t.transpose(0, 1).flatten(1) for t in (d.float().flatten(2), under))
    return made.view(d.shape), sums, squares, (outputs @ inputs.T).view(weight.shape)


def near(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    pairs = zip(found, expected, strict=True)
    return all(bool((a.float() - b).abs().max() <= ROUNDING * b.abs().max()) for a, b in pairs)


def ahead(x: Tensor, weight: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """The convolution, and for each tile every channel's sum and sum of squared differences from the tile's mean."""
    (_, c, h, w), (k, _, side, _) = x.shape, weight.shape
    pixels, channels, warps, stages = _shape(k)
    images, rows, columns = _box(w // step, pixels)
    y = _empty(x, k, h // step, w // step)
    tiles = y.numel() // k // pixels
    sums = x.new_empty(tiles, 2, k, dtype=torch.float32)
    _forward[(tiles, k // channels)](
        _tiles(x, [images, rows, columns, DEPTH], step), _matrix(weight, [channels, DEPTH]),
        _tiles(y, [images, rows, columns, channels]), sums, h // step,
        c, k, images, rows, columns, DEPTH, channels, step, side, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return y, sums


def back(d: Tensor, weight: Tensor, step: int, beside: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """The gradient of the inputs of a 3x3 convolution. `beside`: output gradient and filters of a 1x1 convolution of
    the same inputs, with stride 2 and as many outputs."""
    (n, k, h, w), c = d.shape, weight.shape[1]
    pixels, channels, warps, stages = _shape(c)
    images, rows, columns = _box(w, pixels)
    x = _empty(d, c, h * step, w * step)

    def read(d: Tensor, weight: Tensor) -> tuple[TensorDescriptor, TensorDescriptor]:
        return _tiles(d, [images, rows, columns, DEPTH]), _matrix(weight, [DEPTH, channels])

    _backward[(n * h * w // pixels, c // channels, step * step)](
        *read(d, weight), *(read(*beside) if beside else (None, None)),
        _tiles(x, [images, rows, columns, channels], step), h,
        k, c, images, rows, columns, DEPTH, channels, step, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return x


def slopes(d: Tensor, x: Tensor, step: int, side: int = 3) -> Tensor:
    """The gradient of the filters, summed in a number of parts that divides the pixels."""
    (n, k, h, w), c = d.shape, x.shape[1]
    pixels, outputs, inputs, parts, warps, stages = _gradient_tile(c, k)
    images, rows, columns = _box(w, pixels)
    tiles = n * h * w // pixels
    parts = math.gcd(parts if side == 3 else ALONE, tiles)
    made = x.new_empty(k, side, side, c)
    sums = x.new_empty(parts, *made.shape, dtype=torch.float32) if parts > 1 else made
    _filter_gradient[(side * side * (c // inputs) * (k // outputs), parts)](
        TensorDescriptor.from_tensor(d.permute(0, 2, 3, 1).reshape(-1, k), [pixels, outputs]),
        _tiles(x, [images, rows, columns, inputs], step), sums, h, tiles // parts,
        c, k, images, rows, columns, inputs, outputs, step, side, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    if parts > 1:
        _add[(made.numel() // PORTION,)](sums, made, made.numel(), parts, PORTION)
    return made.permute(0, 3, 1, 2)


def _shape(channels: int) -> tuple[int, int, int, int]:
    return NARROW if channels <= NARROW[1] else WIDE


def _gradient_tile(inputs: int, outputs: int) -> tuple[int, int, int, int, int, int]:
    return SLOPES[max(channels for channels in SLOPES if channels <= min(inputs, outputs))]


def _box(columns: int, pixels: int) -> tuple[int, int, int]:
    """Images, rows and columns of a tile."""
    rows = min(columns, pixels // columns)
    return pixels // (rows * columns), rows, columns


def _empty(like: Tensor, channels: int, high: int, wide: int) -> Tensor:
    return like.new_empty(len(like), high, wide, channels).permute(0, 3, 1, 2)


def _tiles(x: Tensor, block: list[int], step: int = 1) -> TensorDescriptor:
    """A descriptor of images; with stride 2, even and odd rows and columns are separate axes."""
    seen, (images, rows, columns, channels) = x.permute(0, 2, 3, 1), block
    if step == 2:
        n, h, w, c = seen.shape
        seen, block = seen.view(n, h // 2, 2, w // 2, 2 * c), [images, rows, 1, columns, channels]
    return TensorDescriptor.from_tensor(seen, block)


def _matrix(weight: Tensor, block: list[int]) -> TensorDescriptor:
    """Filters as [outputs, taps x inputs]."""
    return TensorDescriptor.from_tensor(weight.permute(0, 2, 3, 1).reshape(len(weight), -1), block)


@triton.jit
def _place(high, BI: tl.constexpr, BH: tl.constexpr):
    """The first image and row of this program's tile."""
    m, rows = tl.program_id(0), high // BH
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
    i, h = _place(high, BI, BH)
    out = tl.program_id(1) * BO
    total = tl.zeros((BO, BI * BH * BW), tl.float32)
    for t in range(SIDE * SIDE * (IN // BR)):
        c, tap = (t // (SIDE * SIDE)) * BR, t % (SIDE * SIDE)
        a = _inputs_under_tap(x, i, h, tap // SIDE - SIDE // 2, tap % SIDE - SIDE // 2, c, IN, STEP).reshape(
            BI * BH * BW, BR
        )
        total = tl.dot(w.load([out, tap * IN + c]), a.T, total)
    one = tl.sum(total, 1)
    off = total - one[:, None] / (BI * BH * BW)
    at = sums + tl.program_id(0) * 2 * OUT + out + tl.arange(0, BO)
    tl.store(at, one)
    tl.store(at + OUT, tl.sum(off * off, 1))
    y.store([i, h, 0, out], total.T.to(y.dtype).reshape(BI, BH, BW, BO))


@triton.jit
def _backward(
    d, w, beside, thin, x, high, IN: tl.constexpr, OUT: tl.constexpr, BI: tl.constexpr, BH: tl.constexpr,
    BW: tl.constexpr, BR: tl.constexpr, BO: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """`_forward` with reversed taps. With stride 2, even rows are under the centre tap only and odd rows under the two
    others; columns likewise. Each of the four combinations has its own programs. Pixels with even row and column are
    also under the 1x1 filters, if `beside` is given."""
    i, h = _place(high, BI, BH)
    out, odd, across = tl.program_id(1) * BO, tl.program_id(2) // 2, tl.program_id(2) % 2
    taps = 9 if STEP == 1 else (1 + odd) * (1 + across)
    total = tl.zeros((BO, BI * BH * BW), tl.float32)
    for t in range(taps * (IN // BR)):
        c, j = (t // taps) * BR, t % taps
        if STEP == 1:
            r, s, tap = 1 - j // 3, 1 - j % 3, j
        else:
            r, s = j // (1 + across), j % (1 + across)
            tap = (odd * (1 - 2 * r) + 1) * 3 + across * (1 - 2 * s) + 1
        a = d.load([i, h + r, s, c]).reshape(BI * BH * BW, BR)
        total = tl.dot(w.load([c, tap * OUT + out]).T, a.T, total)
    if beside is not None:
        for t in range((1 - odd) * (1 - across) * (IN // BR)):
            a = beside.load([i, h, 0, t * BR]).reshape(BI * BH * BW, BR)
            total = tl.dot(thin.load([t * BR, out]).T, a.T, total)
    made = total.T.to(x.dtype)
    if STEP == 1:
        x.store([i, h, 0, out], made.reshape(BI, BH, BW, BO))
    else:
        x.store([i, h, odd, 0, across * OUT + out], made.reshape(BI, BH, 1, BW, BO))


@triton.jit(
    do_not_specialize=["number"]
)  # otherwise other batch sizes would compile variants that no self-check has seen
def _filter_gradient(
    d, x, made, high, number, IN: tl.constexpr, OUT: tl.constexpr, BI: tl.constexpr, BH: tl.constexpr,
    BW: tl.constexpr, BC: tl.constexpr, BO: tl.constexpr, STEP: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """A tap's weights from IN to OUT channels, summed over this many tiles of pixels."""
    tap, tile, part = tl.program_id(0) % (SIDE * SIDE), tl.program_id(0) // (SIDE * SIDE), tl.program_id(1)
    c, out = tile % (IN // BC) * BC, tile // (IN // BC) * BO
    rows = high // BH
    total = tl.zeros((BO, BC), tl.float32)
    for m in range(part * number, (part + 1) * number):
        i, h = (m // rows) * BI, (m % rows) * BH
        a = _inputs_under_tap(x, i, h, tap // SIDE - SIDE // 2, tap % SIDE - SIDE // 2, c, IN, STEP).reshape(
            BI * BH * BW, BC
        )
        total = tl.dot(d.load([m * BI * BH * BW, out]).T, a, total)
    at = made + ((part * OUT + out + tl.arange(0, BO)) * (SIDE * SIDE) * IN)[:, None] + tap * IN + c + tl.arange(0, BC)
    tl.store(at, total.to(made.dtype.element_ty))


@triton.jit
def _add(parts, made, size, PARTS: tl.constexpr, PORTION: tl.constexpr):
    at = tl.program_id(0) * PORTION + tl.arange(0, PORTION)
    total = tl.load(parts + at)
    for part in tl.static_range(1, PARTS):
        total += tl.load(parts + part * size + at)
    tl.store(made + at, total.to(made.dtype.element_ty))
