"""Handwritten digits, 8 x 8 pixels, from scikit-learn. No download is needed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from profcil.data.bundle import Bundle, Facts, Rows
from profcil.randomness import generator

FACTS = Facts(
    name="digits",
    title="Digits",
    modality="image",
    classes=10,
    train=1438,
    test=359,
    views=("crop", "jitter"),  # no flip: a mirrored digit is not the same digit
    encoder="convnet",
    homepage="https://archive.ics.uci.edu/dataset/80",
    licence="CC BY 4.0",
    get="`pip install scikit-learn`, which contains it",
)
TEST_SHARE = 0.2


def load(root: Path, seed: int = 0) -> Bundle:
    """The digits with a seeded 80/20 split of every class. `root` is not used."""
    from sklearn.datasets import load_digits

    raw = load_digits()
    bytes_of_pixels = raw.images.astype(np.int64) * 255 // 16  # the digits have 17 grey levels
    x = torch.from_numpy(bytes_of_pixels.astype(np.uint8)[:, None])
    y = torch.from_numpy(raw.target.astype(np.int64))
    is_test = torch.from_numpy(held_out(raw.target, seed))
    names = tuple(str(digit) for digit in range(FACTS.classes))
    train = Rows(x[~is_test], y[~is_test])
    test = Rows(x[is_test], y[is_test])
    return Bundle(FACTS, train, test, None, names)


def held_out(labels: np.ndarray, seed: int) -> np.ndarray:
    """A mask of the test examples: a fifth of every class."""
    is_test = np.zeros(len(labels), dtype=bool)
    for digit in range(FACTS.classes):
        ids = np.flatnonzero(labels == digit)
        drawn = generator(seed, "digits", "split", digit).permutation(ids)
        count = round(TEST_SHARE * len(ids))
        is_test[drawn[:count]] = True
    return is_test
