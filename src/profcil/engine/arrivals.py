"""Rounds with clocks. A synchronous round is computed as always, and its simulated time is counted. In an asynchronous
one, replies join when they arrive.

What is done with replies is in `buffered_round`. The times of arrival come from simulated clocks (`timed_deliveries`),
or in a deployment from the clients. Replies on their way are part of the run's state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from profcil.engine.channel import Block, Channel, Reply, ServerState, When, stored_bytes
from profcil.engine.loop import compute_round
from profcil.engine.run_state import RunState
from profcil.protocol.buffered_clock import BufferedClock
from profcil.protocol.clocks import ClockState, Work

if TYPE_CHECKING:
    from profcil.engine.world import World
    from profcil.methods.base import Method

RoundFacts = dict[str, Any]
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
        return bytes_of(parcel.start for parcel in self.parcels.values())


def bytes_of(models: Iterable[Mapping[str, Block]]) -> int:
    """The size of some models, of which several may share a block."""
    return sum({(name, block.version): block.bytes for model in models for name, block in model.items()}.values())


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


def synchronous_round(
    world: World, method: Method, state: RunState, channel: Channel, clients: Sequence[int], when: When
) -> tuple[ServerState, RoundFacts]:
    """A synchronous round, and the simulated time that it takes."""
    arrivals = state.arrivals or Arrivals()
    work = work_of(method, when, method.opens(state.server, when))
    server, facts = compute_round(world, method, state, channel, clients, when)
    after = make_clock(world).round(arrivals.clock, when.position, when.round, clients, work)
    state.arrivals = replace(arrivals, clock=after)
    return server, facts | time_facts(arrivals.clock, after)


def asynchronous_round(
    world: World, method: Method, state: RunState, channel: Channel, clients: Sequence[int], when: When
) -> tuple[ServerState, RoundFacts]:
    """An asynchronous round, which is one update of the server. The rules say who takes part, not `clients`."""
    from profcil.engine.buffered_round import BufferedRound

    channel.dropped = {}
    world.forget_features({block.version for block in state.server.blocks.values()})
    with channel.round(range(world.plan.clients)):
        buffered = BufferedRound(world, method, state, channel, when)
        deliveries = world.fleet.deliveries(buffered)
        facts = buffered.run(deliveries)
    clock, parcels = deliveries.left()
    state.arrivals = Arrivals(clock, parcels, buffered.measured)
    state.server_bytes = max(state.server_bytes, stored_bytes(buffered.server.blocks) + deliveries.start_bytes())
    return buffered.server, {**facts, **channel.take_facts(), **world.fleet.facts(), **deliveries.facts()}


def time_facts(before: ClockState, after: ClockState) -> RoundFacts:
    """The simulated seconds of a round, and since the start of the stream."""
    return {"simulated_seconds": after.time - before.time, "simulated_time": after.time}
