"""Minimum support over the clients of a secure sum: before their statistics are added, their counts are.

Clients send how many examples of each class of the position they have, by a secure sum of its own. The server tells
them which classes have too few in all; they leave these out of everything that they add. So a class with one example at
each of many clients is used, and one with a single example in all of them is in no sum. With noise nothing is counted
before: the noised counts say it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from profcil.engine.channel import Block, Channel, Inbox, Reply, When
from profcil.engine.summed_replies import Additive, SumLayout, layout_of, sum_replies

if TYPE_CHECKING:
    from profcil.engine.world import World

NAME = "support"


class Counts:
    """Examples of each class."""

    def parts(self, block: Block, samples: int, classes: Sequence[int]) -> dict[str, Tensor]:
        found = torch.zeros(len(classes), dtype=torch.float64)
        for label, count in zip(block.labels, block.tensors["count"].tolist(), strict=True):
            found[classes.index(label)] = count
        return {"count": found}

    def block(self, sums: Mapping[str, Tensor], like: Block, samples: float, classes: Sequence[int]) -> Block:
        return replace(like, tensors={"count": sums["count"].round().long()}, labels=tuple(classes))


class SupportCount:
    """The counting as a survey of a method. It needs nothing of the server."""

    additive: ClassVar[Additive] = {NAME: Counts()}

    def survey(self, client: Any, inbox: Inbox) -> Reply:
        return count_reply(client.id, client.y_list)


def rare_classes(world: World, channel: Channel, clients: Sequence[int], when: When) -> frozenset[int]:
    """The classes of the position with too few examples at these clients together, by a secure sum in this process."""
    classes = world.current_classes(when)
    replies = {c: count_reply(c, world.client(c, when).y_list) for c in clients}
    expected = count_reply(clients[0], classes)
    addends = (SupportCount.additive, classes, world.config.privacy, world.config.seed)
    return rare_in(world, sum_replies(replies, expected, *addends, channel, when), when)


def rare_in(world: World, sums: Sequence[Reply], when: When) -> frozenset[int]:
    """The classes of the position with too few examples in a sum of counts; all of them without a sum."""
    classes = world.current_classes(when)
    if not sums:
        return frozenset(classes)
    counts = sums[0].blocks[NAME].tensors["count"].tolist()
    least = world.config.privacy.min_support
    return frozenset(label for label, count in zip(classes, counts, strict=True) if count < least)


def layout_of_counts(world: World, when: When) -> SumLayout:
    """The arrays of a sum of counts."""
    classes = world.current_classes(when)
    return layout_of(count_reply(0, classes), SupportCount.additive, classes)


def count_reply(client: int, labels: Sequence[int]) -> Reply:
    """How many examples of each class a client has."""
    counts = sorted(Counter(labels).items())
    tensors = {"count": torch.tensor([count for _, count in counts], dtype=torch.int32)}
    return Reply(client, 0, {NAME: Block("statistics", tensors, tuple(label for label, _ in counts))})
