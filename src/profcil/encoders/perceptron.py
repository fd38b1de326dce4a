"""A perceptron with two hidden layers: the base encoder for rows of a table."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from profcil.data.bundle import Bundle
from profcil.model.layers import Columns, drawn, expect, layers, sample


class Perceptron(nn.Module):
    def __init__(self, columns: Columns, count: int, width: int, norm: str) -> None:
        super().__init__()
        make = layers(norm, "batch", "group", "none")
        self.columns = columns
        self.first = nn.Linear(count, width, bias=norm == "none")
        self.norm1 = make(width)
        self.second = nn.Linear(width, width, bias=norm == "none")
        self.norm2 = make(width)
        self.features = width

    def forward(self, x: Tensor, noise: Tensor | None = None, kept: Tensor | None = None) -> Tensor:
        """`noise` is added to the standardised values; those that are not `kept` become the mean of their column."""
        x = self.columns(x)
        if noise is not None and kept is not None:
            x = (x + noise) * kept
        x = F.relu(self.norm1(self.first(x)))
        return F.relu(self.norm2(self.second(x)))


def build(bundle: Bundle, *, generator: torch.Generator, norm: str = "batch", width: int = 0) -> Perceptron:
    """Builds the encoder. `width` is the size of each layer and the number of features; 0 means 128."""
    x, *others = sample(bundle)
    expect(x.dim() == 2 and x.is_floating_point() and not others, "perceptron", "rows of numbers", bundle)
    columns = Columns(bundle, x.shape[1])
    return drawn(lambda: Perceptron(columns, x.shape[1], width or 128, norm), generator)
