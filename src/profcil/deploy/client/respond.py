"""The client's side: a request arrives, the turn or survey is computed on local data, and a response is returned."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from flwr.app import RecordDict

from profcil import registry
from profcil.deploy.client import screen
from profcil.deploy.client.identity import PartitionIdentity, SiteIdentity
from profcil.deploy.client.spent import release_at
from profcil.deploy.client.store import SiteStore, remove_unused
from profcil.deploy.client.sum_noise import own_share
from profcil.deploy.client.sums import answer, begin_sum, longest_message
from profcil.deploy.encoded_blocks import coding_at, encoded_reply, received_block
from profcil.deploy.sum_messages import SumMessage, read_data, read_sum_head
from profcil.deploy.wire import Request, Response, UnreadableMessage
from profcil.engine.channel import Inbox, Reply
from profcil.engine.client import Client
from profcil.engine.dictionary import DictionarySearch, dictionary_of
from profcil.engine.executor import make_guard
from profcil.engine.sum_support import SupportCount
from profcil.engine.warmup import warmup_setup
from profcil.engine.world import World
from profcil.errors import Diverged, Failure, ProfcilError
from profcil.metrics.ledger import HEADER
from profcil.privacy.protection import digest
from profcil.privacy.settings import PrivacySettings


def respond(action: str, request: Request, identity: PartitionIdentity | SiteIdentity) -> Response:
    """The response to a request. An error is returned as one sentence and never raised over the network."""
    try:
        reply, sum_keys = compute(action, request, identity)
    except ProfcilError as error:
        screen.failed(str(error))
        kind = "diverged" if isinstance(error, Diverged) else "broken"
        if request.sum and kind == "diverged":
            error = Diverged(f"client {request.client} diverged")  # without its loss, which must not leave the client
        return Response(Reply(request.client, 0), request.when, error=str(error), error_kind=kind)
    has_private = reply.private is not None
    return Response(replace(reply, private=None), request.when, has_private, sum_keys=sum_keys)


def compute(action: str, request: Request, identity: PartitionIdentity | SiteIdentity) -> tuple[Reply, bytes]:
    """The reply to a request as it is sent. Its private tensors are stored here, under the id that the server chose.
    For a secure sum the reply stays here, too, and keys are sent in its place."""
    remove_unused(identity.home)
    store = SiteStore(identity.home, request.facts["run"], request.client)
    inbox = load_inbox(store, request)
    world = identity.make_world()
    identity.check_matches_server(world, request.facts)
    check_is_summed(world.config.privacy, request)
    positions = world.plan.positions
    screen.begins(action, request.when, positions)
    began = time.monotonic()
    world.features.clear()  # the cache is keyed by block version, and another run may use the same versions
    world, method = method_at(world, request.when.stage)
    world.withheld = withheld_from(world, action, request)
    if action == "count":
        method = SupportCount()
    private = store.read_private(request.private_id)
    world.secret = identity.noise_secret(store)
    client = identity.make_client(world, request, private)
    try:
        reply = run_turn(world, method, client, inbox) if action == "turn" else run_survey(method, client, inbox)
    except Diverged:
        if world.protection and world.protection.steps:  # that it diverged follows from the noised steps, and is sent
            name = f"diverged {digest(inbox)} {request.seen}"
            release_at(world.protection, name, client.id, client.when).note(store.spent)
        raise
    reply = world.protected(client, inbox, reply)
    sum_keys = b""
    if request.sum:
        share = own_share(world, method, client, inbox, request)
        sum_keys = begin_sum(store, request, reply, method.additive, world.config.privacy, share)
        reply = replace(reply, samples=0, blocks={}, notes={})
    elif world.protection and has_content(reply):
        release_at(world.protection, digest(reply.blocks), client.id, client.when).note(store.spent)
    reply = encoded_reply(reply, coding_at(world.config.channel, request.when))
    if reply.private is not None:
        store.write_private(request.next_private_id, reply.private, request.private_id)
    screen.ends(action, request.when, positions, time.monotonic() - began)
    if request.private_id and private is None and not request.sum:  # they were lost, so the client started without them
        reply = replace(reply, notes={**reply.notes, "memories_lost": 1.0})
    return reply, sum_keys


def withheld_from(world: World, action: str, request: Request) -> frozenset[int] | None:
    """The classes that are in no statistics of a client, as a sum of counts has said before; None if nothing is
    counted."""
    if action == "count" and not world.counts_first:
        raise Failure(f"client {request.client} is asked for its counts, but the settings of the app have none counted")
    if action != "survey" or request.when.before_stream or not world.counts_first:
        return None
    if request.withheld is None:
        raise Failure(
            f"client {request.client} is asked for statistics of classes that were not counted, but "
            "privacy.sum_support = true"
        )
    return frozenset(request.withheld)


def has_content(reply: Reply) -> bool:
    """Whether a reply says anything about the client's data."""
    return any(block.kind != HEADER for block in reply.blocks.values())


def check_is_summed(settings: PrivacySettings, request: Request) -> None:
    """Refuses to send a single reply where the settings say that replies are summed."""
    if settings.secure_sum and request.sum is None:
        raise Failure(
            f"client {request.client} is asked for its own reply, but privacy.secure_sum = true: it only adds to sums"
        )
    if request.sum and not settings.secure_sum:
        raise Failure(f"client {request.client} is asked for a secure sum, but privacy.secure_sum = false")


def respond_to_sum(content: RecordDict, home: Path) -> SumMessage:
    """The answer to a message of a secure sum after the first. An error is one sentence in it."""
    message = read_sum_head(content)
    store = SiteStore(home, message.run, message.client)
    try:
        data = answer(store, message, read_data(content, longest_message(store, message)))
    except (ProfcilError, UnreadableMessage) as error:
        screen.failed(str(error))
        return replace(message, error=str(error))
    return replace(message, data=data)


def load_inbox(store: SiteStore, request: Request) -> Inbox:
    """The blocks of a request: those that were sent with it, and those that the store holds."""
    # Stored blocks are read before new ones are written: a new block may overwrite a stored one of the same name.
    found = {
        name: received_block(store, request, name) if name in request.blocks else store.read_block(name, digest)
        for name, digest in request.digests.items()
    }
    for name in request.blocks:
        block = found.get(name)
        if block is not None:
            store.write_block(name, block)
    if missing := [name for name, block in found.items() if block is None]:
        raise Failure(
            f"client {request.client} does not hold block {missing[0]}, and the request did not include it; "
            "the next request will include it"
        )
    return {name: block for name, block in found.items() if block is not None}


def method_at(world: World, stage: str) -> tuple[World, Any]:
    """The method that computes a stage, and the world with its settings."""
    if stage == "warmup":
        return warmup_setup(world)
    method = registry.find("methods", world.config.method).METHOD(world.config.params)
    if stage != "dictionary":
        return world, method
    dictionary = dictionary_of(world, method)
    if dictionary is None:
        raise Failure(f"the method {world.config.method} uses no dictionary, but the server asks for its sums")
    return world, DictionarySearch(dictionary)


def run_turn(world: World, method: Any, client: Client, inbox: Inbox) -> Reply:
    replies = world.executor({client.id: method.turn(client, inbox)}, make_guard(world.config.train, client.when))
    if client.id not in replies:
        raise Diverged(f"client {client.id} diverged and is skipped")
    return replies[client.id]


def run_survey(method: Any, client: Client, inbox: Inbox) -> Reply:
    with torch.no_grad():
        return method.survey(client, inbox)
