"""A grid in memory with the real apps and the real records. Faults are injected in place of the network."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.proto.node_pb2 import NodeInfo

from profcil.deploy.app import client_app
from profcil.resolve import RunConfig, resolve

TINY = {
    "stream.clients": 3,
    "stream.participants": 2,
    "stream.task_size": 5,  # two positions
    "stream.support": 1.0,  # each client has examples of each task
    "train.rounds": 2,
    "train.epochs": 1,
    "warmup.rounds": 1,
    "model.width": 4,
    "threads": 1,
    "workers": 1,
}
Fault = Callable[["Grid", Message, Message], list[Message]]  # (grid, request, reply) → the replies that arrive


def tiny(method: str = "fedavg", **more: Any) -> RunConfig:
    """A small configuration; `a__b=1` sets a.b."""
    sets = TINY | {k.replace("__", "."): v for k, v in more.items()}
    flags = {"dataset": "digits", "method": method, "accelerate": "off"}
    return resolve(flags=flags, sets=[f"{k}={v}" for k, v in sets.items()])


@dataclass
class Grid:
    """The part of Flower's grid that a fleet uses. A node replies at once, unless the fault changes that."""

    settings: dict[str, Any]
    nodes: dict[int, dict[str, Any]]
    fault: Fault = lambda grid, request, reply: [reply]
    mail: dict[str, list[Message]] = field(default_factory=dict)
    keys: dict[int, bytes] = field(default_factory=dict)  # public keys of nodes; by default each has its own
    sent: list[tuple[int, str]] = field(default_factory=list)  # node and message type of each request

    def get_nodes(self) -> list[NodeInfo]:
        return [NodeInfo(node_id=node, public_key=self.keys.get(node, b"key %d" % node)) for node in self.nodes]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        return [self.deliver(m) for m in messages]

    def deliver(self, message: Message) -> str:
        id = message.object_id
        node = message.metadata.dst_node_id
        message.metadata.__dict__["_message_id"] = id
        self.sent.append((node, message.metadata.message_type))
        self.mail[id] = self.fault(self, message, self.reply(message)) if node in self.nodes else []
        return id

    def reply(self, message: Message) -> Message:
        """The app's reply. An exception becomes an error message, as in Flower's runtime."""
        node = message.metadata.dst_node_id
        try:
            return client_app(message, Context(1, node, self.nodes[node], RecordDict(), self.settings))
        except Exception as error:
            return Message(Error(2, str(error)), reply_to=message)

    def pull_messages(self, ids: Iterable[str]) -> list[Message]:
        return [m for id in ids for m in self.mail.pop(id, [])]

    def work_count(self, node: int) -> int:
        """How many turns and surveys a node was asked for."""
        return sum(n == node and what != "query.hello" for n, what in self.sent)
