"""Faster versions of batch sources: the epochs of several clients at once, and normal numbers drawn in C."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from profcil.accel.cpu.normal import normal_
from profcil.accel.joined_rehearsal import JoinedRehearsal
from profcil.engine.phases import Source, Train, batch_rows
from profcil.memory.rehearsal import Rehearsal

Table = dict[str, Tensor]


class FastRehearsal(Rehearsal):
    """`Rehearsal` whose noise is drawn in C where the compiled library passed its check."""

    def normal(self, out: Tensor, rng: torch.Generator) -> Tensor:
        return normal_(out, rng)


def faster(source: Source) -> Source:
    """The faster version of a source; the source itself where there is none."""
    if type(source) is not Rehearsal:
        return source
    made = FastRehearsal.__new__(FastRehearsal)
    made.__dict__.update(source.__dict__)
    return made


def with_faster_source(phase: Train) -> Train:
    return replace(phase, source=faster(phase.source))


def epochs(stack: Sequence[Train], rngs: Sequence[torch.Generator]) -> Iterator[tuple[Table, list[int]]]:
    """The epochs of all clients, shuffled and cut: tensors [clients, steps, batch, …], and the steps of each client.
    On a GPU, rehearsals are drawn together."""
    sources = [phase.source for phase in stack]
    batch = stack[0].settings.batch
    rehearsals = [s for s in sources if isinstance(s, Rehearsal)]
    if rngs[0].device.type == "cuda" and len(rehearsals) == len(sources):
        joined = JoinedRehearsal(rehearsals, batch or sources[0].size)
        for _ in range(stack[0].epochs):
            yield joined.epoch(rngs), joined.steps
        return
    for _ in range(stack[0].epochs):
        yield one_by_one(stack, rngs)


def one_by_one(stack: Sequence[Train], rngs: Sequence[torch.Generator]) -> tuple[Table, list[int]]:
    """One epoch, client by client. The longest epoch comes first."""
    table: Table = {}
    steps = []
    for client, (phase, rng) in enumerate(zip(stack, rngs, strict=True)):
        rows = phase.source.epoch(rng)
        index = batch_rows(phase.source, phase.settings.batch, rng)
        steps.append(len(index))
        for k, v in rows.items():
            if client == 0:
                table[k] = v.new_zeros(len(stack), *index.shape, *v.shape[1:])
            into = table[k][client, : len(index)]
            torch.index_select(v, 0, index.flatten(), out=into.flatten(0, 1))
    return table, steps
