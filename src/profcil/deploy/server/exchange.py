"""One message to each of several clients, and the outcome of each: accepted, refused with a reason, or no reply."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from flwr.app import Message

from profcil.deploy.encoded_blocks import WrongEncoding, read_blocks
from profcil.deploy.server.mailbox import event_fields
from profcil.deploy.status import from_one
from profcil.deploy.wire import Request, Response, UnreadableMessage, payload_bytes, read_response, wire_bytes
from profcil.engine.channel import COUNT_BYTES, Coding, Reply, When
from profcil.engine.reply_checks import ReplyRequirements, fault
from profcil.io.texts import one_line


@dataclass
class Exchange:
    """The requests to several clients and the replies received so far."""

    action: str  # turn or survey
    when: When
    requests: Mapping[int, Request]
    terms: Mapping[int, ReplyRequirements]  # the form that each reply must have
    most_bytes: float = math.inf  # of one reply
    coding: Coding = field(default_factory=dict)  # how the numbers of replies are encoded
    accepted: dict[int, Reply] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)  # client → reason
    false: set[int] = field(default_factory=set)  # the refused clients whose replies have the wrong content
    with_private: set[int] = field(default_factory=set)  # clients that stored new private tensors
    diverged: set[int] = field(default_factory=set)  # clients that claim a divergence
    reply_bytes: int = 0  # of the accepted replies, as the ledger counts them
    wire: dict[str, int] = field(default_factory=lambda: {"down": 0, "up": 0})  # bytes as Flower sends them

    @property
    def silent(self) -> list[int]:
        """The clients without a reply."""
        return sorted(self.requests.keys() - self.accepted.keys() - self.refused.keys())

    @property
    def payload(self) -> dict[str, int]:
        """Bytes as the ledger counts them."""
        down = sum(payload_bytes(request.blocks) for request in self.requests.values())
        return {"down": down, "up": self.reply_bytes}

    def receive(self, client: int, message: Message) -> None:
        """Accepts or refuses a reply."""
        try:
            if message.has_error():
                raise UnreadableMessage(f"the client failed ({message.error.reason})")
            response = read_response(message.content, self.most_bytes)
        except UnreadableMessage as error:
            self.refused[client] = one_line(error)
            return
        self.wire["up"] += wire_bytes([message])
        if reason := response.error or mismatch(response, client, self.when):
            self.refused[client] = one_line(reason)
            if response.error_kind == "diverged":
                self.diverged.add(client)
            return
        try:
            reply = replace(response.reply, blocks=read_blocks(response.reply.blocks, self.coding))
            reason = fault(reply, self.terms[client])
        except WrongEncoding as error:
            reason = str(error)
        if reason:
            self.refused[client] = one_line(reason)
            self.false.add(client)
            return
        self.accepted[client] = reply
        self.reply_bytes += payload_bytes(response.reply.blocks) + COUNT_BYTES
        if response.has_private:
            self.with_private.add(client)

    @property
    def most_diverged(self) -> bool:
        """Whether most of the clients claim a divergence. A single claim has no evidence, and may be a lie."""
        return 2 * len(self.diverged) > len(self.requests)

    def as_event(self, seconds: float) -> dict[str, Any]:
        """The outcome as an event for the run folder."""
        return {
            "event": "asked",
            **event_fields(self.when),
            "answered": sorted(self.accepted),
            "silent": self.silent,
            "refused": {str(c): reason for c, reason in sorted(self.refused.items())},
            "payload": self.payload,
            "wire": dict(self.wire),
            "seconds": round(seconds, 3),
        }


def mismatch(response: Response, client: int, when: When) -> str:
    """Says if a response belongs to another round or another client; empty if it does not."""
    if response.when != when:
        other = response.when
        return f"the reply is for {other.stage} {from_one(other.round)} of position {from_one(other.position)}"
    if response.reply.client != client:
        return f"the reply is from client {response.reply.client}"
    return ""
