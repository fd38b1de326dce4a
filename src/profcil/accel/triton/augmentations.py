"""Fused kernels for views of small images: one pass over a batch instead of dozens. The reference is `shift` and
`distort` in `model.augmentations`.

A program computes one image, one row a channel and one column a pixel, from the image's own draws. Sizes that change
with a batch are not specialised on: compiling a new variant during a CUDA graph capture would fail.
"""
# mypy: ignore-errors

from math import log

import torch
import triton
import triton.language as tl
from torch import Tensor

from profcil.model import augmentations

AREA, LOG_ASPECT = tl.constexpr(augmentations.AREA), tl.constexpr(log(augmentations.ASPECT))
STRENGTH, GRAY = tl.constexpr(augmentations.STRENGTH), tl.constexpr(augmentations.GRAY)
RED, GREEN, BLUE = map(tl.constexpr, augmentations.LUMA)
BYTE = tl.constexpr(1 / 255)  # torch also divides by a constant on a GPU in this way
EACH = 8  # values a thread, up to 32 warps


def shift(x: Tensor, draws: Tensor, crop: bool, flip: bool) -> Tensor:
    """`augmentations.shift`, bit for bit."""
    y = x.new_empty(x.shape, dtype=torch.float32)
    sizes, warps = _sizes(x)
    _shift[(len(x),)](x, draws, y, len(x), *x.stride(), crop, flip, *sizes, num_warps=warps)
    return y


def distort(x: Tensor, zoom: Tensor, colour: Tensor | None, crop: bool, flip: bool) -> Tensor:
    """`augmentations.distort`."""
    y, jitter = x.new_empty(x.shape, dtype=torch.float32), colour is not None
    sizes, warps = _sizes(x)
    _distort[(len(x),)](
        x, zoom, colour if jitter else zoom, y, len(x), *x.stride(), crop, flip, jitter, *sizes, num_warps=warps
    )
    return y


def _sizes(x: Tensor) -> tuple[tuple[int, ...], int]:
    """Channels, height and width, the rows and columns of a program's block, and its warps."""
    _, c, h, w = x.shape
    rows, columns = triton.next_power_of_2(c), triton.next_power_of_2(h * w)
    return (c, h, w, rows, columns), min(max(rows * columns // (32 * EACH), 1), 32)


@triton.jit
def _place(C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr):
    """This program's image, channels and pixels, the mask of those that exist, and their output offsets."""
    n, c, p = tl.program_id(0).to(tl.int64), tl.arange(0, BC)[:, None], tl.arange(0, BP)[None, :]
    return n, c, p, (c < C) & (p < H * W), (n * C + c) * (H * W) + p


@triton.jit
def _unit(at, there):
    """Bytes as numbers in [0, 1]."""
    v = tl.load(at, mask=there, other=0)
    if v.dtype == tl.uint8:
        v = v.to(tl.float32) * BYTE
    return v


@triton.jit
def _mirrored(places, draw, SIZE: tl.constexpr):
    return tl.where(draw < 0.5, SIZE - 1 - places, places)


@triton.jit
def _reflected(places, draw, SIZE: tl.constexpr):
    """See `augmentations._reflected`."""
    moved = places + (draw * (2 * (SIZE // 8) + 1)).to(tl.int32) - SIZE // 8
    return (SIZE - 1) - tl.abs((SIZE - 1) - tl.abs(moved))


@triton.jit(do_not_specialize=["images", "sn", "sc", "sh", "sw"])
def _shift(
    x, draws, y, images, sn, sc, sh, sw, CROP: tl.constexpr, FLIP: tl.constexpr,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """y[c, i, j] = x[c, i shifted, j flipped and shifted]."""
    n, c, p, there, at = _place(C, H, W, BC, BP)
    i, j, draw = p // W, p % W, draws + n
    if FLIP:
        j = _mirrored(j, tl.load(draw), W)
    if CROP:
        i = _reflected(i, tl.load(draw + images), H)
        j = _reflected(j, tl.load(draw + 2 * images), W)
    tl.store(y + at, _unit(x + n * sn + (c * sc + i * sh + j * sw), there), mask=there)


@triton.jit
def _window(places, part, draw, SIZE: tl.constexpr):
    """`augmentations._window` in pixel units, clamped to the outermost pixel centres."""
    centres = (2 * places + 1).to(tl.float32) / SIZE - 1
    seen = (2 * draw - 1) * (1 - part) + part * centres
    return tl.minimum(tl.maximum(((seen + 1) * SIZE - 1) / 2, 0.0), SIZE - 1.0)


@triton.jit
def _inside(v):
    return tl.minimum(tl.maximum(v, 0.0), 1.0)


@triton.jit(do_not_specialize=["images", "sn", "sc", "sh", "sw"])
def _distort(
    x, zoom, colour, y, images, sn, sc, sh, sw, CROP: tl.constexpr, FLIP: tl.constexpr, JITTER: tl.constexpr,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """Bilinear resampling of the window, then brightness, contrast and saturation."""
    n, c, p, there, at = _place(C, H, W, BC, BP)
    i, j, x = p // W, p % W, x + n * sn
    if FLIP:
        j = _mirrored(j, tl.load(zoom + 4 * images + n), W)
    if CROP or FLIP:
        wide, high, across, down = 1.0, 1.0, 0.5, 0.5
        if CROP:
            area = AREA + (1 - AREA) * tl.load(zoom + n)
            aspect = tl.exp((2 * tl.load(zoom + images + n) - 1) * LOG_ASPECT)
            wide, high = tl.minimum(tl.sqrt(area * aspect), 1.0), tl.minimum(tl.sqrt(area / aspect), 1.0)
            across, down = tl.load(zoom + 2 * images + n), tl.load(zoom + 3 * images + n)
        row, column = _window(i, high, down, H), _window(j, wide, across, W)
        i, j = row.to(tl.int32), column.to(tl.int32)
        low, far = row - i, column - j
        above, below = i * sh + c * sc, tl.minimum(i + 1, H - 1) * sh + c * sc
        left, right = j * sw, tl.minimum(j + 1, W - 1) * sw
        v = (1 - low) * ((1 - far) * _unit(x + (above + left), there) + far * _unit(x + (above + right), there))
        v += low * ((1 - far) * _unit(x + (below + left), there) + far * _unit(x + (below + right), there))
        v = _inside(v)
    else:
        v = _unit(x + (c * sc + i * sh + j * sw), there)
    if JITTER:
        bright = 1 + STRENGTH * (2 * tl.load(colour + n) - 1)
        contrast = 1 + STRENGTH * (2 * tl.load(colour + images + n) - 1)
        if C == 3:
            gray = tl.sum(v * tl.where(c == 0, RED, tl.where(c == 1, GREEN, BLUE)), 0, keep_dims=True)
            mean = tl.sum(gray) / (H * W)
            saturation = 1 + STRENGTH * (2 * tl.load(colour + 2 * images + n) - 1)
            saturation = tl.where(tl.load(colour + 3 * images + n) < GRAY, 0.0, saturation)
            v = saturation * v + (1 - saturation) * gray
        else:
            mean = tl.sum(v, 1, keep_dims=True) / (H * W)
        v = _inside(bright * (contrast * v + (1 - contrast) * mean))
    tl.store(y + at, v, mask=there)
