"""Sends requests over Flower's grid and fetches the replies. Late and duplicate replies are dropped and counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flwr.app import ArrayRecord, Message, RecordDict

from profcil.deploy.server.node_registry import RecordEvent
from profcil.deploy.wire import PARSE_ERRORS, Request, block_digest, request_records, to_array_record, wire_bytes
from profcil.engine.channel import Block, When
from profcil.io.texts import one_line

MESSAGE_TYPES = {"turn": "train.turn", "survey": "query.survey", "count": "query.count"}
Digested = tuple[Block, str]  # a block and its digest
Prepared = tuple[Block, ArrayRecord]  # a block, as it is sent, and its arrays


@dataclass
class Mailbox:
    """The server's messages to and from clients."""

    grid: Any
    record_event: RecordEvent
    counts: Counter[str] = field(default_factory=Counter)  # since the last `take_counts`
    overdue: dict[str, tuple[int, When]] = field(default_factory=dict)  # messages whose deadline has passed
    digested: dict[str, Digested] = field(default_factory=dict)  # by block name; shared by all receivers
    prepared: dict[str, Prepared] = field(default_factory=dict)  # the same

    def digest(self, name: str, block: Block) -> str:
        """The digest of a block, computed once for all receivers."""
        if name not in self.digested or self.digested[name][0] is not block:
            self.digested[name] = (block, block_digest(block))
        return self.digested[name][1]

    def arrays(self, name: str, block: Block) -> ArrayRecord:
        """The arrays of a block, made once for all receivers."""
        if name not in self.prepared or self.prepared[name][0] is not block:
            self.prepared[name] = (block, to_array_record(block))
        return self.prepared[name][1]

    def send(
        self, action: str, requests: Mapping[int, Request], nodes: Mapping[int, int], ttl: float
    ) -> tuple[dict[str, int], int]:
        """Sends one message to each client. Returns the client of each message id, and the bytes on the wire."""
        return self.post({c: self.make_message(action, request, nodes[c], ttl) for c, request in requests.items()})

    def post(self, messages: Mapping[int, Message]) -> tuple[dict[str, int], int]:
        """Sends a message to each client. Returns the client of each message id, and the bytes on the wire."""
        ids = self.grid.push_messages(list(messages.values()))
        return {id: c for id, c in zip(ids, messages, strict=True) if id}, wire_bytes(messages.values())

    def make_message(self, action: str, request: Request, node: int, ttl: float) -> Message:
        """The message of a request."""
        arrays = {name: self.arrays(name, block) for name, block in request.blocks.items()}
        return self.address(request_records(request, arrays), node, MESSAGE_TYPES[action], ttl, request.when)

    def address(self, content: RecordDict, node: int, kind: str, ttl: float, when: When) -> Message:
        """A message to a node."""
        group = f"{when.stage} {when.position}.{when.round}"
        return Message(content, node, kind, ttl=ttl, group_id=group)

    def fetch(self, pending: Mapping[str, int]) -> dict[str, Message]:
        """New replies to pending messages, by message id. Duplicates and replies to overdue messages are dropped."""
        found: dict[str, Message] = {}
        for message in self.pull([*pending, *self.overdue]):
            id = message.metadata.reply_to_message_id
            if id in pending and id not in found:
                found[id] = message
            elif message.has_content():
                self.drop(id, pending)
            self.overdue.pop(id, None)
        return found

    def pull(self, ids: Sequence[str]) -> list[Message]:
        """The messages that have arrived. If Flower cannot decode one, those that came with it are lost, too."""
        try:
            return list(self.grid.pull_messages(ids))
        except PARSE_ERRORS as error:
            if isinstance(error, OSError):  # the network
                raise
            self.record_event({"event": "unreadable", "reason": one_line(f"{type(error).__name__}: {error}")})
            return []

    def drop(self, id: str, pending: Mapping[str, int]) -> None:
        """Counts a reply that is not used, and records it as an event."""
        self.counts["late_replies"] += 1
        if id in self.overdue:
            client, when = self.overdue[id]
            self.record_event({"event": "late reply dropped", "client": client, **event_fields(when)})
        else:
            self.record_event({"event": "second reply dropped", "client": pending.get(id)})

    def take_counts(self) -> dict[str, float]:
        """The counts since the last call."""
        counts = self.counts
        self.counts = Counter()
        return {k: float(v) for k, v in counts.items()}


def event_fields(when: When) -> dict[str, Any]:
    """A moment of the stream as the fields of an event."""
    return {"stage": when.stage, "position": when.position, "round": when.round}
