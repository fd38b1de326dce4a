"""Training steps on buffers that never move, so that they can be recorded once and replayed for every client.

What is recorded refers to memory by its address: the parameters, moments and anchor; the phase's constants; a table
with the next CHUNK batches; and a counter on the device that says which of them is due. A client's phase is copied in,
replayed, and copied out. Nothing recorded depends on a client's number of examples, and nothing is read back before a
phase ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from profcil.accel.graphs.client_models import Bodies
from profcil.accel.graphs.recorder import Do, Recorder
from profcil.accel.graphs.updates import Descent, MaskedDescent, MaskedRule
from profcil.accel.loader import found
from profcil.accel.resnet import recorded
from profcil.engine.phases import Batch, Shuffled, Train, Trained
from profcil.engine.steps import loss_of
from profcil.model import losses
from profcil.model.net import TAIL, Net, Tail, Weights

UNROLL = (5, 4, 3)  # steps in one recording, so that clients side by side need not wait for each other after each
PAYS = 1000  # steps of bases after which it has paid to have recorded several as one: recording takes as long as many
ROOM = 256, 128, 128  # classes, width of an adapter and batch that a gradient by kernels has room for
CHUNK = 60  # steps whose batches lie ready on the device: whole recordings, however long

Table = dict[str, Tensor]


class Static:
    """A step on buffers that never move, for up to `width` clients; subclasses say what it does."""

    def __init__(self, phase: Train, table: Table, width: int) -> None:
        nothing = Shuffled(torch.empty(0), torch.empty(0))
        self.unroll = unroll(phase.length)
        self.replays: dict[tuple[int, int], Do] = {}  # recordings by number of clients and of steps
        self.like = replace(phase, weights={}, source=nothing, constants={})  # what its phases have in common
        self.table = {k: v.new_zeros(CHUNK, width, *v.shape[2:]) for k, v in table.items()}
        self.constants = {k: v.new_zeros(width, *v.shape) for k, v in phase.constants.items()}
        device = next(iter(table.values())).device
        self.number = torch.zeros(1, dtype=torch.long, device=device)  # of the step in its epoch
        self.total = torch.zeros(width, device=device)  # of the epoch's losses
        self.lengths = torch.zeros(width, dtype=torch.long, device=device)  # steps in each one's epoch

    def begin(self, phases: Sequence[Train]) -> None:
        """Copies the phases in."""
        self.lengths.zero_()
        for row, phase in enumerate(phases):
            self.lengths[row].fill_(phase.length)  # a copy from the host would wait for the device
            for k, v in phase.constants.items():
                self.constants[k][row].copy_(v)

    def epoch(self, table: Table, lengths: Sequence[int]) -> None:
        """Replays an epoch of batches, [clients, steps, batch, …], of which each client has its own number."""
        self.number.zero_()
        self.total.zero_()
        for number, recording in self.course(lengths):
            if number % CHUNK == 0:
                for k, v in table.items():
                    part = v[:, number : number + CHUNK].transpose(0, 1)
                    self.table[k][: len(part), : part.shape[1]].copy_(part)
            self.replays[recording]()

    def plan(self, lengths: Sequence[int]) -> set[tuple[int, int]]:
        """The recordings that a phase with epochs of these lengths needs, settled before it begins."""
        return {recording for _, recording in self.course(lengths)}

    def course(self, lengths: Sequence[int]) -> Iterator[tuple[int, tuple[int, int]]]:
        """An epoch of these lengths: after so many steps, which recording is due, by its clients and steps."""
        number = 0
        while number < max(lengths):
            rows, steps = self.due(number, lengths)
            yield number, (rows, steps)
            number += steps

    def due(self, number: int, lengths: Sequence[int]) -> tuple[int, int]:
        raise NotImplementedError

    def several(self, number: int, most: int = CHUNK) -> int:
        """Steps to take at once: one where the table ends, or this most is reached, among the next few."""
        return self.unroll if min(most, CHUNK - number % CHUNK) >= self.unroll else 1

    def rows(self) -> Table:
        """The batch that is due. The counter is a tensor of one element: as a number it would have to be read back."""
        place = self.number.remainder(CHUNK)
        return {k: v.index_select(0, place)[0] for k, v in self.table.items()}

    def step(self, rows: int, steps: int) -> None:
        """What is recorded, for so many clients."""
        raise NotImplementedError

    def end(self, phases: Sequence[Train], lengths: Sequence[int]) -> list[Trained]:
        """Copies the results out; losses and sizes are not read back yet."""
        sizes = [torch.linalg.vector_norm(m, torch.inf, 1) for m in self.outcome() if m.shape[1]]
        losses, largest = (self.total / self.lengths).unbind(), torch.stack(sizes).amax(0).unbind()
        return [
            Trained({**phase.weights, **self.own(row)}, losses[row], lengths[row] * phase.epochs, largest[row])
            for row, phase in enumerate(phases)
        ]

    def outcome(self) -> list[Tensor]:
        """What moved, a client in each row."""
        raise NotImplementedError

    def own(self, row: int) -> Weights:
        """A copy of the blocks that moved for one client."""
        raise NotImplementedError


class OnNets(Static):
    """The step of phases that move the base, of several clients side by side, each on a module of its own. Longest
    epochs come first, so that the clients still at work are a prefix, for each length of which there is a recording."""

    def __init__(self, bodies: Bodies, phase: Train, table: Table, recorder: Recorder) -> None:
        super().__init__(phase, table, len(bodies.nets))
        self.bodies, self.recorder = bodies, recorder
        self.numbers = torch.zeros_like(self.lengths)  # of each one's step in its epoch
        self.taken: Counter[int] = Counter()  # steps, by the number of clients at work in them
        self.ripe: set[int] = set()  # numbers of clients for which several steps are taken at once

    def begin(self, phases: Sequence[Train]) -> None:
        super().begin(phases)
        self.bodies.load(phases)

    def plan(self, lengths: Sequence[int]) -> set[tuple[int, int]]:
        self.ripe = {rows for rows in range(1, len(self.bodies.nets) + 1) if self.taken[rows] >= PAYS}
        return super().plan(lengths)

    def epoch(self, table: Table, lengths: Sequence[int]) -> None:
        self.numbers.zero_()
        super().epoch(table, lengths)
        for _, (rows, steps) in self.course(lengths):
            self.taken[rows] += steps

    def due(self, number: int, lengths: Sequence[int]) -> tuple[int, int]:
        """Those still at work; several steps where none of them finishes in between."""
        left = [length - number for length in lengths if length > number]
        return len(left), self.several(number, min(left)) if len(left) in self.ripe else 1

    def step(self, rows: int, steps: int) -> None:
        self.recorder.side_by_side([partial(self.many, row, steps) for row in range(rows)])

    def many(self, row: int, steps: int) -> None:
        for _ in range(steps):
            self.one(row)

    def one(self, row: int) -> None:
        """One client's step: `steps.step` on its row."""
        with recorded():
            loss = loss_of(self.bodies.nets[row], self.like, self.batch(row))
        self.bodies.descend(row, loss.sum())
        self.total[row].add_(loss.detach())
        self.numbers[row].add_(1)

    def batch(self, row: int) -> Batch:
        """The client's batch that is due."""
        place = self.numbers[row : row + 1].remainder(CHUNK)
        batch: Batch = {k: v[:, row].index_select(0, place)[0] for k, v in self.table.items()}
        batch |= {k: v[row] for k, v in self.constants.items()} | {"rng": self.recorder.generator(row)}
        if self.like.inputs is not None:
            batch["inputs"] = self.like.inputs(batch["index"])
        return batch

    def outcome(self) -> list[Tensor]:
        return [self.bodies.matrix, self.bodies.buffers]

    def own(self, row: int) -> Weights:
        return self.bodies.copied(row, self.like.blocks)


class OnFeatures(Static):
    """The step of a stack of adapters and heads. All tensors of a client lie in one row of a matrix, so that pull, clip
    and update are a few kernels; a client that has finished its epoch, or an empty row, stands still by a mask."""

    def __init__(self, net: Net, phase: Train, table: Table, width: int) -> None:
        super().__init__(phase, table, width)
        blocks = [*phase.blocks, *(b for b in TAIL if b not in phase.blocks)]  # those that move come first
        self.shapes = {(b, k): v.shape for b in blocks for k, v in phase.weights[b].items()}
        sizes = [shape.numel() for shape in self.shapes.values()]
        moving = sum(n for (b, _), n in zip(self.shapes, sizes, strict=True) if b in phase.blocks)
        self.flat = self.total.new_zeros(width, sum(sizes))
        self.moved = self.flat[:, :moving]
        tensors: dict[str, Table] = {b: {} for b in blocks}
        for ((b, k), shape), piece in zip(self.shapes.items(), self.flat.split(sizes, 1), strict=True):
            tensors[b][k] = piece.view(width, *shape).detach().requires_grad_(b in phase.blocks)
        self.parameters = [v for b in phase.blocks for v in tensors[b].values()]
        self.tail = Tail(tensors["adapter"], tensors["head"], net.cosine)
        made = MaskedDescent if Descent.fits(self.moved, phase.settings) else MaskedRule
        self.rule = made(phase.settings, self.moved, phase.proximal)

    def due(self, number: int, lengths: Sequence[int]) -> tuple[int, int]:
        """All rows; whoever has finished in between stands still."""
        return len(self.total), self.several(number)

    def begin(self, phases: Sequence[Train]) -> None:
        super().begin(phases)
        for row, phase in enumerate(phases):
            torch.cat([phase.weights[b][k].reshape(-1) for b, k in self.shapes], out=self.flat[row])
        self.rule.reset()

    def step(self, rows: int, steps: int) -> None:
        for _ in range(steps):
            self.one()

    def one(self) -> None:
        active = self.number < self.lengths
        loss = loss_of(self.tail, self.like, self.rows() | self.constants)
        grads = torch.autograd.grad(loss.sum(), self.parameters, materialize_grads=True)
        self.rule.step(torch.cat([g.flatten(1) for g in grads], 1), active)
        self.total.add_(loss.detach().masked_fill(~active, 0.0))
        self.number.add_(1)

    def outcome(self) -> list[Tensor]:
        return [self.moved]

    def own(self, row: int) -> Weights:
        """A copy of the blocks that moved for one client."""
        shapes = {at: shape for at, shape in self.shapes.items() if at[0] in self.like.blocks}
        pieces = self.moved[row].clone().split([shape.numel() for shape in shapes.values()])
        blocks: Weights = {b: {} for b in self.like.blocks}
        for ((b, k), shape), piece in zip(shapes.items(), pieces, strict=True):
            blocks[b][k] = piece.view(shape)
        return blocks


class OnFeaturesByKernels(OnFeatures):
    """The same with the gradient that is written down, by kernels that find the batch in the table by themselves."""

    def __init__(self, net: Net, phase: Train, table: Table, width: int) -> None:
        super().__init__(net, phase, table, width)
        shapes = {name: shape for (_, name), shape in self.shapes.items()}
        self.gradient = torch.zeros_like(self.moved)
        self.slopes = _tails().Slopes(self.flat, shapes, table["y"].shape[-1])

    @staticmethod
    def fits(net: Net, phase: Train) -> bool:
        written = phase.blocks == TAIL and phase.loss is losses.classification
        narrow = net.adapter["down"]
        sizes = net.classes, len(narrow), phase.settings.batch
        if not narrow.is_cuda or any(a > b for a, b in zip(sizes, ROOM, strict=True)) or _tails() is None:
            return False
        new = torch.cuda.get_device_capability(narrow.device) >= (8, 0)  # older ones have too little shared memory
        return written and new and not net.cosine

    def one(self) -> None:
        active, allowed = self.number < self.lengths, self.constants["allowed"]
        self.slopes(self.flat, self.table["u"], self.table["y"], self.number, allowed, self.gradient)
        self.rule.step(self.gradient, active)
        self.slopes.count(self.total, self.number, active)


def _tails() -> Any:
    return found("triton.adapter_head")


def unroll(length: int) -> int:
    """The number of steps to record as one for epochs of this length: one that leaves few over."""
    return min(UNROLL, key=lambda n: length % n)
