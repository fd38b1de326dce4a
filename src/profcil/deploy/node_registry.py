"""Which node speaks for which client. Node ids are random, so every new node is greeted and says who it is.

The first node that answers for a client speaks for it until it leaves or misses a deadline; another one that claims
the same client waits until then. A node that missed a deadline is greeted anew, and speaks again once it answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Message, RecordDict

from profcil import __version__
from profcil.deploy.wire import Unreadable, pack, unpack

GREETING = "query.hello"
HOPELESS = {1, 2}  # Flower's codes for an app that cannot be loaded or raised an error: a mistake, not an accident
Note = Callable[[Mapping[str, Any]], None]  # writes an event into the run folder


@dataclass(frozen=True)
class Hello:
    """What a node says of itself."""

    client: int
    holds: Mapping[str, str] = field(default_factory=dict)  # block → digest
    site: Mapping[str, Any] = field(default_factory=dict)  # what a site with data of its own declares


def greeting(run: str) -> RecordDict:
    return pack({"run": run}, {})


def hello_records(hello: Hello) -> RecordDict:
    return pack({"client": hello.client, "holds": dict(hello.holds), "site": dict(hello.site), "as": __version__}, {})


def read_hello(content: RecordDict) -> Hello:
    head, _ = unpack(content)
    try:
        if head["as"] != __version__:
            raise Unreadable(f"the node runs profcil {head['as']}, the server {__version__}")
        return Hello(int(head["client"]), dict(head["holds"]), dict(head["site"]))
    except (KeyError, TypeError, ValueError) as error:
        raise Unreadable(f"the message is no hello ({error})") from None


class Roster:
    """Kept up to date by `look`."""

    def __init__(self, grid: Any, run: str, note: Note) -> None:
        self.grid, self.run, self.note = grid, run, note
        self.there: dict[int, Hello] = {}  # by node, in order of appearance
        self.fresh: dict[int, Mapping[str, str]] = {}  # clients that have just come, and what they hold
        self.greeted: dict[str, int] = {}  # message → node, not answered yet
        self.mute: set[int] = set()  # nodes whose hello could not be understood

    def speaker(self, client: int) -> int | None:
        """The node that speaks for a client."""
        return next((node for node, hello in self.there.items() if hello.client == client), None)

    def look(self) -> None:
        """Greets whoever is new, hears who has answered, forgets who has gone."""
        online = set(self.grid.get_node_ids())
        for node in [n for n in self.there if n not in online]:
            self.note({"event": "left", "client": self.there[node].client})
            self.lose(node)
        self.greet(online - self.there.keys() - set(self.greeted.values()) - self.mute)
        if self.greeted:
            for message in self.grid.pull_messages(list(self.greeted)):
                self.hear(message)

    def greet(self, nodes: Iterable[int]) -> None:
        new = sorted(nodes)
        ids = self.grid.push_messages([Message(greeting(self.run), node, GREETING) for node in new]) if new else []
        self.greeted |= {id: node for id, node in zip(ids, new, strict=True) if id}

    def hear(self, message: Message) -> None:
        node = self.greeted.pop(message.metadata.reply_to_message_id, None)
        if node is None:
            return
        try:
            if message.has_error():
                if message.error.code not in HOPELESS:  # greeted again at the next look
                    return
                raise Unreadable(f"the node failed ({message.error.reason})")
            hello = read_hello(message.content)
        except Unreadable as error:
            self.mute.add(node)
            return self.note({"event": "refused", "node": node, "reason": str(error)})
        first = self.speaker(hello.client) is None
        self.there[node] = hello
        if first:
            self.fresh[hello.client] = hello.holds
        self.note({"event": "joined" if first else "claimed twice", "client": hello.client})

    def lose(self, node: int) -> None:
        """The node speaks for nobody until it has answered a new greeting; another one may take its place."""
        client = self.there.pop(node).client
        if (other := self.speaker(client)) is not None:
            self.fresh[client] = self.there[other].holds
            self.note({"event": "joined", "client": client})
