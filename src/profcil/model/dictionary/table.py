"""A dictionary of tables: standardised columns, and rectified random projections of them.

The clients sum each column; the server computes the means. In a second round the clients sum the squared distances from
these means; the server computes the deviations. Two rounds, since a deviation that is small beside its mean is lost in
sums of squares. A row is represented by its standardised columns and by ReLU(w·v + b) with directions w and offsets b
that are drawn from one seed and not sent.

The entries reveal the mean and the deviation of each column over all clients, if these have at least `min_support` rows
together. The sums of one client reveal its own means. A deployment should add secure summation.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from profcil.data.bundle import Inputs
from profcil.model.layers import FARTHEST
from profcil.randomness import torch_generator

SCALE = 1.0  # mean square of a projection of standardised columns


class TableDictionary:
    """Standardised columns and random projections; `width` features per row."""

    rounds = 2
    usable_untrained = True  # columns as they are

    def __init__(self, width: int, columns: int, min_support: int = 1) -> None:
        self.width = width
        self.columns = columns
        self.min_support = max(min_support, 1)

    def begin(self, rng: torch.Generator) -> dict[str, Tensor]:
        """Columns as they are. Nothing is drawn."""
        return {"mean": torch.zeros(self.columns), "std": torch.ones(self.columns)}

    def sums(self, entries: dict[str, Tensor], inputs: Inputs, round: int) -> dict[str, Tensor]:
        """The number of rows; and the sum of each column, or of its squared distances from the mean."""
        x = inputs[0].double()
        values = x if round == 0 else (x - entries["mean"]).square()
        return {"sum": values.sum(0), "rows": x.new_full((1,), len(x))}

    def update(self, entries: dict[str, Tensor], sums: dict[str, Tensor], round: int) -> dict[str, Tensor]:
        """The means after the first round, the deviations after the second. A constant column has deviation 1."""
        if float(sums["rows"]) < self.min_support:
            return entries
        mean = sums["sum"] / sums["rows"]
        if round == 0:
            return {**entries, "mean": mean.float()}
        std = mean.sqrt()
        return {**entries, "std": torch.where(std > 0, std, 1.0).float()}

    def features(self, entries: dict[str, Tensor], inputs: Inputs) -> Tensor:
        """The standardised columns and the projections of each row, [rows, width]."""
        v = ((inputs[0] - entries["mean"]) / entries["std"]).clamp(-FARTHEST, FARTHEST)
        weight, offset = projections(self.columns, max(self.width - self.columns, 0), v.device)
        return torch.cat([v, (v @ weight + offset).relu()], 1)[:, : self.width]


@lru_cache(maxsize=2)
def projections(columns: int, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Random directions [columns, count] and offsets [count]; they depend on these two numbers alone."""
    rng = torch_generator(0, "table", columns, count)
    weight = torch.randn(columns, count, generator=rng) * SCALE / columns**0.5
    offset = torch.randn(count, generator=rng)
    return weight.to(device), offset.to(device)
