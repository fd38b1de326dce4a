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

TensorRows = dict[str, Tensor]  # tensors of the same leading length


def teacher_logits(teacher: Net, x: Tensor) -> Tensor:
    """The teacher's logits for images. Its weights are loaded, and it is in evaluation mode."""

    def logits_of(chunk: Tensor) -> Tensor:
        logits: Tensor = teacher(chunk)
        return logits.float()

    return map_in_precision(teacher, teacher, logits_of, x)


def augment_real(net: Net, batch: Batch) -> Tensor:
    """The batch's images with the real ones augmented. Generated ones stay as they are: the teacher's target is for
    exactly this image, and not for a shifted version of it."""
    x = batch["x"]
    real = batch["real"][:, None, None, None]
    (weak,) = net.weak((x,), batch["rng"])
    return torch.where(real, unit(weak), unit(x))


def soft_cross_entropy(logits: Tensor, target: Tensor, classes: Tensor, temperature: float) -> Tensor:
    """−Σ_k softmax(t/T)_k log softmax(s/T)_k of each row, both over the classes of the mask only; no factor T²."""
    least = torch.finfo(logits.dtype).min
    others = ~classes
    student = (logits / temperature).masked_fill(others, least).log_softmax(-1)
    teacher = (target / temperature).masked_fill(others, least).softmax(-1)
    products = teacher * student.masked_fill(others, 0.0)
    return -products.sum(-1)


def old_head_distance(scores: Tensor, target: Tensor, classes: Tensor) -> Tensor:
    """Σ_k (w_k·z − w_k·z*)² / K of each row, over the K classes of the mask. Both arguments are scores under the same
    old head, so features may change only in directions that do not affect this head."""
    squares = (scores - target).square() * classes
    number = classes.sum().clamp(min=1)
    return squares.sum(-1) / number


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """The mean over the rows of the mask; 0 if there are none."""
    number = mask.sum().clamp(min=1)
    return (values * mask).sum() / number


class MixedSource:
    """Batches of real and generated images. An epoch has every real image once and `quota` generated ones of each of
    their classes; a class with fewer is repeated. The row `real` is the mask of real images. `labels` are those of the
    generated images, by default their row `y`."""

    def __init__(
        self, real: TensorRows, generated: TensorRows, quota: int, labels: Sequence[int] | None = None
    ) -> None:
        y = generated["y"]
        is_real = torch.ones_like(real["y"], dtype=torch.bool)
        is_generated = torch.zeros_like(y, dtype=torch.bool)
        self.real = real | {"real": is_real}
        self.generated = generated | {"real": is_generated}
        self.balanced = Balanced(y if labels is None else labels, quota, y.device)
        self.replayed = len(self.balanced.labels)
        self.size = len(real["y"]) + self.replayed

    def epoch(self, rng: torch.Generator) -> TensorRows:
        rows = self.balanced.draw(rng)
        mixed = {}
        for name, real in self.real.items():
            generated = self.generated[name][rows]
            mixed[name] = torch.cat([real, generated])
        return mixed
