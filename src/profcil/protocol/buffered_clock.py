"""Asynchronous rounds by simulated clocks, as in FedBuff (Nguyen et al., AISTATS 2022).

As many clients as a synchronous round has participants work at a time. One that has replied is replaced by another.
After `clock.buffer` replies the server updates the model. Replies of the clients that still work then join a later
update, maybe at a later position. Only replies of the present position count towards the buffer, since at its start
most clients work on the position before.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from profcil.protocol.clocks import MEASURING, OPENING, STATISTICS, TURN, Clock, ClockState, Pending, Work
from profcil.randomness import generator


@dataclass(frozen=True)
class Update:
    """What happens from one update of the server to the next, in this order. Lost replies are among those that arrive,
    marked as lost."""

    opening: list[Pending]  # clients asked for statistics before their turns
    opened: list[Pending]  # statistics that arrive while the server waits for these
    started: list[Pending]  # turns
    arrived: list[Pending]  # turns, and statistics that were asked for earlier
    asked: list[Pending]  # clients asked for statistics after the update
    in_time: list[Pending]  # statistics that arrive while the server waits for these
    after: ClockState


class BufferedClock(Clock):
    """The clocks of all clients, and a server that updates its model as soon as some replies have arrived."""

    def at_work(self, position: int) -> int:
        """How many clients work at a time: the participants of a synchronous round."""
        return min(self.plan.settings.participants, len(self.plan.active(position)))

    def needed(self, position: int) -> int:
        """The replies of a position after which the server updates the model."""
        return self.settings.buffer or max(1, math.ceil(self.at_work(position) / 2))

    def order(self, position: int, round: int) -> list[int]:
        """The clients with data at a position, in the random order in which they are asked before an update."""
        random = generator(self.plan.seed, "clock", "order", position, round)
        order: list[int] = random.permutation(self.plan.active(position)).tolist()
        return order

    def openers(self, state: ClockState, position: int, round: int) -> list[int]:
        """The clients that are asked for statistics before the first turns of a position."""
        busy = {p.client for p in state.pending}
        idle = [c for c in self.order(position, round) if c not in busy]
        return sorted(idle[: self.at_work(position)])

    def next_update(
        self, state: ClockState, position: int, round: int, work: Work
    ) -> tuple[list[Pending], list[Pending], ClockState]:
        """The turns that start before the next update of the server, what arrives before it (or is found to be lost),
        and the state at the update."""
        interval = Interval(self, state.at(position), self.order(position, round), work.trains)
        interval.run()
        arrived = interval.arrived
        replied = {p.client for p in arrived if p.what == TURN and p.position == position and not p.lost}
        asked = set() if work.moves_base else set(interval.state.asked)
        asked -= {p.client for p in arrived if p.what == STATISTICS and p.position == position and p.lost}
        after = replace(
            interval.state,
            time=interval.time,
            updates=state.updates + 1,
            pending=tuple(sorted(interval.pending)),
            replied=tuple(sorted(replied.union(interval.state.replied))),
            asked=tuple(sorted(asked)),
            surveyed=-1 if work.moves_base else interval.state.surveyed,
        )
        return interval.started, arrived, after

    def update(self, state: ClockState, position: int, round: int, work: Work, last: bool) -> Update:
        """All that happens from one update of the server to the next. `last` is the last round of the stream."""
        state = state.at(position)
        opening: list[Pending] = []
        opened: list[Pending] = []
        if work.opens:
            clients = self.openers(state, position, round)
            opening, state = self.ask(state, OPENING, clients, self.settings.statistics, (position, round))
            opened, state = take_arrived(state)
        started, arrived, state = self.next_update(state, position, round, work)
        overdue, state = self.ask_overdue(state, arrived)
        asked, state = self.survey(state, round, work)
        if last:
            final, state = self.close(state)
            asked = [*asked, *final]
        asked = [*overdue, *asked]
        in_time, state = take_arrived(state)
        return Update(opening, opened, started, arrived, asked, in_time, state)

    def ask_overdue(self, state: ClockState, arrived: Sequence[Pending]) -> tuple[list[Pending], ClockState]:
        """Asks clients whose turns have arrived after the end of their position for their statistics of it, which
        nobody could ask for so far. The server does not wait for these."""
        rounds = dict(state.owing)
        asked: list[Pending] = []
        for p in arrived:
            if p.what == TURN and p.position < state.position and p.client in rounds:
                round = rounds.pop(p.client)
                if not p.lost:
                    found, state = self.ask(state, STATISTICS, [p.client], 0.0, (p.position, round))
                    asked += found
        return asked, replace(state, owing=tuple(sorted(rounds.items())))

    def close(self, state: ClockState) -> tuple[list[Pending], ClockState]:
        """After the last round of the stream: asks those that still work for statistics, and waits for all."""
        turns = {p.client: p for p in state.pending if p.what == TURN and not p.lost}
        asked: list[Pending] = []
        for client, round in state.all_owing():
            if client in turns:
                found, state = self.ask(state, STATISTICS, [client], 0.0, (turns[client].position, round))
                asked += found
        ends = [p.end for p in state.pending if p.what != TURN]
        return asked, replace(state, time=max([state.time, *ends]))

    def survey(self, state: ClockState, round: int, work: Work) -> tuple[list[Pending], ClockState]:
        """After an update: what is asked for, and the state when the server goes on. Each client that has replied at
        this position is asked once under the present base. In a round in which the method asks for statistics the
        server waits for a share of the idle ones."""
        if work.surveys:
            state = replace(state, surveyed=round)
        if state.surveyed < 0:
            return [], state
        on_their_way = {p.client for p in state.pending if p.what != TURN}
        clients = [c for c in state.replied if c not in state.asked and c not in on_their_way]
        share = self.settings.statistics if work.surveys else 0.0
        asked, state = self.ask(state, STATISTICS, clients, share, (state.position, state.surveyed))
        return asked, replace(state, asked=tuple(sorted({*state.asked, *clients})))

    def ask(
        self, state: ClockState, what: str, clients: Sequence[int], share: float, place: tuple[int, int]
    ) -> tuple[list[Pending], ClockState]:
        """Asks clients for statistics. Those at work answer after their turn. The server waits for a share of the
        others; for at least one at an opening, without which a method may not be able to train."""
        busy_until = {p.client: p.end for p in sorted(state.pending)}
        asked = []
        for client in clients:
            begin = max(state.time, busy_until.get(client, 0.0))
            end = begin + self.seconds(client, place[0], MEASURING)
            lost = self.is_lost(what, client, state.updates)
            asked.append(Pending(end, client, what, place[0], state.updates, lost, place[1]))
        idle = sorted(p.end for p in asked if p.client not in busy_until)
        least = 1 if what == OPENING else 0
        count = max(least, math.ceil(share * len(idle)))
        time = max([state.time, *idle[:count]])
        return asked, replace(state, time=time, pending=tuple(sorted([*state.pending, *asked])))


def take_arrived(state: ClockState) -> tuple[list[Pending], ClockState]:
    """The statistics that have arrived by now, and the state without them."""
    arrived = [p for p in state.pending if p.what != TURN and p.end <= state.time]
    others = tuple(p for p in state.pending if p not in arrived)
    lost = {p.client for p in arrived if p.lost and p.position == state.position and p.what == STATISTICS}
    asked = tuple(c for c in state.asked if c not in lost)
    return arrived, replace(state, pending=others, asked=asked)


class Interval:
    """The time between two updates of the server, while it is simulated."""

    def __init__(self, clock: BufferedClock, state: ClockState, order: Sequence[int], trains: bool) -> None:
        self.clock = clock
        self.state = state
        self.order = order
        self.trains = trains
        self.time = state.time
        self.pending = list(state.pending)
        self.started: list[Pending] = []
        self.arrived: list[Pending] = []
        self.used: set[int] = (
            set()
        )  # clients that have started, or have replied at this position, since the last update

    def run(self) -> None:
        """Advances the time until enough replies have arrived, or no more can arrive. What has arrived at the same time
        as the last of them, or while the server was waiting, is taken too."""
        needed = self.clock.needed(self.state.position)
        while True:
            for pending in sorted(p for p in self.pending if p.end <= self.time):
                self.receive(pending)
            if self.replies() >= needed:
                return
            self.start_turns()
            if not self.advance():
                return

    def replies(self) -> int:
        """The turns of this position that have arrived."""
        return sum(self.counts(p) and not p.lost for p in self.arrived)

    def counts(self, pending: Pending) -> bool:
        return pending.what == TURN and pending.position == self.state.position

    def start_turns(self) -> None:
        """Starts turns of available clients that are not at work, until as many work as can."""
        free = self.free()
        for client in self.startable():
            if free <= 0:
                return
            if self.clock.available_from(client, self.time) <= self.time:
                self.start(client)
                free -= 1

    def free(self) -> int:
        """How many more clients may work."""
        return self.clock.at_work(self.state.position) - sum(map(self.counts, self.pending))

    def startable(self) -> Iterator[int]:
        """The clients that may start before this update: no client trains the same model twice."""
        busy = {p.client for p in self.pending}
        return (c for c in self.order if c not in busy and c not in self.used)

    def start(self, client: int) -> None:
        position = self.state.position
        updates = self.state.updates
        end = self.time + self.clock.turn_seconds(client, position, self.trains)
        turn = Pending(end, client, TURN, position, updates, self.clock.is_lost(TURN, client, updates))
        self.pending.append(turn)
        self.started.append(turn)
        self.used.add(client)

    def receive(self, pending: Pending) -> None:
        self.pending.remove(pending)
        self.arrived.append(pending)
        if self.counts(pending):
            self.used.add(pending.client)

    def advance(self) -> bool:
        """Sets the time to the next arrival, or to when a client becomes available. False if nothing can help: no turn
        of this position is on its way, and no client could start one."""
        waiting = [self.clock.available_from(c, self.time) for c in self.startable()] if self.free() > 0 else []
        if not (waiting or any(map(self.helps, self.pending))):
            return False
        self.time = min([*waiting, *(p.end for p in self.pending)])
        return True

    def helps(self, pending: Pending) -> bool:
        """Whether an arrival counts towards the buffer, or frees a client that may start."""
        return self.counts(pending) or (pending.client in self.order and pending.client not in self.used)
