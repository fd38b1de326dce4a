"""Turns in this process: all advance in step, and the phases they ask for are run as fast as the machine allows.

Phases that can share a stack are computed together where that pays; on a CPU the remaining ones are spread over
worker threads, each with a model of its own and one core. What a phase computes depends on none of this: the number
of workers never changes a bit, stacking only the rounding. `serial` is the plain reference, client by client.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from queue import SimpleQueue

import torch

from profcil.encoders.model import Net
from profcil.engine import steps
from profcil.engine.payload import Reply
from profcil.engine.phases import Train, Trained, Turn

Guard = Callable[[Train, Trained], bool]  # whether a phase came to usable numbers; may end the run instead
SMALL = 40_000  # parameters per client up to which a stack beats one client after another on a CPU


class Executor:
    """Runs a round's turns; reused over a whole run, so that workers keep their models."""

    def __init__(self, net: Net, mode: str = "auto", workers: int = 1) -> None:
        self.net, self.mode = net, mode
        self.on_cpu = next(net.parameters()).device.type == "cpu"
        self.workers = workers if self.on_cpu and mode != "serial" else 1
        self.nets: SimpleQueue[Net] = SimpleQueue()
        for number in range(self.workers):
            self.nets.put(net if number == 0 else copy.deepcopy(net))

    def __call__(self, turns: Mapping[int, Turn], guard: Guard) -> dict[int, Reply]:
        """The replies of all turns; one whose phase the guard refuses is left without a reply, or ends the run."""
        if self.mode == "serial":
            return {c: r for c, turn in turns.items() for r in self.in_step({c: turn}, guard).values()}
        return self.in_step(turns, guard)

    def in_step(self, turns: Mapping[int, Turn], guard: Guard) -> dict[int, Reply]:
        replies: dict[int, Reply] = {}
        waiting = advance(turns, dict.fromkeys(turns), replies)
        while waiting:
            results = self.run(list(waiting.values()))
            kept = {p.client: results[p.client] for p in waiting.values() if guard(p, results[p.client])}
            waiting = advance(turns, kept, replies)
        return replies

    def run(self, phases: Sequence[Train]) -> dict[int, Trained]:
        """Every phase's result by client."""
        groups: dict[tuple, list[Train]] = {}
        for phase in phases:
            alone = (phase.client,) if not self.stacks(phase) else ()
            groups.setdefault(steps.together(phase) + alone, []).append(phase)
        work = list(groups.values())
        if self.workers == 1 or len(work) == 1:
            done = [steps.run(self.net, group) for group in work]
        else:
            with ThreadPoolExecutor(self.workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
                done = list(pool.map(self.on_a_worker, work))
        return {
            p.client: r for group, results in zip(work, done, strict=True) for p, r in zip(group, results, strict=True)
        }

    def stacks(self, phase: Train) -> bool:
        """Whether this phase may be computed together with those of other clients."""
        if self.mode != "auto":
            return self.mode == "stacked"
        return not self.on_cpu or sum(t.numel() for b in phase.blocks for t in phase.weights[b].values()) <= SMALL

    def on_a_worker(self, group: Sequence[Train]) -> list[Trained]:
        with self.borrowed() as net:
            return steps.run(net, group)

    @contextmanager
    def borrowed(self) -> Iterator[Net]:
        net = self.nets.get()
        try:
            yield net
        finally:
            self.nets.put(net)


def advance(turns: Mapping[int, Turn], results: Mapping[int, Trained | None], replies: dict) -> dict[int, Train]:
    """Hands each turn its result; gives the phases they ask for next, and files the replies of those that ended."""
    asked: dict[int, Train] = {}
    for client, result in results.items():
        try:
            asked[client] = turns[client].send(result)  # type: ignore[arg-type]
        except StopIteration as end:
            replies[client] = end.value
    return asked
