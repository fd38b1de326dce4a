"""Runs the training phases of a round as fast as the machine allows.

Phases of different clients that can share a computation are grouped. On a CPU, groups are spread over worker threads,
each with a model and one core. Neither the order of phases nor the number of workers changes a bit; grouping changes
the rounding only. On a GPU, steps are recorded once as CUDA graphs and replayed.
"""

from __future__ import annotations

import copy
import ctypes
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import groupby
from queue import SimpleQueue
from typing import Any

import torch

from profcil.accel import loader, policy, stacked_heads
from profcil.accel.cpu import adapter_head_epoch, normal, stacked_clients
from profcil.accel.cpu.client_batch import NotBatchable
from profcil.accel.cuda_graphs.recorder import GraphRecorder, RecordedStep, Step
from profcil.accel.cuda_graphs.runner import GraphRunner, equal_groups
from profcil.accel.net import AcceleratedNet, install
from profcil.accel.sources import with_faster_source
from profcil.engine import steps
from profcil.engine.phases import Train, Trained
from profcil.model.net import Net

M_TRIM_THRESHOLD = -1  # of malloc.h
M_MMAP_THRESHOLD = -3
FEW = 3  # clients in a stack of bases on a CPU: a step's tensors stay in the cache, and a second core has work


class Acceleration:
    """Reused over a whole run, so that workers keep their models and a GPU its recordings."""

    def __init__(self, net: Net, workers: int = 1) -> None:
        install(net)
        self.net = net
        self.graphs: GraphRunner | None = None
        self.workers = 1
        if net.device.type == "cuda":
            self.record_on(GraphRunner(net, GraphRecorder(net.device)))
        else:
            keep_freed_memory()
            self.workers = workers
        self.refused: set[Callable] = set()  # losses that turned out to work for one client only
        self.used: Counter[tuple[str, str]] = Counter()  # phases by their name and the way they were run
        self.nets: SimpleQueue[Net] = SimpleQueue()
        for number in range(self.workers):
            self.nets.put(net if number == 0 else copy.deepcopy(net))

    def record_on(self, graphs: GraphRunner) -> None:
        """From here on, steps are recorded and replayed."""
        self.graphs = graphs
        if isinstance(self.net, AcceleratedNet):
            self.net.recorded_features = graphs.recorded_features

    # -- phases -------------------------------------------------------------------------------------------------------

    def run(self, phases: Sequence[Train]) -> dict[int, Trained]:
        """Every phase's result by client."""
        groups = self.groups([with_faster_source(p) for p in phases])
        try:
            results = self.run_groups(groups)
        except NotBatchable:
            return self.run(phases)
        by_client: dict[int, Trained] = {}
        for group, trained in zip(groups, results, strict=True):
            by_client |= {phase.client: t for phase, t in zip(group, trained, strict=True)}
        return by_client

    def groups(self, phases: Sequence[Train]) -> list[Sequence[Train]]:
        """Phases that are computed together. A group depends on the phases alone, neither on order nor on workers."""
        groups: dict[tuple, list[Train]] = {}
        for phase in phases:
            grouped = policy.may_be_grouped(self.net, phase, self.graphs is not None, phase.loss in self.refused)
            key = common_key(phase)
            if not grouped:
                key += (phase.client,)
            groups.setdefault(key, []).append(phase)
        return [part for group in groups.values() for part in self.parts(group)]

    def parts(self, group: Sequence[Train]) -> list[Sequence[Train]]:
        """A group of bases on a CPU in parts of a few clients with equally long epochs."""
        if group[0].on_features or self.graphs is not None:
            return [group]
        ordered = sorted(group, key=lambda p: (p.length, p.client))
        parts: list[Sequence[Train]] = []
        for _, equally_long in groupby(ordered, lambda p: p.length):
            clients = list(equally_long)
            for indices in equal_groups(range(len(clients)), FEW):
                parts.append([clients[i] for i in indices])
        return parts

    def run_groups(self, groups: Sequence[Sequence[Train]]) -> list[list[Trained]]:
        if self.workers == 1 or len(groups) == 1:
            return [self.run_group(self.net, group) for group in groups]
        threads = self.threads(groups)
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return list(pool.map(self.run_on_worker, groups))

    def threads(self, groups: Sequence[Sequence[Train]]) -> int:
        """One thread a core, and a few more where that leaves no core idle in the end. Only phases that need no model
        can use more threads than there are models."""
        if not all(self.needs_no_model(group) for group in groups):
            return self.workers
        for number in range(self.workers, len(groups) + 1):
            in_last_turn = len(groups) % number
            if in_last_turn == 0 or in_last_turn >= self.workers:
                return number
        return self.workers

    def needs_no_model(self, group: Sequence[Train]) -> bool:
        return self.way_of(group) in (policy.HEAD_C, policy.HEAD_SCRIPT)

    def run_on_worker(self, group: Sequence[Train]) -> list[Trained]:
        if self.needs_no_model(group):
            return self.run_group(self.net, group)
        with self.borrowed_net() as net:
            return self.run_group(net, group)

    @contextmanager
    def borrowed_net(self) -> Iterator[Net]:
        net = self.nets.get()
        try:
            yield net
        finally:
            self.nets.put(net)

    def way_of(self, group: Sequence[Train]) -> str:
        return policy.way_of(self.net, group, self.graphs is not None)

    def run_group(self, net: Net, group: Sequence[Train]) -> list[Trained]:
        """Runs a group in the way that the policy names. A loss that refuses several clients is noted; `run` then
        starts again with groups of one."""
        way = self.way_of(group)
        try:
            results = self.run_by(way, net, group)
        except NotBatchable:
            self.refused.add(group[0].loss)
            raise
        self.used[group[0].name, way] += len(group)
        return results

    def run_by(self, way: str, net: Net, group: Sequence[Train]) -> list[Trained]:
        if way == policy.GRAPH:
            assert self.graphs is not None
            return self.graphs.run(group)
        if way in (policy.STACK, policy.STACK_WRITTEN):
            return stacked_clients.run(net, group, analytic=way == policy.STACK_WRITTEN)
        if way in (policy.HEAD_C, policy.HEAD_SCRIPT):
            return [adapter_head_epoch.run(phase, steps.generator_of(net, phase)) for phase in group]
        if way == policy.HEADS:
            return stacked_heads.run(net, group)
        return [steps.run(net, phase) for phase in group]

    # -- servers ------------------------------------------------------------------------------------------------------

    def repeated(self, step: Step) -> Step:
        """A step that is taken many times, on tensors that stay where they are."""
        if self.graphs is None:
            return step
        return RecordedStep(step, self.graphs.recorder)

    def clear_caches(self) -> None:
        """Drops all recordings and frees their memory."""
        if self.graphs is not None:
            self.graphs.clear()

    # -- the record ---------------------------------------------------------------------------------------------------

    def report(self) -> dict[str, Any]:
        """What the numbers of this run were computed with."""
        facts = loader.report(self.net.device)
        if self.net.device.type == "cpu":
            facts["checks"] = self_checks()
        ways: dict[str, dict[str, int]] = {}
        for (phase, way), count in sorted(self.used.items()):
            ways.setdefault(phase, {})[way] = count
        if self.graphs is not None and self.graphs.eager:
            ways["not recorded"] = dict(self.graphs.eager)
        return facts | {"encoder": type(self.net.base).__name__, "phases": ways}


def examine_machine() -> dict[str, Any]:
    """Compiler, Triton and self-checks, for `profcil doctor`."""
    return {
        "compiler": loader.compiler_version(),
        "triton": loader.triton_version(),
        "checks": self_checks(),
    }


def self_checks() -> dict[str, str]:
    """Compiled kernels are compared with plain torch before their first use on a machine."""
    return {"adapter_head.c": adapter_head_epoch.check(), "normal.c": normal.check()}


def common_key(phase: Train) -> tuple:
    """Phases with equal keys can be computed together; full batches must have one shape."""
    size = phase.source.size if not phase.settings.batch else 0
    constants = tuple((k, v.shape) for k, v in phase.constants.items())
    alike = (phase.name, phase.blocks, phase.loss, phase.epochs, phase.proximal, phase.settings)
    return (*alike, tuple(phase.weights), constants, size)


def keep_freed_memory() -> None:
    """Asks glibc to reuse the memory that a step frees instead of returning it: the system has to clear every fresh
    page, which can cost more than the computation. Other C libraries have no such setting."""
    with suppress(AttributeError, OSError):
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, 32 << 20)  # the largest that is allowed
        libc.mallopt(M_TRIM_THRESHOLD, 256 << 20)
