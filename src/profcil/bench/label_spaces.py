"""The memory of 1,000 and 10,000 classes: bytes, accuracy and server memory by the settings of the channel.

The features are real: those of CLINC150 under its warmed-up base. The classes are not: each is a pair of real classes.
Its mean is a random mixture of their means, and its examples are that mean plus 0.3 times residuals of real examples of
the two, of the training part for training and of the test part for testing; with whole residuals the classes overlap so
much that no head tells them apart. Negative values become 0, as in the real features. 150 classes give 11,175 pairs.

PRO then runs over these features as rows of a table, with a base that returns them unchanged and never moves: bank,
channel, rehearsal, refresh and evaluation are those of every run. Training is short, so that 10,000 classes take
minutes. Beside the accuracy after it stands that of a head in closed form, from the memory as clients receive it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from profcil import registry
from profcil.data.bundle import Bundle, Facts, Rows
from profcil.engine.evaluation import task_totals
from profcil.engine.loop import stream
from profcil.engine.run_state import RunState
from profcil.engine.warmup import warm
from profcil.engine.world import World, build_world, make_world
from profcil.memory import linear
from profcil.metrics.client_first import summary
from profcil.metrics.ledger import Ledger
from profcil.metrics.scores import Scores
from profcil.model.net import MODEL, Weights
from profcil.protocol.participation import participants
from profcil.protocol.plan_making import make_plan
from profcil.randomness import generator, torch_generator
from profcil.resolve import resolve

TASKS = 5
TRAIN_EACH = 6
TEST_EACH = 2
RESIDUAL = 0.3
CHUNK = 1_000
BASE = {"model.width": 32}  # of CLINC150's base: 96 features
STREAM = {"clients": 4, "participants": 2, "setting": "homogeneous", "warmup.rounds": 0, "model.norm": "none"}
TRAINING = {"train.rounds": 2, "train.epochs": 1, "train.batch": 256, "train.optimiser": "adam", "train.lr": 0.01}
PRO = {"base_rounds": 0, "quota": 2, "noise": 1.0, "refresh_at": "final"}
Part = tuple[Tensor, Tensor]  # features and labels


def real_features(data: Path, settings: Mapping[str, Any] = BASE) -> tuple[Part, Part]:
    """Features and labels of the training and the test part of CLINC150, under its warmed-up base."""
    world = make_world(resolve("clinc150", {"method": "pro"}, settings), data)
    warmed = warm(world, lambda *facts: None)
    world.net.load({"base": warmed.weights["base"]})
    parts = []
    for rows in (world.bundle.train, world.bundle.test):
        index = torch.arange(len(rows.y))
        parts.append((world.net.embed(rows, index), rows.y))
    return parts[0], parts[1]


def class_means(part: Part) -> Tensor:
    """The mean feature of every class."""
    u, y = part
    return torch.stack([u[y == label].mean(0) for label in range(int(y.max()) + 1)])


def synthetic_classes(train: Part, test: Part, classes: int, seed: int = 0) -> tuple[Rows, Rows]:
    """Examples of classes that are mixtures of two real ones each."""
    means = class_means(train)
    pairs = list(combinations(range(len(means)), 2))
    drawn = generator(seed, "bench", "pairs").permutation(len(pairs))[:classes]
    pair = torch.tensor([pairs[i] for i in drawn])
    share = torch.rand(classes, 1, generator=torch_generator(seed, "bench", "shares")) * 0.5 + 0.25
    centre = share * means[pair[:, 0]] + (1 - share) * means[pair[:, 1]]
    rows = []
    for name, part, each in (("train", train, TRAIN_EACH), ("test", test, TEST_EACH)):
        rng = torch_generator(seed, "bench", "residuals", name)
        x = centre.repeat(each, 1) + residuals(part, means, pair.repeat(each, 1), rng)
        rows.append(Rows(x.clamp(min=0), torch.arange(classes).repeat(each)))
    return rows[0], rows[1]


def residuals(part: Part, means: Tensor, pair: Tensor, rng: torch.Generator) -> Tensor:
    """For each pair of real classes the residual of a real example of one of them."""
    u, y = part
    side = torch.randint(0, 2, (len(pair), 1), generator=rng)
    label = pair.gather(1, side).flatten()
    order = y.argsort(stable=True)
    count = torch.bincount(y, minlength=len(means))
    start = count.cumsum(0) - count
    place = (torch.rand(len(label), generator=rng) * count[label]).long()
    row = order[start[label] + place]
    return RESIDUAL * (u[row] - means[label])


def world_for(train: Rows, test: Rows, classes: int, settings: Mapping[str, Any]) -> World:
    """A stream over rows of features, by PRO."""
    width = train.x.shape[1]
    sizes = {"task_size": classes // TASKS, "model.width": width}
    config = resolve("digits", {"method": "pro"}, {**STREAM, **TRAINING, **PRO, **sizes, **settings})
    facts = Facts("mixtures", "Mixtures of classes", "table", classes, None, None, views=(), encoder="perceptron")
    names = tuple(map(str, range(classes)))
    bundle = Bundle(facts, train, test, None, names, mean=(0.0,) * width, std=(1.0,) * width)
    plan = make_plan(train.y.numpy(), classes, config.stream, 0)
    return build_world(replace(config, dataset="mixtures"), bundle, plan)


def passing_base(weights: Weights) -> Weights:
    """The weights with a base that returns features as they are: two layers that are the identity."""
    base = {}
    for name, tensor in weights["base"].items():
        base[name] = torch.eye(len(tensor)) if tensor.dim() == 2 else torch.zeros_like(tensor)
    return {**weights, "base": base}


def run_stream(world: World) -> RunState:
    """A whole stream in memory."""
    method = registry.find("methods", world.config.method).METHOD(world.config.params)
    server = method.begin(passing_base(world.net.weights(MODEL)))
    state = RunState(server, Scores.empty(world.plan.positions, task_totals(world)), Ledger())
    return stream(world, method, state, lambda *facts: None)


def paper_downlink(world: World) -> int:
    """The paper's memory downlink, Σ b |Y^(p-1)| (2d + 1) over all turns."""
    plan = world.plan
    total = 0
    known: set[int] = set()
    for p in range(plan.positions):
        seen = set()
        for r in range(world.config.train.rounds):
            turns = participants(plan, p, r)
            total += 4 * len(known) * (2 * world.net.features + 1) * len(turns)
            seen = {y for c in turns for y in plan.observed(c, p)}
        known |= seen  # the participants of the last round refresh the memory
    return total


def closed_form_accuracy(world: World, state: RunState) -> float:
    """The accuracy in percent of discriminants from the memory as clients receive it: its means, and one variance for
    each feature."""
    memory = state.server.blocks["memory"].encoded(world.config.channel.coding).decoded()
    mean = memory.tensors["mean"].double()
    variance = memory.tensors["spread"].double().square().mean(0)
    weight, bias = linear.discriminants(mean, torch.diag(variance))
    labels = torch.tensor(memory.labels)
    test = world.bundle.test
    right = 0
    for x, y in zip(test.x.double().split(CHUNK), test.y.split(CHUNK), strict=True):
        found = labels[(x @ weight.T + bias).argmax(1)]
        right += int((found == y).sum())
    return 100 * right / len(test.y)


def case(data: Path, classes: int, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The memory downlink of a whole stream, beside the paper's formula; server memory and accuracy."""
    train, test = synthetic_classes(*real_features(data), classes)
    world = world_for(train, test, classes, settings)
    began = time.perf_counter()
    state = run_stream(world)
    faa = summary(state.scores.correct, state.scores.total, world.plan.orders)["faa"]
    closed = closed_form_accuracy(world, state)
    return {
        "ours": state.ledger.total(direction="down", kind="memory") / 1e6,
        "unit": "MB of memory sent",
        "reference": paper_downlink(world) / 1e6,
        "against": "the paper's formula",
        "note": f"FAA {faa:.2f}, closed form {closed:.2f}, server memory {state.server_bytes / 1e6:.2f} MB",
        "faa": faa,
        "closed_form": closed,
        "server_bytes": state.server_bytes,
        "seconds": time.perf_counter() - began,
    }
