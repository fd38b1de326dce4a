"""Real examples that a client stores of its past: how they are chosen, and how an epoch replays them.

An example's leverage is the squared length of its row of U in X = U Σ Vᵀ: how much of the feature space is covered by
this example only. A shared rotation XQ does not change it, nor does a private one PX once it is undone on U.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from profcil.data.bundle import Inputs
from profcil.memory.rehearsal import Balanced


def basis(x: Tensor) -> Tensor:
    """U of the economy singular value decomposition, without directions that are only rounding errors."""
    u, s, _ = torch.linalg.svd(x.double(), full_matrices=False)
    eps = torch.finfo(torch.float32).eps  # the features were computed in float32
    tiny = s[:1] * max(x.shape) * eps
    significant: Tensor = u[:, s > tiny]
    return significant


def leverages(x: Tensor) -> Tensor:
    """τ_j = ‖e_jᵀ U‖² of every row; their sum is the rank."""
    return basis(x).square().sum(1)


def rotation(d: int, rng: torch.Generator) -> Tensor:
    """A random orthogonal matrix."""
    gaussian = torch.randn(d, d, generator=rng, dtype=torch.float64)
    q: Tensor = torch.linalg.qr(gaussian)[0].float()
    return q


def draw(scores: Tensor, count: int, rng: torch.Generator) -> Tensor:
    """`count` different rows in ascending order, drawn without replacement in proportion to their scores.

    This is the Gumbel top-k trick: the rows with the largest log scores plus Gumbel noise. The noise is drawn on the
    CPU, so that it is the same on every device."""
    drawn = torch.rand(len(scores), generator=rng, dtype=torch.float64)
    uniform = drawn.to(scores.device)
    tiny = torch.finfo(torch.float64).tiny
    gumbel = -(-uniform.clamp(min=tiny).log()).log()
    log_scores = scores.double().clamp(min=tiny).log()
    keys = log_scores + gumbel
    count = min(count, len(scores))
    rows = keys.topk(count).indices
    return rows.sort().values


def join_inputs(parts: Sequence[Inputs]) -> Inputs:
    """The encoder inputs of several clients as one batch. Rows are concatenated; graphs become one graph without edges
    between them."""
    if len(parts[0]) == 1:
        return (torch.cat([x for (x,) in parts]),)
    first_node = 0
    joined_edges = []
    joined_nodes = []
    for x, edges, nodes in parts:
        joined_edges.append(edges + first_node)
        joined_nodes.append(nodes + first_node)
        first_node += len(x)
    joined_x = torch.cat([x for x, _, _ in parts])
    return joined_x, torch.cat(joined_edges, 1), torch.cat(joined_nodes)


class ReplaySource:
    """Batches of current and stored examples. An epoch has every current example once and `quota` stored ones of each
    stored class; a class with fewer is repeated. `y` are the labels of all examples."""

    def __init__(self, current: Tensor, stored: Tensor, y: Tensor, quota: int) -> None:
        self.current = current
        self.stored = stored
        self.y = y
        self.balanced = Balanced(y[stored], quota)
        self.replayed = len(self.balanced.labels)
        self.size = len(current) + self.replayed

    def allow_stored(self, allowed: Tensor) -> Tensor:
        """The mask with the stored classes added: a replayed class competes in any label space."""
        return allowed.index_fill(0, self.y[self.stored], True)

    def epoch(self, rng: torch.Generator) -> dict[str, Tensor]:
        replayed = self.stored[self.balanced.draw(rng)]
        index = torch.cat([self.current, replayed])
        return {"index": index, "y": self.y[index]}
