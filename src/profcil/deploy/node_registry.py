"""Which node computes for which client. Flower's node ids are random, so each new node is sent a hello.

The first node that answers as a client computes for it until it disconnects or misses a deadline. Another node that
claims the same client is used only after that. A node that missed a deadline is sent a new hello, and is used again
once it has answered.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Message, RecordDict

from profcil import __version__
from profcil.deploy.execution import read_execution
from profcil.deploy.texts import one_line
from profcil.deploy.wire import UnreadableMessage, pack, unpack

HELLO = "query.hello"  # Flower's message type
PERMANENT_ERRORS = {1, 2}  # Flower's codes for an app that cannot be loaded, or that raised an error
MAX_CLIENTS = 10_000_000
LONGEST_REASON = 500  # characters of a sentence that a site sends
RecordEvent = Callable[[Mapping[str, Any]], None]  # writes an event into the run folder


@dataclass(frozen=True)
class Hello:
    """What a node reports about itself."""

    client: int
    holds: Mapping[str, str] = field(default_factory=dict)  # block → digest
    site: Mapping[str, Any] = field(default_factory=dict)  # the declaration of a site with its own data
    execution: Mapping[str, str] = field(default_factory=dict)  # how the node computes


class SiteFault(UnreadableMessage):
    """A site that cannot take part, in its own words."""

    def __init__(self, site: str, reason: str) -> None:
        super().__init__(reason)
        self.site = site


def hello_request(run: str, enrolled: Iterable[int] | None = None) -> RecordDict:
    """A hello. `enrolled` are the clients of a run that has begun; another site learns from it that it is left out."""
    return pack({"run": run, "enrolled": None if enrolled is None else sorted(enrolled)}, {})


def fault_response(site: str, reason: str) -> RecordDict:
    """The answer of a site that cannot take part."""
    return pack({"fault": reason[:LONGEST_REASON], "site": site[:LONGEST_REASON], "as": __version__}, {})


def hello_response(hello: Hello) -> RecordDict:
    head = {"client": hello.client, "holds": dict(hello.holds), "site": dict(hello.site), "as": __version__}
    return pack(head | {"execution": dict(hello.execution)}, {})


def read_hello(content: RecordDict) -> Hello:
    head, _ = unpack(content)
    try:
        if head["as"] != __version__:
            raise UnreadableMessage(f"the node runs profcil {head['as']}, the server {__version__}")
        if "fault" in head:
            raise SiteFault(one_line(head["site"]), one_line(head["fault"], LONGEST_REASON))
        execution = read_execution(head["execution"])
        client = int(head["client"])
        if not 0 <= client < MAX_CLIENTS:
            raise ValueError(f"client must be from 0 to {MAX_CLIENTS - 1}")
        return Hello(client, dict(head["holds"]), dict(head["site"]), execution)
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise UnreadableMessage(f"the message is not a hello ({error})") from None


class NodeRegistry:
    """The connected nodes and their clients, as of the last `update`."""

    def __init__(self, grid: Any, run: str, record_event: RecordEvent) -> None:
        self.grid = grid
        self.run = run
        self.record_event = record_event
        self.hellos: dict[int, Hello] = {}  # by node, in the order in which they answered
        self.joined: dict[int, Mapping[str, str]] = {}  # clients that have just joined, and the blocks they hold
        self.pending: dict[str, int] = {}  # message → node, for hellos without an answer yet
        self.rejected: set[int] = set()  # nodes whose answer was not a valid hello
        self.faults: dict[str, str] = {}  # by the name that a site gives: why it cannot take part
        self.enrolled: Collection[int] | None = None  # sites of a run that has begun; None: not known, or no sites

    def node_of(self, client: int) -> int | None:
        """The node that computes for a client, or None."""
        return next((node for node, hello in self.hellos.items() if hello.client == client), None)

    def update(self) -> None:
        """Removes disconnected nodes, sends hellos to new ones and reads the answers that have arrived."""
        online = set(self.grid.get_node_ids())
        for node in [n for n in self.hellos if n not in online]:
            self.record_event({"event": "left", "client": self.hellos[node].client})
            self.remove(node)
        self.send_hellos(online - self.hellos.keys() - set(self.pending.values()) - self.rejected)
        if self.pending:
            for message in self.grid.pull_messages(list(self.pending)):
                self.receive(message)

    def send_hellos(self, nodes: Iterable[int]) -> None:
        new = sorted(nodes)
        if not new:
            return
        ids = self.grid.push_messages([Message(hello_request(self.run, self.enrolled), node, HELLO) for node in new])
        self.pending |= {id: node for id, node in zip(ids, new, strict=True) if id}

    def receive(self, message: Message) -> None:
        """Reads a node's answer to a hello."""
        node = self.pending.pop(message.metadata.reply_to_message_id, None)
        if node is None:
            return
        if message.has_error() and message.error.code not in PERMANENT_ERRORS:
            return  # the next update sends another hello
        try:
            if message.has_error():
                raise UnreadableMessage(f"the node failed ({message.error.reason})")
            self.add(node, read_hello(message.content))
        except UnreadableMessage as error:
            self.rejected.add(node)
            reason = one_line(error, LONGEST_REASON)
            event = {"event": "refused", "node": node, "reason": reason}
            if isinstance(error, SiteFault):
                self.faults[error.site] = reason
                event["site"] = error.site
            self.record_event(event)

    def add(self, node: int, hello: Hello) -> None:
        """Registers a node. It computes for its client unless another node already does."""
        first = self.node_of(hello.client) is None
        self.hellos[node] = hello
        if first:
            self.joined[hello.client] = hello.holds
        self.record_event({"event": "joined" if first else "claimed twice", "client": hello.client})

    def remove(self, node: int) -> None:
        """Removes a node until it has answered a new hello. Another node that claims its client replaces it."""
        client = self.hellos.pop(node).client
        if (other := self.node_of(client)) is not None:
            self.joined[client] = self.hellos[other].holds
            self.record_event({"event": "joined", "client": client})
