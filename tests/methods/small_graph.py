"""A small graph with communities, and runs of graph methods on it. A run takes about a second, and its method forgets
without replay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from profcil import registry
from profcil.data.bundle import Bundle, Nodes
from profcil.engine import world as worlds
from profcil.engine.channel import Block
from profcil.metrics.client_first import summary

pytest.importorskip("torch_geometric")
CLASSES = 6
NODES_PER_CLASS = 40
COLUMNS = 12


def bundle() -> Bundle:
    """Six classes of forty nodes, a quarter of them for testing. Most edges are within a class."""
    rng = torch.Generator().manual_seed(5)
    y = torch.arange(CLASSES).repeat(NODES_PER_CLASS)
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
    """Makes runs of a method on that graph: three positions of two classes."""

    def make(method: str, **settings: Any) -> Any:
        monkeypatch.setattr(worlds, "load_bundle", lambda *a: bundle())
        given = {"setting": "homogeneous", "task_size": 2, "clients": 3, "participants": 3} | settings
        return fresh(method, dataset="cora", **given)

    return make


def second_position(run: Any, rounds: int = 3) -> tuple[Any, dict[str, Block]]:
    """A client in its second position with its private state of the first, and what the server sends it."""
    for r in range(rounds):
        run.play(0, r)
    c = next(c for c in run.clients(1, 0) if c in run.state.private)
    client = run.world.client(c, run.when(1, 0), run.state.private[c])
    return client, {n: run.server.blocks[n] for n in run.method.broadcast_to(c, run.server, client.when)}


def check_every_turn_replays(run: Any) -> None:
    """Every turn of a position replays the same amount, and the mask of the client's own labels does not change."""
    client, inbox = second_position(run)
    sizes = [next(run.method.turn(client, inbox)).source.size for _ in range(3)]
    assert len(set(sizes)) == 1 and sizes[0] > len(client.current)
    assert set(client.allowed(client.labels).nonzero().flatten().tolist()) == set(client.labels)


def check_forgets_less_than_fedavg(on_graph: Callable[..., Any], method: str) -> None:
    """The method has at most half of FedAvg's forgetting, and a much higher final accuracy."""
    settings = {"train__rounds": 6, "train__epochs": 3, "optimiser": "adam", "lr": 0.01}
    results = {}
    for name in ("fedavg", method):
        run = on_graph(name, **settings).stream()
        scores = run.state.scores
        results[name] = summary(scores.correct, scores.total, run.world.plan.orders)
    assert results[method]["af"] < 0.5 * results["fedavg"]["af"]
    assert results[method]["faa"] > results["fedavg"]["faa"] + 20
