"""A grid in memory whose replies arrive in the order of a simulation's schedule."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flwr.app import Error, Message
from memory_grid import Grid

from profcil import registry
from profcil.deploy.wire import read_request
from profcil.engine.arrivals import make_clock, planned_work
from profcil.engine.world import make_world
from profcil.protocol.buffered_clock import ServerUpdate
from profcil.protocol.clock_schedule import Schedule
from profcil.protocol.clocks import TURN, Pending
from profcil.resolve import RunConfig

Place = tuple[int, str, int, int]  # client, stage, position and round


@dataclass
class ScriptedGrid(Grid):
    """Each query brings the reply that is due next. Replies that the schedule loses arrive as errors."""

    script: dict[Place, deque[Pending]] = field(default_factory=dict)
    due: dict[str, tuple[float, Message]] = field(default_factory=dict)

    def deliver(self, message: Message) -> str:
        is_hello = message.metadata.message_type == "query.hello"
        when = None if is_hello else read_request(message.content).when
        if when is None or when.before_stream:
            return super().deliver(message)
        client = self.nodes[message.metadata.dst_node_id]["client"]
        planned = self.script[client, when.stage, when.position, when.round].popleft()
        id = super().deliver(message)
        [reply] = self.mail.pop(id)
        if planned.lost:
            reply = Message(Error(2, "lost on the way"), reply_to=message)
        self.due[id] = (planned.end, reply)
        return id

    def pull_messages(self, ids: Iterable[str]) -> list[Message]:
        wanted = [id for id in ids if id in self.due]
        first = min((self.due[id][0] for id in wanted), default=0.0)
        now = [id for id in wanted if self.due[id][0] == first]
        return [*super().pull_messages(ids), *(self.due.pop(id)[1] for id in now)]


def script_of(config: RunConfig, data: Path) -> dict[Place, deque[Pending]]:
    """When each reply of a simulated run arrives, by what it was asked for."""
    found: dict[Place, deque[Pending]] = {}
    for position, round, pending in asked(config, data):
        place = (position, round) if pending.what == TURN else (pending.position, pending.round)
        stage = "round" if pending.what == TURN else "refresh"
        found.setdefault((pending.client, stage, *place), deque()).append(pending)
    return found


def asked(config: RunConfig, data: Path) -> Iterator[tuple[int, int, Pending]]:
    """All that is asked for in a simulated run, with the position and the round of the update before which it is."""
    for number, update in enumerate(updates(config, data)):
        for pending in (*update.opening, *update.started, *update.asked):
            yield *divmod(number, config.train.rounds), pending


def updates(config: RunConfig, data: Path) -> list[ServerUpdate]:
    """The schedule of a simulated run."""
    method = registry.find("methods", config.method).METHOD(config.params)
    rounds = config.train.rounds
    return list(Schedule(make_clock(make_world(config, data)), rounds, planned_work(method, rounds)).updates())


def make_grid(script: dict[Place, deque[Pending]], settings: dict[str, Any], nodes: int, home: Path) -> ScriptedGrid:
    configs = {100 + i: {"client": i, "home": str(home)} for i in range(nodes)}
    return ScriptedGrid(settings, configs, script=script)
