"""A small graph with communities, and runs of graph methods on it: a second each, learnable and forgettable."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from profcil import registry
from profcil.data.bundle import Bundle, Nodes
from profcil.engine import world as worlds

pytest.importorskip("torch_geometric")
CLASSES, EACH, COLUMNS = 6, 40, 12


def bundle() -> Bundle:
    """Six classes of forty nodes, a quarter of them for testing; most edges lie within a class."""
    rng = torch.Generator().manual_seed(5)
    y = torch.arange(CLASSES).repeat(EACH)
    x = 0.5 * torch.nn.functional.one_hot(y, COLUMNS).float() + torch.rand(len(y), COLUMNS, generator=rng)
    ends = torch.randint(len(y), (2, 1500), generator=rng)
    keep = (y[ends[0]] == y[ends[1]]) | (torch.rand(1500, generator=rng) < 0.07)
    ends = ends[:, keep & (ends[0] != ends[1])]
    edges = torch.unique(torch.cat([ends, ends.flip(0)], 1), dim=1)
    test = torch.arange(len(y)) >= len(y) * 3 // 4
    parts = [Nodes(x, edges, y[m], torch.nonzero(m).flatten()) for m in (~test, test)]
    facts = replace(registry.find("data", "cora").FACTS, classes=CLASSES)
    return Bundle(facts, parts[0], parts[1], None, tuple(map(str, range(CLASSES))), fingerprint="communities")


@pytest.fixture
def on_graph(fresh: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Makes runs of a method on that graph: three positions of two classes, full batches unless told otherwise."""

    def make(method: str, **settings: Any) -> Any:
        monkeypatch.setattr(worlds, "load_bundle", lambda *a: bundle())
        given = {"setting": "homogeneous", "task_size": 2, "clients": 3, "participants": 3} | settings
        return fresh(method, dataset="cora", **given)

    return make


def later(run: Any, rounds: int = 3) -> tuple[Any, dict]:
    """A client in its second position with what it keeps of the first, and what the server sends it."""
    for r in range(rounds):
        run.play(0, r)
    c = next(c for c in run.clients(1, 0) if c in run.state.private)
    client = run.world.client(c, run.when(1, 0), run.state.private[c])
    return client, {n: run.server.blocks[n] for n in run.method.broadcast_to(c, run.server, client.when)}


def check_every_turn_replays(run: Any) -> None:
    """As much as a position's first one; the labels of the client's own stay what they are."""
    client, inbox = later(run)
    sizes = [next(run.method.turn(client, inbox)).source.size for _ in range(3)]
    assert len(set(sizes)) == 1 and sizes[0] > len(client.current)
    assert set(client.allowed(client.labels).nonzero().flatten().tolist()) == set(client.labels)
