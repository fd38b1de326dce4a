"""Training steps on static buffers, which a CUDA graph can record once and replay for every client.

A CUDA graph refers to memory by address. The static buffers are: the parameters, moments and anchor; the phase's
constants; a table with the next CHUNK batches; and a counter on the device, the index of the next batch. A client's
phase is copied in, replayed, and copied out. A recording does not depend on a client's number of examples, and nothing
is read back before a phase ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from profcil.accel.cuda_graphs.client_models import ClientModels
from profcil.accel.cuda_graphs.recorder import Recorder, Step
from profcil.accel.cuda_graphs.updates import FusedMaskedUpdate, FusedUpdate, MaskedUpdate
from profcil.accel.loader import kernel_module
from profcil.accel.resnet import recorded
from profcil.engine.phases import Batch, Shuffled, Train, Trained
from profcil.engine.steps import loss_of
from profcil.model import losses
from profcil.model.net import TAIL, Net, Tail, Weights

UNROLL = (5, 4, 3)  # steps in one recording: parallel clients then wait for each other less often
UNROLL_AFTER = 1000  # steps after which recording several as one pays: a capture takes as long as many steps
KERNEL_LIMITS = 256, 128, 128  # most classes, adapter width and batch size of the gradient kernels
CHUNK = 60  # batches in the table: a multiple of every number in UNROLL

Table = dict[str, Tensor]


class StaticStep:
    """A step on static buffers, for up to `width` clients. Subclasses define the step."""

    def __init__(self, phase: Train, table: Table, width: int) -> None:
        empty_source = Shuffled(torch.empty(0), torch.empty(0))
        self.unroll = unroll(phase.length)
        self.recordings: dict[tuple[int, int], Step] = {}  # recordings, by number of clients and number of steps
        self.template = replace(
            phase, weights={}, source=empty_source, constants={}
        )  # what all its phases have in common
        self.table: Table = {}
        for name, batches in table.items():
            self.table[name] = batches.new_zeros(CHUNK, width, *batches.shape[2:])
        self.constants: Table = {}
        for name, value in phase.constants.items():
            self.constants[name] = value.new_zeros(width, *value.shape)
        device = next(iter(table.values())).device
        self.number = torch.zeros(1, dtype=torch.long, device=device)  # index of the step in its epoch
        self.total = torch.zeros(width, device=device)  # sum of the epoch's losses
        self.lengths = torch.zeros(width, dtype=torch.long, device=device)  # steps in each client's epoch

    def begin(self, phases: Sequence[Train]) -> None:
        """Copies the phases into the static buffers."""
        self.lengths.zero_()
        for row, phase in enumerate(phases):
            self.lengths[row].fill_(phase.length)  # a copy from the host would synchronise
            for name, value in phase.constants.items():
                self.constants[name][row].copy_(value)

    def epoch(self, table: Table, lengths: Sequence[int]) -> None:
        """Replays an epoch of batches, [clients, steps, batch, …]. `lengths`: the steps of each client."""
        self.number.zero_()
        self.total.zero_()
        for number, recording in self.recording_sequence(lengths):
            if number % CHUNK == 0:
                self.fill_table(table, number)
            self.recordings[recording]()

    def fill_table(self, table: Table, number: int) -> None:
        """Copies the CHUNK batches from this step on into the static table."""
        for name, batches in table.items():
            part = batches[:, number : number + CHUNK].transpose(0, 1)
            steps, clients = part.shape[:2]
            self.table[name][:steps, :clients].copy_(part)

    def plan(self, lengths: Sequence[int]) -> set[tuple[int, int]]:
        """The recordings that a phase with epochs of these lengths needs, chosen before the phase begins."""
        return {recording for _, recording in self.recording_sequence(lengths)}

    def recording_sequence(self, lengths: Sequence[int]) -> Iterator[tuple[int, tuple[int, int]]]:
        """The replays of an epoch: the index of the first step, and the recording's numbers of clients and steps."""
        number = 0
        while number < max(lengths):
            rows, steps = self.next_recording(number, lengths)
            yield number, (rows, steps)
            number += steps

    def next_recording(self, number: int, lengths: Sequence[int]) -> tuple[int, int]:
        """The recording for the step with this index: numbers of clients and of steps."""
        raise NotImplementedError

    def steps_at_once(self, number: int, most: int = CHUNK) -> int:
        """Steps of the next replay: `unroll`, or 1 where the table or the limit `most` ends before."""
        left_in_table = CHUNK - number % CHUNK
        return self.unroll if min(most, left_in_table) >= self.unroll else 1

    def next_batch(self) -> Table:
        """The next batch. The counter stays a tensor, because reading its value would synchronise."""
        place = self.number.remainder(CHUNK)
        return {name: batches.index_select(0, place)[0] for name, batches in self.table.items()}

    def step(self, rows: int, steps: int) -> None:
        """The computation that is recorded: `steps` steps of the first `rows` clients."""
        raise NotImplementedError

    def end(self, phases: Sequence[Train], lengths: Sequence[int]) -> list[Trained]:
        """Copies the results out. Losses and largest absolute values stay on the device."""
        norms = [torch.linalg.vector_norm(m, torch.inf, 1) for m in self.trained_tensors() if m.shape[1]]
        losses = (self.total / self.lengths).unbind()
        largest = torch.stack(norms).amax(0).unbind()
        results = []
        for row, phase in enumerate(phases):
            weights = {**phase.weights, **self.copied_blocks(row)}
            steps = lengths[row] * phase.epochs
            results.append(Trained(weights, losses[row], steps, largest[row]))
        return results

    def trained_tensors(self) -> list[Tensor]:
        """The trained tensors, one client in each row."""
        raise NotImplementedError

    def copied_blocks(self, row: int) -> Weights:
        """A copy of one client's trained blocks."""
        raise NotImplementedError


class BaseStep(StaticStep):
    """The step of phases that train the base: several clients in parallel, each on its own module.

    The longest epochs come first, so that the active clients are the first rows. There is a recording for each number
    of active clients.
    """

    def __init__(self, models: ClientModels, phase: Train, table: Table, recorder: Recorder) -> None:
        super().__init__(phase, table, len(models.nets))
        self.models = models
        self.recorder = recorder
        self.numbers = torch.zeros_like(self.lengths)  # index of each client's step in its epoch
        self.steps_taken: Counter[int] = Counter()  # steps so far, by number of active clients
        self.unrolled: set[int] = set()  # numbers of active clients for which several steps are recorded as one

    def begin(self, phases: Sequence[Train]) -> None:
        super().begin(phases)
        self.models.load(phases)

    def plan(self, lengths: Sequence[int]) -> set[tuple[int, int]]:
        counts = range(1, len(self.models.nets) + 1)
        self.unrolled = {rows for rows in counts if self.steps_taken[rows] >= UNROLL_AFTER}
        return super().plan(lengths)

    def epoch(self, table: Table, lengths: Sequence[int]) -> None:
        self.numbers.zero_()
        super().epoch(table, lengths)
        for _, (rows, steps) in self.recording_sequence(lengths):
            self.steps_taken[rows] += steps

    def next_recording(self, number: int, lengths: Sequence[int]) -> tuple[int, int]:
        """The active clients; several steps where none of them finishes in between."""
        steps_left = [length - number for length in lengths if length > number]
        active = len(steps_left)
        if active not in self.unrolled:
            return active, 1
        return active, self.steps_at_once(number, min(steps_left))

    def step(self, rows: int, steps: int) -> None:
        parts = [partial(self.client_steps, row, steps) for row in range(rows)]
        self.recorder.run_parts(parts)

    def client_steps(self, row: int, steps: int) -> None:
        """Several steps of one client."""
        for _ in range(steps):
            self.single_step(row)

    def single_step(self, row: int) -> None:
        """One step of one client, as `steps.step`."""
        with recorded():
            loss = loss_of(self.models.nets[row], self.template, self.batch(row))
        self.models.update(row, loss.sum())
        self.total[row].add_(loss.detach())
        self.numbers[row].add_(1)

    def batch(self, row: int) -> Batch:
        """The client's next batch."""
        place = self.numbers[row : row + 1].remainder(CHUNK)
        batch: Batch = {}
        for name, batches in self.table.items():
            batch[name] = batches[:, row].index_select(0, place)[0]
        for name, value in self.constants.items():
            batch[name] = value[row]
        batch["rng"] = self.recorder.generator(row)
        if self.template.inputs is not None:
            batch["inputs"] = self.template.inputs(batch["index"])
        return batch

    def trained_tensors(self) -> list[Tensor]:
        return [self.models.matrix, self.models.buffers]

    def copied_blocks(self, row: int) -> Weights:
        return self.models.copied(row, self.template.blocks)


class HeadStep(StaticStep):
    """The step of a stack of adapters and heads.

    All tensors of a client lie in one row of a matrix, so that proximal term, clipping and update are a few kernels. A
    mask excludes empty rows and clients that have finished their epoch.
    """

    def __init__(self, net: Net, phase: Train, table: Table, width: int) -> None:
        super().__init__(phase, table, width)
        frozen = [b for b in TAIL if b not in phase.blocks]
        blocks = [*phase.blocks, *frozen]  # trained blocks first
        self.shapes = {(b, k): v.shape for b in blocks for k, v in phase.weights[b].items()}
        sizes = [shape.numel() for shape in self.shapes.values()]
        trained_size = sum(shape.numel() for (b, _), shape in self.shapes.items() if b in phase.blocks)
        self.flat = self.total.new_zeros(width, sum(sizes))
        self.trained = self.flat[:, :trained_size]
        tensors: dict[str, Table] = {b: {} for b in blocks}
        pieces = self.flat.split(sizes, 1)
        for ((b, k), shape), piece in zip(self.shapes.items(), pieces, strict=True):
            view = piece.view(width, *shape).detach()
            tensors[b][k] = view.requires_grad_(b in phase.blocks)
        self.parameters = [v for b in phase.blocks for v in tensors[b].values()]
        self.tail = Tail(tensors["adapter"], tensors["head"], net.cosine)
        rule_class = FusedMaskedUpdate if FusedUpdate.fits(self.trained, phase.settings) else MaskedUpdate
        self.rule = rule_class(phase.settings, self.trained, phase.proximal)

    def next_recording(self, number: int, lengths: Sequence[int]) -> tuple[int, int]:
        """All rows; a client that finishes in between becomes inactive."""
        return len(self.total), self.steps_at_once(number)

    def begin(self, phases: Sequence[Train]) -> None:
        super().begin(phases)
        for row, phase in enumerate(phases):
            pieces = [phase.weights[b][k].reshape(-1) for b, k in self.shapes]
            torch.cat(pieces, out=self.flat[row])
        self.rule.reset()

    def step(self, rows: int, steps: int) -> None:
        for _ in range(steps):
            self.single_step()

    def single_step(self) -> None:
        """One step of all active clients."""
        active = self.number < self.lengths
        batch = self.next_batch() | self.constants
        loss = loss_of(self.tail, self.template, batch)
        grads = torch.autograd.grad(loss.sum(), self.parameters, materialize_grads=True)
        gradient = torch.cat([g.flatten(1) for g in grads], 1)
        self.rule.step(gradient, active)
        self.total.add_(loss.detach().masked_fill(~active, 0.0))
        self.number.add_(1)

    def trained_tensors(self) -> list[Tensor]:
        return [self.trained]

    def copied_blocks(self, row: int) -> Weights:
        """A copy of one client's trained blocks."""
        shapes = {(b, k): shape for (b, k), shape in self.shapes.items() if b in self.template.blocks}
        sizes = [shape.numel() for shape in shapes.values()]
        pieces = self.trained[row].clone().split(sizes)
        blocks: Weights = {b: {} for b in self.template.blocks}
        for ((b, k), shape), piece in zip(shapes.items(), pieces, strict=True):
            blocks[b][k] = piece.view(shape)
        return blocks


class FusedHeadStep(HeadStep):
    """`HeadStep` with the analytic gradient in Triton kernels, which read the batch from the table themselves."""

    def __init__(self, net: Net, phase: Train, table: Table, width: int) -> None:
        super().__init__(net, phase, table, width)
        shapes = {name: shape for (_, name), shape in self.shapes.items()}
        batch = table["y"].shape[-1]
        self.gradient = torch.zeros_like(self.trained)
        self.gradient_kernels = _head_kernels().HeadGradient(self.flat, shapes, batch)

    @staticmethod
    def fits(net: Net, phase: Train) -> bool:
        """Whether the kernels support this model, phase and GPU."""
        down = net.adapter["down"]
        if net.cosine or phase.blocks != TAIL or phase.loss is not losses.classification:
            return False
        sizes = (net.classes, len(down), phase.settings.batch)
        for size, limit in zip(sizes, KERNEL_LIMITS, strict=True):
            if size > limit:
                return False
        if not down.is_cuda or _head_kernels() is None:
            return False
        return torch.cuda.get_device_capability(down.device) >= (8, 0)  # older: too little shared memory

    def single_step(self) -> None:
        """One step of all active clients."""
        active = self.number < self.lengths
        allowed = self.constants["allowed"]
        self.gradient_kernels(self.flat, self.table["u"], self.table["y"], self.number, allowed, self.gradient)
        self.rule.step(self.gradient, active)
        self.gradient_kernels.count(self.total, self.number, active)


def _head_kernels() -> Any:
    return kernel_module("triton.adapter_head")


def unroll(length: int) -> int:
    """The number of steps to record as one for epochs of this length: the one with the smallest remainder."""
    return min(UNROLL, key=lambda n: length % n)
