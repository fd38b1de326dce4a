"""Records a step as a CUDA graph. Without a GPU, a stand-in calls the step again.

Random numbers: views inside a recorded step use the recorder's generators, one for each client, seeded anew for every
phase. A replay starts at the current offset of a generator and advances it by the numbers drawn in the capture, as the
eager kernels do. So a phase draws the same numbers eagerly and replayed.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Protocol

import torch

from profcil.accel.resnet import recorded
from profcil.errors import Failure

WARM = 1  # warm-up steps before a capture, in which libraries choose kernels and allocate workspaces
WIDTH = 10  # most parallel parts of a step

Step = Callable[[], None]


class Recorder(Protocol):
    """Records a step and gives a function that repeats it on the same tensors."""

    def generator(self, row: int) -> torch.Generator:
        """The generator of the client in this row, for draws inside a recorded step."""
        ...

    def record(self, step: Step, rows: int, warm: Step | None = None) -> Step:
        """Records `step` with the generators of the first `rows` clients. `warm`: the warm-up step, if none has run."""
        ...

    def run_eagerly(self, step: Step) -> None:
        """Runs a step eagerly, on the stream of the captures."""
        ...

    def run_parts(self, parts: Sequence[Step]) -> None:
        """Inside a step: runs independent parts, in parallel where possible."""
        ...

    def clear(self) -> None:
        """Frees the memory of all recordings."""
        ...


class GraphRecorder:
    """Captures CUDA graphs.

    All graphs share one memory pool. That is safe because no graph leaves a result in it and no two run at the same
    time. Warm-up and capture share one stream, so that libraries reuse their workspaces. Independent parts of a step
    are captured on separate streams, so that small kernels of different clients run concurrently.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.generators = [torch.Generator(device) for _ in range(WIDTH)]
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(device)
        self.part_streams = [torch.cuda.Stream(device) for _ in range(WIDTH)]

    def generator(self, row: int) -> torch.Generator:
        return self.generators[row]

    def record(self, step: Step, rows: int, warm: Step | None = None) -> Step:
        with torch.cuda.device(self.device):
            if warm is not None:
                for _ in range(WARM):
                    self.run_eagerly(warm)
            graph = torch.cuda.CUDAGraph()
            for row in range(rows):
                graph.register_generator_state(self.generators[row])
            torch.cuda.synchronize()  # `torch.cuda.graph` also collects garbage and frees memory: seconds a run
            with torch.cuda.stream(self.stream), without_gc():
                graph.capture_begin(pool=self.pool)
                try:
                    step()
                except BaseException:
                    with suppress(Exception):  # the first error is the one to report
                        graph.capture_end()
                    raise
                graph.capture_end()
        return graph.replay

    def run_eagerly(self, step: Step) -> None:
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            step()
        torch.cuda.current_stream(self.device).wait_stream(self.stream)
        torch.cuda.empty_cache()  # cached blocks of this stream cannot be used by other streams

    def run_parts(self, parts: Sequence[Step]) -> None:
        if not torch.cuda.is_current_stream_capturing():  # for one eager step, each stream would cache memory
            for part in parts:
                part()
            return
        used = self.part_streams[: len(parts)]
        for stream, part in zip(used, parts, strict=False):
            stream.wait_stream(self.stream)
            with torch.cuda.stream(stream):
                part()
        for stream in used:
            self.stream.wait_stream(stream)

    def clear(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        torch.cuda.empty_cache()


@contextmanager
def without_gc() -> Iterator[None]:
    """Disables garbage collection: destroying an old CUDA graph during a capture could invalidate the capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class RecordedStep:
    """A step that is repeated on tensors that keep their memory. The first call is eager, as warm-up; the second call
    records the step and replays it; later calls replay it."""

    def __init__(self, step: Step, recorder: Recorder) -> None:
        self.step = recorded()(step)
        self.recorder = recorder
        self.warmed_up = False
        self.recording: Step | None = None

    def __call__(self) -> None:
        if not self.warmed_up:
            self.warmed_up = True
            return self.recorder.run_eagerly(self.step)
        if self.recording is None:
            try:
                self.recording = self.recorder.record(self.step, 0)
            except Exception as error:  # raised by torch or by a kernel compiler
                raise recording_failure("a step of the server", error) from error
        self.recording()


def recording_failure(what: str, error: Exception) -> Failure:
    """The error for a step that could not be recorded."""
    return Failure(f"{what} could not be recorded as a CUDA graph ({short(error)}); run with --set accelerate=off")


def short(error: Exception) -> str:
    """The first line of an error message."""
    return str(error).partition("\n")[0]
