"""What a model says of many examples, by replaying: on a GPU, to start a deep network's kernels one by one takes longer
than a few hundred images take to go through it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from profcil.accel.graphs.recorder import Do, Recorder, refused

PIECES = (512, 128)  # rows that go through at a time, as many as there are left for
LIVE = 8  # recordings kept

Answers = Callable[[Tensor], Tensor]


class Lookup:
    """Functions of rows, each row for itself, under whatever weights the model holds when they are asked: a recording
    refers to where these lie."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.known: dict[tuple[int, int], tuple[object, Tensor, Tensor, Do]] = {}  # whose; rows that are due; answers

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Of the weights of a copy it knows nothing."""

    def __call__(self, whose: object, function: Answers, rows: Tensor) -> Tensor:
        """The function's answers to all rows. It is recorded the first time that `whose` is given, which stands for
        it from then on."""
        return torch.cat([self.piece(whose, function, rows[a:b], size) for a, b, size in pieces(len(rows))])

    def piece(self, whose: object, function: Answers, rows: Tensor, size: int) -> Tensor:
        if (id(whose), size) not in self.known:
            if len(self.known) == LIVE:
                self.known.clear()
            due = rows.new_zeros(size, *rows.shape[1:])
            self.known[id(whose), size] = whose, due, *self.recorded(function, due)
        _, due, found, replay = self.known[id(whose), size]
        due[: len(rows)].copy_(rows)
        replay()
        return found[: len(rows)].clone()

    def recorded(self, function: Answers, due: Tensor) -> tuple[Tensor, Do]:
        shown: list[Tensor] = []
        try:
            self.recorder.aside(lambda: shown.append(function(due)))
            found = torch.zeros_like(shown.pop())
            return found, self.recorder.record(lambda: answer(function, due, found), 0)
        except Exception as error:  # of torch, or of a compiler of kernels
            raise refused("the model in evaluation mode", error) from error


def answer(function: Answers, due: Tensor, found: Tensor) -> None:
    found.copy_(function(due))


def pieces(number: int) -> Iterator[tuple[int, int, int]]:
    """From where to where, and in how large a piece; the last one is filled up."""
    start = 0
    while start < number:
        size = next((s for s in PIECES if s <= number - start), PIECES[-1])
        yield start, min(start + size, number), size
        start += size
