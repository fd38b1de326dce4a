"""Shifts of remembered means that are incomplete or late: what PRO-MAX makes of them before it applies them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from profcil.engine.channel import Block, Reply
from profcil.memory.bank import index_on


def with_all_rows(block: Block, labels: tuple[int, ...]) -> Block:
    """A block of shifts with a row for each of these classes: zero, with no confidence, for a class that the client was
    not sent."""
    row_of = {label: row for row, label in enumerate(labels)}
    index = index_on(block.tensors["shift"].device, [row_of[label] for label in block.labels])
    tensors = {}
    for name, rows in block.tensors.items():
        zeros = rows.new_zeros(len(labels), *rows.shape[1:])
        tensors[name] = zeros.index_copy(0, index, rows)
    return replace(block, tensors=tensors, labels=labels)


def scaled_shifts(reply: Reply, weight: float) -> Reply:
    """A reply with a part of its shifts."""
    blocks = {}
    for name, block in reply.blocks.items():
        if block.kind == "transport":
            shift = weight * block.tensors["shift"]
            block = replace(block, tensors={**block.tensors, "shift": shift})
        blocks[name] = block
    return replace(reply, blocks=blocks)


def without_shifts(reply: Reply) -> Reply:
    """A reply without its shifts."""
    blocks = {name: block for name, block in reply.blocks.items() if block.kind != "transport"}
    return replace(reply, blocks=blocks)


def with_known_shifts(near: Tensor, labels: Sequence[int], move: Block) -> Tensor:
    """Shifts of classes, where those that the move has a row for get its shift."""
    row_of = {label: row for row, label in enumerate(move.labels)}
    shift = near.clone()
    for row, label in enumerate(labels):
        if label in row_of:
            shift[row] = move.tensors["shift"][row_of[label]]
    return shift
