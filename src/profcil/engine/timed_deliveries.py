"""Replies that arrive when simulated clocks say so.

A reply is computed when its turn starts, from the model that the client was sent, and waits in the run's state until it
arrives. So a run that was saved with replies on their way resumes to the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from profcil.engine.arrivals import Key, Parcel, bytes_of, make_clock, time_facts
from profcil.engine.channel import Inbox, Reply
from profcil.engine.client_exchange import note_memory
from profcil.protocol.clocks import TURN, ClockState, Pending

if TYPE_CHECKING:
    from profcil.engine.buffered_round import Asked, BufferedRound, Delivery
    from profcil.engine.world import World


class TimedDeliveries:
    """The deliveries of one round of a simulation."""

    def __init__(self, buffered: BufferedRound) -> None:
        self.buffered = buffered
        self.parcels = dict(buffered.before.parcels)
        when = buffered.when
        clock = make_clock(buffered.world)
        self.update = clock.update(buffered.before.clock, when.position, when.round, buffered.work, buffered.is_last)

    def opening(self) -> list[Delivery]:
        self.measure(self.update.opening)
        return self.arrived(self.update.opened)

    def turns(self) -> list[Delivery]:
        self.start(self.update.started)
        return self.arrived(self.update.arrived)

    def statistics(self) -> list[Delivery]:
        self.measure(self.update.asked)
        return self.arrived(self.update.in_time)

    def oldest_base(self) -> int | None:
        return min((parcel.version for (_, what, _), parcel in self.parcels.items() if what != TURN), default=None)

    def left(self) -> tuple[ClockState, Mapping[Key, Parcel]]:
        return self.update.after, self.parcels

    def start_bytes(self) -> int:
        return bytes_of(parcel.start for parcel in self.parcels.values())

    def facts(self) -> Mapping[str, Any]:
        return time_facts(self.buffered.before.clock, self.update.after)

    # -- replies ------------------------------------------------------------------------------------------------------

    def start(self, turns: Sequence[Pending]) -> None:
        """Computes the turns that start now. One whose reply will be lost is sent its blocks, and is not computed."""
        buffered = self.buffered
        world = buffered.world
        state = buffered.state
        asked = buffered.ask_turns(turns)
        computed = world.fleet.turns(world, buffered.method, state, asked.when, kept(asked))
        for client in sorted(computed):
            if computed[client].private is not None:
                state.private[client] = dict(computed[client].private or {})
        self.store(asked, computed)

    @torch.no_grad()
    def measure(self, surveys: Sequence[Pending]) -> None:
        """Computes the statistics that clients are asked for now. Those of an earlier position are computed apart."""
        buffered = self.buffered
        world = buffered.world
        for asked in buffered.ask_statistics(surveys):
            with apart(world, asked.when.position < buffered.when.position):
                computed = world.fleet.surveys(world, buffered.method, buffered.state, asked.when, kept(asked))
            self.store(asked, computed)

    def store(self, asked: Asked, computed: Mapping[int, Reply]) -> None:
        """Keeps the replies until they arrive. A client that diverged has none."""
        note_memory(self.buffered.state, computed)
        for p in asked.pending:
            if p.client in computed and not p.lost:
                self.parcels[p.key] = self.buffered.parcel(asked, p, computed[p.client])

    def arrived(self, arrived: Sequence[Pending]) -> list[Delivery]:
        return [(p, self.parcels.pop(p.key, None)) for p in arrived]


@contextmanager
def apart(world: World, is_apart: bool) -> Iterator[None]:
    """Keeps what clients have computed for the present position apart."""
    features = world.features
    known = world.kept
    if is_apart:
        world.features = {}
        world.kept = (None, {})
    yield
    if is_apart:
        world.features = features
        world.kept = known


def kept(asked: Asked) -> dict[int, Inbox]:
    """The inboxes of those whose replies will arrive."""
    lost = {p.client for p in asked.pending if p.lost}
    return {c: inbox for c, inbox in asked.inboxes.items() if c not in lost}
