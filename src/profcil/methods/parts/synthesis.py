"""Images made against a frozen teacher: generator, student, and the rounds in which they play against each other.

What it is asked for is TARGET's settings; nothing here knows of clients.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from profcil.encoders.model import Net
from profcil.encoders.norms import drawn
from profcil.engine.optim import clip_
from profcil.engine.server import Server
from profcil.methods.parts.distillation import outputs
from profcil.methods.parts.generator import (
    Moments,
    Statistics,
    as_bytes,
    descend,
    distance,
    half,
    is_small,
    make_generator,
)
from profcil.randomness import torch_generator

if TYPE_CHECKING:
    from profcil.methods.target import TargetParams


class Synthesis:
    """One position's making of images against a frozen teacher."""

    def __init__(self, params: TargetParams, server: Server, teacher: Net) -> None:
        self.p, self.teacher, self.statistics = params, teacher, Statistics(teacher.base)
        device, first = next(teacher.parameters()).device, torch_generator(server.number("generator"))
        self.seen = torch.tensor(server.seen, device=device)
        self.rng = torch.Generator(device).manual_seed(server.number("synthesis"))
        self.generator = make_generator(params.latent, server.like, params.channels, first).to(device)
        self.meta = torch.optim.Adam(self.generator.parameters(), params.lr_meta, (0.5, 0.999))
        self.batch = params.synthesis_batch or (128 if is_small(server.like) else 256)
        self.student = Student(teacher, len(self.seen), params, first).to(device) if params.adversary else None
        self.history: Moments | None = None  # of earlier rounds

    def pool(self) -> tuple[Tensor, Tensor, Tensor]:
        """As many images of each class as asked for, the last ones made, the teacher's answers and the labels. Classes
        are dealt out in turn from round to round, so the last pool·K images hold each class equally often."""
        p, classes, made, answers = self.p, len(self.seen), [], []
        wanted = p.pool * classes
        rounds = p.synthesis_rounds + -(-wanted // self.batch)
        place = torch.arange(rounds * self.batch, device=self.seen.device) % classes
        for number, labels in enumerate(place.split(self.batch)):
            made.append(as_bytes(self.round(labels, student=number >= p.synthesis_rounds)))
            answers.append(outputs(self.teacher, made[-1]))
            if self.student is not None and number + 1 >= p.synthesis_rounds:
                self.student.learn(torch.cat(made), torch.cat(answers)[:, self.seen], self.batch, self.rng)
        return torch.cat(made)[-wanted:], torch.cat(answers)[-wanted:], self.seen[place[-wanted:]]

    def round(self, labels: Tensor, student: bool) -> Tensor:
        """The best batch on the way of a clone of the generator; its gradients move the generator too."""
        p, clone = self.p, copy.deepcopy(self.generator)
        z = clone.noise(len(labels), self.rng).requires_grad_()
        moving = [*clone.parameters(), z]
        adam = torch.optim.Adam(
            [{"params": moving[:-1], "lr": p.lr_generator}, {"params": [z], "lr": p.lr_noise}], betas=(0.5, 0.999)
        )
        best, lowest, total = z.new_zeros(()), z.new_full((), torch.inf), [torch.zeros_like(t) for t in moving[:-1]]
        for _ in range(p.synthesis_steps):
            with half(self.teacher):
                x = clone(z)
            loss = self.loss(x, labels, student)
            best, lowest = torch.where(loss < lowest, x.detach(), best), torch.minimum(loss.detach(), lowest)
            grads = torch.autograd.grad(loss, moving)
            torch._foreach_add_(total, list(grads[:-1]))
            descend(adam, moving, grads)
        descend(self.meta, list(self.generator.parameters()), total)
        mean, var = self.smoothed()
        self.history = mean.detach(), var.detach()
        return best

    def loss(self, x: Tensor, labels: Tensor, student: bool) -> Tensor:
        p, known = self.p, self.statistics
        with half(self.teacher), known:
            logits = self.teacher(x).float()[:, self.seen]
        loss = p.classify * F.cross_entropy(logits, labels)
        loss = loss + p.statistics * distance(self.smoothed(), known.learned, known.layer)
        if self.student is None or not student:
            return loss
        with half(self.teacher):
            answer = self.student(x).float()
        return loss - p.adversary * disagreement(answer, logits)

    def smoothed(self) -> Moments:
        """The batch's moments, mixed with those of earlier rounds."""
        mean, var = self.statistics.batch
        if self.history is None:
            return mean, var
        return torch.lerp(mean, self.history[0], self.p.smoothing), torch.lerp(var, self.history[1], self.p.smoothing)


def disagreement(student: Tensor, teacher: Tensor) -> Tensor:
    """Mean KL(teacher ‖ student) over rows on whose class both agree."""
    each = F.kl_div(student.log_softmax(1), teacher.softmax(1), reduction="none").sum(1)
    return (each * (student.argmax(1) == teacher.argmax(1))).mean()


class Student(nn.Module):
    """An encoder drawn anew, with a linear head over the seen classes, that learns from the teacher's answers."""

    def __init__(self, teacher: Net, classes: int, params: TargetParams, rng: torch.Generator) -> None:
        super().__init__()
        self.p, self.precision = params, half(teacher)
        self.base = drawn(lambda: forgetful(copy.deepcopy(teacher.base).cpu()), rng).requires_grad_()
        self.head = drawn(lambda: nn.Linear(teacher.features, classes), rng)
        self.sgd = torch.optim.SGD(self.parameters(), params.student_lr, momentum=0.9, weight_decay=1e-4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.base(x))

    def learn(self, images: Tensor, target: Tensor, batch: int, rng: torch.Generator) -> None:
        """Some steps towards the teacher's softened answers, on random batches."""
        self.train()
        t, own = self.p.student_temperature, list(self.parameters())
        for _ in range(self.p.student_steps):
            rows = torch.randint(len(images), (batch,), generator=rng, device=images.device)
            with self.precision:
                logits = self(images[rows])
            loss = t**2 * F.kl_div(
                (logits.float() / t).log_softmax(1), (target[rows] / t).softmax(1), reduction="batchmean"
            )
            grads = torch.autograd.grad(loss, own)
            clip_(grads, 5.0, stacked=False)
            descend(self.sgd, own, grads)
        self.eval()


def forgetful(base: nn.Module) -> nn.Module:
    """The encoder with its BatchNorm layers as new."""
    for m in base.modules():
        if isinstance(m, nn.BatchNorm2d):
            for tensor, value in ((m.weight, 1.0), (m.bias, 0.0), (m.running_mean, 0.0), (m.running_var, 1.0)):
                nn.init.constant_(tensor, value)  # type: ignore[arg-type]
    return base
