"""How good is the representation by itself? Closed-form references on base features, all classes at once.

These look at all training data centrally and so are no federated methods: they tell a user whether a method loses by
its representation (low probe) or by its memory and head (probe high, accuracy low).
"""

from __future__ import annotations

import torch
from torch import Tensor


def ridge_accuracy(
    train: Tensor, y: Tensor, test: Tensor, truth: Tensor, classes: int, strength: float = 1e-3
) -> float:
    """Accuracy of a ridge classifier with a bias on standardised features; `strength` per training example."""
    mean, std = train.double().mean(0), train.double().std(0).clamp(min=1e-6)
    a, b = (torch.cat([(u.double() - mean) / std, u.new_ones(len(u), 1).double()], 1) for u in (train, test))
    target = torch.nn.functional.one_hot(y, classes).double()
    gram = a.T @ a + strength * len(a) * torch.eye(a.shape[1], dtype=torch.float64, device=a.device)
    weight = torch.linalg.solve(gram, a.T @ target)
    return float(((b @ weight).argmax(1) == truth).double().mean())


def nearest_mean_accuracy(train: Tensor, y: Tensor, test: Tensor, truth: Tensor) -> float:
    """Accuracy of the nearest true class mean: the best that a memory of means can do without an adapter."""
    labels = torch.unique(y)
    means = torch.stack([train[y == label].mean(0) for label in labels])
    return float((labels[torch.cdist(test, means).argmin(1)] == truth).double().mean())
