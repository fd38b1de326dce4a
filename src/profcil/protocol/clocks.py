"""Simulated clocks: how long clients take, and which replies have arrived at each update of the server.

The duration of a turn depends on the seed, the client, and its examples and epochs, never on values of tensors. So who
starts a turn after which update, and which replies arrive before which update, follow from plan and settings alone.

Here are the durations, and a synchronous round, which lasts as long as its slowest participant. Asynchronous rounds are
in `buffered_rules`, and with simulated times in `buffered_clock`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from profcil.protocol.clock_settings import ClockSettings
from profcil.protocol.heterogeneity import round_half_up, share_of
from profcil.protocol.plan import Plan
from profcil.randomness import generator

TURN = "turn"
STATISTICS = "statistics"
OPENING = "opening"  # statistics that are collected before the first turns of a position
MEASURING = 1 / 3  # of an epoch: what statistics of all examples take, which need no gradients


@dataclass(frozen=True, order=True)
class Pending:
    """What a client was asked for and what has not arrived yet, in the order of arrival."""

    end: float  # the simulated second of its arrival
    client: int
    what: str  # turn, statistics or opening
    position: int
    update: int  # updates of the server before it was asked
    lost: bool = False  # it never arrives, which the server notices at this time
    round: int = -1  # of statistics: the round of the position for which the method asks for them

    @property
    def key(self) -> tuple[int, str, int]:
        """What identifies it among all that is on its way."""
        return (self.client, self.what, self.update)


@dataclass(frozen=True)
class ClockState:
    """The simulated time, and what is on its way."""

    time: float = 0.0
    updates: int = 0  # of the server so far
    position: int = 0
    pending: tuple[Pending, ...] = ()
    replied: tuple[int, ...] = ()  # clients whose turns of this position have arrived
    asked: tuple[int, ...] = ()  # clients asked for statistics in this position since the base moved last
    surveyed: int = -1  # the round in which the method asked for them; -1 = it has not
    owing: tuple[tuple[int, int], ...] = ()  # clients that could not be asked before a position ended, and that round

    def at(self, position: int) -> ClockState:
        """The state at a position: at its start nobody has replied or has been asked."""
        if position == self.position:
            return self
        return replace(self, position=position, replied=(), asked=(), surveyed=-1, owing=self.all_owing())

    def all_owing(self) -> tuple[tuple[int, int], ...]:
        """The clients that still work on a turn, and have not been asked for statistics of its position, though the
        method wants them."""
        late = {p.client for p in self.pending if p.what == TURN and p.position == self.position}
        fresh = late - set(self.asked) if self.surveyed >= 0 else set()
        return tuple(sorted({*self.owing, *((client, self.surveyed) for client in fresh)}))

    def without(self, arrived: Sequence[Pending]) -> ClockState:
        """The state without what has arrived. A client whose statistics of this position are lost is asked again."""
        keys = {p.key for p in arrived}
        others = tuple(p for p in self.pending if p.key not in keys)
        lost = {p.client for p in arrived if p.lost and p.position == self.position and p.what == STATISTICS}
        return replace(self, pending=others, asked=tuple(c for c in self.asked if c not in lost))


@dataclass(frozen=True)
class Work:
    """What a method asks of clients in a round."""

    opens: bool = False  # statistics before the round
    trains: bool = True
    moves_base: bool = True
    surveys: bool = False  # statistics after the round


@dataclass(frozen=True)
class Clock:
    """The clocks of all clients of a plan."""

    settings: ClockSettings
    plan: Plan
    epochs: int
    weak_epochs: float = 1.0  # share of the epochs on the weakened task

    # -- how long clients take ----------------------------------------------------------------------------------------

    @cached_property
    def slow(self) -> np.ndarray:
        """Which clients are stragglers."""
        count = round_half_up(self.settings.stragglers * self.plan.clients)
        order = generator(self.plan.seed, "clock", "stragglers").permutation(self.plan.clients)
        slow = np.zeros(self.plan.clients, dtype=bool)
        slow[order[:count]] = True
        return slow

    @cached_property
    def factors(self) -> np.ndarray:
        """How many times as long as a typical client each one takes."""
        draws = generator(self.plan.seed, "clock", "speed").standard_normal(self.plan.clients)
        factors = np.exp(self.settings.spread * draws)
        return np.where(self.slow, self.settings.slowdown * factors, factors)

    def seconds(self, client: int, position: int, epochs: float) -> float:
        """How long a client takes for so many epochs over its examples of a position, and for the messages."""
        task = self.plan.orders[client, position]
        work = float(self.plan.counts[client, task]) * epochs * self.settings.example_seconds
        return float(self.factors[client]) * (self.settings.latency + work)

    def turn_seconds(self, client: int, position: int, trains: bool) -> float:
        """How long a turn takes."""
        if not trains:
            return self.seconds(client, position, 0)
        weak = self.plan.orders[client, position] == self.plan.settings.weak_task and self.weak_epochs < 1
        epochs = share_of(self.weak_epochs, self.epochs) if weak else self.epochs
        return self.seconds(client, position, epochs)

    @cached_property
    def phases(self) -> np.ndarray:
        """When each client's day begins."""
        draws: np.ndarray = generator(self.plan.seed, "clock", "day").random(self.plan.clients)
        return draws * self.settings.day

    def available_from(self, client: int, time: float) -> float:
        """The first moment from a time on at which a client can start."""
        if self.settings.available >= 1:
            return time
        hour = (time + float(self.phases[client])) % self.settings.day
        if hour < self.settings.available * self.settings.day:
            return time
        return time + self.settings.day - hour

    def is_lost(self, *address: object) -> bool:
        """Whether a reply is lost."""
        if not self.settings.dropout:
            return False
        return generator(self.plan.seed, "clock", "lost", *address).random() < self.settings.dropout

    # -- a synchronous round ------------------------------------------------------------------------------------------

    def round(self, state: ClockState, position: int, round: int, clients: Sequence[int], work: Work) -> ClockState:
        """The state after a synchronous round: the server waits for all, and asks again for what is lost."""
        state = state.at(position)
        if work.opens:
            state = self.wait(state, OPENING, clients, [self.measuring(state, c) for c in clients])
        state = self.wait(state, TURN, clients, [self.turn_seconds(c, position, work.trains) for c in clients])
        if work.moves_base:
            state = replace(state, asked=())
        if work.surveys:
            state = self.wait(state, STATISTICS, clients, [self.measuring(state, c) for c in clients])
            state = replace(state, asked=tuple(sorted({*state.asked, *clients})))
        return replace(state, updates=state.updates + 1)

    def measuring(self, state: ClockState, client: int) -> float:
        """How long statistics take. A client that has measured its examples under this base just sends them again."""
        return self.seconds(client, state.position, 0 if client in state.asked else MEASURING)

    def wait(self, state: ClockState, what: str, clients: Sequence[int], seconds: Sequence[float]) -> ClockState:
        """The state once all clients have replied."""
        ends = [state.time]
        for client, duration in zip(clients, seconds, strict=True):
            attempts = 1
            while self.is_lost(what, client, state.updates, attempts):
                attempts += 1
            ends.append(self.available_from(client, state.time) + attempts * duration)
        return replace(state, time=max(ends))
