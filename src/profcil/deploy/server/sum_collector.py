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
from profcil.engine.summed_replies import SumLayout, layout_of, reply_of_sum, terms_of
from profcil.engine.world import World
from profcil.errors import Diverged
from profcil.privacy.secure_sum.collection import Sent
from profcil.privacy.secure_sum.protocol import SumFailed, check_enough

if TYPE_CHECKING:
    from profcil.deploy.server.fleet import FlowerFleet

Parcels = Mapping[int, ClientBlocks]


class SumCollector:
    """Collects the secure sums of a fleet."""

    def __init__(self, fleet: FlowerFleet) -> None:
        self.fleet = fleet
        self.reply: Reply | None = None  # the last sum, until it is taken
        self.sent: list[Sent] = []  # its messages

    def collect(
        self, action: str, world: World, method: Any, state: RunState, when: When, inboxes: Parcels
    ) -> dict[int, Reply]:
        """Collects the sum of the clients' replies. Returns empty replies of the clients in it."""
        fleet = self.fleet
        expected = fleet.forecast.summed(world, method, when, inboxes)
        layout = layout_of(expected, method.additive, world.current_classes(when))
        attempt = 0
        while True:
            attempt += 1
            parcels = inboxes
            if attempt > 1:
                parcels = {c: inboxes[c].whole() for c in fleet.reach(world, state, when, list(inboxes))}
            secure_sum = self.make_sum(action, world, state, when, parcels, layout)
            try:
                self.complete(secure_sum, layout, method, world)
                return {c: Reply(c, 0) for c in secure_sum.accepted}
            except SumFailed:
                if secure_sum.most_diverged and world.config.train.on_divergence == "fail":
                    raise Diverged(secure_sum.refused[min(secure_sum.diverged)]) from None
                if attempt >= fleet.policy.attempts:
                    raise
            finally:
                fleet.update_books(secure_sum, state, again=attempt > 1)

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

    def complete(self, secure_sum: RemoteSum, layout: SumLayout, method: Any, world: World) -> None:
        """Carries out the exchanges of a sum, and stores its result. Where no client has numbers to add, it is enough
        that they have answered."""
        start = time.monotonic()
        failure = ""
        try:
            if layout.shapes:
                bits = world.config.privacy.sum_bits
                self.reply = reply_of_sum(secure_sum.collect(), layout, method.additive, secure_sum.terms, bits)
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
        for message in self.sent:
            channel.record(when, message.client, message.direction, {message.kind: message.bytes})
        replies = [self.reply] if self.reply else []
        self.reply = None
        self.sent = []
        return replies
