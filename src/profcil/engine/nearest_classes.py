"""Selective broadcast (`channel.nearest = k`): of the memory a client is sent its own classes and the k nearest others.

The server chooses by the means in its memory and by the classes that the client has at this position, which the plan
says; at sites the plan is made from what they declared. The client says nothing more than before. If the memory has
none of the client's classes, k classes are drawn, the same ones for all rounds of the position.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from profcil.randomness import generator

if TYPE_CHECKING:
    from profcil.engine.channel import Block, When

CHOICE = "*choice"  # the key of a client's choice among the versions that it holds; no block has this name
POSITION_STEP = 1 << 40  # larger than any version


@dataclass(frozen=True)
class NearestClasses:
    """Chooses the rows of the memory for each client."""

    count: int
    memories: tuple[str, ...]  # blocks with a row for each class; the first has the means of features
    seed: int
    observed: Callable[[int, int], Collection[int]]  # client and position → the classes that it has there

    def choose(self, client: int, blocks: Mapping[str, Block], when: When) -> frozenset[int]:
        """The classes whose rows a client is sent."""
        memory = blocks[self.memories[0]]
        own = set(self.observed(client, when.position)) & set(memory.labels)
        others = [label for label in memory.labels if label not in own]
        if len(others) <= self.count:
            return frozenset(memory.labels)
        if not own:
            drawn = generator(self.seed, "nearest", client, when.position).permutation(len(others))
            return frozenset(others[i] for i in drawn[: self.count])
        return frozenset(own | nearest_to(own, memory, self.count))

    def key(self, blocks: Mapping[str, Block], when: When) -> int:
        """A number that is another one when a client's choice may be another one."""
        return when.position * POSITION_STEP + blocks[self.memories[0]].version


def nearest_to(own: Collection[int], memory: Block, count: int) -> set[int]:
    """The classes whose means are nearest to any of the own ones. Equal distances are decided by the class id."""
    mean = memory.tensors["mean"].double()
    is_own = torch.tensor([label in own for label in memory.labels], device=mean.device)
    distance = torch.cdist(mean, mean[is_own]).amin(1).masked_fill(is_own, torch.inf)
    order = distance.argsort(stable=True)[:count]
    return {memory.labels[row] for row in order.tolist()}
