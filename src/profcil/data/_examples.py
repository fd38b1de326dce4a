"""Writes examples of a dataset as files, to try a trained model on them."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from profcil.data.bundle import Bundle, Rows
from profcil.errors import DataError


def write_images(bundle: Bundle, folder: Path, count: int) -> list[Path]:
    """Writes test images as PNG files, each into a folder with the name of its class, and returns their paths."""
    if bundle.facts.modality != "image" or not isinstance(bundle.test, Rows):
        raise DataError(
            f"{bundle.facts.title} has no images, and other examples cannot be written; name another dataset"
        )
    try:
        from PIL import Image
    except ImportError:
        raise DataError("images need the package pillow, which is not installed; `pip install pillow`") from None
    paths = []
    for row in spread_over_classes(bundle.test.y, count):
        pixels = bytes_of(bundle.test.x[row])
        label = int(bundle.test.y[row])
        path = folder / bundle.names[label] / f"{row}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.numpy()).save(path)
        paths.append(path)
    return paths


def spread_over_classes(y: Tensor, count: int) -> list[int]:
    """Rows of `count` examples, or of all if there are fewer: of every class the first, then of every class the second,
    and so on. Few examples are of classes that are far apart in number."""
    rank = torch.zeros(len(y), dtype=torch.long)
    for label in torch.unique(y).tolist():
        own = torch.nonzero(y == label).flatten()
        rank[own] = torch.arange(len(own))
    by_rank = sorted(range(len(y)), key=lambda row: (int(rank[row]), int(y[row])))
    classes = len(torch.unique(y))
    if count >= classes:
        return by_rank[:count]
    return [by_rank[i * classes // count] for i in range(count)]


def bytes_of(image: Tensor) -> Tensor:
    """Pixels [height, width] or [height, width, 3] as bytes."""
    if image.is_floating_point():
        image = (image * 255).round()
    pixels = image.byte().permute(1, 2, 0)
    if pixels.shape[2] == 1:
        pixels = pixels[:, :, 0]
    return pixels.contiguous()
