"""One client's phase on features on a CPU: a whole epoch in one call, with the analytic gradient.

A step is thirty small operations. Called one by one from Python they take a tenth longer, and clients on other threads
wait for the interpreter lock. So an epoch is compiled: from C where there is a compiler (`adapter_head_c`), otherwise
by TorchScript, which runs the same operations in the same order. Where TorchScript is not available, the Python
function runs.
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
from profcil.accel.cpu.adapter_head_gradient import Classification, write_gradients
from profcil.config import TrainSettings
from profcil.engine.phases import Features, Train, Trained, batch_rows
from profcil.engine.steps import GradientMoments, Optimiser, Rule, fused
from profcil.model.net import TAIL, Tail, Weights

CLASSES = 11  # in the example of the self-check


def clip_vector_(grad: Tensor, limit: float) -> None:
    """`optim.clip_` for one vector on a CPU, in a form that TorchScript can compile."""
    if limit != 0:
        norm = float(torch.dot(grad, grad)) ** 0.5
        if not norm + 1e-6 <= limit:
            grad.mul_(limit / (norm + 1e-6))


class EpochState(NamedTuple):
    """The tensors of a phase. Some are lists of one tensor, because the optimiser updates lists. These lists must be
    arguments: TorchScript removes in-place updates of lists that it has built itself as dead code."""

    vector: list[Tensor]  # adapter and head as one vector
    gradient: list[Tensor]  # of the vector
    weights: dict[str, Tensor]  # views of the vector
    gradients: dict[str, Tensor]  # views of the gradient
    buffers: dict[str, Tensor]  # for intermediate results
    moments: GradientMoments
    anchor: list[Tensor]  # the anchor of the proximal term; empty without one


def run_epoch(
    state: EpochState, u: Tensor, y: Tensor, index: Tensor, rule: Rule, proximal: float, clip: float, last: bool
) -> Tensor:
    """An epoch of steps: gradient, proximal term, clipping, update. Gives the loss of each row in the last epoch."""
    labels = y[index].unsqueeze(1)
    batch = u.new_empty(index.size(1), u.size(1))
    losses = u.new_zeros(labels.shape)
    for i in range(len(index)):
        torch.index_select(u, 0, index[i], out=batch)
        write_gradients(state.weights, state.gradients, state.buffers, batch, labels[i])
        if last:
            logs = state.buffers["logits"].log_softmax(0)
            torch.gather(logs, 0, labels[i], out=losses[i])
        for anchor in state.anchor:  # ∇ λ‖Θ − Θ^g‖² = 2λ(Θ − Θ^g)
            moved = state.vector[0] - anchor
            state.gradient[0].add_(moved, alpha=2 * proximal)
        clip_vector_(state.gradient[0], clip)
        fused(state.vector, state.gradient, state.moments, rule)
    return -losses


def torchscript(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function compiled by TorchScript, or the function itself where that fails: TorchScript needs the source, may
    not support it, and may be missing in later versions of torch."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            return torch.jit.script(function)
    except (AttributeError, OSError, RuntimeError):
        return function


compiled_epoch = torchscript(run_epoch)

Epoch = Callable[[Tensor, Tensor, Tensor, bool], Tensor]  # features, rows of the head, batches, is it the last epoch


def epoch_function(state: EpochState, rule: Rule, phase: Train) -> Epoch:
    """The function that computes an epoch on this machine: C, or TorchScript."""
    proximal = phase.proximal
    clip = phase.settings.clip
    library = checked_library()
    is_float = state.vector[0].dtype == torch.float32
    if library is not None and is_float:
        batch = phase.settings.batch or phase.source.size
        return adapter_head_c.CompiledEpochs(library, state, rule, batch, proximal, clip)
    return lambda u, y, index, last: compiled_epoch(state, u, y, index, rule, proximal, clip, last)


def check() -> str:
    """The result of the self-check of the compiled epoch: "passed", "failed" or "no compiler"."""
    if adapter_head_c.library() is None:
        return "no compiler"
    return "passed" if checked_library() is not None else "failed"


@cache
def checked_library() -> ctypes.CDLL | None:
    """The compiled library if its self-check passes: an epoch on a small example agrees with `run_epoch`. The code may
    never have been tested on this processor."""
    library = adapter_head_c.library()
    if library is None:
        return None
    phase = example()
    order = torch.arange(CLASSES)
    _, in_c, rule, _ = prepared(phase, order)
    _, reference, _, _ = prepared(phase, order)
    rows = phase.source.epoch(torch.Generator())
    index = batch_rows(phase.source, phase.settings.batch, torch.Generator())
    data = (rows["u"], rows["y"], index)
    initial = in_c.vector[0].clone()
    proximal = phase.proximal
    clip = phase.settings.clip
    expected = run_epoch(reference, *data, rule, proximal, clip, True).squeeze(1)
    epoch_in_c = adapter_head_c.CompiledEpochs(library, in_c, rule, phase.settings.batch, proximal, clip)
    losses = epoch_in_c(*data, True)
    losses_agree = torch.allclose(losses, expected, rtol=1e-3, atol=1e-3)
    difference = in_c.vector[0] - reference.vector[0]
    change = reference.vector[0] - initial
    weights_agree = bool(difference.norm() < 1e-3 * change.norm())
    return library if losses_agree and weights_agree else None


def example() -> Train:
    """A small phase. Its sizes are no multiples of a SIMD vector, so that the remainders are checked, too."""
    rng = torch.Generator().manual_seed(0)
    width = 37
    narrow = 9
    rows = 50
    shapes = {"down": (narrow, width), "down_bias": (narrow,), "up": (width, narrow), "up_bias": (width,)}
    shapes |= {"scale": (width,), "shift": (width,), "weight": (CLASSES, width)}
    drawn = {}
    for name, shape in shapes.items():
        drawn[name] = torch.randn(shape, generator=rng) * width**-0.5
    head = {"weight": drawn.pop("weight")}
    weights = {"adapter": drawn, "head": head}
    allowed = CLASSES - 2
    features = torch.randn(rows, width, generator=rng)
    source = Features(features, torch.arange(rows) % allowed)
    settings = TrainSettings(optimiser="adam", lr=0.01, batch=21, clip=0.5)
    constants = {"allowed": torch.arange(CLASSES) < allowed}
    return Train("check", 0, weights, TAIL, lambda tail, batch: tail, source, settings, 1, 0, 0.1, constants)


@torch.no_grad()
def run(phase: Train, rng: torch.Generator) -> Trained:
    """Runs a phase with adapter and head as one vector: one proximal term, one clipping, one update a step."""
    order = Classification.order(phase.constants)
    losses = torch.zeros(0)
    steps = 0
    with torch.inference_mode():  # like no_grad, with less overhead for every operation
        tail, state, rule, head_rows = prepared(phase, order)
        epoch = epoch_function(state, rule, phase)
    for number in range(phase.epochs):
        rows = phase.source.epoch(rng)
        index = batch_rows(phase.source, phase.settings.batch, rng)
        last = number == phase.epochs - 1
        with torch.inference_mode():
            labels = head_rows[rows["y"]]
            losses = epoch(rows["u"], labels, index, last)
        steps += len(index)
    adapter = {name: t.clone() for name, t in tail.adapter.items()}
    by_class = order.argsort()
    head = {name: t[by_class] for name, t in tail.head.items()}
    weights = {**phase.weights, "adapter": adapter, "head": head}
    return Trained(weights, float(losses.mean()), steps)


def prepared(phase: Train, order: Tensor) -> tuple[Tail, EpochState, Rule, Tensor]:
    """Adapter and head as views, the tensors of the phase, the optimiser, and each class's row in the head."""
    vector, tail = joined(phase.weights, order)
    gradient, into = joined(phase.weights, order)
    batch = phase.settings.batch or phase.source.size
    c = Classification(tail, into, batch, phase.constants)
    anchor = [vector.clone()] if phase.proximal else []
    optimiser = Optimiser(phase.settings, [vector])
    state = EpochState([vector], [gradient], c.weights, c.gradients, c.buffers, optimiser.moments, anchor)
    return tail, state, optimiser.rule, c.head_rows


def joined(weights: Weights, order: Tensor) -> tuple[Tensor, Tail]:
    """A copy of adapter and head in one vector, with the head's rows in this order, and a tail of views of it."""
    tensors = {("adapter", name): t for name, t in weights["adapter"].items()}
    tensors |= {("head", name): t[order] for name, t in weights["head"].items()}
    flat = [t.flatten() for t in tensors.values()]
    vector = torch.cat(flat)
    views = vector.split([len(t) for t in flat])
    parts: Weights = {"adapter": {}, "head": {}}
    for ((block, name), tensor), view in zip(tensors.items(), views, strict=True):
        parts[block][name] = view.view(tensor.shape)
    return vector, Tail(parts["adapter"], parts["head"])
