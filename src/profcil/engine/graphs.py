"""Training steps recorded once and replayed for every client: on a GPU a step is many small kernels, and starting them
one by one from Python takes longer than computing them.

What is recorded refers to memory by its address, so a step works on buffers that never move: the parameters, moments
and anchor; the phase's constants; a table with the next CHUNK batches; and a counter on the device that says which of
them is due. A client's phase is copied in, replayed, and copied out. Nothing recorded depends on a client's number of
examples, and nothing is read back before a phase ends.

Draws: views inside a recorded step use the recorder's one generator, seeded anew for every phase. A replay begins at
the generator's present offset and moves it on by what the recording used, which is what the kernels would have done
one by one. So a phase draws the same numbers eagerly and replayed, shuffles between the epochs included.

A recorded step of several clients whose bases move would be a third kind of `Static`, with a module for each client.
"""

from __future__ import annotations

import inspect
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from profcil.config import TrainSettings
from profcil.encoders.model import TAIL, Net, Tail
from profcil.engine import steps
from profcil.engine.optim import BETA1, BETA2, EPSILON, clip_
from profcil.engine.phases import Batch, Shuffled, Train, Trained
from profcil.errors import Failure

CHUNK = 32  # steps whose batches lie ready on the device
ROWS = 4  # stacks are filled up to a multiple of this many clients, so that few widths occur
WARM = 3  # steps before a recording, in which libraries choose kernels and allocate what they keep
LIVE = 16  # recordings kept at a time
MOST = 256  # recordings made in a run; a method that needs more has shapes that never come back

Do = Callable[[], None]
Table = dict[str, Tensor]


class Recorder(Protocol):
    """Makes a function that repeats what another does to the tensors it touches."""

    generator: torch.Generator  # the only one a recorded step may draw from

    def record(self, step: Do) -> Do: ...


class Capture:
    """CUDA graphs. They share one pool of memory, which is safe because none leaves a result in it and no two run at
    the same time; warming up and capturing share one stream, so that libraries keep their workspaces."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.generator = device, torch.Generator(device)
        self.pool, self.stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)

    def record(self, step: Do) -> Do:
        with torch.cuda.device(self.device):
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                for _ in range(WARM):
                    step()
            torch.cuda.current_stream().wait_stream(self.stream)
            graph = torch.cuda.CUDAGraph()
            graph.register_generator_state(self.generator)
            with torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
                step()
        return graph.replay


class Repeat:
    """A stand-in without a GPU: replaying is calling again. Like a capture it leaves everything it touches changed."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.generator = torch.Generator(device)

    def record(self, step: Do) -> Do:
        for _ in range(WARM):
            step()
        return step


class Static:
    """A step on buffers that never move, for up to `width` clients; subclasses say what it does."""

    replay: Do

    def __init__(self, phase: Train, table: Table, width: int) -> None:
        nothing = Shuffled(torch.empty(0), torch.empty(0))
        self.like = replace(phase, weights={}, source=nothing, constants={})  # what its phases have in common
        self.table = {k: v.new_zeros(CHUNK, width, *v.shape[2:]) for k, v in table.items()}
        self.constants = {k: v.new_zeros(width, *v.shape) for k, v in phase.constants.items()}
        device = next(iter(table.values())).device
        self.number = torch.zeros(1, dtype=torch.long, device=device)  # of the step in its epoch
        self.total = torch.zeros(width, device=device)  # of the epoch's losses

    def begin(self, phases: Sequence[Train]) -> None:
        """Copies the phases in."""
        for row, phase in enumerate(phases):
            for k, v in phase.constants.items():
                self.constants[k][row].copy_(v)

    def epoch(self, table: Table, lengths: Sequence[int]) -> None:
        """Replays an epoch of batches, [clients, steps, batch, …], of which each client has its own number."""
        self.number.zero_()
        self.total.zero_()
        for number in range(max(lengths)):
            if number % CHUNK == 0:
                for k, v in table.items():
                    part = v[:, number : number + CHUNK].transpose(0, 1)
                    self.table[k][: len(part), : part.shape[1]].copy_(part)
            self.replay()

    def rows(self) -> Table:
        """The batch that is due. The counter is a tensor of one element: as a number it would have to be read back."""
        place = self.number.remainder(CHUNK)
        return {k: v.index_select(0, place)[0] for k, v in self.table.items()}

    def step(self) -> None:
        """What is recorded."""
        raise NotImplementedError

    def end(self, phases: Sequence[Train], lengths: Sequence[int]) -> list[Trained]:
        """Copies the results out."""
        raise NotImplementedError


class OnNet(Static):
    """The step of phases that move the base: the eager step itself, on the module's own parameters."""

    def __init__(self, net: Net, phase: Train, table: Table, rng: torch.Generator) -> None:
        super().__init__(phase, table, 1)
        self.net, self.rng = net, rng
        self.parameters, self.pulled = steps.unfreeze(net, phase.blocks)
        self.anchor = [torch.empty_like(p) for p in self.pulled] if phase.proximal else None
        self.optimiser = steps.optimiser_of(phase.settings, self.parameters)

    def begin(self, phases: Sequence[Train]) -> None:
        super().begin(phases)
        self.net.load(phases[0].weights)
        steps.unfreeze(self.net, self.like.blocks)
        if self.anchor is not None:
            torch._foreach_copy_(self.anchor, [p.detach() for p in self.pulled])
        o = self.optimiser
        torch._foreach_zero_([*o.first, *o.second, *o.steps])

    def step(self) -> None:
        batch: Batch = {k: v[0] for k, v in (self.rows() | self.constants).items()} | {"rng": self.rng}
        if self.like.inputs is not None:
            batch["inputs"] = self.like.inputs(batch["index"])
        self.total.add_(steps.step(self.net, self.parameters, self.like, batch, self.optimiser, self.anchor))
        self.number.add_(1)

    def end(self, phases: Sequence[Train], lengths: Sequence[int]) -> list[Trained]:
        weights = {**phases[0].weights, **self.net.weights(self.like.blocks)}
        return [Trained(weights, float(self.total) / lengths[0], lengths[0] * phases[0].epochs)]


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
        self.anchor = torch.zeros_like(self.moved) if phase.proximal else None
        self.rule = MaskedRule(phase.settings, self.moved)
        self.lengths = torch.zeros(width, dtype=torch.long, device=self.total.device)  # steps in each one's epoch

    def begin(self, phases: Sequence[Train]) -> None:
        super().begin(phases)
        for row, phase in enumerate(phases):
            torch.cat([phase.weights[b][k].reshape(-1) for b, k in self.shapes], out=self.flat[row])
        if self.anchor is not None:
            self.anchor.copy_(self.moved)
        self.rule.reset()

    def epoch(self, table: Table, lengths: Sequence[int]) -> None:
        self.lengths.zero_()
        for row, length in enumerate(lengths):
            self.lengths[row].fill_(length)  # a copy from the host would wait for the device
        super().epoch(table, lengths)

    def step(self) -> None:
        active = self.number < self.lengths
        loss = steps.loss_of(self.tail, self.like, self.rows() | self.constants)
        grads = torch.autograd.grad(loss.sum(), self.parameters, materialize_grads=True)
        grad = torch.cat([g.flatten(1) for g in grads], 1)
        if self.anchor is not None:  # ∇ λ‖Θ − Θ^g‖² = 2λ(Θ − Θ^g)
            grad.add_(self.moved - self.anchor, alpha=2 * self.like.proximal)
        clip_([grad], self.like.settings.clip, stacked=True)
        self.rule.step(grad, active)
        self.total.add_(loss.detach().masked_fill(~active, 0.0))
        self.number.add_(1)

    def end(self, phases: Sequence[Train], lengths: Sequence[int]) -> list[Trained]:
        means = (self.total / self.lengths).tolist()
        return [
            Trained({**phase.weights, **self.own(row)}, means[row], lengths[row] * phase.epochs)
            for row, phase in enumerate(phases)
        ]

    def own(self, row: int) -> dict[str, Table]:
        """A copy of the blocks that moved for one client."""
        shapes = {at: shape for at, shape in self.shapes.items() if at[0] in self.like.blocks}
        pieces = self.moved[row].clone().split([shape.numel() for shape in shapes.values()])
        blocks: dict[str, Table] = {b: {} for b in self.like.blocks}
        for ((b, k), shape), piece in zip(shapes.items(), pieces, strict=True):
            blocks[b][k] = piece.view(shape)
        return blocks


class MaskedRule:
    """`optim.Optimiser` for a matrix with a client in each row, of which some stand still. Which, a mask on the device
    says: a number of rows would change shapes. What stands still may hold anything, so nothing is multiplied away."""

    def __init__(self, settings: TrainSettings, matrix: Tensor) -> None:
        self.s, self.p = settings, matrix
        self.first, self.second = torch.zeros_like(matrix), torch.zeros_like(matrix)
        self.times = matrix.new_zeros(len(matrix), 1)
        self.beta1, self.beta2 = matrix.new_tensor(BETA1), matrix.new_tensor(BETA2)

    def reset(self) -> None:
        torch._foreach_zero_([self.first, self.second, self.times])

    @torch.no_grad()
    def step(self, g: Tensor, active: Tensor) -> None:
        """One update of the active rows from this gradient, which is overwritten."""
        (self.adam if self.s.optimiser == "adam" else self.sgd)(g, ~active.unsqueeze(1))

    def sgd(self, g: Tensor, still: Tensor) -> None:
        s, p, m = self.s, self.p, self.first
        g.add_(p, alpha=s.weight_decay)
        m.copy_(torch.where(still, m, (m * s.momentum).add_(g)))
        p.add_(m.masked_fill(still, 0.0), alpha=-s.lr)

    def adam(self, g: Tensor, still: Tensor) -> None:
        s, p, m, v = self.s, self.p, self.first, self.second
        t = self.times.add_(~still).clamp(min=1)
        if s.decay == "coupled":
            g.add_(p, alpha=s.weight_decay)
        else:
            p.copy_(torch.where(still, p, p * (1 - s.lr * s.weight_decay)))
        m.copy_(torch.where(still, m, m.lerp(g, 1 - BETA1)))
        v.copy_(torch.where(still, v, (v * BETA2).addcmul_(g, g, value=1 - BETA2)))
        root = v.sqrt().div_((1 - self.beta2**t).sqrt()).add_(EPSILON)
        p.addcdiv_((m * (-s.lr / (1 - self.beta1**t))).masked_fill(still, 0.0), root)


class Graphs:
    """The recorded steps of one model, and how phases run on them."""

    def __init__(self, net: Net, recorder: Recorder) -> None:
        self.net, self.recorder = net, recorder
        self.known: OrderedDict[tuple, Static] = OrderedDict()  # the one used last comes last
        self.made = 0

    def takes(self, phase: Train) -> bool:
        """Whether a phase's step can come back: not where a batch is all of a client's examples, nor with a loss that
        was made for this phase and may hold tensors of its own."""
        lasting = inspect.ismethod(phase.loss) or (inspect.isfunction(phase.loss) and not phase.loss.__closure__)
        return phase.settings.batch > 0 and lasting

    def run(self, phases: Sequence[Train]) -> list[Trained]:
        """As `steps.run`, by replaying."""
        if not phases[0].on_features:
            return [self.play([p], [self.recorder.generator.manual_seed(p.seed)])[0] for p in phases]
        order = sorted(range(len(phases)), key=lambda i: (-phases[i].source.size, i))
        stack = [phases[i] for i in order]
        done = dict(zip(order, self.play(stack, [steps.generator_of(self.net, p) for p in stack]), strict=True))
        return [done[i] for i in range(len(phases))]

    def play(self, phases: Sequence[Train], rngs: Sequence[torch.Generator]) -> list[Trained]:
        step: Static | None = None
        lengths: list[int] = []
        for _ in range(phases[0].epochs):
            table, lengths = steps.epoch_of(phases, rngs)
            if step is None:
                step = self.begin(phases, table)
            if step is None:
                return steps.run(self.net, phases)
            step.epoch(table, lengths)
        assert step is not None
        return step.end(phases, lengths)

    def begin(self, phases: Sequence[Train], table: Table) -> Static | None:
        """The step of these phases with the phases copied in; None where it cannot be recorded."""
        p, width = phases[0], -(-len(phases) // ROWS) * ROWS if phases[0].on_features else 1
        sizes = shapes(table, 2), shapes(p.constants, 0)
        key = (width, p.loss, p.inputs, p.blocks, p.proximal, p.settings, *sizes)
        if key not in self.known:
            if not regular(p, table) or self.full():
                return None
            self.known[key] = self.recorded(phases, table, width)
            if len(self.known) > LIVE:
                self.known.popitem(last=False)
        self.known.move_to_end(key)
        self.known[key].begin(phases)
        return self.known[key]

    def recorded(self, phases: Sequence[Train], table: Table, width: int) -> Static:
        """Recording takes real steps; the caller copies its phases in again, and here the draws are taken back."""
        rng, state = self.recorder.generator, self.recorder.generator.get_state()
        p, self.made = phases[0], self.made + 1
        step: Static = OnFeatures(self.net, p, table, width) if p.on_features else OnNet(self.net, p, table, rng)
        step.begin(phases)
        try:
            step.replay = self.recorder.record(step.step)
        except RuntimeError as error:
            raise Failure(
                f"the step of phase '{p.name}' could not be recorded as a CUDA graph ({error}); "
                f"run with --set graphs=false"
            ) from error
        rng.set_state(state)
        return step

    def full(self) -> bool:
        if self.made == MOST:
            warnings.warn(f"{MOST} steps were recorded and still new shapes appear; they run eagerly", stacklevel=2)
        return self.made >= MOST


def shapes(tensors: Table, skip: int) -> tuple:
    return tuple((k, v.shape[skip:], v.dtype) for k, v in tensors.items())


def regular(phase: Train, table: Table) -> bool:
    """Whether inputs are one row an example; where examples need their surroundings, the sizes are a client's own."""
    if phase.inputs is None:
        return True
    index = table["index"][0, 0]
    return all(len(t) == len(index) for t in phase.inputs(index))
