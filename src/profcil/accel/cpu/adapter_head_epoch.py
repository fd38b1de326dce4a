"""One client's phase on features on a CPU, by the gradient that is written down: a whole epoch of steps in one call.

A step is thirty small kernels. Called one by one from Python they cost a tenth more, and clients on other threads wait
for the interpreter meanwhile. So an epoch is compiled: where the machine has a compiler, from a twin in C (`native`);
else by TorchScript, which runs the same kernels in the same order; and where torch cannot do that, the function runs as
it is written.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from profcil.accel.cpu import adapter_head_c
from profcil.accel.cpu.adapter_head_gradient import Classification, slopes
from profcil.config import TrainSettings
from profcil.engine.optim import Moments, Optimiser, Rule, fused
from profcil.engine.phases import Features, Train, Trained, batch_rows
from profcil.model.net import TAIL, Tail, Weights

CLASSES = 11  # of the example by which the twin in C is judged


def clip_vector_(grad: Tensor, limit: float) -> None:
    """`optim.clip_` of one vector on a CPU, in a form that TorchScript compiles."""
    if limit != 0:
        norm = float(torch.dot(grad, grad)) ** 0.5
        if not norm + 1e-6 <= limit:
            grad.mul_(limit / (norm + 1e-6))


class Ground(NamedTuple):
    """What the steps of a phase are taken on. Updates are of lists, and TorchScript must be handed them: an update of a
    list that it has made itself looks to it like one that nobody sees, and is left out."""

    vector: list[Tensor]  # adapter and head as one
    slope: list[Tensor]
    weights: dict[str, Tensor]  # the vector in parts
    slopes: dict[str, Tensor]
    room: dict[str, Tensor]
    moments: Moments
    anchor: list[Tensor]  # what a proximal term pulls towards; none without one


def descend(
    g: Ground, u: Tensor, y: Tensor, index: Tensor, rule: Rule, proximal: float, clip: float, last: bool
) -> Tensor:
    """An epoch of steps: slopes, proximal pull, clip, update. Gives the loss of each row, where it is the last."""
    labels, batch = y[index].unsqueeze(1), u.new_empty(index.size(1), u.size(1))
    losses = u.new_zeros(labels.shape)
    for i in range(len(index)):
        torch.index_select(u, 0, index[i], out=batch)
        slopes(g.weights, g.slopes, g.room, batch, labels[i])
        if last:
            torch.gather(g.room["logits"].log_softmax(0), 0, labels[i], out=losses[i])
        for anchor in g.anchor:  # ∇ λ‖Θ − Θ^g‖² = 2λ(Θ − Θ^g)
            g.slope[0].add_(g.vector[0] - anchor, alpha=2 * proximal)
        clip_vector_(g.slope[0], clip)
        fused(g.vector, g.slope, g.moments, rule)
    return -losses


def compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function as TorchScript, which wants its source, may refuse it, and may be gone from a later torch."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            return torch.jit.script(function)
    except (AttributeError, OSError, RuntimeError):
        return function


epoch = compiled(descend)

Epoch = Callable[[Tensor, Tensor, Tensor, bool], Tensor]  # features, places of labels, cut; whether it is the last


def way(g: Ground, rule: Rule, phase: Train) -> Epoch:
    """How an epoch is computed on this machine."""
    proximal, clip, library = phase.proximal, phase.settings.clip, trusted()
    if library is not None and g.vector[0].dtype == torch.float32:
        return adapter_head_c.Epochs(library, g, rule, phase.settings.batch or phase.source.size, proximal, clip)
    return lambda u, y, index, last: epoch(g, u, y, index, rule, proximal, clip, last)


def check() -> str:
    """Whether the compiled epoch is used, in a word."""
    if adapter_head_c.library() is None:
        return "no compiler"
    return "passed" if trusted() is not None else "failed"


@cache
def trusted() -> ctypes.CDLL | None:
    """The twin in C, if it takes the steps that are written here: nobody may have run it on such a processor yet."""
    library = adapter_head_c.library()
    if library is None:
        return None
    phase, order = example(), torch.arange(CLASSES)
    (_, ours, rule, _), (_, written, *_) = (prepared(phase, order) for _ in range(2))
    rows, index = (
        phase.source.epoch(torch.Generator()),
        batch_rows(phase.source, phase.settings.batch, torch.Generator()),
    )
    before, where = ours.vector[0].clone(), (rows["u"], rows["y"], index)
    expected = descend(written, *where, rule, phase.proximal, phase.settings.clip, True).squeeze(1)
    take = adapter_head_c.Epochs(library, ours, rule, phase.settings.batch, phase.proximal, phase.settings.clip)
    near = torch.allclose(take(*where, True), expected, rtol=1e-3, atol=1e-3)
    gap, way = ours.vector[0] - written.vector[0], written.vector[0] - before
    return library if near and bool(gap.norm() < 1e-3 * way.norm()) else None


def example() -> Train:
    """A small phase whose sizes fill no vector."""
    rng, width, narrow, rows = torch.Generator().manual_seed(0), 37, 9, 50
    shapes = {"down": (narrow, width), "down_bias": (narrow,), "up": (width, narrow), "up_bias": (width,)}
    shapes |= {"scale": (width,), "shift": (width,), "weight": (CLASSES, width)}
    drawn = {k: torch.randn(shape, generator=rng) * width**-0.5 for k, shape in shapes.items()}
    weights = {"adapter": {k: v for k, v in drawn.items() if k != "weight"}, "head": {"weight": drawn["weight"]}}
    source = Features(torch.randn(rows, width, generator=rng), torch.arange(rows) % (CLASSES - 2))
    settings = TrainSettings(optimiser="adam", lr=0.01, batch=21, clip=0.5)
    constants = {"allowed": torch.arange(CLASSES) < CLASSES - 2}
    return Train("check", 0, weights, TAIL, lambda tail, batch: tail, source, settings, 1, 0, 0.1, constants)


@torch.no_grad()
def run(phase: Train, rng: torch.Generator) -> Trained:
    """The phase with adapter and head as one vector: one pull, one clipping, one update."""
    s, order, losses, steps = phase.settings, Classification.order(phase.constants), torch.zeros(0), 0
    with torch.inference_mode():  # like no_grad, and tensors made in it need less around every kernel
        tail, ground, rule, place = prepared(phase, order)
        take = way(ground, rule, phase)
    for number in range(phase.epochs):
        rows, index = phase.source.epoch(rng), batch_rows(phase.source, s.batch, rng)
        last = number == phase.epochs - 1
        with torch.inference_mode():
            losses = take(rows["u"], place[rows["y"]], index, last)
        steps += len(index)
    own = {b: {k: v.clone() for k, v in getattr(tail, b).items()} for b in TAIL}
    own["head"] = {k: v[order.argsort()] for k, v in own["head"].items()}
    return Trained({**phase.weights, **own}, float(losses.mean()), steps)


def prepared(phase: Train, order: Tensor) -> tuple[Tail, Ground, Rule, Tensor]:
    (vector, tail), (slope, into) = joined(phase.weights, order), joined(phase.weights, order)
    g = Classification(tail, into, phase.settings.batch or phase.source.size, phase.constants)
    anchor, optimiser = [vector.clone()] if phase.proximal else [], Optimiser(phase.settings, [vector])
    ground = Ground([vector], [slope], g.weights, g.slopes, g.room, optimiser.moments, anchor)
    return tail, ground, optimiser.rule, g.place


def joined(weights: Weights, order: Tensor) -> tuple[Tensor, Tail]:
    """A copy of adapter and head in one vector, the head's rows in this order, and the tail made of views of it."""
    named = [(b, k, t[order] if b == "head" else t) for b in TAIL for k, t in weights[b].items()]
    vector = torch.cat([t.flatten() for _, _, t in named])
    views = vector.split([t.numel() for _, _, t in named])
    parts: Weights = {b: {} for b in TAIL}
    for (b, k, t), view in zip(named, views, strict=True):
        parts[b][k] = view.view(t.shape)
    return vector, Tail(parts["adapter"], parts["head"])
