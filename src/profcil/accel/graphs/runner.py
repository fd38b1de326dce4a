"""Training steps recorded once and replayed for every client: on a GPU a step is many small kernels, and starting them
one by one from Python takes longer than computing them. See `static` for what is recorded and `recorders` for how.
"""

from __future__ import annotations

import gc
import warnings
from collections import Counter, OrderedDict
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from weakref import WeakValueDictionary

import torch

from profcil.accel import stacked_heads
from profcil.accel.graphs.client_models import Bodies, kind
from profcil.accel.graphs.feature_replay import Lookup
from profcil.accel.graphs.recorder import WIDTH, Recorder, refused, short
from profcil.accel.graphs.static_steps import OnFeatures, OnFeaturesByKernels, OnNets, Static, Table
from profcil.accel.sources import epochs
from profcil.engine import steps
from profcil.engine.phases import Train, Trained
from profcil.errors import Failure
from profcil.model.net import MODEL, Net

ROWS = 4  # stacks on features are filled up to a multiple of this many clients, so that few widths occur
NARROW = 5  # clients in a group whose step trains more than the model
LIVE = 16  # steps kept at a time
MOST = 256  # recordings made in a run; a method that needs more has shapes that never come back


class Graphs:
    """The recorded steps of one model, and how phases run on them."""

    def __init__(self, net: Net, recorder: Recorder) -> None:
        self.net, self.recorder, self.lookup = net, recorder, Lookup(recorder)
        self.known: OrderedDict[tuple, Static] = OrderedDict()  # the one used last comes last
        self.bodies: WeakValueDictionary[tuple, Bodies] = WeakValueDictionary()  # those of the steps that are known
        self.made = 0
        self.eager: Counter[str] = Counter()  # phases whose step could not be recorded, by name
        self.most = WIDTH  # clients whose bases move in one recorded step

    def width(self, phase: Train) -> int:
        """How many of these. A step that trains more than the model has several views of each image: a few clients
        fill a GPU with those, and more of them would only take memory."""
        return min(self.most, WIDTH if set(phase.blocks) <= set(MODEL) else NARROW)

    def run(self, phases: Sequence[Train]) -> list[Trained]:
        """As `steps.run`, by replaying; losses and sizes are left on the device, which may be far behind. Where it has
        no room for so many clients at a time, they begin again in smaller groups."""
        while True:
            now = self.width(phases[0])
            try:
                return self.in_groups(phases)
            except torch.OutOfMemoryError as error:
                if phases[0].on_features or now == 1:
                    raise no_room(phases[0], error) from error
            self.narrow(now)  # after the exception, which holds what was under way

    def narrow(self, width: int) -> None:
        """Half as many clients at a time from here on; what was recorded goes, for its memory."""
        self.most = width // 2
        warnings.warn(f"the GPU's memory has no room for {width} clients at a time: now {self.most}", stacklevel=3)
        self.forget()

    def in_groups(self, phases: Sequence[Train]) -> list[Trained]:
        order = sorted(range(len(phases)), key=lambda i: (-phases[i].source.size, i))
        done: dict[int, Trained] = {}
        for group in [order] if phases[0].on_features else shares(order, self.width(phases[0])):
            stack = [phases[i] for i in group]
            done |= zip(group, self.play(stack, self.generators(stack)), strict=True)
        return [done[i] for i in range(len(phases))]

    def generators(self, stack: Sequence[Train]) -> list[torch.Generator]:
        """A stack of features draws between steps only; what moves the base draws views inside the recorded step."""
        if stack[0].on_features:
            return [steps.generator_of(self.net, p) for p in stack]
        return [self.recorder.generator(row).manual_seed(p.seed) for row, p in enumerate(stack)]

    def play(self, phases: Sequence[Train], rngs: Sequence[torch.Generator]) -> list[Trained]:
        """A group; eagerly where its step cannot be recorded."""
        step: Static | None = None
        lengths: list[int] = []
        for table, lengths in epochs(phases, rngs):
            if step is None:
                step = self.begin(phases, table)
            if step is None:
                return self.run_eagerly(phases)
            step.epoch(table, lengths)
        assert step is not None
        return step.end(phases, lengths)

    def run_eagerly(self, phases: Sequence[Train]) -> list[Trained]:
        self.eager[phases[0].name] += len(phases)
        if phases[0].on_features and len(phases) > 1:
            return stacked_heads.run(self.net, phases)
        return [steps.run(self.net, phase) for phase in phases]

    def begin(self, phases: Sequence[Train], table: Table) -> Static | None:
        """The step of these phases with the phases copied in; None where it cannot be recorded."""
        p = phases[0]
        rows = -(-len(phases) // ROWS) * ROWS if p.on_features else self.width(p)
        sizes = shapes(table, 2), shapes(p.constants, 0)
        key = (p.loss, p.inputs, p.blocks, p.proximal, p.settings, *sizes, rows if p.on_features else 0)
        step = self.known.get(key)
        if step is None:
            if self.full() or not regular(p, table):
                return None
            step = self.made_for(p, table, rows)
        missing = step.plan([p.length for p in phases]) - step.replays.keys()
        for recording in sorted(missing, reverse=True):  # with most clients first: it warms up for the others
            if self.full():
                return None
            self.record(step, phases, recording)
        self.known[key] = step
        self.known.move_to_end(key)
        if len(self.known) > LIVE:
            self.known.popitem(last=False)
        step.begin(phases)
        return step

    def made_for(self, phase: Train, table: Table, rows: int) -> Static:
        if phase.on_features:
            by_kernels = OnFeaturesByKernels.fits(self.net, phase)
            return (OnFeaturesByKernels if by_kernels else OnFeatures)(self.net, phase, table, rows)
        bodies = self.bodies.get(kind(phase, rows)) or Bodies(self.net, phase, rows)
        self.bodies[kind(phase, rows)] = bodies
        return OnNets(bodies, phase, table, self.recorder)

    def record(self, step: Static, phases: Sequence[Train], recording: tuple[int, int]) -> None:
        """Recording takes real steps; the caller copies its phases in again, and here the draws are taken back."""
        rngs = [self.recorder.generator(row) for row in range(0 if phases[0].on_features else recording[0])]
        states, self.made = [rng.get_state() for rng in rngs], self.made + 1
        step.begin(phases)
        again, once = partial(step.step, *recording), partial(step.step, recording[0], 1)
        try:
            step.replays[recording] = self.recorder.record(again, len(rngs), None if step.replays else once)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of torch, or of a compiler of kernels
            raise refused(f"the step of phase '{phases[0].name}'", error) from error
        for rng, state in zip(rngs, states, strict=True):
            rng.set_state(state)

    def forget(self) -> None:
        """Where nothing that was recorded will come back: the memory that it works on is returned."""
        self.known.clear()
        self.lookup.known.clear()
        gc.collect()
        self.recorder.clear()

    def full(self) -> bool:
        if self.made == MOST:
            warnings.warn(f"{MOST} steps were recorded and still new shapes appear; they run eagerly", stacklevel=2)
        return self.made >= MOST


def no_room(phase: Train, error: Exception) -> Failure:
    advice = "free some of it, or set a smaller train.batch"
    return Failure(f"the GPU's memory has no room for the step of phase '{phase.name}' ({short(error)}); {advice}")


def shares(order: Sequence[int], most: int) -> list[Sequence[int]]:
    """As few groups of at most so many as possible, of nearly equal size, neighbours together."""
    number = -(-len(order) // most)
    cuts = [len(order) * i // number for i in range(number + 1)]
    return [order[a:b] for a, b in pairwise(cuts)]


def shapes(tensors: Table, skip: int) -> tuple:
    return tuple((k, v.shape[skip:], v.dtype) for k, v in tensors.items())


def regular(phase: Train, table: Table) -> bool:
    """Whether inputs are one row an example; where examples need their surroundings, the sizes are a client's own."""
    if phase.inputs is None:
        return True
    index = table["index"][0, 0]
    return all(len(t) == len(index) for t in phase.inputs(index))
