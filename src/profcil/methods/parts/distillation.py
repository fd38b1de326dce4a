"""Distillation: targets from a frozen teacher, losses towards them, and epochs of real and generated images.

Targets are computed once, in evaluation mode and on inputs without augmentation. They are stored as rows beside the
examples, so that a training step never runs a second network. Classes are chosen by a mask over class ids.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from profcil.engine.phases import Batch
from profcil.memory.rehearsal import Balanced
from profcil.methods.parts.generator import map_in_precision
from profcil.model.layers import unit
from profcil.model.net import Net

Rows = dict[str, Tensor]  # tensors of the same leading length


def teacher_logits(teacher: Net, x: Tensor) -> Tensor:
    """The teacher's logits for images. Its weights are loaded, and it is in evaluation mode."""
    return map_in_precision(teacher, teacher, lambda chunk: teacher(chunk).float(), x)


def augment_real(net: Net, batch: Batch) -> Tensor:
    """The batch's images with the real ones augmented. Generated ones stay as they are: the teacher's target is for
    exactly this image, and not for a shifted version of it."""
    (weak,) = net.weak((batch["x"],), batch["rng"])
    return torch.where(batch["real"][:, None, None, None], unit(weak), unit(batch["x"]))


def soft_cross_entropy(logits: Tensor, target: Tensor, classes: Tensor, temperature: float) -> Tensor:
    """−Σ_k softmax(t/T)_k log softmax(s/T)_k of each row, both over the classes of the mask only; no factor T²."""
    least = torch.finfo(logits.dtype).min
    student = (logits / temperature).masked_fill(~classes, least).log_softmax(-1)
    teacher = (target / temperature).masked_fill(~classes, least).softmax(-1)
    return -(teacher * student.masked_fill(~classes, 0.0)).sum(-1)


def old_head_distance(scores: Tensor, target: Tensor, classes: Tensor) -> Tensor:
    """Σ_k (w_k·z − w_k·z*)² / K of each row, over the K classes of the mask. Both arguments are scores under the same
    old head, so features may change only in directions that do not affect this head."""
    return ((scores - target).square() * classes).sum(-1) / classes.sum().clamp(min=1)


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """The mean over the rows of the mask; 0 if there are none."""
    return (values * mask).sum() / mask.sum().clamp(min=1)


class MixedSource:
    """Batches of real and generated images. An epoch has every real image once and `quota` generated ones of each of
    their classes; a class with fewer is repeated. The row `real` is the mask of real images. `labels` are those of the
    generated images, by default their row `y`."""

    def __init__(self, real: Rows, generated: Rows, quota: int, labels: Sequence[int] | None = None) -> None:
        y = generated["y"]
        self.real = real | {"real": torch.ones_like(real["y"], dtype=torch.bool)}
        self.generated = generated | {"real": torch.zeros_like(y, dtype=torch.bool)}
        self.balanced = Balanced(y if labels is None else labels, quota, y.device)
        self.replayed = len(self.balanced.labels)
        self.size = len(real["y"]) + self.replayed

    def epoch(self, rng: torch.Generator) -> Rows:
        rows = self.balanced.draw(rng)
        return {name: torch.cat([real, self.generated[name][rows]]) for name, real in self.real.items()}
