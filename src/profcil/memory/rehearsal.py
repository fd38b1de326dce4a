"""Class-balanced rehearsal: real features of the current classes beside pseudo-features of remembered ones.

One epoch holds the same number of features of every class: drawn from the real ones without replacement as long as
they last, or sampled as ũ = μ + γ σ ⊙ ε. A uniform draw from an epoch is therefore an unbiased sample of the balanced
objective (1/|Y|) Σ_y E_{u∼q_y}, which is what the paper's balanced-gradient lemma asks for.
"""

from __future__ import annotations

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
        return shuffled[torch.sort(self.y[shuffled], stable=True).indices[self.places]]


def balanced_rows(y: Tensor, quota: int, rng: torch.Generator) -> Tensor:
    """One such draw: `quota` row numbers of each class in `y`."""
    return Balanced(y, quota).draw(rng)


class Rehearsal:
    """The balanced pseudo multi-task set of one client: a batch source for the engine (Eq. 'pro-loss')."""

    def __init__(self, features: Tensor, y: Tensor, bank: Bank | None, *, quota: int, noise: float) -> None:
        self.features, self.quota, self.noise, self.real = features, quota, noise, Balanced(y, quota)
        current = set(self.real.classes.tolist())
        rows = [i for i, label in enumerate(bank.labels) if label not in current] if bank else []
        index = torch.tensor(rows, dtype=torch.long, device=features.device)
        self.labels = torch.tensor([bank.labels[i] for i in rows] if bank else [], dtype=torch.long, device=y.device)
        self.mean = bank.mean[index] if bank else features[:0]
        self.spread = bank.spread[index] if bank else features[:0]
        self.y = torch.cat([self.real.labels, self.labels.repeat_interleave(quota)])
        self.size = len(self.y)

    def epoch(self, rng: torch.Generator) -> dict[str, Tensor]:
        u, real = self.features.new_empty(self.size, self.features.shape[1]), len(self.real.labels)
        torch.index_select(self.features, 0, self.real.draw(rng), out=u[:real])
        pseudo(self.mean, self.spread, self.quota, self.noise, rng, out=u[real:])
        return {"u": u, "y": self.y}
