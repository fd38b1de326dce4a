"""Synthesis of images against a frozen teacher, as in TARGET: a generator and a student are trained in turns.

The settings are those of TARGET. Nothing here depends on clients.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from math import ceil
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from profcil.data.bundle import Inputs
from profcil.engine.server import Server, Step
from profcil.engine.steps import clip_
from profcil.methods.parts.distillation import teacher_logits
from profcil.methods.parts.generator import (
    BatchNormStatistics,
    Generator,
    apply_gradients,
    as_bytes,
    is_small,
    make_adam,
    make_generator,
    moment_distance,
)
from profcil.model.layers import drawn
from profcil.model.net import Net
from profcil.randomness import torch_generator

if TYPE_CHECKING:
    from profcil.methods.target import TargetParams

BETAS = (0.5, 0.999)  # of Adam
STUDENT_CLIP = 5.0  # the largest norm of the student's gradients


class Synthesis:
    """The synthesis of images of these classes at the end of one position. Its steps can be recorded as CUDA graphs, so
    all their tensors are allocated once and then written in place."""

    def __init__(self, params: TargetParams, server: Server, teacher: Net, classes: Sequence[int]) -> None:
        device = next(teacher.parameters()).device
        self.params = params
        self.teacher = teacher
        self.statistics = BatchNormStatistics(teacher.base)
        self.repeated = server.repeated
        self.init_rng = torch_generator(server.number("generator"))  # of the initial weights, on the CPU
        self.classes = torch.tensor(classes, device=device)
        self.rng = torch.Generator(device).manual_seed(server.number("synthesis"))
        generator = make_generator(params.latent, server.like, params.channels, self.init_rng)
        self.generator = generator.to(device)
        self.meta = torch.optim.Adam(self.generator.parameters(), params.lr_meta, BETAS)
        usual_batch = 128 if is_small(server.like) else 256
        self.batch = params.synthesis_batch or usual_batch
        self.clone = GeneratorClone(self.generator, self.batch, server.like, params)
        running = torch.stack(self.statistics.running)
        self.latest_moments = torch.zeros_like(running)
        self.past_moments = running.clone()  # of earlier rounds
        self.smoothing = torch.zeros((), device=device)  # the weight of earlier rounds; 0 in the first one

    @cached_property
    def student(self) -> Student:
        """Initialised on the CPU when it is first needed: until then a GPU computes the rounds without a student."""
        student = Student(self.teacher, len(self.classes), self.params, self.init_rng)
        student.to(self.classes.device)
        return student.eval().requires_grad_(False)

    def pool(self) -> tuple[Tensor, Tensor, Tensor]:
        """The pool: images, the teacher's logits and labels, with `params.pool` images of each class. Labels run
        through all classes in turn across rounds, so the last pool·K images have each class equally often."""
        number = len(self.classes)
        wanted = self.params.pool * number
        device = self.classes.device
        rounds = self.params.synthesis_rounds + ceil(wanted / self.batch)
        total = rounds * self.batch
        labels = torch.arange(total, device=device) % number  # indices into `classes`
        images = torch.zeros(total, *self.clone.best.shape[1:], dtype=torch.uint8, device=device)
        logits = torch.zeros(total, self.teacher.classes, device=device)
        self.fill(images, logits, labels)
        last = slice(-wanted, None)
        return images[last], logits[last], self.classes[labels[last]]

    def fill(self, images: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Runs all rounds and writes their images and the teacher's logits."""
        first_rounds = self.params.synthesis_rounds
        step_without_student = self.repeated(partial(self.step, False))
        step_with_student = self.repeated(partial(self.step, True))
        training: StudentTraining | None = None
        for number, round_labels in enumerate(labels.split(self.batch)):
            start = number * self.batch
            rows = slice(start, start + self.batch)
            step = step_with_student if number >= first_rounds else step_without_student
            images[rows] = as_bytes(self.run_round(round_labels, step))
            logits[rows] = teacher_logits(self.teacher, images[rows])
            if self.params.adversary and number + 1 >= first_rounds:
                training = training or StudentTraining(
                    self.student, images, logits, self.classes, self.batch, self.repeated
                )
                training.run(rows.stop, self.rng)

    def run_round(self, labels: Tensor, step: Step) -> Tensor:
        """One synthesis round: the best batch of images. The clone's gradients also update the generator."""
        self.clone.reset(self.generator, self.rng, labels)
        for _ in range(self.params.synthesis_steps):
            step()
        parameters = list(self.generator.parameters())
        apply_gradients(self.meta, parameters, self.clone.total_gradients)
        self.past_moments.copy_(self.latest_moments)
        self.smoothing.fill_(self.params.smoothing)
        return self.clone.best

    def step(self, student: bool) -> None:
        with self.teacher.autocast():
            x = self.clone.images()
        loss = self.loss(x, self.clone.labels, student)
        self.clone.step(x, loss)

    def loss(self, x: Tensor, labels: Tensor, student: bool) -> Tensor:
        params = self.params
        statistics = self.statistics
        with self.teacher.autocast(), statistics:
            logits = self.teacher(x).float()[:, self.classes]
        batch = torch.stack(statistics.batch)
        moments = torch.lerp(batch, self.past_moments, self.smoothing)
        self.latest_moments.copy_(moments.detach())
        loss = params.classify * F.cross_entropy(logits, labels)
        mean = moments[0]
        variance = moments[1]
        distance = moment_distance((mean, variance), statistics.running, statistics.layer_mask)
        loss = loss + params.statistics * distance
        if not (student and params.adversary):
            return loss
        with self.teacher.autocast():
            student_logits = self.student(x).float()
        return loss - params.adversary * disagreement(student_logits, logits)


class GeneratorClone:
    """A clone of the generator and a batch of noise, trained together for one round, and the best images so far. The
    same object is reset for every round."""

    def __init__(self, generator: Generator, batch: int, like: Inputs, params: TargetParams) -> None:
        device = next(generator.parameters()).device
        self.generator = copy.deepcopy(generator)
        self.parameters = [*self.generator.parameters()]
        self.z = torch.zeros(batch, generator.latent, device=device, requires_grad=True)
        self.labels = torch.zeros(batch, dtype=torch.long, device=device)
        shape = like[0].shape[1:]
        self.best = torch.zeros(batch, *shape, device=device)
        self.lowest_loss = torch.zeros((), device=device)
        self.total_gradients = [torch.zeros_like(t) for t in self.parameters]
        generator_group = {"params": self.parameters, "lr": params.lr_generator}
        noise_group = {"params": [self.z], "lr": params.lr_noise}
        self.adam = make_adam(generator_group, noise_group, betas=BETAS)

    @torch.no_grad()
    def reset(self, generator: Generator, rng: torch.Generator, labels: Tensor) -> None:
        """Starts a round: the generator's weights, fresh noise, these labels, and a new Adam state."""
        torch._foreach_copy_([*self.parameters], [*generator.parameters()])
        self.z.copy_(generator.noise(len(labels), rng))
        self.labels.copy_(labels)
        self.lowest_loss.fill_(torch.inf)
        adam_state = [tensor for state in self.adam.state.values() for tensor in state.values()]
        torch._foreach_zero_([*self.total_gradients, *adam_state])

    def images(self) -> Tensor:
        images: Tensor = self.generator(self.z)
        return images

    def step(self, x: Tensor, loss: Tensor) -> None:
        """One Adam step on the loss of the images `x`, which are stored if their loss is the lowest so far."""
        best = torch.where(loss < self.lowest_loss, x.detach(), self.best)
        lowest = torch.minimum(loss.detach(), self.lowest_loss)
        self.best.copy_(best)
        self.lowest_loss.copy_(lowest)
        trained = [*self.parameters, self.z]
        grads = torch.autograd.grad(loss, trained)
        torch._foreach_add_(self.total_gradients, list(grads[:-1]))
        apply_gradients(self.adam, trained, grads)


def disagreement(student: Tensor, teacher: Tensor) -> Tensor:
    """Mean KL(teacher ‖ student), with 0 for rows for which the two predict different classes."""
    terms = F.kl_div(student.log_softmax(1), teacher.softmax(1), reduction="none")
    agree = student.argmax(1) == teacher.argmax(1)
    each = terms.sum(1) * agree
    return each.mean()


class Student(nn.Module):
    """An encoder with fresh random weights and a linear head over these classes."""

    def __init__(self, teacher: Net, classes: int, params: TargetParams, rng: torch.Generator) -> None:
        super().__init__()
        self.params = params
        self.precision = teacher.autocast()
        self.base = drawn(lambda: reset_batchnorm(copy.deepcopy(teacher.base).cpu()), rng)
        self.head = drawn(lambda: nn.Linear(teacher.features, classes), rng)
        self.sgd = torch.optim.SGD(self.parameters(), params.student_lr, momentum=0.9, weight_decay=1e-4)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.base(x))
        return logits


class StudentTraining:
    """Trains the student on a growing set of images and the teacher's logits for them."""

    def __init__(
        self,
        student: Student,
        images: Tensor,
        logits: Tensor,
        classes: Tensor,
        batch: int,
        repeated: Callable[[Step], Step],
    ) -> None:
        self.student = student
        self.images = images
        self.logits = logits
        self.classes = classes
        self.repeated_step = repeated(self.step)
        self.parameters = list(student.parameters())
        steps = student.params.student_steps
        self.batches = torch.zeros(steps, batch, dtype=torch.long, device=images.device)  # one row of images per step
        self.step_number = torch.zeros(1, dtype=torch.long, device=images.device)

    def run(self, count: int, rng: torch.Generator) -> None:
        """Trains on random batches of the first `count` images."""
        batches = self.batches
        batches.copy_(torch.randint(count, batches.shape, generator=rng, device=batches.device))
        self.step_number.zero_()
        self.student.train().requires_grad_()
        for _ in range(len(self.batches)):
            self.repeated_step()
        self.student.eval().requires_grad_(False)

    def step(self) -> None:
        """One SGD step towards the teacher's softened predictions."""
        student = self.student
        temperature = student.params.student_temperature
        rows = self.batches.index_select(0, self.step_number)[0]
        with student.precision:
            logits = student(self.images[rows])
        target_logits = self.logits[rows][:, self.classes]
        target = (target_logits / temperature).softmax(1)
        prediction = (logits.float() / temperature).log_softmax(1)
        divergence = F.kl_div(prediction, target, reduction="batchmean")
        loss = temperature**2 * divergence
        grads = torch.autograd.grad(loss, self.parameters)
        clip_(grads, STUDENT_CLIP)
        apply_gradients(student.sgd, self.parameters, grads)
        self.step_number.add_(1)


def reset_batchnorm(base: nn.Module) -> nn.Module:
    """The encoder with its BatchNorm layers in their initial state."""
    for m in base.modules():
        if isinstance(m, nn.BatchNorm2d):
            for ones in (m.weight, m.running_var):
                nn.init.ones_(ones)  # type: ignore[arg-type]
            for zeros in (m.bias, m.running_mean):
                nn.init.zeros_(zeros)  # type: ignore[arg-type]
    return base
