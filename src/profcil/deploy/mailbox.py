"""The mailbox on Flower's grid: what is sent, what comes back for the present round, and what comes too late."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flwr.app import ArrayRecord, Message

from profcil.deploy.node_registry import Note
from profcil.deploy.wire import Ask, ask_records, record_of, seal, wire_bytes
from profcil.engine.channel import When
from profcil.engine.payload import Block

ACTIONS = {"turn": "train.turn", "survey": "query.survey"}


@dataclass
class Post:
    grid: Any
    note: Note
    counted: Counter[str] = field(default_factory=Counter)  # since they were last asked for
    late: dict[str, tuple[int, When]] = field(default_factory=dict)  # messages whose deadline has passed
    made: dict[str, tuple[Block, str, ArrayRecord]] = field(default_factory=dict)  # the same for every receiver

    def ready(self, name: str, block: Block) -> tuple[Block, str, ArrayRecord]:
        """A block with its digest and its arrays."""
        if name not in self.made or self.made[name][0] is not block:
            self.made[name] = (block, seal(block), record_of(block))
        return self.made[name]

    def send(self, what: str, asks: Mapping[int, Ask], nodes: Mapping[int, int], ttl: float) -> tuple[dict, int]:
        """One message to each client: the clients by message, and the bytes that Flower makes of it all."""
        messages = [self.message(what, ask, nodes[c], ttl) for c, ask in asks.items()]
        ids = self.grid.push_messages(messages)
        return {id: c for id, c in zip(ids, asks, strict=True) if id}, wire_bytes(messages)

    def message(self, what: str, ask: Ask, node: int, ttl: float) -> Message:
        arrays = {n: self.ready(n, b)[2] for n, b in ask.blocks.items()}
        group = f"{ask.when.stage} {ask.when.position}.{ask.when.round}"
        return Message(ask_records(ask, arrays), node, ACTIONS[what], ttl=ttl, group_id=group)

    def fetch(self, pending: Mapping[str, int]) -> dict[str, Message]:
        """What has come for this round. A second answer to the same message and answers to old ones are dropped."""
        found: dict[str, Message] = {}
        for message in self.grid.pull_messages([*pending, *self.late]):
            id = message.metadata.reply_to_message_id
            if id in pending and id not in found:
                found[id] = message
            elif message.has_content():
                client, when = self.late.get(id) or (pending.get(id), None)
                self.drop("late" if id in self.late else "second", client, when)
            self.late.pop(id, None)
        return found

    def drop(self, which: str, client: int | None, when: When | None) -> None:
        self.counted["late_replies"] += 1
        self.note({"event": f"{which} reply dropped", "client": client} | (place(when) if when else {}))

    def take_counts(self) -> dict[str, float]:
        counted, self.counted = self.counted, Counter()
        return {k: float(v) for k, v in counted.items()}


def place(when: When) -> dict[str, Any]:
    return {"stage": when.stage, "position": when.position, "round": when.round}
