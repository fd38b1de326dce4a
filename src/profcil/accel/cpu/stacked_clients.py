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
from profcil.accel.cpu.adapter_head_epoch import torchscript
from profcil.accel.cpu.client_batch import ClientBatch, NotBatchable
from profcil.accel.cpu.convnet_gradient import Layers, layers_of, write_gradients
from profcil.accel.sources import epochs
from profcil.data.bundle import Inputs
from profcil.engine.phases import Batch, Train, Trained
from profcil.engine.steps import GradientMoments, Optimiser, Rule, fused, generator_of
from profcil.model.layers import unit
from profcil.model.net import MODEL, Net, Tail, Tensors, Weights, project

STEPS_AT_ONCE = 32  # steps whose views are computed at once, where an epoch is one call

TensorName = tuple[str, str]  # block and tensor
ClientInputs = tuple[ClientBatch, ...]  # inputs of an encoder


def run(net: Net, phases: Sequence[Train], analytic: bool) -> list[Trained]:
    """As `steps.run` for each phase. `analytic`: use the analytic gradient (`convnet_gradient`)."""
    net.train()
    rows = AnalyticRows(net, phases) if analytic else ClientRows(net, phases)
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
        by_client = []
        for phase, index in zip(phases, rows["index"], strict=True):
            if phase.inputs is not None:
                by_client.append(phase.inputs(index))
        stacked_inputs = [torch.stack(parts) for parts in zip(*by_client, strict=True)]
        batch["inputs"] = tuple(ClientBatch(t) for t in stacked_inputs)
    return batch


class StackedNet:
    """The models of several clients with the interface of one `Net`, as far as batched losses need it. Other attributes
    raise `NotBatchable`."""

    def __init__(self, net: Net, weights: Weights) -> None:
        self._net = net
        self._weights = weights

    def __getattr__(self, name: str) -> Any:
        raise NotBatchable(name)

    def __call__(self, *inputs: ClientBatch) -> ClientBatch:
        return self.classify(*self.encode(inputs))

    def weak(self, inputs: ClientInputs, rng: ClientBatch) -> ClientInputs:
        if not self._net.augment:
            return inputs
        return self._views(augmentations.weak, inputs, rng)

    def strong(self, inputs: ClientInputs, rng: ClientBatch) -> ClientInputs:
        return self._views(augmentations.strong, inputs, rng)

    def encode(self, *batches: ClientInputs) -> ClientInputs:
        """The features u of several batches; in one pass where no example depends on another."""
        base: Any = self._net.base
        own = self._block("base")
        types = {tuple(x.of.dtype for x in inputs) for inputs in batches}
        if getattr(base, "mixes", True) or len(types) > 1:
            features = []
            for inputs in batches:
                units = [unit(x.of) for x in inputs]
                features.append(base.over_clients(own, *units))
        else:
            joined = []
            for parts in zip(*batches, strict=True):
                examples = torch.cat([x.of for x in parts], 1)
                joined.append(unit(examples))
            features = base.over_clients(own, *joined).chunk(len(batches), 1)
        return tuple(ClientBatch(u) for u in features)

    def classify(self, u: ClientBatch) -> ClientBatch:
        adapter = self._block("adapter")
        head = self._block("head")
        tail = Tail(adapter, head, self._net.cosine)
        return ClientBatch(tail.classify(u.of))

    def project(self, u: ClientBatch) -> ClientBatch:
        projector = self._block("projector")
        return ClientBatch(project(projector, u.of))

    def _block(self, name: str) -> Tensors:
        if name not in self._weights:
            raise NotBatchable(f"no {name} among the clients' weights")
        return self._weights[name]

    def _views(self, view: Callable[..., Inputs], inputs: ClientInputs, rng: ClientBatch) -> ClientInputs:
        """Views of all clients' inputs, each client's from its own generator."""
        clients = len(rng.of)
        flat = tuple(x.of.flatten(0, 1) for x in inputs)
        views = view(self._net.facts, flat, rng.of)
        by_client = [x.unflatten(0, (clients, -1)) for x in views]
        return tuple(ClientBatch(x) for x in by_client)


class StackState(NamedTuple):
    """The tensors of a stack; some as lists, for TorchScript (see `adapter_head_epoch.EpochState`)."""

    matrix: list[Tensor]  # the trained parameters, one client in each row
    gradient: list[Tensor]  # of the matrix
    weights: dict[str, Tensor]  # views of the matrix with a leading client axis, by block.name
    gradients: dict[str, Tensor]  # views of the gradient
    moments: GradientMoments
    anchor: list[Tensor]  # the anchor of the proximal term; empty without one


def update(state: StackState, rule: Rule, proximal: float, clip: float) -> None:
    """Proximal term, clipping and update of all clients, in a form that TorchScript can compile."""
    matrix = state.matrix[0]
    gradient = state.gradient[0]
    for anchor in state.anchor:  # ∇ λ‖Θ − Θ^g‖² = 2λ(Θ − Θ^g)
        n = anchor.shape[1]
        moved = matrix[:, :n] - anchor
        gradient[:, :n].add_(moved, alpha=2 * proximal)
    if clip != 0:
        norms = gradient.norm(2, [1], True) + 1e-6
        if not float(norms.amax()) <= clip:
            factors = (clip / norms).clamp_(max=1.0)
            gradient.mul_(factors)
    fused(state.matrix, state.gradient, state.moments, rule)


def take_steps(
    state: StackState, layers: Layers, x: Tensor, y: Tensor, rule: Rule, proximal: float, clip: float
) -> Tensor:
    """Steps on batches [steps, batch, …] with classes [steps, clients, batch, 1]; gives losses [steps, clients]."""
    losses = x.new_empty(y.shape[:2])
    for i in range(len(x)):
        losses[i] = write_gradients(state.weights, state.gradients, layers, x[i], y[i])
        update(state, rule, proximal, clip)
    return losses


compiled_steps = torchscript(take_steps)


class ClientRows:
    """The tensors of a stack: trained parameters as rows of a matrix, all others with a leading client axis."""

    def __init__(self, net: Net, phases: Sequence[Train]) -> None:
        self.net = net
        self.phases = phases
        first = phases[0]
        trained = sorted(first.blocks, key=lambda b: b not in MODEL)  # blocks with a proximal term first
        self.places: dict[TensorName, torch.Size] = {}
        for b in trained:
            for k, p in getattr(net, b).named_parameters():
                self.places[b, k] = p.shape
        matrix = torch.stack([self.row(phase) for phase in phases])
        gradient = torch.empty_like(matrix)
        optimiser = Optimiser(first.settings, [matrix])
        parameters = self.views(matrix)
        gradients = self.views(gradient)
        self.own = self.all_tensors(parameters)
        anchor = []
        if first.proximal:
            anchored = sum(shape.numel() for (b, _), shape in self.places.items() if b in MODEL)
            anchor.append(matrix[:, :anchored].clone())
        self.state = StackState(
            [matrix], [gradient], by_name(parameters), by_name(gradients), optimiser.moments, anchor
        )
        self.update_settings = (optimiser.rule, first.proximal, first.settings.clip)
        self.constants: Tensors = {}
        for name in first.constants:
            self.constants[name] = torch.stack([p.constants[name] for p in phases])

    def all_tensors(self, parameters: dict[TensorName, Tensor]) -> Weights:
        """All tensors of the clients: the trained parameters, and copies of the others."""
        own: Weights = {}
        for block, tensors in self.phases[0].weights.items():
            own[block] = {}
            for name in tensors:
                trained = parameters.get((block, name))
                own[block][name] = stacked(self.phases, block, name) if trained is None else trained
        return own

    def row(self, phase: Train) -> Tensor:
        """A client's trained parameters as one row."""
        pieces = [flattened(phase.weights[b][k]) for b, k in self.places]
        return torch.cat(pieces)

    def views(self, matrix: Tensor) -> dict[TensorName, Tensor]:
        """The tensors as views of a matrix, with a leading client axis."""
        sizes = [shape.numel() for shape in self.places.values()]
        pieces = matrix.split(sizes, 1)
        tensors: dict[TensorName, Tensor] = {}
        for (name, shape), piece in zip(self.places.items(), pieces, strict=True):
            tensors[name] = unflattened(piece, shape)
        return tensors

    def epoch(self, table: Tensors, rngs: Sequence[torch.Generator]) -> Tensor:
        """The losses of an epoch's steps, [steps, clients], by autograd."""
        phase = self.phases[0]
        leaves = [t.requires_grad_() for t in self.state.weights.values()]
        gradients = list(self.state.gradients.values())
        model = StackedNet(self.net, self.own)
        constants = {k: ClientBatch(v) for k, v in self.constants.items()}
        constants["rng"] = ClientBatch(list(rngs))
        losses = []
        for number in range(phase.length):
            rows = {k: v[:, number] for k, v in table.items()}
            batch = batch_of(self.phases, rows) | constants
            loss = losses_of(model, phase, batch)
            grads = torch.autograd.grad(loss.sum(), leaves, materialize_grads=True)
            with torch.no_grad():
                torch._foreach_copy_(gradients, grads)
                update(self.state, *self.update_settings)
            losses.append(loss.detach())
        return torch.stack(losses)

    def end(self, row: int, phase: Train) -> Weights:
        """A client's weights with the trained blocks replaced."""
        weights = dict(phase.weights)
        for block in phase.blocks:
            tensors = self.own[block]
            weights[block] = {k: own_copy(v[row]) for k, v in tensors.items()}
        return weights


class AnalyticRows(ClientRows):
    """A stack with an analytic gradient."""

    @torch.no_grad()
    def epoch(self, table: Tensors, rngs: Sequence[torch.Generator]) -> Tensor:
        y = table["y"].transpose(0, 1).unsqueeze(3).contiguous()
        indices = table["index"].split(STEPS_AT_ONCE, 1)
        losses = []
        for index, labels in zip(indices, y.split(STEPS_AT_ONCE), strict=True):
            losses.append(self.some_steps(index, labels, rngs))
        return torch.cat(losses)

    def some_steps(self, index: Tensor, y: Tensor, rngs: Sequence[torch.Generator]) -> Tensor:
        """Some steps. Their views are computed at once, from the same draws as one step after another."""
        clients, steps, batch = index.shape
        base: Any = self.net.base
        images = []
        for phase, own_index in zip(self.phases, index, strict=True):
            if phase.inputs is not None:
                images.append(phase.inputs(own_index.flatten())[0])
        x = torch.cat(images)
        if self.net.augment:
            rng_of_each_step = [rng for rng in rngs for _ in range(steps)]
            (x,) = augmentations.weak(self.net.facts, (x,), rng_of_each_step)
        x = base.pixels(unit(x)).unflatten(0, (clients, steps, batch))
        x = x.permute(1, 2, 0, 3, 4, 5).flatten(2, 3)  # the clients' channels next to each other
        x = x.flatten(0, 1).contiguous(memory_format=torch.channels_last)
        x = x.unflatten(0, (steps, batch))
        layers = layers_of(base, x, self.constants["allowed"])
        return compiled_steps(self.state, layers, x, y, *self.update_settings)


def own_copy(tensor: Tensor) -> Tensor:
    """A contiguous copy without autograd."""
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def by_name(tensors: dict[TensorName, Tensor]) -> dict[str, Tensor]:
    return {f"{b}.{k}": t for (b, k), t in tensors.items()}


def stacked(phases: Sequence[Train], block: str, name: str) -> Tensor:
    """One tensor of all clients, stacked."""
    return torch.stack([p.weights[block][name] for p in phases])


def flattened(tensor: Tensor) -> Tensor:
    """A tensor flattened for a row. Convolution weights are channels last, which saves copies in every step."""
    if tensor.dim() == 4:
        tensor = tensor.movedim(1, 3)
    return tensor.flatten()


def unflattened(piece: Tensor, shape: torch.Size) -> Tensor:
    """The inverse of `flattened`: a tensor with a leading client axis, as a view."""
    if len(shape) < 4:
        return piece.view(-1, *shape)
    channels_last = piece.view(-1, shape[0], *shape[2:], shape[1])
    return channels_last.movedim(4, 2)


def losses_of(model: StackedNet, phase: Train, batch: Batch) -> Tensor:
    """The losses of all clients, one value each."""
    try:
        loss = phase.loss(model, batch)
    except TypeError as error:  # an operation without a batched version; a real error occurs again for single clients
        raise NotBatchable(str(error)) from error
    if not isinstance(loss, ClientBatch) or loss.of.dim() != 1:
        raise NotBatchable("not one value a client")
    return loss.of
