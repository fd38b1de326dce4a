"""Probes of the representation: closed-form classifiers on base features, all classes at once.

They use all training data centrally, so they are not federated methods. They show whether a method loses accuracy by
its representation (low probe) or by its memory and head (high probe, low accuracy).
"""

from __future__ import annotations

import torch
from torch import Tensor


def ridge_accuracy(
    train: Tensor, y: Tensor, test: Tensor, truth: Tensor, classes: int, strength: float = 1e-3
) -> float:
    """The accuracy of a ridge classifier with a bias on standardised features; `strength` is per training example."""
    mean = train.double().mean(0)
    std = train.double().std(0).clamp(min=1e-6)

    def standardised(u: Tensor) -> Tensor:
        bias = u.new_ones(len(u), 1).double()
        return torch.cat([(u.double() - mean) / std, bias], 1)

    a = standardised(train)
    target = torch.nn.functional.one_hot(y, classes).double()
    identity = torch.eye(a.shape[1], dtype=torch.float64, device=a.device)
    gram = a.T @ a + strength * len(a) * identity
    weight = torch.linalg.solve(gram, a.T @ target)
    predicted = (standardised(test) @ weight).argmax(1)
    return float((predicted == truth).double().mean())


def nearest_mean_accuracy(train: Tensor, y: Tensor, test: Tensor, truth: Tensor) -> float:
    """The accuracy of the nearest true class mean: an upper bound for a memory of means without an adapter."""
    labels = torch.unique(y)
    means = torch.stack([train[y == label].mean(0) for label in labels])
    predicted = labels[torch.cdist(test, means).argmin(1)]
    return float((predicted == truth).double().mean())
