"""Which node computes for which client. Flower's node ids are random, so each new node is sent a hello.

The first node that answers as a client computes for it, and binds the client to its key (`bindings`). A node with
another key that claims the same client is refused. A node that missed a deadline is sent a new hello, and is used again
once it has answered.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from flwr.app import Message

from profcil.deploy.hello import HELLO, LONGEST_REASON, Hello, SiteFault, hello_request, read_hello
from profcil.deploy.server.bindings import Bindings, node_keys
from profcil.deploy.wire import UnreadableMessage
from profcil.io.texts import one_line

PERMANENT_ERRORS = {1, 2, 7}  # Flower's codes for an app that cannot be loaded, raised an error, or is not allowed
RecordEvent = Callable[[Mapping[str, Any]], None]  # writes an event into the run folder


class ForeignClaim(UnreadableMessage):
    """A node that claims a client of another key, or declares other data than before."""

    def __init__(self, client: int, reason: str) -> None:
        super().__init__(reason)
        self.client = client


class NodeRegistry:
    """The connected nodes and their clients, as of the last `update`."""

    def __init__(self, grid: Any, run: str, record_event: RecordEvent, bindings: Bindings | None = None) -> None:
        self.grid = grid
        self.run = run
        self.record_event = record_event
        self.bindings = bindings or Bindings()
        self.keys: dict[int, str] = {}  # by connected node
        self.hellos: dict[int, Hello] = {}  # by node, in the order in which they answered
        self.joined: dict[int, Mapping[str, str]] = {}  # clients that have just joined, and the blocks they hold
        self.pending: dict[str, int] = {}  # message → node, for hellos without an answer yet
        self.rejected: set[int] = set()  # nodes whose answer was not a valid hello
        self.faults: dict[str, str] = {}  # by the name that a site gives: why it cannot take part
        self.enrolled: Collection[int] | None = None  # sites of a run that has begun; None: not known, or no sites
        self.terms: dict[str, Any] = {}  # of the federation, as they are sent to sites

    def node_of(self, client: int) -> int | None:
        """The node that computes for a client, or None."""
        return next((node for node, hello in self.hellos.items() if hello.client == client), None)

    def update(self) -> None:
        """Removes disconnected nodes, sends hellos to new ones and reads the answers that have arrived."""
        self.keys = node_keys(self.grid)
        online = set(self.keys)
        self.rejected &= online  # a node that comes back may have been corrected
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
        requests = [Message(hello_request(self.run, self.enrolled, self.terms), node, HELLO) for node in new]
        ids = self.grid.push_messages(requests)
        self.pending |= {id: node for id, node in zip(ids, new, strict=True) if id}

    def ask_again(self) -> None:
        """Sends a hello to all nodes that have answered one. They declare their data anew."""
        self.send_hellos(self.hellos.keys() - set(self.pending.values()))

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
            event: dict[str, Any] = {"event": "refused", "node": node, "reason": reason}
            if isinstance(error, SiteFault):
                self.faults[error.site] = reason
                event["site"] = error.site
            elif isinstance(error, ForeignClaim):
                event |= {"event": "claimed twice", "client": error.client}
            self.record_event(event)

    def add(self, node: int, hello: Hello) -> None:
        """Registers a node. It computes for its client unless another node already does."""
        key = self.keys.get(node, f"node {node}")
        position = int(self.terms.get("position", 0))
        if reason := self.bindings.bind(hello.client, key, hello.site, position):
            raise ForeignClaim(hello.client, reason)
        known = self.hellos.get(node)
        if known is not None and known.client == hello.client:  # it was asked again
            self.hellos[node] = hello
            return
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
