"""Features of images by replaying: on a GPU, to start a deep network's kernels one by one takes longer than a few
hundred images take to go through it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from profcil.data.bundle import Rows
from profcil.encoders.model import Net
from profcil.engine.recorders import Do, Recorder
from profcil.errors import Failure

PIECES = (512, 128)  # images that go through at a time, as many as there are left for
LIVE = 8  # recordings kept


class Lookup:
    """u = h(x) in evaluation mode, under whatever weights the model holds when it is asked: the recording refers to
    where they lie."""

    def __init__(self, net: Net, recorder: Recorder) -> None:
        self.net, self.recorder = net, recorder
        self.known: dict[tuple[int, int], tuple[Rows, Tensor, Do]] = {}  # examples, those that are due, the recording
        self.found = torch.zeros(max(PIECES), net.features, device=next(net.parameters()).device)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Of the weights of a copy it knows nothing."""

    def __call__(self, examples: Rows, index: Tensor) -> Tensor:
        return torch.cat([self.piece(examples, index[a:b], size) for a, b, size in pieces(len(index))])

    def piece(self, examples: Rows, index: Tensor, size: int) -> Tensor:
        if (id(examples), size) not in self.known:
            if len(self.known) == LIVE:
                self.known.clear()
            self.known[id(examples), size] = self.recorded(examples, index.new_zeros(size))
        _, due, replay = self.known[id(examples), size]
        due[: len(index)].copy_(index)
        replay()
        return self.found[: len(index)].clone()

    def recorded(self, examples: Rows, due: Tensor) -> tuple[Rows, Tensor, Do]:
        def step() -> None:
            self.found[: len(due)].copy_(self.net.base(*examples.inputs(due)))

        try:
            return examples, due, self.recorder.record(step, 0, step)
        except Exception as error:  # of torch, or of a compiler of kernels
            raise Failure(
                f"the encoder in evaluation mode could not be recorded as a CUDA graph ({error}); "
                f"run with --set graphs=false"
            ) from error


def pieces(number: int) -> Iterator[tuple[int, int, int]]:
    """From where to where, and in how large a piece; the last one is filled up."""
    start = 0
    while start < number:
        size = next((s for s in PIECES if s <= number - start), PIECES[-1])
        yield start, min(start + size, number), size
        start += size
