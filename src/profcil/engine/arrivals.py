"""Rounds with simulated clocks: a round is played as always and its time counted, or replies join when they arrive.

Who starts when, and what arrives when, says `protocol.clocks`. A reply is computed when its turn starts, from the model
that the client was sent, and waits in the run's state until it arrives. So a run that was saved with replies on their
way resumes to the same bits.

An asynchronous round: the method's opening statistics, if it asks for them; turns start; the statistics that have
arrived join the memory; the turns that have arrived are re-based and aggregated; clients are asked for statistics under
the new model. Bytes are counted when they are sent, and those of a reply when it arrives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from profcil.engine.channel import Block, Channel, Inbox, Reply, ServerState, When, stored_bytes
from profcil.engine.late import LateStatistics, expect_late, forget_moves
from profcil.engine.loop import RunState, note_memory, play, round_facts
from profcil.engine.rebase import completed, rebased, staleness_weight
from profcil.protocol.buffered_clock import BufferedClock, Update
from profcil.protocol.clocks import OPENING, TURN, ClockState, Pending, Work

if TYPE_CHECKING:
    from profcil.engine.world import World
    from profcil.methods.base import Method

Facts = dict[str, Any]
COUNTED = ("started_turns", "used_replies", "lost_replies", "expired_replies", "staleness", "late_statistics")
Key = tuple[int, str, int]  # client, what it was asked for, and the number of updates before


@dataclass(frozen=True)
class Parcel:
    """A reply on its way."""

    reply: Reply  # as the server will receive it
    sizes: Mapping[str, int]  # its bytes by kind
    when: When  # for which round it was asked
    version: int  # of the base that was sent
    start: Mapping[str, Block] = field(default_factory=dict)  # of a turn: the model that it started from


@dataclass(frozen=True)
class Arrivals:
    """What a run with clocks needs between two rounds: the time, replies on their way, and for each class the position
    of its latest statistics."""

    clock: ClockState = field(default_factory=ClockState)
    parcels: Mapping[Key, Parcel] = field(default_factory=dict)
    measured: Mapping[int, int] = field(default_factory=dict)  # class → position

    @property
    def start_bytes(self) -> int:
        """The size of the older models that the server stores for these replies, each counted once."""
        starts = {(n, b.version): b.bytes for parcel in self.parcels.values() for n, b in parcel.start.items()}
        return sum(starts.values())


def make_clock(world: World) -> BufferedClock:
    """The clocks of a run."""
    return BufferedClock(world.config.clock, world.plan, world.config.train.epochs, world.weak_epochs)


def work_of(method: Method, when: When, opens: bool) -> Work:
    """What a method asks of clients in a round."""
    moving = method.moving(when)
    return Work(opens, bool(moving), "base" in moving, method.surveys(when))


def planned_work(method: Method, rounds: int) -> Callable[[int, int], Work]:
    """The same before there is a run: a method opens every position, or none."""

    def work(position: int, round: int) -> Work:
        when = When("round", position, round, rounds)
        return work_of(method, when, method.opens(ServerState(), when))

    return work


def play_and_wait(
    world: World, method: Method, state: RunState, channel: Channel, clients: Sequence[int], when: When
) -> tuple[ServerState, Facts]:
    """A synchronous round, and the simulated time that it takes."""
    arrivals = state.arrivals or Arrivals()
    work = work_of(method, when, method.opens(state.server, when))
    server, facts = play(world, method, state, channel, clients, when)
    after = make_clock(world).round(arrivals.clock, when.position, when.round, clients, work)
    state.arrivals = replace(arrivals, clock=after)
    return server, facts | time_facts(arrivals.clock, after)


def play_buffered(
    world: World, method: Method, state: RunState, channel: Channel, clients: Sequence[int], when: When
) -> tuple[ServerState, Facts]:
    """An asynchronous round, which is one update of the server. The clock says who takes part, not `clients`."""
    before = state.arrivals or Arrivals()
    channel.dropped = {}
    world.forget_features({block.version for block in state.server.blocks.values()})
    is_last = when.final and when.position == world.plan.positions - 1
    work = work_of(method, when, method.opens(state.server, when))
    update = make_clock(world).update(before.clock, when.position, when.round, work, is_last)
    with channel.round(range(world.plan.clients)):
        playing = BufferedRound(world, method, state, channel, when, before)
        facts = playing.play(update, work)
    state.arrivals = Arrivals(update.after, playing.parcels, playing.measured)
    stored = stored_bytes(playing.server.blocks) + state.arrivals.start_bytes
    state.server_bytes = max(state.server_bytes, stored)
    return playing.server, facts | channel.take_facts() | time_facts(before.clock, update.after)


def time_facts(before: ClockState, after: ClockState) -> Facts:
    """The simulated seconds of a round, and since the start of the stream."""
    return {"simulated_seconds": after.time - before.time, "simulated_time": after.time}


class BufferedRound:
    """An asynchronous round while it is computed."""

    def __init__(
        self, world: World, method: Method, state: RunState, channel: Channel, when: When, before: Arrivals
    ) -> None:
        self.world = world
        self.method = method
        self.state = state
        self.channel = channel
        self.when = when
        self.server = expect_late(state.server)
        self.parcels = dict(before.parcels)
        self.measured = dict(before.measured)
        self.updates = before.clock.updates
        self.facts: Counter[str] = Counter(dict.fromkeys(COUNTED, 0))

    def play(self, update: Update, work: Work) -> Facts:
        """Computes all that happens from one update of the server to the next. Returns facts for the log."""
        if work.opens:
            self.ask(update.opening)
            self.open(update.opened)
        self.start(update.started)
        self.receive_statistics(update.arrived)
        replies = self.receive_turns(update.arrived)
        with torch.no_grad():
            self.server = self.method.aggregate(self.server, replies, self.when)
        self.ask(update.asked)
        self.receive_statistics(update.in_time)
        self.forget()
        self.facts["started_turns"] += len(update.started)
        senders = sorted({c for reply in replies for c in reply.clients})
        return {**round_facts(senders, replies), "clients": len(replies), **self.facts}

    # -- what is sent --------------------------------------------------------------------------------------------------

    def start(self, turns: Sequence[Pending]) -> None:
        """Computes the turns that start now. One whose reply will be lost is sent its blocks, and is not computed."""
        names = {p.client: self.method.broadcast_to(p.client, self.server, self.when) for p in turns}
        inboxes = self.send(names, self.when, self.server)
        computed = self.world.fleet.turns(self.world, self.method, self.state, self.when, kept(inboxes, turns))
        for client in sorted(computed):
            if computed[client].private is not None:
                self.state.private[client] = dict(computed[client].private or {})
        self.store(turns, computed, inboxes, self.when, self.when, self.server)

    @torch.no_grad()
    def ask(self, surveys: Sequence[Pending]) -> None:
        """Computes the statistics that clients are asked for now, as the method asks for them after a round."""
        places = {(p.position, p.round): None for p in surveys}
        for position, round in places:
            chosen = [p for p in surveys if (p.position, p.round) == (position, round)]
            asked = replace(self.when, stage="refresh", position=position, round=round)
            if position < self.when.position:
                self.ask_overdue(chosen, asked)
            else:
                self.measure(chosen, asked, self.server)

    def ask_overdue(self, surveys: Sequence[Pending], asked: When) -> None:
        """The same for statistics of an earlier position, under the base under which the memory is. What clients have
        computed for the present position stays apart."""
        name = self.method.memory_base(self.server)
        server = replace(self.server, blocks={**self.server.blocks, "base": self.server.blocks[name]})
        features, known = self.world.features, self.world.kept
        self.world.features, self.world.kept = {}, (None, {})
        self.measure(surveys, asked, server)
        self.world.features, self.world.kept = features, known

    def measure(self, surveys: Sequence[Pending], asked: When, server: ServerState) -> None:
        """Computes statistics under the base of a server."""
        now = replace(self.when, stage="refresh")
        blocks = self.method.survey_blocks(server, asked)
        inboxes = self.send({p.client: blocks for p in surveys}, now, server)
        computed = self.world.fleet.surveys(self.world, self.method, self.state, asked, kept(inboxes, surveys))
        self.store(surveys, computed, inboxes, asked, now, server)

    def send(self, names: Mapping[int, Sequence[str]], when: When, server: ServerState) -> dict[int, Inbox]:
        """The inboxes of clients, in the order of their ids."""
        return {c: self.channel.down(c, server, names[c], when) for c in sorted(names)}

    def store(
        self,
        pending: Sequence[Pending],
        computed: Mapping[int, Reply],
        inboxes: Mapping[int, Inbox],
        asked: When,
        now: When,
        server: ServerState,
    ) -> None:
        """Keeps the replies until they arrive. A client that diverged has none."""
        note_memory(self.state, computed)
        version = server.blocks["base"].version
        for p in pending:
            if p.client not in computed or p.lost:
                continue
            inbox = inboxes[p.client]
            reply, sizes = self.channel.packed(inbox, computed[p.client], now)
            trained = [name for name, block in reply.blocks.items() if block.kind == "model"]
            start = {name: inbox[name] for name in trained} if p.what == TURN else {}
            self.parcels[key_of(p)] = Parcel(reply, sizes, asked, version, start)

    # -- what arrives --------------------------------------------------------------------------------------------------

    def take(self, arrived: Iterable[Pending]) -> list[tuple[Pending, Parcel]]:
        """The replies that have arrived. Their bytes are counted now, in the stage in which they were asked for."""
        found = []
        for p in arrived:
            self.facts["lost_replies"] += p.lost
            parcel = self.parcels.pop(key_of(p), None)
            if parcel is not None:
                stage = replace(self.when, stage=parcel.when.stage)
                self.channel.record(stage, p.client, "up", parcel.sizes)
                found.append((p, parcel))
        return found

    @torch.no_grad()
    def receive_turns(self, arrived: Sequence[Pending]) -> list[Reply]:
        """The replies of turns in the order of client ids, re-based to the present model."""
        replies = []
        for p, parcel in sorted(self.take(p for p in arrived if p.what == TURN), key=lambda found: found[0].client):
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

    def receive_statistics(self, arrived: Sequence[Pending]) -> None:
        """Adds the statistics that have arrived, of this round or of earlier ones."""
        found = self.take(p for p in arrived if p.what != TURN)
        self.add(found)
        self.facts["late_statistics"] += sum(p.update < self.updates for p, _ in found)

    @torch.no_grad()
    def open(self, arrived: Sequence[Pending]) -> None:
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

    def forget(self) -> None:
        """Drops the moves of the memory that no statistics on their way have missed."""
        versions = [parcel.version for (_, what, _), parcel in self.parcels.items() if what != TURN]
        self.server = forget_moves(self.server, min(versions, default=None))


def key_of(pending: Pending) -> Key:
    """What identifies a reply on its way."""
    return (pending.client, pending.what, pending.update)


def kept(inboxes: Mapping[int, Inbox], pending: Sequence[Pending]) -> dict[int, Inbox]:
    """The inboxes of those whose replies will arrive."""
    lost = {p.client for p in pending if p.lost}
    return {c: inbox for c, inbox in inboxes.items() if c not in lost}
