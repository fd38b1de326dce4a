"""Turns in this process: all advance in step, and the phases they ask for are run as fast as the machine allows.

Phases that can share a stack are computed together where that pays; on a CPU stacks and what remains are spread over
worker threads, each with a model of its own and one core. What a phase computes depends on none of this: the number
of workers never changes a bit, stacking only the rounding. On a GPU, steps are recorded once and replayed where that
is possible. `serial` is the plain reference, client by client and step by step.
"""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import groupby
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor, nn

from profcil.accel.cpu import stacked_clients
from profcil.accel.cpu.client_batch import Refused
from profcil.accel.graphs.recorder import Capture, Do, Often
from profcil.accel.graphs.runner import Graphs, shares
from profcil.engine import steps
from profcil.engine.payload import Reply
from profcil.engine.phases import Train, Trained, Turn
from profcil.model.net import Net

Guard = Callable[[Train, Trained], bool]  # whether a phase came to usable numbers; may end the run instead
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
FEW = 3  # clients in a stack of bases on a CPU
SHARED = "warmup"  # a phase whose result runs of every executor take from one cache: it must not depend on theirs
SMALL = 40_000  # parameters per client up to which a stack beats one client after another on a CPU


class Executor:
    """Runs a round's turns; reused over a whole run, so that workers keep their models."""

    def __init__(
        self, net: Net, mode: str = "auto", workers: int = 1, *, graphs: bool = True, precision: str = "auto"
    ) -> None:
        self.net, self.mode, device = net, mode, next(net.parameters()).device
        self.on_cpu = device.type == "cpu"
        set_precision(net, precision)
        net.twins = graphs
        if self.on_cpu:
            keep_freed_memory()
        captures = graphs and device.type == "cuda" and mode != "serial"
        self.graphs = Graphs(net, Capture(device)) if captures else None
        net.lookup = self.graphs.lookup if self.graphs is not None else None
        self.workers = workers if self.on_cpu and mode != "serial" else 1
        self.alone: set[Callable] = set()  # losses that turned out to be for one client at a time
        self.nets: SimpleQueue[Net] = SimpleQueue()
        for number in range(self.workers):
            self.nets.put(net if number == 0 else copy.deepcopy(net))

    def often(self, step: Do) -> Do:
        """A step that will be taken many times, on tensors that stay where they are."""
        return Often(step, self.graphs.recorder) if self.graphs is not None else step

    def forget(self) -> None:
        """Drops what was recorded; whatever comes next has steps of its own."""
        if self.graphs is not None:
            self.graphs.forget()

    def __call__(self, turns: Mapping[int, Turn], guard: Guard) -> dict[int, Reply]:
        """The replies of all turns; one whose phase the guard refuses is left without a reply, or ends the run."""
        if self.mode == "serial":
            return {c: r for c, turn in turns.items() for r in self.in_step({c: turn}, guard).values()}
        return self.in_step(turns, guard)

    def in_step(self, turns: Mapping[int, Turn], guard: Guard) -> dict[int, Reply]:
        """What a GPU is still at work on, nobody looks at before all turns are over: it is given the next phases
        meanwhile, and waits for nobody."""
        replies: dict[int, Reply] = {}
        left: list[tuple[Train, Trained]] = []
        waiting = advance(turns, dict.fromkeys(turns), replies)
        while waiting:
            results = self.run(list(waiting.values()))
            ended = [(p, results[p.client]) for p in waiting.values()]
            left += (late := [(p, r) for p, r in ended if isinstance(r.loss, Tensor)])
            usable = [(p, r) for p, r in ended if not isinstance(r.loss, Tensor) and guard(p, r)]
            try:
                waiting = advance(turns, {p.client: r for p, r in late + usable}, replies)
            except Exception:
                settled({}, left, guard)  # numbers that are none may be behind it: then that is what is said
                raise
        return settled(replies, left, guard)

    def run(self, phases: Sequence[Train]) -> dict[int, Trained]:
        """Every phase's result by client."""
        work = self.groups(phases)
        try:
            done = self.all(work)
        except Refused:
            return self.run(phases)
        return {
            p.client: r for group, results in zip(work, done, strict=True) for p, r in zip(group, results, strict=True)
        }

    def all(self, work: Sequence[Sequence[Train]]) -> list[list[Trained]]:
        if self.workers == 1 or len(work) == 1:
            return [self.compute(group) for group in work]
        with ThreadPoolExecutor(self.threads(work), initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return list(pool.map(self.on_a_worker, work))

    def groups(self, phases: Sequence[Train]) -> list[Sequence[Train]]:
        """What is computed together; who is in a group depends on the phases alone, neither on order nor on workers."""
        groups: dict[tuple, list[Train]] = {}
        for phase in phases:
            alone = (phase.client,) if not self.stacks(phase) else ()
            groups.setdefault(steps.together(phase) + alone, []).append(phase)
        return [part for group in groups.values() for part in self.parts(group)]

    def parts(self, group: Sequence[Train]) -> list[Sequence[Train]]:
        """Bases in step, of a few clients at a time: a step's tensors stay in the cache, and a second core has work."""
        if group[0].on_features or self.graphs is not None:
            return [group]
        lengths = groupby(sorted(group, key=lambda p: (p.length, p.client)), lambda p: p.length)
        alike = [list(phases) for _, phases in lengths]
        return [[phases[i] for i in few] for phases in alike for few in shares(range(len(phases)), FEW)]

    def stacks(self, phase: Train) -> bool:
        """Whether this phase may be computed together with those of other clients."""
        if not phase.on_features:
            if self.graphs is not None:
                return self.graphs.takes(phase)
            one_by_one = self.mode == "serial" or phase.name == SHARED or phase.loss in self.alone
            return stacked_clients.carries(self.net) and not one_by_one
        if self.mode != "auto":
            return self.mode == "stacked"
        if self.by_hand([phase]):
            return False  # one by one is faster still
        return not self.on_cpu or sum(t.numel() for b in phase.blocks for t in phase.weights[b].values()) <= SMALL

    def threads(self, work: Sequence[Sequence[Train]]) -> int:
        """One a core; a few more where that leaves no core idle in the end. Clients in excess share the cores, which is
        the system's business, but only phases that need no model of their own can be in excess."""
        if not all(self.by_hand(group) for group in work):
            return self.workers
        left = ((n, len(work) % n) for n in range(self.workers, len(work) + 1))
        return next((n for n, odd in left if not 0 < odd < self.workers), self.workers)

    def by_hand(self, group: Sequence[Train]) -> bool:
        """Whether this is one client's phase on features whose gradient is written down."""
        return len(group) == 1 and group[0].on_features and steps.gradient_of(self.net, group[0]) is not None

    def compute(self, group: Sequence[Train]) -> list[Trained]:
        if self.graphs is not None and self.graphs.takes(group[0]):
            return self.graphs.run(group)
        return self.eagerly(self.net, group)

    def on_a_worker(self, group: Sequence[Train]) -> list[Trained]:
        if self.by_hand(group):
            return steps.run(self.net, group)
        with self.borrowed() as net:
            return self.eagerly(net, group)

    def eagerly(self, net: Net, group: Sequence[Train]) -> list[Trained]:
        """Takes a note of a loss that is for one client at a time; `run` then begins again."""
        try:
            return steps.run(net, group)
        except Refused:
            self.alone.add(group[0].loss)
            raise

    @contextmanager
    def borrowed(self) -> Iterator[Net]:
        net = self.nets.get()
        try:
            yield net
        finally:
            self.nets.put(net)


def keep_freed_memory() -> None:
    """Asks glibc to reuse what a step frees instead of handing it back: every fresh page has to be cleared by the
    system, which can cost more than what is computed in it. Other C libraries have no such knob, and go on as they do.
    """
    with suppress(AttributeError, OSError):
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, 32 << 20)  # the largest that is allowed
        libc.mallopt(M_TRIM_THRESHOLD, 256 << 20)


def set_precision(net: Net, precision: str) -> None:
    """`auto` is bf16 for convolutions of images on a GPU, else float32. Such convolutions want their channels last in
    memory; that is settled before anything is recorded, because it moves the weights."""
    convolves = any(isinstance(m, nn.Conv2d) for m in net.base.modules())
    auto = precision == "auto" and convolves and next(net.parameters()).is_cuda
    net.bf16 = auto or precision == "bf16"  # type: ignore[assignment]
    if net.bf16:
        net.base.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def settled(replies: Mapping[int, Reply], left: Sequence[tuple[Train, Trained]], guard: Guard) -> dict[int, Reply]:
    """The replies of those whose phases have all come to usable numbers. What was left on a device is read back at
    once; a loss in a reply's notes is among it."""
    asked: list[Any] = [x for _, r in left for x in (r.loss, r.size)]
    told = dict(zip(map(id, asked), torch.stack(asked).tolist() if asked else (), strict=True))
    fallen = {p.client for p, r in left if not guard(p, replace(r, loss=told[id(r.loss)], size=told[id(r.size)]))}

    def number(noted: Any) -> float:
        return told[id(noted)] if id(noted) in told else float(noted)

    return {
        c: replace(r, notes={k: number(v) for k, v in r.notes.items()}) for c, r in replies.items() if c not in fallen
    }


def advance(turns: Mapping[int, Turn], results: Mapping[int, Trained | None], replies: dict) -> dict[int, Train]:
    """Hands each turn its result; gives the phases they ask for next, and files the replies of those that ended."""
    asked: dict[int, Train] = {}
    for client, result in results.items():
        try:
            asked[client] = turns[client].send(result)  # type: ignore[arg-type]
        except StopIteration as end:
            replies[client] = end.value
    return asked
