"""Phases that train the base, for several clients in one computation on a CPU.

An encoder that supports this has a method `over_clients(own, *inputs)`; its attribute `mixes` says whether the examples
of a batch depend on each other. Losses need no mark (see `client_batch`). Draws, batches and steps of a client do not
depend on the other clients; only the rounding does. Each client's parameters are one row of a matrix, so that proximal
term, clipping and update of all clients are a few operations. With an analytic gradient, an epoch is one call of
TorchScript.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from profcil.accel import augmentations
from profcil.accel.cpu.adapter_head_epoch import compiled
from profcil.accel.cpu.client_batch import ClientBatch, NotBatchable
from profcil.accel.cpu.convnet_gradient import Layers, layers_of, slopes
from profcil.accel.sources import epochs
from profcil.data.bundle import Inputs
from profcil.engine.optim import Moments, Optimiser, Rule, fused
from profcil.engine.phases import Batch, Train, Trained
from profcil.engine.steps import generator_of
from profcil.model.layers import unit
from profcil.model.net import MODEL, Net, Tail, Tensors, Weights, project

STEPS_AT_ONCE = 32  # steps whose views are computed at once, where an epoch is one call

At = tuple[str, str]  # block and tensor
Seen = tuple[ClientBatch, ...]  # inputs of an encoder


def run(net: Net, phases: Sequence[Train], written: bool) -> list[Trained]:
    """As `steps.run` for each phase. `written`: use the analytic gradient (`convnet_gradient`)."""
    net.train()
    rows = Written(net, phases) if written else Rows(net, phases)
    rngs = [generator_of(net, p) for p in phases]
    losses = torch.zeros(0)
    for table, _ in epochs(phases, rngs):
        losses = rows.epoch(table, rngs)
    means = losses.mean(0).tolist()
    steps = phases[0].epochs * len(losses)
    return [Trained(rows.end(i, p), means[i], steps) for i, p in enumerate(phases)]


def batch_of(phases: Sequence[Train], rows: Tensors) -> Batch:
    """One batch of each client, with the encoder's inputs where a phase has them."""
    batch: Batch = {k: ClientBatch(v) for k, v in rows.items()}
    if phases[0].inputs is not None:
        each = [p.inputs(index) for p, index in zip(phases, rows["index"], strict=True) if p.inputs is not None]
        batch["inputs"] = tuple(ClientBatch(torch.stack(parts)) for parts in zip(*each, strict=True))
    return batch


class Stack:
    """The models of several clients with the interface of one `Net`, as far as batched losses need it. Other attributes
    raise `NotBatchable`."""

    def __init__(self, net: Net, weights: Weights) -> None:
        self._net = net
        self._weights = weights

    def __getattr__(self, name: str) -> Any:
        raise NotBatchable(name)

    def __call__(self, *inputs: ClientBatch) -> ClientBatch:
        return self.classify(*self.encode(inputs))

    def weak(self, inputs: Seen, rng: ClientBatch) -> Seen:
        return self._through(augmentations.weak, inputs, rng) if self._net.augment else inputs

    def strong(self, inputs: Seen, rng: ClientBatch) -> Seen:
        return self._through(augmentations.strong, inputs, rng)

    def encode(self, *batches: Seen) -> Seen:
        """The features u of several batches; in one pass where no example depends on another."""
        base: Any = self._net.base
        types = {tuple(x.of.dtype for x in inputs) for inputs in batches}
        if getattr(base, "mixes", True) or len(types) > 1:
            own = self._block("base")
            return tuple(ClientBatch(base.over_clients(own, *(unit(x.of) for x in inputs))) for inputs in batches)
        joined = (unit(torch.cat([x.of for x in parts], 1)) for parts in zip(*batches, strict=True))
        return tuple(map(ClientBatch, base.over_clients(self._block("base"), *joined).chunk(len(batches), 1)))

    def classify(self, u: ClientBatch) -> ClientBatch:
        return ClientBatch(Tail(self._block("adapter"), self._block("head"), self._net.cosine).classify(u.of))

    def project(self, u: ClientBatch) -> ClientBatch:
        return ClientBatch(project(self._block("projector"), u.of))

    def _block(self, name: str) -> Tensors:
        if name not in self._weights:
            raise NotBatchable(f"no {name} among the clients' weights")
        return self._weights[name]

    def _through(self, view: Callable[..., Inputs], inputs: Seen, rng: ClientBatch) -> Seen:
        """Views of all clients' inputs, each client's from its own generator."""
        flat = tuple(x.of.flatten(0, 1) for x in inputs)
        return tuple(ClientBatch(x.unflatten(0, (len(rng.of), -1))) for x in view(self._net.facts, flat, rng.of))


class TrainingState(NamedTuple):
    """The tensors of a stack; some as lists, for TorchScript (see `adapter_head_epoch.TrainingState`)."""

    matrix: list[Tensor]  # the trained parameters, one client in each row
    slope: list[Tensor]  # the gradient of the matrix
    weights: dict[str, Tensor]  # views of the matrix with a leading client axis, by block.name
    slopes: dict[str, Tensor]  # views of the gradient
    moments: Moments
    anchor: list[Tensor]  # the anchor of the proximal term; empty without one


def move(g: TrainingState, rule: Rule, proximal: float, clip: float) -> None:
    """Proximal term, clipping and update of all clients, in a form that TorchScript can compile."""
    matrix = g.matrix[0]
    gradient = g.slope[0]
    for anchor in g.anchor:  # ∇ λ‖Θ − Θ^g‖² = 2λ(Θ − Θ^g)
        n = anchor.shape[1]
        gradient[:, :n].add_(matrix[:, :n] - anchor, alpha=2 * proximal)
    if clip != 0:
        norms = gradient.norm(2, [1], True) + 1e-6
        if not float(norms.amax()) <= clip:
            gradient.mul_((clip / norms).clamp_(max=1.0))
    fused(g.matrix, g.slope, g.moments, rule)


def descend(g: TrainingState, layers: Layers, x: Tensor, y: Tensor, rule: Rule, proximal: float, clip: float) -> Tensor:
    """Steps on batches [steps, batch, …] with classes [steps, clients, batch, 1]; gives losses [steps, clients]."""
    losses = x.new_empty(y.shape[:2])
    for i in range(len(x)):
        losses[i] = slopes(g.weights, g.slopes, layers, x[i], y[i])
        move(g, rule, proximal, clip)
    return losses


walk = compiled(descend)


class Rows:
    """The tensors of a stack: trained parameters as rows of a matrix, all others with a leading client axis."""

    def __init__(self, net: Net, phases: Sequence[Train]) -> None:
        self.net = net
        self.phases = phases
        first = phases[0]
        trained = sorted(first.blocks, key=lambda b: b not in MODEL)  # blocks with a proximal term first
        self.places = {(b, k): p.shape for b in trained for k, p in getattr(net, b).named_parameters()}
        rows = [torch.cat([lying(p.weights[b][k]) for b, k in self.places]) for p in phases]
        matrix = torch.stack(rows)
        gradient = torch.empty_like(matrix)
        optimiser = Optimiser(first.settings, [matrix])
        parameters = self.views(matrix)
        gradients = self.views(gradient)
        self.own: Weights = {b: {} for b in first.weights}
        for b, tensors in first.weights.items():
            for k in tensors:
                self.own[b][k] = parameters[b, k] if (b, k) in parameters else together(phases, b, k)
        pulled = sum(t[0].numel() for (b, _), t in parameters.items() if b in MODEL)
        anchor = [matrix[:, :pulled].clone()] if first.proximal else []
        self.ground = TrainingState(
            [matrix], [gradient], by_name(parameters), by_name(gradients), optimiser.moments, anchor
        )
        self.how = (optimiser.rule, first.proximal, first.settings.clip)
        self.constants = {k: torch.stack([p.constants[k] for p in phases]) for k in first.constants}

    def views(self, matrix: Tensor) -> dict[At, Tensor]:
        """The tensors as views of a matrix, with a leading client axis."""
        pieces = matrix.split([shape.numel() for shape in self.places.values()], 1)
        return {at: standing(piece, shape) for (at, shape), piece in zip(self.places.items(), pieces, strict=True)}

    def epoch(self, table: Tensors, rngs: Sequence[torch.Generator]) -> Tensor:
        """The losses of an epoch's steps, [steps, clients], by autograd."""
        leaves = [t.requires_grad_() for t in self.ground.weights.values()]
        model = Stack(self.net, self.own)
        steps = []
        more = {k: ClientBatch(v) for k, v in (self.constants | {"rng": list(rngs)}).items()}
        for number in range(self.phases[0].length):
            batch = batch_of(self.phases, {k: v[:, number] for k, v in table.items()})
            loss = losses_of(model, self.phases[0], batch | more)
            grads = torch.autograd.grad(loss.sum(), leaves, materialize_grads=True)
            with torch.no_grad():
                torch._foreach_copy_(list(self.ground.slopes.values()), grads)
                move(self.ground, *self.how)
            steps.append(loss.detach())
        return torch.stack(steps)

    def end(self, row: int, phase: Train) -> Weights:
        """A client's weights with the trained blocks replaced."""
        plain = torch.contiguous_format
        own = {b: {k: v[row].detach().clone(memory_format=plain) for k, v in self.own[b].items()} for b in phase.blocks}
        return {**phase.weights, **own}


class Written(Rows):
    """A stack with an analytic gradient."""

    @torch.no_grad()
    def epoch(self, table: Tensors, rngs: Sequence[torch.Generator]) -> Tensor:
        y = table["y"].transpose(0, 1).unsqueeze(3).contiguous()
        pieces = zip(table["index"].split(STEPS_AT_ONCE, 1), y.split(STEPS_AT_ONCE), strict=True)
        return torch.cat([self.piece(index, y, rngs) for index, y in pieces])

    def piece(self, index: Tensor, y: Tensor, rngs: Sequence[torch.Generator]) -> Tensor:
        """Some steps. Their views are computed at once, from the same draws as one step after another."""
        clients, steps, batch = index.shape
        base: Any = self.net.base
        rows = [p.inputs(i.flatten())[0] for p, i in zip(self.phases, index, strict=True) if p.inputs is not None]
        x = torch.cat(rows)
        if self.net.augment:
            (x,) = augmentations.weak(self.net.facts, (x,), [rng for rng in rngs for _ in range(steps)])
        x = base.pixels(unit(x)).unflatten(0, (clients, steps, batch)).permute(1, 2, 0, 3, 4, 5).flatten(2, 3)
        x = x.flatten(0, 1).contiguous(memory_format=torch.channels_last).unflatten(0, (steps, batch))
        return walk(self.ground, layers_of(base, x, self.constants["allowed"]), x, y, *self.how)


def by_name(tensors: dict[At, Tensor]) -> dict[str, Tensor]:
    return {f"{b}.{k}": t for (b, k), t in tensors.items()}


def together(phases: Sequence[Train], block: str, name: str) -> Tensor:
    """One tensor of all clients, stacked."""
    return torch.stack([p.weights[block][name] for p in phases])


def lying(tensor: Tensor) -> Tensor:
    """A tensor flattened for a row. Convolution weights are channels last, which saves copies in every step."""
    return (tensor if tensor.dim() < 4 else tensor.movedim(1, 3)).flatten()


def standing(piece: Tensor, shape: torch.Size) -> Tensor:
    """The inverse of `lying`: a tensor with a leading client axis, as a view."""
    if len(shape) < 4:
        return piece.view(-1, *shape)
    return piece.view(-1, shape[0], *shape[2:], shape[1]).movedim(4, 2)


def losses_of(model: Stack, phase: Train, batch: Batch) -> Tensor:
    """The losses of all clients, one value each."""
    try:
        loss = phase.loss(model, batch)
    except TypeError as error:  # an operation without a batched version; a real error occurs again for single clients
        raise NotBatchable(str(error)) from error
    if not isinstance(loss, ClientBatch) or loss.of.dim() != 1:
        raise NotBatchable("not one value a client")
    return loss.of
