"""Simulated runs in which some clients lie. The package itself knows nothing of attacks: a fleet falsifies replies."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from attacks import Attack

from profcil.engine.channel import Inbox, Reply
from profcil.engine.fleet import LocalFleet
from profcil.engine.world import World, make_world
from profcil.randomness import torch_generator


class LyingFleet(LocalFleet):
    """The simulation's fleet, in which some clients falsify every reply."""

    def __init__(self, attack: Attack, liars: Collection[int]) -> None:
        self.attack = attack
        self.liars = frozenset(liars)

    def turns(self, world: World, method: Any, state: Any, when: Any, inboxes: Any) -> Mapping[int, Reply]:
        return self.falsified(super().turns(world, method, state, when, inboxes), inboxes, when)

    def surveys(self, world: World, method: Any, state: Any, when: Any, inboxes: Any) -> Mapping[int, Reply]:
        return self.falsified(super().surveys(world, method, state, when, inboxes), inboxes, when)

    def falsified(self, replies: Mapping[int, Reply], inboxes: Mapping[int, Inbox], when: Any) -> dict[int, Reply]:
        return {c: self.lie(r, inboxes[c], when) if c in self.liars else r for c, r in replies.items()}

    def lie(self, reply: Reply, inbox: Inbox, when: Any) -> Reply:
        rng = torch_generator(0, "lie", reply.client, when.stage, when.position, when.round)
        return self.attack.falsify(reply, inbox, rng)


def lying_world(attack: Attack | None, liars: Collection[int]) -> Any:
    """A function that makes the world of a run with liars."""

    def make(config: Any, data: Path) -> World:
        world = make_world(config, data)
        if attack is not None:
            world.fleet = LyingFleet(attack, liars)
        return world

    return make
