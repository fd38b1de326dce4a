from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from profcil.protocol.participation import participants, warmup_participants
from profcil.protocol.plan import Plan, StreamSettings
from profcil.protocol.plan_making import make_plan

LABELS = np.arange(400) % 8
SEVERE = StreamSettings(clients=10, participants=3, task_size=2, support=0.4, coverage=0.5, disorder=0.6)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 10), st.integers(0, 3), st.integers(0, 50), st.integers(0, 100))
def test_participants_have_data_and_are_as_many_as_possible(count: int, position: int, round: int, seed: int) -> None:
    plan = make_plan(LABELS, 8, replace(SEVERE, participants=count), seed)
    drawn = participants(plan, position, round)
    active = set(plan.active(position).tolist())
    assert list(drawn) == sorted(set(drawn))
    assert set(drawn) <= active
    assert len(drawn) == min(count, len(active))
    assert all(type(c) is int for c in drawn)


def test_participation_is_uniform() -> None:
    plan = make_plan(LABELS, 8, replace(SEVERE, support=1.0), 0)
    counts = Counter(c for r in range(2000) for c in participants(plan, 1, r))
    assert all(abs(counts[c] - 600) < 5 * (2000 * 0.3 * 0.7) ** 0.5 for c in range(10))


def test_the_schedule_is_the_same_in_any_order_and_after_loading(tmp_path: Path) -> None:
    plan = make_plan(LABELS, 8, SEVERE, 5)
    rounds = [(p, r) for p in range(plan.positions) for r in range(6)]
    forwards = {at: participants(plan, *at) for at in rounds}
    plan.save(tmp_path / "plan.npz")
    again = Plan.load(tmp_path / "plan.npz")
    assert forwards == {at: participants(again, *at) for at in reversed(rounds)}


def test_rounds_positions_and_seeds_differ() -> None:
    one, two = (make_plan(LABELS, 8, replace(SEVERE, support=1.0), seed) for seed in (0, 1))
    assert len({participants(one, 0, r) for r in range(20)}) > 10
    assert [participants(one, 0, r) for r in range(5)] != [participants(one, 1, r) for r in range(5)]
    assert [participants(one, 0, r) for r in range(5)] != [participants(two, 0, r) for r in range(5)]


def test_a_position_without_data_has_no_participants() -> None:
    plan = make_plan([0, 0], 2, StreamSettings(3, 2, 1), 0)
    empty = [p for p, task in enumerate(plan.tasks) if task == (1,)]
    assert [participants(plan, p, 0) for p in empty] == [()]


def test_warmup_participants_own_data_at_some_position() -> None:
    plan = make_plan(np.arange(8), 8, StreamSettings(30, 30, 2, support=0.1), 0)
    owners = tuple(c for c in range(30) if len(plan.owned(c)))
    assert 0 < len(owners) <= 8
    assert warmup_participants(plan, 0) == owners
    some = make_plan(LABELS, 8, SEVERE, 0)
    assert len({warmup_participants(some, r) for r in range(20)}) > 5
    assert all(len(warmup_participants(some, r)) == 3 for r in range(20))
