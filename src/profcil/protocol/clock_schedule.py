"""The schedule of a run with simulated clocks, without computing anything: for the audit of a plan, and for tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from profcil.protocol.buffered_clock import BufferedClock, ServerUpdate
from profcil.protocol.clocks import TURN, ClockState, Pending, Work
from profcil.protocol.participation import participants

SHOWN = 20  # stragglers that are listed


@dataclass(frozen=True)
class ScheduleSummary:
    """The schedule of a buffered run in numbers."""

    seconds: float
    turns: int
    unfinished: int  # turns on their way at the end
    lost: int  # replies that never arrive, of turns and statistics
    expired: int  # replies of turns that arrive too late to be used
    mean_staleness: float
    highest_staleness: int
    late_statistics: int  # that arrive after the server has gone on


@dataclass(frozen=True)
class Schedule:
    """Who starts when and what arrives when, for a method and a number of rounds per position."""

    clock: BufferedClock
    rounds: int
    work_of: Callable[[int, int], Work]  # what the method asks of clients, by position and round

    def updates(self) -> Iterator[ServerUpdate]:
        """The updates of a buffered run, one after another."""
        state = ClockState()
        last_position = self.clock.plan.positions - 1
        for position in range(self.clock.plan.positions):
            opened = False
            for round in range(self.rounds):
                work = self.work_of(position, round)
                work = replace(work, opens=work.opens and not opened)
                is_last = position == last_position and round == self.rounds - 1
                update = self.clock.update(state, position, round, work, is_last)
                opened = opened or any(not p.lost for p in update.opened)
                state = update.after
                yield update

    def summary(self) -> ScheduleSummary:
        """A buffered run in numbers."""
        turns = 0
        arrived: list[tuple[int, Pending]] = []  # with the number of the update before which each arrives
        state = ClockState()
        for number, update in enumerate(self.updates()):
            state = update.after
            turns += len(update.started)
            arrived += [(number, p) for p in (*update.opened, *update.arrived, *update.in_time)]
        usable = [(number - p.update, p) for number, p in arrived if not p.lost]
        ages = np.array([age for age, p in usable if p.what == TURN], dtype=int)
        limit = self.clock.settings.max_staleness
        used = ages[ages <= limit] if limit else ages
        return ScheduleSummary(
            seconds=state.time,
            turns=turns,
            unfinished=sum(p.what == TURN for p in state.pending),
            lost=len(arrived) - len(usable),
            expired=len(ages) - len(used),
            mean_staleness=float(used.mean()) if len(used) else 0.0,
            highest_staleness=int(used.max(initial=0)),
            late_statistics=sum(age > 0 for age, p in usable if p.what != TURN),
        )

    def synchronous_seconds(self) -> float:
        """The simulated time of a run whose server waits for all participants of a round."""
        state = ClockState()
        for position in range(self.clock.plan.positions):
            for round in range(self.rounds):
                work = self.work_of(position, round)
                work = replace(work, opens=work.opens and round == 0)
                state = self.clock.round(state, position, round, participants(self.clock.plan, position, round), work)
        return state.time

    def facts(self) -> dict[str, Any]:
        """The schedule as plain values."""
        slow: list[int] = np.flatnonzero(self.clock.slow).tolist()
        found = {"stragglers": slow, "synchronous_seconds": self.synchronous_seconds()}
        return found | (asdict(self.summary()) if self.clock.settings.mode == "buffer" else {})

    def lines(self) -> list[str]:
        """The schedule as lines of the audit."""
        facts = self.facts()
        slow = facts["stragglers"]
        synchronous = facts["synchronous_seconds"]
        more = ", ..." if len(slow) > SHOWN else ""
        names = f": {', '.join(map(str, slow[:SHOWN]))}{more}" if slow else ""
        lines = [f"stragglers         {len(slow)} of {self.clock.plan.clients} clients{names}"]
        if "turns" not in facts:
            return [*lines, f"simulated time     {synchronous:.0f} s"]
        share = f", {facts['seconds'] / synchronous:.2f} of the {synchronous:.0f} s of a synchronous run"
        return [
            *lines,
            f"simulated time     {facts['seconds']:.0f} s{share if synchronous else ''}",
            f"turns              {facts['turns']} start, {facts['unfinished']} of them are unfinished at the end",
            f"lost replies       {facts['lost']}; {facts['expired']} more arrive too late to be used",
            f"staleness          {facts['mean_staleness']:.2f} updates, at most {facts['highest_staleness']}",
            f"late statistics    {facts['late_statistics']} join after the server has gone on",
        ]
