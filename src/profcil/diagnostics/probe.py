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
        scaled = (u.double() - mean) / std
        return torch.cat([scaled, bias], 1)

    a = standardised(train)
    target = torch.nn.functional.one_hot(y, classes).double()
    width = a.shape[1]
    identity = torch.eye(width, dtype=torch.float64, device=a.device)
    penalty = strength * len(a) * identity
    gram = a.T @ a + penalty
    weight = torch.linalg.solve(gram, a.T @ target)
    scores = standardised(test) @ weight
    return _accuracy(scores.argmax(1), truth)


def nearest_mean_accuracy(train: Tensor, y: Tensor, test: Tensor, truth: Tensor) -> float:
    """The accuracy of the nearest true class mean: an upper bound for a memory of means without an adapter."""
    labels = torch.unique(y)
    means = [train[y == label].mean(0) for label in labels]
    distances = torch.cdist(test, torch.stack(means))
    nearest = distances.argmin(1)
    return _accuracy(labels[nearest], truth)


def _accuracy(predicted: Tensor, truth: Tensor) -> float:
    is_correct = predicted == truth
    return float(is_correct.double().mean())
