"""Asynchronous rounds, as in FedBuff (Nguyen et al., AISTATS 2022): who works, who is asked for statistics, and when
the server updates its model.

As many clients as a synchronous round has participants work at a time. One that has replied is replaced by another.
After `clock.buffer` replies the server updates the model. Replies of the clients that still work then join a later
update, maybe at a later position. Only replies of the present position count towards the buffer, since at its start
most clients work on the position before.

These rules do not determine when replies arrive: simulated clocks do (`buffered_clock`), or the nodes of a
deployment. A reply is `Pending` from the moment when it is asked for; these rules leave its time open.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from profcil.protocol.clock_settings import ClockSettings
from profcil.protocol.clocks import OPENING, STATISTICS, TURN, ClockState, Pending, Work
from profcil.protocol.plan import Plan
from profcil.randomness import generator


@dataclass(frozen=True)
class BufferedRules:
    """Who is asked for what, by the settings and the plan."""

    settings: ClockSettings
    plan: Plan

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

    # -- statistics ---------------------------------------------------------------------------------------------------

    def openers(self, state: ClockState, order: Iterable[int], round: int) -> list[Pending]:
        """The clients that are asked for statistics before the first turns of a position."""
        busy = {p.client for p in state.pending}
        idle = [c for c in order if c not in busy]
        chosen = sorted(idle[: self.at_work(state.position)])
        return [asked_now(state, c, OPENING, state.position, round) for c in chosen]

    def overdue(self, state: ClockState, arrived: Iterable[Pending]) -> tuple[list[Pending], ClockState]:
        """Asks clients whose turns have arrived after the end of their position for their statistics of it, which could
        not be asked for before. The server does not wait for these."""
        rounds = dict(state.owing)
        asked: list[Pending] = []
        for p in arrived:
            if p.what == TURN and p.position < state.position and p.client in rounds:
                round = rounds.pop(p.client)
                if not p.lost:
                    asked.append(asked_now(state, p.client, STATISTICS, p.position, round))
        return asked, replace(state, owing=tuple(sorted(rounds.items())))

    def survey(self, state: ClockState, round: int, work: Work) -> tuple[list[Pending], ClockState]:
        """After an update: who is asked for statistics. Each client that has replied at this position is asked once
        under the present base."""
        if work.surveys:
            state = replace(state, surveyed=round)
        if state.surveyed < 0:
            return [], state
        on_their_way = {p.client for p in state.pending if p.what != TURN}
        clients = [c for c in state.replied if c not in state.asked and c not in on_their_way]
        asked = [asked_now(state, c, STATISTICS, state.position, state.surveyed) for c in clients]
        return asked, replace(state, asked=tuple(sorted({*state.asked, *clients})))

    def closing(self, state: ClockState) -> list[Pending]:
        """After the last round of the stream: asks those that still work for statistics."""
        turns = {p.client: p for p in state.pending if p.what == TURN and not p.lost}
        owing = [(client, round) for client, round in state.all_owing() if client in turns]
        return [asked_now(state, client, STATISTICS, turns[client].position, round) for client, round in owing]

    def share(self, what: str, work: Work) -> float:
        """The share of the idle clients among those just asked whose statistics the server waits for."""
        return self.settings.statistics if what == OPENING or work.surveys else 0.0

    @staticmethod
    def awaited(what: str, share: float, idle: int) -> int:
        """How many statistics of idle clients the server waits for: at least one at an opening, without which a method
        may not be able to train."""
        least = 1 if what == OPENING else 0
        return min(idle, max(least, math.ceil(share * idle)))


def asked_now(state: ClockState, client: int, what: str, position: int, round: int) -> Pending:
    """Statistics that are asked for now. When they arrive is open."""
    return Pending(0.0, client, what, position, state.updates, round=round)


class Interval:
    """The time between two updates of the server: which turns start in it, and what arrives."""

    def __init__(self, rules: BufferedRules, state: ClockState, order: Sequence[int]) -> None:
        self.rules = rules
        self.state = state
        self.order = order
        self.pending = list(state.pending)
        self.started: list[Pending] = []
        self.arrived: list[Pending] = []
        self.used: set[int] = set()  # clients that have started, or have replied at this position, since the update

    def enough(self) -> bool:
        """Whether the server updates the model now."""
        return self.replies() >= self.rules.needed(self.state.position)

    def replies(self) -> int:
        """The turns of this position that have arrived."""
        return sum(self.counts(p) and not p.lost for p in self.arrived)

    def counts(self, pending: Pending) -> bool:
        return pending.what == TURN and pending.position == self.state.position

    def free(self) -> int:
        """How many more clients may work."""
        return self.rules.at_work(self.state.position) - sum(map(self.counts, self.pending))

    def startable(self) -> Iterator[int]:
        """The clients that may start before this update: no client trains the same model twice."""
        busy = {p.client for p in self.pending}
        return (c for c in self.order if c not in busy and c not in self.used)

    def begin(self, turn: Pending) -> None:
        """A turn starts."""
        self.pending.append(turn)
        self.started.append(turn)
        self.used.add(turn.client)

    def receive(self, pending: Pending, lost: bool = False) -> None:
        """A reply arrives, or is found to be lost."""
        self.pending.remove(pending)
        self.arrived.append(replace(pending, lost=pending.lost or lost))
        if self.counts(pending):
            self.used.add(pending.client)

    def helps(self, pending: Pending) -> bool:
        """Whether an arrival counts towards the buffer, or frees a client that may start."""
        return self.counts(pending) or (pending.client in self.order and pending.client not in self.used)

    def after(self, work: Work) -> ClockState:
        """The state at the update that ends the interval."""
        state = self.state
        now = [p for p in self.arrived if p.position == state.position]
        replied = {p.client for p in now if p.what == TURN and not p.lost}
        asked = set() if work.moves_base else set(state.asked)
        asked -= {p.client for p in now if p.what == STATISTICS and p.lost}
        return replace(
            state,
            updates=state.updates + 1,
            pending=tuple(sorted(self.pending)),
            replied=tuple(sorted(replied.union(state.replied))),
            asked=tuple(sorted(asked)),
            surveyed=-1 if work.moves_base else state.surveyed,
        )
