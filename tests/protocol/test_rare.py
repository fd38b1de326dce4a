"""Rare classes keep the stated number of examples, all others stay, and plans without them are as before."""

from __future__ import annotations

from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profcil.errors import ConfigError
from profcil.protocol.plan import Plan
from profcil.protocol.plan_making import make_plan
from profcil.protocol.rare import rare_classes
from profcil.protocol.settings import StreamSettings

LABELS = np.random.default_rng(0).permutation(np.repeat(np.arange(12), 30))
PLAIN = StreamSettings(clients=8, participants=4, task_size=3, support=0.5, coverage=0.7, disorder=0.5)


def plan_with(share: float, examples: int, seed: int = 0) -> Plan:
    return make_plan(LABELS, 12, replace(PLAIN, rare=share, rare_examples=examples), seed)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 10), st.integers(1, 40), st.integers(0, 50))
def test_rare_classes_keep_so_many_examples_and_the_others_all(tenths, examples, seed):
    plan = plan_with(tenths / 10, examples, seed)
    rare = rare_classes(12, tenths / 10, seed)
    counts = np.bincount(LABELS[plan.ids], minlength=12)
    assert len(rare) == max(1, int(tenths * 1.2 + 0.5))
    for y in range(12):
        assert counts[y] == (min(examples, 30) if y in rare else 30)
    facts = plan.audit()
    assert facts["support_assumption"]
    assert facts["rare_classes"] == list(rare)
    assert facts["rare_examples"] == examples


def test_an_example_that_stays_has_the_owner_that_it_had():
    plain, rare = make_plan(LABELS, 12, PLAIN, 3), plan_with(0.5, 4, 3)
    assert np.array_equal(plain.orders, rare.orders)
    for client in range(8):
        assert set(rare.owned(client)) <= set(plain.owned(client))
        kept = {i for i in plain.owned(client) if LABELS[i] not in rare_classes(12, 0.5, 3)}
        assert kept <= set(rare.owned(client))


def test_more_examples_and_more_classes_are_supersets():
    few, more = set(plan_with(0.5, 2).ids), set(plan_with(0.5, 5).ids)
    assert few < more
    assert set(rare_classes(12, 0.3, 0)) < set(rare_classes(12, 0.6, 0))


def test_a_plan_without_rare_classes_is_the_same_whatever_their_number(tmp_path):
    """The digest of older plans stays, and they can be read."""
    plain = make_plan(LABELS, 12, PLAIN, 0)
    assert plain.digest == plan_with(0.0, 7).digest
    assert not any(key.startswith("rare") for key in plain.header["settings"])
    assert "rare_classes" not in plain.audit()
    assert "rare" not in plain.describe()


def test_a_plan_with_rare_classes_survives_its_file(tmp_path):
    plan = plan_with(0.25, 2)
    plan.save(tmp_path / "plan.npz")
    read = Plan.load(tmp_path / "plan.npz")
    assert read == plan
    assert read.audit() == plan.audit()
    assert asdict(read.settings)["rare"] == 0.25
    assert "rare classes" in plan.describe()


@pytest.mark.parametrize("change", [{"rare": 1.5}, {"rare": -0.1}, {"rare_examples": 0}, {"rare_examples": 2.5}])
def test_impossible_numbers_are_refused(change):
    with pytest.raises(ConfigError, match="rare"):
        replace(PLAIN, **change)
