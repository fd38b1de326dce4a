"""A secure sum over Flower, as the server collects it: four exchanges of messages with the clients that are left.

The server receives keys, encrypted shares, masked numbers and revealed shares, and never a reply. A client without a
valid answer in one exchange is not asked in the next one.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Message

from profcil.deploy.server.exchange import mismatch
from profcil.deploy.server.mailbox import Mailbox, event_fields
from profcil.deploy.sum_messages import (
    MESSAGE_TYPE,
    SumMessage,
    entries_size,
    joined,
    joined_ids,
    read_data,
    read_sum_head,
    split,
    sum_records,
)
from profcil.deploy.wire import Request, SumRequest, UnreadableMessage, payload_bytes, read_response, wire_bytes
from profcil.engine.channel import When
from profcil.engine.summed_replies import SumLayout
from profcil.errors import Failure
from profcil.io.texts import one_line
from profcil.privacy.secure_sum import masks
from profcil.privacy.secure_sum.collection import SecureSum, Sent, collect
from profcil.privacy.secure_sum.protocol import KEYS_BYTES, Messages, Terms

Wait = Callable[[dict[str, int], Callable[[int, Message], None], When], None]  # see `FlowerFleet.wait`


def make_sum_request(layout: SumLayout, members: Collection[int]) -> SumRequest:
    """A new sum of some clients."""
    return SumRequest(secrets.token_hex(16), tuple(sorted(members)), layout.classes, layout.shapes)


@dataclass
class RemoteSum:
    """One attempt at a secure sum: the members of `collect`, and what became of each client."""

    action: str  # turn or survey
    when: When
    requests: Mapping[int, Request]
    asked: SumRequest
    terms: Terms
    numbers: int  # in a client's vector
    mailbox: Mailbox
    nodes: Mapping[int, int]  # by client
    ttl: float
    wait: Wait
    sent: list[Sent] = field(default_factory=list)
    refused: dict[int, str] = field(default_factory=dict)  # client → reason
    lost: set[int] = field(default_factory=set)  # clients without an answer
    diverged: set[int] = field(default_factory=set)  # clients that claim a divergence
    stored_private: set[int] = field(default_factory=set)  # clients that stored new private tensors
    answered: dict[str, int] = field(default_factory=dict)  # exchange → number of valid answers
    accepted: tuple[int, ...] = ()  # the clients whose numbers are in the sum
    wire: dict[str, int] = field(default_factory=lambda: {"down": 0, "up": 0})  # bytes as Flower sends them

    def collect(self) -> SecureSum:
        """The sum. Raises `SumFailed` if too few clients are left."""
        done = collect(self.terms, self, self.sent)
        self.accepted = done.clients
        return done

    def collect_nothing(self) -> tuple[int, ...]:
        """The clients that did what they were asked for, where none of them has numbers to add."""
        self.accepted = tuple(sorted(self.keys()))
        return self.accepted

    # -- the four exchanges -------------------------------------------------------------------------------------------

    def keys(self) -> dict[int, bytes]:
        messages = {
            c: self.mailbox.make_message(self.action, request, self.nodes[c], self.ttl)
            for c, request in self.requests.items()
            if c in self.nodes
        }
        return self.exchange("keys", messages, self.read_keys)

    def shares(self, keys: Messages) -> dict[int, Messages]:
        def read(client: int, data: bytes) -> Messages:
            return expect(split(data, "shares"), set(keys) - {client})

        most = entries_size("shares", len(keys) - 1)
        return self.ask("shares", dict.fromkeys(keys, joined(keys)), most, read)

    def masked(self, delivered: Mapping[int, Messages]) -> dict[int, bytes]:
        length = self.numbers * self.terms.width

        def read(client: int, data: bytes) -> bytes:
            if len(data) != length:
                raise ValueError(f"it has {len(data)} bytes of masked numbers where {length} were expected")
            return data

        self.sharing = set(delivered)
        return self.ask("masked", {c: joined(shares) for c, shares in delivered.items()}, length, read)

    def recovery(self, arrived: Collection[int]) -> dict[int, Messages]:
        def read(client: int, data: bytes) -> Messages:
            return expect(split(data, "recovery"), self.sharing)

        most = entries_size("recovery", len(self.sharing))
        return self.ask("recovery", dict.fromkeys(arrived, joined_ids(arrived)), most, read)

    # -- one exchange -------------------------------------------------------------------------------------------------

    def ask(
        self, stage: str, data: Mapping[int, bytes], most: int, read: Callable[[int, bytes], Any]
    ) -> dict[int, Any]:
        """Sends each client its data, and reads the answers, each of at most so many bytes."""

        def read_message(client: int, message: Message) -> Any:
            head = read_sum_head(message.content)
            if head.error:
                raise ValueError(head.error)
            if (head.sum, head.stage, head.client) != (self.asked.id, stage, client):
                raise ValueError(f"the answer is of client {head.client} to another message of a secure sum")
            return read(client, read_data(message.content, most))

        run = next(iter(self.requests.values())).facts["run"]
        messages = {
            c: self.mailbox.address(
                sum_records(SumMessage(c, run, self.asked.id, stage, part)),
                self.nodes[c],
                MESSAGE_TYPE,
                self.ttl,
                self.when,
            )
            for c, part in data.items()
        }
        return self.exchange(stage, messages, read_message)

    def exchange(
        self, stage: str, messages: Mapping[int, Message], read: Callable[[int, Message], Any]
    ) -> dict[int, Any]:
        """The valid answers to some messages."""
        answers: dict[int, Any] = {}

        def receive(client: int, message: Message) -> None:
            try:
                if message.has_error():
                    raise UnreadableMessage(f"the client failed ({message.error.reason})")
                answers[client] = read(client, message)
                self.wire["up"] += wire_bytes([message])
            except (UnreadableMessage, ValueError, Failure) as error:
                self.refused[client] = one_line(error)

        pending, size = self.mailbox.post(messages)
        self.wire["down"] += size
        self.wait(pending, receive, self.when)
        self.lost |= messages.keys() - answers.keys() - self.refused.keys()
        self.answered[stage] = len(answers)
        return answers

    def read_keys(self, client: int, message: Message) -> bytes:
        """The keys in the response to a turn or a survey. Anything else in it is refused."""
        response = read_response(message.content, 0)
        if reason := response.error or mismatch(response, client, self.when):
            if response.error_kind == "diverged":
                self.diverged.add(client)
            raise ValueError(reason)
        reply = response.reply
        if reply.blocks or reply.notes or reply.samples:
            raise ValueError("it has a reply where only keys were asked for")
        if len(response.sum_keys) != (KEYS_BYTES if self.asked.shapes else 0):
            raise ValueError(f"it has keys of {len(response.sum_keys)} bytes")
        if self.asked.shapes:
            check_keys(response.sum_keys)
        if response.has_private:
            self.stored_private.add(client)
        return response.sum_keys

    # -- the outcome --------------------------------------------------------------------------------------------------

    @property
    def silent(self) -> list[int]:
        """The clients that did not answer one of the messages."""
        return sorted(self.lost | (self.requests.keys() - self.nodes.keys()))

    @property
    def with_private(self) -> set[int]:
        """The clients whose new private tensors belong to a reply that is used."""
        return self.stored_private & set(self.accepted)

    @property
    def most_diverged(self) -> bool:
        return 2 * len(self.diverged) > len(self.requests)

    @property
    def payload(self) -> dict[str, int]:
        """Bytes as the ledger counts them."""
        sizes = {"down": sum(payload_bytes(request.blocks) for request in self.requests.values()), "up": 0}
        for message in self.sent:
            sizes[message.direction] += message.bytes
        return sizes

    def as_event(self, seconds: float, failure: str = "") -> dict[str, Any]:
        """The outcome as an event for the run folder."""
        return {
            "event": "asked",
            **event_fields(self.when),
            "answered": list(self.accepted),
            "silent": self.silent,
            "refused": {str(c): reason for c, reason in sorted(self.refused.items())},
            "payload": self.payload,
            "wire": dict(self.wire),
            "seconds": round(seconds, 3),
            "sum": dict(self.answered),
            **({"given_up": failure} if failure else {}),
        }


def expect(entries: dict[int, bytes], clients: Collection[int]) -> dict[int, bytes]:
    """The entries of a message, which must be of these clients."""
    if entries.keys() != set(clients):
        raise ValueError("it has entries of other clients than those of the sum")
    return entries


def check_keys(keys: bytes) -> None:
    """Refuses public keys with which no secret can be agreed on: the other clients would stop at them."""
    own = secrets.token_bytes(masks.KEY_BYTES)
    for start in (0, masks.KEY_BYTES):
        masks.agree(own, keys[start : start + masks.KEY_BYTES])
