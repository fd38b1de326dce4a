"""The stream: positions, rounds, turns, averaging, refreshes, scores. This is the paper's algorithm."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from profcil.engine.admission import count_strikes, still_asked
from profcil.engine.channel import Channel, ServerState, When, stored_bytes
from profcil.engine.client_exchange import refresh, round_facts, turns
from profcil.engine.early_stop import stop_early
from profcil.engine.evaluation import class_accuracy, evaluate, evaluation_features, examine, sum_by_task
from profcil.engine.packing import make_packing
from profcil.engine.run_state import RunState, Watch
from profcil.engine.world import World
from profcil.methods.base import Method
from profcil.privacy.adaptive_bound import NAME as UPDATE_BOUND
from profcil.privacy.adaptive_bound import bound_of
from profcil.privacy.meter import Meter
from profcil.protocol.participation import participants

RoundFunction = Callable[[World, Method, RunState, Channel, Sequence[int], When], tuple[ServerState, dict[str, Any]]]


def stream(world: World, method: Method, state: RunState, watch: Watch) -> RunState:
    """Computes the stream from the state's position and round to the end."""
    channel = open_channel(world, method, state)
    rounds = world.config.train.rounds
    while state.position < world.plan.positions:
        open_position(world, state, watch)
        while state.round < rounds:
            when = When("round", state.position, state.round, rounds)
            facts = next_round(world, method, state, channel, when)
            watch("round", when, facts | stop_early(world, method, state, when))
        close_position(world, method, state, watch)
    return state


def open_channel(world: World, method: Method, state: RunState) -> Channel:
    """The channel between server and clients, as the state left it."""
    packing = make_packing(world, method, state.row_histories)
    channel = Channel(state.ledger, world.config.transfer, method.kinds, held=state.held, packing=packing)
    channel.opposed = set(state.opposed)
    return channel


def next_round(world: World, method: Method, state: RunState, channel: Channel, when: When) -> dict[str, Any]:
    """Draws the participants, computes the round, and advances the state. Returns facts for the log."""
    quarantine = world.config.robust.quarantine
    drawn = participants(world.plan, when.position, when.round)
    clients = still_asked(drawn, state.strikes, quarantine)
    if world.protection:
        Meter(world.protection).check(method, world.plan, state.ledger.entries, clients, when)
    compute = round_function(world.config.clock.mode)
    with channel.round(clients):
        server, facts = compute(world, method, state, channel, clients, when)
    state.server = server
    state.round += 1
    state.server_bytes = max(state.server_bytes, stored_bytes(state.server.blocks))
    facts |= count_strikes(state.strikes, channel.dropped, quarantine)
    state.opposed = tuple(sorted(channel.opposed))
    if channel.pulled_back:
        facts["opposed"] = sorted(channel.pulled_back)
    state.add_to_tally(facts)
    return facts


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


def compute_round(
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


def round_function(mode: str) -> RoundFunction:
    """The function that computes a round: `compute_round`, or one with clocks."""
    if mode == "off":
        return compute_round
    from profcil.engine import arrivals

    return arrivals.asynchronous_round if mode == "buffer" else arrivals.synchronous_round
