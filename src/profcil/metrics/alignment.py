"""Alignment: the cosine between remembered and true class means.

The paper's Align is the plain cosine. Features after a ReLU share a large common mean, so the plain cosine is high for
any two classes. With the common mean removed, the cosine says whether a memory is closer to its own class than to the
others. Both are reported.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def oracle_means(features: Tensor, y: Tensor, labels: tuple[int, ...]) -> Tensor:
    """The true class means of held-out features under the current model; row i is class `labels[i]`."""
    means = [features[y == label].mean(0) for label in labels]
    return torch.stack(means)


def alignment(memory: Tensor, oracle: Tensor) -> float:
    """Align: the mean cosine over classes (paper, memory-alignment diagnostic)."""
    cosines = F.cosine_similarity(memory.double(), oracle.double(), dim=1)
    return float(cosines.mean())


def centred_alignment(memory: Tensor, oracle: Tensor, centre: Tensor) -> float:
    """The mean cosine after subtracting a common mean from both."""
    centre = centre.double()
    centred_memory = memory.double() - centre
    centred_oracle = oracle.double() - centre
    return alignment(centred_memory, centred_oracle)


def compare_means(memory: Tensor, features: Tensor, y: Tensor, labels: tuple[int, ...]) -> dict[str, float]:
    """Both alignments of remembered means with the true means of held-out features.

    The common mean is that of all held-out features.
    """
    oracle = oracle_means(features, y, labels)
    plain = alignment(memory, oracle)
    centred = centred_alignment(memory, oracle, features.mean(0))
    return {"align": plain, "centred": centred, "classes": len(labels)}
