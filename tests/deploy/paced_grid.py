"""A grid in memory whose nodes take time, counted in queries for replies to work. Nothing depends on a real clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flwr.app import Message
from memory_grid import Grid

from profcil.deploy.app_folder import settings_table
from profcil.deploy.server import entry
from profcil.deploy.wire import read_request
from profcil.resolve import RunConfig

NEVER = 10**9
Change = Callable[["PacedGrid", Message, list[Message]], list[Message]]  # what arrives in place of a reply


@dataclass
class PacedGrid(Grid):
    """A node's reply is there after as many queries as its pace says; 1 by default."""

    paces: Mapping[int, int] = field(default_factory=dict)  # client → queries
    change: Change = lambda grid, request, replies: replies
    each_query: Callable[[PacedGrid], None] = lambda grid: None
    time: int = 0  # queries so far
    due: dict[str, tuple[int, int, list[Message]]] = field(default_factory=dict)  # message → client, time, replies
    most_open: int = 0  # messages at one node

    def deliver(self, message: Message) -> str:
        id = super().deliver(message)
        is_hello = message.metadata.message_type == "query.hello"
        if is_hello or read_request(message.content).when.before_stream:
            return id
        client = self.client_of(message)
        replies = self.change(self, message, self.mail.pop(id))
        self.due[id] = (client, self.time + self.paces.get(client, 1), replies)
        self.most_open = max(self.most_open, sum(c == client for c, _, _ in self.due.values()))
        return id

    def client_of(self, message: Message) -> int:
        return int(self.nodes.get(message.metadata.dst_node_id, {"client": -1})["client"])

    def pull_messages(self, ids: Iterable[str]) -> list[Message]:
        known = list(ids)
        if any(id in self.due for id in known):
            self.time += 1
            self.each_query(self)
        there = [id for id in known if id in self.due and self.due[id][1] <= self.time]
        return [*super().pull_messages(known), *(m for id in there for m in self.due.pop(id)[2])]


def deploy_paced(
    config: RunConfig, tmp_path: Path, *, out: str = "run", policy: Mapping[str, Any] | None = None, **grid: Any
) -> tuple[Path, PacedGrid]:
    """Runs a deployment on such a grid, or resumes it. Returns the run folder and the grid."""
    rules = {"deadline": 60.0, "join": 0.3, **(policy or {})}
    settings = settings_table(config, tmp_path / out, tmp_path, **rules)
    nodes = {100 + i: {"client": i, "home": str(tmp_path / f"{out}-sites")} for i in range(config.stream.clients)}
    made = PacedGrid(settings, nodes, **grid)
    return entry.start(made, settings), made
