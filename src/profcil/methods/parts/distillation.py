"""Keeping what a model knew: targets from a frozen teacher, losses towards them, and epochs of real and made examples.

Targets are computed once, in evaluation mode and on plain inputs, and travel as rows beside the examples: a training
step never runs a second network. Which classes count is a mask over class ids, never a slice.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from profcil.engine.phases import Batch
from profcil.memory.rehearsal import Balanced
from profcil.methods.parts.generator import asked
from profcil.model.layers import unit
from profcil.model.net import Net

Rows = dict[str, Tensor]  # tensors with one leading length


def outputs(teacher: Net, x: Tensor) -> Tensor:
    """The teacher's logits for images; `teacher` is loaded and in evaluation mode."""
    return asked(teacher, teacher, lambda piece: teacher(piece).float(), x)


def viewed(net: Net, batch: Batch) -> Tensor:
    """The batch's images as a step sees them: real ones augmented, made ones as the teacher has answered them. A made
    image that is shifted is no longer what its target is about."""
    (weak,) = net.weak((batch["x"],), batch["rng"])
    return torch.where(batch["real"][:, None, None, None], unit(weak), unit(batch["x"]))


def soft_cross_entropy(logits: Tensor, target: Tensor, among: Tensor, temperature: float) -> Tensor:
    """−Σ_k softmax(t/T)_k log softmax(s/T)_k of each row, both over the classes of `among` alone; no factor T²."""
    least = torch.finfo(logits.dtype).min
    student = (logits / temperature).masked_fill(~among, least).log_softmax(-1)
    teacher = (target / temperature).masked_fill(~among, least).softmax(-1)
    return -(teacher * student.masked_fill(~among, 0.0)).sum(-1)


def along_head(scores: Tensor, target: Tensor, among: Tensor) -> Tensor:
    """Σ_k (w_k·z − w_k·z*)² / K of each row over the K classes of `among`: features are kept where an old head looks.
    Both arguments are scores under that one head."""
    return ((scores - target).square() * among).sum(-1) / among.sum().clamp(min=1)


def mean_of(each: Tensor, which: Tensor) -> Tensor:
    """The mean over some rows of a batch; 0 where there are none."""
    return (each * which).sum() / which.sum().clamp(min=1)


class Mixed:
    """Real examples once an epoch, and `quota` made ones of each of their classes; a class with fewer is repeated. The
    row `real` tells which is which. `labels` are those of the made ones, by default their row `y`."""

    def __init__(self, real: Rows, made: Rows, quota: int, labels: Sequence[int] | None = None) -> None:
        self.real = real | {"real": torch.ones_like(real["y"], dtype=torch.bool)}
        self.made = made | {"real": torch.zeros_like(made["y"], dtype=torch.bool)}
        self.old = Balanced(made["y"] if labels is None else labels, quota, made["y"].device)
        self.replayed = len(self.old.labels)
        self.size = len(real["y"]) + self.replayed

    def epoch(self, rng: torch.Generator) -> Rows:
        rows = self.old.draw(rng)
        return {k: torch.cat([v, self.made[k][rows]]) for k, v in self.real.items()}
