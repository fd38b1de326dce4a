"""A run with a weak task: the same start as the clean run, less of one task, and nothing else moved."""

from __future__ import annotations

import numpy as np
import pytest

from profcil.engine.channel import When
from profcil.engine.warmup import cache_key

WEAK = {"stream__weak_task": 2, "stream__weak_strength": "severe", "stream__clients": 8, "train__epochs": 4}
CLEAN = {"stream__clients": 8, "train__epochs": 4}


@pytest.fixture
def pair(fresh):
    return fresh("fedavg", **CLEAN), fresh("fedavg", **WEAK)


def test_both_share_one_warm_up(pair, same_bits):
    clean, weak = pair
    assert cache_key(clean.world) == cache_key(weak.world) and clean.world.plan != weak.world.plan
    assert same_bits(clean.server, weak.server)
    assert [e for e in clean.ledger.entries if e.stage == "warmup"] == weak.ledger.entries


def test_other_cells_keep_data_epochs_and_turns(pair):
    clean, weak = pair
    plan, changed = weak.world.plan, 0
    for p in range(plan.positions):
        for r in range(3):
            assert set(weak.clients(p, r)) <= set(clean.clients(p, r))
            left = set(clean.clients(p, r)) - set(weak.clients(p, r))
            assert all(plan.orders[c, p] == 2 for c in left)
        for c in range(plan.clients):
            one, two = (run.client(c, p, 0) for run in pair)
            assert np.array_equal(one.examples.y, two.examples.y)
            same = one.current.tolist() == two.current.tolist() and one.budget == two.budget == 1.0
            assert same == (plan.orders[c, p] != 2) or not len(one.current)
            changed += not same
    assert changed


def test_a_turn_on_the_weak_task_trains_a_quarter_of_the_epochs(pair):
    _, weak = pair
    at = {(c, p) for p in range(weak.world.plan.positions) for c in weak.world.plan.active(p)}
    for c, p in at:
        phase = next(weak.method.turn(weak.client(c, p, 0), dict(weak.server.blocks)))
        assert phase.epochs == (1 if weak.world.plan.orders[c, p] == 2 else 4)
    assert len({weak.world.plan.orders[c, p] == 2 for c, p in at}) == 2


def test_the_warm_up_keeps_its_epochs_and_its_data(pair):
    for c in range(8):
        one, two = (run.world.client(c, When("warmup", 0, 0, 1)) for run in pair)
        assert one.current.tolist() == two.current.tolist() and two.budget == 1.0


@pytest.mark.parametrize("method", ["fedavg", "promax"])
def test_rounds_without_participants_are_computed(fresh, method):
    """All clients meet the weak task together, and one is left: most rounds there have no participant."""
    run = fresh(method, setting="homogeneous", **{**WEAK, "stream__participants": 1})
    before = [len(run.clients(2, r)) for r in range(3)]
    run.stream()
    assert 0 in before and (run.state.scores.correct[-1] >= 0).all()
