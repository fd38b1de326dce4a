"""Recorders without a GPU. `EagerRecorder` calls a step again. `OperationRecorder` repeats the operations on the same
tensors, and nothing of the Python around them, as a CUDA graph does. This module needs the package accel: tests import
it by `pytest.importorskip`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from profcil.accel.cuda_graphs.recorder import WARM, WIDTH, RecordedStep, Step
from profcil.accel.cuda_graphs.runner import GraphRunner


class EagerRecorder:
    """A stand-in without a GPU: a replay is another call. As with CUDA graphs, the warm-up changes tensors."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.generators = [torch.Generator(device) for _ in range(WIDTH)]

    def generator(self, row: int) -> torch.Generator:
        return self.generators[row]

    def record(self, step: Step, rows: int, warm: Step | None = None) -> Step:
        if warm is not None:
            for _ in range(WARM):
                warm()
        return step

    def run_eagerly(self, step: Step) -> None:
        step()

    def run_parts(self, parts: Sequence[Step]) -> None:
        for part in parts:
            part()

    def clear(self) -> None:
        """Nothing to free."""


class OperationLog(TorchDispatchMode):
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


class OperationRecorder(EagerRecorder):
    """Records the operations of a step. Unlike a capture, recording also executes the step, so the first replay does
    nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.made = 0

    def record(self, step, rows, warm=None):
        self.made += 1
        log, fresh = OperationLog(), [True]
        with log:
            step()

        def replay() -> None:
            if fresh:
                fresh.clear()
            else:
                log.play()

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
