"""One round of five clients on a generated graph of ogbn-arxiv's size, and the evaluation after it.

The numbers of nodes, features, edges, classes and training examples are those of the real graph. A few nodes have very
high degree, as in citation graphs. Features and classes are random, which does not change the cost.
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
from profcil.engine.channel import Channel, When
from profcil.engine.evaluation import evaluate, evaluation_features, task_totals
from profcil.engine.loop import compute_round
from profcil.engine.machine import peak_memory_mb
from profcil.engine.run_state import RunState
from profcil.engine.world import World, build_world
from profcil.metrics.ledger import Ledger
from profcil.metrics.scores import Scores
from profcil.model.net import MODEL
from profcil.protocol.participation import participants
from profcil.protocol.plan_making import make_plan
from profcil.resolve import resolve

NODES = 169_343
EDGES = 1_166_243
FEATURES = 128
SKEW = 3.0  # the cited node is n·u^SKEW for a uniform u, so low numbers are cited most
PARTS = (
    0.537,
    0.713,
)  # where the training part and the validation part end, as fractions of the nodes; the rest is the test part


def random_graph(nodes: int = NODES, edges: int = EDGES) -> Bundle:
    """A random graph with the facts of ogbn-arxiv."""
    facts = registry.find("data", "ogbn_arxiv").FACTS
    rng = np.random.default_rng(0)
    skewed = nodes * rng.random(edges) ** SKEW
    cited = skewed.astype(np.int64)
    shuffled = rng.permutation(nodes)
    citing = rng.integers(0, nodes, edges)
    citations = shuffled[np.stack([cited, citing])]
    pairs = _graphs.undirected(citations, nodes)
    y = rng.permutation(nodes) % facts.classes
    x = rng.standard_normal((nodes, FEATURES), dtype=np.float32)
    bounds = [int(share * nodes) for share in PARTS]
    train, validation, test = np.split(np.arange(nodes), bounds)
    facts = replace(facts, train=len(train), test=len(test))
    names = ("",) * facts.classes
    return _graphs.graph_bundle(facts, x, pairs, y, (train, validation, test), names)


def world_for(method: str, device: str, bundle: Bundle) -> World:
    """A homogeneous stream on the graph, in which five clients take part in a round."""
    config = resolve("ogbn_arxiv", {"method": method, "device": device, "setting": "homogeneous"})
    labels = bundle.train.y.numpy()
    plan = make_plan(labels, bundle.facts.classes, config.stream, config.seed)
    return build_world(config, bundle, plan)


def case(method: str = "promax", device: str = "cpu", nodes: int = NODES, edges: int = EDGES) -> dict[str, Any]:
    """Seconds of the first round, in which the base is trained, and of the evaluation after it."""
    world = world_for(method, device, random_graph(nodes, edges))
    module = registry.find("methods", method)
    instance = module.METHOD(world.config.params)
    when = When("round", 0, 0, 1)
    server = instance.begin(world.net.weights(MODEL))
    scores = Scores.empty(8, task_totals(world))
    state = RunState(server, scores, Ledger())
    channel = Channel(state.ledger, held=state.held)
    clients = participants(world.plan, 0, 0)
    began = time.perf_counter()
    state.server, _ = compute_round(world, instance, state, channel, clients, when)
    synchronise(world)
    seconds = time.perf_counter() - began
    began = time.perf_counter()
    features = evaluation_features(world, instance, state.server)
    evaluate(world, instance, state.server, 0, features)
    scoring = time.perf_counter() - began
    row: dict[str, Any] = {"ours": seconds, "unit": "s a round", "peak_memory_mb": peak_memory_mb(world)}
    return row | {"clients": len(clients), "scoring_seconds": scoring}


def synchronise(world: World) -> None:
    """Wait until the GPU has finished."""
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
