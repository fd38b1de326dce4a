"""Asynchronous rounds by simulated clocks: the rules say who is asked for what, the clocks when each reply arrives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from profcil.protocol.buffered_rules import BufferedRules, Interval
from profcil.protocol.clocks import MEASURING, TURN, Clock, ClockState, Pending, Work


@dataclass(frozen=True)
class ServerUpdate:
    """What happens from one update of the server to the next, in this order. Lost replies are among those that arrive,
    marked as lost."""

    opening: list[Pending]  # clients asked for statistics before their turns
    opened: list[Pending]  # statistics that arrive while the server waits for these
    started: list[Pending]  # turns
    arrived: list[Pending]  # turns, and statistics that were asked for earlier
    asked: list[Pending]  # clients asked for statistics after the update
    in_time: list[Pending]  # statistics that arrive while the server waits for these
    after: ClockState


class BufferedClock(Clock, BufferedRules):
    """The clocks of all clients, and a server that updates its model as soon as some replies have arrived."""

    def update(self, state: ClockState, position: int, round: int, work: Work, last: bool) -> ServerUpdate:
        """All that happens from one update of the server to the next. `last` is the last round of the stream."""
        state = state.at(position)
        opening: list[Pending] = []
        opened: list[Pending] = []
        if work.opens:
            opening, state = self.ask(state, self.openers(state, self.order(position, round), round), work)
            opened = self.arrived(state)
            state = state.without(opened)
        started, arrived, state = self.next_update(state, position, round, work)
        overdue, state = self.overdue(state, arrived)
        overdue, state = self.ask(state, overdue)
        asked, state = self.survey(state, round, work)
        asked, state = self.ask(state, asked, work)
        asked = [*overdue, *asked]
        if last:
            final, state = self.ask(state, self.closing(state))
            asked = [*asked, *final]
            ends = [p.end for p in state.pending if p.what != TURN]
            state = replace(state, time=max([state.time, *ends]))
        in_time = self.arrived(state)
        return ServerUpdate(opening, opened, started, arrived, asked, in_time, state.without(in_time))

    def next_update(
        self, state: ClockState, position: int, round: int, work: Work
    ) -> tuple[list[Pending], list[Pending], ClockState]:
        """The turns that start before the next update of the server, what arrives before it (or is found to be lost),
        and the state at the update."""
        interval = TimedInterval(self, state.at(position), self.order(position, round), work.trains)
        interval.run()
        return interval.started, interval.arrived, replace(interval.after(work), time=interval.time)

    def ask(
        self, state: ClockState, asked: Sequence[Pending], work: Work | None = None
    ) -> tuple[list[Pending], ClockState]:
        """Asks clients for statistics. Those at work reply after their turn. With `work`, the server waits for a share
        of the others."""
        busy_until = {p.client: p.end for p in sorted(state.pending)}
        timed = []
        for p in asked:
            begin = max(state.time, busy_until.get(p.client, 0.0))
            end = begin + self.seconds(p.client, p.position, MEASURING)
            timed.append(replace(p, end=end, lost=self.is_lost(p.what, p.client, state.updates)))
        idle = sorted(p.end for p in timed if p.client not in busy_until)
        what = timed[0].what if timed else ""
        count = self.awaited(what, self.share(what, work), len(idle)) if work else 0
        time = max([state.time, *idle[:count]])
        return timed, replace(state, time=time, pending=tuple(sorted([*state.pending, *timed])))

    @staticmethod
    def arrived(state: ClockState) -> list[Pending]:
        """The statistics that have arrived by now."""
        return [p for p in state.pending if p.what != TURN and p.end <= state.time]


class TimedInterval(Interval):
    """The time between two updates of the server, while it is simulated."""

    def __init__(self, clock: BufferedClock, state: ClockState, order: Sequence[int], trains: bool) -> None:
        super().__init__(clock, state, order)
        self.clock = clock
        self.trains = trains
        self.time = state.time

    def run(self) -> None:
        """Advances the time until enough replies have arrived, or no more can arrive. What has arrived at the same time
        as the last of them, or while the server was waiting, is taken too."""
        while True:
            for pending in sorted(p for p in self.pending if p.end <= self.time):
                self.receive(pending)
            if self.enough():
                return
            self.start_turns()
            if not self.advance():
                return

    def start_turns(self) -> None:
        """Starts turns of available clients that are not at work, until as many work as can."""
        free = self.free()
        for client in self.startable():
            if free <= 0:
                return
            if self.clock.available_from(client, self.time) <= self.time:
                self.start(client)
                free -= 1

    def start(self, client: int) -> None:
        position = self.state.position
        updates = self.state.updates
        end = self.time + self.clock.turn_seconds(client, position, self.trains)
        self.begin(Pending(end, client, TURN, position, updates, self.clock.is_lost(TURN, client, updates)))

    def advance(self) -> bool:
        """Sets the time to the next arrival, or to when a client becomes available. False if nothing can help: no turn
        of this position is on its way, and no client could start one."""
        waiting = [self.clock.available_from(c, self.time) for c in self.startable()] if self.free() > 0 else []
        if not (waiting or any(map(self.helps, self.pending))):
            return False
        self.time = min([*waiting, *(p.end for p in self.pending)])
        return True
