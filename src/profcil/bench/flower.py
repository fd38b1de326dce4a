"""FedAvg on digits under Flower's simulation engine and under our executor: the same clients, turns and averages.

Both run the rounds of the same stream in one process on the same machine. The first round, in which Flower's actors
start and read the data, is not timed. Flower has one actor per core and is driven by its own call, which polls for
replies every 0.1 seconds. The row includes the largest difference between the two final models.
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
from profcil.deploy.local.cluster import FLOWER_ENVIRONMENT
from profcil.engine.channel import Block, Channel, Reply, When
from profcil.engine.executor import make_guard
from profcil.engine.loop import compute_round
from profcil.engine.run_state import RunState
from profcil.engine.world import World, make_world
from profcil.methods.base import average
from profcil.metrics.ledger import Ledger
from profcil.metrics.scores import Scores
from profcil.model.net import MODEL, Weights
from profcil.protocol.participation import participants
from profcil.resolve import resolve

Timed = tuple[float, Weights]  # seconds per round, and the final model


@lru_cache(maxsize=1)
def setup(sets: tuple[str, ...], workers: int) -> tuple[World, Any]:
    """World and method, built once per process."""
    config = resolve("digits", {"method": "fedavg", "workers": workers}, sets)
    return make_world(config, Path("nowhere")), registry.find("methods", "fedavg").METHOD(config.params)


def case(setting: str = "severe", *sets: str) -> dict[str, Any]:
    """Seconds per round of both, over all rounds of a stream but the first."""
    try:
        import flwr.simulation  # noqa: F401
        import ray  # noqa: F401
    except ImportError:
        return {"note": "flwr[simulation] is not installed, so there is no comparison; install profcil[deploy]"}
    sets = (f"setting={setting}", *sets)
    flower_seconds, flower_model = run_on_flower(sets)
    seconds, model = run_here(sets)
    row = {"ours": seconds, "unit": "s a round", "reference": flower_seconds, "against": "Flower's simulation engine"}
    return row | {"largest_difference": largest_difference(model, flower_model)}


def largest_difference(one: Weights, two: Weights) -> float:
    """The largest absolute difference between two models."""
    largest = []  # by tensor
    for block, tensors in one.items():
        for key, tensor in tensors.items():
            difference = tensor - two[block][key]
            largest.append(float(difference.abs().max()))
    return max(largest)


def time_rounds(world: World, run_round: Callable[[When, Weights], Weights]) -> Timed:
    """Run the rounds of a stream and time all but the first."""
    rounds = world.config.train.rounds
    whens = [When("round", p, r, rounds) for p in range(world.plan.positions) for r in range(rounds)]
    weights = run_round(whens[0], world.net.weights(MODEL))
    began = time.perf_counter()
    for when in whens[1:]:
        weights = run_round(when, weights)
    seconds = time.perf_counter() - began
    return seconds / (len(whens) - 1), weights


def run_here(sets: tuple[str, ...]) -> Timed:
    """Run the stream with our executor."""
    world, method = setup(sets, 0)
    server = method.begin(world.net.weights(MODEL))
    no_scores = Scores.empty(0, torch.zeros(0).numpy())
    state = RunState(server, no_scores, Ledger())
    channel = Channel(state.ledger, held=state.held)

    def run_round(when: When, _: Weights) -> Weights:
        clients = participants(world.plan, when.position, when.round)
        state.server = compute_round(world, method, state, channel, clients, when)[0]
        return state.server.weights()

    return time_rounds(world, run_round)


def run_on_flower(sets: tuple[str, ...]) -> Timed:
    """Run the stream with messages to Flower's virtual nodes."""
    with tempfile.TemporaryDirectory() as home:
        os.environ.update(FLOWER_ENVIRONMENT | {"FLWR_HOME": home, "OMP_NUM_THREADS": "1"})
        from flwr.clientapp import ClientApp
        from flwr.serverapp import ServerApp
        from flwr.simulation import run_simulation

        results: list[Timed] = []
        client = ClientApp()
        server = ServerApp()
        client.train()(turn)
        server.main()(lambda grid, context: results.append(serve(grid, sets)))
        resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"log_to_driver": False}}
        clients = setup(sets, 0)[0].plan.clients
        run_simulation(server, client, clients, backend_config=resources)  # type: ignore[arg-type]
    return results[0]


def serve(grid: Any, sets: tuple[str, ...]) -> Timed:
    """The server: send the model to the participants of each round and average their replies."""
    from flwr.app import ConfigRecord, Message, RecordDict

    world, _ = setup(sets, 0)
    while len(nodes := sorted(grid.get_node_ids())) < world.plan.clients:
        time.sleep(0.01)

    def run_round(when: When, weights: Weights) -> Weights:
        model = pack(weights)
        address = astuple(when)[1:]  # without the stage
        messages = []
        for c in participants(world.plan, when.position, when.round):
            request = ConfigRecord({"client": c, "when": list(address), "sets": list(sets)})
            messages.append(Message(RecordDict({"model": model, "ask": request}), nodes[c], "train"))
        replies = [reply_of(m) for m in sorted(grid.send_and_receive(messages), key=client_of)]
        return average(replies) if replies else weights

    return time_rounds(world, run_round)


def turn(message: Any, context: Any) -> Any:
    """The client: compute one turn with our executor."""
    from flwr.app import Message, MetricRecord, RecordDict

    request = message.content["ask"]
    world, method = setup(tuple(request["sets"]), 1)
    c = request["client"]
    when = When("round", *request["when"])
    inbox = blocks_of(message)
    started = {c: method.turn(world.client(c, when), inbox)}
    reply = world.executor(started, make_guard(world.config.train, when))[c]
    facts = MetricRecord({"client": c, "samples": reply.samples})
    return Message(RecordDict({"model": pack(reply.weights()), "facts": facts}), reply_to=message)


def blocks_of(message: Any) -> dict[str, Block]:
    """The model of a Flower message as blocks."""
    return {name: Block("model", tensors) for name, tensors in unpack(message.content["model"]).items()}


def client_of(message: Any) -> int:
    """The client id in a reply."""
    return int(message.content["facts"]["client"])


def reply_of(message: Any) -> Reply:
    """A Flower message as a reply of our engine."""
    samples = int(message.content["facts"]["samples"])
    return Reply(client_of(message), samples, blocks_of(message))


def pack(weights: Weights) -> Any:
    """A model as a Flower record."""
    from flwr.app import ArrayRecord

    arrays = {}
    for block, tensors in weights.items():
        for key, tensor in tensors.items():
            arrays[f"{block}/{key}"] = tensor
    return ArrayRecord(arrays)


def unpack(record: Any) -> Weights:
    """A model from a Flower record."""
    weights: Weights = {}
    for name, tensor in record.to_torch_state_dict().items():
        block, _, key = name.partition("/")
        weights.setdefault(block, {})[key] = tensor
    return weights
