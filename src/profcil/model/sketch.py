"""A sketch of the inputs: fixed random ReLU features of pixels, words or neighbourhoods.

All clients draw the same directions from one seed, so the directions are not sent, and statistics of a sketch do not
become stale. Images are convolved with random filters and averaged over each quarter. A text is represented by its bag
of words, a node by the mean of the nodes within two steps.
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

FILTER_SIZE = 6  # pixels along each side
POOLED_SIZE = 2  # an image is averaged over 2 x 2 quarters
MIN_DEVIATION = 0.05  # of an image's pixels; the contrast of flatter images is not raised further
STEPS = 2  # radius of a node's neighbourhood, as in a graph network of two layers


def sketch(modality: str, inputs: Inputs, width: int, vocabulary: int = 0, product: Product = F.linear) -> Tensor:
    """Random features of each example, [examples, width]; token ids are below `vocabulary`. `product` is x Wᵀ."""
    if modality not in SKETCHES:
        raise unknown("modality", modality, SKETCHES)
    return SKETCHES[modality](inputs, width, vocabulary, product).relu()


@lru_cache(maxsize=2)
def directions(columns: int, width: int, device: torch.device) -> Tensor:
    """Random directions, [columns, width]; they depend on these two numbers alone."""
    return torch.randn(columns, width, generator=torch_generator(0, "sketch", columns, width)).to(device)


def _image(inputs: Inputs, width: int, vocabulary: int, product: Product) -> Tensor:
    x = unit(inputs[0])
    channels = x.shape[1]
    deviation, mean = torch.std_mean(x, (1, 2, 3), keepdim=True)
    x = (x - mean) / deviation.clamp(min=MIN_DEVIATION)
    count = -(-width // POOLED_SIZE**2)
    flat_filters = directions(channels * FILTER_SIZE * FILTER_SIZE, count, x.device).T
    filters = flat_filters.unflatten(1, (channels, FILTER_SIZE, FILTER_SIZE))
    responses = F.conv2d(x, filters, padding=FILTER_SIZE // 2).relu()
    return F.adaptive_avg_pool2d(responses, POOLED_SIZE).flatten(1)[:, :width]


def _text(inputs: Inputs, width: int, vocabulary: int, product: Product) -> Tensor:
    (tokens,) = inputs
    words = (tokens > 0).sum(1, keepdim=True).clamp(min=1)
    table = directions(vocabulary, width, tokens.device)
    return F.embedding_bag(tokens, table, mode="sum", padding_idx=0) / words.sqrt()


def _graph(inputs: Inputs, width: int, vocabulary: int, product: Product) -> Tensor:
    x, (source, target), nodes = inputs
    norm = x.square().sum(1, keepdim=True).sqrt().clamp(min=1e-6)
    features = product(x, directions(x.shape[1], width, x.device).T) / norm
    degree = torch.bincount(target, minlength=len(x))[:, None] + 1
    for _ in range(STEPS):
        features = features.index_add(0, target, features[source]) / degree
    return features[nodes]


SKETCHES: dict[str, Callable[[Inputs, int, int, Product], Tensor]] = {"image": _image, "text": _text, "graph": _graph}
