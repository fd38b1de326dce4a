"""Streams at the edge: one example, and settings that meet in odd ways. What holds for every method is in contracts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from profcil import registry
from profcil.engine import loop, warmup
from profcil.errors import Diverged
from profcil.protocol.participation import participants

METHODS = ("fedavg", "fedprox", "pro", "promax")
IMAGES = [name for name, m in registry.usable("methods").items() if "image" in m.METHOD.modalities]
GENERATORS = {
    "mfcl": {"model__norm": "batch", "iterations": 2},
    "target": {"model__norm": "batch", "synthesis_rounds": 1, "synthesis_steps": 2, "student_steps": 1, "pool": 2},
}  # a few steps, where images are made


def usable(run) -> bool:
    return all(bool(torch.isfinite(t).all()) for b in run.server.blocks.values() for t in b.tensors.values())


@pytest.mark.parametrize("norm", ["group", "batch"])
@pytest.mark.parametrize("method", METHODS)
def test_clients_with_one_example(fresh, assign_samples, method, norm):
    """Two clients hold one example of every task, a third holds forty of each class."""

    def owner(labels, tasks):
        given = np.full(len(labels), -1)
        for task in tasks:
            for label in task:
                given[np.flatnonzero(labels == label)[5:45]] = 2
            given[np.flatnonzero(labels == task[0])[0]] = 0
            given[np.flatnonzero(labels == task[1])[0]] = 1
        return given

    assign_samples(owner)
    run = fresh(method, clients=3, participants=3, model__norm=norm).stream()
    assert usable(run)
    if method in ("pro", "promax"):
        assert run.server.blocks["memory"].tensors["count"].tolist() == [41] * 10


@pytest.mark.parametrize("executor", ["stacked", "serial"])
def test_a_diverging_client_is_named_or_skipped(fresh, executor):
    with pytest.raises(Diverged, match=r"client \d+ diverged at position 0, round 0"):
        fresh("pro", loss_limit=0.0, executor=executor, warmup__rounds=0).stream()
    run = fresh("pro", loss_limit=0.0, executor=executor, warmup__rounds=0, on_divergence="skip-client")
    start = run.server.weights()["head"]["weight"]
    run.play(0, 0)
    assert torch.equal(run.server.weights()["head"]["weight"], start)


@pytest.mark.parametrize("gone", [{0}, {2}, {0, 1, 2}], ids=["first", "last", "all"])
@pytest.mark.parametrize("method", IMAGES)
def test_rounds_in_which_nobody_takes_part(fresh, monkeypatch, method, gone):
    """At position 1; what a position leaves behind is the same kind of state as after any other."""
    monkeypatch.setattr(
        loop, "participants", lambda p, *at: () if at[0] == 1 and at[1] in gone else participants(p, *at)
    )
    run = fresh(method, train__rounds=3, **GENERATORS.get(method, {})).stream()
    assert usable(run)
    before, after = ({n for n in s.blocks if "/" not in n} for s in run.after_positions()[:2])
    assert before == after


def test_a_returning_class_keeps_its_examples_though_a_last_round_was_empty(fresh, assign_samples, monkeypatch):
    """Client 0 meets task 0 at position 0 with ten examples a class, client 1 at position 1 with twenty."""

    def owner(labels, tasks):
        rank = [int((labels[:i] == y).sum()) for i, y in enumerate(labels)]
        return [0 if n < 10 else 1 if n < 30 else -1 for n in rank]

    assign_samples(owner, orders=[[0, 1, 2, 3, 4], [1, 0, 2, 3, 4]])
    monkeypatch.setattr(loop, "participants", lambda p, *at: () if at == (0, 2) else participants(p, *at))
    run = fresh("pro", clients=2, participants=2, train__rounds=3, refresh_at="both").stream()
    assert not any(n.endswith("_before_refresh") for n in run.after_positions()[0].blocks)
    bank = run.after_positions()[1].blocks["memory"]
    counts = dict(zip(bank.labels, bank.tensors["count"].tolist(), strict=True))
    assert {counts[y] for task in run.world.plan.tasks[:2] for y in task} == {30}


def test_more_base_rounds_than_rounds(tiny):
    run = tiny("promax", base_rounds=9, refresh_at="both", participants=4)
    assert len(run.server.blocks["memory"].labels) == 10


def test_a_cached_warm_up_is_the_one_that_would_be_computed(fresh, monkeypatch, tmp_path):
    """Two runs may share a cached start only if they would compute the same one."""
    found = {}
    for narrow in (2, 4):
        monkeypatch.setenv("PROFCIL_CACHE", str(tmp_path / str(narrow)))
        run = fresh("fedavg", bottleneck=narrow)
        found[narrow] = (warmup.cache_key(run.world), run.server.weights()["base"])
    one, two = found.values()
    assert one[0] != two[0] or all(torch.equal(one[1][k], two[1][k]) for k in one[1])


def test_every_clients_draw_has_an_address_of_its_own(fresh):
    run = fresh("pro")
    places = [(c, p, r) for c in (0, 1) for p in (0, 1) for r in (0, 1)]
    drawn = {run.client(c, p, r).number(purpose) for c, p, r in places for purpose in ("fit", "rehearse")}
    assert len(drawn) == 2 * len(places)
