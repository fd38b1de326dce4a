"""Real examples that a client keeps of its own past: which ones are worth it, and how an epoch replays them.

An example's leverage is the squared length of its row of U in X = U Σ Vᵀ: how much of the feature space only it
covers. Neither a shared rotation XQ nor, once undone on U, a private one PX changes it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from profcil.data.bundle import Inputs
from profcil.memory.rehearsal import Balanced


def basis(x: Tensor) -> Tensor:
    """U of the economy singular value decomposition, without the directions that are only rounding."""
    u, s, _ = torch.linalg.svd(x.double(), full_matrices=False)
    tiny = s[:1] * max(x.shape) * torch.finfo(torch.float32).eps  # the features were computed in float32
    return u[:, s > tiny]


def leverages(x: Tensor) -> Tensor:
    """τ_j = ‖e_jᵀ U‖² of every row; they add up to the rank."""
    return basis(x).square().sum(1)


def rotation(d: int, rng: torch.Generator) -> Tensor:
    """A random orthogonal matrix."""
    return torch.linalg.qr(torch.randn(d, d, generator=rng, dtype=torch.float64))[0].float()


def draw(scores: Tensor, count: int, rng: torch.Generator) -> Tensor:
    """`count` different rows, drawn one after another in proportion to their scores, in ascending order.

    Adding Gumbel noise to the logarithms and taking the largest does exactly that at once. The noise is drawn on the
    CPU, so that it is the same on every device."""
    uniform = torch.rand(len(scores), generator=rng, dtype=torch.float64).to(scores.device)
    smallest = torch.finfo(torch.float64).tiny
    keys = scores.double().clamp(min=smallest).log() - (-uniform.clamp(min=smallest).log()).log()
    return keys.topk(min(count, len(scores))).indices.sort().values


def together(parts: Sequence[Inputs]) -> Inputs:
    """Encoder inputs of several clients as one: rows below each other, graphs side by side without a common edge."""
    if len(parts[0]) == 1:
        return (torch.cat([x for (x,) in parts]),)
    x, edges, nodes = zip(*parts, strict=True)
    start = [sum(len(a) for a in x[:i]) for i in range(len(x))]
    shifted = [[t + n for t, n in zip(ts, start, strict=True)] for ts in (edges, nodes)]
    return torch.cat(x), torch.cat(shifted[0], 1), torch.cat(shifted[1])


class Replay:
    """Current examples once an epoch, and `quota` stored ones of each stored class; a class with fewer is repeated."""

    def __init__(self, current: Tensor, stored: Tensor, y: Tensor, quota: int) -> None:
        self.current, self.stored, self.y = current, stored, y
        self.old = Balanced(y[stored], quota)
        self.replayed = len(self.old.labels)
        self.size = len(current) + self.replayed

    def epoch(self, rng: torch.Generator) -> dict[str, Tensor]:
        index = torch.cat([self.current, self.stored[self.old.draw(rng)]])
        return {"index": index, "y": self.y[index]}
