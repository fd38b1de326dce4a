"""One client's part: an ask comes in, the turn or survey is computed on data that stay here, an answer goes out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from profcil import registry
from profcil.deploy.identity import Desk, Share
from profcil.deploy.store import Keep, sweep
from profcil.deploy.wire import Answer, Ask
from profcil.engine.client import Client
from profcil.engine.fleet import guard_of
from profcil.engine.payload import Inbox, Reply
from profcil.engine.warmup import player
from profcil.engine.world import World
from profcil.errors import Diverged, Failure, ProfcilError


def answer(what: str, ask: Ask, seat: Share | Desk) -> Answer:
    """The answer to an ask; a mistake is told in one sentence, never raised over the network."""
    try:
        reply = compute(what, ask, seat)
    except ProfcilError as error:
        kind = "diverged" if isinstance(error, Diverged) else "broken"
        return Answer(Reply(ask.client, 0), ask.when, trouble=str(error), kind=kind)
    return Answer(replace(reply, private=None), ask.when, kept=reply.private is not None)


def compute(what: str, ask: Ask, seat: Share | Desk) -> Reply:
    """The reply; its private tensors are kept here, under the name the server gave."""
    sweep(seat.home)
    keep = Keep(seat.home, ask.facts["run"], ask.client)
    inbox = in_hand(keep, ask)
    world = seat.world()
    seat.check(world, ask.facts)
    world.features.clear()  # versions of another run may have the same numbers
    world, method = player(world) if ask.when.stage == "warmup" else (world, method_of(world))
    private = keep.private(ask.ticket)
    client = seat.sit(world, ask, private)
    reply = turn(world, method, client, inbox) if what == "turn" else survey(method, client, inbox)
    if reply.private is not None:
        keep.put_private(ask.next, reply.private, ask.ticket)
    lost = {"memories_lost": 1.0} if ask.ticket and private is None else {}  # the client began anew, and says so
    return replace(reply, notes={**reply.notes, **lost})


def in_hand(keep: Keep, ask: Ask) -> Inbox:
    """What was sent now, and what was held already; the latter first, since it may bear the name of what was sent."""
    found = {n: ask.blocks[n] if n in ask.blocks else keep.get(n, digest) for n, digest in ask.names.items()}
    for name, block in ask.blocks.items():
        keep.put(name, block)
    if lacking := [n for n, block in found.items() if block is None]:
        raise Failure(f"client {ask.client} does not hold block {lacking[0]}, which was not sent; it will be next time")
    return {n: block for n, block in found.items() if block is not None}


def method_of(world: World) -> Any:
    return registry.find("methods", world.config.method).METHOD(world.config.params)


def turn(world: World, method: Any, client: Client, inbox: Inbox) -> Reply:
    done = world.executor({client.id: method.turn(client, inbox)}, guard_of(world, client.when))
    if client.id not in done:
        raise Diverged(f"client {client.id} diverged and is skipped")
    return done[client.id]


def survey(method: Any, client: Client, inbox: Inbox) -> Reply:
    with torch.no_grad():
        return method.survey(client, inbox)
