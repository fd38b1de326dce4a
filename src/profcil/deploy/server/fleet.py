"""The fleet of a deployment: requests go to clients over Flower's grid, and replies are checked before they are used.

The training loop does not depend on any of this. Replies may arrive in any order; they are returned by client. Clients
without a reply, late replies and refused replies are recorded in the run folder and counted. Private tensors stay at
the client. The server only knows the id of those that belong to the client's last accepted reply.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flwr.app import Message

from profcil.deploy.encoded_blocks import as_received, coding_at
from profcil.deploy.policy import Policy
from profcil.deploy.server.exchange import Exchange
from profcil.deploy.server.live_deliveries import LiveDeliveries
from profcil.deploy.server.mailbox import Mailbox, event_fields
from profcil.deploy.server.node_registry import NodeRegistry, RecordEvent
from profcil.deploy.server.open_requests import OpenRequests
from profcil.deploy.server.sum_collector import SumCollector
from profcil.deploy.server.sums import RemoteSum
from profcil.deploy.wire import Request, SumRequest
from profcil.engine.buffered_round import BufferedRound
from profcil.engine.channel import Channel, Coding, Reply, When
from profcil.engine.expected_reply import ReplyForecast
from profcil.engine.fleet import Inboxes
from profcil.engine.packing import ClientBlocks
from profcil.engine.run_state import RunState
from profcil.engine.world import World
from profcil.errors import Diverged, Failure

POLL_SECONDS = 0.2  # between two queries for new messages
PRIVATE_ID = "*private"  # the key of a client's private id in `RunState.held`; no block has this name
RESUME_ADVICE = (
    "everything up to the last complete round is saved; start the nodes and run the same app again to continue"
)


class TooFewClients(Failure):
    """Too few clients are connected or replied. The run can be resumed."""


def too_few_replies(found: str, needed: int) -> TooFewClients:
    return TooFewClients(f"{found} clients sent a usable reply, {needed} are needed; {RESUME_ADVICE}")


class FlowerFleet:
    """A fleet whose clients are nodes of a Flower federation."""

    def __init__(
        self,
        mailbox: Mailbox,
        registry: NodeRegistry,
        policy: Policy,
        run_facts: Mapping[str, str],
        record_event: RecordEvent,
    ) -> None:
        self.mailbox = mailbox
        self.registry = registry
        self.policy = policy
        self.run_facts = run_facts  # run, plan and data, sent with each request
        self.record_event = record_event
        self.forecast = ReplyForecast()
        self.started = False
        self.false: dict[int, str] = {}  # clients with false replies since the loop last asked, and the reasons
        self.sites: dict[str, Mapping[str, str]] = {}  # how each client that was connected computes
        self.sums = SumCollector(self)
        self.open_requests = OpenRequests(self)

    # -- connected clients ------------------------------------------------------------------------------------------

    def reach(self, world: World, state: RunState, when: When, clients: Sequence[int]) -> Sequence[int]:
        connected = self.connected(world, clients, len(clients))
        if absent := sorted(set(clients) - set(connected)):
            self.record_event({"event": "absent", **event_fields(when), "clients": absent})
        for client in connected:
            self.note_client(world, state, when, client)
        return connected

    def connected(self, world: World, clients: Sequence[int], at_start: int) -> list[int]:
        """The connected ones of some clients. Waits for so many of them at the start, later only for the minimum."""
        needed = self.needed(world, clients)
        connected = self.wait_for(clients, needed if self.started else at_start)
        if len(connected) < needed:
            raise TooFewClients(
                f"{len(connected)} of {len(clients)} clients are connected, {needed} are needed; {RESUME_ADVICE}"
            )
        self.started = True
        return connected

    def note_client(self, world: World, state: RunState, when: When, client: int) -> None:
        """Before a request to a client: notes which blocks it holds, and how it computes."""
        self.forget_missing_blocks(state, client, coding_at(world.config.channel, when))
        self.note_execution(client)

    def needed(self, world: World, clients: Sequence[int]) -> int:
        """How many of some clients a round needs: for a secure sum the least number of a sum, if there are so many."""
        settings = world.config.privacy
        least = max(self.policy.min_replies, settings.sum_clients if settings.secure_sum else 0)
        return least if least <= len(clients) else min(self.policy.min_replies, len(clients))

    def wait_for(self, clients: Sequence[int], enough: int) -> list[int]:
        """The connected clients, as soon as there are enough or the time to join has passed."""
        end = time.monotonic() + self.policy.join
        while True:
            self.registry.update()
            connected = [c for c in clients if self.registry.node_of(c) is not None]
            if len(connected) >= enough or time.monotonic() > end:
                return connected
            time.sleep(POLL_SECONDS)

    def forget_missing_blocks(self, state: RunState, client: int, coding: Coding) -> None:
        """For a client that has just joined: keeps only those blocks as held that it reported with the same digest."""
        reported = self.registry.joined.pop(client, None)
        if reported is None:
            return
        blocks = {n: as_received(state.server.blocks[n], coding) for n in reported if n in state.server.blocks}
        same = {n for n, block in blocks.items() if self.mailbox.digest(n, block) == reported[n]}
        held = state.held.get(client, {})
        state.held[client] = {n: version for n, version in held.items() if n in same or n == PRIVATE_ID}

    def note_execution(self, client: int) -> None:
        """Stores how a client's node computes. A later node of the same client replaces it."""
        node = self.registry.node_of(client)
        if node is not None:
            self.sites[str(client)] = dict(self.registry.hellos[node].execution)

    # -- requests ---------------------------------------------------------------------------------------------------

    def turns(self, world: World, method: Any, state: RunState, when: When, inboxes: Mapping) -> Mapping[int, Reply]:
        return self.collect("turn", world, method, state, when, inboxes)

    def surveys(self, world: World, method: Any, state: RunState, when: When, inboxes: Mapping) -> Mapping[int, Reply]:
        return self.collect("survey", world, method, state, when, inboxes)

    def collect(
        self, action: str, world: World, method: Any, state: RunState, when: When, inboxes: Mapping[int, ClientBlocks]
    ) -> dict[int, Reply]:
        """Requests replies until there are enough. Clients without a usable reply are asked again in each attempt."""
        if not inboxes:
            return {}
        if world.config.privacy.secure_sum:
            return self.sums.collect(action, world, method, state, when, inboxes)
        limit = self.policy.norm_limit
        terms = {c: self.forecast.terms(action, world, method, when, c, inbox, limit) for c, inbox in inboxes.items()}
        accepted: dict[int, Reply] = {}
        needed = min(self.policy.min_replies, len(inboxes))
        for attempt in range(self.policy.attempts):
            parcels = inboxes
            if attempt:
                remaining = self.reach(world, state, when, [c for c in inboxes if c not in accepted])
                parcels = {c: inboxes[c].whole() for c in remaining}
            requests = {
                c: self.make_request(world, state, when, c, blocks_for_client)
                for c, blocks_for_client in parcels.items()
            }
            most_bytes = self.policy.max_message_mb * 1e6
            coding = coding_at(world.config.channel, when)
            exchange = Exchange(action, when, requests, {c: terms[c] for c in parcels}, most_bytes, coding)
            self.run(exchange)
            if exchange.most_diverged and world.config.train.on_divergence == "fail":
                raise Diverged(exchange.refused[min(exchange.diverged)])
            self.note_outcome(exchange, state, again=attempt > 0)
            accepted |= exchange.accepted
            self.false |= {c: exchange.refused[c] for c in exchange.false}
            self.false = {c: reason for c, reason in self.false.items() if c not in exchange.accepted}
            if len(accepted) >= needed:
                return accepted
        raise too_few_replies(f"{len(accepted)} of {len(inboxes)}", needed)

    def make_request(
        self,
        world: World,
        state: RunState,
        when: When,
        client: int,
        blocks_for_client: ClientBlocks,
        summed: SumRequest | None = None,
    ) -> Request:
        return Request(
            client=client,
            when=when,
            digests={name: self.mailbox.digest(name, block) for name, block in blocks_for_client.items()},
            blocks=blocks_for_client.message(),
            patches=tuple(blocks_for_client.patches),
            private_id=state.held.get(client, {}).get(PRIVATE_ID, 0),
            next_private_id=when.position * when.rounds + when.round + 1,
            seen=() if when.before_stream else tuple(sorted(world.plan.seen(when.position))),
            facts={**self.run_facts, **self.site_facts(world, client)},
            sum=summed,
            withheld=None if world.withheld is None else tuple(sorted(world.withheld)),
        )

    def site_facts(self, world: World, client: int) -> dict[str, str]:
        """What is sent to a site about a run that has grown: the terms, and from which position on it takes part."""
        joined = world.plan.joined[client] if world.plan.joined else 0
        terms = {name: str(value) for name, value in self.registry.terms.items() if name == "federation"}
        return {**terms, "joined": str(joined)} if joined else terms

    def run(self, exchange: Exchange) -> None:
        """Sends the requests and waits until all clients have replied or the deadline has passed."""
        start = time.monotonic()
        nodes = {c: node for c in exchange.requests if (node := self.registry.node_of(c)) is not None}
        ttl = 2 * self.policy.deadline
        pending, exchange.wire["down"] = self.mailbox.send(exchange.action, exchange.requests, nodes, ttl)
        self.wait(pending, exchange.receive, exchange.when)
        self.record_event(exchange.as_event(time.monotonic() - start))

    def wait(self, pending: dict[str, int], receive: Callable[[int, Message], None], when: When) -> None:
        """Waits until all messages have been answered or the deadline has passed."""
        end = time.monotonic() + self.policy.deadline
        while True:
            for id, message in self.mailbox.fetch(pending).items():
                receive(pending.pop(id), message)
            if not pending or time.monotonic() > end:
                break
            self.pause()
        for id, client in pending.items():
            self.give_up(id, client, when)

    def give_up(self, id: str, client: int, when: When) -> None:
        """No longer waits for the reply to a message. The client's node is sent a hello before it is asked again."""
        self.mailbox.overdue[id] = (client, when)
        node = self.registry.node_of(client)
        if node is not None:
            self.registry.remove(node)

    def summed(
        self, world: World, method: Any, channel: Channel, when: When, inboxes: Inboxes, replies: Mapping[int, Reply]
    ) -> list[Reply]:
        """The secure sum that `turns` or `surveys` collected."""
        return self.sums.take(channel, when)

    def rare_classes(
        self, world: World, state: RunState, channel: Channel, clients: Sequence[int], when: When
    ) -> frozenset[int]:
        return self.sums.count(world, state, when, {c: ClientBlocks({}, {}) for c in clients})

    def deliveries(self, buffered: BufferedRound) -> LiveDeliveries:
        """The replies of an asynchronous round, as they come."""
        deliveries = LiveDeliveries(self, buffered)
        deliveries.begin()
        return deliveries

    def stop(self, replies: int, needed: int) -> None:
        """Ends a run that has too few replies for an update."""
        raise too_few_replies(str(replies), needed)

    def pause(self) -> None:
        """Waits a moment before the next query for messages."""
        time.sleep(POLL_SECONDS)

    # -- accounts -----------------------------------------------------------------------------------------------------

    def note_outcome(self, exchange: Exchange | RemoteSum, state: RunState, again: bool) -> None:
        """Updates which blocks each client holds, and the counts of the round."""
        for c in exchange.with_private:
            state.held[c] = {**state.held.get(c, {}), PRIVATE_ID: exchange.requests[c].next_private_id}
        for c in (*exchange.silent, *exchange.refused):  # it is unknown which blocks such a client holds
            state.held[c] = {n: v for n, v in state.held.get(c, {}).items() if n == PRIVATE_ID}
        counts = self.mailbox.counts
        payload = exchange.payload
        counts["envelope_bytes"] += sum(exchange.wire.values()) - sum(payload.values())
        counts["resent_bytes"] += payload["down"] if again else 0
        counts["refused_replies"] += len(exchange.refused)
        counts["silent_clients"] += len(exchange.silent)

    def facts(self) -> Mapping[str, float]:
        return self.mailbox.take_counts()

    def false_replies(self) -> Mapping[int, str]:
        found = self.false
        self.false = {}
        return found
