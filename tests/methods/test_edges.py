"""Streams at the edge: one example, and settings that meet in odd ways. What holds for every method is in contracts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from profcil.engine import warmup
from profcil.errors import Diverged

METHODS = ("fedavg", "fedprox", "pro", "promax")


def usable(run) -> bool:
    return all(bool(torch.isfinite(t).all()) for b in run.server.blocks.values() for t in b.tensors.values())


@pytest.mark.parametrize("norm", ["group", "batch"])
@pytest.mark.parametrize("method", METHODS)
def test_clients_with_one_example(fresh, deal, method, norm):
    """Two clients hold one example of every task, a third holds forty of each class."""

    def owner(labels, tasks):
        given = np.full(len(labels), -1)
        for task in tasks:
            for label in task:
                given[np.flatnonzero(labels == label)[5:45]] = 2
            given[np.flatnonzero(labels == task[0])[0]] = 0
            given[np.flatnonzero(labels == task[1])[0]] = 1
        return given

    deal(owner)
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
