"""One message to each of some clients, and what came back of it: taken, refused with a reason, or nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Message

from profcil.deploy.mailbox import place
from profcil.deploy.wire import Answer, Ask, Unreadable, payload_bytes, read_answer, wire_bytes
from profcil.engine.channel import COUNT_BYTES, When
from profcil.engine.payload import Reply
from profcil.engine.reply_checks import Terms, fault


@dataclass
class Exchange:
    """One message to each of some clients, and what has come back."""

    what: str  # turn or survey
    when: When
    asks: Mapping[int, Ask]
    terms: Mapping[int, Terms]
    done: dict[int, Reply] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    kept: set[int] = field(default_factory=set)  # clients that have a new private memory
    wire: dict[str, int] = field(default_factory=lambda: {"down": 0, "up": 0})  # bytes as Flower sends them

    @property
    def silent(self) -> list[int]:
        return sorted(self.asks.keys() - self.done.keys() - self.refused.keys())

    @property
    def payload(self) -> dict[str, int]:
        """Bytes as the ledger counts them."""
        down = sum(payload_bytes(a.blocks) for a in self.asks.values())
        return {"down": down, "up": sum(payload_bytes(r.blocks) + COUNT_BYTES for r in self.done.values())}

    def hear(self, client: int, message: Message) -> str:
        """Takes a reply, or says why not; gives the kind of the client's own trouble, if it has any."""
        self.wire["up"] += wire_bytes([message])
        try:
            if message.has_error():
                raise Unreadable(f"the client failed ({message.error.reason})")
            answer = read_answer(message.content)
        except Unreadable as error:
            self.refused[client] = str(error)
            return ""
        reason = answer.trouble or mistaken(answer, client, self.when) or fault(answer.reply, self.terms[client])
        if reason:
            self.refused[client] = reason
            return answer.kind
        self.done[client] = answer.reply
        if answer.kept:
            self.kept.add(client)
        return ""

    def told(self, seconds: float) -> dict[str, Any]:
        """As an event."""
        refused = {str(c): reason for c, reason in sorted(self.refused.items())}
        who = {"answered": sorted(self.done), "silent": self.silent, "refused": refused}
        bytes = {"payload": self.payload, "wire": dict(self.wire)}
        return {"event": "asked", **place(self.when), **who, **bytes, "seconds": round(seconds, 3)}


def mistaken(answer: Answer, client: int, when: When) -> str:
    if answer.when != when:
        return f"it answers {answer.when.stage} {answer.when.round} of position {answer.when.position}"
    return "" if answer.reply.client == client else f"it answers as client {answer.reply.client}"
