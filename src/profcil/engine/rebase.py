"""Replies that were computed from an older model, re-based to the present one.

A client that was sent a model trains it while the server updates its own. What the client's turn changed is added to
the server's present model, with a weight that falls with the number of updates in between. The re-based blocks look as
if the client had started from the present model, so every method aggregates them as usual.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from profcil.engine.channel import Block, Reply, ServerState
from profcil.model.net import Net

Blocks = Mapping[str, Block]


def staleness_weight(updates: int, exponent: float) -> float:
    """(1 + τ)^-a for a reply that is τ updates old."""
    return float((1 + updates) ** -exponent)


def buffers_of(net: Net, block: str) -> frozenset[str]:
    """The names of a block's buffers, e.g. the running statistics of BatchNorm."""
    return frozenset(name for name, _ in getattr(net, block).named_buffers())


def rebased(
    reply: Reply, start: Blocks, server: ServerState, moving: Collection[str], weight: float, net: Net
) -> Reply:
    """The reply with its model blocks re-based. A block that is frozen now is left out: it stays as it is."""
    blocks = {}
    for name, block in reply.blocks.items():
        if block.kind != "model":
            blocks[name] = block
        elif name in moving:
            present = server.blocks[name].tensors
            tensors = rebased_tensors(block.tensors, start[name].tensors, present, weight, buffers_of(net, name))
            blocks[name] = replace(block, tensors=tensors)
    return replace(reply, blocks=blocks)


def rebased_tensors(
    trained: Mapping[str, Tensor],
    start: Mapping[str, Tensor],
    present: Mapping[str, Tensor],
    weight: float,
    buffers: Collection[str],
) -> dict[str, Tensor]:
    """The present tensors plus the weighted change of each. A buffer is a measurement, such as a variance, and not an
    update: it is blended with the present one, so that it stays in its range."""
    found = {}
    for name, tensor in trained.items():
        if name in buffers:
            found[name] = torch.lerp(present[name], tensor, weight)
        else:
            found[name] = present[name] + weight * (tensor - start[name])
    return found


def completed(replies: Sequence[Reply], server: ServerState) -> list[Reply]:
    """The replies with the same model blocks each. Where some replies have a block and others, from rounds in which it
    was frozen, do not, these get the server's: no change. Otherwise their weight would be missing from the mean."""
    names = {name for reply in replies for name, block in reply.blocks.items() if block.kind == "model"}
    result = []
    for reply in replies:
        missing = sorted(names - reply.blocks.keys()) if reply.samples else []
        unchanged = {name: Block("model", server.blocks[name].tensors) for name in missing}
        result.append(replace(reply, blocks={**reply.blocks, **unchanged}))
    return result
