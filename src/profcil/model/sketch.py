"""A sketch of the inputs: fixed random ReLU features of pixels, words or neighbourhoods.

All clients draw the same directions from one seed, so the directions are not sent, and statistics of a sketch do not
become stale. Images are convolved with random filters and averaged over the four quarters; a text is its bag of words;
a node is the mean of the nodes within two steps.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from profcil.data.bundle import Inputs
from profcil.errors import unknown
from profcil.model.layers import unit
from profcil.randomness import torch_generator

Product = Callable[[Tensor, Tensor], Tensor]

SIDE = 6  # of a filter, in pixels
QUARTERS = 2  # parts an image has along each side
FLAT = 0.05  # deviation of an image's pixels from which on its contrast is not raised further
STEPS = 2  # how far a node sees, as far as a graph network of two layers


def sketch(modality: str, inputs: Inputs, width: int, vocabulary: int = 0, product: Product = F.linear) -> Tensor:
    """Random features of each example, [examples, width]; token ids are below `vocabulary`. `product` is x Wᵀ."""
    if modality not in SKETCHES:
        raise unknown("modality", modality, SKETCHES)
    return SKETCHES[modality](inputs, width, vocabulary, product).relu()


@lru_cache(maxsize=2)
def directions(columns: int, width: int, device: torch.device) -> Tensor:
    """Random directions, [columns, width]; they depend on nothing but their number."""
    return torch.randn(columns, width, generator=torch_generator(0, "sketch", columns, width)).to(device)


def _image(inputs: Inputs, width: int, vocabulary: int, product: Product) -> Tensor:
    x = unit(inputs[0])
    spread, mean = torch.std_mean(x, (1, 2, 3), keepdim=True)
    x, shape = (x - mean) / spread.clamp(min=FLAT), (x.shape[1], SIDE, SIDE)
    filters = directions(x.shape[1] * SIDE * SIDE, -(-width // QUARTERS**2), x.device).T.unflatten(1, shape)
    found = F.conv2d(x, filters, padding=SIDE // 2).relu()
    return F.adaptive_avg_pool2d(found, QUARTERS).flatten(1)[:, :width]


def _text(inputs: Inputs, width: int, vocabulary: int, product: Product) -> Tensor:
    (tokens,) = inputs
    words = (tokens > 0).sum(1, keepdim=True).clamp(min=1)
    table = directions(vocabulary, width, tokens.device)
    return F.embedding_bag(tokens, table, mode="sum", padding_idx=0) / words.sqrt()


def _graph(inputs: Inputs, width: int, vocabulary: int, product: Product) -> Tensor:
    x, (source, target), asked = inputs
    size = x.square().sum(1, keepdim=True).sqrt().clamp(min=1e-6)
    seen = product(x, directions(x.shape[1], width, x.device).T) / size
    degree = torch.bincount(target, minlength=len(x))[:, None] + 1
    for _ in range(STEPS):
        seen = seen.index_add(0, target, seen[source]) / degree
    return seen[asked]


SKETCHES: dict[str, Callable[[Inputs, int, int, Product], Tensor]] = {"image": _image, "text": _text, "graph": _graph}
