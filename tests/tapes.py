"""A recorder without a GPU that is as literal as a CUDA graph: it repeats operations on the tensors that they were done
on, and nothing of the Python around them. It needs the package accel: tests import it by `pytest.importorskip`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from profcil.accel.graphs.recorder import EagerRecorder, RecordedStep
from profcil.accel.graphs.runner import GraphRunner


class Tape(TorchDispatchMode):
    """What was done while it ran."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[tuple[Callable, Any, Any, Any]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        self.done.append((func, args, kwargs or {}, made))
        return made

    @torch.no_grad()
    def play(self) -> None:
        for func, args, kwargs, made in self.done:
            for old, new in zip(tree_leaves(made), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class Literal(EagerRecorder):
    """Records on a tape. Where a capture only writes down, this does the step as well: so the first replay is over
    before it begins."""

    def __init__(self) -> None:
        super().__init__()
        self.made = 0

    def record(self, step, rows, warm=None):
        self.made += 1
        tape, fresh = Tape(), [True]
        with tape:
            step()

        def replay() -> None:
            if fresh:
                fresh.clear()
            else:
                tape.play()

        return replay


def recording(recorder: EagerRecorder) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """For `Server.repeated`: steps that are recorded by this recorder."""
    return lambda step: RecordedStep(step, recorder)


def replaying(run: Any) -> GraphRunner:
    """From here on, the steps of a run are recorded by calling them again, and replayed, as on a GPU."""
    acceleration = run.world.executor.acceleration
    acceleration.record_on(GraphRunner(run.world.net, EagerRecorder()))
    acceleration.workers = 1
    return acceleration.graphs
