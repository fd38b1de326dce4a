"""The replies of an asynchronous round in a deployment: they come when clients send them.

Who is asked for what follows the same rules as in the simulation. The order of arrivals is real, and is in the events
of the run. Replies that have arrived and wait for the next update are part of the run's state. Requests are not: after
a restart of the server the replies to them never come, and what they were for is asked again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from profcil.deploy.server.mailbox import event_fields
from profcil.deploy.server.open_requests import OpenRequest, Traffic, arrival_fields
from profcil.engine.arrivals import Key, Parcel, bytes_of
from profcil.engine.buffered_round import BufferedRound, Delivery
from profcil.errors import Diverged
from profcil.protocol.buffered_rules import BufferedRules, Interval
from profcil.protocol.clocks import OPENING, STATISTICS, TURN, ClockState, Pending

if TYPE_CHECKING:
    from profcil.deploy.server.fleet import FlowerFleet


class LiveDeliveries:
    """The deliveries of one round."""

    def __init__(self, fleet: FlowerFleet, buffered: BufferedRound) -> None:
        self.fleet = fleet
        self.requests = fleet.open_requests
        self.buffered = buffered
        self.rules = BufferedRules(buffered.world.config.clock, buffered.world.plan)
        self.order = self.rules.order(buffered.when.position, buffered.when.round)
        self.clock = buffered.before.clock.at(buffered.when.position)
        by_key = {p.key: p for p in self.clock.pending}
        self.ready: list[Delivery] = [(by_key[key], parcel) for key, parcel in buffered.before.parcels.items()]
        self.ready += [(p, None) for p in self.clock.pending if p.lost]
        self.again: list[int] = []  # clients whose turns were on their way when the server stopped
        self.arrived: list[Pending] = []  # at the update
        self.ended: list[OpenRequest] = []  # since the last event
        self.is_over = False  # whether there is no further update
        self.since = time.monotonic()

    def begin(self) -> None:
        """Waits until enough clients are connected. Asks again for what was on its way when the server stopped."""
        self.fleet.connected(self.buffered.world, self.order, self.rules.at_work(self.clock.position))
        known = {p.key for p, _ in self.ready}
        gone = [p for p in self.clock.pending if p.key not in known and not self.requests.has(p)]
        self.clock = self.clock.without([replace(p, lost=True) for p in gone])
        position = self.clock.position
        self.again = [p.client for p in gone if p.what == TURN and p.position == position]
        owed, self.clock = self.rules.overdue(self.clock, gone)
        early = [p for p in gone if p.what != TURN and p.position < position]
        updates = self.clock.updates
        self.ask([*owed, *(replace(p, what=STATISTICS, update=updates) for p in early)])

    # -- the three parts of a round -----------------------------------------------------------------------------------

    def opening(self) -> list[Delivery]:
        asked = self.rules.openers(self.clock, filter(self.is_connected, self.order), self.buffered.when.round)
        self.ask(asked)
        self.wait_for(asked, OPENING)
        return self.take_statistics()

    def turns(self) -> list[Delivery]:
        interval = Interval(self.rules, self.clock, self.order)
        deliveries = self.ready
        self.ready = []
        for p, _ in deliveries:
            interval.receive(p)
        attempts = Attempts(self, interval)
        while not interval.enough():
            self.start_turns(interval)
            if attempts.are_over():
                break
            for request in self.receive():
                interval.receive(request.pending, lost=request.parcel is None)
                deliveries.append((interval.arrived[-1], request.parcel))
        self.arrived = interval.arrived
        self.clock = interval.after(self.buffered.work)
        self.check_divergence()
        self.record("round")
        return deliveries

    def statistics(self) -> list[Delivery]:
        buffered = self.buffered
        overdue, self.clock = self.rules.overdue(self.clock, self.arrived)
        asked, self.clock = self.rules.survey(self.clock, buffered.when.round, buffered.work)
        absent = [p for p in asked if not self.is_connected(p.client)]
        self.clock = self.clock.without([replace(p, lost=True) for p in absent])
        asked = [p for p in asked if p not in absent]
        self.ask([*overdue, *asked, *(self.rules.closing(self.clock) if buffered.is_last else ())])
        self.wait_for(asked, STATISTICS)
        self.is_over = buffered.is_last
        if self.is_over:
            self.wait_until(lambda: not self.requests.statistics)
        return self.take_statistics()

    def oldest_base(self) -> int | None:
        versions = [r.asked.version for r in self.requests.statistics]
        return min(versions, default=None)

    def left(self) -> tuple[ClockState, Mapping[Key, Parcel]]:
        return self.clock, {p.key: parcel for p, parcel in self.ready if parcel is not None}

    def start_bytes(self) -> int:
        return bytes_of(parcel.start for _, parcel in self.ready if parcel) + self.requests.start_bytes()

    def facts(self) -> Mapping[str, Any]:
        return {}

    # -- what is sent -------------------------------------------------------------------------------------------------

    def is_connected(self, client: int) -> bool:
        """Whether a client can be asked now."""
        if self.fleet.registry.node_of(client) is None:
            return False
        self.fleet.note_client(self.buffered.world, self.buffered.state, self.buffered.when, client)
        return True

    def start_turns(self, interval: Interval) -> None:
        """Starts turns of connected clients that are not at work, until as many work as can."""
        startable = list(interval.startable())
        first = [c for c in self.again if c in startable]
        order = [*first, *(c for c in startable if c not in first)]
        started = []
        for client in filter(self.is_connected, order):
            if interval.free() <= 0:
                break
            started.append(Pending(0.0, client, TURN, self.clock.position, self.clock.updates))
            interval.begin(started[-1])
        if started:
            self.requests.add(self.buffered, self.buffered.ask_turns(started))

    @torch.no_grad()
    def ask(self, asked: Sequence[Pending]) -> None:
        """Asks clients for statistics. Those at work are sent the request after their turn."""
        self.clock = replace(self.clock, pending=tuple(sorted([*self.clock.pending, *asked])))
        for requests in self.buffered.ask_statistics(asked):
            self.requests.add(self.buffered, requests)

    # -- what arrives -------------------------------------------------------------------------------------------------

    def receive(self) -> list[OpenRequest]:
        """The requests that have ended since the last call. Waits a moment if there are none."""
        ended = self.requests.receive(self.buffered)
        self.ended += ended
        if not ended:
            self.fleet.pause()
        return ended

    def wait_for(self, asked: Sequence[Pending], what: str) -> None:
        """Waits for a share of the statistics just asked of idle clients."""
        busy = {p.client for p in self.clock.pending if p.what == TURN}
        idle = {p.key for p in asked if p.client not in busy}
        count = self.rules.awaited(what, self.rules.share(what, self.buffered.work), len(idle))
        self.wait_until(lambda: sum(p.key in idle for p, _ in self.ready) >= count)

    def wait_until(self, is_done: Callable[[], bool]) -> None:
        """Waits, and keeps what arrives meanwhile."""
        while not is_done():
            for request in self.receive():
                p = replace(request.pending, lost=request.parcel is None)
                pending = [p if q == request.pending else q for q in self.clock.pending]
                self.clock = replace(self.clock, pending=tuple(sorted(pending)))
                self.ready.append((p, request.parcel))

    def take_statistics(self) -> list[Delivery]:
        """The statistics that have arrived. Turns wait for the next update."""
        found = [delivery for delivery in self.ready if delivery[0].what != TURN]
        self.ready = [delivery for delivery in self.ready if delivery[0].what == TURN]
        self.clock = self.clock.without([p for p, _ in found])
        self.record("refresh")
        return found

    def check_divergence(self) -> None:
        """Ends the run if most of the turns that have arrived since the last event claim a divergence."""
        turns = [r for r in self.ended if r.pending.what == TURN]
        diverged = [r for r in turns if r.exchange and r.exchange.diverged]
        if 2 * len(diverged) > len(turns) and self.buffered.world.config.train.on_divergence == "fail":
            raise Diverged(diverged[0].reason)

    def record(self, stage: str) -> None:
        """Writes what was sent and what has arrived since the last event, in the order of arrival. Statistics are used
        now, and so are turns at an update; turns that arrive at other times are used at the next one."""
        traffic = self.requests.traffic
        ended = self.ended
        if not ended and not any(traffic.wire.values()):
            return
        before = self.buffered.updates
        used = [r for r in ended if r.parcel and not (self.is_over and r.pending.what == TURN)]
        ages = {TURN: before if stage == "round" else self.clock.updates}
        event = {
            "event": "asked",
            **event_fields(replace(self.buffered.when, stage=stage)),
            "answered": [r.client for r in ended if r.parcel],
            "silent": [r.client for r in ended if not r.parcel and not r.reason],
            "refused": {str(r.client): r.reason for r in ended if r.reason},
            "arrivals": [arrival_fields(r, ages.get(r.pending.what, before)) for r in used],
            "at_work": [[r.client, self.clock.updates - r.pending.update] for r in self.requests.turns],
            "payload": traffic.payload,
            "wire": traffic.wire,
            "seconds": round(time.monotonic() - self.since, 3),
        }
        self.fleet.record_event(event)
        self.requests.traffic = Traffic()
        self.ended = []
        self.since = time.monotonic()


class Attempts:
    """How long a round goes on in which nothing can help: no turn is on its way and no client can start one."""

    def __init__(self, deliveries: LiveDeliveries, interval: Interval) -> None:
        self.interval = interval
        self.fleet = deliveries.fleet
        self.deliveries = deliveries
        self.least = min(self.fleet.policy.min_replies, deliveries.rules.at_work(deliveries.clock.position))
        self.left = self.fleet.policy.attempts - 1
        self.since: float | None = None  # when nothing could help any more

    def are_over(self) -> bool:
        """Whether the server goes on with what there is. With too few replies, clients without a usable one are asked
        again, as soon as they are connected; after the last attempt the run stops."""
        interval = self.interval
        if any(map(interval.helps, interval.pending)):
            self.since = None
            return False
        if interval.replies() >= self.least:
            return True
        self.deliveries.check_divergence()
        if self.left:
            self.left -= 1
            interval.used -= {p.client for p in interval.arrived if p.lost}
            return False
        self.since = self.since or time.monotonic()
        if time.monotonic() - self.since > self.fleet.policy.join:
            self.fleet.stop(interval.replies(), self.least)
        return False
