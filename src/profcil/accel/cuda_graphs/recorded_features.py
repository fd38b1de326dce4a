"""Inference over many rows by CUDA graph replay.

On a GPU, launching the kernels of a deep network one by one takes longer than computing a few hundred images.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from profcil.accel.cuda_graphs.recorder import Recorder, Step, recording_failure

PIECES = (512, 128)  # rows of one replay: the largest size that the remaining rows fill
MAX_CACHED = 8  # recordings in the cache

RowFunction = Callable[[Tensor], Tensor]


class RecordedFeatures:
    """Recorded functions of rows, in which no row depends on another. A recording refers to the memory of the weights,
    so a replay uses the weights that the model has at that time."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        # By function and number of rows: the function's key object, input buffer, output buffer, replay.
        self.known: dict[tuple[int, int], tuple[object, Tensor, Tensor, Step]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of the model starts without recordings, because its weights lie elsewhere."""

    def __call__(self, key: object, function: RowFunction, rows: Tensor) -> Tensor:
        """The function's results for all rows. The object `key` identifies the function, which is recorded the first
        time that this object is given."""
        results = []
        for start, end, size in pieces(len(rows)):
            results.append(self.results_of(key, function, rows[start:end], size))
        return torch.cat(results)

    def results_of(self, key: object, function: RowFunction, rows: Tensor, size: int) -> Tensor:
        """The results for at most `size` rows, by one replay."""
        if (id(key), size) not in self.known:
            if len(self.known) == MAX_CACHED:
                self.known.clear()
            inputs = rows.new_zeros(size, *rows.shape[1:])
            outputs, replay = self.record(function, inputs)
            self.known[id(key), size] = key, inputs, outputs, replay
        _, inputs, outputs, replay = self.known[id(key), size]
        inputs[: len(rows)].copy_(rows)
        replay()
        return outputs[: len(rows)].clone()

    def record(self, function: RowFunction, inputs: Tensor) -> tuple[Tensor, Step]:
        """The output buffer of a new recording, and its replay. An eager call first gives the output's shape."""
        eager: list[Tensor] = []
        try:
            self.recorder.run_eagerly(lambda: eager.append(function(inputs)))
            outputs = torch.zeros_like(eager.pop())
            replay = self.recorder.record(lambda: write_results(function, inputs, outputs), 0)
            return outputs, replay
        except Exception as error:  # raised by torch or by a kernel compiler
            raise recording_failure("the model in evaluation mode", error) from error


def write_results(function: RowFunction, inputs: Tensor, outputs: Tensor) -> None:
    outputs.copy_(function(inputs))


def pieces(number: int) -> Iterator[tuple[int, int, int]]:
    """Start, end and size of each replay; the last one may be larger than the rows that are left."""
    start = 0
    while start < number:
        filled = (size for size in PIECES if size <= number - start)
        size = next(filled, PIECES[-1])
        end = min(start + size, number)
        yield start, end, size
        start += size
