"""The stream: positions, rounds, turns, averaging, refresh, scores. The paper's algorithm on one page."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from profcil.engine.channel import Door, When, stored_bytes
from profcil.engine.client import embed
from profcil.engine.client_store import Parked
from profcil.engine.payload import Reply, ServerState
from profcil.engine.world import World
from profcil.methods.base import Method
from profcil.metrics.alignment import compare_means
from profcil.metrics.ledger import Ledger
from profcil.metrics.scores import Scores
from profcil.protocol.participation import participants


@dataclass
class RunState:
    """All that a run is between two rounds; what is not in here does not survive."""

    server: ServerState
    scores: Scores
    ledger: Ledger
    held: dict[int, dict[str, int]] = field(default_factory=dict)
    private: dict[int, dict[str, Tensor]] | Parked = field(default_factory=dict)
    position: int = 0
    round: int = 0  # the next one to play
    client_bytes: int = 0  # largest extra memory a client needed
    server_bytes: int = 0  # largest memory the server kept beyond the model
    tally: dict[str, float] = field(default_factory=dict)  # sums over rounds, e.g. replay served, server seconds


Watch = Callable[[str, When, dict], None]  # told of every round and position: progress, log, saving


def stream(world: World, method: Method, state: RunState, watch: Watch) -> RunState:
    """Plays the rest of the stream from wherever the state stands."""
    door = Door(state.ledger, world.config.transfer, method.kinds, held=state.held)
    rounds = world.config.train.rounds
    while state.position < world.plan.positions:
        while state.round < rounds:
            when = When("round", state.position, state.round, rounds)
            clients = participants(world.plan, when.position, when.round)
            with door.round(clients):
                server, facts = play(world, method, state, door, clients, when)
            state.server, state.round = server, state.round + 1
            state.server_bytes = max(state.server_bytes, stored_bytes(server.blocks))
            for name in facts.keys() - {"clients", "skipped", "loss"}:
                state.tally[name] = state.tally.get(name, 0.0) + facts[name]
            watch("round", when, facts)
        when = When("round", state.position, rounds - 1, rounds)
        with torch.no_grad():
            state.server = method.end_position(state.server, when)
        state.server_bytes = max(state.server_bytes, stored_bytes(state.server.blocks))
        features = judged_features(world, method, state.server)
        state.scores.correct[state.position] = evaluate(world, method, state.server, state.position, features)
        aligned = examine(world, method, state.server, state.position, features)
        state.position, state.round = state.position + 1, 0
        world.forget_features()
        watch("position", when, {"correct": state.scores.correct[when.position].tolist(), "alignment": aligned})
    return state


def play(
    world: World, method: Method, state: RunState, door: Door, clients: Sequence[int], when: When
) -> tuple[ServerState, dict]:
    """One round: broadcast, turns, aggregation, and the refreshes due before and after. Also says how it went."""
    server = state.server
    base = server.get("base")
    world.forget_features(base.version if base else None)
    spent = 0.0
    if method.opens(server, when):
        server = refresh(world, method, state, door, clients, when, server)
        server, spent = train_server(world, method, server, replace(when, stage="refresh"))
    replies = turns(world, method, state, door, clients, when, server)
    with torch.no_grad():
        server = method.aggregate(server, replies, when)
    if method.surveys(when):
        server = refresh(world, method, state, door, clients, when, server)
    server, more = train_server(world, method, server, when)
    loss = sum(r.notes.get("loss", 0.0) for r in replies) / len(replies) if replies else None
    skipped = sorted(set(clients) - {r.client for r in replies})
    counted = {k for r in replies for k in r.notes} - {"loss", "extra_bytes"}  # e.g. replay asked for and served
    sums = {k: sum(r.notes.get(k, 0.0) for r in replies) for k in sorted(counted)}
    if method.server_gradients:
        sums["server_seconds"] = spent + more
    return server, {"clients": len(clients), "skipped": skipped, "loss": loss, **sums, **world.fleet.facts()}


def train_server(world: World, method: Method, server: ServerState, when: When) -> tuple[ServerState, float]:
    """The server's own training, where a method has it, and its seconds."""
    if not (method.server_gradients and method.trains(when)):
        return server, 0.0
    began = time.perf_counter()
    with torch.enable_grad():
        server = method.train_server(world.server(when), server)
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
    return server, time.perf_counter() - began


def refresh(
    world: World, method: Method, state: RunState, door: Door, clients: Sequence[int], when: When, server: ServerState
) -> ServerState:
    """The participants' statistics under the server's model, through the door, and what the server makes of them."""
    asked = When("refresh", when.position, when.round, when.rounds)
    with torch.no_grad():
        names, here = method.survey_blocks(server, asked), world.fleet.reach(world, state, asked, clients)
        inboxes = {c: door.down(c, server, names, asked) for c in here}
        done = world.fleet.surveys(world, method, state, asked, inboxes)
        told = [door.up(inboxes[c], done[c], asked) for c in sorted(done)]
        return method.absorb(server, told, asked)


def turns(
    world: World,
    method: Method,
    state: RunState,
    door: Door,
    clients: Sequence[int],
    when: When,
    server: ServerState | None = None,
) -> list[Reply]:
    """The participants' turns, through the door both ways; replies in client order, whoever was computed first."""
    server = server or state.server
    here = world.fleet.reach(world, state, when, clients)
    inboxes = {c: door.down(c, server, method.broadcast_to(c, server, when), when) for c in here}
    done = world.fleet.turns(world, method, state, when, inboxes)
    replies = []
    for c in sorted(done):
        if done[c].private is not None:
            state.private[c] = dict(done[c].private or {})
        state.client_bytes = max(state.client_bytes, int(done[c].notes.get("extra_bytes", 0)))
        replies.append(door.up(inboxes[c], done[c], when))
    return replies


@torch.no_grad()
def judged_features(world: World, method: Method, server: ServerState) -> Tensor:
    """What a method's scores see of the examples they are measured on, once a position."""
    index = torch.arange(len(world.judged), device=world.device)
    features = method.views(server, lambda lens: embed(world.net, lens, world.judged, index))
    world.net.load(server.weights())
    return features


@torch.no_grad()
def evaluate(world: World, method: Method, server: ServerState, position: int, features: Tensor) -> np.ndarray:
    """Correct predictions per task, arg-max over Y^(p); −1 for tasks not introduced yet."""
    examples, seen = world.judged, sorted(world.plan.seen(position))
    allowed = torch.tensor(seen, device=world.device)
    guess = allowed[method.scores(world.net, server, features)[:, allowed].argmax(1)]
    right = torch.bincount(examples.y[guess == examples.y], minlength=world.bundle.facts.classes).cpu().numpy()
    tasks = world.plan.tasks
    return np.array([right[list(t)].sum() if set(t) <= set(seen) else -1 for t in tasks], dtype=np.int64)


@torch.no_grad()
def examine(world: World, method: Method, server: ServerState, position: int, features: Tensor) -> dict[str, dict]:
    """How well each memory of old classes points at their true means; nothing where a method keeps none."""
    current, found = world.plan.current(position), {}
    for name, (memory, project) in method.memories(world.net, server).items():
        rows = [i for i, y in enumerate(memory.labels) if y not in current]
        if rows:
            old = tuple(memory.labels[i] for i in rows)
            found[name] = compare_means(memory.tensors["mean"][rows], project(features), world.judged.y, old)
    return found


def task_totals(world: World) -> np.ndarray:
    """Scored examples per task."""
    count = torch.bincount(world.judged.y.cpu(), minlength=world.bundle.facts.classes).numpy()
    return np.array([count[list(t)].sum() for t in world.plan.tasks], dtype=np.int64)
