"""The cost of a round for growing numbers of clients or classes, with constant participants and work per client.

The images are random, 8 x 8, and their number is constant; the plan uses the first of them, a fixed number per client.
A whole stream is run into a run folder, including saving and evaluation. Memory that grows with participants, rounds or
tasks shows in the resident memory after the first and the last position.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from profcil import registry
from profcil.bench.streams import first_and_last, read_events
from profcil.data.bundle import Bundle, Rows
from profcil.engine.evaluation import task_totals
from profcil.engine.recorder import RunRecorder
from profcil.engine.run import finish
from profcil.engine.run_state import RunState
from profcil.engine.world import World, build_world
from profcil.metrics.ledger import Ledger
from profcil.metrics.scores import Scores
from profcil.model.net import MODEL
from profcil.protocol.plan_making import make_plan
from profcil.resolve import resolve
from profcil.runs.folder import RunFolder

IMAGES = 1_000_000
TESTED = 2_000
TASKS = 10


def random_images(n: int, classes: int) -> Bundle:
    """Random images with the facts of the digits and a given number of classes."""
    digits = registry.find("data", "digits").FACTS
    facts = replace(digits, classes=classes, train=n, test=TESTED)
    rng = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (n, 1, 8, 8), dtype=torch.uint8, generator=rng)
    y = torch.arange(n) % classes
    train = Rows(x, y)
    test = Rows(x[:TESTED], y[:TESTED])
    names = ("",) * classes
    return Bundle(facts, train, test, None, names, mean=(0.5,), std=(0.5,))


def world_for(method: str, clients: int, classes: int, each: int, rounds: int, images: int = IMAGES) -> World:
    """A severe stream of ten tasks in which a client owns `each` images on average."""
    sets = {"clients": clients, "participants": 10, "task_size": classes // TASKS, "train.rounds": rounds}
    sets |= {"warmup.rounds": 0, "model.width": 8}
    assignments = [f"{key}={value}" for key, value in sets.items()]
    config = resolve("digits", {"method": method}, assignments)
    bundle = random_images(images, classes)
    owned = clients * each
    labels = bundle.train.y[:owned].numpy()
    plan = make_plan(labels, classes, config.stream, 0)
    return build_world(config, bundle, plan)


def run_stream(world: World, out: Path) -> list[dict[str, Any]]:
    """Run a whole stream and return its events."""
    module = registry.find("methods", world.config.method)
    method = module.METHOD(world.config.params)
    with RunFolder(out) as folder:
        folder.begin(world.config, world.plan)
        recorder = RunRecorder(world, folder, lambda progress: None, out)
        scores = Scores.empty(world.plan.positions, task_totals(world))
        server = method.begin(world.net.weights(MODEL))
        recorder.hold(RunState(server, scores, Ledger()))
        finish(recorder, method)
    return read_events(out)


def case(
    method: str, clients: int = 100, classes: int = 10, each: int = 10, rounds: int = 20, images: int = IMAGES
) -> dict[str, Any]:
    """Seconds per round over a whole stream, and resident memory after the first and the last position."""
    with tempfile.TemporaryDirectory() as scratch:
        world = world_for(method, clients, classes, each, rounds, images)
        events = run_stream(world, Path(scratch))
    stream_seconds = events[-1]["seconds"]
    seconds = stream_seconds / (rounds * TASKS)
    return {"ours": seconds, "unit": "s a round", **first_and_last(events)}
