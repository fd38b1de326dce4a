"""Minimum support: class rows with few examples behind them are not used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch

from profcil.engine.channel import Block, Reply


def without_rare_classes(replies: Sequence[Reply], least: int) -> list[Reply]:
    """The replies without the class rows that have fewer than `least` examples in all replies together."""
    kept = []
    for reply in replies:
        blocks = {}
        for name, block in reply.blocks.items():
            blocks[name] = with_classes(block, frequent(replies, name, least)) if has_counts(block) else block
        kept.append(replace(reply, blocks=blocks))
    return kept


def has_counts(block: Block) -> bool:
    """Whether a block has a row and a count for each of some classes."""
    return bool(block.labels) and "count" in block.tensors


def frequent(replies: Sequence[Reply], name: str, least: int) -> set[int]:
    """The classes with enough examples in the blocks of this name."""
    total: Counter[int] = Counter()
    for reply in replies:
        if name in reply.blocks:
            block = reply.blocks[name]
            total.update(dict(zip(block.labels, block.tensors["count"].tolist(), strict=True)))
    return {label for label, count in total.items() if count >= least}


def with_classes(block: Block, classes: set[int]) -> Block:
    """The block with the rows of these classes alone."""
    rows = [row for row, label in enumerate(block.labels) if label in classes]
    if len(rows) == len(block.labels):
        return block
    index = torch.tensor(rows, dtype=torch.long, device=block.tensors["count"].device)
    tensors = {key: t[index] if len(t) == len(block.labels) else t for key, t in block.tensors.items()}
    return replace(block, tensors=tensors, labels=tuple(block.labels[row] for row in rows))
