"""One round of five clients on a generated graph of ogbn-arxiv's size, and the scores after it.

Nodes, features, edges, classes and training examples are as many as in the real one; a few nodes are cited very
often, as papers are. Features and classes are random, which costs what real ones do.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from profcil import registry
from profcil.data import _graphs
from profcil.data.bundle import Bundle
from profcil.engine.channel import Door, When
from profcil.engine.loop import RunState, evaluate, judged_features, play, task_totals
from profcil.engine.run import peak_memory_mb
from profcil.engine.world import World, furnish
from profcil.metrics.ledger import Ledger
from profcil.metrics.scores import Scores
from profcil.model.net import MODEL
from profcil.protocol.participation import participants
from profcil.protocol.plan import make_plan
from profcil.resolve import resolve

NODES, EDGES, FEATURES = 169_343, 1_166_243, 128
SKEW = 3.0  # ends fall on node n·u^SKEW, u uniform: low numbers are cited most
PARTS = (0.537, 0.713)  # of the nodes: training up to here, validation up to here, the rest is tested


def made_graph(nodes: int = NODES, edges: int = EDGES) -> Bundle:
    """The whole graph under ogbn-arxiv's name."""
    facts, rng = registry.find("data", "ogbn_arxiv").FACTS, np.random.default_rng(0)
    cited = (nodes * rng.random(edges) ** SKEW).astype(np.int64)
    shuffled = rng.permutation(nodes)
    ends = _graphs.undirected(shuffled[np.stack([cited, rng.integers(0, nodes, edges)])], nodes)
    y, x = rng.permutation(nodes) % facts.classes, rng.standard_normal((nodes, FEATURES), dtype=np.float32)
    train, validation, test = np.split(np.arange(nodes), [int(share * nodes) for share in PARTS])
    facts = replace(facts, train=len(train), test=len(test))
    return _graphs.graph_bundle(facts, x, ends, y, (train, validation, test), ("",) * facts.classes)


def world_for(method: str, device: str, bundle: Bundle) -> World:
    config = resolve("ogbn_arxiv", {"method": method, "device": device, "setting": "homogeneous"})  # five take part
    return furnish(config, bundle, make_plan(bundle.train.y.numpy(), bundle.facts.classes, config.stream, config.seed))


def case(method: str = "promax", device: str = "cpu", nodes: int = NODES, edges: int = EDGES) -> dict[str, Any]:
    """Seconds of the first round, in which the base moves, with the refresh and the scores after it told apart."""
    world = world_for(method, device, made_graph(nodes, edges))
    made, when = registry.find("methods", method).METHOD(world.config.params), When("round", 0, 0, 1)
    state = RunState(made.begin(world.net.weights(MODEL)), Scores.empty(8, task_totals(world)), Ledger())
    clients, began = participants(world.plan, 0, 0), time.perf_counter()
    state.server, _ = play(world, made, state, Door(state.ledger, held=state.held), clients, when)
    settle(world)
    seconds, began = time.perf_counter() - began, time.perf_counter()
    evaluate(world, made, state.server, 0, judged_features(world, made, state.server))
    found = {"clients": len(clients), "scoring_seconds": time.perf_counter() - began}
    return {"ours": seconds, "unit": "s a round", "peak_memory_mb": peak_memory_mb(world), **found}


def settle(world: World) -> None:
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
