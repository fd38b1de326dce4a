"""What a round costs as the federation grows: more clients or more classes, the same participants, the same work each.

The images are random, 8 x 8, and always as many; a plan deals out the first of them, so many to a client. A whole
stream is played into a run folder, saving and scoring included. What grows with clients that have once taken part,
with rounds or with tasks would show in the resident memory between the first position and the last.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from profcil import registry
from profcil.bench.streams import grown
from profcil.data.bundle import Bundle, Rows
from profcil.engine.loop import RunState, task_totals
from profcil.engine.run import Keeper, finish
from profcil.engine.world import World, furnish
from profcil.metrics.ledger import Ledger
from profcil.metrics.scores import Scores
from profcil.model.net import MODEL
from profcil.protocol.plan import make_plan
from profcil.resolve import resolve
from profcil.runs.folder import RunFolder

IMAGES, TESTED, TASKS = 1_000_000, 2_000, 10


def made_images(n: int, classes: int) -> Bundle:
    """Random images under the digits' name, with as many classes as asked for."""
    facts = replace(registry.find("data", "digits").FACTS, classes=classes, train=n, test=TESTED)
    x = torch.randint(0, 256, (n, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    y = torch.arange(n) % classes
    return Bundle(facts, Rows(x, y), Rows(x[:TESTED], y[:TESTED]), None, ("",) * classes, mean=(0.5,), std=(0.5,))


def world_for(method: str, clients: int, classes: int, each: int, rounds: int, images: int = IMAGES) -> World:
    """A severe stream of ten tasks in which every client owns, on average, `each` images."""
    sets = {"clients": clients, "participants": 10, "task_size": classes // TASKS, "train.rounds": rounds}
    sets |= {"warmup.rounds": 0, "model.width": 8}
    config = resolve("digits", {"method": method}, [f"{k}={v}" for k, v in sets.items()])
    bundle = made_images(images, classes)
    return furnish(config, bundle, make_plan(bundle.train.y[: clients * each].numpy(), classes, config.stream, 0))


def played(world: World, out: Path) -> list[dict[str, Any]]:
    """The events of a whole run in this world."""
    method = registry.find("methods", world.config.method).METHOD(world.config.params)
    with RunFolder(out) as folder:
        folder.begin(world.config, world.plan)
        keeper = Keeper(world, folder, lambda progress: None, out)
        scores = Scores.empty(world.plan.positions, task_totals(world))
        keeper.hold(RunState(method.begin(world.net.weights(MODEL)), scores, Ledger()))
        finish(keeper, method)
    return [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]


def case(
    method: str, clients: int = 100, classes: int = 10, each: int = 10, rounds: int = 20, images: int = IMAGES
) -> dict[str, Any]:
    """Seconds a round over a whole stream, and resident memory after its first and its last position."""
    with tempfile.TemporaryDirectory() as scratch:
        events = played(world_for(method, clients, classes, each, rounds, images), Path(scratch))
    resident = [e["resident_mb"] for e in events if e["event"] == "position"]
    return {"ours": events[-1]["seconds"] / (rounds * TASKS), "unit": "s a round", **grown(resident)}
