"""Views of a batch: augmentations that preserve the label, as pure functions of the inputs and a generator.

`weak` is for supervised training, `strong` for the contrastive pairs A(x) of the warm-up (Eq. warmup) and of the
auxiliary term. Random numbers are drawn for the whole batch at once, on the device of the inputs. Shapes never depend
on values. Image views have values in [0, 1].
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

AREA = 0.4  # smallest area of a strong crop, as a share of the image
ASPECT = 4 / 3  # largest aspect ratio of a strong crop
STRENGTH = 0.4  # largest relative change of brightness, contrast and saturation
GRAY = 0.2  # probability that a colour image becomes gray
LUMA = (0.299, 0.587, 0.114)  # weights of red, green and blue in the brightness
DROP = 0.1  # texts: probability that a token becomes padding
MASK = 0.1  # texts: probability that a token becomes the unknown id
UNKNOWN = 1  # texts: the unknown id
EDGES = 0.2  # graphs: probability that an edge is dropped
COLUMNS = 0.2  # graphs: probability that a feature column is dropped
NOISE = 0.1  # tables: deviation of the noise, in units of a column's deviation
CELLS = 0.2  # tables: probability that a value is replaced by its column's mean


def weak(facts: Facts, inputs: Inputs, rng: torch.Generator) -> Inputs:
    """A mild view for supervised training. Texts, graphs and tables are unchanged: no mild view is known to preserve
    labels."""
    return _views_of(facts)[0](facts, inputs, rng)


def strong(facts: Facts, inputs: Inputs, rng: torch.Generator) -> Inputs:
    """One of the two views of a contrastive pair."""
    return _views_of(facts)[1](facts, inputs, rng)


def _views_of(facts: Facts) -> tuple[View, View]:
    """The weak and the strong view of a dataset's modality."""
    if facts.modality not in VIEWS:
        raise unknown("modality", facts.modality, VIEWS)
    return VIEWS[facts.modality]


def _unchanged(facts: Facts, inputs: Inputs, rng: torch.Generator) -> Inputs:
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
    """A random crop of the image with reflected borders of an eighth of each side, and a random horizontal flip. Both
    are one gather of rows and columns."""
    n, _, height, width = x.shape
    rows = torch.arange(height, device=x.device).expand(n, -1)
    columns = torch.arange(width, device=x.device).expand(n, -1)
    if flip:
        columns = torch.where(draws[0] < 0.5, width - 1 - columns, columns)
    if crop:
        rows = _reflected(rows, draws[1], height)
        columns = _reflected(columns, draws[2], width)
    image = torch.arange(n, device=x.device)[:, None, None]
    channels_last = x.permute(0, 2, 3, 1)[image, rows[:, :, None], columns[:, None, :]]
    return unit(channels_last.permute(0, 3, 1, 2).contiguous())


def _reflected(places: Tensor, draw: Tensor, size: int) -> Tensor:
    """Moves pixel positions by up to an eighth of the size; positions beyond a border are mirrored in it."""
    margin = size // 8
    moved = places + (draw * (2 * margin + 1)).long() - margin
    return (size - 1) - ((size - 1) - moved.abs()).abs()


def distort(x: Tensor, zoom: Tensor, colour: Tensor | None, crop: bool, flip: bool) -> Tensor:
    """A random resized crop, a random flip and a random change of colours, if each is allowed."""
    x = unit(x)
    if crop or flip:
        x = _zoom(x, zoom, crop, flip)
    return x if colour is None else _jitter(x, colour)


def _zoom(x: Tensor, draws: Tensor, crop: bool, flip: bool) -> Tensor:
    """A random window of each image, resized to the full size. Its area is between AREA and 1."""
    area, aspect, right, down, mirror = draws
    area = AREA + (1 - AREA) * area if crop else torch.ones_like(area)
    aspect = ((2 * aspect - 1) * log(ASPECT)).exp() if crop else torch.ones_like(area)
    columns = _window((area * aspect).sqrt().clamp(max=1), right, x.shape[3])
    rows = _window((area / aspect).sqrt().clamp(max=1), down, x.shape[2])
    if flip:
        columns = torch.where(mirror < 0.5, columns.flip(1), columns)
    shape = (len(x), x.shape[2], x.shape[3])
    grid = torch.stack([columns[:, None, :].expand(shape), rows[:, :, None].expand(shape)], 3)
    return F.grid_sample(x, grid, padding_mode="border", align_corners=False).clamp(0, 1)


def _window(part: Tensor, draw: Tensor, size: int) -> Tensor:
    """The coordinates, in [-1, 1], of `size` pixel centres that cover a random `part` of a side."""
    centres = (2 * torch.arange(size, device=part.device) + 1) / size - 1
    return (2 * draw - 1) * (1 - part) + part * centres


def _jitter(x: Tensor, draws: Tensor) -> Tensor:
    """Random brightness and contrast. Colour images also have random saturation, and some become gray.

    Each of these changes mixes an image's channels linearly, so that together they are one small matrix per image.
    """
    bright, contrast, saturation = 1 + STRENGTH * (2 * draws[:3] - 1)
    colours = x.shape[1]
    mean = x.mean((2, 3))
    mixing = torch.eye(colours, device=x.device).expand(len(x), -1, -1)
    if colours == 3:
        gray = torch.stack([torch.full_like(bright[:, 0], part) for part in LUMA], 1)
        mean = (mean * gray).sum(1, keepdim=True)
        saturation = torch.where(draws[3] < GRAY, 0.0, saturation)[:, :, None]
        mixing = saturation * mixing + (1 - saturation) * gray[:, None, :]
    with torch.autocast(x.device.type, enabled=False):
        offset = ((1 - contrast) * bright * mean)[:, :, None]
        matrix = (contrast * bright)[:, :, None] * mixing
        mixed = torch.baddbmm(offset, matrix, x.flatten(2))
    return mixed.view_as(x).clamp(0, 1)


def _drop_tokens(facts: Facts, inputs: Inputs, rng: torch.Generator) -> Inputs:
    """Drops and masks tokens. The token with the largest draw always stays, so that no text becomes empty."""
    (tokens,) = inputs
    draws = uniform(rng, tokens, *tokens.shape).masked_fill(tokens == 0, -1)
    changed = tokens.masked_fill(draws < DROP + MASK, UNKNOWN).masked_fill(draws < DROP, 0)
    return (torch.where(draws == draws.amax(1, keepdim=True), tokens, changed),)


def _drop_edges_and_columns(facts: Facts, inputs: Inputs, rng: torch.Generator) -> Inputs:
    """Drops edges and feature columns without changing shapes. A dropped edge becomes a self-loop of its source, which
    has no effect in an encoder that gives each node exactly one self-loop. The features are not changed: the mask of
    the kept columns is returned as a fourth input, and the encoder multiplies its first weight by it.
    """
    x, edges, targets = inputs
    dropped = uniform(rng, x, edges.shape[1]) < EDGES
    kept = uniform(rng, x, x.shape[1]) >= COLUMNS
    return x, torch.where(dropped, edges[:1], edges), targets, kept


def _noisy_and_masked(facts: Facts, inputs: Inputs, rng: torch.Generator) -> Inputs:
    """Adds noise to the values of a table and masks some of them. The values are not changed: both are in units of
    standardised columns, so the noise and the mask of kept values are further inputs, which the encoder applies."""
    (x,) = inputs
    noise = torch.randn(x.shape, generator=rng, device=x.device) * (NOISE if "noise" in facts.views else 0.0)
    kept = uniform(rng, x, *x.shape) >= (CELLS if "mask" in facts.views else 0.0)
    return x, noise, kept


VIEWS: dict[str, tuple[View, View]] = {
    "image": (_weak_image, _strong_image),
    "text": (_unchanged, _drop_tokens),
    "graph": (_unchanged, _drop_edges_and_columns),
    "table": (_unchanged, _noisy_and_masked),
}
