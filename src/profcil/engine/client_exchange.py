"""One exchange with clients: what each is sent, their turns or statistics, and what of it the method receives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from profcil.engine.admission import admit
from profcil.engine.channel import Channel, Inbox, Reply, ServerState, When
from profcil.engine.run_state import RunState
from profcil.engine.world import World
from profcil.methods.base import Method
from profcil.privacy.adaptive_bound import NAME as UPDATE_BOUND
from profcil.privacy.support import without_rare_classes


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
        if reached and world.counts_first:
            world.withheld = world.fleet.rare_classes(world, state, channel, reached, asked)
        done = world.fleet.surveys(world, method, state, asked, inboxes)
        world.withheld = None
        note_memory(state, done)
        statistics = receive(world, method, channel, server, inboxes, done, asked)
        if world.protection:
            statistics = without_rare_classes(statistics, world.config.privacy.min_support)
        return method.absorb(server, statistics, asked)


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


def enough_for_a_sum(world: World, channel: Channel, clients: Sequence[int]) -> Sequence[int]:
    """The clients; none of them if sums are secure and so few clients could not hide in one. The log counts this."""
    settings = world.config.privacy
    if not settings.secure_sum or len(clients) >= settings.sum_clients:
        return clients
    if clients:
        channel.facts["skipped_sums"] += 1
    return ()


def note_memory(state: RunState, replies: Mapping[int, Reply]) -> None:
    """Notes the largest extra memory that a client needed for its reply."""
    needed = [int(reply.notes.get("extra_bytes", 0)) for reply in replies.values()]
    state.client_bytes = max([state.client_bytes, *needed])


def round_facts(clients: Sequence[int], replies: Sequence[Reply]) -> dict[str, Any]:
    """Facts of a round for the log: number of participants, those without a usable reply, mean loss (None where
    no reply says one, as with noise), and the sums of all other notes, e.g. how many replayed examples were served."""
    said = [reply.notes["loss"] for reply in replies if "loss" in reply.notes]
    loss = sum(said) / len(said) if said else None
    skipped = sorted(set(clients) - {client for reply in replies for client in reply.clients})
    facts: dict[str, Any] = {"clients": len(clients), "skipped": skipped, "loss": loss}
    names = {name for reply in replies for name in reply.notes} - {"loss", "extra_bytes"}
    for name in sorted(names):
        facts[name] = sum(reply.notes.get(name, 0.0) for reply in replies)
    return facts
