"""FedAvg on digits under Flower's simulation engine, against our own executor: the same clients, turns and averages.

Both play the rounds of the same stream in one process on the same machine; the first round, in which Flower's
actors start and read the data, is not counted. Flower gets every core as an actor of its own, and is driven by its
own call, which looks for replies every tenth of a second. That the two models came out the same, within the rounding of
clients computed together, is part of the row.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import astuple
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from profcil import registry
from profcil.deploy.cluster import FLOWER_ENVIRONMENT
from profcil.engine.channel import Door, When
from profcil.engine.fleet import guard_of
from profcil.engine.loop import RunState, play
from profcil.engine.payload import Block, Reply
from profcil.engine.world import World, make_world
from profcil.methods.base import average
from profcil.metrics.ledger import Ledger
from profcil.metrics.scores import Scores
from profcil.model.net import MODEL, Weights
from profcil.protocol.participation import participants
from profcil.resolve import resolve

Played = tuple[float, Weights]  # seconds a round, and the model at the end


@lru_cache(maxsize=1)
def stage(sets: tuple[str, ...], workers: int) -> tuple[World, Any]:
    """World and method, once a process."""
    config = resolve("digits", {"method": "fedavg", "workers": workers}, sets)
    return make_world(config, Path("nowhere")), registry.find("methods", "fedavg").METHOD(config.params)


def case(setting: str = "severe", *sets: str) -> dict[str, Any]:
    """Seconds a round of both, over all rounds of a stream but its first."""
    try:
        import flwr.simulation  # noqa: F401
        import ray  # noqa: F401
    except ImportError:
        return {
            "note": "flwr[simulation] is not installed, so there is nothing to compare with; install profcil[deploy]"
        }
    sets = (f"setting={setting}", *sets)
    theirs, other = on_flower(sets)
    ours, model = here(sets)
    apart = max(float((model[b][k] - other[b][k]).abs().max()) for b in model for k in model[b])
    row = {"ours": ours, "unit": "s a round", "reference": theirs, "against": "Flower's simulation engine"}
    return row | {"largest_difference": apart}


def timed(world: World, one: Callable[[When, Weights], Weights]) -> Played:
    """Plays a stream's first round, and then the others by the clock."""
    rounds = world.config.train.rounds
    whens = [When("round", p, r, rounds) for p in range(world.plan.positions) for r in range(rounds)]
    weights = one(whens[0], world.net.weights(MODEL))
    began = time.perf_counter()
    for when in whens[1:]:
        weights = one(when, weights)
    return (time.perf_counter() - began) / (len(whens) - 1), weights


def here(sets: tuple[str, ...]) -> Played:
    """The loop's own rounds."""
    world, method = stage(sets, 0)
    state = RunState(method.begin(world.net.weights(MODEL)), Scores.empty(0, torch.zeros(0).numpy()), Ledger())
    door = Door(state.ledger, held=state.held)

    def one(when: When, _: Weights) -> Weights:
        clients = participants(world.plan, when.position, when.round)
        state.server = play(world, method, state, door, clients, when)[0]
        return state.server.weights()

    return timed(world, one)


def on_flower(sets: tuple[str, ...]) -> Played:
    """The same rounds as messages to Flower's virtual nodes."""
    with tempfile.TemporaryDirectory() as home:
        os.environ.update(FLOWER_ENVIRONMENT | {"FLWR_HOME": home, "OMP_NUM_THREADS": "1"})
        from flwr.clientapp import ClientApp
        from flwr.serverapp import ServerApp
        from flwr.simulation import run_simulation

        found: list[Played] = []
        client, server = ClientApp(), ServerApp()
        client.train()(turn)
        server.main()(lambda grid, context: found.append(served(grid, sets)))
        resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"log_to_driver": False}}
        run_simulation(server, client, stage(sets, 0)[0].plan.clients, backend_config=resources)  # type: ignore[arg-type]
    return found[0]


def served(grid: Any, sets: tuple[str, ...]) -> Played:
    """The server's side: asks the round's participants and averages their models."""
    from flwr.app import ConfigRecord, Message, RecordDict

    world, _ = stage(sets, 0)
    while len(nodes := sorted(grid.get_node_ids())) < world.plan.clients:
        time.sleep(0.01)

    def one(when: When, weights: Weights) -> Weights:
        model, place, asks = pack(weights), astuple(when)[1:], []
        for c in participants(world.plan, when.position, when.round):
            ask = ConfigRecord({"client": c, "when": list(place), "sets": list(sets)})
            asks.append(Message(RecordDict({"model": model, "ask": ask}), nodes[c], "train"))
        replies = [reply_of(m) for m in sorted(grid.send_and_receive(asks), key=client_of)]
        return average(replies) if replies else weights

    return timed(world, one)


def turn(message: Any, context: Any) -> Any:
    """The client's side: our turn of one client."""
    from flwr.app import Message, MetricRecord, RecordDict

    ask = message.content["ask"]
    world, method = stage(tuple(ask["sets"]), 1)
    c, when = ask["client"], When("round", *ask["when"])
    inbox = {name: Block("model", tensors) for name, tensors in unpack(message.content["model"]).items()}
    done = world.executor({c: method.turn(world.client(c, when), inbox)}, guard_of(world, when))[c]
    facts = MetricRecord({"client": c, "samples": done.samples})
    return Message(RecordDict({"model": pack(done.weights()), "facts": facts}), reply_to=message)


def client_of(message: Any) -> int:
    return int(message.content["facts"]["client"])


def reply_of(message: Any) -> Reply:
    blocks = {name: Block("model", tensors) for name, tensors in unpack(message.content["model"]).items()}
    return Reply(client_of(message), int(message.content["facts"]["samples"]), blocks)


def pack(weights: Weights) -> Any:
    from flwr.app import ArrayRecord

    return ArrayRecord({f"{b}/{k}": t for b, tensors in weights.items() for k, t in tensors.items()})


def unpack(record: Any) -> Weights:
    weights: Weights = {}
    for name, tensor in record.to_torch_state_dict().items():
        block, _, key = name.partition("/")
        weights.setdefault(block, {})[key] = tensor
    return weights
