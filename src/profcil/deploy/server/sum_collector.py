"""Secure sums in place of replies: one for each request of the loop, and another if too few clients stay to the end."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from profcil.deploy.server.sums import RemoteSum, make_sum_request
from profcil.engine.channel import Channel, Reply, When
from profcil.engine.packing import ClientBlocks
from profcil.engine.run_state import RunState
from profcil.engine.sum_support import SupportCount, layout_of_counts, rare_in
from profcil.engine.summed_replies import SumLayout, layout_of, reply_of_sum, sum_noise, terms_of
from profcil.engine.world import World
from profcil.errors import Diverged
from profcil.privacy.secure_sum.collection import Sent
from profcil.privacy.secure_sum.protocol import SumFailed, check_enough
from profcil.privacy.summed_noise import SumNoise

if TYPE_CHECKING:
    from profcil.deploy.server.fleet import FlowerFleet

Parcels = Mapping[int, ClientBlocks]


class SumCollector:
    """Collects the secure sums of a fleet."""

    def __init__(self, fleet: FlowerFleet) -> None:
        self.fleet = fleet
        self.reply: Reply | None = None  # the last sum, until it is taken
        self.sent: list[Sent] = []  # its messages
        self.counted: list[Sent] = []  # the messages of the sum of counts before it
        self.members: set[int] = set()  # the clients in that sum

    def collect(
        self, action: str, world: World, method: Any, state: RunState, when: When, inboxes: Parcels
    ) -> dict[int, Reply]:
        """Collects the sum of the clients' replies. Returns empty replies of the clients in it."""
        # The arrays are those of all classes of the position, also of those that clients will leave out.
        expected = self.fleet.forecast.summed(replace(world, withheld=None), method, when, inboxes)
        layout = layout_of(expected, method.additive, world.current_classes(when))
        return self.collect_arrays(action, world, method, state, when, inboxes, layout)

    def count(self, world: World, state: RunState, when: When, inboxes: Parcels) -> frozenset[int]:
        """The classes with too few examples at some clients together. Those in the sum of counts are asked next."""
        plain = replace(world, withheld=None)
        layout = layout_of_counts(world, when)
        self.members = set(self.collect_arrays("count", plain, SupportCount(), state, when, inboxes, layout))
        self.counted = self.sent
        rare = rare_in(world, [self.reply] if self.reply else [], when)
        self.reply = None
        return rare

    def collect_arrays(
        self, action: str, world: World, method: Any, state: RunState, when: When, inboxes: Parcels, layout: SumLayout
    ) -> dict[int, Reply]:
        """Collects a sum with these arrays, in as many attempts as are allowed."""
        fleet = self.fleet
        attempt = 0
        while True:
            attempt += 1
            parcels = self.parcels(world, state, when, inboxes, again=attempt > 1)
            noise = noise_on(world, layout, when, parcels)
            secure_sum = self.make_sum(action, world, state, when, parcels, layout)
            try:
                self.complete(secure_sum, layout, method, world, noise)
                return {c: Reply(c, 0) for c in secure_sum.accepted}
            except SumFailed:
                if secure_sum.most_diverged and world.config.train.on_divergence == "fail":
                    raise Diverged(secure_sum.refused[min(secure_sum.diverged)]) from None
                if attempt >= fleet.policy.attempts:
                    raise
            finally:
                fleet.note_outcome(secure_sum, state, again=attempt > 1)

    def parcels(self, world: World, state: RunState, when: When, inboxes: Parcels, again: bool) -> Parcels:
        """What is sent to the clients that are asked. Where counts came before, only those in their sum are asked; in
        another attempt, those who are left are counted anew."""
        parcels = inboxes
        if again:
            parcels = {c: inboxes[c].whole() for c in self.fleet.reach(world, state, when, list(inboxes))}
        if world.withheld is None:
            return parcels
        if again:
            world.withheld = self.count(world, state, when, {c: ClientBlocks({}, {}) for c in parcels})
        return {c: blocks for c, blocks in parcels.items() if c in self.members}

    def make_sum(
        self, action: str, world: World, state: RunState, when: When, parcels: Parcels, layout: SumLayout
    ) -> RemoteSum:
        """A new sum of these clients, with an id of its own."""
        fleet = self.fleet
        asked = make_sum_request(layout, parcels)
        requests = {c: fleet.make_request(world, state, when, c, blocks, asked) for c, blocks in parcels.items()}
        nodes = {c: node for c in requests if (node := fleet.registry.node_of(c)) is not None}
        terms = terms_of(world.config.privacy, len(parcels), when)
        least = min(fleet.policy.min_replies, len(parcels))
        return RemoteSum(
            action=action,
            when=when,
            requests=requests,
            asked=asked,
            terms=replace(terms, least=max(terms.least, least)),
            numbers=sum(math.prod(shape) for shape in layout.shapes.values()),
            mailbox=fleet.mailbox,
            nodes=nodes,
            ttl=2 * fleet.policy.deadline,
            wait=fleet.wait,
        )

    def complete(
        self, secure_sum: RemoteSum, layout: SumLayout, method: Any, world: World, noise: SumNoise | None
    ) -> None:
        """Carries out the exchanges of a sum, and stores its result. Where no client has numbers to add, it is enough
        that they have answered."""
        start = time.monotonic()
        failure = ""
        try:
            if layout.shapes:
                bits = world.config.privacy.sum_bits
                done = secure_sum.collect()
                self.reply = reply_of_sum(done, layout, method.additive, secure_sum.terms, bits, noise)
            else:
                members = secure_sum.collect_nothing()
                least = min(self.fleet.policy.min_replies, len(secure_sum.requests))
                check_enough(members, replace(secure_sum.terms, threshold=1, least=least), "answered")
                self.reply = Reply(members[0], 0, members=members)
            self.sent = secure_sum.sent
        except SumFailed as error:
            failure = str(error)
            raise
        finally:
            self.fleet.record_event(secure_sum.as_event(time.monotonic() - start, failure))

    def take(self, channel: Channel, when: When) -> list[Reply]:
        """The sum that was collected last, as a list of one reply. The ledger counts its messages."""
        for message in [*self.counted, *self.sent]:
            channel.record(when, message.client, message.direction, {message.kind: message.bytes})
        replies = [self.reply] if self.reply else []
        self.reply = None
        self.sent = []
        self.counted = []
        return replies


def noise_on(world: World, layout: SumLayout, when: When, parcels: Parcels) -> SumNoise | None:
    """The noise that the clients add to a sum, as each of them computes it; None without noise."""
    if world.protection is None or not layout.shapes:
        return None
    inbox = next(iter(parcels.values()))
    return sum_noise(world.protection, layout, world.config.privacy, when, len(parcels), inbox)
