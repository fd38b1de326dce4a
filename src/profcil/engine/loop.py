"""The stream: positions, rounds, turns, averaging, refreshes, scores. This is the paper's algorithm."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from profcil.engine.channel import Channel, When, stored_bytes
from profcil.engine.client import FeatureKey, embed_once
from profcil.engine.client_store import ClientStore
from profcil.engine.payload import Reply, ServerState
from profcil.engine.world import World
from profcil.methods.base import Method
from profcil.metrics.alignment import compare_means
from profcil.metrics.ledger import Ledger
from profcil.metrics.scores import Scores
from profcil.protocol.participation import participants


@dataclass
class RunState:
    """Everything that a run needs between two rounds. Anything else is lost when a run is saved and resumed, and so is
    `evaluated`, which is computed again."""

    server: ServerState
    scores: Scores
    ledger: Ledger
    held: dict[int, dict[str, int]] = field(default_factory=dict)  # client → block → version it holds
    private: dict[int, dict[str, Tensor]] | ClientStore = field(default_factory=dict)
    position: int = 0
    round: int = 0  # the next round to compute
    client_bytes: int = 0  # largest extra memory that a client needed
    server_bytes: int = 0  # largest memory that the server held beyond the model
    tally: dict[str, float] = field(default_factory=dict)  # sums over rounds, e.g. replay served, server seconds
    evaluated: dict[FeatureKey, Tensor] = field(default_factory=dict)  # features of the last evaluation; not saved


Watch = Callable[[str, When, dict[str, Any]], None]  # called after every round and position: progress, log, saving


def stream(world: World, method: Method, state: RunState, watch: Watch) -> RunState:
    """Computes the stream from the state's position and round to the end."""
    channel = Channel(state.ledger, world.config.transfer, method.kinds, held=state.held)
    rounds = world.config.train.rounds
    while state.position < world.plan.positions:
        while state.round < rounds:
            when = When("round", state.position, state.round, rounds)
            clients = participants(world.plan, when.position, when.round)
            with channel.round(clients):
                server, facts = play(world, method, state, channel, clients, when)
            state.server = server
            state.round += 1
            state.server_bytes = max(state.server_bytes, stored_bytes(server.blocks))
            for name in facts.keys() - {"clients", "skipped", "loss"}:
                state.tally[name] = state.tally.get(name, 0.0) + facts[name]
            watch("round", when, facts)
        close_position(world, method, state, watch)
    return state


def close_position(world: World, method: Method, state: RunState, watch: Watch) -> None:
    """Ends a position on the server, measures the scores, and advances the state to the next position."""
    rounds = world.config.train.rounds
    when = When("round", state.position, rounds - 1, rounds)
    with torch.no_grad():
        state.server = method.end_position(state.server, when)
    state.server_bytes = max(state.server_bytes, stored_bytes(state.server.blocks))
    features = evaluation_features(world, method, state.server, state.evaluated)
    correct = evaluate(world, method, state.server, state.position, features)
    state.scores.correct[state.position] = correct
    alignment = examine(world, method, state.server, state.position, features)
    state.position += 1
    state.round = 0
    world.forget_features()
    watch("position", when, {"correct": correct.tolist(), "alignment": alignment})


def play(
    world: World, method: Method, state: RunState, channel: Channel, clients: Sequence[int], when: When
) -> tuple[ServerState, dict[str, Any]]:
    """Computes one round: broadcast, turns and aggregation, and a refresh before or after them if the method asks for
    it. Returns the server's new state and facts for the log."""
    server = state.server
    world.forget_features({block.version for block in server.blocks.values()})
    seconds = 0.0  # of training on the server
    if method.opens(server, when):
        server = refresh(world, method, state, channel, clients, when, server)
        server, seconds = train_server(world, method, server, replace(when, stage="refresh"))
    replies = turns(world, method, state, channel, clients, when, server)
    with torch.no_grad():
        server = method.aggregate(server, replies, when)
    if method.surveys(when):
        server = refresh(world, method, state, channel, clients, when, server)
    server, more_seconds = train_server(world, method, server, when)
    facts = round_facts(clients, replies)
    if method.server_gradients:
        facts["server_seconds"] = seconds + more_seconds
    return server, {**facts, **world.fleet.facts()}


def round_facts(clients: Sequence[int], replies: Sequence[Reply]) -> dict[str, Any]:
    """Facts of a round for the log: number of participants, those without a usable reply, mean loss, and the sums of
    all other notes, e.g. how many replayed examples were asked for and served."""
    loss = sum(reply.notes.get("loss", 0.0) for reply in replies) / len(replies) if replies else None
    skipped = sorted(set(clients) - {reply.client for reply in replies})
    facts: dict[str, Any] = {"clients": len(clients), "skipped": skipped, "loss": loss}
    names = {name for reply in replies for name in reply.notes} - {"loss", "extra_bytes"}
    for name in sorted(names):
        facts[name] = sum(reply.notes.get(name, 0.0) for reply in replies)
    return facts


def train_server(world: World, method: Method, server: ServerState, when: When) -> tuple[ServerState, float]:
    """Trains on the server, if the method does so. Returns the server's state and the seconds that it took."""
    if not (method.server_gradients and method.trains(when)):
        return server, 0.0
    began = time.perf_counter()
    with torch.enable_grad():
        server = method.train_server(world.server(when), server)
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
    return server, time.perf_counter() - began


def refresh(
    world: World,
    method: Method,
    state: RunState,
    channel: Channel,
    clients: Sequence[int],
    when: When,
    server: ServerState,
) -> ServerState:
    """Collects the participants' statistics under the server's model. Returns the server's state with them."""
    asked = replace(when, stage="refresh")
    with torch.no_grad():
        names = method.survey_blocks(server, asked)
        reached = world.fleet.reach(world, state, asked, clients)
        inboxes = {c: channel.down(c, server, names, asked) for c in reached}
        done = world.fleet.surveys(world, method, state, asked, inboxes)
        note_memory(state, done)
        statistics = [channel.up(inboxes[c], done[c], asked) for c in sorted(done)]
        return method.absorb(server, statistics, asked)


def turns(
    world: World,
    method: Method,
    state: RunState,
    channel: Channel,
    clients: Sequence[int],
    when: When,
    server: ServerState | None = None,
) -> list[Reply]:
    """Computes the participants' turns. Broadcasts and replies pass through the channel. The replies are in the order
    of client ids, whatever the order of execution."""
    server = server or state.server
    reached = world.fleet.reach(world, state, when, clients)
    inboxes = {c: channel.down(c, server, method.broadcast_to(c, server, when), when) for c in reached}
    done = world.fleet.turns(world, method, state, when, inboxes)
    replies = []
    for c in sorted(done):
        if done[c].private is not None:
            state.private[c] = dict(done[c].private or {})
        replies.append(channel.up(inboxes[c], done[c], when))
    note_memory(state, done)
    return replies


def note_memory(state: RunState, replies: Mapping[int, Reply]) -> None:
    """Notes the largest extra memory that a client needed for its reply."""
    needed = [int(reply.notes.get("extra_bytes", 0)) for reply in replies.values()]
    state.client_bytes = max([state.client_bytes, *needed])


@torch.no_grad()
def evaluation_features(
    world: World, method: Method, server: ServerState, cache: dict[FeatureKey, Tensor] | None = None
) -> Tensor:
    """The features of the evaluation examples that the method computes its scores from; once a position.

    `cache` holds those of the evaluation before. Features under a block that has not changed since are reused.
    """
    examples = world.evaluation_examples
    index = torch.arange(len(examples), device=world.device)
    cache = {} if cache is None else cache
    present = {block.version for block in server.blocks.values()}
    for key in [key for key in cache if key[2] not in present]:
        del cache[key]
    features = method.views(server, lambda lens: embed_once(world.net, lens, examples, index, cache, "evaluation"))
    world.net.load(server.weights())
    return features


@torch.no_grad()
def evaluate(world: World, method: Method, server: ServerState, position: int, features: Tensor) -> np.ndarray:
    """Correct predictions per task, arg-max over Y^(p); −1 for tasks that are not introduced yet."""
    examples = world.evaluation_examples
    tasks = world.plan.tasks
    seen = sorted(world.plan.seen(position))
    allowed = torch.tensor(seen, device=world.device)
    scores = method.scores(world.net, server, features)
    guess = allowed[scores[:, allowed].argmax(1)]
    correct = torch.bincount(examples.y[guess == examples.y], minlength=world.bundle.facts.classes).cpu().numpy()
    return np.array([correct[list(t)].sum() if set(t) <= set(seen) else -1 for t in tasks], dtype=np.int64)


@torch.no_grad()
def examine(
    world: World, method: Method, server: ServerState, position: int, features: Tensor
) -> dict[str, dict[str, Any]]:
    """How well the stored means of old classes agree with the true ones, for each memory of the method."""
    current = world.plan.current(position)
    found = {}
    for name, (memory, project) in method.memories(world.net, server).items():
        rows = [i for i, y in enumerate(memory.labels) if y not in current]
        if rows:
            labels = tuple(memory.labels[i] for i in rows)
            means = memory.tensors["mean"][rows]
            found[name] = compare_means(means, project(features), world.evaluation_examples.y, labels)
    return found


def task_totals(world: World) -> np.ndarray:
    """The number of evaluation examples of each task."""
    count = torch.bincount(world.evaluation_examples.y.cpu(), minlength=world.bundle.facts.classes).numpy()
    return np.array([count[list(t)].sum() for t in world.plan.tasks], dtype=np.int64)
