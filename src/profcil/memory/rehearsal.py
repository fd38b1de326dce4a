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


def pseudo(
    mean: Tensor, spread: Tensor, quota: int, noise: float, rng: torch.Generator, out: Tensor | None = None
) -> Tensor:
    """`quota` pseudo-features of each class, [classes · quota, d], classes in order; made in `out`, where given."""
    k, d = mean.shape
    drawn = (mean.new_empty(k * quota, d) if out is None else out).view(k, quota, d).normal_(generator=rng)
    return torch.addcmul(mean[:, None], spread[:, None], drawn, value=noise, out=drawn).view(k * quota, d)


class Balanced:
    """Draws the same number of examples of each class, again and again. What does not change between draws is worked
    out once: counting classes has to wait for the device."""

    def __init__(self, y: Tensor, quota: int) -> None:
        self.y = y
        self.classes, count = torch.unique(y, return_counts=True)
        start = torch.cumsum(count, 0) - count
        turn = torch.arange(quota, device=y.device)
        self.places = (start[:, None] + turn % count[:, None]).flatten()  # wrapping around where a class has fewer
        self.labels = self.classes.repeat_interleave(quota)  # of what is drawn

    def draw(self, rng: torch.Generator) -> Tensor:
        """Row numbers, classes in order; each class in a fresh shuffle."""
        shuffled = torch.randperm(len(self.y), generator=rng, device=self.y.device)
        by_class = torch.sort(self.y.index_select(0, shuffled), stable=True).indices
        return shuffled.index_select(0, by_class.index_select(0, self.places))


def balanced_rows(y: Tensor, quota: int, rng: torch.Generator) -> Tensor:
    """One such draw: `quota` row numbers of each class in `y`."""
    return Balanced(y, quota).draw(rng)


class Roll:
    """Whose features an epoch holds: so many of every class in `y`, then of every other class that is remembered."""

    def __init__(self, y: Tensor, remembered: Sequence[int], quota: int) -> None:
        self.quota, self.real = quota, Balanced(y, quota)
        current = set(self.real.classes.tolist())
        rows = [i for i, label in enumerate(remembered) if label not in current]
        self.rows, labels = torch.tensor([rows, [remembered[i] for i in rows]], dtype=torch.long, device=y.device)
        self.y = torch.cat([self.real.labels, labels.repeat_interleave(quota)])


class Rehearsal:
    """The balanced pseudo multi-task set of one client: a batch source for the engine (Eq. 'pro-loss')."""

    def __init__(self, features: Tensor, roll: Roll, bank: Bank | None, *, noise: float) -> None:
        self.features, self.roll, self.noise = features, roll, noise
        self.mean = bank.mean[roll.rows] if bank else features[:0]
        self.spread = bank.spread[roll.rows] if bank else features[:0]
        self.size = len(roll.y)

    def epoch(self, rng: torch.Generator) -> dict[str, Tensor]:
        real = self.roll.real
        u, n = self.features.new_empty(self.size, self.features.shape[1]), len(real.labels)
        torch.index_select(self.features, 0, real.draw(rng), out=u[:n])
        pseudo(self.mean, self.spread, self.roll.quota, self.noise, rng, out=u[n:])
        return {"u": u, "y": self.roll.y}
