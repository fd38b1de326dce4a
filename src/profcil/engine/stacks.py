"""Phases that move the base, of several clients in one computation on a CPU.

An encoder that can carry a client axis says so by a method `over_clients(own, *inputs)`, and by `mixes` whether the
examples of a batch depend on each other; losses need not say anything (see `many`). What a client draws, sees and steps
is as if it were alone; only the rounding differs. Each client's parameters are one row of a matrix, so that pull,
clipping and update of all are a few operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from profcil.data.bundle import Inputs
from profcil.encoders import views
from profcil.encoders.many import Many, Refused
from profcil.encoders.model import MODEL, Net, Tail, Tensors, Weights, project
from profcil.encoders.norms import unit
from profcil.engine.optim import Optimiser
from profcil.engine.phases import Batch, Train, Trained
from profcil.engine.steps import epoch_of, generator_of

At = tuple[str, str]  # block and tensor
Seen = tuple[Many, ...]  # inputs of an encoder


def carries(net: Net) -> bool:
    """Whether this model's base can be computed for several clients at once, and in the same precision."""
    low = getattr(net, "bf16", False)
    return hasattr(net.base, "over_clients") and not low and next(net.parameters()).device.type == "cpu"


def fit(net: Net, phases: Sequence[Train]) -> bool:
    """Whether these phases can be: their epochs must have the same number of steps."""
    return len(phases) > 1 and carries(net) and len({p.length for p in phases}) == 1


def run(net: Net, phases: Sequence[Train]) -> list[Trained]:
    """As `steps.run_on_net` for each."""
    net.train()
    rows, rngs, losses = Rows(net, phases), [generator_of(net, p) for p in phases], torch.zeros(0)
    constants = {k: Many(torch.stack([p.constants[k] for p in phases])) for k in phases[0].constants}
    for _ in range(phases[0].epochs):
        table, _ = epoch_of(phases, rngs)
        losses = torch.zeros(phases[0].length, len(phases))
        for number in range(len(losses)):
            batch = batch_of(phases, {k: v[:, number] for k, v in table.items()})
            losses[number] = rows.step(phases[0], batch | constants | {"rng": Many(rngs)})
    means, steps = losses.mean(0).tolist(), phases[0].epochs * len(losses)
    return [Trained(rows.end(i, p), means[i], steps) for i, p in enumerate(phases)]


def batch_of(phases: Sequence[Train], rows: Tensors) -> Batch:
    """One batch of each, with the encoder's inputs where a phase has any."""
    batch: Batch = {k: Many(v) for k, v in rows.items()}
    if phases[0].inputs is not None:
        each = [p.inputs(index) for p, index in zip(phases, rows["index"], strict=True) if p.inputs is not None]
        batch["inputs"] = tuple(Many(torch.stack(parts)) for parts in zip(*each, strict=True))
    return batch


class Stack:
    """The models of several clients in the place of one: the part of `Net` that losses of many clients can do with."""

    def __init__(self, net: Net, weights: Weights) -> None:
        self._net, self._weights = net, weights

    def __getattr__(self, name: str) -> Any:
        raise Refused(name)

    def __call__(self, *inputs: Many) -> Many:
        return self.classify(*self.encode(inputs))

    def weak(self, inputs: Seen, rng: Many) -> Seen:
        return self._through(views.weak, inputs, rng) if self._net.augment else inputs

    def strong(self, inputs: Seen, rng: Many) -> Seen:
        return self._through(views.strong, inputs, rng)

    def encode(self, *batches: Seen) -> Seen:
        """u of several batches as if one after another; at once where no image depends on another."""
        base: Any = self._net.base
        if getattr(base, "mixes", True) or len({tuple(x.of.dtype for x in inputs) for inputs in batches}) > 1:
            own = self._block("base")
            return tuple(Many(base.over_clients(own, *(unit(x.of) for x in inputs))) for inputs in batches)
        joined = (unit(torch.cat([x.of for x in parts], 1)) for parts in zip(*batches, strict=True))
        return tuple(map(Many, base.over_clients(self._block("base"), *joined).chunk(len(batches), 1)))

    def classify(self, u: Many) -> Many:
        return Many(Tail(self._block("adapter"), self._block("head"), self._net.cosine).classify(u.of))

    def project(self, u: Many) -> Many:
        return Many(project(self._block("projector"), u.of))

    def _block(self, name: str) -> Tensors:
        if name not in self._weights:
            raise Refused(f"no {name} among the clients' weights")
        return self._weights[name]

    def _through(self, view: Callable[..., Inputs], inputs: Seen, rng: Many) -> Seen:
        """Views of all, each client's by its own draws."""
        flat = tuple(x.of.flatten(0, 1) for x in inputs)
        return tuple(Many(x.unflatten(0, (len(rng.of), -1))) for x in view(self._net.facts, flat, rng.of))


class Rows:
    """The tensors of a stack: what moves as rows of a matrix, all else with a leading client axis."""

    def __init__(self, net: Net, phases: Sequence[Train]) -> None:
        first, moving = phases[0], sorted(phases[0].blocks, key=lambda b: b not in MODEL)  # what is pulled comes first
        self.places = {(b, k): p.shape for b in moving for k, p in getattr(net, b).named_parameters()}
        rows = [torch.cat([lying(p.weights[b][k]) for b, k in self.places]) for p in phases]
        self.matrix = torch.stack(rows)
        self.slope, self.optimiser = torch.empty_like(self.matrix), Optimiser(first.settings, [self.matrix])
        self.leaves, self.slopes = ([*self.views(m).values()] for m in (self.matrix, self.slope))
        moved = dict(zip(self.places, self.leaves, strict=True))
        self.own = {
            b: {k: moved[b, k].requires_grad_() if (b, k) in moved else together(phases, b, k) for k in tensors}
            for b, tensors in first.weights.items()
        }
        self.model = Stack(net, self.own)
        self.anchor = self.matrix[:, : sum(t[0].numel() for (b, _), t in moved.items() if b in MODEL)].clone()

    def views(self, matrix: Tensor) -> dict[At, Tensor]:
        """The tensors in a matrix, with a leading client axis."""
        pieces = matrix.split([shape.numel() for shape in self.places.values()], 1)
        return {at: standing(piece, shape) for (at, shape), piece in zip(self.places.items(), pieces, strict=True)}

    def step(self, phase: Train, batch: Batch) -> Tensor:
        """One step of each, in place; their losses."""
        loss, slope = losses_of(self.model, phase, batch), self.slope
        grads = torch.autograd.grad(loss.sum(), self.leaves, materialize_grads=True)
        torch._foreach_copy_(self.slopes, grads)
        if phase.proximal:  # ∇ λ‖Θ − Θ^g‖² = 2λ(Θ − Θ^g)
            n = self.anchor.shape[1]
            slope[:, :n].add_(self.matrix[:, :n] - self.anchor, alpha=2 * phase.proximal)
        norms, limit = slope.norm(dim=1, keepdim=True) + 1e-6, phase.settings.clip
        if limit and not float(norms.amax()) <= limit:
            slope.mul_((limit / norms).clamp_(max=1.0))
        self.optimiser.step([slope])
        return loss.detach()

    def end(self, row: int, phase: Train) -> Weights:
        """A client's weights with the blocks that moved replaced."""
        plain = torch.contiguous_format
        own = {b: {k: v[row].detach().clone(memory_format=plain) for k, v in self.own[b].items()} for b in phase.blocks}
        return {**phase.weights, **own}


def together(phases: Sequence[Train], block: str, name: str) -> Tensor:
    return torch.stack([p.weights[block][name] for p in phases])


def lying(tensor: Tensor) -> Tensor:
    """A tensor as it lies in a row: a convolution's weights channels last, which spares every step some copies."""
    return (tensor if tensor.dim() < 4 else tensor.movedim(1, 3)).flatten()


def standing(piece: Tensor, shape: torch.Size) -> Tensor:
    """And back, with a leading client axis."""
    if len(shape) < 4:
        return piece.view(-1, *shape)
    return piece.view(-1, shape[0], *shape[2:], shape[1]).movedim(4, 2)


def losses_of(model: Stack, phase: Train, batch: Batch) -> Tensor:
    """One value a client."""
    try:
        loss = phase.loss(model, batch)
    except TypeError as error:  # an operation that `Many` does not have; a true mistake shows when clients are alone
        raise Refused(str(error)) from error
    if not isinstance(loss, Many) or loss.of.dim() != 1:
        raise Refused("not one value a client")
    return loss.of
