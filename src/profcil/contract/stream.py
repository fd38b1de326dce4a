"""One small stream in which everything happens, for every modality, and a look at what crosses in it.

Four tasks of two classes, three clients with an order each. Client 2 never holds more than one example of a task, and
is idle at the second position; at the third position everybody is idle. Classes return: what client 0 has learnt at the
first position, client 1 meets at the second. Two of the clients with data are drawn in a round.
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
from profcil.data.bundle import Bundle, Nodes, Rows
from profcil.data.loading import load_bundle
from profcil.engine.payload import Block
from profcil.protocol.plan import assemble

CLASSES, EACH, TESTED = 8, 10, 6
DATASET = {"image": "digits", "text": "clinc150", "graph": "cora"}
TASKS = ((6, 1), (3, 7), (0, 4), (5, 2))  # what has been seen is never a prefix of the class ids
ORDERS = [[0, 1, 2, 3], [1, 0, 3, 2], [0, 2, 1, 3]]
HELD = [{0: 5, 1: 4}, {0: 4, 1: 5}, {1: 8}, {0: 8}]  # task → client → examples of each class
ALONE = (0, 3)  # tasks of which client 2 holds a single example
LONG = re.compile(r"(steps|rounds|iterations)$")  # settings of a server that trains which say for how long


# -- data of every modality -------------------------------------------------------------------------------------------


def images() -> Bundle:
    """Eight digits, ten examples each for training and six for testing."""
    bundle = load_bundle("digits", Path("nowhere"), 0)

    def part(rows: Any, each: int) -> Rows:
        return rows.part(torch.cat([torch.nonzero(rows.y == y).flatten()[:each] for y in range(CLASSES)]))

    facts, names = replace(bundle.facts, classes=CLASSES), bundle.names[:CLASSES]
    train, test = part(bundle.train, EACH), part(bundle.test, TESTED)
    return replace(bundle, facts=facts, names=names, train=train, test=test, fingerprint="few digits")


def texts() -> Bundle:
    """Every class with a word of its own among common ones."""

    def part(seed: int, each: int) -> Rows:
        y, rng = torch.arange(CLASSES).repeat(each), torch.Generator().manual_seed(seed)
        words = torch.randint(1, 30, (len(y), 6), generator=rng)
        words[:, 2] = 30 + y
        words[::3, 5] = 0
        return Rows(words, y)

    facts = replace(registry.find("data", "clinc150").FACTS, classes=CLASSES)
    names = tuple(map(str, range(CLASSES)))
    return Bundle(facts, part(1, EACH), part(2, TESTED), None, names, vocabulary=30 + CLASSES, fingerprint="few words")


def graphs() -> Bundle:
    """All classes on one random graph."""
    y, rng = torch.arange(CLASSES).repeat(EACH + TESTED), torch.Generator().manual_seed(3)
    x = torch.nn.functional.one_hot(y, CLASSES + 2).float() + 0.3 * torch.rand(len(y), CLASSES + 2, generator=rng)
    ends = torch.randint(len(y), (2, 400), generator=rng)
    ends = ends[:, ends[0] != ends[1]]
    edges = torch.unique(torch.cat([ends, ends.flip(0)], 1), dim=1)
    train = torch.arange(len(y)) < CLASSES * EACH
    parts = [Nodes(x, edges, y[m], torch.nonzero(m).flatten()) for m in (train, ~train)]
    facts = replace(registry.find("data", "cora").FACTS, classes=CLASSES)
    return Bundle(facts, parts[0], parts[1], None, tuple(map(str, range(CLASSES))), fingerprint="a few nodes")


BUNDLES = {"image": images, "text": texts, "graph": graphs}


def plan_of(labels: Any, classes: int, settings: Any, seed: int) -> Any:
    """Who holds what, as said at the top."""
    owner = np.full(len(labels), -1)
    for task, shares in zip(TASKS, HELD, strict=True):
        for label in task:
            ids = iter(np.flatnonzero(labels == label))
            for client, count in shares.items():
                owner[[next(ids) for _ in range(count)]] = client
    for few in ALONE:
        owner[np.flatnonzero((labels == TASKS[few][0]) & (owner < 0))[0]] = 2
    return assemble(labels, owner, TASKS, np.array(ORDERS), settings, seed)


# -- what crosses ------------------------------------------------------------------------------------------------------


@dataclass
class Crossed:
    """What went from hand to hand, by direction and kind, seen from the method's side of the door."""

    bytes: dict[tuple[str, str], int] = field(default_factory=dict)
    has: dict[tuple[int, str], int] = field(default_factory=dict)  # client and block → version

    def add(self, direction: str, blocks: Mapping[str, Block]) -> None:
        for b in blocks.values():
            size = sum(t.numel() * t.element_size() for t in b.tensors.values())
            self.bytes[direction, b.kind] = self.bytes.get((direction, b.kind), 0) + size

    def arrived(self, client: int, inbox: Mapping[str, Block]) -> None:
        held = {n for n, b in inbox.items() for name in (n, b.origin) if self.has.get((client, name)) == b.version}
        self.has |= {(client, n): b.version for n, b in inbox.items()}
        self.add("down", {n: b for n, b in inbox.items() if n not in held})


def spy(method: Any, crossed: Crossed) -> None:
    """Takes a note of every inbox that the method's client half opens and every reply that its server half gets."""

    own: Any = type(method)

    class Spied(own):
        def turn(self, client: Any, inbox: Any) -> Any:
            crossed.arrived(client.id, inbox)
            return super().turn(client, inbox)

        def survey(self, client: Any, inbox: Any) -> Any:
            crossed.arrived(client.id, inbox)
            return super().survey(client, inbox)

        def aggregate(self, state: Any, replies: Any, when: Any) -> Any:
            for r in replies:
                crossed.add("up", r.blocks)
            return super().aggregate(state, replies, when)

        def absorb(self, state: Any, replies: Any, when: Any) -> Any:
            for r in replies if when.stage == "refresh" else ():
                crossed.add("up", r.blocks)
            return super().absorb(state, replies, when)

    method.__class__ = Spied  # the same object: whatever it holds already stays to be seen


def guard(method: Any, changed: set[str]) -> None:
    """Takes a note of everything that a client was given and that is no longer what it was when its turn is over."""

    own: Any = type(method)

    class Guarded(own):
        def turn(self, client: Any, inbox: Any) -> Any:
            given = Given(client, inbox)
            answer = yield from super().turn(client, inbox)
            changed.update(given.changed())
            return answer

        def survey(self, client: Any, inbox: Any) -> Any:
            given = Given(client, inbox)
            answer = super().survey(client, inbox)
            changed.update(given.changed())
            return answer

    method.__class__ = Guarded


class Given:
    """The tensors in a client's hands, each with the number of times that it has been written to."""

    def __init__(self, client: Any, inbox: Mapping[str, Block]) -> None:
        self.noted: list[tuple[str, torch.Tensor, int]] = []
        for name, block in inbox.items():
            self.note(f"block {name}", *block.tensors.values())
        self.note("its private memory", *(client.private or {}).values())
        self.note("its examples", *(t for t in vars(client.examples).values() if isinstance(t, torch.Tensor)))
        self.note("cached features", *client.cache.values())
        self.once, client.once = client.once, self.asked

    def asked(self, name: Any, make: Any) -> Any:
        """As `Client.once`, whose answers others will be given as well."""
        fact = self.once(name, make)
        self.note(f"what it worked out once as {name}", *(fact if isinstance(fact, tuple) else (fact,)))
        return fact

    def note(self, name: str, *things: Any) -> None:
        self.noted += [(name, t, t._version) for t in things if isinstance(t, torch.Tensor)]

    def changed(self) -> set[str]:
        return {name for name, tensor, version in self.noted if tensor._version != version}


def quick(name: str) -> dict[str, int]:
    """A server that trains does it for two steps only."""
    method = registry.find("methods", name).METHOD
    fields = dataclasses.fields(method.Params) if method.server_gradients else ()
    long = {f.name: f.default for f in fields if LONG.search(f.name)}
    return {name: min(count, 2) for name, count in long.items() if isinstance(count, int)}
