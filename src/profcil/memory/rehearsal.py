"""Class-balanced rehearsal: real features of the current classes beside pseudo-features of remembered ones.

One epoch holds the same number of features of every class: drawn from the real ones without replacement as long as
they last, or sampled as ũ = μ + γ σ ⊙ ε. A uniform draw from an epoch is therefore an unbiased sample of the balanced
objective (1/|Y|) Σ_y E_{u∼q_y}, which is what the paper's balanced-gradient lemma asks for.
"""

from __future__ import annotations

import torch
from torch import Tensor

from profcil.memory.bank import Bank


def pseudo(mean: Tensor, spread: Tensor, quota: int, noise: float, rng: torch.Generator) -> Tensor:
    """`quota` pseudo-features of each class, [classes · quota, d], classes in order."""
    k, d = mean.shape
    epsilon = torch.randn(k, quota, d, generator=rng, device=mean.device)
    return (mean[:, None] + noise * spread[:, None] * epsilon).reshape(k * quota, d)


def balanced_rows(y: Tensor, quota: int, rng: torch.Generator, count: Tensor | None = None) -> Tensor:
    """Indices of `quota` examples of each class in `y`, wrapping around a fresh shuffle where a class has fewer.
    Whoever draws often gives the classes' counts: working them out has to wait for the device."""
    count = torch.unique(y, return_counts=True)[1] if count is None else count
    shuffled = torch.randperm(len(y), generator=rng, device=y.device)
    order = shuffled[torch.sort(y[shuffled], stable=True).indices]  # by class, random inside
    start = torch.cumsum(count, 0) - count
    turn = torch.arange(quota, device=y.device)
    return order[(start[:, None] + turn % count[:, None]).flatten()]


class Rehearsal:
    """The balanced pseudo multi-task set of one client: a batch source for the engine (Eq. 'pro-loss')."""

    def __init__(self, features: Tensor, y: Tensor, bank: Bank | None, *, quota: int, noise: float) -> None:
        self.features, self.y, self.quota, self.noise = features, y, quota, noise
        classes, self.count = torch.unique(y, return_counts=True)
        current = set(classes.tolist())
        rows = [i for i, label in enumerate(bank.labels) if label not in current] if bank else []
        index = torch.tensor(rows, dtype=torch.long, device=features.device)
        self.labels = torch.tensor([bank.labels[i] for i in rows] if bank else [], dtype=torch.long, device=y.device)
        self.mean = bank.mean[index] if bank else features[:0]
        self.spread = bank.spread[index] if bank else features[:0]
        self.size = quota * (len(rows) + len(current))

    def epoch(self, rng: torch.Generator) -> dict[str, Tensor]:
        real = balanced_rows(self.y, self.quota, rng, self.count)
        old = pseudo(self.mean, self.spread, self.quota, self.noise, rng)
        return {
            "u": torch.cat([self.features[real], old]),
            "y": torch.cat([self.y[real], self.labels.repeat_interleave(self.quota)]),
        }
