"""Views of a batch: augmentations that keep the label, as pure functions of the inputs and a generator.

`weak` is for supervised training, `strong` for the contrastive pairs A(x) of the warm-up (Eq. warmup) and of the
auxiliary term. Each draws once for the whole batch, on the device of the inputs. Shapes never depend on values. Image
views are numbers in [0, 1].
"""

from __future__ import annotations

from collections.abc import Callable
from math import log
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from profcil.data.bundle import Facts, Inputs
from profcil.errors import unknown
from profcil.model.layers import unit

View = Callable[[Facts, Inputs, Any], Inputs]

AREA = 0.4  # the smallest part of an image that a strong crop keeps
ASPECT = 4 / 3  # and its largest aspect ratio
STRENGTH = 0.4  # of brightness, contrast and saturation
GRAY = 0.2
LUMA = (0.299, 0.587, 0.114)  # how bright red, green and blue look
DROP, MASK, UNKNOWN = 0.1, 0.1, 1  # texts: tokens that become padding, tokens that become the unknown id
EDGES, COLUMNS = 0.2, 0.2  # graphs: edges and feature columns that vanish


def weak(facts: Facts, inputs: Inputs, rng: torch.Generator) -> Inputs:
    """A mild view for supervised training; the inputs themselves where no mild view is known to keep the label."""
    return _of(facts)[0](facts, inputs, rng)


def strong(facts: Facts, inputs: Inputs, rng: torch.Generator) -> Inputs:
    """One of the two views of a contrastive pair."""
    return _of(facts)[1](facts, inputs, rng)


def _of(facts: Facts) -> tuple[View, View]:
    if facts.modality not in VIEWS:
        raise unknown("modality", facts.modality, VIEWS)
    return VIEWS[facts.modality]


def _same(facts: Facts, inputs: Inputs, rng: torch.Generator) -> Inputs:
    return inputs


def _weak_image(facts: Facts, inputs: Inputs, rng: torch.Generator) -> Inputs:
    (x,) = inputs
    draws = uniform(rng, x, 3, len(x), 1)
    return (shift(x, draws, "crop" in facts.views, "flip" in facts.views),)


def _strong_image(facts: Facts, inputs: Inputs, rng: torch.Generator) -> Inputs:
    (x,) = inputs
    zoom = uniform(rng, x, 5, len(x), 1)
    colour = uniform(rng, x, 4, len(x), 1) if "jitter" in facts.views else None
    return (distort(x, zoom, colour, "crop" in facts.views, "flip" in facts.views),)


def uniform(rng: torch.Generator, like: Tensor, *shape: int) -> Tensor:
    """Uniform numbers on the device of another tensor."""
    return torch.rand(shape, generator=rng, device=like.device)


def shift(x: Tensor, draws: Tensor, crop: bool, flip: bool) -> Tensor:
    """A crop of the image reflected by an eighth on each side, and a flip: one gather of rows and columns."""
    n, _, height, width = x.shape
    rows, columns = torch.arange(height, device=x.device), torch.arange(width, device=x.device)
    rows, columns = rows.expand(n, -1), columns.expand(n, -1)
    if flip:
        columns = torch.where(draws[0] < 0.5, width - 1 - columns, columns)
    if crop:
        rows = _reflected(rows, draws[1], height)
        columns = _reflected(columns, draws[2], width)
    image = torch.arange(n, device=x.device)[:, None, None]
    channels_last = x.permute(0, 2, 3, 1)[image, rows[:, :, None], columns[:, None, :]]
    return unit(channels_last.permute(0, 3, 1, 2).contiguous())


def _reflected(places: Tensor, draw: Tensor, size: int) -> Tensor:
    """Move places by up to an eighth of the size either way; those beyond a border are mirrored in it."""
    margin = size // 8
    moved = places + (draw * (2 * margin + 1)).long() - margin
    return (size - 1) - ((size - 1) - moved.abs()).abs()


def distort(x: Tensor, zoom: Tensor, colour: Tensor | None, crop: bool, flip: bool) -> Tensor:
    """A resized crop, a flip and a change of colours, as far as each is allowed."""
    x = unit(x)
    x = _zoom(x, zoom, crop, flip) if crop or flip else x
    return x if colour is None else _jitter(x, colour)


def _zoom(x: Tensor, draws: Tensor, crop: bool, flip: bool) -> Tensor:
    """Each image's own window, stretched to full size: area AREA to 1, anywhere inside the image."""
    area, aspect, right, down, mirror = draws
    area = AREA + (1 - AREA) * area if crop else torch.ones_like(area)
    aspect = ((2 * aspect - 1) * log(ASPECT)).exp() if crop else torch.ones_like(area)
    columns = _window((area * aspect).sqrt().clamp(max=1), right, x.shape[3])
    rows = _window((area / aspect).sqrt().clamp(max=1), down, x.shape[2])
    columns = torch.where(mirror < 0.5, columns.flip(1), columns) if flip else columns
    shape = (len(x), x.shape[2], x.shape[3])
    grid = torch.stack([columns[:, None, :].expand(shape), rows[:, :, None].expand(shape)], 3)
    return F.grid_sample(x, grid, padding_mode="border", align_corners=False).clamp(0, 1)


def _window(part: Tensor, draw: Tensor, size: int) -> Tensor:
    """Where `size` pixel centres lie, in [-1, 1], when they cover `part` of a side."""
    centres = (2 * torch.arange(size, device=part.device) + 1) / size - 1
    return (2 * draw - 1) * (1 - part) + part * centres


def _jitter(x: Tensor, draws: Tensor) -> Tensor:
    """Brightness and contrast; for colour images saturation as well, and sometimes no colour at all.

    Each of these mixes an image's channels linearly, and all of them together are one small matrix an image.
    """
    bright, contrast, saturation = 1 + STRENGTH * (2 * draws[:3] - 1)
    colours, mean = x.shape[1], x.mean((2, 3))
    mixing = torch.eye(colours, device=x.device).expand(len(x), -1, -1)
    if colours == 3:
        gray = torch.stack([torch.full_like(bright[:, 0], part) for part in LUMA], 1)
        mean = (mean * gray).sum(1, keepdim=True)
        saturation = torch.where(draws[3] < GRAY, 0.0, saturation)[:, :, None]
        mixing = saturation * mixing + (1 - saturation) * gray[:, None, :]
    with torch.autocast(x.device.type, enabled=False):
        offset = ((1 - contrast) * bright * mean)[:, :, None]
        mixed = torch.baddbmm(offset, (contrast * bright)[:, :, None] * mixing, x.flatten(2))
    return mixed.view_as(x).clamp(0, 1)


def _thin(facts: Facts, inputs: Inputs, rng: torch.Generator) -> Inputs:
    """Tokens dropped or masked; the token with the largest draw always stays, so no text becomes empty."""
    (tokens,) = inputs
    draws = uniform(rng, tokens, *tokens.shape).masked_fill(tokens == 0, -1)
    changed = tokens.masked_fill(draws < DROP + MASK, UNKNOWN).masked_fill(draws < DROP, 0)
    return (torch.where(draws == draws.amax(1, keepdim=True), tokens, changed),)


def _prune(facts: Facts, inputs: Inputs, rng: torch.Generator) -> Inputs:
    """Edges and feature columns dropped. A dropped edge becomes a self-edge of its source, so that shapes stay: an
    encoder that gives each node exactly one self-loop sees it as gone. Features are left as they are, and the columns
    that count are said beside: to the encoder, a dropped column is a row of its first weight that is zero.
    """
    x, edges, targets = inputs
    dropped = uniform(rng, x, edges.shape[1]) < EDGES
    kept = uniform(rng, x, x.shape[1]) >= COLUMNS
    return x, torch.where(dropped, edges[:1], edges), targets, kept


VIEWS: dict[str, tuple[View, View]] = {
    "image": (_weak_image, _strong_image),
    "text": (_same, _thin),
    "graph": (_same, _prune),
}
