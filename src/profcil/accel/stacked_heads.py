"""Adapters and heads of several clients trained as one batched computation, one client in each row of a stack."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from profcil.accel.row_updates import RowOptimiser, clip_rows_
from profcil.accel.sources import epochs
from profcil.engine.phases import Batch, Train, Trained
from profcil.engine.steps import generator_of, loss_of
from profcil.model.net import TAIL, Net, Tail, Weights


def run(net: Net, phases: Sequence[Train]) -> list[Trained]:
    """As `steps.run` for each phase. The longest epoch comes first, so that active clients are the first rows."""
    sizes = [p.source.size for p in phases]
    order = sorted(range(len(phases)), key=lambda i: -sizes[i])
    stack = StackedHeads(net, [phases[i] for i in order])
    generators = [generator_of(net, p) for p in stack.phases]
    losses = torch.zeros(0)
    steps = [0]
    for rows, steps in epochs(stack.phases, generators):
        losses = stack.epoch(rows, steps)
    divisor = torch.tensor(steps, device=losses.device)
    means = (losses.sum(1) / divisor).tolist()
    done: dict[int, Trained] = {}
    for row, i in enumerate(order):
        all_steps = steps[row] * phases[i].epochs
        done[i] = Trained(stack.weights(row), means[row], all_steps)
    return [done[i] for i in range(len(phases))]


class StackedHeads:
    """The tensors of several clients, with a leading client axis."""

    def __init__(self, net: Net, phases: Sequence[Train]) -> None:
        self.phases = phases
        self.first = phases[0]  # what the phases have in common
        self.cosine = net.cosine
        self.tensors: Weights = {}
        for block in TAIL:
            self.tensors[block] = stacked([p.weights[block] for p in phases])
        self.parameters: list[Tensor] = []
        for block in self.first.blocks:
            self.parameters += [t.requires_grad_() for t in self.tensors[block].values()]
        self.anchor: list[Tensor] | None = None
        if self.first.proximal:
            self.anchor = [p.detach().clone() for p in self.parameters]
        self.optimiser = RowOptimiser(self.first.settings, self.parameters)
        self.constants = stacked([p.constants for p in phases])

    def epoch(self, rows: dict[str, Tensor], steps: Sequence[int]) -> Tensor:
        """Trains one epoch; gives the losses, [clients, steps], 0 where a client had finished."""
        longest = max(steps)
        device = self.parameters[0].device
        losses = torch.zeros(len(self.phases), longest, device=device)
        for number in range(longest):
            n = sum(number < s for s in steps)
            examples = {k: v[:n, number] for k, v in rows.items()}
            batch = examples | first_rows(self.constants, n)
            losses[:n, number] = self.step(batch, n)
        return losses

    def step(self, batch: Batch, n: int) -> Tensor:
        """One step of the first n clients; gives their losses."""
        adapter = first_rows(self.tensors["adapter"], n)
        head = first_rows(self.tensors["head"], n)
        tail = Tail(adapter, head, self.cosine)
        loss = loss_of(tail, self.first, batch)
        all_grads = torch.autograd.grad(loss.sum(), self.parameters, materialize_grads=True)
        grads = [g[:n] for g in all_grads]
        if self.anchor is not None:  # ∇ λ‖Θ − Θ^g‖² = 2λ(Θ − Θ^g)
            moved = [p.detach()[:n] for p in self.parameters]
            anchor = [a[:n] for a in self.anchor]
            pull = torch._foreach_sub(moved, anchor)
            torch._foreach_add_(grads, pull, alpha=2 * self.first.proximal)
        clip_rows_(grads, self.first.settings.clip)
        self.optimiser.step(grads, n)
        return loss.detach()

    def weights(self, row: int) -> dict[str, dict[str, Tensor]]:
        """One client's weights with the trained blocks replaced."""
        weights = dict(self.phases[row].weights)
        for block in self.first.blocks:
            tensors = self.tensors[block]
            weights[block] = {name: t[row].detach().clone() for name, t in tensors.items()}
        return weights


def stacked(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    together = {}
    for name in parts[0]:
        together[name] = torch.stack([part[name] for part in parts])
    return together


def first_rows(tensors: dict[str, Tensor], n: int) -> dict[str, Tensor]:
    return {name: first_of(tensor, n) for name, tensor in tensors.items()}


def first_of(tensor: Tensor, n: int) -> Tensor:
    """The first n rows; the tensor itself where it has no more, because a view has a gradient of its own to compute."""
    if n == len(tensor):
        return tensor
    return tensor[:n]
