"""Class-balanced rehearsal: real features of the current classes and pseudo-features of remembered ones.

One epoch has the same number of features of every class. Features of a current class are drawn from the real ones,
without replacement until all are used. Features of a remembered class are sampled as ũ = μ + γ σ ⊙ ε, or as
ũ = μ + γ L ε with a factor L of a covariance that all classes share. A uniform draw from an epoch is therefore an
unbiased sample of the balanced objective (1/|Y|) Σ_y E_{u∼q_y}, as the paper's balanced-gradient lemma requires.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from profcil.data.bundle import to_device
from profcil.memory.bank import Bank


def pseudo_features(
    mean: Tensor, spread: Tensor, quota: int, noise: float, rng: torch.Generator, factor: Tensor | None = None
) -> Tensor:
    """`quota` pseudo-features μ + γ σ ⊙ ε of each class, Eq. (old-memory-sampling), [classes · quota, d], in the order
    of the classes. With a factor L they are μ + γ L ε."""
    classes, d = mean.shape
    epsilon = mean.new_empty(classes, quota, d).normal_(generator=rng)
    if factor is not None:
        spread = torch.ones_like(mean)
    correlate_(epsilon, factor)
    features = to_pseudo_features_(epsilon, mean, spread, noise)
    return features.view(classes * quota, d)


def to_pseudo_features_(epsilon: Tensor, mean: Tensor, spread: Tensor, noise: float) -> Tensor:
    """Overwrites ε, [classes, quota, d], with μ + γ σ ⊙ ε."""
    return torch.addcmul(mean[:, None], spread[:, None], epsilon, value=noise, out=epsilon)


def correlate_(epsilon: Tensor, factor: Tensor | None) -> Tensor:
    """Overwrites the rows ε with Lε. Without a factor L they stay."""
    if factor is None:
        return epsilon
    return epsilon.copy_(epsilon @ factor.T)


def permutation(size: int, rng: torch.Generator, keys: torch.dtype) -> Tensor:
    """A random permutation. On a GPU it is the order of uniform keys, since these can be drawn for several clients at
    once."""
    if rng.device.type == "cpu":
        return torch.randperm(size, generator=rng)
    drawn = torch.rand(size, generator=rng, device=rng.device, dtype=keys)
    return drawn.argsort()


class Balanced:
    """A sampler that draws the same number of examples of each class."""

    def __init__(self, labels: Sequence[int] | Tensor, quota: int, device: torch.device | None = None) -> None:
        """`labels` are those of the examples. Rows are drawn on `device`, by default that of the labels."""
        y = torch.as_tensor(labels, dtype=torch.long)
        self.classes, count = torch.unique(y, return_counts=True)
        start = torch.cumsum(count, 0) - count
        number = torch.arange(quota, device=y.device)
        offset = number % count[:, None]  # wraps around where a class has fewer examples
        places = (start[:, None] + offset).flatten()
        device = device or y.device
        self.y = to_device(y, device)
        self.places = to_device(places, device)  # among the examples sorted by class
        drawn = self.classes.repeat_interleave(quota)
        self.labels = to_device(drawn, device)  # of the drawn rows

    def draw(self, rng: torch.Generator) -> Tensor:
        """Row numbers in the order of the classes; each class is shuffled anew."""
        device = self.y.device
        shuffled = torch.randperm(len(self.y), generator=rng, device=device)
        return self.rows_of(shuffled)

    def rows_of(self, shuffled: Tensor) -> Tensor:
        """The rows that a permutation of all examples gives."""
        labels = self.y.index_select(0, shuffled)
        by_class = torch.sort(labels, stable=True).indices
        drawn = by_class.index_select(0, self.places)
        return shuffled.index_select(0, drawn)


class Rehearsal:
    """The balanced pseudo multi-task set of one client: a batch source for Eq. (pro-loss).

    An epoch has `quota` real features of every class in `labels`, then `quota` pseudo-features of every other class in
    the bank. With a `factor` L, pseudo-features are μ + γ L ε, and the bank's spread is not used unless it is `scaled`.
    """

    def __init__(
        self,
        features: Tensor,
        labels: Sequence[int] | Tensor,
        bank: Bank | None,
        *,
        quota: int,
        noise: float,
        factor: Tensor | None = None,
        scaled: bool = False,
    ) -> None:
        """With `scaled`, the rows Lε are multiplied by the bank's spread."""
        self.features = features
        self.quota = quota
        self.noise = noise
        self.factor = factor
        self.real = Balanced(labels, quota, features.device)
        remembered = bank.labels if bank else ()
        current = set(self.real.classes.tolist())
        rows = [row for row, label in enumerate(remembered) if label not in current]
        # One tensor, so that it is copied to the device once.
        both = torch.tensor([rows, [remembered[row] for row in rows]], dtype=torch.long)
        self.bank_rows, old_classes = to_device(both, features.device)
        self.mean = bank.mean[self.bank_rows] if bank else features[:0]
        self.spread = bank.spread[self.bank_rows] if bank else features[:0]
        if factor is not None and not scaled:
            self.spread = torch.ones_like(self.mean)
        pseudo_labels = old_classes.repeat_interleave(quota)
        self.y = torch.cat([self.real.labels, pseudo_labels])
        self.size = len(self.y)

    def epoch(self, rng: torch.Generator) -> dict[str, Tensor]:
        """Features and labels of one epoch."""
        n = len(self.real.labels)
        d = self.features.shape[1]
        u = self.features.new_empty(self.size, d)
        shuffled = permutation(len(self.real.y), rng, torch.float64)
        rows = self.real.rows_of(shuffled)
        torch.index_select(self.features, 0, rows, out=u[:n])
        pseudo = u[n:].view(len(self.mean), self.quota, d)
        epsilon = self.normal(pseudo, rng)
        correlate_(epsilon, self.factor)
        to_pseudo_features_(epsilon, self.mean, self.spread, self.noise)
        return {"u": u, "y": self.y}

    def order(self, rng: torch.Generator) -> Tensor:
        """The order of an epoch's rows."""
        return permutation(self.size, rng, torch.float32)

    def normal(self, out: Tensor, rng: torch.Generator) -> Tensor:
        """Fills a tensor with standard normal numbers."""
        return out.normal_(generator=rng)
