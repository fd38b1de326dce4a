"""Finds the entries of a dictionary before the stream: rounds of sums from all clients.

It is written as a method, so that the same code computes and meters its rounds, in a simulation and in a deployment.
Labels and tasks are not used. The result is cached under a hash of everything it depends on.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from profcil import __version__
from profcil.config import Checked
from profcil.engine.channel import Block, Channel, Inbox, Reply, ServerState, When
from profcil.engine.client import Client
from profcil.engine.phases import Turn
from profcil.engine.summed_replies import Additive
from profcil.engine.warmup import cache_lock
from profcil.engine.world import World
from profcil.io.atomic_files import read_tensors, write_tensors
from profcil.io.cache_folder import cache_folder
from profcil.methods.base import Method
from profcil.methods.parts.addends import PlainSum
from profcil.metrics.ledger import Ledger
from profcil.metrics.scores import Scores
from profcil.model.dictionary import Dictionary
from profcil.model.net import Weights
from profcil.plain_values import plain
from profcil.protocol.participation import dictionary_participants
from profcil.randomness import torch_generator

Entries = dict[str, Tensor]
Watch = Callable[[str, When, dict[str, Any]], None]


class DictionarySearch(Method):
    """The search for entries: clients send sums under the present entries, the server updates them."""

    Params = Checked
    kinds = frozenset({"memory", "statistics"})
    additive: ClassVar[Additive] = {"sums": PlainSum()}

    def __init__(self, dictionary: Dictionary) -> None:
        super().__init__(Checked())
        self.sought = dictionary

    def broadcast(self, state: ServerState, when: When) -> Sequence[str]:
        return ("dictionary",)

    def turn(self, client: Client, inbox: Inbox) -> Turn:
        """The sums of all examples of a client, chunk by chunk."""
        yield from ()  # there is no training phase
        entries = dict(inbox["dictionary"].tensors)
        total: Entries = {}
        for chunk in client.current.split(client.examples.chunk):
            sums = self.sought.sums(entries, client.examples.inputs(chunk), client.when.round)
            total = {name: total[name] + value if name in total else value for name, value in sums.items()}
        return Reply(client.id, len(client.current), {"sums": Block("statistics", sent(total))})

    def aggregate(self, state: ServerState, replies: Sequence[Reply], when: When) -> ServerState:
        reports = [dict(r.blocks["sums"].tensors) for r in replies]
        if not reports:
            return state
        total = {name: sum(r[name].double() for r in reports) for name in reports[0]}
        entries = dict(state.blocks["dictionary"].tensors)
        updated = self.sought.update(entries, total, when.round)  # type: ignore[arg-type]
        return state.put(dictionary=Block("memory", updated))


def sent(sums: Entries) -> Entries:
    """Sums as they are sent: real numbers in float32, counts as integers."""
    return {name: value.float() if value.is_floating_point() else value for name, value in sums.items()}


@dataclass(frozen=True)
class DictionaryResult:
    """The entries, and what finding them took."""

    entries: Entries
    seconds: float  # that the search took, in this run or in an earlier one
    ledger: Ledger

    def added_to(self, weights: Weights) -> Weights:
        """The weights that a method begins with, and the entries, if there are any."""
        return {**weights, "dictionary": self.entries} if self.entries else weights


Find = Callable[[World, Dictionary, Watch], DictionaryResult]


def cache_key(world: World, dictionary: Dictionary) -> str:
    """A hash of everything that the entries depend on."""
    facts = {
        "version": __version__,
        "torch": torch.__version__,
        "data": world.bundle.fingerprint,
        "plan": world.plan.clean.digest,
        "seed": world.config.seed,
        "device": world.device.type,
        "transfer": world.config.transfer,
        "class": f"{type(dictionary).__module__}.{type(dictionary).__qualname__}",
        "dictionary": {name: str(value) for name, value in sorted(vars(dictionary).items())},
    }
    if world.config.robust.aggregation != "mean":
        facts["aggregation"] = world.config.robust.aggregation
    if world.protection:
        facts["rounds"] = 0
    if world.config.privacy.secure_sum:
        facts["privacy"] = plain(world.config.privacy)
    return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=16).hexdigest()


def prepare_dictionary(world: World, method: Method, watch: Watch, find: Find) -> DictionaryResult:
    """The dictionary of a method; without entries if it uses none. `find` is `find_entries` or, where no cache may be
    used, `compute`."""
    dictionary = dictionary_of(world, method)
    return find(world, dictionary, watch) if dictionary else DictionaryResult({}, 0.0, Ledger())


def dictionary_of(world: World, method: Method) -> Dictionary | None:
    """The dictionary that a method uses with this model and data."""
    no_inputs = world.bundle.train.inputs(world.bundle.train.y[:0])
    dictionary = method.dictionary(world.net, no_inputs)
    least = world.config.privacy.min_support
    if dictionary and least > 1:
        dictionary.min_support = max(dictionary.min_support, least)
    return dictionary


def find_entries(world: World, dictionary: Dictionary, watch: Watch) -> DictionaryResult:
    """The entries of a dictionary, from the cache if it has a readable copy. Otherwise they are computed and cached."""
    path = cache_folder() / "dictionary" / f"{cache_key(world, dictionary)}.safetensors"
    with cache_lock(path):
        cached = read_tensors(path)
        if cached is not None:
            tensors, facts = cached
            entries = {name: tensor.to(world.device) for name, tensor in tensors.items()}
            return DictionaryResult(entries, facts["seconds"], Ledger.from_csv(facts["ledger"]))
        result = compute(world, dictionary, watch)
        facts = {"seconds": result.seconds, "ledger": result.ledger.to_csv()}
        with suppress(OSError):  # without a cache file a later run computes the entries again
            write_tensors(path, result.entries, facts)
        return result


def compute(world: World, dictionary: Dictionary, watch: Watch) -> DictionaryResult:
    """Computes the rounds of the search. Every client takes part in every round."""
    from profcil.engine.loop import compute_round
    from profcil.engine.run_state import RunState

    began = time.perf_counter()
    method = DictionarySearch(dictionary)
    first = dictionary.begin(torch_generator(world.config.seed, "dictionary"))
    first = {name: tensor.to(world.device) for name, tensor in first.items()}
    server = ServerState().put(dictionary=Block("memory", first))
    state = RunState(server, Scores.empty(0, torch.zeros(0).numpy()), Ledger())
    channel = Channel(state.ledger, world.config.transfer, held=state.held)
    clients = dictionary_participants(world.plan)
    rounds = 0 if world.protection else dictionary.rounds  # noise would exceed the gain from the data
    for r in range(rounds):
        when = When("dictionary", 0, r, rounds)
        state.server, facts = compute_round(world, method, state, channel, clients, when)
        watch("dictionary", when, facts)
    entries = dict(state.server.blocks["dictionary"].tensors)
    return DictionaryResult(entries, time.perf_counter() - began, state.ledger)
