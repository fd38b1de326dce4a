"""The stream: positions, rounds, turns, averaging, refreshes, scores. This is the paper's algorithm."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from profcil.engine.admission import admit, count_strikes, still_asked
from profcil.engine.changed_rows import RowHistory
from profcil.engine.channel import Channel, Inbox, Reply, ServerState, When, stored_bytes
from profcil.engine.client import FeatureKey
from profcil.engine.client_store import ClientStore
from profcil.engine.early_stop import stop_early
from profcil.engine.evaluation import class_accuracy, evaluate, evaluation_features, examine, sum_by_task
from profcil.engine.packing import make_packing
from profcil.engine.sum_support import rare_classes
from profcil.engine.world import World
from profcil.methods.base import Method
from profcil.metrics.ledger import Ledger
from profcil.metrics.scores import Scores
from profcil.privacy.adaptive_bound import NAME as UPDATE_BOUND
from profcil.privacy.adaptive_bound import NOTE as WITHIN_BOUND
from profcil.privacy.adaptive_bound import bound_of
from profcil.privacy.meter import Meter
from profcil.privacy.support import without_rare_classes
from profcil.protocol.participation import participants

if TYPE_CHECKING:
    from profcil.engine.arrivals import Arrivals


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
    strikes: dict[int, int] = field(default_factory=dict)  # client → rounds in which its replies were dropped
    opposed: tuple[int, ...] = ()  # clients that had an update against the others in a round
    tally: dict[str, float] = field(default_factory=dict)  # sums over rounds, e.g. replay served, server seconds
    stopping: dict[str, float] = field(default_factory=dict)  # of early stopping: best FAA, rounds since, stopped
    row_histories: dict[str, RowHistory] = field(default_factory=dict)  # of blocks, where changed rows are sent alone
    arrivals: Arrivals | None = None  # with clocks: the time, and replies on their way
    evaluated: dict[FeatureKey, Tensor] = field(default_factory=dict)  # features of the last evaluation; not saved


NOT_SUMMED = {  # facts of a round that are not in the tally
    *("clients", "skipped", "loss", "dropped", "quarantined", "opposed", "simulated_time"),
    *(UPDATE_BOUND, WITHIN_BOUND),
}
Watch = Callable[[str, When, dict[str, Any]], None]  # called after every round and position: progress, log, saving
Play = Callable[[World, Method, RunState, Channel, Sequence[int], When], tuple[ServerState, dict[str, Any]]]


def stream(world: World, method: Method, state: RunState, watch: Watch) -> RunState:
    """Computes the stream from the state's position and round to the end."""
    packing = make_packing(world, method, state.row_histories)
    channel = Channel(state.ledger, world.config.transfer, method.kinds, held=state.held, packing=packing)
    channel.opposed = set(state.opposed)
    rounds = world.config.train.rounds
    quarantine = world.config.robust.quarantine
    play_round = play_by_clock(world.config.clock.mode) if world.config.clock.mode != "off" else play
    while state.position < world.plan.positions:
        open_position(world, state, watch)
        while state.round < rounds:
            when = When("round", state.position, state.round, rounds)
            drawn = participants(world.plan, when.position, when.round)
            clients = still_asked(drawn, state.strikes, quarantine)
            if world.protection:
                Meter(world.protection).check(method, world.plan, state.ledger.entries, clients, when)
            with channel.round(clients):
                server, facts = play_round(world, method, state, channel, clients, when)
            state.server = server
            state.round += 1
            state.server_bytes = max(state.server_bytes, stored_bytes(server.blocks))
            facts |= count_strikes(state.strikes, channel.dropped, quarantine)
            state.opposed = tuple(sorted(channel.opposed))
            if channel.pulled_back:
                facts["opposed"] = sorted(channel.pulled_back)
            for name in facts.keys() - NOT_SUMMED:
                state.tally[name] = state.tally.get(name, 0.0) + facts[name]
            watch("round", when, facts | stop_early(world, method, state, when))
        close_position(world, method, state, watch)
    return state


def open_position(world: World, state: RunState, watch: Watch) -> None:
    """Between two positions clients may join and classes may be declared: both change the plan from here on."""
    if world.growth is None or state.position == 0 or state.round > 0:
        return
    facts = world.growth(world, state)
    if facts:
        watch("extended", When("round", state.position, 0, world.config.train.rounds), facts)


def close_position(world: World, method: Method, state: RunState, watch: Watch) -> None:
    """Ends a position on the server, measures the scores, and advances the state to the next position."""
    rounds = world.config.train.rounds
    when = When("round", state.position, rounds - 1, rounds)
    with torch.no_grad():
        state.server = method.end_position(state.server, when)
    state.server_bytes = max(state.server_bytes, stored_bytes(state.server.blocks))
    features = evaluation_features(world, method, state.server, state.evaluated)
    right = evaluate(world, method, state.server, state.position, features)
    correct = sum_by_task(world, right, state.position)
    state.scores.correct[state.position] = correct
    alignment = examine(world, method, state.server, state.position, features)
    state.position += 1
    state.round = 0
    state.stopping = {}
    world.forget_features()
    classes = class_accuracy(world, right, when.position)
    facts = {"correct": correct.tolist(), "classes": classes, "alignment": alignment}
    watch("position", when, facts)


def play(
    world: World, method: Method, state: RunState, channel: Channel, clients: Sequence[int], when: When
) -> tuple[ServerState, dict[str, Any]]:
    """Computes one round: broadcast, turns and aggregation, and a refresh before or after them if the method asks for
    it. Returns the server's new state and facts for the log."""
    server = world.protection.with_bound(state.server) if world.protection else state.server
    channel.dropped = {}
    channel.pulled_back = []
    world.forget_features({block.version for block in server.blocks.values()})
    seconds = 0.0  # of training on the server
    if method.opens(server, when):
        server = refresh(world, method, state, channel, clients, when, server)
        server, seconds = train_server(world, method, server, replace(when, stage="refresh"))
    replies = turns(world, method, state, channel, clients, when, server)
    with torch.no_grad():
        server = method.aggregate(server, replies, when)
    if world.protection:
        server = world.protection.adapted(server, replies)
    if method.surveys(when):
        server = refresh(world, method, state, channel, clients, when, server)
    server, more_seconds = train_server(world, method, server, when)
    facts = round_facts(clients, replies)
    if UPDATE_BOUND in server.blocks:
        facts[UPDATE_BOUND] = bound_of(server.blocks, world.config.privacy)
    if method.server_gradients:
        facts["server_seconds"] = seconds + more_seconds
    return server, {**facts, **channel.take_facts(), **world.fleet.facts()}


def play_by_clock(mode: str) -> Play:
    """`play` with simulated clocks."""
    from profcil.engine import arrivals

    return arrivals.play_buffered if mode == "buffer" else arrivals.play_and_wait


def round_facts(clients: Sequence[int], replies: Sequence[Reply]) -> dict[str, Any]:
    """Facts of a round for the log: number of participants, those without a usable reply, mean loss, and the sums of
    all other notes, e.g. how many replayed examples were asked for and served."""
    loss = sum(reply.notes.get("loss", 0.0) for reply in replies) / len(replies) if replies else None
    skipped = sorted(set(clients) - {client for reply in replies for client in reply.clients})
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
    if world.config.privacy.secure_sum:  # the sum of few others and of clients without a new report would reveal them
        clients = [c for c in clients if c not in method.reported(server)]
    with torch.no_grad():
        names = method.survey_blocks(server, asked)
        reached = enough_for_a_sum(world, channel, world.fleet.reach(world, state, asked, clients))
        inboxes = {c: channel.down(c, server, names, asked) for c in reached}
        if world.config.privacy.sum_support:
            world.withheld = rare_classes(world, channel, reached, asked)
        done = world.fleet.surveys(world, method, state, asked, inboxes)
        world.withheld = None
        note_memory(state, done)
        statistics = receive(world, method, channel, server, inboxes, done, asked)
        if world.protection:
            statistics = without_rare_classes(statistics, world.config.privacy.min_support)
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
    of client ids, whatever the order of execution; with secure sums it is one reply."""
    server = server or state.server
    reached = enough_for_a_sum(world, channel, world.fleet.reach(world, state, when, clients))
    bound = (UPDATE_BOUND,) if UPDATE_BOUND in server.blocks else ()
    inboxes = {c: channel.down(c, server, (*method.broadcast_to(c, server, when), *bound), when) for c in reached}
    done = world.fleet.turns(world, method, state, when, inboxes)
    for c in sorted(done):
        if done[c].private is not None:
            state.private[c] = dict(done[c].private or {})
    note_memory(state, done)
    return receive(world, method, channel, server, inboxes, done, when)


def enough_for_a_sum(world: World, channel: Channel, clients: Sequence[int]) -> Sequence[int]:
    """The clients; none of them if sums are secure and so few clients could not hide in one. The log counts this."""
    settings = world.config.privacy
    if not settings.secure_sum or len(clients) >= settings.sum_clients:
        return clients
    if clients:
        channel.facts["skipped_sums"] += 1
    return ()


def receive(
    world: World,
    method: Method,
    channel: Channel,
    server: ServerState,
    inboxes: Mapping[int, Inbox],
    done: Mapping[int, Reply],
    when: When,
) -> list[Reply]:
    """The replies that the method aggregates. With secure sums it is one reply, their sum; with robust aggregation they
    are those that pass its rules."""
    config = world.config
    if config.privacy.secure_sum:
        return world.fleet.summed(world, method, channel, when, inboxes, done)
    replies = [channel.up(inboxes[c], done[c], when) for c in sorted(done)]
    if config.robust.aggregation == "mean":
        return replies
    return admit(world, method, channel, server, when, inboxes, replies)


def note_memory(state: RunState, replies: Mapping[int, Reply]) -> None:
    """Notes the largest extra memory that a client needed for its reply."""
    needed = [int(reply.notes.get("extra_bytes", 0)) for reply in replies.values()]
    state.client_bytes = max([state.client_bytes, *needed])
