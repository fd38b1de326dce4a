from __future__ import annotations

import json
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profcil.errors import ConfigError, DataError, RunFolderError
from profcil.protocol.heterogeneity import round_half_up
from profcil.protocol.plan import Plan, StreamSettings
from profcil.protocol.plan_making import assemble, make_plan

fast = settings(max_examples=40, deadline=None)
fractions = st.integers(0, 20).map(lambda n: n / 20)
SEVERE = StreamSettings(clients=20, participants=10, task_size=10, support=0.4, coverage=0.5, disorder=0.6)


@st.composite
def cases(draw: st.DrawFn) -> tuple[np.ndarray, int, StreamSettings, int]:
    clients = draw(st.integers(1, 12))
    classes = draw(st.integers(1, 10))
    chosen = StreamSettings(
        clients,
        draw(st.integers(1, clients)),
        draw(st.integers(1, classes)),
        *draw(st.tuples(fractions, fractions, fractions)),
        draw(st.sampled_from(["derange", "adjacent"])),
        draw(st.sampled_from([0.0, 0.1, 1.0])),
    )
    counts = draw(st.lists(st.integers(1, 8), min_size=classes, max_size=classes))
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(classes), counts))
    return labels, classes, chosen, draw(st.integers(0, 1000))


def cells(plan: Plan) -> list[tuple[int, int]]:
    return [(c, p) for c in range(plan.clients) for p in range(plan.positions)]


@fast
@given(cases())
def test_every_sample_is_in_exactly_one_cell_and_every_class_is_supported(case) -> None:
    labels, classes, _, _ = case
    plan = make_plan(*case)
    all_ids = np.concatenate([plan.samples(c, p) for c, p in cells(plan)])
    assert sorted(all_ids.tolist()) == list(range(len(labels)))
    assert {y for c, p in cells(plan) for y in plan.observed(c, p)} == set(range(classes))
    assert plan.audit()["support_assumption"]
    assert plan.seen(plan.positions - 1) == set(range(classes))


@fast
@given(cases())
def test_cells_contain_samples_of_their_labels(case) -> None:
    labels = case[0]
    plan = make_plan(*case)
    for c, p in cells(plan):
        ids = plan.samples(c, p)
        assert ids.tolist() == sorted(ids.tolist())
        assert plan.observed(c, p) == tuple(np.unique(labels[ids]).tolist())
        assert set(plan.observed(c, p)) <= set(plan.tasks[plan.orders[c, p]])
        assert (c in plan.active(p)) == (len(ids) > 0) == (c in plan.supporters(plan.orders[c, p]))
    for c in range(plan.clients):
        parts = [plan.samples(c, p).tolist() for p in range(plan.positions)]
        assert plan.owned(c).tolist() == sorted(i for part in parts for i in part)


@fast
@given(cases())
def test_with_enough_samples_support_and_coverage_are_exact(case) -> None:
    _, classes, chosen, seed = case
    plan = make_plan(np.repeat(np.arange(classes), 12), classes, replace(chosen, dirichlet=0.0), seed)
    grown = plan.audit()["quotas_grown"]
    for t, task in enumerate(plan.tasks):
        supporters = plan.supporters(t)
        observed = [len(plan.observed(c, list(plan.orders[c]).index(t))) for c in supporters]
        quota = max(1, round_half_up(chosen.coverage * len(task)))
        assert len(supporters) == max(1, round_half_up(chosen.support * chosen.clients))
        assert sum(observed) == quota * len(supporters) + grown[t]
        assert min(observed) == quota + grown[t] // len(supporters)


def test_the_severe_setting_gives_the_stated_fractions() -> None:
    plan = make_plan(np.repeat(np.arange(100), 40), 100, SEVERE, 1)
    facts = plan.audit()
    assert facts["support"] == [0.4] * 10
    assert facts["coverage"] == [0.5] * 10
    assert facts["disorder"] == pytest.approx(0.6)
    assert facts["idle_cells"] == 120
    assert facts["quotas_grown"] == [0] * 10
    assert json.loads(json.dumps(facts)) == facts


def test_the_homogeneous_setting_gives_every_client_all_classes() -> None:
    plan = make_plan(np.repeat(np.arange(6), 12), 6, StreamSettings(4, 4, 2), 0)
    assert (plan.orders == np.arange(3)).all()
    for p, task in enumerate(plan.tasks):
        assert plan.active(p).tolist() == [0, 1, 2, 3]
        assert plan.seen(p) == {y for t in plan.tasks[: p + 1] for y in t}
        assert all(plan.observed(c, p) == tuple(sorted(task)) for c in range(4))
        assert all(len(plan.samples(c, p)) == 6 for c in range(4))
    assert plan.audit()["idle_cells"] == plan.audit()["untaught_cells"] == 0


def test_cora_tasks_have_two_two_and_three_classes() -> None:
    plan = make_plan(np.arange(70) % 7, 7, StreamSettings(5, 5, 2), 0)
    assert [len(t) for t in plan.tasks] == [2, 2, 3]


def small_plan() -> Plan:
    """Two clients, three tasks: client 0 has data of tasks 0 and 2, client 1 of task 1."""
    orders = np.array([[0, 2, 1], [2, 0, 1]])
    owner = np.array([0, 0, 1, 0, -1])
    labels = np.array([5, 1, 3, 0, 5])
    return assemble(labels, owner, ((5, 1), (3, 2), (0, 4)), orders, StreamSettings(2, 1, 2), 0)


def test_a_small_plan_small_plan() -> None:
    plan = small_plan()
    assert [plan.seen(p) for p in range(3)] == [{5, 1, 0, 4}, {5, 1, 0, 4}, {0, 1, 2, 3, 4, 5}]
    assert plan.samples(0, 0).tolist() == [0, 1]
    assert plan.observed(0, 0) == (1, 5)
    assert plan.samples(0, 1).tolist() == [3]
    assert plan.samples(1, 2).tolist() == [2]
    assert plan.owned(0).tolist() == [0, 1, 3]
    assert [plan.active(p).tolist() for p in range(3)] == [[0], [0], [1]]


def test_the_audit_small_plan() -> None:
    facts = small_plan().audit()
    assert facts["support"] == [0.5, 0.5, 0.5]
    assert facts["coverage"] == [1.0, 0.5, 0.5]
    assert facts["disorder"] == pytest.approx(5 / 6)
    assert facts["unsupported_classes"] == [2, 4]
    assert not facts["support_assumption"]
    assert (facts["cells"], facts["idle_cells"], facts["samples"], facts["empty_clients"]) == (6, 3, 4, 0)
    assert (
        facts["untaught_cells"] == 1
    )  # client 1 has task 2 at position 0; its only data come at position 1, with client 0


@fast
@given(cases())
def test_a_plan_is_a_pure_function_of_its_arguments(case) -> None:
    labels, classes, chosen, seed = case
    plan = make_plan(*case)
    again = make_plan(labels.astype(np.uint8).tolist(), classes, replace(chosen), seed)
    assert plan == again
    assert hash(plan) == hash(again)


def test_the_seed_and_each_control_change_the_plan_independently() -> None:
    labels = np.repeat(np.arange(100), 40)
    plan = make_plan(labels, 100, SEVERE, 1)
    ordered = make_plan(labels, 100, replace(SEVERE, disorder=0.0), 1)
    assert plan != make_plan(labels, 100, SEVERE, 2)
    assert plan != ordered
    assert (plan.ids == ordered.ids).all()  # disorder does not change ownership
    wide = make_plan(labels, 100, replace(SEVERE, support=0.8), 1)
    assert (plan.orders == wide.orders).all()
    assert wide.tasks == plan.tasks


def test_the_digest_of_a_fixed_plan_does_not_change() -> None:
    chosen = StreamSettings(5, 2, 2, support=0.6, coverage=0.5, disorder=0.7)
    plan = make_plan(np.arange(35) % 7, 7, chosen, 11)
    assert plan.digest == "44b54a7eda32dc0ca3a19af4399ed701"


def test_the_digest_depends_on_every_field() -> None:
    plan = make_plan(np.arange(35) % 7, 7, StreamSettings(5, 2, 2), 11)
    changed = [
        replace(plan, settings=replace(plan.settings, participants=3)),
        replace(plan, seed=12),
        replace(plan, tasks=plan.tasks[::-1]),
        replace(plan, orders=plan.orders[:, ::-1]),
        replace(plan, ids=plan.ids[::-1]),
        replace(plan, starts=plan.starts + 1),
        replace(plan, labels=plan.labels[::-1]),
        replace(plan, label_starts=plan.label_starts + 1),
    ]
    assert len({p.digest for p in [plan, *changed]}) == 9


def test_a_plan_cannot_be_changed() -> None:
    plan = small_plan()
    with pytest.raises(FrozenInstanceError):
        plan.seed = 3  # type: ignore[misc]
    with pytest.raises(ValueError, match="read-only"):
        plan.samples(0, 0)[0] = 9


def test_save_and_load_return_the_same_plan(tmp_path: Path) -> None:
    plan = make_plan(np.repeat(np.arange(100), 10), 100, SEVERE, 1)
    plan.save(tmp_path / "plan.npz")
    again = Plan.load(tmp_path / "plan.npz")
    assert again == plan
    assert (again.settings, again.seed, again.tasks) == (plan.settings, plan.seed, plan.tasks)
    assert again.audit() == plan.audit()
    assert [f.name for f in tmp_path.iterdir()] == ["plan.npz"]


def test_a_damaged_file_is_a_data_error(tmp_path: Path) -> None:
    path = tmp_path / "plan.npz"
    small_plan().save(path)
    content = path.read_bytes()
    for damaged in (b"", b"not a plan", content[: len(content) // 2]):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match="cannot be read as a stream plan"):
            Plan.load(path)
    with pytest.raises(DataError, match="No such file"):
        Plan.load(tmp_path / "absent.npz")


def test_a_file_with_changed_content_is_refused(tmp_path: Path) -> None:
    small_plan().save(tmp_path / "plan.npz")
    with np.load(tmp_path / "plan.npz") as stored:
        arrays = dict(stored)
    np.savez(tmp_path / "other.npz", **{**arrays, "ids": arrays["ids"][::-1]})
    with pytest.raises(DataError, match="digest"):
        Plan.load(tmp_path / "other.npz")


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.npz"
    small_plan().save(path)

    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez_compressed", fail)
    with pytest.raises(RunFolderError, match="No space left"):
        make_plan([0, 1], 2, StreamSettings(2, 1, 1), 0).save(path)
    assert Plan.load(path) == small_plan()
    assert [f.name for f in tmp_path.iterdir()] == ["plan.npz"]


def test_the_description_counts_tasks_and_positions_from_one() -> None:
    text = small_plan().describe()
    rows = [line.split() for line in text.splitlines()]
    assert ["client", "p1", "p2", "p3"] in rows
    assert ["0", "1", "3", "(2)"] in rows
    assert ["1", "(3)", "(1)", "2"] in rows
    assert "task 2: classes 3 2" in text
    assert "broken by classes [2, 4]" in text
    assert "... and 1 more clients" in small_plan().describe(limit=1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"clients": 0}, "clients is 0, allowed is a whole number of at least 1"),
        ({"clients": 2.5}, "clients is 2.5"),
        ({"clients": True}, "clients is True"),
        ({"participants": 6}, "participants is 6, allowed is a whole number from 1 to 5"),
        ({"task_size": 0}, "task_size is 0"),
        ({"support": 1.4}, "support is 1.4, allowed is a number from 0 to 1; change support"),
        ({"coverage": -0.1}, "coverage is -0.1"),
        ({"disorder": float("nan")}, "disorder is nan"),
        ({"disorder": "0.5"}, "disorder is '0.5'"),
        ({"dirichlet": float("inf")}, "dirichlet is inf"),
        ({"sampler": "adjacend"}, "unknown sampler 'adjacend'; did you mean adjacent"),
    ],
)
def test_the_error_for_a_bad_setting_names_its_range(change: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        StreamSettings(**{"clients": 5, "participants": 2, "task_size": 2, **change})


@pytest.mark.parametrize("labels", [[], [[0, 1]], [0.0, 1.0], [0, 7], [-1, 0]])
def test_labels_that_are_not_class_ids_are_refused(labels: list) -> None:
    with pytest.raises(DataError, match="labels"):
        make_plan(labels, 7, StreamSettings(2, 1, 2), 0)


def test_clients_and_positions_outside_the_plan_are_refused() -> None:
    plan = small_plan()
    for call in (lambda: plan.samples(2, 0), lambda: plan.owned(-1), lambda: plan.active(3), lambda: plan.seen(-1)):
        with pytest.raises(ConfigError, match="not in the plan"):
            call()
    with pytest.raises(ConfigError, match=r"seed is 1\.5"):
        make_plan([0, 1], 2, StreamSettings(2, 1, 1), 1.5)  # type: ignore[arg-type]


def test_a_plan_for_many_clients() -> None:
    chosen = StreamSettings(20_000, 100, 5, support=0.4, coverage=0.5, disorder=0.6)
    plan = make_plan(np.arange(200_000) % 100, 100, chosen, 0)
    assert plan.audit()["disorder"] == pytest.approx(0.6)
    assert plan.counts.sum() == 200_000
    assert len(plan.describe().splitlines()) < 70
