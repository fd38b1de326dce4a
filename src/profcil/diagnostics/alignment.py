"""Do old memories still point where their classes are? Cosine between remembered and true class means.

The paper's Align is the plain cosine. Features after a ReLU share a large common mean, so the plain cosine is high for
any two classes; with the common mean removed, the number says whether a memory is nearer to its own class than to
the others. Both are reported.
"""

from __future__ import annotations

import torch
from torch import Tensor


def oracle_means(features: Tensor, y: Tensor, labels: tuple[int, ...]) -> Tensor:
    """True class means of held-out features under the current model, rows by `labels`."""
    return torch.stack([features[y == label].mean(0) for label in labels])


def alignment(memory: Tensor, oracle: Tensor) -> float:
    """Align: the mean cosine over classes (paper, memory-alignment diagnostic)."""
    return float(torch.nn.functional.cosine_similarity(memory.double(), oracle.double(), dim=1).mean())


def centred_alignment(memory: Tensor, oracle: Tensor, centre: Tensor) -> float:
    """The same after removing a common mean from both."""
    return alignment(memory.double() - centre.double(), oracle.double() - centre.double())


def compare_means(memory: Tensor, features: Tensor, y: Tensor, labels: tuple[int, ...]) -> dict[str, float]:
    """Both alignments of some remembered means with the true means of held-out features, centred on all of these."""
    oracle = oracle_means(features, y, labels)
    centred = centred_alignment(memory, oracle, features.mean(0))
    return {"align": alignment(memory, oracle), "centred": centred, "classes": len(labels)}
