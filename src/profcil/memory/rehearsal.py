"""Class-balanced rehearsal: real features of the current classes beside pseudo-features of remembered ones.

One epoch holds the same number of features of every class: drawn from the real ones without replacement as long as
they last, or sampled as ũ = μ + γ σ ⊙ ε. A uniform draw from an epoch is therefore an unbiased sample of the balanced
objective (1/|Y|) Σ_y E_{u∼q_y}, which is what the paper's balanced-gradient lemma asks for.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from profcil.memory.bank import Bank
from profcil.tensors import to_device


def pseudo(mean: Tensor, spread: Tensor, quota: int, noise: float, rng: torch.Generator) -> Tensor:
    """`quota` pseudo-features μ + γ σ ⊙ ε of each class, [classes · quota, d], classes in order."""
    k, d = mean.shape
    epsilon = mean.new_empty(k, quota, d).normal_(generator=rng)
    return scaled(mean, spread, noise, epsilon).view(k * quota, d)


def scaled(mean: Tensor, spread: Tensor, noise: float, epsilon: Tensor) -> Tensor:
    """μ + γ σ ⊙ ε, written over ε, [classes, quota, d]."""
    return torch.addcmul(mean[:, None], spread[:, None], epsilon, value=noise, out=epsilon)


def permutation(size: int, rng: torch.Generator, keys: torch.dtype) -> Tensor:
    """A random permutation. On a GPU it is the order of uniform keys, which several clients can draw at once."""
    if rng.device.type == "cpu":
        return torch.randperm(size, generator=rng)
    return torch.rand(size, generator=rng, device=rng.device, dtype=keys).argsort()


class Balanced:
    """Draws the same number of examples of each class, again and again."""

    def __init__(self, labels: Sequence[int] | Tensor, quota: int, device: torch.device | None = None) -> None:
        """`labels` are those of the examples. Rows are drawn on `device`, by default that of the labels."""
        y = torch.as_tensor(labels, dtype=torch.long)
        self.classes, count = torch.unique(y, return_counts=True)
        start = torch.cumsum(count, 0) - count
        turn = torch.arange(quota, device=y.device)
        places = (start[:, None] + turn % count[:, None]).flatten()  # wrapping around where a class has fewer
        device = device or y.device
        self.y = to_device(y, device)
        self.places = to_device(places, device)
        self.labels = to_device(self.classes.repeat_interleave(quota), device)  # of the drawn rows

    def draw(self, rng: torch.Generator) -> Tensor:
        """Row numbers, classes in order; each class in a fresh shuffle."""
        return self.chosen(torch.randperm(len(self.y), generator=rng, device=self.y.device))

    def chosen(self, shuffled: Tensor) -> Tensor:
        """The rows that a permutation of all examples gives."""
        by_class = torch.sort(self.y.index_select(0, shuffled), stable=True).indices
        return shuffled.index_select(0, by_class.index_select(0, self.places))


class Roll:
    """The classes of an epoch: `quota` examples of every class in `labels`, then as many of every other class that is
    remembered."""

    def __init__(
        self,
        labels: Sequence[int] | Tensor,
        remembered: Sequence[int],
        quota: int,
        device: torch.device | None = None,
    ) -> None:
        self.quota = quota
        self.real = Balanced(labels, quota, device)
        current = set(self.real.classes.tolist())
        rows = [i for i, label in enumerate(remembered) if label not in current]
        both = torch.tensor([rows, [remembered[i] for i in rows]], dtype=torch.long)
        self.rows, classes = to_device(both, self.real.labels.device)  # rows of the bank, and their classes
        self.y = torch.cat([self.real.labels, classes.repeat_interleave(quota)])


class Rehearsal:
    """The balanced pseudo multi-task set of one client: a batch source for the engine (Eq. 'pro-loss')."""

    def __init__(self, features: Tensor, roll: Roll, bank: Bank | None, *, noise: float) -> None:
        self.features, self.roll, self.noise = features, roll, noise
        self.mean = bank.mean[roll.rows] if bank else features[:0]
        self.spread = bank.spread[roll.rows] if bank else features[:0]
        self.size = len(roll.y)

    def epoch(self, rng: torch.Generator) -> dict[str, Tensor]:
        real = self.roll.real
        n = len(real.labels)
        u = self.features.new_empty(self.size, self.features.shape[1])
        chosen = real.chosen(permutation(len(real.y), rng, torch.float64))
        torch.index_select(self.features, 0, chosen, out=u[:n])
        epsilon = self.normal(u[n:].view(len(self.mean), self.roll.quota, u.shape[1]), rng)
        scaled(self.mean, self.spread, self.noise, epsilon)
        return {"u": u, "y": self.roll.y}

    def order(self, rng: torch.Generator) -> Tensor:
        """The order of an epoch's rows."""
        return permutation(self.size, rng, torch.float32)

    def normal(self, out: Tensor, rng: torch.Generator) -> Tensor:
        """Fills a tensor with standard normal numbers."""
        return out.normal_(generator=rng)
