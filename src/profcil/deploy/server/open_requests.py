"""Requests whose replies are taken as they come. A client is sent one at a time; its next one waits at the server.

A request ends with a usable reply, with one that is refused, or without one: its node has left, or the deadline has
passed. All stay open from one round to the next.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flwr.app import Message

from profcil.deploy.encoded_blocks import coding_at
from profcil.deploy.server.exchange import Exchange
from profcil.engine.arrivals import Parcel, bytes_of
from profcil.engine.buffered_round import Asked, BufferedRound
from profcil.engine.client_exchange import note_memory
from profcil.engine.packing import ClientBlocks
from profcil.engine.reply_checks import ReplyRequirements
from profcil.protocol.clocks import TURN, Pending

if TYPE_CHECKING:
    from profcil.deploy.server.fleet import FlowerFleet


@dataclass
class OpenRequest:
    """A request to one client."""

    pending: Pending
    asked: Asked
    terms: ReplyRequirements
    began: float  # when it was asked for, or when its client was free, or when it was sent: whatever is the latest
    ended: float = 0.0  # both in seconds of a steady clock
    exchange: Exchange | None = None  # once it is sent
    node: int = -1
    id: str = ""  # of the message
    parcel: Parcel | None = None  # the reply, once it has arrived

    @property
    def client(self) -> int:
        return self.pending.client

    @property
    def inbox(self) -> ClientBlocks:
        found = self.asked.inboxes[self.client]
        assert isinstance(found, ClientBlocks)
        return found

    @property
    def reason(self) -> str:
        """Why the reply was refused; empty if it was not."""
        return self.exchange.refused.get(self.client, "") if self.exchange else ""


@dataclass
class Traffic:
    """What has been sent and received since the last event."""

    payload: dict[str, int] = field(default_factory=lambda: {"down": 0, "up": 0})
    wire: dict[str, int] = field(default_factory=lambda: {"down": 0, "up": 0})

    def add(self, exchange: Exchange, direction: str) -> None:
        self.payload[direction] += exchange.payload[direction]
        self.wire[direction] += exchange.wire[direction]


class OpenRequests:
    """The open requests of a fleet, in the order in which they were asked."""

    def __init__(self, fleet: FlowerFleet) -> None:
        self.fleet = fleet
        self.requests: list[OpenRequest] = []
        self.traffic = Traffic()

    def has(self, pending: Pending) -> bool:
        return any(r.pending.key == pending.key for r in self.requests)

    @property
    def turns(self) -> list[OpenRequest]:
        return [r for r in self.requests if r.pending.what == TURN]

    @property
    def statistics(self) -> list[OpenRequest]:
        return [r for r in self.requests if r.pending.what != TURN]

    def start_bytes(self) -> int:
        """The size of the models that turns on their way started from, each counted once."""
        inboxes = [r.inbox for r in self.turns]
        return bytes_of({name: b for name, b in inbox.items() if b.kind == "model"} for inbox in inboxes)

    # -- what is sent -------------------------------------------------------------------------------------------------

    def add(self, buffered: BufferedRound, asked: Asked) -> None:
        """Opens requests and sends those that can be sent."""
        world = buffered.world
        limit = self.fleet.policy.norm_limit
        for p in asked.pending:
            inbox = asked.inboxes[p.client]
            action = action_of(p)
            terms = self.fleet.forecast.terms(action, world, buffered.method, asked.when, p.client, inbox, limit)
            self.requests.append(OpenRequest(p, asked, terms, time.monotonic()))
        self.send(buffered)

    def send(self, buffered: BufferedRound) -> None:
        """Sends the oldest request of each client, if it is not sent yet and the client is connected."""
        oldest: dict[int, OpenRequest] = {}
        for request in self.requests:
            oldest.setdefault(request.client, request)
        for client, request in oldest.items():
            node = self.fleet.registry.node_of(client)
            if request.exchange is None and node is not None:
                self.send_to(node, request, buffered)

    def send_to(self, node: int, request: OpenRequest, buffered: BufferedRound) -> None:
        """Sends a request to a node. If the client no longer holds what was left out, all blocks are sent."""
        fleet = self.fleet
        world = buffered.world
        client = request.client
        when = request.asked.when
        held = buffered.state.held.get(client, {})
        is_known = all(block.version == held.get(name) for name, block in request.inbox.items())
        blocks = request.inbox if is_known else request.inbox.whole()
        message = fleet.make_request(world, buffered.state, when, client, blocks)
        coding = coding_at(world.config.channel, when)
        most_bytes = fleet.policy.max_message_mb * 1e6
        action = action_of(request.pending)
        exchange = Exchange(action, when, {client: message}, {client: request.terms}, most_bytes, coding)
        ids, exchange.wire["down"] = fleet.mailbox.send(action, exchange.requests, {client: node}, self.lifetime)
        fleet.mailbox.counts["resent_bytes"] += 0 if is_known else exchange.payload["down"]
        self.traffic.add(exchange, "down")
        request.exchange = exchange
        request.node = node
        request.began = time.monotonic()
        request.id = next(iter(ids), "")

    @property
    def lifetime(self) -> float:
        """The seconds for which Flower keeps a message."""
        return 2 * self.fleet.policy.deadline

    # -- what arrives -------------------------------------------------------------------------------------------------

    def receive(self, buffered: BufferedRound) -> list[OpenRequest]:
        """The requests that have ended since the last call, in the order in which their replies have arrived."""
        self.fleet.registry.update()
        by_id = {r.id: r for r in self.requests if r.id}
        found = self.fleet.mailbox.fetch({id: r.client for id, r in by_id.items()})
        ended = [by_id[id] for id in found]
        for id, message in found.items():
            self.read(buffered, by_id[id], message)
        lost = [r for r in self.requests if r not in ended and self.is_lost(r)]
        for request in lost:
            self.give_up(request)
        for request in (*ended, *lost):
            self.close(buffered, request)
        self.send(buffered)
        return [*ended, *lost]

    def read(self, buffered: BufferedRound, request: OpenRequest, message: Message) -> None:
        """Checks a reply and keeps it, unless it is refused."""
        exchange = request.exchange
        assert exchange is not None
        exchange.receive(request.client, message)
        self.traffic.add(exchange, "up")
        if request.client in exchange.accepted:
            reply = exchange.accepted[request.client]
            note_memory(buffered.state, {request.client: reply})
            request.parcel = buffered.parcel(request.asked, request.pending, reply)

    def is_lost(self, request: OpenRequest) -> bool:
        """Whether no reply is waited for any longer: the node has left, the message was not taken, or the deadline has
        passed. For a request that waits for its client's earlier one no deadline runs."""
        if request.exchange is None:
            earlier = next(r for r in self.requests if r.client == request.client)
            return earlier is request and self.is_overdue(request)
        gone = request.node not in self.fleet.registry.keys
        return gone or not request.id or self.is_overdue(request)

    def is_overdue(self, request: OpenRequest) -> bool:
        return time.monotonic() - request.began > self.fleet.policy.deadline

    def give_up(self, request: OpenRequest) -> None:
        if request.id:
            self.fleet.give_up(request.id, request.client, request.asked.when)

    def close(self, buffered: BufferedRound, request: OpenRequest) -> None:
        """Removes a request that has ended, and notes its outcome for the client."""
        self.requests.remove(request)
        request.ended = time.monotonic()
        if request.exchange is not None:
            self.fleet.note_outcome(request.exchange, buffered.state, again=False)
        for later in self.requests:
            if later.client == request.client and later.exchange is None:
                later.began = time.monotonic()


def action_of(pending: Pending) -> str:
    """What kind of message asks for a reply."""
    return "turn" if pending.what == TURN else "survey"


def arrival_fields(request: OpenRequest, updates: int) -> dict[str, Any]:
    """A reply that has arrived, for the log: from whom, to what, for which round, and its age when it is used."""
    when = request.asked.when
    return {
        "client": request.client,
        "what": request.pending.what,
        "position": when.position,
        "round": when.round,
        "age": max(0, updates - request.pending.update),
        "seconds": round(request.ended - request.began, 3),
    }
