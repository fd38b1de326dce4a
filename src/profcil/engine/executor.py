"""Computes the turns of a round in this process.

With `accelerate = "off"` this is the reference: one turn after another, every phase by `steps.run`. Otherwise all turns
advance together, and the phases they ask for are run by the package `accel`. This is the only module that imports it;
without that package everything runs by the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from profcil.engine import steps
from profcil.engine.payload import Reply
from profcil.engine.phases import Train, Trained, Turn
from profcil.model.net import Net

if TYPE_CHECKING:
    from profcil.accel.acceleration import Acceleration

Guard = Callable[[Train, Trained], bool]  # whether a phase's result is usable; may end the run instead
Step = Callable[[], None]


class Executor:
    """Runs a round's turns; used for a whole run."""

    def __init__(self, net: Net, accelerate: str = "auto", workers: int = 1, precision: str = "auto") -> None:
        self.net = net
        net.set_precision(precision)
        self.acceleration = make_acceleration(net, workers) if accelerate == "auto" else None

    def __call__(self, turns: Mapping[int, Turn], guard: Guard) -> dict[int, Reply]:
        """The replies of all turns. A turn with a phase that the guard refuses gives no reply."""
        if self.acceleration is not None:
            return self.advance_together(turns, guard)
        return {c: r for c, turn in turns.items() for r in self.advance_together({c: turn}, guard).values()}

    def advance_together(self, turns: Mapping[int, Turn], guard: Guard) -> dict[int, Reply]:
        """Losses that are still being computed on a GPU are read back once, after the last phase: reading a number
        synchronises the GPU."""
        replies: dict[int, Reply] = {}
        unread: list[tuple[Train, Trained]] = []
        waiting = advance(turns, dict.fromkeys(turns), replies)
        while waiting:
            results = self.run(list(waiting.values()))
            ended = [(p, results[p.client]) for p in waiting.values()]
            late = [(p, r) for p, r in ended if isinstance(r.loss, Tensor)]
            usable = [(p, r) for p, r in ended if not isinstance(r.loss, Tensor) and guard(p, r)]
            unread += late
            try:
                waiting = advance(turns, {p.client: r for p, r in late + usable}, replies)
            except Exception:
                read_back({}, unread, guard)  # a NaN in an unread result may be the cause: then the guard reports it
                raise
        return read_back(replies, unread, guard)

    def run(self, phases: Sequence[Train]) -> dict[int, Trained]:
        """Every phase's result by client."""
        if self.acceleration is not None:
            return self.acceleration.run(phases)
        return {phase.client: steps.run(self.net, phase) for phase in phases}

    def repeated(self, step: Step) -> Step:
        """A server's step that is taken many times, on tensors that stay where they are."""
        return self.acceleration.repeated(step) if self.acceleration is not None else step

    def forget(self) -> None:
        """Frees the memory of recorded steps; the next phases have other steps."""
        if self.acceleration is not None:
            self.acceleration.forget()

    def report(self) -> dict[str, Any]:
        """Which code computed the results, for run.json."""
        facts: dict[str, Any] = {"path": "accelerated" if self.acceleration is not None else "reference"}
        facts |= {"device": self.net.device.type, "precision": "bf16" if self.net.bf16 else "float32"}
        return facts | (self.acceleration.report() if self.acceleration is not None else {})


def make_acceleration(net: Net, workers: int) -> Acceleration | None:
    """The accelerated path; None where the package `accel` is absent."""
    try:
        from profcil.accel.acceleration import Acceleration
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("profcil.accel"):
            raise
        return None
    return Acceleration(net, workers)


def prepare(device: str) -> None:
    """Starts loading or compiling kernels in the background, while the data is read."""
    try:
        from profcil.accel import loader
    except ModuleNotFoundError:
        return
    loader.prepare(device)


def examine_machine() -> dict[str, Any]:
    """What the accelerated path can use on this machine, with the results of its self-checks; empty without `accel`."""
    try:
        from profcil.accel import acceleration
    except ModuleNotFoundError:
        return {}
    return acceleration.examine_machine()


def read_back(replies: Mapping[int, Reply], unread: Sequence[tuple[Train, Trained]], guard: Guard) -> dict[int, Reply]:
    """The replies of the clients whose phases are all usable. Losses and sizes on a device are read back at once; a
    loss in a reply's notes is one of them."""
    asked: list[Any] = [x for _, r in unread for x in (r.loss, r.max_abs)]
    values = dict(zip(map(id, asked), torch.stack(asked).tolist() if asked else (), strict=True))
    known = [(p, replace(r, loss=values[id(r.loss)], max_abs=values[id(r.max_abs)])) for p, r in unread]
    failed = {p.client for p, r in known if not guard(p, r)}

    def number(note: Any) -> float:
        return values[id(note)] if id(note) in values else float(note)

    return {
        c: replace(r, notes={k: number(v) for k, v in r.notes.items()}) for c, r in replies.items() if c not in failed
    }


def advance(turns: Mapping[int, Turn], results: Mapping[int, Trained | None], replies: dict) -> dict[int, Train]:
    """Sends each turn its result. Gives the phases they ask for next; replies of finished turns go into `replies`."""
    asked: dict[int, Train] = {}
    for client, result in results.items():
        try:
            asked[client] = turns[client].send(result)  # type: ignore[arg-type]
        except StopIteration as end:
            replies[client] = end.value
    return asked
