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
    view, _ = _views_of(facts)
    return view(facts, inputs, rng)


def strong(facts: Facts, inputs: Inputs, rng: torch.Generator) -> Inputs:
    """One of the two views of a contrastive pair."""
    _, view = _views_of(facts)
    return view(facts, inputs, rng)


def _views_of(facts: Facts) -> tuple[View, View]:
    """The weak and the strong view of a dataset's modality."""
    if facts.modality not in VIEWS:
        raise unknown("modality", facts.modality, VIEWS)
    return VIEWS[facts.modality]


def _unchanged(facts: Facts, inputs: Inputs, rng: torch.Generator) -> Inputs:
    return inputs


def _weak_image(facts: Facts, inputs: Inputs, rng: torch.Generator) -> Inputs:
    (x,) = inputs
    crop = "crop" in facts.views
    flip = "flip" in facts.views
    draws = uniform(rng, x, 3, len(x), 1)
    return (shift(x, draws, crop, flip),)


def _strong_image(facts: Facts, inputs: Inputs, rng: torch.Generator) -> Inputs:
    (x,) = inputs
    crop = "crop" in facts.views
    flip = "flip" in facts.views
    zoom = uniform(rng, x, 5, len(x), 1)
    colour = None
    if "jitter" in facts.views:
        colour = uniform(rng, x, 4, len(x), 1)
    return (distort(x, zoom, colour, crop, flip),)


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
        mirrored = width - 1 - columns
        columns = torch.where(draws[0] < 0.5, mirrored, columns)
    if crop:
        rows = _reflected(rows, draws[1], height)
        columns = _reflected(columns, draws[2], width)
    image = torch.arange(n, device=x.device)[:, None, None]
    channels_last = x.permute(0, 2, 3, 1)
    gathered = channels_last[image, rows[:, :, None], columns[:, None, :]]
    return unit(gathered.permute(0, 3, 1, 2).contiguous())


def _reflected(places: Tensor, draw: Tensor, size: int) -> Tensor:
    """Moves pixel positions by up to an eighth of the size; positions beyond a border are mirrored in it."""
    margin = size // 8
    offset = (draw * (2 * margin + 1)).long()
    moved = places + offset - margin
    last = size - 1
    return last - (last - moved.abs()).abs()


def distort(x: Tensor, zoom: Tensor, colour: Tensor | None, crop: bool, flip: bool) -> Tensor:
    """A random resized crop, a random flip and a random change of colours, if each is allowed."""
    x = unit(x)
    if crop or flip:
        x = _zoom(x, zoom, crop, flip)
    if colour is None:
        return x
    return _jitter(x, colour)


def _zoom(x: Tensor, draws: Tensor, crop: bool, flip: bool) -> Tensor:
    """A random window of each image, resized to the full size. Its area is between AREA and 1."""
    area, aspect, right, down, mirror = draws
    n, _, height, width = x.shape
    if crop:
        area = AREA + (1 - AREA) * area
        aspect = ((2 * aspect - 1) * log(ASPECT)).exp()
    else:
        area = torch.ones_like(area)
        aspect = torch.ones_like(area)
    share_of_width = (area * aspect).sqrt().clamp(max=1)
    share_of_height = (area / aspect).sqrt().clamp(max=1)
    columns = _window(share_of_width, right, width)
    rows = _window(share_of_height, down, height)
    if flip:
        columns = torch.where(mirror < 0.5, columns.flip(1), columns)
    grid_x = columns[:, None, :].expand(n, height, width)
    grid_y = rows[:, :, None].expand(n, height, width)
    grid = torch.stack([grid_x, grid_y], 3)
    window = F.grid_sample(x, grid, padding_mode="border", align_corners=False)
    return window.clamp(0, 1)


def _window(part: Tensor, draw: Tensor, size: int) -> Tensor:
    """The coordinates, in [-1, 1], of `size` pixel centres that cover a random `part` of a side."""
    pixels = torch.arange(size, device=part.device)
    centres = (2 * pixels + 1) / size - 1
    middle = (2 * draw - 1) * (1 - part)
    return middle + part * centres


def _jitter(x: Tensor, draws: Tensor) -> Tensor:
    """Random brightness and contrast. Colour images also have random saturation, and some become gray.

    Each of these changes mixes an image's channels linearly, so that together they are one small matrix per image.
    """
    change = 2 * draws[:3] - 1
    bright, contrast, saturation = 1 + STRENGTH * change
    colours = x.shape[1]
    mean = x.mean((2, 3))
    identity = torch.eye(colours, device=x.device)
    mixing = identity.expand(len(x), -1, -1)
    if colours == 3:
        parts = [torch.full_like(bright[:, 0], part) for part in LUMA]
        gray = torch.stack(parts, 1)
        mean = (mean * gray).sum(1, keepdim=True)
        becomes_gray = draws[3] < GRAY
        saturation = torch.where(becomes_gray, 0.0, saturation)[:, :, None]
        mixing = saturation * mixing + (1 - saturation) * gray[:, None, :]
    with torch.autocast(x.device.type, enabled=False):
        offset = (1 - contrast) * bright * mean
        factor = contrast * bright
        matrix = factor[:, :, None] * mixing
        mixed = torch.baddbmm(offset[:, :, None], matrix, x.flatten(2))
    return mixed.view_as(x).clamp(0, 1)


def _drop_tokens(facts: Facts, inputs: Inputs, rng: torch.Generator) -> Inputs:
    """Drops and masks tokens. The token with the largest draw always stays, so that no text becomes empty."""
    (tokens,) = inputs
    draws = uniform(rng, tokens, *tokens.shape)
    draws = draws.masked_fill(tokens == 0, -1)
    masked = tokens.masked_fill(draws < DROP + MASK, UNKNOWN)
    changed = masked.masked_fill(draws < DROP, 0)
    always_stays = draws == draws.amax(1, keepdim=True)
    return (torch.where(always_stays, tokens, changed),)


def _drop_edges_and_columns(facts: Facts, inputs: Inputs, rng: torch.Generator) -> Inputs:
    """Drops edges and feature columns without changing shapes. A dropped edge becomes a self-loop of its source, which
    has no effect in an encoder that gives each node exactly one self-loop. The features are not changed: the mask of
    the kept columns is returned as a fourth input, and the encoder multiplies its first weight by it.
    """
    x, edges, targets = inputs
    edge_draws = uniform(rng, x, edges.shape[1])
    column_draws = uniform(rng, x, x.shape[1])
    self_loops = edges[:1]
    kept_edges = torch.where(edge_draws < EDGES, self_loops, edges)
    kept_columns = column_draws >= COLUMNS
    return x, kept_edges, targets, kept_columns


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
