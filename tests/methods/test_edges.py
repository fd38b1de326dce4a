"""Edge cases: clients with one example, rounds without participants, unusual settings. Cases that hold for every method
are in tests/contracts."""

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
}  # few steps of the server's training


def usable(run) -> bool:
    """Whether all tensors of the server are finite."""
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


@pytest.mark.parametrize("accelerate", ["auto", "off"])
def test_a_diverging_client_is_an_error_or_is_skipped(fresh, accelerate):
    with pytest.raises(Diverged, match=r"client \d+ diverged at position 1, round 1"):
        fresh("pro", loss_limit=0.0, accelerate=accelerate, warmup__rounds=0).stream()
    run = fresh("pro", loss_limit=0.0, accelerate=accelerate, warmup__rounds=0, on_divergence="skip-client")
    start = run.server.weights()["head"]["weight"]
    run.play(0, 0)
    assert torch.equal(run.server.weights()["head"]["weight"], start)


@pytest.mark.parametrize("gone", [{0}, {2}, {0, 1, 2}], ids=["first", "last", "all"])
@pytest.mark.parametrize("method", IMAGES)
def test_rounds_without_participants(fresh, monkeypatch, method, gone):
    """The server has the same blocks after position 1, where some rounds are empty, as after position 0."""
    monkeypatch.setattr(
        loop, "participants", lambda p, *at: () if at[0] == 1 and at[1] in gone else participants(p, *at)
    )
    run = fresh(method, train__rounds=3, **GENERATORS.get(method, {})).stream()
    assert usable(run)
    names = [{n for n in state.blocks if "/" not in n} for state in run.after_positions()[:2]]
    assert names[0] == names[1]


def test_a_returning_class_keeps_its_count_after_a_last_round_without_participants(fresh, assign_samples, monkeypatch):
    """Client 0 has task 0 at position 0 with ten examples per class, client 1 at position 1 with twenty."""

    def owner(labels, tasks):
        rank = [int((labels[:i] == y).sum()) for i, y in enumerate(labels)]
        return [0 if n < 10 else 1 if n < 30 else -1 for n in rank]

    assign_samples(owner, orders=[[0, 1, 2, 3, 4], [1, 0, 2, 3, 4]])
    monkeypatch.setattr(loop, "participants", lambda p, *at: () if at == (0, 2) else participants(p, *at))
    run = fresh("pro", clients=2, participants=2, train__rounds=3, refresh_at="both", merge="counts").stream()
    assert not any(n.endswith("_before_refresh") for n in run.after_positions()[0].blocks)
    bank = run.after_positions()[1].blocks["memory"]
    counts = dict(zip(bank.labels, bank.tensors["count"].tolist(), strict=True))
    assert {counts[y] for task in run.world.plan.tasks[:2] for y in task} == {30}


def test_more_base_rounds_than_rounds(tiny):
    run = tiny("promax", base_rounds=9, refresh_at="both", participants=4)
    assert len(run.server.blocks["memory"].labels) == 10


def test_runs_share_a_cached_warm_up_only_if_they_would_compute_the_same(fresh, monkeypatch, tmp_path):
    found = {}
    for narrow in (2, 4):
        monkeypatch.setenv("PROFCIL_CACHE", str(tmp_path / str(narrow)))
        run = fresh("fedavg", bottleneck=narrow)
        found[narrow] = (warmup.cache_key(run.world), run.server.weights()["base"])
    (key, base), (other_key, other_base) = found.values()
    assert key != other_key or all(torch.equal(base[k], other_base[k]) for k in base)


def test_every_draw_of_every_client_has_its_own_seed(fresh):
    run = fresh("pro")
    places = [(c, p, r) for c in (0, 1) for p in (0, 1) for r in (0, 1)]
    drawn = {run.client(c, p, r).number(purpose) for c, p, r in places for purpose in ("fit", "rehearse")}
    assert len(drawn) == 2 * len(places)
