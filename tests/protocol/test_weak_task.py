"""The weak task loses the stated fractions, nothing else changes, and every class keeps an example."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profcil.errors import ConfigError, DataError
from profcil.protocol.participation import participants, warmup_participants
from profcil.protocol.plan import Plan, StreamSettings
from profcil.protocol.plan_making import assemble, make_plan
from profcil.protocol.weak_task import STRENGTHS, Weakened, weaken, weakened

LABELS = np.arange(2000) % 10
SEVERE = StreamSettings(clients=20, participants=5, task_size=2, support=0.4, coverage=0.5, disorder=0.6)
ORDER = ("mild", "medium", "severe")
fractions = st.integers(0, 10).map(lambda n: n / 10)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Plan, np.ndarray, int, str]:
    clients = draw(st.integers(1, 10))
    classes = draw(st.integers(1, 8))
    shape = (clients, draw(st.integers(1, clients)), draw(st.integers(1, classes)))
    controls = draw(st.tuples(fractions, fractions, fractions))
    chosen = StreamSettings(*shape, *controls, dirichlet=draw(st.sampled_from([0.0, 0.3])))
    counts = draw(st.lists(st.integers(1, 20), min_size=classes, max_size=classes))
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(classes), counts))
    plan = make_plan(labels, classes, chosen, draw(st.integers(0, 99)))
    return plan, labels, draw(st.integers(0, plan.positions - 1)), draw(st.sampled_from(ORDER))


def samples_of(plan: Plan, client: int, task: int) -> list[int]:
    """The samples of a client and task."""
    return plan.samples(client, plan.orders[client].tolist().index(task)).tolist()


@settings(max_examples=60, deadline=None)
@given(cases())
def test_the_rest_of_the_plan_is_unchanged(case) -> None:
    plan, labels, task, strength = case
    weak = weaken(plan, labels, task, strength).plan
    assert (weak.settings, weak.seed, weak.tasks) == (plan.settings, plan.seed, plan.tasks)
    assert np.array_equal(weak.orders, plan.orders)
    for c in range(plan.clients):
        for t in range(plan.positions):
            if t != task:
                assert samples_of(weak, c, t) == samples_of(plan, c, t)
            assert set(samples_of(weak, c, t)) <= set(samples_of(plan, c, t))
    for p in range(plan.positions):
        assert weak.seen(p) == plan.seen(p)
        if np.array_equal(weak.active(p), plan.active(p)):
            assert all(participants(weak, p, r) == participants(plan, p, r) for r in range(3))


@settings(max_examples=60, deadline=None)
@given(cases())
def test_a_kept_client_keeps_its_labels_and_the_stated_share_of_each(case) -> None:
    plan, labels, task, strength = case
    weak = weaken(plan, labels, task, strength).plan
    for c in weak.supporters(task):
        before, after = (labels[samples_of(a, c, task)] for a in (plan, weak))
        for y in set(before.tolist()):
            expected = int(STRENGTHS[strength].examples * (before == y).sum() + 0.5)
            assert (after == y).sum() == max(1, expected)


@settings(max_examples=60, deadline=None)
@given(cases())
def test_the_support_assumption_holds_with_at_most_one_client_per_class(case) -> None:
    plan, labels, task, strength = case
    weak = weaken(plan, labels, task, strength).plan
    assert weak.audit()["support_assumption"]
    assert set(labels[weak.ids]) == set(labels)
    wanted = max(1, int(STRENGTHS[strength].supporters * len(plan.supporters(task)) + 0.5))
    assert wanted <= len(weak.supporters(task)) <= max(wanted, len(plan.tasks[task]))


def test_the_counts_when_every_client_observes_all_classes() -> None:
    plan = make_plan(LABELS, 10, StreamSettings(clients=8, participants=4, task_size=5), 0)
    weak = {s: weaken(plan, LABELS, 1, s) for s in ORDER}
    assert [len(weak[s].plan.supporters(1)) for s in ORDER] == [6, 4, 2]
    # 25 samples of each of 5 classes per client: 19, 13 and 6 of them are kept
    assert [int(weak[s].plan.counts[:, 1].sum()) for s in ORDER] == [6 * 5 * 19, 4 * 5 * 13, 2 * 5 * 6]
    assert [weak[s].epochs_factor for s in ORDER] == [0.75, 0.5, 0.25]


def test_stronger_interventions_keep_subsets() -> None:
    plan = make_plan(LABELS, 10, SEVERE, 3)
    kept = [set(weaken(plan, LABELS, 2, s).plan.ids.tolist()) for s in ORDER]
    assert set(plan.ids.tolist()) > kept[0] > kept[1] > kept[2]


def test_the_schedule_is_the_clean_one_without_the_dropped_clients() -> None:
    plan = make_plan(LABELS, 10, SEVERE, 3)
    weak = weaken(plan, LABELS, 2, "severe").plan
    dropped = set(np.setdiff1d(plan.supporters(2), weak.supporters(2)).tolist())
    assert dropped
    for p in range(5):
        idle = {c for c in dropped if plan.orders[c, p] == 2}
        for r in range(9):
            assert participants(weak, p, r) == tuple(c for c in participants(plan, p, r) if c not in idle)
    assert any(participants(weak, p, r) != participants(plan, p, r) for p in range(5) for r in range(9))
    assert [warmup_participants(weak, r) for r in range(9)] == [warmup_participants(plan, r) for r in range(9)]


def test_a_plan_is_weakened_only_if_the_settings_say_so() -> None:
    plan = make_plan(LABELS, 10, SEVERE, 3)
    assert weakened(plan, LABELS, SEVERE) == Weakened(plan, 1.0)
    wanted = replace(SEVERE, weak_task=2, weak_strength="medium")
    assert make_plan(LABELS, 10, wanted, 3) == plan  # the settings of the weak task do not change the draws
    found = weakened(make_plan(LABELS, 10, wanted, 3), LABELS, wanted)
    assert found == weaken(plan, LABELS, 2, "medium") and found.plan.clean == plan


def test_a_weakened_plan_can_be_saved_and_digests_of_old_plans_do_not_change(tmp_path) -> None:
    """The settings of the weak task are not in the header, so plans of earlier runs keep their digest."""
    plan = make_plan(LABELS, 10, replace(SEVERE, weak_task=2, weak_strength="mild"), 3)
    assert set(plan.header["settings"]) == {
        "clients", "participants", "task_size", "support", "coverage", "disorder", "sampler", "dirichlet"
    }  # fmt: skip
    weak = weaken(plan, LABELS, 2, "mild").plan
    weak.save(tmp_path / "plan.npz")
    again = Plan.load(tmp_path / "plan.npz")
    assert again == weak != plan and again.origin is None


def test_the_clean_plan_of_a_plan_weakened_twice_is_the_first_plan() -> None:
    plan = make_plan(LABELS, 10, SEVERE, 3)
    once = weaken(plan, LABELS, 2, "mild").plan
    assert once.origin is plan and weaken(once, LABELS, 3, "mild").plan.clean is plan


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"weak_task": 1}, "both or neither"),
        ({"weak_strength": "mild"}, "both or neither"),
        ({"weak_task": 1, "weak_strength": "sever"}, "did you mean severe"),
        ({"weak_task": -2, "weak_strength": "mild"}, "weak_task is -2"),
    ],
)
def test_a_weak_task_without_strength_or_the_reverse_is_refused(settings, message) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(SEVERE, **settings)


def test_the_only_client_with_a_class_is_kept() -> None:
    """Only client 4 has class 1, so it is kept for every seed."""
    labels = np.array([0] * 8 + [1] * 4)
    owner = np.array([0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 4, 4])
    for seed in range(20):
        plan = assemble(labels, owner, ((0, 1),), np.zeros((5, 1), int), StreamSettings(5, 5, 2), seed)
        weak = weaken(plan, labels, 0, "severe").plan
        assert 4 in weak.supporters(0) and len(weak.supporters(0)) == 2
        assert weak.audit()["support_assumption"]


def test_the_draw_depends_only_on_the_arguments() -> None:
    plan = make_plan(LABELS, 10, SEVERE, 3)
    first, again = (weaken(plan, LABELS, 2, "medium") for _ in range(2))
    assert first == again and first.plan != plan
    assert np.array_equal(plan.ids, make_plan(LABELS, 10, SEVERE, 3).ids)
    kept = set()
    for seed in range(6):
        other = assemble(LABELS, LABELS * 0, plan.tasks, plan.orders, plan.settings, seed)
        kept.add(tuple(weaken(other, LABELS, 2, "medium").plan.ids.tolist()))
    assert len(kept) == 6


def test_examples_and_clients_are_dropped_uniformly() -> None:
    """Over many seeds, each of four equal clients and each of its samples is kept about equally often."""
    labels = np.zeros(16, int)
    owner = np.repeat(np.arange(4), 4)
    kept = np.zeros(16)
    for seed in range(400):
        plan = assemble(labels, owner, ((0,),), np.zeros((4, 1), int), StreamSettings(4, 4, 1), seed)
        kept[weaken(plan, labels, 0, "medium").plan.ids] += 1
    assert abs(kept - 100).max() < 5 * (400 * 0.25 * 0.75) ** 0.5


def test_samples_outside_the_stream_remain_outside() -> None:
    labels = np.zeros(8, int)
    owner = np.array([0, -1, 0, -1, 0, -1, 0, -1])
    plan = assemble(labels, owner, ((0,),), np.zeros((1, 1), int), StreamSettings(1, 1, 1), 0)
    assert len(weaken(plan, labels, 0, "medium").plan.ids) == 2


@pytest.mark.parametrize("task", [-1, 5, 1.0, True, "1"])
def test_a_task_outside_the_plan_is_refused(task) -> None:
    with pytest.raises(ConfigError, match=r"task is .* from 0 to 4"):
        weaken(make_plan(LABELS, 10, SEVERE, 3), LABELS, task, "mild")


def test_an_unknown_strength_and_a_task_without_samples_are_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean severe"):
        weaken(make_plan(LABELS, 10, SEVERE, 3), LABELS, 1, "sever")
    one = assemble(np.zeros(3, int), np.zeros(3, int), ((0,), (1,)), np.array([[0, 1]]), StreamSettings(1, 1, 1), 0)
    with pytest.raises(ConfigError, match=r"task 1 \(counted from 0\) has no samples"):
        weaken(one, np.zeros(3, int), 1, "mild")


@pytest.mark.parametrize("wrong", [LABELS[:-1], LABELS + 1, LABELS[::-1], LABELS.astype(float), LABELS[None]])
def test_labels_of_another_dataset_are_refused(wrong) -> None:
    with pytest.raises(DataError, match="do not belong to plan"):
        weaken(make_plan(LABELS, 10, SEVERE, 3), wrong, 1, "mild")


def test_the_strengths_are_frozen() -> None:
    with pytest.raises(TypeError):
        STRENGTHS["mild"] = STRENGTHS["severe"]  # type: ignore[index]
    with pytest.raises(FrozenInstanceError):
        STRENGTHS["mild"].epochs = 1.0  # type: ignore[misc]
