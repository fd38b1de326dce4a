"""A small stream with all special cases, for every modality, and tools to observe what a method sends and writes.

There are four tasks of two classes and three clients, each with its own order. Client 2 never has more than one example
of a task, and is idle at the second position; at the third position all clients are idle. Classes return: client 1
has at the second position the classes that client 0 had at the first. Two of the clients with data take part in each
round.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from profcil import registry
from profcil.data.bundle import Bundle, Facts, Nodes, Rows
from profcil.data.loading import column_statistics, load_bundle
from profcil.engine.channel import Block
from profcil.protocol.plan_making import assemble

CLASSES = 8
TRAIN_PER_CLASS = 10
TEST_PER_CLASS = 6
COLUMNS = 10  # of the table
DATASET = {"image": "digits", "text": "clinc150", "graph": "cora", "table": "digits"}  # whose recipe is used
TASKS = ((6, 1), (3, 7), (0, 4), (5, 2))  # the seen classes are never a prefix of the class ids
ORDERS = [[0, 1, 2, 3], [1, 0, 3, 2], [0, 2, 1, 3]]
SHARES = [{0: 5, 1: 4}, {0: 4, 1: 5}, {1: 8}, {0: 8}]  # by task: client → examples of each class
SINGLE_EXAMPLE_TASKS = (0, 3)  # tasks of which client 2 has a single example
DURATION = re.compile(r"(steps|rounds|iterations)$")  # settings that say how long a server trains


# -- data of every modality -------------------------------------------------------------------------------------------


def images() -> Bundle:
    """Eight digits with ten training and six test examples each."""
    bundle = load_bundle("digits", Path("nowhere"), 0)

    def first_of_each(rows: Any, count: int) -> Rows:
        ids = [torch.nonzero(rows.y == y).flatten()[:count] for y in range(CLASSES)]
        return rows.part(torch.cat(ids))

    facts = replace(bundle.facts, classes=CLASSES)
    names = bundle.names[:CLASSES]
    train = first_of_each(bundle.train, TRAIN_PER_CLASS)
    test = first_of_each(bundle.test, TEST_PER_CLASS)
    return replace(bundle, facts=facts, names=names, train=train, test=test, fingerprint="few digits")


def texts() -> Bundle:
    """Random common words, with one word in each text that is specific to its class."""

    def part(seed: int, count: int) -> Rows:
        y = torch.arange(CLASSES).repeat(count)
        rng = torch.Generator().manual_seed(seed)
        words = torch.randint(1, 30, (len(y), 6), generator=rng)
        words[:, 2] = 30 + y
        words[::3, 5] = 0
        return Rows(words, y)

    facts = replace(registry.find("data", "clinc150").FACTS, classes=CLASSES)
    names = tuple(map(str, range(CLASSES)))
    train = part(1, TRAIN_PER_CLASS)
    test = part(2, TEST_PER_CLASS)
    return Bundle(facts, train, test, None, names, vocabulary=30 + CLASSES, fingerprint="few words")


def graphs() -> Bundle:
    """All classes on one random graph."""
    y = torch.arange(CLASSES).repeat(TRAIN_PER_CLASS + TEST_PER_CLASS)
    rng = torch.Generator().manual_seed(3)
    width = CLASSES + 2
    noise = torch.rand(len(y), width, generator=rng)
    x = torch.nn.functional.one_hot(y, width).float() + 0.3 * noise
    pairs = torch.randint(len(y), (2, 400), generator=rng)
    pairs = pairs[:, pairs[0] != pairs[1]]
    edges = torch.unique(torch.cat([pairs, pairs.flip(0)], 1), dim=1)
    is_train = torch.arange(len(y)) < CLASSES * TRAIN_PER_CLASS

    def part(mask: torch.Tensor) -> Nodes:
        return Nodes(x, edges, y[mask], torch.nonzero(mask).flatten())

    facts = replace(registry.find("data", "cora").FACTS, classes=CLASSES)
    names = tuple(map(str, range(CLASSES)))
    return Bundle(facts, part(is_train), part(~is_train), None, names, fingerprint="a few nodes")


def tables() -> Bundle:
    """Rows of numbers around the mean of their class, in columns of different scales."""

    def part(seed: int, count: int) -> Rows:
        y = torch.arange(CLASSES).repeat(count)
        noise = torch.randn(len(y), COLUMNS, generator=torch.Generator().manual_seed(seed))
        means = torch.nn.functional.one_hot(y, COLUMNS) * 3.0
        return Rows((means + noise) * torch.logspace(-2, 2, COLUMNS) + 5, y)

    facts = Facts("few rows", "Few rows", "table", CLASSES, None, None, views=("noise", "mask"), encoder="perceptron")
    names = tuple(map(str, range(CLASSES)))
    train = part(4, TRAIN_PER_CLASS)
    mean, std = column_statistics(train.x)
    return Bundle(facts, train, part(5, TEST_PER_CLASS), None, names, mean=mean, std=std, fingerprint="few rows")


BUNDLES = {"image": images, "text": texts, "graph": graphs, "table": tables}


def contract_plan(labels: Any, classes: int, settings: Any, seed: int) -> Any:
    """The plan of the stream described at the top; the arguments are those of `make_plan`."""
    owner = np.full(len(labels), -1)
    for task, shares in zip(TASKS, SHARES, strict=True):
        for label in task:
            ids = iter(np.flatnonzero(labels == label))
            for client, count in shares.items():
                owner[[next(ids) for _ in range(count)]] = client
    for task_id in SINGLE_EXAMPLE_TASKS:
        is_free = (labels == TASKS[task_id][0]) & (owner < 0)
        owner[np.flatnonzero(is_free)[0]] = 2
    return assemble(labels, owner, TASKS, np.array(ORDERS), settings, seed)


# -- what a method sends and writes -----------------------------------------------------------------------------------


@dataclass
class CountedTraffic:
    """The bytes that a method received and sent, by direction and kind, counted on the method's side."""

    bytes: dict[tuple[str, str], int] = field(default_factory=dict)
    versions: dict[tuple[int, str], int] = field(default_factory=dict)  # of the block that a client holds

    def add(self, direction: str, blocks: Mapping[str, Block]) -> None:
        """Count the bytes of some blocks."""
        for block in blocks.values():
            size = sum(t.numel() * t.element_size() for t in block.tensors.values())
            key = (direction, block.kind)
            self.bytes[key] = self.bytes.get(key, 0) + size

    def receive(self, client: int, inbox: Mapping[str, Block]) -> None:
        """Count the blocks of an inbox that the client does not hold already."""
        new = {name: block for name, block in inbox.items() if not self.holds(client, name, block)}
        for name, block in inbox.items():
            self.versions[client, name] = block.version
        self.add("down", new)

    def holds(self, client: int, name: str, block: Block) -> bool:
        """Whether a client has this version of a block, under its own name or that of its origin."""
        own = self.versions.get((client, name))
        of_origin = self.versions.get((client, block.origin))
        return block.version in (own, of_origin)


def record_traffic(method: Any, traffic: CountedTraffic) -> None:
    """Make a method count every inbox that its client half opens and every reply that its server half gets."""

    original: Any = type(method)

    class Recorded(original):
        def turn(self, client: Any, inbox: Any) -> Any:
            traffic.receive(client.id, inbox)
            return super().turn(client, inbox)

        def survey(self, client: Any, inbox: Any) -> Any:
            traffic.receive(client.id, inbox)
            return super().survey(client, inbox)

        def aggregate(self, state: Any, replies: Any, when: Any) -> Any:
            for reply in replies:
                traffic.add("up", reply.blocks)
            return super().aggregate(state, replies, when)

        def absorb(self, state: Any, replies: Any, when: Any) -> Any:
            for reply in replies if when.stage == "refresh" else ():
                traffic.add("up", reply.blocks)
            return super().absorb(state, replies, when)

    method.__class__ = Recorded  # in place, so that attributes the method has set stay visible


def record_writes(method: Any, changed: set[str]) -> None:
    """Make a method report every given tensor that was written to during a client's turn."""

    original: Any = type(method)

    class Recorded(original):
        def turn(self, client: Any, inbox: Any) -> Any:
            given = GivenTensors(client, inbox)
            answer = yield from super().turn(client, inbox)
            changed.update(given.changed())
            return answer

        def survey(self, client: Any, inbox: Any) -> Any:
            given = GivenTensors(client, inbox)
            answer = super().survey(client, inbox)
            changed.update(given.changed())
            return answer

    method.__class__ = Recorded


class GivenTensors:
    """The tensors that a client is given, each with its version, which torch increments on every in-place write."""

    def __init__(self, client: Any, inbox: Mapping[str, Block]) -> None:
        self.noted: list[tuple[str, torch.Tensor, int]] = []
        for name, block in inbox.items():
            self.note(f"block {name}", *block.tensors.values())
        self.note("its private state", *(client.private or {}).values())
        self.note("its examples", *vars(client.examples).values())
        self.note("cached features", *client.cache.values())
        self.once = client.once
        client.once = self.noting_once

    def noting_once(self, name: Any, make: Any) -> Any:
        """`Client.once`, whose results are shared with other turns and so are noted as well."""
        value = self.once(name, make)
        self.note(f"the value cached once as {name}", *(value if isinstance(value, tuple) else (value,)))
        return value

    def note(self, name: str, *values: Any) -> None:
        """Note the present version of every tensor among some values."""
        self.noted += [(name, t, t._version) for t in values if isinstance(t, torch.Tensor)]

    def changed(self) -> set[str]:
        """The names of the tensors that were written to since they were noted."""
        return {name for name, tensor, version in self.noted if tensor._version != version}


def short_server_training(name: str) -> dict[str, int]:
    """Settings that limit the training of a method's server to two steps; empty for a server that does not train."""
    method = registry.find("methods", name).METHOD
    if not method.server_gradients:
        return {}
    durations = {f.name: f.default for f in dataclasses.fields(method.Params) if DURATION.search(f.name)}
    return {setting: min(count, 2) for setting, count in durations.items() if isinstance(count, int)}
