"""How a step is recorded: as a CUDA graph, or, where there is no GPU, by calling it again.

Draws: views inside a recorded step use the recorder's generators, one for each client in a step, seeded anew for every
phase. A replay begins at a generator's present offset and moves it on by what the recording used, which is what the
kernels would have done one by one. So a phase draws the same numbers eagerly and replayed, shuffles included.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Protocol

import torch

from profcil.accel.resnet import recorded
from profcil.errors import Failure

WARM = 1  # steps before a recording, in which libraries choose kernels and allocate what they keep
WIDTH = 10  # parts of a step that may be recorded side by side

Do = Callable[[], None]


class Recorder(Protocol):
    """Makes a function that repeats what another does to the tensors it touches."""

    def generator(self, row: int) -> torch.Generator:
        """The one that a recorded step draws from for the client in this row."""
        ...

    def record(self, step: Do, rows: int, warm: Do | None = None) -> Do:
        """`warm` = a step of the same kind, where none has run yet."""
        ...

    def aside(self, step: Do) -> None:
        """Takes a step as it is written, where recordings are made."""
        ...

    def side_by_side(self, parts: Sequence[Do]) -> None:
        """Within a step: parts that do not depend on each other."""
        ...

    def clear(self) -> None:
        """What was recorded is gone."""
        ...


class Capture:
    """CUDA graphs. They share one pool of memory, which is safe because none leaves a result in it and no two run at
    the same time; warming up and capturing share one stream, so that libraries keep their workspaces. Independent
    parts of a step are captured on streams of their own, so that small kernels of different clients run at once."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.generators = device, [torch.Generator(device) for _ in range(WIDTH)]
        self.pool, self.stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)
        self.sides = [torch.cuda.Stream(device) for _ in range(WIDTH)]

    def generator(self, row: int) -> torch.Generator:
        return self.generators[row]

    def record(self, step: Do, rows: int, warm: Do | None = None) -> Do:
        with torch.cuda.device(self.device):
            for again in [warm] * WARM if warm else ():
                self.aside(again)
            graph = torch.cuda.CUDAGraph()
            for row in range(rows):
                graph.register_generator_state(self.generators[row])
            torch.cuda.synchronize()  # torch.cuda.graph would also collect garbage and return memory: seconds a run
            with torch.cuda.stream(self.stream), uncollected():
                graph.capture_begin(pool=self.pool)
                try:
                    step()
                except BaseException:
                    with suppress(Exception):  # what went wrong first is the reason
                        graph.capture_end()
                    raise
                graph.capture_end()
        return graph.replay

    def aside(self, step: Do) -> None:
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            step()
        torch.cuda.current_stream(self.device).wait_stream(self.stream)
        torch.cuda.empty_cache()  # what that stream keeps is of no use to others

    def side_by_side(self, parts: Sequence[Do]) -> None:
        if not torch.cuda.is_current_stream_capturing():  # each stream would keep memory of its own for this one time
            for part in parts:
                part()
            return
        for side, part in zip(self.sides, parts, strict=False):
            side.wait_stream(self.stream)
            with torch.cuda.stream(side):
                part()
        for side, _ in zip(self.sides, parts, strict=False):
            self.stream.wait_stream(side)

    def clear(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        torch.cuda.empty_cache()


@contextmanager
def uncollected() -> Iterator[None]:
    """Leaves garbage lying: an earlier recording among it, taken away now, could spoil the one that is being made."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


class Repeat:
    """A stand-in without a GPU: replaying is calling again. Like a capture it leaves everything it touches changed."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.generators = [torch.Generator(device) for _ in range(WIDTH)]

    def generator(self, row: int) -> torch.Generator:
        return self.generators[row]

    def record(self, step: Do, rows: int, warm: Do | None = None) -> Do:
        for again in [warm] * WARM if warm else ():
            again()
        return step

    def aside(self, step: Do) -> None:
        step()

    def side_by_side(self, parts: Sequence[Do]) -> None:
        for part in parts:
            part()

    def clear(self) -> None:
        """There is nothing but calls."""


class Often:
    """A step that is taken many times and touches only tensors that stay where they are: the first time as it is
    written, while libraries choose kernels and allocate what they keep; then it is recorded, and replayed."""

    def __init__(self, step: Do, recorder: Recorder) -> None:
        self.step, self.recorder = recorded()(step), recorder
        self.taken = False
        self.replay: Do | None = None

    def __call__(self) -> None:
        if not self.taken:
            self.taken = True
            return self.recorder.aside(self.step)
        if self.replay is None:
            try:
                self.replay = self.recorder.record(self.step, 0)
            except Exception as error:  # of torch, or of a compiler of kernels
                raise refused("a step of the server", error) from error
        self.replay()


def refused(what: str, error: Exception) -> Failure:
    return Failure(f"{what} could not be recorded as a CUDA graph ({short(error)}); run with --set accelerate=off")


def short(error: Exception) -> str:
    """The first line of what torch says."""
    return str(error).partition("\n")[0]
