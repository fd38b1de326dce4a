"""Who computes the turns and surveys of clients: a fleet.

The loop decides which clients are asked for what. A fleet says which of them can be reached and returns their replies.
`LocalFleet` is the simulation, with all clients in this process. A deployment is another fleet for the same loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from profcil.engine.channel import Channel, Inbox, Reply, When
from profcil.engine.executor import make_guard
from profcil.engine.expected_reply import ReplyForecast
from profcil.engine.sum_support import rare_classes
from profcil.engine.summed_replies import sum_replies

if TYPE_CHECKING:
    from profcil.engine.buffered_round import BufferedRound, Deliveries
    from profcil.engine.run_state import RunState
    from profcil.engine.world import World


Inboxes = Mapping[int, Inbox]  # by client


class Fleet(Protocol):
    """Computes turns and surveys. A client without a reply could not answer, or its reply is not usable."""

    def reach(self, world: World, state: RunState, when: When, clients: Sequence[int]) -> Sequence[int]:
        """The clients that can be asked now. Nothing is sent to the others, and nothing is metered for them."""

    def turns(
        self, world: World, method: Any, state: RunState, when: When, inboxes: Inboxes
    ) -> Mapping[int, Reply]: ...

    def surveys(
        self, world: World, method: Any, state: RunState, when: When, inboxes: Inboxes
    ) -> Mapping[int, Reply]: ...

    def summed(
        self, world: World, method: Any, channel: Channel, when: When, inboxes: Inboxes, replies: Mapping[int, Reply]
    ) -> list[Reply]:
        """The secure sum of the replies as a list of one reply, or of none. The ledger counts its messages. `inboxes`
        are of all clients that were asked."""
        ...

    def rare_classes(
        self, world: World, state: RunState, channel: Channel, clients: Sequence[int], when: When
    ) -> frozenset[int]:
        """The classes with too few examples at these clients together, by a secure sum of their counts."""
        ...

    def deliveries(self, buffered: BufferedRound) -> Deliveries:
        """How the replies of an asynchronous round arrive."""

    def facts(self) -> Mapping[str, float]:
        """Facts of the last round for the log."""

    def false_replies(self) -> Mapping[int, str]:
        """The clients whose replies were refused since the last call because their values are false, and why."""


class LocalFleet:
    """All clients in this process. Their private tensors are part of the run's state."""

    def __init__(self) -> None:
        self.forecast = ReplyForecast()  # of what clients may add to a secure sum

    def reach(self, world: World, state: RunState, when: When, clients: Sequence[int]) -> Sequence[int]:
        return clients

    def turns(self, world: World, method: Any, state: RunState, when: When, inboxes: Inboxes) -> Mapping[int, Reply]:
        clients = {c: world.client(c, when, state.private.get(c)) for c in inboxes}
        started = {c: method.turn(clients[c], inboxes[c]) for c in inboxes}
        replies = world.executor(started, make_guard(world.config.train, when))
        return {c: world.protected(clients[c], inboxes[c], reply) for c, reply in replies.items()}

    def surveys(self, world: World, method: Any, state: RunState, when: When, inboxes: Inboxes) -> Mapping[int, Reply]:
        replies = {}
        for c, inbox in inboxes.items():
            client = world.client(c, when, state.private.get(c))
            replies[c] = world.protected(client, inbox, method.survey(client, inbox))
        return replies

    def summed(
        self, world: World, method: Any, channel: Channel, when: When, inboxes: Inboxes, replies: Mapping[int, Reply]
    ) -> list[Reply]:
        if not replies:
            return []
        expected = self.forecast.summed(world, method, when, inboxes)
        config = world.config
        addends = (method.additive, world.current_classes(when), config.privacy, config.seed)
        return sum_replies(replies, expected, *addends, channel, when, world.protection, inboxes)

    def rare_classes(
        self, world: World, state: RunState, channel: Channel, clients: Sequence[int], when: When
    ) -> frozenset[int]:
        return rare_classes(world, channel, clients, when)

    def deliveries(self, buffered: BufferedRound) -> Deliveries:
        from profcil.engine.timed_deliveries import TimedDeliveries

        return TimedDeliveries(buffered)

    def facts(self) -> Mapping[str, float]:
        return {}

    def false_replies(self) -> Mapping[int, str]:
        return {}
