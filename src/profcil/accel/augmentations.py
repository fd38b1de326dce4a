"""Views of images by single kernels on a GPU, and views of several clients' images at once.

Other modalities, and images for which there is no kernel, take the plain functions of `model.augmentations`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from profcil.accel.loader import kernel_module
from profcil.data.bundle import Facts, Inputs
from profcil.model import augmentations as plain

Generators = torch.Generator | Sequence[torch.Generator]  # a sequence: one for each equal part of the batch
LARGEST = 16384  # numbers in an image that the kernels take


def weak(facts: Facts, inputs: Inputs, generators: Generators) -> Inputs:
    """`plain.weak`; of several clients' images, each client's by its own generator."""
    if facts.modality != "image":
        return plain.weak(facts, inputs, single(generators))
    (x,) = inputs
    crop = "crop" in facts.views
    flip = "flip" in facts.views
    draws = uniform(generators, x, 3)
    shift = kernels().shift if fits(x) else plain.shift
    return (shift(x, draws, crop, flip),)


def strong(facts: Facts, inputs: Inputs, generators: Generators) -> Inputs:
    """`plain.strong`; of several clients' images, each client's by its own generator."""
    if facts.modality != "image":
        return plain.strong(facts, inputs, single(generators))
    (x,) = inputs
    crop = "crop" in facts.views
    flip = "flip" in facts.views
    zoom = uniform(generators, x, 5)
    colour = None
    if "jitter" in facts.views:
        colour = uniform(generators, x, 4)
    distort = kernels().distort if fits(x) else plain.distort
    return (distort(x, zoom, colour, crop, flip),)


def single(generators: Generators) -> torch.Generator:
    assert isinstance(generators, torch.Generator)
    return generators


def uniform(generators: Generators, x: Tensor, count: int) -> Tensor:
    """`count` numbers an image, [count, images, 1]."""
    if isinstance(generators, torch.Generator):
        return plain.uniform(generators, x, count, len(x), 1)
    each = len(x) // len(generators)
    draws = [plain.uniform(g, x, count, each, 1) for g in generators]
    return torch.cat(draws, 1)


def fits(x: Tensor) -> bool:
    """Whether the kernels take these images."""
    known_type = x.dtype in (torch.uint8, torch.float32)
    if not x.is_cuda or x.requires_grad or not known_type:
        return False
    numbers = x.shape[1:].numel()
    return numbers <= LARGEST and kernels() is not None


def kernels() -> Any:
    """The module of kernels; None without Triton."""
    return kernel_module("triton.augmentations")
