"""Training steps recorded once as CUDA graphs and replayed for every client.

On a GPU a step is many small kernels, and launching them one by one from Python takes longer than computing them.
`static_steps` says what is recorded, `recorder` says how.
"""

from __future__ import annotations

import gc
import warnings
from collections import Counter, OrderedDict
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from math import ceil
from weakref import WeakValueDictionary

import torch

from profcil.accel import stacked_heads
from profcil.accel.cuda_graphs.client_models import ClientModels, model_key
from profcil.accel.cuda_graphs.recorded_features import RecordedFeatures
from profcil.accel.cuda_graphs.recorder import WIDTH, Recorder, recording_failure, short
from profcil.accel.cuda_graphs.static_steps import BaseStep, FusedHeadStep, HeadStep, StaticStep, Table
from profcil.accel.sources import epochs
from profcil.engine import steps
from profcil.engine.phases import Train, Trained
from profcil.errors import Failure
from profcil.model.net import MODEL, Net

ROWS = 4  # stacks on features are padded to a multiple of this many clients, so that few shapes occur
NARROW = 5  # most clients in a group whose step trains more than the model
MAX_CACHED = 16  # steps in the cache
MOST = 256  # recordings in a run; a method that needs more has shapes that do not occur again


class GraphRunner:
    """The recorded steps of one model, and how phases run on them."""

    def __init__(self, net: Net, recorder: Recorder) -> None:
        self.net = net
        self.recorder = recorder
        self.recorded_features = RecordedFeatures(recorder)
        self.known: OrderedDict[tuple, StaticStep] = OrderedDict()  # cached steps, the most recently used last
        self.models: WeakValueDictionary[tuple, ClientModels] = WeakValueDictionary()  # shared by the cached steps
        self.recordings = 0  # recordings so far
        self.eager: Counter[str] = Counter()  # phases whose step was not recorded, by name
        self.most = WIDTH  # most clients that train their bases in one recorded step

    def width(self, phase: Train) -> int:
        """The most clients in a group of this phase. A step that trains more than the model has several views of each
        image: few clients then use the whole GPU, and more clients would only need more memory."""
        trains_model_only = set(phase.blocks) <= set(MODEL)
        limit = WIDTH if trains_model_only else NARROW
        return min(self.most, limit)

    def run(self, phases: Sequence[Train]) -> list[Trained]:
        """As `steps.run`, by replaying. Losses and largest values stay on the device, so that the host does not
        synchronise. When the GPU runs out of memory, the phases start again in smaller groups."""
        while True:
            width = self.width(phases[0])
            try:
                return self.in_groups(phases)
            except torch.OutOfMemoryError as error:
                if phases[0].on_features or width == 1:
                    raise out_of_memory(phases[0], error) from error
            self.narrow(width)  # outside the handler: the exception refers to tensors that must be freed

    def narrow(self, width: int) -> None:
        """Halves the group size for the rest of the run and frees all recordings."""
        self.most = width // 2
        warnings.warn(f"the GPU's memory is too small for {width} clients at a time: now {self.most}", stacklevel=3)
        self.clear()

    def in_groups(self, phases: Sequence[Train]) -> list[Trained]:
        """Runs the phases group by group, the longest epochs first."""
        order = sorted(range(len(phases)), key=lambda i: (-phases[i].source.size, i))
        groups: list[Sequence[int]] = [order]
        if not phases[0].on_features:
            groups = equal_groups(order, self.width(phases[0]))
        results: dict[int, Trained] = {}
        for group in groups:
            stack = [phases[i] for i in group]
            trained = self.run_group(stack, self.generators(stack))
            results |= zip(group, trained, strict=True)
        return [results[i] for i in range(len(phases))]

    def generators(self, stack: Sequence[Train]) -> list[torch.Generator]:
        """A generator for each phase. Phases on features draw between steps only. Phases that train the base draw views
        inside the recorded step, so they use the recorder's generators."""
        if stack[0].on_features:
            return [steps.generator_of(self.net, p) for p in stack]
        rngs = []
        for row, phase in enumerate(stack):
            rng = self.recorder.generator(row)
            rngs.append(rng.manual_seed(phase.seed))
        return rngs

    def run_group(self, phases: Sequence[Train], rngs: Sequence[torch.Generator]) -> list[Trained]:
        """Runs a group of phases by replaying, or eagerly where the step cannot be recorded."""
        step: StaticStep | None = None
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
        """Runs a group of phases without recordings, and counts them."""
        self.eager[phases[0].name] += len(phases)
        if phases[0].on_features and len(phases) > 1:
            return stacked_heads.run(self.net, phases)
        return [steps.run(self.net, phase) for phase in phases]

    def begin(self, phases: Sequence[Train], table: Table) -> StaticStep | None:
        """The step of these phases, recorded, with the phases copied in; None where it cannot be recorded."""
        p = phases[0]
        if p.on_features:
            rows = ceil(len(phases) / ROWS) * ROWS
            key_rows = rows
        else:
            rows = self.width(p)
            key_rows = 0
        sizes = (shapes(table, 2), shapes(p.constants, 0))
        key = (p.loss, p.inputs, p.blocks, p.proximal, p.settings, *sizes, key_rows)
        step = self.known.get(key)
        if step is None:
            if self.limit_reached() or not regular(p, table):
                return None
            step = self.new_step(p, table, rows)
        needed = step.plan([p.length for p in phases])
        missing = needed - step.recordings.keys()
        for recording in sorted(missing, reverse=True):  # most clients first: one warm-up then serves all
            if self.limit_reached():
                return None
            self.record(step, phases, recording)
        self.known[key] = step
        self.known.move_to_end(key)
        if len(self.known) > MAX_CACHED:
            self.known.popitem(last=False)
        step.begin(phases)
        return step

    def new_step(self, phase: Train, table: Table, rows: int) -> StaticStep:
        """A new step for such phases."""
        if phase.on_features:
            step_class = FusedHeadStep if FusedHeadStep.fits(self.net, phase) else HeadStep
            return step_class(self.net, phase, table, rows)
        key = model_key(phase, rows)
        models = self.models.get(key)
        if models is None:
            models = ClientModels(self.net, phase, rows)
            self.models[key] = models
        return BaseStep(models, phase, table, self.recorder)

    def record(self, step: StaticStep, phases: Sequence[Train], recording: tuple[int, int]) -> None:
        """Records a step for this number of clients and of steps. The warm-up changes weights and generators: the
        caller copies the weights in again, and the generators are restored here."""
        clients, _ = recording
        drawing_clients = 0 if phases[0].on_features else clients
        rngs = [self.recorder.generator(row) for row in range(drawing_clients)]
        states = [rng.get_state() for rng in rngs]
        self.recordings += 1
        step.begin(phases)
        captured = partial(step.step, *recording)
        warm_up = None if step.recordings else partial(step.step, clients, 1)
        try:
            step.recordings[recording] = self.recorder.record(captured, len(rngs), warm_up)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # raised by torch or by a kernel compiler
            raise recording_failure(f"the step of phase '{phases[0].name}'", error) from error
        for rng, state in zip(rngs, states, strict=True):
            rng.set_state(state)

    def clear(self) -> None:
        """Drops all recordings and frees their memory."""
        self.known.clear()
        self.recorded_features.known.clear()
        gc.collect()
        self.recorder.clear()

    def limit_reached(self) -> bool:
        """Whether the limit of recordings is reached."""
        if self.recordings == MOST:
            warnings.warn(f"{MOST} steps were recorded and new shapes still appear; those run eagerly", stacklevel=2)
        return self.recordings >= MOST


def out_of_memory(phase: Train, error: Exception) -> Failure:
    """The error for a step that does not fit into GPU memory even for one client."""
    advice = "free some of it, or set a smaller train.batch"
    return Failure(f"the GPU's memory is too small for the step of phase '{phase.name}' ({short(error)}); {advice}")


def equal_groups(order: Sequence[int], most: int) -> list[Sequence[int]]:
    """Splits into as few groups of at most `most` as possible, contiguous and of nearly equal size."""
    number = ceil(len(order) / most)
    bounds = [len(order) * i // number for i in range(number + 1)]
    return [order[start:end] for start, end in pairwise(bounds)]


def shapes(tensors: Table, skip: int) -> tuple:
    """Names, shapes without the first `skip` axes, and types."""
    return tuple((k, v.shape[skip:], v.dtype) for k, v in tensors.items())


def regular(phase: Train, table: Table) -> bool:
    """Whether the inputs have one row an example. Examples of a graph need their neighbours, so their number of rows
    differs between clients."""
    if phase.inputs is None:
        return True
    index = table["index"][0, 0]
    return all(len(t) == len(index) for t in phase.inputs(index))
