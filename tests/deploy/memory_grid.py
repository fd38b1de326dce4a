"""A grid in memory: the real apps, the real records, no network. Faults are put in where the network would be."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Context, Error, Message, RecordDict

from profcil.deploy.app import client_app
from profcil.resolve import RunConfig, resolve

TINY = {
    "stream.clients": 3,
    "stream.participants": 2,
    "stream.task_size": 5,  # two positions
    "stream.support": 1.0,  # everyone has a part of every task
    "train.rounds": 2,
    "train.epochs": 1,
    "warmup.rounds": 1,
    "model.width": 4,
    "threads": 1,
    "workers": 1,
}
Fault = Callable[["Grid", Message, Message], list[Message]]  # what comes of an ask and its answer


def tiny(method: str = "fedavg", **more: Any) -> RunConfig:
    """A configuration; `a__b=1` sets a.b."""
    sets = TINY | {k.replace("__", "."): v for k, v in more.items()}
    flags = {"dataset": "digits", "method": method, "executor": "serial"}
    return resolve(flags=flags, sets=[f"{k}={v}" for k, v in sets.items()])


@dataclass
class Grid:
    """What the fleet needs of Flower's grid. A node answers as soon as it is asked, unless the fault says otherwise."""

    settings: dict[str, Any]
    nodes: dict[int, dict[str, Any]]
    fault: Fault = lambda grid, ask, answer: [answer]
    mail: dict[str, list[Message]] = field(default_factory=dict)
    asked: list[tuple[int, str]] = field(default_factory=list)  # who was asked what

    def get_node_ids(self) -> list[int]:
        return list(self.nodes)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        return [self.deliver(m) for m in messages]

    def deliver(self, message: Message) -> str:
        id, node = message.object_id, message.metadata.dst_node_id
        message.metadata.__dict__["_message_id"] = id
        self.asked.append((node, message.metadata.message_type))
        self.mail[id] = self.fault(self, message, self.answer(message)) if node in self.nodes else []
        return id

    def answer(self, message: Message) -> Message:
        """What the app says; an exception becomes an error, as in Flower's own runtime."""
        node = message.metadata.dst_node_id
        try:
            return client_app(message, Context(1, node, self.nodes[node], RecordDict(), self.settings))
        except Exception as error:
            return Message(Error(2, str(error)), reply_to=message)

    def pull_messages(self, ids: Iterable[str]) -> list[Message]:
        return [m for id in ids for m in self.mail.pop(id, [])]

    def work(self, node: int) -> int:
        """How often a node was given work."""
        return sum(n == node and what != "query.hello" for n, what in self.asked)
