"""Alignment: the cosine between remembered and true class means.

The paper's Align is the plain cosine. Features after a ReLU share a large common mean, so the plain cosine is high for
any two classes. With the common mean removed, the cosine says whether a memory is closer to its own class than to the
others. Both are reported.
"""

from __future__ import annotations

import torch
from torch import Tensor


def oracle_means(features: Tensor, y: Tensor, labels: tuple[int, ...]) -> Tensor:
    """The true class means of held-out features under the current model; row i is class `labels[i]`."""
    return torch.stack([features[y == label].mean(0) for label in labels])


def alignment(memory: Tensor, oracle: Tensor) -> float:
    """Align: the mean cosine over classes (paper, memory-alignment diagnostic)."""
    cosines = torch.nn.functional.cosine_similarity(memory.double(), oracle.double(), dim=1)
    return float(cosines.mean())


def centred_alignment(memory: Tensor, oracle: Tensor, centre: Tensor) -> float:
    """The mean cosine after subtracting a common mean from both."""
    return alignment(memory.double() - centre.double(), oracle.double() - centre.double())


def compare_means(memory: Tensor, features: Tensor, y: Tensor, labels: tuple[int, ...]) -> dict[str, float]:
    """Both alignments of remembered means with the true means of held-out features.

    The common mean is that of all held-out features.
    """
    oracle = oracle_means(features, y, labels)
    centred = centred_alignment(memory, oracle, features.mean(0))
    return {"align": alignment(memory, oracle), "centred": centred, "classes": len(labels)}
