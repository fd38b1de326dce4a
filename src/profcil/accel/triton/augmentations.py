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
    y = x.new_empty(x.shape, dtype=torch.float32)
    jitter = colour is not None
    colour_draws = colour if jitter else zoom  # a placeholder that is not read
    sizes, warps = _sizes(x)
    _distort[(len(x),)](
        x, zoom, colour_draws, y, len(x), *x.stride(), crop, flip, jitter, *sizes, num_warps=warps
    )  # fmt: skip
    return y


def _sizes(x: Tensor) -> tuple[tuple[int, ...], int]:
    """Channels, height and width, the rows and columns of a program's block, and its warps."""
    _, c, h, w = x.shape
    rows = triton.next_power_of_2(c)
    columns = triton.next_power_of_2(h * w)
    warps = rows * columns // (32 * EACH)
    warps = min(max(warps, 1), 32)
    return (c, h, w, rows, columns), warps


@triton.jit
def _place(C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr):
    """This program's image, channels and pixels, the mask of those that exist, and their output offsets."""
    n = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BC)[:, None]
    p = tl.arange(0, BP)[None, :]
    exists = (c < C) & (p < H * W)
    offset = (n * C + c) * (H * W) + p
    return n, c, p, exists, offset


@triton.jit
def _unit(pointer, exists):
    """Bytes as numbers in [0, 1]."""
    v = tl.load(pointer, mask=exists, other=0)
    if v.dtype == tl.uint8:
        v = v.to(tl.float32) * BYTE
    return v


@triton.jit
def _mirrored(places, draw, SIZE: tl.constexpr):
    return tl.where(draw < 0.5, SIZE - 1 - places, places)


@triton.jit
def _reflected(places, draw, SIZE: tl.constexpr):
    """See `augmentations._reflected`."""
    shift = (draw * (2 * (SIZE // 8) + 1)).to(tl.int32)
    shifted = places + shift - SIZE // 8
    return (SIZE - 1) - tl.abs((SIZE - 1) - tl.abs(shifted))


@triton.jit(do_not_specialize=["images", "sn", "sc", "sh", "sw"])
def _shift(
    x, draws, y, images, sn, sc, sh, sw, CROP: tl.constexpr, FLIP: tl.constexpr,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """y[c, i, j] = x[c, i shifted, j flipped and shifted]."""
    n, c, p, exists, offset = _place(C, H, W, BC, BP)
    i = p // W
    j = p % W
    own_draws = draws + n
    if FLIP:
        j = _mirrored(j, tl.load(own_draws), W)
    if CROP:
        i = _reflected(i, tl.load(own_draws + images), H)
        j = _reflected(j, tl.load(own_draws + 2 * images), W)
    pixel = c * sc + i * sh + j * sw
    v = _unit(x + n * sn + pixel, exists)
    tl.store(y + offset, v, mask=exists)


@triton.jit
def _window(places, part, draw, SIZE: tl.constexpr):
    """`augmentations._window` in pixel units, clamped to the outermost pixel centres."""
    centres = (2 * places + 1).to(tl.float32) / SIZE - 1
    sampled = (2 * draw - 1) * (1 - part) + part * centres
    in_pixels = ((sampled + 1) * SIZE - 1) / 2
    return tl.minimum(tl.maximum(in_pixels, 0.0), SIZE - 1.0)


@triton.jit
def _clamped(v):
    return tl.minimum(tl.maximum(v, 0.0), 1.0)


@triton.jit
def _strength(draw):
    """The factor of brightness, contrast or saturation for a draw in [0, 1)."""
    return 1 + STRENGTH * (2 * draw - 1)


@triton.jit(do_not_specialize=["images", "sn", "sc", "sh", "sw"])
def _distort(
    x, zoom, colour, y, images, sn, sc, sh, sw, CROP: tl.constexpr, FLIP: tl.constexpr, JITTER: tl.constexpr,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """Bilinear resampling of the window, then brightness, contrast and saturation."""
    n, c, p, exists, offset = _place(C, H, W, BC, BP)
    i = p // W
    j = p % W
    x = x + n * sn
    if FLIP:
        j = _mirrored(j, tl.load(zoom + 4 * images + n), W)
    if CROP or FLIP:
        wide = 1.0
        high = 1.0
        across = 0.5
        down = 0.5
        if CROP:
            area = AREA + (1 - AREA) * tl.load(zoom + n)
            log_aspect = (2 * tl.load(zoom + images + n) - 1) * LOG_ASPECT
            aspect = tl.exp(log_aspect)
            wide = tl.minimum(tl.sqrt(area * aspect), 1.0)
            high = tl.minimum(tl.sqrt(area / aspect), 1.0)
            across = tl.load(zoom + 2 * images + n)
            down = tl.load(zoom + 3 * images + n)
        row = _window(i, high, down, H)
        column = _window(j, wide, across, W)
        i = row.to(tl.int32)
        j = column.to(tl.int32)
        lower_weight = row - i
        right_weight = column - j
        above = i * sh + c * sc
        below = tl.minimum(i + 1, H - 1) * sh + c * sc
        left = j * sw
        right = tl.minimum(j + 1, W - 1) * sw
        upper_weight = 1 - lower_weight
        left_weight = 1 - right_weight
        upper = left_weight * _unit(x + (above + left), exists)
        upper += right_weight * _unit(x + (above + right), exists)
        v = upper_weight * upper
        lower = left_weight * _unit(x + (below + left), exists)
        lower += right_weight * _unit(x + (below + right), exists)
        v += lower_weight * lower
        v = _clamped(v)
    else:
        v = _unit(x + (c * sc + i * sh + j * sw), exists)
    if JITTER:
        brightness = _strength(tl.load(colour + n))
        contrast = _strength(tl.load(colour + images + n))
        if C == 3:
            luma = tl.where(c == 0, RED, tl.where(c == 1, GREEN, BLUE))
            gray = tl.sum(v * luma, 0, keep_dims=True)
            mean = tl.sum(gray) / (H * W)
            saturation = _strength(tl.load(colour + 2 * images + n))
            becomes_gray = tl.load(colour + 3 * images + n) < GRAY
            saturation = tl.where(becomes_gray, 0.0, saturation)
            v = saturation * v + (1 - saturation) * gray
        else:
            mean = tl.sum(v, 1, keep_dims=True) / (H * W)
        contrasted = contrast * v + (1 - contrast) * mean
        v = _clamped(brightness * contrasted)
    tl.store(y + offset, v, mask=exists)
