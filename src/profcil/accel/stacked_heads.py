"""Adapters and heads of several clients trained as one batched computation, one client in each row of a stack."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from profcil.accel.row_updates import RowOptimiser, clip_rows_
from profcil.accel.sources import epochs
from profcil.engine.phases import Batch, Train, Trained
from profcil.engine.steps import generator_of, loss_of
from profcil.model.net import TAIL, Net, Tail


def run(net: Net, phases: Sequence[Train]) -> list[Trained]:
    """As `steps.run` for each phase. The longest epoch comes first, so that active clients are the first rows."""
    order = sorted(range(len(phases)), key=lambda i: (-phases[i].source.size, i))
    stack = Stack(net, [phases[i] for i in order])
    losses = torch.zeros(0)
    steps = [0]
    for rows, steps in epochs(stack.phases, [generator_of(net, p) for p in stack.phases]):
        losses = stack.epoch(rows, steps)
    means = (losses.sum(1) / torch.tensor(steps, device=losses.device)).tolist()
    done: dict[int, Trained] = {}
    for row, i in enumerate(order):
        done[i] = Trained(stack.weights(row), means[row], steps[row] * phases[i].epochs)
    return [done[i] for i in range(len(phases))]


class Stack:
    """The tensors of several clients, with a leading client axis."""

    def __init__(self, net: Net, phases: Sequence[Train]) -> None:
        self.phases = phases
        self.first = phases[0]  # what the phases have in common
        self.cosine = net.cosine
        self.tensors = {b: stacked([p.weights[b] for p in phases]) for b in TAIL}
        self.parameters = [self.tensors[b][k].requires_grad_() for b in self.first.blocks for k in self.tensors[b]]
        self.anchor = [p.detach().clone() for p in self.parameters] if self.first.proximal else None
        self.optimiser = RowOptimiser(self.first.settings, self.parameters)
        self.constants = stacked([p.constants for p in phases])

    def epoch(self, rows: dict[str, Tensor], steps: Sequence[int]) -> Tensor:
        """Trains one epoch; gives the losses, [clients, steps], 0 where a client had finished."""
        losses = torch.zeros(len(self.phases), max(steps), device=self.parameters[0].device)
        for number in range(max(steps)):
            n = sum(number < s for s in steps)
            batch = {k: v[:n, number] for k, v in rows.items()} | first_rows(self.constants, n)
            losses[:n, number] = self.step(batch, n)
        return losses

    def step(self, batch: Batch, n: int) -> Tensor:
        """One step of the first n clients; gives their losses."""
        adapter, head = (first_rows(self.tensors[b], n) for b in TAIL)
        loss = loss_of(Tail(adapter, head, self.cosine), self.first, batch)
        grads = [g[:n] for g in torch.autograd.grad(loss.sum(), self.parameters, materialize_grads=True)]
        if self.anchor is not None:  # ∇ λ‖Θ − Θ^g‖² = 2λ(Θ − Θ^g)
            moved = [p.detach()[:n] for p in self.parameters]
            pull = torch._foreach_sub(moved, [a[:n] for a in self.anchor])
            torch._foreach_add_(grads, pull, alpha=2 * self.first.proximal)
        clip_rows_(grads, self.first.settings.clip)
        self.optimiser.step(grads, n)
        return loss.detach()

    def weights(self, row: int) -> dict[str, dict[str, Tensor]]:
        """One client's weights with the trained blocks replaced."""
        own = {b: {k: v[row].detach().clone() for k, v in self.tensors[b].items()} for b in self.first.blocks}
        return {**self.phases[row].weights, **own}


def stacked(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {k: torch.stack([part[k] for part in parts]) for k in parts[0]}


def first_rows(tensors: dict[str, Tensor], n: int) -> dict[str, Tensor]:
    return {k: v if n == len(v) else v[:n] for k, v in tensors.items()}
