"""An asynchronous round: what is sent to clients, and what is done with the replies that have arrived.

The method's opening statistics, if it asks for them; turns start; the statistics that have arrived join the memory; the
turns that have arrived are re-based and aggregated; clients are asked for statistics under the new model. Bytes are
counted when they are sent, and those of a reply when it arrives.

The `Deliveries` determine who is asked when, and when the replies arrive. The simulation and deployments have their
own; everything here is the same for both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch

from profcil.engine.arrivals import Arrivals, Key, Parcel, RoundFacts, work_of
from profcil.engine.channel import Channel, Inbox, Reply, ServerState, When
from profcil.engine.client_exchange import round_facts
from profcil.engine.late import LateStatistics, expect_late, forget_moves
from profcil.engine.rebase import completed, rebased, staleness_weight
from profcil.engine.run_state import RunState
from profcil.protocol.clocks import OPENING, TURN, ClockState, Pending

if TYPE_CHECKING:
    from profcil.engine.world import World
    from profcil.methods.base import Method

COUNTED = ("started_turns", "used_replies", "lost_replies", "expired_replies", "staleness", "late_statistics")
Delivery = tuple[Pending, Parcel | None]  # what was asked for, and the reply; None = there is none


class Deliveries(Protocol):
    """How the replies of one round arrive. A reply that never will, or that cannot be used, is marked as lost."""

    def opening(self) -> Sequence[Delivery]:
        """Asks for statistics before the turns. Returns what has arrived when the server goes on."""

    def turns(self) -> Sequence[Delivery]:
        """Starts turns. Returns what has arrived at the server's update, also of what was asked for earlier."""

    def statistics(self) -> Sequence[Delivery]:
        """Asks for statistics under the new model. Returns what has arrived when the server goes on."""

    def oldest_base(self) -> int | None:
        """The version of the oldest base under which statistics are measured that still come; None = none come."""

    def left(self) -> tuple[ClockState, Mapping[Key, Parcel]]:
        """What is on its way after the round, and the replies among it that are known already."""

    def start_bytes(self) -> int:
        """The size of the older models that the server stores for turns on their way."""

    def facts(self) -> Mapping[str, Any]:
        """Facts of the round for the log."""


@dataclass(frozen=True)
class Asked:
    """Requests to several clients at one moment."""

    pending: Sequence[Pending]
    inboxes: Mapping[int, Inbox]  # in the order of the clients' ids
    when: When  # the round for which they are asked
    sent: When  # the round in which they are asked, where the bytes count
    version: int  # of the base that is sent


class BufferedRound:
    """An asynchronous round while it is computed."""

    def __init__(self, world: World, method: Method, state: RunState, channel: Channel, when: When) -> None:
        self.world = world
        self.method = method
        self.state = state
        self.channel = channel
        self.when = when
        self.before = state.arrivals or Arrivals()
        self.work = work_of(method, when, method.opens(state.server, when))
        self.server = expect_late(state.server)
        self.measured = dict(self.before.measured)
        self.updates = self.before.clock.updates
        self.facts: Counter[str] = Counter(dict.fromkeys(COUNTED, 0))

    @property
    def is_last(self) -> bool:
        """Whether this is the last round of the stream."""
        return self.when.final and self.when.position == self.world.plan.positions - 1

    def run(self, deliveries: Deliveries) -> RoundFacts:
        """Computes all that happens from one update of the server to the next. Returns facts for the log."""
        if self.work.opens:
            self.open(deliveries.opening())
        arrived = deliveries.turns()
        self.receive_statistics(arrived)
        replies = self.receive_turns(arrived)
        with torch.no_grad():
            self.server = self.method.aggregate(self.server, replies, self.when)
        self.receive_statistics(deliveries.statistics())
        self.server = forget_moves(self.server, deliveries.oldest_base())
        senders = sorted({c for reply in replies for c in reply.clients})
        return {**round_facts(senders, replies), "clients": len(replies), **self.facts}

    # -- what is sent --------------------------------------------------------------------------------------------------

    def ask_turns(self, turns: Sequence[Pending]) -> Asked:
        """The requests for turns that start now."""
        names = {p.client: self.method.broadcast_to(p.client, self.server, self.when) for p in turns}
        self.facts["started_turns"] += len(turns)
        return self.ask(turns, names, self.server, self.when, self.when)

    def ask_statistics(self, surveys: Sequence[Pending]) -> Iterator[Asked]:
        """The requests for statistics that are asked for now, as the method asks for them after a round. Those of an
        earlier position are measured under the base under which the memory is."""
        now = replace(self.when, stage="refresh")
        for position, round in {(p.position, p.round): None for p in surveys}:
            chosen = [p for p in surveys if (p.position, p.round) == (position, round)]
            asked = replace(now, position=position, round=round)
            server = self.server
            if position < self.when.position:
                base = server.blocks[self.method.memory_base(server)]
                server = replace(server, blocks={**server.blocks, "base": base})
            blocks = self.method.survey_blocks(server, asked)
            yield self.ask(chosen, {p.client: blocks for p in chosen}, server, asked, now)

    def ask(
        self, pending: Sequence[Pending], names: Mapping[int, Sequence[str]], server: ServerState, when: When, now: When
    ) -> Asked:
        """Requests that are sent now. Their bytes are counted."""
        inboxes = {c: self.channel.down(c, server, names[c], now) for c in sorted(names)}
        return Asked(pending, inboxes, when, now, server.blocks["base"].version)

    def parcel(self, asked: Asked, pending: Pending, reply: Reply) -> Parcel:
        """A reply as it is kept until it is used."""
        inbox = asked.inboxes[pending.client]
        received, sizes = self.channel.packed(inbox, reply, asked.sent)
        trained = [name for name, block in received.blocks.items() if block.kind == "model"]
        start = {name: inbox[name] for name in trained} if pending.what == TURN else {}
        return Parcel(received, sizes, asked.when, asked.version, start)

    # -- what arrives --------------------------------------------------------------------------------------------------

    def take(self, arrived: Iterable[Delivery]) -> list[tuple[Pending, Parcel]]:
        """The replies that have arrived. Their bytes are counted now, in the stage in which they were asked for."""
        found = []
        for p, parcel in arrived:
            self.facts["lost_replies"] += p.lost
            if parcel is not None:
                stage = replace(self.when, stage=parcel.when.stage)
                self.channel.record(stage, p.client, "up", parcel.sizes)
                found.append((p, parcel))
        return found

    @torch.no_grad()
    def receive_turns(self, arrived: Sequence[Delivery]) -> list[Reply]:
        """The replies of turns in the order of client ids, re-based to the present model."""
        found = self.take(delivery for delivery in arrived if delivery[0].what == TURN)
        replies = []
        for p, parcel in sorted(found, key=lambda taken: taken[0].client):
            age = self.updates - p.update
            limit = self.world.config.clock.max_staleness
            if limit and age > limit:
                self.facts["expired_replies"] += 1
                continue
            self.facts["staleness"] += age
            self.facts["used_replies"] += 1
            replies.append(self.rebased(parcel, age))
        return completed(replies, self.server)

    def rebased(self, parcel: Parcel, age: int) -> Reply:
        """A reply as if it had started from the present model. One that has is used as it is."""
        if not age:
            return parcel.reply
        moving = self.method.moving(self.when)
        weight = staleness_weight(age, self.world.config.clock.staleness)
        reply = rebased(parcel.reply, parcel.start, self.server, moving, weight, self.world.net)
        return self.method.rebased(reply, weight, self.when)

    def receive_statistics(self, arrived: Sequence[Delivery]) -> None:
        """Adds the statistics that have arrived, of this round or of earlier ones."""
        found = self.take(delivery for delivery in arrived if delivery[0].what != TURN)
        self.add(found)
        self.facts["late_statistics"] += sum(p.update < self.updates for p, _ in found)

    @torch.no_grad()
    def open(self, arrived: Sequence[Delivery]) -> None:
        """Opens a position by the statistics that were asked for it and have arrived. Others may have, too."""
        found = self.take(arrived)
        asked = replace(self.when, stage="refresh")
        opening = [parcel.reply for p, parcel in found if p.what == OPENING and p.update == self.updates]
        others = [(p, parcel) for p, parcel in found if p.what != OPENING or p.update < self.updates]
        self.server = self.method.absorb(self.server, opening, asked)
        self.add(others)
        self.facts["late_statistics"] += len(others)

    @torch.no_grad()
    def add(self, found: Sequence[tuple[Pending, Parcel]]) -> None:
        """Gives statistics to the method."""
        late = [LateStatistics(parcel.reply, parcel.when, parcel.version, p.what == OPENING) for p, parcel in found]
        if late:
            self.server = self.method.add_statistics(self.server, late, self.measured, self.when)
        for _, parcel in found:
            self.note_measured(parcel)

    def note_measured(self, parcel: Parcel) -> None:
        """Notes of which classes there are statistics of a position now."""
        for block in parcel.reply.blocks.values():
            for label in block.labels if block.kind == "statistics" else ():
                self.measured[label] = max(parcel.when.position, self.measured.get(label, -1))
