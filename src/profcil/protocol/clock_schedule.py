"""The schedule of a run with simulated clocks, without computing anything: for the audit of a plan, and for tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from profcil.protocol.clocks import TURN, Clock, ClockState, Pending, Update, Work
from profcil.protocol.participation import participants

WorkOf = Callable[[int, int], Work]  # what a method asks of clients, by position and round


@dataclass(frozen=True)
class Summary:
    """A schedule in numbers."""

    seconds: float
    turns: int
    lost: int  # replies that never arrived, of turns and statistics
    expired: int  # replies of turns that arrived too late to be used
    unfinished: int  # turns on their way at the end
    mean_staleness: float
    highest_staleness: int
    late_statistics: int  # that arrived after the server had gone on


def updates(clock: Clock, rounds: int, work_of: WorkOf) -> Iterator[Update]:
    """The updates of a buffered run, one after another."""
    state = ClockState()
    positions = clock.plan.positions
    for position in range(positions):
        opened = False
        for round in range(rounds):
            work = work_of(position, round)
            work = replace(work, opens=work.opens and not opened)
            last = position == positions - 1 and round == rounds - 1
            update = clock.update(state, position, round, work, last)
            opened = opened or any(not p.lost for p in update.opened)
            state = update.after
            yield update


def summarise(clock: Clock, rounds: int, work_of: WorkOf) -> Summary:
    """The schedule of a buffered run in numbers."""
    late: list[Pending] = []
    arrived: list[tuple[int, Pending]] = []
    turns = 0
    state = ClockState()
    for number, update in enumerate(updates(clock, rounds, work_of)):
        state = update.after
        turns += len(update.started)
        arrived += [(number, p) for p in (*update.opened, *update.arrived, *update.in_time)]
        late += [p for p in update.arrived if p.what != TURN and not p.lost]
    staleness = np.array([number - p.update for number, p in arrived if p.what == TURN and not p.lost], dtype=int)
    limit = clock.settings.max_staleness
    expired = staleness > limit if limit else np.zeros(len(staleness), dtype=bool)
    used = staleness[~expired]
    return Summary(
        seconds=state.time,
        turns=turns,
        lost=sum(p.lost for _, p in arrived),
        expired=int(expired.sum()),
        unfinished=sum(p.what == TURN for p in state.pending),
        mean_staleness=float(used.mean()) if len(used) else 0.0,
        highest_staleness=int(used.max(initial=0)),
        late_statistics=len(late),
    )


def synchronous_seconds(clock: Clock, rounds: int, work_of: WorkOf) -> float:
    """The simulated time of a run whose server waits for all participants of a round."""
    state = ClockState()
    for position in range(clock.plan.positions):
        for round in range(rounds):
            work = replace(work_of(position, round), opens=work_of(position, round).opens and round == 0)
            state = clock.round(state, position, round, participants(clock.plan, position, round), work)
    return state.time


def describe(clock: Clock, rounds: int, work_of: WorkOf) -> list[str]:
    """The schedule as lines of the audit."""
    slow = np.flatnonzero(clock.slow).tolist()
    shown = ", ".join(map(str, slow[:20])) + (", ..." if len(slow) > 20 else "")
    synchronous = synchronous_seconds(clock, rounds, work_of)
    lines = [f"stragglers         {len(slow)} of {clock.plan.clients} clients" + (f": {shown}" if slow else "")]
    if clock.settings.mode == "wait":
        return [*lines, f"simulated time     {synchronous:.0f} s"]
    found = summarise(clock, rounds, work_of)
    share = f", {found.seconds / synchronous:.2f} of a synchronous run's {synchronous:.0f} s" if synchronous else ""
    return [
        *lines,
        f"simulated time     {found.seconds:.0f} s{share}",
        f"turns              {found.turns} started, {found.unfinished} of them unfinished at the end",
        f"lost replies       {found.lost}; {found.expired} more are too late to be used",
        f"staleness          {found.mean_staleness:.2f} updates on average, at most {found.highest_staleness}",
        f"late statistics    {found.late_statistics} join after the server has gone on",
    ]
