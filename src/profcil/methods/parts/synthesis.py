"""Images made against a frozen teacher: generator, student, and the rounds in which they play against each other.

What it is asked for is TARGET's settings; nothing here knows of clients.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cached_property, partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from profcil.data.bundle import Inputs
from profcil.engine.optim import clip_
from profcil.engine.server import Server, Step
from profcil.methods.parts.distillation import outputs
from profcil.methods.parts.generator import (
    Generator,
    Statistics,
    as_bytes,
    descend,
    distance,
    half,
    is_small,
    made_adam,
    make_generator,
)
from profcil.model.layers import drawn
from profcil.model.net import Net
from profcil.randomness import torch_generator

if TYPE_CHECKING:
    from profcil.methods.target import TargetParams


class Synthesis:
    """One position's making of images against a frozen teacher. What its steps touch stays where it is, so that they
    can be recorded."""

    def __init__(self, params: TargetParams, server: Server, teacher: Net) -> None:
        self.p, self.teacher, self.statistics, self.repeated = (
            params,
            teacher,
            Statistics(teacher.base),
            server.repeated,
        )
        device, self.first = next(teacher.parameters()).device, torch_generator(server.number("generator"))
        self.seen = torch.tensor(server.seen, device=device)
        self.rng = torch.Generator(device).manual_seed(server.number("synthesis"))
        self.generator = make_generator(params.latent, server.like, params.channels, self.first).to(device)
        self.meta = torch.optim.Adam(self.generator.parameters(), params.lr_meta, (0.5, 0.999))
        self.batch = params.synthesis_batch or (128 if is_small(server.like) else 256)
        self.trial = Trial(self.generator, self.batch, server.like, params)
        self.latest, self.history = torch.zeros_like(moments := torch.stack(self.statistics.learned)), moments.clone()
        self.smoothing = torch.zeros((), device=device)  # the share of earlier rounds, once there are any

    @cached_property
    def student(self) -> Student:
        """Drawn on the host when it is first needed: meanwhile a GPU works off the rounds that need none."""
        made = Student(self.teacher, len(self.seen), self.p, self.first).to(self.seen.device)
        return made.eval().requires_grad_(False)

    def pool(self) -> tuple[Tensor, Tensor, Tensor]:
        """As many images of each class as asked for, the last ones made, the teacher's answers and the labels. Classes
        are dealt out in turn from round to round, so the last pool·K images hold each class equally often."""
        p, classes = self.p, len(self.seen)
        wanted = p.pool * classes
        rounds = p.synthesis_rounds + -(-wanted // self.batch)
        place = torch.arange(rounds * self.batch, device=self.seen.device) % classes
        made = torch.zeros(len(place), *self.trial.best.shape[1:], dtype=torch.uint8, device=place.device)
        answers = torch.zeros(len(place), self.teacher.classes, device=place.device)
        steps = [self.repeated(partial(self.step, student)) for student in (False, True)]
        course: Course | None = None
        for number, labels in enumerate(place.split(self.batch)):
            now = slice(number * self.batch, (number + 1) * self.batch)
            made[now] = as_bytes(self.round(labels, steps[number >= p.synthesis_rounds]))
            answers[now] = outputs(self.teacher, made[now])
            if p.adversary and number + 1 >= p.synthesis_rounds:
                course = course or Course(self.student, made, answers, self.seen, self.batch, self.repeated)
                course.learn(now.stop, self.rng)
        return made[-wanted:], answers[-wanted:], self.seen[place[-wanted:]]

    def round(self, labels: Tensor, step: Step) -> Tensor:
        """The best batch on the way of a clone of the generator; its gradients move the generator too."""
        self.trial.begin(self.generator, self.rng, labels)
        for _ in range(self.p.synthesis_steps):
            step()
        descend(self.meta, list(self.generator.parameters()), self.trial.total)
        self.history.copy_(self.latest)
        self.smoothing.fill_(self.p.smoothing)
        return self.trial.best

    def step(self, student: bool) -> None:
        with half(self.teacher):
            x = self.trial.images()
        self.trial.descend(x, self.loss(x, self.trial.labels, student))

    def loss(self, x: Tensor, labels: Tensor, student: bool) -> Tensor:
        p, known = self.p, self.statistics
        with half(self.teacher), known:
            logits = self.teacher(x).float()[:, self.seen]
        moments = torch.lerp(torch.stack(known.batch), self.history, self.smoothing)
        self.latest.copy_(moments.detach())
        loss = p.classify * F.cross_entropy(logits, labels)
        loss = loss + p.statistics * distance((moments[0], moments[1]), known.learned, known.layer)
        if not (student and p.adversary):
            return loss
        with half(self.teacher):
            answer = self.student(x).float()
        return loss - p.adversary * disagreement(answer, logits)


class Trial:
    """A clone of the generator and noise that move together towards images of some labels, and the best batch so far.
    One serves for all rounds."""

    def __init__(self, generator: Generator, batch: int, like: Inputs, params: TargetParams) -> None:
        device = next(generator.parameters()).device
        self.clone, self.own = (clone := copy.deepcopy(generator)), [*clone.parameters()]
        self.z = torch.zeros(batch, generator.latent, device=device, requires_grad=True)
        self.labels = torch.zeros(batch, dtype=torch.long, device=device)
        self.best, self.lowest = torch.zeros(batch, *like[0].shape[1:], device=device), torch.zeros((), device=device)
        self.total = [torch.zeros_like(t) for t in self.own]  # of the clone's gradients
        groups = {"params": self.own, "lr": params.lr_generator}, {"params": [self.z], "lr": params.lr_noise}
        self.adam = made_adam(*groups, betas=(0.5, 0.999))

    @torch.no_grad()
    def begin(self, generator: Generator, rng: torch.Generator, labels: Tensor) -> None:
        torch._foreach_copy_([*self.own], [*generator.parameters()])
        self.z.copy_(generator.noise(len(labels), rng))
        self.labels.copy_(labels)
        self.lowest.fill_(torch.inf)
        torch._foreach_zero_([*self.total, *(t for moments in self.adam.state.values() for t in moments.values())])

    def images(self) -> Tensor:
        return self.clone(self.z)

    def descend(self, x: Tensor, loss: Tensor) -> None:
        """One step down a loss of its images, which are kept where none was better."""
        self.best.copy_(torch.where(loss < self.lowest, x.detach(), self.best))
        self.lowest.copy_(torch.minimum(loss.detach(), self.lowest))
        grads = torch.autograd.grad(loss, [*self.own, self.z])
        torch._foreach_add_(self.total, list(grads[:-1]))
        descend(self.adam, [*self.own, self.z], grads)


def disagreement(student: Tensor, teacher: Tensor) -> Tensor:
    """Mean KL(teacher ‖ student) over rows on whose class both agree."""
    each = F.kl_div(student.log_softmax(1), teacher.softmax(1), reduction="none").sum(1)
    return (each * (student.argmax(1) == teacher.argmax(1))).mean()


class Student(nn.Module):
    """An encoder drawn anew, with a linear head over the seen classes."""

    def __init__(self, teacher: Net, classes: int, params: TargetParams, rng: torch.Generator) -> None:
        super().__init__()
        self.p, self.precision = params, half(teacher)
        self.base = drawn(lambda: forgetful(copy.deepcopy(teacher.base).cpu()), rng)
        self.head = drawn(lambda: nn.Linear(teacher.features, classes), rng)
        self.sgd = torch.optim.SGD(self.parameters(), params.student_lr, momentum=0.9, weight_decay=1e-4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.base(x))


class Course:
    """What a student learns from: images, of which there are more and more, and the teacher's answers to them."""

    def __init__(
        self,
        student: Student,
        images: Tensor,
        answers: Tensor,
        seen: Tensor,
        batch: int,
        repeated: Callable[[Step], Step],
    ) -> None:
        self.student, self.images, self.answers, self.seen = student, images, answers, seen
        self.again = repeated(self.step)
        self.own = list(student.parameters())
        self.rows = torch.zeros(student.p.student_steps, batch, dtype=torch.long, device=images.device)
        self.number = torch.zeros(1, dtype=torch.long, device=images.device)  # of the step, which is a row of those

    def learn(self, count: int, rng: torch.Generator) -> None:
        """Some steps on random batches of the first `count` images."""
        self.rows.copy_(torch.randint(count, self.rows.shape, generator=rng, device=self.rows.device))
        self.number.zero_()
        self.student.train().requires_grad_()
        for _ in range(len(self.rows)):
            self.again()
        self.student.eval().requires_grad_(False)

    def step(self) -> None:
        """One step towards the teacher's softened answers."""
        student, t = self.student, self.student.p.student_temperature
        rows = self.rows.index_select(0, self.number)[0]
        with student.precision:
            logits = student(self.images[rows])
        target = (self.answers[rows][:, self.seen] / t).softmax(1)
        loss = t**2 * F.kl_div((logits.float() / t).log_softmax(1), target, reduction="batchmean")
        grads = torch.autograd.grad(loss, self.own)
        clip_(grads, 5.0)
        descend(student.sgd, self.own, grads)
        self.number.add_(1)


def forgetful(base: nn.Module) -> nn.Module:
    """The encoder with its BatchNorm layers as new."""
    for m in base.modules():
        if isinstance(m, nn.BatchNorm2d):
            for tensor, value in ((m.weight, 1.0), (m.bias, 0.0), (m.running_mean, 0.0), (m.running_var, 1.0)):
                nn.init.constant_(tensor, value)  # type: ignore[arg-type]
    return base
